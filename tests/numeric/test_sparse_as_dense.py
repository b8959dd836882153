"""``communication.sparse_as_dense``: the script trains as if it had made its sparse gradients dense itself."""
from __future__ import annotations

from typing import Any

import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.numeric.cases import HIDDEN, VOCAB, Case, Inputs, layer, sentences, token_loss, token_rows
from tests.numeric.equality import TOLERANCE, assert_equal, run_local, run_parallel
from tests.numeric.plans import Parallel, Shape
from tests.numeric.script import Script, Setting, Stages, weight

KEY = "communication.sparse_as_dense"


def momentum(made_dense: bool) -> Case:
    """Momentum and a global norm over a table's gradient, both of which tell sparse from dense."""

    def build(inputs: Inputs, stages: Stages, dtype: str) -> Script:
        blocks = [lambda tokens: token_rows(tf.nn.embedding_lookup(weight("words", [VOCAB, HIDDEN], dtype, 0.5), tokens)),
                  layer("one"), layer("two", VOCAB, tf.identity)]
        loss = token_loss(inputs, stages.run(blocks, inputs["tokens"] % 7))  # five rows get no gradient
        optimizer = tf.train.MomentumOptimizer(0.1, 0.9)
        gradients, variables = zip(*optimizer.compute_gradients(loss))
        if made_dense:
            gradients = tuple(map(tf.convert_to_tensor, gradients))
        clipped, norm = tf.clip_by_global_norm(gradients, 0.5)
        return Script([[optimizer.apply_gradients(zip(clipped, variables))]], {"loss": loss, "norm": norm}, {})

    return Case(sentences, build, config=None if made_dense else {KEY: True})


@pytest.mark.slow
@pytest.mark.parametrize("resource", [True, False])
@pytest.mark.parametrize("parallel", [
    Parallel(Shape((1,), 1)), Parallel(Shape((2,), 2)), Parallel(Shape((1, 1), 2), 4), Parallel(Shape((1, 1), 4), 2)], ids=str)
def test_equals_the_script_with_dense_gradients(parallel: Parallel, resource: bool) -> None:
    setting = Setting(resource=resource, dataset=True)
    expected = run_local(momentum(made_dense=True), setting, parallel.shape.model_replicas)
    assert_equal(run_parallel(momentum(made_dense=False), setting, parallel), expected, TOLERANCE["float64"])


@pytest.mark.slow
def test_it_makes_a_difference() -> None:
    setting = Setting(dataset=True)
    dense, sparse = (run_local(momentum(made_dense), setting) for made_dense in (True, False))
    assert dense.losses["norm"][1] != pytest.approx(sparse.losses["norm"][1], rel=1e-3)


@pytest.mark.slow
def test_slices_without_a_shape(graph: Any) -> None:
    wh.init({KEY: True}, cluster="cpu:1")
    try:
        table = tf.get_variable("table", [5, 2], tf.float64, use_resource=True)

        @tf.custom_gradient
        def first_row(x: Any) -> Any:
            return x[0], lambda dy: tf.IndexedSlices(dy[None, :], tf.constant([0]))

        gradient, = tf.gradients(first_row(tf.convert_to_tensor(table)), [table])
        assert isinstance(gradient, tf.Tensor) and gradient.shape == [5, 2]
    finally:
        wh.shutdown()
