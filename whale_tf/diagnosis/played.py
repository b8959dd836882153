"""The Program of a measured step, played by the simulator with the measured times of its ops, and again after a change.

A GPU does one op at a time, in the order of the Program.  The CPU devices of a process share its pool of threads, one for each
core that it may use: two ops of one device can run at once, and ops of two devices wait for each other.  An op takes what it took
on average on its device.  The ops that whale_tf added there (sums of gradients, parts of mini-batches) take together what they
took together.  Messages take what the simulator gives them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Callable, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Tuple

from whale_tf.diagnosis.record import COLLECTIVES, HOST, MESSAGE, OpTime, Record, joined
from whale_tf.ir.layout import SHARDED
from whale_tf.ir.traits import Role, traits
from whale_tf.plan import Plan
from whale_tf.program import CLONED
from whale_tf.simulator.captured import captured_step
from whale_tf.simulator.costs import OpEstimator
from whale_tf.simulator.engine import Times, run
from whale_tf.simulator.instructions import COMPUTATION
from whale_tf.simulator.model_graph import OPTIMIZERS, ModelGraph
from whale_tf.simulator.network import Network
from whale_tf.simulator.renumbering import beside_hosts
from whale_tf.simulator.simulate import gamma_of
from whale_tf.simulator.step_graph import StepGraph, StepOp
from whale_tf.simulator.transformation import Group


class Task(NamedTuple):
    """An op on a device, or (``op`` None) a message, a sum or another part of a recipe; ``senders``: the processes that send it
    to others; ``micro_batch`` -1: it belongs to none."""

    name: str
    device: int
    task_graph: int
    lane: int
    op: Optional[StepOp]
    seconds: float
    senders: FrozenSet[int] = frozenset()
    micro_batch: int = -1


class Played:
    """A step that can be played again with other times.

    Args:
        plan: another plan of the same TaskGraphs; None: the one that was measured.
        scale: (op, seconds of one run) -> seconds under the other plan.
        added: device -> by what to multiply the simulator's times of added ops; None: by what was measured.

    Attributes:
        added: the same.
    """

    def __init__(self, record: Record, plan: Optional[Plan] = None,
                 scale: Callable[[StepOp, float], float] = lambda op, seconds: seconds,
                 added: Optional[Mapping[int, float]] = None) -> None:
        plan = plan or record.plan
        self._cores = record.cores
        self._cluster, numbers = beside_hosts(plan, record.cluster)
        numbered = numbers or {device: device for device in range(len(record.cluster))}
        named = {number: device if device < plan.num_devices else HOST for device, number in numbered.items()}
        rank_of = {device: rank for rank, devices in enumerate(plan.processes) for device in (*devices, plan.num_devices + rank)}
        by_device, anywhere = _seconds(record)
        graph, step = record.step, measured_step(record)
        self._network = Network(self._cluster)
        costs = OpEstimator(ModelGraph(step.name, step.batch, step.precision, OPTIMIZERS["sgd"], (), ()), None)
        plan = replace(plan, emit="inline")
        _, _, tasks = captured_step(plan, step, self._cluster, self._network, costs, numbers=numbers)
        self._chains = tasks.chains
        self._shares = all(self._cluster.devices[device].kind == "CPU" for device in tasks.used)
        self._process_of = {number: rank_of.get(device, 0) for device, number in numbered.items()}
        if not self._shares:
            tasks.take_turns(self._chains)
        self._made = tasks
        self._graph = tasks.graph(with_buffers=False)
        ops = {op.name: op for op in graph.ops}
        self.tasks: List[Task] = []
        for number, (name, lane, seconds) in enumerate(zip(tasks.names, tasks.lanes, self._graph.seconds)):
            devices = tasks.devices[number]
            device = named[devices[0]] if devices else HOST
            op = ops.get(name) if lane == COMPUTATION else None
            if op is not None:
                seconds = scale(op, by_device.get((name, device), anywhere.get(name, seconds)))
            group = tasks.group(number)
            if group is not None and group.pairs:
                device = named[group.pairs[0][0]]
            senders = self._senders(group)
            self.tasks.append(Task(name, device, tasks.blocks[number][0], lane, op, seconds, senders,
                                   self._graph.micro_batch[number]))
        self.added = self._factors(record) if added is None else added
        self.tasks = [task._replace(seconds=task.seconds * self.added.get(task.device, 1.0))
                      if task.op is None and task.lane == COMPUTATION else task for task in self.tasks]

    def _senders(self, group: Optional[Group]) -> FrozenSet[int]:
        if group is None:
            return frozenset()
        if not group.pairs:
            members = frozenset(self._process_of.get(device, 0) for device in group.devices)
            return members if len(members) > 1 else frozenset()
        ends = {(self._process_of.get(sender, 0), self._process_of.get(receiver, 0)) for sender, receiver, _ in group.pairs}
        return frozenset(sender for sender, receiver in ends if sender != receiver)

    def _factors(self, record: Record) -> Dict[int, float]:
        measured, simulated = {}, {}  # type: Dict[int, float], Dict[int, float]
        for one in (op for process in record.processes for op in process.ops if _is_added(op)):
            measured[one.device] = measured.get(one.device, 0.0) + one.seconds
        for task in self.tasks:
            if task.op is None and task.lane == COMPUTATION:
                simulated[task.device] = simulated.get(task.device, 0.0) + task.seconds
        return {device: measured[device] / seconds for device, seconds in simulated.items() if seconds > 0 and device in measured}

    def scale(self, factor: float) -> None:
        """Lets every op and added op take ``factor`` times as long."""
        self.tasks = [task._replace(seconds=task.seconds * factor) if task.lane == COMPUTATION else task for task in self.tasks]

    def seconds(self, change: Callable[[Task], float] = lambda task: task.seconds) -> float:
        """Seconds of the step if each task takes what ``change`` says."""
        return self.times(change).makespan

    def gain(self, change: Callable[[Task], float]) -> float:
        """Seconds by which the step is shorter if each task takes what ``change`` says.  Other times can change the order of ops,
        with gains of its own, so it is at most what is taken from a device's ops; of devices that share cores, from all."""
        taken: Dict[int, float] = {}
        for task in self.tasks:
            taken[task.device] = taken.get(task.device, 0.0) + task.seconds - change(task)
        most_s = sum(taken.values()) if self._shares else max(taken.values(), default=0.0)
        return min(self.seconds() - self.seconds(change), most_s)

    def times(self, change: Callable[[Task], float] = lambda task: task.seconds) -> Times:
        graph = self._graph._replace(seconds=[change(task) for task in self.tasks])
        if self._shares:
            return self._made.times_on_cores(graph, self._cores, self._chains, self._process_of)
        gammas = [gamma_of(self._cluster.devices[device], None) for device in graph.devices]
        return run(graph, self._network.bandwidths, gammas)

    def exchanges_s(self) -> float:
        """Seconds of the step in which a process sends messages or parts of sums to others; of the process that does longest."""
        times, sent = self.times(), {}  # type: Times, Dict[int, List[Tuple[float, float]]]
        for task, start, end in zip(self.tasks, times.start, times.end):
            for sender in task.senders:
                sent.setdefault(sender, []).append((start, end))
        return max((sum(end - start for start, end in joined(spans)) for spans in sent.values()), default=0.0)

    def computes(self) -> Dict[int, float]:
        """Device -> seconds of its ops in a step."""
        found: Dict[int, float] = {}
        for task in self.tasks:
            if task.op is not None:
                found[task.device] = found.get(task.device, 0.0) + task.seconds
        return found

    @property
    def runs(self) -> int:
        """The number of ops that run in a step, each once for each micro-batch."""
        return sum(task.op is not None for task in self.tasks)


def _is_added(op: OpTime) -> bool:
    """Whether whale_tf has added an op that computes."""
    row = traits(op.type)
    return (not op.is_known and op.device != HOST and row.role in (Role.COMPUTE, Role.CONSTANT) and not row.is_write
            and not op.type.startswith(COMMUNICATION))


COMMUNICATION = ("_", MESSAGE, *COLLECTIVES, "MEMCPY")  # of TensorFlow's own ops that send and receive; _Mkl... are known ops


def _seconds(record: Record) -> Tuple[Dict[Tuple[str, int], float], Dict[str, float]]:
    """Seconds of one run of each op: by device, and over all devices."""
    by_device: Dict[Tuple[str, int], float] = {}
    totals: Dict[str, List[float]] = {}
    for one in (op for process in record.processes for op in process.ops if op.runs > 0):
        by_device[one.name, one.device] = one.seconds / one.runs
        total = totals.setdefault(one.name, [0.0, 0.0])
        total[0] += one.seconds
        total[1] += one.runs
    return by_device, {name: seconds / runs for name, (seconds, runs) in totals.items()}


def measured_step(record: Record) -> StepGraph:
    """The step with the times that its ops took on average over all devices."""
    graph, (_, anywhere) = record.step, _seconds(record)
    return graph._replace(seconds={}, scratch={}, workspace={}).measured(graph.batch, {
        op.origin: anywhere[op.name] for op in graph.ops if anywhere.get(op.name, 0.0) > 0})


def launch_seconds(record: Record, most_bytes: float = 4096.0) -> float:
    """What an op takes whatever its size: the median of those of at most ``most_bytes``, or of the shortest tenth."""
    small = {op.name for op in record.step.ops if 0 < op.size_bytes <= most_bytes}
    every = sorted(_each(op) for process in record.processes for op in process.ops if op.runs > 0 and op.is_known)
    times = sorted(_each(op) for process in record.processes for op in process.ops if op.name in small and op.runs > 0)
    if times:
        return times[len(times) // 2]
    return every[len(every) // 10] if every else 0.0


def bytes_per_s(record: Record, launch_s: float, least_bytes: float = 2.0 ** 18) -> float:
    """How fast memory is read and written: the median over ops that compute little and move at least ``least_bytes`` in a run.
    If no op moves so much, infinite."""
    ops, parts = {op.name: op for op in record.step.ops}, record.plan.num_micro_batch
    rates = []
    for one in (one for process in record.processes for one in process.ops if one.runs > 0 and one.name in ops):
        op = ops[one.name]
        moved = op.size_bytes / (parts if op.step in CLONED else 1)
        if not op.contraction and traits(op.type).role is Role.COMPUTE and moved >= least_bytes and _each(one) > launch_s:
            rates.append(moved / (_each(one) - launch_s))
    return sorted(rates)[len(rates) // 2] if rates else math.inf


def _each(op: OpTime) -> float:
    return op.seconds / op.runs


def with_micro_batches(record: Record, count: int, added: Mapping[int, float], slower: float = 1.0) -> Played:
    """The step with another number of micro-batches.  A product's time changes as that of the same product which was measured
    apart with both numbers.  Of other ops, what they take besides their launch, and besides the time to read and write what does
    not depend on the examples (weights and their gradients), follows the examples.

    Args:
        added: see :class:`Played`.
        slower: by what to multiply measured times.
    """
    now, launch_s = record.plan.num_micro_batch, launch_seconds(record)
    rate, ops, apart = bytes_per_s(record, launch_s), record.step.ops, _products(record)

    def scale(op: StepOp, seconds: float) -> float:
        seconds *= slower
        if op.step not in CLONED:
            return seconds
        if (op.name, count) in apart and apart.get((op.name, now), 0.0) > 0:
            return seconds * apart[op.name, count] / apart[op.name, now]
        tensors = [*op.outputs, *(ops[source].outputs[place] for source, place in op.inputs)] if op.contraction else []
        fixed_bytes = sum(tensor.bytes for tensor in tensors if tensor.layout != SHARDED)
        fixed_s = min(seconds, (launch_s + fixed_bytes / rate) * slower)
        return fixed_s + (seconds - fixed_s) * now / count

    return Played(record, replace(record.plan, num_micro_batch=count, micro_batch_slices=None), scale, added)


def _products(record: Record) -> Dict[Tuple[str, int], float]:
    """Seconds of products that were measured apart, over all processes, by op and number of micro-batches."""
    found: Dict[Tuple[str, int], float] = {}
    for name, count, seconds in (row for process in record.processes for row in process.products):
        found[name, count] = found.get((name, count), 0.0) + seconds
    return found
