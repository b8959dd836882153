"""Two processes of unequal speed: one has a core of its own, the other shares its core with a busy loop, so it has half.

    python -m benchmarks.unequal_processes [MODEL...]

Data parallelism: equal mini-batches against parts by speed (2:1).  A pipeline of two stages: equal work against layers by
speed (the exact partition).  The same cluster description and the same examples; the ideal follows from speeds alone.  Whale
measured 1.3 to 1.4 and about 1.2 on V100 and P100 (Figures 17 and 18).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from typing import Any, Callable, Dict, List, NamedTuple, Sequence

import numpy as np
from rich.console import Console

from benchmarks.measure import Result, Spec, first_result, main, session_config, step_times, table
from benchmarks.papers.stages import even_stages
from models import bert, data, gnmt, resnet
from models.layers import Model
from whale_tf.balance import exact_stages
from whale_tf.balance.stages import PartitionProblem, StagePartition, partition_latency_s
from whale_tf.cluster.processes import free_ports, tf_configs

STEPS, ROUNDS, MICRO_BATCHES = 10, 3, 8
BUSY = "import os\nos.sched_setaffinity(0, {1})\nwhile True: pass"
SPEEDS = (2.0, 1.0)
TYPE = {"kind": "CPU", "memory_bytes": 8 * 2 ** 30, "fabric": "cpu", "memory_bandwidth_bytes_per_s": 1e10}
CLUSTER = {
    "name": "unequal", "nodes": [{"devices": [name + ":1"], "nic": {"bandwidth_gbits_per_s": 100}} for name in ("fast", "slow")],
    "device_types": {"fast": dict(TYPE, fp32=2e10), "slow": dict(TYPE, fp32=1e10)}}
LAYERS = 6  # of the pipeline's encoder


class Case(NamedTuple):
    """``batch``: of each process; ``examples(count)`` gives arrays, ``build`` a model on tensors like them."""

    batch: int
    examples: Callable[[int], Sequence[np.ndarray]]
    build: Callable[[Any], Model]


RESNET = resnet.ResnetConfig(blocks=(3, 4, 6, 3), bottleneck=True, width=16, image=16, channels=3, classes=10, small_image=True)
BERT = bert.BertConfig(layers=LAYERS, hidden=256, heads=4, ffn=1024, vocab=1000, seq=64, predictions=10)
GNMT = gnmt.GnmtConfig(encoder_layers=4, decoder_layers=4, hidden=256, vocab=1000, source=12, target=12)


def _images(count: int) -> Sequence[np.ndarray]:
    random = np.random.RandomState(0)
    return data.ImageBatch(random.randn(count, RESNET.image, RESNET.image, 3).astype("float32"),
                           random.randint(0, RESNET.classes, count).astype("int32"))


def _masked(count: int) -> Sequence[np.ndarray]:
    random, whole = np.random.RandomState(0), [count, BERT.predictions]
    return data.MaskedLmBatch(
        _tokens(random, BERT.vocab, [count, BERT.seq]), _tokens(random, 2, [count, BERT.seq]),
        np.sort(_tokens(random, BERT.seq, whole)), _tokens(random, BERT.vocab, whole), np.ones(whole, "float32"),
        _tokens(random, 2, [count]))


def _pairs(count: int) -> Sequence[np.ndarray]:
    random, target = np.random.RandomState(0), [count, GNMT.target]
    return data.Seq2SeqBatch(
        _tokens(random, GNMT.vocab, [count, GNMT.source]), np.ones([count, GNMT.source], "float32"),
        _tokens(random, GNMT.vocab, target), _tokens(random, GNMT.vocab, target), np.ones(target, "float32"))


def _tokens(random: Any, limit: int, shape: Sequence[int]) -> np.ndarray:
    return random.randint(0, limit, shape).astype("int32")


CASES: Dict[str, Case] = {
    "ResNet-50": Case(48, _images, lambda batch: resnet.build(batch, RESNET)),
    "BERT": Case(48, _masked, lambda batch: bert.build(batch, BERT)),
    "GNMT": Case(192, _pairs, lambda batch: gnmt.build(batch, GNMT)),
}
PIPELINE = "BERT, 2 stages"


def divided(how: str) -> StagePartition:
    """Layers of the encoder's stages: embedding, layers, head."""
    problem = layers_problem()
    return even_stages(problem) if how == "even" else exact_stages(problem)


def layers_problem() -> PartitionProblem:
    flops = (0.1,) + (1.0,) * LAYERS + (0.1,)
    nothing = (0.0,) * len(flops)
    return PartitionProblem(flops, nothing, nothing, nothing[1:], SPEEDS, (1.0, 1.0), MICRO_BATCHES, fixed_order=True)


# -- in the processes --------------------------------------------------------------------------------------------------


def worker(spec: Spec) -> Result:
    """One of the processes."""
    import tensorflow.compat.v1 as tf

    import whale_tf as wh

    rank = int(spec["rank"])
    os.sched_setaffinity(0, {rank})
    tf.disable_eager_execution()
    is_pipeline = spec["case"] == PIPELINE
    config = {"balance.algorithm": "even" if spec["how"] == "even" else "exact"}
    wh.init(dict(config, num_micro_batch=MICRO_BATCHES, **{"pipeline.warmup": "PB"}) if is_pipeline else config, cluster=CLUSTER)
    case = CASES["BERT" if is_pipeline else spec["case"]]
    examples = case.examples(case.batch)
    dataset = tf.data.Dataset.from_tensors(tuple(examples)).repeat()
    iterator = tf.data.make_initializable_iterator(dataset)
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    batch = type(examples)(*iterator.get_next())  # type: ignore[call-arg]
    if is_pipeline:
        loss = _two_stages(batch, divided(spec["how"]).cuts[1] - 1)
    else:
        with wh.replicate():
            loss = case.build(batch).loss
    update = tf.train.GradientDescentOptimizer(1e-3).minimize(loss)
    session = tf.Session(config=session_config(1, inter=1, intra=1))
    session.run([tf.global_variables_initializer(), tf.tables_initializer()])
    return step_times(lambda: session.run([loss, update])[0], STEPS)


def _two_stages(batch: Any, first: int) -> Any:
    """Loss of the encoder, the first stage of which has ``first`` layers."""
    import whale_tf as wh

    with wh.replicate(1):
        x, embeddings = bert.embed(batch.tokens, BERT, batch.segments)
        for i in range(first):
            x = bert.encoder_layer(x, BERT, name=f"layer_{i}")
    with wh.replicate(1):
        for i in range(first, LAYERS):
            x = bert.encoder_layer(x, BERT, name=f"layer_{i}")
        return bert.mlm_loss(bert.mlm_head(x, batch.positions, embeddings, BERT), batch)


# -- starting them -----------------------------------------------------------------------------------------------------


def measured(case: str, how: str) -> Result:
    """What the first process measured, beside a busy loop on the second one's core."""
    command = [sys.executable, os.path.abspath(__file__), "--worker"]
    specs = [json.dumps({"case": case, "how": how, "rank": rank}) for rank in range(2)]
    loop = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        return first_result([command + [spec] for spec in specs], tf_configs(free_ports(2)))
    finally:
        loop.kill()
        loop.wait()


def report(console: Console) -> None:
    rows = []
    for case in sys.argv[1:] or list(CASES) + [PIPELINE]:
        found: Dict[str, List[Result]] = {"even": [], "aware": []}
        for _ in range(ROUNDS):
            for how, results in found.items():
                results.append(measured(case, how))
        even, aware = (statistics.median(result["wall_s"] for result in results) for results in found.values())
        if case == PIPELINE:
            cuts = [f"{divided(how).cuts[1] - 1}:{LAYERS + 1 - divided(how).cuts[1]}" for how in found]
            latencies = [partition_latency_s(layers_problem(), divided(how)) for how in found]
            ideal = latencies[0] / latencies[1]
        else:
            batch = CASES[case].batch
            cuts, ideal = [f"{batch}:{batch}", f"{4 * batch // 3}:{2 * batch // 3}"], 1.5
        rows.append([case, cuts[0], cuts[1], f"{1e3 * even:.0f}", f"{1e3 * aware:.0f}",
                     f"{even / aware:.2f}", f"{ideal:.2f}"])
    console.print(table("Two processes, the second of half the speed", [
        "model", "even", "aware", "even ms", "aware ms", "speed-up", "ideal"], rows))


if __name__ == "__main__":
    main(__file__, worker, report)
