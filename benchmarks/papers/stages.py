"""Whale's way to balance TaskGraphs (section 3.3.2): big memory first, ops in proportion to speed, overflow shifted; and the
baseline of its Figure 18."""
from __future__ import annotations

from typing import Callable, List, Mapping, Sequence, Tuple

from whale_tf.balance import PartitionProblem, StagePartition, exact_stages, partition_memory_bytes, stage_times_s


def even_stages(problem: PartitionProblem) -> StagePartition:
    """Equal FLOPs for every stage, devices in the given order: the baseline of Whale's Figure 18."""
    stages = len(problem.speeds)
    return StagePartition("even", cut_by_weight(problem.flops, [1.0] * stages), tuple(range(stages)))


def whale_stages(problem: PartitionProblem) -> StagePartition:
    """Whale's heuristic: earlier stages keep more micro-batches, so devices are ordered by memory, from high to low;
    ops are divided by FLOPs in proportion to speed; Algorithm 1 (repaired) shifts what overflows.  The answer can
    still be over memory."""
    stages = range(len(problem.speeds))
    devices = tuple(stages) if problem.fixed_order else tuple(
        sorted(stages, key=lambda device: (-problem.memory_bytes[device], -problem.speeds[device], device)))
    cuts = cut_by_weight(problem.flops, [problem.speeds[device] for device in devices])
    return StagePartition("whale", shift_overflow(problem, cuts, devices), devices)


def cut_by_weight(flops: Sequence[float], weights: Sequence[float]) -> Tuple[int, ...]:
    """Cuts whose parts are nearest to proportional to ``weights``; every part has at least one op."""
    n, stages = len(flops), len(weights)
    prefix = [0.0]
    for work in flops:
        prefix.append(prefix[-1] + work)
    cuts, target = [0], 0.0
    for stage in range(stages - 1):
        target += prefix[-1] * weights[stage] / sum(weights)
        allowed = range(cuts[-1] + 1, n - (stages - stage - 1) + 1)
        cuts.append(min(allowed, key=lambda cut: abs(prefix[cut] - target)))
    return tuple(cuts + [n])


def shift_overflow(problem: PartitionProblem, cuts: Sequence[int], devices: Sequence[int]) -> Tuple[int, ...]:
    """Algorithm 1 on stages, repaired: while a stage is over memory, its ops move to the stage that has memory left
    and the least work for its speed.

    Stages are contiguous, so a shift moves every cut between peak and valley by one op; the stages in between hand
    one op on.  A shift counts only when it lowers the peak and pushes no stage over its memory, or further over::

        peak = 0, valley = 2        0 1 2 3 | 4 5 | 6 7   ->   0 1 2 | 3 4 | 5 6 7
    """
    now = tuple(cuts)
    free = set(range(len(devices)))
    while True:
        fill = _fill(problem, now, devices)
        over = [stage for stage in range(len(devices)) if fill[stage] > 1]
        free -= set(over)
        if not over or not free:
            return now
        peak = max(over, key=lambda stage: fill[stage])
        times = stage_times_s(problem, now, devices)
        valley = min(free, key=lambda stage: (times[stage], fill[stage], stage))
        shifted = _shift(problem, now, devices, peak, valley)
        if shifted == now:
            free.remove(valley)
        now = shifted


def _fill(problem: PartitionProblem, cuts: Sequence[int], devices: Sequence[int]) -> List[float]:
    """Needed over available memory of each stage."""
    return [need / max(problem.memory_bytes[device], 1e-300)
            for need, device in zip(partition_memory_bytes(problem, cuts), devices)]


def _shift(problem: PartitionProblem, cuts: Tuple[int, ...], devices: Sequence[int], peak: int,
           valley: int) -> Tuple[int, ...]:
    """As many single-op shifts from ``peak`` to ``valley`` as are legal, until the peak fits."""
    while True:
        fill = _fill(problem, cuts, devices)
        if fill[peak] <= 1 or cuts[peak + 1] - cuts[peak] < 2:
            return cuts
        if peak < valley:
            moved = [cut - 1 if peak < i <= valley else cut for i, cut in enumerate(cuts)]
        else:
            moved = [cut + 1 if valley < i <= peak else cut for i, cut in enumerate(cuts)]
        new = _fill(problem, moved, devices)
        others = [stage for stage in range(len(devices)) if stage != peak]
        if new[peak] >= fill[peak] or any(new[stage] > max(1.0, fill[stage]) for stage in others):
            return cuts
        cuts = tuple(moved)


STAGE_SOLVERS: Mapping[str, Callable[[PartitionProblem], StagePartition]] = {
    "exact": exact_stages, "whale": whale_stages, "even": even_stages}
