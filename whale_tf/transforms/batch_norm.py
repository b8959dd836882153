"""The pass ``sync_batch_norm``: batch normalisation in single ops, so that its statistics can be those of the whole mini-batch.

The fused kernels compute mean and variance inside the op, so each replica and micro-batch uses only its own examples.  With
single ops, the statistics are tensors, which are summed over all clones where they are used::

    before   x ──> FusedBatchNormV3 ──┬──> y             after   x ──┬──> Mean ──> ... ──> Rsqrt ──┐
                                      └──> mean, ...                 └─────────> Sub ──> Mul ──────┴──> Add ──> y

With ``N`` the number of elements per channel (Ioffe and Szegedy 2015, Algorithm 1 and the equations after it)::

    mean = sum(x) / N          variance = sum((x - mean)^2) / N          r = 1 / sqrt(variance + epsilon)
    h = (x - mean) r           y = scale h + offset
    doffset = sum(dy)          dscale = sum(dy h)          dx = scale r (dy - doffset / N - h dscale / N)

``N`` comes from a Shape op even if the shape is known: a clone sees fewer examples, and a constant would hide that.

The single ops are built in a graph of their own, with a placeholder for each tensor of the step that they read, and become
new nodes of the step.
"""
from __future__ import annotations

import contextlib
from typing import Dict, Iterator, List, NamedTuple, Sequence

from whale_tf._tf_compat import NodeDef, static_dims, tf, v1
from whale_tf.capture.annotations import FORWARD_ATTR
from whale_tf.capture.recording import Recording, renamed, renamed_call
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor.edges import canonical_edge
from whale_tf.graph_editor.names import free_name, names_taken
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.graph import Op, OpGraph, Phase, Shape, inner_ops
from whale_tf.ir.traits import BATCH_NORM_GRADIENTS, BATCH_NORMS
from whale_tf.ir.units import frames
from whale_tf.transforms.replacing import TAGS, move_waits

_OUTSIDE = "outside"  # scope of stand-ins for the step's own ops


def sync_batch_norm(step: Recording) -> Recording:
    """The step with single ops instead of the fused batch normalisations that use batch statistics and that an update needs.

    A graph that has no update of a variable yet stays as it is.  Data formats NHWC, NCHW, NDHWC and NCDHW; inputs of half
    precision are normalised in float32, as in the kernels.

    Raises:
        UnsupportedOpError: one is inside a while loop or a function body, which cannot wait for other clones.
    """
    graph = step.graph
    if not any(graph.ops[op].phase is Phase.APPLY for op in step.phases.variables.written_by):
        return step
    found = [op for op in graph.ops if _is_in_region(op) and _uses_batch_statistics(op)]
    _check_reachable(graph, found)
    return _Decomposer(step).run(found) if found else step


def _is_in_region(op: Op) -> bool:
    return op.phase in (Phase.FORWARD, Phase.BACKWARD)


def _uses_batch_statistics(op: Op) -> bool:
    return op.type in BATCH_NORMS | BATCH_NORM_GRADIENTS and bool(op.attrs.get("is_training", True))


def _check_reachable(graph: OpGraph, found: Sequence[Op]) -> None:
    for op in graph.ops:
        inner = next(filter(_uses_batch_statistics, inner_ops(op)), None) if _is_in_region(op) else None
        if inner is not None:
            raise _unreachable(inner, f"the function body of {op.name!r} ({op.type})")
    loop_of = frames(graph) if found else {}
    for op in found:
        if op.id in loop_of:
            raise _unreachable(op, f"the while loop {loop_of[op.id][-1]!r}")


def _unreachable(op: Op, where: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"sync_batch_norm: {op.name!r} ({op.type}) is inside {where}, where its statistics cannot be summed over the replicas; "
        "move the batch normalisation out, or set sync_batch_norm to false (each replica then uses its own statistics)")


class _Statistics(NamedTuple):
    """Of one input, per channel `[C]`: mean, variance and ``1 / sqrt(variance + epsilon)``; ``count``: N, a scalar."""

    mean: tf.Tensor
    variance: tf.Tensor
    inverse: tf.Tensor
    count: tf.Tensor


class _Decomposer:
    """Builds the single ops of each fused op in turn, then stages all of them and moves the edges."""

    def __init__(self, step: Recording) -> None:
        self._step, self._graph = step, step.graph
        self._aside = tf.Graph()
        self._inputs: Dict[int, tf.Tensor] = {}  # tensor of the step -> its stand-in
        self._waits: Dict[int, tf.Operation] = {}  # op of the step -> its stand-in
        self._names: Dict[str, str] = {}  # stand-in -> name of the original
        self._results: Dict[int, tf.Tensor] = {}  # tensor of a fused op -> what is read instead
        self._statistics: Dict[int, _Statistics] = {}  # of each forward op

    def run(self, ops: Sequence[Op]) -> Recording:
        for op in ops:  # producers first
            with self._in_place_of(op):
                results = self._forward(op) if op.type in BATCH_NORMS else self._backward(op)
            for tensor, result in zip(op.outputs, results):
                result.set_shape(self._graph.tensors[tensor].shape)
                self._results[tensor] = result
        edit = StagedEdit.after(self._step.definitions)
        for node in self._aside.as_graph_def().node:
            if node.name not in self._names:
                self._stage(edit, node)
        successors = {op.name: self._successor(op.id) for op in ops}
        needed = {op.name for op in ops if self._move_readers(edit, op, successors)}
        move_waits(self._graph, edit, successors)
        replaced = {self._graph.tensor_name(tensor): result.name for tensor, result in self._results.items()}
        calls = [renamed_call(call, renamed(call.ys, replaced), renamed(call.xs, replaced), renamed(call.grads, replaced))
                 for call in self._step.annotations.gradient_calls]
        return self._step.after(edit, calls, successors, self._shapes(), {**self._step.replaced, **replaced}, needed)

    def _forward(self, op: Op) -> List[tf.Tensor]:
        """y, the running mean and variance (unbiased), and the batch's mean and variance."""
        x, scale, offset, old_mean, old_variance = [self._operand(tensor) for tensor in op.inputs[:5]]
        channels = _Channels(op, scale.dtype)
        x = channels.cast(x)
        found = self._statistics[op.id] = _statistics(x, channels)
        y = (x - channels.spread(found.mean)) * channels.spread(found.inverse * scale) + channels.spread(offset)
        unbiased = found.variance * (found.count / tf.maximum(found.count - 1, 1))
        factor = op.attrs.get("exponential_avg_factor", 1.0)
        running = [value if factor == 1.0 else old * (1.0 - factor) + value * factor
                   for old, value in ((old_mean, found.mean), (old_variance, unbiased))]
        return [tf.cast(y, self._dtype(op.outputs[0]))] + running + [found.mean, found.variance]

    def _backward(self, op: Op) -> List[tf.Tensor]:
        """dx, dscale, doffset."""
        dy, x, scale = [self._operand(tensor) for tensor in op.inputs[:3]]
        channels = _Channels(op, scale.dtype)
        dy, x = channels.cast(dy), channels.cast(x)
        found = self._statistics.get(self._graph.producer(op.inputs[3]).id) or _statistics(x, channels)
        normalised = (x - channels.spread(found.mean)) * channels.spread(found.inverse)
        dscale, doffset = channels.sum(dy * normalised), channels.sum(dy)
        dx = channels.spread(scale * found.inverse) * (
            dy - channels.spread(doffset / found.count) - normalised * channels.spread(dscale / found.count))
        return [tf.cast(dx, self._dtype(op.outputs[0])), dscale, doffset]

    # -- stand-ins for the step's tensors and ops --------------------------------------------------------------------------
    @contextlib.contextmanager
    def _in_place_of(self, op: Op) -> Iterator[None]:
        """Gives new ops the tags, device and control inputs of ``op``, and names below its own."""
        aside, attrs = self._aside, self._step.definitions.node(op.name).attr
        tags = {name: attrs[name] for name in TAGS if name in attrs}
        if op.forward >= 0:
            tags[FORWARD_ATTR] = v1.AttrValue(s=self._successor(op.forward).encode())
        scope = free_name(op.name + "/decomposed", names_taken(self._step.definitions.graph).__contains__)
        with aside.as_default():
            waits = [self._wait(control) for control in op.control_inputs]
            with aside.control_dependencies(waits), aside.device(op.device), aside.name_scope(scope + "/"), \
                    aside._attr_scope(tags):
                yield

    def _operand(self, tensor: int) -> tf.Tensor:
        """The stand-in for a tensor of the step, outside all scopes."""
        if tensor in self._results:
            return self._results[tensor]
        if tensor not in self._inputs:
            with self._aside.control_dependencies(None), self._aside.name_scope(None), self._aside.device(None):
                made = v1.placeholder(self._dtype(tensor), self._graph.tensors[tensor].shape, f"{_OUTSIDE}/{len(self._names)}")
            self._inputs[tensor] = made
            self._names[made.op.name] = canonical_edge(self._graph.tensor_name(tensor))
        return self._inputs[tensor]

    def _wait(self, op: int) -> tf.Operation:
        """The stand-in for an op of the step that other ops wait for."""
        results = [self._results[tensor] for tensor in self._graph.ops[op].outputs if tensor in self._results]
        if results:
            return results[0].op
        if op not in self._waits:
            self._waits[op] = tf.no_op(f"{_OUTSIDE}/{len(self._names)}")
            self._names[self._waits[op].name] = self._graph.ops[op].name
        return self._waits[op]

    def _dtype(self, tensor: int) -> tf.DType:
        return tf.as_dtype(self._graph.tensors[tensor].dtype).base_dtype

    def _successor(self, op: int) -> str:
        """Name of the op that now makes the first output of a fused op; for any other op its own name."""
        outputs = self._graph.ops[op].outputs
        return self._results[outputs[0]].op.name if outputs and outputs[0] in self._results else self._graph.ops[op].name

    # -- back in the step ---------------------------------------------------------------------------------------------
    def _stage(self, edit: StagedEdit, node: NodeDef) -> None:
        for position, edge in enumerate(node.input):
            is_wait = edge.startswith("^")
            name = edge[1:] if is_wait else edge
            if name in self._names:
                node.input[position] = ("^" if is_wait else "") + self._names[name]
        edit.insert(node)

    def _move_readers(self, edit: StagedEdit, op: Op, successors: Dict[str, str]) -> bool:
        """Moves readers of a fused op to its replacement.

        Returns:
            Whether some stay: gradient ops that no update needs read the kernel's own reserves.
        """
        stays = False
        for tensor in op.outputs:
            is_reserve = self._graph.tensors[tensor].index > 2 and op.type in BATCH_NORMS
            for reader, position in self._graph.consumers(tensor):
                other = self._graph.ops[reader]
                if other.name in successors:
                    continue
                if tensor not in self._results or (is_reserve and other.type in BATCH_NORM_GRADIENTS):
                    stays = True
                else:
                    edit.move_input(other.name, position, self._results[tensor].name)
        return stays

    def _shapes(self) -> Dict[str, Shape]:
        found: Dict[str, Shape] = {}
        for op in self._aside.get_operations():
            for tensor in op.outputs:
                dims = static_dims(tensor)
                found[tensor.name] = None if dims is None else tuple(dims)
        return found


class _Channels:
    """Which dimensions of a fused op's input count elements, and how values `[C]` broadcast to the input."""

    def __init__(self, op: Op, dtype: tf.DType) -> None:
        data_format = op.attrs["data_format"]
        channel = data_format.index("C")
        self.epsilon = op.attrs["epsilon"]
        self.axes = [axis for axis in range(len(data_format)) if axis != channel]
        self._dtype = dtype
        self._shape = None if channel == len(self.axes) else [
            -1 if axis == channel else 1 for axis in range(len(data_format))]

    def cast(self, x: tf.Tensor) -> tf.Tensor:
        """`x` in the precision of the statistics."""
        return tf.cast(x, self._dtype)

    def spread(self, value: tf.Tensor) -> tf.Tensor:
        """`[C]` in a shape that broadcasts to the input's."""
        return value if self._shape is None else tf.reshape(value, self._shape)

    def mean(self, x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(x, self.axes)

    def sum(self, x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(x, self.axes)

    def count(self, x: tf.Tensor) -> tf.Tensor:
        sizes = tf.gather(tf.raw_ops.Shape(input=x), self.axes)
        return tf.cast(tf.reduce_prod(sizes), self._dtype)


def _statistics(x: tf.Tensor, channels: _Channels) -> _Statistics:
    mean = channels.mean(x)
    variance = channels.mean(tf.math.squared_difference(x, channels.spread(mean)))
    return _Statistics(mean, variance, tf.math.rsqrt(variance + channels.epsilon), channels.count(x))
