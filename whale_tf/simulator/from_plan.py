"""A Plan as a strategy: the simulator reads the same value that the rewriter executes."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from whale_tf.errors import PlanError, did_you_mean
from whale_tf.plan import Plan, TaskGraphPlan
from whale_tf.schedule import schedule_of
from whale_tf.simulator.configs import OpAxis, OpConfig
from whale_tf.simulator.model_graph import PARAMETER, ModelGraph, ModelOp
from whale_tf.simulator.strategy_tree import CompleteStrategy, StrategyStage, checked_config, device_groups, propagate_configs
from whale_tf.simulator.uniform import split_configs, stage_configs


def strategy_from_plan(plan: Plan, model: ModelGraph, aliases: Optional[Mapping[str, str]] = None) -> CompleteStrategy:
    """The strategy that a plan stands for.

    A model replica takes its part of the batch.  A ``replicate`` TaskGraph divides that part over its replicas (unevenly with
    ``slices``).  A ``split`` TaskGraph partitions the dimension that ``plan.shards`` names for each op, and computes all other
    ops on every device; in a plan of layers, whose shards are empty, every op is divided along its default dimension.  The
    configs of ops that the plan does not name follow from the data flow.  A plan may also name top-level nodes of the model, as
    plans of layers do; their ops are divided as :func:`~whale_tf.simulator.uniform.uniform_3d` divides them.

    Args:
        model: built for one micro-batch of all model replicas together.
        aliases: graph op name -> name of the model's op that stands for it (a profile's layer).

    Raises:
        PlanError: the plan names an op that the model does not have, or divides an op in a way that is impossible.
    """
    numbers = {op.name: number for number, op in enumerate(model.ops)}
    nodes = _nodes(model)
    configs: Dict[int, OpConfig] = {}
    warmup: Dict[int, int] = {}
    check_ops(plan)
    for task_graph in plan.task_graphs:
        whole: Dict[Optional[str], OpConfig] = {}  # by the dimension that is divided
        if task_graph.ops and not aliases and all(name in nodes and name not in numbers for name in task_graph.ops):
            members = [number for name in task_graph.ops for number in nodes[name]]
            is_beside = any(one.strategy == "replicate" and one.devices == task_graph.devices for one in plan.task_graphs)
            configs.update(_whole_nodes(task_graph, model, members, is_beside))
            warmup.update(dict.fromkeys(members, task_graph.warmup))
            continue
        for name in task_graph.ops:
            number = numbers.get((aliases or {}).get(name, name))
            if number is None:
                raise PlanError(
                    f"the plan's TaskGraph {task_graph.name!r} has op {name!r}, which model {model.name!r} does not have; "
                    f"simulate it with the model for which it was made.{did_you_mean(name, numbers)}")
            if number not in configs:
                op = model.ops[number]
                shard = plan.shards.get(name) if plan.shards else op.split
                configs[number] = _fitted(task_graph, op, shard, whole)
                warmup[number] = task_graph.warmup
                for before in nodes[op.path[0]] if aliases else ():  # a layer's tensor arrives where the layer is
                    if before < number and before not in configs:
                        configs[before] = _fitted(task_graph, model.ops[before], None, whole)
                        warmup.setdefault(before, task_graph.warmup)
    if not configs:
        raise PlanError(
            "the plan's TaskGraphs name no op or layer, so nothing says what runs where; search again with a profile of "
            "the graph, or simulate the plan of wh.current_plan()")
    complete = propagate_configs(model, configs)
    groups = device_groups(complete) if schedule_of(plan.schedule).folding is None else _by_task_graph(plan, model, aliases or {})
    stages = tuple(
        StrategyStage(ops, devices, max((warmup[number] for number in ops if number in warmup), default=1))
        for ops, devices in groups)
    return CompleteStrategy(
        model, complete, plan.num_micro_batch, plan.schedule, stages, _recomputed(plan, model, stages, aliases or {}), plan.zero,
        offload=plan.offload, buckets=_buckets(plan, model, stages), micro_batch_slices=plan.micro_batch_slices)


def _nodes(model: ModelGraph) -> Dict[str, List[int]]:
    """The ops of each top-level node."""
    found: Dict[str, List[int]] = {}
    for number, op in enumerate(model.ops):
        found.setdefault(op.path[0], []).append(number)
    return found


def _whole_nodes(task_graph: TaskGraphPlan, model: ModelGraph, members: Sequence[int], is_beside: bool) -> Dict[int, OpConfig]:
    """Configs of a TaskGraph that consists of top-level nodes, as a plan of layers has them.

    Args:
        is_beside: whether a ``replicate`` TaskGraph is on the same devices, which therefore have examples of their own.
    """
    devices = [device for row in task_graph.devices for device in row]
    if task_graph.strategy == "split" and is_beside and len(task_graph.devices) == 1:
        return split_configs(model, members, devices)
    batch, tp = [OpAxis(len(task_graph.devices), "b")], 1
    if task_graph.strategy == "replicate":
        batch.append(OpAxis(task_graph.device_count, "b", task_graph.slices))
    else:
        tp = task_graph.device_count
    return stage_configs(model, members, devices, batch, tp, 1)


def _by_task_graph(plan: Plan, model: ModelGraph, aliases: Mapping[str, str]) -> List[Tuple[Tuple[int, ...], Tuple[int, ...]]]:
    """(ops, devices) of each TaskGraph, if several share devices.  An op that the plan does not name is where the one before it
    is, like its config."""
    home = {aliases.get(name, name): number for number, task in enumerate(plan.task_graphs) for name in task.ops}
    home.update({name.split("/")[0]: number for name, number in home.items() if aliases})
    ops: List[List[int]] = [[] for _ in plan.task_graphs]
    current = 0
    for number, op in enumerate(model.ops):
        current = home.get(op.name, home.get(op.path[0], current))
        ops[current].append(number)
    return [(tuple(members), tuple(sorted(device for row in task.devices for device in row)))
            for task, members in zip(plan.task_graphs, ops)]


def _recomputed(plan: Plan, model: ModelGraph, stages: Tuple[StrategyStage, ...], aliases: Mapping[str, str]) -> Tuple[str, ...]:
    """The unit with which each op is recomputed: the ops between two kept tensors; "": everything that its backward pass reads is
    kept."""
    units = [""] * len(model.ops)
    for task, place in zip(plan.task_graphs, _stage_numbers(plan, stages)):
        if task.kept is None:
            continue
        named = {aliases.get(name.partition(":")[0], name.partition(":")[0]).split("/")[0]: ":" not in name for name in task.kept}
        unit, kept_before = "", True
        for number in stages[place].ops:
            node = model.ops[number].path[0]
            if kept_before:
                unit = node
            units[number] = "" if named.get(node) else unit
            following = number + 1 < len(model.ops) and model.ops[number + 1].path[0] == node
            kept_before = node in named and not following
    return tuple(units)


def _stage_numbers(plan: Plan, stages: Sequence[StrategyStage]) -> List[int]:
    """The stage of every TaskGraph."""
    if schedule_of(plan.schedule).folding is not None:
        return list(range(len(stages)))
    stage_of = {device: number for number, stage in enumerate(stages) for device in stage.devices}
    return [stage_of[task.devices[0][0]] for task in plan.task_graphs]


def check_ops(plan: Plan) -> None:
    """Raises:
        PlanError: a TaskGraph has no ops, but others have some.
    """
    empty = [task.name for task in plan.task_graphs if not task.ops and task.batch_of is None]
    if empty and len(empty) < len(plan.task_graphs):
        raise PlanError(f"TaskGraph {empty[0]!r} has no ops, so nothing runs on its devices; name its ops, or leave it out")


def _fitted(task_graph: TaskGraphPlan, op: ModelOp, shard: Optional[str], known: Dict[Optional[str], OpConfig]) -> OpConfig:
    """The config of a TaskGraph's op.

    Args:
        shard: the dimension that a ``split`` TaskGraph divides; None: it divides none.
        known: the TaskGraph's configs by this dimension, which grow.
    """
    if task_graph.strategy == "split" and task_graph.device_count > 1 and shard is not None and shard not in op.dims:
        raise PlanError("the plan shards op {!r} by {!r}, but its dimensions are {}".format(
            op.name, shard, ", ".join(repr(dim) for dim in op.dims)))
    if shard not in known:
        known[shard] = _config(task_graph, shard)
    return checked_config(op, known[shard])


def _config(task_graph: TaskGraphPlan, shard: Optional[str]) -> OpConfig:
    devices = tuple(device for row in task_graph.devices for device in row)
    axes: List[OpAxis] = []
    if len(task_graph.devices) > 1:
        axes.append(OpAxis(len(task_graph.devices), "b"))
    if task_graph.device_count > 1:
        if task_graph.strategy == "replicate":
            axes.append(OpAxis(task_graph.device_count, "b", task_graph.slices))
        else:
            axes.append(OpAxis(task_graph.device_count, shard, None if shard is None else task_graph.slices))
    return OpConfig(devices, tuple(axes))


def _buckets(plan: Plan, model: ModelGraph,
             stages: Tuple[StrategyStage, ...]) -> Optional[Tuple[Tuple[Tuple[int, ...], ...], ...]]:
    """The plan's gradient buckets by stage, as the model's parameters; None if it names none that the model has."""
    parameters = {tensor.name: number for number, tensor in enumerate(model.tensors) if tensor.role == PARAMETER}
    chosen: List[List[Tuple[int, ...]]] = [[] for _ in stages]
    found = False
    numbers = _stage_numbers(plan, stages)
    for gradient in plan.gradients:
        stage = numbers[gradient.task_graph]
        for bucket in gradient.buckets:
            members = tuple(parameters[name] for name in bucket if name in parameters)
            if members:
                found = True
                chosen[stage].append(members)
    return tuple(tuple(rows) for rows in chosen) if found else None
