from __future__ import annotations

from typing import Tuple

import pytest

from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError
from whale_tf.profiler.layer_time import layer_seconds
from whale_tf.profiler.model_profile import ModelProfile, builtin_names
from whale_tf.simulator import (
    MODELS,
    LayerEstimator,
    ModelGraph,
    Options,
    built_in_model,
    layered_model,
    model_names,
    simulate,
    uniform_3d,
)
from whale_tf.simulator.costs import EFFICIENCY
from whale_tf.simulator.model_graph import KINDS, PARAMETER


@pytest.mark.parametrize(
    "name, millions",
    [
        # Proteus Table II
        ("resnet-50", 25.6),
        ("inception-v3", 23.8),
        ("vgg-19", 143.7),
        ("gpt2", 124.4),
        ("gpt-1.5b", 1557),
        ("dlrm", 516),
        # BERT: large, and DAPPLE Table II
        ("bert-large", 336),
        ("bert-48", 640),
        # Whale section 5
        ("m6-10b", 10e3),
        ("m6-moe-100b", 100e3),
        ("m6-moe-1t", 1e6),
        ("m6-moe-10t", 10e6),
        ("resnet-50-100k", 228),
    ],
)
def test_parameters(name: str, millions: float) -> None:
    assert built_in_model(name, 1).parameter_count / 1e6 == pytest.approx(millions, rel=0.04)


@pytest.mark.parametrize(
    "name, billions", [("resnet-50", 8.2), ("inception-v3", 11.4), ("vgg-19", 39.3)]
)  # two per multiply-add of the published counts
def test_forward_flops_of_one_image(name: str, billions: float) -> None:
    assert sum(op.flops for op in built_in_model(name, 2).ops) / 2 / 1e9 == pytest.approx(billions, rel=0.03)


def training_flops(model: ModelGraph) -> float:
    """Matrix arithmetic in the forward and backward of one micro-batch, without recomputation, as MFU counts it."""
    return sum(op.flops + model.backward_flops(op) for op in model.ops if KINDS[op.kind].compute_bound)


def test_training_flops_of_a_transformer_are_six_per_parameter_and_token() -> None:
    model = built_in_model("gpt2", 1)
    attention = sum(3 * op.flops for op in model.ops if op.path[-1] in ("scores", "context"))
    embedded = 50257 * 768
    assert training_flops(model) - attention == pytest.approx(6 * 1024 * (model.parameter_count - 1024 * 768), rel=0.01)
    assert embedded < model.parameter_count


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_are_well_formed(name: str) -> None:
    model = built_in_model(name, 4)
    written = set()
    for op in model.ops:
        assert op.kind in KINDS and op.flops >= 0
        for use in op.inputs:
            tensor = model.tensors[use.tensor]
            assert tensor.role != "activation" or use.tensor in written, op.name
            assert tuple(op.dims[dim] for dim in use.dims) == tensor.shape, op.name
        written.update(use.tensor for use in op.outputs)
        assert set(op.whole) <= set(op.dims) and (op.split is None or op.split in op.dims), op.name
    assert len({op.name for op in model.ops}) == len(model.ops)


BATCHES = (8, 32)
# Of the step time, the profile's over the ops': launches of single updates, and parameters read while a product computes. Where
# reading experts takes most of the time, a layer's update is that of an optimizer with two slots of float32. LAMB's update takes
# more than that, a fifth of a step of 8 examples of the small BERT.
TOLERANCE = {"mlp": 0.07, "bert-base": 0.18, "m6-moe-100b": 0.12, "m6-moe-1t": 0.12, "m6-moe-10t": 0.12}


def both_views(name: str, batch: int) -> Tuple[ModelProfile, ModelGraph, ModelGraph]:
    """The profile, its layers as a graph, and the ops where they are what defines the model."""
    profile = ModelProfile.parse(name)
    layers = layered_model(profile, batch)
    return profile, layers, built_in_model(name, batch) if name in MODELS else layers


@pytest.mark.parametrize("name", builtin_names())
def test_both_views_of_a_model_have_the_same_parameters_and_flops(name: str) -> None:
    profile, layers, ops = both_views(name, 8)
    held = sum(tensor.bytes for tensor in ops.tensors if tensor.role == PARAMETER)
    assert profile.parameter_bytes == held == layers.parameter_count * 4
    forward = sum(op.flops for op in ops.ops if KINDS[op.kind].compute_bound)
    assert sum(op.flops for op in layers.ops) == pytest.approx(forward, rel=1e-9)
    if name in MODELS:
        backward = sum(layer.backward_flops or 0.0 for layer in profile.layers) * ops.batch
        assert backward == pytest.approx(training_flops(ops) - forward, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", builtin_names())
def test_both_views_of_a_model_take_the_same_time_and_memory(name: str) -> None:
    cluster, options = Cluster.parse("V100-32GB:1"), Options(reserved_bytes={})
    for batch in BATCHES:
        profile, layers, ops = both_views(name, batch)
        told = simulate(uniform_3d(layers, 1), cluster, options, LayerEstimator(layers, profile))
        if name in MODELS:
            played = simulate(uniform_3d(ops, 1), cluster, options)
            assert told.step_time_s == pytest.approx(played.step_time_s, rel=TOLERANCE.get(name, 0.05))
            assert told.peak_memory_bytes[0] == pytest.approx(played.peak_memory_bytes[0], rel=0.15)
        else:
            seconds = sum(sum(layer_seconds(profile, layer, cluster.devices[0], batch)[:2]) for layer in profile.layers)
            update = profile.parameter_bytes * (3 + 2 * profile.optimizer_bytes_per_parameter_byte)
            update /= cluster.devices[0].memory_bandwidth_bytes_per_s * EFFICIENCY.memory
            assert told.step_time_s == pytest.approx(seconds + update, rel=0.01)


def test_tensor_parallelism_of_a_block_sums_twice() -> None:
    """Shoeybi et al. 2019, section 3: one sum behind attention, one behind the feed-forward half."""
    for name, tokens, hidden in (("gpt2", 1024, 768), ("bert-48", 512, 1024)):
        layers = {layer.name: layer for layer in ModelProfile.parse(name).layers}
        assert layers["block3"].tensor_parallel_bytes == 2 * 4 * tokens * hidden
        assert layers["block3"].output_bytes == 4 * tokens * hidden
        assert layers["embedding"].tied == layers["head"].tied == "embedding/tokens"
    decoder = {layer.name: layer for layer in ModelProfile.parse("m6-10b").layers}
    assert decoder["decoder_block0"].output_bytes == 2 * 2 * 512 * 4096, "its own states and the encoder's"


def test_every_model_is_listed_and_only_sparse_ones_have_no_layers() -> None:
    assert set(model_names()) == set(MODELS) | set(builtin_names())
    assert {name for name, layers in model_names().items() if not layers} == {name for name in MODELS if MODELS[name].is_sparse}
    with pytest.raises(PlanError, match="'xlnet-36' is defined by layers; use layered_model"):
        built_in_model("xlnet-36", 1)
