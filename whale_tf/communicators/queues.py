"""Messages from one process's Session to another's: a queue on the receiver, of one element.

::

    process 0    value ──> QueueEnqueue          process 1    QueueDequeue ──> value
                               ╚═════════════════> queue <════════╝

The sender's op runs on the receiver's device, so TensorFlow carries the value there.  A sender that is a step ahead waits until
the receiver has taken the step before.  Types and open shapes need nothing else.
"""

from __future__ import annotations

from typing import Dict, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.cluster import Processes
from whale_tf.graph_editor.nodes import Nodes

CAPACITY = 1  # elements of a queue


class Queues:
    """Stages messages.

    Args:
        processes: all, and which of them this is.
        scope: name of the new ops, and of the queues; the same in all processes, and no other graph's.

    Attributes:
        sizes: op that receives -> the op that says how many elements wait for it.
    """

    def __init__(self, processes: Processes, scope: str) -> None:
        self._processes, self._scope = processes, scope
        self._handles: Dict[str, str] = {}
        self.sizes: Dict[str, str] = {}

    def send(self, nodes: Nodes, value: str, what: str, dtype: tf.DType, receiver: int, waits: Sequence[str] = ()) -> str:
        """Sends a value; returns the op.

        Args:
            what: the name that the value has in all processes.
        """
        handle, name, device = self._queue(nodes, what, dtype, self._processes.rank, receiver)
        return nodes.add("QueueEnqueueV2", name + "/send", [handle, value], device, waits, Tcomponents=[dtype], timeout_ms=-1)

    def receive(self, nodes: Nodes, what: str, dtype: tf.DType, sender: int, shape: tf.TensorShape) -> str:
        """A value that another process sends."""
        handle, name, device = self._queue(nodes, what, dtype, sender, self._processes.rank)
        found = nodes.add("QueueDequeueV2", name + "/receive", [handle], device, component_types=[dtype], timeout_ms=-1)
        self.sizes[found] = nodes.add("QueueSizeV2", name + "/size", [handle], device)
        if not shape.is_fully_defined() or dtype in (tf.variant, tf.resource):
            return found
        return nodes.add("EnsureShape", name + "/value", [found], device, T=dtype, shape=shape)

    def _queue(self, nodes: Nodes, what: str, dtype: tf.DType, sender: int, receiver: int) -> Tuple[str, str, str]:
        name = f"{self._scope}/from_{sender}_to_{receiver}/{what}"
        device = self._processes.prefix(receiver) + "/device:CPU:0"
        if name not in self._handles:
            self._handles[name] = nodes.add(
                "FIFOQueueV2", name + "/queue", [], device, component_types=[dtype], shapes=[], capacity=CAPACITY, container="",
                shared_name=name)
        return self._handles[name], name, device


def flat(name: str) -> str:
    """A tensor's name as one part of another name."""
    return name.replace(":", "_").replace("/", ".")
