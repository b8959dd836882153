"""Gradient sums over replicas; ``communicator(backend, ...)`` returns the implementation."""

from __future__ import annotations

from typing import Optional

from whale_tf.cluster import Processes
from whale_tf.communicators.base import Communicator, Member
from whale_tf.communicators.buckets import pack, unpack
from whale_tf.communicators.collective import CollectiveCommunicator, check_gpus
from whale_tf.communicators.horovod import HorovodCommunicator
from whale_tf.communicators.keys import Keys
from whale_tf.communicators.processes import ProcessCommunicator
from whale_tf.errors import ConfigError
from whale_tf.graph_editor.nodes import Nodes

__all__ = ["CollectiveCommunicator", "Communicator", "Keys", "Member", "ProcessCommunicator", "check_gpus", "communicator",
           "pack", "unpack"]


def communicator(backend: str, nodes: Nodes, processes: Processes, keys: Optional[Keys]) -> Communicator:
    """The communicator called ``local``, ``collective`` or ``horovod``.

    Args:
        processes, keys: all processes, and this one's keys.

    Raises:
        ConfigError: an unknown name, or a backend that cannot reach the other processes.
        ClusterError: the processes do not match Horovod's.
    """
    if processes.graphs > 1:
        between = {"collective": ProcessCommunicator, "horovod": HorovodCommunicator}
        if backend not in between:
            raise ConfigError("communication.backend is {!r}; between processes, expected one of {}".format(
                backend, ", ".join(sorted(between))))
        return between[backend](nodes, processes, keys or Keys())
    kinds = {"local": Communicator, "collective": CollectiveCommunicator}
    if backend not in kinds:
        raise ConfigError("communication.backend is {!r}; within one process, expected one of {}".format(
            backend, ", ".join(sorted(kinds))))
    return kinds[backend](nodes)
