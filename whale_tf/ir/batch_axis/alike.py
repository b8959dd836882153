"""Copies of an op whose operands are in the same state: one is visited, the others take its results.

A graph whose ops were divided over ``n`` devices has ``n`` parts of each op, which differ in their edges alone.  Mostly the parts
of their operands have the same shapes and layouts, so there is nothing to find out about the second part and those after it.
Whatever a visit leaves behind besides layouts, rows taken and weights is left to visits of their own.
"""
from __future__ import annotations

import numpy as np

from whale_tf.ir.batch_axis.result import EXTENT, UNKNOWN, Scale, Slice
from whale_tf.ir.batch_axis.state import LOOP, OF_SECTION, VARIABLE, BatchState
from whale_tf.ir.graph import Op
from whale_tf.ir.traits import SHAPE_ATTRS, Role, traits

HANDLES = ("resource", "variant")  # what they hold has a state of its own


def take_results(state: BatchState, op: Op, flag: int) -> bool:
    """Give a copy the results of the op that it is a copy of.

    Args:
        flag: all flags of the operands.

    Returns:
        False: it needs a visit of its own, and nothing has changed.
    """
    first = state.options.alike.get(op.id)
    if first is None or flag & (LOOP | OF_SECTION) or not state.visited[first] or first in state.queued:
        return False
    other = state.graph.ops[first]
    if not (_has_same_forward(state, op, other) and _have_same_state(state, op, other) and _is_plain(state, other)):
        return False
    state.visited[op.id] = 1
    state.copied.add(op.id)
    sources = state.result.sources_of
    for result, known in zip(op.outputs, other.outputs):
        state.flags[result] = state.flags[known]
        if known in state.layouts:
            state.layouts[result] = state.layouts[known]
        if known in sources:
            sources[result] = sources[known]
    conversions, localise = state.conversions, state.result.localise
    for position in range(len(op.inputs)):
        if (first, position) in conversions:
            conversions[op.id, position] = conversions[first, position]
        if (first, position) in localise:
            localise[op.id, position] = localise[first, position]
    return True


def _has_same_forward(state: BatchState, op: Op, other: Op) -> bool:
    return op.forward == other.forward or (op.forward in state.copied and state.options.alike[op.forward] == other.forward)


def _have_same_state(state: BatchState, op: Op, other: Op) -> bool:
    """Whether nothing tells an op from the one that it is a copy of, except which tensors it reads."""
    if state.scope is not None and not (op.id in state.scope and other.id in state.scope):
        return False
    if op.id in state.special or len(op.inputs) != len(other.inputs):
        return False
    return all(own == known or _is_same_operand(state, own, known) for own, known in zip(op.inputs, other.inputs)) and all(
        _has_same_shape(state, own, known) for own, known in zip(op.outputs, other.outputs))


def _has_same_shape(state: BatchState, tensor: int, other: int) -> bool:
    return state.graph.tensors[tensor].shape == state.graph.tensors[other].shape and not state.lacks_sizes(other)


def _is_same_operand(state: BatchState, tensor: int, other: int) -> bool:
    layout, sources = state.layouts.get(tensor), state.result.sources_of
    if state.flags[tensor] != state.flags[other] or layout != state.layouts.get(other) or layout is EXTENT or (
            sources.get(tensor) != sources.get(other) or not _has_same_shape(state, tensor, other)):
        return False
    if layout is not None:
        return not any(one in table for one in (tensor, other) for table in (state.offsets, state.sizes, state.promoted))
    one, known = state.graph.producer(tensor).value, state.graph.producer(other).value
    if one is not None and known is not None:
        return bool(np.array_equal(one, known))
    return bool(state.flags[tensor] & VARIABLE) and not state.is_integer(tensor)  # so that nothing knows its value


def _is_plain(state: BatchState, op: Op) -> bool:
    """Whether the visit of an op has left nothing behind but what :func:`take_results` passes on."""
    if traits(op.type).role is not Role.COMPUTE or op.type in SHAPE_ATTRS or op.body:
        return False
    if any(op.id in table for table in (state.inexact, state.whole, state.looped, state.forced, state.special, state.arranged,
                                        state.per_replica)):
        return False
    for result in op.outputs:
        if state.layouts.get(result) in (EXTENT, UNKNOWN) or state.graph.tensors[result].dtype in HANDLES or any(
                result in table for table in (state.offsets, state.sizes, state.promoted)):
            return False
    return all(isinstance(step, (Slice, Scale)) for position in range(len(op.inputs))
               for step in state.conversions.get((op.id, position), ()))
