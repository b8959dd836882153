"""Times of TensorFlow's kernels on GPUs: a law for an op's time, and its parameters for each kind of device.

An op consists of kernels that move its tensors ``passes`` times, and a contraction also of one that computes::

    seconds = max(flops / (peak x efficiency x occupancy), bytes / bandwidth) + extra bytes / bandwidth + kernels x launch

* **occupancy**: a product of ``m x n x k`` is cut into tiles, which the ``units`` (streaming multiprocessors) compute in waves.
  The last wave and the tiles at the edges are not full, and a short ``k`` does not fill the pipelines: ``k / (k + depth)``.
  Libraries have tiles of several sizes and take the best (Habitat, NeuSight: tiles, waves, utilisation bounded by the roofline).
  If all tiles together do not fill a wave, they also cut ``k`` (split-K).
* **tensor cores** compute in TF32, and in 16 bits if ``n`` and ``k`` are multiples of 8; products that are not eligible run at
  twice float32's rate.  Devices without tensor cores reach float32's share of their 16-bit rate.
* **layout**: TensorFlow's layout optimizer puts channels first unless half of all convolutions are in 16 bits, but tensor cores'
  convolutions have them last (TensorFlow's generic_layout_optimizer.cc, cuDNN's documentation), so in TF32 operands and result
  are transposed.  TensorFlow times cuDNN's kernels and takes the fastest, which can be the one in float32.
* **passes**: TensorFlow runs Python expressions op by op: GELU is eight kernels, layer normalisation nine.  XLA fuses them.
* **mixed precision** keeps exponentials, means, sums and powers in float32 (TensorFlow's auto_mixed_precision_lists.h).  So
  softmax, GELU, layer normalisation and losses move as many bytes as in float32, and tensors are cast before and after; XLA casts
  them on the way.

The parameters are in ``laws.json``; ``whale simulate --laws FILE`` reads others.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple, Union

import numpy as np

from whale_tf.cluster import Cluster
from whale_tf.cluster.devices import Device
from whale_tf.documents import Record, field, parsed, read
from whale_tf.errors import PlanError
from whale_tf.profiler.layer_time import layer_seconds
from whale_tf.profiler.model_profile import LayerProfile, Measurement, ModelProfile
from whale_tf.simulator.model_graph import ACTIVATION, KINDS, ModelGraph, ModelOp
from whale_tf.simulator.network import Protocol
from whale_tf.simulator.step_graph import StepGraph

VERSION = 1
HALF = ("fp16", "bf16")
TF32 = "tf32"  # float32 with 10 bits of mantissa, on tensor cores
ANY = "GPU"  # the row for devices without a row of their own
# Tiles by their edge, with their speed relative to the largest: small ones read operands more often, which float32 can afford.
TILES = {False: ((128, 1.0), (64, 0.97), (32, 0.85)), True: ((128, 1.0), (64, 0.85), (32, 0.6))}
PARTS = (1, 2, 4, 8, 16)  # of a product's length, which units compute beside each other if tiles are few
TWICE = 2.0  # float32's rate: that of 16-bit products without tensor cores, at most
CAST = 3.0  # traffic of casting a 16-bit tensor to 32 bits and back, relative to that of reading and writing it


KERNELS, LAYERS, MEASURED = "kernels", "layers", "measured ops"
TIMES = (KERNELS, LAYERS, MEASURED)  # sources of a step's times: the laws, a profile's layers, a script's own ops
PRICED = {KERNELS: "priced as TensorFlow runs it", LAYERS: "priced by the layers of its profile, not as TensorFlow runs it",
          MEASURED: "priced by the times of its own ops"}


class Passes(NamedTuple):
    """An op kind's kernels, and its traffic relative to reading operands and writing results once; both forward and backward."""

    kernels: Tuple[float, float]
    traffic: Tuple[float, float]


ONCE = Passes((1, 1), (1.0, 1.0))
# Counts of the tensors that each op reads and writes, in TensorFlow's layers and in BERT's released code (GELU by tanh, layer
# normalisation by moments and batch_normalization, dropout by random_uniform, floor and div).
OP_BY_OP: Mapping[str, Passes] = {
    "norm": Passes((1, 1), (1.5, 1.67)),  # cuDNN's batch normalisation reads its input twice
    "layer_norm": Passes((9, 14), (4.0, 4.0)),
    "softmax": Passes((1, 4), (1.5, 3.0)),
    "activation": Passes((8, 12), (9.0, 7.0)),
    "dropout": Passes((5, 2), (3.5, 2.2)),
    "scale": Passes((2, 1), (2.0, 1.0)),
    "loss": Passes((6, 3), (3.0, 2.0)),
}
FUSED: Mapping[str, Passes] = {
    "norm": OP_BY_OP["norm"],  # cuDNN's is still a call
    "layer_norm": Passes((3, 4), (1.5, 1.5)),
    "softmax": Passes((3, 3), (1.5, 1.5)),
    "activation": Passes((1, 1), (0.75, 0.75)),
    "dropout": Passes((1, 1), (0.75, 0.75)),
    "scale": Passes((0, 0), (0.0, 0.0)),
    "relu": Passes((1, 1), (0.6, 0.6)),
    "add": Passes((1, 1), (0.6, 0.6)),
    "bias": Passes((0, 1), (0.0, 1.0)),
    "loss": Passes((3, 2), (1.5, 1.0)),
}
# The fraction of the traffic of a layer's element-wise ops that remains under XLA, with the same weight for all kinds above.
FUSED_SHARE = sum(FUSED[name].traffic[0] for name in OP_BY_OP) / sum(passes.traffic[0] for passes in OP_BY_OP.values())
IN_FLOAT32 = ("softmax", "layer_norm", "activation", "loss")  # under mixed precision


@dataclass(frozen=True)
class DeviceLaw(Record):
    """Attributes:
    units: streaming multiprocessors.
    matmul_fp32, matmul_half, convolution_fp32, convolution_half: share of the precision's peak that full tiles reach.
    winograd: the factor by which a 3 x 3 convolution of stride 1 takes fewer multiplications in float32.
    memory: share of the bandwidth that streaming kernels reach.
    depth: length of a product at which its pipelines are half full.
    """

    units: int = field(80, at_least=1)
    matmul_fp32: float = field(0.8, above=0, finite=True)
    matmul_half: float = field(0.6, above=0, finite=True)
    convolution_fp32: float = field(0.8, above=0, finite=True)
    convolution_half: float = field(0.5, above=0, finite=True)
    winograd: float = field(1.0, above=0, finite=True)
    memory: float = field(0.8, above=0, finite=True)
    depth: float = field(64.0, at_least=0, finite=True)


@dataclass(frozen=True)
class FrameworkLaw(Record):
    """The time that running TensorFlow itself adds.

    Attributes:
        launch_s: per kernel: executor and launch.
        jitter: relative standard deviation of a device's step time; a step of many devices ends with the slowest.
        cycle_s, fusion_bytes: Horovod looks for ready gradients once per cycle, and sums at most this many bytes of them with one
            collective.
        hop_s: per collective and device, to agree on the tensors.
        overlap: share of the gradients' bytes sent during the backward pass that is hidden; under XLA none are, because its one
            call returns all gradients at its end.
        all_reduce: share of a link's bandwidth that a collective reaches.
        start_s: per collective, before the first hop.
        low_latency_start_s, low_latency_hop, low_latency_bandwidth: the same for the protocol for small messages, which sends a
            flag with each word of data; its hops are relative to those of the other protocol.
    """

    launch_s: float = field(5e-6, at_least=0, finite=True)
    jitter: float = field(0.0, at_least=0, finite=True)
    cycle_s: float = field(5e-3, above=0, finite=True)
    fusion_bytes: float = field(64.0 * 2**20, above=0, finite=True)
    hop_s: float = field(0.0, at_least=0, finite=True)
    overlap: float = field(1.0, at_least=0, finite=True)
    all_reduce: float = field(1.0, above=0, finite=True)
    start_s: float = field(0.0, at_least=0, finite=True)
    low_latency_start_s: float = field(0.0, at_least=0, finite=True)
    low_latency_hop: float = field(1.0, above=0, finite=True)
    low_latency_bandwidth: float = field(0.5, above=0, finite=True)

    @property
    def protocols(self) -> Tuple[Protocol, Protocol]:
        """The protocols of collectives."""
        return Protocol("", self.start_s), Protocol(
            "low latency", self.low_latency_start_s, self.low_latency_hop, self.low_latency_bandwidth)


@dataclass(frozen=True)
class TestedError(Record):
    """Errors on measurements to which no parameter was fitted (leave one source out).  ``times``: which times, a member of
    :data:`TIMES`."""

    times: str = field(among=TIMES)
    device: str = field(not_empty=True)
    precision: str = field(not_empty=True)
    points: int = field(at_least=1)
    mean: float = field(at_least=0, finite=True)
    largest: float = field(at_least=0, finite=True)


@dataclass(frozen=True)
class Laws(Record):
    """Attributes:
    devices: by the beginning of the device type's name; ``GPU`` is for all others.
    errors: how accurate the laws have proved.
    """

    version: int = VERSION
    source: str = ""
    devices: Dict[str, DeviceLaw] = field()
    framework: FrameworkLaw = FrameworkLaw()
    errors: Tuple[TestedError, ...] = ()

    @classmethod
    def canonical(cls, values: Dict[str, Any]) -> Dict[str, Any]:
        rows = values.get("devices")
        if isinstance(rows, dict) and isinstance(rows.get(ANY), dict):  # other rows have only what differs
            filled = {name: dict(rows[ANY], **row) if isinstance(row, dict) else row for name, row in rows.items()}
            values = dict(values, devices=filled)
        return values

    def check(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"version is {self.version}, this whale_tf reads version {VERSION}")
        if ANY not in self.devices:
            raise ValueError(f"devices has no row {ANY!r}, which is for devices without a row of their own")

    def of(self, device_type: str) -> DeviceLaw:
        """The row whose name is the longest prefix of the type's."""
        names = [name for name in self.devices if device_type.startswith(name)]
        return self.devices[max(names, key=len) if names else ANY]

    def error(self, times: str, device_type: str, precision: str) -> Optional[TestedError]:
        """The errors on that kind of device in that precision; if there are none, the largest in that precision on any device;
        if there are none either, the largest for such times; None: never tested."""
        known = [one for one in self.errors if one.times == times]
        alike = [one for one in known if one.precision == precision]
        near = [one for one in alike if device_type.startswith(one.device)]
        return max(near or alike or known, key=lambda one: one.mean, default=None)

    @classmethod
    def parse(cls, source: Union[Laws, Mapping[str, Any], str]) -> Laws:
        """Laws from a Laws, a dict, JSON text or the path of a JSON file.

        Raises:
            PlanError: unreadable, unknown or missing key, or a wrong value; the message names the place.
        """
        return parsed(cls, source, "set of laws", PlanError, f"start from {DEFAULT}")


DEFAULT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "laws.json")


@lru_cache(maxsize=None)
def default_laws() -> Laws:
    """The laws that come with the package."""
    with open(DEFAULT, encoding="utf8") as handle:
        return read(Laws, json.load(handle))


# ---- products --------------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """``products`` products of ``m x k`` by ``k x n``."""

    products: float
    m: float
    n: float
    k: float


def product_of(op: ModelOp) -> Product:
    """The product that a matrix product or convolution computes (for a convolution, the one that it is lowered to)."""
    first, second, out = set(op.inputs[0].dims), set(op.inputs[1].dims), set(op.outputs[0].dims)

    def size(dims: Set[str]) -> float:
        return float(np.prod([op.dims[dim] for dim in dims] or [1.0]))

    shared = first & second & out
    return Product(size(shared), size(out - second), size((second & out) - shared), size(second - out))


def occupancy(product: Product, units: int, depth: float, half: bool) -> float:
    """The share of the units' rate that the best tiles reach; ``half``: in 16 bits.

    If there are fewer tiles than units, several units compute a tile, each for a part of its ``k``.
    """
    best = 0.0
    for edge, speed in TILES[half]:
        rows, columns = math.ceil(product.m / edge), math.ceil(product.n / edge)
        tiles = max(1.0, product.products) * rows * columns
        full = product.m * product.n / (rows * columns * edge * edge)
        for parts in PARTS if tiles < units else (1,):
            work, length = tiles * parts, product.k / parts
            best = max(best, speed * full * work / (math.ceil(work / units) * units) * length / (length + depth))
    return best


def is_eligible(product: Product) -> bool:
    """Whether tensor cores compute it in 16 bits."""
    return product.n % 8 == 0 and product.k % 8 == 0


class Kernels:
    """Times of a model's ops under the laws, as TensorFlow runs them.

    Args:
        xla: whether XLA fuses the ops.
    """

    def __init__(self, model: ModelGraph, laws: Laws, xla: bool) -> None:
        self.model, self.laws, self.xla = model, laws, xla
        self.half = model.precision in HALF
        self._products: Dict[int, Product] = {}

    def seconds(self, number: int, flops: float, size_bytes: float, fraction: float, backward: bool, device: Device) -> float:
        """Time of the ``fraction`` of an op that a device does."""
        op, law = self.model.ops[number], self.laws.of(device.type)
        per_byte = 1.0 / (device.memory_bandwidth_bytes_per_s * law.memory)
        if KINDS[op.kind].compute_bound and len(op.inputs) > 1:
            return self._product(number, op, flops, size_bytes, fraction, device, law, per_byte)
        name = "layer_norm" if op.kind == "norm" and op.whole else op.kind
        passes = (FUSED if self.xla else OP_BY_OP).get(name, ONCE)
        traffic = passes.traffic[backward]
        if self.half and name in IN_FLOAT32 and not self.xla:
            traffic = 2 * traffic + CAST
        return size_bytes * traffic * per_byte + passes.kernels[backward] * self.laws.framework.launch_s

    def _product(self, number: int, op: ModelOp, flops: float, size_bytes: float, fraction: float, device: Device,
                 law: DeviceLaw, per_byte: float) -> float:
        product = self._products.setdefault(number, product_of(op))
        part = product._replace(m=max(1.0, product.m * fraction)) if product.products <= 1 else \
            product._replace(products=max(1.0, product.products * fraction))
        bytes_s, launch_s = size_bytes * per_byte, self.laws.framework.launch_s
        transposed_s = 2 * bytes_s + 3 * launch_s
        share = occupancy(part, law.units, law.depth, self._on_tensor_cores(device))
        seconds = launch_s + min(max(flops / (rate * share) if flops else 0.0, bytes_s) + (transposed_s if is_transposed else 0.0)
                                 for rate, is_transposed in self._choices(op, product, device, law))
        if not self.xla and all(self.model.tensors[use.tensor].role == ACTIVATION for use in op.inputs):
            # TensorFlow multiplies batches of matrices with the heads first, so operands and result are transposed
            seconds += transposed_s
        return seconds

    def _on_tensor_cores(self, device: Device) -> bool:
        """Whether the model is in 16 bits and the device has tensor cores for them."""
        peaks = device.peak_flops_per_s
        return self.half and peaks[self.model.precision] > 1.1 * TWICE * peaks["fp32"]  # tables round

    def _choices(self, op: ModelOp, product: Product, device: Device, law: DeviceLaw) -> List[Tuple[float, bool]]:
        """(FLOP/s with full tiles, whether operands and result are transposed) of the kernels, of which the fastest runs."""
        peaks, precision, is_convolution = device.peak_flops_per_s, self.model.precision, op.kind == "convolution"
        on_tensor_cores = law.convolution_half if is_convolution else law.matmul_half
        share = law.convolution_fp32 if is_convolution else law.matmul_fp32
        if self._on_tensor_cores(device):
            if is_eligible(product):
                return [(peaks[precision] * on_tensor_cores, False)]
            return [(TWICE * peaks["fp32"] * share, False)]
        found = []
        if precision == TF32 and peaks[TF32] > peaks["fp32"]:
            # in float32 TensorFlow's convolutions have channels first, but tensor cores' kernels have them last
            found.append((peaks[TF32] * on_tensor_cores, is_convolution))
        plain = peaks["fp32" if precision == TF32 else precision]  # in 16 bits without tensor cores: up to twice that of float32
        return [*found, (plain * share * (law.winograd if _can_be_winograd(op) else 1.0), False)]

    def fewer(self, number: int, device: Device) -> float:
        """How many times fewer multiplications an op takes than its definition has, where that makes it faster than the peak of
        the precision would."""
        peaks, precision = device.peak_flops_per_s, self.model.precision
        is_on_tensor_cores = self._on_tensor_cores(device) or (precision == TF32 and peaks[TF32] > peaks["fp32"])
        return 1.0 if is_on_tensor_cores or not _can_be_winograd(self.model.ops[number]) else self.laws.of(device.type).winograd


def _can_be_winograd(op: ModelOp) -> bool:
    """Whether an op is a 3 x 3 convolution of stride 1."""
    dims = op.dims
    return op.kind == "convolution" and dims.get("i") == dims.get("j") == 3 and dims.get("p") == dims.get("y")


# ---- a step ----------------------------------------------------------------------------------------------------------


BACKWARD_SHARE = 2 / 3  # of a step


def waiting_seconds(law: FrameworkLaw, step_s: float, hidden_s: float, devices: int, collectives: int, xla: bool) -> float:
    """By how much a step of several devices takes longer than its tasks.

    The slowest of ``n`` devices is late by about ``jitter x sqrt(2 ln n)`` of a step (the expected maximum of ``n`` normal
    numbers).  Devices agree on each collective, which takes a hop for each device; and not all bytes are hidden that the timeline
    hides behind the backward pass.  Op by op, at least one collective starts in every cycle of the backward pass, and devices
    agree on the next one while the bytes of the last are sent, so the longer of the two counts.  Under XLA all gradients come at
    once: first devices agree, then all bytes are sent.

    Args:
        hidden_s: gradient communication during computation.
        devices: number of devices that sum gradients.
        collectives: number of collectives that sum them.
    """
    if devices < 2:
        return 0.0
    late_s = step_s * law.jitter * math.sqrt(2.0 * math.log(devices))
    if xla:
        return late_s + collectives * devices * law.hop_s + hidden_s
    started = max(collectives, BACKWARD_SHARE * step_s / law.cycle_s)
    return late_s + max(started * devices * law.hop_s, (1.0 - min(1.0, law.overlap)) * hidden_s)


def as_run(model: ModelGraph, precision: str, xla: bool) -> ModelGraph:
    """The model as TensorFlow runs it.

    In 16 bits that is its mixed precision: activations and their gradients are kept in 16 bits, variables and their gradients in
    float32.  Op by op, the backward pass reads more than that of a fused kernel: GELU keeps its input, tanh's result and the
    cumulative distribution, dropout keeps its mask in the tensor's own type, layer normalisation keeps its input and, of the same
    size, the factor by which it was multiplied (tf.nn.batch_normalization multiplies the inverse of each example's deviation by
    gamma first), and under mixed precision, values that are computed in float32 are kept in float32.
    """
    half = precision in HALF and model.precision not in HALF
    tensors = tuple(tensor._replace(itemsize=2) if half and tensor.role == ACTIVATION else tensor for tensor in model.tensors)
    ops = []
    for op in model.ops:
        elements = model.tensors[op.outputs[0].tensor].size
        name = "layer_norm" if op.kind == "norm" and op.whole else op.kind
        more = 0.0
        if not xla and name == "activation":
            more = elements * (10 if half else 2 * model.tensors[op.outputs[0].tensor].itemsize)
        elif not xla and name == "dropout":
            more = elements * (1 if half else model.tensors[op.outputs[0].tensor].itemsize - 1)
        elif not xla and name == "layer_norm":
            more = elements * (8.0 if half else model.tensors[op.outputs[0].tensor].itemsize)
        elif not xla and half and name in IN_FLOAT32:
            more = elements * 4.0
        ops.append(op._replace(scratch_bytes=op.scratch_bytes + more))
    return model._replace(precision=precision, tensors=tensors, ops=tuple(ops))


def layers_with(profile: ModelProfile, laws: Laws, cluster: Cluster, precision: str, xla: bool) -> ModelProfile:
    """A profile's layers in another precision or under XLA: products reach the share that the laws give, traffic and activations
    have their new bytes, and measured times change in proportion to the times that follow from FLOPs and bytes.

    Raises:
        PlanError: a layer has only measured times.
    """
    if precision == profile.precision and not xla:
        return profile
    law = laws.of(cluster.devices[0].type)
    half = precision in HALF and profile.precision not in HALF
    speed = law.matmul_half / law.matmul_fp32 if half else 1.0
    size = 0.5 if half else 1.0
    traffic = size * FUSED_SHARE if xla else 1.0  # op by op, casts and float32 values outweigh the rest
    changed = replace(profile, precision=precision, layers=tuple(
        replace(layer, utilization=layer.utilization * speed, traffic_bytes=layer.traffic_bytes * traffic, measured=(),
                output_bytes=int(layer.output_bytes * size), activation_bytes=int(layer.activation_bytes * size),
                tensor_parallel_bytes=None if layer.tensor_parallel_bytes is None else int(layer.tensor_parallel_bytes * size))
        for layer in profile.layers))
    return replace(changed, layers=tuple(
        replace(new, measured=tuple(_scaled(one, profile, old, changed, new, cluster) for one in old.measured))
        for old, new in zip(profile.layers, changed.layers)))


def _scaled(one: Measurement, profile: ModelProfile, layer: LayerProfile, other: ModelProfile, changed: LayerProfile,
            cluster: Cluster) -> Measurement:
    if not (layer.forward_flops or layer.traffic_bytes):
        raise PlanError(f"layer {layer.name!r} of {profile.name!r} has only measured times, which say nothing about another "
                        "precision or XLA; give its forward_flops and traffic_bytes, or measure it that way")
    device = next((device for device in cluster.devices if device.type == one.device), cluster.devices[0])
    before, after = (layer_seconds(model, replace(row, measured=()), device, one.batch, one.tensor_parallel)
                     for model, row in ((profile, layer), (other, changed)))
    return replace(one, forward_s=one.forward_s * after.forward_s / before.forward_s,
                   backward_s=one.backward_s * after.backward_s / before.backward_s)


def step_with(step: StepGraph, laws: Laws, device: Device, precision: str, xla: bool) -> StepGraph:
    """A captured step's measured times in another precision or under XLA, by the laws of the device."""
    law, half = laws.of(device.type), precision in HALF and step.precision not in HALF
    peaks = device.peak_flops_per_s
    faster = peaks[precision] * law.matmul_half / (peaks[step.precision] * law.matmul_fp32) if half else 1.0
    others = (0.5 if half and xla else 1.0) * (FUSED_SHARE if xla else 1.0)
    products = {op.origin for op in step.ops if op.contraction}
    seconds = {name: tuple((batch, value / faster if name in products else value * others) for batch, value in points)
               for name, points in step.seconds.items()}
    return step._replace(precision=precision, seconds=seconds)


def fitted(laws: Laws, **changes: Any) -> Laws:
    """The laws with other parameters for all kinds of devices."""
    return replace(laws, devices={name: replace(row, **changes) for name, row in laws.devices.items()})
