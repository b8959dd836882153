"""Hooks call back, change nothing by themselves, and leave TensorFlow as it was."""
from __future__ import annotations

import inspect
from typing import Any, Iterator, List

import pytest
import tensorflow as tf

import whale_tf as wh
from tests.capture.models import MODELS, placeholder
from whale_tf.capture import hooks, tapes
from whale_tf.capture.annotations import annotations_of
from whale_tf.errors import UnsupportedTensorFlowError

v1 = tf.compat.v1


def originals() -> List[Any]:
    return [vars(hook.owner)[hook.attribute] for hook in hooks.HOOKS]


BEFORE = originals()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    hooks.uninstall()
    assert all(now is before for now, before in zip(originals(), BEFORE))


def recording(log: List[str]) -> hooks.Callbacks:
    """Callbacks that write their names into ``log`` and go on as TensorFlow would."""
    def through(name: str) -> Any:
        def callback(session: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
            log.append(name)
            return original(*args, **kwargs)
        return callback

    def config(target: str, graph: Any, given: Any) -> Any:
        log.append("session_config")
        return given

    return hooks.Callbacks(
        before_finalize=lambda graph: log.append("before_finalize"),
        session_config=config, run=through("run"), make_callable=through("make_callable"),
        partial_run_setup=through("partial_run_setup"), before_extend=lambda session: log.append("before_extend"))


def test_uninstall_restores_the_identical_objects() -> None:
    hooks.install(hooks.Callbacks())
    assert hooks.installed()
    assert not any(now is before for now, before in zip(originals(), BEFORE))
    hooks.uninstall()
    assert not hooks.installed()
    assert all(now is before for now, before in zip(originals(), BEFORE))
    hooks.uninstall()
    assert all(now is before for now, before in zip(originals(), BEFORE))


def test_installing_twice_does_not_stack() -> None:
    first: List[str] = []
    second: List[str] = []
    hooks.install(recording(first))
    hooks.install(recording(second))
    with tf.Graph().as_default(), v1.Session() as session:
        session.run(tf.constant(1.0))
    assert first == []
    assert second == ["session_config", "run", "before_extend"]


def test_failing_install_leaves_nothing_behind(monkeypatch: Any) -> None:
    broken = hooks.Hook(tf.Graph, "no_such_attribute", hooks.HOOKS[0].wrapper)
    monkeypatch.setattr(hooks, "HOOKS", hooks.HOOKS[:3] + (broken,))
    with pytest.raises(UnsupportedTensorFlowError, match="does not have Graph.no_such_attribute"):
        hooks.install(hooks.Callbacks())
    assert not hooks.installed()


def test_failing_callback_leaves_tensorflow_usable() -> None:
    def refuse(session: Any, original: Any, *arguments: Any) -> Any:
        raise RuntimeError("refused")

    hooks.install(hooks.Callbacks(run=refuse))
    with tf.Graph().as_default(), v1.Session() as session:
        x = tf.constant(1.0)
        with pytest.raises(RuntimeError, match="refused"):
            session.run(x)
        hooks.uninstall()
        assert session.run(x) == 1.0


def test_every_way_to_run_calls_back() -> None:
    log: List[str] = []
    hooks.install(recording(log))
    with tf.Graph().as_default():
        x = placeholder([], "x")
        y = x + 1.0
        with v1.Session() as session:
            assert log == ["session_config"]
            assert session.run(y, {x: 1.0}) == 2.0
            assert y.eval({x: 2.0}) == 3.0
            assert log[1:] == ["run", "before_extend", "run", "before_extend"]
            del log[:]
            assert session.make_callable(tf.constant(7.0))() == 7.0
            assert log == ["make_callable", "before_extend"]
            assert session.make_callable(y, [x])(3.0) == 4.0
            assert log[2:] == ["make_callable", "run", "before_extend"]
            del log[:]
            handle = session.partial_run_setup([y], [x])
            assert session.partial_run(handle, y, {x: 4.0}) == 5.0
            assert log == ["partial_run_setup", "before_extend"]


def test_callback_gets_the_arguments_of_run() -> None:
    seen: List[Any] = []

    def run(session: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return original(*args, **kwargs)

    hooks.install(hooks.Callbacks(run=run))
    options, metadata = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE), v1.RunMetadata()
    with tf.Graph().as_default(), v1.Session() as session:
        x = placeholder([], "x")
        session.run({"y": x * 2.0}, feed_dict={x: 1.0}, options=options, run_metadata=metadata)
        session.run(x, {x: 1.0})
    (fetched,), given = seen[0]
    assert set(fetched) == {"y"} and given == {"feed_dict": {x: 1.0}, "options": options, "run_metadata": metadata}
    assert seen[1] == ((x, {x: 1.0}), {})
    assert metadata.step_stats.dev_stats


def test_session_config_can_be_changed() -> None:
    def two_devices(target: str, graph: Any, config: Any) -> Any:
        config = config or v1.ConfigProto()
        config.device_count["CPU"] = 2
        return config

    hooks.install(hooks.Callbacks(session_config=two_devices))
    for given in (None, v1.ConfigProto(allow_soft_placement=True)):
        with tf.Graph().as_default(), v1.Session(config=given) as session:
            assert len([d for d in session.list_devices() if d.device_type == "CPU"]) == 2


@pytest.mark.slow
def test_monitored_session_order() -> None:
    log: List[str] = []
    hooks.install(recording(log))
    with tf.Graph().as_default():
        MODELS["momentum"]()
        x = v1.get_default_graph().get_tensor_by_name("x:0")
        v1.train.get_or_create_global_step()
        with v1.train.MonitoredSession() as session:
            assert log[:2] == ["before_finalize", "session_config"]
            session.run("train", {x: [[0.0] * 8]})
    assert log.count("before_finalize") == 1


def test_every_callback_has_a_user() -> None:
    """Of those that a hook calls, none is left at its default by wh.init."""
    wh.init(cluster="cpu:1")
    try:
        callbacks = inspect.getclosurevars(v1.Session.run).nonlocals["callbacks"]
    finally:
        wh.shutdown()
    assert [name for name, value in callbacks._asdict().items() if value is hooks.Callbacks._field_defaults[name]] == []


def test_finalize_calls_back_once_and_not_for_function_bodies() -> None:
    finalized: List[Any] = []
    hooks.install(hooks.Callbacks(before_finalize=finalized.append))
    with tf.Graph().as_default() as graph:
        tf.data.Dataset.range(3).map(lambda i: i + 1)
        graph.finalize()
        graph.finalize()
    assert finalized == [graph]
    assert graph.finalized


def test_graph_may_still_grow_before_it_is_finalized() -> None:
    def add(graph: Any) -> None:
        with graph.as_default():
            tf.constant(1.0, name="late")

    hooks.install(hooks.Callbacks(before_finalize=add))
    with tf.Graph().as_default() as graph:
        graph.finalize()
    assert graph.get_operation_by_name("late") is not None


def test_backward_ops_name_their_forward_op(graph: Any) -> None:
    hooks.install(hooks.Callbacks())
    x = placeholder()
    y = tf.tanh(x, name="forward")
    gradient, = tf.gradients(y, x)
    assert gradient.op.get_attr("_whale_forward") == b"forward"
    assert gradient.op.get_attr("_whale_phase") == b"backward"
    with pytest.raises(ValueError):
        y.op.get_attr("_whale_phase")


def test_gradient_function_that_takes_gradients_is_one_call(graph: Any) -> None:
    @tf.custom_gradient
    def squared(x: Any) -> Any:
        y = x * x
        return y, lambda dy: dy * tf.gradients(y, x)[0]

    hooks.install(hooks.Callbacks())
    x = placeholder()
    tf.gradients(squared(x), x)
    assert [call.xs for call in annotations_of(graph).gradient_calls] == [["x:0"]]


def test_tapes_do_not_leave_calls_in_function_bodies(graph: Any, control_flow: Any, monkeypatch: Any) -> None:
    """A tape differentiates a condition's body through the same function; that is no call of the user's."""
    control_flow(True)
    noted: List[Any] = []
    monkeypatch.setattr(tapes, "gradient_call", lambda *arguments: noted.append(arguments))
    hooks.install(hooks.Callbacks())
    x = placeholder()
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = v1.cond(tf.reduce_sum(x) > 0, lambda: tf.tanh(x), lambda: 2.0 * x)
    assert tape.gradient(y, x) is not None
    assert noted == []


@pytest.mark.parametrize("name", ["loop", "condition", "function_call"])
def test_ops_of_bodies_have_no_forward_op(graph: Any, control_flow: Any, name: str) -> None:
    """The forward op of an op in a backward body is in another body, where a name means another op."""
    control_flow(True)
    hooks.install(hooks.Callbacks())
    MODELS[name]()
    functions = graph.as_graph_def().library.function
    assert functions
    assert not any("_whale_forward" in node.attr for function in functions for node in function.node_def)


def test_gradients_are_the_same_with_and_without() -> None:
    graphs = []
    for install in (hooks.uninstall, lambda: hooks.install(hooks.Callbacks())):
        install()
        with tf.Graph().as_default() as graph:
            MODELS["loop"]()
        graphs.append([(op.name, op.type, [t.name for t in op.inputs]) for op in graph.get_operations()])
    assert graphs[0] == graphs[1]


def test_after_uninstall_nothing_is_noted(graph: Any) -> None:
    hooks.install(hooks.Callbacks())
    hooks.uninstall()
    x = placeholder()
    gradient, = tf.gradients(tf.tanh(x), x)
    assert annotations_of(graph).gradient_calls == []
    with pytest.raises(ValueError):
        gradient.op.get_attr("_whale_phase")
