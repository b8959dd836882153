"""What a process measured of its training steps, and the files in which processes leave it."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, Iterable, List, NamedTuple, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.documents import json_object
from whale_tf.errors import PlanError
from whale_tf.plan import Plan
from whale_tf.simulator.step_graph import StepGraph

VERSION = 2
COLLECTIVES = ("Collective", "Nccl")  # beginnings of the types of TensorFlow's collectives
MESSAGE = "RecvTensor"  # as TensorFlow's traces call a message between processes
SEND = "_Send"  # and one within a process
FOLDER, STEPS = "WHALE_DOCTOR", "WHALE_DOCTOR_STEPS"  # environment: where to write records, and of how many steps
HOST = -1  # instead of a device's number


class OpTime(NamedTuple):
    """An op of the local script, or one that whale_tf added, as it ran on a device.

    Attributes:
        name: name in the local script; with the parts of divided ops apart.
        device: number in the plan, or :data:`HOST`.
        runs: how often it ran in a step, once for each micro-batch.
        seconds: of all its runs in a step, the mean over the traced steps.
        is_known: whether it is an op of the script, not one that whale_tf added.
    """

    name: str
    type: str
    device: int
    runs: float
    seconds: float
    is_known: bool = True


class Ran(NamedTuple):
    """One run of an op on a device, from the beginning of a traced step on; ``micro_batch`` -1: it belongs to none."""

    name: str
    type: str
    device: int
    start_s: float
    seconds: float
    micro_batch: int = -1


class Measured(NamedTuple):
    """The steps of one process.

    Attributes:
        steps, traced: the number of steps that were timed, and of those of which each op was timed.
        period_s: from the beginning of a step to that of the next one, median.
        run_s: of ``Session.run`` or the function's call, median.
        stalled_s: of it, how long a step only waited for its input pipeline.
        timeline: the ops of one traced step.
        collective_s: of a traced step, how long its collectives took, with waiting for other processes.
        message_s: the same of messages that it sent to or received from other processes, from the moment on at which there was
            something to send.
        products: (op, number of micro-batches, seconds) of the step's products, measured apart.
    """

    rank: int
    steps: int
    traced: int
    period_s: float
    run_s: float
    stalled_s: float
    ops: Tuple[OpTime, ...]
    timeline: Tuple[Ran, ...] = ()
    collective_s: float = 0.0
    message_s: float = 0.0
    products: Tuple[Tuple[str, int, float], ...] = ()

    @property
    def input_s(self) -> float:
        """Seconds of a step in which the process had no examples: the script made them, or the step waited for them."""
        return max(0.0, self.period_s - self.run_s) + self.stalled_s


class Record(NamedTuple):
    """All processes of a job.

    Attributes:
        step: the step for the mini-batch of a process.
        cores: CPU cores that a process may use, its share of those that all processes of a machine use.
    """

    plan: Plan
    step: StepGraph
    cluster: Cluster
    cores: int
    processes: Tuple[Measured, ...]


def to_json(record: Record) -> str:
    """A file with the steps of one or several processes."""
    return json.dumps({
        "version": VERSION, "plan": json.loads(record.plan.to_json()), "step": json.loads(record.step.to_json()),
        "cluster": record.cluster.to_dict(), "cores": record.cores,
        "processes": [dict(one._asdict(), ops=[list(op) for op in one.ops], timeline=[list(ran) for ran in one.timeline])
                      for one in record.processes]})


def file_of(folder: str, rank: int) -> str:
    """The file of one process."""
    return os.path.join(folder, f"{rank}.json")


def parse(source: str) -> Record:
    """What :func:`to_json` wrote, as text or the path of a file.

    Raises:
        PlanError: it is something else.
    """
    data = json_object(source, "doctor's record", PlanError, "`whale run --doctor` and wh.doctor() write one")
    try:
        if data["version"] != VERSION:
            raise ValueError(f"version is {data['version']}, this whale_tf reads version {VERSION}")
        return Record(Plan.parse(data["plan"]), StepGraph.parse(json.dumps(data["step"])), Cluster.parse(data["cluster"]),
                      int(data["cores"]), tuple(_process(one) for one in data["processes"]))
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"the doctor's record is not what wh.doctor() writes: {type(error).__name__}: {error}") from None


def _process(data: Dict[str, Any]) -> Measured:
    return Measured(**dict(data, ops=tuple(OpTime(*row) for row in data["ops"]),
                           timeline=tuple(Ran(*row) for row in data["timeline"]),
                           products=tuple((str(name), int(count), float(seconds)) for name, count, seconds in data["products"])))


def together(records: Sequence[Record]) -> Record:
    """The processes of one job in one record.

    Raises:
        PlanError: there are none, or they are of different plans.
    """
    if not records:
        raise PlanError("no process has left a record of its steps: whale_tf divides nothing in it, or it trains too few steps; "
                        "give it more than one device, and 10 steps")
    first = records[0]
    if any(one.plan.graph != first.plan.graph or one.plan.num_devices != first.plan.num_devices for one in records):
        raise PlanError("the records are of different plans; give those of one run")
    found: List[Measured] = [process for one in records for process in one.processes]
    return first._replace(processes=tuple(sorted(found, key=lambda one: one.rank)))


def joined(intervals: Iterable[Tuple[float, float]]) -> List[Tuple[float, float]]:
    """Intervals (start, end) without overlaps, in order."""
    found: List[Tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
