"""tf.functions that several processes run together: each call waits for the others, and the first makes variables equal.

::

    process 0    trace, rewrite ──> agree ──> variables' values ──> step 1 ──> step 2 ...
                                     ║               ║                ║          ║
    process 1    trace, rewrite ──> agree ──> takes them ─────────> step 1 ──> step 2 ...
"""

from __future__ import annotations

import contextlib
import time
import weakref
import zlib
from typing import Any, Callable, Iterator, List, MutableMapping, MutableSet, NamedTuple, Sequence, Set, Tuple

import numpy as np

from whale_tf._tf_compat import global_seed, tf, v1
from whale_tf.capture.handles import captured_variables
from whale_tf.emit.own_part import HOST, STEPS
from whale_tf.errors import InputError, PlanError
from whale_tf.processes.runtime import Runtime

PAUSE_S = .002  # until a process is asked again how many steps it has finished
BEGUN = "whale/begun"  # counts, in each process, the calls that it has begun
CHECKED_STEPS = 3  # in which the processes compare what they have read


class _Unchecked(NamedTuple):
    """A rewritten graph whose inputs have to be compared in so many ``steps``; the other fields: see
    :meth:`Functions.rewritten`."""

    seen: str
    inputs: Sequence[str]
    steps: int


class Functions:
    """See the module's docstring.

    Args:
        shares_input: whether datasets are shared with the other processes, which then must shuffle in the same way.
    """

    def __init__(self, runtime: Runtime, shares_input: Callable[[], bool]) -> None:
        self._runtime = runtime
        self._shares_input = shares_input
        self._staged: MutableMapping[tf.Graph, str] = weakref.WeakKeyDictionary()  # by rewritten graph
        self._variables: MutableMapping[tf.Graph, List[Any]] = weakref.WeakKeyDictionary()  # references, until the first call
        self._inside: MutableMapping[tf.Graph, MutableSet[tf.Graph]] = weakref.WeakKeyDictionary()  # graph -> those it calls
        self._started: MutableSet[tf.Graph] = weakref.WeakSet()
        self._equal: Set[str] = set()  # variables that have process 0's values
        self._counts_steps = False  # whether processes may read each other's variables before they have finished a step
        self._unchecked: MutableMapping[tf.Graph, _Unchecked] = weakref.WeakKeyDictionary()
        self._begun, self._calls, self._is_begun = "", 0, False  # name of the counter, which exists if variables are kept

    def traced(self, graph: tf.Graph) -> None:
        """Call when a function is going to be rewritten, and still captures the user's variables."""
        self._variables[graph] = [weakref.ref(variable) for variable in captured_variables(graph)]

    def rewritten(self, graph: tf.Graph, staged: str, keeps: bool, seen: str = "", inputs: Sequence[str] = ()) -> None:
        """Call when a function's graph contains messages between processes.

        Args:
            staged: a text of these, equal in processes that agree.
            keeps: some process alone keeps a variable.
            seen: where each process runs a part of the step, the variable with checksums of what it has read.
            inputs: names of the inputs with these checksums, two each.
        """
        self._staged[graph] = staged
        if seen:
            self._unchecked[graph] = _Unchecked(seen, inputs, CHECKED_STEPS)
        if seen and not self._counts_steps:
            self._counts_steps = True
            with tf.init_scope(), tf.device(self._runtime.processes.host_device):
                steps = _counter(STEPS)
                if not tf.raw_ops.VarIsInitializedOp(resource=steps):  # after another wh.init others may still wait for it
                    tf.raw_ops.AssignVariableOp(resource=steps, value=tf.constant(0, tf.int64))
        if keeps or seen:
            self._runtime.stay_for_others()
            if not self._begun:
                self._begun = f"{BEGUN}/{self._runtime.keys.instance()}"
                with tf.init_scope():
                    self._count()
        self._inside.setdefault(graph, weakref.WeakSet()).add(graph)

    def call(self, function: Any, original: Callable[[], Any]) -> Any:
        """Calls a concrete function, eagerly or in the graph of another one."""
        inside = self._inside.get(function.graph)
        if inside is None:
            return original()
        if tf.executing_eagerly():
            with self.begun(function), self._runtime.training():
                result = original()
                for graph in inside:
                    self._check_inputs(graph)
            return result
        outer = v1.get_default_graph()
        while outer is not None:
            self._inside.setdefault(outer, weakref.WeakSet()).update(inside)  # type: ignore[attr-defined]
            outer = getattr(outer, "outer_graph", None)
        return original()

    @contextlib.contextmanager
    def begun(self, function: Any) -> Iterator[None]:
        """A call of a concrete function that all processes make, from before its variables move to other devices."""
        if self._is_begun or function.graph not in self._inside:
            yield
            return
        self.prepare(function)
        self._is_begun = True
        try:
            if self._begun:
                self._calls += 1
                self._count()
            yield
        finally:
            self._is_begun = False

    def _count(self) -> None:
        with tf.device(self._runtime.processes.host_device):
            tf.raw_ops.AssignVariableOp(resource=_counter(self._begun), value=tf.constant(self._calls, tf.int64))

    def wait_for_readers(self) -> None:
        """Returns when all processes have begun the call that this one has begun: none still reads, between calls, what the last
        one has left."""
        processes = self._runtime.processes
        devices = [processes.prefix(rank) + HOST for rank in range(processes.count) if rank != processes.rank]

        def read() -> List[tf.Tensor]:
            return [_read_counter(self._begun, device) for device in devices]
        with self._runtime.waiting_for_others():
            while min(self._runtime.run_beside(devices, read)) < self._calls:
                time.sleep(PAUSE_S)

    def prepare(self, function: Any) -> None:
        """Starts the rewritten graphs that a concrete function runs, before its variables move to other devices."""
        waiting = [graph for graph in self._inside.get(function.graph, ()) if graph not in self._started]
        if waiting:
            with self._runtime.training():
                for graph in waiting:
                    self._start(graph)

    def _check_inputs(self, graph: tf.Graph) -> None:
        """Compares what the processes have read in one of the first steps in which each runs a part.

        Raises:
            InputError: they have read different mini-batches.
        """
        one = self._unchecked.get(graph)
        if one is None:
            return
        self._unchecked[graph] = one._replace(steps=one.steps - 1)
        if one.steps == 1:
            del self._unchecked[graph]
        with tf.device(self._runtime.processes.host_device):
            handle = tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=tf.TensorShape([2 * len(one.inputs)]), shared_name=one.seen)
            found = self._rows(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64))
        check_inputs(found, one.inputs, f"tf.function {graph.name!r}")

    def gather(self, row: Sequence[float]) -> np.ndarray:
        """The rows of all processes, `[processes, len(row)]`, once all have come here between two steps.

        Raises:
            ProcessLostError: another process has ended.
        """
        with self._runtime.training(), tf.device(self._runtime.processes.host_device):
            return self._rows(tf.constant(row, tf.float64))

    def _rows(self, row: tf.Tensor) -> np.ndarray:
        """The rows of all processes."""
        group, instance = self._runtime.keys.agreement()
        found: np.ndarray = tf.raw_ops.CollectiveGather(
            input=row, group_size=self._runtime.processes.count, group_key=group, instance_key=instance, shape=[0],
            timeout_seconds=self._runtime.start_timeout_s).numpy()
        return found.reshape([self._runtime.processes.count, -1])

    def new_name(self) -> str:
        """A name for a variable, the same in all processes, that no other has while the server runs."""
        return f"whale/kept/{self._runtime.keys.instance()}"

    def later(self, action: Callable[[], None]) -> None:
        """Runs ``action`` after the next call that all processes make: by then they have done what they do before it."""
        self._runtime.after_training(action)

    def bring(self, name: str, device: str, dtype: tf.DType) -> Any:
        """The value of another process' variable, once that process has finished as many steps as this one."""
        def read() -> Tuple[tf.Tensor, tf.Tensor]:
            steps = _read_counter(STEPS, device.partition("/device:")[0] + HOST) if self._counts_steps else tf.constant(done)
            with tf.device(device), tf.control_dependencies([steps]):
                handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=tf.TensorShape(None), shared_name=name)
                return steps, tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
        done = int(_read_counter(STEPS, self._runtime.processes.host_device)) if self._counts_steps else 0
        while True:
            steps, value = self._runtime.run_beside([device], read)
            if steps >= done:
                return value
            time.sleep(PAUSE_S)

    def _start(self, graph: tf.Graph) -> None:
        """Checks, before a rewritten graph runs for the first time, that it is the same in all processes, and gives its variables
        process 0's values.

        Raises:
            PlanError: it is not the same, or another process does not reach it.
        """
        held = [reference() for reference in self._variables[graph]]
        variables = [variable for variable in held if variable is not None and variable.dtype != tf.string]
        described = [f"{one.dtype.name} {one.shape}" for one in [*variables, *graph.inputs]]
        with tf.device(self._runtime.processes.host_device):
            self._agree("\n".join([self._staged[graph], *described]), graph.name)
            for variable in variables:
                if variable._unique_id not in self._equal:
                    self._take(variable)
                    self._equal.add(variable._unique_id)
        self._started.add(graph)
        del self._variables[graph]

    def _agree(self, text: str, name: str) -> None:
        group, instance = self._runtime.keys.agreement()
        digest = zlib.crc32(f"{self._runtime.keys.count} {text}".encode())
        try:
            digests: Sequence[int] = tf.raw_ops.CollectiveGather(
                input=tf.constant([digest, self._seed()], tf.int64), group_size=self._runtime.processes.count, group_key=group,
                instance_key=instance, shape=[0], timeout_seconds=self._runtime.start_timeout_s).numpy()
        except tf.errors.DeadlineExceededError:
            raise PlanError(
                f"tf.function {name!r} runs here for the first time, but another process has not reached it within "
                f"{self._runtime.start_timeout_s:.0f} s (communication.start_timeout_s): all processes must run the same "
                "training functions in the same order") from None
        self._runtime.check_agreement(digests[::2])
        if len(set(digests[1::2])) > 1:
            raise PlanError(
                "tf.random.set_seed was called with different seeds in the processes ({}), so they shuffle differently, and "
                "their shares of a dataset overlap; use the same seed in all, or set io.slicing to false if the data is already "
                "shared".format(", ".join(map(str, digests[1::2]))))

    def _seed(self) -> int:
        seed = global_seed()
        return -1 if seed is None or not self._shares_input() else int(seed)

    def _take(self, variable: Any) -> None:
        """Gives a variable the value that it has in process 0."""
        processes, keys = self._runtime.processes, self._runtime.keys
        value = variable.read_value()
        wire = tf.int32 if value.dtype == tf.bool else value.dtype
        group = keys.group(processes.peers, 0, "broadcast")
        given = {"group_size": processes.count, "group_key": group, "instance_key": keys.instance(), "shape": value.shape}
        if processes.is_chief:
            tf.raw_ops.CollectiveBcastSend(input=tf.cast(value, wire), **given)
        else:
            variable.assign(tf.cast(tf.raw_ops.CollectiveBcastRecv(T=wire, **given), value.dtype))


def check_inputs(found: np.ndarray, inputs: Sequence[str], where: str) -> None:
    """Raises:
        InputError: processes have read different mini-batches.

    Args:
        found: `[processes, 2 x inputs]`, checksums of the first example and sizes.
    """
    differ = np.argwhere(~np.isclose(found, found[:1], 1e-9, 0, equal_nan=True))
    if len(differ):
        rank, number = differ[0]
        what = "another size" if number % 2 else "another first example"
        raise InputError(
            f"input {inputs[number // 2]!r} of {where} has {what} in process {rank} than in process 0, but each of them runs a "
            "part of the step, so they must read the same mini-batches in the same order: give each shuffle a seed, and let the "
            "script read the same data in all processes")


def _counter(name: str) -> tf.Tensor:
    """The handle of a counter of the process on whose device this is staged."""
    return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=tf.TensorShape([]), shared_name=name)


def _read_counter(name: str, device: str) -> tf.Tensor:
    with tf.device(device):
        return tf.raw_ops.ReadVariableOp(resource=_counter(name), dtype=tf.int64)
