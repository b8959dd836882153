"""The cheapest strategies for the forward ops of one TaskGraph.

Ops are visited in topological order.  A state is the part of the choices so far that later ops can see: the spreads of the
tensors that they read and of the variables, and the conversions that have been paid.  Among states that look the same from here
on, only the cheapest is kept.  A state is also dropped if a cheaper one can be converted into it for less than the difference.
This is dynamic programming over the frontier, exact as long as no more than ``WIDTH`` states are left.  A column-sharded layer
is thus followed by a row-sharded one because nothing is exchanged between the two, not because a rule says so.  Prices count
forward and backward bytes (:mod:`whale_tf.patterns.moves`).

Ops worth dividing (contractions, convolutions, look-ups) are divided if possible, since computing everything once would exchange
nothing, and so that their weights are in parts: sending small weights to all devices may cost less, but then one device keeps
them whole.  Those without weights may also take the pattern ``batch``, which divides their work as well.  An op that follows from
variables alone (a kernel's Reshape, Transpose or Cast) and is the first to read one decides how that one is stored, so all
its strategies are followed up to the product.  A matrix is not stored whole: a table of positions, of which only a slice is added
to activations, is in parts, too.  All other ops take the strategy that costs least at that point.

If layouts say how variables are stored (``ShardingProblem.asked``), nothing is left to decide about these.  An op worth dividing
takes the parts of a divided weight as they are if it can; beside a whole one every strategy counts, computing the op once
included.  A weight in tiles is regrouped into parts along one dimension.
"""

from __future__ import annotations

import heapq
from typing import Dict, Iterable, List, Mapping, Optional, Tuple

from whale_tf.errors import UnsupportedOpError
from whale_tf.ir.graph import LAYOUT_ATTR, LAYOUT_OF_ATTR, Op
from whale_tf.ir.traits import NEXT_ITERATIONS
from whale_tf.patterns.spread import Spread, once
from whale_tf.patterns.strategy import ONCE, Strategy
from whale_tf.planner.sharding.problem import BATCH, ShardingProblem, ShardingState

WIDTH = 32
RIVALS = 4  # number of cheapest states with which others are compared


def cheapest(problem: ShardingProblem, task_graph: int,
             forced: Mapping[int, str]) -> Tuple[Dict[int, Strategy], Dict[int, Spread], Dict[int, float]]:
    """The strategy of each forward op that is not simply computed once, the spread of each variable, the bytes of each op.

    Args:
        forced: op -> name of the pattern that it must take, one that it has (see :mod:`whale_tf.planner.sharding.force`).
    """
    ops = _in_order(problem, problem.forward_ops(task_graph))
    last_use = {root: place for place, op in enumerate(ops) for t in op.inputs
                for root in (problem.root(t), problem.source(t))}
    dead: Dict[int, List[int]] = {}  # by the last place where they are read
    for root, place in last_use.items():
        dead.setdefault(place, []).append(root)
    leaving = _leaving(problem, task_graph)
    states = [ShardingState(problem, task_graph)]
    for place, op in enumerate(ops):
        unread = dead.get(place, [])
        if _changes_nothing(problem, states, op, forced, unread):
            continue
        reached: List[ShardingState] = []
        for state in states:
            reached.extend(_steps(problem, state, op, forced.get(op.id), leaving))
        states = _distinct(problem, reached, unread)
    best = min(states, key=lambda state: state.cost)
    chosen: Dict[int, Strategy] = {}
    prices: Dict[int, float] = {}
    variables = {r: s for r, s in best.spreads.items() if problem.is_variable(r)}
    node = best.choices
    while node is not None:
        node, key, value, price = node
        if isinstance(value, Spread):
            variables[key] = value
        else:
            chosen[key], prices[key] = value, price
    return chosen, variables, prices


def _changes_nothing(problem: ShardingProblem, states: List[ShardingState], op: Op, forced: Mapping[int, str],
                     dead: List[int]) -> bool:
    """Whether all states look the same after an op.  ``dead`` tensors are not read any more."""
    return op.id not in forced and not problem.is_anchor(op) and LAYOUT_ATTR not in op.attrs and all(
        state.is_plain(op) and state.spreads.keys().isdisjoint(dead) and not any(t in dead for t, _ in state.made)
        for state in states)


def _steps(problem: ShardingProblem, state: ShardingState, op: Op, forced: object,
           leaving: Mapping[int, bool]) -> List[ShardingState]:
    """States after one op."""
    anchor, asked = problem.is_anchor(op), problem.asked_of_result(op)
    if not anchor and forced is None and asked is None and state.is_plain(op):
        return [state]
    priced = [(cost, s) for cost, s in state.priced(op) if cost < float("inf") and (asked is None or s.gives[0] == asked)]
    if not priced:
        raise UnsupportedOpError(_cannot_keep(problem, op, asked))
    if forced is not None:
        priced = [(cost, s) for cost, s in priced if s.pattern == forced] or priced
    elif anchor and problem.reads_asked(op):
        priced = [(cost, s) for cost, s in priced if _keeps(problem, state, op, s)] or priced
    elif anchor and any(s.how != ONCE for _, s in priced):
        priced = [(cost, s) for cost, s in priced if s.how != ONCE or (s.pattern == BATCH and not problem.has_weights(op))]
        priced = [(cost, s) for cost, s in priced if problem.divides_weights(op, s)] or priced
    elif problem.is_of_variables(op) and any(state.spread(t).is_tiles for t in op.inputs):
        priced = [(cost, s) for cost, s in priced if s.how != ONCE] or priced
    elif problem.is_of_variables(op) and sum(map(state.is_free, op.inputs)) == 1:
        if any(state.is_free(t) and problem.is_matrix(t, state.count) for t in op.inputs):
            priced = [(cost, s) for cost, s in priced if s.how != ONCE] or priced
    elif not anchor:
        least = min(cost for cost, _ in priced)
        priced = [(cost, s) for cost, s in priced if cost <= least * (1 + 1e-9)]
    result = []
    for index, (cost, strategy) in enumerate(priced):
        following = state if index == len(priced) - 1 else state.copy()
        price = cost
        for tensor, give in zip(op.outputs, strategy.gives):
            if tensor in leaving and give != once:
                price += problem.price(tensor, give, once, state.count)
        following.take(op, strategy, price)
        for tensor in op.outputs:
            if tensor in leaving:
                following.made.add((tensor, once))
        following.choices = (following.choices, op.id, strategy, price)
        result.append(following)
    return result


def _keeps(problem: ShardingProblem, state: ShardingState, op: Op, strategy: Strategy) -> bool:
    """Whether a strategy takes the parts of weights that layouts divide as they are, or parts into which tiles are regrouped."""
    return all(need.is_shard if state.spread(t).is_tiles else need == state.spread(t)
               for t, need in zip(op.inputs, strategy.needs) if problem.is_weight(t) and state.spread(t).is_divided)


def _cannot_keep(problem: ShardingProblem, op: Op, asked: Optional[Spread]) -> str:
    reasons = "; ".join(problem.strategies(op, problem.splits[problem.task_graph[op.id]]).reasons)
    if asked is not None:
        return f"{op.attrs[LAYOUT_OF_ATTR]} cannot be kept: op {op.name!r} ({op.type}) cannot give its result as {asked}" + (
            f" ({reasons})" if reasons else "")
    variables = [problem.graph.producer(problem.root(t)) for t in op.inputs if problem.is_variable(problem.root(t))]
    named = next((one.attrs[LAYOUT_OF_ATTR] for one in variables if LAYOUT_OF_ATTR in one.attrs), "wh.split")
    return f"{named} cannot be kept: op {op.name!r} ({op.type}) needs the variable whole" + (f" ({reasons})" if reasons else "")


def _distinct(problem: ShardingProblem, states: List[ShardingState], dead: List[int]) -> List[ShardingState]:
    """The cheapest among states that look the same, at most ``WIDTH``.  ``dead`` tensors are not read any more."""
    best: Dict[object, ShardingState] = {}
    for state in states:
        for root in dead:
            spread = state.spreads.pop(root, None)
            if spread is not None and problem.is_variable(root):
                state.choices = (state.choices, root, spread, 0.0)
        if dead:
            state.made = {(t, need) for t, need in state.made if t not in dead}
        key = (frozenset(state.spreads.items()), frozenset(state.made))
        if key not in best or state.cost < best[key].cost:
            best[key] = state
    return heapq.nsmallest(WIDTH, _undominated(best.values()), key=lambda state: state.cost + _owed(problem, state))


def _undominated(states: Iterable[ShardingState]) -> List[ShardingState]:
    """Drops states into which one of the cheapest can be converted for less than the difference
    (:meth:`ShardingState.price_of_becoming`): everything that follows them could follow the cheaper state at no higher cost."""
    kept: List[ShardingState] = []
    for state in sorted(states, key=lambda state: state.cost):
        if not any(other.cost + other.price_of_becoming(state) < state.cost for other in kept[:RIVALS]):
            kept.append(state)
    return kept


def _owed(problem: ShardingProblem, state: ShardingState) -> float:
    """Bytes that a state will have to pay, because the terms of a sum must be added up eventually."""
    return sum(
        problem.price(tensor, spread, once, state.count)
        for tensor, spread in state.spreads.items()
        if spread.is_partial and not any(root == tensor for root, _ in state.made))


def _leaving(problem: ShardingProblem, task_graph: int) -> Dict[int, bool]:
    """Tensors that ops of other TaskGraphs read."""
    found: Dict[int, bool] = {}
    for op in problem.forward_ops(task_graph):
        for tensor in op.outputs:
            for user, _ in problem.graph.consumers(tensor):
                if problem.task_graph[user] not in (-1, task_graph):
                    found[tensor] = True
    return found


def _in_order(problem: ShardingProblem, ops: List[Op]) -> List[Op]:
    """A topological order in which ops on variables alone come as late as possible: an L2 loss must not decide how a kernel is
    stored before its layer is visited.  What comes back in a loop's next iteration is not waited for."""
    members = {op.id: op for op in ops}
    forward = members.keys() - {op.id for op in ops if op.type in NEXT_ITERATIONS}
    missing = {op.id: sum(problem.graph.tensors[t].op in forward for t in op.inputs) for op in ops}

    def rank(op: Op) -> Tuple[int, int]:
        return int(not problem.is_anchor(op) and problem.is_of_variables(op)), op.id

    ready = [rank(op) for op in ops if not missing[op.id]]
    heapq.heapify(ready)
    order = []
    while ready:
        op = members[heapq.heappop(ready)[1]]
        order.append(op)
        for tensor in op.outputs if op.id in forward else ():
            for user, _ in problem.graph.consumers(tensor):
                if user in members:
                    missing[user] -= 1
                    if not missing[user]:
                        heapq.heappush(ready, rank(members[user]))
    return order
