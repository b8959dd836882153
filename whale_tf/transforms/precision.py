"""The pass ``mixed_precision``: forward and backward ops in a type of half the size, with casts at the borders.

::

    before   read w ──┐                          after   read w ──> Cast ──┐
    x ────────────> MatMul ──> Softmax ──> loss'         x ──> Cast ──> MatMul ──> Softmax ──> Cast ──> loss'

Variables, and everything from the gradients' sums to the update, stay float32 (master weights; Micikevicius et al. 2018, section
3.1).  A tensor has one cast for all readers in its TaskGraph, made where the tensor is, so that transfers have the low type.
"""

from __future__ import annotations

from typing import Any, Dict, Set, Tuple

from whale_tf._tf_compat import NodeDef, has_kernel, op_def, tf
from whale_tf.capture.annotations import FORWARD_ATTR
from whale_tf.capture.recording import Recording, renamed, renamed_call
from whale_tf.errors import ConfigError
from whale_tf.graph_editor.attrs import OpSignature
from whale_tf.graph_editor.names import names_taken
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.graph import Op, Phase, Shape
from whale_tf.ir.precision import Typed, low_ops
from whale_tf.ir.traits import traits
from whale_tf.ir.traits.row import Precision
from whale_tf.ir.units import frames
from whale_tf.transforms.replacing import move_waits, tag_like

FLOAT32 = "float32"
_REGION = (Phase.FORWARD, Phase.BACKWARD)


def mixed_precision(step: Recording, dtype: str, devices: Set[str]) -> Recording:
    """The step with its float32 ops in ``dtype`` where this is safe and worthwhile.

    A graph that has no update of a variable yet stays as it is.  Loops, conditions and function bodies stay float32.

    Args:
        devices: types of the devices that run the step, "CPU" or "GPU".

    Raises:
        ConfigError: TensorFlow has no kernel for a matrix product or convolution of the step in ``dtype``.
    """
    graph = step.graph
    if not any(graph.ops[op].phase is Phase.APPLY for op in step.phases.variables.written_by):
        return step
    typed = _typed(step)
    for op in typed:
        kind = graph.ops[op].type
        lacking = [device for device in sorted(devices) if not _computes(kind, device, dtype)]
        if traits(kind).precision is Precision.LOW and lacking:
            raise ConfigError(
                f"amp is {dtype!r}, but TensorFlow {tf.__version__} has no {lacking[0]} kernel of {kind} for it (op "
                f"{graph.ops[op].name!r}); use amp 'none', or another type or TensorFlow")
    low = low_ops(graph, typed, lambda kind: all(_computes(kind, device, dtype) for device in devices))
    return _Lowerer(step, dtype, typed, low).run() if low else step


def _computes(kind: str, device: str, dtype: str) -> bool:
    """Whether TensorFlow computes an op type in ``dtype`` on a device.  A TensorFlow without any kernels for such devices says
    nothing about the one that will run the step."""
    return has_kernel(kind, device, tf.as_dtype(dtype)) or not has_kernel(kind, device, tf.float32)


def _typed(step: Recording) -> Dict[int, Typed]:
    """The step's float32 ops whose type can change."""
    graph, found = step.graph, {}
    in_loop = frames(graph)
    signatures: Dict[str, OpSignature] = {}
    for op in graph.ops:
        if op.phase not in _REGION or traits(op.type).precision is Precision.FIXED or op.id in in_loop:
            continue
        attr = next((name for name in ("T", "Tparams") if op.attrs.get(name) == FLOAT32), None)
        if attr is None:
            continue
        if op.type not in signatures:
            signatures[op.type] = OpSignature(op_def(step.definitions.graph, op.type))
        inputs, outputs = signatures[op.type].typed_by(step.definitions.node(op.name), attr)
        is_reference = any(graph.tensors[op.inputs[i]].dtype != FLOAT32 for i in inputs)
        if not is_reference or traits(op.type).precision is not Precision.NEUTRAL:  # the read of a variable stays as it is
            found[op.id] = Typed(attr, tuple(inputs), tuple(outputs))
    return found


class _Lowerer:
    """Stages copies of the low ops and the casts, then moves the edges of all other ops to these.

    Attributes:
        shapes: shapes of new tensors, by name.
    """

    def __init__(self, step: Recording, dtype: str, typed: Dict[int, Typed], low: Set[int]) -> None:
        self._step, self._graph, self._dtype = step, step.graph, dtype
        self._typed, self._low = typed, low
        self._edit = StagedEdit.after(step.definitions)
        self._casts: Dict[Tuple[int, str, int, bool], str] = {}
        self.shapes: Dict[str, Shape] = {}
        taken, self._suffix = names_taken(self._edit.graph), dtype
        while any(f"{self._graph.ops[op].name}/{self._suffix}" in taken for op in low):
            self._suffix += "_"

    def run(self) -> Recording:
        graph, edit = self._graph, self._edit
        for index in sorted(self._low):
            self._copy(graph.ops[index])
        successors = {graph.ops[op].name: self._name(op) for op in self._low}
        replaced: Dict[str, str] = {}
        kept_float = {graph.tensor(self._step.computed(name)) for name in self._step.returned or ()}
        for index in sorted(self._low):
            for tensor in graph.ops[index].outputs:
                others = [use for use in graph.consumers(tensor) if use[0] not in self._low]
                name = self._new(tensor)
                for reader, place in others:
                    name = self._wide(tensor, graph.ops[reader])
                    edit.move_input(graph.ops[reader].name, place, name)
                replaced[graph.tensor_name(tensor)] = self._wide(tensor, graph.ops[index]) if tensor in kept_float else name
        move_waits(graph, edit, successors)
        calls = []
        for call in self._step.annotations.gradient_calls:
            grads = [self._gradient(grad) for grad in call.grads]
            calls.append(renamed_call(call, renamed(call.ys, replaced), renamed(call.xs, replaced), grads))
        return self._step.after(edit, calls, successors, self.shapes, {**self._step.replaced, **replaced})

    def _copy(self, op: Op) -> None:
        """Stages a low op."""
        graph, typed = self._graph, self._typed[op.id]
        inputs = []
        for position, tensor in enumerate(op.inputs):
            if position in typed.inputs:
                inputs.append(self._narrow(tensor, op))
            else:
                inputs.append(self._wide(tensor, op) if self._is_low(tensor) else self._new(tensor))
        waits = [self._name(wait) for wait in op.control_inputs]
        node = self._edit.copy(
            self._step.definitions.node(op.name), self._name(op.id), inputs, device=op.device, control_inputs=waits)
        node.attr[typed.attr].type = tf.as_dtype(self._dtype).as_datatype_enum
        if op.forward >= 0:
            node.attr[FORWARD_ATTR].s = self._name(op.forward).encode()
        for tensor in op.outputs:
            self.shapes[self._new(tensor)] = graph.tensors[tensor].shape

    # -- names --------------------------------------------------------------------------------------------------------
    def _name(self, op: int) -> str:
        """The op that does an op's work."""
        name = self._graph.ops[op].name
        return f"{name}/{self._suffix}" if op in self._low else name

    def _new(self, tensor: int) -> str:
        record = self._graph.tensors[tensor]
        return f"{self._name(record.op)}:{record.index}"

    def _is_low(self, tensor: int) -> bool:
        record = self._graph.tensors[tensor]
        return record.op in self._low and record.index in self._typed[record.op].outputs

    # -- casts --------------------------------------------------------------------------------------------------------
    def _narrow(self, tensor: int, reader: Op) -> str:
        return self._new(tensor) if self._is_low(tensor) else self._cast(tensor, self._dtype, reader)

    def _wide(self, tensor: int, reader: Op) -> str:
        return self._cast(tensor, FLOAT32, reader) if self._is_low(tensor) else self._new(tensor)

    def _gradient(self, grad: Any) -> Any:
        """A gradient in float32, for sums over clones and for the update."""
        if isinstance(grad, (list, tuple)):
            return type(grad)([self._gradient(each) for each in grad])
        if grad is None:
            return None
        tensor = self._graph.tensor(grad)
        return self._wide(tensor, self._graph.producer(tensor))

    def _cast(self, tensor: int, dtype: str, reader: Op) -> str:
        """The tensor in another type.  There is one cast where the tensor is made or, for an input, a constant or another op in
        no TaskGraph, one for each TaskGraph that reads it."""
        graph = self._graph
        producer = graph.producer(tensor)
        place = producer if self._belongs(producer) else reader
        key = (tensor, dtype, -1, False) if place is producer else (
            tensor, dtype, self._task_graph(place), place.phase is Phase.BACKWARD)
        if key not in self._casts:
            source = self._new(tensor)
            name = self._edit.add(
                "Cast", f"{self._name(producer.id)}/{'to_' if place is producer else 'as_'}{dtype}", [source],
                device=place.device, attrs={"SrcT": tf.as_dtype(self._dtype if self._is_low(tensor) else FLOAT32),
                                            "DstT": tf.as_dtype(dtype)})
            self._tag(self._edit.node(name), place)
            self._casts[key] = f"{name}:0"
            self.shapes[f"{name}:0"] = graph.tensors[tensor].shape
        return self._casts[key]

    def _belongs(self, op: Op) -> bool:
        return op.id in self._low or (op.phase in _REGION and self._task_graph(op) >= 0)

    def _task_graph(self, op: Op) -> int:
        return op.task_graph if op.task_graph >= 0 or op.forward < 0 else self._graph.ops[op.forward].task_graph

    def _tag(self, node: NodeDef, place: Op) -> None:
        """Puts a node into the TaskGraph and phase of ``place``."""
        tag_like(node, self._step.definitions.node(place.name))
        if place.phase is Phase.BACKWARD and place.forward >= 0:
            node.attr[FORWARD_ATTR].s = self._name(place.forward).encode()
