"""Branches of a condition that read divided variables: copies of their functions that read the parts.

::

    before   If(pred, v)                 then_branch(v)        { ReadVariableOp(v) }
    after    If(pred, v/0, v/1)          then_branch(v, part1) { ConcatV2(ReadVariableOp(v), ReadVariableOp(part1)) }

Both branches take the same arguments, including those that they do not use.
"""

from __future__ import annotations

from typing import Dict, Mapping, Sequence

from whale_tf._tf_compat import FunctionDef, tf
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor.control_flow import function_names
from whale_tf.graph_editor.function_copy import FunctionCopy, data_inputs
from whale_tf.graph_editor.names import free_name
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.traits import READS
from whale_tf.transforms.shard.checkpoints import DividedVariable
from whale_tf.transforms.shard.values import put_together


def reading_parts(edit: StagedEdit, op: tf.Operation, variables: Mapping[int, DividedVariable]) -> Dict[str, FunctionDef]:
    """Branches of a condition that read parts.  The first part's handle replaces the variable's; the other parts' handles come
    after all arguments, variable by variable.

    Args:
        edit: where the branches will be staged.
        variables: position among the condition's operands -> the divided variable whose handle this is.

    Raises:
        UnsupportedOpError: a branch does something other than reading the variable.
    """
    found = {}
    for name in dict.fromkeys(function_names(op.node_def).values()):
        copy = FunctionCopy(op.graph, name)
        for position, variable in variables.items():
            _read_parts(copy, op, position, variable)
        found[name] = copy.finish(free_name(f"{name}_of_parts", edit.has_function))
    return found


def _read_parts(copy: FunctionCopy, op: tf.Operation, position: int, variable: DividedVariable) -> None:
    argument = copy.definition.signature.input_arg[position - 1].name  # operand 0 chooses the branch
    readers = [node for node in copy.definition.node_def if argument in data_inputs(node)]
    others = [node for node in readers if node.op not in READS]
    if others or argument in copy.definition.ret.values():
        raise UnsupportedOpError(
            f"a branch of op {op.name!r} ({op.type}) takes variable {variable.op.name!r}, which wh.split divides over devices, "
            f"but does not only read it ({others[0].op if others else 'it returns the handle'}); "
            "read the variable's value before the condition (tf.identity(v)), or use wh.replicate for its layer")
    parts: Sequence[str] = [copy.parameter(f"{argument}_part{i}", tf.resource) for i in range(1, len(variable.names))]
    for node in readers:
        whole, scope = copy.edge(node, 0), node.name
        reads = [copy.add("ReadVariableOp", f"{scope}/part{i}", [part], attrs={"dtype": variable.dtype})
                 for i, part in enumerate(parts, 1)]
        joined = put_together(Nodes(copy), [whole, *reads], variable.spread, f"{scope}/whole", variable.dtype, "")
        copy.replace({whole: joined})
        copy.set_operand(joined.partition(":")[0], 0, whole)
