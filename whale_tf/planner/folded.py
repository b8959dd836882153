"""Plans with several TaskGraphs on each device, for the schedules that run these (``interleaved``, ``zero_bubble_v``).

The stages keep their devices: those of a pipeline that a search found, or one device for each stage.  The layers are cut again,
into V times as many TaskGraphs, which the schedule places on these devices::

    pipeline       0 1 | 2 3          devices of 2 stages, of 2 replicas each
    interleaved    0 1 | 2 3 | 0 1 | 2 3
    zero_bubble_v  0 1 | 2 3 | 2 3 | 0 1

Cuts are exact for a pipeline of TaskGraphs that do not share devices (:func:`whale_tf.balance.exact_stages`).  The plans that are
fastest by a formula are returned, and played like all others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.balance import exact_stages, stage_times_s
from whale_tf.cluster import Cluster
from whale_tf.planner.candidate import Candidate, Stage, of_stages
from whale_tf.planner.measures import Measures
from whale_tf.planner.micro_batches import micro_batch_counts
from whale_tf.planner.partition import all_reduce_seconds, partition_problem, stage_devices
from whale_tf.planner.stage_costs import StageCosts
from whale_tf.schedule import schedule_of

MOST_EACH = 4  # TaskGraphs on a device
HANDED_OVER = 6  # number of plans to play
OF_EACH = 2  # number of these with the same devices for their stages
TWO_EACH = "zero_bubble_v"

Rows = Tuple[Tuple[Tuple[int, ...], ...], ...]  # [stage][model replica][replica] device numbers


class _Shape(NamedTuple):
    """The devices of a pipeline's stages; every stage has the same number."""

    rows: Rows

    @property
    def stages(self) -> int:
        return len(self.rows)

    @property
    def key(self) -> Tuple[Tuple[int, ...], ...]:
        return tuple(tuple(device for row in stage for device in row) for stage in self.rows)

    @property
    def model_replicas(self) -> int:
        return len(self.rows[0])

    @property
    def replicas(self) -> List[Tuple[int, ...]]:
        """``[replica of any model replica][stage]``"""
        return list(zip(*self.key))


def folded(found: Sequence[Candidate], cluster: Cluster, measures: Measures,
           micro_batches: Optional[int] = None) -> List[Candidate]:
    """The plans, the fastest first by a formula.

    Args:
        found: plans with one TaskGraph per device.
        micro_batches: number of micro-batches of one model replica; None lets the search choose.  Under ``interleaved`` it is a
            multiple of the number of stages of devices.
    """
    plans = [one for one in found if not one.why_not and one.profile is not None]
    if not plans:
        return []
    profiles = {id(one.profile): one.profile for one in plans if one.profile is not None}
    costs = [StageCosts(profile, cluster, Measures(is_bounded=False)) for profile in profiles.values()]
    made = [one for shape in _shapes(plans, cluster) for each in costs
            for one in _of_shape(shape, each, plans[0], measures.schedule, micro_batches)]
    taken: Dict[Rows, int] = {}
    kept: List[Candidate] = []
    for one in sorted(made, key=lambda one: (one.latency_s, len(one.stages))):
        rows = tuple(stage.devices for stage in one.stages)
        shape = tuple(dict.fromkeys(rows))
        if len(kept) < HANDED_OVER and taken.get(shape, 0) < OF_EACH:
            taken[shape] = taken.get(shape, 0) + 1
            kept.append(one)
    return kept


def _shapes(plans: Sequence[Candidate], cluster: Cluster) -> List[_Shape]:
    """The shapes of the pipelines that have the same number of devices in every stage, and the same numbers of stages with one
    device each.  Without pipelines, all numbers of stages that divide the devices."""
    pipelines = [one for one in plans if len(one.stages) > 1]
    counts = {len(one.stages) for one in pipelines} or set(range(2, len(cluster) + 1))
    shapes: Dict[object, _Shape] = {}  # by the devices of the stages, regardless of how these divide their part of the batch
    for one in pipelines:
        rows = tuple(stage.devices for stage in one.stages)
        is_even = len({len(stage.all_devices) for stage in one.stages}) == 1
        is_apart = len({device for stage in one.stages for device in stage.all_devices}) == sum(
            len(stage.all_devices) for stage in one.stages)
        if is_even and is_apart and all(stage.strategy == "replicate" for stage in one.stages):
            shapes.setdefault(_Shape(rows).key, _Shape(rows))
    for count in sorted(counts):
        if len(cluster) % count == 0:
            dealt = stage_devices(cluster, count)
            rows = tuple(tuple((row[position],) for row in dealt) for position in range(count))
            shapes.setdefault(_Shape(rows).key, _Shape(rows))
    return list(shapes.values())


def _of_shape(shape: _Shape, costs: StageCosts, like: Candidate, schedule: str,
              micro_batches: Optional[int]) -> Iterator[Candidate]:
    fold = schedule_of(schedule).folding
    assert fold is not None
    for each in (2,) if schedule == TWO_EACH else range(2, MOST_EACH + 1):
        if shape.stages * each > costs.num_layers:
            return
        positions = fold(shape.stages * each, each)
        rows = [tuple(row[position] for position in positions) for row in shape.replicas]
        multiple = 1 if schedule == TWO_EACH else shape.stages
        for count in micro_batch_counts(
                like.global_batch, shape.model_replicas, shape.stages, len(shape.rows[0][0]), micro_batches, multiple):
            problem = replace(partition_problem(costs, rows, like.global_batch, count), fixed_order=True)
            cuts = exact_stages(problem).cuts
            times = stage_times_s(problem, cuts, range(len(positions)))
            device_s = max(sum(seconds for seconds, own in zip(times, positions) if own == position)
                           for position in range(shape.stages))
            wire_s = max(problem.handover_s[cut - 1] for cut in cuts[1:-1])
            stages = tuple(Stage(first_layer=first, last_layer=end - 1, devices=shape.rows[position])
                           for first, end, position in zip(cuts, cuts[1:], positions))
            seconds = (count + (shape.stages - 1) / each) * max(device_s, wire_s) + all_reduce_seconds(costs, stages)
            yield of_stages(schedule, _described(shape, cuts, each, count), costs, stages, like.global_batch, count, seconds)


def _described(shape: _Shape, cuts: Sequence[int], each: int, count: int) -> str:
    sizes = "+".join(str(end - first) for first, end in zip(cuts, cuts[1:]))
    wide = len(shape.replicas)
    return (f"{shape.stages} stages of {each} TaskGraphs a device ({sizes} layers){f' x {wide} replicas' if wide > 1 else ''}, "
            f"{count} micro-batch{'es' if count > 1 else ''}")
