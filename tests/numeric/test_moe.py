"""Mixtures of experts (models/moe.py): replicated but for the experts, which ``wh.split`` divides (Whale's Example 5)."""
from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import Any, Dict, List, Tuple

import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from models import layers, moe
from tests.numeric.cases import Case, Inputs, rng
from tests.numeric.equality import TOLERANCE, Outcome, assert_equal, reference, run_local, run_script
from tests.numeric.script import Arrays, Script, Setting, Stages
from tests.numeric.split import Ran, Split, run_split

pytestmark = pytest.mark.half
SEQ, VOCAB = 4, 11
FEDS = Setting()
REFERENCES = Setting(resource=False, static_batch=False)


def _sequences(count: int, dtype: str) -> Arrays:
    tokens = rng("moe").randint(0, VOCAB, [count, SEQ + 1]).astype("int32")
    return {"tokens": tokens[:, :-1], "label": tokens[:, 1:]}


def config(top_k: int, experts: int, num_layers: int = 1, dtype: str = "float64") -> moe.MoeConfig:
    """Capacity for less than an even load: some tokens are dropped in every step."""
    return moe.MoeConfig(layers=num_layers, moe_every=1, hidden=8, heads=2, ffn=6, experts=experts, top_k=top_k,
                         capacity_factor=0.75, auxiliary_weight=0.05, vocab=VOCAB, seq=SEQ, dtype=dtype)


@functools.lru_cache(maxsize=None)
def case(top_k: int, experts: int, num_layers: int = 1, gate_inside: bool = False) -> Case:
    """Blocks: what comes before the first experts; experts; what comes between, and so on; the head.

    ``gate_inside``: the gates are chosen in the experts' block.
    """
    def build(inputs: Inputs, stages: Stages, dtype: str) -> Script:
        sizes = config(top_k, experts, num_layers, dtype)
        table: List[tf.Tensor] = []
        auxiliaries: List[tf.Tensor] = []

        def choose(x: tf.Tensor) -> Tuple[tf.Tensor, Any]:
            gating = moe.gating_dispatch(layers.layer_norm(x, "norm"), sizes)
            auxiliaries.append(gating.auxiliary)
            return x, gating

        def before(number: int, x: tf.Tensor) -> Any:
            if number == 0:
                x, words = moe.embed(x, sizes)
                table.append(words)
            with tf.variable_scope(f"layer_{number}"):
                x = moe.attention_block(x, sizes)
                return x if gate_inside else choose(x)

        def mix(number: int, state: Any) -> tf.Tensor:
            with tf.variable_scope(f"layer_{number}", reuse=tf.AUTO_REUSE):
                x, gating = choose(state) if gate_inside else state
                return x + moe.experts(gating.combine, gating.dispatched, sizes)

        blocks = [functools.partial(part, i) for i in range(num_layers) for part in (before, mix)]
        logits = stages.run(blocks + [lambda x: moe.lm_head(x, table[0])], inputs["tokens"])
        loss = layers.mean_cross_entropy(logits, inputs["label"]) + sizes.auxiliary_weight * tf.add_n(auxiliaries)
        update = tf.train.AdamOptimizer(0.01, epsilon=1e-4).minimize(loss)
        return Script([[update]], {"loss": loss, "auxiliary": auxiliaries[0]}, {"logits": logits})

    return Case(_sequences, build, sizes=(24,) * 3)


@functools.lru_cache(maxsize=None)
def local(model: Case, setting: Setting, model_replicas: int = 1) -> Outcome:
    return run_local(model, setting, model_replicas)


def check(model: Case, split: Split, setting: Setting = FEDS, model_replicas: int = 1, plan: Any = None) -> Ran:
    ran = run_split(model, setting, split, plan, model_replicas)
    assert_equal(ran.outcome, local(model, reference(setting), model_replicas), TOLERANCE[setting.dtype])
    return ran


def hybrid(count: int, num_layers: int = 1) -> Tuple[int, ...]:
    """Everything replicated ``count`` times but the experts, which are divided over the same devices."""
    return (count, -count) * num_layers + (count,)


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("setting,top_k,experts,count", [
    pytest.param(setting, *sizes, marks=[] if i % 2 == j and i < 4 else [pytest.mark.full])  # in turn; all in `make test-all`
    for i, sizes in enumerate([(1, 4, 2), (2, 5, 3), (1, 7, 4), (2, 5, 2), (1, 5, 3), (2, 4, 4)])
    for j, setting in enumerate((FEDS, REFERENCES))])
def test_experts_are_divided_and_tokens_stay(setting: Setting, top_k: int, experts: int, count: int) -> None:
    """Five experts over three devices are 2, 2 and 1. Tokens are combined where they live (``batch``)."""
    ran = check(case(top_k, experts), Split(hybrid(count), count), setting)
    assert sorted(set(ran.plan.shards.values())) == ["batch", "stack"]
    assert [(task.strategy, task.batch_of) for task in ran.plan.task_graphs] == [
        ("replicate", None), ("split", None), ("replicate", None), ("replicate", 1)]
    assert "batch" in ran.explained and "Exact" in ran.explained


HYBRIDS: Dict[str, Tuple[int, Tuple[int, ...], int, Dict[str, Any]]] = {
    "two layers": (2, hybrid(2, 2), 2, {}),
    "nested": (1, hybrid(2), 4, {"cluster.colocate_split_and_replicate": True}),
    "apart": (1, (1, -2, 1), 4, {}),
    "pipeline": (1, (1, -2, 1), 4, {"num_micro_batch": 2}),
    "more replicas than parts": (1, (4, -2, 4), 4, {"cluster.colocate_split_and_replicate": True}),
    "alone": (1, (-3,), 3, {}),
}


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in ("pipeline", "more replicas than parts") else [pytest.mark.full])
    for name in sorted(HYBRIDS)])
def test_hybrids(name: str) -> None:
    num_layers, counts, total, settings = HYBRIDS[name]
    check(case(2, 4, num_layers), Split(counts, total, tuple(settings.items())), REFERENCES if len(name) % 2 else FEDS)


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("setting", [FEDS, REFERENCES], ids=["resource", "reference"])
def test_gates_inside_the_split(setting: Setting) -> None:
    """Normalisation, gates, slots and dispatch go by examples there, too; only what has weights is divided by them."""
    split = Split((2, -2, 2), 2, (("patterns.force", {"layer_0_1/gating": "batch"}),))
    ran = check(case(2, 4, gate_inside=True), split, setting)
    gate = [pattern for op, pattern in ran.plan.shards.items() if "/gate/" in op]
    assert gate == ["batch"], ran.plan.shards
    inside, beside = ran.plan.task_graphs[1], ran.plan.task_graphs[3]
    assert len(beside.ops) > len(inside.ops) and beside.batch_of == 1
    assert not any("Softmax" in op or "ArgMax" in op for op in inside.ops)


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("setting", [pytest.param(Setting(dataset=True), marks=pytest.mark.full),
                                     Setting(dataset=True, static_batch=False, runner="monitored")], ids=str)
def test_datasets(setting: Setting) -> None:
    check(case(1, 4), Split(hybrid(2), 4, (("cluster.colocate_split_and_replicate", True),)), setting, 2)


@pytest.mark.half
@pytest.mark.slow
def test_default_strategy_around_experts() -> None:
    """Example 5: ops before and after the experts are one TaskGraph.  A block that makes only a kernel is none."""
    model = case(2, 5, 2)

    def build(inputs: Inputs, stages: Stages, dtype: str) -> Script:
        wh.set_default_strategy(wh.replicate(wh.total_gpus()))
        with wh.split(3), tf.variable_scope("layer_0/experts", reuse=tf.AUTO_REUSE):
            layers.normal_variable("kernel_in", [5, 8, 6], layers.glorot_stddev(8, 6), tf.as_dtype(dtype))
        return model.build(inputs, stages, dtype)

    wh.init(cluster="cpu:3")
    try:
        split = functools.partial(wh.split, 3)
        scopes = [contextlib.nullcontext, split, contextlib.nullcontext, split, contextlib.nullcontext]
        outcome = run_script(model._replace(build=build), FEDS, Stages(scopes), 1, 1)
        assert [task.name for task in wh.current_plan().task_graphs] == [
            "default", "split_2", "split_3", "split_2/batch", "split_3/batch"]
    finally:
        wh.shutdown()
    assert_equal(outcome, local(model, FEDS), TOLERANCE["float64"])


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("beside", [(5, 3), (1, 2)], ids=["as the others", "unlike the others"])
def test_uneven_shares_of_the_batch(beside: Tuple[int, int]) -> None:
    """Devices of unequal speed: the batch part of the ``split`` TaskGraph may even be cut elsewhere."""
    split = Split(hybrid(2), 2)
    plan = check(case(1, 4), split).plan
    task_graphs = [replace(task, slices=None if task.strategy == "split" else (5, 3)) for task in plan.task_graphs]
    task_graphs[3] = replace(task_graphs[3], slices=beside)
    check(case(1, 4), split, plan=replace(plan, task_graphs=tuple(task_graphs)))


@pytest.mark.slow
def test_float32() -> None:
    check(case(2, 4), Split(hybrid(2), 2), Setting(dtype="float32"))


@pytest.mark.half
@pytest.mark.slow
def test_saved_plan_runs_the_same_ops_by_examples() -> None:
    split = Split(hybrid(2), 2)
    first = check(case(2, 4), split)
    again = check(case(2, 4), split, plan=first.plan.to_json())
    assert again.plan == first.plan
