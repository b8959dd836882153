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
from whale_tf.parallelize import Parallelized, find_lowered, parallelize
from whale_tf.program import BROADCAST, GATHER
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


def build(optimizer: str) -> None:
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


def rewritten(optimizer: str, config: Dict[str, Any], rank: int) -> Parallelized:
    wh.init(config, cluster="cpu:2")
    try:
        with tf.Graph().as_default() as graph, tf.variable_scope("", use_resource=True):
            build(optimizer)
            done = parallelize(graph, Cluster.parse(CLUSTER), Config(config), None, Processes(("a:1", "b:1"), rank), Keys())
        assert done is not None
        return done
    finally:
        wh.shutdown()


def test_first_process_program_is_shown_before_a_rewrite() -> None:
    wh.init({"zero": "v1"}, cluster="cpu:2")
    try:
        with tf.Graph().as_default() as graph, tf.variable_scope("", use_resource=True):
            build("adam")
            before = len(graph.get_operations())
            shown = find_lowered(graph, Cluster.parse(CLUSTER), Config({"zero": "v1"}), None, ((0, 1), (2, 3)))
            assert shown is not None and len(graph.get_operations()) == before
    finally:
        wh.shutdown()
    made = rewritten("adam", {"zero": "v1"}, 0).emitted.context.program  # type: ignore[union-attr]
    assert shown.program.to_text() == made.to_text()
    assert [line.split()[1] for line in shown.program.to_text().splitlines() if "_broadcast" in line] == [
        "t0_broadcast", "t0_broadcast_1"]


def messages(done: Parallelized) -> List[Tuple[Tuple[str, ...], bool]]:
    """Of the Program: what each has, and whether it is sent from here."""
    program = done.emitted.context.program  # type: ignore[union-attr]
    calls = [call for call in program.calls if program.step_of(call) == BROADCAST]
    return [(tuple(program.graph.tensor_name(tensor) for tensor in program.bodies[call.body].inputs),
             bool(call.after or call.takes)) for call in calls]


def sent(done: Parallelized) -> List[str]:
    return [name for name in done.emitted.communicator.collectives if name.startswith("whale/sent/")]  # type: ignore[union-attr]


def assigned(done: Parallelized) -> Dict[str, bool]:
    """Trained variables to which a received value is assigned -> whether that happens on the variable's own device."""
    graph = done.emitted.context.tf_graph  # type: ignore[union-attr]
    ops = [op for op in graph.get_operations() if op.name.startswith("whale/sent/") and op.name.endswith("/assign")]
    return {op.inputs[0].op.name: op.device == op.inputs[0].op.device != "" for op in ops}


def played(done: Parallelized) -> Any:
    graph = step_graph(done.captured, done.region, "model", done.plan.graph, BATCH)
    graph = graph.measured(BATCH, {op.origin: 1e-3 for op in graph.ops})
    return Simulator(Cluster.parse(CLUSTER)).run_step(done.plan, graph)


@pytest.mark.parametrize("zero, exchanges", [("v1", 1), ("v2", 2)])
def test_exchanges_of_gradients(zero: str, exchanges: int) -> None:
    """Under v2 each micro-batch's, and only their owner adds them up."""
    both = [rewritten("adam", {"zero": zero, "num_micro_batch": 2}, rank) for rank in range(2)]
    names = [[name for name in done.emitted.communicator.collectives if name.startswith("whale/sync/")]  # type: ignore[union-attr]
             for done in both]
    assert names[0] == names[1] and len(names[0]) == exchanges
    found = played(both[1])
    sums = [one for one in found.program.instructions if one.label == "all_reduce"]
    assert [one.size_bytes for one in sums] == [8.0 * LAYERS * WIDTH * WIDTH] * exchanges
    ends, starts = (dict(zip(found.graph.instruction, times)) for times in (found.times.end, found.times.start))
    updates = [starts[one.id] for one in found.program.instructions if one.name.endswith("ApplyAdam")]
    assert len(updates) == LAYERS and min(updates) >= max(ends[one.id] for one in sums)
    totals = [one.name for one in found.program.instructions if one.name.endswith("(total)")]
    assert len(totals) == (LAYERS if zero == "v2" else 0), "one in all processes"


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
    received = [assigned(done) for done in both]
    assert sorted([*received[0], *received[1]]) == [f"w{layer}" for layer in range(LAYERS)] and all(received)
    assert all([*received[0].values(), *received[1].values()])
    done, found = both[0], played(both[0])
    messages_played = [one for one in found.program.instructions if one.label == BROADCAST]
    assert len(messages_played) == len(known[0])
    sizes = [one.size_bytes for one in messages_played if one.size_bytes >= 8 * WIDTH * WIDTH]
    assert sorted(sizes) == sorted(8.0 * WIDTH * WIDTH * len(names) for names in of_values)
    ends, starts = (dict(zip(found.graph.instruction, times)) for times in (found.times.end, found.times.start))
    writes = {op.name for op in done.region.graph.ops if op.type in ("ResourceApplyAdam", "AssignSubVariableOp")}
    updates = [ends[one.id] for one in found.program.instructions if one.name in writes]
    assert len(updates) == LAYERS and min(updates) <= min(starts[one.id] for one in messages_played if one.size_bytes in sizes)
    assert any(event.kind == BROADCAST for event in trace_of(found).events)


def test_values_of_each_owner_travel_before_what_reads_them() -> None:
    """Under v3: each process has the values of its own variables, and in a step receives the others'."""
    done = rewritten("adam", {"zero": "v3"}, 1)
    program = done.emitted.context.program  # type: ignore[union-attr]
    gathers = [program.bodies[call.body] for call in program.calls if program.step_of(call) == GATHER]
    assert sorted(len(body.inputs) for body in gathers) == [0, 2] and sum(len(body.outputs) for body in gathers) == LAYERS
    found = played(done)
    sent = [one for one in found.program.instructions if one.label == GATHER]
    assert sorted(one.size_bytes for one in sent) == [8.0 * count * WIDTH * WIDTH for count in (2, 3)]
    ends, starts = (dict(zip(found.graph.instruction, times)) for times in (found.times.end, found.times.start))
    sums = [starts[one.id] for one in found.program.instructions if one.label == "all_reduce"]
    assert min(sums) >= max(ends[one.id] for one in sent) > 0
    kept = [sum(found.program.static_bytes[device].get("parameters", 0) for device in part) for part in ((0, 1), (2, 3))]
    assert sorted(kept) == pytest.approx([3 * 8 * count * WIDTH * WIDTH for count in (2, 3)], abs=16)  # Adam's powers of beta


def at_gates(config: Dict[str, Any], rank: int) -> Tuple[int, List[str]]:
    """Of two losses with an optimizer each: how many gates there are, and messages that wait for ops which a gate may skip."""
    wh.init(config, cluster="cpu:2")
    try:
        with tf.Graph().as_default() as graph, tf.variable_scope("", use_resource=True):
            wh.set_default_strategy(wh.replicate())
            x = tf.placeholder(tf.float32, [BATCH, WIDTH])
            losses = []
            for name in "ab":
                h = x
                for layer in range(3):
                    h = tf.tanh(tf.matmul(h, tf.get_variable(f"{name}{layer}", [WIDTH, WIDTH])))
                losses.append(tf.reduce_mean(tf.square(h)))
            for name, loss in zip("ab", losses):
                tf.train.AdamOptimizer(0.1).minimize(loss, var_list=[v for v in tf.trainable_variables() if v.name[0] == name])
            parallelize(graph, Cluster.parse(CLUSTER), Config(config), None, Processes(("a:1", "b:1"), rank), Keys())
            work = [op for op in graph.get_operations() if op.type == "Switch" and op.name.endswith("/which")]
            gates, skipped = len(work), set()
            while work:
                op = work.pop()
                for user in [*(user for tensor in op.outputs for user in tensor.consumers()), *op._control_outputs]:
                    if user.type not in ("Merge", "RefMerge") and user not in skipped:
                        skipped.add(user)
                        work.append(user)
            return gates, [op.name for op in skipped if op.type.startswith("Collective")]
    finally:
        wh.shutdown()


@pytest.mark.parametrize("zero", ["v1", "v3"])
def test_messages_of_each_update_wait_for_its_own_gate(zero: str) -> None:
    """A message that waits for a skipped op is never sent, and the other process would wait for it forever."""
    for rank in range(2):
        gates, dead = at_gates({"zero": zero, "amp.dtype": "float16", "amp.loss_scale": "dynamic"}, rank)
        assert gates >= 2 and not dead
