"""Control flow passes values on; the dimensions of the elements of stacks, arrays and lists pass.

The operands of one op do not determine how a container's contents are divided (see
:mod:`whale_tf.ir.batch_axis.control_flow`), so these rules do not connect a write with a read.
"""
from __future__ import annotations

from typing import List

from whale_tf.ir.graph import Op
from whale_tf.ir.rules.rule import AnyDims, Dims, Rule, View, axes


def passing(op: Op, view: View) -> Rule:
    """Enter, Exit, NextIteration."""
    dims = view.dims(op.inputs[0])
    return Rule((dims,), (dims,), "m")


def switch(op: Op, view: View) -> Rule:
    dims = view.dims(op.inputs[0])
    return Rule((dims, ()), (dims, dims), "mn")


def merge(op: Op, view: View) -> Rule:
    dims = view.dims(op.inputs[0])
    return Rule((dims,) * len(op.inputs), (dims, ()), "a" * len(op.inputs))


def element(op: Op, view: View, position: int, stacked: int = 0) -> Rule:
    """Writes operand ``position`` to a container (-1: reads its last result from one); ``stacked``: the elements are stacked
    along a new first dimension."""
    inputs: List[AnyDims] = [None] * len(op.inputs)
    outputs: List[AnyDims] = [None] * len(op.outputs)
    if position >= 0:
        inputs[position] = _element_dims(view, op.inputs[position], stacked)
        if op.type.startswith("Stack"):
            outputs[0] = inputs[position]
    else:
        outputs[-1] = _element_dims(view, op.outputs[-1], stacked)
    return Rule(tuple(inputs), tuple(outputs), "".join("m" if i == position else "n" for i in range(len(inputs))))


def _element_dims(view: View, tensor: int, stacked: int) -> AnyDims:
    rank = view.rank(tensor)
    if rank is None:
        return None
    steps: Dims = (("step",),) if stacked else ()
    return steps + axes(rank - stacked)
