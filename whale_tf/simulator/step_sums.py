"""Sums of gradients in a captured step: over micro-batches, copies and processes, as the rewriter and communicators make them."""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.simulator.calibration import MEMORY
from whale_tf.simulator.configs import REPLICATED, OpAxis, OpConfig, TensorAxis, TensorConfig
from whale_tf.simulator.costs import OpEstimator
from whale_tf.simulator.program import (
    COMPUTATION,
    FEATURE,
    GRADIENT,
    UPDATE,
    BlockKey,
    Buffer,
    Instruction,
    Parts,
    equal_parts,
)
from whale_tf.simulator.step_graph import StepGraph, StepTensor
from whale_tf.simulator.strategy_tree import Strategy
from whale_tf.simulator.transformation import ALL_REDUCE, Group


class Source(NamedTuple):
    """Where an executed op's result is: its instruction and which of its outputs, buffer (-1: none of its own), tensor and
    config."""

    instruction: int
    output: int
    buffer: int
    tensor: StepTensor
    config: TensorConfig


class StepState:
    """What a compilation has emitted so far.

    Attributes:
        values: (op number, which of its outputs) -> where it is; several for what an op that does not run by itself reads.
        ended: of every op so far, the instructions that those wait for which wait for it, with their devices.
        sent: communication -> the instruction whose result it sends, or the communication before it that sends the same.
        limits: per instruction, what limits its speed.
        static_bytes: per device and category, what is held for the whole step.
    """

    def __init__(self, strategy: Strategy, step: StepGraph, cluster: Cluster, estimator: OpEstimator) -> None:
        self.strategy, self.step, self.cluster, self.estimator = strategy, step, cluster, estimator
        self.instructions: List[Instruction] = []
        self.buffers: List[Buffer] = []
        self.blocks: Dict[BlockKey, List[int]] = {}
        self.limits: List[str] = []
        self.values: Dict[Tuple[int, int], List[Source]] = {}
        self.ended: List[Dict[int, Tuple[int, ...]]] = []
        self.sent: Dict[int, int] = {}
        self.static_bytes: Dict[int, Dict[str, float]] = {d: {} for stage in strategy.stages for d in stage.devices}
        self.stage_of = {op: number for number, stage in enumerate(strategy.stages) for op in stage.ops}
        self.stage_of_device = {d: number for number, stage in enumerate(strategy.stages) for d in stage.devices}
        self._parts: Dict[OpConfig, Parts] = {}

    def memory_s(self, device: int, size: float) -> float:
        return self.estimator.roofline(self.cluster.devices[device], 0.0, size)

    @staticmethod
    def instruction(name: str, block: BlockKey, lane: int, label: str) -> Instruction:
        return Instruction(-1, name, block, lane, label)

    def place(self, instruction: Instruction, limit: str) -> None:
        instruction.id = len(self.instructions)
        self.instructions.append(instruction)
        self.limits.append(limit)
        self.blocks.setdefault(instruction.block, []).append(instruction.id)

    def copied(self, name: str, block: BlockKey, config: OpConfig, before: Sequence[int], reads: Sequence[int],
               sizes: Sequence[float], category: str) -> Tuple[int, int]:
        """An op that reads ``sizes`` bytes on the config's devices and writes them to one tensor: (instruction, buffer)."""
        instruction = self.instruction(name, block, COMPUTATION, block[1])
        instruction.dependencies += before
        instruction.reads += reads
        instruction.parts = parts = self.parts_of(config)
        instruction.seconds = tuple(self.memory_s(config.devices[first], 2.0 * sizes[first]) for first in parts.first)
        self.place(instruction, MEMORY)
        self.buffers.append(Buffer(name, category, instruction.id, parts, tuple(sizes[first] for first in parts.first)))
        return instruction.id, len(self.buffers) - 1

    def wait(self, instruction: Instruction, where: Tuple[int, ...], waits: Mapping[int, Tuple[int, ...]]) -> None:
        """For instructions on the same devices, ``where``; what an update makes is at hand from the start."""
        instruction.dependencies += [
            made for made, devices in waits.items()
            if devices == where and made not in instruction.dependencies and self.instructions[made].block[1] != UPDATE]

    def and_senders(self, instruction: int) -> List[int]:
        """With what a communication sends, and others of it: a device that only sends waits for that alone."""
        found = [instruction]
        while found[-1] in self.sent:
            found.append(self.sent[found[-1]])
        return found

    def parts_of(self, config: OpConfig) -> Parts:
        if config not in self._parts:
            self._parts[config] = equal_parts(config, [self.cluster.devices[device].type for device in config.devices])
        return self._parts[config]


class GradientSums:
    """Args:
    buckets: names of the variables whose gradients go between processes in one message.
    """

    def __init__(self, compiler: StepState, buckets: Sequence[Sequence[str]]) -> None:
        self.compiler = compiler
        self.buckets = buckets
        self.gradients: Dict[Tuple[int, int], Source] = {}  # instruction that makes a gradient, and output -> its sum
        self.turns: Dict[Tuple[int, ...], int] = {}

    def whole(self, source: Source, wanted: Tuple[int, ...], is_summed: bool) -> Source:
        """What leaves the micro-batches: added over them, then over the copies, for the devices that want it.

        Args:
            is_summed: whether clones' values add up; rows of sparse gradients do not.
        """
        key = source.instruction, source.output
        if key not in self.gradients:
            together = self._bucket_of(source)
            summed = [self._over_micro_batches(one) if is_summed else one for one in together]
            for one, total in zip(together, self._over_copies(summed, wanted)):
                self.gradients[one.instruction, one.output] = total
        return self.gradients[key]

    def _bucket_of(self, source: Source) -> List[Source]:
        """Gradients that go between processes in one message with this one: the plan's buckets."""
        if len({self.compiler.cluster.devices[device].node for device in source.config.devices}) > 1:
            made = [(name, self.compiler.values.get((op, output))) for name, op, output in self.compiler.step.gradients]
            by_name = {name: sources[0] for name, sources in made if sources}
            for bucket in self.buckets:
                members = [by_name[name] for name in bucket if name in by_name]
                if any(one[:2] == source[:2] for one in members):
                    return members
        return [source]

    def _over_micro_batches(self, source: Source) -> Source:
        if self.compiler.strategy.num_micro_batch == 1 or not source.tensor.bytes:
            return source
        producer = self.compiler.instructions[source.instruction]
        name = named_output(producer.name, source.output) + " (sum)"
        instruction = self.compiler.instruction(name, producer.block, COMPUTATION, "backward")
        instruction.dependencies.append(source.instruction)
        if source.buffer >= 0:
            instruction.reads.append(source.buffer)
        config = OpConfig(source.config.devices, ())
        self.compiler.wait(instruction, config.devices, self._waits(source))
        instruction.parts = self.compiler.parts_of(config)
        size = 3.0 * source.tensor.bytes
        instruction.seconds = tuple(self.compiler.memory_s(config.devices[first], size) for first in instruction.parts.first)
        instruction.is_running_sum = True
        self.compiler.place(instruction, MEMORY)
        return source._replace(instruction=instruction.id, config=everywhere(config.devices))

    def _waits(self, source: Source) -> Mapping[int, Tuple[int, ...]]:
        """What a gradient waits for before it leaves its clone: TensorFlow hands on all gradients of an op together."""
        for _, number, output in self.compiler.step.gradients:
            if any(one.instruction == source.instruction for one in self.compiler.values.get((number, output), ())):
                return self.compiler.ended[number]
        return {}

    def _over_copies(self, together: Sequence[Source], wanted: Tuple[int, ...]) -> List[Source]:
        """Where one device of each node wants the sum (shared variables) it is made there; else a device that takes turns makes
        it and sends it back."""
        devices = together[0].config.devices
        if len(devices) == 1:
            return list(together)
        by_node: Dict[int, List[int]] = {}
        for device in devices:
            by_node.setdefault(self.compiler.cluster.devices[device].node, []).append(device)
        nodes = list(by_node.values())
        asked = [[device for device in members if device in wanted] for members in nodes]
        is_shared = len(wanted) < len(devices) and all(len(row) == 1 for row in asked)
        if is_shared:
            places = [row[0] for row in asked]
        else:
            turn = self.turns.get(devices, 0)
            self.turns[devices] = turn + 1
            places = [members[turn % len(members)] for members in nodes]
        totals = [self._sum_in_nodes(source, places, nodes) for source in together]
        buffer = -1
        if len(places) > 1:
            reduced, buffer = self._between_nodes(together, totals, places)
            totals = [reduced] * len(totals)
        if is_shared:
            there = everywhere(tuple(places))
            return [Source(total, source.output, buffer, source.tensor, there) for source, total in zip(together, totals)]
        return [self._send_back(source, total, buffer, places, nodes) for source, total in zip(together, totals)]

    def _sum_in_nodes(self, source: Source, places: Sequence[int], nodes: Sequence[Sequence[int]]) -> int:
        """The copies' values added on one device of each node; returns the instruction that adds."""
        producer, terms = self.compiler.instructions[source.instruction], max(map(len, nodes))
        if terms == 1:
            return source.instruction
        name = producer.name if producer.is_running_sum else named_output(producer.name, source.output)
        total = self.compiler.instruction(name + " (copies)", self._update_of(places), COMPUTATION, "update")
        total.dependencies.append(source.instruction)
        for number in range(terms - 1):
            arrive = self.compiler.instruction("to sum", self._update_of(places), FEATURE, "send_recv")
            arrive.dependencies.append(source.instruction)
            others = [_others(members, place) for members, place in zip(nodes, places)]
            arrive.groups = tuple(_pair(there[number], place) for there, place in zip(others, places) if len(there) > number)
            arrive.size_bytes = source.tensor.bytes
            if source.buffer >= 0:
                arrive.reads.append(source.buffer)
            self.compiler.place(arrive, MEMORY)
            total.dependencies.append(arrive.id)
        if source.buffer >= 0:
            total.reads.append(source.buffer)
        if producer.is_running_sum:  # TensorFlow's graph optimizer makes one op of this sum and the last addition before it
            producer.leaves_last = tuple(places)
            total.reads_last.append(source.buffer)
            terms += 1
        config = OpConfig(tuple(places), (OpAxis(len(places), None),) if len(places) > 1 else ())
        total.parts = self.compiler.parts_of(config)
        size = (terms + 1.0) * source.tensor.bytes
        total.seconds = tuple(self.compiler.memory_s(places[first], size) for first in total.parts.first)
        self.compiler.place(total, MEMORY)
        return total.id

    def _between_nodes(self, together: Sequence[Source], totals: Sequence[int], places: Sequence[int]) -> Tuple[int, int]:
        """One all-reduce: its instruction, and the buffer of its result; several gradients are copied into one tensor before,
        and out of it behind."""
        size = sum(source.tensor.bytes for source in together)
        config = OpConfig(tuple(places), (OpAxis(len(places), None),))
        block = self._update_of(places)
        before = list(totals)
        reads = [source.buffer for source in together if source.buffer >= 0]
        if len(together) > 1:
            before, reads = [self._copied("into bucket", config, before, reads, size)], []
        reduce = self.compiler.instruction("all-reduce", block, GRADIENT, ALL_REDUCE)
        reduce.dependencies += before
        reduce.reads += reads
        reduce.groups = (Group(tuple(sorted(places))),)
        reduce.size_bytes = size
        self.compiler.place(reduce, MEMORY)
        parts = self.compiler.parts_of(config)
        self.compiler.buffers.append(Buffer("summed gradients", "gradient buckets", reduce.id, parts, (size,) * len(parts.first)))
        buffer = len(self.compiler.buffers) - 1
        if len(together) == 1:
            return reduce.id, buffer
        return self._copied("out of bucket", config, [reduce.id], [buffer], size), buffer

    def _copied(self, name: str, config: OpConfig, before: Sequence[int], reads: Sequence[int], size: float) -> int:
        sizes = (size,) * len(config.devices)
        return self.compiler.copied(name, self._update_of(config.devices), config, before, reads, sizes, "gradient buckets")[0]

    def _update_of(self, places: Sequence[int]) -> BlockKey:
        return self.compiler.stage_of_device[places[0]], UPDATE

    def _send_back(
        self, source: Source, total: int, buffer: int, places: Sequence[int], nodes: Sequence[Sequence[int]]
    ) -> Source:
        if max(map(len, nodes)) > 1:
            leave = self.compiler.instruction("from sum", self._update_of(places), FEATURE, "send_recv")
            leave.dependencies.append(total)
            leave.groups = tuple(
                _pair(place, other) for members, place in zip(nodes, places) for other in _others(members, place))
            leave.size_bytes = source.tensor.bytes
            self.compiler.place(leave, MEMORY)
            self.compiler.sent[leave.id] = total
            total = leave.id
        return Source(total, source.output, buffer, source.tensor, everywhere(source.config.devices))


def _others(members: Sequence[int], place: int) -> List[int]:
    return [device for device in members if device != place]


def _pair(sender: int, receiver: int) -> Group:
    return Group(tuple(sorted((sender, receiver))), ((sender, receiver, 1.0),))


def everywhere(devices: Tuple[int, ...]) -> TensorConfig:
    return TensorConfig(devices, (TensorAxis(len(devices), REPLICATED),) if len(devices) > 1 else ())


def named_output(name: str, output: int) -> str:
    """As TensorFlow names it, without the zero of an op's first result."""
    return f"{name}:{output}" if output else name
