"""A step that TensorFlow ran gives a trace like a predicted one."""

from __future__ import annotations

import tensorflow

from whale_tf.simulator import to_chrome, trace_of_run_metadata
from whale_tf.simulator.trace import kernel_memory
from whale_tf.viz.timeline import memory_figure, timeline_figure

tf = tensorflow.compat.v1


def test_real_step_on_two_devices() -> None:
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [64, 64], name="x")
        with tf.device("/CPU:0"):
            w = tf.get_variable("w", [64, 64], use_resource=True)
            h = tf.matmul(x, w, name="stage0/MatMul")
        with tf.device("/CPU:1"):
            loss = tf.reduce_sum(tf.matmul(h, h, name="stage1/MatMul"))
        gradient = tf.gradients(loss, [w])[0]
        config = tf.ConfigProto(device_count={"CPU": 2})
        options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        metadata = tf.RunMetadata()
        with tf.Session(config=config) as session:
            session.run(tf.global_variables_initializer())
            session.run([loss, gradient], {x: [[0.5] * 64] * 64}, options=options, run_metadata=metadata)
    trace = trace_of_run_metadata(metadata)
    on = {event.name: event for event in trace.events}
    assert len(trace.devices) == 2
    assert on["stage0/MatMul"].device != on["stage1/MatMul"].device
    assert on["stage0/MatMul"].kind == "forward" and on["stage0/MatMul"].start_s <= on["stage1/MatMul"].start_s
    assert any(event.kind == "backward" for event in trace.events)
    # version 2 does not list them
    assert all(event.lane == 1 for event in trace.events if event.kind == "send_recv")
    assert max(trace.memory[on["stage0/MatMul"].device][1]) >= 64 * 64 * 4
    assert len(to_chrome([trace])["traceEvents"]) > len(trace.events)
    assert timeline_figure(trace).axes and memory_figure(trace, {}).axes


def test_memory_of_kernels() -> None:
    """Each kernel has the op's results, and oneDNN's pooling the places of the largest values."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [4, 8, 8, 2], name="x")
        pooled = tf.nn.max_pool(tf.nn.relu(x), 2, 2, "SAME", name="pooled")
        gradient = tf.gradients(tf.nn.l2_loss(pooled), [x])[0]
        metadata = tf.RunMetadata()
        with tf.Session() as session:
            session.run(gradient, {x: [[[[0.5] * 2] * 8] * 8] * 4}, tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), metadata)
    kernels = [node.timeline_label for device in metadata.step_stats.dev_stats for node in device.node_stats]
    of_one_dnn = any("_MklNativeMaxPool(" in label for label in kernels)
    assert kernel_memory(metadata)["pooled"].results == (4 * 4 * 4 * 2 * 4,) + (4 * 4 * 4 * 2,) * of_one_dnn


def test_ops_that_the_graph_optimizer_replaced_keep_their_names() -> None:
    from whale_tf.simulator.trace import op_name

    assert op_name("a/b/ArithmeticOptimizer/ReplaceMulWithSquare_mul") == "a/b/mul"
    assert op_name("a/mul_1:Mul") == "a/mul_1"
