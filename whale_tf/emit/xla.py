"""Which bodies XLA compiles: those whose ops all have XLA kernels, according to TensorFlow."""

from __future__ import annotations

from typing import Dict, Sequence, Set

from whale_tf._tf_compat import has_kernel, has_xla, tf
from whale_tf.errors import ConfigError
from whale_tf.ir.graph import Op, OpGraph, inner_ops
from whale_tf.ir.traits import VARIABLES, traits
from whale_tf.ir.traits.row import Role
from whale_tf.plan import Plan
from whale_tf.program import CLONED, Body, Program
from whale_tf.residence import residence

MUST_COMPILE = "_XlaMustCompile"
_EDGES = (Role.ARGUMENT, Role.RESULT, Role.NO_OP)


def not_compiled(program: Program, plan: Plan, devices: Sequence[str]) -> Dict[str, str]:
    """Bodies of TaskGraphs under ``xla``, and why each cannot be compiled; "": it can.

    Args:
        devices: TensorFlow's name of each of the cluster's devices.

    Raises:
        ConfigError: this TensorFlow compiles no calls, or nothing can be compiled.
    """
    found: Dict[str, str] = {}
    for body in program.bodies:
        task = plan.task_graphs[body.task_graph] if body.step in CLONED else None
        if task is not None and task.xla and body.runs:
            kinds = {tf.DeviceSpec.from_string(devices[device]).device_type for row in task.devices for device in row}
            lacking = sorted(kind for kind in kinds if not has_xla(kind))
            if lacking:
                raise ConfigError(
                    f"xla is true for TaskGraph {task.name!r}, but TensorFlow {tf.__version__} does not compile called functions "
                    f"for {lacking[0]} devices; use a TensorFlow 2 with XLA, or set xla to false")
            found[body.name] = _elsewhere(program.graph, body, plan) or _obstacle(program.graph, body, kinds)
    if found and all(found.values()):
        raise ConfigError(f"xla is true, but no part of the step can be compiled: {'; '.join(_text(found))}; set xla to false")
    return found


def explained(bodies: Dict[str, str]) -> str:
    """For ``wh.explain()``."""
    done = [name for name, reason in bodies.items() if not reason]
    rest = "".join(f"; not {text}" for text in _text(bodies))
    return f"XLA compiles {', '.join(done)}, each when it first runs{rest}"


def _text(bodies: Dict[str, str]) -> Sequence[str]:
    return [f"{name}: {reason}" for name, reason in bodies.items() if reason]


def _elsewhere(graph: OpGraph, body: Body, plan: Plan) -> str:
    """A variable that the body itself takes, as an embedding's look-up does; XLA takes it only from the call's own device."""
    for op in (graph.producer(tensor) for tensor in body.inputs if graph.tensors[tensor].dtype == "resource"):
        task_graph = next((number for number, task in enumerate(plan.task_graphs) if op.name in task.homes), body.task_graph)
        where = residence(plan, task_graph, op.name, op.shard)
        own = residence(plan, body.task_graph, op.name, op.shard)
        if op.type in VARIABLES and not set(own.readers).issubset(where.values):
            return f"it takes variable {op.name!r}, which is on another device"
    return ""


def _obstacle(graph: OpGraph, body: Body, kinds: Set[str]) -> str:
    own = [graph.ops[index] for index in body.runs]
    for op in (*own, *(inner for outer in own for inner in inner_ops(outer))):
        row = traits(op.type)
        if row.role is Role.RANDOM:
            return f"op {op.name!r} ({op.type}) draws random numbers, and XLA draws others than TensorFlow"
        if row.role not in _EDGES and not all(_has_kernel(op, kind) for kind in kinds):
            return f"op {op.name!r} ({op.type}) has no XLA kernel"
    return ""


def _has_kernel(op: Op, kind: str) -> bool:
    dtype = next((op.attrs[name] for name in ("T", "Tparams") if isinstance(op.attrs.get(name), str)), None)
    return has_kernel(op.type, f"XLA_{kind}_JIT", None if dtype in (None, "invalid") else tf.as_dtype(dtype))
