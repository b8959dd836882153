"""Move edges: let consumers read another tensor, or replace one op with another.

Edges move in the graph itself. Move them before a Session runs the consumers, because a Session does not see later changes
to an op that it has run (it does see new ops). Nothing is deleted; ops that nobody reads any more simply do not run.

An edge can only move to a tensor with the same dtype and a compatible static shape, because TensorFlow does not infer
the shapes of existing ops again. If the shape changes, clone the consumers
(``StagedEdit.clone(..., input_map=...)``).
"""
from __future__ import annotations

from typing import Iterable, List, Optional, Set, Tuple

from whale_tf._tf_compat import tf
from whale_tf.errors import GraphEditError
from whale_tf.graph_editor.control import add_control_inputs, remove_control_inputs
from whale_tf.graph_editor.one_graph import check_one_graph
from whale_tf.graph_editor.select import consumers as consumers_of
from whale_tf.graph_editor.select import predecessors
from whale_tf.ir.traits import NEXT_ITERATIONS

Edge = Tuple[tf.Operation, int]  # an op and the position of one of its inputs


def set_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Let input ``index`` of ``op`` read ``tensor``.

    ::

        before   a ──> op          after   a
                 b                         b ──> op        set_input(op, 0, b)

    Raises:
      GraphEditError: there is no such input, or the tensor has another graph, another dtype or an incompatible static shape.
    """
    if not 0 <= index < len(op.inputs):
        raise GraphEditError(f"op {op.name!r} has {len(op.inputs)} inputs, so there is none at position {index}")
    old = op.inputs[index]
    check_one_graph([op, tensor])
    if tensor.dtype.base_dtype != old.dtype.base_dtype:
        raise GraphEditError(f"input {index} of {op.name!r} has dtype {old.dtype.base_dtype.name}, {tensor.name!r} "
                             f"has {tensor.dtype.base_dtype.name}; insert a Cast")
    if old.dtype._is_ref_dtype and not tensor.dtype._is_ref_dtype and op._input_types[index]._is_ref_dtype:
        raise GraphEditError(f"input {index} of {op.name!r} ({op.type}) writes to the variable {old.name!r}; "
                             f"{tensor.name!r} is not a reference variable")
    try:
        op._update_input(index, tensor)
    except (tf.errors.OpError, ValueError) as error:
        raise GraphEditError(
            f"input {index} of {op.name!r} has shape {old.shape}, {tensor.name!r} has {tensor.shape}: TensorFlow "
            f"keeps the shapes of existing ops, so this edge "
            "cannot move. Clone the consumers with StagedEdit.clone(..., "
            f"input_map={{{old.name!r}: {tensor.name!r}}}) instead ({error})") from error


def reroute_tensor(old: tf.Tensor, new: tf.Tensor, consumers: Optional[Iterable[tf.Operation]] = None, *,
                   check_cycles: bool = True) -> List[Edge]:
    """Let consumers of ``old`` read ``new`` instead.

    ::

        before   old ──┬──> a              after   old ──> f ──> new ──┬──> a
                       ├──> b                                          └──> b
                       └──> f ──> new                                    reroute_tensor(old, new)

    Args:
      consumers: the ops whose edges move. None: all except those on which ``new`` itself depends (like ``f`` above).
      check_cycles: look at everything on which ``new`` depends, so that no cycle can arise. A caller that moves many edges
        and knows that none can arise may turn this off; then only the op that makes ``new`` keeps its edges.

    Returns:
      The edges that moved, as (op, input position).

    Raises:
      GraphEditError: ``new`` depends on a given consumer (a cycle would arise), a given op does not read ``old``, or
        the edge cannot move (see ``set_input``). All edges are then as they were.
    """
    wanted = None if consumers is None else list(dict.fromkeys(consumers))
    check_one_graph([old, new, *(wanted or ())])
    edges = consumers_of(old)
    upstream = _upstream(new.op, {op for op, _ in edges}) if check_cycles else {new.op}
    if wanted is None:
        edges = [(op, index) for op, index in edges if op not in upstream]
    else:
        edges = [(op, index) for op, index in edges if op in wanted]
        strangers = [op.name for op in wanted if op not in {reader for reader, _ in edges}]
        if strangers:
            raise GraphEditError(f"{strangers} do not read {old.name!r}; its consumers are "
                                 f"{[op.name for op, _ in consumers_of(old)]}")
        cycle = [op.name for op, _ in edges if op in upstream]
        if cycle:
            raise GraphEditError(f"{new.name!r} depends on {cycle[0]}: moving its input from {old.name!r} to "
                                 f"{new.name!r} would make a cycle")
    _move(edges, old, new)
    return edges


def _upstream(op: tf.Operation, of_interest: Iterable[tf.Operation]) -> Set[tf.Operation]:
    """Those of ``of_interest`` on which ``op`` depends (or which it is), ignoring the back edges of loops."""
    wanted = set(of_interest)
    found: Set[tf.Operation] = set()
    seen, stack = {op}, [op]
    while stack and len(found) < len(wanted):
        current = stack.pop()
        if current in wanted:
            found.add(current)
        for before in predecessors(current):
            if before not in seen and before.type not in NEXT_ITERATIONS:
                seen.add(before)
                stack.append(before)
    return found


def _move(edges: Iterable[Edge], old: tf.Tensor, new: tf.Tensor) -> None:
    """Move all of the edges or none."""
    done: List[Edge] = []
    try:
        for op, index in edges:
            set_input(op, index, new)
            done.append((op, index))
    except GraphEditError:
        for op, index in done:
            op._update_input(index, old)
        raise


def swap_tensors(a: tf.Tensor, b: tf.Tensor) -> None:
    """Exchange the consumers of two tensors.

    ::

        before   a ──> f        after   a ──> g
                 b ──> g                b ──> f

    Raises:
      GraphEditError: an edge cannot move (see ``set_input``), or a cycle would arise. All edges are then as they were.
    """
    check_one_graph([a, b])
    of_a, of_b = consumers_of(a), consumers_of(b)
    cycle = _upstream(b.op, {op for op, _ in of_a}) | _upstream(a.op, {op for op, _ in of_b})
    if cycle:
        raise GraphEditError(f"one of {a.name!r} and {b.name!r} depends on {sorted(op.name for op in cycle)[0]!r}, "
                             f"which reads the other, so a cycle would arise")
    _move(of_a, a, b)
    try:
        _move(of_b, b, a)
    except GraphEditError:
        _move(of_a, b, a)
        raise


def replace_op(old: tf.Operation, new: tf.Operation) -> List[Edge]:
    """Replace ``old`` with ``new``, which takes over the readers of all outputs and the ops that wait for ``old``.

    ::

        before   x ──> old ──> a            after   x ──> old
                 x ──> new                          x ──> new ──> a
                       old - - > b                        new - - > b      (- - > control edge)

    If ``new`` depends on ``old``, the edges from ``old`` towards ``new`` stay.

    Returns:
      The data edges that moved.

    Raises:
      GraphEditError: ``new`` lacks an output of ``old`` that is read, or an edge cannot move (see ``set_input``). All edges
        are then as they were.
    """
    check_one_graph([old, new])
    read = [tensor for tensor in old.outputs if tensor.consumers()]
    if read and read[-1].value_index >= len(new.outputs):
        raise GraphEditError(f"{new.name!r} has {len(new.outputs)} outputs, but output {read[-1].value_index} of "
                             f"{old.name!r} is read by {read[-1].consumers()[0].name!r}")
    moved: List[Edge] = []
    origins: List[Tuple[Edge, tf.Tensor]] = []
    try:
        for tensor in read:
            edges = reroute_tensor(tensor, new.outputs[tensor.value_index])
            origins += [(edge, tensor) for edge in edges]
            moved += edges
    except GraphEditError:
        for (op, index), tensor in origins:
            op._update_input(index, tensor)
        raise
    waiting = list(old._control_outputs)
    upstream = _upstream(new, waiting)
    for op in waiting:
        if op not in upstream:
            remove_control_inputs(op, [old])
            add_control_inputs(op, [new])
    return moved
