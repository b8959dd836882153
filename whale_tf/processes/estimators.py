"""Estimators: what does not train (evaluation, prediction, export) runs apart, on all data, with variables of its own.

In a job of several processes, each trains as in a Session of the script's own: TensorFlow's distributed mode, with its chief and
its parameter servers, is left out.  Process 0 alone writes checkpoints, so the others leave ``train`` when its last one is
complete.
"""
from __future__ import annotations

import json
import os
import weakref
from typing import Any, Callable, Dict, MutableMapping, MutableSet, Optional, Tuple

import numpy as np

from whale_tf._tf_compat import tf, v1
from whale_tf.cluster import Processes
from whale_tf.errors import ClusterError
from whale_tf.processes.runtime import Runtime

TRAIN, EVALUATOR = "train", "evaluator"


def local_settings(tf_config: Dict[str, Any], processes: Processes) -> Dict[str, Any]:
    """What a RunConfig may know of TF_CONFIG.  A process that trains knows of no other, nor of itself as the only worker, which
    TensorFlow refuses.  An evaluator needs a chief: in a job without one, the first worker."""
    task, cluster = tf_config.get("task", {}), tf_config.get("cluster", {})
    if task.get("type") == EVALUATOR and cluster and not {"chief", "master"} & set(cluster):
        return dict(tf_config, cluster={"chief": list(cluster.get("worker", ()))[:1]})
    is_alone = set(cluster) == {"worker"} and len(cluster["worker"]) == 1 and task.get("type") == "worker"
    if processes.count > 1 or is_alone:
        return {key: value for key, value in tf_config.items() if key not in ("cluster", "task")}
    return tf_config


class Estimators:
    """The Estimators of a process.

    Attributes:
        apart: graphs that run as they are, whatever the script trains.
    """

    def __init__(self, processes: Processes, runtime: Optional[Runtime]) -> None:
        self._processes = processes
        self._runtime = runtime
        self.apart: MutableSet[tf.Graph] = weakref.WeakSet()
        self._latest: MutableMapping[Any, str] = weakref.WeakKeyDictionary()  # process 0's last checkpoint of an Estimator

    def begin(self, estimator: Any, graph: tf.Graph, mode: str) -> None:
        """An Estimator begins to build ``graph``.

        Raises:
            ClusterError: the graph needs a checkpoint that process 0 has written where this process does not see it.
        """
        if mode == TRAIN:
            return
        self.apart.add(graph)
        latest = self._latest.get(estimator, "")
        if latest and not v1.gfile.Glob(latest + "*"):
            raise ClusterError(
                f"process 0 has written the checkpoint {latest}, which process {self._processes.rank} does not see; give the "
                "Estimator a model_dir that all processes can read")

    def train(self, estimator: Any, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """``Estimator.train``.  Process 0's directory is that of all, since it alone writes."""
        runtime, before = self._runtime, self._sessions()
        result = original(*args, **kwargs)
        if runtime is not None and self._sessions() > before:
            latest = runtime.tell((estimator.latest_checkpoint() or "").encode()).decode()
            if latest:
                estimator._model_dir = os.path.dirname(latest)
                self._latest[estimator] = latest
        return result

    def checkpoint_saved(self, listener: Any, original: Callable, step: int) -> None:
        """Process 0 evaluates; meanwhile the others wait for it in the next step."""
        if self._processes.is_chief:
            original(step)
        else:
            listener._timer.update_last_triggered_step(step)

    def train_and_evaluate(self, executor: Any, original: Callable) -> Tuple[Any, Any]:
        """``tf.estimator.train_and_evaluate``: every process returns process 0's last evaluation."""
        runtime, before = self._runtime, self._sessions()
        result: Tuple[Any, Any] = original()
        if runtime is not None and self._sessions() > before:
            result = _from_text(runtime.tell(_to_text(result)))
        return result

    def _sessions(self) -> int:
        """Number of Sessions so far in which this process has trained beside the others."""
        return 0 if self._runtime is None else self._runtime.sessions


def _to_text(result: Tuple[Any, Any]) -> bytes:
    """The result of ``train_and_evaluate`` as JSON: metrics by name with their types, and what the exporters give, which are
    paths."""
    metrics, exports = result
    values = {name: np.asarray(value) for name, value in (metrics or {}).items()}
    binary = {name: value.item().decode("latin1") for name, value in values.items() if isinstance(value.item(0), bytes)}
    return json.dumps({
        "metrics": None if metrics is None else {
            name: [value.dtype.str, value.tolist()] for name, value in values.items() if name not in binary},
        "binary": binary,
        "exports": None if exports is None else [
            [isinstance(path, bytes), tf.compat.as_str(path)] if isinstance(path, (str, bytes)) else None for path in exports],
    }).encode()


def _from_text(text: bytes) -> Tuple[Any, Any]:
    """What :func:`_to_text` wrote; an exporter's result that is no path is None."""
    given = json.loads(text.decode())
    metrics = given["metrics"]
    if metrics is not None:
        metrics = {name: np.asarray(value, dtype)[()] for name, (dtype, value) in metrics.items()}
        metrics.update((name, value.encode("latin1")) for name, value in given["binary"].items())
    exports = given["exports"]
    if exports is not None:
        exports = [None if path is None else tf.compat.as_bytes(path[1]) if path[0] else path[1] for path in exports]
    return metrics, exports
