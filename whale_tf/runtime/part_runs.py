"""Runs of a Session whose process runs its part of a step (:mod:`whale_tf.emit.session_part`)."""

from __future__ import annotations

import weakref
import zlib
from typing import Any, Callable, Collection, Dict, List, MutableSet, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from whale_tf._tf_compat import tf
from whale_tf.emit.own_part import HOST
from whale_tf.emit.session_alone import SessionAlone
from whale_tf.emit.session_part import Fetch, SessionPart, op_of
from whale_tf.emit.session_step import SessionSteps, Step
from whale_tf.processes.functions import CHECKED_STEPS, check_inputs
from whale_tf.processes.runtime import Runtime
from whale_tf.processes.step_numbers import StepNumbers
from whale_tf.processes.turns import turns_of

STEP, WRITE, READ = "step", "write", "read"


class Run(NamedTuple):
    """How a run is made.

    Attributes:
        kind: whether it is a step, writes variables that some process keeps, or only reads.
        fetches: what TensorFlow is asked for, in the order of the fetches, and then perhaps one op more.
        closed: gates that are fed.
        owners: other processes whose variables it reads.
    """

    kind: str
    fetches: Sequence[Fetch]
    closed: Tuple[str, ...] = ()
    owners: Tuple[int, ...] = ()
    step: Optional[Step] = None


class PartRuns:
    """See the module's docstring.

    Args:
        divided: names of variables in whose place there are parts.
        text: what this process runs, equal in processes that agree.

    Attributes:
        part, steps, alone: which ops this process runs in steps, and alone.
    """

    def __init__(self, part: SessionPart, steps: SessionSteps, divided: Collection[str], runtime: Runtime, text: str) -> None:
        self.part, self.steps = part, steps
        self.alone = SessionAlone(part.graph, part.context.graph, part.scope, part.is_ours, part.edges, part.commit)
        self._runtime, self._processes = runtime, part.processes
        self._start, nothing = part.stage_start(divided)
        self._numbers = StepNumbers(runtime.keys.sequence(len(part.members)) + part.number, nothing)
        self._text = f"{zlib.crc32(text.encode())}"
        self._turns = turns_of(runtime)
        self._equal: MutableSet[Any] = weakref.WeakSet()  # sessions that have begun
        self._agreed: MutableSet[str] = set()
        self._unchecked: Dict[str, int] = {}  # step -> in how many of its first runs mini-batches are still compared
        self._has_failed = False
        self._runs: Dict[Tuple[str, ...], Run] = {}

    def find(self, graph: tf.Graph, fetches: Sequence[Fetch]) -> Run:
        """How a run is made; merged values are already in the place of what clones compute."""
        self.part.update()
        fetches = [self.part.as_written(fetch) for fetch in fetches]
        names = tuple(fetch.name for fetch in fetches)
        if names not in self._runs:
            self._runs[names] = self._find(graph, fetches)
        return self._runs[names]

    def _find(self, graph: tf.Graph, fetches: Sequence[Fetch]) -> Run:
        ops = [op_of(fetch) for fetch in fetches]
        if self.steps.trains(ops):
            step = self.steps.step(fetches)
            run = graph.get_operation_by_name(step.run)
            own: List[Fetch] = []
            for fetch, op in zip(fetches, ops):
                if fetch.name in step.values:
                    own.append(graph.get_tensor_by_name(step.values[fetch.name]))
                elif isinstance(fetch, tf.Operation) and not self.part.is_here(op):
                    own.append(run)
                else:
                    own.append(fetch)
            return Run(STEP, [*own, run], step.closed, (), step)
        instead = self.part.instead
        if self.steps.kept_writes(ops):
            own = [self._element(graph, instead.get(fetch.name, fetch.name), fetch) for fetch in fetches]
            owners = () if self._processes.leads else self._owners(own)
            return Run(WRITE, own, (), owners)
        return Run(READ, fetches, (), self._owners(fetches))

    def _owners(self, fetches: Sequence[Fetch]) -> Tuple[int, ...]:
        return tuple(sorted(self.part.owners(map(op_of, fetches))))

    @staticmethod
    def _element(graph: tf.Graph, name: str, fetch: Fetch) -> Fetch:
        return graph.as_graph_element(name) if name != fetch.name else fetch

    def make(self, session: Any, original: Callable, run: Run, *arguments: Any) -> Any:
        """Makes a run, in turn with the other processes.

        Args:
            original: TensorFlow's own ``session.run``.
            arguments: for it.
        """
        if run.kind == STEP:
            return self._step(session, original, run, *arguments)

        def function() -> Any:
            return original(*arguments)

        turns = self._turns
        if run.kind == READ:
            if run.owners:
                turns.wait_for(run.owners, self._processes)
            return self._guarded(function)
        if turns.has_started:
            turns.agree("", "a run that writes variables")
        result = None
        if self._processes.leads:
            result = self._guarded(function)
        turns.wrote()
        if turns.has_started:
            turns.agree("", "the end of a run that writes variables")
            if len(self._processes.steps) > 1:  # what is written may have been drawn
                self._guarded(lambda: original(self._start))
        if not self._processes.leads:
            if run.owners:
                turns.wait_for(run.owners, self._processes)
            result = self._guarded(function)
        return result

    def begin(self, session: Any, original: Callable) -> None:
        """Call before a session's first step: all processes have come there, and have equal values where several have a variable
        for themselves."""
        if session in self._equal:
            return
        self._turns.start(self._text)
        with self._runtime.waiting():
            original(self._start)
        self._equal.add(session)

    def _step(self, session: Any, original: Callable, run: Run, *arguments: Any) -> Any:
        assert run.step is not None
        self.begin(session, original)
        if self._has_failed:
            self._recover(session, original)
        text = run.step.text
        if text not in self._agreed:
            self._turns.agree(text, "a training run")
            self._agreed.add(text)
        try:
            with self._runtime.waiting(), self._runtime.run_of_all():
                result = self._numbers.run(original, *arguments)
        except BaseException:
            self._has_failed = True
            raise
        self._turns.stepped()
        left = self._unchecked.setdefault(text, CHECKED_STEPS)
        if left and run.step.inputs:
            self._unchecked[text] = left - 1
            self._check_inputs(run.step)
        return result

    def _check_inputs(self, step: Step) -> None:
        """Raises:
            InputError: the processes have read different mini-batches.
        """
        def read() -> tf.Tensor:
            with tf.device(self._runtime.processes.prefix(self._runtime.processes.rank) + HOST):
                handle = tf.raw_ops.VarHandleOp(
                    dtype=tf.float64, shape=tf.TensorShape([2 * len(step.inputs)]), shared_name=step.seen)
                return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64)

        own = np.asarray(self._runtime.run_beside([], read))
        texts = self._turns.exchange(own.tobytes().hex(), "the comparison of mini-batches")
        check_inputs(np.array([np.frombuffer(bytes.fromhex(text)) for text in texts]), step.inputs, "this graph")

    def _recover(self, session: Any, original: Callable) -> None:
        """After a step that failed in all processes, as at the end of the data: what has been sent of it is dropped."""
        self._turns.agree("", "the first training run after one that failed")
        graph = session.graph
        for receive, size in self.part.queues.sizes.items():
            while original(graph.get_tensor_by_name(size + ":0")):
                original(graph.get_tensor_by_name(receive + ":0"))
        self._turns.agree("", "the first training run after one that failed")
        self._has_failed = False

    def _guarded(self, function: Callable[[], Any]) -> Any:
        with self._runtime.waiting():
            return function()
