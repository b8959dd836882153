"""Fused batch normalisation in single ops: the same numbers, the same place in the graph, and exact under a plan."""
from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from models import resnet
from tests.numeric.equality import deviation
from whale_tf.capture import annotations as tags
from whale_tf.capture import hooks
from whale_tf.capture.recording import Recording, recording_of
from whale_tf.errors import PlanError, UnsupportedOpError
from whale_tf.graph_editor import StagedEdit
from whale_tf.transforms.batch_norm import sync_batch_norm

pytestmark = pytest.mark.half
v1 = tf.compat.v1
IS_TF1 = tf.__version__.startswith("1.")
IMAGES = np.random.RandomState(0).randn(6, 5, 4, 3).astype("float32") * 2 + 1
VOLUMES = IMAGES.reshape(6, 5, 2, 2, 3)
RUN = dict(scale=np.array([0.5, 1.0, 1.5], "float32"), offset=np.array([-1.0, 0.0, 2.0], "float32"),
           mean=np.array([1.0, 2.0, 3.0], "float32"), variance=np.array([4.0, 5.0, 6.0], "float32"))


@pytest.fixture
def hooked() -> Iterator[None]:
    """Gradient calls are noted; nothing is rewritten."""
    tags.forget()
    hooks.install(hooks.Callbacks())
    yield
    hooks.uninstall()
    tags.forget()


class Built(NamedTuple):
    """A small graph around one fused op; ``values`` read its outputs and the gradients that pass it."""

    y: tf.Tensor
    values: Dict[str, tf.Tensor]


def fused(x: tf.Tensor, version: int = 3, **attributes: Any) -> Any:
    """``FusedBatchNorm<version>`` with variables for scale and offset, in training mode."""
    variables = [v1.get_variable(name, initializer=RUN[name]) for name in ("scale", "offset")]
    op = getattr(tf.raw_ops, "FusedBatchNorm" + (f"V{version}" if version > 1 else ""))
    averages = dict(mean=RUN["mean"], variance=RUN["variance"]) if "exponential_avg_factor" in attributes else \
        dict(mean=tf.zeros([0]), variance=tf.zeros([0]))
    return op(x=x, scale=variables[0], offset=variables[1], is_training=True, epsilon=1e-3, **averages, **attributes)


def trained(inputs: tf.Tensor, build: Callable[[tf.Tensor], Any] = fused) -> Built:
    """A fused op between two sines, a loss that weighs every element differently, and an update."""
    factor = v1.get_variable("factor", initializer=np.float32(1.5))
    x = tf.sin(inputs * tf.cast(factor, inputs.dtype))
    outputs = build(x)
    y, mean, variance = outputs[:3]
    size = tf.cast(tf.range(tf.size(y)), tf.float32)
    loss = tf.reduce_sum(tf.sin(tf.cast(y, tf.float32) + tf.reshape(size, tf.shape(y))))
    wanted = [x] + v1.trainable_variables()
    gradients = tf.gradients(loss, wanted)
    v1.train.GradientDescentOptimizer(0.1).apply_gradients(list(zip(gradients, wanted))[1:])
    values = {"y": y, "mean": mean, "variance": variance}
    values.update((variable.op.name, gradient) for variable, gradient in zip(wanted, gradients))
    return Built(y, {name: tf.identity(value) for name, value in values.items()})


def run(values: Any) -> Any:
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        return session.run(values)


def assert_close(values: Dict[str, np.ndarray], expected: Dict[str, np.ndarray], tolerance: float = 1e-5) -> None:
    errors = {name: deviation(values[name], expected[name]) for name in expected}
    assert set(values) == set(expected) and max(errors.values()) <= tolerance, errors


def upstream(tensors: Any) -> List[tf.Operation]:
    stack, found = [tensor.op for tensor in tensors], set()
    while stack:
        op = stack.pop()
        if op not in found:
            found.add(op)
            stack.extend([tensor.op for tensor in op.inputs] + list(op.control_inputs))
    return sorted(found, key=lambda op: op.name)


def assert_decomposed(values: Dict[str, tf.Tensor]) -> None:
    assert not [op.name for op in upstream(values.values()) if "FusedBatchNorm" in op.type]


def nodes(graph: tf.Graph) -> Dict[str, bytes]:
    return {node.name: node.SerializeToString(deterministic=True) for node in graph.as_graph_def().node}


def decompose(graph: tf.Graph) -> Recording:
    """The pass, and what it makes of the graph carried out."""
    before = nodes(graph)
    step = sync_batch_norm(recording_of(graph))
    assert nodes(graph) == before
    StagedEdit.after(step.definitions).commit()
    return step


def successor(step: Recording, op: tf.Operation) -> str:
    """Name of the op in the place of a fused one."""
    return step.replaced[op.name + ":0"].partition(":")[0]


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("shape", [(6, 5, 4, 3), (None, 5, 4, 3), None], ids=["static", "unknown batch", "unknown rank"])
def test_values_and_gradients(hooked: None, graph: tf.Graph, version: int, shape: Any) -> None:
    inputs = v1.placeholder_with_default(IMAGES, shape)
    built = trained(inputs, lambda x: fused(x, version))
    expected = run(built.values)
    decompose(graph)
    assert_decomposed(built.values)
    assert_close(run(built.values), expected)


def test_half_precision(hooked: None, graph: tf.Graph) -> None:
    built = trained(tf.constant(IMAGES.astype("float16")))
    expected = run(built.values)
    decompose(graph)
    assert_decomposed(built.values)
    assert_close(run(built.values), expected, 1e-3)  # a half has 11 bits


@pytest.mark.parametrize("data_format", ["NCHW"] if IS_TF1 else ["NCHW", "NDHWC", "NCDHW"])
def test_data_formats(hooked: None, data_format: str) -> None:
    """The kernels of a CPU know NHWC: the same numbers in another order give what to expect."""
    last = data_format.replace("C", "") + "C"
    to_format = [last.index(letter) for letter in data_format]
    to_last = [data_format.index(letter) for letter in last]
    images = IMAGES if len(data_format) == 4 else VOLUMES

    def results(decomposed: bool) -> Dict[str, np.ndarray]:
        with tf.Graph().as_default() as graph:
            if decomposed:
                built = trained(tf.constant(images), lambda x: in_format(x))
                decompose(graph)
                assert_decomposed(built.values)
            else:
                built = trained(tf.constant(images), lambda x: in_nhwc(x))
            return run(built.values)

    def in_format(x: tf.Tensor) -> List[tf.Tensor]:
        outputs = fused(tf.transpose(x, to_format), data_format=data_format)
        return [tf.transpose(outputs[0], to_last)] + list(outputs[1:])

    def in_nhwc(x: tf.Tensor) -> List[tf.Tensor]:
        outputs = fused(tf.reshape(x, [6, 5, 4, 3]))
        return [tf.reshape(outputs[0], images.shape)] + list(outputs[1:])

    assert_close(results(True), results(False))


def test_running_average_inside_the_op(hooked: None, graph: tf.Graph) -> None:
    """TensorFlow 2 can mix the batch's statistics with given ones; TensorFlow 1 returns the batch's own."""
    factor = 1.0 if IS_TF1 else 0.25
    attributes = {} if IS_TF1 else {"exponential_avg_factor": factor}
    built = trained(tf.constant(IMAGES), lambda x: fused(x, **attributes))
    expected = run(built.values)
    mean = np.sin(1.5 * IMAGES).mean((0, 1, 2))
    assert_close({"mean": expected["mean"]}, {"mean": (1 - factor) * RUN["mean"] + factor * mean})
    decompose(graph)
    assert_decomposed(built.values)
    assert_close(run(built.values), expected)


def test_one_after_the_other(hooked: None, graph: tf.Graph) -> None:
    """The first one's result and the second one's gradient go from fused op to fused op."""
    def twice(x: tf.Tensor) -> Any:
        with v1.variable_scope("first"):
            y = fused(x)[0]
        with v1.variable_scope("second"):
            return fused(y)

    built = trained(tf.constant(IMAGES), twice)
    expected = run(built.values)
    decompose(graph)
    assert_decomposed(built.values)
    values = run(built.values)
    for name in ("first/scale", "first/offset"):  # the second one makes them irrelevant: all but zero
        assert abs(values.pop(name) - expected.pop(name)).max() < 1e-4
    assert_close(values, expected)


def test_gradient_of_the_gradient(hooked: None, graph: tf.Graph) -> None:
    factor = v1.get_variable("factor", initializer=np.float32(1.5))
    x = tf.constant(IMAGES) * factor
    gradient = tf.gradients(tf.sin(fused(x)[0]), x)[0]
    loss = tf.reduce_sum(tf.square(gradient))
    pairs = v1.train.GradientDescentOptimizer(0.1).compute_gradients(loss)
    v1.train.GradientDescentOptimizer(0.1).apply_gradients(pairs)
    values = {variable.op.name: tf.identity(value) for value, variable in pairs if value is not None}
    values["loss"] = tf.identity(loss)
    expected = run(values)
    decompose(graph)
    assert_decomposed(values)
    assert_close(run(values), expected, 1e-4)


# -- the same place in the graph ---------------------------------------------------------------------------------------


def test_tags_and_devices(hooked: None, graph: tf.Graph) -> None:
    with tags.annotate(graph, "replicate", 1), v1.device("/device:CPU:0"):
        trained(tf.constant(IMAGES))
    forward, = [op for op in graph.get_operations() if op.type == "FusedBatchNormV3"]
    backward, = [op for op in graph.get_operations() if op.type == "FusedBatchNormGradV3"]
    before = set(nodes(graph))
    done = decompose(graph)
    new = [op for op in graph.get_operations() if op.name not in before]
    ahead = [op for op in new if op.name.startswith(forward.name + "/")]
    behind = [op for op in new if op.name.startswith(backward.name + "/")]
    assert ahead and behind and len(ahead) + len(behind) == len(new)
    assert {op.device for op in new} == {forward.device}
    assert {op.get_attr("_whale_task_graph") for op in ahead} == {0}
    for op in behind:
        assert op.get_attr("_whale_phase") == b"backward" and op.get_attr("_whale_gradient_call") == 0
        assert op.get_attr("_whale_forward").decode() == successor(done, forward) != forward.name


def test_number_of_elements_is_not_a_constant(hooked: None, graph: tf.Graph) -> None:
    built = trained(tf.constant(IMAGES))
    decompose(graph)
    assert [op for op in upstream(built.values.values()) if op.type == "Shape" and "/decomposed/" in op.name]


def test_gradient_calls_follow(hooked: None, graph: tf.Graph) -> None:
    """Without a multiplication before it, a call returns the fused gradient op's outputs themselves."""
    x = tf.constant(IMAGES) * 1.0
    y = fused(x)[0]
    variables = v1.trainable_variables()
    first = tf.gradients(tf.reduce_sum(tf.sin(y)), [x] + variables)
    second = tf.gradients(y, variables)
    v1.train.GradientDescentOptimizer(0.1).apply_gradients(
        [(a + b, variable) for a, b, variable in zip(first[1:], second, variables)])
    assert {gradient.op.type for gradient in first} == {"FusedBatchNormGradV3"}
    done = decompose(graph)
    calls = done.annotations.gradient_calls
    assert calls[0].grads == [done.replaced[gradient.name] for gradient in first]
    assert calls[1].grads == [done.replaced[gradient.name] for gradient in second]
    assert calls[1].ys == [done.replaced[y.name]]
    names = ["x", "scale", "offset"]
    new = [graph.get_tensor_by_name(name) for name in calls[0].grads]
    assert_close(run(dict(zip(names, new))), run(dict(zip(names, first))))


def test_ops_that_wait(hooked: None, graph: tf.Graph) -> None:
    def waiting(x: tf.Tensor) -> Any:
        outputs = fused(x)
        with tf.control_dependencies([outputs[0].op]):
            after.append(tf.no_op())
        return outputs

    after: List[tf.Operation] = []
    built = trained(tf.constant(IMAGES), waiting)
    done = decompose(graph)
    assert [op.name for op in after[0].control_inputs] == [successor(done, built.y.op)] != [built.y.op.name]


def test_step_that_was_recorded_stays_as_it_was(hooked: None, graph: tf.Graph) -> None:
    built = trained(tf.constant(IMAGES))
    with tf.control_dependencies([built.y.op]):
        tf.no_op()
    call, before = tags.annotations_of(graph).gradient_calls[0], nodes(graph)
    names, step = (call.ys, call.xs, call.grads), recording_of(graph)
    recorded = [(op.name, op.inputs, op.control_inputs, op.phase, op.forward) for op in step.graph.ops]
    assert sync_batch_norm(step).replaced and not step.replaced
    assert nodes(graph) == before and not step.definitions.added and not step.definitions.changed
    assert [(op.name, op.inputs, op.control_inputs, op.phase, op.forward) for op in step.graph.ops] == recorded
    assert (call.ys, call.xs, call.grads) == names


def test_left_alone(hooked: None, graph: tf.Graph) -> None:
    """Nothing before there is an update; later neither inference nor what no update needs."""
    x = tf.constant(IMAGES) * v1.get_variable("factor", initializer=np.float32(1.5))
    with v1.variable_scope("unrelated"):
        fused(x)
    y = v1.nn.fused_batch_norm(x, RUN["scale"], RUN["offset"], RUN["mean"], RUN["variance"], is_training=False)[0]
    loss = tf.reduce_sum(y)
    gradient, = tf.gradients(loss, v1.trainable_variables()[:1])
    before = nodes(graph)
    assert not decompose(graph).replaced and nodes(graph) == before
    v1.train.GradientDescentOptimizer(0.1).apply_gradients([(gradient, v1.trainable_variables()[0])])
    before = nodes(graph)
    assert not decompose(graph).replaced and nodes(graph) == before


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("kind", ["loop", "condition"])
def test_inside_control_flow(hooked: None, graph: tf.Graph, functional: bool, kind: str) -> None:
    """A version 1 condition is dataflow that all clones take alike; what a loop or a function does stays in there."""
    before = v1.control_flow_v2_enabled()
    (v1.enable_control_flow_v2 if functional else v1.disable_control_flow_v2)()
    try:
        scale, offset = [v1.get_variable(name, initializer=RUN[name]) for name in ("scale", "offset")]
        x = tf.constant(IMAGES)

        def step(h: tf.Tensor) -> tf.Tensor:
            return tf.sin(v1.nn.fused_batch_norm(h, scale, offset)[0])

        if kind == "loop":
            y = v1.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, step(h)), [0, x])[1]
        else:
            y = v1.cond(v1.placeholder_with_default(True, []), lambda: step(x), lambda: x * scale)
        v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(tf.square(y)))
    finally:
        (v1.enable_control_flow_v2 if before else v1.disable_control_flow_v2)()
    if kind == "condition" and not functional:
        expected = run({"y": tf.identity(y)})
        values = {"y": tf.identity(y)}
        assert decompose(graph).replaced
        assert_decomposed(values)
        assert_close(run(values), expected)
    else:
        count = len(graph.get_operations())
        with pytest.raises(UnsupportedOpError, match="sync_batch_norm: '.*FusedBatchNormV3' .* is inside .*set sync_batch"):
            decompose(graph)
        assert len(graph.get_operations()) == count


# -- under a plan ------------------------------------------------------------------------------------------------------

SYNC = {"sync_batch_norm": True}
ROUNDING = 2e-4  # of momenta: a normalisation's gradient is a difference of nearly equal float32 numbers
Feeds = List[Tuple[np.ndarray, np.ndarray]]


def script(sizes: Any = 8, counts: Tuple[int, ...] = (2,), parallel: bool = False) -> Tuple[List, tf.Tensor, Any]:
    """Two layers of batch normalisation, one of them by tf.nn.moments, with moving averages."""
    inputs = [v1.placeholder(tf.float32, [sizes, 5, 4, 3]), v1.placeholder(tf.float32, [sizes, 3])]
    blocks = [lambda x: tf.sin(moving(*fused(tf.sin(x * v1.get_variable("factor", [3])))[:3])), by_moments]
    x = inputs[0]
    for block, name, count in zip(blocks, "ab", counts * 2):
        with v1.variable_scope(name):
            if not parallel or (name == "b" and len(counts) == 1):
                x = block(x)
            else:
                with wh.replicate(count):
                    x = block(x)
    loss = tf.reduce_mean(tf.square(tf.reduce_mean(x, [1, 2]) - inputs[1]))
    with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
        return inputs, loss, v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)


def by_moments(x: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    scale, offset = [v1.get_variable(name, initializer=RUN[name]) for name in ("scale", "offset")]
    return tf.nn.batch_normalization(moving(x, mean, variance), mean, variance, offset, scale, 1e-3)


def moving(y: tf.Tensor, *statistics: tf.Tensor) -> tf.Tensor:
    for i, value in enumerate(statistics):
        average = v1.get_variable(f"average_{i}", initializer=RUN["mean"], trainable=False)
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, v1.assign_sub(average, (average - value) * 0.1))
    return y


def train(build: Callable[[bool], Tuple[List, tf.Tensor, Any]], feeds: Feeds, config: Any = None, cluster: str = "",
          plan: Any = None) -> Dict[str, np.ndarray]:
    """The losses and the final variables, under ``config`` or, without a cluster, of the local script."""
    if cluster:
        wh.init(config, cluster, plan)
    try:
        with tf.Graph().as_default():
            v1.set_random_seed(1)
            inputs, loss, update = build(bool(cluster) and plan is None)
            variables = {variable.name: variable for variable in v1.global_variables()}
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                losses = [session.run([loss, update], dict(zip(inputs, feed)))[0] for feed in feeds]
                return dict(session.run(variables), losses=np.array(losses))
    finally:
        wh.shutdown()


def batches(*sizes: int) -> Feeds:
    r = np.random.RandomState(1)
    return [(r.randn(size, 5, 4, 3).astype("float32"), r.randn(size, 3).astype("float32")) for size in sizes]


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("counts, devices", [((2,), 2), ((4,), 4), ((1, 1), 2), ((1, 1), 4), ((1, 2), 3)])
def test_equals_local(counts: Tuple[int, ...], devices: int, micro_batches: int) -> None:
    feeds = batches(24, 24, 24)
    config = dict(SYNC, num_micro_batch=micro_batches)
    values = train(lambda parallel: script(24, counts, parallel), feeds, config, f"cpu:{devices}")
    assert_close(values, train(lambda parallel: script(24), feeds), ROUNDING)


@pytest.mark.slow
def test_without_it_the_result_is_another_one() -> None:
    feeds = batches(8, 8, 8)
    values = train(lambda parallel: script(8, (2,), parallel), feeds, {}, "cpu:2")
    assert abs(values["losses"] - train(lambda parallel: script(8), feeds)["losses"]).max() > 1e-3


@pytest.mark.slow
def test_uneven_parts() -> None:
    feeds = batches(8, 7, 5)
    values = train(lambda parallel: script(None, (2,), parallel), feeds, dict(SYNC, num_micro_batch=2), "cpu:2")
    assert_close(values, train(lambda parallel: script(None), feeds), ROUNDING)


@pytest.mark.slow
def test_saved_plan() -> None:
    wh.init(SYNC, "cpu:2")
    with tf.Graph().as_default():
        script(8, (2,), True)
        plan = wh.parallelize().to_json()
    feeds = batches(8, 8)
    values = train(lambda parallel: script(8), feeds, {}, "cpu:2", plan)
    assert_close(values, train(lambda parallel: script(8), feeds), ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("devices, message", [(1, ""), (3, "does not divide over 3 parts")])
def test_graphs_that_stay_as_they_were(devices: int, message: str) -> None:
    """The plan is the local script, or there is none."""
    wh.init(SYNC, f"cpu:{devices}")
    try:
        with tf.Graph().as_default() as graph:
            script(8, (devices,), True)
            before = nodes(graph)
            if message:
                with pytest.raises(PlanError, match=message):
                    wh.parallelize()
            else:
                wh.parallelize()
            assert {name: nodes(graph)[name] for name in before} == before
    finally:
        wh.shutdown()


@pytest.mark.half
@pytest.mark.slow
def test_resnet18() -> None:
    """Two steps: later a rectifier flips somewhere in float32, as it does when a local batch is put in another order."""
    config = resnet.ResnetConfig.digits()
    r = np.random.RandomState(0)
    feeds = [(r.randn(16, 8, 8, 1).astype("float32"), r.randint(0, 10, 16).astype("int32")) for _ in range(2)]

    def build(parallel: bool) -> Tuple[List, tf.Tensor, Any]:
        batch = resnet.inputs(config, 16)
        if parallel:
            with wh.replicate(2):
                model = resnet.build(batch, config)
        else:
            model = resnet.build(batch, config)
        with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
            return [batch.images, batch.labels], model.loss, v1.train.MomentumOptimizer(0.01, 0.9).minimize(model.loss)

    values, expected = train(build, feeds, SYNC, "cpu:2"), train(build, feeds)
    assert_close(values, expected, 1e-4)


@pytest.mark.slow
def test_fetching_and_feeding_a_fused_op() -> None:
    wh.init(SYNC, "cpu:2")
    try:
        with tf.Graph().as_default():
            x = v1.placeholder(tf.float32, [None, 5, 4, 3])
            with wh.replicate(2):
                y, mean = fused(x)[:2]
                loss = tf.reduce_mean(tf.sin(y))
            update = v1.train.GradientDescentOptimizer(10.0).minimize(loss)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                alone = session.run([y, mean], {x: IMAGES})
                training = session.run([y, mean, update], {x: IMAGES})  # before the update, whenever it happens
                assert_close(dict(zip("ym", training)), dict(zip("ym", alone)))
                assert session.run(y, {x: IMAGES[:1]}).shape == (1, 5, 4, 3)  # not divided over two replicas
                assert session.run([y.op, update], {x: IMAGES}) == [None, None]
                with pytest.raises(UnsupportedOpError, match="is fed, but sync_batch_norm"):
                    session.run(loss, {y: IMAGES})
    finally:
        wh.shutdown()
