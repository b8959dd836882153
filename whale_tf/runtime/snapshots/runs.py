"""All training runs since ``wh.init``: each has a folder of its own for its snapshots, by what it is and its number.

::

    PATH/fit-0, fit-1 ...    calls of Keras' fit
    PATH/loop-0 ...          loops over wh.resume
    PATH/session-0 ...       graphs of MonitoredTrainingSessions
    PATH/estimator-0 ...     calls of Estimator.train, with a MonitoredTrainingSession of their own

Without ``snapshot.path``, there are those of ``fit`` with Keras' ``BackupAndRestore``, in its directory.
"""
from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
import weakref
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, MutableMapping, Optional, Sequence, Union

import numpy as np

from whale_tf._tf_compat import tf, v1
from whale_tf.capture.annotations import annotations_of
from whale_tf.cluster import Processes
from whale_tf.config import Snapshots as Settings
from whale_tf.errors import ClusterError, ConfigError, SnapshotError
from whale_tf.ir.traits import RANDOM
from whale_tf.processes.functions import Functions
from whale_tf.processes.runtime import Runtime
from whale_tf.processes.termination import Termination
from whale_tf.processes.watch import EXIT_STATUS, TERMINATED_STATUS, say
from whale_tf.runtime.snapshots.backups import Backup
from whale_tf.runtime.snapshots.files import Snapshot, Store, claim, end_claims
from whale_tf.runtime.snapshots.fitting import TRAINER, Fit, or_else
from whale_tf.runtime.snapshots.loops import Epochs, Loop
from whale_tf.runtime.snapshots.neighbours import Neighbours
from whale_tf.runtime.snapshots.pace import Pace
from whale_tf.runtime.snapshots.run import Run
from whale_tf.runtime.snapshots.sessions import Sessions, SessionState
from whale_tf.runtime.snapshots.variables import OR_ELSE, Captured, LoopVariables, Made, ModelVariables, Variables
from whale_tf.runtime.snapshots.writing import Job, Writer
from whale_tf.runtime.variable_parts import VariableParts

_NEVER = 2 ** 62  # steps between two snapshots
_TRAIN = ("input_fn", "hooks", "steps", "max_steps", "saving_listeners")  # the arguments of Estimator.train
_NAMES = {"fit": "fit", "loop": "the loop", "session": "the Session", "estimator": "the Estimator"}  # in messages


class Runs:
    """See the module's docstring.

    Args:
        job: functions that several processes run together; None: there is one process.
        runtime: this process, if it is one of several.
        original_run: a session -> TensorFlow's own ``session.run``.

    Attributes:
        current: what is training now.
    """

    def __init__(self, settings: Settings, processes: Processes, job: Optional[Functions], runtime: Optional[Runtime],
                 parts: VariableParts, termination: Termination, original_run: Callable[[Any], Callable[..., Any]]) -> None:
        self._path, self._settings = os.path.abspath(settings.path or "."), settings
        self._processes, self._job, self._parts, self._termination = processes, job, parts, termination
        self._runtime = runtime
        self._numbers: MutableMapping[tf.Graph, int] = weakref.WeakKeyDictionary()  # of graphs of MonitoredTrainingSessions
        self.sessions = Sessions(lambda session: SessionState(session, processes.is_chief, original_run(session)), self._run_of,
                                 self._say)
        self._counts: Dict[str, int] = {}  # runs of each kind
        self._estimator: Optional[int] = None  # number of the call of Estimator.train that is running
        self._has_warned = False
        self._made = Made()
        self._captured: MutableMapping[Any, Captured] = weakref.WeakKeyDictionary()  # by model
        self._plain: Optional[ModelVariables] = None  # of a call of fit without snapshots, which may trace for one that has them
        self._finished: List[Variables] = []  # of runs that do not train again, with values for variables still to be made
        self._last: Optional[Run] = None
        self.current: Union[None, Fit, Loop] = None

    def fit(self, model: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Keras' ``fit``, with snapshots.

        Raises:
            ConfigError: this ``fit`` cannot have them.
            SnapshotError: the snapshots are of another model or other data.
        """
        if not _is_known(model):
            raise ConfigError(
                "snapshot.path is set, but snapshots are taken of the fit of Keras 3.8 and later, and this is "
                f"{type(model).__module__}.{type(model).__name__} with TensorFlow {tf.__version__}; pip install 'keras>=3.8' "
                "(TensorFlow 2.16 or later), or leave out snapshot.path and use keras.callbacks.BackupAndRestore")
        if isinstance(self.current, Fit):
            raise ConfigError("snapshot.path is set, but fit is called inside of another fit; call one after the other, or leave "
                              "out snapshot.path")
        return self._fitted(Fit(model, self._variables(model), self._run("fit")), model, original, *args, **kwargs)

    def backed_up_fit(self, model: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Keras' ``fit`` without ``snapshot.path``: if it has a ``BackupAndRestore``, it goes on where that has saved last."""
        if self.current is not None or not _is_known(model):
            return original(*args, **kwargs)
        backup = self._backup(_callbacks(args, kwargs))
        if backup is None:
            before, self._plain = self._plain, self._variables(model)
            try:
                return original(*args, **kwargs)
            finally:
                self._plain = before
        store = Store(backup.path, backup.keep, self._say)
        found = next(store.newest(), None) if backup.counts() else None
        settings = dataclasses.replace(self._settings, path=backup.path, every_steps=_NEVER, every_s=None)
        self._check_same(f"BackupAndRestore({backup.directory!r})", "backup_dir", backup.directory, found)
        run = self._run_in(store, "fit", settings, found, self._new_number())
        write = (lambda original: original()) if self._runtime is None else self._runtime.write
        fit = Fit(model, self._variables(model, or_else(backup)), run, backup, self._is_any, write)
        return self._fitted(fit, model, original, *args, **kwargs)

    def _variables(self, model: Any, else_: str = OR_ELSE) -> ModelVariables:
        captured = self._captured.setdefault(model, Captured({}, weakref.WeakSet()))
        return ModelVariables(model, captured, self._parts, self._processes.is_chief, self._host, else_)

    def _backup(self, given: Any) -> Optional[Backup]:
        """The backups of a call of ``fit``, if all processes have them in the same directory."""
        backup = Backup.of(given)
        if self._is_any(backup is None):
            return None
        assert backup is not None
        if self._gather is not None:
            if self._processes.is_chief:
                backup.mark()
            self._is_any(False)  # process 0 has marked it
            is_marked = not self._is_any(not backup.is_marked())
            if self._processes.is_chief:
                backup.unmark()
            if not is_marked:
                self._say(f"not all processes find {backup.directory!r}, so BackupAndRestore restores only weights and the "
                          "number of the epoch; give it a directory that all processes can reach")
                return None
        return backup

    def _is_any(self, what: bool) -> bool:
        """Whether something is so in any of the processes."""
        gather = self._gather
        return what if gather is None else bool(np.any(gather([what])))

    def _fitted(self, fit: Fit, model: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first_epoch = model._initial_epoch
        with self._running(fit):
            try:
                given = _callbacks(args, kwargs)
                if hasattr(given, "callbacks"):  # a list of Keras' own class, which fit takes as it is
                    fit.take_callbacks(given)
                return original(*args, **kwargs)
            finally:
                model._initial_epoch = first_epoch
                fit.close()

    def loop(self, data: Iterable[Any], epochs: int, state: Dict[Any, Any], session: Any) -> Epochs:
        """A loop of the script's own.

        Args:
            state: values of the script's own that go on, too.
            session: that it trains in, in graph mode; None: the default one.

        Raises:
            ConfigError: there is none.
        """
        variables: Union[LoopVariables, SessionState]
        known = None
        if tf.executing_eagerly():
            variables = LoopVariables(self._made, self._parts, self._processes.is_chief, self._host)
        else:
            session = v1.get_default_session() if session is None else session
            if session is None:
                raise ConfigError("wh.resume in graph mode needs the Session in which the loop trains: call it inside of with "
                                  "tf.compat.v1.Session(): or give it session=...")
            session = session._tf_sess() if hasattr(session, "_tf_sess") else session  # a MonitoredTrainingSession
            variables, known = self.sessions.state(session), self.sessions.run(session)
        run = self._run("loop") if known is None else known.run
        if known is not None:
            known.is_driven = True
        return Loop(data, epochs, state, variables, run, self._running, lambda loop: self.current is loop).epochs()

    def estimator(self, estimator: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``Estimator.train``, with snapshots.  Its checkpoints may be older or newer than they are: the snapshot counts.  Of a
        call that makes so many steps, those are left that it had not made.

        Raises:
            ConfigError: the Estimator's directory is not there after the next start.
            SnapshotError: the call had made more steps than it is to make now.
        """
        folder, prefix = os.path.split(estimator.model_dir)
        if folder == tempfile.gettempdir() and prefix.startswith(tempfile.gettempprefix()):
            raise ConfigError(f"snapshot.path is set, and the Estimator has no model_dir of its own but {estimator.model_dir!r}, "
                              "which the next start of the script will not know; give the Estimator a model_dir that stays")
        number = self._counts.get("estimator", 0)
        self._counts["estimator"] = number + 1
        store, given = self._store("estimator", number), {**dict(zip(_TRAIN, args)), **kwargs}
        if store.is_finished and given.get("max_steps") is None:  # otherwise TensorFlow looks into the last checkpoint
            self._say(f"Estimator.train had finished ({store.path}), and does not train again")
            return estimator
        found = next(store.newest(), None) if given.get("steps") is not None else None
        if found is not None:
            given["steps"] -= found.step
            if given["steps"] <= 0:
                raise SnapshotError(f"Estimator.train is to make {given['steps'] + found.step} steps, but snapshot "
                                    f"{found.folder!r} was taken after {found.step} of them; give it more steps, {OR_ELSE}")
        self._estimator = number
        try:
            result = original(**given)
        finally:
            self._estimator = None
        if self._processes.is_chief:
            try:
                store.finish()
            except OSError as error:
                self._say(f"{store.path} cannot have a note that Estimator.train has finished, so another start trains its last "
                          f"steps again: {error}")
        return result

    def session_made(self, session: Any) -> None:
        """A MonitoredTrainingSession has made a session, with values for all variables."""
        run = self.sessions.made(session, self._estimator is not None)
        self._last = run.run
        self._termination.at_steps_while(lambda: run.is_open)

    def session_closes(self, session: Any) -> None:
        """A session is going to be closed."""
        run = self.sessions.run(session)
        if run is not None and run.is_open:
            run.closes()

    @contextlib.contextmanager
    def around(self, session: Any, fetches: Any, refuse: Callable[[], Any]) -> Iterator[None]:
        """Around each run of a session.

        Args:
            refuse: is called before a run that trains and of which no snapshots would be taken.
        """
        is_in_loop = isinstance(self.current, Loop) and self.current.variables is self.sessions.state(session)
        yield from self.sessions.around(session, fetches, is_in_loop, refuse)

    def _run_of(self, graph: tf.Graph) -> Run:
        """The run of a graph, which may have several MonitoredTrainingSessions one after the other."""
        if self._estimator is not None:
            return self._run("estimator", self._estimator)
        run = self._run("session", self._numbers.get(graph))
        self._numbers.setdefault(graph, self._counts["session"] - 1)
        return run

    @property
    def _host(self) -> str:
        """The device that values are copied to, and written from."""
        return self._processes.host_device if self._job is not None and tf.executing_eagerly() else "/device:CPU:0"

    @property
    def _gather(self) -> Optional[Callable[[Sequence[float]], np.ndarray]]:
        """The rows of all processes, once all have come to the same step."""
        if self._job is None or self._runtime is None:
            return None
        if tf.executing_eagerly():
            return self._job.gather
        exchange = self._runtime.exchange
        return lambda row: np.array([json.loads(text) for text in exchange(json.dumps([float(one) for one in row]).encode())])

    @contextlib.contextmanager
    def _running(self, training: Union[Fit, Loop]) -> Iterator[None]:
        """Around the steps of a run."""
        self.current, self._last = training, training.run
        try:
            with self._termination.at_steps():
                yield
        finally:
            if self.current is training:
                self.current = None
            self._finished = [one for one in (*self._finished, training.variables) if isinstance(one, Variables) and one.waiting]
            training.run.wait()

    def _run(self, kind: str, number: Optional[int] = None) -> Run:
        """The run of a kind that has this number; None: the next one."""
        if number is None:
            number = self._counts.get(kind, 0)
            self._counts[kind] = number + 1
        store, run = self._store(kind, number), self._new_number()
        neighbours = self._neighbours(store, run)
        if neighbours is not None and kind == "estimator":
            raise ConfigError(f"snapshot.path {self._path!r} is not one directory for all processes, but an Estimator needs "
                              "that, as it needs model_dir; give it a directory that all of them reach")
        found = next(store.newest(), None) if neighbours is None else neighbours.newest()
        if found is None:
            store.begin_anew()
        self._check_same(f"{kind}-{number}", "snapshot.path", self._path, found)
        return self._run_in(store, kind, self._settings, found, run, neighbours)

    def _neighbours(self, store: Store, run: int) -> Optional[Neighbours]:
        """Where parts of snapshots are kept besides, if the processes have directories of their own."""
        gather, runtime, rank = self._gather, self._runtime, self._processes.rank
        if gather is None or runtime is None:
            return None
        try:
            lead = claim(store.path, run, rank)
        except OSError:  # a full disk; what cannot be written is said when it is
            lead = -1
        leads = [int(row[0]) for row in gather([lead])]
        if lead == rank:
            end_claims(store.path)
        if len(set(leads) - {-1}) < 2:
            return None
        return Neighbours(store, rank, [each if lead < 0 else lead for each, lead in enumerate(leads)],
                          self._processes.addresses, self._settings.neighbour, runtime.exchange, runtime.writing_at,
                          lambda: runtime.has_lost, self._say)

    def _run_in(self, store: Store, kind: str, settings: Settings, found: Optional[Snapshot], number: int,
                neighbours: Optional[Neighbours] = None) -> Run:
        runtime = self._runtime
        writer = Writer(self._processes.count, self._processes.rank, self._host,
                        lambda: runtime is not None and runtime.has_lost, neighbours)
        pace = Pace(settings, self._gather, self._processes.is_chief, lambda: self._termination.signal)
        pace.begins(0)
        return Run(_NAMES[kind], store, writer, pace, found, number, self._end)

    def _store(self, kind: str, number: int) -> Store:
        return Store(os.path.join(self._path, f"{kind}-{number}"), self._settings.keep, self._say)

    def made(self, variable: Any) -> None:
        """Call when a variable has been made outside of graphs."""
        key = self._made.note(variable)
        for variables in (*self._finished, *([] if self.current is None else [self.current.variables])):
            if isinstance(variables, LoopVariables):
                variables.made(key, variable)

    @property
    def fitting(self) -> Optional[Fit]:
        """The call of ``fit`` that is running."""
        return self.current if isinstance(self.current, Fit) else None

    def traced(self, graph: tf.Graph) -> None:
        """Call when a function has been made from ``graph``."""
        if self.current is None and self._plain is not None:
            self._plain.traced(graph)
        elif self.current is not None and isinstance(self.current.variables, Variables):
            self.current.variables.traced(graph)
            draws = next((op.name for op in graph.get_operations() if op.type in RANDOM and op.op_def.is_stateful
                          and not any(tensor.dtype == tf.resource for tensor in op.inputs)), None)
            if draws is not None and annotations_of(graph).trains and not self._has_warned:
                self._has_warned = True
                self._say(f"op {draws!r} of tf.function {graph.name!r} draws random numbers from a state that TensorFlow does "
                          "not give out, so a run that goes on draws others; use keras.random or tf.random.Generator")
        for variables in self._finished:
            variables.traced(graph)

    def _say(self, text: str) -> None:
        if self._processes.is_chief:
            say(text)

    def explained(self) -> str:
        """How often snapshots are taken, and what they cost."""
        settings = self._settings
        often = f"every {settings.every_steps} steps" if settings.every_steps is not None else (
            f"every {settings.every_s:g} s" if settings.every_s is not None else
            f"so often that training waits for them {100 * settings.budget:g}% of the time")
        lines = [] if self._last is None else self._last.lines()
        return "".join(f"{line}\n" for line in [f"Snapshots: {often}; the last {settings.keep} are kept", *lines])

    def _new_number(self) -> int:
        """The number of this run, which process 0 chooses."""
        run = int(time.time() * 1000) % (1 << 40)
        gather = self._gather
        return run if gather is None else int(gather([run])[0, 0])

    def _check_same(self, name: str, key: str, path: str, found: Optional[Snapshot]) -> None:
        """Checks that all processes go on with the same snapshot.

        Args:
            key, path: the user's directory of the snapshots, and what it was given as.

        Raises:
            ClusterError: the processes have found different snapshots.
        """
        gather = self._gather
        if gather is None:
            return
        found_steps = np.array(gather([-1 if found is None else found.step]))[:, 0]
        if len(set(found_steps)) > 1:
            steps = ", ".join("none" if step < 0 else f"step {step:.0f}" for step in found_steps)
            raise ClusterError(
                f"the processes have found different snapshots of {name} in {path!r} ({steps}, by process): "
                f"all of them need the same directory ({key})")

    def _end(self, job: Job, writer: Writer, number: int) -> None:
        """Ends this process, once the snapshot is complete; the signal was for it, or for another process.

        In a job whose number of processes changes, the status says whether it was for this one.

        Raises:
            SystemExit
        """
        self._termination.is_asked = True  # maybe only another process was
        self._say("{}: snapshot of step {} is {}; ending".format(
            signal.Signals(number).name, job.step, "complete" if writer.wait_for_manifest(job) else "not complete"))
        sys.exit(EXIT_STATUS if self._processes.most and not self._termination.signal else TERMINATED_STATUS)


def _is_known(model: Any) -> bool:
    """Whether a model has the ``fit`` of Keras 3.8 or later."""
    is_keras_3 = any(kind.__module__ == TRAINER for kind in type(model).__mro__)
    return is_keras_3 and hasattr(sys.modules[TRAINER].TFEpochIterator, "_enumerate_iterator")


def _callbacks(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Those that ``fit`` was given."""
    return kwargs.get("callbacks", args[5] if len(args) > 5 else None)
