"""The functions that users call: ``import whale_tf as wh``."""

from __future__ import annotations

import contextlib
import os
from typing import Any, ContextManager, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Tuple, Union

import numpy as np

from whale_tf._tf_compat import function_tracing, make_logical_cpus, tf, v1
from whale_tf.capture import annotations as capture_annotations
from whale_tf.capture import fitting, hooks, layers
from whale_tf.capture.captured import capture
from whale_tf.capture.step import step_graph as captured_step
from whale_tf.cluster import (
    LAUNCHED,
    ONE_PROCESS,
    Cluster,
    Processes,
    device_names,
    devices_of_processes,
    find_processes,
    whole_cluster,
)
from whale_tf.config import Config
from whale_tf.decide.facts import parameters
from whale_tf.diagnosis.diagnose import diagnose
from whale_tf.diagnosis.record import FOLDER, STEPS, Record, file_of, to_json
from whale_tf.diagnosis.text import text_of
from whale_tf.documents import check_files
from whale_tf.errors import AnnotationError, PlanError, ProcessLostError
from whale_tf.ir.graph import OpGraph
from whale_tf.parallelize import Parallelized
from whale_tf.passes import compile_program
from whale_tf.plan import Plan
from whale_tf.planner.auto.settings import batch_to_plan_for
from whale_tf.planner.explain import explain_plan
from whale_tf.processes.datasets import explained
from whale_tf.processes.endings import tell_environment, tell_launcher
from whale_tf.program import Program
from whale_tf.runtime import triggers
from whale_tf.runtime.active import Active, Default, Observer, activate, current, described, observe, require, show, shown
from whale_tf.runtime.doctor import Collector
from whale_tf.runtime.snapshots.loops import check_data, plain
from whale_tf.runtime.triggers.sessions import SessionTriggers
from whale_tf.runtime.verifying.compare import check, summary, table
from whale_tf.runtime.verifying.divided import Show
from whale_tf.simulator import StepGraph


def init(
    config: Union[None, Config, Dict, str] = None,
    cluster: Union[None, Cluster, Dict, str] = None,
    plan: Union[None, Plan, Mapping, str] = None,
) -> None:
    """Start whale_tf.  Call it before building the graph.  A second call starts again from scratch.

    If the environment (``TF_CONFIG``, SLURM, Kubernetes) says that this process is one of several, each process takes the part
    of the plan on its own devices.

    Args:
        config: a Config, a dict, JSON text or the path of a JSON file.  Default: the environment variable ``WHALE_CONFIG``.
        cluster: a Cluster, a dict, a path, or a short form such as ``"cpu:4"``.  Default: ``WHALE_CLUSTER``, otherwise all GPUs,
            otherwise one CPU device.  In a job of several processes: the devices of all of them.
        plan: a Plan to run, a dict, JSON text or the path of a JSON file; or a dict of plans for several tf.functions by name.
            Functions without a plan follow their annotations.

    Raises:
        ConfigError, ClusterError, PlanError: the argument is not valid.
        UnsupportedTensorFlowError: whale_tf does not support the installed TensorFlow.
    """
    processes = find_processes()
    if processes.most:
        tell_launcher()
    parsed = Active(
        Config.parse(config), _cluster(cluster, processes), Plan.by_name(plan) if plan is not None else {}, processes)
    if shown() is not None:
        parsed = _on_cpus(parsed, plan)
    shutdown()
    hooks.install(triggers.callbacks(parsed))
    activate(parsed)
    if function_tracing() is not None and tf.executing_eagerly():
        parsed.undo_devices = make_logical_cpus(parsed.num_cpus)
        if parsed.runtime is not None:
            parsed.runtime.offer(parsed.num_cpus)
    if FOLDER in os.environ:
        doctor(int(os.environ.get(STEPS, "20")), path=file_of(os.environ[FOLDER], processes.rank))
    if processes.most and processes.is_chief:
        tell_environment()
    if processes.count > 1 or LAUNCHED in os.environ or parsed.snapshots is not None:
        parsed.termination.install(also_usr1=parsed.snapshots is not None)


def _on_cpus(asked: Active, plan: Union[None, Plan, Mapping, str]) -> Active:
    """The same request for the described cluster, or on as many logical CPU devices."""
    cluster = described()
    if cluster is None:
        cluster = asked.cluster if all(device.kind == "CPU" for device in asked.cluster.devices) else Cluster.parse(
            f"cpu:{len(asked.cluster.devices)}")
    return Active(asked.config, cluster, Plan.by_name(plan) if plan is not None else {}, ONE_PROCESS)


def _cluster(cluster: Union[None, Cluster, Dict, str], processes: Processes) -> Cluster:
    """The devices of all processes."""
    if cluster is not None:
        found = Cluster.parse(cluster)
    elif os.environ.get("WHALE_CLUSTER"):
        found = Cluster.local()
    else:
        found = whole_cluster(Cluster.local(), processes)
    if processes.count > 1:
        devices_of_processes(found, processes)
    return found


def shutdown() -> None:
    """Remove every hook, so that TensorFlow behaves as if whale_tf had never been imported.  Rewritten graphs stay rewritten."""
    state = current()
    if state is not None and state.doctor is not None:
        state.doctor.close()
    if state is not None:
        with contextlib.suppress(ProcessLostError):  # nobody reads values any more that a lost process held
            for fetches in list(state.fetches.values()):
                fetches.bring()
    hooks.uninstall()
    capture_annotations.forget()
    layers.forget()
    if state is not None:
        state.termination.remove()
        if state.runtime is not None:
            state.runtime.withdraw()
        state.variable_parts.close()
        state.undo_devices()
    activate(None)


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Show graphs that would be rewritten to ``observer`` and leave them unchanged, even if the script calls ``wh.init``."""
    observe(observer)
    init(Config(), cluster=whole_cluster(Cluster.parse("cpu:1"), find_processes()))
    try:
        yield
    finally:
        observe(None)
        shutdown()


@contextlib.contextmanager
def verifying(take: Show, cluster: Optional[Cluster] = None) -> Iterator[None]:
    """Call ``take`` in place of the first step that a script divides: with what makes its comparison in float64 with the local
    one, what is compared, and the divided step.

    Args:
        cluster: divide the step for these devices, which this machine need not have; None: those of the script, as CPU devices.
    """
    show(take, cluster)
    try:
        yield
    finally:
        show(None)
        shutdown()


def verify(step: Any, *batch: Any) -> None:
    """Compare a divided training step with the local one, both in float64 on logical CPU devices, and print a table.  Nothing is
    trained: variables, optimizer and metrics keep their values.

    Args:
        step: a tf.function that trains, or a compiled Keras model, after ``wh.init``.
        batch: the arguments of the function, or the mini-batch of the model (``x, y``).

    Raises:
        MismatchError: something differs.
        PlanError: the step was not divided.
    """
    state = require("wh.verify")
    if state.processes.count > 1:
        raise PlanError(f"wh.verify() compares in one process, but this job has {state.processes.count}; set verify to "
                        "'first_step' to compare their first step, or call wh.verify() in one process that has all devices")
    if not tf.executing_eagerly() or function_tracing() is None:
        raise PlanError("wh.verify() needs a tf.function or a Keras model in eager execution; for a script with Sessions use "
                        "verify: 'first_step', or the command whale verify")
    given = tf.nest.map_structure(  # as a call takes them: Python's values are constants
        lambda one: tf.convert_to_tensor(one) if isinstance(one, (np.ndarray, np.generic)) else one, batch)
    function = tf.function(step.python_function) if hasattr(step, "python_function") else _step_of(step, given)
    state.is_asked = True
    try:
        concrete = function.get_concrete_function(*given)
        flat = [part for part in tf.nest.flatten(given, expand_composites=True) if isinstance(part, tf.Tensor)]
        found = state.function_proofs.compared(concrete, flat)
    finally:
        state.is_asked = False
    if found is None:
        raise PlanError(f"wh.verify() has nothing to compare: tf.function {concrete.graph.name!r} was not divided, because it "
                        "takes no gradients and updates no variables itself, or because its plan is local training on one device")
    (compared, missing), where = found
    print(table(compared) + summary(compared, missing, 0.0, where).partition("; this delayed")[0])
    check(compared, where)


def _step_of(model: Any, given: Any) -> Any:
    """A function that trains a Keras model for one step."""
    if not hasattr(model, "train_step") or getattr(model, "optimizer", None) is None:
        raise PlanError(f"wh.verify({model!r}) needs a tf.function or a compiled Keras model: call model.compile() first")
    if hasattr(model, "_symbolic_build"):  # Keras 3: builds layers, metrics and optimizer as fit does
        model._symbolic_build(data_batch=given)
    return tf.function(lambda *data: model.train_step(data))


def doctor(steps: int = 20, batch: Optional[int] = None, path: Optional[str] = None) -> None:
    """Measure training steps after the first few, and print why they take as long as they do: the causes, each with what it
    costs according to the simulator (docs/doctor.md).  Call it after ``wh.init`` and before the graph is built.

    Args:
        steps: number of steps to measure; about a third of them is traced, op by op.
        batch: examples of a mini-batch, if the graph leaves them open; the sizes of messages follow from it.
        path: write what was measured to this file, for ``whale doctor``, and print nothing.  Several processes need it.

    Raises:
        PlanError: the number of steps is below 6, there are several processes and no path, or there is no such directory.
    """
    state = require("wh.doctor")
    check_files({"the path of wh.doctor": path}, {})
    if steps < 6:
        raise PlanError(f"wh.doctor(steps={steps}) measures too few steps to tell a cause from chance; give at least 6")
    if state.processes.count > 1 and path is None:
        raise PlanError("wh.doctor() in one of several processes sees only its own steps; start them with `whale run --doctor`, "
                        "or give each a path and call `whale doctor` with these files")

    def finished(record: Record) -> None:
        if path is None:
            print(text_of(record, diagnose(record)))
            return
        with open(path, "w", encoding="utf8") as handle:
            handle.write(to_json(record))

    assumed = batch_to_plan_for(state.config, state.cluster, None)
    state.doctor = Collector(steps, batch, assumed, state.cluster, state.processes, finished,
                             data_batch=lambda: state.data_batch)


def resume(data: Iterable[Any], epochs: int = 1, state: Optional[Dict[Any, Any]] = None,
           session: Any = None) -> Iterator[Tuple[int, Iterator[Any]]]:
    """Go through data in a training loop of the script's own, which the same command continues at the next step if it was ended::

        for epoch, batches in wh.resume(dataset, epochs=3):
            for batch in batches:
                loss = step(batch)

    With ``snapshot.path``, snapshots are taken while the loop runs: of all variables, of the position in the data, and of
    Python's and NumPy's generators of random numbers (docs/long_runs.md).  Without it, nothing else happens.

    Args:
        data: a tf.data.Dataset, or something else that can be gone through in each epoch and is then the same in each process.
        epochs: how often.
        state: a dict with other values that the loop changes and that shall go on, such as the best loss so far.
        session: in graph mode, the Session (or MonitoredTrainingSession) in which the loop trains, with values for all variables.
            Default: the default Session.

    Returns:
        In each epoch its number, from 0 on, and its elements.

    Raises:
        ConfigError: an argument cannot be used so.
        SnapshotError: the snapshot is of another model or other data.
    """
    active, kept = require("wh.resume"), {} if state is None else state
    check_data(data, epochs, kept)
    return plain(data, epochs) if active.snapshots is None else active.snapshots.loop(data, epochs, kept, session)


class Asked(NamedTuple):
    """The arguments of the script's ``wh.init``."""

    config: Config
    cluster: Cluster
    plan: Optional[Plan]
    processes: Processes


def asked(graph: tf.Graph) -> Asked:
    """For an Observer: the arguments of the script's ``wh.init``; local training if the script does not call it."""
    state = require("asked")
    return Asked(state.config, state.cluster, state.plan_of(graph), state.processes)


class _Strategy:
    """``with wh.replicate(n):``, or an argument of :func:`set_default_strategy`."""

    def __init__(self, kind: str, device_count: Optional[int], name: Optional[str]) -> None:
        self.kind, self.device_count, self.name = kind, device_count, name
        self._block: Optional[ContextManager] = None

    def __enter__(self) -> _Strategy:
        require(f"wh.{self.kind}").withdraw_in_graph_mode()
        if tf.executing_eagerly() and function_tracing() is not None:
            layers.load()
            hooks.install_keras()
            self._block = layers.LayersBlock(self.kind, self.device_count, self.name)
        else:
            graph = capture_annotations.current_graph(f"wh.{self.kind}")
            self._block = capture_annotations.annotate(graph, self.kind, self.device_count, self.name)
        item = self._block.__enter__()
        if item is not None and (layers.is_calling() or fitting.is_evaluating()):
            capture_annotations.annotations_of(graph).remembered.add(item.name)
        return self

    def __exit__(self, *error: Any) -> Optional[bool]:
        block, self._block = self._block, None
        assert block is not None
        return block.__exit__(*error)


def replicate(device_count: Optional[int] = None, name: Optional[str] = None) -> _Strategy:
    """Replicate the ops created inside the block, a TaskGraph, on ``device_count`` devices (Whale 3.1.2).  Each device computes
    its share of every micro-batch, and gradients are summed.

    Args:
        device_count: None means one replica on each of the cluster's devices.
    """
    return _Strategy("replicate", device_count, name)


def split(device_count: Optional[int] = None, name: Optional[str] = None) -> _Strategy:
    """Divide the ops created inside the block, a TaskGraph, and their variables over ``device_count`` devices (Whale 3.1.2,
    3.2.2).  Each device holds and computes its part, by the sharding pattern that exchanges the fewest bytes.

    Args:
        device_count: None means all of the cluster's devices.
    """
    return _Strategy("split", device_count, name)


def set_default_strategy(strategy: Optional[_Strategy]) -> None:
    """Set the strategy of ops outside every annotation, for the current graph (Whale 3.1), and for graphs and functions without
    one that train from now on, including those of Keras and Estimators.  In a graph, a second call ends the TaskGraph and begins
    another one, with the ops that are made from then on.  None removes it."""
    state = require("wh.set_default_strategy")
    state.default = None if strategy is None else Default(strategy.kind, strategy.device_count, strategy.name)
    if tf.executing_eagerly() and function_tracing() is not None:
        return
    graph = capture_annotations.current_graph("wh.set_default_strategy")
    if strategy is None:
        capture_annotations.forget_default_strategy(graph)
    else:
        capture_annotations.set_default_strategy(graph, strategy.kind, strategy.device_count, strategy.name)


def checkpoint(tensor: tf.Tensor) -> tf.Tensor:
    """If ``recompute`` is ``full`` or ``auto``, keep a tensor from the forward to the backward pass and recompute the ops between
    such tensors.  Once a script marks a tensor, the planner chooses no others, and every unmarked tensor is dropped.

    Returns:
        The tensor.

    Raises:
        AnnotationError: eager execution outside a function.
    """
    capture_annotations.annotations_of(capture_annotations.current_graph("wh.checkpoint")).checkpoints.append(tensor.name)
    return tensor


def batch_axis(tensor: tf.Tensor, dim: Optional[int]) -> tf.Tensor:
    """State which dimension of a tensor holds the examples of the batch, if whale_tf cannot know it: for an input of unknown
    rank, or the result of a Python function.  Call it before the first training step.  The statement is not checked.

    Args:
        tensor: an input, or a tensor that the model computes, of which each part of the batch then computes its own rows.
        dim: None means that the tensor is the same whatever the examples are, and is not divided.

    Returns:
        The tensor.

    Raises:
        AnnotationError: it is not a tensor of a graph, or has no such dimension.
    """
    require("wh.batch_axis")
    if not isinstance(tensor, tf.Tensor) or tf.executing_eagerly():
        raise AnnotationError(f"wh.batch_axis({tensor!r}, {dim}) needs a tensor of a graph; call it in a tf.function or in "
                              "graph mode, with a placeholder or the result of an op")
    rank = tensor.shape.rank if hasattr(tensor.shape, "rank") else tensor.shape.ndims
    if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int) or dim < 0 or rank is not None and dim >= rank):
        raise AnnotationError(f"wh.batch_axis({tensor.name!r}, {dim!r}): the dimension must be a whole number from 0 "
                              f"{'on' if rank is None else f'to {rank - 1}'}, or None for a tensor that is not divided")
    capture_annotations.annotations_of(tensor.graph).axes[tensor.name] = dim
    return tensor


def total_devices() -> int:
    """Number of devices of the cluster."""
    return len(require("wh.total_devices").cluster.devices)


total_gpus = total_devices  # the paper's name


def parallelize(graph: Optional[tf.Graph] = None) -> Plan:
    """Rewrite ``graph`` (default: the current one) now, rather than when it is finalized or first run.

    Raises:
        PlanError: the graph has no optimizer's update.
        UnknownShapeError: the rank of an input is not known before the first training step.
    """
    state = require("wh.parallelize")
    graph = graph or v1.get_default_graph()
    SessionTriggers(state).rewrite_now(graph, "wh.parallelize()")
    if graph not in state.done:
        raise PlanError(
            "the graph has no update ops: build the optimizer's train op (minimize or apply_gradients) before "
            "wh.parallelize(); to run the plan of a frozen model, import the model with name=''")
    return state.done[graph].plan


def op_graph(graph: Optional[tf.Graph] = None) -> OpGraph:
    """The planners' view of ``graph`` (default: the current one): its ops with their phases, without TensorFlow objects.

    This is the input of ``whale_tf.planner``'s searches, before the rewrite.  Nothing is changed.
    """
    require("wh.op_graph")
    return capture(graph or v1.get_default_graph()).graph


def current_plan(graph: Union[None, str, tf.Graph] = None) -> Optional[Plan]:
    """The plan under which ``graph`` (default: the one rewritten last) runs; None before the rewrite.

    Args:
        graph: a graph, or the name of a tf.function, which means its trace that was rewritten last.  The same holds in the
            functions below.

    Raises:
        PlanError: no function of that name was rewritten.
    """
    done = _parallelized("wh.current_plan", graph)
    return done.plan if done else None


def current_program(graph: Union[None, str, tf.Graph] = None) -> Optional[Program]:
    """The step that ``graph`` (default: the one rewritten last) runs, as bodies and calls; None before the rewrite.

    ``print(wh.current_program().to_text())`` shows it call by call.
    """
    done = _parallelized("wh.current_program", graph)
    if done is None:
        return None
    if done.emitted is not None:
        return done.emitted.context.program
    return compile_program(done.captured.step(done.region), done.plan)


def step_graph(name: str = "model", graph: Union[None, str, tf.Graph] = None) -> StepGraph:
    """The training step of a rewritten graph (default: the one rewritten last) for ``whale_tf.simulator``, op by op as its plan
    divides it.  Add op times with :meth:`StepGraph.measured`.

    Raises:
        PlanError: no graph has been rewritten yet, or its mini-batch has no static size.
    """
    done = _parallelized("wh.step_graph", graph)
    if done is None:
        raise PlanError("no graph has been rewritten yet: call wh.parallelize() before wh.step_graph()")
    captured = done.captured
    batch = captured.static_examples
    if batch is None:
        raise PlanError("the graph does not say how many examples a mini-batch has; give the inputs a static batch size")
    return captured_step(captured, done.region, name, done.plan.graph, batch)


def explain(graph: Union[None, str, tf.Graph] = None) -> str:
    """Text that lists TaskGraphs, devices, schedule, bridges and collectives, and every op whose parallel result is not exactly
    the local one."""
    state = require("wh.explain")
    graph = _meant(state, "wh.explain", graph)
    done = _parallelized("wh.explain", graph)
    if done is None:
        raise PlanError(
            "no graph has been rewritten yet: call wh.parallelize(), or wh.explain() after the first training step")
    form = done.emitted.form if done.emitted is not None else None
    text = _of_function(state, graph, done) if graph is not None and graph.building_function else ""
    names = device_names(state.cluster, state.processes)
    text += explain_plan(done.plan, done.region, names, done.assignment, form, done.too_large,
                         parameters(done.captured))
    if done.emitted is not None and len(done.emitted.context.processes.steps) > 1:
        text += _side_by_side(done.emitted.context.processes)
    if state.snapshots is not None:
        text += state.snapshots.explained()
    if state.runtime is None or done.plan.spans_processes or not state.shares_input:
        return text
    return text + explained(state.processes, state.sharing, state.config.io.slicing == "file")


def _of_function(state: Active, graph: tf.Graph, done: Parallelized) -> str:
    """The lines of :func:`explain` that only functions have."""
    lines = [f"tf.function {graph.name!r}"]
    others = [name for name in _function_names(state) if name != graph.name]
    if others:
        lines.append("other functions, each with its own plan: {}".format(", ".join(f"wh.explain({name!r})" for name in others)))
    if done.variables is not None:
        lines.append(f"{len(done.variables.parts)} variables are in parts on their devices; while anything else reads or writes "
                     "them, they are joined where the script created them")
    return "\n".join(lines) + "\n"


def _side_by_side(processes: Processes) -> str:
    members = ", ".join(map(str, processes.members))
    return (f"Processes: {processes.graphs} steps run side by side, each on its own examples. Process {processes.rank} "
            f"runs a part of step {processes.step}, with all of process(es) {members}.\n")


def _function_names(state: Active) -> List[str]:
    """Names of the functions that were rewritten."""
    return list(dict.fromkeys(graph.name for graph in state.done if graph.building_function))


def _meant(state: Active, caller: str, graph: Union[None, str, tf.Graph]) -> Optional[tf.Graph]:
    """The graph that a caller asks for; None if none has been rewritten yet."""
    if isinstance(graph, str):
        found = [one for one in state.done if one.building_function and one.name == graph]
        if not found:
            names = ", ".join(map(repr, _function_names(state))) or "none"
            raise PlanError(f"{caller}({graph!r}): no tf.function of that name was rewritten; rewritten functions: {names}")
        return found[-1]
    return state.latest if graph is None else graph


def _parallelized(caller: str, graph: Union[None, str, tf.Graph]) -> Optional[Parallelized]:
    state = require(caller)
    graph = _meant(state, caller, graph)
    return state.done.get(graph) if graph is not None else None
