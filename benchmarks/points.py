"""One published measurement of a training run, and what the simulator says of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple, Sequence

from whale_tf.cluster import Cluster
from whale_tf.simulator import Options, Simulation, simulate, uniform_3d
from whale_tf.simulator.laws import Laws, TestedError, as_run
from whale_tf.simulator.model_graph import ModelGraph
from whale_tf.simulator.strategy_tree import CompleteStrategy

# Rows of the laws for the libraries (cuBLAS, cuDNN) of a card's first year, which no device type's name begins with
FIRST_YEAR = {"A100": "A100 before 21.02"}
LATER = "21.02"  # the first of NVIDIA's containers here whose libraries are later ones
MOST_SIMULATED = 32  # micro-batches of a step; with more, the sums of gradients count for even less


class Point(NamedTuple):
    """One measurement: ``measured`` in samples/s, of ``gpus`` devices of ``cluster`` under ``strategy``.

    ``model``: what it counts as when models are left out of a fit.  ``container``: year and month of NVIDIA's, which says what
    libraries ran; "": unknown.
    """

    source: str
    model: str
    what: str
    precision: str
    gpus: int
    measured: float
    strategy: CompleteStrategy
    cluster: Cluster
    xla: bool = False
    fits: bool = True
    container: str = ""

    @property
    def series(self) -> str:
        return f"{self.source}, {self.what}"

    @property
    def card(self) -> str:
        """The kind of device, without its memory."""
        return self.cluster.devices[0].type.split("-")[0]

    @property
    def row(self) -> str:
        """The row of the laws for the card and its libraries."""
        return FIRST_YEAR.get(self.card, self.card) if "" < self.container < LATER else self.card

    def options(self, laws: Laws) -> Options:
        """How it is simulated, by the row of its libraries."""
        return Options(xla=self.xla, laws=replace(laws, devices=dict(laws.devices, **{self.card: laws.devices[self.row]})))

    def predict(self, laws: Laws) -> Simulation:
        return simulate(self.strategy, self.cluster, self.options(laws))


def data_parallel(model: ModelGraph, precision: str, xla: bool, gpus: int, micro_batches: int = 1,
                  fp16_gradients: bool = False) -> CompleteStrategy:
    """Data parallelism as TensorFlow runs it; gradients are summed once a step, after its micro-batches."""
    strategy = uniform_3d(as_run(model, precision, xla), gpus, num_micro_batch=min(micro_batches, MOST_SIMULATED))
    return strategy._replace(fp16_gradients=fp16_gradients)


def tested(times: str, device: str, precision: str, ratios: Sequence[float]) -> TestedError:
    """The errors as the laws keep them, of rates predicted over measured."""
    mean = sum(abs(ratio - 1.0) for ratio in ratios) / len(ratios)
    return TestedError(times=times, device=device, precision=precision, points=len(ratios), mean=round(mean, 3),
                       most=in_tenths(nine_of_ten(ratios)))


def nine_of_ten(ratios: Sequence[float]) -> float:
    """The least ``most`` so that nine of ten rates are from ``predicted / (1 + most)`` to ``predicted x (1 + most)``."""
    return sorted(max(ratio, 1.0 / ratio) for ratio in ratios)[math.ceil(0.9 * len(ratios)) - 1] - 1.0


def in_tenths(share: float) -> float:
    """Rounded up to tenths of a percent, so that what was inside a range still is."""
    return math.ceil(1000.0 * share) / 1000.0
