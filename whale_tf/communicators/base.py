"""The interface of communicators, independent of the transport."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from whale_tf.graph_editor.nodes import Nodes


class Member(NamedTuple):
    """One participant of a collective: the name of its tensor and its device."""

    value: str
    device: str


class Communicator:
    """Stages collectives: between processes, or between the devices of one.  This one stages none: in one process, TensorFlow's
    runtime moves tensors to where they are added.

    Attributes:
        processes: number of participating processes.
        collectives: names of the staged ops that wait for other processes.
        is_always_together: all processes take part in every run, as in those of a function; there are no optional collectives.
        together: a boolean; a run that feeds False skips the optional collectives (:meth:`sum_if_together`).
        has_nccl: NCCL computes sums, so each device needs a GPU of its own.
    """

    processes: int = 1
    is_always_together: bool = False
    has_nccl: bool = False
    collectives: List[str]
    together: Dict[str, str]

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self.collectives = []
        self.together = {}

    def across(self, member: Member, kind: str, name: str, dtype: Any, fp16: bool = False) -> str:
        """One value per process, combined over all processes by ``kind``: ``sum``, ``prod``, ``max``, ``min``, ``any``,
        ``all``.

        Args:
            fp16: send sums as scaled float16.
        """
        return member.value

    def across_together(self, members: Sequence[Member], names: Sequence[str], shapes: Sequence[Sequence[int]],
                        dtype: Any) -> List[str]:
        """The sums over all processes of several tensors of one type with these shapes, in one message."""
        return [member.value for member in members]

    def sum_if_together(self, part: Member, alone: str, host: str, name: str, dtype: Any) -> str:
        """The sum of every process' ``part``; in a run without the other processes, ``alone``.

        Args:
            host: a CPU device of this process.
        """
        return alone

    def gather_across(self, member: Member, rank: int, name: str, dtype: Any, equal: bool, lengths: Optional[str] = None) -> str:
        """One tensor per process, concatenated along the first dimension in process order.

        Args:
            rank: number of dimensions.
            equal: whether all are known to have the same shape.
            lengths: number of rows of each process, int32 `[processes]`; None: the processes tell each other.
        """
        return member.value
