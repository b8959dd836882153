"""The end of a step: gradients are summed over replicas in buckets, and parameters updated (Proteus Fig. 4, DAPPLE Fig. 10)."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.cluster.hardware import HOST_BYTES_PER_S
from whale_tf.simulator.compiler import Compiler
from whale_tf.simulator.configs import TensorConfig, fractions, tensor_config
from whale_tf.simulator.instructions import BACKWARD, GRADIENT, UPDATE, Instruction
from whale_tf.simulator.network import host_link
from whale_tf.simulator.strategy_tree import CompleteStrategy, sharded_over_replicas
from whale_tf.simulator.transformation import ALL_GATHER, ALL_REDUCE, Group, transformation

BUCKET_BYTES = 25 * 2.0**20  # gradients in a collective, unless a strategy says otherwise (PyTorch's DistributedDataParallel)
STATE_BYTES_PER_MASTER = 4.0  # float32 copy of a parameter that is kept in 16 bits


class Ready(NamedTuple):
    """One parameter's gradient on one stage: its config, and the last micro-batch's instructions after which it is ready."""

    parameter: int
    stage: int
    value: TensorConfig
    gradient: TensorConfig
    after: Tuple[int, ...]


class Bucket(NamedTuple):
    """Gradients that one collective sums."""

    kind: str
    groups: Tuple[Group, ...]
    members: List[Ready]


def sums_every_micro_batch(strategy: CompleteStrategy) -> bool:
    """Whether devices only have room to add up their own part of the gradients over micro-batches."""
    return strategy.zero_level >= 2 and strategy.num_micro_batch > 1


class Synchroniser:
    """Continues a :class:`Compiler` after its backward pass."""

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler
        self.strategy = compiler.strategy
        self.model = compiler.model
        self.optimizer = self.model.optimizer
        self._bucket_of: Dict[Tuple[int, int], int] = {}  # (parameter, stage) -> buffer of its summed gradient
        self.static_bytes: Dict[int, Dict[str, float]] = {
            device: {} for stage in self.strategy.stages for device in stage.devices}

    def run(self) -> Dict[int, Dict[str, float]]:
        """Emit collectives and updates; returns the bytes that every device holds for the whole step, by category."""
        synchronised: Dict[Tuple[int, int], int] = {}  # (parameter, stage) -> instruction that sums it
        ready = self._ready()
        for stage in range(len(self.strategy.stages)):
            for bucket in self._buckets([one for one in ready if one.stage == stage]):
                self._reduce(bucket, synchronised)
        self._tie_stages(ready, synchronised)
        for one in ready:
            self._count_static(one)
        by_bucket: Dict[Tuple[int, int], List[Ready]] = {}  # (stage, instruction that sums them)
        for one in ready:
            update = self._update(one, synchronised.get((one.parameter, one.stage)))
            if self.strategy.zero in ("v1", "v2") and self._stored(one) != one.value:
                by_bucket.setdefault((one.stage, synchronised.get((one.parameter, one.stage), -1)), []).append(one)
                synchronised[one.parameter, one.stage] = update
        for members in by_bucket.values():
            self._gather_values(members, synchronised)
        return self.static_bytes

    def _ready(self) -> List[Ready]:
        """Gradients in the order in which they become ready; several uses of a parameter on the same devices are joined."""
        joined: Dict[Tuple[int, Tuple[int, ...]], Ready] = {}
        for parameter, gradient, instruction in self.compiler.parameter_gradients:
            stage = self.compiler.instructions[instruction].block[0]
            key = parameter, self.strategy.stages[stage].devices
            before = joined.pop(key, None)
            after = (before.after if before else ()) + (instruction,)
            if before is not None and transformation(before.gradient, before.value):
                gradient = before.gradient  # the use whose gradient is a partial sum decides
            joined[key] = Ready(parameter, stage, self._value(parameter, gradient), gradient, after)
        return list(joined.values())

    def _value(self, parameter: int, gradient: TensorConfig) -> TensorConfig:
        for number, dims in self.compiler.uses[parameter]:
            config = self.strategy.op_configs[number]
            if config.devices == gradient.devices:
                return tensor_config(config, dims, False)
        return gradient.summed()

    def _stored(self, one: Ready) -> TensorConfig:
        """The config in which the optimizer works: with ZeRO, each replica works on its own part."""
        return sharded_over_replicas(one.gradient) if self.strategy.zero != "none" else one.value

    # ---- collectives ------------------------------------------------------------------------------------------------

    def _buckets(self, ready: Sequence[Ready]) -> List[Bucket]:
        """Buckets of gradients that need the same collective, filled in order (or as the plan says)."""
        limit = BUCKET_BYTES if self.strategy.bucket_bytes is None else self.strategy.bucket_bytes
        open_buckets: Dict[Tuple, Bucket] = {}
        sizes: Dict[Tuple, float] = {}
        done: List[Bucket] = []
        for one in ready:
            steps = transformation(one.gradient, self._stored(one))
            if not steps:
                continue
            tensor = self.model.tensors[one.parameter]
            kind = ALL_GATHER if tensor.sparse_rows is not None and steps[0].kind == ALL_REDUCE else steps[0].kind
            chosen = self._chosen_bucket(one)
            key = (kind, steps[0].groups, chosen)
            if key not in open_buckets:
                open_buckets[key] = Bucket(kind, steps[0].groups, [])
                sizes[key] = 0.0
                done.append(open_buckets[key])
            open_buckets[key].members.append(one)
            sizes[key] += self._gradient_bytes(one)
            if chosen is None and sizes[key] >= limit:
                del open_buckets[key]
        return done

    def _chosen_bucket(self, one: Ready) -> Optional[int]:
        if self.strategy.buckets is None:
            return None
        for number, bucket in enumerate(self.strategy.buckets[one.stage]):
            if one.parameter in bucket:
                return number
        return -1 - one.parameter  # the plan does not name it, so it has its own collective

    def _reduce(self, bucket: Bucket, synchronised: Dict[Tuple[int, int], int]) -> None:
        first = bucket.members[0]
        name = "gradients of {}{}".format(
            self.model.tensors[first.parameter].name, f" and {len(bucket.members) - 1} more" if len(bucket.members) > 1 else "")
        instruction = self._collective(
            name, first.stage, bucket.kind, bucket.groups, sum(self._gradient_bytes(one) for one in bucket.members))
        if sums_every_micro_batch(self.strategy):
            instruction.block = (first.stage, BACKWARD)
        for one in bucket.members:
            instruction.dependencies += one.after
        self.compiler.place(instruction)
        parts = self.compiler.parts_of(first.gradient)
        buffer = self.compiler.buffer(instruction, name, "gradient buckets", parts, (instruction.size_bytes,) * len(parts.first))
        for one in bucket.members:
            synchronised[one.parameter, one.stage] = instruction.id
            if instruction.block[1] == UPDATE:  # otherwise its own part is added to the sum
                self._bucket_of[one.parameter, one.stage] = buffer

    def _collective(self, name: str, stage: int, kind: str, groups: Tuple[Group, ...], size: float) -> Instruction:
        instruction = self.compiler.instruction(name, (stage, UPDATE), GRADIENT, kind)
        instruction.groups = groups
        instruction.size_bytes = size
        return instruction

    def _tie_stages(self, ready: Sequence[Ready], synchronised: Dict[Tuple[int, int], int]) -> None:
        """Sum the gradient of a parameter that several stages use (tied embeddings) over these stages too."""
        by_parameter: Dict[int, List[Ready]] = {}
        for one in ready:
            by_parameter.setdefault(one.parameter, []).append(one)
        for parameter, owners in by_parameter.items():
            if len(owners) < 2:
                continue
            devices = [owner.gradient.devices for owner in owners]
            if len({len(row) for row in devices}) == 1:
                groups = tuple(Group(tuple(column)) for column in zip(*devices))
            else:
                groups = (Group(tuple(device for row in devices for device in row)),)
            instruction = self._collective(
                f"gradient of {self.model.tensors[parameter].name} over stages", owners[0].stage, ALL_REDUCE, groups,
                max(self._gradient_bytes(owner) for owner in owners))
            for owner in owners:
                before = synchronised.get((parameter, owner.stage))
                instruction.dependencies += [before] if before is not None else list(owner.after)
            self.compiler.place(instruction)
            for owner in owners:
                synchronised[parameter, owner.stage] = instruction.id

    def _gather_values(self, members: Sequence[Ready], updated: Dict[Tuple[int, int], int]) -> None:
        """Under ZeRO 1 and 2, send every replica the other parts of the values after the updates."""
        steps = transformation(self._stored(members[0]), members[0].value)
        instruction = self._collective(
            "values of " + self.model.tensors[members[0].parameter].name, members[0].stage, ALL_GATHER, steps[0].groups,
            sum(self._bytes(one, one.value) for one in members))
        for one in members:
            instruction.dependencies.append(updated[one.parameter, one.stage])
        self.compiler.place(instruction)

    # ---- updates and what is stored ---------------------------------------------------------------------------------

    def _update(self, one: Ready, after: Optional[int]) -> int:
        tensor = self.model.tensors[one.parameter]
        stored = self._stored(one)
        self.compiler.stage = one.stage
        instruction = self.compiler.computation("update " + tensor.name, UPDATE, "update")
        instruction.dependencies += [after] if after is not None else list(one.after)
        if (one.parameter, one.stage) in self._bucket_of:
            instruction.reads.append(self._bucket_of[one.parameter, one.stage])
        instruction.parts = self.compiler.parts_of(stored)
        shares = fractions(stored)
        moved = tensor.size * tensor.touched * 4.0 * self.compiler.estimator.update_passes()
        copied = tensor.gradient_bytes
        instruction.seconds = tuple(
            self._update_seconds(device, moved * share, copied * share)
            for device, share in ((stored.devices[first], shares[first]) for first in instruction.parts.first))
        instruction.kernels = self.compiler.estimator.update_kernels()
        self.compiler.place(instruction)
        return instruction.id

    def _update_seconds(self, device: int, moved: float, copied: float) -> float:
        """Time of an update of ``moved`` bytes.

        An offloaded update runs on the host, whose memory the devices of its node share.  A gradient of ``copied`` bytes goes out
        and the value comes in, over a full-duplex link and double-buffered, so the slower of copies and update counts.
        """
        cluster = self.compiler.cluster
        one = cluster.devices[device]
        if self.strategy.offload == "none":
            return self.compiler.estimator.update_seconds(one, moved)
        host_s = moved * len(cluster.nodes[one.node]) / HOST_BYTES_PER_S if one.kind == "GPU" else (
            self.compiler.estimator.roofline(one, 0.0, moved))
        return max(host_s, host_link(cluster, device).seconds(copied))

    def _bytes(self, one: Ready, config: TensorConfig) -> float:
        return self.model.tensors[one.parameter].bytes * max(fractions(config))

    def _gradient_bytes(self, one: Ready) -> float:
        """Bytes that one device puts into the collective.  Sparse gradients are gathered: all rows of the batch."""
        tensor = self.model.tensors[one.parameter]
        if tensor.sparse_rows is not None:
            return tensor.gradient_bytes
        return self.strategy.sent_bytes(tensor) * max(fractions(one.gradient))

    def _count_static(self, one: Ready) -> None:
        tensor = self.model.tensors[one.parameter]
        zero, cut, offload = self.strategy.zero_level, self._stored(one), self.strategy.offload
        per_element = self.optimizer.state_bytes
        if tensor.itemsize < 4:
            per_element += STATE_BYTES_PER_MASTER
        returned = self.compiler.estimator.returned_bytes(tensor) if self.strategy.num_micro_batch > 1 else 0.0
        held = (
            ("parameters", tensor.bytes, cut if zero >= 3 else one.value),
            ("gradients", tensor.gradient_bytes, cut if zero >= 2 else one.gradient),
            ("optimizer state", tensor.size * per_element, cut),
            ("gradients of a micro-batch", returned, one.gradient),
            ("early results of updates", tensor.size * self.compiler.estimator.early_bytes(), cut))
        for category, size, config in held:
            if not size or offload == "v0" or (offload == "states" and category not in ("parameters", "gradients")):
                continue
            for device, share in zip(config.devices, fractions(config)):
                table = self.static_bytes[device]
                table[category] = table.get(category, 0.0) + size * share

