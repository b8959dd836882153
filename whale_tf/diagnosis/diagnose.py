"""The causes of a step's time, the most expensive first.

A measured period is taken apart as far as the simulator knows it::

    period = waiting for examples + the Program with the measured times of its ops + what is left: launches

A cause costs what a step would gain without it: the Program is played again with the cause removed.
"""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf.diagnosis.played import Played, Task, launch_seconds, with_micro_batches
from whale_tf.diagnosis.record import HOST, Record
from whale_tf.errors import PlanError, seconds_text
from whale_tf.ir.layout import SHARDED
from whale_tf.ir.traits import Role, traits
from whale_tf.program import BATCH_LEVEL, SECTION

INPUT, HOST_LAUNCHES, WORKER, LINK = "input pipeline", "host launches", "slow worker", "link"
MICRO_BATCHES, STAGE, UNDIVIDED, COPIES = "micro-batches too small", "stage too long", "undivided ops", "host copies"
CAUSES = (INPUT, COPIES, WORKER, STAGE, UNDIVIDED, MICRO_BATCHES, LINK, HOST_LAUNCHES)

LEAST = 0.05  # of a period: what costs less is no cause
SLOWER = 1.3  # a worker takes this many times as long as the fastest for the same ops
LONGER = 1.5  # messages take this many times as long as the cluster's links allow
MOST_NAMED = 3


class Cause(NamedTuple):
    """``gain_s``: by how much a step would be shorter without it."""

    kind: str
    gain_s: float
    found: str
    fix: str


class DeviceTime(NamedTuple):
    """``measured_s``: of a device's ops in a step; ``simulated_s``: the same in the simulated step, for which the means over all
    devices count where the device's own are unknown."""

    device: int
    measured_s: float
    simulated_s: float


class Diagnosis(NamedTuple):
    """Attributes:
    period_s: of a step, of the slowest process.
    input_s: of it, the longest that a process waited for examples.
    simulated_s: the Program with the measured times of its ops.
    left_s: what remains: launches, and whatever the simulator does not know.
    """

    period_s: float
    input_s: float
    simulated_s: float
    left_s: float
    causes: Tuple[Cause, ...]
    devices: Tuple[DeviceTime, ...]


def diagnose(record: Record) -> Diagnosis:
    """The causes of a job's step time.

    Raises:
        PlanError: no process has traced a step.
    """
    if not any(process.ops for process in record.processes):
        raise PlanError("no step was traced, so no op's time is known; measure more steps")
    played = Played(record)
    simulated_s = played.seconds()
    period_s = max(process.period_s for process in record.processes)
    input_s = max(process.input_s for process in record.processes)
    computed_s = min(process.run_s - process.stalled_s for process in record.processes)  # others wait for the one that waits
    computed_s = min(computed_s, period_s - input_s)
    slower = min(1.0, computed_s / simulated_s) if simulated_s > 0 else 1.0  # tracing slows ops down
    if slower < 1.0:
        played.scale(slower)
        simulated_s = played.seconds()
    left_s = max(0.0, computed_s - simulated_s)
    link = _link(record, played, simulated_s, left_s)
    still_s = left_s - (link.gain_s if link is not None else 0.0)  # the simulated step has the described link
    worker, still_s = _worker(record, played, still_s)
    fewer, still_s = _micro_batches(record, played, simulated_s, still_s, slower)
    found = [_input(record, input_s), _copies(record, played), worker, _stage(record, played, simulated_s),
             _undivided(record, played), fewer, link]
    causes = [cause for cause in found if cause is not None]
    causes.append(_launches(played, still_s))
    causes = [cause for cause in causes if cause.gain_s >= LEAST * period_s]
    causes.sort(key=lambda cause: (-cause.gain_s, CAUSES.index(cause.kind)))
    return Diagnosis(period_s, input_s, simulated_s, left_s, tuple(causes), _devices(record, played))


def _devices(record: Record, played: Played) -> Tuple[DeviceTime, ...]:
    measured: Dict[int, float] = {}
    for op in (op for process in record.processes for op in process.ops if op.is_known and op.device != HOST):
        measured[op.device] = measured.get(op.device, 0.0) + op.seconds
    simulated = played.computes()
    return tuple(DeviceTime(device, measured.get(device, 0.0), simulated.get(device, 0.0))
                 for device in sorted({*measured, *simulated} - {HOST}))


def _input(record: Record, input_s: float) -> Cause:
    slowest = max(record.processes, key=lambda process: process.input_s)
    outside = max(0.0, slowest.period_s - slowest.run_s)
    where = f" of process {slowest.rank}" * (len(record.processes) > 1)
    text = (f"a step{where} has no examples for {seconds_text(input_s)}: {seconds_text(outside)} between the steps, and "
            f"{seconds_text(slowest.stalled_s)} in which it only waits for its pipeline")
    fix = "make examples while the step runs: tf.data with num_parallel_calls and prefetch, not feeds made by the script"
    return Cause(INPUT, input_s, text, fix)


def _copies(record: Record, played: Played) -> Optional[Cause]:
    """Python functions, and copies between host and device."""
    tasks = [task for task in played.tasks if task.op is not None and _is_on_host(task.op.type)]
    copied: Dict[int, float] = {}
    for op in (op for process in record.processes for op in process.ops if op.type in MEMORY_COPIES):
        copied[op.device] = copied.get(op.device, 0.0) + op.seconds
    gain = played.gain(lambda task: 0.0 if task.op is not None and _is_on_host(task.op.type) else task.seconds)
    gain = max(gain, max(copied.values(), default=0.0))
    if gain <= 0:
        return None
    names = _longest([(task.name, task.seconds) for task in tasks]) or "copies of tensors"
    return Cause(COPIES, gain, f"the step goes over the host: {names}",
                 "use TensorFlow ops instead, or do it in the input pipeline; whale check lists what crosses")


MEMORY_COPIES = ("MEMCPYHtoD", "MEMCPYDtoH")


def _is_on_host(op_type: str) -> bool:
    return traits(op_type).role is Role.HOST


def _worker(record: Record, played: Played, left_s: float) -> Tuple[Optional[Cause], float]:
    """A process or device that takes longer than others for the same ops; and what is left of the launches without that: where a
    CPU is slow, its launches are, too."""
    if any(task.slices is not None for task in record.plan.task_graphs):
        return None, left_s
    seconds: Dict[str, Dict[int, float]] = {}
    for op in (op for process in record.processes for op in process.ops if op.is_known and op.device != HOST):
        seconds.setdefault(op.name, {})[op.device] = op.seconds
    factors: Dict[int, float] = {}
    devices = sorted({device for row in seconds.values() for device in row})
    for device in devices:
        others = [other for other in devices if other != device]
        ratios = []
        for other in others:
            both = [row for row in seconds.values() if device in row and other in row]
            own, its = sum(row[device] for row in both), sum(row[other] for row in both)
            if its > 0:
                ratios.append(own / its)
        if ratios:
            factors[device] = max(ratios)
    slow = {device: factor for device, factor in factors.items() if factor >= SLOWER}
    if not slow:
        return None, left_s
    gain = played.gain(lambda task: task.seconds / (slow.get(task.device, 1.0) if task.op else 1.0))
    worst = max(slow, key=lambda device: slow[device])
    where = max(record.processes, key=lambda process: sum(
        op.seconds for op in process.ops if op.device == worst and op.is_known)).rank
    process = f" of process {where}" * (len(record.processes) > 1)
    text = f"device {worst}{process} takes {slow[worst]:.1f} times as long as another device for the same ops"
    still_s = left_s / slow[worst] if record.cluster.devices[worst].kind == "CPU" else left_s
    fix = ("look what else runs there, and whether its clock is throttled; or describe its speed in the cluster, so that it gets "
           "fewer examples (balance.algorithm)")
    return Cause(WORKER, gain + left_s - still_s, text, fix), still_s


def _stage(record: Record, played: Played, simulated_s: float) -> Optional[Cause]:
    """A pipeline whose TaskGraphs take different times."""
    if len(record.plan.task_graphs) < 2:
        return None
    of_device: Dict[int, Dict[int, float]] = {}
    for task in (task for task in played.tasks if task.op is not None):
        of_device.setdefault(task.device, {}).setdefault(task.task_graph, 0.0)
        of_device[task.device][task.task_graph] += task.seconds
    totals = {device: sum(rows.values()) for device, rows in of_device.items() if device != HOST}
    if len(totals) < 2:
        return None
    mean = sum(totals.values()) / len(totals)

    def level(task: Task) -> float:
        total = totals.get(task.device, 0.0)
        return task.seconds * (mean / total if task.op is not None and total > 0 else 1.0)

    gain = simulated_s - played.seconds(level)  # takes nothing away, but moves it
    longest = max(totals, key=lambda device: totals[device])
    stage = max(of_device[longest], key=lambda number: of_device[longest][number])
    name = record.plan.task_graphs[stage].name if 0 <= stage < len(record.plan.task_graphs) else str(stage)
    text = (f"device {longest}, with TaskGraph {name!r}, computes {seconds_text(totals[longest])} of a step, the average device "
            f"{seconds_text(mean)}")
    return Cause(STAGE, gain, text, "move layers from this TaskGraph to others, or let auto_parallel place them")


def _undivided(record: Record, played: Played) -> Optional[Cause]:
    """Ops that no device computes a part of: they run once, while the other devices wait, or on each device alike."""
    count = record.plan.num_devices
    undivided = _whole_ops(record)
    tasks = [task for task in played.tasks if task.op is not None and task.name in undivided]
    if not tasks or count < 2:
        return None
    gain = played.gain(lambda task: task.seconds / (count if task.op and task.name in undivided else 1))
    names = _longest([(task.name, task.seconds) for task in tasks])
    text = f"these ops compute the same whatever a device's examples are, or need all examples: {names}"
    return Cause(UNDIVIDED, gain, text, "wh.explain() says why they need all examples together; compute them for each example "
                                        "or each part of the batch, or put them on all devices with wh.split")


def _whole_ops(record: Record) -> Set[str]:
    """Names of the ops of TaskGraphs with several replicas that no replica computes a part of: those of sections, and those that
    read and make nothing with an example in each row, such as what follows from sums over examples."""
    ops, tasks = record.step.ops, record.plan.task_graphs
    found = set()
    for op in ops:
        task = tasks[op.task_graph]
        if op.step not in BATCH_LEVEL or _is_on_host(op.type) or task.strategy != "replicate" or (
                task.replica_count * record.plan.num_model_replicas < 2):
            continue
        layouts = {tensor.layout for tensor in op.outputs} | {ops[source].outputs[place].layout for source, place in op.inputs}
        if op.step == SECTION or SHARDED not in layouts:
            found.add(op.name)
    return found


def _link(record: Record, played: Played, simulated_s: float, left_s: float) -> Optional[Cause]:
    """Collectives and messages that take longer than the cluster's links allow.  Of collectives, the time of the process that
    comes last counts, because it waits least.  They cost no more than what the simulated step does not explain."""
    if len(record.processes) < 2:
        return None
    collective_s, message_s = zip(*((process.collective_s, process.message_s) for process in record.processes))
    measured_s = min(collective_s) + max(message_s)
    expected_s = played.exchanges_s()
    if expected_s <= 0 or measured_s < LONGER * expected_s:
        return None
    factor = measured_s / expected_s
    gain = min(left_s, played.seconds(lambda task: task.seconds * (factor if task.senders else 1.0)) - simulated_s)
    text = (f"messages between processes take {seconds_text(measured_s)} of a step, {factor:.1f} times what the links of "
            f"{record.cluster.name} allow")
    return Cause(LINK, gain, text, "look for other traffic on the network, the adapter that TensorFlow uses, and its speed; or "
                                   "communication.fp16")


def _micro_batches(record: Record, played: Played, simulated_s: float, left_s: float,
                   slower: float) -> Tuple[Optional[Cause], float]:
    """Fewer micro-batches, whose ops launch less often; and what then is left of the launches."""
    now = record.plan.num_micro_batch
    best: Optional[Tuple[float, int, float]] = None
    added = {device: factor * slower for device, factor in played.added.items()}
    for count in (count for count in range(1, now) if now % count == 0):
        try:
            other = with_micro_batches(record, count, added, slower)
        except PlanError:  # the schedule needs more
            continue
        still_s = left_s * other.runs / max(1, played.runs)
        gain = simulated_s + left_s - other.seconds() - still_s
        if best is None or gain > best[0]:
            best = gain, count, still_s
    if best is None or best[0] <= 0:
        return None, left_s
    gain, count, still_s = best
    text = (f"{now} micro-batches run {played.runs:,} ops in a step, each with at least {seconds_text(launch_seconds(record))} "
            "that do not depend on its size")
    return Cause(MICRO_BATCHES, gain, text, f"num_micro_batch: {count}"), still_s


def _launches(played: Played, left_s: float) -> Cause:
    text = (f"{seconds_text(left_s)} of a step are not explained by its {played.runs:,} ops, one after the other on each device: "
            "the host launches them, and threads wake up")
    return Cause(HOST_LAUNCHES, left_s, text, "larger mini-batches, fewer and larger ops, xla, or emit: call")


def _longest(rows: Sequence[Tuple[str, float]]) -> str:
    """The ops that take longest, with their times in a step."""
    totals: Dict[str, float] = {}
    for name, seconds in rows:
        totals[name] = totals.get(name, 0.0) + seconds
    ordered = sorted(totals.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} ({seconds_text(seconds)})" for name, seconds in ordered[:MOST_NAMED])
    return text + f" and {len(ordered) - MOST_NAMED} more" * (len(ordered) > MOST_NAMED)

