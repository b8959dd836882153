"""Hooks around training steps: input pipelines, what Keras' ``fit`` iterates over, and who writes files.

In a job of several processes ``fit`` takes this process's share of the data; ``evaluate``, ``predict`` and validation take all of
it, in every process, so that all log the same numbers.  Only process 0 writes.
"""
from __future__ import annotations

import contextlib
import functools
import sys
import threading
from typing import Any, Iterator, Sequence

from whale_tf._tf_compat import DatasetV1, DatasetV1Adapter, seeded, tf
from whale_tf.capture.callbacks import Callbacks, Function, Place
from whale_tf.capture.tapes import is_body, traced_function

_KERAS_2 = ("keras.src", "tf_keras.src")  # of TensorFlow 2.13 to 2.15, and installed beside later ones
_OLD_KERAS_2 = ("keras", "tensorflow.python.keras")  # with these, several processes do not train functions
_WRITERS = ("CSVLogger", "RemoteMonitor", "TensorBoard")  # callbacks that only write


class _Thread(threading.local):
    """Attributes:
        depth: number of running methods of Keras models that themselves iterate over datasets.
        expects_data: ``fit`` has begun, but has not yet made an iterator of its training data.
        is_evaluating: ``evaluate`` or ``predict`` is running.
        is_called: a tf.function has been called in eager execution, and is running or being traced for that.
    """

    depth = 0
    expects_data = False
    is_called = False
    is_evaluating = False


_thread = _Thread()


def iterates() -> bool:
    """Whether Keras is iterating over datasets now."""
    return _thread.depth > 0


def attributes() -> Iterator[Place]:
    """The attributes that are hooked in every loaded Keras."""
    for root in (*_KERAS_2, *_OLD_KERAS_2):
        yield from _of_keras_2(root)
    yield from _of_keras_3()


def _modules(root: str, *names: str) -> Sequence[Any]:
    """Modules of a Keras; none, if they are not all loaded."""
    found = [sys.modules.get(f"{root}.{name}") for name in names]
    return () if None in found else found


def _of_keras_2(root: str) -> Iterator[Place]:
    for training in _modules(root, "engine.training"):
        yield _runner(), "run", _run_in_loop
        yield training.Model, "fit", _fit
    found = _modules(root, "engine.training", "engine.data_adapter", "callbacks", "saving.saving_api")
    if found and root in _KERAS_2:
        training, handlers, lists, saving = found
        yield training.Model, "evaluate", _evaluating
        yield training.Model, "predict", _evaluating
        yield handlers.DataHandler, "__init__", _data_handler_init
        yield handlers.DataHandler, "_configure_dataset_and_inferred_steps", _configure_dataset
        yield lists.CallbackList, "__init__", _callback_list_init
        yield saving, "save_model", written_once
        yield saving, "save_weights", written_once


def _of_keras_3() -> Sequence[Place]:
    found = _modules("keras.src", "backend.tensorflow.trainer", "callbacks.callback_list", "callbacks.backup_and_restore",
                     "saving.saving_api")
    if not found:
        return ()
    trainer, lists, backup, saving = found
    return (
        (trainer.TensorFlowTrainer, "fit", _fit), (trainer.TensorFlowTrainer, "evaluate", _evaluating),
        (trainer.TensorFlowTrainer, "predict", _evaluating), (trainer.TFEpochIterator, "__init__", _epoch_iterator_init),
        (lists.CallbackList, "__init__", _callback_list_init),
        *((backup.BackupAndRestore, name, _backing_up) for name in ("on_train_begin", "_save_model", "on_train_end")),
        (saving, "save_model", written_once), (saving, "save_weights", written_once))


def _iterating(original: Function, callbacks: Callbacks) -> Function:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        _thread.depth += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            _thread.depth -= 1
    return method


def _evaluating(original: Function, callbacks: Callbacks) -> Function:
    """Of annotations in methods that evaluation shares with training (``compute_loss``, ``test_step``) nobody expects a plan."""
    iterating = _iterating(original, callbacks)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, _thread.is_evaluating = _thread.is_evaluating, True
        try:
            return iterating(self, *args, **kwargs)
        finally:
            _thread.is_evaluating = before
    return method


@contextlib.contextmanager
def called() -> Iterator[None]:
    """Around calls of tf.functions."""
    before, _thread.is_called = _thread.is_called, _thread.is_called or tf.executing_eagerly()
    try:
        yield
    finally:
        _thread.is_called = before


def is_called() -> bool:
    """Whether a function is traced because it is called, and not to be looked at or exported."""
    return _thread.is_called


def is_reading_aside() -> bool:
    """Whether Keras reads data in one of its loops that is not what ``fit`` trains on."""
    return _thread.depth > 0 and not _thread.expects_data


def is_evaluating() -> bool:
    """Whether Keras evaluates a model or predicts with it."""
    return _thread.is_evaluating


def _fit(original: Function, callbacks: Callbacks) -> Function:
    iterating = _iterating(original, callbacks)

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        _thread.expects_data = True
        try:
            return callbacks.fit(self, functools.partial(iterating, self), *args, **kwargs)
        finally:
            _thread.expects_data = False
    return fit


def _runner() -> Any:
    """The class with the method that runs Keras 2's training step if no tf.distribute strategy is open."""
    return next(kind for kind in type(tf.distribute.get_strategy()).__mro__ if "run" in vars(kind))


def _run_in_loop(original: Function, callbacks: Callbacks) -> Function:
    """Makes Keras 2's step a separate function, which can be divided, if ``steps_per_execution`` puts it into a loop's body."""

    def run(self: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        graph = traced_function()
        if _thread.depth and graph is not None and is_body(graph) and callbacks.divides():
            fn = tf.function(fn)
        return original(self, fn, *args, **kwargs)
    return run


def _data_handler_init(original: Function, callbacks: Callbacks) -> Function:
    """Makes ``fit`` shuffle arrays in the same way in all processes."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        seed = callbacks.shuffle(None) if _thread.expects_data else None
        with seeded(seed) if seed is not None else contextlib.nullcontext():
            original(self, *args, **kwargs)
    return __init__


def _configure_dataset(original: Function, callbacks: Callbacks) -> Function:
    """Gives ``fit`` this process's share of its training data, for which it makes its first handler."""

    def configure(self: Any, strategy: Any, x: Any, steps_per_epoch: Any, *args: Any, **kwargs: Any) -> None:
        original(self, strategy, x, steps_per_epoch, *args, **kwargs)
        if _thread.expects_data:
            _thread.expects_data = False
            number = self._inferred_steps if steps_per_epoch is None else None
            self._dataset, share = callbacks.training_batches(self._dataset, number)
            if number is not None:
                self._inferred_steps = number // share
    return configure


def _epoch_iterator_init(original: Function, callbacks: Callbacks) -> Function:
    """Replaces the data of ``fit``'s training iterator, which is the first iterator that it makes."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if _thread.expects_data:
            _thread.expects_data = False
            self.data_adapter = callbacks.training_data(self.data_adapter)
            self._num_batches = self.data_adapter.num_batches
            if hasattr(self.data_adapter, "epochs"):
                self._distributed_dataset = self.data_adapter.epochs
            callbacks.epochs(self)
    return __init__


def _callback_list_init(original: Function, callbacks: Callbacks) -> Function:
    def __init__(self: Any, given: Any = None, *args: Any, **kwargs: Any) -> None:
        given = kwargs.pop("callbacks", given)
        if given is not None and not callbacks.writes():
            given = [callback for callback in tf.nest.flatten(given) if not _only_writes(callback)]
        original(self, given, *args, **kwargs)
        callbacks.callback_list(self)
    return __init__


def _only_writes(callback: Any) -> bool:
    return any(kind.__name__ in _WRITERS and kind.__module__.startswith(("keras.", "tf_keras."))
               for kind in type(callback).__mro__)


# -- input pipelines -------------------------------------------------------------------------------------------------
def make_iterator(original: Function, callbacks: Callbacks) -> Function:
    """Methods of a dataset that make an iterator."""

    def make_iterator(self: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            return original(self, *args, **kwargs)
        dataset = callbacks.dataset(self)
        if dataset is self:
            return original(self, *args, **kwargs)
        adapted = dataset if isinstance(dataset, DatasetV1) else DatasetV1Adapter(dataset)
        return original(adapted, *args, **kwargs)
    return make_iterator


def make_initializer(original: Function, callbacks: Callbacks) -> Function:
    def make_initializer(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, callbacks.dataset(dataset), *args, **kwargs)
    return make_initializer


def dataset_iter(original: Function, callbacks: Callbacks) -> Function:
    def __iter__(self: Any) -> Any:
        return original(callbacks.dataset(self) if tf.executing_eagerly() and not iterates() else self)
    return __iter__


def dataset_loop(original: Function, callbacks: Callbacks) -> Function:
    """A loop over a dataset in a function."""

    def scan(ds: Any, init_state: Any, body: Any) -> Any:
        return original(ds if iterates() else callbacks.dataset(ds), init_state, body)
    return scan


def dataset_shuffle(original: Function, callbacks: Callbacks) -> Function:
    def shuffle(self: Any, buffer_size: Any, seed: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(self, buffer_size, callbacks.shuffle(seed) if tf.executing_eagerly() else seed, *args, **kwargs)
    return shuffle


def _backing_up(original: Function, callbacks: Callbacks) -> Function:
    """What Keras' ``BackupAndRestore`` does with its files."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return callbacks.backup(self, original.__name__, functools.partial(original, self, *args, **kwargs))
    return method


# -- files -------------------------------------------------------------------------------------------------------------
def written_once(original: Function, callbacks: Callbacks) -> Function:
    """For a function that writes files and returns nothing."""

    def write(*args: Any, **kwargs: Any) -> Any:
        return callbacks.write(functools.partial(original, *args, **kwargs))
    return write


def checkpoint_write(original: Function, callbacks: Callbacks) -> Function:
    """``tf.train.Checkpoint.write``."""

    def write(self: Any, file_prefix: Any, *args: Any, **kwargs: Any) -> Any:
        written = callbacks.write(functools.partial(original, self, file_prefix, *args, **kwargs))
        return written if callbacks.writes() else str(file_prefix)
    return write


def checkpoint_save(original: Function, callbacks: Callbacks) -> Function:
    """``tf.train.Checkpoint.save``, which counts its calls in all processes."""

    def save(self: Any, file_prefix: Any, *args: Any, **kwargs: Any) -> Any:
        written = callbacks.write(functools.partial(original, self, file_prefix, *args, **kwargs))
        if callbacks.writes():
            return written
        self._maybe_create_save_counter()
        return f"{file_prefix}-{int(self.save_counter.assign_add(1))}"
    return save


def manager_save(original: Function, callbacks: Callbacks) -> Function:
    """``tf.train.CheckpointManager.save``."""

    def save(self: Any, checkpoint_number: Any = None, *args: Any, **kwargs: Any) -> Any:
        written = callbacks.write(functools.partial(original, self, checkpoint_number, *args, **kwargs))
        if callbacks.writes():
            return written
        self._checkpoint._maybe_create_save_counter()
        count = int(self._checkpoint.save_counter.assign_add(1))
        self._latest_checkpoint = f"{self._checkpoint_prefix}-{count if checkpoint_number is None else int(checkpoint_number)}"
        return self._latest_checkpoint
    return save


def create_file_writer(original: Function, callbacks: Callbacks) -> Function:
    """``tf.summary.create_file_writer``."""

    def create(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if callbacks.writes() else tf.summary.create_noop_writer()
    return create
