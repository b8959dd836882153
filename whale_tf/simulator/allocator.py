"""TensorFlow's allocator of a GPU's memory (BFC: best fit with coalescing), because it leaves holes between tensors.

The sizes of chunks are multiples of 256 bytes.  A tensor takes the smallest free chunk that can hold it.  The chunk is split if
it is at least twice as large, or 128 MiB larger; otherwise the tensor gets all of it.  A freed chunk is merged with free
neighbours (tensorflow/core/common_runtime/bfc_allocator.cc).  A step needs the memory up to the end of the highest chunk.
"""

from __future__ import annotations

import bisect
from typing import Dict, List, Sequence, Tuple

UNIT = 256
KEPT_WHOLE = 128 << 20  # a chunk is not split if it is larger than its tensor by less than this, and less than twice as large


class Arena:
    """Unlimited memory; ``reach`` is the end of the highest chunk that was ever taken, in bytes."""

    def __init__(self) -> None:
        self.reach = 0
        self._sizes: List[Tuple[int, int]] = []  # free chunks: (size, start), by size
        self._starts: Dict[int, int] = {}  # free chunk: start -> size
        self._ends: Dict[int, int] = {}  # free chunk: end -> start
        self._top = 0  # nothing is taken beyond it

    def take(self, size: float) -> Tuple[int, int]:
        """(start, size) of the chunk that a tensor of ``size`` bytes gets."""
        wanted = max(UNIT, -int(-size // UNIT) * UNIT)
        place = bisect.bisect_left(self._sizes, (wanted, -1))
        if place == len(self._sizes):
            start, self._top = self._top, self._top + wanted
            self.reach = max(self.reach, self._top)
            return start, wanted
        found, start = self._sizes[place]
        self._remove(start, found)
        if found >= 2 * wanted or found - wanted >= KEPT_WHOLE:
            self._add(start + wanted, found - wanted)
            found = wanted
        return start, found

    def give_back(self, chunk: Tuple[int, int]) -> None:
        """Free a chunk."""
        start, size = chunk
        before = self._ends.get(start)
        if before is not None:
            self._remove(before, start - before)
            start, size = before, size + start - before
        after = self._starts.get(start + size)
        if after is not None:
            self._remove(start + size, after)
            size += after
        if start + size == self._top:
            self._top = start
        else:
            self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        bisect.insort(self._sizes, (size, start))
        self._starts[start], self._ends[start + size] = size, start

    def _remove(self, start: int, size: int) -> None:
        del self._sizes[bisect.bisect_left(self._sizes, (size, start))]
        del self._starts[start], self._ends[start + size]


def reach_of(sizes: Sequence[float], born: Sequence[float], dies: Sequence[float], kept: Sequence[float] = ()) -> int:
    """Bytes of an arena that buffers with these lifetimes take, after those that are kept all the time.

    At one moment, buffers are freed before others are made; but a buffer that dies when it is made is made first.
    """
    arena = Arena()
    for size in kept:
        arena.take(size)
    events = sorted([(when, 1, number) for number, when in enumerate(born)]
                    + [(when, 0 if when > born[number] else 2, number) for number, when in enumerate(dies)])
    chunks: Dict[int, Tuple[int, int]] = {}
    for _, what, number in events:
        if what == 1:
            chunks[number] = arena.take(sizes[number])
        else:
            arena.give_back(chunks.pop(number))
    return arena.reach
