"""What each recipe of a Program means: the primitive ops that emission stages and the simulator prices.

::

    bridge        2 -> 1     SCALE   SCALE                  to the local script's values
                                └──┬────┘
                                CONCAT ──> CUT ──> SCALE    to the consumer's

    accumulate    m0 ──> ADD ──> ADD ──> SCALE              on the replica's device, or at the variable's home
                  m1 ─────┘ m2 ───┘

    synchronise   replica 0 ──┐                             one process: on one of the devices, which take turns
                  replica 1 ──┴─> SUM                       processes: SUM ──> PACK ──> ALL_REDUCE ──> UNPACK

    merge, whole  all clones ──> SUM, MAX, CONCAT ...       on the first device, or at the variable's home

Values are lowered when they are asked for, each once; so are values that the Program does not name, but a user fetches.
Sizes stay symbolic: a CUT, BLOCK, SCALE or SHIFT says whose examples count.  For ``gather`` and ``broadcast``, the messages about
variables that one process keeps, see :mod:`whale_tf.passes.lowering.messages`.
"""

from __future__ import annotations

from typing import Dict, FrozenSet, List, Optional, Sequence, Tuple, Union

from whale_tf.ir.batch_axis import CONCAT as EXAMPLES
from whale_tf.ir.batch_axis import EXTENT, EXTREMES, SAME, Reduce
from whale_tf.ir.layout import Layout, exponents_of
from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes.collect import chains, chains_of, compressed
from whale_tf.passes.homes import find_homes
from whale_tf.passes.lowering.bridges import Bridges
from whale_tf.passes.lowering.levels import batch_of_step, is_even
from whale_tf.passes.lowering.messages import Messages
from whale_tf.passes.lowering.primitive import (
    ADD,
    ALL_GATHER,
    ALL_REDUCE,
    FETCHED,
    HOST,
    IDENTITY,
    LESS_SURPLUS,
    PACK,
    PART,
    SCALE_PROCESS,
    SUM,
    TAKE,
    TENSOR,
    UNPACK,
    Primitive,
    Reduction,
    Rows,
    sum_scope,
)
from whale_tf.passes.lowering.values import Values
from whale_tf.passes.owners import find_owners
from whale_tf.passes.replicate import clones, copies, device_at, devices_of
from whale_tf.plan import Plan
from whale_tf.program import (
    ACCUMULATE,
    BRIDGE,
    DIVIDE,
    MERGE,
    MESSAGES,
    ORIGINAL,
    SYNCHRONISE,
    WHOLE,
    Clone,
    Copy,
    Program,
)

COLLECTIVE = "collective"  # backend whose sums inside one process are collectives, too


class Lowering:
    """See the module's docstring.

    Attributes:
        program: the Program whose recipes it lowers.
        compressed: gradients that travel between processes as float16.
    """

    def __init__(self, step: TrainingStep, plan: Plan, program: Program) -> None:
        self._step, self._plan, self.program = step, plan, program
        self._graph, self._batch = step.graph, step.region.batch
        self._values = Values(step, plan)
        self.bridges, self.messages = Bridges(self._values), Messages(step, plan, program)
        self._homes, self._owners = find_homes(step, plan).tensors, find_owners(step, plan)
        self._is_even, self._is_static = is_even(step, plan), batch_of_step(step) is not None
        self._by_collectives = step.processes == 1 and any(sync.backend == COLLECTIVE for sync in plan.gradients)
        self.compressed: FrozenSet[int] = compressed(step, plan)
        self._parts: Dict[Tuple[int, int, Clone], Primitive] = {}
        self._running: Dict[Tuple[int, Clone], Primitive] = {}
        self._sums: Dict[int, List[Primitive]] = {}
        self._whole: Dict[int, Primitive] = {}
        self._everywhere: Dict[Tuple[int, int], Dict[Copy, Primitive]] = {}
        self._each: Dict[Tuple[int, int], Primitive] = {}  # (call, tensor) -> one micro-batch's sum over all processes
        self._combined: Dict[Tuple[int, Reduce], Primitive] = {}
        self._turns: Dict[Tuple[int, ...], int] = {}
        self._are_synchronised = False
        self._accumulating = {(tensor, call.clone): number for number, call in enumerate(program.calls)
                              if program.step_of(call) == ACCUMULATE for tensor, _ in call.takes}

    # ------------------------------------------------------------------------------------------------- by calls
    def of_call(self, number: int, tensor: int) -> Union[Primitive, Dict[Copy, Primitive]]:
        """A tensor's value that a recipe's call makes: one for all readers, or one for each copy of its TaskGraph."""
        call = self.program.calls[number]
        body = self.program.bodies[call.body]
        if body.step == ACCUMULATE:
            return self.running(tensor, call.clone)
        if body.step == MERGE:
            return self.whole(tensor)
        if body.step == BRIDGE:
            return self.bridges.bridged(tensor, body.task_graph, call.clone)
        if body.step == DIVIDE:
            return self.input_part(tensor, body.task_graph, call.clone)
        if body.step == WHOLE:
            return self.combined(tensor, self._reduce_of(tensor))
        if body.step in MESSAGES:
            return self.messages.values(number)[tensor]
        assert body.step == SYNCHRONISE, body.step
        self._lower_synchronised()
        return self._each.get((number, tensor)) or self._everywhere[tensor, body.task_graph]

    def values_of(self, number: int) -> List[Primitive]:
        """All values that a recipe's call makes; none of other calls."""
        call = self.program.calls[number]
        body = self.program.bodies[call.body]
        found: Dict[Primitive, None] = {}
        if body.step in MESSAGES:
            return list(dict.fromkeys(self.messages.values(number).values()))
        if not body.is_recipe:
            return []
        for tensor in body.outputs:
            if body.step == BRIDGE:
                shards = range(len(devices_of(self._plan, body.task_graph, call.clone)))
                found.update(dict.fromkeys(self.bridges.bridged(tensor, body.task_graph, call.clone, shard) for shard in shards))
            else:
                made = self.of_call(number, tensor)
                found.update(dict.fromkeys([made] if isinstance(made, Primitive) else made.values()))
        return list(found)

    def _reduce_of(self, tensor: int) -> Reduce:
        """How the first op that reads a tensor's value of the whole mini-batch wants it."""
        asked = (conversion for op, position in self._graph.consumers(tensor)
                 for conversion in self._batch.conversions.get((op, position), ()))
        return next(conversion for conversion in asked if isinstance(conversion, Reduce))

    def input_part(self, tensor: int, task_graph: int, clone: Clone) -> Primitive:
        """A clone's part of an input, which the host cuts."""
        key = tensor, task_graph, clone
        if key not in self._parts:
            self._parts[key] = Primitive(PART, tensor, HOST, clone=clone, task_graph=task_graph)
        return self._parts[key]

    # ---------------------------------------------------------------------------------------------------- sums
    def running(self, tensor: int, clone: Clone) -> Primitive:
        """The sum of a tensor over the micro-batches, or at a home over the clones, up to that of a clone."""
        self.sums(tensor)
        return self._running[tensor, clone]

    def sums(self, tensor: int) -> List[Primitive]:
        """Weighted sums of a tensor over micro-batches: one for each replica, or one at the home of the tensor's variable; for
        a variable that one process updates, one for each micro-batch."""
        if tensor not in self._sums:
            chained = self._chains(tensor)
            self._sums[tensor] = [self._weighted_once(self._chain(tensor, chain), tensor, chain[0]) for chain in chained]
        return self._sums[tensor]

    def _chains(self, tensor: int) -> List[List[Clone]]:
        """The clones whose values are added up one after the other."""
        return chains_of(self._plan, self._step.task_graph_of(tensor), self._added_at(tensor), tensor in self._owners.gradients)

    def _added_at(self, tensor: int) -> Optional[int]:
        """The home where all clones' values of a gradient are added up as they arrive."""
        if tensor in self._owners.gradients:
            return self._homes.get(tensor, 0)
        return self._homes.get(tensor) if self._plan.adds_at_home and self._plan.num_micro_batch > 1 else None

    def _chain(self, tensor: int, chain: Sequence[Clone]) -> Primitive:
        at_home, total = self._added_at(tensor) is not None, self._weighted(tensor, chain[0])
        self._running[tensor, chain[0]] = total
        for clone in chain[1:]:
            device = self.merged_on(tensor) if at_home else total.device
            total = Primitive(ADD, tensor, device, (total, self._weighted(tensor, clone)), sum_scope(clone), clone,
                              self._step.task_graph_of(tensor), call=self._accumulating.get((tensor, clone), FETCHED))
            self._running[tensor, clone] = total
        return total

    def _weighted(self, tensor: int, clone: Clone) -> Primitive:
        value = self._values.value(tensor, clone)
        if self._is_even:
            return value
        return self._values.scaled(value, self._values.power(tensor), clone, self._step.task_graph_of(tensor), sum_scope(clone))

    def _weighted_once(self, total: Primitive, tensor: int, clone: Clone) -> Primitive:
        """A sum times the weight that all of its terms have."""
        if not self._is_even:
            return total
        scope = sum_scope(clone).rpartition("/")[0]
        return self._values.scaled(total, self._values.power(tensor), clone, self._step.task_graph_of(tensor), scope)

    def part(self, tensor: int) -> Primitive:
        """What this process contributes to the sum of a partial tensor over all processes, on the TaskGraph's first device."""
        device = device_at(self._plan, self._step.task_graph_of(tensor), ORIGINAL)
        return self._values.added(self.sums(tensor), device, f"part/{TENSOR}")

    # -------------------------------------------------------------------------------- of this process, or of all
    def merged_on(self, tensor: int) -> int:
        """The device where the clones' values of a tensor are merged: the home of the variable that they are for, or else the
        first device of the tensor's TaskGraph."""
        if tensor in self._homes:
            return self._homes[tensor]
        return device_at(self._plan, self._step.task_graph_of(tensor), ORIGINAL, self._graph.producer(tensor).shard)

    def whole(self, tensor: int) -> Primitive:
        """What the local script would have computed from this process's mini-batches."""
        if tensor not in self._whole:
            scope, device = f"merged/{TENSOR}", self.merged_on(tensor)
            layout, task_graph = self._values.layout(tensor), self._step.task_graph_of(tensor)
            every, waits = clones(self._plan, task_graph), []  # type: List[Clone], List[Primitive]
            if layout.is_partial:
                value = self._values.added(self.sums(tensor), device, scope)
                if exponents_of(layout.power) and self._step.processes > 1:
                    value = Primitive(SCALE_PROCESS, tensor, device, (value,), scope, detail=layout.power, task_graph=task_graph)
            elif layout.is_sharded:
                value = self._values.rows(tensor, device, scope)
            elif layout.kind in EXTREMES:
                value = self._values.reduced(layout.kind, [self._values.value(tensor, clone) for clone in every], device, scope)
            elif layout.kind == EXTENT.kind:
                total = self._values.added([self._values.value(tensor, clone) for clone in every], device, scope + "/sum")
                terms = total, self._values.value(tensor, every[0])
                value = Primitive(LESS_SURPLUS, tensor, device, terms, scope, detail=len(every) - 1)
            else:
                value = self._values.scaled(self._values.value(tensor, every[0]), layout.power, every[0], task_graph, scope)
                # an update must not write a variable that another clone has yet to read
                waits = list(dict.fromkeys(self._values.value(tensor, clone) for clone in every[1:] if clone != every[0]))
            self._whole[tensor] = Primitive(IDENTITY, tensor, device, (value,), scope + "/value", waits=waits)
        return self._whole[tensor]

    def of_all_processes(self, tensor: int) -> Primitive:
        """What the local script would have computed from the mini-batches of all processes, on the first device of the tensor's
        TaskGraph.  Every run of it waits for the other processes."""
        if self._step.processes == 1:
            return self.whole(tensor)
        self._lower_synchronised()
        task_graph = self._step.task_graph_of(tensor)
        if (tensor, task_graph) not in self._everywhere:
            self._synchronise(task_graph, (tensor,), FETCHED)
        return self._everywhere[tensor, task_graph][ORIGINAL]

    def is_synchronised(self, tensor: int, task_graph: int) -> bool:
        """Whether each copy of a TaskGraph gets its own value of a tensor over all copies and processes."""
        self._lower_synchronised()
        return (tensor, task_graph) in self._everywhere

    def synchronised(self, tensor: int, task_graph: int, copy: Copy) -> Primitive:
        """The value over all copies and processes that a copy of a TaskGraph gets."""
        self._lower_synchronised()
        return self._everywhere[tensor, task_graph][copy]

    def _lower_synchronised(self) -> None:
        """Lowers the calls that synchronise, in their order, on which the devices' turns depend."""
        if not self._are_synchronised:
            self._are_synchronised = True
            for number, call in enumerate(self.program.calls):
                if self.program.step_of(call) == SYNCHRONISE:
                    self._lower_call(number)

    def _lower_call(self, number: int) -> None:
        """Lowers all values of a call that synchronises; of those of one owner each micro-batch's, and their total once."""
        call = self.program.calls[number]
        body = self.program.bodies[call.body]
        if (body.inputs[0], body.task_graph) in self._everywhere:
            return
        if not self._owners.gradients.keys() >= set(body.inputs):
            self._synchronise(body.task_graph, body.inputs, number)
            return
        totals: Dict[int, List[Primitive]] = {}
        numbers = [each for each, other in enumerate(self.program.calls) if other.body == call.body]
        for place, each in enumerate(numbers):
            m = self.program.calls[each].clone.m
            ends = [[self.running(tensor, self._chains(tensor)[place][-1])] for tensor in body.inputs]
            devices = [[self.merged_on(tensor)] for tensor in body.inputs]
            found = self._summed(ends, devices, [f"sync/{TENSOR}/{m}"] * len(ends), each)
            for tensor, (total,) in zip(body.inputs, found):
                self._each[each, tensor] = total
                totals.setdefault(tensor, []).append(total)
        for tensor, (first, *others) in totals.items():
            total = self._total_at_owner(tensor, body.task_graph, first, others, numbers[0])
            self._everywhere[tensor, body.task_graph] = dict.fromkeys(copies(self._plan, body.task_graph), total)

    def _total_at_owner(self, tensor: int, task_graph: int, total: Primitive, others: Sequence[Primitive],
                        number: int) -> Primitive:
        """The micro-batches' sums added up; in a process that does not own the variable, a value that is there when all are."""
        device, scope = self.merged_on(tensor), f"sync/{TENSOR}/all"
        if not self._owners.is_own(self._owners.gradients[tensor]):
            return Primitive(IDENTITY, tensor, device, (total,), scope, waits=others, call=number)
        for place, other in enumerate(others):
            total = Primitive(ADD, tensor, device, (total, other), f"{scope}/{place}", call=number)
        if not self._is_even:
            return total
        return self._values.scaled(total, self._values.power(tensor), chains(self._plan, task_graph, 0)[0][0], task_graph, scope)

    def _synchronise(self, task_graph: int, tensors: Tuple[int, ...], number: int) -> None:
        """Lowers values over all copies and processes, for every copy of a TaskGraph."""
        first, every, plan = tensors[0], copies(self._plan, task_graph), self._plan
        layout, shard = self._values.layout(first), self._graph.producer(first).shard
        if layout.is_partial:
            members = [self.sums(tensor) for tensor in tensors]
            devices = [[device_at(plan, task_graph, Copy(chain[0].g, chain[0].r), self._graph.producer(tensor).shard)
                        for chain in self._chains(tensor)] for tensor in tensors]
            totals = self._summed(members, devices, [f"sync/{TENSOR}"] * len(tensors), number)
            found = [dict(zip(every, values)) for values in totals]
        elif layout.is_sharded and self._step.processes == 1:
            found = [{copy: self._values.rows(first, device_at(plan, task_graph, copy, shard), f"sync/{TENSOR}/{copy.g}_{copy.r}",
                                       number) for copy in every}]
        else:
            found = [dict.fromkeys(every, self._across(first, layout, number))]
        for tensor, values in zip(tensors, found):
            self._everywhere[tensor, task_graph] = {copy: values.get(copy, values[every[0]]) for copy in every}

    def _summed(self, members: Sequence[Sequence[Primitive]], devices: Sequence[Sequence[int]], scopes: Sequence[str],
                number: int) -> List[List[Primitive]]:
        """Sums of several tensors, each over its members and all processes; for every member its result.

        Args:
            devices: of each member of each tensor; they take turns at adding, but one adds up all that is sent in one message.
        """
        if self._by_collectives:
            return [self._by_collective(each, on, scope, number) for each, on, scope in zip(members, devices, scopes)]
        if self._step.processes == 1:
            sums = [self._values.added(each, self._turn(on), scope, number) for each, on, scope in zip(members, devices, scopes)]
            return [[total] * len(each) for total, each in zip(sums, members)]
        device = self._turn(devices[0])
        here = [self._values.added(each, device, scope + "/here", number) for each, scope in zip(members, scopes)]
        tensor, detail = here[0].tensor, Reduction(SUM, here[0].tensor in self.compressed)
        if len(here) == 1:
            return [[self._values.between(ALL_REDUCE, here[0], device, scopes[0], detail, number)] * len(members[0])]
        packed = Primitive(PACK, tensor, device, here, scopes[0], call=number)
        total = self._values.between(ALL_REDUCE, packed, device, scopes[0] + "/bucket", detail, number)
        return [[Primitive(UNPACK, each.tensor, device, (total,), scope, detail=place, call=number)] * len(own)
                for place, (each, scope, own) in enumerate(zip(here, scopes, members))]

    def _by_collective(self, members: Sequence[Primitive], devices: Sequence[int], scope: str, number: int) -> List[Primitive]:
        tensor, detail = members[0].tensor, Reduction(SUM, devices=tuple(devices))
        total = Primitive(ALL_REDUCE, tensor, devices[0], members, scope, detail=detail, call=number)
        return [Primitive(TAKE, tensor, device, (total,), scope, detail=place, call=number)
                for place, device in enumerate(devices)]

    def _turn(self, devices: Sequence[int]) -> int:
        """The device that adds.  With ``n`` devices, each carries ``2 (n - 1) / n`` of the bytes, as in a ring all-reduce."""
        key = tuple(devices)
        self._turns[key] = self._turns.get(key, -1) + 1
        return key[self._turns[key] % len(key)]

    def _across(self, tensor: int, layout: Layout, number: int) -> Primitive:
        """The value over all processes of a tensor that is not a sum, on the first device of its TaskGraph."""
        task_graph = self._step.task_graph_of(tensor)
        scope, device = f"processes/{TENSOR}", device_at(self._plan, task_graph, ORIGINAL)
        if layout.is_sharded and layout.blocks is not None and len(layout.blocks) > 1:
            return self._values.examples(tensor, self._values.pieces(tensor, scope), device, scope, Rows(self._is_static), number)
        if layout.is_sharded:
            how = Rows(self._is_static, not self._is_static)
            return self._values.between(ALL_GATHER, self.whole(tensor), device, scope, how, number)
        here = self.whole(tensor)
        if layout.kind in EXTREMES:
            return self._values.between(ALL_REDUCE, here, device, scope, Reduction(layout.kind), number)
        if layout.kind == EXTENT.kind:
            total = self._values.between(ALL_REDUCE, here, device, scope + "/sum", Reduction(SUM), number)
            return Primitive(LESS_SURPLUS, tensor, device, (total, here), scope, detail=self._step.processes - 1, call=number)
        return here

    # ------------------------------------------------------------------------------------------------ for all clones
    def combined(self, tensor: int, how: Reduce) -> Primitive:
        """The whole batch's value of a tensor: the weighted sum (or max, ...) over all clones of its TaskGraph and all
        processes, or the examples of all of them."""
        if (tensor, how) not in self._combined:
            scope, task_graph = f"reduce_{how.kind}/{TENSOR}", self._step.task_graph_of(tensor)
            device = device_at(self._plan, task_graph, ORIGINAL, self._graph.producer(tensor).shard)
            pieces = self._values.comparable(tensor, clones(self._plan, task_graph), how.power, how.offset, scope)
            if how.kind == EXAMPLES:
                found = self._values.examples(tensor, pieces, device, scope, Rows())
            elif how.kind == SAME:
                found = pieces[0]
            else:
                found = self._values.reduced(how.kind, pieces, device, scope)
                if self._step.processes > 1:
                    found = self._values.between(ALL_REDUCE, found, device, scope + "/processes", Reduction(how.kind))
            self._combined[tensor, how] = found
        return self._combined[tensor, how]

    def collectives(self, number: int) -> List[Primitive]:
        """The collectives between processes of a call that synchronises, in an order that is the same in all processes."""
        self._lower_synchronised()
        return self._values.collectives[number]
