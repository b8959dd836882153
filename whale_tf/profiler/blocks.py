"""Good places to cut a chain: between repeated blocks, and elsewhere where few bytes cross."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Sequence, Set, Tuple

import numpy as np

from whale_tf.profiler.chain import Chain, signature

MIN_SHARE = 0.2  # smallest share of the model's cost for a repeated part


class Repeat(NamedTuple):
    """Segments ``first`` to ``first + length - 1`` repeat with this period."""

    first: int
    length: int
    period: int


def layer_starts(chain: Chain, limit: int) -> List[int]:
    """Segments that start layers: the blocks of every repeated part and, in between, the places where the fewest bytes cross;
    at most ``limit`` layers in all (but at least one per block)."""
    blocks = block_starts(chain)
    starts = {0} | blocks
    room = limit - len(starts)
    if room > 0:
        starts |= set(quiet_starts(chain, room, avoid=_inside(chain)))
    return sorted(starts)


def fine_starts(chain: Chain, limit: int) -> List[int]:
    """At most about ``limit`` segments to cut at, which include the starts of repeated blocks."""
    blocks = block_starts(chain)
    room = limit - len(blocks)
    return sorted({0} | blocks | (set(quiet_starts(chain, room)) if room > 0 else set()))


def quiet_starts(chain: Chain, count: int, avoid: Sequence[int] = ()) -> List[int]:
    """One start in each of ``count`` parts of equal cost: where the fewest bytes cross, the earliest on ties."""
    size, left_out = chain.size, set(avoid)
    if size - 1 <= count:
        return [start for start in range(1, size) if start not in left_out]
    cost = cost_of(chain)
    part_of = np.minimum((np.cumsum(cost) / max(cost.sum(), 1e-300) * count).astype(int), count - 1)
    best: Dict[int, int] = {}
    for start in range(1, size):
        part = int(part_of[start - 1])
        crossing = chain.crossing_bytes[start - 1]
        if start not in left_out and (part not in best or crossing < chain.crossing_bytes[best[part] - 1]):
            best[part] = start
    return sorted(best.values())


def cost_of(chain: Chain) -> np.ndarray:
    """A weight per segment: arithmetic and traffic, both as shares of the model's total."""
    flops = chain.forward_flops + chain.backward_flops
    shares = [values / values.sum() for values in (flops, chain.traffic_bytes) if values.sum() > 0]
    return np.mean(shares, axis=0) if shares else np.ones(chain.size) / chain.size


def block_starts(chain: Chain) -> Set[int]:
    """Starts of the blocks of all repeated parts, and the end of each part."""
    found: Set[int] = set()
    for repeat in repeats(chain):
        offset = min(range(repeat.period), key=lambda o: _cut_cost(chain, repeat.first + repeat.period + o))
        starts = range(repeat.first + offset, repeat.first + repeat.length + 1, repeat.period)
        found |= {start for start in starts if 0 < start < chain.size}
    return found


def _inside(chain: Chain) -> List[int]:
    """Starts within a block of a repeated part."""
    blocks = block_starts(chain)
    return [start for repeat in repeats(chain) for start in range(repeat.first + 1, repeat.first + repeat.length)
            if start not in blocks]


def repeats(chain: Chain) -> List[Repeat]:
    """Repeated parts of the chain, in order; the widest is found first.  Each has at least two blocks and a notable cost."""
    numbers: Dict[object, int] = {}
    marks = np.array([numbers.setdefault(tuple(signature(chain.graph.ops[op], chain.graph) for op in segment), len(numbers))
                      for segment in chain.ops])
    cost = np.concatenate([[0.0], np.cumsum(cost_of(chain))])
    pending, found = [(0, chain.size)], []
    while pending:
        first, end = pending.pop()
        widest = _widest(marks[first:end])
        if widest.length < 2 or cost[first + widest.first + widest.length] - cost[first + widest.first] < MIN_SHARE:
            continue
        widest = widest._replace(first=first + widest.first)
        found.append(widest)
        pending += [(first, widest.first), (widest.first + widest.length, end)]
    return sorted(found)


def _widest(marks: np.ndarray) -> Repeat:
    """The longest part that repeats at least twice; among equally long parts, the one with the shortest period."""
    best = Repeat(0, 0, 1)
    for period in range(1, len(marks) // 2 + 1):
        first, run = _longest_run(marks[:-period] == marks[period:])
        if run >= period and run + period > best.length:
            best = Repeat(first, run + period, period)
    return best


def _longest_run(equal: np.ndarray) -> Tuple[int, int]:
    """(first, length) of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], equal.astype(int), [0]])))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[0::2]
    longest = int(lengths.argmax())
    return int(edges[0::2][longest]), int(lengths[longest])


def _cut_cost(chain: Chain, start: int) -> Tuple[float, int]:
    """Sort key: fewest crossing bytes, then fewest open name scopes."""
    before, after = (chain.name(number).split("/") for number in (start - 1, start))
    shared = next((depth for depth, (a, b) in enumerate(zip(before, after)) if a != b), min(len(before), len(after)))
    return float(chain.crossing_bytes[start - 1]), shared
