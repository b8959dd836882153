"""Propagation: one visit per op in creation order, plus a work list for what loops and promotions change.

:class:`Propagation` holds the state of an analysis (per tensor: layout, extent, offset, flags) and applies rules; ops
whose batch axis is not a matter of factors alone have a handler of their own (``HANDLERS``, filled by the modules
``reshaping``, ``cutting``, ``positions``, ``control_flow`` and ``functional``).
"""
from __future__ import annotations

import heapq
from typing import Callable, Container, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

from whale_tf.ir.batch_axis.result import (
    EXTENT, EXTREMES, UNKNOWN, BatchAxis, Conversion, Inexact, Localise, Offset, Reduce, Scale, Slice, Unknown, Whole)
from whale_tf.ir.extents import (
    BATCH, EVALUATORS, Size, SizeLike, Value, batch_size, depends_on_batch, evaluate, static_ints, vector)
from whale_tf.ir.graph import Op, OpGraph, Shape
from whale_tf.ir.layout import PARTIAL, REPLICATED, SHARDED, Layout, partial, replicated, sharded
from whale_tf.ir.rules import NoRule, Rule, View, rule_for
from whale_tf.ir.rules.random import RANDOM
from whale_tf.ir.rules.rule import HALO, LOOKUP, MEAN, SAME, STATISTIC, STATISTIC_GRADIENT, SUM, WHOLE, AnyDims

Blocks = Optional[Tuple[int, ...]]
# Flags of a tensor: its value depends on a variable; it is zero (or an empty list); it needs attention; it lives in a loop.
VARIABLE, ZERO, BATCHED, LOOP = 1, 2, 4, 8
VARIABLES = frozenset(("Variable", "VariableV2", "VarHandleOp", "AutoReloadVariable", "TemporaryVariable", "VarHandlesOp"))
SHAPE_ONLY = frozenset(("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"))
MOVES = frozenset(("Identity", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "Transpose", "Snapshot", "Enter", "Exit",
                   "PreventGradient", "Switch", "Merge", "NextIteration"))
SHAPE_ATTRIBUTES = frozenset(("EnsureShape", "PlaceholderWithDefault", "AccumulateNV2"))
LOOP_ENDS = frozenset(("NextIteration", "RefNextIteration"))
MERGES = frozenset(("Merge", "RefMerge"))
INTEGERS = ("int", "uint", "bool")
REPLICATED_0 = replicated()
MAX_OPAQUE = 16  # elements of an unknown integer tensor that get a symbol each


class Refuse(Exception):
    """The batch axis cannot pass an op, for the reason in the text."""


class Options(NamedTuple):
    """``sync(op)``: whether a whole-batch statistic that ``op`` uses is combined over the clones (exact, at the price of a
    collective) instead of approximated by the clone's own."""

    sync: Optional[Callable[[Op], bool]] = None


Handler = Callable[["Propagation", Op], None]
HANDLERS: Dict[str, Handler] = {}


def handles(*types: str) -> Callable[[Handler], Handler]:
    """Register the handler of some op types."""
    def register(function: Handler) -> Handler:
        HANDLERS.update({name: function for name in types})
        return function
    return register


class Given(NamedTuple):
    """The state of a tensor that an analysis starts from (a source, a parameter of a body)."""

    layout: Layout
    flags: int = 0
    value: Optional[Value] = None
    offset: Union[int, Tuple[int, ...]] = 0


class Containers:
    """Tensor arrays and stacks: a handle's root names the object, whose elements have one layout.

    ``roots``: handle tensor -> root; ``contents``: root -> (layout of an element, flags); ``extents``: root -> the size
    that all elements are; ``users``: root -> ops to visit again when that changes.
    """

    def __init__(self) -> None:
        self.roots: Dict[int, Tuple[object, ...]] = {}
        self.contents: Dict[Tuple[object, ...], Tuple[Layout, int]] = {}
        self.extents: Dict[Tuple[object, ...], Value] = {}
        self.users: Dict[Tuple[object, ...], Set[int]] = {}


class Propagation(View):
    """The state of one analysis, and how a rule is applied to it.

    Args:
        seeds: tensors whose layout is given (sources, parameters of a body).
        scope: op ids that are divided; all when None.  Tensors from outside are replicated.
        promoted: outputs of generators (Fill, random ops, ...) that are to be made per clone: dimension and blocks.
    """

    def __init__(self, graph: OpGraph, seeds: Mapping[int, Given], batch: Optional[int], options: Options,
                 scope: Optional[Container[int]] = None) -> None:
        super().__init__(graph)
        self.result = BatchAxis(graph, {t: g.layout.dim for t, g in seeds.items() if g.layout.is_sharded}, batch)
        self.batch = batch
        self.options = options
        self.scope = scope
        self.seeds = seeds
        self.layouts = self.result.layouts
        self.offsets = self.result.offsets
        self.conversions = self.result.conversions
        self.flags = bytearray(len(graph.tensors))
        self.visited = bytearray(len(graph.ops))
        self.sizes: Dict[int, Tuple[SizeLike, ...]] = {}  # shapes that the graph does not know but we do
        self.promoted: Dict[int, Tuple[int, Blocks]] = {}
        self.inexact: Dict[int, str] = {}
        self.seeded: Set[int] = set()
        self.shared: Set[int] = set()
        self.special = {graph.tensors[t].op for t in seeds}  # ops that need a visit though no operand is batched
        self.queue: List[int] = []
        self.queued: Set[int] = set()
        self.waiting: Dict[int, List[int]] = {}  # op -> ops that were met before it
        self.containers = Containers()
        self.lists: Dict[int, int] = {}  # tensor list -> the op that made it empty
        self.arrays: Dict[int, str] = {}  # tensor array ops with an element_shape: whether they make the array or use it
        self.loop_merges: Set[int] = set()
        self.merge_visits: Dict[int, int] = {}
        self.is_settled = False  # loops have been followed to their end; what is unknown stays so
        self.can_reduce = True  # function bodies cannot wait for other clones
        self._depth = 0

    # -- the sweep ----------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Visit every op, then whatever changed, to the fixed point."""
        for op in self.graph.ops:
            self.visit(op)
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
                raise AssertionError("the batch axis analysis does not settle at {!r}".format(self.graph.ops[op_id]))
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

    def open_attribute(self, op: Op, name: str, dim: int) -> None:
        """A shape attribute must not say the whole batch's size in a clone."""
        shape = op.attrs.get(name)
        if shape is not None and dim < len(shape) and shape[dim] not in (None, -1):
            self.result.attributes[op.id, name] = tuple(None if d == dim else s for d, s in enumerate(shape))

    def push(self, op_id: int) -> None:
        if op_id not in self.queued:
            self.queued.add(op_id)
            heapq.heappush(self.queue, op_id)

    def visit(self, op: Op) -> None:
        flags, tensors, visited = self.flags, self.graph.tensors, self.visited
        flag = 0
        for t in op.inputs:
            flag |= flags[t]
            if not visited[tensors[t].op] and op.type not in MERGES:
                self.waiting.setdefault(tensors[t].op, []).append(op.id)
                return
        first = not visited[op.id]
        if not flag & BATCHED and first and op.type not in _ALWAYS and op.id not in self.special:
            carried = flag & (VARIABLE | LOOP) if op.type not in SHAPE_ONLY else flag & LOOP
            if op.type == "ZerosLike":
                carried |= ZERO
            for t in op.outputs:
                flags[t] = carried
            visited[op.id] = 1
        else:
            self._visit_slowly(op, flag, first)
        if first and op.id in self.waiting:
            for waiting in self.waiting.pop(op.id):
                self.push(waiting)
        if first and op.type in LOOP_ENDS:
            self._push_consumers(op)

    def _visit_slowly(self, op: Op, flag: int, first: bool) -> None:
        before = None if first else self._state(op)
        self._forget(op)
        self.visited[op.id] = 1
        carried = flag & (VARIABLE | LOOP) if op.type not in SHAPE_ONLY else flag & LOOP
        if op.type in VARIABLES:
            carried |= VARIABLE
        for t in op.outputs:
            self.flags[t] = carried
            if t in self.seeds:
                self._plant(t, self.seeds[t])
        if (self.scope is not None and op.id not in self.scope) or any(t in self.seeds for t in op.outputs):
            return
        try:
            self.transfer(op)
        except (Refuse, NoRule) as reason:
            self.lose(op, str(reason))
        if before is not None and self._state(op) != before:
            self._push_consumers(op)

    def _plant(self, tensor: int, seed: Given) -> None:
        self.flags[tensor] |= seed.flags
        if seed.layout is UNKNOWN:
            self.set(tensor, UNKNOWN, None)
            self.result.unknown[tensor] = Unknown(self.graph.tensors[tensor].op, "it was given no layout")
        elif seed.value is not None:
            self.set_value(tensor, seed.value, tensor)
        else:
            self.set(tensor, seed.layout, tensor)
        if seed.offset:
            self.offsets[tensor] = seed.offset

    def _push_consumers(self, op: Op) -> None:
        for t in op.outputs:
            for consumer, _ in self.graph.consumers(t):
                if self.visited[consumer]:
                    self.push(consumer)

    def _state(self, op: Op) -> List[object]:
        return [(self.layouts.get(t), self.offsets.get(t), self.flags[t], repr(self._values.get(t)) if self.layouts.get(t) is EXTENT else None,
                 t in self.result.unknown, self.containers.roots.get(t))                 for t in op.outputs]

    def _forget(self, op: Op) -> None:
        for t in op.outputs:
            for table in (self.layouts, self.offsets, self._values, self.result.unknown, self.result.source_of, self.sizes,
                          self.containers.roots, self.lists):
                table.pop(t, None)  # type: ignore[attr-defined]
        for position in range(len(op.inputs)):
            self.conversions.pop((op.id, position), None)
            self.result.localise.pop((op.id, position), None)
        self.inexact.pop(op.id, None)
        self.seeded.discard(op.id)
        self.shared.discard(op.id)

    def promote(self, tensor: int, dim: int, blocks: Blocks) -> None:
        """Make a whole tensor per clone where it is made, instead of slicing it where it is used."""
        if tensor not in self.promoted:
            self.promoted[tensor] = (dim, blocks)
            producer = self.graph.tensors[tensor].op
            self.special.add(producer)
            self.push(producer)

    # -- what is known of a tensor ------------------------------------------------------------------------------------

    def set(self, tensor: int, layout: Layout, source: Optional[int], zero: bool = False) -> None:
        """Give a tensor its layout; ``source``: a batch input whose rows it follows."""
        if layout != REPLICATED_0:
            self.layouts[tensor] = layout
            self.flags[tensor] |= BATCHED
            if source is not None:
                self.result.source_of[tensor] = source
        if zero:
            self.flags[tensor] |= ZERO

    def lose(self, op: Op, reason: str) -> None:
        """No layout for the outputs of an op, for the reason its operands lost theirs if they did."""
        cause = next((self.result.unknown[t] for t in op.inputs if t in self.result.unknown), Unknown(op.id, reason))
        for position in range(len(op.inputs)):
            self.conversions.pop((op.id, position), None)
            self.result.localise.pop((op.id, position), None)
        for t in op.outputs:
            self.set(t, UNKNOWN, None)
            self.result.unknown[t] = cause

    def layout(self, tensor: int) -> Layout:
        return self.layouts.get(tensor, REPLICATED_0)

    def source(self, op: Op) -> Optional[int]:
        table = self.result.source_of
        return next((table[t] for t in op.inputs if t in table), None)

    def shape(self, tensor: int) -> Shape:
        shape = self.graph.tensors[tensor].shape
        if tensor in self.sizes:
            return tuple(None if isinstance(s, Size) else s for s in self.sizes[tensor])
        return shape

    def local_shape(self, tensor: int) -> Optional[Tuple[SizeLike, ...]]:
        """A tensor's shape in a clone."""
        shape: Optional[Sequence[Optional[SizeLike]]] = self.sizes.get(tensor, self.graph.tensors[tensor].shape)
        if shape is None:
            return None
        sizes = [Size.of(("dim", tensor, d)) if s is None else s for d, s in enumerate(shape)]
        layout = self.layout(tensor)
        if layout.is_sharded:
            if layout.blocks is None:
                sizes[layout.dim] = Size.of(("rows", tensor, layout.dim))
            elif layout.blocks == (-1,):
                sizes[layout.dim] = batch_size * Size.of(("dim", tensor, layout.dim))
            else:
                sizes[layout.dim] = batch_size * sum(layout.blocks)
        return tuple(sizes)

    def _evaluate(self, tensor: int) -> Optional[Value]:
        if tensor in self.layouts or self._depth > 200:
            return None
        op = self.graph.producer(tensor)
        if op.type in ("Shape", "ShapeN"):
            sizes = self.local_shape(op.inputs[self.graph.tensors[tensor].index])
            return None if sizes is None else vector(sizes)
        self._depth += 1
        try:
            value = super()._evaluate(tensor)
        finally:
            self._depth -= 1
        record = self.graph.tensors[tensor]
        if value is None and record.dtype.startswith("int") and record.shape is not None and None not in record.shape:
            count = 1
            for size in record.shape:
                count *= size or 0
            if count <= MAX_OPAQUE:
                value = vector([Size.of(("value", tensor, i)) for i in range(count)]).reshape(record.shape)
        return value

    def is_integer(self, tensor: int) -> bool:
        return self.graph.tensors[tensor].dtype.startswith(INTEGERS)

    # -- the transfer of one op ---------------------------------------------------------------------------------------

    def transfer(self, op: Op) -> None:
        unknown = self.result.unknown
        if unknown and any(t in unknown for t in op.inputs):
            raise Refuse("an operand has no layout")
        is_batched = any(self.flags[t] & BATCHED for t in op.inputs) or any(t in self.promoted for t in op.outputs)
        if op.type in RANDOM and not is_batched:
            self.shared.add(op.id)
        if (not is_batched and op.type not in _ALWAYS) or self._as_extent(op):
            return
        handler = HANDLERS.get(op.type)
        if handler is not None:
            handler(self, op)
        elif is_batched:
            self.apply(op, rule_for(op, self.graph, self))

    def _as_extent(self, op: Op) -> bool:
        """Evaluate an integer op on extents."""
        if not any(self.layouts.get(t) is EXTENT for t in op.inputs) or op.type not in EVALUATORS:
            return False
        if not all(self.is_integer(t) for t in op.outputs):
            return False
        values = [self.value(t) for t in op.inputs]
        if any(v is None for v in values):
            return False
        results = evaluate(op.type, op.attrs, [v for v in values if v is not None])
        if results is None:
            return False
        for t, value in zip(op.outputs, results):
            self.set_value(t, value, self.source(op))
        return True

    def set_value(self, tensor: int, value: Value, source: Optional[int]) -> None:
        self._values[tensor] = value
        if depends_on_batch(value):
            self.set(tensor, EXTENT, source)

    def data_layout(self, tensor: int) -> Layout:
        """The layout of an operand that is data."""
        layout = self.layout(tensor)
        if layout is EXTENT:
            raise Refuse("sizes of the batch are its data")
        return layout

    def apply(self, op: Op, rule: Rule) -> None:
        """Propagate through a rule: find the batch factor, bring the operands to layouts that the rule's algebra
        combines, and read off the results' layouts."""
        shape_operands = {s.position for s in rule.shapes}
        layouts = [REPLICATED_0 if i in shape_operands else self.layout(t) for i, t in enumerate(op.inputs)]
        factor, blocks = self.batch_factor(op, rule, layouts)
        kind = rule.kinds.get(factor, "pass") if factor is not None else "pass"
        if kind in (WHOLE, HALO, LOOKUP):
            raise Refuse("it needs all examples at once")
        plan = Operands(self, op, rule.roles, layouts)
        for i, layout in enumerate(layouts):
            if layout is EXTENT:
                plan.make_whole(i)
        if factor is not None:
            for i, dims in enumerate(rule.inputs):
                if not layouts[i].is_sharded and isinstance(dims, tuple) and (factor,) in dims:
                    plan.slice(i, dims.index((factor,)), blocks)
        if self.offsets:
            carry_offsets(self, op, plan)
        power, is_partial = plan.settle(factor is not None)
        self.localise_shapes(op, rule, factor, blocks)
        if kind in (STATISTIC, STATISTIC_GRADIENT):
            self.inexact[op.id] = "statistics are taken over each part of the batch by itself"
        if kind == MEAN and blocks is None:
            self.inexact[op.id] = "a mean over rows chosen by data is averaged by the number of examples"
        source, zero = self.source(op), plan.is_zero
        for t, dims in zip(op.outputs, rule.outputs):
            layout = result_layout(dims, factor, blocks, kind, power, is_partial, plan.extreme)
            self.set(t, layout, source, zero)
            self.infer_sizes(op, rule, t, dims)
        if op.type in SHAPE_ATTRIBUTES and self.layout(op.outputs[0]).is_sharded:
            self.open_attribute(op, "shape", self.layout(op.outputs[0]).dim)
        if op.type in RANDOM:
            (self.shared if factor is None else self.seeded).add(op.id)
        plan.record()

    def batch_factor(self, op: Op, rule: Rule, layouts: Sequence[Layout]) -> Tuple[Optional[str], Blocks]:
        """The factor that the operands (or an extent in a shape operand, or a promotion) say is the batch."""
        factor: Optional[str] = None
        blocks: Blocks = None

        def join(found: Optional[str], more: Blocks) -> None:
            nonlocal factor, blocks
            if found is None:
                raise Refuse("it needs all examples at once")
            if factor is None:
                factor, blocks = found, more
            elif found != factor:
                raise Refuse("two of its dimensions follow the batch")
            else:
                blocks = unify(blocks, more)
        for i, layout in enumerate(layouts):
            if layout.kind == SHARDED:
                join(factor_at(rule.inputs[i], layout.dim), layout.blocks)
        for shape in rule.shapes:
            if self.layouts.get(op.inputs[shape.position]) is EXTENT:
                value = self.value(op.inputs[shape.position])
                for element, dims in zip(value if value is not None else (), shape.dims):
                    if isinstance(element, Size) and element.depends_on_batch:
                        join(dims[0] if len(dims) == 1 else None, blocks_of(element))
        if self.promoted and op.outputs and op.outputs[0] in self.promoted:
            dim, more = self.promoted[op.outputs[0]]
            join(factor_at(rule.outputs[0], dim), more)
        return factor, blocks

    def localise_shapes(self, op: Op, rule: Rule, factor: Optional[str], blocks: Blocks) -> None:
        """Baked-in batch sizes of shape operands become the clone's."""
        for shape in rule.shapes:
            places = [j for j, dims in enumerate(shape.dims) if factor is not None and factor in dims]
            if places:
                self.localise_elements(op, shape.position, {j: blocks for j in places})

    def localise_elements(self, op: Op, position: int, places: Mapping[int, Blocks]) -> None:
        """Elements ``places`` of operand ``position`` must be the size of a batch dimension of the given blocks."""
        value = self.value(op.inputs[position])
        if value is None:
            raise Refuse("the shape in {!r} does not follow from the data".format(
                self.graph.tensor_name(op.inputs[position])))
        flat = list(value.flat)
        baked = False
        for j, blocks in places.items():
            element = flat[j]
            if isinstance(element, Size):
                if not element.depends_on_batch:
                    raise Refuse("the batch size in {!r} does not follow from the data; use tf.shape(...)[0] or -1".format(
                        self.graph.tensor_name(op.inputs[position])))
            elif element != -1:
                self.check_baked(element, blocks, op)
                baked = True
        if baked:
            self.result.localise[op.id, position] = localise_vector(flat, places)

    def check_baked(self, element: int, blocks: Blocks, op: Op) -> None:
        if blocks is None or -1 in blocks:
            raise Refuse("the constant {} stands for a number of rows chosen by data".format(element))
        if self.batch is not None and element != self.batch * sum(blocks):
            raise Refuse("the constant {} stands where {} x {} examples are expected".format(element, sum(blocks), self.batch))

    def infer_sizes(self, op: Op, rule: Rule, tensor: int, dims: AnyDims) -> None:
        """Remember sizes of a result that the graph does not know."""
        if not isinstance(dims, tuple) or not self.lacks_sizes(tensor):
            return
        known: Dict[str, SizeLike] = {}
        for t, operand in zip(op.inputs, rule.inputs):
            if isinstance(operand, tuple):
                for factors, size in zip(operand, self.local_shape(t) or ()):
                    if len(factors) == 1:
                        known.setdefault(factors[0], size)
        sizes = [1 if not factors else known.get(factors[0], Size.of(("dim", tensor, d))) if len(factors) == 1
                 else Size.of(("dim", tensor, d)) for d, factors in enumerate(dims)]
        self.set_sizes(tensor, sizes)

    def lacks_sizes(self, tensor: int) -> bool:
        """Whether the graph leaves a dimension open that is not the batch."""
        shape = self.graph.tensors[tensor].shape
        if shape is None:
            return True
        if None not in shape:
            return False
        layout = self.layouts.get(tensor)
        return layout is None or not layout.is_sharded or any(s is None and d != layout.dim for d, s in enumerate(shape))

    def set_sizes(self, tensor: int, sizes: Sequence[SizeLike]) -> None:
        """What is known of a result's shape, beside what the graph says."""
        shape = self.graph.tensors[tensor].shape
        if shape is not None and len(shape) == len(sizes):
            sizes = [mine if theirs is None else theirs for mine, theirs in zip(sizes, shape)]
        self.sizes[tensor] = tuple(sizes)


_ALWAYS = VARIABLES | RANDOM | frozenset((
    "Enter", "RefEnter", "Exit", "RefExit", "Merge", "RefMerge", "StackV2", "Stack", "TensorArrayV3", "TensorArray",
    "TensorArrayV2", "TensorListReserve", "EmptyTensorList"))


class Operands:
    """The operands of one op on their way to layouts that its algebra combines."""

    def __init__(self, state: Propagation, op: Op, roles: str, layouts: List[Layout]) -> None:
        self.state = state
        self.op = op
        self.roles = roles
        self.layouts = layouts
        self.steps: List[List[Conversion]] = [[] for _ in layouts]
        self.is_zero = False
        self.extreme: Optional[str] = None

    def zero(self, i: int) -> bool:
        return bool(self.state.flags[self.op.inputs[i]] & ZERO) or _is_zero_constant(self.state, self.op.inputs[i])

    def slice(self, i: int, dim: int, blocks: Blocks) -> None:
        """Operand ``i`` is whole along the batch: the clone takes its rows (before the loop, if it comes from there)."""
        state, tensor = self.state, self.op.inputs[i]
        producer = state.graph.producer(tensor)
        if producer.type == "Enter" and blocks is not None:
            state.promote(tensor, dim, blocks)
        shape = state.shape(tensor)
        size = shape[dim] if shape is not None else None
        if self.layouts[i].kind != REPLICATED:
            self.resolve(i)
        if size is None or blocks is None or -1 in blocks:
            raise Refuse("whether {!r} has a batch dimension is not known".format(state.graph.tensor_name(tensor)))
        if state.batch is not None and size != state.batch * sum(blocks):
            raise Refuse("{!r} has {} rows where {} x {} examples are expected".format(
                state.graph.tensor_name(tensor), size, sum(blocks), state.batch))
        self.steps[i].append(Slice(dim, blocks))

    def make_whole(self, i: int) -> None:
        """Operand ``i`` is a size of the clone's part: the op means the whole's."""
        tensor = self.op.inputs[i]
        value = self.state.value(tensor)
        affine = [v.affine if isinstance(v, Size) else (int(v), 0) for v in value.flat] if value is not None else [None]
        if self.state.flags[tensor] & LOOP:
            raise Refuse("a loop counts the examples")
        if None in affine:
            raise Refuse("the size {!r} is no multiple of the batch's".format(self.state.graph.tensor_name(tensor)))
        self.steps[i].append(Whole(tuple(a for a in affine if a is not None)))
        self.layouts[i] = REPLICATED_0

    def scale(self, i: int, power: int) -> None:
        if power and not self.zero(i):
            if self.state.is_integer(self.op.inputs[i]):
                raise Refuse("the integer {!r} cannot be weighted".format(self.state.graph.tensor_name(self.op.inputs[i])))
            self.steps[i].append(Scale(power))

    def resolve(self, i: int) -> None:
        """Operand ``i`` is a partial value that must be whole: combine it over the clones, or take the clone's own."""
        state, layout, tensor = self.state, self.layouts[i], self.op.inputs[i]
        exact = state.can_reduce and not state.flags[tensor] & LOOP and (
            not state.flags[tensor] & VARIABLE or (state.options.sync is not None and state.options.sync(self.op)))
        kind = "sum" if layout.is_partial else layout.kind
        if exact:
            self.steps[i].append(Reduce(kind, layout.power))
            self.layouts[i] = REPLICATED_0
        else:
            name = state.graph.tensor_name(tensor)
            state.inexact[self.op.id] = "it uses {} over the batch ({!r}) of which each part has its own".format(
                {"sum": "a sum" if layout.power <= 0 else "a mean"}.get(kind, "a " + kind), name)
            self.layouts[i] = replicated(layout.power - 1) if layout.is_partial else REPLICATED_0

    def settle(self, has_batch: bool) -> Tuple[int, bool]:
        """Power of the results, and whether they are partial."""
        roles, layouts = self.roles, self.layouts
        if any(layout.kind in EXTREMES for layout in layouts):
            if self.op.type in MOVES and not has_batch:
                self.extreme = next(layout.kind for layout in layouts if layout.kind in EXTREMES)
                return 0, False
            for i, layout in enumerate(layouts):
                if layout.kind in EXTREMES:
                    self.resolve(i)
        partials = [i for i, layout in enumerate(layouts) if layout.kind == PARTIAL]
        if partials:
            partials = self._choose_partials(partials, has_batch)
        power = 0
        for i, role in enumerate(roles):
            if role == "n":
                self.scale(i, layouts[i].power)
            elif role == "m":
                power += layouts[i].power
                self.is_zero = self.is_zero or self.zero(i)
            elif role == "d":
                power -= layouts[i].power
        added = [i for i, role in enumerate(roles) if role == "a"]
        if added:
            power = self._add(added, bool(partials))
        return power, bool(partials)

    def _choose_partials(self, partials: List[int], has_batch: bool) -> List[int]:
        """Resolve partial operands until the rest can stay: none beside a batch dimension, one in a product, and none in a
        divisor or a non-linear place."""
        state = self.state
        kept = []
        for i in partials:
            if has_batch or self.roles[i] in "nd":
                self.resolve(i)
            else:
                kept.append(i)
        factors = [i for i in kept if self.roles[i] == "m"]
        if len(factors) > 1:
            # keep one that depends on variables, so that as many as possible are combined exactly
            keep = next((i for i in factors if state.flags[self.op.inputs[i]] & VARIABLE), factors[0])
            for i in factors:
                if i != keep:
                    self.resolve(i)
            kept = [i for i in kept if i == keep or self.roles[i] == "a"]
        return kept

    def _add(self, added: List[int], is_partial: bool) -> int:
        """Bring the terms of a sum to one power."""
        layouts = self.layouts
        terms = [i for i in added if not self.zero(i)]
        self.is_zero = not terms
        leading = [i for i in terms if layouts[i].kind == (PARTIAL if is_partial else SHARDED)] or (
            [] if is_partial else terms)
        powers = [layouts[i].power for i in leading] or [0]
        power = max(powers, key=lambda p: (powers.count(p), -abs(p), p))
        for i in terms:
            # a whole term R enters a partial sum as sum_i w_i^power (w_i^(1 - power) R)
            own = layouts[i].power + (1 if is_partial and layouts[i].kind == REPLICATED else 0)
            self.scale(i, own - power)
        return power

    def record(self) -> None:
        for i, steps in enumerate(self.steps):
            if steps:
                self.state.conversions[self.op.id, i] = tuple(simplify(steps))


def simplify(steps: Sequence[Conversion]) -> List[Conversion]:
    """Neighbouring offsets added up."""
    result: List[Conversion] = []
    for step in steps:
        if isinstance(step, Offset) and result and isinstance(result[-1], Offset) and (
                isinstance(step.coefficient, int) and isinstance(result[-1].coefficient, int)):
            total = step.coefficient + result.pop().coefficient  # type: ignore[operator]
            if total:
                result.append(Offset(total))
        else:
            result.append(step)
    return result


def _is_zero_constant(state: Propagation, tensor: int) -> bool:
    op = state.graph.producer(tensor)
    if op.type == "Const":
        return op.value is not None and op.value.dtype.kind in "fiuc" and not op.value.any()
    return op.type == "Fill" and _is_zero_constant(state, op.inputs[1])


def carry_offsets(state: Propagation, op: Op, plan: Operands) -> None:
    """Positions among the operands of a rule: sums, products by constants and moves carry them; elsewhere they become
    positions in the whole batch."""
    offsets = [state.offsets.get(t, 0) for t in op.inputs]
    if not any(offsets):
        return
    carried: Union[int, Tuple[int, ...], None] = None
    if op.type in ("Add", "AddV2", "Sub") and all(isinstance(o, int) for o in offsets):
        sign = -1 if op.type == "Sub" else 1
        carried = offsets[0] + sign * offsets[1]  # type: ignore[operator]
    elif op.type == "Mul" and all(isinstance(o, int) for o in offsets):
        other = 1 if offsets[0] else 0
        factor = static_ints(state.value(op.inputs[other])) if not offsets[other] else None
        if factor is not None and len(set(factor)) == 1:
            carried = offsets[1 - other] * factor[0]  # type: ignore[operator]
    elif op.type in MOVES or op.type in ("Tile", "Slice", "StridedSlice", "GatherV2") or (
            op.type == "Cast" and state.is_integer(op.outputs[0])):
        carried = offsets[0]
    elif op.type == "Pack" and all(isinstance(o, int) for o in offsets):
        rank = state.rank(op.inputs[0])
        last = op.attrs.get("axis", 0) in (-1, rank)
        carried = offsets[0] if len(set(offsets)) == 1 else tuple(offsets) if last else None  # type: ignore[arg-type]
    if carried is not None:
        if carried:
            state.offsets[op.outputs[0]] = carried
        return
    for i, offset in enumerate(offsets):
        if offset:
            plan.steps[i].append(Offset(offset))


def factor_at(dims: AnyDims, dim: int) -> Optional[str]:
    """The factor of one dimension; None where it cannot be divided."""
    if dims is SAME:
        return "dim{}".format(dim)
    if not isinstance(dims, tuple) or dim >= len(dims) or len(dims[dim]) != 1:
        return None
    return dims[dim][0]


def unify(a: Blocks, b: Blocks) -> Blocks:
    """Blocks of two operands that lie along the same dimension."""
    if a == b:
        return a
    for one, other in ((a, b), (b, a)):
        if one == (-1,) and other is not None and len(other) == 1:
            return other
    raise Refuse("its operands' examples lie in different blocks ({} and {} per example)".format(a, b))


def blocks_of(element: Size) -> Blocks:
    """Blocks of a dimension of the given extent."""
    if element.affine is not None:
        if element.affine[0]:
            raise Refuse("a dimension of {} elements does not divide into examples".format(element))
        return (element.affine[1],)
    if len(element.terms) == 1:
        (monomial, _), = element.terms.items()
        if sum(1 for s in monomial if s == BATCH) == 1 and not any(s[0] == "rows" for s in monomial):
            return (-1,)
        if BATCH not in monomial and sum(1 for s in monomial if s[0] == "rows") == 1:
            return None
    raise Refuse("a dimension of {} elements does not divide into examples".format(element))


def localise_vector(flat: Sequence[SizeLike], places: Mapping[int, Blocks]) -> Localise:
    components: List[Optional[Tuple[int, int]]] = []
    for j, element in enumerate(flat):
        if j in places and not isinstance(element, Size) and element != -1:
            components.append((0, sum(places[j] or ())))
        elif isinstance(element, Size):
            components.append(element.affine)
        else:
            components.append((int(element), 0))
    return Localise(tuple(components))


def extent_layout(value: Optional[Value]) -> Optional[Layout]:
    """The power of an extent all of whose elements are multiples of the same power of the batch size; None where they do
    not grow alike."""
    layouts = {_element_layout(v) for v in value.flat} if value is not None else set()
    return layouts.pop() if len(layouts) == 1 else None


def _element_layout(element: SizeLike) -> Optional[Layout]:
    if not isinstance(element, Size) or not element.depends_on_batch:
        return REPLICATED_0
    degrees = {(sum(1 for s in m if s == BATCH), sum(1 for s in m if s[0] == "rows")) for m in element.terms}
    if len(degrees) != 1:
        return None
    batches, rows = next(iter(degrees))
    return replicated(-batches) if not rows else partial() if (batches, rows) == (0, 1) else None


def result_layout(dims: AnyDims, factor: Optional[str], blocks: Blocks, kind: str, power: int, is_partial: bool,
                  extreme: Optional[str]) -> Layout:
    """Layout of one result of a rule."""
    if factor is not None:
        if dims is SAME:
            return sharded(int(factor[3:]), blocks, power)
        if isinstance(dims, tuple) and (factor,) in dims:
            return sharded(dims.index((factor,)), blocks, power)
        if kind in (SUM, STATISTIC_GRADIENT):
            return partial(power)
        if kind in (MEAN, STATISTIC):
            return partial(power + 1)
        if kind in EXTREMES:
            return Layout(kind)
        return replicated(power) if dims is not None else REPLICATED_0  # it does not depend on the factor
    if extreme is not None:
        return Layout(extreme)
    return partial(power) if is_partial else replicated(power)


