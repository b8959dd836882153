"""The job's processes and their hosts, read from environment variables set by a launcher or scheduler.

Read, in this order: ``TF_CONFIG`` (TensorFlow's own; Kubeflow's TFJob sets it), Volcano's ``VC_*_HOSTS``, Kubernetes
jobs with ``MASTER_ADDR``/``WORLD_SIZE``/``RANK`` (Kubeflow's PyTorchJob, indexed jobs, stateful sets), Horovod's and Open MPI's
ranks, SLURM, torchrun.  Horovod, Open MPI and torchrun name no hosts, so all their processes must be on one host.
"""
from __future__ import annotations

import json
import re
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from whale_tf.errors import ClusterError, did_you_mean

ROLES = ("chief", "worker", "ps", "evaluator")
TRAINING_ROLES = ("chief", "master", "worker")


class Environment(NamedTuple):
    """The processes of a job.

    Attributes:
        source: ``"TF_CONFIG"``, ``"Volcano"``, ``"Kubernetes"``, ``"Horovod"``, ``"Open MPI"``, ``"SLURM"`` or
            ``"torchrun"``.
        addresses: host or host:port of each training process, by rank.
        rank: this process's index in ``addresses``; None for a role that does not train (ps, evaluator).
        role: TensorFlow's name for this process's role.
        devices_per_node: GPUs allocated by the scheduler on each node, if known.
        parameter_servers: addresses of the ps tasks.
    """

    source: str
    addresses: Tuple[str, ...]
    rank: Optional[int]
    role: str = "worker"
    devices_per_node: Optional[int] = None
    parameter_servers: Tuple[str, ...] = ()

    @property
    def nodes(self) -> Tuple[str, ...]:
        """The hosts, each once, in the order of their first process."""
        return tuple(dict.fromkeys(host_of(address) for address in self.addresses))

    @property
    def node(self) -> Optional[int]:
        """This process's index in ``nodes``."""
        return None if self.rank is None else self.nodes.index(host_of(self.addresses[self.rank]))

    def short_form(self, devices: Optional[str] = None) -> str:
        """The cluster of these nodes as text for ``Cluster.parse``; ``devices`` describes one node, by default the GPUs
        allocated by the scheduler (``gpu:N``), else one CPU device per process of a node."""
        if devices is None:
            per_node = len(self.addresses) // len(self.nodes)
            devices = f"gpu:{self.devices_per_node}" if self.devices_per_node else f"cpu:{per_node}"
        return f"{len(self.nodes)}x{devices}" if len(self.nodes) > 1 else devices


def host_of(address: str) -> str:
    """``"a:80" -> "a"``, ``"[::1]:80" -> "::1"``."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.rpartition(":")[0] if address.count(":") == 1 else address


def read_environment(environ: Mapping[str, str]) -> Optional[Environment]:
    """The job this process belongs to; None if ``environ`` describes none.

    Raises:
        ClusterError: the variables contradict each other or cannot be read.
    """
    if environ.get("TF_CONFIG", "").strip():
        return _tf_config(environ["TF_CONFIG"])
    if any(re.match(r"VC_.+_HOSTS$", key) for key in environ):
        return _volcano(environ)
    if "KUBERNETES_SERVICE_HOST" in environ and "MASTER_ADDR" in environ:
        return _kubernetes(environ)
    for source, keys in ON_ONE_HOST.items():
        if source != "torchrun" and keys.size in environ:
            return _on_one_host(environ, source, keys)
    if "SLURM_JOB_ID" in environ and _slurm_list(environ) is not None:
        return _slurm(environ)
    if "LOCAL_WORLD_SIZE" in environ and "MASTER_PORT" in environ:
        return _on_one_host(environ, "torchrun", ON_ONE_HOST["torchrun"])
    return None


def _number(environ: Mapping[str, str], key: str, at_least: int = 0) -> int:
    text = environ.get(key, "")
    if not text.isdigit() or int(text) < at_least:
        raise ClusterError(f"{key}={text!r}, expected a whole number of at least {at_least}")
    return int(text)


def _rank_in(rank: int, addresses: Tuple[str, ...], key: str) -> int:
    if rank >= len(addresses):
        raise ClusterError("{}={}, but there are {} processes (0..{}): {}".format(
            key, rank, len(addresses), len(addresses) - 1, ", ".join(addresses)))
    return rank


# ---- TF_CONFIG ------------------------------------------------------------------------------------------------------

def _tf_config(text: str) -> Optional[Environment]:
    """``{"cluster": {"chief": [...], "worker": [...]}, "task": {"type": "worker", "index": 0}}``."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ClusterError(f"TF_CONFIG is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ClusterError(f'TF_CONFIG is {value!r}, expected {{"cluster": ..., "task": ...}}')
    cluster, task = value.get("cluster", {}), value.get("task", {})
    if not cluster:
        return None  # TensorFlow's own meaning: a local run
    groups = _groups(cluster)
    role, index = _task(task, groups)
    training = [(name, address) for name in TRAINING_ROLES for address in groups.get(name, ())]
    if not training:
        raise ClusterError("TF_CONFIG names no worker and no chief; add \"worker\": [\"host:port\", ...]")
    addresses = tuple(address for _, address in training)
    rank = addresses.index(groups[role][index]) if role in TRAINING_ROLES else None
    return Environment("TF_CONFIG", addresses, rank, role, None, groups.get("ps", ()))


def _groups(cluster: Any) -> Dict[str, Tuple[str, ...]]:
    if not isinstance(cluster, dict):
        raise ClusterError(f'TF_CONFIG\'s "cluster" is {cluster!r}, expected {{"worker": ["host:port", ...]}}')
    groups: Dict[str, Tuple[str, ...]] = {}
    for role, addresses in cluster.items():
        if role not in ROLES + ("master",):
            raise ClusterError("TF_CONFIG has an unknown role {!r}; known: {}.{}".format(
                role, ", ".join(ROLES), did_you_mean(str(role), ROLES)))
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            raise ClusterError(f'TF_CONFIG\'s {role!r} is {addresses!r}, expected a list of "host:port"')
        groups[role] = tuple(addresses)
    every = [address for row in groups.values() for address in row]
    twice = [address for address in every if every.count(address) > 1]
    if twice:
        raise ClusterError(f"TF_CONFIG names the address {twice[0]} more than once; each task needs its own host:port")
    return groups


def _task(task: Any, groups: Mapping[str, Tuple[str, ...]]) -> Tuple[str, int]:
    if not isinstance(task, dict) or "type" not in task:
        raise ClusterError(f'TF_CONFIG\'s "task" is {task!r}, expected {{"type": "worker", "index": 0}}')
    role, index = task["type"], task.get("index", 0)
    if isinstance(index, str) and index.isdigit():
        index = int(index)
    if role == "evaluator" and role not in groups:
        return role, 0  # an evaluator is not part of the cluster
    if role not in groups:
        raise ClusterError("TF_CONFIG says this task is a {!r}, but its cluster has only {}".format(
            role, ", ".join(sorted(groups))))
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(groups[role]):
        raise ClusterError(f"TF_CONFIG says this task is {role} number {index!r}, but there are {len(groups[role])} of them "
                           f"(0..{len(groups[role]) - 1}): its own address is missing")
    return role, index


# ---- Kubernetes -----------------------------------------------------------------------------------------------------

def _volcano(environ: Mapping[str, str]) -> Environment:
    """``VC_WORKER_HOSTS=a,b`` (Volcano's svc and env plugins), masters before workers."""
    groups = {match.group(1): tuple(host for host in environ[key].split(",") if host)
              for key in sorted(environ) for match in [re.match(r"VC_(.+)_HOSTS$", key)] if match}
    order = sorted(groups, key=lambda name: (name not in ("MASTER", "CHIEF"), name))
    addresses = tuple(host for name in order for host in groups[name])
    if not addresses:
        raise ClusterError("Volcano's {} are empty".format(", ".join(f"VC_{name}_HOSTS" for name in order)))
    key = "VC_TASK_INDEX" if "VC_TASK_INDEX" in environ else "VK_TASK_INDEX"
    index = _number(environ, key)
    own = environ.get("HOSTNAME", "")
    mine = [number for number, host in enumerate(addresses) if own and host.split(".")[0] == own.split(".")[0]]
    if len(groups) > 1 and not mine:
        raise ClusterError("HOSTNAME={!r} is not one of Volcano's hosts {}".format(own, ", ".join(addresses)))
    return Environment("Volcano", addresses, mine[0] if mine else _rank_in(index, addresses, key))


def _kubernetes(environ: Mapping[str, str]) -> Environment:
    """Pods are numbered by name: the master's address ends in 0, and the others follow."""
    size, rank = _number(environ, "WORLD_SIZE", 1), _number(environ, "RANK")
    master = environ["MASTER_ADDR"]
    port = ":" + environ["MASTER_PORT"] if environ.get("MASTER_PORT") else ""
    match = re.match(r"^(?P<job>.+)-0(?P<domain>\..*)?$", master)
    if match is None and size > 1:
        raise ClusterError(f"MASTER_ADDR={master!r} is not a pod name ending in -0, so the addresses of the other {size - 1} "
                           "pods cannot be derived; set TF_CONFIG")
    addresses = [master]
    for number in range(1, size):
        assert match is not None
        job, domain = match.group("job"), match.group("domain") or ""
        if job.endswith("-master"):  # Kubeflow: NAME-master-0, NAME-worker-0, NAME-worker-1
            addresses.append("{}-worker-{}{}".format(job[:-len("-master")], number - 1, domain))
        else:
            addresses.append(f"{job}-{number}{domain}")
    full = tuple(address + port for address in addresses)
    return Environment("Kubernetes", full, _rank_in(rank, full, "RANK"))


# ---- launchers that give ranks only -----------------------------------------------------------------------------------

class _Keys(NamedTuple):
    size: str
    rank: str
    local_size: str


ON_ONE_HOST: Mapping[str, _Keys] = {
    "Horovod": _Keys("HOROVOD_SIZE", "HOROVOD_RANK", "HOROVOD_LOCAL_SIZE"),
    "Open MPI": _Keys("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "torchrun": _Keys("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"),
}


def _on_one_host(environ: Mapping[str, str], source: str, keys: _Keys) -> Environment:
    """Ranks on this host; torchrun's processes use the ports after its own, so that two jobs do not collide."""
    size, rank = _number(environ, keys.size, 1), _number(environ, keys.rank)
    if _number(environ, keys.local_size, 1) != size:
        raise ClusterError(f"{source} started {size} processes ({keys.size}), {environ[keys.local_size]} of them on this host, "
                           "and does not say where the others are; start `whale run --rdzv` on each host, or set TF_CONFIG")
    first = _number(environ, "MASTER_PORT", 1) + 1 if source == "torchrun" else None
    addresses = tuple("127.0.0.1" + (f":{first + each}" if first else "") for each in range(size))
    return Environment(source, addresses, _rank_in(rank, addresses, keys.rank))


# ---- SLURM ----------------------------------------------------------------------------------------------------------

def _slurm_list(environ: Mapping[str, str]) -> Optional[str]:
    return environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")


def _slurm(environ: Mapping[str, str]) -> Environment:
    hosts = expand_host_list(_slurm_list(environ) or "")
    one_each = f"1(x{len(hosts)})"
    tasks_text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or one_each
    tasks = _expand_counts(tasks_text)
    if len(tasks) != len(hosts):
        raise ClusterError("SLURM names {} nodes ({}), but tasks per node {!r} describes {}".format(
            len(hosts), ", ".join(hosts), tasks_text, len(tasks)))
    addresses = tuple(host for host, count in zip(hosts, tasks) for _ in range(count))
    rank = _number(environ, "SLURM_PROCID") if "SLURM_PROCID" in environ else 0
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    return Environment("SLURM", addresses, _rank_in(rank, addresses, "SLURM_PROCID"),
                       devices_per_node=int(gpus) if gpus.isdigit() and int(gpus) > 0 else None)


def expand_host_list(text: str) -> Tuple[str, ...]:
    """SLURM's compressed list: ``"gpu[01-03,07],login"`` is gpu01, gpu02, gpu03, gpu07, login.

    Raises:
        ClusterError: unbalanced brackets, or a decreasing range.
    """
    hosts: List[str] = []
    for part in _split_outside_brackets(text):
        hosts += _expand_brackets(part, text)
    if not hosts:
        raise ClusterError("the SLURM node list is empty")
    return tuple(hosts)


def _split_outside_brackets(text: str) -> List[str]:
    parts, depth = [""], 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise ClusterError(f"brackets do not match in the SLURM node list {text!r}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    if depth:
        raise ClusterError(f"brackets do not match in the SLURM node list {text!r}")
    return [part for part in parts if part]


def _expand_brackets(part: str, text: str) -> List[str]:
    match = re.match(r"^([^\[]*)\[([^\]]*)\](.*)$", part)
    if match is None:
        return [part]
    before, inside, after = match.groups()
    rest = _expand_brackets(after, text) if after else [""]
    hosts: List[str] = []
    for item in inside.split(","):
        first, dash, last = item.partition("-")
        last = last if dash else first
        if not (first.isdigit() and last.isdigit()) or int(last) < int(first):
            raise ClusterError(f"{item!r} in the SLURM node list {text!r} is not a number or a range like 01-08")
        names = [before + str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        hosts += [name + end for name in names for end in rest]
    return hosts


def _expand_counts(text: str) -> List[int]:
    """``"2(x3),1"`` is 2, 2, 2, 1."""
    counts: List[int] = []
    for part in text.split(","):
        match = re.match(r"^(\d+)(?:\(x(\d+)\))?$", part.strip())
        if match is None:
            raise ClusterError(f"SLURM's tasks per node {text!r} is not like '2(x3),1'")
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts
