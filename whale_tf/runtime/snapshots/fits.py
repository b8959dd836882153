"""All calls of ``fit`` since ``wh.init``: each has a folder of its own for its snapshots, by its number."""
from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any, Callable, List, Optional

import numpy as np

from whale_tf._tf_compat import tf
from whale_tf.capture.annotations import annotations_of
from whale_tf.cluster import Processes
from whale_tf.config import Snapshots as Settings
from whale_tf.errors import ClusterError, ConfigError
from whale_tf.ir.traits import RANDOM
from whale_tf.processes.functions import Functions
from whale_tf.processes.termination import Termination
from whale_tf.processes.watch import TERMINATED_STATUS, say
from whale_tf.runtime.snapshots.files import Snapshot, Store
from whale_tf.runtime.snapshots.fitting import TRAINER, Fit
from whale_tf.runtime.snapshots.pace import Pace
from whale_tf.runtime.snapshots.variables import Variables
from whale_tf.runtime.snapshots.writing import Job, Writer
from whale_tf.runtime.variable_parts import VariableParts


class Fits:
    """See the module's docstring.

    Args:
        job: functions that several processes run together; None: there is one process.

    Attributes:
        current: the call of ``fit`` that is running.
    """

    def __init__(self, settings: Settings, processes: Processes, job: Optional[Functions], parts: VariableParts,
                 termination: Termination) -> None:
        assert settings.path is not None
        self._path, self._settings = os.path.abspath(settings.path), settings
        self._processes, self._job, self._parts, self._termination = processes, job, parts, termination
        self._host = processes.host_device if processes.count > 1 else "/device:CPU:0"
        self._count = 0
        self._has_warned = False
        self._finished: List[Variables] = []  # of calls that do not train again, with values for functions still to be traced
        self.current: Optional[Fit] = None

    def fit(self, model: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Keras' ``fit``, with snapshots.

        Raises:
            ConfigError: this ``fit`` cannot have them.
            SnapshotError: the snapshots are of another model or other data.
        """
        is_keras_3 = any(kind.__module__ == TRAINER for kind in type(model).__mro__)
        if not is_keras_3 or not hasattr(sys.modules[TRAINER].TFEpochIterator, "_enumerate_iterator"):
            raise ConfigError(
                "snapshot.path is set, but snapshots are taken of the fit of Keras 3.8 and later, and this is "
                f"{type(model).__module__}.{type(model).__name__} with TensorFlow {tf.__version__}; pip install 'keras>=3.8' "
                "(TensorFlow 2.16 or later), or leave out snapshot.path and use keras.callbacks.BackupAndRestore")
        if self.current is not None:
            raise ConfigError("snapshot.path is set, but fit is called inside of another fit; call one after the other, or leave "
                              "out snapshot.path")
        number, self._count = self._count, self._count + 1
        store = Store(os.path.join(self._path, f"fit-{number}"), self._settings.keep, self._say)
        found = next(store.newest(), None)
        run = self._agree(number, found)
        is_chief = self._processes.is_chief
        gather = self._job.gather if self._job is not None else None
        writer = Writer(self._processes.count, self._processes.rank, self._host)
        pace = Pace(self._settings, gather, is_chief, lambda: self._termination.signal)
        pace.begins(0)
        variables = Variables(model, self._parts, is_chief, self._host)
        self.current = Fit(model, store, variables, writer, pace, found, run, self._end)
        first_epoch = model._initial_epoch
        try:
            given = kwargs.get("callbacks", args[5] if len(args) > 5 else None)
            if hasattr(given, "callbacks"):  # a list of Keras' own class, which fit takes as it is
                self.current.take_callbacks(given)
            with self._termination.at_steps():
                return original(*args, **kwargs)
        finally:
            fit, self.current = self.current, None
            self._finished = [one for one in (*self._finished, variables) if one.waiting]
            model._initial_epoch = first_epoch
            fit.close()

    def traced(self, graph: tf.Graph) -> None:
        """Call when a function has been made from ``graph``."""
        if self.current is not None:
            self.current.variables.traced(graph)
            draws = next((op.name for op in graph.get_operations() if op.type in RANDOM and op.op_def.is_stateful
                          and not any(tensor.dtype == tf.resource for tensor in op.inputs)), None)
            if draws is not None and annotations_of(graph).trains and not self._has_warned:
                self._has_warned = True
                self._say(f"op {draws!r} of tf.function {graph.name!r} draws random numbers from a state that TensorFlow does "
                          "not give out, so a run that goes on draws others; use keras.random or tf.random.Generator")
        for variables in self._finished:
            variables.traced(graph)

    def _say(self, text: str) -> None:
        if self._processes.is_chief:
            say(text)

    def _agree(self, number: int, found: Optional[Snapshot]) -> int:
        """The number of this run, which process 0 chooses.

        Raises:
            ClusterError: the processes have found different snapshots.
        """
        run = int(time.time() * 1000) % (1 << 40)
        if self._job is None:
            return run
        rows = np.array(self._job.gather([run, -1 if found is None else found.step]))
        if len(set(rows[:, 1])) > 1:
            steps = ", ".join("none" if step < 0 else f"step {step:.0f}" for step in rows[:, 1])
            raise ClusterError(
                f"the processes have found different snapshots of fit number {number} in {self._path!r} ({steps}, by process): "
                "all of them need the same directory (snapshot.path)")
        return int(rows[0, 0])

    def _end(self, job: Job, writer: Writer, number: int) -> None:
        """Ends this process, once the snapshot is complete; the signal was for it, or for another process.

        Raises:
            SystemExit
        """
        self._termination.is_asked = True  # maybe only another process was
        self._say("{}: snapshot of step {} is {}; ending".format(
            signal.Signals(number).name, job.step, "complete" if writer.wait_for_manifest(job) else "not complete"))
        sys.exit(TERMINATED_STATUS)
