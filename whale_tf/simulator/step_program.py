"""A captured step under a plan as a program: clones, crossings, sums of gradients and updates, as the rewriter makes them.

One instruction per op of the step graph; every clone of it is a task.  What the rewriter adds stands beside them::

    tensors that cross devices      send and receive
    gradients                       added over micro-batches (emit/merge.py), then over the copies of a process on a device
                                    that takes turns (communicators/local.py), between processes by an all-reduce of a
                                    bucket (communicators/processes.py), then sent back
"""

from __future__ import annotations

from typing import Dict, FrozenSet, List, Mapping, Optional, Sequence, Set, Tuple

from whale_tf.bridges import crossing, cuts
from whale_tf.cluster import Cluster
from whale_tf.plan import Plan
from whale_tf.simulator.calibration import ARITHMETIC, MEMORY
from whale_tf.simulator.configs import REPLICATED, OpAxis, OpConfig, TensorAxis, TensorConfig, fractions, op_fractions
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
    Program,
)
from whale_tf.simulator.step_graph import FOR_ALL, PER_MICRO_BATCH, UPDATES, StepGraph, StepOp, StepTensor
from whale_tf.simulator.step_sums import GradientSums, Source, StepState, everywhere, named_output
from whale_tf.simulator.strategy_tree import Strategy
from whale_tf.simulator.transformation import SEND_RECV, Pair, connected, one_by_one

NEW_OPS = "shards"  # ops that `wh.split` adds beside the local script's


class StepCompiler(StepState):
    """Args:
    strategy: see :func:`whale_tf.simulator.from_plan.strategy_of_step`; its model's ops are the step graph's, in order.
    examples: of one micro-batch over all copies.
    plan: that the strategy stands for.
    """

    def __init__(
        self,
        strategy: Strategy,
        step: StepGraph,
        cluster: Cluster,
        estimator: OpEstimator,
        examples: float,
        plan: Plan,
    ) -> None:
        super().__init__(strategy, step, cluster, estimator)
        self.examples = examples
        self.totals: Dict[str, Tuple[float, float]] = {}
        for op in step.ops:
            flops, size = self.totals.get(op.origin, (0.0, 0.0))
            self.totals[op.origin] = flops + op.flops, size + op.size_bytes
        self.held: Dict[Tuple[int, int], int] = {}  # value -> the buffer it is in, -1: none of its own
        self.moved: Dict[Tuple[int, int, Tuple[int, ...], bool, FrozenSet[int]], Source] = {}
        self.folded: Set[int] = set()  # ops that do not run by themselves
        self.gradients = {(op, output) for _, op, output in step.gradients}
        self.model_replicas = plan.num_model_replicas
        clones, copies = ({(op.task_graph, op.shard): config.devices for op, config in zip(step.ops, strategy.op_configs)
                           if op.runs == runs} for runs in (PER_MICRO_BATCH, UPDATES))  # fmt: skip
        self.copies = {clones[key]: devices for key, devices in copies.items() if key in clones}  # who gets sums of gradients
        self.sums = GradientSums(self, [bucket for gradients in plan.gradients for bucket in gradients.buckets])

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
        folded = [source for source, _ in op.inputs if source in self.folded]
        waits = {made: devices for source in folded + list(op.waits) for made, devices in self.ended[source].items()}
        overwritten = self.held.get(op.inputs[0], -1) if op.alias and op.inputs else -1  # what it reads may be no op of the step
        if seconds is None:  # folded, or fused into an op that reads its results: those wait for what this one reads
            for place in range(len(op.outputs)):
                self.values[number, place] = before
            self.held[number, 0] = overwritten
            waits.update((source.instruction, source.config.devices) for source in before)
            self.ended.append(waits)
            self.folded.add(number)
            return
        phase = UPDATE if op.runs != PER_MICRO_BATCH else BACKWARD if op.late else FORWARD
        instruction = self.instruction(op.name, (self.stage_of[number], phase), COMPUTATION, self._label(op))
        for key in op.inputs:
            handed_on_after = self.ended[key[0]] if key[0] in self.folded else {}
            is_summed = self.step.ops[key[0]].outputs[key[1]].summed
            for source in self.values.get(key, ()):
                found = self._at(source, config, instruction.block, handed_on_after, is_summed)
                if found is not None:
                    instruction.dependencies += self.and_senders(found.instruction)
                    if found.buffer >= 0:
                        instruction.reads.append(found.buffer)
        self.wait(instruction, config.devices, waits)
        instruction.parts = self.parts_of(config)
        instruction.seconds = seconds
        self.place(instruction, ARITHMETIC if op.contraction else MEMORY)
        self._scratch(instruction, op, config)
        for place, tensor in enumerate(op.outputs):
            buffer = overwritten if place == 0 else -1
            if buffer < 0 and op.runs == PER_MICRO_BATCH and tensor.bytes > 0:
                buffer = self._buffer(instruction, number, place, config)
            self.held[number, place] = buffer
            self.values[number, place] = [Source(instruction.id, place, buffer, tensor, _config_of(tensor, config))]
        self.ended.append({instruction.id: config.devices})

    @staticmethod
    def _label(op: StepOp) -> str:
        return "update" if op.runs in (UPDATES, FOR_ALL) else "backward" if op.late else "forward"

    def _seconds(self, op: StepOp, config: OpConfig) -> Optional[Tuple[float, ...]]:
        """Per class of the config's parts; None: the op does not run by itself."""
        parts = self.parts_of(config)
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

    def _at(self, source: Source, config: OpConfig, block: BlockKey, waits: Mapping[int, Tuple[int, ...]],
            is_summed: bool) -> Optional[Source]:
        """The source on the devices of ``config``, for an op of ``block``; what an update needs is summed and whole.

        Args:
            waits: what is waited for before the source may leave its devices, as in :attr:`ended`.
            is_summed: whether clones' values of what is read add up.
        """
        made, phase = self.instructions[source.instruction].block[1], block[1]
        if made == UPDATE and phase != UPDATE and (source.config.devices == config.devices or not source.tensor.bytes):
            return None  # values of variables: at hand from the start
        if made != UPDATE and phase == UPDATE:
            source = self.sums.whole(source, self.copies.get(source.config.devices, config.devices), is_summed)
        if source.config.devices == config.devices:
            return source
        wanted = _config_of(source.tensor, config) if phase != UPDATE else everywhere(config.devices)
        others = frozenset(waits) - {source.instruction}
        key = (source.instruction, source.output, config.devices, phase == UPDATE, others)
        if key not in self.moved:
            self.moved[key] = self._send(source, wanted, block, {made: waits[made] for made in sorted(others)})
        return self.moved[key]

    def _send(self, source: Source, wanted: TensorConfig, block: BlockKey, waits: Mapping[int, Tuple[int, ...]]) -> Source:
        pairs = self._pairs(source.config, wanted, source.tensor, block[1])
        arrived = source._replace(config=wanted)
        if not pairs:
            return arrived
        producer = self.instructions[self.and_senders(source.instruction)[-1]]
        sent_in = (producer.block[0], UPDATE) if block[1] == UPDATE else producer.block  # a sum of gradients: the last one alone
        is_shared = self._shared_memory(pairs)
        groups = connected(pairs)
        for together in one_by_one(groups) if is_shared else [groups]:
            instruction = self.instruction(named_output(producer.name, source.output), sent_in, FEATURE, SEND_RECV)
            instruction.dependencies.append(source.instruction)
            self.wait(instruction, source.config.devices, waits)
            if source.buffer >= 0:
                instruction.reads.append(source.buffer)
            instruction.groups = together
            instruction.size_bytes = self._scaled(source.tensor)
            self.place(instruction, MEMORY)
            self.sent[instruction.id] = arrived.instruction
            arrived = arrived._replace(instruction=instruction.id)
        arrived = arrived._replace(buffer=source.buffer if is_shared else -1)
        is_gathered = max(fractions(wanted)) > max(fractions(source.config))
        return self._gathered(arrived, source.buffer, block) if is_shared and is_gathered else arrived

    def _pairs(self, source: TensorConfig, wanted: TensorConfig, tensor: StepTensor, phase: str) -> List[Pair]:
        """Who sends what to whom: within a model replica, as bridges do.

        A clone takes the parts of examples that overlap its own, whole where there are several, and of one only what it needs;
        all terms of a sum; and anything else from the clone of its own number.
        """
        replicas, into = (
            1 if len(config.devices) % self.model_replicas else self.model_replicas for config in (source, wanted))
        count, number = len(source.devices) // replicas, len(wanted.devices) // into
        own = cuts(count, source.axes[-1].slices if source.axes else None)
        other = cuts(number, wanted.axes[-1].slices if wanted.axes else None)
        is_bridged = phase != UPDATE and own != other
        found: List[Pair] = []
        for place, receiver in enumerate(wanted.devices):
            g, r = divmod(place, number)
            parts = [(r % count, 1.0)]
            if is_bridged and tensor.summed:
                parts = [(one, 1.0) for one in range(count)]
            elif tensor.divided and phase != UPDATE:
                met = crossing(own, other, r)
                cut_off = len(met.producers) == 1 and not met.covers
                parts = [(one, float(other[r + 1] - other[r] if cut_off else own[one + 1] - own[one]) / replicas)
                         for one in met.producers]
            senders = [(source.devices[g % replicas * count + one], size) for one, size in parts]
            found += [(sender, receiver, size) for sender, size in senders if sender != receiver]
        return found

    def _gathered(self, source: Source, before: int, block: BlockKey) -> Source:
        """Devices that share memory hand parts over; to put them together is an op of each that wants them together."""
        axes = (OpAxis(axis.degree, None if axis.what == REPLICATED else "batch", axis.slices) for axis in source.config.axes)
        config = OpConfig(source.config.devices, tuple(axes))
        name = self.instructions[source.instruction].name + " (concat)"
        sizes = [self._scaled(source.tensor) * share for share in fractions(source.config)]
        reads = [before] if before >= 0 else []
        gathered, buffer = self.copied(name, block, config, self.and_senders(source.instruction), reads, sizes, "activations")
        return source._replace(instruction=gathered, buffer=buffer)

    def _shared_memory(self, pairs: Sequence[Pair]) -> bool:
        """CPU devices of one process hand tensors over without copying them."""
        devices = [self.cluster.devices[device] for pair in pairs for device in pair[:2]]
        return len({device.node for device in devices}) == 1 and all(device.kind == "CPU" for device in devices)

    def _scaled(self, tensor: StepTensor) -> float:
        """Bytes of one micro-batch over all copies."""
        return tensor.bytes * self.examples / self.step.batch if tensor.divided else tensor.bytes

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _scratch(self, instruction: Instruction, op: StepOp, config: OpConfig) -> None:
        parts, shares = instruction.parts, op_fractions(config)
        part = self._part_of_op(op)
        sizes = tuple(part * self.step.scratch_of(op, self.examples * shares[first]) for first in parts.first)
        if op.runs == PER_MICRO_BATCH and any(sizes):
            self.buffers.append(Buffer(op.name + " (scratch)", "scratch", instruction.id, parts, sizes))

    def _buffer(self, instruction: Instruction, number: int, place: int, config: OpConfig) -> int:
        op, tensor = self.step.ops[number], self.step.ops[number].outputs[place]
        parts, shares = self.parts_of(config), op_fractions(config)
        size = self._scaled(tensor)
        sizes = tuple(size * shares[first] if tensor.divided else size for first in parts.first)
        category = "gradients of activations" if op.late else "activations"
        if (number, place) in self.gradients:
            category = "gradients"
        self.buffers.append(Buffer(op.name, category, instruction.id, parts, sizes))
        return len(self.buffers) - 1

    def _variables(self) -> None:
        devices_of: Dict[Tuple[int, int], Tuple[int, ...]] = {}
        copied = [pair for pair in zip(self.step.ops, self.strategy.op_configs) if pair[0].runs != FOR_ALL]
        fewest_first = sorted(copied, key=lambda pair: len(pair[1].devices))
        for op, config in fewest_first:  # what runs once a step runs where the variables are
            devices_of.setdefault((op.task_graph, op.shard), config.devices)
        for variable in self.step.variables:
            for device in devices_of.get((variable.task_graph, variable.shard), ()):
                held = self.static_bytes[device]
                held["parameters"] = held.get("parameters", 0.0) + variable.bytes


def _config_of(tensor: StepTensor, config: OpConfig) -> TensorConfig:
    """Clones hold their examples' parts of a divided tensor, and values of their own of any other."""
    if not tensor.divided:
        return everywhere(config.devices)
    axes = (TensorAxis(axis.degree, 0 if axis.dim else REPLICATED, axis.slices) for axis in config.axes)
    return TensorConfig(config.devices, tuple(axes))
