"""Handlers of ops whose operands say to which row each of their elements belongs: sums of looked-up rows, sparse products.

The elements of sparse rows (ids and weights ``[n]``, say) are no examples: data decide how many each example has.  Where all
clones have them whole, as inputs or results of a section, each clone takes those of its own examples.  They are a batch of their
own (:class:`~whale_tf.ir.batch_axis.result.Grouped`), whose parts are found by the rows' numbers::

    rows      0  0  1  3  3  3            clone 0 has examples 0 and 1: elements 0 to 2, rows 0 0 1
    elements  a  b  c  d  e  f            clone 1 has examples 2 and 3: elements 3 to 5, rows 1 1 1 (positions in its own part)
"""
from __future__ import annotations

from typing import Dict, List, Set

from whale_tf.ir.batch_axis.blocks import REPLICATED_0, Refuse, blocks_of, offset_of
from whale_tf.ir.batch_axis.groups import group, group_of
from whale_tf.ir.batch_axis.operands import Operands
from whale_tf.ir.batch_axis.propagate import Propagation, handler
from whale_tf.ir.batch_axis.result import EXTENT, Offset, Offsets, columns, negative
from whale_tf.ir.batch_axis.sections import measure_whole, rows_of_result
from whale_tf.ir.extents import Size, is_static
from whale_tf.ir.graph import Op
from whale_tf.ir.layout import Block, Blocks, Layout, Rows, is_grouped, partial, sharded
from whale_tf.ir.rules import Rule, rule_for
from whale_tf.ir.traits import traits

COUNT = 3  # operand of ops that are told how many segments there are


@handler
def grouped(state: Propagation, op: Op) -> None:
    """Divide an op along the rows to which its elements belong, if these are examples."""
    rule = rule_for(op, state.graph, state)
    grouping = rule.grouping
    assert grouping is not None
    elements, rows = _dims(rule, grouping.elements), _dims(rule, grouping.rows)
    told = {shape.position for shape in rule.shapes} | ({COUNT} if op.type.endswith("NumSegments") else set())
    if any(state.layout(op.inputs[i]) not in (EXTENT, REPLICATED_0) for i in told):
        raise Refuse("the number of its rows is divided itself")
    layouts = [REPLICATED_0 if i in told else state.data_layout(t) for i, t in enumerate(op.inputs)]
    blocks = _blocks_of_rows(state, op, rule, layouts, rows)
    dims = rule.outputs[0]
    has_rows = isinstance(dims, tuple) and (grouping.rows,) in dims
    if blocks is None and has_rows:
        measure_whole(state, op)
        blocks = rows_of_result(state, op.outputs[0], 0)
    divided = [i for i in elements if layouts[i].is_sharded]
    if any(layout.is_sharded and layout.dim != {**elements, **rows}.get(i) for i, layout in enumerate(layouts)):
        state.apply(op, rule)  # along another factor
        return
    step = offset_of(blocks)
    if step is None:
        state.apply(op, rule)
        return
    plan = Operands(state, op, rule.roles, layouts)
    _divide_elements(state, op, plan, elements, divided, grouping.ids, step, told)
    for i, dim in rows.items():
        if not layouts[i].is_sharded:
            plan.slice(i, dim, blocks)
    for i in range(len(op.inputs)):
        if i != grouping.ids:
            plan.count_from_first(i)
    power, _ = plan.settle(True)
    if rule.shapes:
        places = {j: blocks for j, dims in enumerate(rule.shapes[0].dims) if dims == (grouping.rows,)}
        state.localise_elements(op, rule.shapes[0].position, places)
    elif COUNT in told:
        state.localise_elements(op, COUNT, {0: blocks})
    if has_rows and not told:
        if divided and not is_grouped(layouts[divided[0]].blocks):
            raise Refuse("the last examples may have no elements, and then its result has fewer rows")
    if (has_rows and not told) or traits(op.type).fails_empty:
        state.result.counted_rows[op.id] = step
    layout = sharded(dims.index((grouping.rows,)), blocks, power) if has_rows else partial(power)  # type: ignore[union-attr]
    state.set(op.outputs[0], layout, state.sources(op) or state.sources_in(blocks), plan.is_zero)
    state.learn_sizes(op)
    plan.record()


def _dims(rule: Rule, factor: str) -> Dict[int, int]:
    """Operand -> its dimension with a factor."""
    return {i: dims.index((factor,)) for i, dims in enumerate(rule.inputs) if isinstance(dims, tuple) and (factor,) in dims}


def _blocks_of_rows(state: Propagation, op: Op, rule: Rule, layouts: List[Layout], rows: Dict[int, int]) -> Blocks:
    """How the rows are divided, by an operand that has them or counts them, or by what the result meets."""
    assert rule.grouping is not None
    found: List[Blocks] = [layouts[i].blocks for i, dim in rows.items() if layouts[i].is_sharded and layouts[i].dim == dim]
    counts = [(shape.position, j) for shape in rule.shapes for j, dims in enumerate(shape.dims) if dims == (rule.grouping.rows,)]
    if op.type.endswith("NumSegments"):
        counts.append((COUNT, 0))
    for position, j in counts:
        value = state.value(op.inputs[position]) if state.layouts.get(op.inputs[position]) is EXTENT else None
        element = None if value is None else value.flat[j]
        if isinstance(element, Size) and element.depends_on_batch:
            found.append(blocks_of(element))
    if op.outputs[0] in state.promoted:
        found.append(state.promoted[op.outputs[0]][1])
    for other in found[1:]:
        found[0] = state.unify(found[0], other)
    return found[0] if found else None


def _divide_elements(state: Propagation, op: Op, plan: Operands, elements: Dict[int, int], divided: List[int], ids: int,
                     step: Block, told: Set[int]) -> None:
    """Let every operand with elements have those of the clone's rows, and the ids count from the clone's first row."""
    offset: Offsets = (step, 0) if plan.layouts[ids].is_sharded and state.rank(op.inputs[ids]) == 2 else step
    said = [op.inputs[i] for i in sorted(told) if _says(state, op.inputs[i])]
    if divided:
        kinds = {plan.layouts[i].blocks for i in divided}
        if len(kinds) != 1 or any(plan.layouts[i].power for i in divided if i == ids):
            raise Refuse("its operands arrange their elements in different ways")
        blocks = kinds.pop()
        if ids in divided and columns(state.offsets.get(op.inputs[ids], 0), 2) != columns(offset, 2):
            raise Refuse("it adds up rows by an index other than the example's own position")
        if ids not in divided and is_grouped(blocks):
            group(state, op.inputs[ids], step, said)
        if len(divided) < len(elements) and blocks != (Rows(1, group_of(state, op.inputs[ids], step)),):
            raise Refuse("elements of examples meet elements that all clones have")
    else:
        blocks = (Rows(1, group(state, op.inputs[ids], step, said)),)
    for i, dim in elements.items():
        if i not in divided:
            plan.slice(i, dim, blocks)
    if ids not in divided:
        is_matrix = state.rank(op.inputs[ids]) == 2
        plan.steps[ids].append(Offset(negative((step, 0) if is_matrix else step)))


def _says(state: Propagation, tensor: int) -> bool:
    """Whether only the step itself knows how many rows an operand counts."""
    return state.layouts.get(tensor) is not EXTENT and not is_static(state.value(tensor))
