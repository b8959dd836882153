"""Garbage collection, paused while many long-lived objects are made.

The collector would walk TensorFlow's whole heap again and again and find nothing.
"""
from __future__ import annotations

import contextlib
import gc
from typing import Iterator

GROWTH = 1.5

_known = 0  # objects after the first pause, or after garbage was last looked for


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """No automatic collections inside; one is made up for beforehand if the heap has grown much since the last."""
    was_enabled = gc.isenabled()
    if was_enabled:
        _make_up()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            count = _age()
            _remember(_known or count)
            gc.enable()


def _make_up() -> None:
    if _known and _age() > GROWTH * _known:
        gc.collect()
        _remember(_age())


def _remember(count: int) -> None:
    global _known
    _known = count


def _age() -> int:
    """Count what was made as old: as young objects they would be walked once more, all of them, right away.  Python does not
    notice then that there is more to walk.

    Returns:
        How many objects there are; 0 where somebody keeps objects frozen, and they must stay so.
    """
    if gc.get_freeze_count():
        return 0
    gc.freeze()
    count: int = gc.get_freeze_count()
    gc.unfreeze()
    return count
