"""Chooses the tensors that a TaskGraph keeps from its forward to its backward pass; the others are recomputed.

A TaskGraph's forward ops are a row of segments, which can be cut between any two (``whale_tf.profiler.chain``).  At a cut, the
tensors that later forward ops read are kept.  The tensors that backward ops read inside a segment are either kept too, or dropped
and recomputed from the previous cut when the backward pass gets there::

    forward     [ segment 0 ] x1 [ segment 1 ] x2 [ segment 2 ]            kept: x1, x2, and the tensors in segment 2
    backward                     [ 1 again, 1' ]   [ 2' ]
                [ 0 again, 0' ]

With ``K`` micro-batches in flight, ``w`` the bytes kept at a cut and ``a`` those of a segment's tensors::

    memory  =  K (sum of w over cuts  +  sum of a over segments that are not dropped)  +  largest a of a dropped segment

*full* minimises memory.  *auto* minimises the time of recomputation, under the device's memory.  Both try bounds on the largest
dropped segment.  For each bound, dynamic programming over the cuts finds the best choice for a chain whose ops run at most twice
(Chen et al. 2016, section 4); memory is counted in 512 steps of the budget, rounded up.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from whale_tf.cluster import Cluster
from whale_tf.errors import ConfigError, InfeasibleError
from whale_tf.ir.graph import Op, Phase
from whale_tf.ir.region import Region, inseparable
from whale_tf.ir.traits import SHAPE_ONLY, Role, VariableUse, traits
from whale_tf.passes.outline import UNSENT
from whale_tf.passes.redo import Redo, waits
from whale_tf.passes.schedule import held
from whale_tf.plan import Plan
from whale_tf.profiler.chain import buffer_of, linear_order, needed_by_updates
from whale_tf.profiler.op_cost import OpCost, op_costs, tensor_bytes

NONE, FULL, AUTO = "none", "full", "auto"
STEPS = 512  # memory is counted in this many parts of the budget
MOST_CUTS = 64  # number of places in one TaskGraph to consider
BOUNDS = 24  # number of bounds on the largest dropped segment to try


class Readers:
    """The reads between the forward and the backward pass.

    Attributes:
        backward: backward ops that some update needs, and that read more than shapes.
        may: forward ops that give the same result again: no random numbers, state, loops, conditions or sections.
    """

    def __init__(self, region: Region) -> None:
        self.region, graph = region, region.graph
        needed = needed_by_updates(graph)
        self.backward = {index for index in region.late if index in needed and graph.ops[index].type not in SHAPE_ONLY}
        whole = {op for op, _ in region.batch.combined()}
        refused = whole.union(region.early, region.sections, region.late, region.batch.own_seed, *inseparable(region))
        self.may = {index for index in region.ops
                    if index in region.batch_level and index not in refused and _gives_the_same(region, graph.ops[index])}

    def wanted(self, task_graph: int) -> Set[int]:
        """Tensors of a TaskGraph's forward ops whose values its backward ops read, one per micro-batch.

        Backward ops of another TaskGraph read what its forward ops were sent: they would wait for this backward pass, which
        comes after their own.
        """
        region, graph = self.region, self.region.graph
        found = set()
        for index in self.backward:
            for tensor in graph.ops[index].inputs if region.task_graph[index] == task_graph else ():
                producer = graph.tensors[tensor].op
                if producer in region.batch_level and producer not in region.late \
                        and region.task_graph[producer] == task_graph and graph.ops[producer].phase is Phase.FORWARD:
                    found.add(tensor)
        return found


def _gives_the_same(region: Region, op: Op) -> bool:
    row = traits(op.type)
    if op.phase is not Phase.FORWARD or row.role is not Role.COMPUTE or row.state is not VariableUse.NONE:
        return False
    dtypes = [region.graph.tensors[tensor].dtype for tensor in (*op.inputs, *op.outputs)]
    return not op.control_inputs and not op.body and not any(d in UNSENT or d.endswith("_ref") for d in dtypes)


class Redone(NamedTuple):
    """``waits``: recomputed forward op -> the backward op that it waits for; ``wanted``: tensors of these ops that backward ops
    read from the recomputation."""

    waits: Dict[int, int]
    wanted: Tuple[int, ...]


def redone(readers: Readers, task_graph: int, kept: Set[int]) -> Redone:
    """The recomputation of a TaskGraph that keeps these tensors.

    Tensors that cannot be recomputed (of random ops, loops) are kept as well, or tensors that follow from them if those are
    smaller.  So are the tensors of ops that would have no gradient to wait for.
    """
    graph, region = readers.region.graph, readers.region
    wanted, kept = sorted(readers.wanted(task_graph)), set(kept)
    while True:
        redo = Redo(region, lambda op: op.id in readers.may and region.task_graph[op.id] == task_graph, lambda op: 0, kept)
        ops = redo.ops(wanted)
        found = waits(graph, ops, readers.backward)
        if found.keys() == ops:
            return Redone(found, tuple(t for t in wanted if graph.tensors[t].op in ops and t not in kept))
        kept.update(t for op in ops - found.keys() for t in graph.ops[op].outputs)


def kept_tensors(region: Region, plan: Plan, cluster: Cluster, mode: str, batch: int,
                 resident_bytes: Sequence[int], replicas: Optional[float] = None) -> Dict[int, Tuple[int, ...]]:
    """The tensors that each TaskGraph keeps.  TaskGraphs that need no recomputation are left out.

    Args:
        region: a region with the plan's TaskGraphs, whose graph has the static shapes of a mini-batch.
        mode: :data:`FULL` or :data:`AUTO`.
        batch: examples in that mini-batch.
        resident_bytes: bytes that a device of each TaskGraph holds in any case, for all TaskGraphs there.
        replicas: the model replicas that divide the mini-batch (:func:`whale_tf.passes.communicate.dividing`); None: all.

    Raises:
        InfeasibleError: a TaskGraph does not fit its devices even if it keeps as little as possible.
    """
    found: Dict[int, Tuple[int, ...]] = {}
    for number, row in rows_of(region, plan, cluster, batch, replicas).items():
        if mode == FULL:
            choice: Optional[Choice] = row.parts.smallest()
        else:
            task = plan.task_graphs[number]
            memory = min(cluster.devices[d].usable_bytes for devices in task.devices for d in devices)
            if row.parts.memory_without <= memory - resident_bytes[number]:
                continue
            choice = row.parts.fastest(memory - resident_bytes[number])
            if choice is None:
                raise InfeasibleError(
                    f"TaskGraph {task.name!r} needs {row.parts.smallest().memory + resident_bytes[number]:.0f} bytes on a device "
                    f"even if it keeps as little as possible, but its smallest device has {memory:.0f}; use more micro-batches, "
                    "more stages or replicas, or devices with more memory")
        assert choice is not None
        found[number] = row.tensors(choice)
    return found


def rows_of(region: Region, plan: Plan, cluster: Cluster, batch: int,
            replicas: Optional[float] = None) -> Dict[int, TaskGraphRow]:
    """The TaskGraphs that hold anything for their backward pass.  See :func:`kept_tensors`."""
    readers = Readers(region)
    costs = op_costs(region.graph, batch, readers.may)
    count = plan.num_micro_batch * (plan.num_model_replicas if replicas is None else replicas)
    rows = {number: TaskGraphRow(readers, number, plan, cluster, costs, count) for number in range(len(plan.task_graphs))}
    return {number: row for number, row in rows.items() if row.parts.held.any()}


def marked_tensors(region: Region, count: int, names: Sequence[str]) -> Dict[int, Tuple[int, ...]]:
    """The tensors that the script marks (``wh.checkpoint``), by TaskGraph.  Each of the ``count`` TaskGraphs keeps only these.

    Raises:
        ConfigError: a marked tensor does not exist, or does not belong to one micro-batch.
    """
    found: Dict[int, List[int]] = {number: [] for number in range(count)}
    for name in names:
        tensor = region.graph.tensor(name) if name.partition(":")[0] in region.graph else None
        op = None if tensor is None else region.graph.producer(tensor)
        if tensor is None or op is None or op.id not in region.batch_level or op.phase is not Phase.FORWARD:
            raise ConfigError(
                f"wh.checkpoint marks {name!r}, which is not an activation of the trained model (or is one that wh.split "
                "divides): mark a layer's result that depends on the inputs")
        found[region.task_graph[op.id]].append(tensor)
    return {number: tuple(tensors) for number, tensors in found.items()}


class Choice(NamedTuple):
    """``segments``: (end, whether it is dropped), in order.  A segment ends after that part of the row."""

    memory: float
    seconds: float
    segments: Tuple[Tuple[int, bool], ...]


class RecomputableParts(NamedTuple):
    """A row of parts, in numbers.  All bytes are those of one micro-batch on one device.

    Attributes:
        held: ``[part]`` bytes that backward ops read.
        seconds: ``[part]`` seconds to recompute a part.
        crossing: ``[p, q]`` bytes of parts ``p`` to ``q`` that later parts read, or that cannot be recomputed.
        unread: the same, without the bytes that backward ops read.
        in_flight: micro-batches between their forward and their backward pass.
    """

    held: np.ndarray
    seconds: np.ndarray
    crossing: np.ndarray
    unread: np.ndarray
    in_flight: int

    @property
    def size(self) -> int:
        return len(self.held)

    @property
    def memory_without(self) -> float:
        """Bytes with everything kept."""
        return self.in_flight * float(self.held.sum())

    def smallest(self) -> Choice:
        """The choice with the least memory, and the fastest among equals."""
        everything = Choice(self.memory_without, 0.0, tuple((part, False) for part in range(self.size)))
        found = [everything] + [choice for bound in self._bounds() for choice in self._least(bound)]
        return min(found, key=lambda choice: (choice.memory, choice.seconds))

    def fastest(self, budget: float) -> Optional[Choice]:
        """The choice with the least time within ``budget`` bytes; None if nothing fits."""
        found = [choice for bound in self._bounds() if bound < budget for choice in self._within(budget, bound)]
        least = self.smallest()
        found += [least] if least.memory <= budget else []
        return min(found, key=lambda choice: (choice.seconds, choice.memory), default=None)

    def frontier(self) -> List[Tuple[float, float]]:
        """(memory, seconds) of all choices that no other choice beats in both, by memory.  For few parts."""
        points: List[Tuple[float, float]] = [(self.memory_without, 0.0)]
        for bound in self._bounds():
            reached: List[List[Tuple[float, float]]] = [[(0.0, 0.0)]] + [[] for _ in range(self.size)]  # [parts done]
            for p, q, kept, seconds, _ in self._segments(bound):  # in the order of their ends
                reached[q + 1] = _unbeaten(reached[q + 1] + [(held + kept, more_s + seconds) for held, more_s in reached[p]])
            points += [(self.in_flight * held + float(bound), seconds) for held, seconds in reached[-1]]
        return _unbeaten(points)

    def least_seconds(self, budget: float) -> float:
        """A lower bound of the time of any choice within ``budget`` bytes: parts are dropped whole or in fractions, those that
        hold most for their time first, and nothing is kept of them."""
        lacking = (self.memory_without - budget) / self.in_flight
        spent = 0.0
        for part in sorted(range(self.size), key=lambda n: self.seconds[n] / self.held[n] if self.held[n] else np.inf):
            if lacking <= 0 or not self.held[part]:
                break
            spent += float(self.seconds[part]) * min(1.0, lacking / float(self.held[part]))
            lacking -= float(self.held[part])
        return spent

    def _bounds(self) -> np.ndarray:
        """Bounds on the largest dropped segment, taken from the sizes of segments."""
        total = np.concatenate([[0.0], np.cumsum(self.held)])
        sizes = np.unique([total[q + 1] - total[p] for p in range(self.size) for q in range(p, self.size)])
        sizes = sizes[sizes > 0]
        if len(sizes) <= BOUNDS:
            return sizes
        return np.asarray(sizes[np.linspace(0, len(sizes) - 1, BOUNDS).astype(int)])

    def _segments(self, bound: float) -> List[Tuple[int, int, float, float, bool]]:
        """(first, last, bytes kept for a micro-batch, seconds, whether dropped) for every segment, by its end.

        With one micro-batch in flight, the backward pass begins where the forward pass ended, so the last segment is still there.
        """
        held, seconds = (np.concatenate([[0.0], np.cumsum(values)]) for values in (self.held, self.seconds))
        found = []
        for q in range(self.size):
            for p in range(q + 1):
                size = held[q + 1] - held[p]
                if size <= bound:
                    is_last = q == self.size - 1 and self.in_flight == 1
                    found.append((p, q, self.crossing[p, q], 0.0 if is_last else seconds[q + 1] - seconds[p], not is_last))
            found.append((q, q, self.held[q] + self.unread[q, q], 0.0, False))
        return found

    def _least(self, bound: float) -> List[Choice]:
        """The least memory to keep, if no dropped segment is larger than ``bound``."""
        best: List[Tuple[float, float, Tuple[Tuple[int, bool], ...]]] = [(0.0, 0.0, ())]
        best += [(np.inf, np.inf, ())] * self.size
        for p, q, kept, seconds, dropped in self._segments(bound):
            cost = best[p][0] + kept, best[p][1] + seconds
            if cost < best[q + 1][:2]:
                best[q + 1] = (*cost, best[p][2] + ((q, dropped),))
        kept, seconds, segments = best[-1]
        return [] if kept == np.inf else [Choice(self.in_flight * kept + bound, seconds, segments)]

    def _within(self, budget: float, bound: float) -> List[Choice]:
        """The least time within a budget, if no dropped segment is larger than ``bound``."""
        room, step = budget - bound, (budget - bound) / STEPS
        time = np.full((self.size + 1, STEPS + 1), np.inf)  # [parts done, memory used]
        time[0, 0] = 0.0
        came = np.zeros((self.size + 1, STEPS + 1, 3), int)  # (parts done, memory used, whether dropped) before
        for p, q, kept, seconds, dropped in self._segments(bound):
            used = int(np.ceil(self.in_flight * kept / step - 1e-9))
            if used > STEPS:
                continue
            new = time[p, :STEPS + 1 - used] + seconds
            better = np.flatnonzero(new < time[q + 1, used:])
            time[q + 1, used + better] = new[better]
            came[q + 1, used + better] = np.stack([np.full_like(better, p), better, np.full_like(better, dropped)], axis=1)
        best = int(np.argmin(time[-1]))
        if not np.isfinite(time[-1, best]):
            return []
        part, level, segments = self.size, best, []  # type: int, int, List[Tuple[int, bool]]
        while part:
            before = came[part, level]
            segments.append((part - 1, bool(before[2])))
            part, level = int(before[0]), int(before[1])
        return [Choice(bound + room * best / STEPS, float(time[-1, best]), tuple(reversed(segments)))]


def _unbeaten(points: Sequence[Tuple[float, float]]) -> List[Tuple[float, float]]:
    """The points with fewer seconds than all that need less memory, by memory."""
    found: List[Tuple[float, float]] = []
    for memory, seconds in sorted(points):
        if not found or seconds < found[-1][1]:
            found.append((memory, seconds))
    return found


class TaskGraphRow:
    """A TaskGraph's forward ops in parts, between which it can be cut.

    Attributes:
        parts: the parts in numbers.

    Args:
        micro_batches: of the mini-batch, for all model replicas that divide it.
    """

    def __init__(self, readers: Readers, number: int, plan: Plan, cluster: Cluster, costs: Sequence[OpCost],
                 micro_batches: float) -> None:
        task = plan.task_graphs[number]
        self._readers, self._graph, self._region = readers, readers.region.graph, readers.region
        self._parts = micro_batches * task.device_count
        self._number = number
        order, starts = linear_order(self._region)
        mine = [op for op in order if self._region.task_graph[op] == number]
        place = {op: position for position, op in enumerate(mine)}
        cuts = sorted({place[order[start]] for start in starts if order[start] in place} - {0})
        self._wanted = readers.wanted(number)
        ends = self._quietest(mine, place, cuts) + [len(mine)]
        self._part = {op: int(np.searchsorted(ends, position, side="right")) for op, position in place.items()}
        size = len(ends)
        device = cluster.devices[task.devices[0][0]]
        rate, bandwidth = device.peak_flops_per_s["fp32"], device.memory_bandwidth_bytes_per_s
        seconds, read = np.zeros(size), np.zeros(size)
        for op, part in self._part.items():
            if op in readers.may:
                arithmetic = costs[op].flops / rate if costs[op].is_contraction else 0.0
                seconds[part] += max(arithmetic, costs[op].bytes / bandwidth)
        for tensor in {buffer_of(self._graph, t) for t in self._wanted}:
            producer = self._graph.tensors[tensor].op
            if producer in self._part:
                read[self._part[producer]] += self._bytes(tensor)
        self.parts = RecomputableParts(read, seconds, *self._crossings(size), held(plan)[number])

    def _quietest(self, mine: Sequence[int], place: Dict[int, int], cuts: Sequence[int]) -> List[int]:
        """At most :data:`MOST_CUTS` of the cuts: the one where the fewest bytes cross from every equal share of the bytes held.

        Layers of one kind have equally quiet cuts.  The quietest of all could come from the first layers only.
        """
        if len(cuts) <= MOST_CUTS:
            return list(cuts)
        crossing, held_before = np.zeros(len(mine) + 1), np.zeros(len(mine) + 1)
        for op in mine:
            for tensor in self._graph.ops[op].outputs if op in self._region.batch_level else ():
                last = max([place[user] for user, _ in self._graph.consumers(tensor) if user in place], default=place[op])
                crossing[place[op] + 1:last + 1] += self._bytes(tensor)
        for tensor in self._wanted:
            if buffer_of(self._graph, tensor) == tensor:
                held_before[place[self._graph.tensors[tensor].op] + 1:] += self._bytes(tensor)
        share = max(float(held_before[-1]), 1.0) / MOST_CUTS
        quietest: Dict[int, int] = {}
        for cut in cuts:
            number = min(int(held_before[cut] / share), MOST_CUTS - 1)
            quietest[number] = min(quietest.get(number, cut), cut, key=lambda one: (crossing[one], one))
        return list(quietest.values())  # in order, as the cuts are

    def _bytes(self, tensor: int) -> float:
        size = float(tensor_bytes(self._graph, tensor))
        return size / self._parts if self._region.batch.layout(tensor).is_sharded else size

    def _crossings(self, size: int) -> Tuple[np.ndarray, np.ndarray]:
        """``[p, q]``: bytes of parts ``p`` to ``q`` that later parts read, or that cannot be recomputed; and the same without the
        bytes that backward ops read."""
        graph = self._graph
        last: Dict[int, int] = {}  # buffer -> the last part that reads it; ``size`` if it is kept to the end
        for op, part in self._part.items():
            for tensor in graph.ops[op].outputs if op in self._region.batch_level else ():
                buffer = buffer_of(graph, tensor)
                if graph.tensors[buffer].op in self._part and graph.tensors[tensor].dtype not in UNSENT:
                    reader = max([self._part.get(user, part) for user, _ in graph.consumers(tensor)], default=part)
                    last[buffer] = max(last.get(buffer, part), reader)
                    if op not in self._readers.may and self._is_needed_again(tensor):
                        last[buffer_of(graph, self._least_behind(tensor))] = size
        all_made, unread = np.zeros((size, size + 1)), np.zeros((size, size + 1))  # [part, last part that reads it]
        wanted = {buffer_of(graph, tensor) for tensor in self._wanted}
        for buffer, reader in last.items():
            part = self._part[graph.tensors[buffer].op]
            all_made[part, reader] += self._bytes(buffer)
            if buffer not in wanted:
                unread[part, reader] += self._bytes(buffer)
        return _read_behind(all_made), _read_behind(unread)

    def _is_needed_again(self, tensor: int) -> bool:
        """Whether backward ops, or ops that may be recomputed, read a tensor."""
        return tensor in self._wanted or any(user in self._readers.may for user, _ in self._graph.consumers(tensor))

    def _least_behind(self, tensor: int) -> int:
        """A tensor that cannot be recomputed, or the smallest one that follows from it alone, such as a dropout's mask."""
        least = tensor
        while True:
            readers = {user for user, _ in self._graph.consumers(tensor)} & self._readers.may & self._part.keys()
            if len(readers) != 1:
                return least
            tensor = self._graph.ops[readers.pop()].outputs[0]
            least = min(least, tensor, key=self._bytes)

    def tensors(self, choice: Choice) -> Tuple[int, ...]:
        """The tensors that a choice keeps, in the order in which they are computed."""
        graph, found = self._graph, set()
        segment_of = np.searchsorted([end for end, _ in choice.segments], range(self.parts.size))
        for op, part in self._part.items():
            end, dropped = choice.segments[segment_of[part]]
            for tensor in graph.ops[op].outputs if op in self._region.batch_level else ():
                is_read_behind = any(self._part.get(user, part) > end for user, _ in graph.consumers(tensor))
                if graph.tensors[tensor].dtype not in UNSENT and (is_read_behind or (tensor in self._wanted and not dropped)):
                    found.add(tensor)
        return tuple(sorted(found))


def _read_behind(made: np.ndarray) -> np.ndarray:
    """``[part, last reader]`` -> ``[p, q]``: the sum over parts ``p`` to ``q`` of the bytes that are read after ``q``."""
    size = len(made)
    behind = np.cumsum(made[:, ::-1], axis=1)[:, ::-1]  # [part, q]: read in q or later
    found = np.zeros((size, size))
    for q in range(size):
        found[:q + 1, q] = np.cumsum(behind[:q + 1, q + 1][::-1])[::-1]
    return found
