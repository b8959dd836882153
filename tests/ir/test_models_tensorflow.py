"""The project's models: every op type has a rule, and losses and gradients divide exactly."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import zoo
from tests.ir.emulation import Emulation
from whale_tf.capture.record import record
from whale_tf.ir.batch_axis import Options, analyse, find_batch_axis
from whale_tf.ir.rules import RULES, NoRule, View, rule_for
from whale_tf.ir.verify import verify

PARTS = [1, 4, 2]
OPTIMIZERS = [
    lambda: tf.train.AdamOptimizer(0.1), lambda: tf.train.MomentumOptimizer(0.1, 0.9), lambda: tf.train.AdagradOptimizer(0.1),
    lambda: tf.train.RMSPropOptimizer(0.1), lambda: tf.train.GradientDescentOptimizer(0.1)]
NAMES = sorted(zoo.SMALL)
# variants of the others, and the largest: in the full matrix only
VARIANTS = ("bert-nsp", "gan", "moe-top1", "resnet-bottleneck", "m6", "mlp", "vgg")
MODELS = [pytest.param(i, marks=pytest.mark.full) if name in VARIANTS else i for i, name in enumerate(NAMES)]


@pytest.fixture(autouse=True)
def frames() -> Any:
    """Loops as a Session script has them."""
    was_enabled = tf.control_flow_v2_enabled()
    tf.disable_control_flow_v2()
    yield
    if was_enabled:
        tf.enable_control_flow_v2()


def build(name: str, batch: Any, dtype: str = "float64") -> Tuple[Any, List[tf.Tensor], List[tf.Tensor]]:
    """(inputs, losses, gradients) of a small model in the current graph."""
    entry = zoo.SMALL[name]
    config = entry.config(dtype)
    inputs = entry.module.inputs(config, batch)
    model = entry.module.build(inputs, config)
    losses = [model.loss] if hasattr(model, "loss") else [model.discriminator_loss, model.generator_loss]
    gradients: List[tf.Tensor] = []
    for loss in losses:
        for gradient in tf.gradients(loss, tf.trainable_variables()):
            if isinstance(gradient, tf.IndexedSlices):
                gradients += [gradient.values, gradient.indices]
            elif gradient is not None:
                gradients.append(gradient)
    return inputs, losses, gradients


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("index", MODELS)
def test_models_divide_exactly(index: int) -> None:
    """Static and unknown batch sizes, reference and resource variables, by turns; batch statistics are synchronised."""
    name = NAMES[index]
    with tf.Graph().as_default() as graph, tf.variable_scope("", use_resource=index // 2 % 2 == 0):
        inputs, losses, gradients = build(name, 7 if index % 2 else None)
        initialiser = tf.global_variables_initializer()
        fed = [t for t in inputs if t.shape.rank]
        emulation = Emulation(graph, dict.fromkeys(fed, 0), losses + gradients, PARTS, Options(sync=lambda op: True))
    examples = zoo.SMALL[name].examples(zoo.SMALL[name].config("float64"))
    feed = {t.name: np.asarray(value)[:7] for t, value in zip(inputs, examples) if t.shape.rank}
    whole, merged = emulation.run(feed, initialiser.name)
    assert not emulation.axis.inexact
    for tensor, expected, actual in zip(emulation.fetches, whole, merged):
        np.testing.assert_allclose(actual, expected, rtol=1e-8, atol=1e-11, err_msg=emulation.ops.tensor_name(tensor))


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("index", MODELS)
def test_every_op_type_has_a_rule_and_sources_are_found(index: int) -> None:
    with tf.Graph().as_default() as graph, tf.variable_scope("", use_resource=index % 2 == 0):
        inputs, losses, gradients = build(NAMES[index], 8, "float32")
        loss = tf.add_n(losses)
        OPTIMIZERS[index % len(OPTIMIZERS)]().minimize(loss)
        ops = record(graph)
    verify(ops, NAMES[index])
    view = View(ops)
    refused: Dict[str, str] = {}
    for op in ops.ops:
        assert op.type in RULES, f"no rule for {op.type}"
        try:
            rule = rule_for(op, ops, view)
        except NoRule as reason:
            refused[op.type] = f"{op.name}: {reason}"
            continue
        assert (len(rule.inputs), len(rule.roles), len(rule.outputs)) == (len(op.inputs), len(op.inputs), len(op.outputs)), op
    if "While" not in " ".join(op.type for op in ops.ops) and not any(op.type == "Enter" for op in ops.ops):
        assert not refused
    candidates = [ops.tensor(t.name) for t in inputs if t.shape.rank is not None]
    sources = find_batch_axis(ops, candidates).sources
    assert set(sources) == {ops.tensor(t.name) for t in inputs if t.shape.rank}
    axis = analyse(ops, sources)
    for tensor in losses + gradients:
        axis.layout(ops.tensor(tensor.name))
