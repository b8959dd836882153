"""``whale run``: several training processes of one script, on this machine or over ssh on others."""
from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
import tempfile
import time
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import typer

from whale_tf.cli.common import reported
from whale_tf.cli.doctor import of_run
from whale_tf.cli.elastic import Elastic, Events, Rate, say
from whale_tf.cli.group import Group, Job, WorkerHost
from whale_tf.cluster import LAUNCHED, MOST, Cluster, Processes, devices_of_processes
from whale_tf.cluster.processes import CHANGE
from whale_tf.cluster.rendezvous import Host, Room, split_meeting_point
from whale_tf.config import VERIFIED, Config
from whale_tf.diagnosis.record import FOLDER, STEPS
from whale_tf.documents import check_files
from whale_tf.epl.installed import PATH, check
from whale_tf.errors import ClusterError, ConfigError

LOOPBACK = {"localhost", "127.0.0.1", "[::1]"}
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=2 -o ServerAliveCountMax=3"


def run(
    script: str = typer.Argument(..., help="Python script"),
    arguments: Optional[List[str]] = typer.Argument(None, help="its arguments"),
    module: bool = typer.Option(False, "-m", "--module", help="SCRIPT is the name of a module, as for python -m"),
    workers: str = typer.Option("1", help="processes; with --hosts: on each host; MIN:MAX: as many of all as are left"),
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
    max_restarts: str = typer.Option("0", help="how often to restart all processes when one fails; 3/1h: within a time"),
    rejoin: float = typer.Option(60.0, min=0.0, help="with MIN:MAX: seconds until a lost worker may be taken in again"),
    warm: bool = typer.Option(True, help="with MIN:MAX: start again in forks of a process that has imported TensorFlow"),
    leave_out: str = typer.Option("3/10m", help="with MIN:MAX: a worker that is lost so often is left out for good"),
) -> None:
    """Run a script in several processes, on this machine or on several hosts, as whale_tf's TF_CONFIG workers.

    Every line of output is prefixed with the number of its process, and its host. If a process fails, the others are stopped, and
    the exit status is that of the failed process. On SIGTERM a script that saves checkpoints saves once more, and all processes
    end. With --workers MIN:MAX a job goes on without workers that are lost, and takes them in again (docs/long_runs.md).
    """
    with reported(2):
        least, most = _numbers(workers)
        restarts, flapping = Rate.parse(max_restarts, "--max-restarts"), Rate.parse(leave_out, "--leave-out")
        room = _room(rdzv, nodes, hosts)
        if least is not None and (room is not None or doctor):
            raise ClusterError("--workers is {!r}, but with {} their number is fixed; give one number{}".format(
                workers, *("--doctor", "") if doctor else ("--rdzv", ", or start the hosts by --hosts")))
        worker_hosts = _worker_hosts(hosts, ssh, most, least is not None)
        configured = _configured(config, replicate, auto)
        if epl and (replicate or auto):
            raise ConfigError("--epl is for a script that calls epl.init, and --replicate and --auto for one that calls nothing; "
                              "give one of them")
        variables = dict({VERIFIED: "1"} if verify else {}, **(_with_epl() if epl else {}))
        if record is not None and not doctor:
            raise ClusterError(f"--record is {record!r}, but nothing is measured; add --doctor")
        if doctor:
            check_files({"--record": record}, {})
            if hosts is not None or room is not None:
                raise ClusterError("--doctor reads the records of the processes of this machine; on several hosts call "
                                   "wh.doctor(path=...) in the script, and whale doctor with the files of all")
            folder = tempfile.TemporaryDirectory()
            variables.update({FOLDER: folder.name, STEPS: str(doctor_steps)})
        if room is None:
            variables.update(_variables(len(worker_hosts), devices_per_worker, cluster, configured))
        elif cluster is not None:
            Cluster.parse(cluster)

    def meet(ports: Sequence[int]) -> Job:
        """Where the processes of all hosts are."""
        if room is None:
            return Job([f"{host.name}:{port}" for host, port in zip(worker_hosts, ports)], 0, variables)
        hosts_met, own = room.meet(Host(socket.gethostname(), tuple(ports), devices_per_worker), rdzv_timeout)
        if len({host.devices for host in hosts_met}) > 1:
            raise ClusterError("processes have the same number of devices each, but --devices-per-worker is {}".format(
                ", ".join(f"{host.devices} on {host}" for host in hosts_met)))
        addresses = [address for host in hosts_met for address in host.addresses]
        return Job(addresses, sum(len(one.ports) for one in hosts_met[:own]),
                   dict(variables, **_variables(len(addresses), devices_per_worker, cluster, configured)))
    start = ["-m", "whale_tf.cli.start"] if replicate or auto else ["-m", "whale_tf.epl"] if epl else []
    command = [sys.executable, "-u"] + start + (["-m"] if module else []) + [script] + list(arguments or ())

    if least is not None:
        whole = Cluster.parse(variables["WHALE_CLUSTER"])
        devices = devices_of_processes(whole, Processes(tuple(host.name for host in worker_hosts)))

        def of_some(members: Sequence[int]) -> Dict[str, str]:
            """The environment variables of the processes of some workers."""
            own = variables["WHALE_CLUSTER"]
            if len(members) < len(worker_hosts):
                own = (_variables(len(members), devices_per_worker, None, None)["WHALE_CLUSTER"] if cluster is None else
                       whole.subset([device for worker in members for device in devices[worker]]).to_json(indent=None))
            return dict(variables, **{"WHALE_CLUSTER": own, MOST: str(len(worker_hosts))})

        status = Elastic(command, worker_hosts, least, of_some, grace, restarts, flapping, rejoin, rdzv_timeout, warm,
                         [tuple(whole.devices[index].type for index in each) for each in devices]).run()
    else:
        status = _status_of(command, worker_hosts, meet, grace, restarts)
    if doctor:
        with folder, reported(status or 1):
            typer.echo(of_run(folder.name, record))
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
    raise typer.Exit(_status_of(command, [WorkerHost("127.0.0.1")] * (1 if room else num_workers), meet, 30.0, Rate(0)))


def _with_epl() -> Dict[str, str]:
    """Environment variables under which `import epl` is whale_tf.epl, also in processes that a script starts.

    Raises:
        MissingPackageError: another package epl is installed.
    """
    check()
    return {"PYTHONPATH": os.pathsep.join(filter(None, [PATH, os.environ.get("PYTHONPATH", "")]))}


def _status_of(command: Sequence[str], worker_hosts: Sequence[WorkerHost], meet: Callable[[Sequence[int]], Job], grace: float,
               max_restarts: Rate) -> int:
    """Starts processes until they end well, or too often; their exit status."""
    restarts, change = Events(max_restarts), {}  # type: Events, Dict[str, str]
    while True:
        def meet_again(ports: Sequence[int]) -> Job:
            job = meet(ports)
            return job._replace(variables=dict(job.variables, **change))
        with reported(2):
            group = Group(command, worker_hosts, meet_again, grace)
        status = group.wait()
        if status:
            say(group.failure)
            change[CHANGE] = json.dumps({"what": group.failure, "at": group.failed_at})
        if status == 0 or group.interrupted or not restarts.spend(time.monotonic()):
            return status
        say(f"restarting all processes ({restarts.count(time.monotonic())} of {max_restarts})")


def _numbers(workers: str) -> Tuple[Optional[int], int]:
    """The least and the greatest number of workers; the least is None if the number is fixed.

    Raises:
        ClusterError: they are no such numbers.
    """
    found = re.match(r"^(?:([1-9]\d*):)?([1-9]\d*)$", workers)
    least, most = (found.group(1), int(found.group(2))) if found else (None, 0)
    if not found or least is not None and int(least) > most:
        raise ClusterError(f"--workers is {workers!r}, expected a number from 1 on, or MIN:MAX, such as 2:8")
    return None if least is None else int(least), most


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


def _worker_hosts(hosts: Optional[str], ssh: str, workers: int, is_whole: bool = False) -> List[WorkerHost]:
    """The host of each process: one host's processes after the other's.

    Args:
        workers: on each host that names no number; or, if ``is_whole``, on all together.

    Raises:
        ClusterError: ``hosts`` or ``ssh`` is not valid.
    """
    if hosts is None:
        if ssh != SSH:
            raise ClusterError(f"--ssh is {ssh!r}, but no --hosts are given; add --hosts HOST,HOST")
        return [WorkerHost("127.0.0.1")] * workers
    try:
        command = shlex.split(ssh)
    except ValueError as error:
        raise ClusterError(f"--ssh is {ssh!r}, which a shell cannot read: {error}") from None
    if not command:
        raise ClusterError("--ssh is empty, expected a command such as 'ssh -p 2222'")
    worker_hosts: List[WorkerHost] = []
    texts = hosts.split(",")
    if is_whole:
        given = [int(text.rpartition(":")[2]) for text in texts if re.search(r":[1-9]\d{0,3}$", text.strip())]
        others = len(texts) - len(given)
        left = workers - sum(given)
        each, rest = divmod(left, others) if others else (1, left)
        if rest or each < 1:
            raise ClusterError(f"--workers asks for up to {workers} workers, which do not divide over --hosts {hosts!r}; write "
                               "HOST:PROCESSES so that they add up to this number")
        workers = each
    for text in texts:
        match = re.match(r"^(?:([^\s@:]+)@)?([^\s@:\[\]-][^\s@:\[\]]*|\[[0-9a-fA-F:.]+\])(?::([1-9]\d{0,3}))?$", text.strip())
        if match is None:
            raise ClusterError(f"--hosts is {hosts!r}, and {text.strip()!r} is not HOST, USER@HOST or HOST:PROCESSES")
        user, host, count = match.groups()
        there = f"{user}@{host.strip('[]')}" if user else host.strip("[]")
        for _ in range(int(count or workers)):
            worker_hosts.append(WorkerHost(host, (*command, there)))
    names = {host.name for host in worker_hosts}
    if names & LOOPBACK and names - LOOPBACK:
        raise ClusterError(
            f"--hosts is {hosts!r}, but other hosts cannot reach {', '.join(sorted(names & LOOPBACK))}; give this host's name")
    return worker_hosts


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
    return (given if replicate or searches else given.changed(auto__auto_parallel=True)).to_json()


def _variables(workers: int, devices_per_worker: int, cluster: Optional[str], config: Optional[str]) -> Dict[str, str]:
    """The environment variables of all processes.

    Raises:
        ClusterError, ConfigError: cluster or configuration is not valid.
    """
    short = f"cpu:{devices_per_worker}"
    described = cluster or (f"{workers}x{short}" if workers > 1 else short)
    whole = Cluster.parse(described)
    total = len(whole)
    if total % workers and len(whole.nodes) != workers:
        raise ClusterError(f"the cluster {described!r} has {total} devices, which do not divide over {workers} workers")
    variables = {"WHALE_CLUSTER": described, LAUNCHED: "1"}
    if config is not None:
        variables["WHALE_CONFIG"] = Config.parse(config).to_json(indent=None)
    return variables
