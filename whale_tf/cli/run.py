"""``whale run``: several training processes of one script, on this machine or over ssh on others."""
from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import typer

from whale_tf.cli import keeper as module_of_keeper
from whale_tf.cli.common import reported
from whale_tf.cli.doctor import check_path, of_run
from whale_tf.cli.keeper import PORT
from whale_tf.cluster import LAUNCHED, Cluster
from whale_tf.cluster.processes import tf_configs_at
from whale_tf.cluster.rendezvous import Host, Room, split_meeting_point
from whale_tf.config import VERIFIED, Config
from whale_tf.diagnosis.record import FOLDER, STEPS
from whale_tf.epl.installed import PATH, check
from whale_tf.errors import ClusterError, ConfigError

POLL_S = 0.1
ALIVE_S, LEASE_S = 2.0, 30.0  # keepers on other hosts are told every 2 s that this process lives; after 30 s they end their own
STOPPED_S = 5.0  # a process that is stopped for this long keeps the others waiting
KILL_S = 5.0
NEVER_S = 1e12
LOOPBACK = {"localhost", "127.0.0.1", "[::1]"}
# the keeper's text is the first line that it reads: no byte more, since the others are for what it does
KEEPER = (sys.executable, "-I", "-S", "-c", "import io, json; exec(json.loads(io.FileIO(0, closefd=False).readline()))")
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=3 -o ServerAliveCountMax=3"
# environment variables that say something of this host, this user's session here, or this shell
OWN_TO_A_HOST = re.compile(
    r"(HOME|USER|LOGNAME|MAIL|SHELL|SHLVL|HOST|HOSTNAME|PWD|OLDPWD|TERM.*|DISPLAY|TMPDIR|TMUX.*|_|(SSH|XDG|DBUS|SLURM|BASH_FUNC)_.*)$")
COLOURS = (36, 33, 32, 35, 34, 31)  # ANSI: cyan, yellow, green, magenta, blue, red


def run(
    script: str = typer.Argument(..., help="Python script"),
    arguments: Optional[List[str]] = typer.Argument(None, help="its arguments"),
    module: bool = typer.Option(False, "-m", "--module", help="SCRIPT is the name of a module, as for python -m"),
    workers: int = typer.Option(1, min=1, help="processes; with --hosts: on each host"),
    hosts: Optional[str] = typer.Option(None, help="start them on these hosts over ssh: HOST[:PROCESSES],..."),
    rdzv: Optional[str] = typer.Option(None, help="HOST:PORT where as many hosts as --nodes meet that run this command"),
    nodes: int = typer.Option(1, min=1, help="hosts that meet at --rdzv, each with its own --workers"),
    rdzv_timeout: float = typer.Option(300.0, min=0.1, help="seconds to wait for the other hosts"),
    ssh: str = typer.Option(SSH, help="the command that is given a host and a command to run there"),
    devices_per_worker: int = typer.Option(1, min=1, help="logical CPU devices of each process; GPUs: see --cluster"),
    cluster: Optional[str] = typer.Option(None, help="all devices: a file, or a form such as 4xgpu:8; default: CPU devices"),
    config: Optional[str] = typer.Option(None, help="configuration for wh.init() calls that give none: JSON text or a file"),
    replicate: bool = typer.Option(False, "--replicate", help="for a script without whale_tf lines: train it data parallel"),
    auto: bool = typer.Option(False, "--auto", help="for a script without whale_tf lines: search for the fastest plan"),
    epl: bool = typer.Option(False, "--epl", help="for a script written for EPL: `import epl` is whale_tf.epl (docs/epl.md)"),
    verify: bool = typer.Option(False, "--verify", help="compare the first training step with the local one (docs/verify.md)"),
    doctor: bool = typer.Option(False, "--doctor", help="measure steps, and say at the end why they are slow (docs/doctor.md)"),
    doctor_steps: int = typer.Option(20, min=6, help="how many steps to measure"),
    record: Optional[str] = typer.Option(None, help="with --doctor: keep what was measured in this file"),
    grace: float = typer.Option(30.0, min=0.0, help="seconds that stopped processes have to save and end"),
    max_restarts: int = typer.Option(0, min=0, help="how often to restart all processes when one fails"),
) -> None:
    """Run a script in several processes, on this machine or on several hosts, as whale_tf's TF_CONFIG workers.

    Every line of output is prefixed with the number of its process, and its host. If a process fails, the others are stopped, and
    the exit status is that of the failed process. On SIGTERM a script that saves checkpoints saves once more, and all processes
    end.
    """
    with reported(2):
        room = _room(rdzv, nodes, hosts)
        places = _places(hosts, ssh, workers)
        configured = _configured(config, replicate, auto)
        if epl and (replicate or auto):
            raise ConfigError("--epl is for a script that calls epl.init, and --replicate and --auto for one that calls nothing; "
                              "give one of them")
        variables = dict({VERIFIED: "1"} if verify else {}, **(_with_epl() if epl else {}))
        if doctor:
            check_path(record)
            if hosts is not None or room is not None:
                raise ClusterError("--doctor reads the records of the processes of this machine; on several hosts call "
                                   "wh.doctor(path=...) in the script, and whale doctor with the files of all")
            folder = tempfile.TemporaryDirectory()
            variables.update({FOLDER: folder.name, STEPS: str(doctor_steps)})
        if room is None:
            variables.update(_variables(len(places), devices_per_worker, cluster, configured))
        elif cluster is not None:
            Cluster.parse(cluster)

    def meet(ports: Sequence[int]) -> Job:
        """Where the processes of all hosts are."""
        if room is None:
            return Job([f"{place.host}:{port}" for place, port in zip(places, ports)], 0, variables)
        hosts_met, own = room.meet(Host(socket.gethostname(), tuple(ports), devices_per_worker), rdzv_timeout)
        if len({host.devices for host in hosts_met}) > 1:
            raise ClusterError("processes have the same number of devices each, but --devices-per-worker is {}".format(
                ", ".join(f"{host.devices} on {host}" for host in hosts_met)))
        addresses = [address for host in hosts_met for address in host.addresses]
        return Job(addresses, sum(len(one.ports) for one in hosts_met[:own]),
                   dict(variables, **_variables(len(addresses), devices_per_worker, cluster, configured)))
    start = ["-m", "whale_tf.cli.start"] if replicate or auto else ["-m", "whale_tf.epl"] if epl else []
    command = [sys.executable, "-u"] + start + (["-m"] if module else []) + [script] + list(arguments or ())
    status = _status_of(command, places, meet, grace, max_restarts)
    if doctor:
        with reported():
            typer.echo(of_run(folder.name, record))
        folder.cleanup()
    raise typer.Exit(status)


def epl_launch(
    training_script: str = typer.Argument(..., help="Python or bash script; its argument is the worker's directory"),
    num_workers: int = typer.Option(..., "--num_workers", min=1, help="processes"),
    gpu_per_worker: int = typer.Option(..., "--gpu_per_worker", min=1, help="devices of each"),
    machine_rank: Optional[int] = typer.Option(None, "--machine_rank", min=0, help="number of this host in the machine list"),
    machine_list: Optional[str] = typer.Option(None, "--machine_list", help="HOST:PORT of each worker, one on each host"),
    task_label: Optional[str] = typer.Option(None, "--task_label", help="end of the directory's name"),
    log_dir: Optional[str] = typer.Option(None, "--log_dir", help="directory; default: experiments/..., as in EPL"),
    debug: Optional[str] = typer.Option(None, "--debug", help="changes nothing: all output is shown"),
    cluster: Optional[str] = typer.Option(None, help="devices of all workers, as for whale run; default: CPU devices"),
) -> None:
    """EPL's epl-launch, as `whale run --epl`: its arguments are the same.

    A worker's directory, LOG_DIR/RANK, is made before it starts.  Output is shown here, each line with the number of its worker.
    """
    with reported(2):
        hosts = machine_list.split(",") if machine_list else []
        if hosts and (machine_rank is None or machine_rank >= len(hosts) or len(hosts) != num_workers):
            raise ClusterError(f"--machine_list has {len(hosts)} host(s) for --num_workers {num_workers}, and --machine_rank is "
                               f"{machine_rank}; give one host for each worker, and run this command on each with its number")
        name = "{}_{}w{}g_{}{}".format(time.strftime("%Y-%m-%d"), num_workers, gpu_per_worker,
                                       os.path.basename(training_script).split(".")[0], f"_{task_label}" if task_label else "")
        directory = os.path.abspath(log_dir or os.path.join("experiments", name))
        room = Room(split_meeting_point(hosts[0]), len(hosts)) if len(hosts) > 1 else None
        variables = dict(_variables(num_workers, gpu_per_worker, cluster, None), **_with_epl())

    def meet(ports: Sequence[int]) -> Job:
        if room is None:
            return Job([f"127.0.0.1:{port}" for port in ports], 0, variables)
        met, own = room.meet(Host(socket.gethostname(), tuple(ports), gpu_per_worker), 300.0)
        return Job([address for host in met for address in host.addresses], own, variables)

    command = [sys.executable, "-u", "-m", "whale_tf.epl", "--task", directory, training_script]
    raise typer.Exit(_status_of(command, [Place("127.0.0.1")] * (1 if room else num_workers), meet, 30.0, 0))


def _with_epl() -> Dict[str, str]:
    """Environment variables under which `import epl` is whale_tf.epl, also in processes that a script starts.

    Raises:
        MissingPackageError: another package epl is installed.
    """
    check()
    return {"PYTHONPATH": os.pathsep.join(filter(None, [PATH, os.environ.get("PYTHONPATH", "")]))}


def _status_of(command: Sequence[str], places: Sequence[Place], meet: Callable[[Sequence[int]], Job], grace: float,
               max_restarts: int) -> int:
    """Starts processes until they end well, or too often; their exit status."""
    status = 0
    for attempt in range(max_restarts + 1):
        if attempt:
            typer.echo(f"whale run: restarting all processes ({attempt} of {max_restarts})", err=True)
        with reported(2):
            group = Group(command, places, meet, grace)
        status = group.wait()
        if status == 0 or group.interrupted:
            break
    return status


def _room(rdzv: Optional[str], nodes: int, hosts: Optional[str]) -> Optional[Room]:
    """Where hosts meet, if they do.

    Raises:
        ClusterError: the options contradict each other.
    """
    if rdzv is None:
        if nodes > 1:
            raise ClusterError(f"--nodes is {nodes}, but there is no address where they meet; add --rdzv HOST:PORT")
        return None
    if hosts is not None:
        raise ClusterError("--hosts and --rdzv are given; give --hosts on one host, which starts all, or --rdzv on every host")
    return Room(split_meeting_point(rdzv), nodes)


def _places(hosts: Optional[str], ssh: str, workers: int) -> List[Place]:
    """Where each process runs: one host's processes after the other's.

    Raises:
        ClusterError: ``hosts`` or ``ssh`` is not valid.
    """
    if hosts is None:
        if ssh != SSH:
            raise ClusterError(f"--ssh is {ssh!r}, but no --hosts are given; add --hosts HOST,HOST")
        return [Place("127.0.0.1")] * workers
    try:
        command = shlex.split(ssh)
    except ValueError as error:
        raise ClusterError(f"--ssh is {ssh!r}, which a shell cannot read: {error}") from None
    if not command:
        raise ClusterError("--ssh is empty, expected a command such as 'ssh -p 2222'")
    places: List[Place] = []
    for text in hosts.split(","):
        match = re.match(r"^(?:([^\s@:]+)@)?([^\s@:\[\]-][^\s@:\[\]]*|\[[0-9a-fA-F:.]+\])(?::([1-9]\d{0,3}))?$", text.strip())
        if match is None:
            raise ClusterError(f"--hosts is {hosts!r}, and {text.strip()!r} is not HOST, USER@HOST or HOST:PROCESSES")
        user, host, count = match.groups()
        there = f"{user}@{host.strip('[]')}" if user else host.strip("[]")
        for _ in range(int(count or workers)):
            places.append(Place(host, (*command, there)))
    names = {place.host for place in places}
    if names & LOOPBACK and names - LOOPBACK:
        raise ClusterError(
            f"--hosts is {hosts!r}, but other hosts cannot reach {', '.join(sorted(names & LOOPBACK))}; give this host's name")
    return places


def _configured(config: Optional[str], replicate: bool, auto: bool) -> Optional[str]:
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


class Job(NamedTuple):
    """What the processes of a host are told.

    Attributes:
        addresses: of all processes, by rank.
        first: rank of the host's first process.
        variables: environment variables, in addition to this process's own.
    """

    addresses: List[str]
    first: int
    variables: Dict[str, str]


class Place(NamedTuple):
    """Where a process runs.

    Attributes:
        host: the name by which the other processes reach it.
        ssh: the command that runs another command there; none: this machine.
    """

    host: str
    ssh: Tuple[str, ...] = ()


class Group:
    """Processes that run and end together, each with its keeper.

    Args:
        command: the command that each process runs.
        places: where each runs.
        meet: says, once the ports of these processes are known, where all processes of the job are.
        grace_s: seconds between SIGTERM and SIGKILL.

    Attributes:
        interrupted: whether a signal asked the processes to end.

    Raises:
        ClusterError: a keeper does not start, or a host does not come.
    """

    def __init__(self, command: Sequence[str], places: Sequence[Place], meet: Callable[[Sequence[int]], Job],
                 grace_s: float) -> None:
        self._grace_s = grace_s
        self.interrupted = False
        self._interrupted_at: Optional[float] = None
        self._places = places
        self._keepers: List[subprocess.Popen] = []
        self._threads: List[threading.Thread] = []
        self._lock = threading.Lock()
        self._told = 0.0
        self._first = 0  # rank of the first of these processes
        try:
            for place in places:
                self._keepers.append(subprocess.Popen(
                    [*place.ssh, *_quoted(KEEPER, bool(place.ssh))], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE, start_new_session=True))
            for rank, keeper in enumerate(self._keepers):
                self._follow(rank, keeper.stderr, sys.stderr)
                self._write(keeper, json.dumps(inspect.getsource(module_of_keeper)))
            job = meet([self._port(index) for index in range(len(places))])
            self._first = job.first
            for index, own in enumerate(tf_configs_at(job.addresses)[job.first:job.first + len(places)]):
                self._follow(index, self._keepers[index].stdout, sys.stdout)
                self._write(self._keepers[index], json.dumps(
                    self._task(command, places[index], dict(job.variables, **own), len(job.addresses) > 1)))
        except BaseException:
            self._signal(signal.SIGKILL)
            for keeper in self._keepers:
                keeper.kill()
            raise

    def _task(self, command: Sequence[str], place: Place, variables: Mapping[str, str], has_others: bool) -> Dict[str, Any]:
        there = {name: value for name, value in os.environ.items() if not OWN_TO_A_HOST.match(name)} if place.ssh else {}
        return {"command": list(command), "variables": dict(there, **variables), "directory": os.getcwd(),
                "mimics": not place.ssh, "grace_s": self._grace_s, "lease_s": LEASE_S if place.ssh else NEVER_S,
                "stopped_s": STOPPED_S if has_others else NEVER_S}

    def _port(self, rank: int) -> int:
        """The port that a keeper has found; what the host's shell prints before is shown."""
        keeper = self._keepers[rank]
        assert keeper.stdout is not None
        for line in iter(keeper.stdout.readline, b""):
            if line.startswith(PORT.encode()):
                return int(line[len(PORT):])
            self._print(rank, line, sys.stdout)
        raise ClusterError("process {} cannot be started on {}: {} ended with status {}".format(
            rank, self._places[rank].host, " ".join(self._places[rank].ssh) or "its keeper", keeper.wait()))

    def wait(self) -> int:
        """Wait for all processes to end.  If one fails, stop the others.  Returns 0, or the status of the first that failed."""
        before = {number: signal.signal(number, self._forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
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
        if not self._have_ended_in(self._grace_s):
            self._signal(signal.SIGKILL)
            self._have_ended_in(KILL_S)
        for keeper in self._keepers:
            if keeper.poll() is None:  # its connection is broken, and it will end the process by itself
                keeper.kill()
            keeper.wait()

    def _have_ended_in(self, seconds: float) -> bool:
        limit = time.monotonic() + seconds
        while any(keeper.poll() is None for keeper in self._keepers):
            if time.monotonic() > limit:
                return False
            self._tell_alive()
            time.sleep(POLL_S)
        return True

    def _first_failure(self) -> int:
        while True:
            statuses = [keeper.poll() for keeper in self._keepers]
            failed = [(rank, status) for rank, status in enumerate(statuses) if status]
            if failed:
                rank, status = failed[0]
                sys.stderr.write(f"whale run: process {self._first + rank} ended with {self._how(rank, status)}\n")
                return 128 - status if status < 0 else status
            if all(status == 0 for status in statuses):
                return 0
            if self._interrupted_at is not None and time.monotonic() - self._interrupted_at > self._grace_s:
                sys.stderr.write("whale run: processes did not end when asked to\n")
                return 128 + signal.SIGKILL
            self._tell_alive()
            time.sleep(POLL_S)

    def _how(self, rank: int, status: int) -> str:
        place = self._places[rank]
        number = -status if status < 0 else status - 128 if place.ssh else 0
        if number in [each.value for each in signal.Signals]:
            return f"signal {signal.Signals(number).name}"
        if place.ssh and status == 255:
            return f"status 255: {place.ssh[0]} has no connection to {place.host}"
        return f"status {status}"

    def _forward(self, number: int, frame: Any) -> None:
        self.interrupted = True
        self._interrupted_at = self._interrupted_at or time.monotonic()
        self._signal(number)

    def _signal(self, number: int) -> None:
        """Send a signal to the running processes, and SIGKILL to all processes that they have started, too."""
        for keeper in self._keepers:
            self._write(keeper, f"signal {int(number)}")

    def _tell_alive(self) -> None:
        """Ask keepers on other hosts for their processes: they end them when nobody does."""
        if time.monotonic() - self._told > ALIVE_S:
            self._told = time.monotonic()
            for keeper, place in zip(self._keepers, self._places):
                if place.ssh:
                    self._write(keeper, "alive")

    def _write(self, keeper: subprocess.Popen, line: str) -> None:
        assert keeper.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            os.write(keeper.stdin.fileno(), line.encode() + b"\n")

    def _follow(self, rank: int, stream: Optional[IO[bytes]], out: IO[str]) -> None:
        thread = threading.Thread(target=self._copy, args=(rank, stream, out), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _copy(self, rank: int, stream: IO[bytes], out: IO[str]) -> None:
        for line in iter(stream.readline, b""):
            self._print(rank, line, out)
        stream.close()

    def _print(self, rank: int, line: bytes, out: IO[str]) -> None:
        place = self._places[rank]
        prefix = f"[{self._first + rank} {place.host}] " if place.ssh else f"[{self._first + rank}] "
        if out.isatty():
            prefix = f"\033[{COLOURS[rank % len(COLOURS)]}m{prefix}\033[0m"
        with self._lock:
            out.write(prefix + line.decode("utf8", "replace").rstrip("\n") + "\n")
            out.flush()


def _quoted(command: Sequence[str], for_shell: bool) -> List[str]:
    """A command as arguments, or as the one argument that ssh gives to a shell."""
    return [" ".join(map(shlex.quote, command))] if for_shell else list(command)
