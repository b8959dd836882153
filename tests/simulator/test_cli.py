from __future__ import annotations

import json
from typing import Any

import pytest

from tests import command_line
from tests.command_line import Called
from whale_tf.cli import app
from whale_tf.cli.simulate import COLUMNS, _memory
from whale_tf.cluster import Cluster
from whale_tf.errors import memory_text, seconds_text
from whale_tf.plan import Plan, TaskGraphPlan
from whale_tf.profiler.model_profile import ModelProfile
from whale_tf.simulator import Execution, Simulator, Source, built_in_model, placement, trace_of, uniform_3d
from whale_tf.simulator.laws import default_laws
from whale_tf.viz.timeline import timeline_figure


def call(*arguments: str) -> Called:
    return command_line.call(app, *arguments)


def test_built_in_model_and_cluster_need_nothing_else() -> None:
    result = call(*"simulate --model gpt2 --cluster hc2 --dp 8 --tp 2 --pp 1 --micro-batches 1 --global-batch 64 --json".split())
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {
        "step_time_s",
        "samples_per_s",
        "peak_memory_bytes",
        "oom",
        "bubble",
        "exposed_communication_s",
        "tasks",
        "compile_seconds",
        "simulate_seconds",
    } <= set(found)
    assert len(found["peak_memory_bytes"]) == 16 and found["samples_per_s"] == pytest.approx(64 / found["step_time_s"])


def test_table_names_the_bottleneck() -> None:
    result = call(*"simulate --model mlp --cluster cpu:4 --pp 4 --micro-batches 2".split())
    assert result.exit_code == 0 and "bottleneck: stage" in result.output


def test_tables_in_a_pipe_are_whole() -> None:
    strategies = ("2x1x1:1", "1x2x1:1")
    result = call(*"compare --model mlp --cluster cpu:2 --global-batch 8".split(), *strategies)
    header, *rows = [line for line in result.stdout.splitlines() if len(line.split()) > len(strategies) and line[0] in "┃│"]
    assert [cell.strip() for cell in header.strip("┃").split("┃")] == ["strategy", *COLUMNS]
    assert sorted(row.split("│")[1].strip() for row in rows) == sorted(strategies)


def test_peaks_of_small_models_are_not_zero() -> None:
    """Tables print what --json has."""
    arguments = "simulate --model mlp --cluster cpu:2 --dp 2 --global-batch 8".split()
    peak = max(json.loads(call(*arguments, "--json").stdout)["peak_memory_bytes"])
    shown = call(*arguments).output
    assert memory_text(peak) in shown and peak / 2**30 < 0.5


@pytest.mark.parametrize(
    "size, oom, shown", [(5 << 20, False, "5.00 MiB"), (3 << 19, False, "1.50 MiB"), (3 << 30, True, "3.00 GiB !")])
def test_memory_as_the_tables_show_it(size: int, oom: bool, shown: str) -> None:
    assert _memory(size, oom) == shown


@pytest.mark.slow
def test_files(tmp_path: Any) -> None:
    paths = {name: str(tmp_path / name) for name in ("t.json", "t.png", "m.svg", "r.html")}
    result = call(
        "simulate",
        "--model",
        "mlp",
        "--cluster",
        "hc2",
        "--pp",
        "4",
        "--micro-batches",
        "8",
        "--trace",
        paths["t.json"],
        "--timeline",
        paths["t.png"],
        "--memory",
        paths["m.svg"],
        "--report",
        paths["r.html"],
    )
    assert result.exit_code == 0, result.output
    with open(paths["t.png"], "rb") as handle:
        assert handle.read(8) == b"\x89PNG\r\n\x1a\n"
    for name, start in (("t.json", '{"traceEvents"'), ("m.svg", "<svg"), ("r.html", "<!DOCTYPE html>")):
        with open(paths[name], encoding="utf8") as handle:
            assert handle.read().startswith(start)


def test_plan_file_with_a_built_in_model(tmp_path: Any) -> None:
    ops = tuple(op.name for op in built_in_model("mlp", 1).ops)
    made = Plan(graph="mlp", num_devices=2, task_graphs=(TaskGraphPlan(name="all", ops=ops, devices=((0, 1),)),))
    path = tmp_path / "plan.json"
    path.write_text(made.to_json())
    result = call("simulate", "--plan", str(path), "--cluster", "cpu:2", "--global-batch", "8", "--json")
    assert result.exit_code == 0, result.output
    uniform = call("simulate", "--model", "mlp", "--cluster", "cpu:2", "--dp", "2", "--global-batch", "8", "--json")
    assert json.loads(result.stdout)["step_time_s"] == json.loads(uniform.stdout)["step_time_s"]
    least = json.loads(call("simulate", "--plan", str(path), "--cluster", "cpu:2", "--json").stdout)
    assert least["samples_per_s"] == pytest.approx(2 / least["step_time_s"]), "one example for each replica"
    ranked = call("compare", str(path), "1x2x1", "2x1x1", "--model", "mlp", "--cluster", "cpu:2", "--global-batch", "8", "--json")
    rows = [json.loads(line) for line in ranked.stdout.splitlines()]
    assert [row["step_time_s"] for row in rows] == sorted(row["step_time_s"] for row in rows) and len(rows) == 3


def test_models_of_both_kinds_by_name_and_the_plans_that_searches_write_for_them(tmp_path: Any) -> None:
    path = str(tmp_path / "plan.json")
    for name, batch in (("gpt2", "16"), ("xlnet-36", "16")):
        options = ("--model", name, "--cluster", "dapple-c:2", "--global-batch", batch)
        assert call("simulate", *options, "--dp", "2").exit_code == 0
        options_of_plan = ("--search", "data-parallel", "--zero", "none", "--offload", "none", "-o", path)
        assert call("plan", *options, *options_of_plan).exit_code == 0
        steps = []
        for more in ((), ("--model", name), ("--global-batch", batch)):
            result = call("simulate", "--plan", path, *more, "--cluster", "dapple-c:2", "--json")
            assert result.exit_code == 0, result.output
            steps.append(json.loads(result.stdout)["step_time_s"])
        assert steps[0] == steps[1] == steps[2], "without a size that which the plan was searched for"


@pytest.mark.parametrize("command", [
    "simulate --model gpt-1.5b --cluster hc2 --pp 4 --dp 8 --micro-batches 8 --global-batch 1024",
    "compare 16x2x1 8x2x2:4 4x8x1:64 --model bert-large --cluster hc2 --global-batch 1024",
    "plan --model vgg-19 --cluster dapple-c --global-batch 512 --search dapple"])
def test_tables_fit_eighty_columns(command: str) -> None:
    tables = [line for line in call(*command.split()).stdout.splitlines() if line[:1] in "┏┃┡│└"]
    assert tables and max(map(len, tables)) <= 80, "\n".join(tables)


def test_sizes_by_arguments() -> None:
    """LLaMA-7B has 6.74 billion parameters; with 8 heads of keys and values a quarter of those of attention's two products."""
    assert built_in_model("llama", 1).parameter_count == pytest.approx(6.74e9, rel=2e-3)
    grouped, hidden = built_in_model("llama:kv_heads=8", 1).parameter_count, 4096
    assert built_in_model("llama", 1).parameter_count - grouped == 32 * 2 * hidden * hidden * 3 / 4
    assert built_in_model("gpt:layers=48,hidden=1600", 2).ops[5].flops == built_in_model("gpt-1.5b", 2).ops[5].flops
    long, short = (call("simulate", "--model", "bert-base", "--seq", seq, "--cluster", "hc1", "--json") for seq in ("512", "128"))
    assert json.loads(long.stdout)["step_time_s"] > json.loads(short.stdout)["step_time_s"]
    own = call("simulate", "--model", "bert-base", "--cluster", "hc1", "--json")
    assert json.loads(own.stdout)["step_time_s"] == json.loads(short.stdout)["step_time_s"]


def test_orders_of_devices() -> None:
    cluster = Cluster.parse("2xcpu:4")
    assert placement(cluster, 2, 2, 2) == list(range(8))
    assert placement(cluster, 2, 2, 2, "tp-pp-dp") == [0, 1, 4, 5, 2, 3, 6, 7]
    assert placement(cluster, 4, 1, 2, "pp-dp-tp") == [0, 2, 4, 6, 1, 3, 5, 7], "pipelines of neighbours"
    assert placement(cluster, 1, 2, 3, "nodes") == [0, 4, 1, 5, 2, 6], "tensor parallelism over both nodes"
    asked = "compare 4x4x1 --model gpt2 --cluster 2xV100-32GB:8 --global-batch 16 --json --order".split()
    near, far = (json.loads(call(*asked, order).stdout)["step_time_s"] for order in ("tp-dp-pp", "nodes"))
    assert far > 2 * near, "tensor parallelism over a network"


@pytest.mark.parametrize("count", [8, 16])
def test_features_replicated_and_the_classifier_split(count: int, tmp_path: Any) -> None:
    """Whale's Figures 13 and 14: the search finds this plan, and every command has one price for it."""
    path, on = str(tmp_path / "plan.json"), ("--cluster", f"whale-v100:{count}", "--global-batch", str(32 * count), "--json")
    model = ("--model", "resnet-50-100k", *on)
    found = json.loads(call("plan", *model, "--search", "replicate-split", "-o", path).stdout)
    assert "stem to stage3_block2 replicated" in found["description"] and "classifier split" in found["description"]
    simulate = ("simulate", *model, "--dp", str(count))
    asked, whole = (json.loads(call(*simulate, *more).stdout) for more in (("--split", "classifier"), ()))
    planned = json.loads(call("simulate", "--plan", path, *on).stdout)
    assert asked["step_time_s"] == planned["step_time_s"] == pytest.approx(found["latency_s"], rel=1e-9)
    assert asked["peak_memory_bytes"] == planned["peak_memory_bytes"] == found["peak_memory_bytes"]
    assert asked["step_time_s"] < whole["step_time_s"] and asked["peak_memory_bytes"] < whole["peak_memory_bytes"]


def test_pictures_name_the_run_and_end_with_its_step() -> None:
    source = Source.of_model("bert-large", Execution(None, False, default_laws(), Cluster.parse("hc2")))
    result = source.played(uniform_3d(source.graph(64), 32), Simulator(source.execution.cluster, source.options()))
    trace = trace_of(result)
    assert trace.end_s == result.step_time_s > max(event.start_s + event.duration_s for event in trace.events)
    assert trace.about == f"bert-large on hc2, 64 examples a step: {seconds_text(result.step_time_s)}, predicted"
    figure = timeline_figure(trace)
    assert figure.axes[0].get_title("left") == trace.about and figure.axes[0].get_xlim()[1] == 1e3 * result.step_time_s


def test_gradients_in_sixteen_bits_are_sent_faster() -> None:
    asked = "simulate --model vgg-19 --cluster dapple-c --dp 16 --global-batch 64 --json".split()
    own, half = (json.loads(call(*asked, "--gradients", name).stdout)["step_time_s"] for name in ("own", "fp16"))
    assert half < 0.7 * own


def test_profile(tmp_path: Any) -> None:
    result = call("simulate", "--profile", "vgg-19", "--cluster", "dapple-b", "--dp", "2", "--global-batch", "64", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["samples_per_s"] > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("simulate --cluster hc1", "a plan holds names, not times; add --model"),
        ("simulate --cluster hc9 --model mlp", "hc9"),
        ("simulate --cluster hc1 --model gpt3", "Did you mean 'gpt2'"),
        ("simulate --cluster hc1 --model gpt-1.5b --tp 8", "'n', which 8 devices cannot share evenly; use a degree of 1, 5, 25"),
        ("simulate --cluster hc1 --model mlp --profile vgg-19", "keep one"),
        ("simulate --cluster hc1 --model mlp --tp 0", "--tp is 0, expected at least 1"),
        ("simulate --cluster hc1 --model mlp --order node", "order is 'node', expected one of tp-dp-pp, tp-pp-dp"),
        ("simulate --cluster hc1 --model resnet-50 --dp 8 --split class", "no part of 'resnet-50'; its parts are stem"),
        ("simulate --cluster hc1 --model vgg-19 --dp 8 --split pool5", "nothing in it can be divided; parts of 'vgg-19'"),
        ("plan --cluster hc1 --model xlnet-36 --global-batch 8 --search replicate-split", "layer 'loss', which 8 devices cannot"),
        ("plan --cluster hc1 --model vgg-19 --global-batch 9 --search replicate-split", "use a multiple of 8"),
        ("simulate --cluster hc1 --model mlp --dp 16", "cluster 'hc1' has devices 0 to 7"),
        ("simulate --cluster hc1 --model mlp --plan nowhere.json", "does not exist"),
        ("simulate --cluster cpu:4 --model mlp --dp 2 --global-batch 3", "use a multiple of 2"),
        ("simulate --cluster hc1 --model m6-10b --dp 8 --trace x.json", "no trace of an infeasible plan"),
        ("simulate --cluster hc1 --model gpt2 --zero v2", "dp is 1; use more"),
        ("simulate --cluster hc1 --model gpt2 --dp 8 --zero v4", "zero is 'v4', expected one of none, v1, v2, v3"),
        ("simulate --cluster hc1 --model gpt2 --offload host", "offload is 'host', expected one of none, states, v0"),
        ("simulate --cluster hc1 --model gpt2 --recompute all", "--recompute is 'all', expected one of none, selective"),
        ("simulate --cluster hc1 --model mlp --timeline a.txt", "--timeline is 'a.txt', expected a name that ends in .png"),
        ("simulate --cluster hc1 --model mlp --trace no/t.json", "--trace is 'no/t.json', but there is no directory 'no'"),
        ("simulate --cluster hc1 --model mlp --report .", "--report is '.', which is a directory"),
        ("plan --cluster hc1 --model mlp --global-batch 8 -o no/p.json", "there is no directory 'no'"),
        ("calibrate -o no/c.json", "there is no directory 'no'"),
        ("profile train.py --ops no/o.json", "--ops is 'no/o.json', but there is no directory 'no'"),
        ("simulate --cluster hc1 --model mlp --recompute selective", "'mlp' has none; use 'full', or 'stage'"),
        ("simulate --cluster hc1 --model gpt2 --recompute auto --memory-limit 0.5", "the least is"),
        ("simulate --cluster hc1 --model gpt2 --memory-limit 0", "expected more than 0"),
        ("plan --cluster hc1 --model gpt2 --global-batch 8 --memory-limit -1", "expected more than 0"),
        ("plan --cluster hc1 --model gpt2 --global-batch 8 --zero v9", "zero is 'v9', expected one of"),
        ("plan --cluster V100-32GB:1 --model gpt2 --global-batch 8 --zero v1", "has any; use zero 'none', or more devices"),
        ("plan --cluster hc1 --model gpt2 --global-batch 8 --memory-limit 0.001", "needs"),
        ("compare 2by2 --cluster hc1 --model mlp --global-batch 8", "neither a plan file nor of the form DPxTPxPP"),
    ],
)
def test_refusals(arguments: str, message: str) -> None:
    result = call(*arguments.split())
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_tensor_parallel_plan_costs_what_its_degrees_cost(tmp_path: Any) -> None:
    """A plan of layers says no shards: its ops are divided, and timed, like those of the uniform strategy."""
    layers = tuple(layer.name for layer in ModelProfile.parse("gpt2-24").layers)
    task = TaskGraphPlan(name="all", strategy="split", ops=layers, devices=((0, 1), (2, 3)))
    path = tmp_path / "plan.json"
    path.write_text(Plan(graph="gpt2-24", num_devices=4, num_model_replicas=2, task_graphs=(task,)).to_json())
    options = ("--cluster", "dapple-a:4", "--global-batch", "8", "--json")
    found = json.loads(call("simulate", "--plan", str(path), *options).stdout)
    uniform = json.loads(call("simulate", "--model", "gpt2-24", "--dp", "2", "--tp", "2", *options).stdout)
    assert found["step_time_s"] == pytest.approx(uniform["step_time_s"], rel=1e-9)


def test_stage_without_work_has_words(tmp_path: Any) -> None:
    """The last layers of AMP's GPT-2 cost nothing by themselves."""
    layers = tuple(layer.name for layer in ModelProfile.parse("gpt2-24").layers)
    tasks = tuple(TaskGraphPlan(name=name, ops=ops, devices=((device,),))
                  for device, (name, ops) in enumerate((("all", layers[:-1]), ("loss", layers[-1:]))))
    path = tmp_path / "plan.json"
    path.write_text(Plan(graph="gpt2-24", num_devices=2, num_micro_batch=2, task_graphs=tasks).to_json())
    result = call("simulate", "--plan", str(path), "--cluster", "dapple-a:2", "--global-batch", "2")
    assert result.exit_code == 0 and "stage 1 has none" in " ".join(result.output.split()), result.output


def test_task_graph_without_ops_is_refused(tmp_path: Any) -> None:
    ops = tuple(op.name for op in built_in_model("mlp", 1).ops)
    tasks = (TaskGraphPlan(name="all", ops=ops, devices=((0,),)), TaskGraphPlan(name="idle", devices=((1,),)))
    path = tmp_path / "plan.json"
    path.write_text(Plan(graph="mlp", num_devices=2, task_graphs=tasks).to_json())
    result = call("simulate", "--plan", str(path), "--cluster", "cpu:2")
    assert result.exit_code == 1 and "TaskGraph 'idle' has no ops" in result.output


def test_device_listed_twice_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "plan.json"
    text = Plan(graph="mlp", num_devices=2, task_graphs=(TaskGraphPlan(name="all", devices=((0, 1),)),)).to_json()
    path.write_text(json.dumps(dict(json.loads(text), task_graphs=[{"name": "all", "devices": [[1, 1]]}])))
    result = call("simulate", "--plan", str(path), "--cluster", "cpu:2")
    assert result.exit_code == 1 and "lists device 1 twice" in result.output


def test_cluster_without_links_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"nodes": [{"devices": ["V100-32GB", "V100-32GB"]}]}))
    result = call("simulate", "--cluster", str(path), "--model", "mlp", "--dp", "2")
    assert result.exit_code == 1 and "links" in result.output
