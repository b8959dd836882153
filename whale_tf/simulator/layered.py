"""A model profile (a chain of layers) as a model graph, with the profiler's own times.

A layer is an op between two free ones, so that tensor parallelism sums exactly the bytes that the profile gives::

    x --enter--> x' --layer--> z --join--> y        x', z: ``tensor_parallel_bytes``;  x, y: ``output_bytes``
"""

from __future__ import annotations

from typing import Dict, Mapping, Optional, Tuple

from whale_tf.cluster.devices import Device
from whale_tf.profiler.layer_time import layer_seconds
from whale_tf.profiler.model_profile import LayerProfile, ModelProfile
from whale_tf.simulator.costs import OpEstimator, OpPart
from whale_tf.simulator.model_graph import OPTIMIZERS, Builder, ModelGraph, Optimizer
from whale_tf.simulator.strategy_tree import CompleteStrategy

BYTE = 1  # tensors are counted in bytes here, because shapes come from a profile and not from a graph


def layered_model(profile: ModelProfile, batch: int) -> ModelGraph:
    """The profile's layers for a micro-batch of ``batch`` samples; op ``<layer>/layer`` is the layer itself."""
    slots = profile.optimizer_bytes_per_parameter_byte
    known = OPTIMIZERS.get(profile.optimizer)
    passes = max(3 + 2 * slots, known.passes if known is not None else 0)
    b = Builder(profile.name, batch, profile.precision, Optimizer(profile.optimizer, 4 * slots, passes))
    tied: Dict[str, int] = {}
    x = b.tensor("samples", "b u", (batch, 0.0), "input", BYTE)
    for layer in profile.layers:
        with b.scope(layer.name):
            x = _layer(b, x, layer, tied)
    with b.scope("loss"):
        b.op("loss", "loss", "b u -> b", (x,), 0.0)
    return b.graph()


def _layer(b: Builder, x: int, layer: LayerProfile, tied: Dict[str, int]) -> int:
    split = layer.tensor_parallel_bytes is not None
    moved = float(layer.tensor_parallel_bytes or 0)
    if b.tensors[x].role != "input":
        x = b.op("enter", "wire", "b u -> b v", (x,), 0.0, sizes={"v": moved}, itemsize=BYTE)
    else:
        x = b.tensor("samples", "b v", (b.batch, 0.0), "input", BYTE)
    inputs: Tuple[int, ...] = (x,)
    spec = "b v"
    if layer.parameter_bytes:
        if layer.tied is None or layer.tied not in tied:
            weight = b.tensor("w", "w", (layer.parameter_bytes / 4.0,), "parameter", 4)
            tied[layer.tied or layer.name] = weight
        inputs += (tied[layer.tied or layer.name],)
        spec += ", w"
    z = b.op(
        "layer", "layer", spec + " -> b z", inputs, layer.forward_flops * b.batch, whole=("v", "z"),
        split=("w" if layer.parameter_bytes else None) if split else None,
        sizes={"z": moved, "w": max(1.0, layer.parameter_bytes / 4.0)}, scratch_bytes=int(layer.activation_bytes * b.batch),
        itemsize=BYTE)
    return b.op("join", "wire", "b z -> b u", (z,), 0.0, sizes={"u": float(layer.output_bytes)}, itemsize=BYTE)


def layer_names(profile: ModelProfile) -> Dict[str, str]:
    """Layers, and graph ops of layers -> the op of :func:`layered_model` that stands for the layer."""
    names = {layer.name: layer.name + "/layer" for layer in profile.layers}
    names.update({op: layer.name + "/layer" for layer in profile.layers for op in layer.ops})
    return names


def tensor_parallel(strategy: CompleteStrategy) -> Dict[str, int]:
    """The number of devices over which a strategy splits each op that can be split."""
    configs = zip(strategy.model.ops, strategy.op_configs)
    return {op.name: config.degree(op.split) for op, config in configs if op.split is not None}


class LayerEstimator(OpEstimator):
    """Times of a profile's layers as planners count them (:func:`whale_tf.profiler.layer_time.layer_seconds`)."""

    def __init__(self, model: ModelGraph, profile: ModelProfile, tensor_parallel: Optional[Mapping[str, int]] = None) -> None:
        """``tensor_parallel``: op name -> number of devices over which a layer's op is split; others: 1."""
        super().__init__(model)
        self.profile = profile
        self.tensor_parallel = dict(tensor_parallel or {})
        self._layers = {layer.name + "/layer": layer for layer in profile.layers}

    def seconds(self, part: OpPart, device: Device) -> float:
        name = self.model.ops[part.op].name
        layer = self._layers.get(name)
        if layer is None:
            return 0.0
        degree = self.tensor_parallel.get(name, 1)
        times = layer_seconds(self.profile, layer, device, self.model.batch * part.fraction * degree, degree)
        return (times.backward_s if part.backward else times.forward_s) * part.share

    def fewer(self, number: int, device: Device) -> float:
        layer = self._layers.get(self.model.ops[number].name)
        return 1.0 if layer is None else max(1.0, layer.utilization)
