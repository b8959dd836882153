"""How replicas add up their gradients; ``communicator(backend, ...)`` picks the implementation."""

from __future__ import annotations

from whale_tf.communicators.base import Communicator, Member
from whale_tf.communicators.collective import CollectiveCommunicator
from whale_tf.communicators.local import LocalCommunicator
from whale_tf.errors import ConfigError
from whale_tf.graph_editor.nodes import Nodes

__all__ = ["Communicator", "Member", "communicator"]


def communicator(backend: str, nodes: Nodes) -> Communicator:
    """The communicator called ``local`` or ``collective``.

    Raises:
        ConfigError: another name.
    """
    kinds = {"local": LocalCommunicator, "collective": CollectiveCommunicator}
    if backend not in kinds:
        raise ConfigError(
            "communication.backend is {!r}; within one process expected one of {}".format(
                backend, ", ".join(sorted(kinds))
            )
        )
    return kinds[backend](nodes)
