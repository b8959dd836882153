"""The main path: a tf.Graph goes in, and the same graph comes out and trains on many devices.

    capture     tf.Graph -> op graph, phases, TaskGraphs                     capture/
    decide      a plan, and the ops that it runs (sync_batch_norm, shard)    planning.py
    compile     ops and plan -> bodies and calls                             passes/
    emit        bodies and calls -> edits of the graph                       emit/

Nothing before the last step edits the graph, so that an error leaves it as it was.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.capture.captured import Captured, captured_from
from whale_tf.cluster import ONE_PROCESS, Cluster, Processes, device_names, devices_of_processes, host_name
from whale_tf.communicators import Keys
from whale_tf.config import Config
from whale_tf.emit.batch_norm import sync_batch_norm
from whale_tf.emit.emit import Emitted, emit
from whale_tf.emit.loss_scale import recorded_low, scales_itself
from whale_tf.emit.shard.variables import DividedVariables
from whale_tf.errors import InexactError, InexactWarning, PlanError
from whale_tf.functions import allowed_in
from whale_tf.ir.batch_axis import BatchAxis, Inexact, Options
from whale_tf.ir.graph import Phase
from whale_tf.ir.region import Region
from whale_tf.ir.verify import verify
from whale_tf.passes import compile_program
from whale_tf.passes.communicate import takes_own
from whale_tf.passes.replicate import clones
from whale_tf.plan import Plan
from whale_tf.planner.sharding import Assignment
from whale_tf.planning import Decided, decide
from whale_tf.program import Program


class Parallelized(NamedTuple):
    """A graph after the main path: what was captured, analysed, decided, and done."""

    captured: Captured
    batch: BatchAxis
    region: Region
    plan: Plan
    emitted: Optional[Emitted] = None  # None: the plan is the local script itself
    replaced: Mapping[str, Any] = {}  # tensors and ops of the local script -> what is computed instead
    assignment: Optional[Assignment] = None  # how ``split`` TaskGraphs are divided
    variables: Optional[DividedVariables] = None
    too_large: Mapping[str, str] = {}  # see :class:`Division`
    serves: bool = False  # another process drives this one's devices


def parallelize(
    graph: tf.Graph,
    cluster: Cluster,
    config: Config,
    plan: Optional[Plan] = None,
    processes: Processes = ONE_PROCESS,
    keys: Optional[Keys] = None,
    has_run: bool = False,
) -> Optional[Parallelized]:
    """Rewrite a graph in place.

    Args:
        plan: run this plan; None: the one the annotations ask for.
        processes: all processes, and which of them this is; the plan is for all, and this process runs its part.
        keys: numbers of this process's collectives, if there are several processes.
        has_run: a Session has already taken over the graph's ops.

    Returns:
        None if the graph has no optimizer's update yet, and ``plan`` was not made for it as a model without one.

    Raises:
        WhaleError: the graph cannot be parallelized as asked; it is then unchanged.
    """
    parts = devices_of_processes(cluster, processes) if processes.count > 1 else ()
    decided = _decided(graph, cluster, config, plan, parts)
    if decided is None:
        return None
    captured, batch, region, plan, division = decided
    done = Parallelized(captured._replace(recording=None), batch, region, plan, assignment=division.assignment,
                        too_large=division.too_large)
    if plan.is_local:
        return done
    if plan.spans_processes:
        if graph.building_function:
            raise PlanError(
                f"a model replica of tf.function {graph.name!r} needs devices of several processes, and only a Session's graph "
                "can be driven across processes; give each process as many devices as its TaskGraphs need (whale run "
                "--devices-per-worker), or start one process that has them all")
        if not processes.is_chief:
            return done._replace(serves=True)
        processes = replace(processes, is_driver=True)
    if processes.is_chief:
        _tell_inexact(region, plan, config.on_inexact)
    devices = (*device_names(cluster, processes), host_name(cluster, processes))
    backend = plan.gradients[0].backend if plan.gradients else "local"
    emitted = emit(graph, captured, region, plan.local_part(processes.rank), backend, devices, processes, keys, has_run)
    assert captured.recording is not None
    return done._replace(emitted=emitted, replaced=captured.recording.replaced, variables=division.variables)


def _tell_inexact(region: Region, plan: Plan, wish: str) -> None:
    """Warns once for each name scope (of a layer) whose ops compute something other than in the local script.  Gradients, which
    follow from them, get no warning.

    Raises:
        InexactError: ``wish`` is ``error``.
    """
    scopes: Dict[str, List[Inexact]] = {}
    for item in region.batch.inexact if wish != "allow" else ():
        op = region.graph.ops[item.op]
        if op.phase is not Phase.BACKWARD and len(clones(plan, region.task_graph[item.op])) > 1:
            scopes.setdefault(op.name.rpartition("/")[0] or op.name, []).append(item)
    fix = "" if plan.sync_batch_norm else "sync_batch_norm to True for the statistics of the whole mini-batch, or "
    texts = []
    for scope, ((index, reason), *others) in scopes.items():
        op = region.graph.ops[index]
        more = f", like {len(others)} more ops of {scope!r}," if others else ""
        texts.append(f"op {op.name!r} ({op.type}){more} does not compute what the local script computes: {reason}. Set {fix}"
                     "on_inexact to 'allow' if this is intended")
    if texts and wish == "error":
        raise InexactError("\n".join(texts))
    for text in texts:
        warnings.warn(text, InexactWarning)


def find_program(
    graph: tf.Graph, cluster: Cluster, config: Config, plan: Optional[Plan] = None, parts: Sequence[Tuple[int, ...]] = ()
) -> Optional[Program]:
    """The step that :func:`parallelize` would make of a graph, which stays as it is; None: it has no optimizer's update yet.
    If several processes train in parallel: the step of the first one.

    Args:
        parts: device numbers that each process drives, if there are several.

    Raises:
        WhaleError: see :func:`parallelize`.
    """
    decided = _decided(graph, cluster, config, plan, parts)
    if decided is None:
        return None
    plan = decided.plan
    graphs = 1 if plan.spans_processes else max(1, len(plan.processes))
    return compile_program(decided.captured.step(decided.region, graphs), plan.local_part(0))


def _decided(
    graph: tf.Graph, cluster: Cluster, config: Config, plan: Optional[Plan], parts: Sequence[Tuple[int, ...]]
) -> Optional[Decided]:
    """Everything before emission, which leaves the graph alone."""
    if plan is None and config.loss_scale is not None and scales_itself(graph):
        config = config.without_loss_scale()
    config = allowed_in(graph, config, max(1, len(parts)))
    settings = config if plan is None else plan
    if settings.precision == "float16" and settings.loss_scale is None and not scales_itself(graph):
        warnings.warn(
            "amp is 'float16' without a loss scale: gradients below 6e-8 become 0 in float16; set "
            "amp.loss_scale to 'dynamic', or use 'bfloat16', unless the script itself scales its loss")
    step = recorded_low(graph, settings.precision, settings.loss_scale, cluster)
    if settings.sync_batch_norm:
        step = sync_batch_norm(step)
    micro_batches = plan.num_micro_batch if plan is not None else config.pipeline.num_micro_batch or 1
    local = captured_from(step, micro_batches > 1, plan)
    if not local.has_step:
        return None
    verify(local.graph)
    options = Options(sync=(lambda op: True) if settings.sync_batch_norm else None, sections=True)
    decided = decide(local, cluster, config, plan, options, parts)
    if takes_own(decided.captured.step(decided.region), decided.plan) or (len(parts) > 1 and not decided.plan.spans_processes):
        whole = local.with_rows_beside()
        if whole is not local:
            decided = decide(whole, cluster, config, plan, options, parts)
    return decided
