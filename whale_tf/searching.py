"""Un-annotated models: what the searches make of a captured graph."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.capture.annotations import SHARD_ATTR
from whale_tf.capture.captured import Captured, Spec, capture, captured_from, divided
from whale_tf.capture.chain import captured_chain
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.emit.loss_scale import recorded_low, scales_itself
from whale_tf.emit.shard.automatic import check_automatic, contenders
from whale_tf.emit.shard.division import Division, carry_out, initialised, of_local, whole_division
from whale_tf.emit.shard.problem import divided_dims
from whale_tf.errors import ConfigError, InfeasibleError, PlanError, UnsupportedOpError, WhaleError
from whale_tf.ir.batch_axis import BatchAxis, Options
from whale_tf.ir.region import Region, find_region
from whale_tf.ir.verify import verify
from whale_tf.plan import SCHEDULES, Plan
from whale_tf.planner.annotated import annotated_plan
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
from whale_tf.planner.candidate import Candidate, best, fit, no_candidate, ranked
from whale_tf.planner.homes import Held
from whale_tf.planner.joint import again_seconds
from whale_tf.planner.play import played_peaks, played_seconds
from whale_tf.planner.recompute import NONE
from whale_tf.planner.rhino.automatic import NAME as RHINO
from whale_tf.planner.statistics import crossings, stage_statistics
from whale_tf.profiler.chain import Chain
from whale_tf.profiler.graph_profile import Source

AUTO = "auto"  # of pipeline.schedule: the fastest that fits
HOPE = 0.85  # of what Rhino's search minimises: few divisions take less as played (of 16 measured two, 0.85 and 0.70 of it)


def analysed(captured: Captured, options: Options) -> Tuple[BatchAxis, Region]:
    batch = captured.batch_axis(options)
    return batch, find_region(captured.graph, captured.task_graph, batch, list(captured.sources))


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
    found, _ = best_plan(captured, cluster, config, Options(sections=True))
    return replace(found, model=name, search_seconds=time.perf_counter() - began)


def compared(graph: tf.Graph, cluster: Cluster, config: Config) -> List[Candidate]:
    """What ``auto_parallel`` chooses from for an un-annotated training graph, all as played; the graph stays as it is."""
    return [one.found for one in played_candidates(capture(graph), cluster, config, Options(sections=True), every=True)]


class Decided(NamedTuple):
    """``captured``, ``batch``, ``region``: of the step that ``plan`` runs; ``division``: how it was made of the user's."""

    captured: Captured
    batch: BatchAxis
    region: Region
    plan: Plan
    division: Division


def decided_by_annotations(
    division: Division, cluster: Cluster, config: Config, plan: Optional[Plan], options: Options, parts: Sequence[Tuple[int, ...]]
) -> Decided:
    """A plan for the TaskGraphs that there are (unless one is given)."""
    captured, (batch, region) = division.captured, analysed(division.captured, options)
    if plan is None:
        model = facts(captured, region)._replace(graph=division.local.graph)
        plan = of_local(annotated_plan(model, cluster, config, parts), division)
    return Decided(captured, batch, region, plan, division)


class Played(NamedTuple):
    """A candidate, and what it decides; None: it gave no plan, or was not played, because its search believes in no better
    time than others take."""

    found: Candidate
    decided: Optional[Decided] = None


def best_plan(captured: Captured, cluster: Cluster, config: Config, options: Options) -> Tuple[Candidate, Decided]:
    """The fastest candidate as played: dividing every op as rhino says, if that is asked for, plans of TaskGraphs, and, where no
    number of TaskGraphs and no pattern is, data parallelism and the undivided graph.

    Raises:
        InfeasibleError: no search finds a plan that fits.
    """
    played = played_candidates(captured, cluster, config, options)
    taken = best([one.found for one in played], cluster)
    decided = next(one.decided for one in played if one.decided is not None and one.decided.plan is taken.plan)
    plan = replace(decided.plan, estimate=taken.estimate)
    return replace(taken, plan=plan), decided._replace(plan=plan)


def played_candidates(
    captured: Captured, cluster: Cluster, config: Config, options: Options, every: bool = False
) -> List[Played]:
    """What :func:`best_plan` chooses from, and reasons why searches gave no plan.

    Args:
        every: divisions are played even if their searches believe that others are faster.
    """
    batch, region = analysed(captured, options)
    divisions: List[Candidate] = []
    if may_divide_ops(config) and len(cluster.devices) > 1:
        divisions = contenders(captured, divided_dims(batch), cluster, config)
    chain = captured_chain(captured, region, batch_to_plan_for(config, cluster, captured.examples))
    try:
        staged = search_plans(chain, Source("model", captured.graph.fingerprint()), cluster, config)
    except InfeasibleError as error:
        if not divisions:
            raise
        staged = [no_candidate("TaskGraphs", error)]
    worth = [one for one in to_play(staged) if one.why_not or one.search not in ALWAYS or not config.patterns.force]
    played = [_played(one, captured, batch, region, chain, cluster, config) for one in worth]
    for one in ranked(divisions) if divisions else []:  # being compiled takes as long as being found
        if every or may_be_best(one, [other.found for other in played]):
            played.append(_divided(one, captured, chain.batch, cluster, config, options))
        else:
            played.append(Played(one))
    return played


def may_be_best(division: Candidate, others: Sequence[Candidate]) -> bool:
    """Whether a division that has not been played may turn out the best: its search adds up what devices do beside each other."""
    hopeful = replace(division, latency_s=HOPE * division.latency_s)
    return not division.why_not and ranked([hopeful, *others])[0] is hopeful


def _divided(found: Candidate, captured: Captured, batch: int, cluster: Cluster, config: Config, options: Options) -> Played:
    """Dividing every op: with the plan, the time of playing that, and peaks from the parts' own tensors."""
    if config.pipeline.schedule == AUTO:
        config = config.changed(pipeline__schedule="backward_first")  # there is one micro-batch
    try:
        division = carry_out(initialised(whole_division(captured, found, cluster), config.init))
        decided = decided_by_annotations(division, cluster, config, None, options, ())
        step, graph = decided.captured, decided.captured.graph
        sources = {graph.tensor(captured.graph.tensor_name(tensor)): dim for tensor, dim in captured.sources.items()}
        region = decided.region._replace(graph=step._replace(sources=sources).sized(batch))
        (plan, seconds, peaks), = scheduled(step, region, cluster, config, lambda _: decided.plan)
    except (PlanError, UnsupportedOpError) as error:
        return Played(no_candidate(found.search, error))
    return Played(_as_played(found, plan, seconds, peaks, cluster), decided)


def _with_task_graphs(captured: Captured, region: Region, found: Candidate) -> Tuple[Captured, Region]:
    captured = divided(captured, members_of(found), [Spec(*spec) for spec in specs_of(found)])
    return captured, region._replace(task_graph=captured.task_graph)


def _played(found: Candidate, local: Captured, batch: BatchAxis, region: Region, chain: Chain, cluster: Cluster,
            config: Config) -> Played:
    """TaskGraphs: with the plan, the time of playing that, and peaks from the graph's own tensors."""
    if found.why_not:
        return Played(found)
    try:
        captured, region = _with_task_graphs(local, region, found)
        model, sized = facts(captured, region), region._replace(graph=chain.graph)
        plan, seconds, peaks = scheduled(captured, sized, cluster, config, lambda one: assemble(
            model, cluster, one, decision_of(found, cluster, one)))[0]
    except WhaleError as error:
        return Played(no_candidate(found.search, error))
    if found.measures.recompute != NONE:  # what is computed again is chosen when the plan is carried out
        seconds, peaks = seconds + again_seconds(found, cluster), found.peak_memory_bytes
    return Played(_as_played(found, plan, seconds, peaks, cluster),
                  Decided(captured, batch, region, plan, Division(local, captured)))


def _as_played(found: Candidate, plan: Plan, seconds: float, peaks: Tuple[int, ...], cluster: Cluster) -> Candidate:
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
            seconds = played_seconds(step, plan, cluster)
        except WhaleError as error:
            problem = problem or error
            continue
        if not found or plan.num_model_replicas == found[0].plan.num_model_replicas:  # else a step is of another mini-batch
            found.append(Scheduled(plan, seconds, played_peaks(step, plan, cluster, held)))
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
