"""From a strategy to its step time: the simulator's main path."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Dict, Hashable, Mapping, NamedTuple, Optional, Sequence

from whale_tf.cluster import Cluster, Device
from whale_tf.errors import PlanError
from whale_tf.plan import Plan
from whale_tf.schedule import schedule_of
from whale_tf.simulator.calibration import Calibration, calibrated
from whale_tf.simulator.captured import captured_step
from whale_tf.simulator.collapse import Collapse
from whale_tf.simulator.compile import compile_strategy
from whale_tf.simulator.cores import Hosts, operands, run_on_cores
from whale_tf.simulator.costs import DEFAULT_GAMMA, OpEstimator
from whale_tf.simulator.engine import Times, run
from whale_tf.simulator.execution_graph import ExecutionGraph, Unfolder
from whale_tf.simulator.instructions import Instructions, Subject
from whale_tf.simulator.laws import Kernels, Laws, default_laws, waiting_seconds
from whale_tf.simulator.memory import arena_bytes, memory_curves
from whale_tf.simulator.model_graph import OPTIMIZERS, ModelGraph
from whale_tf.simulator.network import FLAT, Network
from whale_tf.simulator.renumbering import beside_hosts
from whale_tf.simulator.result import Simulation, device_uses
from whale_tf.simulator.steady import extended, first_run, period_of
from whale_tf.simulator.step_graph import StepGraph
from whale_tf.simulator.strategy_tree import CompleteStrategy
from whale_tf.simulator.synchronise import sums_every_micro_batch
from whale_tf.simulator.transformation import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

# Fields of a strategy that unfolding reads.  A compiled program depends on none of them, or only on a part.
UNFOLDED = ("model", "num_micro_batch", "schedule", "stages", "micro_batch_slices")


class Options(NamedTuple):
    """A simulation's assumptions.

    Attributes:
        sharing, overlap: the run-time behaviours (Proteus section VI-C), which can be switched off for ablation.
        collapse: simulate one device of each class of equal ones; the answer is the same.
        steady_state: simulate few micro-batches, and extrapolate to all of them once the step is periodic.
        reserved_bytes: memory that a step cannot use, by kind of device; None: what ``Device.usable_bytes`` leaves.
        calibration: measurements of the machine; they replace the cluster's rates and links, and the gamma of its type.
        xla: whether TensorFlow on GPUs runs ops fused by XLA or each with its own kernels, by the laws; None: every op is one
            kernel written by hand, and running ops costs nothing else (as in Megatron's and Proteus' models).
        laws: what kernels and the framework reach; None: the package's own.
    """

    sharing: bool = True
    overlap: bool = True
    collapse: bool = True
    steady_state: bool = False
    reserved_bytes: Optional[Mapping[str, int]] = None
    calibration: Optional[Calibration] = None
    xla: Optional[bool] = None
    laws: Optional[Laws] = None


class Compiled(NamedTuple):
    """A strategy's program, without its micro-batches and their order."""

    program: Instructions
    unfolder: Unfolder
    estimator: OpEstimator


def simulate(
    strategy: CompleteStrategy,
    cluster: Cluster,
    options: Options = Options(),  # noqa: B008 (a frozen tuple)
    estimator: Optional[OpEstimator] = None,
) -> Simulation:
    """Predict one step of a strategy on a cluster; see :meth:`Simulator.run`."""
    return Simulator(cluster, options).run(strategy, estimator)


class Simulator:
    """Simulates many strategies on one cluster and keeps everything that they have in common.

    Costs of groups of devices are kept for good, compiled programs for the last ``keep`` strategies.  A strategy that differs
    from one of those only in schedule, warm-up or number of micro-batches is not compiled again.
    """

    def __init__(self, cluster: Cluster, options: Options = Options(), keep: int = 32) -> None:  # noqa: B008
        self.cluster = cluster = cluster if options.calibration is None else calibrated(cluster, options.calibration)
        self.options = options
        self.laws = options.laws or default_laws()
        self._in_tensorflow = options.xla is not None and all(device.kind == "GPU" for device in cluster.devices)
        if self._in_tensorflow:  # Horovod and TensorFlow call the flat algorithms
            law = self.laws.framework
            correction = dict.fromkeys((ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER), 1.0 / law.all_reduce)
            self.network = Network(cluster, correction, FLAT, law.protocols, near_adapters=True)
        else:
            self.network = Network(cluster)
        self._keep = keep
        self._programs: OrderedDict[Hashable, Compiled] = OrderedDict()

    def run(self, strategy: CompleteStrategy, estimator: Optional[OpEstimator] = None) -> Simulation:
        """Predict one step of ``strategy``.

        Args:
            estimator: costs of the model's ops; None: by the options.

        Raises:
            PlanError: the strategy does not fit the cluster, deadlocks, or an op has no cost.
        """
        if self._in_tensorflow and strategy.bucket_bytes is None:
            strategy = strategy._replace(bucket_bytes=self.laws.framework.fusion_bytes)
        began = time.process_time()
        compiled = self._compiled(strategy, estimator)
        compiled_s = time.process_time() - began
        result = self._steady(strategy, compiled, compiled_s) if self.options.steady_state else None
        result = result or self._simulate(strategy, compiled, compiled_s)
        if not self._in_tensorflow:
            return result
        return self._with_waiting(self._with_host(self._with_holes(result), strategy.num_micro_batch))

    def _with_host(self, result: Simulation, num_micro_batch: int) -> Simulation:
        """The result with the time of the host, which starts the kernels of each device one after the other.

        What XLA compiled starts its own kernels, faster than devices run them; the host calls the clusters of a micro-batch and
        of the updates.
        """
        law = self.laws.framework
        counts = result.program.kernels(num_micro_batch)
        count = max((counts.get(use.device, 0.0) for use in result.devices), default=0.0)
        host_s = law.cluster_s * (num_micro_batch + 1) if self.options.xla else count * law.host_s
        return lasting(result, max(result.step_time_s, host_s))._replace(
            kernels=count, host_s=host_s, is_limited_by_host=host_s > result.step_time_s, is_fused=bool(self.options.xla))

    @staticmethod
    def _with_holes(result: Simulation) -> Simulation:
        """The result with the memory peaks of TensorFlow's allocator."""
        reaches = arena_bytes(result.program, result.graph, result.times)
        devices = []
        for use, reach, usable in zip(result.devices, reaches, result.usable_bytes):
            peak = max(use.peak_memory_bytes, float(reach))
            devices.append(use._replace(peak_memory_bytes=peak, oom=peak > usable))
        return result._replace(devices=tuple(devices))

    def _with_waiting(self, result: Simulation) -> Simulation:
        """The result with the time that the framework adds to a step of several GPUs."""
        collectives = max(use.sums for use in result.devices)
        if not collectives:
            return result
        hidden_s = max(use.hidden_s for use in result.devices)
        return lasting(result, result.step_time_s + waiting_seconds(
            self.laws.framework, result.step_time_s, hidden_s, len(result.representative), collectives, bool(self.options.xla)),
            is_exposed=True)

    def least_waiting_seconds(self, seconds: float, devices: int) -> float:
        """The least time that the framework adds to a step of ``devices`` that sum gradients, whose tasks take ``seconds``."""
        if not self._in_tensorflow:
            return 0.0
        return waiting_seconds(self.laws.framework, seconds, 0.0, devices, 0, bool(self.options.xla))

    def run_step(self, plan: Plan, step: StepGraph, global_batch: Optional[int] = None) -> Simulation:
        """Predict one step of a captured graph under a plan, op by op.

        On CPU devices with a calibration, the ops of a process' devices share its cores.  With offloading, the result has one
        more device for each process: its host, after the devices of its node.

        Args:
            global_batch: examples in a step; None: as in the captured one.  Ops that were measured at several batch sizes follow
                these measurements.

        Raises:
            PlanError: the plan is for another graph or a larger cluster, or no op of the graph has a time.
        """
        if not step.seconds:
            raise PlanError("the step graph has no times of ops, so a step would take no time; add them with StepGraph.measured, "
                            "or write a graph that has them with `whale profile SCRIPT --ops FILE`")
        cluster, numbers = beside_hosts(plan, self.cluster)
        simulator = self if numbers is None else Simulator(cluster, self.options)
        return simulator._run_step(plan, step, global_batch, numbers)

    def _run_step(self, plan: Plan, step: StepGraph, global_batch: Optional[int],
                  numbers: Optional[Mapping[int, int]] = None) -> Simulation:
        began = time.process_time()
        known = self.options.calibration
        costs = OpEstimator(ModelGraph(step.name, step.batch, step.precision, OPTIMIZERS["sgd"], (), ()), known)
        program, subject, tasks = captured_step(plan, step, self.cluster, self.network, costs, global_batch, numbers)
        graph = tasks.graph()
        limits = tasks.limits if known is not None and known.cores is not None else None
        result = self._result(program, graph, subject, time.process_time() - began, limits=limits)
        return result if known is None else lasting(result, result.step_time_s + known.step_s)

    def _steady(self, strategy: CompleteStrategy, compiled: Compiled, compiled_s: float) -> Optional[Simulation]:
        """The result extrapolated from short runs, each twice as long, until one is periodic; None if that saves nothing."""
        total, count = strategy.num_micro_batch, first_run(strategy)
        if strategy.schedule != "backward_first" or strategy.micro_batch_slices is not None:
            return None
        while 2 * count < total:
            short = self._simulate(strategy._replace(num_micro_batch=count), compiled, compiled_s)
            period = period_of(short, strategy)
            if period is not None:
                more = (total - count) % period
                first, second = (self._simulate(strategy._replace(num_micro_batch=count + size), compiled, compiled_s)
                                 if size else short for size in (more, more + period))
                return extended(strategy, first, second)
            count *= 2
        return None

    def _simulate(self, strategy: CompleteStrategy, compiled: Compiled, compiled_s: float) -> Simulation:
        began = time.process_time()
        program, unfolder, estimator = compiled
        graph = unfolder.unfold(strategy)
        compiled_s += time.process_time() - began
        subject = strategy.subject(lambda op, device: estimator.fewer(op, self.cluster.devices[device]))
        return self._result(program, graph, subject, compiled_s, unfolder.collapse.representative)

    def _result(self, program: Instructions, graph: ExecutionGraph, subject: Subject, compiled_s: float,
                representative: Optional[Dict[int, int]] = None, limits: Optional[Sequence[str]] = None) -> Simulation:
        """Play the graph.

        Args:
            representative: device -> the simulated device that stands for it; None: all devices are simulated.
            limits: what limits the speed of each task, if the ops of a process share its cores.
        """
        began = time.process_time()
        times = self._played(graph, limits)
        memory = tuple(memory_curves(program, graph, times))
        reserved = self.options.reserved_bytes
        devices = [self.cluster.devices[device] for device in graph.devices]
        usable = tuple(
            device.usable_bytes if reserved is None else float(device.memory_bytes - reserved.get(device.kind, 0))
            for device in devices)
        done = time.process_time()
        return Simulation(
            program, graph, times, memory, self.cluster, self.network, times.makespan, subject, usable,
            device_uses(program, graph, times, memory, usable, subject, self.cluster),
            representative or {device: device for device in graph.devices}, compiled_s, done - began)

    def _played(self, graph: ExecutionGraph, limits: Optional[Sequence[str]]) -> Times:
        options, known = self.options, self.options.calibration
        if limits is not None and known is not None and known.cores is not None:
            nodes = [self.cluster.devices[device].node for device in graph.devices]
            hosts = Hosts(nodes, known.cores, limits.__getitem__, known.slowed, known.wake_s, known.far_s,
                          operands(graph) if known.far else {})
            return run_on_cores(graph, self.network.bandwidths, hosts, options.sharing, options.overlap)
        gammas = [gamma_of(self.cluster.devices[device], known) for device in graph.devices]
        return run(graph, self.network.bandwidths, gammas, options.sharing, options.overlap)

    def _compiled(self, strategy: CompleteStrategy, estimator: Optional[OpEstimator]) -> Compiled:
        stages = tuple((stage.ops, stage.devices) for stage in strategy.stages)
        rest = tuple(value for name, value in strategy._asdict().items() if name not in UNFOLDED)
        key = (_Same(strategy.model), _Same(estimator), stages, rest, sums_every_micro_batch(strategy),
               bool(self.options.xla) and strategy.num_micro_batch > 1, schedule_of(strategy.schedule).splits)
        found = self._programs.pop(key, None)
        if found is None:
            kernels = Kernels(strategy.model, self.laws, bool(self.options.xla)) if self._in_tensorflow else None
            estimator = estimator or OpEstimator(strategy.model, self.options.calibration, kernels)
            program = compile_strategy(strategy, self.cluster, estimator)
            collapse = Collapse(program, self.cluster, self.network, self.options.collapse)
            found = Compiled(program, Unfolder(program, collapse, self.network), estimator)
        self._programs[key] = found
        if len(self._programs) > self._keep:
            self._programs.popitem(last=False)
        return found


def lasting(result: Simulation, step_time_s: float, is_exposed: bool = False) -> Simulation:
    """The result of a step that takes longer than its tasks: devices wait for the host, or (``is_exposed``) for gradients."""
    more_s, share = step_time_s - result.step_time_s, result.step_time_s / step_time_s
    exposed_s, bubble_s = (more_s, 0.0) if is_exposed else (0.0, more_s)
    devices = tuple(use._replace(exposed_s=use.exposed_s + exposed_s, bubble_s=use.bubble_s + bubble_s, mfu=use.mfu * share)
                    for use in result.devices)
    links = result.extended_links and tuple(use._replace(utilisation=use.utilisation * share) for use in result.extended_links)
    return result._replace(step_time_s=step_time_s, devices=devices, extended_links=links)


class _Same:
    """A key that is equal only for the same object, which it keeps alive, because the id of a deleted object may be reused."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def gamma_of(device: Device, calibration: Optional[Calibration]) -> float:
    """The overlap factor of a device: the calibrated one, else that of its kind."""
    if calibration is not None and calibration.device == device.type:
        return calibration.gamma
    return DEFAULT_GAMMA[device.kind]
