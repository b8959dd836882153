"""Primitive ops, of which lowered recipes are made."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple, Union

from whale_tf.program import Clone, Copy

# operands
VALUE = "value"  # what a clone, or a section, has of the tensor; it reads no other primitive
PART = "part"  # a clone's part of an input
EXTENT_OF = "extent of"  # a clone's sizes, which follow from its number of examples
OP = "op"  # that an op of the update has run; in a process that leaves it out, all for which it would have waited
# on one device
SCALE = "scale"  # times a power of the clone's weight
SCALE_PROCESS = "scale process"  # times a power of this process's share of all examples
SHARE = "share"  # times the clone's weight among the replicas that share a sum
SHIFT = "shift"  # positions: plus a multiple of the number of examples before the clone
LESS_SURPLUS = "less surplus"  # a sum of sizes, minus what each of its terms has besides examples
BLOCK = "block"  # one block of rows of a clone's value
CUT = "cut"  # the rows of a clone, out of those of the clones of another TaskGraph
CONCAT = "concat"
ADD = "add"  # two operands; one after the other, so that each is freed at once
SUM, MAX, MIN, PROD, ANY, ALL_OF = "sum", "max", "min", "prod", "any", "all"  # any number of operands
PACK, UNPACK = "pack", "unpack"  # values of several tensors, made one vector, and taken out of it
IDENTITY = "identity"  # for its name, or for what it waits for
READ, ASSIGN = "read", "assign"  # a variable's value, and its new value
TOKEN = "token"  # no value: it says that what it waits for is done
# between devices or processes
ALL_REDUCE, ALL_GATHER = "all_reduce", "all_gather"
BROADCAST = "broadcast"  # from one process to all others; its result in the sender is only that it is sent
TAKE = "take"  # an operand's result on one of its devices

ADDITIONS = (ADD, SUM, MAX, MIN, PROD, ANY, ALL_OF)  # element by element
COLLECTIVES = (ALL_REDUCE, ALL_GATHER)
HOST = -1  # in place of a device: the host of the process
FETCHED = -1  # in place of a call: the value is only fetched
TENSOR = "{}"  # in a scope: the tensor's name


class Cut(NamedTuple):
    """The rows that a clone takes of those of other clones.

    Attributes:
        block: number of the block of rows.
        pieces: the clones whose rows the operand has.
        task_graph: their TaskGraph.
    """

    block: int
    pieces: Tuple[Clone, ...]
    task_graph: int


class Reduction(NamedTuple):
    """How values are combined over processes, or over the devices of one.

    Attributes:
        kind: :data:`SUM`, or another one of :data:`ADDITIONS`.
        fp16: values travel as scaled float16.
        devices: those of the operands if they are on several devices of one process; each gets the result.
    """

    kind: str = SUM
    fp16: bool = False
    devices: Tuple[int, ...] = ()


class Rows(NamedTuple):
    """How rows of all processes are put together.

    Attributes:
        is_equal: all processes have as many, if their numbers of examples are known.
        is_counted: their numbers follow from those of the examples; otherwise the processes tell each other.
    """

    is_equal: bool = False
    is_counted: bool = False


class Broadcast(NamedTuple):
    """What a process sends to all others.

    Attributes:
        root: the process.
        tensors: those whose values it sends, or handles or references of variables for theirs; none: no value.
    """

    root: int
    tensors: Tuple[int, ...] = ()


class Primitive:
    """One op.  Two are the same only if they are one object.

    Attributes:
        kind: what it does (see this module's constants).
        tensor: the tensor of the step that its result is a value of; for a variable's value its handle or reference.
        device: number of the cluster's device on which it runs; :data:`HOST`.
        operands: the primitives whose results it reads.
        scope: its name, with :data:`TENSOR` for the tensor's.
        clone: the clone whose value, weight or examples it is about.
        task_graph: that clone's TaskGraph.
        detail: by kind: the exponent (SCALE, SCALE_PROCESS), the offsets (SHIFT), the number of a block (BLOCK) or result
            (UNPACK, TAKE) or op (OP), the number of surplus terms (LESS_SURPLUS), :class:`Cut`, :class:`Reduction`,
            :class:`Rows`, :class:`Broadcast`; for CONCAT the clones' values whose rows it puts together.
        waits: values for whose ops it also waits.
        call: number of the recipe's call in the Program, or :data:`FETCHED`.
    """

    __slots__ = ("kind", "tensor", "device", "operands", "scope", "clone", "task_graph", "detail", "waits", "call")

    def __init__(self, kind: str, tensor: int, device: int, operands: Sequence[Primitive] = (), scope: str = "",
                 clone: Clone = Clone(0, 0, 0), task_graph: int = 0, detail: Any = None,  # noqa: B008
                 waits: Sequence[Primitive] = (), call: int = FETCHED) -> None:
        self.kind, self.tensor, self.device, self.operands, self.scope = kind, tensor, device, tuple(operands), scope
        self.clone, self.task_graph, self.detail, self.waits, self.call = clone, task_graph, detail, tuple(waits), call

    def __repr__(self) -> str:
        return f"<{self.kind} of {self.tensor} on {self.device}>"


def contents(total: Primitive) -> Tuple[int, ...]:
    """The tensors whose values are packed in what an UNPACK takes them out of."""
    return total.detail.tensors if total.kind == BROADCAST else tuple([each.tensor for each in total.operands[0].operands])


def in_order(roots: Sequence[Primitive], known: Dict[Primitive, Any]) -> List[Primitive]:
    """The primitives that ``roots`` read and are, operands first, without those in ``known``."""
    found: Dict[Primitive, None] = {}
    stack = list(reversed(roots))
    while stack:
        last = stack[-1]
        before = () if last in known or last in found else [
            each for each in (*last.operands, *last.waits) if each not in known and each not in found]
        if before:
            stack.extend(reversed(before))
            continue
        stack.pop()
        if last not in known:
            found[last] = None
    return list(found)


def name_of(at: Union[Clone, Copy]) -> str:
    """Coordinates as part of a name."""
    return "_".join(f"{letter}{number}" for letter, number in zip("gmr" if isinstance(at, Clone) else "gr", at))


def sum_scope(clone: Clone) -> str:
    """Scope of a sum up to a clone's value."""
    return f"{name_of(Copy(clone.g, clone.r))}/accumulate/{TENSOR}/{clone.m}"
