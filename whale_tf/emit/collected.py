"""Values of tensors in EPL's collections (:mod:`whale_tf.epl.collections`): what every clone would have of them if its examples
were all, put together as the collection says::

    clones          0.5   0.7   0.6   0.2         (micro-batches and replicas)
    global mean     0.5
    global sum      2.0
    global concat   their rows one after the other
    local ...       the same of the first replica's micro-batches
"""

from __future__ import annotations

from typing import List, Set, Tuple

from whale_tf.communicators import Communicator, Member
from whale_tf.emit.context import Context
from whale_tf.emit.convert import Converter
from whale_tf.errors import UnsupportedOpError
from whale_tf.ir.batch_axis import Reduce, Scale
from whale_tf.ir.layout import exponents_of
from whale_tf.ir.walk import reached


class Collected:
    """Stages such values."""

    def __init__(self, context: Context, converter: Converter, communicator: Communicator) -> None:
        self._context, self._converter, self._communicator = context, converter, communicator

    def value(self, tensor: int, collection: str, is_together: bool) -> str:
        """The value of a tensor in one of EPL's collections (:mod:`whale_tf.epl.collections`): what every clone would have of it
        if its examples were all, joined as the collection says.

        Args:
            collection: ``global_mean_objects`` and so on.
            is_together: the other processes run it, too.

        Raises:
            UnsupportedOpError: there is no such value.
        """
        context, nodes, communicator = self._context, self._converter.nodes, self._communicator
        graph, dtype, device = context.graph, context.dtype(tensor), context.host
        level, kind, _ = collection.split("_")
        name, scope = graph.tensor_name(tensor), context.name(collection, context.flat(tensor))
        values, factor = self._of_clones(tensor, level == "local"), self._shares_whole(tensor, name, collection)
        count = len(values)
        if not values:  # one value for all clones
            count, is_sum = self._clones_behind(tensor, name, collection)
            values, factor = [name], count if kind == "sum" and not is_sum else 1
            if kind == "mean" and not is_sum:
                count = 1
        if kind == "concat" and not graph.tensors[tensor].shape:
            raise UnsupportedOpError(f"tensor {name!r} is in the collection {collection!r}, but is a scalar; use a collection of "
                                     "means or sums, or leave it out of collections, which gives the local script's value")
        is_everywhere = level == "global" and is_together and communicator.processes > 1
        if kind == "concat":
            here = nodes.concat(values, 0, scope + "/here", dtype, device)
            rank = len(context.static_shape(tensor))
            return communicator.gather_across(Member(here, device), rank, scope, dtype, False) if is_everywhere else here
        total = nodes.add_n(values, scope + "/here", dtype, device)
        if is_everywhere:
            total, count = communicator.across(Member(total, device), "sum", scope, dtype), count * communicator.processes
        if dtype.is_floating:
            number = nodes.const(factor / count if kind == "mean" else float(factor), scope + "/factor", dtype, device)
            return nodes.binary("Mul", total, number, scope + "/" + kind, dtype, device)
        number = nodes.const(count if kind == "mean" else factor, scope + "/factor", dtype, device)
        return nodes.binary("FloorDiv" if kind == "mean" else "Mul", total, number, scope + "/" + kind, dtype, device)

    def _of_clones(self, tensor: int, only_first: bool) -> List[str]:
        """What each of this process's clones has of a tensor, or those of the first replica; none if it is computed once."""
        context, converter = self._context, self._converter
        producer, is_input = context.graph.producer(tensor), tensor in converter.inputs.sources
        if not is_input and (producer.id not in context.region.batch_level or producer.id in context.region.sections):
            return []
        task_graph = 0 if is_input else context.task_graph_of(producer)
        every = context.clones(task_graph)
        chosen = [clone for clone in every if not only_first or (clone.g, clone.r) == (every[0].g, every[0].r)]
        if is_input and not context.is_in_place:
            return [converter.inputs.part(tensor, task_graph, clone) for clone in chosen]
        return [context.tensor_in(tensor, clone) for clone in chosen]

    def _clones_behind(self, tensor: int, name: str, collection: str) -> Tuple[int, bool]:
        """Of a value that is computed once, from what all clones have: how many these are, and whether it is a sum over examples,
        and no mean.

        Raises:
            UnsupportedOpError: it is not known what a clone would have of it.
        """
        context, graph, region = self._context, self._context.graph, self._context.region
        level, kind, _ = collection.split("_")
        sources = self._converter.inputs.sources
        is_behind = {operand: graph.tensors[operand].op in region.batch_level or operand in sources
                     for operand in range(len(graph.tensors))}
        outside = reached([graph.tensors[tensor].op], lambda index: (
            graph.tensors[operand].op for operand in graph.ops[index].inputs if not is_behind[operand]))
        types: Set[str] = {graph.ops[index].type for index in outside}
        task_graphs = {0 if operand in sources else context.task_graph_of(graph.producer(operand))
                 for index in outside for operand in graph.ops[index].inputs if is_behind[operand]}
        clones = list(map(context.clones, task_graphs))
        count = max(map(len, clones), default=1)
        replicas = max((len({(clone.g, clone.r) for clone in own}) for own in clones), default=1)
        is_mean, is_sum = "Mean" in types or any("Div" in each for each in types), "Sum" in types
        if (kind == "concat" or is_mean or is_sum or not task_graphs) and (level == "global" or replicas == 1):
            return count, is_sum and not is_mean
        raise UnsupportedOpError(
            f"tensor {name!r} is in the collection {collection!r}, but is computed once from all examples, and a replica's part "
            "of it is not known; use a collection of the tensor from which it is computed, or leave it out of collections, which "
            "gives the local script's value")

    def _shares_whole(self, tensor: int, name: str, collection: str) -> int:
        """The number of clones, of all processes, if each has its share of a mean over all examples; 1 if it has its own value.
        So it is behind a division by the whole batch's count, as in ``tf.losses``.

        Raises:
            UnsupportedOpError: each has its own value of one term, and its share of another.
        """
        region, graph = self._context.region, self._context.graph
        producer = graph.producer(tensor)
        if producer.id not in region.batch_level or not region.batch.layout(tensor).is_partial:
            return 1
        clones = len(self._context.clones(self._context.task_graph_of(producer))) * self._communicator.processes
        is_sum = not exponents_of(region.batch.layout(tensor).power)
        shared: List[str] = []
        seen, stack = {producer.id}, [producer.id]
        while stack:
            op = graph.ops[stack.pop()]
            for position, operand in enumerate(op.inputs):
                steps = region.batch.conversions.get((op.id, position), ())
                if is_sum and position and "Div" in op.type and any(
                        isinstance(step, Reduce) and step.kind == "sum" for step in steps):
                    return clones
                shared += [graph.tensor_name(operand) for step in steps if isinstance(step, Scale) and exponents_of(step.power)]
                before = graph.producer(operand).id
                if operand in region.batch.layouts and region.batch.layout(operand).is_partial and before not in seen:
                    seen.add(before)
                    stack.append(before)
        if shared and clones > 1:
            raise UnsupportedOpError(
                f"tensor {name!r} is in the collection {collection!r}, but adds {shared[0]!r} to a sum over examples, and each "
                "clone adds only its share of it; use collections of the terms, or leave it out of collections, which gives the "
                "local script's value")
        return 1
