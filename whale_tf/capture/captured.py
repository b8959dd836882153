"""Everything that the main path needs to know about a tf.Graph, without TensorFlow objects."""

from __future__ import annotations

from typing import Any, Collection, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.capture.annotations import Annotations, GradientCall
from whale_tf.capture.phases import Phases
from whale_tf.capture.recording import Recording, recording_of
from whale_tf.capture.sizes import sized
from whale_tf.capture.task_graphs import TaskGraphs, assign, assign_planned, check_bodies, check_convex, complete
from whale_tf.capture.unseen import model_phases
from whale_tf.capture.variables import Variables, optimizer_state
from whale_tf.errors import OtherGraphError, PlanError
from whale_tf.graph_editor.definitions import Definitions
from whale_tf.ir.across import of_function
from whale_tf.ir.batch_axis import BatchAxis, Known, Options, analyse, find_batch_axis, static_batch
from whale_tf.ir.graph import OpGraph, Phase, same_graph
from whale_tf.ir.holder import Holder
from whale_tf.ir.layout import Layout, rows_each
from whale_tf.ir.region import Region
from whale_tf.ir.training_step import TrainingStep, find_update, pulls_behind
from whale_tf.plan import Plan
from whale_tf.planner.assemble import UNANNOTATED, TaskGraphSpec


class _Fields(NamedTuple):
    graph: OpGraph
    phases: Phases
    scope: FrozenSet[int]
    task_graph: List[int]
    specs: Tuple[TaskGraphSpec, ...]
    variable_task_graph: Dict[int, int]
    gradient_task_graph: Dict[int, int]
    gradients: Tuple[Tuple[int, int], ...]
    sources: Dict[int, int]
    gradient_calls: Tuple[GradientCall, ...]
    has_step: bool
    is_annotated: bool = False
    axis: Optional[BatchAxis] = None
    stated: Mapping[str, Layout] = {}
    recording: Optional[Recording] = None


class Captured(_Fields, Holder):
    """Attributes:
    scope: numbers of the FORWARD and BACKWARD ops.
    task_graph: TaskGraph of every op, -1 outside the region.
    specs: the TaskGraphs.
    variable_task_graph: variable op -> its TaskGraph, for variables that the region reads.
    gradient_task_graph: gradient tensor -> TaskGraph of the variable that it updates.
    gradients: (gradient tensor, variable op) in the order in which the gradients become ready.
    sources: batch inputs and their batch dimension.
    has_step: whether there is something to run on devices: an optimizer's update, or a model that a plan was made for.
    is_annotated: whether the TaskGraphs are the user's annotations.
    axis: how the batch goes through the graph; None: not known yet (see :meth:`batch_axis`).
    stated: layouts of tensors that the user states, or that follow from how inputs are used.
    recording: the source of all this; None: it is no longer needed.
    """

    @property
    def definitions(self) -> Definitions:
        """NodeDefs of the graph's ops, and of those that passes made."""
        assert self.recording is not None, "the graph has been rewritten"
        return self.recording.definitions

    @property
    def static_examples(self) -> Optional[int]:
        """The number of examples of a mini-batch, according to the graph's shapes."""
        plain = static_batch(self.graph, {tensor: dim for tensor, dim in self.sources.items() if self._rows(tensor) == 1})
        sizes = ((static_batch(self.graph, {tensor: dim}), self._rows(tensor)) for tensor, dim in self.sources.items())
        return plain if plain is not None else next((size // rows for size, rows in sizes if size is not None), None)

    @property
    def examples(self) -> Optional[int]:
        """The number of examples of a mini-batch, according to the graph's shapes; else that of the first one, if the shapes of
        its inputs were learned."""
        return self.examples_of(self.definitions.given)

    def examples_of(self, given: Mapping[str, Sequence[Any]]) -> Optional[int]:
        """The same of a mini-batch of which these are the shapes of inputs, by name."""
        known = self.static_examples
        names = {self.graph.tensor_name(tensor): (dim, self._rows(tensor)) for tensor, dim in self.sources.items()}
        fed = [given[name][dim] // rows for name, (dim, rows) in names.items() if name in given]
        return known if known is not None else next(iter(fed), None)

    def sized(self, batch: int) -> OpGraph:
        """The op graph with mini-batches of ``batch`` examples unless it says another size; see :func:`sized`."""
        rows = {tensor: self._rows(tensor) for tensor in self.sources}
        return sized(self.definitions, self.graph, self.sources, batch, rows)

    def _rows(self, source: int) -> int:
        """Rows of a batch input that belong to one example."""
        layout = self.stated.get(self.graph.tensor_name(source))
        return 1 if layout is None else sum(map(rows_each, layout.blocks or (1,)))

    def batch_axis(self, options: Options = Options()) -> BatchAxis:
        """How the batch passes through the graph from its sources."""
        axis = self.axis
        is_asked = options.sync is not None or options.together
        if axis is not None and not is_asked and not (options.sections and (axis.unknown or axis.inexact)):
            return axis
        known = () if axis is None else axis.equalities
        options = options._replace(stated=self.stated, equalities=known, alike=self._alike())
        return analyse(self.graph, self.sources, self.scope, options)

    def _alike(self) -> Dict[int, int]:
        """Op that the last pass made -> the first one that it made of the same op, to which it is equal but for its edges."""
        copies = {} if self.recording is None else self.recording.copies
        first: Dict[str, int] = {}  # by the op that was copied
        found: Dict[int, int] = {}
        for op in self.graph.ops if copies else ():
            if op.name in copies and first.setdefault(copies[op.name], op.id) != op.id:
                found[op.id] = first[copies[op.name]]
        return found

    def with_rows_beside(self) -> Captured:
        """The same with further sources: inputs that come from the input pipeline together with sources, and of which no op needs
        single rows (such as labels of which a loss compares all pairs).  If there are several mini-batches, each has its own
        rows of these."""
        pulls = {pull for tensor in self.sources for pull in pulls_behind(self.graph, tensor)}
        sizes = {self._first(tensor) for tensor, dim in self.sources.items() if dim == 0 and self._rows(tensor) == 1}
        beside = {tensor: 0 for tensor in self.inputs_beside if self._first(tensor) in sizes
                  and not pulls.isdisjoint(pulls_behind(self.graph, tensor))}
        return self._replace(sources={**self.sources, **beside}, axis=None) if beside else self

    @property
    def inputs_beside(self) -> List[int]:
        """Inputs with a first dimension that are not divided, although the user has not said so."""
        return [tensor for tensor in _candidates(self.graph, self.scope) if tensor not in self.sources and self.graph.tensors[
            tensor].shape and self.graph.tensor_name(tensor) not in self.stated]

    def _first(self, tensor: int) -> Optional[int]:
        return (self.graph.tensors[tensor].shape or (-1,))[0]

    def step(self, region: Region, processes: int = 1, shares_batch: bool = False) -> TrainingStep:
        """The step from which passes make a Program.

        Args:
            processes: that compute one each, side by side.
            shares_batch: these divide one mini-batch.
        """
        update, across = region.once(find_update, self.variable_task_graph, self.gradient_task_graph), None
        if processes > 1:
            results = self.recording.results if self.recording is not None else None
            if results is None and shares_batch:
                results = [tensor for op in self.graph.ops for tensor in op.outputs]  # whatever a Session fetches
            if results is not None:
                across = of_function(region, self.sources, results, shares_batch)
        return TrainingStep(region, self.sources, update, self.gradients, processes, across)

    @property
    def optimizer_state(self) -> Dict[int, List[int]]:
        """Trained variable -> the variables that its optimizer keeps for it."""
        return self.once(_optimizer_state)

    def state_bytes(self) -> Dict[int, int]:
        """Trained variable -> bytes of what its optimizer keeps for it."""
        variables = self.phases.variables
        return {owner: sum(variables[one].bytes for one in kept) for owner, kept in self.optimizer_state.items()}


def _optimizer_state(captured: Captured) -> Dict[int, List[int]]:
    return optimizer_state(captured.graph, captured.phases.variables, {variable for _, variable in captured.gradients})


def capture(graph: tf.Graph, is_pipeline: bool = False, plan: Optional[Plan] = None) -> Captured:
    """Records a graph, and finds its phases, TaskGraphs, variables and batch inputs; see :func:`captured_from`."""
    return captured_from(recording_of(graph), is_pipeline, plan)


def captured_from(recording: Recording, is_pipeline: bool = False, plan: Optional[Plan] = None) -> Captured:
    """The TaskGraphs and batch inputs of a graph that was recorded.

    Args:
        is_pipeline: there will be several micro-batches, so TaskGraphs must be able to run one after the other.
        plan: its TaskGraphs replace the annotations'; one that has the batch part of another counts as that one.

    Raises:
        AnnotationError: invalid annotations, or TaskGraphs that cannot be stages.
        UnknownShapeError: a batch input of unknown rank.
    """
    ops, phases, annotations = recording.graph, recording.phases, recording.annotations
    has_step = _has_update(recording) or annotations.evaluates or (
        plan is not None and not annotations.gradient_calls and _is_planned_model(ops, phases, plan))
    scope = _scope(ops)
    if not has_step:
        return Captured(ops, phases, scope, [], (), {}, {}, (), {}, (), False)
    axis = find_batch_axis(ops, _candidates(ops, scope), scope, Known(annotations.axes, annotations.shapes))
    scope = _bring_in(ops, axis.sources)
    task_graphs, specs = _task_graphs(ops, annotations, phases, is_pipeline, plan)
    is_annotated = bool(annotations.items) and plan is None
    found = Captured(ops, phases, scope, [], (), {}, {}, _gradients(phases), axis.sources, tuple(annotations.gradient_calls),
                     True, is_annotated, axis, axis.stated, recording)
    return _with_task_graphs(found, task_graphs, specs)


def captured_after(before: Captured, recording: Recording) -> Captured:
    """A graph whose ``split`` TaskGraphs were divided, in the TaskGraphs that it had ``before``."""
    ops, phases = recording.graph, recording.phases
    if not _has_update(recording) and not recording.annotations.evaluates:
        added = {op.name for op in before.graph.ops if op.phase is Phase.OTHER}
        _mark_phases(ops, added)
    task_graphs = _readers_beside(_as_before(ops, before, phases.variables), phases.variables)
    sources = {ops.tensor(before.graph.tensor_name(tensor)): dim for tensor, dim in before.sources.items()}
    scope = _bring_in(ops, sources)
    found = before._replace(graph=ops, phases=phases, scope=scope, gradients=_gradients(phases), sources=sources,
                            gradient_calls=tuple(recording.annotations.gradient_calls), axis=None, recording=recording)
    return _with_task_graphs(found, task_graphs, before.specs)


def _has_update(recording: Recording) -> bool:
    ops = recording.graph.ops
    return any(ops[op].phase is Phase.APPLY for op in recording.phases.variables.written_by)


def _bring_in(ops: OpGraph, sources: Iterable[int]) -> FrozenSet[int]:
    """Make constants that are mini-batches inputs of the step; returns the ops of the step."""
    for tensor in sources:
        ops.producer(tensor).phase = Phase.INPUT
    return _scope(ops)


def _scope(ops: OpGraph) -> FrozenSet[int]:
    return frozenset(op.id for op in ops.ops if op.phase in (Phase.FORWARD, Phase.BACKWARD))


def _gradients(phases: Phases) -> Tuple[Tuple[int, int], ...]:
    """(gradient tensor, variable op), in the order in which they become ready."""
    order: Dict[int, int] = {}
    for target in phases.targets:
        order[target.variable] = max(order.get(target.variable, -1), target.tensors[0])
    return tuple((tensor, variable) for variable, tensor in sorted(order.items(), key=lambda item: item[1]))


def _is_planned_model(ops: OpGraph, phases: Phases, plan: Plan) -> bool:
    """Whether this is a model that does not train and for which ``plan`` was made.  If so, its ops get their phases.  Ops that a
    script has added run once, on its results.

    Raises:
        PlanError: see :func:`_check_frozen`.
    """
    known = [op.phase for op in ops.ops]
    added = {op.name for op in ops.ops}.difference(name for task in plan.task_graphs for name in task.ops)
    _mark_phases(ops, added)
    if same_graph(plan.graph, ops.fingerprint()):
        _check_frozen(phases)
        return True
    for op, phase in zip(ops.ops, known):
        op.phase = phase
    return False


def _mark_phases(ops: OpGraph, added: Collection[str]) -> None:
    """Sets the phases of a model that does not train; ``added`` ops are not part of it."""
    model_phases(ops)
    for op in ops.ops:
        if op.phase is Phase.FORWARD and op.name in added:
            op.phase = Phase.OTHER


def _check_frozen(phases: Phases) -> None:
    """Raises:
    PlanError: the model has variables, so its ops cannot be told apart from initialisers and savers.
    """
    if len(phases.variables):
        raise PlanError("the plan is for a model that does not train and has variables; freeze it "
                        "(tf.compat.v1.graph_util.convert_variables_to_constants) and plan the frozen model")


def divided(captured: Captured, members: Sequence[Sequence[str]], specs: Sequence[TaskGraphSpec]) -> Captured:
    """The same graph with other TaskGraphs.

    Args:
        members: names of the forward ops of each TaskGraph; other ops join one as un-annotated ops do.

    Raises:
        AnnotationError: the TaskGraphs cannot run one after the other.
    """
    variables = captured.phases.variables
    found = assign_planned(captured.graph, members, variables)
    check_convex(captured.graph, found, [spec.name for spec in specs], variables)
    return _with_task_graphs(captured, _readers_beside(found, variables), tuple(specs))


def _with_task_graphs(captured: Captured, task_graphs: TaskGraphs, specs: Tuple[TaskGraphSpec, ...]) -> Captured:
    of_variables = {variable: number for variable, number in task_graphs.of_variables.items() if variable in captured.scope}
    gradient_task_graph: Dict[int, int] = {}
    for target in captured.phases.targets:
        for tensor in target.tensors:
            gradient_task_graph.setdefault(tensor, of_variables.get(target.variable, 0))
    return captured._replace(task_graph=task_graphs.of, specs=specs, variable_task_graph=of_variables,
                             gradient_task_graph=gradient_task_graph)


def _readers_beside(found: TaskGraphs, variables: Variables) -> TaskGraphs:
    """Puts ops that take a handle into the variable's TaskGraph."""
    of = list(found.of)
    for reader, read in variables.read_by.items():
        if of[reader] >= 0 and read[0] in found.of_variables:
            of[reader] = found.of_variables[read[0]]
    return TaskGraphs(of, found.of_variables)


def _task_graphs(ops: OpGraph, annotations: Annotations, phases: Phases, is_pipeline: bool,
                 plan: Optional[Plan]) -> Tuple[TaskGraphs, Tuple[TaskGraphSpec, ...]]:
    """TaskGraphs of the region; a graph without annotations is one, replicated over all devices."""
    if plan is not None:
        found = assign_planned(ops, _members(ops, plan), phases.variables)
        specs = tuple(TaskGraphSpec(task.name, task.strategy, task.device_count)
                      for task in plan.task_graphs if task.batch_of is None)
    elif annotations.items:
        found = assign(ops, annotations, phases.variables)
        specs = tuple(TaskGraphSpec(item.name, item.strategy, item.device_count, one_step=item.one_step, alone=item.alone)
                      for item in found.blocks)
    else:
        check_bodies(ops)
        found = assign_planned(ops, [[op.name for op in ops.ops]], phases.variables)
        specs = (UNANNOTATED,)
    if is_pipeline:
        check_convex(ops, found, [spec.name for spec in specs], phases.variables)
    return _readers_beside(found, phases.variables), specs


def _as_before(ops: OpGraph, before: Captured, variables: Variables) -> TaskGraphs:
    """Ops keep their TaskGraph; ops that wh.split made are tagged with theirs."""
    of = {op.name: before.task_graph[op.id] for op in before.graph.ops}
    return complete(ops, [of.get(op.name, -1) for op in ops.ops], variables)


def _members(ops: OpGraph, plan: Plan) -> List[List[str]]:
    """Forward ops of each of the plan's TaskGraphs.

    Raises:
        OtherGraphError: the plan was made for another graph.
    """
    fingerprint = ops.fingerprint()
    if not same_graph(plan.graph, fingerprint):
        changed = "shapes of variables" if plan.graph.split("-")[0] == fingerprint.split("-")[0] else \
            "the model, the optimizer or the annotations"
        raise OtherGraphError(
            f"the plan was made for graph {plan.graph}, but this graph is {fingerprint}: {changed} changed; make a new plan "
            "(wh.current_plan().to_json())"
        )
    for task in plan.task_graphs:
        for name in task.ops:
            if name not in ops:
                raise PlanError(f"TaskGraph {task.name!r} of the plan lists op {name!r}, which the graph does not have")
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
