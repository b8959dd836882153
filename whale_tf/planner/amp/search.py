"""AMP's optimization procedure (Algorithm 1): enumerate degrees and micro-batches, place, assign layers, estimate."""
from __future__ import annotations

from collections import Counter
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.errors import InfeasibleError, seconds_text
from whale_tf.planner.amp.cost import AmpCosts, AmpStrategy, Degrees, Estimate, tensor_degrees
from whale_tf.planner.amp.placement import megatron
from whale_tf.planner.candidate import RUNNERS_UP, Candidate, Stage, of_stages, smallest_too_large
from whale_tf.planner.stage_costs import StageCosts
from whale_tf.profiler.model_profile import ModelProfile

OF_EACH = 2  # number of plans to play for each combination of degrees of parallelism


class Estimated(NamedTuple):
    """A strategy with its estimate."""

    strategy: AmpStrategy
    estimate: Estimate

    @property
    def seconds(self) -> float:
        return self.estimate.seconds

    def describe(self) -> str:
        """``pp 4 x dp 4 x tmp 1, micro-batches of 1``."""
        degrees = self.strategy.degrees
        return f"pp {degrees.pp} x dp {degrees.dp} x tmp {degrees.tmp}, micro-batches of {self.strategy.micro_batch}"

    def candidate(self, method: str, costs: AmpCosts, others: Sequence[Estimated] = ()) -> Candidate:
        """The plan as every search returns it, with the next ones as its runners-up."""
        degrees, size, placement, cuts = self.strategy
        gas = costs.accumulation(degrees, size)
        stages = [_stage(placement[p].tolist(), cuts[p], cuts[p + 1] - 1, degrees, min(gas, degrees.pp - p))
                  for p in range(degrees.pp)]
        return of_stages(
            method, self.describe(), costs.stage_costs, stages, costs.global_batch, gas, self.seconds, self.estimate.peak_bytes,
            [f"{method}: {one.describe()}, {seconds_text(one.seconds)}" for one in others[:RUNNERS_UP]])


def _stage(rows: Sequence[Sequence[int]], first: int, last: int, degrees: Degrees, warmup: int) -> Stage:
    """Pure data parallelism is one replicated stage; otherwise each pipeline is a model replica."""
    devices: Tuple[Tuple[int, ...], ...] = tuple(map(tuple, rows))
    if degrees.pp == 1 and degrees.tmp == 1:
        devices = (tuple(device for row in devices for device in row),)
    return Stage(first_layer=first, last_layer=last, devices=devices, strategy="split" if degrees.tmp > 1 else "replicate",
                 warmup=warmup)


def plans(stage_costs: StageCosts, global_batch: int, method: str, micro_batches: Optional[int] = None) -> List[Candidate]:
    """The plans to play: the best ones of each combination of degrees.

    Args:
        micro_batches: the only number of micro-batches to try.

    Raises:
        InfeasibleError: no strategy divides the mini-batch, or nothing fits memory.
    """
    costs = AmpCosts(stage_costs.profile, stage_costs.cluster, global_batch, measures=stage_costs.measures)
    found = search(costs)
    if micro_batches is not None:
        found = [one for one in found if costs.accumulation(one.strategy.degrees, one.strategy.micro_batch) == micro_batches]
    if not found:
        raise InfeasibleError(
            f"{method!r} finds no strategy for {costs.profile.name!r} on the {len(costs.cluster)} devices of "
            f"{costs.cluster.name!r}: no pipeline of at most {len(costs.profile.layers)} stages divides a batch of {global_batch}"
            f"{'' if micro_batches is None else f' into {micro_batches} micro-batches'}; use a batch that more devices divide")
    if not found[0].estimate.fits:
        raise smallest_too_large(stage_costs, method, float(min(max(one.estimate.peak_bytes) for one in found)))
    seen: Dict[Degrees, int] = Counter()
    kept = []
    for number, one in enumerate(found):
        seen[one.strategy.degrees] += 1
        if seen[one.strategy.degrees] <= OF_EACH:
            kept.append(one.candidate(method, costs, found[number + 1:]))
    return kept


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


def search(costs: AmpCosts) -> List[Estimated]:
    """Every strategy, best first: those that fit memory, by estimated seconds, then those that do not."""
    record: List[Estimated] = []
    granularity = costs.profile.batch_granularity or 1
    for degree in degrees(costs.profile, costs.cluster):
        placement = megatron(costs.cluster, degree)
        for size in micro_batches(costs.global_batch, degree.dp, granularity):
            strategy = costs.assign(degree, size, placement)
            if strategy is not None:
                record.append(Estimated(strategy, costs.estimate(strategy)))
    return ranked(record)


def ranked(record: List[Estimated]) -> List[Estimated]:
    """Strategies that fit first; ties by fewer stages, less tensor parallelism, larger micro-batches."""
    return sorted(record, key=lambda c: (not c.estimate.fits, c.seconds, c.strategy.degrees.pp, c.strategy.degrees.tmp,
                                         -c.strategy.micro_batch))


def _divisors(number: int) -> List[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
