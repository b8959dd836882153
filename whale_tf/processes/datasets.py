"""Each process's share of an input pipeline.

Every process runs the same script and so builds the same pipeline.  Process ``i`` of ``n`` takes number ``i`` of each ``n``
consecutive elements (mini-batches) of the pipeline's output.  A remainder at the end is dropped, so that all processes take
the same number.  In every step, the processes together train on the examples that the local script would see in a
mini-batch of ``n`` times the size.

Processes of unequal speed instead take unequal parts of these examples, in the same order (Whale section 3.3.1)::

    speeds 2:1       mini-batches   a b c d e f | g h i j k l       process 0   a b c d e f g h      process 1   i j k l

A job whose number of processes changes takes as many mini-batches for a step as it has processes at the most; if it has fewer,
they divide the examples of these in the same way, in equal parts.

``io.slicing: "file"``: process ``i`` reads only number ``i`` of every ``n`` files.
"""

from __future__ import annotations

import itertools
import re
import zlib
from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np

from whale_tf._tf_compat import seeded, sharded_by_file, tf, v1
from whale_tf.cluster import Cluster, Processes, process_speeds
from whale_tf.errors import UnsupportedOpError
from whale_tf.ir.walk import reached

SCOPE = "whale_share"
_READER = re.compile(r"^(TextLine|TFRecord|FixedLengthRecord|(Experimental)?CSV)Dataset(V\d)?$", re.I)  # op or Python class


def share(dataset: Any, processes: Processes, cluster: Optional[Cluster] = None, by_file: bool = False) -> Any:
    """This process's share of a tf.data pipeline (see the module's docstring).

    Args:
        cluster: determines the processes' speeds; None: assume equal speeds.
        by_file: share whole files, if the pipeline reads any.

    Raises:
        UnsupportedOpError: examples are divided, and elements are not mini-batches or whole files are shared; or each process
            would shuffle in its own way.
    """
    speeds = process_speeds(cluster, processes) if cluster is not None else (1,) * processes.count
    is_eager = tf.executing_eagerly()
    # the elements of a graph whose processes turn out to run parts of one step are joined in a job whose number changes
    is_even = len(set(speeds)) < 2 and processes.mini_batches == processes.count and (is_eager or not processes.most)
    if not is_even:
        _check_batched(dataset, len(set(speeds)) > 1)
    if not is_eager:
        seed_shuffles(dataset)
    with v1.name_scope(SCOPE), tf.control_dependencies(None):
        count = tf.constant(processes.mini_batches, tf.int64, name="count")
        rank = tf.constant(processes.rank, tf.int64, name="rank")
        own = tf.constant(1, tf.int64, name="own")
        if by_file and reads_files(dataset):
            if processes.most:
                raise UnsupportedOpError(
                    f"io.slicing is 'file', but this job has up to {processes.most} processes, and whole files cannot be shared "
                    "so that a step has the same examples whatever their number; set io.slicing to true, or give whale run a "
                    "fixed number of --workers")
            if not is_even:
                raise UnsupportedOpError(
                    "the cluster's processes differ in speed, but whole files cannot be shared in proportion to it; set "
                    "balance.algorithm to 'even', or io.slicing to true")
            return sharded_by_file(dataset, count, rank)

    if processes.count > 1 and is_shuffled_anew(dataset):
        raise UnsupportedOpError(
            f"a dataset is shuffled without a seed, so that each of {processes.count} processes would shuffle it in its own way, "
            "and their shares would overlap; make the dataset after wh.init(), which gives such a shuffle a seed, and give "
            "one to each shuffle in a function (flat_map, interleave); or set io.slicing to false if the data is already shared")

    def part(*parts: Any) -> Any:
        window = _element(parts, dataset)
        elements = window if isinstance(window, tf.data.Dataset) else tf.data.Dataset.zip(window)
        if is_even:
            return elements.skip(rank).take(1)
        examples = elements.unbatch()
        total = examples.reduce(np.int64(0), lambda number, *_: number + 1)
        bounds = tf.stack(running_parts(total, speeds))
        size = tf.where(tf.equal(own, 1), bounds[rank + 1] - bounds[rank], total)
        return examples.skip(own * bounds[rank]).take(size).batch(size)

    shared = dataset.window(count, shift=count, drop_remainder=True).flat_map(part)
    return _counted(shared, dataset, processes) if is_eager else shared


def _counted(shared: Any, dataset: Any, processes: Processes) -> Any:
    """A share that knows its number of elements, but says nothing about the size of its mini-batches: a function that is traced
    for it must be valid for the mini-batches of all processes."""
    first = {spec.shape[:1].as_list()[0] if spec.shape.rank else None
             for spec in tf.nest.flatten(dataset.element_spec) if isinstance(spec, tf.TensorSpec)}
    if len(first) == 1 and None not in first:
        shared = shared.map(lambda *parts: tf.nest.map_structure(_of_open_size, _element(parts, dataset)))
    number = int(dataset.cardinality())
    return shared if number < 0 else shared.apply(tf.data.experimental.assert_cardinality(number // processes.mini_batches))


def _element(parts: Tuple[Any, ...], dataset: Any) -> Any:
    """An element of a dataset from the arguments that tf.data gives a function for it: a tuple is unpacked, also of one part."""
    return parts if type(v1.data.get_output_types(dataset)) is tuple else parts[0]


class Adapter:
    """Keras' adapter of training data, with this process's share of the data.

    Args:
        adapter: Keras' own.
        shared: a dataset -> this process's share.
        is_seeded: the script has set a seed, so that all processes shuffle in the same way.

    Raises:
        UnsupportedOpError: there are fewer mini-batches than processes.
    """

    def __init__(self, adapter: Any, processes: Processes, shared: Callable[[Any], Any], is_seeded: bool) -> None:
        self._adapter = adapter
        self._count = processes.mini_batches
        self._shared = shared
        self._is_seeded = is_seeded
        self._made: Any = None
        self._epochs = 0
        _check_mini_batches(adapter.num_batches, processes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    @property
    def num_batches(self) -> Optional[int]:
        number = self._adapter.num_batches
        return number if number is None else number // self._count

    @property
    def epochs(self) -> Adapter:
        """Makes each iteration over it an epoch."""
        return self

    def passed(self, count: int) -> None:
        """As if so many iterators had been made: a shuffle of tf.data depends on it."""
        if self._is_seeded or not getattr(self._adapter, "_shuffle", False):
            for _ in range(count):
                iter(self)
        else:
            self._epochs = count

    def __iter__(self) -> Any:
        if self._is_seeded or not getattr(self._adapter, "_shuffle", False):
            if self._made is None:
                self._made = self._shared(self._adapter.get_tf_dataset())
            return iter(self._made)
        self._epochs += 1
        with seeded(self._epochs):  # the order of this epoch, the same in all processes
            return iter(self._shared(self._adapter.get_tf_dataset()))


def whole_rounds(dataset: Any, number: Optional[int], processes: Processes) -> Any:
    """A dataset of several epochs, without those last mini-batches of each epoch that are too few for all processes.

    Args:
        number: mini-batches of an epoch; None: unknown or irrelevant.

    Raises:
        UnsupportedOpError: there are fewer mini-batches than processes.
    """
    _check_mini_batches(number, processes)
    if number is None or number % processes.mini_batches == 0:
        return dataset
    kept = number - number % processes.mini_batches
    return dataset.enumerate().filter(lambda place, _: place % number < kept).map(lambda _, batch: batch)


def _check_mini_batches(number: Optional[int], processes: Processes) -> None:
    count = processes.mini_batches
    if number is not None and number < count:
        raise UnsupportedOpError(
            f"fit was given data of {number} mini-batches, but each of {count} processes takes one of every {count}; use a "
            "smaller batch_size, or set io.slicing to false if the data is already shared")


def _of_open_size(part: Any) -> Any:
    return v1.placeholder_with_default(part, [None, *part.shape[1:]]) if isinstance(part, tf.Tensor) else part


def explained(processes: Processes, cluster: Optional[Cluster] = None, by_file: bool = False) -> str:
    """A sentence on how :func:`share` divides the data."""
    speeds = () if cluster is None else process_speeds(cluster, processes)
    if processes.mini_batches > processes.count:
        return "Input pipelines: each step has {} mini-batches, whose examples the processes take {}.\n".format(
            processes.mini_batches, " : ".join(map(str, speeds or (1,) * processes.count)))
    if len(set(speeds)) < 2:
        what = "files, or mini-batches where none are read" if by_file else "mini-batches"
        return f"Input pipelines: each of {processes.count} processes takes one of every {processes.count} {what}.\n"
    return "Input pipelines: from the examples of {} mini-batches, the processes take {}.\n".format(
        processes.count, " : ".join(map(str, speeds)))


def reads_files(dataset: Any) -> bool:
    """Whether a tf.data pipeline, or a function that it maps or interleaves, reads files of records."""
    kinds = [type(one).__name__ for one in _pipeline(dataset)]
    return any(map(_READER.match, [*kinds, *(node.op for nodes in _bodies(dataset) for node in nodes)]))


def _check_batched(dataset: Any, by_speed: bool) -> None:
    shapes = tf.nest.flatten(v1.data.get_output_shapes(dataset))
    if any(shape.rank == 0 for shape in shapes):
        raise UnsupportedOpError(
            "{}, but the elements of a dataset have the shapes {}, one of which has no batch dimension; batch() it before making "
            "an iterator, or {}".format(
                "the cluster's processes differ in speed and take unequal parts of every mini-batch" if by_speed else
                "the job may have fewer processes than a step has mini-batches, of which they then take parts",
                ", ".join(map(str, shapes)), "set balance.algorithm to 'even' or io.slicing to false" if by_speed else
                "give whale run a fixed number of --workers"))


def running_parts(total: Any, speeds: Sequence[int]) -> List[Any]:
    """Running totals of a split of ``total`` examples in proportion to ``speeds``, at least one each.

    Args:
        total: an int64 scalar, not less than the number of parts.
    """
    found, sums = [tf.zeros_like(total)], list(itertools.accumulate(speeds))
    for number, low in enumerate(sums, 1):
        least, most = found[-1] + 1, total - (len(sums) - number)
        found.append(tf.minimum(most, tf.maximum(least, total * low // sums[-1])))
    return found


def take_all(graph: tf.Graph, count: int = 1) -> None:
    """Undo every share, because this process turns out to run a part of one step.

    Args:
        count: mini-batches that a step has together.

    Raises:
        UnsupportedOpError: an iterator's share cannot be undone.
    """
    for op in graph.get_operations():
        if op.type == "OneShotIterator":
            raise UnsupportedOpError(
                f"iterator {op.name!r} takes one process's share of its dataset, but processes run parts of one step, and "
                "need all of it; use tf.compat.v1.data.make_initializable_iterator, or set io.slicing to false")
        if op.type == "Const" and op.name.split("/")[-2:-1] and op.name.split("/")[-2].startswith(SCOPE):
            value = count if op.name.split("/")[-1].startswith("count") else 0
            op._set_attr("value", v1.AttrValue(tensor=v1.make_tensor_proto(value, tf.int64)))


def seed_shuffles(dataset: Any) -> None:
    """Seed each unseeded shuffle of a graph from its name.  Otherwise it would differ between processes, and their shares would
    overlap; and a run that goes on would get some examples again and others never."""
    for op in _ops_of(dataset._variant_tensor.op):
        constants = [tensor.op for tensor in op.inputs if tensor.op.type == "Const"]
        seeds = [constant for constant in constants if constant.name.split("/")[-1].startswith("seed")]
        if "Shuffle" in op.type and len(seeds) == 2 and not any(tf.get_static_value(seed.outputs[0]) for seed in seeds):
            value = v1.make_tensor_proto(1 + zlib.crc32(op.name.encode()) % 2**30, tf.int64)
            seeds[1]._set_attr("value", v1.AttrValue(tensor=value))


SHUFFLED_ANEW = (
    "a dataset that is shuffled without a seed: a run that goes on in the midst of an epoch sees another order; give shuffle a "
    "seed, or call keras.utils.set_random_seed before the dataset is made")


def is_shuffled_anew(dataset: Any) -> bool:
    """Whether a pipeline, or a function that it maps or interleaves, is shuffled in another order in each run of the script."""
    for one in _pipeline(dataset) if tf.executing_eagerly() else ():
        seeds = [getattr(one, name, None) for name in ("_seed", "_seed2")]
        if "Shuffle" in type(one).__name__ and None not in seeds and not any(tf.get_static_value(seed) for seed in seeds):
            return True
    for nodes in _bodies(dataset):
        zeros = {node.name for node in nodes if node.op == "Const" and not np.any(tf.make_ndarray(node.attr["value"].tensor))}
        if any("Shuffle" in node.op and "Dataset" in node.op and len(node.input) > 3
               and zeros.issuperset(edge.partition(":")[0] for edge in node.input[2:4]) for node in nodes):
            return True
    return False


def _pipeline(dataset: Any) -> List[Any]:
    """A dataset, and those that it is made of."""
    found = [dataset]
    for one in found:  # grows while we walk
        found.extend(one._inputs())
    return found


def _bodies(dataset: Any) -> List[Sequence[Any]]:
    """The nodes of each function that a pipeline maps or interleaves; in a graph, also those of the pipeline itself."""
    if tf.executing_eagerly():
        graphs = [each.function.graph.as_graph_def() for one in _pipeline(dataset) for each in one._functions()
                  if hasattr(each.function, "graph")]  # one of version 1 has none
        return [nodes for graph in graphs for nodes in (graph.node, *(each.node_def for each in graph.library.function))]
    ops = _ops_of(dataset._variant_tensor.op)
    library = {function.signature.name: function.node_def for function in ops[0].graph.as_graph_def().library.function}
    found: List[Sequence[Any]] = [[op.node_def for op in ops]]
    for nodes in found:  # grows while we walk
        called = {value.func.name for node in nodes for value in node.attr.values()}
        found.extend(library.pop(name) for name in sorted(called & library.keys()))
    return found


def _ops_of(last: tf.Operation) -> List[tf.Operation]:
    return sorted(reached([last], lambda op: (tensor.op for tensor in op.inputs)), key=lambda op: op.name)
