"""The plan that the user's annotations ask for (Whale section 3.1).

Devices are taken in order, one VirtualDevice after the other.  Remaining devices become nested data parallelism::

    cluster of 4 devices, replicate(1) + replicate(1):     model replica 0: stage 0 on 0, stage 1 on 1
                                                           model replica 1: stage 0 on 2, stage 1 on 3

If the schedule runs several TaskGraphs on a device, devices are counted by the first of these; the others follow it::

    four replicate(1) on 2 devices:    interleaved: 0, 2 on device 0 and 1, 3 on device 1
                                       zero_bubble_v: 0, 3 on device 0 and 1, 2 on device 1
"""

from __future__ import annotations

from typing import List, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.errors import AnnotationError, ConfigError, PlanError
from whale_tf.plan import Estimate, Plan
from whale_tf.planner.assemble import (
    Decision,
    ModelFacts,
    TaskGraphSpec,
    assemble,
    folded_positions,
    goes_across,
    spans,
    stages_of,
)
from whale_tf.planner.virtual_device import dealt


def annotated_plan(facts: ModelFacts, cluster: Cluster, config: Config, processes: Sequence[Tuple[int, ...]] = ()) -> Plan:
    """See the module's docstring.

    Args:
        processes: device numbers of each process, if there are several.  A model replica stays within one process.

    Raises:
        AnnotationError: the device counts do not fit the cluster.
        PlanError: the configuration asks for something impossible.
    """
    specs = facts.specs
    _check_count(specs, config)
    rows = placed(specs, cluster, config, processes)
    micro_batches = config.pipeline.num_micro_batch or 1
    nested = config.io.batch if config.io.batch == "micro" else config.io.nested_batch
    decision = Decision(rows, micro_batches, nested, Estimate(), processes=tuple(processes))
    return assemble(facts, cluster, config, decision)


def across_nodes(rows: Sequence[Tuple[Tuple[int, ...], ...]]) -> List[Tuple[Tuple[int, ...], ...]]:
    """The same counts, with each TaskGraph's devices next to each other over all model replicas (DAPPLE Fig. 2)::

        two nodes of two devices, two stages     node by node: [0] [1] and [2] [3]     across: [0] [2] and [1] [3]
    """
    start, found = 0, []
    for row in rows:
        count = len(row[0])
        found.append(tuple(tuple(range(start + g * count, start + (g + 1) * count)) for g in range(len(row))))
        start += len(row) * count
    return found


def placed(specs: Sequence[TaskGraphSpec], cluster: Cluster, config: Config,
           processes: Sequence[Tuple[int, ...]] = ()) -> List[Tuple[Tuple[int, ...], ...]]:
    """``[TaskGraph][model replica][replica]`` device numbers.  The batch part of a TaskGraph is on the same devices.

    Raises:
        AnnotationError: the device counts do not fit the cluster.
        ConfigError: the configuration contradicts itself.
    """
    whole = stages_of(specs, len(cluster.devices), config)
    is_pipeline = (config.pipeline.num_micro_batch or 1) > 1 and len(whole) > 1
    colocate = config.cluster.colocate_split_and_replicate
    if goes_across(specs, config):
        if colocate:
            raise ConfigError(
                "cluster.colocate_split_and_replicate puts TaskGraphs on the same devices, and "
                "cluster.device_place_prefer_intra_node = false on different nodes; leave one of them out")
        rows = across_nodes(virtual_devices(whole, len(cluster.devices), is_pipeline))
    elif processes and not spans(specs, processes, config):
        rows = _in_each_process(whole, processes, is_pipeline, colocate)
    else:
        rows = virtual_devices(whole, len(cluster.devices), is_pipeline, colocate)
        if config.balance.algorithm != "even":
            rows = hardware_aware(rows, cluster, is_pipeline)
    if any(spec.alone for spec in specs):
        rows = [row[:1] for row in rows]
    positions = folded_positions(specs, len(cluster.devices), config)
    if positions:
        return [rows[position] for position in positions]
    return rows + [rows[spec.batch_of] for spec in specs if spec.batch_of is not None]


def hardware_aware(rows: Sequence[Tuple[Tuple[int, ...], ...]], cluster: Cluster,
                   is_pipeline: bool) -> List[Tuple[Tuple[int, ...], ...]]:
    """The same counts on unequal devices: every model replica with the same mix, a pipeline's earlier stages on larger ones."""
    needed = sum(len(row[0]) for row in rows)
    if len({index for row in rows for index in row[0]}) < needed:
        return list(rows)  # TaskGraphs share devices
    order = [index for replica in dealt(cluster, needed, by_memory=is_pipeline) for index in replica]
    return [tuple(tuple(order[index] for index in replica) for replica in row) for row in rows]


def _in_each_process(specs: Sequence[TaskGraphSpec], processes: Sequence[Tuple[int, ...]], is_pipeline: bool,
                     colocate: bool) -> List[Tuple[Tuple[int, ...], ...]]:
    """Virtual devices within every process; ``device_count`` None means all devices of a process."""
    local = virtual_devices(specs, len(processes[0]), is_pipeline, colocate)
    return [tuple(tuple(part[i] for i in row) for part in processes for row in rows) for rows in local]


def _check_count(specs: Sequence[TaskGraphSpec], config: Config) -> None:
    """Refuses a number of TaskGraphs that contradicts the annotations."""
    stages = config.pipeline.num_stages
    if stages is not None and stages != len(specs):
        raise ConfigError(
            f"num_task_graph is {stages}, but the model is annotated with {len(specs)} TaskGraphs; leave num_task_graph out, or "
            "remove the annotations so that the model is divided automatically")


def virtual_devices(specs: Sequence[TaskGraphSpec], total: int, is_pipeline: bool,
                    colocate: bool = False) -> List[Tuple[Tuple[int, ...], ...]]:
    """``[TaskGraph][model replica][replica]`` device numbers.

    Args:
        colocate: TaskGraphs share the devices of their model replica, all beginning at its first one.

    Raises:
        AnnotationError: the counts do not divide the number of devices, or exceed it (then all TaskGraphs must ask for all
            devices, and share them).
    """
    counts = [total if spec.device_count is None else spec.device_count for spec in specs]
    asked = ", ".join(
        "{}({})".format(spec.strategy, "" if spec.device_count is None else spec.device_count) for spec in specs)
    for spec, count in zip(specs, counts):
        if count > total:
            raise AnnotationError(
                f"TaskGraph {spec.name!r} asks for {count} devices, but the cluster has {total}; use "
                f"{spec.strategy}({total}) or a larger cluster")
    needed = max(counts) if colocate else sum(counts)
    if colocate and is_pipeline:
        raise AnnotationError(
            f"cluster.colocate_split_and_replicate lets the TaskGraphs ({asked}) share devices, but there are several "
            "micro-batches, and each stage of a pipeline needs its own devices; use one micro-batch, or leave the setting out")
    if needed > total:
        if all(count == total for count in counts) and not is_pipeline:
            return [(tuple(range(total)),) for _ in counts]
        raise AnnotationError(
            "the TaskGraphs ask for {} devices together ({}), but the cluster has {}; use counts whose sum divides {}, or{} let "
            "every TaskGraph ask for all {} devices to share them".format(
                needed, asked, total, total, " with one micro-batch" if is_pipeline else "", total))
    if total % needed:
        raise AnnotationError(
            f"the TaskGraphs ask for {needed} devices together ({asked}), which does not divide the cluster's {total}; model "
            f"replicas need a multiple: use {total // needed * needed} or {(total // needed + 1) * needed} devices, or other "
            "counts")
    rows = []
    start = 0
    for count in counts:
        rows.append(tuple(tuple(range(g * needed + start, g * needed + start + count)) for g in range(total // needed)))
        start += 0 if colocate else count
    return rows


def check_plan(plan: Plan, cluster: Cluster, processes: Sequence[Tuple[int, ...]] = ()) -> None:
    """Refuse a plan that was made for a cluster of another size, or for other processes.

    Raises:
        PlanError
    """
    if plan.num_devices != len(cluster.devices):
        raise PlanError(
            f"the plan was made for {plan.num_devices} devices, but the cluster has {len(cluster.devices)}; pass the "
            f"cluster it was made for")
    if plan.processes != tuple(processes):
        raise PlanError(
            f"the plan was made for {len(plan.processes) or 1} process(es) with devices {plan.processes}, but there are "
            f"{len(processes) or 1} with {tuple(processes)}; start as many as it was made for, or change its \"processes\"")
