"""What Keras 3 and TensorFlow 2 do around training steps: what ``fit`` iterates over, and who writes files.

In a job of several processes ``fit`` takes this process' share of the data; ``evaluate``, ``predict`` and validation take all of
it, in every process, so that all log the same numbers.  Only process 0 writes.
"""
from __future__ import annotations

import sys
import threading
from typing import Any, Callable, Tuple

from whale_tf._tf_compat import tf

Function = Callable[..., Any]
_KERAS_2 = ("keras.src.engine.training", "tf_keras.src.engine.training")
_WRITERS = ("CSVLogger", "RemoteMonitor", "TensorBoard")  # callbacks that do nothing but write


class _Thread(threading.local):
    """Attributes:
        depth: methods of Keras models under way that iterate over datasets themselves.
        expects_data: ``fit`` has begun, and has not made an iterator of its training data yet.
    """

    depth = 0
    expects_data = False


_thread = _Thread()


def iterates() -> bool:
    """Whether it is Keras that iterates over datasets now."""
    return _thread.depth > 0


def module(name: str) -> Any:
    """A module of Keras 3 that is loaded; else None."""
    return sys.modules.get("keras.src." + name)


def attributes() -> Tuple[Tuple[Any, str, Callable[[Function, Any], Function]], ...]:
    """Owner, attribute and wrapper of what is hooked; nothing, where Keras is not loaded."""
    old = tuple((found.Model, "fit", _fit_of_keras_2) for found in map(sys.modules.get, _KERAS_2) if found is not None)
    trainer, lists = module("backend.tensorflow.trainer"), module("callbacks.callback_list")
    backup, saving = module("callbacks.backup_and_restore"), module("saving.saving_api")
    if None in (trainer, lists, backup, saving):
        return old
    return (
        *old,
        (trainer.TensorFlowTrainer, "fit", _fit), (trainer.TensorFlowTrainer, "evaluate", _iterating),
        (trainer.TensorFlowTrainer, "predict", _iterating), (trainer.TFEpochIterator, "__init__", _epoch_iterator_init),
        (lists.CallbackList, "__init__", _callback_list_init),
        (backup.BackupAndRestore, "_save_model", written_once), (backup.BackupAndRestore, "on_train_end", written_once),
        (saving, "save_model", written_once), (saving, "save_weights", written_once))


def _iterating(original: Function, callbacks: Any) -> Function:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        _thread.depth += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            _thread.depth -= 1
    return method


def _fit(original: Function, callbacks: Any) -> Function:
    iterating = _iterating(original, callbacks)

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        _thread.expects_data = True
        try:
            return iterating(self, *args, **kwargs)
        finally:
            _thread.expects_data = False
    return fit


def _fit_of_keras_2(original: Function, callbacks: Any) -> Function:
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        callbacks.fit_of_keras_2()
        return original(self, *args, **kwargs)
    return fit


def _epoch_iterator_init(original: Function, callbacks: Any) -> Function:
    """Gives the iterator of ``fit``'s training data, which is the first that it makes, what stands in its data's place."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if _thread.expects_data:
            _thread.expects_data = False
            self.data_adapter = callbacks.training_data(self.data_adapter)
            self._num_batches = self.data_adapter.num_batches
            if hasattr(self.data_adapter, "epochs"):
                self._distributed_dataset = self.data_adapter.epochs
    return __init__


def _callback_list_init(original: Function, callbacks: Any) -> Function:
    def __init__(self: Any, given: Any = None, *args: Any, **kwargs: Any) -> None:
        given = kwargs.pop("callbacks", given)
        if given is not None and not callbacks.writes():
            given = [callback for callback in tf.nest.flatten(given) if not _only_writes(callback)]
        original(self, given, *args, **kwargs)
    return __init__


def _only_writes(callback: Any) -> bool:
    return any(kind.__name__ in _WRITERS and kind.__module__.startswith("keras.") for kind in type(callback).__mro__)


# -- files -------------------------------------------------------------------------------------------------------------
def written_once(original: Function, callbacks: Any) -> Function:
    """A function that writes files, and returns nothing."""

    def write(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if callbacks.writes() else None
    return write


def checkpoint_write(original: Function, callbacks: Any) -> Function:
    """``tf.train.Checkpoint.write``."""

    def write(self: Any, file_prefix: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, file_prefix, *args, **kwargs) if callbacks.writes() else str(file_prefix)
    return write


def checkpoint_save(original: Function, callbacks: Any) -> Function:
    """``tf.train.Checkpoint.save``: it counts its calls, in all processes."""

    def save(self: Any, file_prefix: Any, *args: Any, **kwargs: Any) -> Any:
        if callbacks.writes():
            return original(self, file_prefix, *args, **kwargs)
        self._maybe_create_save_counter()
        return f"{file_prefix}-{int(self.save_counter.assign_add(1))}"
    return save


def manager_save(original: Function, callbacks: Any) -> Function:
    """``tf.train.CheckpointManager.save``."""

    def save(self: Any, checkpoint_number: Any = None, *args: Any, **kwargs: Any) -> Any:
        if callbacks.writes():
            return original(self, checkpoint_number, *args, **kwargs)
        self._checkpoint._maybe_create_save_counter()
        count = int(self._checkpoint.save_counter.assign_add(1))
        self._latest_checkpoint = f"{self._checkpoint_prefix}-{count if checkpoint_number is None else int(checkpoint_number)}"
        return self._latest_checkpoint
    return save


def create_file_writer(original: Function, callbacks: Any) -> Function:
    """``tf.summary.create_file_writer``."""

    def create(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if callbacks.writes() else tf.summary.create_noop_writer()
    return create
