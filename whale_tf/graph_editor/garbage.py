"""Garbage collection, paused while many long-lived objects are made.

The collector would walk TensorFlow's whole heap again and again and find nothing.
"""
from __future__ import annotations

import contextlib
import gc
from typing import Iterator

GROWTH = 1.5

_pauses = 0
_known = 0  # objects when the second pause began, or when garbage was last looked for


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
    count = _age(count=True)
    if _known and count > GROWTH * _known:
        gc.collect()
        _known = _age(count=True)
    _known = _known or count


def _age(count: bool = False) -> int:
    """Count what was made as old: as young objects they would be walked once more, all of them, right away.  Python does not
    notice then that there is more to walk.

    Returns:
        How many objects there are, if ``count``; 0 where somebody keeps objects frozen, and they must stay so.
    """
    if gc.get_freeze_count():
        return 0
    gc.freeze()
    found: int = gc.get_freeze_count() if count else 0
    gc.unfreeze()
    return found
