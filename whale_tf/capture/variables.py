"""The variables of an op graph: which ops read, write and initialise each of them.

A reference variable (``VariableV2``) returns a reference tensor, a resource variable (``VarHandleOp``) a handle.  Both are
followed through ops that pass them on (``Identity``, ``Switch``, ``Enter``, the output of ``Assign``, ...) and into function
bodies; the ops at the end determine whether the variable is read or written.
"""
from __future__ import annotations

from collections import deque
from typing import Collection, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from whale_tf.ir.graph import Op, OpGraph, Phase, Shape, bytes_of, elements_of
from whale_tf.ir.traits import CALLS, READS, SWITCHES, VARIABLES, WHILES, VariableUse, first_argument, traits


class Variable(NamedTuple):
    """One variable.  All fields but ``name``, ``shape`` and ``dtype`` are op or tensor numbers.

    Attributes:
        op: the variable's op.
        shape, dtype: of the value (``dtype`` without ``_ref``).
        is_resource: a ``VarHandleOp``.
        reads: ops that need the value, in op order (``Identity`` of a reference, ``ReadVariableOp``, gathers, ...).
        writes: ops that change the value, in op order, including the initializer.
        initializer: the initial Assign, or -1.
        aliases: tensors that refer to the variable; its own output is the first.
        slots: variables updated by the same ``Apply*`` op (momentum, Adam's m and v, ...).
    """

    op: int
    name: str
    shape: Shape
    dtype: str
    is_resource: bool
    reads: Tuple[int, ...]
    writes: Tuple[int, ...]
    initializer: int
    aliases: Tuple[int, ...]
    slots: Tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the value; 0 if a dimension is not known, or the size of an element (strings)."""
        return elements_of(self.shape) * bytes_of(self.dtype)


class Variables:
    """The variables of an op graph by op number, in op order, and which of them each op reads and writes."""

    def __init__(self, items: Dict[int, Variable]) -> None:
        self.items = items
        self.read_by: Dict[int, List[int]] = {}
        self.written_by: Dict[int, List[int]] = {}
        self.alias_of: Dict[int, int] = {}
        for variable in items.values():
            for op in variable.reads:
                self.read_by.setdefault(op, []).append(variable.op)
            for op in variable.writes:
                self.written_by.setdefault(op, []).append(variable.op)
            for tensor in variable.aliases:
                self.alias_of[tensor] = variable.op

    @property
    def initializers(self) -> Dict[int, int]:
        """Variable -> the write that initialises it, if there is one."""
        return {variable.op: variable.initializer for variable in self if variable.initializer >= 0}

    def __iter__(self) -> Iterator[Variable]:
        return iter(self.items.values())

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, op: int) -> Variable:
        return self.items[op]

    def __contains__(self, op: int) -> bool:
        return op in self.items


class _Uses(NamedTuple):
    aliases: List[int]
    reads: Set[int]
    writes: Set[int]


def find_variables(graph: OpGraph) -> Variables:
    """All variables of ``graph``, except those created inside function bodies, which are local to them."""
    follow = _Follower()
    uses = {op.id: follow.uses(graph, op.outputs[0]) for op in graph.ops if op.type in VARIABLES}
    updated_by: Dict[int, List[int]] = {}  # Apply* op -> its variables
    for variable, found in uses.items():
        for writer in found.writes:
            if traits(graph.ops[writer].type).is_update:
                updated_by.setdefault(writer, []).append(variable)
    items = {}
    for variable, found in uses.items():
        op = graph.ops[variable]
        slots = {other for writer in found.writes for other in updated_by.get(writer, ()) if other != variable}
        first_written = _first_input_variables(graph, found, op)
        items[variable] = Variable(
            variable, op.name, op.attrs.get("shape"), op.attrs.get("dtype", ""), op.type == "VarHandleOp",
            tuple(sorted(found.reads)), tuple(sorted(found.writes)), _initializer(graph, op, found.writes),
            tuple(found.aliases), tuple(sorted(slots)) if first_written else ())
    return Variables(items)


def is_apart(graph: OpGraph, variable: Variable, write: int) -> bool:
    """Whether a write is in a function that an op calls, or takes the variable from a branch, a loop or another write of
    version 1.  A copy of the op alone would not write a copy of the variable."""
    return bool(graph.ops[write].body) or graph.ops[variable.op].outputs[0] not in graph.ops[write].inputs


def optimizer_state(graph: OpGraph, variables: Variables, trained: Collection[int]) -> Dict[int, List[int]]:
    """Trained variable -> the variables that its optimizer keeps for it, whether one op updates them or many elementary ops do.

    These are written in every step and lead to the write of a trained variable.  One that leads to several (a step count, the
    powers of Adam's decay rates) belongs to the first::

        m ──> m' = b m + (1 - b) g ──> w' = w - r m'          m belongs to w

    If one op (a condition around the update) writes several trained variables, it belongs to one of its own size; each of these
    gets the same number.
    """
    found: Dict[int, List[int]] = {}
    for variable in variables:
        if variable.op not in trained and any(graph.ops[op].phase is Phase.APPLY for op in variable.writes):
            reached = _first_reached(graph, variables, variable, trained)
            if reached:
                alike = [one for one in reached if variables[one].bytes == variable.bytes] or reached[:1]
                found.setdefault(min(alike, key=lambda one: len(found.get(one, ()))), []).append(variable.op)
    return found


def _first_reached(graph: OpGraph, variables: Variables, variable: Variable, trained: Collection[int]) -> List[int]:
    queue = deque(user for tensor in variable.aliases for user, _ in graph.consumers(tensor))
    seen = set(queue)
    while queue:
        op = graph.ops[queue.popleft()]
        if op.phase is Phase.APPLY:
            reached = [written for written in variables.written_by.get(op.id, ()) if written in trained]
            if reached:
                return reached
        for tensor in op.outputs:
            for user, _ in graph.consumers(tensor):
                if user not in seen:
                    seen.add(user)
                    queue.append(user)
    return []


def _first_input_variables(graph: OpGraph, found: _Uses, variable: Op) -> bool:
    """Whether ``variable`` is not itself a slot, but trained by an ``Apply*`` op (as its first input)."""
    aliases = set(found.aliases)
    return any(traits(graph.ops[writer].type).is_update and graph.ops[writer].inputs[0] in aliases for writer in found.writes)


def _initializer(graph: OpGraph, variable: Op, writes: Set[int]) -> int:
    """The initial Assign: ``<variable>/Assign``, TensorFlow's name for it, else the first plain Assign."""
    plain = [op for op in sorted(writes) if graph.ops[op].type in ("Assign", "AssignVariableOp")]
    for op in plain:
        if graph.ops[op].name == variable.name + "/Assign":
            return op
    return plain[0] if plain else -1


class _Follower:
    """Follows references; results inside function bodies are remembered, because bodies are shared."""

    def __init__(self) -> None:
        self._inside: Dict[Tuple[int, int], Tuple[bool, bool]] = {}

    def uses(self, graph: OpGraph, tensor: int) -> _Uses:
        """What happens to the variable that ``tensor`` refers to."""
        found = _Uses([tensor], set(), set())
        seen = {tensor}
        for alias in found.aliases:  # grows while we walk
            for op_id, position in graph.consumers(alias):
                op = graph.ops[op_id]
                passed = passed_on(graph, op, position)
                if passed:
                    fresh = [output for output in passed if output not in seen]
                    seen.update(fresh)
                    found.aliases.extend(fresh)
                reads, writes = self._effect(graph, op, position, bool(passed))
                if reads:
                    found.reads.add(op_id)
                if writes:
                    found.writes.add(op_id)
        return found

    def _effect(self, graph: OpGraph, op: Op, position: int, passes_on: bool) -> Tuple[bool, bool]:
        """(reads, writes) of the use of a reference at one input."""
        if op.body:
            return self._body_effect(op, position)
        if _writes(graph, op, position):
            return False, True
        is_harmless = traits(op.type).state in (VariableUse.IS_INITIALIZED, VariableUse.HANDLE)
        return not (passes_on or op.type == "_Retval" or is_harmless), False

    def _body_effect(self, op: Op, position: int) -> Tuple[bool, bool]:
        reads = writes = False
        argument = position - first_argument(op.type)
        for body in (op.body or {}).values():
            key = (id(body), argument)
            if key not in self._inside:
                self._inside[key] = (False, False)  # a recursive call adds nothing to the first visit
                self._inside[key] = self._argument_effect(body, argument)
            reads |= self._inside[key][0]
            writes |= self._inside[key][1]
        return reads, writes

    def _argument_effect(self, body: OpGraph, argument: int) -> Tuple[bool, bool]:
        for op in body.ops:
            if op.type == "_Arg" and op.attrs["index"] == argument:
                found = self.uses(body, op.outputs[0])
                return bool(found.reads), bool(found.writes)
        return True, False  # captured by a dataset function, at an offset that is not known here: such functions only read


def _writes(graph: OpGraph, op: Op, position: int) -> bool:
    """Whether the input at ``position`` is a reference through which ``op`` writes."""
    row = traits(op.type)
    if row.is_update:  # the variable and its slots: the leading references
        return all(_is_reference(graph, source) for source in op.inputs[:position + 1])
    return position == 0 and (row.is_write or row.state is VariableUse.DRAW)


def passed_on(graph: OpGraph, op: Op, position: int, callers: Tuple[OpGraph, ...] = ()) -> List[int]:
    """Outputs of ``op`` that refer to the same variable as its input at ``position``.  A function that is differentiated returns
    the handles of variables that it passes to a loop: the gradient takes their shapes.

    Args:
        callers: the functions in which the op is; a recursive one is not followed again.
    """
    if not any(_is_reference(graph, output) for output in op.outputs):
        return []
    if traits(op.type).passes_reference:
        if op.type == "IdentityN":
            candidates = [op.outputs[position]]
        elif op.type in SWITCHES:
            candidates = list(op.outputs)
        else:
            candidates = [op.outputs[0]]
    elif op.type in WHILES:
        candidates = [op.outputs[position]] if position < len(op.outputs) else []
    elif op.type in CALLS:
        candidates = [op.outputs[index] for body in (op.body or {}).values() if body not in callers
                      for index in _returned(body, position, callers)]
    elif position == 0 and op.outputs:
        candidates = [op.outputs[0]]  # Assign, Scatter*, Apply* pass on the written reference
        return [output for output in candidates if graph.tensors[output].dtype.endswith("_ref")]
    else:
        return []
    return [output for output in candidates if _is_reference(graph, output)]


def _returned(body: OpGraph, argument: int, callers: Tuple[OpGraph, ...]) -> List[int]:
    """Results of a function that refer to the same variable as its parameter."""
    aliases = [op.outputs[0] for op in body.ops if op.type == "_Arg" and op.attrs["index"] == argument]
    found = []
    for alias in aliases:  # grows
        for user, position in body.consumers(alias):
            if body.ops[user].type == "_Retval":
                found.append(body.ops[user].attrs["index"])
            else:
                passed = passed_on(body, body.ops[user], position, (*callers, body))
                aliases += [tensor for tensor in passed if tensor not in aliases]
    return found


def _is_reference(graph: OpGraph, tensor: int) -> bool:
    dtype = graph.tensors[tensor].dtype
    return dtype == "resource" or dtype.endswith("_ref")


def home_variable(graph: OpGraph, variables: Variables, tensor: int) -> Optional[int]:
    """The variable that ``tensor`` stands for in a gradient call: the one to which it refers, or whose value it is (an
    ``Identity`` or ``ReadVariableOp`` right after it)."""
    if tensor in variables.alias_of:
        return variables.alias_of[tensor]
    producer = graph.producer(tensor)
    if producer.type in READS and producer.inputs[0] in variables.alias_of:
        return variables.alias_of[producer.inputs[0]]
    return None
