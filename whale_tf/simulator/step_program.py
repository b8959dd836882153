"""A captured step under a plan as a program: clones, crossings, sums of gradients and updates, as the rewriter makes them.

One instruction per op of the step graph; every clone of it is a task.  What the rewriter adds stands beside them::

    tensors that cross devices      send and receive
    gradients                       added over micro-batches (rewrite/merge.py), then over copies on a device that takes
                                    turns (communicators/local.py), then sent back
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.simulator.calibration import ARITHMETIC, MEMORY
from whale_tf.simulator.configs import REPLICATED, OpConfig, TensorAxis, TensorConfig, coordinates, op_fractions
from whale_tf.simulator.costs import OpEstimator
from whale_tf.simulator.program import (
    BACKWARD,
    COMPUTATION,
    FEATURE,
    FORWARD,
    UPDATE,
    BlockKey,
    Buffer,
    Instruction,
    Parts,
    Program,
)
from whale_tf.simulator.step_graph import PER_MICRO_BATCH, UPDATES, StepGraph, StepOp, StepTensor
from whale_tf.simulator.strategy_tree import Strategy
from whale_tf.simulator.transformation import Group, transformation

NEW_OPS = "shards"  # ops that `wh.split` adds beside the local script's


class Source(NamedTuple):
    """Where an executed op's result is: its instruction, buffer (-1: none of its own), tensor and config."""

    instruction: int
    buffer: int
    tensor: StepTensor
    config: TensorConfig


class StepCompiler:
    """Args:
    strategy: see :func:`whale_tf.simulator.from_plan.strategy_of_step`; its model's ops are the step graph's, in order.
    examples: of one micro-batch over all copies.
    """

    def __init__(
        self, strategy: Strategy, step: StepGraph, cluster: Cluster, estimator: OpEstimator, examples: float
    ) -> None:
        self.strategy, self.step, self.cluster, self.estimator, self.examples = strategy, step, cluster, estimator, examples
        self.totals: Dict[str, Tuple[float, float]] = {}
        for op in step.ops:
            flops, size = self.totals.get(op.origin, (0.0, 0.0))
            self.totals[op.origin] = flops + op.flops, size + op.size_bytes
        self.instructions: List[Instruction] = []
        self.buffers: List[Buffer] = []
        self.blocks: Dict[BlockKey, List[int]] = {}
        self.limits: List[str] = []
        self.values: Dict[Tuple[int, int], List[Source]] = {}
        self.moved: Dict[Tuple[int, Tuple[int, ...], bool], Source] = {}
        self.gradients: Dict[int, Source] = {}  # instruction that makes a gradient -> its sum
        self.turns: Dict[Tuple[int, ...], int] = {}
        self.static_bytes: Dict[int, Dict[str, float]] = {d: {} for stage in strategy.stages for d in stage.devices}
        self.stage_of = {op: number for number, stage in enumerate(strategy.stages) for op in stage.ops}
        self.stage_of_device = {d: number for number, stage in enumerate(strategy.stages) for d in stage.devices}
        self._parts: Dict[OpConfig, Parts] = {}

    def run(self) -> Program:
        for number in range(len(self.step.ops)):
            self._op(number)
        self._variables()
        return Program(self.strategy, tuple(self.instructions), tuple(self.buffers), self.blocks, self.static_bytes, True,
                       tuple(self.limits))  # fmt: skip

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def _op(self, number: int) -> None:
        op, config = self.step.ops[number], self.strategy.op_configs[number]
        seconds = self._seconds(op, config)
        before = [source for key in op.inputs for source in self.values.get(key, ())]
        if seconds is None:  # folded, or fused into an op that reads its results: those wait for what this one reads
            for place in range(len(op.outputs)):
                self.values[number, place] = before
            return
        phase = UPDATE if op.runs != PER_MICRO_BATCH else BACKWARD if op.late else FORWARD
        instruction = self._instruction(op.name, (self.stage_of[number], phase), COMPUTATION, self._label(op))
        for source in before:
            found = self._at(source, config, phase)
            if found is not None:
                instruction.dependencies.append(found.instruction)
                if found.buffer >= 0:
                    instruction.reads.append(found.buffer)
        instruction.parts = self._parts_of(config)
        instruction.seconds = seconds
        self._place(instruction, ARITHMETIC if op.contraction else MEMORY)
        for place, tensor in enumerate(op.outputs):
            taken = [s for s in before if s.buffer >= 0] if op.alias and place == 0 else []
            kept = op.runs == PER_MICRO_BATCH and tensor.bytes > 0
            buffer = taken[0].buffer if taken else self._buffer(instruction, op, tensor, config) if kept else -1
            self.values[number, place] = [Source(instruction.id, buffer, tensor, _config_of(tensor, config))]

    @staticmethod
    def _label(op: StepOp) -> str:
        return "update" if op.runs == UPDATES else "backward" if op.late else "forward"

    def _seconds(self, op: StepOp, config: OpConfig) -> Optional[Tuple[float, ...]]:
        """Per class of the config's parts; None: the op does not run by itself."""
        parts = self._parts_of(config)
        shares = op_fractions(config)
        found: List[float] = []
        for first in parts.first:
            fraction = shares[first] if op.runs == PER_MICRO_BATCH else 1.0
            batch = self.examples * fraction
            measured = self.step.time_of(op, batch)
            if measured is not None:
                found.append(measured * self._part_of_op(op))
            elif op.origin.startswith(NEW_OPS) and op.size_bytes > 0:
                scale = batch / self.step.batch if op.runs == PER_MICRO_BATCH else 1.0
                device = self.cluster.devices[config.devices[first]]
                found.append(self.estimator.roofline(device, op.flops * scale, op.size_bytes * scale, op.contraction))
            else:
                return None
        return tuple(found)

    def _part_of_op(self, op: StepOp) -> float:
        """Which part of the local script's op this one is: its FLOPs, or bytes, of those of all its parts."""
        flops, size = self.totals[op.origin]
        if op.contraction and flops:
            return op.flops / flops
        return op.size_bytes / size if size else 1.0

    # ---- tensors where they are needed -------------------------------------------------------------------------------

    def _at(self, source: Source, config: OpConfig, phase: str) -> Optional[Source]:
        """The source on the devices of ``config``; sums and gathers what has to be whole for an update."""
        made = self.instructions[source.instruction].block[1]
        if made == UPDATE and phase != UPDATE:
            return None  # values of variables: at hand from the start
        if made != UPDATE and phase == UPDATE:
            source = self._whole(source, config.devices)
        if source.config.devices == config.devices:
            return source
        wanted = _config_of(source.tensor, config) if phase != UPDATE else _everywhere(config.devices)
        key = (source.instruction, config.devices, phase == UPDATE)
        if key not in self.moved:
            self.moved[key] = self._send(source, wanted)
        return self.moved[key]

    def _send(self, source: Source, wanted: TensorConfig) -> Source:
        found = source
        for step in transformation(source.config.summed(), wanted):
            if not step.groups:
                continue
            producer = self.instructions[found.instruction]
            instruction = self._instruction(producer.name, producer.block, FEATURE, step.kind)
            instruction.dependencies.append(found.instruction)
            if found.buffer >= 0:
                instruction.reads.append(found.buffer)
            instruction.groups = step.groups
            instruction.size_bytes = self._scaled(source.tensor) * step.fraction if step.kind != "send_recv" else self._scaled(
                source.tensor)  # fmt: skip
            self._place(instruction, MEMORY)
            found = Source(instruction.id, found.buffer if self._shared_memory(step.groups) else -1, source.tensor, step.result)
        return found

    def _shared_memory(self, groups: Sequence[Group]) -> bool:
        """CPU devices of one process hand tensors over without copying them."""
        devices = [self.cluster.devices[device] for group in groups for device in group.devices]
        return len({device.node for device in devices}) == 1 and all(device.kind == "CPU" for device in devices)

    def _scaled(self, tensor: StepTensor) -> float:
        """Bytes of one micro-batch over all copies."""
        return tensor.bytes * self.examples / self.step.batch if tensor.divided else tensor.bytes

    # ---- sums of gradients -------------------------------------------------------------------------------------------

    def _whole(self, source: Source, wanted: Tuple[int, ...]) -> Source:
        """What leaves the micro-batches: added over them, then over the copies, for the devices that want it."""
        if source.instruction not in self.gradients:
            self.gradients[source.instruction] = self._over_copies(self._over_micro_batches(source), wanted)
        return self.gradients[source.instruction]

    def _over_micro_batches(self, source: Source) -> Source:
        count = self.strategy.num_micro_batch
        if count == 1 or not source.tensor.bytes:
            return source
        producer = self.instructions[source.instruction]
        instruction = self._instruction(producer.name + " (sum)", producer.block, COMPUTATION, "backward")
        instruction.dependencies.append(source.instruction)
        if source.buffer >= 0:
            instruction.reads.append(source.buffer)
        config = OpConfig(source.config.devices, ())
        instruction.parts = self._parts_of(config)
        share = (count - 1.0) / count  # the first micro-batch's gradient is the sum so far
        size = 3.0 * source.tensor.bytes * share
        instruction.seconds = tuple(self._memory_s(config.devices[first], size) for first in instruction.parts.first)
        self._place(instruction, MEMORY)
        for device in config.devices:
            held = self.static_bytes[device]
            held["gradients"] = held.get("gradients", 0.0) + source.tensor.bytes
        return Source(instruction.id, -1, source.tensor, _everywhere(config.devices))

    def _over_copies(self, source: Source, wanted: Tuple[int, ...]) -> Source:
        devices = source.config.devices
        if len(devices) == 1:
            return source
        is_shared = len(wanted) == 1 and wanted[0] in devices
        if is_shared:
            place = wanted[0]
        else:
            turn = self.turns.get(devices, 0)
            self.turns[devices] = turn + 1
            place = devices[turn % len(devices)]
        others = [device for device in devices if device != place]
        stage = self.stage_of_device[place]
        size = source.tensor.bytes
        arrive = self._instruction("to sum", self.instructions[source.instruction].block, FEATURE, "send_recv")
        arrive.dependencies.append(source.instruction)
        arrive.groups = (Group(tuple(sorted(devices)), tuple((other, place, 1.0) for other in others)),)
        arrive.size_bytes = size
        if source.buffer >= 0:
            arrive.reads.append(source.buffer)
        self._place(arrive, MEMORY)
        name = self.instructions[source.instruction].name + " (copies)"
        total = self._instruction(name, (stage, UPDATE), COMPUTATION, "update")
        total.dependencies += [source.instruction, arrive.id]
        total.parts = Parts((place,), (0,), (0,))
        total.seconds = (self._memory_s(place, (len(devices) + 1.0) * size),)
        if source.buffer >= 0:
            total.reads.append(source.buffer)
        self._place(total, MEMORY)
        if is_shared:
            return Source(total.id, -1, source.tensor, _everywhere(wanted))
        leave = self._instruction("from sum", (stage, UPDATE), FEATURE, "send_recv")
        leave.dependencies.append(total.id)
        leave.groups = (Group(tuple(sorted(devices)), tuple((place, other, 1.0) for other in others)),)
        leave.size_bytes = size
        self._place(leave, MEMORY)
        return Source(leave.id, -1, source.tensor, _everywhere(devices))

    def _memory_s(self, device: int, size: float) -> float:
        return self.estimator.roofline(self.cluster.devices[device], 0.0, size)

    # ---- instructions and buffers ------------------------------------------------------------------------------------

    @staticmethod
    def _instruction(name: str, block: BlockKey, lane: int, label: str) -> Instruction:
        return Instruction(-1, name, block, lane, label)

    def _place(self, instruction: Instruction, limit: str) -> None:
        instruction.id = len(self.instructions)
        self.instructions.append(instruction)
        self.limits.append(limit)
        self.blocks.setdefault(instruction.block, []).append(instruction.id)

    def _buffer(self, instruction: Instruction, op: StepOp, tensor: StepTensor, config: OpConfig) -> int:
        parts, shares = self._parts_of(config), op_fractions(config)
        size = self._scaled(tensor)
        sizes = tuple(size * shares[first] if tensor.divided else size for first in parts.first)
        category = "gradients of activations" if op.late else "activations"
        self.buffers.append(Buffer(op.name, category, instruction.id, parts, sizes))
        instruction.writes.append(len(self.buffers) - 1)
        return len(self.buffers) - 1

    def _parts_of(self, config: OpConfig) -> Parts:
        """Classes of equal parts: same device type, same place along every axis with unequal slices."""
        if config not in self._parts:
            unequal = [i for i, axis in enumerate(config.axes) if axis.slices is not None]
            points = coordinates(tuple(axis.degree for axis in config.axes)) or ((),) * len(config.devices)
            numbers: Dict[Tuple, int] = {}
            kinds, first = [], []
            for position, device in enumerate(config.devices):
                point = points[position] if position < len(points) else ()
                what = (self.cluster.devices[device].type,) + tuple(point[i] for i in unequal)
                if what not in numbers:
                    numbers[what] = len(numbers)
                    first.append(position)
                kinds.append(numbers[what])
            self._parts[config] = Parts(config.devices, tuple(kinds), tuple(first))
        return self._parts[config]

    def _variables(self) -> None:
        devices_of: Dict[Tuple[int, int], Tuple[int, ...]] = {}
        fewest_first = sorted(zip(self.step.ops, self.strategy.op_configs), key=lambda pair: len(pair[1].devices))
        for op, config in fewest_first:  # what runs once a step runs where the variables are
            devices_of.setdefault((op.task_graph, op.shard), config.devices)
        for variable in self.step.variables:
            for device in devices_of.get((variable.task_graph, variable.shard), ()):
                held = self.static_bytes[device]
                held["parameters"] = held.get("parameters", 0.0) + variable.bytes


def _config_of(tensor: StepTensor, config: OpConfig) -> TensorConfig:
    """Clones hold their examples' parts of a divided tensor, and values of their own of any other."""
    if not tensor.divided:
        return _everywhere(config.devices)
    axes = (TensorAxis(axis.degree, 0 if axis.dim else REPLICATED, axis.slices) for axis in config.axes)
    return TensorConfig(config.devices, tuple(axes))


def _everywhere(devices: Tuple[int, ...]) -> TensorConfig:
    return TensorConfig(devices, (TensorAxis(len(devices), REPLICATED),) if len(devices) > 1 else ())
