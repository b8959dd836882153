"""The strategy problem of an op graph (Rhino section 4.2): ops are nodes, tensors are edges.

- A **node** is an op with its strategies (:mod:`whale_tf.patterns`): computing it once, on the first device, or dividing one
  factor, including the batch.  It costs the time of its largest part, and the exchanges of its recipe.
- A **variable** is a node whose strategies are the ways to store it; its reads are the variable itself.  An op that writes it
  needs it in its stored layout, so that a variable, its slots and its update agree.  If it is stored in shards and used whole,
  it is gathered, and its gradient scattered.  ZeRO (section 4.4) is thus a choice like any other.
- An **edge** costs the messages that convert a tensor from the layout in which it is made to the one in which it is needed.
- A tensor with several users has a **relay** node in between, the layout to which it is converted for all of them.  A gradient
  that is clipped and applied is summed once, and a gathered variable serves forward and backward.

Forward, backward and update are one graph, so each is divided in its best way.  A graph without backward ops is planned alike.
"""

from __future__ import annotations

from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from whale_tf.errors import ConfigError
from whale_tf.ir.graph import Op, OpGraph, Phase
from whale_tf.ir.parts import even_sizes
from whale_tf.ir.traits import SHAPE_ONLY
from whale_tf.patterns.moves import largest_share
from whale_tf.patterns.spread import EACH, Spread, everywhere, once, shard
from whale_tf.patterns.strategy import LINEAR, ONCE, Strategy, computed_once, look, strategies
from whale_tf.planner.op_price import OpPrices
from whale_tf.planner.rhino.cost_graph import IMPOSSIBLE, CostGraph
from whale_tf.planner.rhino.local_shapes import LocalShapes
from whale_tf.planner.rhino.mesh import PICOSECONDS, Axis, layout_of
from whale_tf.planner.scope import Scope

Layouts = Tuple[Spread, ...]
MANY_READERS, SCALAR_BYTES = 12, 8.0  # a number that many ops read (a learning rate) goes to all devices and decides nothing


class Candidates(NamedTuple):
    """The strategies of equal ops, as layouts.

    Attributes:
        number: different for different candidates.
        needs: for each operand, the layout in which each strategy needs it.
        gives: for each result, the layout in which each strategy makes it.
        costs: picoseconds of each strategy: computation, and exchanges inside the op.
    """

    number: int
    strategies: Tuple[Strategy, ...]
    needs: Tuple[Layouts, ...]
    gives: Tuple[Layouts, ...]
    costs: Tuple[int, ...]
    exchanges: Tuple[int, ...]


class MeshProblem:
    """An op graph as a CostGraph on one dimension of a device mesh.

    Attributes:
        costs: the strategy problem.
        candidates: op -> its strategies, for ops that are nodes.
        node_of: op (or variable op) -> node.
        stored: variable op -> the layout in which each strategy of its node stores it.
        relays: tensor -> its relay's node; ``relayed``: the layouts of the relay's strategies.
    """

    def __init__(self, graph: OpGraph, scope: Scope, axis: Axis, pins: Optional[Mapping[int, str]] = None,
                 shapes: Optional[LocalShapes] = None, batch: Optional[Mapping[int, int]] = None,
                 prices: Optional[OpPrices] = None) -> None:
        """Args:
        pins: op -> the pattern that it must take.
        shapes: shape of every tensor after the previous mesh dimensions.
        batch: tensor -> its dimension that counts examples, if model replicas divide that and this dimension must not.
        prices: prices of the ops on the shapes with which ``shapes`` began; None means on the graph's shapes.

        Raises:
            ConfigError: a pinned op does not have the pattern.
        """
        self.graph, self.scope, self.axis = graph, scope, axis
        self.prices = prices if prices is not None else OpPrices(graph, scope)
        self.shapes = shapes if shapes is not None else LocalShapes(graph)
        self.pins, self.batch = pins or {}, batch or {}
        self.costs = CostGraph()
        self.candidates: Dict[int, Candidates] = {}
        self.node_of: Dict[int, int] = {}
        self.stored: Dict[int, Layouts] = {}
        self._cache: Dict[object, Candidates] = {}
        self._edges: Dict[object, int] = {}
        self.relays: Dict[int, int] = {}
        self.relayed: Dict[int, Layouts] = {}
        for variable in scope.variables:
            self._add_variable(variable)
        for op in scope.ops:
            self._add_op(graph.ops[op])
        self._add_edges()

    # -- nodes --------------------------------------------------------------------------------------------------------
    def _add_variable(self, variable: int) -> None:
        shape = self.shapes.stored(self.graph.ops[variable].outputs[0]) or ()
        if variable in self.scope.whole:
            shape = ()
        layouts = [once] + [layout_of(shard(dim, even_sizes(size, self.axis.count)))
                            for dim, size in enumerate(shape) if size is not None and size >= self.axis.count]
        self.stored[variable] = tuple(layouts)
        self.node_of[variable] = self.costs.add_node([0] * len(layouts))

    def _add_op(self, op: Op) -> None:
        found = self._candidates(op)
        pattern = self.pins.get(op.id)
        costs = list(found.costs)
        if pattern is not None:
            names = [strategy.pattern for strategy in found.strategies]
            if pattern not in names:
                raise ConfigError("pattern {!r} is requested for {!r} ({}), which on {} devices only has: {}".format(
                    pattern, op.name, op.type, self.axis.count, ", ".join(dict.fromkeys(names))))
            costs = [cost if name == pattern else IMPOSSIBLE for cost, name in zip(costs, names)]
        self.candidates[op.id] = found
        self.node_of[op.id] = self.costs.add_node(costs)

    def undivided(self, share: float) -> List[Tuple[Op, float, str]]:
        """Ops without a strategy that divides their work that take at least ``share`` of all ops' seconds on one device, with
        their part of these seconds and the reason.  Forward ops come first, then longer ones."""
        ops = [self.graph.ops[number] for number in self.scope.ops]
        seconds = {op.id: self.prices.seconds(op, 1.0, (1.0,) * len(op.inputs + op.outputs), self.axis.first) for op in ops}
        total = sum(seconds.values())
        found = []
        for op in ops:
            part = seconds[op.id] / total if total else 0.0
            if part >= share and all(strategy.how in (ONCE, LINEAR) for strategy in self.candidates[op.id].strategies):
                reasons = strategies(op, self.shapes.view(op), (1,) * self.axis.count, self.batch).reasons
                found.append((op, part, "; ".join(reasons) or "none of its dimensions can be divided"))
        return sorted(found, key=lambda item: (item[0].phase is not Phase.FORWARD, -item[1]))

    def _candidates(self, op: Op) -> Candidates:
        key = (look(op, self.shapes.view(op), self.batch), op.phase is Phase.APPLY, op.id in self.scope.bound,
               tuple(map(self._stored, op.inputs)), tuple(t in self.scope.gradients for t in op.inputs + op.outputs))
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = self._make(op)
        return found

    def _stored(self, tensor: int) -> bool:
        return tensor in self.scope.roots

    def _make(self, op: Op) -> Candidates:
        view = self.shapes.view(op)
        found = [computed_once(op)]
        if op.id not in self.scope.bound:
            found += [s for s in strategies(op, view, (1,) * self.axis.count, self.batch).found if self._is_possible(op, s)]
        left = [self.shapes.part(t, view.stored(t)) for t in op.inputs + op.outputs]
        compute = [self._compute(op, strategy, left) for strategy in found]
        exchange = [self.axis.exchange(4.0 * strategy.exchanged) for strategy in found]
        needs = tuple(tuple(layout_of(s.needs[i]) for s in found) for i in range(len(op.inputs)))
        gives = tuple(tuple(layout_of(s.gives[i]) for s in found) for i in range(len(op.outputs)))
        costs = tuple(a + b for a, b in zip(compute, exchange))
        return Candidates(len(self._cache), tuple(found), needs, gives, costs, tuple(exchange))

    def _is_possible(self, op: Op, strategy: Strategy) -> bool:
        """The strategies of an op that takes a variable itself.  It runs where the variable is: on its shards, or once."""
        return not any(self.scope.is_handle(self.graph, t) and not need.is_shard for t, need in zip(op.inputs, strategy.needs))

    def _compute(self, op: Op, strategy: Strategy, left: Sequence[float]) -> int:
        """Args:
        left: shape of each operand and result after the previous mesh dimensions.
        """
        shares = [part * largest_share(spread) for part, spread in zip(left, strategy.needs + strategy.gives)]
        share = min(left if strategy.how in (ONCE, LINEAR) else shares, default=1.0)
        device = self.axis.first if strategy.how == ONCE else self.axis.slowest
        return int(round(self.prices.seconds(op, share, shares, device) * PICOSECONDS))

    # -- edges --------------------------------------------------------------------------------------------------------
    def _add_edges(self) -> None:
        users = self._users()
        for tensor, uses in users.items():
            node, gives = self._source(tensor)
            size = self.bytes(tensor)
            hard = [use for use in uses if self.is_hard(*use)]
            soft = [use for use in uses if not self.is_hard(*use)]
            for op, position in hard:
                self._connect(node, gives, op, position, float("inf"))
            is_gradient = tensor in self.scope.gradients
            if (len(soft) > 1 or is_gradient) and not all(layout.kind == EACH for layout in gives):
                relayed = self._relay_layouts(gives, soft)
                if len(soft) > MANY_READERS and size <= SCALAR_BYTES:
                    relayed = (everywhere,)
                if is_gradient:
                    relayed = tuple(layout for layout in relayed if not layout.is_partial)
                self.relayed[tensor] = relayed
                relay = self.costs.add_node([0] * len(relayed))
                self.costs.add_edge(node, relay, self._table(gives, relayed, size))
                self.relays[tensor] = relay
                node, gives = relay, relayed
            for op, position in soft:
                self._connect(node, gives, op, position, size)

    def _users(self) -> Dict[int, List[Tuple[int, int]]]:
        """Tensor (a variable for its reads) -> (op, position) of every use by a node."""
        users: Dict[int, List[Tuple[int, int]]] = {}
        for op in self.scope.ops:
            record = self.graph.ops[op]
            if record.type not in SHAPE_ONLY and record.type != "VariableShape":
                for position, tensor in enumerate(record.inputs):
                    users.setdefault(self.scope.roots.get(tensor, tensor), []).append((op, position))
        return users

    def _source(self, tensor: int) -> Tuple[int, Layouts]:
        """The node that makes a tensor, and its layouts."""
        op = self.graph.tensors[tensor].op
        if op in self.stored:
            return self.node_of[op], self.stored[op]
        if op in self.candidates:
            return self.node_of[op], self.candidates[op].gives[self.graph.tensors[tensor].index]
        return self.costs.add_node([0]), (self.outside(tensor),)

    def outside(self, tensor: int) -> Spread:
        """The layout of a tensor from outside the problem.  Constants are part of the program, and inputs are assumed to be where
        they are read, as in the simulation of every plan; there is one copy of all others."""
        producer = self.graph.producer(tensor)
        return everywhere if producer.type == "Const" or producer.phase is Phase.INPUT else once

    def is_hard(self, op: int, position: int) -> bool:
        """Whether an op works on the variable itself, so that it must use the stored layout."""
        return self.scope.is_handle(self.graph, self.graph.ops[op].inputs[position])

    def _relay_layouts(self, gives: Layouts, uses: Iterable[Tuple[int, int]]) -> Layouts:
        found = dict.fromkeys((once,) + gives)
        for op, position in uses:
            found.update(dict.fromkeys(need for need in self.candidates[op].needs[position] if not need.is_partial))
        return tuple(found)

    def _connect(self, node: int, gives: Layouts, op: int, position: int, size: float) -> None:
        self.costs.add_edge(node, self.node_of[op], self._table(gives, self.candidates[op].needs[position], size))

    def _table(self, gives: Layouts, needs: Layouts, size: float) -> int:
        """Size infinite: nothing can be converted."""
        key = (gives, needs, size)
        found = self._edges.get(key)
        if found is None:
            rows = [[self._conversion(have, need, size) for need in needs] for have in gives]
            found = self._edges[key] = self.costs.tables.number(np.array(rows, dtype=np.int64).reshape(len(gives), len(needs)))
        return found

    def _conversion(self, have: Spread, need: Spread, size: float) -> int:
        if size == float("inf"):
            return 0 if have == need else IMPOSSIBLE
        return self.axis.conversion(have, need, size)

    def bytes(self, tensor: int) -> float:
        """Bytes of a tensor, or of the variable behind a handle, on all devices of this mesh dimension together."""
        return self.prices.bytes(tensor) * self.shapes.part(tensor, self.shapes.stored(tensor))

    # -- answers ------------------------------------------------------------------------------------------------------
    def strategy(self, op: int, choice: Sequence[int]) -> Strategy:
        return self.candidates[op].strategies[choice[self.node_of[op]]]

    def storage(self, variable: int, choice: Sequence[int]) -> Spread:
        """The layout in which a variable is stored."""
        return self.stored[variable][choice[self.node_of[variable]]]

    def layout(self, tensor: int, choice: Sequence[int]) -> Spread:
        """The layout in which a tensor is read or, if each reader converts it, made."""
        tensor = self.scope.roots.get(tensor, tensor)
        if tensor in self.relays:
            return self.relayed[tensor][choice[self.relays[tensor]]]
        record = self.graph.tensors[tensor]
        if record.op in self.stored:
            return self.storage(record.op, choice)
        if record.op in self.candidates:
            return self.candidates[record.op].gives[record.index][choice[self.node_of[record.op]]]
        return self.outside(tensor)

    def communication(self, choice: Sequence[int]) -> int:
        """Picoseconds of a choice without computation."""
        computed = sum(found.costs[choice[self.node_of[op]]] - found.exchanges[choice[self.node_of[op]]]
                       for op, found in self.candidates.items())
        return self.costs.score(choice) - computed

    def stored_bytes(self, variable: int, layout: Spread) -> float:
        """Bytes of a variable on the device with the largest part."""
        return largest_share(layout) * self.bytes(self.graph.ops[variable].outputs[0])
