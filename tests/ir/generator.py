"""Random op graphs over a batch: every op type of the interpreter in random company.

A graph grows op by op from batch inputs, variables and constants; shapes come from interpreting the whole.  Draws are
indices into lists of what is possible, so hypothesis can shrink them.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from tests.ir import interpreter
from whale_tf.ir.graph import OpGraph, Shape

Draw = Callable[[int], int]  # a number below the argument


class Growing:
    """A graph with the values of all its tensors for one batch."""

    def __init__(self, draw: Draw, batch: int, is_static: bool) -> None:
        self.graph = OpGraph()
        self.draw = draw
        self.batch = batch
        self.is_static = is_static
        self.values: Dict[int, np.ndarray] = {}
        self.feed: Dict[int, np.ndarray] = {}
        self.sources: Dict[int, int] = {}
        self.random = np.random.RandomState(draw(1000))
        self.rows: Dict[int, bool] = {}  # tensors of which some dimension grows with the batch

    def add(self, type_: str, inputs: Sequence[int], attrs: Optional[Dict[str, Any]] = None, **fields: Any) -> int:
        op_id = len(self.graph.ops)
        values = interpreter.OPS[type_](_Draft(attrs or {}, fields.get("value")), [self.values[t] for t in inputs])
        grows = any(self.rows[t] for t in inputs)
        outputs = [(self._shape(v, grows), str(np.asarray(v).dtype)) for v in values]
        op = self.graph.add(f"{type_.lower()}_{op_id}", type_, inputs, outputs, attrs=attrs or {}, **fields)
        for tensor, value in zip(op.outputs, values):
            self.values[tensor] = np.asarray(value)
            self.rows[tensor] = grows
        return op.outputs[0]

    def _shape(self, value: Any, grows: bool) -> Shape:
        """Static: as it is.  Dynamic: sizes that are multiples of the (odd, prime) batch are not known."""
        shape = np.shape(value)
        if self.is_static or not grows:
            return shape
        return tuple(None if s and s % self.batch == 0 else s for s in shape)

    def const(self, value: Any) -> int:
        value = np.asarray(value)
        tensor = self.add("Const", [], value=value.astype(np.int32) if value.dtype == np.int64 else value)
        return tensor

    def leaf(self, type_: str, value: np.ndarray, is_source: bool) -> int:
        op = self.graph.add(f"{type_.lower()}_{len(self.graph.ops)}", type_)
        shape = self._shape(value, is_source)
        self.graph.tensors.append(_tensor(op.id, shape, str(value.dtype)))
        op.outputs = (len(self.graph.tensors) - 1,)
        tensor = op.outputs[0]
        self.values[tensor] = self.feed[tensor] = value
        self.rows[tensor] = is_source
        if is_source:
            self.sources[tensor] = 0
        return tensor

    def pick(self, fits: Callable[[int], bool]) -> Optional[int]:
        """A tensor that fits, the youngest most likely."""
        found = [t for t in self.values if fits(t)]
        return found[-1 - min(self.draw(len(found)), self.draw(len(found)))] if found else None

    def floats(self, min_rank: int = 0, max_rank: int = 4) -> Optional[int]:
        return self.pick(lambda t: self.values[t].dtype.kind == "f" and min_rank <= self.values[t].ndim <= max_rank)


class _Draft:
    """An op as the interpreter reads it, before it is in the graph."""

    def __init__(self, attrs: Dict[str, Any], value: Any) -> None:
        self.attrs = attrs
        self.value = value


def _tensor(op: int, shape: Shape, dtype: str) -> Any:
    from whale_tf.ir.graph import Tensor

    return Tensor(op, 0, shape, dtype)


def grow(draw: Draw, steps: int, batch: int = 7) -> Growing:
    """A random graph of about ``steps`` ops on a batch of ``batch`` examples."""
    made = Growing(draw, batch, draw(2) == 0)
    made.leaf("Placeholder", made.random.uniform(0.2, 1.0, (batch, 4)), True)
    made.leaf("Placeholder", made.random.uniform(0.2, 1.0, (batch, 3, 4)), True)
    made.leaf("Placeholder", made.random.randint(0, 4, (batch,)).astype(np.int32), True)
    made.leaf("VariableV2", made.random.uniform(0.2, 1.0, (4, 4)), False)
    made.leaf("VariableV2", made.random.uniform(0.2, 1.0, (4,)), False)
    made.const(made.random.uniform(0.2, 1.0, ()))
    for _ in range(steps):
        GROWERS[draw(len(GROWERS))](made)
    return made


def unary(g: Growing) -> None:
    x = g.floats()
    if x is not None:
        types = ("Neg", "Square", "Tanh", "Abs", "Relu", "Identity", "ZerosLike", "OnesLike", "StopGradient", "Sqrt")
        kind = types[g.draw(len(types))]
        g.add(kind, [g.add("Abs", [x]) if kind == "Sqrt" else x])


def binary(g: Growing) -> None:
    x, y = g.floats(), g.floats()
    if x is None or y is None or not _broadcast(g.values[x].shape, g.values[y].shape):
        return
    types = ("Add", "Sub", "Mul", "Maximum", "SquaredDifference", "DivNoNan", "RealDiv", "Mul", "AddV2")
    kind = types[g.draw(len(types))]
    if kind == "RealDiv":
        y = g.add("Exp", [g.add("Tanh", [y])])
    g.add(kind, [x, y])


def _broadcast(a: Tuple[int, ...], b: Tuple[int, ...]) -> bool:
    return all(x == y or 1 in (x, y) for x, y in zip(a[::-1], b[::-1]))


def add_n(g: Growing) -> None:
    x = g.floats()
    if x is not None:
        shape = g.values[x].shape
        others = [t for t in g.values if g.values[t].shape == shape and g.values[t].dtype.kind == "f"]
        g.add("AddN", [x, others[g.draw(len(others))], others[g.draw(len(others))]])


def matmul(g: Growing) -> None:
    x = g.floats(2)
    if x is None:
        return
    width = g.values[x].shape[-1]
    if g.values[x].ndim == 2 and width == 4 and g.draw(2):
        g.add("MatMul", [x, g.pick(lambda t: g.values[t].shape == (4, 4) and g.values[t].dtype.kind == "f")])
        return
    y = g.pick(lambda t: g.values[t].dtype.kind == "f" and g.values[t].ndim == g.values[x].ndim
               and g.values[t].shape[:-2] == g.values[x].shape[:-2])
    assert y is not None
    a, b = g.values[x].shape, g.values[y].shape
    name = "MatMul" if len(a) == 2 else "BatchMatMulV2"
    keys = ("transpose_a", "transpose_b") if len(a) == 2 else ("adj_x", "adj_y")
    for left in (False, True):
        for right in (False, True):
            if a[-2 if left else -1] == b[-1 if right else -2]:
                g.add(name, [x, y], {keys[0]: left, keys[1]: right})
                return


def reduce(g: Growing) -> None:
    x = g.floats(1)
    if x is None:
        return
    rank = g.values[x].ndim
    axes = sorted({g.draw(rank) for _ in range(1 + g.draw(rank))})
    kinds = ("Sum", "Mean", "Max", "Min", "Sum", "Mean")
    g.add(kinds[g.draw(len(kinds))], [x, g.const(np.array(axes))], {"keep_dims": g.draw(2) == 0})


def reshape(g: Growing) -> None:
    x = g.floats(1)
    if x is None:
        return
    shape = list(g.values[x].shape)
    way = g.draw(5)
    if way == 0 and len(shape) > 1:
        at = g.draw(len(shape) - 1)
        target = shape[:at] + [shape[at] * shape[at + 1]] + shape[at + 2:]
    elif way == 1:
        splits = [(d, f) for d, s in enumerate(shape) for f in (2, 3, 4, g.batch) if s % f == 0 and s > f]
        if not splits:
            return
        d, f = splits[g.draw(len(splits))]
        pieces = [f, shape[d] // f] if g.draw(2) else [shape[d] // f, f]
        target = shape[:d] + pieces + shape[d + 1:]
    elif way == 2:
        at = g.draw(len(shape) + 1)
        target = shape[:at] + [1] + shape[at:]
    elif way == 3:
        target = [int(np.prod(shape))]
    else:
        target = [s for s in shape if s != 1] or [1]
    target_tensor = _baked(g, target) if g.is_static or not g.rows[x] else _computed(g, target)
    g.add("Reshape", [x, target_tensor])


def _baked(g: Growing, target: List[int]) -> int:
    if g.draw(2) and target:
        target = list(target)
        target[g.draw(len(target))] = -1
    return g.const(np.array(target))


def _computed(g: Growing, target: List[int]) -> int:
    """A shape from tf.shape: multiples of the batch are computed."""
    source = next(iter(g.sources))
    end = g.const(np.array([1]))
    batch = g.add("StridedSlice", [g.add("Shape", [source]), g.const(np.array([0])), end, end], {"shrink_axis_mask": 1})
    elements = [g.add("Mul", [batch, g.const(np.array(s // g.batch))]) if s % g.batch == 0 and s else g.const(np.array(s))
                for s in target]
    return g.add("Pack", elements, {"axis": 0})


def transpose(g: Growing) -> None:
    x = g.floats(2)
    if x is not None:
        order = list(range(g.values[x].ndim))
        at = g.draw(len(order) - 1)
        order[at], order[at + 1] = order[at + 1], order[at]
        g.add("Transpose", [x, g.const(np.array(order))])


def concat(g: Growing) -> None:
    x = g.floats(1)
    if x is None:
        return
    axis = g.draw(g.values[x].ndim)
    rest = lambda t: g.values[t].shape[:axis] + g.values[t].shape[axis + 1:]  # noqa: E731
    y = g.pick(lambda t: g.values[t].dtype.kind == "f" and g.values[t].ndim == g.values[x].ndim and rest(t) == rest(x))
    g.add("ConcatV2", [x, y, g.const(np.array(axis))])  # type: ignore[list-item]


def split(g: Growing) -> None:
    x = g.pick(lambda t: g.values[t].dtype.kind == "f" and any(s % 2 == 0 and s for s in g.values[t].shape))
    if x is not None:
        axes = [d for d, s in enumerate(g.values[x].shape) if s % 2 == 0 and s]
        g.add("Split", [g.const(np.array(axes[g.draw(len(axes))])), x], {"num_split": 2})


def cut(g: Growing) -> None:
    x = g.floats(1)
    if x is None:
        return
    shape = g.values[x].shape
    d = g.draw(len(shape))
    begin, size = [0] * len(shape), [-1] * len(shape)
    if g.is_static and g.draw(2):
        size = list(shape)
    at = g.draw(shape[d])
    begin[d], size[d] = at, shape[d] - at if g.draw(2) or at == shape[d] - 1 else 1 + g.draw(shape[d] - at - 1)
    g.add("Slice", [x, g.const(np.array(begin)), g.const(np.array(size))])


def strided(g: Growing) -> None:
    x = g.floats(1)
    if x is None:
        return
    shape = g.values[x].shape
    d, at = g.draw(len(shape)), 0
    at = g.draw(shape[d])
    begin, end, strides = [0] * len(shape), list(shape), [1] * len(shape)
    begin[d], end[d] = at, at + 1
    mask = 0 if g.is_static and g.draw(2) else sum(1 << i for i in range(len(shape)) if i != d)
    g.add("StridedSlice", [x, g.const(np.array(begin)), g.const(np.array(end)), g.const(np.array(strides))],
          {"begin_mask": mask, "end_mask": mask, "shrink_axis_mask": (1 << d) if g.draw(2) else 0})


def tile(g: Growing) -> None:
    x = g.floats(1, 3)
    if x is not None and g.values[x].size < 200:
        counts = [1] * g.values[x].ndim
        counts[g.draw(len(counts))] = (2, 3, g.batch)[g.draw(3)]
        if g.is_static or g.batch not in counts:
            g.add("Tile", [x, g.const(np.array(counts))])
        else:
            g.add("Tile", [x, _computed(g, counts)])


def fill(g: Growing) -> None:
    target = [(g.batch, 4), (g.batch,), (g.batch, 1)][g.draw(3)]
    shape = g.const(np.array(target)) if g.is_static else _computed(g, list(target))
    g.rows[shape] = True
    g.add("Fill", [shape, g.const(np.float64(0.5))])


def look_up(g: Growing) -> None:
    x = g.pick(lambda t: g.values[t].dtype.kind == "f" and g.values[t].ndim >= 1 and g.values[t].shape[0] in (4, 12))
    i = g.pick(lambda t: g.values[t].dtype == np.int32 and t in g.sources)
    if x is not None and i is not None:
        g.add("GatherV2", [x, i, g.const(np.array(0))])


def own_rows(g: Growing) -> None:
    """Every example's own row of a tensor, by position."""
    x = g.pick(lambda t: g.values[t].dtype.kind == "f" and g.values[t].ndim >= 1 and g.values[t].shape[0] == g.batch)
    if x is None:
        return
    limit = g.const(np.array(g.batch)) if g.is_static else g.add("Squeeze", [_computed(g, [g.batch])], {"squeeze_dims": [0]})
    rows = g.add("Range", [g.const(np.array(0)), limit, g.const(np.array(1))])
    g.rows[rows] = True
    g.add("GatherV2", [x, rows, g.const(np.array(0))])


def one_hot(g: Growing) -> None:
    i = g.pick(lambda t: g.values[t].dtype == np.int32 and t in g.sources)
    if i is not None:
        g.add("OneHot", [i, g.const(np.array(4)), g.const(np.float64(1.0)), g.const(np.float64(0.0))])


def softmax(g: Growing) -> None:
    x = g.floats(1)
    if x is not None:
        g.add("Softmax", [x])


def choose(g: Growing) -> None:
    x = g.floats()
    if x is not None:
        shape = g.values[x].shape
        y = g.pick(lambda t: g.values[t].shape == shape and g.values[t].dtype.kind == "f")
        g.add("Select", [g.add("Greater", [x, g.const(np.float64(0.5))]), x, y])  # type: ignore[list-item]


def scatter(g: Growing) -> None:
    x = g.pick(lambda t: g.values[t].dtype.kind == "f" and g.values[t].ndim >= 1 and g.values[t].shape[0] == g.batch)
    i = g.pick(lambda t: t in g.sources and g.values[t].dtype == np.int32)
    if x is not None and i is not None:
        g.add("UnsortedSegmentSum", [x, i, g.const(np.array(4))])


def loss(g: Growing) -> None:
    x = g.floats(1)
    if x is not None:
        g.add("L2Loss", [x])


def size_of(g: Growing) -> None:
    x = g.floats(1)
    if x is not None:
        number = g.add("Cast", [g.add("Size", [x])], {"DstT": "float64"})
        y = g.floats()
        g.add("RealDiv", [y, number])  # type: ignore[list-item]


def expand(g: Growing) -> None:
    x = g.floats(0, 3)
    if x is not None:
        g.add("ExpandDims", [x, g.const(np.array(g.draw(g.values[x].ndim + 1)))])


GROWERS: List[Callable[[Growing], None]] = [
    unary, binary, binary, binary, add_n, matmul, matmul, reduce, reduce, reshape, reshape, transpose, concat, split, cut,
    strided, tile, fill, look_up, own_rows, one_hot, softmax, choose, scatter, loss, size_of, expand]
