"""What a process runs alone in a Session: what follows from a loss, but does not train (:mod:`whale_tf.emit.session_part`).

What reads merged values in steps gets a copy, which reads what the local script's op reads::

    in a step        clones ──> merged loss ──> summary
    alone            original loss ──> copy of the summary
"""

from __future__ import annotations

from typing import Dict, List, Tuple

from whale_tf._tf_compat import tf
from whale_tf.emit.session_part import Fetch, SessionPart, op_of
from whale_tf.graph_editor.staged import StagedEdit


class SessionAlone:
    """See the module's docstring."""

    def __init__(self, part: SessionPart) -> None:
        self._part = part
        self._copies: Dict[str, str] = {}  # op that is ours -> its copy

    def fetch(self, fetch: Fetch) -> Fetch:
        """What is fetched instead: nothing of ours, but copies that read the originals."""
        part, op = self._part, op_of(fetch)
        if not part.is_ours(op):
            return fetch
        edit = StagedEdit(part.graph)
        self._copy(edit, op)
        part.commit(edit)
        copy = part.graph.get_operation_by_name(self._copies[op.name])
        return copy if isinstance(fetch, tf.Operation) else copy.outputs[fetch.value_index]

    def _copy(self, edit: StagedEdit, last: tf.Operation) -> None:
        """Stages copies of an op and of ours before it."""
        part, stack = self._part, [last]
        while stack:
            op = stack[-1]
            data, waits = self._in_script(op)
            before = [part.graph.get_operation_by_name(name.partition(":")[0]) for name in (*data, *waits)]
            missing = [one for one in before if part.is_ours(one) and one.name not in self._copies]
            if missing:
                stack += missing
                continue
            stack.pop()
            if op.name not in self._copies:
                copy = edit.copy(op, f"{part.scope}/alone/{op.name}", [self._edge(name) for name in data], device=op.device,
                                 control_inputs=[self._edge(name) for name in waits])
                self._copies[op.name] = copy.name

    def _edge(self, name: str) -> str:
        op, colon, index = name.partition(":")
        return self._copies.get(op, op) + colon + index

    def _in_script(self, op: tf.Operation) -> Tuple[List[str], List[str]]:
        """(tensors, ops) that an op reads, or waits for, in the local script."""
        graph, part = self._part.context.graph, self._part
        if op.name in graph:
            record = graph.op(op.name)
            return ([graph.tensor_name(tensor) for tensor in record.inputs],
                    [graph.ops[wait].name for wait in record.control_inputs])
        node = part.nodes[part.indices[op.name]]
        return ([part.ops[index].outputs[number].name for index, number in node.inputs],
                [part.ops[wait].name for wait in node.waits])
