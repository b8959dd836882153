"""What the search finds: known strategies where they are best, within memory, on meshes, as asked for."""
from __future__ import annotations

import itertools
from typing import Set

import numpy as np
import pytest

from benchmarks.papers.rhino import coarsen, solve_segments
from tests.planner.rhino.graphs import Network
from whale_tf.cluster import Cluster
from whale_tf.errors import ConfigError, InfeasibleError, PlanError
from whale_tf.patterns.spread import Spread, everywhere, once, partial, shard
from whale_tf.planner.rhino.cost_graph import IMPOSSIBLE
from whale_tf.planner.rhino.elimination import eliminate
from whale_tf.planner.rhino.integer_program import integer_program
from whale_tf.planner.rhino.liveness import busiest, held, peak_bytes
from whale_tf.planner.rhino.memory import lower_bound, parameters, sharded
from whale_tf.planner.rhino.mesh import Axis, axes, layout_of, meshes
from whale_tf.planner.rhino.near import NEAR, near_answer
from whale_tf.planner.rhino.problem import MeshProblem
from whale_tf.planner.rhino.search import search
from whale_tf.planner.scope import find_scope

FOUR = Cluster.parse("rhino-s1:4")
EIGHT = Cluster.parse("rhino-m8:8")


def problem_of(network: Network, cluster: Cluster = FOUR) -> MeshProblem:
    return MeshProblem(network.graph, find_scope(network.graph), axes(cluster, (len(cluster),))[0])


def axis_of(count: int, memory: float = 1e30) -> Axis:
    """Devices with 1 GB/s and a microsecond to every other one, each on a node of its own."""
    kind = {"kind": "CPU", "memory_gib": 64, "fp32": 1e9, "memory_bandwidth_bytes_per_s": memory}
    node = {"devices": ["d:1"], "nic": {"bandwidth_gbits_per_s": 8.0, "latency_s": 1e-6}, "count": count}
    cluster = Cluster.parse({"name": "c", "device_types": {"d": kind}, "nodes": [node]})
    (axis,) = axes(cluster, (count,))
    return axis


def test_prices_are_those_of_the_messages() -> None:
    """The first device's link is the slow one, or every device's where all send to all."""
    axis, launch = axis_of(4), 5e-6
    rows, columns = shard(0, (2, 2, 2, 2)), shard(1, (1, 1, 1, 1))

    def seconds(have: Spread, need: Spread) -> float:
        return axis.conversion(have, need, 4e9) * 1e-12

    assert seconds(rows, rows) == seconds(everywhere, rows) == seconds(everywhere, once) == 0
    assert seconds(once, everywhere) == pytest.approx(12 + 1e-6) and seconds(once, rows) == pytest.approx(3 + 1e-6)
    assert seconds(partial, once) == pytest.approx(12 + 1e-6 + launch)
    assert seconds(partial, everywhere) == pytest.approx(24 + 2e-6 + launch)
    assert seconds(partial, rows) == pytest.approx(3 + 1e-6 + launch) and seconds(rows, everywhere) == pytest.approx(3 + 1e-6)
    assert seconds(rows, columns) == pytest.approx(3 / 4 + 1e-6)
    assert axis.conversion(everywhere, partial, 4.0) == IMPOSSIBLE
    assert layout_of(shard(1, (6, 6, 4))) == layout_of(shard(1, (3, 3, 2)))


def test_adding_up_takes_memory_bandwidth() -> None:
    """Four terms are read and one is written; of a shard a quarter of that."""
    slow, fast = axis_of(4, memory=1e9), axis_of(4)
    for need, tensors in ((once, 5.0), (shard(0, (1, 1, 1, 1)), 1.25)):
        extra = slow.conversion(partial, need, 4e9) - fast.conversion(partial, need, 4e9)
        assert extra * 1e-12 == pytest.approx(4 * tensors, rel=1e-6)


def test_many_devices_are_priced_like_few() -> None:
    """Beyond some number messages are not listed one by one."""
    costs = [axis_of(count).conversion(shard(0, (1,) * count), everywhere, 1e9 * count) * 1e-12 for count in (64, 65)]
    assert costs[0] == pytest.approx(63, rel=1e-3) and costs[1] == pytest.approx(64, rel=1e-3)


def test_large_batch_is_data_parallelism() -> None:
    answer = search(Network(65536, [256, 1024, 256]).graph, FOUR, shapes=[(4,)])
    for name in ("layer_0/MatMul", "layer_1/MatMul", "gradients/layer_1/X"):
        assert answer.patterns(name) == ("rows",)
    for name in ("gradients/layer_0/W", "gradients/layer_1/W"):
        assert answer.patterns(name) == ("row",)  # terms of a sum over the batch


def test_small_batch_is_megatrons_pair() -> None:
    """Column, then row: activations are summed, weights are never exchanged, nor are their gradients."""
    answer = search(Network(16, [1024, 4096, 1024]).graph, FOUR, shapes=[(4,)])
    assert answer.patterns("layer_0/MatMul") == ("column",)
    assert answer.patterns("layer_1/MatMul") == ("row",)
    problem, choice = answer.levels[0].problem, answer.levels[0].solution.choice
    first, second = (problem.storage(problem.graph.op(f"layer_{i}/w").id, choice) for i in (0, 1))
    assert (first.dim, second.dim) == (1, 0)
    update = problem.strategy(problem.graph.op("update_0").id, choice)
    assert layout_of(update.needs[1]) == layout_of(update.needs[3]) == first  # slot and gradient


def test_graph_without_backward() -> None:
    network = Network(16, [4096, 16384, 4096], trained=False)
    answer = search(network.graph, FOUR, shapes=[(4,)])
    assert answer.patterns("layer_0/MatMul") == ("column",) and answer.patterns("layer_1/MatMul")[0] in ("column", "row")
    assert answer.levels[0].solution.cost == integer_program(answer.levels[0].problem.costs).cost


@pytest.mark.slow
@pytest.mark.parametrize("batch", [8, 64, 1024, 65536])
@pytest.mark.parametrize("cluster", [FOUR, EIGHT], ids=["s1", "m8"])
def test_solvers_agree_on_networks(batch: int, cluster: Cluster) -> None:
    problem = problem_of(Network(batch, [128, 512, 128, 512, 64]), cluster)
    exact, program = eliminate(problem.costs), integer_program(problem.costs)
    assert exact.is_optimal and program.is_optimal and exact.cost == program.cost
    coarse = solve_segments(problem, problem.costs)
    assert exact.cost <= coarse.cost == problem.costs.score(coarse.choice) < IMPOSSIBLE
    again = solve_segments(problem, problem.costs, rounds=3)
    assert exact.cost <= again.cost <= coarse.cost <= 1.5 * exact.cost


def test_critical_nodes_are_the_contractions_of_the_backbone() -> None:
    problem = problem_of(Network(64, [128, 512, 128]))
    coarse = coarsen(problem)
    names = [problem.graph.ops[op].name for op in coarse.critical]
    assert names[:2] == ["layer_0/MatMul", "layer_1/MatMul"] and "gradients/layer_1/W" not in names
    assert coarse.segments == len(names) - 1
    assert len(coarse.segment) == len(problem.costs.nodes) and max(coarse.segment) <= len(names)


def test_memory_forces_the_largest_parameters_first() -> None:
    """A small batch is computed on one device, with whole weights: as few as will do are stored in shards."""
    network = Network(8, [256, 2048, 512, 256], trained=False)
    problem = problem_of(network)
    sizes = [4.0 * a * b for a, b in ((256, 2048), (2048, 512), (512, 256))]
    assert [problem.graph.ops[p.variables[0]].name for p in parameters(problem)] == ["layer_1/w", "layer_0/w", "layer_2/w"]
    free = search(network.graph, FOUR, shapes=[(4,)])
    assert free.stored_bytes == sum(sizes) and free.forced == 0 and free.peak_bytes > free.stored_bytes
    tight = search(network.graph, FOUR, shapes=[(4,)], memory_bytes=free.peak_bytes - 1)
    problem, choice = tight.levels[0].problem, tight.levels[0].solution.choice
    assert tight.forced == 1 and problem.storage(parameters(problem)[0].variables[0], choice).is_shard
    assert tight.stored_bytes <= sum(sizes) - 0.75 * max(sizes) and tight.peak_bytes < free.peak_bytes
    assert tight.seconds > free.seconds and free.seconds <= (tight.lower_bound_s or 0) <= tight.seconds


def test_large_batch_shards_the_optimizer_as_in_zero() -> None:
    """The batch is divided; parameters and slots are stored in shards, gradients come as shards: as many bytes as all-reduce."""
    answer = search(Network(65536, [256, 1024, 256]).graph, FOUR, shapes=[(4,)])
    problem, choice = answer.levels[0].problem, answer.levels[0].solution.choice
    for i in (0, 1):
        assert answer.patterns(f"layer_{i}/MatMul") == ("rows",)
        stored = problem.storage(problem.graph.op(f"layer_{i}/w").id, choice)
        update = problem.strategy(problem.graph.op(f"update_{i}").id, choice)
        assert stored.is_shard and layout_of(update.needs[1]) == layout_of(update.needs[3]) == stored
    assert answer.stored_bytes == 2 * 2 * 4 * 256 * 1024 / 4


def test_activations_are_counted_and_divided_where_parameters_do_not_help() -> None:
    network, slow = Network(65536, [64, 64, 64, 64]), Cluster.parse("dapple-c:8")
    free = search(network.graph, slow, shapes=[(8,)], divisible=frozenset())
    priced = search(network.graph, slow, shapes=[(8,)], divisible=frozenset(), memory_bytes=free.peak_bytes - 1)
    assert priced.byte_price > 0 and priced.peak_bytes < free.peak_bytes and priced.stored_bytes == free.stored_bytes
    assert priced.seconds > free.seconds and (priced.lower_bound_s or 0) <= priced.seconds
    with pytest.raises(InfeasibleError, match="devices with at least [0-9]+ bytes"):
        search(network.graph, slow, shapes=[(8,)], memory_bytes=1e5)


def test_peak_is_what_is_alive_between_making_and_last_use() -> None:
    network = Network(64, [16, 32, 8])
    problem = problem_of(network)
    graph, ops = network.graph, problem.scope.ops
    whole = [0] * len(problem.costs.nodes)  # everything once, on the first device
    place = {op: i for i, op in enumerate(ops)}
    alive = [0.0] * len(ops)
    for number, tensor in enumerate(graph.tensors):
        uses = [place[op] for op, _ in graph.consumers(number) if op in place]
        born = place.get(tensor.op, min(uses, default=0))
        if (tensor.op in place or graph.ops[tensor.op].type == "Placeholder") and not tensor.dtype.endswith("_ref"):
            for i in range(born, max(uses + [born]) + 1):
                alive[i] += 4.0 * float(np.prod(tensor.shape or (1,)))
    variables = 2 * 4.0 * (16 * 32 + 32 * 8)
    assert peak_bytes(problem, whole) == variables + max(alive)


def test_what_is_held_bounds_the_peak() -> None:
    random = np.random.RandomState(0)
    problem = problem_of(Network(64, [16, 32, 8, 64]))
    for _ in range(500):
        sizes = held(problem, random.randint(len(problem.scope.ops)))
        choice = [random.randint(problem.costs.domain(node)) for node in range(len(problem.costs.nodes))]
        assert 0 < sizes.bytes(choice) <= peak_bytes(problem, choice)
        assert held(problem, busiest(problem, choice)).bytes(choice) <= peak_bytes(problem, choice)


def test_lower_bound_holds_for_every_choice_of_forced_parameters() -> None:
    problem = problem_of(Network(8, [256, 2048, 512, 256], trained=False))
    variables = [p.variables[0] for p in parameters(problem)]
    free = eliminate(problem.costs)
    limit = peak_bytes(problem, free.choice) - 1e6
    bound = lower_bound(problem, limit)
    costs = []
    for count in range(4):
        for forced in itertools.combinations(variables, count):
            found = eliminate(sharded(problem, set(forced)))
            if peak_bytes(problem, found.choice) <= limit:
                costs.append(found.cost)
    assert free.cost < bound <= min(costs)


def test_slots_are_stored_like_their_parameter() -> None:
    problem = problem_of(Network(64, [128, 512, 128]))
    found = parameters(problem)
    assert [len(p.variables) for p in found] == [2, 2] and found[0].bytes == 2 * 4 * 128 * 512


def test_meshes() -> None:
    assert meshes(8) == [(8,), (2, 4), (4, 2)] and meshes(8, 3)[1:3] == [(2, 4), (2, 2, 2)]
    two_nodes = Cluster.parse("rhino-m8")
    across, inside = axes(two_nodes, (2, 8))
    assert (across.count, inside.count) == (2, 8) and across.groups[1] == [1, 9] and inside.groups[1] == list(range(8, 16))
    halves = shard(0, (1, 1))
    assert across.conversion(halves, once, 2e10) * 1e-12 == pytest.approx(8 * 1e10 / 12.5e9, rel=1e-3), "eight share an adapter"


def test_two_dimensions_divide_one_after_the_other() -> None:
    """Data parallelism between nodes, Megatron inside, each on what the other leaves."""
    network = Network(2048, [1024, 4096, 1024])
    answer = search(network.graph, Cluster.parse("rhino-m8"), shapes=[(2, 8)],
                    pins={"layer_0/MatMul": "rows"})
    outer, inner = answer.levels
    view = inner.problem.shapes.view(network.graph.op("layer_0/MatMul"))
    assert view.shape(network.graph.tensor("layer_0/MatMul")) == (1024, 4096)
    assert answer.patterns("layer_0/MatMul") == ("rows", "rows")
    assert answer.seconds == pytest.approx(
        1e-12 * (outer.problem.communication(outer.solution.choice) + inner.solution.cost))
    whole = sum(problem_bytes for problem_bytes in (2 * 4.0 * 1024 * 4096,) * 2)
    assert whole / 16 <= answer.stored_bytes <= whole


def test_model_replicas_divide_the_examples_and_the_rest_is_divided_inside() -> None:
    network = Network(64, [512, 2048, 512])
    graph = network.graph
    examples = {t: 0 for t, tensor in enumerate(graph.tensors) if tensor.shape and tensor.shape[0] == 64}
    gradients = frozenset(graph.tensor(f"gradients/layer_{i}/W") for i in (0, 1))
    answer = search(graph, Cluster.parse("rhino-m8"), shapes=[(2, 8)], batch=examples, gradients=gradients)
    (level,) = answer.levels
    view = level.problem.shapes.view(graph.op("layer_0/MatMul"))
    assert view.shape(graph.tensor("layer_0/MatMul")) == (32, 2048)
    assert answer.patterns("layer_0/MatMul") == ("column",) and answer.patterns("layer_1/MatMul") == ("row",)
    problem, choice = level.problem, level.solution.choice
    assert not any(spread.is_shard and spread.dim == 0 for name in ("layer_0/MatMul", "layer_1/MatMul", "layer_0/Relu")
                   for spread in problem.strategy(graph.op(name).id, choice).gives)
    alone = search(graph, Cluster.parse("rhino-m8"), shapes=[(2, 8)], batch=examples)
    across = axes(Cluster.parse("rhino-m8"), (2, 8))[0]
    sums = 2e-12 * across.sum(4 * 512 * 2048 / 8)  # two gradients, an eighth of each on a device
    assert answer.seconds == pytest.approx(alone.seconds + sums, rel=1e-3)


def test_best_mesh_is_taken_and_the_others_are_named() -> None:
    answer = search(Network(2048, [512, 2048, 512]).graph, FOUR)
    assert {answer.mesh} | {mesh for mesh, _, _ in answer.runners_up} == {(4,), (2, 2)}
    assert all(answer.seconds <= seconds for _, seconds, _ in answer.runners_up)


@pytest.mark.slow
def test_near_answer_is_the_cheapest_with_other_patterns() -> None:
    """Compared with all pairs of patterns.  A column after a column costs as much as a row after it."""
    names = ("layer_0/MatMul", "layer_1/MatMul")
    graph = Network(64, [1024, 1024, 1024]).graph
    answer = search(graph, FOUR, shapes=[(4,)])
    every = [search(graph, FOUR, shapes=[(4,)], pins=dict(zip(names, patterns)))
             for patterns in itertools.product(("rows", "column", "row", "once"), repeat=2)]
    others = sorted(one.seconds for one in every if any(one.patterns(name) != answer.patterns(name) for name in names))
    near = near_answer(answer, float("inf"))
    assert near is not None and near.seconds == others[0] <= NEAR * answer.seconds
    ((problem, solution),) = near.levels
    assert problem.costs.score(solution.choice) == solution.cost
    assert near_answer(answer, 1.0) is None, "it does not fit"
    many = search(Network(64, [1024] * 6).graph, FOUR, shapes=[(4,)])
    assert near_answer(many, float("inf")) is None, "a step of many products is not played twice"


@pytest.mark.parametrize("pattern", ["rows", "column", "row", "once"])
def test_pins_are_kept(pattern: str) -> None:
    network = Network(64, [128, 512, 128])
    answer = search(network.graph, FOUR, shapes=[(4,)], pins={"layer_0/MatMul": pattern})
    assert answer.patterns("layer_0/MatMul") == (pattern,)


def test_inputs_are_where_they_are_read() -> None:
    network = Network(64, [128, 512, 128])
    problem = problem_of(network)
    assert problem.outside(network.graph.tensor("x")) == everywhere
    assert problem.outside(network.graph.tensor("gradients/layer_0/rate")) == everywhere, "a constant"


def test_bad_input_is_refused() -> None:
    graph = Network(64, [128, 512, 128]).graph
    with pytest.raises(ConfigError, match="layer_0/MatMul"):
        search(graph, FOUR, pins={"layer_0/Matmul": "rows"})
    with pytest.raises(ConfigError, match="only has: once, "):
        search(graph, FOUR, shapes=[(4,)], pins={"layer_0/MatMul": "embedding"})
    with pytest.raises(PlanError, match="product"):
        search(graph, FOUR, shapes=[(3,)])


def test_dead_gradients_and_reads_are_no_nodes() -> None:
    network = Network(64, [128, 512, 128])
    backward = network.graph.op("loss_grad").phase
    joined = network.add("Neg", "joined", (network.graph.tensor("layer_1/MatMul"),), (64, 128))
    network.add("Mul", "dead", (joined, network.graph.tensor("loss_grad")), (64, 128), backward)
    network.add("Neg", "shown", (network.graph.tensor("layer_1/MatMul"),), (64, 128))
    names: Set[str] = {network.graph.ops[op].name for op in find_scope(network.graph).ops}
    assert names.isdisjoint({"dead", "joined", "layer_0/w/read"}) and {"layer_0/MatMul", "shown", "update_0"} <= names
