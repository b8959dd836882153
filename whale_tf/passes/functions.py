"""Cuts a called backward body into functions, so that what is no longer needed does not fill the memory.

A function's arguments live until it ends, and its results appear at that time.  In an inlined step, what the forward pass left is
freed after its last reader, and a weight's gradient is added to the sum of the previous micro-batches as soon as it is there::

    one function      layer 2, layer 1, layer 0 │ free 2, 1, 0; add 2, 1, 0
    two functions     layer 2, layer 1 │ free 2, 1; add 2, 1
                                       │ layer 0 │ free 0; add 0

A function ends when it holds more needlessly than there is room for: a share of what an inlined step holds, and what the called
one saves, because it repeats cheap ops, for the other micro-batches in flight.
"""

from __future__ import annotations

from typing import AbstractSet, Dict, List, Mapping, Sequence, Tuple

from whale_tf.ir.graph import OpGraph
from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes.communicate import pulls_each, takes_own
from whale_tf.plan import Plan
from whale_tf.profiler.op_cost import tensor_bytes
from whale_tf.program import Body

SHARE = 0.1  # of what an inlined step holds: what a function may hold needlessly
LEAST = 1 << 15  # bytes that a function may hold needlessly in any case, since each further one takes time
EXAMPLES = 8  # in a clone's part of a micro-batch, if the graph leaves their number open


def in_functions(step: TrainingStep, plan: Plan, sizes: OpGraph, inlined: Body, called: Body,
                 donated: AbstractSet[int] = frozenset()) -> Body:
    """``called`` with as few functions as the room allows.

    Args:
        sizes: the step's graph with a number for every size (1 for those that it leaves open).
        inlined: the same body as an inlined step runs it.
        called: the body as one function.
        donated: tensors that are no arguments, because the forward body donates them.
    """
    made = _gradient_bytes(step, sizes, called)
    if called.reads or not made:  # where variables are read anew, a value is sent for one call
        return called
    before, taken = (taken_bytes(step, plan, sizes, body) for body in (inlined, called))
    in_flight = plan.task_graphs[called.task_graph].warmup
    room = _room(plan, in_flight, _total(made), _total(before), _total(taken), in_flight - 1)
    last = {tensor: op for op in called.runs for tensor in step.graph.ops[op].inputs}
    late = dict(made)
    for tensor, size in taken.items():
        if tensor not in donated:
            late[last[tensor]] = late.get(last[tensor], 0.0) + size
    return called._replace(functions=tuple(_cut(called.runs, late, room)))


def fits_in_one(step: TrainingStep, plan: Plan, sizes: OpGraph, backward: Body, joined: Body) -> bool:
    """Whether a backward body that was joined with its forward body needs no cut.  Its ops free what the forward ops leave one
    after the other, so gradients may take that room."""
    made = _total(_gradient_bytes(step, sizes, joined))
    before, taken = (_total(taken_bytes(step, plan, sizes, body)) for body in (backward, joined))
    in_flight = plan.task_graphs[joined.task_graph].warmup
    return made + taken <= _room(plan, in_flight, made, before, taken, in_flight)


def _room(plan: Plan, in_flight: int, made: float, before: float, taken: float, spared: int) -> float:
    """Bytes that a function may hold needlessly.

    Args:
        in_flight: micro-batches whose activations its TaskGraph holds.
        made: bytes of the gradients that it makes.
        before, taken: bytes that an inlined body and the called one take from other clones' calls.
        spared: micro-batches of which the called step holds less than the inlined one.
    """
    sums = made if plan.num_micro_batch > 1 else 0.0
    return max(LEAST, SHARE * (sums + in_flight * before) + spared * (before - taken))


def _total(sizes: Mapping[int, float]) -> float:
    return sum(sizes.values())


def _cut(ops: Sequence[int], late: Mapping[int, float], room: float) -> List[Tuple[int, ...]]:
    """Ops in order, cut after those with which a function holds more than ``room`` bytes needlessly.

    Args:
        late: op -> bytes that an inlined step would free after it.
    """
    found: List[Tuple[int, ...]] = []
    start, held, left = 0, 0.0, sum(op in late for op in ops)
    for place, op in enumerate(ops, 1):
        if op in late:
            held, left = held + late[op], left - 1
            if held > room and left:
                found.append(tuple(ops[start:place]))
                start, held = place, 0.0
    return found + [tuple(ops[start:])]


def _gradient_bytes(step: TrainingStep, sizes: OpGraph, body: Body) -> Dict[int, float]:
    """Op of a body -> bytes of the gradients of variables that it makes."""
    own = set(body.runs)
    found: Dict[int, float] = {}
    for tensor in dict.fromkeys(tensor for tensor, _ in step.gradients):
        op = step.graph.tensors[tensor].op
        if op in own:
            found[op] = found.get(op, 0.0) + tensor_bytes(sizes, tensor)
    return found


def taken_bytes(step: TrainingStep, plan: Plan, sizes: OpGraph, body: Body) -> Dict[int, float]:
    """Tensor that one clone's call of a body takes from other clones' calls -> its bytes."""
    batch, task = step.region.batch, plan.task_graphs[body.task_graph]
    parts = plan.num_micro_batch * task.replica_count * plan.num_model_replicas
    parts //= plan.num_model_replicas * pulls_each(plan) if takes_own(step, plan) else 1
    share = EXAMPLES if batch.batch is None else 1.0 / parts
    return {tensor: share * tensor_bytes(sizes, tensor) for tensor in body.inputs
            if tensor in batch.layouts and batch.layout(tensor).is_sharded}
