"""Homes of variables: their balance, what devices hold of them, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.passes.drawings import chain, plan
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.errors import ConfigError, PlanError
from whale_tf.passes.owners import Owners, find_owners
from whale_tf.plan import Plan
from whale_tf.planner.explain import explain_plan
from whale_tf.planner.homes import (
    Dimension,
    TrainedVariable,
    has_one_memory,
    parts_of,
    resident,
    resident_of_task_graphs,
    too_large,
    whole_because,
    with_homes,
)

pytestmark = pytest.mark.once


def shared(counts: Any, micro_batches: int = 1, model_replicas: int = 1, **more: Any) -> Plan:
    return plan(counts, micro_batches, model_replicas, {i: {"variables": "shared"} for i in range(len(counts))}, **more)


def held(*sizes: int, task_graph: int = 0) -> Any:
    """Under Adam."""
    return [TrainedVariable(f"v{task_graph}_{i}", task_graph, 0, size, 2 * size) for i, size in enumerate(sizes)]


def test_balance() -> None:
    layers = held(*([64 * 256, 256 * 64] + [64 * 64] * 4 + [64] * 9) * 12)
    done = with_homes(shared([4]), layers, Config({"zero": "v1"}))
    found = resident(done, layers, True)
    assert max(found.held) <= 1.05 * sum(found.held) / 4 and found.held[4] == 0
    assert found.read == [0] * 5 and found.sums == [size // 3 for size in found.held]


def parted(plan: Plan, variables: Any, sizes: Any = None) -> Any:
    """Variable -> dimension, by TaskGraph, where every variable has one of 64 elements, unless ``sizes`` says another number."""
    config = Config({"zero": "v1"})

    def divisible(one: TrainedVariable) -> Any:
        size = (sizes or {}).get(one.name, 64)
        return Dimension(1, size) if size else None

    return [task.parts for task in parts_of(plan, variables, config, divisible).task_graphs]


def test_variables_in_parts() -> None:
    """As few as will do, the largest first."""
    assert parted(shared([4]), held(60, 20, 10, 10)) == [{"v0_0": 1, "v0_1": 1}]
    assert parted(shared([4]), held(60, 10, 10, 10, 10)) == [{"v0_0": 1}]
    assert parted(shared([4]), held(25, 25, 25, 25)) == [{}] and parted(shared([1]), held(60, 1)) == [{}]
    assert parted(shared([4]), held(60, 20, 10, 10), {"v0_0": 0}) == [{}]  # nothing else makes the fullest device less full
    assert parted(shared([4]), held(60, 20, 12, 8), {"v0_1": 0}) == [{"v0_0": 1}]


def test_parts_by_task_graph() -> None:
    """Each TaskGraph has its devices, in all model replicas."""
    variables = held(60, 1) + held(5, 5, task_graph=1)
    assert parted(shared([1, 1], 2, 2), variables) == parted(shared([2, 1]), variables) == [{"v0_0": 1}, {}]
    assert not any(parted(shared([2], model_replicas=2, processes=((0, 1), (2, 3))), held(60, 1)))
    assert whole_because(shared([2], model_replicas=2, processes=((0, 1), (2, 3)))).endswith("if all replicas are in one step")


def test_what_is_larger_than_a_share() -> None:
    variables = held(60, 20, 10, 10)
    assert [one.name for one in too_large(shared([4]), variables)] == ["v0_0"]
    assert not too_large(shared([1]), variables) and not too_large(shared([4]), held(25, 25, 25, 25))


def test_what_calls_gather() -> None:
    """Of a variable in parts the reader has all that others have, and of several variables those that it reads at a time."""
    parts = [TrainedVariable(f"shards/{i}/w", 0, 0, 10, 20, "w") for i in range(4)]
    done = with_homes(shared([4]), parts, Config({"zero": "v3"}))
    assert sorted(done.task_graphs[0].homes.values()) == [0, 1, 2, 3]
    assert resident(done, parts, False).read == [30] * 4 + [0] and resident(done, parts, False).held == [30] * 4 + [0]


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


def test_values_of_processes() -> None:
    """Under v3 a variable is in one process; the other one has its value for a step."""
    two = with_homes(shared([1], model_replicas=2, processes=((0,), (1,))), held(30, 20), Config({"zero": "v3"}))
    assert two.task_graphs[0].homes == {"v0_0": 0, "v0_1": 1}
    found = resident(two, held(30, 20), True)
    assert found.held == [90, 60, 0] and found.read == [20, 30, 0]
    told = " ".join(explain_plan(two.local_part(1), None, ["CPU:0", "CPU:0"]).split())
    assert "to the others before the forward pass of every step. Number of variables of process 0: 1, process 1: 1." in told


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
    with pytest.raises(ConfigError, match="there are 2 processes, and offload is 'v0', under which each process has all"):
        with_homes(two, held(1), Config({"zero": "v1", "offload": "v0"}))
    with pytest.raises(ConfigError, match="no TaskGraph of this plan has two"):
        with_homes(shared([1, 1]), held(1), Config({"zero": "v1"}))


def test_kept_bytes() -> None:
    """Optimizer state is only where the variable is updated."""
    one = TrainedVariable("v0_0", 0, 0, 10, 20)
    assert one.kept(plan([2])) == {0: 30, 1: 30} and one.kept(shared([2])) == {0: 30}
    two = shared([1], model_replicas=2, processes=((0,), (1,)), zero="v1")
    assert one.kept(replace(two, task_graphs=(replace(two.task_graphs[0], homes={"v0_0": 1}),))) == {0: 10, 1: 30}


def test_largest_variable_comes_first() -> None:
    done = with_homes(shared([2]), held(10, 30, 15), Config({"zero": "v1"}))
    assert done.task_graphs[0].homes == {"v0_1": 0, "v0_2": 1, "v0_0": 1}


def test_what_a_task_graph_holds() -> None:
    """Without homes variables, moments and gradients; with homes the fullest device's part, and what it reads of others."""
    variables = held(40, 30, 20, 10, 9, 8)
    assert resident_of_task_graphs(shared([1]), held(40), False) == [3 * 40 + 40]
    done = with_homes(shared([2]), variables, Config({"zero": "v1"}))
    assert resident_of_task_graphs(done, variables, False) == [177 + 59 + 58]
    parts = [TrainedVariable(f"v/{shard}", 0, shard, 10, 20) for shard in range(2)]
    split = plan([2], tasks={0: {"strategy": "split"}})
    assert resident_of_task_graphs(split, parts, False) == [10 + 10 + 20]  # each device its part
    beside = replace(shared([1, 1]), task_graphs=shared([1]).task_graphs * 2)
    assert resident_of_task_graphs(beside, held(40) + held(5, task_graph=1), False) == [4 * 45] * 2  # of both on their device


def test_cpu_devices_of_one_process_have_one_memory() -> None:
    mixed = Cluster.parse({"name": "mixed", "nodes": [{"devices": ["CPU", "V100-32GB"], "links": "default"}]})
    assert [has_one_memory(cluster) for cluster in (Cluster.parse("cpu:2"), mixed, Cluster.parse("V100-32GB:2"))] == [
        True, False, False]


def test_one_process_divides_parameters() -> None:
    one = with_homes(shared([2], processes=((0, 1),)), held(20, 10), Config({"zero": "v3"}))
    assert one.task_graphs[0].homes == {"v0_0": 0, "v0_1": 1}


def bytes_of(*sizes: int) -> Any:
    return [TrainedVariable(f"v{number}", 0, 0, size, 0) for number, size in enumerate(sizes)]


def test_how_full_a_device_may_be() -> None:
    """Up to 1.03 times its share."""
    assert too_large(shared([2]), bytes_of(103, 97)) == [] and parted(shared([2]), bytes_of(103, 97)) == [{}]
    assert [one.name for one in too_large(shared([2]), bytes_of(52, 48))] == ["v0"]
    assert parted(shared([2]), bytes_of(17, 16)) == [{"v0": 1}] and parted(shared([2]), bytes_of(18, 17)) == [{}]
    assert parted(shared([2]), bytes_of(0, 0)) == [{}] and too_large(shared([2]), bytes_of(0, 0)) == []


def test_variables_stay_whole() -> None:
    two, variables = shared([2]), held(60, 1)
    for config in ({}, {"offload": "states"}, {"zero": "v1", "offload": "states"}):
        assert parts_of(two, variables, Config(config), lambda one: Dimension(0, 64)) is two
    assert whole_because(two) == whole_because(shared([2], processes=((0, 1),))) == ""
    assert whole_because(plan([2], tasks={0: {"strategy": "split"}})) == "TaskGraph 'stage0' has variables in parts by wh.split"


def test_variables_on_the_first_devices_of_their_task_graphs() -> None:
    """Those of TaskGraphs that replicate, unless they are all on the first device anyway."""
    stage, variables = Config({"variables": "stage"}), held(3, 2) + held(5, task_graph=1)
    two = with_homes(shared([2, 2], 1, 2), variables, stage)
    assert [task.homes for task in two.task_graphs] == [{"v0_0": 0, "v0_1": 0}, {"v1_0": 2}]
    assert (two.zero, two.offload) == ("none", "none")
    split = with_homes(plan([2, 2], tasks={0: {"strategy": "split"}, 1: {"variables": "shared"}}), variables, stage)
    assert [task.homes for task in split.task_graphs] == [{}, {"v1_0": 2}]
    assert with_homes(shared([2]), held(3, 2), stage).task_graphs[0].homes == {}
    assert with_homes(shared([2, 2]), variables, Config({})) == shared([2, 2])


def test_hosts_of_processes_that_run_parts() -> None:
    """Each TaskGraph's variables are on the host of the process that has its first device."""
    across = shared([1, 1], processes=((0,), (1,)))
    away = with_homes(across, held(30, 20), Config({"offload": "states"}))
    assert list(away.hosts) == [2, 3] and [task.homes for task in away.task_graphs] == [{"v0_0": 2, "v0_1": 2}, {}]
    away = with_homes(across, [*held(30), *held(20, task_graph=1)], Config({"offload": "states"}))
    assert [task.homes for task in away.task_graphs] == [{"v0_0": 2}, {"v1_0": 3}] and away.process_of(3) == 1
    assert "Number of variables on the host of process 0: 1, the host of process 1: 1." in " ".join(
        explain_plan(away, None, ["CPU:0", "CPU:1"]).split())
    with pytest.raises(PlanError, match="is device 4, the cluster has devices 0 to 1; the host, under offload, is 2 or 3"):
        Plan.parse(away.to_json().replace('"v1_0": 3', '"v1_0": 4'))


def test_call_holds_the_values_that_it_reads_at_a_time() -> None:
    """The three largest of four that another device keeps."""
    chosen = plan([2], zero="v3", tasks={0: {"variables": "shared", "homes": {f"v0_{number}": 1 for number in range(4)}}})
    assert resident(chosen, held(40, 5, 30, 20), False).read == [90, 0, 0]


def test_what_is_refused_names_both_measures() -> None:
    both = Config({"zero": "v1", "offload": "v0"})
    with pytest.raises(ConfigError, match="^zero is 'v1', and there are 2 processes, and offload is 'v0'"):
        with_homes(shared([1], model_replicas=2, processes=((0,), (1,))), held(1), both)
    assert with_homes(shared([2], processes=((0, 1),)), held(1), both).task_graphs[0].homes == {"v0_0": 2}


def test_division_that_helps_a_little_is_made() -> None:
    """The parts of 7 bytes leave 6 on one of two devices, since the 5 of another variable stay whole."""
    assert parted(shared([2]), bytes_of(7, 5), {"v1": 0}) == [{"v0": 1}]
