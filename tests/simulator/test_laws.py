"""The laws of TensorFlow's kernels on GPUs, by hand, and where they reach."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any, Dict

import pytest

from tests.simulator.test_cli import call
from whale_tf.cli.accuracy import accuracy
from whale_tf.cluster import Cluster
from whale_tf.cluster.hardware import DEVICE_TYPES
from whale_tf.errors import PlanError
from whale_tf.profiler.model_profile import ModelProfile
from whale_tf.simulator import Options, built_in_model, simulate, uniform_3d
from whale_tf.simulator.laws import (
    FUSED_SHARE,
    KERNELS,
    FrameworkLaw,
    Kernels,
    Laws,
    Product,
    as_run,
    default_laws,
    is_eligible,
    layers_with,
    occupancy,
    product_of,
    step_with,
    waiting_seconds,
    winograd_product,
)
from whale_tf.simulator.model_graph import ACTIVATION, PARAMETER, Builder
from whale_tf.simulator.result import Simulation
from whale_tf.simulator.step_graph import StepGraph

pytestmark = pytest.mark.once
V100 = Cluster.parse("V100-16GB:1").devices[0]
ROW = {"units": 80, "matmul_fp32": 0.5, "matmul_half": 0.25, "memory": 1.0, "depth": 0.0}
PLAIN = Laws.parse({"devices": {"GPU": ROW}, "framework": {"launch_s": 0.0}})


def op_number(model: Any, name: str) -> int:
    return next(number for number, op in enumerate(model.ops) if op.name == name)


def test_tiles_fill_waves() -> None:
    assert occupancy(Product(1, 1280, 1024, 64), 80, 0.0, True) == 1.0, "80 tiles of 128 x 128"
    smaller = max(90 / 160, 0.85 * 360 / 400, 0.6 * 1440 / 1440)
    assert occupancy(Product(1, 1280, 1152, 64), 80, 0.0, True) == pytest.approx(smaller)
    assert occupancy(Product(1, 1280, 1024, 64), 80, 64.0, True) == 0.5, "a product as long as the depth"


def test_units_share_a_tile_if_tiles_are_few() -> None:
    few = Product(1, 128, 128, 4096)
    assert occupancy(few, 80, 0.0, True) == pytest.approx(0.85 * 64 / 80), "4 tiles of 64 x 64 in 16 parts each"
    assert occupancy(few._replace(k=64), 80, 64.0, True) < occupancy(few, 80, 64.0, True), "a short product has no parts"


@pytest.mark.parametrize("name,product", [
    ("block0/feed_forward/expand", Product(1, 4 * 128, 3072, 768)),
    ("block0/attention/scores", Product(4 * 12, 128, 128, 64)),
    ("block0/attention/context", Product(4 * 12, 128, 64, 128))])
def test_products_of_a_transformer(name: str, product: Product) -> None:
    model = built_in_model("bert-base", 4)
    assert product_of(model.ops[op_number(model, name)]) == product


def test_convolution_is_the_product_it_is_lowered_to() -> None:
    model = built_in_model("resnet-50", 2)
    stem = product_of(model.ops[op_number(model, "stem/conv")])
    assert stem == Product(1, 2 * 112 * 112, 64, 7 * 7 * 3) and not is_eligible(stem)
    assert is_eligible(product_of(model.ops[op_number(model, "stage0_block0/conv2")]))


def test_convolution_in_groups_of_channels_is_not_on_tensor_cores_in_tf32() -> None:
    """Its product takes as long in TF32 as in float32, even with a share that would make TF32 faster."""
    laws = Laws.parse({"devices": {"GPU": dict(ROW, convolution_tf32=0.9)}, "framework": {"launch_s": 0.0}})
    device, seconds = Cluster.parse("A100-40GB:1").devices[0], {}
    for groups in (1, 4):
        b = Builder("net", 8)
        x = b.input("x", "b y x g e", (8, 64, 64, groups, 64))
        weight = b.parameter("w", "i j g e o", (3, 3, groups, 64, 64))
        flops = 2.0 * 8 * 64 * 64 * groups * 9 * 64 * 64
        b.op("y", "convolution", "b y x g e, i j g e o -> b p q g o", (x, weight), flops, whole=("y", "x", "i", "j", "p", "q"),
             sizes={"p": 64, "q": 64})
        for precision in ("fp32", "tf32"):
            kernels = Kernels(as_run(b.graph(), precision, True), laws, True)
            seconds[groups, precision] = kernels.seconds(0, flops, 1.0, 1.0, False, device)
    assert seconds[4, "tf32"] == seconds[4, "fp32"] and seconds[1, "tf32"] < seconds[1, "fp32"]


def test_winograds_convolution_is_fused_or_moves_its_transformed_tensors() -> None:
    """Many channels: a quarter of the multiplications, and 4.5 times the bytes besides.  Few: fused, but not for weights."""
    laws = Laws.parse({"devices": {"GPU": {"units": 80, "memory": 1.0, "depth": 0.0, "convolution_fp32": 1.0, "winograd": 2.0}},
                       "framework": {"launch_s": 0.0}})
    model = built_in_model("vgg-19", 64)
    kernels = Kernels(model, laws, True)

    def products_s(products: Product) -> float:
        work = 2 * max(1.0, products.products) * products.m * products.n * products.k
        return work / (15.7e12 * occupancy(products, 80, 0.0, False))

    number = op_number(model, "conv4_2/conv")
    op = model.ops[number]
    size = sum(model.tensors[use.tensor].bytes for use in (*op.inputs, *op.outputs))
    assert winograd_product(op, product_of(op), 4) == Product(36, 64 * 7 * 7, 512, 512)
    many_s = products_s(Product(36, 64 * 7 * 7, 512, 512)) + 4.5 * size / 900e9
    assert kernels.seconds(number, op.flops, size, 1.0, False, V100) == pytest.approx(many_s)
    assert kernels.seconds(number, op.flops, size, 1.0, True, V100) == pytest.approx(many_s)
    assert kernels.fewer(number, V100) == 4.0
    number = op_number(model, "conv1_2/conv")
    op = model.ops[number]
    size = sum(model.tensors[use.tensor].bytes for use in (*op.inputs, *op.outputs))
    fused_s = products_s(Product(16, 64 * 112 * 112, 64, 64)) * 2.25 / 2.0
    assert kernels.seconds(number, op.flops, size, 1.0, False, V100) == pytest.approx(fused_s)
    weights_s = min(products_s(product_of(op)), products_s(Product(36, 64 * 56 * 56, 64, 64)) + 4.5 * size / 900e9)
    assert kernels.seconds(number, op.flops, size, 1.0, True, V100) == pytest.approx((fused_s + weights_s) / 2)


def test_winograds_tiles_at_the_border_are_not_full() -> None:
    model = built_in_model("resnet-50", 2)
    op = model.ops[op_number(model, "stage3_block1/conv2")]
    assert winograd_product(op, product_of(op), 4) == Product(36, 2 * 2 * 2, 512, 512), "7 x 7 results in tiles of 4 x 4"


def test_shorter_steps_fill_pipelines_of_shorter_products() -> None:
    """Kernels of ordinary cores step by 8 numbers along a product, those of tensor cores by 32."""
    model = built_in_model("resnet-50", 64)
    laws = Laws.parse({"devices": {"GPU": dict(ROW, depth=64.0)}, "framework": {"launch_s": 0.0}})
    number = op_number(model, "stage0_block0/conv3")
    product, flops = product_of(model.ops[number]), model.ops[number].flops
    assert product.k == 64
    single = Kernels(as_run(model, "fp32", True), laws, True).seconds(number, flops, 0.0, 1.0, False, V100)
    half = Kernels(as_run(model, "fp16", True), laws, True).seconds(number, flops, 0.0, 1.0, False, V100)
    law = laws.of("V100-16GB")
    assert single == pytest.approx(flops / (15.7e12 * law.convolution_fp32 * occupancy(product, 80, 0.0, False) * 64 / (64 + 16)))
    assert half == pytest.approx(flops / (125e12 * law.convolution_half * occupancy(product, 80, 0.0, True) * 64 / (64 + 64)))


def test_xla_fuses_sums_and_relus_into_batch_normalisation() -> None:
    """The last ReLU of a block costs nothing, the sum reads the shortcut; a ReLU behind a bias reads and writes its tensor."""
    model = built_in_model("resnet-50", 4)

    def moved(model: Any, name: str, backward: bool, xla: bool) -> float:
        laws = Laws.parse({"devices": {"GPU": dict(ROW)}, "framework": {"launch_s": 0.0}})
        return Kernels(model, laws, xla).seconds(op_number(model, name), 1.0, 9e8, 1.0, backward, V100) * 1e3

    names = ("stage0_block1/conv1_relu", "stage0_block1/residual", "stage0_block1/relu")
    assert [moved(model, name, False, True) for name in names] == pytest.approx([0.0, 0.33, 0.0])
    assert [moved(model, name, True, True) for name in names] == pytest.approx([0.67, 0.0, 0.0])
    assert [moved(model, name, False, False) for name in names] == pytest.approx([1.0, 1.0, 1.0])
    assert moved(built_in_model("vgg-19", 2), "conv1_1/relu", False, True) == pytest.approx(1.0)
    kernels = Kernels(model, PLAIN, True)
    assert [kernels.kernels(op_number(model, name), False, V100) for name in names] == [0, 0, 0]


def test_xla_fuses_an_update_that_is_written_with_elementary_ops() -> None:
    """LAMB: 20 tensors in 4 kernels, instead of 55 in 31; what waits for no gradient included."""
    model = built_in_model("bert-base", 4)
    plain, fused = (Kernels(model, PLAIN, xla) for xla in (False, True))
    assert (plain.update_passes(), plain.update_kernels()) == (55, 31)
    assert (fused.update_passes(), fused.update_kernels()) == (20, 4)
    plain, fused = (Kernels(built_in_model("resnet-50", 4), PLAIN, xla) for xla in (False, True))
    assert (plain.update_passes(), plain.update_kernels()) == (fused.update_passes(), fused.update_kernels()) == (5, 1)


def test_product_takes_its_flops_at_the_share_of_full_tiles() -> None:
    model = built_in_model("bert-base", 40)
    number = op_number(model, "block0/feed_forward/expand")
    flops = model.ops[number].flops
    expected = flops / (15.7e12 * 0.5 * occupancy(product_of(model.ops[number]), 80, 0.0, False))
    assert Kernels(model, PLAIN, False).seconds(number, flops, 0.0, 1.0, False, V100) == pytest.approx(expected)
    half = as_run(model, "fp16", False)
    assert Kernels(half, PLAIN, False).seconds(number, flops, 0.0, 1.0, False, V100) == pytest.approx(
        flops / (125e12 * 0.25 * occupancy(product_of(model.ops[number]), 80, 0.0, True)))


def test_gelu_op_by_op_moves_nine_times_its_tensors_and_fused_once() -> None:
    model = built_in_model("bert-base", 4)
    number = op_number(model, "block0/feed_forward/gelu")
    seconds = [Kernels(model, PLAIN, xla).seconds(number, 1.0, 9e8, 1.0, False, V100) for xla in (False, True)]
    assert seconds == pytest.approx([9e-3, 1e-3])
    half = as_run(model, "fp16", False)
    assert Kernels(half, PLAIN, False).seconds(number, 1.0, 9e8, 1.0, False, V100) == pytest.approx(21e-3), "float32, and casts"


def test_layer_normalisation_keeps_its_factor_for_every_element() -> None:
    """``x * (rsqrt(variance) * gamma)``: the backward pass reads both operands; XLA keeps them in 16 bits."""
    model = built_in_model("bert-base", 4)
    number = next(number for number, op in enumerate(model.ops) if op.kind == "norm")
    size = model.tensors[model.ops[number].outputs[0].tensor].size
    kept = [as_run(model, precision, xla).ops[number].scratch_bytes / size
            for precision, xla in (("fp32", False), ("fp32", True), ("fp16", False), ("fp16", True))]
    assert kept == [4.0, 4.0, 8.0, 2.0]


def test_kernels_with_indices_take_cycles_on_a_gpu_whose_memory_is_fast() -> None:
    """Layer normalisation: 7.1 cycles of a multiprocessor for an element, unless its bytes take longer."""
    model = as_run(built_in_model("bert-base", 32), "fp32", False)
    number = next(number for number, op in enumerate(model.ops) if op.kind == "norm")
    elements = model.tensors[model.ops[number].outputs[0].tensor].size
    laws = Laws.parse({"devices": {"GPU": {"units": 100, "clock_hz": 1e9, "memory": 1.0}}, "framework": {"launch_s": 0.0}})
    h200 = Cluster.parse("H200:1").devices[0]
    assert Kernels(model, laws, False).seconds(number, 1.0, 1e3, 1.0, False, h200) == pytest.approx(elements * 7.1e-11)
    assert Kernels(model, laws, False).seconds(number, 1.0, 48e9, 1.0, False, h200) == pytest.approx(4 * 1e-2)


def test_few_channels_keep_few_multiprocessors_busy_and_16_bits_are_transposed() -> None:
    """cuDNN's batch normalisation has a block for each channel, and channels first."""
    model = as_run(built_in_model("resnet-50", 64), "fp32", False)
    number = op_number(model, "stem/conv_bn")
    elements = model.tensors[model.ops[number].outputs[0].tensor].size
    laws = Laws.parse({"devices": {"GPU": {"units": 128, "clock_hz": 1e9}}, "framework": {"launch_s": 0.0}})
    h200 = Cluster.parse("H200:1").devices[0]
    seconds = [Kernels(as_run(model, precision, False), laws, False).seconds(number, 1.0, 0.0, 1.0, False, h200)
               for precision in ("fp32", "fp16")]
    assert seconds == pytest.approx([elements * 2 * 1.15 / 128e9, elements * (2 * 1.15 + 2 * 0.65) / 128e9])


def test_step_takes_as_long_as_the_host_that_starts_its_kernels() -> None:
    def run(count: int, xla: bool = False) -> Simulation:
        strategy = uniform_3d(as_run(built_in_model("bert-base", 8 // count), "tf32", xla), num_micro_batch=count)
        return simulate(strategy, Cluster.parse("H200:1"), Options(xla=xla))

    whole, parts, fused = run(1), run(4), run(4, True)
    assert parts.is_limited_by_host and parts.step_time_s == parts.kernels * default_laws().framework.host_s
    assert "fewer micro-batches than 4 or an optimizer with a kernel for each variable" in parts.bottleneck()
    assert "or XLA" in parts.bottleneck() and "micro-batches" not in whole.host_words()
    assert not fused.is_limited_by_host and fused.host_words() == "" and fused.kernels < whole.kernels < parts.kernels
    assert not simulate(uniform_3d(built_in_model("bert-base", 1)), Cluster.parse("H200:1")).kernels, "no law, no host"


def test_update_op_by_op_holds_what_waits_for_no_gradient() -> None:
    """LAMB: both moments times their decay, and the variable times its own: 12 bytes a parameter."""
    cluster, model = Cluster.parse("H200:1"), as_run(built_in_model("bert-base", 8), "fp32", False)
    without = model._replace(optimizer=model.optimizer._replace(early_bytes=0))
    held = [simulate(uniform_3d(one), cluster, Options(xla=False)).program.static_bytes[0] for one in (model, without)]
    assert sum(held[0].values()) - sum(held[1].values()) == pytest.approx(12 * model.parameter_count)


def test_convolutions_in_tf32_are_transposed_where_there_is_tf32() -> None:
    model = as_run(built_in_model("resnet-50", 2), "tf32", True)
    kernels, number = Kernels(model, PLAIN, True), op_number(model, "stage0_block0/conv2")
    a100 = Cluster.parse("A100-40GB:1").devices[0]
    products_s = 1e11 / (156e12 * 0.5 * occupancy(product_of(model.ops[number]), 80, 0.0, False))
    assert products_s > 1e-3
    assert kernels.seconds(number, 1e11, 1555e6, 1.0, False, a100) == pytest.approx(products_s + 2e-3), "two times more bytes"
    assert kernels.seconds(number, 1e8, 1555e6, 1.0, False, a100) == pytest.approx(1e-3), "float32's kernel is faster"
    assert kernels.seconds(number, 0.0, 900e6, 1.0, False, V100) == pytest.approx(1e-3)


def test_fastest_kernel_runs_in_tf32() -> None:
    """Tensor cores compute a stem of three channels, which is all bytes, no faster than float32's kernels without transposing."""
    a100 = Cluster.parse("A100-40GB:1").devices[0]
    model = built_in_model("vgg-19", 32)
    number = op_number(model, "conv1_1/conv")
    size = sum(model.tensors[use.tensor].bytes for use in (*model.ops[number].inputs, *model.ops[number].outputs))
    single, tf32 = (Kernels(as_run(model, precision, True), default_laws(), True).seconds(
        number, model.ops[number].flops, size, 1.0, False, a100) for precision in ("fp32", "tf32"))
    assert tf32 == single


@pytest.mark.parametrize("kind", ["P100-16GB", "TitanXp"])
def test_16_bits_without_tensor_cores_are_not_slower_than_float32(kind: str) -> None:
    cluster = Cluster.parse(f"{kind}:1")
    for name in ("vgg-19", "bert-base"):
        single, half = (simulate(uniform_3d(as_run(built_in_model(name, 8), precision, True)), cluster, Options(xla=True))
                        for precision in ("fp32", "fp16"))
        assert half.step_time_s < single.step_time_s


@pytest.mark.slow
@pytest.mark.parametrize("precision,xla", [("fp32", False), ("tf32", True), ("fp16", True)])
def test_better_gpu_is_not_slower(precision: str, xla: bool) -> None:
    """Whole steps of every type of GPU against those that have no higher rate in float32, in the precision and of memory."""
    names = [name for name in DEVICE_TYPES if DEVICE_TYPES[name].kind == "GPU"]
    devices = {name: Cluster.parse(f"{name}:1").devices[0] for name in names}
    for model in ("resnet-50", "bert-base", "dlrm"):
        strategy = uniform_3d(as_run(built_in_model(model, 32), precision, xla))
        found = {name: simulate(strategy, Cluster.parse(f"{name}:1"), Options(xla=xla)).step_time_s for name in names}
        for better, other in itertools.permutations(names, 2):
            good, poor = devices[better], devices[other]
            rates = [(good.peak_flops_per_s[key], poor.peak_flops_per_s[key]) for key in ("fp32", precision)]
            rates.append((good.memory_bandwidth_bytes_per_s, poor.memory_bandwidth_bytes_per_s))
            if all(more >= less for more, less in rates):
                assert found[better] <= found[other] * (1 + 1e-9), (model, better, other)


@pytest.mark.parametrize("change", ["peak", "bandwidth", "batch"])
@pytest.mark.parametrize("precision,xla", [("fp32", False), ("fp16", True)])
def test_more_is_never_slower_and_more_examples_are_never_faster(change: str, precision: str, xla: bool) -> None:
    def step_s(factor: float) -> float:
        description: Dict[str, Any] = {"base": "V100-16GB"}
        known = Cluster.parse("V100-16GB:1").devices[0]
        if change == "peak":
            description.update({name: rate * factor for name, rate in known.peak_flops_per_s.items()})
        if change == "bandwidth":
            description["memory_bandwidth_bytes_per_s"] = known.memory_bandwidth_bytes_per_s * factor
        cluster = Cluster.parse({"name": "c", "device_types": {"V100-X": description},
                                 "nodes": [{"devices": "V100-X:1", "links": "default"}]})
        model = built_in_model("resnet-50", int(8 * factor) if change == "batch" else 8)
        return simulate(uniform_3d(as_run(model, precision, xla)), cluster, Options(xla=xla)).step_time_s

    seconds = [step_s(factor) for factor in (0.5, 1.0, 1.25, 1.5, 2.0, 4.0)]
    assert seconds == sorted(seconds, reverse=change != "batch") and seconds[0] != seconds[-1]


def test_mixed_precision_keeps_variables_in_float32() -> None:
    model = as_run(built_in_model("bert-base", 4), "fp16", True)
    assert {tensor.itemsize for tensor in model.tensors if tensor.role == ACTIVATION} == {2}
    assert {tensor.itemsize for tensor in model.tensors if tensor.role == PARAMETER} == {4}


def test_what_several_devices_wait_for() -> None:
    law = FrameworkLaw(jitter=0.01, hop_s=1e-4, overlap=0.25, cycle_s=0.01)
    assert waiting_seconds(law, 0.3, 0.1, 1, 2, False) == 0.0
    late = 0.3 * 0.01 * math.sqrt(2 * math.log(8)) + 0.01 / 2
    assert waiting_seconds(law, 0.3, 0.0, 8, 2, False) == pytest.approx(late + 20 * 8 * 1e-4), "20 cycles"
    assert waiting_seconds(law, 0.3, 0.0, 8, 30, False) == pytest.approx(late + 30 * 8 * 1e-4), "more buffers than cycles"
    assert waiting_seconds(law, 0.3, 0.1, 8, 2, False) == pytest.approx(late + 0.75 * 0.1), "bytes take longer than agreeing"
    assert waiting_seconds(law, 0.3, 0.1, 8, 2, True) == pytest.approx(late + 2 * 8 * 1e-4 + 0.1), "XLA: nothing is hidden"


def test_every_device_type_has_a_row_and_files_are_checked() -> None:
    laws = default_laws()
    assert laws.of("V100-16GB").units == 80 and laws.of("A100-40GB").units == 108 and laws.of("mine") == laws.devices["GPU"]
    with pytest.raises(PlanError, match="devices has no row 'GPU'"):
        Laws.parse({"devices": {"V100": ROW}})
    with pytest.raises(PlanError, match="matmul_fp23"):
        Laws.parse({"devices": {"GPU": dict(ROW, matmul_fp23=1.0)}})


def test_errors_of_the_kind_of_device_or_the_largest_there_is() -> None:
    rows = [{"times": KERNELS, "device": name, "precision": "fp32", "points": 3, "mean": mean, "most": 2 * mean}
            for name, mean in (("V100", 0.1), ("T4", 0.2))]
    laws = Laws.parse({"devices": {"GPU": ROW}, "errors": rows})
    assert [laws.error(KERNELS, name, "fp32").mean for name in ("V100-32GB", "T4", "H100")] == [0.1, 0.2, 0.2]  # type: ignore[union-attr]
    assert laws.error("layers", "V100", "fp32") is None
    assert laws.error(KERNELS, "CPU", "fp32") is None, "GPUs say nothing about CPUs"
    own = default_laws()
    alike = {"P100-16GB fp32": "P100 fp32", "TitanXp fp32": "P100 fp32", "H100-80GB bf16": "H200 fp16", "A10 fp32": "V100 fp32"}
    answers = {name: own.error(KERNELS, *name.split()) for name in alike}
    assert {name: f"{one.device} {one.precision}" for name, one in answers.items() if one} == alike


# ---- where they reach --------------------------------------------------------------------------------------------------


def rate(*more: str) -> Any:
    found = call("simulate", "--cluster", "V100-16GB:1", "--json", *more)
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)["samples_per_s"]


def test_precision_xla_and_batch_reach_built_in_models() -> None:
    plain, half, fused = (rate("--model", "bert-base", "--global-batch", "32", *more)
                          for more in ((), ("--precision", "fp16"), ("--precision", "fp16", "--xla")))
    assert plain < half < fused and rate("--model", "bert-base", "--global-batch", "64") > plain


def test_precision_xla_and_batch_reach_profiles() -> None:
    plain, half, fused = (rate("--profile", "bert-large@dapple", "--global-batch", "4", *more)
                          for more in ((), ("--precision", "fp16"), ("--precision", "fp16", "--xla")))
    assert plain < half < fused
    cluster, row = Cluster.parse("V100-16GB:1"), {"device": "V100-16GB", "batch": 1, "forward_s": 1.0, "backward_s": 2.0}
    layer = {"name": "a", "forward_flops": 1e12, "utilization": 0.5, "measured": [row]}
    found = layers_with(ModelProfile.parse({"name": "m", "layers": [layer]}), PLAIN, cluster, "fp16", False).layers[0]
    assert found.measured[0].forward_s == pytest.approx(15.7 / 125 * 0.5 / 0.25)
    with pytest.raises(PlanError, match="has only measured times"):
        layers_with(ModelProfile.parse({"name": "m", "layers": [dict(layer, forward_flops=0)]}), PLAIN, cluster, "fp16", False)


def test_precision_and_xla_reach_captured_steps() -> None:
    from tests.simulator.test_step_graph import step

    graph = step()
    gelu = graph.ops[0]._replace(contraction=False)
    graph = graph._replace(ops=(gelu, *graph.ops[1:]))
    found: StepGraph = step_with(graph, PLAIN, V100, "fp16", True)
    assert found.seconds["forward_b"][-1][1] == pytest.approx(15.7 * 0.5 / (125 * 0.25))
    assert found.seconds["forward_a"][-1][1] == pytest.approx(0.5 * FUSED_SHARE) and found.precision == "fp16"
    assert step_with(graph, PLAIN, V100, "fp32", False).seconds == graph.seconds


def test_answers_have_their_uncertainty(tmp_path: Any) -> None:
    rows = [{"times": KERNELS, "device": "V100", "precision": "fp32", "points": 3, "mean": 0.1, "most": 0.25}]
    path = tmp_path / "laws.json"
    path.write_text(json.dumps({"devices": {"GPU": ROW}, "errors": rows}))
    options = ("simulate", "--cluster", "V100-16GB:1", "--model", "bert-base", "--global-batch", "8", "--laws", str(path))
    found = json.loads(call(*options, "--json").stdout)
    low, high = found["samples_per_s_range"]
    assert low == pytest.approx(found["samples_per_s"] / 1.25) and high == pytest.approx(found["samples_per_s"] * 1.25)
    shown = " ".join(call(*options).output.split())
    other = call("simulate", "--cluster", "T4:1", *options[3:])
    assert "T4 was not tested" in " ".join(other.output.split()) and "was not tested" not in shown
    mixed = Laws.parse(str(path))
    assert accuracy(mixed, KERNELS, ["V100-16GB", "T4", "A10"], "fp32").untested == ("A10", "T4")
    assert accuracy(mixed, KERNELS, ["V100-16GB"], "fp16").untested == ("V100-16GB in fp16",)
    assert f"{low:.4g} to {high:.4g}" in shown and "a mean error of 10%, and nine of ten were within a factor of 1.25" in shown
    assert json.loads(call("compare", "1x1x1", *options[1:], "--json").stdout)["samples_per_s_range"] == [low, high]
    ranked = " ".join(call("compare", "1x1x1", "1x1x1:2", *options[1:]).output.split())
    assert f"1x1x1: {found['samples_per_s']:.4g} samples/s, {low:.4g} to {high:.4g}; " in ranked
    assert ranked.count("accuracy: on V100 in fp32") == 1 and ranked.endswith("nothing was fitted to")


def test_cpus_have_no_such_kernels() -> None:
    found = call("simulate", "--cluster", "cpu:2", "--model", "mlp", "--xla")
    assert found.exit_code == 1 and "has CPUs; leave them out" in " ".join(found.output.split())


def test_batch_that_does_not_fit_says_by_how_much() -> None:
    model = as_run(built_in_model("bert-base", 128), "fp32", False)
    found = simulate(uniform_3d(model), Cluster.parse("V100-16GB:1"), Options(xla=False))
    missing = (max(found.peak_memory_bytes) - found.usable_bytes[0]) / 2**30
    assert found.oom and f"{missing:.2f} GiB short" in found.bottleneck()
