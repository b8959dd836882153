"""Messages from one process to another: a broadcast in a group of two.

::

    process 0   value ──> Shape ──> CollectiveBcastSend          process 1     CollectiveBcastRecv ──> shape
                value ────────────> CollectiveBcastSendV2                      CollectiveBcastRecvV2 ──> value
                                                                                       ^ shape

A value of a static shape is one message.  If not even the number of its dimensions is known, this is sent first.  The receiver
pulls messages from the sender, and no other process takes part.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

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
        staged: a line for each value, equal in processes that agree.
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
            UnsupportedOpError: collectives cannot carry the type.
        """
        wire = CARRIERS.get(value.dtype, value.dtype)
        if wire not in CARRIED:
            raise UnsupportedOpError(
                f"{value.edge!r} is of type {value.dtype.name}, which cannot be sent from process {sender} to process "
                f"{receiver}; compute it in the TaskGraph that reads it")
        nodes, device, scope = self._nodes, self._device, f"{value.scope}/from_{sender}_to_{receiver}"
        self.staged.append(f"{scope} {value.dtype.name} {value.shape}")
        cast = sender == self._rank and wire != value.dtype
        edge = nodes.cast(value.edge, scope + "/cast", value.dtype, wire, device) if cast else value.edge
        found = self._shaped(_Message(sender, receiver, scope, tuple(waits)), edge, wire, value.shape)
        return nodes.cast(found, scope + "/cast", wire, value.dtype, device) if found and wire != value.dtype else found

    def _shaped(self, message: _Message, edge: str, dtype: tf.DType, shape: Optional[Tuple[Optional[int], ...]]) -> str:
        """A value, with its shape in a message before it unless that is known."""
        if shape is not None and None not in shape:
            return self._send(message, edge, dtype, shape, "")
        own = self._rank == message.sender
        sizes = self._nodes.shape(edge, message.scope + "/shape", dtype, self._device) if own else ""
        before, rank = message._replace(scope=message.scope + "/sizes", waits=()), None if shape is None else len(shape)
        return self._send(message, edge, dtype, None, self._shaped(before, sizes, tf.int32, (rank,)))

    def _send(self, message: _Message, edge: str, dtype: tf.DType, shape: Optional[Sequence[Optional[int]]], sizes: str) -> str:
        """One message.

        Args:
            shape: static; None: the receiver gets it as ``sizes``, a vector.
        """
        nodes, device, scope = self._nodes, self._device, message.scope
        numbers = {"group_size": SIZE, "group_key": self._keys.group("pair", str(message.sender), str(message.receiver)),
                   "instance_key": self._keys.instance()}
        if self._rank not in (message.sender, message.receiver):
            return ""
        kind, version = "Send" if self._rank == message.sender else "Recv", "" if shape is not None else "V2"
        inputs, attrs = [edge] if kind == "Send" else [], {"T": dtype}  # type: List[str], Dict[str, object]
        if shape is not None:
            attrs.update(numbers, shape=tf.TensorShape(shape))
        else:
            inputs += [nodes.const(number, f"{scope}/{what}", tf.int32, device) for what, number in numbers.items()]
            if kind == "Recv":
                inputs.append(sizes)
                attrs["Tshape"] = tf.int32
        name = nodes.add(f"CollectiveBcast{kind}{version}", f"{scope}/{kind.lower()}", inputs, device,
                         message.waits if kind == "Send" else (), **attrs)
        if kind == "Send":
            self.sent.append(name)
            return ""
        self.received.setdefault(message.sender, []).append(name)
        return name


class _Message(NamedTuple):
    """``waits``: ops for which the sender waits."""

    sender: int
    receiver: int
    scope: str
    waits: Tuple[str, ...]
