"""Steps emitted as calls of functions: what is in the graph, and what a session returns."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import pytest

import whale_tf as wh
from tests.graph_editor.graphs import control_flow
from whale_tf._tf_compat import tf, v1
from whale_tf.program import CLONED

pytestmark = pytest.mark.half
BATCH = 16


@pytest.fixture(autouse=True)
def _shutdown() -> Any:
    yield
    wh.shutdown()


class Model:
    """Two stages with what users fetch: a loss, a summary, tensors inside the stages."""

    def __init__(
        self, emit: str, micro_batches: int = 2, resource: bool = True, dropout: float = 0.0, static: bool = True
    ) -> None:
        if emit:
            wh.init({"num_micro_batch": micro_batches, "emit": emit, "io.nested_batch": "divide"}, cluster="cpu:4")
        v1.set_random_seed(3)
        random = np.random.RandomState(0)
        self.feed_x, self.feed_y = random.randn(BATCH, 6), random.randn(BATCH, 2)
        self.x = v1.placeholder(tf.float64, [BATCH if static else None, 6])
        self.y = v1.placeholder(tf.float64, [BATCH if static else None, 2])
        with v1.variable_scope("", use_resource=resource):
            with self._stage(emit):
                w = v1.get_variable("w", initializer=random.randn(6, 5))
                self.hidden = tf.tanh(tf.matmul(self.x, w))
                if dropout:
                    self.hidden = v1.nn.dropout(self.hidden, rate=dropout)
            with self._stage(emit):
                v = v1.get_variable("v", initializer=random.randn(5, 2))
                self.logits = tf.matmul(self.hidden, v)
                self.error = tf.square(self.logits - self.y)
                self.loss = tf.reduce_mean(tf.reduce_sum(self.error, 1))
                if resource:  # a reference variable's own loss may be read after the update, in the local script too
                    self.loss += tf.nn.l2_loss(v)
        self.summary = v1.summary.scalar("loss", self.loss)
        self.train = v1.train.AdamOptimizer(0.1).minimize(self.loss)

    @staticmethod
    def _stage(emit: str) -> Any:
        return wh.replicate(1) if emit else v1.name_scope("")

    def steps(self, fetches: List[Any], count: int = 3) -> List[Any]:
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            feed = {self.x: self.feed_x, self.y: self.feed_y}
            return [session.run(fetches + [self.train], feed)[:-1] for _ in range(count)]


def values(emit: str, names: Tuple[str, ...], **options: Any) -> List[Any]:
    with v1.Graph().as_default():
        model = Model(emit, **options)
        result = model.steps([getattr(model, name) for name in names])
        if emit:
            expected = "Emitted as calls of functions" if emit == "call" else "Emitted as inlined ops"
            assert expected in wh.explain()
        wh.shutdown()
        return result


def close(found: List[Any], expected: List[Any]) -> None:
    for step, other in zip(found, expected):
        for value, wanted in zip(step, other):
            np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_results_and_tensors_inside_the_stages(micro_batches: int, static: bool) -> None:
    """``hidden`` crosses to the next stage; ``logits`` and ``error`` stay inside a function, and are computed anew."""
    names = ("loss", "hidden", "logits", "error")
    close(values("call", names, micro_batches=micro_batches, static=static), values("", names, static=static))


def test_summaries() -> None:
    found = [v1.Summary.FromString(step[0]).value[0].simple_value for step in values("call", ("summary",))]
    expected = [v1.Summary.FromString(step[0]).value[0].simple_value for step in values("", ("summary",))]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_graph_holds_one_op_for_each_call() -> None:
    counts: Dict[int, int] = {}
    for micro_batches in (2, 4, 8):
        with v1.Graph().as_default() as graph:
            Model("call", micro_batches)
            wh.parallelize()
            calls = [op for op in graph.get_operations() if op.type in ("PartitionedCall", "StatefulPartitionedCall")]
            assert len(calls) == 2 * 3 * micro_batches  # model replicas x two in the first stage, one in the last x micro-batches
            assert len({op.get_attr("f").name for op in calls}) == 3  # clones of one size share their functions
            assert {op.device[-1] for op in calls} == {"0", "1", "2", "3"}
            counts[micro_batches] = len(graph.get_operations())
            wh.shutdown()
    assert counts[8] - counts[4] == 2 * (counts[4] - counts[2])


def test_clones_draw_numbers_of_their_own() -> None:
    """Dropout under one seed: clones of one device share a function, whose generator goes on from call to call."""
    hidden = values("call", ("hidden",), dropout=0.5)[0][0]
    zeros = {tuple(row) for row in hidden == 0}
    assert len(zeros) > BATCH // 2


def test_random_tensor_inside_a_function_is_computed_anew_and_says_so() -> None:
    with pytest.warns(UserWarning, match="computed again for the fetch, and random op .* draws other numbers"):
        _random_tensor_and_loss(lambda x: x + v1.random_normal(tf.shape(x), seed=7))


def test_random_tensor_beside_an_update_is_the_steps_own() -> None:
    dropped, loss = _random_tensor_and_loss(lambda x: v1.nn.dropout(x, rate=0.5, seed=7))
    np.testing.assert_allclose(loss, np.mean(np.square(dropped + 1.0)), rtol=1e-5)


def _random_tensor_and_loss(noise: Callable[[Any], Any]) -> List[Any]:
    with v1.Graph().as_default():
        wh.init({"num_micro_batch": 2, "emit": "call"}, cluster="cpu:1")
        x = v1.placeholder(tf.float32, [BATCH, 6])
        with v1.variable_scope("", use_resource=True), wh.replicate(1):
            w = v1.get_variable("w", [6, 5])
            noisy = noise(tf.matmul(x, w))
            loss = tf.reduce_mean(tf.square(noisy + 1.0))
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            return session.run([noisy, loss, train], {x: np.ones([BATCH, 6])})[:-1]


def test_program_is_what_was_emitted() -> None:
    with v1.Graph().as_default() as graph:
        Model("call", 4)
        wh.parallelize()
        program = wh.current_program()
        assert program is not None
        named = {}
        for call in program.calls:
            if program.step_of(call) in CLONED:
                g, m, r = call.clone
                named[f"whale/g{g}_m{m}_r{r}/{program.bodies[call.body].name}"] = call.devices[0]
        calls = [op for op in graph.get_operations() if op.type.endswith("PartitionedCall")]
        emitted = {op.name: int(op.device.rpartition(":")[2]) for op in calls}
        assert emitted == named
        ops = [body for body in program.bodies if not body.is_recipe]
        assert len(program.to_text().splitlines()) == len(ops) + len(program.calls)


def test_reference_variables_refuse_tensors_inside_a_function() -> None:
    with pytest.raises(wh.UnsupportedOpError, match="fetched in a run that updates reference variables in place, and emit is"):
        values("call", ("error",), resource=False)


def test_reference_variables_train_and_return_results() -> None:
    close(values("call", ("loss",), resource=False), values("", ("loss",), resource=False))


def _lookups(emit: str) -> List[Any]:
    """Features of five steps that each update the table which they are looked up in."""
    with v1.Graph().as_default() as graph:
        if emit:
            wh.init({"num_micro_batch": 2, "emit": emit}, cluster="cpu:2")
        v1.set_random_seed(3)
        ids, labels = v1.placeholder(tf.int32, [BATCH]), v1.placeholder(tf.float64, [BATCH, 4])
        with wh.replicate(1) if emit else v1.name_scope(""), v1.variable_scope("", use_resource=True):
            table = v1.get_variable("table", [7, 4], tf.float64, v1.random_normal_initializer())
            features = tf.nn.embedding_lookup(table, ids) * 2.0  # which no gradient needs, so no function returns it
            loss = tf.reduce_mean(tf.square(tf.tanh(features) - labels))
        train = v1.train.GradientDescentOptimizer(0.5).minimize(loss)
        random = np.random.RandomState(0)
        feeds = [{ids: random.randint(0, 7, [BATCH]), labels: random.randn(BATCH, 4)} for _ in range(5)]
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            found = [session.run([features, train], feed)[0] for feed in feeds]
            found.append(session.run(features, {ids: feeds[0][ids]}))  # needs no label
            found.append(session.run([features, train], feeds[1])[0])
        if emit == "call":
            again = [op for op in graph.get_operations() if op.name.startswith("whale/") and "beside_update" in op.name]
            assert again and not any(t.dtype == tf.resource for op in again for t in op.inputs), "one that may follow the update"
        wh.shutdown()
        return found


def test_tensor_fetched_beside_an_update_follows_from_the_lookup_before_it() -> None:
    close([_lookups("call")], [_lookups("")])


def _deep(emit: str) -> Tuple[List[Any], List[str]]:
    """Three steps of a network whose first stage has five layers, with a gradient that is fetched; and the called backward
    functions of one clone of that stage."""
    with v1.Graph().as_default() as graph:
        if emit:
            wh.init({"num_micro_batch": 2, "emit": emit}, cluster="cpu:2")
        random = np.random.RandomState(0)
        x = value = v1.placeholder(tf.float64, [BATCH, 6])
        with v1.variable_scope("", use_resource=True):
            for stage, layers in enumerate((5, 1)):
                with wh.replicate(1) if emit else v1.name_scope(""):
                    for layer in range(layers):
                        w = v1.get_variable(f"w{stage}{layer}", initializer=random.randn(6, 6) / 2)
                        value = tf.tanh(tf.matmul(value, w))
                    if stage:
                        loss = tf.reduce_mean(tf.square(value - 1.0))
        variables = v1.trainable_variables()
        gradients = tf.gradients(loss, variables)
        train = v1.train.AdamOptimizer(0.1).apply_gradients(zip(gradients, variables))
        feed = {x: random.randn(BATCH, 6)}
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            found = [session.run([loss, gradients[1], train], feed)[:2] for _ in range(3)] + [session.run(variables)]
        calls = [op.name for op in graph.get_operations() if op.type.endswith("PartitionedCall")]
        wh.shutdown()
        return found, [name for name in calls if name.startswith("whale/g0_m1_r0/t0_backward")]


def test_backward_pass_is_several_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whale_tf.passes.functions.LEAST", 0)
    (found, functions), (expected, _) = _deep("call"), _deep("")
    close(found, expected)
    assert functions == [f"whale/g0_m1_r0/t0_backward{part}" for part in ("/0", "/1", "/2", "")]


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_forward_call_donates_what_its_backward_calls_own(
    micro_batches: int, static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors inside the stages are fetched too, and then have other owners."""
    monkeypatch.setattr("whale_tf.passes.donate.LEAST", 1)
    monkeypatch.setattr("whale_tf.passes.functions.LEAST", 0)
    names = ("loss", "hidden", "logits", "error")
    close(values("call", names, micro_batches=micro_batches, static=static), values("", names, static=static))
    close(values("call", names[:1], micro_batches=micro_batches, resource=False), values("", names[:1], resource=False))


def test_array_of_a_clone_holds_what_is_donated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whale_tf.passes.donate.LEAST", 1)
    with v1.Graph().as_default() as graph:
        Model("call", 4)
        wh.parallelize()
        arrays = [op for op in graph.get_operations() if op.type == "TensorArrayV3"]
        assert len(arrays) == 2 * 1 * 4  # model replicas x stages whose forward and backward steps are apart x micro-batches
        for array in arrays:
            donor, taker = sorted(array.outputs[0].consumers(), key=lambda op: op.name, reverse=True)
            assert donor.name == taker.name.replace("backward", "forward") and donor.device == taker.device == array.device
            written = [t.name for t in taker.inputs if t.op.name.endswith("_forward")]
            assert written == [donor.outputs[-1].name], "no activation is an argument"


def test_large_step_is_inlined_where_calls_need_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whale_tf.passes.form.MOST_INLINED_OPS", 1)
    monkeypatch.setattr("whale_tf.decide.form.called_too_large", lambda step, plan, cluster, held: (1 << 20, 3 << 30, 0, 0))
    plan, texts = None, []
    for _ in range(2):  # the second time by the plan of the first, which says so
        with v1.Graph().as_default() as graph:
            wh.init({"num_micro_batch": 2}, cluster="cpu:4", plan=plan)
            Model("")
            wh.parallelize()
            texts.append(wh.explain())
            plan = wh.current_plan()
            assert not [op for op in graph.get_operations() if op.type.endswith("PartitionedCall")]
            wh.shutdown()
        monkeypatch.undo()
        monkeypatch.setattr("whale_tf.passes.form.MOST_INLINED_OPS", 1)
    assert all("inlined, the step fits in memory; called, it does not (up to 3.00 GiB on a device)" in text for text in texts)


def two_batches(emit: str, is_loop: bool) -> List[Any]:
    """Losses of two steps and the final variable, with two batches of other static sizes, one of them with a constant a row."""
    if emit:
        wh.init({"emit": emit}, cluster="cpu:4")
    random = np.random.RandomState(0)
    rows = np.arange(1.0, 7.0)[:, None] ** 2
    with v1.Graph().as_default(), control_flow(2), v1.variable_scope("", use_resource=True):
        x, u = v1.placeholder(tf.float64, [8, 4]), v1.placeholder(tf.float64, [6, 4])
        with wh.replicate(4) if emit else v1.name_scope(""):
            if emit:
                wh.batch_axis(u, 0)
            w = v1.get_variable("w", initializer=random.randn(4, 3))
            h, g = tf.matmul(x, w), tf.matmul(u, w)
            if is_loop:
                g = tf.while_loop(lambda i, z: i < 2, lambda i, z: (i + 1, tf.tanh(z) * tf.constant(rows)), [0, g])[1]
            else:
                g = tf.square(g) * rows
            loss = tf.reduce_mean(tf.square(h)) + tf.reduce_mean(g)
        train = v1.train.GradientDescentOptimizer(0.01).minimize(loss)
        feed = {x: random.randn(8, 4), u: random.randn(6, 4)}
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            losses = [session.run([loss, train], feed)[0] for _ in range(2)]
            found = [losses, session.run(w)]
    wh.shutdown()
    return found


@pytest.mark.parametrize("is_loop", [False, True])
def test_replicas_whose_second_batch_has_another_size_share_no_function(is_loop: bool) -> None:
    """8 examples are 2, 2, 2 and 2 for 4 replicas; 6 are 2, 2, 1 and 1."""
    for found, expected in zip(two_batches("call", is_loop), two_batches("", is_loop)):
        np.testing.assert_allclose(found, expected, rtol=1e-12)
