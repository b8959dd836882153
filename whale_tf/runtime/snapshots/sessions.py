"""Training in Sessions: variables of the graph, and how many elements each of its iterators has given.

::

    MonitoredTrainingSession is made      a snapshot was found: the variables have its values, before hooks read the global step
    run that trains                       before it: iterators move on to where they were; snapshot of the run before, if due
    any run                               after it: each iterator that it asked has given one element more

All that a script did after a run, and its hooks, is done when it makes the next one.  An iterator's position counts from its last
initialisation, which the script makes again.
"""
from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, Iterable, Iterator, List, MutableMapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from whale_tf._tf_compat import tf, v1
from whale_tf.emit.processes import ancestors
from whale_tf.emit.session_part import SCOPE
from whale_tf.errors import ConfigError, SnapshotError
from whale_tf.ir.traits import RANDOM
from whale_tf.processes.termination import updates
from whale_tf.runtime.feeds import elements
from whale_tf.runtime.snapshots.files import Piece, SnapshotValue
from whale_tf.runtime.snapshots.run import Run
from whale_tf.runtime.snapshots.variables import OR_ELSE
from whale_tf.runtime.snapshots.writing import Job

_NEXT, _MAKE = "IteratorGetNext", "MakeIterator"
_ITERATORS = ("IteratorV2", "OneShotIterator")


class Seen(NamedTuple):
    """What a run does.

    Attributes:
        trains: it updates variables.
        takes: iterators of which it takes elements, each as often as it takes one: model replicas may take their own.
        makes: iterators that it initialises.
        refused: why its position in the data is not known; empty: it is.
        draws: an op that draws random numbers from a state that TensorFlow does not give out; empty: there is none.
        is_fed: placeholders are among what it needs.
    """

    trains: bool
    takes: Sequence[str]
    makes: Sequence[str]
    refused: str
    draws: str
    is_fed: bool


class SessionState:
    """The state of a Session that is in snapshots.

    Args:
        is_chief: this process writes what all processes have.
        original: TensorFlow's own ``session.run``.
    """

    def __init__(self, session: Any, is_chief: bool, original: Callable[..., Any]) -> None:
        self._session, self.graph = weakref.ref(session), session.graph
        self._is_chief, self._original = is_chief, original
        self._counts: Dict[str, int] = {}  # iterator -> elements that it has given since it was initialised
        self._targets: Dict[str, int] = {}  # and that it had given at the snapshot
        self._begins_anew = False  # an iterator that the script initialises now does so again after the snapshot
        self._seen: Dict[Tuple[str, ...], Seen] = {}
        self._version = -1
        self.waiting: Sequence[str] = ()

    @property
    def session(self) -> Any:
        return self._session()

    # ------------------------------------------------------------------------------------------------- runs
    def seen(self, fetches: Any) -> Seen:
        """What a run of ``fetches`` does."""
        if self.graph.version != self._version:
            self._seen, self._version = {}, self.graph.version
        ops = [each if isinstance(each, tf.Operation) else each.op for each in elements(self.graph, fetches)[1]]
        key = tuple(op.name for op in ops)
        if key not in self._seen:
            self._seen[key] = _seen(ops)
        return self._seen[key]

    def begins(self, seen: Seen) -> None:
        """Before a run that trains: moves iterators on to where they were.

        Raises:
            ConfigError: where they are would not be known.
            SnapshotError: one ends before that.
        """
        if seen.refused:
            raise ConfigError(
                f"snapshot.path is set, but {seen.refused}, so that its position in the data is not known; use an iterator of "
                "tf.data and call its get_next() outside of conditions, loops and functions, or leave out snapshot.path")
        for name, target in self._targets.items():
            ask = next((op for op in self.graph.get_operations()
                        if op.type.startswith(_NEXT) and _iterator(op).name == name), None)
            if ask is None:
                raise SnapshotError(f"the graph has no iterator {name!r}, of which the snapshot has the position; build the "
                                    f"graph that it was made of, {OR_ELSE}")
            for number in range(self._counts.get(name, 0), target):
                try:
                    self._original(ask)
                except tf.errors.OutOfRangeError:
                    raise SnapshotError(
                        f"iterator {name!r} ends after {number} elements, but the snapshot was taken after {target} of them: "
                        f"give it the same data, in mini-batches of the same global size, {OR_ELSE}") from None
            self._counts[name] = max(target, self._counts.get(name, 0))
        self._targets = {}

    def ends(self, seen: Seen) -> None:
        """After a run."""
        for name in seen.takes:
            self._counts[name] = self._counts.get(name, 0) + 1
        for name in seen.makes:
            self._counts[name] = 0
            if self._begins_anew:
                self._targets.pop(name, None)

    # ------------------------------------------------------------------------------------------------- state
    def position(self) -> Dict[str, int]:
        """How many elements each iterator has given."""
        return {**self._counts, **self._targets}

    def move(self, position: Dict[str, int], begins_anew: bool) -> None:
        """The next run that trains finds the iterators at this position.

        Args:
            begins_anew: except those that the script initialises before that run; otherwise it had initialised these before
                the snapshot, too.
        """
        self._targets, self._begins_anew = dict(position), begins_anew

    def read(self) -> Tuple[List[Piece], List[Any]]:
        """All variables, as :meth:`whale_tf.runtime.snapshots.variables.Variables.read`."""
        if not self._is_chief:
            return [], []
        values = self._values(self._variables())
        pieces = [Piece(name, name, name, value.shape, (0,) * value.ndim, True) for name, value in values.items()]
        return pieces, list(values.values())

    def write(self, values: Iterable[SnapshotValue]) -> None:
        """Gives the variables new values.

        Raises:
            SnapshotError: the graph has other variables.
        """
        variables = self._variables()
        for value in values:
            variable = variables.pop(value.key, None)
            if variable is None:
                raise SnapshotError(f"the snapshot has a value of {value.name!r}, which this graph does not have; build the "
                                    f"graph that it was made of, {OR_ELSE}")
            if not variable.shape.is_compatible_with(value.value.shape) or (
                    variable.dtype.base_dtype.as_numpy_dtype != value.value.dtype):
                raise SnapshotError(
                    f"variable {value.name!r} is {variable.dtype.base_dtype.name} {variable.shape}, but {value.value.dtype} "
                    f"{value.value.shape} in the snapshot; build the graph that it was made of, {OR_ELSE}")
            self.session.run(variable.initializer, {variable.initializer.inputs[1]: value.value})
        missing = sorted(self._values(variables))
        if missing:
            raise SnapshotError("the snapshot has no value of {}; build the graph that it was made of, {}".format(
                ", ".join(missing), OR_ELSE))

    def check(self) -> None:
        """All is checked in :meth:`write`: a graph has all its variables before it trains."""

    def _variables(self) -> Dict[str, Any]:
        groups = (v1.GraphKeys.GLOBAL_VARIABLES, v1.GraphKeys.LOCAL_VARIABLES)
        return {variable.op.name: variable for group in groups for variable in self.graph.get_collection(group)}

    def _values(self, variables: Dict[str, Any]) -> Dict[str, Any]:
        """The values of those that are initialised."""
        try:
            return {name: np.asarray(value) for name, value in self.session.run(variables).items()} if variables else {}
        except tf.errors.FailedPreconditionError:
            if len(variables) == 1:
                return {}
            return {name: value for one in variables.items() for name, value in self._values(dict([one])).items()}


class SessionRun:
    """A ``MonitoredTrainingSession``, whose steps are its runs that train.

    Args:
        keeps_begin: whether there is a snapshot before the first step: the next start may find other values in a checkpoint.

    Attributes:
        is_driven: a loop over ``wh.resume`` makes its steps, and takes its snapshots.
    """

    def __init__(self, state: SessionState, run: Run, keeps_begin: bool) -> None:
        self.variables, self.run = state, run
        self.is_driven = False
        self._step = 0
        self._is_done = False  # a run has trained since a snapshot could be taken last
        if run.found is not None:
            self._step = run.found.step
            state.write(run.found.variables())
            state.move(run.told["iterators"], begins_anew=False)
            run.says(f"{run.name} goes on after {self._step} steps: snapshot {run.found.folder}")
        elif keeps_begin:
            run.wait_for(self._take())
        run.begins(self._step)

    @property
    def is_open(self) -> bool:
        session = self.variables.session
        return session is not None and not session._closed

    def begins(self) -> None:
        """Before a run that trains."""
        if self._is_done and not self.is_driven:
            self._is_done = False
            self.run.step_done(self._step, self._take)

    def ends(self) -> None:
        """After a run that has trained."""
        self._step, self._is_done = self._step + 1, True

    def closes(self) -> None:
        """Training is over."""
        if self._step and not self.is_driven:
            self.run.finished(self._step, "was closed")

    def _take(self) -> Job:
        return self.run.take(self._step, {"iterators": self.variables.position()}, {}, self.variables.read)


class Sessions:
    """The Sessions that train, and what says so.

    Args:
        state_of: makes the state of a session.
        run_of: the training run of a graph.
        says: takes a message to the user.
    """

    def __init__(self, state_of: Callable[[Any], SessionState], run_of: Callable[[tf.Graph], Run],
                 says: Callable[[str], None]) -> None:
        self._state_of, self._run_of, self._says = state_of, run_of, says
        self._states: MutableMapping[Any, SessionState] = weakref.WeakKeyDictionary()
        self._runs: MutableMapping[Any, SessionRun] = weakref.WeakKeyDictionary()
        self._said = {""}

    def state(self, session: Any) -> SessionState:
        """What is in snapshots of a session."""
        if session not in self._states:
            self._states[session] = self._state_of(session)
        return self._states[session]

    def run(self, session: Any) -> Optional[SessionRun]:
        """The run of a session that was made by a MonitoredTrainingSession."""
        return self._runs.get(session)

    def made(self, session: Any, keeps_begin: bool) -> SessionRun:
        """A MonitoredTrainingSession has made a session, with values for all variables."""
        self._runs[session] = SessionRun(self.state(session), self._run_of(session.graph), keeps_begin)
        return self._runs[session]

    def around(self, session: Any, fetches: Any, is_in_loop: bool, refuse: Callable[[], Any]) -> Iterator[None]:
        """Around each run of a session.

        Args:
            is_in_loop: a loop over ``wh.resume`` makes its steps.
            refuse: is called before a run that trains and of which no snapshots would be taken.
        """
        state, run = self.state(session), self._runs.get(session)
        seen = state.seen(fetches)
        if seen.trains:
            if not is_in_loop and (run is None or run.is_driven):
                refuse()
            if run is not None:
                run.begins()
            state.begins(seen)
            self._tell(seen, is_in_loop)
        yield
        seen = state.seen(fetches)  # the run may have rewritten the graph
        state.ends(seen)
        if seen.trains and run is not None:
            run.ends()

    def _tell(self, seen: Seen, is_in_loop: bool) -> None:
        texts = [seen.draws and f"op {seen.draws!r} draws random numbers from a state that TensorFlow does not give out, so a "
                 "run that goes on draws others; use stateless ops"]
        if seen.is_fed and not is_in_loop:
            texts.append("the script feeds its training runs, and what it feeds a run that goes on is its own affair; if these "
                         "are the data, go through them with wh.resume(data, session=...)")
        for text in texts:
            if text not in self._said:
                self._said.add(text)
                self._says(text)


def _seen(ops: Sequence[tf.Operation]) -> Seen:
    needed = ancestors(ops)
    trains = any(updates(op) for op in needed)
    asks = [op for op in needed if op.type.startswith(_NEXT)]
    refused = next((f"op {op.name!r} takes from a queue" for op in needed if op.type.startswith("QueueDequeue")
                    and not op.name.startswith(SCOPE + "/")), "")  # other than messages between processes
    for op in asks:
        iterator = _iterator(op)
        if op._get_control_flow_context() is not None:
            refused = f"op {op.name!r} asks an iterator inside of a condition or loop"
        elif iterator.type.startswith("IteratorFromStringHandle"):
            refused = f"op {op.name!r} asks an iterator that a string names"
    for op in needed:
        inside = next((tensor.op for tensor in op.inputs if tensor.op.type in _ITERATORS), None)
        if inside is not None and not op.type.startswith((_NEXT, _MAKE, "Iterator")):
            refused = f"op {op.name!r} ({op.type}) asks iterator {inside.name!r} inside of a function"
    draws = next((op.name for op in needed if op.type in RANDOM and op.op_def is not None and op.op_def.is_stateful
                  and not any(tensor.dtype == tf.resource for tensor in op.inputs)), "") if trains else ""
    return Seen(trains, sorted(_iterator(op).name for op in asks),
                sorted({op.inputs[1].op.name for op in needed if op.type == _MAKE}), refused, draws,
                any(op.type == "Placeholder" for op in needed))


def _iterator(op: tf.Operation) -> tf.Operation:
    """The iterator that an op asks."""
    return op.inputs[0].op
