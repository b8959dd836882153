"""The graph of a divided step as :mod:`whale_tf.profiler.placement` reads it: called functions inlined, sizes filled in."""
from __future__ import annotations

import functools
from typing import Any, Collection, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from whale_tf._tf_compat import GraphDef, NodeDef, function_graph, op_def, tf, v1
from whale_tf.capture.handles import variable_handles
from whale_tf.graph_editor.edges import COLOCATE
from whale_tf.ir.traits import CALLS, PULLS, Role, traits
from whale_tf.profiler.placement import HOST, GraphOp, GraphTensor
from whale_tf.runtime.verifying.divided import Step
from whale_tf.runtime.verifying.local import make_variable, own_graphs

BRANCHES = ("then_branch", "else_branch", "branches", "body", "cond")  # attributes with functions of conditions and loops


def step_ops(step: Step) -> List[GraphOp]:
    """The ops that a divided step runs, those of called functions in the place of the calls.  What a loop or a condition runs is
    there once."""
    definition = _definition(step)
    graph = tf.Graph()
    own_graphs.add(graph)
    with graph.as_default():
        tf.import_graph_def(definition, name="")
    library = {function.signature.name: function for function in definition.library.function}
    found = _Ops(library, set() if step.done.plan.offload != "none" else set(variable_handles(step.graph)))
    found.add(graph, {node.name: node for node in definition.node}, "", {}, None)
    return found.ops()


def _definition(step: Step) -> GraphDef:
    """The graph of the step with the shapes of its inputs, in which every variable is an op."""
    whole = step.graph.as_graph_def()
    handles = variable_handles(step.graph)
    for node in whole.node:
        if node.name in handles:
            make_variable(node, handles[node.name])
        elif "_output_shapes" in node.attr:
            del node.attr["_output_shapes"]
    needed = v1.graph_util.extract_sub_graph(whole, sorted(set(step.runs)))
    needed.library.CopyFrom(whole.library)
    needed.versions.CopyFrom(whole.versions)
    for node in needed.node:
        _set_shapes(node, step.given)
    return needed


def _set_shapes(node: NodeDef, given: Mapping[str, Any]) -> None:
    """Gives an input the shape of its value."""
    if node.op == "Placeholder" and f"{node.name}:0" in given:
        shape = np.shape(given[f"{node.name}:0"])
        known = tf.TensorShape(node.attr["shape"].shape) if not node.attr["shape"].shape.unknown_rank else None
        if known is None or known.is_compatible_with(shape):
            node.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
    elif node.op in PULLS and "output_shapes" in node.attr:
        for place, proto in enumerate(node.attr["output_shapes"].list.shape):
            if f"{node.name}:{place}" in given:
                proto.CopyFrom(tf.TensorShape(np.shape(given[f"{node.name}:{place}"])).as_proto())


class _Ops:
    """The ops of a graph and of all functions that it calls.  Edges are found when all ops are there, since those of a loop lead
    back.

    Args:
        library: the functions by name.
        outside: names of a function's variables.  They live outside of it: here on the host, on a machine with GPUs on the first
            one, so that to be beside them asks for nothing.
    """

    def __init__(self, library: Mapping[str, Any], outside: Collection[str] = ()) -> None:
        self._library, self._outside = library, outside
        self._made: List[Tuple[GraphOp, List[Any]]] = []
        self._number: Dict[Any, int] = {}  # (id of a graph's op) -> number
        self._same: Dict[Any, Any] = {}  # (op, output) of a function's argument or a call's result -> the tensor that it is
        self._kept: List[tf.Graph] = []

    def add(self, graph: tf.Graph, nodes: Mapping[str, NodeDef], prefix: str, arguments: Mapping[str, Any],
            device: Optional[str]) -> None:
        """Adds a graph's ops.

        Args:
            prefix: of their names.
            arguments: name of a function's placeholder -> the tensor that the call gives it.
            device: of the call, where the ops that ask for nothing run.
        """
        self._kept.append(graph)
        ops = graph.get_operations()
        for op in ops:
            if op.name in arguments:
                self._same[op, 0] = arguments[op.name]
            elif not self._called(op, nodes, prefix, device):
                self._add(op, nodes[op.name], prefix, device)

    def _add(self, op: tf.Operation, node: NodeDef, prefix: str, device: Optional[str]) -> None:
        known = _arguments(op_def(op.graph, op.type), node)
        results = tuple(GraphTensor(tensor.dtype.base_dtype.name, _bytes(tensor), name, bool(tensor.dtype._is_ref_dtype))
                        for tensor, name in zip(op.outputs, known[1]))
        is_input = traits(op.type).role in (Role.PULL, Role.PLACEHOLDER)
        self._number[op] = len(self._made)
        beside = [text[len(COLOCATE):].decode() for text in node.attr["_class"].list.s
                  if text.startswith(COLOCATE)] if "_class" in node.attr else []
        is_fed = traits(op.type).role is Role.PLACEHOLDER  # from the host
        asks = HOST if is_fed else _asked(op.device or device or "")
        self._made.append((GraphOp(prefix + op.name, op.type, _types(node), asks, (), results, is_input),
                           [*zip(op.inputs, known[0]), *(op.graph.get_operation_by_name(name) for name in beside)]))

    def _called(self, op: tf.Operation, nodes: Mapping[str, NodeDef], prefix: str, device: Optional[str]) -> bool:
        """Adds the ops of the function that an op calls, or of the branches and bodies of a condition or loop; False: it calls
        none, or it also runs itself."""
        node = nodes[op.name]
        if op.type in CALLS or op.type in self._library:
            name = node.attr["f"].func.name if op.type in CALLS else op.type
            inner = self._inline(name, op, list(op.inputs), prefix, device)
            if inner is None:
                return False
            self._same.update(((op, place), tensor) for place, tensor in enumerate(inner.outputs))
            return True
        functions = [one.name for attr in BRANCHES if attr in node.attr
                     for one in (node.attr[attr].list.func or [node.attr[attr].func])]
        for place, name in enumerate(functions):
            operands = list(op.inputs)[-len(self._library[name].signature.input_arg):] if name in self._library else []
            self._inline(name, op, operands, f"{prefix}{op.name}/{place}/", device)
        return False

    def _inline(self, name: str, op: tf.Operation, operands: Sequence[Any], prefix: str, device: Optional[str]) -> Any:
        if name not in self._library:
            return None
        with op.graph.as_default():
            inner = function_graph(self._library[name], [tensor.shape for tensor in operands])
        arguments = {one.op.name: outer for one, outer in zip(inner.inputs, operands)}
        own = op.device or device
        nodes = {one.name: one for one in inner.as_graph_def().node}
        self.add(inner, nodes, f"{prefix}{op.name}/" if not prefix.endswith("/") or op.type in CALLS else prefix, arguments, own)
        return inner

    def ops(self) -> List[GraphOp]:
        """All ops with their edges."""
        found = []
        for op, edges in self._made:
            inputs, follows = [], -1
            for edge in edges:
                if isinstance(edge, tf.Operation):
                    follows = self._number.get(edge, -1)
                    continue
                tensor, argument = edge
                while (tensor.op, tensor.value_index) in self._same:
                    tensor = self._same[tensor.op, tensor.value_index]
                if tensor.op in self._number:
                    inputs.append((self._number[tensor.op], tensor.value_index, argument))
            names = {self._made[source][0].name for source, _, _ in inputs}
            asks = None if op.asks == HOST and not names.isdisjoint(self._outside) else op.asks
            found.append(op._replace(inputs=tuple(inputs), follows=follows, asks=asks))
        return found


def _arguments(definition: Any, node: NodeDef) -> Tuple[List[str], List[str]]:
    """The argument's name for each input, and for each output."""
    def names(rows: Any) -> List[str]:
        found: List[str] = []
        for row in rows:
            count = node.attr[row.number_attr].i if row.number_attr else (
                len(node.attr[row.type_list_attr].list.type) if row.type_list_attr else 1)
            found += [row.name] * count
        return found

    return names(definition.input_arg), names(definition.output_arg)


def _types(node: NodeDef) -> Dict[str, Tuple[str, ...]]:
    """The type attributes of an op."""
    found: Dict[str, Tuple[str, ...]] = {}
    for name, value in node.attr.items():
        if value.type:
            found[name] = (_type_name(value.type),)
        elif value.list.type:
            found[name] = tuple(map(_type_name, value.list.type))
    return found


@functools.lru_cache(maxsize=None)
def _type_name(number: int) -> str:
    return str(tf.as_dtype(number).base_dtype.name)


@functools.lru_cache(maxsize=4096)
def _asked(device: str) -> Optional[int]:
    """The GPU, or the host, that a device string asks for; None: neither."""
    if not device:
        return None
    spec = tf.DeviceSpec.from_string(device)
    if spec.device_type == "GPU":
        return int(spec.device_index or 0)
    return None if spec.device_type is None else HOST


def _bytes(tensor: Any) -> Optional[float]:
    """None: the size is not known."""
    dims = tensor.shape.as_list() if tensor.shape.ndims is not None else None
    dtype = tensor.dtype.base_dtype
    if dims is None or None in dims or dtype in (tf.resource, tf.variant, tf.string):
        return None
    return float(np.prod(dims, dtype=np.int64)) * dtype.size
