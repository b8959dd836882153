"""NVIDIA's published trainings of BERT-Large beside the simulator: throughput, and which batches run out of memory.

    python -m benchmarks.nvidia_bert [--picture FILE]

``--picture``: draw predicted over measured throughput of these runs, and of those of :mod:`benchmarks.published` to which nothing
is fitted.

Nothing is fitted to these throughputs.  The figures are those of NVIDIA/DeepLearningExamples, commit 729963d, all under XLA:
TensorFlow/LanguageModeling/BERT/README.md (container 20.06-tf1) and TensorFlow2/LanguageModeling/BERT/README.md (21.02-tf2,
whose pre-training :mod:`benchmarks.published` has).  What is in memory under XLA was chosen with these batches in view.
Google's largest batches (google-research/bert, README.md, one GPU of 12 GB, TensorFlow 1.11) are of runs op by op.
"""

from __future__ import annotations

import argparse
from typing import Dict, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np
from rich.console import Console

from benchmarks.measure import table
from benchmarks.published import MOST_SIMULATED, NVIDIA, Point, answered, by_series, every_point, is_fitted, picture
from whale_tf.cluster import Cluster
from whale_tf.simulator import Options, simulate, uniform_3d
from whale_tf.simulator.laws import as_run, default_laws
from whale_tf.simulator.model_graph import ModelGraph
from whale_tf.simulator.zoo.transformers import transformer

TF1, TF2 = "TensorFlow 1", "TensorFlow 2"


class Trained(NamedTuple):
    """A table of a README.

    Attributes:
        tokens: of an example; 384: fine-tuning for SQuAD, otherwise pre-training.
        precision: of the runs beside those in mixed precision.
        batches: of a GPU, mixed and in ``precision``.
        failed: the batch that ran out of memory in ``precision``.
        rates: GPUs -> micro-batches and samples/s, mixed and in ``precision``.
    """

    source: str
    tokens: int
    cluster: str
    precision: str
    batches: Tuple[int, int]
    failed: Optional[int]
    rates: Mapping[int, Tuple[Tuple[int, int], Tuple[float, Optional[float]]]]


ONE = (1, 1)
TRAINED = (
    Trained(TF1, 128, "V100-16GB:8", "fp32", (16, 8), 16, {
        1: ((4096, 8192), (134.34, 39.43)), 4: ((1024, 2048), (449.68, 152.33)), 8: ((512, 1024), (1001.39, 285.79))}),
    Trained(TF1, 512, "V100-16GB:8", "fp32", (4, 2), 4, {
        1: ((8192, 16384), (28.72, 9.80)), 4: ((2048, 4096), (109.96, 35.32)), 8: ((1024, 2048), (190.65, 69.53))}),
    Trained(TF1, 384, "V100-16GB:8", "fp32", (4, 2), 4, {
        1: (ONE, (29.74, 7.36)), 4: (ONE, (97.28, 26.64)), 8: (ONE, (189.77, 52.39))}),
    Trained(TF1, 128, "V100-32GB:16", "fp32", (64, 32), 64, {  # on one GPU in float32 the file repeats another row's figure
        1: ((1024, 2048), (188.04, None)), 4: ((256, 512), (790.89, 193.08)), 8: ((128, 256), (1556.89, 386.89)),
        16: ((64, 128), (3081.69, 761.92))}),
    Trained(TF1, 512, "V100-32GB:16", "fp32", (8, 8), None, {
        1: ((4096, 4096), (35.32, 11.67)), 4: ((1024, 1024), (128.98, 42.84)), 8: ((512, 512), (274.04, 86.78)),
        16: ((256, 256), (513.43, 173.26))}),
    Trained(TF1, 384, "V100-32GB:16", "fp32", (24, 10), 24, {
        1: (ONE, (55.28, 11.15)), 4: (ONE, (199.53, 42.91)), 8: (ONE, (341.55, 85.08)), 16: (ONE, (683.37, 156.29))}),
    Trained(TF1, 128, "A100-40GB:8", "tf32", (64, 64), None, {
        1: ((1024, 1024), (356.845, 238.10)), 4: ((256, 256), (1422.25, 952.39)), 8: ((128, 128), (2871.89, 1889.71))}),
    Trained(TF1, 512, "A100-40GB:8", "tf32", (16, 8), 16, {
        1: ((2048, 4096), (70.856, 39.96)), 4: ((512, 1024), (284.912, 160.16)), 8: ((256, 512), (572.112, 316.51))}),
    Trained(TF1, 384, "A100-40GB:8", "tf32", (32, 16), 32, {
        1: (ONE, (102.26, 61.364)), 4: (ONE, (366.353, 223.187)), 8: (ONE, (767.071, 440.47))}),
    Trained(TF2, 384, "V100-16GB:8", "fp32", (6, 3), 6, {
        1: (ONE, (39.10, 9.85)), 4: (ONE, (128.48, 36.52)), 8: (ONE, (255.36, 73.03))}),
    Trained(TF2, 384, "V100-32GB:8", "fp32", (12, 8), 12, {
        1: (ONE, (47.06, 11.11)), 4: (ONE, (165.26, 42.84)), 8: (ONE, (330.29, 85.91))}),
    Trained(TF2, 384, "A100-80GB:8", "tf32", (76, 38), 76, {1: (ONE, (134.22, 43.9)), 8: (ONE, (1048.23, 341.31))}),
)
# Batches of pre-training that ran out of memory with TensorFlow 2: tokens, cluster, precision, batch
FAILED_TF2 = ((128, "V100-32GB:1", "fp32", 60), (512, "V100-32GB:1", "fp32", 10), (128, "A100-80GB:1", "tf32", 312),
              (512, "A100-80GB:1", "tf32", 40))
# Google's largest batches on 12 GB by tokens; 0: not even one example
GOOGLE: Dict[str, Dict[int, int]] = {"base": {64: 64, 128: 32, 256: 16, 320: 14, 384: 12, 512: 6},
                                     "large": {64: 12, 128: 6, 256: 2, 320: 1, 384: 0, 512: 0}}
PREDICTED = {128: 20, 512: 80}


def bert_large(tokens: int, batch: int, precision: str) -> ModelGraph:
    predicted = PREDICTED.get(tokens, 2)  # fine-tuning predicts where the answer starts and ends
    return as_run(transformer("bert-large", batch, 24, 1024, 16, tokens, 30522, pre_norm=False, predicted=predicted,
                              optimizer="lamb" if tokens in PREDICTED else "adamw"), precision, True)


def points() -> List[Point]:
    found: List[Point] = []
    for one in TRAINED:
        for place, precision in enumerate(("fp16", one.precision)):
            for gpus, (counts, rates) in one.rates.items():
                rate = rates[place]
                if rate is None:
                    continue
                model = bert_large(one.tokens, one.batches[place] * gpus, precision)
                strategy = uniform_3d(model, gpus, num_micro_batch=min(counts[place], MOST_SIMULATED))
                strategy = strategy._replace(fp16_gradients=precision == "fp16")
                what = f"{one.tokens} tokens, {one.cluster.split(':')[0]}, {precision}"
                found.append(Point(one.source, what, precision, gpus, rate, strategy, Cluster.parse(one.cluster), True))
    return found


class Verdict(NamedTuple):
    """Whether a batch fits a GPU: published, and GiB that a step is predicted to take of those that it may."""

    source: str
    what: str
    fits: bool
    gib: float
    usable_gib: float

    @property
    def is_right(self) -> bool:
        return self.fits == (self.gib <= self.usable_gib)


def verdicts() -> List[Verdict]:
    cases: Dict[Tuple[str, int, str, str, int], bool] = {}
    for one in TRAINED:
        cluster = one.cluster.split(":")[0] + ":1"
        for batch, precision in zip(one.batches, ("fp16", one.precision)):
            cases[one.source, one.tokens, cluster, precision, batch] = True
        if one.failed is not None:
            cases[one.source, one.tokens, cluster, one.precision, one.failed] = False
    for name, tokens, precision, cluster, batch, _ in NVIDIA:
        if name == "bert-large":
            cases[TF2, tokens, cluster.split(":")[0] + ":1", precision, batch] = True
    for tokens, cluster, precision, batch in FAILED_TF2:
        cases[TF2, tokens, cluster, precision, batch] = False
    found = []
    for (source, tokens, cluster, precision, batch), fits in cases.items():
        count = 2 if tokens in PREDICTED else 1
        result = simulate(uniform_3d(bert_large(tokens, batch, precision), num_micro_batch=count), Cluster.parse(cluster),
                          Options(xla=True))
        what = f"{tokens} tokens, {cluster[:-2]}, {precision}, {batch}"
        found.append(Verdict(source, what, fits, max(result.peak_memory_bytes) / 2**30, result.usable_bytes[0] / 2**30))
    return found


def largest_batch(size: str, tokens: int) -> int:
    """The largest batch of BERT's released code, op by op, that is predicted to fit 12 GB."""
    layers, hidden, heads = (12, 768, 12) if size == "base" else (24, 1024, 16)

    def fits(batch: int) -> bool:
        model = transformer("bert", batch, layers, hidden, heads, tokens, 30522, pre_norm=False, predicted=2, optimizer="adamw")
        return not simulate(uniform_3d(as_run(model, "fp32", False)), Cluster.parse("TitanXp:1"), Options(xla=False)).oom

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--picture", help="draw predicted over measured into this file")
    console, laws, given = Console(width=150), default_laws(), parser.parse_args()
    answers = answered(points(), lambda point: laws)
    if given.picture is not None:
        others = [point for point in every_point(None, console) if point.fits and not is_fitted(point)]
        picture(given.picture, answers + answered(others, lambda point: laws))
    console.print(table("NVIDIA's trainings of BERT-Large, none of them fitted", [
        "series", "precision", "points", "mean error", "largest", "efficiency, predicted (measured)", "Spearman"],
        by_series(answers)))
    groups: Dict[Tuple[str, str, str], List[float]] = {}
    for answer in answers:
        point = answer.point
        key = (point.source, point.cluster.devices[0].type.split("-")[0], point.precision)
        groups.setdefault(key, []).append(answer.ratio)
    for key, ratios in groups.items():
        errors = np.abs(np.array(ratios) - 1)
        console.print(f"{', '.join(key)}: {len(ratios)} runs, mean error {errors.mean():.1%}, largest {errors.max():.1%}, "
                      f"median ratio {np.median(ratios):.2f}")
    found = verdicts()
    console.print(table("does a batch fit?", ["source", "batch", "published", "GiB", "of", "share", ""], [
        [one.source, one.what, "fits" if one.fits else "out of memory", f"{one.gib:.1f}", f"{one.usable_gib:.1f}",
         f"{one.gib / one.usable_gib:.2f}", "" if one.is_right else "wrong"] for one in found]))
    for source in (TF1, TF2):
        for fits, what in ((True, "fit"), (False, "ran out of memory")):
            mine = [one for one in found if one.source == source and one.fits == fits]
            console.print(f"{source}, batches that {what}: {sum(one.is_right for one in mine)} of {len(mine)} predicted")
    console.print(table("the largest batch on 12 GB (google-research/bert)", ["BERT", "tokens", "published", "predicted"], [
        [size, str(tokens), str(batch), str(largest_batch(size, tokens))] for size, rows in GOOGLE.items()
        for tokens, batch in rows.items()]))


if __name__ == "__main__":
    main()
