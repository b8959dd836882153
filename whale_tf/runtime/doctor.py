"""Measures the training steps of a process for ``wh.doctor`` and ``wh.Timeline``: how long they take, and, of some, each op.

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
from whale_tf.diagnosis.record import COLLECTIVES, HOST, MESSAGE, SEND, Measured, OpTime, Ran, Record, joined
from whale_tf.errors import PlanError
from whale_tf.ir.region import Region
from whale_tf.ir.traits import PULLS
from whale_tf.parallelize import Parallelized
from whale_tf.passes.communicate import pulls_each, takes_own
from whale_tf.runtime.products import Times, product_times
from whale_tf.simulator.trace import executed_s, op_name

WARM_UP = 3  # first steps, which are not measured
EVERY = 3  # a Session traces every third step
IN_A_ROW = 3  # calls of a function that the profiler traces
_CLONE = re.compile(r"^whale(?:_\d+)?/(?:g\d+(?:_m(\d+))?(?:_r\d+)?|section)/(?=.)")
_EVENT = re.compile(r"^([\w.\-/>]+):(\w+)$")  # name of an op and its type
_OWN = re.compile(r"(^|/)whale(_\d+)?/")  # names of what whale_tf has added
_SENDER = re.compile(r"(/_\d+)?:_Send$")
_DEVICE = re.compile(r"device=([^,]+)")
SENT = " (message)"  # behind the name of the op that made the tensor
WAITING = ("_Recv", MESSAGE, *COLLECTIVES)
_LABEL = re.compile(r"= (\w+)\(")


class Event(NamedTuple):
    """An op, as it ran once; ``device``: TensorFlow's name, "" if the trace does not say."""

    name: str
    type: str
    device: str
    start_s: float
    seconds: float


class Step(NamedTuple):
    """One training step, or one call that trains.

    Attributes:
        seconds: from its beginning to that of the next one, or to a pause.
        examples: of this process' mini-batch, or mini-batches; None: nothing says it.
        is_traced: whether each op was timed, which makes it slower.
    """

    seconds: float
    examples: Optional[int]
    is_traced: bool


class Collector:
    """Measures steps until it has enough.

    Args:
        steps: number of steps to measure.
        batch: examples of a process' mini-batch; None: as the graph, its feeds or arguments say.
        assumed: the same, if nothing says it.  Only the sizes of messages follow from it; times are measured.
        finished: is given what was measured.
        traced: numbers of the steps to trace, from 1 on; None: some of those that are measured.
        each: is given every training step when it has ended, also when enough are measured.
        data_batch: examples of a full mini-batch of the data that ``fit`` trains on; None: not known.

    Attributes:
        is_over: nothing is measured any more.
    """

    def __init__(self, steps: int, batch: Optional[int], assumed: int, cluster: Cluster, processes: Processes,
                 finished: Callable[[Record], None], traced: Optional[range] = None,
                 each: Optional[Callable[[Step], None]] = None,
                 data_batch: Callable[[], Optional[int]] = lambda: None) -> None:
        self._steps, self._batch, self._assumed, self._finished = steps, batch, assumed, finished
        self._cluster, self._processes, self._chosen, self._each = cluster, processes, traced, each
        self._data_batch = data_batch
        self._last: Optional[Tuple[float, bool]] = None  # start of a measured step without period, and whether it is traced
        self._periods: List[float] = []
        self._runs: List[float] = []
        self._traces: List[List[Event]] = []
        self._done: Optional[Parallelized] = None
        self._fed: Dict[str, Tuple[int, ...]] = {}
        self._mini_batches = 1  # that a step takes from its input pipeline
        self._seen, self._is_counted, self._has_finished = 0, False, False
        self._profile, self._in_profile = "", 0  # folder, and calls that it has
        self._pending: Optional[Tuple[float, Optional[int], bool]] = None  # start of a step, its examples, whether it is traced
        self.is_over = False
        self.trains: Dict[Any, bool] = {}  # whether runs of a graph that ask for something train

    def run(self, done: Parallelized, fed: Dict[str, Tuple[int, ...]], run: Callable[[Any, Any], Any], is_free: bool) -> Any:
        """A training run of a Session, or a call of its callable.

        Args:
            fed: shapes of the values of its feeds.
            run: makes it with options and run metadata; is_free: whether the script has not asked for these itself.
        """
        if not self._begins(done, fed):
            return self._tried(lambda: run(None, None))
        traced = is_free and self._is_traced(self._seen, (self._seen - WARM_UP) % EVERY == 1)
        metadata = v1.RunMetadata() if traced else None
        options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE) if traced else None
        result = self._timed(traced, lambda: run(options, metadata))
        if metadata is not None:
            self._traces.append(list(events_of(metadata)))
        return result

    def call(self, done: Parallelized, given: Dict[str, Tuple[int, ...]], run: Callable[[], Any]) -> Any:
        """A call of a function that trains.

        Args:
            given: shapes of its arguments.
        """
        if not self._begins(done, given):
            return self._tried(run)
        traced, goes_on = (self._is_traced(seen, 1 <= seen - WARM_UP <= IN_A_ROW) for seen in (self._seen, self._seen + 1))
        if traced and not self._profile:
            self._start_profile()
        result = self._timed(traced, run)
        self._in_profile += traced
        if self._profile and not goes_on:
            self._stop_profile()
        return result

    def _tried(self, run: Callable[[], Any]) -> Any:
        """A step that fails is none: there are no more examples, for instance."""
        try:
            return run()
        except BaseException:
            self._last = self._pending = None
            self._seen -= self._is_counted
            raise

    @property
    def is_asked(self) -> bool:
        """Whether the script says which steps are traced."""
        return self._chosen is not None

    def _is_traced(self, seen: int, otherwise: bool) -> bool:
        return otherwise if self._chosen is None else seen in self._chosen

    def _start_profile(self) -> None:
        folder = tempfile.mkdtemp()
        try:
            tf.profiler.experimental.start(folder)
            self._profile = folder
        except tf.errors.OpError as error:  # the script profiles itself
            shutil.rmtree(folder)
            self._has_finished, self.is_over = True, self._each is None
            warnings.warn(f"no step is traced, because TensorFlow's profiler does not start: {error.message}")

    def _stop_profile(self) -> None:
        """Takes the trace of the calls since the profiler started."""
        tf.profiler.experimental.stop()
        self._traces += [list(profiled(self._profile))] + [[]] * (self._in_profile - 1)
        shutil.rmtree(self._profile)
        self._profile = ""

    def pause(self) -> None:
        """Says that what follows is no part of a training step: a validation, for example."""
        if self._pending is not None and self._each is not None and not self.is_over:
            began, examples, traced = self._pending
            self._each(Step(time.perf_counter() - began, examples, traced))
        self._last = self._pending = None

    def close(self) -> None:
        """Ends the measurement, if it has not ended, with the steps that there were."""
        self.pause()
        if self._profile:
            self._stop_profile()
        self.is_over = True
        self._finish()

    def _finish(self) -> None:
        """Gives what was measured, once."""
        if not self._has_finished:
            self._has_finished = True
            self.is_over = self.is_over or self._each is None
            if self._done is not None and self._traces and self._periods:
                self._finished(self.record())

    def _begins(self, done: Parallelized, given: Dict[str, Tuple[int, ...]]) -> bool:
        """Whether this step is measured.

        Args:
            given: shapes of feeds or arguments.

        Raises:
            PlanError: nothing can be said of this graph.
        """
        if self.is_over or not done.captured.gradients or (self._done is not None and not self._is_same(done)):
            return False  # an evaluation, or not the first graph that trains
        if self._done is None:
            if done.decision is None:
                raise PlanError("wh.doctor() was called, or wh.Timeline() was made, after the step was divided; do it right "
                                "after wh.init()")
            self._done = done
            own, here = done.decision, done.emitted.context.plan if done.emitted is not None else done.plan
            if takes_own(own.captured.step(own.region), here):
                self._mini_batches = here.num_model_replicas * pulls_each(here)
        now = time.perf_counter()
        if self._last is not None and not self._last[1]:
            self._periods.append(now - self._last[0])
        self.pause()
        is_first = self._is_counted = done is self._done  # not the same function, traced for mini-batches of another size
        if is_first:
            self._fed = given
            self._seen += 1
            if self._seen > WARM_UP + self._steps:
                self._finish()
        if self._each is not None:
            examples, traced = self._examples(done, given), self._is_traced(self._seen, False)
            self._pending = time.perf_counter(), None if examples is None else examples * self._mini_batches, traced
        return is_first and not self._has_finished and self._seen > WARM_UP

    def _is_same(self, done: Parallelized) -> bool:
        """Whether a graph is the measured one, or another trace of the same function."""
        one, other = (each.emitted.context.tf_graph if each is not None and each.emitted is not None else None
                      for each in (done, self._done))
        return one is other or getattr(one, "name", None) == getattr(other, "name", "")

    def _timed(self, traced: bool, run: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        self._last = began, traced
        result = self._tried(run)
        if not traced:
            self._runs.append(time.perf_counter() - began)
        return result

    def record(self) -> Record:
        """What was measured."""
        done = self._done
        assert done is not None and done.decision is not None and done.emitted is not None
        captured, plan = done.decision.captured, done.plan
        batch = self._examples(done, self._fed) or self._assumed
        region = done.decision.region._replace(graph=captured.sized(batch))
        step = step_graph(captured, region, "step", plan.graph, batch)
        own_devices = plan.processes[self._processes.rank] if plan.processes else range(plan.num_devices)
        named = _Names(done, [op.name for op in step.ops], own_devices)
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
        collective_s, message_s = (sum(exchanging_seconds(trace, types) for trace in traces) / count
                                   for types in (COLLECTIVES, (MESSAGE,)))
        own = Measured(self._processes.rank, len(self._periods), count, statistics.median(self._periods),
                       statistics.median(self._runs), stalled_s, ops, _timeline(_middle(traces), named), collective_s,
                       message_s, self._products(region, ops))
        return Record(plan, step, self._cluster, cores(self._on_this_machine()), (own,))

    def _products(self, region: Region, ops: Sequence[OpTime]) -> Times:
        """Products of the step with other numbers of micro-batches."""
        done = self._done
        assert done is not None and done.decision is not None and done.emitted is not None
        here = done.emitted.context.plan
        if here.num_micro_batch == 1:
            return ()
        sharing = 1 if self._mini_batches > 1 else here.num_model_replicas
        device = tf.DeviceSpec.from_string(done.emitted.context.devices[0])
        where = f"/device:{device.device_type}:{device.device_index or 0}"
        return product_times(done.decision.captured.definitions, region, here, sharing, ops, where)

    def _on_this_machine(self) -> int:
        """The number of processes with CPU devices on this process' machine."""
        devices, processes = self._cluster.devices, self._done.plan.processes if self._done is not None else ()
        nodes = [{devices[device].node for device in own if devices[device].kind == "CPU"} for own in processes]
        return sum(bool(node & nodes[self._processes.rank]) for node in nodes) if nodes else 1

    def _examples(self, done: Parallelized, given: Dict[str, Tuple[int, ...]]) -> Optional[int]:
        """Examples of a process' mini-batch; None: nothing says it.

        Args:
            given: shapes of feeds or arguments.
        """
        captured = (done.decision or done).captured
        return self._batch or captured.examples_of(given) or captured.examples or self._data_batch()


def _middle(traces: Sequence[List[Event]]) -> List[Event]:
    """One of the traced steps; of a profile, which has several in one, that."""
    known = [trace for trace in traces if trace]
    return known[len(known) // 2]


class _Names:
    """What the ops that ran are called in the local script, and on which of the plan's devices they are.

    Args:
        known: names of the step's ops, the parts of divided ones apart.
        own: the process' devices; ops that ask for none run on the first one.
    """

    def __init__(self, done: Parallelized, known: Iterable[str], own: Sequence[int]) -> None:
        assert done.emitted is not None
        context = done.emitted.context
        self._known = set(known)
        self._numbers = {_canonical(name): number for number, name in enumerate(context.devices[:done.plan.num_devices])}
        self._asked = {op.name: op.device or context.devices[own[0]] for op in context.tf_graph.get_operations()}
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

    def micro_batch(self, event: Event) -> int:
        """-1: it belongs to none."""
        found = _CLONE.match(self._script_name(event.name)[0])
        return int(found.group(1)) if found is not None and found.group(1) else -1

    def is_of_step(self, event: Event) -> bool:
        """Whether an op is of the step, not of the input pipeline, whose ops the profiler sees too."""
        return bool(event.device) or self._script_name(event.name)[0] in self._asked

    def _script_name(self, name: str) -> Tuple[str, str]:
        """The op's name in the rewritten graph, and in the local script; of a message that of the op that made its tensor, which
        in the script's name is marked.  Where functions were inlined, the names of their calls come first."""
        made, mark, _ = name.partition(SENT)
        parts = made.split("/")
        for first in range(len(parts)):
            own = "/".join(parts[first:])
            if own in self._asked:
                return own, _CLONE.sub("", own) + mark
        return name, _CLONE.sub("", name)


def _timeline(events: Sequence[Event], named: _Names) -> Tuple[Ran, ...]:
    """The ops of one step, of a trace of one or several."""
    ordered = sorted(events, key=lambda event: event.start_s)
    runs: Dict[Tuple[str, str], int] = {}
    for event in ordered:
        runs[event.name, event.device] = runs.get((event.name, event.device), 0) + 1
    several = 1 if any(event.device for event in ordered) else min(runs.values(), default=1)
    seen: Dict[Tuple[str, str], int] = {}
    step: List[Event] = []  # the one in the middle: what starts and ends a profiler disturbs the others
    for event in ordered:
        key = event.name, event.device
        each = max(1, runs[key] // several)
        if seen.setdefault(key, 0) // each == several // 2:
            step.append(event)
        seen[key] += 1
    found = []
    for event in step:
        name, kind, device, _ = named.of(event)
        if device != HOST:
            found.append(Ran(name, kind, device, event.start_s - step[0].start_s, event.seconds, named.micro_batch(event)))
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
    for node in (node for device, nodes in rows.items() if device.startswith("/host:") for node in nodes):
        where = _DEVICE.search(node.timeline_label)
        if node.node_name.endswith(":_Send") and where is not None:  # 1.15; later ones do not say it
            offset_s, seconds = executed_s(node)
            yield Event(_made_by(node.node_name), SEND, where.group(1), node.all_start_micros * 1e-6 + offset_s, seconds)
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
    return found.group(1) + SENT if found else node.node_name


def _made_by(name: str) -> str:
    """The same of the op that sends it within a process, ``NAME/_12:_Send``."""
    return _SENDER.sub("", name) + SENT


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
                        name = _made_by(text) if found.group(2) == SEND else op_name(found.group(1))
                        yield Event(name, found.group(2), "", start_s, seconds)


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
