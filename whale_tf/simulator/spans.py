"""Calls of functions in simulation: a function begins when all its arguments are there, which live until it ends, and its results
appear when it ends. It cannot write its results over its arguments, because its end counts as a reader of these. A donated tensor
(:mod:`whale_tf.passes.donate`) has to be there too, but its last reader frees it or overwrites it."""

from __future__ import annotations

from typing import Dict, Iterable, List, NamedTuple, Tuple

from whale_tf.simulator.tasks import NOTHING, About, Tasks


class Span(NamedTuple):
    """The tasks, without duration, before and after all others of a function."""

    begin: int
    end: int


class Spans:
    """The functions of a Program's called bodies; calls of other bodies have none."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._spans: Dict[int, List[Span]] = {}  # call -> its functions
        self._owner: Dict[int, Tuple[int, int]] = {}  # task -> call, number of the function

    def __contains__(self, call: int) -> bool:
        return call in self._spans

    def add(self, call: int, count: int, device: int, about: About) -> None:
        """Add a call of ``count`` functions, which run one after another."""
        spans: List[Span] = []
        for _ in range(count):
            begin = self._tasks.add(NOTHING, 0.0, (device,), [spans[-1].end] if spans else [], about)
            spans.append(Span(begin, self._tasks.add(NOTHING, 0.0, (device,), [begin], about)))
        self._spans[call] = spans

    def run(self, call: int, function: int, task: int) -> None:
        """Make a task one of a function's."""
        if call in self._spans:
            span = self._spans[call][function]
            self._owner[task] = call, function
            self._tasks.wait(task, [span.begin])
            self._tasks.wait(span.end, [task])

    def take(self, call: int, function: int, values: Iterable[Tuple[int, int]]) -> None:
        """Pass (task, buffer) of values that a task of a function reads; those of other tasks are arguments.  A donated one is
        passed without its buffer (-1): it is waited for, and not held."""
        span = self._spans[call][function]
        for task, buffer in values:
            if self._owner.get(task) != (call, function):
                self._tasks.wait(span.begin, [task])
                self._tasks.read(span.end, buffer)

    def first(self, call: int) -> int:
        return self._spans[call][0].begin

    def last(self, call: int) -> int:
        return self._spans[call][-1].end

    def end(self, call: int, function: int) -> int:
        return self._spans[call][function].end
