"""Each process' share of an input pipeline.

Every process runs the same script, so it builds the same pipeline.  Of each ``n`` consecutive elements (mini-batches) that
come out at its end, process ``i`` of ``n`` takes number ``i``; what is left over at the end is dropped, so that all
processes take the same number.  In every step the processes together train on the mini-batches that the local script
would see in one of ``n`` times the size.
"""

from __future__ import annotations

import zlib
from typing import Any, List, Set

from whale_tf._tf_compat import tf, v1
from whale_tf.cluster import Processes
from whale_tf.errors import UnsupportedOpError

SCOPE = "whale_share"


def share(dataset: Any, processes: Processes) -> Any:
    """The elements of a tf.data pipeline that this process takes (see the module's docstring)."""
    _agree_on_shuffling(dataset)
    with v1.name_scope(SCOPE), tf.control_dependencies(None):
        count = tf.constant(processes.count, tf.int64, name="count")
        rank = tf.constant(processes.rank, tf.int64, name="rank")

    def own(*parts: Any) -> Any:
        window = parts[0] if len(parts) == 1 else parts
        elements = window if isinstance(window, tf.data.Dataset) else tf.data.Dataset.zip(window)
        return elements.skip(rank).take(1)

    return dataset.window(count, shift=count, drop_remainder=True).flat_map(own)


def take_all(graph: tf.Graph) -> None:
    """Take back every share: this process turns out to drive all devices.

    Raises:
        UnsupportedOpError: an iterator has its share built in.
    """
    for op in graph.get_operations():
        if op.type == "OneShotIterator":
            raise UnsupportedOpError(
                "iterator {!r} takes one process' share of its dataset, but one process drives a pipeline across processes, and "
                "needs all of it; use tf.compat.v1.data.make_initializable_iterator, or set io.slicing to false".format(op.name)
            )
        if op.type == "Const" and op.name.split("/")[-2:-1] and op.name.split("/")[-2].startswith(SCOPE):
            value = 1 if op.name.split("/")[-1].startswith("count") else 0
            op._set_attr("value", v1.AttrValue(tensor=v1.make_tensor_proto(value, tf.int64)))


def _agree_on_shuffling(dataset: Any) -> None:
    """A shuffle without a seed would differ from process to process, and their shares overlap: give it one that follows
    from its name."""
    for op in _ops_of(dataset._variant_tensor.op):
        constants = [tensor.op for tensor in op.inputs if tensor.op.type == "Const"]
        seeds = [constant for constant in constants if constant.name.split("/")[-1].startswith("seed")]
        if "Shuffle" in op.type and len(seeds) == 2 and not any(tf.get_static_value(seed.outputs[0]) for seed in seeds):
            value = v1.make_tensor_proto(1 + zlib.crc32(op.name.encode()) % 2**30, tf.int64)
            seeds[1]._set_attr("value", v1.AttrValue(tensor=value))


def _ops_of(last: tf.Operation) -> List[tf.Operation]:
    found: Set[tf.Operation] = {last}
    stack = [last]
    while stack:
        for tensor in stack.pop().inputs:
            if tensor.op not in found:
                found.add(tensor.op)
                stack.append(tensor.op)
    return sorted(found, key=lambda op: op.name)
