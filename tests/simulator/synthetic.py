"""Models and clusters whose times are known exactly."""

from __future__ import annotations

from typing import Optional, Sequence

from whale_tf.cluster import Cluster
from whale_tf.cluster.devices import Device
from whale_tf.simulator import Builder, ModelGraph, OpEstimator, Options, ScheduleConfig, StrategyTree, op_config
from whale_tf.simulator.costs import OpPart
from whale_tf.simulator.strategy_tree import CompleteStrategy

NO_RESERVE = Options(reserved_bytes={})


def flat_cluster(count: int, bandwidth_bytes_per_s: float = 1e9, latency_s: float = 0.0) -> Cluster:
    """One device a node; every pair of nodes at the same bandwidth."""
    nic = {"bandwidth_bytes_per_s": bandwidth_bytes_per_s, "latency_s": latency_s}
    return Cluster.parse({"name": "flat", "nodes": [{"devices": ["CPU"], "nic": nic, "count": count}]})


def chain_model(layers: int, tensor_bytes: float = 0.0, parameter_bytes: float = 4.0, kept_bytes: float = 0.0) -> ModelGraph:
    """Layers one after the other for one example; ``tensor_bytes`` cross between them, ``kept_bytes`` wait for the
    backward."""
    b = Builder("chain", 1, optimizer="sgd")
    x = b.input("x", "b f", (1, 1))
    for layer in range(layers):
        with b.scope(f"layer{layer}"):
            weight = b.parameter("w", "w", (parameter_bytes / 4,))
            x = b.op(
                "op",
                "layer",
                "b f, w -> b g",
                (x, weight),
                0.0,
                whole=("f", "g"),
                sizes={"g": tensor_bytes / 4},
                scratch_bytes=kept_bytes,
            )
    with b.scope("end"):
        b.op("loss", "loss", "b g -> b", (x,), 0.0)
    return b.graph()


class KnownTimes(OpEstimator):
    """Every layer takes ``forward_s`` and ``backward_s``; everything else takes no time."""

    def __init__(self, model: ModelGraph, forward_s: float, backward_s: float, factors: Optional[Sequence[float]] = None) -> None:
        super().__init__(model)
        self.forward_s, self.backward_s = forward_s, backward_s
        self.factors = factors

    def seconds(self, part: OpPart, device: Device) -> float:
        if self.model.ops[part.op].kind != "layer":
            return 0.0
        factor = self.factors[part.op] if self.factors is not None else 1.0
        return (self.backward_s if part.backward else self.forward_s) * part.fraction * part.share * factor

    def roofline(self, device: Device, flops: float, size_bytes: float, matrix: bool = False) -> float:
        return 0.0


def pipeline(model: ModelGraph, stages: int, num_micro_batch: int, schedule: str, warmups: Sequence[int]) -> CompleteStrategy:
    """One layer and one device a stage."""
    tree = StrategyTree(model)
    tree.order = schedule
    for stage in range(stages):
        tree.set(f"layer{stage}/*", op_config([stage]))
        tree.schedule(f"layer{stage}", ScheduleConfig(num_micro_batch, warmups[stage]))
    tree.set("end/*", op_config([stages - 1]))
    tree.schedule("end", ScheduleConfig(num_micro_batch, warmups[-1]))
    return tree.propagate()
