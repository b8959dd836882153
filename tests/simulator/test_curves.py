"""Curves of memory, moment by moment, of a few tasks and buffers."""
from __future__ import annotations

from typing import Any, List, Sequence

import pytest

from whale_tf.cluster import Cluster
from whale_tf.simulator.instructions import COMPUTATION, GRADIENT, Instructions
from whale_tf.simulator.memory import MemoryCurve, arena_bytes, lifetimes, memory_curves
from whale_tf.simulator.network import Network
from whale_tf.simulator.tasks import Tasks
from whale_tf.simulator.transformation import ALL_REDUCE, Group

STATIC = {0: {"parameters": 100.0, "activations": 1.0}, 1: {}}


class Row:
    """Computations of one second, one after the other on device 0 unless another is given."""

    def __init__(self) -> None:
        cluster = Cluster.parse("cpu:2")
        self.tasks, self.last = Tasks(cluster, Network(cluster)), {}  # type: Tasks, Dict[int, int]

    def run(self, *reads: int, device: int = 0, seconds: float = 1.0, waits: Sequence[int] = (), overwrites: bool = False) -> int:
        before = [self.last[device]] if device in self.last else []
        task = self.last[device] = self.tasks.add(COMPUTATION, seconds, (device,), [*before, *waits])
        for buffer in reads:
            self.tasks.read(task, buffer, overwrites)
        return task

    def makes(self, size: float, task: int, name: str = "t", device: int = 0, category: str = "activations") -> int:
        return self.tasks.buffer(name, category, task, device, size)

    def curves(self, **more: Any) -> List[MemoryCurve]:
        graph = self.tasks.graph()
        program = Instructions(tuple(self.tasks.instructions), tuple(self.tasks.buffers), STATIC, ())
        return memory_curves(program, graph, self.tasks.times(graph), **more)

    def lives(self) -> List[Any]:
        graph = self.tasks.graph()
        born, dies = lifetimes(graph, self.tasks.times(graph))
        return list(zip(born.tolist(), dies.tolist()))


@pytest.fixture
def row() -> Row:
    return Row()


def test_curve_has_every_change(row: Row) -> None:
    """Of what changes at one moment, buffers are freed first: the second buffer takes the first one's place after a second."""
    row.makes(30.0, row.run())
    second = row.makes(50.0, row.run(), "second", category="gradients")
    row.run()
    row.run(second)
    row.makes(7.0, row.run(device=1), device=1)
    one, other = row.curves()
    assert one.time_s.tolist() == [0.0, 0.0, 1.0, 1.0, 4.0] and one.bytes.tolist() == [101.0, 131.0, 101.0, 151.0, 101.0]
    assert (one.peak_bytes, one.peak_s, one.final_bytes) == (151.0, 1.0, 0.0)
    assert one.at_peak == {"parameters": 100.0, "activations": 1.0, "gradients": 50.0} and one.largest == (("second", 50.0),)
    assert other.bytes.tolist() == [0.0, 7.0, 0.0] and other.at_peak == {"activations": 7.0} and other.final_bytes == 0.0


def test_buffer_that_dies_as_it_is_made_counts(row: Row) -> None:
    row.makes(30.0, row.run(seconds=0.0))
    assert row.curves()[0].bytes.tolist() == [101.0, 131.0, 101.0]


def test_buffers_of_a_name_are_added_up_and_the_largest_are_told(row: Row) -> None:
    first = row.run()
    for size, name in ((2.0, "e"), (2.0, "d"), (3.0, "c"), (1.0, "a"), (5.0, "b"), (4.0, "a"), (1.0, "f")):
        row.makes(size, first, name)
    curve = row.curves()[0]
    assert curve.largest == (("a", 5.0), ("b", 5.0), ("c", 3.0), ("d", 2.0), ("e", 2.0))
    assert row.curves(largest=1)[0].largest == (("a", 5.0),) and curve.at_peak["activations"] == 1.0 + 18.0


def test_what_is_there_at_the_peak(row: Row) -> None:
    """Neither what died before it nor what is made later."""
    old, kept = row.makes(30.0, row.run(), "old"), row.makes(20.0, row.run(), "kept")
    row.run(old)
    peak = row.makes(60.0, row.run(kept), "peak")
    row.run(peak)
    row.makes(10.0, row.run(), "late")
    curve = row.curves()[0]
    assert curve.peak_s == 3.0 and curve.largest == (("peak", 60.0), ("kept", 20.0)) and curve.peak_bytes == 181.0


def test_result_of_a_sum_is_there_when_the_sum_may_begin(row: Row) -> None:
    """Though the communicator is busy with another sum of ten seconds."""
    bandwidth = min(row.tasks.network.bandwidths[link] for link in row.tasks.network.path(0, 1))
    first, second = row.run(seconds=0.5), row.run()
    sums = [row.tasks.communicate(ALL_REDUCE, Group((0, 1)), 10 * bandwidth, GRADIENT, [before]) for before in (first, second)]
    for task in sums:
        row.makes(1.0, task)
    plain = row.run()
    row.makes(1.0, plain)
    times = row.tasks.times(row.tasks.graph())
    assert times.start[sums[1]] > times.end[second]
    assert [born for born, _ in row.lives()] == [times.end[first], times.end[second], times.start[plain]]


def test_task_overwrites_one_operand_and_shares_none(row: Row) -> None:
    """The last task reads two buffers, and puts its result into one of them; two tasks that end together overwrite nothing."""
    first = row.run()
    one, two = row.makes(8.0, first), row.makes(8.0, first)
    row.makes(8.0, row.run(one, two, overwrites=True))
    assert sorted(dies for _, dies in row.lives()[:2]) == [1.0, 2.0]
    again = Row()
    first = again.run()
    shared = again.makes(8.0, first)
    for device in range(2):
        again.makes(8.0, again.run(shared, device=device, waits=[first], overwrites=True), device=device)
    assert again.lives()[shared] == (0.0, 2.0)


def test_buffer_that_another_task_still_reads_is_not_overwritten(row: Row) -> None:
    first = row.run()
    made = row.makes(8.0, first)
    row.run(made, device=1, seconds=0.25, waits=[first])
    row.makes(8.0, row.run(made, overwrites=True))
    assert row.lives()[made] == (0.0, 2.0)


def test_allocators_memory_of_each_device(row: Row) -> None:
    """What is kept, and what is there at one time, in the allocator's chunks of 256 bytes."""
    first = row.makes(1000.0, row.run())
    row.makes(1024.0, row.run(first))
    row.makes(256.0, row.run(device=1), device=1)
    graph = row.tasks.graph()
    program = Instructions(tuple(row.tasks.instructions), tuple(row.tasks.buffers), {0: {"parameters": 512.0}, 1: {}}, ())
    assert arena_bytes(program, graph, row.tasks.times(graph)) == [512 + 1024 + 1024, 256]
