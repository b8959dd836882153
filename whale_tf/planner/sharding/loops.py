"""What of a loop's body can be divided: products with weights that are the same in each round.

A training step has a loop and, behind it, the loop of its gradient.  The body keeps the weight of each round on a list, from
which the other body takes it; and that one adds a term to the weight's gradient in each round::

    body(x, w, l)              y = MatMul(x, w)                              -> y, w, push(l, w)
    gradient's body(d, g, l)   l, w = pop(l);  dx = MatMul(d, w^T);  dw = MatMul(x^T, d)  -> dx, g + dw, l

All elements of such a list are one value, so parts of the weight stand for the list.  Weights, lists and sums are in parts; what
else the loops carry stays whole, on the first device.
"""
from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf.ir.extents import static_ints
from whale_tf.ir.graph import Op, OpGraph
from whale_tf.ir.parts import apportion
from whale_tf.ir.rules import known_rule
from whale_tf.ir.rules.rule import ADDED
from whale_tf.ir.traits import SHAPE_ONLY, traits
from whale_tf.patterns.moves import moved_bytes
from whale_tf.patterns.spread import Spread, once, shard
from whale_tf.patterns.strategy import NOMINAL_SIZE, SHARDS, Sizes, Strategy, giving, is_float, strategies

Use = Tuple[Op, int]  # an op, and the input at which it takes a value


class Weight(NamedTuple):
    """A weight of a body, which only products take, and ops that ask for its shape.

    Attributes:
        element: the weight itself; ``is_list``: that of a list.
        products: where products take it.
        kept: results that are lists of it.
    """

    element: int
    is_list: bool
    products: Tuple[Use, ...]
    kept: Tuple[int, ...]


class LoopBody:
    """A loop's body.

    Args:
        batch: tensor of the body -> the dimension that counts examples, which stays whole.
        shares: the proportions in which the devices take a divided dimension.

    Attributes:
        weights: parameter -> the weight that it is.
        sums: parameter to which each round adds a term -> the op that adds.
    """

    def __init__(self, op: Op, batch: Mapping[int, int], shares: Sequence[int]) -> None:
        bodies = op.body or {}
        self.graph, condition = bodies["body"], bodies["cond"]
        self._view, self._batch, self._shares = Sizes(self.graph), batch, shares
        self._arguments, self._results = _arguments(self.graph), _results(self.graph)
        asked = {index for index, tensor in _arguments(condition).items() if condition.consumers(tensor)}
        places = [index for index in sorted(self._arguments) if index not in asked]
        self.weights = {index: found for index, found in ((index, self._weight(index)) for index in places) if found}
        self.sums = {index: found for index, found in ((index, self._sum(index)) for index in places) if found}

    # -- what there is ------------------------------------------------------------------------------------------------
    def _weight(self, index: int) -> Optional[Weight]:
        parameter, result = self._arguments[index], self.graph.origin(self._results[index])
        is_list = self.graph.tensors[parameter].dtype == "variant"
        if is_list:
            readers = list(self.graph.uses(parameter))
            pop = readers[0][0] if readers else None
            if (pop is None or len(readers) > 1 or traits(pop.type).batch != "list_read" or len(pop.outputs) != 2
                    or result != pop.outputs[0] or len(list(self.graph.uses(result))) > 1):
                return None
            element, uses = pop.outputs[1], list(self.graph.uses(pop.outputs[1]))
        else:
            if result != parameter:
                return None
            element, uses = parameter, [(user, at) for user, at in self.graph.uses(parameter)
                                        if not (user.type == "_Retval" and user.attrs["index"] == index)]
        shape = self._view.shape(element)
        if shape is None or None in shape or not is_float(self.graph.tensors[element].dtype):
            return None
        products: List[Use] = []
        kept: List[int] = []
        for user, at in uses:
            if traits(user.type).is_contraction:
                products.append((user, at))
            elif not is_list and self._list_of(user, at) is not None:
                kept.append(self._list_of(user, at) or 0)
            elif user.type not in SHAPE_ONLY or not self._has_known_answer(user, at):
                return None
        return Weight(element, is_list, tuple(products), tuple(kept)) if products else None

    def _has_known_answer(self, op: Op, position: int) -> bool:
        """Whether the shape is known for which an op asks."""
        return static_ints(self._view.value(op.outputs[min(position, len(op.outputs) - 1)])) is not None

    def _list_of(self, op: Op, position: int) -> Optional[int]:
        """The result that is the list onto which an op pushes what it takes there; None: it does not."""
        if traits(op.type).batch != "list_write" or len(op.inputs) != 2 or position != 1:
            return None
        found = [index for index, tensor in self._results.items() if self.graph.origin(tensor) == op.outputs[0]]
        is_kept = len(found) == 1 and len(list(self.graph.uses(op.outputs[0]))) == 1 and self.graph.origin(
            op.inputs[0]) == self._arguments[found[0]] and len(list(self.graph.uses(self._arguments[found[0]]))) == 1
        return found[0] if is_kept else None

    def _sum(self, index: int) -> Optional[Op]:
        parameter, result = self._arguments[index], self.graph.origin(self._results[index])
        op, shape = self.graph.producer(result), self._view.shape(parameter)
        uses = list(self.graph.uses(parameter))
        if not is_float(self.graph.tensors[parameter].dtype) or shape is None or None in shape:
            return None
        if shape != self._view.shape(result) or [user for user, _ in uses] != [op] or len(list(self.graph.uses(result))) != 1:
            return None
        rule = known_rule(op, self.graph, self._view)
        return op if rule is not None and set(rule.roles) == {ADDED} else None

    # -- how it can be divided ----------------------------------------------------------------------------------------
    def takes(self, index: int, spread: Spread) -> bool:
        """Whether products take these parts of a weight."""
        return index in self.weights and all(self._taking(op, {at: spread}) for op, at in self.weights[index].products)

    def cheapest(self, index: int) -> Optional[Spread]:
        """The parts of a weight with which its products exchange least; None: they take none."""
        weight, count = self.weights[index], len(self._shares)
        priced = []
        for dim, size in enumerate(self._view.shape(weight.element) or ()):
            spread = shard(dim, apportion(self._shares, size or 0, 1)) if (size or 0) >= count else once
            if spread != once and self.takes(index, spread):
                found = [(op, self._taking(op, {at: spread})) for op, at in weight.products]
                priced.append((sum(self._price(op, strategy, weight.element) for op, strategy in found if strategy), dim, spread))
        return min(priced, key=lambda one: one[:2])[2] if priced else None

    def inner(self, spreads: Mapping[int, Spread]) -> Optional[Tuple[Tuple[int, Strategy], ...]]:
        """The strategies of the body's ops that work on parts, if parameters come in parts that they take; None: a sum does not.
        A product of two weights takes the parts of the first."""
        needs: Dict[int, Dict[int, Spread]] = {}
        for index, spread in spreads.items():
            for op, at in self.weights[index].products if index in self.weights else ():
                needs.setdefault(op.id, {})[at] = spread
        chosen = {}
        for number, own in needs.items():
            first = dict([min(own.items())])
            strategy = self._taking(self.graph.ops[number], own) or self._taking(self.graph.ops[number], first)
            if strategy is not None:
                chosen[number] = strategy
        for index in spreads:
            if index in self.sums:
                op = self.sums[index]
                own_sum = giving(op, self._view, 0, spreads[index])
                if own_sum is None:
                    return None
                chosen[op.id] = own_sum
                for tensor in op.inputs:
                    self._choose_term(chosen, self.graph.origin(tensor), spreads[index])
        return tuple(sorted(chosen.items()))

    def _choose_term(self, chosen: Dict[int, Strategy], tensor: int, spread: Spread) -> None:
        op = self.graph.producer(tensor)
        if traits(op.type).is_contraction and op.id not in chosen and len(list(self.graph.uses(tensor))) == 1:
            strategy = giving(op, self._view, self.graph.tensors[tensor].index, spread)
            if strategy is not None and self._is_simple(op, strategy):
                chosen[op.id] = strategy

    def _taking(self, op: Op, needs: Mapping[int, Spread]) -> Optional[Strategy]:
        """The strategy that takes operands in these parts."""
        return next((one for one in strategies(op, self._view, self._shares, self._batch).found if self._is_simple(op, one)
                     and all(one.needs[at] == spread for at, spread in needs.items())), None)

    def _is_simple(self, op: Op, strategy: Strategy) -> bool:
        return strategy.how == SHARDS and not strategy.weights and all(
            static_ints(self._view.value(op.inputs[one.position])) is not None for one in strategy.localise)

    def _price(self, op: Op, strategy: Strategy, weight: int) -> float:
        pairs = [(t, once, need) for t, need in zip(op.inputs, strategy.needs) if self.graph.origin(t) != weight]
        pairs += [(t, give, once) for t, give in zip(op.outputs, strategy.gives)]
        return sum(moved_bytes(have, need, self._size(t), len(self._shares)) for t, have, need in pairs)

    def _size(self, tensor: int) -> float:
        size = 1.0
        for dim in self._view.shape(tensor) or ():
            size *= NOMINAL_SIZE if dim is None else dim
        return size


def _arguments(body: OpGraph) -> Dict[int, int]:
    return {op.attrs["index"]: op.outputs[0] for op in body.ops if op.type == "_Arg"}


def _results(body: OpGraph) -> Dict[int, int]:
    return {op.attrs["index"]: op.inputs[0] for op in body.ops if op.type == "_Retval"}
