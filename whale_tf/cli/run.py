"""``whale run``: several training processes of one script on this machine."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any, Dict, List, Mapping, Optional, Sequence

import typer

from whale_tf.cli.common import reported
from whale_tf.cluster import LAUNCHED, Cluster
from whale_tf.cluster.processes import free_ports, tf_configs
from whale_tf.config import VERIFIED, Config
from whale_tf.errors import ClusterError, ConfigError

POLL_S = 0.1
COLOURS = (36, 33, 32, 35, 34, 31)  # ANSI: cyan, yellow, green, magenta, blue, red


def run(
    script: str = typer.Argument(..., help="Python script"),
    arguments: Optional[List[str]] = typer.Argument(None, help="its arguments"),
    module: bool = typer.Option(False, "-m", "--module", help="SCRIPT is the name of a module, as for python -m"),
    workers: int = typer.Option(1, min=1, help="processes"),
    devices_per_worker: int = typer.Option(1, min=1, help="logical CPU devices of each process, or GPUs"),
    cluster: Optional[str] = typer.Option(None, help="devices of all processes: a file or a short form; default: CPU devices"),
    config: Optional[str] = typer.Option(None, help="configuration for wh.init() calls that give none: JSON text or a file"),
    replicate: bool = typer.Option(False, "--replicate", help="for a script without whale_tf lines: train it data parallel"),
    auto: bool = typer.Option(False, "--auto", help="for a script without whale_tf lines: search for the fastest plan"),
    verify: bool = typer.Option(False, "--verify", help="compare the first training step with the local one (docs/verify.md)"),
    grace: float = typer.Option(30.0, min=0.0, help="seconds that stopped processes have to save and end"),
    max_restarts: int = typer.Option(0, min=0, help="how often to restart all processes when one fails"),
) -> None:
    """Run a script in several processes on this machine, as whale_tf's TF_CONFIG workers.

    Every line of output is prefixed with the number of its process. If a process fails, the others are stopped, and the exit
    status is that of the failed process. On SIGTERM a script that saves checkpoints saves once more, and all processes end.
    """
    with reported(2):
        variables = _variables(workers, devices_per_worker, cluster, _configured(config, workers, replicate, auto))
        if verify:
            variables[VERIFIED] = "1"
    start = ["-m", "whale_tf.cli.start"] if replicate or auto else []
    command = [sys.executable, "-u"] + start + (["-m"] if module else []) + [script] + list(arguments or ())
    status = 0
    for attempt in range(max_restarts + 1):
        if attempt:
            typer.echo(f"whale run: restarting all processes ({attempt} of {max_restarts})", err=True)
        group = Group(command, [dict(variables, **one) for one in tf_configs(free_ports(workers))], grace)
        status = group.wait()
        if status == 0 or group.interrupted:
            break
    raise typer.Exit(status)


def _configured(config: Optional[str], workers: int, replicate: bool, auto: bool) -> Optional[str]:
    """The configuration's text, including ``--replicate`` and ``--auto``.

    Raises:
        ConfigError: the options contradict each other or the configuration.
    """
    if not replicate and not auto:
        return config
    given = Config.parse(config)
    searches = given.auto.auto_parallel is not False or given.pipeline.num_stages is not None
    if replicate and (auto or searches):
        raise ConfigError("--replicate is given, and {}; give one of them".format(
            "--auto" if auto else "a configuration that asks for another plan (auto_parallel, num_task_graph)"))
    if auto and workers > 1:
        raise ConfigError(f"--auto is given with --workers {workers}, but plans are searched for one process; use --workers 1 "
                          "and --devices-per-worker")
    return given.to_json() if replicate or searches else Config(dict(given.to_dict(), **{"auto.auto_parallel": True})).to_json()


def _variables(workers: int, devices_per_worker: int, cluster: Optional[str], config: Optional[str]) -> Dict[str, str]:
    """The environment variables of all processes.

    Raises:
        ClusterError, ConfigError: cluster or configuration is not valid.
    """
    short = f"cpu:{devices_per_worker}"
    described = cluster or (f"{workers}x{short}" if workers > 1 else short)
    total = len(Cluster.parse(described))
    if total % workers:
        raise ClusterError(f"the cluster {described!r} has {total} devices, which do not divide over {workers} workers")
    variables = {"WHALE_CLUSTER": described, LAUNCHED: "1"}
    if config is not None:
        variables["WHALE_CONFIG"] = Config.parse(config).to_json(indent=None)
    return variables


class Group:
    """Processes that run and end together.

    Args:
        command: the command that each process runs.
        environments: variables of each process, in addition to this process's own.
        grace_s: seconds between SIGTERM and SIGKILL.

    Attributes:
        interrupted: whether a signal asked the processes to end.
    """

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]], grace_s: float) -> None:
        self._grace_s = grace_s
        self.interrupted = False
        self._interrupted_at: Optional[float] = None
        self._processes: List[subprocess.Popen] = []
        self._threads: List[threading.Thread] = []
        self._lock = threading.Lock()
        for rank, variables in enumerate(environments):
            process = subprocess.Popen(
                list(command), env=dict(os.environ, **variables), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True)
            self._processes.append(process)
            for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                thread = threading.Thread(target=self._copy, args=(rank, stream, out), daemon=True)
                thread.start()
                self._threads.append(thread)

    def wait(self) -> int:
        """Wait for all processes to end.  If one fails, stop the others.  Returns 0, or the status of the first that failed."""
        before = {number: signal.signal(number, self._forward) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            status = self._first_failure()
        finally:
            self.stop()
            for number, handler in before.items():
                signal.signal(number, handler)
        for thread in self._threads:
            thread.join(timeout=self._grace_s)
        return status

    def stop(self) -> None:
        """End all running processes: SIGTERM, then SIGKILL for each process and its children."""
        self._signal(signal.SIGTERM)
        limit = time.monotonic() + self._grace_s
        while time.monotonic() < limit and any(process.poll() is None for process in self._processes):
            time.sleep(POLL_S)
        self._signal(signal.SIGKILL, everyone=True)
        for process in self._processes:
            process.wait()

    def _first_failure(self) -> int:
        while True:
            statuses = [process.poll() for process in self._processes]
            failed = [(rank, status) for rank, status in enumerate(statuses) if status]
            if failed:
                rank, status = failed[0]
                how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
                sys.stderr.write(f"whale run: process {rank} ended with {how}\n")
                return 128 - status if status < 0 else status
            if all(status == 0 for status in statuses):
                return 0
            if self._interrupted_at is not None and time.monotonic() - self._interrupted_at > self._grace_s:
                sys.stderr.write("whale run: processes did not end when asked to\n")
                return 128 + signal.SIGKILL
            time.sleep(POLL_S)

    def _forward(self, number: int, frame: Any) -> None:
        self.interrupted = True
        self._interrupted_at = self._interrupted_at or time.monotonic()
        self._signal(number)

    def _signal(self, number: int, everyone: bool = False) -> None:
        """Send a signal to the running processes, and (``everyone``) to all processes that they have started."""
        for process in self._processes:
            try:
                if everyone:
                    os.killpg(process.pid, number)
                elif process.poll() is None:
                    process.send_signal(number)
            except (ProcessLookupError, PermissionError):
                pass  # it has ended

    def _copy(self, rank: int, stream: IO[bytes], out: IO[str]) -> None:
        prefix = f"[{rank}] "
        if out.isatty():
            prefix = f"\033[{COLOURS[rank % len(COLOURS)]}m{prefix}\033[0m"
        for line in iter(stream.readline, b""):
            with self._lock:
                out.write(prefix + line.decode("utf8", "replace").rstrip("\n") + "\n")
                out.flush()
        stream.close()
