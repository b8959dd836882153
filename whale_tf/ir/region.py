"""Which ops run how often: the granularity of every op of the parallel region.

The region is the FORWARD and BACKWARD ops, all that a gradient or a differentiated loss is computed from.  In it::

    batch level   depends on an example of the mini-batch: one clone per model replica, micro-batch and replica
    step level    does not (variables' values, constants, weight decay): once per step on each replica's devices

Ops outside the region run once, on merged values.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Sequence, Set, Tuple

from whale_tf.ir.batch_axis import BatchAxis, Reduce
from whale_tf.ir.graph import Op, OpGraph, Phase

FRAME_ENTRIES = ("Enter", "RefEnter")


class Region(NamedTuple):
    """Attributes:
    ops: numbers of the region's ops, in graph order.
    batch_level: those that are cloned for every micro-batch.
    task_graph: TaskGraph of every op of the graph (-1 outside the region).
    late: batch-level ops that are computed from a gradient: the backward step of the schedule.
    batch: what the batch-axis analysis found.
    """

    graph: OpGraph
    ops: Tuple[int, ...]
    batch_level: Set[int]
    task_graph: Sequence[int]
    late: Set[int]
    early: Set[int]
    batch: BatchAxis

    def contains(self, op: Op) -> bool:
        return op.phase in (Phase.FORWARD, Phase.BACKWARD)

    def of_task_graph(self, index: int, batch_level: bool) -> List[Op]:
        """The region's ops of one TaskGraph on one level, in graph order."""
        return [
            self.graph.ops[i]
            for i in self.ops
            if self.task_graph[i] == index and (i in self.batch_level) == batch_level
        ]

    def leaving(self) -> Dict[int, List[Tuple[int, int]]]:
        """Batch-level tensors used outside the region: tensor -> (op number, input position) of those uses."""
        result: Dict[int, List[Tuple[int, int]]] = {}
        for index in self.ops:
            if index not in self.batch_level:
                continue
            for tensor in self.graph.ops[index].outputs:
                outside = [
                    (op, position)
                    for op, position in self.graph.consumers(tensor)
                    if not self.contains(self.graph.ops[op])
                ]
                if outside:
                    result[tensor] = outside
        return result


def find_region(graph: OpGraph, task_graph: Sequence[int], batch: BatchAxis, sources: Sequence[int]) -> Region:
    """Split the region's ops into batch level and step level (see the module's docstring)."""
    region = [op for op in graph.ops if op.phase in (Phase.FORWARD, Phase.BACKWARD)]
    seeds = {op for op, _ in batch.conversions} | {op for op, _ in batch.localise} | set(batch.own_seed)
    frames = _frames(graph)
    batch_level = _reachable(graph, region, set(sources), seeds)
    while True:  # a while loop runs as a whole, on one level
        touched = {frames[i] for i in batch_level if i in frames}
        whole = {i for i, frame in frames.items() if frame in touched and i not in batch_level}
        if not whole:
            break
        batch_level = _reachable(graph, region, set(sources), seeds | batch_level | whole)
    late = _reachable(
        graph,
        [op for op in region if op.id in batch_level],
        set(),
        {op.id for op in region if op.phase is Phase.BACKWARD and op.id in batch_level},
    )
    return Region(graph, tuple(op.id for op in region), batch_level, task_graph, late, _early(graph, batch, batch_level), batch)


def _early(graph: OpGraph, batch: BatchAxis, batch_level: Set[int]) -> Set[int]:
    """Batch-level ancestors of every tensor that is combined over all clones."""
    stack = [
        graph.tensors[graph.ops[op].inputs[position]].op
        for (op, position), conversions in batch.conversions.items()
        if any(isinstance(conversion, Reduce) for conversion in conversions)
    ]
    found: Set[int] = set()
    while stack:
        index = stack.pop()
        if index in batch_level and index not in found:
            found.add(index)
            stack.extend(graph.predecessors(graph.ops[index]))
    return found


def _reachable(graph: OpGraph, ops: Sequence[Op], tensors: Set[int], seeds: Set[int]) -> Set[int]:
    """Ops among ``ops`` that are seeds or follow, by data or control, from a seed or one of the tensors."""
    found = {op.id for op in ops if op.id in seeds}
    changed = True
    while changed:  # a second round only for the back edges of while loops
        changed = False
        for op in ops:
            if op.id not in found and (
                any(t in tensors for t in op.inputs) or any(p in found for p in graph.predecessors(op))
            ):
                found.add(op.id)
                changed = True
        changed = changed and any(op.type == "NextIteration" for op in ops)
    return found


def _frames(graph: OpGraph) -> Dict[int, str]:
    """Name of the outermost v1 while loop that each op inside one belongs to."""
    frames: Dict[int, str] = {}
    stack = [(op.id, str(op.attrs["frame_name"])) for op in graph.ops if op.type in FRAME_ENTRIES]
    successors: Dict[int, List[int]] = {}
    if stack:
        for op in graph.ops:
            for source in graph.predecessors(op):
                successors.setdefault(source, []).append(op.id)
    owner: Dict[str, str] = {}
    while stack:
        index, frame = stack.pop()
        if index in frames:
            if frames[index] != frame:  # an Enter inside another loop: one nest
                owner.setdefault(frame, frames[index])
            continue
        frames[index] = frame
        if graph.ops[index].type in ("Exit", "RefExit"):
            continue
        stack.extend(
            (successor, frame)
            for successor in successors.get(index, ())
            if graph.ops[successor].type not in FRAME_ENTRIES
        )

    def root(frame: str) -> str:
        while frame in owner and owner[frame] != frame:
            frame = owner[frame]
        return frame

    return {index: root(frame) for index, frame in frames.items()}
