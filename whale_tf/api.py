"""What a user calls: ``import whale_tf as wh``."""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
import weakref
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    Mapping,
    MutableMapping,
    MutableSet,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

from whale_tf import functions
from whale_tf import session as whale_session
from whale_tf._tf_compat import function_tracing, global_seed, make_logical_cpus, relaxed_type, tf, v1
from whale_tf.capture import annotations as capture_annotations
from whale_tf.capture import hooks, layers
from whale_tf.capture.captured import capture
from whale_tf.capture.step import step_graph as captured_step
from whale_tf.capture.tapes import is_body
from whale_tf.cluster import (
    LAUNCHED,
    Cluster,
    Device,
    Processes,
    device_names,
    devices_of_processes,
    find_processes,
    host_name,
    whole_cluster,
)
from whale_tf.communicators import ProcessCommunicator
from whale_tf.config import Config
from whale_tf.errors import AnnotationError, OtherGraphError, PlanError, ProcessLostError, UnknownShapeError, WhaleError
from whale_tf.feeds import Waiting, elements, trains
from whale_tf.graph_editor.garbage import garbage_collection_paused
from whale_tf.ir.graph import OpGraph
from whale_tf.ir.traits import traits
from whale_tf.parallelize import Parallelized
from whale_tf.parallelize import parallelize as _parallelize
from whale_tf.passes import compile_program
from whale_tf.passes.form import INLINE
from whale_tf.plan import Plan
from whale_tf.planner.assemble import TaskGraphSpec, spans, static_batch
from whale_tf.planner.auto.settings import wants_search
from whale_tf.planner.explain import explain_plan
from whale_tf.processes.datasets import Adapter, explained, share, take_all, whole_rounds
from whale_tf.processes.functions import Functions
from whale_tf.processes.runtime import Runtime, runtime_of
from whale_tf.processes.termination import Termination, step_value
from whale_tf.program import Program
from whale_tf.simulator import StepGraph
from whale_tf.variable_parts import VariableParts


class Observer:
    """Looks at a script's graphs and runs in place of rewriting them (see :func:`observing`)."""

    def graph(self, graph: tf.Graph) -> None:
        """A graph with gradients, about to be finalized or run."""

    def run(self, graph: tf.Graph, original: Callable, *arguments: Any) -> Any:
        """``Session.run`` with (fetches, feed_dict, options, run_metadata)."""
        return original(*arguments)


class Asked(NamedTuple):
    """What the script's ``wh.init`` asks for."""

    config: Config
    cluster: Cluster
    plan: Optional[Plan]
    processes: Processes


class _Active:
    """Everything ``wh.init`` sets and ``wh.shutdown`` drops: the one place with global state, which TensorFlow's hooks force
    on us."""

    def __init__(self, config: Config, cluster: Cluster, plans: Dict[str, Plan], processes: Processes) -> None:
        self.config = config
        self.cluster = cluster
        self.plan = plans.get("")  # of everything
        self.plans = plans
        self.processes = processes
        self.runtime = runtime_of(processes, config.communication.start_timeout_s)
        self.functions = None if self.runtime is None else Functions(self.runtime, lambda: self.shares_input)
        self.termination = Termination(processes, self.runtime)
        self.done: MutableMapping[tf.Graph, Parallelized] = weakref.WeakKeyDictionary()
        self.fetches: MutableMapping[tf.Graph, whale_session.Fetches] = weakref.WeakKeyDictionary()
        self.looked_at: MutableMapping[tf.Graph, int] = weakref.WeakKeyDictionary()
        self.early: MutableMapping[Any, bool] = weakref.WeakKeyDictionary()  # sessions that ran before their graph's rewrite
        self.waiting: MutableMapping[tf.Graph, Waiting] = weakref.WeakKeyDictionary()  # for the shapes of inputs
        self.latest: Optional[Callable[[], Optional[tf.Graph]]] = None
        self.shares_input = False  # tf.data pipelines with the other processes
        self.shuffles = itertools.count()
        self.said: MutableSet[str] = set()  # warnings
        self.met: MutableSet[str] = set()  # names of functions that train
        self.jacobians: MutableSet[tf.Graph] = weakref.WeakSet()  # graphs of functions that take one by variables
        self.said_no_gradients = False
        self.default: Optional[_Strategy] = None  # of functions
        self.undo_devices: Callable[[], None] = lambda: None
        self.traced: MutableSet[tf.Graph] = weakref.WeakSet()  # graphs of functions
        self.drafts: MutableSet[tf.Graph] = weakref.WeakSet()  # those of them that are traced again before they run
        self.variable_parts = VariableParts()

    def driving(self) -> ContextManager:
        """A run that needs the other processes' devices, where this process drives them."""
        if self.runtime is None or not self.runtime.is_driver:
            return contextlib.nullcontext()
        return self.runtime.driving()


_active: Optional[_Active] = None
_observer: Optional[Observer] = None


def init(
    config: Union[None, Config, Dict, str] = None,
    cluster: Union[None, Cluster, Dict, str] = None,
    plan: Union[None, Plan, Mapping, str] = None,
) -> None:
    """Start whale_tf; call it before building the graph.  A second call starts afresh.

    Where the environment (``TF_CONFIG``, SLURM, Kubernetes) says that this process is one of several, each takes the part of
    the plan on its own devices.

    Args:
        config: a Config, a dict, JSON text or the path of a JSON file; default: the environment's ``WHALE_CONFIG``.
        cluster: a Cluster, a dict, a path, or a short form such as ``"cpu:4"``; default: ``WHALE_CLUSTER``, else all GPUs, else
            one CPU device.  In a job of several processes: the devices of all of them.
        plan: a Plan to run, a dict, JSON text or the path of a JSON file; or several, by the names of the tf.functions that they
            are for: functions without one are left to their annotations.

    Raises:
        ConfigError, ClusterError, PlanError: the argument is not valid.
        UnsupportedTensorFlowError: whale_tf does not run with the installed TensorFlow.
    """
    global _active
    processes = find_processes()
    parsed = _Active(
        Config.parse(config),
        _cluster(cluster, processes),
        Plan.by_name(plan) if plan is not None else {},
        processes,
    )
    shutdown()
    hooks.install(_callbacks(parsed))
    _active = parsed
    if function_tracing() is not None and tf.executing_eagerly():
        count = [device.kind for device in _own_devices(parsed)].count("CPU")
        parsed.undo_devices = make_logical_cpus(count)
        if parsed.runtime is not None:
            parsed.runtime.offer(count)
    if processes.count > 1 or LAUNCHED in os.environ:
        parsed.termination.install()


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
    """Remove every hook: TensorFlow behaves as if whale_tf had never been imported.  Rewritten graphs stay rewritten."""
    global _active
    if _active is not None:
        with contextlib.suppress(ProcessLostError):  # what a process took with it nobody reads any more
            for fetches in list(_active.fetches.values()):
                fetches.bring()
    hooks.uninstall()
    capture_annotations.forget()
    layers.forget()
    if _active is not None:
        _active.termination.remove()
        if _active.runtime is not None:
            _active.runtime.withdraw()
        _active.variable_parts.close()
        _active.undo_devices()
    _active = None


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Graphs that would be rewritten are shown to ``observer`` and left as they are, also under a ``wh.init`` of the script."""
    global _observer
    _observer = observer
    init(Config(), cluster="cpu:1")
    try:
        yield
    finally:
        _observer = None
        shutdown()


def asked(graph: tf.Graph) -> Asked:
    """For an Observer: what the script's ``wh.init`` asks for; without one, local training."""
    state = _require("asked")
    return Asked(state.config, state.cluster, _plan_of(state, graph), state.processes)


class _Strategy:
    """``with wh.replicate(n):``, or an argument of :func:`set_default_strategy`."""

    def __init__(self, kind: str, device_count: Optional[int], name: Optional[str]) -> None:
        self.kind = kind
        self.device_count = device_count
        self.name = name
        self._block: Optional[ContextManager] = None

    def __enter__(self) -> _Strategy:
        _withdraw_in_graph_mode(_require(f"wh.{self.kind}"))
        if tf.executing_eagerly() and function_tracing() is not None:
            layers.load()
            hooks.install_keras()
            self._block = layers.LayersBlock(self.kind, self.device_count, self.name)
        else:
            graph = capture_annotations.current_graph(f"wh.{self.kind}")
            self._block = capture_annotations.annotate(graph, self.kind, self.device_count, self.name)
        item = self._block.__enter__()
        if item is not None and layers.is_calling():
            capture_annotations.annotations_of(graph).remembered.add(item.name)
        return self

    def __exit__(self, *error: Any) -> Optional[bool]:
        block, self._block = self._block, None
        assert block is not None
        return block.__exit__(*error)


def replicate(device_count: Optional[int] = None, name: Optional[str] = None) -> _Strategy:
    """Ops created inside the block form a TaskGraph that is replicated on ``device_count`` devices (Whale 3.1.2): each computes
    its share of every micro-batch, gradients are summed.

    Args:
        device_count: None: one replica on each of the cluster's devices.
    """
    return _Strategy("replicate", device_count, name)


def split(device_count: Optional[int] = None, name: Optional[str] = None) -> _Strategy:
    """Ops created inside the block form a TaskGraph whose ops and variables are divided over ``device_count`` devices (Whale
    3.1.2, 3.2.2): each holds and computes its part, by the sharding pattern that exchanges the fewest bytes.

    Args:
        device_count: None: all of the cluster's devices.
    """
    return _Strategy("split", device_count, name)


def set_default_strategy(strategy: Optional[_Strategy]) -> None:
    """The strategy of ops outside every annotation, for the current graph (Whale 3.1); in eager execution for all functions (and
    graphs) that train and are traced from now on, Keras' among them.  None takes it back."""
    state = _require("wh.set_default_strategy")
    if tf.executing_eagerly() and function_tracing() is not None:
        state.default = strategy
        return
    graph = capture_annotations.current_graph("wh.set_default_strategy")
    if strategy is None:
        capture_annotations.forget_default_strategy(graph)
    else:
        capture_annotations.set_default_strategy(graph, strategy.kind, strategy.device_count, strategy.name)


def checkpoint(tensor: tf.Tensor) -> tf.Tensor:
    """Keep a tensor from the forward to the backward pass, and compute what lies between such tensors again, if ``recompute`` is
    ``full`` or ``auto``.  Once a script marks a tensor, the planner chooses no others: all that is not marked is dropped.

    Returns:
        The tensor.

    Raises:
        AnnotationError: eager execution outside of a function.
    """
    capture_annotations.annotations_of(capture_annotations.current_graph("wh.checkpoint")).checkpoints.append(tensor.name)
    return tensor


def batch_axis(tensor: tf.Tensor, dim: Optional[int]) -> tf.Tensor:
    """State along which dimension a tensor holds the examples of the batch, where whale_tf cannot know: of an input of unknown
    rank, of a Python function's result.  Call it before the first training step; what it says is not checked.

    Args:
        tensor: an input, or what the model computes: then each part of the batch computes its own rows of it.
        dim: None: the tensor is the same whatever the examples are, and is not divided.

    Returns:
        The tensor.

    Raises:
        AnnotationError: it is no tensor of a graph, or has no such dimension.
    """
    _require("wh.batch_axis")
    if not isinstance(tensor, tf.Tensor) or tf.executing_eagerly():
        raise AnnotationError(f"wh.batch_axis({tensor!r}, {dim}) is about a tensor of a graph; call it in a tf.function or in "
                              "graph mode, with a placeholder or what an op returned")
    rank = tensor.shape.rank if hasattr(tensor.shape, "rank") else tensor.shape.ndims
    if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int) or dim < 0 or rank is not None and dim >= rank):
        raise AnnotationError(f"wh.batch_axis({tensor.name!r}, {dim!r}): the dimension must be a whole number from 0 "
                              f"{'on' if rank is None else f'to {rank - 1}'}, or None for a tensor that is not divided")
    capture_annotations.annotations_of(tensor.graph).axes[tensor.name] = dim
    return tensor


def total_devices() -> int:
    """Number of devices of the cluster."""
    return len(_require("wh.total_devices").cluster.devices)


total_gpus = total_devices  # the paper's name


def parallelize(graph: Optional[tf.Graph] = None) -> Plan:
    """Rewrite ``graph`` (default: the current one) now, rather than when it is finalized or first run.

    Raises:
        PlanError: the graph has no optimizer's update.
    """
    state = _require("wh.parallelize")
    graph = graph or v1.get_default_graph()
    _ensure(state, graph, may_wait=False)
    if graph not in state.done:
        raise PlanError(
            "the graph has no update ops: build the optimizer's train op (minimize or apply_gradients) before "
            "wh.parallelize(); or, for the plan of a frozen model, import that with name=''"
        )
    return state.done[graph].plan


def op_graph(graph: Optional[tf.Graph] = None) -> OpGraph:
    """What the planners read of ``graph`` (default: the current one): its ops with their phases, without TensorFlow in them.

    For ``whale_tf.planner``'s searches, before the rewrite; nothing is changed.
    """
    _require("wh.op_graph")
    return capture(graph or v1.get_default_graph()).graph


def current_plan(graph: Union[None, str, tf.Graph] = None) -> Optional[Plan]:
    """The plan ``graph`` (default: the one rewritten last) runs under; None before the rewrite.

    Args:
        graph: or the name of a tf.function, of which the trace that was rewritten last is meant; so in the functions below.

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
    """The training step of a graph that was rewritten (default: the one rewritten last), op by op as its plan divides it, for
    ``whale_tf.simulator``; op times are added with :meth:`StepGraph.measured`.

    Raises:
        PlanError: no graph was rewritten yet, or its mini-batch has no static size.
    """
    done = _parallelized("wh.step_graph", graph)
    if done is None:
        raise PlanError("no graph has been rewritten yet: call wh.parallelize() before wh.step_graph()")
    captured = done.captured
    batch = static_batch(captured.graph, {captured.graph.tensor_name(t): dim for t, dim in captured.sources.items()})
    if batch is None:
        raise PlanError("the graph does not say how many examples a mini-batch has; give the inputs a static batch size")
    return captured_step(captured, done.region, name, done.plan.graph, batch)


def explain(graph: Union[None, str, tf.Graph] = None) -> str:
    """A table of TaskGraphs, devices, schedule, bridges and collectives, and of every place where the parallel result is not
    exactly the local one."""
    state = _require("wh.explain")
    graph = _meant(state, "wh.explain", graph)
    done = _parallelized("wh.explain", graph)
    if done is None:
        raise PlanError(
            "no graph has been rewritten yet: call wh.parallelize(), or wh.explain() after the first training step"
        )
    form = done.emitted.form if done.emitted is not None else None
    text = _of_function(state, graph, done) if graph is not None and graph.building_function else ""
    names = (*device_names(state.cluster, state.processes), host_name(state.cluster, state.processes))
    text += explain_plan(done.plan, done.region, names, done.assignment, form)
    if state.runtime is None or state.runtime.is_driver or not state.shares_input:
        return text
    return text + explained(state.processes, _sharing(state), state.config.io.slicing == "file")


def _of_function(state: _Active, graph: tf.Graph, done: Parallelized) -> str:
    """The lines of :func:`explain` that only functions have."""
    lines = [f"tf.function {graph.name!r}"]
    others = [name for name in _function_names(state) if name != graph.name]
    if others:
        lines.append("others, each with a plan of its own: {}".format(", ".join(f"wh.explain({name!r})" for name in others)))
    if done.variables is not None:
        lines.append(f"{len(done.variables.parts)} variables are in parts on their devices; while anybody else reads or writes "
                     "them they are put together where the script made them")
    return "\n".join(lines) + "\n"


def _function_names(state: _Active) -> List[str]:
    """Of the functions that were rewritten."""
    return list(dict.fromkeys(graph.name for graph in state.done if graph.building_function))


def _meant(state: _Active, caller: str, graph: Union[None, str, tf.Graph]) -> Optional[tf.Graph]:
    """The graph that a caller asks for; None: none was rewritten yet."""
    if isinstance(graph, str):
        found = [one for one in state.done if one.building_function and one.name == graph]
        if not found:
            names = ", ".join(map(repr, _function_names(state))) or "none"
            raise PlanError(f"{caller}({graph!r}): no tf.function of that name was rewritten; rewritten functions: {names}")
        return found[-1]
    return state.latest() if graph is None and state.latest is not None else graph


def _parallelized(caller: str, graph: Union[None, str, tf.Graph]) -> Optional[Parallelized]:
    state = _require(caller)
    graph = _meant(state, caller, graph)
    return state.done.get(graph) if graph is not None else None


def _require(caller: str) -> _Active:
    if _active is None:
        raise WhaleError(f"{caller} needs wh.init(): call it first, before building the graph")
    return _active


def _ensure(state: _Active, graph: tf.Graph, may_wait: bool = True) -> None:
    """Rewrite ``graph`` once it has an update; where the rank of an input is not known, after its first training run has begun.

    Raises:
        WhaleError: see :func:`whale_tf.parallelize.parallelize`.
    """
    calls = capture_annotations.annotations_of(graph).gradient_calls
    if graph in state.done:
        known = len(state.done[graph].captured.gradient_calls)
        if len(calls) > known:
            raise PlanError(
                "gradients of {} were added to a graph that is already rewritten: build every optimizer before the first "
                "training step (or wh.parallelize()), ops added later cannot be parallelized".format(", ".join(calls[known].ys))
            )
        return
    if state.looked_at.get(graph) == graph.version and (may_wait or graph not in state.waiting):
        return
    state.waiting.pop(graph, None)
    if not calls:
        _check_gradients(state, graph)
        if state.plan is None:
            state.looked_at[graph] = graph.version
            return
    if _observer is not None:
        _observer.graph(graph)
        state.looked_at[graph] = graph.version
        return
    if calls and state.plan is None and state.plans:
        raise PlanError(f"wh.init() was given plans of tf.functions ({', '.join(state.plans)}), but a graph of Sessions trains; "
                        "give its plan alone: wh.init(plan=...)")
    if calls:
        _give_default(state, graph)
    with whale_session.unfinalized(graph), garbage_collection_paused():
        keys = state.runtime.keys if state.runtime is not None else None
        try:
            has_run = bool(capture_annotations.annotations_of(graph).shapes)  # what runs before the first training step took over
            done = _parallelize(graph, state.cluster, state.config, state.plan, state.processes, keys, has_run)
        except UnknownShapeError as error:
            if not may_wait or state.processes.count > 1:
                raise
            done, state.waiting[graph] = None, Waiting(graph, error.tensors)
        if done is not None:
            state.done[graph] = done
            state.latest = weakref.ref(graph)
            runtime = _take_part(state, graph, done)
            if done.emitted is not None:
                state.fetches[graph] = whale_session.Fetches(done.emitted, done.replaced, done.variables, runtime)
    state.looked_at[graph] = graph.version


def _give_default(state: _Active, graph: tf.Graph) -> None:
    """A graph that trains gets the default strategy that was set in eager execution, unless it has one of its own."""
    default = state.default
    if default is not None and capture_annotations.annotations_of(graph).default is None:
        capture_annotations.set_default_strategy(graph, default.kind, default.device_count, default.name)


def _take_part(state: _Active, graph: tf.Graph, done: Parallelized) -> Optional[Runtime]:
    """What this process does for a rewritten graph: serve the one that drives it, drive the others, or train beside them.

    Returns:
        The runtime where several processes train beside each other.
    """
    if state.runtime is None or not done.plan.spans_processes:
        return state.runtime
    if done.serves:
        state.termination.serves = True
        state.runtime.serve(_session_config(state, None))
    state.runtime.drive()
    if state.shares_input:
        take_all(graph)
    return None


def _withdraw_in_graph_mode(state: _Active) -> None:
    """A script that builds graphs trains in Sessions, which start the server.  Eager execution would start it for no more than a
    function that is registered with it."""
    if state.runtime is not None and not tf.executing_eagerly() and not v1.get_default_graph().building_function:
        state.runtime.withdraw()


def _own_devices(state: _Active) -> Sequence[Device]:
    """Those of the cluster that this process has."""
    devices = state.cluster.devices
    if state.runtime is None:
        return devices
    return [devices[i] for i in devices_of_processes(state.cluster, state.processes)[state.processes.rank]]


def _session_config(state: _Active, config: Optional[v1.ConfigProto]) -> v1.ConfigProto:
    """The ConfigProto of a Session of this process."""
    kinds = [device.kind for device in _own_devices(state)]
    emit = state.config.emit if state.plan is None else state.plan.emit
    offload = state.config.offload if state.plan is None else state.plan.offload
    num_cpus = kinds.count("CPU") + (offload != "none")  # the last one stands for the host
    return whale_session.with_devices(config, num_cpus, "GPU" in kinds, emit != INLINE)


def _may_span(state: _Active, graph: tf.Graph) -> bool:
    """Whether a Session of this graph must see all processes' devices, if anybody can tell yet."""
    if state.plan is not None:
        return state.plan.spans_processes
    items = capture_annotations.annotations_of(graph).items
    specs = [TaskGraphSpec(item.name, item.strategy, item.device_count) for item in items]
    return spans(specs, devices_of_processes(state.cluster, state.processes), state.config)


def _check_gradients(state: _Active, graph: tf.Graph) -> None:
    """A graph with an optimizer's update whose gradients we did not see (a GradientTape in a graph, an imported MetaGraph) runs
    as it is; where it is asked to run otherwise, it is refused."""
    update = next((op for op in graph.get_operations() if traits(op.type).is_update), None)
    if update is None:
        return
    text = (f"op {update.name!r} updates a variable with gradients that whale_tf did not see. Compute them with "
            f"tf.gradients or a "
            "tf.compat.v1.train optimizer, after wh.init(); a tf.GradientTape in a graph and training steps imported from a "
            "MetaGraph cannot be parallelized")
    if state.plan is not None or state.config.auto.auto_parallel or capture_annotations.annotations_of(graph).items:
        raise PlanError(text)
    if len(state.cluster.devices) > 1:
        warnings.warn(text + ": this graph trains on one device")


def _refuse_outside_graph(state: _Active) -> None:
    """Training that neither a Session nor a tf.function runs is local; where more than that was asked for, it is refused.

    Raises:
        PlanError
    """
    asked = _more_than_local(state)
    if asked is None:
        return
    if function_tracing() is None:
        where = "here TensorFlow trains eagerly or in a tf.function, which whale_tf divides from TensorFlow 2.4 on"
    else:
        where = ("here TensorFlow trains eagerly, op by op. Put the training step into a function: write @tf.function above it "
                 "(Keras: leave out run_eagerly=True)")
    raise PlanError(
        f"wh.init() was given {asked}, but {where}; or train in graph mode: tf.compat.v1.disable_eager_execution() first, then a "
        "tf.compat.v1.train optimizer and tf.compat.v1.Session; or call wh.shutdown() before training on one device")


def _check_function_gradients(state: _Active, graph: tf.Graph) -> None:
    """Gradients of variables in a function.

    Raises:
        PlanError: more than local training was asked for, and they are taken in a part of it that cannot be divided.
    """
    if is_body(graph) and _more_than_local(state) is not None:
        if graph.outer_graph in state.jacobians:
            raise _no_jacobian(graph.outer_graph)
        raise PlanError(
            f"gradients of variables are taken inside a loop or condition ({graph.name!r}) of a tf.function; put the training "
            "step into a function of its own: write @tf.function above it, and call it in the loop")


def _no_jacobian(graph: tf.Graph) -> PlanError:
    return PlanError(
        f"tf.function {graph.name!r} trains with a tape.jacobian by variables, which cannot be divided; take the tape.gradient "
        "of a loss, or call wh.shutdown() before training on one device")


def _refuse_forward_mode(state: _Active) -> None:
    """Raises:
        PlanError: more than local training was asked for.
    """
    asked = _more_than_local(state)
    if asked is not None:
        raise PlanError(
            f"wh.init() was given {asked}, but a tf.autodiff.ForwardAccumulator differentiates by variables, which cannot be "
            "divided; take gradients with a tf.GradientTape, or call wh.shutdown() before training on one device")


def _check_called(state: _Active, function: Any) -> None:
    """A tf.function is called for the first time since wh.init.

    Raises:
        PlanError: it was traced before, and trains.
    """
    asked = _more_than_local(state)
    if asked is not None and functions.trained_unseen(function, state.traced):
        raise PlanError(
            f"wh.init() was given {asked}, but tf.function {function._name!r}, which trains, was called before wh.init(), and "
            "would go on as it was traced then: call wh.init() first, or make the function anew (Keras: compile the model again)")


def _may_use_xla(state: _Active) -> bool:
    """Whether Keras may choose to compile training steps with XLA: not where they are divided, because XLA knows one device."""
    asked = _more_than_local(state)
    if asked is not None:
        _say(state, f"wh.init() was given {asked}: Keras models with jit_compile='auto' are not compiled by XLA, which would put "
                    "the whole training step on one device")
    return asked is None


def _say(state: _Active, text: str) -> None:
    """A warning, once."""
    if text not in state.said:
        state.said.add(text)
        warnings.warn(text)


def _plan_of(state: _Active, graph: tf.Graph) -> Optional[Plan]:
    """The plan that wh.init was given for a graph."""
    return state.plans.get(graph.name, state.plan) if graph.building_function else state.plan


def _note_plan(state: _Active, graph: tf.Graph) -> None:
    """A function that trains is about to be divided: it may have been meant by a name that no function has."""
    state.met.add(graph.name)
    unmet = sorted(name for name in state.plans if name and name not in state.met)
    if unmet and graph.name not in state.plans:
        _say(state, f"wh.init() was given plans of tf.functions {', '.join(map(repr, unmet))}; tf.function {graph.name!r} trains "
                    "without a plan of its own, as its annotations and the configuration say")


def _divide_function(state: _Active, graph: tf.Graph, attributes: Mapping[str, Any]) -> None:
    """Rewrite a tf.function that trains, right after it was traced."""
    state.traced.add(graph)
    known = capture_annotations.annotations_of(graph)
    if known.trains:
        _give_default(state, graph)
    meant = [item.name for item in known.items if not known.trains and item.name not in known.remembered]
    if meant and not state.said_no_gradients:
        state.said_no_gradients = True
        warnings.warn(f"tf.function {graph.name!r} has annotations ({meant[0]!r}), but takes no gradients of "
                      "variables: it runs where its variables are, on one device, as do all functions that do not train")
    if not known.trains:
        return
    if _more_than_local(state) is None and not known.items and _observer is None:
        functions.untag(graph)
        return
    if functions.makes_variables(graph):
        state.drafts.add(graph)
        return
    if _observer is not None:
        _observer.graph(graph)
        return
    plan = _plan_of(state, graph)
    _note_plan(state, graph)
    functions.check(graph.name, known, attributes, state.config, plan, state.processes)
    with garbage_collection_paused():
        keys = state.runtime.keys if state.runtime is not None else None
        try:
            done = _parallelize(graph, state.cluster, functions.settings(state.config), plan, state.processes, keys)
        except OtherGraphError as error:
            raise PlanError(f"tf.function {graph.name!r}: {error}. Where functions have a plan each, or only some of them one, "
                            "name them: wh.init(plan={'name of the function': plan})") from None
        if done is None and graph in state.jacobians:
            raise _no_jacobian(graph)
        if done is None:
            raise PlanError(
                f"tf.function {graph.name!r} takes gradients of variables, but writes no variable with them; update the "
                "variables in the same function, so that whale_tf can divide the step")
        if done.emitted is not None:
            own = done.plan.local_part(state.processes.rank)
            functions.check_devices(graph.name, own, device_names(state.cluster, state.processes))
            divided = done.variables.parts if done.variables is not None else ()
            functions.finish(graph, done.emitted, done.replaced, divided, state.variable_parts)
            if state.functions is not None:
                assert isinstance(done.emitted.communicator, ProcessCommunicator)
                state.functions.rewritten(graph, done.emitted.communicator)
    state.done[graph] = done
    state.latest = weakref.ref(graph)


def _function_made(state: _Active, function: Any) -> None:
    """A concrete function is there."""
    if function.graph in state.drafts:
        functions.refuse_to_run(function)
    state.variable_parts.watch(function)


def _more_than_local(state: _Active) -> Optional[str]:
    """What wh.init was asked for beyond local training on one device."""
    pipeline, count = state.config.pipeline, len(state.cluster.devices)
    if state.plans:
        return "a plan"
    if wants_search(state.config):
        return "auto_parallel or num_task_graph"
    if count > 1:
        return f"{count} devices"
    return f"{pipeline.num_micro_batch} micro-batches" if (pipeline.num_micro_batch or 1) > 1 else None


def _sharing(state: _Active) -> Optional[Cluster]:
    """What says in which parts processes share input pipelines; None: in equal ones."""
    return None if state.config.balance.algorithm == "even" else state.cluster


def _callbacks(state: _Active) -> hooks.Callbacks:
    """What the hooks of capture/ call."""

    def fetch_map(graph: tf.Graph) -> Optional[whale_session.Fetches]:
        _ensure(state, graph)
        return state.fetches.get(graph)

    def planned(graph: tf.Graph, wanted: Any) -> Optional[whale_session.Fetches]:
        """For what prepares training runs without feeds: a graph that waits for shapes is refused by name."""
        fetches = fetch_map(graph)
        if graph in state.waiting and trains(elements(graph, wanted)[1]):
            _ensure(state, graph, may_wait=False)
        return fetches

    def gradients(grads: Any, xs: Any) -> Any:
        _withdraw_in_graph_mode(state)
        return capture_annotations.densified(grads, xs) if state.config.communication.sparse_as_dense else grads

    def session_config(target: str, graph: Optional[tf.Graph], config: Optional[v1.ConfigProto]) -> v1.ConfigProto:
        if state.runtime is None:
            return _session_config(state, config)
        graph = graph or v1.get_default_graph()
        if not state.runtime.is_free and _may_span(state, graph):
            _ensure(state, graph)
        return state.runtime.session_config(_session_config(state, config))

    def session_target(target: str, config: v1.ConfigProto) -> str:
        return target if state.runtime is None else state.runtime.target(target, config)

    def create_session(creator: Any, original: Callable, is_chief: bool) -> Any:
        if state.runtime is None:
            return original()
        if not is_chief:  # every process has variables of its own to initialise, whatever the script says
            creator = v1.train.ChiefSessionCreator(creator._scaffold, creator._master, creator._config)
            return creator.create_session()
        session = original()
        fetches = fetch_map(session.graph)
        if fetches is not None:
            fetches.make_equal(session, hooks.original_run(session))
        return session

    def save(
        saver: Any, original: Callable, session: Any, save_path: str, global_step: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if state.processes.is_chief:
            return state.termination.save(saver, original, session, save_path, global_step, *args, **kwargs)
        return save_path if global_step is None else f"{save_path}-{step_value(session, global_step)}"

    def add_event(original: Callable, event: Any) -> None:
        if state.processes.is_chief:
            original(event)

    def dataset(given: Any) -> Any:
        if state.runtime is None or not state.config.io.slicing:
            return given
        state.shares_input = True
        return share(given, state.processes, _sharing(state), state.config.io.slicing == "file")

    def training_data(adapter: Any) -> Any:
        if state.runtime is None or not state.config.io.slicing:
            return adapter
        return Adapter(adapter, state.processes, dataset, global_seed() is not None)

    def training_batches(given: Any, number: Optional[int]) -> Tuple[Any, int]:
        if state.runtime is None or not state.config.io.slicing:
            return given, 1
        return dataset(whole_rounds(given, number, state.processes)), state.processes.count

    def shuffle(seed: Optional[int]) -> Optional[int]:
        if seed is None and state.runtime is not None and state.config.io.slicing and global_seed() is None:
            seed = 1 + next(state.shuffles)  # the same in all processes: their shares must not overlap
        return seed

    def run(session: Any, original: Callable, *arguments: Any) -> Any:
        fetches = fetch_map(session.graph)
        if _observer is not None:
            return _observer.run(session.graph, original, *arguments)
        with state.termination.between(session, arguments[0]):
            if session.graph in state.waiting:
                is_made, result = state.waiting[session.graph].learn(original, *arguments)
                state.early[session] = True
                if state.waiting[session.graph].is_over:
                    state.looked_at.pop(session.graph)
                if is_made:
                    return result
                fetches = fetch_map(session.graph)
            if fetches is None:
                state.early[session] = True
                return original(*arguments)
            if state.early.pop(session, False):
                fetches.catch_up(original)
            with state.driving():
                return whale_session.run(fetches, session, original, *arguments)

    def make_callable(session: Any, original: Callable, *arguments: Any) -> Callable:
        fetches = planned(session.graph, arguments[0])
        found = original(*arguments) if fetches is None else whale_session.make_callable(
            fetches, session, original, hooks.original_run(session), *arguments)

        def call(*args: Any, **kwargs: Any) -> Any:
            with state.termination.between(session, arguments[0]), state.driving():
                return found(*args, **kwargs)

        return call

    def partial_run_setup(session: Any, original: Callable, *arguments: Any) -> Any:
        fetches = planned(session.graph, arguments[0])
        if fetches is not None:
            whale_session.check_partial_run(fetches, session, *arguments)
        return original(*arguments)

    def before_extend(session: Any) -> None:
        fetches = fetch_map(session.graph)
        if fetches is not None:
            fetches.prepare()

    return hooks.Callbacks(
        gradients=gradients,
        outside_graph=lambda: _refuse_outside_graph(state),
        function_gradients=lambda graph: _check_function_gradients(state, graph),
        jacobian=state.jacobians.add,
        forward_mode=lambda: _refuse_forward_mode(state),
        function_called=lambda function: _check_called(state, function),
        may_use_xla=lambda: _may_use_xla(state),
        arguments=lambda function_type: relaxed_type(function_type) if state.functions is not None else function_type,
        call=lambda function, original: original() if state.functions is None else state.functions.call(function, original),
        shuffle=shuffle,
        training_data=training_data,
        training_batches=training_batches,
        divides=lambda: _more_than_local(state) is not None,
        writes=lambda: state.processes.is_chief,
        traced=lambda graph, attributes: _divide_function(state, graph, attributes),
        made=lambda function: _function_made(state, function),
        before_call=state.variable_parts.before_call,
        before_finalize=lambda graph: _ensure(state, graph),
        session_config=session_config,
        session_target=session_target,
        create_session=create_session,
        save=save,
        add_event=add_event,
        dataset=dataset,
        run=run,
        make_callable=make_callable,
        partial_run_setup=partial_run_setup,
        before_extend=before_extend,
    )
