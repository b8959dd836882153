"""FLOPs and bytes of every op of a graph, from static shapes alone.

A contraction (matrix product, einsum, convolution, and their gradients) costs two FLOPs, a multiply and an add, for every
combination of its rule's factors: MatMul ``mk,kn->mn`` is ``2 m k n``.  For a convolution's image, the factors of the result
count and those of the input do not: every result pixel takes one product with every element of the window.  All other ops
cost a few FLOPs per element; they are limited by the memory they read and write.

If an operand's rank is not known, the cost is assumed: one multiply and add for each example and element of the largest tensor of
known shape, as in a matrix product with weights (:func:`assumed_ops`).
"""

from __future__ import annotations

from typing import Collection, Dict, Iterable, List, NamedTuple, Optional

import numpy as np

from whale_tf.errors import PlanError
from whale_tf.ir.graph import Op, OpGraph, bytes_of, elements_of
from whale_tf.ir.rules import NoRule, Rule, View, rule_for
from whale_tf.ir.sizes import nominal_shapes
from whale_tf.ir.traits import CONDITIONALS, Cost, OpTraits, traits
from whale_tf.profiler.trip_count import body_runs


class OpCost(NamedTuple):
    """One run of an op.

    Attributes:
        flops: floating-point operations; a multiply-add is two.
        bytes: memory read and written.
        is_contraction: whether arithmetic (FLOPs of a contraction) rather than memory limits it.
    """

    flops: float
    bytes: float
    is_contraction: bool = False


FREE = OpCost(0.0, 0.0)



def tensor_bytes(graph: OpGraph, tensor: int) -> int:
    """Size of a tensor's whole value; 0 if its shape or element size is not known."""
    record = graph.tensors[tensor]
    if record.shape is None or None in record.shape:
        return 0
    return bytes_of(record.dtype) * elements(graph, tensor)


def elements(graph: OpGraph, tensor: int) -> int:
    """Number of elements; 0 if a dimension is not known."""
    return elements_of(graph.tensors[tensor].shape)


def op_costs(graph: OpGraph, batch: Optional[int] = None, ops: Optional[Collection[int]] = None) -> List[OpCost]:
    """The cost of one run of the whole graph, op by op.  A loop's ops are multiplied by its trip count if that is known
    (:mod:`whale_tf.profiler.trip_count`), and a functional op costs as much as its body.

    Args:
        batch: used for every number that the graph leaves unknown, such as that of the examples.
        ops: the ops whose cost is needed; the others count as free.

    Raises:
        PlanError: a contraction's operands have known ranks, but unknown sizes.
    """
    if batch is not None:
        graph = graph.with_shapes(nominal_shapes(graph, batch))
    return _Costs(graph, batch).all(ops)


def known_flops(graph: OpGraph, batch: int, ops: Iterable[Op]) -> Dict[int, float]:
    """Floating-point operations of some ops in one run of the graph; zero where the shapes are not known.

    Args:
        batch: used for every number that the graph leaves unknown, such as that of the examples.
    """
    completed = nominal_shapes(graph, batch)
    graph = graph.with_shapes(completed) if completed else graph
    costs, runs, found = _Costs(graph, batch), body_runs(graph), {}
    for op in ops:
        try:
            found[op.id] = costs.cost(op).flops * runs.get(op.id, 1)
        except PlanError:
            found[op.id] = 0.0
    return found


def has_open_rank(op: Op, graph: OpGraph) -> bool:
    """Whether the rank of one of an op's operands or results is not known."""
    return any(graph.tensors[tensor].shape is None for tensor in (*op.inputs, *op.outputs))


def assumed_ops(graph: OpGraph, ops: Iterable[int]) -> List[str]:
    """The forward contractions among ``ops`` whose cost is assumed, because the rank of an operand is not known."""
    return [op.name for op in (graph.ops[index] for index in ops)
            if traits(op.type).is_contraction and op.forward < 0 and has_open_rank(op, graph)]


class _Costs:
    def __init__(self, graph: OpGraph, batch: Optional[int]) -> None:
        self.graph = graph
        self._batch = batch
        self._view = View(graph)
        self._bodies: Dict[int, OpCost] = {}

    def all(self, ops: Optional[Collection[int]]) -> List[OpCost]:
        runs = body_runs(self.graph)
        return [_times(self.cost(op), runs.get(op.id, 1)) if ops is None or op.id in ops else FREE for op in self.graph.ops]

    def cost(self, op: Op) -> OpCost:
        if op.body:
            return self._functional(op)
        row = traits(op.type)
        if row.cost in (Cost.FREE, Cost.BODY):
            return FREE
        if row.cost is Cost.UPDATE:
            return self._update(op, row.flops)
        moved = float(sum(tensor_bytes(self.graph, t) for t in [*set(op.inputs), *op.outputs]))
        if row.is_contraction:
            return OpCost(self._contraction(op), moved, True)
        return OpCost(self._by_elements(op, row), self._touched(op, row, moved))

    def _contraction(self, op: Op) -> float:
        """A gradient has the same factors as its forward op, whose sizes are known where its own operands come from a stack that
        a loop keeps, which has no shape."""
        try:
            return contraction_flops(op, self.graph, self._view)
        except PlanError:
            is_gradient = op.forward >= 0 and traits(self.graph.ops[op.forward].type).is_contraction
            forward = self.graph.ops[op.forward] if is_gradient else op
            if has_open_rank(op, self.graph) and (not is_gradient or has_open_rank(forward, self.graph)):
                return 2.0 * (self._batch or 1) * max(elements(self.graph, t) for t in (*op.inputs, *op.outputs))
            if not is_gradient:
                raise
            return contraction_flops(forward, self.graph, self._view)

    def _sparse_product(self, op: Op) -> float:
        """How many elements the matrix has is rarely known: at least one in each row or column, whichever are more."""
        dense, result = (self.graph.tensors[tensor].shape for tensor in (op.inputs[3], op.outputs[0]))
        if dense is None or result is None or None in (*dense, *result):
            return 0.0
        columns = 1 - bool(op.attrs.get("adjoint_b"))
        count = max(elements(self.graph, op.inputs[1]), int(dense[1 - columns] or 0), int(result[0] or 0))
        return 2.0 * count * int(dense[columns] or 0)

    def _touched(self, op: Op, row: OpTraits, moved: float) -> float:
        """A look-up or slice reads only what it returns, not the whole tensor."""
        if row.cost is Cost.LOOK_UP:
            return float(2 * tensor_bytes(self.graph, op.outputs[0]) + tensor_bytes(self.graph, op.inputs[1]))
        return moved

    def _by_elements(self, op: Op, row: OpTraits) -> float:
        if row.cost in (Cost.MOVE, Cost.LOOK_UP) or not op.outputs:
            return 0.0
        if row.cost is Cost.OPERAND:
            return row.flops * elements(self.graph, op.inputs[0])
        if row.cost is Cost.SPARSE:
            return self._sparse_product(op)
        if row.cost is Cost.ADDS:
            return float((len(op.inputs) - 1) * elements(self.graph, op.outputs[0]))
        if row.cost is Cost.POOL:
            window = float(np.prod(op.attrs.get("ksize") or [1]))
            # forward: the result's elements; gradient: those of the operand with the result's size, once per window element
            small = min(elements(self.graph, t) or elements(self.graph, op.outputs[0]) for t in (op.inputs[-1], op.outputs[0]))
            return window * small
        if not self.graph.tensors[op.outputs[0]].dtype.startswith(("float", "bfloat", "half", "double", "complex")):
            return 0.0
        return row.flops * elements(self.graph, op.outputs[0])

    def _update(self, op: Op, per_element: float) -> OpCost:
        """The largest operand that is not a handle counts as the gradient; slots are also read and written."""
        sizes = [elements(self.graph, t) for t in op.inputs]
        floats = [s for s, t in zip(sizes, op.inputs) if self.graph.tensors[t].dtype.startswith(("float", "half", "bfloat"))]
        count = max(floats or [0])
        slots = slot_count(op, self.graph)
        itemsize = max([tensor_bytes(self.graph, t) // s for s, t in zip(sizes, op.inputs) if s == count and s] or [4])
        return OpCost(per_element * count, float((3 + 2 * slots) * count * itemsize))

    def _functional(self, op: Op) -> OpCost:
        """If and Case: the most expensive branch; While: one run of condition and body; calls: the body."""
        costs = [self._body(body) for body in (op.body or {}).values()]
        if op.type in CONDITIONALS:
            return max(costs, key=lambda cost: (cost.flops, cost.bytes))
        return _added(costs)

    def _body(self, body: OpGraph) -> OpCost:
        if id(body) not in self._bodies:
            self._bodies[id(body)] = FREE  # a recursive function
            self._bodies[id(body)] = _added(op_costs(body, self._batch))
        return self._bodies[id(body)]


def slot_count(op: Op, graph: OpGraph) -> int:
    """Number of variables, apart from the parameter, that an optimizer's update op reads and writes."""
    dtypes = [graph.tensors[t].dtype for t in op.inputs]
    return max(0, sum(dtype == "resource" or dtype.endswith("_ref") for dtype in dtypes) - 1)


def _times(cost: OpCost, count: int) -> OpCost:
    return cost if count == 1 else cost._replace(flops=cost.flops * count, bytes=cost.bytes * count)


def _added(costs: List[OpCost]) -> OpCost:
    arithmetic = sum(cost.flops for cost in costs if cost.is_contraction)
    total = sum(cost.flops for cost in costs)
    return OpCost(total, sum(cost.bytes for cost in costs), arithmetic * 2 > total)


def contraction_flops(op: Op, graph: OpGraph, view: Optional[View] = None) -> float:
    """``2 * product of the factors' sizes`` (see the module's docstring).

    Raises:
        PlanError: a size is not known.
    """
    try:
        rule = rule_for(op, graph, view)
    except NoRule as error:
        raise PlanError(f"the FLOPs of op {op.name!r} ({op.type}) are not known: {error}") from None
    sizes = _factor_sizes(op, rule, graph)
    is_convolution = traits(op.type).cost is Cost.CONVOLUTION
    product = 1.0
    for factor in rule.factors:
        if is_convolution and factor.startswith("x"):
            continue
        if factor not in sizes:
            raise PlanError(
                f"the FLOPs of op {op.name!r} ({op.type}) are not known: the graph does not give all of the sizes "
                f"{[graph.tensors[t].shape for t in op.inputs]}; give a batch size, or make the model's other dimensions static")
        product *= sizes[factor]
    return 2.0 * product


def _factor_sizes(op: Op, rule: Rule, graph: OpGraph) -> Dict[str, int]:
    """Sizes of factors that are alone in a dimension of known size, then of the remaining factor in composed dimensions."""
    sizes: Dict[str, int] = {}
    composed = []
    for dims, tensor in list(zip(rule.inputs, op.inputs)) + list(zip(rule.outputs, op.outputs)):
        shape = graph.tensors[tensor].shape
        if not isinstance(dims, tuple) or shape is None:
            continue
        for factors, size in zip(dims, shape):
            if size is not None and len(factors) == 1:
                sizes[factors[0]] = size
            elif size is not None and len(factors) > 1:
                composed.append((factors, size))
    for factors, size in composed:
        left = [factor for factor in factors if factor not in sizes]
        if len(left) == 1:
            known = int(np.prod([sizes[factor] for factor in factors if factor in sizes]))
            sizes[left[0]] = size // max(1, known)
    return sizes
