"""The compiled strategy: what every stage does for one micro-batch, and once per step.

A :class:`Program` of a strategy is the distributed execution graph of Proteus section V folded over devices and micro-batches: an
instruction stands for all devices of its config, a block for all micro-batches.  :mod:`execution_graph` unfolds it.  That of a
captured step has one instruction for each task (:mod:`tasks`).
"""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Sequence, Tuple, Union

from whale_tf.simulator.configs import OpAxis, OpConfig, TensorAxis, TensorConfig, coordinates
from whale_tf.simulator.transformation import Group

FORWARD = "forward"
BACKWARD = "backward"
WEIGHT = "weight"  # gradients of parameters, where the schedule has them apart
UPDATE = "update"

COMPUTATION = 0
FEATURE = 1  # feature communication
GRADIENT = 2  # gradient communication
LANES = ("computation", "feature communication", "gradient communication")

BlockKey = Tuple[int, str]  # (stage, FORWARD | BACKWARD | UPDATE)


class Parts(NamedTuple):
    """Which of a config's devices do the same: ``kind[i]`` is the class of ``devices[i]``, ``first[k]`` a position of
    class ``k``."""

    devices: Tuple[int, ...]
    kind: Tuple[int, ...]
    first: Tuple[int, ...]


def equal_parts(config: Union[OpConfig, TensorConfig], types: Sequence[str]) -> Parts:
    """Classes of equal parts: same device type, same place along every axis with unequal slices."""
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
    return Parts(config.devices, tuple(kinds), tuple(first))


class Instruction:
    """One op part or one communication, for all devices it concerns.

    Attributes:
        id: number in ``Program.instructions``; also its priority.
        lane: COMPUTATION, FEATURE or GRADIENT.
        label: what a timeline shows it as: ``forward``, ``backward``, ``recompute``, ``update``, or the collective.
        parts, seconds: of a computation: its devices, and the time per class of them.
        sum_seconds: of one that makes gradients of parameters: what adding them to those of the micro-batches before takes.
        groups, size_bytes: of a communication.
        dependencies: instructions whose results it needs (on the same devices).
        reads: buffers.
    """

    __slots__ = (
        "id",
        "name",
        "block",
        "lane",
        "label",
        "parts",
        "seconds",
        "sum_seconds",
        "groups",
        "size_bytes",
        "dependencies",
        "reads",
    )

    def __init__(self, id: int, name: str, block: BlockKey, lane: int, label: str) -> None:  # noqa: A002
        self.id = id
        self.name = name
        self.block = block
        self.lane = lane
        self.label = label
        self.parts = Parts((), (), ())
        self.seconds: Tuple[float, ...] = ()
        self.sum_seconds: Tuple[float, ...] = ()
        self.groups: Tuple[Group, ...] = ()
        self.size_bytes = 0.0
        self.dependencies: List[int] = []
        self.reads: List[int] = []


class Buffer(NamedTuple):
    """A tensor part that lives from the start of ``producer`` to the end of its last reader, once per micro-batch.  ``bytes`` per
    class of ``parts``."""

    name: str
    category: str
    producer: int
    parts: Parts
    bytes: Tuple[float, ...]


class Program(NamedTuple):
    """Attributes:
    static_bytes: ``[device][category]``: what is held for the whole step.
    stages: devices of each.
    """

    instructions: Tuple[Instruction, ...]
    buffers: Tuple[Buffer, ...]
    static_bytes: Mapping[int, Mapping[str, float]]
    stages: Tuple[Tuple[int, ...], ...]

    def stage_of(self) -> Dict[int, int]:
        """Device -> its stage; of several the first."""
        return {device: number for number, stage in reversed(list(enumerate(self.stages))) for device in stage}


class Subject(NamedTuple):
    """What is simulated, as reports say it.

    Attributes:
        samples: of all micro-batches.
        matrix_flops: of a step, on each device.
    """

    model: str
    precision: str
    samples: int
    num_micro_batch: int
    schedule: str
    matrix_flops: Mapping[int, float]
