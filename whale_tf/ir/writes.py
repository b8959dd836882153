"""Which ops write variables."""

from __future__ import annotations

from whale_tf.ir.graph import Op, inner_ops
from whale_tf.ir.traits import traits


def is_write(op: Op) -> bool:
    """Whether an op changes a variable of the model, or is a loop, condition or call whose functions do."""
    return traits(op.type).is_write or any(traits(inner.type).is_write for inner in inner_ops(op))
