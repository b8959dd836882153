"""What a rewritten step computes for the tensors and ops of the local script, and their values over the whole mini-batch.

Sessions ask for what a run fetches, functions for what they return, :mod:`whale_tf.runtime.verifying` for what it compares.
"""

from __future__ import annotations

from collections import ChainMap
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.emit.emit import Emitted
from whale_tf.emit.recipes import Recipes
from whale_tf.graph_editor.edges import tensor_name
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.transforms.shard import Pieces


class Results:
    """What stands for the local script's tensors and ops.  New ops are staged in the edit that has begun (:meth:`begin_edit`).

    Args:
        emitted: the rewritten step.
        replaced: tensors and ops of the local script -> what passes over ops have put in their place.  May grow later.
    """

    def __init__(self, emitted: Emitted, replaced: Mapping[str, Any]) -> None:
        self._emitted, self._graph = emitted, emitted.context.tf_graph
        self._beside_update = emitted.beside_update()
        copies: Dict[str, Any] = {}
        for name, new in emitted.instead.items():
            copies[name] = (new,)
            for tensor in self._graph.get_operation_by_name(name).outputs:
                copies[tensor.name] = f"{new}:{tensor.value_index}"
        self._replaced = ChainMap(replaced, copies, emitted.sent.replaced)  # type: ignore[arg-type]

    def replace_also(self, replaced: Mapping[str, Any]) -> None:
        """Puts more in the place of tensors and ops; may grow later."""
        self._replaced.maps.append(replaced)  # type: ignore[arg-type]

    @property
    def recipes(self) -> Tuple[Recipes, Recipes]:
        """The merged values that steps compute, and those of runs that update variables besides."""
        return self._emitted.recipes, self._beside_update.recipes

    def begin_edit(self) -> StagedEdit:
        """Begins an edit for what is staged from now on."""
        return self._beside_update.begin_edit()

    def is_replaced(self, name: str) -> bool:
        """Whether something else is computed for a tensor or an op."""
        return name in self._replaced or name + ":0" in self._replaced

    def tensors(self, name: str) -> Tuple[str, ...]:
        """The tensors that are computed for a tensor: itself, its replacement, or its pieces."""
        found = self._last(name)
        return found.names if isinstance(found, Pieces) else (found,)

    def ops(self, name: str) -> Tuple[str, ...]:
        """The ops that run for an op: itself, or its replacements."""
        found: Dict[str, None] = {}
        pending = [name]
        for one in pending:  # grows while we walk
            if one in self._replaced:
                pending.extend(each.partition(":")[0] for each in self._replaced[one])
            elif one + ":0" in self._replaced:
                pending.extend(each.partition(":")[0] for each in self.tensors(one + ":0"))
            else:
                found[one] = None
        return tuple(found)

    def _last(self, name: str) -> Any:
        while isinstance(name, str) and name in self._replaced:
            name = self._replaced[name]
        return name

    def is_cloned(self, name: str) -> bool:
        """Whether each clone has its own of a tensor or an op."""
        graph, name = self._emitted.context.graph, name.partition(":")[0]
        return name in graph and graph.op(name).id in self._emitted.context.region.batch_level

    def clones(self, name: str) -> List[str]:
        """The clones of an op."""
        context = self._emitted.context
        op = context.graph.op(name)
        return [context.op_in(op, clone) for clone in context.clones(context.task_graph_of(op))]

    def whole(self, name: str, trains: bool, is_together: bool) -> str:
        """Stages the whole mini-batch's value of a tensor that is cloned.

        Args:
            trains: in runs that update variables; nothing is computed from values after the update.
            is_together: all processes run it, so that the examples of all count.  Of a tensor with rows of its own for each
                example, a process with model replicas of its own keeps its own rows.
        """
        context, number = self._emitted.context, self._emitted.context.graph.tensor(name)
        recipes = self._exporting(number, trains)
        if is_together and (context.processes.runs_part or not context.region.batch.layout(number).is_sharded):
            return tensor_name(recipes.of_all_processes(number))
        return tensor_name(recipes.whole(number))

    def collected(self, name: str, collection: str, trains: bool) -> str:
        """Stages the value of a tensor that is in a collection (``COLLECTED`` of :mod:`whale_tf.capture.annotations`)."""
        number = self._emitted.context.graph.tensor(name)
        recipes = self._exporting(number, trains) if self.is_cloned(name) else self._emitted.recipes
        return tensor_name(recipes.collected(number, collection, trains))

    def _exporting(self, number: int, trains: bool) -> Recipes:
        """The merged values of such a run, which computes a cloned tensor itself if the step's calls do not return it."""
        rewritten = self._beside_update if trains and not self._emitted.context.is_returned(number) else self._emitted
        if not rewritten.context.is_exported(number):
            self._emitted.calls.export(number, None if rewritten is self._emitted else rewritten.context)
        return rewritten.recipes

    def joined(self, name: str, parts: Sequence[str]) -> str:
        """Stages a tensor from the values of its :meth:`tensors`, in the type that the script gave it (mixed precision may have
        given them another one)."""
        context, nodes = self._emitted.context, Nodes(self._emitted.nodes.edit)  # the step's constants may be cut off
        scope, whole = context.name("joined", name.replace(":", "_")), parts[0]
        dtype, part_dtype = self._dtype(name), self._dtype(self.tensors(name)[0])
        if len(parts) > 1:
            pieces = self._last(name)
            assert isinstance(pieces, Pieces)
            whole = pieces.joined(nodes, parts, scope, part_dtype, context.host)
        return tensor_name(whole if part_dtype == dtype else nodes.cast(whole, scope + "/cast", part_dtype, dtype, context.host))

    def _dtype(self, name: str) -> tf.DType:
        return self._graph.get_tensor_by_name(name).dtype.base_dtype
