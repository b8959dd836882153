"""The divided step's graph in a Session of its own, on values of a first step; and graphs in float64."""
from __future__ import annotations

from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np

from whale_tf._tf_compat import GraphDef, tf, v1
from whale_tf.capture.hooks import original_run
from whale_tf.errors import WhaleError
from whale_tf.ir.traits import CALLS, CONDITIONALS, MERGES, PULLS, WHILES, Role, VariableUse, traits
from whale_tf.runtime.verifying.compare import Comparison
from whale_tf.runtime.verifying.local import Values, access, copied, own_graphs
from whale_tf.transforms.shard.checkpoints import DividedVariable


class Replay:
    """Runs a divided step once.

    Args:
        definition: its graph, in which every variable is an op.
        before: values of all variables that the step needs.
        config: ConfigProto with the plan's devices.
        target: the server of one of several processes, which keeps variables until :meth:`close`.
    """

    def __init__(self, definition: GraphDef, before: Values, config: Any, target: str = "") -> None:
        self.graph = tf.Graph()
        own_graphs.add(self.graph)
        devices = {node.name: node.device for node in definition.node if node.name in before}
        with self.graph.as_default():
            tf.import_graph_def(definition, name="")
            self._variables = {}
            for name in before:
                with tf.device(devices[name]):
                    self._variables[name] = access(self.graph, name)
        self._session = v1.Session(target, self.graph, config)
        self._run = original_run(self._session)
        self._outlives = bool(target)
        self._run([one.assign for one in self._variables.values()],
                  {one.value: np.array(before[name]) for name, one in self._variables.items()})

    def run(self, fetches: Mapping[str, str], updates: Iterable[str], given: Values) -> Values:
        """Values of ``fetches`` (name -> name of the tensor) of a step that makes these updates."""
        tensors = {name: self.graph.get_tensor_by_name(tensor) for name, tensor in fetches.items()}
        operations = [self.graph.get_operation_by_name(name) for name in updates]
        feeds = {self.graph.get_tensor_by_name(name): value for name, value in given.items()}
        return dict(self._run([tensors, operations], feeds)[0])

    def variables(self) -> Values:
        """The variables' values now."""
        return copied(self._run({name: one.read for name, one in self._variables.items()}))

    def close(self) -> None:
        if self._outlives:
            with self.graph.as_default():
                self._run([one.destroy() for one in self._variables.values()])
        self._session.close()


def without_effects(definition: GraphDef, ops: Sequence[tf.Operation]) -> None:
    """Lets no node wait for ops that only print or check, or that read what is outside of the step."""
    dropped = {"^" + op.name for op in ops if _is_effect(op)}
    for node in definition.node:
        kept = [text for text in node.input if text not in dropped]
        if len(kept) < len(node.input):
            del node.input[:]
            node.input.extend(kept)


def writes(op: tf.Operation) -> bool:
    """Whether an op that a function must run may write a variable, or waits for writes that a loss scale may skip."""
    row = traits(op.type)
    return row.is_write or row.state is VariableUse.DRAW or op.type in CALLS | CONDITIONALS | WHILES | MERGES


def _is_effect(op: tf.Operation) -> bool:
    row = traits(op.type)
    return op.type in PULLS or row.role is Role.HOST or (not op.outputs and row.role is not Role.NO_OP and not row.is_write)


def in_float64(definition: GraphDef) -> GraphDef:
    """The graph with float64 wherever it has float32, also in its functions."""
    found = v1.GraphDef()
    found.CopyFrom(definition)
    _widen(found.node, ":0")
    for function in found.library.function:
        _widen(function.node_def, ":y:0")
        for argument in (*function.signature.input_arg, *function.signature.output_arg):
            if argument.type == tf.float32.as_datatype_enum:
                argument.type = tf.float64.as_datatype_enum
        for attr in function.attr.values():
            _widen_attr(attr)
    return found


def _widen(nodes: Any, output: str) -> None:
    """Widens the nodes of a graph or function, in which edges to a first output end in ``output``.  Bits are those of float32."""
    narrowed = [node for node in nodes if node.op == "Bitcast" and node.attr["T"].type == tf.float32.as_datatype_enum]
    for node in nodes:
        for attr in node.attr.values() if node.name not in {one.name for one in narrowed} else ():
            _widen_attr(attr)
    for node in narrowed:
        cast = nodes.add()
        cast.name, cast.op = node.name + "/narrow", "Cast"
        cast.input.append(node.input[0])
        cast.attr["SrcT"].type, cast.attr["DstT"].type = tf.float64.as_datatype_enum, tf.float32.as_datatype_enum
        node.input[0] = cast.name + output


def _widen_attr(attr: Any) -> None:
    single, double = tf.float32.as_datatype_enum, tf.float64.as_datatype_enum
    kind = attr.WhichOneof("value")
    if kind == "type" and attr.type == single:
        attr.type = double
    elif kind == "tensor" and attr.tensor.dtype == single:
        attr.tensor.CopyFrom(tf.make_tensor_proto(np.asarray(tf.make_ndarray(attr.tensor), np.float64)))
    elif kind == "list":
        for place, each in enumerate(attr.list.type):
            if each == single:
                attr.list.type[place] = double
    elif kind == "func":
        for inner in attr.func.attr.values():
            _widen_attr(inner)


def in_float64_if_possible(compared: Callable[[bool], Comparison]) -> Comparison:
    """A comparison in float64 or, if TensorFlow has no such kernels for some ops, in the graph's own types, which is noted.

    Args:
        compared: makes it; in float64 if it is given True.
    """
    try:
        return compared(True)
    except (ValueError, tf.errors.InvalidArgumentError, tf.errors.NotFoundError, tf.errors.UnimplementedError) as error:
        if isinstance(error, WhaleError):
            raise
        found, missing = compared(False)
        return found, {**missing, "anything in float64": "TensorFlow lacks ops for it: " + str(error).splitlines()[0][:160]}


def on_cpus(definition: GraphDef) -> GraphDef:
    """The graph with logical CPU devices in the place of GPUs."""
    for node in definition.node:
        node.device = node.device.replace("device:GPU:", "device:CPU:").replace("/gpu:", "/device:CPU:")
    return definition


def cpus(count: int) -> Any:
    """The ConfigProto of a Session with this many logical CPU devices."""
    config = v1.ConfigProto(allow_soft_placement=True)
    config.device_count["CPU"], config.device_count["GPU"] = count, 0
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config


def joined(parts: DividedVariable, values: Values) -> np.ndarray:
    """A variable's value from those of its parts."""
    return parts.spread.whole_of([values[name] for name in parts.names], np.concatenate)


def widened(values: Values) -> Values:
    """Values in float64 wherever they are float32."""
    return {name: value.astype(np.float64) if value.dtype == np.float32 else value for name, value in values.items()}


