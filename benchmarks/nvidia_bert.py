"""Batches of BERT that NVIDIA and Google found to fit a GPU or to run out of its memory, beside the simulator.

    python -m benchmarks.nvidia_bert

NVIDIA's are in :mod:`benchmarks.nvidia_runs`, op by op where it says so, the others under XLA.  What is in memory under XLA was
chosen with these batches in view.  Google's largest batches (google-research/bert, README.md, one GPU of 12 GB, TensorFlow 1.11)
are of runs op by op.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Tuple

from rich.console import Console

from benchmarks.measure import table
from benchmarks.nvidia_runs import PREDICTED, RUNS, TF1, TF2, TRAINED, bert_large
from benchmarks.points import data_parallel
from whale_tf.cluster import Cluster
from whale_tf.simulator import Options, simulate
from whale_tf.simulator.zoo.transformers import transformer

# Batches of pre-training that ran out of memory with TensorFlow 2: tokens, cluster, precision, batch
FAILED_TF2 = ((128, "V100-32GB:1", "fp32", 60), (512, "V100-32GB:1", "fp32", 10), (128, "A100-80GB:1", "tf32", 312),
              (512, "A100-80GB:1", "tf32", 40))
# Google's largest batches on 12 GB by tokens; 0: not even one example
GOOGLE: Dict[str, Dict[int, int]] = {"base": {64: 64, 128: 32, 256: 16, 320: 14, 384: 12, 512: 6},
                                     "large": {64: 12, 128: 6, 256: 2, 320: 1, 384: 0, 512: 0}}

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
    cases: Dict[Tuple[str, int, str, str, int, bool], bool] = {}
    for one in TRAINED:
        cluster = one.cluster.split(":")[0] + ":1"
        for batch, precision, xla in zip(one.batches, ("fp16", one.precision), (True, one.xla)):
            cases[one.source, one.tokens, cluster, precision, batch, xla] = True
        if one.failed is not None:
            cases[one.source, one.tokens, cluster, one.precision, one.failed, one.xla] = False
    for name, tokens, precision, cluster, batch, _ in RUNS:
        if name == "bert-large":
            cases[TF2, tokens, cluster.split(":")[0] + ":1", precision, batch, True] = True
    for tokens, cluster, precision, batch in FAILED_TF2:
        cases[TF2, tokens, cluster, precision, batch, True] = False
    found = []
    for (source, tokens, cluster, precision, batch, xla), fits in cases.items():
        count = 2 if tokens in PREDICTED else 1
        result = simulate(data_parallel(bert_large(tokens, batch), precision, xla, 1, count), Cluster.parse(cluster),
                          Options(xla=xla))
        what = f"{tokens} tokens, {cluster[:-2]}, {precision}, {batch}"
        found.append(Verdict(source, what, fits, max(result.peak_memory_bytes) / 2**30, result.usable_bytes[0] / 2**30))
    return found


def largest_batch(size: str, tokens: int) -> int:
    """The largest batch of BERT's released code, op by op, that is predicted to fit 12 GB."""
    layers, hidden, heads = (12, 768, 12) if size == "base" else (24, 1024, 16)

    def fits(batch: int) -> bool:
        model = transformer("bert", batch, layers, hidden, heads, tokens, 30522, pre_norm=False, predicted=2, optimizer="adamw")
        return not simulate(data_parallel(model, "fp32", False, 1), Cluster.parse("TitanXp:1"), Options(xla=False)).oom

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def main() -> None:
    console = Console(width=150)
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
