"""What each clone reads: its part of the inputs, its neighbours' activations, its own copy of the variables.

``Operands.of(op, position, clone)`` is the name of the tensor that input ``position`` of ``op`` reads in a clone; asking
stages whatever is missing: slices of the mini-batch, bridges between TaskGraphs, conversions of the batch axis.
Everything is staged once and shared.
"""

from __future__ import annotations

from typing import Dict, Optional, Tuple

from whale_tf.communicators import Communicator
from whale_tf.emit.bridge import Bridges
from whale_tf.emit.context import ORIGINAL, Clone, Context, Copy, Place
from whale_tf.emit.convert import Converter
from whale_tf.emit.division import Division
from whale_tf.emit.inputs import Inputs
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.graph import Op, Phase


class Operands:
    """See the module's docstring."""

    def __init__(
        self,
        context: Context,
        nodes: Nodes,
        division: Division,
        inputs: Inputs,
        variable_copies: Dict[Tuple[int, Copy], str],
        communicator: Communicator,
    ) -> None:
        self.context = context
        self.inputs = inputs
        self.variable_copies = variable_copies
        self.converter = Converter(context, nodes, division, inputs, communicator)
        self._bridges = Bridges(self.converter)

    def of(self, op: Op, position: int, place: Place) -> str:
        """Name of the tensor that input ``position`` of ``op`` reads in a clone (batch level) or copy (step level)."""
        tensor = op.inputs[position]
        home = self.context.home(op)
        name = self.value(tensor, home, place, self.context.shard(op))
        if isinstance(place, Clone):
            constant = self.context.region.batch.localise.get((op.id, position))
            if constant:
                return self.converter.localised(op, position, place)
            for conversion in self.context.region.batch.conversions.get((op.id, position), ()):
                name = self.converter.convert(name, tensor, conversion, home, place, op)
            if (op.id, position) in self.context.rescaled:
                name = self.converter.times_mini_batches(name, tensor, home, place)
        return name

    def value(self, tensor: int, task_graph: int, place: Place, shard: int = 0) -> str:
        """Name of a tensor as a clone or copy of ``task_graph`` sees it (under ``split``: its device ``shard``)."""
        context = self.context
        producer = context.graph.producer(tensor)
        if tensor in self.inputs.sources and isinstance(place, Clone):
            return self.inputs.part(tensor, task_graph, place)
        if producer.phase is Phase.INPUT or not context.region.contains(producer):
            return self.variable(producer, place) or self.inputs.whole(tensor, place.g)
        home = context.home(producer)
        if producer.id in context.region.batch.shared:
            return context.tensor_in(tensor, ORIGINAL)
        if producer.id not in context.region.batch_level:
            return self.variable(producer, place) or context.tensor_in(tensor, context.copy_for(home, place))
        if not isinstance(place, Clone):
            raise AssertionError(
                f"step-level op reads batch-level tensor {context.graph.tensor_name(tensor)!r}"
            )
        if home == task_graph or self._bridges.same_division(home, task_graph):
            return context.tensor_in(tensor, place)
        return self._bridges.bridge(tensor, home, task_graph, place, shard)

    def variable(self, producer: Op, place: Place) -> Optional[str]:
        """The copy of a variable that a place reads; None: ``producer`` is none of the variables that may have copies."""
        home = self.context.variables.get(producer.id)
        return None if home is None else self.variable_copies[producer.id, self.context.copy_for(home, place)]
