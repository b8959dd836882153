from __future__ import annotations

import pytest

from tests.simulator.synthetic import NO_RESERVE, KnownTimes, chain_model, flat_cluster, pipeline
from whale_tf.cluster import Cluster
from whale_tf.errors import InfeasibleError, PlanError
from whale_tf.simulator import ScheduleConfig, StrategyTree, built_in_model, op_config, simulate, uniform_3d
from whale_tf.simulator.compile import compile_strategy
from whale_tf.simulator.costs import OpEstimator
from whale_tf.simulator.transformation import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND_RECV
from whale_tf.simulator.uniform import balanced_stages, micro_batch_size
from whale_tf.simulator.zoo.transformers import transformer
from whale_tf.simulator.zoo.vision import mlp


def labels(strategy, cluster: str = "hc1") -> list:  # type: ignore[no-untyped-def]
    program = compile_strategy(strategy, Cluster.parse(cluster), OpEstimator(strategy.model))
    return [(instruction.block[1], instruction.label) for instruction in program.instructions if instruction.groups]


def count(found: list, phase: str, label: str) -> int:
    return sum(1 for one in found if one == (phase, label))


def small(batch: int = 8, **options: int):  # type: ignore[no-untyped-def]
    return transformer("small", batch, 2, 64, 8, 32, 128, **options)  # type: ignore[arg-type]


def test_few_configs_reach_every_op() -> None:
    tree = StrategyTree(mlp(8))
    tree.set("layer0/fc", op_config(range(4), (2, "b"), (2, "o")))
    strategy = tree.propagate()
    by_name = {op.name: config for op, config in zip(strategy.model.ops, strategy.op_configs)}
    assert all(config.devices == (0, 1, 2, 3) for config in strategy.op_configs)
    assert by_name["layer0/relu"].degree("o") == 2  # where its input lies
    assert by_name["layer1/fc"].degree("f") == 2  # the rows that are there; so its output is partial
    assert by_name["layer1/fc_bias"].axes[1].dim is None  # summed


def test_configs_also_go_against_the_data_flow() -> None:
    tree = StrategyTree(mlp(8))
    tree.set("head/loss", op_config(range(2), (2, "b")))
    assert {config.degree("b") for config in tree.propagate().op_configs} == {2}


def test_schedule_configs_are_inherited_unless_given() -> None:
    tree = StrategyTree(mlp(8))
    tree.set("*", op_config([0]))
    tree.schedule("", ScheduleConfig(4, 3, False))
    tree.schedule("layer1", ScheduleConfig(4, 3, True))
    strategy = tree.propagate()
    assert strategy.num_micro_batch == 4 and strategy.stages[0].warmup == 3
    units = {op.path[0]: unit for op, unit in zip(strategy.model.ops, strategy.recompute)}
    assert units == {"layer0": "", "layer1": "layer1", "layer2": "", "layer3": "", "head": ""}


def test_subgraphs_without_common_devices_are_stages() -> None:
    strategy = uniform_3d(mlp(8), 2, 1, 2, 4)
    assert [stage.devices for stage in strategy.stages] == [(0, 1), (2, 3)]
    assert [stage.warmup for stage in strategy.stages] == [2, 1]


def test_overlapping_devices_are_one_stage() -> None:
    tree = StrategyTree(mlp(8))
    tree.set("*", op_config([0, 1], (2, "b")))
    tree.set("layer3/*", op_config([1, 2], (2, "b")))
    tree.set("head/*", op_config([1, 2], (2, "b")))
    assert [stage.devices for stage in tree.propagate().stages] == [(0, 1, 2)]


def test_megatron_reduces_twice_a_block_and_direction() -> None:
    found = labels(uniform_3d(small(), 1, 4))
    blocks = 2
    assert count(found, "forward", ALL_REDUCE) == 2 * blocks + 1  # and the partitioned look-up
    assert count(found, "backward", ALL_REDUCE) == 2 * blocks + 1  # and the partitioned logits
    assert {label for _, label in found} == {ALL_REDUCE}


def test_data_parallelism_only_sums_gradients() -> None:
    found = labels(uniform_3d(small(), 8))
    assert set(found) == {("update", ALL_REDUCE)}


def test_buckets_hold_at_least_their_size() -> None:
    strategy = uniform_3d(small(), 8)
    parameters = sum(tensor.bytes for tensor in strategy.model.tensors if tensor.role == "parameter")
    assert len(labels(strategy._replace(bucket_bytes=1.0))) == sum(t.role == "parameter" for t in strategy.model.tensors)
    assert len(labels(strategy._replace(bucket_bytes=parameters / 4))) in (4, 5)
    assert len(labels(strategy._replace(bucket_bytes=1e12))) == 1


@pytest.mark.parametrize(
    "zero, expected",
    [
        ("v1", {("update", REDUCE_SCATTER), ("update", ALL_GATHER)}),
        ("v2", {("update", REDUCE_SCATTER), ("update", ALL_GATHER)}),
        ("v3", {("update", REDUCE_SCATTER), ("forward", ALL_GATHER), ("backward", ALL_GATHER)}),
    ],
)
def test_zero_is_a_memory_config_of_parameters(zero: str, expected: set) -> None:
    assert set(labels(uniform_3d(small(), 8, zero=zero))) == expected


def test_experts_exchange_tokens() -> None:
    found = labels(uniform_3d(small(experts=8), 8))
    assert count(found, "forward", ALL_TO_ALL) == 2 * 2 and count(found, "backward", ALL_TO_ALL) == 2 * 2
    assert {label for phase, label in found if phase == "update"} == {ALL_REDUCE}


def test_experts_are_not_summed_over_replicas() -> None:
    """Each lives on one device; its gradient needs no collective."""
    strategy = uniform_3d(small(experts=8), 8)
    program = compile_strategy(strategy, Cluster.parse("hc1"), OpEstimator(strategy.model))
    summed = sum(instruction.size_bytes for instruction in program.instructions if instruction.block[1] == "update")
    experts = [t for t in strategy.model.tensors if t.dims[0] == "e" and t.role == "parameter"]
    others = [t for t in strategy.model.tensors if t.role == "parameter" and t not in experts]
    assert len(experts) == 4 and summed == pytest.approx(sum(tensor.bytes for tensor in others))


def test_stages_send_activations_and_gradients() -> None:
    found = labels(uniform_3d(mlp(8), 1, 1, 4))
    assert count(found, "forward", SEND_RECV) == 3 and count(found, "backward", SEND_RECV) == 3


def test_tied_embeddings_are_summed_over_stages() -> None:
    found = labels(uniform_3d(small(), 2, 1, 2))
    assert count(found, "update", ALL_REDUCE) >= 3  # each stage's own, and the table over both


def test_table_that_two_stages_of_a_device_share_is_there_once() -> None:
    """The first and the last stage are on the first device."""
    strategy = uniform_3d(small(), pp=2, num_micro_batch=4, schedule="zero_bubble_v")
    program = compile_strategy(strategy, Cluster.parse("hc1"), OpEstimator(strategy.model))
    held = sum(sum(sizes.values()) for sizes in program.static_bytes.values())
    assert held == pytest.approx(16 * strategy.model.parameter_count)
    assert sum(one.name == "update embedding/tokens" for one in program.instructions) == 1
    assert not any(one.name.endswith("over stages") for one in program.instructions)


@pytest.mark.parametrize("zero, blocks", [
    ("v1", {(0, "update"), (1, "update")}), ("v3", {(0, "forward"), (1, "forward"), (1, "backward")})])
def test_tied_embeddings_are_gathered_on_each_stage(zero: str, blocks: set) -> None:
    strategy = uniform_3d(small(), 2, 1, 2, zero=zero)
    table = next(tensor for tensor in strategy.model.tensors if tensor.name == "embedding/tokens")
    program = compile_strategy(strategy, Cluster.parse("hc1"), OpEstimator(strategy.model))
    found = [one for one in program.instructions if one.label == ALL_GATHER and one.name.endswith(table.name)]
    assert {one.block for one in found} == blocks and [one.size_bytes for one in found] == [table.bytes] * len(blocks)


def test_uneven_slices_give_uneven_work() -> None:
    tree = StrategyTree(mlp(4096))
    tree.set("*", op_config([0, 1], (2, "b", (3, 1))))
    result = simulate(tree.propagate(), flat_cluster(2), NO_RESERVE)
    first, second = (use.computation_s for use in result.devices)
    assert first == pytest.approx(3 * second, rel=0.05)
    assert result.step_time_s > simulate(uniform_3d(mlp(4096), 2), flat_cluster(2), NO_RESERVE).step_time_s


def test_uneven_micro_batches() -> None:
    model = chain_model(2)
    strategy = pipeline(model, 2, 2, "gpipe", (2, 1))._replace(micro_batch_slices=(3, 1))
    result = simulate(strategy, flat_cluster(2), NO_RESERVE, KnownTimes(model, 1.0, 1.0))
    # micro-batches of 1.5 and 0.5: forward 1.5 + 1.5 + 0.5, backward 0.5 + 1.5 + 1.5
    assert result.step_time_s == pytest.approx(7.0)


def test_stages_are_balanced_exactly() -> None:
    model = built_in_model("gpt2", 1)
    work = [sum(model.ops[i].flops for i in ops) for ops in balanced_stages(model, 3)]
    blocks = [0.0]
    name = None
    for op in model.ops:
        if op.path[0] != name:
            name = op.path[0]
            blocks.append(blocks[-1])
        blocks[-1] += op.flops
    best = min(
        max(blocks[a], blocks[b] - blocks[a], blocks[-1] - blocks[b])
        for a in range(1, len(blocks) - 2)
        for b in range(a + 1, len(blocks) - 1)
    )
    assert max(work) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: op_config(range(6), (4, "b")), "6 devices cannot hold a 4 partition"),
        (lambda: op_config([0, 1], (2, "b", (1, 2, 3))), "3 slices for a 2-way partition"),
        (lambda: StrategyTree(mlp(8)).set("layr0/fc", op_config([0])), "Did you mean 'layer0/fc'"),
        (lambda: StrategyTree(mlp(8)).schedule("layer9", ScheduleConfig()), "no subgraph of 'mlp' matches 'layer9'"),
        (lambda: StrategyTree(mlp(8)).propagate(), "no config reaches op 'head/loss'"),
        (lambda: StrategyTree(mlp(2)).set("*", op_config(range(4), (4, "b"))), "use a degree of at most 2"),
        (lambda: StrategyTree(small()).set("*/*/softmax", op_config([0, 1], (2, "t"))), "needs dimension 't' whole"),
        (lambda: uniform_3d(mlp(8), 0), "dp 0"),
        (lambda: uniform_3d(mlp(8), 1, 1, 9), "has 5 blocks, which cannot make 9 stages"),
        (lambda: uniform_3d(mlp(8), 1, 1, 2, 4, warmups=(1, 2)), "use warmup <= 1 on stage 1"),
        (lambda: uniform_3d(mlp(8), 1, 1, 2, 4, warmups=(1,)), "1 warm-up depths for 2 stages"),
        (lambda: uniform_3d(mlp(8), 2, devices=[0, 0]), "expected 2 different ones"),
        (lambda: uniform_3d(mlp(8), recompute="all"), "recompute is 'all'"),
        (lambda: uniform_3d(mlp(8), offload="all"), "offload is 'all'"),
        (lambda: micro_batch_size(10, 4, 2), "use a multiple of 8"),
        (lambda: micro_batch_size(0, 1), "expected at least 1 each"),
        (lambda: built_in_model("gpt3", 1), "Did you mean 'gpt2'"),
        (lambda: built_in_model("gpt2", 0), "0 examples"),
        (lambda: simulate(uniform_3d(mlp(8), 8), flat_cluster(2)), "cluster 'flat' has devices 0 to 1"),
    ],
)
def test_refusals(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((PlanError, InfeasibleError)) as raised:
        call()
    assert message in str(raised.value)


def test_unknown_kind_of_op_is_refused() -> None:
    model = mlp(8)
    odd = model._replace(ops=(model.ops[0]._replace(kind="magic"),) + model.ops[1:])
    with pytest.raises(PlanError, match="op 'layer0/fc' is of kind 'magic'"):
        simulate(uniform_3d(model)._replace(model=odd), flat_cluster(1))
