"""ZeRO's variables in parts: the pass ``shard`` for variables only, whose readers stay whole.

::

    before   x ──> MatMul ──> ... ──> MatMul' ──> clip ──> ApplyAdam(W)
                     ^ W

    after    x ──> MatMul ──> ... ──> MatMul' ──┬──> Slice ──> clip/0 ──> ApplyAdam(W/0)
                     ^ Concat(W/0, W/1)         └──> Slice ──> clip/1 ──> ApplyAdam(W/1)

Ops that depend only on a variable (a cast, its weight decay) and its update are divided by the rules of ``wh.split``, so that
every part is a variable with its own home.  Each call has its own concatenation, forward and backward, so that no replica does
this for the others.  A variable with sparse gradients is not divided along its rows, but along another dimension: each part then
takes its slice of the same rows.
"""

from __future__ import annotations

from typing import Dict, FrozenSet, Mapping, Optional, Tuple

from whale_tf._tf_compat import tf
from whale_tf.capture.captured import Captured
from whale_tf.errors import PlanError, UnsupportedOpError
from whale_tf.ir.graph import TRAINED, Op
from whale_tf.ir.parts import apportion
from whale_tf.ir.region import Region
from whale_tf.ir.traits import ASSIGNS, CONDITIONALS, CONTROL_FLOW, READS, Role, VariableUse, traits
from whale_tf.ir.verify import verify_pass
from whale_tf.patterns import spread
from whale_tf.patterns.spread import Spread
from whale_tf.patterns.strategy import Sizes
from whale_tf.plan import Plan
from whale_tf.planner.homes import Dimension, TrainedVariable
from whale_tf.planner.sharding import Assignment, assign_parts
from whale_tf.planner.sharding.initial import with_initial_values
from whale_tf.transforms.shard import shard
from whale_tf.transforms.shard.divided_variables import DividedVariables
from whale_tf.transforms.shard.problem import in_bodies, sharding_problem


class Divisible:
    """Along which dimension a variable of a captured step can be divided.

    Attributes:
        reasons: variable that was asked about and cannot be divided -> why.
    """

    def __init__(self, captured: Captured, region: Region, plan: Plan) -> None:
        self._captured, self._region, self._plan = captured, region, plan
        self._in_bodies = in_bodies(captured)
        self._view = Sizes(captured.graph)
        self._sparse = {target.variable for target in captured.phases.targets if target.is_sparse}
        self.reasons: Dict[str, str] = {}

    def __call__(self, held: TrainedVariable) -> Optional[Dimension]:
        """The dimension with the most even parts; None: there is none."""
        variable, count = self._captured.graph.op(held.name).id, _count(self._plan, held.task_graph)
        reason = self._obstacle(variable)
        shape = _shape(self._captured, variable)
        dims = [Dimension(number, size) for number, size in enumerate(shape) if not reason]
        for dim in sorted(dims, key=lambda dim: -(-dim.size // count) / max(1, dim.size)):
            found = self._obstacle_along(variable, dim.number)
            if not found:
                return dim
            reason = reason or found
        self.reasons[held.name] = reason or "it is a scalar"
        return None

    def why_not(self, variable: int, dim: int) -> str:
        """Why a variable cannot be divided along a dimension; empty: it can."""
        return self._obstacle(variable) or self._obstacle_along(variable, dim)

    def _obstacle_along(self, variable: int, dim: int) -> str:
        shape = _shape(self._captured, variable)
        count = _count(self._plan, self._captured.variable_task_graph[variable])
        if not 0 <= dim < len(shape) or shape[dim] < count:
            return f"its shape {list(shape)} has no dimension {dim} with at least {count} elements"
        if dim == 0 and variable in self._sparse:
            return "its gradient is sparse, and counts rows of dimension 0"
        try:
            _assignment(self._captured, self._region, self._plan, {variable: dim})
        except UnsupportedOpError as error:
            return str(error)
        return ""

    def _obstacle(self, variable: int) -> str:
        """Why a variable cannot be divided at all."""
        captured, graph = self._captured, self._captured.graph
        tf_graph, taken = captured.definitions.graph, self._in_bodies.get(variable)
        if taken is not None:
            return f"op {taken.name!r} ({taken.type}), which runs a function, takes it"
        if tf_graph.building_function and tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer"):
            return "TensorFlow's graph optimizer is off, and only it removes undivided ops from a tf.function"
        shape = captured.phases.variables[variable].shape
        if shape is None or any(size is None or size < 0 for size in shape):
            return f"its shape is {shape}"
        for target in captured.phases.targets:
            known = self._view.shape(target.tensors[0]) if target.variable == variable else shape
            if known is None or tuple(known[target.is_sparse:]) != tuple(shape[target.is_sparse:]):
                return f"its gradient {graph.tensor_name(target.tensors[0])!r} has shape {known}"
        for tensor in captured.phases.variables[variable].aliases:
            for user, _ in graph.consumers(tensor):
                if not _takes_parts(graph.ops[user], graph.tensors[tensor].dtype == "resource"):
                    return f"op {graph.ops[user].name!r} ({graph.ops[user].type}) takes its handle"
        return ""


def _takes_parts(op: Op, is_resource: bool) -> bool:
    """Whether an op that takes a variable can take its parts (:mod:`whale_tf.transforms.shard.divided_variables`).  For ops of
    the step, the strategies decide instead."""
    if op.phase in TRAINED or op.type in READS | ASSIGNS or op.type == "SaveV2":
        return True
    if not is_resource:
        return not traits(op.type).is_write and traits(op.type).role is not Role.SWITCH
    return op.type in CONDITIONALS or traits(op.type).state in (VariableUse.IS_INITIALIZED, VariableUse.HANDLE)


def divide_variables(captured: Captured, region: Region, plan: Plan) -> Tuple[Captured, DividedVariables]:
    """The step with the plan's parts instead of the variables.

    Raises:
        PlanError: the plan divides a variable that the graph does not have, or that cannot be divided.
    """
    chosen, counts = {}, {}  # type: Dict[int, int], Dict[int, int]
    divisible = Divisible(captured, region, plan)
    for number, task in enumerate(plan.task_graphs):
        for name, dim in task.parts.items():
            variable = captured.graph.op(name).id if name in captured.graph else -1
            if captured.variable_task_graph.get(variable) != number:
                raise PlanError(f"TaskGraph {task.name!r} of the plan has parts of variable {name!r}, but not the variable")
            reason = divisible.why_not(variable, dim)
            if reason:
                raise PlanError(f"TaskGraph {task.name!r} of the plan divides variable {name!r} along dimension {dim}, which is "
                                f"not possible: {reason}")
            chosen[variable], counts[number] = dim, _count(plan, number)
    assignment = _assignment(captured, region, plan, chosen)
    if plan.init == "sharded":
        assignment = with_initial_values(captured.graph, captured.phases.variables.initializers, assignment)
    gathering = region.batch_level - region.sections
    divided, variables = shard(captured, assignment, counts, gathering)
    verify_pass(divided.graph, "after variables were divided")
    return divided, variables


def _shape(captured: Captured, variable: int) -> Tuple[int, ...]:
    """The shape of a variable; 0 where a size is not known."""
    return tuple(size or 0 for size in captured.phases.variables[variable].shape or ())


def _count(plan: Plan, task_graph: int) -> int:
    return sum(map(len, plan.task_graphs[task_graph].devices))


def _assignment(captured: Captured, region: Region, plan: Plan, dims: Mapping[int, int]) -> Assignment:
    """Args:
    dims: variable -> the dimension along which it is divided.
    """
    numbers = {captured.variable_task_graph[variable] for variable in dims}
    shares = {number: (1,) * _count(plan, number) for number in sorted(numbers)}
    whole: FrozenSet[int] = frozenset(region.batch_level).union(
        op.id for op in captured.graph.ops if op.type in CONTROL_FLOW and region.contains(op))
    spreads: Dict[int, Spread] = {}
    for variable, dim in dims.items():
        parts = shares[captured.variable_task_graph[variable]]
        spreads[variable] = spread.shard(dim, apportion(parts, _shape(captured, variable)[dim], 1))
    return assign_parts(sharding_problem(captured, {}, shares, only=set(dims), whole=whole), spreads)
