"""The search over all device meshes, dimension by dimension, within the devices' memory (Rhino sections 4 and 4.4)."""

from __future__ import annotations

from typing import AbstractSet, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf.cluster import Cluster
from whale_tf.errors import ConfigError, InfeasibleError, PlanError, did_you_mean, memory_text
from whale_tf.ir.graph import OpGraph
from whale_tf.patterns.spread import Spread
from whale_tf.planner.op_price import OpPrices
from whale_tf.planner.rhino import memory
from whale_tf.planner.rhino.cost_graph import IMPOSSIBLE, CostGraph, Solution
from whale_tf.planner.rhino.elimination import TableTooLarge
from whale_tf.planner.rhino.integer_program import solve
from whale_tf.planner.rhino.liveness import busiest, held, peak_bytes
from whale_tf.planner.rhino.local_shapes import LocalShapes
from whale_tf.planner.rhino.mesh import PICOSECONDS, Mesh, axes, meshes
from whale_tf.planner.rhino.problem import MeshProblem
from whale_tf.planner.rhino.replicas import add_replica_sums, replica_graph, replica_shapes
from whale_tf.planner.scope import Scope, find_scope

PRICES = 10  # number of byte prices to try

Solver = Callable[[MeshProblem, CostGraph], Solution]  # the problem, and its costs, possibly modified


class Level(NamedTuple):
    """One mesh dimension: its problem, and the answer."""

    problem: MeshProblem
    solution: Solution


class Answer(NamedTuple):
    """Attributes:
    mesh: devices of each dimension.
    levels: one for each dimension.
    seconds: estimated time of a step: each device's computation after the last dimension, and every dimension's exchanges.
    stored_bytes: bytes of variables (parameters and optimizer state) on the fullest device.
    peak_bytes: the largest number of bytes alive there at one time, including variables.
    forced: number of the largest parameters that had to be divided because of memory.
    byte_price: picoseconds that a byte cost in the search, if forcing parameters was not enough.
    lower_bound_s: no plan on a mesh of one dimension within the memory is faster; None on other meshes.
    runners_up: (mesh, seconds, peak bytes) of the other meshes, best first.
    """

    mesh: Mesh
    levels: Tuple[Level, ...]
    seconds: float
    stored_bytes: float
    peak_bytes: float
    forced: int
    byte_price: float = 0.0
    lower_bound_s: Optional[float] = None
    runners_up: Tuple[Tuple[Mesh, float, float], ...] = ()

    def patterns(self, op_name: str) -> Tuple[str, ...]:
        """The strategies of an op on each mesh dimension."""
        graph = self.levels[0].problem.graph
        op = graph.op(op_name).id
        return tuple(level.problem.strategy(op, level.solution.choice).pattern for level in self.levels)


def exact(problem: MeshProblem, costs: CostGraph) -> Solution:
    """Solves the whole graph exactly: the paper's level O3."""
    return solve(costs)


def search(graph: OpGraph, cluster: Cluster, solver: Solver = exact, pins: Optional[Mapping[str, str]] = None,
           memory_bytes: Optional[float] = None, shapes: Optional[Sequence[Mesh]] = None,
           divisible: Optional[AbstractSet[int]] = None, gradients: AbstractSet[int] = frozenset(),
           batch: Optional[Mapping[int, int]] = None, known: Optional[OpGraph] = None) -> Answer:
    """The fastest plan.

    Args:
        graph: a captured graph; its shapes should be static, because dimensions of unknown size are not divided.
        solver: solves one dimension of a mesh.
        pins: op name -> pattern that it must take on every mesh dimension.
        memory_bytes: memory of one device; None means the memory that a step can use on the cluster's smallest device.
        shapes: the meshes to try; None means all of one or two dimensions.
        divisible: variable ops that may be stored in shards; None means all.
        gradients: tensors whose terms are added up before anything reads them.
        batch: tensor -> its dimension that counts examples.  If given, the first of two mesh dimensions is model replicas, which
            divide these and sum gradients, and the second divides everything else.
        known: the same ops with the sizes by which to price them, if ``graph`` does not know all sizes.

    Raises:
        ConfigError: an op is unknown, or does not have the requested pattern.
        InfeasibleError: no plan that was found fits; the message gives the least memory that would suffice.
        PlanError: a mesh does not match the cluster's devices.
    """
    tried = list(shapes) if shapes is not None else meshes(len(cluster))
    for mesh in tried:
        if _product(mesh) != len(cluster):
            raise PlanError(f"mesh {mesh} has {_product(mesh)} devices, but the cluster has {len(cluster)}; the product of its "
                            f"dimensions must be the number of devices")
    scope, limit = find_scope(graph, divisible, gradients), memory_bytes
    if limit is None:
        limit = float(min(device.usable_bytes for device in cluster.devices))
    searches = [_Search(graph, scope, cluster, mesh, solver, _pinned(graph, pins or {}), batch, known or graph) for mesh in tried]
    found = [answer for answer in (one.within(limit) for one in searches) if answer is not None]
    if not found:
        least = min(one.least_bytes for one in searches)
        raise InfeasibleError(
            f"a step takes {memory_text(least)} on each of {len(cluster)} devices even if every variable is divided that can be "
            f"divided, but the memory limit is {memory_text(limit)}; use more devices, a smaller batch, or devices with at least "
            f"{least:.0f} bytes")
    found.sort(key=lambda answer: answer.seconds)
    return found[0]._replace(runners_up=tuple((a.mesh, a.seconds, a.peak_bytes) for a in found[1:]))


class _Search:
    """One mesh."""

    def __init__(self, graph: OpGraph, scope: Scope, cluster: Cluster, mesh: Mesh, solver: Solver, pins: Mapping[int, str],
                 batch: Optional[Mapping[int, int]], known: OpGraph) -> None:
        self.graph, self.scope, self.mesh, self.solver, self.pins = graph, scope, mesh, solver, pins
        self.axes = axes(cluster, mesh)
        self.batch = batch if batch is not None and len(mesh) == 2 else None
        if self.batch is None:
            self.prices = OpPrices(known, scope)
            self.first = self._problem(0, LocalShapes(graph))
        else:
            replicas = self.axes.pop(0)
            self.prices = OpPrices(replica_graph(known, self.batch, replicas.count), scope)
            self.first = self._problem(0, replica_shapes(LocalShapes(graph), self.batch, replicas.count).begun())
            add_replica_sums(self.first, replicas)
        self.parameters = memory.parameters(self.first)
        self.least_bytes = float("inf")  # smallest peak of all answers so far

    def within(self, limit: float) -> Optional[Answer]:
        """The answer with the smallest number of forced parameters that fits, by bisection: one fewer does not fit.  If forcing
        all of them is not enough, the answer at the lowest price of a byte with which it fits."""
        answer = self._solve(0)
        if answer.peak_bytes <= limit:
            return self._bounded(answer, limit)
        low, high = 0, len(self.parameters)
        best = self._solve(high)
        if best.peak_bytes > limit:
            priced = self._priced(limit, best)
            return None if priced is None else self._bounded(priced, limit)
        while high - low > 1:
            middle = (low + high) // 2
            answer = self._solve(middle)
            if answer.peak_bytes <= limit:
                high, best = middle, answer
            else:
                low = middle
        return self._bounded(best, limit)

    def _priced(self, limit: float, forced: Answer) -> Optional[Answer]:
        """Searches the price, starting where all the memory is worth one step: halved while the answer fits, otherwise four times
        as high."""
        price, best = forced.seconds * PICOSECONDS / max(limit, 1.0), None
        for _ in range(PRICES):
            answer = self._solve(0, price)
            if answer.peak_bytes <= limit:
                if best is None or answer.seconds < best.seconds:
                    best = answer
                price /= 2
            elif best is None:
                price *= 4
            else:
                break
        return best

    def _bounded(self, answer: Answer, limit: float) -> Answer:
        if len(self.mesh) > 1:
            return answer
        solution = answer.levels[0].solution
        bound = solution.lower_bound
        if answer.forced or answer.byte_price:
            try:
                bound = memory.lower_bound(self.first, limit)
            except TableTooLarge:
                bound = 0
        return answer._replace(lower_bound_s=bound / PICOSECONDS)

    def _problem(self, dimension: int, shapes: LocalShapes) -> MeshProblem:
        return MeshProblem(self.graph, self.scope, self.axes[dimension], self.pins, shapes, self.batch, self.prices)

    def _solve(self, forced: int, price: float = 0.0) -> Answer:
        """Solves dimension by dimension, each on the shapes that the previous one left."""
        must: Set[int] = {v for parameter in self.parameters[:forced] for v in parameter.variables}
        levels: List[Level] = []
        problem, picoseconds = self.first, 0
        for dimension in range(len(self.axes)):
            if dimension:
                problem = self._problem(dimension, _left(levels[-1]))
            costs = memory.sharded(problem, must)
            solution = self.solver(problem, costs)
            if price:
                sizes = held(problem, busiest(problem, solution.choice))
                solution = self.solver(problem, memory.priced(costs, sizes, price))
                # the cost of the choice, without the price of its bytes
                solution = solution._replace(cost=problem.costs.score(solution.choice), lower_bound=0)
            if solution.cost >= IMPOSSIBLE:
                raise InfeasibleError(f"no plan on mesh {self.mesh} has all requested patterns: they contradict each other; "
                                      "request fewer")
            levels.append(Level(problem, solution))
            is_last = dimension == len(self.axes) - 1
            picoseconds += solution.cost if is_last else problem.communication(solution.choice)
        problem, choice = levels[-1].problem, levels[-1].solution.choice
        answer = Answer(self.mesh, tuple(levels), picoseconds / PICOSECONDS, memory.stored_bytes(problem, choice),
                        peak_bytes(problem, choice), forced, price)
        self.least_bytes = min(self.least_bytes, answer.peak_bytes)
        return answer


def _left(level: Level) -> LocalShapes:
    """The shapes after a mesh dimension."""
    problem, choice = level.problem, level.solution.choice
    made: Dict[int, Spread] = {}
    needed: Dict[Tuple[int, int], Spread] = {}
    for variable in problem.scope.variables:
        made[problem.graph.ops[variable].outputs[0]] = problem.storage(variable, choice)
    for op in problem.scope.ops:
        strategy = problem.strategy(op, choice)
        made.update(zip(problem.graph.ops[op].outputs, strategy.gives))
        needed.update({(op, t): need for t, need in zip(problem.graph.ops[op].inputs, strategy.needs)})
    return problem.shapes.divided(made, needed)


def _pinned(graph: OpGraph, pins: Mapping[str, str]) -> Dict[int, str]:
    for name in pins:
        if name not in graph:
            raise ConfigError(f"a pattern is requested for op {name!r}, which the graph does not "
                              f"have.{did_you_mean(name, [op.name for op in graph.ops])}")
    return {graph.op(name).id: pattern for name, pattern in pins.items()}


def _product(mesh: Mesh) -> int:
    total = 1
    for size in mesh:
        total *= size
    return total
