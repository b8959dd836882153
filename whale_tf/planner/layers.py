"""A model by its layers, for the joint search: its plans are played by the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, List, Optional, Sequence, Tuple

import numpy as np

from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError
from whale_tf.planner.bounds import Bounds
from whale_tf.planner.candidate import Candidate
from whale_tf.planner.fitting import Row, fitting
from whale_tf.planner.folded import folded
from whale_tf.planner.joint import Playable
from whale_tf.planner.measures import AUTO, Allowed, Measures
from whale_tf.planner.recompute import Choice, Parts
from whale_tf.planner.simulated import simulated, simulator_of, with_slices
from whale_tf.planner.stage_costs import StageCosts
from whale_tf.profiler.model_profile import ModelProfile
from whale_tf.schedule import in_flight, orders, places_of, schedule_of, warmup_depths

PARTS = 24  # groups of a stage's layers, each of which is computed again as a whole or not

Search = Callable[[Measures], List[Candidate]]
Names = Tuple[Tuple[str, ...], ...]  # names of the layers in each part of a row


class Layers(Playable):
    """A model by its layers.

    Args:
        profile: the model's profile, in its own precision.
        search: returns plans under measures, with their profiles; raises InfeasibleError.
        balance: a key of :data:`whale_tf.balance.SOLVERS`.
        micro_batches: number of micro-batches of one model replica; None lets the search choose.
    """

    def __init__(self, profile: ModelProfile, cluster: Cluster, search: Search, balance: str = "exact",
                 micro_batches: Optional[int] = None) -> None:
        self.profile, self.cluster, self.name = profile, cluster, profile.name
        self._balance, self._search, self._micro_batches = balance, search, micro_batches
        self._simulator = simulator_of(cluster)
        self._bounds = Bounds(cluster, self._simulator.network, balance)

    def precisions(self, allowed: Allowed) -> Tuple[str, ...]:
        return allowed.precisions(self.profile)

    def search(self, measures: Measures) -> List[Candidate]:
        return self._search(measures)

    def folded(self, found: Sequence[Candidate], measures: Measures) -> List[Candidate]:
        return folded(found, self.cluster, measures, self._micro_batches)

    def play(self, found: Candidate, measures: Measures) -> Candidate:
        if found.why_not:
            return found
        if measures.recompute != AUTO:
            return self._simulated(_keeping(found, measures))
        plain = self._simulated(_keeping(found, measures._replace(recompute="none")))
        if plain.fits or plain.why_not:
            return plain
        rows, names = _rows(plain, self.cluster, self._balance)
        taken = fitting(plain, rows, lambda choice: self._simulated(_choosing(plain, names, choice)), self.cluster)
        if taken.fits:
            return taken
        full = self._simulated(_keeping(found, measures._replace(recompute="full")))
        return min(taken, full, key=lambda one: (not one.fits, max(one.peak_memory_bytes)))

    def _simulated(self, found: Candidate) -> Candidate:
        return simulated(found, self.cluster, self._balance, self._simulator)

    def least_seconds(self, found: Candidate, measures: Measures) -> float:
        try:
            return self._bounds.seconds(_keeping(found, measures._replace(recompute="none")))
        except PlanError:
            return 0.0  # the play says why there is no such plan


def _rows(found: Candidate, cluster: Cluster, balance: str) -> Tuple[List[Row], List[Names]]:
    """The stages in groups of layers."""
    profile = found.profile
    assert profile is not None, "stages are given in layers"
    plan = with_slices(found, profile, cluster, balance)
    samples = found.global_batch / (found.micro_batches * found.model_replicas)
    rows, names, costs = [], [], StageCosts(profile, cluster)
    homes = places_of([stage.devices for stage in found.stages])
    steps = orders(found.measures.schedule, found.micro_batches, [stage.warmup for stage in found.stages], homes)
    held_at_once = in_flight(steps, len(found.stages))
    for stage, task, count in zip(found.stages, plan.task_graphs, held_at_once):
        layers = profile.layers[stage.first_layer:stage.last_layer + 1]
        split = len(stage.devices[0]) if stage.strategy == "split" else 1
        slices = task.slices or (1,) * len(stage.devices[0])
        share = samples if stage.strategy == "split" else samples * max(slices) / sum(slices)
        times, sizes = costs.times(stage.devices[0][0], share, split), costs.bytes(split)
        each = -(-len(layers) // PARTS)
        groups = [layers[first:first + each] for first in range(0, len(layers), each)]
        held = [sizes.each[number][number + 1] * share for number in range(stage.first_layer, stage.last_layer + 1)]
        seconds = times.forward_s[stage.first_layer:stage.last_layer + 1]
        behind = np.tile(np.array([group[-1].output_bytes * share for group in groups]), (len(groups), 1))
        starts = range(0, len(layers), each)
        names.append(tuple(tuple(layer.name for layer in group) for group in groups))
        rows.append(Row(stage.all_devices, Parts(
            np.add.reduceat(held, starts), np.add.reduceat(seconds, starts), behind, behind, count)))
    return rows, names


def _choosing(found: Candidate, names: Sequence[Names], choices: Sequence[Choice]) -> Candidate:
    """The plan with the tensors that every stage keeps: the last result of a dropped segment, and all of any other layer."""
    stages = []
    for stage, parts, choice in zip(found.stages, names, choices):
        kept = tuple(name for end, dropped in choice.segments for name in ((parts[end][-1] + ":0",) if dropped else parts[end]))
        is_whole = not any(dropped for _, dropped in choice.segments)
        stages.append(replace(stage, kept=None if is_whole else kept))
    again = AUTO if any(stage.kept is not None for stage in stages) else "none"
    return replace(found, stages=tuple(stages), measures=found.measures._replace(recompute=again))


def _keeping(found: Candidate, measures: Measures) -> Candidate:
    """The plan in which every stage keeps the same kind of tensors, with the schedule's warm-up."""
    profile, stages = found.profile, []
    assert profile is not None, "stages are given in layers"
    policy = schedule_of(measures.schedule).policy
    depths = [stage.warmup for stage in found.stages]
    if policy is not None:
        depths = list(warmup_depths(policy, len(depths), None, found.micro_batches))
    for stage, depth in zip(found.stages, depths):
        names = tuple(f"{layer.name}:0" for layer in profile.layers[stage.first_layer:stage.last_layer + 1])
        stages.append(replace(stage, warmup=depth, kept={"none": None, "stage": ()}.get(measures.recompute, names)))
    return replace(found, stages=tuple(stages), measures=measures)
