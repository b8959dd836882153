"""The algebra of layouts: an op's operands are converted to layouts that it can combine.

The letters are the rule's roles.  A replicated value is ``T = w^p v``, a sharded one ``concat(w^p v)``, and a partial one
``sum(w^p v)``.  So a product adds powers, a quotient subtracts them, a sum needs one power for all its terms, and anything
non-linear needs power 0 and no partial value.
"""
from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from whale_tf.ir.batch_axis.blocks import REPLICATED_0, Refuse
from whale_tf.ir.batch_axis.result import CONCAT, EXTENT, EXTREMES, SAME, Conversion, Offset, Offsets, Reduce, Scale, Slice, Whole
from whale_tf.ir.batch_axis.state import BATCHED, LOOP, MOVES, OF_SECTION, SIZED, VARIABLE, ZERO, BatchState
from whale_tf.ir.extents import Size, is_counted, is_static, static_ints
from whale_tf.ir.graph import Op, Phase
from whale_tf.ir.layout import (
    PARTIAL,
    REFERENCE,
    REPLICATED,
    SHARDED,
    Block,
    Blocks,
    Exponent,
    Layout,
    Rows,
    batch_of,
    block_of,
    exponents_of,
    is_grouped,
    is_measured,
    replicated,
    rows_each,
    weight_of,
)
from whale_tf.ir.rules import known_rule
from whale_tf.ir.rules.shape import strided_terms
from whale_tf.ir.traits import FLOW, Gives, Role, traits
from whale_tf.ir.traits import VariableUse as VariableState
from whale_tf.ir.walk import reached

# ops that can run on all examples
WHOLE_ROLES = (Role.COMPUTE, Role.RANDOM, Role.WHILE, Role.CONDITIONAL, Role.CALL, Role.EMPTY_LIST, Role.HOST, Role.TABLE)


class Operands:
    """The operands of one op while they are converted to layouts that its algebra can combine."""

    def __init__(self, state: BatchState, op: Op, roles: str, layouts: List[Layout]) -> None:
        self.state, self.op, self.roles, self.layouts = state, op, roles, layouts
        self.steps: List[List[Conversion]] = [[] for _ in layouts]
        self.shifts: Dict[int, int] = {}  # operands whose rows, taken from a table of positions, may become positions
        self.is_zero = False
        self.extreme: Optional[str] = None

    def zero(self, i: int) -> bool:
        return bool(self.state.flags[self.op.inputs[i]] & ZERO) or is_zero_constant(self.state, self.op.inputs[i])

    def slice(self, i: int, dim: int, blocks: Blocks) -> None:
        """Operand ``i`` is whole along the batch, so the clone takes its rows (outside the loop if it comes from there)."""
        state, tensor = self.state, self.op.inputs[i]
        producer = state.graph.producer(tensor)
        if producer.type == "Enter" and blocks is not None:
            state.promote(tensor, dim, blocks, state.sources(self.op))
        shape = state.shape(tensor)
        size = shape[dim] if shape is not None else None
        if self.layouts[i].kind != REPLICATED:
            self.resolve(i, True)
        # an open dimension of a value of the whole mini-batch that meets examples has the size of the mini-batch
        has_rank = state.graph.tensors[tensor].shape is not None
        of_rows = is_grouped(blocks)
        is_open = size is None and not (has_rank and (self.steps[i] or state.flags[tensor] & OF_SECTION or of_rows))
        if of_rows and (not state.can_reduce or state.flags[tensor] & LOOP or list(map(rows_each, blocks or ())) != [1]):
            raise Refuse("it takes the elements of rows in a loop or function")
        if is_open or blocks is None or is_measured(blocks) or (state.flags[tensor] & OF_SECTION and not has_rank):
            raise Refuse(f"it is not known whether {state.graph.tensor_name(tensor)!r} has a batch dimension")
        each = sum(map(rows_each, blocks)) if all(batch_of(block) == REFERENCE for block in blocks) else None
        if state.batch is not None and size is not None and each is not None and size != state.batch * each:
            raise Refuse(f"{state.graph.tensor_name(tensor)!r} has {size} rows, but {each} x {state.batch} "
                         f"examples are expected")
        if size is None and state.flags[tensor] & OF_SECTION:
            state.count_rows(tensor, dim, blocks)
        self.steps[i].append(Slice(dim, blocks))
        step = row_step(state, tensor, dim, blocks)
        if step:
            self.shifts[i] = step

    def offset(self, i: int) -> Offsets:
        """The offset of operand ``i`` if it counts from the clone's first example."""
        return self.shifts.get(i) or self.state.offsets.get(self.op.inputs[i], 0)

    def count_from_own(self, i: int) -> None:
        """The result counts from the clone's first example, as operand ``i`` has to: rows of a table do not yet."""
        if i in self.shifts:
            self.steps[i].append(Offset(-self.shifts[i]))

    def count_from_first(self, i: int) -> None:
        """Operand ``i`` may be positions, but the op needs them in the whole mini-batch, as rows of a table are."""
        offset = self.state.offsets.get(self.op.inputs[i], 0)
        if offset:
            self.steps[i].append(Offset(offset))

    def make_whole(self, i: int) -> None:
        """Operand ``i`` is a size of the clone's part, but the op needs the size of the whole batch."""
        tensor = self.op.inputs[i]
        value = self.state.value(tensor)
        if self.state.flags[tensor] & LOOP:
            raise Refuse("a loop counts the examples")
        if value is None or not all(map(is_counted, value.flat)):
            raise Refuse(f"the size {self.state.graph.tensor_name(tensor)!r} does not follow from the number of examples")
        self.steps[i].append(Whole(tuple(value.flat)))
        self.layouts[i] = REPLICATED_0

    def scale(self, i: int, power: Exponent) -> None:
        if power and not self.zero(i):
            if self.state.is_integer(self.op.inputs[i]):
                raise Refuse(f"the integer {self.state.graph.tensor_name(self.op.inputs[i])!r} cannot be weighted")
            self.steps[i].append(Scale(power))

    def resolve(self, i: int, has_batch: bool) -> None:
        """Operand ``i`` is partial but must be whole: combine it over the clones, or use the clone's own value (inexact).

        Raises:
            Refuse: the op works on no single examples, so it runs once, on whole operands.
        """
        state, layout, tensor = self.state, self.layouts[i], self.op.inputs[i]
        is_known = not state.flags[tensor] & VARIABLE
        exact = is_known or (state.options.sync is not None and state.options.sync(self.op))
        in_section = not exact and state.options.sections and not of_normalisation(state, self.op, tensor)
        in_loop = state.flags[tensor] & LOOP if state.can_reduce else exact  # a function's body never waits for other clones
        if in_loop and (exact or in_section) and state.options.sections:
            exact = in_section = False
            state.looped.add(self.op.id)
        kind = "sum" if layout.is_partial else layout.kind
        if in_section and not (has_batch and state.can_reduce):
            raise Refuse(f"it needs {state.graph.tensor_name(tensor)!r} over all examples")
        if (exact or in_section) and state.can_reduce and not state.flags[tensor] & LOOP:
            self.steps[i].append(Reduce(kind, layout.power))
            self.layouts[i] = REPLICATED_0
        else:
            name = state.graph.tensor_name(tensor)
            state.inexact[self.op.id] = "it uses {} over the batch ({!r}), which each part computes for itself".format(
                {"sum": "a mean" if _is_mean(layout.power) else "a sum"}.get(kind, "a " + kind), name)
            self.layouts[i] = replicated(layout.power - self._share(layout.power)) if layout.is_partial else REPLICATED_0

    def _share(self, power: Exponent) -> Exponent:
        """A weight of which the clones' shares add up to one: that of a mean's examples, or else of the op's."""
        bases = exponents_of(power)
        if len(bases) == 1 and _is_mean(power):
            return weight_of(next(iter(bases)))
        sources = self.state.sources(self.op)
        return weight_of([(self.state.batch_of_source(sources[0]), 1)]) if sources else 1

    def combine_bounds(self, data: int) -> None:
        """Combine over the clones what tells how the data are cut or arranged, such as a number of true elements."""
        for i, layout in enumerate(self.layouts):
            if i != data and layout.is_sharded:
                raise Refuse("it needs all examples at once")
            if i != data and (layout.is_partial or layout.kind in EXTREMES):
                self.resolve(i, self.layouts[data].is_sharded)

    @property
    def is_combined(self) -> bool:
        """Whether an operand is combined over the clones."""
        return any(isinstance(step, Reduce) for steps in self.steps for step in steps)

    def settle(self, has_batch: bool) -> Tuple[Exponent, bool]:
        """The results' power, and whether they are partial."""
        roles, layouts = self.roles, self.layouts
        if any(layout.kind in EXTREMES for layout in layouts):
            self.extreme = self._common_extreme() if self.op.type in MOVES and not has_batch else None
            if self.extreme:
                return 0, False
            for i, layout in enumerate(layouts):
                if layout.kind in EXTREMES:
                    self.resolve(i, has_batch or traits(self.op.type).role in FLOW)
        partials = [i for i, layout in enumerate(layouts) if layout.kind == PARTIAL]
        if partials:
            partials = self._choose_partials(partials, has_batch)
        power: Exponent = 0
        for i, role in enumerate(roles):
            if role == "n":
                self.scale(i, layouts[i].power)
            elif role == "m":
                power = power + layouts[i].power
                self.is_zero = self.is_zero or self.zero(i)
            elif role == "d":
                power = power - layouts[i].power
        added = [i for i, role in enumerate(roles) if role == "a"]
        if added:
            power = self._add(added, bool(partials))
        return power, bool(partials)

    def _common_extreme(self) -> Optional[str]:
        """The kind of all results, if the data have one kind.  Replicated data may be among maxima, because the maximum of equal
        numbers is the same number, but not among products."""
        data = [layout for layout, role in zip(self.layouts, self.roles) if role in "am"]
        kinds = {layout.kind for layout in data}
        if any(layout.power for layout in data) or len(kinds - {REPLICATED}) != 1 or kinds == {"prod", REPLICATED}:
            return None
        kind = next(iter(kinds - {REPLICATED}))
        return kind if kind in EXTREMES else None

    def _choose_partials(self, partials: List[int], has_batch: bool) -> List[int]:
        """Resolve partial operands until the rest may stay partial: none next to a batch dimension, one in a product, and none as
        a divisor or in a non-linear role."""
        state = self.state
        kept = []
        for i in partials:
            if has_batch or self.roles[i] in "nd":
                self.resolve(i, has_batch)
            else:
                kept.append(i)
        factors = [i for i in kept if self.roles[i] == "m"]
        if len(factors) > 1:
            # keep one that depends on variables, so that as many others as possible are combined exactly
            keep = next((i for i in factors if state.flags[self.op.inputs[i]] & VARIABLE), factors[0])
            for i in factors:
                if i != keep:
                    self.resolve(i, has_batch)
            kept = [i for i in kept if i == keep or self.roles[i] == "a"]
        return kept

    def _add(self, added: List[int], is_partial: bool) -> Exponent:
        """Convert the terms of a sum to one power."""
        layouts = self.layouts
        terms = [i for i in added if not self.zero(i)]
        self.is_zero = not terms
        leading = [i for i in terms if layouts[i].kind == (PARTIAL if is_partial else SHARDED)] or (
            [] if is_partial else terms)
        powers = [layouts[i].power for i in leading] or [0]
        power = max(powers, key=lambda p: (powers.count(p), *_simplicity(p)))
        for i in terms:
            # a whole term R enters a partial sum as sum_i w_i^power (w_i^(1 - power) R)
            own = layouts[i].power + (self._share(power) if is_partial and layouts[i].kind == REPLICATED else 0)
            self.scale(i, own - power)
        return power

    def record(self) -> None:
        for i, steps in enumerate(self.steps):
            if steps:
                self.state.conversions[self.op.id, i] = tuple(steps)


def _is_mean(power: Exponent) -> bool:
    return bool(power) and max(exponents_of(power).values()) > 0


def _simplicity(power: Exponent) -> Tuple[int, int, List[Tuple[object, int]]]:
    """Orders powers to which terms of a sum may be brought: few weights are best, then means.  Ties have an order, too."""
    found = exponents_of(power)
    return -sum(map(abs, found.values())), sum(found.values()), sorted(found.items(), reverse=True)


def run_whole(state: BatchState, op: Op, reason: str) -> None:
    """Let an op run once, on operands combined over all clones; its results are the local script's.

    Raises:
        Refuse: an operand cannot be combined.
    """
    row = traits(op.type)
    types = {state.graph.tensors[t].dtype for t in op.outputs}
    if not (state.options.sections and state.can_reduce) or row.role not in WHOLE_ROLES or row.is_write or (
            row.state is not VariableState.NONE) or any(state.flags[t] & LOOP for t in op.inputs) or any(
            dtype.endswith("_ref") or (dtype == "resource" and row.role is not Role.WHILE) for dtype in types):
        raise Refuse(reason)
    combine_operands(state, op, reason)


def combine_operands(state: BatchState, op: Op, reason: str) -> None:
    """Make an op whole.

    Raises:
        Refuse: an operand cannot be combined.
    """
    # a batch input is available whole
    found = {i: combination(state, t) for i, t in enumerate(op.inputs)
             if state.layout(t) != REPLICATED_0 and t not in state.result.sources}
    if None in found.values():
        raise Refuse(reason)
    force_sizes(state, op)
    for position in range(len(op.inputs)):
        state.conversions.pop((op.id, position), None)
        state.result.localise.pop((op.id, position), None)
    state.conversions.update({(op.id, i): (step,) for i, step in found.items() if step is not None})
    state.gathered.update(op.inputs)
    state.whole[op.id] = reason
    for t in op.outputs:
        state.flags[t] |= OF_SECTION


def force_sizes(state: BatchState, op: Op) -> None:
    """Compare sizes of the whole mini-batch for an op on whole values: TensorFlow would add up a dimension of size 1, which a
    clone's part has if it is a single example."""
    for t in op.inputs:
        if state.flags[t] & SIZED and not state.flags[t] & LOOP and state.can_reduce:
            state.force(state.graph.tensors[t].op)


def combination(state: BatchState, tensor: int) -> Optional[Conversion]:
    """How to combine the clones' values of a tensor into the whole mini-batch's; None: they cannot be combined."""
    layout = state.layout(tensor)
    if state.graph.tensors[tensor].dtype in ("resource", "variant", "string_ref") or (
            layout.power and layout is not EXTENT and state.is_integer(tensor)):
        return None
    if layout is EXTENT:
        value = state.value(tensor)
        if value is None or not all(map(is_counted, value.flat)):  # so it has to be measured on all examples
            state.force(state.graph.tensors[tensor].op)
            return None
        return Whole(tuple(value.flat))
    if layout.is_sharded:
        return Reduce(CONCAT, layout.power, state.offsets.get(tensor, 0))
    if layout.is_partial:
        return Reduce("sum", layout.power)
    if layout.is_replicated:
        return Reduce(SAME, layout.power)
    return Reduce(layout.kind) if layout.kind in EXTREMES else None


def of_normalisation(state: BatchState, op: Op, tensor: int) -> bool:
    """Whether a partial value is a statistic of a normalisation layer, or a gradient on its way back through one.  Each replica
    normalises by its own statistics, unless ``sync_batch_norm`` is on.  Such a layer keeps moving averages of them, and they, or
    what follows from them, meet examples."""
    stack, chain = [tensor], {op.id}
    found = op.forward in state.per_replica or op.forward in state.inexact
    while stack:
        current = stack.pop()
        producer = state.graph.producer(current)
        chain.add(producer.id)
        found = found or producer.id in state.inexact or (_is_averaged(state, current) and (
            producer.id in state.per_replica or (op.phase is Phase.FORWARD and _meets_examples(state, op))))
        stack.extend(t for t in producer.inputs if state.layout(t).is_partial and state.graph.tensors[t].op not in chain)
    if found:
        state.per_replica |= chain
    return found


def _meets_examples(state: BatchState, op: Op) -> bool:
    """Whether an op, or a forward op that follows from it, has an operand with examples."""
    graph, found = state.graph, {op.id: None}
    pending = [op.id]
    for number in pending:  # grows while we walk
        if any(state.layout(t).is_sharded for t in graph.ops[number].inputs):
            return True
        users = [user for t in graph.ops[number].outputs for user, _ in graph.consumers(t) if user not in found]
        pending += [user for user in dict.fromkeys(users) if graph.ops[user].phase is op.phase]
        found.update(dict.fromkeys(users))
    return False


def _is_averaged(state: BatchState, tensor: int) -> bool:
    """Whether an op outside the clones keeps a moving average of a vector of statistics: it writes a variable with a value that
    follows from the variable, and linearly from the statistics.  Weights that groups of examples get by their losses are none."""
    if state.scope is None or state.graph.tensors[tensor].shape == ():
        return False

    def following(use: Tuple[int, int]) -> List[Tuple[int, int]]:
        op = state.graph.ops[use[0]]
        return [user for t in op.outputs for user in state.graph.consumers(t)] if _is_linear(state, op, use[1]) else []

    outside = [use for use in state.graph.consumers(tensor) if use[0] not in state.scope]
    ops = (state.graph.ops[number] for number, _ in reached(outside, following))
    return any(traits(op.type).is_write and _decays(state, op) for op in ops)


def _is_linear(state: BatchState, op: Op, position: int) -> bool:
    """Whether an op's results are linear in an operand, according to its rule; True if there is no rule."""
    rule = known_rule(op, state.graph, state)
    return rule is None or rule.roles[position:position + 1] in ("", "a", "m")


def _decays(state: BatchState, write: Op) -> bool:
    """Whether a write reduces the weight of a variable's old value.  A metric's new value follows from the old one too, but only
    by addition."""
    stack = [(t, True) for t in write.inputs[1:]]
    seen = set(stack)
    while stack:
        tensor, is_sum = stack.pop()
        op = state.graph.producer(tensor)
        if tensor == write.inputs[0] or write.inputs[0] in op.inputs:  # the variable's reference, or a read through its handle
            if not is_sum:
                return True
            continue
        is_sum = is_sum and (traits(op.type).value == "add" or op.type in MOVES)
        more = {(t, is_sum) for t in op.inputs if not state.flags[t] & BATCHED} - seen
        seen |= more
        stack.extend(more)
    return False


def _may_count(state: BatchState, tensor: int) -> bool:
    """Whether a tensor may hold positions."""
    return state.is_integer(tensor) and state.graph.tensors[tensor].dtype != "bool"


def row_step(state: BatchState, tensor: int, dim: int, blocks: Tuple[Block, ...]) -> int:
    """The increment of an integer constant from one example of the reference batch to the next; 0 if it varies."""
    each = blocks[0]
    if not _may_count(state, tensor) or len(blocks) != 1 or not isinstance(each, int):
        return 0
    value = state.value(tensor)
    if value is None or not is_static(value):
        return 0
    rows = np.moveaxis(value, dim, 0).astype(np.int64)
    steps = np.unique(rows[each:] - rows[:-each])
    return int(steps[0]) if len(steps) == 1 else 0


def is_zero_constant(state: BatchState, tensor: int) -> bool:
    op = state.graph.producer(tensor)
    if op.type == "Const":
        return op.value is not None and op.value.dtype.kind in "fiuc" and not op.value.any()
    return op.type == "Fill" and is_zero_constant(state, op.inputs[1])


def moved_offset(state: BatchState, op: Op, offset: Offsets) -> Optional[Offsets]:
    """The offset of a result whose elements are some of operand 0's; None if its last dimension does not have the same columns or
    some of them in order."""
    if isinstance(offset, (int, Rows)) or len(set(offset)) == 1:
        return offset if isinstance(offset, (int, Rows)) else offset[0]
    before, after = state.shape(op.inputs[0]), state.shape(op.outputs[0])
    if not before or not after or op.type.startswith(("Gather", "Transpose")):
        return None
    if op.type == "StridedSlice":
        return _taken_offset(state, op, before, offset)
    return offset if before[-1] == after[-1] == len(offset) else None


def _taken_offset(state: BatchState, op: Op, shape: Sequence[Optional[int]], offset: Tuple[Block, ...]) -> Optional[Offsets]:
    """The offset of the columns that a StridedSlice takes."""
    term = strided_terms(op, len(shape), state, shape)[-1]
    if term.dim < 0 or term.full:
        return offset if term.full and term.dim >= 0 else None
    bounds = [state.value(t) for t in op.inputs[1:]]
    begin, end, stride = (None if bound is None else bound[term.term] for bound in bounds)
    if not all(isinstance(bound, (int, np.integer)) for bound in (begin, end, stride)):
        return None
    if not term.keeps:
        return offset[begin]  # type: ignore[index]
    is_open = [op.attrs.get(name, 0) >> term.term & 1 for name in ("begin_mask", "end_mask")]
    return offset[None if is_open[0] else begin:None if is_open[1] else end:stride]  # type: ignore[misc]


def _sum(a: Block, b: Block, sign: int) -> Optional[Block]:
    """The offset of a sum or (sign -1) difference of positions; None if they count different examples."""
    if 0 in (a, b) or batch_of(a) == batch_of(b):
        return block_of(rows_each(a) + sign * rows_each(b), batch_of(b if a == 0 else a))
    return None


def _leads_away(state: BatchState, tensor: int, each: int) -> bool:
    """Whether a number that is added to positions leads to other examples: it counts examples, or more rows than one example has,
    ``each``.  If an example has one row, any number but zero does; if it has several, data are taken to stay among them."""
    if state.flags[tensor] & ZERO:
        return False
    value = state.value(tensor)
    if value is None:
        return abs(each) == 1
    return any(abs(each) == 1 or size.depends_on_batch if isinstance(size, Size) else abs(size) >= abs(each)
               for size in value.flat)


def carry_offsets(state: BatchState, op: Op, plan: Operands) -> None:
    """Handle offsets of positions among a rule's operands.  Sums, products with constants and data movement pass them on; any
    other op gets positions in the whole batch."""
    offsets = [plan.offset(i) for i in range(len(op.inputs))]
    if not any(offsets):
        return
    carried: Optional[Offsets] = None
    single = [o for o in offsets if isinstance(o, (int, Rows))]
    if traits(op.type).value in ("add", "subtract") and len(single) == len(offsets):
        carried = _sum(single[0], single[1], -1 if op.type == "Sub" else 1)
        if carried and any(_leads_away(state, t, rows_each(carried)) for t, offset in zip(op.inputs, offsets) if not offset):
            carried = None  # these may be positions in another part, or behind all examples
    elif op.type == "Mul" and len(single) == len(offsets):
        other = 1 if offsets[0] else 0
        factor = static_ints(state.value(op.inputs[other])) if not offsets[other] else None
        if factor is not None and len(set(factor)) == 1:
            carried = block_of(rows_each(single[1 - other]) * factor[0], batch_of(single[1 - other]))
    elif not any(offsets[1:]) and (op.type in MOVES or traits(op.type).gives is Gives.ELEMENTS or (
            op.type == "Cast" and _may_count(state, op.outputs[0]))):
        carried = moved_offset(state, op, offsets[0])
    elif op.type == "Pack" and len(single) == len(offsets):
        rank = state.rank(op.inputs[0])
        last = op.attrs.get("axis", 0) in (-1, rank)
        carried = offsets[0] if len(set(offsets)) == 1 else tuple(single) if last else None
    if carried:
        state.offsets[op.outputs[0]] = carried
    count = plan.count_from_first if carried is None else plan.count_from_own
    for i in range(len(offsets)):
        count(i)
