"""The result of a simulation: times, memory, use of devices and links, and the bottleneck in words."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from whale_tf.cluster import Cluster
from whale_tf.errors import memory_text, seconds_text
from whale_tf.ir.holder import Holder
from whale_tf.simulator.engine import Times
from whale_tf.simulator.execution_graph import ExecutionGraph
from whale_tf.simulator.instructions import COMPUTATION, GRADIENT, UPDATE, Instructions, Subject
from whale_tf.simulator.memory import MemoryCurve
from whale_tf.simulator.network import Network

Tasks = List[List[int]]  # by simulated device


class DeviceUse(NamedTuple):
    """One simulated device.

    ``bubble_s``: neither computing nor communicating; ``exposed_s``: communicating but not computing; ``mfu``: the model's
    matrix arithmetic done here, divided by what the device could do in the step; ``sums``: gradient collectives in which it takes
    part; ``hidden_s``: of these, during computation.
    """

    device: int
    stage: int
    computation_s: float
    exposed_s: float
    bubble_s: float
    mfu: float
    peak_memory_bytes: float
    oom: bool
    sums: float = 0.0
    hidden_s: float = 0.0


class LinkUse(NamedTuple):
    """A link: the bytes that it carries in a step, and the fraction of the step that it would need at full speed."""

    name: str
    bytes: float
    utilisation: float


class _Fields(NamedTuple):
    program: Instructions
    graph: ExecutionGraph
    times: Times
    memory: Tuple[MemoryCurve, ...]
    cluster: Cluster
    network: Network
    step_time_s: float
    subject: Subject
    usable_bytes: Tuple[float, ...]
    devices: Tuple[DeviceUse, ...]
    representative: Dict[int, int]
    compile_seconds: float
    simulate_seconds: float
    steady: bool = False
    kernels: float = 0.0
    host_s: float = 0.0
    is_limited_by_host: bool = False
    is_fused: bool = False
    extended_links: Optional[Tuple[LinkUse, ...]] = None


class Simulation(_Fields, Holder):
    """The result for one strategy on one cluster.

    Attributes:
        step_time_s: of the whole step, all micro-batches.
        devices: the simulated devices, one for each class of equal ones; ``representative`` maps every device to the one that
            stands for it.
        usable_bytes: memory that a step may take on each simulated device.
        is_limited_by_host, is_fused: whether the step takes as long as the host takes, and whether XLA fuses its kernels.
        kernels, host_s: the most kernels that a device starts in a step, and the time that its host takes to start them; zero
            where the laws of TensorFlow's kernels do not apply.
        steady: whether the step time was extrapolated from fewer micro-batches (see :mod:`steady`).
        extended_links: the links, if they were extrapolated.
    """

    @property
    def links(self) -> Tuple[LinkUse, ...]:
        """The links, busiest first; searches ask for those of few of their simulations."""
        return self.once(_link_uses) if self.extended_links is None else self.extended_links

    @property
    def samples_per_s(self) -> float:
        return self.subject.samples / self.step_time_s

    @property
    def oom(self) -> bool:
        """Whether some device needs more memory than it has."""
        return any(use.oom for use in self.devices)

    @property
    def bubble(self) -> float:
        """The fraction of the devices' time without computation: 1 - DAPPLE's pipeline efficiency (section II-A)."""
        return 1.0 - self._mean([use.computation_s for use in self.devices]) / self.step_time_s

    @property
    def exposed_communication_s(self) -> float:
        """Seconds of communication that no computation hides, averaged over devices."""
        return self._mean([use.exposed_s for use in self.devices])

    @property
    def mfu(self) -> float:
        return self._mean([use.mfu for use in self.devices])

    @property
    def tasks(self) -> int:
        """Number of simulated computations and communications."""
        return sum(1 for lane in self.graph.lane if lane >= 0)

    @property
    def peak_memory_bytes(self) -> Tuple[int, ...]:
        """For each device of the strategy, in the order of their numbers."""
        peaks = {use.device: use.peak_memory_bytes for use in self.devices}
        return tuple(int(round(peaks[kept])) for _, kept in sorted(self.representative.items()))

    @property
    def limits_bytes(self) -> Dict[int, float]:
        """The memory that a step may take, by simulated device."""
        return dict(zip(self.graph.devices, self.usable_bytes))

    def _mean(self, values: Sequence[float]) -> float:
        """The mean over all devices, from one value per simulated device."""
        weights = self.class_sizes()
        return sum(value * weight for value, weight in zip(values, weights)) / sum(weights)

    def class_sizes(self) -> List[int]:
        """The number of devices for which each simulated device stands."""
        sizes = dict.fromkeys(self.graph.devices, 0)
        for kept in self.representative.values():
            sizes[kept] += 1
        return [sizes[device] for device in self.graph.devices]

    def to_dict(self) -> Dict[str, Any]:
        """What ``whale simulate --json`` prints."""
        return {
            "model": self.subject.model,
            "cluster": self.cluster.name,
            "step_time_s": self.step_time_s,
            "samples_per_s": self.samples_per_s,
            "peak_memory_bytes": list(self.peak_memory_bytes),
            "oom": self.oom,
            "bubble": self.bubble,
            "exposed_communication_s": self.exposed_communication_s,
            "mfu": self.mfu,
            "tasks": self.tasks,
            "devices_simulated": len(self.graph.devices),
            "steady_state": self.steady,
            "compile_seconds": self.compile_seconds,
            "simulate_seconds": self.simulate_seconds,
            "kernels": self.kernels,
            "host_s": self.host_s,
            "bottleneck": self.bottleneck(),
        }

    # ---- bottleneck --------------------------------------------------------------------------------------------------

    def bottleneck(self) -> str:
        """Which stage or link limits the step, and what to change."""
        if self.oom:
            return self._memory_words()
        if self.is_limited_by_host:
            return self.host_words()
        slowest = max(self.devices, key=lambda use: use.computation_s)
        busy = (f"stage {slowest.stage} (device {slowest.device}) computes {slowest.computation_s / self.step_time_s:.0%} of the "
                "step")
        idle = self._mean([use.bubble_s for use in self.devices]) / self.step_time_s
        exposed = self.exposed_communication_s / self.step_time_s
        if exposed > 0.1 and exposed >= idle and self.links:
            link = self.links[0]
            return (f"{busy}; communication is exposed for {exposed:.0%} of the step; the busiest link is {link.name} "
                    f"({link.utilisation:.0%} of the step at full speed): use less tensor or data parallelism across it, larger "
                    "micro-batches, or a faster link")
        if idle > 0.1:
            return f"{busy}; {self._idle_words(idle)}"
        return f"{busy}; there is little else to gain: only faster devices, less arithmetic or more devices help"

    def host_words(self) -> str:
        """That the host is the bottleneck, and what would help; empty if it is not."""
        if not self.is_limited_by_host:
            return ""
        busy_s = max(use.computation_s for use in self.devices)
        updates: Dict[int, float] = {}
        for one in self.program.instructions:
            if one.block[1] == UPDATE and one.lane == COMPUTATION:
                for device in one.parts.devices:
                    updates[device] = updates.get(device, 0.0) + one.kernels
        most, help_ = max(updates.values(), default=0.0), []
        if self.subject.num_micro_batch > 1:
            help_.append(f"fewer micro-batches than {self.subject.num_micro_batch}")
        if most > 0.25 * self.kernels:
            help_.append(f"an optimizer with a kernel for each variable (its updates start {most:,.0f} of them)")
        help_.append("XLA" if not self.is_fused else "a larger batch")
        return (f"the host starts {self.kernels:,.0f} kernels on a device in {seconds_text(self.host_s)}, which the device runs "
                f"in {seconds_text(busy_s)}: use {' or '.join(help_)}")

    def _memory_words(self) -> str:
        place = max(range(len(self.devices)), key=lambda i: self.devices[i].peak_memory_bytes / self.usable_bytes[i])
        use, curve, usable = self.devices[place], self.memory[place], self.usable_bytes[place]
        category = max(curve.at_peak, key=lambda name: curve.at_peak[name])
        advice = {
            "activations": "recompute, use smaller micro-batches, or fewer in flight (backward_first, less warm-up)",
            "optimizer state": "shard it (ZeRO), or use more stages or tensor parallelism",
            "parameters": "use more stages, tensor parallelism or ZeRO 3",
            "gradients": "use ZeRO 2, more stages or tensor parallelism",
        }
        return (f"out of memory: device {use.device} of stage {use.stage} needs {memory_text(use.peak_memory_bytes)} but has "
                f"{memory_text(usable)} ({memory_text(max(0.0, use.peak_memory_bytes - usable))} short); "
                f"{memory_text(curve.at_peak[category])} of that is {category}: "
                f"{advice.get(category, 'use smaller micro-batches')}")

    def _idle_words(self, idle: float) -> str:
        by_stage: Dict[int, float] = {}
        for use in self.devices:
            by_stage[use.stage] = max(by_stage.get(use.stage, 0.0), use.computation_s)
        if len(by_stage) > 1 and max(by_stage.values()) > 1.2 * min(by_stage.values()):
            slow, least = (choose(by_stage, key=lambda stage: by_stage[stage]) for choose in (max, min))
            work = f"{by_stage[slow] / by_stage[least]:.1f} times the work of the least loaded stage" if by_stage[least] else \
                f"work and stage {least} has none"
            return f"devices idle {idle:.0%} of the step because stage {slow} has {work}: move ops from it to other stages"
        if len(by_stage) > 1:
            return (
                f"devices idle {idle:.0%} of the step filling and draining {len(by_stage)} stages with "
                f"{self.subject.num_micro_batch} micro-batches: use more micro-batches or fewer stages")
        return f"devices idle {idle:.0%} of the step waiting for each other: balance unequal devices"


def device_uses(program: Instructions, graph: ExecutionGraph, times: Times, memory: Sequence[MemoryCurve],
                usable_bytes: Sequence[float], subject: Subject, cluster: Cluster) -> Tuple[DeviceUse, ...]:
    """Use of every simulated device over the step.

    Args:
        usable_bytes: memory that a step may take on each device.
    """
    stage_of, step_time_s = program.stage_of(), times.makespan
    intervals = np.stack([np.array(times.start, np.float64), np.array(times.end, np.float64)], axis=1)
    computations, communications = ([[] for _ in graph.devices], [[] for _ in graph.devices])  # type: Tasks, Tasks
    sums: List[List[float]] = [[] for _ in graph.devices]
    for task, lane in enumerate(graph.lane):
        if lane == COMPUTATION:
            computations[graph.slots[task][0]].append(task)
        elif lane > 0:
            for slot in graph.slots[task]:
                communications[slot].append(task)
                if lane == GRADIENT:
                    sums[slot].append(times.end[task] - times.start[task])
    uses = []
    for slot, device in enumerate(graph.devices):
        computing, communicating = (_by_start(intervals[tasks[slot]]) for tasks in (computations, communications))
        busy = _union(computing)
        at_peak_s = subject.matrix_flops.get(device, 0.0) / cluster.devices[device].peak_flops_per_s[subject.precision]
        union = _union(np.concatenate([computing, communicating]))
        peak, exposed_s = memory[slot].peak_bytes, max(0.0, union - busy)
        uses.append(DeviceUse(
            device, stage_of.get(device, 0), computation_s=busy, exposed_s=exposed_s,
            bubble_s=max(0.0, step_time_s - union), mfu=at_peak_s / step_time_s, peak_memory_bytes=peak,
            oom=peak > usable_bytes[slot], sums=len(sums[slot]), hidden_s=max(0.0, sum(sums[slot]) - exposed_s)))
    return tuple(uses)


def _by_start(intervals: np.ndarray) -> np.ndarray:
    return intervals[np.lexsort((intervals[:, 1], intervals[:, 0]))]


def _union(intervals: np.ndarray) -> float:
    """Total length that the intervals cover."""
    if not len(intervals):
        return 0.0
    ordered = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ordered[:, 1])
    before = np.concatenate([[-np.inf], reach[:-1]])
    return float(np.maximum(0.0, ordered[:, 1] - np.maximum(ordered[:, 0], before)).sum())


def _link_uses(result: Simulation) -> Tuple[LinkUse, ...]:
    graph, network = result.graph, result.network
    carried: Dict[int, float] = {}
    for task, entries in graph.links.items():
        for link, per_second, count in entries:
            carried[link] = carried.get(link, 0.0) + per_second * count * graph.seconds[task]
    uses = [LinkUse(network.link_names[link], size, size / network.bandwidths[link] / result.step_time_s)
            for link, size in carried.items()]
    return tuple(sorted(uses, key=lambda use: (-use.utilisation, use.name)))
