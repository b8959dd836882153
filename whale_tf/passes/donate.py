"""Chooses what a called forward body donates to the bodies of its backward pass.

The caller of a function holds its arguments until it ends, so no op in the function can write a result over one of them.  A
tensor that the forward function puts into an array, and from which the backward function takes it, has no other owner::

    argument    relu held ──────────────────────────┐         donated    relu ──> array
                └──> backward { back = dy * relu }  │ freed              array ──> backward { back over relu }

Its last reader in the backward pass frees it or overwrites it, as in an inlined step.  A tensor that several functions read is
in the array once for each of them.  JAX calls the buffer of such an argument donated.
"""

from __future__ import annotations

from typing import AbstractSet, FrozenSet, Mapping, Sequence, Set

from whale_tf.ir.graph import OpGraph
from whale_tf.ir.region import Region
from whale_tf.plan import TaskGraphPlan
from whale_tf.program import Body

LEAST = 1 << 14  # bytes; a smaller tensor takes less time as an argument than it may save
TYPES = ("bfloat16", "float16", "float32", "float64")  # for which devices of any kind can put tensors into an array


def donatable(graph: OpGraph, task: TaskGraphPlan, forward: Body, taken: Mapping[int, float]) -> FrozenSet[int]:
    """Tensors that a TaskGraph's forward body may donate: those that it makes or takes, and that are large enough.

    Args:
        taken: tensor that a call of the backward body takes from other clones' calls -> its bytes.
    """
    if task.xla:  # a compiled function has no arrays of its caller
        return frozenset()
    own = {tensor for op in forward.runs for tensor in graph.ops[op].outputs}.union(forward.inputs)
    return frozenset(tensor for tensor, size in taken.items()
                     if tensor in own and size >= LEAST and graph.tensors[tensor].dtype in TYPES)


def donate(region: Region, body: Body, donated: AbstractSet[int]) -> Body:
    """A backward body whose functions get the tensors that they read among ``donated`` as donations."""
    return body._replace(donated=tuple(
        (tensor, place) for place, ops in enumerate(body.functions) for tensor in sorted(_read(region, ops) & donated)))


def _read(region: Region, ops: Sequence[int]) -> Set[int]:
    """Tensors whose values ops of a clone read.  They do not where the clone has a number of its own, or the mini-batch's value,
    in their place."""
    others = region.batch.combined().union(region.batch.localise)
    return {tensor for op in ops for position, tensor in enumerate(region.graph.ops[op].inputs) if (op, position) not in others}
