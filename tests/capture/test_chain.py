"""Captured graphs as chains: order, costs of the published models, unknown batch sizes."""
from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, Iterator, Tuple

import pytest

import whale_tf as wh
from models import bert, gpt2, mlp, resnet, t5, unet, vgg
from whale_tf._tf_compat import tf, v1
from whale_tf.capture.captured import capture
from whale_tf.capture.chain import captured_chain
from whale_tf.ir.batch_axis import analyse
from whale_tf.ir.graph import Phase
from whale_tf.ir.region import Region, find_region
from whale_tf.profiler.chain import Chain, linear_order
from whale_tf.profiler.graph_profile import Source, graph_profile
from whale_tf.profiler.model_profile import ModelProfile


@pytest.fixture(autouse=True)
def _hooks() -> Iterator[None]:
    wh.init({}, cluster="cpu:2")
    yield
    wh.shutdown()


def chain_of_model(build: Callable[[], Any], batch: int, optimizer: Any = None) -> Tuple[Chain, Region]:
    with tf.Graph().as_default() as graph:
        (optimizer or v1.train.AdamOptimizer(1e-3)).minimize(build())
        captured = capture(graph)
        found = analyse(captured.graph, captured.sources, captured.scope)
        region = find_region(captured.graph, captured.task_graph, found, list(captured.sources))
        return captured_chain(captured, region, batch), region


@functools.lru_cache(maxsize=None)
def published(module: Any, config: Any) -> ModelProfile:
    return graph_profile(chain_of_model(model(module, config, 2), 2)[0], Source("model"))


def model(module: Any, config: Any, batch: Any) -> Callable[[], Any]:
    return lambda: module.build(module.inputs(config, batch), config).loss


# Published counts, forward, per sample.  A multiply-add is two FLOPs.
#   BERT-Large, S 512: Narayanan et al. 2021 (arXiv 2104.04473), appendix, forward part: 24 layers of 24 S h^2 + 4 S^2 h, plus the
#       head over 76 positions: 2 h (h + V) + 2 S h each; pooler and classifier are below 0.01%.
#   GPT-2 small, S 1,024: the same formula with the head over all positions.
#   ResNet-50 with stride in the 3x3 convolution: 4.089e9 multiply-adds (torchvision's documentation: 4.09 GFLOPs).
#   VGG-16: 15.47e9 multiply-adds (torchvision's documentation).
BERT_LARGE = 24 * (24 * 512 * 1024 ** 2 + 4 * 512 ** 2 * 1024) + 76 * (2 * 1024 * (1024 + 30522) + 2 * 512 * 1024)
GPT2_SMALL = 12 * (24 * 1024 * 768 ** 2 + 4 * 1024 ** 2 * 768) + 2 * 1024 * 768 * 50257


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("module,config,flops,parameters", [
    (bert, bert.BertConfig.large(), BERT_LARGE, 336.2e6),
    (gpt2, gpt2.Gpt2Config.small(), GPT2_SMALL, 124.4e6),
    (resnet, resnet.ResnetConfig.resnet50(), 2 * 4.089e9, 25.56e6),
    (vgg, vgg.VggConfig.vgg16(), 2 * 15.47e9, 138.36e6),
])
def test_published_flops_and_parameters(module: Any, config: Any, flops: float, parameters: float) -> None:
    profile = published(module, config)
    assert sum(layer.forward_flops for layer in profile.layers) == pytest.approx(flops, rel=0.02)
    backward = sum(layer.backward_flops or 0.0 for layer in profile.layers)
    assert backward == pytest.approx(2 * flops, rel=0.02)
    assert profile.parameter_bytes / 4 == pytest.approx(parameters, rel=0.02)
    assert profile.optimizer == "adam" and profile.optimizer_bytes_per_parameter_byte == pytest.approx(2.0, rel=1e-5)


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("count", [8, pytest.param(24, marks=pytest.mark.full)])
def test_layers_of_bert_large_are_its_encoder_layers(count: int) -> None:
    profile = published(bert, dataclasses.replace(bert.BertConfig.large(), layers=count))
    layers = [layer for layer in profile.layers if layer.name.startswith("layer_")]
    assert [layer.name for layer in layers] == [f"layer_{i}" for i in range(count)]
    assert {layer.forward_flops for layer in layers} == {24 * 512 * 1024 ** 2 + 4 * 512 ** 2 * 1024}
    assert {layer.output_bytes for layer in layers} == {4 * 512 * 1024}
    assert len(profile.layers) < count + 8


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("module,config", [
    (bert, bert.BertConfig.tiny()), (unet, unet.UnetConfig.tiny()), (mlp, mlp.MlpConfig.tiny())])
def test_unknown_batch_size_is_filled_in(module: Any, config: Any) -> None:
    known, _ = chain_of_model(model(module, config, 6), 6)
    unknown, region = chain_of_model(model(module, config, None), 6)
    for name in ("forward_flops", "backward_flops", "parameter_bytes"):
        assert getattr(unknown, name).sum() == getattr(known, name).sum(), name
    assert unknown.activation_bytes.sum() == pytest.approx(known.activation_bytes.sum(), rel=0.05)
    assert any(None in (t.shape or ()) for t in region.graph.tensors), "the captured graph is as it was"


def test_what_the_script_says_about_a_shape_is_known(recwarn: Any) -> None:
    """No definition of an op has it."""
    def build() -> Any:
        h = v1.TensorArray(tf.float32, 1, infer_shape=False).write(0, v1.placeholder(tf.float32, [None, 4])).read(0)
        h.set_shape([None, 4])
        return tf.reduce_mean(tf.square(tf.matmul(h, v1.get_variable("w", [4, 3]))))

    assert sum(chain_of_model(build, 8)[0].forward_flops) == 2 * 8 * 4 * 3
    assert not [warning for warning in recwarn if "the rank of an operand" in str(warning.message)]


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("module,config", [
    (bert, bert.BertConfig.tiny()), (unet, unet.UnetConfig.tiny()), (t5, t5.T5Config.tiny()),
    (resnet, resnet.ResnetConfig.tiny())])
def test_order_is_topological_and_complete(module: Any, config: Any) -> None:
    chain, region = chain_of_model(model(module, config, 4), 4)
    order, _ = linear_order(region)
    place = {op: number for number, op in enumerate(order)}
    forward = {i for i in region.ops if region.graph.ops[i].phase is Phase.FORWARD and i not in region.late}
    assert set(order) == forward and [op for segment in chain.ops for op in segment] == order
    for op in order:
        assert all(place[p] < place[op] for p in region.graph.predecessors(region.graph.ops[op]) if p in place)


def test_what_needs_no_variable_moves_to_its_reader() -> None:
    def build() -> Any:
        x = v1.placeholder("float32", [8, 4], name="x")
        labels = v1.square(v1.placeholder("float32", [8, 4], name="y"), name="labels")
        h = x
        for i in range(3):
            h = v1.tanh(v1.matmul(h, v1.get_variable(f"w{i}", [4, 4])), name=f"h{i}")
        return v1.reduce_mean(v1.squared_difference(h, labels), name="loss")

    chain, _ = chain_of_model(build, 8)
    names = [[chain.graph.ops[op].name for op in segment] for segment in chain.ops]
    where = {name: number for number, segment in enumerate(names) for name in segment}
    assert where["labels"] == where["SquaredDifference"] > where["h2"] > where["h1"]
    assert chain.crossing_bytes[where["h1"]] == 4 * 8 * 4, "the hidden state alone crosses"
    assert chain.parameter_bytes.sum() == 3 * 64


def test_skip_connection_counts_where_it_crosses() -> None:
    def build() -> Any:
        x = v1.matmul(v1.placeholder("float32", [8, 4]), v1.get_variable("a", [4, 4]), name="first")
        y = v1.tanh(v1.matmul(v1.tanh(x, name="left"), v1.get_variable("b", [4, 16]), name="wide"), name="wide_tanh")
        return v1.reduce_mean(v1.matmul(y, v1.get_variable("c", [16, 4])) + x)

    chain, _ = chain_of_model(build, 8)
    names = [chain.name(number) for number in range(chain.size)]
    assert chain.crossing_bytes[names.index("wide")] == 4 * 8 * (16 + 4)


def test_condition_is_not_cut() -> None:
    def build() -> Any:
        x = v1.tanh(v1.matmul(v1.placeholder("float32", [8, 4]), v1.get_variable("a", [4, 4])))
        kernel = v1.get_variable("b", [4, 4])
        even = v1.equal(v1.floormod(v1.train.get_or_create_global_step(), 2), 0)
        before = v1.control_flow_v2_enabled()
        v1.disable_control_flow_v2()
        y = v1.cond(even, lambda: v1.tanh(v1.matmul(x, kernel)), lambda: v1.nn.relu(v1.matmul(x, kernel)))
        if before:
            v1.enable_control_flow_v2()
        return v1.reduce_mean(y * y)

    chain, _ = chain_of_model(build, 8)
    switches = {number for number, segment in enumerate(chain.ops) for op in segment
                if chain.graph.ops[op].type in ("Switch", "Merge")}
    assert len(switches) == 1
