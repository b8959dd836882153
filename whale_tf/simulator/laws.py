"""Times of TensorFlow's kernels on GPUs: a law for an op's time, and its parameters for each kind of device.

An op consists of kernels that move its tensors ``passes`` times or, if that takes longer, issue so many cycles for each element;
a contraction also consists of one that computes::

    seconds = max(flops / (peak x efficiency x occupancy), bytes / bandwidth, elements x cycles / (units x clock))
              + kernels x launch

* **occupancy**: a product of ``m x n x k`` is cut into tiles, which the ``units`` (streaming multiprocessors) compute in waves.
  The last wave and the tiles at the edges are not full, and a short ``k`` does not fill the pipelines: ``k / (k + depth)``.
  Libraries have tiles of several sizes and take the best (Habitat, NeuSight: tiles, waves, utilisation bounded by the roofline).
  If all tiles together do not fill a wave, they also cut ``k`` (split-K).
* **tensor cores** compute in TF32, and in 16 bits if ``n`` and ``k`` are multiples of 8; products that are not eligible run at
  twice float32's rate.  Devices without tensor cores reach float32's share of their 16-bit rate.
* **Winograd**: in float32 a 3 x 3 convolution of stride 1 takes fewer multiplications.  cuDNN has a fused kernel for results and
  for gradients of inputs, and for all three one that transforms operands and results in memory, which pays if channels are many
  (Lavin and Gray 2015, sections 4 and 5; cuDNN's CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD and _WINOGRAD_NONFUSED).  Its products are
  as long as there are channels, and images are cut into tiles.
* **cycles**: a kernel that computes indices for every element (broadcasts, reductions, transpositions) is limited by the
  instructions that the units issue, not by the memory, on GPUs whose memory is fast.  cuDNN's batch normalisation has a block of
  threads for each channel, so that few channels keep few units busy.
* **the host** starts kernels one after the other, and a step takes the longer of the GPU's time and the host's.
* **layout**: TensorFlow's layout optimizer puts channels first unless half of all convolutions are in 16 bits, but tensor cores'
  convolutions have them last (TensorFlow's generic_layout_optimizer.cc, cuDNN's documentation), so in TF32 operands and result
  are transposed.  TensorFlow times cuDNN's kernels and takes the fastest, which can be the one in float32.  That is the only one
  for convolutions in groups of channels (ResNeXt-101 takes as long as if there were none in TF32).
* **passes**: TensorFlow runs Python expressions op by op: GELU is eight kernels, layer normalisation nine.  XLA fuses them, but
  not random numbers, and products of heads still need their operands transposed.
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

from whale_tf.cluster import DEVICE_TYPES, Cluster
from whale_tf.cluster.devices import Device
from whale_tf.cluster.hardware import DeviceType
from whale_tf.documents import Record, field, parsed, read
from whale_tf.errors import PlanError
from whale_tf.profiler.layer_time import layer_seconds
from whale_tf.profiler.model_profile import LayerProfile, Measurement, ModelProfile
from whale_tf.simulator.model_graph import ACTIVATION, KINDS, PARAMETER, ModelGraph, ModelOp
from whale_tf.simulator.network import Protocol
from whale_tf.simulator.step_graph import StepGraph

VERSION = 1
HALF = ("fp16", "bf16")
LIKENESS = ("fp32", "tf32", "fp16")  # precisions in which devices of like peaks are alike; tensor cores make the difference
TF32 = "tf32"  # float32 with 10 bits of mantissa, on tensor cores
ANY = "GPU"  # the row for devices without a row of their own
# Tiles by their edge, with their speed relative to the largest: small ones read operands more often, which float32 can afford.
TILES = {False: ((128, 1.0), (64, 0.97), (32, 0.85)), True: ((128, 1.0), (64, 0.85), (32, 0.6))}
PARTS = (1, 2, 4, 8, 16)  # of a product's length, which units compute beside each other if tiles are few
TWICE = 2.0  # float32's rate: that of 16-bit products without tensor cores, at most
TRANSPOSED_CYCLES, HEADS_CYCLES, CAST_CYCLES = 0.65, 1.9, 0.9  # for an element: of images, of heads among tokens, to another type
MOVING_AVERAGES = 6  # kernels of a batch normalisation's: a difference, a product and an update for mean and variance
UNSCALING = 3  # kernels of float16 for a variable: its gradient is divided by the loss scale, and tested
FUSED_UPDATE = 4  # kernels of a variable's update under XLA: one fused, and the assignments of value and both moments
# Edges of Winograd's tiles, F(2 x 2, 3 x 3) fused and F(4 x 4, 3 x 3): (edge + 2)^2 products instead of 9 edge^2.  The second one
# transforms operands and results, in memory 36 / 16 times as large, before and after the products.
FUSED_EDGE, EDGE, WINOGRAD_TRAFFIC = 2, 4, 2.25
LANES = 8  # channels that kernels of convolutions read together
# Steps along a product's length, relative to those of tensor cores' kernels for 16 bits: these take 32 numbers, ordinary cores 8
# (NVIDIA/cutlass, include/cutlass/gemm/device/default_gemm_configuration.h, Sm70 and Simt); in TF32 16 have as many bytes as 32.
STEP_TF32, STEP_FP32 = 0.5, 0.25
CAST = 3.0  # traffic of casting a 16-bit tensor to 32 bits and back, relative to that of reading and writing it


KERNELS, LAYERS, MEASURED = "kernels", "layers", "measured ops"
TIMES = (KERNELS, LAYERS, MEASURED)  # sources of a step's times: the laws, a profile's layers, a script's own ops
PRICED = {KERNELS: "priced as TensorFlow runs it", LAYERS: "priced by the layers of its profile, not as TensorFlow runs it",
          MEASURED: "priced by the times of its own ops"}


class Passes(NamedTuple):
    """An op kind's kernels, its traffic relative to reading operands and writing results once, and the cycles of a multiprocessor
    that its kernels issue for an element of its result; all forward and backward."""

    kernels: Tuple[float, float]
    traffic: Tuple[float, float]
    cycles: Tuple[float, float] = (0.0, 0.0)


ONCE = Passes((1, 1), (1.0, 1.0))
# Counts of the tensors that each op reads and writes, in TensorFlow's layers and in BERT's released code (GELU by tanh, layer
# normalisation by moments and batch_normalization, dropout by random_uniform, floor and div).  Cycles: measured on an H200
# (benchmarks/one_gpu.py), where the largest tensors take 4 to 7 times as long as their bytes.
OP_BY_OP: Mapping[str, Passes] = {
    "norm": Passes((3, 3), (1.5, 1.67), (1.15, 1.75)),  # cuDNN's batch normalisation reads its input twice
    "layer_norm": Passes((9, 22), (4.0, 4.0), (7.1, 18.0)),
    "softmax": Passes((1, 4), (1.5, 3.0), (2.0, 3.5)),
    "activation": Passes((8, 12), (9.0, 7.0), (6.3, 8.3)),
    "erf": Passes((5, 11), (5.0, 4.0), (4.0, 6.8)),
    "dropout": Passes((5, 2), (3.5, 2.2), (3.2, 0.0)),
    "scale": Passes((2, 1), (2.0, 1.0)),
    "bias": Passes((1, 1), (1.0, 1.0), (1.0, 1.1)),
    "pool": Passes((1, 1), (1.0, 1.0), (1.7, 7.7)),
    "loss": Passes((6, 3), (3.0, 2.0)),
}
# Under XLA an op reads what products and reductions before it wrote, and writes what those after it read; the rest is fused.
# A reduction reads its operand again: layer normalisation computes a mean, then that of squared differences, then the result.
FUSED: Mapping[str, Passes] = {
    "norm": Passes((1, 1), (1.5, 1.67)),  # two kernels, of which the first one reads
    "layer_norm": Passes((3, 4), (2.0, 2.33)),  # backward: the parameters' sums, the tokens' sums and the result
    "softmax": Passes((3, 3), (2.0, 1.67)),
    "activation": Passes((1, 1), (1.0, 1.0)),
    "erf": Passes((1, 1), (1.0, 1.0)),
    "dropout": Passes((2, 1), (1.5, 1.5)),  # TensorFlow compiles no stateful random ops (cluster_stateful_rng_ops is off)
    "scale": Passes((0, 0), (0.0, 0.0)),
    "relu": Passes((1, 1), (1.0, 1.0)),
    "add": Passes((1, 1), (0.67, 0.67)),
    "bias": Passes((0, 1), (0.0, 1.0)),
    "loss": Passes((3, 2), (1.5, 1.0)),
}
# XLA writes batch normalisation itself (its flag xla_gpu_use_cudnn_batchnorm is off), and these are parts of its kernels: a sum
# reads its other operand, and the gradient of a ReLU reads the result in both kernels; after a sum, the first one writes it.
FUSED_AFTER: Mapping[Tuple[str, str], Passes] = {
    ("relu", "norm"): Passes((0, 0), (0.0, 0.67)),
    ("relu", "add"): Passes((0, 0), (0.0, 0.0)),
    ("add", "norm"): Passes((0, 0), (0.33, 0.0)),
}
# The fraction of the traffic of a layer's element-wise ops that remains under XLA, with the same weight for all these kinds.
ELEMENT_WISE = ("norm", "layer_norm", "softmax", "activation", "dropout", "scale", "loss")
FUSED_SHARE = sum(FUSED[name].traffic[0] for name in ELEMENT_WISE) / sum(OP_BY_OP[name].traffic[0] for name in ELEMENT_WISE)
IN_FLOAT32 = ("softmax", "layer_norm", "activation", "erf", "loss")  # under mixed precision


@dataclass(frozen=True)
class DeviceLaw(Record):
    """Attributes:
    units: streaming multiprocessors.
    clock_hz: at which they issue instructions (boost).
    matmul_fp32, matmul_half, convolution_fp32, convolution_half: share of the precision's peak that full tiles reach.
    matmul_tf32, convolution_tf32: the same on tensor cores in TF32.
    backward_tf32: what the backward pass reaches of these, because gradients of weights read both operands the other way round.
    winograd: how many times faster cuDNN's fused kernel of Winograd's algorithm is for a 3 x 3 convolution of stride 1 in
        float32; there is none for the gradient of weights.
    memory: share of the bandwidth that streaming kernels reach.
    depth: length of a product at which its pipelines are half full.
    """

    units: int = field(80, at_least=1)
    clock_hz: float = field(1.5e9, above=0, finite=True)
    matmul_fp32: float = field(0.8, above=0, finite=True)
    matmul_half: float = field(0.6, above=0, finite=True)
    convolution_fp32: float = field(0.8, above=0, finite=True)
    convolution_half: float = field(0.5, above=0, finite=True)
    matmul_tf32: float = field(0.6, above=0, finite=True)
    convolution_tf32: float = field(0.5, above=0, finite=True)
    backward_tf32: float = field(1.0, above=0, finite=True)
    winograd: float = field(1.0, above=0, finite=True)
    memory: float = field(0.8, above=0, finite=True)
    depth: float = field(64.0, at_least=0, finite=True)


@dataclass(frozen=True)
class FrameworkLaw(Record):
    """The time that running TensorFlow itself adds.

    Attributes:
        launch_s: per kernel, on the GPU: the least time that it takes, and until the next one starts; at the clock of the row
            ``GPU``.
        host_s: per kernel, on the host: executor and launch.  A step takes at least so long for each of its kernels.
        cluster_s: per call of what XLA compiled, on the host.
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
    host_s: float = field(0.0, at_least=0, finite=True)
    cluster_s: float = field(0.0, at_least=0, finite=True)
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
    """Errors on measurements of models to whose runs no parameter was fitted (leave one model out).

    Attributes:
        times: which times, a member of :data:`TIMES`.
        mean: relative error of rates.
        most: nine of ten measured rates are from ``predicted / (1 + most)`` to ``predicted x (1 + most)``.
    """

    times: str = field(among=TIMES)
    device: str = field(not_empty=True)
    precision: str = field(not_empty=True)
    points: int = field(at_least=1)
    mean: float = field(at_least=0, finite=True)
    most: float = field(at_least=0, finite=True)


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

    def launch_s(self, device_type: str) -> float:
        """The time of a kernel that does nothing, which takes so many cycles of the clock."""
        return self.framework.launch_s * self.devices[ANY].clock_hz / self.of(device_type).clock_hz

    def error(self, times: str, device_type: str, precision: str) -> Optional[TestedError]:
        """The errors on that kind of device in that precision; if there are none, on the device whose peaks are most like
        its own; if nothing was tested in that precision, the largest on a device of its kind; None: never tested.

        Both 16-bit types count as one precision.
        """
        device = DEVICE_TYPES.get(device_type)
        known = [(one, _row_of(one.device)) for one in self.errors if one.times == times]
        kind = [(one, row) for one, row in known if device is None or row is None or row.kind == device.kind]
        alike = [(one, row) for one, row in kind if one.precision == ("fp16" if precision in HALF else precision)]
        own = [(one, row) for one, row in alike if device_type.startswith(one.device)]
        if own or device is None or not all(row for _, row in alike):
            return max([one for one, _ in own or alike or kind], key=lambda one: one.mean, default=None)
        distances = [(sum(abs(math.log(row.peak_flops_per_s[name] / peak)) for name, peak in device.peak_flops_per_s.items()
                          if name in LIKENESS), one) for one, row in alike if row]
        return min(distances, key=lambda pair: (pair[0], -pair[1].mean))[1] if distances else max(
            [one for one, _ in kind], key=lambda one: one.mean, default=None)

    @classmethod
    def parse(cls, source: Union[Laws, Mapping[str, Any], str]) -> Laws:
        """Laws from a Laws, a dict, JSON text or the path of a JSON file.

        Raises:
            PlanError: unreadable, unknown or missing key, or a wrong value; the message names the place.
        """
        return parsed(cls, source, "set of laws", PlanError, f"start from {DEFAULT}")


def _row_of(name: str) -> Optional[DeviceType]:
    """The first type of device in the hardware table whose name begins so."""
    return next((row for key, row in DEVICE_TYPES.items() if key.startswith(name)), None)


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


def is_eligible(product: Product, multiple: int = 8) -> bool:
    """Whether tensor cores compute it; ``multiple``: 8 in 16 bits, 4 in TF32."""
    return product.n % multiple == 0 and product.k % multiple == 0


def winograd_product(op: ModelOp, product: Product, edge: int) -> Product:
    """The products of Winograd's algorithm for tiles of ``edge x edge`` results, which are as long as there are channels."""
    rows, columns = op.dims["p"], op.dims["q"]
    tiles = product.m / (rows * columns) * math.ceil(rows / edge) * math.ceil(columns / edge)
    return Product(max(1.0, product.products) * (edge + 2) ** 2, tiles, product.n, product.k / 9)


def _gain(edge: int) -> float:
    """How many times fewer multiplications that takes, if tiles are full."""
    return 9.0 * edge**2 / (edge + 2) ** 2


def _work(product: Product) -> float:
    """Multiplications."""
    return max(1.0, product.products) * product.m * product.n * product.k


def _part(one: Product, whole: Product, part: Product) -> Product:
    """The part of a kernel's products that belongs to a part of the whole product."""
    if whole.products <= 1:
        return one._replace(m=max(1.0, one.m * part.m / whole.m))
    return one._replace(products=max(1.0, one.products * part.products / whole.products))


class _Choice(NamedTuple):
    """A kernel.

    Attributes:
        flops_per_s: with full tiles.
        product: what it computes.
        step: its steps along the product's length, relative to those of kernels for 16 bits.
        passes: how often it also reads or writes operands and result.
        fewer: how many times fewer multiplications it does than the op's definition has, at most.
        is_transposed: whether it transposes operands and result.
        is_of_weights: whether there is one for the gradient of weights.
    """

    flops_per_s: float
    product: Product
    step: float = 1.0
    passes: float = 0.0
    fewer: float = 1.0
    is_transposed: bool = False
    is_of_weights: bool = True


class Kernels:
    """Times of a model's ops under the laws, as TensorFlow runs them.

    Args:
        xla: whether XLA fuses the ops.
    """

    def __init__(self, model: ModelGraph, laws: Laws, xla: bool) -> None:
        self.model, self.laws, self.xla = model, laws, xla
        self.half = model.precision in HALF
        self._products: Dict[int, Product] = {}
        self._maker = {use.tensor: _name(op) for op in model.ops for use in op.outputs}

    def seconds(self, number: int, flops: float, size_bytes: float, fraction: float, backward: bool, device: Device) -> float:
        """Time of the ``fraction`` of an op that a device does."""
        op, law = self.model.ops[number], self.laws.of(device.type)
        per_byte = 1.0 / (device.memory_bandwidth_bytes_per_s * law.memory)
        launches_s = self.kernels(number, backward, device) * self.laws.launch_s(device.type)
        if self._is_product(op):
            return launches_s + self._product(number, op, flops, size_bytes, fraction, backward, device, law, per_byte)
        name, passes = _name(op), self._passes(op)
        traffic, cycles = passes.traffic[backward], passes.cycles[backward]
        if self.half and name in IN_FLOAT32 and not self.xla:
            traffic, cycles = 2 * traffic + CAST, cycles + 2 * CAST_CYCLES
        if name == "norm" and not self.xla:
            cycles /= min(1.0, self.model.tensors[op.outputs[0].tensor].shape[-1] / law.units)
            if self._is_transposed_norm(device):
                cycles += (2, 3)[backward] * TRANSPOSED_CYCLES
        elements = fraction * max(self.model.tensors[use.tensor].size for use in (*op.inputs, *op.outputs)) if cycles else 0.0
        return launches_s + max(size_bytes * traffic * per_byte, elements * cycles / (law.units * law.clock_hz))

    def kernels(self, number: int, backward: bool, device: Device) -> float:
        """The kernels that an op starts, in the backward pass for each of its gradients."""
        op = self.model.ops[number]
        if self._is_product(op):
            weights = sum(self.model.tensors[use.tensor].role == PARAMETER for use in op.inputs)
            count = 4.0 if op.kind == "convolution" and self._is_transposed(number, backward, device) else 1.0
            if self.xla:
                return count
            if op.kind == "convolution":
                count += 1.0  # the filter's axes are in no kernel's order
            elif not weights:
                count += (2.0, 1.0)[backward]
            if backward and weights:  # the gradient of the weights, which is one of two, is added up of parts
                count += 0.5
            if self.half and weights:  # the value is cast, and its gradient, which is one of two
                count += (1.0, 0.5)[backward]
            return count
        name, count = _name(op), self._passes(op).kernels[backward]
        if self.half and name in IN_FLOAT32 and not self.xla:
            count += 2
        if name == "norm" and not self.xla:
            count += (0 if backward else MOVING_AVERAGES) + ((2, 3)[backward] if self._is_transposed_norm(device) else 0)
        return count

    def update_seconds(self, device: Device, moved: float) -> float:
        """Time of a variable's update, which reads and writes ``moved`` bytes."""
        bytes_s = moved / (device.memory_bandwidth_bytes_per_s * self.laws.of(device.type).memory)
        return bytes_s + self.update_kernels() * self.laws.launch_s(device.type)

    def update_passes(self) -> float:
        """Tensors of a variable's size that its update reads and writes."""
        optimizer = self.model.optimizer
        return optimizer.fused_passes or optimizer.passes if self.xla else optimizer.passes

    def update_kernels(self) -> float:
        """The kernels of a variable's update.  XLA fuses one that is written with elementary ops; the learning rate, which all
        updates read, joins them in one cluster."""
        if self.xla:
            return min(self.model.optimizer.kernels, FUSED_UPDATE)
        return self.model.optimizer.kernels + (UNSCALING if self.model.precision == "fp16" else 0)

    def _passes(self, op: ModelOp) -> Passes:
        name = _name(op)
        if not self.xla:
            return OP_BY_OP.get(name, ONCE)
        makers = (self._maker.get(use.tensor, "") for use in op.inputs)
        return next((FUSED_AFTER[name, maker] for maker in makers if (name, maker) in FUSED_AFTER), FUSED.get(name, ONCE))

    @staticmethod
    def _is_product(op: ModelOp) -> bool:
        return KINDS[op.kind].compute_bound and len(op.inputs) > 1

    def _is_transposed_norm(self, device: Device) -> bool:
        """Whether channels are last, where TensorFlow's batch normalisation has them first."""
        return self._on_tensor_cores(device)

    def _is_transposed(self, number: int, backward: bool, device: Device) -> bool:
        """Whether the fastest kernel of a convolution has channels last where TensorFlow has them first."""
        op, law = self.model.ops[number], self.laws.of(device.type)
        size_bytes = sum(self.model.tensors[use.tensor].bytes for use in (*op.inputs, *op.outputs))
        per_byte = 1.0 / (device.memory_bandwidth_bytes_per_s * law.memory)
        product = self._products.setdefault(number, product_of(op))
        return self._fastest(op, product, product, op.flops, size_bytes * per_byte, backward, device, law)[0][1].is_transposed

    def _product(self, number: int, op: ModelOp, flops: float, size_bytes: float, fraction: float, backward: bool,
                 device: Device, law: DeviceLaw, per_byte: float) -> float:
        product = self._products.setdefault(number, product_of(op))
        part = product._replace(m=max(1.0, product.m * fraction)) if product.products <= 1 else \
            product._replace(products=max(1.0, product.products * fraction))
        bytes_s = size_bytes * per_byte
        taken = self._fastest(op, product, part, flops, bytes_s, backward, device, law)
        seconds = sum(one_s for one_s, _ in taken) / len(taken)
        if all(self.model.tensors[use.tensor].role == ACTIVATION for use in op.inputs):
            # TensorFlow multiplies batches of matrices with the heads first, so tensors that have tokens first are transposed:
            # two in the forward pass, and the gradients of these in the backward pass
            shared = tuple(dim for dim in op.inputs[0].dims if all(dim in use.dims for use in (*op.inputs, *op.outputs)))
            moved = fraction * sum(self.model.tensors[use.tensor].size for use in (*op.inputs, *op.outputs)
                                   if use.dims[:len(shared)] != shared) / (2 if backward else 1)
            bytes_moved = 2 * moved * self.model.tensors[op.outputs[0].tensor].itemsize
            cycles = 0.0 if self.xla else HEADS_CYCLES  # XLA moves tiles through shared memory
            seconds += max(bytes_moved * per_byte, moved * cycles / (law.units * law.clock_hz))
        return seconds

    def _fastest(self, op: ModelOp, product: Product, part: Product, flops: float, bytes_s: float, backward: bool, device: Device,
                 law: DeviceLaw) -> List[Tuple[float, _Choice]]:
        """(seconds, kernel) of the fastest kernel for a part of a product; backward of those of both gradients, where the second
        one is of the weights."""
        found = []
        for one in self._choices(op, product, backward, device, law):
            share = occupancy(_part(one.product, product, part), law.units, law.depth * one.step, self._on_tensor_cores(device))
            products_s = flops * _work(one.product) / (_work(product) * one.flops_per_s * share)
            found.append((max(products_s, bytes_s) + one.passes * bytes_s, one))
        groups = [found, [row for row in found if row[1].is_of_weights]] if backward else [found]
        return [min(group, key=lambda row: row[0]) for group in groups]

    def _on_tensor_cores(self, device: Device) -> bool:
        """Whether the model is in 16 bits and the device has tensor cores for them."""
        peaks = device.peak_flops_per_s
        return self.half and peaks[self.model.precision] > 1.1 * TWICE * peaks["fp32"]  # tables round

    def _choices(self, op: ModelOp, product: Product, backward: bool, device: Device, law: DeviceLaw) -> List[_Choice]:
        """The kernels of which the fastest runs."""
        peaks, precision, is_convolution = device.peak_flops_per_s, self.model.precision, op.kind == "convolution"
        share = law.convolution_fp32 if is_convolution else law.matmul_fp32
        if is_convolution:
            channels = self.model.tensors[op.inputs[0].tensor].shape[-1]
            share *= channels / (LANES * math.ceil(channels / LANES))  # what is read of too few channels is in part nothing
        if self._on_tensor_cores(device):
            if is_eligible(product) or (is_convolution and self.xla):  # XLA pads the channels of images for tensor cores
                return [_Choice(peaks[precision] * (law.convolution_half if is_convolution else law.matmul_half), product)]
            return [_Choice(TWICE * peaks["fp32"] * share, product, STEP_FP32)]
        found = []
        is_grouped = is_convolution and product.products > 1  # in groups of channels
        if precision == TF32 and peaks[TF32] > peaks["fp32"] and not is_grouped:
            # in float32 TensorFlow's convolutions have channels first, but tensor cores' kernels have them last
            on_tensor_cores = law.convolution_tf32 if is_convolution else law.matmul_tf32
            rate = peaks[TF32] * on_tensor_cores * (law.backward_tf32 if backward else 1.0)
            if not is_eligible(product, 4):
                rate = min(rate, TWICE * peaks["fp32"] * share)
            found.append(_Choice(rate, product, STEP_TF32, 2.0 if is_convolution else 0.0, is_transposed=is_convolution))
        plain = share * peaks["fp32" if precision == TF32 else precision]  # in 16 bits without tensor cores: at most twice that
        found.append(_Choice(plain, product, STEP_FP32))
        if _can_be_winograd(op):
            fused, other = (winograd_product(op, product, edge) for edge in (FUSED_EDGE, EDGE))
            found += [_Choice(plain * law.winograd / _gain(FUSED_EDGE), fused, STEP_FP32, 0.0, law.winograd, is_of_weights=False),
                      _Choice(plain, other, STEP_FP32, 2 * WINOGRAD_TRAFFIC, _gain(EDGE))]
        return found

    def fewer(self, number: int, device: Device) -> float:
        """How many times fewer multiplications an op takes than its definition has, at most."""
        op, law = self.model.ops[number], self.laws.of(device.type)
        if not _can_be_winograd(op) or self._on_tensor_cores(device):
            return 1.0
        product = self._products.setdefault(number, product_of(op))
        bytes_s = sum(self.model.tensors[use.tensor].bytes for use in (*op.inputs, *op.outputs)) / (
            device.memory_bandwidth_bytes_per_s * law.memory)
        return max(one.fewer for backward in (False, True)
                   for _, one in self._fastest(op, product, product, op.flops, bytes_s, backward, device, law))


def _name(op: ModelOp) -> str:
    """The kind of an op in the tables above."""
    return "layer_norm" if op.kind == "norm" and op.whole else op.kind


def _can_be_winograd(op: ModelOp) -> bool:
    """Whether an op is a 3 x 3 convolution of stride 1, whose result may lack the image's border."""
    dims = op.dims
    return op.kind == "convolution" and dims.get("i") == dims.get("j") == 3 and dims["y"] - 2 <= dims["p"] <= dims["y"]


# ---- a step ----------------------------------------------------------------------------------------------------------


BACKWARD_SHARE = 2 / 3  # of a step


def waiting_seconds(law: FrameworkLaw, step_s: float, hidden_s: float, devices: int, collectives: float, xla: bool) -> float:
    """By how much a step of several devices takes longer than its tasks.

    The slowest of ``n`` devices is late by about ``jitter x sqrt(2 ln n)`` of a step (the expected maximum of ``n`` normal
    numbers).  The last gradients wait for half a cycle on average.  Devices agree on each collective, which takes a hop for each
    device; and not all bytes are hidden that the timeline hides behind the backward pass.  Op by op, at least one collective
    starts in every cycle of the backward pass, and devices agree on the next one while the bytes of the last are sent, so the
    longer of the two counts.  Under XLA all gradients come at once: first devices agree, then all bytes are sent.

    Args:
        hidden_s: gradient communication during computation.
        devices: number of devices that sum gradients.
        collectives: number of collectives that sum them.
    """
    if devices < 2:
        return 0.0
    late_s = step_s * law.jitter * math.sqrt(2.0 * math.log(devices)) + law.cycle_s / 2
    if xla:
        return late_s + collectives * devices * law.hop_s + hidden_s
    started = max(collectives, BACKWARD_SHARE * step_s / law.cycle_s)
    return late_s + max(started * devices * law.hop_s, (1.0 - min(1.0, law.overlap)) * hidden_s)


def as_run(model: ModelGraph, precision: str, xla: bool) -> ModelGraph:
    """The model as TensorFlow runs it.

    In 16 bits that is its mixed precision: activations and their gradients are kept in 16 bits, variables and their gradients in
    float32.  The backward pass reads more than that of a kernel written by hand: GELU keeps its input, tanh's result and the
    cumulative distribution, layer normalisation keeps its input and, of the same size, the factor by which it was multiplied
    (tf.nn.batch_normalization multiplies the inverse of each example's deviation by gamma first).  Op by op, dropout keeps its
    mask in the tensor's own type, and under mixed precision, values that are computed in float32 are kept in float32; XLA fuses
    casts.
    """
    half = precision in HALF and model.precision not in HALF
    tensors = tuple(tensor._replace(itemsize=2) if half and tensor.role == ACTIVATION else tensor for tensor in model.tensors)
    ops = []
    for op in model.ops:
        tensor = model.tensors[op.outputs[0].tensor]
        ops.append(op._replace(scratch_bytes=op.scratch_bytes + tensor.size * _kept_bytes(_name(op), tensor.itemsize, half, xla)))
    return model._replace(precision=precision, tensors=tensors, ops=tuple(ops))


def _kept_bytes(name: str, itemsize: int, half: bool, xla: bool) -> float:
    """Bytes for each element of an op's result that the backward pass reads besides operands and result."""
    if name in ("activation", "erf"):
        return 10.0 if half and not xla else 2.0 * itemsize / (2 if half else 1)
    if name == "layer_norm":
        return 8.0 if half and not xla else itemsize / (2.0 if half else 1.0)
    if xla:
        return 0.0
    if name == "dropout":
        return 1.0 if half else itemsize - 1.0
    return 4.0 if half and name in IN_FLOAT32 else 0.0


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
    """The laws with other parameters for all kinds of devices that have none of their own."""
    plain = laws.devices[ANY]
    return replace(laws, devices={
        name: replace(row, **{key: value for key, value in changes.items() if getattr(row, key) == getattr(plain, key)})
        for name, row in laws.devices.items()})
