"""The order of runs between processes of which each runs its part of a step in a Session of its own.

::

    process 0    initialise ──> first step ──> step ──> read all variables ──> step ...
                                   ║            ║  ^           │                 ║
    process 1    (does not) ────> first step ──> step │   its counter of steps ──> step ...

Until the first step, process 0 alone writes the variables that some process keeps, and the others wait before they read them.
After that all processes make a run that writes them: each waits until the others have come there, process 0 writes, and all go
on.  A run that reads other processes' variables waits until these have finished as many steps.  If steps run side by side, the
first process of each does for its step what process 0 does here.
"""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional, Sequence

from whale_tf._tf_compat import tf, v1
from whale_tf.cluster import Processes
from whale_tf.emit.own_part import HOST, STEPS
from whale_tf.errors import PlanError
from whale_tf.processes.runtime import Runtime

PAUSE_S = .001  # until a process is asked again how many steps it has finished
STARTED = 1 << 40  # in place of a number of steps: nothing more is written before the first one


class Turns:
    """See the module's docstring.

    Attributes:
        has_started: whether a step has been made.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._processes = runtime.processes
        self._count = 0
        self._session: Any = None
        self._reads: List[tf.Tensor] = []
        self._assign: Any = None
        self._value: Any = None
        self.has_started = False

    def start(self, text: str) -> None:
        """The first step of a Session: all processes have come here, with equal texts.

        Raises:
            PlanError: their texts differ, or one does not come.
        """
        what, count = "the first training step", self._count
        self._set(STARTED)
        self.agree(text, what)
        self._set(max(map(int, self.exchange(str(count), what))))
        self.agree("", what)
        self.has_started = True

    def agree(self, text: str, what: str) -> None:
        """All processes have come here, with equal texts.

        Args:
            what: they are going to do, in words.

        Raises:
            PlanError: their texts differ, or one does not come.
        """
        told = self.exchange(text, what)
        for rank, one in enumerate(told):
            if one != told[0]:
                differing = min(set(told[0].split("\n")) ^ set(one.split("\n")), default="")
                raise PlanError(
                    f"at {what}, process {rank} has another graph than process 0, or makes another run (they differ in "
                    f"{differing!r}): the variables, the train op and what is fetched beside it must be the same in all")

    def exchange(self, text: str, what: str) -> List[str]:
        """The texts of all processes, by rank, once all have come here.

        Raises:
            PlanError: one does not come.
        """
        try:
            return [one.decode() for one in self._runtime.exchange(text.encode())]
        except tf.errors.DeadlineExceededError:
            raise PlanError(
                f"this process has come to {what}, but another one has not within {self._runtime.start_timeout_s:.0f} s "
                "(communication.start_timeout_s): all processes must make the same runs that change variables, in the same "
                "order, and fetch the same beside them") from None

    def stepped(self) -> None:
        """A step is done, and TensorFlow has counted it."""
        self._count += 1

    def wrote(self) -> None:
        """A run that writes variables otherwise is done."""
        self._set(self._count + 1)

    def wait_for(self, ranks: Sequence[int], processes: Processes) -> None:
        """Waits until processes have finished as many steps as this one.

        Args:
            processes: the members of this one's step.

        Raises:
            ProcessLostError: one of them has ended.
        """
        if not self.has_started:
            ranks = [] if processes.leads else [processes.members[0]]
        with self._runtime.waiting():
            while ranks:
                values = self._open().run([self._reads[rank] for rank in ranks])
                ranks = [rank for rank, value in zip(ranks, values) if value < self._count]
                if ranks:
                    time.sleep(PAUSE_S)

    def _set(self, count: int) -> None:
        session = self._open()
        session.run(self._assign, {self._value: count})
        if count != STARTED:
            self._count = count

    def _open(self) -> Any:
        if self._session is None:
            with tf.Graph().as_default() as graph:
                handles: Dict[int, Any] = {}
                for rank in range(self._processes.count):
                    with tf.device(self._processes.prefix(rank) + HOST):
                        handles[rank] = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=tf.TensorShape([]), shared_name=STEPS)
                        ready = tf.raw_ops.VarIsInitializedOp(resource=handles[rank])
                        self._reads.append(tf.cond(
                            ready, _reader(handles[rank]), lambda: tf.constant(-1, tf.int64)))
                with tf.device(self._processes.prefix(self._processes.rank) + HOST):
                    self._value = v1.placeholder(tf.int64, [])
                    self._assign = tf.raw_ops.AssignVariableOp(resource=handles[self._processes.rank], value=self._value)
            self._session = self._runtime.open_beside(graph)
            self._session.run(self._assign, {self._value: 0})
        return self._session


def _reader(handle: Any) -> Any:
    return lambda: tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int64)


_turns: Optional[Turns] = None  # servers and their counters live as long as the process


def turns_of(runtime: Runtime) -> Turns:
    """The order of this process's runs."""
    global _turns
    if _turns is None or _turns._runtime is not runtime:
        _turns = Turns(runtime)
    return _turns
