"""Messages from one process to another: a broadcast in a group of two.

::

    process 0   value ──> Shape ──> CollectiveBcastSend          process 1     CollectiveBcastRecv ──> shape
                value ────────────> CollectiveBcastSendV2                      CollectiveBcastRecvV2 ──> value
                                                                                       ^ shape

A value of a static shape is one message.  The receiver pulls it from the sender, and no other process takes part.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.communicators.processes import CARRIED, CARRIERS, Keys
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor.nodes import Nodes

SIZE = 2  # of a group


class Value(NamedTuple):
    """A tensor that crosses.

    Attributes:
        edge: its name in the sender's graph.
        scope: name of the new ops.
        shape: its static shape; None: not even its rank is known.
    """

    edge: str
    scope: str
    dtype: tf.DType
    shape: Optional[Tuple[Optional[int], ...]]


class Pairs:
    """Stages messages.  All processes must call :meth:`cross` for the same values in the same order, whoever sends them.

    Args:
        rank: this process.
        device: on which the messages of this process are staged.

    Attributes:
        staged: a line for each message, equal in processes that agree.
        sent: names of the ops that send, which must run.
        received: sender -> names of the ops that receive, which must run, so that the sender may forget the value.
    """

    def __init__(self, nodes: Nodes, rank: int, keys: Keys, device: str) -> None:
        self._nodes, self._rank, self._keys, self._device = nodes, rank, keys, device
        self.staged: List[str] = []
        self.sent: List[str] = []
        self.received: Dict[int, List[str]] = {}

    def cross(self, value: Value, sender: int, receiver: int, waits: Sequence[str] = ()) -> str:
        """Sends a value.

        Args:
            waits: ops for which the sender waits.

        Returns:
            In the receiver the value; elsewhere nothing.

        Raises:
            UnsupportedOpError: collectives cannot carry the type, or the rank is not known.
        """
        wire = CARRIERS.get(value.dtype, value.dtype)
        if wire not in CARRIED:
            raise UnsupportedOpError(
                f"{value.edge!r} is of type {value.dtype.name}, which cannot be sent from process {sender} to process "
                f"{receiver}; compute it in the TaskGraph that reads it")
        if value.shape is None:
            raise UnsupportedOpError(
                f"{value.edge!r} is sent from process {sender} to process {receiver}, but the number of its dimensions is not "
                "known; give it a shape of known rank (tf.ensure_shape)")
        nodes, device, scope = self._nodes, self._device, f"{value.scope}/from_{sender}_to_{receiver}"
        self.staged.append(f"{scope} {value.dtype.name} {value.shape}")
        is_static = None not in value.shape
        shape_key, key = None if is_static else self._keys.instance(), self._keys.instance()
        group = self._keys.group("pair", str(sender), str(receiver))

        def attrs(instance: int, shape: Sequence[Optional[int]]) -> Any:
            return {"group_size": SIZE, "group_key": group, "instance_key": instance, "shape": tf.TensorShape(shape)}

        def numbers(instance: int) -> List[str]:
            return [nodes.const(number, f"{scope}/{what}", tf.int32, device)
                    for what, number in (("size", SIZE), ("group", group), ("instance", instance))]

        if self._rank == sender:
            sent = value.edge if wire == value.dtype else nodes.cast(value.edge, scope + "/cast", value.dtype, wire, device)
            if shape_key is not None:
                shape = nodes.shape(sent, scope + "/shape", wire, device)
                self.sent.append(nodes.add("CollectiveBcastSend", scope + "/send_shape", [shape], device, T=tf.int32,
                                           **attrs(shape_key, [len(value.shape)])))
                self.sent.append(nodes.add("CollectiveBcastSendV2", scope + "/send", [sent, *numbers(key)], device, waits,
                                           T=wire))
            else:
                self.sent.append(nodes.add("CollectiveBcastSend", scope + "/send", [sent], device, waits, T=wire,
                                           **attrs(key, value.shape)))
        if self._rank != receiver:
            return ""
        if shape_key is None:
            found = nodes.add("CollectiveBcastRecv", scope + "/receive", [], device, T=wire, **attrs(key, value.shape))
        else:
            shape = nodes.add("CollectiveBcastRecv", scope + "/receive_shape", [], device, T=tf.int32,
                              **attrs(shape_key, [len(value.shape)]))
            found = nodes.add("CollectiveBcastRecvV2", scope + "/receive", [*numbers(key), shape], device, T=wire,
                              Tshape=tf.int32)
        self.received.setdefault(sender, []).append(found)
        return found if wire == value.dtype else nodes.cast(found, scope + "/cast", wire, value.dtype, device)
