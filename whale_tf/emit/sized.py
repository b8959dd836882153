"""Stages sizes of values, computed from what a process has (:mod:`whale_tf.passes.sized`).

Integers that follow from the sizes of the step's inputs do not cross at all: the process that reads them computes them::

    as written     batch ──> MatMul (0) ──> Shape (0) ══> Reshape (1)
    then           batch ──> Shape ──> Pack [64 b, 256] ──> Reshape (1)
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Tuple

from whale_tf._tf_compat import tf
from whale_tf.capture.record import record
from whale_tf.emit.checks import check_equal
from whale_tf.graph_editor.edges import canonical_edge
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.extents import Monomial, Size, SizeLike, Symbol, Value
from whale_tf.ir.graph import OpGraph
from whale_tf.ir.sizes import OpenSizes, Sizes
from whale_tf.ir.walk import reached


def read_own_sizes(graph: tf.Graph, ends: Iterable[tf.Operation], owner: Callable[[tf.Operation], Optional[int]],
                   scope: str) -> None:
    """Makes ops compute integers from the sizes of common inputs, rather than read those of a process.

    Args:
        ends: ops that run.
        owner: the process that runs an op; None: each that needs it.
        scope: name of the new ops.
    """
    reading: List[Tuple[tf.Operation, int, tf.Tensor]] = []
    for op in graph.get_operations():
        for position, tensor in enumerate(op.inputs):
            if tensor.dtype in (tf.int32, tf.int64) and owner(tensor.op) is not None:
                reading.append((op, position, tensor))
    if not reading:
        return
    recorded = record(graph)
    sizes, edit, edges = OpenSizes(recorded), StagedEdit(graph), {}  # type: OpenSizes, StagedEdit, Dict[str, str]
    staged = StagedSizes(Nodes(edit), recorded, lambda tensor: canonical_edge(recorded.tensor_name(tensor)), scope, "",
                         sizes.taken_for)
    running = reached(ends, lambda op: [*(tensor.op for tensor in op.inputs), *op.control_inputs])  # not what clones replace

    def is_common(symbol: Symbol) -> bool:
        producer = graph.get_operation_by_name(recorded.producer(symbol[1]).name)
        return symbol[0] == "dim" and owner(producer) is None and producer in running

    for op, position, tensor in reading:
        value = sizes.value(recorded.tensor(tensor.name))
        symbols = [] if value is None else [one for size in value.flat if isinstance(size, Size) for one in size.symbols]
        if value is not None and all(map(is_common, symbols)):
            if tensor.name not in edges:  # also for its own process: others may compute again what it computes from them
                edges[tensor.name] = staged.value(value, tensor.dtype)
            edit.move_input(op.name, position, edges[tensor.name])
    edit.commit()


class StagedSizes:
    """Equal sizes are staged once.

    Args:
        edge: a tensor of the graph -> its name in this process.
        scope: name of the new ops.
        taken_for: sizes -> others for which they are taken: who reads one of the latter waits for a comparison.
    """

    def __init__(self, nodes: Nodes, graph: OpGraph, edge: Callable[[int], str], scope: str, device: str,
                 taken_for: Mapping[Symbol, Symbol] = MappingProxyType({})) -> None:
        self._nodes, self._graph, self._edge, self._scope, self._device = nodes, graph, edge, scope, device
        self._taken_for = taken_for
        self._vectors: Dict[Sizes, str] = {}
        self._scalars: Dict[SizeLike, str] = {}
        self._shapes: Dict[int, str] = {}
        self._symbols: Dict[Symbol, str] = {}

    def vector(self, sizes: Sizes) -> str:
        """An int32 vector."""
        if not any(isinstance(size, Size) for size in sizes):
            return self._const(list(sizes))
        if sizes not in self._vectors:
            elements = list(map(self._scalar, sizes))
            self._vectors[sizes] = self._add("Pack", elements, T=tf.int32, N=len(elements), axis=0)
        return self._vectors[sizes]

    def value(self, value: Value, dtype: tf.DType) -> str:
        """An integer tensor."""
        found = self._scalar(value.item()) if value.ndim == 0 else self.vector(tuple(value.flat))
        if value.ndim > 1:
            found = self._add("Reshape", [found, self._const(value.shape)], T=tf.int32, Tshape=tf.int32)
        return found if dtype == tf.int32 else self._add("Cast", [found], SrcT=tf.int32, DstT=dtype)

    def _scalar(self, size: SizeLike) -> str:
        if not isinstance(size, Size):
            return self._const(size)
        if size not in self._scalars:
            terms = [self._term(monomial, size.terms[monomial]) for monomial in sorted(size.terms)]
            self._scalars[size] = self._joined("AddV2", terms)
        return self._scalars[size]

    def _term(self, monomial: Monomial, coefficient: int) -> str:
        factors = list(map(self._symbol, monomial))
        return self._joined("Mul", factors if coefficient == 1 and factors else [*factors, self._const(coefficient)])

    def _joined(self, op_type: str, values: List[str]) -> str:
        found = values[0]
        for value in values[1:]:
            found = self._add(op_type, [found, value], T=tf.int32)
        return found

    def _symbol(self, symbol: Symbol) -> str:
        if symbol not in self._symbols:
            found, others = self._read(symbol), [other for other, taken in self._taken_for.items() if taken == symbol]
            if others:
                checks = [self._compared(symbol, other) for other in others]
                found = self._nodes.identity(found, self._name("compared"), tf.int32, self._device, checks)
            self._symbols[symbol] = found
        return self._symbols[symbol]

    def _compared(self, symbol: Symbol, other: Symbol) -> str:
        (_, one, _), (_, second, _) = symbol, other
        names = [self._graph.tensor_name(tensor) for tensor in (one, second)]
        message = (f"{names[1]!r} has {{1}} rows, but {names[0]!r} has {{0}} in the same mini-batch, and an op combines them "
                   "row by row; give both the same number of rows")
        return check_equal(self._nodes, self._read(symbol), self._read(other), message, self._name("check"), self._device)

    def _read(self, symbol: Symbol) -> str:
        kind, tensor, index = symbol
        if kind == "dim":
            if tensor not in self._shapes:
                self._shapes[tensor] = self._add("Shape", [self._edge(tensor)], T=self._dtype(tensor), out_type=tf.int32)
            numbers = self._shapes[tensor]
        else:
            numbers = self._edge(tensor)
            if self._dtype(tensor) != tf.int32:
                numbers = self._add("Cast", [numbers], SrcT=self._dtype(tensor), DstT=tf.int32)
            numbers = self._add("Reshape", [numbers, self._const([-1])], T=tf.int32, Tshape=tf.int32)
        return self._add("GatherV2", [numbers, self._const(index), self._const(0)], Tparams=tf.int32, Tindices=tf.int32,
                         Taxis=tf.int32, batch_dims=0)

    def _dtype(self, tensor: int) -> tf.DType:
        return tf.as_dtype(self._graph.tensors[tensor].dtype)

    def _const(self, value: object) -> str:
        return self._nodes.const(value, self._name("const"), tf.int32, self._device)

    def _add(self, op_type: str, inputs: List[str], **attrs: Any) -> str:
        return self._nodes.add(op_type, self._name(op_type.lower()), inputs, self._device, **attrs)

    def _name(self, what: str) -> str:
        return f"{self._scope}/{what}"
