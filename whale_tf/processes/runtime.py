"""One of several processes: its TensorFlow server, started by the first Session, and runs in which all take part."""

from __future__ import annotations

import atexit
import contextlib
import copy
import errno
import functools
import os
import socket
import sys
import threading
import time
import weakref
from typing import Any, Callable, Iterator, List, MutableSet, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import serve_eagerly, serves_eagerly, tf, v1
from whale_tf.cluster import Processes
from whale_tf.cluster.processes import JOB
from whale_tf.communicators import Keys
from whale_tf.emit.processes import Start
from whale_tf.errors import ClusterError, PlanError, ProcessLostError
from whale_tf.processes.watch import Watch, say, split_address

ENDED = "whale_ended"  # queue: another process needs nothing more of this one
EXCHANGED = "whale_exchanged"  # and a number; queue: texts that the process with this number gives this one
TOLD = "whale_told"  # queue: texts that process 0 tells this one
WAITED_FOR = "whale/waited_for"  # variable: how many runs of all processes there must be before this one goes on
WRITTEN = "whale/written"  # variable of process 0: the point up to which it has written files
WRITTEN_PAUSE_S = .02  # until process 0 is asked again for that
STAYS_S = 1.0  # between two looks at whether others wait for a process that has nothing more to do
GIVEN = "whale_given"  # and a number; queue in process 0: texts that the process with this number gives it
ANSWER_S = 20.0  # until another process's server has written a section of a file
LOST_PATIENCE_S = 10.0  # from a TensorFlow error until the watch has identified the process at fault


class Runtime:
    """See the module's docstring.

    Args:
        start_timeout_s: seconds that the first Session waits for all processes to start.
        lost_after_s: seconds without an answer after which a process is lost.

    Attributes:
        keys: numbers of this process's collectives; they live as long as the server.
        is_offered: eager execution starts the server, or has started it.
        is_consistent: no run has been aborted during an update by the loss of another process.
        asked_to_end: whether this process was asked to end.
    """

    def __init__(self, processes: Processes, start_timeout_s: float, lost_after_s: float) -> None:
        self.processes = processes
        self.keys = Keys()
        self.start_timeout_s = start_timeout_s
        self.lost_after_s = lost_after_s
        self._server: Any = None
        self._devices = 0  # logical CPU devices of the server
        self._watch: Optional[Watch] = None
        self.is_consistent = True
        self.is_offered = False
        self.asked_to_end: Callable[[], bool] = lambda: False
        self.sees_all = False  # Sessions see the devices of all processes
        self._sees_own = False  # some Session sees only this process's
        self._stays = False
        self._runs = 0  # of all processes that this one has made
        self._written = 0  # point up to which process 0 writes files, or has
        self._is_writing = False
        self._tell: Optional[Callable[[int], None]] = None  # says in which of these runs this process waits
        self._afterwards: List[Callable[[], None]] = []
        self._free = threading.local()  # see is_free
        self.sessions = 0  # in which this process takes part in steps
        self._equal: MutableSet[Any] = weakref.WeakSet()  # sessions whose variables have process 0's values

    @property
    def is_free(self) -> bool:
        """Whether this thread makes and runs sessions of our own, which are unchanged."""
        return getattr(self._free, "is_free", False)

    @is_free.setter
    def is_free(self, value: bool) -> None:
        self._free.is_free = value

    def target(self, asked: str, config: v1.ConfigProto) -> str:
        """The server's address for a new Session; the first one starts the server and waits for the other processes.

        Raises:
            ClusterError: the port is in use, a process does not start, or the script asks for its own server.
        """
        if asked and (self.is_free or self._server is not None and asked == self._server.target):
            return asked
        if asked:
            raise ClusterError(
                f"a Session asks for the server {asked!r}, but with several processes whale_tf starts the servers; leave out "
                "the target (master) and tf.train.Server, and make an Estimator's RunConfig after wh.init()")
        devices = config.device_count.get("CPU", 1)
        if self._server is None and serves_eagerly(may_start=False):
            self.join()
        if self._server is None:
            self._server, self._devices = self._start(config, self.sees_all), devices
        elif devices > self._devices:
            raise ClusterError(
                f"this process's first Session started its server with {self._devices} CPU device(s), but a new Session needs "
                f"{devices}; call wh.init with the larger cluster before the first Session")
        return self._server.target

    def _start(self, config: v1.ConfigProto, spans: bool) -> Any:
        """The server.  If model replicas span processes, it has at least two threads: separate ops send a stage's results, and a
        single thread would run the next stages first (60 of the 260 ms of a pipeline's step are spent waiting for that)."""
        addresses, rank = self.processes.addresses, self.processes.rank
        _check_port(addresses[rank])
        if spans and _threads(config) == 1:
            config = copy.deepcopy(config)
            config.inter_op_parallelism_threads = 2
        server = v1.train.Server(v1.train.ClusterSpec({JOB: list(addresses)}), JOB, rank, config=config)
        self._watch_others()
        return server

    def _watch_others(self) -> None:
        others = {rank: address for rank, address in enumerate(self.processes.addresses) if rank != self.processes.rank}
        self._watch = Watch(others, self.lost_after_s, asked_to_end=lambda: self.asked_to_end(),
                            short_grace=bool(self.processes.most))
        self._watch.wait_for_all(self.start_timeout_s)

    # ---------------------------------------------------------------------------------- functions
    def offer(self, devices: int) -> None:
        """From now on TensorFlow starts the server with its first op in eager execution, unless a Session comes first.

        Args:
            devices: logical CPU devices that eager execution was given.

        Raises:
            ClusterError: the port is in use.
        """
        if self._server is None and not self.is_offered:
            _check_port(self.processes.addresses[self.processes.rank])
            self._devices = devices
            self.is_offered = serve_eagerly(self.processes.addresses, JOB, self.processes.rank, self.processes.prefix(0))

    def withdraw(self) -> None:
        """Withdraws the offer, if TensorFlow has not executed anything since."""
        if self.is_offered:
            self.is_offered = serves_eagerly(may_start=False)

    def join(self) -> None:
        """Wait for the other processes, if eager execution has started the server and nobody has waited yet.

        Raises:
            ClusterError: a process does not start, or eager execution has started no server.
        """
        if self._server is None:
            if not serves_eagerly():
                raise ClusterError(
                    "TensorFlow had executed an op before wh.init(), so its server for the other processes cannot be started; "
                    "call wh.init() before TensorFlow runs its first op or makes its first variable")
            self._server = _EagerServer(f"grpc://{self.processes.addresses[self.processes.rank]}")
            self._watch_others()
            assert self._watch is not None
            self._watch.must_end = True  # TensorFlow's context waits forever for running collectives
        elif not serves_eagerly():
            raise ClusterError(
                "a Session has started this process's server, but tf.functions that several processes train need a server of "
                "their own: train either in Sessions or in functions")

    @property
    def has_lost(self) -> bool:
        """Whether another process has ended, or does not answer."""
        return self._watch is not None and self._watch.lost

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """A call of a function that waits for the other processes.

        Raises:
            ProcessLostError: another process has ended.
        """
        self.join()
        actions, self._afterwards = self._afterwards, []
        with self._guarded(), self.run_of_all():
            yield
        for action in actions:
            action()

    @contextlib.contextmanager
    def run_of_all(self) -> Iterator[None]:
        """A run that all processes make, each as often as the others; or a place to which all come."""
        with self._tells_if_late():
            yield
        self._runs += 1

    @contextlib.contextmanager
    def waiting_for_others(self) -> Iterator[None]:
        """A wait for the other processes before the next run that all make.

        Raises:
            ProcessLostError: another process has ended.
        """
        with self._guarded(), self._tells_if_late():
            yield

    @contextlib.contextmanager
    def _tells_if_late(self) -> Iterator[None]:
        assert self._watch is not None
        self._tell = self._tell or self._teller()
        before, self._watch.when_late = self._watch.when_late, functools.partial(self._tell, self._runs + 1)
        try:
            yield
        finally:
            self._watch.when_late = before

    def _teller(self) -> Callable[[int], None]:
        """What says, on this process's own devices, in which run this process waits."""
        free, self.is_free = self.is_free, True
        try:
            with tf.Graph().as_default() as graph:
                number = v1.placeholder(tf.int64, [])
                told = tf.raw_ops.AssignVariableOp(resource=_int_at(self._own, WAITED_FOR), value=number)
                session = v1.Session(self._server.target, graph=graph, config=v1.ConfigProto(device_filters=[self._own]))
        finally:
            self.is_free = free
        return lambda run: session.run(told, {number: run})

    @property
    def _is_eager(self) -> bool:
        """Whether functions train in this process."""
        return isinstance(self._server, _EagerServer)

    def write(self, original: Callable[[], Any]) -> Any:
        """Writes files in process 0, and waits for that in the others, which may read them next::

            process 0    run 7 ──> writes ──> reads ──> run 8
                                     ║
            process 1    run 7 ──> waits ───> reads ──> run 8

        Nobody has to come here: process 0 does not wait for the others, and these wait no longer than until process 0 waits for
        them, or has ended.  Points in a script are numbered by the runs of all processes before them, and by the writes since.

        Returns:
            What ``original`` returns; None in the others.
        """
        if not self._is_writing and self._server is not None:
            self._written = max(self._written + 1, self._runs << 20)
            if not self.processes.is_chief:
                self._wait_until_written()
        if not self.processes.is_chief:
            return None
        before, self._is_writing = self._is_writing, True
        try:
            return original()
        finally:
            self._is_writing = before
            if not before and self._server is not None:
                self._run_alone([self._own], lambda: tf.raw_ops.AssignVariableOp(
                    resource=_int_at(self._own, WRITTEN), value=tf.constant(self._written, tf.int64)))

    def _wait_until_written(self) -> None:
        assert self._watch is not None
        first, limit = self.processes.prefix(0), time.monotonic() + self.start_timeout_s
        while not self._watch.lost:
            try:
                with self._watch:
                    written, waits = self._run_alone(sorted({first, self._own}), lambda: [
                        _read_int(first, WRITTEN), _read_int(first, WAITED_FOR)])
            except (ProcessLostError, tf.errors.OpError):
                if not self._watch.wait_for_loss(LOST_PATIENCE_S):
                    raise
                return  # it has ended, so it writes no more
            if written >= self._written or waits > self._runs:
                return
            if time.monotonic() > limit:
                say(f"this process leaves it to process 0 to write files, but process 0 has not written any within "
                    f"{self.start_timeout_s:.0f} s (communication.start_timeout_s); going on without them")
                return
            time.sleep(WRITTEN_PAUSE_S)

    def after_training(self, action: Callable[[], None]) -> None:
        """Runs ``action`` after the next call of a function that waits for the other processes."""
        self._afterwards.append(action)

    # ---------------------------------------------------------------------------------- sessions

    def session_config(self, config: v1.ConfigProto) -> v1.ConfigProto:
        """The given config, adapted for a Session of one of several processes: it sees only its own devices, unless each process
        runs a part of one step, and process 0 forms the collectives."""
        if self.is_free:
            return config
        config.experimental.collective_group_leader = self.processes.prefix(0)
        del config.device_filters[:]
        self.sessions += 1
        if self.sees_all:
            return config
        self._sees_own = True
        config.device_filters.append(self.processes.prefix(self.processes.rank))
        return config

    def together(self, session: Any, start: Start, original: Callable, function: Callable, *arguments: Any) -> Any:
        """Call ``function``, a run that waits for the other processes.  Before a session's first such run, its variables are
        set to process 0's values.

        Args:
            original: TensorFlow's own ``session.run``.

        Raises:
            ProcessLostError: another process has ended.
            PlanError: another process has built a different graph.
        """
        with self._guarded(), self.run_of_all():
            if session not in self._equal:
                self.check_agreement(original(start.agreement))
                original(start.broadcast)
                self._equal.add(session)
            return function(*arguments)

    def is_equal(self, session: Any) -> bool:
        """Whether a session's variables have had process 0's values."""
        return session in self._equal

    def run_beside(self, devices: Sequence[str], build: Callable[..., Any], texts: Sequence[bytes] = ()) -> Any:
        """Runs what ``build`` adds to a separate graph, in a separate session, on devices of this and other processes, and
        returns the values.

        Args:
            build: is given tensors with the values of ``texts``.

        Raises:
            ProcessLostError: another process has ended.
        """
        prefixes = {device.partition("/device:")[0] for device in devices} | {self.processes.prefix(self.processes.rank)}
        with self._guarded():
            return self._run_alone(sorted(prefixes), build, texts)

    def _run_alone(self, prefixes: Sequence[str], build: Callable[..., Any], texts: Sequence[bytes] = (),
                   timeout_s: float = 0.0) -> Any:
        """Runs what ``build`` makes in a separate Session, which sees the devices of these prefixes.

        Raises:
            tf.errors.DeadlineExceededError: the run has taken longer than ``timeout_s``, if that is given.
        """
        free, self.is_free = self.is_free, True
        try:
            with tf.Graph().as_default():
                given = [v1.placeholder(tf.string, []) for _ in texts]
                fetches = build(*given)
                with v1.Session(self._server.target, config=v1.ConfigProto(device_filters=prefixes)) as session:
                    options = v1.RunOptions(timeout_in_ms=int(1000 * timeout_s))
                    return session.run(fetches, dict(zip(given, texts)), options)
        finally:
            self.is_free = free

    def tell(self, text: bytes) -> bytes:
        """The text that process 0 gives, in every process."""
        if not self.processes.is_chief:
            return bytes(self.run_beside([], lambda: _queue(self._own, TOLD, dtype=tf.string).dequeue()))
        others = self._others()
        self.run_beside(others, lambda given: [_queue(prefix, TOLD, dtype=tf.string).enqueue(given) for prefix in others], [text])
        return text

    def collect(self, texts: Sequence[bytes]) -> List[List[bytes]]:
        """The texts that each of the other processes gives, in any order, in process 0; in the others, nothing."""
        def queue(rank: int) -> Any:
            return _queue(self.processes.prefix(0), f"{GIVEN}{rank}", -1, tf.string)

        if self.processes.is_chief:
            ranks = range(1, self.processes.count)
            counts = self.run_beside([], lambda: [queue(rank).dequeue() for rank in ranks])
            return self.run_beside([], lambda: [
                [each.dequeue() for _ in range(int(count))] for each, count in zip(map(queue, ranks), counts)])
        rank, first = self.processes.rank, [self.processes.prefix(0)]
        self.run_beside(first, lambda given: queue(rank).enqueue(given), [b"%d" % len(texts)])
        if texts:
            self.run_beside(first, lambda *given: [queue(rank).enqueue(each) for each in given], texts)
        return []

    def beside(self) -> Tuple[str, v1.ConfigProto]:
        """Target and config of a further Session on this process's devices, in which it takes part in collectives."""
        config = v1.ConfigProto(device_filters=[self._own], allow_soft_placement=True)
        config.experimental.collective_group_leader = self.processes.prefix(0)
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        return self._server.target, config

    def stay_for_others(self) -> None:
        """From now on this process does not end before the others, which may read its variables until then."""
        if not self._stays:
            self._stays = True
            atexit.register(self._stay)

    def _stay(self) -> None:
        """Waits for the others, unless this process has failed or was asked to end, or another one waits for it in a run that it
        does not make: that one ends, too, when it finds that this one has ended."""
        failed = getattr(sys, "last_type", None) is not None or self.asked_to_end()
        if failed or self._server is None or self._watch is None or self._watch.lost:
            return
        count, others = self.processes.count, self._others()
        with self._guarded():
            every = sorted([*others, self._own])
            self._run_alone(every, lambda: [_queue(prefix, ENDED, count).enqueue(True) for prefix in others])
            while True:
                with contextlib.suppress(tf.errors.DeadlineExceededError):
                    self._run_alone([self._own], lambda: _queue(self._own, ENDED, count).dequeue_many(count - 1),
                                    timeout_s=STAYS_S * max(1.0, count / 100))
                    return
                waits = self._run_alone(every, lambda: [_read_int(prefix, WAITED_FOR) for prefix in others])
                if max(waits) > self._runs:
                    rank = [rank for rank in range(count) if rank != self.processes.rank][waits.index(max(waits))]
                    say(f"process {rank} waits for this process in a run that this one does not make; ending")
                    return

    # ---------------------------------------------------------------------------------- each process runs its part of a step
    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A run that may need the other processes.

        Raises:
            ProcessLostError: another process has ended.
        """
        if self._watch is None:  # no Session yet
            yield
            return
        self._watch.must_end = True  # a Session that sees other processes' devices closes only when they answer
        with self._guarded():
            yield

    def run_parts(self) -> None:
        """From now on, Sessions see the devices of all processes, and this process stays for the others.

        Raises:
            PlanError: a Session that sees only this process's devices already exists.
        """
        if self._sees_own:
            raise PlanError(
                "a model replica spans processes, but a Session was created before the graph was built; create the Session after "
                "the train op")
        self.sees_all = True
        self.stay_for_others()

    @contextlib.contextmanager
    def writing_at(self, rank: int) -> Iterator[Callable[[str, bytes], None]]:
        """What writes a file where another process is, whose server does it: also from another thread, while both train.

        Raises:
            tf.errors.OpError: it cannot write it, or does not answer.
        """
        prefix = self.processes.prefix(rank)
        free, self.is_free = self.is_free, True
        try:
            with tf.Graph().as_default() as graph, tf.device(prefix + "/device:CPU:0"):
                path, contents = v1.placeholder(tf.string, []), v1.placeholder(tf.string, [])
                written = tf.raw_ops.WriteFile(filename=path, contents=contents)
            config = v1.ConfigProto(device_filters=[prefix], operation_timeout_in_ms=int(1000 * ANSWER_S))
            with v1.Session(f"grpc://{self.processes.addresses[rank]}", graph, config) as session:
                yield lambda to, data: session.run(written, {path: to, contents: data})
        finally:
            self.is_free = free

    def open_beside(self, graph: tf.Graph) -> Any:
        """A Session of its own on the devices of all processes."""
        free, self.is_free = self.is_free, True
        try:
            return v1.Session(self._server.target, graph=graph, config=v1.ConfigProto())
        finally:
            self.is_free = free

    def exchange(self, text: bytes) -> List[bytes]:
        """The texts of all processes by rank, in each of them, once all have come here.

        Raises:
            ProcessLostError: another process has ended.
            tf.errors.DeadlineExceededError: one has not come within ``start_timeout_s``.
        """
        rank, count = self.processes.rank, self.processes.count

        def queue(sender: int, receiver: int) -> Any:
            return _queue(self.processes.prefix(receiver), f"{EXCHANGED}{sender}", 2, tf.string)

        others = [other for other in range(count) if other != rank]
        free, self.is_free = self.is_free, True
        try:
            with self._guarded(), self.run_of_all(), tf.Graph().as_default():
                given = v1.placeholder(tf.string, [])
                sent = [queue(rank, other).enqueue(given) for other in others]
                found = [queue(other, rank).dequeue() for other in others]
                with v1.Session(self._server.target, config=v1.ConfigProto()) as session:
                    options = v1.RunOptions(timeout_in_ms=int(1000 * self.start_timeout_s))
                    values = session.run([found, sent], {given: text}, options)[0]
        finally:
            self.is_free = free
        values.insert(rank, text)
        return [bytes(value) for value in values]

    @property
    def _own(self) -> str:
        """Device prefix of this process."""
        return self.processes.prefix(self.processes.rank)

    def _others(self) -> List[str]:
        """Device prefixes of the other processes."""
        return [self.processes.prefix(rank) for rank in range(self.processes.count) if rank != self.processes.rank]

    @staticmethod
    def check_agreement(digests: Sequence[int]) -> None:
        """Raises:
            PlanError: processes differ in what they have staged.
        """
        differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if differing:
            raise PlanError(
                "process(es) {} built another model than process 0, or have another cluster or configuration, so their sums do "
                "not match; the variables and the train op must be the same in every process".format(
                    ", ".join(map(str, differing))))

    @contextlib.contextmanager
    def _guarded(self) -> Any:
        assert self._watch is not None
        try:
            with self._watch:
                yield
        except (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.InternalError,
                tf.errors.DeadlineExceededError, tf.errors.UnknownError):
            self.is_consistent = False
            self._watch.check(LOST_PATIENCE_S)
            raise


class _EagerServer(NamedTuple):
    """The server of eager execution, as a Session sees it."""

    target: str


_runtime: Optional[Runtime] = None  # TensorFlow's server cannot be stopped: one for the lifetime of the process


def runtime_of(processes: Processes, start_timeout_s: float, lost_after_s: float) -> Optional[Runtime]:
    """This process's runtime; None if there is only one process.

    Raises:
        ClusterError: a server for another set of processes is running.
    """
    global _runtime
    if processes.count == 1:
        return None
    if _runtime is not None and _runtime.processes != processes:
        raise ClusterError(
            f"this process is number {_runtime.processes.rank} of {_runtime.processes.addresses}, and cannot become "
            f"number {processes.rank} of {processes.addresses}: start a new process")
    if _runtime is None:
        _runtime = Runtime(processes, start_timeout_s, lost_after_s)
    _runtime.start_timeout_s, _runtime.lost_after_s = start_timeout_s, lost_after_s
    return _runtime


def _queue(prefix: str, name: str, size: int = 1, dtype: tf.DType = tf.bool) -> Any:
    """A queue of scalars in a process's server; ``size`` -1: without a limit."""
    with tf.device(prefix + "/device:CPU:0"):
        return v1.FIFOQueue(size, [dtype], [[]], shared_name=name, name=name)


def _int_at(prefix: str, name: str) -> tf.Tensor:
    """The handle of an integer in a process's server."""
    with tf.device(prefix + "/device:CPU:0"):
        return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=tf.TensorShape([]), shared_name=name)


def _read_int(prefix: str, name: str) -> tf.Tensor:
    """Its value; 0, if it has none yet."""
    with tf.device(prefix + "/device:CPU:0"):
        handle = _int_at(prefix, name)
        is_told = tf.raw_ops.VarIsInitializedOp(resource=handle)
        return tf.cond(is_told, lambda: tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int64),
                       lambda: tf.constant(0, tf.int64))


def _threads(config: v1.ConfigProto) -> int:
    """The number of ops that run concurrently under ``config``: as configured, or the cores of this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return config.inter_op_parallelism_threads or cores or 1


def _check_port(address: str) -> None:
    """Check that the port is free; TensorFlow's own message does not say that it is in use."""
    _, port = split_address(address)
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ClusterError(
                f"port {port} of this process's address {address} is used by another program; end it, or give this process "
                "another port") from None
