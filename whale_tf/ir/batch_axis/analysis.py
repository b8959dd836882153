"""The analysis: sweep, promote, collect the result."""
from __future__ import annotations

from typing import Container, Dict, List, Mapping, Optional, Set, Tuple

from whale_tf.ir.batch_axis import control_flow, cutting, functional, grouping, positions, reshaping
from whale_tf.ir.batch_axis.blocks import REPLICATED_0, Batches
from whale_tf.ir.batch_axis.groups import elements_of_rows
from whale_tf.ir.batch_axis.promote import promote
from whale_tf.ir.batch_axis.propagate import BeginAgain, Propagation
from whale_tf.ir.batch_axis.result import BatchAxis, Equality
from whale_tf.ir.batch_axis.state import OF_SECTION, Given, Options
from whale_tf.ir.extents import Symbol, in_whole, rows_of
from whale_tf.ir.graph import OpGraph
from whale_tf.ir.layout import REFERENCE, Block, Blocks, Layout, Rows, batch_of, rows_each, sharded
from whale_tf.ir.traits import traits
from whale_tf.ir.units import whole_loops
from whale_tf.ir.walk import reached

WRITES = "it writes a variable"
MOVED = "fewer bytes are transferred if it runs with the section"
HANDLER_MODULES = (control_flow, cutting, functional, grouping, positions, reshaping)  # imported because they register handlers


def analyse(graph: OpGraph, sources: Mapping[int, int], scope: Optional[Container[int]] = None,
            options: Options = Options()) -> BatchAxis:
    """Propagate the batch axis through a graph.

    Args:
        sources: batch input tensors -> their batch dimension.
        scope: ids of the ops that are cloned; None: all.  Everything else is computed once, so it is replicated.
        options: see :class:`Options`.
    """
    stated = {graph.tensor(name): layout for name, layout in options.stated.items() if name.partition(":")[0] in graph}
    seeded = {tensor: own_rows(graph.tensor_name(tensor), dim) for tensor, dim in sources.items()}
    seeded.update((tensor, layout) for tensor, layout in stated.items() if tensor in sources and layout.blocks != (1,))
    roots = [tensor for tensor, layout in seeded.items() if names_batch(graph.tensor_name(tensor), layout)]
    seeded.update((tensor, layout) for tensor, layout in stated.items() if tensor not in sources)
    together: Dict[int, str] = dict.fromkeys(options.together, MOVED)
    together.update(dict.fromkeys(options.writers, WRITES))
    equalities = list(options.equalities) or _equal_sizes(graph, {tensor: sources[tensor] for tensor in roots}, seeded)
    elements = elements_of_rows(graph)
    arranged: Mapping[int, Blocks] = {}
    counted: Mapping[Symbol, Tuple[Block, ...]] = {}
    while True:
        batches = Batches(graph.tensor_name(roots[0]) if roots else REFERENCE, equalities)
        seeds = {tensor: Given(layout._replace(blocks=batches.current(layout.blocks))) for tensor, layout in seeded.items()}
        seeds.update((tensor, Given(REPLICATED_0, OF_SECTION)) for tensor in elements if tensor not in seeds)
        reference = {tensor: sources[tensor] for tensor in roots if batches.of(graph.tensor_name(tensor)) == REFERENCE}
        state = Propagation(graph, seeds, _examples(graph, reference, seeded), batches, options, scope, dict(sources))
        state.together, state.arranged = together, arranged
        state.counted = {symbol: in_whole(rows_of(batches.current(blocks) or ())) for symbol, blocks in counted.items()}
        try:
            state.sweep()
            promote(state)
        except BeginAgain as found:
            equalities, arranged = [*equalities, *found.equalities], {**arranged, **found.arranged}
            counted = {**found.counted, **counted}
            continue
        more = {**_around_lost_lists(state), **dict.fromkeys(_whole_loops(state), "its loop runs over all examples")}
        if more.keys() <= together.keys():
            return _with_batches(state, roots)
        together.update((index, reason) for index, reason in more.items() if index not in together)


def own_rows(name: str, dim: int) -> Layout:
    """The layout of an input whose rows are its own examples."""
    return sharded(dim, (Rows(1, name),))


def names_batch(name: str, layout: Layout) -> bool:
    """Whether an input's rows are its own examples."""
    return layout.is_sharded and all(batch_of(block) == name for block in layout.blocks or (1,))


def _examples(graph: OpGraph, sources: Mapping[int, int], layouts: Mapping[int, Layout]) -> Optional[int]:
    """The number of examples by the static shapes of the sources, whose examples may have several rows; None if it is open."""
    for tensor, dim in sources.items():
        size = static_batch(graph, {tensor: dim})
        if size is not None:
            return size // sum(map(rows_each, layouts[tensor].blocks or (1,)))
    return None


def _equal_sizes(graph: OpGraph, sources: Mapping[int, int], layouts: Mapping[int, Layout]) -> List[Equality]:
    """Inputs with the same static number of examples."""
    first: Dict[int, int] = {}
    found = []
    for tensor, dim in sources.items():
        size = _examples(graph, {tensor: dim}, layouts)
        if size is not None and first.setdefault(size, tensor) != tensor:
            found.append((graph.tensor_name(first[size]), graph.tensor_name(tensor)))
    return found


def _with_batches(state: Propagation, roots: List[int]) -> BatchAxis:
    """The result, which says what the batches are."""
    result, batches = state.finish(), state.batches
    for tensor in roots:
        result.batches.setdefault(state.batch_of_source(tensor), []).append(tensor)
    result.equalities = tuple(batches.equalities)
    return result


def _whole_loops(state: Propagation) -> Set[int]:
    """Ops of version 1 loops that have to run whole because some of them cannot be divided, or not exactly."""
    if not state.options.sections:
        return set()
    causes = state.looped.union(unknown.op for unknown in state.result.unknown.values())
    units = whole_loops(state.graph, state.scope) if causes else []
    return {index for unit in units if not unit.isdisjoint(causes) and not any(
        traits(state.graph.ops[index].type).is_write for index in unit) for index in unit}


def _around_lost_lists(state: Propagation) -> Dict[int, str]:
    """Ops that make or fill lists of divided elements, or of terms of sums, for a loop that has to run whole, and why; elements
    cannot be put together."""
    def before(tensor: int) -> List[int]:
        return [t for t in state.graph.producer(tensor).inputs if divided(t)]

    def divided(tensor: int) -> bool:
        return state.graph.tensors[tensor].dtype == "variant" and not state.layout(tensor).is_replicated

    causes = dict(state.result.unknown.values()) if state.options.sections else {}
    found: Dict[int, str] = {}
    for index, reason in sorted(causes.items()):
        lists = [t for t in state.graph.ops[index].inputs if divided(t)]
        for tensor in reached(lists, before):
            found.setdefault(state.graph.tensors[tensor].op, f"its loop runs over all examples ({reason})")
    return found


def static_batch(graph: OpGraph, sources: Mapping[int, int]) -> Optional[int]:
    """The number of examples by the static shapes of the sources; None if these leave it open."""
    for tensor, dim in sources.items():
        shape = graph.tensors[tensor].shape
        if shape is not None and dim < len(shape) and shape[dim] is not None:
            return shape[dim]
    return None
