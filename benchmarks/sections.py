"""A loss that needs all examples together: whale_tf under data parallelism 2, beside the local script and a graph by hand.

    python -m benchmarks.sections

The contrastive loss of 256 embeddings of 64 numbers (a softmax over the similarities of all pairs), behind a perceptron. By
hand, each device encodes its half, the embeddings are concatenated on the first, which computes the loss, and TensorFlow's
gradients cut theirs. ``mean`` is the same perceptron with a mean of losses of each example, which needs no section.
"""
from __future__ import annotations

import contextlib
from typing import Any, List

from rich.console import Console

from benchmarks.measure import Result, Spec, main, rounds, session_config, step_times, table
from benchmarks.workloads import LEARNING_RATE, initial

BATCH, FEATURES, WIDTH, EMBEDDING, CLASSES = 256, 512, 1024, 64, 16
SYSTEMS = ("local", "by hand", "whale_tf")
STEPS, ROUNDS = 25, 3


def _loss(name: str, z: Any, labels: Any) -> Any:
    import tensorflow.compat.v1 as tf

    if name == "mean":
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(logits=z, labels=labels))
    z = tf.nn.l2_normalize(z, 1)
    same = tf.cast(tf.equal(labels[:, None], labels[None, :]), z.dtype)
    log_softmax = tf.nn.log_softmax(tf.matmul(z, z, transpose_b=True) / 0.1)
    return -tf.reduce_mean(tf.reduce_sum(same * log_softmax, 1) / tf.reduce_sum(same, 1))


def worker(spec: Spec) -> Result:
    import numpy as np
    import tensorflow.compat.v1 as tf

    import whale_tf as wh

    tf.disable_eager_execution()
    system = spec["system"]
    if system == "whale_tf":
        wh.init(cluster="cpu:2")
    random = np.random.RandomState(0)
    data = random.randn(BATCH, FEATURES).astype("float32"), random.randint(0, CLASSES, BATCH).astype("int32")
    x, labels = tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensors(data).repeat()).get_next()
    widths = [FEATURES, WIDTH, WIDTH, EMBEDDING]
    with tf.device("/cpu:0"):
        kernels = [tf.get_variable(f"kernel_{i}", initializer=initial(f"kernel_{i}", shape), use_resource=True)
                   for i, shape in enumerate(zip(widths, widths[1:]))]

    def encode(rows: Any) -> Any:
        for kernel in kernels[:-1]:
            rows = tf.nn.relu(tf.matmul(rows, kernel))
        return tf.matmul(rows, kernels[-1])

    if system == "by hand":
        parts: List[Any] = []
        for device, half in enumerate(tf.split(x, 2)):
            with tf.device(f"/cpu:{device}"):
                parts.append(encode(half))
        with tf.device("/cpu:0"):
            value = _loss(spec["loss"], tf.concat(parts, 0), labels)
    else:
        with wh.replicate(2) if system == "whale_tf" else contextlib.nullcontext():
            value = _loss(spec["loss"], encode(x), labels)
    train_op = tf.train.GradientDescentOptimizer(LEARNING_RATE).minimize(
        value, colocate_gradients_with_ops=system == "by hand")
    with tf.Session(config=session_config(1 if system == "local" else 2)) as session:
        session.run(tf.global_variables_initializer())
        return step_times(lambda: session.run([value, train_op])[0], STEPS)


def report(console: Console) -> None:
    rows = []
    for name in ("contrastive", "mean"):
        found = rounds(__file__, [{"system": system, "loss": name} for system in SYSTEMS], ROUNDS)
        for system, result in zip(SYSTEMS, found):
            ratios = [f"{result[key] / found[1][key]:.2f}" for key in ("cpu_s", "wall_s")]
            rows.append([name, system, f"{1e3 * result['cpu_s']:.1f}", f"{1e3 * result['wall_s']:.1f}", *ratios,
                         f"{result['loss']:.6f}"])
    console.print(table("256 embeddings of 64, two devices: ms per step", [
        "loss", "system", "CPU", "wall", "CPU to by hand", "wall to by hand", "last loss"], rows))


if __name__ == "__main__":
    main(__file__, worker, report)
