"""Measures this machine for the simulator (``whale calibrate``).

Every figure is the median of many repetitions.  The minimum would vary less, but two cores lower each other's clock most of the
time, not always, so the minimum of two concurrent ops is a rare case.  Ops are measured in chains inside one ``Session.run``, and
the run's own cost is subtracted, so that no tracing slows down the ops.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

from whale_tf._tf_compat import tf, v1
from whale_tf.cluster.hardware import device_type
from whale_tf.cluster.processes import JOB, Processes, free_ports
from whale_tf.communicators import Keys
from whale_tf.communicators.base import Member
from whale_tf.communicators.processes import ProcessCommunicator
from whale_tf.errors import ClusterError
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.simulator.calibration import ARITHMETIC, COMMUNICATION, MEMORY, Calibration, Communicator

MATRIX_SIZES = {"CPU": (16, 32, 64, 128, 256, 512, 1024), "GPU": (64, 128, 256, 512, 1024, 2048, 4096, 8192)}
TENSOR_SIZES = tuple(1 << shift for shift in range(8, 25, 2))  # numbers of float32: 1 KiB to 64 MiB
OPERAND_SIZES = tuple(1 << shift for shift in range(12, 23, 2))  # bytes: 4 KiB to 4 MiB
MESSAGE_SIZES = (4, 1 << 24)  # bytes
SUM_SIZES = (1 << 16, 1 << 20, 1 << 22, 1 << 24)  # bytes: gradients, one by one to whole buckets
OPERANDS = 8  # tensors that sums take in turn
WAITS = (2, 4, 8, 16, 32, 64)  # ops for which a thread waits for work
BRANCH_S = 5e-5  # seconds of the work that the thread then gets
RUN_S = 2e-3  # approximate seconds of a chain, so that many fit between two interruptions
PAIRS = 3  # number of pairs of processes, one after the other; no more than repetitions
STEP_S = 1e-2  # approximate seconds of the work before a sum
LONGEST_S = 600.0  # of a pair of processes
MARK = "WHALE CALIBRATION "


class Threads(NamedTuple):
    """Sizes of TensorFlow's pools: ops that run at once, and threads of one op."""

    inter_op: int
    intra_op: int


def calibrate(device: str = "CPU", threads: Threads = Threads(os.cpu_count() or 1, 1), repeat: int = 50,
              processes: bool = True) -> Calibration:
    """Measure this machine's devices of one type.

    Args:
        device: a type of the hardware table.
        repeat: runs of each chain; their median counts.
        processes: whether to also start two processes and measure collectives between them.

    Raises:
        ClusterError: the type is unknown, or TensorFlow sees no such device here.
    """
    row = device_type(device)
    places = [f"/device:{row.kind}:{number}" for number in range(2)]
    machine = _Machine(row.kind, places, threads, repeat)
    count = machine.device_count()
    if row.kind == "GPU" and not count:
        raise ClusterError(f"TensorFlow sees no GPU here, so {row.name!r} cannot be measured; give --device CPU")
    empty_s, launch_s = machine.launches()
    arithmetic, memory = machine.op_times(launch_s)
    links: Dict[str, Communicator] = {}
    slow_down = machine.slow_down() if count > 1 else {}
    has_threads = row.kind == "CPU" and threads.inter_op > 1
    wake = machine.wake() if has_threads else ()
    far_points = far(OPERAND_SIZES, repeat) if has_threads else ()
    if count > 1:
        links["local"] = machine.copies(launch_s)
    if processes:
        beside_each_other = threads._replace(inter_op=max(2, threads.inter_op // 2))  # or an exchange waits for the ops' thread
        links["processes"], beside = collectives(beside_each_other, repeat)
        slow_down.update(beside)
    return Calibration(
        device=row.name, source="{}, TensorFlow {}, {} x {} threads".format(_processor(), tf.__version__, *threads),
        cores=min(threads.inter_op, os.cpu_count() or 1) if row.kind == "CPU" else None, intra_op=threads.intra_op,
        arithmetic=arithmetic, memory=memory, launch_s=launch_s, step_s=empty_s, wake=wake, far=far_points,
        slow_down=slow_down, communicators=links)


def _processor() -> str:
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf8") as handle:
            for line in handle:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def in_turns(steps: Sequence[Callable[[], Any]], repeat: int) -> np.ndarray:
    """Seconds of calls [turn, step], after two turns that do not count.  A slow second of the machine affects all alike, so the
    median of the differences varies less than the difference of the medians."""

    def timed(step: Callable[[], Any]) -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    return np.array([[timed(step) for step in steps] for _ in range(2 + repeat)])[2:]


def far(sizes: Sequence[int], repeat: int) -> Tuple[Tuple[float, float], ...]:
    """:attr:`Calibration.far`: each of two threads adds to data that the other has just written, on one core and on two, in turn.
    Empty if threads cannot be bound to cores, or there is only one core."""
    cores = sorted(os.sched_getaffinity(0))[:2] if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        return ()
    os.sched_setaffinity(0, os.sched_getaffinity(0))  # if this is forbidden, it fails here, and no thread waits for another
    points = []
    for size in sizes:
        more = [_handed_over(size, cores) - _handed_over(size, cores[:1] * 2) for _ in range(repeat)]
        points.append((float(size), max(1e-9, float(np.median(more)))))
    return tuple(points)


def _handed_over(size: int, cores: Sequence[int], turns: int = 20) -> float:
    """Seconds of a sum of ``size`` bytes that a thread on another of the cores has just written."""
    values = [np.ones(size // 4, "float32") for _ in range(2)]
    took: List[float] = []
    may_run = [threading.Semaphore(1), threading.Semaphore(0)]

    def run(me: int) -> None:
        os.sched_setaffinity(0, {cores[me]})  # of this thread
        for _ in range(turns):
            may_run[me].acquire()
            start = time.perf_counter()
            np.add(values[me], np.float32(1.0), out=values[1 - me])
            took.append(time.perf_counter() - start)
            may_run[1 - me].release()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    return float(np.median(took[turns // 2:]))


Link = Callable[[Any], Any]  # the next op of a chain
Chain = Sequence[Tuple[np.ndarray, str, Link]]  # every op: (start of the chain, device, link)


def multiply(size: int) -> Link:
    """A product with a matrix that keeps numbers of the same magnitude."""
    return lambda x: tf.matmul(x, other(x, lambda: np.eye(size, dtype="float32")[::-1]))


def add(size: int) -> Link:
    """A sum of two tensors that were not used just before, into a new one.  In-place sums of data in the cache are several times
    as fast as those of a training step."""
    turn = itertools.count()

    def link(x: Any) -> Any:
        pair = [other(x, lambda: np.ones(size, "float32"), (next(turn) + i) % OPERANDS) for i in range(2)]
        with tf.control_dependencies([x]):
            return tf.add(*pair)

    return link


def other(x: Any, value: Callable[[], np.ndarray], number: int = 0) -> Any:
    """An operand on the device of ``x``: a variable, because constants would be folded.  There are several, by number."""
    table = v1.get_default_graph().get_collection_ref("calibration")
    key = (x.shape.as_list(), x.device, number)
    for known, variable in table:
        if known == key:
            return variable
    with tf.device(x.device), tf.control_dependencies(None):
        variable = v1.Variable(value(), use_resource=False, dtype=tf.float32)
    table.append((key, variable))
    return variable


def _chain(x: Any, link: Link, length: int) -> Any:
    for _ in range(length):
        x = link(x)
    return x


def busy() -> Dict[str, Tuple[np.ndarray, Link]]:
    """The kinds of work that keep a core busy, by what limits them."""
    return {
        ARITHMETIC: (np.ones([256, 256], "float32"), multiply(256)),
        MEMORY: (np.ones([1 << 19], "float32"), add(1 << 19)),
    }


class _Machine:
    """Chains of ops on the devices of one process."""

    def __init__(self, kind: str, places: Sequence[str], threads: Threads, repeat: int) -> None:
        self.kind, self.places, self.repeat = kind, places, repeat
        self.config = v1.ConfigProto(
            device_count={"CPU": 2} if kind == "CPU" else {}, inter_op_parallelism_threads=threads.inter_op,
            intra_op_parallelism_threads=threads.intra_op, allow_soft_placement=False)
        self.config.gpu_options.allow_growth = True  # two processes share a GPU when they measure their collectives
        rewrites = self.config.graph_options.rewrite_options
        rewrites.disable_meta_optimizer = True  # chains stay as they are
        self.config.graph_options.optimizer_options.opt_level = v1.OptimizerOptions.L0

    def device_count(self) -> int:
        with v1.Session(graph=tf.Graph(), config=self.config) as session:
            return sum(device.device_type == self.kind for device in session.list_devices())

    def timed(self, *chains: Chain) -> np.ndarray:
        """Seconds of runs of every chain [turn, chain]."""
        return self.runs_s(lambda: [[self.end(chain)] for chain in chains])

    def end(self, chain: Chain) -> Any:
        """The last op of a chain, in the default graph."""
        value, where, _ = chain[0]
        with tf.device(where):
            x = v1.Variable(value, use_resource=False, dtype=tf.float32).value()
        for _, where, link in chain:
            with tf.device(where):
                x = link(x)
        return x.op

    def runs_s(self, build: Callable[[], List[List[Any]]]) -> np.ndarray:
        """Seconds of runs of each list of ops that ``build`` returns.  Since these are ops, no results are copied out."""
        with tf.Graph().as_default():
            ends = build()
            with v1.Session(config=self.config) as session:
                session.run(v1.global_variables_initializer())
                return in_turns([functools.partial(session.run, ops) for ops in ends], self.repeat)

    def added_s(self, few: Chain, many: Chain) -> float:
        """Seconds of one of the ops that only the second chain has."""
        took = self.timed(few, many)
        return float(np.median(took[:, 1] - took[:, 0])) / (len(many) - len(few))

    def chain(self, value: np.ndarray, link: Link, length: int, place: int = 0) -> Chain:
        return [(value, self.places[place], link)] * length

    def launches(self) -> Tuple[float, float]:
        """(seconds of a run without work, seconds of one op without work)."""
        scalar = np.zeros([], "float32")
        few, many = (self.chain(scalar, tf.identity, length) for length in (100, 1100))
        launch_s = max(0.0, self.added_s(few, many))
        return max(0.0, float(np.median(self.timed(few))) - 100 * launch_s), launch_s

    def op_times(self, launch_s: float) -> Tuple[Tuple[Tuple[float, float], ...], Tuple[Tuple[float, float], ...]]:
        """(FLOPs, seconds) of matrix products and (bytes, seconds) of additions, ``launch_s`` not counted."""
        products = [(2.0 * n**3, np.ones([n, n], "float32"), multiply(n)) for n in MATRIX_SIZES[self.kind]]
        sums = [(3.0 * 4 * n, np.ones([n], "float32"), add(n)) for n in TENSOR_SIZES]
        return self._points(products, launch_s), self._points(sums, launch_s)

    def _points(self, cases: Sequence[Tuple[float, np.ndarray, Link]], launch_s: float) -> Tuple[Tuple[float, float], ...]:
        points = []
        for work, value, link in cases:
            points.append((work, max(self.per_op(value, link) - launch_s, 1e-9)))
        return tuple(points)

    def per_op(self, value: np.ndarray, link: Link) -> float:
        """Seconds of one op of a chain."""
        length = self.length(value, link)
        took = np.median(self.timed(self.chain(value, link, length), self.chain(value, link, 3 * length)), axis=0)
        added_s, mean_s = float(took[1] - took[0]) / (2 * length), float(took[1]) / (3 * length)
        return added_s if added_s > 0.1 * mean_s else mean_s  # other programs may slow down the short chain alone

    def length(self, value: np.ndarray, link: Link) -> int:
        """Number of ops in a chain that runs for about :data:`RUN_S`."""
        before, self.repeat = self.repeat, min(20, self.repeat)
        try:
            one = float(np.median(self.timed(self.chain(value, link, 10)))) / 10
        finally:
            self.repeat = before
        return max(2, int(RUN_S / one))

    def slow_down(self) -> Dict[str, float]:
        """The factor by which two chains of about equal length are slower when both devices run."""
        cases = busy()
        lengths = {kind: 2 * self.length(*case) for kind, case in cases.items()}
        found = {}
        for kinds in ((ARITHMETIC, ARITHMETIC), (ARITHMETIC, MEMORY), (MEMORY, MEMORY)):
            chains = [self.chain(*cases[kind], length=lengths[kind], place=place) for place, kind in enumerate(kinds)]

            def one_two_both(chains: Sequence[Chain] = chains) -> List[List[Any]]:
                ends = [self.end(chain) for chain in chains]
                return [[end] for end in ends] + [ends]

            one_s, two_s, both_s = self.runs_s(one_two_both).T
            found["{}-{}".format(*kinds)] = max(1.0, float(np.median(both_s / np.maximum(one_s, two_s))))
        return found

    def wake(self, forks: int = 8) -> Tuple[Tuple[float, float], ...]:
        """:attr:`Calibration.wake`: the time that a second branch adds to a run if only a thread that has waited for work can
        take it."""
        value, link = np.ones([64, 64], "float32"), multiply(64)
        one_s = self.per_op(value, link)
        branch = max(1, int(BRANCH_S / one_s))

        def forked(waiting: int, branches: int) -> List[Any]:
            with tf.device(self.places[0]):
                x = v1.Variable(value, use_resource=False, dtype=tf.float32).value()
                for _ in range(forks):
                    fork = _chain(x, link, waiting)
                    ends = [_chain(fork, link, branch) for _ in range(branches)]
                    with tf.control_dependencies(ends):
                        x = tf.identity(ends[0])
            return [x.op]

        took = self.runs_s(lambda: [forked(waiting, branches) for waiting in WAITS for branches in (1, 2)])
        more = np.median(took[:, 1::2] - took[:, ::2], axis=0) / forks
        return tuple((waiting * one_s, max(1e-9, float(seconds))) for waiting, seconds in zip(WAITS, more))

    def copies(self, launch_s: float) -> Communicator:
        """Hand-overs between two devices, there and back."""
        seconds = []
        for size in (MESSAGE_SIZES[0], MESSAGE_SIZES[-1]):
            value = np.ones([size // 4], "float32")
            hops = [[(value, self.places[number % 2], tf.identity) for number in range(length)] for length in (20, 120)]
            seconds.append(max(0.0, self.added_s(*hops) - launch_s))
        return _line(MESSAGE_SIZES[0], seconds[0], MESSAGE_SIZES[-1], seconds[1])


def _line(small: int, small_s: float, large: int, large_s: float) -> Communicator:
    """alpha and 1 / beta through two points.  Devices that share memory pass tensors without copying them; the bandwidth is then
    determined by a microsecond of measurement error."""
    per_byte = max(large_s - small_s, 1e-6) / (large - small)
    return Communicator(alpha_s=max(0.0, small_s - small * per_byte), bandwidth_bytes_per_s=1.0 / per_byte)


# -- between processes ---------------------------------------------------------------------------------------------------


class _Times(NamedTuple):
    """Seconds of runs of a chain of ops, of a sum, and of both at once, and the seconds that the sum adds after the chain."""

    chain: float
    sum: float
    both: float
    sum_after: float


class _Exchanged(NamedTuple):
    """Seconds of sums over two processes by size, and the time that they and a process's ops add to each other.  The sums come
    after computation, as in a step; sums that directly follow each other are faster."""

    points: List[Tuple[int, float]]
    slow_down: Dict[str, float]


def collectives(threads: Threads, repeat: int) -> Tuple[Communicator, Dict[str, float]]:
    """Sums over two processes of this machine, as whale_tf's plans make them, and :attr:`Calibration.slow_down` of concurrent
    ops, which compete with the threads that send and receive.  Processes are started several times, because one pair may be
    slower than another one for as long as it runs.

    Raises:
        ClusterError: a process failed; the message has the end of its output.
    """
    pairs = min(PAIRS, repeat)
    found = [_exchanged(threads, -(-repeat // pairs)) for _ in range(pairs)]
    points = [(same[0][0], statistics.median(seconds for _, seconds in same)) for same in zip(*(one.points for one in found))]
    return _ring_of_two(points), {
        kinds: statistics.median(one.slow_down[kinds] for one in found) for kinds in found[0].slow_down}


def _exchanged(threads: Threads, repeat: int) -> _Exchanged:
    addresses, outputs = [f"127.0.0.1:{port}" for port in free_ports(2)], []  # type: List[str], List[str]
    with tempfile.TemporaryFile() as first, tempfile.TemporaryFile() as second:
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "whale_tf.measure.machine", json.dumps([addresses, rank, list(threads), repeat])],
                env=dict(os.environ, TF_CONFIG="{}", PYTHONPATH=os.pathsep.join(sys.path)), stdout=log, stderr=subprocess.STDOUT)
            for rank, log in enumerate((first, second))]
        try:
            _wait(started)
        finally:
            for process in started:
                process.kill()
                process.wait()
        for log in (first, second):
            log.seek(0)
            outputs.append(log.read().decode("utf8", "replace"))
    for line in "\n".join(outputs).splitlines():
        if line.startswith(MARK):
            return _Exchanged(*json.loads(line[len(MARK):]))
    failed = next((text for process, text in zip(started, outputs) if process.returncode > 0), outputs[0])
    raise ClusterError(f"collectives between two processes could not be measured: {failed[-2000:]}")


def _wait(started: Sequence[subprocess.Popen]) -> None:
    """Until all have ended, or one has failed, for which the other would wait for ever."""
    last_s = time.monotonic() + LONGEST_S
    while time.monotonic() < last_s:
        ended = [process.poll() for process in started]
        if None not in ended or any(ended):
            return
        time.sleep(0.2)


def _ring_of_two(points: Sequence[Tuple[int, float]]) -> Communicator:
    """The line through seconds by size with the least relative errors: 1 / beta, and alpha of one of the ring's two steps, in
    each of which every process sends half of the bytes."""
    sizes, seconds = np.array(points, float).T
    per_byte, alpha_s = np.polyfit(sizes, seconds, 1, w=1.0 / seconds)
    return Communicator(alpha_s=max(0.0, alpha_s / 2), bandwidth_bytes_per_s=1.0 / max(per_byte, 1e-12))


class _Member:
    """One of the two processes; both do the same."""

    def __init__(self, addresses: Sequence[str], rank: int, threads: Threads, repeat: int) -> None:
        self.processes = Processes(tuple(addresses), rank)
        self.threads = threads
        self.repeat = repeat
        self.keys = Keys()
        self.graphs = 0
        self.config = v1.ConfigProto(
            inter_op_parallelism_threads=threads.inter_op, intra_op_parallelism_threads=threads.intra_op)
        self.config.gpu_options.allow_growth = True
        self.config.experimental.collective_group_leader = self.processes.prefix(0)
        self.config.graph_options.rewrite_options.disable_meta_optimizer = True  # chains stay as they are
        self.server = v1.train.Server(v1.train.ClusterSpec({JOB: list(addresses)}), JOB, rank, config=self.config)
        self.config.device_filters.append(self.processes.prefix(rank))

    def measured(self) -> _Exchanged:
        one_s = {kind: self.timed(MESSAGE_SIZES[0], (value, link, 20)).chain / 20 for kind, (value, link) in busy().items()}
        points = []
        for size in SUM_SIZES:
            found = self.timed(size, busy()[ARITHMETIC] + (max(2, int(STEP_S / one_s[ARITHMETIC])),))
            points.append((size, max(1e-9, found.sum_after)))
        sum_s, slow_down = found.sum, {}
        for kind, chain in busy().items():
            found = self.timed(size, chain + (max(2, int(sum_s / one_s[kind])),))
            slow_down["-".join(sorted((kind, COMMUNICATION)))] = max(1.0, found.both / max(found.sum, found.chain))
        return _Exchanged(points, slow_down)

    def timed(self, size: int, chain: Tuple[np.ndarray, Link, int]) -> _Times:
        """Seconds of a sum of ``size`` bytes and a chain of the given number of ops."""
        here, (start, link, length) = self.processes.host_device, chain
        self.graphs += 1  # a server identifies variables by their names
        with tf.Graph().as_default() as graph, graph.container(str(self.graphs)), tf.device(here):
            value = v1.Variable(np.ones([size // 4], "float32"), use_resource=False).value()
            x = v1.Variable(start, use_resource=False, dtype=tf.float32).value()
            x = _chain(x, link, length)
            with tf.control_dependencies([x]):
                late = tf.identity(value)
            at_once, behind = self._sum(graph, value), self._sum(graph, late)
            with v1.Session(self.server.target, config=self.config) as session:
                session.run(v1.global_variables_initializer())
                # a sum after the chain synchronises both members again, and does not count
                runs = [session.make_callable(ops) for ops in (x.op, at_once, at_once, tf.group(at_once, x), behind)]
                chain_s, _, sum_s, both_s, behind_s = in_turns(runs, self.repeat).T
                return _Times(*[float(np.median(took)) for took in (chain_s, sum_s, both_s, behind_s - chain_s)])

    def _sum(self, graph: Any, value: Any) -> Any:
        """The op that sums ``value`` over both processes."""
        edit = StagedEdit(graph)
        member = Member(value.op.name, self.processes.host_device)
        communicator = ProcessCommunicator(Nodes(edit), self.processes, self.keys)
        total = communicator.across(member, "sum", value.op.name + "/total", tf.float32)
        edit.commit()
        return graph.get_operation_by_name(total)


if __name__ == "__main__":
    _addresses, _rank, _threads, _repeat = json.loads(sys.argv[1])
    v1.disable_eager_execution()
    print(MARK + json.dumps(_Member(_addresses, _rank, Threads(*_threads), _repeat).measured()), flush=True)
