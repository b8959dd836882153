"""Puts a staged edit into the graph: one import for all new nodes, then the edges and devices of existing ops."""
from __future__ import annotations

import contextlib
from itertools import chain
from typing import Any, Callable, Collection, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

from whale_tf._tf_compat import GraphDef, NodeDef, imported_as_written, tf
from whale_tf.errors import GraphEditError
from whale_tf.graph_editor.edges import edges_of, tensor_name
from whale_tf.graph_editor.names import some
from whale_tf.graph_editor.reroute import set_input

Place = Tuple[tf.Operation, str, bool]  # op, its new device, whether it leaves the ops that it is colocated with


class Commit:
    """What an edit adds and changes.

    Args:
      graph_def: the new nodes, ``staged`` by name.
      changed: existing ops with other inputs; ``before``: the inputs that they have in the graph.
      dtype: type of a tensor that is staged or in the graph; None if it is not known yet.
    """

    def __init__(self, graph: tf.Graph, graph_def: GraphDef, staged: Collection[str], changed: Mapping[str, NodeDef],
                 before: Mapping[str, Sequence[str]], places: Sequence[Place], dtype: Callable[[str], Any]) -> None:
        self.graph, self._graph_def, self._staged = graph, graph_def, staged
        self._changed, self._before, self._places, self._dtype = changed, before, places, dtype

    def run(self) -> Dict[str, tf.Operation]:
        """Make the changes, and return the new ops by name.

        Raises:
          GraphEditError: an input does not exist or has another type, or TensorFlow refused a node; nothing has changed then.
            Or a tensor has another static shape; then all edges are as they were, but the new ops are in the graph.
        """
        tensors, waits = self._resolve_externals()
        self._check_moves()
        new_ops = self._import(tensors) if self._staged else {}
        for name, befores in waits.items():
            new_ops[name]._add_control_inputs(befores)
        self._move_edges()
        for op, device, alone in self._places:
            if alone:
                op._clear_attr("_class")
            op._set_device(device)
        return new_ops

    def _check_moves(self) -> None:
        """Check that edges move to tensors that will exist and have the same type; only TensorFlow can check static shapes."""
        for name, node in self._changed.items():
            for old, new in zip(self._before[name], node.input):
                if old == new or new[0] == "^":
                    continue
                if new.partition(":")[0] not in self._staged:
                    self._existing(new, node)
                dtypes = [self._dtype(edge) for edge in (old, new)]
                if None not in dtypes and dtypes[0].base_dtype != dtypes[1].base_dtype:
                    was, would = (dtype.base_dtype.name for dtype in dtypes)
                    raise GraphEditError(
                        f"an input of {name!r} cannot move from {old!r} ({was}) to {new!r} ({would}); insert a Cast")

    def _move_edges(self) -> None:
        moved: List[Tuple[tf.Operation, int, tf.Tensor]] = []
        try:
            for name, node in self._changed.items():
                op = self.graph.get_operation_by_name(name)
                for position, (old, new) in enumerate(zip(self._before[name], node.input)):
                    if old != new and new[0] != "^":
                        moved.append((op, position, op.inputs[position]))
                        set_input(op, position, self._existing(new, node))
        except GraphEditError:
            for op, position, tensor in moved[:-1]:
                op._update_input(position, tensor)
            raise
        for name, node in self._changed.items():
            op, before, after = self.graph.get_operation_by_name(name), self._before[name], list(node.input)
            olds, waits = ({edge: None for edge in edges if edge[0] == "^"} for edges in (before, after))
            if any(edge not in waits for edge in olds):
                op._remove_all_control_inputs()
                olds = {}
            op._add_control_inputs([self._existing(edge, node) for edge in waits if edge not in olds])

    def _import(self, tensors: Dict[str, tf.Tensor]) -> Dict[str, tf.Operation]:
        n_before = len(self.graph.get_operations())
        with self.graph.as_default(), self.graph.device(None), self.graph.control_dependencies(None), \
                self.graph.colocate_with(None, ignore_existing=True), _contexts_hidden(tensors.values()), \
                imported_as_written(self.graph, self._graph_def):
            try:
                tf.import_graph_def(self._graph_def, input_map=tensors, name="")
            except (ValueError, tf.errors.OpError) as error:
                raise GraphEditError(f"TensorFlow refused the edit of {len(self._staged)} nodes: {error}") from error
        new_ops = {op.name: op for op in self.graph.get_operations()[n_before:]}
        if new_ops.keys() != set(self._staged):
            raise GraphEditError(f"TensorFlow renamed new ops: {some(sorted(new_ops.keys() - set(self._staged)))}. "
                                 f"Was the graph changed by something else since the "
                                 "edit began?")
        return new_ops

    def _resolve_externals(self) -> Tuple[Dict[str, tf.Tensor], Dict[str, List[tf.Operation]]]:
        """What the staged nodes read from the graph: tensors, and the ops that they wait for (by waiting node).

        Control edges are removed from the NodeDefs here and added after the import, which cannot express a control edge from
        an op without outputs.
        """
        tensors: Dict[str, tf.Tensor] = {}
        external_waits: Dict[str, tf.Operation] = {}
        waits: Dict[str, List[tf.Operation]] = {}
        nodes = [(node, edges_of(node)) for node in self._graph_def.node]
        for edge in dict.fromkeys(chain.from_iterable(edges for _, edges in nodes)):
            if edge[0] == "^":
                if edge[1:] not in self._staged:
                    external_waits[edge] = self._existing(edge)
            elif edge.partition(":")[0] not in self._staged:
                tensors[edge] = self._existing(edge)
        for node, edges in nodes if external_waits else ():
            if edges and edges[-1][0] == "^" and not external_waits.keys().isdisjoint(edges):  # control edges come last
                late = [edge for edge in edges if edge in external_waits]
                waits[node.name] = [external_waits[edge] for edge in dict.fromkeys(late)]
                kept = [edge for edge in edges if edge not in external_waits]
                del node.input[:]
                node.input.extend(kept)
        return tensors, waits

    def _existing(self, edge: str, reader: Optional[NodeDef] = None) -> Any:
        """The graph's tensor (or op, for a control edge) that ``reader`` (None: the first staged node that does) refers to."""
        try:
            if edge[0] == "^":
                return self.graph.get_operation_by_name(edge[1:])
            return self.graph.get_tensor_by_name(tensor_name(edge))
        except (KeyError, ValueError) as error:
            node = reader or next(node for node in self._graph_def.node if edge in node.input)
            raise GraphEditError(f"node {node.name!r} ({node.op}) reads {edge!r}, which is neither staged nor in the "
                                 f"graph") from error


@contextlib.contextmanager
def _contexts_hidden(tensors: Iterable[tf.Tensor]) -> Iterator[None]:
    """Let new ops read tensors inside a v1 while loop.  Python refuses this for ops without the loop's context, although the
    executor takes an op's frame from its inputs."""
    hidden = {tensor.op: tensor.op._get_control_flow_context() for tensor in tensors}
    hidden = {op: context for op, context in hidden.items() if context is not None}
    for op in hidden:
        op._set_control_flow_context(None)
    try:
        yield
    finally:
        for op, context in hidden.items():
            op._set_control_flow_context(context)
