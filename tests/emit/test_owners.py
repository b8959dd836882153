"""ZeRO over processes, looked at in one: what each process' graph sends, what its Program says, and what the simulator plays."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from whale_tf.capture.step import step_graph
from whale_tf.cluster import Cluster, Processes
from whale_tf.communicators import Keys
from whale_tf.config import Config
from whale_tf.parallelize import Parallelized, parallelize
from whale_tf.program import BROADCAST
from whale_tf.simulator import Simulator
from whale_tf.simulator.trace import trace_of

WIDTH, LAYERS, BATCH = 6, 5, 4
CLUSTER = "2xcpu:2"


def changes(variables: Any, gradients: Any) -> Any:
    """An optimizer of elementary ops, whose changes are scaled by the norm of all."""
    found, writes = [], []
    for v, g in zip(variables, gradients):
        m = tf.get_variable(f"{v.op.name}_m", initializer=np.zeros(v.shape.as_list()), trainable=False)
        found.append(0.9 * m + g)
        writes.append(tf.assign(m, found[-1]))
    norm = tf.global_norm(found)
    return tf.group(*writes, *(tf.assign_sub(v, change / norm) for v, change in zip(variables, found)))


def rewritten(optimizer: str, config: Dict[str, Any], rank: int) -> Parallelized:
    wh.init(config, cluster="cpu:2")
    try:
        with tf.Graph().as_default() as graph, tf.variable_scope("", use_resource=True):
            wh.set_default_strategy(wh.replicate())
            h = tf.placeholder(tf.float64, [BATCH, WIDTH])
            for layer in range(LAYERS):
                h = tf.tanh(tf.matmul(h, tf.get_variable(f"w{layer}", [WIDTH, WIDTH], tf.float64)))
            loss = tf.reduce_mean(tf.square(h))
            if optimizer == "adam":
                tf.train.AdamOptimizer(0.1).minimize(loss)
            else:
                variables = tf.trainable_variables()
                changes(variables, tf.gradients(loss, variables))
            done = parallelize(graph, Cluster.parse(CLUSTER), Config(config), None, Processes(("a:1", "b:1"), rank), Keys())
        assert done is not None
        return done
    finally:
        wh.shutdown()


def messages(done: Parallelized) -> List[Tuple[Tuple[str, ...], bool]]:
    """Of the Program: what each has, and whether it is sent from here."""
    program = done.emitted.context.program  # type: ignore[union-attr]
    calls = [call for call in program.calls if program.step_of(call) == BROADCAST]
    return [(tuple(program.graph.tensor_name(tensor) for tensor in program.bodies[call.body].inputs),
             bool(call.after or call.takes)) for call in calls]


def sent(done: Parallelized) -> List[str]:
    return [name for name in done.emitted.communicator.collectives if name.startswith("whale/sent/")]  # type: ignore[union-attr]


@pytest.mark.parametrize("optimizer, bucket_bytes, values", [("adam", None, 2), ("adam", 1, LAYERS), ("norm", None, 2)])
def test_messages(optimizer: str, bucket_bytes: Any, values: int) -> None:
    """Each process knows the same messages, stages one collective for each, and plays them."""
    config: Dict[str, Any] = {"zero": "v1"}
    if bucket_bytes is not None:
        config["communication.bucket_bytes"] = bucket_bytes
    both = [rewritten(optimizer, config, rank) for rank in range(2)]
    known = [messages(done) for done in both]
    assert [names for names, _ in known[0]] == [names for names, _ in known[1]]
    assert all(one != other for (_, one), (_, other) in zip(*known)), "one of the two sends"
    of_values = [names for names, _ in known[0] if names[0].startswith("w")]
    assert len(of_values) == values and sorted(sum(of_values, ())) == [f"w{layer}:0" for layer in range(LAYERS)]
    assert len(known[0]) == values + (0 if optimizer == "adam" else 2), "the squares of an owner's changes in one"
    assert sent(both[0]) == sent(both[1]) and len(sent(both[0])) == len(known[0])
    done = both[0]
    graph = step_graph(done.captured, done.region, "model", done.plan.graph, BATCH)
    graph = graph.measured(BATCH, {op.origin: 1e-3 for op in graph.ops})
    found = Simulator(Cluster.parse(CLUSTER)).run_step(done.plan, graph)
    played = [one for one in found.program.instructions if one.label == BROADCAST]
    assert len(played) == len(known[0])
    sizes = [one.size_bytes for one in played if one.size_bytes >= 8 * WIDTH * WIDTH]
    assert sorted(sizes) == sorted(8.0 * WIDTH * WIDTH * len(names) for names in of_values)
    ends = dict(zip(found.graph.instruction, found.times.end))
    starts = dict(zip(found.graph.instruction, found.times.start))
    writes = {op.name for op in done.region.graph.ops if op.type in ("ResourceApplyAdam", "AssignSubVariableOp")}
    updates = [ends[one.id] for one in found.program.instructions if one.name in writes]
    assert len(updates) == LAYERS and min(updates) <= min(starts[one.id] for one in played if one.size_bytes in sizes)
    assert any(event.kind == BROADCAST for event in trace_of(found).events)
