"""EPL's profiler hooks.  They write JSON and no pictures; :func:`whale_tf.explain` and ``whale profile`` say more."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List, Sequence, Union

from whale_tf._tf_compat import tf, v1
from whale_tf.capture.captured import capture
from whale_tf.errors import AnnotationError
from whale_tf.ir.graph import OpGraph
from whale_tf.profiler.op_cost import op_costs
from whale_tf.runtime.active import current

COMMANDS = ("scope", "op", "graph")


def profile_memory(run_metadata: Any, prefix_name: str = "", visualize: bool = True) -> List[Dict[str, Any]]:
    """Peak memory of each device in a traced step, from TensorFlow's allocation records.

    Args:
        run_metadata: of a run with ``trace_level=FULL_TRACE``.
        prefix_name: path before the file names.
        visualize: write the allocations of each device as JSON, ``<prefix>_<device>.json``.

    Returns:
        For each device with records: ``device``, ``peak_memory`` and ``persist`` (both bytes).
    """
    found = []
    for device in run_metadata.step_stats.dev_stats:
        records, in_use, persist = [], 0, 0
        for node in device.node_stats:
            persist += node.memory_stats.persistent_memory_size
            for memory in node.memory:
                in_use = max(in_use, memory.allocator_bytes_in_use)
                records += [(record.alloc_micros, record.alloc_bytes, node.node_name) for record in memory.allocation_records]
        total = peak = 0
        for _, size, _ in sorted(records):
            total += size
            peak = max(peak, total)
        peak = max(peak, in_use)
        if peak <= 0:
            continue
        found.append({"device": device.device, "peak_memory": peak, "persist": persist})
        if visualize:
            path = f"{prefix_name}_{device.device.strip('/').replace('/', '_').replace(':', '-')}.json"
            with v1.gfile.Open(path, "w") as file:
                file.write(json.dumps([{"time_us": time, "bytes": size, "op": name} for time, size, name in sorted(records)]))
    return found


class MemoryProfilerHook(v1.train.SessionRunHook):
    """Traces every ``save_steps``-th step up to ``max_steps`` and writes the devices' peaks to
    ``<output_dir>/profile_step_<step>.json``.

    Args:
        visualize: also write the allocations, see :func:`profile_memory`.
        dump_metadata: also write TensorFlow's RunMetadata, a protocol buffer, to ``run_metadata_<step>.pb``.

    Raises:
        AnnotationError: ``save_steps`` is larger than ``max_steps``.
    """

    def __init__(self, save_steps: int = 1, max_steps: int = 5, output_dir: str = "", visualize: bool = True,
                 dump_metadata: bool = False) -> None:
        if save_steps > max_steps:
            raise AnnotationError(f"MemoryProfilerHook: save_steps is {save_steps}, expected at most max_steps, {max_steps}")
        self._every, self._last, self._directory = save_steps, max_steps, output_dir
        self._visualize, self._dumps, self._step = visualize, dump_metadata, 0

    def begin(self) -> None:
        self._global_step = v1.train.get_or_create_global_step()
        if self._directory:
            v1.gfile.MakeDirs(self._directory)

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._step = int(session.run(self._global_step))

    def before_run(self, run_context: Any) -> Any:
        self._step += 1
        self._traces = self._step <= self._last and self._step % self._every == 0
        options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE) if self._traces else None
        return v1.train.SessionRunArgs({}, options=options)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if not self._traces:
            return
        prefix = os.path.join(self._directory, f"profile_step_{self._step}")
        found = profile_memory(run_values.run_metadata, prefix, self._visualize)
        with v1.gfile.Open(prefix + ".json", "w") as file:
            file.write(json.dumps(found))
        if self._dumps:
            with v1.gfile.Open(os.path.join(self._directory, f"run_metadata_{self._step}.pb"), "wb") as file:
                file.write(run_values.run_metadata.SerializeToString())


def profile_flops(sess: Any, run_metadata: Any = None, cmds: Union[str, Sequence[str]] = "scope") -> float:
    """Floating-point operations of one run of the script's own graph, before it is divided, forward, backward and update; a
    multiply-add is two.  Sizes that the graph leaves open count as 1.

    Args:
        cmds: EPL's views, ``scope``, ``op`` and ``graph``, which all have the same total.
    """
    total = sum(cost.flops for cost in op_costs(local_graph(sess.graph), 1))
    for command in [cmds] if isinstance(cmds, str) else cmds:
        v1.logging.info(f"cmd: {command},  Number of FLOPs: {total / 1e9}G")
    return total


class FlopsProfilerHook(v1.train.SessionRunHook):
    """Logs :func:`profile_flops` after the first run.

    Raises:
        AnnotationError: a command that EPL does not have.
    """

    def __init__(self, cmds: Union[str, Sequence[str]] = "scope") -> None:
        self.cmds = [cmds] if isinstance(cmds, str) else list(cmds)
        wrong = [command for command in self.cmds if command not in COMMANDS]
        if wrong:
            raise AnnotationError(f"FlopsProfilerHook: cmds has {wrong[0]!r}, expected some of {', '.join(COMMANDS)}")
        self.done = False

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if not self.done:
            self.done = True
            profile_flops(run_context.session, cmds=self.cmds)


def local_graph(graph: tf.Graph) -> OpGraph:
    """The ops of the script's own graph, before it was divided."""
    state = current()
    done = None if state is None else state.done.get(graph)
    return done.captured.graph if done is not None else capture(graph).graph
