"""Bytes that a training step sends between devices, counted in the rewritten graph."""
from __future__ import annotations

from typing import Dict, List, Sequence, Set, Tuple

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


def crossing_bytes(ops: List[tf.Operation], without: Sequence[str] = ()) -> int:
    """Floating-point tensors that an op reads from another device, once for each device, as TensorFlow sends them.

    Args:
        without: prefixes of names of tensors and of ops that read them, which do not count.
    """
    sent: Set[Tuple[str, str]] = set()
    total = 0
    for op in ops:
        for tensor in op.inputs:
            key = (tensor.name, op.device)
            if (op.device and tensor.op.device and op.device != tensor.op.device and tensor.dtype.is_floating
                    and tensor.op.type != "Const" and key not in sent
                    and not any(name.startswith(tuple(without)) for name in key[:1] + (op.name,))):
                sent.add(key)
                total += tensor.dtype.size * tensor.shape.num_elements()
    return total
