"""Horovod as the transport between processes that its launcher has started (Sergeev and Del Balso, "Horovod: fast and easy
distributed deep learning in TensorFlow", 2018).

Horovod's thread agrees on an order with the other processes, so collectives need no keys; op names identify them.
"""

from __future__ import annotations

import functools
from typing import Any, Optional, Sequence

from whale_tf._tf_compat import tf
from whale_tf.cluster import Processes
from whale_tf.communicators.base import Member
from whale_tf.communicators.keys import Keys
from whale_tf.communicators.processes import ProcessCommunicator
from whale_tf.errors import ClusterError, ConfigError
from whale_tf.graph_editor.nodes import Nodes


class HorovodCommunicator(ProcessCommunicator):
    """``HorovodAllreduce``, ``HorovodAllgather`` and ``HorovodBroadcast`` ops with one member per process.

    Raises:
        ConfigError: Horovod is not installed.
        ClusterError: these processes do not match Horovod's.
    """

    def __init__(self, nodes: Nodes, processes: Processes, keys: Keys) -> None:
        super().__init__(nodes, processes, keys)
        self._horovod = _started(processes.count, processes.rank)
        self._kinds = {
            "sum": self._horovod.Sum, "prod": self._horovod.Product, "max": self._horovod.Max, "min": self._horovod.Min,
            "any": self._horovod.Max, "all": self._horovod.Min}

    def _carries_float16(self) -> bool:
        return True

    def _reduce(self, member: Member, kind: str, name: str, dtype: Any) -> str:
        return self._op(
            "HorovodAllreduce", name, member, T=dtype, reduce_op=self._kinds[kind], prescale_factor=1.0, postscale_factor=1.0)

    def _gather(self, member: Member, name: str, dtype: Any) -> str:
        return self._op("HorovodAllgather", name, member, T=dtype)

    def _gather_unequal(self, member: Member, rank: int, name: str, dtype: Any, lengths: Optional[str]) -> str:
        return self._gather(member, name, dtype)

    def _broadcast(self, member: Member, shape: Sequence[int], name: str, dtype: Any, root: int, waits: Sequence[str]) -> str:
        if self._rank != root:
            member = Member(self._zeros(shape, name, dtype, member.device, waits), member.device)
        return self._op("HorovodBroadcast", name, member, T=dtype, root_rank=root)

    def _agreement(self, own: str, device: str) -> str:
        return self._nodes.add(
            "HorovodAllgather", "whale/agreement", [own], device, T=tf.int64, ignore_name_scope=False, process_set_id=0)

    def _op(self, op_type: str, name: str, member: Member, **attrs: Any) -> str:
        # TensorFlow merges ops that are equal except for their names, and inputs may be equal in only one process (zeros that a
        # broadcast does not read), so each op gets a number.
        attrs = dict(attrs, ignore_name_scope=False, process_set_id=0, _whale_number=len(self.collectives))
        op = self._nodes.add(op_type, name, [member.value], member.device, **attrs)
        self._note(op_type, op, member.device, attrs)
        return op


@functools.lru_cache(maxsize=None)
def _started(count: int, rank: int) -> Any:
    """Horovod's module, started."""
    try:
        import horovod.tensorflow as horovod
    except ImportError as error:
        raise ConfigError(
            f"communication.backend is 'horovod', but Horovod for TensorFlow {tf.__version__} cannot be imported ({error}); "
            "build it (docs/processes.md has the line), or use 'collective'") from None
    horovod.init()
    if (horovod.size(), horovod.rank()) != (count, rank):
        raise ClusterError(
            f"communication.backend is 'horovod', and this is process {rank} of {count}, but for Horovod it is process "
            f"{horovod.rank()} of {horovod.size()}; start the script with horovodrun -np {count}, or use 'collective'")
    return horovod
