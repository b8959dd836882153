"""Converts an answer to the form of the split executor: strategies of ops and spreads of variables
(:mod:`whale_tf.transforms.shard`)."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Sequence

from whale_tf.ir.graph import Op, Shape
from whale_tf.ir.traits import CONTRACTIONS, CONVOLUTIONS, LOOK_UPS, LOSSES, READS, SHAPE_ONLY
from whale_tf.patterns.moves import moved_bytes
from whale_tf.patterns.spread import Spread, everywhere, once
from whale_tf.patterns.strategy import ONCE, SIZES, Strategy
from whale_tf.planner.rhino.mesh import layout_of
from whale_tf.planner.rhino.problem import MeshProblem
from whale_tf.planner.rhino.search import Answer
from whale_tf.planner.sharding import Assignment
from whale_tf.planner.sharding.assignment import Choice

WHOLE_MODEL = 0  # the one TaskGraph
WORTH_DIVIDING = CONTRACTIONS | CONVOLUTIONS | LOOK_UPS | LOSSES


def assignment_of(answer: Answer) -> Assignment:
    """The executable form of an answer on a mesh of one dimension.

    ``Choice.bytes`` counts the bytes that change devices for an op's operands and inside it.
    """
    problem, choice = answer.levels[0].problem, answer.levels[0].solution.choice
    settled = {tensor: _relayed(problem, tensor, choice) for tensor in problem.scope.gradients if tensor in problem.relays}
    result = Assignment({}, {}, {}, [], settled)
    spreads: Dict[int, Spread] = {}
    for variable in problem.scope.variables:
        spread = _spread(problem, variable, choice)
        if spread.is_shard:
            result.variables[variable], result.task_graph[variable] = spread, WHOLE_MODEL
            spreads[problem.graph.ops[variable].outputs[0]] = spread
    for op in problem.graph.ops:
        strategy = _strategy(problem, op, choice, spreads)
        if strategy is not None and strategy.how != ONCE:
            result.strategies[op.id], result.task_graph[op.id] = strategy, WHOLE_MODEL
            spreads.update({t: give for t, give in zip(op.outputs, strategy.gives) if give not in (once, everywhere)})
    result.choices.extend(_choices(problem, choice))
    return result


def _spread(problem: MeshProblem, variable: int, choice: Sequence[int]) -> Spread:
    return _sized(problem.storage(variable, choice), problem.shapes.stored(problem.graph.ops[variable].outputs[0]))


def _relayed(problem: MeshProblem, tensor: int, choice: Sequence[int]) -> Spread:
    """The spread in which a tensor is settled."""
    layout = problem.relayed[tensor][choice[problem.relays[tensor]]]
    return _sized(layout, problem.graph.tensors[tensor].shape)


def _sized(layout: Spread, shape: Shape) -> Spread:
    """A layout (shards by proportion) as a spread (shards by size)."""
    if not layout.is_shard:
        return once if layout == everywhere else layout
    size, parts = (shape or ())[layout.dim] or 0, sum(layout.sizes)
    return layout._replace(sizes=tuple(size * part // parts for part in layout.sizes))


def _strategy(problem: MeshProblem, op: Op, choice: Sequence[int], spreads: Mapping[int, Spread]) -> Optional[Strategy]:
    if op.id in problem.candidates and op.type not in SHAPE_ONLY:
        return problem.strategy(op.id, choice)
    if op.type in READS and op.inputs and op.inputs[0] in problem.scope.roots and op.inputs[0] in spreads:
        spread = spreads[op.inputs[0]]
        return Strategy("read", "shards", (spread,), (spread,))
    if op.type in SHAPE_ONLY and any(t in spreads for t in op.inputs):
        return Strategy("sizes", SIZES, tuple(spreads.get(t, once) for t in op.inputs), (once,) * len(op.outputs))
    return None


def _choices(problem: MeshProblem, choice: Sequence[int]) -> List[Choice]:
    """The ops worth dividing and the losses.  A plan keeps these, and the search derives the rest from them again."""
    found = []
    for op in problem.scope.ops:
        candidates, kind = problem.candidates[op], problem.graph.ops[op].type
        if len(candidates.strategies) > 1 and kind in WORTH_DIVIDING:
            strategy = problem.strategy(op, choice)
            found.append(Choice(problem.graph.ops[op].name, strategy.pattern, _exchanged_bytes(problem, op, strategy, choice)))
    return found


def _exchanged_bytes(problem: MeshProblem, op: int, strategy: Strategy, choice: Sequence[int]) -> float:
    """Bytes that change devices for an op's operands, and inside it."""
    total = 4.0 * strategy.exchanged
    for position, tensor in enumerate(problem.graph.ops[op].inputs):
        have, tensor = problem.layout(tensor, choice), problem.scope.roots.get(tensor, tensor)
        need = layout_of(strategy.needs[position])
        if have != need and not need.is_partial:
            total += moved_bytes(have, need, problem.bytes(tensor), problem.axis.count)
    return total
