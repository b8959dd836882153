"""Plays a Program on a cluster: the time of a step, by which plans of TaskGraphs are compared, and its peak memory.

Each device runs its calls one after the other, in the order of the Program, and their ops in the graph's order.  An op waits for
its operands from other devices.  Gradients and other recipes are sent and added up in parallel, and messages in transit share the
links.  The parts of a divided op are ops of the graph, each on its device.

Memory comes from a second run, in the order of TensorFlow's executor: an op runs when its operands are there, and a buffer lives
from the op that writes it to its last reader.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Iterable, Optional, Tuple

from whale_tf.cluster import Cluster
from whale_tf.ir.graph import Op
from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes import compile_program
from whale_tf.passes.form import INLINE, choose_form
from whale_tf.plan import Plan
from whale_tf.planner.homes import Held
from whale_tf.planner.rhino.op_price import OpPrices
from whale_tf.planner.rhino.scope import find_scope
from whale_tf.profiler.chain import takes_over
from whale_tf.profiler.op_cost import OpCost
from whale_tf.profiler.op_time import op_seconds
from whale_tf.program import Program as Compiled
from whale_tf.simulator.memory import memory_curves
from whale_tf.simulator.network import Network
from whale_tf.simulator.program import Program
from whale_tf.simulator.reader import Costs, Kernel, add_step
from whale_tf.simulator.tasks import Tasks


def played_seconds(step: TrainingStep, plan: Plan, cluster: Cluster, compiled: Optional[Compiled] = None) -> float:
    """Seconds of a step.

    Args:
        step: the step with the static shapes of a mini-batch of all model replicas, and with the plan's TaskGraphs.
        plan: the plan of these TaskGraphs.
        compiled: the step that the plan runs, if the caller has it already.

    Raises:
        PlanError: the plan's schedule cannot order this graph.
    """
    return _tasks(step, plan, cluster, compiled or compile_program(step, plan), in_turn=True).makespan()


def played_peaks(
    step: TrainingStep, plan: Plan, cluster: Cluster, variables: Iterable[Held], compiled: Optional[Compiled] = None
) -> Tuple[int, ...]:
    """The largest number of bytes on each device at one time, with calls inlined, without the host used for offloading.

    Args:
        step, plan, compiled: see :func:`played_seconds`.
    """
    if compiled is None or choose_form(compiled, step.region, plan).is_called:
        plan = replace(plan, emit=INLINE, task_graphs=tuple(replace(task, xla=False) for task in plan.task_graphs))
        compiled = compile_program(step, plan)
    tasks = _tasks(step, plan, cluster, compiled, in_turn=False)
    static = {device: {"parameters": 0.0} for device in tasks.used}
    for one in variables:
        for device, size in one.kept(plan).items():
            static[device]["parameters"] += size
    program, graph = Program(tuple(tasks.instructions), tuple(tasks.buffers), static, ()), tasks.graph()
    curves = memory_curves(program, graph, tasks.times(graph))
    return tuple(int(curve.peak_bytes) for curve in curves[:plan.num_devices])


def _tasks(step: TrainingStep, plan: Plan, cluster: Cluster, compiled: Compiled, in_turn: bool) -> Tasks:
    if plan.offload != "none":
        cluster = cluster.with_host(plan.num_devices)
    tasks = Tasks(cluster, Network(cluster), in_queues=False)
    add_step(tasks, _Prices(step, cluster, in_turn), step, [(compiled, plan)])
    return tasks


class _Prices(Costs):
    def __init__(self, step: TrainingStep, cluster: Cluster, in_turn: bool) -> None:
        self.in_turn = in_turn
        gradients = frozenset(tensor for tensor, _ in step.gradients)
        self._prices = OpPrices(step.graph, find_scope(step.graph, gradients=gradients))
        self._needed = set(self._prices.scope.ops)
        self._batch, self._cluster = step.region.batch, cluster

    def bytes(self, tensor: int) -> float:
        is_handle = self._prices.graph.tensors[tensor].dtype in ("resource", "variant")
        return 0.0 if is_handle else self._prices.bytes(tensor)

    def kernel(self, op: Op, part: float, device: int) -> Kernel:
        if op.id not in self._needed:
            return Kernel(0.0)  # a variable's value is the variable, and nobody needs the rest
        shares = [part if part < 1.0 and self._batch.layout(t).is_sharded else 1.0 for t in op.inputs + op.outputs]
        seconds = self._prices.seconds(op, min(shares, default=1.0), shares, self._cluster.devices[device])
        return Kernel(seconds, takes_over=not self.in_turn and takes_over(self._prices.graph, op))

    def moving(self, device: int, size: float) -> float:
        return op_seconds(OpCost(0.0, size), self._cluster.devices[device], "float32")
