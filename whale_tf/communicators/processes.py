"""Sums over several processes: inside each as plain sums, between them by ``CollectiveReduce`` with one member each.

::

    process 0    replica 0 ──┐
                 replica 1 ──┴─> AddN ──> CollectiveReduce ──> both replicas
                                                 ║ ring over gRPC
    process 1    replica 0 ──┐                   ║
                 replica 1 ──┴─> AddN ──> CollectiveReduce ──> both replicas
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.communicators.base import Communicator, Member
from whale_tf.communicators.local import LocalCommunicator
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor.nodes import Nodes

MERGE_OPS = {"sum": "Add", "prod": "Mul", "max": "Max", "min": "Min", "any": "Max", "all": "Min"}
# types that TensorFlow 1.15's collectives do not take on CPU -> what carries them
CARRIERS = {
    tf.bool: tf.int32,
    tf.int8: tf.int32,
    tf.uint8: tf.int32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
    tf.bfloat16: tf.float32,
    tf.float16: tf.float32,
}
CARRIED = (tf.float32, tf.float64, tf.int32, tf.int64)


class Keys:
    """Numbers of groups and of collectives.

    TensorFlow's server remembers both for as long as it lives, so one object serves all graphs of a process.  Processes
    that stage the same graphs in the same order give out the same numbers.
    """

    def __init__(self) -> None:
        self._groups: Dict[Tuple[str, ...], int] = {}
        self._instances = 0

    def group(self, *members: str) -> int:
        return self._groups.setdefault(members, len(self._groups) + 1)

    def instance(self) -> int:
        self._instances += 1
        return self._instances


class ProcessCommunicator(Communicator):
    """See the module's docstring.

    Collectives are not ordered among each other: TensorFlow's ring runs each on threads of its own, so processes that start
    them in different orders do not wait for each other in a circle.

    Args:
        count: number of processes.
        keys: shared by all graphs of this process.
        rank: number of this process.
    """

    def __init__(self, nodes: Nodes, count: int, rank: int, keys: Keys) -> None:
        super().__init__(nodes)
        self._local = LocalCommunicator(nodes)
        self.is_first = rank == 0
        self._keys = keys
        self.processes = count

    def all_reduce(self, members: Sequence[Member], name: str, dtype: Any) -> List[str]:
        here = self._local.sum(members, name + "/here", dtype)
        return [self.across(here, "sum", name, dtype)] * len(members)

    def across(self, member: Member, kind: str, name: str, dtype: Any) -> str:
        wire = self._wire_type(name, dtype)
        value = member.value
        if wire != dtype:
            value = self._nodes.cast(value, name + "/to_" + wire.name, dtype, wire, member.device)
        total = self._collective(
            "CollectiveReduce", name, [value], member.device, T=wire, merge_op=MERGE_OPS[kind], final_op="Id",
            subdiv_offsets=[0])  # fmt: skip
        if wire != dtype:
            total = self._nodes.cast(total, name + "/to_" + dtype.name, wire, dtype, member.device)
        return total

    def gather_across(self, member: Member, dim: int, name: str, dtype: Any) -> str:
        if dim != 0:
            raise UnsupportedOpError(
                "{!r} would have to be concatenated over processes along dimension {}; only dimension 0 is supported".format(
                    name, dim
                )
            )
        wire = self._wire_type(name, dtype)
        value = member.value
        if wire != dtype:
            value = self._nodes.cast(value, name + "/to_" + wire.name, dtype, wire, member.device)
        rows = self._collective("CollectiveGather", name, [value], member.device, T=wire, shape=[0])
        if wire != dtype:
            rows = self._nodes.cast(rows, name + "/to_" + dtype.name, wire, dtype, member.device)
        return rows

    def broadcast(self, member: Member, shape: Sequence[int], name: str, dtype: Any) -> str:
        """Process 0's value on every process.  ``member.value`` is read there only; all have the same static shape."""
        wire = self._wire_type(name, dtype)
        attrs = {"T": wire, "shape": tf.TensorShape(shape)}
        if self.is_first:
            value = member.value
            if wire != dtype:
                value = self._nodes.cast(value, name + "/to_" + wire.name, dtype, wire, member.device)
            value = self._collective("CollectiveBcastSend", name, [value], member.device, **attrs)
        else:
            value = self._collective("CollectiveBcastRecv", name, [], member.device, **attrs)
        if wire != dtype:
            value = self._nodes.cast(value, name + "/to_" + dtype.name, wire, dtype, member.device)
        return value

    def _wire_type(self, name: str, dtype: Any) -> Any:
        wire = CARRIERS.get(dtype, dtype)
        if wire not in CARRIED:
            raise UnsupportedOpError("{!r} is of type {}, which collectives between processes cannot carry".format(
                name, dtype.name))
        return wire

    def _collective(self, op_type: str, name: str, inputs: Sequence[str], device: str, **attrs: Any) -> str:
        local_device = device.rpartition("/device:")[2]
        op = self._nodes.add(
            op_type, name, inputs, device, group_size=self.processes, group_key=self._keys.group(local_device),
            instance_key=self._keys.instance(), **attrs)  # fmt: skip
        self.collectives.append(op)
        return op
