"""What each clone and copy reads: its part of the inputs, its neighbours' activations, its own copy of the variables.

``Operands.of(op, position, clone)`` is the name of the tensor that input ``position`` of ``op`` reads in a clone, according to
the program's calls; conversions of the batch axis are staged on request.  Everything is staged once and shared.
"""

from __future__ import annotations

from typing import Dict, Optional, Tuple

from whale_tf.communicators import Communicator
from whale_tf.emit.context import ORIGINAL, Clone, Context, Coordinates, Copy
from whale_tf.emit.convert import Converter
from whale_tf.emit.inputs import Inputs
from whale_tf.emit.reads import Reads
from whale_tf.emit.recipes import Recipes
from whale_tf.emit.shares import BatchShares
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.graph import Op
from whale_tf.passes.lowering import Lowering
from whale_tf.program import ALL, BRIDGE, DIVIDE, ONCE, WHOLE


class Operands:
    """See the module's docstring."""

    def __init__(self, context: Context, nodes: Nodes, division: BatchShares, inputs: Inputs,
                 variable_copies: Dict[Tuple[int, Copy], str], communicator: Communicator, lowering: Lowering) -> None:
        self.context, self.inputs, self.variable_copies = context, inputs, variable_copies
        self.converter = Converter(context, nodes, division, inputs, communicator)
        self.reads: Optional[Reads] = None  # of variables that each call reads again
        self.recipes = Recipes(context, self.converter, communicator, lowering)
        self.converter.combined = self.recipes.combined
        self.converter.whole_value = self.value
        self._taken: Dict[Tuple[int, Clone, int], int] = {}  # (TaskGraph, clone, tensor) -> the call that it comes from
        program = context.program
        for call in program.calls:
            task_graph, is_recipe = program.bodies[call.body].task_graph, program.bodies[call.body].is_recipe
            for tensor, sources in () if is_recipe else call.takes:
                if program.step_of(program.calls[sources[0]]) != WHOLE:
                    self._taken[task_graph, call.clone, tensor] = sources[0]

    def of(self, op: Op, position: int, at: Coordinates) -> str:
        """Name of the tensor that input ``position`` of ``op`` reads in a clone (batch level) or copy (step level)."""
        tensor = op.inputs[position]
        task_graph = self.context.task_graph_of(op)
        name = self.value(tensor, task_graph, at, op.shard)
        if isinstance(at, Clone):
            if self.reads is not None:
                name = self.reads.of_op(op.id, tensor, name, at)
            if (op.id, position) in self.context.region.batch.localise:
                return self.converter.localised(op, position, at, name)
            for conversion in self.context.region.batch.conversions.get((op.id, position), ()):
                name = self.converter.convert(name, tensor, conversion, task_graph, at, op)
            if (op.id, position) in self.converter.division.rescaled:
                name = self.converter.times_mini_batches(name, tensor, task_graph, at)
        return name

    def value(self, tensor: int, task_graph: int, at: Coordinates, shard: int = 0) -> str:
        """Name of a tensor as a clone or copy of ``task_graph`` sees it (under ``split``: its device ``shard``)."""
        context = self.context
        if tensor in context.gathered.tensors:
            return context.gathered.tensors[tensor]
        clone = at if isinstance(at, Clone) else at.clone
        number = self._taken.get((task_graph, clone, tensor))
        if number is None:
            return self._within(tensor, task_graph, at)
        call = context.program.calls[number]
        step = context.program.step_of(call)
        if step == DIVIDE:
            return self.recipes.of(self.recipes.lowering.input_part(tensor, task_graph, clone))
        if step == BRIDGE:
            return self.recipes.of(self.recipes.lowering.bridges.bridged(tensor, task_graph, call.clone, shard))
        return context.tensor_in(tensor, Copy(call.clone.g, call.clone.r) if step == ONCE else call.clone)

    def _within(self, tensor: int, task_graph: int, at: Coordinates) -> str:
        """A tensor that comes from no call: the clone or copy has its own, or it is from outside the program."""
        context, producer = self.context, self.context.graph.producer(tensor)
        if producer.id in context.region.drawn_once:
            return context.tensor_in(tensor, ORIGINAL)
        if context.region.contains(producer) and producer.id not in context.variables:
            if isinstance(at, Clone) and producer.id not in context.region.batch_level:
                at = context.copy_for(context.task_graph_of(producer), at)  # only a conversion of an operand reads it here
            return context.tensor_in(tensor, at)
        if at.g == ALL and tensor in self.inputs.sources:
            return self.converter.input_of_all(tensor, task_graph)
        return self.variable(producer, at) or self.inputs.whole(tensor, self.converter.division.mini_batch(at))

    def variable(self, producer: Op, at: Coordinates) -> Optional[str]:
        """The copy of a variable that a clone or copy reads; None: ``producer`` is not a variable that may have copies."""
        task_graph = self.context.variables.get(producer.id)
        return None if task_graph is None else self.variable_copies[producer.id, self.context.copy_for(task_graph, at)]
