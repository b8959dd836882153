"""How much of a step's arithmetic really runs on several devices, and a warning if it is little.

An op is divided if every clone computes its own examples, or if ``wh.split`` divides it.  It is not if it runs once for all
examples (a section, or an op that depends on no example), or on the first device of a ``split`` TaskGraph: the other devices then
wait.  Only contractions and calls of functions count, which is where the time of a step goes.
"""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Optional, Type

from whale_tf.errors import IdleError, IdleWarning
from whale_tf.ir.graph import SHARD_ATTR, Op
from whale_tf.ir.region import Region
from whale_tf.ir.traits import traits
from whale_tf.plan import Plan
from whale_tf.profiler.op_cost import known_flops

ASSUMED = 32  # examples, for sizes that the graph leaves open
LEAST = 0.5  # a smaller share warns


class Divided(NamedTuple):
    """Attributes:
        flops: of the step's contractions, by op number.
        whole: those that are not divided.
        devices: number of devices that the plan uses.
    """

    flops: Dict[int, float]
    whole: Dict[int, float]
    devices: int

    @property
    def share(self) -> float:
        return 1.0 - sum(self.whole.values()) / sum(self.flops.values())


def divided(region: Region, plan: Plan) -> Optional[Divided]:
    """None: the plan uses one device, or the graph does not show any arithmetic."""
    devices = {device for task in plan.task_graphs for row in task.devices for device in row}
    if len(devices) < 2:
        return None
    graph = region.graph
    counted = [op for op in map(graph.ops.__getitem__, region.ops) if op.body or traits(op.type).is_contraction]
    flops = known_flops(graph, ASSUMED, counted)
    if not any(flops.values()):
        return None
    return Divided(flops, {op.id: flops[op.id] for op in counted if not _is_divided(region, plan, op)}, len(devices))


def _is_divided(region: Region, plan: Plan, op: Op) -> bool:
    if SHARD_ATTR in op.attrs:
        return True
    task = plan.task_graphs[region.task_graph[op.id]]
    if task.strategy == "split" and task.device_count > 1 and task.batch_of is None:
        return False
    return op.id in region.batch_level and op.id not in region.sections


def told(found: Divided) -> str:
    """One line of ``wh.explain()``."""
    return (f"Divided over {found.devices} devices: {100 * found.share:.3g}% of the floating-point operations in the step's "
            "products.")


def tell_idle(region: Region, plan: Plan, wish: str, warn: Callable[[str, Type[Warning]], None]) -> None:
    """Warns if less than half of a step's arithmetic is divided.

    Raises:
        IdleError: ``wish`` is ``error``.
    """
    found = divided(region, plan) if wish != "allow" else None
    if found is None or found.share >= LEAST:
        return
    graph = region.graph
    largest = graph.ops[max(found.whole, key=lambda index: found.whole[index])]
    text = (f"the plan uses {found.devices} devices, but {100 * found.share:.3g}% of the step's floating-point operations are "
            f"divided over them; the others wait while one computes {len(found.whole)} op(s), such as {largest.name!r} "
            f"({largest.type}). {_cause(region, plan, largest)}; set on_idle to 'allow' if this is intended")
    if wish == "error":
        raise IdleError(text)
    warn(text, IdleWarning)


def _cause(region: Region, plan: Plan, op: Op) -> str:
    graph, batch = region.graph, region.batch
    if plan.task_graphs[region.task_graph[op.id]].strategy == "split" and op.id in region.batch_level:
        return "wh.split finds no way to divide it: wh.explain() says why; put it into a wh.replicate block"
    reasons: List[int] = sorted(batch.whole)
    if op.id in region.sections and reasons:
        first = graph.ops[reasons[0]]
        return (f"All examples are needed together from {first.name!r} ({first.type}) on: {batch.whole[first.id]}; compute it in "
                "the input pipeline, or say with wh.batch_axis(tensor, dim) which dimension of its result is the batch")
    return ("It follows from no input that has a dimension of examples: feed the mini-batch through a placeholder or dataset, or "
            "say with wh.batch_axis(tensor, dim) which dimension of an input is the batch")
