"""Homes of variables: their balance, what devices hold of them, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.passes.drawings import chain, plan
from whale_tf.config import Config
from whale_tf.errors import ConfigError
from whale_tf.passes.owners import Owners, find_owners
from whale_tf.plan import Plan
from whale_tf.planner.explain import explain_plan
from whale_tf.planner.homes import Held, resident, resident_of_task_graphs, with_homes

pytestmark = pytest.mark.once


def shared(counts: Any, micro_batches: int = 1, model_replicas: int = 1, **more: Any) -> Plan:
    return plan(counts, micro_batches, model_replicas, {i: {"variables": "shared"} for i in range(len(counts))}, **more)


def held(*sizes: int, task_graph: int = 0) -> Any:
    """Under Adam."""
    return [Held(f"v{task_graph}_{i}", task_graph, 0, size, 2 * size) for i, size in enumerate(sizes)]


def test_balance() -> None:
    layers = held(*([64 * 256, 256 * 64] + [64 * 64] * 4 + [64] * 9) * 12)
    done = with_homes(shared([4]), layers, Config({"zero": "v1"}))
    found = resident(done, layers, True)
    assert max(found.held) <= 1.05 * sum(found.held) / 4 and found.held[4] == 0
    assert found.read == [0] * 5 and found.sums == [size // 3 for size in found.held]


def test_model_replicas_and_task_graphs_without_replicas() -> None:
    """TaskGraph 1 has a device of its own in each model replica, TaskGraph 0 two."""
    variables = held(30, 20, 10, 10) + held(7, 5, task_graph=1)
    done = with_homes(shared([2, 1], 2, 2), variables, Config({"zero": "v2"}))
    assert done.task_graphs[0].homes == {"v0_0": 0, "v0_1": 1, "v0_2": 3, "v0_3": 4}
    assert done.task_graphs[1].homes == {"v1_0": 2, "v1_1": 5}
    alone = with_homes(shared([2, 1]), variables, Config({"zero": "v1"}))
    assert not alone.task_graphs[1].homes and alone.task_graphs[0].homes


def test_what_devices_hold() -> None:
    variables = held(40, 30, 20, 10, 9, 8)
    done = with_homes(shared([2], 2), variables, Config({"zero": "v1"}))
    assert done.task_graphs[0].homes == {"v0_0": 0, "v0_1": 1, "v0_2": 1, "v0_3": 0, "v0_4": 0, "v0_5": 1}
    found = resident(done, variables, False)
    assert found.held == [177, 174, 0] and found.read == [58, 59, 0] and found.sums == [0, 0, 0]
    assert resident_of_task_graphs(done, variables, False) == [117 + 177 + 58]  # each replica adds up all gradients
    anew = replace(done, zero="v3")
    assert resident(anew, variables, False).read == [58, 59, 0] and resident(anew, variables, False).sums == [59, 58, 0]
    assert resident_of_task_graphs(anew, variables, True) == [177 + 59]
    away = with_homes(shared([1]), variables, Config({"offload": "v0"}))
    assert resident(away, variables, False).held == [0, 3 * 117] and resident(away, variables, False).read == [90, 0]


def test_over_processes() -> None:
    """Parameters are in both processes, and what the optimizer keeps in one."""
    variables = held(30, 20, 10, 10)
    done = with_homes(shared([2], model_replicas=2, processes=((0, 1), (2, 3))), variables, Config({"zero": "v1"}))
    assert done.task_graphs[0].homes == {"v0_0": 0, "v0_1": 1, "v0_2": 2, "v0_3": 3}
    assert resident(done, variables, True).held == [90 + 10, 60 + 10, 30 + 30, 30 + 20, 0]
    assert done.local_part(1).here(1) == 3 and done.local_part(0).here(2) == 0
    told = " ".join(explain_plan(done.local_part(1), None, [f"CPU:{device}" for device in range(4)]).split())
    assert "(zero v1, offload none); gradients are summed there, and replicas read them once a step" in told
    assert "Number of variables on CPU:0: 1, CPU:1: 1, CPU:2: 1, CPU:3: 1. Each process has all variables." in told
    assert "Number of variables updated by process 0: 2, process 1: 2." in told
    assert "updated by process 0: 2, process 1: 2." in explain_plan(done, None, [f"CPU:{device}" for device in range(4)])
    alone = with_homes(shared([2]), variables, Config({"zero": "v1"}))
    assert "process" not in explain_plan(alone, None, ["CPU:0", "CPU:1"])


def test_hosts_of_processes() -> None:
    """Each process keeps everything on its own host, and nobody owns anything for others."""
    two = with_homes(shared([1], model_replicas=2, processes=((0,), (1,))), held(30, 20), Config({"offload": "states"}))
    assert two.task_graphs[0].homes == {"v0_0": 2, "v0_1": 2} and two.local_part(1).here(2) == 2 == two.local_part(0).here(2)
    assert resident(two, held(30, 20), False).held == [0, 0, 150]
    assert find_owners(chain(2)._replace(processes=2), two.local_part(1)) == Owners()
    told = " ".join(explain_plan(two.local_part(1), None, ["CPU:0", "CPU:0"]).split())
    assert "Number of variables on the host: 2. Each process has all variables on its own host, and updates them." in told


def test_refused() -> None:
    two = shared([1], model_replicas=2, processes=((0,), (1,)))
    with pytest.raises(ConfigError, match="zero is 'v3', and there are 2 processes; parameters are divided within one process"):
        with_homes(two, held(1), Config({"zero": "v3"}))
    with pytest.raises(ConfigError, match="there are 2 processes, and offload is 'v0', under which each process has all"):
        with_homes(two, held(1), Config({"zero": "v1", "offload": "v0"}))
    with pytest.raises(ConfigError, match="no TaskGraph of this plan has two"):
        with_homes(shared([1, 1]), held(1), Config({"zero": "v1"}))
