"""The whole value from the clones' values: layout.py's definitions, written out."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import numpy as np

from whale_tf.ir import batch_axis
from whale_tf.ir.batch_axis import BatchAxis


def merge(axis: BatchAxis, tensor: int, values: Sequence[Any], parts: Sequence[int]) -> Any:
    """The whole value from the clones' (layout.py's definitions)."""
    layout, batch = axis.layout(tensor), sum(parts)
    weights = [(p / batch) ** layout.power for p in parts]
    if layout is batch_axis.EXTENT:
        return np.array([v if isinstance(v, int) else v.at(batch) for v in axis.extents[tensor].flat]).reshape(
            axis.extents[tensor].shape)
    if layout.power:
        values = [v * w for v, w in zip(values, weights)]
    if layout.is_replicated:
        for value in values[1:]:
            np.testing.assert_allclose(value, values[0], rtol=1e-9, atol=1e-12)
        return values[0]
    if layout.is_partial:
        return sum(values)
    if layout.kind in batch_axis.EXTREMES:
        return getattr(np, layout.kind)(np.stack(values), axis=0)
    offset = axis.offsets.get(tensor, 0)
    values = [v + np.array(offset) * sum(parts[:i]) if offset else v for i, v in enumerate(values)]
    blocks: List[Optional[int]] = list(layout.blocks) if layout.blocks is not None and -1 not in layout.blocks else [None]
    if blocks == [None]:
        return np.concatenate(values, axis=layout.dim)
    pieces = []
    for k, length in enumerate(blocks):
        before = sum(n or 0 for n in blocks[:k])
        for part, value in zip(parts, values):
            pieces.append(np.take(value, range(before * part, (before + (length or 0)) * part), axis=layout.dim))
    return np.concatenate(pieces, axis=layout.dim)
