"""A uniform 3D strategy: data x tensor x pipeline parallelism on the first ``dp * tp * pp`` devices.

Tensor parallelism is innermost (neighbouring devices), then data, then pipeline parallelism::

    dp 2, tp 2, pp 2        stage 0: 0 1 | 2 3        stage 1: 4 5 | 6 7        ("|" between data-parallel replicas)
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Set, Tuple

from whale_tf.errors import PlanError
from whale_tf.schedule import check_warmups, warmup_depths
from whale_tf.simulator.configs import OpConfig, ScheduleConfig, op_config
from whale_tf.simulator.model_graph import ACTIVATION, KINDS, ModelGraph
from whale_tf.simulator.strategy_tree import Strategy, StrategyTree, checked_config

EXPERTS = "e"  # the dimension of a mixture of experts: always over all devices of a stage, tokens go to their experts


def micro_batch_size(global_batch: int, num_micro_batch: int, dp: int = 1) -> int:
    """Examples per micro-batch over all data-parallel replicas.

    Raises:
        PlanError: the global batch cannot be divided like that.
    """
    if min(global_batch, num_micro_batch, dp) < 1:
        raise PlanError(
            f"global batch {global_batch}, {num_micro_batch} micro-batches, dp {dp}: expected at least 1 each"
        )
    if global_batch % (num_micro_batch * dp):
        raise PlanError(
            f"a global batch of {global_batch} cannot be divided over {num_micro_batch} micro-batches x {dp} "
            f"data-parallel replicas; use a "
            f"multiple of {num_micro_batch * dp}"
        )
    return global_batch // num_micro_batch


def uniform_3d(
    model: ModelGraph,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    num_micro_batch: int = 1,
    schedule: str = "backward_first",
    policy: str = "PA",
    warmups: Optional[Sequence[int]] = None,
    recompute: str = "",
    zero: int = 0,
    partition_activations: bool = False,
    offload: str = "",
    devices: Optional[Sequence[int]] = None,
) -> Strategy:
    """The strategy of ``dp x tp x pp`` (Proteus Table V's DP x MP x PP).

    Args:
        model: built for a micro-batch of all data-parallel replicas together.
        warmups: K_i per stage; None: DAPPLE's ``policy``.
        devices: device of every (stage, replica, tensor part), the last changing fastest; None: in order.
        offload: what lies in the host's memory: ``""``, ``"optimizer"`` or ``"parameters"``.
        recompute: ``""``, ``"stage"`` (keep only what crosses stages) or ``"block"`` (keep the inputs of every block).

    Raises:
        PlanError: a degree below 1, more stages than blocks, or an op that cannot be partitioned.
    """
    if min(dp, tp, pp, num_micro_batch) < 1:
        raise PlanError(f"dp {dp}, tp {tp}, pp {pp} and {num_micro_batch} micro-batches: expected at least 1 each")
    if recompute not in ("", "stage", "block"):
        raise PlanError(f"recompute is {recompute!r}, expected '', 'stage' or 'block'")
    if offload not in ("", "optimizer", "parameters"):
        raise PlanError(f"offload is {offload!r}, expected '', 'optimizer' or 'parameters'")
    depths = tuple(warmups) if warmups is not None else warmup_depths(policy, pp, None, num_micro_batch)
    if len(depths) != pp:
        raise PlanError(f"{len(depths)} warm-up depths for {pp} stages")
    check_warmups(depths, num_micro_batch)
    placed = list(range(dp * tp * pp)) if devices is None else list(devices)
    if sorted(set(placed)) != sorted(placed) or len(placed) != dp * tp * pp:
        raise PlanError(f"devices are {placed}, expected {dp * tp * pp} different ones")
    tree = StrategyTree(model)
    tree.order = schedule
    tree.zero, tree.partition_activations, tree.offload = zero, partition_activations, offload
    for stage, ops in enumerate(balanced_stages(model, pp)):
        part = placed[stage * dp * tp : (stage + 1) * dp * tp]
        tree.configs.update(_stage_configs(model, ops, part, dp, tp))
        for block in {model.ops[number].path[0] for number in ops}:
            tree.schedule(block, ScheduleConfig(num_micro_batch, depths[stage], bool(recompute)))
    strategy = tree.propagate()
    if recompute == "stage":
        strategy = strategy._replace(recompute=("stage",) * len(model.ops))
    return strategy


def _stage_configs(model: ModelGraph, ops: Sequence[int], devices: Sequence[int], dp: int, tp: int) -> Dict[int, OpConfig]:
    """Configs of the ops that read from other stages (data parallel), and of those tensor parallelism splits."""
    configs: Dict[int, OpConfig] = {}
    produced: Set[int] = set()
    for number in ops:
        op = model.ops[number]
        inside = all(use.tensor in produced for use in op.inputs if model.tensors[use.tensor].role == ACTIVATION)
        if "b" not in op.dims or "b" in op.whole:
            raise PlanError(f"op {op.name!r} has no batch dimension to partition")
        if op.split == EXPERTS and dp * tp <= op.dims[EXPERTS]:
            configs[number] = checked_config(op, op_config(devices, (dp * tp, EXPERTS)))
        elif tp > 1 and op.split is not None:
            configs[number] = checked_config(op, op_config(devices, (dp, "b"), (tp, op.split)))
        elif not inside or not produced or EXPERTS in op.whole or (tp > 1 and KINDS[op.kind].backward == "alias"):
            # additions join branches of different configs: they are data parallel, so every branch is gathered for them
            configs[number] = checked_config(op, op_config(devices, (dp, "b"), (tp, None)))
        produced.update(use.tensor for use in op.outputs)
    return configs


def balanced_stages(model: ModelGraph, count: int) -> List[Tuple[int, ...]]:
    """Whole top-level blocks dealt to ``count`` stages so that the heaviest stage has the least work.

    Minimise over cuts ``0 = c_0 < ... < c_count = blocks`` the maximum of ``work(c_i, c_{i+1})``: exact, by dynamic
    programming over (blocks so far, stages so far).

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
            f"{model.name!r} has {len(blocks)} blocks, they cannot make {count} stages; use at most {len(blocks)}"
        )
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
