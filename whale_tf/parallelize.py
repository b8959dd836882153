"""The main path: a tf.Graph in, the same graph out, training on many devices."""

from __future__ import annotations

import collections
import time
from dataclasses import replace
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from whale_tf._tf_compat import tf
from whale_tf.capture.captured import Captured, Spec, capture, divided
from whale_tf.capture.chain import captured_chain
from whale_tf.cluster import ONE_PROCESS, Cluster, Processes, device_names, devices_of_processes
from whale_tf.communicators import Keys
from whale_tf.config import Config
from whale_tf.errors import ConfigError, InfeasibleError, PlanError
from whale_tf.ir.batch_axis import BatchAxis, Options
from whale_tf.ir.region import Region, find_region
from whale_tf.ir.verify import verify
from whale_tf.optimizations.batch_norm import Decomposition, decompose
from whale_tf.passes import compile_program
from whale_tf.plan import Plan
from whale_tf.planner.annotated import annotated_plan, check_plan
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
    wants_search,
)
from whale_tf.planner.memory import device_peaks
from whale_tf.planner.result import SearchResult
from whale_tf.planner.rhino.automatic import NAME as RHINO
from whale_tf.planner.rhino.automatic import Automatic, plan_of, result_of
from whale_tf.planner.sharding import Assignment
from whale_tf.planner.statistics import crossings, stage_statistics
from whale_tf.profiler.graph_profile import Source
from whale_tf.profiler.model_profile import ModelProfile
from whale_tf.program import Program
from whale_tf.rewrite.passes import Rewritten, rewrite
from whale_tf.rewrite.shard import Sharded
from whale_tf.rewrite.shard.automatic import check_automatic, contender
from whale_tf.rewrite.shard.division import Division, carry_out, divide, initialised, of_local, whole_division
from whale_tf.rewrite.shard.problem import divided_dims
from whale_tf.rewrite.shard.variables import DividedVariables


class Parallelized(NamedTuple):
    """A graph after the main path: what was captured, analysed, decided, and done."""

    captured: Captured
    batch: BatchAxis
    region: Region
    plan: Plan
    rewritten: Optional[Rewritten]  # None: the plan is the local script itself
    replaced: Mapping[str, Any] = {}  # tensors and ops of the local script -> what is computed in their place
    assignment: Optional[Assignment] = None  # how ``split`` TaskGraphs are divided
    variables: Optional[DividedVariables] = None
    serves: bool = False  # another process drives this one's devices


def parallelize(
    graph: tf.Graph,
    cluster: Cluster,
    config: Config,
    plan: Optional[Plan] = None,
    processes: Processes = ONE_PROCESS,
    keys: Optional[Keys] = None,
) -> Optional[Parallelized]:
    """Rewrite a graph in place.

    Args:
        plan: run this plan; None: the one the annotations ask for.
        processes: all processes, and which of them this is; the plan is for all, and this process runs its part.
        keys: numbers of this process' collectives, where there are several processes.

    Returns:
        None when the graph has no optimizer's update yet, and is no model without one that ``plan`` was made for.

    Raises:
        WhaleError: the graph cannot be parallelized as asked; the graph is then as it was.
    """
    sync = (config if plan is None else plan).sync_batch_norm
    decomposition = decompose(graph) if sync else Decomposition()
    sharded = Sharded()
    done = None
    try:
        options = Options(sync=lambda op: True) if sync else Options()
        done = _parallelize(graph, cluster, config, plan, options, processes, keys, sharded)
    finally:
        if done is None or done.rewritten is None:
            sharded.undo()
            decomposition.undo()
    if done is None:
        return None
    return done._replace(
        captured=done.captured._replace(export=None),
        replaced=collections.ChainMap(sharded.replaced, decomposition.replaced),  # type: ignore[arg-type]
        variables=sharded.variables,
    )


def _parallelize(
    graph: tf.Graph,
    cluster: Cluster,
    config: Config,
    plan: Optional[Plan],
    options: Options,
    processes: Processes,
    keys: Optional[Keys],
    sharded: Sharded,
) -> Optional[Parallelized]:
    parts = devices_of_processes(cluster, processes) if processes.count > 1 else ()
    decided = _decide(graph, cluster, config, plan, options, parts, sharded)
    if decided is None or is_local(decided.plan):
        return decided
    plan = decided.plan
    if plan.spans_processes:
        if not processes.is_chief:
            return decided._replace(serves=True)
        processes = replace(processes, is_driver=True)
    backend = plan.gradients[0].backend if plan.gradients else "local"
    part = plan.local_part(processes.rank)
    devices = device_names(cluster, processes)
    rewritten = rewrite(graph, decided.captured, decided.region, part, backend, devices, processes, keys)
    return decided._replace(rewritten=rewritten)


def find_program(
    graph: tf.Graph, cluster: Cluster, config: Config, plan: Optional[Plan] = None, parts: Sequence[Tuple[int, ...]] = ()
) -> Optional[Program]:
    """The step that :func:`parallelize` would make of a graph, which stays as it is; None: it has no optimizer's update yet.

    Args:
        parts: device numbers that each process drives, where there are several.

    Raises:
        PlanError: the plan divides ops.
        WhaleError: see :func:`parallelize`.
    """
    sync = (config if plan is None else plan).sync_batch_norm
    decomposition = decompose(graph) if sync else Decomposition()
    try:
        options = Options(sync=lambda op: True) if sync else Options()
        decided = _decide(graph, cluster, config, plan, options, parts, None)
    finally:
        decomposition.undo()
    return None if decided is None else compile_program(decided.region, decided.plan)


def _decide(
    graph: tf.Graph,
    cluster: Cluster,
    config: Config,
    plan: Optional[Plan],
    options: Options,
    parts: Sequence[Tuple[int, ...]],
    sharded: Optional[Sharded],
) -> Optional[Parallelized]:
    """Everything before the rewrite.

    Args:
        parts: device numbers that each process drives, where there are several.
        sharded: keeps what dividing ops changes in the graph; None: it must stay as it is.
    """
    is_pipeline = (plan.num_micro_batch if plan is not None else config.pipeline.num_micro_batch or 1) > 1
    local = capture(graph, is_pipeline, plan)
    if not local.has_step:
        return None
    verify(local.graph)
    if plan is None and config.auto.auto_parallel == RHINO and len(cluster.devices) > 1:
        check_automatic(graph, local, config)
    is_searched = plan is None and wants_search(config) and not local.is_annotated
    if is_searched:
        _check_one_process(len(parts))
        is_searched = len(cluster.devices) > 1 or config.auto.auto_parallel != RHINO
    division = divide(graph, local, cluster, config, plan, options, parts)
    if division.assignment is not None:
        division = _carried_out(graph, division, is_pipeline, plan, sharded)
    captured, (batch, region) = division.captured, _analysed(division.captured, options)
    searched: Optional[_Searched] = None
    if is_searched:
        searched = _best(graph, captured, region, cluster, config)
        if searched.rhino is not None:
            division = initialised(whole_division(local, searched.rhino, cluster), config.init)
            division = _carried_out(graph, division, False, None, sharded)
            captured, (batch, region) = division.captured, _analysed(division.captured, options)
    if searched is not None and searched.plan is not None:
        captured, region, plan = searched.captured, searched.region, searched.plan
    elif plan is None:
        facts = _facts(captured, region)._replace(graph=division.local.graph)
        plan = of_local(annotated_plan(facts, cluster, config, parts), division)
    check_plan(plan, cluster, parts)
    return Parallelized(captured, batch, region, plan, None, assignment=division.assignment)


def _carried_out(
    graph: tf.Graph, division: Division, is_pipeline: bool, plan: Optional[Plan], sharded: Optional[Sharded]
) -> Division:
    if sharded is None:
        raise PlanError(
            "the plan divides ops (split), so its Program is of the divided graph, which the rewrite makes: print "
            "wh.current_program().to_text() in the script, after the first training step or wh.parallelize()"
        )
    return carry_out(graph, division, is_pipeline, plan, sharded)


def _check_one_process(count: int) -> None:
    if count > 1:
        raise ConfigError(
            "auto_parallel and num_task_graph divide an un-annotated model inside one process, but there are "
            f"{count}; annotate the "
            "model, or start one process that sees all devices"
        )


def _analysed(captured: Captured, options: Options) -> Tuple[BatchAxis, Region]:
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
        check_automatic(graph, captured, config)
    began = time.perf_counter()
    found = _best(graph, captured, _analysed(captured, Options())[1], cluster, config)
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


class _Searched(NamedTuple):
    """What the searches found for an un-annotated model: TaskGraphs and their plan, or (``plan`` None) how rhino divides it;
    ``choice``: the TaskGraphs as the search told them."""

    captured: Captured
    region: Region
    plan: Optional[Plan] = None
    rhino: Optional[Automatic] = None
    choice: Optional[Choice] = None


def _best(graph: tf.Graph, captured: Captured, region: Region, cluster: Cluster, config: Config) -> _Searched:
    """The best plan of TaskGraphs, or dividing every op as rhino says, if that is asked for and faster.

    Raises:
        InfeasibleError: no search finds a plan that fits.
    """
    divided: Union[Automatic, str, None] = None
    if may_divide_ops(config) and len(cluster.devices) > 1:
        divided = contender(graph, captured, divided_dims(region.batch), cluster, config)
    try:
        staged = _searched(graph, captured, region, cluster, config)
    except InfeasibleError as error:
        best = preferred(divided, error)
    else:
        assert staged.plan is not None and staged.choice is not None
        best = preferred(divided, staged.choice.result, staged.plan.estimate)
        if not isinstance(best, Automatic):
            return staged._replace(plan=replace(staged.plan, estimate=best))
    assert isinstance(best, Automatic)
    return _Searched(captured, region, rhino=best)


def _searched(graph: tf.Graph, captured: Captured, region: Region, cluster: Cluster, config: Config) -> _Searched:
    """An un-annotated model divided into TaskGraphs by a search, and its plan."""
    batch = batch_to_plan_for(config, cluster, static_batch(captured.graph, _inputs(captured)))
    chain = captured_chain(graph, captured, region, batch)
    choice = search_plan(chain, Source("model", captured.graph.fingerprint()), cluster, config)
    captured = divided(captured, members_of(choice), [Spec(*spec) for spec in specs_of(choice)])
    region = region._replace(task_graph=captured.task_graph)
    plan = assemble(_facts(captured, region), cluster, config, decision_of(choice, cluster, config))
    plan = _with_memory(plan, captured, region._replace(graph=chain.graph))
    return _Searched(captured, region, plan, choice=choice)


def _with_memory(plan: Plan, captured: Captured, sized: Region) -> Plan:
    """The plan with peaks from the graph's own tensors in place of the search's, which knows layers only."""
    gradients = {tensor for target in captured.phases.targets for tensor in target.tensors}
    sizes = [stage.parameter_bytes + stage.state_bytes for stage in _stages(captured, sized)]
    peaks = device_peaks(plan, sized, gradients, sizes)
    return replace(plan, estimate=replace(plan.estimate, peak_memory_bytes=tuple(peaks)))


def _facts(captured: Captured, region: Region) -> ModelFacts:
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


def is_local(plan: Plan) -> bool:
    """One device, one micro-batch: nothing to rewrite."""
    return (
        plan.num_micro_batch == 1
        and plan.num_model_replicas == 1
        and {d for t in plan.task_graphs for row in t.devices for d in row} == {0}
    )
