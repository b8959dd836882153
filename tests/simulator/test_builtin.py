from __future__ import annotations

import pytest

from whale_tf.simulator import MODELS, built_in_model
from whale_tf.simulator.model_graph import KINDS


@pytest.mark.parametrize(
    "name, millions",
    [
        # Proteus Table II
        ("resnet50", 25.6),
        ("inception_v3", 23.8),
        ("vgg19", 143.7),
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
        ("resnet50-100k", 228),
    ],
)
def test_parameters(name: str, millions: float) -> None:
    assert built_in_model(name, 1).parameter_count / 1e6 == pytest.approx(millions, rel=0.04)


@pytest.mark.parametrize(
    "name, billions", [("resnet50", 8.2), ("inception_v3", 11.4), ("vgg19", 39.3)]
)  # two per multiply-add of the published counts
def test_forward_flops_of_one_image(name: str, billions: float) -> None:
    assert built_in_model(name, 2).forward_flops / 2 / 1e9 == pytest.approx(billions, rel=0.03)


def test_training_flops_of_a_transformer_are_six_per_parameter_and_token() -> None:
    model = built_in_model("gpt2", 1)
    attention = sum(3 * op.flops for op in model.ops if op.path[-1] in ("scores", "context"))
    embedded = 50257 * 768
    assert model.training_flops - attention == pytest.approx(6 * 1024 * (model.parameter_count - 1024 * 768), rel=0.01)
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
