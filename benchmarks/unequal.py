"""Predicted gains on unequal GPUs: Whale's Figures 17 and 18, simulated.

    python -m benchmarks.unequal

Data parallelism on 8 V100 and 8 P100: the same local batch everywhere, against parts by speed and memory. Pipelines of four
stages on 4 V100 and 4 P100, two model replicas of the same mix: stages of equal work in the order of the devices, against
stages by speed, the larger devices first. Step times are the simulator's; the paper's figures are measurements.
"""
from __future__ import annotations

from dataclasses import replace
from typing import List

from rich.console import Console

from benchmarks.measure import table
from benchmarks.papers.stages import even_stages
from whale_tf.balance import exact_stages
from whale_tf.cluster import Cluster
from whale_tf.planner.candidate import Candidate, Stage
from whale_tf.planner.partition import auto_partition
from whale_tf.planner.simulated import simulated, with_slices
from whale_tf.planner.stage_costs import StageCosts
from whale_tf.profiler.model_profile import ModelProfile, load_builtin

# local batches that fit 16 GiB and are usual for the model; the paper does not give its own
DATA_PARALLEL = (("resnet-50@dapple", 64, "1.3 to 1.4"), ("bert-large@dapple", 6, "1.3 to 1.4"), ("gnmt-16", 64, "1.3 to 1.4"))
PIPELINES = (("bert-large@dapple", 64, 16, "about 1.2"), ("t5-large", 32, 16, "about 1.2"))


def data_parallel(profile: ModelProfile, cluster: Cluster, local: int, balance: str) -> Candidate:
    devices = tuple(range(len(cluster)))
    stage = Stage(first_layer=0, last_layer=len(profile.layers) - 1, devices=(devices,))
    batch = local * len(cluster)
    result = Candidate(
        search=balance, model=profile.name, cluster=cluster.name, global_batch=batch, num_devices=len(cluster), kind="dp",
        stages=(stage,), micro_batches=1, latency_s=0.0, peak_memory_bytes=(0,) * len(cluster),
        search_seconds=0.0, description="data parallel", profile=profile)
    return simulated(result, cluster, balance)


def report_data_parallel(console: Console) -> None:
    cluster = Cluster.parse("whale-8v100-8p100")
    rows: List[List[str]] = []
    for name, local, paper in DATA_PARALLEL:
        profile = replace(load_builtin(name), batch_granularity=1)
        even, aware = (data_parallel(profile, cluster, local, balance) for balance in ("even", "exact"))
        slices = with_slices(aware, profile, cluster, "exact").task_graphs[0].slices
        parts = f"{slices[0]} : {slices[-1]}" if slices else "1 : 1"
        rows.append([name, str(local), parts, _ms(even), _ms(aware), f"{even.latency_s / aware.latency_s:.2f}", paper])
    console.print(table("Fig. 17: data parallelism on 8 V100 + 8 P100", [
        "model", "local batch", "V100 : P100", "even ms", "aware ms", "speed-up", "paper"], rows))


def report_pipelines(console: Console) -> None:
    cluster = Cluster.parse("whale-4v100-4p100")
    rows: List[List[str]] = []
    for name, batch, micro_batches, paper in PIPELINES:
        profile = replace(load_builtin(name), batch_granularity=1)
        costs = StageCosts(profile, cluster)
        even, aware = (
            simulated(replace(auto_partition(costs, batch, 4, micro_batches, solve), profile=profile), cluster)
            for solve in (even_stages, exact_stages))
        rows.append([name, _layers(even), _layers(aware), _types(aware, cluster), _ms(even), _ms(aware),
                     f"{even.latency_s / aware.latency_s:.2f}", paper])
    console.print(table("Fig. 18: four stages on 4 V100 + 4 P100, two model replicas", [
        "model", "even layers", "aware layers", "aware devices", "even ms", "aware ms", "speed-up", "paper"], rows))


def _layers(result: Candidate) -> str:
    return "+".join(str(stage.last_layer - stage.first_layer + 1) for stage in result.stages)


def _types(result: Candidate, cluster: Cluster) -> str:
    return " ".join(cluster.devices[stage.devices[0][0]].type[:4] for stage in result.stages)


def _ms(result: Candidate) -> str:
    return "{:.1f}{}".format(1e3 * result.latency_s, "" if result.fits else " (does not fit)")


def main() -> None:
    console = Console(width=140)
    report_data_parallel(console)
    report_pipelines(console)


if __name__ == "__main__":
    main()
