"""AMP: the exact layer assignment, the whole loop, and predictions beside measured run times.

    python -m benchmarks.amp [--reference DIRECTORY]

``--reference``: a directory with what the AMP authors published (``amp_dp_calls_*.json``: inputs of their dynamic
programming with the exact optimum; ``amp_profiles.json``: layer times; ``amp_results_*.json``: run times of strategies on
their GPUs).  Without it only the sections that need nothing else are printed.  Times are CPU seconds.
"""
from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from typing import Any, Dict, List, Sequence, Tuple

import numpy
from rich.console import Console
from scipy.stats import spearmanr

from benchmarks.measure import table
from benchmarks.papers import amp as papers
from whale_tf.cluster import Cluster
from whale_tf.planner.amp.cost import AmpCosts, AmpStrategy, Degrees
from whale_tf.planner.amp.layer_assignment import assign, evaluate
from whale_tf.planner.amp.placement import megatron
from whale_tf.planner.amp.search import search
from whale_tf.profiler.model_profile import Measurement, ModelProfile, load_builtin

SETTINGS = {"homogeneous": "amp-homogeneous", "het_cluster": "amp-het"}
PAPER_SPEARMAN = {"homogeneous": 0.935, "het_cluster": 0.394}  # the authors' predictions against their run times
PAPER_SECONDS = {2: 58.0, 4: 325.6, 8: 890.3, 16: 1627.4}  # Table 2
DEVICES = {"gpt2_G4": "T4", "gpt2_P3": "V100-16GB"}
REPEATS = 5


def read(reference: str, name: str) -> Any:
    with open(os.path.join(reference, name), encoding="utf8") as handle:
        return json.load(handle)


def report_assignments(console: Console, reference: str) -> None:
    """Their inputs, the cost of our assignment against theirs and against the recorded optimum."""
    rows = []
    for setting in SETTINGS:
        calls = read(reference, f"amp_dp_calls_{setting}.json")["calls"]
        problems = [(numpy.array(call["t"]), numpy.array(call["e"]).reshape(call["L"] - 1, call["k"] - 1), call["gas"], call["k"])
                    for call in calls]
        seconds = []
        for _ in range(REPEATS):
            start = time.process_time()
            found = [assign(*problem) for problem in problems]
            seconds.append(time.process_time() - start)
        worse = better = 0
        largest = 0.0
        for call, problem, ours in zip(calls, problems, found):
            assert ours is not None
            optimum, theirs = (evaluate(problem[0], problem[1], call["gas"], cuts_of(call[name]))
                               for name in ("exact_stage_sizes", "amp_stage_sizes"))
            worse += ours.cost > optimum * (1 + 1e-12)
            better += ours.cost < theirs * (1 - 1e-9)
            largest = max(largest, theirs / ours.cost - 1)
        rows.append([setting, str(len(calls)), str(worse), str(better), f"{100 * largest:.2f}%",
                     f"{1e3 * min(seconds):.1f}", "{:.1f}".format(sum(call["amp_cpu_s"] for call in calls))])
    console.print(table("layer assignment on the authors' inputs", [
        "setting", "calls", "above optimum", "below the authors'", "by up to", "ms in all", "authors' code: s"], rows))


def cuts_of(sizes: Sequence[int]) -> Tuple[int, ...]:
    return (0, *numpy.cumsum(sizes).tolist())


def measured_profile(reference: str) -> ModelProfile:
    """Our GPT-2 layer table with the authors' layer times: forward passes of one sample, backward twice that."""
    tables = read(reference, "amp_profiles.json")["tables"]
    base = load_builtin("gpt2-24")
    layers = []
    for index, layer in enumerate(base.layers):
        points = tuple(Measurement(device=device, tensor_parallel=int(tmp), batch=1, forward_s=column[index],
                                   backward_s=2 * column[index])
                       for name, device in DEVICES.items() for tmp, column in tables[name]["tmp"].items())
        layers.append(replace(layer, measured=points))
    return replace(base, layers=tuple(layers))


def report_predictions(console: Console, reference: str) -> None:
    """Spearman of predicted and measured seconds over the strategies that ran, and which ones memory was predicted for."""
    profile, rows = measured_profile(reference), []
    variants: Dict[str, Dict[str, bool]] = {
        "ours (blocking messages)": {"blocking": True}, "overlapped messages": {},
        "rings not sharing adapters": {"blocking": True, "shared_adapters": False}}
    for setting, name in SETTINGS.items():
        cluster = Cluster.parse(name)
        published = read(reference, f"amp_results_{setting}.json")["strategies"]
        results = [row for row in published if row["status"] != "not_run"]
        ran = [row for row in results if row["status"] == "ok"]
        line = [setting, str(len(ran)), f"{PAPER_SPEARMAN[setting]:.3f}"]
        for options in variants.values():
            costs = AmpCosts(profile, cluster, 32, **options)
            line.append("{:.3f}".format(spearmanr([costs.estimate(strategy_of(row, cluster)).seconds for row in ran],
                                                  [row["measured_s"] for row in ran]).correlation))
        costs = AmpCosts(profile, cluster, 32)
        fits = [(row["status"] == "ok", costs.estimate(strategy_of(row, cluster)).fits) for row in results]
        line.append(f"{sum(a == b for a, b in fits)} of {len(fits)}")
        rows.append(line)
    console.print(table("predicted against measured run times (DeepSpeed sends and receives blocking)", [
        "setting", "strategies", "authors'", *("Spearman: " + name for name in variants), "fits memory or not, as it was"], rows))


def strategy_of(row: Dict[str, Any], cluster: Cluster) -> AmpStrategy:
    degrees = Degrees(row["pp"], row["dp"], row["tmp"])
    return AmpStrategy(degrees, row["mbs"], megatron(cluster, degrees), tuple(row["partition"]))


def report_loop(console: Console, profile: ModelProfile) -> None:
    """The whole of Algorithm 1, and the baselines with the same cost model."""
    rows = []
    for name, model, batch in (("amp-homogeneous", profile, 32), ("amp-het", profile, 32),
                               ("amp-p3", load_builtin("transgan"), 64)):
        cluster, line = Cluster.parse(name), [name, model.name]
        for method in papers.SEARCHES.values():
            start = time.process_time()
            found = method(AmpCosts(model, cluster, batch))
            seconds = time.process_time() - start
            line += [f"{found[0].estimate.seconds:.3f}", f"{seconds:.3f}"]
            if method is search:
                degrees = found[0].strategy.degrees
                line[2:2] = [str(len(found)), "{} x {} x {}, {}".format(*degrees, found[0].strategy.micro_batch)]
        rows.append(line)
    console.print(table("the whole loop: seconds of the best strategy, CPU seconds of the search", [
        "cluster", "model", "strategies", "pp x dp x tmp, micro-batch", "AMP", "CPU s", "Megatron", "CPU s", "random", "CPU s",
        "annealing", "CPU s"], rows))


def report_layer_balance(console: Console) -> None:
    """Table 5's question: our degrees with layers balanced by cost, by number, by parameters."""
    costs = AmpCosts(load_builtin("transgan"), Cluster.parse("amp-p3"), 64)
    best = search(costs)[0]
    rows = [["AMP", f"{best.estimate.seconds:.3f}", str(list(best.strategy.cuts))]]
    for balance in ("layers", "parameters"):
        other = next(c for c in papers.megatron(costs, balance))
        rows.append(["Megatron, by " + balance, f"{other.estimate.seconds:.3f}", str(list(other.strategy.cuts))])
    console.print(table("heterogeneous model: seconds of a step", ["strategy", "s", "cuts"], rows))


def report_sweep(console: Console) -> None:
    """Table 2: n nodes of n T4, GPT-2 with a batch of 32; and larger clusters with a batch that grows with them."""
    rows = []
    for size in (2, 4, 8, 16):
        nodes = [{"devices": f"T4:{size}", "links": {"pcie": {"bandwidth_gbits_per_s": 50}}, "count": size,
                  "nic": {"bandwidth_gbits_per_s": 50}}]
        rows.append(sweep_row(Cluster.parse({"name": f"{size} x {size}", "nodes": nodes}), 32,
                              f"{PAPER_SECONDS[size]:.0f}"))
    for devices in (8, 32, 128, 512, 1024):
        rows.append(sweep_row(Cluster.parse(f"dapple-a:{devices}"), 2 * devices, "-"))
    console.print(table("search cost: GPT-2, 24 layers", ["cluster", "devices", "batch", "strategies", "CPU s", "paper: s",
                                                          "step s", "pp x dp x tmp, micro-batch"], rows))


def sweep_row(cluster: Cluster, batch: int, paper: str) -> List[str]:
    start = time.process_time()
    found = search(AmpCosts(load_builtin("gpt2-24"), cluster, batch))
    seconds = time.process_time() - start
    best = found[0]
    return [cluster.name, str(len(cluster)), str(batch), str(len(found)), f"{seconds:.3f}", paper,
            f"{best.estimate.seconds:.3f}", "{} x {} x {}, {}".format(*best.strategy.degrees, best.strategy.micro_batch)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reference", help="directory with the AMP authors' published data")
    reference = parser.parse_args().reference
    console = Console(width=200)
    if reference:
        report_assignments(console, reference)
        report_predictions(console, reference)
    report_loop(console, measured_profile(reference) if reference else load_builtin("gpt2-24"))
    report_layer_balance(console)
    report_sweep(console)


if __name__ == "__main__":
    main()
