"""Pause garbage collection while many long-lived objects are made, and find objects that nobody lists.

Without the pause, the collector would walk TensorFlow's whole heap again and again and find nothing.
"""
from __future__ import annotations

import contextlib
import gc
import sys
from typing import Any, Iterator, List, Set

GROWTH = 1.5

_pauses = 0
_known = 0  # size of the heap when the second pause began, or after the last collection made here


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """No automatic collections inside.  If the heap has grown much since the last collection, one is made first."""
    global _pauses
    was_enabled = gc.isenabled()
    if was_enabled:
        if _pauses:  # most processes rewrite only one graph and need no measurement of the heap
            _make_up()
        _pauses += 1
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _age()
            gc.enable()


def instances(*classes: type) -> List[Any]:
    """All objects of these classes that the collector knows.  One test of each object's own type is several times as fast as
    ``isinstance``, and a program that has run for long has millions of objects."""
    kinds: Set[type] = set()
    pending = list(classes)
    while pending:
        kind = pending.pop()
        if kind not in kinds:
            kinds.add(kind)
            pending.extend(type.__subclasses__(kind))
    return [item for item in gc.get_objects() if type(item) in kinds]


def _make_up() -> None:
    global _known
    count = _heap()
    if _known and count > GROWTH * _known:
        gc.collect()
        _known = _heap()
    _known = _known or count


def _heap() -> int:
    """The size of the heap: blocks of memory that Python has allocated.  Counting objects means walking all of them (39 ms
    instead of 0.2 with TensorFlow 2.21 loaded), so it is done only if Python does not use its own allocator."""
    return sys.getallocatedblocks() or len(gc.get_objects())


def _age() -> None:
    """Declare the new objects old.  As young objects, they would all be walked once more immediately.  Python then does not
    notice that there is more to walk.  Objects that somebody has frozen must stay frozen."""
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
