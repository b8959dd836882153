"""Profiles, plans and Programs of models in scripts and files, for ``whale profile``, ``whale plan`` and ``whale explain``."""

from __future__ import annotations

import os
import runpy
import sys
import time
from dataclasses import replace
from typing import Any, Callable, ContextManager, Dict, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf import api
from whale_tf._tf_compat import tf, v1
from whale_tf.capture.captured import capture
from whale_tf.capture.chain import captured_chain
from whale_tf.capture.model_file import file_chain, read_model_file
from whale_tf.capture.sizes import sized
from whale_tf.capture.step import step_graph
from whale_tf.capture.unseen import training_phases
from whale_tf.cluster import Cluster, devices_of_processes
from whale_tf.cluster.hardware import device_type
from whale_tf.config import Config
from whale_tf.decide.search import find_plan
from whale_tf.errors import InfeasibleError, PlanError
from whale_tf.graph_editor.definitions import definitions_of
from whale_tf.ir.graph import Phase
from whale_tf.ir.region import find_region
from whale_tf.parallelize import find_lowered
from whale_tf.passes.lowering import Lowering
from whale_tf.plan import Plan
from whale_tf.planner.assemble import static_batch
from whale_tf.planner.auto.settings import allowed_of, layers_of
from whale_tf.planner.candidate import Candidate, best, no_candidate
from whale_tf.planner.joint import Joint
from whale_tf.planner.measures import OWN, Allowed
from whale_tf.planner.rhino.automatic import Question, divisions, plan_of
from whale_tf.planner.simulated import with_slices
from whale_tf.profiler.chain import Chain
from whale_tf.profiler.graph_profile import OpTimes, Source, graph_profile
from whale_tf.profiler.model_profile import ModelProfile
from whale_tf.runtime.verifying.compare import Comparison
from whale_tf.runtime.verifying.divided import Step
from whale_tf.simulator.step_graph import KernelMemory, StepGraph
from whale_tf.simulator.trace import executed_s, kernel_memory, op_name

WARM_UP_STEPS = 2  # before the traced one
_TRAINING = ("a graph with an optimizer's update (tf.compat.v1.train, minimize or apply_gradients), or calling a tf.function "
             "that trains (Keras: fit)")


class _Done(BaseException):
    """Leaves a script as soon as there is nothing more to learn.  The script's own handlers do not catch it."""


class Profiled(NamedTuple):
    """``step``: the training step op by op; None for a model file, which has no training step."""

    profile: ModelProfile
    step: Optional[StepGraph] = None


def profile_model(path: str, arguments: Sequence[str], batch: int, name: str, measure: Optional[str] = None) -> Profiled:
    """The profile of a training script (``.py``), a frozen model (``.pb``) or a MetaGraph (``.meta``).

    Args:
        arguments: the script's own arguments.
        batch: examples in a mini-batch, if the graph does not say how many.
        measure: device type; the script then runs its first training steps, one of which is traced.  None runs nothing.

    Raises:
        PlanError: there is no such file, the script trains no graph, or measuring is requested for a model file.
        ClusterError: the device type is unknown.
    """
    if measure is not None:
        measure = device_type(measure).name
    if path.endswith((".pb", ".meta")):
        if measure is not None:
            raise PlanError(f"{path!r} has no input pipeline to run it with; measure a script")
        model = read_model_file(path)
        named = {model.ops.tensor_name(tensor): dim for tensor, dim in model.sources.items()}
        chain = file_chain(model, static_batch(model.ops, named) or batch)
        return Profiled(graph_profile(chain, Source(name, model.ops.fingerprint())))
    if not path.endswith(".py") or not os.path.isfile(path):
        raise PlanError(f"{path!r} is not a script (.py), frozen model (.pb) or MetaGraph (.meta); give the path of one")
    observer = _Profiler(batch, name, measure)
    _run_script(path, arguments, observer)
    if observer.profile is None:
        raise PlanError(
            "{!r} ended without {} {}, so there is nothing to profile".format(
                path, "finalizing or running" if measure is None else "training for 3 steps", _TRAINING))
    return Profiled(observer.profile, observer.step)


def plan_model(path: str, name: str, cluster: Cluster, search: str, batch: int,
               allowed: Allowed = Allowed("none")) -> Candidate:  # noqa: B008 (a frozen tuple)
    """The plan of a training script (``.py``), a frozen model (``.pb``) or a MetaGraph (``.meta``), from its op graph.

    Args:
        search: a value of ``auto_parallel``, or ``auto`` for all searches.
        batch: examples in a mini-batch.
        allowed: the allowed memory measures; none for a model file, which has no step to play.

    Raises:
        PlanError: there is no such file, the script trains no graph, or its mini-batches have another size.
        InfeasibleError: nothing fits.
    """
    precision = {} if allowed.precision in (OWN, "float32") else {"amp": allowed.precision}
    config = Config({
        "auto_parallel": True if search == "auto" else search, "auto.batch_size": batch, "recompute": allowed.recompute,
        "zero": allowed.zero, "offload": allowed.offload, "pipeline.schedule": allowed.schedule, **precision})
    if path.endswith((".pb", ".meta")):
        return _file_plan(path, name, cluster, config, batch)
    planner = _Planner(name, cluster, config)
    _run_script(path, (), planner)
    if planner.found is None:
        raise PlanError(f"{path!r} ended without finalizing or running {_TRAINING}, so there is nothing to plan")
    _check_batch(path, planner.found.global_batch, batch)
    return planner.found


class _Planner(api.Observer):
    """Plans the first training graph."""

    def __init__(self, name: str, cluster: Cluster, config: Config) -> None:
        self.name, self.cluster, self.config = name, cluster, config
        self.found: Optional[Candidate] = None

    def graph(self, graph: tf.Graph) -> None:
        if self.found is None:
            self.found = find_plan(graph, self.name, self.cluster, self.config)
        if self.found is not None:
            raise _Done()


def script_program(path: str, plan: Optional[Plan], cluster: Optional[Cluster]) -> Lowering:
    """The step of a training script, which runs until its graph is built, with its recipes lowered.

    Args:
        plan: the plan; None means the one that the script asks for.
        cluster: the cluster; None means the plan's number of devices, or the script's own cluster.

    Raises:
        PlanError: there is no such script, it trains no graph, or the plan was made for another graph or cluster, or divides ops.
    """
    check_script(path)
    compiler = _Compiler(plan, cluster)
    _run_script(path, (), compiler)
    if compiler.program is None:
        raise PlanError(f"{path!r} ended without finalizing or running {_TRAINING}, so it has no step to show")
    return compiler.program


class _Compiler(api.Observer):
    """Makes the Program of the first training graph."""

    def __init__(self, plan: Optional[Plan], cluster: Optional[Cluster]) -> None:
        self.plan, self.cluster = plan, cluster
        self.program: Optional[Lowering] = None

    def graph(self, graph: tf.Graph) -> None:
        asked = api.asked(graph)
        if self.plan is not None:
            cluster = self.cluster or Cluster.parse(f"cpu:{self.plan.num_devices}")
            self.program = find_lowered(graph, cluster, asked.config, self.plan, self.plan.processes)
        else:
            cluster = self.cluster or asked.cluster
            processes = devices_of_processes(cluster, asked.processes) if asked.processes.count > 1 else ()
            self.program = find_lowered(graph, cluster, asked.config, asked.plan, processes)
        if self.program is not None:
            raise _Done()


def _file_plan(path: str, name: str, cluster: Cluster, config: Config, batch: int) -> Candidate:
    """The graph of a model that cannot run here: its forward pass and, for a MetaGraph, the rest of a step."""
    began = time.perf_counter()
    model = read_model_file(path)
    named = {model.ops.tensor_name(tensor): dim for tensor, dim in model.sources.items()}
    _check_batch(path, static_batch(model.ops, named) or batch, batch)
    chain = file_chain(model, batch)
    source = Source(name, model.ops.fingerprint())
    training_phases(model.ops)
    question = Question(model.ops, sized(definitions_of(model.graph), model.ops, model.sources, batch), batch, named)
    found = divisions(question, cluster)
    try:
        found += Joint(layers_of(chain, source, cluster, config)).played(allowed_of(config))
    except InfeasibleError as error:
        found.append(no_candidate("TaskGraphs", error))
    taken = best(found, cluster)
    plan = (plan_of(model.ops, taken, named) if taken.profile is None
            else with_slices(taken, taken.profile, cluster, config.balance.algorithm))
    return replace(taken, model=name, search_seconds=time.perf_counter() - began, plan=plan)


def _check_batch(path: str, known: int, batch: int) -> None:
    if known != batch:
        raise PlanError(f"the mini-batches of {path!r} have {known} examples, but the batch to plan for is {batch}; give {known}")


class _Profiler(api.Observer):
    """Profiles the first training graph; with ``measure`` after it has traced a step."""

    def __init__(self, batch: int, name: str, measure: Optional[str]) -> None:
        self.batch, self.name, self.measure = batch, name, measure
        self.profile: Optional[ModelProfile] = None
        self.step: Optional[StepGraph] = None
        self._graph: Optional[tf.Graph] = None
        self._chain: Optional[Chain] = None
        self._source = Source(name)
        self._updates: Sequence[str] = ()
        self._steps = 0

    def graph(self, graph: tf.Graph) -> None:
        captured = capture(graph)
        if not captured.has_step or self._graph is not None:
            return
        if self.measure is not None and graph.building_function:
            raise PlanError(f"tf.function {graph.name!r} trains, and only the steps of Sessions are measured; profile the script "
                            "without measuring, by the FLOPs of its ops")
        ops = captured.graph
        named = {ops.tensor_name(tensor): dim for tensor, dim in captured.sources.items()}
        region = find_region(ops, captured.task_graph, captured.batch_axis(), list(captured.sources))
        chain = captured_chain(captured, region, static_batch(ops, named) or self.batch)
        sized = region._replace(graph=chain.graph)
        self.step = step_graph(captured, sized, self.name, ops.fingerprint(), chain.batch)
        self._graph, self._chain, self._source = graph, chain, Source(self.name, ops.fingerprint())
        self._updates = [op.name for op in ops.ops if op.phase is Phase.APPLY]
        if self.measure is None:
            self._finish(None)

    def run(self, graph: tf.Graph, original: Callable, *arguments: Any) -> Any:
        """Traces every run of the graph until enough of them have updated variables."""
        if graph is not self._graph or self.measure is None:
            return original(*arguments)
        fetches, feed = arguments[:2]
        metadata = v1.RunMetadata()
        result = original(fetches, feed, v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE), metadata)
        seconds = op_seconds(metadata)
        if any(name in seconds for name in self._updates):
            self._steps += 1
            if self._steps > WARM_UP_STEPS:
                self._finish(OpTimes(self.measure, seconds), kernel_memory(metadata))
        return result

    def _finish(self, times: Optional[OpTimes], memory: Optional[Dict[str, KernelMemory]] = None) -> None:
        assert self._chain is not None
        self.profile = graph_profile(self._chain, self._source, measured=times)
        if times is not None and self.step is not None:
            self.step = self.step.measured(self.step.batch, times.seconds, memory)
        raise _Done()


def op_seconds(metadata: Any) -> Dict[str, float]:
    """Seconds of every op that a traced run executed, summed over all its runs (an op in a loop has several)."""
    found: Dict[str, float] = {}
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            name = op_name(node.node_name)
            found[name] = found.get(name, 0.0) + executed_s(node)[1]
    return found


def verify_script(path: str, arguments: Sequence[str]) -> Tuple[Comparison, str]:
    """Compares the first step that a script divides with the local one, both in float64 on logical CPU devices.  The script runs
    up to this step, which is not made.

    Returns:
        The comparison, and what was compared.

    Raises:
        PlanError: there is no such script, or it divides nothing.
    """
    check_script(path)
    found: List[Tuple[Comparison, str]] = []

    def take(compared: Callable[[], Comparison], where: str, step: Step) -> None:
        found.append((compared(), where))
        raise _Done()

    run_script_in(api.verifying(take), path, arguments)
    if not found:
        raise PlanError(f"{path!r} ended without a training step that whale_tf divides, so there is nothing to compare: it needs "
                        "wh.init() with a plan beyond one device, and a training step")
    return found[0]


def check_script(path: str) -> None:
    """Raises PlanError: there is no such script."""
    if not path.endswith(".py") or not os.path.isfile(path):
        raise PlanError(f"{path!r} is not a script (.py); give the path of a training script")


def end_script() -> None:
    """Leaves the script that :func:`run_script_in` runs."""
    raise _Done()


def _run_script(path: str, arguments: Sequence[str], observer: api.Observer) -> None:
    run_script_in(api.observing(observer), path, arguments)


def run_script_in(context: ContextManager, path: str, arguments: Sequence[str]) -> None:
    """Runs a script in a context, until it ends or :func:`end_script` is called.

    Args:
        arguments: the script's own.
    """
    before = sys.argv, list(sys.path)
    sys.argv = [path] + list(arguments)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        with context:
            runpy.run_path(path, run_name="__main__")
    except (_Done, SystemExit):
        pass
    finally:
        sys.argv, sys.path[:] = before
