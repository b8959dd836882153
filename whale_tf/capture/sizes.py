"""The shapes a graph has with a given batch size, by TensorFlow's own shape inference."""

from __future__ import annotations

import re
from typing import Any, Dict, Mapping

from whale_tf._tf_compat import GraphDef, tf
from whale_tf.errors import PlanError
from whale_tf.graph_editor.definitions import Definitions
from whale_tf.ir.graph import Op, OpGraph, Shape


def sized(definitions: Definitions, ops: OpGraph, sources: Mapping[int, int], batch: int) -> OpGraph:
    """The op graph with every unknown size that follows from the batch filled in; what is still unknown then counts as the
    batch, too.

    The inputs' definitions get the size, and the whole graph is imported once more, into a graph of its own: a Reshape to
    ``[-1, hidden]`` then has its number of rows.  Nothing is edited in the graph itself.

    Args:
        definitions: of the ops.
        sources: batch inputs, by tensor, and their batch dimension.

    Raises:
        PlanError: with that batch size the sizes of the graph contradict each other.
    """
    unknown = {tensor: dim for tensor, dim in sources.items() if _is_unknown(ops.tensors[tensor].shape, dim)}
    shapes: Dict[int, Shape] = {}
    if unknown:
        graph_def = definitions.graph_def()
        nodes = {node.name: node for node in graph_def.node}
        for tensor, dim in unknown.items():
            _set(nodes[ops.producer(tensor).name], ops.tensors[tensor].index, dim, batch)
        for op in ops.ops:
            if op.type == "VarHandleOp" and nodes[op.name].op != op.type:
                _describe(nodes[op.name], op)
        try:
            shapes = _inferred(graph_def, ops)
        except ValueError as error:
            raise _contradiction(ops, sources, unknown, batch, error) from None
    known = (shapes.get(tensor, record.shape) for tensor, record in enumerate(ops.tensors))
    return ops.with_shapes({tensor: _filled(shape, batch) for tensor, shape in enumerate(known)})


def _contradiction(ops: OpGraph, sources: Mapping[int, int], unknown: Mapping[int, int], batch: int,
                   error: ValueError) -> PlanError:
    taken = ", ".join(ops.tensor_name(tensor) for tensor in unknown)
    static = {ops.tensor_name(tensor): ops.tensors[tensor].shape[dim]  # type: ignore[index]
              for tensor, dim in sources.items() if tensor not in unknown and ops.tensors[tensor].shape is not None}
    beside = "".join(f", {name} has {size}" for name, size in static.items())
    reason = str(error).splitlines()[0].partition(" with input shapes")[0]
    reason = re.sub(r"'\{\{node ([^}]*)\}\}.*", r"'\1'", reason).rstrip(".")
    return PlanError(f"the graph does not say how many examples its inputs have ({taken}), and {batch} do not fit it{beside}: "
                     f"{reason}. Set auto.batch_size to the size of the mini-batches, or give the inputs a static batch size")


def _is_unknown(shape: Shape, dim: int) -> bool:
    return shape is not None and shape[dim] is None


def _set(node: Any, index: int, dim: int, batch: int) -> None:
    """Write the size into the definition of an input."""
    shape = None
    if node.op.startswith("Placeholder") and not node.attr["shape"].shape.unknown_rank:
        shape = node.attr["shape"].shape
    elif "output_shapes" in node.attr:
        shape = node.attr["output_shapes"].list.shape[index]
    if shape is not None and len(shape.dim) > dim:
        shape.dim[dim].size = batch


def _describe(node: Any, op: Op) -> None:
    """Turn the placeholder of a variable's handle, of which a GraphDef does not say whose it is, into a variable."""
    node.op = op.type
    node.attr["dtype"].type = tf.as_dtype(op.attrs["dtype"]).as_datatype_enum
    node.attr["shape"].shape.CopyFrom(tf.TensorShape(op.attrs["shape"]).as_proto())


def _inferred(graph_def: GraphDef, ops: OpGraph) -> Dict[int, Shape]:
    with tf.Graph().as_default() as copy:
        tf.import_graph_def(graph_def, name="")
        found: Dict[int, Shape] = {}
        for op in ops.ops:
            for tensor, output in zip(op.outputs, copy.get_operation_by_name(op.name).outputs):
                shape = output.shape
                found[tensor] = None if shape.ndims is None else tuple(shape.as_list())
    return found


def _filled(shape: Shape, batch: int) -> Shape:
    return None if shape is None else tuple(batch if size is None else size for size in shape)
