"""How everything here is measured: each measurement in a process of its own, several rounds, interleaved, medians.

A benchmark file is both: run plainly it starts itself once per measurement with ``--worker SPEC`` and prints a table of
the answers; with ``--worker`` it measures one thing and prints one line of JSON.
"""
from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
from rich.console import Console
from rich.table import Table

from whale_tf.cluster.processes import free_ports, tf_configs
from whale_tf.errors import did_you_mean

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MARK = "RESULT "
LIMIT_S = 600.0
SHARED_CACHE = 1.5  # seconds to read what another core wrote, over reading it again: 1.2 here, 1.6 to 2.1 if no cache is shared
BURST = 4  # steps between two looks at the caches

Spec = Mapping[str, Any]
Result = Dict[str, Any]


# -- in the process that measures --------------------------------------------------------------------------------------


def step_times(step: Callable[[], Any], count: int, warmup: int = 3) -> Result:
    """Wall and CPU seconds of ``step``: the medians of ``count`` calls.

    CPU seconds are those of all threads of the process; they hardly change with what else the machine does.
    """
    for _ in range(warmup):
        last = step()
    wall, cpu = [], []
    for _ in range(count):
        start, cpu_start = time.perf_counter(), time.process_time()
        last = step()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    return {"wall_s": statistics.median(wall), "cpu_s": statistics.median(cpu), "loss": float(last)}


def session_config(devices: int = 1, inter: int = 0, intra: int = 0) -> Any:
    """ConfigProto with logical CPU devices and sizes of the thread pools (0: TensorFlow's choice, one per core)."""
    import tensorflow.compat.v1 as tf

    return tf.ConfigProto(device_count={"CPU": devices}, inter_op_parallelism_threads=inter,
                          intra_op_parallelism_threads=intra)


def step_seconds(step: Callable[[], Any], bursts: int) -> List[Tuple[float, bool]]:
    """Wall seconds of ``BURST`` calls for each burst, and whether the first two cores shared a cache before and after it; in each
    burst, a call that does not count goes before them.

    The host of a virtual machine moves its cores about, between those of one L3 cache and those that share none, many times a
    minute.  Then all that one core writes and the other one reads takes longer, and so do steps on two cores: a plan with
    ``split`` by a third.
    """
    found: List[Tuple[float, bool]] = []
    for _ in range(bursts):
        shared = cache_is_shared()
        took = wall_seconds(step, BURST, warmup=1)
        shared = cache_is_shared() and shared
        found += [(one, shared) for one in took]
    return found


def wall_seconds(step: Callable[[], Any], count: int, warmup: int) -> List[float]:
    """Of each of ``count`` calls, after ``warmup`` that do not count."""
    took = []
    for _ in range(warmup + count):
        start = time.perf_counter()
        step()
        took.append(time.perf_counter() - start)
    return took[warmup:]


def cache_is_shared() -> bool:
    """Whether the first two cores share one, going by what reading costs; taken for granted where threads cannot be bound to
    cores (other systems than Linux)."""
    if not hasattr(os, "sched_getaffinity"):
        return True
    cores = sorted(os.sched_getaffinity(0))[:2]
    first, again = (statistics.median(column) for column in zip(*(_reads_s(cores[0], cores[-1]) for _ in range(9))))
    return first < SHARED_CACHE * again


def _reads_s(reader: int, writer: int) -> Tuple[float, float]:
    """Seconds to read 1 MB that the other core has just written, and to read it again."""
    values = np.zeros(1 << 17)
    took: List[float] = []

    def write() -> None:
        os.sched_setaffinity(0, {writer})
        values[:] = 1.0

    def read() -> None:
        os.sched_setaffinity(0, {reader})
        for _ in range(2):
            start = time.perf_counter()
            values.sum()
            took.append(time.perf_counter() - start)

    for part in (write, read):
        thread = threading.Thread(target=part)  # only this thread is bound to the core
        thread.start()
        thread.join()
    return took[0], took[1]


# -- in the process that asks ------------------------------------------------------------------------------------------


def ask(script: str, spec: Spec, processes: int = 1) -> Result:
    """Runs ``script --worker spec`` and returns what it prints after MARK.

    Args:
        processes: so many that train together (``TF_CONFIG`` says so); the first one's result counts.

    Raises:
        RuntimeError: it failed; with the end of its output.
    """
    return first_result([_command(script, spec)] * processes, tf_configs(free_ports(processes)))


def _command(script: str, spec: Spec) -> List[str]:
    return [sys.executable, os.path.abspath(script), "--worker", json.dumps(spec)]


def _environment(more: Mapping[str, str]) -> Dict[str, str]:
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    return dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", PYTHONPATH=path, **more)


class Workers:
    """``script --worker spec`` in processes that stay, and do what they are asked to when it is their turn.

    Args:
        processes: so many that train together (``TF_CONFIG`` says so); all do what is asked, and the first one's result counts.
        environment: variables beside those that they have anyhow.
    """

    def __init__(
        self, script: str, spec: Spec, processes: int = 1, environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.log = tempfile.TemporaryFile("w+")
        self.started = [
            subprocess.Popen(_command(script, spec), env=_environment(dict(environment, **more)), stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, stderr=self.log, universal_newlines=True)
            for more in tf_configs(free_ports(processes))]  # fmt: skip

    def ask(self, what: str) -> Result:
        """Raises:
        RuntimeError: it failed; with the end of its output.
        """
        for process in self.started:
            assert process.stdin is not None
            process.stdin.write(what + "\n")
            process.stdin.flush()
        found = [self._answer(process) for process in self.started]
        return found[0]

    def _answer(self, process: Any) -> Result:
        for line in process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK):])
        self.log.seek(0)
        raise RuntimeError(f"no result of {process.args}:\n{self.log.read()[-3000:]}")

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: Any) -> None:
        for process in self.started:
            process.kill()
            process.wait()
        self.log.close()


def answer(questions: Mapping[str, Callable[[], Result]]) -> None:
    """In the process that measures: what :class:`Workers` ask, until they ask no more."""
    for line in sys.stdin:
        print(MARK + json.dumps(questions[line.strip()]()), flush=True)


def first_result(commands: Sequence[Sequence[str]], variables: Sequence[Mapping[str, str]]) -> Result:
    """Runs commands side by side, each with environment variables of its own, and returns what the first prints after MARK.

    Raises:
        RuntimeError: it failed; with the end of its output.
        subprocess.TimeoutExpired: one has not ended after ``LIMIT_S``; all are killed.
    """
    started = [subprocess.Popen(command, env=_environment(more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                universal_newlines=True) for command, more in zip(commands, variables)]
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for line in outputs[0].splitlines():
        if MARK in line:  # a launcher may put something before it
            return json.loads(line[line.index(MARK) + len(MARK):])
    raise RuntimeError(f"no result of {commands[0]}:\n{outputs[0][-3000:]}")


def rounds(script: str, specs: Sequence[Spec], count: int) -> List[Result]:
    """Each spec measured ``count`` times, in turn, so that a slow minute hits all alike; the median of every number."""
    answers: List[List[Result]] = [[] for _ in specs]
    for _ in range(count):
        for spec, found in zip(specs, answers):
            found.append(ask(script, spec))
    return [{key: statistics.median(result[key] for result in found) for key in found[0]} for found in answers]


def main(script: str, worker: Callable[[Spec], Optional[Result]], report: Callable[[Console], None]) -> None:
    """What the last line of every benchmark calls; a worker without a result has answered questions (:func:`answer`)."""
    if sys.argv[1:2] == ["--worker"]:
        found = worker(json.loads(sys.argv[2]))
        if found is not None:
            print(MARK + json.dumps(found), flush=True)
        return
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print((sys.modules["__main__"].__doc__ or "").strip())
        return
    console = Console(width=120)
    console.print(f"{os.path.basename(script)}: {machine()}", highlight=False)
    report(console)


def machine() -> str:
    """One line about where this was measured."""
    import tensorflow as tf

    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf8") as handle:
            models = [line.split(":", 1)[1].strip() for line in handle if line.startswith("model name")]
        name = models[0] if models else name
    return f"TensorFlow {tf.__version__}, Python {platform.python_version()}, {os.cpu_count()} x {name}"


def chosen(parser: argparse.ArgumentParser, sections: Mapping[str, Any], given: Optional[Sequence[str]] = None) -> List[str]:
    """The sections that ``--only`` names, of a parser that has it; an unknown one ends the program with the names there are."""
    names: List[str] = parser.parse_args(given).only.split(",")
    for name in names:
        if name not in sections:
            known = ", ".join(sections)
            parser.error(f"--only has {name!r}, expected some of {known}.{did_you_mean(name, sections)}")
    return names


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A rich table: the first column to the left, numbers to the right."""
    result = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        result.add_row(*row)
    return result
