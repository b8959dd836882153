"""Every model builds, learns on its real data, and has the published number of parameters."""
from __future__ import annotations

from typing import Any, Iterable, List, Optional

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import bert, data, gan, layers, resnet, zoo

BATCH = 16
VARIANTS = ("bert-nsp", "moe-top1", "resnet-bottleneck", "m6")  # of models beside them: in the full matrix only
SINGLE_LOSS = [pytest.param(name, marks=pytest.mark.full) if name in VARIANTS else name
               for name in zoo.SMALL if not name.startswith("gan")]

# Parameters as counted in the released checkpoints of the papers' authors or their usual conversions.
PUBLISHED_PARAMETERS = {
    "bert-base": 110106428,
    "bert-large": 336226108,
    "gpt2-small": 124439808,
    "gpt2-medium": 354823168,
    "gpt2-xl": 1557611200,
    "t5-small": 60506624,
    "t5-base": 222903552,
    "t5-large": 737668096,
    "resnet-18": 11689512,
    "resnet-50": 25557032,
    "vgg-16": 138357544,
    "vgg-19": 143667240,
}
# Where the source gives a rounded total only: (total, tolerance).
ROUNDED_PARAMETERS = {
    "moe-32e-10b": (10e9, 0.05),
    "m6-moe-100b": (100e9, 0.05),
    "m6-moe-1t": (1e12, 0.05),
    "m6-10b": (10e9, 0.05),
    "gnmt-16": (291e6, 0.05),
    "unet": (31e6, 0.01),
}


# Models whose twin of the same structure is counted in every run.
ONLY_IN_FULL = {"bert-base", "gpt2-medium", "gpt2-xl", "t5-base", "t5-large", "resnet-18", "m6-moe-100b", "m6-moe-1t"}


def _matrix(names: Iterable[str]) -> List[Any]:
    return [pytest.param(name, marks=pytest.mark.full) if name in ONLY_IN_FULL else name for name in sorted(names)]


def _build(name: str, batch_size: Optional[int], dtype: str = "float32") -> Any:
    entry = zoo.SMALL[name]
    config = entry.config(dtype)
    return entry.module.build(entry.module.inputs(config, batch_size), config)


def _check_plain(graph: tf.Graph, gradients: List[Any]) -> None:
    """Every variable is trained, and nothing in the graph stops or leaves it."""
    assert all(gradient is not None for gradient in gradients)
    assert not [op.name for op in graph.get_operations() if op.type in ("Assert", "PyFunc", "EagerPyFunc")]


def _train_op(loss: tf.Tensor, variables: Optional[List[tf.Variable]] = None) -> tf.Operation:
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        return tf.train.AdamOptimizer(0.01).minimize(loss, var_list=variables)


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("name", SINGLE_LOSS)
def test_loss_decreases_on_real_data(graph: tf.Graph, name: str) -> None:
    steps = 30
    model = _build(name, None)
    train = _train_op(model.loss)
    stream = data.batches(zoo.SMALL[name].examples(zoo.SMALL[name].preset), BATCH)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        losses = [session.run([model.loss, train], dict(zip(model.inputs, next(stream))))[0] for _ in range(steps)]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < 0.97 * np.mean(losses[:5]), losses


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("name", SINGLE_LOSS)
def test_static_and_dynamic_batch_give_the_same_loss_and_gradients(name: str) -> None:
    entry, dtype = zoo.SMALL[name], "float64"
    batch = next(data.batches(entry.examples(entry.config(dtype)), BATCH))
    results, shapes = [], []
    for size in (BATCH, None):
        with tf.Graph().as_default():
            model = _build(name, size, dtype)
            assert model.loss.dtype == dtype and model.loss.shape.ndims == 0
            shapes.append(model.logits.shape.as_list())
            gradients = tf.gradients(model.loss, tf.trainable_variables())
            _check_plain(tf.get_default_graph(), gradients)
            gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                results.append(session.run([model.loss] + gradients, dict(zip(model.inputs, batch))))
    assert shapes[0][0] == BATCH and shapes[1] == [None] + shapes[0][1:]
    for static, dynamic in zip(*results):
        np.testing.assert_allclose(static, dynamic, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [BATCH, None])
@pytest.mark.parametrize("name", ["gan", "gan-penalty"])
def test_gan_graph_is_plain_for_any_batch(graph: tf.Graph, name: str, batch_size: Optional[int]) -> None:
    model = _build(name, batch_size)
    assert model.images.shape.as_list() == [batch_size, 8, 8, 1]
    _check_plain(graph, tf.gradients(model.generator_loss + model.discriminator_loss, tf.trainable_variables()))


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("name", _matrix(PUBLISHED_PARAMETERS))
def test_parameters_equal_the_published_count(graph: tf.Graph, name: str) -> None:
    module, config = zoo.PUBLISHED[name]
    module.build(module.inputs(config, None), config)
    assert layers.num_parameters() == PUBLISHED_PARAMETERS[name]


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("name", _matrix(ROUNDED_PARAMETERS))
def test_parameters_are_near_the_published_total_and_the_graph_is_small(graph: tf.Graph, name: str) -> None:
    module, config = zoo.PUBLISHED[name]
    module.build(module.inputs(config, 8), config)
    total, tolerance = ROUNDED_PARAMETERS[name]
    assert abs(layers.num_parameters() / total - 1.0) < tolerance
    # shapes only: no constant of a parameter's size is in the graph
    assert graph.as_graph_def().ByteSize() < 10 ** 7


@pytest.mark.slow
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_gan_trains_each_network_by_its_own_loss(graph: tf.Graph, penalty: float) -> None:
    config = gan.GanConfig.tiny(penalty)
    model = gan.build(gan.inputs(config), config)
    both = model.generator_variables + model.discriminator_variables
    assert set(both) == set(tf.trainable_variables()) and len(both) == len(tf.trainable_variables())
    stream = data.batches(data.digit_gan_examples(config.noise), 32)
    train_generator = _train_op(model.generator_loss, model.generator_variables)
    train_discriminator = _train_op(model.discriminator_loss, model.discriminator_variables)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run([model.generator_variables, model.discriminator_variables])
        losses = []
        for _ in range(10):
            losses.append(session.run([model.discriminator_loss, train_discriminator],
                                      dict(zip(model.inputs, next(stream))))[0])
        after = session.run([model.generator_variables, model.discriminator_variables])
        assert all(np.array_equal(a, b) for a, b in zip(before[0], after[0]))
        assert not any(np.array_equal(a, b) for a, b in zip(before[1], after[1]))
        assert losses[-1] < losses[0]
        images = session.run([model.images, train_generator], dict(zip(model.inputs, next(stream))))[0]
        assert images.shape == (32, 8, 8, 1) and np.abs(images).max() <= 1.0
        assert not np.array_equal(session.run(model.generator_variables[0]), after[0][0])


@pytest.mark.slow
def test_gradient_penalty_is_half_the_squared_gradient_of_a_linear_score(graph: tf.Graph) -> None:
    weights = np.random.RandomState(0).randn(2 * 2 * 1, 1)
    images = tf.ones([3, 2, 2, 1], tf.float64)
    logits = tf.matmul(tf.reshape(images, [3, 4]), tf.constant(weights))
    with tf.Session() as session:
        assert np.isclose(session.run(gan.gradient_penalty(logits, images)), 0.5 * (weights ** 2).sum())


@pytest.mark.slow
def test_gan_under_an_outer_scope_still_finds_its_variables(graph: tf.Graph) -> None:
    config = gan.GanConfig.tiny()
    with tf.variable_scope("outer"):
        model = gan.build(gan.inputs(config, 4), config)
    assert len(model.generator_variables) == 6 and len(model.discriminator_variables) == 6


@pytest.mark.slow
def test_stages_called_by_hand_are_the_whole_model() -> None:
    config = bert.BertConfig.tiny()
    batch = next(data.batches(data.masked_lm_examples(8, config.seq, config.predictions), 8))

    def by_hand(inputs: data.MaskedLmBatch) -> tf.Tensor:
        with tf.device("/cpu:0"):
            x, table = bert.embed(inputs.tokens, config, inputs.segments)
        for i in range(config.layers):
            with tf.device("/cpu:0"):
                x = bert.encoder_layer(x, config, name="layer_%d" % i)
        return bert.mlm_loss(bert.mlm_head(x, inputs.positions, table, config), inputs)

    losses = []
    for make in (by_hand, lambda inputs: bert.build(inputs, config).loss):
        with tf.Graph().as_default(), tf.Session() as session:
            inputs = bert.inputs(config)
            loss = make(inputs)
            session.run(tf.global_variables_initializer())
            losses.append(session.run(loss, dict(zip(inputs, batch))))
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_models_read_datasets_directly(graph: tf.Graph) -> None:
    config = resnet.ResnetConfig.tiny()
    element = tf.data.make_one_shot_iterator(data.dataset(data.digit_examples(), 32, seed=0)).get_next()
    model = resnet.build(element, config)
    assert model.logits.shape.as_list() == [32, 10]
    train = _train_op(model.loss)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        losses = [session.run([model.loss, train])[0] for _ in range(20)]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])


@pytest.mark.slow
def test_resnet_inference_uses_moving_averages_and_leaves_them(graph: tf.Graph) -> None:
    config = resnet.ResnetConfig.tiny()
    model = resnet.build(resnet.inputs(config), config, training=False)
    assert not tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    images = data.digit_examples().images
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        together = session.run(model.logits, {model.inputs.images: images[:4]})
        alone = session.run(model.logits, {model.inputs.images: images[:1]})
    np.testing.assert_allclose(together[:1], alone, rtol=1e-4, atol=1e-6)
