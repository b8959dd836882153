"""Causes of hand-made measurements, whose costs can be added up in the head."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, List, Mapping, Optional

import pytest

from tests.simulator.test_step_graph import ONE, apart, plan, step
from whale_tf.cluster import Cluster
from whale_tf.diagnosis import diagnose as causes
from whale_tf.diagnosis.diagnose import Cause, Diagnosis, diagnose
from whale_tf.diagnosis.played import Played, bytes_per_s, with_micro_batches
from whale_tf.diagnosis.record import Measured, OpTime, Record, parse, to_json, together
from whale_tf.diagnosis.text import text_of
from whale_tf.errors import PlanError
from whale_tf.plan import Plan
from whale_tf.simulator import StepGraph, under
from whale_tf.simulator.step_graph import StepTensor


def record(chosen: Plan, seconds: Mapping[str, float], graph: Optional[StepGraph] = None, run_s: float = 0.0,
           outside_s: float = 0.0, stalled_s: float = 0.0, slow: Mapping[int, float] = {}, **more: Any) -> Record:
    """What processes measure that compute each op in so many seconds, 1 if nothing is said; devices in ``slow`` take so many
    times as long."""
    graph = graph or under(step(), chosen)
    parts = chosen.processes or (tuple(range(chosen.num_devices)),)
    cluster = more.get("cluster", "cpu:8")
    found: List[Measured] = []
    for rank, devices in enumerate(parts):
        ops = []
        for device in devices:
            for op in graph.ops:
                used = {number for row in chosen.task_graphs[op.task_graph].devices for number in row}
                runs = float(chosen.num_micro_batch) if op.step in ("forward", "backward") else 1.0
                if device in used:
                    each = seconds.get(op.name, 1.0) * slow.get(device, 1.0)
                    ops.append(OpTime(op.name, op.type, device, runs, runs * each))
        found.append(Measured(rank, 20, 6, run_s + outside_s, run_s, stalled_s, tuple(ops), (), more.get("collective_s", 0.0)))
    used = {device for task in chosen.task_graphs for row in task.devices for device in row}
    cores = more.get("cores", len(used) // len(parts))  # one op at a time on each device
    return Record(chosen, graph, Cluster.parse(cluster), cores, tuple(found))


def simulated(measured: Record) -> float:
    return Played(measured).seconds()


def with_run(measured: Record, run_s: float, outside_s: float = 0.0) -> Record:
    return measured._replace(processes=tuple(one._replace(run_s=run_s, period_s=run_s + outside_s) for one in measured.processes))


def exact(measured: Record) -> Record:
    """The step takes what its ops take."""
    return with_run(measured, simulated(measured))


def only(found: Diagnosis) -> Cause:
    assert len(found.causes) == 1, found.causes
    return found.causes[0]


def test_ops_one_after_the_other_have_no_cause() -> None:
    found = diagnose(exact(record(plan([0], names=ONE), {})))
    assert found.simulated_s == pytest.approx(7.0) and found.left_s == pytest.approx(0.0) and not found.causes
    assert [(row.device, row.measured_s, row.simulated_s) for row in found.devices] == [(0, 7.0, 7.0)]


def test_waiting_for_examples() -> None:
    measured = with_run(record(plan([0], names=ONE), {}), 7.0, 5.0)
    assert only(diagnose(measured))[:2] == (causes.INPUT, pytest.approx(5.0))
    stalled = measured._replace(processes=(measured.processes[0]._replace(run_s=10.0, period_s=10.0, stalled_s=3.0),))
    assert only(diagnose(stalled))[:2] == (causes.INPUT, pytest.approx(3.0))


def test_launches_are_what_the_ops_do_not_explain() -> None:
    found = diagnose(with_run(record(plan([0], names=ONE), {}), 10.0))
    assert only(found)[:2] == (causes.HOST_LAUNCHES, pytest.approx(3.0)) and found.left_s == pytest.approx(3.0)


def test_traces_that_slow_ops_down_are_scaled() -> None:
    found = diagnose(with_run(record(plan([0], names=ONE), {}), 5.0))
    assert found.simulated_s == pytest.approx(5.0) and not found.causes


def test_slow_worker() -> None:
    measured = exact(record(apart(), {}, slow={1: 2.0}))
    found = diagnose(measured)
    assert found.causes[0].kind == causes.WORKER and "device 1 of process 1" in found.causes[0].found
    alike = simulated(record(apart(), {}))
    assert found.causes[0].gain_s == pytest.approx(found.period_s - alike) and found.causes[0].gain_s > 3.0


def test_launches_of_a_slow_worker_are_slow() -> None:
    measured = record(apart(), {}, slow={1: 2.0})
    found = diagnose(with_run(measured, simulated(measured) + 4.0))
    gains = {one.kind: one.gain_s for one in found.causes}
    assert gains[causes.WORKER] == pytest.approx(simulated(measured) - simulated(record(apart(), {})) + 2.0)
    assert gains[causes.HOST_LAUNCHES] == pytest.approx(2.0)


def test_workers_alike_have_no_cause() -> None:
    assert not diagnose(exact(record(apart(), {}, slow={1: 1.1}))).causes


def test_stage_that_is_too_long() -> None:
    chosen = plan([0], [1], micro_batches=4)
    measured = exact(record(chosen, {"forward_a": 6.0, "weight_a": 6.0}))
    found = diagnose(measured)
    cause = next(one for one in found.causes if one.kind == causes.STAGE)
    assert "TaskGraph '0'" in cause.found and 0.2 * found.period_s < cause.gain_s < 0.5 * found.period_s


def test_devices_of_one_process_share_its_cores() -> None:
    """A better cut of a pipeline gains nothing where one core computes both stages."""
    chosen, seconds = plan([0], [1], micro_batches=4), {"forward_a": 6.0, "weight_a": 6.0}
    work = sum(Played(record(chosen, seconds)).computes().values())
    alone = exact(record(chosen, seconds, cores=1))
    assert simulated(alone) == pytest.approx(work, rel=1e-3) and simulated(record(chosen, seconds)) < 0.9 * work
    assert causes.STAGE not in {one.kind for one in diagnose(alone).causes}


def test_weights_take_their_time_in_each_micro_batch() -> None:
    """Of the product's second in each micro-batch, 0.4 s write the gradient of weights, at the speed of the update."""
    chosen, mega = plan([0], names=ONE, micro_batches=8), 2.0 ** 20
    graph = under(step(), chosen)
    changes = {"weight_a": {"outputs": (StepTensor(4 * mega, "partial"),)},
               "update_a": {"type": "AssignSub", "size_bytes": 10 * mega, "contraction": False}}
    graph = graph._replace(ops=tuple(op._replace(**changes.get(op.name, {})) for op in graph.ops))
    measured = record(chosen, dict(dict.fromkeys([op.name for op in graph.ops], 1e-9), weight_a=1.0, update_a=1.0), graph)
    assert bytes_per_s(measured, 0.0) == pytest.approx(10 * mega)
    assert with_micro_batches(measured, 1, {}).computes()[0] == pytest.approx(0.4 + 0.6 * 8 + 1.0, rel=1e-6)


def test_products_that_were_measured_apart() -> None:
    """With half of the micro-batches, one takes 1.5 times as long: 6 s. By the law 7: a second to launch, twice the rest."""
    measured = record(plan([0], names=ONE, micro_batches=2), {"weight_a": 4.0})
    process, = measured.processes
    apart_s = (("weight_a", 1, 0.3), ("weight_a", 2, 0.2))
    fewer = [with_micro_batches(measured._replace(processes=(process._replace(products=given),)), 1, {}).computes()[0]
             for given in (apart_s, apart_s[:1], ())]
    assert fewer[0] == pytest.approx(fewer[2] - 7.0 + 6.0) and fewer[1] == fewer[2]


def test_micro_batches_too_small() -> None:
    """Every op takes 1 s whatever its size, so one micro-batch takes an eighth."""
    measured = exact(record(plan([0], names=ONE, micro_batches=8), {"update_a": 0.01, "update_b": 0.01}))
    found = diagnose(measured)
    assert found.causes[0].kind == causes.MICRO_BATCHES and found.causes[0].fix == "num_micro_batch: 1"
    assert found.causes[0].gain_s == pytest.approx(5 * 7.0, rel=0.02)


def test_launches_that_fewer_micro_batches_save_are_not_counted_twice() -> None:
    measured = record(plan([0], names=ONE, micro_batches=8), {})
    found = diagnose(with_run(measured, simulated(measured) + 42.0))
    by_kind: Dict[str, float] = {one.kind: one.gain_s for one in found.causes}
    runs, fewer = 8 * 5 + 2, 5 + 2
    assert by_kind[causes.HOST_LAUNCHES] == pytest.approx(42.0 * fewer / runs)
    assert by_kind[causes.MICRO_BATCHES] == pytest.approx(35.0 + 42.0 * (1 - fewer / runs), rel=0.02)


def test_python_functions() -> None:
    chosen = plan([0], names=ONE)
    graph = under(step(), chosen)
    graph = graph._replace(ops=(graph.ops[0]._replace(type="PyFunc"),) + graph.ops[1:])
    found = diagnose(exact(record(chosen, {"forward_a": 4.0}, graph)))
    assert only(found)[:2] == (causes.COPIES, pytest.approx(4.0)) and "forward_a (4.000 s)" in found.causes[0].found


def test_ops_that_every_replica_computes_whole() -> None:
    chosen = plan([0, 1], names=ONE)
    graph = under(step(), chosen)
    graph = graph._replace(ops=(graph.ops[0]._replace(outputs=(StepTensor(8.0),)),) + graph.ops[1:])
    measured = exact(record(replace(chosen, num_devices=2), {"forward_a": 6.0}, graph))
    cause = next(one for one in diagnose(measured).causes if one.kind == causes.UNDIVIDED)
    assert cause.gain_s == pytest.approx(3.0) and "forward_a" in cause.found


@pytest.mark.parametrize("factor, is_slow", [(1.0, False), (4.0, True)])
def test_link_that_is_slower_than_described(factor: float, is_slow: bool) -> None:
    """The member that comes last waits least."""
    chosen, cluster = apart((("a",), ("b",))), "2xcpu:1"
    bare = record(chosen, {}, cluster=cluster)
    expected = Played(bare).exchanges_s()
    assert expected > 0
    seconds = {op.name: expected for op in bare.step.ops}  # ops take as long as the messages
    measured = record(chosen, seconds, cluster=cluster, collective_s=factor * expected)
    measured = measured._replace(processes=(measured.processes[0]._replace(collective_s=9.0), measured.processes[1]))
    found = diagnose(with_run(measured, simulated(measured) + (factor - 1.0) * expected))
    assert [one.kind for one in found.causes if one.kind in (causes.LINK, causes.HOST_LAUNCHES)] == [causes.LINK] * is_slow


def test_messages_of_both_directions_go_at_once() -> None:
    """One process sends activations, the other one gradients.  Messages between devices of one process are none of these."""
    chosen = plan([0], [1], micro_batches=4)
    played = Played(record(replace(chosen, num_devices=2, processes=((0,), (1,))), {}, cluster="2xcpu:1"))
    sent = [sum(task.seconds for task in played.tasks if task.senders == {rank}) for rank in (0, 1)]
    assert min(sent) > 0 and played.exchanges_s() == pytest.approx(max(sent))
    alone = Played(record(chosen, {}))
    assert any(task.lane > 0 for task in alone.tasks) and alone.exchanges_s() == 0.0


def test_causes_come_in_the_order_of_their_costs() -> None:
    chosen = plan([0], [1], micro_batches=4)
    measured = with_run(record(chosen, {"forward_a": 6.0}), 100.0, 60.0)
    found = diagnose(measured)
    gains = [one.gain_s for one in found.causes]
    assert gains == sorted(gains, reverse=True)
    assert {causes.INPUT, causes.MICRO_BATCHES, causes.HOST_LAUNCHES} <= {one.kind for one in found.causes}
    text = text_of(measured, found)
    assert text.index(found.causes[0].kind) < text.index(found.causes[1].kind) and "what to do" in text


def test_record_as_json() -> None:
    measured = record(apart(), {}, slow={1: 2.0})
    measured = measured._replace(processes=tuple(one._replace(products=(("a", 2, 0.5),)) for one in measured.processes))
    assert parse(to_json(measured)) == measured
    halves = [measured._replace(processes=(one,)) for one in reversed(measured.processes)]
    assert together(halves) == measured
    with pytest.raises(PlanError, match="not what wh.doctor"):
        parse('{"version": 2}')
    with pytest.raises(PlanError, match="version is 7"):
        parse('{"version": 7}')
    with pytest.raises(PlanError, match="no process has left a record"):
        together([])
    with pytest.raises(PlanError, match="different plans"):
        together([measured, measured._replace(plan=replace(measured.plan, graph="other"))])


def test_untraced_steps_are_refused() -> None:
    measured = record(plan([0], names=ONE), {})
    with pytest.raises(PlanError, match="no step was traced"):
        diagnose(measured._replace(processes=(measured.processes[0]._replace(ops=()),)))
