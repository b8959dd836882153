"""Check a sharding rule against the real op: run it whole and on shards, merge as the rule says, compare.

For every factor that passes or reduces, operands are cut into uneven parts along the factor, shape operands are rewritten
to the part's sizes, and the results must make up the whole's.  The operands' roles are checked by linearity.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from whale_tf.capture.record import record
from whale_tf.ir.rules import rule_for
from whale_tf.ir.rules.rule import ALL, ANY, MAX, MEAN, MIN, PROD, SUM, Dims, Rule

REDUCTIONS = (SUM, MEAN, MAX, MIN, PROD, ANY, ALL)
UNEVEN = {2: (1, 1), 3: (1, 2), 4: (1, 3), 5: (1, 3, 1), 6: (1, 4, 1), 7: (2, 4, 1)}


def tolerance(array: np.ndarray) -> float:
    return 1e-9 if array.dtype in (np.float64, np.complex128) or array.dtype.kind in "iub" else 2e-4



class Case(NamedTuple):
    """``build`` makes the op from one tensor per array; arrays in ``fixed`` become constants (axes, shapes)."""

    name: str
    build: Callable[..., Any]
    arrays: Sequence[Any]
    fixed: Tuple[int, ...] = ()
    outputs: Optional[Tuple[int, ...]] = None  # results to compare; all by default

    def __str__(self) -> str:
        return self.name


def op_of(case: Case, tensors: Sequence[tf.Tensor]) -> tf.Operation:
    """The case's op on these operands, in the current graph."""
    made = case.build(*tensors)
    return (made if isinstance(made, tf.Tensor) else made[0] if isinstance(made, (list, tuple)) else made).op


class Run:
    """One op in a graph of its own, run many times with other operands."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.arrays = [np.asarray(a) for a in case.arrays]
        with tf.Graph().as_default() as graph:
            tensors = [
                tf.constant(a) if i in case.fixed else tf.placeholder(a.dtype, a.shape, name=f"operand{i}")
                for i, a in enumerate(self.arrays)
            ]
            op = op_of(case, tensors)
            self.ops = record(graph)
            self.op = self.ops.op(op.name)
            self.node = next(n for n in graph.as_graph_def().node if n.name == op.name)
            self.operands = [self._array(t.name, tensors) for t in op.inputs]
            self.operand_arrays = [self._value(graph, t, tensors) for t in op.inputs]
        self.rule: Rule = rule_for(self.op, self.ops)
        self.definition = tf.GraphDef()
        self.definition.versions.producer = 134
        self.fetches: List[List[str]] = []

    def _array(self, name: str, tensors: Sequence[Any]) -> int:
        names = [t.name for t in tensors]
        return names.index(name) if name in names else -1

    def _value(self, graph: Any, tensor: Any, tensors: Sequence[Any]) -> np.ndarray:
        position = self._array(tensor.name, tensors)
        if position >= 0:
            return self.arrays[position]
        known = tf.get_static_value(tensor)
        if known is not None:
            return known
        with tf.Session(graph=graph) as session:
            return session.run(tensor)

    def add(self, operands: Sequence[np.ndarray]) -> int:
        """Plan a run with these operands; the number of the run."""
        number = len(self.fetches)
        node = self.definition.node.add()
        node.CopyFrom(self.node)
        node.name = f"run{number}"
        del node.input[:]
        for i, operand in enumerate(operands):
            constant = self.definition.node.add()
            constant.name, constant.op = f"run{number}/operand{i}", "Const"
            constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(operand))
            constant.attr["dtype"].type = constant.attr["value"].tensor.dtype
            node.input.append(constant.name)
        wanted = self.case.outputs if self.case.outputs is not None else range(len(self.op.outputs))
        self.fetches.append([f"{node.name}:{i}" for i in wanted])
        return number

    def run(self) -> List[List[np.ndarray]]:
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(self.definition, name="")
            with tf.Session(graph=graph, config=_as_written()) as session:
                return session.run(self.fetches)


def _as_written() -> Any:
    """Nothing folded: all operands are constants here."""
    config = tf.ConfigProto()
    config.graph_options.optimizer_options.opt_level = tf.OptimizerOptions.L0
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config


def factor_sizes(run: Run) -> Dict[str, int]:
    """Sizes of all factors, from the shapes of operands and results."""
    sizes: Dict[str, int] = {}
    shapes = [(d, a.shape) for d, a in zip(run.rule.inputs, run.operand_arrays) if isinstance(d, tuple)]
    made = [run.ops.tensors[t].shape for t in run.op.outputs]
    if run.case.outputs is None and any(shape is None or None in shape for shape in made):
        made = [result.shape for result in run.run()[0]]
    shapes += [(d, shape) for d, shape in zip(run.rule.outputs, made) if isinstance(d, tuple)]
    for _ in range(3):
        for dims, shape in shapes:
            assert shape is None or len(dims) == len(shape), (run.case.name, dims, shape)
            for factors, size in zip(dims, shape or ()):
                unknown = [f for f in factors if f not in sizes]
                if len(unknown) == 1 and size is not None:
                    known = int(np.prod([sizes[f] for f in factors if f in sizes], dtype=int))
                    sizes[unknown[0]] = size // known
                elif not unknown and size is not None:
                    assert int(np.prod([sizes[f] for f in factors], dtype=int)) == size, (run.case.name, dims, shape)
    return sizes


def expanded(array: np.ndarray, dims: Dims, sizes: Dict[str, int]) -> Tuple[np.ndarray, List[str]]:
    """An array with one dimension per factor, and the factors in order."""
    order = [f for factors in dims for f in factors]
    return array.reshape([sizes[f] for f in order]), order


def cut(array: np.ndarray, dims: Dims, sizes: Dict[str, int], factor: str, low: int, high: int) -> np.ndarray:
    view, order = expanded(array, dims, sizes)
    part = np.take(view, range(low, high), axis=order.index(factor))
    local = dict(sizes, **{factor: high - low})
    return part.reshape([int(np.prod([local[f] for f in factors], dtype=int)) for factors in dims])


def join(parts: Sequence[np.ndarray], dims: Dims, sizes: Dict[str, int], factor: str, lengths: Sequence[int]) -> np.ndarray:
    pieces = []
    for part, length in zip(parts, lengths):
        view, order = expanded(part, dims, dict(sizes, **{factor: length}))
        pieces.append(view)
    whole = np.concatenate(pieces, axis=order.index(factor))
    return whole.reshape([int(np.prod([sizes[f] for f in factors], dtype=int)) for factors in dims])


def check_factors(case: Case) -> List[str]:
    """Assert equality for every factor that passes or reduces; the factors that were checked."""
    run = Run(case)
    whole = run.add(run.operand_arrays)
    rule, sizes = run.rule, factor_sizes(run)
    plans = []
    for factor in rule.factors:
        kind = rule.kind(factor)
        if (kind != "pass" and kind not in REDUCTIONS) or sizes.get(factor, 1) not in UNEVEN:
            continue
        bounds = np.cumsum((0,) + UNEVEN[sizes[factor]])
        numbers = [run.add(_operands(run, sizes, factor, low, high)) for low, high in zip(bounds, bounds[1:])]
        plans.append((factor, kind, numbers, np.diff(bounds)))
    results = run.run()
    for factor, kind, numbers, lengths in plans:
        wanted = case.outputs if case.outputs is not None else range(len(run.op.outputs))
        for k, output in enumerate(wanted):
            parts = [results[n][k] for n in numbers]
            merged = merge(parts, rule.outputs[output], sizes, factor, kind, lengths)
            np.testing.assert_allclose(merged, results[whole][k], err_msg=f"{case.name} along {factor}",
                                       rtol=tolerance(parts[0]), atol=tolerance(parts[0]))
    return [plan[0] for plan in plans]


def _operands(run: Run, sizes: Dict[str, int], factor: str, low: int, high: int) -> List[np.ndarray]:
    operands = []
    for array, dims in zip(run.operand_arrays, run.rule.inputs):
        has = isinstance(dims, tuple) and any(factor in factors for factors in dims)
        operands.append(cut(array, dims, sizes, factor, low, high) if has else array)  # type: ignore[arg-type]
    local = dict(sizes, **{factor: high - low})
    for shape in run.rule.shapes:
        value = operands[shape.position].copy()
        for j, factors in enumerate(shape.dims):
            if factor in factors and value[j] != -1:
                value[j] = int(np.prod([local[f] for f in factors], dtype=int))
        operands[shape.position] = value
    return operands


def merge(parts: Sequence[np.ndarray], dims: Any, sizes: Dict[str, int], factor: str, kind: str,
          lengths: Sequence[int]) -> np.ndarray:
    if isinstance(dims, tuple) and any(factor in factors for factors in dims):
        return join(parts, dims, sizes, factor, list(lengths))
    if kind == "sum":
        return np.sum(parts, axis=0)
    if kind == "mean":
        return np.tensordot(np.asarray(lengths) / float(sum(lengths)), np.stack(parts), 1)
    if kind != "pass":
        return getattr(np, kind)(np.stack(parts), axis=0)
    for part in parts[1:]:
        np.testing.assert_allclose(part, parts[0], rtol=tolerance(part), atol=tolerance(part))
    return parts[0]


def check_roles(case: Case) -> None:
    """Assert that the op is linear, jointly linear or inverse in the operands that the rule says."""
    run = Run(case)
    random = np.random.RandomState(1)
    roles = run.rule.roles
    whole = run.add(run.operand_arrays)
    checks: List[Tuple[str, List[int], float]] = []
    groups = [[i] for i, r in enumerate(roles) if r == "m"] + ([[i for i, r in enumerate(roles) if r == "a"]] if "a" in roles else [])
    for group in groups:
        if any(run.operand_arrays[i].dtype.kind not in "fciu" for i in group):
            continue
        other = {i: random.uniform(0.5, 2.0, run.operand_arrays[i].shape).astype(run.operand_arrays[i].dtype) for i in group}
        second = run.add([other.get(i, a) for i, a in enumerate(run.operand_arrays)])
        both = run.add([(2.0 * a + other[i]).astype(a.dtype) if i in other else a for i, a in enumerate(run.operand_arrays)])
        checks.append((f"linear in {group}", [second, both], 2.0))
    for i, role in enumerate(roles):
        if role == "d" and run.operand_arrays[i].dtype.kind == "f":
            half = run.add([a * 2.0 if k == i else a for k, a in enumerate(run.operand_arrays)])
            checks.append((f"inverse in {i}", [half], 0.5))
    results = run.run()
    for text, numbers, factor in checks:
        for k in range(len(results[whole])):
            base = results[whole][k]
            if len(numbers) == 2:
                expected = 2.0 * base + results[numbers[0]][k]
                actual = results[numbers[1]][k]
            else:
                expected, actual = base * factor, results[numbers[0]][k]
            np.testing.assert_allclose(actual, expected, err_msg=f"{case.name} {text}",
                                       rtol=tolerance(base), atol=tolerance(base))
