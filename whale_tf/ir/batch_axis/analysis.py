"""The analysis: sweep, promote, collect the result."""
from __future__ import annotations

from typing import Container, Dict, Mapping, Optional, Set

from whale_tf.ir.batch_axis import control_flow, cutting, functional, positions, reshaping
from whale_tf.ir.batch_axis.promote import promote
from whale_tf.ir.batch_axis.propagate import Propagation
from whale_tf.ir.batch_axis.result import BatchAxis
from whale_tf.ir.batch_axis.state import Given, Options
from whale_tf.ir.graph import OpGraph
from whale_tf.ir.layout import sharded
from whale_tf.ir.traits import traits
from whale_tf.ir.units import whole_loops

HANDLER_MODULES = (control_flow, cutting, functional, positions, reshaping)  # imported because they register handlers


def analyse(graph: OpGraph, sources: Mapping[int, int], scope: Optional[Container[int]] = None,
            options: Options = Options()) -> BatchAxis:
    """Propagate the batch axis through a graph.

    Args:
        sources: batch input tensors -> their batch dimension.
        scope: ids of the ops that are cloned; None: all.  Everything else is computed once, so it is replicated.
        options: see :class:`Options`.
    """
    stated = {graph.tensor(name): layout for name, layout in options.stated.items() if name.partition(":")[0] in graph}
    seeds = {tensor: Given(stated.get(tensor, sharded(dim))) for tensor, dim in sources.items()}
    seeds.update((tensor, Given(layout)) for tensor, layout in stated.items() if tensor not in sources)
    plain = {tensor: dim for tensor, dim in sources.items() if seeds[tensor].layout.blocks == (1,)}
    together: Dict[int, str] = dict.fromkeys(options.together, "fewer bytes are transferred if it runs with the section")
    while True:
        state = Propagation(graph, seeds, static_batch(graph, plain), options, scope, dict(sources))
        state.together = together
        state.sweep()
        promote(state)
        more = _whole_loops(state).difference(together)
        if not more:
            return state.finish()
        together.update(dict.fromkeys(more, "its loop runs over all examples"))


def _whole_loops(state: Propagation) -> Set[int]:
    """Ops of version 1 loops that have to run whole because some of them cannot be divided, or not exactly."""
    if not state.options.sections:
        return set()
    causes = state.looped.union(unknown.op for unknown in state.result.unknown.values())
    units = whole_loops(state.graph, state.scope) if causes else []
    return {index for unit in units if not unit.isdisjoint(causes) and not any(
        traits(state.graph.ops[index].type).is_write for index in unit) for index in unit}


def static_batch(graph: OpGraph, sources: Mapping[int, int]) -> Optional[int]:
    """The number of examples by the static shapes of the sources; None if these leave it open."""
    for tensor, dim in sources.items():
        shape = graph.tensors[tensor].shape
        if shape is not None and dim < len(shape) and shape[dim] is not None:
            return shape[dim]
    return None
