"""Random strategies on random clusters, all from one seed."""

from __future__ import annotations

import random
from typing import Iterator, NamedTuple, Optional

from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError
from whale_tf.simulator import CompleteStrategy, Options, uniform_3d
from whale_tf.simulator.zoo.recommendation import dlrm
from whale_tf.simulator.zoo.transformers import transformer
from whale_tf.simulator.zoo.vision import mlp

CLUSTERS = ("cpu:8", "hc1", "hc2", "a100:16", "dapple-a", "dapple-b", "whale-8v100-8p100", "whale-4v100-4p100")


class Case(NamedTuple):
    name: str
    strategy: CompleteStrategy
    cluster: Cluster
    options: Options


def cases(seed: int, small: bool) -> Iterator[Case]:
    """An endless row of legal cases; ``small``: models of a few ops only."""
    draw = random.Random(seed)
    clusters = [Cluster.parse(name) for name in CLUSTERS]
    while True:
        case = _case(draw, draw.choice(clusters), small)
        if case is not None:
            yield case


def _case(draw: random.Random, cluster: Cluster, small: bool) -> Optional[Case]:
    dp, tp, pp = draw.choice((1, 2, 4, 8)), draw.choice((1, 1, 2, 4)), draw.choice((1, 2, 3, 4))
    if dp * tp * pp > len(cluster.devices):
        return None
    batch = 8 * dp
    kind = draw.choice(("mlp", "mlp", "dlrm") if small else ("transformer", "experts", "mlp", "dlrm"))
    if kind == "mlp":
        model = mlp(batch, draw.choice((2, 3, 4)), draw.choice((16, 256, 1024)))
    elif kind == "dlrm":
        model = dlrm(batch, rows=1000)
    else:
        model = transformer("t", batch, 3, 64, 8, 32, 128, experts=16 if kind == "experts" else 0)
    devices = draw.sample(range(len(cluster.devices)), dp * tp * pp) if draw.random() < 0.3 else None
    arguments = dict(
        num_micro_batch=draw.choice((1, 2, 3, 4, 6)),
        schedule=draw.choice(("backward_first", "gpipe", "zero_bubble_h1", "zero_bubble_h2", "interleaved", "zero_bubble_v")),
        policy=draw.choice(("PA", "PB")),
        recompute=draw.choice(("none", "none", "stage", "full")),
        zero=draw.choice(("none", "none", "v1", "v2", "v3")) if dp > 1 else "none",
        offload=draw.choice(("none", "none", "none", "states", "v0")),
        devices=devices,
    )
    options = Options(sharing=draw.random() < 0.8, overlap=draw.random() < 0.8, collapse=draw.random() < 0.5)
    try:
        strategy = uniform_3d(model, dp, tp, pp, **arguments)  # type: ignore[arg-type]
    except PlanError:
        return None  # more stages than blocks, or parts than units
    return Case(f"{cluster.name} {kind} {dp}x{tp}x{pp} {arguments}", strategy, cluster, options)
