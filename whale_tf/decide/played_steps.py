"""Plays plans of a captured step as Programs, for an un-annotated model or for a script's TaskGraphs."""

from __future__ import annotations

import abc
from dataclasses import replace
from typing import Dict, List, Optional, Sequence, Tuple

from whale_tf.capture.captured import Captured, divided
from whale_tf.capture.chain import captured_chain
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.decide.decision import Request
from whale_tf.decide.facts import analysed, facts, trained_variables
from whale_tf.decide.homes import in_parts, parts_asked_for
from whale_tf.errors import WhaleError
from whale_tf.ir.graph import OpGraph
from whale_tf.ir.region import Region
from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes.communicate import dividing
from whale_tf.plan import Plan
from whale_tf.planner.annotated import annotated_plan
from whale_tf.planner.assemble import assemble
from whale_tf.planner.auto.choose import ALWAYS, to_play
from whale_tf.planner.auto.settings import batch_to_plan_for, decision_of, layers_of, members_of, specs_of
from whale_tf.planner.candidate import Candidate, Stage, fit, kind_of, no_candidate, ranked
from whale_tf.planner.fitting import Row, fitting
from whale_tf.planner.homes import with_homes
from whale_tf.planner.joint import Playable
from whale_tf.planner.measures import AUTO, SEARCHED, Allowed, Measures
from whale_tf.planner.play import StepPrices, played
from whale_tf.planner.recompute import NONE, Choice, marked_tensors, rows_of
from whale_tf.profiler.graph_profile import Source
from whale_tf.transforms.recompute import recompute

MOST_OVERSHOOT = 1.5  # times the available memory: a plan whose layers need more is not played as a Program
SMALLEST = 3  # number of smallest plans to play if nothing fits, for the message
FOLDED = 3  # number of plans with several TaskGraphs per device to play, the fastest by layers


def as_played(found: Candidate, captured: Captured, step: TrainingStep, plan: Plan, cluster: Cluster,
              prices: Optional[StepPrices] = None) -> Candidate:
    """A candidate with its plan, and its time and peaks in simulation.

    Args:
        step: a step whose graph has the static shapes of a whole mini-batch of all model replicas.
        prices: of its ops, if they are known.

    Raises:
        PlanError: the plan's schedule cannot order this graph.
    """
    seconds, peaks = played(step, plan, cluster, trained_variables(captured), prices)
    return replace(found, plan=plan, latency_s=seconds, peak_memory_bytes=peaks, fits=fit(peaks, cluster), is_played=True)


class Steps(Playable):
    """Plans of a captured step, played as Programs.

    Args:
        region: the region of the step, with the script's TaskGraphs if it has any.
        ops: the step's graph with the static shapes of a mini-batch of ``batch`` examples, of all model replicas.
    """

    schedules: Sequence[str] = (*SEARCHED, "gpipe")
    again = 3
    rooms: Sequence[float] = (1.0, 0.7)  # searches know the memory of layers, not of ops
    bounds_hold = False

    def __init__(self, captured: Captured, region: Region, ops: OpGraph, batch: int, request: Request) -> None:
        self.captured, self.region, self.ops, self.batch = captured, region, ops, batch
        self.cluster, self.config, self.options, self.name = request.cluster, request.config, request.options, "the graph"
        self._known: Dict[int, Tuple[Region, TrainingStep]] = {}
        self._prices = StepPrices(self._step(captured, region))

    def precisions(self, allowed: Allowed) -> Tuple[str, ...]:
        return (allowed.precision,)

    @abc.abstractmethod
    def with_task_graphs(self, found: Candidate) -> Tuple[Captured, Region]:
        """The step in the plan's TaskGraphs."""

    @abc.abstractmethod
    def plan(self, found: Candidate, captured: Captured, region: Region, config: Config) -> Plan:
        """The plan without homes of variables, and with everything kept."""

    def play(self, found: Candidate, measures: Measures) -> Candidate:
        try:
            captured, region = self.with_task_graphs(found)
            config = self.config.changed(pipeline__schedule=measures.schedule, zero=measures.zero, offload=measures.offload)
            plan = parts_asked_for(captured, region, self.plan(found, captured, region, config), config)
            divided, prices = in_parts(captured, region, plan, self.options), None
            if divided.captured is captured:
                step, prices = self._step(captured, region), self._prices
            else:
                captured, region = divided.captured, divided.region
                step = captured.step(region._replace(graph=captured.sized(self.batch)))
            plan = with_homes(plan, trained_variables(captured), config)
            bare = measures._replace(recompute=NONE)
            if measures.recompute != NONE and self._marked(captured):
                kept = marked_tensors(region, len(plan.task_graphs), self._marked(captured))
                return self._keeping(found, measures, captured, region, plan, kept)
            plain = as_played(replace(found, measures=bare), captured, step, plan, self.cluster, prices)
            if measures.recompute == NONE or (measures.recompute == AUTO and plain.fits):
                return plain
            return self._computing_again(plain, measures, captured, step, region, plan)
        except WhaleError as error:
            return no_candidate(found.search, error)

    def _step(self, captured: Captured, region: Region) -> TrainingStep:
        """The step in these TaskGraphs; one for all plans, which holds what is found about it."""
        if id(region) not in self._known:  # regions are kept
            self._known[id(region)] = region, captured.step(region._replace(graph=self.ops))
        return self._known[id(region)][1]

    @staticmethod
    def _marked(captured: Captured) -> Sequence[str]:
        """The tensors marked by ``wh.checkpoint``."""
        assert captured.recording is not None
        return captured.recording.annotations.checkpoints

    def _computing_again(self, plain: Candidate, measures: Measures, captured: Captured, step: TrainingStep, region: Region,
                         plan: Plan) -> Candidate:
        """The plan with the least recomputation that fits, or with as much as possible."""
        rows = rows_of(step.region, plan, self.cluster, self.batch, dividing(step, plan))
        if not rows:
            return plain

        def again(choices: Sequence[Choice]) -> Candidate:
            kept = {number: row.tensors(choice) for (number, row), choice in zip(rows.items(), choices)
                    if any(dropped for _, dropped in choice.segments)}
            return self._keeping(plain, measures, captured, region, plan, kept)

        if measures.recompute != AUTO:
            return again([row.parts.smallest() for row in rows.values()])
        devices = [tuple(device for row in task.devices for device in row) for task in plan.task_graphs]
        return fitting(plain, [Row(devices[number], row.parts) for number, row in rows.items()], again, self.cluster)

    def _keeping(self, found: Candidate, measures: Measures, captured: Captured, region: Region, plan: Plan,
                 kept: Dict[int, Tuple[int, ...]]) -> Candidate:
        names = {number: tuple(captured.graph.tensor_name(tensor) for tensor in tensors) for number, tensors in kept.items()}
        plan = replace(plan, task_graphs=tuple(
            replace(task, kept=names.get(number)) for number, task in enumerate(plan.task_graphs)))
        redone = recompute(captured, region, plan)
        region = analysed(redone, self.options)
        known = redone.sized(self.batch)
        return as_played(replace(found, measures=measures), redone, redone.step(region._replace(graph=known)), plan, self.cluster)


class Automatic(Steps):
    """An un-annotated model."""

    def __init__(self, captured: Captured, region: Region, request: Request) -> None:
        chain = captured_chain(captured, region, batch_to_plan_for(request.config, request.cluster, captured.examples))
        super().__init__(captured, region, chain.graph, chain.batch, request)
        self._layers = layers_of(chain, Source("model", captured.graph.fingerprint()), request.cluster, request.config)
        self._divided: Dict[int, Tuple[Captured, Region]] = {}

    def search(self, measures: Measures) -> List[Candidate]:
        """The fastest plans by the times of layers."""
        found = to_play(ranked([self._layers.play(one, measures) for one in self._layers.search(measures)]))
        return [one for one in found if one.why_not or one.search not in ALWAYS or not self.config.patterns.force]

    def folded(self, found: Sequence[Candidate], measures: Measures) -> List[Candidate]:
        made = [self._layers.play(one, measures) for one in self._layers.folded(found, measures)]
        return sorted(made, key=lambda one: (bool(one.why_not), one.latency_s))[:FOLDED]

    def suits(self, found: Candidate, measures: Measures) -> bool:
        return self.config.pipeline.schedule != AUTO or super().suits(found, measures)

    def play(self, found: Candidate, measures: Measures) -> Candidate:
        if (measures.recompute, measures.zero, measures.offload) != (NONE, NONE, NONE):
            estimated = self._layers.play(found, measures)
            if not estimated.why_not and _over(estimated, self.cluster) > MOST_OVERSHOOT:
                return estimated
        return super().play(found, measures)

    def smallest(self, found: Sequence[Candidate]) -> List[Candidate]:
        """The smallest plans, also playing those that are smallest by their layers."""
        estimated = [one for one in found if one.plan is None and one.assignment is None and not one.why_not]
        others = [one for one in found if all(one is not other for other in estimated)]
        ordered = sorted(estimated, key=lambda one: max(one.peak_memory_bytes))
        return others + [super(Automatic, self).play(one, one.measures) for one in ordered[:SMALLEST]]

    def with_task_graphs(self, found: Candidate) -> Tuple[Captured, Region]:
        if id(found) not in self._divided:  # candidates are kept
            self._divided[id(found)] = with_task_graphs(self.captured, self.region, found)
        return self._divided[id(found)]

    def plan(self, found: Candidate, captured: Captured, region: Region, config: Config) -> Plan:
        model = facts(captured, region._replace(graph=self.ops))
        return assemble(model, self.cluster, config, decision_of(found, self.cluster, config))


class Annotated(Steps):
    """The TaskGraphs of a script, whose devices follow from the schedule."""

    def __init__(self, captured: Captured, region: Region, request: Request) -> None:
        batch = batch_to_plan_for(request.config, request.cluster, captured.examples)
        super().__init__(captured, region, captured.sized(batch), batch, request)
        self._facts, self._parts = facts(captured, region), request.processes
        self._bare: Dict[str, Optional[Plan]] = {}

    def search(self, measures: Measures) -> List[Candidate]:
        """The plan under the first schedule that works with the annotations.

        Raises:
            WhaleError: no schedule works with them.
        """
        asked = self.config.pipeline.schedule
        names = self.schedules if asked == AUTO else (asked,)
        for name in names:
            plan = self._by(name)
            if plan is None:
                continue
            stages = tuple(Stage(number, number, task.devices, task.strategy) for number, task in enumerate(plan.task_graphs))
            text = f"{len(stages)} TaskGraph{'s' * (len(stages) > 1)}"
            return [Candidate(
                "annotated", text, self.name, self.cluster.name, self.batch, len(self.cluster), kind_of(stages), stages,
                plan.num_micro_batch, plan.num_model_replicas, peak_memory_bytes=(0,) * len(self.cluster), plan=plan)]
        annotated_plan(self._facts, self.cluster, self._config(names[0]), self._parts)
        raise AssertionError("the annotations work with the first schedule")

    def folded(self, found: Sequence[Candidate], measures: Measures) -> List[Candidate]:
        return list(found)

    def play(self, found: Candidate, measures: Measures) -> Candidate:
        """Plays the plan.  Its description includes the memory, which matters as much as time in a choice of schedules."""
        played = super().play(found, measures)
        if played.why_not:
            return played
        return replace(played, description=f"{found.description}, at most {max(played.peak_memory_bytes)} bytes on a device")

    def suits(self, found: Candidate, measures: Measures) -> bool:
        """Whether the TaskGraphs work with the schedule, and a step has the same mini-batch as under the first schedule."""
        plan = self._by(measures.schedule)
        return plan is not None and plan.num_model_replicas == found.model_replicas

    def with_task_graphs(self, found: Candidate) -> Tuple[Captured, Region]:
        return self.captured, self.region

    def plan(self, found: Candidate, captured: Captured, region: Region, config: Config) -> Plan:
        return annotated_plan(self._facts, self.cluster, config, self._parts)

    def _by(self, schedule: str) -> Optional[Plan]:
        """The plan without measures; None if the annotations do not work with the schedule."""
        if schedule not in self._bare:
            try:
                self._bare[schedule] = annotated_plan(self._facts, self.cluster, self._config(schedule), self._parts)
            except WhaleError:
                self._bare[schedule] = None
        return self._bare[schedule]

    def _config(self, schedule: str) -> Config:
        return self.config.changed(pipeline__schedule=schedule, zero=NONE, offload=NONE)


def _over(found: Candidate, cluster: Cluster) -> float:
    """The memory that a plan needs on its fullest device, relative to that device's room."""
    return max(peak / device.usable_bytes for peak, device in zip(found.peak_memory_bytes, cluster.devices))


def with_task_graphs(captured: Captured, region: Region, found: Candidate) -> Tuple[Captured, Region]:
    captured = divided(captured, members_of(found), specs_of(found))
    return captured, region._replace(task_graph=captured.task_graph)
