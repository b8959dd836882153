"""Control edges: which op waits for which.

Once a Session has run an op, the op's control edges can no longer be changed for that Session. Never let an op inside a
version 1 while loop wait for one outside it, or vice versa: it would wait forever.
"""
from __future__ import annotations

from typing import Iterable, List, Optional, Sequence

from whale_tf._tf_compat import tf
from whale_tf.errors import GraphEditError
from whale_tf.graph_editor.one_graph import check_one_graph
from whale_tf.graph_editor.select import backward


def add_control_inputs(op: tf.Operation, befores: Iterable[tf.Operation]) -> None:
    """Let ``op`` wait for ``befores``; those that it waits for already are skipped.

    Raises:
      GraphEditError: an op of another graph, or ``op`` itself.
    """
    befores = list(dict.fromkeys(befores))
    check_one_graph([op, *befores])
    if op in befores:
        raise GraphEditError(f"op {op.name!r} cannot wait for itself")
    present = set(op.control_inputs)
    new = [before for before in befores if before not in present]
    op._add_control_inputs(new)


def remove_control_inputs(op: tf.Operation, befores: Optional[Iterable[tf.Operation]] = None) -> List[tf.Operation]:
    """Let ``op`` no longer wait for ``befores`` (None: for anything). Returns the ops that it waited for.

    Raises:
      GraphEditError: an op of another graph.
    """
    present = list(op.control_inputs)
    removed = set(present if befores is None else befores)
    check_one_graph([op, *removed])
    gone = [before for before in present if before in removed]
    if gone:
        op._remove_all_control_inputs()
        op._add_control_inputs([before for before in present if before not in removed])
    return gone


def barrier(ops: Sequence[tf.Operation], name: str, device: str = "") -> tf.Operation:
    """A new NoOp that runs after all of ``ops``.

    Raises:
      GraphEditError: no ops are given, or ops of several graphs.
    """
    if not ops:
        raise GraphEditError(f"barrier {name!r}: give at least one op to wait for")
    check_one_graph(ops)
    graph = ops[0].graph
    with graph.as_default(), graph.control_dependencies(None), graph.control_dependencies(ops), \
            graph.device(device or None):
        return tf.no_op(name=name)


def order(first: Sequence[tf.Operation], then: Sequence[tf.Operation], name: str = "order", *,
          check_cycles: bool = True) -> Optional[tf.Operation]:
    """Let every op of ``then`` start after all of ``first`` have ended.

    If that takes fewer edges, they wait through a NoOp::

        before   a   b   c        after   a ─┐            ┌─> x
                                          b ─┼─> order ───┼─> y           order([a, b, c], [x, y, z])
                 x   y   z                c ─┘            └─> z

    Args:
      name: the NoOp's, if there is one.
      check_cycles: look at everything on which ``first`` depends, so that no cycle can arise.

    Returns:
      The NoOp, or None if the ops wait for each other directly.

    Raises:
      GraphEditError: an op of ``first`` depends on one of ``then`` (a cycle would arise), or ops of several graphs.
    """
    check_one_graph([*first, *then])
    if check_cycles and first and then:
        upstream = set(backward(first))
        cycle = [op.name for op in then if op in upstream]
        if cycle:
            raise GraphEditError(f"{cycle[0]!r} cannot wait for {[op.name for op in first[:5]]}, because these depend on it")
    direct = len(first) * len(then) <= len(first) + len(then)
    gate = None if direct else barrier(first, name)
    for op in then:
        add_control_inputs(op, first if gate is None else [gate])
    return gate
