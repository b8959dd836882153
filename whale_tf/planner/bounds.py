"""Lower bounds of the simulated time of plans of layers, so that plans that are too slow need not be simulated.

A stage with ``f`` and ``b`` seconds of forward and backward work in a micro-batch does ``M`` of both, after the first micro-batch
has come through the stages before it (``fill``), and before the last one has gone back through them (``drain``).  Work includes
the sums of tensor parallelism between two layers, for which the next layer waits.  Gradients are summed once the last backward
step of their stage has begun, on links that all sums share::

    stage 0    f f f     b   f b   f b     b                 M (f + b)
    stage 1      f b   f b   f b   f b                fill + M (f + b) + drain
                                   | sums             fill + M f + (M - 1) b + sums

Nothing else is counted: neither bubbles, nor messages between stages, nor updates, nor recomputation.
"""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.plan import TaskGraphPlan
from whale_tf.planner.candidate import Candidate, Stage
from whale_tf.planner.simulated import with_slices
from whale_tf.planner.stage_costs import StageCosts, Work
from whale_tf.profiler.model_profile import LayerProfile, ModelProfile
from whale_tf.simulator.network import Network
from whale_tf.simulator.transformation import ALL_REDUCE, Group

IN_ORDER = ("backward_first", "gpipe")  # schedules with one stage on each device, whose backward steps are whole


class Bounds:
    """Lower bounds on one cluster.

    Args:
        network: costs of groups of devices, as the simulator has them.
        balance: as for :func:`whale_tf.planner.simulated.simulated`.
    """

    def __init__(self, cluster: Cluster, network: Network, balance: str) -> None:
        self.cluster, self.network, self.balance = cluster, network, balance
        self._costs: Dict[int, StageCosts] = {}  # by id of the profile, which they keep

    def seconds(self, found: Candidate) -> float:
        """No simulation of the plan under its measures takes less.

        Raises:
            PlanError: a layer has no time on a device, or a micro-batch has too few examples for its replicas.
        """
        assert found.profile is not None, "stages are given in layers"
        costs = self._costs.setdefault(id(found.profile), StageCosts(found.profile, self.cluster))
        count = found.micro_batches
        plan = with_slices(found, found.profile, self.cluster, self.balance)
        works = [self._works(costs, stage, task, found.global_batch / count)
                 for stage, task in zip(found.stages, plan.task_graphs)]
        if found.measures.schedule not in IN_ORDER:
            busy: Dict[int, float] = {}
            for work in works:
                for device, one in work.items():
                    busy[device] = busy.get(device, 0.0) + count * sum(one)
            return max(busy.values())
        fill_s = drain_s = least_s = 0.0
        begin_s: List[float] = []  # of each stage's sums
        for work in works:
            least_s = max(least_s, fill_s + drain_s + count * max(map(sum, work.values())))
            begin_s.append(fill_s + max(count * one.forward_s + (count - 1) * one.backward_s for one in work.values()))
            fill_s += min(one.forward_s for one in work.values())
            drain_s += min(one.backward_s for one in work.values())
        return max(least_s, self._summed_s(found, found.profile, begin_s) if found.measures.zero == "none" else 0.0)

    # ---- a stage -----------------------------------------------------------------------------------------------------

    def _works(self, costs: StageCosts, stage: Stage, task: TaskGraphPlan, samples: float) -> Dict[int, Work]:
        """The work of each device; ``samples``: of a micro-batch of all model replicas."""
        first, end = stage.first_layer, stage.last_layer + 1
        found: Dict[int, Work] = {}
        for row in stage.devices:
            size = samples / len(stage.devices)
            if stage.strategy == "split":
                layers = costs.profile.layers[first:end]
                forward_s, backward_s = self._sums_inside(row, layers, size)
                degrees = [len(row) if is_split(layer) else 1 for layer in layers]
                for device in row:
                    own = [costs.times(device, size, degree).work(number, number + 1)
                           for number, degree in enumerate(degrees, first)]
                    found[device] = Work(forward_s + sum(one.forward_s for one in own),
                                         backward_s + sum(one.backward_s for one in own))
            else:
                slices = task.slices or (1,) * len(row)
                for device, part in zip(row, slices):
                    found[device] = costs.times(device, size * part / sum(slices)).work(first, end)
        return found

    def _sums_inside(self, row: Tuple[int, ...], layers: Sequence[LayerProfile], size: float) -> Tuple[float, float]:
        """Seconds of tensor parallelism's sums behind all layers but the last (forward), and before all but the first
        (backward)."""
        algorithms = self.network.algorithms_of(ALL_REDUCE, Group(tuple(sorted(row))))
        sums = [min(one.latency_s + (layer.tensor_parallel_bytes or 0) * size * one.seconds_per_byte for one in algorithms)
                if is_split(layer) else 0.0 for layer in layers]
        return sum(sums[:-1]), sum(sums[1:])

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def _summed_s(self, found: Candidate, profile: ModelProfile, begin_s: Sequence[float]) -> float:
        """When all gradients are summed: each device does one sum after another, and a link carries the bytes of all."""
        least_s = 0.0
        carried: Dict[int, float] = {}
        earliest_s: Dict[int, float] = {}
        for stage, begin in zip(found.stages, begin_s):
            is_tensor_parallel = stage.strategy == "split"
            size = _gradient_bytes(profile, stage, len(stage.devices[0]) if is_tensor_parallel else 1)
            for members in zip(*stage.devices) if is_tensor_parallel else [stage.all_devices]:
                if len(members) < 2:
                    continue
                algorithms = self.network.algorithms_of(ALL_REDUCE, Group(tuple(sorted(members))))
                least_s = max(least_s, begin + size * min(one.seconds_per_byte for one in algorithms))
                loads = [dict(one.loads) for one in algorithms]
                for link in set.intersection(*map(set, loads)):
                    carried[link] = carried.get(link, 0.0) + size * min(load[link] for load in loads)
                    earliest_s[link] = min(begin, earliest_s.get(link, begin))
        return max([least_s] + [earliest_s[link] + size / self.network.bandwidths[link] for link, size in carried.items()])


def _gradient_bytes(profile: ModelProfile, stage: Stage, degree: int) -> float:
    """Bytes of the gradients that every device of a stage sums, each tied parameter's once."""
    layers = profile.distinct(stage.first_layer, stage.last_layer + 1)
    return sum(layer.parameter_bytes / degree for layer in layers if degree == 1 or is_split(layer))


def is_split(layer: LayerProfile) -> bool:
    """Whether tensor parallelism divides a layer."""
    return layer.tensor_parallel_bytes is not None and bool(layer.parameter_bytes)
