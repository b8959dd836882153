"""Random small planning problems, all plans of one, and a scorer of its own.

``score`` follows DAPPLE's text from the raw profile and cluster; it shares no code with the planner's cost tables.
"""
from __future__ import annotations

import itertools
import random
from typing import Iterator, List, NamedTuple, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.planner.dapple.cost import DappleCosts, LayerStage
from whale_tf.planner.dapple.device_sets import Servers
from whale_tf.planner.measures import Measures
from whale_tf.profiler.layer_time import layer_seconds
from whale_tf.profiler.model_profile import LayerProfile, ModelProfile

TYPES = ("V100-16GB", "T4", "P100-16GB")


class Case(NamedTuple):
    profile: ModelProfile
    cluster: Cluster
    global_batch: int
    micro_batches: int
    recompute: bool

    def costs(self, below_s: float = float("inf")) -> DappleCosts:
        return DappleCosts(self.profile, Servers(self.cluster), self.global_batch, self.micro_batches,
                           Measures("stage" if self.recompute else "none", below_s=below_s))


def case(seed: int, max_devices: int = 5) -> Case:
    """Up to five layers on up to three servers, alike or not, some short of memory."""
    rng = random.Random(seed)
    while True:
        nodes = []
        for _ in range(rng.randint(1, 3)):
            count = rng.randint(1, 3)
            node = {"devices": f"{rng.choice(TYPES)}:{count}",
                    "nic": {"bandwidth_gbits_per_s": rng.choice([10, 25])}}
            if count > 1:
                node["links"] = "default"
            nodes.append(node)
        if rng.random() < 0.6:
            nodes = [nodes[0]] * len(nodes)
        cluster = Cluster.parse({"name": "random", "nodes": nodes})
        if len(cluster) <= max_devices:
            break
    layers = tuple(LayerProfile(
        name=f"layer_{i}", forward_flops=rng.choice([1, 2, 5, 5 * rng.random()]) * 1e9,
        backward_flops=rng.random() * 1e10, output_bytes=rng.randint(0, 5000000), activation_bytes=rng.randint(0, 10 ** 9),
        parameter_bytes=rng.choice([0, rng.randint(0, 10 ** 8), rng.randint(0, 2 * 10 ** 9)]))
        for i in range(rng.randint(1, 5)))
    profile = ModelProfile(name="random", layers=layers, batch_granularity=rng.randint(1, 2))
    return Case(profile, cluster, rng.choice([4, 8, 12, 16]), rng.choice([1, 2, 4, 8]), rng.random() < 0.2)


def all_plans(costs: DappleCosts) -> Iterator[Tuple[LayerStage, ...]]:
    """Every partition on every device set, exchangeable servers not identified."""
    servers = costs.servers

    def extend(layer: int, used: Tuple[int, ...], stages: Tuple[LayerStage, ...]) -> Iterator[Tuple[LayerStage, ...]]:
        free = servers.free(used)
        if layer == costs.num_layers:
            if not any(free):
                yield stages
            return
        for taken in itertools.product(*(range(count + 1) for count in free)):
            if any(taken):
                for end in range(layer + 1, costs.num_layers + 1):
                    behind = tuple(a + b for a, b in zip(used, taken))
                    yield from extend(end, behind, stages + (LayerStage(layer, end, used, taken),))

    return extend(0, servers.none(), ())


def score(problem: Case, stages: Sequence[LayerStage]) -> float:
    """L of a plan, or infinity when a stage cannot hold one micro-batch."""
    profile, cluster = problem.profile, problem.cluster
    size = -(-problem.global_batch // problem.micro_batches)
    groups = [[device for node, start, count in zip(cluster.nodes, stage.used, stage.taken)
               for device in node[start:start + count]] for stage in stages]
    forward, backward, reduce, depth = [], [], [], []
    for stage, group in zip(stages, groups):
        samples = -(-size // len(group))
        layers = profile.layers[stage.first:stage.end]
        times = [[layer_seconds(profile, layer, cluster.devices[d], samples) for layer in layers] for d in group]
        f = max(sum(t.forward_s for t in row) for row in times)
        b = max(sum(t.backward_s + (t.forward_s if problem.recompute else 0) for t in row) for row in times)
        weight = sum(layer.parameter_bytes for layer in layers)
        n = len(group)
        link = cluster.bottleneck(group)
        reduce.append(0.0 if n == 1 else 2 * (n - 1) * (weight / n / link.bandwidth_bytes_per_s + link.latency_s))
        kept = sum(layer.activation_bytes for layer in layers) * samples
        room = min(cluster.devices[d].usable_bytes for d in group) - weight * profile.bytes_per_parameter_byte
        if problem.recompute:
            room -= kept
            kept = (profile.layers[stage.first - 1] if stage.first else layers[0]).output_bytes * samples
        if room < kept or room < 0:
            return float("inf")
        forward.append(f)
        backward.append(b)
        depth.append(float("inf") if kept == 0 else room // kept)
    return _latency(problem, stages, groups, forward, backward, reduce, depth, size)


def _latency(problem: Case, stages: Sequence[LayerStage], groups: List[List[int]], forward: List[float], backward: List[float],
             reduce: List[float], depth: List[float], size: int) -> float:
    """The largest L(Q), computation stages and wires in one row."""
    f, b, ar, d = [forward[0]], [backward[0]], [reduce[0]], [depth[0]]
    for s in range(1, len(stages)):
        wire = _wire(problem, groups[s - 1], groups[s], problem.profile.layers[stages[s].first - 1].output_bytes * size)
        f, b, ar, d = f + [wire, forward[s]], b + [wire, backward[s]], ar + [0.0, reduce[s]], d + [float("inf"), depth[s]]
    best = 0.0
    for q in range(len(f)):
        end = max(ar[s] + (sum(b[s:q + 1]) if s <= q else -sum(b[q + 1:s])) for s in range(len(f)))
        best = max(best, sum(f[:q + 1]) + (problem.micro_batches - 1) * (f[q] + b[q]) + end)
        if d[q] < problem.micro_batches:  # rounds of d micro-batches, each to the end and back
            trip, last = sum(f[q:] + b[q:]), problem.micro_batches - 1
            best = max(best, sum(f[:q]) + (last // d[q] + 1) * trip + last % d[q] * b[q] + end - b[q])
    return best


def _wire(problem: Case, senders: List[int], receivers: List[int], size_bytes: float) -> float:
    """Slices that stay on a server use its links; what a server gains or loses passes its adapter."""
    cluster = problem.cluster
    seconds = latency = 0.0
    for node, members in enumerate(cluster.nodes):
        here = [a for a in senders if a in members]
        there = [b for b in receivers if b in members]
        for a in here:
            for b in there:
                link = cluster.link(a, b)
                slice_bytes = size_bytes * max(1 / len(senders), 1 / len(receivers))
                seconds, latency = max(seconds, slice_bytes / link.bandwidth_bytes_per_s), max(latency, link.latency_s)
        share = len(here) / len(senders) - len(there) / len(receivers)
        if abs(share) > 1e-9:
            near, far = (here, receivers) if share > 0 else (there, senders)
            outside = [cluster.link(near[0], other) for other in far if cluster.devices[other].node != node]
            fastest = max(link.bandwidth_bytes_per_s for link in outside)
            seconds = max(seconds, size_bytes * abs(share) / fastest)
            latency = max(latency, max(link.latency_s for link in outside))
    return seconds + latency
