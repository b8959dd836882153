"""Un-annotated models: what the searches make of a captured graph."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Dict, List, NamedTuple, Optional, Tuple, Union

from whale_tf._tf_compat import tf
from whale_tf.capture.captured import Captured, Spec, capture, divided
from whale_tf.capture.chain import captured_chain
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.emit.shard.automatic import check_automatic, contender
from whale_tf.emit.shard.problem import divided_dims
from whale_tf.errors import ConfigError, InfeasibleError
from whale_tf.ir.batch_axis import BatchAxis, Options
from whale_tf.ir.region import Region, find_region
from whale_tf.ir.verify import verify
from whale_tf.plan import Plan
from whale_tf.planner.assemble import ModelFacts, StageStatistics, TaskGraphSpec, assemble, static_batch
from whale_tf.planner.auto.choose import Choice
from whale_tf.planner.auto.settings import (
    batch_to_plan_for,
    decision_of,
    may_divide_ops,
    members_of,
    preferred,
    search_plan,
    specs_of,
)
from whale_tf.planner.memory import device_peaks
from whale_tf.planner.result import SearchResult
from whale_tf.planner.rhino.automatic import NAME as RHINO
from whale_tf.planner.rhino.automatic import Automatic, plan_of, result_of
from whale_tf.planner.statistics import crossings, stage_statistics
from whale_tf.profiler.graph_profile import Source
from whale_tf.profiler.model_profile import ModelProfile


def analysed(captured: Captured, options: Options) -> Tuple[BatchAxis, Region]:
    batch = captured.batch_axis(options)
    return batch, find_region(captured.graph, captured.task_graph, batch, list(captured.sources))


class Found(NamedTuple):
    """A plan, as the search told it; ``profile``: the layers it is told in, where these are TaskGraphs."""

    plan: Plan
    result: SearchResult
    profile: Optional[ModelProfile] = None


def find_plan(graph: tf.Graph, name: str, cluster: Cluster, config: Config) -> Optional[Found]:
    """What ``auto_parallel`` would make of a graph, which stays as it is; None: it has no optimizer's update yet.

    Raises:
        ConfigError: the graph is annotated.
        WhaleError: see :func:`parallelize`.
    """
    captured = capture(graph)
    if not captured.has_step:
        return None
    verify(captured.graph)
    if captured.is_annotated:
        raise ConfigError("the script has annotations ({}), which say how it is divided; remove them to have that searched for"
                          .format(", ".join(repr(spec.name) for spec in captured.specs)))
    if config.auto.auto_parallel == RHINO:
        check_automatic(captured, config)
    began = time.perf_counter()
    found = best_plan(captured, analysed(captured, Options())[1], cluster, config)
    seconds = time.perf_counter() - began
    if found.rhino is not None:
        plan = plan_of(captured.graph, found.rhino, cluster, _inputs(captured), config.init)
        return Found(plan, result_of(found.rhino, name, cluster, seconds))
    assert found.plan is not None and found.choice is not None
    estimate = found.plan.estimate
    result = replace(
        found.choice.result, model=name, search_seconds=seconds, peak_memory_bytes=estimate.peak_memory_bytes,
        runners_up=estimate.runners_up)
    return Found(found.plan, result, found.choice.profile)


class Searched(NamedTuple):
    """What the searches found for an un-annotated model: TaskGraphs and their plan, or (``plan`` None) how rhino divides it;
    ``choice``: the TaskGraphs as the search told them."""

    captured: Captured
    region: Region
    plan: Optional[Plan] = None
    rhino: Optional[Automatic] = None
    choice: Optional[Choice] = None


def best_plan(captured: Captured, region: Region, cluster: Cluster, config: Config) -> Searched:
    """The best plan of TaskGraphs, or dividing every op as rhino says, if that is asked for and faster.

    Raises:
        InfeasibleError: no search finds a plan that fits.
    """
    divided: Union[Automatic, str, None] = None
    if may_divide_ops(config) and len(cluster.devices) > 1:
        divided = contender(captured, divided_dims(region.batch), cluster, config)
    try:
        staged = _searched(captured, region, cluster, config)
    except InfeasibleError as error:
        best = preferred(divided, error)
    else:
        assert staged.plan is not None and staged.choice is not None
        best = preferred(divided, staged.choice.result, staged.plan.estimate)
        if not isinstance(best, Automatic):
            return staged._replace(plan=replace(staged.plan, estimate=best))
    assert isinstance(best, Automatic)
    return Searched(captured, region, rhino=best)


def _searched(captured: Captured, region: Region, cluster: Cluster, config: Config) -> Searched:
    """An un-annotated model divided into TaskGraphs by a search, and its plan."""
    batch = batch_to_plan_for(config, cluster, static_batch(captured.graph, _inputs(captured)))
    chain = captured_chain(captured, region, batch)
    choice = search_plan(chain, Source("model", captured.graph.fingerprint()), cluster, config)
    captured = divided(captured, members_of(choice), [Spec(*spec) for spec in specs_of(choice)])
    region = region._replace(task_graph=captured.task_graph)
    plan = assemble(facts(captured, region), cluster, config, decision_of(choice, cluster, config))
    plan = _with_memory(plan, captured, region._replace(graph=chain.graph))
    return Searched(captured, region, plan, choice=choice)


def _with_memory(plan: Plan, captured: Captured, sized: Region) -> Plan:
    """The plan with peaks from the graph's own tensors in place of the search's, which knows layers only."""
    gradients = {tensor for target in captured.phases.targets for tensor in target.tensors}
    sizes = [stage.parameter_bytes + stage.state_bytes for stage in _stages(captured, sized)]
    peaks = device_peaks(plan, sized, gradients, sizes)
    return replace(plan, estimate=replace(plan.estimate, peak_memory_bytes=tuple(peaks)))


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
    state = captured.state_bytes()
    return stage_statistics(region, captured.gradients, captured.variable_homes, len(captured.specs), calls, state)


def _inputs(captured: Captured) -> Dict[str, int]:
    return {captured.graph.tensor_name(tensor): dim for tensor, dim in captured.sources.items()}
