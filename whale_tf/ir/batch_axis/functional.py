"""Handlers of functional control flow (While, If, Case, calls) and of the tensor lists that its gradients use.

A body is analysed like a graph, given the states of its parameters.  The state of a loop parameter joins the states of its
initial value and of the body's result, iterated to a fixed point.  Conversions of arguments are recorded at the functional
op's operands, conversions of results at the body's ``_Retval`` ops.  A tensor list has the layout of its elements.
"""
from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.ir.batch_axis.blocks import Refuse, blocks_of, localise_vector
from whale_tf.ir.batch_axis.control_flow import pass_through
from whale_tf.ir.batch_axis.operands import Operands
from whale_tf.ir.batch_axis.promote import promote
from whale_tf.ir.batch_axis.propagate import Propagation, handler
from whale_tf.ir.batch_axis.result import EXTENT, EXTREMES, UNKNOWN, BatchAxis
from whale_tf.ir.batch_axis.rows import (
    LENGTH,
    LIST,
    RowLoop,
    check_entering,
    check_results,
    is_row_list,
    not_single,
    parameters,
    results_of,
    row_list,
    row_loop,
    set_length,
)
from whale_tf.ir.batch_axis.state import BATCHED, LOOP, OF_SECTION, VARIABLE, ZERO, Given
from whale_tf.ir.extents import Size, Value, static_ints
from whale_tf.ir.graph import Op, OpGraph
from whale_tf.ir.layout import Layout, Rows, partial, replicated, sharded
from whale_tf.ir.traits import traits

MAX_ROUNDS = 12


class Body(NamedTuple):
    """An analysed function: its state and its results."""

    state: Propagation
    results: List[Given]
    returns: List[Op]


def given(state: Propagation, tensor: int) -> Given:
    """The complete state of a tensor, as passed to a body."""
    layout, is_list = state.layout(tensor), state.graph.tensors[tensor].dtype == "variant"
    flags = state.flags[tensor] & (VARIABLE | ZERO | (0 if is_list else OF_SECTION))
    value = state.value(tensor) if layout is EXTENT else None
    return Given(layout, flags, value, state.offsets.get(tensor, 0), state.shape(tensor))


def constant(state: Propagation, tensor: int) -> Optional[Value]:
    """An integer tensor's value, if it does not depend on the size of the mini-batch."""
    value = None if state.layout(tensor) is EXTENT else state.value(tensor)
    return None if static_ints(value) is None else value


def analyse_body(state: Propagation, graph: OpGraph, parameters: Sequence[Given], in_loop: bool,
                 is_tentative: bool = False, values: Sequence[Optional[Value]] = (), sections: bool = True,
                 loop: Optional[RowLoop] = None) -> Body:
    """Propagate through a function whose ``_Arg`` ops have the given states.

    Args:
        is_tentative: this is an early round of a loop; later rounds will know more.
        values: values of the parameters that are constants.
        sections: whether the function is refused if an op needs all examples, which it cannot have in here.
        loop: the function is a round of this loop over rows.
    """
    seeds: Dict[int, Given] = {}
    known_values: Dict[int, Value] = {}
    returns: List[Tuple[int, Op]] = []
    for op in graph.ops:
        if op.type == "_Arg":
            parameter = parameters[op.attrs["index"]]
            seeds[op.outputs[0]] = parameter._replace(flags=parameter.flags | (LOOP if in_loop else 0))
            value = values[op.attrs["index"]] if values else None
            if value is not None:
                known_values[op.outputs[0]] = value
        elif op.type == "_Retval":
            returns.append((op.attrs["index"], op))
    options = state.options._replace(alike={}, sections=state.options.sections and sections)  # `alike` has the graph's numbers
    inner = Propagation(graph, seeds, state.batch, state.batches, options)
    inner.fix(known_values)
    inner.can_reduce = False
    inner.is_tentative, inner.loop = is_tentative, loop
    inner.sweep()
    promote(inner)
    state.met |= inner.met
    ordered = [op for _, op in sorted(returns, key=lambda pair: pair[0])]
    return Body(inner, [given(inner, op.inputs[0]) for op in ordered], ordered)


def known(body: Body) -> None:
    """Refuse a body if one of its results has no layout, for the reason found inside."""
    for ret, result in zip(body.returns, body.results):
        if result.layout is UNKNOWN:
            cause, reason = body.state.result.unknown[ret.inputs[0]]
            op = body.state.graph.ops[cause]
            raise Refuse(f"in its body, {op.name!r} (a {op.type}): {reason}")


def check_exact(*bodies: Body) -> None:
    """Refuse bodies that would be exact only if they ran on all examples."""
    for body in bodies:
        for index in sorted(body.state.looped):
            raise Refuse(f"in its body, {body.state.graph.ops[index].name!r}: {body.state.inexact[index]}")


def keep(state: Propagation, op: Op, attribute: str, body: Body) -> None:
    """Store a body's analysis in the result."""
    axis = body.state.finish()
    state.result.bodies[op.id, attribute] = axis
    if axis.inexact:
        state.inexact[op.id] = f"in its body: {axis.inexact[0].reason}"


def deliver(state: Propagation, op: Op, results: Sequence[Given]) -> None:
    """Set the states of the op's outputs."""
    sources = state.sources(op)
    for tensor, result in zip(op.outputs, results):
        state.flags[tensor] |= result.flags & (VARIABLE | ZERO | (OF_SECTION if result.layout.is_replicated else 0))
        if result.layout is EXTENT and result.value is not None:
            state.set_value(tensor, result.value, sources)
        else:
            state.set(tensor, result.layout, sources)
        if result.offset:
            state.offsets[tensor] = result.offset
    state.open_shapes(op, "output_shapes")


def join(a: Given, b: Given, is_list: bool) -> Given:
    """The state of a value that may be ``a`` or ``b``."""
    flags = (a.flags | b.flags) & (VARIABLE | OF_SECTION) | (a.flags & b.flags & ZERO)
    if b.layout is UNKNOWN:  # a later round may find it; ``known`` checks at the end
        return a
    if is_list and a.flags & ZERO:
        return b._replace(flags=flags)
    if is_list and b.flags & ZERO:
        return a._replace(flags=flags)
    if a.layout is EXTENT or b.layout is EXTENT:
        if repr(a.value) != repr(b.value):
            raise Refuse("it may be one of several sizes that depend on the batch")
        return a._replace(flags=flags)
    if a.offset != b.offset:
        raise Refuse("its operands count positions in different ways")
    ranked = sorted((a, b), key=lambda g: (not g.layout.is_replicated, not g.flags & ZERO), reverse=True)
    return ranked[0]._replace(flags=flags)


def bring(state: Propagation, op: Op, position: int, have: Given, want: Given) -> None:
    """Record the conversions of one operand from one state to another."""
    layout, target = have.layout, want.layout
    tensor = op.inputs[position]
    if layout == target or state.graph.tensors[tensor].dtype == "resource":
        return
    is_zero = bool(have.flags & ZERO)
    if state.graph.tensors[tensor].dtype == "variant":
        if not is_zero:
            raise Refuse(f"a list of elements with layout {layout} becomes one with layout {target}")
        localise_list(state, tensor, target)
        return
    plan = Operands(state, op, "n" * len(op.inputs), [
        layout if i == position else replicated() for i in range(len(op.inputs))])
    if target.is_sharded and layout.is_replicated:
        plan.slice(position, target.dim, target.blocks)
    elif not is_zero and not (layout.kind == target.kind and (layout.dim, layout.blocks) == (target.dim, target.blocks)) and not (
            target.is_partial and layout.is_replicated):
        raise Refuse(f"its layout changes from {layout} to {target}")
    if not is_zero:
        plan.scale(position, layout.power - target.power + (1 if target.is_partial and layout.is_replicated else 0))
    before = state.conversions.get((op.id, position), ())
    plan.record()
    after = state.conversions.get((op.id, position), ())
    if before and before != after:
        state.conversions[op.id, position] = before + after


def decide(state: Propagation, op: Op) -> None:
    """Combine the predicate, operand 0, over the clones if it would differ between them."""
    layout = state.layout(op.inputs[0])
    if layout.is_sharded or layout is EXTENT or layout is UNKNOWN:
        raise Refuse("its condition differs between parts of the batch")
    if layout.is_partial or layout.kind in EXTREMES:
        plan = Operands(state, op, "n" * len(op.inputs), [layout, *(replicated() for _ in op.inputs[1:])])
        plan.resolve(0, True)
        plan.record()


@handler
def while_loop(state: Propagation, op: Op) -> None:
    if op.body is None:
        raise Refuse("its body is not known")
    entering = [given(state, t) for t in op.inputs]
    loop = row_loop(state, op, entering)
    if loop is not None:
        _over_rows(state, op, loop, entering)
        return
    current, body, condition = _settled(state, op, entering)
    if body.state.inexact or condition.state.inexact:
        before, entering = entering, _combined(state, op, entering)
        if entering != before:
            current, body, condition = _settled(state, op, entering)
    decide(condition.state, condition.returns[0])
    for ret, have, want in zip(body.returns, body.results, current):
        bring(body.state, ret, 0, have, want)
    check_exact(body, condition)  # before lists outside the loop get the shapes of a clone's elements
    for i, (have, want) in enumerate(zip(entering, current)):
        bring(state, op, i, have, want)
    keep(state, op, "body", body)
    keep(state, op, "cond", condition)
    deliver(state, op, current)


def _over_rows(state: Propagation, op: Op, loop: RowLoop, entering: List[Given]) -> None:
    """A loop that makes a round for each row of the batch (:mod:`whale_tf.ir.batch_axis.rows`)."""
    assert op.body is not None
    entering = _combined(state, op, entering)
    check_entering(loop, entering)
    results = entering
    for _ in range(MAX_ROUNDS):
        before = parameters(loop, entering, results)
        body = analyse_body(state, op.body["body"], before, True, loop=loop)
        results = body.results
        if list(map(_key, parameters(loop, entering, results))) == list(map(_key, before)):
            break
    for number, (ret, have) in enumerate(zip(body.returns, results)):
        if have.layout is UNKNOWN and number in loop.lists | loop.sums:
            cause, reason = body.state.result.unknown[ret.inputs[0]]
            raise Refuse(f"in its body, {body.state.graph.ops[cause].name!r} (a {body.state.graph.ops[cause].type}): {reason}")
    check_results(body.state, loop, results)
    if _changes(body.state.result):  # clones have the function of the local script
        raise Refuse("a round of its loop computes with the number of examples")
    for number, have in enumerate(entering):
        if number in loop.sums:
            bring(state, op, number, have, Given(partial()))
        elif number in loop.kept and have.layout.is_replicated:
            bring(state, op, number, have, have._replace(layout=replicated()))
        elif number in loop.lists and not is_row_list(have.layout):
            localise_list(state, op.inputs[number], sharded(LIST, loop.blocks))
    for number in sorted(loop.limits):
        state.localise_elements(op, number, {0: loop.blocks})
    if loop.constants:
        condition = analyse_body(state, op.body["cond"], [Given(UNKNOWN)] * len(entering), True)
        for index, position in sorted(loop.constants):
            condition.state.localise_elements(condition.state.graph.ops[index], position, {0: loop.blocks})
        keep(state, op, "cond", condition)
    deliver(state, op, results_of(loop, entering, results))


def _changes(axis: BatchAxis) -> bool:
    """Whether a clone computes something else in a function."""
    return bool(axis.conversions or axis.localise) or any(map(_changes, axis.bodies.values()))


def _settled(state: Propagation, op: Op, entering: List[Given]) -> Tuple[List[Given], Body, Body]:
    """The states of a loop's parameters, given those of their initial values; and the loop's body and condition."""
    assert op.body is not None
    lists = [state.graph.tensors[t].dtype == "variant" for t in op.inputs]
    current = entering
    for _ in range(MAX_ROUNDS):
        body = analyse_body(state, op.body["body"], current, True, True)
        # join lists with the initial value, because an early round may have filled them with elements of unknown layout
        following = [join(a if is_list else b, c, is_list) for a, b, c, is_list in zip(
            entering, current, body.results, lists)]
        if [_key(g) for g in following] == [_key(g) for g in current]:
            break
        current = following
    else:
        raise Refuse("its layouts change with every iteration")
    body = analyse_body(state, op.body["body"], current, True)
    known(body)
    return current, body, analyse_body(state, op.body["cond"], current, True)


def _combined(state: Propagation, op: Op, entering: Sequence[Given]) -> List[Given]:
    """Values that follow from examples but not from variables, such as the greatest length, are combined over all clones before
    the loop."""
    plan = Operands(state, op, "n" * len(op.inputs), [
        have.layout if have.layout.kind in EXTREMES or have.layout.is_partial else replicated() for have in entering])
    for i, layout in enumerate(list(plan.layouts)):
        if not layout.is_replicated and state.can_reduce and not state.flags[op.inputs[i]] & (VARIABLE | LOOP):
            plan.resolve(i, True)
    plan.record()
    return [have._replace(layout=layout) if plan.steps[i] else have
            for i, (have, layout) in enumerate(zip(entering, plan.layouts))]


def _key(state: Given) -> Tuple[object, ...]:
    return state.layout, state.flags, repr(state.value), state.offset


@handler
def branches(state: Propagation, op: Op) -> None:
    if op.body is None:
        raise Refuse("its branches are not known")
    decide(state, op)
    parameters = [given(state, t) for t in op.inputs[1:]]
    bodies = [(name, analyse_body(state, op.body[name], parameters, False)) for name in sorted(op.body)]
    for _, body in bodies:
        known(body)
    joined = bodies[0][1].results
    for _, body in bodies[1:]:
        joined = [join(a, b, state.graph.tensors[t].dtype == "variant") for a, b, t in zip(joined, body.results, op.outputs)]
    for name, body in bodies:
        for ret, have, want in zip(body.returns, body.results, joined):
            bring(body.state, ret, 0, have, want)
        check_exact(body)
        keep(state, op, name, body)
    deliver(state, op, joined)


@handler
def call(state: Propagation, op: Op) -> None:
    if not op.body:
        raise Refuse("its body is not known")
    name = next(iter(op.body))
    body = analyse_body(state, op.body[name], [given(state, t) for t in op.inputs], False,
                        values=[constant(state, t) for t in op.inputs], sections=False)
    known(body)
    keep(state, op, name, body)
    deliver(state, op, body.results)
    values = {tensor: constant(body.state, ret.inputs[0]) for tensor, ret in zip(op.outputs, body.returns)}
    state.fix({tensor: value for tensor, value in values.items() if value is not None})


# ---------------------------------------------------------------------------------------------------------------------
# Tensor lists: values of dtype variant, which are created empty (flag ZERO) and then filled.

@handler
def make_list(state: Propagation, op: Op) -> None:
    if state.layouts.get(op.inputs[1]) is EXTENT:
        value = state.value(op.inputs[1])
        size = value[()] if value is not None and value.shape == () else None
        if not isinstance(size, Size):
            raise Refuse("it has an element for each example")
        state.set(op.outputs[0], row_list(sharded(0, blocks_of(size))), state.sources(op), True)
        state.lists[op.outputs[0]] = op.id
        return
    plan = Operands(state, op, "nn", [state.layout(t) for t in op.inputs])
    if plan.layouts[1].is_partial or plan.layouts[1].kind in EXTREMES:  # as many as a loop's rounds: the longest of all examples
        plan.resolve(1, True)
        plan.record()
    state.flags[op.outputs[0]] |= ZERO | BATCHED
    state.lists[op.outputs[0]] = op.id


def localise_list(state: Propagation, tensor: int, layout: Layout) -> None:
    """Give the list behind ``tensor`` the clone's element shape, because its elements are divided."""
    maker = state.lists.get(tensor)
    if maker is None or not layout.is_sharded:
        return
    op = state.graph.ops[maker]
    if is_row_list(layout):
        if op.type != "EmptyTensorList":
            state.localise_elements(op, 1, {0: layout.blocks})
        return
    value = state.value(op.inputs[0])
    if value is None or value.ndim == 0 or layout.dim >= len(value) or value[layout.dim] == -1 or (
            isinstance(value[layout.dim], Size)):
        return
    state.check_baked(int(value[layout.dim]), layout.blocks)
    state.result.localise[op.id, 0] = localise_vector(list(value), {layout.dim: layout.blocks})


def _element_shape(state: Propagation, op: Op, position: int, dim: int, layout: Layout) -> None:
    """Localise a constant element shape at a use of a list."""
    value = state.value(op.inputs[position])
    if layout.is_sharded and value is not None and value.ndim and (
            value[dim] != -1 and not isinstance(value[dim], Size)):
        state.localise_elements(op, position, {dim: layout.blocks})


@handler
def list_write(state: Propagation, op: Op) -> None:
    items, item = op.inputs[0], op.inputs[-1]
    not_single(state.layout(items))
    if op.type == "TensorListSetItem" and op.inputs[1] in state.layouts:
        raise Refuse("it has an element for each example")
    have, stored = given(state, items), given(state, item)
    if stored.layout.kind in EXTREMES or stored.offset:
        raise Refuse("it stores positions or extremes of the batch")
    if have.flags & ZERO and have.layout.is_replicated:
        want = stored
        localise_list(state, items, stored.layout)
    elif state.is_tentative and have.layout.is_replicated:
        want = stored
    else:
        want = have
        bring(state, op, len(op.inputs) - 1, stored, have)
    result = op.outputs[0]
    deliver(state, op, [want._replace(flags=(have.flags | stored.flags) & VARIABLE | (have.flags & stored.flags & ZERO))])
    if items in state.lists:
        state.lists[result] = state.lists[items]


@handler
def list_read(state: Propagation, op: Op) -> None:
    if op.type == "TensorListGetItem" and op.inputs[1] in state.layouts:
        raise Refuse("it has an element for each example")
    have = given(state, op.inputs[0])
    not_single(have.layout)
    _element_shape(state, op, len(op.inputs) - 1, have.layout.dim, have.layout)
    deliver(state, op, [have] * len(op.outputs))
    if len(op.outputs) > 1 and op.inputs[0] in state.lists:
        state.lists[op.outputs[0]] = state.lists[op.inputs[0]]


@handler
def list_stack(state: Propagation, op: Op) -> None:
    have = given(state, op.inputs[0])
    layout = have.layout
    if layout is EXTENT:
        raise Refuse("it stacks sizes of the batch")
    if layout.is_sharded:
        if not is_row_list(layout):
            _element_shape(state, op, len(op.inputs) - 1, layout.dim, layout)
        elif op.type == "TensorListGather" or have.offset == LENGTH:
            raise Refuse("it takes rows of the batch by their numbers, or lengths of lists of rows")
        else:
            if op.attrs.get("num_elements", -1) != -1:
                state.result.attributes[op.id, "num_elements"] = -1
            for other in state.graph.ops:  # its gradient may have been visited before
                if other.forward == op.id and traits(other.type).batch == "list_from_tensor" and state.visited[other.id]:
                    state.push(other.id)
        layout = sharded(layout.dim + 1, layout.blocks, layout.power)
    deliver(state, op, [have._replace(layout=layout)])


@handler
def list_from_tensor(state: Propagation, op: Op) -> None:
    have, divided = given(state, op.inputs[0]), state.rows_of_list(op)
    layout = have.layout
    if divided is not None:
        layout = divided
        plan = Operands(state, op, "mn", [have.layout, replicated()])
        plan.slice(0, layout.dim, layout.blocks)
        plan.record()
    if layout.is_sharded and layout.dim == 0:
        power, layout = layout.power, row_list(layout)
        if not isinstance(have.offset, int) and not isinstance(have.offset, Rows):
            raise Refuse("it has an element for each example")
        if divided is None:
            plan = Operands(state, op, "nn", [have.layout, replicated()])
        plan.scale(0, power)
        plan.record()
    elif layout.is_sharded:
        layout = sharded(layout.dim - 1, layout.blocks, layout.power)
        _element_shape(state, op, 1, layout.dim, layout)
    deliver(state, op, [have._replace(layout=layout)])
    if divided is not None:
        state.result.sources_of[op.outputs[0]] = state.sources_in(divided.blocks)


@handler
def list_resize(state: Propagation, op: Op) -> None:
    not_single(state.layout(op.inputs[0]))
    pass_through(state, op.inputs[0], op.outputs)


@handler
def list_length(state: Propagation, op: Op) -> None:
    """A length is the same for all clones, except that of a list of rows; an element's shape is already the clone's."""
    layout = state.layout(op.inputs[0])
    if op.type == "TensorListLength" and is_row_list(layout):
        set_length(state, op, layout)


@handler
def optional(state: Propagation, op: Op) -> None:
    """A branch's intermediate result, which is passed to its gradient."""
    if len(op.inputs) != 1 or len(op.outputs) != 1:
        raise Refuse("it packs several values")
    deliver(state, op, [given(state, op.inputs[0])])


@handler
def no_value(state: Propagation, op: Op) -> None:
    state.flags[op.outputs[0]] |= ZERO | BATCHED


@handler
def zeros_like(state: Propagation, op: Op) -> None:
    """Zeros with the operand's layout, or a list to which elements of any layout may be added."""
    layout = state.layout(op.inputs[0])
    if layout is EXTENT:
        layout = replicated()
    state.set(op.outputs[0], layout._replace(power=0) if layout.is_sharded else replicated(),
              state.result.sources_of.get(op.inputs[0], ()), True)
    if state.lacks_sizes(op.outputs[0]) and op.inputs[0] in state.sizes:
        state.set_sizes(op.outputs[0], state.sizes[op.inputs[0]])
