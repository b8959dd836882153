"""The state of every tensor while an analysis runs."""
from __future__ import annotations

import heapq
from typing import Callable, Container, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf.ir.batch_axis.blocks import REPLICATED_0, Batches, Refuse, common, localise_vector
from whale_tf.ir.batch_axis.result import EXTENT, UNKNOWN, BatchAxis, Equality, Offsets, Unknown
from whale_tf.ir.extents import (
    Size,
    SizeLike,
    Symbol,
    UnknownExtent,
    Value,
    batch_symbol,
    depends_on_batch,
    in_part,
    in_whole,
    product,
    replaced,
    rows_of,
    scalar,
    vector,
)
from whale_tf.ir.graph import Op, OpGraph, Shape, elements_of
from whale_tf.ir.layout import REFERENCE, Block, Blocks, Layout, batch_of, is_measured, rows_each
from whale_tf.ir.rules import View
from whale_tf.ir.traits import FLOW, Gives, traits, types_where
from whale_tf.ir.traits import VariableUse as VariableState

# Flags of a tensor: its value depends on a variable; it is zero (or an empty list); it needs a visit; it is inside a loop; it
# is the same for all examples (or is drawn anew), so that any blocks with the same total describe it; it was computed once, from
# all examples; it was computed from the clone's sizes, and may be another value if the clone has a single example.
VARIABLE, ZERO, BATCHED, LOOP, UNIFORM, OF_SECTION, SIZED = 1, 2, 4, 8, 16, 32, 64
VARIABLES = types_where(lambda row: row.state in (VariableState.VARIABLE, VariableState.TEMPORARY))
SHAPE_ONLY = types_where(lambda row: row.gives in (Gives.SIZES, Gives.LIKE))  # results do not depend on the operand's elements
MOVES = types_where(lambda row: row.only_moves or row.role in FLOW)
INTEGERS = ("int", "uint", "bool")
MAX_OPAQUE = 16  # most elements of an unknown integer tensor for which each element gets a symbol


class Options(NamedTuple):
    """Attributes:
    sync: whether a whole-batch statistic that an op uses is combined over the clones (exact, at the cost of a collective)
        instead of being approximated by the clone's own.
    stated: known layouts of tensors, by name: those that the user states, and those of inputs whose examples are in blocks.
    sections: ops that need all examples run on all of them; only the statistics of normalisation layers are approximated.
    together: numbers of ops that run with a section although clones could run them.
    writers: numbers of ops that write variables besides their results, which must happen once.
    equalities: what another analysis of the same graph, from the same sources, has found out.
    alike: op -> an earlier op from which it differs only in its edges.
    """

    sync: Optional[Callable[[Op], bool]] = None
    stated: Mapping[str, Layout] = {}
    sections: bool = False
    together: FrozenSet[int] = frozenset()
    writers: FrozenSet[int] = frozenset()
    equalities: Sequence[Equality] = ()
    alike: Mapping[int, int] = {}


class Given(NamedTuple):
    """The initial state of a tensor that is given to an analysis (a source, a parameter of a body)."""

    layout: Layout
    flags: int = 0
    value: Optional[Value] = None
    offset: Offsets = 0
    shape: Shape = None  # used if the body does not know it


class Containers:
    """Tensor arrays and stacks: a handle's root identifies the object, whose elements all have the same layout.

    ``roots``: handle tensor -> root; ``contents``: root -> (layout of an element, flags); ``extents``: root -> the size
    that every element holds; ``users``: root -> ops to visit again when these change.
    """

    def __init__(self) -> None:
        self.roots: Dict[int, Tuple[object, ...]] = {}
        self.contents: Dict[Tuple[object, ...], Tuple[Layout, int]] = {}
        self.extents: Dict[Tuple[object, ...], Value] = {}
        self.users: Dict[Tuple[object, ...], Set[int]] = {}


class BatchState(View):
    """Layouts, extents, offsets and flags during an analysis, and the result it will report.

    Args:
        seeds: tensors with a given state (sources, parameters of a body).
        batch: number of examples of the reference batch, if the graph determines it.
        batches: which inputs have equally many examples; shared with the bodies of functional ops.
        scope: ids of the ops that are divided; None: all.  Tensors from outside are replicated.
        sources: the batch inputs among the seeds -> their batch dimension; None: all divided seeds.
    """

    def __init__(self, graph: OpGraph, seeds: Mapping[int, Given], batch: Optional[int], batches: Batches, options: Options,
                 scope: Optional[Container[int]] = None, sources: Optional[Dict[int, int]] = None) -> None:
        super().__init__(graph)
        divided = {t: g.layout.dim for t, g in seeds.items() if g.layout.is_sharded}
        self.result = BatchAxis(graph, divided if sources is None else sources, batch)
        self.result.stated = options.stated
        self.batch, self.batches, self.options, self.scope, self.seeds = batch, batches, options, scope, seeds
        self.met: Set[Tuple[str, str]] = set()  # pairs of batches that must have equally many examples, as just found out
        self.arranged: Mapping[int, Blocks] = {}  # draw -> the blocks of the examples to which its numbers belong
        self.rearranged: Dict[int, Blocks] = {}  # the same, as just found out
        self.counted: Mapping[Symbol, SizeLike] = {}  # open size of a section -> examples of the whole mini-batch that it counts
        self.just_counted: Dict[Symbol, Tuple[Block, ...]] = {}  # blocks of these examples, as just found out
        self.layouts = self.result.layouts
        self.offsets = self.result.offsets
        self.conversions = self.result.conversions
        self.flags = bytearray(len(graph.tensors))
        self.visited = bytearray(len(graph.ops))
        self.sizes: Dict[int, Tuple[SizeLike, ...]] = {}  # inferred shapes that the graph does not have
        self.promoted: Dict[int, Tuple[int, Tuple[Block, ...]]] = {}
        self.promoted_beside: Dict[int, Tuple[int, ...]] = {}
        self.inexact: Dict[int, str] = {}
        self.whole = self.result.whole
        self.together: Mapping[int, str] = {}  # ops that run whole because others do -> reason
        self.looped: Set[int] = set()  # ops that would be exact if their loop, or the body that they are in, ran whole
        self.forced: Set[int] = set()  # ops that have to run whole, because a section needs their sizes
        self.gathered: Set[int] = set()  # divided tensors of which a section has the whole value
        self.per_replica: Set[int] = set()  # ops of normalisation layers, from their statistics to the uses of these
        self.seeded: Set[int] = set()
        self.shared: Set[int] = set()
        self.copied: Set[int] = set()  # ops that took the results of an op that they are like
        self.special = {graph.tensors[t].op for t in seeds}  # ops that need a visit even if no operand is batched
        self.queue: List[int] = []
        self.queued: Set[int] = set()
        self.waiting: Dict[int, List[int]] = {}  # op -> its users that were visited before it
        self.containers = Containers()
        self.lists: Dict[int, int] = {}  # tensor list -> the op that made it empty
        self.arrays: Dict[int, str] = {}  # tensor array ops with an element_shape: whether they create the array or use it
        self.loop_merges: Set[int] = set()
        self.merge_visits: Dict[int, int] = {}
        self.is_settled = False  # loops have reached their fixed point; unknown layouts are final
        self.is_tentative = False  # an early round of a loop's body, which must not refuse unknown layouts yet
        self.can_reduce = True  # function bodies cannot wait for other clones

    def push(self, op_id: int) -> None:
        if op_id not in self.queued:
            self.queued.add(op_id)
            heapq.heappush(self.queue, op_id)

    def force(self, op_id: int) -> None:
        """Run an op whole, because a section needs its sizes over all examples."""
        if op_id not in self.forced:
            self.forced.add(op_id)
            self.push(op_id)

    def unify(self, a: Blocks, b: Blocks, a_is_uniform: bool = False, b_is_uniform: bool = False) -> Blocks:
        """The common blocks of two operands along the same dimension.

        Raises:
            Refuse: the operands arrange their examples differently.
        """
        blocks, equal = common(a, b, a_is_uniform, b_is_uniform)
        self.met |= equal
        return blocks

    def promote(self, tensor: int, dim: int, blocks: Tuple[Block, ...], sources: Tuple[int, ...]) -> None:
        """Compute a whole tensor for each clone at its producer, instead of slicing it where it meets the rows of ``sources``."""
        if tensor not in self.promoted:
            self.promoted[tensor] = (dim, blocks)
            self.promoted_beside[tensor] = sources
            producer = self.graph.tensors[tensor].op
            self.special.add(producer)
            self.push(producer)

    def open_attribute(self, op: Op, name: str, dim: int) -> None:
        """Open the batch dimension of a shape attribute, so that it does not state the whole batch's size in a clone."""
        shape = op.attrs.get(name)
        if shape is not None and dim < len(shape) and shape[dim] not in (None, -1):
            self.result.attributes[op.id, name] = tuple(None if d == dim else s for d, s in enumerate(shape))

    def open_shapes(self, op: Op, name: str) -> None:
        """Like :meth:`open_attribute`, for a list of the results' shapes."""
        shapes = op.attrs.get(name) or ()
        opened = []
        for tensor, shape in zip(op.outputs, shapes):
            layout = self.layout(tensor)
            is_divided = layout.is_sharded and shape is not None and self.graph.tensors[tensor].dtype != "variant"
            opened.append(tuple(None if d == layout.dim else s for d, s in enumerate(shape)) if is_divided else shape)
        if tuple(opened) != tuple(shapes):
            self.result.attributes[op.id, name] = tuple(opened)

    # -- the state of a tensor ------------------------------------------------------------------------------------

    def set(self, tensor: int, layout: Layout, sources: Tuple[int, ...], zero: bool = False) -> None:
        """Set a tensor's layout; ``sources``: batch inputs whose rows it follows."""
        if layout != REPLICATED_0:
            self.layouts[tensor] = layout
            self.flags[tensor] |= BATCHED
            if sources:
                self.result.sources_of[tensor] = sources
        if zero:
            self.flags[tensor] |= ZERO

    def lose(self, op: Op, reason: str) -> None:
        """Mark an op's outputs as having no layout; if an operand has none either, its reason takes precedence."""
        cause = next((self.result.unknown[t] for t in op.inputs if t in self.result.unknown), Unknown(op.id, reason))
        for position in range(len(op.inputs)):
            self.conversions.pop((op.id, position), None)
            self.result.localise.pop((op.id, position), None)
        for t in op.outputs:
            self.set(t, UNKNOWN, ())
            self.result.unknown[t] = cause

    def lose_tensor(self, tensor: int, like: int) -> None:
        """Mark a tensor as having no layout, for the same reason as ``like``."""
        self.set(tensor, UNKNOWN, ())
        self.result.unknown[tensor] = self.result.unknown[like]

    def layout(self, tensor: int) -> Layout:
        return self.layouts.get(tensor, REPLICATED_0)

    def batch_of_source(self, source: int) -> str:
        """The batch to which a source's examples (or the first of them) belong; the reference batch in a body, which does not
        know the sources."""
        blocks = self.seeds[source].layout.blocks if self.can_reduce and source in self.seeds else None
        return batch_of(blocks[0]) if blocks else REFERENCE

    def sources(self, op: Op) -> Tuple[int, ...]:
        """Batch inputs whose rows the op's results follow, at most one of each batch."""
        table = self.result.sources_of
        found: Tuple[int, ...] = ()
        for t in op.inputs:
            more = table.get(t, ())
            if not found:
                found = more
            elif more and more != found:
                known = {self.batch_of_source(source) for source in found}
                found += tuple(source for source in more if self.batch_of_source(source) not in known)
        if not found and op.outputs and op.outputs[0] in self.promoted:
            found = self.promoted_beside[op.outputs[0]]
        return found

    def sources_in(self, blocks: Blocks) -> Tuple[int, ...]:
        """Batch inputs whose examples are in these blocks, one of each batch."""
        batches = dict.fromkeys(map(batch_of, blocks or ()))
        found = (next((t for t in self.result.sources if self.batch_of_source(t) == batch), None) for batch in batches)
        return tuple(source for source in found if source is not None)

    def shape(self, tensor: int) -> Shape:
        shape = super().shape(tensor)
        if tensor in self.sizes:
            return tuple(None if isinstance(s, Size) else s for s in self.sizes[tensor])
        producer = self.graph.producer(tensor)
        if (shape is None or None in shape) and tensor not in self.layouts:
            if producer.type == "Reshape":
                asked = self.value(producer.inputs[1])
                if asked is not None:
                    return tuple(None if isinstance(size, Size) or size < 0 else size for size in asked)
            elif self.is_integer(tensor) and self.value(tensor) is not None:
                return self.value(tensor).shape  # type: ignore[union-attr]
        if shape is None:
            if traits(producer.type).gives in (Gives.SAME, Gives.LIKE):
                return self.shape(producer.inputs[0])
        return shape

    def local_shape(self, tensor: int) -> Optional[Tuple[SizeLike, ...]]:
        """A tensor's shape in a clone."""
        shape: Optional[Sequence[Optional[SizeLike]]] = self.sizes.get(tensor)
        if shape is None:
            shape = super().shape(tensor)
            if (shape is None or None in shape) and self.is_integer(tensor) and tensor not in self.layouts:
                shape = self.shape(tensor)
        if shape is None:
            return None
        sizes = [Size.of(("dim", tensor, d)) if s is None else s for d, s in enumerate(shape)]
        layout = self.layout(tensor)
        if layout.is_sharded:
            if layout.blocks is None:
                sizes[layout.dim] = Size.of(("rows", tensor, layout.dim))
            elif is_measured(layout.blocks):
                known = sizes[layout.dim]
                if not isinstance(known, Size) or not known.depends_on_batch:
                    batch = batch_symbol(batch_of(layout.blocks[0]))
                    sizes[layout.dim] = Size.of(batch) * Size.of(("dim", tensor, layout.dim))
            else:
                sizes[layout.dim] = rows_of(layout.blocks)
        return self._counted(sizes)

    def whole_shape(self, tensor: int) -> Optional[Tuple[SizeLike, ...]]:
        """A tensor's shape in the local script, in numbers that all clones have."""
        sizes = self.local_shape(tensor)
        return None if sizes is None else tuple(self._whole_size(tensor, d, size) for d, size in enumerate(sizes))

    def whole_value(self, tensor: int) -> Optional[Value]:
        """An integer tensor's value in the local script, in numbers that all clones have."""
        value = self.value(tensor)
        if value is None or not depends_on_batch(value):
            return value
        return vector([self._whole_size(tensor, i, size) for i, size in enumerate(value.flat)]).reshape(value.shape)

    def _whole_size(self, tensor: int, index: int, size: SizeLike) -> SizeLike:
        try:
            return replaced(in_whole(size), self.counted)
        except UnknownExtent:
            return replaced(Size.of(("chosen", tensor, index)), self.counted)

    def count_rows(self, tensor: int, dim: int, blocks: Tuple[Block, ...]) -> None:
        """Tell what comes before that an open dimension of a section's result has as many rows as the examples that it meets."""
        shape = self.whole_shape(tensor)
        size = shape[dim] if shape is not None else None
        if isinstance(size, Size) and len(size.terms) == 1:
            (monomial, coefficient), = size.terms.items()
            if len(monomial) == 1 and coefficient == 1 and monomial[0][0] != "whole":
                self.just_counted.setdefault(monomial[0], blocks)

    def _counted(self, sizes: Iterable[SizeLike]) -> Tuple[SizeLike, ...]:
        """Sizes, in which those that were found to count examples do."""
        return tuple(replaced(size, self.counted) for size in sizes) if self.counted else tuple(sizes)

    def _evaluate(self, tensor: int) -> Optional[Value]:
        value = self._measure(tensor)
        return value if value is None or not self.counted else vector(self._counted(value.flat)).reshape(value.shape)

    def _unevaluated(self, tensor: int) -> List[int]:
        is_known = tensor in self.layouts or self.graph.tensors[tensor].op in self.whole
        return [] if is_known else super()._unevaluated(tensor)

    def _measure(self, tensor: int) -> Optional[Value]:
        if tensor in self.layouts:
            return None
        op, record = self.graph.producer(tensor), self.graph.tensors[tensor]
        if op.id in self.whole:  # its value is that of the whole mini-batch, while its operands' may be a clone's
            value = None
        elif op.type in ("Shape", "ShapeN"):
            sizes = self.local_shape(op.inputs[record.index])
            return None if sizes is None else vector(sizes)
        elif op.type == "Size":
            sizes = self.local_shape(op.inputs[0])
            return None if sizes is None else scalar(product(sizes))
        else:
            value = super()._evaluate(tensor)
            if value is None:
                value = self._absorbed(op)
        if value is None and record.dtype.startswith("int") and record.shape is not None and None not in record.shape:
            count = elements_of(record.shape)
            if count <= MAX_OPAQUE:
                value = vector([Size.of(("value", tensor, i)) for i in range(count)]).reshape(record.shape)
        return value

    def _absorbed(self, op: Op) -> Optional[Value]:
        """``min(a, max(a, b)) = a``, whatever b is, and likewise with both exchanged; so ragged tensors count their rows."""
        other = {"minimum": "maximum", "maximum": "minimum"}.get(traits(op.type).value)
        for a, b in (op.inputs, op.inputs[::-1]) if other else ():
            inner = self.graph.producer(b)
            if traits(inner.type).value == other and a in inner.inputs and self.graph.tensors[b].shape == () == super().shape(a):
                return self.value(a)
        return None

    def is_integer(self, tensor: int) -> bool:
        return self.graph.tensors[tensor].dtype.startswith(INTEGERS)

    def set_value(self, tensor: int, value: Value, sources: Tuple[int, ...]) -> None:
        self._values[tensor] = value
        if depends_on_batch(value):
            self.set(tensor, EXTENT, sources)

    def data_layout(self, tensor: int) -> Layout:
        """The layout of an operand that is data."""
        layout = self.layout(tensor)
        if layout is EXTENT:
            raise Refuse("its data are batch sizes")
        return layout

    def localise_elements(self, op: Op, position: int, places: Mapping[int, Blocks]) -> None:
        """Set elements ``places`` of operand ``position`` to the clone's size of a batch dimension with the given blocks."""
        value = self.value(op.inputs[position])
        if value is None:
            raise Refuse(f"the shape in {self.graph.tensor_name(op.inputs[position])!r} does not follow from the data")
        flat = list(value.flat)
        baked = False
        for j, blocks in places.items():
            element = flat[j]
            if isinstance(element, Size):
                if blocks is not None and not is_measured(blocks) and in_part(element) == rows_of(blocks) != element:
                    baked = True
                elif not element.depends_on_batch:
                    raise Refuse(f"the batch size in {self.graph.tensor_name(op.inputs[position])!r} does not follow "
                                 f"from the data; use tf.shape(...)[0] or -1")
            elif element != -1:
                self.check_baked(element, blocks)
                baked = True
        if baked:
            self.result.localise[op.id, position] = localise_vector(flat, places)

    def check_baked(self, element: int, blocks: Blocks) -> None:
        if blocks is None or is_measured(blocks):
            raise Refuse(f"the constant {element} stands for a number of rows chosen by data")
        if any(batch_of(block) != REFERENCE for block in blocks):
            raise Refuse(f"the constant {element} stands for examples of several batches")
        each = sum(map(rows_each, blocks))
        if self.batch is not None and element != self.batch * each:
            raise Refuse(f"the constant {element} is used where {each} x {self.batch} examples are expected")

    def lacks_sizes(self, tensor: int) -> bool:
        """Whether the graph leaves a dimension other than the batch open."""
        shape = self.graph.tensors[tensor].shape
        if shape is None:
            return True
        if None not in shape:
            return False
        layout = self.layouts.get(tensor)
        if layout is None or not layout.is_sharded or is_measured(layout.blocks):
            return True
        return any(s is None and d != layout.dim for d, s in enumerate(shape))

    def set_sizes(self, tensor: int, sizes: Sequence[SizeLike]) -> None:
        """Record what is known about a result's shape beyond the graph's static shape."""
        shape = self.graph.tensors[tensor].shape
        if shape is not None and len(shape) == len(sizes):
            sizes = [mine if theirs is None else theirs for mine, theirs in zip(sizes, shape)]
        self.sizes[tensor] = self._counted(sizes)


