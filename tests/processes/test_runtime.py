"""What can be told of a process among several without starting any other."""
from __future__ import annotations

import json
import socket
import sys
import threading
from types import SimpleNamespace
from typing import Any, Iterator, Optional

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.numeric.script import dense
from tests.numeric.unequal import described
from whale_tf.cluster import Cluster, Processes
from whale_tf.emit import processes
from whale_tf.processes import datasets, runtime
from whale_tf.processes.runtime import Runtime
from whale_tf.runtime import active
from whale_tf.runtime.triggers.sessions import SessionTriggers

TWO = ["127.0.0.1:1", "127.0.0.1:2"]
UNEQUAL = Cluster.parse(described([(300, 1024), (100, 1024)]))


@pytest.fixture(autouse=True)
def _clean(monkeypatch: Any) -> Iterator[None]:
    yield
    wh.shutdown()
    monkeypatch.setattr(runtime, "_runtime", None)


def build(monkeypatch: Any, rank: int, units: int = 3, parallelize: bool = True, batch: Optional[int] = 4) -> tf.Graph:
    """The graph of one of two processes."""
    monkeypatch.setattr(runtime, "_runtime", None)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": TWO}, "task": {"type": "worker", "index": rank}}))
    wh.init(cluster="2xcpu:1")
    with tf.Graph().as_default() as graph:
        x = tf.placeholder(tf.float64, [batch, 2], name="x")
        with wh.replicate():
            loss = tf.reduce_mean(tf.square(dense(x, units, "one")), name="loss")
        tf.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        tf.identity(loss * 2.0, name="twice")
        if parallelize:
            wh.parallelize()
    return graph


def digest(graph: tf.Graph) -> int:
    return int(tf.make_ndarray(graph.get_operation_by_name("whale/agreement").inputs[0].op.get_attr("value"))[0])


def test_processes_agree_on_the_same_model_only(monkeypatch: Any) -> None:
    assert digest(build(monkeypatch, 0)) == digest(build(monkeypatch, 1))
    assert digest(build(monkeypatch, 0)) != digest(build(monkeypatch, 1, units=4))


def test_differing_process_is_named() -> None:
    process = Runtime(Processes(("a:1", "b:1", "c:1"), 0), 1, 1)
    process.check_agreement([5, 5, 5])
    with pytest.raises(wh.PlanError, match=r"process\(es\) 1, 2 built another model"):
        process.check_agreement([5, 6, 7])


def test_graphs_do_not_grow_with_the_number_of_processes(monkeypatch: Any) -> None:
    sizes = []
    for count in (2, 5):
        monkeypatch.setattr("tests.processes.test_runtime.TWO", [f"127.0.0.1:{i}" for i in range(1, count + 1)])
        monkeypatch.setattr(wh, "init", lambda cluster, count=count, init=wh.init: init(cluster=f"{count}xcpu:1"))
        sizes.append(len(build(monkeypatch, 1).get_operations()))
        monkeypatch.undo()
    assert sizes[0] == sizes[1]


def test_gradients_of_constants_are_not_exchanged(monkeypatch: Any) -> None:
    """The backward pass computes them, and nobody reads them."""
    monkeypatch.setattr(runtime, "_runtime", None)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": TWO}, "task": {"type": "worker", "index": 0}}))
    wh.init(cluster="2xcpu:1")
    with tf.Graph().as_default() as graph:
        weights = tf.get_variable("w", initializer=np.ones([2]), use_resource=True)
        with wh.replicate():
            loss = tf.reduce_sum(tf.square(tf.placeholder(tf.float64, [4, 2]) * weights) * tf.constant(3.0, tf.float64))
        tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        wh.parallelize()
    assert sum(op.type == "CollectiveReduce" for op in graph.get_operations()) == 2, "the loss and the weights' gradient"


def test_with_an_open_batch_size_a_loss_alone_waits_for_nobody(monkeypatch: Any) -> None:
    """Neither for the loss of the others, nor for how many examples they have."""
    graph = build(monkeypatch, 0, batch=None)
    fetches = active.require("tests").fetches[graph]
    value, = fetches.substitutes([graph.get_tensor_by_name("loss:0")], {})
    shared, = fetches._shared.values()
    assert value.shape == graph.get_tensor_by_name(shared.value + ":0").shape == []
    alone = fetches.kind([graph.get_tensor_by_name("twice:0")])
    assert not alone.waits and len(alone.alone) == 2


def test_run_that_would_wait_in_vain_is_refused(monkeypatch: Any) -> None:
    graph = build(monkeypatch, 0)
    fetches = active.require("tests").fetches[graph]
    update = next(op for op in graph.get_operations() if "ApplyGradientDescent" in op.type)
    gradient = update.inputs[2]
    with pytest.raises(wh.UnsupportedOpError, match="Fetch it together with the train op"):
        fetches.kind([gradient])
    assert fetches.kind([graph.get_operation_by_name("train")]).waits
    alone = fetches.kind([graph.get_tensor_by_name("twice:0")])
    assert not alone.waits and len(alone.alone) == 1
    together = fetches.kind([graph.get_tensor_by_name("twice:0"), graph.get_operation_by_name("train")])
    assert together.waits and not together.alone


def test_training_loop_follows_its_graph_once(monkeypatch: Any) -> None:
    graph = build(monkeypatch, 0)
    fetches = active.require("tests").fetches[graph]
    loss, train = graph.get_tensor_by_name("loss:0"), graph.get_operation_by_name("train")
    first = fetches.substitutes([loss, train], {})
    fetches.kind(first)

    def walk(ops: Any) -> Any:
        raise AssertionError("a second step walks the graph again")

    monkeypatch.setattr(processes, "ancestors", walk)
    assert fetches.substitutes([loss, train], {}) == first
    assert fetches.kind(first).waits
    with pytest.raises(AssertionError, match="walks"):
        fetches.substitutes([graph.get_tensor_by_name("twice:0"), train], {})


def test_port_already_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        with pytest.raises(wh.ClusterError, match=f"port {port} of this process's address 127.0.0.1:{port} is used"):
            runtime._check_port(f"127.0.0.1:{port}")


@pytest.mark.parametrize("step", [3, np.int64(3)])
def test_other_processes_write_no_checkpoint(monkeypatch: Any, graph: tf.Graph, tmp_path: Any, step: Any) -> None:
    """MonitoredTrainingSession gives its step as a number of NumPy's, and thinks that every process is the chief."""
    build(monkeypatch, 1, parallelize=False)
    tf.get_variable("weight", [], tf.float64)
    nothing: Any = None
    assert tf.train.Saver().save(nothing, str(tmp_path / "model"), global_step=step) == str(tmp_path / "model-3")
    assert not list(tmp_path.iterdir())


def test_other_processes_write_no_events_and_close_their_writers(monkeypatch: Any, graph: tf.Graph, tmp_path: Any) -> None:
    build(monkeypatch, 1, parallelize=False)
    writer = tf.summary.FileWriter(str(tmp_path))
    writer.add_summary(tf.Summary(value=[tf.Summary.Value(tag="loss", simple_value=1.0)]), 3)
    closing = threading.Thread(target=writer.close, daemon=True)
    closing.start()
    closing.join(20.0)
    assert not closing.is_alive()
    events = [event for path in tmp_path.iterdir() for event in tf.train.summary_iterator(str(path))]
    assert not any(event.summary.value for event in events)


def test_server_of_the_script_is_refused() -> None:
    with pytest.raises(wh.ClusterError, match="leave out the target .master."):
        Runtime(Processes(tuple(TWO), 0), 1, 1).target("grpc://other:1", tf.ConfigProto())


def elements(dataset: Any) -> list:
    """All that a one-shot iterator of a dataset gives."""
    value = tf.data.make_one_shot_iterator(dataset).get_next()
    found = []
    with tf.Session() as session:
        while True:
            try:
                found.append(session.run(value))
            except tf.errors.OutOfRangeError:
                return found


@pytest.mark.slow
def test_shares_are_disjoint_and_equally_long(graph: tf.Graph) -> None:
    whole = tf.data.Dataset.range(7)
    assert [elements(datasets.share(whole, Processes(("a", "b", "c"), rank))) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.slow
@pytest.mark.parametrize("reader", [
    tf.data.TextLineDataset, lambda names: tf.data.Dataset.from_tensor_slices(names).interleave(tf.data.TextLineDataset, 2),
    lambda names: tf.data.Dataset.from_tensor_slices(names).shuffle(4).flat_map(lambda name: tf.data.TextLineDataset(name))],
    ids=["list", "interleave", "shuffled"])
def test_processes_read_files_of_their_own(tmp_path: Any, graph: tf.Graph, reader: Any) -> None:
    names = [str(tmp_path / str(number)) for number in range(4)]
    for name in names:
        with open(name, "w", encoding="utf8") as handle:
            handle.write("".join(f"{name} {line}\n" for line in range(3)))
    read = []
    for rank in range(2):
        with tf.Graph().as_default():
            batches = elements(datasets.share(reader(names).batch(2), Processes(("a", "b"), rank), by_file=True))
        read.append({text.decode().split()[0] for batch in batches for text in batch})
        assert sum(map(len, batches)) == 6
    assert len(read[0]) == 2 and read[0] ^ read[1] == set(names)


def test_without_files_mini_batches_are_shared(graph: tf.Graph) -> None:
    whole = tf.data.Dataset.range(7).map(lambda i: 2 * i)
    assert elements(datasets.share(whole, Processes(("a", "b"), 1), by_file=True)) == [2, 6, 10]


def test_whole_files_are_not_shared_by_speed(graph: tf.Graph) -> None:
    with pytest.raises(wh.UnsupportedOpError, match="whole files cannot be shared in proportion"):
        datasets.share(tf.data.TextLineDataset(["a", "b"]).batch(2), Processes(("a", "b"), 0), UNEQUAL, by_file=True)


def test_part_of_a_step_reads_all_files(tmp_path: Any, graph: tf.Graph) -> None:
    names = [str(tmp_path / str(number)) for number in range(4)]
    for name in names:
        with open(name, "w", encoding="utf8") as handle:
            handle.write("1\n")
    iterator = tf.data.make_initializable_iterator(
        datasets.share(tf.data.TextLineDataset(names).batch(4), Processes(("a", "b"), 1), by_file=True))
    value = iterator.get_next()
    datasets.take_all(graph)
    with tf.Session() as session:
        session.run(iterator.initializer)
        assert len(session.run(value)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("speeds,parts", [((2, 1), [[0, 1, 2, 3], [4, 5]]), ((5, 3), [[0, 1, 2], [3, 4, 5]]),
                                          ((1, 98, 1), [[0], [1, 2, 3, 4, 5, 6, 7], [8]])])
def test_unequal_processes_take_unequal_parts(graph: tf.Graph, speeds: Any, parts: Any) -> None:
    """Two steps, of which the second's last mini-batch is smaller; all processes have the same number."""
    count = len(speeds)
    whole = tf.data.Dataset.range(2 * 3 * count - 1).map(lambda i: (i, {"twice": [2 * i]})).batch(3)
    cluster = Cluster.parse(described([(speed, 1024) for speed in speeds]))
    found = [elements(datasets.share(whole, Processes(("a",) * count, rank), cluster)) for rank in range(count)]
    assert [list(row[0][0]) for row in found] == parts
    assert [np.concatenate([row[step][0] for row in found]).tolist() for step in range(2)] == [
        list(range(3 * count)), list(range(3 * count, 2 * 3 * count - 1))]
    assert all((value["twice"][:, 0] == 2 * number).all() for row in found for number, value in row)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
def test_job_of_any_number_of_processes_takes_the_same_examples(count: int) -> None:
    """A step has the examples of three mini-batches, of which the second step's last one is smaller."""
    found = []
    for rank in range(count):
        with tf.Graph().as_default():
            whole = tf.data.Dataset.range(3 * 7 - 4).map(lambda i: (i, {"twice": [2 * i]})).batch(3)
            found.append(elements(datasets.share(whole, Processes(("a",) * count, rank, most=3))))
    assert [np.concatenate([row[step][0] for row in found]).tolist() for step in range(2)] == [list(range(9)), list(range(9, 17))]
    assert all(len(row) == 2 and abs(len(row[0][0]) - 9 // count) <= 1 for row in found)
    assert all((value["twice"][:, 0] == 2 * number).all() for row in found for number, value in row)


@pytest.mark.slow
def test_part_of_a_step_takes_all_mini_batches_of_a_job_that_changes(graph: tf.Graph) -> None:
    shared = datasets.share(tf.data.Dataset.range(8).batch(1), Processes(("a", "b"), 1, most=4))
    iterator = tf.data.make_initializable_iterator(shared)
    value = iterator.get_next()
    datasets.take_all(graph, 4)
    with tf.Session() as session:
        session.run(iterator.initializer)
        assert [list(session.run(value)) for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_job_that_changes_is_refused_what_depends_on_its_number(monkeypatch: Any, graph: tf.Graph) -> None:
    with pytest.raises(wh.UnsupportedOpError, match="io.slicing is 'file', but this job has up to 3 processes"):
        datasets.share(tf.data.TextLineDataset(["a", "b"]).batch(2), Processes(("a", "b"), 0, most=3), by_file=True)
    with pytest.raises(wh.UnsupportedOpError, match=r"fewer processes than a step has mini-batches.*batch\(\) it"):
        datasets.share(tf.data.Dataset.range(6), Processes(("a", "b"), 0, most=3))
    monkeypatch.setattr(runtime, "_runtime", None)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": TWO}, "task": {"type": "worker", "index": 1}}))
    monkeypatch.setenv("WHALE_MAX_WORKERS", "3")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which wh.init changes
    wh.init({"io.slicing": False}, "2xcpu:1")
    x = tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensors(np.ones([4, 2])).repeat()).get_next()
    tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.square(dense(x, 3, "one"))))
    with pytest.raises(wh.ConfigError, match="io.slicing is false, so that each of 2 processes reads a mini-batch of its own"):
        wh.parallelize()


def test_job_that_changes_is_refused_replicas_with_mini_batches_of_their_own(monkeypatch: Any, graph: tf.Graph) -> None:
    monkeypatch.setattr(runtime, "_runtime", None)
    workers = [*TWO, "127.0.0.1:3", "127.0.0.1:4"]
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": 1}}))
    monkeypatch.setenv("WHALE_MAX_WORKERS", "4")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which wh.init changes
    wh.init({"io.slicing": False}, "4xcpu:1")
    x = tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensors(np.ones([4, 2])).repeat()).get_next()
    with wh.replicate(1):
        x = dense(x, 3, "one")
    with wh.replicate(1):
        loss = tf.reduce_mean(tf.square(dense(x, 3, "two")))
    tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    with pytest.raises(wh.ConfigError, match="each of 2 model replicas takes a mini-batch of its own.*set io.nested_batch to"):
        wh.parallelize()


@pytest.mark.parametrize("cluster,said", [(UNEQUAL.to_dict(), "from the examples of 2 mini-batches, the processes take 3 : 1"),
                                          ("2xcpu:1", "each of 2 processes takes one of every 2 mini-batches")])
def test_explain_says_how_processes_share_their_input(monkeypatch: Any, graph: tf.Graph, cluster: Any, said: str) -> None:
    monkeypatch.setattr(runtime, "_runtime", None)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": TWO}, "task": {"type": "worker", "index": 1}}))
    wh.init(cluster=cluster)
    x = tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensors(np.ones([4, 2])).repeat()).get_next()
    with wh.replicate():
        loss = tf.reduce_mean(tf.square(dense(x, 3, "one")))
    tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    wh.parallelize()
    assert said in wh.explain()


@pytest.mark.slow
def test_part_of_a_step_takes_all_of_unequal_parts(graph: tf.Graph) -> None:
    shared = datasets.share(tf.data.Dataset.range(6).batch(2), Processes(("a", "b"), 1), UNEQUAL)
    iterator = tf.data.make_initializable_iterator(shared)
    value = iterator.get_next()
    datasets.take_all(graph)
    with tf.Session() as session:
        session.run(iterator.initializer)
        assert [list(session.run(value)) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_unequal_processes_need_mini_batches(graph: tf.Graph) -> None:
    with pytest.raises(wh.UnsupportedOpError, match=r"have the shapes \(\), .*batch\(\) it"):
        datasets.share(tf.data.Dataset.range(6), Processes(("a", "b"), 0), UNEQUAL)


@pytest.mark.slow
def test_structures_survive(graph: tf.Graph) -> None:
    whole = tf.data.Dataset.range(4).map(lambda i: {"a": (i, i + 10), "b": i * 2})
    assert elements(datasets.share(whole, Processes(("a", "b"), 1))) == [{"a": (1, 11), "b": 2}, {"a": (3, 13), "b": 6}]
    one = tf.data.Dataset.zip((tf.data.Dataset.range(4).batch(1),))
    for most in (0,) if tf.__version__.startswith("1.") else (0, 3):  # 1.15 cannot unbatch such a dataset
        shared = datasets.share(one, Processes(("a", "b"), 1, most=most))
        assert tf.data.get_output_types(shared) == tf.data.get_output_types(one) == (tf.int64,)


@pytest.mark.slow
def test_processes_agree_on_shuffling() -> None:
    found = []
    for rank in range(2):
        with tf.Graph().as_default():
            found.append(elements(datasets.share(tf.data.Dataset.range(20).shuffle(20), Processes(("a", "b"), rank))))
    assert sorted(found[0] + found[1]) == list(range(20)) and found[0] != sorted(found[0])
    with tf.Graph().as_default():
        whole = tf.data.Dataset.range(2).flat_map(lambda i: tf.data.Dataset.range(10).shuffle(10))
        with pytest.raises(wh.UnsupportedOpError, match="shuffled without a seed"):
            datasets.share(whole, Processes(("a", "b")))


@pytest.mark.slow
def test_part_of_a_step_takes_all(graph: tf.Graph) -> None:
    shared = datasets.share(tf.data.Dataset.range(5), Processes(("a", "b"), 0))
    iterator = tf.data.make_initializable_iterator(shared)
    value = iterator.get_next()
    datasets.take_all(graph)
    with tf.Session() as session:
        session.run(iterator.initializer)
        assert [session.run(value) for _ in range(5)] == list(range(5))


def test_part_of_a_step_refuses_a_built_in_share(graph: tf.Graph) -> None:
    tf.data.make_one_shot_iterator(tf.data.Dataset.range(5)).get_next()
    with pytest.raises(wh.UnsupportedOpError, match="make_initializable_iterator"):
        datasets.take_all(graph)


@pytest.mark.parametrize("slicing", [True, False])
def test_part_of_a_step_takes_back_only_shares_that_were_taken(graph: tf.Graph, slicing: bool) -> None:
    """Under ``io.slicing: false`` a one-shot iterator has no share built in, and processes may run parts of a step with it."""
    from whale_tf.runtime.triggers.sessions import take_part

    runtime = SimpleNamespace(run_parts=lambda: None)
    state: Any = SimpleNamespace(runtime=runtime, shares_input=slicing, processes=Processes())
    done: Any = SimpleNamespace(plan=SimpleNamespace(spans_processes=True))
    tf.data.make_one_shot_iterator(tf.data.Dataset.range(5)).get_next()
    if slicing:
        with pytest.raises(wh.UnsupportedOpError, match="set io.slicing to false"):
            take_part(state, graph, done)
    else:
        assert take_part(state, graph, done) is runtime


@pytest.mark.parametrize("count", [1, 2])
def test_default_strategy_from_outside_of_the_graph_counts_when_a_session_is_made(monkeypatch: Any, count: int) -> None:
    """A Session that is made before the graph is rewritten sees only this process's devices."""
    monkeypatch.setattr(runtime, "_runtime", None)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": TWO}, "task": {"type": "worker", "index": 0}}))
    wh.init(cluster="2xcpu:1")
    wh.set_default_strategy(wh.split(count))
    rewritten = []
    with tf.Graph().as_default() as graph:
        tf.train.GradientDescentOptimizer(.1).minimize(tf.reduce_sum(dense(tf.placeholder(tf.float64, [4, 2]), 3, "one")))
        triggers = SessionTriggers(active.require("a test"))
        monkeypatch.setattr(triggers, "rewrite", rewritten.append)
        triggers.session_config("", graph, None)
    assert rewritten == [graph] * (count > 1)
