"""Which inputs contain the batch, and how their examples are arranged."""
from __future__ import annotations

import collections
from typing import Container, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf.errors import UnknownShapeError, UnsupportedOpError
from whale_tf.ir.batch_axis.analysis import analyse, names_batch
from whale_tf.ir.batch_axis.groups import elements_of_rows, shapes_of_rows
from whale_tf.ir.batch_axis.result import BatchAxis, Slice
from whale_tf.ir.batch_axis.state import Options
from whale_tf.ir.graph import OpGraph, Phase
from whale_tf.ir.layout import REFERENCE, Block, Layout, Rows, batch_of, replicated, rows_each, sharded
from whale_tf.ir.traits import Role, traits
from whale_tf.ir.walk import reached

MAX_BLOCKS = 64  # most rows that an input may have for each example of the smallest input
MAX_GUESSES = 8  # most other dimensions and constants to try as the batch
PLAIN, NONE = sharded(0), replicated()
Sources = Dict[int, Layout]


class Known(NamedTuple):
    """What is known about inputs apart from the graph, by tensor name.

    Attributes:
        axes: tensor -> the batch dimension that the user states; None: the tensor is not divided.
        shapes: input -> its shape in the first mini-batch.
    """

    axes: Mapping[str, Optional[int]] = {}
    shapes: Mapping[str, Sequence[int]] = {}

    def layouts(self) -> Dict[str, Layout]:
        return {name: replicated() if dim is None else sharded(dim) for name, dim in self.axes.items()}


NOTHING = Known()


def find_batch_axis(graph: OpGraph, candidates: Sequence[int], scope: Optional[Container[int]] = None,
                    known: Known = NOTHING) -> BatchAxis:
    """The batch axis, starting from the inputs that are divided along it (its ``sources``): along their dimension 0, unless the
    user states another.

    An input is a batch input if the size of its first dimension is unknown or, if all sizes are known (from the graph or the
    first mini-batch), the most common one among the inputs; those of more rows, too, if that divides more products
    (unlabelled examples).  An input is no batch input after all (class weights, a fed table) if it would make some op
    impossible to divide, no divided op needs single rows of it, and no variables are applied to each of its rows.  Nor is a
    Python function's result with any number of rows if as many ops can be divided without it.  An input that meets divided
    tensors as several blocks of examples (labels of a real and a generated half) has its examples in such blocks; if no size
    is known, so may all inputs (groups of examples that are normalised one by one).  Inputs of open sizes have examples of
    their own, until an op combines them one by one.  Scalars are never batch inputs.

    Inputs with the elements of sparse rows are whole in all clones, which find theirs by the rows' numbers, unless more products
    are divided if they are divided like others.

    If no product would be divided but behind sections, inputs may have the batch in another dimension (an array of pairs), and
    a constant may be the mini-batch: it is then among the sources.

    Args:
        candidates: input tensors (placeholders, iterator outputs), in order.
        scope: as for ``analyse``.

    Raises:
        UnknownShapeError: inputs of unknown rank, by name.
        UnsupportedOpError: divided ops need rows of an input of another size.
    """
    elements = {tensor for tensor in elements_of_rows(graph) if graph.tensor_name(tensor) not in known.axes}
    known_shapes = {tensor for tensor in shapes_of_rows(graph) if graph.tensor_name(tensor) not in known.axes}
    candidates = [tensor for tensor in candidates if tensor not in known_shapes]
    rest = [tensor for tensor in candidates if tensor not in elements]
    shapes = [graph.tensors[tensor].shape or () for tensor in rest]
    search = _Search(graph, scope, known)
    found = [_find(search, each) for each in ([candidates] if len(rest) == len(candidates) else [rest, candidates])
             if each is candidates or any(shape[:1] == (None,) or len(shape) > 1 for shape in shapes)]
    if len(found) > 1 and search.most_products(found[1][0]) > search.most_products(found[0][0]):
        found.reverse()
    sources, axis = found[0]
    search.check(sources, axis, candidates)
    return axis


def _find(search: _Search, candidates: Sequence[int]) -> Tuple[Sources, BatchAxis]:
    """The sources among some inputs, and their axis."""
    guesses = search.guesses(candidates)
    sources, axis = guesses[0], search.run(guesses[0])
    for guess in guesses[1:]:
        if axis.unknown:
            found = search.better(guess, sources, axis)
            if found[0] is sources or search.most_products(guess) >= search.most_products(sources):
                sources, axis = found
    while axis.unknown and sources:
        before = sources
        for guess in search.changed(sources, axis):
            if axis.unknown:
                sources, axis = search.better(guess, sources, axis)
        if sources is before:
            break
    return search.busiest(sources, axis, candidates, [guess for guess in guesses if guess.keys() > sources.keys()])


class _Search:
    def __init__(self, graph: OpGraph, scope: Optional[Container[int]], known: Known) -> None:
        self.graph, self.scope, self.known = graph, scope, known
        self.layouts = known.layouts()
        self.products = [op for op in graph.ops if traits(op.type).is_contraction and op.phase is Phase.FORWARD and (
            scope is None or op.id in scope)]

    def run(self, sources: Sources, sections: bool = False) -> BatchAxis:
        plain_first = sorted(sources.items(), key=lambda item: item[1].blocks != (1,))
        dims = {tensor: layout.dim for tensor, layout in plain_first}
        return analyse(self.graph, dims, self.scope, Options(stated=self.stated(sources), sections=sections))

    def busiest(self, sources: Sources, axis: BatchAxis, candidates: Sequence[int],
                wider: Sequence[Sources]) -> Tuple[Sources, BatchAxis]:
        """The sources and the axis, or those of more sources (``wider`` are some) that divide more products, counted with those
        behind sections, or as many with fewer sections.  If no product is divided but behind sections, other dimensions of
        inputs or a constant may be the batch; there is no doubt if sizes are open and half of the products divided."""
        count = self.divided_products(axis)
        if count == len(self.products):
            return sources, axis
        most = self.divided_products(self.run(sources, True)), count
        guesses = [*wider, *self.static_sizes(candidates, sources)]
        is_known = count > 0 or any(self.graph.tensor_name(t) in self.layouts for t in candidates) or (
            2 * most[0] >= len(self.products) and any(self.size(t, layout.dim) is None for t, layout in sources.items()))
        if not is_known:
            guesses += [*self.other_dims(candidates), *self.constants(sources)][:MAX_GUESSES]
        best = sources, axis
        for guess in guesses:
            found = self.run(guess)
            divided = self.divided_products(self.run(guess, True)), self.divided_products(found)
            if divided > most:
                most, best = divided, (guess, found)
        return best

    def most_products(self, sources: Sources) -> int:
        """How many products are divided, with those behind sections."""
        return self.divided_products(self.run(sources, True))

    def divided_products(self, axis: BatchAxis) -> int:
        return sum(any(axis.layouts.get(t, NONE).is_sharded for t in op.outputs) for op in self.products)

    def static_sizes(self, candidates: Sequence[int], sources: Sources) -> List[Sources]:
        """The sources behind the inputs of each first size that the graph knows, if all sources' are open: of ragged examples
        whose number is known, only that of the values is.  If a source's is known, only with inputs of more rows, as examples of
        their own: unlabelled ones, say."""
        known = [size for size in (self.size(t, layout.dim) for t, layout in sources.items()) if size is not None]
        found: Dict[Optional[int], Sources] = {}
        for tensor in candidates:
            if tensor not in sources and self.graph.tensors[tensor].shape and self.graph.tensor_name(tensor) not in self.layouts:
                found.setdefault(self.size(tensor, 0), {})[tensor] = PLAIN
        guesses = [guess for size, guess in found.items() if size not in (None, 1) and (not known or size > max(known))]
        if known and len(guesses) > 1:
            guesses.insert(0, {tensor: layout for guess in guesses for tensor, layout in guess.items()})
        return [{**guess, **sources} for guess in guesses][:MAX_GUESSES]

    def other_dims(self, candidates: Sequence[int]) -> List[Sources]:
        """For each size, the inputs that have it, in any dimension."""
        found: Dict[Optional[int], Sources] = {}
        for tensor in candidates:
            if self.graph.tensor_name(tensor) not in self.layouts:
                for dim in range(len(self.graph.tensors[tensor].shape or ())):
                    found.setdefault(self.size(tensor, dim), {}).setdefault(tensor, sharded(dim))
        return [guess for size, guess in found.items() if size != 1 and any(layout.dim for layout in guess.values())]

    def constants(self, sources: Sources) -> List[Sources]:
        """The largest constants as mini-batches: of the inputs' static size, or of any size if no input is divided."""
        sizes = {self.size(t, layout.dim) for t, layout in sources.items()}
        found = [op for op in self.graph.ops if op.type == "Const" and op.phase is Phase.FORWARD and (
            self.scope is None or op.id in self.scope) and len(self.graph.tensors[op.outputs[0]].shape or ()) > 1]
        largest = sorted((op.outputs[0] for op in found), key=self.elements, reverse=True)[:MAX_GUESSES]
        return [{**sources, tensor: sharded(dim)} for tensor in largest for dim in (0, 1)
                if not sizes or self.size(tensor, dim) in sizes - {None}]

    def elements(self, tensor: int) -> int:
        count = 1
        for size in self.graph.tensors[tensor].shape or ():
            count *= size or 1
        return count

    def stated(self, sources: Sources) -> Dict[str, Layout]:
        """Layouts that the user states, and those of sources whose examples are in blocks."""
        found = {self.graph.tensor_name(tensor): layout for tensor, layout in sources.items() if layout.blocks != (1,)}
        return dict(self.layouts, **found)

    def better(self, guess: Sources, sources: Sources, axis: BatchAxis) -> Tuple[Sources, BatchAxis]:
        """The guess and its axis, if it leaves fewer tensors without a layout and leaves out no input that the model needs."""
        found, left_out = self.run(guess), [tensor for tensor in sources if tensor not in guess]
        # rows of unknown number need a reason to be examples
        is_free = bool(left_out) and all(self.is_computed(t) and self.size(t, sources[t].dim) is None for t in left_out)
        if len(found.unknown) >= len(axis.unknown) + is_free or any(_is_sliced(self.graph, found, t) for t in left_out):
            return sources, axis
        if left_out and (_feeds_model(self.graph, axis, found) or _feeds_model(self.graph, self.run(sources, True),
                                                                               self.run(guess, True))):
            return sources, axis
        fewer, causes = _causes(found), _causes(axis)
        if guess.keys() < sources.keys() and not (fewer < causes or (is_free and fewer == causes)):
            return sources, axis
        return guess, found

    def guesses(self, candidates: Sequence[int]) -> List[Sources]:
        """Sources to try before it is known how inputs are used: inputs with an open first size, or else those of the most common
        size; then those of each other size, with its multiples in blocks."""
        graph = self.graph
        stated = {t: self.layouts[graph.tensor_name(t)] for t in candidates if graph.tensor_name(t) in self.layouts}
        unknown = [graph.tensor_name(t) for t in candidates
                   if t not in stated and graph.tensors[t].shape is None and graph.tensors[t].dtype != "variant"]
        if unknown:
            raise _unknown(unknown)
        sizes = {t: self.size(t, 0) for t in candidates if t not in stated and graph.tensors[t].shape}
        divided = {t: layout for t, layout in stated.items() if layout.is_sharded}
        computed = {t for t in sizes if self.is_computed(t)}
        if None in (sizes[t] for t in sizes.keys() - computed or sizes):
            return [{**divided, **{t: PLAIN for t in sizes if graph.tensors[t].shape[0] is None}}]  # type: ignore[index]
        counts = collections.Counter(sizes.values())  # an open size of a Python function's result is the size of its operands
        given = [size for size in (self.size(t, layout.dim) for t, layout in divided.items()) if size is not None]
        found = []
        for batch in given or [size for size, _ in counts.most_common() if size is not None]:
            found.append({t: PLAIN for t, size in sizes.items() if size in (batch, None)})
            multiples = {t: size // batch for t, size in sizes.items()
                         if size is not None and batch and size != batch and size % batch == 0 and size // batch <= MAX_BLOCKS}
            if multiples:
                plain = found[-1]
                found.append({**plain, **{t: sharded(0, (1,) * k) for t, k in multiples.items()}})
                found.append({**plain, **{t: sharded(0, (k,)) for t, k in multiples.items()}})
        return [{**divided, **guess} for guess in found] or [divided]

    def changed(self, sources: Sources, axis: BatchAxis) -> List[Sources]:
        """The same sources, except that one is left out or has the blocks of another tensor, or that an example of all is as
        many rows as an op takes together."""
        found = self.in_groups(sources, axis)
        if len(sources) < 2:
            return found
        mine = [t for t in sources if self.graph.tensor_name(t) not in self.layouts]
        first = self.graph.tensor_name(axis.batches[REFERENCE][0])
        is_open = all(self.size(t, layout.dim) is None for t, layout in sources.items())
        for tensor in mine:
            rest = {t: layout for t, layout in sources.items() if t != tensor}
            if is_open or any(layout.blocks == (1,) for layout in rest.values()):
                for met in sorted(axis.met, key=_order):
                    blocks = tuple(Rows(rows_each(block), batch_of(block) or first) for block in met) if is_open else met
                    if blocks != sources[tensor].blocks and self.fits(tensor, blocks, rest):
                        found.append({**rest, tensor: sharded(0, blocks)})
        left = [{t: layout for t, layout in sources.items() if t != tensor} for tensor in mine]
        return found + [guess for guess in left if self.are_named(guess)]

    def in_groups(self, sources: Sources, axis: BatchAxis) -> List[Sources]:
        """The same sources, of which so many rows are an example as an op takes together (``x[::2]`` and ``x[1::2]``), if that
        divides more products.  There are fewer such examples, and so fewer parts are possible."""
        names = {t: self.graph.tensor_name(t) for t in sources}
        if any(layout != PLAIN or names[t] in self.layouts for t, layout in sources.items()):
            return []
        sizes = [self.size(t, 0) for t in sources]
        guesses = [{t: sharded(0, (Rows(count, names[t]),)) for t in sources} for count in sorted(axis.groups)
                   if not any(size is not None and size % count for size in sizes)]
        return [guess for guess in guesses if self.most_products(guess) > self.most_products(sources)]

    def fits(self, tensor: int, blocks: Tuple[Block, ...], others: Sources) -> bool:
        """Whether an input may have its examples in these blocks: they are all its own, or all those of inputs that name batches,
        and a size that is known is that of the blocks."""
        name = self.graph.tensor_name(tensor)
        if names_batch(name, sharded(0, blocks)):
            return blocks != (Rows(1, name),)
        if any(batch_of(block) == name for block in blocks) or not self.are_named({**others, tensor: sharded(0, blocks)}):
            return False
        sizes = {self.size(t, layout.dim) for t, layout in others.items() if layout.blocks == (1,)} - {None}
        size, each = self.size(tensor, 0), sum(map(rows_each, blocks))
        return size is None or not sizes or any(size == other * each for other in sizes)  # type: ignore[operator]

    def are_named(self, sources: Sources) -> bool:
        """Whether all batches whose examples inputs have are named by an input of this guess."""
        names = {t: self.graph.tensor_name(t) for t in sources}
        named = {names[t] for t, layout in sources.items() if layout.blocks == (1,) or names_batch(names[t], layout)}
        return all(batch_of(block) in named or batch_of(block) == REFERENCE
                   for layout in sources.values() for block in layout.blocks or ())

    def is_computed(self, tensor: int) -> bool:
        """Whether an input is a Python function's (or a table's) result, whose rows need not be those of the operands."""
        producer = self.graph.producer(tensor)
        return traits(producer.type).role is Role.HOST and bool(producer.inputs)

    def size(self, tensor: int, dim: int) -> Optional[int]:
        """The size of an input's dimension, from the first mini-batch or the graph."""
        shape = self.known.shapes.get(self.graph.tensor_name(tensor)) or self.graph.tensors[tensor].shape
        return None if shape is None or dim >= len(shape) else shape[dim]

    def check(self, sources: Sources, axis: BatchAxis, candidates: Sequence[int]) -> None:
        """Raises:
            UnsupportedOpError: an input's size is not a multiple of the batch size, and divided ops need rows of it.
        """
        sized = [(t, self.size(t, layout.dim)) for t, layout in sources.items() if layout.blocks == (1,)]
        first, batch = next(((t, size) for t, size in sized if size is not None), (-1, None))
        if not batch:
            return
        for tensor in candidates:
            size = self.size(tensor, 0) if self.graph.tensors[tensor].shape else None
            if tensor not in sources and size is not None and size % batch and self.is_needed(axis, tensor):
                raise UnsupportedOpError(
                    f"input {self.graph.tensor_name(tensor)!r} has {size} rows, but the mini-batch ("
                    f"{self.graph.tensor_name(first)!r}) has {batch} examples, and ops that work on single examples read it; feed"
                    f" a multiple of {batch}, or say with wh.batch_axis(tensor, dim) which dimension is the batch "
                    "(None: not divided)")

    def is_needed(self, axis: BatchAxis, tensor: int) -> bool:
        """Whether divided ops take rows of an input, or would have to and its sizes were not known before it was fed."""
        if _is_sliced(self.graph, axis, tensor):
            return True
        derived, causes = _derived(self.graph, tensor), _causes(axis)
        return self.graph.tensor_name(tensor) in self.known.shapes and any(
            not derived.isdisjoint(self.graph.ops[cause].inputs) for cause in causes)


def _unknown(names: Sequence[str]) -> UnknownShapeError:
    return UnknownShapeError(
        "the rank of {} is not known, so neither is the batch dimension; give the shape, for example "
        "{}.set_shape([None, ...]), or say with wh.batch_axis(tensor, dim) which dimension is the batch (None: not "
        "divided)".format(
            ", ".join(f"input {name!r}" for name in names), names[0].partition(":")[0]), names)


def _order(blocks: Tuple[Block, ...]) -> List[Tuple[int, str]]:
    return [(rows_each(block), batch_of(block)) for block in blocks]


def _causes(axis: BatchAxis) -> Set[int]:
    """Ops that cannot be divided."""
    return {unknown.op for unknown in axis.unknown.values()}


def _feeds_model(graph: OpGraph, axis: BatchAxis, rest: BatchAxis) -> bool:
    """Whether an op applies a variable to each example in ``axis``, and to none in ``rest``."""
    for op in graph.ops:
        if any(axis.layouts.get(t, NONE).is_sharded and not rest.layouts.get(t, NONE).is_sharded for t in op.outputs) and any(
                axis.depends_on_variables(t) and t not in axis.layouts and not axis.conversions.get((op.id, position))
                for position, t in enumerate(op.inputs)):
            return True
    return False


def _derived(graph: OpGraph, tensor: int) -> Set[int]:
    """A tensor and everything that is computed from it."""
    return reached([tensor], lambda t: (result for op, _ in graph.consumers(t) for result in graph.ops[op].outputs))


def _is_sliced(graph: OpGraph, axis: BatchAxis, tensor: int) -> bool:
    """Whether a divided op takes rows of a tensor that is computed from the given one."""
    derived = _derived(graph, tensor)
    return any(isinstance(step, Slice) and graph.ops[op].inputs[position] in derived
               for (op, position), steps in axis.conversions.items() for step in steps)
