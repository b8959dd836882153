"""``auto_parallel: "rhino"`` computes what the local script computes."""
from __future__ import annotations

import contextlib
import functools
import json
from typing import Any, Dict, Tuple

import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from models import gpt2
from tests.numeric import split  # noqa: F401 (registers cases)
from tests.numeric.cases import find_case
from tests.numeric.equality import TOLERANCE, Outcome, assert_equal, reference, run_local, run_script
from tests.numeric.script import Setting, Stages
from tests.numeric.section_cases import SECTIONS
from whale_tf.cluster import Cluster
from whale_tf.decide import played_steps
from whale_tf.errors import ConfigError, InfeasibleError, UnsupportedOpError
from whale_tf.plan import Plan
from whale_tf.planner.auto.choose import ALWAYS
from whale_tf.planner.rhino.integer_program import integer_program
from whale_tf.planner.rhino.search import search

FEDS = Setting()
REFERENCES = Setting(resource=False)


def slow_devices(count: int, link_gbytes_per_s: float = 1.0) -> Dict[str, Any]:
    """CPU devices that compute so slowly that dividing a tiny model pays; over slow links, only into stages."""
    kind = {"kind": "CPU", "memory_gib": 4, "fp32": 1e6, "fp64": 1e6, "memory_bandwidth_bytes_per_s": 1e9}
    return {"name": "slow", "device_types": {"slow": kind}, "nodes": [
        {"devices": ["slow"] * count, "links": {"local": {"bandwidth_gbytes_per_s": link_gbytes_per_s, "latency_s": 1e-7}}}]}


@pytest.fixture(autouse=True)
def only_rhino(monkeypatch: Any) -> None:
    """Data parallelism and the undivided graph are no candidates: of these models they would be chosen."""
    monkeypatch.setattr(played_steps, "to_play", lambda found: [one for one in found if one.search not in ALWAYS])


@functools.lru_cache(maxsize=None)
def local(name: str, setting: Setting) -> Outcome:
    return run_local(find_case(name), setting)


def check(name: str, count: int, setting: Setting = FEDS, plan: Any = None, cluster: Any = None, **config: Any) -> Plan:
    """The case as the search divides it equals the local script; returns the plan."""
    case = find_case(name)
    keys = {key.replace("__", "."): value for key, value in config.items()}
    wh.init(dict({"auto_parallel": "rhino"} if plan is None else {}, **dict(keys, **(case.config or {}))),
            cluster=cluster or slow_devices(count), plan=plan)
    try:
        found = run_script(case, setting, Stages(), 1, 1)
        ran, explained = wh.current_plan(), wh.explain()
    finally:
        wh.shutdown()
    assert_equal(found, local(name, reference(setting)), TOLERANCE[setting.dtype])
    assert "Exact" in explained and ran.estimate.search == "rhino" and ran.estimate.latency_s > 0
    return ran


CASES: Tuple[str, ...] = ("mlp_sum", "clipped_adam", "sum_with_l2", "transformer", "sparse_embedding", "convolution", "gan",
                          "experts_adafactor", "classifier_lamb", "weighted_loss")


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_models_on_two_devices(name: str) -> None:
    assert set(check(name, 2).shards.values()) - {"once"}


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("name", ["momentum", "tied_embedding", "look_up_adam"])
def test_models_on_four_devices_with_reference_variables(name: str) -> None:
    assert set(check(name, 4, REFERENCES).shards.values()) - {"once"}


@pytest.mark.once
@pytest.mark.slow
def test_encoder() -> None:
    """BERT; its batch is divided, which is data parallelism with a sharded optimizer."""
    shards = check("encoder", 4).shards
    assert list(shards.values()).count("rows") > 10


@pytest.mark.once
@pytest.mark.slow
def test_float32() -> None:
    check("classifier_momentum", 2, Setting(dtype="float32"))


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("setting", [Setting(static_batch=False), Setting(dataset=True), Setting(runner="callable"),
                                     Setting(dataset=True, runner="monitored", resource=False)], ids=str)
def test_inputs_and_sessions(setting: Setting) -> None:
    """A batch of unknown size is not divided; the layers are."""
    shards = check("classifier_adam", 2, setting).shards
    assert set(shards.values()) - {"once"}
    if not setting.static_batch:
        assert shards["features/MatMul"] in ("column", "row")


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("patterns", [("column", "row"), ("row", "column"), ("rows", "column"), ("once", "rows")])
def test_pinned_patterns(patterns: Tuple[str, str]) -> None:
    """Whatever is asked for, resharding in between included."""
    force = dict(zip(("features/MatMul", "classes/MatMul"), patterns))
    shards = check("classifier_momentum", 3, patterns__force=force).shards
    assert {name: shards[name] for name in force} == force


@pytest.mark.slow
def test_saved_plan_runs_again() -> None:
    plan = check("classifier_adam", 2)
    document = json.loads(plan.to_json())
    assert check("classifier_adam", 2, plan=document) == plan
    document["task_graphs"][0]["slices"] = [2, 1]
    with pytest.raises(wh.PlanError, match=r"slices \[2, 1\], but .* divides evenly"):
        check("classifier_adam", 2, plan=document)


@pytest.mark.once
@pytest.mark.slow
def test_search_on_captured_graphs() -> None:
    """GPT-2: the integer program proves the answer; a large batch is data parallel, a small one has Megatron's pair."""
    found = []
    for batch in (512, 1):
        wh.init(cluster="cpu:1")
        try:
            with tf.Graph().as_default():
                config = gpt2.Gpt2Config(layers=1, hidden=256, heads=4, vocab=64, seq=128)
                tf.train.AdamOptimizer(0.1).minimize(gpt2.build(gpt2.inputs(config, batch), config).loss)
                graph = wh.op_graph()
        finally:
            wh.shutdown()
        answer = search(graph, Cluster.parse("rhino-m8:4"), shapes=[(4,)])
        problem, solution = answer.levels[0]
        assert solution.is_optimal and integer_program(problem.costs, fold=True).cost == solution.cost
        found.append([answer.patterns(f"layer_0/{name}/MatMul")[0] for name in ("ffn_in", "ffn_out")])
    assert found == [["rows", "rows"], ["column", "row"]]


def _parallelize(config: Dict[str, Any], annotated: bool = False, loop: bool = False) -> Plan:
    wh.init(dict({"auto_parallel": "rhino"}, **config), cluster="cpu:2")
    try:
        with tf.Graph().as_default():
            x = tf.placeholder(tf.float32, [8, 4])
            w = tf.get_variable("w", [4, 4], use_resource=False)
            with wh.replicate(2, name="mine") if annotated else contextlib.nullcontext():
                y = tf.matmul(x, w)
            if loop:
                y = tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.tanh(y)), (0, y))[1]
            tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(y))
            return wh.parallelize()
    finally:
        wh.shutdown()


# What the message says of a loop in the way: nothing on TensorFlow 1, where it is many small ops; otherwise its part of the time.
LOOP = (r"nothing is worth dividing|while these cannot be divided: "
        r"'while' \((Stateless)?While, \d+% of the time on one device: it runs a ")


def test_what_does_not_go_with_the_search_is_refused() -> None:
    with pytest.raises(ConfigError, match="mine"):
        _parallelize({}, annotated=True)
    with pytest.raises(ConfigError, match="num_micro_batch is 2"):
        _parallelize({"num_micro_batch": 2})
    with pytest.raises(ConfigError, match="expected {op: pattern}"):
        _parallelize({"patterns.force": "column"})
    with pytest.raises(ConfigError, match="'MatMul'"):
        _parallelize({"patterns.force": {"Matmul": "column"}})
    with pytest.raises((UnsupportedOpError, InfeasibleError), match=LOOP):
        _parallelize({}, loop=True)  # the loop stays whole, and so does this small model
    with pytest.raises(ConfigError, match="num_stages is 2"):
        _parallelize({"num_task_graph": 2})


@pytest.mark.slow
def test_inputs_whose_examples_lie_in_blocks() -> None:
    case, setting = SECTIONS["normalised_in_thirds"], Setting(static_batch=False)
    wh.init({"auto_parallel": "rhino"}, cluster=slow_devices(2))
    try:
        found = run_script(case, setting, Stages(), 1, 1)
    finally:
        wh.shutdown()
    assert_equal(found, run_local(case, setting), TOLERANCE["float64"])
