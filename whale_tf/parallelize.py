"""The main path: a tf.Graph in, the same graph out, training on many devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.capture.captured import Captured, capture
from whale_tf.cluster import ONE_PROCESS, Cluster, Processes, device_names, devices_of_processes
from whale_tf.communicators import Keys
from whale_tf.config import Config
from whale_tf.ir.batch_axis import BatchAxis, Options, analyse
from whale_tf.ir.region import Region, find_region
from whale_tf.ir.verify import verify
from whale_tf.optimizations.batch_norm import Decomposition, decompose
from whale_tf.plan import Plan
from whale_tf.planner.annotated import TaskGraphSpec, annotated_plan, check_plan
from whale_tf.planner.statistics import crossings, stage_statistics
from whale_tf.rewrite.passes import Rewritten, rewrite


class Parallelized(NamedTuple):
    """A graph after the main path: what was captured, analysed, decided, and done."""

    captured: Captured
    batch: BatchAxis
    region: Region
    plan: Plan
    rewritten: Optional[Rewritten]  # None: the plan is the local script itself
    replaced: Mapping[str, str] = {}  # tensors of the local script -> tensors computed in their place
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
        None when the graph has no optimizer's update yet.

    Raises:
        WhaleError: the graph cannot be parallelized as asked; the graph is then as it was.
    """
    sync = (config if plan is None else plan).sync_batch_norm
    decomposition = decompose(graph) if sync else Decomposition()
    done = None
    try:
        options = Options(sync=lambda op: True) if sync else Options()
        done = _parallelize(graph, cluster, config, plan, options, processes, keys)
    finally:
        if done is None or done.rewritten is None:
            decomposition.undo()
    return done and done._replace(replaced=decomposition.replaced)


def _parallelize(
    graph: tf.Graph,
    cluster: Cluster,
    config: Config,
    plan: Optional[Plan],
    options: Options,
    processes: Processes,
    keys: Optional[Keys],
) -> Optional[Parallelized]:
    is_pipeline = (plan.num_micro_batch if plan is not None else config.pipeline.num_micro_batch or 1) > 1
    captured = capture(graph, is_pipeline, plan)
    if not captured.updates:
        return None
    verify(captured.graph)
    batch = analyse(captured.graph, captured.sources, captured.scope, options)
    region = find_region(captured.graph, captured.task_graph, batch, list(captured.sources))
    parts = devices_of_processes(cluster, processes) if processes.count > 1 else ()
    if plan is None:
        plan = _plan(captured, region, cluster, config, parts)
    check_plan(plan, cluster, parts)
    if is_local(plan):
        return Parallelized(captured, batch, region, plan, None)
    if plan.spans_processes:
        if not processes.is_chief:
            return Parallelized(captured, batch, region, plan, None, serves=True)
        processes = replace(processes, is_driver=True)
    backend = plan.gradients[0].backend if plan.gradients else "local"
    part = plan.local_part(processes.rank)
    devices = device_names(cluster, processes)
    rewritten = rewrite(graph, captured, region, part, backend, devices, processes, keys)
    return Parallelized(captured, batch, region, plan, rewritten)


def _plan(
    captured: Captured, region: Region, cluster: Cluster, config: Config, parts: Sequence[Tuple[int, ...]]
) -> Plan:
    specs = [TaskGraphSpec(*spec) for spec in captured.specs]
    calls = {
        captured.graph.tensor(name): call.index
        for call in captured.gradient_calls
        for name in call.grads
        if isinstance(name, str) and name.partition(":")[0] in captured.graph
    }
    stages = stage_statistics(region, captured.gradients, captured.variable_homes, len(specs), calls)
    inputs = {captured.graph.tensor_name(tensor): dim for tensor, dim in captured.sources.items()}
    return annotated_plan(captured.graph, specs, stages, crossings(region), inputs, cluster, config, parts)


def is_local(plan: Plan) -> bool:
    """One device, one micro-batch: nothing to rewrite."""
    return (
        plan.num_micro_batch == 1
        and plan.num_model_replicas == 1
        and {d for t in plan.task_graphs for row in t.devices for d in row} == {0}
    )
