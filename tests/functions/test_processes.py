"""What functions and Keras get in one of several processes, looked at in one."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any, List

import numpy as np
import pytest
import tensorflow as tf

from tests.passes.test_owners import divided, with_norms
from whale_tf._tf_compat import eager_context, global_seed, relaxed_type
from whale_tf.cluster import Cluster, Processes
from whale_tf.config import Config
from whale_tf.emit.context import Gathered
from whale_tf.errors import AnnotationError, PlanError, UnsupportedOpError
from whale_tf.passes.owners import find_owners
from whale_tf.processes.datasets import Adapter, share, whole_rounds
from whale_tf.runtime.active import Active
from whale_tf.runtime.functions import _check_results, place_anywhere

FIRST, SECOND = [Processes(("a:1", "b:1"), rank) for rank in range(2)]


def test_batch_size_of_arguments_is_left_open() -> None:
    def function(x: Any, rest: Any, weights: Any) -> Any:
        return x

    given = tf.function(function).get_concrete_function(
        tf.TensorSpec([8, 3]), {"y": tf.TensorSpec([8]), "others": [tf.TensorSpec([]), (tf.TensorSpec([8, 2]),)]},
        tf.TensorSpec([5]))
    shapes = sorted(str(spec.shape) for spec in relaxed_type(given.function_type).flat_inputs)
    assert shapes == ["()", "(5,)", "(None, 2)", "(None, 3)", "(None,)"]
    known = tf.function(function).get_concrete_function(tf.TensorSpec([None, 3]), tf.TensorSpec([8]), 1)
    assert relaxed_type(known.function_type) is known.function_type


def test_shares_that_would_overlap_are_refused() -> None:
    """Of a dataset that was made before ``wh.init``, and shuffles in another order in each process."""
    eager_context()._set_global_seed(None)
    dataset = tf.data.Dataset.range(8)
    assert len(list(share(dataset.shuffle(8, seed=1), FIRST))) == 4
    with pytest.raises(UnsupportedOpError, match="make the dataset after wh.init"):
        share(dataset.shuffle(8), FIRST)


def test_files_of_an_eager_dataset(tmp_path: Any) -> None:
    names = [str(tmp_path / str(number)) for number in range(4)]
    for name in names:
        with open(name, "w", encoding="utf8") as handle:
            handle.write(name)
    for read in (tf.data.TextLineDataset(names), tf.data.Dataset.from_tensor_slices(names).flat_map(tf.data.TextLineDataset)):
        found = [{line.numpy().decode() for line in share(read, one, by_file=True)} for one in (FIRST, SECOND)]
        assert len(found[0]) == 2 and found[0] ^ found[1] == set(names)
    assert [int(one) for one in share(tf.data.Dataset.range(6), SECOND, by_file=True)] == [1, 3, 5]


def test_shares_of_an_eager_dataset() -> None:
    dataset = tf.data.Dataset.range(22).batch(4, drop_remainder=True).map(lambda x: {"x": x, "y": 2 * x})
    shares = [share(dataset, processes) for processes in (FIRST, SECOND)]
    assert [[batch["x"].numpy()[0] for batch in one] for one in shares] == [[0, 8], [4, 12]]
    assert all(int(one.cardinality()) == 2 and one.element_spec["y"].shape.as_list() == [None] for one in shares)


class KerasAdapter:
    """As much of one as is used.

    Attributes:
        kept: what is asked of it beside that.
    """

    kept = "kept"

    def __init__(self, batches: int, shuffle: bool) -> None:
        self.num_batches = batches
        self._shuffle = shuffle

    def get_tf_dataset(self) -> Any:
        shuffled = tf.data.Dataset.range(1).map(lambda _: tf.random.shuffle(tf.range(100, dtype=tf.int64)))
        return tf.data.Dataset.range(100).batch(20) if not self._shuffle else shuffled.unbatch().batch(20)


def test_epochs_of_fit() -> None:
    """Without a seed each epoch has an order of its own, the same in all processes, and the script's seed stays what it is."""
    def epochs(shuffle: bool) -> List[List[Any]]:
        adapters = [Adapter(KerasAdapter(5, shuffle), one, lambda data, one=one: share(data, one), False)
                    for one in (FIRST, SECOND)]
        assert all(one.num_batches == 2 and one.kept == "kept" for one in adapters)
        return [[np.concatenate(list(one.epochs)) for one in adapters] for _ in range(2)]

    before = global_seed()
    for first, second in epochs(True), epochs(False):
        for shares in (first, second):
            assert len(np.intersect1d(*shares)) == 0 and len(np.concatenate(shares)) == 80
    assert not np.array_equal(*(shares[0] for shares in epochs(True)))
    assert global_seed() == before


def test_epochs_one_behind_the_other() -> None:
    """As Keras 2 repeats its arrays: what is too little for all processes is left out at the end of each epoch."""
    dataset = tf.data.Dataset.range(10).batch(2).map(lambda x: (x, x)).repeat(2)
    shares = [[int(x[0]) for x, _ in share(whole_rounds(dataset, 5, one), one)] for one in (FIRST, SECOND)]
    assert shares == [[0, 4, 0, 4], [2, 6, 2, 6]]
    assert whole_rounds(dataset, 4, FIRST) is dataset and whole_rounds(dataset, None, FIRST) is dataset


def test_data_for_fewer_processes_is_refused() -> None:
    with pytest.raises(UnsupportedOpError, match="data of 1 mini-batches, but each of 2 processes takes one of every 2"):
        Adapter(KerasAdapter(1, False), FIRST, lambda data: data, True)


def test_results_that_follow_from_an_update_are_refused() -> None:
    """A norm of what the optimizer keeps; the sum of all norms is sent, and can be returned."""
    step = with_norms()
    owners = find_owners(step, divided({"v0": 0, "v1": 1}).local_part(1))
    context = SimpleNamespace(graph=step.graph, region=step.region, owners=owners, gathered=Gathered())

    def check_result(name: str) -> None:
        result = SimpleNamespace(name=f"{name}:0", op=SimpleNamespace(name=name))
        _check_results(SimpleNamespace(name="step", outputs=[result]), context)  # type: ignore[arg-type]

    check_result("all")
    with pytest.raises(PlanError, match="'step' returns what follows from op 'read0', but under zero only one process has what "):
        check_result("read0")


def test_schedule_of_several_task_graphs_without_annotations() -> None:
    """A graph without annotations is one TaskGraph also where it is asked whether model replicas span processes."""
    state: Any = SimpleNamespace(
        config=Config({"pipeline.schedule": "zero_bubble_v"}), cluster=Cluster.parse("2xcpu:1"), processes=FIRST)
    with pytest.raises(AnnotationError, match=r"1 of 2 device\(s\) each \(replicate\(\)\) do not divide over 2 device"):
        Active.may_span(state, tf.Graph(), None)


def test_iterator_outside_of_a_function_is_that_of_every_process() -> None:
    """TensorFlow places what takes its elements in the process that has made it."""
    elements = iter(tf.data.Dataset.range(4))
    graph = tf.function(lambda: next(elements)).get_concrete_function().graph
    taking, = [op for op in graph.get_operations() if op.type == "IteratorGetNext"]
    assert "/task:0/" in taking.device
    place_anywhere(graph, SECOND)
    assert "/task:0/" in taking.device
    place_anywhere(graph, FIRST)
    assert taking.device == "/device:CPU:0"
