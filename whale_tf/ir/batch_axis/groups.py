"""The batches of elements that make up rows (:class:`~whale_tf.ir.batch_axis.result.Grouped`), while an analysis runs."""
from __future__ import annotations

from typing import List, Optional, Sequence, Set

from whale_tf.ir.batch_axis.blocks import Refuse, offset_of
from whale_tf.ir.batch_axis.result import Grouped
from whale_tf.ir.batch_axis.state import LOOP, BatchState
from whale_tf.ir.graph import Op, OpGraph, Phase
from whale_tf.ir.layout import GROUPED, Block, Blocks, Rows
from whale_tf.ir.rules import Rule, known_rule
from whale_tf.ir.traits import Gives, Recipe, Role, traits
from whale_tf.ir.walk import reached


def group_of(state: BatchState, ids: int, step: Block) -> str:
    """The batch of the elements of rows; empty: nothing has divided them yet."""
    name = GROUPED + state.graph.tensor_name(ids)
    known = state.result.grouped.get(name)
    return name if known is not None and known.step == step else ""


def group(state: BatchState, ids: int, step: Block, said: Sequence[int]) -> str:
    """The batch of the elements of rows that all clones have whole.

    Args:
        said: see :class:`Grouped`.

    Raises:
        Refuse: the clones do not have them, or they belong to the rows of something else.
    """
    name = GROUPED + state.graph.tensor_name(ids)
    if ids in state.layouts or state.flags[ids] & LOOP or not state.can_reduce:
        raise Refuse("not every clone has all ids of the rows to which elements belong")
    known = state.result.grouped.setdefault(name, Grouped(ids, step, tuple(said)))
    if known.step != step:
        raise Refuse("its elements belong to rows of different examples")
    more = tuple(tensor for tensor in said if tensor not in known.said)
    state.result.grouped[name] = known._replace(said=known.said + more)
    return name


def divided_index(state: BatchState, index: int, blocks: Blocks) -> Optional[Blocks]:
    """How an index that all clones have is divided, if it is the ids of elements of these rows; None: it is not."""
    step = offset_of(blocks)
    name = "" if step is None or index in state.layouts or state.rank(index) != 1 else group_of(state, index, step)
    return (Rows(1, name),) if name else None


def elements_of_rows(graph: OpGraph) -> Set[int]:
    """Inputs of open size whose rows are no examples, but the elements of sparse rows: the row of each (ids of a sum of rows, a
    sparse matrix's indices), or what belongs to it (ids of a look-up, weights, a sparse matrix's values).  Only data decide how
    many each example has."""
    found: Set[int] = set()
    for op in graph.ops:
        rule = _grouping_rule(graph, op)
        if rule is not None and rule.grouping is not None:
            factor = (rule.grouping.elements,)
            tensors = [t for t, dims in zip(op.inputs, rule.inputs) if isinstance(dims, tuple) and factor in dims[:1]]
            found |= reached(tensors, lambda tensor: _of_as_many_rows(graph, tensor))
    return {t for t in found if ((graph.tensors[t].shape or (0,))[0] is None or graph.tensors[t].dtype == "variant") and (
        traits(graph.producer(t).type).is_input or traits(graph.producer(t).type).role is Role.ARGUMENT)}


def shapes_of_rows(graph: OpGraph) -> Set[int]:
    """Tensors that are the shapes of sparse rows, or from which these are taken; their elements are no rows of anything."""
    found: Set[int] = set()
    for op in graph.ops:
        row, rule = traits(op.type), _grouping_rule(graph, op)
        if rule is not None:
            found.update(op.inputs[shape.position] for shape in rule.shapes)
        elif row.rows_from and len(op.inputs) > 1:
            found.update(t for place, t in enumerate(op.inputs) if str(place) not in row.rows_from.split())
        if "= shape" in row.measure:
            found.add(op.inputs[int(row.measure.split()[-1 - row.measure.endswith("matrix")])])

    def before(tensor: int) -> Sequence[int]:
        op = graph.producer(tensor)
        row = traits(op.type)
        is_taken = row.gives in (Gives.SAME, Gives.RESHAPED, Gives.ELEMENTS) or row.rule == "elementwise.cast"
        return op.inputs[:1] if is_taken else ()

    return reached(found, before)


def _grouping_rule(graph: OpGraph, op: Op) -> Optional[Rule]:
    return known_rule(op, graph) if op.phase is Phase.FORWARD and traits(op.type).batch == "grouped" else None


def _of_as_many_rows(graph: OpGraph, tensor: int) -> List[int]:
    """Operands from which the rows of a tensor follow one by one, or (sparse rows) with others in between."""
    op = graph.producer(tensor)
    row = traits(op.type)
    if row.rows_from:
        return [op.inputs[int(place)] for place in row.rows_from.split()]
    if row.role is Role.TABLE:
        return [op.inputs[1]]
    if row.recipe is Recipe.LOOK_UP:
        if row.of_value:  # in a variable
            return [op.inputs[1]]
        return [op.inputs[0] if _is_chosen(graph, op.inputs[1]) else op.inputs[1]]
    if row.rule.startswith("elementwise."):
        return [t for t in op.inputs if graph.tensors[t].shape != ()]
    return list(op.inputs[:1]) if row.gives in (Gives.SAME, Gives.RESHAPED, Gives.ELEMENTS) else []


def _is_chosen(graph: OpGraph, index: int) -> bool:
    """Whether an index has the positions of true elements."""
    def is_where(tensor: int) -> bool:
        return traits(graph.producer(tensor).type).batch == "where"

    return any(map(is_where, reached([index], lambda t: () if is_where(t) else _of_as_many_rows(graph, t))))
