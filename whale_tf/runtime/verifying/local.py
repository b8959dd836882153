"""The local step: the script's own graph as it was before the rewrite, in a graph and a Session of its own.

Only the ops that the compared values need are imported.  Nothing else of the script runs again: no summaries, prints or input
pipelines.
"""
from __future__ import annotations

import contextlib
import weakref
from typing import Any, Callable, Dict, Iterator, List, Mapping, MutableSet, NamedTuple

import numpy as np

from whale_tf._tf_compat import GraphDef, NodeDef, tf, v1
from whale_tf.capture.handles import Handle
from whale_tf.capture.hooks import original_run
from whale_tf.capture.phases import Phases
from whale_tf.errors import PlanError
from whale_tf.graph_editor.edges import tensor_name
from whale_tf.ir.graph import OpGraph, Phase
from whale_tf.ir.traits import Role, traits
from whale_tf.ir.walk import reached
from whale_tf.runtime.verifying.compare import UNIT
from whale_tf.runtime.verifying.cut import Cut

Values = Dict[str, np.ndarray]
own_graphs: MutableSet[tf.Graph] = weakref.WeakSet()  # graphs that run beside the script's, which hooks leave alone
SCOPE = "whale_verify"
NUDGE = 4.0  # rounding units by which variables are moved


class Script(NamedTuple):
    """The local script's step, as it was before the rewrite.

    Attributes:
        ops, phases: its op graph.
        graph_def: its ops.
        handles: placeholders of variables' handles, if it is a tf.function.
        is_scaled: whether its optimizer scales the loss.
    """

    ops: OpGraph
    phases: Phases
    graph_def: GraphDef
    handles: Mapping[str, Handle] = {}
    is_scaled: bool = False


class Outcome(NamedTuple):
    """Values of tensors and new values of variables, by name."""

    tensors: Values
    variables: Values


class Access(NamedTuple):
    """How a variable's value is set and read; ``variable``: its handle or reference."""

    variable: tf.Tensor
    value: tf.Tensor
    assign: tf.Operation
    read: tf.Tensor

    def destroy(self) -> tf.Operation:
        """An op that frees the memory of a resource variable."""
        return tf.raw_ops.DestroyResourceOp(resource=self.variable)


class LocalStep:
    """Runs the local step.

    Args:
        config: of its Session.
        convert: what to do with its graph before it is imported.
    """

    def __init__(self, script: Script, cut: Cut, config: Any,
                 convert: Callable[[GraphDef], GraphDef] = lambda given: given) -> None:
        self._script, self._cut = script, cut
        ops = script.ops
        left = dict.fromkeys(use.tensor for use in cut.leaving)
        self._left = {tensor: f"{SCOPE}/left{number}" for number, tensor in enumerate(left)}
        self._taken = {tensor: f"{SCOPE}/taken{number}" for number, tensor in enumerate(cut.taken)}
        self._inside = [ops.tensor_name(t) for t in (*cut.results, *cut.samples)]
        self._outside = [ops.tensor_name(t) for t in cut.returned]
        self._writes = [ops.ops[index].name for index in cut.writes if all(
            cut.written.get(variable) == "" for variable in script.phases.variables.written_by[index])]
        self.graph = tf.Graph()
        own_graphs.add(self.graph)
        definition = convert(self._definition())
        self._names = {node.name for node in definition.node}
        with self.graph.as_default():
            tf.import_graph_def(definition, name="")
            self._variables = {variable.name: access(self.graph, variable.name) for variable in script.phases.variables
                               if variable.name in self._names}
        self.session = v1.Session(graph=self.graph, config=config)
        self._run = original_run(self.session)

    @property
    def variables(self) -> List[str]:
        """Names of the variables that the step needs."""
        return list(self._variables)

    def outcome(self, before: Values, given: Values, nudge: bool = False) -> Outcome:
        """What the local step computes.

        Args:
            before: values of all variables.
            given: values of the divided step: of tensors that the local step takes over, and of those with which its second half
                begins.
            nudge: whether its variables are first moved by a few rounding units.
        """
        if nudge:
            before = {name: _moved(value, number) for number, (name, value) in enumerate(sorted(before.items()))}
        self._run([one.assign for one in self._variables.values()],
                  {one.value: np.array(before[name]) for name, one in self._variables.items()})
        taken, left = self._feeds(self._taken, given), self._feeds(self._left, given)
        updates = [self.graph.get_operation_by_name(name) for name in self._writes]
        if self._cut.is_joined:
            names = self._inside + self._outside
            tensors = dict(zip(names, self._run([names, updates], taken)[0]))
        else:
            tensors = dict(zip(self._inside, self._run(self._inside, taken)))
            tensors.update(zip(self._outside, self._run([self._outside, updates], {**taken, **left})[0]))
        reads = {name: one.read for name, one in self._variables.items()
                 if self._cut.written.get(self._script.ops.op(name).id) == ""}
        return Outcome(tensors, copied(self._run(reads)))

    def close(self) -> None:
        self.session.close()

    def _feeds(self, stand_ins: Mapping[int, str], given: Values) -> Dict[str, np.ndarray]:
        return {name + ":0": given[self._script.ops.tensor_name(tensor)] for tensor, name in stand_ins.items()
                if name in self._names}

    def _definition(self) -> GraphDef:
        """The needed nodes without devices, with placeholders for what comes from the divided step."""
        ops, cut = self._script.ops, self._cut
        nodes: Dict[str, NodeDef] = {}
        taken = {ops.tensor_name(tensor): name for tensor, name in self._taken.items()}
        for given in self._script.graph_def.node:
            node = nodes[given.name] = v1.NodeDef()
            node.CopyFrom(given)
            node.device = ""
            if "_class" in node.attr:
                del node.attr["_class"]
            if given.name in self._script.handles:
                make_variable(node, self._script.handles[given.name])
            if given.name in ops:
                index = ops.op(given.name).id
                inputs = [text for text in node.input if not (text[:1] == "^" and self._is_dropped(index, text[1:]))]
                inputs = [text if text[:1] == "^" or tensor_name(text) not in taken else taken[tensor_name(text)] + ":0"
                          for text in inputs]
                del node.input[:]
                node.input.extend(inputs)
        for use in cut.leaving:
            nodes[ops.ops[use.op].name].input[use.position] = self._left[use.tensor] + ":0"
        for stand_ins in (self._taken, self._left):
            nodes.update((name, _placeholder(name, ops.tensors[tensor].dtype)) for tensor, name in stand_ins.items())
        starts = [*(name.partition(":")[0] for name in self._inside + self._outside), *self._writes]
        needed = reached(starts, lambda name: [text.lstrip("^").partition(":")[0] for text in nodes[name].input])
        library, versions = self._script.graph_def.library, self._script.graph_def.versions
        return v1.GraphDef(node=[node for name, node in nodes.items() if name in needed], library=library, versions=versions)

    def _is_dropped(self, op: int, on: str) -> bool:
        """Whether an op need not wait for another, which is of the other half, is not run at all, or only has an effect."""
        ops = self._script.ops
        if on not in ops:
            return True
        one, other = ops.ops[op], ops.op(on)
        if other.phase is Phase.INPUT or other.id in self._cut.writes and on not in self._writes or any(
                tensor in self._taken for tensor in other.outputs):
            return True
        is_effect = not other.outputs and traits(other.type).role is not Role.NO_OP and other.id not in self._cut.writes
        if is_effect and not _is_inside(other.phase):
            return True
        return _is_inside(one.phase) != _is_inside(other.phase) and not self._cut.is_joined


@contextlib.contextmanager
def named(where: str) -> Iterator[None]:
    """Raises:
        PlanError: TensorFlow cannot run the local step beside the divided one, for another reason than memory.
    """
    try:
        yield
    except tf.errors.ResourceExhaustedError:
        raise
    except tf.errors.OpError as error:
        raise PlanError(
            f"verify is 'first_step', but TensorFlow cannot run the local step of {where} by itself: {error.message}; set verify "
            "to 'off' to train without the comparison, and please report this") from error


def copied(values: Values) -> Values:
    """Values in memory of their own: TensorFlow updates variables in place, also in memory that it shares with NumPy."""
    return {name: np.array(value) for name, value in values.items()}


def _is_inside(phase: Phase) -> bool:
    return phase in (Phase.FORWARD, Phase.BACKWARD)


def _placeholder(name: str, dtype: str) -> NodeDef:
    node = v1.NodeDef(name=name, op="Placeholder")
    node.attr["dtype"].type = tf.as_dtype(dtype).as_datatype_enum
    node.attr["shape"].shape.unknown_rank = True
    return node


def make_variable(node: NodeDef, handle: Handle) -> None:
    """Turns the placeholder of a handle into a variable."""
    name = node.name
    node.Clear()
    node.name, node.op = name, handle.type
    node.attr["dtype"].type = tf.as_dtype(handle.attrs["dtype"]).as_datatype_enum
    node.attr["shape"].shape.CopyFrom(tf.TensorShape(handle.attrs["shape"]).as_proto())
    node.attr["shared_name"].s = name.encode()


def access(graph: tf.Graph, name: str) -> Access:
    """Ops that set and read a variable."""
    variable = graph.get_operation_by_name(name)
    tensor = variable.outputs[0]
    dtype = tf.as_dtype(variable.get_attr("dtype"))
    value = v1.placeholder(dtype, None, f"{SCOPE}/value/{name}")
    if tensor.dtype == tf.resource:
        return Access(tensor, value, tf.raw_ops.AssignVariableOp(resource=tensor, value=value),
                       tf.raw_ops.ReadVariableOp(resource=tensor, dtype=dtype))
    assign = tf.raw_ops.Assign(ref=tensor, value=value, validate_shape=False)
    return Access(tensor, value, assign.op, tf.identity(tensor))


def _moved(value: np.ndarray, seed: int) -> np.ndarray:
    """A variable's value with every element moved by up to NUDGE rounding units, up or down."""
    unit = UNIT.get(str(value.dtype))
    if unit is None:
        return value
    signs = np.random.RandomState(seed).uniform(-1, 1, value.shape)
    return np.asarray(value * (1 + NUDGE * unit * signs), value.dtype)


