"""Arguments of a function with an open signature that are combined one by one, but have different numbers of rows, are refused
when it runs, by their names."""
from __future__ import annotations

from typing import Any, Callable, Dict, Sequence

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh

PLANS: Dict[str, Dict[str, Any]] = {
    "replicas": {},
    "called": {"emit": "call"},
    "micro_batches": {"num_micro_batch": 2},
    "called_micro_batches": {"num_micro_batch": 2, "emit": "call"},
}


def function(config: Dict[str, Any], combined: Callable, widths: Sequence[Any] = (3, 2), replicas: int = 2) -> Any:
    wh.init(config, cluster="cpu:4")
    w = tf.Variable(np.linspace(-1, 1, 6).reshape(3, 2))

    @tf.function(input_signature=[tf.TensorSpec([None, width], tf.float64) for width in widths])
    def step(x: tf.Tensor, *more: tf.Tensor) -> Any:
        with tf.GradientTape() as tape, wh.replicate(replicas):
            loss = tf.reduce_mean(tf.square(combined(tf.matmul(x, w, name="product"), *more)))
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    return step


def ones(*shapes: Any) -> Any:
    return [tf.ones(shape, tf.float64) for shape in shapes]


def in_a_loop(h: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda i, h: i < 2, lambda i, h: [i + 1, h * 0.5 - y], [tf.constant(0), h])[1]


def in_a_condition(h: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.cond(tf.reduce_sum(y) < 1e9, lambda: h - y, lambda: h * 2)


def in_a_function(h: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.function(lambda h, y: tf.exp(-h) - y)(h, y)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("combined", [tf.subtract, in_a_loop, in_a_condition, in_a_function])
def test_different_sizes(plan: str, combined: Callable) -> None:
    step = function(PLANS[plan], combined)
    assert np.isfinite(step(*ones([8, 3], [8, 2])))
    text = r"'\w+:0' has 11 examples, but '\w+:0' has 8 in .* op '.*' combines them; .* wh.batch_axis"
    with pytest.raises(wh.InputError, match=text):
        step(*ones([8, 3], [11, 2]))
    with pytest.raises(wh.InputError, match=r"'\w+:0' has 16 examples, but '\w+:0' has 8 in "):  # the same part of both
        step(*ones([8, 3], [16, 2]))


@pytest.mark.parametrize("plan", PLANS)
def test_three_inputs(plan: str) -> None:
    """The third is combined with the second, and only by that with the first."""
    step = function(PLANS[plan], lambda h, y, z: tf.concat([h - y, y * z], 1), (3, 2, 2))
    assert np.isfinite(step(*ones([8, 3], [8, 2], [8, 2])))
    with pytest.raises(wh.InputError, match=r"'\w+:0' has 12 examples, but '\w+:0' has 8 in the same mini-batch"):
        step(*ones([8, 3], [8, 2], [12, 2]))


def test_batches_of_their_own_may_differ() -> None:
    step = function({}, lambda h, y: tf.concat([h, y], 0))
    losses = [float(step(*ones([8, 3], [rows, 2]))) for rows in (8, 12)]
    wh.shutdown()
    step = function({}, lambda h, y: tf.concat([h, y], 0), replicas=1)
    np.testing.assert_allclose(losses, [float(step(*ones([8, 3], [rows, 2]))) for rows in (8, 12)], rtol=1e-12)


@pytest.mark.parametrize("plan", PLANS)
def test_operands_that_do_not_fit(plan: str) -> None:
    step = function(PLANS[plan], lambda h: h, (None,))
    with pytest.raises(wh.InputError, match=r"op 'product' fails in a part of .*\[\d,5\].*wh.batch_axis|emit to 'inline'"):
        step(*ones([8, 5]))


def test_assertions_of_the_script_stay() -> None:
    def checked(h: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([tf.debugging.assert_less(h, tf.constant(-1e9, tf.float64), message="of a size of my own")]):
            return tf.identity(h)

    step = function({}, checked, (3,))
    with pytest.raises(tf.errors.InvalidArgumentError, match="of a size of my own"):
        step(*ones([8, 3]))


@pytest.mark.parametrize("rows", [(8, 24), (8, 20), (8, 20, 12), (16, 3)], ids=str)
def test_inputs_of_other_known_sizes(rows: Sequence[int]) -> None:
    """Labelled and more unlabelled examples: all are divided, in as many rows an example or as examples of their own.  Fewer than
    the labelled ones, which may be too few for all devices, are not."""
    rng = np.random.RandomState(0)
    labelled, *others = [tf.constant(rng.randn(size, 6)) for size in rows]
    data = labelled, tf.constant(rng.randn(rows[0], 2)), *others

    def trained(devices: int) -> Any:
        if devices > 1:
            wh.init(cluster=f"cpu:{devices}")
        w, v = tf.Variable(rng.randn(6, 4)), tf.Variable(rng.randn(4, 2))
        w.assign(np.linspace(-1, 1, 24).reshape(6, 4))
        v.assign(np.linspace(1, -1, 8).reshape(4, 2))

        @tf.function
        def step(x: tf.Tensor, y: tf.Tensor, *unlabelled: tf.Tensor) -> tf.Tensor:
            def outputs(x: tf.Tensor) -> tf.Tensor:
                return tf.matmul(tf.tanh(tf.matmul(x, w)), v)

            def covariance(z: tf.Tensor) -> tf.Tensor:
                z -= tf.reduce_mean(z, 0)
                return tf.matmul(z, z, transpose_a=True) / (tf.cast(tf.shape(z)[0], tf.float64) - 1.0)

            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(outputs(x) - y))
                for one in unlabelled:
                    loss += 0.5 * tf.reduce_mean(tf.square(outputs(one) - outputs(0.9 * one)))
                    if rows[0] <= min(rows):
                        loss += tf.reduce_sum(tf.square(covariance(outputs(x)) - covariance(outputs(one))))
            for variable, gradient in zip((w, v), tape.gradient(loss, (w, v))):
                variable.assign_sub(0.1 * gradient)
            return loss

        return [*(step(*data).numpy() for _ in range(2)), w.numpy(), v.numpy()]

    local, parallel = trained(1), trained(4)
    for one, other in zip(local, parallel):
        np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-14)
    assert ("100% of the floating-point operations" in wh.explain()) == (rows[0] <= min(rows))
