"""Input pipelines and Keras' ``fit``: shares of processes, and what a run that goes on needs."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, MutableMapping, Optional, Tuple

from whale_tf._tf_compat import global_seed, tf, v1
from whale_tf.cluster import ONE_PROCESS, Processes, process_speeds
from whale_tf.processes.datasets import SHUFFLED_ANEW, Adapter, is_shuffled_anew, seed_shuffles, share, whole_rounds
from whale_tf.runtime.active import Active


class DataTriggers:
    """See :class:`whale_tf.capture.callbacks.Callbacks`."""

    def __init__(self, state: Active) -> None:
        self._state = state
        self._model: Any = None  # whose fit is running
        self._knew_end: MutableMapping[Any, bool] = weakref.WeakKeyDictionary()  # what its training function was traced for

    def dataset(self, given: Any) -> Any:
        state = self._state
        is_apart = v1.get_default_graph() in state.estimators.apart
        if state.snapshots is not None and not (is_apart or tf.executing_eagerly()):
            seed_shuffles(given)
            if is_shuffled_anew(given):
                state.say(f"snapshot.path: an iterator is of {SHUFFLED_ANEW}")
        if state.joins_input:
            return share(given, Processes(most=state.processes.most))
        if not state.may_share_input or is_apart:
            return given
        state.shares_input = True
        return share(given, state.processes, state.sharing, state.config.io.slicing == "file")

    def shuffle(self, seed: Optional[int]) -> Optional[int]:
        state = self._state
        if seed is None and (state.runtime is not None or state.snapshots is not None) and global_seed() is None:
            # the same in all processes, whose shares must not overlap (or have none), and in a run that goes on
            seed = 1 + next(state.shuffles)
        return seed

    def training_data(self, adapter: Any) -> Any:
        state = self._state
        state.data_batch = self._own_batch(adapter)
        if state.runtime is None and not (state.may_share_input or state.joins_input):
            if state.runs.fitting is None or global_seed() is not None or not getattr(adapter, "_shuffle", False):
                return adapter
            return Adapter(adapter, ONE_PROCESS, lambda given: given, False)  # the same order in a run that goes on
        processes = state.processes if state.may_share_input or state.joins_input else ONE_PROCESS
        return Adapter(adapter, processes, self.dataset, global_seed() is not None)

    def training_batches(self, given: Any, number: Optional[int]) -> Tuple[Any, int]:
        processes = self._state.processes
        self._state.data_batch = self._own_batch(given)
        if not (self._state.may_share_input or self._state.joins_input):
            return given, 1
        return self.dataset(whole_rounds(given, number, processes)), processes.mini_batches

    def _own_batch(self, data: Any) -> Optional[int]:
        """Examples of this process' full mini-batch of what ``fit`` trains on; None: not known."""
        state, known = self._state, batch_of(data)
        if known is None or not (state.may_share_input or state.joins_input):
            return known
        if state.joins_input:
            return known * state.processes.most
        speeds = () if state.sharing is None else process_speeds(state.sharing, state.processes)
        is_even = len(set(speeds)) < 2 and state.processes.mini_batches == state.processes.count
        return known if is_even else None

    def fit(self, model: Any, original: Callable, *args: Any, **kwargs: Any) -> Any:
        runs, self._model = self._state.runs, model
        try:
            return (runs.backed_up_fit if self._state.snapshots is None else runs.fit)(model, original, *args, **kwargs)
        finally:
            self._model, self._state.data_batch, self._state.knows_end = None, None, False

    def epochs(self, given: Any) -> None:
        state = self._state
        state.knows_end = given._num_batches is not None and given.steps_per_epoch is None
        if self._knew_end.setdefault(self._model, state.knows_end) != state.knows_end:
            self._knew_end[self._model] = state.knows_end
            self._model.train_function = None  # traced anew: see small_steps
        fitting = state.runs.fitting
        if fitting is not None:
            fitting.take_data(given)

    def callback_list(self, given: Any) -> None:
        fitting = self._state.runs.fitting
        if fitting is not None:
            fitting.take_callbacks(given)

    def backup(self, callback: Any, method: str, original: Callable[[], Any]) -> None:
        fitting = self._state.runs.fitting
        is_left_out = fitting is not None and fitting.backs_up(callback, method, original)
        if not is_left_out:
            (original if method == "on_train_begin" else functools.partial(self.write, original))()

    def write(self, original: Callable[[], Any]) -> Any:
        runtime = self._state.runtime
        return original() if runtime is None else runtime.write(original)


# of tf.data; the mini-batches that they give are those that they take, except after a `map` that joins or cuts them
_KEEPING = ("Cache", "Map", "Options", "ParallelMap", "Prefetch", "Repeat", "Shard", "Shuffle", "Skip", "Take")


def batch_of(data: Any) -> Optional[int]:
    """Examples of a full mini-batch of Keras' adapter of data, or of a dataset; None: they do not say it."""
    known = getattr(data, "batch_size", None)
    data = getattr(data, "_dataset", data)
    while known is None and isinstance(data, tf.data.Dataset):
        known = tf.get_static_value(data._batch_size) if hasattr(data, "_batch_size") else None
        keeps = type(data).__name__.strip("_").replace("Dataset", "") in _KEEPING
        data = getattr(data, "_input_dataset", None) if keeps else None
    return int(known) if known is not None else None
