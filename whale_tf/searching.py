"""Un-annotated models: what the searches make of a captured graph."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from whale_tf._tf_compat import tf
from whale_tf.capture.annotations import SHARD_ATTR
from whale_tf.capture.captured import Captured, Spec, capture, captured_from, divided
from whale_tf.capture.chain import captured_chain
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.emit.loss_scale import recorded_low, scales_itself
from whale_tf.emit.shard.automatic import check_automatic, contenders
from whale_tf.emit.shard.problem import divided_dims
from whale_tf.errors import ConfigError, InfeasibleError, PlanError, WhaleError
from whale_tf.ir.batch_axis import BatchAxis, Options
from whale_tf.ir.region import Region, find_region
from whale_tf.ir.verify import verify
from whale_tf.passes import compile_program
from whale_tf.passes.border import Border
from whale_tf.plan import SCHEDULES, Plan
from whale_tf.planner.assemble import ModelFacts, StageStatistics, TaskGraphSpec, assemble
from whale_tf.planner.auto.choose import ALWAYS, to_play
from whale_tf.planner.auto.settings import (
    batch_to_plan_for,
    decision_of,
    may_divide_ops,
    members_of,
    search_plans,
    specs_of,
)
from whale_tf.planner.candidate import Candidate, best, fit, no_candidate
from whale_tf.planner.homes import Held
from whale_tf.planner.joint import again_seconds
from whale_tf.planner.play import played_peaks, played_seconds
from whale_tf.planner.recompute import NONE
from whale_tf.planner.rhino.automatic import NAME as RHINO
from whale_tf.planner.rhino.automatic import plan_of
from whale_tf.planner.statistics import crossings, stage_statistics
from whale_tf.profiler.chain import Chain
from whale_tf.profiler.graph_profile import Source

AUTO = "auto"  # of pipeline.schedule: the fastest that fits


TYPICAL_BATCH = 64  # examples, where the size of mini-batches is open, to compare tensors that go with it or its square


def analysed(captured: Captured, options: Options) -> Tuple[BatchAxis, Region]:
    """The batch axis and the region, whose sections begin and end where fewest bytes cross."""
    region = _region(captured, options)
    if not region.sections:
        return region.batch, region
    try:
        # not captured.examples: all processes have to decide alike, whatever the first mini-batch of each
        sizes = captured.sized(captured.static_examples or TYPICAL_BATCH)
    except PlanError:  # the graph does not go with that number of examples
        return region.batch, region
    border = Border(region, sizes)
    for joining in border.joining():
        other = _region(captured, options._replace(together=joining))
        if Border(other, sizes).improves(border):
            region = other
            break
    return region.batch, region


def _region(captured: Captured, options: Options) -> Region:
    return find_region(captured.graph, captured.task_graph, captured.batch_axis(options), list(captured.sources))


def find_plan(graph: tf.Graph, name: str, cluster: Cluster, config: Config) -> Optional[Candidate]:
    """What ``auto_parallel`` would make of a graph, which stays as it is; None: it has no optimizer's update yet.

    Raises:
        ConfigError: the graph is annotated.
        WhaleError: see :func:`parallelize`.
    """
    if scales_itself(graph):
        config = config.without_loss_scale()
    captured = captured_from(recorded_low(graph, config.precision, config.loss_scale, cluster))
    if not captured.has_step:
        return None
    verify(captured.graph)
    if captured.is_annotated:
        raise ConfigError("the script has annotations ({}), which say how it is divided; remove them to have that searched for"
                          .format(", ".join(repr(spec.name) for spec in captured.specs)))
    if config.auto.auto_parallel == RHINO:
        check_automatic(captured, config)
    began = time.perf_counter()
    found = best_plan(captured, analysed(captured, Options(sections=True))[1], cluster, config).best
    plan = found.plan if found.assignment is None else replace(
        plan_of(captured.graph, found, _inputs(captured), config.init), precision=config.precision, loss_scale=config.loss_scale)
    return replace(found, model=name, search_seconds=time.perf_counter() - began, plan=plan)


def compared(graph: tf.Graph, cluster: Cluster, config: Config) -> List[Candidate]:
    """What ``auto_parallel`` chooses from for an un-annotated training graph, all as played; the graph stays as it is."""
    captured = capture(graph)
    return played_candidates(captured, analysed(captured, Options(sections=True))[1], cluster, config)


class Searched(NamedTuple):
    """The candidate taken for an un-annotated model, and the graph with its TaskGraphs, if it has some."""

    captured: Captured
    region: Region
    best: Candidate

    @property
    def plan(self) -> Optional[Plan]:
        """The plan of TaskGraphs."""
        return self.best.plan

    @property
    def rhino(self) -> Optional[Candidate]:
        """How every op is divided, if that is taken."""
        return self.best if self.best.assignment is not None else None


def best_plan(captured: Captured, region: Region, cluster: Cluster, config: Config) -> Searched:
    """The fastest candidate as played: dividing every op as rhino says, if that is asked for, plans of TaskGraphs, and, where no
    number of TaskGraphs and no pattern is, data parallelism and the undivided graph.

    Raises:
        InfeasibleError: no search finds a plan that fits.
    """
    taken = best(played_candidates(captured, region, cluster, config), cluster)
    if taken.plan is None:
        return Searched(captured, region, taken)
    captured, region = _with_task_graphs(captured, region, taken)
    return Searched(captured, region, replace(taken, plan=replace(taken.plan, estimate=taken.estimate)))


def played_candidates(captured: Captured, region: Region, cluster: Cluster, config: Config) -> List[Candidate]:
    """What :func:`best_plan` chooses from, all as played, and reasons why searches gave no plan."""
    found: List[Candidate] = []
    if may_divide_ops(config) and len(cluster.devices) > 1:
        found = contenders(captured, divided_dims(region.batch), cluster, config)
    batch = batch_to_plan_for(config, cluster, captured.examples)
    chain = captured_chain(captured, region, batch)
    try:
        staged = search_plans(chain, Source("model", captured.graph.fingerprint()), cluster, config)
    except InfeasibleError as error:
        if not found:
            raise
        staged = [no_candidate("TaskGraphs", error)]
    worth = [one for one in to_play(staged) if one.why_not or one.search not in ALWAYS or not config.patterns.force]
    found += [_played(one, captured, region, chain, cluster, config) for one in worth]
    return found


def _with_task_graphs(captured: Captured, region: Region, found: Candidate) -> Tuple[Captured, Region]:
    captured = divided(captured, members_of(found), [Spec(*spec) for spec in specs_of(found)])
    return captured, region._replace(task_graph=captured.task_graph)


def _played(found: Candidate, captured: Captured, region: Region, chain: Chain, cluster: Cluster, config: Config) -> Candidate:
    """A candidate with its plan, the time of playing that, and peaks from the graph's own tensors."""
    if found.why_not:
        return found
    try:
        captured, region = _with_task_graphs(captured, region, found)
        model, sized = facts(captured, region), region._replace(graph=chain.graph)
        plan, seconds, peaks = scheduled(captured, sized, cluster, config, lambda one: assemble(
            model, cluster, one, decision_of(found, cluster, one)))[0]
    except WhaleError as error:
        return no_candidate(found.search, error)
    if found.measures.recompute != NONE:  # what is computed again is chosen when the plan is carried out
        seconds, peaks = seconds + again_seconds(found, cluster), found.peak_memory_bytes
    return replace(found, plan=plan, latency_s=seconds, peak_memory_bytes=peaks, fits=found.fits and fit(peaks, cluster),
                   is_played=True)


def trained_variables(captured: Captured) -> List[Held]:
    """Those of TaskGraphs, each once."""
    graph, variables, state = captured.graph, captured.phases.variables, captured.state_bytes()
    return [Held(graph.ops[number].name, home, max(0, int(graph.ops[number].attrs.get(SHARD_ATTR, 0))), variables[number].bytes,
                 state.get(number, 0))
            for number in dict.fromkeys(variable for _, variable in captured.gradients)
            for home in [captured.variable_homes.get(number)] if home is not None]


class Scheduled(NamedTuple):
    """A plan by one schedule, as played; ``peaks``: bytes of each device."""

    plan: Plan
    seconds: float
    peaks: Tuple[int, ...]


def scheduled(
    captured: Captured, region: Region, cluster: Cluster, config: Config, planned: Callable[[Config], Plan]
) -> List[Scheduled]:
    """Plans by the schedule that is asked for, or by each, those that fit first, and of these the fastest.

    Args:
        region: its graph has the static shapes of a whole mini-batch of all model replicas.
        planned: the plan for a configuration.

    Raises:
        WhaleError: no schedule gives a plan.
    """
    step, held, asked = captured.step(region), trained_variables(captured), config.pipeline.schedule
    found: List[Scheduled] = []
    problem: Optional[WhaleError] = None
    for name in SCHEDULES if asked == AUTO else (asked,):
        try:
            plan = planned(config.changed(pipeline__schedule=name))
            program = compile_program(step, plan)
            seconds = played_seconds(step, plan, cluster, program)
        except WhaleError as error:
            problem = problem or error
            continue
        if not found or plan.num_model_replicas == found[0].plan.num_model_replicas:  # else a step is of another mini-batch
            found.append(Scheduled(plan, seconds, played_peaks(step, plan, cluster, held, program)))
    if problem is not None and not found:
        raise problem
    return sorted(found, key=lambda one: (not fit(one.peaks, cluster), one.seconds))


def facts(captured: Captured, region: Region) -> ModelFacts:
    specs = [TaskGraphSpec(*spec) for spec in captured.specs]
    return ModelFacts(captured.graph, specs, _stages(captured, region), crossings(region), _inputs(captured))


def _stages(captured: Captured, region: Region) -> List[StageStatistics]:
    calls = {
        captured.graph.tensor(name): call.index
        for call in captured.gradient_calls
        for name in call.grads
        if isinstance(name, str) and name.partition(":")[0] in captured.graph
    }
    variables, state = captured.phases.variables, captured.state_bytes()
    sizes = {variable: (variables[variable].bytes, state.get(variable, 0)) for _, variable in captured.gradients}
    return stage_statistics(region, captured.gradients, captured.variable_homes, len(captured.specs), calls, sizes)


def _inputs(captured: Captured) -> Dict[str, int]:
    return {captured.graph.tensor_name(tensor): dim for tensor, dim in captured.sources.items()}
