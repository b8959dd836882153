"""Messages from one process to another: a broadcast in a group of two.  And sums of several processes, which all of them have.

::

    process 0   value ──> Shape ──> CollectiveBcastSend          process 1     CollectiveBcastRecv ──> shape
                value ────────────> CollectiveBcastSendV2                      CollectiveBcastRecvV2 ──> value
                                                                                       ^ shape

A value of a static shape, or one whose sizes both processes know, is one message.  If not even the number of its dimensions is
known, this is sent first.  The receiver pulls messages from the sender, and no other process takes part.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.cluster import Processes
from whale_tf.communicators.keys import Keys, instance_of_shape, number_of_shape
from whale_tf.communicators.processes import CARRIED, CARRIERS
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor.nodes import Nodes

SIZE = 2  # of a group


class CrossingValue(NamedTuple):
    """A tensor that crosses.

    Attributes:
        edge: its name in the sender's graph.
        scope: name of the new ops.
        shape: its static shape; None: not even its rank is known.
        sizes: an int32 vector of its sizes in this process ("" in others than the sender and the receiver), if both know them.
    """

    edge: str
    scope: str
    dtype: tf.DType
    shape: Optional[Tuple[Optional[int], ...]]
    sizes: Optional[str] = None


class Pairs:
    """Stages messages.  All processes must call :meth:`cross` and :meth:`add_up` for the same values in the same order, whoever
    sends them.

    Args:
        processes: all, and which of them this is.  Of steps side by side, each has its own messages between its processes.
        device: on which the messages of this process are staged.
        begin: ops for which each message waits.  If one of them fails, as at the end of the data, no message has begun: one that
            is cancelled would end all later ones.

    Attributes:
        staged: a line for each value, equal in processes that agree.
        sent: names of the ops that send or add up, which must run.
        received: sender -> names of the ops that receive, which must run, so that the sender may forget the value.
    """

    def __init__(self, nodes: Nodes, processes: Processes, keys: Keys, device: str, begin: Sequence[str] = ()) -> None:
        self._nodes, self._rank, self._keys, self._device, self._begin = nodes, processes.rank, keys, device, tuple(begin)
        self._processes = processes
        self._numbers: Dict[str, str] = {}  # sizes -> their number
        self.staged: List[str] = []
        self.sent: List[str] = []
        self.received: Dict[int, List[str]] = {}

    def cross(self, value: CrossingValue, sender: int, receiver: int, waits: Sequence[str] = ()) -> str:
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
        nodes, device, parts = self._nodes, self._device, map(self._processes.members.index, (sender, receiver))
        scope = "{}/from_{}_to_{}".format(value.scope, *parts)
        self.staged.append(f"{scope} {value.dtype.name} {value.shape}{'' if value.sizes is None else ' of known sizes'}")
        cast = sender == self._rank and wire != value.dtype
        edge = nodes.cast(value.edge, scope + "/cast", value.dtype, wire, device) if cast else value.edge
        message = _Message(sender, receiver, scope, tuple(waits))
        if value.sizes is None:
            found = self._shaped(message, edge, wire, value.shape)
        else:
            if sender == self._rank:  # other sizes than the receiver expects are an error here, where it would wait forever
                edge = nodes.add("Reshape", scope + "/sized", [edge, value.sizes], device, T=wire, Tshape=tf.int32)
            found = self._open(message, edge, wire, value.sizes)
        return nodes.cast(found, scope + "/cast", wire, value.dtype, device) if found and wire != value.dtype else found

    def add_up(self, value: CrossingValue, members: Sequence[int]) -> str:
        """Adds up a value of each of these processes.

        Args:
            value: ``edge`` is this process's, if it is one of them.

        Returns:
            In each of them the sum; elsewhere nothing.
        """
        nodes, device, scope = self._nodes, self._device, value.scope + "/sum"
        self.staged.append(f"{scope} {value.dtype.name} {value.shape} of {[*map(self._processes.members.index, members)]}")
        attrs = dict(T=value.dtype, merge_op="Add", final_op="Id")
        if value.shape is not None and None not in value.shape:
            group, instance = self._group(members, "sum"), self._keys.instance()
            kind, inputs = "CollectiveReduce", [value.edge]
            attrs.update(group_size=len(members), group_key=group, instance_key=instance, subdiv_offsets=[0])
        else:
            block, number = self._keys.open_instance()
            group, kind, inputs = self._group(members, "sum", block), "CollectiveReduceV2", [value.edge]
            if self._rank in members:
                sizes = value.sizes or nodes.shape(value.edge, scope + "/shape", value.dtype, device)
                inputs += self._numbered(len(members), group, number, sizes, scope)
        if self._rank not in members:
            return ""
        self.sent.append(nodes.add(kind, scope, inputs, device, self._begin, **attrs))
        return self.sent[-1]

    def _shaped(self, message: _Message, edge: str, dtype: tf.DType, shape: Optional[Tuple[Optional[int], ...]]) -> str:
        """A value, with its shape in a message before it unless that is known."""
        if shape is not None and None not in shape:
            return self._end(message, "", [edge], [], T=dtype, shape=tf.TensorShape(shape), group_size=SIZE,
                             group_key=self._group(message.ends, "pair"), instance_key=self._keys.instance())
        own = self._rank == message.sender
        sizes = self._nodes.shape(edge, message.scope + "/shape", dtype, self._device) if own else ""
        before, rank = message._replace(scope=message.scope + "/sizes", waits=()), None if shape is None else len(shape)
        return self._open(message, edge, dtype, self._shaped(before, sizes, tf.int32, (rank,)) or sizes)

    def _open(self, message: _Message, edge: str, dtype: tf.DType, sizes: str) -> str:
        """One message of a shape that is known only when the step runs: the vector ``sizes``."""
        block, number = self._keys.open_instance()
        group = self._group(message.ends, "pair", block)
        if not sizes:
            return ""
        numbers = self._numbered(SIZE, group, number, sizes, message.scope)
        if self._rank == message.sender:
            return self._end(message, "V2", [edge, *numbers], [], T=dtype)
        return self._end(message, "V2", [], [*numbers, sizes], T=dtype, Tshape=tf.int32)

    def _end(self, message: _Message, version: str, sends: Sequence[str], receives: Sequence[str], **attrs: Any) -> str:
        """This process's end of a message.

        Args:
            version: of the ops.
            sends, receives: operands of the op that sends, or receives.
        """
        if self._rank == message.sender:
            self.sent.append(self._nodes.add(f"CollectiveBcastSend{version}", message.scope + "/send", sends, self._device,
                                             (*self._begin, *message.waits), **attrs))
        if self._rank != message.receiver:
            return ""
        name = self._nodes.add(f"CollectiveBcastRecv{version}", message.scope + "/recv", receives, self._device, self._begin,
                               **attrs)
        self.received.setdefault(message.sender, []).append(name)
        return name

    def _numbered(self, size: int, group: int, number: int, sizes: str, scope: str) -> List[str]:
        """Names of int32 scalars: a group's size and key, and the instance of a collective for tensors of these sizes."""
        nodes, device = self._nodes, self._device
        if sizes not in self._numbers:
            self._numbers[sizes] = number_of_shape(nodes, sizes, scope + "/instance", device)
        return [nodes.const(size, scope + "/group_size", tf.int32, device),
                nodes.const(group, scope + "/group_key", tf.int32, device),
                instance_of_shape(nodes, number, self._numbers[sizes], scope + "/instance", device)]

    def _group(self, members: Sequence[int], *name: str) -> int:
        places = [*map(self._processes.members.index, members)]
        groups = tuple(tuple(step[place] for place in places) for step in self._processes.steps)
        return self._keys.group(groups, self._processes.step, *name)


class _Message(NamedTuple):
    """``waits``: ops for which the sender waits."""

    sender: int
    receiver: int
    scope: str
    waits: Tuple[str, ...]

    @property
    def ends(self) -> Tuple[int, int]:
        return self.sender, self.receiver
