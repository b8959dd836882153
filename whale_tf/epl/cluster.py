"""EPL's view of the job: workers, their devices, and layouts of these on TaskGraphs."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from whale_tf import api
from whale_tf._tf_compat import v1
from whale_tf.capture.annotations import annotations_of
from whale_tf.cluster import ONE_PROCESS, devices_of_processes
from whale_tf.epl.env import Env
from whale_tf.errors import ClusterError, WhaleError
from whale_tf.runtime.active import Active, current, require

Layout = Union[None, str, Mapping[str, Any]]
Slices = List[List[List[str]]]  # [TaskGraph][model replica][replica] -> device


class VirtualDevice:
    """The devices of one TaskGraph.

    Attributes:
        slice_devices: ``[model replica][replica]`` names.
        all_devices: the same in one row.
        local_devices: those of this worker.
        local_device_indices: their positions among all.
    """

    def __init__(self, index: int, slice_devices: Sequence[Sequence[str]], worker_index: int) -> None:
        self.index, self.slice_devices = index, [list(row) for row in slice_devices]
        self.all_devices = tuple(name for row in slice_devices for name in row)
        here = [number for number, name in enumerate(self.all_devices) if f"/task:{worker_index}/" in name]
        self.local_device_indices = tuple(here)
        self.local_devices = tuple(self.all_devices[number] for number in here)

    @property
    def num_replicas(self) -> int:
        return max(1, len(self.all_devices))

    def get_device(self, replica_idx: int, device_idx: int) -> str:
        return self.slice_devices[replica_idx][device_idx]

    def __repr__(self) -> str:
        return repr(self.slice_devices)


class Cluster:
    """``epl.Cluster(worker_hosts, ...)``: the job as EPL describes it.  Without ``worker_hosts``, the job of the environment.

    Devices are taken by whale_tf in EPL's order, so a layout either describes that order or is refused:

    - ``"all"``: one row of all devices.  ``"auto"`` and None: each TaskGraph's devices one after the other in a model replica.
    - ``{"aware_row": n}``: rows of ``n`` workers with one device each, a row for each TaskGraph; workers of one host are next to
      each other.
    - ``{"specific": [TaskGraph][model replica][replica] -> device}``.

    Args:
        worker_hosts: ``"host:port,host:port"``, of workers that are started with the same script.
        ps_hosts: further hosts, which EPL treats as workers.
        job_name: ``"worker"``, or of a host in ``ps_hosts``, ``"ps"``.
        worker_index: number of this process among those of its job.

    Raises:
        ClusterError: the hosts are not this job's, or the layout cannot be had.
    """

    def __init__(self, worker_hosts: Optional[str] = None, ps_hosts: Optional[str] = None, job_name: str = "worker",
                 worker_index: int = 0, layout: Layout = "all") -> None:
        state = current()
        if state is None:
            raise WhaleError("epl.Cluster needs epl.init(): call it first, before building the graph")
        if worker_hosts:
            state = _job(state, worker_hosts, ps_hosts or "", job_name, worker_index)
        self._state, self._layout = state, layout
        self._virtual: List[VirtualDevice] = []
        is_aware = isinstance(layout, Mapping) and "aware_row" in layout
        self.worker_num_per_machine = _per_machine(self._addresses) if is_aware else 1
        if layout:
            self.generate_virtual_devices()

    @property
    def _addresses(self) -> Sequence[str]:
        return self._state.processes.addresses or ("127.0.0.1:0",)

    @property
    def hosts(self) -> str:
        return ",".join(self._addresses)

    @property
    def worker_num(self) -> int:
        return self._state.processes.count

    @property
    def worker_index(self) -> int:
        return self._state.processes.rank

    @property
    def available_devices(self) -> List[str]:
        """Names of this worker's devices.  On a machine without GPUs they are CPU devices, and count as EPL's GPUs."""
        return self._names[self.worker_index]

    @property
    def gpu_num_per_worker(self) -> int:
        return len(self.available_devices)

    @property
    def total_gpu_num(self) -> int:
        return len(self._state.cluster.devices)

    @property
    def cluster_spec(self) -> Any:
        return v1.train.ClusterSpec({"worker": list(self._addresses)})

    @property
    def virtual_devices(self) -> List[VirtualDevice]:
        return self._virtual

    def get_local_rank(self, global_rank: int) -> int:
        return global_rank % self.gpu_num_per_worker

    def current_worker_chief_gpu(self) -> str:
        return self.available_devices[0]

    def current_worker_cpu(self) -> str:
        return f"/job:worker/replica:0/task:{self.worker_index}/device:CPU:0"

    @property
    def _names(self) -> List[List[str]]:
        """The devices of each worker."""
        cluster, processes = self._state.cluster, self._state.processes
        own: Sequence[Tuple[int, ...]] = [tuple(range(len(cluster.devices)))]
        if processes.count > 1:
            own = devices_of_processes(cluster, processes)
        found: List[List[str]] = []
        for rank, numbers in enumerate(own):
            kinds: Dict[str, int] = {}
            found.append([])
            for number in numbers:
                kind = cluster.devices[number].kind
                found[-1].append(f"/job:worker/replica:0/task:{rank}/device:{kind}:{kinds.setdefault(kind, 0)}")
                kinds[kind] += 1
        return found

    def generate_virtual_devices(self, layout: Layout = None) -> List[VirtualDevice]:
        """The devices of each TaskGraph.

        Raises:
            ClusterError: the layout cannot be had.
        """
        if not self._virtual:
            slices = self._sliced(layout or self._layout)
            self._virtual = [VirtualDevice(number, rows, self.worker_index) for number, rows in enumerate(slices)]
        return self._virtual

    def _sliced(self, layout: Layout) -> Slices:
        given: Dict[str, Any] = {layout: True} if isinstance(layout, str) else dict(layout or {})
        names = [name for part in self._names for name in part]
        known = {"all", "auto", "aware_row", "specific"}
        if len(given) != 1 or not given.keys() <= known:
            raise ClusterError(f"epl.Cluster was given the layout {layout!r}, expected one of {', '.join(sorted(known))}")
        (kind, value), = given.items()
        if kind == "all":
            return [[[name] for name in names]]
        if kind == "auto":
            return self._by_task_graphs(names)
        if kind == "aware_row":
            rows = len(names) // int(value) if int(value) > 0 else 0
            if self.gpu_num_per_worker != 1 or rows == 0 or len(names) % int(value):
                raise ClusterError(f"epl.Cluster was given the layout {layout!r}, which needs workers of one device each, and "
                                   f"a number of them that divides by {value}; there are {self.worker_num} workers with "
                                   f"{self.gpu_num_per_worker} device(s) each")
            slices = [[[name] for name in names[row * int(value):(row + 1) * int(value)]] for row in range(rows)]
        else:
            slices = [[list(row) for row in rows] for rows in value]
        if len(slices) > 1:
            self._check_order(slices, names, layout)
        return slices

    def _check_order(self, slices: Slices, names: Sequence[str], layout: Layout) -> None:
        """Refuses a layout that is not the order in which devices are taken."""
        rows = [name for replica in zip(*slices) for part in replica for name in part]
        columns = [name for part in slices for row in part for name in row]
        prefers = self._state.config.cluster.device_place_prefer_intra_node
        if rows == list(names) or (not prefers and columns == list(names)):
            return
        raise ClusterError(
            f"epl.Cluster was given the layout {layout!r}, which puts TaskGraphs on other devices than whale_tf, which takes "
            f"{', '.join(names)} in this order for {'the TaskGraphs of each model replica' if prefers else 'each TaskGraph'}; "
            "set cluster.device_place_prefer_intra_node to the other value, list the devices of wh.init(cluster=...) in another "
            "order, or give a plan (wh.init(plan=...))")

    def _by_task_graphs(self, names: Sequence[str]) -> Slices:
        """The layout that annotations so far ask for."""
        counts = [item.device_count or len(names) for item in annotations_of(v1.get_default_graph()).items] or [1]
        if self._state.config.cluster.colocate_split_and_replicate or sum(counts) > len(names):
            return [[[name] for name in names]]
        if len(names) % sum(counts):
            raise ClusterError(f"TaskGraphs take {sum(counts)} devices in each model replica, which does not divide the "
                               f"{len(names)} devices of the cluster")
        slices: Slices = [[] for _ in counts]
        taken = iter(names)
        for _ in range(len(names) // sum(counts)):
            for rows, count in zip(slices, counts):
                rows.append([next(taken) for _ in range(count)])
        return slices

    def __enter__(self) -> Cluster:
        Env.get().cluster = self
        return self

    def __exit__(self, *error: Any) -> None:
        """The job stays."""

    def __repr__(self) -> str:
        return (f"ClusterSpec: {self.hosts}, WorkerNumber: {self.worker_num}, TaskIndex: {self.worker_index}, "
                f"AvailableDevices: {self.available_devices}, Layout: {self._layout}, VirtualDevices: {self._virtual}")


def _job(state: Active, worker_hosts: str, ps_hosts: str, job_name: str, worker_index: int) -> Active:
    """The job of these hosts, in which this process is then."""
    workers = worker_hosts.split(",")
    hosts = workers + [host for host in ps_hosts.split(",") if host]
    rank = worker_index + (0 if job_name == "worker" else len(workers))
    if not 0 <= rank < len(hosts):
        raise ClusterError(f"epl.Cluster has {len(hosts)} host(s), and this process is {job_name} {worker_index}; expected a "
                           "number that is among them")
    if len(hosts) == 1:
        if state.processes.count > 1:
            raise ClusterError(f"epl.Cluster was given the host {worker_hosts!r} alone, but the environment says that this "
                               f"process is one of {state.processes.count}; leave worker_hosts out")
        return state
    if tuple(hosts) == tuple(state.processes.addresses) and rank == state.processes.rank:
        return state
    if state.processes != ONE_PROCESS:
        raise ClusterError(f"epl.Cluster was given the hosts {', '.join(hosts)}, but the environment says that the job has "
                           f"{', '.join(state.processes.addresses)}; give one of both")
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": rank}})
    cluster = state.cluster if "WHALE_CLUSTER" in os.environ else None  # None: each worker finds its own devices
    api.init(state.config, cluster, dict(state.plans) or None)
    return require("epl.Cluster")


def _per_machine(addresses: Sequence[str]) -> int:
    """Workers of each machine.

    Raises:
        ClusterError: machines have different numbers of them.
    """
    hosts = [address.rpartition(":")[0] for address in addresses]
    counts = {hosts.count(host) for host in hosts}
    if len(counts) > 1:
        raise ClusterError(f"the layout aware_row needs as many workers on each machine, but they are on {', '.join(hosts)}")
    return counts.pop()
