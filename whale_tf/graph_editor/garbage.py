"""Garbage collection, paused while many long-lived objects are made.

The collector would walk TensorFlow's whole heap again and again and find nothing.
"""
from __future__ import annotations

import contextlib
import gc
from typing import Iterator


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _age()
            gc.enable()


def _age() -> None:
    """Count what was made as old: as young objects they would be walked once more, all of them, right away."""
    if not gc.get_freeze_count():  # else somebody keeps objects frozen, and they must stay so
        gc.freeze()
        gc.unfreeze()
