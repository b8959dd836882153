"""The phase of every op, and the cut between BACKWARD and APPLY.

::

    placeholder, iterator            INPUT
          |            variable
          v           /   ^
       forward ops <--    | writes             N: what the gradient calls compute, and all that this needs
          |               |
       backward ops       |
          |               |
    - - - | - - - cut - - | - - - - - -
          v               |
       clipping ... -> ApplyAdam               APPLY

Everything is decided on the op graph, from the names that the gradient calls left behind:

* N is the set of ancestors of all ``ys`` and of all gradients of variables.
* The cut is the set of edges from a gradient of a variable to an op outside N.  A gradient that is used on the way to a
  later gradient call (a gradient penalty) stays inside N.
* An op that writes a variable is never in N: state is written once per step, from merged values.  An op of N that waits for
  such a write by a control edge is listed in ``Phases.waits``.
"""
from __future__ import annotations

from functools import lru_cache
from typing import Callable, Iterable, List, NamedTuple, Optional, Set, Tuple

from whale_tf.capture.annotations import PHASE_ATTR, Annotations
from whale_tf.capture.variables import Variables, find_variables, home_variable
from whale_tf.errors import GraphError
from whale_tf.ir.graph import CALL_ATTR, Op, OpGraph, Phase
from whale_tf.ir.traits import CONDITIONALS, ENTERS, WHILES, OpTraits, Role, VariableUse, traits
from whale_tf.ir.units import frames
from whale_tf.ir.walk import reached


class Target(NamedTuple):
    """The gradient of one variable from one gradient call: ``tensors`` is (gradient,) or, for a sparse one, (values, indices) or
    (values, indices, dense_shape)."""

    call: int
    variable: int
    tensors: Tuple[int, ...]

    @property
    def is_sparse(self) -> bool:
        return len(self.tensors) > 1


class CutEdge(NamedTuple):
    """Gradient ``tensor`` is read by op ``op``, outside N, at input ``position``."""

    tensor: int
    op: int
    position: int


class Wait(NamedTuple):
    """Op ``op`` of N waits, by a control edge, for ``on``, which is or needs a write of a variable.

    A clone cannot wait for ``on``, because the write may need the merged values of all clones.  The update must wait for it
    instead."""

    op: int
    on: int


class Phases(NamedTuple):
    """What :func:`find_phases` found besides ``op.phase``.

    Attributes:
        targets: gradients of variables, by call and variable.
        cut: edges from them to ops outside N, ordered by op.
        waits: see :class:`Wait`.
        writes_inside: ops of N that write variables and also compute something that N needs (a loop, a condition or a function
            call with an assignment in its body).
        variables: the graph's variables.
    """

    targets: Tuple[Target, ...]
    cut: Tuple[CutEdge, ...]
    waits: Tuple[Wait, ...]
    writes_inside: Tuple[int, ...]
    variables: Variables


def find_phases(graph: OpGraph, annotations: Annotations) -> Phases:
    """Sets ``op.phase`` of every op and finds the cut.  Calling it again gives the same result.

    A variable's own op is FORWARD if N reads it, else APPLY, OTHER or INIT like the ops that use it.

    Raises:
        GraphError: a gradient call names a tensor that the graph does not have.
    """
    return _Finder(graph, annotations).run()


class _Finder:
    """Marks ops phase by phase; an op keeps the first phase that it gets."""

    def __init__(self, graph: OpGraph, annotations: Annotations) -> None:
        self.graph = graph
        self.calls = annotations.gradient_calls
        self.variables = find_variables(graph)
        self.writes = set(self.variables.written_by)
        self.phase: List[Optional[Phase]] = [None] * len(graph.ops)
        self.sources = _sources(graph)
        self.successors = _successors(graph, self.sources)
        self.region: Set[int] = set()

    def run(self) -> Phases:
        targets = self._targets()
        waits = self._find_region(targets)
        self._mark_input()
        self._mark_region()
        cut = self._cut(targets)
        restored = self._descendants(_ops_where(self.graph, lambda row: row.role is Role.RESTORE))
        self._mark_apply(cut, restored)
        self._mark_init(restored)
        self._mark_save(restored)
        self._mark_variables()
        self._mark_unused()
        for op, phase in zip(self.graph.ops, self.phase):
            op.phase = Phase.OTHER if phase is None else phase
        return Phases(targets, cut, waits, tuple(sorted(self.region & self.writes)), self.variables)

    # -- gradient calls -------------------------------------------------------------------------------------------
    def _tensor(self, name: str) -> int:
        try:
            return self.graph.tensor(name)
        except (KeyError, IndexError):
            raise GraphError(f"a gradient call used tensor {name!r}, which the graph does not have. Are the annotations from "
                             "another graph?") from None

    def _producers(self, names: Iterable[str]) -> List[int]:
        return [self.graph.tensors[self._tensor(name)].op for name in names]

    def _targets(self) -> Tuple[Target, ...]:
        targets = []
        for call in self.calls:
            for x, grad in zip(call.xs, call.grads):
                variable = None if grad is None else home_variable(self.graph, self.variables, self._tensor(x))
                if variable is not None and grad is not None:
                    names = (grad,) if isinstance(grad, str) else grad
                    targets.append(Target(call.index, variable, tuple(self._tensor(n) for n in names if n is not None)))
                    if not targets[-1].is_sparse:
                        self._learn_shape(targets[-1].tensors[0], self._tensor(x), variable)
        return tuple(targets)

    def _learn_shape(self, gradient: int, x: int, variable: int) -> None:
        """A gradient has the shape of the tensor that it is with respect to, even if TensorFlow has lost it (as for
        ``tf.tensordot`` of a batch of unknown size)."""
        tensors = self.graph.tensors
        known = self.variables[variable].shape if tensors[x].dtype == "resource" else tensors[x].shape
        shape = tensors[gradient].shape
        if known is not None and None not in known and (shape is None or None in shape):
            tensors[gradient] = tensors[gradient]._replace(shape=tuple(known))

    # -- N --------------------------------------------------------------------------------------------------------
    def _find_region(self, targets: Tuple[Target, ...]) -> Tuple[Wait, ...]:
        """Fills ``self.region`` with N; returns the control edges from N to writes, which were not followed."""
        plain_writes = {op for op in self.writes if not self.graph.ops[op].body}

        def grow(roots: Iterable[int]) -> List[int]:
            added = self._ancestors(roots, lambda op: op not in self.region and op not in plain_writes, control=False)
            self.region.update(added)
            return sorted(added)

        pending = grow(self._producers(y for call in self.calls for y in call.ys)
                       + [self.graph.tensors[tensor].op for target in targets for tensor in target.tensors])
        after_write = self._descendants(  # a gradient call's own groupings inherit the wait, but are its own
            self.writes - self.region, lambda op: op not in self.region and not _is_backward(self.graph.ops[op]))
        waits = []
        for op in pending:  # grows while we walk
            for control in self.graph.ops[op].control_inputs:
                if control in after_write:
                    waits.append(Wait(op, control))
                elif control not in self.region:
                    pending.extend(grow([control]))
        return tuple(sorted(waits))

    def _mark_region(self) -> None:
        helpers = self._forward_helpers()
        for op in self.region:
            if self.phase[op] is None:
                is_backward = _is_backward(self.graph.ops[op]) and op not in helpers
                self.phase[op] = Phase.BACKWARD if is_backward else Phase.FORWARD

    def _forward_helpers(self) -> Set[int]:
        """Ops that a gradient call put into the forward pass: a loop's iteration counter, and the stacks and accumulators that
        keep its intermediate values.  They are the call's ops that its own ``ys`` need, or that run inside a loop of the forward
        pass, and the ops that those need."""
        helpers: Set[int] = set()
        if not self.graph.has_any(_SCOPED):
            return helpers
        in_forward_loop = _ops_in_forward_loops(self.graph)
        for call in self.calls:
            own = {op.id for op in self.graph.ops if op.attrs.get(CALL_ATTR) == call.index}
            needed = self._ancestors(self._producers(call.ys), lambda op: True, control=True)
            helpers |= self._ancestors(own & (needed | in_forward_loop), own.__contains__, control=True)
        return helpers

    def _cut(self, targets: Tuple[Target, ...]) -> Tuple[CutEdge, ...]:
        edges = {CutEdge(tensor, op, position)
                 for target in targets for tensor in target.tensors
                 for op, position in self.graph.consumers(tensor) if op not in self.region}
        return tuple(sorted(edges, key=lambda edge: (edge.op, edge.position)))

    # -- the other phases -----------------------------------------------------------------------------------------
    def _mark_input(self) -> None:
        """Ops that bring in data, and their ancestors as far as they do not depend on variables: a placeholder whose default the
        model computes is part of the model, and so is a Python function of the model's values.  The gradient of one takes these
        from where Python has kept them, and follows from no variable in the graph."""
        ops = self.graph.ops

        @lru_cache(maxsize=None)  # few graphs have ops for which this must be known
        def from_variables() -> Set[int]:
            return self._descendants(self.variables.items, control=False)

        def is_source(op: int) -> bool:
            may_compute = ops[op].type == "PlaceholderWithDefault" or traits(ops[op].type).role is Role.HOST
            return not (may_compute and (op in from_variables() or _is_backward(ops[op])))

        def brings_data(op: int) -> bool:
            return op in sources or not (_is_backward(ops[op]) or op in from_variables())

        sources = set(filter(is_source, _ops_where(self.graph, lambda row: row.is_input or row.role is Role.HOST)))

        self._mark(self._ancestors(sources, brings_data, control=True), Phase.INPUT)

    def _mark_apply(self, cut: Tuple[CutEdge, ...], restored: Set[int]) -> None:
        """APPLY: ops that follow the cut and lead to a write of a variable (a summary of a gradient does not), the NoOps that
        group the writes, and the ops outside N that the writes need.

        If the writes wait (by control edges) for writes of state that N computes, such as BatchNorm's averages, these are not
        part of the update."""
        ops = self.graph.ops
        after_cut = self._descendants({edge.op for edge in cut}, lambda op: op not in self.region and op not in restored)
        trained = {variable for op in after_cut & self.writes for variable in self.variables.written_by[op]}

        @lru_cache(maxsize=None)  # few updates wait for anything about which this must be known
        def after_region() -> Set[int]:
            return self._descendants(self.region, lambda op: op not in after_cut)

        def is_update(op: int) -> bool:
            if op in self.writes:
                return not trained.isdisjoint(self.variables.written_by[op]) or op not in after_region()
            return True

        apply = set()
        pending = sorted(after_cut & self.writes)
        while pending:
            op = pending.pop()
            if op in apply:
                continue
            apply.add(op)
            sources = {self.graph.tensors[source].op for source in ops[op].inputs}
            pending.extend(source for source in sources if self._is_free(source) and is_update(source))
            pending.extend(control for control in ops[op].control_inputs
                           if self._is_free(control) and is_update(control)
                           and (control in after_cut or control in self.writes or control not in after_region()))
        for group in ops:
            if group.id in after_cut and not group.outputs:
                if any(source in apply for source in self.graph.predecessors(group)):
                    apply.add(group.id)
        self._mark(apply - set(self.variables.items), Phase.APPLY)

    def _is_free(self, op: int) -> bool:
        return self.phase[op] is None

    def _mark_init(self, restored: Set[int]) -> None:
        ops = self.graph.ops
        initialisers = set(self.variables.initializers.values())
        initialisers.update(_ops_where(self.graph, lambda row: row.role is Role.INITIALIZE))
        initialisers = {op for op in initialisers if self._is_free(op)}
        needed = self._ancestors(initialisers, lambda op: self._is_free(op) and op not in self.variables, control=True)
        self._mark(needed, Phase.INIT)
        self._mark(_ops_where(self.graph, lambda row: row.state is VariableUse.IS_INITIALIZED), Phase.INIT)
        for op in ops:
            if op.type == "NoOp" and op.control_inputs and self._is_free(op.id):
                before = {Phase.INIT if self.phase[control] is None and control in restored else self.phase[control]
                          for control in op.control_inputs}
                if before == {Phase.INIT} and not restored.issuperset(op.control_inputs):
                    self._mark([op.id], Phase.INIT)

    def _mark_save(self, restored: Set[int]) -> None:
        """Save and restore ops, the ops after them, and ops that serve nothing else."""
        ops = self.graph.ops
        saving = self._descendants(_ops_where(self.graph, lambda row: row.role in (Role.SAVE, Role.RESTORE)), self._is_free)
        self._mark(saving | restored, Phase.SAVE)
        for op in reversed(ops):
            users = self.successors[op.id]
            if users and self.phase[op.id] in (None, Phase.INPUT) and op.id not in self.variables:
                if all(self.phase[user] is Phase.SAVE for user in users):
                    self.phase[op.id] = Phase.SAVE  # the file name is a placeholder, too

    def _mark_variables(self) -> None:
        for variable in self.variables:
            used_in = {self.phase[op] for op in variable.reads + variable.writes}
            for phase in (Phase.APPLY, None, Phase.INPUT):
                if phase in used_in:
                    self._mark([variable.op], Phase.OTHER if phase is None else phase)
            self._mark([variable.op], Phase.INIT)

    def _mark_unused(self) -> None:
        """Ops of gradient calls that nobody needs: TensorFlow computes the gradients of all operands of an op."""
        asked = {self.graph.tensors[self._tensor(name)].op for call in self.calls for grad in call.grads if grad is not None
                 for name in ((grad,) if isinstance(grad, str) else grad) if name is not None}
        for op in reversed(self.graph.ops):
            if self._is_free(op.id) and _is_backward(op) and op.id not in asked and all(
                    self.phase[user] is Phase.UNUSED for user in self.successors[op.id]):
                self.phase[op.id] = Phase.UNUSED

    # -- walking --------------------------------------------------------------------------------------------------
    def _mark(self, ops: Iterable[int], phase: Phase) -> None:
        for op in ops:
            if self.phase[op] is None:
                self.phase[op] = phase

    def _ancestors(self, roots: Iterable[int], allowed: Callable[[int], bool], control: bool) -> Set[int]:
        """``roots`` and their ancestors, reached only through ``allowed`` ops."""
        ops, sources = self.graph.ops, self.sources

        def before(op: int) -> Iterable[int]:
            controls = ops[op].control_inputs if control else ()
            return filter(allowed, sources[op] + controls if controls else sources[op])

        return reached(filter(allowed, roots), before)

    def _descendants(self, roots: Iterable[int], allowed: Optional[Callable[[int], bool]] = None,
                     control: bool = True) -> Set[int]:
        """``roots`` and their descendants, reached only through ``allowed`` ops (None: all)."""
        following = self.successors.__getitem__ if control else self._readers
        return reached(roots, following if allowed is None else lambda op: filter(allowed, following(op)))

    def _readers(self, op: int) -> List[int]:
        return [user for output in self.graph.ops[op].outputs for user, _ in self.graph.consumers(output)]


_SCOPED = ENTERS | WHILES | CONDITIONALS  # where a gradient call may have put ops into the forward pass


def _ops_where(graph: OpGraph, is_wanted: Callable[[OpTraits], bool]) -> List[int]:
    """Ops with wanted traits."""
    types = {op_type for op_type in graph.types if is_wanted(traits(op_type))}
    return [op.id for op in graph.ops if op.type in types] if types else []


def _sources(graph: OpGraph) -> List[Tuple[int, ...]]:
    """For every op, the ops whose results it reads."""
    maker = [tensor.op for tensor in graph.tensors]
    return [tuple([maker[tensor] for tensor in op.inputs]) for op in graph.ops]


def _successors(graph: OpGraph, sources: List[Tuple[int, ...]]) -> List[List[int]]:
    """For every op, the ops that wait for it, by data or control edges."""
    successors: List[List[int]] = [[] for _ in graph.ops]
    for op, read in zip(graph.ops, sources):
        for source in read:
            successors[source].append(op.id)
        for control in op.control_inputs:
            successors[control].append(op.id)
    return successors


def _is_backward(op: Op) -> bool:
    return op.attrs.get(PHASE_ATTR) == "backward"


def _ops_in_forward_loops(graph: OpGraph) -> Set[int]:
    """Ops inside a v1 while loop that was not made by a gradient call."""
    forward_frames = {op.attrs["frame_name"] for op in graph.ops if op.type in ENTERS and not _is_backward(op)}
    return {op for op, inside in frames(graph).items() if inside[-1] in forward_frames}
