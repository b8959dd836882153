"""A step inlined, and as calls of functions: what the rewrite, the first step, and every further step take, and memory.

    python -m benchmarks.emission

A BERT-style encoder in four stages on four logical CPU devices, 1F1B, Adam, 8 examples a micro-batch. "start" is the CPU time of
``wh.parallelize()`` and of the first training step together; steps are medians; memory is the largest of the devices' peaks in a
traced step. The second table has the peak of each device for models of ``benchmarks.memory``.
"""
from __future__ import annotations

import time
from typing import Any

from rich.console import Console

from benchmarks import memory
from benchmarks.measure import Result, Spec, ask, main, rounds, session_config, step_times, table
from benchmarks.memory import peaks

STAGES = 4
SIZES = ((12, 4), (12, 8), (24, 8), (24, 16), (24, 32))  # layers, micro-batches
STEPS = 7
MODELS = (("bert", 4, 8), ("mlp", 4, 8), ("resnet", 4, 8), ("mlp", 2, 4), ("vgg", 2, 4))  # model, stages, micro-batches
TRACES = 3


def build(layers: int, micro_batches: int) -> Any:
    """The training graph: (inputs, loss, update, one mini-batch to feed)."""
    import tensorflow.compat.v1 as tf

    import whale_tf as wh
    from models import bert, data

    tf.enable_resource_variables()
    batch = 8 * micro_batches
    config = bert.BertConfig(layers=layers, hidden=128, heads=4, ffn=512, seq=32, predictions=4)
    inputs = bert.inputs(config, batch)
    x = words = None
    for stage in range(STAGES):
        with wh.replicate(1):
            if stage == 0:
                x, words = bert.embed(inputs.tokens, config, inputs.segments)
            for i in range(layers * stage // STAGES, layers * (stage + 1) // STAGES):
                x = bert.encoder_layer(x, config, name=f"layer_{i}")
            if stage == STAGES - 1:
                loss = bert.mlm_loss(bert.mlm_head(x, inputs.positions, words, config), inputs)
    update = tf.train.AdamOptimizer(1e-3, epsilon=1e-6).minimize(loss)
    arrays = next(iter(data.batches(data.masked_lm_examples(batch, config.seq, config.predictions), batch)))
    return loss, update, {tensor: array for tensor, array in zip(inputs, arrays) if tensor.consumers()}


def least_peaks(spec: Spec) -> Result:
    """KB at the peak of each device, the least of several traced steps, and the number of functions of each backward body."""
    import tensorflow.compat.v1 as tf

    import whale_tf as wh

    tf.disable_eager_execution()
    tf.enable_resource_variables()
    config = {"num_task_graph": spec["stages"], "num_micro_batch": spec["micro_batches"], "emit": spec["emit"]}
    wh.init(config, cluster="cpu:{}".format(spec["stages"]))
    inputs, loss = memory.build(spec["model"])
    update = tf.train.MomentumOptimizer(0.01, 0.9).minimize(loss)
    feed, found = memory.random_feed(inputs), []
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for _ in range(2):
            session.run([loss, update], feed)
        for _ in range(TRACES):
            metadata = tf.RunMetadata()
            session.run([loss, update], feed, tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), metadata)
            found.append(peaks(metadata, spec["stages"]))
    program = wh.current_program()
    assert program is not None
    return {"peaks": [min(each) / 1024 for each in zip(*found)],
            "functions": [len(body.functions) for body in program.bodies if body.step == "backward"]}


def worker(spec: Spec) -> Result:
    if "model" in spec:
        return least_peaks(spec)
    import tensorflow.compat.v1 as tf

    import whale_tf as wh

    tf.disable_eager_execution()
    wh.init({"num_micro_batch": spec["micro_batches"], "emit": spec["emit"]}, cluster=f"cpu:{STAGES}")
    loss, update, feed = build(spec["layers"], spec["micro_batches"])
    began = time.process_time()
    wh.parallelize()
    rewrite = time.process_time() - began
    with tf.Session(config=session_config(STAGES, inter=2, intra=1)) as session:
        session.run(tf.global_variables_initializer())
        began = time.process_time()
        first = float(session.run([loss, update], feed)[0])
        start = rewrite + time.process_time() - began
        steps = step_times(lambda: session.run([loss, update], feed)[0], STEPS)
        metadata = tf.RunMetadata()
        session.run(update, feed, tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), metadata)
    ops = len(tf.get_default_graph().get_operations())
    return dict(steps, ops=ops, rewrite=rewrite, start=start, first=first, peak=max(peaks(metadata, STAGES)))


def report(console: Console) -> None:
    rows = []
    for layers, micro_batches in SIZES:
        specs = [{"layers": layers, "micro_batches": micro_batches, "emit": emit} for emit in ("inline", "call")]
        inlined, called = rounds(__file__, specs, 1)
        for emit, result in (("inline", inlined), ("call", called)):
            rows.append([
                str(layers), str(micro_batches), emit, "{:,.0f}".format(result["ops"]), "{:.2f}".format(result["rewrite"]),
                "{:.1f}".format(result["start"]), "{:.2f}".format(result["start"] / inlined["start"]),
                "{:.0f}".format(1e3 * result["wall_s"]), "{:.0f}".format(1e3 * result["cpu_s"]),
                "{:.2f}".format(result["cpu_s"] / inlined["cpu_s"]), "{:.2f}".format(result["peak"] / inlined["peak"]),
                "{:.6f}".format(result["loss"])])
    console.print(table("A step inlined and called", [
        "layers", "micro-batches", "emit", "ops", "rewrite CPU s", "start CPU s", "ratio", "step ms", "step CPU ms", "ratio",
        "memory ratio", "loss"], rows))

    rows = []
    for model, stages, micro_batches in MODELS:
        inlined, called = (ask(__file__, {"model": model, "stages": stages, "micro_batches": micro_batches, "emit": emit})
                           for emit in ("inline", "call"))
        pairs = list(zip(inlined["peaks"], called["peaks"]))
        rows.append([model, str(stages), str(micro_batches), *(" ".join(f"{peak:,.0f}" for peak in each) for each in zip(*pairs)),
                     " ".join(f"{after / before:.2f}" for before, after in pairs),
                     "{:.2f}".format(max(called["peaks"]) / max(inlined["peaks"])), " ".join(map(str, called["functions"]))])
    console.print(table("Peak memory of each device, KB", [
        "model", "stages", "micro-batches", "inlined", "called", "ratios", "of the largest", "backward functions"], rows))


if __name__ == "__main__":
    main(__file__, worker, report)
