"""What a Program says about the values and the work of its calls: on which device, how large, and how often read."""

from __future__ import annotations

import abc
from typing import Dict, List, NamedTuple, Set, Tuple

from whale_tf.ir.graph import Op, Phase
from whale_tf.ir.training_step import TrainingStep
from whale_tf.ir.traits import VARIABLES
from whale_tf.passes.communicate import dividing
from whale_tf.plan import Plan
from whale_tf.program import (
    ACCUMULATE,
    ALL,
    BACKWARD,
    FORWARD,
    MERGE,
    SYNCHRONISE,
    UPDATE,
    WEIGHT,
    WHOLE,
    Body,
    Call,
    Program,
)
from whale_tf.simulator.calibration import MEMORY
from whale_tf.simulator.tasks import About

LABELS = {BACKWARD: BACKWARD, WEIGHT: WEIGHT, ACCUMULATE: BACKWARD, SYNCHRONISE: UPDATE, MERGE: UPDATE, UPDATE: UPDATE}


class Kernel(NamedTuple):
    """The cost of running an op.

    Attributes:
        seconds: 0: the op is no task of its own.
        limit: what limits its speed.
        matrix_flops: FLOPs on the device's matrix units.
        scratch: bytes that it needs while it runs.
        workspace: bytes that it keeps for its gradient, as long as its first result.
        shares: whether its first result is in the buffer of its first operand.
        overwrites: whether a result may overwrite an operand of its size that has no later readers.
    """

    seconds: float
    limit: str = MEMORY
    matrix_flops: float = 0.0
    scratch: float = 0.0
    workspace: float = 0.0
    shares: bool = False
    overwrites: bool = False


class OpCosts(abc.ABC):
    """The costs of ops and tensors."""

    @abc.abstractmethod
    def bytes(self, tensor: int) -> float:
        """Bytes of a tensor's value for the whole mini-batch; for a variable itself, bytes of its value."""

    @abc.abstractmethod
    def kernel(self, op: Op, part: float, device: int) -> Kernel:
        """The cost of an op on its part of a mini-batch; ops that run once have part 1."""

    @abc.abstractmethod
    def moving(self, device: int, size: float) -> float:
        """Seconds to read and write ``size`` bytes."""


class Piece(NamedTuple):
    """An op of a body, which is one task in each call.

    Attributes:
        inputs: (tensor that it reads, whether it reads the value of the whole mini-batch).
        function: number of its function in a called body; 0 in others.
        shard: its place among the devices of a divided TaskGraph.
        variables: inputs that are variables.
    """

    op: Op
    inputs: Tuple[Tuple[int, bool], ...]
    function: int
    shard: int
    variables: Tuple[int, ...]


class CallFacts:
    """The calls of one process' Program.

    Attributes:
        host: the device of ops that run on no clone's.
        replicas: model replicas that divide one mini-batch; a fraction if micro-batches have one each.
        number: (body, clone) -> call.
        sources: of each call, (tensor, whether it is the whole mini-batch's) -> the calls from which it takes it.
        readers: (call, tensor) -> number of calls that take it.
        pieces: of each body, op -> its piece, in the order of the graph.
        parts: of each call, the fraction of a mini-batch on which it works.
    """

    def __init__(self, costs: OpCosts, step: TrainingStep, program: Program, plan: Plan) -> None:
        self.costs, self.step, self.program, self.plan = costs, step, program, plan
        self.graph, self.batch = program.graph, step.region.batch
        self.host = min(device for task in plan.task_graphs for row in task.devices for device in row)
        self.replicas = dividing(step, plan)
        self.body_of = program.body_of()
        self._bodies = [program.bodies[call.body] for call in program.calls]
        self._devices: Dict[Tuple[int, int], int] = {}
        self._divided = {tensor for tensor, layout in self.batch.layouts.items() if layout.is_sharded}
        self.number = {(call.body, call.clone): number for number, call in enumerate(program.calls)}
        self.gradients = {tensor for tensor, _ in step.gradients}
        combined = self.batch.combined()
        self.sources: List[Dict[Tuple[int, bool], Tuple[int, ...]]] = []
        self.readers: Dict[Tuple[int, int], int] = {}
        for call in program.calls:
            self.sources.append({(t, program.step_of(program.calls[calls[0]]) == WHOLE): calls for t, calls in call.takes})
            for source, tensor in ((source, value.tensor) for value in call.takes for source in value.calls):
                self.readers[source, tensor] = self.readers.get((source, tensor), 0) + 1
        self.pieces = [self._pieces(body, combined) for body in program.bodies]
        self.parts = [self._part(call) for call in program.calls]

    def _pieces(self, body: Body, combined: Set[Tuple[int, int]]) -> Dict[int, Piece]:
        functions = body.functions or (body.ops,)
        own = {tensor for ops in functions for index in ops for tensor in self.graph.ops[index].outputs}
        found = {}
        for number, ops in enumerate(functions):
            for op in (self.graph.ops[index] for index in ops):
                inputs = dict.fromkeys((t, (op.id, at) in combined) for at, t in enumerate(op.inputs)
                                       if t not in own or self.graph.tensors[t].op < op.id)  # otherwise: a loop's next iteration
                variables = tuple([t for t in op.inputs if self.graph.producer(t).type in VARIABLES])
                found[op.id] = Piece(op, tuple(inputs), number, op.shard, variables)
        return found

    def _part(self, call: Call) -> float:
        """The fraction of a mini-batch on which a call works."""
        if call.clone.m == ALL:
            return 1.0
        sizes = self.plan.micro_batch_slices or (1,) * self.plan.num_micro_batch
        task = self.plan.task_graphs[self.program.bodies[call.body].task_graph]
        shares = task.batch_slices or (1,) * task.replica_count
        return sizes[call.clone.m] / sum(sizes) * shares[call.clone.r] / sum(shares) / self.replicas

    def device_of(self, number: int, tensor: int) -> int:
        """The device where a call has a tensor."""
        return self.device_at(number, self.graph.producer(tensor).shard)

    def device_at(self, number: int, shard: int) -> int:
        """The device of a call; for a divided TaskGraph, that of one part."""
        found = self._devices.get((number, shard))
        if found is None:
            found = self._devices[number, shard] = self._device_at(self.program.calls[number], self._bodies[number], shard)
        return found

    def _device_at(self, call: Call, body: Body, shard: int) -> int:
        if body.home is not None:
            return body.home
        if body.task_graph != ALL and self.plan.task_graphs[body.task_graph].strategy == "split":
            return self.plan.task_graphs[body.task_graph].devices[max(0, call.clone.g)][shard]
        return call.devices[0] if call.devices else self.host

    def size_of(self, number: int, tensor: int) -> float:
        """Bytes of a call's share of a tensor."""
        return self.costs.bytes(tensor) * (self.parts[number] if tensor in self._divided else 1.0)

    def body(self, number: int) -> Body:
        """The body of a call."""
        return self._bodies[number]

    def step_of(self, number: int) -> str:
        return self._bodies[number].step

    def step_of_op(self, number: int, op: Op) -> str:
        """The step to which an op of a call belongs."""
        return FORWARD if self.body(number).with_forward and op.phase is Phase.FORWARD else self.step_of(number)

    def about(self, number: int, name: str, step: str = "") -> About:
        """``step``: the call's own if it is empty."""
        body = self.body(number)
        label = LABELS.get(step or body.step, FORWARD)
        return About(name, label, max(0, body.task_graph), self.program.calls[number].clone.m)
