"""Bodies into leaner ones, for calls of functions: the arguments of a call live until it ends, so what crosses is what costs.

Two things are left out of what the forward body of a TaskGraph gives to its backward body:

- What only dead ops read.  The gradient of a product, say, is made for both operands, also where one of them is a constant.
- What cheap ops can compute again.  Which tensors are kept instead is a minimum cut, in bytes::

      x ──> half ──> product        wanted by the backward body: half, sum, product
      └───> sum ───────┘            kept: x, sum                 done again: half, product

An op that is done again waits for the gradient that its first reader combines it with.  Otherwise all of them would run as soon
as the call begins, and their results would live as long as arguments.
"""

from __future__ import annotations

from typing import Dict, Iterable, List, Sequence, Set, Tuple

import networkx as nx

from whale_tf.ir.batch_axis import Reduce
from whale_tf.ir.graph import Op
from whale_tf.ir.region import Region
from whale_tf.ir.training_step import TrainingStep
from whale_tf.ir.traits import Buffer, Cost, Role, State, traits
from whale_tf.passes.form import choose_form
from whale_tf.passes.outline import UNSENT, read_elsewhere
from whale_tf.plan import Plan
from whale_tf.profiler.op_cost import tensor_bytes
from whale_tf.program import BACKWARD, CLONED, FORWARD, Body, Program

REDO = 0.25  # bytes that have to be saved for each byte that is computed again
MOST_FLOPS = 1.0  # for each element; an op that takes more is not done again
SOURCE, SINK = "source", "sink"


def spare(program: Program, step: TrainingStep, plan: Plan) -> Program:
    """The same bodies without dead ops, and with less to carry from forward to backward; inlined bodies as they are."""
    region = step.region
    if not choose_form(program, region, plan).is_called:
        return program
    live = _live(program, region)
    bodies = [_with_runs(region, body, [index for index in body.ops if index in live]) if body.step in CLONED else body
              for body in program.bodies]
    redo = _Redo(region)
    for number, body in enumerate(bodies):
        forward = next((b for b in bodies if b.task_graph == body.task_graph and b.step == FORWARD), None)
        if body.step == BACKWARD and forward is not None:
            bodies[number] = redo.in_backward(forward, body)
    read = read_elsewhere(region).union(*(body.inputs for body in bodies))
    return program._replace(bodies=tuple(
        body._replace(outputs=tuple(
            t for i in body.ops if i in live for t in region.graph.ops[i].outputs if t in read or _is_shown(region, t)))
        if body.step in CLONED else body for body in bodies))


def _live(program: Program, region: Region) -> Set[int]:
    """Ops of called bodies that something outside of them, or a user, may need."""
    graph = region.graph
    members = {index for body in program.bodies if body.step in CLONED for index in body.ops}
    elsewhere = read_elsewhere(region)
    waited = {c for op in graph.ops if op.id not in members for c in op.control_inputs}
    stack = [index for index in members
             if index in waited or not graph.ops[index].outputs
             or any(t in elsewhere or _is_shown(region, t) for t in graph.ops[index].outputs)]
    found: Set[int] = set()
    while stack:
        index = stack.pop()
        if index in members and index not in found:
            found.add(index)
            stack.extend(graph.predecessors(graph.ops[index]))
    return found


def _is_shown(region: Region, tensor: int) -> bool:
    """Whether a body returns a tensor for the user alone: what a gradient function made and nothing reads, it does not."""
    graph, record = region.graph, region.graph.tensors[tensor]
    op = graph.ops[record.op]
    if op.forward >= 0 or record.dtype in UNSENT or record.dtype.endswith("_ref"):
        return False
    return record.shape == () or not any(graph.consumers(t) for t in op.outputs)


def _with_runs(region: Region, body: Body, runs: Iterable[int], waits: Sequence[Tuple[int, int]] = ()) -> Body:
    """The body with other ops in its function."""
    graph, ordered = region.graph, sorted(runs)
    own = set(ordered)
    inputs = dict.fromkeys(t for i in ordered for t in graph.ops[i].inputs if graph.tensors[t].op not in own)
    return body._replace(runs=tuple(ordered), inputs=tuple(inputs), waits=tuple(waits))


class _Redo:
    """What backward bodies do again."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._graph = region.graph
        self._one_example = region.graph.with_shapes({
            t: tuple(1 if size is None else size for size in record.shape)
            for t, record in enumerate(region.graph.tensors) if record.shape is not None and None in record.shape})
        batch = region.batch
        reduced = {op for (op, _), steps in batch.conversions.items() if any(isinstance(step, Reduce) for step in steps)}
        self._refused = reduced.union(batch.own_seed, (op for op, _ in batch.attributes), (op for op, _ in batch.bodies))

    def in_backward(self, forward: Body, backward: Body) -> Body:
        """The backward body with all that it does again."""
        members = set(forward.runs)
        wanted = [t for t in backward.inputs if self._graph.tensors[t].op in members]
        redone: Set[int] = set()
        for network in self._networks(wanted, members):
            _, (_, behind) = nx.minimum_cut(network, SOURCE, SINK)
            redone |= {key for kind, key in (node for node in behind if node != SINK) if kind == "op"}
        return _with_runs(self._region, backward, redone | set(backward.runs), self._waits(redone, set(backward.runs)))

    def _networks(self, wanted: Sequence[int], members: Set[int]) -> List[nx.DiGraph]:
        """The parts that nothing but ops which are not done again connects.

        A tensor on the source's side is computed forward only; an edge ``op -> tensor`` that is cut is a tensor that is kept, an
        edge ``source -> op`` that is cut an op that is done again.
        """
        whole, known = nx.Graph(), {}  # type: nx.Graph, Dict[int, bool]
        stack, edges = list(wanted), []  # type: List[int], List[Tuple]
        seen: Set[int] = set()
        while stack:
            tensor = stack.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            record = self._graph.tensors[tensor]
            op, node = self._graph.ops[record.op], ("tensor", tensor)
            if op.id not in members or not self._is_cheap(op):
                edges.append((SOURCE, node, self._kept(tensor)))
                continue
            edges.append((("op", op.id), node, self._kept(tensor)))
            if op.id not in known:
                known[op.id] = True
                edges.append((SOURCE, ("op", op.id), self._work(op)))
                for position, source in enumerate(op.inputs):
                    if (op.id, position) not in self._region.batch.localise:
                        edges.append((("tensor", source), ("op", op.id), None))
                        stack.append(source)
        edges += [(("tensor", tensor), SINK, None) for tensor in wanted]
        whole.add_edges_from((a, b) for a, b, _ in edges if a != SOURCE and b != SINK)
        part_of = {node: number for number, part in enumerate(nx.connected_components(whole)) for node in part}
        networks: Dict[int, nx.DiGraph] = {}
        for a, b, capacity in edges:
            number = part_of.get(b if a == SOURCE else a)
            if number is not None:  # else nothing to choose
                network = networks.setdefault(number, nx.DiGraph())
                network.add_edge(a, b, **({} if capacity is None else {"capacity": capacity}))
        return list(networks.values())

    def _kept(self, tensor: int) -> int:
        """Bytes that it costs to keep a tensor; what all micro-batches share is kept anyway."""
        producer = self._graph.producer(tensor)
        if producer.id not in self._region.batch_level and tensor not in self._region.batch.layouts:
            return 0
        if producer.id not in self._region.batch_level and not self._region.batch.layout(tensor).is_sharded:
            return 0
        while traits(producer.type).buffer is Buffer.SAME and producer.inputs:
            tensor = producer.inputs[0]
            producer = self._graph.producer(tensor)
        return max(tensor_bytes(self._one_example, tensor), 1)

    def _work(self, op: Op) -> int:
        """What doing an op again costs, in bytes that have to be saved."""
        if traits(op.type).cost is Cost.FREE:
            return 0
        return int(REDO * sum(tensor_bytes(self._one_example, t) for t in op.outputs))

    def _is_cheap(self, op: Op) -> bool:
        """Whether an op gives the same again, at little cost."""
        row = traits(op.type)
        if row.role is not Role.COMPUTE or row.state is not State.NONE or op.control_inputs or op.id in self._refused:
            return False
        if any(self._graph.tensors[t].dtype in UNSENT or self._graph.tensors[t].dtype.endswith("_ref")
               or self._graph.tensors[t].shape is None for t in (*op.inputs, *op.outputs)):
            return False
        if row.cost is Cost.RESULT:
            return row.buffer is Buffer.OVERWRITES and row.flops <= MOST_FLOPS and not row.is_dear
        return row.cost in (Cost.FREE, Cost.MOVE, Cost.ADDS) and bool(row.rule)

    def _waits(self, redone: Set[int], own: Set[int]) -> List[Tuple[int, int]]:
        """(op done again, op of the backward body that it waits for).

        Its first reader in graph order reads a gradient, too.  Nothing that this gradient is computed from reads the op: that
        would come before its first reader.
        """
        first: Dict[int, int] = {}
        found = []
        for index in sorted(redone, reverse=True):
            readers = [user for t in self._graph.ops[index].outputs for user, _ in self._graph.consumers(t)]
            first[index] = min(first.get(user, user) for user in readers if user in redone or user in own)
            before = [p for p in self._graph.predecessors(self._graph.ops[first[index]]) if p in own]
            if before:
                found.append((index, max(before)))
        return found
