"""What of cloned nodes must differ from the original's: seeds, and attributes with shapes that say the whole batch's size."""

from __future__ import annotations

import zlib

from whale_tf._tf_compat import NodeDef, tf
from whale_tf.graph_editor.attrs import to_attr_value
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.batch_axis import BatchAxis
from whale_tf.ir.graph import Op, OpGraph

SEED_OPERAND = 1  # of ops that are seeded by an operand; the first is the shape


def reseed(node: NodeDef, scope: str) -> None:
    """A cloned op with a seed would repeat the original's numbers: mix the clone's name into it."""
    if "seed" in node.attr and (node.attr["seed"].i or node.attr["seed2"].i):
        node.attr["seed2"].i = (node.attr["seed2"].i + zlib.crc32(scope.encode())) % 2**31 or 1


def own_numbers(nodes: Nodes, node: NodeDef, op: Op, graph: OpGraph, scope: str, device: str) -> None:
    """Let a cloned random op draw numbers of its own, whether it has a seed or gets one (or the key made of it) as an operand."""
    if "seed" in node.attr:
        reseed(node, scope)
        return
    dtype = tf.as_dtype(graph.tensors[op.inputs[SEED_OPERAND]].dtype)
    shift = nodes.const([zlib.crc32(scope.encode()) % 2**31], f"{node.name}/own_seed/shift", dtype, device)
    seed = nodes.binary("AddV2", node.input[SEED_OPERAND], shift, f"{node.name}/own_seed", dtype, device)
    node.input[SEED_OPERAND] = seed


def is_seeded(node: NodeDef) -> bool:
    """Whether a random op's numbers are the same whenever it runs anew; those with seeds as inputs count, too."""
    return "seed" not in node.attr or bool(node.attr["seed"].i or node.attr["seed2"].i)


def open_shapes(node: NodeDef, op: Op, axis: BatchAxis) -> None:
    """Let a clone's shape attributes hold for any batch size."""
    for name in op.attrs:
        if (op.id, name) in axis.attributes and name in node.attr:
            kind = "list(shape)" if node.attr[name].HasField("list") else "shape"
            node.attr[name].CopyFrom(to_attr_value(axis.attributes[op.id, name], kind))
