"""How often each op of the parallel region runs: its granularity.

The region consists of the FORWARD and BACKWARD ops: all ops from which a gradient or a differentiated loss is computed::

    batch level   ops that depend on an example of the mini-batch, or put a variable's parts together for ops that do: one clone
                  for each model replica, micro-batch and replica
    step level    ops that do not (variables' values, constants, weight decay): once per step on each replica's devices
    sections      ops that need all examples, or follow from such ops and from no single example: once per mini-batch; they
                  belong to the batch level

Ops outside the region run once, on merged values.
"""

from __future__ import annotations

from typing import AbstractSet, Collection, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf.ir.batch_axis import BatchAxis
from whale_tf.ir.graph import Op, OpGraph, Phase
from whale_tf.ir.holder import Holder
from whale_tf.ir.traits import NEXT_ITERATIONS, Role, VariableUse, traits
from whale_tf.ir.units import conditions, containers, frame_of_outputs, frames, loops_of
from whale_tf.ir.walk import reached

GATHER_ATTR = "_whale_gather"  # attribute of an op that puts a variable's parts together for one call


class _Fields(NamedTuple):
    graph: OpGraph
    ops: Tuple[int, ...]
    batch_level: Set[int]
    task_graph: Sequence[int]
    late: Set[int]
    early: Set[int]
    batch: BatchAxis
    mean_divisors: FrozenSet[Tuple[int, int]] = frozenset()
    rereads: Mapping[int, FrozenSet[int]] = {}
    sections: FrozenSet[int] = frozenset()
    in_function: bool = False


class Region(_Fields, Holder):
    """Attributes:
    ops: numbers of the region's ops, in graph order.
    batch_level: ops that are cloned for every micro-batch.
    task_graph: TaskGraph of every op of the graph (-1 outside the region).
    late: batch-level ops that are computed from a gradient: the schedule's backward step.
    early: batch-level ops that run ahead of the schedule because a value of the whole batch depends on them.
    sections: batch-level ops that run once, on values of the whole batch.
    batch: the result of the batch-axis analysis.
    mean_divisors: (op, input position) in gradients of ``Mean`` that hold the batch size for which the graph was built.
    rereads: ops that read a variable after its update in the same step -> the ops they wait for by control edge (a GAN whose
        generator trains against the discriminator of this step).
    in_function: a tf.function runs the step, always as a whole.
    """

    def contains(self, op: Op) -> bool:
        return op.phase in (Phase.FORWARD, Phase.BACKWARD)

    @property
    def drawn_once(self) -> Set[int]:
        """Random ops that the local script's own op draws, for all clones and copies.  Those of a section run in it."""
        return set(self.batch.shared) - self.sections

    def of_task_graph(self, index: int, batch_level: bool) -> List[Op]:
        """The region's ops of one TaskGraph at one level, in graph order."""
        return [self.graph.ops[i] for i in self.ops if self.task_graph[i] == index and (i in self.batch_level) == batch_level]

    def leaving(self) -> Dict[int, List[Tuple[int, int]]]:
        """Batch-level tensors used outside the region: tensor -> (op number, input position) of those uses.

        Not included: uses of a while loop's tensors inside that loop, which stay with the original loop, and uses by unused ops,
        which stay with the original tensors.
        """
        return self.once(_leaving)


def _leaving(region: Region) -> Dict[int, List[Tuple[int, int]]]:
    tensors, frames_of = region.graph.tensors, frames(region.graph)
    found: Dict[int, List[Tuple[int, int]]] = {}
    for op in region.graph.ops:
        if op.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UNUSED):
            continue
        for position, tensor in enumerate(op.inputs):
            producer = tensors[tensor].op
            if producer in region.batch_level and not frame_of_outputs(region.graph.ops[producer], frames_of):
                found.setdefault(tensor, []).append((op.id, position))
    return {tensor: found[tensor] for tensor in sorted(found)}


def find_region(graph: OpGraph, task_graph: Sequence[int], batch: BatchAxis, sources: Sequence[int]) -> Region:
    """Split the region's ops into batch level and step level (see the module's docstring)."""
    region = [op for op in graph.ops if op.phase in (Phase.FORWARD, Phase.BACKWARD)]
    seeds = ({op for op, _ in batch.conversions} | {op for op, _ in batch.localise} | set(batch.own_seed)).difference(batch.whole)
    divisors = _mean_divisors(graph, batch)
    seeds |= {op for op, _ in divisors}
    seeds |= {op.id for op in region if GATHER_ATTR in op.attrs}
    loops = loops_of(region, frames(graph))
    units = loops + containers(graph, region)  # each unit has one level and one TaskGraph
    divided = [op for op in region if op.id not in batch.whole]
    cloned = _closed(graph, divided, set(sources), seeds, units)
    sections = _closed(graph, [op for op in region if op.id not in cloned], set(), set(batch.whole), units)
    batch_level = cloned | sections
    members = [op for op in region if op.id in batch_level]
    late = _closed(graph, members, set(), {op.id for op in members if op.phase is Phase.BACKWARD}, loops)
    rereads = _rereads(graph, region, batch_level)
    early = _early(graph, batch, batch_level, sections, loops, frozenset().union(*rereads.values()))
    if rereads:
        early |= _losses_of_early(graph, cloned, early, rereads)
    ops = tuple(op.id for op in region)
    return Region(graph, ops, batch_level, task_graph, late, early, batch, divisors, rereads, frozenset(sections))


def groups(graph: OpGraph) -> Set[int]:
    """Backward ops that only make others wait.  TensorFlow 1 makes one for the gradients of all operands of an op, and each
    gradient then waits for it.

    A group is an op without operands or results that waits for stateless ops, outside of loops.
    """
    in_loop = frames(graph)

    def is_group(op: Op) -> bool:
        return op.phase is Phase.BACKWARD and traits(op.type).role is Role.NO_OP and not any(
            before in in_loop or traits(graph.ops[before].type).state is not VariableUse.NONE
            or traits(graph.ops[before].type).role is not Role.COMPUTE for before in op.control_inputs)

    return {op.id for op in graph.ops if is_group(op)}


def without_groups(region: Region, later: Optional[AbstractSet[int]] = None) -> Region:
    """The region without waits of backward ops for :func:`groups`, which would delay every gradient of an op until those of all
    its operands are computed.

    Args:
        later: only groups that wait for one of these ops are left out, and these ops wait as before.  Groups that are kept let
            updates in place wait for all readers of the variable.  None: all groups are left out.
    """
    graph = region.graph
    left_out = {index for index in groups(graph) if later is None or not later.isdisjoint(graph.ops[index].control_inputs)}
    waits = {op.id: tuple(before for before in op.control_inputs if before not in left_out)
             for op in graph.ops if op.phase is Phase.BACKWARD and not left_out.isdisjoint(op.control_inputs)
             and (later is None or op.id not in later)}
    return region._replace(graph=graph.with_waits(waits)) if waits else region


def inseparable(region: Region) -> List[Set[int]]:
    """Sets of the region's ops that must run on one device: loops, all ops that use one stack or tensor array, and the forward
    ops from a condition's Switches to its Merges, because a tensor of an untaken branch has no value to send."""
    graph = region.graph
    ops = [graph.ops[index] for index in region.ops]
    forward = [op for op in ops if op.phase is Phase.FORWARD]
    return loops_of(ops, frames(graph)) + containers(graph, ops) + conditions(graph, forward)


def _mean_divisors(graph: OpGraph, batch: BatchAxis) -> FrozenSet[Tuple[int, int]]:
    """Divisors (op, input position) in gradients of ``Mean`` over the batch that hold the batch size for which the graph was
    built.

    With ``G`` mini-batches, one for each model replica, the whole batch is ``G`` times as large, and so is the divisor.  The
    op is at the batch level, so each clone has its own.
    """
    found = set()
    for op in graph.ops:
        if op.phase is not Phase.BACKWARD or op.type not in ("RealDiv", "Div") or op.forward < 0:
            continue
        mean, divisor = graph.ops[op.forward], op.inputs[1]
        if mean.type == "Mean" and not batch.unknown.keys() & {divisor, mean.outputs[0]}:  # refused elsewhere
            layout = batch.layout(divisor)
            if layout.is_replicated and layout.power == 0 and batch.layout(mean.outputs[0]).is_partial:
                found.add((op.id, 1))
    return frozenset(found)


def _rereads(graph: OpGraph, region: Sequence[Op], batch_level: Set[int]) -> Dict[int, FrozenSet[int]]:
    """Ops that read a variable after an update which depends on the mini-batch -> the ops for which they wait."""
    members = {op.id for op in region}
    waiting = [op for op in region if not members.issuperset(op.control_inputs)]
    if not waiting:
        return {}
    decided = set(batch_level)  # what follows from the mini-batch
    for op in graph.ops:
        if op.id not in members and any(before in decided for before in graph.predecessors(op)):
            decided.add(op.id)
    found = {}
    for op in waiting:
        handles = {tensor for tensor in op.inputs if graph.tensors[tensor].dtype.endswith(("resource", "_ref"))}
        waits = frozenset(control for control in op.control_inputs if control not in members and control in decided and any(
            traits(graph.ops[before].type).is_write and not handles.isdisjoint(graph.ops[before].inputs)
            for before in _behind(graph, [control], members, control_only=True)))
        if handles and waits:
            found[op.id] = waits
    return found


def _behind(graph: OpGraph, ops: Collection[int], members: Collection[int], control_only: bool = False) -> Set[int]:
    """The given ops, the ops outside the region on which they depend, and the region's ops on which these depend directly."""
    def before(index: int) -> Iterable[int]:
        op = graph.ops[index]
        return () if index in members else op.control_inputs if control_only else graph.predecessors(op)

    return reached(ops, before)


def _early(graph: OpGraph, batch: BatchAxis, batch_level: Set[int], sections: Set[int], loops: Sequence[Set[int]],
           writes: Collection[int]) -> Set[int]:
    """Cloned ancestors of sections, of all tensors that are combined over all clones, of ``writes``, for which some ops wait, and
    of ops outside the clones whose results clones read.  Loops are included as a whole."""
    loop_of = {index: loop for loop in loops for index in loop}
    members = {op.id for op in graph.ops if op.phase in (Phase.FORWARD, Phase.BACKWARD)} if writes else ()
    starts = sections.union(_behind(graph, writes, members), returning(graph, batch_level), (
        graph.tensors[graph.ops[op].inputs[position]].op for op, position in batch.combined()))

    def before(index: int) -> Set[int]:
        return batch_level.intersection(graph.predecessors(graph.ops[index])) | (batch_level & loop_of.get(index, set()))

    return reached(starts & batch_level, before) - sections


def _losses_of_early(graph: OpGraph, cloned: Set[int], early: Set[int], rereads: Collection[int]) -> Set[int]:
    """Cloned forward ops that follow from early ones, and not from a variable's new value: such as the loss whose gradients the
    early updates take.  Over several processes it is a part of every run of these."""
    later = reached(rereads, lambda index: (user for tensor in graph.ops[index].outputs for user, _ in graph.consumers(tensor)))
    found: Set[int] = set()
    for op in graph.ops:
        if op.id in cloned and op.phase is Phase.FORWARD and op.id not in early and op.id not in later:
            before = cloned.intersection(graph.predecessors(op))
            if before and all(one in early or one in found for one in before):
                found.add(op.id)
    return found


def returning(graph: OpGraph, batch_level: AbstractSet[int]) -> Set[int]:
    """Cloned ops whose results go to ops outside the clones, from which cloned ops follow: a random generator counts the numbers
    that it draws for all examples."""
    ops, tensors = graph.ops, graph.tensors

    def users(index: int) -> List[int]:
        return [user for tensor in ops[index].outputs for user, _ in graph.consumers(tensor)]

    def following(index: int) -> List[int]:
        return [user for user in users(index) if user not in batch_level and ops[user].phase is not Phase.APPLY]

    reading = [op.id for op in ops if op.id not in batch_level and op.phase not in (Phase.APPLY, Phase.UNUSED)
               and not batch_level.isdisjoint([tensors[tensor].op for tensor in op.inputs])]
    outside = reached(reading, following)  # few ops, mostly none
    read = reached((index for index in outside if not batch_level.isdisjoint(users(index))),
                   lambda index: outside.intersection(tensors[tensor].op for tensor in ops[index].inputs))
    return {source for index in read for source in (tensors[tensor].op for tensor in ops[index].inputs)
            if source in batch_level}


def _closed(graph: OpGraph, ops: Sequence[Op], tensors: Set[int], seeds: Set[int], units: Sequence[Set[int]]) -> Set[int]:
    """Ops that are seeds or depend on a seed or one of the tensors; each unit is included as a whole or not at all."""
    found = _reachable(graph, ops, tensors, seeds)
    allowed = {op.id for op in ops}
    while True:
        more = {i for unit in units if not unit.isdisjoint(found) for i in unit & allowed} - found
        if not more:
            return found
        found = _reachable(graph, ops, tensors, found | more)


def _reachable(graph: OpGraph, ops: Sequence[Op], tensors: Set[int], seeds: Set[int]) -> Set[int]:
    """Ops among ``ops`` that are seeds or depend, by data or control, on a seed or one of the tensors."""
    found = {op.id for op in ops if op.id in seeds}
    changed = bool(found or tensors)
    while changed:  # a second round only for the back edges of while loops
        changed = False
        for op in ops:
            if op.id not in found and not (tensors.isdisjoint(op.inputs) and found.isdisjoint(graph.predecessors(op))):
                found.add(op.id)
                changed = True
        changed = changed and graph.has_any(NEXT_ITERATIONS)
    return found
