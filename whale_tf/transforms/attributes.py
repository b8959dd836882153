"""Attributes in which cloned nodes must differ from the original: seeds, and shapes that contain the whole batch's size."""

from __future__ import annotations

import zlib

from whale_tf._tf_compat import NodeDef, tf
from whale_tf.graph_editor.attrs import to_attr_value
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.batch_axis import BatchAxis
from whale_tf.ir.graph import Op, OpGraph

SEED_OPERAND = 1  # of ops that get their seed as an operand; the first operand is the shape


def reseed(node: NodeDef, scope: str) -> None:
    """Mixes the clone's name into the seed of a cloned op, which would otherwise repeat the original's numbers."""
    if "seed" in node.attr and (node.attr["seed"].i or node.attr["seed2"].i):
        node.attr["seed2"].i = (node.attr["seed2"].i + zlib.crc32(scope.encode())) % 2**31 or 1


def own_numbers(nodes: Nodes, node: NodeDef, op: Op, graph: OpGraph, scope: str, device: str) -> None:
    """Makes a cloned random op draw its own numbers, whether its seed (or the key made from it) is an attribute or an operand."""
    if "seed" in node.attr:
        reseed(node, scope)
        return
    dtype = tf.as_dtype(graph.tensors[op.inputs[SEED_OPERAND]].dtype)
    shift = nodes.const([zlib.crc32(scope.encode()) % 2**31], f"{node.name}/own_seed/shift", dtype, device)
    seed = nodes.binary("AddV2", node.input[SEED_OPERAND], shift, f"{node.name}/own_seed", dtype, device)
    node.input[SEED_OPERAND] = seed


def open_shapes(node: NodeDef, op: Op, axis: BatchAxis) -> None:
    """Makes a clone's shape attributes, and numbers of rows, valid for any batch size."""
    for name in op.attrs:
        if (op.id, name) in axis.attributes and name in node.attr:
            kind = "list(shape)" if node.attr[name].HasField("list") else "shape" if node.attr[name].HasField("shape") else "int"
            node.attr[name].CopyFrom(to_attr_value(axis.attributes[op.id, name], kind))
