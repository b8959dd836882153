"""What AMP is compared with (section 4.1 and Table 4): Megatron's heuristics, and random strategies."""
from __future__ import annotations

import random
from typing import Callable, Dict, List, Mapping, Sequence, Tuple

import numpy

from benchmarks.papers.amp_annealing import anneal
from whale_tf.planner.amp.cost import AmpCosts, AmpStrategy
from whale_tf.planner.amp.layer_assignment import AssignmentProblem
from whale_tf.planner.amp.placement import megatron as megatron_placement
from whale_tf.planner.amp.search import Estimated, degrees, micro_batches, ranked, search


def megatron(costs: AmpCosts, balance: str = "layers") -> List[Estimated]:
    """For every micro-batch the smallest ``tmp x pp`` that fits memory, layers balanced by number or by parameters.

    Args:
        balance: ``layers`` or ``parameters``.
    """
    layers = len(costs.profile.layers)
    weights = [float(layer.parameter_bytes) for layer in costs.profile.layers]
    record: List[Estimated] = []
    smallest: Dict[int, int] = {}
    for degree in sorted(degrees(costs.profile, costs.cluster), key=lambda d: (d.tmp * d.pp, d.tmp)):
        cuts = uniform(layers, degree.pp) if balance == "layers" else balanced(weights, degree.pp)
        placement = megatron_placement(costs.cluster, degree)
        for size in micro_batches(costs.global_batch, degree.dp, costs.profile.batch_granularity or 1):
            if smallest.get(size, degree.tmp * degree.pp) != degree.tmp * degree.pp:
                continue
            strategy = AmpStrategy(degree, size, placement, cuts)
            estimate = costs.estimate(strategy)
            record.append(Estimated(strategy, estimate))
            if estimate.fits:
                smallest[size] = degree.tmp * degree.pp
    return ranked(record)


def uniform(layers: int, count: int) -> Tuple[int, ...]:
    """As many layers for each stage as for the others (Megatron's default)."""
    return tuple(layers * j // count for j in range(count + 1))


def balanced(weights: Sequence[float], count: int) -> Tuple[int, ...]:
    """The cuts that make the heaviest stage lightest (Megatron's balance by parameters)."""
    if count == 1:
        return (0, len(weights))
    problem = AssignmentProblem(numpy.asarray(weights, dtype=float), numpy.zeros((len(weights) - 1, count - 1)), count)
    caps = problem.caps()
    return problem.trace(problem.probe(caps[problem.first_feasible(caps)])[1])


def random_search(costs: AmpCosts, iterations: int = 50, seed: int = 0) -> List[Estimated]:
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
        strategy = AmpStrategy(degree, size, placement.ravel()[order].reshape(placement.shape),
                               (0, *cuts, len(costs.profile.layers)))
        record.append(Estimated(strategy, costs.estimate(strategy)))
    return ranked(record)


# the package's search beside them, under one signature
SEARCHES: Mapping[str, Callable[[AmpCosts], List[Estimated]]] = {
    "amp": search, "megatron": megatron, "random": random_search, "annealing": anneal}
