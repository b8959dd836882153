"""The result of the batch axis analysis."""
from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Optional, Set, Tuple, Union

from whale_tf.errors import UnsupportedOpError
from whale_tf.ir.extents import Size, Value
from whale_tf.ir.graph import OpGraph, Shape
from whale_tf.ir.layout import Layout, replicated

EXTENT = Layout("extent")  # an integer tensor with elements c0 + c1 b: see BatchAxis.extents
UNKNOWN = Layout("unknown")  # see BatchAxis.unknown
CONCAT, SAME = "concat", "same"  # kinds of Reduce
EXTREMES = ("max", "min", "prod", "any", "all")  # kinds of layouts: the whole value is the max (...) of the clones' values


class Slice(NamedTuple):
    """The clone takes its own rows of a whole tensor: its ``b_i`` share of every block along ``dim``."""

    dim: int
    blocks: Tuple[int, ...] = (1,)


class Scale(NamedTuple):
    """Multiply by ``w_i ** power``."""

    power: int


class Reduce(NamedTuple):
    """Combine ``w_i ** power * v_i`` over the clones by ``kind`` (``sum``, CONCAT, one of EXTREMES, or SAME: any of them);
    all clones get the result.  ``offset``, as in :class:`Offset`, is added before."""

    kind: str
    power: int = 0
    offset: Union[int, Tuple[int, ...]] = 0


class Offset(NamedTuple):
    """Add ``coefficient * o_i``, with ``o_i`` examples before clone ``i``; a tuple has one per column of the last dimension."""

    coefficient: Union[int, Tuple[int, ...]]


class Whole(NamedTuple):
    """Replace a clone's extent with the whole one: element ``j`` becomes ``c0 + c1 B`` for ``components[j] = (c0, c1)``."""

    components: Tuple[Tuple[int, int], ...]


Conversion = Union[Slice, Scale, Reduce, Offset, Whole]


class Localise(NamedTuple):
    """Replace the operand (a shape, usually a Const) in clone ``i``: element ``j`` becomes ``c0 + c1 b_i`` for
    ``components[j] = (c0, c1)`` and is unchanged for None."""

    components: Tuple[Optional[Tuple[int, int]], ...]


class Inexact(NamedTuple):
    """An op at which the clones' result differs from the local script's."""

    op: int
    reason: str


class Unknown(NamedTuple):
    """Why a tensor has no layout, and the op that caused it."""

    op: int
    reason: str


class BatchAxis:
    """The analysis of one graph (or function body).

    Attributes:
        batch: number of examples in the mini-batch if the graph determines it, else None.
        sources: batch input tensors -> their batch dimension.
        layouts: tensor -> layout, including EXTENT and UNKNOWN, but without tensors that are simply replicated.
        extents: tensor -> object array of ``int`` and ``Size`` (its value in a clone).
        offsets: integer tensors of positions -> ``offset``: the whole value is the clone's plus ``offset * o_i`` (a tuple
            has one offset per column of the last dimension).
        conversions: (op, operand) -> conversions of the operand inside the clone, in order.
        localise: (op, operand) -> the operand's new value.
        attributes: (op, attribute) -> the shape (for ``output_shapes``, the tuple of shapes) to set in a clone, with open batch
            dimensions.
        inexact: ops whose results are not exact.
        whole: op that needs all examples -> reason; it runs once, in a section, on operands that are combined over all clones.
        own_seed: random ops of which each clone draws its own part.
        shared: random ops that must be drawn once for all clones.
        unknown: tensor -> why it has no layout.
        source_of: tensor -> a source whose rows it follows (only for tensors in ``layouts``).
        bodies: (op, attribute) -> the analysis of a functional op's body.
        stated: layouts of tensors, by name, from which the analysis started in addition to the plain sources.
        met: blocks of examples that were expected in places where others, or too few, were found.
    """

    def __init__(self, graph: OpGraph, sources: Dict[int, int], batch: Optional[int]) -> None:
        self.graph, self.batch, self.sources = graph, batch, sources
        self.layouts: Dict[int, Layout] = {}
        self.extents: Dict[int, Value] = {}
        self.offsets: Dict[int, Union[int, Tuple[int, ...]]] = {}
        self.conversions: Dict[Tuple[int, int], Tuple[Conversion, ...]] = {}
        self.localise: Dict[Tuple[int, int], Localise] = {}
        self.attributes: Dict[Tuple[int, str], Union[Shape, Tuple[Shape, ...]]] = {}
        self.inexact: List[Inexact] = []
        self.whole: Dict[int, str] = {}
        self.own_seed: List[int] = []
        self.shared: List[int] = []
        self.unknown: Dict[int, Unknown] = {}
        self.source_of: Dict[int, int] = {}
        self.bodies: Dict[Tuple[int, str], BatchAxis] = {}
        self.stated: Mapping[str, Layout] = {}
        self.met: Set[Tuple[int, ...]] = set()
        self.variable_dependent = bytearray(len(graph.tensors))

    def layout(self, tensor: int) -> Layout:
        """A tensor's layout.

        Raises:
            UnsupportedOpError: it has none; the message says which op (and type) caused it, why, and what to do.
        """
        if tensor in self.unknown:
            raise self.unsupported(tensor)
        return self.layouts.get(tensor, replicated())

    def depends_on_variables(self, tensor: int) -> bool:
        return bool(self.variable_dependent[tensor])

    def affine(self, tensor: int) -> Optional[List[Tuple[int, int]]]:
        """``(c0, c1)`` of every element of an extent ``c0 + c1 b``; None if it does not have that form."""
        value = self.extents.get(tensor)
        if value is None:
            return None
        components = []
        for element in value.reshape(-1):
            affine = element.affine if isinstance(element, Size) else (int(element), 0)
            if affine is None:
                return None
            components.append(affine)
        return components

    def surplus(self, tensor: int) -> Optional[List[Optional[int]]]:
        """By how much the sum of an extent over n clones exceeds the whole extent, per clone after the first.  For each element
        this is a number, or None for the element itself, which is the same in all clones.  None if some element is not known."""
        value = self.extents.get(tensor)
        if value is None:
            return None
        found: List[Optional[int]] = []
        for element in value.reshape(-1):
            is_equal = isinstance(element, Size) and not element.depends_on_batch
            found.append(element.surplus if isinstance(element, Size) else int(element))
            if found[-1] is None and not is_equal:
                return None
        return found

    def unsupported(self, tensor: int) -> UnsupportedOpError:
        """The error to raise when an unknown tensor is used."""
        op_id, reason = self.unknown[tensor]
        op = self.graph.ops[op_id]
        return UnsupportedOpError(
            f"{op.name!r} (a {op.type}) cannot be divided along the batch: {reason}. It is needed by "
            f"{self.graph.tensor_name(tensor)!r}. Move it out of the parallel region "
            "(compute it in the input pipeline), rewrite it so that each example is computed on its own, or say with "
            "wh.batch_axis(tensor, dim) which dimension of its result is the batch (None: not divided)")
