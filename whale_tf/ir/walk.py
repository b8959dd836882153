"""Reachability in graphs."""

from __future__ import annotations

from typing import Callable, Hashable, Iterable, List, Set, TypeVar

Node = TypeVar("Node", bound=Hashable)


def reached(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> Set[Node]:
    """``starts``, and all nodes that are reached from them.

    Args:
        following: the nodes one step away from a node; called once for each node.
    """
    found = set(starts)
    stack: List[Node] = list(found)
    while stack:
        for node in following(stack.pop()):
            if node not in found:
                found.add(node)
                stack.append(node)
    return found
