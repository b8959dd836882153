"""Every solver of the strategy problem on every case, against all choices."""
from __future__ import annotations

from typing import Callable, Dict, List

import numpy as np
import pytest

from whale_tf.errors import InfeasibleError, PlanError
from whale_tf.planner.rhino.cost_graph import IMPOSSIBLE, CostGraph, Solution
from whale_tf.planner.rhino.elimination import Elimination, TableTooLarge, eliminate
from whale_tf.planner.rhino.integer_program import integer_program, solve


def folded_program(graph: CostGraph) -> Solution:
    return integer_program(graph, fold=True)


def without_dead_ends(graph: CostGraph) -> Solution:
    work = Elimination(graph)
    work.fold(None)
    choice = work.complete({})
    return Solution(choice, graph.score(choice), work.constant, "min-fill alone")


def fallback(graph: CostGraph) -> Solution:
    """No table but pairwise ones is allowed."""
    return solve(graph, max_entries=0)


SOLVERS: Dict[str, Callable[[CostGraph], Solution]] = {
    "elimination": eliminate, "min-fill alone": without_dead_ends, "integer program": integer_program,
    "folded program": folded_program, "fallback": fallback, "solve": solve}
EXACT_CASES = {"elimination": 3000, "min-fill alone": 1000, "solve": 300}


def random_graph(random: np.random.RandomState, impossible: float = 0.2) -> CostGraph:
    """At most seven nodes of at most four strategies, any density of edges, costs that often tie."""
    graph = CostGraph()
    count, top = random.randint(1, 8), int(random.choice([2, 10, 10 ** 9]))
    for _ in range(count):
        graph.add_node(costs(random, (random.randint(1, 5),), top, impossible / 4))
    for u in range(count):
        for v in range(count):
            if u != v and random.rand() < random.choice([0.2, 0.5]):
                table = costs(random, (graph.domain(u), graph.domain(v)), top, impossible)
                graph.add_edge(u, v, graph.tables.number(table))
    return graph


def costs(random: np.random.RandomState, shape: tuple, top: int, impossible: float) -> np.ndarray:
    table = random.randint(0, top, shape).astype(np.int64)
    table[random.rand(*shape) < impossible] = IMPOSSIBLE
    return table


def least_of_all(graph: CostGraph) -> int:
    """The cheapest of all choices, by one table over all nodes."""
    count, arrays = len(graph.nodes), graph.tables.arrays
    total = np.zeros((1,) * count, dtype=np.int64)
    for v, table in enumerate(graph.nodes):
        total = total + arrays[table].reshape([-1 if i == v else 1 for i in range(count)])
    for (u, v), table in graph.edges.items():
        shape = [1] * count
        shape[u], shape[v] = arrays[table].shape
        total = total + arrays[table].reshape(shape)
    return int(total.min())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_equals_the_best_of_all_choices(name: str) -> None:
    random = np.random.RandomState(len(name))
    infeasible = 0
    for _ in range(EXACT_CASES.get(name, 150)):
        graph = random_graph(random)
        least = least_of_all(graph)
        if least >= IMPOSSIBLE:
            infeasible += 1
            try:
                assert SOLVERS[name](graph).cost >= IMPOSSIBLE
            except InfeasibleError:
                pass
            continue
        found = SOLVERS[name](graph)
        assert found.cost == graph.score(found.choice) == least
        assert found.lower_bound <= least and found.is_optimal
    assert infeasible


def chain_of_layers(layers: int, random: np.random.RandomState) -> CostGraph:
    """Equal layers of five nodes with a skip over each: what a network looks like."""
    graph = CostGraph()
    unary = [costs(random, (4,), 100, 0) for _ in range(5)]
    pairs = {pair: graph.tables.number(costs(random, (4, 4), 100, 0.1))
             for pair in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 4), (2, 3), (2, 4), (3, 4), (4, 5), (2, 7))}
    for _ in range(layers):
        for table in unary:
            graph.add_node(table)
    for layer in range(layers):
        for (a, b), table in pairs.items():
            if 5 * layer + b < len(graph.nodes):
                graph.add_edge(5 * layer + a, 5 * layer + b, table)
    return graph


@pytest.mark.slow
def test_solvers_agree_on_repeated_layers_and_work_is_shared() -> None:
    random = np.random.RandomState(3)
    graph = chain_of_layers(12, random)
    found = eliminate(graph)
    assert found.is_optimal and found.cost < IMPOSSIBLE
    assert {solver(graph).cost for solver in SOLVERS.values()} == {found.cost}
    sizes = []
    for layers in (20, 40):
        work = Elimination(chain_of_layers(layers, np.random.RandomState(3)))
        work.fold(None)
        sizes.append(len(work._messages))
    assert sizes[1] <= sizes[0] + 10  # most of the second half was met before


@pytest.mark.parametrize("triangles", [1, 42, 43, 50])
def test_hub_with_many_neighbours_keeps_its_best_strategy(triangles: int) -> None:
    """Such as a sum of more than 127 terms, for which another strategy is impossible beside some of each term's."""
    graph = CostGraph()
    graph.add_node([10, 0])
    beside, apart = np.array([[1, 1], [IMPOSSIBLE, 0]]), np.array([[0, 1], [1, 0]])
    for _ in range(triangles):
        first, second, third = (graph.add_node([0, 5]) for _ in range(3))
        for node in (first, second, third):
            graph.add_edge(0, node, graph.tables.number(beside))
        for u, v in ((first, second), (first, third), (second, third)):
            graph.add_edge(u, v, graph.tables.number(apart))
    found = eliminate(graph)
    assert found.cost == min(10 + 3 * triangles, 15 * triangles) and found.is_optimal


def test_table_that_grows_too_large_is_refused() -> None:
    random = np.random.RandomState(0)
    graph = CostGraph()
    for _ in range(6):
        graph.add_node(random.randint(1, 9, 3))
    for u in range(6):
        for v in range(u):
            graph.add_edge(u, v, graph.tables.number(random.randint(1, 9, (3, 3))))
    with pytest.raises(TableTooLarge, match="entries"):
        work = Elimination(graph)
        work.fold(None, (), max_entries=50)


def test_held_nodes_stay_and_fixed_ones_keep_their_strategy() -> None:
    graph = chain_of_layers(3, np.random.RandomState(1))
    work = Elimination(graph, fixed={4: 2})
    work.fold(None, held=[7, 8])
    assert work.alive == {7, 8}
    table = sum((work.tables.arrays[work.unary[v]].reshape((-1, 1) if v == 7 else (1, -1)) for v in (7, 8)), np.zeros((4, 4)))
    for scope, number in work.factors.items():
        assert scope == (7, 8)
        table = table + work.tables.arrays[number]
    a, b = np.unravel_index(int(table.argmin()), (4, 4))
    choice = work.complete({7: int(a), 8: int(b)})
    assert choice[4] == 2 and graph.score(choice) == int(table.min()) + work.constant


@pytest.mark.parametrize("broken", ["empty", "shape", "choice"])
def test_bad_problems_are_refused(broken: str) -> None:
    graph = CostGraph()
    graph.add_node([1, 2])
    graph.add_node([3, 4, 5])
    calls: Dict[str, Callable[[], object]] = {
        "empty": lambda: graph.add_node([]),
        "shape": lambda: graph.add_edge(0, 1, graph.tables.number(np.zeros((3, 2)))),
        "choice": lambda: graph.score([0, 3])}
    with pytest.raises(PlanError):
        calls[broken]()


def test_edges_between_two_nodes_add_up_in_either_direction() -> None:
    graph = CostGraph()
    u, v = graph.add_node([0, 0]), graph.add_node([0, 0, 0])
    table = np.arange(6).reshape(2, 3)
    graph.add_edge(u, v, graph.tables.number(table))
    graph.add_edge(v, u, graph.tables.number(table.T))
    graph.add_edge(u, u, graph.tables.number(np.array([[5, 0], [0, 7]])))
    scores: List[int] = [graph.score([i, j]) for i in range(2) for j in range(3)]
    assert scores == [5 + 0, 5 + 2, 5 + 4, 7 + 6, 7 + 8, 7 + 10]
