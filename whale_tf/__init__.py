"""whale_tf: the same TensorFlow script, on many devices.

    import whale_tf as wh
    wh.init({"num_micro_batch": 8}, cluster="cpu:4")
    with wh.replicate(1):
        ...

The planning half (``whale_tf.planner``, ``whale_tf.simulator``, ...) needs no TensorFlow; the names below do, and load it on
first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whale_tf.errors import (
    AnnotationError,
    ClusterError,
    ConfigError,
    GraphEditError,
    GraphError,
    IdleError,
    IdleWarning,
    InexactError,
    InexactWarning,
    InfeasibleError,
    InputError,
    MismatchError,
    MissingPackageError,
    PlanError,
    ProcessLostError,
    SnapshotError,
    UnknownShapeError,
    UnsupportedOpError,
    UnsupportedTensorFlowError,
    WhaleError,
)

__version__ = "0.1.0"

_API = (
    "checkpoint", "batch_axis", "current_plan", "current_program", "doctor", "explain", "init", "op_graph", "parallelize",
    "replicate", "resume", "set_default_strategy", "shutdown", "split", "step_graph", "total_devices", "total_gpus",
    "verify")

__all__ = [
    "AnnotationError", "Cluster", "ClusterError", "Config", "ConfigError", "GraphEditError", "GraphError", "IdleError",
    "IdleWarning", "InexactError", "InexactWarning", "InfeasibleError", "InputError", "MismatchError", "MissingPackageError",
    "Plan", "PlanError", "ProcessLostError", "SnapshotError", "UnknownShapeError", "UnsupportedOpError",
    "UnsupportedTensorFlowError", "WhaleError",
    "Timeline", "draw_program"] + list(_API)

if TYPE_CHECKING:
    from whale_tf.api import batch_axis as batch_axis
    from whale_tf.api import checkpoint as checkpoint
    from whale_tf.api import current_plan as current_plan
    from whale_tf.api import current_program as current_program
    from whale_tf.api import doctor as doctor
    from whale_tf.api import explain as explain
    from whale_tf.api import init as init
    from whale_tf.api import op_graph as op_graph
    from whale_tf.api import parallelize as parallelize
    from whale_tf.api import replicate as replicate
    from whale_tf.api import resume as resume
    from whale_tf.api import set_default_strategy as set_default_strategy
    from whale_tf.api import shutdown as shutdown
    from whale_tf.api import split as split
    from whale_tf.api import step_graph as step_graph
    from whale_tf.api import total_devices as total_devices
    from whale_tf.api import total_gpus as total_gpus
    from whale_tf.api import verify as verify
    from whale_tf.cluster import Cluster as Cluster
    from whale_tf.config import Config as Config
    from whale_tf.plan import Plan as Plan
    from whale_tf.viz.program import draw_program as draw_program
    from whale_tf.viz.training import Timeline as Timeline


def __getattr__(name: str) -> Any:
    """Loads on first use (PEP 562), so that ``import whale_tf.planner`` works where TensorFlow is not installed."""
    import importlib

    module = {"Cluster": "whale_tf.cluster", "Config": "whale_tf.config", "Plan": "whale_tf.plan",
              "Timeline": "whale_tf.viz.training", "draw_program": "whale_tf.viz.program"}.get(name)
    if module:
        globals()[name] = getattr(importlib.import_module(module), name)
    elif name in _API:
        api = importlib.import_module("whale_tf.api")
        globals().update({each: getattr(api, each) for each in _API})  # all: one has the name of a module
    else:
        raise AttributeError(f"module 'whale_tf' has no attribute {name!r}")
    return globals()[name]
