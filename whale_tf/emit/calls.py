"""Batch-level ops as calls: a function for each body, and one op for each call of it.

::

    op graph     x ──> matmul ──> relu ──> (loss)          body t0_forward: matmul, relu
    functions    whale_t0_forward(x, w) { matmul; relu } -> relu
    graph        whale/g0_m0_r0/t0_forward = PartitionedCall(x of this clone, w, f=whale_t0_forward)

A function contains the constants and conversions of a clone (see ``emit/convert.py``), so clones with the same sizes share one.
Numbers that are known only at run time, and values of the whole mini-batch, are further arguments.  If a tensor is fetched that
no function returns, separate calls compute it: from scratch or, in a run that updates variables, from what the step's calls
return, because these read the variables before the update.
"""

from __future__ import annotations

import warnings
from typing import Callable, Dict, Hashable, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from whale_tf._tf_compat import tf
from whale_tf.emit.bodies import Bodies, BodyContext
from whale_tf.emit.context import ORIGINAL, Context, Coordinates, Copy
from whale_tf.emit.convert import Converter, takes_some
from whale_tf.emit.donations import Donations
from whale_tf.emit.guard import Guard
from whale_tf.emit.operands import Operands
from whale_tf.emit.order import Order
from whale_tf.emit.shares import Number, Shares
from whale_tf.emit.xla import MUST_COMPILE
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor.function_copy import FunctionCopy
from whale_tf.graph_editor.names import free_name
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.batch_axis import Reduce, Slice
from whale_tf.ir.graph import Op
from whale_tf.ir.layout import PLAIN, REFERENCE, Base, batch_of
from whale_tf.passes.form import has_reference_variables
from whale_tf.program import CLONED, Body, Clone
from whale_tf.transforms.attributes import open_shapes, reseed


class Argument(NamedTuple):
    """What a call passes: ``of(clone)`` is the name of the tensor."""

    name: str
    dtype: tf.DType
    of: Callable[[Clone], str]


class Function(NamedTuple):
    """A function of the graph's library; ``results``: dtypes of its results; ``checks(clone)``: ops for which a call waits."""

    name: str
    is_stateful: bool
    arguments: Sequence[Argument]
    results: Sequence[tf.DType]
    checks: Sequence[Callable[[Clone], Sequence[str]]]


class _Facts(NamedTuple):
    """Facts that hold for all calls of a body.

    Attributes:
        waits: ops elsewhere that an op of the body waits for.
        sources: batch inputs whose shares determine numbers inside the body.
        calls_functions: the body has functional ops (loops, conditions).
        is_seeded: the body draws random numbers.
    """

    waits: Sequence[int]
    sources: Sequence[int]
    calls_functions: bool
    is_seeded: bool


class Calls:
    """Stages functions and calls.

    Args:
        after: ops outside the region that follow from it; calls cannot wait for them.
    """

    def __init__(self, context: Context, operands: Operands, bodies: Bodies, guard: Guard, after: Set[int]) -> None:
        self.context, self._operands, self._bodies, self._guard, self._after = context, operands, bodies, guard, after
        self._donations = Donations(context, operands.converter.nodes)
        self._functions: Dict[Hashable, Function] = {}
        self._facts: Dict[str, _Facts] = {}
        self._functions_of = {
            body.name: context.program.functions(body) for body in context.program.bodies if body.step in CLONED}
        self._before: Dict[str, Dict[int, str]] = {}  # function -> what earlier functions of its body give -> its name in a clone
        for functions in self._functions_of.values():
            given: Dict[int, str] = {}
            for function in functions:
                self._before[function.name] = dict(given)
                given.update((tensor, f"{function.name}:{number}") for number, tensor in enumerate(function.outputs))
        axis = context.region.batch
        self._shaped = {index for index, _ in axis.attributes}
        self._functional = {index for index, _ in axis.bodies}
        self._seeded = set(axis.own_seed)

    def stage(self, order: Order) -> None:
        """Stage all calls of the program."""
        for call in self.context.program.calls:
            body = self.context.program.bodies[call.body]
            if body.step not in CLONED:
                continue
            before: Sequence[str] = (order.barriers(body.task_graph, call.clone) or {}).get(body.name, ())
            for function in self._functions_of[body.name]:
                before = [self._call(function, call.clone, before)]

    def export(self, tensor: int, beside_update: Optional[Context] = None) -> None:
        """Stages calls that compute a tensor which no function returns.

        Args:
            beside_update: context for its names if the same run updates variables.

        Raises:
            UnsupportedOpError: it would be computed from variables that the same run updates in place.
        """
        context, graph = beside_update or self.context, self.context.graph
        if has_reference_variables(context.program):
            raise UnsupportedOpError(
                f"{graph.tensor_name(tensor)!r} is fetched in a run that updates reference variables in place, and emit is "
                "'call', so it might be computed from values after the update; set emit to 'inline', use resource variables "
                "(tf.compat.v1.enable_resource_variables()), or fetch it in a run without the update")
        body = context.program.bodies[context.program.body_of()[graph.tensors[tensor].op]]
        own = {index for other in context.program.bodies if other.task_graph == body.task_graph and other.step in CLONED
               for index in other.ops}
        is_there = context.is_exported if beside_update is None else context.is_returned
        needed, stack = {graph.tensors[tensor].op}, [graph.tensors[tensor].op]
        while stack:
            op = graph.ops[stack.pop()]
            before = {graph.tensors[t].op for t in op.inputs
                      if not is_there(t) or (beside_update is None and graph.tensors[t].op in body.ops)}
            before.update(index for index in op.control_inputs if index in body.ops)
            stack.extend((before & own) - needed)
            needed |= before & own
        drawn = [graph.ops[index].name for index in sorted(needed & self._seeded)]
        if drawn and beside_update is not None:
            warnings.warn(
                f"{graph.tensor_name(tensor)!r} is fetched from a step that runs as calls of functions. It is computed again for "
                f"the fetch, and random op {drawn[0]!r} draws other numbers than in the step; set emit to 'inline' to see the "
                "step's own value")
        part = body._replace(name=f"{body.name}/{context.flat(tensor)}", functions=(tuple(sorted(needed)),), waits=(),
                             outputs=(tensor,), donated=())
        for clone in context.clones(body.task_graph):
            self._call(part, clone, ())
        context.exported(tensor, f"{part.name}:0")

    def _call(self, body: Body, clone: Clone, before: Sequence[str]) -> str:
        """Stages a call of a body that is one function; returns its op."""
        context, task_graph = self.context, body.task_graph
        function = self._function(body, clone)
        waits = (control_for(context, wait, task_graph, clone, self._after) for wait in self._facts_of(body).waits)
        controls = [name for name in waits if name] + self._guard.waits(body.runs, clone)
        controls += [check for checks in function.checks for check in checks(clone)]
        name = f"{context.scope(clone)}/{body.name}"
        context.edit.add(
            "StatefulPartitionedCall" if function.is_stateful else "PartitionedCall",
            name,
            [argument.of(clone) for argument in function.arguments],
            device=context.device(task_graph, clone),
            control_inputs=controls + list(before),
            attrs={"Tin": [argument.dtype for argument in function.arguments], "Tout": list(function.results),
                   "f": function.name, **({MUST_COMPILE: True} if body.name in context.compiled else {})},
        )
        return name

    # ---------------------------------------------------------------------------------------------------- functions
    def _function(self, body: Body, clone: Clone) -> Function:
        key = (body.name, body.outputs, self._numbers(body, clone))
        if key not in self._functions:
            self._functions[key] = self._build(body, clone)
        return self._functions[key]

    def _numbers(self, body: Body, clone: Clone) -> Hashable:
        """Numbers in which the functions of a body's clones differ."""
        facts, found = self._facts_of(body), []
        division = self._operands.converter.division
        position, number = division.position(body.task_graph, clone), division.mini_batch(clone)
        for source in facts.sources:
            share = division.shares(source, body.task_graph, number)
            start = share.starts[position] if facts.calls_functions else None  # in other bodies it is an argument
            found.append(tuple(None if isinstance(n, str) else n for n in (share.sizes[position], share.total, start)))
        return tuple(found), (clone.g, clone.r) if facts.is_seeded else None

    def _facts_of(self, body: Body) -> _Facts:
        if body.name not in self._facts:
            graph, axis, members = self.context.graph, self.context.region.batch, set(body.runs)
            own = members.union(body.ops)  # nothing waits for an op that is left out of the function
            functional = members & self._functional
            numbered = functional.union(op for op, _ in (*axis.conversions, *axis.localise) if op in members)
            self._facts[body.name] = _Facts(
                sorted({c for i in body.runs for c in graph.ops[i].control_inputs if c not in own}),
                sorted({self._operands.converter.source_of_op(graph.ops[i], batch) for i in numbered for batch in axis.batches}),
                bool(functional),
                bool(functional or members & self._seeded),
            )
        return self._facts[body.name]

    def _build(self, body: Body, clone: Clone) -> Function:
        """Stages the function that a clone calls."""
        context, graph = self.context, self.context.graph
        copy = FunctionCopy(context.tf_graph)
        arguments = _Arguments(copy)
        inner = BodyContext(context, context.region.batch, body.task_graph)
        converter = _CallConverter(inner, Nodes(copy), self._operands.converter, arguments)
        members, also = set(body.runs), dict(body.waits)
        originals = {index: context.edit.original(context.tf_ops[index]) for index in body.runs}
        for index, node in originals.items():
            waits = [graph.ops[c].name for c in graph.ops[index].control_inputs if c in members]
            if index in also:
                waits.append(graph.ops[also[index]].name)
            copy.insert(node, [""] * len(graph.ops[index].inputs), waits)

        converter.whole_value = lambda tensor, task_graph, clone: value(tensor)
        donated = self._donations.read(body, copy, arguments.add)

        def value(tensor: int) -> str:
            if tensor in donated:
                return donated[tensor]
            record = graph.tensors[tensor]
            producer = graph.ops[record.op]
            if record.op in originals:
                return copy.edge(originals[record.op], record.index)
            if producer.type == "Const" and producer.value is not None and context.region.contains(producer):
                originals[record.op] = context.edit.original(context.tf_ops[record.op])
                copy.insert(originals[record.op])
                return copy.edge(originals[record.op], record.index)
            return arguments.add(("value", tensor), context.dtype(tensor), lambda clone: self._value(body, tensor, clone))

        for index in body.runs:
            op = graph.ops[index]
            for position in range(len(op.inputs)):
                copy.set_operand(op.name, position, self._operand(op, position, value, converter, clone))
            if index in context.region.batch.counted_rows:
                converter.tell_rows(op, copy.node(op.name), clone, str)
            self._attributes(op, copy, clone, arguments)
        for number, tensor in enumerate(body.outputs):
            copy.return_also(value(tensor), context.dtype(tensor), f"result_{number}")
        flows = self._donations.write(body, copy, arguments.add, value)
        for number, flow in enumerate(flows):
            copy.return_also(flow, tf.float32, f"flow_{number}")
        words = "".join(c if c.isalnum() else "_" for c in body.name)
        name = free_name(f"whale_{words}", context.edit.has_function)
        definition = copy.finish(name)
        definition.attr["_noinline"].b = True
        if body.name in context.compiled:
            definition.attr[MUST_COMPILE].b = True
        context.edit.add_function(definition)
        results = [context.dtype(t) for t in body.outputs] + [tf.float32] * len(flows)
        return Function(name, definition.signature.is_stateful, arguments.items(), results, arguments.checks)

    def _value(self, body: Body, tensor: int, clone: Clone) -> str:
        if tensor in self._before.get(body.name, {}):
            return f"{self.context.scope(clone)}/{self._before[body.name][tensor]}"
        name = self._operands.value(tensor, body.task_graph, clone)
        return name if self._operands.reads is None else self._operands.reads.of_call(body, tensor, name, clone)

    def _operand(self, op: Op, position: int, value: Callable[[int], str], converter: _CallConverter, clone: Clone) -> str:
        """What an op's input reads inside the function."""
        axis, key, task_graph = self.context.region.batch, (op.id, position), self.context.task_graph_of(op)
        tensor = op.inputs[position]
        if key in axis.localise:
            return converter.localised(op, position, clone, value(tensor) if axis.localise[key].of_section else "")
        conversions = axis.conversions.get(key, ())
        reduced = [n for n, each in enumerate(conversions) if isinstance(each, Reduce)]
        # a value of the whole mini-batch replaces the clone's
        name = self.context.flat(tensor) if reduced else value(tensor)
        for conversion in conversions[reduced[-1] if reduced else 0:]:
            name = converter.convert(name, tensor, conversion, task_graph, clone, op)
        if key in converter.division.rescaled:
            name = converter.times_mini_batches(name, tensor, task_graph, clone)
        return name

    def _attributes(self, op: Op, copy: FunctionCopy, clone: Clone, arguments: _Arguments) -> None:
        """Changes what differs from the original besides operands: shapes, seeds, and the functions that the op calls."""
        if op.id in self._shaped:
            open_shapes(copy.node(op.name), op, self.context.region.batch)
        if op.id in self._seeded:
            reseed(copy.node(op.name), self.context.seed(Copy(clone.g, clone.r)))
        if op.id in self._functional:
            self._bodies.localise_in(
                op, copy.node(op.name), clone,
                lambda number, dtype, of: arguments.add(("run time", op.id, number), dtype, of))


class _Arguments:
    """The parameters of a function under construction, each once."""

    def __init__(self, copy: FunctionCopy) -> None:
        self._copy = copy
        self._found: Dict[Hashable, Argument] = {}
        self.checks: List[Callable[[Clone], Sequence[str]]] = []  # of(clone): ops for which its call waits

    def add(self, key: Hashable, dtype: tf.DType, of: Callable[[Clone], str]) -> str:
        """The parameter that stands for ``key``."""
        if key not in self._found:
            name = self._copy.parameter(f"argument_{len(self._found)}", dtype)
            self._found[key] = Argument(name, dtype, of)
        return self._found[key].name

    def passed(self, name: str) -> Optional[Callable[[Clone], str]]:
        """What a clone's call passes for the parameter of that name; None: there is none."""
        return next((argument.of for argument in self._found.values() if argument.name == name), None)

    def items(self) -> List[Argument]:
        return list(self._found.values())


class _CallConverter(Converter):
    """Conversions inside a function.  A number of the clone is a constant if it is known now, else a parameter.  The start of its
    examples is always a parameter, because it differs from clone to clone."""

    def __init__(self, context: Context, nodes: Nodes, outer: Converter, arguments: _Arguments) -> None:
        super().__init__(context, nodes, outer.division, outer.inputs, outer.communicator)
        self._outer = outer
        self._arguments = arguments

    def weight(self, tensors: Sequence[int], task_graph: int, at: Clone, dtype: tf.DType,
               base: Base = PLAIN) -> Union[float, str]:
        weight = self._outer.weight(tensors, task_graph, at, dtype, base)
        if not isinstance(weight, str):
            return weight
        return self._arguments.add(("weight", self._outer.counted(base, tensors), dtype.name), dtype,
                                   lambda clone: str(self._outer.weight(tensors, task_graph, clone, dtype, base)))

    def share_of_op(self, op: Op, task_graph: int, at: Clone, batch: str = REFERENCE) -> Tuple[Shares, int]:
        share, position = self._outer.share_of_op(op, task_graph, at, batch)
        source = self.source_of_op(op, batch)

        def size_of(clone: Clone) -> Number:
            found, own = self._outer.share_of_op(op, task_graph, clone, batch)
            return found.sizes[own]

        def start_of(clone: Clone) -> str:
            found, own = self._outer.share_of_op(op, task_graph, clone, batch)
            return self._outer.scalar(found.starts[own])

        sizes, starts = list(share.sizes), list(share.starts)
        sizes[position] = self._number(("size", source), sizes[position], size_of)
        starts[position] = self._arguments.add(("start", source), tf.int32, start_of)
        total = self._number(("whole", source), share.total,
                             lambda clone: self._outer.share_of_op(op, task_graph, clone, batch)[0].total)
        return Shares(total, tuple(sizes), tuple(starts)), position

    def before(self, op: Op, task_graph: int, at: Clone, batch: str = REFERENCE) -> Number:
        return self._arguments.add(("before", self.source_of_op(op, batch)), tf.int32,
                                   lambda clone: self._outer.scalar(self._outer.before(op, task_graph, clone, batch)))

    def totals(self, op: Op, task_graph: int, batch: str = REFERENCE) -> List[Number]:
        source = self.source_of_op(op, batch)
        return [
            self._number(("total", source, index), value,
                         lambda clone, index=index: self._outer.totals(op, task_graph, batch)[index])  # type: ignore[misc]
            for index, value in enumerate(self._outer.totals(op, task_graph, batch))
        ]

    def compared(self, name: str, tensor: int, conversion: Slice, task_graph: int, at: Clone,
                 op: Op) -> Optional[Sequence[str]]:
        if takes_some(op):
            return ()
        totals = {batch: self._outer.share_of_op(op, task_graph, at, batch)[0].total
                  for batch in map(batch_of, conversion.blocks)}
        if self.is_static(tensor, conversion, totals):
            return ()
        of = self._arguments.passed(name)
        if self.has_static_rows(tensor, conversion):
            of = str  # its name does not matter
        if of is None:  # made inside the function
            return None
        self._arguments.checks.append(
            lambda clone: self._outer.compared(of(clone), tensor, conversion, task_graph, clone, op) or ())  # type: ignore[misc]
        return ()

    def rows_told(self, batch: str, task_graph: int, at: Clone, op: Op) -> Sequence[str]:
        self._arguments.checks.append(lambda clone: self._outer.rows_told(batch, task_graph, clone, op))
        return ()

    def combined(self, tensor: int, how: Reduce) -> str:  # type: ignore[override]
        return self._arguments.add(("combined", tensor, how), self.context.dtype(tensor),
                                   lambda clone: self._outer.combined(tensor, how))

    def _number(self, key: Hashable, value: Number, of: Callable[[Clone], Number]) -> Number:
        """A count that is known now, or the parameter that stands for it."""
        return self._arguments.add(key, tf.int32, lambda clone: str(of(clone))) if isinstance(value, str) else value


def control_for(context: Context, wait: int, task_graph: int, at: Coordinates, after: Set[int]) -> Optional[str]:
    """The op that a clone or copy waits for if the original waits for op ``wait``; None: it does not wait."""
    op = context.graph.ops[wait]
    if not context.region.contains(op):
        return None if wait in after and all(wait not in waits for waits in context.region.rereads.values()) else op.name
    if op.id in context.region.drawn_once:
        return op.name
    own = context.task_graph_of(op)
    if op.id in context.region.batch_level:
        if not isinstance(at, Clone):
            return None
        peer: Coordinates = at._replace(r=at.r % context.plan.task_graphs[own].replica_count)
    else:
        peer = context.copy_for(own, at)
        if peer == ORIGINAL or op.id in context.variables:
            return context.gathered.ops.get(op.id, op.name)
    return context.op_in(op, peer)
