"""Scripts as they are published: inputs without shapes, Python functions as inputs, labels of several batches."""
from __future__ import annotations

import re
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.cli.scripts import HEAD, PUBLISHED

PLANS: Dict[str, Dict[str, Any]] = {
    "replicate": {}, "micro-batches": {"num_micro_batch": 2}, "auto": {"auto_parallel": True},
    "pipeline": {"num_task_graph": 2, "num_micro_batch": 2}}


def run(script: str, config: Optional[Dict[str, Any]]) -> Tuple[List[Tuple[str, float]], bool]:
    """What the script prints, and whether it was rewritten.

    Args:
        config: None: without whale_tf.
    """
    lines: List[str] = []
    if config is not None:
        wh.init(config, cluster="cpu:2")
    try:
        with tf.Graph().as_default() as graph:
            exec(script, {"print": lambda *words: lines.append(" ".join(str(word) for word in words))})
        values = [(name, float(value)) for name, value in re.findall(r"value (.+) (\S+)", "\n".join(lines))]
        return values, config is not None and wh.current_plan(graph) is not None
    finally:
        if config is not None:
            wh.shutdown()


def check(script: str, config: Dict[str, Any]) -> None:
    expected, (found, is_rewritten) = run(script, None)[0], run(script, config)
    assert is_rewritten and expected
    assert [name for name, _ in found] == [name for name, _ in expected]
    np.testing.assert_allclose([v for _, v in found], [v for _, v in expected], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name, plan", [
    ("keep_prob", "replicate"), ("keep_prob", "auto"), ("halves", "micro-batches"), ("halves", "replicate"),
    ("python_input", "pipeline"), ("python_input", "auto"), ("generator", "replicate"), ("flat_targets", "micro-batches"),
    ("full_batch", "replicate")])
def test_published_scripts(name: str, plan: str) -> None:
    check({**PUBLISHED, **SCRIPTS}[name], PLANS[plan])


SCRIPTS = {
    # elements of a generator without shapes: the first step is local, and shows them
    "generator": HEAD + '''
def examples():
    for _ in range(4):
        yield random.randn(8, 4), random.randn(8)

x, y = tf.data.make_one_shot_iterator(tf.data.Dataset.from_generator(examples, ("float64", "float64"))).get_next()
hidden = tf.tanh(tf.matmul(x, weights("one", 4, 5)))
loss = tf.reduce_mean(tf.square(tf.reshape(tf.matmul(hidden, weights("two", 5, 1)), [-1]) - y))
train = tf.train.AdamOptimizer(0.1).minimize(loss)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for step in range(4):
        print("value loss", repr(float(session.run([loss, train])[0])))
    report(session)
''',
    # targets of a language model, one row for each word
    "flat_targets": HEAD + '''
words, targets = tf.placeholder("int32", [None, 5]), tf.placeholder("int32", [None])
hidden = tf.tanh(tf.matmul(tf.reshape(tf.nn.embedding_lookup(weights("table", 9, 4), words), [-1, 4]), weights("one", 4, 9)))
loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(logits=hidden, labels=targets))
train = tf.train.AdamOptimizer(0.1).minimize(loss)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for step in range(3):
        feed = {words: random.randint(0, 9, [6 + step, 5]), targets: random.randint(0, 9, [(6 + step) * 5])}
        print("value loss", repr(float(session.run([loss, train], feed)[0])))
    report(session)
''',
    # all examples in every step, through inputs of which not even the rank is known
    "full_batch": HEAD + '''
X, Y = tf.placeholder("float64"), tf.placeholder("float64")
prediction = tf.add(tf.multiply(X, weights("slope")), weights("offset"))
cost = tf.reduce_sum(tf.pow(prediction - Y, 2)) / (2 * 17)
train = tf.train.GradientDescentOptimizer(0.1).minimize(cost)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for step in range(4):
        session.run(train, {X: random.randn(17), Y: random.randn(17)})
        print("value cost", repr(float(session.run(cost, {X: 0.5, Y: 1.5}))))
    report(session)
''',
}
