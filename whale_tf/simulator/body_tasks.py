"""The tasks of a body, which are the same in all of its calls of one size on devices of one type.

An op that takes no time is no task: it hands on what it reads.  What such ops read is followed back, so that a call only looks
up what has to be there before each of its tasks: results of other tasks, values from other calls, and ops for which control edges
wait.
"""

from __future__ import annotations

from typing import Dict, Mapping, NamedTuple, Tuple

from whale_tf.ir.traits import READS
from whale_tf.program import BACKWARD, BATCH_LEVEL, ONCE, WEIGHT
from whale_tf.simulator.call_facts import CallFacts, Kernel, Piece
from whale_tf.simulator.instructions import BlockKey

WITH_BUFFERS = (ONCE, *BATCH_LEVEL)
Controls = Tuple[Tuple[int, int], ...]  # (body, op of it for which a control edge waits)


class Source(NamedTuple):
    """What an op without a task hands on.

    Attributes:
        key: of a tensor's value: its number, or ``~number`` for its value of the whole mini-batch; of a wait by control edges:
            the number of the op that waits.
        is_wait: which of both it is.
        is_repeated: whether it is read several times.
    """

    key: int
    is_wait: bool = False
    is_repeated: bool = False


class Operand(NamedTuple):
    """Attributes:
    key: of a tensor's value; see :class:`Source`.
    tensor: the tensor that the op itself reads.
    overwritten: the tensor whose buffer the task may overwrite; -1: none.
    """

    key: int
    tensor: int
    overwritten: int


class Result(NamedTuple):
    """A tensor that a task makes, or a variable's value, which exists from the start.

    Attributes:
        task: place of the task among the body's; -1: none.
        shared: the tensor whose buffer it shares; -1: none.
        category: of its own buffer; empty: it needs none.
        size: bytes of a call's share.
        workspace: bytes that its kernel keeps with it.
    """

    tensor: int
    name: str
    task: int
    shard: int
    shared: int
    category: str
    size: float
    workspace: float = 0.0


class Task(NamedTuple):
    """An op that takes time."""

    piece: Piece
    kernel: Kernel
    operands: Tuple[Operand, ...]
    results: Tuple[Result, ...]


class BodyTasks(NamedTuple):
    """Attributes:
    tasks: in the order of the graph.
    names, blocks, seconds, limits: of the tasks, as in :class:`whale_tf.simulator.tasks.Tasks`.
    places: op -> place of its task.
    results: tensor of a task or variable -> its record.
    sources: op without a task -> what it hands on.
    controls: op -> what its control edges wait for.
    """

    tasks: Tuple[Task, ...]
    names: Tuple[str, ...]
    blocks: Tuple[BlockKey, ...]
    seconds: Tuple[float, ...]
    limits: Tuple[str, ...]
    places: Mapping[int, int]
    results: Mapping[int, Result]
    sources: Mapping[int, Tuple[Source, ...]]
    controls: Mapping[int, Controls]


def tasks_of(facts: CallFacts, number: int) -> BodyTasks:
    """The tasks of a call's body."""
    return _Builder(facts, number).build()


class _Builder:
    def __init__(self, facts: CallFacts, number: int) -> None:
        self.facts, self.number = facts, number
        self.pieces = facts.pieces[facts.program.calls[number].body]
        self.kernels = {op: facts.costs.kernel(piece.op, facts.parts[number], facts.device_at(number, piece.shard))
                        for op, piece in self.pieces.items()}
        ops = [op for op in self.pieces if self.kernels[op].seconds]
        self.places = {op: place for place, op in enumerate(ops)}
        self.controls = {op: found for op, piece in self.pieces.items() for found in [self._controls(piece)] if found}
        self.results: Dict[int, Result] = {}
        self.sources: Dict[int, Tuple[Source, ...]] = {}
        self.passed_on: Dict[int, int] = {}  # tensor -> the one whose buffer ops without a task pass on, one after another

    def build(self) -> BodyTasks:
        for op in sorted(self.pieces):  # operands come first; a called body's pieces may be in another order
            self._follow(self.pieces[op])
        tasks = tuple([self._task(self.pieces[op]) for op in self.places])
        about = [self.facts.about(self.number, task.piece.op.name, self.facts.step_of_op(self.number, task.piece.op))
                 for task in tasks]
        return BodyTasks(tasks, tuple([one.name for one in about]), tuple([(one.task_graph, one.label) for one in about]),
                         tuple([task.kernel.seconds for task in tasks]), tuple([task.kernel.limit for task in tasks]),
                         self.places, self.results, self.sources, self.controls)

    def _controls(self, piece: Piece) -> Controls:
        """Ops of calls of the same TaskGraph.  A called body leaves out what nobody needs."""
        facts, task_graph = self.facts, self.facts.body(self.number).task_graph
        bodies = [(facts.body_of[op], op) for op in piece.op.control_inputs if op in facts.body_of]
        return tuple([(body, op) for body, op in bodies
                      if facts.program.bodies[body].task_graph == task_graph and op in facts.pieces[body]])

    def _follow(self, piece: Piece) -> None:
        op, kernel = piece.op, self.kernels[piece.op.id]
        is_variable = any((tensor, False) not in self.facts.sources[self.number] for tensor in piece.variables)
        if op.id not in self.places:
            self.sources[op.id] = self._handed_on(piece)
            if op.inputs and (kernel.shares or kernel.overwrites):
                self.passed_on.update(dict.fromkeys(op.outputs, self.passed_on.get(op.inputs[0], op.inputs[0])))
        if op.id in self.places or is_variable:
            for tensor in op.outputs:
                self.results[tensor] = self._result(piece, tensor, is_variable)

    def _handed_on(self, piece: Piece) -> Tuple[Source, ...]:
        found: Dict[Source, bool] = {}
        for tensor, is_whole in piece.inputs:
            producer = self.facts.graph.tensors[tensor].op
            sources = () if is_whole or tensor in self.results else self.sources.get(producer, ())
            for source in sources or [Source(~tensor if is_whole else tensor)]:
                plain = source._replace(is_repeated=False)
                found[plain] = source.is_repeated or plain in found
        if piece.op.id in self.controls:
            found[Source(piece.op.id, is_wait=True)] = False
        return tuple([source._replace(is_repeated=is_repeated) for source, is_repeated in found.items()])

    def _result(self, piece: Piece, tensor: int, is_variable: bool) -> Result:
        """An op that only reads a variable returns that very memory."""
        op, category, shared = piece.op, "", -1
        if op.id in self.places and self.facts.step_of(self.number) in WITH_BUFFERS and not (is_variable and op.type in READS):
            is_gradient = self.facts.step_of_op(self.number, op) in (BACKWARD, WEIGHT)
            category = "gradients of activations" if is_gradient else "activations"
            category = "gradients" if tensor in self.facts.gradients else category
            if op.outputs[0] == tensor and op.inputs and self.kernels[op.id].shares:
                shared = self.passed_on.get(op.inputs[0], op.inputs[0])
        return Result(tensor, op.name, self.places.get(op.id, -1), piece.shard, shared, category,
                      self.facts.size_of(self.number, tensor), self.kernels[op.id].workspace if op.outputs[0] == tensor else 0.0)

    def _task(self, piece: Piece) -> Task:
        kernel = self.kernels[piece.op.id]
        operands = [Operand(self._key(tensor, is_whole), tensor,
                            self.passed_on.get(tensor, tensor) if kernel.overwrites else -1) for tensor, is_whole in piece.inputs]
        return Task(piece, kernel, tuple(operands), tuple([self.results[tensor] for tensor in piece.op.outputs]))

    def _key(self, tensor: int, is_whole: bool) -> int:
        """The key of a value, which is its only source's if an op without a task hands it on."""
        if is_whole:
            return ~tensor
        sources = () if tensor in self.results else self.sources.get(self.facts.graph.tensors[tensor].op, ())
        if len(sources) == 1 and not (sources[0].is_wait or sources[0].is_repeated):
            return sources[0].key
        return tensor
