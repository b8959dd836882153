"""Shapes of new nodes, from TensorFlow's own shape inference in a separate graph that is as small as possible."""

from __future__ import annotations

from typing import Callable, Dict, Iterable, List, Mapping, Set

from whale_tf._tf_compat import NodeDef, imported_as_written, static_dims, tf, v1
from whale_tf.capture.recording import Recording
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.graph import Shape
from whale_tf.ir.traits import VARIABLES

_GIVEN = "given"  # scope of placeholders for tensors of known shape


def with_new_shapes(step: Recording, edit: StagedEdit, names: Iterable[str], known: Mapping[str, Shape]) -> Dict[str, Shape]:
    """``known``, and the shapes of all outputs of staged nodes that it does not have.

    Args:
        names: names of the staged nodes.
        known: shapes of new tensors, by name.
    """
    found = dict(known)
    unknown = []
    for name in names:
        original = step.graph.find(edit.copies[name]) if name in edit.copies else None
        count = edit.output_count(name) if original is None else len(original.outputs)
        if all(f"{name}:{index}" in found for index in range(count)):
            continue
        node = edit.node(name)
        if node.op == "Const":
            found[name + ":0"] = tuple(dim.size for dim in node.attr["value"].tensor.tensor_shape.dim)
        else:
            unknown.append(name)
    if unknown:
        aside = _Aside(step, edit, found, set(unknown))
        for name in unknown:
            for index, tensor in enumerate(aside.graph.get_operation_by_name(name).outputs):
                dims = static_dims(tensor)
                found.setdefault(f"{name}:{index}", None if dims is None else tuple(dims))
    return found


class _Aside:
    """A graph with the nodes whose shapes are wanted, the constants and variables they read, and placeholders for the rest."""

    def __init__(self, step: Recording, edit: StagedEdit, known: Mapping[str, Shape], wanted: Set[str]) -> None:
        self._step, self._edit, self._known, self._wanted = step, edit, known, wanted
        self._graph_def = v1.GraphDef(versions=step.definitions.export.versions)
        self._graph_def.library.function.extend(step.definitions.library)
        self._graph_def.library.gradient.extend(step.definitions.export.library.gradient)
        self._given: Dict[str, str] = {}
        self._done: Set[str] = set()
        stack: List[str] = list(wanted)
        while stack:
            name = stack.pop()
            if name not in self._done:
                self._done.add(name)
                self._add(name, stack.append)
        self.graph = tf.Graph()
        with self.graph.as_default(), imported_as_written(self.graph, self._graph_def):
            tf.import_graph_def(self._graph_def, name="")

    def _add(self, name: str, also: Callable[[str], None]) -> None:
        node = self._graph_def.node.add()
        node.CopyFrom(self._definition(name))
        node.device = ""
        if "_class" in node.attr:
            del node.attr["_class"]
        edges = [edge for edge in node.input if edge[0] != "^"]
        del node.input[:]
        for edge in edges:
            producer = edge.partition(":")[0]
            if producer in self._wanted or self._is_taken_along(edge):
                also(producer)
                node.input.append(edge)
            else:
                node.input.append(self._placeholder(edge))

    def _definition(self, name: str) -> NodeDef:
        return self._edit.node(name) if name in self._edit else self._step.definitions.node(name)

    def _is_taken_along(self, edge: str) -> bool:
        """Whether a node is included: constants determine shapes, and a placeholder cannot stand for a variable's handle or
        reference."""
        op_type = self._definition(edge.partition(":")[0]).op
        return op_type == "Const" or op_type in VARIABLES

    def _placeholder(self, edge: str) -> str:
        if edge not in self._given:
            name, _, index = edge.partition(":")
            if name in self._step.graph:
                tensor = self._step.graph.tensors[self._step.graph.tensor(edge)]
                shape, dtype = tensor.shape, tf.as_dtype(tensor.dtype).base_dtype
            else:
                shape, dtype = self._known[f"{name}:{index or 0}"], self._edit.dtypes(name)[int(index or 0)]
            node = self._graph_def.node.add()
            node.name, node.op = f"{_GIVEN}/{len(self._given)}", "Placeholder"
            node.attr["dtype"].type = dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
            self._given[edge] = node.name
        return self._given[edge]
