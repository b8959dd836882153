"""Conditions and calls that update variables of several processes become one for each process.

::

    before    cond(finite, w0, w1, count)  { w0 -= g0;  w1 -= g1;  count += 1 }
    after     cond_of_0(finite, w0)        { w0 -= g0 }
              cond_of_1(finite, w1)        { w1 -= g1 }
              cond_of_all(finite, count)   { count += 1 }               in each process, after its others

Keras' ``LossScaleOptimizer`` and its accumulated gradients update all variables in one condition.  Variables that each process
has (step counters, loss scales) are updated last, because the others may read them.
"""

from __future__ import annotations

from typing import AbstractSet, Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set

from whale_tf._tf_compat import FunctionDef, NodeDef, op_def, tf
from whale_tf.graph_editor import consumers
from whale_tf.graph_editor.control_flow import call_functions, function_names
from whale_tf.graph_editor.edges import control_edges
from whale_tf.graph_editor.function_copy import FunctionCopy, data_inputs
from whale_tf.graph_editor.names import free_name, names_taken
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.traits import CALLS, CONDITIONALS, RANDOM, VariableUse, first_argument, traits
from whale_tf.ir.walk import reached

Owner = Optional[int]  # a process; None: every process has it
_DIVIDED = CONDITIONALS | CALLS
_SEEDS = "seed", "seed2"
_READS = (VariableUse.READ, VariableUse.HANDLE, VariableUse.IS_INITIALIZED)


class _CannotDivide(Exception):
    """What one process computes follows from a variable of another one, or from random numbers without a seed, which would
    differ."""


def divide_effects(graph: tf.Graph, owners: Mapping[str, Owner]) -> Set[str]:
    """Divides the ops of a function's graph that update variables of several processes.  Ops from whose variables another
    process's variables follow stay as they are.

    Args:
        owners: placeholder of a variable's handle -> the process that keeps the variable; None: every process has it.

    Returns:
        The pieces.  One that belongs to a process only reads the variables that every process has.
    """
    edit = StagedEdit(graph)
    instead: Dict[str, str] = {}  # result -> the result of a piece
    ends: Dict[str, List[str]] = {}  # op -> its pieces
    taken = names_taken(graph)
    for op in graph.get_operations():
        if op.type not in _DIVIDED or len({owners[tensor.op.name] for tensor in op.inputs if tensor.op.name in owners}) < 2:
            continue
        try:
            pieces = _pieces(edit, op.node_def, [owners.get(tensor.op.name) for tensor in op.inputs])
        except _CannotDivide:
            continue
        inputs = [instead.get(tensor.name, tensor.name) for tensor in op.inputs]
        waits = [name for wait in op.control_inputs for name in ends.get(wait.name, [wait.name])]
        new: List[str] = []
        for piece in pieces:
            name = free_name(piece.name(op.name), lambda name: name in edit or name in taken)
            node = edit.copy(op, name, [inputs[position] for position in piece.positions],
                             control_inputs=waits + (new if piece.owner is None else []))
            piece.define(node)
            new.append(name)
            instead.update((op.outputs[result].name, f"{name}:{index}") for index, result in enumerate(piece.results))
        ends[op.name] = new
    if not ends:
        return set()
    for op in map(graph.get_operation_by_name, ends):
        for output in op.outputs:
            for user, position in consumers(output):
                edit.move_input(user.name, position, instead[output.name])
        for user in op._control_outputs:
            edit.move_waits(user.name, [op.name], ends[op.name])
    edit.commit()
    graph.outputs = [graph.get_tensor_by_name(instead.get(tensor.name, tensor.name)) for tensor in graph.outputs]
    graph.control_outputs = [graph.get_operation_by_name(name) for op in graph.control_outputs
                             for name in ends.get(op.name, [op.name])]
    return {name for names in ends.values() for name in names}


def _processes(owners: Sequence[Owner]) -> List[int]:
    return sorted({owner for owner in owners if owner is not None})


class _Piece(NamedTuple):
    """The part of a condition or call that belongs to one process, or to every process.

    Attributes:
        functions: function of the whole -> function of the piece.
        positions: the inputs of the whole that it takes.
        results: the results of the whole that it has.
    """

    owner: Owner
    functions: Mapping[str, str]
    positions: Sequence[int]
    results: Sequence[int]

    def name(self, whole: str) -> str:
        return f"{whole}/of_" + ("all" if self.owner is None else str(self.owner))

    def define(self, node: NodeDef) -> None:
        """Makes a copy of the whole's definition that of the piece."""
        first = first_argument(node.op)
        _keep(node.attr["Tin"].list.type, [position - first for position in self.positions[first:]])
        _keep(node.attr["Tout"].list.type, self.results)
        if "output_shapes" in node.attr:
            _keep(node.attr["output_shapes"].list.shape, self.results)
        call_functions(node, self.functions)


def _keep(items: Any, indices: Sequence[int]) -> None:
    """Leaves only these items in a protocol buffer's list, which may be empty."""
    kept = [items[index] for index in indices] if len(items) else []
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


def _pieces(edit: StagedEdit, node: NodeDef, owners: Sequence[Owner]) -> List[_Piece]:
    """The pieces of a condition or call, that of every process last.  Their functions are staged.

    Args:
        owners: of what the node's inputs refer to.

    Raises:
        _CannotDivide: a piece needs what another one computes.
    """
    first = first_argument(node.op)
    bodies = {name: _Body(edit, name, owners[first:]) for name in function_names(node).values()}
    of_results = [_processes([owner for body in bodies.values() for owner in body.owners_of_result(index)])
                  for index in range(len(node.attr["Tout"].list.type))]
    if any(len(found) > 1 for found in of_results):
        raise _CannotDivide
    pieces = []
    for owner in [*_processes(owners), None]:
        results = [index for index, found in enumerate(of_results) if found == ([] if owner is None else [owner])]
        effects = {name: body.effects_of(owner) for name, body in bodies.items()}
        if not (results or any(effects.values())):
            continue
        nodes = {name: body.nodes_for(owner, effects[name], results) for name, body in bodies.items()}
        arguments = sorted({argument for name, body in bodies.items() for argument in body.arguments_of(nodes[name], results)})
        functions = {name: edit.add_function(body.part(
            free_name(f"{name}_of_{'all' if owner is None else owner}", edit.has_function), nodes[name], arguments, results,
            effects[name])) for name, body in bodies.items()}
        pieces.append(_Piece(owner, functions, [*range(first), *(first + argument for argument in arguments)], results))
    return pieces


class _Body:
    """A function that a condition or call runs.  The nodes inside it that belong to several processes are divided, too."""

    def __init__(self, edit: StagedEdit, name: str, owners: Sequence[Owner]) -> None:
        self._copy = FunctionCopy(edit.graph, edit.function(name))
        definition = self._copy.definition
        self._arguments = {argument.name: index for index, argument in enumerate(definition.signature.input_arg)}
        self._owner_of = {argument.name: owner for argument, owner in zip(definition.signature.input_arg, owners)
                          if argument.type == tf.resource.as_datatype_enum}  # of a variable, by the argument for its handle
        self._copy.replace({  # Keras sends all gradients through one of these
            self._copy.edge(node, index): edge for node in definition.node_def if node.op == "IdentityN"
            for index, edge in enumerate(data_inputs(node))})
        for node in list(definition.node_def):
            kept = [self._owner_of.get(_source(edge)) for edge in data_inputs(node)]
            if node.op in _DIVIDED and len(_processes(kept)) > 1:
                self._divide(edit, node, kept)
        self._nodes = {node.name: node for node in definition.node_def}
        self._results = [_source(definition.ret[result.name]) for result in definition.signature.output_arg]
        self._readers: Dict[str, List[str]] = {}
        for name in self._nodes:
            for source in self._before(name, waits=False):
                self._readers.setdefault(source, []).append(name)
        roots = {*self._results, *definition.control_ret.values()}
        self._runs = reached(roots & set(self._nodes), lambda name: self._before(name, waits=True))
        inside = {name: list(_inside(edit, self._nodes[name])) for name in self._runs}
        self._effects = {name for name, nodes in inside.items() if any(map(self._does_something, nodes))}
        if any(one.op in RANDOM and self._is_stateful(one) and not any(one.attr[name].i for name in _SEEDS if name in one.attr)
               for nodes in inside.values() for one in nodes):
            raise _CannotDivide

    def _divide(self, edit: StagedEdit, node: NodeDef, owners: Sequence[Owner]) -> None:
        """Puts the pieces of a node in its place."""
        copy, new = self._copy, []  # type: Any, List[str]
        inputs, waits = data_inputs(node), [_source(edge) for edge in node.input if edge.startswith("^")]
        taken = {*self._arguments, *(other.name for other in copy.definition.node_def)}
        instead: Dict[str, str] = {}
        for piece in _pieces(edit, node, owners):
            definition = type(node)()
            definition.CopyFrom(node)
            definition.name = free_name(piece.name(node.name).replace("/", "_"), taken.__contains__)
            piece.define(definition)
            copy.insert(definition, [inputs[position] for position in piece.positions],
                        waits + (new if piece.owner is None else []))
            new.append(definition.name)
            instead.update((copy.edge(node, result), copy.edge(definition, index)) for index, result in enumerate(piece.results))
        copy.definition.node_def.remove(node)
        copy.replace(instead)
        for other in copy.definition.node_def:
            if f"^{node.name}" in other.input:
                kept = [edge for edge in other.input if edge != f"^{node.name}"]
                del other.input[:]
                other.input.extend(kept + control_edges(new))
        for key, name in list(copy.definition.control_ret.items()):
            if name == node.name:
                copy.definition.control_ret.pop(key)
                copy.definition.control_ret.update({name: name for name in new})

    def _before(self, name: str, waits: bool) -> List[str]:
        """The nodes that a node reads, or for which it waits."""
        return [source for edge in self._nodes[name].input for source in [_source(edge)]
                if source in self._nodes and (waits or not edge.startswith("^"))]

    def _handles(self, name: str) -> Set[str]:
        return self._owner_of.keys() & {_source(edge) for edge in data_inputs(self._nodes[name])}

    def _owners(self, name: str) -> List[int]:
        return _processes([self._owner_of[handle] for handle in self._handles(name)])

    def _is_stateful(self, node: NodeDef) -> bool:
        return bool(op_def(self._copy.graph, node.op).is_stateful)

    def _does_something(self, node: NodeDef) -> bool:
        return self._is_stateful(node) and node.op not in RANDOM and traits(node.op).state not in _READS

    def owners_of_result(self, index: int) -> List[int]:
        """The processes from whose variables a result follows."""
        if self._results[index] not in self._nodes:
            return []
        behind = reached([self._results[index]], lambda name: self._before(name, waits=False))
        return [owner for name in behind for owner in self._owners(name)]

    def effects_of(self, owner: Owner) -> List[str]:
        """The nodes that run and belong to a process, or to every process, and do something."""
        return sorted(name for name in self._effects if self._owners(name) == ([] if owner is None else [owner]))

    def nodes_for(self, owner: Owner, effects: Sequence[str], results: Sequence[int]) -> Set[str]:
        """The nodes of a piece.

        Raises:
            _CannotDivide: one of them needs what another piece computes.
        """
        own = [] if owner is None else [owner]
        others = [name for name in self._nodes if self._owners(name) != own and (self._owners(name) or name in self._effects)]
        missing = reached(others, lambda name: self._readers.get(name, ()))

        def before(name: str) -> List[str]:
            needed = set(self._before(name, waits=False))
            for source in missing.intersection(self._before(name, waits=True)):
                if source in needed or self._handles(name) & self._handles(source):
                    raise _CannotDivide
            return [source for source in self._before(name, waits=True) if source not in missing]

        return reached([*effects, *(self._results[index] for index in results if self._results[index] in self._nodes)], before)

    def arguments_of(self, nodes: AbstractSet[str], results: Sequence[int]) -> Set[int]:
        """The arguments that nodes and results read."""
        sources = {_source(edge) for name in nodes for edge in data_inputs(self._nodes[name])}
        sources.update(self._results[index] for index in results)
        return {self._arguments[source] for source in sources if source in self._arguments}

    def part(self, name: str, nodes: AbstractSet[str], arguments: Sequence[int], results: Sequence[int],
             effects: Sequence[str]) -> FunctionDef:
        """The function of a piece."""
        found = self._copy.finish(name)
        signature, returned = found.signature, dict(found.ret)
        _keep(found.node_def, [index for index, node in enumerate(found.node_def) if node.name in nodes])
        for node in found.node_def:
            edges = [edge for edge in node.input if not edge.startswith("^") or _source(edge) in nodes]
            del node.input[:]
            node.input.extend(edges)
        attributes = {position: found.arg_attr[index] for position, index in enumerate(arguments) if index in found.arg_attr}
        found.arg_attr.clear()
        for position, attribute in attributes.items():
            found.arg_attr[position].CopyFrom(attribute)
        found.resource_arg_unique_id.clear()
        _keep(signature.input_arg, arguments)
        _keep(signature.output_arg, results)
        found.ret.clear()
        found.ret.update({result.name: returned[result.name] for result in signature.output_arg})
        found.control_ret.clear()
        found.control_ret.update({effect: effect for effect in effects})
        del signature.control_output[:]
        signature.control_output.extend(effects)
        return found


def _source(edge: str) -> str:
    """The node or the argument of an edge in a function."""
    return edge.lstrip("^").partition(":")[0]
