from __future__ import annotations

from dataclasses import replace
from typing import Any, List

import pytest

from tests.simulator.synthetic import NO_RESERVE
from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError
from whale_tf.plan import GradientPlan, Plan, TaskGraphPlan
from whale_tf.profiler.layer_time import layer_seconds
from whale_tf.profiler.model_profile import ModelProfile
from whale_tf.simulator import LayerEstimator, layer_names, layered_model, simulate, strategy_from_plan, uniform_3d
from whale_tf.simulator.compile import compile_strategy
from whale_tf.simulator.costs import OpEstimator
from whale_tf.simulator.zoo.vision import mlp


def names(*blocks: str) -> List[str]:
    return [op.name for op in mlp(8).ops if op.path[0] in blocks]


def plan(task_graphs: List[TaskGraphPlan], **fields: Any) -> Plan:
    return Plan(graph="mlp", num_devices=8, task_graphs=tuple(task_graphs), **fields)


def pipeline_plan(**fields: Any) -> Plan:
    return plan(
        [
            TaskGraphPlan(name="a", ops=tuple(names("layer0", "layer1")), devices=((0,), (1,)), warmup=2),
            TaskGraphPlan(name="b", ops=tuple(names("layer2", "layer3", "head")), devices=((2,), (3,)), warmup=1),
        ],
        num_model_replicas=2,
        num_micro_batch=4,
        **fields,
    )


def test_pipeline_with_nested_data_parallelism_is_the_uniform_strategy() -> None:
    cluster = Cluster.parse("hc2")
    from_plan = simulate(strategy_from_plan(pipeline_plan(), mlp(8)), cluster)
    assert from_plan.step_time_s == simulate(uniform_3d(mlp(8), 2, 1, 2, 4), cluster).step_time_s
    assert from_plan.peak_memory_bytes == simulate(uniform_3d(mlp(8), 2, 1, 2, 4), cluster).peak_memory_bytes


def test_split_partitions_the_dimension_that_shards_name() -> None:
    shards = {op.name: op.split for op in mlp(8).ops if op.split}
    one = TaskGraphPlan(
        name="all", strategy="split", ops=tuple(names("layer0", "layer1", "layer2", "layer3", "head")), devices=((0, 1, 2, 3),)
    )
    strategy = strategy_from_plan(plan([one], shards=shards), mlp(8))
    split = [config for op, config in zip(strategy.model.ops, strategy.op_configs) if op.split]
    assert all(config.axes[0].dim == op.split for config, op in zip(split, [op for op in strategy.model.ops if op.split]))


def test_slices_divide_the_batch_unevenly() -> None:
    one = TaskGraphPlan(
        name="all", ops=tuple(names("layer0", "layer1", "layer2", "layer3", "head")), devices=((0, 1),), slices=(3, 1)
    )
    result = simulate(strategy_from_plan(plan([one]), mlp(4096)), Cluster.parse("hc2"))
    assert result.devices[0].computation_s > 2.5 * result.devices[1].computation_s


def test_buckets_are_the_plan_s() -> None:
    parameters = [tensor.name for tensor in mlp(8).tensors if tensor.role == "parameter" and "layer0" in tensor.name]
    gradients = (GradientPlan(task_graph=0, backend="local", buckets=(tuple(parameters),)),)
    strategy = strategy_from_plan(pipeline_plan(gradients=gradients), mlp(8))
    program = compile_strategy(strategy, Cluster.parse("hc2"), OpEstimator(strategy.model))
    reduced = [instruction for instruction in program.instructions if instruction.block == (0, "update") and instruction.groups]
    assert len(reduced) == 3  # one for layer0, one for each of layer1's parameters


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(ops=("layer0/fcc",)), "has op 'layer0/fcc', which model 'mlp' does not have"),
        (dict(ops=()), "name no op or layer"),
        (dict(ops=("layer0/fc",), strategy="split", devices=((0, 1),)), "shards op 'layer0/fc' by 'z'"),
    ],
)
def test_refusals(change: Any, message: str) -> None:
    fields = dict(dict(name="a", devices=((0,),)), **change)
    with pytest.raises(PlanError, match=message):
        strategy_from_plan(plan([TaskGraphPlan(**fields)], shards={"layer0/fc": "z"}), mlp(8))


def test_plan_that_would_deadlock_is_refused() -> None:
    bad = pipeline_plan()
    task_graphs = (replace(bad.task_graphs[0], warmup=1), replace(bad.task_graphs[1], warmup=2))
    strategy = strategy_from_plan(replace(bad, task_graphs=task_graphs), mlp(8))
    with pytest.raises(PlanError, match="use warmup <= 1 on stage 1"):
        simulate(strategy, Cluster.parse("hc2"))


def test_profile_s_layers_take_the_profiler_s_time_and_memory() -> None:
    profile = ModelProfile.parse("bert-48")
    cluster = Cluster.parse("dapple-b")
    model = layered_model(profile, 2)
    result = simulate(uniform_3d(model), cluster, NO_RESERVE, LayerEstimator(model, profile))
    seconds = [layer_seconds(profile, layer, cluster.devices[0], 2) for layer in profile.layers]
    updates = sum(instruction.seconds[0] for instruction in result.program.instructions if instruction.label == "update")
    total = sum(time.forward_s + time.backward_s for time in seconds) + updates
    assert result.step_time_s == pytest.approx(total, rel=1e-2)
    held = profile.parameter_bytes * profile.bytes_per_parameter_byte
    assert result.memory[0].bytes[0] == pytest.approx(held, rel=1e-6)
    kept = sum(layer.activation_bytes for layer in profile.layers) * 2
    assert result.memory[0].peak_bytes - held == pytest.approx(kept, rel=0.1)


def test_plan_over_a_profile_s_layers() -> None:
    """What a search over a built-in profile says: which layers each stage takes."""
    profile = ModelProfile.parse("bert-48")
    names = [layer.name for layer in profile.layers]
    searched = Plan(
        graph="bert-48",
        num_devices=16,
        num_micro_batch=4,
        task_graphs=(
            TaskGraphPlan(name="a", ops=tuple(names[:23]), devices=(tuple(range(8)),), warmup=2),
            TaskGraphPlan(name="b", ops=tuple(names[23:]), devices=(tuple(range(8, 16)),), warmup=1),
        ),
    )
    model = layered_model(profile, 16)
    strategy = strategy_from_plan(searched, model, layer_names(profile))
    assert [stage.devices for stage in strategy.stages] == [tuple(range(8)), tuple(range(8, 16))]
    layers = {model.ops[number].path[0] for number in strategy.stages[0].ops}
    assert set(names[:23]) <= layers and not layers & set(names[24:])
    result = simulate(strategy, Cluster.parse("dapple-a"), estimator=LayerEstimator(model, profile))
    assert result.step_time_s > 0


def test_profile_s_tensor_parallelism_sums_the_bytes_it_names() -> None:
    profile = ModelProfile.parse("bert-48")
    model = layered_model(profile, 2)
    estimator = LayerEstimator(model, profile, {op.name: 4 for op in model.ops if op.split})
    strategy = uniform_3d(model, 1, 4)
    program = compile_strategy(strategy, Cluster.parse("hc1"), estimator)
    forward = sum(i.size_bytes for i in program.instructions if i.label == "all_reduce" and i.block[1] == "forward")
    named = sum((layer.tensor_parallel_bytes or 0) for layer in profile.layers if layer.parameter_bytes) * 2
    assert forward == pytest.approx(named, rel=1e-6)


@pytest.mark.parametrize("split", [0, 7, None])
def test_layers_send_what_crosses_a_cut(split: Any) -> None:
    """The bytes behind the last layer of a stage, whatever tensor parallelism would exchange."""
    layers = [{"name": name, "forward_flops": 1e6, "parameter_bytes": 4, "output_bytes": 100, "tensor_parallel_bytes": split}
              for name in ("a", "b", "c", "d")]
    profile = ModelProfile.parse({"name": "chain", "layers": layers})
    model, cluster = layered_model(profile, 3), Cluster.parse("V100-32GB:2")
    for schedule, places in (("backward_first", (("ab", 0), ("cd", 1))), ("interleaved", zip("abcd", (0, 1, 0, 1)))):
        tasks = tuple(TaskGraphPlan(name=part, ops=tuple(part), devices=((device,),)) for part, device in places)
        found = Plan(graph="chain", num_devices=2, num_micro_batch=2, schedule=schedule, task_graphs=tasks)
        program = compile_strategy(strategy_from_plan(found, model, layer_names(profile)), cluster, OpEstimator(model))
        sent = [one.size_bytes for one in program.instructions if one.label == "send_recv"]
        assert sent == [300.0] * 2 * (len(tasks) - 1)
