"""``keras.distribution``: DataParallel and ModelParallel train like local Keras, with variables as the layout map says."""
from __future__ import annotations

import functools
import os
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from tests.functions.equality import clear_keras
from tests.functions.test_split import held
from whale_tf.capture import distribution
from whale_tf.errors import AnnotationError, ClusterError, IdleWarning, PlanError, UnsupportedOpError

keras = tf.keras
if not hasattr(keras, "distribution"):
    pytest.skip("keras.distribution came with Keras 3", allow_module_level=True)

D = keras.distribution
MAP = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None), "head/kernel": (None, "model")}
RNG = np.random.RandomState(0)
X, Y, TABLE = RNG.randn(28, 12), RNG.randint(0, 5, 28), RNG.randn(6, 7)


@pytest.fixture(autouse=True)
def unset(float64: None) -> Any:
    yield
    D.set_distribution(None)


def perceptron(train_step: bool = False) -> Any:
    """Widths that divide evenly by nothing: 13 hidden units, 5 classes."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((12,))
    x = keras.layers.Dense(13, "relu", name="up", kernel_regularizer=keras.regularizers.L2(0.1))(inputs)
    x = keras.layers.Dense(12, name="down")(x)
    x = keras.layers.LayerNormalization(name="norm")(x + inputs)
    outputs = keras.layers.Dense(5, name="head")(x)
    model = (Own if train_step else keras.Model)(inputs, outputs)
    model.get_layer("down").trainable = not train_step  # a frozen layer is divided, too
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0), loss, metrics=None if train_step else ["accuracy"])
    return model


class Own(keras.Model):  # type: ignore[misc, name-defined]
    """A ``train_step`` of its own."""

    def train_step(self, data: Any) -> Dict[str, Any]:
        x, y, *_ = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        return {"loss": loss}


def model_parallel(shape: Tuple[int, ...], layouts: Optional[Dict[str, Any]] = None,
                   axes: Tuple[str, ...] = ("batch", "model"), **arguments: Any) -> Any:
    layout_map = D.LayoutMap(D.DeviceMesh(shape, axes))
    for key, layout in (MAP if layouts is None else layouts).items():
        layout_map[key] = layout
    return D.ModelParallel(layout_map=layout_map, **arguments)


class Outcome(NamedTuple):
    model: Any
    values: List[np.ndarray]


def trained(build: Callable[[], Any], data: Any = None) -> Outcome:
    """What ``fit`` (whose last mini-batch is smaller), ``train_on_batch``, ``evaluate`` and ``predict`` return; variables."""
    current = D.distribution()
    clear_keras()
    D.set_distribution(current)
    model, given = build(), (X, Y) if data is None else (data,)
    history = model.fit(*given, batch_size=8 if data is None else None, epochs=2, shuffle=False, verbose=0,
                        validation_data=(X[:9], Y[:9]) if data is None else data).history
    values = [history, model.train_on_batch(X[:8], Y[:8]), model.evaluate(*given, verbose=0), model.predict(given[0], verbose=0)]
    values += [variable.numpy() for variable in model.variables + model.optimizer.variables]
    return Outcome(model, [np.asarray(value) for value in tf.nest.flatten(values)])


def check_equal(found: Outcome, local: Outcome) -> None:
    assert len(found.values) == len(local.values)
    for one, other in zip(found.values, local.values):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)


@functools.lru_cache(maxsize=None)
def trained_locally(train_step: bool) -> Outcome:
    return trained(lambda: perceptron(train_step))


@pytest.fixture
def local(float64: None) -> Outcome:
    return trained_locally(False)


@pytest.fixture
def local_own(float64: None) -> Outcome:
    return trained_locally(True)


def placed(model: Any, path: str) -> List[Tuple[int, str]]:
    """The elements that each part of a variable holds, and its device; of a variable that no function has in parts, all."""
    value = next(variable for variable in model.variables + model.optimizer.variables if variable.path == path)._value
    record = vars(value).get("_whale_parts")
    parts = [value] if record is None else list(record.parts.values())[-1]
    return [(size, part.device.rpartition("device:")[2]) for size, part in zip(held(parts), parts)]


@pytest.mark.slow
def test_data_parallel(local: Outcome) -> None:
    wh.init(cluster="cpu:4")
    assert D.list_devices() == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"] and D.list_devices("gpu") == []
    assert D.get_device_count() == D.get_device_count("cpu") == 4
    D.set_distribution(D.DataParallel())
    check_equal(trained(perceptron), local)
    plan = wh.current_plan()
    assert plan is not None
    assert [(task.name, task.strategy, task.devices) for task in plan.task_graphs] == [
        ("data_parallel", "replicate", ((0, 1, 2, 3),))]


@pytest.mark.slow
def test_model_parallel(local: Outcome, tmp_path: Any) -> None:
    """Two model replicas of two devices, which also divide a variable.  The distribution of its variables, not the current one,
    says how a model is divided."""
    wh.init(cluster="cpu:4")
    def build() -> Any:
        with model_parallel((2, 2), {**MAP, "down/kernel": ("batch", "model")}).scope():
            return perceptron()
    found = trained(build)
    model = found.model
    check_equal(found, local)
    model.train_on_batch(X[:8], Y[:8])
    even, odd = (12 * 7, "CPU:0"), (12 * 6, "CPU:1")
    kernel, moment = (placed(model, path) for path in ("up/kernel", "adam/up_kernel_momentum"))
    assert kernel == moment == [even, odd]
    tiles = placed(model, "down/kernel")
    assert tiles == placed(model, "adam/down_kernel_momentum")
    assert tiles == [(7 * 6, "CPU:0"), (7 * 6, "CPU:1"), (6 * 6, "CPU:2"), (6 * 6, "CPU:3")]
    assert placed(model, "up/bias") == [(7, "CPU:0"), (6, "CPU:1")] and placed(model, "down/bias") == [(12, "CPU:0")]
    whole = model.predict(X[:1], verbose=0)  # of one example, on the first model replica
    assert vars(model.get_layer("down").kernel._value)["_whale_parts"].held is not None
    plan, text = wh.current_plan(), wh.explain()
    assert plan is not None and plan.num_model_replicas == 2 and plan.task_graphs[0].devices == ((0, 1), (2, 3))
    assert "layout (None, 'model') of variable 'up/kernel'" in text and "shard(dim 1: 7+6)" in text
    assert "layout ('batch', 'model') of variable 'down/kernel'" in text and "tiles(dim 0: 7+6, dim 1: 6+6)" in text
    model.save(os.path.join(str(tmp_path), "model.keras"))
    wh.verify(model, X[:8], Y[:8])
    wh.shutdown()
    again = keras.models.load_model(os.path.join(str(tmp_path), "model.keras"))
    np.testing.assert_allclose(whole, again.predict(X[:1], verbose=0), rtol=1e-11)
    for one, other in zip(model.variables, again.variables):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("config, mesh, layouts, parts", [
    ({"num_micro_batch": 2}, {"batch": 2, "model": 2},
     {**MAP, "norm/output": ("batch", "model"), "head/output": ("batch", None)}, [(12 * 7, 0), (12 * 6, 1)]),
    ({"zero": "v3"}, {"batch": 2, "model": 2}, {**MAP, "down/kernel": ("model", "batch")},
     [(7 * 6, 0), (7 * 6, 2), (6 * 6, 1), (6 * 6, 3)]),
    ({}, {"batch": 1, "a": 2, "b": 2}, {"up/kernel": (None, "b"), "down/kernel": ("a", "b"), "norm/output": ("b", "a")},
     [(7 * 6, 0), (7 * 6, 1), (6 * 6, 2), (6 * 6, 3)])])
def test_configurations(config: Dict[str, Any], mesh: Dict[str, int], layouts: Dict[str, Any], parts: List[Tuple[int, int]],
                        local_own: Outcome) -> None:
    """A ``train_step`` and a frozen layer: layouts of activations, micro-batches, ZeRO along the batch axis, two model axes."""
    wh.init(config, cluster="cpu:4")
    D.set_distribution(model_parallel(tuple(mesh.values()), layouts, tuple(mesh)))
    found = trained(lambda: perceptron(True))
    check_equal(found, local_own)
    found.model.train_on_batch(X[:8], Y[:8])
    assert placed(found.model, "down/kernel") == [(size, f"CPU:{device}") for size, device in parts]
    text = wh.explain()
    kept = [line for line in text.splitlines() if "of tensor" in line]
    assert len(kept) == sum("output" in key for key in layouts)
    assert all("whole" in line if "None" in line else "shard(dim 1:" in line for line in kept)
    assert ("zero v3" in text) == ("zero" in config)


@pytest.mark.slow
def test_generation() -> None:
    """A decoder trains on tokens, whose gradients are sparse, and chooses the next ones in a loop; variables stay in parts."""
    def outcome() -> List[np.ndarray]:
        clear_keras()
        keras.utils.set_random_seed(3)
        inputs = keras.Input((None,), dtype="int32")
        x = keras.layers.Embedding(8, 12, name="tokens")(inputs)
        x += keras.layers.MultiHeadAttention(4, 3, name="attention")(x, x, use_causal_mask=True)
        model = keras.Model(inputs, keras.layers.Dense(8, name="logits")(x))
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        ids = np.random.RandomState(0).randint(0, 8, (8, 6)).astype("int32")
        losses = [model.train_on_batch(ids[:, :-1], ids[:, 1:]) for _ in range(2)]
        text = ids[:1, :2]
        for _ in range(3):
            text = np.concatenate([text, np.argmax(model.predict_on_batch(text)[:, -1:], -1).astype("int32")], 1)
        if D.distribution() is not None:
            for path in ("tokens/embeddings", "attention/query/kernel"):
                value = next(one for one in model.variables if one.path == path)._value
                assert vars(value)["_whale_parts"].held is not None and len(placed(model, path)) == 4
            moments = next(one.path for one in model.optimizer.variables if "tokens_embeddings_momentum" in one.path)
            assert sorted(placed(model, moments)) == [(4 * 6, f"CPU:{device}") for device in range(4)]
        return [np.asarray(one) for one in (losses, text, *[one.numpy() for one in model.variables + model.optimizer.variables])]

    local = outcome()
    wh.init(cluster="cpu:4")
    D.set_distribution(model_parallel((2, 2), {"tokens/embeddings": ("model", "batch"),
                                               "attention/(query|key|value)/kernel": ("batch", "model", None)}))
    for one, other in zip(outcome(), local):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_own_loop() -> None:
    """A tf.function around a layer, a variable with a layout of its own, and ``distribute_tensor``."""
    def losses(is_divided: bool) -> List[np.ndarray]:
        clear_keras()
        keras.utils.set_random_seed(2)
        layout = D.TensorLayout((None, "model"), D.DeviceMesh((1, 3), ("batch", "model"))) if is_divided else None
        if is_divided:
            D.set_distribution(model_parallel((1, 3)))
        table = keras.Variable(TABLE, layout=layout, name="table")
        dense = keras.layers.Dense(4, name="dense")
        dense.build((None, 7))

        @tf.function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                h = tf.gather(table.value, x)
                h = D.distribute_tensor(h, layout) if is_divided else h
                loss = tf.reduce_mean(tf.square(dense(h)))
            grads = tape.gradient(loss, [table.value, dense.kernel.value])
            table.value.assign_sub(0.1 * tf.convert_to_tensor(grads[0]))
            dense.kernel.value.assign_sub(0.1 * grads[1])
            return loss

        found = [step(tf.constant([0, 2, 2, 5])) for _ in range(3)]
        return [np.asarray(one) for one in found] + [table.numpy(), dense.kernel.numpy()]

    expected = losses(False)
    wh.init(cluster="cpu:3")
    with pytest.warns(IdleWarning, match="The layout map divides no variable that it reads"):
        found = losses(True)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    assert "layout (None, 'model') of variable 'table'" in wh.explain() and "shard(dim 1: 3+2+2)" in wh.explain()


def train(layer: Any, x: np.ndarray = X[:8]) -> None:
    layer.build(x.shape)
    layer(x)

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layer(x, training=True)))
        weights = [weight.value for weight in layer.trainable_weights]
        for weight, grad in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(0.1 * grad)
    step(tf.constant(x))


def up() -> Any:
    return keras.layers.Dense(13, name="up")


@pytest.mark.parametrize("make, error, text", [
    (lambda: model_parallel((4,), {"up/kernel": ("batch", None)}, ("batch",)), UnsupportedOpError,
     r"layout \('batch', None\) of variable 'up/kernel' divides dimension 0 over axis 'batch' of DeviceMesh\(\(4,\)"),
    (lambda: model_parallel((2, 2), {}), PlanError, "divides no variable .* 2 devices of a model replica would all do the same"),
    (lambda: model_parallel((2, 2), axes=("model", "batch"), batch_dim_name="batch"), PlanError, "cpu:0, cpu:2, cpu:1, cpu:3 in"),
    (lambda: model_parallel((2, 2), {"up/kernel": ("model", "model")}), UnsupportedOpError, "names axis 'model' twice"),
    (lambda: model_parallel((2, 2), {"up/kernel": (None, None, "model")}), UnsupportedOpError, "3 axes, but .* 2 dimensions"),
    (lambda: model_parallel((2, 2), {**MAP, "up/output": ("model", None)}), UnsupportedOpError, "of tensor .* cannot be kept"),
    (lambda: D.DataParallel(devices=["cpu:0", "cpu:1"]), PlanError, "the mesh has the devices cpu:0, cpu:1, but")])
def test_refused(make: Callable[[], Any], error: Any, text: str) -> None:
    wh.init(cluster="cpu:4")
    D.set_distribution(make())
    with pytest.raises(error, match=text):
        train(up())


@pytest.mark.slow
def test_refused_variables() -> None:
    """Variables that only the step's end writes, or that have fewer elements than devices; annotations; other processes."""
    wh.init(cluster="cpu:4")
    layouts = {"bn/gamma": ("model",), "bn/moving_mean": ("model",), "small/kernel": ("model", None)}
    D.set_distribution(model_parallel((1, 4), layouts))
    with pytest.raises(UnsupportedOpError, match="'bn/moving_mean' cannot be kept, because no op of the forward pass reads it"):
        train(keras.layers.BatchNormalization(name="bn"))
    with pytest.raises(UnsupportedOpError, match="dimension 0, which has 3 elements, over the 4 devices of axis 'model'"):
        train(keras.layers.Dense(8, name="small"), X[:8, :3])
    with wh.replicate():
        layer = keras.layers.Dense(8, name="annotated")
    with pytest.raises(AnnotationError, match="beside a keras.distribution"):
        train(layer)
    with pytest.raises(ClusterError, match="num_processes=2"):
        D.initialize(num_processes=2)
    D.initialize()


def test_restored() -> None:
    """Without whale_tf, Keras has its own library again."""
    wh.init(cluster="cpu:2")
    library = D.list_devices.__globals__
    assert isinstance(library["distribution_lib"], distribution.Backend)
    wh.shutdown()
    assert not isinstance(library["distribution_lib"], distribution.Backend)
