"""A model of ops as the chain of layers that planners read: every top-level node is a layer.

FLOPs, parameters and the tensors at each cut are those of the ops.  Times come in two kinds:

* :func:`layered_profile` fits them to those of the ops on one V100, with :data:`whale_tf.simulator.costs.EFFICIENCY`: matrix
  products reach the same share of the peak as there, including reads; all other ops move their bytes at the attainable
  bandwidth, and every kernel takes its time to start.
* :func:`timed_profile` adds the times of the ops themselves on each type of a cluster's devices, at several batch sizes and
  degrees of tensor parallelism, whatever prices them.

Repeated blocks have the same layers, so only one of them is compiled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Dict, Hashable, List, NamedTuple, Optional, Set, Tuple

from whale_tf.cluster import Cluster
from whale_tf.cluster.devices import Device
from whale_tf.errors import PlanError
from whale_tf.profiler.model_profile import LayerProfile, Measurement, ModelProfile
from whale_tf.simulator.compile import compile_strategy
from whale_tf.simulator.costs import EFFICIENCY, OpEstimator, OpPart
from whale_tf.simulator.laws import Kernels
from whale_tf.simulator.model_graph import ACTIVATION, KINDS, PARAMETER, ModelGraph, ModelOp, Use
from whale_tf.simulator.strategy_tree import UNEVEN, check_even
from whale_tf.simulator.synchronise import STATE_BYTES_PER_MASTER
from whale_tf.simulator.uniform import uniform_3d

REFERENCE = "V100-32GB:1"
LEAST_SHARE = 0.01  # of the time to read the parameters, which a layer's time adds to that of its products


# Examples on a device for which layers are timed; planners interpolate between them, and extrapolate beyond them.
TIMED = (1, 2, 4, 8, 16, 32, 128)


class Distinct(NamedTuple):
    """A model without its repeated blocks.

    Attributes:
        model: of each run of equal blocks the first one.
        stands_for: every block of the whole model, in order -> the block of ``model`` that is like it.
    """

    model: ModelGraph
    stands_for: Dict[str, str]


def distinct(model: ModelGraph) -> Distinct:
    """The model with one block of every run of equal ones; what reads a block that was left out reads the first one."""
    blocks: List[List[ModelOp]] = []
    for op in model.ops:
        if not blocks or blocks[-1][0].path[0] != op.path[0]:
            blocks.append([])
        blocks[-1].append(op)
    kept: List[ModelOp] = []
    first: List[ModelOp] = []  # of the current run
    like: Hashable = None
    stands_for: Dict[str, str] = {}
    instead: Dict[int, int] = {}  # tensor of a block that was left out -> that of the first block
    for block in blocks:
        kind = tuple(_kind(model, op) for op in block)
        if kind == like:
            for op, other in zip(block, first):
                instead.update((use.tensor, by.tensor) for use, by in zip(op.outputs, other.outputs))
        else:
            like, first = kind, block
            kept += [op._replace(inputs=tuple(Use(instead.get(use.tensor, use.tensor), use.dims) for use in op.inputs))
                     for op in block]
        stands_for[block[0].path[0]] = first[0].path[0]
    return Distinct(model._replace(ops=tuple(kept)), stands_for)


def _kind(model: ModelGraph, op: ModelOp) -> Hashable:
    """Everything about an op besides the names of its block and its tensors."""
    tensors = tuple(model.tensors[use.tensor][1:] + (use.dims,) for use in op.inputs + op.outputs)
    return op.path[1:], op.kind, tuple(sorted(op.dims.items())), tensors, op.flops, op.whole, op.split, op.scratch_bytes


def timed_profile(model_of: Callable[[int], ModelGraph], source: str, cluster: Cluster,
                  kernels_of: Callable[[ModelGraph], Optional[Kernels]], global_batch: int) -> ModelProfile:
    """The layers of a model with the times of its ops on a cluster's devices, for every degree of tensor parallelism within a
    node by which its ops can be divided, and of its last layers also for all devices.

    Args:
        model_of: the model, as it runs, for a number of examples.
        source: where its sizes come from.
        kernels_of: prices of a model's ops on GPUs; None: as for :class:`~whale_tf.simulator.costs.OpEstimator`.
        global_batch: no more examples are on one device.
    """
    short = distinct(model_of(min(TIMED[3], global_batch)))
    profile = layered_profile(short.model, source)
    types: Dict[str, List[int]] = {}
    for device in cluster.devices:
        types.setdefault(device.type, []).append(device.index)
    degrees = [1]
    if any(layer.tensor_parallel_bytes is not None for layer in profile.layers):
        most = min(map(len, cluster.nodes))
        degrees = [n for n in range(1, most + 1) if all(len(node) % n == 0 for node in cluster.nodes)]
    measured: Dict[str, List[Measurement]] = {}
    for batch in sorted({min(size, global_batch) for size in TIMED}):
        model = distinct(model_of(batch)).model
        for name, devices in types.items():
            for degree in degrees:
                if degree > len(devices):
                    continue
                try:
                    strategy = uniform_3d(model, 1, degree, devices=devices[:degree])
                    check_even(strategy)
                except PlanError:  # its heads or experts cannot be divided like that
                    continue
                timer = _Timer(model, kernels_of(model))
                compile_strategy(strategy, cluster, timer)
                for layer, (forward_s, backward_s) in timer.layers(cluster.devices[devices[0]]).items():
                    measured.setdefault(layer, []).append(
                        Measurement(name, degree, float(batch), forward_s, backward_s, has_sums=False))
    if len(types) == 1 and len(cluster) not in degrees:
        for layer, found in _last_layers(model_of, kernels_of, cluster, global_batch).items():
            measured[layer] += found
    rows = {layer.name: replace(layer, forward_flops=0.0, backward_flops=None, traffic_bytes=0.0, overhead_s=0.0,
                                measured=tuple(measured[layer.name])) for layer in profile.layers}
    return replace(profile, layers=tuple(replace(rows[like], name=name) for name, like in short.stands_for.items()))


def _last_layers(model_of: Callable[[int], ModelGraph], kernels_of: Callable[[ModelGraph], Optional[Kernels]],
                 cluster: Cluster, global_batch: int) -> Dict[str, List[Measurement]]:
    """Times of the last layers, which all devices of a cluster divide among them, beside others that they replicate."""
    found: Dict[str, List[Measurement]] = {}
    count, device = len(cluster), cluster.devices[0]
    for batch in sorted({min(count * each, global_batch) for each in (1, 8, 64)} if count <= global_batch else ()):
        model = distinct(model_of(batch)).model
        names = _divisible_end(model, count)
        timer = _Timer(model, kernels_of(model))
        compile_strategy(uniform_3d(model, count, split=names), cluster, timer)
        seconds = timer.layers(device)
        for name in names:
            found.setdefault(name, []).append(Measurement(device.type, count, float(batch), *seconds[name], has_sums=False))
    return found


def _divisible_end(model: ModelGraph, count: int) -> List[str]:
    """The last top-level nodes, but not the first one, that so many devices can divide evenly."""
    found: List[str] = []
    nodes: Dict[str, List[ModelOp]] = {}
    for op in model.ops:
        nodes.setdefault(op.path[0], []).append(op)
    for name in list(nodes)[:0:-1]:
        sizes = [op.dims[op.split] for op in nodes[name] if op.split is not None]
        if not sizes or any(-(-size // count) * count > UNEVEN * size for size in sizes):
            break
        found.append(name)
    return found


class _Timer(OpEstimator):
    """Adds up the seconds of a layer's ops."""

    def __init__(self, model: ModelGraph, kernels: Optional[Kernels]) -> None:
        super().__init__(model, kernels=kernels)
        self._seconds = {op.path[0]: [0.0, 0.0] for op in model.ops}

    def seconds(self, part: OpPart, device: Device) -> float:
        seconds = super().seconds(part, device)
        self._seconds[self.model.ops[part.op].path[0]][part.backward] += seconds
        return seconds

    def layers(self, device: Device) -> Dict[str, Tuple[float, float]]:
        """(forward, backward) seconds of all layers.  If several ops read a tensor, its gradient is a sum."""
        maker = _maker(self.model)
        for tensor, count in _gradient_terms(self.model).items():
            if count > 1:
                self._seconds[maker[tensor].path[0]][1] += self.roofline(
                    device, 0.0, (count + 1) * self.model.tensors[tensor].bytes)
        return {name: (forward_s, backward_s) for name, (forward_s, backward_s) in self._seconds.items()}


class _Layer:
    """Sums over a layer's ops, for a whole mini-batch."""

    def __init__(self) -> None:
        self.flops = [0.0, 0.0]  # matrix products: forward, backward
        self.product_s = 0.0
        self.moved_bytes = 0.0
        self.kernels = 0
        self.parameters: Set[int] = set()
        self.kept_bytes = 0.0
        self.crossing_bytes = 0.0
        self.exchanged_bytes = 0.0
        self.is_split = False


def layered_profile(model: ModelGraph, source: str) -> ModelProfile:
    """The profile of a model of ops, per sample of its mini-batch.

    Args:
        model: at the mini-batch at which its times are fitted.
        source: where its sizes come from.
    """
    names = list(dict.fromkeys(op.path[0] for op in model.ops))
    layers = {name: _Layer() for name in names}
    device = Cluster.parse(REFERENCE).devices[0]
    _add_costs(model, layers)
    _add_parameters(model, layers)
    _add_kept(model, layers)
    _add_crossings(model, layers)
    _add_exchanged(model, layers)
    tied = _shared(model)
    itemsize = min(tensor.itemsize for tensor in model.tensors if tensor.role == PARAMETER)
    master = STATE_BYTES_PER_MASTER if itemsize < 4 else 0.0
    return ModelProfile(
        name=model.name, source=source, precision=model.precision, batch_granularity=1, optimizer=model.optimizer.name,
        optimizer_bytes_per_parameter_byte=(model.optimizer.state_bytes + master) / itemsize,
        layers=tuple(_profile(model, name, layers[name], tied, device) for name in names))


def _profile(model: ModelGraph, name: str, layer: _Layer, tied: Dict[int, str], device: Device) -> LayerProfile:
    batch = float(model.batch)
    parameter_bytes = sum(model.tensors[number].bytes for number in layer.parameters)
    read_s = 3 * parameter_bytes / device.memory_bandwidth_bytes_per_s
    product_s = max(layer.product_s - read_s, LEAST_SHARE * read_s)
    flops = sum(layer.flops)
    shared = [tied[number] for number in layer.parameters if number in tied]
    assert not shared or len(layer.parameters) == 1, f"layer {name!r} has parameters other than the shared {shared}"
    return LayerProfile(
        name=name,
        forward_flops=layer.flops[0] / batch,
        backward_flops=layer.flops[1] / batch,
        traffic_bytes=layer.moved_bytes / EFFICIENCY.memory / 3 / batch,
        overhead_s=layer.kernels / 3 * EFFICIENCY.launch_s,
        utilization=flops / (device.peak_flops_per_s[model.precision] * product_s) if flops else EFFICIENCY.compute,
        parameter_bytes=int(parameter_bytes),
        output_bytes=int(layer.crossing_bytes / batch),
        activation_bytes=int(layer.kept_bytes / batch),
        tensor_parallel_bytes=int(layer.exchanged_bytes / batch) if layer.is_split else None,
        tied=shared[0] if shared else None)


class _Recorder(OpEstimator):
    """Records everything whose cost the compiler asks for."""

    def __init__(self, model: ModelGraph, layers: Dict[str, _Layer]) -> None:
        super().__init__(model)
        self.layers = layers

    def seconds(self, part: OpPart, device: Device) -> float:
        op = self.model.ops[part.op]
        layer, kind, seconds = self.layers[op.path[0]], KINDS[op.kind], super().seconds(part, device)
        layer.kernels += 1
        if kind.compute_bound:
            layer.flops[part.backward] += part.flops
            layer.product_s += seconds - EFFICIENCY.launch_s
        else:
            times = 2 if part.backward and kind.saved == "inputs" else 1
            layer.moved_bytes += part.size_bytes - times * _parameter_bytes(self.model, op)
        return seconds


def _parameter_bytes(model: ModelGraph, op: ModelOp) -> float:
    """Bytes of parameters that a layer's time counts separately, to read them and to write their gradients."""
    tensors = [model.tensors[use.tensor] for use in op.inputs]
    return sum(tensor.bytes for tensor in tensors if tensor.role == PARAMETER and tensor.sparse_rows is None)


def _add_costs(model: ModelGraph, layers: Dict[str, _Layer]) -> None:
    compile_strategy(uniform_3d(model, 1), Cluster.parse(REFERENCE), _Recorder(model, layers))
    maker = _maker(model)
    for tensor, count in _gradient_terms(model).items():
        if count > 1:  # if several ops read a tensor, its gradient is a sum
            layer = layers[maker[tensor].path[0]]
            layer.moved_bytes += (count + 1) * model.tensors[tensor].bytes
            layer.kernels += 1


def _gradient_terms(model: ModelGraph) -> Dict[int, int]:
    found: Dict[int, int] = {}
    for op in model.ops:
        for use in op.inputs:
            if model.tensors[use.tensor].role == ACTIVATION:
                found[use.tensor] = found.get(use.tensor, 0) + 1
    return found


def _maker(model: ModelGraph) -> Dict[int, ModelOp]:
    return {use.tensor: op for op in model.ops for use in op.outputs}


def _add_parameters(model: ModelGraph, layers: Dict[str, _Layer]) -> None:
    for op in model.ops:
        layers[op.path[0]].parameters.update(use.tensor for use in op.inputs if model.tensors[use.tensor].role == PARAMETER)


def _shared(model: ModelGraph) -> Dict[int, str]:
    """Names of the parameters that several layers read."""
    readers: Dict[int, Set[str]] = {}
    for op in model.ops:
        for use in op.inputs:
            if model.tensors[use.tensor].role == PARAMETER:
                readers.setdefault(use.tensor, set()).add(op.path[0])
    return {tensor: model.tensors[tensor].name for tensor, names in readers.items() if len(names) > 1}


def _add_kept(model: ModelGraph, layers: Dict[str, _Layer]) -> None:
    """Add the tensors that backward ops read, to the layers that make them."""
    maker, kept = _maker(model), set()  # type: Dict[int, ModelOp], Set[int]
    for op in model.ops:
        saved = KINDS[op.kind].saved
        layers[op.path[0]].kept_bytes += op.scratch_bytes
        kept.update(use.tensor for use in {"inputs": op.inputs, "outputs": op.outputs}.get(saved, ()))
    for tensor in kept:
        if model.tensors[tensor].role == ACTIVATION:
            layers[maker[tensor].path[0]].kept_bytes += model.tensors[tensor].bytes


def _add_crossings(model: ModelGraph, layers: Dict[str, _Layer]) -> None:
    names = list(layers)
    place, maker = {name: number for number, name in enumerate(names)}, _maker(model)
    last: Dict[int, int] = {}
    for op in model.ops:
        for use in op.inputs:
            last[use.tensor] = max(last.get(use.tensor, 0), place[op.path[0]])
    for tensor, op in maker.items():
        for number in range(place[op.path[0]], last.get(tensor, 0)):
            layers[names[number]].crossing_bytes += model.tensors[tensor].bytes


def _add_exchanged(model: ModelGraph, layers: Dict[str, _Layer]) -> None:
    """Add the bytes that tensor parallelism exchanges in the forward pass.  A split product of whole operands has an output in
    parts; one whose operand is already in parts has terms of a sum; and an op that needs a tensor whole gathers it."""
    parts: Dict[int, Optional[int]] = {}  # tensor -> the axis along which it is divided
    for op in model.ops:
        layer = layers[op.path[0]]
        divided: Optional[str] = op.split
        for use in op.inputs:
            axis = parts.get(use.tensor)
            if axis is None:
                continue
            dim = use.dims[axis]
            if op.split in (None, dim) and dim not in op.whole and KINDS[op.kind].backward != "alias":
                divided = dim
            else:
                layer.exchanged_bytes += model.tensors[use.tensor].bytes
        layer.is_split = layer.is_split or op.split is not None
        for use in op.outputs:
            if divided in use.dims:
                parts[use.tensor] = use.dims.index(divided)
            elif divided is not None:
                layer.exchanged_bytes += model.tensors[use.tensor].bytes
