"""Memory by reference counts (Proteus section VI-B): a buffer lives from the start of the task that writes it to the
end of the last task that reads it.

The result of a gradient communication lives from the moment at which the communication may start: executors allocate it when they
hand it to the communicator, however long this is busy with earlier ones.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Tuple

import numpy as np

from whale_tf.simulator.allocator import reach_of
from whale_tf.simulator.buffers import BufferTable
from whale_tf.simulator.engine import Times
from whale_tf.simulator.execution_graph import ExecutionGraph
from whale_tf.simulator.instructions import GRADIENT, Instructions


class MemoryCurve(NamedTuple):
    """Memory of one device over a step.

    Attributes:
        time_s, bytes: after each change, from the start of the step; the first entry is the memory held all the time.
        peak_bytes: the largest value, first reached at ``peak_s``.
        at_peak: bytes by category at that moment, and the largest single tensors with their bytes.
        final_bytes: bytes at the end beyond those held all the time; zero in every correct program.
    """

    time_s: np.ndarray
    bytes: np.ndarray
    peak_bytes: float
    peak_s: float
    at_peak: Dict[str, float]
    largest: Tuple[Tuple[str, float], ...]
    final_bytes: float


def lifetimes(graph: ExecutionGraph, times: Times) -> Tuple[np.ndarray, np.ndarray]:
    """(from, to) of every buffer in seconds; ``to`` is when its reference count falls to zero, or when its last reader starts to
    write a result into it."""
    start, end = np.array(times.start), np.array(times.end)
    table = graph.buffers
    ready = np.zeros(len(start))
    np.maximum.at(ready, graph.successors, end[np.repeat(np.arange(len(start)), np.diff(graph.first_successor))])
    is_sum = np.array(graph.lane)[table.producer] == GRADIENT
    born = np.where(is_sum, ready[table.producer], start[table.producer])
    dies = end[table.producer].copy()
    np.maximum.at(dies, table.reader_buffer, end[table.reader_task])
    buffers, tasks = _overwritten(table, end[table.producer], start, end, dies)
    dies[buffers] = start[tasks]
    return born, dies


def _overwritten(table: BufferTable, made: np.ndarray, start: np.ndarray, end: np.ndarray,
                 dies: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """The buffers that their last readers overwrite, and these tasks.  A task overwrites one operand at most, and only where all
    other readers have ended before it starts."""
    is_last = table.may_overwrite & (end[table.reader_task] == dies[table.reader_buffer])
    earlier = made.copy()
    np.maximum.at(earlier, table.reader_buffer[~is_last], end[table.reader_task[~is_last]])
    buffers, tasks = table.reader_buffer[is_last], table.reader_task[is_last]
    is_alone = (np.bincount(buffers, minlength=len(made))[buffers] == 1) & (earlier[buffers] <= start[tasks])
    buffers, tasks = buffers[is_alone], tasks[is_alone]
    tasks, first = np.unique(tasks, return_index=True)
    return buffers[first], tasks


def memory_curves(program: Instructions, graph: ExecutionGraph, times: Times, largest: int = 5) -> List[MemoryCurve]:
    """The curve of every simulated device, in the order of ``graph.devices``."""
    born, dies = lifetimes(graph, times)
    return [_curve(program, graph, device, rows, born, dies, largest)
            for device, rows in zip(graph.devices, _rows_by_device(graph))]


def peak_bytes(static_bytes: Mapping[int, Mapping[str, float]], graph: ExecutionGraph, times: Times) -> List[float]:
    """The peak of every simulated device's curve (see :func:`memory_curves`)."""
    born, dies = lifetimes(graph, times)
    return [float(_levels(sum(static_bytes[device].values()), graph.buffers.bytes[rows], born[rows], dies[rows])[1].max())
            for device, rows in zip(graph.devices, _rows_by_device(graph))]


def _rows_by_device(graph: ExecutionGraph) -> List[np.ndarray]:
    """The buffers of every simulated device."""
    by_slot = np.argsort(graph.buffers.slot, kind="stable")
    bounds = np.searchsorted(graph.buffers.slot[by_slot], np.arange(len(graph.devices) + 1))
    return [by_slot[bounds[slot]:bounds[slot + 1]] for slot in range(len(graph.devices))]


def arena_bytes(program: Instructions, graph: ExecutionGraph, times: Times) -> List[int]:
    """The memory that each simulated device's buffers take from TensorFlow's allocator, with the holes between them."""
    born, dies = lifetimes(graph, times)
    found = []
    for slot, device in enumerate(graph.devices):
        rows = np.flatnonzero(graph.buffers.slot == slot)
        found.append(reach_of(graph.buffers.bytes[rows].tolist(), born[rows].tolist(), dies[rows].tolist(),
                              list(program.static_bytes[device].values())))
    return found


def _curve(program: Instructions, graph: ExecutionGraph, device: int, rows: np.ndarray, born: np.ndarray, dies: np.ndarray,
           largest: int) -> MemoryCurve:
    static = program.static_bytes[device]
    base = float(sum(static.values()))
    time_s, level = _levels(base, graph.buffers.bytes[rows], born[rows], dies[rows])
    top = int(np.argmax(level))
    peak_s = float(time_s[top])
    alive = rows[(born[rows] <= peak_s) & (dies[rows] > peak_s)]
    at_peak = dict(static)
    names: Dict[str, float] = {}
    for row in alive:
        buffer = program.buffers[graph.buffers.kind[row]]
        size = float(graph.buffers.bytes[row])
        at_peak[buffer.category] = at_peak.get(buffer.category, 0.0) + size
        names[buffer.name] = names.get(buffer.name, 0.0) + size
    ranked = tuple(sorted(names.items(), key=lambda item: (-item[1], item[0]))[:largest])
    return MemoryCurve(time_s, level, float(level[top]), peak_s, at_peak, ranked, float(level[-1]) - base)


def _levels(base: float, sizes: np.ndarray, born: np.ndarray, dies: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """(seconds, bytes) after each change of a device's memory, from ``base`` bytes on."""
    when = np.concatenate([dies, born])  # at one moment, buffers are freed before others are made
    change = np.concatenate([-sizes, sizes])
    # a buffer that dies at the moment when it is made still counts, so it is made first
    order_key = np.concatenate([np.where(dies <= born, 2, 0), np.ones(len(sizes), np.int64)])
    order = np.lexsort((order_key, when))
    return np.concatenate([[0.0], when[order]]), np.concatenate([[base], base + np.cumsum(change[order])])
