"""How much of a step's arithmetic and of its parameters several devices really share, and a warning if it is little.

An op is divided if every clone computes its own examples, or if ``wh.split`` divides it.  It is not if it runs once for all
examples (a section, or an op that depends on no example), on the first device of a ``split`` TaskGraph, or where a variable is
whose handle all clones take: the other devices then wait.  Only products and calls of functions count, which is where the time
of a step goes.

A parameter counts as divided if it has parts, or if a divided op reads it: every replica then uses it.
"""

from __future__ import annotations

from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Type

from whale_tf.errors import IdleError, IdleWarning
from whale_tf.ir.batch_axis.analysis import MOVED, WRITES
from whale_tf.ir.graph import LAYOUT_ATTR, LAYOUT_OF_ATTR, SHARD_ATTR, Op, Phase
from whale_tf.ir.region import Region
from whale_tf.ir.traits import CONDITIONALS, VARIABLES, traits
from whale_tf.ir.walk import reached
from whale_tf.plan import Estimate, Plan
from whale_tf.profiler.op_cost import known_flops

ASSUMED = 32  # examples, for sizes that the graph leaves open
LEAST = 0.5  # a smaller share warns


class Parameter(NamedTuple):
    """A trained variable or a part of one: its op, its TaskGraph, its bytes, the variable that it is a part of (empty: none), and
    its gradients."""

    variable: int
    task_graph: int
    bytes: int
    whole: str
    gradients: Tuple[int, ...]

    def is_summed(self, region: Region) -> bool:
        """Whether clones compute parts of its gradient, so that these are added up."""
        return any(region.graph.tensors[tensor].op not in region.sections for tensor in self.gradients)


class Divided(NamedTuple):
    """Attributes:
        flops: of the step's products, by op number.
        whole: those that are not divided.
        parameters: the step's parameters.
        kept_whole: those that are not divided.
        devices: number of devices that the plan uses.
        without: those that make none of the products: of a pipeline whose other stages have all of them, say.
    """

    flops: Dict[int, float]
    whole: Dict[int, float]
    parameters: Sequence[Parameter]
    kept_whole: Sequence[Parameter]
    devices: int
    without: Sequence[int] = ()

    @property
    def share(self) -> float:
        """Of the floating-point operations."""
        total = sum(self.flops.values())
        return 1.0 - sum(self.whole.values()) / total if total else 1.0


def divided(region: Region, plan: Plan, parameters: Sequence[Parameter]) -> Optional[Divided]:
    """None: the plan uses one device."""
    devices = {device for task in plan.task_graphs for row in task.devices for device in row}
    if len(devices) < 2:
        return None
    graph = region.graph
    rare = {index for index, reason in region.batch.whole.items() if reason == WRITES and _may_do_nothing(graph.ops[index])}
    counted = [op for op in map(graph.ops.__getitem__, region.ops)
               if rare.isdisjoint((op.id, op.forward)) and _computes(op)]
    flops = known_flops(graph, ASSUMED, counted)
    kept = [one for one in parameters if not one.whole and not _is_shared(region, plan, one)]
    inside = {op.id: _share_inside(op) for op in counted if op.body}
    whole = {op.id: flops[op.id] * (1.0 - inside.get(op.id, 0.0)) for op in counted
             if not (_is_divided(region, plan, op) or inside.get(op.id) == 1.0)}
    makers = {device for op in counted if flops[op.id]
              for device in _makers(region, plan, op, op.id in whole and not inside.get(op.id))}
    return Divided(flops, whole, parameters, kept, len(devices), sorted(devices - makers))


def _makers(region: Region, plan: Plan, op: Op, is_whole: bool) -> Iterator[int]:
    """Devices that run an op or its clones."""
    for row in plan.task_graphs[region.task_graph[op.id]].devices:
        yield from row[:1] if is_whole else row


def _computes(op: Op) -> bool:
    return bool(op.body) or traits(op.type).is_product


def _share_inside(op: Op) -> float:
    """The share of a loop's arithmetic that ``wh.split`` divides inside of its body."""
    total = parts = 0.0
    for body in (op.body or {}).values():
        computing = [inner for inner in body.ops if _computes(inner)]
        if any(SHARD_ATTR in inner.attrs for inner in computing):
            flops = known_flops(body, ASSUMED, computing)
            total += sum(flops.values())
            parts += sum(flops[inner.id] for inner in computing if SHARD_ATTR in inner.attrs)
    return parts / total if total else 0.0


def _may_do_nothing(op: Op) -> bool:
    """Whether a condition has a branch without arithmetic: its other branch, which writes a variable, runs once in training."""
    return op.type in CONDITIONALS and any(not any(map(_computes, branch.ops)) for branch in (op.body or {}).values())


def _is_of_split(plan: Plan, number: int) -> bool:
    """Whether the first device of a TaskGraph does all that ``wh.split`` does not divide."""
    task = plan.task_graphs[number]
    return task.strategy == "split" and task.device_count > 1 and task.batch_of is None


def _is_shared(region: Region, plan: Plan, parameter: Parameter) -> bool:
    """Whether a divided op reads the parameter, directly or through ops that run once per step (reads, casts)."""
    graph = region.graph
    if _is_of_split(plan, parameter.task_graph):
        return False

    def readers(index: int) -> Iterator[int]:
        for tensor in graph.ops[index].outputs if index not in region.batch_level else ():
            yield from (user for user, _ in graph.consumers(tensor) if graph.ops[user].phase in (Phase.FORWARD, Phase.BACKWARD))

    return any(index in region.batch_level and _is_divided(region, plan, graph.ops[index])
               for index in reached([parameter.variable], readers))


def _is_divided(region: Region, plan: Plan, op: Op) -> bool:
    if SHARD_ATTR in op.attrs and not op.body:  # of a loop, what its body computes counts
        return True
    if _is_of_split(plan, region.task_graph[op.id]):
        return False
    return op.id in region.batch_level and op.id not in region.sections and not _is_bound(region, plan, op)


def _is_bound(region: Region, plan: Plan, op: Op) -> bool:
    """Whether all clones of a loop, condition or call run where a variable is that replicas share, whose handle they take."""
    graph, task = region.graph, plan.task_graphs[region.task_graph[op.id]]
    is_shared = task.variables == "shared" and len({device for row in task.devices for device in row}) > 1
    return bool(op.body) and is_shared and any(
        graph.producer(tensor).type in VARIABLES and graph.tensors[tensor].dtype == "resource" for tensor in op.inputs)


def told(found: Divided) -> str:
    """One line of ``wh.explain()``; empty if the graph shows neither arithmetic nor parameters of known sizes."""
    texts = []
    if any(found.flops.values()):
        texts.append(f"{100 * found.share:.3g}% of the floating-point operations in the step's products")
    total = sum(one.bytes for one in found.parameters)
    if total:
        kept, parts = (sum(one.bytes for one in some) for some in (
            found.kept_whole, [one for one in found.parameters if one.whole]))
        in_parts = f" ({100 * parts / total:.3g}% are in parts)" if parts else ""
        texts.append(f"{100 * (1 - kept / total):.3g}% of the parameter bytes{in_parts}")
    return f"Divided over {found.devices} devices: {', '.join(texts)}." if texts else ""


def tell_idle(region: Region, plan: Plan, parameters: Sequence[Parameter], wish: str,
              warn: Callable[[str, Type[Warning]], None]) -> None:
    """Warns if less than half of a step's arithmetic is divided, or less than half of the parameters that ``wh.split`` was to
    divide.

    Raises:
        IdleError: ``wish`` is ``error``.
    """
    found = divided(region, plan, parameters) if wish != "allow" else None
    text = "" if found is None else _idle(region, plan, found) if found.share < LEAST else _whole(region, plan, found)
    if text and wish == "error":
        raise IdleError(text)
    if text:
        warn(text, IdleWarning)


def _idle(region: Region, plan: Plan, found: Divided) -> str:
    largest = region.graph.ops[max(found.whole, key=lambda index: found.whole[index])]
    return (f"the plan uses {found.devices} devices, but {100 * found.share:.3g}% of the step's floating-point operations are "
            f"divided over them; the others wait while one computes {len(found.whole)} op(s), such as {largest.name!r} "
            f"({largest.type}). {_cause(region, plan, largest)}; set on_idle to 'allow' if this is intended")


def _whole(region: Region, plan: Plan, found: Divided) -> str:
    """The parameters that ``wh.split`` leaves whole, if they are most of those under it; empty: they are not.  A search decides
    by time what it divides."""
    tasks = plan.task_graphs
    split = [one for one in found.parameters if "split" in (
        task.strategy for task in (tasks[one.task_graph], tasks[tasks[one.task_graph].batch_of or one.task_graph]))]
    kept = [one for one in found.kept_whole if one in split]
    total, left = sum(one.bytes for one in split), sum(one.bytes for one in kept)
    if plan.estimate.search != Estimate().search or not kept or left <= (1 - LEAST) * total:
        return ""
    largest = max(kept, key=lambda one: one.bytes)
    name, layout = region.graph.ops[largest.variable].name, region.graph.ops[largest.variable].attrs.get(LAYOUT_OF_ATTR)
    if layout is not None:
        return (f"the layout map divides {100 * (1 - left / total):.3g}% of the parameter bytes; the first device keeps "
                f"{len(kept)} variable(s) whole, the largest because of {layout} ({largest.bytes} bytes); divide it over the "
                "model axis, or set on_idle to 'allow' if this is intended")
    return (f"wh.split divides {100 * (1 - left / total):.3g}% of the parameter bytes under it; the first device keeps "
            f"{len(kept)} variable(s) whole, such as {name!r} ({largest.bytes} bytes) of TaskGraph "
            f"{tasks[largest.task_graph].name!r}. wh.explain() says why ops are not divided; put them into a wh.replicate block, "
            "or set on_idle to 'allow' if this is intended")


def _cause(region: Region, plan: Plan, op: Op) -> str:
    graph, batch = region.graph, region.batch
    if plan.task_graphs[region.task_graph[op.id]].strategy == "split" and op.id in region.batch_level:
        if any(LAYOUT_ATTR in one.attrs for one in graph.ops):
            return "The layout map divides no variable that it reads: give one a layout that names the model axis"
        return "wh.split finds no way to divide it: wh.explain() says why; put it into a wh.replicate block"
    if _is_bound(region, plan, op):
        return ("It takes the handle of a variable that all replicas share, and more than the value can tell it: whether it is "
                "initialised, say. Let it take variable.read_value()")
    begins = {index for index, reason in batch.whole.items() if reason != MOVED}  # the others only follow these
    before = reached([op.id], lambda index: region.sections.intersection(graph.predecessors(graph.ops[index])))
    reasons: List[int] = sorted(begins & before or begins)
    if op.id in region.sections and reasons:
        first = graph.ops[reasons[0]]
        return (f"All examples are needed together from {first.name!r} ({first.type}) on: {batch.whole[first.id]}; compute it in "
                "the input pipeline, or say with wh.batch_axis(tensor, dim) which dimension of its result is the batch")
    return ("It follows from no input that has a dimension of examples: feed the mini-batch through a placeholder or dataset, or "
            "say with wh.batch_axis(tensor, dim) which dimension of an input is the batch")
