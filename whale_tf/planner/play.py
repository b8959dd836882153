"""Plays a Program on a cluster: the time of a step, by which plans of TaskGraphs are compared, and its peak memory.

Each device runs its calls one after the other, in the order of the Program, and their ops in the graph's order.  An op waits for
its operands from other devices.  A function of a called body begins when its arguments are there, and returns when it ends
(:mod:`whale_tf.simulator.spans`).  Gradients and other recipes are sent and added up in parallel, and messages in transit share
the links.  The parts of a divided op are ops of the graph, each on its device.

Memory comes from a second run, in the order of TensorFlow's executor: an op runs when its operands are there, and a buffer lives
from the op that writes it to its last reader.  Where CPU devices pass each other the values of variables and pieces of gradients
without copying them (ZeRO, offload), a value stays until the slowest device has read it, and how far devices are apart depends
on the machine's cores, which no plan knows.  The peak is then the higher one of two runs: with cores for all devices, and with
cores for half of them.  In the second run additions of gradients wait.  When an op of the backward pass ends, the next op and the
addition of its gradient become ready.  A thread continues with one of them and puts the other in its queue, from which it takes
work only when nothing else is ready.  Which one waits differs from gradient to gradient, so this run shows the most that a device
may hold.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.cluster import Cluster, Device
from whale_tf.ir.graph import Op
from whale_tf.ir.training_step import TrainingStep
from whale_tf.ir.traits import OVERWRITES
from whale_tf.passes import compile_program
from whale_tf.passes.form import AUTO, CALL, INLINE, choose_form, is_large
from whale_tf.plan import Plan
from whale_tf.planner.candidate import fit
from whale_tf.planner.homes import TrainedVariable, has_one_memory
from whale_tf.planner.op_price import OpPrices
from whale_tf.planner.scope import find_scope
from whale_tf.profiler.chain import shares_buffer
from whale_tf.profiler.op_cost import OpCost, tensor_bytes
from whale_tf.profiler.op_time import op_seconds
from whale_tf.program import Program as Compiled
from whale_tf.simulator.call_facts import Kernel, OpCosts
from whale_tf.simulator.memory import peak_bytes
from whale_tf.simulator.network import Network
from whale_tf.simulator.reader import add_step
from whale_tf.simulator.renumbering import Renumbering, beside_hosts
from whale_tf.simulator.tasks import Tasks


def played_seconds(step: TrainingStep, plan: Plan, cluster: Cluster) -> float:
    """Seconds of a step; see :func:`played`."""
    return _seconds(_play(step, plan, cluster, compile_program(step, plan), StepPrices(step)))


def played_peaks(step: TrainingStep, plan: Plan, cluster: Cluster, variables: Iterable[TrainedVariable], emit: str = INLINE,
                 prices: Optional[StepPrices] = None) -> Tuple[int, ...]:
    """The most bytes that each device holds at a time in one form, not compiled by XLA; see :func:`played`."""
    plan = replace(plan, emit=emit, task_graphs=tuple(replace(task, xla=False) for task in plan.task_graphs))
    return _peaks(_play(step, plan, cluster, compile_program(step, plan), prices or StepPrices(step)), plan, variables)


def played(step: TrainingStep, plan: Plan, cluster: Cluster, variables: Iterable[TrainedVariable],
           prices: Optional[StepPrices] = None) -> Tuple[float, Tuple[int, ...]]:
    """Seconds of a step, and the most bytes that each device holds at a time, without the host's.  Where the plan leaves the form
    open, these are the bytes of the inlined step, since ``emit: auto`` inlines a step that only fits like that.

    Args:
        step: the step with the static shapes of a mini-batch of all model replicas, and with the plan's TaskGraphs.
        plan: the plan of these TaskGraphs.
        prices: of the step, if they are known.

    Raises:
        PlanError: the plan's schedule cannot order this graph.
    """
    compiled, prices = compile_program(step, plan), prices or StepPrices(step)
    play = _play(step, plan, cluster, compiled, prices)
    is_open = plan.emit != CALL and choose_form(compiled, step.region, plan).is_called
    peaks = played_peaks(step, plan, cluster, variables, prices=prices) if is_open else _peaks(play, plan, variables)
    return _seconds(play), peaks


def called_too_large(step: TrainingStep, plan: Plan, cluster: Cluster, variables: Sequence[TrainedVariable]) -> Tuple[int, ...]:
    """The peaks of a step that ``emit: auto`` would call, if a device cannot hold its own, and each can hold that of the inlined
    step; otherwise nothing.  A step that fits with all its tensors at once is not played.

    Raises:
        PlanError: the plan's schedule cannot order this graph.
    """
    if plan.emit != AUTO or not is_large(step.region, plan) or fit(_all_at_once(step, plan, variables), cluster):
        return ()
    if not choose_form(compile_program(step, plan), step.region, plan).is_called:
        return ()
    peaks = played_peaks(step, plan, cluster, variables, CALL)
    return () if fit(peaks, cluster) or not fit(played_peaks(step, plan, cluster, variables), cluster) else peaks


def _all_at_once(step: TrainingStep, plan: Plan, variables: Iterable[TrainedVariable]) -> List[int]:
    """Bytes of each device with its variables, twice their gradients, and all tensors of the whole mini-batch."""
    size_of = [0] * len(plan.task_graphs)
    for op in (step.graph.ops[index] for index in step.region.ops):
        size_of[step.region.task_graph[op.id]] += sum(tensor_bytes(step.graph, tensor) for tensor in op.outputs)
    for tensor, _ in step.gradients:
        size_of[step.task_graph_of(tensor)] += 2 * tensor_bytes(step.graph, tensor)
    found = [0] * plan.num_devices
    for task, size in zip(plan.task_graphs, size_of):
        for device in (device for row in task.devices for device in row):
            found[device] += size
    for one in variables:
        for device, size in one.kept(plan).items():
            if device < plan.num_devices:  # not the host
                found[device] += size
    return found


class _Play(NamedTuple):
    """A step's tasks, each of which runs when its operands are there, the ops of each call in their order, and the plan's devices
    in the cluster of the tasks."""

    tasks: Tasks
    chains: Sequence[Sequence[int]]
    numbers: Renumbering


def _play(step: TrainingStep, plan: Plan, cluster: Cluster, compiled: Compiled, prices: StepPrices) -> _Play:
    cluster, numbers = beside_hosts(plan, cluster)
    own_numbers = Renumbering(plan, 0, numbers)
    compiled, plan = own_numbers.moved(compiled, plan)
    tasks = Tasks(cluster, Network(cluster), in_queues=False)
    return _Play(tasks, add_step(tasks, _Costs(prices, cluster), step, [(compiled, plan)]), own_numbers)


def _seconds(play: _Play) -> float:
    play.tasks.take_turns(play.chains)
    return play.tasks.makespan()


def _peaks(play: _Play, plan: Plan, variables: Iterable[TrainedVariable]) -> Tuple[int, ...]:
    tasks, numbers = play.tasks, play.numbers
    static = {device: {"parameters": 0.0} for device in tasks.used}
    for one in variables:
        for device, size in one.kept(plan).items():
            static[numbers.of(device)]["parameters"] += size
    graph = tasks.graph()
    runs = [tasks.times(graph)]
    if has_one_memory(tasks.cluster) and any(task.homes for task in plan.task_graphs):
        used = {device for task in plan.task_graphs for row in task.devices for device in row}
        runs.append(tasks.times_on_cores(graph, max(1, len(used) // 2), play.chains))
    peaks = [peak_bytes(static, graph, times) for times in runs]
    return tuple(int(max(of[numbers.of(device)] for of in peaks)) for device in range(plan.num_devices))


class StepPrices:
    """Prices of a step's ops, which plans of one graph have in common."""

    def __init__(self, step: TrainingStep) -> None:
        gradients = frozenset(tensor for tensor, _ in step.gradients)
        self._prices = OpPrices(step.graph, find_scope(step.graph, gradients=gradients))
        self._needed = set(self._prices.scope.ops)
        self._batch = step.region.batch
        self._bytes: Dict[int, float] = {}
        self._kernels: Dict[Tuple[int, float, str], Kernel] = {}

    def bytes(self, tensor: int) -> float:
        if tensor not in self._bytes:
            is_handle = self._prices.graph.tensors[tensor].dtype in ("resource", "variant")
            self._bytes[tensor] = 0.0 if is_handle else self._prices.bytes(tensor)
        return self._bytes[tensor]

    def kernel(self, op: Op, part: float, device: Device) -> Kernel:
        key = op.id, part, device.type
        if key not in self._kernels:
            self._kernels[key] = self._kernel(op, part, device)
        return self._kernels[key]

    def _kernel(self, op: Op, part: float, device: Device) -> Kernel:
        if op.id not in self._needed:
            return Kernel(0.0)  # a variable's value is the variable, and nobody needs the rest
        shares = [part if part < 1.0 and self._batch.layout(t).is_sharded else 1.0 for t in op.inputs + op.outputs]
        seconds = self._prices.seconds(op, min(shares, default=part), shares, device)
        return Kernel(seconds, shares=shares_buffer(op), overwrites=op.type in OVERWRITES)


class _Costs(OpCosts):
    """A step's prices on the devices of a cluster."""

    def __init__(self, prices: StepPrices, cluster: Cluster) -> None:
        self._prices, self._cluster = prices, cluster

    def bytes(self, tensor: int) -> float:
        return self._prices.bytes(tensor)

    def kernel(self, op: Op, part: float, device: int) -> Kernel:
        return self._prices.kernel(op, part, self._cluster.devices[device])

    def moving(self, device: int, size: float) -> float:
        return op_seconds(OpCost(0.0, size), self._cluster.devices[device], "float32")
