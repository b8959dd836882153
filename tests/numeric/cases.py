"""The models of the equality matrix: single-device scripts of a few small layers, at least four blocks each."""
from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from models import bert, layers
from tests.numeric.script import BATCH, STEPS, Arrays, Script, Stages, dense, joined, rng, weight

Inputs = Dict[str, tf.Tensor]
FEATURES, HIDDEN, CLASSES, TOKENS, VOCAB = 6, 8, 5, 4, 12


class Case(NamedTuple):
    """A model: ``examples(count, dtype)`` makes data, ``build(inputs, stages, dtype)`` the script.

    Attributes:
        sizes: examples of each step, in units of one mini-batch of 48.
        runs: how many ``Session.run`` calls, each with a mini-batch of its own from a dataset, make one step.
        config: what the parallel script adds to its configuration.
    """

    examples: Callable[[int, str], Arrays]
    build: Callable[[Inputs, Stages, str], Script]
    sizes: Tuple[int, ...] = (BATCH,) * STEPS
    runs: int = 1
    config: Optional[Dict[str, Any]] = None

    @property
    def ragged(self) -> bool:
        return len(set(self.sizes)) > 1


_by_name: Dict[str, Case] = {}


def register(cases: Mapping[str, Case]) -> Dict[str, Case]:
    """Lets :func:`find_case` find more cases.

    Raises:
        ValueError: another case has one of the names.
    """
    _by_name.update(joined(_by_name, cases))
    return dict(cases)


def find_case(name: str) -> Case:
    """The case of that name, of any module that has been imported."""
    return _by_name[name]


def minimised(optimizer: tf.train.Optimizer, loss: tf.Tensor, outputs: Dict[str, tf.Tensor]) -> Script:
    return Script([[optimizer.minimize(loss)]], {"loss": loss}, outputs)


# -- data --------------------------------------------------------------------------------------------------------------


def vectors(count: int, dtype: str) -> Arrays:
    """Features, a class, a regression target and weights (a quarter of them zero) per example."""
    r = rng("vectors")
    return {"x": r.randn(count, FEATURES).astype(dtype), "label": r.randint(0, CLASSES, count).astype("int32"),
            "target": r.randn(count, 2).astype(dtype),
            "weight": (r.rand(count) * (r.rand(count) > 0.25)).astype(dtype)}


def images(count: int, dtype: str) -> Arrays:
    r = rng("images")
    return {"x": r.randn(count, 6, 6, 2).astype(dtype), "label": r.randint(0, CLASSES, count).astype("int32")}


def sentences(count: int, dtype: str) -> Arrays:
    r = rng("sentences")
    return {"tokens": r.randint(0, VOCAB, [count, TOKENS]).astype("int32"),
            "label": r.randint(0, VOCAB, [count, TOKENS]).astype("int32")}


def masked_text(count: int, dtype: str) -> Arrays:
    r, config = rng("masked_text"), bert.BertConfig.tiny()
    return {"tokens": r.randint(0, config.vocab, [count, config.seq]).astype("int32"),
            "segments": r.randint(0, 2, [count, config.seq]).astype("int32"),
            "positions": np.sort(r.randint(0, config.seq, [count, config.predictions])).astype("int32"),
            "labels": r.randint(0, config.vocab, [count, config.predictions]).astype("int32"),
            "weights": (r.rand(count, config.predictions) > 0.3).astype(dtype),
            "next_sentence": r.randint(0, 2, [count]).astype("int32")}


# -- perceptrons -------------------------------------------------------------------------------------------------------


def layer(name: str, units: int = HIDDEN, activation: Callable = tf.tanh) -> Callable[[tf.Tensor], tf.Tensor]:
    return lambda x: activation(dense(x, units, name))


def perceptron(inputs: Inputs, stages: Stages, units: int) -> tf.Tensor:
    """Four layers: `[B, FEATURES]` to `[B, units]`."""
    blocks = [layer("one"), layer("two", activation=tf.nn.relu), layer("three"), layer("four", units, tf.identity)]
    return stages.run(blocks, inputs["x"])


def cross_entropy(inputs: Inputs, logits: tf.Tensor) -> tf.Tensor:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=inputs["label"], logits=logits)


def mlp_mean(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    logits = perceptron(inputs, stages, CLASSES)
    hits = tf.equal(tf.argmax(logits, 1), tf.cast(inputs["label"], tf.int64))
    script = minimised(tf.train.GradientDescentOptimizer(0.1), tf.reduce_mean(cross_entropy(inputs, logits)),
                       {"logits": logits})
    script.losses["accuracy"] = tf.reduce_mean(tf.cast(hits, dtype))
    return script


def mlp_sum(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    error = perceptron(inputs, stages, 2) - inputs["target"]
    return minimised(tf.train.GradientDescentOptimizer(1e-3), tf.reduce_sum(tf.square(error)), {"error": error})


def sum_with_l2(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    """The L2 term has no batch: adding clones would count it once for each."""
    data_loss = tf.reduce_sum(tf.square(perceptron(inputs, stages, 2) - inputs["target"]))
    loss = data_loss + 0.3 * tf.add_n([tf.nn.l2_loss(v) for v in tf.trainable_variables()])
    with tf.control_dependencies([loss]):  # a reference variable may else be updated before the L2 term reads it
        return minimised(tf.train.GradientDescentOptimizer(1e-3), loss, {})


def mean_of_weighted(losses: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """What tf.losses computes by default, in the losses' own precision (tf.losses computes all in float32)."""
    present = tf.reduce_sum(tf.cast(tf.not_equal(weights, 0.0), losses.dtype))
    return tf.div_no_nan(tf.reduce_sum(losses * weights), present)


def weighted_loss(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    """tf.losses ends in a quotient of two sums; the number of non-zero weights differs between parts of a batch."""
    logits = perceptron(inputs, stages, CLASSES)
    if dtype == "float32":
        loss = tf.losses.sparse_softmax_cross_entropy(inputs["label"], logits, weights=inputs["weight"])
    else:
        loss = mean_of_weighted(cross_entropy(inputs, logits), inputs["weight"])
    return minimised(tf.train.GradientDescentOptimizer(0.1), loss, {"logits": logits})


def clipped_adam(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    loss = tf.reduce_mean(cross_entropy(inputs, perceptron(inputs, stages, CLASSES)))
    optimizer = tf.train.AdamOptimizer(0.01, epsilon=1e-6)
    gradients, variables = zip(*optimizer.compute_gradients(loss))
    clipped, norm = tf.clip_by_global_norm(gradients, 0.2)
    step = tf.train.get_or_create_global_step()
    update = optimizer.apply_gradients(zip(clipped, variables), global_step=step)
    return Script([[update]], {"loss": loss, "norm": norm}, {})


def momentum(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    logits = perceptron(inputs, stages, CLASSES)
    loss = tf.reduce_mean(cross_entropy(inputs, logits))
    return minimised(tf.train.MomentumOptimizer(0.05, 0.9, use_nesterov=True), loss, {"logits": logits})


# -- convolution -------------------------------------------------------------------------------------------------------


def flatten(x: tf.Tensor) -> tf.Tensor:
    return layers.reshape(x, int(np.prod(x.shape.as_list()[1:])))


def convolution(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    blocks = [lambda x: layers.conv2d(x, 4, 3, "one", use_bias=True, activation=tf.nn.relu),
              lambda x: layers.max_pool(x, 2, 2),
              lambda x: layers.conv2d(x, 6, 3, "two", stride=2, use_bias=True, activation=tf.tanh),
              lambda x: dense(flatten(x), CLASSES, "head")]
    logits = stages.run(blocks, inputs["x"])
    return minimised(tf.train.GradientDescentOptimizer(0.05), tf.reduce_mean(cross_entropy(inputs, logits)),
                     {"logits": logits})


def batch_norm(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    """Equal to the local script only where the statistics are those of the whole batch (sync_batch_norm)."""
    def block(name: str) -> Callable[[tf.Tensor], tf.Tensor]:
        return lambda x: tf.nn.relu(layers.batch_norm(layers.conv2d(x, 4, 3, name), name + "_norm", training=True))

    blocks = [block("one"), block("two"), block("three"), lambda x: dense(flatten(x), CLASSES, "head")]
    logits = stages.run(blocks, inputs["x"])
    loss = tf.reduce_mean(cross_entropy(inputs, logits))
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        return minimised(tf.train.GradientDescentOptimizer(0.05), loss, {"logits": logits})


# -- text --------------------------------------------------------------------------------------------------------------


def encoder(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    """BERT with one layer, in two blocks, and the masked language model of the paper, without dropout."""
    config = bert.BertConfig(dtype=dtype)
    batch = bert.data.MaskedLmBatch(**inputs)
    table = {}

    def embed(tokens: tf.Tensor) -> tf.Tensor:
        x, table["tokens"] = bert.embed(tokens, config, batch.segments)
        return x

    def attend(x: tf.Tensor) -> tf.Tensor:
        attended = layers.multi_head_attention(x, x, config.heads, "attention", stddev=0.02, seed=config.seed)
        return layers.layer_norm(x + attended, "attention_norm")

    def feed_forward(x: tf.Tensor) -> tf.Tensor:
        y = layers.dense(x, config.ffn, "ffn_in", activation=layers.gelu, stddev=0.02, seed=config.seed)
        return layers.layer_norm(x + layers.dense(y, config.hidden, "ffn_out", stddev=0.02, seed=config.seed), "ffn_norm")

    blocks = [embed, attend, feed_forward,
              lambda x: bert.mlm_head(x, batch.positions, table["tokens"], config)]
    logits = stages.run(blocks, batch.tokens)
    return minimised(tf.train.AdamOptimizer(1e-3, epsilon=1e-6), bert.mlm_loss(logits, batch), {"logits": logits})


def token_rows(x: tf.Tensor) -> tf.Tensor:
    return tf.reshape(x, [-1, int(x.shape[-1])])


def token_loss(inputs: Inputs, logits: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=tf.reshape(inputs["label"], [-1]), logits=logits))


def tied_embedding(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    """One table is read by the first and by the last stage."""
    table = {}

    def embed(tokens: tf.Tensor) -> tf.Tensor:
        table["words"] = weight("words", [VOCAB, HIDDEN], dtype, 0.5)
        return token_rows(tf.nn.embedding_lookup(table["words"], tokens))

    blocks = [embed, layer("one"), layer("two"), lambda x: tf.matmul(x, table["words"], transpose_b=True)]
    logits = stages.run(blocks, inputs["tokens"])
    return minimised(tf.train.GradientDescentOptimizer(0.3), token_loss(inputs, logits), {})


def sparse_embedding(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    """The table's gradient is IndexedSlices with repeated rows, which Adagrad must add before it squares them."""
    blocks = [lambda tokens: token_rows(tf.nn.embedding_lookup(weight("words", [VOCAB, HIDDEN], dtype, 0.5), tokens)),
              layer("one"), layer("two"), layer("three", VOCAB, tf.identity)]
    logits = stages.run(blocks, inputs["tokens"])
    return minimised(tf.train.AdagradOptimizer(0.1), token_loss(inputs, logits), {})


# -- control flow ------------------------------------------------------------------------------------------------------


def loop_block(x: tf.Tensor) -> tf.Tensor:
    """Three times the same layer, as a while loop."""
    dtype = x.dtype.base_dtype.name
    kernel, bias = weight("loop_kernel", [HIDDEN, HIDDEN], dtype), weight("loop_bias", [HIDDEN], dtype, 0.1)
    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(tf.matmul(h, kernel) + bias)), [0, x])[1]


def recurrent_block(tokens: tf.Tensor, dtype: str) -> tf.Tensor:
    """A recurrent network over the tokens, with TensorArrays: `[B, TOKENS]` to `[B, HIDDEN]`."""
    words = tf.nn.embedding_lookup(weight("words", [VOCAB, HIDDEN], dtype, 0.5), tokens)
    kernel = weight("recurrent", [2 * HIDDEN, HIDDEN], dtype)
    steps = tf.TensorArray(dtype, TOKENS).unstack(tf.transpose(words, [1, 0, 2]))
    state = tf.zeros([tf.shape(tokens)[0], HIDDEN], dtype)
    state.set_shape([tokens.shape[0], HIDDEN])
    return tf.while_loop(lambda t, h: t < TOKENS,
                         lambda t, h: (t + 1, tf.tanh(tf.matmul(tf.concat([steps.read(t), h], 1), kernel))),
                         [0, state])[1]


def while_loop(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    logits = stages.run([layer("one"), loop_block, layer("two"), layer("head", CLASSES, tf.identity)], inputs["x"])
    return minimised(tf.train.GradientDescentOptimizer(0.1), tf.reduce_mean(cross_entropy(inputs, logits)),
                     {"logits": logits})


def recurrent(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    blocks = [lambda tokens: recurrent_block(tokens, dtype), layer("one"), layer("two"),
              layer("head", VOCAB, tf.identity)]
    logits = stages.run(blocks, inputs["tokens"])
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=inputs["label"][:, 0], logits=logits))
    return minimised(tf.train.GradientDescentOptimizer(0.1), loss, {"logits": logits})


def conditional(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    """A block that is another one in every second step."""
    step = tf.train.get_or_create_global_step()
    even = tf.equal(tf.math.floormod(step, 2), 0)

    def block(x: tf.Tensor) -> tf.Tensor:
        kernel = weight("kernel", [HIDDEN, HIDDEN], dtype)
        return tf.cond(even, lambda: 1.5 * tf.tanh(tf.matmul(x, kernel)), lambda: tf.nn.relu(x - tf.matmul(x, kernel)))

    logits = stages.run([layer("one"), block, layer("two"), layer("head", CLASSES, tf.identity)], inputs["x"])
    loss = tf.reduce_mean(cross_entropy(inputs, logits))
    return Script([[tf.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=step)]], {"loss": loss}, {})


def control_flow(version: int, build: Callable[[Inputs, Stages, str], Script]) -> Callable[..., Script]:
    """``build`` with loops and conditionals as dataflow ops (version 1) or as functional ops (version 2)."""
    def with_version(inputs: Inputs, stages: Stages, dtype: str) -> Script:
        before = tf.control_flow_v2_enabled()
        (tf.enable_control_flow_v2 if version == 2 else tf.disable_control_flow_v2)()
        try:
            return build(inputs, stages, dtype)
        finally:
            (tf.enable_control_flow_v2 if before else tf.disable_control_flow_v2)()

    return with_version


# -- several losses ----------------------------------------------------------------------------------------------------


def gan(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    """Two optimizers over different variables, one after the other (Goodfellow et al. 2014, Algorithm 1)."""
    def discriminate(state: Dict, name: str, units: int, activation: Callable) -> Dict:
        return {side: activation(dense(x, units, name)) for side, x in state.items()}

    blocks = [lambda x: {"real": x, "fake": tf.tanh(dense(inputs["target"], HIDDEN, "g_one"))},
              lambda s: dict(s, fake=dense(s["fake"], FEATURES, "g_two")),
              lambda s: discriminate(s, "d_one", HIDDEN, tf.tanh),
              lambda s: discriminate(s, "d_two", 1, tf.identity)]
    scores = stages.run(blocks, inputs["x"])
    d_loss = tf.reduce_mean(tf.nn.softplus(-scores["real"])) + tf.reduce_mean(tf.nn.softplus(scores["fake"]))
    g_loss = tf.reduce_mean(tf.nn.softplus(-scores["fake"]))
    players = {side: [v for v in tf.trainable_variables() if v.op.name.startswith(side)] for side in ("d_", "g_")}
    d_train = tf.train.AdamOptimizer(0.01, epsilon=1e-4, name="DAdam").minimize(d_loss, var_list=players["d_"])
    g_train = tf.train.AdamOptimizer(0.01, epsilon=1e-4, name="GAdam").minimize(g_loss, var_list=players["g_"])
    return Script([[d_train], [g_train]], {"d_loss": d_loss, "g_loss": g_loss}, {"fake": scores["fake"]})


def gradient_penalty(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    """The loss holds the norm of a gradient with respect to the input (Gulrajani et al. 2017, equation 3)."""
    x = inputs["x"]
    blocks = [layer("one"), layer("two"), layer("three"), layer("score", 1, tf.identity)]
    score = stages.run(blocks, x)
    norm = tf.sqrt(tf.reduce_sum(tf.square(tf.gradients(score, x)[0]), 1) + 1e-6)
    penalty = tf.reduce_mean(tf.square(norm - 1.0))
    loss = tf.reduce_mean(score[:, 0] * inputs["target"][:, 0]) + penalty
    script = minimised(tf.train.GradientDescentOptimizer(0.05), loss, {"norm": norm})
    script.losses["penalty"] = penalty
    return script


RAGGED: Sequence[int] = (48, 37, 40, 48, 33)

CASES = register({
    "mlp_mean": Case(vectors, mlp_mean),
    "mlp_sum": Case(vectors, mlp_sum),
    "sum_with_l2": Case(vectors, sum_with_l2),
    "weighted_loss": Case(vectors, weighted_loss),
    "clipped_adam": Case(vectors, clipped_adam),
    "momentum": Case(vectors, momentum),
    "convolution": Case(images, convolution),
    "encoder": Case(masked_text, encoder),
    "tied_embedding": Case(sentences, tied_embedding),
    "sparse_embedding": Case(sentences, sparse_embedding),
    "while_loop_v1": Case(vectors, control_flow(1, while_loop)),
    "while_loop_v2": Case(vectors, control_flow(2, while_loop)),
    "recurrent_v1": Case(sentences, control_flow(1, recurrent)),
    "conditional_v1": Case(vectors, control_flow(1, conditional)),
    "gan": Case(vectors, gan, runs=2),
    "gradient_penalty": Case(vectors, gradient_penalty),
    "ragged": Case(vectors, mlp_mean, sizes=tuple(RAGGED)),
    "ragged_sum": Case(vectors, sum_with_l2, sizes=tuple(RAGGED)),
})

# models with batch statistics: equal under sync_batch_norm only
SYNCHRONISED = register({"batch_norm": Case(images, batch_norm, config={"sync_batch_norm": True})})
