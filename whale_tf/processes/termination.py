"""SIGTERM: process 0 saves once more between two training steps and ends; the others train until then.

::

    process 0    step k ──> Saver.save ──> ends
    process 1    step k ──> waits in step k + 1 ─────> process 0 has ended: ends

The signal handler only records the signal, because Python may run handlers in the middle of a save.  As always, only
process 0 saves, and only between steps.  A process that ended at once would break process 0's current step.
"""

from __future__ import annotations

import contextlib
import numbers
import os
import signal
import socket
import sys
import threading
import weakref
from typing import Any, Callable, Dict, Iterator, List, Mapping, MutableMapping, Optional, Sequence, Tuple

from whale_tf._tf_compat import FetchMapper, tf, v1
from whale_tf.cluster import Processes
from whale_tf.emit.owners import UPDATES_ATTR
from whale_tf.emit.processes import ancestors
from whale_tf.ir.traits import traits
from whale_tf.processes.runtime import Runtime
from whale_tf.processes.watch import TERMINATED_STATUS, end_process, say

PATIENCE_S = 25.0  # from SIGTERM to the end of a process that no longer trains, or whose process 0 continues to train


class _Saved:
    """A script's use of one of its savers.

    Attributes:
        count: number of saves.
        arguments: path, and the arguments after the step.
        session: the session whose variables were saved last.
        step: the number in the file's name; None: none.
        clock: the graph's global step at that time (None: it has none).
        runs: runs since then that updated variables, for a graph without a global step.
    """

    def __init__(self) -> None:
        self.count = 0
        self.arguments: Tuple[str, Sequence[Any], Mapping[str, Any]] = ("", (), {})
        self.session: Callable[[], Any] = lambda: None
        self.step: Optional[int] = None
        self.clock: Optional[int] = None
        self.runs = 0
        self._updating: Dict[Tuple[str, ...], bool] = {}

    @property
    def is_alive(self) -> bool:
        session = self.session()
        return session is not None and not session._closed

    def remember(self, session: Any, step: Any, *arguments: Any) -> None:
        """Record a save by the script."""
        self.count += 1
        self.arguments = arguments  # type: ignore[assignment]
        self.session = weakref.ref(session)
        self.step = None if step is None else step_value(session, step)
        self.clock, self.runs = _clock(session), 0

    def ran(self, session: Any, fetches: Any) -> None:
        """Count a run in which an optimizer updates variables."""
        if self.clock is not None or self.session() is not session:
            return
        with session.graph.as_default():
            elements = FetchMapper.for_fetch(fetches).unique_fetches()
        ops = [each if isinstance(each, tf.Operation) else each.op for each in elements]
        key = tuple(op.name for op in ops)
        if key not in self._updating:
            self._updating[key] = any(updates(op) for op in ancestors(ops))
        self.runs += self._updating[key]

    def steps_since(self) -> int:
        """Number of steps since the last checkpoint."""
        return self.runs if self.clock is None else (_clock(self.session()) or 0) - self.clock


class Termination:
    """See the module's docstring.

    Args:
        runtime: this process, if it is one of several.
    """

    def __init__(self, processes: Processes, runtime: Optional[Runtime]) -> None:
        self._is_chief = processes.is_chief
        self._signals_heard: Sequence[int] = (signal.SIGTERM,)
        self.signal = 0  # the last one
        self._at_steps: List[Callable[[], bool]] = []  # whether each training that ends by itself after a step still goes on
        self._runtime = runtime
        self.is_asked = False
        if runtime is not None:
            runtime.asked_to_end = lambda: self.is_asked
        self._has_run = False
        self._saved: MutableMapping[Any, _Saved] = weakref.WeakKeyDictionary()  # by saver
        self._depth = 0  # runs and saves in progress in the main thread
        self._signals: Optional[socket.socket] = None
        self._before = -1  # the previous file descriptor for signals
        self._removed = threading.Event()

    def install(self, also_usr1: bool = False) -> None:
        """Listen for SIGTERM, unless the script does so itself (or this is not the main thread).

        Args:
            also_usr1: listen for SIGUSR1 too, which SLURM sends before it ends a job.
        """
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        heard, self._signals = socket.socketpair()
        self._signals.setblocking(False)
        # a Python handler has to wait while the main thread is inside TensorFlow; this is notified at once
        self._before = signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(heard,), name="whale_tf SIGTERM", daemon=True).start()
        if also_usr1 and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            self._signals_heard = (signal.SIGTERM, signal.SIGUSR1)
        for number in self._signals_heard:
            signal.signal(number, self._note)

    @contextlib.contextmanager
    def at_steps(self) -> Iterator[None]:
        """Training that asks after its steps whether it shall end, and then ends by itself."""
        before, self._has_run = self._has_run, True
        self._at_steps.append(_always)
        try:
            yield
        finally:
            self._at_steps.remove(_always)
            self._has_run = before

    def at_steps_while(self, goes_on: Callable[[], bool]) -> None:
        """The same, as long as ``goes_on`` says so."""
        self._has_run = True
        self._at_steps.append(goes_on)

    @property
    def _ends_at_steps(self) -> bool:
        return any(goes_on() for goes_on in list(self._at_steps))

    def remove(self) -> None:
        """Restore the previous handling of SIGTERM."""
        if self._signals is None or threading.current_thread() is not threading.main_thread():
            return
        for number in self._signals_heard:
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(self._before)
        self._removed.set()
        self._signals.close()
        self._signals = None

    def _note(self, number: int, frame: Any) -> None:
        self.is_asked, self.signal = True, number
        if not self._has_run:  # nothing to save, nobody to wait for
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _listen(self, heard: socket.socket) -> None:
        with heard:
            while True:
                numbers_of_signals = heard.recv(64)
                if not numbers_of_signals:
                    return  # removed
                if set(self._signals_heard).intersection(numbers_of_signals):
                    break
            self.is_asked = True
            patience_s = PATIENCE_S
            while patience_s or self._ends_at_steps or (self._is_chief and self._depth):
                if self._removed.wait(patience_s or 1.0):
                    return
                patience_s = 0.0
            end_process("SIGTERM: ending without a checkpoint, {}".format(
                "no run has begun since" if self._is_chief else "process 0 continues to train"), TERMINATED_STATUS)

    # ------------------------------------------------------------------------------------------------- runs and saves
    @contextlib.contextmanager
    def between(self, session: Any, fetches: Any = None) -> Iterator[None]:
        """A run (of ``fetches``) or a save; this process may end before and after it."""
        if self._signals is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._has_run = True
        self._end_if_asked()
        self._depth += 1
        try:
            yield
            if fetches is not None:
                for saved in self._saved.values():
                    saved.ran(session, fetches)
        finally:
            self._depth -= 1
        self._end_if_asked()

    def save(self, saver: Any, original: Callable, session: Any, save_path: str, global_step: Any, *args: Any,
             **kwargs: Any) -> str:
        """``Saver.save``, remembered."""
        if self._signals is None:
            return original(session, save_path, global_step, *args, **kwargs)
        with self.between(session):
            path: str = original(session, save_path, global_step, *args, **kwargs)
            self._saved.setdefault(saver, _Saved()).remember(session, global_step, save_path, args, kwargs)
        return path

    def _end_if_asked(self) -> None:
        """Save and end, if asked to and neither a run nor a save is in progress.

        Raises:
            SystemExit
        """
        if not self.is_asked or self._depth or not self._is_chief or self._ends_at_steps:
            return
        self._depth += 1
        try:
            say(f"SIGTERM: {self._save_once_more()}; ending")
        finally:
            self._depth -= 1
        sys.exit(TERMINATED_STATUS)

    def _save_once_more(self) -> str:
        """Save, and describe the outcome.  Uses the saver with the most saves: another may keep the best model so far."""
        alive = [(saver, saved) for saver, saved in self._saved.items() if saved.is_alive]
        if not alive:
            return "nothing is saved, because the script itself has not saved a checkpoint of this session"
        if self._runtime is not None and not self._runtime.is_consistent:
            return "nothing is saved, because a training step was aborted"
        saver, saved = max(alive, key=lambda each: each[1].count)
        try:
            steps = saved.steps_since()
            if not steps:
                return "nothing has changed since the last checkpoint"
            path, args, kwargs = saved.arguments
            step = None if saved.step is None else saved.step + steps
            return f"saved {saver.save(saved.session(), path, step, *args, **kwargs)}"
        except Exception as error:  # the process must end whatever the error
            return f"saving failed, so the previous checkpoint is the last one ({error})"


def updates(op: tf.Operation) -> bool:
    """Whether an op is an optimizer's update, or takes over the value of an update that another process runs."""
    return traits(op.type).is_update or UPDATES_ATTR in op.node_def.attr


def _clock(session: Any) -> Optional[int]:
    tensor = v1.train.get_global_step(session.graph)
    return None if tensor is None else step_value(session, tensor)


def _always() -> bool:
    return True


def step_value(session: Any, step: Any) -> int:
    """The value of a step given as a number (including NumPy's), a tensor or a variable."""
    return int(step if isinstance(step, numbers.Integral) else v1.train.global_step(session, step))
