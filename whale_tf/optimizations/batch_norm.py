"""Batch normalisation in single ops, so that its statistics can be those of the whole mini-batch.

The fused kernels take mean and variance inside the op, each replica and micro-batch over its own examples.  In single
ops the statistics are tensors, which the rewrite sums over all clones where they are used::

    before   x ──> FusedBatchNormV3 ──┬──> y             after   x ──┬──> Mean ──> ... ──> Rsqrt ──┐
                                      └──> mean, ...                 └─────────> Sub ──> Mul ──────┴──> Add ──> y

With ``N`` the number of elements per channel (Ioffe and Szegedy 2015, Algorithm 1 and the equations after it)::

    mean = sum(x) / N          variance = sum((x - mean)^2) / N          r = 1 / sqrt(variance + epsilon)
    h = (x - mean) r           y = scale h + offset
    doffset = sum(dy)          dscale = sum(dy h)          dx = scale r (dy - doffset / N - h dscale / N)

``N`` comes from a Shape op even where the shape is known: a clone sees fewer examples, and a constant would hide that.
"""
from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set

from whale_tf._tf_compat import tf, v1
from whale_tf.capture.annotations import CALL_ATTR, FORWARD_ATTR, PHASE_ATTR, TASK_GRAPH_ATTR, annotations_of
from whale_tf.capture.phases import find_phases
from whale_tf.capture.record import record
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor import (
    add_control_inputs,
    consumers,
    frames,
    remove_control_inputs,
    reroute_tensor,
    set_input,
)
from whale_tf.ir.graph import Op, OpGraph, Phase
from whale_tf.ir.traits import BATCH_NORM_GRADIENTS, BATCH_NORMS, ENTERS

TAGS = (TASK_GRAPH_ATTR, PHASE_ATTR, CALL_ATTR)


class Decomposition:
    """What :func:`decompose` did.

    Attributes:
        replaced: name of a fused op's output -> name of the tensor that is read in its place now.
    """

    def __init__(self) -> None:
        self.replaced: Dict[str, str] = {}
        self._restore: List[Callable[[], Any]] = []

    def successor(self, op: str) -> str:
        """Name of the op that makes the first output of a fused op now; any other op's own name."""
        return self.replaced.get(op + ":0", op).partition(":")[0]

    def did(self, restore: Callable[..., Any], *args: Any) -> None:
        """``restore(*args)`` takes back what was just done."""
        self._restore.append(functools.partial(restore, *args))

    def undo(self) -> None:
        """Let everything read the fused ops again; the single ops stay in the graph, unused."""
        while self._restore:
            self._restore.pop()()
        self.replaced.clear()


def decompose(graph: tf.Graph) -> Decomposition:
    """Put single ops in the place of the fused batch normalisations that use batch statistics and that an update needs.

    Nothing happens to a graph that has no update of a variable yet.  The fused ops stay in the graph.  Data formats NHWC,
    NCHW, NDHWC and NCDHW; inputs of half precision are normalised in float32, as the kernels do.

    Raises:
        UnsupportedOpError: one is inside a while loop or a function body, which cannot wait for other clones.
    """
    recorded = record(graph)
    phases = find_phases(recorded, annotations_of(graph))
    done = Decomposition()
    if not any(recorded.ops[op].phase is Phase.APPLY for op in phases.variables.written_by):
        return done
    found = [op for op in recorded.ops if _is_in_region(op) and _uses_batch_statistics(op)]
    _check_reachable(graph, recorded, found)
    try:
        _Decomposer(graph, done).run([graph.get_operation_by_name(op.name) for op in found])
        _rename_forward(graph, recorded, done)
        _rename_in_calls(graph, done)
    except Exception:
        done.undo()
        raise
    return done


def _is_in_region(op: Op) -> bool:
    return op.phase in (Phase.FORWARD, Phase.BACKWARD)


def _uses_batch_statistics(op: Op) -> bool:
    return op.type in BATCH_NORMS | BATCH_NORM_GRADIENTS and bool(op.attrs.get("is_training", True))


def _check_reachable(graph: tf.Graph, recorded: OpGraph, found: Sequence[Op]) -> None:
    for op in recorded.ops:
        inner = _inside(op, set()) if op.body and _is_in_region(op) else None
        if inner is not None:
            raise _unreachable(inner, f"the function body of {op.name!r} ({op.type})")
    if found and any(op.type in ENTERS for op in recorded.ops):
        loop_of = {op.name: frame.name for frame in frames(graph).values() for op in frame.ops}
        for op in found:
            if op.name in loop_of:
                raise _unreachable(op, f"the while loop {loop_of[op.name]!r}")


def _inside(op: Op, seen: Set[int]) -> Optional[Op]:
    """A fused batch normalisation in the functions that an op calls."""
    for body in (op.body or {}).values():
        if id(body) in seen:
            continue
        seen.add(id(body))
        for inner in body.ops:
            found = inner if _uses_batch_statistics(inner) else _inside(inner, seen)
            if found is not None:
                return found
    return None


def _unreachable(op: Op, where: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"sync_batch_norm: {op.name!r} ({op.type}) is inside {where}, where its statistics cannot be summed over the "
        f"replicas; move the "
        "batch normalisation out, or set sync_batch_norm to false (each replica then uses its own statistics)")


class _Statistics(NamedTuple):
    """Per channel `[C]`, of one input: mean, variance and ``1 / sqrt(variance + epsilon)``; ``count``: N, a scalar."""

    mean: tf.Tensor
    variance: tf.Tensor
    inverse: tf.Tensor
    count: tf.Tensor


class _Decomposer:
    """Builds the single ops of one fused op after the other, and moves the edges."""

    def __init__(self, graph: tf.Graph, done: Decomposition) -> None:
        self._graph = graph
        self._done = done
        self._statistics: Dict[str, _Statistics] = {}  # of each forward op

    def run(self, ops: Sequence[tf.Operation]) -> None:
        for op in ops:  # producers first
            with self._in_place_of(op):
                results = self._forward(op) if op.type in BATCH_NORMS else self._backward(op)
            self._replace(op, results)

    def _forward(self, op: tf.Operation) -> List[tf.Tensor]:
        """y, the running mean and variance (unbiased), the batch's mean and variance."""
        scale, offset, old_mean, old_variance = list(op.inputs)[1:5]
        channels = _Channels(op, scale.dtype)
        x = channels.cast(op.inputs[0])
        found = self._statistics[op.name] = _statistics(x, channels)
        y = (x - channels.spread(found.mean)) * channels.spread(found.inverse * scale) + channels.spread(offset)
        unbiased = found.variance * (found.count / tf.maximum(found.count - 1, 1))
        factor = op.get_attr("exponential_avg_factor") if "exponential_avg_factor" in op.node_def.attr else 1.0
        running = [value if factor == 1.0 else old * (1.0 - factor) + value * factor
                   for old, value in ((old_mean, found.mean), (old_variance, unbiased))]
        return [tf.cast(y, op.outputs[0].dtype)] + running + [found.mean, found.variance]

    def _backward(self, op: tf.Operation) -> List[tf.Tensor]:
        """dx, dscale, doffset."""
        scale, reserve = op.inputs[2], op.inputs[3]
        channels = _Channels(op, scale.dtype)
        dy, x = channels.cast(op.inputs[0]), channels.cast(op.inputs[1])
        found = self._statistics.get(reserve.op.name) or _statistics(x, channels)
        normalised = (x - channels.spread(found.mean)) * channels.spread(found.inverse)
        dscale, doffset = channels.sum(dy * normalised), channels.sum(dy)
        dx = channels.spread(scale * found.inverse) * (
            dy - channels.spread(doffset / found.count) - normalised * channels.spread(dscale / found.count))
        return [tf.cast(dx, op.outputs[0].dtype), dscale, doffset]

    @contextlib.contextmanager
    def _in_place_of(self, op: tf.Operation) -> Iterator[None]:
        """New ops get the tags, the device and the control inputs of ``op``, and names below its own."""
        graph, attrs = self._graph, op.node_def.attr
        tags = {name: attrs[name] for name in TAGS if name in attrs}
        if FORWARD_ATTR in attrs:
            tags[FORWARD_ATTR] = _forward_tag(self._done.successor(attrs[FORWARD_ATTR].s.decode()))
        with graph.as_default(), graph.control_dependencies(None), graph.control_dependencies(op.control_inputs), \
                graph.colocate_with(None, ignore_existing=True), graph.device(None), graph.device(op.device), \
                graph.name_scope(None), graph.name_scope(op.name + "/decomposed"), graph._attr_scope(tags):
            yield

    def _replace(self, op: tf.Operation, results: Sequence[tf.Tensor]) -> None:
        """Consumers of ``op`` and ops that wait for it turn to ``results``.  Only fused gradient ops keep the fused
        forward op's reserves, whose contents are the kernel's own business."""
        for old, new in zip(op.outputs, results):
            new.set_shape(old.shape)
            readers = [reader for reader, _ in consumers(old)
                       if not (op.type in BATCH_NORMS and reader.type in BATCH_NORM_GRADIENTS and old.value_index > 2)]
            if readers:
                for reader, position in reroute_tensor(old, new, readers, check_cycles=False):
                    self._done.did(set_input, reader, position, old)
            self._done.replaced[old.name] = new.name
        after = results[0].op
        for waiting in list(op._control_outputs):
            _wait_for(waiting, op, after)
            self._done.did(_wait_for, waiting, after, op)


def _wait_for(waiting: tf.Operation, old: tf.Operation, new: tf.Operation) -> None:
    remove_control_inputs(waiting, [old])
    add_control_inputs(waiting, [new])


class _Channels:
    """Which dimensions of a fused op's input count elements, and how values `[C]` meet the input."""

    def __init__(self, op: tf.Operation, dtype: tf.DType) -> None:
        data_format = op.get_attr("data_format").decode()
        channel = data_format.index("C")
        self.epsilon = op.get_attr("epsilon")
        self.axes = [axis for axis in range(len(data_format)) if axis != channel]
        self._dtype = dtype
        self._shape = None if channel == len(self.axes) else [
            -1 if axis == channel else 1 for axis in range(len(data_format))]

    def cast(self, x: tf.Tensor) -> tf.Tensor:
        """`x` in the precision of the statistics."""
        return tf.cast(x, self._dtype)

    def spread(self, value: tf.Tensor) -> tf.Tensor:
        """`[C]` in a shape that broadcasts against the input."""
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


def _rename_forward(graph: tf.Graph, recorded: OpGraph, done: Decomposition) -> None:
    """What was made by differentiating a fused op now belongs to its successor."""
    for op in recorded.ops:
        forward = recorded.ops[op.forward].name if op.forward >= 0 else ""
        if done.successor(forward) != forward:
            tf_op = graph.get_operation_by_name(op.name)
            tf_op._set_attr(FORWARD_ATTR, _forward_tag(done.successor(forward)))
            done.did(tf_op._set_attr, FORWARD_ATTR, _forward_tag(forward))


def _forward_tag(name: str) -> v1.AttrValue:
    return v1.AttrValue(s=name.encode())


def _rename_in_calls(graph: tf.Graph, done: Decomposition) -> None:
    """Gradient calls of a fused op's outputs, or that returned one, name the new tensors."""
    def renamed(names: Any) -> Any:
        if isinstance(names, (list, tuple)):
            return type(names)([renamed(name) for name in names])
        return done.replaced.get(names, names)

    for call in annotations_of(graph).gradient_calls:
        for field in ("ys", "xs", "grads"):
            before = getattr(call, field)
            setattr(call, field, renamed(before))
            done.did(setattr, call, field, before)
