"""Memory of one device while a step runs under an answer: variables, and tensors from their creation to their last reader.

Ops run in the graph's order: forward, backward, update.  A tensor is held in its maker's layout.  If it is converted for all its
users (a relay), the copy lives in its place; if it is converted for one op, the copy lives while that op runs.  A variable that
is stored in shards and read whole is gathered for the first reader and held until the last, like the executor's single
concatenation.  Results of ops that only rename share their operand's memory.

At each place in the order, the bytes alive are a sum in which each tensor's bytes depend on one strategy, or on a pair.  So they
can be priced like time (:func:`held`), and they bound the peak from below.  The place to price is the busiest one of an answer.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from whale_tf.ir.graph import Phase
from whale_tf.ir.traits import SAME_BUFFER, SHAPE_ONLY
from whale_tf.patterns.moves import largest_share
from whale_tf.patterns.spread import EVERYWHERE, ONCE, Spread
from whale_tf.planner.rhino.problem import Layouts, MeshProblem
from whale_tf.profiler.chain import buffer_of


class LiveBytes(NamedTuple):
    """Bytes that are alive at one place, including variables.

    Attributes:
        nodes: `[strategies]` of a node -> bytes; ``pairs``: the same for two nodes, `[strategies of u, strategies of v]`.
    """

    nodes: Dict[int, np.ndarray]
    pairs: Dict[Tuple[int, int], np.ndarray]

    def bytes(self, choice: Sequence[int]) -> float:
        total = sum(float(sizes[choice[node]]) for node, sizes in self.nodes.items())
        return total + sum(float(sizes[choice[u], choice[v]]) for (u, v), sizes in self.pairs.items())


def _is_there(have: Spread, need: Spread) -> bool:
    """Whether the first device, which holds tensors of which there is one copy, needs no other copy."""
    return have == need or {have.kind, need.kind} == {ONCE, EVERYWHERE}


def peak_bytes(problem: MeshProblem, choice: Sequence[int]) -> float:
    """The largest number of bytes alive at one time on one device, including variables."""
    stored = sum(problem.stored_bytes(v, problem.storage(v, choice)) for v in problem.scope.variables)
    return stored + float(_Walk(problem, choice).run().max(initial=0.0))


def busiest(problem: MeshProblem, choice: Sequence[int]) -> int:
    """The place in the order of ops at which the most bytes are alive."""
    return int(_Walk(problem, choice).run()[:-1].argmax())


class _Walk:
    """Buffers with the places in the order of ops at which they are born and last read."""

    def __init__(self, problem: MeshProblem, choice: Sequence[int]) -> None:
        self.problem, self.choice = problem, choice
        self.sizes: List[float] = []
        self.born: List[int] = []
        self.last: List[int] = []
        self.held: Dict[int, Tuple[int, Spread]] = {}  # tensor -> its buffer (-1: a variable's own) and layout

    def run(self) -> np.ndarray:
        """Bytes at each place, variables not counted, and after the last one."""
        problem, graph = self.problem, self.problem.graph
        for place, op_id in enumerate(problem.scope.ops):
            op, strategy = graph.ops[op_id], problem.candidates[op_id]
            number = self.choice[problem.node_of[op_id]]
            read = [-1] * len(op.inputs)
            for position, tensor in enumerate(op.inputs):
                if op.type not in SHAPE_ONLY and op.type != "VariableShape" and not problem.is_hard(op_id, position):
                    read[position] = self._read(tensor, strategy.needs[position][number], place)
            for index, tensor in enumerate(op.outputs):
                if op.type in SAME_BUFFER and read:
                    buffer = read[0]
                elif op.phase is Phase.APPLY and graph.tensors[tensor].dtype.endswith("_ref"):
                    buffer = -1  # the variable itself
                else:
                    buffer = self._new(problem.bytes(tensor) * largest_share(strategy.gives[index][number]), place)
                self._keep(tensor, buffer, strategy.gives[index][number], place)
        return self._curve()

    def _read(self, tensor: int, need: Spread, place: int) -> int:
        """The buffer that holds an operand."""
        problem = self.problem
        tensor = problem.scope.roots.get(tensor, tensor)
        if tensor not in self.held:
            self._enter(tensor, place)
        buffer, layout = self.held[tensor]
        if buffer >= 0:
            self.last[buffer] = place
        if need.is_partial or _is_there(layout, need):
            return buffer
        return self._new(problem.bytes(tensor) * largest_share(need), place)

    def _enter(self, tensor: int, place: int) -> None:
        """Adds a variable, or a tensor from outside the problem, which is whole.  Constants are part of the program."""
        problem = self.problem
        producer = problem.graph.producer(tensor)
        if producer.id in problem.stored:
            self._keep(tensor, -1, problem.storage(producer.id, self.choice), place)
            return
        layout = problem.outside(tensor)
        size = 0.0 if producer.type == "Const" else problem.bytes(tensor)
        self._keep(tensor, self._new(size, place), layout, place)

    def _keep(self, tensor: int, buffer: int, layout: Spread, place: int) -> None:
        """Adds a tensor when it is made.  If it has a relay, it is brought into the relay's layout at once."""
        relay = self.problem.relays.get(tensor)
        if relay is not None:
            wanted = self.problem.relayed[tensor][self.choice[relay]]
            if not _is_there(layout, wanted):
                buffer, layout = self._new(self.problem.bytes(tensor) * largest_share(wanted), place), wanted
        self.held[tensor] = (buffer, layout)

    def _new(self, size: float, place: int) -> int:
        self.sizes.append(size)
        self.born.append(place)
        self.last.append(place)
        return len(self.sizes) - 1

    def _curve(self) -> np.ndarray:
        change = np.zeros(len(self.problem.scope.ops) + 1)
        np.add.at(change, self.born, self.sizes)
        np.add.at(change, np.array(self.last, dtype=np.int64) + 1, -np.array(self.sizes))
        return np.cumsum(change)


def held(problem: MeshProblem, place: int) -> LiveBytes:
    """Tensors alive at a place: made there or before, read there or later (among tensors that share memory only one counts)."""
    graph = problem.graph
    found = LiveBytes({problem.node_of[v]: _sizes(problem.bytes(graph.ops[v].outputs[0]), problem.stored[v])
                       for v in problem.scope.variables}, {})
    places = {op: i for i, op in enumerate(problem.scope.ops)}
    seen = set()
    for tensor, (first, last) in _uses(problem, places).items():
        producer, buffer = graph.tensors[tensor].op, buffer_of(graph, tensor)
        if producer in problem.stored:
            if tensor in problem.relays and first <= place <= last:
                _add_gathered(problem, found, tensor, problem.relays[tensor])
        elif producer in problem.candidates and places[producer] <= place <= last and buffer not in seen:
            if graph.tensors[buffer].op not in problem.stored:
                seen.add(buffer)
                node, layouts = _holder(problem, tensor)
                sizes = _sizes(problem.bytes(tensor), layouts)
                found.nodes[node] = found.nodes.get(node, np.zeros(len(sizes))) + sizes
    return found


def _uses(problem: MeshProblem, places: Mapping[int, int]) -> Dict[int, Tuple[int, int]]:
    """Tensor (a variable for its reads) -> places of its first and last reader."""
    graph = problem.graph
    found: Dict[int, Tuple[int, int]] = {}
    for op, place in places.items():
        record = graph.ops[op]
        for position, tensor in enumerate(record.inputs):
            if record.type not in SHAPE_ONLY and record.type != "VariableShape" and not problem.is_hard(op, position):
                root = problem.scope.roots.get(tensor, tensor)
                found[root] = (found[root][0] if root in found else place, place)
    return found


def _holder(problem: MeshProblem, tensor: int) -> Tuple[int, Layouts]:
    """The node whose strategy determines how a tensor is held."""
    if tensor in problem.relays:
        return problem.relays[tensor], problem.relayed[tensor]
    record = problem.graph.tensors[tensor]
    return problem.node_of[record.op], problem.candidates[record.op].gives[record.index]


def _sizes(size: float, layouts: Layouts) -> np.ndarray:
    return np.array([size * largest_share(layout) for layout in layouts])


def _add_gathered(problem: MeshProblem, found: LiveBytes, tensor: int, relay: int) -> None:
    """The copy of a variable that is read in another layout than the one in which it is stored."""
    variable = problem.graph.tensors[tensor].op
    stored, copies = problem.stored[variable], _sizes(problem.bytes(tensor), problem.relayed[tensor])
    table = np.array([[0.0 if _is_there(have, need) else size for need, size in zip(problem.relayed[tensor], copies)]
                      for have in stored])
    u, v = problem.node_of[variable], relay
    found.pairs[(u, v) if u < v else (v, u)] = table if u < v else table.T
