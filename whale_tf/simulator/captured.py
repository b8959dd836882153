"""A captured step under a plan: its Program, with the measured times of its ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, Mapping, Optional, Tuple

from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError
from whale_tf.ir.graph import Op
from whale_tf.passes import compile_program
from whale_tf.passes.communicate import pulls_each, takes_own
from whale_tf.plan import Plan
from whale_tf.program import CLONED
from whale_tf.residence import residence
from whale_tf.simulator.calibration import ARITHMETIC, MEMORY
from whale_tf.simulator.call_facts import Kernel, OpCosts
from whale_tf.simulator.costs import OpEstimator
from whale_tf.simulator.from_plan import check_ops
from whale_tf.simulator.instructions import Instructions, Subject
from whale_tf.simulator.network import Network
from whale_tf.simulator.reader import add_step
from whale_tf.simulator.renumbering import Renumbering
from whale_tf.simulator.step_graph import StepGraph, StepOp, StepVariable, training_step
from whale_tf.simulator.tasks import Tasks

NEW_OPS = "shards"  # ops that `wh.split` adds to those of the local script


def captured_step(plan: Plan, graph: StepGraph, cluster: Cluster, network: Network, estimator: OpEstimator,
                  global_batch: Optional[int] = None,
                  numbers: Optional[Mapping[int, int]] = None) -> Tuple[Instructions, Subject, Tasks]:
    """The tasks of a step.

    Args:
        global_batch: examples in a step of all processes and model replicas; None: as many as when the step was captured.
        numbers: the numbers in the cluster of the plan's devices and of the processes' hosts (:meth:`Cluster.with_hosts`);
            None: the same numbers.

    Raises:
        PlanError: the plan is for a larger cluster, its schedule cannot order this graph, or the global batch cannot be divided
            into mini-batches.
    """
    check_ops(plan)
    processes = 1 if plan.spans_processes else max(1, len(plan.processes))
    numbered = [Renumbering(plan, rank, numbers) for rank in range(processes)]
    stages = tuple(tuple(numbered[0].of(device) for row in task.devices for device in row) for task in plan.task_graphs)
    homes = {names.of(device) for names in numbered for task in plan.task_graphs for device in task.homes.values()}
    used = sorted(homes.union(device for stage in stages for device in stage))
    if used[-1] >= len(cluster):
        raise PlanError(f"the plan uses device {used[-1]}, but cluster {cluster.name!r} has devices 0 to {len(cluster) - 1}; use "
                        "a larger cluster")
    step = training_step(graph, processes)
    parts = [replace(plan.local_part(rank), emit="inline") for rank in range(processes)]
    own = plan.num_model_replicas * pulls_each(plan) if takes_own(step, parts[0]) else processes  # all mini-batches
    if global_batch is not None:
        if global_batch < 1 or global_batch % own:
            raise PlanError(f"the global batch is {global_batch}, expected a positive multiple of {own}, its number of "
                            "mini-batches")
        graph = graph.resized(global_batch // own)
    tasks = Tasks(cluster, network, used)
    values = {step.graph.op(one.name).outputs[0]: one.bytes - one.slots for one in graph.variables}
    costs = StepCosts(graph, cluster, estimator, graph.batch * own / plan.num_micro_batch, values)
    programs = [names.moved(compile_program(step, part), part) for names, part in zip(numbered, parts)]
    tasks.chains = add_step(tasks, costs, step, programs)
    static_bytes: Dict[int, Dict[str, float]] = {device: {} for device in used}
    for rank, names in enumerate(numbered):
        for one in graph.variables:
            for number, size in _kept(plan, rank, one).items():
                device = names.of(number)
                static_bytes[device]["parameters"] = static_bytes[device].get("parameters", 0.0) + size
    program = Instructions(tuple(tasks.instructions), tuple(tasks.buffers), static_bytes, stages)
    subject = Subject(graph.name, graph.precision, graph.batch * own, plan.num_micro_batch, plan.schedule, tasks.matrix_flops)
    return program, subject, tasks


def _kept(plan: Plan, rank: int, one: StepVariable) -> Dict[int, float]:
    """The devices of a process that keep a variable -> its bytes there: without slots, if another process updates it.  Each of
    processes side by side has a host of its own."""
    where = residence(plan, one.task_graph, one.name, one.shard)
    own = {*plan.data_parallel_processes[rank], *plan.hosts} if plan.data_parallel_processes else set(where.values)
    return {device: one.bytes - (one.slots if device not in where.states else 0.0) for device in where.values if device in own}


class StepCosts(OpCosts):
    """Args:
    examples: examples of one micro-batch over all model replicas.
    values: a variable's own tensor -> bytes of its value.
    """

    def __init__(self, graph: StepGraph, cluster: Cluster, estimator: OpEstimator, examples: float,
                 values: Mapping[int, float]) -> None:
        self._values = values
        self.graph, self.cluster, self.estimator, self.examples = graph, cluster, estimator, examples
        self._bytes = [tensor.bytes for op in graph.ops for tensor in op.outputs]
        self._totals: Dict[str, Tuple[float, float]] = {}
        for op in graph.ops:
            flops, size = self._totals.get(op.origin, (0.0, 0.0))
            self._totals[op.origin] = flops + op.flops, size + op.size_bytes

    def bytes(self, tensor: int) -> float:
        if tensor in self._values:
            return self._values[tensor]
        return self._bytes[tensor] if tensor < len(self._bytes) else 0.0

    def kernel(self, op: Op, part: float, device: int) -> Kernel:
        row = self.graph.ops[op.id]
        is_cloned, of_op = row.step in CLONED, self._part_of_op(row)
        seconds = self.graph.time_of(row, self.graph.batch * part if is_cloned else self.examples)
        if seconds is not None:
            seconds *= of_op
        elif row.origin.startswith(NEW_OPS) and row.size_bytes > 0:
            one = self.cluster.devices[device]
            seconds = self.estimator.roofline(one, row.flops * part, row.size_bytes * part, row.contraction)
        scratch, workspace = self.graph.memory_of(row, self.graph.batch * part) if is_cloned else (0.0, 0.0)
        return Kernel(seconds or 0.0, ARITHMETIC if row.contraction else MEMORY, row.flops * part if row.contraction else 0.0,
                      of_op * scratch, of_op * workspace, row.alias, row.overwrites)

    def moving(self, device: int, size: float) -> float:
        return self.estimator.roofline(self.cluster.devices[device], 0.0, size)

    def _part_of_op(self, row: StepOp) -> float:
        """The fraction of the local script's op that this one is: its FLOPs, or bytes, relative to those of all parts."""
        flops, size = self._totals[row.origin]
        if row.contraction and flops:
            return row.flops / flops
        return row.size_bytes / size if size else 1.0
