"""Move edges: let consumers read another tensor, put one op in another's place.

Edges move in the graph, so do it before a Session has run the consumers: a Session does not see later changes of an op
that it has run (it does see new ops). Nothing is deleted; what nobody reads any more is simply not run.

An edge can only move to a tensor of the same dtype and of a compatible static shape, because TensorFlow does not infer
the shapes of existing ops again. Where the shape changes, clone the consumers
(``StagedEdit.clone(..., input_map=...)``).
"""
from __future__ import annotations

from typing import Iterable, List, Optional, Set, Tuple

from whale_tf._tf_compat import tf
from whale_tf.errors import GraphEditError
from whale_tf.graph_editor.control import add_control_inputs, remove_control_inputs
from whale_tf.graph_editor.select import consumers as consumers_of
from whale_tf.graph_editor.select import predecessors

Edge = Tuple[tf.Operation, int]  # an op and the position of one of its inputs

_BACK_EDGES = frozenset(["NextIteration", "RefNextIteration"])


def set_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Lets input ``index`` of ``op`` read ``tensor``.

    ::

        before   a ──> op          after   a
                 b                         b ──> op        set_input(op, 0, b)

    Raises:
      GraphEditError: no such input, other graph, other dtype, or an incompatible static shape.
    """
    if not 0 <= index < len(op.inputs):
        raise GraphEditError("op {!r} has {} inputs, there is none at position {}".format(
            op.name, len(op.inputs), index))
    old = op.inputs[index]
    if tensor.graph is not op.graph:
        raise GraphEditError("op {!r} cannot read {!r}, which belongs to another graph".format(op.name, tensor.name))
    if tensor.dtype.base_dtype != old.dtype.base_dtype:
        raise GraphEditError("input {} of {!r} has dtype {}, {!r} has {}; insert a Cast".format(
            index, op.name, old.dtype.base_dtype.name, tensor.name, tensor.dtype.base_dtype.name))
    if old.dtype._is_ref_dtype and not tensor.dtype._is_ref_dtype and op._input_types[index]._is_ref_dtype:
        raise GraphEditError("input {} of {!r} ({}) writes to the variable {!r}; {!r} is no reference variable".format(
            index, op.name, op.type, old.name, tensor.name))
    try:
        op._update_input(index, tensor)
    except (tf.errors.OpError, ValueError) as error:
        raise GraphEditError(
            "input {} of {!r} has shape {}, {!r} has {}: TensorFlow keeps the shapes of existing ops, so this edge "
            "cannot move. Clone the consumers with StagedEdit.clone(..., input_map={{{!r}: {!r}}}) instead ({})".format(
                index, op.name, old.shape, tensor.name, tensor.shape, old.name, tensor.name, error)) from error


def reroute_tensor(old: tf.Tensor, new: tf.Tensor, consumers: Optional[Iterable[tf.Operation]] = None, *,
                   check_cycles: bool = True) -> List[Edge]:
    """Lets consumers of ``old`` read ``new`` instead.

    ::

        before   old ──┬──> a              after   old ──> f ──> new ──┬──> a
                       ├──> b                                          └──> b
                       └──> f ──> new                                    reroute_tensor(old, new)

    Args:
      consumers: the ops whose edges move. None: all that ``new`` does not itself depend on (``f`` stays, as drawn).
      check_cycles: look at everything ``new`` depends on, so that no cycle can arise. A caller that moves many edges
        and knows that none can arise may turn it off; then only the op that makes ``new`` is left out.

    Returns:
      The edges that moved, as (op, input position).

    Raises:
      GraphEditError: ``new`` depends on a given consumer (a cycle would arise), a given op does not read ``old``, or
        the edge cannot move (see ``set_input``). All edges are then as they were.
    """
    edges = consumers_of(old)
    upstream = _upstream(new.op, {op for op, _ in edges}) if check_cycles else {new.op}
    if consumers is None:
        edges = [(op, index) for op, index in edges if op not in upstream]
    else:
        wanted = dict.fromkeys(consumers)
        edges = [(op, index) for op, index in edges if op in wanted]
        strangers = [op.name for op in wanted if op not in {reader for reader, _ in edges}]
        if strangers:
            raise GraphEditError("{} do not read {!r}; its consumers are {}".format(
                strangers, old.name, [op.name for op, _ in consumers_of(old)]))
        cycle = [op.name for op, _ in edges if op in upstream]
        if cycle:
            raise GraphEditError("{!r} depends on {}: moving its input from {!r} to {!r} would make a cycle".format(
                new.name, cycle[0], old.name, new.name))
    _move(edges, old, new)
    return edges


def _upstream(op: tf.Operation, of_interest: Iterable[tf.Operation]) -> Set[tf.Operation]:
    """Those of ``of_interest`` that ``op`` depends on (or is), not counting loops' back edges."""
    wanted = set(of_interest)
    found: Set[tf.Operation] = set()
    seen, stack = {op}, [op]
    while stack and len(found) < len(wanted):
        current = stack.pop()
        if current in wanted:
            found.add(current)
        for before in predecessors(current):
            if before not in seen and before.type not in _BACK_EDGES:
                seen.add(before)
                stack.append(before)
    return found


def _move(edges: Iterable[Edge], old: tf.Tensor, new: tf.Tensor) -> None:
    """Moves all of the edges or none."""
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
    """Exchanges the consumers of two tensors.

    ::

        before   a ──> f        after   a ──> g
                 b ──> g                b ──> f

    Raises:
      GraphEditError: an edge cannot move (see ``set_input``), or a cycle would arise. All edges are then as they were.
    """
    of_a, of_b = consumers_of(a), consumers_of(b)
    cycle = _upstream(b.op, {op for op, _ in of_a}) | _upstream(a.op, {op for op, _ in of_b})
    if cycle:
        raise GraphEditError("one of {!r} and {!r} depends on {!r}, which reads the other: a cycle would arise".format(
            a.name, b.name, sorted(op.name for op in cycle)[0]))
    _move(of_a, a, b)
    try:
        _move(of_b, b, a)
    except GraphEditError:
        _move(of_a, b, a)
        raise


def replace_op(old: tf.Operation, new: tf.Operation) -> List[Edge]:
    """Puts ``new`` in the place of ``old``: it takes over the readers of all outputs and the ops that wait for ``old``.

    ::

        before   x ──> old ──> a            after   x ──> old
                 x ──> new                          x ──> new ──> a
                       old - - > b                        new - - > b      (- - > control edge)

    Where ``new`` depends on ``old``, the edges from ``old`` towards ``new`` stay.

    Returns:
      The data edges that moved.

    Raises:
      GraphEditError: ``new`` has fewer outputs than are read of ``old``, or an edge cannot move (see ``set_input``).
        All edges are then as they were.
    """
    read = [tensor for tensor in old.outputs if tensor.consumers()]
    if read and read[-1].value_index >= len(new.outputs):
        raise GraphEditError("{!r} has {} outputs, but output {} of {!r} is read by {!r}".format(
            new.name, len(new.outputs), read[-1].value_index, old.name, read[-1].consumers()[0].name))
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
