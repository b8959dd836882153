"""The training processes of a job, and the devices of the cluster that each has."""
from __future__ import annotations

import json
import os
import re
import socket
import sys
from dataclasses import dataclass
from fractions import Fraction
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from whale_tf.cluster.cluster import Cluster
from whale_tf.cluster.environment import Environment, host_of, read_environment
from whale_tf.errors import ClusterError

JOB = "worker"  # all training processes are tasks of one TensorFlow job, in rank order
LAUNCHED = "WHALE_RUN"  # environment variable set in processes started by `whale run`
MOST = "WHALE_MAX_WORKERS"  # the same in a job whose number of processes changes: the greatest number that it has
CHANGE = "WHALE_CHANGE"  # the same where processes are started again: why, and when that was noticed, as JSON
FIRST_PORT = 27182  # port of a host's first process, if the launcher names only hosts

_TASK = re.compile(r"/task:(\d+)/")
DeviceNumbers = Tuple[Tuple[int, ...], ...]  # [process][device]


@dataclass(frozen=True)
class Processes:
    """Attributes:
    addresses: ``host:port`` of every training process, by rank.
    rank: this process's number; process 0 is the chief, which writes checkpoints and summaries.
    steps: of each step, the processes that run its parts, which correspond; steps side by side divide a mini-batch.  (): each
        process runs a step alone, on its own mini-batch.
    within: the prefix of TensorFlow's names of this single process's devices, if it is one of a larger job.
    most: the greatest number of processes that the job has from one start to the next; 0: always as many as now.
    """

    addresses: Tuple[str, ...] = ("localhost:0",)
    rank: int = 0
    steps: Tuple[Tuple[int, ...], ...] = ()
    within: str = ""
    most: int = 0

    @property
    def count(self) -> int:
        return len(self.addresses)

    @property
    def mini_batches(self) -> int:
        """How many mini-batches of the script are one global mini-batch: one for each process, or for each that the job may
        have, so that a step has the same examples whatever their number."""
        return max(self.most, self.count)

    @property
    def runs_part(self) -> bool:
        """Whether each process runs its own part of a step."""
        return bool(self.steps)

    @property
    def graphs(self) -> int:
        """The number of steps that are computed side by side."""
        return len(self.steps) or self.count

    @property
    def step(self) -> int:
        """The number of this process's step among those."""
        return next(number for number, step in enumerate(self.steps or self._alone) if self.rank in step)

    @property
    def members(self) -> Tuple[int, ...]:
        """The processes that run this process's step."""
        return (self.steps or self._alone)[self.step]

    @property
    def leads(self) -> bool:
        """Whether this is the first of those."""
        return self.rank == self.members[0]

    @property
    def peers(self) -> Tuple[Tuple[int, ...], ...]:
        """Of each part of a step, the processes that run it, one in each step."""
        return tuple(zip(*(self.steps or self._alone)))

    @property
    def _alone(self) -> Tuple[Tuple[int, ...], ...]:
        return tuple((rank,) for rank in range(self.count))

    @property
    def is_chief(self) -> bool:
        return self.rank == 0

    def prefix(self, rank: int) -> str:
        """The prefix of TensorFlow's names of a process's devices."""
        return self.within or "/job:{}/replica:0/task:{}".format(*((JOB, rank) if self.count > 1 else ("localhost", 0)))

    def alone(self) -> Processes:
        """This process as a job of its own, with the devices that it has in this one."""
        return Processes((self.addresses[self.rank],), within=self.prefix(self.rank))

    @property
    def host_device(self) -> str:
        """This process's device for input pipelines and small integer arithmetic; each process's own, if they run parts of one
        step."""
        return "/device:CPU:0" if self.runs_part else self.prefix(self.rank) + "/device:CPU:0"


ONE_PROCESS = Processes()


def process_of(device: str) -> Optional[int]:
    """The number of the process in a device's name; None: it names none."""
    found = _TASK.search(device)
    return int(found.group(1)) if found else None


def find_processes(environ: Mapping[str, str] = os.environ) -> Processes:
    """The job described by the environment (see :func:`read_environment`); a single process if it describes none.

    An evaluator is a separate single process.

    Raises:
        ClusterError: the environment contradicts itself, or names parameter servers, which are not used.
    """
    environment, most = read_environment(environ), int(environ.get(MOST) or 0)
    if environment is not None and environment.role == "evaluator":
        return ONE_PROCESS
    if environment is None:
        return Processes(most=most)
    if environment.parameter_servers or environment.rank is None:
        raise ClusterError(
            "{} names parameter servers ({}), but gradients are summed among the workers themselves; start workers "
            "only, and leave \"ps\" out".format(environment.source, ", ".join(environment.parameter_servers)))
    if len(environment.addresses) == 1:
        return Processes(most=most)
    return Processes(_with_ports(environment), environment.rank, most=most)


def _with_ports(environment: Environment) -> Tuple[str, ...]:
    """Addresses without a port get one by their index on their host."""
    seen: List[str] = []
    result = []
    for address in environment.addresses:
        if host_of(address) == address:
            result.append(f"{address}:{FIRST_PORT + seen.count(address)}")
            seen.append(address)
        else:
            result.append(address)
    return tuple(result)


def whole_cluster(part: Cluster, processes: Processes) -> Cluster:
    """The cluster of all processes if each has devices like ``part``: one node per process."""
    if processes.count == 1:
        return part
    nodes = [dict(node) for node in part.to_dict()["nodes"]]
    for node in nodes:
        node.setdefault("nic", {"bandwidth_gbits_per_s": 10 if node["devices"][0]["type"] == "CPU" else 50})
    return Cluster.parse({"name": part.name, "nodes": nodes * processes.count,
                          "device_types": part.to_dict().get("device_types", {})})


def devices_of_processes(cluster: Cluster, processes: Processes) -> DeviceNumbers:
    """Device numbers of every process: one node each if there are as many nodes, otherwise equal parts in order.

    Raises:
        ClusterError: the devices do not divide over the processes.
    """
    count, total = processes.count, len(cluster.devices)
    if len(cluster.nodes) == count:
        return cluster.nodes
    if total % count == 0:
        each = total // count
        return tuple(tuple(range(rank * each, (rank + 1) * each)) for rank in range(count))
    raise ClusterError(
        "there are {} processes ({}), but the cluster {!r} has {} devices on {} nodes, which are neither a node for each process "
        "nor equal parts; describe a node for each process, e.g. '{}xcpu:2'".format(
            count, ", ".join(processes.addresses), cluster.name, total, len(cluster.nodes), count))


def process_speeds(cluster: Cluster, processes: Processes) -> Tuple[int, ...]:
    """The total fp32 speed of each process's devices, as small whole numbers in proportion.

    Raises:
        ClusterError: the devices do not divide over the processes.
    """
    speeds = [sum(cluster.devices[index].peak_flops_per_s["fp32"] for index in part)
              for part in devices_of_processes(cluster, processes)]
    parts = [max(Fraction(1, 100), Fraction(speed / max(speeds)).limit_denominator(100)) for speed in speeds]
    common = np.lcm.reduce([part.denominator for part in parts])
    return tuple(int(part * common) for part in parts)


def device_names(cluster: Cluster, processes: Processes) -> Tuple[str, ...]:
    """TensorFlow's name of every device of the cluster.  In a job of several processes, each numbers its devices of a
    kind from zero."""
    if processes.count == 1 and not processes.within:
        return tuple(device.tf_name() for device in cluster.devices)
    names = {}
    for rank, part in enumerate(devices_of_processes(cluster, processes)):
        numbers = {"CPU": 0, "GPU": 0}
        for index in part:
            kind = cluster.devices[index].kind
            names[index] = f"{processes.prefix(rank)}/device:{kind}:{numbers[kind]}"
            numbers[kind] += 1
    return tuple(names[index] for index in range(len(cluster.devices)))


def host_name(cluster: Cluster, processes: Processes, rank: int) -> str:
    """TensorFlow's name of the device that stands for a process's host memory: the CPU next to GPUs, and one more CPU device next
    to CPU devices."""
    devices = range(len(cluster)) if processes.count == 1 else devices_of_processes(cluster, processes)[rank]
    return f"{processes.prefix(rank)}/device:CPU:{sum(cluster.devices[index].kind == 'CPU' for index in devices)}"


_held: List[socket.socket] = []


def free_ports(count: int) -> List[int]:
    """Unused ports of this machine, held until this process ends.

    A port that nobody holds may be another connection's a moment later.  One that is bound with SO_REUSEADDR, and does not
    listen, goes to nobody who asks the system for any port, but a server that asks for it with SO_REUSEADDR can have it, as
    TensorFlow's does.  Only Linux lets two sockets share a port so.
    """
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("", 0))
    found = [one.getsockname()[1] for one in sockets]
    if sys.platform == "linux":
        _held.extend(sockets)
    else:
        for one in sockets:
            one.close()
    return found


def tf_configs(ports: Sequence[int]) -> List[Dict[str, str]]:
    """``TF_CONFIG`` of each process at these ports of this machine."""
    return tf_configs_at([f"127.0.0.1:{port}" for port in ports])


def tf_configs_at(addresses: Sequence[str]) -> List[Dict[str, str]]:
    """``TF_CONFIG`` of each process at these addresses.  A single process gets an empty object, which every reader treats as a
    local run, whatever other job the environment describes (TensorFlow cannot read an empty string)."""
    if len(addresses) == 1:
        return [{"TF_CONFIG": "{}"}]
    return [{"TF_CONFIG": json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}})}
            for rank in range(len(addresses))]
