"""Run a TensorFlow graph in clones as the batch axis analysis says, merge by layout, and compare with the whole.

The emulation edits a GraphDef node by node: every op that depends on the batch is copied once per clone, operands get
their conversions as extra nodes, constants their localised values, and batch inputs become slices of the whole's.
"""
from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import tensorflow.compat.v1 as tf

from tests.ir.merging import Parts, merge
from whale_tf.capture.record import record
from whale_tf.ir.batch_axis import BatchAxis, Offset, Options, Reduce, Scale, Slice, Whole, analyse
from whale_tf.ir.extents import is_counted
from whale_tf.ir.graph import OpGraph

SHARED = frozenset(("Placeholder", "VariableV2", "Variable", "VarHandleOp", "Assign", "AssignVariableOp", "NoOp"))


class Emulation:
    """Clones of the ops that ``fetches`` need, in a graph of their own."""

    def __init__(self, graph: tf.Graph, sources: Dict[tf.Tensor, int], fetches: Sequence[tf.Tensor], parts: Union[Sequence[int], Mapping[str, Sequence[int]]],
                 options: Options = Options()) -> None:
        self.parts = Parts(parts)
        self.graph = graph
        self.ops: OpGraph = record(graph)
        self.fetches = [self.ops.tensor(t.name) for t in fetches]
        self.axis: BatchAxis = analyse(self.ops, {self.ops.tensor(t.name): d for t, d in sources.items()}, options=options)
        for t in self.fetches:
            self.axis.layout(t)
        self.needed = self._needed()
        self.definition = graph.as_graph_def()
        self.nodes = {node.name: node for node in self.definition.node}
        self.made: Dict[str, Any] = {}
        for i in range(len(self.parts)):
            self._clone(i)

    def _needed(self) -> List[int]:
        found, stack = set(), [self.ops.tensors[t].op for t in self.fetches]
        while stack:
            op = stack.pop()
            if op not in found:
                found.add(op)
                stack.extend(self.ops.predecessors(self.ops.ops[op]))
        return sorted(found)

    def _is_cloned(self, op_id: int) -> bool:
        op = self.ops.ops[op_id]
        refs = any(self.ops.tensors[t].dtype.endswith("_ref") for t in op.outputs)
        return op.type not in SHARED and op_id not in self.axis.shared and not refs

    # -- nodes --------------------------------------------------------------------------------------------------------
    def _add(self, name: str, op: str, inputs: Sequence[str], **attrs: Any) -> str:
        node = self.definition.node.add()
        node.name, node.op = name, op
        node.input.extend(inputs)
        for key, value in attrs.items():
            if isinstance(value, tf.DType):
                node.attr[key].type = value.as_datatype_enum
            elif isinstance(value, bool):
                node.attr[key].b = value
            elif isinstance(value, int):
                node.attr[key].i = value
            else:
                node.attr[key].CopyFrom(value)
        return name

    def _const(self, name: str, value: Any, dtype: tf.DType, beside: str = "") -> str:
        """A constant; ``beside`` names a tensor whose loop it belongs to."""
        if name not in self.made:
            tensor = tf.make_tensor_proto(value, dtype=dtype)
            self.made[name] = self._add(name, "Const", ["^" + beside.split(":")[0]] if beside else [], dtype=dtype)
            self.definition.node[-1].attr["value"].tensor.CopyFrom(tensor)
        return name

    def _clone(self, i: int) -> None:
        for op_id in self.needed:
            if not self._is_cloned(op_id):
                continue
            op = self.ops.ops[op_id]
            node = self.definition.node.add()
            node.CopyFrom(self.nodes[op.name])
            node.name = f"clone{i}/{op.name}"
            if "frame_name" in node.attr:
                node.attr["frame_name"].s += f"_clone{i}".encode()
            if "_class" in node.attr:
                del node.attr["_class"]
            self._clone_bodies(op_id, node, i)
            for (where, key), shape in self.axis.attributes.items():
                if where == op_id and key == "output_shapes":
                    for held, each in zip(node.attr[key].list.shape, shape):
                        held.CopyFrom(tf.TensorShape(each).as_proto())
                elif where == op_id:
                    node.attr[key].shape.CopyFrom(tf.TensorShape(shape).as_proto())
            del node.input[:]
            inputs = [self._operand(op_id, position, i) for position in range(len(op.inputs))]
            controls = ["^" + (f"clone{i}/" if self._is_cloned(c) else "") + self.ops.ops[c].name
                        for c in op.control_inputs if c in set(self.needed)]
            node.input.extend(inputs + controls)

    def _clone_bodies(self, op_id: int, node: Any, i: int) -> None:
        """Give a functional op the functions of its clone, edited where their analysis says so."""
        for (owner, attribute), axis in self.axis.bodies.items():
            if owner == op_id and (axis.conversions or axis.localise or axis.bodies):
                key, _, index = attribute.partition("[")
                value = node.attr[key].list.func[int(index[:-1])] if index else node.attr[key].func
                value.name = self._edited(value.name, axis, i)

    def _edited(self, name: str, axis: BatchAxis, i: int) -> str:
        function = self.definition.library.function.add()
        function.CopyFrom(next(f for f in self.definition.library.function if f.signature.name == name))
        self.made["functions"] = self.made.get("functions", 0) + 1
        for held in function.node_def:
            held.attr.pop("_output_shapes", None) if hasattr(held.attr, "pop") else None
        function.arg_attr.clear() if hasattr(function, "arg_attr") else None
        function.signature.name = "{}_clone{}_{}".format(name, i, self.made["functions"])
        nodes = {n.name: n for n in function.node_def}
        for (op_id, attribute), inner in axis.bodies.items():
            node = nodes[axis.graph.ops[op_id].name]
            node.attr[attribute].func.name = self._edited(node.attr[attribute].func.name, inner, i)
        for (op_id, position), localise in axis.localise.items():
            op = axis.graph.ops[op_id]
            values = [self.parts.at(size, i) for size in localise.components]
            nodes[op.name].input[position] = self._body_const(function, axis, op.inputs[position], values, op.name)
        for (op_id, position), steps in axis.conversions.items():
            op = axis.graph.ops[op_id]
            result = next((r for r in function.signature.output_arg if r.name + "_retval" == op.name), None)
            edge = function.ret[result.name] if result is not None else nodes[op.name].input[position]
            for k, step in enumerate(steps):
                edge = self._body_step(function, axis, op.inputs[position], edge, step, i, f"{op.name}_{position}_{k}")
            if result is not None:
                function.ret[result.name] = edge
            else:
                nodes[op.name].input[position] = edge
        return function.signature.name

    def _body_const(self, function: Any, axis: BatchAxis, tensor: int, values: Any, where: str) -> str:
        record_ = axis.graph.tensors[tensor]
        shape = record_.shape if record_.shape is not None and None not in record_.shape else [-1]
        node = function.node_def.add()
        node.name, node.op = "constant_" + where.replace("/", "_") + str(len(function.node_def)), "Const"
        proto = tf.make_tensor_proto(np.reshape(values, shape), dtype=tf.as_dtype(record_.dtype))
        node.attr["value"].tensor.CopyFrom(proto)
        node.attr["dtype"].type = proto.dtype
        return node.name + ":output:0"

    def _body_step(self, function: Any, axis: BatchAxis, tensor: int, edge: str, step: Any, i: int, where: str) -> str:
        """A Scale or a Slice of one block inside a function."""
        dtype = tf.as_dtype(axis.graph.tensors[tensor].dtype)

        def const(values: Any, kind: tf.DType) -> str:
            node = function.node_def.add()
            node.name, node.op = "constant_{}_{}".format(where.replace("/", "_"), len(function.node_def)), "Const"
            proto = tf.make_tensor_proto(values, dtype=kind)
            node.attr["value"].tensor.CopyFrom(proto)
            node.attr["dtype"].type = proto.dtype
            return node.name + ":output:0"
        if isinstance(step, Scale):
            inputs = [edge, const(self.parts.weight(step.power, i), dtype)]
            op, attrs, output = "Mul", {"T": dtype}, "z"
        else:
            assert isinstance(step, Slice) and len(step.blocks) == 1
            inputs = [edge, const(self.parts.rows(step.blocks, i), tf.int32), const(step.dim, tf.int32)]
            op, attrs, output = "GatherV2", {"Tparams": dtype, "Tindices": tf.int32, "Taxis": tf.int32}, "output"
        node = function.node_def.add()
        node.name, node.op = "step_" + where.replace("/", "_"), op
        node.input.extend(inputs)
        for key, value in attrs.items():
            node.attr[key].type = value.as_datatype_enum
        return f"{node.name}:{output}:0"

    def _name(self, tensor: int, i: int) -> str:
        record_ = self.ops.tensors[tensor]
        name = self.ops.tensor_name(tensor)
        if tensor in self.axis.sources:
            return self._slice(name, record_.dtype, i, Slice(self.axis.sources[tensor], self.axis.layout(tensor).blocks or (1,)),
                               "clone{}/source/{}".format(i, name.replace(":", "_")), None)
        return f"clone{i}/{name}" if self._is_cloned(record_.op) else name

    def _operand(self, op_id: int, position: int, i: int) -> str:
        op = self.ops.ops[op_id]
        tensor = op.inputs[position]
        prefix = f"clone{i}/edge/{op.name}/{position}"
        dtype = tf.as_dtype(self.ops.tensors[tensor].dtype.replace("_ref", ""))
        localise = self.axis.localise.get((op_id, position))
        if localise is not None:
            assert None not in localise.components
            values = [self.parts.at(size, i) for size in localise.components]
            shape = self.ops.tensors[tensor].shape
            return self._const(prefix, np.reshape(values, [] if shape == () else [-1]), dtype, self._name(tensor, i))
        name = self._name(tensor, i)
        for k, step in enumerate(self.axis.conversions.get((op_id, position), ())):
            where = f"{prefix}/{k}"
            if isinstance(step, Slice):
                name = self._slice(name, dtype.name, i, step, where, tensor)
            elif isinstance(step, Scale):
                weight = self.parts.weight(step.power, i)
                name = self._add(where, "Mul", [name, self._const(where + "/w", weight, dtype)], T=dtype)
            elif isinstance(step, Offset):
                coefficient = self.parts.shift(step.coefficient, i)
                name = self._add(where, "AddV2", [name, self._const(where + "/o", coefficient, dtype)], T=dtype)
            elif isinstance(step, Whole):
                shape = self.ops.tensors[tensor].shape
                values = [self.parts.at(size) for size in step.components]
                name = self._const(where, np.reshape(values, [] if shape == () else [-1]), dtype)
            else:
                assert isinstance(step, Reduce) and k == 0
                name = self._reduce(tensor, dtype, step, where)
        return name

    def _reduce(self, tensor: int, dtype: tf.DType, step: Reduce, where: str) -> str:
        terms = []
        for j in range(len(self.parts)):
            name = self._name(tensor, j)
            if step.power:
                weight = self._const(f"{where}/{j}/w", self.parts.weight(step.power, j), dtype)
                name = self._add(f"{where}/{j}", "Mul", [name, weight], T=dtype)
            terms.append(name)
        if step.kind == "sum":
            name = self._add(where, "AddN", terms, T=dtype, N=len(terms))
        else:
            stack = self._add(where + "/stack", "Pack", terms, T=dtype, N=len(terms), axis=0)
            attrs = {} if step.kind in ("any", "all") else {"T": dtype}
            name = self._add(where, step.kind.capitalize(), [stack, self._const(where + "/axis", 0, tf.int32)],
                             Tidx=tf.int32, **attrs)
        return name

    def _slice(self, name: str, dtype: str, i: int, step: Slice, where: str, tensor: Optional[int]) -> str:
        kind = tf.as_dtype(dtype.replace("_ref", ""))
        if where in self.made:
            return where
        axis = self._const(where + "/axis", step.dim, tf.int32)
        rows = self._const(where + "/rows", self.parts.rows(step.blocks, i), tf.int32)
        self.made[where] = self._add(where, "GatherV2", [name, rows, axis], Tparams=kind, Tindices=tf.int32, Taxis=tf.int32)
        return where

    # -- values -------------------------------------------------------------------------------------------------------
    def run(self, feed: Dict[str, np.ndarray], initialise: Optional[str] = None, everything: bool = False
            ) -> Tuple[List[Any], List[Any]]:
        """(whole values, merged values) of the fetches; ``everything``: of all tensors they need that have a layout,
        but in graphs with branches, where not all can be fetched."""
        if everything and not any(op.type in ("Enter", "Switch") for op in self.ops.ops):
            self.fetches = [t for op in self.needed if self._is_cloned(op) for t in self.ops.ops[op].outputs
                            if self._is_comparable(t)]
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(self.definition, name="")
            names = [self.ops.tensor_name(t) for t in self.fetches]
            clones = [[self._name(t, i) for t in self.fetches] for i in range(len(self.parts))]
            with tf.Session(graph=graph) as session:
                if initialise:
                    session.run(initialise, feed)
                whole = session.run(names, feed)
                values = [session.run([graph.get_tensor_by_name(n if ":" in n else n + ":0") for n in each], feed)
                          for each in clones]
        return whole, [self.merge(t, [each[k] for each in values]) for k, t in enumerate(self.fetches)]

    def _is_comparable(self, tensor: int) -> bool:
        """Not an extent with open sizes, nor an axis to sum over (a batch of one example broadcasts along it, harmlessly)."""
        op = self.ops.producer(tensor)
        axes = {self.ops.producer(t).type for t in op.inputs}
        if op.type == "BroadcastGradientArgs" or (op.type == "Sum" and "BroadcastGradientArgs" in axes):
            return False
        if tensor in self.axis.extents and any(not is_counted(v) for v in self.axis.extents[tensor].flat):
            return False
        dtype = self.ops.tensors[tensor].dtype
        return dtype.startswith(("float", "int", "bool")) and tensor not in self.axis.unknown

    def merge(self, tensor: int, values: Sequence[Any]) -> Any:
        return merge(self.axis, tensor, values, self.parts)
