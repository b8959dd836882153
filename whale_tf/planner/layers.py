"""A model by its layers, for the joint search: its plans are played by the simulator."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError
from whale_tf.planner.bounds import Bounds
from whale_tf.planner.candidate import Candidate, ranked
from whale_tf.planner.fitting import Row, fitting, room_of
from whale_tf.planner.folded import folded
from whale_tf.planner.joint import NEVER_S, Playable
from whale_tf.planner.measures import AUTO, Allowed, Measures
from whale_tf.planner.recompute import Choice, RecomputableParts
from whale_tf.planner.simulated import LayeredModels, priced, simulated, simulator_of, with_slices
from whale_tf.planner.stage_costs import StageCosts
from whale_tf.profiler.model_profile import ModelProfile
from whale_tf.schedule import in_flight, orders, positions_of, schedule_of, warmup_depths
from whale_tf.simulator import Source

PRICED = 4  # number of plans to price, besides the first of every search
PARTS = 24  # groups of a stage's layers, each of which is computed again as a whole or not
FEW = 8  # the same, where only the time is asked for

Search = Callable[[Measures], List[Candidate]]
Names = Tuple[Tuple[str, ...], ...]  # names of the layers in each part of a row


class Layers(Playable):
    """A model by its layers.

    Args:
        profile: the model's profile, in its own precision.
        search: returns plans under measures, with their profiles; raises InfeasibleError.
        balance: a key of :data:`whale_tf.balance.SOLVERS`.
        micro_batches: number of micro-batches of one model replica; None lets the search choose.
        source: the model, if it is more than its layers: then their times only say which plans to price.
    """

    def __init__(self, profile: ModelProfile, cluster: Cluster, search: Search, balance: str = "exact",
                 micro_batches: Optional[int] = None, source: Optional[Source] = None) -> None:
        self.profile, self.cluster, self.name = profile, cluster, profile.name
        self._balance, self._search, self._micro_batches = balance, search, micro_batches
        self._source = source if source is not None and source.profile is None else None
        self._simulator, self._models = simulator_of(cluster, self._source), LayeredModels()
        self._priced: Dict[object, Candidate] = {}
        self._least: Dict[object, float] = {}
        self._known: Dict[object, Candidate] = {}  # in simulation
        self._found: Dict[Measures, List[Candidate]] = {}  # by searches
        self._rows_of: Dict[object, Tuple[List[Row], List[Names]]] = {}
        self._smallest_of: Dict[object, List[float]] = {}
        self._frontiers: Dict[object, List[List[Tuple[float, float]]]] = {}
        self._bounds = Bounds(cluster, self._simulator, balance)

    @property
    def whole(self) -> Cluster:
        return self.cluster if self._source is None else self._source.execution.cluster

    def precisions(self, allowed: Allowed) -> Tuple[str, ...]:
        return allowed.precisions(self.profile)

    def search(self, measures: Measures) -> List[Candidate]:
        if measures.offload == "v0":  # which replicas divide it does not matter to state on the host
            measures = measures._replace(zero="none")
        if measures not in self._found:
            self._found[measures] = self._search(measures)
        return self._found[measures]

    def folded(self, found: Sequence[Candidate], measures: Measures) -> List[Candidate]:
        return folded(found, self.cluster, measures, self._micro_batches)

    def play(self, found: Candidate, measures: Measures) -> Candidate:
        if found.why_not:
            return found
        if measures.recompute != AUTO:
            return self._kept(found, measures)
        plain = self._kept(found, measures._replace(recompute="none"))
        if plain.fits or plain.why_not:
            return plain
        rows, names = self._rows(plain)
        taken = fitting(plain, rows, lambda choice: self._simulated(_choosing(plain, names, choice)), self.cluster)
        if taken.fits:
            return taken
        full = self._simulated(_keeping(found, measures._replace(recompute="full")))
        return min(taken, full, key=lambda one: (not one.fits, max(one.peak_memory_bytes)))

    def _kept(self, found: Candidate, measures: Measures) -> Candidate:
        """A plan in which every stage keeps the same kind of tensors.  If it does not fit, with fewer micro-batches in flight:
        one less on each stage, since searches do not count what messages hold, or those of 1F1B, which keep all stages busy."""
        played, stages = self._simulated(_keeping(found, measures)), found.stages
        if played.fits or played.why_not or measures.schedule != "backward_first":
            return played
        for less in (1, max(stage.warmup for stage in stages)):
            fewer = tuple(replace(stage, warmup=max(min(stage.warmup, len(stages) - place), stage.warmup - less))
                          for place, stage in enumerate(stages))
            if fewer != stages:
                again = self._simulated(_keeping(replace(found, stages=fewer), measures))
                if again.fits:
                    return again
        return played

    def settled(self, found: Sequence[Candidate]) -> List[Candidate]:
        """The first plans of all, and the first of every search, as the model itself is priced under them."""
        if self._source is None:
            return list(found)
        plans = [one for one in ranked(found) if not one.why_not]
        first = {one.search: one for one in reversed(plans)}
        chosen = [one for number, one in enumerate(plans) if number < PRICED or first[one.search] is one]
        prices = [self._price(one) for one in chosen if one.fits or not plans[0].fits]
        fitting_ones = [one for one in prices if one.fits]
        return (fitting_ones or prices) + [one for one in found if one.why_not]

    def _price(self, found: Candidate) -> Candidate:
        assert self._source is not None
        key = found.stages, found.micro_batches, found.model_replicas, found.measures
        if key not in self._priced:
            source = self._source.under(found.measures.precision_of(self.profile))
            simulator = simulator_of(source.execution.cluster, source)
            self._priced[key] = priced(found, source, simulator, self._balance)
        known = self._priced[key]
        return replace(known, search=found.search, description=found.description)

    def _simulated(self, found: Candidate) -> Candidate:
        key = (found.stages, found.micro_batches, found.model_replicas, id(found.profile), found.measures)
        if key not in self._known:  # candidates are kept, and so are their profiles
            self._known[key] = simulated(found, self.cluster, self._balance, self._simulator, self._models)
        return replace(self._known[key], search=found.search, description=found.description)

    def least_seconds_again(self, plain: Candidate) -> float:
        return self._least_fitting(plain, [0.0] * len(plain.stages))

    def _least_fitting(self, plain: Candidate, saved: Sequence[float]) -> float:
        """The least time of a plan that recomputes what does not fit.

        Args:
            saved: bytes of each stage's state that a device no longer holds.
        """
        rows, _ = self._rows(plain, FEW)
        key = _shape(plain)
        if key not in self._frontiers:
            self._frontiers[key] = [row.parts.frontier() for row in rows]
        again: List[float] = []
        for number, (row, size, frontier) in enumerate(zip(rows, saved, self._frontiers[key])):
            room = room_of(plain, row, rows, self.cluster) + size
            place = bisect_right(frontier, (room, NEVER_S))
            if place:
                again.append(frontier[place - 1][1])
            elif self._smallest(plain)[number] <= room:  # in finer groups
                again.append(self._rows(plain)[0][number].parts.least_seconds(room))
            else:
                return NEVER_S
        least_s = plain.latency_s + (plain.micro_batches * again[0] if len(rows) == 1 else 0.0)
        return max(least_s, self._least_with(plain, again))

    def _smallest(self, plain: Candidate) -> List[float]:
        """For each stage, the least bytes of its activations."""
        key = _shape(plain)
        if key not in self._smallest_of:
            self._smallest_of[key] = [row.parts.smallest().memory for row in self._rows(plain)[0]]
        return self._smallest_of[key]

    def is_too_large(self, found: Candidate, measures: Measures) -> bool:
        """By the state of the layers alone."""
        if found.profile is None or found.why_not:
            return False
        rooms = [min(self.cluster.devices[device].usable_bytes for device in stage.all_devices) for stage in found.stages]
        return any(size > room for size, room in zip(_state_bytes(found, measures), rooms))

    def least_seconds_under(self, plain: Candidate, measures: Measures) -> float:
        if measures.recompute != "none" or plain.profile is None:
            return plain.latency_s
        saved = [before - after for before, after in zip(_state_bytes(plain, plain.measures), _state_bytes(plain, measures))]
        return self._least_fitting(plain, saved)

    def least_fitting_seconds(self, found: Candidate, measures: Measures) -> float:
        key = found.stages, found.micro_batches, id(found.profile), measures.zero, measures.offload, "fitting"
        if key not in self._least:
            try:
                rows, _ = self._rows(found)
                usable = [min(self.cluster.devices[device].usable_bytes for device in row.devices) - size
                          for row, size in zip(rows, _state_bytes(found, measures))]
                self._least[key] = self._least_with(found, [row.parts.least_seconds(size) for row, size in zip(rows, usable)])
            except PlanError:
                self._least[key] = 0.0
        return self._least[key]

    def _rows(self, found: Candidate, most: int = PARTS) -> Tuple[List[Row], List[Names]]:
        key = (most, *_shape(found))
        if key not in self._rows_of:
            self._rows_of[key] = _rows(found, self.cluster, self._balance, most)
        return self._rows_of[key]

    def _least_with(self, found: Candidate, again: Sequence[float]) -> float:
        """A lower bound of a plan's time if each stage computes for so many seconds again in every micro-batch."""
        least_s = max(found.micro_batches * (work_s + more_s) for work_s, more_s in zip(self._bounds.busy_seconds(found), again))
        return least_s + self._bounds.waiting_seconds(found, least_s)

    def least_seconds(self, found: Candidate, measures: Measures) -> float:
        key = found.stages, found.micro_batches, id(found.profile), measures.schedule, measures.zero
        if key not in self._least:  # candidates are kept, and so are their profiles
            try:
                self._least[key] = self._bounds.seconds(_keeping(found, measures._replace(recompute="none")))
            except PlanError:
                self._least[key] = 0.0  # the play says why there is no such plan
        return self._least[key]


def _shape(found: Candidate) -> Tuple[object, ...]:
    """What the rows of a plan depend on.  Candidates are kept, and so are their profiles."""
    return found.stages, found.micro_batches, found.model_replicas, id(found.profile), found.measures.schedule


def _state_bytes(found: Candidate, measures: Measures) -> List[float]:
    """For each stage, bytes that a device holds for the whole step: values, gradients and optimizer state."""
    sizes, profile = [], found.profile
    assert profile is not None, "stages are given in layers"
    for stage in found.stages:
        is_split = stage.strategy == "split"
        replicas, degree = (len(stage.devices), len(stage.devices[0])) if is_split else (len(stage.all_devices), 1)
        size = sum(layer.parameter_bytes / (1 if layer.tensor_parallel_bytes is None else degree)
                   for layer in profile.distinct(stage.first_layer, stage.last_layer + 1))
        sizes.append(size * measures.parameter_bytes(profile, replicas))
    return sizes


def _rows(found: Candidate, cluster: Cluster, balance: str, most: int = PARTS) -> Tuple[List[Row], List[Names]]:
    """The stages in at most ``most`` groups of layers."""
    profile = found.profile
    assert profile is not None, "stages are given in layers"
    plan = with_slices(found, profile, cluster, balance)
    samples = found.global_batch / (found.micro_batches * found.model_replicas)
    rows, names, costs = [], [], StageCosts(profile, cluster)
    positions = positions_of([stage.devices for stage in found.stages])
    steps = orders(found.measures.schedule, found.micro_batches, [stage.warmup for stage in found.stages], positions)
    held_at_once = in_flight(steps, len(found.stages))
    for stage, task, count in zip(found.stages, plan.task_graphs, held_at_once):
        layers = profile.layers[stage.first_layer:stage.last_layer + 1]
        split = len(stage.devices[0]) if stage.strategy == "split" else 1
        slices = task.slices or (1,) * len(stage.devices[0])
        share = samples if stage.strategy == "split" else samples * max(slices) / sum(slices)
        times, sizes = costs.times(stage.devices[0][0], share, split), costs.bytes(split)
        each = -(-len(layers) // most)
        groups = [layers[first:first + each] for first in range(0, len(layers), each)]
        held = [sizes.each[number][number + 1] * share for number in range(stage.first_layer, stage.last_layer + 1)]
        seconds = times.forward_s[stage.first_layer:stage.last_layer + 1]
        behind = np.tile(np.array([group[-1].output_bytes * share for group in groups]), (len(groups), 1))
        starts = range(0, len(layers), each)
        names.append(tuple(tuple(layer.name for layer in group) for group in groups))
        rows.append(Row(stage.all_devices, RecomputableParts(
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
