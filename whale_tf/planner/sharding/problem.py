"""The problem: an op graph with ``split`` TaskGraphs, and the facts about it that the search uses."""

from __future__ import annotations

from types import MappingProxyType
from typing import AbstractSet, Dict, FrozenSet, Hashable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf.errors import UnsupportedOpError
from whale_tf.ir.graph import LAYOUT_ATTR, LAYOUT_OF_ATTR, NOT_DIVIDED, Op, OpGraph, Phase, Shape
from whale_tf.ir.parts import apportion
from whale_tf.ir.sizes import nominal_shapes
from whale_tf.ir.traits import CONTROL_FLOW, LOOK_UPS, MOVES, PASSES_TERMS, READS, SHAPE_ONLY, VARIABLES, WHILES, Role, traits
from whale_tf.patterns.moves import gradient_bytes, moved_bytes
from whale_tf.patterns.spread import EACH, Spread, everywhere, once, shard
from whale_tf.patterns.strategy import (
    LINEAR,
    LOOP,
    NOMINAL_SIZE,
    ONCE,
    SIZES,
    Sizes,
    Strategies,
    Strategy,
    computed_once,
    is_float,
    look,
    on_tiles,
    strategies,
)
from whale_tf.planner.sharding.loops import LoopBody
from whale_tf.planner.sharding.slots import Factored
from whale_tf.planner.statistics import tensor_bytes

BATCH = "batch"
_CONSTANTS, _VARIABLES = 1, 2  # what a tensor follows from


class SplitTaskGraph(NamedTuple):
    """A split TaskGraph with its ``number``.

    ``shares`` are the proportions in which the devices of a model replica take a divided dimension.  ``by_batch`` says whether
    every device has its own examples, those of a ``replicate`` TaskGraph that shares the devices.
    """

    number: int
    name: str
    shares: Tuple[int, ...]
    by_batch: bool = False

    @property
    def devices(self) -> int:
        return len(self.shares)


class ShardingProblem:
    """An op graph, its ``split`` TaskGraphs, and prices.

    Args:
        task_graph: TaskGraph of every op, -1 outside the region.
        splits: the TaskGraphs that are split over more than one device.
        batch: tensor -> the dimension that counts examples.
        variables: variable op that may be sharded -> its TaskGraph (-1: not in the region, a slot).
        slots: variable -> variables of the same shape that are updated with it.
        gradients: gradient tensor -> the variable op it updates.
        factored: slot of another shape -> the dimensions of its variable that it has.
        whole: ops that are not divided, except by a variable's handle.
        bound: ops of loops and conditions without bodies of their own, which stay where they are and run once.
        loops: loop whose body may be divided -> tensor of the body -> the dimension that counts examples.
    """

    def __init__(self, graph: OpGraph, task_graph: Sequence[int], splits: Sequence[SplitTaskGraph], batch: Mapping[int, int],
                 variables: Mapping[int, int], slots: Mapping[int, Sequence[int]], gradients: Mapping[int, int],
                 factored: Mapping[int, Factored] = MappingProxyType({}), whole: AbstractSet[int] = frozenset(),
                 bound: FrozenSet[int] = frozenset(), loops: Mapping[int, Mapping[int, int]] = MappingProxyType({})) -> None:
        self.graph = graph
        self.view = Sizes(graph)
        self.task_graph = task_graph
        self.splits = {split.number: split for split in splits}
        self.batch, self.variables, self.slots = batch, variables, slots
        self.owners = {slot: variable for variable in reversed(list(slots)) for slot in slots[variable]}
        self.gradients, self.factored, self.whole, self.bound = gradients, factored, whole, bound
        self._loops = loops
        self._bodies: Dict[int, LoopBody] = {}
        self.roots = self._find_roots()
        self.asked = self._find_asked()
        self._strategies: Dict[int, Strategies] = {}
        self._alike: Dict[Hashable, Strategies] = {}
        self._bytes: Dict[int, float] = {}
        self._nominal = nominal_shapes(graph, NOMINAL_SIZE)
        self._sources: Dict[int, int] = {}
        self._trained = self._find_trained()
        self._follows = self._find_follows()
        self._check_calls()

    # -- what is there ------------------------------------------------------------------------------------------------
    def root(self, tensor: int) -> int:
        """The variable to which a tensor refers, or whose plain value it is; otherwise the tensor itself."""
        return self.roots.get(tensor, tensor)

    def is_variable(self, root: int) -> bool:
        return self.graph.tensors[root].op in self.variables

    def source(self, tensor: int) -> int:
        """The tensor whose elements are passed on by an op that only moves them."""
        found = self._sources.get(tensor)
        if found is None:
            op, found = self.graph.producer(tensor), tensor
            while op.type in MOVES and found not in self.roots and self.task_graph[op.id] in self.splits:
                found = op.inputs[0]
                op = self.graph.producer(found)
            found = self._sources[tensor] = self.root(found)
        return found

    def is_read(self, op: Op) -> bool:
        """Whether an op is a plain read: its result is the variable's value, spread like the variable."""
        return op.type in READS and bool(op.inputs) and op.inputs[0] in self.roots and op.outputs[0] in self.roots

    def is_anchor(self, op: Op) -> bool:
        """Whether an op is worth dividing: a contraction, a convolution, a look-up in a variable, or a loop over products."""
        if op.type in WHILES:
            loop = self.loop(op)
            return loop is not None and bool(loop.weights)
        if op.type in LOOK_UPS:
            return self.is_variable(self.root(op.inputs[0]))
        return traits(op.type).is_contraction

    def is_of_variables(self, op: Op) -> bool:
        """Whether an op follows from variables and constants alone, and reads some of them."""
        return bool(op.inputs) and all(self._follows[t] for t in op.inputs)

    def is_matrix(self, tensor: int, count: int) -> bool:
        """Whether a variable has two dimensions that ``count`` devices can divide."""
        shape = self.view.stored(self.root(tensor)) or ()
        return self.is_variable(self.root(tensor)) and sum((size or 0) >= count for size in shape) > 1

    def divides_weights(self, op: Op, strategy: Strategy) -> bool:
        """Whether a strategy needs parts of an operand that follows from variables alone."""
        return any(need.is_shard and self._follows[t] == _VARIABLES for t, need in zip(op.inputs, strategy.needs))

    def undivided(self, op: Op) -> Strategy:
        """``batch`` if the devices have their own examples and the op's results count them, otherwise ``once``.  Both exchange
        the same bytes: those of a tensor that is whole on one device, and of one that is in parts on all of them."""
        split = self.splits.get(self.task_graph[op.id])
        by_batch = split is not None and split.by_batch and any(t in self.batch for t in op.outputs)
        return computed_once(op, BATCH if by_batch else "once")

    def has_weights(self, op: Op) -> bool:
        """Whether an operand does not depend on examples."""
        return any(self.is_variable(self.root(t)) or (t not in self.batch and is_float(self.graph.tensors[t].dtype))
                   for t in op.inputs)

    def forward_ops(self, task_graph: int) -> List[Op]:
        return [op for op in self.graph.ops if self.task_graph[op.id] == task_graph and op.phase is Phase.FORWARD
                and op.type not in VARIABLES and not self.is_read(op)]

    def strategies(self, op: Op, split: SplitTaskGraph) -> Strategies:
        """All strategies except the one that computes the op once.  Terms of a sum pass only through ops that move them."""
        if op.id in self.bound:
            return Strategies([], ["it is part of a loop or condition, which runs once"])
        if op.type in WHILES and self.is_anchor(op):
            return Strategies([computed_once(op, LOOP)._replace(how=LOOP)], [])
        if op.id not in self._strategies:
            key = look(op, self.view, self.batch), split.shares
            if key not in self._alike or not self._alike[key].found:  # the reasons may name the op's operands
                found, reasons = strategies(op, self.view, split.shares, self.batch)
                self._alike[key] = Strategies([s for s in found if s.how != LINEAR or op.type in PASSES_TERMS], reasons)
            self._strategies[op.id] = self._alike[key]
        return self._strategies[op.id]

    # -- loops --------------------------------------------------------------------------------------------------------
    def loop(self, op: Op) -> Optional[LoopBody]:
        """The body of a loop that may be divided."""
        split = self.splits.get(self.task_graph[op.id])
        if op.id not in self._loops or op.id in self.whole or split is None or split.by_batch:
            return None
        if op.id not in self._bodies:
            self._bodies[op.id] = LoopBody(op, self._loops[op.id], split.shares)
        return self._bodies[op.id]

    def loop_takes(self, op: Op, index: int, spread: Spread) -> bool:
        """Whether a loop takes these parts of a weight, as does the loop of its gradient, for which it keeps the weight."""
        loop = self.loop(op)
        if loop is None or not loop.takes(index, spread):
            return False
        for kept in loop.weights[index].kept:
            readers = self.graph.consumers(op.outputs[kept])
            if traits(self.graph.producer(op.inputs[kept]).type).role is not Role.EMPTY_LIST or not all(
                    self.graph.ops[user].type in WHILES and self.loop_takes(self.graph.ops[user], at, spread)
                    for user, at in readers):
                return False
        return True

    def trained_by(self, tensor: int) -> int:
        """The variable, as a tensor, to whose gradient a gradient leads, element by element; -1: none is known."""
        shape, waiting, seen = self.view.shape(tensor), [tensor], {tensor}
        while waiting:
            before = waiting.pop()
            if before in self.gradients:
                return self.graph.ops[self.gradients[before]].outputs[0]
            for user, position in self.graph.consumers(before):
                op = self.graph.ops[user]
                outputs = op.outputs[position:position + 1] if len(op.inputs) == len(op.outputs) else op.outputs
                following = [t for t in outputs if t not in seen and op.phase is Phase.BACKWARD and self.view.shape(t) == shape]
                waiting += following
                seen.update(following)
        return -1

    # -- prices -------------------------------------------------------------------------------------------------------
    def bytes(self, tensor: int) -> float:
        """Bytes of a whole tensor; a number that is not known, such as that of the examples, counts as 32."""
        if tensor not in self._bytes:
            record = self.graph.tensors[tensor]
            size = float(tensor_bytes(self.graph, tensor))
            if size == 0.0:
                size = 4.0
                shape = self._nominal.get(tensor, record.shape)
                if self.is_variable(tensor):
                    shape = self.graph.ops[record.op].attrs.get("shape")
                for dim in shape or ():
                    size *= NOMINAL_SIZE if dim is None or dim < 0 else dim
            self._bytes[tensor] = size
        return self._bytes[tensor]

    def price(self, tensor: int, have: Spread, need: Spread, count: int) -> float:
        """Bytes for a tensor and its gradient, if it has one."""
        size = self.bytes(tensor)
        total = moved_bytes(have, need, size, count)
        if self._trained[tensor] and not self.is_variable(tensor):
            total += gradient_bytes(have, need, size, count)
        return total

    def is_weight(self, tensor: int) -> bool:
        """Whether a tensor follows from variables and constants alone."""
        return self._follows[tensor] == _VARIABLES

    def reads_asked(self, op: Op) -> bool:
        """Whether an operand follows from variables, and layouts say how variables are stored."""
        return bool(self.asked) and any(self.is_weight(t) for t in op.inputs)

    def asked_of_result(self, op: Op) -> Optional[Spread]:
        """The spread of an op's result that a layout asks for; None: none does."""
        if LAYOUT_ATTR not in op.attrs or op.type in VARIABLES or self.task_graph[op.id] not in self.splits:
            return None
        return self._spread_of(op, self.view.shape(op.outputs[0]), self.splits[self.task_graph[op.id]])

    # -- construction -------------------------------------------------------------------------------------------------
    def _find_asked(self) -> Dict[int, Spread]:
        """Variable -> the spread in which a layout asks to store it.

        Raises:
            UnsupportedOpError: a variable with such a layout cannot be divided.
        """
        found = {}
        for variable, task_graph in self.variables.items():
            op = self.graph.ops[variable]
            if LAYOUT_ATTR in op.attrs and task_graph in self.splits:
                found[op.outputs[0]] = self._spread_of(op, op.attrs["shape"], self.splits[task_graph])
        return found

    def _spread_of(self, op: Op, shape: Shape, split: SplitTaskGraph) -> Spread:
        """The spread that an op's layout means."""
        dim = op.attrs[LAYOUT_ATTR]
        if isinstance(dim, Spread):
            return dim
        if dim == NOT_DIVIDED:
            return once
        size = None if shape is None else shape[dim]
        if size is None or size < split.devices:
            why = "its size is not known" if size is None else f"it has {size} elements"
            raise UnsupportedOpError(f"{op.attrs[LAYOUT_OF_ATTR]} divides dimension {dim} over {split.devices} devices, but "
                                     f"{why}; divide another dimension, or none")
        return shard(dim, apportion(split.shares, size, 1))

    def _find_roots(self) -> Dict[int, int]:
        roots: Dict[int, int] = {}
        for op in self.graph.ops:
            if op.id in self.variables:
                roots[op.outputs[0]] = op.outputs[0]
            elif op.type in READS and op.inputs and op.inputs[0] in roots:
                roots[op.outputs[0]] = roots[op.inputs[0]]
        return roots

    def _find_trained(self) -> bytearray:
        """Whether a tensor is a floating-point value computed from a variable, so that it has a gradient."""
        trained = bytearray(len(self.graph.tensors))
        for op in self.graph.ops:
            if op.phase is not Phase.FORWARD:
                continue
            follows = op.type in VARIABLES or any(trained[t] for t in op.inputs)
            for t in op.outputs:
                dtype = self.graph.tensors[t].dtype
                trained[t] = follows and not traits(op.type).stops_gradient and (is_float(dtype) or dtype == "resource")
        return trained

    def _find_follows(self) -> bytearray:
        """Whether a tensor follows from constants alone, or from constants and variables that may be sharded."""
        found = bytearray(len(self.graph.tensors))
        for op in self.graph.ops:
            if op.id in self.variables:
                follows = _VARIABLES
            elif traits(op.type).role is Role.CONSTANT:
                follows = _CONSTANTS
            else:
                before = [found[t] for t in op.inputs] if not op.body else []
                follows = max(before) if before and all(before) else 0
            for t in op.outputs:
                found[t] = follows
        return found

    def _check_calls(self) -> None:
        for op in self.graph.ops:
            if (op.type in CONTROL_FLOW and not op.body and self.task_graph[op.id] in self.splits
                    and op.id not in self.whole and op.id not in self.bound):
                raise UnsupportedOpError(
                    f"op {op.name!r} ({op.type}) calls a function whose ops are not known, inside wh.split (TaskGraph "
                    f"{self.splits[self.task_graph[op.id]].name!r}); move the call out of the split part, or use wh.replicate")


class _Operand(NamedTuple):
    """Of an op.

    Attributes:
        root: the variable to which it refers, or the tensor itself.
        have: its spread.
        is_free: it is of a variable that can still be stored with any spread.
        is_kept: it refers to a variable, which is not converted.
    """

    tensor: int
    root: int
    have: Spread
    is_free: bool
    is_variable: bool
    is_kept: bool


class ShardingState:
    """Spreads of the tensors visited so far, and the price of reaching them.

    A tensor that is not listed is computed once.  A variable that is not listed can still be stored with any spread.
    """

    def __init__(self, problem: ShardingProblem, task_graph: int) -> None:
        self.problem = problem
        self.task_graph = task_graph
        self.split = problem.splits[task_graph]
        self.count = self.split.devices
        self.cost = 0.0
        self.spreads: Dict[int, Spread] = {
            root: spread for root, spread in problem.asked.items()
            if problem.variables[problem.graph.tensors[root].op] == task_graph}
        self.made: Set[Tuple[int, Spread]] = set()  # (tensor, need) conversions whose price has been counted
        self.choices: Optional[tuple] = None

    def copy(self) -> ShardingState:
        other = ShardingState(self.problem, self.task_graph)
        other.cost, other.choices = self.cost, self.choices
        other.spreads, other.made = dict(self.spreads), set(self.made)
        return other

    def spread(self, tensor: int) -> Spread:
        return self.spreads.get(self.problem.root(tensor), once)

    def is_free(self, tensor: int) -> bool:
        root = self.problem.root(tensor)
        task_graph = self.problem.variables.get(self.problem.graph.tensors[root].op)
        return root not in self.spreads and task_graph in (self.task_graph, -1)

    def is_plain(self, op: Op) -> bool:
        """Whether nothing that the op reads is divided or could be."""
        return all(self.spread(t) == once and not self.is_free(t) for t in op.inputs)

    def priced(self, op: Op) -> List[Tuple[float, Strategy]]:
        """The candidates with the bytes that each adds; infinite if operands cannot have the spreads it needs."""
        operands = [self._operand(op, tensor) for tensor in op.inputs]
        return [(self._price(operands, strategy), strategy) for strategy in self.candidates(op)]

    def _operand(self, op: Op, tensor: int) -> _Operand:
        root, is_free = self.problem.root(tensor), self.is_free(tensor)
        is_variable = self.problem.graph.producer(tensor).type in VARIABLES
        # the leading operands of an update, through which it writes, have their own spread
        is_kept = is_variable and (op.phase is Phase.APPLY or self.problem.graph.tensors[tensor].dtype == "resource")
        return _Operand(tensor, root, self.spreads.get(root, once), is_free, is_variable, is_kept)

    def _price(self, operands: Sequence[_Operand], strategy: Strategy) -> float:
        total, paid = 0.0, set()  # type: float, Set[Tuple[int, Spread]]
        for (tensor, root, have, is_free, is_variable, is_kept), need in zip(operands, strategy.needs):
            if is_free:
                if need.is_partial or (is_variable and not need.is_shard and strategy.how != ONCE):
                    return float("inf")
                if not need.is_shard and need != once:
                    total += self.problem.price(tensor, once, need, self.count)
            elif have != need and have.kind != EACH:
                if is_kept:
                    return float("inf")
                made = self._conversion(root, need)
                if made not in self.made and made not in paid:
                    paid.add(made)
                    total += self.problem.price(tensor, have, need, self.count)
        return total + 4.0 * strategy.exchanged

    def price_of_becoming(self, other: ShardingState) -> float:
        """Bytes to add so that everything that follows costs no more than after ``other``.

        A whole tensor and shards can be brought into any third spread for the same bytes, so one is as good as the other once the
        change between them has been paid.  This does not hold for the terms of a sum: there the price is infinite, and also if a
        variable is stored differently.
        """
        wanted = set(other.made)
        for root in self.spreads.keys() | other.spreads.keys():
            have, need = self.spreads.get(root), other.spreads.get(root)
            if have != need:
                if self.problem.is_variable(root) or not _is_moved(have or once) or not _is_moved(need or once):
                    return float("inf")
                wanted.add((root, need or once))
        return sum((self.problem.price(root, self.spreads.get(root, once), need, self.count)
                    for root, need in wanted - self.made), 0.0)

    def _conversion(self, root: int, need: Spread) -> Tuple[int, Spread]:
        """A key for conversions that are paid once: an op that moves elements sends its operand to every device as it was."""
        source = self.problem.source(root)
        if need == everywhere and root != source and self.spread(root) == self.spread(source) == once:
            return source, need
        return root, need

    def take(self, op: Op, strategy: Strategy, cost: float) -> None:
        """Run an op with a strategy."""
        self.cost += cost
        if strategy.how == SIZES:
            return
        for tensor, need in zip(op.inputs, strategy.needs):
            root = self.problem.root(tensor)
            if self.is_free(tensor):
                self.spreads[root] = need if need.is_shard else once
            if self.spread(tensor) != need:
                self.made.add(self._conversion(root, need))
        for tensor, give in zip(op.outputs, strategy.gives):
            if give != once:
                self.spreads[tensor] = give

    def candidates(self, op: Op) -> List[Strategy]:
        """Strategies of an op, including computing it once unless the op is worth dividing and can be divided."""
        whole = self.problem.undivided(op)
        if op.id in self.problem.bound:
            return [whole]
        if op.type in WHILES:
            return self._of_loop(op, whole)
        if op.type in SHAPE_ONLY or op.type == "VariableShape":
            return [Strategy("sizes", SIZES, tuple(self.spread(t) for t in op.inputs), whole.gives)]
        tiled = next((on_tiles(op, self.problem.view, position, spread) for position, spread in enumerate(
            map(self.spread, op.inputs)) if spread.is_tiles), None)
        return [whole, *([tiled] if tiled is not None else []), *self.problem.strategies(op, self.split).found]


    def _of_loop(self, op: Op, whole: Strategy) -> List[Strategy]:
        """Strategies of a loop: computed once, or with parts of the weights that its body takes, and of sums of gradients."""
        loop, problem = self.problem.loop(op), self.problem
        spreads: Dict[int, Spread] = {}
        for index, tensor in enumerate(op.inputs) if loop is not None else ():
            have = self.spread(tensor)
            if loop is not None and index in loop.weights:
                spread = have if have.is_shard else loop.cheapest(index) if have.is_tiles or self.is_free(tensor) else None
                if spread is not None and problem.loop_takes(op, index, spread):
                    spreads[index] = spread
        if loop is None:
            return [whole]
        inner, gives = loop.inner(spreads), list(whole.gives)
        for index, spread in spreads.items():
            weight = loop.weights[index]
            gives[index] = once if weight.is_list else spread
            for kept in weight.kept:
                gives[kept] = spread
        for index in loop.sums:
            spread = self.spreads.get(problem.trained_by(op.outputs[index]), once)
            with_sum = loop.inner({**spreads, index: spread}) if spread.is_shard else None
            if with_sum:
                spreads[index] = gives[index] = spread
                inner = with_sum
        if not inner:
            return [whole]
        needs = tuple(spreads.get(index, once) for index in range(len(op.inputs)))
        divided = Strategy(LOOP, LOOP, needs, tuple(gives), inner=inner)
        has_lists = any(index in loop.weights and loop.weights[index].is_list for index in spreads)
        return [divided] if has_lists else [whole, divided]


def _is_moved(spread: Spread) -> bool:
    """Whether a tensor consists of whole elements, which can be sent to any device."""
    return spread == once or spread.is_shard


