"""One published measurement of a training run, and what the simulator says of it."""

from __future__ import annotations

import math
from typing import NamedTuple, Sequence

from whale_tf.cluster import Cluster
from whale_tf.simulator import Options, Simulation, simulate, uniform_3d
from whale_tf.simulator.laws import Laws, TestedError, as_run
from whale_tf.simulator.model_graph import ModelGraph
from whale_tf.simulator.strategy_tree import CompleteStrategy

MOST_SIMULATED = 32  # micro-batches of a step; with more, the sums of gradients count for even less


class Point(NamedTuple):
    """One measurement: ``measured`` in samples/s, of ``gpus`` devices of ``cluster`` under ``strategy``.

    ``model``: what it counts as when models are left out of a fit.
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

    @property
    def series(self) -> str:
        return f"{self.source}, {self.what}"

    @property
    def card(self) -> str:
        """The kind of device, without its memory."""
        return self.cluster.devices[0].type.split("-")[0]

    def predict(self, laws: Laws) -> Simulation:
        return simulate(self.strategy, self.cluster, Options(xla=self.xla, laws=laws))


def data_parallel(model: ModelGraph, precision: str, xla: bool, gpus: int, micro_batches: int = 1,
                  fp16_gradients: bool = False) -> CompleteStrategy:
    """Data parallelism as TensorFlow runs it; gradients are summed once a step, after its micro-batches."""
    strategy = uniform_3d(as_run(model, precision, xla), gpus, num_micro_batch=min(micro_batches, MOST_SIMULATED))
    return strategy._replace(fp16_gradients=fp16_gradients)


def tested(times: str, device: str, precision: str, errors: Sequence[float]) -> TestedError:
    """The errors as the laws keep them."""
    most = sorted(errors)[math.ceil(0.9 * len(errors)) - 1]
    return TestedError(times=times, device=device, precision=precision, points=len(errors),
                       mean=round(sum(errors) / len(errors), 3), most=round(most, 3))
