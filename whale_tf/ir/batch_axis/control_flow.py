"""Handlers of TensorFlow 1 control flow: loops (Enter, Merge, Switch, NextIteration, Exit), conditions, stacks and arrays.

Every clone runs its own loops and branches.  A loop variable has the same layout in all iterations, which is found as a fixed
point: the first visit to a Merge sees only the initial value, and the back edge leads to the Merge again.
"""
from __future__ import annotations

from typing import List, Sequence, Tuple

from whale_tf.ir.batch_axis.blocks import Refuse
from whale_tf.ir.batch_axis.operands import Operands
from whale_tf.ir.batch_axis.propagate import Propagation, handler
from whale_tf.ir.batch_axis.result import EXTENT, EXTREMES, UNKNOWN
from whale_tf.ir.batch_axis.state import BATCHED, LOOP, UNIFORM, VARIABLE, ZERO
from whale_tf.ir.graph import Op
from whale_tf.ir.layout import Layout, sharded
from whale_tf.ir.traits import NEXT_ITERATIONS, traits

MAX_MERGE_VISITS = 12
Root = Tuple[object, ...]


def pass_through(state: Propagation, tensor: int, results: Sequence[int]) -> None:
    """Results that equal ``tensor``, which may be a handle."""
    layout, sources = state.layout(tensor), state.result.sources_of.get(tensor, ())
    for result in results:
        if tensor in state.containers.roots:
            state.containers.roots[result] = state.containers.roots[tensor]
            state.flags[result] |= BATCHED
        if layout is EXTENT:
            value = state.value(tensor)
            assert value is not None
            state.set_value(result, value, sources)
        else:
            state.set(result, layout, sources)
        if tensor in state.offsets:
            state.offsets[result] = state.offsets[tensor]
        if tensor in state.lists:
            state.lists[result] = state.lists[tensor]
        state.flags[result] |= state.flags[tensor] & (ZERO | VARIABLE)
        if layout is not EXTENT and layout is not UNKNOWN and state.lacks_sizes(result):
            shape = state.sizes.get(tensor)
            if shape is not None:
                state.set_sizes(result, shape)


@handler
def enter(state: Propagation, op: Op) -> None:
    tensor, result = op.inputs[0], op.outputs[0]
    layout = state.layout(tensor)
    promoted = state.promoted.get(result)
    if layout.is_partial and not state.flags[tensor] & VARIABLE and op.attrs.get("is_constant"):
        plan = Operands(state, op, "n", [layout])
        plan.resolve(0, True)
        plan.record()
    elif promoted is not None and layout.is_replicated and layout is not UNKNOWN:
        plan = Operands(state, op, "m", [layout])
        plan.slice(0, promoted[0], promoted[1])
        plan.record()
        state.set(result, sharded(promoted[0], promoted[1], layout.power), state.sources(op))
    else:
        pass_through(state, tensor, op.outputs)
    if Operands(state, op, "m", [layout]).zero(0):
        state.flags[result] |= ZERO
    state.flags[result] |= LOOP


@handler
def leave(state: Propagation, op: Op) -> None:
    pass_through(state, op.inputs[0], op.outputs)
    state.flags[op.outputs[0]] &= ~LOOP


@handler
def next_iteration(state: Propagation, op: Op) -> None:
    pass_through(state, op.inputs[0], op.outputs)


@handler
def identity(state: Propagation, op: Op) -> None:
    pass_through(state, op.inputs[0], op.outputs)
    state.flags[op.outputs[0]] |= state.flags[op.inputs[0]] & UNIFORM


@handler
def identities(state: Propagation, op: Op) -> None:
    for tensor, result in zip(op.inputs, op.outputs):
        if tensor in state.result.unknown:
            state.lose_tensor(result, tensor)
        else:
            pass_through(state, tensor, [result])


@handler
def look(state: Propagation, op: Op) -> None:
    """Each clone checks and prints its own part.  That something holds for some example is checked over all."""
    if op.outputs:
        pass_through(state, op.inputs[0], op.outputs)
    elif state.layout(op.inputs[0]).kind in EXTREMES:
        _decide(state, op, 0, ["n"] * len(op.inputs))


@handler
def loop_condition(state: Propagation, op: Op) -> None:
    _decide(state, op, 0, ["n"])


def _decide(state: Propagation, op: Op, position: int, roles: List[str]) -> None:
    """A predicate that differs between clones is inexact: each clone follows its own."""
    layout = state.layout(op.inputs[position])
    if layout.is_sharded:
        raise Refuse("its condition differs from example to example")
    if layout is EXTENT:
        raise Refuse("its condition depends on the number of examples")
    if layout.is_partial or layout.kind in EXTREMES:
        layouts = [state.layout(t) for t in op.inputs]
        plan = Operands(state, op, "".join(roles), layouts)
        plan.resolve(position, True)
        plan.record()


@handler
def switch(state: Propagation, op: Op) -> None:
    _decide(state, op, 1, ["m", "n"])
    pass_through(state, op.inputs[0], op.outputs)


@handler
def merge(state: Propagation, op: Op) -> None:
    """All known inputs must agree.  A whole value among divided ones is divided where it enters the loop."""
    tensors = state.graph.tensors
    known = [i for i, t in enumerate(op.inputs) if state.visited[tensors[t].op]]
    is_loop = any(state.graph.ops[tensors[t].op].type in NEXT_ITERATIONS for t in op.inputs)
    if is_loop:
        state.loop_merges.add(op.id)
        if not state.is_settled:  # the next round may find a layout that the first did not know
            known = [i for i in known if op.inputs[i] not in state.result.unknown] or known[:1]
        state.merge_visits[op.id] = state.merge_visits.get(op.id, 0) + 1
        if state.merge_visits[op.id] > MAX_MERGE_VISITS:
            raise Refuse("its layout changes with every iteration")
    if any(op.inputs[i] in state.result.unknown for i in known):
        raise Refuse("an operand has no layout")
    first = op.inputs[known[0]]
    for t in op.inputs:
        if t in state.containers.roots:
            state.containers.roots[op.outputs[0]] = state.containers.roots[t]
            state.flags[op.outputs[0]] |= BATCHED
            return
    layouts = [state.layout(op.inputs[i]) for i in known]
    if any(layout is EXTENT for layout in layouts):
        values = {repr(state.value(op.inputs[i])) for i in known}
        if len(values) != 1:
            raise Refuse("it may be one of several sizes that depend on the batch")
        pass_through(state, first, op.outputs[:1])
        return
    _join(state, op, known, layouts)


def _join(state: Propagation, op: Op, known: Sequence[int], layouts: Sequence[Layout]) -> None:
    everything = [state.layout(t) for t in op.inputs]
    plan = Operands(state, op, "".join("a" if i in known else "n" for i in range(len(op.inputs))),
                    [everything[i] if i in known else Layout("replicated") for i in range(len(op.inputs))])
    result = op.outputs[0]
    divided = next((layout for layout in layouts if layout.is_sharded), None)
    is_list = state.graph.tensors[result].dtype == "variant"
    offsets = {state.offsets.get(op.inputs[i], 0) for i in known}
    if len(offsets) > 1:
        raise Refuse("its operands count positions in different ways")
    if divided is not None:
        for i in known:
            layout = everything[i]
            if layout.is_sharded and (layout.dim, layout.blocks) != (divided.dim, divided.blocks):
                raise Refuse("its operands are divided differently")
            if not layout.is_sharded and not (is_list and plan.zero(i)):
                plan.slice(i, divided.dim, divided.blocks)
    power, is_partial = plan.settle(divided is not None)
    joined = sharded(divided.dim, divided.blocks, power) if divided is not None else (
        Layout(plan.extreme) if plan.extreme else Layout("partial" if is_partial else "replicated", power=power))
    for i in known:
        state.flags[result] |= state.flags[op.inputs[i]] & (VARIABLE | LOOP)
    sources_of = state.result.sources_of
    state.set(result, joined, next((sources_of[op.inputs[i]] for i in known if op.inputs[i] in sources_of), ()),
              all(plan.zero(i) for i in known))
    offset = offsets.pop()
    if offset:
        state.offsets[result] = offset
    plan.record()


# ---------------------------------------------------------------------------------------------------------------------
# Stacks and tensor arrays: all elements have one layout, which every read returns.

@handler
def make_container(state: Propagation, op: Op) -> None:
    if any(state.layouts.get(t) is EXTENT for t in op.inputs):
        raise Refuse("it has an element for each example")
    state.containers.roots[op.outputs[0]] = (op.id,)
    state.arrays[op.id] = "own"
    state.flags[op.outputs[0]] |= BATCHED


@handler
def array_gradient(state: Propagation, op: Op) -> None:
    """A second array of the same size, one per gradient source name."""
    root = _root(state, op)
    state.containers.roots[op.outputs[0]] = root + (op.attrs.get("source"),)
    state.flags[op.outputs[0]] |= BATCHED


def _root(state: Propagation, op: Op) -> Root:
    root = state.containers.roots.get(op.inputs[0])
    if root is None:
        raise Refuse("the array it uses was created outside the parallel region")
    return root


def write(state: Propagation, op: Op, value: int, layout: Layout) -> None:
    """Store elements of the given layout; the operand ``value`` is converted to the layout of the existing elements."""
    containers, root = state.containers, _root(state, op)
    containers.users.setdefault(root, set()).add(op.id)
    flags = state.flags[op.inputs[value]] & (VARIABLE | ZERO)
    content, before = containers.contents.get(root, (None, 0))
    if layout is EXTENT or layout.kind in EXTREMES:
        raise Refuse("it stores batch sizes")
    if op.inputs[value] in state.offsets:
        raise Refuse("it stores positions in the batch")
    is_zero = bool(flags & ZERO)
    if content is None:
        joined = layout
        joined_flags = flags
    else:
        was_zero = bool(before & ZERO)
        joined = layout if was_zero and not is_zero or content.is_replicated and not layout.is_replicated else content
        joined_flags = (flags | before) & VARIABLE | (flags & before & ZERO)
    if (joined, joined_flags) != (content, before):
        containers.contents[root] = (joined, joined_flags)
        for user in containers.users[root]:
            if user != op.id:
                state.push(user)
    _bring(state, op, value, layout, joined)


def _bring(state: Propagation, op: Op, value: int, layout: Layout, target: Layout) -> None:
    """Convert an operand to the layout of the container's elements."""
    if layout == target:
        return
    roles = ["n"] * len(op.inputs)
    plan = Operands(state, op, "".join(roles), [Layout("replicated") if i != value else layout for i in range(len(roles))])
    shift = _shift(op)
    if target.is_sharded and layout.is_replicated:
        plan.slice(value, target.dim + shift, target.blocks)
    elif (target.is_sharded and layout.is_sharded and (target.dim, target.blocks) == (layout.dim, layout.blocks)) or (
            target.is_partial and layout.is_partial):
        pass
    elif target.is_partial and layout.is_replicated:
        plan.scale(value, 1)
    else:
        raise Refuse(f"it stores an element with layout {layout} among elements with layout {target}")
    plan.scale(value, layout.power - target.power)
    plan.record()


def _shift(op: Op) -> int:
    return 1 if traits(op.type).batch == "array_scatter" else 0


def read(state: Propagation, op: Op, result: int, shift: int = 0) -> None:
    """Read one element, or (``shift`` 1) all elements stacked."""
    containers, root = state.containers, _root(state, op)
    containers.users.setdefault(root, set()).add(op.id)
    content, flags = containers.contents.get(root, (None, ZERO))
    state.flags[result] |= flags & (VARIABLE | ZERO)
    if content is None:
        return
    if content.is_sharded:
        content = sharded(content.dim + shift, content.blocks, content.power)
    state.set(result, content, _some_sources(state, op))


def _some_sources(state: Propagation, op: Op) -> Tuple[int, ...]:
    return state.sources(op) or tuple(state.result.sources)[:1]


def _plain_index(state: Propagation, op: Op, position: int) -> None:
    if op.inputs[position] in state.layouts:
        raise Refuse("it has an element for each example")


@handler
def push(state: Propagation, op: Op) -> None:
    tensor = op.inputs[1]
    if state.layout(tensor) is EXTENT:  # a shape that the gradient needs: the pop reads the same
        _keep_extent(state, op, tensor)
        return
    write(state, op, 1, state.layout(tensor))
    pass_through(state, tensor, op.outputs)


def _keep_extent(state: Propagation, op: Op, tensor: int) -> None:
    root = _root(state, op)
    value = state.value(tensor)
    assert value is not None
    if repr(state.containers.extents.get(root)) != repr(value):
        state.containers.extents[root] = value
        for user in state.containers.users.get(root, ()):
            state.push(user)
    pass_through(state, tensor, op.outputs)


@handler
def pop(state: Propagation, op: Op) -> None:
    root = _root(state, op)
    value = state.containers.extents.get(root)
    if value is not None:
        state.containers.users.setdefault(root, set()).add(op.id)
        state.set_value(op.outputs[0], value, _some_sources(state, op))
        return
    read(state, op, op.outputs[0])


@handler
def array_write(state: Propagation, op: Op) -> None:
    _plain_index(state, op, 1)
    write(state, op, 2, state.layout(op.inputs[2]))


@handler
def array_read(state: Propagation, op: Op) -> None:
    _plain_index(state, op, 1)
    read(state, op, op.outputs[0])


@handler
def array_gather(state: Propagation, op: Op) -> None:
    _plain_index(state, op, 1)
    state.arrays[op.id] = "used"
    read(state, op, op.outputs[0], 1)


@handler
def array_scatter(state: Propagation, op: Op) -> None:
    _plain_index(state, op, 1)
    layout = state.layout(op.inputs[2])
    if layout.is_sharded:
        if layout.dim == 0:
            raise Refuse("it has an element for each example")
        layout = sharded(layout.dim - 1, layout.blocks, layout.power)
    write(state, op, 2, layout)


@handler
def array_join(state: Propagation, op: Op) -> None:
    content, _ = state.containers.contents.get(_root(state, op), (None, 0))
    if (content is not None and not content.is_replicated) or any(t in state.layouts for t in op.inputs):
        raise Refuse("it joins elements of unknown lengths")


@handler
def array_size(state: Propagation, op: Op) -> None:
    """The size is independent of the elements."""
