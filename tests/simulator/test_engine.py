"""The event engine on graphs written by hand, with times computed by hand."""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

import numpy as np
import pytest

from whale_tf.errors import PlanError
from whale_tf.simulator import engine
from whale_tf.simulator.buffers import BufferTable
from whale_tf.simulator.engine import Times, run
from whale_tf.simulator.execution_graph import ExecutionGraph, LinkUse, queue_of
from whale_tf.simulator.instructions import COMPUTATION, FEATURE, GRADIENT

Task = Tuple[int, float, Tuple[int, ...], Tuple[LinkUse, ...]]  # lane, seconds, devices, links
EMPTY = np.zeros(0, np.int64)


def execute(
    tasks: Sequence[Task],
    edges: Sequence[Tuple[int, int]],
    bandwidths: Sequence[float] = (),
    gamma: float = 0.0,
    sharing: bool = True,
    overlap: bool = True,
) -> Times:
    count = len(tasks)
    after: List[List[int]] = [[] for _ in tasks]
    waits = [0] * count
    for a, b in edges:
        after[a].append(b)
        waits[b] += 1
    first = [0]
    for row in after:
        first.append(first[-1] + len(row))
    devices = 1 + max(slot for task in tasks for slot in task[2])
    queues: Dict[int, Tuple[int, ...]] = {}
    for number, (lane, _, slots, _) in enumerate(tasks):
        if lane != COMPUTATION:
            both = [queue_of(slot, lane) for slot in slots]
            queues[number] = tuple(both + [queue_of(slot, lane, True) for slot in slots if lane == FEATURE])
    graph = ExecutionGraph(
        [task[1] for task in tasks],
        [task[0] for task in tasks],
        list(range(count)),
        [0] * count,
        [task[2] for task in tasks],
        queues,
        {i: task[3] for i, task in enumerate(tasks) if task[3]},
        [b for row in after for b in row],
        first,
        waits,
        tuple(range(devices)),
        {},
        BufferTable(EMPTY, np.zeros(0), EMPTY, EMPTY, EMPTY, EMPTY, EMPTY.astype(bool)),
    )
    return run(graph, list(bandwidths), [gamma] * devices, sharing, overlap)


def compute(seconds: float, device: int = 0) -> Task:
    return COMPUTATION, seconds, (device,), ()


def gradient(seconds: float, devices: Tuple[int, ...] = (0,), *links: LinkUse) -> Task:
    return GRADIENT, seconds, devices, links


def feature(seconds: float, devices: Tuple[int, ...] = (0,), *links: LinkUse) -> Task:
    return FEATURE, seconds, devices, links


def test_data_dependencies() -> None:
    times = execute([compute(1.0), feature(2.0, (0, 1)), compute(3.0, 1)], [(0, 1), (1, 2)])
    assert times.start == [0.0, 1.0, 3.0] and times.end == [1.0, 3.0, 6.0]


def test_overlap_slows_both_while_it_lasts() -> None:
    """gamma 1: for 4 s both run at half speed, so after them 8 of 10 s of computation are left."""
    times = execute([compute(10.0), gradient(2.0)], [], gamma=1.0)
    assert times.end == [12.0, 4.0]
    assert execute([compute(10.0), gradient(2.0)], [], gamma=1.0, overlap=False).end == [10.0, 2.0]


def test_overlap_begins_and_ends_in_the_middle_of_a_computation() -> None:
    tasks = [compute(3.0), compute(10.0), gradient(2.0, (0, 1)), compute(4.0, 1)]
    times = execute(tasks, [(0, 1), (3, 2)], gamma=0.5)
    # device 1 computes until 4; then the reduction takes 2 * 1.5 s, overlapped by device 0 all the time
    assert times.end == pytest.approx([3.0, 3.0 + 1.0 + 3.0 + 7.0, 7.0, 4.0])


def test_feature_communication_does_not_slow_computation() -> None:
    assert execute([compute(10.0), feature(2.0)], [], gamma=1.0).end == [10.0, 2.0]


def test_two_communications_share_a_link_while_both_run() -> None:
    use = (0, 10.0, 1)
    tasks = [gradient(4.0, (0,), use), feature(2.0, (1,), use)]
    times = execute(tasks, [], [10.0])
    assert times.end == pytest.approx([6.0, 4.0])  # half speed until the short one is done at 4, then 2 s alone
    assert execute(tasks, [], [10.0], sharing=False).end == [4.0, 2.0]
    assert execute(tasks, [], [20.0]).end == [4.0, 2.0]


def test_sharing_counts_the_groups_a_collapsed_task_stands_for() -> None:
    assert execute([gradient(4.0, (0,), (0, 10.0, 4))], [], [10.0]).end == pytest.approx([16.0])


def test_narrowest_share_decides() -> None:
    tasks = [gradient(1.0, (0,), (0, 10.0, 1), (1, 4.0, 1)), feature(1.0, (1,), (1, 4.0, 1))]
    assert execute(tasks, [], [10.0, 2.0]).end == pytest.approx([4.0, 4.0])


def test_queues_serve_in_order_of_readiness() -> None:
    tasks = [compute(1.0), compute(2.0, 1), feature(5.0, (0, 2)), feature(1.0, (1, 2)), feature(1.0, (1, 3))]
    times = execute(tasks, [(0, 2), (1, 3), (1, 4)])
    # task 3 waits for device 2; task 4 came later on device 1, so it waits behind it
    assert times.start[2:] == [1.0, 6.0, 7.0]


def test_feature_and_gradient_queues_run_side_by_side() -> None:
    assert execute([feature(3.0), gradient(3.0)], []).end == [3.0, 3.0]


def test_tasks_without_duration() -> None:
    times = execute([compute(0.0), compute(0.0), feature(0.0), compute(2.0)], [(0, 1), (1, 2), (2, 3)])
    assert times.end == [0.0, 0.0, 0.0, 2.0]


def test_cycle_is_reported() -> None:
    with pytest.raises(PlanError, match=r"deadlock: 2 of 3 tasks never run; tasks \[1, 2\]"):
        execute([compute(1.0), compute(1.0), compute(1.0)], [(1, 2), (2, 1)])


def test_same_graph_gives_the_same_times() -> None:
    random = np.random.RandomState(0)
    tasks = [
        (compute, feature, gradient)[i % 3](float(random.rand()), (i % 5,) if i % 3 else i % 5)  # type: ignore
        for i in range(200)
    ]
    chain = [(a, a + 15) for a in range(185)]
    assert execute(tasks, chain, gamma=0.3) == execute(tasks, chain, gamma=0.3)


def test_links_with_room_for_all_that_can_run_at_once_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random communications on five devices and four links, of which some are wide enough; without leaving any link out."""
    random = np.random.RandomState(1)
    kinds = (feature, gradient)
    tasks = [kinds[i % 2](float(random.rand()), tuple(sorted(random.choice(5, 2, replace=False).tolist())),
                          *((int(link), float(random.choice([1.0, 2.0])), int(random.choice([1, 2])))
                            for link in random.choice(4, 2, replace=False))) for i in range(150)]
    chain, bandwidths = [(a, a + 11) for a in range(139)], [2.0, 4.0, 9.0, 40.0]
    kept: List[int] = []
    contended = engine._contended

    def counted(graph: ExecutionGraph, widths: Sequence[float]) -> Dict[int, Tuple[LinkUse, ...]]:
        found = contended(graph, widths)
        kept.extend(use[0] for uses in found.values() for use in uses)
        return found

    monkeypatch.setattr(engine, "_contended", counted)
    times = execute(tasks, chain, bandwidths, gamma=0.3)
    monkeypatch.setattr(engine, "_contended", lambda graph, _: graph.links)
    assert execute(tasks, chain, bandwidths, gamma=0.3) == times
    assert {0, 1} <= set(kept) and 3 not in kept
