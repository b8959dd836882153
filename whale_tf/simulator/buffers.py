"""Buffers of an execution graph: which task writes each buffer, and which tasks read it, per micro-batch or per step."""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Tuple

import numpy as np

from whale_tf.simulator.instructions import UPDATE, BlockKey


class BufferTable(NamedTuple):
    """Buffers of all micro-batches.

    Attributes:
        slot, bytes, kind, producer: for each buffer its device, size, number in ``Program.buffers`` and writing task.
        reader_buffer, reader_task: pairs of a buffer and a task that reads it.
        may_overwrite: of each such pair, whether the task writes a result into the buffer if nobody reads the buffer later.
    """

    slot: np.ndarray
    bytes: np.ndarray
    kind: np.ndarray
    producer: np.ndarray
    reader_buffer: np.ndarray
    reader_task: np.ndarray
    may_overwrite: np.ndarray


NO_BUFFERS = BufferTable(*[np.zeros(0)] * len(BufferTable._fields))


class BufferRows:
    """Buffers of one micro-batch (or of the update), with tasks numbered within their blocks."""

    def __init__(self) -> None:
        self.rows: List[Tuple[int, float, int]] = []
        self._written: Dict[BlockKey, List[Tuple[int, int]]] = {}
        self._read: Dict[BlockKey, List[Tuple[int, int]]] = {}

    def add(self, slot: int, size: float, kind: int, block: BlockKey, task: int) -> int:
        """Add a buffer on one device and the task that writes it; returns its row."""
        self.rows.append((slot, size, kind))
        self._written.setdefault(block, []).append((len(self.rows) - 1, task))
        return len(self.rows) - 1

    def read(self, row: int, block: BlockKey, task: int) -> None:
        """Add a reader; a task that runs once per step reads the first micro-batch's buffer."""
        self._read.setdefault(block, []).append((row, task))

    def unfold(self, offsets: Mapping[BlockKey, np.ndarray], count: int) -> BufferTable:
        """Every row ``count`` times; ``offsets[block]``: first task of the block for each repetition."""
        steps = np.arange(count)[:, None]
        producer = np.zeros(count * len(self.rows), np.int64)
        for block, edges in self._written.items():
            pairs = np.array(edges, np.int64)
            tasks = (offsets[block][:, None] + pairs[:, 1]).ravel()
            producer[(steps * len(self.rows) + pairs[:, 0]).ravel()] = tasks
        reader_buffer, reader_task = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for block, edges in self._read.items():
            pairs = np.array(edges, np.int64)
            times = np.zeros((1, 1), np.int64) if is_per_step(block) else steps
            reader_buffer.append((times * len(self.rows) + pairs[:, 0]).ravel())
            reader_task.append((offsets[block][:, None] + pairs[:, 1]).ravel())
        return BufferTable(
            np.tile(np.array([row[0] for row in self.rows], np.int64), count),
            np.tile(np.array([row[1] for row in self.rows], np.float64), count),
            np.tile(np.array([row[2] for row in self.rows], np.int64), count), producer, np.concatenate(reader_buffer),
            np.concatenate(reader_task), np.zeros(sum(map(len, reader_task)), bool))


def joined(first: BufferTable, second: BufferTable) -> BufferTable:
    """Both tables as one."""
    return BufferTable(
        np.concatenate([first.slot, second.slot]), np.concatenate([first.bytes, second.bytes]),
        np.concatenate([first.kind, second.kind]), np.concatenate([first.producer, second.producer]),
        np.concatenate([first.reader_buffer, second.reader_buffer + len(first.slot)]),
        np.concatenate([first.reader_task, second.reader_task]), np.concatenate([first.may_overwrite, second.may_overwrite]))


def is_per_step(block: BlockKey) -> bool:
    return block[1] == UPDATE
