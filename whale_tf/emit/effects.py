"""Conditions and calls that update variables of several processes become one for each process.

::

    before    cond(finite, w0, w1, count)  { w0 -= g0;  w1 -= g1;  count += 1 }
    after     cond_of_0(finite, w0)        { w0 -= g0 }
              cond_of_1(finite, w1)        { w1 -= g1 }
              cond_of_all(finite, count)   { count += 1 }               in each process, after its others

Keras' ``LossScaleOptimizer`` and its accumulated gradients update all variables in one condition.  Variables that each process
has (step counters, loss scales) are updated last, because the others may read them.

If what one process computes follows from another's variables, there are several rounds (:mod:`whale_tf.passes.rounds`).  A piece
returns what later ones read, and takes what earlier ones return.  These results cross like any others, in every step: a branch
that does not compute one returns zeros in its place, which nobody reads::

    before    cond(is_due, a0, a1)         { norm = sqrt(|a0|^2 + |a1|^2);  w0 -= a0 / norm;  w1 -= a1 / norm }
    after     cond_of_0(is_due, a0)        { s0 = |a0|^2 } -> s0        else -> 0
              cond_of_1(is_due, a1)        { s1 = |a1|^2 } -> s1        else -> 0
              cond_of_0_2(is_due, a0, w0, s0, s1)  { norm = sqrt(s0 + s1);  w0 -= a0 / norm }
              cond_of_1_2(is_due, a1, w1, s0, s1)  { norm = sqrt(s0 + s1);  w1 -= a1 / norm }
"""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from whale_tf._tf_compat import FunctionDef, NodeDef, op_def, static_dims, tf
from whale_tf.cluster import process_of
from whale_tf.graph_editor import consumers
from whale_tf.graph_editor.control_flow import call_functions, function_names
from whale_tf.graph_editor.edges import control_edges
from whale_tf.graph_editor.function_copy import FunctionCopy, data_inputs
from whale_tf.graph_editor.names import free_name, names_taken
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.graph import Shape
from whale_tf.ir.traits import CALLS, CONDITIONALS, RANDOM, VariableUse, first_argument, traits
from whale_tf.ir.walk import reached
from whale_tf.passes.rounds import EVERY, CyclicError, Node, Rounds, find_rounds

Owner = Optional[int]  # a process; None: every process has it
_DIVIDED = CONDITIONALS | CALLS
_SEEDS = "seed", "seed2"
_READS = (VariableUse.READ, VariableUse.HANDLE, VariableUse.IS_INITIALIZED)
_Edges = Callable[[int], str]  # number of a result -> its name


class _CannotDivide(Exception):
    """A process would need a value of another one that cannot travel, or an op takes variables of several processes."""


class Divided(NamedTuple):
    """Attributes:
    owners: piece -> the process to which it belongs; None: every process runs it.
    pieces: op -> its pieces.
    results: name of an op's result -> name of the piece's that stands for it.
    """

    owners: Dict[str, Owner]
    pieces: Dict[str, List[str]]
    results: Dict[str, str]


def divide_effects(graph: tf.Graph, owners: Mapping[str, Owner], members: Sequence[int]) -> Dict[str, Owner]:
    """Divides the ops of a function's graph that update variables of several processes.  Ops that cannot be divided stay as they
    are.

    Args:
        owners: placeholder of a variable's handle -> the process that keeps the variable; None: every process has it.
        members: the processes that run the step.

    Returns:
        The pieces, and the process to which each belongs; None: every process runs it.
    """
    found = divide_ops(graph, graph.get_operations(), owners, members)
    graph.outputs = [graph.get_tensor_by_name(found.results.get(tensor.name, tensor.name)) for tensor in graph.outputs]
    graph.control_outputs = [graph.get_operation_by_name(name) for op in graph.control_outputs
                             for name in found.pieces.get(op.name, [op.name])]
    return found.owners


def divide_ops(graph: tf.Graph, ops: Sequence[tf.Operation], owners: Mapping[str, Owner], members: Sequence[int],
               device: Optional[Callable[[Owner], str]] = None) -> Divided:
    """Divides those of some ops that update variables of several processes, or draw random numbers without a seed that all
    processes need, and makes the pieces' results take the place of theirs.

    Args:
        owners: op that gives a variable's handle -> the process that keeps the variable; None: every process has it.
        members: the processes that run the step.  Pieces are named after their places among these, so that steps side by side
            have the same names.
        device: of the pieces of a process, in a graph of a Session.  There who reads a result makes all pieces run; a function
            runs them anyway.
    """
    edit = StagedEdit(graph)
    divided = Divided({}, {}, {})
    shapes: Dict[str, Shape] = {}  # of what pieces give to others
    taken = names_taken(graph)
    for op in ops:
        of = {owners[tensor.op.name] for tensor in op.inputs if tensor.op.name in owners}
        if op.type not in _DIVIDED or (len(of) < 2 and (of - {None} or process_of(op.device) is not None
                                                        or not any(_draws(graph, one) for one in _inside(edit, op.node_def)))):
            continue
        kept = [None if owner is None else members.index(owner) for owner in (owners.get(one.op.name) for one in op.inputs)]
        try:
            pieces = _pieces(edit, op.node_def, kept, next(iter(_processes(kept)), 0))
        except _CannotDivide:
            continue

        def make(piece: _Piece, edges: Sequence[str], waits: Sequence[str], op: tf.Operation = op) -> Tuple[str, _Edges]:
            name = free_name(piece.name(op.name), lambda name: name in edit or name in taken)
            owner = None if piece.turn.owner is None else members[piece.turn.owner]
            piece.define(edit.copy(op, name, edges, control_inputs=waits, device=device(owner) if device else ""))
            divided.owners[name] = owner
            shapes.update((f"{name}:{len(piece.results) + index}", value.shape) for index, value in enumerate(piece.gives))
            return name, lambda index: f"{name}:{index}"

        inputs = [divided.results.get(tensor.name, tensor.name) for tensor in op.inputs]
        waits = [name for wait in op.control_inputs for name in divided.pieces.get(wait.name, [wait.name])]
        divided.pieces[op.name], results = _put(pieces, inputs, waits, make)
        for result, edge in results.items():
            if device is not None:
                where = device(divided.owners[edge.partition(":")[0]])
                edge = edit.add("Identity", f"{op.name}/result", [edge], device=where, attrs={"T": op.outputs[result].dtype},
                                control_inputs=divided.pieces[op.name]) + ":0"
            divided.results[op.outputs[result].name] = edge
    if not divided.pieces:
        return divided
    for op in map(graph.get_operation_by_name, divided.pieces):
        for output in op.outputs:
            for user, position in consumers(output):
                edit.move_input(user.name, position, divided.results[output.name])
        for user in op._control_outputs:
            edit.move_waits(user.name, [op.name], divided.pieces[op.name])
    edit.commit()
    for name, shape in shapes.items():
        graph.get_tensor_by_name(name).set_shape(shape)
    return divided


def writes_inside(graph: tf.Graph, node: NodeDef) -> bool:
    """Whether the functions that a node calls write variables."""
    return any(traits(one.op).is_write for one in _inside(StagedEdit(graph), node))


def _processes(owners: Sequence[Owner]) -> List[int]:
    return sorted({owner for owner in owners if owner is not None})


class _Turn(NamedTuple):
    """When a piece runs, and in which process; None: in every one, after what each runs for itself."""

    round: int
    owner: Owner

    @property
    def place(self) -> Tuple[int, bool, int]:
        return self.round, self.owner is None, self.owner or 0

    def waits_for(self, other: _Turn) -> bool:
        return other.place < self.place and (self.owner is None or other.owner in (None, self.owner))


class _Value(NamedTuple):
    """What one piece gives to others.

    Attributes:
        turn: of the piece.
        branch: number of the function that computes it.
        edge: its name there.
        shape: static shape of the piece's result; None: not even its rank is known.
        is_sent: another process reads it.
    """

    turn: _Turn
    branch: int
    edge: str
    dtype: tf.DType
    shape: Shape
    is_sent: bool


class _Piece(NamedTuple):
    """A part of a condition or call.

    Attributes:
        number: of this part among those of the same process.
        functions: function of the whole -> function of the piece.
        positions: the inputs of the whole that it takes.
        reads: what it takes from other pieces, behind these.
        results: the results of the whole that it has.
        gives: its other results.
    """

    turn: _Turn
    number: int
    functions: Mapping[str, str]
    positions: Sequence[int]
    reads: Sequence[_Value]
    results: Sequence[int]
    gives: Sequence[_Value]

    def name(self, whole: str) -> str:
        return f"{whole}/of_{_suffix(self.turn.owner, self.number)}"

    def define(self, node: NodeDef) -> None:
        """Makes a copy of the whole's definition that of the piece."""
        first = first_argument(node.op)
        _keep(node.attr["Tin"].list.type, [position - first for position in self.positions[first:]])
        node.attr["Tin"].list.type.extend(value.dtype.as_datatype_enum for value in self.reads)
        if "output_shapes" in node.attr:
            shapes = node.attr["output_shapes"].list.shape
            if not shapes:
                shapes.extend(tf.TensorShape(None).as_proto() for _ in node.attr["Tout"].list.type)
            _keep(shapes, self.results)
            shapes.extend(tf.TensorShape(value.shape).as_proto() for value in self.gives)
        _keep(node.attr["Tout"].list.type, self.results)
        node.attr["Tout"].list.type.extend(value.dtype.as_datatype_enum for value in self.gives)
        call_functions(node, self.functions)


def _suffix(owner: Owner, number: int) -> str:
    return ("all" if owner is None else str(owner)) + (f"_{number}" if number > 1 else "")


def _put(pieces: Sequence[_Piece], inputs: Sequence[str], waits: Sequence[str],
         make: Callable[[_Piece, Sequence[str], Sequence[str]], Tuple[str, _Edges]]) -> Tuple[List[str], Dict[int, str]]:
    """Makes pieces in the order in which they run.

    Args:
        inputs: of the whole.
        waits: names of the ops for which it waits.
        make: makes a piece with these inputs and waits; returns its name and those of its results.

    Returns:
        The names of the pieces, and of the whole's results.
    """
    given: Dict[_Value, str] = {}
    results: Dict[int, str] = {}
    made: List[Tuple[_Turn, str]] = []
    for piece in pieces:
        edges = [*(inputs[position] for position in piece.positions), *(given[value] for value in piece.reads)]
        name, edge = make(piece, edges, [*waits, *(before for turn, before in made if piece.turn.waits_for(turn))])
        made.append((piece.turn, name))
        results.update((result, edge(index)) for index, result in enumerate(piece.results))
        given.update((value, edge(len(piece.results) + index)) for index, value in enumerate(piece.gives))
    return [name for _, name in made], results


def _keep(items: Any, indices: Sequence[int]) -> None:
    """Leaves only these items in a protocol buffer's list, which may be empty."""
    kept = [copy.deepcopy(items[index]) for index in indices] if len(items) else []
    del items[:]
    items.extend(kept)


def _inside(edit: StagedEdit, node: NodeDef) -> Iterator[NodeDef]:
    """A node or, if it calls functions, the nodes in these, at any depth."""
    functions = list(function_names(node).values())
    if not functions:
        yield node
    for name in functions:
        for inner in edit.function(name).node_def:
            yield from _inside(edit, inner)


def _pieces(edit: StagedEdit, node: NodeDef, owners: Sequence[Owner], drawer: int) -> List[_Piece]:
    """The pieces of a condition or call, in the order in which they run.  Their functions are staged.

    Args:
        owners: of what the node's inputs refer to.
        drawer: the process that draws random numbers without a seed.

    Raises:
        _CannotDivide: it cannot be divided.
    """
    first, called = first_argument(node.op), function_names(node)
    # a protocol buffer's attributes are in no order, and that of messages must be the same in all processes
    names = list(dict.fromkeys(called[key] for key in sorted(called)))
    bodies = [_Body(edit, name, owners[first:], drawer) for name in names]
    count = len(node.attr["Tout"].list.type)
    of_results = [_processes([owner for body in bodies for owner in body.owners_of_result(index)]) for index in range(count)]
    own = [found[0] if len(found) == 1 else None for found in of_results]
    found = [body.divide(own) for body in bodies]
    last = [max(rounds) for rounds in zip(*found)]  # a result is that of one piece, whichever branch is taken
    results: Dict[_Turn, List[int]] = {}
    for index, owner in enumerate(own):
        results.setdefault(_Turn(last[index], owner), []).append(index)
    for body, rounds in zip(bodies, found):
        if rounds != last:
            body.divide(own, last)
    turns = sorted({*results, *(turn for body in bodies for turn in body.turns)}, key=lambda turn: turn.place)
    reads = {turn: [(branch, edge, source) for branch, body in enumerate(bodies)
                    for edge, source in sorted(body.reads(turn, results.get(turn, ())).items())] for turn in turns}
    sent = {(branch, edge, source) for turn, found in reads.items() for branch, edge, source in found
            if source.owner not in (None, turn.owner)}
    values: Dict[Any, _Value] = {}
    for key in (key for turn in turns for key in reads[turn] if key not in values):
        branch, edge, source = key
        dtype, shape = bodies[branch].described(edge)
        if dtype in (tf.resource, tf.variant):
            raise _CannotDivide
        values[key] = _Value(source, branch, edge, dtype, shape if key in sent or len(bodies) == 1 else None, key in sent)
    pieces: List[_Piece] = []
    for turn in turns:
        had, number = results.get(turn, []), 1 + sum(piece.turn.owner == turn.owner for piece in pieces)
        taken = list(dict.fromkeys(values[key] for key in reads[turn]))
        gives = sorted((value for value in values.values() if value.turn == turn), key=lambda value: (value.branch, value.edge))
        arguments = sorted({argument for body in bodies for argument in body.arguments_of(turn, had)})
        functions = {}
        for branch, (name, body) in enumerate(zip(names, bodies)):
            new = free_name(f"{name}_of_{_suffix(turn.owner, number)}", edit.has_function)
            functions[name] = edit.add_function(body.part(new, turn, branch, arguments, taken, had, gives))
        positions = [*range(first), *(first + argument for argument in arguments)]
        pieces.append(_Piece(turn, number, functions, positions, taken, had, gives))
    return pieces


class _Body:
    """A function that a condition or call runs.  The nodes inside it that belong to several processes are divided, too.

    Attributes:
        turns: those in which something runs.
    """

    def __init__(self, edit: StagedEdit, name: str, owners: Sequence[Owner], drawer: int) -> None:
        self._copy, self._python_graph = FunctionCopy(edit.graph, edit.function(name)), getattr(
            edit.graph._functions.get(name), "graph", None)
        definition = self._copy.definition
        self._arguments = {argument.name: index for index, argument in enumerate(definition.signature.input_arg)}
        self._owner_of = {argument.name: owner for argument, owner in zip(definition.signature.input_arg, owners)
                          if argument.type == tf.resource.as_datatype_enum}  # of a variable, by the argument for its handle
        self._parts: Dict[str, Owner] = {}  # pieces of nodes
        self._shapes: Dict[str, Shape] = {}  # of their results
        self._copy.replace({  # Keras sends all gradients through one of these
            self._copy.edge(node, index): edge for node in definition.node_def if node.op == "IdentityN"
            for index, edge in enumerate(data_inputs(node))})
        for node in list(definition.node_def):
            sources = [_source(edge) for edge in data_inputs(node)]
            of = {self._owner_of[source] for source in sources if source in self._owner_of}
            if node.op in _DIVIDED and (len(of) > 1 or (of == {None} and any(
                    _draws(edit.graph, one) for one in _inside(edit, node)))):
                self._divide(edit, node, [self._owner_of.get(source) for source in sources], drawer)
        self._nodes = {node.name: node for node in definition.node_def}
        self._results = [definition.ret[result.name] for result in definition.signature.output_arg]
        roots = {*map(_source, self._results), *definition.control_ret.values()}
        runs = reached(roots & set(self._nodes), lambda name: self._before(name, waits=True))
        inside = {name: list(_inside(edit, self._nodes[name])) for name in runs}
        self._effects = {name for name, nodes in inside.items() if any(map(self._does_something, nodes))}
        self._names = [name for name in self._nodes if name in runs]
        self._indices = {name: index for index, name in enumerate(self._names)}
        self._members = [*(self._member(name, inside[name], drawer) for name in self._names), Node(None)]  # last: the arguments
        self._rounds = Rounds((), {}, {})
        self.turns: Dict[_Turn, List[int]] = {}  # the numbers of the nodes that run

    def _divide(self, edit: StagedEdit, node: NodeDef, owners: Sequence[Owner], drawer: int) -> None:
        """Puts the pieces of a node in its place."""
        own = self._copy
        inputs, waits = data_inputs(node), [_source(edge) for edge in node.input if edge.startswith("^")]
        taken = {*self._arguments, *(other.name for other in own.definition.node_def)}

        def make(piece: _Piece, edges: Sequence[str], waits: Sequence[str]) -> Tuple[str, _Edges]:
            definition = type(node)()
            definition.CopyFrom(node)
            definition.name = free_name(piece.name(node.name).replace("/", "_"), taken.__contains__)
            piece.define(definition)
            own.insert(definition, edges, waits)
            self._parts[definition.name] = piece.turn.owner
            shapes = [self._shape(node.name, result) for result in piece.results] + [value.shape for value in piece.gives]
            self._shapes.update((own.edge(definition, index), shape) for index, shape in enumerate(shapes))
            return definition.name, lambda index: own.edge(definition, index)

        new, results = _put(_pieces(edit, node, owners, drawer), inputs, waits, make)
        instead = {own.edge(node, result): edge for result, edge in results.items()}
        own.definition.node_def.remove(node)
        for other in own.definition.node_def:  # who reads the whole comes behind all of it
            if other.name not in new and any(_source(edge) == node.name for edge in other.input):
                kept = [edge for edge in other.input if edge != f"^{node.name}"]
                del other.input[:]
                other.input.extend(kept + control_edges(new))
        returned = any(_source(edge) == node.name for edge in own.definition.ret.values())
        for key, name in list(own.definition.control_ret.items()):
            if name == node.name:
                returned = True
                own.definition.control_ret.pop(key)
        if returned:
            own.definition.control_ret.update({name: name for name in new})
        own.replace(instead)

    # ------------------------------------------------------------------------------------------------- what the nodes are
    def _before(self, name: str, waits: bool) -> List[str]:
        """The nodes that a node reads, or for which it waits."""
        return [source for edge in self._nodes[name].input for source in [_source(edge)]
                if source in self._nodes and (waits or not edge.startswith("^"))]

    def _member(self, name: str, inside: Sequence[NodeDef], drawer: int) -> Node:
        handles = self._owner_of.keys() & {_source(edge) for edge in data_inputs(self._nodes[name])}
        owners = {self._parts[name]} if name in self._parts else {self._owner_of[handle] for handle in handles}
        draws = any(_draws(self._copy.graph, one) for one in inside)
        has_effect = name in self._effects
        if len(owners - {None}) > 1 or (has_effect and (len(owners) > 1 or (draws and not owners - {None}))):
            raise _CannotDivide  # nobody could run all that it does, or each would draw other numbers
        owner = next(iter(owners - {None}), drawer if draws else EVERY if has_effect else None)
        waits = [_source(edge) for edge in self._nodes[name].input if edge.startswith("^")]
        return Node(owner, tuple(self._indices.get(_source(edge), len(self._names)) for edge in data_inputs(self._nodes[name])),
                    tuple(self._indices[wait] for wait in waits if wait in self._indices),
                    frozenset(handle for handle in handles if self._owner_of[handle] is None),
                    any(map(self._is_stateful, inside)))

    def _is_stateful(self, node: NodeDef) -> bool:
        return bool(op_def(self._copy.graph, node.op).is_stateful)

    def _does_something(self, node: NodeDef) -> bool:
        return self._is_stateful(node) and node.op not in RANDOM and traits(node.op).state not in _READS

    def described(self, edge: str) -> Tuple[tf.DType, Shape]:
        """The type and the static shape of a node's result."""
        node = self._nodes[_source(edge)]
        dtypes = self._copy._signature(node.op, node.name).output_dtypes(node)
        index = next(index for index in range(len(dtypes)) if self._copy.edge(node, index) == edge)
        return dtypes[index], self._shapes[edge] if edge in self._shapes else self._shape(node.name, index)

    def _shape(self, name: str, index: int) -> Shape:
        if self._python_graph is not None:
            try:
                dims = static_dims(self._python_graph.get_operation_by_name(name).outputs[index])
            except KeyError:
                return None
            return None if dims is None else tuple(dims)
        node = next((node for node in self._copy.original.node_def if node.name == name), None)
        shapes = node.attr["_output_shapes"].list.shape if node is not None and "_output_shapes" in node.attr else ()
        return None if index >= len(shapes) or shapes[index].unknown_rank else tuple(tf.TensorShape(shapes[index]).as_list())

    def owners_of_result(self, index: int) -> Set[int]:
        """The processes from whose variables a result follows."""
        source = _source(self._results[index])
        behind = reached([self._indices[source]] if source in self._indices else [], lambda number: self._members[number].inputs)
        return {owner for number in behind for owner in [self._members[number].owner] if owner not in (None, EVERY)}

    # ------------------------------------------------------------------------------------------------------------- rounds
    def divide(self, owners: Sequence[Owner], earliest: Sequence[int] = ()) -> List[int]:
        """Decides what runs when; returns the rounds of the results.

        Args:
            owners: of the results.
            earliest: the first rounds in which they may be there; (): round 0.

        Raises:
            _CannotDivide: there is a loop.
        """
        members = list(self._members)
        for owner, source in zip(owners, map(_source, self._results)):
            read = (self._indices[source],) if source in self._indices else ()
            members.append(Node(EVERY if owner is None else owner, read, has_state=True))
        results = range(len(self._members), len(members))
        wanted = [*(self._indices[name] for name in sorted(self._effects)), *results]
        try:
            self._rounds = find_rounds(members, wanted, dict(zip(results, earliest)))
        except CyclicError:
            raise _CannotDivide from None
        self.turns = {}
        for (number, runner), when in sorted(self._rounds.rounds.items()):
            if number < len(self._names):
                self.turns.setdefault(_Turn(when, None if runner == EVERY else runner), []).append(number)
        return [self._rounds.rounds[self._rounds.copy(number, EVERY)] for number in results]

    def _edges(self, turn: _Turn, results: Sequence[int]) -> List[str]:
        """What the nodes of a turn, and results, read."""
        nodes = [self._nodes[self._names[number]] for number in self.turns.get(turn, ())]
        return [*(edge for node in nodes for edge in data_inputs(node)), *(self._results[index] for index in results)]

    def _is_constant(self, name: str) -> bool:
        return name in self._indices and self._members[self._indices[name]].is_constant

    def reads(self, turn: _Turn, results: Sequence[int]) -> Dict[str, _Turn]:
        """What a turn needs from others: edge -> the turn in which it is computed.

        Args:
            results: those that the turn has.
        """
        found = {}
        for edge in self._edges(turn, results):
            source = _source(edge)
            if source in self._indices and not self._is_constant(source):
                one = self._rounds.copy(self._indices[source], EVERY if turn.owner is None else turn.owner)
                found[edge] = _Turn(self._rounds.rounds[one], None if one[1] == EVERY else one[1])
        return {edge: source for edge, source in found.items() if source != turn}

    def arguments_of(self, turn: _Turn, results: Sequence[int]) -> Set[int]:
        """The arguments that a turn reads."""
        return {self._arguments[source] for source in map(_source, self._edges(turn, results)) if source in self._arguments}

    def part(self, name: str, turn: _Turn, branch: int, arguments: Sequence[int], reads: Sequence[_Value], results: Sequence[int],
             gives: Sequence[_Value]) -> FunctionDef:
        """The function of a piece."""
        found, runner = self._copy.finish(name), EVERY if turn.owner is None else turn.owner
        own = set(self.turns.get(turn, ()))
        names = {*(self._names[number] for number in own),
                 *(source for source in map(_source, self._edges(turn, results)) if self._is_constant(source))}
        signature, returned = found.signature, dict(found.ret)
        _keep(found.node_def, [index for index, node in enumerate(found.node_def) if node.name in names])
        for node in found.node_def:
            waits = own.intersection(self._rounds.waits.get((self._indices[node.name], runner), ()))
            edges = data_inputs(node) + control_edges(self._names[number] for number in sorted(waits))
            del node.input[:]
            node.input.extend(edges)
        attributes = {position: copy.deepcopy(found.arg_attr[index])  # what a map held is gone when it is cleared
                      for position, index in enumerate(arguments) if index in found.arg_attr}
        found.arg_attr.clear()
        for position, attribute in attributes.items():
            found.arg_attr[position].CopyFrom(attribute)
        getattr(found, "resource_arg_unique_id", {}).clear()  # which TensorFlow 1.15 lacks
        _keep(signature.input_arg, arguments)
        _keep(signature.output_arg, results)
        found.ret.clear()
        found.ret.update({result.name: returned[result.name] for result in signature.output_arg})
        effects = [self._names[number] for number in sorted(own) if self._names[number] in self._effects]
        found.control_ret.clear()
        found.control_ret.update({effect: effect for effect in effects})
        del signature.control_output[:]
        signature.control_output.extend(effects)
        part = FunctionCopy(self._copy.graph, found)
        part.replace({value.edge: given for value, given in [
            (value, part.parameter("taken", value.dtype)) for value in reads] if value.branch == branch})
        for value in gives:
            part.return_also(value.edge if value.branch == branch else _nothing(part, value), value.dtype, "given")
        return part.finish(name)


def _draws(graph: tf.Graph, node: NodeDef) -> bool:
    """Whether a node draws numbers without a seed, so that each process would draw others."""
    return (node.op in RANDOM and bool(op_def(graph, node.op).is_stateful)
            and not any(node.attr[seed].i for seed in _SEEDS if seed in node.attr))


def _nothing(part: FunctionCopy, value: _Value) -> str:
    """Zeros in place of what another branch computes, of a shape that the message may have."""
    zero = part.const("" if value.dtype == tf.string else np.zeros([], value.dtype.as_numpy_dtype), "nothing", dtype=value.dtype)
    if not value.shape:
        return zero
    sizes = part.const(np.array([size or 0 for size in value.shape], np.int32), "sizes")
    return part.add("Fill", "nothing", [sizes, zero], attrs={"T": value.dtype, "index_type": tf.int32})


def _source(edge: str) -> str:
    """The node or the argument of an edge in a function."""
    return edge.lstrip("^").partition(":")[0]
