"""Where ops run: requested devices and colocation.

::

    before   a /device:CPU:0      b /device:CPU:0, _class=["loc:@a"]
    after    place([b], "/device:CPU:1")
             a /device:CPU:0      b /device:CPU:1              # b need no longer run where a runs
"""
from __future__ import annotations

import functools
from typing import Callable, Dict, Iterable, List, Optional, Union

from whale_tf._tf_compat import tf
from whale_tf.errors import GraphEditError
from whale_tf.graph_editor.edges import COLOCATE
from whale_tf.graph_editor.one_graph import check_one_graph


@functools.lru_cache(maxsize=4096)
def canonical_device(device: str) -> str:
    """``"/cpu:0"`` as ``"/device:CPU:0"``; the empty string stays empty.

    Raises:
      GraphEditError: not the name of a device.
    """
    if not device:
        return ""
    try:
        return tf.DeviceSpec.from_string(device).to_string()
    except ValueError as error:
        raise GraphEditError(f"{device!r} is not a device; write for example '/job:worker/task:0/device:CPU:1'") from error


def place(ops: Iterable[tf.Operation], device: Union[str, Callable[[tf.Operation], Optional[str]]], *,
          keep_colocation: bool = False) -> None:
    """Request a device for each op, before any Session has run it.

    A ``_class`` entry that ties an op to another op takes precedence over a requested device, so it is removed.

    Args:
      device: one for all, or a function of the op. If the function returns None, the op is left as it is; "" clears its device.
      keep_colocation: keep ``_class`` entries.

    Raises:
      GraphEditError: not the name of a device, or ops of several graphs.
    """
    ops = list(ops)
    check_one_graph(ops)
    for op in ops:
        choice = device if isinstance(device, str) else device(op)
        if choice is not None:
            op._set_device(canonical_device(choice))
            if not keep_colocation:
                drop_colocation([op])


def merge_device(op: tf.Operation, device: str) -> str:
    """The op's device, with the parts that ``device`` names replaced.

    ::

        merge_device(op on /job:worker/device:GPU:0, "/task:1/device:GPU:2")  ->  /job:worker/task:1/device:GPU:2
    """
    base = tf.DeviceSpec.from_string(op.device)
    return base.make_merged_spec(tf.DeviceSpec.from_string(canonical_device(device))).to_string()


def by_device(ops: Iterable[tf.Operation]) -> Dict[str, List[tf.Operation]]:
    """Requested device ("" if there is none) -> ops.

    Raises:
      GraphEditError: ops of several graphs.
    """
    ops = list(ops)
    check_one_graph(ops)
    groups: Dict[str, List[tf.Operation]] = {}
    for op in ops:
        groups.setdefault(op.device, []).append(op)
    return groups


def colocated_with(op: tf.Operation) -> List[str]:
    """Names of the other ops with which an op has to run."""
    names = [entry[len(COLOCATE):].decode() for entry in op.colocation_groups() if entry.startswith(COLOCATE)]
    return [name for name in names if name != op.name]


def drop_colocation(ops: Iterable[tf.Operation]) -> None:
    """Remove the entries that tie ops to the devices of other ops.

    Raises:
      GraphEditError: ops of several graphs.
    """
    ops = list(ops)
    check_one_graph(ops)
    for op in ops:
        if colocated_with(op):
            op._clear_attr("_class")
