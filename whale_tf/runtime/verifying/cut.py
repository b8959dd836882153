"""Which tensors of a training step are compared, and which the local step takes from the divided one.

::

    inputs ──> | forward and backward ops | ──> losses, gradients ──> | update, averages, ... | ──> new variables
      taken      computed from what is taken      compared; taken       computed from these         compared

Both halves are computed by the local script's own ops.  The second one begins with the divided step's losses and gradients, so
that an optimizer which enlarges rounding errors (Adam, where a gradient is almost 0) raises no false alarm.

The local step takes over what it cannot compute again: inputs, random numbers, results of Python functions, and what follows from
ops that the plan itself makes inexact.  What can be neither computed nor taken over is not compared, and is named.  Neither is
what a run returns of a variable that the run may read before or after its update (MonitoredSession's hooks read the global step
so): the local script has either number, too.
"""
from __future__ import annotations

from typing import AbstractSet, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf.ir.graph import Op, OpGraph, Phase, bytes_of, elements_of, inner_ops
from whale_tf.ir.layout import Layout
from whale_tf.ir.traits import EXITS, MERGES, RANDOM, SAME_BUFFER, VARIABLES, Gives, Role, VariableUse, traits
from whale_tf.ir.units import bound, frame_of_outputs, frames, may_miss
from whale_tf.ir.walk import reached

SAMPLES = 48  # tensors inside the step that are compared besides its results
SAMPLE_BYTES = 2**24  # of all of them, as far as sizes are known
UNFED = ("resource", "variant")  # nobody can fetch or feed these
INPUT, DRAWN, INEXACT = "an input", "random numbers", "inexact by plan"


class View(NamedTuple):
    """What is known about the divided step, by names of the local script.

    Attributes:
        layout: the layout of a tensor in the divided step; None: it has none, or it was replaced.
        can_take: whether a tensor's value for the whole mini-batch can be fetched beside the update.
        runs: whether the divided step runs an op outside of the forward and backward ops, and not another one in its place.
        inexact: op whose result differs from the local script's -> reason.
    """

    layout: Callable[[str], Optional[Layout]]
    can_take: Callable[[str], bool]
    runs: Callable[[str], bool]
    inexact: Mapping[str, str] = {}


class Use(NamedTuple):
    """``tensor`` is read by op ``op`` at input ``position``."""

    op: int
    position: int
    tensor: int


class Cut(NamedTuple):
    """Attributes:
    taken: tensor that the local step takes over -> why.
    lost: tensor that cannot be compared -> why.
    leaving: uses, outside of the forward and backward ops, of what these compute; the second half reads the divided step's
        values.
    results: tensors that leave, or that the run returns, and are computed by forward and backward ops.
    samples: further tensors that are compared, so that the first one which differs can be named.
    returned: results that other ops compute.
    racing: tensors that the run returns, and that the local script computes before or after an update, as it happens.
    written: variable op -> why its new value cannot be compared; "": it can.
    writes: ops that write variables.
    is_joined: both halves run at once, because forward ops read variables after their update in the same step, or because what
        leaves cannot be fetched, or only in a race with the update.
    coarse: tensor -> the float type of fewest digits from which it follows.
    """

    taken: Dict[int, str]
    lost: Dict[int, str]
    leaving: Tuple[Use, ...]
    results: Tuple[int, ...]
    samples: Tuple[int, ...]
    returned: Tuple[int, ...]
    racing: Tuple[int, ...]
    written: Dict[int, str]
    writes: Tuple[int, ...]
    is_joined: bool
    coarse: Dict[int, str]


DIGITS = ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "float64")  # few first


def find_cut(graph: OpGraph, writes_of: Mapping[int, Sequence[int]], waits: Iterable[Tuple[int, int]],
             wanted: Sequence[int], fetched: Sequence[int], view: View) -> Cut:
    """The cut of one run of a step.

    Args:
        writes_of: op -> the variables that it writes (``Variables.written_by``).
        waits: (forward op, op outside of the region for which it waits).
        wanted: ops that the run reaches.
        fetched: tensors that it returns.
    """
    return _Finder(graph, writes_of, waits, wanted, fetched, view).run()


def sample(candidates: Sequence[int], graph: OpGraph) -> Tuple[int, ...]:
    """At most SAMPLES of the tensors, evenly spread, and not too many bytes.  Those of unknown rank cannot be put together: the
    sum of a gradient over the dimensions of size one loses that of the examples in a clone that has one example."""
    candidates = [tensor for tensor in candidates if graph.tensors[tensor].shape is not None]
    step = max(1, -(-len(candidates) // SAMPLES))
    found, size = [], 0
    for tensor in candidates[::step]:
        size += elements_of(graph.tensors[tensor].shape) * bytes_of(graph.tensors[tensor].dtype)
        if size <= SAMPLE_BYTES:
            found.append(tensor)
    return tuple(found)


class _Finder:
    def __init__(self, graph: OpGraph, writes_of: Mapping[int, Sequence[int]], waits: Iterable[Tuple[int, int]],
                 wanted: Sequence[int], fetched: Sequence[int], view: View) -> None:
        self.graph, self.view, self.writes_of, self.fetched = graph, view, writes_of, fetched
        self.needed = sorted(reached(wanted, lambda index: graph.predecessors(graph.ops[index])))
        self.waits = [(op, on) for op, on in waits if op in set(self.needed)]
        self.closed = _closed(graph)
        self.taken: Dict[int, str] = {}
        self.lost: Dict[int, str] = {}
        self.ran: Dict[int, str] = {}  # op whose results are taken or lost -> why
        self.given: Set[Tuple[int, int]] = set()  # (op, position) of operands that come from the divided step

    def run(self) -> Cut:
        graph = self.graph
        applied = {index for index in self.needed if graph.ops[index].phase is Phase.APPLY}
        behind = reached([on for _, on in self.waits], lambda index: [
            before for before in graph.ops[index].control_inputs if not self._is_inside(graph.ops[before])])
        leaving = tuple(self._leaving())
        behind_reference = self._behind_references()
        is_joined = not applied.isdisjoint(behind) or not all(
            graph.tensors[use.tensor].op not in behind_reference and (
                self.view.runs(graph.ops[use.op].name) or self.view.can_take(graph.tensor_name(use.tensor))) for use in leaving)
        leaving = () if is_joined else leaving
        racing = self._racing()
        self.fetched = [tensor for tensor in self.fetched if tensor not in racing]
        self.given = {(use.op, use.position) for use in leaving}
        while True:  # again only for the back edges of loops
            before = len(self.lost), len(self.taken)
            for index in self.needed:
                self._visit(graph.ops[index])
            if before == (len(self.lost), len(self.taken)):
                break
        writes = tuple(index for index in self.needed if index in self.writes_of)
        results = dict.fromkeys(use.tensor for use in leaving)
        results.update(dict.fromkeys(t for t in self.fetched if self._is_inside(graph.producer(t))))
        if is_joined:
            results.update(dict.fromkeys(t for op in sorted(applied) for t in graph.ops[op].inputs
                                         if self._is_inside(graph.producer(t)) and graph.tensors[t].op not in behind_reference
                                         and self.view.can_take(graph.tensor_name(t))))
        compared = tuple(t for t in sorted(results) if self._is_compared(t))
        returned = tuple(t for t in self.fetched if not self._is_inside(graph.producer(t)) and self._is_compared(t)
                         and graph.producer(t).phase is not Phase.INPUT)
        inside = [t for index in self.needed if self._is_inside(graph.ops[index]) for t in graph.ops[index].outputs
                  if t not in results and self._is_compared(t) and self._tells(t)]
        written: Dict[int, str] = {}
        for index in writes:
            for variable in self.writes_of[index]:
                written[variable] = written.get(variable, "") or self.ran.get(index, "")
        needed = set(self.needed)
        taken = {tensor: why for tensor, why in self.taken.items()
                 if any(user in needed for user, _ in graph.consumers(tensor))}
        return Cut(taken, self.lost, leaving, compared, sample(inside, graph), returned, racing, written, writes, is_joined,
                   self._coarse())

    def _behind_references(self) -> AbstractSet[int]:
        """Ops that follow from reference variables and from no input: a fetched value may be the one after the update."""
        graph = self.graph
        sources = {index for index in self.needed if traits(graph.ops[index].type).is_input}
        found: Set[int] = set()
        for index in self.needed:
            op = graph.ops[index]
            behind = [graph.tensors[t].op for t in op.inputs]
            if not sources.isdisjoint(behind):
                sources.add(index)
            elif op.type in VARIABLES and graph.tensors[op.outputs[0]].dtype.endswith("_ref") or not found.isdisjoint(behind):
                found.add(index)
        return found

    def _racing(self) -> Tuple[int, ...]:
        """See :class:`Cut`: of a read and a write of one variable, neither follows from the other."""
        graph = self.graph
        writes: Dict[int, List[int]] = {}
        for index in self.needed:
            for variable in self.writes_of.get(index, ()):
                writes.setdefault(variable, []).append(index)
        reads, same = {}, set()  # type: Dict[int, List[int]], Set[int]
        for variable in writes:
            reads[variable], buffers = self._reads(variable)
            same.update(buffers)
        tracked = dict.fromkeys(op for some in (writes, reads) for found in some.values() for op in found)
        bit = {op: 1 << number for number, op in enumerate(tracked)}
        before: Dict[int, int] = {}  # bits of an op and of all that comes before it
        for index in self.needed:
            before[index] = bit.get(index, 0)
            for earlier in graph.predecessors(graph.ops[index]):
                before[index] |= before.get(earlier, 0)
        racing = 0
        for variable, found in writes.items():
            for read in reads[variable]:
                if any(not before[write] & bit[read] and not before[read] & bit[write] for write in found):
                    racing |= bit[read]
        return tuple(t for t in self.fetched if graph.tensors[t].op in same or before[graph.tensors[t].op] & racing)

    def _reads(self, variable: int) -> Tuple[List[int], List[int]]:
        """The ops that a run needs and that read a variable, and those that pass on the buffer of a reference variable: whoever
        takes it reads the variable then."""
        graph, needed, found = self.graph, set(self.needed), []  # type: OpGraph, Set[int], List[int]
        same = [variable]
        for op in same:  # grows while we walk
            for tensor in graph.ops[op].outputs:
                is_reference = op != variable or graph.tensors[tensor].dtype.endswith("_ref")
                for user, _ in graph.consumers(tensor):
                    if user in self.writes_of or user not in needed:
                        continue
                    if is_reference and graph.ops[user].type in SAME_BUFFER:
                        same.append(user)
                    else:
                        found.append(user)
        return found, same[1:]

    def _is_inside(self, op: Op) -> bool:
        return op.phase in (Phase.FORWARD, Phase.BACKWARD)

    def _is_compared(self, tensor: int) -> bool:
        record = self.graph.tensors[tensor]
        if tensor in self.taken or tensor in self.lost or record.op in self.closed or record.dtype in UNFED:
            return False
        return not record.dtype.endswith("_ref") and (bytes_of(record.dtype) > 0)

    def _tells(self, tensor: int) -> bool:
        """Whether a difference of a tensor would say more than that of its operand."""
        op, layout = self.graph.producer(tensor), self.view.layout(self.graph.tensor_name(tensor))
        row = traits(op.type)
        if layout is not None and layout.is_replicated:  # of no example; a reference variable's value may be the new one already
            return False
        return (self.graph.tensors[tensor].dtype in DIGITS and row.gives is Gives.OTHER and row.role is not Role.CONSTANT
                and row.state is VariableUse.NONE and self.view.can_take(self.graph.tensor_name(tensor)))

    def _visit(self, op: Op) -> None:
        """Decides about an op's results."""
        row = traits(op.type)
        reason = next((self.lost[t] for position, t in enumerate(op.inputs)
                       if t in self.lost and (op.id, position) not in self.given), "")
        is_exact = True
        if op.type in VARIABLES:
            return
        if row.is_input or row.role is Role.HOST:
            reason = reason or INPUT
        elif op.type in RANDOM or self._draws(op):
            reason = reason or DRAWN
        elif op.name in self.view.inexact:
            reason, is_exact = INEXACT, False
        if not reason:
            return
        is_exact = is_exact and not reason.startswith(INEXACT)
        self.ran[op.id] = reason
        for tensor in op.outputs:
            if tensor in self.taken or tensor in self.lost:
                continue
            if self._can_take(tensor, is_exact):
                self.taken[tensor] = reason
            else:
                self.lost[tensor] = reason

    def _draws(self, op: Op) -> bool:
        row = traits(op.type)
        if row.state is VariableUse.DRAW:
            return bool(op.outputs) and row.rule == "" and self.graph.tensors[op.outputs[0]].dtype.startswith("float")
        return bool(op.body) and any(inner.type in RANDOM for inner in inner_ops(op))

    def _can_take(self, tensor: int, is_exact: bool) -> bool:
        """Whether the divided step's value can stand in the local one.

        If clones have values of their own where the local step has one (the mean of a replica's examples), no value can.
        """
        record, name = self.graph.tensors[tensor], self.graph.tensor_name(tensor)
        if record.dtype in UNFED or record.dtype.endswith("_ref") or record.op in self.closed:
            return False
        if self.graph.ops[record.op].phase is Phase.INPUT:
            return True
        if not is_exact:
            layout = self.view.layout(name)
            if layout is None or not layout.is_sharded:
                return False
        return self.view.can_take(name)

    def _leaving(self) -> Iterable[Use]:
        graph = self.graph
        for index in self.needed:
            op = graph.ops[index]
            if self._is_inside(op) or op.phase in (Phase.INPUT, Phase.UNUSED):
                continue
            for position, tensor in enumerate(op.inputs):
                producer, dtype = graph.producer(tensor), graph.tensors[tensor].dtype
                if (self._is_inside(producer) and producer.id not in self.closed and producer.type not in VARIABLES
                        and dtype not in UNFED and not dtype.endswith("_ref") and dtype != "string"
                        and traits(producer.type).role is not Role.CONSTANT):
                    yield Use(index, position, tensor)

    def _coarse(self) -> Dict[int, str]:
        graph, found = self.graph, {}  # type: OpGraph, Dict[int, str]
        for index in self.needed:
            op = graph.ops[index]
            kinds = [found[t] for position, t in enumerate(op.inputs) if t in found and (index, position) not in self.given]
            kinds += [dtype for dtype in (graph.tensors[t].dtype.replace("_ref", "") for t in op.outputs) if dtype in DIGITS]
            if kinds:
                found.update(dict.fromkeys(op.outputs, min(kinds, key=DIGITS.index)))
        return found


def _closed(graph: OpGraph) -> AbstractSet[int]:
    """Ops inside of version 1 loops and conditions: some of their results are those of one iteration, or of an untaken branch,
    and nobody can fetch them."""
    in_loop = frames(graph)
    looped = {index for index in in_loop if frame_of_outputs(graph.ops[index], in_loop)}
    return looped | may_miss(graph) | (bound(graph, graph.ops) - {op.id for op in graph.ops if op.type in EXITS | MERGES})
