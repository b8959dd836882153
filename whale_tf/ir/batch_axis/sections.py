"""Where sections begin and end: sizes of the whole mini-batch in an op that runs once, and the first product behind it that the
clones compute again.

A section's results are equal in all clones, so the analysis would leave everything that follows from them alone in the section.
But a dimension that has as many rows as the mini-batch can be divided again, whatever its rows are: the clones' slices make up
the whole.  So a section ends at a product with weights, or a look-up in them, along such a dimension::

    text ──> concat ──> split, look up, pad ──> slice ──> embedding ──> ...        clone 0
                                            └─> slice ──> embedding ──> ...        clone 1

That a dimension has these rows is derived: sizes of the whole mini-batch (:func:`whale_tf.ir.extents.in_whole`) follow from rules
and shape operands as a clone's sizes do, and from ``measure`` in the op's row where they follow otherwise.
"""
from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Optional

from whale_tf.ir.batch_axis.blocks import Refuse, blocks_of
from whale_tf.ir.batch_axis.state import LOOP, OF_SECTION, VARIABLE, BatchState
from whale_tf.ir.evaluate import evaluate
from whale_tf.ir.extents import Size, SizeLike, in_part, product, vector
from whale_tf.ir.graph import Op, Phase
from whale_tf.ir.layout import Blocks, block_of, is_grouped, is_measured
from whale_tf.ir.rules import Rule, known_rule, rule_for
from whale_tf.ir.rules.rule import LOOKUP
from whale_tf.ir.traits import traits

Measure = Callable[[BatchState, Op], None]


class End(NamedTuple):
    """The rows along which the clones divide an op whose operands come from a section.

    Attributes:
        rule: of the op.
        factor: of the rule, along the rows.
        blocks: how the rows are divided.
    """

    rule: Rule
    factor: str
    blocks: Blocks


def end_of_section(state: BatchState, op: Op) -> Optional[End]:
    """How clones divide an op that applies weights to each row of a section's result; None: it is part of the section."""
    if not (state.options.sections and state.can_reduce) or op.phase is not Phase.FORWARD or op.id in state.forced:
        return None
    flags = [state.flags[t] for t in op.inputs]
    if any(flag & LOOP for flag in flags) or any(t in state.layouts for t in op.inputs):
        return None
    if traits(op.type).batch == "grouped":
        return _end_by_rows(state, op)
    results = [i for i, flag in enumerate(flags) if flag & OF_SECTION and state.graph.tensors[op.inputs[i]].shape is not None]
    weights = [i for i, flag in enumerate(flags) if flag & VARIABLE and not flag & OF_SECTION]
    if not results:
        return None
    rule = known_rule(op, state.graph, state)
    if rule is None or not (traits(op.type).is_contraction or LOOKUP in rule.kinds.values()):
        return None
    for i in results:
        dims = rule.inputs[i]
        for dim, factors in enumerate(dims if isinstance(dims, tuple) else ()):
            if len(factors) == 1 and rule.kind(factors[0]) == "pass" and _gives_rows(rule, factors[0], weights):
                blocks = rows_of_result(state, op.inputs[i], dim)
                if blocks is not None and (weights or is_grouped(blocks)):  # elements may look up rows that a section looked up
                    return End(rule, factors[0], blocks)
    return None


def _end_by_rows(state: BatchState, op: Op) -> Optional[End]:
    """How clones divide an op whose operands say to which row each element belongs, if each row is an example's."""
    measure_whole(state, op)
    blocks = rows_of_result(state, op.outputs[0], 0)
    rule = rule_for(op, state.graph, state)
    if blocks is None or rule.grouping is None or rule.grouping.rows not in (rule.outputs[0] or ((),))[0]:  # type: ignore
        return None
    return End(rule, rule.grouping.rows, blocks)


def end_in_list(state: BatchState, op: Op) -> Blocks:
    """How the second dimension of a section's result is divided before an op makes a list of the first: a loop steps through the
    list, and rows cannot be taken from it.  None: the list is part of the section."""
    if traits(op.type).batch != "list_from_tensor" or op.phase is not Phase.FORWARD or op.id in state.together:
        return None
    tensor, can_end = op.inputs[0], state.options.sections and state.can_reduce
    is_whole = state.flags[tensor] & OF_SECTION and not state.flags[tensor] & LOOP and tensor not in state.layouts
    return rows_of_result(state, tensor, 1) if can_end and is_whole and rows_of_result(state, tensor, 0) is None else None


def _gives_rows(rule: Rule, factor: str, weights: List[int]) -> bool:
    """Whether each row along a factor is a row of all results, and the weights are the same for all rows."""
    def has(dims: object) -> bool:
        return isinstance(dims, tuple) and (factor,) in dims

    return all(map(has, rule.outputs)) and not any(has(rule.inputs[i]) for i in weights)


def rows_of_result(state: BatchState, tensor: int, dim: int) -> Blocks:
    """How the rows of a section's result are divided along a dimension; None if their number is not known to be the batch's."""
    shape = state.whole_shape(tensor)
    size = shape[dim] if shape is not None and dim < len(shape) else None
    if isinstance(size, Size):
        part = in_part(size)
        if not isinstance(part, Size) or not part.depends_on_batch:
            return None
        try:
            blocks = blocks_of(part)
        except Refuse:
            return None
        return None if is_measured(blocks) else blocks
    if not size or not state.batch or size % state.batch or (dim and size != state.batch):
        return None
    return (size // state.batch,)


def measure_whole(state: BatchState, op: Op) -> None:
    """Record sizes and values of an op's results that follow from those of the whole mini-batch."""
    own = traits(op.type).measure
    if "=" in own:
        _count(state, op, own)
    elif own:
        MEASURES[own](state, op)
    if op.id in state.whole:
        _evaluate_whole(state, op)
    is_open = any(state.lacks_sizes(t) and t not in state.sizes for t in op.outputs)
    rule = known_rule(op, state.graph, state) if is_open else None
    if rule is None:
        return
    known: Dict[str, SizeLike] = {}
    for t, operand in zip(op.inputs, rule.inputs):
        if isinstance(operand, tuple):
            for factors, size in zip(operand, state.whole_shape(t) or ()):
                if len(factors) == 1 and _is_open(known.get(factors[0])):
                    known[factors[0]] = size
    _count_elements(state, op, rule, known)
    for shape in rule.shapes:
        value = state.whole_value(op.inputs[shape.position])
        for element, factors in zip(value.flat if value is not None else (), shape.dims):
            if len(factors) == 1 and element != -1 and _is_open(known.get(factors[0])):
                known[factors[0]] = element
    for t, dims in zip(op.outputs, rule.outputs):
        if isinstance(dims, tuple) and state.lacks_sizes(t) and t not in state.sizes:
            opened = [Size.of(("dim", t, d)) for d in range(len(dims))]
            state.set_sizes(t, [1 if not factors else known.get(factors[0], opened[d]) if len(factors) == 1 else opened[d]
                                for d, factors in enumerate(dims)])


def _count_elements(state: BatchState, op: Op, rule: Rule, known: Dict[str, SizeLike]) -> None:
    """Tell what comes before that an open size is that of the elements of rows, because it meets theirs: ids and their weights.

    Args:
        known: the size of each factor.
    """
    for t, operand in zip(op.inputs, rule.inputs):
        for dim, factors in enumerate(operand if isinstance(operand, tuple) else ()):
            blocks = _counted_rows(known.get(factors[0])) if len(factors) == 1 else None
            if is_grouped(blocks):
                _count_open(state, t, dim, blocks)


def _counted_rows(size: Optional[SizeLike]) -> Blocks:
    """How rows are divided that are as many as all examples of a batch; None: they are not."""
    (monomial, count), = size.terms.items() if isinstance(size, Size) and len(size.terms) == 1 else (((), 0),)
    return (block_of(1, monomial[0][1]),) if count == len(monomial) == 1 and monomial[0][0] == "whole" else None


def _count_open(state: BatchState, tensor: int, dim: int, blocks: Blocks) -> None:
    shape = state.graph.tensors[tensor].shape
    if blocks is not None and shape is not None and shape[dim] is None and tensor not in state.layouts:
        state.count_rows(tensor, dim, blocks)


def _reshaped(state: BatchState, op: Op) -> None:
    """A tensor of which all dimensions but the first stay has as many rows as before."""
    before, asked = state.whole_shape(op.inputs[0]), state.whole_value(op.inputs[1])
    if before is None or asked is None or not before or len(before) != asked.size or any(
            isinstance(one, Size) or one != other for one, other in zip(before[1:], asked.flat[1:])):
        return
    if asked.flat[0] == -1:
        _set_size(state, op.outputs[0], 0, before[0])
    _count_open(state, op.inputs[0], 0, _counted_rows(asked.flat[0]))


def _sparse_reshaped(state: BatchState, op: Op) -> None:
    """The shape that is asked for, unless it leaves a size to be found."""
    asked, shape = state.whole_value(op.inputs[2]), state.graph.tensors[op.outputs[1]].shape
    if asked is not None and shape == (asked.size,) and not any(not isinstance(size, Size) and size < 0 for size in asked.flat):
        state.fix({op.outputs[1]: asked})


def _is_open(size: Optional[SizeLike]) -> bool:
    """Whether nothing is known about a size."""
    return size is None or (isinstance(size, Size) and all(
        symbol[0] in ("dim", "value", "chosen") for monomial in size.terms for symbol in monomial))


def _evaluate_whole(state: BatchState, op: Op) -> None:
    """The values of integer results, in the local script."""
    if op.type in ("Shape", "ShapeN"):
        for t, result in zip(op.inputs, op.outputs):
            sizes = state.whole_shape(t)
            if sizes is not None:
                state.fix({result: vector(sizes)})
        return
    if not traits(op.type).value or not all(map(state.is_integer, op.outputs)):
        return
    values = [state.whole_value(t) for t in op.inputs]
    known = [value for value in values if value is not None]
    results = evaluate(op.type, op.attrs, known, op.name) if len(known) == len(values) else None
    state.fix(dict(zip(op.outputs, results or ())))


def _count(state: BatchState, op: Op, measure: str) -> None:
    """Record how many rows a result has, which an operand says; ``measure`` as in the op traits table."""
    (kind, result), (source, operands, *only_matrix) = (part.split() for part in measure.split("="))
    said = (_rows_said(state, source, op.inputs[int(operand)], bool(only_matrix)) for operand in operands.split("|"))
    rows = next((rows for rows in said if rows is not None), None)
    tensor = op.outputs[int(result)]
    shape = state.graph.tensors[tensor].shape
    if rows is None:
        return
    if kind == "rows":
        _set_size(state, tensor, 0, rows)
    elif kind == "splits":
        state.set_sizes(tensor, [rows + 1])
    elif shape and shape[0]:
        state.fix({tensor: vector([rows, *(Size.of(("value", tensor, i)) for i in range(1, shape[0]))])})


def _rows_said(state: BatchState, source: str, operand: int, only_matrix: bool) -> Optional[SizeLike]:
    """How many rows an operand says there are; None: it does not, or it is a scalar, or no matrix."""
    value, shape = state.whole_value(operand) if source == "shape" else None, state.whole_shape(operand)
    if source == "shape":
        return value.flat[0] if value is not None and value.size > only_matrix else None
    if source == "elements":
        return None if shape is None else product(shape)
    if shape is None or len(shape) <= only_matrix:
        return None
    return shape[0] - 1 if source == "splits" else shape[0]


def _ragged_to_tensor(state: BatchState, op: Op) -> None:
    """The rows that the first partition counts, unless the first operand (a shape, or -1 for any) asks for another number."""
    result, partition = op.outputs[0], op.inputs[3] if len(op.inputs) > 3 else None
    types = [kind.decode() if isinstance(kind, bytes) else str(kind) for kind in op.attrs.get("row_partition_types") or ()]
    asked = state.value(op.inputs[0])
    if partition is None or not types or asked is None or not asked.size or asked.flat[0] != -1:
        return
    rows: Optional[SizeLike] = None
    if types[0] == "FIRST_DIM_SIZE":
        counted = state.whole_value(partition)
        rows = None if counted is None else counted.item()
    elif types[0] == "ROW_SPLITS":
        shape = state.whole_shape(partition)
        rows = None if not shape else shape[0] - 1
    _set_size(state, result, 0, rows)


def _sparse_product(state: BatchState, op: Op) -> None:
    """Rows of the sparse matrix, whose shape is the third operand; columns of the dense one."""
    shape, dense = state.whole_value(op.inputs[2]), state.whole_shape(op.inputs[3])
    if shape is not None and len(shape) == 2 and dense is not None:
        rows, columns = (int(bool(op.attrs.get(name))) for name in ("adjoint_a", "adjoint_b"))
        state.set_sizes(op.outputs[0], [shape[rows], dense[1 - columns]])


def _bins(state: BatchState, op: Op) -> None:
    """As many bins as the second operand says."""
    count, rank = state.whole_value(op.inputs[1]), state.rank(op.inputs[0])
    if count is not None and (op.type == "Bincount" or rank == 1):
        state.set_sizes(op.outputs[0], [count.item()])


def _joined(state: BatchState, op: Op) -> None:
    """The sum of the parts' sizes.  Their other sizes are equal."""
    axes = state.ints(op, 0 if op.type == "Concat" else -1)
    tensors = op.inputs[1:] if op.type == "Concat" else op.inputs[:-1]
    parts = [state.whole_shape(t) for t in tensors]
    if axes is not None and all(part is not None and -len(part) <= axes[0] < len(part) for part in parts):
        total: SizeLike = 0
        for part in parts:
            total = total + part[axes[0]]  # type: ignore[index]
        _set_size(state, op.outputs[0], axes[0], total)
        for dim, sizes in enumerate(zip(state.whole_shape(op.outputs[0]) or (), *parts)):  # type: ignore[arg-type]
            blocks = next((blocks for blocks in map(_counted_rows, sizes) if blocks is not None), None)
            for t in tensors if dim != axes[0] % len(parts[0] or ()) else ():
                _count_open(state, t, dim, blocks)


def _cut(state: BatchState, op: Op) -> None:
    """All elements of a vector but the first, or but the last."""
    shape, bounds = state.whole_shape(op.inputs[0]), [state.ints(op, position) for position in (1, 2, 3)]
    begin, end, strides = bounds
    if shape is None or len(shape) != 1 or not all(bounds) or strides != [1] or any(
            op.attrs.get(name, 0) for name in ("shrink_axis_mask", "new_axis_mask", "ellipsis_mask")):
        return
    first = 0 if op.attrs.get("begin_mask", 0) else begin[0]  # type: ignore[index]
    last = 0 if op.attrs.get("end_mask", 0) else end[0]  # type: ignore[index]
    if (first, last) in ((1, 0), (0, -1)) and (op.attrs.get("end_mask", 0) or last):
        state.set_sizes(op.outputs[0], [shape[0] - 1])  # sizes are at least one


def _set_size(state: BatchState, tensor: int, dim: int, size: Optional[SizeLike]) -> None:
    """Record the size of one dimension; the others stay open, unless the graph knows them."""
    shape = state.local_shape(tensor)
    if shape is not None and size is not None:
        sizes = list(shape)
        sizes[dim] = size
        state.set_sizes(tensor, sizes)


MEASURES: Dict[str, Measure] = {"ragged_to_tensor": _ragged_to_tensor, "sparse_product": _sparse_product, "bins": _bins,
                                "joined": _joined, "cut": _cut,
                                "reshaped": _reshaped, "sparse_reshaped": _sparse_reshaped}
