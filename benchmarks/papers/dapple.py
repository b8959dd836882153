"""What DAPPLE's tables compare, all as ``solve(costs) -> stages or None`` like the package's exact solvers."""
from __future__ import annotations

from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy

from benchmarks.papers import dapple_printed
from whale_tf.cluster import Cluster
from whale_tf.planner.dapple import exact
from whale_tf.planner.dapple import search as planner
from whale_tf.planner.dapple.cost import DappleCosts, LayerStage, Stages
from whale_tf.planner.dapple.device_sets import Counts, Servers, append_first
from whale_tf.profiler.model_profile import ModelProfile

INFINITY = float("inf")


class _SingleDevices(Servers):
    """A cluster whose stages take one device each."""

    def all_sets(self, used: Counts) -> Iterator[Counts]:
        """Every free device that cannot be exchanged for an earlier one."""
        for group in self._ties(used):
            if used[group[0]] < self.sizes[group[0]]:
                yield tuple(int(k == group[0]) for k in range(len(used)))

    def round_sets(self, used: Counts) -> Iterator[Counts]:
        yield append_first(self.sizes, used, 1)


def straight(costs: DappleCosts) -> Optional[Stages]:
    """The best plan without replication, one device for each stage; None with fewer layers than devices."""
    servers = _SingleDevices(costs.servers.cluster)
    return exact.solve(DappleCosts(costs.profile, servers, costs.global_batch, costs.micro_batches, costs.measures))


def even(costs: DappleCosts) -> Optional[Stages]:
    """Equally many layers and equally many devices for each stage; the best number of stages."""
    devices = costs.servers.num_devices
    best: Tuple[float, Optional[Stages]] = (INFINITY, None)
    for count in range(1, min(devices, costs.num_layers) + 1):
        if devices % count == 0:
            cuts = [round(costs.num_layers * s / count) for s in range(count + 1)]
            stages = in_order(costs, cuts, [devices // count] * count)
            if costs.fits(stages) and costs.latency(stages) < best[0]:
                best = costs.latency(stages), stages
    return best[1]


def block_partition(costs: DappleCosts) -> Optional[Stages]:
    """torchgpipe: a straight pipeline whose stage times differ least."""
    count = min(costs.servers.num_devices, costs.num_layers)
    forward, backward = _single_device_times(costs)
    cuts = balanced_cuts([f + b for f, b in zip(forward, backward)], count)
    devices = [1] * (count - 1) + [costs.servers.num_devices - count + 1]
    stages = in_order(costs, cuts, devices)
    return stages if costs.fits(stages) else None


def balanced_cuts(times: Sequence[float], count: int) -> List[int]:
    """Block partition of a sequence (Barany and Grinberg 2015): ``count`` contiguous non-empty blocks whose sums differ by no
    more than the largest element.

    A longest and a shortest block, no equally extreme block between them: every boundary between the two moves by one
    element towards the longest, until nothing improves.  Returned as ``[0, ..., len(times)]``.
    """
    sums = numpy.concatenate([[0.0], numpy.cumsum(times)])
    cuts = [len(times) * s // count for s in range(count + 1)]
    seen = set()
    while tuple(cuts) not in seen:
        seen.add(tuple(cuts))
        blocks = [sums[b] - sums[a] for a, b in zip(cuts, cuts[1:])]
        longest = int(numpy.argmax(blocks))
        order = sorted(range(count), key=lambda s: (blocks[s], abs(s - longest)))
        for shortest in order:
            moved = _moved(cuts, longest, shortest)
            if moved is not None and _spread(sums, moved) < _spread(sums, cuts):
                cuts = moved
                break
    return cuts


def _moved(cuts: List[int], longest: int, shortest: int) -> Optional[List[int]]:
    """All boundaries between the two blocks one element towards the longest; None when a block would be empty."""
    moved = list(cuts)
    if shortest > longest:
        for boundary in range(longest + 1, shortest + 1):
            moved[boundary] -= 1
    else:
        for boundary in range(shortest + 1, longest + 1):
            moved[boundary] += 1
    return moved if all(a < b for a, b in zip(moved, moved[1:])) and moved != cuts else None


def _spread(sums: numpy.ndarray, cuts: Sequence[int]) -> Tuple[float, ...]:
    """Block sums from the longest down: compared in order, so that the longest counts first."""
    return tuple(sorted((float(sums[b] - sums[a]) for a, b in zip(cuts, cuts[1:])), reverse=True))


def in_order(costs: DappleCosts, cuts: Sequence[int], devices: Sequence[int]) -> Stages:
    """Stages on consecutive devices."""
    used, stages = list(costs.servers.none()), []
    for first, end, count in zip(cuts, cuts[1:], devices):
        taken = [0] * len(used)
        for server, size in enumerate(costs.servers.sizes):
            taken[server] = min(count, size - used[server])
            count -= taken[server]
        stages.append(LayerStage(first, end, tuple(used), tuple(taken)))
        used = [a + b for a, b in zip(used, taken)]
    return tuple(stages)


def _single_device_times(costs: DappleCosts) -> Tuple[List[float], List[float]]:
    times = costs.stage_costs.times(0, costs.profile.batch_granularity or 1)
    works = [times.work(layer, layer + 1) for layer in range(costs.num_layers)]
    return [work.forward_s for work in works], [work.backward_s for work in works]


# ---- PipeDream -------------------------------------------------------------------------------------------------------

_Plan = Tuple[Tuple[int, int, int], ...]  # (first, end, replicas)


def pipedream(costs: DappleCosts) -> Optional[Stages]:
    """PipeDream's planner (Narayanan et al. 2019, section 3.1): the slowest stage of an asynchronous pipeline is made as fast
    as possible, first within a server, then over servers.

    ``T(i..j, m) = max(work, 2 (m - 1) / m gradients) / m`` for a replicated stage, ``2 a_s / B`` for a boundary; one
    mini-batch is the profile's batch.  Replicas take whole mini-batches in turn there; here the plan runs synchronously.
    Servers have to be alike.
    """
    servers = costs.servers
    if len(set(servers.sizes)) > 1:
        return None
    batch = costs.profile.batch_granularity or 1
    forward, backward = _single_device_times(costs)
    work = [f + b for f, b in zip(forward, backward)]
    cluster, per_server = servers.cluster, servers.sizes[0]
    sums = numpy.concatenate([[0.0], numpy.cumsum(work)])
    size = costs.num_layers
    times: Dict[Tuple[int, int], Tuple[float, _Plan]] = {
        (i, j): (float(sums[j] - sums[i]), ((i, j, 1),)) for i in range(size) for j in range(i + 1, size + 1)}
    if per_server > 1:
        link = cluster.bottleneck(cluster.nodes[0]).bandwidth_bytes_per_s
        times = _level(costs, times, per_server, link, batch, all_ranges=len(servers.sizes) > 1)
    if len(servers.sizes) > 1:
        link = cluster.link(cluster.nodes[0][0], cluster.nodes[1][0]).bandwidth_bytes_per_s
        times = _level(costs, times, len(servers.sizes), link, batch, all_ranges=False)
    plan = times[0, size][1]
    stages = in_order(costs, [first for first, _, _ in plan] + [size], [replicas for _, _, replicas in plan])
    return stages if costs.fits(stages) else None


def _level(costs: DappleCosts, inner: Dict[Tuple[int, int], Tuple[float, _Plan]], count: int, bandwidth: float, batch: int,
           all_ranges: bool) -> Dict[Tuple[int, int], Tuple[float, _Plan]]:
    """A^k from A^{k-1}: ``count`` machines that each run ``inner``, joined by links of ``bandwidth``."""
    size = costs.num_layers
    table = numpy.full((count + 1, size + 1, size + 1), INFINITY)
    choice: Dict[Tuple[int, int, int], Tuple[int, int]] = {}
    single = numpy.full((size + 1, size + 1), INFINITY)
    for (i, j), (seconds, _) in inner.items():
        single[i, j] = seconds
    gradients = numpy.array(costs.parameters) / bandwidth
    replicated = [single] + [numpy.maximum(single, 2.0 * (m - 1) * gradients) / m for m in range(1, count + 1)]
    boundary = numpy.array([2.0 * costs.outputs[s - 1] * batch / bandwidth if s else INFINITY for s in range(size + 1)])
    for i in range(size) if all_ranges else (0,):
        for j in range(i + 1, size + 1):
            for m in range(1, count + 1):
                table[m, i, j] = replicated[m][i, j]
                inside = slice(i + 1, j)
                for last in range(1, m) if j > i + 1 else ():
                    value = numpy.maximum(numpy.maximum(table[m - last, i, inside], boundary[inside]),
                                          replicated[last][inside, j])
                    s = int(numpy.argmin(value))
                    if value[s] < table[m, i, j] * (1 - 1e-12):
                        table[m, i, j] = value[s]
                        choice[m, i, j] = (i + 1 + s, last)
    result = {}
    for i in range(size) if all_ranges else (0,):
        for j in range(i + 1, size + 1) if all_ranges else (size,):
            result[i, j] = (float(table[count, i, j]), _traced(choice, inner, count, i, j))
    return result


def _traced(choice: Dict[Tuple[int, int, int], Tuple[int, int]], inner: Dict[Tuple[int, int], Tuple[float, _Plan]],
            count: int, i: int, j: int) -> _Plan:
    """The stages of one table entry; a machine-level stage on ``m`` machines repeats its inner stages ``m`` times."""
    machines: List[Tuple[int, int, int]] = []
    while (count, i, j) in choice:
        cut, last = choice[count, i, j]
        machines.append((cut, j, last))
        count, j = count - last, cut
    machines.append((i, j, count))
    return tuple((first, end, replicas * m) for a, b, m in reversed(machines) for first, end, replicas in inner[a, b][1])


# ---- all solvers ---------------------------------------------------------------------------------------------------------

SOLVERS: Mapping[str, planner.Solver] = {
    **planner.SOLVERS,
    "printed": dapple_printed.solve,
    "straight": straight,
    "pipedream": pipedream,
    "torchgpipe": block_partition,
    "even": even,
}


def search(profile: ModelProfile, cluster: Cluster, global_batch: int, solver: str = "exact") -> List[planner.Hybrid]:
    """The candidates of a key of :data:`SOLVERS`, played and ranked like those of the package; empty when nothing fits memory."""
    if solver in planner.SOLVERS:
        return planner.search(profile, cluster, global_batch, solver)
    servers = Servers(cluster)
    every = [DappleCosts(profile, servers, global_batch, count) for count in planner.micro_batch_counts(profile, global_batch)]
    return planner.ranked([planner.scored(solver, costs, stages) for costs in every
                           for stages in [SOLVERS[solver](costs)] if stages])


def single_device_seconds(profile: ModelProfile, cluster: Cluster, global_batch: int) -> float:
    """All micro-batches one after the other on the first device: the numerator of the paper's speed-ups (section VI-C)."""
    count = max(planner.micro_batch_counts(profile, global_batch))
    costs = DappleCosts(profile, Servers(cluster), global_batch, count)
    return count * sum(costs.stage_costs.times(0, costs.micro_batch).work(0, costs.num_layers))
