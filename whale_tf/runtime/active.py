"""The state that ``wh.init`` sets and ``wh.shutdown`` drops.  This is the only global state; TensorFlow's hooks require it."""

from __future__ import annotations

import atexit
import itertools
import os
import warnings
import weakref
from typing import Any, Callable, Dict, MutableMapping, MutableSet, NamedTuple, Optional, Sequence, Type

from whale_tf._tf_compat import tf, v1
from whale_tf.capture import distribution, hooks
from whale_tf.capture.annotations import annotations_of, set_default_strategy
from whale_tf.cluster import Cluster, Device, Processes, devices_of_processes
from whale_tf.communicators import Keys
from whale_tf.config import VERIFIED, Config
from whale_tf.emit.early import Early
from whale_tf.errors import WhaleError
from whale_tf.parallelize import Parallelized
from whale_tf.passes.form import INLINE
from whale_tf.plan import Plan
from whale_tf.planner.assemble import UNANNOTATED, TaskGraphSpec, spans
from whale_tf.planner.auto.settings import wants_search
from whale_tf.planner.homes import NONE
from whale_tf.processes.estimators import Estimators
from whale_tf.processes.functions import Functions
from whale_tf.processes.runtime import runtime_of
from whale_tf.processes.termination import Termination
from whale_tf.runtime.doctor import Collector
from whale_tf.runtime.feeds import Waiting
from whale_tf.runtime.of_graphs import OfGraphs
from whale_tf.runtime.sessions import Fetches, with_devices
from whale_tf.runtime.snapshots.runs import Runs
from whale_tf.runtime.variable_parts import VariableParts


class Observer:
    """Looks at a script's graphs and runs, which are then not rewritten (see :func:`whale_tf.api.observing`)."""

    def graph(self, graph: tf.Graph) -> None:
        """A graph with gradients, about to be finalized or run."""

    def run(self, graph: tf.Graph, original: Callable, *arguments: Any) -> Any:
        """``Session.run`` with (fetches, feed_dict, options, run_metadata)."""
        return original(*arguments)


class Default(NamedTuple):
    """The arguments of ``wh.set_default_strategy``."""

    kind: str
    device_count: Optional[int]
    name: Optional[str]


class Active:
    """Everything that one ``wh.init`` sets.

    Args:
        plans: plans by the names of their functions; the plan for everything is under "".
    """

    def __init__(self, config: Config, cluster: Cluster, plans: Dict[str, Plan], processes: Processes) -> None:
        self.config = config
        self.cluster = cluster
        self.plan = plans.get("")  # for everything
        self.plans = plans
        self.processes = processes
        self.runtime = runtime_of(processes, config.communication.start_timeout_s, config.communication.lost_after_s)
        self.functions = None if self.runtime is None else Functions(self.runtime, lambda: self.shares_input)
        self.estimators = Estimators(processes, self.runtime)
        self.termination = Termination(processes, self.runtime)
        self.done: MutableMapping[tf.Graph, Parallelized] = OfGraphs()
        self.fetches: MutableMapping[tf.Graph, Fetches] = OfGraphs()
        self.looked_at: MutableMapping[tf.Graph, int] = weakref.WeakKeyDictionary()
        self.early: MutableMapping[Any, Early] = weakref.WeakKeyDictionary()  # sessions that ran before their graph's rewrite
        self.proofs: MutableMapping[tf.Graph, Any] = OfGraphs()  # comparisons of first training steps
        self.waiting: MutableMapping[tf.Graph, Waiting] = OfGraphs()  # graphs that wait for shapes of inputs
        self.latest: Optional[tf.Graph] = None  # the graph that was rewritten last
        self.shares_input = False  # whether this process shares tf.data pipelines with the others
        self.shuffles = itertools.count()
        self.said: MutableSet[str] = set()  # warnings given so far
        self.met: MutableSet[str] = set()  # names of functions that train
        self.jacobians: MutableSet[tf.Graph] = weakref.WeakSet()  # graphs of functions with a Jacobian by variables
        self.only_annotated = ""  # about a function with annotations that does not train; said at the end if nothing trains
        self.default: Optional[Default] = None  # default strategy of functions
        self.undo_devices: Callable[[], None] = lambda: None
        self.traced: MutableSet[tf.Graph] = weakref.WeakSet()  # graphs of functions
        self.drafts: MutableSet[tf.Graph] = weakref.WeakSet()  # the traced graphs that are traced again before they run
        self.variable_parts = VariableParts(self.functions)
        self.runs = Runs(config.snapshot, processes, self.functions, self.runtime, self.variable_parts, self.termination,
                         hooks.original_run)
        self.snapshots = None if config.snapshot.path is None else self.runs
        self.knows_end = False  # fit is running, and never asks an iterator for more mini-batches than it has
        self.function_proofs: Any = None  # comparisons of functions' first calls
        self.is_asked = False  # whether wh.verify traces a function
        self.doctor: Optional[Collector] = None  # measures steps
        self.may_measure = False  # whether something measures steps later
        self.data_batch: Optional[int] = None  # examples of a full mini-batch of the data that fit trains on

    @property
    def asked_for(self) -> Optional[str]:
        """The part of ``wh.init``'s request that goes beyond local training on one device, in words."""
        pipeline, count = self.config.pipeline, len(self.cluster.devices)
        if self.plans:
            return "a plan"
        if wants_search(self.config):
            return "auto_parallel or num_task_graph"
        if count > 1:
            return f"{count} devices"
        if (pipeline.num_micro_batch or 1) > 1:
            return f"{pipeline.num_micro_batch} micro-batches"
        given = {"zero": self.config.zero, "offload": self.config.offload, "recompute": self.config.recompute,
                 "amp": self.config.precision, "xla": self.config.xla}
        return next((f"{key} {value!r}" for key, value in given.items() if value not in ("none", "float32", False)), None)

    @property
    def may_share_input(self) -> bool:
        """Whether each process takes its own share of tf.data pipelines.  The processes of a model replica must not, and Keras
        shares them itself if it has a distribution."""
        return self.processes.mini_batches > 1 and self._divides_input and not self._reads_all

    @property
    def joins_input(self) -> bool:
        """Whether each process reads all mini-batches of a step as one."""
        return self.processes.most > 1 and self._divides_input and self._reads_all

    @property
    def _divides_input(self) -> bool:
        return bool(self.config.io.slicing) and not distribution.is_set()

    @property
    def _reads_all(self) -> bool:
        """Whether processes run parts of one step, as far as that is known before anything is read."""
        if self.plan is not None:
            return self.plan.spans_processes
        devices = () if self.runtime is None else devices_of_processes(self.cluster, self.processes)
        return wants_search(self.config) or len(set(map(len, devices))) > 1

    @property
    def verifies(self) -> bool:
        """Whether first training steps are compared with the local ones."""
        return self.config.verify == "first_step" or self.is_asked or _shown is not None or VERIFIED in os.environ

    @property
    def own_devices(self) -> Sequence[Device]:
        """The cluster's devices that belong to this process."""
        devices = self.cluster.devices
        if self.runtime is None:
            return devices
        return [devices[i] for i in devices_of_processes(self.cluster, self.processes)[self.processes.rank]]

    @property
    def device_kinds(self) -> Sequence[str]:
        """Kind and number of each of the cluster's devices, such as ``CPU:0``."""
        return [f"{device.kind}:{device.number}" for device in self.cluster.devices]

    @property
    def num_cpus(self) -> int:
        """Number of TensorFlow CPU devices that this process needs.  If variables are on the host, the last one stands for it."""
        offloads = [plan.offload for plan in self.plans.values()] + ([] if self.plan is not None else [self.config.offload])
        return [device.kind for device in self.own_devices].count("CPU") + (set(offloads) != {"none"})

    @property
    def sharing(self) -> Optional[Cluster]:
        """The cluster whose speeds determine each process's part of an input pipeline; None means equal parts."""
        return None if self.config.balance.algorithm == "even" else self.cluster

    @property
    def keys(self) -> Optional[Keys]:
        """Numbers of this process's collectives, if there are several processes."""
        return None if self.runtime is None else self.runtime.keys

    @property
    def keeps_decisions(self) -> bool:
        """Whether something plays a step's Program later."""
        return shown() is not None or self.doctor is not None or self.may_measure

    def session_config(self, config: Optional[v1.ConfigProto] = None) -> v1.ConfigProto:
        """The ConfigProto of a Session of this process."""
        kinds = [device.kind for device in self.own_devices]
        emit = self.config.emit if self.plan is None else self.plan.emit
        return with_devices(config, self.num_cpus, "GPU" in kinds, emit != INLINE)

    def may_move(self, graph: tf.Graph) -> bool:
        """Whether a plan may divide variables, or put them elsewhere."""
        config = self.config
        return (self.plan is not None or wants_search(config) or (config.zero, config.offload) != (NONE, NONE)
                or any(item.strategy == "split" for item in annotations_of(graph).items))

    def may_span(self, graph: tf.Graph, plan: Optional[Plan]) -> bool:
        """Whether a model replica has devices in several processes, as far as the plan or the annotations tell."""
        if plan is not None:
            return plan.spans_processes
        items = annotations_of(graph).items
        if not items and wants_search(self.config):
            return True
        specs = [TaskGraphSpec(item.name, item.strategy, item.device_count, one_step=item.one_step) for item in items]
        return spans(specs or [UNANNOTATED], devices_of_processes(self.cluster, self.processes), self.config)

    def give_default(self, graph: tf.Graph) -> None:
        """Gives a training graph the default strategy that was set in eager execution, unless it has its own."""
        default = self.default
        if default is not None and annotations_of(graph).default is None:
            set_default_strategy(graph, default.kind, default.device_count, default.name)

    def withdraw_in_graph_mode(self) -> None:
        """Withdraws the server in graph mode.  A script that builds graphs trains in Sessions, which start the server; eager
        execution would start it just because a function is registered with it."""
        if self.runtime is not None and not tf.executing_eagerly() and not v1.get_default_graph().building_function:
            self.runtime.withdraw()

    def plan_of(self, graph: tf.Graph) -> Optional[Plan]:
        """The plan for a graph that was passed to wh.init."""
        return self.plans.get(graph.name, self.plan) if graph.building_function else self.plan

    def tell_untrained(self) -> None:
        """Warns at the end if functions have annotations, and nothing was trained."""
        if self.only_annotated and self.asked_for is not None and not self.met and not len(self.done):
            self.say(self.only_annotated)

    def say(self, text: str, category: Type[Warning] = UserWarning) -> None:
        """Gives a warning, once: a function may be traced again for mini-batches of another size."""
        if text not in self.said:
            warnings.warn(text, category)
            self.said.add(text)


_active: Optional[Active] = None
_observer: Optional[Observer] = None
_shown: Optional[Callable[..., Any]] = None
_described: Optional[Cluster] = None


def current() -> Optional[Active]:
    """The state, or None before ``wh.init`` and after ``wh.shutdown``."""
    return _active


def activate(state: Optional[Active]) -> None:
    global _active
    if _active is not None:
        _active.tell_untrained()
    _active = state


@atexit.register
def _leave() -> None:
    if _active is not None:
        _active.tell_untrained()
        if _active.doctor is not None:
            _active.doctor.close()


def observer() -> Optional[Observer]:
    """The observer that sees graphs instead of their being rewritten, whatever the script's own ``wh.init`` says."""
    return _observer


def observe(new: Optional[Observer]) -> None:
    global _observer
    _observer = new


def shown() -> Optional[Callable[..., Any]]:
    """What takes the comparison of the first training step, which is then not made (``whale verify``)."""
    return _shown


def described() -> Optional[Cluster]:
    """The cluster for which the step is divided, in place of the script's (``whale check``); this machine need not have it."""
    return _described


def show(new: Optional[Callable[..., Any]], cluster: Optional[Cluster] = None) -> None:
    global _shown, _described
    _shown, _described = new, cluster


def require(caller: str) -> Active:
    """Raises:
        WhaleError: ``wh.init`` was not called.
    """
    if _active is None:
        raise WhaleError(f"{caller} needs wh.init(): call it first, before building the graph")
    return _active
