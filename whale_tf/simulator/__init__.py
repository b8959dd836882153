"""Predict a step of any strategy on any described cluster: time, memory, timeline (Proteus, on our Plan).

model         layers and ops over named dimensions       model_graph, zoo, layered
strategy      how each is partitioned and scheduled      configs, strategy_tree, uniform, from_plan
compile       collectives where configs differ           transformation, compiler, synchronise -> program
collapse      one device of each class of equal ones     collapse
unfold        tasks over devices and micro-batches       execution_graph
execute       when each task starts and ends             engine, network, costs
look          memory, use, bottleneck, trace             memory, result, trace

A captured step is compiled by the rewriter's own passes, and its calls become tasks one by one::

step          ops with measured times                    step_graph -> training step
compile       bodies and calls                           whale_tf.passes -> whale_tf.program
read          calls as tasks                             captured, reader, recipes, tasks
execute       on threads that devices share              cores
"""

from __future__ import annotations

from whale_tf.simulator.calibration import Calibration, calibrated
from whale_tf.simulator.configs import OpConfig, ScheduleConfig, op_config
from whale_tf.simulator.costs import OpEstimator
from whale_tf.simulator.from_plan import strategy_from_plan
from whale_tf.simulator.layered import LayerEstimator, layer_names, layered_model, tensor_parallel
from whale_tf.simulator.model_graph import Builder, ModelGraph
from whale_tf.simulator.result import DeviceUse, LinkUse, Simulation
from whale_tf.simulator.simulate import Options, Simulator, simulate
from whale_tf.simulator.source import Execution, Source
from whale_tf.simulator.step_graph import StepGraph, under
from whale_tf.simulator.strategy_tree import CompleteStrategy, StrategyTree
from whale_tf.simulator.trace import Trace, TraceEvent, to_chrome, trace_of, trace_of_run_metadata, write_chrome
from whale_tf.simulator.uniform import micro_batch_size, placement, uniform_3d
from whale_tf.simulator.zoo import FAMILIES, MODELS, built_in_model, is_built_in, model_names, with_seq

__all__ = [
    "Builder", "Calibration", "DeviceUse", "Execution", "FAMILIES", "LayerEstimator", "LinkUse", "MODELS", "ModelGraph",
    "OpConfig", "OpEstimator", "Options", "ScheduleConfig", "Simulation", "Simulator", "Source", "StepGraph", "CompleteStrategy",
    "StrategyTree", "Trace", "TraceEvent", "built_in_model", "calibrated", "is_built_in", "layer_names", "layered_model",
    "micro_batch_size", "model_names", "op_config", "placement", "simulate", "strategy_from_plan", "tensor_parallel", "to_chrome",
    "trace_of", "trace_of_run_metadata", "under", "uniform_3d", "with_seq", "write_chrome"]
