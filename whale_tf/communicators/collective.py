"""TensorFlow's own collectives: ring on CPU, NCCL on GPU."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

from whale_tf.communicators.base import Communicator, Member
from whale_tf.graph_editor.nodes import Nodes


class CollectiveCommunicator(Communicator):
    """``CollectiveReduce`` ops, one per member.

    A group key identifies a set of devices, an instance key identifies a collective.  Both are assigned here in the order of
    calls, so that every process which stages the same plan assigns the same keys.
    """

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(nodes)
        self._groups: Dict[Tuple[str, ...], int] = {}
        self._instances = 0

    def all_reduce(self, members: Sequence[Member], name: str, dtype: Any, fp16: bool = False) -> List[str]:
        devices = tuple(member.device for member in members)
        group_key = self._groups.setdefault(devices, len(self._groups) + 1)
        self._instances += 1
        hint = "nccl" if all(":GPU:" in device for device in devices) else "auto"
        attrs = dict(T=dtype, group_size=len(members), group_key=group_key, instance_key=self._instances, merge_op="Add",
                     final_op="Id", subdiv_offsets=[0], communication_hint=hint)
        parts = [self._nodes.add("CollectiveReduce", f"{name}/{i}", [member.value], member.device, **attrs)
                 for i, member in enumerate(members)]
        # fetching one member alone would hang, so every result waits for all
        return [self._nodes.identity(part, f"{name}/all_{i}", dtype, members[i].device, control=parts)
                for i, part in enumerate(parts)]
