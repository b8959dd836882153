"""Measures the training steps of a process for ``wh.doctor``: how long they take, and, of some of them, each op.

Steps of Sessions are traced by their ``RunMetadata``, calls of functions by TensorFlow's profiler.  A traced step is slower than
others, so that periods are those of steps without a trace.
"""
from __future__ import annotations

import glob
import os
import re
import shutil
import statistics
import tempfile
import time
import warnings
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import profiled_space, tf, v1
from whale_tf.capture.step import step_graph
from whale_tf.cluster import Cluster, Processes
from whale_tf.diagnosis.record import COLLECTIVES, HOST, MESSAGE, Measured, OpTime, Ran, Record, joined
from whale_tf.errors import PlanError
from whale_tf.ir.traits import PULLS
from whale_tf.parallelize import Parallelized
from whale_tf.simulator.trace import executed_s, op_name

WARM_UP = 3  # first steps, which are not measured
EVERY = 3  # a Session traces every third step
IN_A_ROW = 3  # calls of a function that the profiler traces
_CLONE = re.compile(r"^whale(_\d+)?/(g\d+(_m\d+)?(_r\d+)?|section)/(?=.)")
_EVENT = re.compile(r"^([\w.\-/>]+):(\w+)$")  # name of an op and its type
_OWN = re.compile(r"(^|/)whale(_\d+)?/")  # names of what whale_tf has added
WAITING = ("_Recv", MESSAGE, *COLLECTIVES)
_LABEL = re.compile(r"= (\w+)\(")


class Event(NamedTuple):
    """An op, as it ran once; ``device``: TensorFlow's name, "" if the trace does not say."""

    name: str
    type: str
    device: str
    start_s: float
    seconds: float


class Collector:
    """Measures steps until it has enough.

    Args:
        steps: number of steps to measure.
        batch: examples of a process' mini-batch; None: as the graph or its feeds say.
        assumed: the same, if nothing says it.  Only the sizes of messages follow from it; times are measured.
        finished: is given what was measured.
    """

    def __init__(self, steps: int, batch: Optional[int], assumed: int, cluster: Cluster, processes: Processes,
                 finished: Callable[[Record], None]) -> None:
        self._steps, self._batch, self._assumed, self._finished = steps, batch, assumed, finished
        self._cluster, self._processes = cluster, processes
        self._starts: List[Tuple[float, bool]] = []  # of each step, and whether it was traced
        self._runs: List[float] = []
        self._traces: List[List[Event]] = []
        self._done: Optional[Parallelized] = None
        self._fed: Dict[str, Tuple[int, ...]] = {}
        self._seen, self._is_inside = 0, False
        self._profile = ""
        self.is_over = False
        self.trains: Dict[Any, bool] = {}  # whether runs of a graph that ask for something train

    def run(self, done: Parallelized, fed: Dict[str, Tuple[int, ...]], run: Callable[[Any, Any], Any], is_free: bool) -> Any:
        """A training run of a Session, or a call of its callable.

        Args:
            fed: shapes of the values of its feeds.
            run: makes it with options and run metadata; is_free: whether the script has not asked for these itself.
        """
        if self._is_inside:  # TensorFlow makes a run of the call of a callable with feeds
            return run(None, None)
        self._is_inside = True
        try:
            return self._run(done, fed, run, is_free)
        finally:
            self._is_inside = False

    def _run(self, done: Parallelized, fed: Dict[str, Tuple[int, ...]], run: Callable[[Any, Any], Any], is_free: bool) -> Any:
        if not self._begins(done):
            return run(None, None)
        self._fed = fed
        traced = is_free and (self._seen - WARM_UP) % EVERY == 1
        metadata = v1.RunMetadata() if traced else None
        options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE) if traced else None
        result = self._timed(traced, lambda: run(options, metadata))
        if metadata is not None:
            self._traces.append(list(events_of(metadata)))
        return result

    def call(self, done: Parallelized, run: Callable[[], Any]) -> Any:
        """A call of a function that trains."""
        if not self._begins(done):
            return run()
        place = self._seen - WARM_UP
        traced = 1 <= place <= IN_A_ROW
        if place == 1:
            self._start_profile()
        result = self._timed(traced, run)
        if place == IN_A_ROW and self._profile:
            tf.profiler.experimental.stop()
            self._traces += [list(profiled(self._profile))] + [[]] * (IN_A_ROW - 1)
            shutil.rmtree(self._profile)
            self._profile = ""
        return result

    def _start_profile(self) -> None:
        folder = tempfile.mkdtemp()
        try:
            tf.profiler.experimental.start(folder)
            self._profile = folder
        except tf.errors.OpError as error:  # the script profiles itself
            shutil.rmtree(folder)
            self.is_over = True
            warnings.warn(f"wh.doctor() measures nothing, because TensorFlow's profiler does not start: {error.message}")

    def close(self) -> None:
        """Ends the measurement, if it has not ended, with the steps that there were."""
        if self._profile:
            tf.profiler.experimental.stop()
            shutil.rmtree(self._profile)
            self._profile = ""
        if not self.is_over:
            self.is_over = True
            if self._done is not None and self._traces and len(self._starts) > 2:
                self._finished(self.record())

    def _begins(self, done: Parallelized) -> bool:
        """Whether this step is measured.

        Raises:
            PlanError: nothing can be said of this graph.
        """
        if self.is_over or (self._done is not None and self._done is not done):  # the first graph that trains
            return False
        if self._done is None:
            if done.decision is None:
                raise PlanError("wh.doctor() was called after the step was divided; call it right after wh.init()")
            self._done = done
        self._seen += 1
        if self._seen > WARM_UP + self._steps:
            self._starts.append((time.perf_counter(), False))
            self.close()
            return False
        return self._seen > WARM_UP

    def _timed(self, traced: bool, run: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        self._starts.append((began, traced))
        result = run()
        if not traced:
            self._runs.append(time.perf_counter() - began)
        return result

    def record(self) -> Record:
        """What was measured."""
        done = self._done
        assert done is not None and done.decision is not None and done.emitted is not None
        captured, plan = done.decision.captured, done.plan
        batch = self._examples()
        region = done.decision.region._replace(graph=captured.sized(batch))
        step = step_graph(captured, region, "step", plan.graph, batch)
        periods = [later - start for (start, traced), (later, _) in zip(self._starts, self._starts[1:]) if not traced]
        named = _Names(done, [op.name for op in step.ops])
        totals: Dict[Tuple[str, str, int, bool], List[float]] = {}
        traces = usual([[event for event in trace if event.type in PULLS or named.is_of_step(event)] for trace in self._traces])
        for event in (event for trace in traces for event in trace):
            total = totals.setdefault(named.of(event), [0.0, 0.0])
            total[0] += 1
            total[1] += event.seconds
        count = len(traces)
        stalls = list(map(stalled_seconds, traces))
        stalled_s = statistics.median(stalls) if all(traces) else sum(stalls) / count
        ops = tuple(OpTime(name, kind, device, runs / count, seconds / count, known)
                    for (name, kind, device, known), (runs, seconds) in totals.items())
        exchanging = [sum(exchanging_seconds(trace, types) for trace in traces) / count for types in (COLLECTIVES, (MESSAGE,))]
        own = Measured(self._processes.rank, len(periods), count, statistics.median(periods), statistics.median(self._runs),
                       stalled_s, ops, _timeline(_middle(traces), named), *exchanging)
        return Record(plan, step, self._cluster, cores(self._on_this_machine()), (own,))

    def _on_this_machine(self) -> int:
        """The number of processes with CPU devices on this process' machine."""
        devices, processes = self._cluster.devices, self._done.plan.processes if self._done is not None else ()
        nodes = [{devices[device].node for device in own if devices[device].kind == "CPU"} for own in processes]
        return sum(bool(node & nodes[self._processes.rank]) for node in nodes) if nodes else 1

    def _examples(self) -> int:
        assert self._done is not None and self._done.decision is not None
        captured = self._done.decision.captured
        fed = [self._fed[name][dim] for name, dim in ((captured.graph.tensor_name(tensor), dim)
                                                      for tensor, dim in captured.sources.items()) if name in self._fed]
        return self._batch or captured.examples or next(iter(fed), self._assumed)


def _middle(traces: Sequence[List[Event]]) -> List[Event]:
    """One of the traced steps; of a profile, which has several in one, that."""
    known = [trace for trace in traces if trace]
    return known[len(known) // 2]


class _Names:
    """What the ops that ran are called in the local script, and on which of the plan's devices they are.

    Args:
        known: names of the step's ops, the parts of divided ones apart.
    """

    def __init__(self, done: Parallelized, known: Iterable[str]) -> None:
        assert done.emitted is not None
        context = done.emitted.context
        self._known = set(known)
        self._numbers = {_canonical(name): number for number, name in enumerate(context.devices[:done.plan.num_devices])}
        self._asked = {op.name: op.device for op in context.tf_graph.get_operations()}
        self._found: Dict[Tuple[str, str, str], Tuple[str, str, int, bool]] = {}

    def of(self, event: Event) -> Tuple[str, str, int, bool]:
        """(name, type, device's number, whether it is an op of the script)."""
        key = event.name, event.type, event.device
        if key not in self._found:
            own, name = self._script_name(event.name)
            device = event.device or self._asked.get(own, "")
            number = self._numbers.get(_canonical(device), HOST)
            self._found[key] = name, event.type, number, name in self._known
        return self._found[key]

    def is_of_step(self, event: Event) -> bool:
        """Whether an op is of the step, not of the input pipeline, whose ops the profiler sees too."""
        return bool(event.device) or self._script_name(event.name)[0] in self._asked

    def _script_name(self, name: str) -> Tuple[str, str]:
        """The op's name in the rewritten graph, and in the local script.  Where functions were inlined, the names of their calls
        come first."""
        parts = name.split("/")
        for first in range(len(parts)):
            own = "/".join(parts[first:])
            if own in self._asked:
                return own, _CLONE.sub("", own)
        return name, _CLONE.sub("", name)


def _timeline(events: Sequence[Event], named: _Names) -> Tuple[Ran, ...]:
    """The ops of one step, of a trace of one or several."""
    ordered = sorted(events, key=lambda event: event.start_s)
    runs: Dict[Tuple[str, str], int] = {}
    for event in ordered:
        runs[event.name, event.device] = runs.get((event.name, event.device), 0) + 1
    several = 1 if any(event.device for event in ordered) else min(runs.values(), default=1)
    left = {key: max(1, count // several) for key, count in runs.items()}
    found = []
    for event in ordered:
        left[event.name, event.device] -= 1
        name, kind, device, _ = named.of(event)
        if left[event.name, event.device] >= 0 and device != HOST:
            found.append(Ran(name, kind, device, event.start_s - ordered[0].start_s, event.seconds))
    return tuple(found)


def _canonical(device: str) -> str:
    """Kind and number of a device, with its process."""
    if not device:
        return ""
    spec = tf.DeviceSpec.from_string(device)
    job = "" if spec.job in (None, "localhost") else f"{spec.job}:{spec.task or 0}/"
    return f"{job}{spec.device_type}:{spec.device_index or 0}"


def events_of(metadata: Any) -> Iterable[Event]:
    """The ops of a traced run.  For GPUs: what they computed and copied, not when the host launched it."""
    rows: Dict[str, List[Any]] = {}  # messages are in rows of their own
    for row in metadata.step_stats.dev_stats:
        rows.setdefault(row.device, []).extend(row.node_stats)
    streams = {device.partition("/stream:")[0] for device in rows if device.endswith("stream:all")}
    for device, nodes in rows.items():
        on = device.partition("/stream:")[0]
        if "/device:" not in device or (on in streams) != device.endswith("stream:all"):
            continue
        for node in nodes:
            offset_s, seconds = executed_s(node)
            copied = re.search(r"MEMCPY[DH]to[DH]", node.node_name + node.timeline_label)
            label = _LABEL.search(node.timeline_label)
            kind = copied.group(0) if copied else label.group(1) if label else MESSAGE * (node.node_name == MESSAGE)
            name = _sent(node) if kind == MESSAGE else op_name(node.node_name)
            yield Event(name, kind, on, node.all_start_micros * 1e-6 + offset_s, seconds)


def _sent(node: Any) -> str:
    """What a timeline calls a message: after the op that made its tensor, of ``[1.0MB] [900.0Mb/s] edge_7_NAME from ... to ...``.
    The op itself has another name, because its time is not the message's."""
    found = re.search(r"\] (?:edge_\d+_)?(\S+) from ", node.timeline_label)
    return f"{found.group(1)} (message)" if found else node.node_name


def profiled(folder: str) -> Iterable[Event]:
    """The ops of a trace of TensorFlow's profiler."""
    for path in glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True):
        for plane in profiled_space(path).planes:
            for line in plane.lines:
                for event in line.events:
                    text = plane.event_metadata[event.metadata_id].name
                    found = _EVENT.match(text)
                    start_s, seconds = line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12, event.duration_ps * 1e-12
                    if text.startswith("IteratorGetNext") and "::" in text:
                        yield Event("IteratorGetNext", "IteratorGetNext", "", start_s, seconds)
                    elif found is not None and found.group(2) not in PULLS:
                        yield Event(op_name(found.group(1)), found.group(2), "", start_s, seconds)


def stalled_seconds(events: Sequence[Event]) -> float:
    """How long the input pipeline's next element was waited for, and nothing was computed.  That a message between processes is
    waited for, which is in a queue too, is neither."""
    spans = [(one.type in PULLS, (one.start_s, one.start_s + one.seconds)) for one in events
             if not (_OWN.search(one.name) and one.type in PULLS) and not one.type.startswith(WAITING)]
    pulls, others = (joined([span for is_pull, span in spans if is_pull == wanted]) for wanted in (True, False))
    shared, place = 0.0, 0
    for start, end in pulls:
        while place < len(others) and others[place][1] <= start:
            place += 1
        for other_start, other_end in others[place:]:
            if other_start >= end:
                break
            shared += min(end, other_end) - max(start, other_start)
    return sum(end - start for start, end in pulls) - shared


def exchanging_seconds(events: Sequence[Event], types: Tuple[str, ...]) -> float:
    """How long collectives or messages were under way, several at once counted once.

    Args:
        types: beginnings of their types.
    """
    return sum(end - start for start, end in joined(
        (one.start_s, one.start_s + one.seconds) for one in events if one.type.startswith(types)))


def usual(traces: Sequence[List[Event]]) -> List[List[Event]]:
    """The traced steps without the longest and the shortest fifth: what else ran on the machine then says nothing of the step."""
    if not all(traces):  # a profile has several steps in one trace
        return list(traces)
    ordered = sorted(traces, key=lambda trace: sum(event.seconds for event in trace))
    return ordered[len(traces) // 5:len(traces) - len(traces) // 5]


def cores(processes: int = 1) -> int:
    """The CPU cores that this process may use.  Processes of one machine that may use all of them share them.

    Args:
        processes: their number on this machine.
    """
    every = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    return own if own < every else max(1, every // processes)
