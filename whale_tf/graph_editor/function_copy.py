"""Edit a copy of a function in the graph's library: new nodes, moved inputs, more parameters and results.

::

    before   body_7(i, x) { y = MatMul(x, x) }                 -> y
    after    copy = FunctionCopy(graph, "body_7")
             two = copy.const(2.0, "two")
             copy.set_operand("y", 1, copy.add("Mul", "half", [copy.operand("y", 1), copy.parameter("w", tf.float32)]))
             edit.add_function(copy.finish("body_7_half"))

             body_7_half(i, x, w) { half = Mul(x, w); y = MatMul(x, half) }    -> y

A function that is made of a graph's own nodes begins empty (``FunctionCopy(graph)``) and gets them by ``insert``.

Inside a function, tensors are named ``"node:output_name:0"``, or by the bare name of an argument.  Code that stages
nodes in a ``StagedEdit`` can also write them into a function.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

from whale_tf._tf_compat import FunctionDef, NodeDef, op_def, tf, v1
from whale_tf.graph_editor.control_flow import function_def
from whale_tf.graph_editor.edges import control_edges
from whale_tf.graph_editor.names import free_name
from whale_tf.graph_editor.stage import Stage

FunctionDefType = type(v1.GraphDef().library.function.add())  # TensorFlow does not export it
# Static shapes of the original's arguments and nodes; "run where op X runs", where X is a name in the original's caller; and the
# function with which TensorFlow's graph optimizer may replace the original (Keras 2's LSTM and GRU have one).
ORIGINALS_OWN = ("_output_shapes", "_input_shapes", "_class", "api_implements", "api_preferred_device")


def data_inputs(node: NodeDef) -> List[str]:
    """Names of the tensors that a node reads, without the ops that it only waits for."""
    return [edge for edge in node.input if not edge.startswith("^")]


def append_inputs(node: NodeDef, names: Sequence[str]) -> None:
    """Let a node read more tensors, after its other data inputs."""
    data = data_inputs(node)
    waits = list(node.input)[len(data) :]
    del node.input[:]
    node.input.extend(data + list(names) + waits)


class FunctionCopy(Stage):
    """A FunctionDef being edited.  Recorded static shapes and colocations are dropped, because they belong to the original.

    Args:
        function: its name in the graph's library, or its definition.

    Attributes:
        original: the function as it is.
        definition: the copy.

    Raises:
        GraphEditError: the graph's library has no function of that name.
    """

    def __init__(self, graph: tf.Graph, function: Union[str, FunctionDef] = FunctionDefType()) -> None:
        super().__init__(graph)
        self.original = function_def(graph, function) if isinstance(function, str) else function
        self.definition = FunctionDefType()
        self.definition.CopyFrom(self.original)
        signature = self.definition.signature
        self._nodes: Dict[str, NodeDef] = {node.name: node for node in self.definition.node_def}
        self._taken = set(self._nodes) | {arg.name for arg in list(signature.input_arg) + list(signature.output_arg)}
        for item in [self.definition, *self.definition.arg_attr.values(), *self.definition.node_def]:
            for key in ORIGINALS_OWN:
                item.attr.pop(key, None)

    @property
    def is_changed(self) -> bool:
        """Whether the copy differs from the original, including by what was dropped."""
        return bool(self.definition != self.original)

    def node(self, name: str) -> NodeDef:
        """The NodeDef of that name, which may be changed in place."""
        return self._nodes[name]

    def insert(self, node: NodeDef, inputs: Sequence[str] = (), control_inputs: Sequence[str] = ()) -> NodeDef:
        """Add a copy of a graph's node, under its own name and without its device; returns the copy.

        Args:
            inputs: its inputs, as edges of the function.
            control_inputs: names of nodes of the function for which it waits.
        """
        copy = self.definition.node_def.add()
        copy.CopyFrom(node)
        copy.device = ""
        for key in ORIGINALS_OWN:
            copy.attr.pop(key, None)
        del copy.input[:]
        copy.input.extend(list(inputs) + control_edges(control_inputs))
        self._nodes[copy.name] = copy
        self._taken.add(copy.name)
        if op_def(self.graph, node.op).is_stateful:
            self.definition.signature.is_stateful = True
        return copy

    def edge(self, node: NodeDef, index: int) -> str:
        """Output ``index`` of a node that is or will be in the function."""
        return self._signature(node.op, node.name).function_edge(node, index)

    def operand(self, node: str, position: int) -> str:
        """The tensor that a node reads as one of its data inputs."""
        return str(self._nodes[node].input[position])

    def set_operand(self, node: str, position: int, name: str) -> None:
        self._nodes[node].input[position] = name

    def result(self, index: int) -> str:
        """The tensor that the function returns as result ``index``."""
        return str(self.definition.ret[self.definition.signature.output_arg[index].name])

    def set_result(self, index: int, name: str) -> None:
        self.definition.ret[self.definition.signature.output_arg[index].name] = name

    def add(self, op_type: str, name: str, inputs: Sequence[str] = (), *, device: str = "",
            control_inputs: Sequence[str] = (), attrs: Optional[Mapping[str, Any]] = None) -> str:
        """Add one node; returns its first result's name.  Type and number attributes must be given."""
        node = self.definition.node_def.add(name=self._unique(name), op=op_type, device=device)
        self._nodes[node.name] = node
        self._signature(op_type, name).set_attrs(node, attrs or {})
        definition = op_def(self.graph, op_type)
        for attribute in definition.attr:
            if attribute.HasField("default_value") and attribute.name not in node.attr:
                node.attr[attribute.name].CopyFrom(attribute.default_value)
        node.input.extend(list(inputs) + control_edges(control_inputs))
        return f"{node.name}:{definition.output_arg[0].name}:0"

    def output(self, name: str, index: int) -> str:
        return f"{name.rpartition(':')[0]}:{index}"

    def parameter(self, name: str, dtype: tf.DType) -> str:
        """Add a parameter after the others; returns its name."""
        argument = self.definition.signature.input_arg.add(name=self._unique(name))
        argument.type = tf.as_dtype(dtype).as_datatype_enum
        return str(argument.name)

    def return_also(self, tensor: str, dtype: tf.DType, name: str = "") -> None:
        """Add a result after the others."""
        result = self.definition.signature.output_arg.add(name=self._unique(name or tensor.split(":")[0] + "_result"))
        result.type = tf.as_dtype(dtype).as_datatype_enum
        self.definition.ret[result.name] = tensor

    def replace(self, renamed: Mapping[str, str]) -> None:
        """Replace the keys of ``renamed`` with other tensors wherever they are read or returned."""
        for node in self.definition.node_def:
            for position, edge in enumerate(node.input):
                if edge in renamed:
                    node.input[position] = renamed[edge]
        for key, edge in list(self.definition.ret.items()):
            if edge in renamed:
                self.definition.ret[key] = renamed[edge]

    def finish(self, name: str) -> FunctionDef:
        """The edited function under another name."""
        result = type(self.definition)()
        result.CopyFrom(self.definition)
        result.signature.name = name
        return result

    def _unique(self, name: str) -> str:
        found = free_name(name, self._taken.__contains__)
        self._taken.add(found)
        return found
