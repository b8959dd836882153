"""Decides about a captured step: its plan, and the step that the plan runs, with ``split`` TaskGraphs divided."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Optional, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.capture.captured import Captured, captured_from
from whale_tf.capture.sizes import sized
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.decide.divide_all import check_automatic
from whale_tf.decide.played_steps import analysed, in_parts, trained_variables, undivided, with_parts
from whale_tf.decide.search import Decided, best_of_annotated, best_plan, decided_by_annotations, settled
from whale_tf.decide.split import Division, carry_out, divide
from whale_tf.errors import ConfigError, PlanError
from whale_tf.ir.batch_axis import Options
from whale_tf.ir.region import Region
from whale_tf.ir.verify import verify, verify_pass
from whale_tf.passes.communicate import takes_own
from whale_tf.passes.form import is_large
from whale_tf.plan import Plan
from whale_tf.planner.annotated import check_plan
from whale_tf.planner.assemble import static_batch
from whale_tf.planner.auto.settings import batch_to_plan_for, opened, wants_search
from whale_tf.planner.homes import STAGE, Held, asks_for_homes, has_one_memory, resident_of_task_graphs, with_homes
from whale_tf.planner.measures import AUTO
from whale_tf.planner.play import called_too_large, played_peaks
from whale_tf.planner.recompute import NONE, Readers, kept_tensors, marked_tensors, redone
from whale_tf.planner.rhino.automatic import NAME as RHINO
from whale_tf.transforms.batch_norm import sync_batch_norm
from whale_tf.transforms.loss_scale import recorded_low, scales_itself
from whale_tf.transforms.recompute import recompute


def decide_graph(graph: tf.Graph, cluster: Cluster, config: Config, plan: Optional[Plan],
                 parts: Sequence[Tuple[int, ...]]) -> Optional[Decided]:
    """Everything before emission, which leaves the graph alone."""
    if plan is None and config.loss_scale is not None and scales_itself(graph):
        config = config.without_loss_scale()
    config = _allowed_in(graph, config)
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
    if _divides_own(decided) or (len(parts) > 1 and not decided.plan.spans_processes):
        whole = local.with_rows_beside()
        if whole is not local:
            decided = decide(whole, cluster, config, plan, options, parts)
    return _in_memory(decided, cluster, config)


def _divides_own(decided: Decided) -> bool:
    """Whether every model replica takes its own mini-batch."""
    return decided.plan.num_model_replicas > 1 and takes_own(decided.captured.step(decided.region), decided.plan)


def _allowed_in(graph: tf.Graph, config: Config) -> Config:
    """The configuration without choices that cannot be made in this graph: where no function is built, variables are made on
    their TaskGraphs' first devices."""
    if config.variables == STAGE and not graph.building_function:
        return config.changed(variables="shared")
    return config


def decide(local: Captured, cluster: Cluster, config: Config, plan: Optional[Plan], options: Options,
           parts: Sequence[Tuple[int, ...]]) -> Decided:
    """The plan of a captured step: the given one, otherwise the one that its annotations ask for, otherwise the best one of a
    search.

    Args:
        parts: numbers of the devices that each process drives, if there are several processes.

    Raises:
        WhaleError: the step cannot run as asked.
    """
    is_rhino, count = config.auto.auto_parallel == RHINO, len(cluster.devices)
    is_open = AUTO in (config.pipeline.schedule, config.zero, config.offload)
    if plan is None and is_open and (local.is_annotated or not wants_search(config)):
        return _fastest(local, cluster, config, options, parts)
    if plan is None and is_rhino and count > 1:
        check_automatic(local, config)
    if plan is None and wants_search(config) and not local.is_annotated:
        _check_one_process(len(parts))
        if count > 1 or not is_rhino:
            return _searched(local, cluster, config, options)
    division = carry_out(divide(local, cluster, config, plan, options, parts))
    decided = decided_by_annotations(division, cluster, config, plan, options, parts)
    check_plan(decided.plan, cluster, parts)
    return _recomputing(_at_home(decided, cluster, config, plan, options), cluster, config, plan, options)


def _fastest(local: Captured, cluster: Cluster, config: Config, options: Options, parts: Sequence[Tuple[int, ...]]) -> Decided:
    """The annotated step under the schedule and homes that fit and are played fastest.

    Raises:
        ConfigError: a TaskGraph is split; only TaskGraphs of undivided ops can be played here.
        InfeasibleError: nothing fits.
    """
    key, value = next((key, config[key]) for key in ("zero", "offload", "pipeline.schedule") if config[key] == AUTO)
    if key == "pipeline.schedule" and (config.pipeline.num_micro_batch or 1) == 1:
        return decide(local, cluster, config.changed(pipeline__schedule="backward_first"), None, options, parts)
    split = [spec.name for spec in local.specs if spec.strategy == "split"]
    if split:
        raise ConfigError(f"{key} is {value!r}, which can only play TaskGraphs that replicate, but {split[0]!r} is split; name a "
                          "value")
    batch, region = analysed(local, options)
    plan = best_of_annotated(local, region, cluster, config, options, parts)
    check_plan(plan, cluster, parts)
    decided = _in_parts(Decided(local, batch, region, plan, Division(local, local)), options)
    return _recomputing(decided, cluster, config, plan, options)


def _searched(local: Captured, cluster: Cluster, config: Config, options: Options) -> Decided:
    """The best plan of an un-annotated model: of TaskGraphs, or dividing every op."""
    config = opened(config)
    taken, decided = best_plan(local, cluster, config, options)
    check_plan(decided.plan, cluster, ())
    if taken.assignment is None:  # homes and recomputation were played, too
        return _recomputing(_in_parts(decided, options), cluster, config, decided.plan, options)
    config = settled(config)
    return _recomputing(_at_home(decided, cluster, config, None, options), cluster, config, None, options)


def _at_home(decided: Decided, cluster: Cluster, config: Config, given: Optional[Plan], options: Options) -> Decided:
    """The decision with parts and homes for variables, according to the plan or the configuration.

    Raises:
        PlanError: the plan has a home for a variable that does not exist.
    """
    if given is not None:
        decided = _in_parts(decided, options)
        for task in given.task_graphs:
            missing = [name for name in task.homes if name not in decided.captured.graph]
            if missing:
                raise PlanError(f"TaskGraph {task.name!r} of the plan has a home for variable {missing[0]!r}, which the graph "
                                "does not have")
        return decided
    if not asks_for_homes(config):
        return decided
    plan = with_parts(decided.captured, decided.region, decided.plan, config)
    decided = _in_parts(decided._replace(plan=plan), options)
    held = trained_variables(decided.captured)
    plan = with_homes(decided.plan, held, config)
    return decided._replace(plan=_with_peaks(decided, plan, held, cluster, config))


def _in_parts(decided: Decided, options: Options) -> Decided:
    """With the plan's parts of variables in their place, and why others have none."""
    captured, batch, region, variables = in_parts(decided.captured, decided.region, decided.plan, options)
    reasons = undivided(captured, region, decided.plan) if decided.plan.zero != NONE else {}
    division = decided.division._replace(too_large=reasons)
    if variables is not None:
        division = division._replace(variables=variables)
    return Decided(captured, batch, region, decided.plan, division)


def _with_peaks(decided: Decided, plan: Plan, held: Sequence[Held], cluster: Cluster, config: Config) -> Plan:
    """The plan with the memory that its devices need as played.  If annotations divide TaskGraphs, nothing is played."""
    captured = decided.captured
    if any(task.strategy == "split" for task in plan.task_graphs):
        return plan
    region, _ = _with_sizes(captured, decided.region, plan, cluster, config)
    peaks = played_peaks(captured.step(region), plan, cluster, held)
    return replace(plan, estimate=replace(plan.estimate, peak_memory_bytes=peaks))


def _with_sizes(captured: Captured, region: Region, plan: Plan, cluster: Cluster, config: Config) -> Tuple[Region, int]:
    """The region with the static shapes of a mini-batch, and the number of its examples."""
    batch = batch_to_plan_for(config, cluster, static_batch(captured.graph, {t.tensor: t.dim for t in plan.inputs}))
    return region._replace(graph=sized(captured.definitions, captured.graph, captured.sources, batch)), batch


def _recomputing(decided: Decided, cluster: Cluster, config: Config, given: Optional[Plan], options: Options) -> Decided:
    """The decision with recomputation in the backward pass, according to the plan or the configuration."""
    captured, _, region, plan, division = decided
    if given is None and config.recompute != NONE:
        if region.batch_level:
            plan = _keeping(captured, region, plan, cluster, config)
        elif division.assignment is not None or config.recompute != AUTO:
            raise ConfigError(f"recompute is {config.recompute!r}, but {_NO_ACTIVATIONS[division.assignment is not None]}")
    if all(task.kept is None for task in plan.task_graphs):
        return decided
    captured = recompute(captured, region, plan)
    verify_pass(captured.graph, "after recompute")
    batch, region = analysed(captured, options)
    return Decided(captured, batch, region, plan, division)


def _in_memory(decided: Decided, cluster: Cluster, config: Config) -> Decided:
    """The decision with the peaks of the called step in the plan, if they are the reason to inline a large step."""
    plan, captured = decided.plan, decided.captured
    if plan.emit != AUTO or plan.estimate.called_peak_memory_bytes or not is_large(decided.region, plan):
        return decided
    try:
        region, _ = _with_sizes(captured, decided.region, plan, cluster, config)
    except PlanError:  # the graph does not allow the planned number of examples, so only the size decides
        return decided
    peaks = called_too_large(captured.step(region), plan, cluster, trained_variables(captured))
    return decided._replace(plan=replace(plan, estimate=replace(plan.estimate, called_peak_memory_bytes=peaks)))


_NO_ACTIVATIONS = {
    True: "this plan divides examples like any other dimension, so that no activation belongs to one micro-batch; use "
          "wh.replicate or wh.split, or set recompute to 'none'",
    False: "no op of this step follows from an input that has a dimension of examples, so that there are no activations to "
           "compute again; feed the mini-batch through a placeholder or dataset, say with wh.batch_axis(tensor, dim) which "
           "dimension of an input is the batch, or set recompute to 'none'",
}


def _keeping(captured: Captured, region: Region, plan: Plan, cluster: Cluster, config: Config) -> Plan:
    """The plan with the tensors that its TaskGraphs keep: those that the script marks, otherwise those that the configuration
    asks for."""
    assert captured.recording is not None
    marked = captured.recording.annotations.checkpoints
    if marked:
        kept = marked_tensors(region, len(plan.task_graphs), marked)
    else:
        known, batch = _with_sizes(captured, region, plan, cluster, config)
        needed = resident_of_task_graphs(plan, trained_variables(captured), has_one_memory(cluster))
        kept = kept_tensors(known, plan, cluster, config.recompute, batch, needed)
    readers = Readers(region)
    kept = {number: tensors for number, tensors in kept.items() if redone(readers, number, set(tensors)).waits}
    if not kept and (marked or config.recompute != AUTO):
        warnings.warn(f"recompute is {config.recompute!r}, but the backward pass reads nothing that forward ops could compute "
                      "again, so this step keeps all that it reads, as without it; set recompute to 'none'")
    names = {number: tuple(captured.graph.tensor_name(t) for t in tensors) for number, tensors in kept.items()}
    return replace(plan, task_graphs=tuple(
        replace(task, kept=names[number]) if number in names else task for number, task in enumerate(plan.task_graphs)))


def _check_one_process(count: int) -> None:
    if count > 1:
        raise ConfigError(
            f"auto_parallel and num_task_graph divide an un-annotated model inside one process, but there are {count}; annotate "
            "the model, or start one process that sees all devices")
