"""Makes writes of a variable (initialisers, restores, ``load``, hand-written assigns) reach all its copies.

::

    before     value ──> Assign(v)               after     value ──┬─> Assign(v')  (copy)
                                                                   └─> Assign(v)   waits for the copy's
"""

from __future__ import annotations

from typing import Any, Callable, Collection, Dict, List, NamedTuple, Set, Tuple

from whale_tf._tf_compat import NodeDef, tf
from whale_tf.capture.record import record
from whale_tf.capture.variables import Variables, find_variables, is_apart
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor.control_flow import function_names
from whale_tf.graph_editor.staged import Original, StagedEdit
from whale_tf.graph_editor.variables import Replaced, catch_up
from whale_tf.ir.graph import OpGraph
from whale_tf.ir.traits import traits


class VariableCopy(NamedTuple):
    """A copy of a variable: its tensor's name and its device."""

    tensor: str
    device: str


class Mirror:
    """Keeps copies equal to the original variable, whatever is added to the graph later.

    Args:
        copies: for each copy of the model (by its name scope): name of a variable's op -> its copy there.
        handled: names of writes that have their own clones (the optimizer's).
    """

    def __init__(self, graph: tf.Graph, copies: Dict[str, Dict[str, VariableCopy]], handled: Set[str]) -> None:
        self._graph = graph
        self._copies = copies
        self._variables = list(dict.fromkeys(variable for group in copies.values() for variable in group))
        self._handled = set(handled)
        self._version = -1
        self._passing: Set[str] = set()  # ops known to take a variable on to others

    def update(self) -> None:
        """Mirrors all writes that are new since the last call."""
        if not self._copies or self._graph.version == self._version:
            return
        passing = self._passes_on()
        if not passing <= self._passing:
            recorded = record(self._graph)
            self.check(recorded, find_variables(recorded))
        self._passing = passing
        edit = StagedEdit(self._graph)
        if self.stage(edit):
            self.finish(edit.commit())
        self._version = self._graph.version

    def stage(self, edit: StagedEdit, added: Collection[str] = ()) -> bool:
        """Stages a clone of each new write for every copy; the write then waits for the clones.

        Args:
            added: names of staged nodes that may write variables.

        Returns:
            Whether there are any; if so, :meth:`finish` must be told what the edit added.
        """
        if not self._copies:
            return False
        writes = self._new_writes(edit, added)
        of = {op.name: variable for op, variable in writes}
        for scope, group in self._copies.items():
            ops = [op for op, variable in writes if variable in group]
            for op in ops:
                self._check_taken(op, of[op.name], group)
            names = edit.clone(ops, scope + "/mirror", device=lambda op: group[of[op.name]].device)
            for op in ops:
                for position, edge in enumerate(edit.original(op).input):
                    if edge.partition(":")[0] in group:
                        edit.move_input(names[op.name], position, group[edge.partition(":")[0]].tensor)
                edit.move_waits(op.name, (), [names[op.name]])
        self._handled.update(of)
        return bool(writes)

    def finish(self, new: Collection[str]) -> None:
        """Call when the edit is in the graph: writes among the ``new`` ops (the optimizer's) are not mirrored again."""
        self._handled.update(new)
        self._passing = self._passes_on()

    def _new_writes(self, edit: StagedEdit, added: Collection[str]) -> List[Tuple[Original, str]]:
        """Each write that has no clones yet, with the variable that it writes."""
        found: List[Tuple[Original, str]] = []
        users: Dict[str, List[NodeDef]] = {}
        for node in map(edit.node, added):
            if traits(node.op).is_write:
                for edge in node.input:
                    users.setdefault(edge.partition(":")[0], []).append(node)
        for variable in self._variables:
            known = [] if variable in edit else self._graph.get_operation_by_name(variable).outputs[0].consumers()
            found += [(op, variable) for op in known if op.name not in self._handled and traits(op.type).is_write]
            found += [(node, variable) for node in users.get(variable, ()) if node.name not in self._handled]
        return found

    def _check_taken(self, write: Original, variable: str, group: Collection[str]) -> None:
        """Raises:
            UnsupportedOpError: a write takes other variables, without copies, that its clones would write or read on another
                device: an optimizer's update outside of the step that computes the gradients.
        """
        for tensor in write.inputs if isinstance(write, tf.Operation) else ():
            if (tensor.dtype == tf.resource or tensor.dtype._is_ref_dtype) and tensor.op.name not in group:
                raise UnsupportedOpError(
                    f"op {write.name!r} ({write.type}) writes variable {variable!r}, of which every replica has a copy, together "
                    f"with {tensor.op.name!r}, which has none, because no training step updates both (gradients that variables "
                    "add up, and another run applies, for example); set variables to 'shared' (wh.init({'variables': 'shared'}, "
                    "...)), so that replicas read one variable, or let num_micro_batch accumulate gradients in the step")

    def check(self, graph: OpGraph, variables: Variables) -> None:
        """Raises:
            UnsupportedOpError: a new write cannot be cloned alone.
        """
        for variable in variables:
            for op in (graph.ops[write] for write in variable.writes if is_apart(graph, variable, write)):
                if variable.name in self._variables and op.name not in self._handled:
                    raise UnsupportedOpError(
                        f"op {op.name!r} ({op.type}) writes variable {variable.name!r} in a condition, loop or function, or "
                        "behind another write, but every replica has a copy of it, which would keep its value; set variables to "
                        "'shared' (wh.init({'variables': 'shared'}, ...)), or assign to the variable itself, outside of tf.cond, "
                        "tf.while_loop and tf.function")

    def _passes_on(self) -> Set[str]:
        """Names of the ops that take a variable into functions, branches, loops or other writes."""
        users = {op for name in self._variables for op in self._graph.get_operation_by_name(name).outputs[0].consumers()}
        return {op.name for op in users if function_names(op.node_def) or any(tensor.consumers() and (
            tensor.dtype == tf.resource or tensor.dtype._is_ref_dtype) for tensor in op.outputs)}

    def catch_up(self, run: Callable[[Any], Any]) -> None:
        """Copies the values of variables that were initialised before they had copies.  ``run`` runs tensors or ops."""
        def replaced(name: str) -> Replaced:
            copies = {scope: group[name] for scope, group in self._copies.items() if name in group}
            return Replaced(self._graph.get_operation_by_name(name), f"{next(iter(copies))}/catch_up/{name}",
                            lambda nodes, value, scope: [(copy.tensor, copy.device, value) for copy in copies.values()])
        catch_up(self._graph, map(replaced, self._variables), run, self._handled.update)
