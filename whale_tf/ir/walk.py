"""What is reached in a graph from some of its nodes."""

from __future__ import annotations

from typing import Callable, Hashable, Iterable, List, Set, TypeVar

Node = TypeVar("Node", bound=Hashable)


def reached(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> Set[Node]:
    """``starts``, and all that is reached from them.

    Args:
        following: called once for each node: where one step leads from it.
    """
    found = set(starts)
    stack: List[Node] = list(found)
    while stack:
        new = set(following(stack.pop())) - found
        found |= new
        stack.extend(new)
    return found
