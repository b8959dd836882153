"""Paused garbage collection."""
from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

from whale_tf import garbage
from whale_tf.garbage import garbage_collection_paused


class Cycle:
    def __init__(self, size: int) -> None:
        self.itself = self
        self.objects = [[i] for i in range(size)]


def test_no_collection_inside() -> None:
    with garbage_collection_paused():
        assert not gc.isenabled()
        with garbage_collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_heap_does_not_grow_for_ever(monkeypatch: Any) -> None:
    """Looked for after less growth than in production, so that the test needs no heap of twice the size."""
    monkeypatch.setattr(garbage, "GROWTH", 1.1)
    size = sys.getallocatedblocks() // 60  # three blocks for each: 5% more
    dropped = []
    for _ in range(10):
        with garbage_collection_paused():
            cycle = Cycle(size)
        dropped.append(weakref.ref(cycle))
        del cycle
    assert sum(each() is not None for each in dropped) <= 3


def test_frozen_objects_stay_frozen(request: Any) -> None:
    gc.freeze()
    request.addfinalizer(gc.unfreeze)
    count = gc.get_freeze_count()
    with garbage_collection_paused():
        pass
    assert gc.get_freeze_count() == count and gc.isenabled()
