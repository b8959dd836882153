"""What memory passes are worth on the papers' models, and the simulator beside published numbers for each pass.

    python -m benchmarks.papers_memory [--only plans,table6,experts,zero,megatron,bubbles]

Plans are those of ``whale plan`` with ``--zero auto --offload auto --recompute auto``; all times are simulated.  Published
numbers: ZeRO (Rajbhandari et al. 2020, Figure 1 and section 7), selective recomputation (Korthikanti et al. 2022, Tables 2 and
4), zero-bubble pipelines (Qi et al. 2023, Tables 3 and 4), DAPPLE Table VI, Whale section 5.3.
"""

from __future__ import annotations

import argparse
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

from rich.console import Console

from benchmarks.measure import chosen, table
from benchmarks.simulator import TABLE_VI
from whale_tf.cluster import Cluster
from whale_tf.errors import InfeasibleError
from whale_tf.planner.candidate import Candidate
from whale_tf.planner.measures import AUTO, Allowed
from whale_tf.planner.search import search
from whale_tf.profiler.model_profile import ModelProfile
from whale_tf.simulator import Simulation, built_in_model, simulate, uniform_3d
from whale_tf.simulator.laws import as_run
from whale_tf.simulator.model_graph import OPTIMIZERS, ModelGraph
from whale_tf.simulator.simulate import Options
from whale_tf.simulator.transformation import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from whale_tf.simulator.zoo.transformers import transformer

GIB = 2.0**30
EVERYTHING = Allowed(AUTO, AUTO, AUTO)
NOTHING = Allowed("none")


class Trained(NamedTuple):
    """A model that a paper trained on a cluster; ``batch``: the paper's, or ours where it gives none."""

    paper: str
    model: str
    cluster: str
    batch: int


TRAINED = (
    Trained("Whale 5.3.1", "m6-10b", "whale-v100:8", 32),
    Trained("Whale 5.3.1", "m6-10b", "whale-v100:64", 256),
    Trained("Whale Fig. 18", "t5-large", "V100-32GB:4,P100-16GB:4", 64),
    Trained("Whale Fig. 18", "bert-large", "V100-32GB:4,P100-16GB:4", 64),
    Trained("Whale Fig. 12", "bert-large", "whale-v100:8", 256),
    Trained("Proteus Fig. 8", "gpt-1.5b", "hc2", 32),
    Trained("Rhino", "gpt-1.5b", "V100-32GB:8", 32),
    Trained("DAPPLE Table V", "vgg-19@dapple", "dapple-c", 2048),
    Trained("DAPPLE Table V", "bert-48@dapple", "dapple-a", 64),
    Trained("DAPPLE Table V", "amoebanet-36", "dapple-a", 128),
)


def found(one: Trained, allowed: Allowed) -> Tuple[Optional[Candidate], str]:
    """The plan, or why there is none."""
    try:
        return search(ModelProfile.parse(one.model), Cluster.parse(one.cluster), one.batch, "dapple", allowed), ""
    except InfeasibleError as error:
        least = error.least_bytes
        return None, "none fits" if least is None else f"none fits: at least {least / GIB:.1f} GiB"


def report_plans(console: Console) -> None:
    rows = []
    for one in TRAINED:
        usable = min(device.usable_bytes for device in Cluster.parse(one.cluster).devices) / GIB
        plain, why = found(one, NOTHING)
        best, why_not = found(one, EVERYTHING)
        without = why if plain is None else f"{plain.latency_s:.3f} s, {max(plain.peak_memory_bytes) / GIB:.1f}"
        rows.append([one.paper, one.model, one.cluster, str(one.batch), f"{usable:.1f}", without, *_told(best, why_not)])
    console.print(table("Plans where the papers trained (seconds of a step; GiB on the fullest device)", [
        "paper", "model", "cluster", "batch", "usable", "nothing done", "step s", "peak", "kind", "measures", "without each"],
        rows))


def _told(best: Optional[Candidate], why: str) -> List[str]:
    if best is None:
        return [why, "", "", "", ""]
    kind = f"{best.kind}, {len(best.stages)} stage(s), {best.micro_batches} micro-batches"
    return [f"{best.latency_s:.3f}", f"{max(best.peak_memory_bytes) / GIB:.1f}", kind,
            ", ".join(best.measures.described()) or "none", "; ".join(best.without) or "-"]


def report_table6(console: Console) -> None:
    rows, usable = [], Cluster.parse("dapple-b").devices[0].usable_bytes / 1e9
    for (schedule, recompute, count), (rate, peak) in TABLE_VI.items():
        line = [schedule, recompute, str(count), "out of memory" if rate is None else f"{rate:.2f}",
                "-" if peak is None else f"{peak:.1f}"]
        for model, options in ((built_in_model("bert-48", 2), Options()), (as_tensorflow(2), Options(xla=False))):
            strategy = uniform_3d(model, 1, 1, 2, count, schedule, recompute=recompute)
            result = simulate(strategy, Cluster.parse("dapple-b"), options)
            mean, largest = sum(result.peak_memory_bytes) / 2e9, max(result.peak_memory_bytes) / 1e9
            line += [f"{result.samples_per_s:.2f}", f"{mean:.1f}", f"{largest:.1f}{' (does not fit)' if result.oom else ''}"]
        rows.append(line)
    console.print(table(f"DAPPLE Table VI: BERT-48, two stages, micro-batches of 2 on V100-16GB ({usable:.1f} GB for a step)", [
        "schedule", "recompute", "M", "samples/s", "mean GB", "fused kernels", "mean GB", "fullest GB", "TensorFlow's", "mean GB",
        "fullest GB"], rows))


def as_tensorflow(batch: int) -> ModelGraph:
    """BERT-48 as the profile of DAPPLE's authors reads it, 384 tokens and two answers, updated by Adam with weight decay, as
    their script does (AlibabaPAI/DAPPLE, bert/run.sh), in ops that all wait for the last micro-batch."""
    adam = OPTIMIZERS["adamw"]._replace(early_bytes=0)
    bert = transformer("bert-48", batch, 48, 1024, 16, 384, 30522, pre_norm=False, predicted=2, optimizer=adam)
    return as_run(bert, "fp32", False)


SAMPLES_PER_S = 100e6 / (1.5 * 86400)  # Whale section 5.3.2


def report_experts(console: Console) -> None:
    rows = []
    for batch in (8, 16, 32, 64):
        for recompute in ("none", "selective", "full"):
            for xla in (None, True):
                model = built_in_model("m6-moe-100b", batch * 128)
                model = model if xla is None else as_run(model, "fp16", xla)
                result = simulate(uniform_3d(model, 128, recompute=recompute), Cluster.parse("whale-v100:128"), Options(xla=xla))
                rows.append([str(batch), recompute, "fused, by hand" if xla is None else "XLA's", *_experts(result)])
    console.print(table(f"M6-MoE-100B on 128 V100 (paper: {SAMPLES_PER_S:.0f} samples/s, its batch is not given)", [
        "a GPU", "recompute", "kernels", "samples/s", "over the paper's", "computing", "messages, exposed", "peak GiB"], rows))


def _experts(result: Simulation) -> List[str]:
    use, step = result.devices[0], result.step_time_s
    return [f"{result.samples_per_s:.0f}", f"{result.samples_per_s / SAMPLES_PER_S:.2f}", f"{use.computation_s / step:.0%}",
            f"{use.exposed_s / step:.0%}", f"{max(result.peak_memory_bytes) / GIB:.1f}{' (does not fit)' if result.oom else ''}"]


# ZeRO's Table 1 and Figure 1: GB of model states a device, 7.5 billion parameters in 16 bits with Adam: of v1, v2, v3
ZERO_TABLE: Mapping[int, Tuple[float, float, float]] = {64: (31.4, 16.6, 1.9)}
ZERO_PARAMETERS, ZERO_BASELINE = 7.5e9, 120.0
ZERO_VOLUME = {"v1": 1.0, "v2": 1.0, "v3": 1.5}  # section 7: over data parallelism's


def report_zero(console: Console) -> None:
    rows = []
    for count, published in ZERO_TABLE.items():
        model = transformer("gpt", count, 2, 1024, 16, 128, 8192, precision="fp16")
        cluster = Cluster.parse(f"V100-32GB:{count}" if count <= 8 else f"{count // 8}xV100-32GB:8")
        plain = states(model, cluster, "none")
        base = volume(model, cluster, "none")
        rows.append(["none", str(count), f"{ZERO_BASELINE:.1f}", f"{plain:.1f}", f"{plain / ZERO_BASELINE:.3f}", "1", "1.00"])
        for level, paper in zip(("v1", "v2", "v3"), published):
            ours, moved = states(model, cluster, level), volume(model, cluster, level) / base
            rows.append([level, str(count), f"{paper:.1f}", f"{ours:.1f}", f"{ours / paper:.3f}", f"{ZERO_VOLUME[level]:g}",
                         f"{moved:.2f}"])
    console.print(table("ZeRO: GB of model states for 7.5 billion parameters, and bytes sent over data parallelism's", [
        "level", "devices", "paper", "simulated", "ratio", "volume, paper", "simulated"], rows))


def states(model: ModelGraph, cluster: Cluster, zero: str) -> float:
    """GB that a device holds for the whole step, of a model with so many parameters."""
    result = simulate(uniform_3d(model, len(cluster), zero=zero), cluster)
    held = sum(result.program.static_bytes[0].values())
    return held / model.parameter_count * ZERO_PARAMETERS / 1e9


def volume(model: ModelGraph, cluster: Cluster, zero: str) -> float:
    """What a device sends in collectives of parameters and gradients, in parameters: an all-reduce sends twice."""
    result = simulate(uniform_3d(model, len(cluster), zero=zero), cluster)
    times = {ALL_REDUCE: 2.0, ALL_GATHER: 1.0, REDUCE_SCATTER: 1.0}
    return sum(one.size_bytes * times.get(one.label, 0.0) for one in result.program.instructions)


# Korthikanti et al. Table 4: forward and backward ms of a layer of the 22B model
MEGATRON_LAYER = {"none": (7.7, 11.9), "full": (7.7, 19.5), "selective": (7.7, 13.2)}
A, S, B, H, T = 64, 2048, 4, 6144, 8  # heads, length, examples, width, tensor parallelism of the 22B model
# Table 2, bytes of a layer: everything kept, attention's inside computed again, everything computed again
MEGATRON_BYTES = {"none": S * B * H * (10 + 24 / T + 5 * A * S / (H * T)), "selective": S * B * H * (10 + 24 / T),
                  "full": 2.0 * S * B * H}


def report_megatron(console: Console) -> None:
    rows, base = [], {name: layer(name) for name in MEGATRON_LAYER}
    for name, (forward, backward) in MEGATRON_LAYER.items():
        seconds, held = base[name]
        paper, ours = (forward + backward) / sum(MEGATRON_LAYER["none"]) - 1, seconds / base["none"][0] - 1
        kept = MEGATRON_BYTES[name]
        rows.append([name, f"{forward + backward:.1f}", f"{seconds * 1e3:.1f}", f"{seconds * 1e3 / (forward + backward):.2f}",
                     f"{paper:.0%}", f"{ours:.0%}", f"{kept / 2**20:.0f}", f"{held / 2**20:.0f}", f"{held / kept:.2f}"])
    console.print(table("Megatron: a layer of 22B parameters on 8 A100 (milliseconds, and MiB that wait for the backward pass)", [
        "recompute", "ms, paper", "simulated", "ratio", "overhead, paper", "simulated", "MiB, paper", "simulated", "ratio"],
        rows))


def layer(recompute: str) -> Tuple[float, float]:
    """(seconds, bytes that are kept) of one more layer."""
    found = []
    for count in (2, 4):
        model = transformer("gpt-22b", B, count, H, A, S, 51200, precision="fp16")
        result = simulate(uniform_3d(model, 1, T, recompute=recompute), Cluster.parse("A100-80GB:8"))
        held = result.memory[0].bytes.max() - sum(result.program.static_bytes[0].values())
        found.append((result.step_time_s - update_seconds(result), held))
    return tuple((b - a) / 2 for a, b in zip(*found))  # type: ignore[return-value]


def update_seconds(result: Simulation) -> float:
    """Of the optimizer, which the paper's times of a layer leave out."""
    seconds = 0.0
    for task, number in enumerate(result.graph.instruction):
        if number >= 0 and result.program.instructions[number].label == "update":
            seconds += result.graph.seconds[task] if result.graph.slots[task] == (0,) else 0.0
    return seconds


class Pipelined(NamedTuple):
    """A model of Qi et al. (Table 3); samples a GPU and second by number of micro-batches (Table 4), GB (Table 4)."""

    layers: int
    heads: int
    width: int
    stages: int
    batch: int
    rates: Mapping[str, Mapping[int, float]]
    memory: Mapping[str, float]


NAMES = {"backward_first": "1F1B", "zero_bubble_h1": "ZB-1p", "zero_bubble_h2": "ZB-2p", "interleaved": "1F1B-I"}
PIPELINED: Dict[str, Pipelined] = {
    "1.5B": Pipelined(22, 24, 2304, 8, 6, {
        "1F1B": {24: 11.8, 32: 12.5, 64: 13.6}, "ZB-1p": {24: 12.9, 32: 13.4, 64: 14.2}, "ZB-2p": {24: 14.5, 32: 14.8, 64: 14.9},
        "1F1B-I": {24: 13.1, 32: 13.4, 64: 13.9}}, {"1F1B": 30, "ZB-1p": 32, "ZB-2p": 59, "1F1B-I": 40}),
    "6.2B": Pipelined(30, 32, 4096, 8, 3, {
        "1F1B": {24: 3.50, 32: 3.70, 64: 4.03}, "ZB-1p": {24: 3.88, 32: 4.00, 64: 4.20}, "ZB-2p": {24: 4.32, 32: 4.35, 64: 4.39},
        "1F1B-I": {24: 4.01, 32: 4.08, 64: 4.19}}, {"1F1B": 39, "ZB-1p": 42, "ZB-2p": 70, "1F1B-I": 48}),
}  # fmt: skip


def report_bubbles(console: Console) -> None:
    rows = []
    for name, one in PIPELINED.items():
        for count in one.rates["1F1B"]:
            base = pipelined(one, count, "backward_first")
            for schedule, paper in NAMES.items():
                result = pipelined(one, count, schedule)
                published = one.rates[paper][count]
                ours, theirs = result.samples_per_s / base.samples_per_s, published / one.rates["1F1B"][count]
                held = max(result.peak_memory_bytes) / max(base.peak_memory_bytes)
                memory = one.memory[paper] / one.memory["1F1B"]
                rate = result.samples_per_s / one.stages
                rows.append([name, str(count), f"{paper}, {schedule}", f"{published:g}", f"{rate:.3g}", f"{rate / published:.2f}",
                             f"{theirs:.2f}", f"{ours:.2f}", f"{ours / theirs:.2f}", f"{memory:.2f}", f"{held:.2f}"])
    console.print(table("Zero bubbles (Qi et al. 2023): samples a GPU and second on A100, over 1F1B's, and memory over 1F1B's", [
        "model", "M", "schedule", "paper", "simulated", "ratio", "over 1F1B, paper", "simulated", "ratio", "memory, paper",
        "simulated"], rows))


def pipelined(one: Pipelined, count: int, schedule: str) -> Simulation:
    model = transformer("gpt", one.batch, one.layers, one.width, one.heads, 1024, 51200, precision="fp16")
    chunks = (one.layers + 2) // one.stages
    parts = authors_stages(model, one.stages * (chunks if schedule == "interleaved" else 1))
    strategy = uniform_3d(model, 1, 1, one.stages, count, schedule, chunks=chunks, parts=parts)
    return simulate(strategy, Cluster.parse(f"A100-80GB:{one.stages}"))


def authors_stages(model: ModelGraph, count: int) -> List[Tuple[int, ...]]:
    """Equal numbers of layers, of which the first stage's embedding and the last one's head count as one (section 5.1)."""
    rows: Dict[str, List[int]] = {}
    for number, op in enumerate(model.ops):
        end = "head" if "block0" in rows else "embedding"
        rows.setdefault(op.path[0] if op.path[0].startswith("block") else end, []).append(number)
    layers = list(rows.values())
    size = len(layers) // count
    return [tuple(number for row in layers[first:first + size] for number in row) for first in range(0, len(layers), size)]


REPORTS: Mapping[str, Callable[[Console], None]] = {
    "plans": report_plans, "table6": report_table6, "experts": report_experts, "zero": report_zero, "megatron": report_megatron,
    "bubbles": report_bubbles}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(REPORTS), help="comma-separated: {}".format(", ".join(REPORTS)))
    console = Console(width=220)
    for name in chosen(parser, REPORTS):
        REPORTS[name](console)


if __name__ == "__main__":
    main()
