"""The two models that whale_tf and its peers are compared on, from raw ops, with all gradients dense.

``mlp``: four layers of 1,024, mini-batch 256 per replica. ``encoder``: four transformer layers of hidden 256, sequences
of 64 tokens, 32 of them per replica. A model is a list of stages, functions of activations and parameters; parameters
are a dict, so that tf.distribute and hand-written graphs can create them in their own way.
"""
from __future__ import annotations

import zlib
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

LEARNING_RATE = 1e-3

Parameters = Dict[str, Any]
Stage = Callable[[Any, Parameters], Any]


class Workload(NamedTuple):
    """A model and its data.

    Attributes:
        batch: examples per replica.
        shapes: of the parameters.
        stages: four parts of about the same cost; the last returns logits `[rows, classes]`.
        data: ``data(examples, seed)`` gives features and labels.
    """

    batch: int
    shapes: Dict[str, Tuple[int, ...]]
    stages: List[Stage]
    data: Callable[[int, int], Tuple[np.ndarray, np.ndarray]]


def initial(name: str, shape: Tuple[int, ...]) -> np.ndarray:
    """Numbers that depend on the name alone, so that all systems start alike."""
    random = np.random.RandomState(zlib.crc32(name.encode()) & 0x7FFFFFFF)
    if len(shape) == 1:
        return (np.ones if name.startswith("gain") else np.zeros)(shape, "float32")
    return (random.randn(*shape) / np.sqrt(shape[0])).astype("float32")


def variables(workload: Workload, prefix: str = "") -> Parameters:
    """Resource variables of the current graph and device."""
    return {name: tf.get_variable(prefix + name, initializer=initial(name, shape), use_resource=True)
            for name, shape in workload.shapes.items()}


def loss(workload: Workload, parameters: Parameters, x: Any, labels: Any) -> Any:
    """Mean cross-entropy of the whole model."""
    for stage in workload.stages:
        x = stage(x, parameters)
    return head_loss(x, labels)


def head_loss(logits: Any, labels: Any) -> Any:
    """Mean cross-entropy of logits `[rows, classes]`."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=tf.reshape(labels, [-1]), logits=logits))


# -- perceptron --------------------------------------------------------------------------------------------------------


def mlp(width: int = 1024, layers: int = 4, batch: int = 256, classes: int = 10) -> Workload:
    shapes: Dict[str, Tuple[int, ...]] = {"head": (width, classes)}
    for i in range(layers):
        shapes.update({f"kernel_{i}": (width, width), f"bias_{i}": (width,)})

    def stage(first: int, last: int) -> Stage:
        def apply(x: Any, p: Parameters) -> Any:
            for i in range(first, last):
                x = tf.nn.relu(tf.matmul(x, p[f"kernel_{i}"]) + p[f"bias_{i}"])
            return tf.matmul(x, p["head"]) if last == layers else x

        return apply

    def data(examples: int, seed: int) -> Tuple[np.ndarray, np.ndarray]:
        random = np.random.RandomState(seed)
        return random.randn(examples, width).astype("float32"), random.randint(0, classes, examples).astype("int32")

    cuts = [layers * i // 4 for i in range(5)]
    return Workload(batch, shapes, [stage(a, b) for a, b in zip(cuts, cuts[1:])], data)


# -- encoder -----------------------------------------------------------------------------------------------------------


def encoder(layers: int = 4, hidden: int = 256, seq: int = 64, heads: int = 4, vocab: int = 1000,
            batch: int = 32, fused: bool = True) -> Workload:
    """Args:
        fused: one product gives queries, keys and values.
    """
    shapes: Dict[str, Tuple[int, ...]] = {"tokens": (vocab, hidden), "positions": (seq, hidden),
                                          "head": (hidden, vocab)}
    for i in range(layers):
        shapes.update({f"qkv_{i}": (hidden, 3 * hidden)} if fused else {f"{name}_{i}": (hidden, hidden) for name in "qkv"})
        shapes.update({f"gain_a{i}": (hidden,),
                       f"out_{i}": (hidden, hidden), f"gain_f{i}": (hidden,),
                       f"up_{i}": (hidden, 4 * hidden), f"down_{i}": (4 * hidden, hidden)})

    def embed(tokens: Any, p: Parameters) -> Any:
        x = tf.matmul(tf.one_hot(tf.reshape(tokens, [-1]), vocab), p["tokens"])
        return tf.reshape(tf.reshape(x, [-1, seq, hidden]) + p["positions"], [-1, hidden])

    def layer(x: Any, p: Parameters, i: int) -> Any:
        inputs = _norm(x, p[f"gain_a{i}"])
        if fused:
            qkv = tf.reshape(tf.matmul(inputs, p[f"qkv_{i}"]), [-1, seq, 3, heads, hidden // heads])
            query, key, value = tf.unstack(tf.transpose(qkv, [2, 0, 3, 1, 4]), 3)
        else:
            query, key, value = (tf.transpose(tf.reshape(tf.matmul(inputs, p[f"{name}_{i}"]), [-1, seq, heads, hidden // heads]),
                                              [0, 2, 1, 3]) for name in "qkv")
        weights = tf.nn.softmax(tf.matmul(query, key, transpose_b=True) * (hidden // heads) ** -0.5)
        context = tf.reshape(tf.transpose(tf.matmul(weights, value), [0, 2, 1, 3]), [-1, hidden])
        x = x + tf.matmul(context, p[f"out_{i}"])
        inner = tf.nn.relu(tf.matmul(_norm(x, p[f"gain_f{i}"]), p[f"up_{i}"]))
        return x + tf.matmul(inner, p[f"down_{i}"])

    def stage(first: int, last: int) -> Stage:
        def apply(x: Any, p: Parameters) -> Any:
            x = embed(x, p) if first == 0 else x
            for i in range(first, last):
                x = layer(x, p, i)
            return tf.matmul(x, p["head"]) if last == layers else x

        return apply

    def data(examples: int, seed: int) -> Tuple[np.ndarray, np.ndarray]:
        random = np.random.RandomState(seed)
        return tuple(random.randint(0, vocab, [2, examples, seq]).astype("int32"))

    cuts = [layers * i // 4 for i in range(5)]
    return Workload(batch, shapes, [stage(a, b) for a, b in zip(cuts, cuts[1:])], data)


def _norm(x: Any, gain: Any) -> Any:
    centred = x - tf.reduce_mean(x, -1, keepdims=True)
    return centred * tf.rsqrt(tf.reduce_mean(centred * centred, -1, keepdims=True) + 1e-5) * gain


# -- convolutional net -------------------------------------------------------------------------------------------------


def convnet(channels: int = 16, image: int = 16, batch: int = 64, classes: int = 10) -> Workload:
    """Four 3 x 3 convolutions, two to an image size, and a dense classifier."""
    widths = [3, channels, channels, 2 * channels, 2 * channels]
    shapes: Dict[str, Tuple[int, ...]] = {"head": (2 * channels * (image // 4) ** 2, classes)}
    for i in range(4):
        shapes.update({f"filter_{i}": (3, 3, widths[i], widths[i + 1]), f"bias_{i}": (widths[i + 1],)})

    def stage(i: int) -> Stage:
        def apply(x: Any, p: Parameters) -> Any:
            x = tf.nn.relu(tf.nn.conv2d(x, p[f"filter_{i}"], 1, "SAME") + p[f"bias_{i}"])
            if i % 2:
                x = tf.nn.max_pool(x, 2, 2, "SAME")
            return tf.matmul(tf.reshape(x, [-1, shapes["head"][0]]), p["head"]) if i == 3 else x

        return apply

    def data(examples: int, seed: int) -> Tuple[np.ndarray, np.ndarray]:
        random = np.random.RandomState(seed)
        return random.randn(examples, image, image, 3).astype("float32"), random.randint(0, classes, examples).astype("int32")

    return Workload(batch, shapes, [stage(i) for i in range(4)], data)


WORKLOADS: Dict[str, Callable[..., Workload]] = {"mlp": mlp, "encoder": encoder}
