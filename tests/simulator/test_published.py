"""The laws beside what a paper prints, and the benchmark where data are missing."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.nvidia_runs import electra, resnext101, runs, trained, unet, unets
from benchmarks.points import FIRST_YEAR, nine_of_ten
from benchmarks.published import (
    FREE,
    HOPPER,
    MEGATRON,
    OWN_OPS,
    Fit,
    answered,
    coverage,
    dapple_table,
    errors_of,
    every_point,
    megatron_tflops,
    of_card,
    resnet50_of_2017,
    tensorflow_org,
)
from whale_tf.simulator.instructions import GRADIENT
from whale_tf.simulator.laws import KERNELS, default_laws
from whale_tf.simulator.result import Simulation

pytestmark = [pytest.mark.once, pytest.mark.slow]


def test_missing_sources_are_named_and_printed_ones_stay() -> None:
    console = Console(file=io.StringIO(), width=200)
    points = every_point(None, console)
    assert {point.source for point in points} == {
        "DAPPLE Table VI", "NVIDIA's examples", "NVIDIA, TensorFlow 1", "NVIDIA, TensorFlow 2", "tensorflow.org"}
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "DLPerf: no data" in shown and "DAPPLE's profiles: no data" in shown


def test_table_that_nothing_is_fitted_to() -> None:
    """DAPPLE Table VI with two micro-batches."""
    laws = default_laws()
    (found,) = errors_of(answered([point for point in dapple_table() if point.measured in (5.10, 4.24)], lambda point: laws))
    assert found.times == KERNELS and found.points == 3 and found.most < 0.2


def test_runs_on_one_a100_are_near_their_laws() -> None:
    """ResNet-50, ResNeXt-101 and BERT-Large."""
    laws = default_laws()
    found = errors_of(answered([point for point in runs() if point.gpus == 1 and point.card == "A100"], lambda point: laws))
    assert {(one.device, one.precision, one.points) for one in found} == {("A100", "tf32", 4), ("A100", "fp16", 4)}
    assert all(one.mean < 0.1 for one in found)


def test_models_of_nvidias_runs_have_their_sizes() -> None:
    """Parameters in millions: 44 (Xie et al. 2016), 31 (Ronneberger et al. 2015) and 3.5 because NVIDIA's transposed convolutions
    are 3 x 3, 110 (Clark et al. 2020)."""
    sizes = [model.parameter_count / 1e6 for model in (resnext101(1), unet(1), electra(384, 1))]
    assert sizes == pytest.approx([44.2, 34.5, 109], rel=0.02)


def test_fit_finds_the_share_that_a_run_was_made_with() -> None:
    """A measurement that is the prediction with another share, beside the prior's small weight."""
    point = next(one for one in runs() if (one.gpus, one.card, one.model, one.precision) == (1, "A100", "resnet-50", "fp16"))
    point = point._replace(container="")  # of the row A100
    laws = of_card(default_laws(), "A100", {"convolution_half": 0.5})
    fit = Fit([point._replace(measured=point.predict(laws).samples_per_s)])
    assert fit.laws().devices["A100"].convolution_half == pytest.approx(0.5, rel=0.02)
    assert fit.laws(without="resnet-50").devices["A100"].convolution_half == pytest.approx(0.4, rel=0.02), "the prior"


def test_what_first_libraries_lack_is_found_by_models_that_ran_with_both() -> None:
    """Measurements of U-Net that are wrong in the same way say nothing of the model itself; nothing is said without them."""
    found = [one for one in unets() if (one.gpus, one.card) == (1, "A100") and one.what.startswith("U-Net, 8")]
    laws, row = default_laws(), default_laws().devices["A100"]
    slower = replace(row, **{name: 0.7 * getattr(row, name) for name in FREE["A100"]})
    laws = replace(laws, devices=dict(laws.devices, **{FIRST_YEAR["A100"]: slower}))
    fit = Fit([one._replace(measured=1.3 * one.predict(laws).samples_per_s) for one in found])
    assert {one.row for one in found} == {"A100", FIRST_YEAR["A100"]}
    for without, share in ((None, 0.7), ("u-net", 1.0)):
        rows = fit.laws(without).devices
        assert rows[FIRST_YEAR["A100"]].matmul_half / rows["A100"].matmul_half == pytest.approx(share, rel=0.03)


def test_ranges_hold_nine_of_ten_on_either_side() -> None:
    """A rate that was predicted at 0.8 of the measured one is 1.25 times the predicted one."""
    assert nine_of_ten([0.8] * 9 + [0.5]) == pytest.approx(0.25) == nine_of_ten([1.25] * 9 + [3.0])
    laws = default_laws()
    answers = answered([point for point in tensorflow_org() if point.gpus == 1], lambda point: laws)
    ((kind, (inside, _)),) = coverage(answers).items()
    assert kind == ("P100", "fp32") and inside == 1.0


def test_runs_are_modelled_as_they_were_run() -> None:
    """ResNet-50 of 2017 computes 3.9 billion multiplications an image (He et al. 2015: 3.8), the later one 4.1; variables on the
    CPU; fine-tuning in float32 op by op."""
    convolutions = [op.flops / 2e9 for op in resnet50_of_2017(1).ops if op.kind == "convolution"]
    assert sum(convolutions) == pytest.approx(3.86, rel=0.01)
    assert {point.strategy.offload for point in tensorflow_org()} == {"states"}
    found = {(point.card, point.precision, point.xla) for point in trained() if "384" in point.what}
    assert {xla for card, precision, xla in found if precision == "fp32"} == {False}
    assert {xla for card, precision, xla in found if precision == "fp16"} == {True}


def test_p100_that_keeps_variables_on_the_cpu_is_near_its_law() -> None:
    laws = default_laws()
    (found,) = errors_of(answered([point for point in tensorflow_org() if point.gpus == 1], lambda point: laws))
    assert found.points == 4 and found.mean < 0.05


def test_packages_laws_know_the_errors_of_our_own_measurements() -> None:
    assert HOPPER and {*HOPPER, OWN_OPS} <= set(default_laws().errors)


def summed_bytes(found: Simulation) -> float:
    return sum(one.size_bytes for one in found.program.instructions if one.lane == GRADIENT)


def test_gradients_in_16_bits_take_half_the_bytes() -> None:
    point = next(point for point in runs() if point.gpus == 8 and point.strategy.fp16_gradients)
    whole = point._replace(strategy=point.strategy._replace(fp16_gradients=False))
    laws = default_laws()
    half, full = point.predict(laws), whole.predict(laws)
    assert summed_bytes(half) == pytest.approx(summed_bytes(full) / 2)
    assert half.step_time_s < full.step_time_s


def test_rows_of_megatrons_table() -> None:
    """The smallest, without a pipeline, and the first with one: both within 6% of the paper."""
    for row in (MEGATRON[0], MEGATRON[4]):
        assert megatron_tflops(row) == pytest.approx(row.measured, rel=0.06)
