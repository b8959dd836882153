"""The steps side by side of plans that span processes."""
from __future__ import annotations

from typing import Dict, Optional, Sequence, Tuple

import pytest

from whale_tf.passes.side_by_side import find_steps
from whale_tf.plan import Plan, TaskGraphPlan

Rows = Sequence[Sequence[int]]


def plan_of(processes: int, devices: int, tasks: Sequence[Rows], homes: Sequence[Dict[str, int]] = (), split: Sequence[int] = (),
            slices: Optional[Tuple[int, ...]] = None, zero: str = "none") -> Plan:
    """A plan of TaskGraphs on these devices; ``split``: numbers of TaskGraphs."""
    made = tuple(
        TaskGraphPlan(f"t{i}", "split" if i in split else "replicate", devices=tuple(map(tuple, rows)), slices=slices,
                      variables="shared" if homes else "mirrored", homes=homes[i] if homes else {})
        for i, rows in enumerate(tasks))
    parts = tuple(tuple(range(rank * devices, (rank + 1) * devices)) for rank in range(processes))
    return Plan(num_devices=processes * devices, num_model_replicas=len(tasks[0]), task_graphs=made, processes=parts, zero=zero,
                graph="", one_step=True)


CASES = {  # plan -> processes of each step
    "nested pipelines": (plan_of(4, 1, [[[0], [2]], [[1], [3]]]), [(0, 1), (2, 3)]),
    "stages with replicas far away": (plan_of(4, 1, [[[0, 1]], [[2, 3]]]), [(0, 2), (1, 3)]),
    "replicas of one TaskGraph": (plan_of(4, 1, [[[0, 1, 2, 3]]]), [(0,), (1,), (2,), (3,)]),
    "several devices each": (plan_of(2, 2, [[[0, 1, 2, 3]]]), [(0,), (1,)]),
    "one pipeline": (plan_of(2, 1, [[[0]], [[1]]]), [(0, 1)]),
    "unequal replicas": (plan_of(4, 1, [[[0]], [[1, 2, 3]]]), [(0, 1, 2, 3)]),
    "uneven examples": (plan_of(2, 1, [[[0, 1]]], slices=(1, 2)), [(0, 1)]),
    "split": (plan_of(2, 1, [[[0, 1]]], split=[0]), [(0, 1)]),
    "split in nested replicas": (plan_of(4, 1, [[[0, 1], [2, 3]]], split=[0]), [(0, 1), (2, 3)]),
    "replicas that cross": (plan_of(4, 1, [[[0], [1]], [[1], [0]]]), [(0, 1, 2, 3)]),
    "a process without a part": (plan_of(3, 1, [[[0], [1]]]), [(0, 1, 2)]),
    "other devices of the processes": (plan_of(2, 2, [[[0], [3]], [[1], [2]]]), [(0, 1)]),
    "homes in the first step": (plan_of(4, 1, [[[0], [2]], [[1], [3]]], [{"v": 0}, {"w": 1}]), [(0, 1), (2, 3)]),
    "homes in several steps": (plan_of(4, 1, [[[0], [2]], [[1], [3]]], [{"v": 2}, {}]), [(0, 1, 2, 3)]),
    "zero": (plan_of(2, 1, [[[0, 1]]], [{"v": 0}], zero="v1"), [(0, 1)]),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_side_by_side(name: str) -> None:
    plan, expected = CASES[name]
    steps = find_steps(plan)
    assert steps.processes == expected and [steps.number(rank) for members in expected for rank in members] == [
        number for number, members in enumerate(expected) for _ in members]
    for number, members in enumerate(expected):
        tasks = steps.plan_of(number).task_graphs
        own = {device for process in members for device in plan.processes[process]}
        assert {device for task in tasks for row in task.devices for device in row} <= own
        assert {home for task in tasks for home in task.homes.values()} <= own


def test_homes_are_on_the_corresponding_devices() -> None:
    plan = plan_of(4, 1, [[[0], [2]], [[1], [3]]], [{"v": 0}, {"w": 1}])
    assert [task.homes for task in find_steps(plan).plan_of(1).task_graphs] == [{"v": 2}, {"w": 3}]


def test_thousands_of_processes() -> None:
    steps = find_steps(plan_of(4096, 1, [[[8 * g + stage] for g in range(512)] for stage in range(8)]))
    assert len(steps.processes) == 512 and steps.processes[0] == tuple(range(8))
