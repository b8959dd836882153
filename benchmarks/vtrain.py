"""The simulator beside vTrain's measurements: steps of GPT on up to 512 A100, whose kernels are written by hand.

    git clone https://github.com/VIA-Research/vTrain
    python -m benchmarks.vtrain --data vTrain [--every N] [--dispatch MICROSECONDS]

``--data``: a clone of VIA-Research/vTrain (commit f8dda84), whose ``data/ground_truth_single.csv`` and ``ground_truth_multi.csv``
hold steps of Megatron-DeepSpeed that its authors measured (Bang et al., MICRO 2024, arXiv 2312.12391).  What a row does not say
is in the repository's ``config/validation``: all blocks are recomputed, 1F1B, gradients are summed after the backward pass, nodes
of 8 GPUs with NVLink and 800 Gbit/s.  ``--every``: only every N-th row on one node (1: all 1,440, which take long).
``--dispatch``: the least time of an op, which PyTorch's host takes to start its kernels (0: as ``whale simulate`` counts).
"""

from __future__ import annotations

import argparse
import csv
import math
import os
from functools import lru_cache
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from rich.console import Console
from scipy.stats import spearmanr

from benchmarks.measure import table
from benchmarks.published import MIXED_ADAM
from whale_tf.cluster import Cluster
from whale_tf.cluster.devices import Device
from whale_tf.simulator import Options, Simulator, uniform_3d
from whale_tf.simulator.costs import OpEstimator, OpPart
from whale_tf.simulator.model_graph import ModelGraph
from whale_tf.simulator.zoo.transformers import transformer

VOCABULARY = 50257  # of the authors' configurations; Megatron-LM pads it
PADDED = 128  # to a multiple of this, for each device of tensor parallelism
ADAPTERS = {"bandwidth_gbits_per_s": 200, "latency_us": 5, "count": 4}  # 800 Gbit/s a node
ONE_NODE, SEVERAL_NODES = "one node", "several nodes"
FILES = {ONE_NODE: "ground_truth_single.csv", SEVERAL_NODES: "ground_truth_multi.csv"}


class Run(NamedTuple):
    """A row of the authors' files; ``batch`` and ``micro_batch`` in sequences of all devices, and of one replica."""

    setting: str
    gpus: int
    batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    tokens: int
    tp: int
    dp: int
    pp: int
    measured_s: float

    @property
    def micro_batches(self) -> int:
        return self.batch // (self.dp * self.micro_batch)


def runs(data: str, setting: str) -> List[Run]:
    """The rows of a file, whose last columns are the same in both."""
    with open(os.path.join(data, "data", FILES[setting]), encoding="utf-8-sig") as handle:
        rows = [[cell.strip() for cell in row[-11:]] for row in csv.reader(handle)][1:]
    return [Run(setting, *map(int, row[:-1]), float(row[-1]) * 1e-3) for row in rows if row]


@lru_cache(maxsize=None)
def simulator_of(gpus: int) -> Simulator:
    node = {"devices": f"A100-80GB:{min(gpus, 8)}", "links": "default"}
    if gpus > 8:
        node.update(nic=ADAPTERS, count=gpus // 8)
    return Simulator(Cluster.parse({"name": f"{gpus} A100", "nodes": [node]}), Options(steady_state=True))


class Dispatched(OpEstimator):
    """Ops that take at least as long as the host takes to start them."""

    def __init__(self, model: ModelGraph, least_s: float) -> None:
        super().__init__(model)
        self.least_s = least_s

    def seconds(self, part: OpPart, device: Device) -> float:
        return max(self.least_s, super().seconds(part, device))


@lru_cache(maxsize=64)
def priced(batch: int, layers: int, hidden: int, heads: int, tokens: int, tp: int,
           least_s: float) -> Tuple[ModelGraph, OpEstimator]:
    """The model, and the costs of its ops."""
    vocabulary = math.ceil(VOCABULARY / (PADDED * tp)) * PADDED * tp
    model = transformer("gpt", batch, layers, hidden, heads, tokens, vocabulary, precision="fp16", optimizer=MIXED_ADAM)
    return model, Dispatched(model, least_s)


def predicted_s(run: Run, least_s: float) -> float:
    model, costs = priced(run.micro_batch * run.dp, run.layers, run.hidden, run.heads, run.tokens, run.tp, least_s)
    strategy = uniform_3d(model, run.dp, run.tp, run.pp, run.micro_batches, "backward_first", recompute="full")
    strategy = strategy._replace(bucket_bytes=math.inf, weights_first=True)
    return simulator_of(run.gpus).run(strategy, costs).step_time_s


def report(found: Sequence[Tuple[Run, float]], console: Console) -> None:
    """Mean errors of all rows of a file, and of those with each width, degree and size of a micro-batch."""
    setting = found[0][0].setting
    ratios = np.array([seconds / run.measured_s for run, seconds in found])
    rank = spearmanr([seconds for _, seconds in found], [run.measured_s for run, _ in found]).correlation
    rows = [["all", *_shown(ratios)]]
    for name in ("hidden", "tp", "dp", "pp", "micro_batch"):
        groups: Dict[int, List[float]] = {}
        for (run, _), ratio in zip(found, ratios):
            groups.setdefault(getattr(run, name), []).append(ratio)
        rows += [[f"{name.replace('_', '-')} {value}", *_shown(np.array(groups[value]))] for value in sorted(groups)]
    console.print(table(f"vTrain's runs on {setting}: predicted over measured time (Spearman {rank:.3f})",
                        ["runs of", "runs", "mean error", "median ratio", "nine of ten within"], rows))


def _shown(ratios: np.ndarray) -> List[str]:
    errors = np.sort(np.abs(ratios - 1.0))
    most = errors[math.ceil(0.9 * len(errors)) - 1]
    return [str(len(ratios)), f"{errors.mean():.1%}", f"{np.median(ratios):.2f}", f"{most:.1%}"]


def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="a clone of VIA-Research/vTrain")
    parser.add_argument("--every", type=int, default=1, help="only every N-th row on one node")
    parser.add_argument("--dispatch", type=float, default=0.0, help="least microseconds of an op")
    given = parser.parse_args(arguments)
    console = Console(width=120)
    for setting in FILES:
        rows = runs(given.data, setting)[::given.every if setting == ONE_NODE else 1]
        order = sorted(rows, key=lambda run: (run.gpus, run.hidden, run.layers, run.tp, run.dp, run.micro_batch, run.batch))
        report([(run, predicted_s(run, 1e-6 * given.dispatch)) for run in order], console)


if __name__ == "__main__":
    main()
