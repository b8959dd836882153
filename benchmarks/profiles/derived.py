"""A model of ops as the chain of layers that planners read: every top-level node is a layer.

FLOPs, parameters and the tensors at each cut are those of the ops.  The times are fitted to those of the ops on one V100, with
:data:`whale_tf.simulator.costs.EFFICIENCY`: matrix products reach the same share of the peak as there, including
reads; all other ops move their bytes at the attainable bandwidth, and every kernel takes its time to start.
"""

from __future__ import annotations

from typing import Dict, Optional, Set

from whale_tf.cluster import Cluster
from whale_tf.cluster.devices import Device
from whale_tf.profiler.model_profile import LayerProfile, ModelProfile
from whale_tf.simulator.compile import compile_strategy
from whale_tf.simulator.costs import EFFICIENCY, OpEstimator, OpPart
from whale_tf.simulator.model_graph import ACTIVATION, KINDS, PARAMETER, ModelGraph, ModelOp
from whale_tf.simulator.synchronise import STATE_BYTES_PER_MASTER
from whale_tf.simulator.uniform import uniform_3d

REFERENCE = "V100-32GB:1"
LEAST_SHARE = 0.01  # of the time to read the parameters, which a layer's time adds to that of its products


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
