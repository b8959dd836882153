"""The Plan: every decision about how a graph runs on devices, as one frozen value.

Planners make it, the simulator reads it, and the rewriter executes it.  A person can save it, edit it and load it again.
It is plain JSON (``Plan.to_json``, ``Plan.parse``): op and tensor names, device numbers, and counts.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import Dict, List, Mapping, Optional, Set, Tuple, Union

from whale_tf._typing_compat import Literal
from whale_tf.documents import Record, field, parsed, plain
from whale_tf.errors import PlanError

VERSION = 1
SCHEDULES = ("backward_first", "gpipe", "interleaved", "zero_bubble_h1", "zero_bubble_h2", "zero_bubble_v")
ZERO = ("none", "v1", "v2", "v3")
OFFLOAD = ("none", "states", "v0")
PRECISIONS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class TaskGraphPlan(Record):
    """One TaskGraph on its VirtualDevices.

    Attributes:
        strategy: ``replicate`` or ``split``.
        ops: names of its forward ops; backward ops follow their forward ops.
        devices: ``[model replica][replica]`` device numbers of the cluster: one VirtualDevice per model replica. Under
            ``split`` they are the devices of one replica, which share its variables.
        slices: relative size of each replica's part of a micro-batch (uneven batches on unequal devices) or, under ``split``, of
            each device's part of a divided dimension (uneven shards); None means equal parts.
        warmup: forward micro-batches started before the first backward one (DAPPLE's K_i, section III-C).
        batch_of: the ``split`` TaskGraph on the same devices to which these ops belong.  They are divided only along the batch,
            so that each device works on its own examples.
        variables: ``mirrored``: every replica has its own copies, which are kept equal; ``shared``: all replicas read the
            variables on the first replica's device.
        homes: variable -> the device where it is stored and updated, with its optimizer state; all replicas read it there.
            Numbers after the cluster's last device are hosts (:attr:`Plan.hosts`).  A variable without a home is on the first
            replica's device.
        parts: variable -> the dimension along which it is divided evenly, with one part for each of the TaskGraph's devices, in
            order.  Each part is a variable with a home of its own.
        kept: tensors that are kept from the forward to the backward pass; other tensors that the backward pass reads are
            recomputed.  None means that everything is kept.  In a plan of layers, ``layer:0`` is the layer's output, and
            ``layer`` is everything that its own backward pass reads.
        xla: whether XLA compiles its called bodies, if possible.
    """

    name: str
    strategy: str = field("replicate", among=("replicate", "split"))
    ops: Tuple[str, ...] = ()
    devices: Tuple[Tuple[int, ...], ...] = field()
    slices: Optional[Tuple[int, ...]] = None
    warmup: int = field(1, at_least=1)
    batch_of: Optional[int] = field(None, at_least=0)
    variables: str = field("mirrored", among=("mirrored", "shared"))
    homes: Dict[str, int] = field(factory=dict)
    parts: Dict[str, int] = field(factory=dict)
    kept: Optional[Tuple[str, ...]] = None
    xla: bool = False

    @property
    def device_count(self) -> int:
        return len(self.devices[0])

    @property
    def replica_count(self) -> int:
        """Parts of a micro-batch: a ``split`` TaskGraph is one replica on all its devices."""
        return 1 if self.strategy == "split" else self.device_count

    @property
    def batch_slices(self) -> Optional[Tuple[int, ...]]:
        """Relative sizes of the replicas' parts of a micro-batch; None means equal parts."""
        return None if self.strategy == "split" else self.slices

    def check(self) -> None:
        if self.homes and self.variables != "shared":
            raise ValueError(f"TaskGraph {self.name!r} has homes for its variables, which needs variables 'shared'; it has "
                             f"{self.variables!r}")
        if self.parts and (self.strategy == "split" or self.variables != "shared"):
            raise ValueError(f"TaskGraph {self.name!r} has parts of variables, which needs strategy 'replicate' and variables "
                             f"'shared'; it has {self.strategy!r} and {self.variables!r}")
        if not self.devices or not self.devices[0]:
            raise ValueError(f"TaskGraph {self.name!r} has no devices")
        if any(len(row) != self.device_count for row in self.devices):
            raise ValueError(f"TaskGraph {self.name!r} has rows of different device counts: {self.devices}")
        listed = [device for row in self.devices for device in row]
        twice = sorted({device for device in listed if listed.count(device) > 1}) if len(set(listed)) < len(listed) else []
        if twice:
            raise ValueError(f"TaskGraph {self.name!r} lists device {twice[0]} twice: {self.devices}; name each device once")
        if self.slices is not None and (len(self.slices) != self.device_count or min(self.slices) < 1):
            raise ValueError(f"TaskGraph {self.name!r} needs {self.device_count} slice sizes of at least 1, got {self.slices}")


@dataclass(frozen=True)
class InputPlan(Record):
    """An input tensor that is divided along ``dim`` (its batch dimension)."""

    tensor: str
    dim: int = field(0, at_least=0)


@dataclass(frozen=True)
class BridgePlan(Record):
    """A tensor that crosses from one TaskGraph to another, once per micro-batch (or once per step).

    ``pattern`` is DAPPLE's Fig. 9: ``one-to-one``, ``split``, ``concat`` or ``split-concat``.
    """

    tensor: str
    producer: int = field(at_least=0)
    consumer: int = field(at_least=0)
    pattern: str = field()
    bytes: int = field(at_least=0)  # for one micro-batch (0 if the batch size is unknown)
    per_step: bool = False


@dataclass(frozen=True)
class GradientPlan(Record):
    """How the gradients of one TaskGraph's variables are summed over its replicas.

    ``buckets`` lists variable names in the order in which their gradients become ready; each bucket is one collective.  Under
    ``fp16`` gradients travel between processes as scaled float16.
    """

    task_graph: int = field(at_least=0)
    backend: str = field()
    buckets: Tuple[Tuple[str, ...], ...] = ()
    bytes: int = field(0, at_least=0)
    fp16: bool = False


@dataclass(frozen=True)
class Estimate(Record):
    """The search's estimate: seconds per step of ``global_batch`` examples, bytes per device, the plans that were not chosen, and
    the step time without each of this plan's memory measures.

    Attributes:
        called_peak_memory_bytes: bytes per device if calls were functions, if that is why ``emit: auto`` inlines the step.
        times: the kind of times that priced a built-in model (``kernels``: as TensorFlow runs it; ``layers``: those of its
            profile); empty for a graph.
        xla: whether XLA fuses its ops.
        host: that the host, which starts kernels, is the bottleneck, and what would help; empty if it is not.
    """

    search: str = "annotated"
    global_batch: Optional[int] = None
    latency_s: Optional[float] = None
    peak_memory_bytes: Tuple[int, ...] = ()
    called_peak_memory_bytes: Tuple[int, ...] = ()
    runners_up: Tuple[str, ...] = ()
    without: Tuple[str, ...] = ()
    times: str = ""
    xla: bool = False
    host: str = ""


@dataclass(frozen=True)
class Plan(Record):
    """Everything that the rewriter needs besides the graph itself.

    Attributes:
        graph: fingerprint of the graph the plan was made for.
        num_devices: devices of the cluster.
        num_model_replicas: degree of nested data parallelism.
        num_micro_batch: micro-batches per mini-batch and model replica.
        micro_batch_slices: relative sizes of the micro-batches; None means equal.
        schedule: a name of :data:`SCHEDULES`; see ``whale_tf.schedule``.
        nested_batch: ``own``: every model replica takes its own mini-batch from the input pipeline; ``divide``: the
            mini-batch is divided over them; ``micro``: every micro-batch of every model replica is a mini-batch of its own.
        shards: under ``split``: op -> the sharding pattern chosen for it; the other ops follow from these.
        init: how sharded variables get their initial values: ``exact`` or ``sharded``.
        random: random numbers that depend on the examples: each clone draws its ``own``, or one op draws all as in the ``local``
            script.
        zero: how ``homes`` divide variables over replicas.  ``none``: not at all; ``v1``: gradients are summed at home; ``v2``:
            the gradients of each micro-batch are summed there at once; ``v3``: in addition, every call reads the variable again.
        offload: ``none``; ``states``: the homes are the host; ``v0``: in addition, every call reads variables again.
        emit: ``inline``: the step's ops are in the graph; ``call``: each call of its Program is one op; ``auto``: by size, if
            the devices' memory allows calls.
        precision: ``float32``, or the 16-bit type in which ops compute if that is safe: ``float16`` or ``bfloat16``.
        loss_scale: factor for gradients in that type: a number, ``dynamic``, or None.
        processes: numbers of each process's devices, by rank; empty if there is one.
        one_step: processes run parts of one step, on one mini-batch, even if each has whole model replicas.
    """

    version: int = VERSION
    graph: str = field()
    num_devices: int = field(at_least=1)
    num_model_replicas: int = field(1, at_least=1)
    num_micro_batch: int = field(1, at_least=1)
    micro_batch_slices: Optional[Tuple[int, ...]] = None
    schedule: str = field("backward_first", among=SCHEDULES)
    nested_batch: str = field("own", among=("own", "divide", "micro"))
    sync_batch_norm: bool = False
    task_graphs: Tuple[TaskGraphPlan, ...] = field()
    inputs: Tuple[InputPlan, ...] = ()
    bridges: Tuple[BridgePlan, ...] = ()
    gradients: Tuple[GradientPlan, ...] = ()
    shards: Dict[str, str] = field(factory=dict)
    init: str = field("exact", among=("exact", "sharded"))
    random: str = field("own", among=("own", "local"))
    zero: str = field("none", among=ZERO)
    offload: str = field("none", among=OFFLOAD)
    emit: str = field("auto", among=("auto", "inline", "call"))
    precision: str = field("float32", among=PRECISIONS)
    loss_scale: Union[None, float, Literal["dynamic"]] = field(None, at_least=1)
    processes: Tuple[Tuple[int, ...], ...] = ()
    one_step: bool = False
    estimate: Estimate = Estimate()

    def check(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"plan version is {self.version}, this whale_tf reads version {VERSION}")
        sizes, count = self.micro_batch_slices, self.num_micro_batch
        if sizes is not None and (len(sizes) != count or min(sizes) < 1):
            raise ValueError(f"micro_batch_slices needs {count} sizes of at least 1, got {sizes}")
        self._check_devices()
        self._check_batch_parts()
        self._check_homes()
        for bridge in self.bridges:
            if max(bridge.producer, bridge.consumer) >= len(self.task_graphs):
                raise ValueError(f"the bridge of {bridge.tensor!r} names TaskGraph {max(bridge.producer, bridge.consumer)}, the "
                                 f"plan has {len(self.task_graphs)}")
        for gradient in self.gradients:
            if gradient.task_graph >= len(self.task_graphs):
                raise ValueError(f"gradients name TaskGraph {gradient.task_graph}, the plan has {len(self.task_graphs)}")

    def _check_devices(self) -> None:
        if not self.task_graphs:
            raise ValueError("the plan has no TaskGraph")
        held = [set(task.ops) for task in self.task_graphs]
        if len(set().union(*held)) < sum(map(len, held)):
            op = next(op for op, count in Counter(op for ops in held for op in ops).items() if count > 1)
            raise ValueError(f"op {op!r} is in the TaskGraphs {[n for n, ops in enumerate(held) if op in ops]}; leave it in one")
        for task in self.task_graphs:
            if len(task.devices) != self.num_model_replicas:
                raise ValueError(f"TaskGraph {task.name!r} lists devices for {len(task.devices)} model replicas, the plan has "
                                 f"{self.num_model_replicas}")
            for device in (device for row in task.devices for device in row):
                if not 0 <= device < self.num_devices:
                    raise ValueError(f"TaskGraph {task.name!r} uses device {device}, the cluster has devices 0 to "
                                     f"{self.num_devices - 1}")
        listed = sorted(device for part in self.processes for device in part)
        if self.processes and listed != list(range(self.num_devices)):
            raise ValueError(f"processes must list each of the devices 0 to {self.num_devices - 1} once, got {self.processes}")

    def _check_batch_parts(self) -> None:
        whole = [task for task in self.task_graphs if task.batch_of is None]
        for number, task in enumerate(self.task_graphs):
            if task.batch_of is None:
                continue
            if number < len(whole) or task.batch_of >= len(whole) or whole[task.batch_of].strategy != "split":
                raise ValueError(
                    f"TaskGraph {task.name!r} (number {number}) holds the batch part of TaskGraph {task.batch_of}, expected one "
                    "of strategy 'split' before it, and no whole TaskGraph after it")
            split = whole[task.batch_of]
            if task.strategy != "replicate" or task.devices != split.devices or task.warmup != split.warmup:
                raise ValueError(
                    f"TaskGraph {task.name!r} holds the batch part of {split.name!r} and so needs strategy 'replicate', its "
                    f"devices {split.devices} and warmup {split.warmup}; it has {task.strategy!r}, {task.devices} and "
                    f"{task.warmup}")

    def _check_homes(self) -> None:
        for task in self.task_graphs:
            own = {device for row in task.devices for device in row}
            if self.zero == self.offload == "none" and task.strategy != "split" and not own.issuperset(task.homes.values()):
                raise ValueError(f"TaskGraph {task.name!r} has homes for its variables beside its own devices {sorted(own)}, and "
                                 "both zero and offload are 'none'")
            if task.parts and (self.zero == "none" or self.data_parallel_processes):
                raise ValueError(f"TaskGraph {task.name!r} has parts of variable {next(iter(task.parts))!r}, which needs zero "
                                 "v1, v2 or v3, and one process or model replicas that span processes; zero is "
                                 f"{self.zero!r}, processes: {len(self.processes) or 1}")
            for variable, device in task.homes.items():
                if device not in range(self.num_devices) and (self.offload == "none" or device not in self.hosts):
                    raise ValueError(f"the home of variable {variable!r} is device {device}, the cluster has devices 0 to "
                                     f"{self.num_devices - 1}; the host, under offload, is "
                                     f"{' or '.join(map(str, self.hosts))}")

    @property
    def hosts(self) -> range:
        """Numbers of the devices that stand for the memory of hosts: one for each process that runs a part of a step; one for
        processes that train side by side, which each have their own."""
        return range(self.num_devices, self.num_devices + (len(self.processes) if self.spans_processes else 1))

    def host_of(self, device: int) -> int:
        """The host of the process that has a device."""
        return self.hosts[self.process_of(device) if self.spans_processes else 0]

    @property
    def adds_at_home(self) -> bool:
        """Whether each micro-batch's gradients go to their variables' homes at once."""
        return self.zero in ("v2", "v3")

    @property
    def reads_anew(self) -> bool:
        """Whether every call reads variables at their homes again, instead of using one value for the whole step."""
        return self.zero == "v3" or self.offload == "v0"

    @property
    def values_elsewhere(self) -> bool:
        """Whether only one of several processes that train side by side has the value of a variable."""
        return self.zero == "v3" and len(self.data_parallel_processes) > 1

    def to_json(self, indent: int = 1) -> str:
        return json.dumps(plain(self), indent=indent)

    def process_of(self, device: int) -> int:
        """The process that has a device, or whose host it is."""
        if device >= self.num_devices:
            return device - self.num_devices
        return next((rank for rank, part in enumerate(self.processes) if device in part), 0)

    def here(self, device: int, rank: Optional[int] = None) -> int:
        """The device of a process that corresponds to a device of any process.  Each process has its own host.

        Args:
            rank: the process; the default is the one to which this part of the plan belongs.
        """
        rank = self.process_of(self.task_graphs[0].devices[0][0]) if rank is None else rank
        owner = self.process_of(device)
        if device >= self.num_devices or rank == owner:
            return device
        return self.processes[rank][self.processes[owner].index(device)]

    def _owners(self) -> List[Set[int]]:
        """Processes that have the devices of each model replica."""
        process_of = {device: number for number, part in enumerate(self.processes) for device in part}
        return [{process_of[device] for task in self.task_graphs for device in task.devices[g]}
                for g in range(self.num_model_replicas)]

    @property
    def is_local(self) -> bool:
        """Whether there is nothing to rewrite: one device, one micro-batch, the script's precision, no recomputation, no XLA."""
        devices = {device for task in self.task_graphs for row in task.devices for device in row}
        again = any(task.kept is not None or task.homes or task.xla for task in self.task_graphs)
        return self.num_micro_batch == 1 and self.num_model_replicas == 1 and devices == {0} and not again \
            and self.precision == "float32"

    @property
    def data_parallel_processes(self) -> Tuple[Tuple[int, ...], ...]:
        """Device numbers of the processes that train side by side, each with model replicas of its own; (): there is one process,
        or model replicas span processes."""
        return self.processes if len(self.processes) > 1 and not self.spans_processes else ()

    @property
    def spans_processes(self) -> bool:
        """Whether processes run parts of one step, because a model replica has devices in several processes, or processes have
        different numbers of model replicas, or the plan says so."""
        if self.one_step:
            return len(self.processes) > 1
        owners = self._owners() if self.processes else []
        counts = Counter(min(owner) for owner in owners)
        return any(len(owner) > 1 for owner in owners) or len({counts[rank] for rank in range(len(self.processes))}) > 1

    def local_part(self, rank: int) -> Plan:
        """The part of the plan that process ``rank`` runs: the model replicas on its own devices, renumbered from zero, and
        (without ZeRO) the homes there; the whole plan if processes run parts of one step."""
        if not self.processes or self.spans_processes:
            return self
        mine = [g for g, owner in enumerate(self._owners()) if owner == {rank}]
        tasks = tuple(replace(task, devices=tuple(task.devices[g] for g in mine), homes={
            name: home if self.zero != "none" else self.here(home, rank) for name, home in task.homes.items()})
            for task in self.task_graphs)
        return replace(self, task_graphs=tasks, num_model_replicas=len(mine))

    @classmethod
    def by_name(cls, source: Union[Plan, Mapping, str]) -> Dict[str, Plan]:
        """Plans for tf.functions by name.  The plan under the empty name ``""`` is for every graph.

        Args:
            source: anything that :meth:`parse` takes, or a mapping of names to such values.

        Raises:
            PlanError: see :meth:`parse`.
        """
        if isinstance(source, (Plan, str)):
            return {"": cls.parse(source)}
        own = {item.name for item in fields(cls)}
        if not source or not own.isdisjoint(source) or not all(
                isinstance(value, (Plan, dict, str)) for value in source.values()):
            return {"": cls.parse(dict(source))}
        found = {}
        for name, given in source.items():
            try:
                found[name] = cls.parse(given)
            except PlanError as error:
                raise PlanError(f"the plan of tf.function {name!r}: {error}") from None
        return found

    @classmethod
    def parse(cls, source: Union[Plan, Dict, str]) -> Plan:
        """A plan from a Plan, a dict, JSON text or the path of a JSON file.

        Raises:
            PlanError: unreadable, unknown or missing key, wrong type, or inconsistent; the message names the place.
        """
        return parsed(cls, source, "plan", PlanError, "write one with wh.current_plan().to_json() or `whale plan`")
