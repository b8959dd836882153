"""A uniform 3D strategy: data x tensor x pipeline parallelism on ``dp * tp * pp`` devices.

By default tensor parallelism is innermost (neighbouring devices), then data, then pipeline parallelism::

    dp 2, tp 2, pp 2        stage 0: 0 1 | 2 3        stage 1: 4 5 | 6 7        ("|" between data-parallel replicas)

:func:`placement` gives other orders.
"""

from __future__ import annotations

import itertools
from typing import Dict, FrozenSet, List, Optional, Sequence, Set, Tuple

from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError, did_you_mean
from whale_tf.plan import OFFLOAD, ZERO
from whale_tf.schedule import check_warmups, schedule_of, warmup_depths
from whale_tf.simulator.configs import OpAxis, OpConfig, ScheduleConfig, op_config
from whale_tf.simulator.model_graph import ACTIVATION, KINDS, ModelGraph
from whale_tf.simulator.strategy_tree import CompleteStrategy, StrategyStage, StrategyTree, checked_config

EXPERTS = "e"  # the dimension of a mixture of experts: always over all devices of a stage; tokens go to their experts

# What is kept for the backward pass: everything; everything except the inside of attention (Megatron); the inputs of every block;
# tensors sent between stages (GPipe, DAPPLE).
RECOMPUTE = ("none", "selective", "full", "stage")

# Which devices work together: the kinds of parallelism from neighbouring devices to distant ones, as in Megatron-LM's option of
# that name; or ``nodes``: as the first, but neighbours are on different nodes.
ORDERS = ("tp-dp-pp", "tp-pp-dp", "dp-tp-pp", "dp-pp-tp", "pp-tp-dp", "pp-dp-tp", "nodes")


def placement(cluster: Cluster, dp: int, tp: int, pp: int, order: str = ORDERS[0]) -> List[int]:
    """The device of every (stage, replica, tensor part), with the last one changing fastest::

        dp 2, tp 1, pp 2 on two nodes of two        tp-dp-pp    stage 0: 0 | 1    stage 1: 2 | 3
                                                    tp-pp-dp    stage 0: 0 | 2    stage 1: 1 | 3    (as pp-dp)
                                                    nodes       stage 0: 0 | 2    stage 1: 1 | 3

    Args:
        order: one of :data:`ORDERS`.

    Raises:
        PlanError: there is no such order, or the cluster has fewer devices.
    """
    if order not in ORDERS:
        raise PlanError(f"order is {order!r}, expected one of {', '.join(ORDERS)}.{did_you_mean(order, ORDERS)}")
    count = dp * tp * pp
    if count > len(cluster):
        raise PlanError(f"dp {dp} x tp {tp} x pp {pp} needs {count:,} devices, but cluster {cluster.name!r} has devices 0 to "
                        f"{len(cluster) - 1}; use a larger cluster, or smaller degrees")
    devices = list(range(count))
    if order == "nodes":
        devices = [device for row in itertools.zip_longest(*cluster.nodes) for device in row if device is not None][:count]
        order = ORDERS[0]
    stride, strides, sizes = 1, {}, {"dp": dp, "tp": tp, "pp": pp}  # type: int, Dict[str, int], Dict[str, int]
    for name in order.split("-"):
        strides[name], stride = stride, stride * sizes[name]
    return [devices[stage * strides["pp"] + replica * strides["dp"] + part * strides["tp"]]
            for stage in range(pp) for replica in range(dp) for part in range(tp)]


def micro_batch_size(global_batch: int, num_micro_batch: int, dp: int = 1) -> int:
    """Examples per micro-batch over all data-parallel replicas.

    Raises:
        PlanError: the global batch cannot be divided like that.
    """
    if min(global_batch, num_micro_batch, dp) < 1:
        raise PlanError(f"global batch {global_batch}, {num_micro_batch} micro-batches, dp {dp}: expected at least 1 each")
    if global_batch % (num_micro_batch * dp):
        raise PlanError(
            f"a global batch of {global_batch} cannot be divided over {num_micro_batch} micro-batches x {dp} data-parallel "
            f"replicas; use a multiple of {num_micro_batch * dp}")
    return global_batch // num_micro_batch


def uniform_3d(model: ModelGraph, dp: int = 1, tp: int = 1, pp: int = 1, num_micro_batch: int = 1,
               schedule: str = "backward_first", policy: str = "PA", warmups: Optional[Sequence[int]] = None,
               recompute: str = "none", zero: str = "none", offload: str = "none", devices: Optional[Sequence[int]] = None,
               chunks: int = 2, parts: Optional[Sequence[Tuple[int, ...]]] = None, split: Sequence[str] = ()) -> CompleteStrategy:
    """The strategy of ``dp x tp x pp`` (Proteus Table V's DP x MP x PP).

    Args:
        model: built for a micro-batch of all data-parallel replicas together.
        warmups: K_i for each stage; None: by DAPPLE's ``policy``.
        devices: device of every (stage, replica, tensor part), with the last one changing fastest; None: in order.
        zero, offload: as in :class:`~whale_tf.simulator.strategy_tree.CompleteStrategy`.
        recompute: one of :data:`RECOMPUTE`.
        chunks: number of stages that each group of devices runs, under a schedule with several.
        parts: ops of each stage; None: :func:`balanced_stages`.
        split: top-level nodes that all devices of their stage divide, although they replicate the others (Whale's ``split``
            beside ``replicate``, its Examples 2 and 5).

    Raises:
        PlanError: a degree below 1, more stages than blocks, an op that cannot be partitioned, or a node without weights to
            divide.
    """
    if min(dp, tp, pp, num_micro_batch) < 1:
        raise PlanError(f"dp {dp}, tp {tp}, pp {pp} and {num_micro_batch} micro-batches: expected at least 1 each")
    for name, value, values in (("recompute", recompute, RECOMPUTE), ("zero", zero, ZERO), ("offload", offload, OFFLOAD)):
        if value not in values:
            raise PlanError(f"{name} is {value!r}, expected one of {', '.join(values)}.{did_you_mean(value, values)}")
    if zero != "none" and dp == 1:
        raise PlanError(f"zero is {zero!r}, which divides state over data-parallel replicas, but dp is 1; use more replicas, or "
                        "zero 'none'")
    known = schedule_of(schedule)
    positions = known.folding(pp * chunks, chunks) if known.folding is not None else tuple(range(pp))
    depths = tuple(warmups) if warmups is not None else warmup_depths(known.policy or policy, pp, None, num_micro_batch)
    if len(depths) != pp:
        raise PlanError(f"{len(depths)} warm-up depths for {pp} stages")
    check_warmups(depths, num_micro_batch)
    placed = list(range(dp * tp * pp)) if devices is None else list(devices)
    if sorted(set(placed)) != sorted(placed) or len(placed) != dp * tp * pp:
        raise PlanError(f"devices are {placed}, expected {dp * tp * pp} different ones")
    tree = StrategyTree(model)
    tree.order = schedule
    tree.zero, tree.offload = zero, offload
    if parts is not None and len(parts) != len(positions):
        raise PlanError(f"ops are given for {len(parts)} stages, expected {len(positions)}")
    parts = parts or balanced_stages(model, len(positions))
    divided = ops_of(model, split)
    for position, ops in zip(positions, parts):
        part = placed[position * dp * tp : (position + 1) * dp * tp]
        rest = [number for number in ops if number not in divided]
        tree.configs.update(stage_configs(model, rest, part, (OpAxis(dp, "b"),), tp, dp * tp))
        tree.configs.update(split_configs(model, [number for number in ops if number in divided], part))
        for block in {model.ops[number].path[0] for number in ops}:
            tree.schedule(block, ScheduleConfig(num_micro_batch, depths[position]))
    strategy = recomputing(tree.propagate(), recompute)
    if known.folding is None:
        return strategy
    devices_of = [strategy.stages[position].devices for position in positions]
    return strategy._replace(stages=tuple(StrategyStage(ops, row, 1) for ops, row in zip(parts, devices_of)))


def recomputing(strategy: CompleteStrategy, how: str) -> CompleteStrategy:
    """The strategy with the units that the backward pass recomputes.

    Raises:
        PlanError: ``selective`` for a model without attention.
    """
    ops = strategy.model.ops
    if how == "none":
        return strategy
    if how == "stage":
        return strategy._replace(recompute=("stage",) * len(ops))
    if how == "full":
        return strategy._replace(recompute=tuple(op.path[0] for op in ops))
    again = attention_ops(strategy.model) if how == "selective" else frozenset()
    if how == "selective" and not again:
        raise PlanError(
            f"recompute 'selective' is for attention only, and {strategy.model.name!r} has none; use 'full', or 'stage'")
    return strategy._replace(recompute=tuple("/".join(op.path[:-1]) if n in again else "" for n, op in enumerate(ops)))


def attention_ops(model: ModelGraph) -> FrozenSet[int]:
    """Ops that Megatron's selective recomputation repeats (Korthikanti et al. 2022, section 5): products of two activations
    (scores, and weights times values), and everything between these."""
    maker = {use.tensor: number for number, op in enumerate(model.ops) for use in op.outputs}
    products = {number for number, op in enumerate(model.ops) if op.kind == "matmul" and len(op.inputs) == 2
                and all(model.tensors[use.tensor].role == ACTIVATION for use in op.inputs)}
    found: Set[int] = set()
    for last in products:
        for use in model.ops[last].inputs:
            path, tensor = [last], use.tensor
            while tensor in maker and maker[tensor] not in products and len(model.ops[maker[tensor]].inputs) == 1:
                path.append(maker[tensor])
                tensor = model.ops[maker[tensor]].inputs[0].tensor
            if maker.get(tensor) in products:
                found.update(path + [maker[tensor]])
    return frozenset(found)


def stage_configs(model: ModelGraph, ops: Sequence[int], devices: Sequence[int], batch: Sequence[OpAxis], tp: int,
                  experts: int) -> Dict[int, OpConfig]:
    """Configs of the ops that read from other stages (data parallel) and of those that tensor parallelism divides.

    Args:
        batch: how the examples are divided, outside of tensor parallelism.
        tp: degree of tensor parallelism.
        experts: number of devices over which a mixture of experts is divided; 1: every replica has all experts.

    Raises:
        PlanError: an op cannot be divided in this way.
    """
    configs: Dict[int, OpConfig] = {}
    produced: Set[int] = set()
    for number in ops:
        op = model.ops[number]
        inside = all(use.tensor in produced for use in op.inputs if model.tensors[use.tensor].role == ACTIVATION)
        if "b" not in op.dims or "b" in op.whole:
            raise PlanError(f"op {op.name!r} has no batch dimension to partition")
        if op.split == EXPERTS and 1 < experts == len(devices) <= op.dims[EXPERTS]:
            configs[number] = checked_config(op, op_config(devices, (experts, EXPERTS)))
        elif tp > 1 and op.split is not None:
            configs[number] = checked_config(op, op_config(devices, *batch, (tp, op.split)))
        elif not inside or not produced or EXPERTS in op.whole or (tp > 1 and KINDS[op.kind].backward == "alias"):
            # additions join branches of different configs, so they are data parallel, and every branch is gathered for them
            configs[number] = checked_config(op, op_config(devices, *batch, (tp, None)))
        produced.update(use.tensor for use in op.outputs)
    return configs


def ops_of(model: ModelGraph, nodes: Sequence[str]) -> FrozenSet[int]:
    """The ops of top-level nodes.

    Raises:
        PlanError: there is no such node, or none of its weights can be divided.
    """
    names = list(dict.fromkeys(op.path[0] for op in model.ops))
    for name in nodes:
        if name not in names:
            raise PlanError(f"split is {name!r}, which is no part of {model.name!r}; its parts are {names[0]} to {names[-1]}."
                            f"{did_you_mean(name, names)}")
        if all(op.split is None for op in model.ops if op.path[0] == name):
            fine = list(dict.fromkeys(op.path[0] for op in model.ops if op.split is not None))
            raise PlanError(f"split is {name!r}, but nothing in it can be divided; parts of {model.name!r} that can are "
                            f"{', '.join(fine[:3] + fine[-1:])}")
    return frozenset(number for number, op in enumerate(model.ops) if op.path[0] in nodes)


def split_configs(model: ModelGraph, ops: Sequence[int], devices: Sequence[int]) -> Dict[int, OpConfig]:
    """Configs of ops whose weights all devices divide, each of which has examples of its own: what is divided along nothing else
    is divided along the batch, as whale_tf's own ``split`` beside ``replicate`` on the same devices does."""
    configs: Dict[int, OpConfig] = {}
    produced: Set[int] = set()
    for number in ops:
        op = model.ops[number]
        inside = any(use.tensor in produced for use in op.inputs if model.tensors[use.tensor].role == ACTIVATION)
        if op.split is not None:
            configs[number] = checked_config(op, op_config(devices, (len(devices), op.split)))
        elif not inside:
            configs[number] = checked_config(op, op_config(devices, (len(devices), "b")))
        produced.update(use.tensor for use in op.outputs)
    return configs


def balanced_stages(model: ModelGraph, count: int) -> List[Tuple[int, ...]]:
    """Whole top-level blocks, divided into ``count`` stages so that the heaviest stage has as little work as possible.

    Dynamic programming over (blocks so far, stages so far) finds the cuts ``0 = c_0 < ... < c_count = blocks`` that exactly
    minimise the maximum of ``work(c_i, c_{i+1})``.

    Raises:
        PlanError: fewer blocks than stages.
    """
    blocks: List[List[int]] = []
    for number, op in enumerate(model.ops):
        if not blocks or model.ops[blocks[-1][0]].path[0] != op.path[0]:
            blocks.append([])
        blocks[-1].append(number)
    if count > len(blocks):
        raise PlanError(
            f"{model.name!r} has {len(blocks)} blocks, which cannot make {count} stages; use at most {len(blocks)}")
    total = [0.0]
    for block in blocks:
        total.append(total[-1] + sum(model.ops[number].flops for number in block))
    best: List[List[Tuple[float, int]]] = [[(total[end], 0) for end in range(len(blocks) + 1)]]
    for stages in range(1, count):
        row = [(float("inf"), 0)] * (len(blocks) + 1)
        for end in range(stages + 1, len(blocks) + 1):
            row[end] = min((max(best[-1][cut][0], total[end] - total[cut]), cut) for cut in range(stages, end))
        best.append(row)
    cuts = [len(blocks)]
    for stages in range(count - 1, 0, -1):
        cuts.append(best[stages][cuts[-1]][1])
    cuts = [0] + cuts[::-1]
    return [tuple(number for block in blocks[a:b] for number in block) for a, b in zip(cuts, cuts[1:])]
