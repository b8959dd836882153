"""Loops over the rows of the mini-batch: ``tf.map_fn``, ``for row in x``, and their gradients.

Such a loop makes one round for each row.  A round takes its row from lists, computes it without those of other rounds, puts
results into lists, and adds to sums.  So each clone's loop makes a round for each of its own rows, with the functions of the
local script: what a round computes has no dimension of examples.

::

    x [B, ...] --TensorListFromTensor--> list --While(i < B)--> list --TensorListStack--> y [B, ...]
    local      rounds 0 ... B - 1
    clone i    rounds o_i ... o_i + b_i - 1, which count from 0

A list of rows has the layout ``sharded`` along the dimension in front of those of its elements, ``LIST`` (-1).  Inside the loop,
a value that belongs to the round's row is a ``ROW``; if it has an offset, it is the row's position among the rows.  All these
values are exactly the local script's (power 0): weights of gradients are multiplied before a list is made of them.
"""
from __future__ import annotations

import functools
from typing import Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf.ir.batch_axis.blocks import Refuse
from whale_tf.ir.batch_axis.result import EXTENT, UNKNOWN
from whale_tf.ir.batch_axis.state import BATCHED, VARIABLE, ZERO, BatchState, Given
from whale_tf.ir.extents import Size, SizeLike, rows_of, scalar, static_ints
from whale_tf.ir.graph import Op, OpGraph
from whale_tf.ir.layout import Block, Layout, Rows, is_grouped, is_measured, partial, replicated, sharded
from whale_tf.ir.traits import Gives, Role, VariableUse, traits

LIST = -1  # the dimension of a list's elements
ROW = Layout("row")
LENGTH = Rows(1, "a list")  # the offset of a list's length, which is no value: a clone's list is shorter
_CARRIED = "it carries a value from one row of the batch to the next"
_POSITION = "it computes with the position of a row"
_COMPUTES = (Role.COMPUTE, Role.CALL, Role.WHILE, Role.CONDITIONAL, Role.RANDOM, Role.EMPTY_LIST)
_ROUNDS = "the rounds of its loop are not the examples"
_SINGLE = "it takes or puts a single row of the batch"


class RowLoop(NamedTuple):
    """What the arguments of a loop over rows are, by number.

    Attributes:
        blocks: its rows.
        counters: begin at 0 and count the rounds.
        kept: the same in all rounds.
        limits: among these, constants that hold the number of rows of the whole mini-batch.
        constants: such constants in the loop's condition: ops and their operands.
        lists: get an element in each round, or lose one.
        sums: of values of all rounds.
        is_backward: takes the rows in reverse order, so that its counters are no positions.
    """

    blocks: Tuple[Block, ...]
    counters: FrozenSet[int]
    kept: FrozenSet[int]
    limits: FrozenSet[int]
    constants: FrozenSet[Tuple[int, int]]
    lists: FrozenSet[int]
    sums: FrozenSet[int]
    is_backward: bool

    @property
    def rounds(self) -> SizeLike:
        return rows_of(self.blocks)


def is_row_list(layout: Layout) -> bool:
    return layout.is_sharded and layout.dim == LIST


def row_list(layout: Layout) -> Layout:
    """The layout of a list of the rows of a tensor that is divided along its first dimension.

    Raises:
        Refuse: it is not known which rows are whose.
    """
    blocks = layout.blocks
    if blocks is None or is_measured(blocks) or is_grouped(blocks) or len(blocks) != 1:
        raise Refuse("it has an element for each example")
    return sharded(LIST, blocks)


def not_single(layout: Layout) -> None:
    """Refuse an op on a list of rows outside of a loop over them."""
    if is_row_list(layout):
        raise Refuse(_SINGLE)


# -- the loop ----------------------------------------------------------------------------------------------------------


def row_loop(state: BatchState, op: Op, entering: Sequence[Given]) -> Optional[RowLoop]:
    """How a functional loop runs over rows; None: it has no list of rows.

    Raises:
        Refuse: it has one, but its rounds do not belong to single rows.
    """
    found = [have.layout.blocks for have in entering if is_row_list(have.layout)]
    if not found or op.body is None:
        return None
    blocks = functools.reduce(state.unify, found)
    if blocks is None or any(blocks != other for other in found):
        raise Refuse("it has rows of several batches")
    body, condition = op.body["body"], op.body["cond"]
    if not _only_computes(op):
        raise Refuse("it does more than compute in a loop over examples")
    arguments, returns = _arguments(body), _returns(body)
    counters: Set[int] = set()
    kept: Set[int] = set()
    lists: Set[int] = set()
    sums: Set[int] = set()
    is_backward = False
    for number, tensor in enumerate(returns):
        origin = body.origin(tensor)
        if origin == arguments.get(number):
            kept.add(number)
        elif body.tensors[tensor].dtype == "variant":
            lists.add(number)
            is_backward |= _check_once(state, op.inputs[number], body.producer(origin))
        elif _counts(body, origin, arguments[number]) and static_ints(state.value(op.inputs[number])) == [0]:
            counters.add(number)
        else:
            sums.add(number)
    if is_backward and any(body.producer(body.origin(returns[number])).type == "TensorListPushBack" for number in lists):
        raise Refuse("it puts rows into a list in reverse order")
    limits, constants = _limits(state, condition, op, counters, kept, entering, blocks)
    return RowLoop(blocks, frozenset(counters), frozenset(kept), limits, constants, frozenset(lists), frozenset(sums),
                   is_backward)


def _arguments(graph: OpGraph) -> Dict[int, int]:
    return {op.attrs["index"]: op.outputs[0] for op in graph.ops if op.type == "_Arg"}


def _returns(graph: OpGraph) -> List[int]:
    found = {op.attrs["index"]: op.inputs[0] for op in graph.ops if op.type == "_Retval"}
    return [found[number] for number in sorted(found)]


def _counts(body: OpGraph, tensor: int, argument: int) -> bool:
    """Whether a result is the argument plus one."""
    op = body.producer(tensor)
    if traits(op.type).value != "add" or len(op.inputs) != 2:
        return False
    one, other = (body.origin(t) for t in op.inputs)
    step = body.producer(other if one == argument else one).value
    return argument in (one, other) and step is not None and step.dtype.kind == "i" and step.shape == () and int(step) == 1


def _check_once(state: BatchState, entering: int, last: Op) -> bool:
    """Whether a list loses an element in each round.

    Raises:
        Refuse: it gets or loses several, or was not empty before it got some.
    """
    pushes, pops = last.type == "TensorListPushBack", last.type == "TensorListPopBack"
    if not pushes:
        return pops
    maker = state.lists.get(entering)
    if maker is None or state.graph.ops[maker].type != "EmptyTensorList":
        raise Refuse("it has other elements before those of the examples")
    return False


def _limits(state: BatchState, condition: OpGraph, op: Op, counters: Set[int], kept: Set[int], entering: Sequence[Given],
            blocks: Tuple[Block, ...]) -> Tuple[FrozenSet[int], FrozenSet[Tuple[int, int]]]:
    """Check that the loop ends after as many rounds as there are rows.

    Returns:
        Arguments, and operands in the condition, that are constants of the number of rows of the whole mini-batch.
    """
    arguments = {tensor: number for number, tensor in _arguments(condition).items()}
    each = blocks[0]
    total = state.batch * each if state.batch is not None and isinstance(each, int) else None
    limits: Set[int] = set()
    constants: Set[Tuple[int, int]] = set()
    pending, is_limited = _returns(condition)[:1], False
    while pending:
        last = condition.producer(condition.origin(pending.pop()))
        kind = traits(last.type).value
        if kind == "logical_and":
            pending.extend(last.inputs)
            continue
        if kind not in ("less", "greater"):
            raise Refuse(_ROUNDS)
        count, limit = (condition.origin(t) for t in (last.inputs if kind == "less" else last.inputs[::-1]))
        number, constant = arguments.get(limit, -1), condition.producer(limit).value
        if arguments.get(count) not in counters or (number >= 0 and number not in kept):
            raise Refuse(_ROUNDS)
        value = None if number < 0 else entering[number].value if entering[number].layout is EXTENT else (
            state.value(op.inputs[number]))
        if value is not None and value.shape == () and value[()] == rows_of(blocks):
            is_limited = True
        elif total is not None and static_ints(value) == [total]:
            limits.add(number)
            is_limited = True
        elif constant is None or constant.shape != () or total is None or int(constant) < total:  # it may allow more rounds
            raise Refuse(_ROUNDS)
        elif int(constant) == total:
            constants.add((last.id, int(kind == "less")))
            is_limited = True
    if not is_limited:
        raise Refuse(_ROUNDS)
    return frozenset(limits), frozenset(constants)


def parameters(loop: RowLoop, entering: Sequence[Given], before: Sequence[Given]) -> List[Given]:
    """The states of the arguments in a round.

    Args:
        before: those of the results of earlier rounds.
    """
    found = []
    for number, (have, result) in enumerate(zip(entering, before)):
        flags = (have.flags | result.flags) & VARIABLE
        if number in loop.counters:
            found.append(Given(UNKNOWN) if loop.is_backward else Given(ROW, 0, None, loop.blocks[0], ()))
        elif number in loop.lists:
            found.append(Given(sharded(LIST, loop.blocks), flags, None, result.offset))
        elif number in loop.sums:
            found.append(Given(partial(), flags, None, 0, have.shape))
        elif have.layout.is_replicated:
            found.append(have._replace(layout=replicated()))
        else:
            found.append(have)
    return found


def check_entering(loop: RowLoop, entering: Sequence[Given]) -> None:
    """Refuse initial values that do not fit."""
    for number, have in enumerate(entering):
        layout = have.layout
        if layout is UNKNOWN:
            raise Refuse("an operand has no layout")
        if number in loop.lists and not is_row_list(layout) and not have.flags & ZERO:
            raise Refuse("a list has rows of all examples")
        if number in loop.sums and not layout.is_replicated and not layout.is_partial:
            raise Refuse(_CARRIED)
        if number in loop.kept and not (layout.is_replicated or layout.is_sharded or layout is EXTENT):
            raise Refuse("it needs a value that follows from all examples")


def check_results(body: BatchState, loop: RowLoop, results: Sequence[Given]) -> None:
    """Refuse a body whose results do not belong to the round's row.

    Args:
        body: the state of the body.
    """
    arguments, returns = _arguments(body.graph), _returns(body.graph)
    for number, have in enumerate(results):
        if number in loop.lists and (have.layout != sharded(LIST, loop.blocks) or not _grows(
                body.graph, returns[number], arguments[number], loop)):
            raise Refuse(_CARRIED)
        if number in loop.sums and (have.layout != partial() or _beginning(body, returns[number]) != arguments[number]):
            raise Refuse(_CARRIED)


def _beginning(body: BatchState, tensor: int) -> int:
    """The sum to which values are added."""
    while True:
        before = [t for t in body.graph.producer(tensor).inputs if body.layout(t).is_partial]
        if not before:
            return tensor
        tensor = before[0]


def _grows(graph: OpGraph, tensor: int, argument: Optional[int], loop: RowLoop) -> bool:
    """Whether a list is an argument in which elements are put or taken, or to which others are added element by element; without
    an argument: a new list in which elements are put."""
    op = graph.producer(tensor)
    if tensor == argument:
        return True
    if argument is None and (traits(op.type).role is Role.EMPTY_LIST or traits(op.type).gives is Gives.LIKE):
        return True
    if op.type in ("TensorListPushBack", "TensorListPopBack"):  # once in each round
        return tensor == op.outputs[0] and graph.origin(op.inputs[0]) == argument
    if op.type == "TensorListSetItem" or op.type == "Identity":
        return _grows(graph, op.inputs[0], argument, loop)
    if traits(op.type).rule.startswith("elementwise.same_shape"):
        own = [t for t in op.inputs if argument is not None and _grows(graph, t, argument, loop)]
        return len(own) == (argument is not None) and all(t in own or _grows(graph, t, None, loop) for t in op.inputs)
    return False


def results_of(loop: RowLoop, entering: Sequence[Given], results: Sequence[Given]) -> List[Given]:
    """The states of the loop's results."""
    found = []
    for number, (have, result) in enumerate(zip(entering, results)):
        if number in loop.counters:
            found.append(Given(EXTENT, 0, scalar(loop.rounds)))
        elif number in loop.kept:
            found.append(have._replace(layout=replicated()) if have.layout.is_replicated else have)
        else:
            found.append(result._replace(flags=result.flags & VARIABLE))
    return found


# -- a round -----------------------------------------------------------------------------------------------------------


def visit_row(state: BatchState, op: Op, loop: RowLoop) -> bool:
    """Derive the results of an op inside the loop's body.

    Returns:
        False: no operand belongs to a row, so that the op is as in any body.

    Raises:
        Refuse: the result does not belong to one row.
    """
    layouts = [state.layout(t) for t in op.inputs]
    row = traits(op.type)
    if row.batch in _LISTS and any(map(is_row_list, layouts)):
        _LISTS[row.batch](state, op, loop)
        return True
    if all(is_row_list(layout) or state.flags[t] & ZERO for t, layout in zip(op.inputs, layouts)) and any(
            map(is_row_list, layouts)) and row.rule.startswith("elementwise.same_shape"):
        state.set(op.outputs[0], sharded(LIST, loop.blocks), state.sources(op))
        return True
    if any(layout.is_partial for layout in layouts):
        _add(state, op, layouts)
        return True
    divided = [layout.is_sharded for layout in layouts]
    if any(divided):
        if row.gives not in (Gives.SIZES, Gives.SAME) or any(map(is_row_list, layouts)):
            raise Refuse("it needs other examples than the row's")
        return False
    if ROW not in layouts:
        return False
    if row.role is Role.RESULT or row.batch == "look":
        return True
    if row.batch == "make_list" and state.offsets.get(op.inputs[1]) == LENGTH:
        state.set(op.outputs[0], sharded(LIST, loop.blocks), state.sources(op), True)
        return True
    offsets = {state.offsets[t] for t in op.inputs if t in state.offsets}
    if offsets and (row.gives is not Gives.SAME or len(op.inputs) != 1):
        raise Refuse(_POSITION)
    if any(layout != ROW and layout != replicated() for layout in layouts):
        raise Refuse("it needs more than a row")
    is_known = op.body is not None or row.role not in (Role.CALL, Role.WHILE, Role.CONDITIONAL)
    if not is_known or (row.role not in _COMPUTES and not op.type.startswith("Optional")):
        raise Refuse("it does more than compute")
    for tensor in op.outputs:
        _set_row(state, tensor)
        if offsets:
            state.offsets[tensor] = min(offsets, key=repr)
    return True


def _only_computes(op: Op) -> bool:
    """Whether the functions that an op calls do the same whichever rounds came before."""
    for body in (op.body or {}).values():
        for inner in body.ops:
            row = traits(inner.type)
            draws = row.role is Role.RANDOM and not inner.type.startswith("Stateless")
            outside = row.role in (Role.PULL, Role.HOST, Role.INPUT, Role.TABLE) and not inner.type.startswith("Optional")
            if draws or outside or row.is_write or (
                    row.state not in (VariableUse.NONE, VariableUse.READ, VariableUse.HANDLE)) or not _only_computes(inner):
                return False
    return True


def _set_row(state: BatchState, tensor: int) -> None:
    state.layouts[tensor] = ROW
    state.flags[tensor] |= BATCHED


def _add(state: BatchState, op: Op, layouts: Sequence[Layout]) -> None:
    """A value of the round is added to a sum; no round reads sums otherwise."""
    row = traits(op.type)
    is_sum = row.value == "add" or row.rule.startswith("elementwise.same_shape")
    if row.role is Role.RESULT:
        return
    if not (row.gives is Gives.SAME or is_sum) or sum(layout.is_partial for layout in layouts) != 1 or any(
            not layout.is_partial and layout not in (ROW, replicated()) for layout in layouts) or any(
            t in state.offsets for t in op.inputs):
        raise Refuse(_CARRIED)
    state.set(op.outputs[0], partial(), ())


def _is_returned(graph: OpGraph, op: Op) -> bool:
    """Whether the list that an op makes longer or shorter goes on to the next round as the same argument."""
    returns, list_ = _returns(graph), graph.origin(op.inputs[0])
    return any(argument == list_ and graph.origin(returns[number]) == op.outputs[0]
               for number, argument in _arguments(graph).items())


def _is_own(state: BatchState, op: Op, loop: RowLoop) -> bool:
    """Whether an op puts or takes the element of its round."""
    if not is_row_list(state.layout(op.inputs[0])):
        return False
    if op.type in ("TensorListSetItem", "TensorListGetItem"):
        return state.layout(op.inputs[1]) == ROW and state.offsets.get(op.inputs[1]) == loop.blocks[0]
    return _is_returned(state.graph, op)


def _put(state: BatchState, op: Op, loop: RowLoop) -> None:
    item, result = op.inputs[-1], op.outputs[0]
    if not _is_own(state, op, loop) or state.layout(item) not in (ROW, replicated()):
        raise Refuse("it puts something else than its row into a list")
    state.set(result, sharded(LIST, loop.blocks), state.sources(op))
    if item in state.offsets:
        state.offsets[result] = state.offsets[item]


def _take(state: BatchState, op: Op, loop: RowLoop) -> None:
    items = op.inputs[0]
    if not _is_own(state, op, loop):
        raise Refuse("it takes another row than its own from a list")
    _set_row(state, op.outputs[-1])
    for result in op.outputs[:-1]:
        state.set(result, state.layout(items), state.sources(op))
    for result in op.outputs if items in state.offsets else ():
        state.offsets[result] = state.offsets[items]


def _length(state: BatchState, op: Op, loop: RowLoop) -> None:
    if op.type == "TensorListLength":
        _set_row(state, op.outputs[0])
        state.offsets[op.outputs[0]] = LENGTH


def set_length(state: BatchState, op: Op, layout: Layout) -> None:
    """A list of rows is as long as the clone has rows."""
    assert layout.blocks is not None
    length = rows_of(layout.blocks)
    assert isinstance(length, Size)
    state.set_value(op.outputs[0], scalar(length), state.sources(op))


def _zeros(state: BatchState, op: Op, loop: RowLoop) -> None:
    state.set(op.outputs[0], sharded(LIST, loop.blocks), state.sources(op), True)


def _same(state: BatchState, op: Op, loop: RowLoop) -> None:
    tensor, result = op.inputs[0], op.outputs[0]
    state.set(result, state.layout(tensor), state.sources(op), bool(state.flags[tensor] & ZERO))
    if tensor in state.offsets:
        state.offsets[result] = state.offsets[tensor]


_LISTS = {"list_write": _put, "list_read": _take, "list_length": _length, "zeros_like": _zeros, "identity": _same}
