"""Sums over several processes: ``CollectiveReduce`` with one member per process, which has its replicas' sum.

::

    process 0    replica 0 ──┐
                 replica 1 ──┴─> AddN ──> CollectiveReduce ──> both replicas
                                                 ║ ring over gRPC
    process 1    replica 0 ──┐                   ║
                 replica 1 ──┴─> AddN ──> CollectiveReduce ──> both replicas
"""

from __future__ import annotations

import zlib
from typing import Any, Callable, Dict, List, Optional, Sequence

from whale_tf._tf_compat import collectives_carry_float16, collectives_gather_any_size, collectives_send_from_any, tf
from whale_tf.cluster import Processes, process_of
from whale_tf.communicators.base import Communicator, Member
from whale_tf.communicators.buckets import pack, reshape, unpack
from whale_tf.communicators.halves import GATHER_UP_TO, sum_by_gather, sum_by_ring
from whale_tf.communicators.keys import Keys, instance_of_shape, number_of_shape
from whale_tf.errors import ConfigError, UnsupportedOpError
from whale_tf.graph_editor.nodes import Nodes

MERGE_OPS = {"sum": "Add", "prod": "Mul", "max": "Max", "min": "Min", "any": "Max", "all": "Min"}
# types that TensorFlow 1.15's collectives do not support on CPU -> the types as which they are sent
CARRIERS = {tf.bool: tf.int32, tf.int8: tf.int32, tf.uint8: tf.int32, tf.int16: tf.int32, tf.uint16: tf.int32,
            tf.bfloat16: tf.float32, tf.float16: tf.float32}
RINGS = 2  # each sums a part of the tensor; while one waits for another process, the other adds and copies
COMPRESSED = (tf.float32, tf.float64)
CARRIED = (tf.float32, tf.float64, tf.int32, tf.int64)


def is_carried(dtype: tf.DType) -> bool:
    """Whether messages carry values of a type."""
    return CARRIERS.get(dtype, dtype) in CARRIED


class ProcessCommunicator(Communicator):
    """See the module's docstring.

    Collectives are not ordered: TensorFlow's ring runs each on its own threads, so processes that start them in different
    orders do not deadlock.

    Args:
        processes: they compute steps side by side.  If several processes run parts of each step, the members of a collective are
            those that run the same part.
        keys: shared by all graphs of this process.
    """

    def __init__(self, nodes: Nodes, processes: Processes, keys: Keys) -> None:
        super().__init__(nodes)
        self._rank = processes.step
        self.is_first = self._rank == 0
        self._all, self._keys = processes, keys
        self.processes = processes.graphs
        self._staged: List[str] = []

    def _carries_float16(self) -> bool:
        return collectives_carry_float16()

    def _sum_of_halves(self, member: Member, name: str, dtype: Any) -> str:
        """The sum of vectors over all processes, sent as float16."""
        nodes, device = self._nodes, member.device
        if dtype != tf.float32:
            member = Member(nodes.cast(member.value, name + "/to_float32", dtype, tf.float32, device), device)

        def largest(one: Member, what: str) -> str:
            return self.across(one, "max", what, tf.float32)

        def total(one: Member, what: str) -> str:
            return self._reduce(one, "sum", what, tf.float16)

        if self._carries_float16():
            result = sum_by_ring(nodes, member, self.processes, name, largest, total)
        elif self.processes <= GATHER_UP_TO:
            result = sum_by_gather(nodes, member, self.processes, name, lambda one, what: self._gather(one, what, tf.int32))
        else:
            raise ConfigError(
                f"communication.fp16 is true, but TensorFlow {tf.__version__} does not sum float16 between processes, and "
                f"gathering the gradients of all {self.processes} processes takes more bytes than summing them as they are; "
                f"leave it out, or use at most {GATHER_UP_TO} processes")
        return result if dtype == tf.float32 else nodes.cast(result, name + "/to_" + dtype.name, tf.float32, dtype, device)

    def across_together(self, members: Sequence[Member], names: Sequence[str], shapes: Sequence[Sequence[int]],
                        dtype: Any) -> List[str]:
        device = members[0].device
        packed = pack(self._nodes, [member.value for member in members], names, dtype, device)
        total = self.across(Member(packed, device), "sum", names[0] + "/bucket", dtype)
        return unpack(self._nodes, total, names, shapes, dtype, device)

    def across(self, member: Member, kind: str, name: str, dtype: Any, fp16: bool = False) -> str:
        if fp16 and dtype in COMPRESSED:
            nodes, device = self._nodes, member.device
            shape = nodes.shape(member.value, name + "/shape", dtype, device)
            row = reshape(nodes, member.value, nodes.const([-1], name + "/any", tf.int32, device), name + "/row", dtype, device)
            total = self._sum_of_halves(Member(row, device), name + "/sum", dtype)
            return reshape(nodes, total, shape, name, dtype, device)
        return self._carried(member, name, dtype, lambda one, wire: self._reduce(one, kind, name, wire))

    def _carried(self, member: Member, name: str, dtype: Any, send: Callable[[Member, Any], str], has_value: bool = True) -> str:
        """What ``send`` receives, sent in a type that collectives support.

        Args:
            has_value: this process has the value; else it only receives.
        """
        wire = CARRIERS.get(dtype, dtype)
        if wire not in CARRIED:
            raise UnsupportedOpError(f"{name!r} is of type {dtype.name}, which collectives between processes cannot carry")
        if wire == dtype:
            return send(member, dtype)
        if has_value:
            value = self._nodes.cast(member.value, name + "/to_" + wire.name, dtype, wire, member.device)
            member = Member(value, member.device)
        return self._nodes.cast(send(member, wire), name + "/to_" + dtype.name, wire, dtype, member.device)

    def sum_if_together(self, part: Member, alone: str, host: str, name: str, dtype: Any) -> str:
        """::

            part ───> Switch ──(true)──> CollectiveReduce ──┐
                         ^ together                         ├─> Merge
            alone ──> Switch ──(false)──────────────────────┘
        """
        if self.is_always_together:
            return self.across(part, "sum", name, dtype)
        nodes, device = self._nodes, part.device
        true = nodes.const(True, name + "/default", tf.bool, host)
        together = nodes.add("PlaceholderWithDefault", name + "/together", [true], host, dtype=tf.bool, shape=tf.TensorShape([]))
        taken, left = (nodes.add("Switch", f"{name}/{what}", [source, together], device, T=dtype)
                       for what, source in (("part", part.value), ("value", alone)))
        total = self.across(Member(taken + ":1", device), "sum", name + "/total", dtype)
        self.together[self.collectives[-1]] = together
        merged = nodes.add("Merge", name + "/merged", [left + ":0", total], device, T=dtype, N=2)
        return nodes.identity(merged, name, dtype, device)

    def _reduce(self, member: Member, kind: str, name: str, dtype: Any) -> str:
        return self._collective(
            "CollectiveReduce", name, [member.value], member.device, T=dtype, merge_op=MERGE_OPS[kind], final_op="Id",
            subdiv_offsets=[0] * RINGS)

    def gather_across(self, member: Member, rank: int, name: str, dtype: Any, equal: bool, lengths: Optional[str] = None) -> str:
        return self._carried(member, name, dtype, lambda one, wire: self._gather(one, name, wire) if equal else (
            self._gather_unequal(one, rank, name, wire, lengths)))

    def _gather(self, member: Member, name: str, dtype: Any) -> str:
        return self._collective("CollectiveGather", name, [member.value], member.device, T=dtype, shape=[0])

    def _gather_unequal(self, member: Member, rank: int, name: str, dtype: Any, lengths: Optional[str]) -> str:
        """Each process pads its rows to the largest number that any process has; the zeros in between are removed afterwards.

        ``CollectiveGather`` requires the same shape in all steps (1.15.5, 2.21); ``CollectiveGatherV2``, which functions use,
        requires it only in all processes.  Without the latter, each process puts its rows into its own section of a tensor of
        zeros, and these tensors are added up."""
        nodes, device, i32 = self._nodes, member.device, tf.int32

        def constant(value: Any, what: str) -> str:
            return nodes.const(value, f"{name}/{what}", i32, device)

        shape = nodes.shape(member.value, name + "/shape", dtype, device)
        length = nodes.slice_dim(shape, 0, 1, 0, 1, name + "/length", i32, device)
        lengths = lengths or self._gather(Member(length, device), name + "/lengths", i32)
        longest = nodes.add("Max", name + "/longest", [lengths, constant([0], "all")], device, T=i32, Tidx=i32, keep_dims=True)
        in_sections = not (self.is_always_together and collectives_gather_any_size())
        if in_sections:
            before = nodes.binary("Mul", longest, constant(self._rank, "rank"), name + "/before", i32, device)
            total = nodes.binary("Mul", longest, constant(self.processes, "processes"), name + "/total", i32, device)
        else:
            before, total = constant([0], "before"), longest
        own = nodes.binary("Add", before, length, name + "/own", i32, device)
        after = nodes.binary("Sub", total, own, name + "/after", i32, device)
        first = nodes.concat([before, after], 0, name + "/first", i32, device)
        others = [constant([0, 0], "others")] * (rank - 1)
        paddings = nodes.add("Pack", name + "/paddings", [first] + others, device, T=i32, N=rank, axis=0)
        padded = nodes.add("Pad", name + "/padded", [member.value, paddings], device, T=dtype, Tpaddings=i32)
        part = Member(padded, device)
        rows = self.across(part, "sum", name, dtype) if in_sections else self._gather_any_size(part, name, dtype)
        count = nodes.scalar(longest, name + "/count", i32, device)
        place = nodes.add("Range", name + "/place", [constant(0, "start"), count, constant(1, "step")], device, Tidx=i32)
        column = nodes.expand_dims(lengths, 1, name + "/column", i32, device)
        kept = nodes.binary("Less", place, column, name + "/kept", i32, device)
        flat = reshape(nodes, kept, constant([-1], "any"), name + "/flat", tf.bool, device)
        where = nodes.add("Where", name + "/where", [flat], device, T=tf.bool)
        index = reshape(nodes, where, constant([-1], "any"), name + "/index", tf.int64, device)
        return nodes.add("GatherV2", name + "/rows", [rows, index, constant(0, "axis")], device, Tparams=dtype,
                         Tindices=tf.int64, Taxis=i32)

    def _gather_any_size(self, member: Member, name: str, dtype: Any) -> str:
        """Gather tensors that have the same shape in all processes, but perhaps another one in the next step."""
        nodes, device, (block, number) = self._nodes, member.device, self._keys.open_instance()
        sizes = nodes.shape(member.value, name + "/sizes", dtype, device)
        given = [nodes.const(value, f"{name}/{what}", tf.int32, device)
                 for what, value in (("group_size", self.processes), ("group_key", self._group(device, block)))]
        shape = number_of_shape(nodes, sizes, name + "/instance", device)
        instance = instance_of_shape(nodes, number, shape, name + "/instance", device)
        op = nodes.add("CollectiveGatherV2", name, [member.value, *given, instance], device, T=dtype)
        self._note("CollectiveGatherV2", op, device, {"T": dtype, "instance": number})
        return op

    def broadcast(self, member: Member, shape: Sequence[int], name: str, dtype: Any, root: int = 0,
                  waits: Sequence[str] = ()) -> str:
        """Process ``root``'s value on every process.  ``member.value`` is read only there; all have the same static shape.

        Args:
            waits: ops for which the other processes wait.
        """
        return self._carried(member, name, dtype, lambda one, wire: self._broadcast(one, shape, name, wire, root, waits),
                             has_value=self._rank == root)

    def _broadcast(self, member: Member, shape: Sequence[int], name: str, dtype: Any, root: int, waits: Sequence[str]) -> str:
        if root > 0 and not collectives_send_from_any():
            value = member.value if self._rank == root else self._zeros(shape, name, dtype, member.device, waits)
            return self._reduce(Member(value, member.device), "sum", name, dtype)
        attrs = {"T": dtype, "shape": tf.TensorShape(shape)}
        if self._rank == root:
            return self._collective("CollectiveBcastSend", name, [member.value], member.device, **attrs)
        return self._collective("CollectiveBcastRecv", name, [], member.device, waits, **attrs)

    def _zeros(self, shape: Sequence[int], name: str, dtype: Any, device: str, waits: Sequence[str]) -> str:
        """Zeros that take no memory between runs."""
        dims = self._nodes.const(list(shape), name + "/shape", tf.int32, device)
        zero = self._nodes.const(0, name + "/zero", dtype, device)
        return self._nodes.add("Fill", name + "/zeros", [dims, zero], device, waits, T=dtype, index_type=tf.int32)

    @property
    def staged(self) -> str:
        """A text of everything staged so far, which is equal in processes that agree."""
        return "\n".join(self._staged)

    def agreement(self, device: str) -> str:
        """A checksum of everything that each process has staged so far: int64 `[processes]`, equal for processes that agree."""
        digest = zlib.crc32(self.staged.encode())
        return self._agreement(self._nodes.const([digest], "whale/agreement/own", tf.int64, device), device)

    def _agreement(self, own: str, device: str) -> str:
        group, instance = self._keys.agreement()
        return self._nodes.add(
            "CollectiveGather", "whale/agreement", [own], device, T=tf.int64, shape=[0], group_size=self.processes,
            group_key=group, instance_key=instance)

    def _collective(self, op_type: str, name: str, inputs: Sequence[str], device: str, waits: Sequence[str] = (),
                    **attrs: Any) -> str:
        part = self._part(device)  # TensorFlow 1.15 tells instances apart by their number alone, and not by their group
        op = self._nodes.add(op_type, name, inputs, device, waits, group_size=self.processes, group_key=self._group(device),
                             instance_key=self._keys.instance(len(self._all.peers)) + part, **attrs)
        self._note(op_type.replace("BcastRecv", "BcastSend"), op, device, attrs)
        return op

    def _group(self, device: str, *name: str) -> int:
        """The group with this name of the processes that have the device that corresponds to ``device``."""
        return self._keys.group(self._all.peers, self._part(device), _local(device), *name)

    def _part(self, device: str) -> int:
        """The number of the part that a device's process runs."""
        owner = process_of(device)
        return self._all.members.index(self._all.rank if owner is None else owner)

    def _note(self, kind: str, op: str, device: str, attrs: Dict[str, Any]) -> None:
        """Record a staged collective; all processes must stage the same ones."""
        self.collectives.append(op)
        self._staged.append(f"{kind} {op} {_local(device)} {sorted(map(str, attrs.items()))}")


def _local(device: str) -> str:
    return device.rpartition("/device:")[2]
