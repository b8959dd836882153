"""The compiled strategy: what every stage does for each micro-batch, and once per step.

A strategy's :class:`Instructions` are the distributed execution graph of Proteus section V, folded over devices and
micro-batches: an instruction stands for all devices of its config, a block for all micro-batches.  :mod:`execution_graph` unfolds
them.  A captured step has one instruction for each task (:mod:`tasks`).
"""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Sequence, Tuple, Union

from whale_tf.simulator.configs import OpAxis, OpConfig, TensorAxis, TensorConfig, coordinates
from whale_tf.simulator.transformation import Group

FORWARD = "forward"
BACKWARD = "backward"
WEIGHT = "weight"  # gradients of parameters, if the schedule separates them
UPDATE = "update"

COMPUTATION = 0
FEATURE = 1  # feature communication
GRADIENT = 2  # gradient communication
SCRATCH = "scratch"  # category of what an op needs only while it runs
LANES = ("computation", "feature communication", "gradient communication")

BlockKey = Tuple[int, str]  # (stage, FORWARD | BACKWARD | UPDATE)


class DeviceClasses(NamedTuple):
    """Which of a config's devices do the same: ``kind[i]`` is the class of ``devices[i]``, ``first[k]`` a position with class
    ``k``."""

    devices: Tuple[int, ...]
    kind: Tuple[int, ...]
    first: Tuple[int, ...]


def equal_parts(config: Union[OpConfig, TensorConfig], types: Sequence[str]) -> DeviceClasses:
    """Classes of equal parts: the same device type, and the same place along every axis with unequal slices."""
    axes: List[Union[OpAxis, TensorAxis]] = [*config.axes]
    unequal = [i for i, axis in enumerate(axes) if axis.slices is not None]
    points = coordinates(tuple(axis.degree for axis in axes)) if unequal else ()
    numbers: Dict[Tuple, int] = {}
    kinds: List[int] = []
    first: List[int] = []
    for position, kind in enumerate(types):
        what = (kind,) + tuple(points[position][i] for i in unequal)
        if what not in numbers:
            numbers[what] = len(numbers)
            first.append(position)
        kinds.append(numbers[what])
    return DeviceClasses(config.devices, tuple(kinds), tuple(first))


class Instruction:
    """A part of an op, or a communication, for all its devices.

    Attributes:
        id: number in ``Instructions.instructions``; also its priority.
        lane: COMPUTATION, FEATURE or GRADIENT.
        label: its label in a timeline: ``forward``, ``backward``, ``recompute``, ``update``, or the collective.
        parts, seconds: a computation's devices, and the time for each class of them.
        sum_seconds: if it computes gradients of parameters, the time to add them to those of earlier micro-batches.
        kernels, sum_kernels: the kernels that a computation starts on each of its devices, and those of ``sum_seconds``.
        groups, size_bytes: for a communication.
        dependencies: instructions whose results it needs (on the same devices).
        reads: buffers that it reads.
    """

    __slots__ = ("id", "name", "block", "lane", "label", "parts", "seconds", "sum_seconds", "kernels", "sum_kernels", "groups",
                 "size_bytes", "dependencies", "reads")

    def __init__(self, id: int, name: str, block: BlockKey, lane: int, label: str) -> None:  # noqa: A002
        self.id, self.name, self.block, self.lane, self.label = id, name, block, lane, label
        self.parts = DeviceClasses((), (), ())
        self.seconds: Tuple[float, ...] = ()
        self.sum_seconds: Tuple[float, ...] = ()
        self.kernels = self.sum_kernels = 0.0
        self.groups: Tuple[Group, ...] = ()
        self.size_bytes = 0.0
        self.dependencies: List[int] = []
        self.reads: List[int] = []


class Buffer(NamedTuple):
    """A part of a tensor that lives from the start of ``producer`` to the end of its last reader, once per micro-batch.
    ``bytes``: for each class of ``parts``."""

    name: str
    category: str
    producer: int
    parts: DeviceClasses
    bytes: Tuple[float, ...]


class Instructions(NamedTuple):
    """Attributes:
    static_bytes: ``[device][category]``: bytes that are held for the whole step.
    stages: devices of each stage.
    """

    instructions: Tuple[Instruction, ...]
    buffers: Tuple[Buffer, ...]
    static_bytes: Mapping[int, Mapping[str, float]]
    stages: Tuple[Tuple[int, ...], ...]

    def kernels(self, num_micro_batch: int) -> Dict[int, float]:
        """Device -> the kernels that it starts in a step."""
        found: Dict[int, float] = {}
        for one in self.instructions:
            count = one.kernels * (1 if one.block[1] == UPDATE else num_micro_batch) + one.sum_kernels * (num_micro_batch - 1)
            for device in one.parts.devices if count else ():
                found[device] = found.get(device, 0.0) + count
        return found

    def stage_of(self) -> Dict[int, int]:
        """Device -> its stage; if it has several, the first."""
        return {device: number for number, stage in reversed(list(enumerate(self.stages))) for device in stage}


class Subject(NamedTuple):
    """What is simulated, for reports.

    Attributes:
        samples: number in all micro-batches.
        matrix_flops: for each device, in one step.
    """

    model: str
    precision: str
    samples: int
    num_micro_batch: int
    schedule: str
    matrix_flops: Mapping[int, float]
