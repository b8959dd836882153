"""Propagation: one visit to each op in creation order, and a work list for changes that loops and promotions make.

Most ops follow their sharding rule (:meth:`Propagation.apply`).  If factors alone cannot describe an op's batch axis, it has
a handler, which ``batch`` names in its row: a function of ``reshaping``, ``cutting``, ``positions``, ``control_flow`` or
``functional``.
"""
from __future__ import annotations

import heapq
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from whale_tf.ir.batch_axis.alike import take_results
from whale_tf.ir.batch_axis.blocks import REPLICATED_0, Refuse, blocks_of, factor_at, result_layout
from whale_tf.ir.batch_axis.operands import Operands, carry_offsets, combine_operands, force_sizes, run_whole
from whale_tf.ir.batch_axis.result import EXTENT, UNKNOWN, BatchAxis, Equality, Inexact, Unknown
from whale_tf.ir.batch_axis.rows import RowLoop, visit_row
from whale_tf.ir.batch_axis.sections import End, end_in_list, end_of_section, measure_whole
from whale_tf.ir.batch_axis.state import (
    BATCHED,
    LOOP,
    MOVES,
    OF_SECTION,
    SHAPE_ONLY,
    UNIFORM,
    VARIABLE,
    VARIABLES,
    ZERO,
    BatchState,
    Given,
)
from whale_tf.ir.evaluate import evaluate
from whale_tf.ir.extents import Size, SizeLike, Symbol
from whale_tf.ir.graph import Op
from whale_tf.ir.layout import SHARDED, Block, Blocks, Layout, is_grouped, sharded
from whale_tf.ir.rules import NoRule, Rule, known_rule, rule_for
from whale_tf.ir.rules.rule import HALO, LOOKUP, MEAN, STATISTIC, STATISTIC_GRADIENT, WHOLE, AnyDims
from whale_tf.ir.traits import FLOW, GENERATORS, MERGES, NEXT_ITERATIONS, RANDOM, SHAPE_ATTRS, Role, traits, types_of
from whale_tf.ir.walk import reached

Handler = Callable[["Propagation", Op], None]
HANDLERS: Dict[str, Handler] = {}  # by name
COMPARED = ("broadcast_args", "concat_offset")  # handlers of ops that compare the shapes of their operands


def handler(function: Handler) -> Handler:
    """Register a handler under its name, by which ``batch`` in the op traits table refers to it."""
    assert function.__name__ not in HANDLERS, f"two handlers are called {function.__name__}"
    HANDLERS[function.__name__] = function
    return function


class BeginAgain(Exception):
    """An op shows that what ops before it were told is not right: batches have equally many examples, the numbers of a draw
    belong to examples in other blocks, or an open size of a section counts examples."""

    def __init__(self, equalities: Sequence[Equality], arranged: Mapping[int, Blocks],
                 counted: Mapping[Symbol, Tuple[Block, ...]]) -> None:
        super().__init__("the analysis begins again")
        self.equalities, self.arranged, self.counted = equalities, arranged, counted


class Propagation(BatchState):
    """Visits ops until nothing changes, applying their rules.

    Attributes:
        loop: the graph is a round of this loop over rows.
    """

    loop: Optional[RowLoop] = None

    # -- the sweep ----------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Visit every op, then every op affected by a change, until the fixed point.

        Raises:
            BeginAgain: a later op shows what an earlier one should have known.
        """
        for op in self.graph.ops:
            self.visit(op)
            if self.queue:  # let a loop converge before visiting the ops after it
                self.drain()
        self.is_settled = True
        for op_id in sorted(self.loop_merges):
            self.push(op_id)
        self.drain()

    def drain(self) -> None:
        budget = 50 * len(self.graph.ops) + 1000
        while self.queue:
            op_id = heapq.heappop(self.queue)
            self.queued.discard(op_id)
            budget -= 1
            if budget < 0:
                raise AssertionError(f"the batch axis analysis does not converge at {self.graph.ops[op_id]!r}")
            self.visit(self.graph.ops[op_id])

    def finish(self) -> BatchAxis:
        result = self.result
        result.extents = {t: v for t, v in self._values.items() if v is not None and t in self.layouts}
        for op_id, name in sorted(self.arrays.items()):
            root = self.containers.roots.get(self.graph.ops[op_id].outputs[0] if name == "own" else
                                             self.graph.ops[op_id].inputs[0])
            content = self.containers.contents.get(root) if root is not None else None
            if content is not None and content[0].is_sharded:
                self.open_attribute(self.graph.ops[op_id], "element_shape", content[0].dim)
        result.inexact = [Inexact(op, reason) for op, reason in sorted(self.inexact.items())]
        result.own_seed = sorted(self.seeded)
        result.shared = sorted(self.shared)
        for tensor, flag in enumerate(self.flags):
            if flag & VARIABLE:
                result.variable_dependent[tensor] = 1
        return result

    def visit(self, op: Op) -> None:
        flags, tensors, visited = self.flags, self.graph.tensors, self.visited
        flag = 0
        for t in op.inputs:
            flag |= flags[t]
            if not visited[tensors[t].op] and op.type not in MERGES:
                self.waiting.setdefault(tensors[t].op, []).append(op.id)
                return
        first = not visited[op.id]
        if op.id in self.together:
            self._visit_together(op, flag)
        elif not flag & BATCHED and first and op.type not in _ALWAYS and op.id not in self.special and (
                self.rows_of_list(op) is None and (not flag & OF_SECTION or end_of_section(self, op) is None)):
            carried = flag & (VARIABLE | LOOP | OF_SECTION) if op.type not in SHAPE_ONLY else flag & (LOOP | OF_SECTION)
            if op.type == "ZerosLike":
                carried |= ZERO
            elif op.type in MOVES and op.inputs:
                carried |= flags[op.inputs[0]] & ZERO
            for t in op.outputs:
                flags[t] = carried
            visited[op.id] = 1
            if carried & OF_SECTION:
                measure_whole(self, op)
                force_sizes(self, op)
        elif not first or not take_results(self, op, flag):
            self._visit_slowly(op, flag, first)
            if (self.met or self.rearranged or self.just_counted) and self.can_reduce:  # whoever analyses a body asks for it
                equal = [(self.batches.input_of(a), self.batches.input_of(b)) for a, b in sorted(self.met)]
                raise BeginAgain(equal, self.rearranged, self.just_counted)
        if first and op.id in self.waiting:
            for waiting in self.waiting.pop(op.id):
                self.push(waiting)
        if first and op.type in NEXT_ITERATIONS:
            self._push_consumers(op)

    def _visit_slowly(self, op: Op, flag: int, first: bool) -> None:
        before = None
        if not first:
            before = self._state(op)
            self._forget(op)
        self.visited[op.id] = 1
        carried = flag & (VARIABLE | LOOP) if op.type not in SHAPE_ONLY else flag & LOOP
        end = end_of_section(self, op) if flag & OF_SECTION and not flag & BATCHED else None
        if not flag & BATCHED and end is None:
            carried |= flag & OF_SECTION
        if op.type in VARIABLES:
            carried |= VARIABLE
        for t in op.outputs:
            self.flags[t] = carried
            if t in self.seeds:
                self._plant(t, self.seeds[t])
        if (self.scope is not None and op.id not in self.scope) or any(t in self.seeds for t in op.outputs):
            return
        try:
            if end is not None and end.rule.grouping is not None:
                HANDLERS["grouped"](self, op)
            else:
                self.transfer(op, flag) if end is None else self.apply(op, end.rule, end)
        except (Refuse, NoRule) as reason:
            self.result.met |= getattr(reason, "met", set())
            self.result.groups |= getattr(reason, "groups", set())
            try:
                self._forget(op)
                run_whole(self, op, str(reason))
                measure_whole(self, op)
            except Refuse as why:
                self.lose(op, str(why))
        if before is not None and self._state(op) != before:
            self._push_consumers(op)

    def _visit_together(self, op: Op, flag: int) -> None:
        """Visit an op that runs once, on all examples, with others of its loop or of a section."""
        self._forget(op)
        self.visited[op.id] = 1
        for t in op.outputs:
            self.flags[t] = flag & VARIABLE
        try:
            combine_operands(self, op, self.together[op.id])
            measure_whole(self, op)
        except Refuse as why:
            self.lose(op, str(why))

    def _plant(self, tensor: int, seed: Given) -> None:
        self.flags[tensor] |= seed.flags
        if seed.layout is UNKNOWN:
            self.set(tensor, UNKNOWN, ())
            self.result.unknown[tensor] = Unknown(self.graph.tensors[tensor].op, "it was given no layout")
        elif seed.value is not None:
            self.set_value(tensor, seed.value, (tensor,))
        else:
            self.set(tensor, seed.layout, self._sources_of_seed(tensor))
        if seed.offset:
            self.offsets[tensor] = seed.offset
        if seed.shape is not None and self.graph.tensors[tensor].shape is None:
            self.sizes[tensor] = tuple(Size.of(("dim", tensor, d)) if s is None else s for d, s in enumerate(seed.shape))

    def _sources_of_seed(self, tensor: int) -> Tuple[int, ...]:
        """The sources of a seed; a seed in the middle of the graph follows the rows of its operands."""
        sources, known = self.result.sources, self.result.sources_of
        if tensor in sources or not sources:
            return (tensor,)
        return next((known[t] for t in self.graph.producer(tensor).inputs if t in known), (next(iter(sources)),))

    def _push_consumers(self, op: Op) -> None:
        for t in op.outputs:
            for consumer, _ in self.graph.consumers(t):
                if self.visited[consumer]:
                    self.push(consumer)

    def _state(self, op: Op) -> List[object]:
        """The part of the results' state that other ops depend on."""
        return [(self.layouts.get(t), self.offsets.get(t), self.flags[t], t in self.result.unknown,
                 repr(self._values.get(t)) if self.layouts.get(t) is EXTENT else None, self.containers.roots.get(t))
                for t in op.outputs]

    def _forget(self, op: Op) -> None:
        for t in op.outputs:
            for table in (self.layouts, self.offsets, self._values, self.result.unknown, self.result.sources_of, self.sizes,
                          self.containers.roots, self.lists):
                table.pop(t, None)  # type: ignore[attr-defined]
        for position in range(len(op.inputs)):
            self.conversions.pop((op.id, position), None)
            self.result.localise.pop((op.id, position), None)
        for key in [(op.id, attribute) for attribute in op.body or ()]:
            self.result.bodies.pop(key, None)
        self.inexact.pop(op.id, None)
        self.whole.pop(op.id, None)
        self.looped.discard(op.id)
        self.seeded.discard(op.id)
        self.result.counted_rows.pop(op.id, None)
        self.shared.discard(op.id)

    # -- the transfer of one op ---------------------------------------------------------------------------------------

    def transfer(self, op: Op, flag: int) -> None:
        """Args:
        flag: all flags of the operands.
        """
        unknown = self.result.unknown
        if unknown and op.type != "IdentityN" and any(t in unknown for t in op.inputs):
            raise Refuse("an operand has no layout")
        is_batched = bool(flag & BATCHED) or not self.promoted.keys().isdisjoint(op.outputs)
        if is_batched and op.id in self.forced:
            raise Refuse("its size over all examples is needed")
        is_list = self.rows_of_list(op) is not None
        if self.loop is not None and visit_row(self, op, self.loop):
            return
        if is_batched and flag & OF_SECTION and not is_list and self._is_of_section(op) and not self._compares_elements(op):
            raise Refuse("its operands cover all examples")
        if op.type in RANDOM and not is_batched:
            if flag & OF_SECTION:
                raise Refuse("it draws once, for values that cover all examples")
            self.shared.add(op.id)
        if (not is_batched and not is_list and op.type not in _ALWAYS) or self._as_extent(op):
            return
        own = traits(op.type).batch
        if own:
            HANDLERS[own](self, op)
        elif is_batched:
            self.apply(op, rule_for(op, self.graph, self))

    def _is_of_section(self, op: Op) -> bool:
        """Whether an op has an operand from a section, and either a section also has all its other operands whole, or that
        operand cannot be divided."""
        of_section = [t for t in op.inputs if self.flags[t] & OF_SECTION and t not in self.layouts]
        if not of_section or traits(op.type).role in FLOW or op.type in GENERATORS and op.type != "Range":
            return False
        are_sizes = all(self.is_integer(t) for t in op.outputs)
        return any(self.graph.tensors[t].dtype == "variant" for t in of_section) or all(
            t in self.gathered or (are_sizes and self.layouts[t] is EXTENT) for t in op.inputs if t in self.layouts)

    def _compares_elements(self, op: Op) -> bool:
        """Whether an op compares shapes of which one has the number of a clone's elements, so that another may."""
        values = [self.value(t) for t in op.inputs] if traits(op.type).batch == "broadcast_args" else []
        return any(isinstance(size, Size) and size.depends_on_batch and size.may_be_zero
                   for value in values if value is not None for size in value.flat)

    def rows_of_list(self, op: Op) -> Optional[Layout]:
        """If an op makes a list of a section's result: how the clones divide the result before, because rows cannot be taken from
        a list.  The gradient of stacked elements of a loop is divided as the stack is."""
        if traits(op.type).batch != "list_from_tensor":
            return None
        of_section = bool(self.flags[op.inputs[0]] & OF_SECTION)
        if op.forward < 0:
            blocks = end_in_list(self, op) if of_section else None
            return None if blocks is None else sharded(1, blocks)
        forward = self.graph.ops[op.forward]
        stack = forward.outputs[0] if traits(forward.type).batch == "list_stack" else None
        if stack is None or op.inputs[0] in self.layouts or not self.layout(stack).is_sharded:
            return None
        layout = self.layout(stack)._replace(power=0)
        return layout if of_section or layout.dim == 0 else None  # a constant gradient of rows is that of all rows

    def _as_extent(self, op: Op) -> bool:
        """Evaluate an integer op on extents."""
        row = traits(op.type)
        if not row.value or row.batch in COMPARED or not any(self.layouts.get(t) is EXTENT for t in op.inputs):
            return False  # COMPARED: constants among compared shapes may have to become the clone's
        if not all(self.is_integer(t) for t in op.outputs):
            return False
        values = [self.value(t) for t in op.inputs]
        if any(v is None for v in values):
            return False
        results = evaluate(op.type, op.attrs, [v for v in values if v is not None], op.name)
        if results is None:
            return False
        for t, value in zip(op.outputs, results):
            self.set_value(t, value, self.sources(op))
        return True

    def apply(self, op: Op, rule: Rule, end: Optional[End] = None) -> None:
        """Propagate through a rule: find the batch factor, convert the operands to layouts that the rule's algebra can
        combine, and derive the results' layouts.

        Args:
            end: the rows of a section's result along which the op is divided.
        """
        layouts = [self.layout(t) for t in op.inputs]
        for shape in rule.shapes:
            if layouts[shape.position] is EXTENT:  # others, such as a number of true elements, are combined like any operand
                layouts[shape.position] = REPLICATED_0
        factor, blocks, is_uniform = self.batch_factor(op, rule, layouts) if end is None else (end.factor, end.blocks, False)
        if op.id in self.arranged:
            blocks, is_uniform = self.arranged[op.id], False
        kind = rule.kinds.get(factor, "pass") if factor is not None else "pass"
        if kind in (WHOLE, HALO, LOOKUP):
            raise Refuse("it needs all examples at once")
        if kind != "pass" and blocks is None and any(
                self.flags[t] & OF_SECTION and dims is None for t, dims in zip(op.inputs, rule.inputs)):
            raise Refuse("its axes follow from the number of rows that data choose of all examples, and a part may have none")
        plan = Operands(self, op, rule.roles, layouts)
        for i, layout in enumerate(layouts):
            if layout is EXTENT:
                plan.make_whole(i)
        if factor is not None:
            for i, dims in enumerate(rule.inputs):
                if not layouts[i].is_sharded and isinstance(dims, tuple) and (factor,) in dims:
                    plan.slice(i, dims.index((factor,)), blocks)
                    is_uniform = False
        if self.offsets or plan.shifts:
            carry_offsets(self, op, plan)
        power, is_partial = plan.settle(factor is not None)
        if op.type in RANDOM and factor is None and (is_partial or plan.extreme or plan.is_combined):
            raise Refuse("it draws once, and each clone has its own part of the values")
        self.localise_shapes(op, rule, factor, blocks)
        if kind in (STATISTIC, STATISTIC_GRADIENT):
            self.inexact[op.id] = "statistics are computed for each part of the batch separately"
        if kind in (MEAN, STATISTIC) and is_grouped(blocks):
            raise Refuse("it is a mean over the elements of rows, of which a clone may have none")
        if kind == MEAN and blocks is None:
            if self.options.sections:
                raise Refuse("it is a mean over rows chosen by data")
            self.inexact[op.id] = "a mean over rows chosen by data is weighted by the number of examples"
        sources, zero = self.sources(op) if end is None else self.sources_in(blocks), plan.is_zero
        for t, dims in zip(op.outputs, rule.outputs):
            layout = result_layout(dims, factor, blocks, kind, power, is_partial, plan.extreme)
            self.set(t, layout, sources, zero)
            if is_uniform and layout.is_sharded and kind == "pass":
                self.flags[t] |= UNIFORM
            self.infer_sizes(op, rule, t, dims)
        if op.type in SHAPE_ATTRS and self.layout(op.outputs[0]).is_sharded:
            self.open_attribute(op, "shape", self.layout(op.outputs[0]).dim)
        if op.type in RANDOM:
            (self.shared if factor is None else self.seeded).add(op.id)
        plan.record()

    def batch_factor(self, op: Op, rule: Rule, layouts: Sequence[Layout]) -> Tuple[Optional[str], Blocks, bool]:
        """The batch factor, by the operands (or an extent in a shape operand, or a promotion), its blocks, and whether all these
        operands are the same for all examples."""
        found: List[Tuple[Optional[str], Blocks, bool]] = []
        for i, layout in enumerate(layouts):
            if layout.kind == SHARDED:
                found.append((factor_at(rule.inputs[i], layout.dim), layout.blocks, bool(self.flags[op.inputs[i]] & UNIFORM)))
        for shape in rule.shapes:
            if self.layouts.get(op.inputs[shape.position]) is EXTENT:
                value = self.value(op.inputs[shape.position])
                for element, dims in zip(value if value is not None else (), shape.dims):
                    if isinstance(element, Size) and element.depends_on_batch:
                        found.append((dims[0] if len(dims) == 1 else None, blocks_of(element), True))
        if self.promoted and op.outputs and op.outputs[0] in self.promoted:
            dim, rows = self.promoted[op.outputs[0]]
            found.append((factor_at(rule.outputs[0], dim), rows, False))
        if not found:
            return None, None, False
        factor, blocks, is_uniform = found[0]
        for other, more, uniform in found:
            if other is None:
                raise Refuse("it needs all examples at once")
            if other != factor:
                raise Refuse("two of its dimensions are divided along the batch")
            blocks, is_uniform = self.unify(blocks, more, is_uniform, uniform), is_uniform and uniform
        for i, layout in enumerate(layouts):
            if layout.kind == SHARDED and layout.blocks != blocks and self.flags[op.inputs[i]] & UNIFORM:
                self.arrange(op.inputs[i], layout.blocks, blocks)
        return factor, blocks, is_uniform

    def arrange(self, tensor: int, before: Blocks, blocks: Blocks) -> None:
        """Let draws from which a tensor follows give their numbers to the examples in these blocks, because the tensor meets
        examples in them.

        Raises:
            Refuse: they give them to other examples already.
        """
        def behind(index: int) -> List[int]:
            return [t for t in self.graph.producer(index).inputs if self.flags[t] & UNIFORM and self.layout(t).is_sharded]

        for found in reached([tensor], behind):
            draw = self.graph.producer(found)
            if draw.type in RANDOM and self.can_reduce:
                if self.layout(found).blocks != before or self.arranged.get(draw.id, blocks) != blocks:
                    raise Refuse("its random numbers belong to examples in other blocks")
                self.rearranged[draw.id] = blocks

    def localise_shapes(self, op: Op, rule: Rule, factor: Optional[str], blocks: Blocks) -> None:
        """Replace the constant batch size in shape operands with the clone's."""
        for shape in rule.shapes:
            places = [j for j, dims in enumerate(shape.dims) if factor is not None and factor in dims]
            if places:
                self.localise_elements(op, shape.position, dict.fromkeys(places, blocks))

    def learn_sizes(self, op: Op) -> None:
        """Record result sizes that follow from the op's rule, for ops whose layouts a handler set."""
        if any(self.lacks_sizes(t) for t in op.outputs):
            rule = known_rule(op, self.graph, self)
            for tensor, dims in zip(op.outputs, rule.outputs) if rule is not None else ():
                self.infer_sizes(op, rule, tensor, dims)  # type: ignore[arg-type]

    def infer_sizes(self, op: Op, rule: Rule, tensor: int, dims: AnyDims) -> None:
        """Record sizes of a result that the graph does not know."""
        if not isinstance(dims, tuple) or not self.lacks_sizes(tensor):
            return
        known: Dict[str, SizeLike] = {}
        for t, operand in zip(op.inputs, rule.inputs):
            if isinstance(operand, tuple):
                for factors, size in zip(operand, self.local_shape(t) or ()):
                    if len(factors) == 1:
                        known.setdefault(factors[0], size)
        for shape in rule.shapes:
            value = self.value(op.inputs[shape.position])
            for element, factors in zip(value if value is not None else (), shape.dims):
                if len(factors) == 1 and element != -1:
                    known.setdefault(factors[0], element)
        sizes = [1 if not factors else known.get(factors[0], Size.of(("dim", tensor, d))) if len(factors) == 1
                 else Size.of(("dim", tensor, d)) for d, factors in enumerate(dims)]
        self.set_sizes(tensor, sizes)


# Ops to visit even if no operand depends on the batch: they draw random numbers, create containers, or are in a loop.
_ALWAYS = VARIABLES | types_of(Role.RANDOM, Role.ENTER, Role.EXIT, Role.MERGE, Role.CONTAINER, Role.EMPTY_LIST)
