"""``split`` TaskGraphs on the main path: what decides how they are divided, and the graph before and after."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Dict, Optional, Sequence, Set, Tuple

from whale_tf.capture.captured import Captured
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.decide.decision import Division, Request
from whale_tf.decide.divide_all import as_one_split, is_automatic, planned
from whale_tf.ir.graph import Phase
from whale_tf.ir.region import find_region
from whale_tf.ir.verify import verify_pass
from whale_tf.patterns.strategy import Sizes
from whale_tf.plan import Plan
from whale_tf.planner.annotated import placed
from whale_tf.planner.assemble import TaskGraphSpec, devices_for_all
from whale_tf.planner.candidate import Candidate
from whale_tf.planner.sharding import BATCH, assign, batch_ops, device_shares, with_batch
from whale_tf.planner.sharding.force import in_unit
from whale_tf.planner.sharding.initial import with_initial_values
from whale_tf.profiler.graph_profile import precision_of
from whale_tf.profiler.op_cost import tensor_bytes
from whale_tf.transforms.shard import shard
from whale_tf.transforms.shard.problem import divided_dims, in_bodies, sharding_problem

Rows = Tuple[Tuple[int, ...], ...]  # ``[model replica][place]`` device numbers


def divide(local: Captured, request: Request) -> Division:
    """How ``split`` TaskGraphs are divided: according to the plan, or by the cheapest patterns."""
    cluster, config, plan, options, processes = request
    init = (config if plan is None else plan).init
    if plan is not None and is_automatic(plan):
        examples = divided_dims(local.batch_axis(options))
        return initialised(whole_division(local, planned(local, examples, cluster, config, plan), cluster), init)
    counts = _split_counts(local, devices_for_all(processes, cluster), len(cluster.devices))
    if not counts:
        return Division(local, local)
    batch = local.batch_axis(options)
    rows = placed(local.specs, cluster, config, processes) if plan is None else []
    by_batch, examples = _by_batch(local, counts, rows, config, plan), divided_dims(batch)
    if plan is None:
        shares = {number: _shares(local, number, rows[number], examples, cluster, config) for number in counts}
    else:
        shares = {number: plan.task_graphs[number].slices or (1,) * count for number, count in counts.items()}
    placements = rows if plan is None else [task.devices for task in plan.task_graphs]
    divides_loops = _divides_loops(local, tuple(row for number in counts for row in placements[number]), processes)
    problem = sharding_problem(local, examples, shares, by_batch, bodies=batch if divides_loops else None)
    _warn_of_whole_variables(local, counts)
    force, shards = (config.patterns.force, None) if plan is None else (None, plan.shards)
    assignment = assign(problem, force, shards)
    region = find_region(local.graph, local.task_graph, batch, list(local.sources))
    listed = None if plan is None else {name for task in plan.task_graphs if task.batch_of is not None for name in task.ops}
    members = batch_ops(problem, assignment, region, listed)
    local = _beside(local, counts, members)
    return initialised(Division(local, local, shares, with_batch(problem, assignment, region, members)), init)


def _divides_loops(local: Captured, rows: Rows, processes: Sequence[Tuple[int, ...]]) -> bool:
    """Whether the bodies of loops may be divided: in a training function whose model replicas are each in one process.  In a
    function that does not train, they are steps of their own (:mod:`whale_tf.runtime.evaluations`)."""
    step = local.recording
    if step is None or step.returned is None or step.annotations.evaluates:
        return False
    return not processes or all(any(set(row).issubset(own) for own in processes) for row in rows)


def _warn_of_whole_variables(local: Captured, counts: Dict[int, int]) -> None:
    """Warns if variables of ``split`` TaskGraphs cannot be divided."""
    whole = {variable: op for variable, op in in_bodies(local).items() if local.variable_task_graph.get(variable) in counts}
    evaluates = local.recording is not None and local.recording.annotations.evaluates  # divides what layouts divide, or nothing
    if whole and not evaluates:
        variable, op = next(iter(whole.items()))
        warnings.warn(
            f"{len(whole)} variables of wh.split stay whole on one device, because a condition, loop or function takes them, "
            f"or an op writes parts of them: op {op.name!r} ({op.type}) takes {local.graph.ops[variable].name!r}")


def initialised(division: Division, init: str) -> Division:
    """The division with initial values made in parts, if this is asked for (``init: sharded``)."""
    if division.assignment is None or init == "exact":
        return division
    initializers = division.local.phases.variables.initializers
    return division._replace(assignment=with_initial_values(division.local.graph, initializers, division.assignment))


def _shares(local: Captured, number: int, rows: Rows, examples: Dict[int, int], cluster: Cluster,
            config: Config) -> Tuple[int, ...]:
    """The share of each device of a split TaskGraph, according to the devices' speed and memory."""
    graph = local.graph
    ops = [op for op in graph.ops if local.task_graph[op.id] == number and op.phase is Phase.FORWARD]
    state = local.state_bytes()
    size = sum(2 * tensor_bytes(graph, gradient) + state.get(variable, 0) for gradient, variable in local.gradients
               if local.variable_task_graph.get(variable) == number)
    name, algorithm = local.specs[number].name, config.balance.algorithm
    return device_shares(name, rows, cluster, algorithm, ops, Sizes(graph), examples, size, precision_of(graph))


def _by_batch(local: Captured, counts: Dict[int, int], rows: Sequence[Rows], config: Config, plan: Optional[Plan]) -> Set[int]:
    """Split TaskGraphs whose devices have their own examples: a ``replicate`` TaskGraph shares them, or the user forces it."""
    if plan is not None:
        return {task.batch_of for task in plan.task_graphs if task.batch_of is not None}
    replicated = {row for spec, row in zip(local.specs, rows) if spec.strategy == "replicate"}
    force = config.patterns.force or {}
    units = [unit for unit, pattern in force.items() if pattern == BATCH] if isinstance(force, dict) else []
    forced = {local.task_graph[op.id] for op in local.graph.ops for unit in units if in_unit(op, unit)}
    return {number for number in counts if rows[number] in replicated or number in forced or force == BATCH}


def _beside(local: Captured, counts: Dict[int, int], found: Dict[int, Set[int]]) -> Captured:
    """The graph with, for each ``split`` TaskGraph, another one for the ops that every device runs on its own examples."""
    task_graph, specs = list(local.task_graph), list(local.specs)
    for number, ops in found.items():
        for op in ops:
            task_graph[op] = len(specs)
        specs.append(TaskGraphSpec(local.specs[number].name + "/batch", "replicate", counts[number], number))
    return local._replace(task_graph=task_graph, specs=tuple(specs))


def whole_division(local: Captured, found: Candidate, cluster: Cluster) -> Division:
    """The graph as one TaskGraph on all devices of a model replica."""
    replicas, count = found.model_replicas, len(cluster.devices) // found.model_replicas
    whole = as_one_split(local, None if replicas == 1 else count)
    estimate = found.estimate if found.plan is None else found.plan.estimate
    return Division(whole, whole, {0: (1,) * count}, found.assignment, estimate, replicas)


def carry_out(division: Division) -> Division:
    """The graph with parts instead of the ops and variables that are divided."""
    if division.assignment is None:
        return division
    counts = {number: len(shares) for number, shares in division.shares.items()}
    captured, variables = shard(division.local, division.assignment, counts)
    verify_pass(captured.graph, "after wh.split")
    if division.estimate is not None:
        captured = as_one_split(captured, division.local.specs[0].device_count)
        if division.replicas == 1:  # examples are divided like any other dimension, so there is no batch to clone for
            captured = captured._replace(sources={}, stated={})
    return division._replace(captured=captured, variables=variables)


def _split_counts(captured: Captured, available: int, total: int) -> Dict[int, int]:
    """The number of devices of each TaskGraph that is divided; ``available``: for a TaskGraph that asks for all.  A number above
    ``total`` is refused later, when devices are assigned."""
    counts = {number: available if spec.device_count is None else spec.device_count
              for number, spec in enumerate(captured.specs) if spec.strategy == "split"}
    return {number: count for number, count in counts.items() if 1 < count <= total}


def of_local(plan: Plan, division: Division) -> Plan:
    """The plan with names of the graph as the user wrote it, and with the choices that determine the divided ops."""
    if division.assignment is None:
        return plan
    local = division.local
    members = [tuple(op.name for op in local.graph.ops if local.task_graph[op.id] == i and op.phase is Phase.FORWARD)
               for i in range(len(plan.task_graphs))]
    uneven = {number: shares for number, shares in division.shares.items() if len(set(shares)) > 1}
    task_graphs = tuple(replace(task, ops=ops, slices=uneven.get(i, task.slices))
                        for i, (task, ops) in enumerate(zip(plan.task_graphs, members)))
    estimate = division.estimate or plan.estimate
    nested = "divide" if division.replicas > 1 else plan.nested_batch
    return replace(plan, task_graphs=task_graphs, shards=division.assignment.shards, estimate=estimate, nested_batch=nested)
