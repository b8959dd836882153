"""Whale section 5 predicted: Figures 11 to 14 and 19, and the models of section 5.3.2, beside the paper's figures.

Part of ``python -m benchmarks.simulator --only whale``.  The paper does not give batch sizes or numbers of micro-batches for its
Figures 11 to 14; those taken here stand in the tables.
"""
from __future__ import annotations

from typing import List, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.simulator import Options, Simulation, built_in_model, placement, simulate, uniform_3d

GIB = 2.0**30
Row = Sequence[object]


def rows() -> List[Row]:
    return pipelines() + nested() + classifiers() + scaling() + experts()


def cluster(count: int) -> Cluster:
    """Nodes of 8 V100 and 50 Gbit/s Ethernet."""
    return Cluster.parse(f"whale-v100:{count}")


def pipelines() -> List[Row]:
    """Fig. 11: Whale's schedule over GPipe, which recomputes by default."""
    found: List[Row] = []
    for stages, paper in ((4, "1.45"), (8, "1.14")):
        model, count = built_in_model("bert-large", 4), 4 * stages
        ours, theirs = (
            simulate(uniform_3d(model, 1, 1, stages, count, schedule, recompute=recompute), cluster(stages))
            for schedule, recompute in (("backward_first", "none"), ("gpipe", "full"))
        )
        what = f"{stages} stages, {count} micro-batches of 4: over GPipe"
        found.append(("bert-large", stages, what, paper, f"{ours.samples_per_s / theirs.samples_per_s:.2f}"))
    return found


def nested() -> List[Row]:
    """Fig. 12: two and four TaskGraphs about equal, eight slower."""
    alone = simulate(uniform_3d(built_in_model("bert-large", 8)), cluster(1)).samples_per_s
    found: List[Row] = []
    for count in (8, 16, 32):
        rates = [pipeline_and_data(stages, count, 32).samples_per_s / alone for stages in (2, 4, 8)]
        found.append(("bert-large", count, "speed-up with 2, 4, 8 TaskGraphs, 32 a GPU", "2 = 4 > 8", " ".join(
            f"{rate:.1f}" for rate in rates)))
    return found


def pipeline_and_data(stages: int, count: int, per_device: int) -> Simulation:
    """Pipelines inside the nodes, data parallelism over them; four micro-batches a stage."""
    replicas, micro_batches = count // stages, 4 * stages
    devices = placement(cluster(count), replicas, 1, stages, "tp-pp-dp")
    model = built_in_model("bert-large", per_device * count // micro_batches)
    strategy = uniform_3d(model, replicas, 1, stages, micro_batches, devices=devices)
    return simulate(strategy, cluster(count), Options(steady_state=True))


def classifiers() -> List[Row]:
    """Figs. 13 and 14: features replicated, classes divided, on the same devices."""
    found: List[Row] = []
    for name, paper in (("resnet-50-100k", {8: "1.13", 16: "1.66", 32: "2.43"}), ("resnet-50-1m", {8: "dp oom", 32: "dp oom"})):
        for count, text in paper.items():
            plain, split = data_and_hybrid(name, count)
            ratio = "dp oom" if plain.oom else f"{split.samples_per_s / plain.samples_per_s:.2f}"
            found.append((name, count, "hybrid over data parallel", text, ratio))
    rates = [data_and_hybrid("resnet-50-1m", count)[1].samples_per_s for count in (8, 32)]
    found.append(("resnet-50-1m", 32, "hybrid, scaling from 8 GPUs", "95%", f"{rates[1] / rates[0] / 4:.0%}"))
    return found


def data_and_hybrid(name: str, count: int) -> Tuple[Simulation, Simulation]:
    model = built_in_model(name, 32 * count)
    plain, hybrid = uniform_3d(model, count), uniform_3d(model, count, split=("classifier",))
    return simulate(plain, cluster(count)), simulate(hybrid, cluster(count))


def scaling() -> List[Row]:
    """Fig. 19: M6-10B with 8 stages and 35 micro-batches."""
    rates = []
    for nodes in (8, 32):
        devices = placement(cluster(8 * nodes), nodes, 1, 8, "tp-pp-dp")
        strategy = uniform_3d(built_in_model("m6-10b", nodes), nodes, 1, 8, 35, recompute="stage", devices=devices)
        rates.append(simulate(strategy, cluster(8 * nodes)).samples_per_s)
    return [("m6-10b", 256, "scaling from 8 to 32 nodes", "91%", f"{rates[1] / rates[0] / 4:.0%}")]


SAMPLES, DAYS = 100e6, 1.5  # M6-MoE-100B on 128 V100 (section 5.3.2)


def experts() -> List[Row]:
    """Section 5.3.2: experts divided over all devices, all else data parallel."""
    found: List[Row] = []
    for name, count, offload, paper in (
        ("m6-moe-100b", 128, "none", f"fits, {SAMPLES / (DAYS * 86400):.0f} samples/s"),
        ("m6-moe-1t", 480, "none", "fits"),
        ("m6-moe-10t", 512, "none", ""),
        ("m6-moe-10t", 512, "v0", "fits"),
    ):
        strategy = uniform_3d(built_in_model(name, 8 * count), count, recompute="full", offload=offload)
        result = simulate(strategy, cluster(count))
        peak = max(result.peak_memory_bytes) / GIB
        text = "oom" if result.oom else f"fits, {result.samples_per_s:.0f} samples/s, {peak:.1f} GiB"
        found.append((name, count, "no offloading" if offload == "none" else "offload " + offload, paper, text))
    return found
