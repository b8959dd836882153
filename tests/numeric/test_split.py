"""``wh.split`` computes what the local script computes."""
from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.numeric.cases import find_case
from tests.numeric.checkpoints import HALF, train_half
from tests.numeric.equality import TOLERANCE, Outcome, assert_equal, reference, relative, run_local
from tests.numeric.script import Setting, Stages, dense, source
from tests.numeric.split import CLASSES, OPTIMIZERS, Split, run_split
from whale_tf.decide import split as division
from whale_tf.planner import sharding

pytestmark = pytest.mark.half
FEDS = Setting()
REFERENCES = Setting(resource=False, static_batch=False)


def in_turn(*axes: Sequence[Any]) -> List[Any]:
    """Every combination, each with one of the two settings in turn; with both in `make test-all`."""
    return [pytest.param(*values, setting, marks=[] if (i + j) % 2 else [pytest.mark.full],
                         id="-".join(list(map(str, values)) + ["resource" if setting.resource else "reference"]))
            for i, values in enumerate(itertools.product(*axes)) for j, setting in enumerate((FEDS, REFERENCES))]


@functools.lru_cache(maxsize=None)
def local(name: str, setting: Setting, model_replicas: int = 1) -> Outcome:
    return run_local(find_case(name), setting, model_replicas)


def check(name: str, counts: Tuple[int, ...], total: int, setting: Setting = FEDS, **config: Any) -> Dict[str, str]:
    """The case under a plan equals the local script; returns the patterns chosen, by op."""
    split = Split(counts, total, tuple((key.replace("__", "."), value) for key, value in config.items()))
    replicas = total // sum(map(abs, counts)) if setting.dataset else 1
    ran = run_split(find_case(name), setting, split, model_replicas=replicas)
    assert_equal(ran.outcome, local(name, reference(setting), replicas), TOLERANCE[setting.dtype])
    return dict(ran.plan.shards)


# -- patterns ----------------------------------------------------------------------------------------------------------


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("pattern,count,setting", in_turn(["column", "row"], [2, 3, 4]))
def test_dense_layer(pattern: str, count: int, setting: Setting) -> None:
    """Ten classes over three devices are 4, 3 and 3; the momentum slots are divided like their variables."""
    shards = check("classifier_momentum", (-count,), count, setting, patterns__force={"classes": pattern})
    assert shards["classes/MatMul"] == pattern


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("case", ["classifier_sgd", "dense_labels"])
@pytest.mark.parametrize("count", [2, 3])
def test_class_sharded_loss(case: str, count: int) -> None:
    shards = check(case, (-count,), count, REFERENCES, patterns__force={"classes": "column", _loss(case): "class_sharded"})
    assert "class_sharded" in shards.values()


def _loss(case: str) -> str:
    return "softmax_cross_entropy_with_logits" if case == "dense_labels" else \
        "SparseSoftmaxCrossEntropyWithLogits/SparseSoftmaxCrossEntropyWithLogits"


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("pattern,optimizer,setting", in_turn(["embedding", "embedding_column"], sorted(OPTIMIZERS)))
def test_look_up_with_sparse_gradients(optimizer: str, pattern: str, setting: Setting) -> None:
    """Optimizers that must not touch rows without a gradient (momentum, RMSProp) do not."""
    shards = check("look_up_" + optimizer, (-3,), 3, setting, patterns__force=pattern)
    assert pattern in shards.values()


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("count,setting", in_turn([2, 3, 4]))
def test_transformer(count: int, setting: Setting) -> None:
    """Attention by heads (four heads over three devices, too) and Megatron's pair of layers, clipped by a global norm."""
    shards = check("transformer", (-count,), count, setting)
    assert [shards["wide/MatMul"], shards["narrow/MatMul"]] == ["column", "row"]
    if count != 3:
        assert [shards[name + "/MatMul"] for name in ("query", "key", "value", "output")] == ["column"] * 3 + ["row"]


@pytest.mark.slow
def test_vocabulary_is_divided_in_a_transformer() -> None:
    assert "embedding" in check("transformer", (-2,), 2, patterns__force={"embedding_lookup": "embedding"}).values()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["convolution", "batch_norm"])
def test_convolution_by_channel(case: str) -> None:
    shards = check(case, (-2,), 2, patterns__force={"one": "output_channel", "two": "output_channel"})
    assert shards["two/Conv2D"] == "output_channel"


@pytest.mark.slow
def test_mixture_of_experts() -> None:
    assert "stack" in check("experts_adam", (-2,), 2).values()


@pytest.mark.slow
@pytest.mark.parametrize("case,count,force,setting", [
    ("classifier_adafactor", 2, {"classes": "column", "features": "row"}, FEDS),
    ("classifier_adafactor", 3, {"classes": "row", "features": "column"}, REFERENCES),
    ("classifier_lamb", 2, {"classes": "row", "features": "column"}, REFERENCES),
    ("classifier_lamb", 3, {"classes": "column", "features": "row"}, FEDS),
    ("experts_adafactor", 3, None, FEDS),
    ("experts_adafactor", 2, "column", REFERENCES),
    ("experts_lamb", 3, "row", FEDS),
], ids=str)
@pytest.mark.half
def test_moments_over_a_divided_dimension_and_norms_over_shards(case: str, count: int, force: Any, setting: Setting) -> None:
    """Adafactor's row and column means (of square matrices, too, and of stacks of matrices), LAMB's trust ratios."""
    assert check(case, (-count,), count, setting, patterns__force=force)


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("plan,setting", in_turn([((-3,), 3, 1), ((1, -2), 3, 4), ((-2, 2), 8, 2)]))
def test_batch(plan: Tuple[Tuple[int, ...], int, int], setting: Setting) -> None:
    """A forced ``batch``: each device computes the layer for its examples, alone, in a pipeline, and nested."""
    counts, total, micro_batches = plan
    unit = "query" if counts[0] < 0 else "wide"
    shards = check("transformer", counts, total, setting, num_micro_batch=micro_batches, patterns__force={unit: "batch"})
    assert shards[unit + "/MatMul"] == "batch" and {"row", "column"} <= set(shards.values())


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("case", ["sum_with_l2", "tied_embedding", "gan", "encoder", "weighted_loss"])
def test_models_of_the_matrix(case: str) -> None:
    check(case, (-2,), 2)


@pytest.mark.slow
def test_float32() -> None:
    check("transformer", (-2,), 2, Setting(dtype="float32"))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["column", "row"])
def test_attributes_that_say_a_shape(pattern: str) -> None:
    """They say that of the part."""
    shards = check("known_shapes", (-3,), 3, REFERENCES, patterns__force={"wide": pattern})
    assert shards["wide/MatMul"] == pattern


@pytest.mark.slow
@pytest.mark.parametrize("count,setting", [(2, FEDS), (4, REFERENCES)], ids=["2", "4"])
def test_kernels_are_divided_through_what_stands_before_their_product(count: int, setting: Setting, monkeypatch: Any) -> None:
    whole: List[str] = []

    def assign(problem: Any, *options: Any) -> Any:
        found = sharding.assign(problem, *options)
        whole.extend(op.name for op in problem.graph.ops if op.id in problem.variables and op.id not in found.variables
                     and len(op.attrs["shape"]) > 1)
        return found

    monkeypatch.setattr(division, "assign", assign)
    check("between", (-count,), count, setting)
    assert not whole


# -- hybrids -----------------------------------------------------------------------------------------------------------


HYBRIDS: Dict[str, Tuple[str, Tuple[int, ...], int, Dict[str, Any]]] = {
    "shared by all": ("classifier_adam", (2, -2), 2, {}),
    "colocated": ("classifier_adam", (2, -2), 2, {"cluster__colocate_split_and_replicate": True}),
    "colocated, of other counts": ("classifier_adam", (1, -2), 2, {"cluster__colocate_split_and_replicate": True}),
    "colocated in two model replicas": ("classifier_adam", (2, -2), 4, {
        "cluster__colocate_split_and_replicate": True, "init": "sharded"}),
    "shared, rows chosen by data": ("masked", (2, -2), 2, {}),
    "apart": ("classifier_adam", (2, -2), 4, {}),
    "split first": ("tied_embedding", (-2, 2), 4, {}),
    "pipeline": ("transformer", (1, -2), 3, {"num_micro_batch": 4}),
    "pipeline of splits": ("transformer", (-2, -2), 4, {
        "num_micro_batch": 2, "pipeline__schedule": "gpipe", "init": "sharded"}),
    "pipeline, replicate and split": ("transformer", (2, -2), 4, {"num_micro_batch": 2}),
    "micro-batches": ("transformer", (-2,), 2, {"num_micro_batch": 4}),
    "nested": ("transformer", (-2,), 4, {}),
    "nested, factored moments": ("classifier_adafactor", (1, -2), 6, {"num_micro_batch": 2}),
    "nested pipeline": ("look_up_adam", (-2, 1), 6, {"num_micro_batch": 2}),
}


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("hybrid,setting", in_turn(sorted(HYBRIDS)))
def test_hybrids(hybrid: str, setting: Setting) -> None:
    case, counts, total, config = HYBRIDS[hybrid]
    assert check(case, counts, total, setting, **config)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [Setting(dataset=True), Setting(dataset=True, runner="monitored", resource=False),
                                     Setting(runner="callable")], ids=str)
def test_inputs_and_sessions(setting: Setting) -> None:
    check("classifier_adam", (1, -2), 6, setting, patterns__force={"classes": "column"})


@pytest.mark.slow
def test_default_strategy_around_a_split() -> None:
    """Whale's Example 5: everything is replicated but what is under split."""
    def train(split: bool) -> List[float]:
        if split:
            wh.init(cluster="cpu:2")
        try:
            with tf.Graph().as_default():
                if split:
                    wh.set_default_strategy(wh.replicate(2))
                case = find_case("classifier_adam")
                inputs, feeds = source(case.examples(sum(case.sizes), "float64"), case.sizes, FEDS)
                hidden = tf.tanh(dense(inputs["x"], 12, "in"))
                scope = wh.split(2) if split else Stages().scopes[0]()
                with scope:
                    hidden = dense(tf.nn.relu(dense(hidden, 24, "wide")), 12, "narrow")
                logits = dense(tf.tanh(hidden), CLASSES, "out")
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=inputs["label"], logits=logits))
                update = tf.train.AdamOptimizer(0.01, epsilon=1e-4).minimize(loss)
                with tf.Session() as session:
                    session.run(tf.global_variables_initializer())
                    losses = [session.run([loss, update], feed)[0] for feed in feeds]
                if split:
                    assert dict(wh.current_plan().shards) == {"wide/MatMul": "column", "narrow/MatMul": "row"}
                return losses
        finally:
            wh.shutdown()

    assert max(relative(a, b) for a, b in zip(train(True), train(False))) <= TOLERANCE["float64"]


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_saved_plan_gives_the_same_shards() -> None:
    case = find_case("transformer")
    first = run_split(case, FEDS, Split((1, -2), 3, (("num_micro_batch", 2),)))
    again = run_split(case, FEDS, Split((1, -2), 3), plan=first.plan.to_json())
    assert again.plan == first.plan
    assert_equal(again.outcome, local("transformer", FEDS), TOLERANCE["float64"])


@pytest.mark.slow
def test_edited_shards_are_run_or_refused() -> None:
    case, split = find_case("classifier_sgd"), Split((-2,), 2)
    plan = run_split(case, FEDS, split, None).plan
    assert plan.shards["classes/MatMul"] == "row"
    edited = replace(plan, shards=dict(plan.shards, **{"classes/MatMul": "column"}))
    ran = run_split(case, FEDS, split, edited)
    assert ran.plan.shards["classes/MatMul"] == "column"
    assert_equal(ran.outcome, local("classifier_sgd", FEDS), TOLERANCE["float64"])
    for shards, message in (({"classes/MatMul": "heads"}, "asks for pattern 'heads' of 'classes/MatMul' .*it has: rows?, "),
                            ({"classes/MatMull": "row"}, "not an op under wh.split.*Did you mean 'classes/MatMul'")):
        with pytest.raises(wh.PlanError, match=message):
            run_split(case, FEDS, split, replace(plan, shards=shards))


# -- checkpoints -------------------------------------------------------------------------------------------------------

PLANS: Dict[str, Any] = {"local": None, "split2": Split((-2,), 2), "split3": Split((-3,), 3), "replicate2": Split((2,), 2),
                         "pipeline": Split((1, -2), 3, (("num_micro_batch", 2),))}


def train(plan: str, first: int, setting: Setting, restore: str = "", save: str = "") -> Tuple[List[float], List[str]]:
    case, split = find_case("classifier_adam"), PLANS[plan]
    if split is None:
        return train_half(case, setting, first, restore, save)
    return train_half(case, setting, first, restore, save, split.total, dict(split.config), split.scopes)


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("plans,setting", in_turn([("split3", "local"), ("local", "split2"), ("split2", "split3"),
                                                  ("split2", "replicate2"), ("pipeline", "split2")]))
def test_checkpoints_hold_the_local_model(plans: Tuple[str, str], setting: Setting, tmp_path: Any) -> None:
    writer, reader = plans
    path, whole = str(tmp_path / "model"), str(tmp_path / "whole")
    _, names = train("local", 0, setting, save=whole)
    expected, _ = train("local", HALF, setting, restore=whole)
    train(writer, 0, setting, save=path)
    losses, _ = train(reader, HALF, setting, restore=path)
    assert max(relative(a, b) for a, b in zip(losses, expected)) <= TOLERANCE["float64"]
    assert sorted(name for name, _ in tf.train.list_variables(path)) == names
    assert dict(tf.train.list_variables(path)) == dict(tf.train.list_variables(whole))


# -- what a user does with a session ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("setting", [FEDS, REFERENCES], ids=["resource", "reference"])
def test_divided_variables_look_whole(setting: Setting) -> None:
    """Reads, assigns, load, fetches of tensors inside, and ops that were built after the first step."""
    wh.init({"patterns.force": "column"}, cluster="cpu:3")
    try:
        with tf.Graph().as_default() as graph, tf.variable_scope("", use_resource=setting.resource):
            x = tf.placeholder("float64", [None, 4])
            with wh.split(3):
                y = dense(x, CLASSES, "layer")
            queries = [op.outputs[0] for op in graph.get_operations() if op.type == "VarIsInitializedOp"]  # which nothing reads
            loss = tf.reduce_mean(tf.square(y))
            kernel, bias = tf.trainable_variables()
            double = kernel.assign(2.0 * kernel)
            with tf.control_dependencies([double]):
                after = kernel.read_value()
            update = tf.train.GradientDescentOptimizer(0.5).minimize(loss)
            missing = tf.report_uninitialized_variables()
            feed = {x: np.arange(12.0).reshape(3, 4) / 10.0}
            with tf.Session() as session:
                assert len(session.run(missing)) == 2 and not any(session.run(queries))
                session.run(tf.global_variables_initializer())
                assert len(session.run(missing)) == 0 and all(session.run(queries)) and bool(queries) == setting.resource
                w, b = session.run([kernel, bias])
                assert w.shape == (4, CLASSES)
                np.testing.assert_allclose(session.run(y, feed), feed[x].dot(w) + b, rtol=1e-12)
                np.testing.assert_array_equal(session.run(after), 2.0 * w)
                np.testing.assert_array_equal(session.run(double), 4.0 * w)
                kernel.load(w, session)
                np.testing.assert_array_equal(session.run(kernel), w)
                value, _ = session.run([y, update], feed)
                np.testing.assert_allclose(value, feed[x].dot(w) + b, rtol=1e-12)
                grown = session.run(kernel)
                assert np.abs(grown - w).max() > 0
                np.testing.assert_array_equal(session.run(tf.identity(kernel) + 1.0), grown + 1.0)  # built late
                session.run(tf.assign(bias, np.ones(CLASSES)))
                np.testing.assert_allclose(session.run(y, feed), feed[x].dot(grown) + 1.0, rtol=1e-12)
                assert session.run([y.op, update], feed) == [None, None]
    finally:
        wh.shutdown()


@pytest.mark.slow
def test_session_that_ran_before_the_split() -> None:
    """Parts take the values that the variables have by then."""
    wh.init(cluster="cpu:2")
    try:
        with tf.Graph().as_default():
            x = tf.placeholder("float64", [None, 4])
            with wh.split(2):
                y = dense(x, 6, "layer")
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                before = session.run(tf.trainable_variables())
                update = tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_mean(y))
                session.run(update, {x: np.ones([2, 4])})
                for value, expected in zip(session.run(tf.trainable_variables()), before):
                    np.testing.assert_array_equal(value, expected)
    finally:
        wh.shutdown()


# -- refusals ----------------------------------------------------------------------------------------------------------


def refuse(build: Any, error: type, message: str, count: int = 4, **config: Any) -> None:
    wh.init({key.replace("__", "."): value for key, value in config.items()}, cluster=f"cpu:{count}")
    try:
        with tf.Graph().as_default() as graph:
            x = tf.placeholder("float64", [None, 3])
            with wh.split(count):
                y = build(x)
            update = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(y))
            version = [(op.name, [t.name for t in op.inputs]) for op in graph.get_operations()]
            with pytest.raises(error, match=message):
                wh.parallelize()
            assert [(op.name, [t.name for t in op.inputs]) for op in graph.get_operations()][:len(version)] == version
            wh.shutdown()
            with tf.Session() as session:  # the local script still runs
                session.run(tf.global_variables_initializer())
                session.run(update, {x: np.ones([2, 3])})
    finally:
        wh.shutdown()


def test_refuses_a_dimension_smaller_than_the_devices() -> None:
    refuse(lambda x: dense(x, 2, "small"), wh.UnsupportedOpError,
           r"nothing in TaskGraph 'split_0' can be divided over 4 devices: 'small/MatMul': .*has 3 elements, fewer than 4")


def test_refuses_a_layer_of_unknown_size() -> None:
    def build(x: tf.Tensor) -> tf.Tensor:
        chosen = tf.boolean_mask(x, x[:, 0] > 0)  # as many rows as the data choose
        return tf.matmul(tf.matmul(x, chosen, transpose_b=True), chosen) * tf.get_variable("w", [3], "float64")

    refuse(build, wh.UnsupportedOpError,
           "nothing in TaskGraph 'split_0' can be divided over 4 devices: .*'MatMul_1': the size of dimension 'm' is not known")


def test_refuses_a_shape_that_follows_from_data() -> None:
    def build(x: tf.Tensor) -> tf.Tensor:
        size = tf.cast(tf.reduce_sum(x - x), tf.int32)
        image = tf.reshape(x, [-1, 1, 1, 3])
        kernel = tf.get_variable("kernel", [1, 1, 8, 3], "float64")
        return tf.nn.conv2d_transpose(image, kernel, tf.stack([tf.shape(x)[0], 1 + size, 1, 8]), 1)

    refuse(build, wh.UnsupportedOpError, "a shape operand that follows from data")


def test_refuses_a_part_without_anything_to_divide() -> None:
    refuse(lambda x: tf.tanh(x) * tf.get_variable("w", [3], "float64"), wh.UnsupportedOpError,
           "it has no matrix product, convolution or embedding. Use fewer devices, or wh.replicate")


def test_says_that_the_product_is_in_a_functional_loop() -> None:
    def build(x: tf.Tensor) -> tf.Tensor:
        kernel = tf.get_variable("w", [3, 3], "float64", use_resource=True)
        tf.enable_control_flow_v2()
        return tf.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, tf.matmul(h, kernel)), [0, x])[1]

    before = tf.control_flow_v2_enabled()
    try:
        refuse(build, wh.UnsupportedOpError, "its products are inside the function, loop or condition .*While.* runs whole")
    finally:
        (tf.enable_control_flow_v2 if before else tf.disable_control_flow_v2)()


@pytest.mark.parametrize("force,message", [
    ("heads", "no op under wh.split has that pattern; there are: .*column"),
    ({"wide": "embedding"}, r"asks for pattern 'embedding' of 'wide/MatMul' \(MatMul\)"),
    ({"wild": "row"}, "names unit 'wild', which is not an op or name scope"),
    ({"wide": "row"}, "dimension 'k' has 3 elements, fewer than 4 devices"),
])
def test_refuses_patterns_that_do_not_match(force: Any, message: str) -> None:
    refuse(lambda x: dense(x, 8, "wide"), wh.ConfigError, message, patterns__force=force)


def test_refuses_batch_of_rows_that_the_data_choose() -> None:
    """Nobody knows which rows of the next layer are a device's."""
    refuse(lambda x: dense(dense(tf.boolean_mask(x, x[:, 0] > 0), 8, "wide"), 8, "next"), wh.ConfigError,
           "pattern 'batch' of 'wide/MatMul', which a device cannot compute for its own examples",
           patterns__force={"wide": "batch"})


def test_refuses_colocation_in_a_pipeline() -> None:
    with pytest.raises(wh.AnnotationError, match="each stage of a pipeline needs its own devices"):
        run_split(find_case("classifier_sgd"), FEDS, Split((1, -2), 2, (("cluster.colocate_split_and_replicate", True),
                                                                  ("num_micro_batch", 2))))
