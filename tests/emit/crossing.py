"""Bytes that a training step sends between devices, counted in the rewritten graph."""
from __future__ import annotations

from typing import Callable, Dict, List, Set, Tuple

import tensorflow.compat.v1 as tf


def reached(graph: tf.Graph, fetch: tf.Operation) -> List[tf.Operation]:
    """What a run of ``fetch`` runs."""
    found: Dict[tf.Operation, None] = {}
    stack = [fetch]
    while stack:
        op = stack.pop()
        if op not in found:
            found[op] = None
            stack.extend([t.op for t in op.inputs] + list(op.control_inputs))
    return list(found)


def everything(tensor: tf.Tensor, reader: tf.Operation) -> bool:
    return True


def to_gradient_sums(tensor: tf.Tensor, reader: tf.Operation) -> bool:
    """To where replicas' gradients are added up."""
    return reader.name.startswith("whale/sync/")


def between_task_graphs(tensor: tf.Tensor, reader: tf.Operation) -> bool:
    """But for inputs, and sums of gradients."""
    return not any(name.startswith(("whale/input/", "whale/sync/")) for name in (tensor.name, reader.name))


def crossing_bytes(ops: List[tf.Operation], counts: Callable[[tf.Tensor, tf.Operation], bool] = everything) -> int:
    """Floating-point tensors that an op reads from another device, once for each device, as TensorFlow sends them.

    Args:
        counts: which tensors and readers of them count.
    """
    sent: Set[Tuple[str, str]] = set()
    total = 0
    for op in ops:
        for tensor in op.inputs:
            key = (tensor.name, op.device)
            if (op.device and tensor.op.device and op.device != tensor.op.device and tensor.dtype.is_floating
                    and tensor.op.type != "Const" and key not in sent
                    and counts(tensor, op)):
                sent.add(key)
                total += tensor.dtype.size * tensor.shape.num_elements()
    return total
