"""The result of the batch axis analysis."""
from __future__ import annotations

from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Set, Tuple, Union

from whale_tf.errors import UnsupportedOpError
from whale_tf.ir.extents import Size, SizeLike, Value, is_counted
from whale_tf.ir.graph import OpGraph, Shape
from whale_tf.ir.layout import REFERENCE, Block, Exponent, Layout, Rows, batch_of, block_of, replicated, rows_each

EXTENT = Layout("extent")  # an integer tensor with elements such as c0 + c1 b: see BatchAxis.extents
UNKNOWN = Layout("unknown")  # see BatchAxis.unknown
CONCAT, SAME = "concat", "same"  # kinds of Reduce
EXTREMES = ("max", "min", "prod", "any", "all")  # kinds of layouts: the whole value is the max (...) of the clones' values


class Slice(NamedTuple):
    """The clone takes its own rows of a whole tensor: its ``b_i`` share of every block along ``dim``."""

    dim: int
    blocks: Tuple[Block, ...] = (1,)


class Scale(NamedTuple):
    """Multiply by ``w_i ** power``."""

    power: Exponent


Offsets = Union[Block, Tuple[Block, ...]]  # see :class:`Offset`
Equality = Tuple[str, str]  # two inputs that have equally many examples


class Reduce(NamedTuple):
    """Combine ``w_i ** power * v_i`` over the clones by ``kind`` (``sum``, CONCAT, one of EXTREMES, or SAME: any of them);
    all clones get the result.  ``offset``, as in :class:`Offset`, is added before."""

    kind: str
    power: Exponent = 0
    offset: Offsets = 0


class Offset(NamedTuple):
    """Add ``coefficient * o_i``, with ``o_i`` examples before clone ``i``: of the reference batch, or of the one that
    :class:`Rows` name.  A tuple of these has one for each column of the last dimension."""

    coefficient: Offsets


def columns(offset: Offsets, count: int) -> Tuple[Block, ...]:
    """The coefficient of each of ``count`` columns."""
    return (offset,) * count if isinstance(offset, (int, Rows)) else offset


def negative(offset: Offsets) -> Offsets:
    """From positions among all examples back to those of the clone."""
    back = tuple(block_of(-rows_each(step), batch_of(step)) for step in columns(offset, 1))
    return back[0] if isinstance(offset, (int, Rows)) else back


class Whole(NamedTuple):
    """Replace a clone's extent with the whole one: element ``j`` becomes ``components[j]``, in which symbols stand for the
    numbers of examples of all clones."""

    components: Tuple[SizeLike, ...]


Conversion = Union[Slice, Scale, Reduce, Offset, Whole]


class Localise(NamedTuple):
    """Replace the operand (a shape, usually a Const) in clone ``i``: element ``j`` becomes ``components[j]``, in which symbols
    stand for the clone's numbers of examples, and is unchanged for None.

    Attributes:
        of_section: a section computes the operand, from sizes of the whole mini-batch; so it is no constant.
    """

    components: Tuple[Optional[SizeLike], ...]
    of_section: bool = False


class Inexact(NamedTuple):
    """An op at which the clones' result differs from the local script's."""

    op: int
    reason: str


class Unknown(NamedTuple):
    """Why a tensor has no layout, and the op that caused it."""

    op: int
    reason: str


class Grouped(NamedTuple):
    """The batch of the elements that make up rows: a clone has those of its own examples.

    Attributes:
        ids: tensor that all clones have whole, with the row of each element: a vector, or the first column of a matrix.
        step: the rows are the examples of this batch.
        said: tensors whose first element says how many rows there are; none: as many as the last element needs.
    """

    ids: int
    step: Block
    said: Tuple[int, ...] = ()


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
            dimensions; for ``num_elements``, -1.
        inexact: ops whose results are not exact.
        whole: op that needs all examples -> reason; it runs once, in a section, on operands that are combined over all clones.
        own_seed: random ops of which each clone draws its own part.
        shared: random ops that must be drawn once for all clones.
        unknown: tensor -> why it has no layout.
        batches: batch, the reference batch first -> all sources whose rows are its examples.
        equalities: names of sources that were found to have equally many examples.
        sources_of: tensor -> sources whose rows it follows, at most one of each batch (only for tensors in ``layouts``).
        bodies: (op, attribute) -> the analysis of a functional op's body.
        stated: layouts of tensors, by name, from which the analysis started in addition to the plain sources.
        grouped: batches of the elements of rows, by name.
        counted_rows: ops that add up elements by rows, and must be told how many there are in a clone -> rows of an example.
        met: blocks of examples that were expected in places where others, or too few, were found.
        groups: numbers of rows that ops take together.
    """

    def __init__(self, graph: OpGraph, sources: Dict[int, int], batch: Optional[int]) -> None:
        self.graph, self.batch, self.sources = graph, batch, sources
        self.layouts: Dict[int, Layout] = {}
        self.extents: Dict[int, Value] = {}
        self.offsets: Dict[int, Offsets] = {}
        self.conversions: Dict[Tuple[int, int], Tuple[Conversion, ...]] = {}
        self.localise: Dict[Tuple[int, int], Localise] = {}
        self.attributes: Dict[Tuple[int, str], Union[Shape, Tuple[Shape, ...], int]] = {}
        self.inexact: List[Inexact] = []
        self.whole: Dict[int, str] = {}
        self.own_seed: List[int] = []
        self.shared: List[int] = []
        self.unknown: Dict[int, Unknown] = {}
        self.batches: Dict[str, List[int]] = {}
        self.equalities: Tuple[Equality, ...] = ()
        self.sources_of: Dict[int, Tuple[int, ...]] = {}
        self.bodies: Dict[Tuple[int, str], BatchAxis] = {}
        self.stated: Mapping[str, Layout] = {}
        self.grouped: Dict[str, Grouped] = {}
        self.counted_rows: Dict[int, Block] = {}
        self.met: Set[Tuple[Block, ...]] = set()
        self.groups: Set[int] = set()
        self.variable_dependent = bytearray(len(graph.tensors))

    def layout(self, tensor: int) -> Layout:
        """A tensor's layout.

        Raises:
            UnsupportedOpError: it has none; the message says which op (and type) caused it, why, and what to do.
        """
        if tensor in self.unknown:
            raise self.unsupported(tensor)
        return self.layouts.get(tensor, replicated())

    def combined(self) -> Set[Tuple[int, int]]:
        """The operands (op, position) that are combined over all clones."""
        return {key for key, steps in self.conversions.items() if any(isinstance(step, Reduce) for step in steps)}

    def depends_on_variables(self, tensor: int) -> bool:
        return bool(self.variable_dependent[tensor])

    def source_of(self, tensors: Iterable[int], batch: str = REFERENCE) -> int:
        """A source whose rows are the examples of a batch, if possible one that a tensor follows."""
        members = self.batches[batch]
        return next((source for tensor in tensors for source in self.sources_of.get(tensor, ()) if source in members), members[0])

    def follows(self, tensor: int) -> bool:
        """Whether a tensor depends on examples, or on their number."""
        return tensor in self.sources_of

    def counted(self, tensor: int) -> Optional[List[SizeLike]]:
        """The elements of an extent that is known once numbers of examples are; None if it is not."""
        value = self.extents.get(tensor)
        return None if value is None or not all(map(is_counted, value.flat)) else list(value.flat)

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
