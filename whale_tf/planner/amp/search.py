"""AMP's optimization procedure (Algorithm 1): enumerate degrees and micro-batches, place, assign layers, estimate."""
from __future__ import annotations

from typing import Iterator, List, NamedTuple

from whale_tf.cluster import Cluster
from whale_tf.planner.amp.cost import Costs, Degrees, Estimate, Strategy, tensor_degrees
from whale_tf.planner.amp.placement import megatron
from whale_tf.profiler.model_profile import ModelProfile


class Candidate(NamedTuple):
    """A strategy with its estimate."""

    strategy: Strategy
    estimate: Estimate

    @property
    def seconds(self) -> float:
        return self.estimate.seconds

    def describe(self) -> str:
        """``pp 4 x dp 4 x tmp 1, micro-batches of 1``."""
        degrees = self.strategy.degrees
        return "pp {} x dp {} x tmp {}, micro-batches of {}{}".format(
            degrees.pp, degrees.dp, degrees.tmp, self.strategy.micro_batch,
            "" if self.estimate.fits else ", does not fit memory")


def degrees(profile: ModelProfile, cluster: Cluster) -> Iterator[Degrees]:
    """All (pp, dp, tmp) whose product is the number of devices, with no more stages than layers."""
    total = len(cluster.devices)
    for tmp in tensor_degrees(profile, cluster):
        for dp in _divisors(total // tmp):
            pp = total // tmp // dp
            if pp * dp * tmp == total and pp <= len(profile.layers):
                yield Degrees(pp, dp, tmp)


def micro_batches(global_batch: int, dp: int, granularity: int) -> List[int]:
    """Possible micro-batch sizes: the divisors of a pipeline's share of the batch, at least the granularity if possible."""
    if global_batch % dp:
        return []
    sizes = _divisors(global_batch // dp)
    return [size for size in sizes if size >= min(granularity, sizes[-1])]


def search(costs: Costs) -> List[Candidate]:
    """Every strategy, best first: those that fit memory, by estimated seconds, then those that do not."""
    record: List[Candidate] = []
    granularity = costs.profile.batch_granularity or 1
    for degree in degrees(costs.profile, costs.cluster):
        placement = megatron(costs.cluster, degree)
        for size in micro_batches(costs.global_batch, degree.dp, granularity):
            strategy = costs.assign(degree, size, placement)
            if strategy is not None:
                record.append(Candidate(strategy, costs.estimate(strategy)))
    return ranked(record)


def ranked(record: List[Candidate]) -> List[Candidate]:
    """Strategies that fit first; ties by fewer stages, less tensor parallelism, larger micro-batches."""
    return sorted(record, key=lambda c: (not c.estimate.fits, c.seconds, c.strategy.degrees.pp, c.strategy.degrees.tmp,
                                         -c.strategy.micro_batch))


def _divisors(number: int) -> List[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
