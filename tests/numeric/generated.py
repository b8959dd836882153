"""Random layered models with random annotations, as hypothesis strategies."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import hypothesis.strategies as st
import numpy as np
import tensorflow.compat.v1 as tf

from tests.numeric.cases import Case, mean_of_weighted
from tests.numeric.generated_losses import is_together, loss_of
from tests.numeric.plans import SCHEDULES, Parallel, Shape
from tests.numeric.script import Arrays, Script, Setting, Stages, dense, rng, weight

STEPS = 3
WIDTH = 4
MAX_DEVICES = 6


class Layer(NamedTuple):
    """One block: ``kind`` of ``LAYERS``, on the newest tensor and one from ``back`` blocks ago."""

    kind: str
    back: int


class Model(NamedTuple):
    """A script, its plan and its data."""

    layers: Tuple[Layer, ...]
    loss: str
    optimizer: str
    sizes: Tuple[int, ...]
    setting: Setting
    parallel: Parallel


# -- blocks: (x, an earlier tensor, a name) -> `[B, WIDTH]` ------------------------------------------------------------


def _normalise(x: tf.Tensor, earlier: tf.Tensor, name: str) -> tf.Tensor:
    centred = x - tf.reduce_mean(x, -1, keepdims=True)
    gain = weight(name + "_gain", [WIDTH], "float64", 1.0)
    return centred * tf.rsqrt(tf.reduce_mean(tf.square(centred), -1, keepdims=True) + 0.1) * gain


def _attend(x: tf.Tensor, earlier: tf.Tensor, name: str) -> tf.Tensor:
    """Attention of two halves of x over each other, per example."""
    parts = tf.reshape(x, [-1, 2, WIDTH // 2])
    scores = tf.nn.softmax(tf.matmul(parts, tf.reshape(earlier, [-1, 2, WIDTH // 2]), transpose_b=True))
    return dense(tf.reshape(tf.matmul(scores, parts), [-1, WIDTH]), WIDTH, name)


def _loop(x: tf.Tensor, earlier: tf.Tensor, name: str) -> tf.Tensor:
    kernel = weight(name + "_kernel", [WIDTH, WIDTH], "float64")
    return tf.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, tf.sin(tf.matmul(h, kernel))), [0, x])[1]


def _transposed(x: tf.Tensor, earlier: tf.Tensor, name: str) -> tf.Tensor:
    """The batch is the last dimension for a while."""
    columns = tf.matmul(weight(name + "_kernel", [WIDTH, WIDTH], "float64"), x, transpose_b=True)
    return tf.transpose(tf.tanh(columns))


def _packed(x: tf.Tensor, earlier: tf.Tensor, name: str) -> tf.Tensor:
    return tf.reduce_mean(tf.stack([x, earlier, -x], 1), 1) + tf.unstack(x, axis=1)[0][:, None]


def _mixed(x: tf.Tensor, earlier: tf.Tensor, name: str) -> tf.Tensor:
    left, right = tf.split(tf.concat([x, earlier], 1), 2, 1)
    return tf.where(tf.greater(left, right), left * 1.5, tf.stop_gradient(right) - left)


LAYERS: Dict[str, Callable[[tf.Tensor, tf.Tensor, str], tf.Tensor]] = {
    "tanh": lambda x, earlier, name: tf.tanh(dense(x, WIDTH, name)),
    "relu": lambda x, earlier, name: tf.nn.relu(dense(x, WIDTH, name)),
    "residual": lambda x, earlier, name: x + dense(earlier, WIDTH, name),
    "concat": lambda x, earlier, name: dense(tf.concat([x, earlier], 1), WIDTH, name),
    "gate": lambda x, earlier, name: earlier * tf.sigmoid(dense(x, WIDTH, name)),
    "tied": lambda x, earlier, name: tf.tanh(dense(x, WIDTH, "tied")),
    "plain": lambda x, earlier, name: tf.sin(x) + 0.5 * earlier,
    "pack": _packed,
    "normalise": _normalise,
    "attend": _attend,
    "loop": _loop,
    "transposed": _transposed,
    "mixed": _mixed,
}


# -- losses ------------------------------------------------------------------------------------------------------------

Inputs = Dict[str, tf.Tensor]

LOSSES: Dict[str, Callable[[tf.Tensor, Inputs], tf.Tensor]] = {
    "mean": lambda y, inputs: tf.reduce_mean(tf.square(y - inputs["target"])),
    "sum": lambda y, inputs: 0.1 * tf.reduce_sum(tf.square(y - inputs["target"])),
    "mean_of_sums": lambda y, inputs: tf.reduce_mean(tf.reduce_sum(tf.square(y - inputs["target"]), 1)),
    "weighted": lambda y, inputs: mean_of_weighted(tf.square(y - inputs["target"])[:, 0], inputs["weight"]),
    "mean_with_l2": lambda y, inputs: LOSSES["mean"](y, inputs) + 0.1 * _l2(),
    "sum_with_l2": lambda y, inputs: LOSSES["sum"](y, inputs) + 0.1 * _l2(),
    "two": lambda y, inputs: LOSSES["mean"](y, inputs) + 2.0 * LOSSES["sum"](tf.tanh(y), inputs),
}

OPTIMIZERS: Dict[str, Callable[[], tf.train.Optimizer]] = {
    "sgd": lambda: tf.train.GradientDescentOptimizer(0.05),
    "momentum": lambda: tf.train.MomentumOptimizer(0.02, 0.9),
    "adam": lambda: tf.train.AdamOptimizer(0.01, epsilon=1e-3),
    "rmsprop": lambda: tf.train.RMSPropOptimizer(0.01, epsilon=1e-3),
}


def _l2() -> tf.Tensor:
    return tf.add_n([tf.nn.l2_loss(v) for v in tf.trainable_variables()])


# -- the case ----------------------------------------------------------------------------------------------------------


def _examples(count: int, dtype: str) -> Arrays:
    r = rng("generated")
    return {"x": r.randn(count, WIDTH).astype(dtype), "target": r.randn(count, WIDTH).astype(dtype),
            "weight": (r.rand(count) * (r.rand(count) > 0.25) + 0.01).astype(dtype)}


def case_of(model: Model) -> Case:
    """The model as a case for the equality harness."""
    def build(inputs: Inputs, stages: Stages, dtype: str) -> Script:
        def block(index: int, layer: Layer) -> Callable[[List[tf.Tensor]], List[tf.Tensor]]:
            def apply(history: List[tf.Tensor]) -> List[tf.Tensor]:
                earlier = history[max(0, len(history) - 1 - layer.back)]
                return history + [LAYERS[layer.kind](history[-1], earlier, f"l{index}")]

            return apply

        blocks = [lambda x: [tf.tanh(dense(x, WIDTH, "first"))]]
        blocks += [block(i, layer) for i, layer in enumerate(model.layers)]
        history = stages.run(blocks, inputs["x"])
        loss = (LOSSES.get(model.loss) or loss_of(model.loss))(history[-1], inputs)
        optimizer = OPTIMIZERS[model.optimizer]()
        gradients = optimizer.compute_gradients(loss)
        # As in cases.sum_with_l2; but not around the gradients, where the counter of a v1 loop would wait for what comes
        # after the loop: TensorFlow itself stops then (always with more than parallel_iterations, 10, iterations).
        with tf.control_dependencies([loss]):
            update = optimizer.apply_gradients(gradients)
        return Script([[update]], {"loss": loss}, {"y": history[-1]})

    return Case(_examples, build, sizes=model.sizes)


@st.composite
def models(draw: Any, losses: Any = st.sampled_from(sorted(LOSSES))) -> Model:  # noqa: B008 (a strategy is a value)
    """Models with 2 to 7 blocks in 1 to 4 stages on at most 6 devices, all float64."""
    loss = draw(losses)
    any_layer = st.builds(Layer, st.sampled_from(sorted(LAYERS)), st.integers(0, 3))
    layers = tuple(draw(st.lists(any_layer, min_size=1, max_size=6)))
    num_cuts = min(draw(st.sampled_from([1, 0, 2, 3])), len(layers))
    cuts = tuple(sorted(draw(st.sets(st.integers(1, len(layers)), min_size=num_cuts, max_size=num_cuts))))
    room = MAX_DEVICES - len(cuts) - 1
    counts = []
    for _ in range(len(cuts) + 1):
        extra = draw(st.integers(0, min(2, room)))
        room -= extra
        counts.append(1 + extra)
    nested = draw(st.sampled_from([1, 1, 2])) if sum(counts) <= MAX_DEVICES // 2 else 1
    micro_batches = draw(st.sampled_from([1, 2, 3, 4]))
    setting = Setting(resource=draw(st.booleans()), static_batch=draw(st.booleans()), dataset=draw(st.booleans()),
                      runner=draw(st.sampled_from(["session", "callable", "monitored"])))
    if is_together(loss) and setting.dataset:
        nested = 1  # model replicas' own mini-batches are not put together
    unit = micro_batches * int(np.lcm.reduce(counts)) * (1 if setting.dataset else nested)
    least = 2 if setting.static_batch else 1  # shapes do not tell a batch of one from a broadcast: see rewrite.passes
    size = unit * draw(st.integers(-(-least // unit), max(1, 24 // unit)))
    last = size
    if not setting.static_batch and not (setting.dataset and nested > 1):  # ragged; a dataset's last is the smaller
        last = draw(st.integers(unit, size if setting.dataset else size + 7))
    config = {"variables": draw(st.sampled_from(["auto", "mirrored"])), "emit": draw(st.sampled_from(["inline", "call"]))}
    parallel = Parallel(Shape(tuple(counts), sum(counts) * nested), micro_batches, draw(st.sampled_from(SCHEDULES)),
                        cuts, tuple(config.items()))
    if config["emit"] == "call" and not setting.resource:  # results only: tests/emit/test_calls.py shows why
        setting = setting._replace(outputs=False)
    return Model(layers, loss, draw(st.sampled_from(sorted(OPTIMIZERS))),
                 (size,) * (STEPS - 1) + (last,), setting, parallel)
