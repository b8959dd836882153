"""The answer of the search: a strategy for every op of the ``split`` TaskGraphs and of the optimizer.

The search chooses strategies for the forward ops.  Backward and optimizer ops follow from them: each takes the strategy that
exchanges least, given the spreads of its operands, and a variable's gradient is made with the spread of the stored variable.
"""

from __future__ import annotations

from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf.errors import UnsupportedOpError
from whale_tf.ir.graph import LAYOUT_OF_ATTR, Op, Phase, bytes_of, elements_of
from whale_tf.ir.traits import LOSSES, VARIABLES, traits
from whale_tf.ir.traits import VariableUse as Effect
from whale_tf.patterns.spread import Spread, once
from whale_tf.patterns.strategy import ONCE, Strategy
from whale_tf.planner.sharding.force import forced_patterns
from whale_tf.planner.sharding.problem import BATCH, ShardingProblem, ShardingState
from whale_tf.planner.sharding.search import cheapest


class Choice(NamedTuple):
    """A unit as ``wh.explain()`` shows it.  ``bytes`` is what its strategy exchanges in a step, forward and backward."""

    op: str
    pattern: str
    bytes: float
    reason: str = ""
    is_forced: bool = False


class Stored(NamedTuple):
    """A variable or activation with a layout as ``wh.explain()`` shows it.  ``bytes`` is what the device with the largest part
    holds of a variable; 0: it is an activation."""

    what: str
    spread: Spread
    bytes: int = 0


class Assignment(NamedTuple):
    """Attributes:
    strategies: op -> strategy, for all ops that are not simply computed once.
    variables: variable op -> the spread in which it is stored, for sharded variables.
    task_graph: TaskGraph of every op in ``strategies`` and ``variables``, and of those with results in ``settled``.
    choices: the choices for the ops worth dividing.
    settled: tensor -> the spread into which it is brought as soon as it is made, for all its readers.
    reseeded: names of the ops that draw other initial values than the local script.
    alone: split TaskGraph -> its forward ops on examples that the first device computes for all.
    stored: the variables and activations of which layouts say how they lie.
    """

    strategies: Dict[int, Strategy]
    variables: Dict[int, Spread]
    task_graph: Dict[int, int]
    choices: List[Choice]
    settled: Dict[int, Spread] = {}
    reseeded: Sequence[str] = ()
    alone: Mapping[int, Tuple[str, ...]] = {}
    stored: Sequence[Stored] = ()

    @property
    def shards(self) -> Dict[str, str]:
        """Op name -> pattern: the part that the Plan keeps, and from which everything else follows."""
        return {choice.op: choice.pattern for choice in self.choices}


def assign(problem: ShardingProblem, force: object = None, shards: Optional[Mapping[str, str]] = None) -> Assignment:
    """Search strategies for forward ops, then derive those of the other ops.

    Args:
        force: ``patterns.force`` of the configuration.
        shards: a plan's choices, used instead of a search.

    Raises:
        ConfigError, PlanError: a pattern is forced on an op that does not have it; the message says why.
        UnsupportedOpError: no op of a TaskGraph can be split, or control flow is inside one.
    """
    forced = forced_patterns(problem, force, shards)
    result = Assignment({}, {}, {}, [], {})
    spreads: Dict[int, Spread] = {}
    for number in problem.splits:
        chosen, variables, prices = cheapest(problem, number, forced)
        result.strategies.update(chosen)
        spreads.update(variables)
        choices = _choices(problem, number, chosen, prices, forced)
        if not any(_divides(problem, choice) for choice in choices) and not _is_asked(problem, number):
            raise UnsupportedOpError(_nothing_to_split(problem, number, choices))
        result.choices.extend(choices)
    _complete(problem, result, spreads)
    stored = [_stored(problem, root, spread) for root, spread in problem.asked.items()]
    asked = [(op, problem.asked_of_result(op)) for number in problem.splits for op in problem.forward_ops(number)]
    stored += [Stored(op.attrs[LAYOUT_OF_ATTR], spread) for op, spread in asked if spread is not None]
    return result._replace(stored=stored)


def _is_asked(problem: ShardingProblem, number: int) -> bool:
    """Whether a layout divides a variable of a TaskGraph."""
    return any(spread.is_divided and _task_graph_of_root(problem, root, number) == number
               for root, spread in problem.asked.items())


def _stored(problem: ShardingProblem, root: int, spread: Spread) -> Stored:
    variable = problem.graph.producer(root)
    shapes, size = spread.shapes(variable.attrs["shape"]), bytes_of(variable.attrs["dtype"])
    return Stored(variable.attrs[LAYOUT_OF_ATTR], spread, max(elements_of(shape) for shape in shapes) * size)


def assign_parts(problem: ShardingProblem, variables: Mapping[int, Spread]) -> Assignment:
    """Variables in parts, with ops that read them whole (``problem.whole``): what follows from a variable alone, and its update,
    is divided like it.

    Args:
        variables: variable op -> its layout.

    Raises:
        UnsupportedOpError: an op that writes a variable, or takes its handle, cannot work on its parts.
    """
    result = Assignment({}, {}, {}, [], {})
    _complete(problem, result, {problem.graph.ops[variable].outputs[0]: spread for variable, spread in variables.items()})
    return result


def _complete(problem: ShardingProblem, result: Assignment, spreads: Dict[int, Spread]) -> None:
    """All that follows from the layouts of trained variables: slots, backward and optimizer ops."""
    for variable, others in problem.slots.items():
        spread = spreads.get(problem.graph.ops[variable].outputs[0])
        if spread is not None:
            spreads.update({problem.graph.ops[other].outputs[0]: spread for other in others})
    for slot, origin in problem.factored.items():
        spread = spreads.get(problem.graph.ops[origin.variable].outputs[0])
        own = origin.spread(spread) if spread is not None else None
        if own is not None:
            spreads[problem.graph.ops[slot].outputs[0]] = own
    _follow(problem, result, spreads)
    for op_id in [i for i, s in result.strategies.items() if s.how == ONCE]:
        del result.strategies[op_id]


def _divides(problem: ShardingProblem, choice: Choice) -> bool:
    """Whether a choice uses ``wh.split``: weights are in parts, or the work of an op without weights is divided."""
    op = problem.graph.op(choice.op)
    wanted = choice.is_forced or (problem.is_anchor(op) and not problem.has_weights(op))
    return choice.pattern not in ("once", BATCH) or (choice.pattern == BATCH and wanted)


def _choices(problem: ShardingProblem, task_graph: int, chosen: Mapping[int, Strategy], prices: Mapping[int, float],
             forced: Mapping[int, str]) -> List[Choice]:
    ops = problem.forward_ops(task_graph)
    units = {op.id for op in ops if problem.is_anchor(op) or op.type in LOSSES}
    unit_of: Dict[int, int] = {}  # an op that follows a unit belongs to it
    total: Dict[int, float] = {}
    for op in ops:
        sources = [unit_of[problem.graph.tensors[t].op] for t in op.inputs if problem.graph.tensors[t].op in unit_of]
        if op.id in units or sources:
            unit_of[op.id] = unit = op.id if op.id in units else sources[0]
            total[unit] = total.get(unit, 0.0) + prices.get(op.id, 0.0)
    found = []
    for op in ops:
        if op.id in units:
            strategy = chosen.get(op.id)
            pattern = (problem.undivided(op) if strategy is None else strategy).pattern
            reasons = problem.strategies(op, problem.splits[task_graph]).reasons if pattern in ("once", BATCH) else []
            found.append(Choice(op.name, pattern, total[op.id], "; ".join(reasons), op.id in forced))
    return found


def _nothing_to_split(problem: ShardingProblem, number: int, choices: List[Choice]) -> str:
    split = problem.splits[number]
    text = f"wh.split({split.devices}): nothing in TaskGraph {split.name!r} can be divided over {split.devices} devices"
    if choices:
        text += ": " + "; ".join("{!r}: {}".format(c.op, c.reason or "its operands cannot be divided") for c in choices[:3])
    else:
        text += ": " + (_hidden_product(problem.forward_ops(number)) or "it has no matrix product, convolution or embedding")
    return text + f". Use fewer devices, or wh.replicate({split.devices})"


def _hidden_product(ops: Iterable[Op]) -> str:
    """Which functional op has a product inside, in words; empty: none has."""
    for op in ops:
        if any(traits(inner.type).is_contraction or _hidden_product([inner]) for body in (op.body or {}).values()
               for inner in body.ops):
            return (f"its products are inside the function, loop or condition {op.name!r} ({op.type}), which runs whole on one "
                    "device")
    return ""


def _follow(problem: ShardingProblem, result: Assignment, spreads: Mapping[int, Spread]) -> None:
    """Strategies of the backward and optimizer ops, and of the plain reads of variables."""
    forward = dict(result.strategies)
    states: Dict[int, ShardingState] = {}
    for number in problem.splits:
        states[number] = ShardingState(problem, number)
        states[number].spreads.update({root: spread for root, spread in spreads.items()
                                       if _task_graph_of_root(problem, root, number) == number})
    for op in problem.graph.ops:
        task_graph = _task_graph_of(problem, op, states)
        if task_graph is None or op.type in VARIABLES:
            continue
        state = states[task_graph]
        if problem.is_read(op):
            spread = state.spread(op.inputs[0])
            if spread != once:
                result.strategies[op.id] = Strategy("read", "shards", (spread,), (spread,))
                result.task_graph[op.id] = task_graph
            continue
        if problem.whole and op.phase is not Phase.APPLY:
            strategy = _beside_whole(problem, state, op)
        elif op.phase is Phase.FORWARD:
            strategy = forward.get(op.id)
        else:
            before = forward.get(op.forward)  # a backward op is divided if its forward op is: it is as much work
            divided = problem.is_anchor(op) and before is not None and before.how != ONCE
            strategy = _least(problem, state, op, divided) if divided or not state.is_plain(op) else None
        if strategy is not None:
            state.take(op, strategy, 0.0)
            result.strategies[op.id], result.task_graph[op.id] = strategy, task_graph
        for tensor in op.outputs if op.phase is Phase.BACKWARD else ():
            if tensor in problem.gradients:
                _settle(problem, state, result, tensor, task_graph)
    for number, state in states.items():
        for root, spread in state.spreads.items():
            if problem.is_variable(root) and spread != once:
                variable = problem.graph.tensors[root].op
                result.variables[variable], result.task_graph[variable] = spread, number


def _beside_whole(problem: ShardingProblem, state: ShardingState, op: Op) -> Optional[Strategy]:
    """An op of the region where some are whole; None: it is computed once."""
    takes_part = any(problem.graph.tensors[tensor].dtype.endswith(("resource", "_ref")) and state.spread(tensor) != once
                     for tensor in op.inputs)
    return _least(problem, state, op, False) if takes_part or (op.id not in problem.whole and not state.is_plain(op)) else None


def _settle(problem: ShardingProblem, state: ShardingState, result: Assignment, tensor: int, task_graph: int) -> None:
    """Brings gradients into their variables' layout before the update begins, whose ops then run where the variable is."""
    wanted = state.spreads.get(_target(problem, tensor), once)
    if state.spread(tensor) != wanted:
        result.settled[tensor] = state.spreads[tensor] = wanted
        result.task_graph.setdefault(problem.graph.tensors[tensor].op, task_graph)


def _task_graph_of_root(problem: ShardingProblem, root: int, default: int) -> int:
    """The TaskGraph of a variable.  A slot belongs to its variable's TaskGraph."""
    variable = problem.graph.tensors[root].op
    task_graph = problem.variables.get(variable, -1)
    if variable in problem.factored:
        task_graph = problem.variables.get(problem.factored[variable].variable, default)
    if task_graph < 0:
        task_graph = problem.variables[problem.owners[variable]] if variable in problem.owners else default
    return task_graph


def _task_graph_of(problem: ShardingProblem, op: Op, states: Mapping[int, ShardingState]) -> Optional[int]:
    """The split TaskGraph of an op.  An optimizer's op joins that of the divided tensors it reads, if there is only one, and so
    does an op that asks for a variable's shape (a loop's gradient does, even where nobody needs the gradient)."""
    if problem.task_graph[op.id] >= 0:
        return problem.task_graph[op.id] if problem.task_graph[op.id] in states else None
    asks_for_shape = op.phase is Phase.OTHER and traits(op.type).state is Effect.HANDLE and bool(traits(op.type).of_value)
    if not (op.phase is Phase.APPLY or asks_for_shape) or traits(op.type).state is Effect.IS_INITIALIZED:  # which asks one part
        return None
    numbers = [number for number, state in states.items() if any(state.spread(t) != once for t in op.inputs)]
    return numbers[0] if len(numbers) == 1 else None


def _least(problem: ShardingProblem, state: ShardingState, op: Op, divided: bool) -> Strategy:
    """The strategy that exchanges least.  ``divided``: the op should not be computed once."""
    wanted = {t: state.spreads[root] for t in op.outputs for root in [_target(problem, t)] if root in state.spreads}
    ranked = []
    for index, (cost, strategy) in enumerate(state.priced(op)):
        for tensor, give in zip(op.outputs, strategy.gives):
            if tensor in wanted:
                cost += problem.price(tensor, give, wanted[tensor], state.count)
            elif give.is_partial:
                cost += problem.price(tensor, give, once, state.count)
        is_whole = strategy.how == ONCE
        ranked.append(((divided and is_whole and cost < float("inf"), cost, is_whole, index), strategy))
    finite = [item for item in ranked if item[0][1] < float("inf")]
    if not finite:
        raise UnsupportedOpError(
            "op {!r} ({}) uses a variable that is divided into parts (wh.split, zero), but cannot work on its parts ({}); use "
            "wh.replicate for this layer, or another optimizer".format(
                op.name, op.type, "; ".join(problem.strategies(op, state.split).reasons) or "it needs the whole variable"))
    return min(finite, key=lambda item: item[0])[1]


def _target(problem: ShardingProblem, tensor: int) -> int:
    variable = problem.gradients.get(tensor)
    return -1 if variable is None else problem.graph.ops[variable].outputs[0]
