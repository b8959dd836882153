"""This process among several: TensorFlow's server in it, started by the first Session, and runs that all take part in."""

from __future__ import annotations

import contextlib
import errno
import socket
import weakref
from typing import Any, Callable, MutableSet, Optional, Sequence

from whale_tf._tf_compat import tf, v1
from whale_tf.cluster import Processes
from whale_tf.cluster.processes import JOB
from whale_tf.communicators import Keys
from whale_tf.errors import ClusterError, PlanError
from whale_tf.processes.watch import Watch, split_address
from whale_tf.rewrite.processes import Start

LOST_PATIENCE_S = 10.0  # between an error of TensorFlow's and the watch's finding out which process is to blame


class Runtime:
    """See the module's docstring.

    Args:
        start_timeout_s: how long the first Session waits for all processes to come.

    Attributes:
        keys: numbers of this process' collectives; they live as long as the server.
    """

    def __init__(self, processes: Processes, start_timeout_s: float) -> None:
        self.processes = processes
        self.keys = Keys()
        self.start_timeout_s = start_timeout_s
        self._server: Any = None
        self._devices = 0  # logical CPU devices of the server
        self._watch: Optional[Watch] = None
        self._equal: MutableSet[Any] = weakref.WeakSet()  # sessions whose variables have process 0's values

    def target(self, asked: str, config: v1.ConfigProto) -> str:
        """The server's address for a new Session; the first one starts the server and waits for the other processes.

        Raises:
            ClusterError: the port is taken, a process does not come, or the script asks for a server of its own.
        """
        if self._server is not None and asked == self._server.target:
            return asked
        if asked:
            raise ClusterError(
                "a Session asks for the server {!r}, but with several processes whale_tf starts the servers; leave the target "
                "(master) out, and tf.train.Server, too".format(asked)
            )
        devices = config.device_count.get("CPU", 1)
        if self._server is None:
            self._server, self._devices = self._start(config), devices
        elif devices > self._devices:
            raise ClusterError(
                "this process' server was started with {} CPU device(s) by its first Session, and a new one needs {}; call "
                "wh.init with the larger cluster before the first Session".format(self._devices, devices)
            )
        return self._server.target

    def _start(self, config: v1.ConfigProto) -> Any:
        addresses, rank = self.processes.addresses, self.processes.rank
        _check_port(addresses[rank])
        server = v1.train.Server(v1.train.ClusterSpec({JOB: list(addresses)}), JOB, rank, config=config)
        self._watch = Watch({other: address for other, address in enumerate(addresses) if other != rank})
        self._watch.wait_for_all(self.start_timeout_s)
        return server

    def session_config(self, config: v1.ConfigProto) -> v1.ConfigProto:
        """The given config, with what a Session of one of several processes needs: it sees its own devices only, and
        collectives are formed by process 0."""
        config.experimental.collective_group_leader = self.processes.prefix(0)
        del config.device_filters[:]
        config.device_filters.append(self.processes.prefix(self.processes.rank))
        return config

    def together(self, session: Any, start: Start, original: Callable, function: Callable, *arguments: Any) -> Any:
        """Call ``function``, a run that waits for the other processes; before a session's first one its variables take
        process 0's values.

        Args:
            original: TensorFlow's own ``session.run``.

        Raises:
            ProcessLostError: another process has ended.
            PlanError: another process has built another graph.
        """
        with self._guarded():
            if session not in self._equal:
                self._check_agreement(original(start.agreement))
                original(start.broadcast)
                self._equal.add(session)
            return function(*arguments)

    def _check_agreement(self, digests: Sequence[int]) -> None:
        differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if differing:
            raise PlanError(
                "process(es) {} built another model, or have another cluster or configuration, than process 0, so their sums do "
                "not match; the variables and the train op must be the same in every process".format(
                    ", ".join(map(str, differing))
                )
            )

    @contextlib.contextmanager
    def _guarded(self) -> Any:
        assert self._watch is not None
        try:
            with self._watch:
                yield
        except (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.InternalError,
                tf.errors.DeadlineExceededError, tf.errors.UnknownError):  # fmt: skip
            self._watch.check(LOST_PATIENCE_S)
            raise


_runtime: Optional[Runtime] = None  # TensorFlow's server cannot be stopped: one for the life of the process


def runtime_of(processes: Processes, start_timeout_s: float) -> Optional[Runtime]:
    """This process' runtime; None where there is one process only.

    Raises:
        ClusterError: a server for another set of processes is running.
    """
    global _runtime
    if processes.count == 1:
        return None
    if _runtime is not None and _runtime.processes != processes:
        raise ClusterError(
            "this process is number {} of {}, and cannot become number {} of {}: start a new process".format(
                _runtime.processes.rank, _runtime.processes.addresses, processes.rank, processes.addresses
            )
        )
    if _runtime is None:
        _runtime = Runtime(processes, start_timeout_s)
    _runtime.start_timeout_s = start_timeout_s
    return _runtime


def _check_port(address: str) -> None:
    """TensorFlow's own message for a port that is taken does not say so."""
    _, port = split_address(address)
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ClusterError(
                "port {} of this process' address {} is taken by another program; end it, or give this process another "
                "port".format(port, address)
            ) from None
