"""The main path: a tf.Graph in, the same graph out, training on many devices."""

from __future__ import annotations

import collections
from dataclasses import replace
from typing import Any, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.capture.captured import Captured, capture
from whale_tf.cluster import ONE_PROCESS, Cluster, Processes, device_names, devices_of_processes
from whale_tf.communicators import Keys
from whale_tf.config import Config
from whale_tf.emit.emit import Emitted, emit
from whale_tf.emit.shard import Sharded
from whale_tf.emit.shard.automatic import check_automatic
from whale_tf.emit.shard.division import Division, carry_out, divide, initialised, of_local, whole_division
from whale_tf.emit.shard.variables import DividedVariables
from whale_tf.errors import ConfigError, PlanError
from whale_tf.ir.batch_axis import BatchAxis, Options
from whale_tf.ir.region import Region
from whale_tf.ir.verify import verify
from whale_tf.optimizations.batch_norm import Decomposition, decompose
from whale_tf.passes import compile_program
from whale_tf.plan import Plan
from whale_tf.planner.annotated import annotated_plan, check_plan
from whale_tf.planner.auto.settings import (
    wants_search,
)
from whale_tf.planner.rhino.automatic import NAME as RHINO
from whale_tf.planner.sharding import Assignment
from whale_tf.program import Program
from whale_tf.searching import Searched, analysed, best_plan, facts


class Parallelized(NamedTuple):
    """A graph after the main path: what was captured, analysed, decided, and done."""

    captured: Captured
    batch: BatchAxis
    region: Region
    plan: Plan
    emitted: Optional[Emitted]  # None: the plan is the local script itself
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
        if done is None or done.emitted is None:
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
    emitted = emit(graph, decided.captured, decided.region, part, backend, devices, processes, keys)
    return decided._replace(emitted=emitted)


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
    return None if decided is None else compile_program(decided.captured.step(decided.region), decided.plan)


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
    captured, (batch, region) = division.captured, analysed(division.captured, options)
    searched: Optional[Searched] = None
    if is_searched:
        searched = best_plan(graph, captured, region, cluster, config)
        if searched.rhino is not None:
            division = initialised(whole_division(local, searched.rhino, cluster), config.init)
            division = _carried_out(graph, division, False, None, sharded)
            captured, (batch, region) = division.captured, analysed(division.captured, options)
    if searched is not None and searched.plan is not None:
        captured, region, plan = searched.captured, searched.region, searched.plan
    elif plan is None:
        model = facts(captured, region)._replace(graph=division.local.graph)
        plan = of_local(annotated_plan(model, cluster, config, parts), division)
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


def is_local(plan: Plan) -> bool:
    """One device, one micro-batch: nothing to rewrite."""
    return (
        plan.num_micro_batch == 1
        and plan.num_model_replicas == 1
        and {d for t in plan.task_graphs for row in t.devices for d in row} == {0}
    )
