"""Programs in simulation: schedules worked out by hand, and bounds that every one keeps."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, Tuple

import pytest

from tests.passes.drawings import chain, plan
from tests.planner.rhino.graphs import Network
from whale_tf.cluster import Cluster
from whale_tf.ir.batch_axis import Options, analyse
from whale_tf.ir.graph import OpGraph, Phase
from whale_tf.ir.region import find_region
from whale_tf.ir.training_step import TrainingStep, find_update
from whale_tf.ir.traits import VARIABLES
from whale_tf.plan import Plan
from whale_tf.planner.homes import TrainedVariable
from whale_tf.planner.op_price import OpPrices
from whale_tf.planner.play import StepPrices, _all_at_once, _Costs, called_too_large, played, played_peaks, played_seconds
from whale_tf.planner.scope import find_scope
from whale_tf.profiler.op_time import LAUNCH_S, UTILIZATION
from whale_tf.simulator.instructions import COMPUTATION, Instructions
from whale_tf.simulator.memory import memory_curves
from whale_tf.simulator.network import Network as Links
from whale_tf.simulator.tasks import Tasks

LATENCY, LINK = 1e-4, 1e9
BATCH, WIDTH = 48, 16
KERNEL, LAYER = 4 * WIDTH * WIDTH, 4 * BATCH * WIDTH
PLANS: Dict[str, Plan] = {
    "accumulation": plan([1, 1], 4), "gpipe": plan([1, 1], 4, schedule="gpipe"), "without micro-batches": plan([1, 1]),
    "nested": plan([1, 1], 2, 2, nested_batch="divide"), "uneven stages": plan([2, 1], 2), "bridge": plan([1, 3]),
    "unequal parts": plan([2, 2], tasks={1: {"slices": (1, 3)}}), "shared": plan([2, 2], tasks={0: {"variables": "shared"}})}


def stages(count: int = 2) -> TrainingStep:
    """Two dense layers, their gradients and updates; each layer a TaskGraph, or both one."""
    network = Network(BATCH, [WIDTH, WIDTH, WIDTH])
    graph = network.graph
    home = [0 if count == 1 or "layer_0" in op.name or op.name == "x" else 1 for op in graph.ops]
    sources = {graph.tensor("x"): 0}
    scope = frozenset(op.id for op in graph.ops if op.phase in (Phase.FORWARD, Phase.BACKWARD))
    batch = analyse(graph, sources, scope, Options())
    region = find_region(graph, home, batch, list(sources))
    gradients = [(graph.tensor(f"gradients/layer_{i}/W"), graph.op(f"layer_{i}/w").id) for i in (1, 0)]
    variables = {op.id: home[op.id] for op in graph.ops if op.type in VARIABLES and op.phase is Phase.FORWARD}
    update = find_update(region, variables, {tensor: home[variable] for tensor, variable in gradients})
    return TrainingStep(region, sources, update, tuple(gradients))


def machines(count: int, latency_s: float = LATENCY, fast: int = 0, link: float = LINK) -> Cluster:
    """Devices of 1 MFLOP/s, the first ``fast`` of them ten times faster."""
    def kind(rate: float) -> Dict[str, Any]:
        return {"kind": "GPU", "memory_gib": 4, "fp32": rate, "memory_bandwidth_bytes_per_s": rate}

    links = {"local": {"bandwidth_gbytes_per_s": link / 1e9, "latency_s": latency_s}}
    devices = ["f"] * fast + ["d"] * (count - fast)
    return Cluster.parse({"name": "c", "device_types": {"d": kind(1e6), "f": kind(1e7)}, "nodes": [
        {"devices": devices, "links": links}]})


def seconds_of_all(step: Any, cluster: Cluster) -> float:
    """All ops one after the other on one device."""
    prices = OpPrices(step.graph, find_scope(step.graph, gradients=frozenset(t for t, _ in step.gradients)))
    return sum(prices.seconds(step.graph.ops[op], 1.0, (1.0,) * len(step.graph.ops[op].inputs + step.graph.ops[op].outputs),
                              cluster.devices[0]) for op in prices.scope.ops)


def test_one_device_takes_the_time_of_all_ops() -> None:
    step, one = stages(1), plan([1])
    assert played_seconds(step, one, machines(1)) == pytest.approx(seconds_of_all(step, machines(1)))
    assert played_seconds(step, one, machines(2)) == pytest.approx(seconds_of_all(step, machines(1)))


@pytest.mark.parametrize("name", sorted(PLANS))
def test_step_takes_no_less_than_its_work_on_all_devices_and_no_more_than_all_in_turn(name: str) -> None:
    step, each = stages(), PLANS[name]
    cluster = machines(each.num_devices)
    alone, found = seconds_of_all(step, cluster), played_seconds(step, each, cluster)
    calls = each.num_devices * each.num_micro_batch
    in_turn = calls * (alone + 10 * (LATENCY + 4.0 * BATCH * WIDTH / LINK))
    assert alone / each.num_devices < found < in_turn


def test_stages_work_side_by_side() -> None:
    """With four micro-batches a pipeline of two equal stages takes less than one device, and more than half of it."""
    step, four = stages(), plan([1, 1], 4)
    alone = seconds_of_all(step, machines(1))
    assert alone / 2 < played_seconds(step, four, machines(2, latency_s=0.0)) < alone
    assert played_seconds(step, four, machines(2, latency_s=1.0)) > 2.0, "micro-batches cross forward and backward"


def test_replicas_halve_the_work_and_a_slow_one_holds_up_the_other() -> None:
    step, both = stages(1), plan([2])
    equal, mixed, quick = (played_seconds(step, both, machines(2, 0.0, fast)) for fast in (0, 1, 2))
    alone = seconds_of_all(step, machines(1))
    assert alone / 2 < equal < 0.8 * alone and quick < mixed <= equal


def test_replicas_wait_for_each_others_gradients() -> None:
    step, both = stages(1), plan([2])
    near, far = (played_seconds(step, both, machines(2, latency_s)) for latency_s in (0.0, 1.0))
    assert 2.9 <= far - near < 8.0, "the input is sent, two gradients meet, and the sums come back"


def peaks_of(step: TrainingStep, chosen: Plan, devices: int = 2) -> Tuple[int, ...]:
    held = [TrainedVariable(step.graph.ops[variable].name, step.update.variables[variable], 0, KERNEL, KERNEL)
            for _, variable in step.gradients]
    return played_peaks(step, chosen, machines(devices), held)


def test_device_holds_variables_and_what_the_backward_pass_reads() -> None:
    """At the peak: the first layer's result, the gradient of the second's, and both gradients that follow from these."""
    assert peaks_of(stages(1), plan([1]), 1) == (2 * 2 * KERNEL + 3 * LAYER + KERNEL,)


def test_replicas_hold_their_parts_and_a_copy_of_the_variables() -> None:
    whole, = peaks_of(stages(1), plan([1]), 1)
    found = peaks_of(stages(1), plan([2], tasks={0: {"slices": (3, 1)}}))
    assert found[0] > found[1] and min(found) > 4 * KERNEL and max(found) < whole + KERNEL


def test_values_stay_until_the_slowest_device_that_shares_the_cores_has_read_them() -> None:
    """Two devices add a value of the first one to their own, after a second of work; on one core the other one comes later."""
    cluster = Cluster.parse("cpu:2")
    tasks = Tasks(cluster, Links(cluster), in_queues=False)
    made = tasks.add(COMPUTATION, 1.0, (0,))
    value = tasks.buffer("value", "activations", made, 0, 100.0)
    for device in (1, 0):
        work = tasks.add(COMPUTATION, 1.0, (device,), [made])
        tasks.read(work, value)
        tasks.buffer("later", "activations", tasks.add(COMPUTATION, 1e-6, (device,), [work]), device, 10.0)
    graph, ops = tasks.graph(), [range(len(tasks.instructions))]
    program = Instructions(tuple(tasks.instructions), tuple(tasks.buffers), {0: {}, 1: {}}, ())
    found = [(times.makespan, memory_curves(program, graph, times)[0].peak_bytes)
             for times in (tasks.times(graph), tasks.times_on_cores(graph, 2, ops), tasks.times_on_cores(graph, 1, ops))]
    assert [peak for _, peak in found] == [100.0, 100.0, 110.0]
    assert [seconds for seconds, _ in found] == pytest.approx([2.0, 2.0, 3.0], abs=1e-5)


def test_additions_wait_in_the_queue_of_a_thread_that_can_go_on() -> None:
    """The first of three ops in line also makes an addition ready: it runs last, and on two cores another thread takes it."""
    tasks = Tasks(Cluster.parse("cpu:1"), Links(Cluster.parse("cpu:1")), in_queues=False)
    ops = [tasks.add(COMPUTATION, 1.0, (0,))]
    ops.append(tasks.add(COMPUTATION, 1.0, (0,), ops))
    addition = tasks.add(COMPUTATION, 1.0, (0,), ops[:1])
    ops.append(tasks.add(COMPUTATION, 1.0, (0,), ops[1:]))
    one, two = (tasks.times_on_cores(tasks.graph(), cores, [ops]).start for cores in (1, 2))
    assert [one[task] for task in (*ops, addition)] == [0.0, 1.0, 2.0, 3.0]
    assert [two[task] for task in (*ops, addition)] == [0.0, 1.0, 2.0, 1.0]


def test_micro_batches_in_flight_hold_their_activations() -> None:
    step = stages()
    early, late = (peaks_of(step, plan([1, 1], 4, **chosen))[0] for chosen in ({}, {"schedule": "gpipe"}))
    assert late > early


def test_parts_of_a_divided_task_graph_run_beside_each_other_and_send_what_others_read() -> None:
    """Two layers in line on two devices take all their ops and one message; what nobody waits for delays nothing."""
    network = Network(BATCH, [WIDTH, WIDTH, WIDTH], trained=False)
    again = network.graph.producer(network.add("Relu", "again", (network.graph.tensor("layer_0/Relu"),), (BATCH, WIDTH)))
    last = network.graph.producer(network.add("Relu", "last", (network.graph.tensor("layer_1/Relu"),), (BATCH, WIDTH)))
    step = forward(network.graph)
    divided, cluster = plan([2], tasks={0: {"strategy": "split"}}), machines(2)
    alone, relu = played_seconds(step, plan([1]), machines(1)), seconds_of(step, again.id, cluster)
    for op in (*(op for op in network.graph.ops if "layer_1" in op.name), last):
        op.attrs["_whale_shard"] = 1
    assert played_seconds(step, divided, cluster) == pytest.approx(alone - relu + LATENCY + LAYER / LINK)


def forward(graph: OpGraph) -> TrainingStep:
    """All ops of a graph that does not train, in one TaskGraph."""
    scope = frozenset(op.id for op in graph.ops if op.phase is Phase.FORWARD)
    region = find_region(graph, [0] * len(graph.ops), analyse(graph, {}, scope, Options()), [])
    return TrainingStep(region, {}, find_update(region, {}, {}), ())


def seconds_of(step: TrainingStep, op: int, cluster: Cluster) -> float:
    prices, record = OpPrices(step.graph, find_scope(step.graph)), step.graph.ops[op]
    return prices.seconds(record, 1.0, (1.0,) * len(record.inputs + record.outputs), cluster.devices[0])


def prices(step: TrainingStep) -> _Costs:
    return _Costs(StepPrices(step), machines(1))


def test_replica_computes_with_its_rows_and_all_weights() -> None:
    step = stages(1)
    costs, product = prices(step), step.graph.op("layer_0/MatMul")
    half, flops = costs.kernel(product, 0.5, 0).seconds, 2.0 * BATCH * WIDTH * WIDTH
    assert half == pytest.approx(LAUNCH_S + flops / 2 / (1e6 * UTILIZATION) + KERNEL / 1e6, rel=1e-12)


def test_handles_weigh_nothing_and_moving_them_takes_no_time() -> None:
    step = chain(1, momentum=True)
    costs = prices(step)
    assert costs.bytes(step.graph.tensor("v0")) == 0.0 and costs.bytes(step.graph.tensor("w0")) == 4 * 2 * 2
    assert costs.moving(0, 0.0) == 0.0 and costs.moving(0, 2e6) == pytest.approx(LAUNCH_S + 2.0)


def test_small_message_does_not_wait_for_a_large_one() -> None:
    """Both share the link, so that what follows from the small one runs while the large one is under way."""
    network = Network(BATCH, [WIDTH], trained=False)
    graph = network.graph
    large = network.add("Relu", "large", (graph.tensor("x"),), (BATCH, WIDTH))
    small = network.add("Relu", "small", (graph.tensor("x"),), ())
    after_small = network.add("Relu", "after_small", (small,), (BATCH, 10 * WIDTH))
    after_large = network.add("Relu", "after_large", (large,), (BATCH, WIDTH))
    for tensor in (after_small, after_large):
        graph.producer(tensor).attrs["_whale_shard"] = 1
    step, cluster = forward(graph), machines(2, 0.0, link=1e4)
    first, last, aside = (seconds_of(step, graph.tensors[t].op, cluster) for t in (large, after_large, after_small))
    found = played_seconds(step, plan([2], tasks={0: {"strategy": "split"}}), cluster)
    assert found == pytest.approx(first + (LAYER + 4) / 1e4 + last, abs=1e-3) and aside > 0.01


def test_offloaded_variables_come_from_the_host() -> None:
    """Each is read once a step, and its gradient goes back."""
    homes = {"layer_0/w": 1, "layer_1/w": 1}
    away = plan([1], offload="v0", tasks={0: {"variables": "shared", "homes": homes}})
    step, cluster = stages(1), machines(1, latency_s=1.0)
    assert played_seconds(step, away, cluster) > 2.0 > played_seconds(step, plan([1]), cluster)


def test_each_process_that_runs_a_part_has_its_own_host() -> None:
    """In the cluster, a host is behind the devices of its node.  The nearer one is the faster, and devices hold as much."""
    variables = [TrainedVariable(f"layer_{stage}/w", stage, 0, 1000, 100) for stage in range(2)]

    def away(*homes: int) -> Plan:
        tasks: Any = {stage: {"variables": "shared", "homes": {f"layer_{stage}/w": home}} for stage, home in enumerate(homes)}
        return plan([1, 1], offload="v0", tasks=tasks, processes=((0,), (1,)))

    step, cluster = stages(2), Cluster.parse("2xV100-32GB:1")
    near, far = (played(step, away(*homes), cluster, variables) for homes in ((2, 3), (3, 2)))
    at_home = played_peaks(step, replace(plan([1, 1]), task_graphs=tuple(
        replace(task, variables="shared") for task in plan([1, 1]).task_graphs)), cluster, variables)
    assert near[0] < far[0] and all(one < other for one, other in zip(near[1], at_home))


def sized(step: TrainingStep) -> TrainingStep:
    """The step for a mini-batch of BATCH examples."""
    sizes = {t: (BATCH, *record.shape[1:]) for t, record in enumerate(step.graph.tensors) if record.shape and not record.shape[0]}
    step = step._replace(region=step.region._replace(graph=step.graph.with_shapes(sizes)))
    step.region.batch.batch = BATCH
    return step


def test_large_step_is_inlined_where_only_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called, the backward pass holds the loss, which its first op reads, until it ends.  (It is a part of its own where the
    micro-batches go forward one after the other.)"""
    step, one = sized(chain(1)), plan([1], 2, schedule="gpipe")
    (inlined,), (called,) = (played_peaks(step, one, machines(1), (), emit) for emit in ("inline", "call"))
    assert called == inlined + 4
    assert called_too_large(step, one, machines(1).limited(inlined), ()) == (), "a small step is inlined anyway"
    monkeypatch.setattr("whale_tf.passes.form.MOST_INLINED_OPS", 1)
    for limit, expected in ((called, ()), (called - 1, (called,)), (inlined, (called,)), (inlined - 1, ())):
        assert called_too_large(step, one, machines(1).limited(limit), ()) == expected
        assert called_too_large(step, replace(one, emit="call"), machines(1).limited(limit), ()) == ()


def test_open_form_has_the_peaks_of_the_inlined_step(monkeypatch: pytest.MonkeyPatch) -> None:
    step, one = sized(chain(1)), plan([1], 2, schedule="gpipe")
    inlined, called = (played_peaks(step, one, machines(1), (), emit) for emit in ("inline", "call"))
    assert inlined != called
    monkeypatch.setattr("whale_tf.passes.form.MOST_INLINED_OPS", 1)
    found = [played(step, replace(one, emit=emit), machines(1), ()) for emit in ("auto", "inline", "call")]
    assert [peaks for _, peaks in found] == [inlined, inlined, called]
    assert found[0][0] == pytest.approx(played_seconds(step, one, machines(1)))
    compiled = replace(one, task_graphs=(replace(one.task_graphs[0], xla=True),))
    assert played_peaks(step, compiled, machines(1), ()) == inlined


def test_all_tensors_at_once() -> None:
    """Each device of a TaskGraph has its variables, its tensors for the whole mini-batch, and its gradients twice more."""
    step, weight, rows = sized(chain(2)), 4 * 2 * 2, 4 * BATCH * 2
    first, second = 2 * weight + 2 * rows + 2 * weight, 2 * weight + 3 * rows + 4 + 2 * weight
    held = [TrainedVariable("w0", 0, 0, 100, 10), TrainedVariable("w1", 1, 0, 1000, 0)]
    assert _all_at_once(step, plan([1, 2]), held) == [first + 110, second + 1000, second + 1000]
    away = plan([1, 2], offload="states", tasks={0: {"variables": "shared", "homes": {"w0": 3}}})
    assert _all_at_once(step, away, held) == [first, second + 1000, second + 1000]


@pytest.mark.parametrize("counts, kind, homes, cores", [
    ([1], "cpu", {0: {"v0": 0}}, [1]), ([2], "cpu", {0: {"v0": 1}}, [1]), ([2, 2], "cpu", {1: {"v1": 3}}, [2]),
    ([2], "cpu", {}, []), ([2], "V100-32GB", {0: {"v0": 1}}, [])])
def test_devices_with_one_memory_may_share_half_as_many_cores(
        counts: Any, kind: str, homes: Any, cores: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they do, the higher peak counts: here everything is alive at once."""
    asked = []

    def late(tasks: Tasks, graph: Any, count: int, chains: Any) -> Any:
        asked.append(count)
        times = tasks.times(graph)
        return times._replace(start=[0.0] * len(times.start), end=[times.makespan] * len(times.end))

    tasks: Any = {number: {"variables": "shared", "homes": found} for number, found in homes.items()}
    chosen, cluster = plan(counts, tasks=tasks, zero="v1" if homes else "none"), Cluster.parse(f"{kind}:{sum(counts)}")
    step = sized(chain(len(counts), momentum=True))
    before = played_peaks(step, replace(chosen, task_graphs=plan(counts).task_graphs, zero="none"), cluster, ())
    monkeypatch.setattr(Tasks, "times_on_cores", late)
    found = played_peaks(step, chosen, cluster, ())
    assert asked == cores and (not cores or sum(found) > sum(before))
