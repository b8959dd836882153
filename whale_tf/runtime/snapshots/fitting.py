"""One call of Keras' ``fit``: its position in the data, the state of its callbacks, and when snapshots are taken.

::

    on_train_begin    a snapshot was found: the model is built, and fit begins with its epoch
    on_epoch_begin    found: variables, callbacks, metrics as they were; the mini-batches before the position are skipped
                      otherwise: snapshot, if it is time
    on_train_batch_end   snapshot, if it is time; or the last one and the end, if any process was asked to end
    on_train_end      snapshot of a finished run: the same call does not train again

Our callback is the last of all, so a snapshot has what the others have done after a step, and they do not see a resumed epoch
begin twice.  With Keras' ``BackupAndRestore``, snapshots are taken when it saves (see backups); one at an epoch's end is from
before the next epoch begins, so callbacks then see it begin.  Keras makes iterators of its own accord; which shuffle a tf.data
pipeline is at depends on how many have been made.
"""
from __future__ import annotations

import functools
import os
import random
import sys
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

from whale_tf._tf_compat import tf
from whale_tf.errors import SnapshotError
from whale_tf.processes.datasets import SHUFFLED_ANEW, Adapter, is_shuffled_anew
from whale_tf.runtime.snapshots.backups import Backup
from whale_tf.runtime.snapshots.joining import PLACES, places_of
from whale_tf.runtime.snapshots.run import Run
from whale_tf.runtime.snapshots.values import GONE, NotData, attributes, changed, from_json, put_back, to_json
from whale_tf.runtime.snapshots.variables import OR_ELSE, Variables
from whale_tf.runtime.snapshots.writing import Job

TRAINER = "keras.src.backend.tensorflow.trainer"  # Keras 3's module
_BAR = "ProgbarLogger"  # there or not, as ``verbose`` says; begins anew in each epoch


class Position(NamedTuple):
    """Where ``fit`` is.

    Attributes:
        step: steps since the beginning of the call; a step is one global mini-batch.
        epoch: that is under way, or comes next.
        batch: mini-batches of this epoch that have been trained on.
        made: iterators that Keras had made of the data before the one that it is at.
        pulled: mini-batches that it has taken from that one.
        over: epochs of this call that are over.
        number: mini-batches of an epoch; None: not known yet.
        is_finished: ``fit`` has ended.
        is_stopped: and a callback has stopped it.
        is_between: an epoch has ended, and the next one has not begun.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    made: int = 0
    pulled: int = 0
    over: int = 0
    number: Optional[int] = None
    is_finished: bool = False
    is_stopped: bool = False
    is_between: bool = False


class Fit:
    """See the module's docstring.

    Args:
        run: takes its snapshots.
        backup: decides when, by Keras' callback; None: ``snapshot.path`` is set.
        is_any: whether something is so in any of the processes.
        write: see :class:`whale_tf.capture.callbacks.Callbacks`.
    """

    def __init__(self, model: Any, variables: Variables, run: Run, backup: Optional[Backup] = None,
                 is_any: Callable[[bool], bool] = bool, write: Callable[[Callable[[], Any]], Any] = lambda original: original(),
                 ) -> None:
        self.variables, self.run, self._model = variables, run, model
        self._backup, self._is_any, self._write = backup, is_any, write
        self._or_else = OR_ELSE if backup is None else or_else(backup)
        self._saves: Optional[Callable[[], Any]] = None  # writes Keras' files, when all callbacks have acted
        self._has_taken = False
        self._is_first = True  # no epoch has begun
        self._known: Optional[Tuple[Dict[int, str], Dict[str, List[str]]]] = None  # keys of variables, places in Keras' file
        self._found = run.found
        self._told, self._arrays = run.told, run.arrays
        self._start = Position()  # where this process goes on
        self._position = Position()
        self._skips = False  # the next epoch begins in its middle
        self._data: Any = None  # Keras' iterator over epochs
        self._made = self._pulled = 0
        self._order: Any = None  # state of Python's generator when the last iterator was made
        self._callbacks: Any = None
        self._last: Any = None
        self._given: List[Dict[str, Any]] = []  # attributes of the callbacks before training
        self._logs: Any = None  # of the last step
        if run.found is not None:
            self._start = self._position = Position(**from_json(self._told["position"], {}))

    # ------------------------------------------------------------------------------------------------- data
    def take_data(self, epochs: Any) -> None:
        """``epochs`` is Keras' iterator over the training data."""
        if self._data is None:
            self._data = epochs
            epochs._distributed_dataset = _Counted(epochs._distributed_dataset, self._iterator_made)
            epochs._enumerate_iterator = functools.partial(self._steps, epochs._enumerate_iterator)
            self._tell_order(epochs.data_adapter)

    def _tell_order(self, adapter: Any) -> None:
        """Says it if a run that goes on may see other data.  With snapshot.path, a shuffle made after wh.init has a seed."""
        data, text = getattr(adapter, "_dataset", None), ""
        if self._backup is not None and type(getattr(adapter, "_adapter", adapter)).__name__ == "GeneratorDataAdapter":
            text = "a generator: a run that goes on is exact if a new one yields the same again"
        elif isinstance(data, tf.data.Dataset) and is_shuffled_anew(data):
            text = SHUFFLED_ANEW
        if text:
            self.run.says(f"{'snapshot.path' if self._backup is None else 'BackupAndRestore'}: fit trains on {text}")

    def _iterator_made(self) -> None:
        self._made, self._pulled = self._made + 1, 0
        self._order = random.getstate() if hasattr(self._data.data_adapter, "py_dataset") else None

    def _steps(self, original: Callable[[], Iterator[Tuple[int, int, Any]]]) -> Iterator[Tuple[int, int, Any]]:
        """Keras' steps of an epoch; in the first one of a resumed run, those behind the position."""
        start, self._skips = self._start if self._skips else None, False
        if start is not None:
            self._renew(start)
        for begin, end, iterator in original():
            if start is not None and begin == 0:
                self._skip(iterator, start)
            if start is None or begin >= start.batch:
                self._pulled += end - begin + 1
                yield begin, end, iterator

    def _renew(self, start: Position) -> None:
        """What has happened to the data in the epochs before."""
        adapter, dataset = self._data.data_adapter, self._data._distributed_dataset.dataset
        if hasattr(adapter, "py_dataset"):
            for _ in range(start.over):
                adapter.on_epoch_begin()
                adapter.on_epoch_end()
        if isinstance(adapter, Adapter):
            adapter.passed(start.made)
        else:
            for _ in range(start.made - self._made):
                iter(dataset)
        self._made = start.made
        self._data._num_batches = start.number
        order = from_json(self._told.get("order"), self._arrays)
        if order is not None:
            random.setstate(order)

    def _skip(self, iterator: Any, start: Position) -> None:
        for number in range(start.pulled):
            try:
                next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                raise SnapshotError(
                    f"the data of fit end after {number} mini-batches, but the snapshot was taken after {start.pulled} of them: "
                    f"train on the same data, in mini-batches of the same global size, {self._or_else}") from None
        self._pulled = start.pulled
        self.run.begins(start.step)
        self._data._steps_seen += start.pulled - start.batch

    # ------------------------------------------------------------------------------------------------- callbacks
    def take_callbacks(self, callbacks: Any) -> None:
        """``callbacks`` is Keras' list of callbacks of the training run."""
        if self._callbacks is not None:
            return
        self._callbacks = callbacks
        if self._backup is not None and self._found is not None:
            self._leave_if_other()
        if self._found is not None:
            for callback in callbacks.callbacks:
                if hasattr(callback, "csv_file") and hasattr(callback, "append"):
                    callback.append = True  # CSVLogger: rows of epochs before remain
        self._given = [attributes(one, {}, "") for one in callbacks.callbacks]
        self._last = _Last.of(self)
        self._last.set_model(self._model)
        callbacks.callbacks.append(self._last)
        callbacks._async_train = False  # callbacks and snapshots see one step after the other

    def close(self) -> None:
        """Leaves the list of callbacks and the model as they were, and no file open."""
        self.run.close()
        if self._callbacks is not None:
            self._callbacks.callbacks.remove(self._last)
        self._model.__dict__.pop("_get_metrics_result_or_logs", None)

    def train_begins(self) -> None:
        if self._found is None:
            return
        self._build()
        self._model._initial_epoch = sys.maxsize if self._start.is_stopped else self._start.epoch
        if self._start.is_finished or self._start.is_between:
            self._restore()

    def epoch_begins(self, epoch: int) -> None:
        is_first, self._is_first = self._is_first, False
        if self._found is not None:
            self._restore()
            return
        self._position = self._at(epoch, 0)
        if not is_first:
            self._position = self._position._replace(over=self._position.over + 1)
            self._step_done(must_agree=True)

    def step_done(self, epoch: int, end: int, logs: Any) -> None:
        """After the step, or several of them, whose last one is number ``end`` of the epoch."""
        self._logs = dict(logs or {})
        trained = end + 1 - (self._position.batch if self._position.epoch == epoch else 0)
        self._position = self._at(epoch, end + 1)._replace(step=self._position.step + trained)
        self.variables.check()
        if self._saves is not None:
            self._back_up(self._position)
        self._step_done()

    def epoch_ends(self, epoch: int) -> None:
        if self._saves is not None:
            self._back_up(self._at(epoch + 1, 0)._replace(over=self._position.over + 1, is_between=True))

    def train_ends(self) -> None:
        """The run is finished, and is not repeated; with ``BackupAndRestore``, whose files are gone, it is."""
        if self._backup is not None:
            self.run.finished(self._position.step, is_quiet=self.run.spent().starts == 1)
            return
        epochs = self._callbacks.params["epochs"]
        stopped = bool(self._model.stop_training) or self._start.is_stopped
        if not (self._start.is_finished and self._position.step == self._start.step):
            over = self._position.over + (self._position.batch > 0)
            self._position = self._at(epochs, 0)._replace(over=over, is_finished=True, is_stopped=stopped)
            self._take()
            self.run.finished(self._position.step)

    def _at(self, epoch: int, batch: int) -> Position:
        """The position after so many mini-batches of an epoch."""
        data = self._data
        at_iterator = batch > 0 or data.steps_per_epoch is not None and self._made > 0
        made, pulled = (self._made - 1, self._pulled) if at_iterator else (self._made, 0)
        return Position(self._position.step, epoch, batch, made, pulled, self._position.over, data._num_batches)

    def _step_done(self, must_agree: bool = False) -> None:
        self.run.step_done(self._position.step, self._take, must_agree)

    # ------------------------------------------------------------------------------------------------- backups
    def backs_up(self, callback: Any, method: str, original: Callable[[], Any]) -> bool:
        """Whether a method of Keras' ``BackupAndRestore`` is left out here: because there is something better to go on with; or
        because its files are written later, or by another process."""
        if self._backup is None or callback is not self._backup.callback:
            return False
        if method == "on_train_begin":
            return self._found is not None
        if method == "_save_model":
            self._saves = original
            return True
        self.run.close()  # Keras deletes the directory
        return False

    def _back_up(self, position: Position) -> None:
        assert self._backup is not None and self._saves is not None
        save, self._saves = self._saves, None
        if not self._has_taken and self.run.told is None:
            self.run.forget_others()
        self._has_taken = True
        job = self._take(position)
        self._write(functools.partial(self._backup.write, save, os.path.basename(job.folder), lambda: self.run.wait_for(job)))

    def _leave_if_other(self) -> None:
        """Leaves it to Keras to restore what it can if the script has changed."""
        assert self._backup is not None
        number = None if self._data is None else self._data.num_batches
        wrong = self._other_callbacks()
        if not wrong and None not in (number, self._start.number) and number != self._start.number:
            wrong = f"an epoch has {number} steps, but had {self._start.number}"
        if self._is_any(bool(wrong)):
            self._found = self.run.told = None
            self._start = self._position = Position()
            self.run.says(f"{self._backup.directory} has backups of another training ({wrong or 'in another process'}), which "
                          "Keras restores as it does without whale_tf: the weights, and the number of the epoch")

    # ------------------------------------------------------------------------------------------------- state
    def _take(self, position: Optional[Position] = None) -> Job:
        arrays: Dict[str, Any] = {}
        position = self._position if position is None else position
        state: Dict[str, Any] = {"position": to_json(position._asdict(), arrays, "position")}
        known = self.variables.keys()
        state["callbacks"] = [
            [type(one).__name__, changed(given, attributes(one, arrays, f"callbacks/{number}", known))]
            for number, (one, given) in enumerate(zip(self._others(), self._given))]
        if self.run.is_chief:
            state[PLACES] = self._places_in_file()
        for name, value in (("logs", self._logs), ("order", self._order)):
            try:
                state[name] = to_json(value, arrays, name)
            except NotData:
                pass  # logs of a train_step of the user's own
        return self.run.take(position.step, state, arrays, self.variables.read)

    def _places_in_file(self) -> Dict[str, List[str]]:
        """Where Keras' weights file has the variables, by their keys; none of those that are still to be made."""
        keys = self.variables.keys()
        if self._known is None or len(keys) != len(self._known[0]):
            self._known = keys, places_of(self._model, keys)
        return self._known[1]

    def _others(self) -> List[Any]:
        return [one for one in self._callbacks.callbacks if one is not self._last]

    def _build(self) -> None:
        """Makes the variables of the model, its metrics and its optimizer: maybe no step remains that would make them.  How a
        train_step of the user's own builds the optimizer is not known; its first step makes those variables."""
        optimizer = self._model.optimizer
        is_built = optimizer is None or optimizer.built or type(self._model).train_step.__module__ == TRAINER
        spec = self._data.data_adapter.get_tf_dataset().element_spec
        try:
            if not is_built:
                optimizer.built = True  # so Keras takes it
            with self._model.distribute_strategy.scope():
                self._model._symbolic_build(data_batch=tf.nest.map_structure(
                    lambda one: None if isinstance(one, tf.OptionalSpec) else one, spec))
        except (ValueError, RuntimeError, NotImplementedError):
            if self._start.is_finished:
                raise
            # a model without ``call``: its first step makes the variables
        finally:
            if not is_built:
                optimizer.built = False

    def _restore(self) -> None:
        """Gives variables and callbacks what they had."""
        found, self._found = self._found, None
        assert found is not None
        number = self._data.num_batches
        if None not in (number, self._start.number) and number != self._start.number:
            raise SnapshotError(
                f"an epoch of fit has {number} steps, but had {self._start.number} when the snapshot {found.folder!r} was taken: "
                f"train on the same data, in mini-batches of the same global size (all processes together), {self._or_else}")
        self.variables.write(found.variables())
        for callback, state in self._states():
            if state.get("monitor_op") == GONE:
                callback._set_monitor_op()  # at its first epoch's end Keras chose how to compare, and changed min_delta
            for name, value in state.items():
                if value != GONE:
                    put_back(callback, name, value, self._arrays)
        self._logs = from_json(self._told.get("logs"), self._arrays)
        self._skips = True
        self.run.begins(self._start.step)
        where = "fit has finished in an earlier run, and does not train again" if self._start.is_finished else (
            f"fit goes on in epoch {self._start.epoch + 1}, after {self._start.batch} steps of it")
        self.run.says(f"{where}: snapshot {found.folder}, step {self._start.step}")
        if self._start.batch:
            original = self._model._get_metrics_result_or_logs

            def results(logs: Any) -> Any:
                """If no step of the epoch remains, its logs are those of the last step."""
                self._model.__dict__.pop("_get_metrics_result_or_logs", None)
                return original(logs or self._logs)

            self._model.__dict__["_get_metrics_result_or_logs"] = results

    def _states(self) -> Iterator[Tuple[Any, Dict[str, Any]]]:
        """Each callback with its state.

        Raises:
            SnapshotError: the snapshot was taken with other callbacks.
        """
        wrong = self._other_callbacks()
        if wrong:
            raise SnapshotError(f"fit has {wrong} when the snapshot was taken; give it the same, {self._or_else}")
        others, told = self._own_and_told()
        return ((one, state) for one, (_, state) in zip(others, told))

    def _other_callbacks(self) -> str:
        """How the callbacks differ from those of the snapshot; empty: they do not."""
        others, told = self._own_and_told()
        names = [type(one).__name__ for one in others]
        if names == [name for name, _ in told]:
            return ""
        return "the callbacks {}, but had {}".format(", ".join(names), ", ".join(name for name, _ in told))

    def _own_and_told(self) -> Tuple[List[Any], List[Tuple[str, Dict[str, Any]]]]:
        told = [(name, state) for name, state in self._told["callbacks"] if name != _BAR]
        others = [one for one in self._others() if type(one).__name__ != _BAR]
        if not self.run.is_chief:  # only process 0 has those that write files
            names = [type(one).__name__ for one in others]
            told = [(name, state) for name, state in told if name in names]
        return others, told


def or_else(backup: Backup) -> str:
    """What can be done in place of going on, for messages."""
    return f"or delete {backup.directory!r}"


class _Counted:
    """A dataset of which Keras makes iterators."""

    def __init__(self, dataset: Any, made: Callable[[], None]) -> None:
        self.dataset, self._note = dataset, made

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)

    def __iter__(self) -> Any:
        iterator = iter(self.dataset)
        self._note()
        return iterator


class _Last:
    """The last callback of a training run."""

    _kind: Any = None

    @classmethod
    def kind(cls) -> Any:
        """Keras' class of callbacks, with our methods."""
        if cls._kind is None:
            base: Any = sys.modules["keras.src.callbacks.callback"].Callback

            class Last(base):
                fit: Any = None
                epoch = 0

                def on_train_begin(self, logs: Any = None) -> None:
                    self.fit.train_begins()

                def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                    self.epoch = epoch
                    self.fit.epoch_begins(epoch)

                def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                    self.fit.step_done(self.epoch, batch, logs)

                def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                    self.fit.epoch_ends(epoch)

                def on_train_end(self, logs: Any = None) -> None:
                    self.fit.train_ends()

            cls._kind = Last
        return cls._kind

    @classmethod
    def of(cls, fit: Fit) -> Any:
        last = cls.kind()()
        last.fit = fit
        return last
