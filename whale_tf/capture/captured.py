"""Everything the main path needs to know of a tf.Graph, without TensorFlow in it."""

from __future__ import annotations

from typing import Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import GraphDef, tf
from whale_tf.capture.annotations import Annotations, GradientCall, annotations_of
from whale_tf.capture.phases import Phases, find_phases
from whale_tf.capture.record import record
from whale_tf.capture.task_graphs import TaskGraphs, assign, assign_planned, check_convex, complete
from whale_tf.capture.unseen import model_phases
from whale_tf.capture.variables import Variables, optimizer_state
from whale_tf.errors import PlanError
from whale_tf.ir.batch_axis import BatchAxis, Options, analyse, find_batch_axis
from whale_tf.ir.graph import OpGraph, Phase
from whale_tf.ir.region import Region
from whale_tf.ir.training_step import TrainingStep, find_update
from whale_tf.plan import Plan


class Spec(NamedTuple):
    """A TaskGraph as annotated; ``device_count`` None: all devices; ``batch_of``: see :class:`whale_tf.plan.TaskGraphPlan`."""

    name: str
    strategy: str
    device_count: Optional[int]
    batch_of: Optional[int] = None


class Captured(NamedTuple):
    """Attributes:
    scope: numbers of the FORWARD and BACKWARD ops.
    task_graph: TaskGraph of every op, -1 outside the region.
    specs: the TaskGraphs.
    variable_homes: variable op -> its TaskGraph, for variables the region reads.
    gradient_home: gradient tensor -> TaskGraph of the variable it updates.
    gradients: (gradient tensor, variable op) in the order the gradients become ready.
    sources: batch inputs and their batch dimension.
    has_step: whether there is something to run on devices: an optimizer's update, or a model that a plan was made for.
    is_annotated: whether the TaskGraphs are the user's annotations.
    axis: how the batch goes through the graph; None: not known yet (see :meth:`batch_axis`).
    export: the graph as it was recorded, so that the rewrite need not export it again.
    """

    graph: OpGraph
    phases: Phases
    scope: FrozenSet[int]
    task_graph: List[int]
    specs: Tuple[Spec, ...]
    variable_homes: Dict[int, int]
    gradient_home: Dict[int, int]
    gradients: Tuple[Tuple[int, int], ...]
    sources: Dict[int, int]
    gradient_calls: Tuple[GradientCall, ...]
    has_step: bool
    is_annotated: bool = False
    axis: Optional[BatchAxis] = None
    export: Optional[GraphDef] = None

    def batch_axis(self, options: Options = Options()) -> BatchAxis:
        """How the batch goes through the graph from its sources."""
        if self.axis is not None and options == Options():
            return self.axis
        return analyse(self.graph, self.sources, self.scope, options)

    def step(self, region: Region, processes: int = 1) -> TrainingStep:
        """What passes make a Program of."""
        update = find_update(region, self.variable_homes, self.gradient_home)
        return TrainingStep(region, self.sources, update, self.gradients, processes)

    def state_bytes(self) -> Dict[int, int]:
        """Trained variable -> bytes of what its optimizer keeps for it."""
        variables = self.phases.variables
        state = optimizer_state(self.graph, variables, {variable for _, variable in self.gradients})
        return {owner: sum(variables[one].bytes for one in kept) for owner, kept in state.items()}


def capture(
    graph: tf.Graph, is_pipeline: bool = False, plan: Optional[Plan] = None, before: Optional[Captured] = None
) -> Captured:
    """Record a graph, find its phases, TaskGraphs, variables and batch inputs.

    Args:
        is_pipeline: there will be several micro-batches, so TaskGraphs must be able to run one after the other.
        plan: its TaskGraphs in place of the annotations'; those that hold the batch part of another count to that one.
        before: the graph before wh.split was carried out, whose TaskGraphs these are.

    Raises:
        AnnotationError: annotations that mean nothing, or TaskGraphs that cannot be stages.
        UnsupportedOpError: a batch input of unknown rank.
    """
    annotations = annotations_of(graph)
    export = graph.as_graph_def()
    ops = record(graph, export)
    phases = find_phases(ops, annotations)
    has_step = any(ops.ops[op].phase is Phase.APPLY for op in phases.variables.written_by)
    if not has_step and not annotations.gradient_calls and (plan is not None or before is not None):
        has_step = _is_planned_model(ops, phases, plan, before)
    scope = frozenset(op.id for op in ops.ops if op.phase in (Phase.FORWARD, Phase.BACKWARD))
    if not has_step:
        return Captured(ops, phases, scope, [], (), {}, {}, (), {}, (), False)
    if before is None:
        task_graphs, specs = _task_graphs(ops, annotations, phases, is_pipeline, plan)
    else:
        task_graphs, specs = _readers_at_home(_as_before(ops, before, phases.variables), phases.variables), before.specs
    order: Dict[int, int] = {}
    for target in phases.targets:
        order[target.variable] = max(order.get(target.variable, -1), target.tensors[0])
    ready = tuple((tensor, variable) for variable, tensor in sorted(order.items(), key=lambda item: item[1]))
    axis = None
    if before is None:
        axis = find_batch_axis(ops, _candidates(ops, scope), scope)
        sources = axis.sources
    else:
        sources = {ops.tensor(before.graph.tensor_name(tensor)): dim for tensor, dim in before.sources.items()}
    calls = tuple(annotations.gradient_calls)
    is_annotated = bool(annotations.items) and plan is None
    found = Captured(ops, phases, scope, [], (), {}, {}, ready, sources, calls, True, is_annotated, axis, export)
    return _with_task_graphs(found, task_graphs, specs)


def _is_planned_model(ops: OpGraph, phases: Phases, plan: Optional[Plan], before: Optional[Captured]) -> bool:
    """Whether this is a model that does not train and ``plan`` was made for, or was ``before``.  Its ops get their phases; what a
    script has added runs once, on its results.

    Raises:
        PlanError: it has variables, so that nobody can tell initialisers and savers from the model.
    """
    known = [op.phase for op in ops.ops]
    model_phases(ops)
    if before is not None:
        added = {op.name for op in before.graph.ops if op.phase is Phase.OTHER}
    else:
        assert plan is not None
        added = {op.name for op in ops.ops}.difference(name for task in plan.task_graphs for name in task.ops)
    for op in ops.ops:
        if op.phase is Phase.FORWARD and op.name in added:
            op.phase = Phase.OTHER
    if before is not None or (plan is not None and plan.graph == ops.fingerprint()):
        if len(phases.variables):
            raise PlanError("the plan is for a model that does not train and has variables; freeze it "
                            "(tf.compat.v1.graph_util.convert_variables_to_constants) and plan the frozen model")
        return True
    for op, phase in zip(ops.ops, known):
        op.phase = phase
    return False


def divided(captured: Captured, members: Sequence[Sequence[str]], specs: Sequence[Spec]) -> Captured:
    """The same graph with other TaskGraphs.

    Args:
        members: names of the forward ops of each; ops that none names join as un-annotated ones do.

    Raises:
        AnnotationError: they cannot run one after the other.
    """
    variables = captured.phases.variables
    found = assign_planned(captured.graph, members, variables)
    check_convex(captured.graph, found, [spec.name for spec in specs], variables)
    return _with_task_graphs(captured, _readers_at_home(found, variables), tuple(specs))


def _with_task_graphs(captured: Captured, task_graphs: TaskGraphs, specs: Tuple[Spec, ...]) -> Captured:
    homes = {variable: home for variable, home in task_graphs.homes.items() if variable in captured.scope}
    gradient_home: Dict[int, int] = {}
    for target in captured.phases.targets:
        for tensor in target.tensors:
            gradient_home.setdefault(tensor, homes.get(target.variable, 0))
    return captured._replace(task_graph=task_graphs.of, specs=specs, variable_homes=homes, gradient_home=gradient_home)


def _readers_at_home(found: TaskGraphs, variables: Variables) -> TaskGraphs:
    """Ops that take a handle run where the variable is."""
    of = list(found.of)
    for reader, read in variables.read_by.items():
        if of[reader] >= 0 and read[0] in found.homes:
            of[reader] = found.homes[read[0]]
    return TaskGraphs(of, found.homes)


def _task_graphs(
    ops: OpGraph,
    annotations: Annotations,
    phases: Phases,
    is_pipeline: bool,
    plan: Optional[Plan],
) -> Tuple[TaskGraphs, Tuple[Spec, ...]]:
    """TaskGraphs of the region; a graph without annotations is one, replicated over all devices."""
    if plan is not None:
        found = assign_planned(ops, _members(ops, plan), phases.variables)
        specs = tuple(Spec(task.name, task.strategy, task.device_count) for task in plan.task_graphs if task.batch_of is None)
    elif annotations.items:
        found = assign(ops, annotations, phases.variables)
        specs = tuple(Spec(item.name, item.strategy, item.device_count) for item in annotations.items)
    else:
        found = assign_planned(ops, [[op.name for op in ops.ops]], phases.variables)
        specs = (Spec("model", "replicate", None),)
    if is_pipeline:
        check_convex(ops, found, [spec.name for spec in specs], phases.variables)
    return _readers_at_home(found, phases.variables), specs


def _as_before(ops: OpGraph, before: Captured, variables: Variables) -> TaskGraphs:
    """Ops keep their TaskGraph; what wh.split made says its own."""
    home = {op.name: before.task_graph[op.id] for op in before.graph.ops}
    return complete(ops, [home.get(op.name, -1) for op in ops.ops], variables)


def _members(ops: OpGraph, plan: Plan) -> List[List[str]]:
    """Forward ops of each of the plan's TaskGraphs.

    Raises:
        PlanError: the plan was made for another graph.
    """
    fingerprint = ops.fingerprint()
    if plan.graph != fingerprint:
        raise PlanError(
            f"the plan was made for graph {plan.graph}, this graph is {fingerprint}: the model, the optimizer or the "
            f"annotations changed; make a "
            "new plan (wh.current_plan().to_json())"
        )
    for task in plan.task_graphs:
        for name in task.ops:
            if name not in ops:
                raise PlanError(
                    f"TaskGraph {task.name!r} of the plan lists op {name!r}, which the graph does not have"
                )
    members = [list(task.ops) for task in plan.task_graphs if task.batch_of is None]
    for task in plan.task_graphs:
        if task.batch_of is not None:
            members[task.batch_of].extend(task.ops)
    return members


def _candidates(ops: OpGraph, scope: FrozenSet[int]) -> List[int]:
    """Tensors of the input side that the region reads."""
    found: Dict[int, None] = {}
    for index in sorted(scope):
        for tensor in ops.ops[index].inputs:
            if ops.producer(tensor).phase is Phase.INPUT:
                found[tensor] = None
    return list(found)
