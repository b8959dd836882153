"""The ways in which one op can run on several devices, derived from its sharding rule.

A rule names the factors of an op's dimensions.  Dividing one factor over the devices is a strategy: operands and results
that have the factor are sharded, operands that lack it are needed whole, and results that lack it are terms of a sum::

    MatMul mk,kn->mn      n  column (Whale SP1)     x whole,          W sharded(1)  ->  y sharded(1)
                          k  row    (Whale SP2)     x sharded(1),     W sharded(0)  ->  y partial

There are two more kinds.  An op that is linear in an operand works on the terms of a sum (``linear``).  Some ops whose rule needs
a factor whole have a recipe that exchanges a few numbers per example instead of the operand (``transforms/shard/recipes.py``).
"""

from __future__ import annotations

from typing import Any, Dict, Hashable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf.ir.graph import Op, OpGraph, Shape, elements_of
from whale_tf.ir.parts import apportion
from whale_tf.ir.rules import NoRule, Rule, View, known_rule, rule_for
from whale_tf.ir.rules.rule import ADDED, LOOKUP, MAX, MEAN, MIN, MULTIPLIED, SUM, AnyDims, Dims, Factors, ShapeOperand
from whale_tf.ir.rules.shape import refine
from whale_tf.ir.sizes import nominal_shapes
from whale_tf.ir.traits import CONTRACTIONS, CONVOLUTIONS, DROPS_ONES, LOOK_UPS, RANDOM, SHAPE_ATTRS, SHAPE_ONLY, Recipe, traits
from whale_tf.patterns.spread import TILES, Spread, Tile, each, everywhere, once, partial, shard

# How a strategy is carried out.
ONCE, SHARDS, LINEAR, SIZES, EXTREME = "once", "shards", "linear", "sizes", "extreme"
CLASSES, SOFTMAX, LOOK_UP, ROWS = "classes", "softmax", "look-up", "rows"
CUT, ADVANCED, RESEEDED = "cut", "advanced", "reseeded"
ON_TILES, LOOP = "tiles", "loop"


class Localise(NamedTuple):
    """On device ``i``, element ``element`` of the shape operand ``position`` is ``sizes[i]``."""

    position: int
    element: int
    sizes: Tuple[int, ...]


class Strategy(NamedTuple):
    """One way to run an op.

    Attributes:
        pattern: the name that users see (``column``, ``row``, ``embedding`` ...) and give to ``patterns.force``.
        how: how it is carried out (the constants above).
        needs: spread of every operand.
        gives: spread of every result.
        localise: shape operands that differ from device to device.
        weights: for a mean over a divided factor, each device's share of the elements.
        exchanged: elements that change devices inside the recipe.
        inner: of a loop, the strategies of the ops of its body that work on parts.
    """

    pattern: str
    how: str
    needs: Tuple[Spread, ...]
    gives: Tuple[Spread, ...]
    localise: Tuple[Localise, ...] = ()
    weights: Tuple[float, ...] = ()
    exchanged: int = 0
    inner: Tuple[Tuple[int, Any], ...] = ()  # op of the body, Strategy


class Strategies(NamedTuple):
    """Strategies, and the ``reasons`` why factors that could be divided are not among them."""

    found: List[Strategy]
    reasons: List[str]


def computed_once(op: Op, pattern: str = "once") -> Strategy:
    """The op runs whole, on the first device; under ``batch`` on every device, for the device's examples."""
    return Strategy(pattern, ONCE, (once,) * len(op.inputs), (once,) * len(op.outputs))


def strategies(op: Op, view: View, shares: Sequence[int], batch: Mapping[int, int]) -> Strategies:
    """Every strategy of an op except the one that computes it once.

    Args:
        shares: the proportions in which the devices take a divided dimension.
        batch: tensor -> the dimension that counts examples, which micro-batches divide and ``split`` leaves alone.
    """
    if op.type in SHAPE_ONLY or op.type in RANDOM or op.body:
        return Strategies([], ["drawn once" if op.type in RANDOM else "it runs a function, whose body is not divided" if op.body
                               else "no operand is divided"])
    if _holds_elements(op):
        return Strategies([], ["the elements of a list or an array are whole"])
    try:
        rule = sharding_rule(op, view)
    except NoRule as reason:
        return Strategies([], [str(reason)])
    return _Finder(op, view, rule, shares, batch).run()


def _holds_elements(op: Op) -> bool:
    """Whether an op writes or reads a tensor list, tensor array or stack, whose shape is that of whole elements."""
    return traits(op.type).rule.startswith("control_flow.element")


def look(op: Op, view: View, batch: Mapping[int, int]) -> Hashable:
    """A key (type, attributes, shapes, constant operands, batch dimensions).  Ops with equal keys have the same strategies."""
    tensors = view.graph.tensors
    attrs = [(name, value if isinstance(value, (bool, int, float, str)) else repr(value)) for name, value in op.attrs.items()
             if name[0] != "_" and name not in ("shared_name", "container")]
    attrs.sort()
    values = []
    for t in op.inputs:
        if tensors[t].dtype in ("int32", "int64") and len(view.shape(t) or ()) <= 1:
            value = view.value(t)
            values.append(None if value is None else tuple(value.flat))
    sides = [(view.stored(t), tensors[t].dtype, batch.get(t)) for t in op.inputs + op.outputs]
    return op.type, len(op.inputs), tuple(attrs), tuple(values), tuple(sides)


def giving(op: Op, view: View, result: int, spread: Spread) -> Optional[Strategy]:
    """The strategy that gives result number ``result`` the spread ``spread``; None if there is none."""
    if op.body or op.type in RANDOM or _holds_elements(op):
        return None
    try:
        rule = sharding_rule(op, view)
    except NoRule:
        return None
    dims = rule.outputs[result]
    if not isinstance(dims, tuple) or spread.dim >= len(dims) or not dims[spread.dim]:
        return None
    finder = _Finder(op, view, rule, spread.sizes, {})
    factor = dims[spread.dim][0]
    width, rest = divmod(sum(spread.sizes), finder.sizes.get(factor) or 1)
    if rest or any(size % width for size in spread.sizes) or rule.kind(factor) != "pass":
        return None
    found = finder._divide(factor, tuple(size // width for size in spread.sizes))
    return found if found is not None and found.gives[result] == spread else None


def on_tiles(op: Op, view: View, position: int, spread: Spread) -> Optional[Strategy]:
    """The strategy that works on tiles of operand number ``position`` as they are; None if there is none: the op is not one that
    works element by element, adds up all elements, or writes."""
    if op.body or op.type in RANDOM or op.type in SHAPE_ATTRS or op.type in DROPS_ONES or _holds_elements(op):
        return None
    try:
        rule = sharding_rule(op, view)
    except NoRule:
        return None
    dims, cut = rule.inputs[position], {one.dim for tile in spread.tiles for one in tile.ranges}
    if not isinstance(dims, tuple) or any(len(dims[dim]) != 1 for dim in cut):
        return None
    factors = {dims[dim][0]: dim for dim in cut}
    needs = [_tiled(side, factors, spread) for side in rule.inputs]
    gives = [_tiled(side, factors, spread) for side in rule.outputs]
    if None in needs or None in gives or any(factor in dim for operand in rule.shapes for dim in operand.dims
                                             for factor in factors):
        return None
    kinds = {rule.kind(factor) for factor in factors}
    if rule.alias and needs[0] == spread and kinds <= {"pass", LOOKUP}:
        how = ROWS if LOOKUP in kinds else ON_TILES
        return Strategy("tiles", how, tuple(need for need in needs if need), (spread,) * len(op.outputs))
    if kinds == {"pass"} and all(give == spread for give in gives):
        return Strategy("tiles", ON_TILES, tuple(need for need in needs if need), (spread,) * len(gives))
    if len(kinds) == 1 and kinds <= {SUM, MEAN, MAX, MIN} and len(gives) == 1 and gives[0] == everywhere:
        sizes = [_elements_of(tile) for tile in spread.tiles]
        weights = tuple(size / sum(sizes) for size in sizes) if kinds == {MEAN} else ()
        exchanged = len(sizes) * max(1, elements_of(view.shape(op.outputs[0])))
        return Strategy("tiles", ON_TILES, tuple(need for need in needs if need), (once,), (), weights, exchanged)
    return None


def _tiled(dims: AnyDims, factors: Mapping[str, int], spread: Spread) -> Optional[Spread]:
    """The spread of a tensor of which ``factors`` are divided as those dimensions of ``spread``; None if it cannot be."""
    if not isinstance(dims, tuple):
        return everywhere
    places = {dim: factors[own[0]] for dim, own in enumerate(dims) if len(own) == 1 and own[0] in factors}
    if any(factor in factors for own in dims if len(own) > 1 for factor in own) or len(set(places.values())) < len(places):
        return None
    if not places:
        return everywhere
    return Spread(TILES, tiles=tuple(
        tile._replace(ranges=tuple(range_._replace(dim=dim) for dim, origin in places.items()
                                   for range_ in tile.ranges if range_.dim == origin)) for tile in spread.tiles))


def _elements_of(tile: Tile) -> int:
    found = 1
    for one in tile.ranges:
        found *= one.size
    return found


def sharding_rule(op: Op, view: View) -> Rule:
    """The op's rule.  A reshape with dimensions of unknown size is matched from both ends."""
    if op.type == "Reshape":
        before, after = view.shape(op.inputs[0]), view.shape(op.outputs[0])
        if before is not None and after is not None and None in before + after:
            return _reshape_from_both_ends(before, after)
    return rule_for(op, view.graph, view)


def _reshape_from_both_ends(before: Sequence[Optional[int]], after: Sequence[Optional[int]]) -> Rule:
    """Leading dimensions of equal sizes are the same; the remaining dimensions are a separate reshape."""
    first = 0
    while first < min(len(before), len(after)) and before[first] == after[first] is not None:
        first += 1
    left, right, kinds = refine(before[first:][::-1], after[first:][::-1])
    same: Dims = tuple((f"e{d}",) if before[d] != 1 else () for d in range(first))
    operand, result = (same + tuple(tuple(reversed(dim)) for dim in reversed(side)) for side in (left, right))
    return Rule((operand, None), (result,), "mn", kinds, (ShapeOperand(1, result),))


class Sizes(View):
    """A view that also knows sizes that follow from rules: a Reshape's sizes from its shape operand, others from the operands'
    sizes."""

    def __init__(self, graph: OpGraph) -> None:
        super().__init__(graph)
        self._shapes: Dict[int, Shape] = {}

    def shape(self, tensor: int) -> Shape:
        if tensor not in self._shapes:
            shape = super().shape(tensor)
            self._shapes[tensor] = shape  # a loop's back edge knows no more
            if shape is None or None in shape:
                known = self._known(tensor, shape)
                if shape is not None and known is not None:
                    known = [more if size is None else size for size, more in zip(shape, known)]
                self._shapes[tensor] = shape if known is None else tuple(known)
        return self._shapes[tensor]

    def _known(self, tensor: int, shape: Shape) -> Optional[List[Optional[int]]]:
        """Sizes of a result according to the op's rule, if ``shape`` says less; None if even the rank is unknown."""
        op = self.graph.producer(tensor)
        if op.type == "Reshape":
            value = self.value(op.inputs[1])
            return None if value is None else [v if isinstance(v, int) and v > 0 else None for v in value.flat]
        rule = known_rule(op, self.graph, self) if op.inputs and not op.body else None
        dims = rule.outputs[self.graph.tensors[tensor].index] if rule is not None else None
        if rule is None or not isinstance(dims, tuple) or (shape is not None and len(dims) != len(shape)):
            return None
        sizes = {factors[0]: size for source, operand in zip(op.inputs, rule.inputs) if isinstance(operand, tuple)
                 for factors, size in zip(operand, self.shape(source) or ()) if len(factors) == 1 and size is not None}
        return [1 if not factors else sizes.get(factors[0]) if len(factors) == 1 else None for factors in dims]


class _Finder:
    def __init__(self, op: Op, view: View, rule: Rule, shares: Sequence[int], batch: Mapping[int, int]) -> None:
        self.op, self.view, self.rule, self.shares, self.count = op, view, rule, shares, len(shares)
        self.sizes = self._factor_sizes()
        self.excluded = self._batch_factors(batch)

    def run(self) -> Strategies:
        found, reasons = self._linear(), []
        for factor in self.rule.factors:
            if factor in self.excluded:
                continue
            size = self.sizes.get(factor)
            strategy: Optional[Strategy] = None
            if size is None:
                reasons.append(f"the size of dimension {factor!r} is not known")
            elif size < self.count:
                reasons.append(f"dimension {factor!r} has {size} elements, fewer than {self.count} devices")
            elif not self._shapes_are_known(factor):
                reasons.append(f"dimension {factor!r} belongs to a shape operand that follows from data")
            else:
                strategy = self._divide(factor, apportion(self.shares, size, 1))
            if strategy is not None:
                found.append(strategy)
        return Strategies(found, reasons)

    # -- factors ------------------------------------------------------------------------------------------------------
    def _factor_sizes(self) -> Dict[str, int]:
        shapes = [self.view.stored(t) for t in self.op.inputs + self.op.outputs]
        pairs = [(factors, size) for dims, shape in zip(self.rule.inputs + self.rule.outputs, shapes)
                 if isinstance(dims, tuple) and shape is not None and len(shape) == len(dims)
                 for factors, size in zip(dims, shape) if size is not None]
        known = {factors[0]: size for factors, size in pairs if len(factors) == 1}
        for _ in range(2):  # a factor inside a product of factors
            for factors, size in pairs:
                unknown = [f for f in factors if f not in known]
                if len(unknown) == 1:
                    for f in factors:
                        size //= known.get(f, 1)
                    known[unknown[0]] = size
        return known

    def _batch_factors(self, batch: Mapping[int, int]) -> Dict[str, bool]:
        found: Dict[str, bool] = {}
        for tensor, dims in zip(self.op.inputs + self.op.outputs, self.rule.inputs + self.rule.outputs):
            if isinstance(dims, tuple) and tensor in batch and batch[tensor] < len(dims):
                found.update(dict.fromkeys(dims[batch[tensor]], True))
        return found

    def _place(self, dims: AnyDims, factor: str, sizes: Tuple[int, ...]) -> Optional[Spread]:
        """The spread of a tensor whose ``factor`` is divided; None if it cannot be (not the major factor of one dimension)."""
        if not isinstance(dims, tuple):
            return everywhere
        places = [d for d, factors in enumerate(dims) if factor in factors]
        if not places:
            return everywhere
        factors: Factors = dims[places[0]]
        inner = [self.sizes.get(f) for f in factors[1:]]
        if len(places) > 1 or factors[0] != factor or None in inner:
            return None
        width = 1
        for size in inner:
            width *= size or 1
        return shard(places[0], tuple(size * width for size in sizes))

    # -- strategies ---------------------------------------------------------------------------------------------------
    def _linear(self) -> List[Strategy]:
        op, rule = self.op, self.rule
        if not op.outputs or rule.alias or any(not is_float(self.view.graph.tensors[t].dtype) for t in op.outputs):
            return []
        choices = [[i] for i, role in enumerate(rule.roles) if role == MULTIPLIED]
        added = [i for i, role in enumerate(rule.roles) if role == ADDED]
        choices += [added] if added else []
        return [Strategy("linear", LINEAR, tuple(partial if i in chosen else everywhere for i in range(len(op.inputs))),
                         (partial,) * len(op.outputs))
                for chosen in choices if all(is_float(self.view.graph.tensors[op.inputs[i]].dtype) for i in chosen)]

    def _divide(self, factor: str, sizes: Tuple[int, ...]) -> Optional[Strategy]:
        op, rule, kind = self.op, self.rule, self.rule.kind(factor)
        needs = [self._place(dims, factor, sizes) for dims in rule.inputs]
        gives = [self._place(dims, factor, sizes) for dims in rule.outputs]
        if None in needs or None in gives:
            return None
        operands = tuple(need for need in needs if need is not None)
        results = tuple(give for give in gives if give is not None)
        how, weights, exchanged = SHARDS, (), 0  # type: str, Tuple[float, ...], int
        missing = tuple(partial if is_float(self.view.graph.tensors[t].dtype) else None for t in op.outputs)
        lacking: Tuple[Optional[Spread], ...]
        if kind == "pass" or (kind == SUM and not op.outputs):
            lacking = tuple(each if rule.outputs[i] is None else None for i in range(len(op.outputs)))
        elif kind == SUM:
            lacking = missing
        elif kind == MEAN:
            lacking, weights = missing, tuple(size / sum(sizes) for size in sizes)
        elif kind in (MAX, MIN):
            how, lacking, exchanged = EXTREME, (once,) * len(op.outputs), (self.count - 1) * self._elements(op.outputs[0])
        else:
            return self._recipe(factor, operands, results)
        final = tuple(give if give.is_shard else other for give, other in zip(results, lacking))
        localise = self._localised(factor, sizes)
        if any(spread is None for spread in final) or not any(s.is_shard for s in operands + results):
            return None
        return Strategy(pattern_name(op, rule, factor), how, operands, tuple(s for s in final if s is not None),
                        localise, weights, exchanged)

    def _shapes_are_known(self, factor: str) -> bool:
        """Whether no operand that gives the factor's size follows from data, since parts would need another size."""
        return all(self.view.value(self.op.inputs[operand.position]) is not None for operand in self.rule.shapes
                   if any(factor in dim for dim in operand.dims))

    def _localised(self, factor: str, sizes: Tuple[int, ...]) -> Tuple[Localise, ...]:
        """The shape operands that change."""
        places = [(operand.position, self._place(operand.dims, factor, sizes)) for operand in self.rule.shapes]
        return tuple(Localise(position, place.dim, place.sizes) for position, place in places
                     if place is not None and place.is_shard)

    def _recipe(self, factor: str, needs: Tuple[Spread, ...], gives: Tuple[Spread, ...]) -> Optional[Strategy]:
        """The recipe of an op for a factor that its rule needs whole or looks up by number."""
        op, recipe, others = self.op, traits(self.op.type).recipe, self.count - 1
        if recipe is Recipe.CLASSES and factor == "c":
            sparse = op.type.startswith("Sparse")
            if not needs[0].is_shard or needs[1].is_shard == sparse:
                return None  # labels that broadcast along the classes
            return Strategy("class_sharded", CLASSES, needs, (once, gives[1]), (), (),
                            (6 if sparse else 5) * others * self._elements(op.outputs[0]))
        if recipe is Recipe.SOFTMAX:
            rows = self._elements(op.outputs[0]) // max(self.sizes[factor], 1)
            return Strategy("softmax_sharded", SOFTMAX, needs, gives, (), (), 4 * others * rows)
        if recipe is Recipe.LOOK_UP and not op.attrs.get("batch_dims"):
            return Strategy("embedding", LOOK_UP, needs, (partial,))
        if self.rule.alias and needs[0].is_shard and needs[0].dim == 0:
            return Strategy("rows", ROWS, needs, tuple(needs[0] for _ in op.outputs))
        return None

    def _elements(self, tensor: int) -> int:
        total = 1
        for size in nominal_shapes(self.view.graph, NOMINAL_SIZE).get(tensor) or self.view.shape(tensor) or ():
            total *= size or NOMINAL_SIZE
        return total


NOMINAL_SIZE = 32  # stands for a number that is not known (that of the examples) in prices


def is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "double", "half", "complex"))


def pattern_name(op: Op, rule: Rule, factor: str) -> str:
    """The name of the pattern that divides ``factor``; for contractions it depends on which of the two operands have it."""
    dims: List[AnyDims] = list(rule.inputs)
    if op.type in CONVOLUTIONS:
        return {"o": "output_channel", "i": "input_channel"}.get(factor, factor)
    if op.type in LOOK_UPS:
        return "embedding_column" if _has(dims[0], factor) else "indices"
    if len(dims) >= 2 and op.type in CONTRACTIONS:
        first, second = _has(dims[0], factor), _has(dims[1], factor)
        if first and second:
            return "row" if rule.kind(factor) == SUM else STACK
        return "rows" if first else "column"
    return "shard:" + factor


def _has(dims: AnyDims, factor: str) -> bool:
    return isinstance(dims, tuple) and any(factor in factors for factors in dims)


STACK = "stack"  # the pattern of parallel products: attention's heads, experts
