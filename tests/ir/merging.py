"""The whole value from the clones' values: layout.py's definitions, written out."""

from __future__ import annotations

from typing import Any, List, Mapping, Optional, Sequence, Union

import numpy as np

from whale_tf.ir import batch_axis
from whale_tf.ir.batch_axis import BatchAxis
from whale_tf.ir.batch_axis.result import Offsets, columns
from whale_tf.ir.extents import Size
from whale_tf.ir.layout import REFERENCE, Block, Exponent, Rows, batch_of, exponents_of, rows_each


class Parts:
    """How many examples of each batch each clone has.

    Args:
        of: batch -> the clones' numbers; a plain sequence: those of every batch.
    """

    def __init__(self, of: Union[Sequence[int], Mapping[str, Sequence[int]]]) -> None:
        self._of = of

    def of(self, batch: str = REFERENCE) -> List[int]:
        return list(self._of[batch] if isinstance(self._of, Mapping) else self._of)

    def __len__(self) -> int:
        return len(self.of())

    def weight(self, power: Exponent, i: int) -> float:
        """``w_i ** power``."""
        result = 1.0
        for base, exponent in exponents_of(power).items():
            here, everywhere = (sum(count * each for batch, count in base for each in [number(self.of(batch))])
                                for number in (lambda parts: parts[i], sum))
            result *= (here / everywhere) ** exponent
        return result

    def shift(self, offset: Offsets, i: int) -> np.ndarray:
        """What positions in clone ``i`` lack of those in the whole."""
        steps = [rows_each(step) * sum(self.of(batch_of(step))[:i]) for step in columns(offset, 1)]
        return np.array(steps[0] if isinstance(offset, (int, Rows)) else steps)

    def rows(self, blocks: Sequence[Block], i: int) -> List[int]:
        """Which rows of the whole are those of clone ``i``."""
        start, rows = 0, []  # type: int, List[int]
        for block in blocks:
            parts, each = self.of(batch_of(block)), rows_each(block)
            first = start + each * sum(parts[:i])
            rows.extend(range(first, first + each * parts[i]))
            start += each * sum(parts)
        return rows

    def total(self, blocks: Sequence[Block]) -> int:
        return sum(rows_each(block) * sum(self.of(batch_of(block))) for block in blocks)

    def at(self, size: Any, i: Optional[int] = None) -> int:
        """A size in clone ``i``, or (None) in the whole."""
        def number(batch: str) -> int:
            return sum(self.of(batch)) if i is None else self.of(batch)[i]

        counts = size.counts or {} if isinstance(size, Size) else {}
        return int(size.at(number(REFERENCE), {batch: number(batch) for batch in counts})) if isinstance(size, Size) else int(size)


def merge(axis: BatchAxis, tensor: int, values: Sequence[Any], parts: Parts) -> Any:
    """The whole value from the clones' (layout.py's definitions)."""
    layout = axis.layout(tensor)
    if layout is batch_axis.EXTENT:
        return np.array([parts.at(size) for size in axis.extents[tensor].flat]).reshape(axis.extents[tensor].shape)
    if layout.power:
        values = [value * parts.weight(layout.power, i) for i, value in enumerate(values)]
    if layout.is_replicated:
        for value in values[1:]:
            np.testing.assert_allclose(value, values[0], rtol=1e-9, atol=1e-12)
        return values[0]
    if layout.is_partial:
        return sum(values)
    if layout.kind in batch_axis.EXTREMES:
        return getattr(np, layout.kind)(np.stack(values), axis=0)
    offset = axis.offsets.get(tensor, 0)
    values = [v + parts.shift(offset, i) if offset else v for i, v in enumerate(values)]
    blocks: Optional[Sequence[Block]] = layout.blocks
    if blocks is None or any(rows_each(block) == -1 for block in blocks):
        return np.concatenate(values, axis=layout.dim)
    pieces = []
    for k, block in enumerate(blocks):
        for i, value in enumerate(values):
            before = sum(rows_each(b) * parts.of(batch_of(b))[i] for b in blocks[:k])
            length = rows_each(block) * parts.of(batch_of(block))[i]
            pieces.append(np.take(value, range(before, before + length), axis=layout.dim))
    return np.concatenate(pieces, axis=layout.dim)
