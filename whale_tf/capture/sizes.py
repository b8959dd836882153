"""A graph's shapes for a given batch size, or for given ranks of inputs, from TensorFlow's own shape inference."""

from __future__ import annotations

import re
from typing import Any, Dict, Mapping, Optional, Sequence

from whale_tf._tf_compat import GraphDef, tf, v1
from whale_tf.errors import PlanError, UnsupportedOpError
from whale_tf.graph_editor.definitions import Definitions
from whale_tf.ir.graph import Op, OpGraph, Shape

NO_ROWS: Mapping[int, int] = {}


def sized(definitions: Definitions, ops: OpGraph, sources: Mapping[int, int], batch: int,
          rows: Mapping[int, int] = NO_ROWS) -> OpGraph:
    """The op graph with all unknown sizes that follow from the batch filled in; those that are still unknown then count as the
    batch, too.

    The inputs' definitions get the size, and the whole graph is imported again into a separate graph: a Reshape to
    ``[-1, hidden]`` then has its number of rows.  The graph itself is not edited.

    Args:
        definitions: definitions of the ops.
        sources: batch inputs, by tensor, and their batch dimension.
        rows: how many rows of an input belong to an example, if not one.

    Raises:
        PlanError: with this batch size, the sizes of the graph contradict each other.
    """
    unknown = {tensor: dim for tensor, dim in sources.items() if _is_unknown(ops.tensors[tensor].shape, dim)}
    shapes: Dict[str, Shape] = {}
    if unknown:
        graph_def = definitions.graph_def()
        given = {name: list(shape) for name, shape in definitions.given.items()}
        nodes = {node.name: node for node in graph_def.node}
        for tensor, dim in unknown.items():
            if ops.tensor_name(tensor) in given:
                given[ops.tensor_name(tensor)][dim] = batch * rows.get(tensor, 1)
            _set(nodes[ops.producer(tensor).name], ops.tensors[tensor].index, dim, batch * rows.get(tensor, 1))
        for op in ops.ops:
            if op.type == "VarHandleOp" and nodes[op.name].op != op.type:
                _describe(nodes[op.name], op)
        try:
            shapes = _inferred(definitions, graph_def, given)
        except ValueError as error:
            raise _contradiction(ops, sources, unknown, batch, error) from None
    known = (_both(shapes.get(ops.tensor_name(tensor)), record.shape) for tensor, record in enumerate(ops.tensors))
    return ops.with_shapes({tensor: _filled(shape, batch) for tensor, shape in enumerate(known)})


def of_unknown_rank(definitions: Definitions) -> Dict[str, Shape]:
    """Shapes of tensors that follow from the given ones, of which only the rank is certain.

    Raises:
        UnsupportedOpError: the graph does not allow inputs of these ranks.
    """
    if not definitions.given:
        return {}
    ranks = {name: [None] * len(shape) for name, shape in definitions.given.items()}
    try:
        return _inferred(definitions, definitions.graph_def(), ranks)
    except ValueError as error:
        fed = ", ".join(f"{name} {tuple(shape)}" for name, shape in definitions.given.items())
        raise UnsupportedOpError(f"the first mini-batch does not fit the graph ({fed}): {str(error).splitlines()[0]}") from None


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
    """Writes the size into the definition of an input."""
    shape = None
    if node.op == "PlaceholderWithDefault":  # its default may have another size
        node.op = "Placeholder"
        waits = [name for name in node.input if name.startswith("^")]
        del node.input[:]
        node.input.extend(waits)
    if node.op.startswith("Placeholder") and not node.attr["shape"].shape.unknown_rank:
        shape = node.attr["shape"].shape
    elif "output_shapes" in node.attr:
        shape = node.attr["output_shapes"].list.shape[index]
    if shape is not None and len(shape.dim) > dim:
        shape.dim[dim].size = batch


def _describe(node: Any, op: Op) -> None:
    """Turns the placeholder of a variable's handle into a variable, because a GraphDef does not say whose handle it is."""
    node.op = op.type
    node.attr["dtype"].type = tf.as_dtype(op.attrs["dtype"]).as_datatype_enum
    node.attr["shape"].shape.CopyFrom(tf.TensorShape(op.attrs["shape"]).as_proto())


def _inferred(definitions: Definitions, graph_def: GraphDef, given: Mapping[str, Sequence[Optional[int]]]) -> Dict[str, Shape]:
    """Shapes of all tensors of a graph, of which some are given."""
    with tf.Graph().as_default() as copy:
        stand_ins = {
            name: v1.placeholder(definitions.graph.get_tensor_by_name(name).dtype, shape, f"whale_given/{number}")
            for number, (name, shape) in enumerate(given.items())}
        tf.import_graph_def(graph_def, stand_ins, name="")
        found: Dict[str, Shape] = {}
        for node in graph_def.node:
            for output in copy.get_operation_by_name(node.name).outputs:
                shape = output.shape
                found[output.name] = None if shape.ndims is None else tuple(shape.as_list())
    found.update((name, tuple(shape)) for name, shape in given.items())
    return found


def _both(found: Shape, before: Shape) -> Shape:
    """What inference has found, and what the graph knew beside: a definition does not have what a script says about a tensor
    (``set_shape``)."""
    if found is None or before is None or len(found) != len(before):
        return before if found is None else found
    return tuple(old if size is None else size for size, old in zip(found, before))


def _filled(shape: Shape, batch: int) -> Shape:
    return None if shape is None else tuple(batch if size is None else size for size in shape)
