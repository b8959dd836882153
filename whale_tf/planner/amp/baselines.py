"""What AMP is compared with (section 4.1 and Table 4): Megatron's heuristics, and random strategies."""
from __future__ import annotations

import random
from typing import Dict, List

from whale_tf.planner.amp import layer_assignment
from whale_tf.planner.amp.cost import Costs, Strategy
from whale_tf.planner.amp.placement import megatron as megatron_placement
from whale_tf.planner.amp.search import Candidate, degrees, micro_batches, ranked


def megatron(costs: Costs, balance: str = "layers") -> List[Candidate]:
    """For every micro-batch the smallest ``tmp x pp`` that fits memory, layers balanced by number or by parameters.

    Args:
        balance: ``layers`` or ``parameters``.
    """
    layers = len(costs.profile.layers)
    weights = [float(layer.parameter_bytes) for layer in costs.profile.layers]
    record: List[Candidate] = []
    smallest: Dict[int, int] = {}
    for degree in sorted(degrees(costs.profile, costs.cluster), key=lambda d: (d.tmp * d.pp, d.tmp)):
        cuts = (layer_assignment.uniform(layers, degree.pp) if balance == "layers" else
                layer_assignment.balanced(weights, degree.pp))
        placement = megatron_placement(costs.cluster, degree)
        for size in micro_batches(costs.global_batch, degree.dp, costs.profile.batch_granularity or 1):
            if smallest.get(size, degree.tmp * degree.pp) != degree.tmp * degree.pp:
                continue
            strategy = Strategy(degree, size, placement, cuts)
            estimate = costs.estimate(strategy)
            record.append(Candidate(strategy, estimate, "megatron"))
            if estimate.fits:
                smallest[size] = degree.tmp * degree.pp
    return ranked(record)


def random_search(costs: Costs, iterations: int = 50, seed: int = 0) -> List[Candidate]:
    """Random degrees, micro-batch, placement and cuts, no cost model used to choose."""
    generator = random.Random(seed)
    every = [degree for degree in degrees(costs.profile, costs.cluster)
             if micro_batches(costs.global_batch, degree.dp, costs.profile.batch_granularity or 1)]
    record = []
    for _ in range(iterations if every else 0):
        degree = generator.choice(every)
        size = generator.choice(micro_batches(costs.global_batch, degree.dp, costs.profile.batch_granularity or 1))
        placement = megatron_placement(costs.cluster, degree)
        order = list(range(placement.size))
        generator.shuffle(order)
        cuts = sorted(generator.sample(range(1, len(costs.profile.layers)), degree.pp - 1))
        strategy = Strategy(degree, size, placement.ravel()[order].reshape(placement.shape),
                            (0, *cuts, len(costs.profile.layers)))
        record.append(Candidate(strategy, costs.estimate(strategy), "random"))
    return ranked(record)
