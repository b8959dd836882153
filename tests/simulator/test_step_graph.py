"""A captured step by hand: two stages, one variable each, times that can be added up in the head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, List, Sequence, Tuple

import pytest

from tests.simulator.test_calibration import GIVEN
from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError
from whale_tf.plan import GradientPlan, Plan, TaskGraphPlan
from whale_tf.profiler.op_time import LAUNCH_S
from whale_tf.program import BACKWARD, FORWARD, ONCE, UPDATE
from whale_tf.simulator import Calibration, Options, Simulator, StepGraph, trace_of, under
from whale_tf.simulator.instructions import COMPUTATION, FEATURE
from whale_tf.simulator.memory import lifetimes
from whale_tf.simulator.step_graph import KernelMemory, StepOp, StepTensor, StepVariable, interpolated_from_zero

BATCH = 8
KB = 1000.0
EXAMPLES, GRADIENT = StepTensor(8 * KB, "sharded"), StepTensor(4 * KB, "partial")
FREE: Dict[str, Any] = dict(
    GIVEN,
    memory=[[1.0, 1e-15], [1e9, 1e-6]],
    launch_s=0.0,
    step_s=0.0,
    wake=(),
    slow_down={},
    communicators={"local": {"alpha_s": 0.0, "bandwidth_bytes_per_s": 1e15}},
)


def op(name: str, inputs: Sequence[int], tensor: StepTensor, of: str = FORWARD, follows: str = "") -> StepOp:
    kind = "AssignSubVariableOp" if of == UPDATE else "MatMul"
    return StepOp(name, kind, of, 0, 0, name, follows, tuple((source, 0) for source in inputs), (tensor,), 100.0, 100.0, True)


def step(**seconds: float) -> StepGraph:
    ops = (
        op("forward_a", [], EXAMPLES),
        op("forward_b", [0], EXAMPLES),
        op("backward_b", [1], EXAMPLES, BACKWARD, "forward_b"),
        op("weight_b", [1], GRADIENT, BACKWARD, "forward_b"),
        op("weight_a", [2], GRADIENT, BACKWARD, "forward_a"),
        op("update_b", [3], StepTensor(0.0), UPDATE),
        op("update_a", [4], StepTensor(0.0), UPDATE),
    )
    times = {one.name: ((BATCH, seconds.get(one.name, 1.0)),) for one in ops}
    times.update({name: ((BATCH / 2, value[0][1] / 2), value[0]) for name, value in times.items() if "update" not in name})
    variables = (StepVariable("a", 0, 0, 8 * KB), StepVariable("b", 1, 0, 8 * KB))
    gradients = (("b", 3, 0), ("a", 4, 0))
    return StepGraph("hand", "f", BATCH, "fp32", False, ops, variables, gradients, times)


def plan(*rows: Sequence[int], micro_batches: int = 1, schedule: str = "backward_first", names: Any = None) -> Plan:
    names = names or (["a", "forward_a"], ["b", "forward_b"])
    tasks = tuple(
        TaskGraphPlan(name=str(i), ops=tuple(names[i]), devices=(tuple(row),), warmup=min(len(rows) - i, micro_batches))
        for i, row in enumerate(rows)
    )
    return Plan(graph="f", num_devices=8, num_micro_batch=micro_batches, schedule=schedule, task_graphs=tasks)


def apart(buckets: Tuple[Tuple[str, ...], ...] = ()) -> Plan:
    """One replica in each of two processes, each with a mini-batch of its own."""
    one = plan([0, 1], names=ONE)
    tasks = (replace(one.task_graphs[0], devices=((0,), (1,))),)
    sync = GradientPlan(task_graph=0, backend="collective", buckets=buckets)
    return replace(one, num_devices=2, num_model_replicas=2, task_graphs=tasks, gradients=(sync,), processes=((0,), (1,)))


def played(chosen: Plan, graph: StepGraph, cores: int = 2, cluster: str = "cpu:8", **calibration: Any) -> Any:
    known = Calibration.parse(dict(FREE, cores=cores, **calibration))
    return Simulator(Cluster.parse(cluster), Options(calibration=known)).run_step(chosen, under(graph, chosen))


ONE = (["a", "forward_a", "b", "forward_b"],)


def test_one_core_does_all_work_one_after_the_other() -> None:
    assert played(plan([0], names=ONE), step(), cores=1).step_time_s == pytest.approx(7.0)


def test_devices_do_nothing_while_a_session_starts() -> None:
    alone, found = (played(plan([0], names=ONE), step(), cores=1, step_s=seconds) for seconds in (0.0, 7.0))
    assert found.step_time_s == pytest.approx(14.0) and found.mfu == pytest.approx(alone.mfu / 2)
    assert found.devices[0].bubble_s == pytest.approx(7.0) and found.devices[0].computation_s == pytest.approx(7.0)


def test_step_without_times_is_refused() -> None:
    with pytest.raises(PlanError, match="no times of ops"):
        played(plan([0], names=ONE), step()._replace(seconds={}))


def test_global_batch_takes_the_times_measured_at_its_size() -> None:
    """Ops of examples take half the time at half the batch, updates what they took."""
    chosen, known = plan([0], names=ONE), Calibration.parse(dict(FREE, cores=1))
    simulator = Simulator(Cluster.parse("cpu:8"), Options(calibration=known))
    half = simulator.run_step(chosen, under(step(), chosen), BATCH // 2)
    assert half.step_time_s == pytest.approx(5 * 0.5 + 2.0) and half.subject.samples == BATCH // 2
    with pytest.raises(PlanError, match="global batch is 0"):
        simulator.run_step(chosen, under(step(), chosen), 0)


def test_two_cores_run_what_does_not_wait_side_by_side() -> None:
    """f_a f_b, then b_b and w_b at once, then w_a and u_b, then u_a."""
    assert played(plan([0], names=ONE), step()).step_time_s == pytest.approx(5.0)


def test_replicas_share_the_cores_of_their_process() -> None:
    """Half of the examples each; the updates of both copies; two copies take two cores."""
    both = played(plan([0, 1], names=ONE), step())
    assert both.step_time_s == pytest.approx((5 * 2 / 2 + 2 * 2) / 2, rel=0.2)
    four = played(plan([0, 1, 2, 3], names=ONE), step(), cores=4)
    assert four.step_time_s < played(plan([0, 1, 2, 3], names=ONE), step(), cores=2).step_time_s


@pytest.mark.parametrize("schedule", ["backward_first", "gpipe"])
def test_pipeline_overlaps_its_stages(schedule: str) -> None:
    """Two stages of 2 and 3 seconds: the second is the bottleneck."""
    found = played(plan([0], [1], micro_batches=4, schedule=schedule), step())
    assert 5.0 / 2 < found.step_time_s < 7.0
    assert played(plan([0], [1], micro_batches=4, schedule=schedule), step(), cores=1).step_time_s == pytest.approx(7.0)


def test_steps_of_a_stage_take_place_one_after_the_other() -> None:
    """The first stage warms up with two micro-batches; only a send waits for the results of its forward step."""
    found = played(plan([0], [1], micro_batches=4), step(), cores=4)
    graph, times = found.graph, found.times
    ran = []
    for task, number in enumerate(graph.instruction):
        name = found.program.instructions[number].name if number >= 0 else ""
        if name in ("forward_a", "weight_a") and graph.lane[task] == COMPUTATION:
            ran.append((times.start[task], times.end[task], name[0] + str(graph.micro_batch[task])))
    ran.sort()
    assert [what for _, _, what in ran] == ["f0", "f1", "w0", "f2", "w1", "f3", "w2", "w3"]
    assert all(end <= start for (_, end, _), (start, _, _) in zip(ran, ran[1:]))


def test_what_several_devices_send_is_put_together_by_an_op() -> None:
    """Two halves of 8 kB are read and written: 16 kB at 0.1 ms a byte."""
    found = played(plan([0, 1], [2]), step(), memory=[[1.0, 1e-4], [1e9, 1e5]])
    concat = next(one for one in found.program.instructions if one.name == "forward_a (bridge)")
    assert [end - start for (name, slot, _), (start, end) in ran(found).items() if name == concat.name and slot == 2] \
        == pytest.approx([1.6])
    assert [one.bytes for one in found.program.buffers if one.producer == concat.id] == [(8 * KB,)]
    handed_over = played(plan([0], [1]), step()).program.instructions
    assert not any("bridge" in one.name for one in handed_over)


def test_ops_that_run_at_once_slow_each_other_down() -> None:
    slower = played(plan([0], names=ONE), step(), slow_down={"arithmetic-arithmetic": 1.5})
    assert slower.step_time_s == pytest.approx(2 + 1.5 + 1.5 + 1)


def test_thread_that_has_waited_wakes_up_first() -> None:
    """f_a f_b; then b_b, and w_b on the thread that has waited for two seconds; w_a and u_b; u_a."""
    assert played(plan([0], names=ONE), step(), wake=[[1.0, 0.125], [3.0, 0.375]]).step_time_s == pytest.approx(5.25)
    assert played(plan([0], names=ONE), step(), wake=[[3.0, 0.25]]).step_time_s == pytest.approx(5.25)
    assert played(plan([0], names=ONE), step(), cores=1, wake=[[1.0, 0.25]]).step_time_s == pytest.approx(7.0)


def test_thread_that_wakes_up_takes_what_is_left_by_then() -> None:
    """w_b and b_b are there from 2 s on; the other thread runs w_b and u_b, and b_b from 4 s on if this one is not yet awake."""
    assert played(plan([0], names=ONE), step(), wake=[[1.0, 9.0]]).step_time_s == pytest.approx(7.0)
    assert played(plan([0], names=ONE), step(), wake=[[1.0, 1.5]]).step_time_s == pytest.approx(6.5)  # b_b from 3.5 s on


def test_what_another_thread_has_written_takes_longer_to_read() -> None:
    """f_a f_b; w_b, and b_b on the other thread; w_a and u_b; u_a.  What the updates read is half as large as all else."""
    far = [[4 * KB, 1e-9], [8 * KB, 0.25]]
    assert played(plan([0], names=ONE), step(), far=far).step_time_s == pytest.approx(5.25)
    assert played(plan([0], names=ONE), step(), cores=1, far=far).step_time_s == pytest.approx(7.0)
    two_stages = played(plan([0], [1]), step(), far=far).step_time_s  # also what a send has handed over: f_b, then b_b
    assert two_stages == pytest.approx(5.5)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_replicas_wait_for_the_variables_that_the_first_one_sends(micro_batches: int) -> None:
    """1 us to read, and 1 us for each of the three that it is sent to, one after the other on the thread that has read."""
    ops = (
        op("read", [], StepTensor(8 * KB), ONCE),
        op("forward", [0], EXAMPLES),
        op("weight", [1], GRADIENT, BACKWARD, "forward"),
        op("update", [2], StepTensor(0.0), UPDATE),
    )
    times = {one.name: ((BATCH, 1e-6),) for one in ops}
    graph = StepGraph("hand", "f", BATCH, "fp32", False, ops, (StepVariable("a", 0, 0, 8 * KB),), (("a", 2, 0),), times)
    local = {"local": {"alpha_s": 1e-6, "bandwidth_bytes_per_s": 1e15}}
    mirrored = plan([0, 1, 2, 3], micro_batches=micro_batches, names=(["read", "forward"],))
    shared = replace(mirrored, task_graphs=tuple(replace(task, variables="shared") for task in mirrored.task_graphs))
    found = played(shared, graph, 4, communicators=local)
    first: Dict[int, float] = {}
    for task, number in enumerate(found.graph.instruction):
        if number >= 0 and found.program.instructions[number].name == "forward":
            slot, = found.graph.slots[task]
            first[slot] = min(found.times.start[task], first.get(slot, 1.0))
    assert sorted(first[slot] for slot in (1, 2, 3)) == pytest.approx([2e-6, 3e-6, 4e-6], rel=1e-3)
    tasks, received = found.graph, set()
    for task, lane in enumerate(tasks.lane):
        if lane == FEATURE and found.program.instructions[tasks.instruction[task]].name == "read":
            received.update(tasks.slots[later][0] for later in tasks.successors[
                tasks.first_successor[task]:tasks.first_successor[task + 1]])  # fmt: skip
    assert received == {1, 2, 3}, "the one that sends does not wait for that"


def test_slots_are_kept_by_the_process_that_updates_a_variable() -> None:
    """ZeRO over two processes: each has all variables."""
    tasks = (replace(apart().task_graphs[0], variables="shared", homes={"a": 0, "b": 1}),)
    variables = (StepVariable("a", 0, 0, 8 * KB, 5 * KB), StepVariable("b", 0, 0, 8 * KB, 6 * KB))
    found = played(replace(apart(), zero="v1", task_graphs=tasks), step()._replace(variables=variables))
    assert found.program.static_bytes == {0: {"parameters": 10 * KB}, 1: {"parameters": 11 * KB}}


def test_values_are_kept_by_one_process_under_v3() -> None:
    tasks = (replace(apart().task_graphs[0], variables="shared", homes={"a": 0, "b": 1}),)
    variables = (StepVariable("a", 0, 0, 8 * KB, 5 * KB), StepVariable("b", 0, 0, 8 * KB, 6 * KB))
    found = played(replace(apart(), zero="v3", task_graphs=tasks), step()._replace(variables=variables))
    assert found.program.static_bytes == {0: {"parameters": 8 * KB}, 1: {"parameters": 8 * KB}}


def test_each_process_has_a_host() -> None:
    """Behind the devices of its node; each keeps all variables."""
    tasks = (replace(apart().task_graphs[0], variables="shared", homes={"a": 2, "b": 2}),)
    variables = (StepVariable("a", 0, 0, 8 * KB, 5 * KB), StepVariable("b", 0, 0, 8 * KB, 6 * KB))
    found = played(replace(apart(), offload="states", task_graphs=tasks), step()._replace(variables=variables))
    kept = {device: sizes for device, sizes in found.program.static_bytes.items() if sizes}
    assert kept == {2: {"parameters": 16 * KB}, 3: {"parameters": 16 * KB}}


def test_host_is_in_pictures() -> None:
    """It is in no TaskGraph; there updates run."""
    tasks = (replace(plan([0], names=ONE).task_graphs[0], variables="shared", homes={"a": 8, "b": 8}),)
    found = played(replace(plan([0], names=ONE), offload="states", task_graphs=tasks), step())
    assert {event.device for event in trace_of(found).events if event.name == "update_a"} == {8}


def test_what_a_tensor_from_another_device_makes_ready_any_thread_takes() -> None:
    """Two short ops read what forward_a sends; short ops stay on the thread of an op that made them ready."""
    graph = step(**dict.fromkeys(("forward_a", "forward_b", "weight_b"), 1e-6))
    ops = tuple(one._replace(inputs=((0, 0),)) if one.name == "weight_b" else one for one in graph.ops)

    def begin(chosen: Plan) -> List[float]:
        found = played(chosen, graph._replace(ops=ops))
        names = [found.program.instructions[number].name if number >= 0 else "" for number in found.graph.instruction]
        return sorted(start for name, lane, start in zip(names, found.graph.lane, found.times.start)
                      if name in ("forward_b", "weight_b") and lane == COMPUTATION)  # fmt: skip

    assert begin(plan([0], [1])) == pytest.approx([1e-6, 1e-6], rel=1e-3)
    assert begin(plan([0], names=ONE)) == pytest.approx([1e-6, 2e-6], rel=1e-3)


def test_op_that_was_fused_costs_nothing_and_passes_on_what_it_waits_for() -> None:
    graph = step()
    fused = {name: points for name, points in graph.seconds.items() if name != "forward_a"}
    assert played(plan([0], names=ONE), graph._replace(seconds=fused), cores=1).step_time_s == pytest.approx(6.0)


def test_op_overwrites_what_it_reads_and_not_what_was_fused_into_it() -> None:
    """forward_b may take forward_a's buffer; where forward_a was fused into it, not the buffer of what forward_a read."""
    graph = step()

    def peak(ops: Sequence[StepOp], **seconds: Any) -> float:
        return played(plan([0], names=ONE), graph._replace(ops=tuple(ops), seconds=seconds), cores=1).peak_memory_bytes[0]

    before = op("before", [], EXAMPLES, follows="forward_a")._replace(overwrites=True)  # reads no op of the step
    fused, over = op("forward_a", [0], EXAMPLES), op("forward_b", [1], EXAMPLES)._replace(overwrites=True)
    last = op("last", [2, 0], StepTensor(0.0), follows="forward_a")
    timed = {one.name: ((BATCH, 1.0),) for one in (before, fused, over, last)}
    alone = {name: points for name, points in timed.items() if name != "forward_a"}
    kept, overwritten = ([before, fused, one, last] for one in (over._replace(overwrites=False), over))
    assert peak(kept, **timed) - peak(overwritten, **timed) == 8 * KB
    assert peak(overwritten, **alone) == peak(kept, **alone) == peak(overwritten, **timed)


def test_reading_a_variable_takes_no_memory() -> None:
    """Its value is the variable's memory, also where the read is a task with a time of its own."""
    graph = step()
    variable, read = (op(name, inputs, StepTensor(8 * KB), ONCE)._replace(type=kind)
                      for name, inputs, kind in (("a", [], "VarHandleOp"), ("read_a", [0], "ReadVariableOp")))
    moved = [one._replace(inputs=tuple((source + 2, at) for source, at in one.inputs)) for one in graph.ops]
    with_read = graph._replace(
        ops=(variable, read, moved[0]._replace(inputs=((1, 0),)), *moved[1:]),
        seconds=dict(graph.seconds, read_a=((BATCH, 1.0),)),
        gradients=tuple((name, number + 2, at) for name, number, at in graph.gradients))
    found = played(plan([0], names=ONE), with_read).program
    assert "read_a" in {one.name for one in found.instructions}
    assert "read_a" not in {one.name for one in found.buffers} and "forward_a" in {one.name for one in found.buffers}


def waiting() -> StepGraph:
    """As TensorFlow makes gradients: all of an op are handed on together, here what backward_b and weight_b make.  These ops,
    ``together``, ``on`` and ``weight``, do not run by themselves."""
    forward_a, forward_b, backward_b, weight_b, weight_a, update_b, update_a = step().ops
    together = op("together", [], StepTensor(0.0), BACKWARD, "forward_b")._replace(waits=(2, 3))
    on, weight = (op(name, [number], tensor, BACKWARD, "forward_b")._replace(waits=(4,))
                  for name, number, tensor in (("on", 2, EXAMPLES), ("weight", 3, GRADIENT)))  # fmt: skip
    ops = (forward_a, forward_b, backward_b, weight_b, together, on, weight, weight_a._replace(inputs=((5, 0),)),
           update_b._replace(inputs=((6, 0),)), update_a._replace(inputs=((7, 0),)))  # fmt: skip
    return step()._replace(ops=ops, gradients=(("b", 6, 0), ("a", 7, 0)))


def test_what_waits_by_a_control_edge_waits_through_ops_that_do_not_run() -> None:
    found = played(plan([0], names=ONE), waiting())
    start, end = ({found.program.instructions[number].name: moment for number, moment in zip(found.graph.instruction, moments)}
                  for moments in (found.times.start, found.times.end))  # fmt: skip
    assert start["weight_a"] >= end["weight_b"] and start["update_b"] >= end["backward_b"]
    late = step(weight_b=3.0)
    assert played(plan([0], names=ONE), late).step_time_s == pytest.approx(6.0)  # beside it, backward_b and weight_a
    assert played(plan([0], names=ONE), waiting()._replace(seconds=late.seconds)).step_time_s == pytest.approx(7.0)


def test_what_an_op_that_does_not_run_waits_for_its_send_waits_for() -> None:
    """f_a f_b; weight_b takes 3 s beside backward_b, and what that makes is handed on with it; then weight_a and its update."""
    late = waiting()._replace(seconds=step(weight_b=3.0).seconds)
    assert played(plan([0], [1]), late).step_time_s == pytest.approx(7.0)


def test_each_device_sends_as_soon_as_it_has_something_to_send() -> None:
    """The first of two replicas has a third of the examples of the second."""
    unequal = plan([0, 1], [2])
    replicas, last = unequal.task_graphs
    tasks = (replace(replicas, slices=(1, 3)), last)
    found = played(replace(unequal, task_graphs=tasks), step(), cores=3)
    graph, times = found.graph, found.times
    names = [found.program.instructions[number].name if number >= 0 else "" for number in graph.instruction]
    sends = {slots[0]: times.start[task] for task, (name, slots) in enumerate(zip(names, graph.slots))
             if name == "forward_a" and graph.lane[task] == FEATURE}  # fmt: skip
    ends = {slots[0]: times.end[task] for task, (name, slots) in enumerate(zip(names, graph.slots))
            if name == "forward_a" and graph.lane[task] == COMPUTATION}  # fmt: skip
    assert sends == pytest.approx(ends) and sends[0] < sends[1]


def test_sum_over_micro_batches_waits_for_what_its_gradient_waits_for() -> None:
    found = played(plan([0], names=ONE, micro_batches=2), waiting(), cores=1)
    times = ran(found)
    assert times["weight (accumulate)", 0, 1][0] > max(times["backward_b", 0, batch][0] for batch in range(2))


def ran(found: Any) -> Dict[Tuple[str, int, int], Tuple[float, float]]:
    """(op, its device's place, micro-batch) -> (start, end)."""
    graph, times, instructions = found.graph, found.times, found.program.instructions
    return {(instructions[number].name, graph.slots[task][0], graph.micro_batch[task]): (times.start[task], times.end[task])
            for task, number in enumerate(graph.instruction) if number >= 0 and graph.lane[task] == COMPUTATION}  # fmt: skip


def alive(found: Any, name: str) -> List[Any]:
    """(device, micro-batch, from, to) of every tensor that an op of that name has written."""
    graph, table, (born, dies) = found.graph, found.graph.buffers, lifetimes(found.graph, found.times)
    rows = [row for row, kind in enumerate(table.kind) if found.program.buffers[kind].name == name]
    return sorted(
        (graph.devices[table.slot[row]], graph.micro_batch[table.producer[row]], born[row], dies[row]) for row in rows)


@pytest.mark.parametrize("schedule", ["backward_first", "gpipe"])
def test_first_gradient_is_the_sum_of_all(schedule: str) -> None:
    """It lives until the update has read it, and nothing is added then; others until they are added."""
    sums = {"memory": [[1.0, 1e-5], [1e9, 1e4]]}  # 3 x 4 kB: 0.12 s
    found = played(plan([0], names=ONE, micro_batches=4, schedule=schedule), step(), cores=1, **sums)
    times = ran(found)
    first = 3 if schedule == "gpipe" else 0
    for _, batch, _, dies in alive(found, "weight_b"):
        start, end = times.pop(("weight_b (accumulate)", 0, batch), (0.0, 0.0))
        assert end - start == pytest.approx(0.0 if batch == first else 0.12)
        assert dies == (times["update_b", 0, -1][1] if batch == first else end)
    assert found.memory[0].at_peak["gradients"] >= 8 * KB  # the sum, and what is added to it


def test_what_a_replica_adds_last_is_added_with_the_other_replica() -> None:
    """Where their sum is made, TensorFlow's graph optimizer makes one op of both additions, of four operands with the result."""
    sums = {"memory": [[1.0, 1e-5], [1e9, 1e4]]}  # 3 x 4 kB: 0.12 s
    found = played(plan([0, 1], names=ONE, micro_batches=2), step(), **sums)
    took = {which: end - start for which, (start, end) in ran(found).items()}
    there = next(slot for name, slot, _ in took if name == "weight_b (synchronise)")
    assert ("weight_b (accumulate)", there, 1) not in took
    assert took["weight_b (accumulate)", 1 - there, 1] == pytest.approx(0.12)
    assert took["weight_b (synchronise)", there, -1] == pytest.approx(0.16)
    lives = {(device, batch): dies for device, batch, _, dies in alive(found, "weight_b")}
    assert lives[there, 0] > lives[there, 1] == lives[1 - there, 0] > lives[1 - there, 1], "the sum is in the first one's place"


def test_memory_counts_variables_kept_tensors_and_sums() -> None:
    whole = played(plan([0], names=ONE), step(), cores=1)
    static = 16 * KB
    assert static + 16 * KB <= whole.peak_memory_bytes[0] <= static + 28 * KB
    parts = played(plan([0], names=ONE, micro_batches=4), step(), cores=1)
    assert parts.peak_memory_bytes[0] < whole.peak_memory_bytes[0]


def test_what_a_kernel_keeps_beside_its_results_is_freed_with_the_first_one() -> None:
    """forward_a's kernel makes a second result of 2 KB that the op does not have."""
    kernels = {"forward_a": KernelMemory(0.0, (8 * KB, 2 * KB)), "unknown": KernelMemory(1.0, (1.0, 1.0))}
    without, graph = step(), step().measured(BATCH, {}, kernels)
    assert graph.workspace == {"forward_a": ((BATCH, 2 * KB),)} and StepGraph.parse(graph.to_json()) == graph
    peaks = [played(plan([0], names=ONE), one, cores=1).peak_memory_bytes[0] for one in (without, graph)]
    assert peaks[1] - peaks[0] == 2 * KB


def test_trace_has_every_clone() -> None:
    events = trace_of(played(plan([0], [1], micro_batches=4), step())).events
    assert sum(event.name == "weight_b" for event in events) == 4
    assert {event.device for event in events if event.name == "weight_a"} == {0}


def test_forward_ops_stay_forward_ops_in_a_call_that_also_goes_backward() -> None:
    run = played(replace(plan([0], names=ONE), emit="call"), step(), cores=1)
    labels = {event.name: event.kind for event in trace_of(run).events if "_" in event.name}
    assert [labels[name] for name in ("forward_a", "forward_b", "backward_b", "weight_b")] == ["forward"] * 2 + ["backward"] * 2
    kept = {buffer.name: buffer.category for buffer in run.program.buffers}
    assert (kept["forward_a"], kept["backward_b"]) == ("activations", "gradients of activations")


def test_exchange_and_the_ops_beside_it_slow_each_other_down() -> None:
    """Each of the two exchanges has an op beside it: both take twice their time, a quarter of a second more."""
    links = {"processes": {"alpha_s": 0.0, "bandwidth_bytes_per_s": 4 * KB / 0.25}}

    def seconds(**slow_down: float) -> float:
        return played(apart(), step(), cores=2, cluster="2xcpu:1", communicators=links,
                      slow_down={name.replace("_", "-"): value for name, value in slow_down.items()}).step_time_s  # fmt: skip

    assert seconds(communication_memory=2.0) == pytest.approx(seconds())
    assert seconds(arithmetic_communication=2.0) == pytest.approx(seconds() + 2 * 0.25)


@pytest.mark.parametrize("cores, begins", [(1, 5.0), (2, 3.0)])
def test_exchange_waits_for_a_thread_that_has_nothing_to_compute(cores: int, begins: float) -> None:
    """f_a f_b w_b b_b w_a on one thread; on two, w_b ends beside b_b, and its thread takes the exchange."""
    links = {"processes": {"alpha_s": 0.25, "bandwidth_bytes_per_s": 1e15}}
    found = played(apart(), step(), cores=cores, cluster="2xcpu:1", communicators=links)
    assert min(event.start_s for event in trace_of(found).events if event.kind == "all_reduce") == pytest.approx(begins)


def test_processes_have_cores_of_their_own() -> None:
    here = played(plan([0, 1], names=ONE), step(), cores=1).samples_per_s
    links = {"processes": {"alpha_s": 0.0, "bandwidth_bytes_per_s": 1e15}}
    assert played(apart(), step(), cores=1, cluster="2xcpu:1", communicators=links).samples_per_s > here / 0.7


@pytest.mark.parametrize("buckets, messages", [((("b", "a"),), 1), ((("b",), ("a",)), 2)])
def test_gradients_go_between_processes_in_the_plan_s_buckets(buckets: Any, messages: int) -> None:
    slow = {"processes": {"alpha_s": 1.0, "bandwidth_bytes_per_s": 8 * KB}}
    found = played(apart(buckets), step(), cores=1, cluster="2xcpu:1", communicators=slow)
    reduced = [event for event in trace_of(found).events if event.kind == "all_reduce" and event.device == 0]
    assert len(reduced) == messages
    # a ring of two: two steps, half of the bytes in each; 8 KB in all, two messages share the link one after the other
    assert sum(event.duration_s for event in reduced) == pytest.approx(2.0 * messages + 1.0)
    assert found.subject.samples == 2 * BATCH
    sums = [found.program.buffers[kind].name == "summed gradients" for kind in found.graph.buffers.kind]
    made = sorted(set(lifetimes(found.graph, found.times)[0][sums]))
    started = sorted(event.start_s for event in reduced)
    waits = [a < b for a, b in zip(made, started)]  # there while it waits for a thread, and for the link
    assert waits == ([False] if messages == 1 else [True, True])


@pytest.mark.parametrize("batch, seconds", [(4, 2.0), (8, 3.0), (6, 2.5), (16, 5.0), (2, 1.5), (1, 1.25)])
def test_times_between_and_beyond_measured_batches(batch: float, seconds: float) -> None:
    assert interpolated_from_zero(((4, 2.0), (8, 3.0)), batch) == pytest.approx(seconds)


def test_one_measured_batch_is_scaled_beyond_the_launch() -> None:
    graph = step()
    forward = next(op for op in graph.ops if op.step == "forward" and op.origin in graph.seconds)
    update = next(op for op in graph.ops if op.step == "update" and op.origin in graph.seconds)
    once = graph._replace(seconds={forward.origin: ((8.0, 1.0),), update.origin: ((8.0, 2.0),)})
    assert once.time_of(forward, 80) == pytest.approx(LAUNCH_S + 10 * (1.0 - LAUNCH_S)) and once.time_of(update, 80) == 2.0
    brief = graph._replace(seconds={forward.origin: ((8.0, LAUNCH_S / 2),)})
    assert brief.time_of(forward, 80) == LAUNCH_S / 2


def test_json_round_trip_and_merged_times() -> None:
    graph = step()
    assert StepGraph.parse(graph.to_json()) == graph and StepGraph.parse(waiting().to_json()) == waiting()
    other = graph._replace(seconds={"forward_a": ((16.0, 3.0),)})
    assert graph.and_times_of(other).seconds["forward_a"] == ((4.0, 0.5), (8.0, 1.0), (16.0, 3.0))
    assert graph._replace(fingerprint="g").and_times_of(other) is other


def test_what_all_taskgraphs_share_runs_once() -> None:
    """On the first device, in place of every copy; its time is not that of a replica's share."""
    both = plan([0, 1], names=ONE)
    times = {}
    for kind in ("L2Loss", "AssignSubVariableOp"):  # only what leads to a write is of a TaskGraph
        graph = step()
        last = op("norm", [4], StepTensor(4.0), UPDATE)._replace(type=kind)
        graph = graph._replace(ops=graph.ops + (last,), seconds=dict(graph.seconds, norm=((BATCH, 2.0),)))
        found = ran(played(both, graph)).items()
        times[kind] = {(device, end - start) for (name, device, _), (start, end) in found if name == "norm"}
    assert times == {"AssignSubVariableOp": {(0, 2.0), (1, 2.0)}, "L2Loss": {(0, 2.0)}}


def test_rows_of_a_sparse_gradient_are_not_added() -> None:
    """Over micro-batches; the other gradient is."""
    graph = step()
    ops = tuple(one._replace(outputs=(EXAMPLES,)) if one.name == "weight_b" else one for one in graph.ops)
    found = played(plan([0], names=ONE, micro_batches=2), graph._replace(ops=ops), cores=1)
    assert {name for name, _, _ in ran(found) if name.endswith("(accumulate)")} == {"weight_a (accumulate)"}


def test_refusals(tmp_path: Any) -> None:
    with pytest.raises(PlanError, match="for graph 'g', but the step graph is of 'f'"):
        under(step(), replace(plan([0], names=ONE), graph="g"))
    divided = plan([0, 1], names=ONE)
    divided = replace(divided, task_graphs=(replace(divided.task_graphs[0], strategy="split"),))
    with pytest.raises(PlanError, match="wh.step_graph"):
        under(step(), divided)
    with pytest.raises(PlanError, match="does not exist; write one with `whale profile"):
        StepGraph.parse(str(tmp_path / "none.json"))
    with pytest.raises(PlanError, match="which is not before it"):
        StepGraph.parse(step()._replace(ops=step().ops[1:]).to_json())
    first, *others = step().ops
    with pytest.raises(PlanError, match=r"'forward_a' waits for ops \[3\], which are not all before it"):
        StepGraph.parse(step()._replace(ops=(first._replace(waits=(3,)), *others)).to_json())
