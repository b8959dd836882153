"""Tensors of the whole batch's size are computed for each clone instead of being sliced.

With a static batch size, TensorFlow's gradients are full of ``Tile(1 / B, [B, T, V])`` and ``Fill([B, ...])``: tensors of
the whole batch's size that do not depend on divided data.  If every clone computed them whole and sliced them where they
meet divided data, each clone would need memory for the whole batch.  A generator whose uses all end in the same slice is
*promoted*: its shape operand becomes the clone's, and the slices disappear::

    before   Fill([B, 4]) ----> Mul ----slice----> Add(x)         after   Fill([b_i, 4]) ----> Mul ----> Add(x)

Demands propagate against the edges: each use of a whole tensor demands a slice along (dimension, blocks), needs the tensor
whole, or accepts either.
"""
from __future__ import annotations

from typing import Dict, List, Mapping, Sequence, Set, Tuple, Union

from whale_tf.ir.batch_axis.propagate import Propagation
from whale_tf.ir.batch_axis.result import Slice
from whale_tf.ir.graph import Op
from whale_tf.ir.layout import Block
from whale_tf.ir.rules import known_rule
from whale_tf.ir.traits import GENERATORS
from whale_tf.ir.walk import reached

Demand = Union[None, str, Tuple[int, Tuple[Block, ...]]]  # None: no use yet; WHOLE; or the slice
WHOLE = "whole"


def promote(state: Propagation) -> None:
    """Find the generators to promote once the analysis has converged, and visit the ops that this changes."""
    sliced = {op: [] for op, _ in state.conversions}  # type: Dict[int, List[Tuple[int, Slice]]]
    for (op_id, position), steps in state.conversions.items():
        if isinstance(steps[0], Slice):
            sliced[op_id].append((position, steps[0]))
    if not any(sliced.values()):
        return
    demands = _Demands(state, sliced)
    for op_id in sorted(_asked(state, sliced), reverse=True):
        demands.visit(state.graph.ops[op_id])
    for tensor, dim, blocks in demands.generators:
        state.promote(tensor, dim, blocks, demands.beside.get(tensor, ()))
    state.drain()


def _asked(state: Propagation, sliced: Mapping[int, Sequence[Tuple[int, Slice]]]) -> Set[int]:
    """The ops that have a say: whole tensors from which a sliced one follows are made or used by them."""
    graph = state.graph
    tensors = reached((graph.ops[op].inputs[position] for op, steps in sliced.items() for position, _ in steps),
                      lambda tensor: () if tensor in state.layouts else graph.producer(tensor).inputs)
    return {graph.tensors[tensor].op for tensor in tensors}.union(
        user for tensor in tensors for user, _ in graph.consumers(tensor))


class _Demands:
    """Demands on whole tensors, collected in reverse creation order."""

    def __init__(self, state: Propagation, sliced: Dict[int, List[Tuple[int, Slice]]]) -> None:
        self.state = state
        self.sliced = sliced
        self.on: Dict[int, Demand] = {}
        self.beside: Dict[int, Tuple[int, ...]] = {}  # the batch inputs to whose rows the tensor's rows correspond
        self.generators: List[Tuple[int, int, Tuple[Block, ...]]] = []

    def ask(self, tensor: int, demand: Demand, beside: Tuple[int, ...] = ()) -> None:
        before = self.on.get(tensor)
        self.beside.setdefault(tensor, beside)
        self.on[tensor] = demand if before is None or before == demand else WHOLE

    def visit(self, op: Op) -> None:
        state = self.state
        demand = self.on.get(op.outputs[0]) if len(op.outputs) == 1 else None
        is_wanted = isinstance(demand, tuple)
        slices = dict(self.sliced[op.id]) if op.id in self.sliced else {}
        if is_wanted and op.outputs[0] not in state.layouts and state.visited[op.id]:
            if op.type in GENERATORS and self._can_promote(op, demand):  # type: ignore[arg-type]
                self.generators.append((op.outputs[0],) + demand)  # type: ignore[operator,arg-type]
                return
            self._pass_on(op, demand)  # type: ignore[arg-type]
            return
        for position, step in slices.items():
            self.ask(op.inputs[position], (step.dim, step.blocks), state.sources(op))
        for position, tensor in enumerate(op.inputs):
            if tensor not in state.layouts and position not in slices:
                self.on[tensor] = WHOLE  # whatever others ask for

    def _need_whole(self, op: Op) -> None:
        self.on.update(dict.fromkeys(op.inputs, WHOLE))

    def _pass_on(self, op: Op, demand: Tuple[int, Tuple[Block, ...]]) -> None:
        """Pass a demand for rows of a replicated op's result on to its operands."""
        rule = known_rule(op, self.state.graph, self.state)
        dims = rule.outputs[0] if rule is not None else None
        if rule is None or not isinstance(dims, tuple) or demand[0] >= len(dims) or len(dims[demand[0]]) != 1 or (
                rule.kind(dims[demand[0]][0]) != "pass") or rule.shapes:
            self._need_whole(op)
            return
        factor = dims[demand[0]]
        for tensor, operand in zip(op.inputs, rule.inputs):
            if isinstance(operand, tuple) and factor in operand:
                self.ask(tensor, (operand.index(factor), demand[1]), self.beside.get(op.outputs[0], ()))
            elif not isinstance(operand, tuple):
                self.on[tensor] = WHOLE  # whatever others ask for

    def _can_promote(self, op: Op, demand: Tuple[int, Tuple[Block, ...]]) -> bool:
        if op.type == "Range":
            return self.state.ints(op, 0) == [0] and self.state.ints(op, 1) is not None
        rule = known_rule(op, self.state.graph, self.state)
        dims = rule.outputs[0] if rule is not None else None
        if not isinstance(dims, tuple) or len(dims[demand[0]]) != 1:
            return False
        return rule is not None and all(dims[demand[0]] not in operand for operand in rule.inputs if isinstance(operand, tuple))
