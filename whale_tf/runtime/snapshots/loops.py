"""A training loop of the script's own over data that go on where they ended (``wh.resume``).

::

    for epoch, batches in wh.resume(dataset, epochs=3):
        for batch in batches:          asks for the next mini-batch: the step before is done; snapshot, if it is time
            step(batch)
        validate()                     asks for the next epoch: likewise

Which step is done is known when the loop asks for what comes next; so a snapshot has all that the script did after the step.  At
an epoch's last step this is when the script asks for the next epoch: there is no snapshot between them, and a resumed epoch
always has a step left.
"""
from __future__ import annotations

import random
from typing import Any, Callable, ContextManager, Dict, Iterable, Iterator, NamedTuple, Optional, Tuple, Union

import numpy as np

from whale_tf._tf_compat import tf
from whale_tf.errors import ConfigError, SnapshotError
from whale_tf.processes.datasets import SHUFFLED_ANEW, is_shuffled_anew
from whale_tf.runtime.snapshots.run import Run
from whale_tf.runtime.snapshots.sessions import SessionState
from whale_tf.runtime.snapshots.values import NotData, from_json, to_json
from whale_tf.runtime.snapshots.variables import OR_ELSE, LoopVariables
from whale_tf.runtime.snapshots.writing import Job

Epochs = Iterator[Tuple[int, Iterator[Any]]]


class Position(NamedTuple):
    """Where a loop is.

    Attributes:
        step: steps since its beginning.
        epoch: that is under way, or comes next.
        batch: elements of the data of this epoch that a step was made with.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0


class Loop:
    """See the module's docstring.

    Args:
        data: gives an iterator in each epoch.
        epochs: their number.
        kept: values of the script's own that go on, too.
        variables: those of the loop; a Session has iterators, too.
        running: is entered while the loop runs.
        is_current: whether no other training has begun since.
    """

    def __init__(self, data: Iterable[Any], epochs: int, kept: Dict[Any, Any], variables: Union[LoopVariables, SessionState],
                 run: Run, running: Callable[[Any], ContextManager], is_current: Callable[[Any], bool]) -> None:
        self.variables, self.run = variables, run
        self._data, self._epochs, self._kept = data, epochs, kept
        self._running, self._is_current = running, is_current
        self._position = Position()
        self._skips = 0  # elements of the first epoch that steps were made with in an earlier process
        self._randoms = self._at_begin = _randoms()  # before the next element is taken; when the epoch began
        self._iterator: Iterator[Any] = iter(())
        self._is_given = False  # the loop has an element with which it is making a step
        self._is_checked = False

    def epochs(self) -> Epochs:
        """Each epoch's number and its elements."""
        with self._running(self):
            self._begin()
            for epoch in range(self._position.epoch, self._epochs):
                self._epoch_begins()
                yield epoch, _Batches(self)
                self._epoch_ends(epoch)
            self._finish()

    # ------------------------------------------------------------------------------------------------- epochs and steps
    def _begin(self) -> None:
        found = self.run.found
        if isinstance(self._data, tf.data.Dataset) and is_shuffled_anew(self._data):
            self.run.says(f"wh.resume has {SHUFFLED_ANEW}")
        if found is None:
            self.run.begins(0)
            return
        if "data" not in self.run.told:
            raise SnapshotError(
                f"the snapshot {found.folder!r} was taken without a loop over wh.resume; train as then, {OR_ELSE}")
        self._position = Position(**self.run.told["position"])
        if self.run.told["data"] != _kind(self._data):
            raise SnapshotError(f"wh.resume has data of the type {_kind(self._data)}, but had {self.run.told['data']} when the "
                                f"snapshot {found.folder!r} was taken; give it the same, {OR_ELSE}")
        self.variables.write(found.variables())
        self.variables.move(self.run.told["iterators"], begins_anew=self._position.batch == 0)
        self._kept.clear()
        self._kept.update(from_json(self.run.told["kept"], self.run.arrays))
        where = f"goes on in epoch {self._position.epoch + 1}, after {self._position.batch} steps of it"
        if self._position.epoch >= self._epochs:
            where = "has finished in an earlier run, and does not train again"
        self.run.says(f"{self.run.name} {where}: snapshot {found.folder}, step {self._position.step}")
        for _ in range(self._position.epoch):  # a shuffle of tf.data depends on how many there were
            iter(self._data)
        self._skips = self._position.batch
        self._randoms, self._at_begin = (from_json(self.run.told[name], self.run.arrays) for name in ("randoms", "at_begin"))
        _set_randoms(self._at_begin if self._skips else self._randoms)
        self.run.begins(self._position.step)

    def _epoch_begins(self) -> None:
        skips, self._skips = self._skips, 0
        if not skips:
            self._at_begin = _randoms()
        self._iterator = iter(self._data)
        for number in range(skips):
            try:
                next(self._iterator)
            except StopIteration:
                raise SnapshotError(
                    f"the data of wh.resume end after {number} elements, but the snapshot was taken after {skips} of them: give "
                    f"it the same data, in mini-batches of the same global size, {OR_ELSE}") from None
        if skips:
            _set_randoms(self._randoms)
            self.run.begins(self._position.step)

    def next(self) -> Any:
        """The next element of this epoch.

        Raises:
            StopIteration: there is none.
            SystemExit: a process was asked to end, and the snapshot is written.
        """
        is_done = self._step_done()
        self._randoms = _randoms()
        element = next(self._iterator)
        if is_done:
            self.run.step_done(self._position.step, self._take)
        self._is_given = True
        return element

    def _step_done(self) -> bool:
        """Whether a step has been made since this was asked last."""
        if not self._is_current(self):
            raise ConfigError("another fit or wh.resume has begun inside of a loop over wh.resume, and snapshots are of one at a "
                              "time; train one after the other, or leave out snapshot.path")
        if not self._is_given:
            return False
        self._is_given = False
        self._position = self._position._replace(step=self._position.step + 1, batch=self._position.batch + 1)
        if not self._is_checked:
            self._is_checked = True
            self.variables.check()
        return True

    def _epoch_ends(self, epoch: int) -> None:
        self._step_done()
        self._position = Position(self._position.step, epoch + 1)
        self._randoms = self._at_begin = _randoms()
        if epoch + 1 < self._epochs:
            self.run.step_done(self._position.step, self._take, must_agree=True)

    def _finish(self) -> None:
        if self.run.found is not None and self.run.found.step == self._position.step:
            return
        if self.variables.waiting:
            self.run.says("the snapshot had values of {}, which the script has not made since: if they belong to what it trains, "
                          "this is another model".format(", ".join(self.variables.waiting)))
        self._take()
        self.run.finished(self._position.step)

    def _take(self) -> Job:
        arrays: Dict[str, Any] = {}
        state = {"position": self._position._asdict(), "iterators": self.variables.position(), "data": _kind(self._data),
                 "kept": {"dict": [[self._told(name, name, arrays, f"{number}/key"), self._told(name, value, arrays, f"{number}")]
                                   for number, (name, value) in enumerate(self._kept.items())]},
                 "randoms": to_json(_as_arrays(self._randoms), arrays, "randoms"),
                 "at_begin": to_json(_as_arrays(self._at_begin), arrays, "at_begin")}
        return self.run.take(self._position.step, state, arrays, self.variables.read)

    @staticmethod
    def _told(name: Any, value: Any, arrays: Dict[str, Any], place: str) -> Any:
        try:
            return to_json(value, arrays, f"kept/{place}")
        except NotData:
            raise ConfigError(
                f"wh.resume(state=...) has {name!r}: {value!r}, but a snapshot can hold None, numbers, texts, arrays of numbers, "
                "tensors, and lists, tuples and dicts of these; keep it in a tf.Variable, and leave that out: variables go on by "
                "themselves") from None


class _Batches:
    """The elements of one epoch."""

    def __init__(self, loop: Loop) -> None:
        self._loop: Optional[Loop] = loop

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._loop is None:
            raise StopIteration
        try:
            return self._loop.next()
        except StopIteration:
            self._loop = None
            raise


def check_data(data: Any, epochs: Any, state: Any) -> None:
    """Checks the arguments of ``wh.resume``.

    Raises:
        ConfigError: they cannot be gone through so often, or are of other types.
    """
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise ConfigError(f"wh.resume(epochs={epochs!r}): the number of epochs must be a whole number from 1 on")
    if not isinstance(state, dict):
        raise ConfigError(f"wh.resume(state={state!r}) must be a dict, of which the loop changes values: state = {{'best': 0.0}}")
    try:
        is_once = iter(data) is data if not isinstance(data, tf.data.Dataset) else False
    except TypeError:
        raise ConfigError(
            f"wh.resume({data!r}) needs a tf.data.Dataset, or something else that a for loop goes through") from None
    if is_once and epochs > 1:
        raise ConfigError(
            f"wh.resume({data!r}, epochs={epochs}) can be gone through only once; give it a tf.data.Dataset, a list, or an "
            "object whose __iter__ begins anew; or leave out epochs")


def plain(data: Iterable[Any], epochs: int) -> Epochs:
    """The same loop without snapshots."""
    for epoch in range(epochs):
        yield epoch, iter(data)


def _kind(data: Any) -> str:
    return "tf.data.Dataset" if isinstance(data, tf.data.Dataset) else type(data).__name__


def _randoms() -> Tuple[Any, Any]:
    """The states of Python's and NumPy's generators of random numbers."""
    return random.getstate(), np.random.get_state()


def _as_arrays(state: Tuple[Any, Any]) -> Tuple[Any, Any]:
    (version, words, gauss), of_numpy = state
    return (version, np.array(words, np.uint32), gauss), of_numpy


def _set_randoms(state: Tuple[Any, Any]) -> None:
    (version, words, gauss), of_numpy = state
    random.setstate((version, tuple(map(int, words)), gauss))
    np.random.set_state(of_numpy)
