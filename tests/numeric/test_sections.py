"""Models that need all examples together equal the local script: each under one plan, and with ``--full`` under all."""
from __future__ import annotations

import contextlib
import sys
import warnings
from typing import Any, Iterator, List, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.numeric.cases import Inputs, register
from tests.numeric.equality import TOLERANCE, assert_equal, run_local, run_parallel
from tests.numeric.generated_losses import loss_of
from tests.numeric.plans import SHAPES, Parallel
from tests.numeric.races import no_races
from tests.numeric.script import Arrays, Script, Setting, Stages, dense
from tests.numeric.section_cases import LOSSES, SECTIONS, case_of
from tests.numeric.section_papers import PAPERS
from tests.numeric.section_styles import STYLES
from tests.numeric.section_table import PLANS
from tests.numeric.split import Split, run_split

ALL = [(name, plan, static) for name in SECTIONS for plan in PLANS for static in (True, False)]
FEW = [name for name in SECTIONS if name not in STYLES and name not in PAPERS] + [
    "distances_by_where", "tiled_cube", "transport", "worst_example", "whitened", "partitioned", "mapped", "cond_on_largest",
    *PAPERS, "positions_of_chosen_examples", "columns_of_positions", "loop_to_the_largest_label", "as_many_of_the_hardest"]
SOME = [(name, list(PLANS)[i % len(PLANS)], bool(i // len(PLANS) % 2)) for i, name in enumerate(FEW)]


def _check(name: str, plan: str, static: bool) -> None:
    setting = Setting(static_batch=static)
    with warnings.catch_warnings():
        warnings.simplefilter("error", wh.InexactWarning)
        found = run_parallel(SECTIONS[name], setting, PLANS[plan])
    assert_equal(found, run_local(SECTIONS[name], setting), TOLERANCE["float64"])


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("name, plan, static", SOME, ids=lambda value: str(value))
def test_sections(name: str, plan: str, static: bool) -> None:
    _check(name, plan, static)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name, plan, static", [row for row in ALL if row not in SOME], ids=lambda value: str(value))
def test_all_sections(name: str, plan: str, static: bool) -> None:
    _check(name, plan, static)


@pytest.mark.slow
@pytest.mark.parametrize("name, plan", [("several", "nested"), ("segment_means", "1:3"), ("batch_normalised", "accumulation")])
def test_sections_among_calls(name: str, plan: str) -> None:
    """Clones are calls of functions; a section, which runs once, is not."""
    called, setting = PLANS[plan]._replace(extra=PLANS[plan].extra + (("emit", "call"),)), Setting(static_batch=False)
    assert_equal(run_parallel(SECTIONS[name], setting, called), run_local(SECTIONS[name], setting), TOLERANCE["float64"])


def test_names_of_cases_are_their_own() -> None:
    with pytest.raises(ValueError, match="there is another 'mlp_mean' already"):
        register({"mlp_mean": SECTIONS["masked_mean"]})


@pytest.mark.slow
def test_lists_of_a_loop_over_all_examples_have_elements_of_all_examples() -> None:
    _check("loop_to_the_largest_label", "data parallel 2", True)


@pytest.mark.slow
def test_branchs_parameter_of_unknown_rank_is_cut() -> None:
    """The gradient of a branch that was not taken: zeros for all examples."""
    _check("cases_by_statistics", "data parallel 4", True)


@pytest.mark.slow
@pytest.mark.parametrize("name, plan, static", [
    ("normalised_in_thirds", "data parallel 4", False), ("normalised_in_thirds", "1:3", False),
    ("pairs_in_python", "accumulation", True), ("pairs_in_python", "data parallel 4", False)])
def test_rows_that_are_not_examples(name: str, plan: str, static: bool) -> None:
    """A third of the batch, or what a Python function makes of it."""
    _check(name, plan, static)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data parallel 2", "pipeline"])
def test_averaged_statistics_that_normalise_nothing(plan: str) -> None:
    _check("moving_class_means", plan, False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["contrastive", "masked_mean"])
def test_ragged_last_batch(name: str) -> None:
    case, setting = case_of(LOSSES[name], 7), Setting(static_batch=False)
    assert_equal(run_parallel(case, setting, PLANS["data parallel 2"]), run_local(case, setting), TOLERANCE["float64"])


@pytest.mark.slow
def test_part_without_an_example_counts_nothing() -> None:
    def by_label(count: int, dtype: str) -> Arrays:
        arrays = SECTIONS["masked_mean"].examples(count, dtype)
        arrays["label"] = np.arange(count, dtype="int32") % 12 // 4  # two of four parts have none of class 0
        return arrays

    for name in ("masked_mean", "segment_means"):
        case = SECTIONS[name]._replace(examples=by_label)
        found = run_parallel(case, Setting(), PLANS["data parallel 4"])
        assert_equal(found, run_local(case, Setting()), TOLERANCE["float64"])


def condition_of_sections(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """Both what a condition's branches read and their gradient come from sections."""
    loss = loss_of("condition+ranked+roll>ratio")
    return loss(z, {"target": inputs["target"], "weight": inputs["score"]})


@pytest.mark.slow
@pytest.mark.parametrize("plan, static", [("data parallel 2", False), ("pipeline", False), ("1:3", True)])
def test_condition_of_tensorflow_1_between_sections(plan: str, static: bool) -> None:
    case, setting, before = case_of(condition_of_sections), Setting(static_batch=static), tf.control_flow_v2_enabled()
    tf.disable_control_flow_v2()
    try:
        assert_equal(run_parallel(case, setting, PLANS[plan]), run_local(case, setting), TOLERANCE["float64"])
    finally:
        (tf.enable_control_flow_v2 if before else tf.disable_control_flow_v2)()


def positions_of_an_earlier_stage(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    def first(x: tf.Tensor) -> Tuple[tf.Tensor, ...]:
        h = tf.tanh(dense(x, 4, "first"))
        position, down = tf.range(tf.shape(h)[0]), tf.range(0, -tf.shape(h)[0], -1)
        return h, position, down, tf.stack([position, inputs["label"]], 1)

    def second(state: Tuple[tf.Tensor, ...]) -> Tuple[tf.Tensor, tf.Tensor]:
        h, position, down, index = state
        z = dense(h, 4, "second")
        return z, tf.reduce_mean(tf.gather_nd(z, index) * tf.cast(position - 2 * down, z.dtype)) + tf.reduce_mean(
            tf.square(z - inputs["target"]))

    z, loss = stages.run([first, second], inputs["x"])
    return Script([[tf.train.GradientDescentOptimizer(0.1).minimize(loss)]], {"loss": loss}, {"z": z})


@pytest.mark.slow
def test_positions_cross_to_a_task_graph_with_other_replicas() -> None:
    case = SECTIONS["rmse"]._replace(build=positions_of_an_earlier_stage)
    found = run_split(case, Setting(static_batch=False), Split((2, 1), 3)).outcome
    assert_equal(found, run_local(case, Setting(static_batch=False)), TOLERANCE["float64"])


OWN = Parallel(SHAPES["nested2x2"], 2)


def scaled(z: tf.Tensor, inputs: Inputs) -> tf.Tensor:
    """What needs all examples reads an input alone."""
    return tf.reduce_mean(tf.square(z)) * tf.sort(inputs["score"])[2]


@pytest.mark.slow
@pytest.mark.parametrize("name, form", [
    ("contrastive", "inline"), ("both_directions", "inline"), ("right_among_first", "call"), ("running_sums", "call"),
    ("scaled", "inline")])
def test_model_replicas_put_mini_batches_of_their_own_together(name: str, form: str) -> None:
    case = case_of(scaled) if name == "scaled" else SECTIONS[name]
    setting = Setting(dataset=True, static_batch=False)
    found = run_parallel(case, setting, OWN._replace(extra=(("emit", form),)))
    assert_equal(found, run_local(case, setting, 2), TOLERANCE["float64"])


@pytest.mark.slow
def test_mini_batches_of_a_static_size_meet_in_sums_only() -> None:
    setting = Setting(dataset=True)
    assert_equal(run_parallel(SECTIONS["rmse"], setting, OWN), run_local(SECTIONS["rmse"], setting, 2), TOLERANCE["float64"])
    for case in (SECTIONS["contrastive"], case_of(scaled)):
        with pytest.raises(wh.PlanError, match="needs all examples of .* is static .* leave the batch size open"):
            run_parallel(case, setting, OWN)


# -- what is told ------------------------------------------------------------------------------------------------------


def _trained(loss: str, normalised: bool, config: Any) -> Tuple[str, List[str]]:
    """What ``wh.explain()`` says of a step, and the warnings."""
    with tf.Graph().as_default(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", wh.InexactWarning)
        wh.init(config, cluster="cpu:2")
        try:
            x = tf.placeholder(tf.float32, [8, 4, 4, 2])
            with wh.replicate(2):
                y = tf.nn.conv2d(x, tf.get_variable("w", [1, 1, 2, 2]), [1, 1, 1, 1], "SAME")
                if normalised:
                    y = tf.nn.fused_batch_norm(y, tf.get_variable("scale", [2]), tf.get_variable("offset", [2]))[0]
                value = tf.reduce_mean(tf.square(y))
                value = tf.sqrt(value) if loss == "root" else value
            update = tf.train.GradientDescentOptimizer(0.1).minimize(value)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run(update, {x: np.ones([8, 4, 4, 2])})
            return wh.explain(), [str(each.message) for each in caught if issubclass(each.category, wh.InexactWarning)]
        finally:
            wh.shutdown()


@contextlib.contextmanager
def _shown() -> Iterator[None]:
    """Every warning goes to stderr, as Python shows it."""
    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))

    with warnings.catch_warnings():
        warnings.simplefilter("always", wh.InexactWarning)
        warnings.showwarning = show
        yield


def _normalised(initialised: List[int]) -> Tuple[tf.Tensor, tf.Operation]:
    """A loss and its update; ``initialised`` grows when an initial value is computed."""
    def ones() -> np.ndarray:
        initialised.append(1)
        return np.ones([1, 1, 2, 2], "float32")

    x = tf.constant(np.random.RandomState(0).randn(8, 4, 4, 2), tf.float32)
    x = tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensors(x).repeat()).get_next()
    first = tf.py_func(ones, [], tf.float32)
    first.set_shape([1, 1, 2, 2])
    with wh.replicate(2), tf.variable_scope("norm"):
        y = tf.nn.conv2d(x, tf.get_variable("w", initializer=first), [1, 1, 1, 1], "SAME")
        y = tf.nn.fused_batch_norm(y, tf.get_variable("scale", [2]), tf.get_variable("offset", [2]))[0]
    loss = tf.reduce_mean(tf.square(y - 1.0))
    step = tf.train.get_or_create_global_step()
    return loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss, step)


def _in_a_session(initialised: List[int], folder: str) -> None:
    with tf.Graph().as_default():
        update = _normalised(initialised)[1]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(2):
                session.run(update)


def _in_a_monitored_session(initialised: List[int], folder: str) -> None:
    with tf.Graph().as_default():
        update = _normalised(initialised)[1]
        with tf.train.MonitoredTrainingSession(checkpoint_dir=folder) as session:
            for _ in range(2):
                session.run(update)


def _in_an_estimator(initialised: List[int], folder: str) -> None:
    """Trains twice, each time in a graph of its own."""
    def model(features: tf.Tensor, mode: str) -> Any:
        loss, update = _normalised(initialised)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=update)

    estimator = tf.estimator.Estimator(model, model_dir=folder)
    for steps in (1, 2):
        estimator.train(lambda: tf.data.Dataset.from_tensors(tf.zeros([1])), max_steps=steps)


KINDS = [_in_a_session, _in_a_monitored_session] + ([_in_an_estimator] if tf.__version__.startswith("1.") else [])


@pytest.mark.slow
@pytest.mark.parametrize("train", KINDS)
def test_inexact_op_is_told_once_in_every_kind_of_session(train: Any, tmp_path: Any, capsys: Any) -> None:
    initialised: List[int] = []
    for config, folder in (({"on_inexact": "error"}, "error"), ({}, "warn"), ({"on_inexact": "allow"}, "allow")):
        wh.init(config, cluster="cpu:2")
        try:
            with _shown(), pytest.raises(wh.InexactError) if config.get("on_inexact") == "error" else contextlib.nullcontext():
                train(initialised, str(tmp_path / folder))
        finally:
            wh.shutdown()
        assert bool(initialised) == (folder != "error"), "an error comes before anything runs"
        told = capsys.readouterr().err
        assert told.count("InexactWarning: op 'norm/FusedBatchNorm") == told.count("InexactWarning: ") == (folder == "warn"), told


def test_update_waits_for_all_clones_that_read_its_reference_variable() -> None:
    """Its gradient is computed once, while each clone reads the variable for the gradient of what it is multiplied with."""
    wh.init(cluster="cpu:3")
    try:
        with tf.Graph().as_default(), wh.replicate(3):
            x, groups = tf.placeholder("float64", [12, 3]), tf.constant(np.arange(12) % 4)
            one, two = (tf.get_variable(name, initializer=np.eye(3), use_resource=False) for name in ("one", "two"))
            h = tf.gather(tf.math.unsorted_segment_sum(tf.tanh(tf.matmul(x, one)), groups, 4), groups)
            update = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.square(tf.matmul(h, two))))
            with no_races(), tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run(update, {x: np.ones([12, 3])})
    finally:
        wh.shutdown()


def test_inexact_op_warns_once() -> None:
    explained, told = _trained("mean", True, {})
    assert len(told) == 1 and "(FusedBatchNorm" in told[0] and "Set sync_batch_norm to True" in told[0]
    assert "Not exactly the local result (2 place(s))" in explained
    assert _trained("mean", True, {"on_inexact": "allow"})[1] == []
    with pytest.raises(wh.InexactError, match="FusedBatchNorm.* statistics are computed for each part"):
        _trained("mean", True, {"on_inexact": "error"})


def test_explain_tells_what_runs_on_all_examples() -> None:
    explained, told = _trained("root", False, {"on_inexact": "error"})
    assert "need all examples together" in explained and "Sqrt (Sqrt)" in explained and "Exact:" in explained and not told
    assert "need all examples together" not in _trained("mean", False, {})[0]
