"""Many micro-batches from a few: once a pipeline is full, it repeats itself.

What happens after a moment depends only on what is running, waiting and done at that moment.  Suppose that every task of the
last micro-batches before the pipeline starts to drain comes ``c`` seconds after the same task ``p`` micro-batches earlier.
Then the state repeats with that period: ``p`` more micro-batches only add ``c`` seconds, and the drain is the same.  This is
certain, and not only likely, because the window covers all micro-batches that can be in flight at once.
"""

from __future__ import annotations

from typing import Dict, Optional

import numpy as np

from whale_tf.simulator.instructions import BACKWARD, UPDATE, BlockKey
from whale_tf.simulator.result import LinkUse, Simulation
from whale_tf.simulator.strategy_tree import CompleteStrategy

PERIODS = (1, 2, 3, 4, 6, 8, 12)
TOLERANCE = 1e-9


def first_run(strategy: CompleteStrategy) -> int:
    """The number of micro-batches in the first short run: enough to fill, repeat and drain the pipeline."""
    return 3 * _in_flight(strategy) + 4


def period_of(run: Simulation, strategy: CompleteStrategy) -> Optional[int]:
    """The number of micro-batches after which the run repeats itself before it drains; None if it does not."""
    rows = _before_drain(run, strategy)
    if rows is None:
        return None
    for period in PERIODS:
        window = _in_flight(strategy) + period
        if all(len(matrix) >= window + period and _repeats(matrix[-window - period :], period) for matrix in rows.values()):
            return period
    return None


def _in_flight(strategy: CompleteStrategy) -> int:
    """An upper bound on the number of micro-batches that have tasks running or waiting at one moment: those that the first stage
    has started but not finished, and one on either side."""
    return max(stage.warmup for stage in strategy.stages) + 3


def _before_drain(run: Simulation, strategy: CompleteStrategy) -> Optional[Dict[BlockKey, np.ndarray]]:
    """Start and end times ``[micro-batch, task]`` of all blocks that end before any stage runs out of forwards."""
    graph = run.graph
    start, end = np.array(run.times.start), np.array(run.times.end)
    count = run.subject.num_micro_batch
    drains_s = float("inf")
    for number, stage in enumerate(strategy.stages):
        last_in_steady_state = count - min(stage.warmup, count)
        begin = graph.blocks[number, BACKWARD][0][last_in_steady_state]
        drains_s = min(drains_s, float(start[begin]))
    rows: Dict[BlockKey, np.ndarray] = {}
    for key, (offsets, size) in graph.blocks.items():
        if key[1] == UPDATE or not size:
            continue
        tasks = offsets[:, None] + np.arange(size)
        ends = end[tasks]
        over = int((ends.max(axis=1) <= drains_s).sum())
        if not over:
            return None
        rows[key] = np.concatenate([start[tasks[:over]], ends[:over]], axis=1)
    return rows


def _repeats(matrix: np.ndarray, period: int) -> bool:
    """Whether every row differs from the row ``period`` earlier by the same constant."""
    shift = matrix[period:] - matrix[:-period]
    low, high = float(shift.min()), float(shift.max())
    return high - low <= TOLERANCE * max(high, float(matrix.max()))


def extended(strategy: CompleteStrategy, run: Simulation, longer: Simulation) -> Simulation:
    """The simulation of ``strategy`` from two periodic runs one period apart, because everything grows linearly."""
    counts = (run.subject.num_micro_batch, longer.subject.num_micro_batch)
    further = (strategy.num_micro_batch - counts[1]) / float(counts[1] - counts[0])

    def at_end(before: float, last: float) -> float:
        return last + (last - before) * further

    step_time_s = at_end(run.step_time_s, longer.step_time_s)
    devices = []
    for one, last, usable in zip(run.devices, longer.devices, longer.usable_bytes):
        peak = at_end(one.peak_memory_bytes, last.peak_memory_bytes)
        devices.append(last._replace(
            computation_s=at_end(one.computation_s, last.computation_s), exposed_s=at_end(one.exposed_s, last.exposed_s),
            bubble_s=at_end(one.bubble_s, last.bubble_s), peak_memory_bytes=peak, oom=peak > usable,
            sums=at_end(one.sums, last.sums), hidden_s=at_end(one.hidden_s, last.hidden_s),
            mfu=at_end(one.mfu * run.step_time_s, last.mfu * longer.step_time_s) / step_time_s))
    before = {use.name: use.bytes for use in run.links}
    links = []
    for use in longer.links:
        size = at_end(before[use.name], use.bytes)
        grown = size / use.bytes if use.bytes else 0.0  # messages without bytes
        links.append(LinkUse(use.name, size, use.utilisation * longer.step_time_s * grown / step_time_s))
    return longer._replace(
        step_time_s=step_time_s, subject=strategy.subject(), devices=tuple(devices),
        extended_links=tuple(sorted(links, key=lambda use: (-use.utilisation, use.name))), steady=True,
        simulate_seconds=run.simulate_seconds + longer.simulate_seconds,
        compile_seconds=run.compile_seconds + longer.compile_seconds)
