"""A training step op by op, as in a captured graph: the simulator plays it if a model's own ops are known.

A :class:`StepGraph` contains structure (which op reads whose results, which tensors are divided with the batch) and the measured
times of each op at one or several batch sizes, but nothing of TensorFlow.  On disk it is JSON.  ``whale profile --ops`` writes
one.
"""

from __future__ import annotations

import json
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from whale_tf.documents import json_object
from whale_tf.errors import PlanError
from whale_tf.ir.batch_axis import BatchAxis, Reduce
from whale_tf.ir.graph import SHARD_ATTR, OpGraph, Phase, same_graph
from whale_tf.ir.layout import REPLICATED, SHARDED, Layout
from whale_tf.ir.region import Region
from whale_tf.ir.training_step import TrainingStep, find_update
from whale_tf.ir.traits import ENTERS
from whale_tf.plan import Plan
from whale_tf.profiler.op_time import LAUNCH_S
from whale_tf.program import BACKWARD, BATCH_LEVEL, EARLY, FORWARD, SECTION, UPDATE
from whale_tf.simulator.calibration import Points, interpolated

VERSION = 2
PHASES = {BACKWARD: Phase.BACKWARD, UPDATE: Phase.APPLY}  # all other steps: forward

MEASURED = ("seconds", "scratch", "workspace")  # attributes

NUMBER_BYTES = 8  # at most


class StepTensor(NamedTuple):
    """``bytes``: for the whole mini-batch; ``layout``: the kind of its layout (:class:`whale_tf.ir.layout.Layout`)."""

    bytes: float
    layout: str = REPLICATED


class StepOp(NamedTuple):
    """One op.

    Attributes:
        step: the kind of its body: once, early, section, forward, backward or update.
        task_graph, shard: where it runs; ``shard`` is the place among the devices of a divided TaskGraph.
        origin: the op of the local script of which this is a part (its own name if it is not divided).
        follows: the forward op from which this backward op was made, or "".
        inputs: (op number, which of its outputs).
        flops, size_bytes, contraction: its cost (:mod:`whale_tf.profiler.op_cost`) at the graph's batch size.
        alias: whether the first output is the first input's buffer.
        waits: numbers of ops that it waits for by control edges; both run once per micro-batch.
        whole: positions of the inputs of which it reads the value of the whole mini-batch.
        overwrites: whether an output may overwrite an input of its size that has no later readers.
    """

    name: str
    type: str
    step: str
    task_graph: int
    shard: int
    origin: str
    follows: str
    inputs: Tuple[Tuple[int, int], ...]
    outputs: Tuple[StepTensor, ...]
    flops: float
    size_bytes: float
    contraction: bool
    alias: bool = False
    waits: Tuple[int, ...] = ()
    whole: Tuple[int, ...] = ()
    overwrites: bool = False


class StepVariable(NamedTuple):
    """A variable with its slots; ``bytes``: of both together; ``slots``: of the slots alone."""

    name: str
    task_graph: int
    shard: int
    bytes: float
    slots: float = 0.0


class KernelMemory(NamedTuple):
    """Attributes:
    scratch: bytes that an op's kernel took only while it ran (such as a convolution's rearranged image).
    results: bytes of each of its outputs, of which a kernel may have more than the op (such as the places that oneDNN's pooling
        keeps for its gradient).
    """

    scratch: float
    results: Tuple[float, ...]


class StepGraph(NamedTuple):
    """Attributes:
    batch: number of examples in the mini-batch for which shapes and costs hold.
    pulls: whether examples come from an input pipeline, so that model replicas may take their own mini-batches.
    ops: in topological order, with the variables that they read or write.
    gradients: (variable, op number, which of its outputs) of every gradient.
    scratch: op of the local script -> (batch, bytes that its kernel takes while it runs), ordered by batch.
    workspace: the same of bytes that its kernel keeps for its gradient, as long as its first result.
    seconds: op of the local script -> (batch, seconds of one run), ordered by batch.  Ops that no traced run had (because they
        were folded or fused into others) are missing here and cost nothing.
    """

    name: str
    fingerprint: str
    batch: int
    precision: str
    pulls: bool
    ops: Tuple[StepOp, ...]
    variables: Tuple[StepVariable, ...]
    gradients: Tuple[Tuple[str, int, int], ...] = ()
    seconds: Mapping[str, Points] = {}
    scratch: Mapping[str, Points] = {}
    workspace: Mapping[str, Points] = {}

    def measured(self, batch: float, seconds: Mapping[str, float],
                 memory: Optional[Mapping[str, KernelMemory]] = None) -> StepGraph:
        """The graph with the measurements of another traced run, at a mini-batch of ``batch``."""
        outputs = {op.origin: len(op.outputs) for op in self.ops}
        scratch = {name: one.scratch for name, one in (memory or {}).items()}
        workspace = {name: sum(one.results[outputs[name]:]) for name, one in (memory or {}).items() if name in outputs}
        tables = [(self.seconds, seconds), (self.scratch, _not_zero(scratch)), (self.workspace, _not_zero(workspace))]
        both = [_merged(known, {name: ((float(batch), value),) for name, value in more.items()}) for known, more in tables]
        return self._replace(seconds=both[0], scratch=both[1], workspace=both[2])

    def resized(self, batch: int) -> StepGraph:
        """The same step with mini-batches of another size; everything that follows the examples grows with them."""
        factor = batch / self.batch
        ops = tuple(
            op._replace(
                outputs=tuple(tensor._replace(bytes=tensor.bytes * (factor if tensor.layout == SHARDED else 1.0))
                              for tensor in op.outputs),
                flops=op.flops * factor, size_bytes=op.size_bytes * factor) if op.step in BATCH_LEVEL else op
            for op in self.ops)
        return self._replace(batch=batch, ops=ops)

    def and_times_of(self, other: StepGraph) -> StepGraph:
        """The other recording of the same graph, with this one's times added to its own; if it is of another graph, without."""
        if not same_graph(self.fingerprint, other.fingerprint):
            return other
        return other._replace(seconds=_merged(self.seconds, other.seconds), scratch=_merged(self.scratch, other.scratch),
                              workspace=_merged(self.workspace, other.workspace))

    def memory_of(self, op: StepOp, batch: float) -> Tuple[float, float]:
        """Bytes that an undivided op's kernel takes while it runs on ``batch`` examples, and that it keeps for its gradient."""
        scratch, workspace = (table.get(op.origin) for table in (self.scratch, self.workspace))
        return (interpolated_from_zero(scratch, batch) if scratch else 0.0,
                interpolated_from_zero(workspace, batch) if workspace else 0.0)

    def time_of(self, op: StepOp, batch: float) -> Optional[float]:
        """Measured seconds of an undivided op for ``batch`` examples; None: no traced run had it.

        If only one size was measured, what the op takes beyond its launch is in proportion to the examples that it reads.
        """
        points = self.seconds.get(op.origin)
        if not points:
            return None
        if len(points) == 1 and op.step in (FORWARD, BACKWARD):
            (measured, seconds), = points
            fixed_s = min(seconds, LAUNCH_S)
            return fixed_s + (seconds - fixed_s) * batch / measured
        return interpolated_from_zero(points, batch)

    def to_json(self) -> str:
        rows = [json.dumps(op) for op in self.ops]
        head = {"version": VERSION, "name": self.name, "fingerprint": self.fingerprint, "batch": self.batch,
                "precision": self.precision, "pulls": self.pulls,
                "variables": self.variables, "gradients": self.gradients,
                **{key: getattr(self, key) for key in MEASURED}}
        return "{},\n \"ops\": [\n  {}\n ]\n}}\n".format(json.dumps(head)[:-1], ",\n  ".join(rows))

    @classmethod
    def parse(cls, source: str) -> StepGraph:
        """A step graph from JSON text or the path of a JSON file.

        Raises:
            PlanError: unreadable, or not what :meth:`to_json` writes.
        """
        value = json_object(source, "step graph", PlanError, "write one with `whale profile SCRIPT --ops FILE`")
        try:
            return _parsed(value)
        except (ValueError, KeyError, TypeError) as error:
            raise PlanError(f"the step graph is not what `whale profile --ops` writes: {type(error).__name__}: {error}")


def _not_zero(table: Mapping[str, float]) -> Dict[str, float]:
    return {name: value for name, value in table.items() if value}


def _merged(one: Mapping[str, Points], other: Mapping[str, Points]) -> Dict[str, Points]:
    """The points of both tables; if both have the same batch, that of ``other``."""
    table = {name: dict(points) for name, points in one.items()}
    for name, points in other.items():
        table.setdefault(name, {}).update(points)
    return {name: tuple(sorted(points.items())) for name, points in table.items()}


def interpolated_from_zero(points: Points, batch: float) -> float:
    """Linear between measured batches; extrapolated from the nearest two below the smallest and above the largest, but below not
    less than in proportion to the batch."""
    if len(points) == 1 or points[0][0] <= batch <= points[-1][0]:
        return interpolated(points, batch) if len(points) > 1 else points[0][1]
    if batch > points[-1][0]:
        return interpolated(points, batch)
    (first, first_s), (second, second_s) = points[:2]
    along = first_s + (batch - first) / (second - first) * (second_s - first_s)
    return max(along, first_s * batch / first)


def _parsed(data: Dict[str, Any]) -> StepGraph:
    if data["version"] != VERSION:
        raise ValueError("version is {}, this whale_tf reads version {}".format(data["version"], VERSION))
    ops = tuple(
        StepOp(*row)._replace(inputs=tuple((int(a), int(b)) for a, b in row[7]), outputs=tuple(StepTensor(*t) for t in row[8]),
                              waits=tuple(map(int, row[13])), whole=tuple(map(int, row[14])))
        for row in data["ops"])
    for number, op in enumerate(ops):
        for source, output in op.inputs:
            if not 0 <= source < number or not 0 <= output < len(ops[source].outputs):
                raise ValueError(f"op {op.name!r} reads output {output} of op {source}, which is not before it")
        if any(not 0 <= before < number for before in op.waits):
            raise ValueError(f"op {op.name!r} waits for ops {list(op.waits)}, which are not all before it")
    measured = {
        key: {name: tuple((float(batch), float(value)) for batch, value in points) for name, points in data[key].items()}
        for key in MEASURED if key in data}  # "workspace" is not in older files
    variables = tuple(StepVariable(*row) for row in data["variables"])
    gradients = tuple((name, int(op), int(output)) for name, op, output in data["gradients"])
    return StepGraph(data["name"], data["fingerprint"], int(data["batch"]), data["precision"], bool(data["pulls"]), ops,
                     variables, gradients, **measured)


def under(graph: StepGraph, plan: Plan) -> StepGraph:
    """A graph that was recorded without the plan's TaskGraphs, with them.

    Forward ops go to the TaskGraph that names them, backward ops to that of their forward op, and others to the earliest one from
    which they read.  Updates follow the gradients that they read.

    Raises:
        PlanError: the plan was made for another graph, or divides ops (whose parts are not in a graph recorded without it).
    """
    divided = [task.name for task in plan.task_graphs if task.strategy == "split" and task.device_count > 1]
    if divided:
        raise PlanError(
            f"the plan divides the ops of TaskGraph {divided[0]!r}, but a graph that was recorded without it does not have their "
            "parts; call wh.step_graph() after wh.parallelize(), and simulate its result")
    if not same_graph(graph.fingerprint, plan.graph):
        raise PlanError(
            f"the plan was made for graph {plan.graph!r}, but the step graph is of {graph.fingerprint!r}; record the "
            f"script for which the plan was made")
    named = {name: number for number, task in enumerate(plan.task_graphs) for name in task.ops}
    ops: List[StepOp] = []
    for op in graph.ops:
        task_graphs = named.get(op.origin, named.get(op.follows))
        if task_graphs is None:
            task_graphs = min((ops[source].task_graph for source, _ in op.inputs if ops[source].step == op.step), default=0)
        ops.append(op._replace(task_graph=task_graphs))
    variables = tuple(one._replace(task_graph=named.get(one.name, 0)) for one in graph.variables)
    return graph._replace(ops=tuple(ops), variables=variables)


def training_step(graph: StepGraph, processes: int = 1) -> TrainingStep:
    """The training step from which the passes make a Program.  Tensors have no shapes, except the update's scalars.  Decisions
    that need other shapes (which gradients a bucket may hold, lean bodies of calls) were made where the graph was captured."""
    ops, task_graphs, layouts = OpGraph(), [], {}  # type: OpGraph, List[int], Dict[int, Layout]
    for row in graph.ops:
        kind = "Identity" if row.type in ENTERS else row.type  # loops count as straight-line code
        outputs = [(() if row.step == UPDATE and one.bytes <= NUMBER_BYTES else (1,), "float32") for one in row.outputs]
        op = ops.add(row.name, kind, [ops.ops[source].outputs[place] for source, place in row.inputs], outputs, row.waits,
                     phase=PHASES.get(row.step, Phase.FORWARD), attrs={SHARD_ATTR: row.shard})
        task_graphs.append(row.task_graph)
        layouts.update((tensor, Layout(one.layout)) for tensor, one in zip(op.outputs, row.outputs))
    variables: Dict[int, int] = {}
    for one in graph.variables:
        if one.name not in ops:
            ops.add(one.name, "VarHandleOp", outputs=[((1,), "float32")])
            task_graphs.append(one.task_graph)
        variables[ops.op(one.name).id] = one.task_graph
    pull = "IteratorGetNext" if graph.pulls else "Placeholder"
    source = ops.add("inputs", pull, outputs=[((1,), "float32")], phase=Phase.INPUT)
    task_graphs.append(-1)
    batch = BatchAxis(ops, {source.outputs[0]: 0}, graph.batch)
    batch.layouts = {tensor: layout for tensor, layout in layouts.items() if not layout.is_replicated}
    batch.conversions = {(number, place): (Reduce("sum"),) for number, row in enumerate(graph.ops) for place in row.whole}
    members = [op.id for op in ops.ops if op.phase in (Phase.FORWARD, Phase.BACKWARD)]
    of = {step: {number for number, row in enumerate(graph.ops) if row.step == step} for step in BATCH_LEVEL}
    region = Region(ops, tuple(members), set().union(*of.values()), task_graphs, of[BACKWARD], of[EARLY], batch,
                    sections=frozenset(of[SECTION]))
    gradients = tuple((ops.ops[number].outputs[place], ops.op(name).id) for name, number, place in graph.gradients)
    update = find_update(region, variables, {tensor: variables[variable] for tensor, variable in gradients})
    return TrainingStep(region, batch.sources, update, gradients, processes)
