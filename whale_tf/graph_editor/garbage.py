"""Garbage collection, paused while many long-lived objects are made.

The collector would walk TensorFlow's whole heap again and again and find nothing.
"""
from __future__ import annotations

import contextlib
import gc
import sys
from typing import Iterator

GROWTH = 1.5

_pauses = 0
_known = 0  # size of the heap when the second pause began, or when garbage was last looked for


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """No automatic collections inside; one is made up for beforehand if the heap has grown much since the last."""
    global _pauses
    was_enabled = gc.isenabled()
    if was_enabled:
        if _pauses:  # most processes rewrite one graph, and need not count
            _make_up()
        _pauses += 1
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _age()
            gc.enable()


def _make_up() -> None:
    global _known
    count = _heap()
    if _known and count > GROWTH * _known:
        gc.collect()
        _known = _heap()
    _known = _known or count


def _heap() -> int:
    """How large the heap is: blocks of memory that Python has handed out.  Objects can only be counted by walking them all, 39 ms
    against 0.2 with TensorFlow 2.21 loaded; they are where Python has no allocator of its own."""
    return sys.getallocatedblocks() or len(gc.get_objects())


def _age() -> None:
    """Count what was made as old: as young objects they would be walked once more, all of them, right away.  Python does not
    notice then that there is more to walk.  What somebody keeps frozen must stay so."""
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
