"""The op graph that every analysis reads; it needs no TensorFlow.

Ops and tensors are numbered densely: an op's number is its index in ``OpGraph.ops`` (creation order), a tensor's number is
its index in ``OpGraph.tensors``.  An op's outputs are consecutive tensors.  Each op is only a few objects with slots, so that
a graph can have 100,000 ops.
"""
from __future__ import annotations

import enum
import hashlib
from copy import copy
from functools import lru_cache
from typing import AbstractSet, Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from whale_tf.ir.holder import Holder
from whale_tf.ir.traits import VARIABLES


class Phase(enum.Enum):
    """The phase of the training step that an op belongs to (Whale section 4 "phases").

    UNUSED: ops that a gradient call made in addition to the requested gradients, and that nothing reads (the gradient of a
        constant, say).
    """

    INPUT = "input"
    FORWARD = "forward"
    BACKWARD = "backward"
    APPLY = "apply"
    INIT = "init"
    SAVE = "save"
    OTHER = "other"
    UNUSED = "unused"


TRAINED = (Phase.FORWARD, Phase.BACKWARD, Phase.APPLY)
Shape = Optional[Tuple[Optional[int], ...]]  # None: unknown rank; None inside: unknown dimension
CALL_ATTR = "_whale_gradient_call"  # attribute of an op that a gradient call made: the call's number
SHARD_ATTR = "_whale_shard"  # attribute of an op of a divided TaskGraph: see Op.shard
REPLICA_ATTR = "_whale_replica"  # attribute of a part of a variable: the model replica that keeps it; see Op.replica
LAYOUT_ATTR = "_whale_layout"  # attribute of an op whose result has a layout: the dimension that is divided, or tiles (a Spread)
LAYOUT_OF_ATTR = "_whale_layout_of"  # what has this layout, in words
NOT_DIVIDED = -1  # the layout of a tensor that is whole


@lru_cache(maxsize=None)
def bytes_of(dtype: str) -> int:
    """Size of an element, that of a reference's value for a reference; 0 for types without a size (``resource``, ``string``)."""
    try:
        return np.dtype(dtype.replace("_ref", "").replace("bfloat16", "float16")).itemsize
    except TypeError:
        return 0


def elements_of(shape: Shape) -> int:
    """Number of elements; 0 if a dimension is not known."""
    count = 0 if shape is None else 1
    for size in shape or ():
        count *= int(size or 0)
    return count


class Tensor(NamedTuple):
    """``op`` is the producer's number, ``index`` selects one of its outputs; ``dtype`` is a NumPy-style name (``float32``,
    ``resource``, ``variant``, ``string``, ``float32_ref`` for the reference edge of a TF1 variable)."""

    op: int
    index: int  # type: ignore[assignment]
    shape: Shape
    dtype: str


class Op:
    """One operation.

    Attributes:
        id: number in ``OpGraph.ops``.
        inputs: tensor numbers.
        control_inputs: op numbers.
        outputs: tensor numbers (a range).
        attrs: the op's attributes as plain Python values (types as names, shapes as tuples).
        value: a Const's value, if it is small; else None.
        phase: see :class:`Phase`.
        task_graph: index of the TaskGraph with which the op is annotated, or -1.
        forward: number of the forward op from which this backward op is derived, or -1.
        device: the device string that the user gave.
        body: for functional ops (While, If, PartitionedCall): attribute name -> OpGraph of the function.
    """

    __slots__ = ("id", "name", "type", "inputs", "control_inputs", "outputs", "attrs", "value", "phase", "task_graph",
                 "forward", "device", "body")

    def __init__(self, id: int, name: str, type: str, inputs: Tuple[int, ...] = (),  # noqa: A002 (TensorFlow's names)
                 control_inputs: Tuple[int, ...] = (), outputs: Tuple[int, ...] = (),
                 attrs: Optional[Dict[str, Any]] = None, value: Optional[np.ndarray] = None,
                 phase: Phase = Phase.FORWARD, task_graph: int = -1, forward: int = -1, device: str = "",
                 body: Optional[Dict[str, OpGraph]] = None) -> None:
        self.id = id
        self.name = name
        self.type = type
        self.inputs = inputs
        self.control_inputs = control_inputs
        self.outputs = outputs
        self.attrs = attrs if attrs is not None else {}
        self.value = value
        self.phase = phase
        self.task_graph = task_graph
        self.forward = forward
        self.device = device
        self.body = body

    @property
    def shard(self) -> int:
        """Its place among the devices of a divided TaskGraph."""
        return int(self.attrs.get(SHARD_ATTR, 0))

    @property
    def replica(self) -> Optional[int]:
        """The model replica that keeps this part of a variable; None: the Plan says where it is."""
        return self.attrs.get(REPLICA_ATTR)

    def __repr__(self) -> str:
        return f"<{self.type} {self.name!r} #{self.id}>"


class OpGraph(Holder):
    """A directed graph of ops.  ``ops`` is in creation order, which is topological except for the back edges of while loops."""

    def __init__(self) -> None:
        self.ops: List[Op] = []
        self.tensors: List[Tensor] = []
        self._by_name: Dict[str, int] = {}
        self._consumers: Optional[List[List[Tuple[int, int]]]] = None
        self._types: Set[str] = set()

    def add(self, name: str, type: str, inputs: Sequence[int] = (),  # noqa: A002
            outputs: Sequence[Tuple[Shape, str]] = (), control_inputs: Sequence[int] = (), **fields: Any) -> Op:
        """Append an op; ``outputs`` has the (shape, dtype) of each; ``fields`` are the other attributes of :class:`Op`."""
        return self.append(Op(-1, name, type, tuple(inputs), tuple(control_inputs), **fields), outputs)

    def append(self, op: Op, outputs: Sequence[Tuple[Shape, str]]) -> Op:
        """Append an op, which gets its number and its outputs here."""
        self.extend([(op, outputs)])
        return op

    def extend(self, ops: Iterable[Tuple[Op, Sequence[Tuple[Shape, str]]]]) -> None:
        """Append ops with their outputs."""
        tensors, by_name, number = self.tensors, self._by_name, len(self.ops)
        for op, outputs in ops:
            first, op.id = len(tensors), number
            for index, (shape, dtype) in enumerate(outputs):
                tensors.append(Tensor(number, index, shape, dtype))
            op.outputs = tuple(range(first, len(tensors)))
            self.ops.append(op)
            by_name[op.name] = number
            self._types.add(op.type)
            number += 1
        self._consumers = None

    def with_shapes(self, shapes: Mapping[int, Shape]) -> OpGraph:
        """The same ops with the given static shapes for these tensors."""
        other = OpGraph()
        other.ops, other._by_name, other._consumers, other._types = self.ops, self._by_name, self._consumers, self._types
        other.tensors = [record._replace(shape=shapes[t]) if t in shapes else record for t, record in enumerate(self.tensors)]
        return other

    def with_waits(self, waits: Mapping[int, Tuple[int, ...]]) -> OpGraph:
        """The same ops with the given control inputs for these."""
        other = OpGraph()
        other.ops, other.tensors, other._by_name, other._consumers = list(self.ops), self.tensors, self._by_name, self._consumers
        other._types = self._types
        for index, control_inputs in waits.items():
            other.ops[index] = copy(self.ops[index])
            other.ops[index].control_inputs = control_inputs
        return other

    def op(self, name: str) -> Op:
        """The op called ``name``; KeyError if there is none."""
        return self.ops[self._by_name[name]]

    def find(self, name: str) -> Optional[Op]:
        """The op called ``name``; None if there is none."""
        number = self._by_name.get(name)
        return None if number is None else self.ops[number]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    @property
    def types(self) -> AbstractSet[str]:
        """Types of the ops."""
        return self._types

    def has_any(self, types: AbstractSet[str]) -> bool:
        """Whether there is an op of one of these types."""
        return not types.isdisjoint(self._types)

    def tensor(self, name: str) -> int:
        """The number of the tensor called ``op:index`` (``op`` alone means output 0)."""
        op_name, _, index = name.partition(":")
        return self.op(op_name).outputs[int(index or 0)]

    def tensor_name(self, tensor: int) -> str:
        record = self.tensors[tensor]
        return f"{self.ops[record.op].name}:{record.index}"

    def producer(self, tensor: int) -> Op:
        return self.ops[self.tensors[tensor].op]

    def consumers(self, tensor: int) -> List[Tuple[int, int]]:
        """(op number, input position) of every use of a tensor."""
        if self._consumers is None:
            table: List[List[Tuple[int, int]]] = [[] for _ in self.tensors]
            for op in self.ops:
                for position, source in enumerate(op.inputs):
                    table[source].append((op.id, position))
            self._consumers = table
        return self._consumers[tensor]

    def origin(self, tensor: int) -> int:
        """The tensor that Identity ops pass on; itself, if none does."""
        while self.producer(tensor).type == "Identity":
            tensor = self.producer(tensor).inputs[0]
        return tensor

    def uses(self, tensor: int) -> Iterator[Tuple[Op, int]]:
        """(op, input position) of every use of a tensor, also of what Identity ops pass on."""
        for user, position in self.consumers(tensor):
            op = self.ops[user]
            if op.type == "Identity":
                yield from self.uses(op.outputs[0])
            else:
                yield op, position

    def predecessors(self, op: Op) -> List[int]:
        """Numbers of the ops that ``op`` waits for, for data or by control edges."""
        tensors = self.tensors
        found = [tensors[source].op for source in op.inputs]
        found.extend(op.control_inputs)
        return found

    def fingerprint(self) -> str:
        """A hash of the names, types and edges of the FORWARD, BACKWARD and APPLY ops, and one of the shapes of the variables
        that they use.  Graphs accept the same plan if :func:`same_graph` is true for their fingerprints; their initialisers,
        savers, summaries and mini-batch sizes may differ."""
        digest, shapes = hashlib.sha256(), hashlib.sha256()
        for op in self.ops:
            if op.phase in TRAINED:
                digest.update("{} {} {}\n".format(op.name, op.type, " ".join(
                    self.tensor_name(t) for t in op.inputs)).encode())
            if op.type in VARIABLES and any(self.ops[user].phase in TRAINED for user, _ in self.consumers(op.outputs[0])):
                shape = op.attrs.get("shape") if op.type == "VarHandleOp" else self.tensors[op.outputs[0]].shape
                shapes.update(f"{op.name} {None if shape is None else tuple(shape)}\n".encode())
        return f"{digest.hexdigest()[:16]}-{shapes.hexdigest()[:8]}"


def inner_ops(op: Op, seen: Optional[Set[int]] = None) -> Iterator[Op]:
    """The ops of the functions that an op calls, at any depth.

    Args:
        seen: functions that are left out, by ``id``; grows.
    """
    seen = set() if seen is None else seen
    for body in (op.body or {}).values():
        if id(body) not in seen:
            seen.add(id(body))
            for inner in body.ops:
                yield inner
                yield from inner_ops(inner, seen)


def same_graph(one: str, other: str) -> bool:
    """Whether two fingerprints belong to the same graph.  Old ones lack the part for shapes, which is not compared then."""
    return all(a == b for a, b in zip(one.split("-"), other.split("-")))
