"""What holds for every plan, on generated ones."""

from __future__ import annotations

import itertools
from typing import Dict, List

import pytest

from tests.simulator.generated import Case, cases
from whale_tf.simulator import Simulation, Simulator, simulate
from whale_tf.simulator.instructions import COMPUTATION
from whale_tf.simulator.transformation import SEND_RECV


def critical_path_s(result: Simulation) -> float:
    """The longest chain of dependent tasks, each at full speed."""
    graph = result.graph
    waits = list(graph.waits_for)
    ready = [task for task, count in enumerate(waits) if not count]
    begins = [0.0] * len(waits)
    longest = 0.0
    while ready:
        task = ready.pop()
        end = begins[task] + graph.seconds[task]
        longest = max(longest, end)
        for successor in graph.successors[graph.first_successor[task] : graph.first_successor[task + 1]]:
            begins[successor] = max(begins[successor], end)
            waits[successor] -= 1
            if not waits[successor]:
                ready.append(successor)
    return longest


def busiest_resource_s(result: Simulation, sharing: bool) -> float:
    """The most work on one device's computation, one communication queue, or (if they are shared) one link."""
    graph = result.graph
    busy: Dict[object, float] = {}
    for task, lane in enumerate(graph.lane):
        if lane == COMPUTATION:
            key = ("device", graph.slots[task][0])
            busy[key] = busy.get(key, 0.0) + graph.seconds[task]
        for queue in graph.queues.get(task, ()):
            busy["queue", queue] = busy.get(("queue", queue), 0.0) + graph.seconds[task]
    links = [use.utilisation * result.step_time_s for use in result.links] if sharing else []
    return max(list(busy.values()) + links)


def check(case: Case, result: Simulation) -> None:
    graph, times = result.graph, result.times
    # every task once, after all it waits for (a deadlock would have raised)
    for task, lane in enumerate(graph.lane):
        assert times.end[task] - times.start[task] >= graph.seconds[task] * (1 - 1e-9) - 1e-12, case.name
        for successor in graph.successors[graph.first_successor[task] : graph.first_successor[task + 1]]:
            assert times.start[successor] >= times.end[task], case.name
        assert lane < 0 or task in graph.queues or lane == COMPUTATION
    # one computation at a time on a device
    rows: Dict[int, List[int]] = {}
    for task, lane in enumerate(graph.lane):
        if lane == COMPUTATION:
            rows.setdefault(graph.slots[task][0], []).append(task)
    for row in rows.values():
        row.sort(key=lambda task: (times.start[task], times.end[task]))
        assert all(times.end[a] <= times.start[b] for a, b in zip(row, row[1:])), case.name
    assert result.step_time_s >= critical_path_s(result) * (1 - 1e-9), case.name
    assert result.step_time_s >= busiest_resource_s(result, case.options.sharing) * (1 - 1e-9), case.name
    for use in result.devices:
        assert use.computation_s + use.exposed_s + use.bubble_s == pytest.approx(result.step_time_s), case.name
    # memory: nothing is left, nothing is negative
    for curve in result.memory:
        assert abs(curve.final_bytes) < 1.0 and curve.bytes.min() >= -1.0, case.name
    # what is sent is received: adapters put out what they take in
    if not case.options.collapse:
        carried = {name: sum(use.bytes for use in result.links if use.name.endswith(name)) for name in ("/out", "/in")}
        assert carried["/out"] == pytest.approx(carried["/in"], rel=1e-9, abs=1e-6), case.name
    for instruction in result.program.instructions:
        if instruction.label == SEND_RECV:
            for group in instruction.groups:
                assert {a for a, _, _ in group.pairs} | {b for _, b, _ in group.pairs} == set(group.devices), case.name


@pytest.mark.slow
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.full] if seed >= 3 else []) for seed in range(8)])
def test_generated_plans(seed: int) -> None:
    """2,000 plans in all, of which 750 without --full."""
    for case in itertools.islice(cases(seed, small=True), 250):
        check(case, simulate(case.strategy, case.cluster, case.options))


@pytest.mark.slow
def test_generated_transformers() -> None:
    for case in itertools.islice(cases(100, small=False), 25):
        check(case, simulate(case.strategy, case.cluster, case.options))


def events(result: Simulation, device: int) -> List[tuple]:
    """(instruction, micro-batch, start, end) of every task on a device."""
    graph = result.graph
    slot = graph.devices.index(device)
    return sorted(
        (graph.instruction[task], graph.micro_batch[task], result.times.start[task], result.times.end[task])
        for task, lane in enumerate(graph.lane)
        if lane >= 0 and slot in graph.slots[task]
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_collapsing_changes_nothing(seed: int) -> None:
    """Every task of every device at the same time as without, to the last bit."""
    collapsed = 0
    for case in itertools.islice(cases(200 + seed, small=False), 20):
        few = simulate(case.strategy, case.cluster, case.options._replace(collapse=True))
        all_devices = simulate(case.strategy, case.cluster, case.options._replace(collapse=False))
        assert few.step_time_s == all_devices.step_time_s, case.name
        assert few.peak_memory_bytes == all_devices.peak_memory_bytes, case.name
        assert few.bubble == pytest.approx(all_devices.bubble, rel=1e-12, abs=1e-12), case.name
        for device in all_devices.graph.devices:
            assert events(few, few.representative[device]) == events(all_devices, device), case.name
        collapsed += len(few.graph.devices) < len(all_devices.graph.devices)
    assert collapsed >= 8


@pytest.mark.slow
def test_simulator_that_remembers_gives_what_a_fresh_one_gives() -> None:
    """Changed schedules, warm-ups and numbers of micro-batches reuse the compiled program."""
    for case in itertools.islice(cases(300, small=True), 25):
        simulator = Simulator(case.cluster, case.options)
        simulator.run(case.strategy)
        for count in (1, 3):
            changed = case.strategy._replace(num_micro_batch=count, schedule="gpipe")
            assert simulator.run(changed).times == simulate(changed, case.cluster, case.options).times, case.name
