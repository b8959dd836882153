"""A classifier divided over two devices beside data parallelism, on two cores (Whale, sections 5.1.2 to 5.1.4).

    python -m benchmarks.split

Features are computed by data parallel layers; the classifier is divided over the same devices (``hybrid``), by the sharding
pattern that whale_tf chooses or by one that is forced, or is data parallel as well.  The global batch is the same.  Bridges
are the ops which the rewrite adds between the TaskGraphs and between the parts of the classifier; their share is that of
the time of all ops of a traced step.
"""
from __future__ import annotations

from typing import Any, Dict, List

from rich.console import Console

from benchmarks.measure import Result, Spec, main, rounds, session_config, step_times, table

BATCH, PIXELS, WIDTH = 64, 256, 512
CLASSES = (20000, 50000)
STEPS = 15
ROUNDS = 3
DEVICES = 2
SYSTEMS: Dict[str, Dict[str, Any]] = {
    "data parallel": {"variables": "shared"},
    "data parallel, mirrored": {"variables": "mirrored"},
    "hybrid": {},
    "hybrid, SP1": {"patterns.force": {"classes": "column"}},
    "hybrid, SP2": {"patterns.force": {"classes": "row"}},
}


def worker(spec: Spec) -> Result:
    import numpy as np
    import tensorflow.compat.v1 as tf

    import whale_tf as wh

    tf.disable_eager_execution()
    wh.init(SYSTEMS[spec["system"]], cluster=f"cpu:{DEVICES}")
    random = np.random.RandomState(0)
    examples = (random.randn(BATCH, PIXELS).astype("float32"), random.randint(0, spec["classes"], BATCH).astype("int32"))
    with tf.device("/device:CPU:0"):
        x, labels = tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensors(examples).repeat()).get_next()
    loss = _annotated(x, labels, spec)
    update = tf.train.MomentumOptimizer(0.01, 0.9).minimize(loss)
    local = {op.name for op in tf.get_default_graph().get_operations()}
    wh.parallelize()
    with tf.Session(config=session_config(DEVICES, inter=DEVICES, intra=1)) as session:
        session.run(tf.global_variables_initializer())
        found = step_times(lambda: session.run([loss, update])[0], STEPS)
        return dict(found, bridges=_bridges(session, [loss, update], local))


def _annotated(x: Any, labels: Any, spec: Spec) -> Any:
    import contextlib

    import tensorflow.compat.v1 as tf

    import whale_tf as wh

    is_hybrid = spec["system"].startswith("hybrid")
    with contextlib.ExitStack() as stack:
        stack.enter_context(wh.replicate(DEVICES))
        for number in range(2):
            x = tf.nn.relu(_dense(x, WIDTH, f"features{number}"))
        if is_hybrid:
            stack.close()
            stack.enter_context(wh.split(DEVICES))
        logits = _dense(x, spec["classes"], "classes")
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def _dense(x: Any, units: int, name: str) -> Any:
    import tensorflow.compat.v1 as tf

    with tf.variable_scope(name, use_resource=True):
        initializer = tf.random_normal_initializer(stddev=0.03, seed=1)
        kernel = tf.get_variable("kernel", [int(x.shape[1]), units], initializer=initializer)
        bias = tf.get_variable("bias", [units], initializer=tf.zeros_initializer())
        return tf.nn.bias_add(tf.matmul(x, kernel), bias)


def _bridges(session: Any, fetches: List[Any], local: Any) -> float:
    """Which part of the time of all ops is that of those between TaskGraphs and between parts of ops."""
    import tensorflow.compat.v1 as tf

    metadata = tf.RunMetadata()
    session.run(fetches, options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
    times: Dict[bool, int] = {True: 0, False: 0}
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            name = node.node_name.partition(":")[0]
            times["/bridge/" in name or "/whole/" in name or "/softmax/" in name] += node.all_end_rel_micros
    return times[True] / sum(times.values())


def report(console: Console) -> None:
    for classes in CLASSES:
        specs = [{"system": system, "classes": classes} for system in SYSTEMS]
        answers = dict(zip(SYSTEMS, rounds(__file__, specs, ROUNDS)))
        best = min(answers[name]["wall_s"] for name in SYSTEMS if name.startswith("data"))
        console.print(table(
            f"{classes} classes, {BATCH} examples on {DEVICES} devices: ms per step",
            ["system", "wall", "CPU", "times the faster data parallel", "bridges' share", "loss"],
            [[name, "{:.1f}".format(1e3 * found["wall_s"]), "{:.1f}".format(1e3 * found["cpu_s"]),
              "{:.2f}".format(best / found["wall_s"]), "{:.1%}".format(found["bridges"]), "{:.5f}".format(found["loss"])]
             for name, found in answers.items()]))
    console.print("Whale, 100,000 classes on 8 to 32 V100: hybrid is 1.13 to 2.43 times as fast; bridges take 6% to 10%; SP1 is "
                  "1.6 to 3.75 times as fast as SP2.", highlight=False)


if __name__ == "__main__":
    main(__file__, worker, report)
