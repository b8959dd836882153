"""TensorFlow's own collectives: ring on CPU, NCCL on GPU."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

from whale_tf._tf_compat import divides_gpus
from whale_tf.communicators.base import Communicator, Member
from whale_tf.errors import PlanError
from whale_tf.graph_editor.nodes import Nodes


def check_gpus(communicator: Communicator, config: Any) -> None:
    """Raises:
        PlanError: NCCL would sum over logical devices of one GPU, which ends in an error of NCCL or in a hang.

    Args:
        config: the ConfigProto of what runs the step.
    """
    if communicator.has_nccl and divides_gpus(config):
        raise PlanError(
            "communication.backend is 'collective', and NCCL needs a GPU for each device, but TensorFlow divides a GPU into "
            "several logical devices; use communication.backend 'local'")


class CollectiveCommunicator(Communicator):
    """``CollectiveReduce`` ops, one per member.

    A group key identifies a set of devices, an instance key identifies a collective.  Both are assigned here in the order of
    calls, so that every process which stages the same plan assigns the same keys.
    """

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(nodes)
        self._groups: Dict[Tuple[str, ...], int] = {}
        self._instances = 0

    def all_reduce(self, members: Sequence[Member], name: str, dtype: Any) -> List[str]:
        """The sum of all members' tensors, on every member's device, in the order of ``members``."""
        devices = tuple(member.device for member in members)
        group_key = self._groups.setdefault(devices, len(self._groups) + 1)
        self._instances += 1
        is_nccl = all(":GPU:" in device for device in devices)
        self.has_nccl = self.has_nccl or is_nccl
        attrs = dict(T=dtype, group_size=len(members), group_key=group_key, instance_key=self._instances, merge_op="Add",
                     final_op="Id", subdiv_offsets=[0], communication_hint="nccl" if is_nccl else "auto")
        parts = [self._nodes.add("CollectiveReduce", f"{name}/{i}", [member.value], member.device, **attrs)
                 for i, member in enumerate(members)]
        # fetching one member alone would hang, so every result waits for all
        return [self._nodes.identity(part, f"{name}/all_{i}", dtype, members[i].device, control=parts)
                for i, part in enumerate(parts)]
