"""All-reduce inside one process, as plain sums: TensorFlow's runtime moves the tensors."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

from whale_tf.communicators.base import Communicator, Member
from whale_tf.graph_editor.nodes import Nodes


class LocalCommunicator(Communicator):
    """Sums each tensor on one device of its group and sends the result to the others.

    Devices take turns, so that work and traffic are spread evenly: with ``n`` devices, each carries ``2 (n - 1) / n`` of the
    bytes, as in a ring all-reduce.
    """

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(nodes)
        self._turns: Dict[Sequence[str], int] = {}

    def all_reduce(self, members: Sequence[Member], name: str, dtype: Any, fp16: bool = False) -> List[str]:
        return [self.sum(members, name, dtype).value] * len(members)

    def sum(self, members: Sequence[Member], name: str, dtype: Any) -> Member:
        """The sum and its device."""
        devices = tuple(member.device for member in members)
        turn = self._turns.get(devices, 0)
        self._turns[devices] = turn + 1
        device = devices[turn % len(devices)]
        return self.sum_on(device, members, name, dtype)

    def sum_on(self, device: str, members: Sequence[Member], name: str, dtype: Any) -> Member:
        """The sum on the given device."""
        return Member(self._nodes.add_n([member.value for member in members], name, dtype, device), device)
