"""What a Session runs on the undivided ops: what follows from a loss or prediction, but does not train.

What reads merged values in steps gets a copy, which reads what the local script's op reads::

    in a step        clones ──> merged loss ──> summary
    alone            original loss ──> copy of the summary

A process that runs a part of a step does so in all runs that do not train (:mod:`whale_tf.emit.session_part`).  One that runs
whole steps does so where clones would need more: labels, because a schedule puts their backward passes between their forward
passes, or an example for each part.
"""

from __future__ import annotations

from typing import Any, Callable, List, Set, Tuple

from whale_tf._tf_compat import tf
from whale_tf.emit.session_part import Fetch, op_of
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.graph import OpGraph
from whale_tf.ir.traits import ENTERS
from whale_tf.ir.walk import reached

Edges = Tuple[List[str], List[str]]  # tensors that an op reads, and ops for which it waits


class SessionAlone:
    """Stages copies, once each.

    Args:
        known: the local script, without what was added later.
        scope: of the copies' names.
        is_ours: whether only steps run an op.
        edges: of an op that was added later.
        commit: puts an edit's ops into the graph.
    """

    def __init__(self, graph: tf.Graph, known: OpGraph, scope: str, is_ours: Callable[[tf.Operation], bool],
                 edges: Callable[[tf.Operation], Edges], commit: Callable[[StagedEdit], Any]) -> None:
        self._graph, self._known, self._scope = graph, known, scope
        self._is_ours, self._edges, self._commit = is_ours, edges, commit
        self._copied: Set[str] = set()

    def needed(self, op: tf.Operation) -> Set[tf.Operation]:
        """What an op needs of ours, itself included."""
        return reached([op], lambda one: [before for before in self._before(one) if self._is_ours(before)])

    def fetch(self, fetch: Fetch) -> Fetch:
        """What is fetched instead: nothing of ours, but copies that read the originals.

        Raises:
            UnsupportedOpError: a while loop of version 1 follows from a step's results.
        """
        op = op_of(fetch)
        if not self._is_ours(op):
            return fetch
        found = {one.name: one for one in self.needed(op)}
        loop = next((name for name, one in found.items() if one.type in ENTERS), None)
        if loop is not None:
            raise UnsupportedOpError(
                f"{op.name!r} needs the while loop of {loop!r}, which follows from what a training step computes; in a run "
                "without an update it cannot be computed. Use control flow of version 2 (tf.compat.v1.enable_control_flow_v2)")
        edit, new = StagedEdit(self._graph), sorted(found.keys() - self._copied)
        for name in new:
            data, waits = self._in_script(found[name])
            edit.copy(found[name], self._copy_of(name), [self._edge(edge, found) for edge in data], device=found[name].device,
                      control_inputs=[self._edge(edge, found) for edge in waits])
        self._commit(edit)
        self._copied.update(new)
        copy = self._graph.get_operation_by_name(self._copy_of(op.name))
        return copy if isinstance(fetch, tf.Operation) else copy.outputs[fetch.value_index]

    def _copy_of(self, name: str) -> str:
        return f"{self._scope}/alone/{name}"

    def _edge(self, edge: str, found: Any) -> str:
        op, colon, index = edge.partition(":")
        return (self._copy_of(op) if op in found else op) + colon + index

    def _before(self, op: tf.Operation) -> List[tf.Operation]:
        data, waits = self._in_script(op)
        return [self._graph.get_operation_by_name(edge.partition(":")[0]) for edge in (*data, *waits)]

    def _in_script(self, op: tf.Operation) -> Edges:
        """(tensors, ops) that an op reads, or waits for, in the local script."""
        if op.name not in self._known:
            return self._edges(op)
        record = self._known.op(op.name)
        return ([self._known.tensor_name(tensor) for tensor in record.inputs],
                [self._known.ops[wait].name for wait in record.control_inputs])
