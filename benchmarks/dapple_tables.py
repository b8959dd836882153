"""DAPPLE's tables and figures with our own profiles and clusters: whose plan is better, and by how much.

    python -m benchmarks.dapple_tables [--only table5,command,table7,printed,fig12,fig13,fig14,policies,scale]

Times of plans are seconds of one step under our model, by Eq. 1 and 2 (``L``) and by playing the schedule (``played``).
Search times are CPU seconds.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from rich.console import Console

from benchmarks.measure import chosen, table
from benchmarks.papers.dapple import SOLVERS, in_order, search, single_device_seconds
from whale_tf.cluster import Cluster
from whale_tf.planner.dapple import search as dapple
from whale_tf.planner.dapple.cost import DappleCosts
from whale_tf.planner.dapple.device_sets import Servers
from whale_tf.planner.dapple.search import Hybrid
from whale_tf.profiler.model_profile import ModelProfile, load_builtin


class PaperRow(NamedTuple):
    """A row of DAPPLE Table V: ``DP``, ``straight`` or ``P:Q``; the ratio is its ACR column."""

    model: str
    batch: int
    config: str
    plan: str
    ratio: Optional[float]


TABLE_5 = tuple(PaperRow(model, batch, config, plan, ratio) for model, batch, plans in (
    ("resnet-50@dapple", 2048, (("DP", None), ("DP", None), ("DP", None))),
    ("vgg-19@dapple", 2048, (("DP", None), ("DP", None), ("15:1", 0.40))),
    ("gnmt-16", 1024, (("8:8", 0.10), ("8:8", 0.10), ("straight", 3.75))),
    ("bert-48@dapple", 64, (("8:8", 0.06), ("straight", 0.50), ("straight", 1.25))),
    ("xlnet-36", 128, (("8:8", 0.03), ("8:8", 0.03), ("straight", 0.67))),
    ("amoebanet-36", 128, (("8:8", 0.18), ("11:5", 0.14), ("11:5", 0.35))),
) for config, (plan, ratio) in zip("abc", plans))

# Table VII: last layers of the stages (numbered from 0) and their devices, DAPPLE's plan and PipeDream's (None: straight)
TABLE_7: Mapping[str, Tuple[int, Sequence[Tuple[int, int]], Optional[Sequence[Tuple[int, int]]]]] = {
    "vgg-19@dapple": (1024, ((16, 14), (25, 2)), ((11, 8), (17, 6), (19, 1), (25, 1))),
    "amoebanet-36": (128, ((30, 8), (43, 8)), None),
    "bert-large@dapple": (128, ((13, 8), (26, 8)), ((4, 2), (13, 6), (16, 2), (19, 2), (22, 2), (26, 2))),
    "xlnet-36": (128, ((22, 8), (41, 8)), None),
}

# Table V's batches
FIGURE_12 = {"vgg-19@dapple": 2048, "gnmt-16": 1024, "bert-48@dapple": 64, "xlnet-36": 128, "amoebanet-36": 128}
FIGURE_14 = {"gnmt-16": 2048, "bert-48@dapple": 128, "xlnet-36": 128, "amoebanet-36": 256}
PAPER_POLICIES = {"bert-48@dapple": 1.0, "xlnet-36": 1.02, "vgg-19@dapple": 1.1, "gnmt-16": 1.31}  # Table IV, config A
PAPER_RATIOS = {"bert-48@dapple": 0.06, "xlnet-36": 0.03, "gnmt-16": 0.10, "amoebanet-36": 0.18}  # Table V, config A
# What the authors' planner sends between servers at (their repository): a message alone, whatever other replicas send beside it
PAPER_MESSAGES_BYTES_PER_S = 1e9

_FOUND: Dict[Tuple[str, str, int, str], List[Hybrid]] = {}


def found(profile: ModelProfile, cluster: Cluster, batch: int, solver: str = "exact") -> List[Hybrid]:
    """Search results, each made once."""
    key = (profile.name, cluster.to_json(), batch, solver)
    if key not in _FOUND:
        _FOUND[key] = search(profile, cluster, batch, solver)
    return _FOUND[key]


def kind(candidate: Optional[Hybrid]) -> str:
    """In the notation of Table V."""
    if candidate is None:
        return "-"
    counts = [stage.replicas for stage in candidate.stages]
    if len(counts) == 1:
        return "DP"
    return "straight" if max(counts) == 1 else ":".join(str(count) for count in counts)


def agrees(ours: str, paper: str) -> bool:
    """The same kind; two-stage plans may differ by one device (Table V)."""
    if ":" not in ours or ":" not in paper:
        return ours == paper
    left, right = ([int(part) for part in plan.split(":")] for plan in (ours, paper))
    return len(left) == len(right) and all(abs(a - b) <= 1 for a, b in zip(left, right))


def best_of_kinds(profile: ModelProfile, cluster: Cluster, batch: int) -> Hybrid:
    """The fastest of the three kinds Table V knows: data parallel, two stages, straight."""
    every = [candidate for solver in ("data-parallel", "two-stages", "straight")
             for candidate in found(profile, cluster, batch, solver)[:1]]
    return min((dapple.polished(c) if len(c.stages) == 2 else c for c in every), key=lambda c: c.latency_s)


def as_printed(row: PaperRow, profile: ModelProfile, cluster: Cluster) -> Optional[Hybrid]:
    """The paper's plan, its split and micro-batches chosen best under our model."""
    if row.plan in ("DP", "straight"):
        every = found(profile, cluster, row.batch, "data-parallel" if row.plan == "DP" else "straight")
        return every[0] if every else None
    devices = [int(part) for part in row.plan.split(":")]
    best: Optional[Hybrid] = None
    for count in dapple.micro_batch_counts(profile, row.batch):
        costs = DappleCosts(profile, Servers(cluster), row.batch, count)
        for cut in range(1, costs.num_layers):
            stages = in_order(costs, [0, cut, costs.num_layers], devices)
            if costs.fits(stages):
                candidate = dapple.scored("paper", costs, stages)
                best = candidate if best is None or candidate.latency_s < best.latency_s else best
    return best


def times(candidate: Optional[Hybrid]) -> List[str]:
    return ["-", "-"] if candidate is None else [f"{candidate.formula_s:.3f}", f"{candidate.latency_s:.3f}"]


def report_table5(console: Console) -> None:
    rows, any_kind, same_kinds = [], 0, 0
    for row in TABLE_5:
        profile, cluster = load_builtin(row.model), Cluster.parse("dapple-" + row.config)
        start = time.process_time()
        best = found(profile, cluster, row.batch)[0]
        seconds = time.process_time() - start
        restricted, paper = best_of_kinds(profile, cluster, row.batch), as_printed(row, profile, cluster)
        any_kind += agrees(kind(best), row.plan)
        same_kinds += agrees(kind(restricted), row.plan)
        rows.append([row.model, row.config.upper(), row.plan, *times(paper),
                     "-" if row.ratio is None else f"{row.ratio:.2f}", kind(restricted), *times(restricted),
                     "yes" if agrees(kind(restricted), row.plan) else "no", kind(best), *times(best),
                     f"{best.ratio:.2f}", "yes" if agrees(kind(best), row.plan) else "no",
                     f"{paper.latency_s / best.latency_s:.2f}" if paper else "-", f"{seconds:.1f}"])
    console.print(table(
        "Table V: the paper's plan (best split and micro-batches under our model), our best plan of its three kinds, our best",
        ["model", "", "paper", "L", "played", "ACR", "of its kinds", "L", "played", "same", "ours", "L", "played", "ACR", "same",
         "gain", "CPU s"], rows))
    console.print(f"same kind: {same_kinds} of {len(rows)} among the paper's three kinds, {any_kind} of {len(rows)} "
                  f"among all plans")


def commanded(row: PaperRow) -> Tuple[Hybrid, float]:
    """What ``whale plan`` answers, and the seconds of a step that it prints: those of a simulation of every device and link."""
    command = ["plan", "--profile", row.model, "--cluster", f"dapple-{row.config}:16", "--global-batch", str(row.batch),
               "--search", "dapple", "--recompute", "none", "--zero", "none", "--offload", "none", "--json"]
    answer = json.loads(subprocess.check_output([sys.executable, "-m", "whale_tf.cli", *command]))
    profile, cluster = load_builtin(row.model), Cluster.parse(f"dapple-{row.config}:16")
    given = [(stage["first_layer"], stage["last_layer"] + 1, sorted(stage["devices"])) for stage in answer["stages"]]
    for one in found(profile, cluster, row.batch):
        rows = [(stage.first, stage.end, sorted(one.costs.servers.devices(stage.used, stage.taken))) for stage in one.stages]
        if one.micro_batches == answer["micro_batches"] and rows == given:
            return one, answer["latency_s"]
    # data parallelism with other micro-batches
    costs = DappleCosts(profile, Servers(cluster), row.batch, answer["micro_batches"])
    stages = in_order(costs, [0, *(end for _, end, _ in given)], [len(devices) for _, _, devices in given])
    return dapple.scored("command", costs, stages), answer["latency_s"]


def report_command(console: Console) -> None:
    rows, same, faster = [], 0, 0
    for row in TABLE_5:
        profile, cluster = load_builtin(row.model), Cluster.parse(f"dapple-{row.config}:16")
        ours, seconds = commanded(row)
        paper = as_printed(row, profile, cluster)
        is_same = agrees(kind(ours), row.plan)
        gain = paper.formula_s / ours.formula_s if paper else float("inf")
        same, faster = same + is_same, faster + (not is_same and gain >= 1.0)
        rows.append([row.model, row.config.upper(), row.plan, times(paper)[0], kind(ours), str(ours.micro_batches),
                     times(ours)[0], f"{seconds:.3f}", "yes" if is_same else "no",
                     "the paper's does not fit" if paper is None else f"{gain:.2f}"])
    console.print(table(
        "Table V by `whale plan --search dapple`; L: Eq. 1 and 2, for the paper's plan with its best split and micro-batches",
        ["model", "", "paper", "L", "ours", "micro-batches", "L", "simulated", "same", "L over ours"], rows))
    console.print(f"same kind: {same} of {len(rows)}; of the others, ours is faster by Eq. 1 and 2 in {faster}")


def printed_stages(costs: DappleCosts, plan: Optional[Sequence[Tuple[int, int]]]) -> Optional[Hybrid]:
    """A plan of Table VII; None: straight."""
    if plan is None:
        stages = SOLVERS["straight"](costs)
    else:
        cuts = [0] + [last + 1 for last, _ in plan]
        stages = in_order(costs, cuts, [devices for _, devices in plan])
    return dapple.scored("paper", costs, stages) if stages and costs.fits(stages) else None


def layers_of(candidate: Optional[Hybrid]) -> str:
    if candidate is None:
        return "-"
    if len(candidate.stages) > 8:
        return kind(candidate)
    return " ".join(f"{stage.first}-{stage.end - 1}@{stage.replicas}" for stage in candidate.stages)


def report_table7(console: Console) -> None:
    rows = []
    for model, (batch, ours, theirs) in TABLE_7.items():
        profile, cluster = load_builtin(model), Cluster.parse("dapple-a")
        every = [DappleCosts(profile, Servers(cluster), batch, m) for m in dapple.micro_batch_counts(profile, batch)]
        pipedream = first(found(profile, cluster, batch, "pipedream"))
        lines = [("ours", found(profile, cluster, batch)[0]), ("PipeDream, ours", pipedream)]
        for name, plan in (("DAPPLE, printed", ours), ("PipeDream, printed", theirs)):
            tried = [c for c in (printed_stages(costs, plan) for costs in every) if c is not None]
            lines.append((name, min(tried, key=lambda c: c.latency_s) if tried else None))
        for name, candidate in lines:
            count = str(candidate.micro_batches) if candidate else "-"
            rows.append([model, name, layers_of(candidate), count, *times(candidate)])
    console.print(table("Table VII: 2 x 8 of config A, layers and devices of each stage",
                        ["model", "planner", "stages", "micro-batches", "L", "played"], rows))


def first(candidates: List[Hybrid]) -> Optional[Hybrid]:
    return candidates[0] if candidates else None


def report_printed(console: Console) -> None:
    rows = []
    for row in TABLE_5:
        profile, cluster = load_builtin(row.model), Cluster.parse("dapple-" + row.config)
        count = found(profile, cluster, row.batch)[0].micro_batches
        costs = DappleCosts(profile, Servers(cluster), row.batch, count)
        line = [row.model, row.config.upper(), str(count)]
        latencies = []
        for solver in ("exact", "printed", "pipedream", "torchgpipe", "even"):
            start = time.process_time()
            stages = SOLVERS[solver](costs)
            seconds = time.process_time() - start
            latencies.append(costs.latency(stages) if stages else float("nan"))
            line += [f"{latencies[-1]:.3f}", f"{seconds:.2f}"]
        rows.append(line + [f"{100 * (latencies[1] / latencies[0] - 1):+.1f}%"])
    console.print(table("L by solver, at the micro-batches of our plan (CPU seconds of each search behind it)",
                        ["model", "", "M", "exact", "s", "printed", "s", "PipeDream", "s", "torchgpipe", "s", "even", "s",
                         "printed - exact"], rows))


def speedups(profile: ModelProfile, cluster: Cluster, batch: int) -> List[str]:
    """Hybrid, data parallel without and with overlap, over one device."""
    alone = single_device_seconds(profile, cluster, batch)
    every = found(profile, cluster, batch, "data-parallel")
    plain = min([c.latency_s for c in every if not c.overlapped], default=float("nan"))
    overlapped = min([c.latency_s for c in every], default=float("nan"))
    best = first(found(profile, cluster, batch))
    return ["-" if best is None else f"{alone / best.latency_s:.2f}",
            f"{alone / plain:.2f}", f"{alone / overlapped:.2f}", kind(best)]


def report_fig12(console: Console) -> None:
    rows = [[model, config.upper(), str(batch), *speedups(load_builtin(model), Cluster.parse("dapple-" + config), batch)]
            for model, batch in FIGURE_12.items() for config in "abc"]
    console.print(table("Fig. 12: speed-up over one V100 on 16 devices",
                        ["model", "config", "batch", "hybrid", "DP no overlap", "DP overlap", "plan"], rows))


def report_fig13(console: Console) -> None:
    rows = []
    for model, (batch, _, _) in TABLE_7.items():
        for size in (16, 32):
            profile, cluster = load_builtin(model), Cluster.parse(f"dapple-a:{size}")
            plain = first([c for c in found(profile, cluster, batch, "data-parallel") if not c.overlapped])
            theirs, ours = first(found(profile, cluster, batch, "pipedream")), found(profile, cluster, batch)[0]
            base = plain.latency_s if plain else float("nan")
            rows.append([model, f"{size // 8} x 8", f"{base / ours.latency_s:.2f}",
                         "-" if theirs is None else f"{base / theirs.latency_s:.2f}",
                         "-" if theirs is None else f"{theirs.latency_s / ours.latency_s:.2f}"])
    console.print(table("Fig. 13: speed-up over data parallelism without overlap (config A)",
                        ["model", "servers", "ours", "PipeDream", "ours / PipeDream"], rows))


def report_fig14(console: Console) -> None:
    whole = Cluster.parse("dapple-a")
    rows = [[model, str(batch), str(size), *speedups(load_builtin(model), whole.subset(range(size)), batch)]
            for model, batch in FIGURE_14.items() for size in (2, 4, 6, 8, 10, 12, 14, 16)]
    console.print(table("Fig. 14: speed-up over one V100, config A",
                        ["model", "batch", "GPUs", "hybrid", "DP no overlap", "DP overlap", "plan"], rows))


def report_policies(console: Console) -> None:
    rows = []
    for model in dict.fromkeys([*PAPER_POLICIES, *PAPER_RATIOS]):
        batch = next(row.batch for row in TABLE_5 if row.model == model)
        best = found(load_builtin(model), Cluster.parse("dapple-a"), batch, "two-stages")[0]
        elements = best.costs.elements(best.stages)
        seconds = [dapple.rehearse(elements, best.micro_batches, dapple.depths_of(best.costs, best.stages, policy))
                   for policy in ("PA", "PB")]
        ratio, policy = PAPER_RATIOS.get(model), PAPER_POLICIES.get(model)
        rows.append([model, f"{best.ratio:.2f}", f"{ratio_of_one_replica(best):.2f}", "-" if ratio is None else f"{ratio:.2f}",
                     f"{seconds[0] / seconds[1]:.2f}", "-" if policy is None else f"{policy:.2f}"])
    title = "Tables IV and V: two stages on config A; activation-communication ratio (ACR), warm-up policy PB over PA"
    console.print(table(title, [
        "model", "ACR, adapters shared", "of one replica at 1 GB/s", "paper", "PB over PA", "paper"], rows))


def ratio_of_one_replica(best: Hybrid) -> float:
    """The ACR as the paper's is met: the messages of one replica, alone on the network."""
    costs, stages = best.costs, best.stages
    sizes = [2 * costs.outputs[stage.first - 1] * costs.micro_batch / stage.replicas for stage in stages[1:]]
    work = [sum(costs.times(stage)) for stage in stages]
    return sum(sizes) / len(sizes) / PAPER_MESSAGES_BYTES_PER_S / (sum(work) / len(work))


def report_scale(console: Console) -> None:
    rows = []
    for size in (8, 16, 32, 64, 128, 256, 512, 1024):
        start = time.process_time()
        best = dapple.search(load_builtin("bert-48@dapple"), Cluster.parse(f"dapple-a:{size}"), 4 * size)[0]
        rows.append([str(size), f"{time.process_time() - start:.1f}", f"{best.latency_s:.3f}", best.describe()])
    console.print(table("search cost: BERT-48, 4 sequences a device, config A", ["devices", "CPU s", "step s", "plan"], rows))


REPORTS: Mapping[str, Callable[[Console], None]] = {
    "table5": report_table5, "command": report_command, "table7": report_table7, "printed": report_printed,
    "fig12": report_fig12, "fig13": report_fig13, "fig14": report_fig14, "policies": report_policies, "scale": report_scale}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(REPORTS), help="comma-separated: {}".format(", ".join(REPORTS)))
    console = Console(width=200)
    for name in chosen(parser, REPORTS):
        REPORTS[name](console)


if __name__ == "__main__":
    main()
