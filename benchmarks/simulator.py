"""The simulator beside the papers: cost, order of plans, ablation, memory.

    python -m benchmarks.simulator [--only cost,scale,table_v,models,dapple,whale] [--reference DIRECTORY]

``--reference``: a directory with ``simulation_cost_measured.json``, what the Proteus authors' code took on some machine
(seconds by model and number of GPUs); without it that column stays empty.  Times are CPU seconds, the least of three runs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from rich.console import Console
from scipy.stats import spearmanr

from benchmarks import whale_figures
from benchmarks.measure import chosen, table
from whale_tf.cluster import Cluster
from whale_tf.simulator import (
    CompleteStrategy,
    ModelGraph,
    Options,
    Simulation,
    Simulator,
    built_in_model,
    micro_batch_size,
    op_config,
    simulate,
    uniform_3d,
)

GIB = 2.0**30
Row = Sequence[Any]

# Proteus Table V: (DP, MP, PP, micro-batches) -> measured rank; global batch 8 on HC1, 64 on HC2
TABLE_V = {
    ("hc1", 8): {(8, 1, 1, 1): 2, (4, 2, 1, 1): 1, (2, 4, 1, 1): 3, (1, 8, 1, 1): 5, (2, 2, 2, 1): 6, (2, 2, 2, 2): 4},
    ("hc2", 64): {
        (16, 1, 1, 1): 1,
        (8, 2, 1, 1): 2,
        (4, 4, 1, 1): 3,
        (2, 8, 1, 1): 4,
        (8, 1, 2, 4): 6,
        (8, 1, 2, 8): 5,
        (2, 4, 2, 4): 7,
    },
}
ABLATION = (
    ("both", Options()),
    ("no overlap", Options(overlap=False)),
    ("no sharing", Options(sharing=False)),
    ("plain", Options(sharing=False, overlap=False)),
)
# DAPPLE Table VI: schedule, recomputation, micro-batches -> samples/s, average peak in GB (None: out of memory)
TABLE_VI = {
    ("gpipe", "none", 2): (5.10, 12.1),
    ("gpipe", "none", 3): (None, None),
    ("gpipe", "stage", 2): (4.00, 9.9),
    ("gpipe", "stage", 5): (5.53, 13.2),
    ("gpipe", "stage", 8): (None, None),
    ("backward_first", "none", 2): (5.10, 10.6),
    ("backward_first", "none", 8): (7.60, 10.6),
    ("backward_first", "none", 16): (8.18, 10.6),
    ("backward_first", "stage", 2): (4.24, 8.5),
    ("backward_first", "stage", 8): (6.23, 8.5),
    ("backward_first", "stage", 16): (6.77, 8.5),
}
# DAPPLE Table VIII: stages -> layers of the largest BERT
TABLE_VIII = {1: 48, 2: 106, 4: 215, 8: 428}


def cpu_seconds(function: Callable[[], Any], rounds: int = 3) -> float:
    """The least of some runs."""
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        function()
        best = min(best, time.process_time() - began)
    return best


# ---- Proteus -----------------------------------------------------------------------------------------------------------


def _data_parallel(model: ModelGraph, count: int, cluster: Cluster, collapse: bool) -> Simulation:
    return simulate(uniform_3d(model, count), cluster, Options(collapse=collapse))


def cost(reference: Optional[str]) -> List[Row]:
    """Proteus Table VI: compiling and simulating data parallelism on HC2, everything from the model on."""
    known: Dict[Tuple[str, int], float] = {}
    if reference is not None:
        with open(os.path.join(reference, "simulation_cost_measured.json"), encoding="utf8") as handle:
            known = {(row["model"], row["gpus"]): row["total_s"] for row in json.load(handle)["table_VI"]}
    rows: List[Row] = []
    for name, batch in (("vgg-19", 32), ("gpt2", 4)):
        for count in (1, 2, 4, 8, 16, 32):
            cluster = Cluster.parse("hc2")
            model = built_in_model(name, batch * count)
            tasks, seconds = [], []
            for collapse in (False, True):
                run = partial(_data_parallel, model, count, cluster, collapse)
                tasks.append(run().tasks)
                seconds.append(cpu_seconds(run))
            theirs = known.get((name.replace("-", ""), count))
            rows.append(
                (
                    name,
                    count,
                    tasks[0],
                    f"{seconds[0]:.3f}",
                    f"{seconds[1]:.3f}",
                    "" if theirs is None else f"{theirs:.3f}",
                    "" if theirs is None else f"{theirs / seconds[0]:.0f}x",
                    "" if theirs is None else f"{theirs / seconds[1]:.0f}x",
                )
            )
    return rows


def _three_dimensions(model: ModelGraph, shape: Tuple[int, int, int, int], cluster: Cluster) -> Simulation:
    return simulate(uniform_3d(model, *shape), cluster)


def scale() -> List[Row]:
    """GPT-2 in three dimensions on A100 clusters."""
    rows: List[Row] = []
    for dp, tp, pp, count in ((32, 8, 4, 16), (128, 4, 2, 8), (1024, 1, 1, 1)):
        cluster = Cluster.parse("a100:1024")
        model = built_in_model("gpt2", 2 * dp)
        result = simulate(uniform_3d(model, dp, tp, pp, count), cluster)
        seconds = cpu_seconds(partial(_three_dimensions, model, (dp, tp, pp, count), cluster))
        text = f"{dp}x{tp}x{pp}({count})"
        rows.append((text, len(result.graph.devices), result.tasks, f"{seconds:.3f}"))
    return rows


def table_v() -> List[Row]:
    """Order of the throughput of 13 GPT-2 strategies, and what each run-time behaviour adds to it (Fig. 9)."""
    rows: List[Row] = []
    for (cluster, batch), ranks in TABLE_V.items():
        steps: Dict[str, List[float]] = {}
        for label, options in ABLATION:
            simulator = Simulator(Cluster.parse(cluster), options)
            for dp, tp, pp, count in ranks:
                model = built_in_model("gpt2", micro_batch_size(batch, count, dp))
                steps.setdefault(label, []).append(simulator.run(uniform_3d(model, dp, tp, pp, count)).step_time_s)
        for number, (shape, rank) in enumerate(ranks.items()):
            predicted = 1 + sum(step < steps["both"][number] for step in steps["both"])
            times = [f"{1e3 * steps[label][number]:.1f}" for label, _ in ABLATION]
            rows.append([cluster, "{}x{}x{}({})".format(*shape), rank, predicted] + times)
        spearman = [f"{spearmanr(steps[label], list(ranks.values()))[0]:.3f}" for label, _ in ABLATION]
        rows.append([cluster, "Spearman", "", ""] + spearman)
    return rows


class Setting(NamedTuple):
    """One of Proteus' benchmarks: examples per device, and the two strategies."""

    model: str
    batch: int
    s1: Callable[[ModelGraph, int], CompleteStrategy]
    s2: Callable[[ModelGraph, int], CompleteStrategy]


def settings() -> List[Setting]:
    """Proteus section VIII-B: S1 data parallelism (with ZeRO and recomputation for GPT-1.5B), S2 the experts' choice."""

    def data(model: ModelGraph, count: int) -> CompleteStrategy:
        return uniform_3d(model, count)

    def channels(model: ModelGraph, count: int) -> CompleteStrategy:
        return uniform_3d(model, count // 2, 2)

    def zero(model: ModelGraph, count: int) -> CompleteStrategy:
        return uniform_3d(model, count, zero="v3", recompute="full")

    def shard_and_pipeline(model: ModelGraph, count: int) -> CompleteStrategy:
        return uniform_3d(model, count // 8, 4, 2, recompute="full")

    def tables(model: ModelGraph, count: int) -> CompleteStrategy:
        strategy = uniform_3d(model, count)
        configs = list(strategy.op_configs)
        for number, op in enumerate(model.ops):
            if op.kind == "embedding":
                configs[number] = op_config(range(count), (min(count, 8), "n"))
        return strategy._replace(op_configs=tuple(configs))

    return [
        Setting("resnet-50", 32, data, channels),
        Setting("inception-v3", 32, data, channels),
        Setting("vgg-19", 32, data, channels),
        Setting("gpt2", 1, data, channels),
        Setting("gpt-1.5b", 1, zero, shard_and_pipeline),
        Setting("dlrm", 256, data, tables),
    ]


def models() -> List[Row]:
    """The six models of Proteus Table II under S1 and S2 on all devices of HC1 to HC3, with the ablation of Fig. 9."""
    rows: List[Row] = []
    for setting in settings():
        for cluster in ("hc1", "hc2", "hc3"):
            described = Cluster.parse(cluster)
            count = len(described.devices)
            for label, build in (("S1", setting.s1), ("S2", setting.s2)):
                strategy = build(built_in_model(setting.model, setting.batch * count), count)
                results = [simulate(strategy, described, options) for _, options in ABLATION]
                rows.append(
                    [setting.model, cluster, label, count]
                    + [f"{result.samples_per_s:.1f}" for result in results]
                    + ["{:.1f}{}".format(max(results[0].peak_memory_bytes) / GIB, " oom" if results[0].oom else "")]
                )
    return rows


# ---- DAPPLE and Whale --------------------------------------------------------------------------------------------------


def dapple() -> List[Row]:
    """DAPPLE Table VI: BERT-48, two stages, micro-batches of 2, config B."""
    rows: List[Row] = []
    for (schedule, recompute, count), (rate, peak) in TABLE_VI.items():
        strategy = uniform_3d(built_in_model("bert-48", 2), 1, 1, 2, count, schedule, recompute=recompute)
        result = simulate(strategy, Cluster.parse("dapple-b"))
        rows.append(
            (
                schedule + (" + recompute" if recompute != "none" else ""),
                count,
                "oom" if rate is None else rate,
                "oom" if result.oom else f"{result.samples_per_s:.2f}",
                "oom" if peak is None else peak,
                "{:.1f}{}".format(sum(result.peak_memory_bytes) / 2e9, " oom" if result.oom else ""),
            )
        )
    return rows


def largest_bert() -> List[Row]:
    """DAPPLE Table VIII: the most layers that fit on 1 to 8 V100 of 16 GB with recomputation."""
    rows: List[Row] = []
    cluster = Cluster.parse("dapple-a")
    for stages, paper in TABLE_VIII.items():
        low, high = stages, 1000
        while low < high:
            middle = (low + high + 1) // 2
            strategy = uniform_3d(built_in_model(f"bert-{middle}", 2), 1, 1, stages, stages, recompute="full")
            if simulate(strategy, cluster).oom:
                high = middle - 1
            else:
                low = middle
        alone = int(rows[0][2]) if rows else low
        rows.append((stages, paper, low, f"{paper / TABLE_VIII[1]:.2f}", f"{low / alone:.2f}"))
    return rows


SECTIONS: Dict[str, Tuple[str, Sequence[str], Callable[..., List[Row]]]] = {
    "cost": (
        "Simulation cost in CPU seconds, data parallel on HC2 (Proteus Table VI)",
        ("model", "GPUs", "tasks", "all", "collapsed", "authors' code", "all", "collapsed"),
        cost,
    ),
    "scale": ("GPT-2 on 1,024 A100, CPU seconds", ("strategy", "simulated devices", "tasks", "seconds"), scale),
    "table_v": (
        "Proteus Table V: step times in ms",
        ("cluster", "strategy", "rank", "predicted") + tuple(label for label, _ in ABLATION),
        table_v,
    ),
    "models": (
        "Proteus Table II under S1 and S2: samples/s",
        ("model", "cluster", "strategy", "devices") + tuple(label for label, _ in ABLATION) + ("peak GiB",),
        models,
    ),
    "dapple": ("DAPPLE Table VI", ("schedule", "M", "samples/s, paper", "ours", "peak GB, paper", "ours"), dapple),
    "largest_bert": (
        "DAPPLE Table VIII: layers of the largest BERT",
        ("stages", "paper", "ours", "paper, relative", "ours, relative"),
        largest_bert,
    ),
    "whale": ("Whale section 5", ("model", "devices", "what", "paper", "ours"), whale_figures.rows),
}


def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(SECTIONS), help="comma-separated: " + ", ".join(SECTIONS))
    parser.add_argument("--reference", help="directory with simulation_cost_measured.json")
    given = parser.parse_args(arguments)
    console = Console(width=150)
    for name in chosen(parser, SECTIONS, arguments):
        title, header, run = SECTIONS[name]
        rows = run(given.reference) if name == "cost" else run()
        console.print(table(title, header, [[str(cell) for cell in row] for row in rows]))


if __name__ == "__main__":
    main()
