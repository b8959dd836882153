"""When snapshots are taken, and when training ends: after the same step in every process.

With ``every_steps`` each process knows by itself.  Everything that depends on a clock or a signal is agreed on: at a step that
all know, each says what it knows, and all decide alike.  Process 0 measures, and says after how many steps they do so again.

::

    process 0    step 1 ... step 16 ──> 12 s are over; again in 20 steps ──┐            ┌──> snapshot ──> step 17 ...
    process 1    step 1 ... step 16 ──> asked to end? no ──────────────────┴─ gather ───┴──> snapshot ──> step 17 ...
"""
from __future__ import annotations

import time
from typing import Callable, NamedTuple, Optional, Sequence

import numpy as np

from whale_tf.config import Snapshots as Settings
from whale_tf.runtime.snapshots.writing import Writer

AGREE_S = 0.5  # between two agreements
MOST_STEPS = 1000  # between two agreements
FIRST_S = 10.0  # until the first snapshot, if the budget decides

Gather = Callable[[Sequence[float]], np.ndarray]


class Todo(NamedTuple):
    """What follows on a step.

    Attributes:
        signal: that asks for the end; 0: training goes on.
    """

    takes: bool
    signal: int


class Pace:
    """See the module's docstring.

    Args:
        gather: the rows of all processes, once all have come to the same step; None: there is one process.
        signal: that has asked this process to end; 0: none has.
    """

    def __init__(self, settings: Settings, gather: Optional[Gather], is_chief: bool, signal: Callable[[], int]) -> None:
        self.is_chief = is_chief
        self._settings, self._gather, self._signal = settings, gather, signal
        self._taken_step = self._agreed_step = self._next = 0
        self._taken_at = self._agreed_at = time.monotonic()
        self._stall_s = 0.0

    def begins(self, step: int) -> None:
        """Training begins after ``step``."""
        self._taken_step = self._agreed_step = self._next = step
        self._taken_at = self._agreed_at = time.monotonic()

    def taken(self, step: int, stall_s: float) -> None:
        """A snapshot was taken, for which training had to wait so long."""
        self._taken_step, self._taken_at, self._stall_s = step, time.monotonic(), stall_s

    def after(self, step: int, must_agree: bool, writer: Writer) -> Todo:
        """What follows on a step."""
        every = self._settings.every_steps
        takes = every is not None and step // every > self._taken_step // every
        if self._gather is None:
            return Todo(takes or self._is_time(writer), self._signal())
        if step < self._next and not must_agree:
            return Todo(takes, 0)
        rows = self._gather([self._signal(), self._is_time(writer), self._steps(step), writer.failed_step])
        if any(row[3] == self._taken_step for row in rows):
            writer.give_up()  # another process could not write its part
        self._agreed_step, self._agreed_at = step, time.monotonic()
        self._next = step + int(rows[0][2])
        return Todo(takes or bool(rows[0][1]), int(max(row[0] for row in rows)))

    def _is_time(self, writer: Writer) -> bool:
        """Whether the clock asks for a snapshot: ``every_s``, or the share of time that snapshots may take."""
        since = time.monotonic() - self._taken_at
        if self._settings.every_s is not None:
            return since >= self._settings.every_s and not writer.is_busy
        if self._settings.every_steps is not None:
            return False
        return since >= max(FIRST_S, self._stall_s / self._settings.budget) and not writer.is_busy

    def _steps(self, step: int) -> int:
        """Steps until the next agreement."""
        done = step - self._agreed_step
        step_s = (time.monotonic() - self._agreed_at) / done if done > 0 else AGREE_S
        return max(1, min(MOST_STEPS, int(AGREE_S / max(step_s, 1e-6))))
