"""Paused garbage collection."""
from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any

from tests.test_architecture import ROOT
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


def left_of_ten() -> int:
    """How many of ten heaps of garbage are still there.  They are looked for after less growth than in production, so that no
    heap of twice the size is needed."""
    garbage.GROWTH = 1.1
    size = sys.getallocatedblocks() // 60  # three blocks for each: 5% more
    dropped = []
    for _ in range(10):
        with garbage_collection_paused():
            cycle = Cycle(size)
        dropped.append(weakref.ref(cycle))
        del cycle
    return sum(each() is not None for each in dropped)


def test_heap_does_not_grow_for_ever() -> None:
    """In a process of its own: after thousands of tests a heap is large."""
    code = "from tests.test_garbage import left_of_ten; print(left_of_ten())"
    assert int(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT)) <= 3


def test_frozen_objects_stay_frozen(request: Any) -> None:
    gc.freeze()
    request.addfinalizer(gc.unfreeze)
    count = gc.get_freeze_count()
    with garbage_collection_paused():
        pass
    assert gc.get_freeze_count() == count and gc.isenabled()
