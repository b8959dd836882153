"""What the clones of a step have, made comparable and put together."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple, Union

from whale_tf.ir.batch_axis import Offsets
from whale_tf.ir.layout import Exponent, Layout, exponents_of
from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes.lowering.primitive import (
    ALL_GATHER,
    BLOCK,
    CONCAT,
    FETCHED,
    SCALE,
    SHIFT,
    SUM,
    VALUE,
    Primitive,
    Reduction,
    Rows,
)
from whale_tf.passes.replicate import clones, device_at
from whale_tf.plan import Plan
from whale_tf.program import EVERY, Clone


class Values:
    """Makes primitives of the clones' values.

    Attributes:
        collectives: call that synchronises -> its collectives between processes, in an order that is the same in all of them.
    """

    def __init__(self, step: TrainingStep, plan: Plan) -> None:
        self.step, self.plan = step, plan
        self.collectives: Dict[int, List[Primitive]] = {}
        self._values: Dict[Tuple[int, Clone], Primitive] = {}

    def value(self, tensor: int, clone: Clone) -> Primitive:
        """What a clone has of a tensor."""
        producer = self.step.graph.producer(tensor)
        place = EVERY if producer.id in self.step.region.sections else clone
        if (tensor, place) not in self._values:
            task_graph = self.step.task_graph_of(tensor)
            device = device_at(self.plan, task_graph, place, producer.shard)
            self._values[tensor, place] = Primitive(VALUE, tensor, device, clone=place, task_graph=task_graph)
        return self._values[tensor, place]

    def layout(self, tensor: int) -> Layout:
        return self.step.region.batch.layout(tensor)

    def power(self, tensor: int) -> Exponent:
        return self.layout(tensor).power

    def scaled(self, value: Primitive, power: Exponent, clone: Clone, task_graph: int, scope: str,
                device: Optional[int] = None) -> Primitive:
        if not exponents_of(power):
            return value
        at = value.device if device is None else device
        return Primitive(SCALE, value.tensor, at, (value,), scope, clone, task_graph, power, call=value.call)

    def shifted(self, value: Primitive, offset: Offsets, clone: Clone, task_graph: int, scope: str,
                 device: Optional[int] = None) -> Primitive:
        if offset == 0:
            return value
        at = value.device if device is None else device
        return Primitive(SHIFT, value.tensor, at, (value,), scope, clone, task_graph, offset)

    def added(self, values: Sequence[Primitive], device: int, scope: str, number: int = FETCHED) -> Primitive:
        return self.reduced(SUM, values, device, scope, number)

    def reduced(self, kind: str, values: Sequence[Primitive], device: int, scope: str, number: int = FETCHED) -> Primitive:
        if len(values) == 1:
            return values[0]
        return Primitive(kind, values[0].tensor, device, values, scope, call=number)

    def comparable(self, tensor: int, pieces: Sequence[Clone], power: Exponent, offset: Offsets, scope: str) -> List[Primitive]:
        """The clones' values of a tensor, times ``w^power``, with positions that count from the mini-batch's first example."""
        task_graph, found = self.step.task_graph_of(tensor), []
        for place, clone in enumerate(pieces):
            value = self.shifted(self.value(tensor, clone), offset, clone, task_graph, f"{scope}/offset{place}")
            found.append(self.scaled(value, power, clone, task_graph, f"{scope}/{place}"))
        return found

    def pieces(self, tensor: int, scope: str) -> List[Primitive]:
        """What each clone has of a sharded tensor."""
        every = clones(self.plan, self.step.task_graph_of(tensor))
        return self.comparable(tensor, every, self.power(tensor), self.step.region.batch.offsets.get(tensor, 0), scope)

    def rows(self, tensor: int, device: int, scope: str, number: int = FETCHED) -> Primitive:
        """All clones' values of a sharded tensor, in the order of the examples."""
        return self.ordered(tensor, self.pieces(tensor, scope), device, scope, number)

    def ordered(self, tensor: int, pieces: Sequence[Primitive], device: int, scope: str, number: int = FETCHED) -> Primitive:
        blocks, parts = self.layout(tensor).blocks, pieces
        if blocks is not None and len(blocks) > 1 and len(pieces) > 1:  # each block from all clones
            parts = [part for index in range(len(blocks))
                     for part in self.blocks(tensor, pieces, index, f"{scope}/block{index}")]
        return self.concatenated(tensor, parts, device, scope, number, pieces)

    def concatenated(self, tensor: int, parts: Sequence[Primitive], device: int, scope: str, number: int = FETCHED,
                      pieces: Sequence[Primitive] = ()) -> Primitive:
        """``pieces``: the clones' values if the parts are all the rows that these have together."""
        if len(parts) == 1:
            return parts[0]
        task_graph = self.step.task_graph_of(tensor)
        return Primitive(CONCAT, tensor, device, parts, scope, task_graph=task_graph, detail=tuple(pieces), call=number)

    def blocks(self, tensor: int, pieces: Sequence[Primitive], index: int, scope: str) -> List[Primitive]:
        """Block ``index`` of each clone's value."""
        blocks = self.layout(tensor).blocks
        if blocks is None or len(blocks) == 1:
            return list(pieces)
        task_graph = self.step.task_graph_of(tensor)
        return [Primitive(BLOCK, tensor, piece.device, (piece,), f"{scope}_{place}", piece.clone, task_graph, index)
                for place, piece in enumerate(pieces)]

    def examples(self, tensor: int, pieces: Sequence[Primitive], device: int, scope: str, how: Rows,
                  number: int = FETCHED) -> Primitive:
        """All clones' values of a sharded tensor, including those of other processes, in the order of the examples: block by
        block, each from all processes."""
        blocks = self.layout(tensor).blocks
        if self.step.processes == 1:
            return self.ordered(tensor, pieces, device, scope, number)
        if blocks is None or len(blocks) == 1:
            here = self.ordered(tensor, pieces, device, scope, number)
            return self.between(ALL_GATHER, here, device, scope + "/processes", how, number)
        parts = []
        for index in range(len(blocks)):
            where = f"{scope}/block{index}"
            rows = self.concatenated(tensor, self.blocks(tensor, pieces, index, where), device, where, number)
            parts.append(self.between(ALL_GATHER, rows, device, where + "/processes", how, number))
        return self.concatenated(tensor, parts, device, scope, number)

    def between(self, kind: str, here: Primitive, device: int, scope: str, how: Union[Reduction, Rows],
                 number: int = FETCHED) -> Primitive:
        """A collective between processes, to which each contributes one value."""
        task_graph = self.step.task_graph_of(here.tensor)
        made = Primitive(kind, here.tensor, device, (here,), scope, task_graph=task_graph, detail=how, call=number)
        if number != FETCHED:
            self.collectives.setdefault(number, []).append(made)
        return made
