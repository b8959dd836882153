"""The compiler's state, and its forward and backward passes (Proteus section V).

It walks the model forward, then backward, and keeps the configs in which each tensor is available.  If an op needs another
config, the collectives of the strategy transformation are inserted.  Gradients of parameters end in buckets, with one
collective each, and in updates.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from whale_tf.cluster import Cluster
from whale_tf.schedule import schedule_of
from whale_tf.simulator.configs import OpConfig, TensorConfig, fractions, op_fractions, tensor_config
from whale_tf.simulator.costs import OpEstimator, OpPart
from whale_tf.simulator.instructions import (
    BACKWARD,
    COMPUTATION,
    FEATURE,
    FORWARD,
    WEIGHT,
    BlockKey,
    Buffer,
    DeviceClasses,
    Instruction,
    equal_parts,
)
from whale_tf.simulator.model_graph import ACTIVATION, INPUT, KINDS, PARAMETER, ModelOp, Use
from whale_tf.simulator.strategy_tree import CompleteStrategy, parameter_uses, sharded_over_replicas
from whale_tf.simulator.transformation import SEND_RECV, Communication, host_copy, transformation


class AvailableTensor(NamedTuple):
    """An available tensor: in which config, after which instruction, in which buffer."""

    config: TensorConfig
    dependency: int
    buffer: int


Table = Dict[int, List[AvailableTensor]]


class Compiler:
    """State of one compilation; :class:`Synchroniser` continues it after the backward pass."""

    def __init__(self, strategy: CompleteStrategy, cluster: Cluster, estimator: OpEstimator) -> None:
        self.strategy = strategy
        self.model = strategy.model
        self.cluster = cluster
        self.estimator = estimator
        self.instructions: List[Instruction] = []
        self.buffers: List[Buffer] = []
        self.values: Table = {}
        self.recomputed: Table = {}
        self.gradients: Table = {}
        self.parameter_gradients: List[Tuple[int, TensorConfig, int]] = []  # (parameter, config, instruction), by readiness
        self.uses = parameter_uses(self.model)
        self.stage_of_op = {op: number for number, stage in enumerate(strategy.stages) for op in stage.ops}
        self.stage = 0  # of the op that is being compiled
        self.splits = schedule_of(strategy.schedule).splits
        self._stages_of_device: Dict[int, List[int]] = {}
        for number, stage in enumerate(strategy.stages):
            for device in stage.devices:
                self._stages_of_device.setdefault(device, []).append(number)
        self._unit_of_tensor: Dict[int, str] = {
            use.tensor: strategy.recompute[number] for number, op in enumerate(self.model.ops) for use in op.outputs}
        self._done_units: Dict[Tuple[str, int], None] = {}
        self._scratch: Dict[Tuple[int, str], int] = {}
        self._parts: Dict[Tuple, DeviceClasses] = {}
        self._gathered: Dict[Tuple[int, str, TensorConfig], AvailableTensor] = {}
        self._gather_after: Dict[BlockKey, List[Instruction]] = {}

    # ---- forward ----------------------------------------------------------------------------------------------------

    def forward(self, number: int, table: Table, phase: str, label: str) -> None:
        """Emit one op's forward into its stage's block of ``phase``."""
        op, config = self.model.ops[number], self.strategy.op_configs[number]
        self.stage = self.stage_of_op[number]
        if op.kind == "wire":
            self._wire(op, config, table, phase)
            return
        instruction = self.computation(op.name, phase, label)
        moved = float(op.scratch_bytes)
        for use in op.inputs:
            tensor = self.model.tensors[use.tensor]
            wanted = tensor_config(config, use.dims, False)
            if tensor.role == PARAMETER:
                self._need_parameter(instruction, use, wanted)
            elif tensor.role != INPUT:
                source = table if use.tensor in table else self.values
                self._need(instruction, self._obtain(source, use.tensor, wanted, phase))
        parts = self.parts_of(config)
        instruction.parts = parts
        instruction.seconds = self._seconds(number, parts, op.flops, self._traffic(op, op.inputs + op.outputs, config))
        instruction.kernels = self.estimator.kernels_of(number, False, self.cluster.devices[parts.devices[0]])
        self.place(instruction)
        for use in op.outputs:
            written = tensor_config(config, use.dims, True)
            tensor = self.model.tensors[use.tensor]
            buffer = self._write(instruction, tensor.name, "activations", written, tensor.bytes)
            table[use.tensor] = [AvailableTensor(written, instruction.id, buffer)]
        if moved:
            shares = op_fractions(config)
            sizes = tuple(moved * shares[first] for first in parts.first)
            self._scratch[number, phase] = self.buffer(instruction, op.name + " (saved)", "activations", parts, sizes)

    def _wire(self, op: ModelOp, config: OpConfig, table: Table, phase: str) -> None:
        """The output is the input, in the config in which the op needs it."""
        source = table if op.inputs[0].tensor in table else self.values
        held = self._obtain(source, op.inputs[0].tensor, tensor_config(config, op.inputs[0].dims, False), phase)
        table[op.outputs[0].tensor] = [held._replace(config=tensor_config(config, op.outputs[0].dims, True))]

    # ---- backward ---------------------------------------------------------------------------------------------------

    def backward(self, number: int) -> None:
        """Emit the backward of one op, after the recomputation of its unit if it is the unit's first."""
        op, config = self.model.ops[number], self.strategy.op_configs[number]
        unit, self.stage = self.strategy.recompute[number], self.stage_of_op[number]
        if unit:
            self._recompute(unit, self.stage)
        incoming: List[AvailableTensor] = []
        for use in op.outputs:
            held = self._gradient(use.tensor, tensor_config(config, use.dims, True).summed())
            if held is not None:
                incoming.append(held)
        if not incoming and op.kind != "loss":
            return
        kind = KINDS[op.kind]
        targets = self.model.gradients_of(op)
        parameters = tuple(use for use in targets if self._is_parameter(use))
        if kind.backward in ("alias", "parameters"):
            for use in targets:
                if use not in parameters:
                    self._add_gradient(use.tensor, incoming[0]._replace(config=tensor_config(config, use.dims, False)))
        if kind.backward == "parameters":
            self._backward_op(number, incoming, parameters, (), op.flops, 1.0)
        elif kind.backward == "one" and targets:
            read = op.inputs if kind.saved == "inputs" else op.outputs if kind.saved == "outputs" else ()
            # if the schedule separates them, half of a whole layer's backward is for its activations and half for its weights
            others = tuple(use for use in targets if use not in parameters)
            is_apart = self.splits and op.kind == "layer" and parameters and others
            for part in (others, parameters) if is_apart else (targets,):
                share = len(part) / len(targets)
                self._backward_op(number, incoming, part, read, op.flops * kind.factor * share, share)
        elif kind.backward == "each":
            # others wait for gradients of activations; those of parameters can be computed meanwhile
            late = ACTIVATION if self.strategy.weights_first else PARAMETER
            for use in sorted(targets, key=lambda use: self.model.tensors[use.tensor].role == late):
                others = tuple(other for other in op.inputs if other is not use)
                self._backward_op(number, incoming, (use,), others, op.flops, 1.0 / len(targets))

    def _is_parameter(self, use: Use) -> bool:
        return self.model.tensors[use.tensor].role == PARAMETER

    def _backward_op(self, number: int, incoming: Sequence[AvailableTensor], targets: Tuple[Use, ...], read: Tuple[Use, ...],
                     flops: float, share: float) -> None:
        op, config = self.model.ops[number], self.strategy.op_configs[number]
        name = op.name
        if len(targets) == 1:
            name += " d_" + self.model.tensors[targets[0].tensor].name.rsplit("/", 1)[-1]
        is_late = self.splits and all(map(self._is_parameter, targets))
        instruction = self.computation(name, WEIGHT if is_late else BACKWARD, "weight" if is_late else "backward")
        for held in incoming:
            self._need(instruction, held)
        for use in read:
            self._need_saved(instruction, number, use)
        saved_phase = BACKWARD if self.strategy.recompute[number] else FORWARD
        if (number, saved_phase) in self._scratch:
            instruction.reads.append(self._scratch[number, saved_phase])
        instruction.parts = self.parts_of(config)
        moved = self._traffic(op, read + targets + op.outputs, config)
        instruction.seconds = self._seconds(number, instruction.parts, flops, moved, True, share)
        instruction.kernels = self.estimator.kernels_of(number, True, self.cluster.devices[instruction.parts.devices[0]])
        instruction.sum_seconds = self._sum_seconds(instruction.parts, targets, config)
        instruction.sum_kernels = float(sum(map(self._is_parameter, targets)))
        self.place(instruction)
        for use in targets:
            tensor = self.model.tensors[use.tensor]
            gradient = tensor_config(config, use.dims, True)
            if tensor.role == PARAMETER:
                self.parameter_gradients.append((use.tensor, gradient, instruction.id))
            else:
                buffer = self._write(
                    instruction, "gradient of " + tensor.name, "gradients of activations", gradient, tensor.bytes)
                self._add_gradient(use.tensor, AvailableTensor(gradient, instruction.id, buffer))

    def _sum_seconds(self, parts: DeviceClasses, targets: Tuple[Use, ...], config: OpConfig) -> Tuple[float, ...]:
        """Time to read gradients of parameters and their sums over micro-batches, and to write the sums."""
        rows = []
        for use in targets:
            tensor = self.model.tensors[use.tensor]
            if tensor.role == PARAMETER:
                held = tensor_config(config, use.dims, True)
                is_cut = self.strategy.zero_level >= 2  # each device adds up its own part
                rows.append((self.estimator.sum_bytes(tensor), fractions(sharded_over_replicas(held) if is_cut else held)))
        if not rows:
            return (0.0,) * len(parts.first)
        return tuple(self._roofline(parts.devices[first], sum(size * shares[first] for size, shares in rows))
                     for first in parts.first)

    def _roofline(self, device: int, moved: float) -> float:
        """Time of an op that only moves bytes."""
        return self.estimator.roofline(self.cluster.devices[device], 0.0, moved)

    def _recompute(self, unit: str, stage: int) -> None:
        if (unit, stage) in self._done_units:
            return
        self._done_units[unit, stage] = None
        ops = [number for number in self.strategy.stages[stage].ops if self.strategy.recompute[number] == unit]
        for number in ops:
            self.forward(number, self.recomputed, BACKWARD, "recompute")

    def _need_saved(self, instruction: Instruction, number: int, use: Use) -> None:
        """Get a value of the forward that the backward reads: a kept one, or one from the recomputation of the same unit."""
        tensor = self.model.tensors[use.tensor]
        wanted = tensor_config(self.strategy.op_configs[number], use.dims, False)
        if tensor.role == PARAMETER:
            self._need_parameter(instruction, use, wanted)
            return
        if tensor.role == INPUT:
            return
        unit = self.strategy.recompute[number]
        if unit and self._unit_of_tensor[use.tensor] == unit and use.tensor in self.recomputed:
            self._need(instruction, self._obtain(self.recomputed, use.tensor, wanted, BACKWARD))
            return
        self._need(instruction, self._obtain(self.values, use.tensor, wanted, BACKWARD))

    def _add_gradient(self, tensor: int, held: AvailableTensor) -> None:
        self.gradients.setdefault(tensor, []).append(held)

    def _gradient(self, tensor: int, wanted: TensorConfig) -> Optional[AvailableTensor]:
        """The sum of all contributions to a tensor's gradient, in config ``wanted``.

        Contributions in the same config are added before they are transformed, so that partial sums are reduced once.
        """
        by_config: Dict[TensorConfig, List[AvailableTensor]] = {}
        for held in self.gradients.get(tensor, ()):
            by_config.setdefault(held.config, []).append(held)
        if not by_config:
            return None
        sums = [self._sum(tensor, group) for group in by_config.values()]
        return self._sum(tensor, [self._obtain({tensor: [held]}, tensor, wanted, BACKWARD, gradient=True) for held in sums])

    def _sum(self, tensor: int, group: Sequence[AvailableTensor]) -> AvailableTensor:
        if len(group) == 1:
            return group[0]
        config, size = group[0].config, self.model.tensors[tensor].bytes
        name = "gradient of " + self.model.tensors[tensor].name
        block = self._stage_of(config.devices[0], group[0]), BACKWARD
        instruction = self.instruction(name + " (sum)", block, COMPUTATION, "backward")
        for held in group:
            self._need(instruction, held)
        instruction.parts = self.parts_of(config)
        instruction.seconds = tuple(self._roofline(config.devices[first], (len(group) + 1) * size * fractions(config)[first])
                                    for first in instruction.parts.first)
        instruction.kernels = 1.0
        self.place(instruction)
        return AvailableTensor(config, instruction.id, self._write(instruction, name, "gradients of activations", config, size))

    # ---- tensors in the config that an op needs ---------------------------------------------------------------------

    def _need(self, instruction: Instruction, held: AvailableTensor) -> None:
        instruction.dependencies.append(held.dependency)
        instruction.reads.append(held.buffer)

    def _need_parameter(self, instruction: Instruction, use: Use, wanted: TensorConfig) -> None:
        """Get a parameter: with ZeRO 3 it is gathered before its use, with offloading it is copied from the host, once in the
        forward and once in the backward pass."""
        zero = self.strategy.zero == "v3"
        offload = self.strategy.offload == "v0"
        stored = self.zero_config(use.tensor, wanted) if zero else wanted
        if not offload and stored == wanted:
            return
        phase = instruction.block[1]
        key = (use.tensor, phase, wanted)  # several stages may use it
        if key not in self._gathered:
            after = self._gather_after.setdefault(instruction.block, [])
            ahead = after[-2].id if len(after) > 1 else -1  # at most two are available ahead of their use
            source = AvailableTensor(stored, ahead, -1)
            if offload:
                tensor = self.model.tensors[use.tensor]
                copy = host_copy(stored)
                source = self._communicate(tensor.name, "copied parameters", tensor.bytes, source, copy, phase)
            table = {use.tensor: [source]}
            self._gathered[key] = self._obtain(table, use.tensor, wanted, phase, category="gathered parameters")
            after.append(instruction)
        self._need(instruction, self._gathered[key])

    def zero_config(self, parameter: int, value: TensorConfig) -> TensorConfig:
        """How ZeRO stores a parameter that ops need in config ``value``: divided over its batch-parallel axes."""
        for number, dims in self.uses[parameter]:
            config = self.strategy.op_configs[number]
            if config.devices == value.devices:
                return sharded_over_replicas(tensor_config(config, dims, True))
        return value

    def _obtain(self, table: Table, tensor: int, wanted: TensorConfig, phase: str, gradient: bool = False,
                category: str = "") -> AvailableTensor:
        """``tensor`` in config ``wanted``; inserts communication if it is not available in that config."""
        held = table[tensor]
        for one in held:
            if one.config == wanted:
                return one
        best = min(held, key=lambda one: _distance(one.config, wanted))
        model_tensor = self.model.tensors[tensor]
        name = ("gradient of " if gradient else "") + model_tensor.name
        category = category or ("gradients of activations" if gradient else "activations")
        found = best
        for step in transformation(best.config, wanted):
            found = self._communicate(name, category, model_tensor.bytes, found, step, phase)
        found = found._replace(config=wanted)
        if not gradient:
            held.append(found)
        return found

    def _communicate(self, name: str, category: str, size: float, held: AvailableTensor, step: Communication,
                     phase: str) -> AvailableTensor:
        first = step.groups[0].pairs[0][0] if step.groups[0].pairs else step.groups[0].devices[0]
        instruction = self.instruction(name, (self._stage_of(first, held), phase), FEATURE, step.kind)
        if held.dependency >= 0:
            instruction.dependencies.append(held.dependency)
        if held.buffer >= 0:
            instruction.reads.append(held.buffer)
        instruction.groups = step.groups
        instruction.size_bytes = size if step.kind == SEND_RECV else size * step.fraction
        self.place(instruction)
        return AvailableTensor(step.result, instruction.id, self._write(instruction, name, category, step.result, size))

    # ---- instructions and buffers -----------------------------------------------------------------------------------

    def _stage_of(self, device: int, held: AvailableTensor) -> int:
        """The stage of a device's work on a tensor: if it has several, the one that needs the tensor or that made it."""
        stages = self._stages_of_device[device]
        makers = [self.instructions[held.dependency].block[0]] if held.dependency >= 0 else []
        return next((stage for stage in [self.stage, *makers] if stage in stages), stages[0])

    def computation(self, name: str, phase: str, label: str) -> Instruction:
        return self.instruction(name, (self.stage, phase), COMPUTATION, label)

    def instruction(self, name: str, block: BlockKey, lane: int, label: str) -> Instruction:
        return Instruction(-1, name, block, lane, label)

    def place(self, instruction: Instruction) -> None:
        """Give an instruction its number, after everything that it needs."""
        instruction.id = len(self.instructions)
        self.instructions.append(instruction)

    def _write(self, instruction: Instruction, name: str, category: str, config: TensorConfig, size: float) -> int:
        parts = self.parts_of(config)
        return self.buffer(instruction, name, category, parts, self._bytes(config, parts, size))

    def buffer(self, instruction: Instruction, name: str, category: str, parts: DeviceClasses, sizes: Tuple[float, ...]) -> int:
        """A buffer that an instruction writes; ``sizes`` has one size per class of ``parts``."""
        self.buffers.append(Buffer(name, category, instruction.id, parts, sizes))
        return len(self.buffers) - 1

    @staticmethod
    def _bytes(config: TensorConfig, parts: DeviceClasses, size: float) -> Tuple[float, ...]:
        shares = fractions(config)
        return tuple(size * shares[first] for first in parts.first)

    def _traffic(self, op: ModelOp, uses: Tuple[Use, ...], config: OpConfig) -> List[Tuple[float, Tuple[float, ...]]]:
        """(bytes of the whole tensor, fractions per device) of the tensors that an op moves; a lookup moves only its rows."""
        moved = []
        for use in uses:
            tensor = self.model.tensors[use.tensor]
            if op.kind == "embedding" and tensor.role == PARAMETER and tensor.sparse_rows is not None:
                continue
            moved.append((tensor.bytes, fractions(tensor_config(config, use.dims, True))))
        return moved

    def _seconds(self, number: int, parts: DeviceClasses, flops: float, moved: List[Tuple[float, Tuple[float, ...]]],
                 backward: bool = False, share: float = 1.0) -> Tuple[float, ...]:
        shares = op_fractions(self.strategy.op_configs[number])
        found = []
        for first in parts.first:
            size_bytes = sum(size * fraction[first] for size, fraction in moved)
            part = OpPart(number, flops * shares[first], size_bytes, shares[first], backward, share)
            found.append(self.estimator.seconds(part, self.cluster.devices[parts.devices[first]]))
        return tuple(found)

    def parts_of(self, config: Union[OpConfig, TensorConfig]) -> DeviceClasses:
        key = (config.devices, config.axes)
        if key not in self._parts:
            self._parts[key] = equal_parts(config, [self.cluster.devices[device].type for device in config.devices])
        return self._parts[key]


def _distance(config: TensorConfig, wanted: TensorConfig) -> Tuple[int, float]:
    """A sort key: fewer and cheaper steps come first, moves to other devices last."""
    steps = transformation(config, wanted)
    return sum(1 if step.kind != SEND_RECV else 10 for step in steps), sum(step.fraction for step in steps)
