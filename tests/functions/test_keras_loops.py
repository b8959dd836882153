"""Loops in functions that do not train: their bodies are divided as the layouts of their variables say."""
from __future__ import annotations

import re
import warnings
from typing import Any, Callable, Dict, List, Set, Tuple

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from tests.functions.equality import clear_keras
from tests.functions.test_keras_distribution import D, X, keras, model_parallel, perceptron, unset

ops = keras.ops
__all__ = ["unset"]  # a fixture of every test
LENGTH, WORDS = 7, 8
IDS = np.random.RandomState(0).randint(0, WORDS, (3, LENGTH)).astype("int32")
LAYOUTS = {"tokens/embeddings": ("model", "batch"), "attention/(query|key|value)/kernel": ("batch", "model", None),
           "logits/kernel": (None, "model")}


def decoder() -> Any:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(WORDS, 12, name="tokens")(inputs)
    x += keras.layers.MultiHeadAttention(4, 3, name="attention")(x, x, use_causal_mask=True)
    return keras.Model(inputs, keras.layers.Dense(WORDS, name="logits")(x))


def generation(model: Any, seed: Any = None) -> Any:
    """A function that completes texts from their third token on, and stops early if all have had a zero, like KerasHub's
    ``generate``: with a pass over the prompt in front of the loop, and a generator of seeds that the loop's body writes."""
    @tf.function
    def generate(ids: tf.Tensor) -> Any:
        state = ops.cumsum(model(ids)[:, 0], axis=-1)  # carried by the loop, of a float type

        def body(ids: tf.Tensor, state: tf.Tensor, index: tf.Tensor) -> Any:
            logits = ops.take(model(ids), index - 1, axis=1) + 0.1 * state
            if seed is None:
                token = ops.argmax(logits, -1)
            else:
                token = keras.random.categorical(logits, 1, seed=seed)[:, 0]
            ids = ops.slice_update(ids, [0, index], ops.cast(token, "int32")[:, None])
            return ids, 0.5 * state + logits, index + 1

        def condition(ids: tf.Tensor, state: tf.Tensor, index: tf.Tensor) -> Any:
            return ops.logical_not(ops.all(ops.any(ops.equal(ids[:, :LENGTH], -1), -1)))

        return ops.while_loop(condition, body, (ids, state, ops.convert_to_tensor(3)), maximum_iterations=LENGTH - 3)[:2]
    return generate


def functions_devices(function: Any, *given: Any) -> Set[str]:
    """Devices of ops in the bodies of a function's divided loops."""
    library = function.get_concrete_function(*given).graph.as_graph_def().library.function
    return {node.device.rpartition("device:")[2] for one in library if "_divided_" in one.signature.name for node in one.node_def
            if node.device}


def run(is_sampled: bool) -> List[np.ndarray]:
    model = decoder()
    seed = keras.random.SeedGenerator(5) if is_sampled else None
    generate = generation(model, seed)
    found = [one for _ in range(2) for one in generate(tf.constant(IDS))]
    if D.distribution() is not None:
        counts = {"tokens/embeddings": 4, "attention/query/kernel": 4, "logits/kernel": 2}
        for path, count in counts.items():
            record = vars(next(one for one in model.variables if one.path == path)._value)["_whale_parts"]
            assert record.held is not None and len(record.parts[record.held]) == count
        assert functions_devices(generate, tf.constant(IDS)) >= {"CPU:0", "CPU:1", "CPU:2", "CPU:3"}
    return [np.asarray(one) for one in [*found, *(() if seed is None else [seed.state])]]


@pytest.mark.slow
@pytest.mark.parametrize("is_sampled", [False, True])
def test_generation(is_sampled: bool) -> None:
    """Greedy, and sampled with a seed that each iteration changes: the same tokens and the same state, and no variable is put
    together."""
    local = run(is_sampled)
    wh.init(cluster="cpu:4")
    clear_keras()
    D.set_distribution(model_parallel((2, 2), LAYOUTS))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = run(is_sampled)
    for one, other in zip(found, local):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)
    assert not is_sampled or any((one != other).any() for one, other in zip(local[0], local[2]))  # the seed went on


def nested(model: Any) -> Any:
    """A loop in a loop, and nothing else that reads the variables."""
    def inner(x: tf.Tensor) -> Any:
        return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, model(x)[:, :1] * x), [0, x])[1]

    return tf.function(lambda x: tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, inner(x) + 1.0), [0, x])[1])


def conditional(model: Any) -> Any:
    return tf.function(lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: model(x), lambda: 2.0 * model(x)))


def in_condition(model: Any) -> Any:
    kernel = model.get_layer("up").kernel
    return tf.function(lambda x: tf.while_loop(
        lambda i, x: i + tf.reduce_sum(tf.abs(kernel.value)) < 1e3, lambda i, x: (i + 400.0, model(x)[:, :1] * x),
        [tf.constant(0.0, tf.float64), x])[1])


WARNINGS: Dict[Callable[..., Any], str] = {
    nested: "", conditional: r"0% of the step's floating-point operations are divided .* 'cond/of_values' \(If\)",
    in_condition: "puts its variables together on one device.* the condition of loop 'while' .* takes variable"}


@pytest.mark.slow
@pytest.mark.parametrize("make", WARNINGS)
def test_others(make: Callable[..., Any]) -> None:
    """A loop in a loop is divided.  A condition that computes with divided variables does so on one device, and a loop's
    condition that reads one puts the variables together, as warnings say."""
    x = tf.constant(X[:5])
    local = make(perceptron())(x)
    wh.init(cluster="cpu:4")
    clear_keras()
    D.set_distribution(model_parallel((2, 2)))
    model, text = perceptron(), WARNINGS[make]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        np.testing.assert_allclose(make(model)(x), local, rtol=1e-11)
    said = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    assert len(said) == bool(text)
    assert not text or re.search(text, said[0])
    value = model.get_layer("up").kernel._value
    assert ("_whale_parts" in vars(value) and vars(value)["_whale_parts"].held is not None) == (make is not in_condition)


RECURRENT: Dict[str, Tuple[Any, Tuple[int, int], bool]] = {  # layer, mesh, whether its products are divided in training
    "LSTM": (lambda: keras.layers.LSTM(4, name="layer"), (1, 2), True),
    "GRU with dropout": (lambda: keras.layers.GRU(5, name="layer", dropout=0.3, seed=3), (2, 2), True),
    "products with slices of kernels": (
        lambda: keras.layers.LSTM(4, name="layer", recurrent_dropout=0.3, seed=3), (1, 2), False)}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name: str) -> None:
    """In training, the loops of layer and gradient take parts of the kernels.  Keras calls a recurrent layer's cell once outside
    of its loop, for a result that nothing needs."""
    layer, mesh, is_divided = RECURRENT[name]
    x, y = np.random.RandomState(0).rand(8, 4, 3), np.random.RandomState(1).rand(8, 2)

    def trained() -> List[np.ndarray]:
        keras.utils.set_random_seed(5)
        inputs = keras.Input((4, 3))
        model = keras.Model(inputs, keras.layers.Dense(2, name="last")(layer()(inputs)))
        model.compile(keras.optimizers.Adam(0.1), "mse")
        found = [model.train_on_batch(x, y) for _ in range(3)] + (
            [model.test_on_batch(x[:6], y[:6])] if is_divided else [])
        return [np.array(value) for value in [*found, *model.variables]]

    local = trained()
    wh.init(cluster=f"cpu:{mesh[0] * mesh[1]}")
    clear_keras()
    D.set_distribution(model_parallel(mesh, {"layer.*kernel": (None, "model"), "last/kernel": ("model", None)}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for one, other in zip(trained(), local):
            np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-13)
    said = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    assert is_divided != any("floating-point operations are divided" in text and "while_grad" in text for text in said), said
    assert not (is_divided and said)
