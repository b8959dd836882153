"""Small gradients are divided by the loss scale, and tested, together, where they are.

::

    before   g0 ──> Mul ──> IsFinite ──> All ──┐           after   g0 ──┐              ┌──> g0 / scale
             g1 ──> Mul ──> IsFinite ──> All ──┴─> every           g1 ──┴─> ConcatV2 ──> Mul ──> Split ──> g1 / scale
                                                                                         └──> IsFinite ──> All ──> every

On a GPU each op is a kernel to launch, and most gradients of a network with many norms and biases are small.  No update begins
before all gradients have been tested, so none waits for longer.  Each number is multiplied by the same number as before.

Only functions are changed: a Session may be asked for one gradient, and would then compute all that are joined with it.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Tuple

from whale_tf._tf_compat import NodeDef, tf
from whale_tf.emit.context import Context
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.graph import SHARD_ATTR, Op, elements_of
from whale_tf.transforms.loss_scale import ROOT, UNSCALED_ATTR

LARGEST = 2 ** 18  # elements of a gradient that is joined with others; joining copies it


def join_gradients(context: Context, nodes: Nodes) -> None:
    """Joins the gradients of one type on one device; call it when all ops have their devices."""
    alike: Dict[Tuple[str, ...], List[Op]] = {}
    for op in context.graph.ops:
        if UNSCALED_ATTR in op.attrs and SHARD_ATTR not in op.attrs and _test(context, op) is not None:
            tensor, node = context.graph.tensors[op.outputs[0]], context.edit.node(op.name)
            if 0 < elements_of(tensor.shape) <= LARGEST:
                alike.setdefault((node.device, tensor.dtype, *node.input[1:]), []).append(op)
    for number, ((device, dtype, inverse, *waits), ops) in enumerate(alike.items()):
        if len(ops) > 1:
            _join(context, nodes, ops, device, tf.as_dtype(dtype), inverse, [wait[1:] for wait in waits],
                  f"{ROOT}/joined_{number}")


def _test(context: Context, gradient: Op) -> Optional[Op]:
    """The op that says whether a gradient is finite, beside it; None: another op stands between."""
    graph = context.graph
    tests = [graph.ops[reader] for reader, _ in graph.consumers(gradient.outputs[0]) if graph.ops[reader].type == "IsFinite"]
    ends = [graph.ops[reader] for test in tests for reader, _ in graph.consumers(test.outputs[0])]
    return ends[0] if len(ends) == 1 and ends[0].type == "All" and SHARD_ATTR not in ends[0].attrs else None


def _join(context: Context, nodes: Nodes, ops: List[Op], device: str, dtype: tf.DType, inverse: str, waits: List[str],
          scope: str) -> None:
    shapes = [context.graph.tensors[op.outputs[0]].shape or () for op in ops]
    flat = nodes.const([-1], scope + "/flat", tf.int32, device)
    given = [nodes.add("Reshape", f"{scope}/part_{i}", [context.edit.node(op.name).input[0], flat], device, T=dtype,
                       Tshape=tf.int32) for i, op in enumerate(ops)]
    product = nodes.add("Mul", scope + "/product", [nodes.concat(given, 0, scope + "/all", dtype, device), inverse], device,
                        waits, T=dtype)
    is_finite = nodes.add("All", scope + "/finite", [
        nodes.add("IsFinite", scope + "/is_finite", [product], device, T=dtype),
        nodes.const([0], scope + "/axis", tf.int32, device)], device, Tidx=tf.int32, keep_dims=False)
    parts = nodes.split(product, list(map(elements_of, shapes)), len(ops), 0, scope + "/cut", dtype, device)
    for i, (op, part, shape) in enumerate(zip(ops, parts, shapes)):
        to = nodes.const(list(shape), f"{scope}/shape_{i}", tf.int32, device)
        _become(context.edit.node(op.name), "Reshape", [part, to], T=dtype, Tshape=tf.int32)
        test = _test(context, op)
        assert test is not None
        _become(context.edit.node(test.name), "Identity", [is_finite], T=tf.bool)


def _become(node: NodeDef, op_type: str, inputs: List[str], **types: tf.DType) -> None:
    """Makes a staged node another op under its name, which waits for the same ops."""
    waits = [edge for edge in node.input if edge[0] == "^"]
    node.op = op_type
    del node.input[:]
    node.input.extend(inputs + waits)
    for name in [name for name in node.attr if name[0] != "_"]:
        del node.attr[name]
    for name, dtype in types.items():
        node.attr[name].type = dtype.as_datatype_enum
