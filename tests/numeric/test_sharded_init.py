"""``init: sharded``: initial values are made in parts, and are the local script's wherever a generator can be advanced."""
from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.numeric.equality import TOLERANCE, relative
from whale_tf.ir.parts import even_sizes
from whale_tf.patterns.spread import shard
from whale_tf.transforms.shard.initial import BLOCKS, blocks

pytestmark = pytest.mark.half
Initializer = Callable[..., tf.Tensor]
Values = Dict[str, np.ndarray]

EXACT: Dict[str, Initializer] = {
    "uniform": tf.random_uniform_initializer(-2.0, 3.0),
    "normal": tf.random_normal_initializer(0.5, 0.1),
    "truncated": tf.truncated_normal_initializer(stddev=0.2),
    "glorot": tf.glorot_uniform_initializer(seed=5),
    "scaled": tf.variance_scaling_initializer(),
    "constant": tf.constant_initializer(0.25),
    "ones": tf.ones_initializer(),
    "numbers": lambda shape, dtype=None, partition_info=None: tf.constant(
        np.arange(np.prod(shape)).reshape(shape) / np.prod(shape), dtype),
    "expression": lambda shape, dtype=None, partition_info=None: tf.cast(tf.tanh(tf.random_normal(shape, dtype=dtype, seed=3)) * (
        tf.cast(tf.range(shape[-1]), dtype) if len(shape) > 1 else 2.0) > 1.5, dtype) - 0.5,  # a small tensor in it
}


class Ran(NamedTuple):
    """``initial`` and ``final``: every variable before and after two steps."""

    initial: Values
    final: Values
    losses: List[float]
    explained: str
    plan: Any


def model(initializer: Initializer, dtype: str, scopes: Tuple[Callable[[], Any], ...]) -> Tuple[tf.Tensor, tf.Tensor]:
    """A convolution, experts and a dense layer, each of another rank and width."""
    def variable(name: str, *shape: int) -> tf.Tensor:
        return tf.get_variable(name, shape, dtype, initializer=initializer)

    x = tf.placeholder(dtype, [None, 5, 5, 7], name="x")
    with scopes[0]():
        maps = tf.nn.conv2d(x, variable("filters", 3, 3, 7, 10), strides=[1, 1, 1, 1], padding="VALID", name="convolution")
    with scopes[-1]():
        experts = tf.einsum("bd,edh->beh", tf.reduce_mean(tf.tanh(maps), [1, 2]), variable("experts", 5, 10, 6), name="mixture")
        y = tf.tanh(tf.matmul(tf.reshape(experts, [-1, 30]), variable("kernel", 30, 11), name="classes") + variable("bias", 11))
    return x, tf.reduce_mean(tf.square(y))


def run(initializer: Initializer, count: int = 0, total: int = 0, dtype: str = "float32", resource: bool = True,
        init: str = "sharded", force: Any = None, plan: Any = None, seed: bool = True, micro_batches: int = 1) -> Ran:
    """Two steps of Adam.

    Args:
        count: devices of ``wh.split``; 0: the local script.
    """
    if count:
        config = {"init": init, "patterns.force": force, "num_micro_batch": micro_batches}
        wh.init(config, cluster=f"cpu:{total or count}", plan=plan)
    try:
        with tf.Graph().as_default(), tf.variable_scope("", use_resource=resource):
            if seed:
                tf.set_random_seed(11)
            scope = functools.partial(wh.split, count) if count else functools.partial(tf.name_scope, None)
            x, loss = model(initializer, dtype, (scope,))
            update = tf.train.AdamOptimizer(0.01, epsilon=1e-4).minimize(loss)
            variables = {v.name: v for v in tf.global_variables()}
            feed = {x: np.linspace(-1.0, 1.0, 8 * 175).reshape(8, 5, 5, 7)}
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                initial = session.run(variables)
                losses = [session.run([loss, update], feed)[0] for _ in range(2)]
                final = session.run(variables)
            return Ran(initial, final, losses, wh.explain() if count else "", wh.current_plan() if count else None)
    finally:
        wh.shutdown()


@functools.lru_cache(maxsize=None)
def local(name: str, dtype: str = "float32", resource: bool = True) -> Ran:
    """Seeds follow from how many ops there are, which differs between the kinds of variables."""
    return run(EXACT[name], dtype=dtype, resource=resource)


def assert_same(ran: Ran, expected: Ran, tolerance: float) -> None:
    assert set(ran.initial) == set(expected.initial)
    for name, value in expected.initial.items():
        np.testing.assert_array_equal(ran.initial[name], value, name)
    assert max(relative(a, b) for a, b in zip(ran.losses, expected.losses)) <= tolerance
    assert "Exact:" in ran.explained


FORCES: Dict[str, Dict[str, str]] = {
    "last": {"convolution": "output_channel", "classes": "column"},
    "inner": {"convolution": "input_channel", "classes": "row"},
}


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("name,count,force,resource", [
    pytest.param(name, *plan, marks=[] if (i + j) % 2 or name in ("uniform", "normal", "truncated") else [pytest.mark.full])
    for i, name in enumerate(sorted(EXACT)) for j, plan in enumerate([(2, "last", True), (3, "inner", False)])])
def test_parts_are_slices_of_the_local_values(name: str, count: int, force: str, resource: bool) -> None:
    """Runs of the stream (first dimension), of several rows (few before the divided dimension), and blocks of many: each of what
    is drawn, and one of what is not."""
    ran = run(EXACT[name], count, resource=resource, force=FORCES[force])
    assert ran.plan.shards["classes"] == FORCES[force]["classes"]
    assert_same(ran, local(name, resource=resource), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uniform", "normal", "truncated"])
def test_double_precision(name: str) -> None:
    """Two numbers a counter instead of four."""
    assert_same(run(EXACT[name], 3, dtype="float64", force=FORCES["last"]), local(name, "float64"), TOLERANCE["float64"])


@pytest.mark.slow
def test_nested_replicas_start_equal() -> None:
    """Parts are drawn once and copied to the other model replica."""
    ran, expected = run(EXACT["truncated"], 2, total=4, dtype="float64", micro_batches=2), local("truncated", "float64")
    assert_same(ran, expected, TOLERANCE["float64"])
    for name, value in expected.final.items():
        np.testing.assert_allclose(ran.final[name], value, 1e-8, 1e-10, err_msg=name)


@pytest.mark.slow
def test_initializer_that_is_built_after_the_rewrite() -> None:
    wh.init({"init": "sharded"}, cluster="cpu:2")
    try:
        with tf.Graph().as_default():
            with wh.split(2):
                x, loss = model(EXACT["uniform"], "float32", (functools.partial(tf.name_scope, None),))
            update = tf.train.AdamOptimizer(0.01).minimize(loss)
            wh.parallelize()
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                assert np.isfinite(session.run([loss, update], {x: np.ones([2, 5, 5, 7])})[0])
    finally:
        wh.shutdown()


@pytest.mark.slow
def test_plan_says_how_values_are_made() -> None:
    plan = run(EXACT["uniform"], 2).plan
    assert plan.init == "sharded"
    again = run(EXACT["uniform"], 2, init="exact", plan=plan.to_json())
    assert again.plan == plan
    with pytest.raises(wh.PlanError, match="init is 'sliced', expected 'exact' or 'sharded'"):
        run(EXACT["uniform"], 2, plan=plan.to_json().replace('"sharded"', '"sliced"'))


def _signs(shape: Any, dtype: Any = None, partition_info: Any = None) -> tf.Tensor:
    return tf.cast(tf.random_uniform(shape, 0, 1000, tf.int32, name="signs"), dtype)


@pytest.mark.slow
def test_what_cannot_be_advanced_is_drawn_anew_and_named() -> None:
    """Whole numbers between bounds: same distribution, other values, and no shard repeats another's."""
    ran, expected = run(_signs, 2, force=FORCES["last"]), run(_signs)
    assert "Not exactly the local result" in ran.explained
    assert "different initial values from the same distribution" in ran.explained
    assert "kernel/Initializer/signs" in ran.explained
    again = run(_signs, 2, force=FORCES["last"])
    kernel, other = ran.initial["kernel:0"], expected.initial["kernel:0"]
    assert kernel.shape == other.shape and not np.array_equal(kernel, other)
    np.testing.assert_array_equal(kernel, again.initial["kernel:0"])
    assert 0 <= kernel.min() and kernel.max() < 1000 and abs(kernel.mean() - 500) < 60
    assert np.mean(kernel[:, :5] == kernel[:, 6:]) < 0.1


def _stateless_signs(shape: Any, dtype: Any = None, partition_info: Any = None) -> tf.Tensor:
    return tf.cast(tf.random.stateless_uniform(shape, [3, 5], 0, 1000, tf.int32), dtype)


def test_stateless_whole_numbers_are_drawn_anew_for_each_part() -> None:
    kernel = run(_stateless_signs, 2, force=FORCES["last"]).initial["kernel:0"]
    assert 0 <= kernel.min() and kernel.max() < 1000 and np.mean(kernel[:, :5] == kernel[:, 6:]) < 0.1


def _stateless(shape: Any, dtype: Any = None, partition_info: Any = None) -> tf.Tensor:
    return 0.1 * tf.random.stateless_normal(shape, [3, 4], dtype=dtype)


@pytest.mark.slow
def test_stateless_draws() -> None:
    """They can be advanced where the op takes a key and a counter."""
    ran, expected = run(_stateless, 3, force=FORCES["last"]), run(_stateless)
    kernel, other = ran.initial["kernel:0"], expected.initial["kernel:0"]
    assert np.array_equal(kernel, other) == ("Exact:" in ran.explained)
    if hasattr(tf.raw_ops, "StatelessRandomNormalV2"):
        np.testing.assert_array_equal(kernel, other)
    else:
        assert "random_normal/StatelessRandomNormal: different initial values" in ran.explained
        assert not np.array_equal(kernel[:, :4], kernel[:, 4:8]) and abs(kernel.std() - 0.1) < 0.02


@pytest.mark.slow
def test_without_a_seed_shards_differ() -> None:
    kernel = run(EXACT["normal"], 2, seed=False, force=FORCES["last"]).initial["kernel:0"]
    assert not np.array_equal(kernel[:, :5], kernel[:, 6:]) and abs(kernel.std() - 0.1) < 0.02


def _orthogonal(shape: Any, dtype: Any = None, partition_info: Any = None) -> tf.Tensor:
    return tf.orthogonal_initializer()(shape, dtype) if len(shape) == 2 else tf.constant(0.1, dtype, shape)


@pytest.mark.slow
def test_refuses_values_that_are_whole() -> None:
    message = r"initial value of 'kernel'.*cannot be made in parts: op 'kernel/.*\(.*init 'exact'"
    with pytest.raises(wh.UnsupportedOpError, match=message):
        run(_orthogonal, 2)


@pytest.mark.slow
@pytest.mark.parametrize("resource", [True, False])
def test_value_that_is_fed(resource: bool) -> None:
    """``load`` feeds the initial value; its parts are then slices of it."""
    wh.init({"init": "sharded"}, cluster="cpu:3")
    try:
        with tf.Graph().as_default(), tf.variable_scope("", use_resource=resource):
            tf.set_random_seed(11)
            with wh.split(3):
                x, loss = model(EXACT["uniform"], "float32", (functools.partial(tf.name_scope, None),))
            update = tf.train.GradientDescentOptimizer(0.0).minimize(loss)
            kernel = next(v for v in tf.trainable_variables() if v.op.name == "kernel")
            value = np.random.RandomState(0).rand(30, 11).astype("float32")
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                first = session.run(kernel)
                kernel.load(value, session)
                np.testing.assert_array_equal(session.run(kernel), value)
                session.run(update, {x: np.zeros([2, 5, 5, 7])})
                np.testing.assert_array_equal(session.run(kernel), value)
                session.run(kernel.initializer)
                np.testing.assert_array_equal(session.run(kernel), first)
                with pytest.raises(wh.UnsupportedOpError, match="is fed, but"):
                    session.run(tf.global_variables_initializer(), {kernel.initializer.inputs[1]: value})
    finally:
        wh.shutdown()


@pytest.mark.parametrize("shape,dim,count", [((10, 3), 0, 3), ((4, 10), 1, 3), ((100, 10), 1, 4), ((3, 3, 7, 8), 2, 3)])
def test_blocks_cover_each_part(shape: Tuple[int, ...], dim: int, count: int) -> None:
    flat = np.arange(np.prod(shape))
    spread = shard(dim, even_sizes(shape[dim], count))
    for i, part in enumerate(np.split(flat.reshape(shape), np.cumsum(spread.sizes)[:-1], dim)):
        found = [flat[b.begin:b.begin + b.rows * b.width].reshape(b.rows, -1) for b in blocks(shape, spread, i)]
        width = part.size // int(np.prod(shape[:dim]))
        start = spread.starts[i] * width // spread.sizes[i]
        own = [rows if rows.shape[1] == width else rows[:, start:start + width] for rows in found]
        np.testing.assert_array_equal(np.concatenate([rows.ravel() for rows in own]), part.ravel())
        assert len(found) <= BLOCKS and max(rows.size for rows in found) <= max(part.size, -(-flat.size // BLOCKS) * 2)
