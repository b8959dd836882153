"""Execution graph compiler: strategy -> program (Proteus section V)."""

from __future__ import annotations

from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError
from whale_tf.simulator.compiler import Compiler
from whale_tf.simulator.costs import OpEstimator
from whale_tf.simulator.instructions import FORWARD, Instructions
from whale_tf.simulator.strategy_tree import CompleteStrategy
from whale_tf.simulator.synchronise import Synchroniser


def compile_strategy(strategy: CompleteStrategy, cluster: Cluster, estimator: OpEstimator) -> Instructions:
    """The program of a strategy.

    Raises:
        PlanError: the strategy uses devices that the cluster does not have.
    """
    worst = max(device for stage in strategy.stages for device in stage.devices)
    if worst >= len(cluster.devices):
        raise PlanError(
            f"the strategy uses device {worst}, but cluster {cluster.name!r} has devices 0 to {len(cluster.devices) - 1}; "
            f"use a larger cluster or fewer devices")
    compiler = Compiler(strategy, cluster, estimator)
    for number in range(len(strategy.model.ops)):
        compiler.forward(number, compiler.values, FORWARD, "forward")
    for number in reversed(range(len(strategy.model.ops))):
        compiler.backward(number)
    static_bytes = Synchroniser(compiler).run()
    stages = tuple(stage.devices for stage in strategy.stages)
    return Instructions(tuple(compiler.instructions), tuple(compiler.buffers), static_bytes, stages)
