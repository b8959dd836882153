"""The strategy tree: one place for every level of a parallelization strategy (Proteus section IV).

Leaves are the model's ops with their computation configs; inner nodes are subgraphs with schedule configs.  A user (or
:func:`whale_tf.simulator.uniform.uniform_3d`, or a Plan) sets a few of them, and :meth:`StrategyTree.propagate` derives the
others::

    tree = StrategyTree(built_in_model("gpt2", 8))
    tree.set("*", op_config(range(8), (8, "b")))
    tree.set("block*/*/expand", op_config(range(8), (4, "b"), (2, "f")))
    tree.schedule("", ScheduleConfig(num_micro_batch=4))
    strategy = tree.propagate()
"""

from __future__ import annotations

import fnmatch
from typing import Callable, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

import networkx as nx

from whale_tf.errors import PlanError, did_you_mean
from whale_tf.plan import ZERO
from whale_tf.simulator.configs import (
    PARTIAL,
    OpAxis,
    OpConfig,
    ScheduleConfig,
    TensorAxis,
    TensorConfig,
    op_fractions,
    tensor_config,
)
from whale_tf.simulator.instructions import Subject
from whale_tf.simulator.model_graph import KINDS, PARAMETER, ModelGraph, ModelOp, ModelTensor

UNEVEN = 1.01  # times its fair share, a device may get of a dimension whose elements do not divide evenly (a vocabulary)


class StrategyStage(NamedTuple):
    """A subgraph with devices of its own (Proteus section V-A: DevGroups that share nothing)."""

    ops: Tuple[int, ...]
    devices: Tuple[int, ...]
    warmup: int


class CompleteStrategy(NamedTuple):
    """A complete strategy: every op and stored tensor has its config.

    Attributes:
        op_configs: computation config of each op.
        zero: what is partitioned over data-parallel devices, beyond the parts that ops imply: ``v1`` optimizer state, ``v2`` also
            gradients, ``v3`` also parameters (ZeRO; Proteus section II "Memory Optimization").
        offload: what is in the host's memory: ``states``, those of the optimizer; ``v0``, also values and gradients, which are
            copied to the device when they are used.
        recompute: for each op, the name of its recomputation unit, or "".
        stages: in the order of the data flow.
        buckets: for each stage, the parameter tensors of each gradient collective; None: by ``bucket_bytes``.
        bucket_bytes: bytes of gradients in one collective; None: :data:`whale_tf.simulator.synchronise.BUCKET_BYTES`, or the size
            of Horovod's buffer if TensorFlow runs the model (``Options.xla``).
        micro_batch_slices: relative sizes of the micro-batches; None: equal.
        fp16_gradients: dense float32 gradients are sent in 16 bits.
        weights_first: the backward pass computes a product's gradient for its weights before that for its operand, so that
            nothing can hide tensor parallelism's sums of the latter; otherwise after it.
    """

    model: ModelGraph
    op_configs: Tuple[OpConfig, ...]
    num_micro_batch: int
    schedule: str
    stages: Tuple[StrategyStage, ...]
    recompute: Tuple[str, ...]
    zero: str = "none"
    offload: str = "none"
    bucket_bytes: Optional[float] = None
    buckets: Optional[Tuple[Tuple[Tuple[int, ...], ...], ...]] = None
    micro_batch_slices: Optional[Tuple[int, ...]] = None
    fp16_gradients: bool = False
    weights_first: bool = False

    def sent_bytes(self, parameter: ModelTensor) -> float:
        """Bytes sent for the dense gradient of a parameter."""
        return parameter.size * min(parameter.itemsize, 2) if self.fp16_gradients else parameter.bytes

    @property
    def global_batch(self) -> int:
        return self.model.batch * self.num_micro_batch

    @property
    def zero_level(self) -> int:
        return ZERO.index(self.zero)

    def subject(self, fewer: Callable[[int, int], float] = lambda op, device: 1.0) -> Subject:
        """The subject of a simulation, with the matrix arithmetic of forward and backward (without recomputation).

        Args:
            fewer: by how much fewer multiplications an op takes on a device than its definition has.
        """
        flops: Dict[int, float] = {}
        for number, (op, config) in enumerate(zip(self.model.ops, self.op_configs)):
            if KINDS[op.kind].compute_bound:
                total = (op.flops + self.model.backward_flops(op)) * self.num_micro_batch / fewer(number, config.devices[0])
                for device, share in zip(config.devices, op_fractions(config)):
                    flops[device] = flops.get(device, 0.0) + total * share
        return Subject(self.model.name, self.model.precision, self.global_batch, self.num_micro_batch, self.schedule, flops)


class Node:
    """An inner node: a subgraph of the model."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.children: Dict[str, Node] = {}
        self.ops: List[int] = []
        self.config: Optional[ScheduleConfig] = None

    def walk(self, prefix: str = "") -> List[Tuple[str, Node]]:
        """(path, node) of this node and of all nodes below it."""
        found = [(prefix, self)]
        for child in self.children.values():
            found += child.walk(f"{prefix}/{child.name}" if prefix else child.name)
        return found


class StrategyTree:
    """Built from a model; mutable until :meth:`propagate`."""

    def __init__(self, model: ModelGraph) -> None:
        self.model = model
        self.root = Node("")
        self.configs: Dict[int, OpConfig] = {}
        self.order = "backward_first"
        self.zero = "none"
        self.offload = "none"
        for number, op in enumerate(model.ops):
            node = self.root
            for name in op.path[:-1]:
                node = node.children.setdefault(name, Node(name))
            node.ops.append(number)

    def set(self, pattern: str, config: OpConfig) -> StrategyTree:
        """Set the computation config of every op whose path matches ``pattern`` (``block*/attention/query``, ``*``).

        Raises:
            PlanError: nothing matches, or a dimension that the config partitions cannot be partitioned in a matching op.
        """
        names = [op.name for op in self.model.ops]
        chosen = [number for number, name in enumerate(names) if fnmatch.fnmatchcase(name, pattern)]
        if not chosen:
            raise PlanError(f"no op of {self.model.name!r} matches {pattern!r}.{did_you_mean(pattern, names)}")
        for number in chosen:
            self.configs[number] = checked_config(self.model.ops[number], config)
        return self

    def schedule(self, pattern: str, config: ScheduleConfig) -> StrategyTree:
        """Set the schedule config of every inner node whose path matches (the root is ``""``)."""
        paths = self.root.walk()
        chosen = [node for path, node in paths if fnmatch.fnmatchcase(path, pattern)]
        if not chosen:
            raise PlanError(
                f"no subgraph of {self.model.name!r} matches {pattern!r}.{did_you_mean(pattern, [path for path, _ in paths])}")
        for node in chosen:
            node.config = config
        return self

    def propagate(self) -> CompleteStrategy:
        """Complete the strategy (Proteus section VII): schedule configs go down the tree, computation configs along the
        data flow.

        Raises:
            PlanError: no config reaches some op, or subgraphs without common devices differ in their micro-batches.
        """
        op_configs = propagate_configs(self.model, self.configs)
        schedules, units = self._schedules()
        groups = device_groups(op_configs)
        stages = []
        counts = {schedules[number].num_micro_batch for number in range(len(self.model.ops))}
        if len(counts) != 1:
            raise PlanError(f"subgraphs have {sorted(counts)} micro-batches; all subgraphs of a model need the same number")
        for ops, devices in groups:
            stages.append(StrategyStage(ops, devices, max(schedules[number].max_ongoing_micro_batch for number in ops)))
        return CompleteStrategy(self.model, op_configs, counts.pop(), self.order, tuple(stages), units, self.zero, self.offload)

    def _schedules(self) -> Tuple[List[ScheduleConfig], Tuple[str, ...]]:
        """For each op, the schedule config that it inherits, and the topmost node that asks to recompute it."""
        schedules = [ScheduleConfig()] * len(self.model.ops)
        units = [""] * len(self.model.ops)

        def down(node: Node, path: str, inherited: ScheduleConfig, unit: str) -> None:
            config = node.config or inherited
            if node.config is not None and node.config.recompute:
                unit = path or "model"
            elif node.config is not None:
                unit = ""
            for number in node.ops:
                schedules[number], units[number] = config, unit
            for name, child in node.children.items():
                down(child, f"{path}/{name}" if path else name, config, unit)

        down(self.root, "", ScheduleConfig(), "")
        return schedules, tuple(units)


def checked_config(op: ModelOp, config: OpConfig) -> OpConfig:
    """``config`` fitted to an op: axes over dimensions that the op does not have replicate it.

    Raises:
        PlanError: the op cannot be partitioned in this way.
    """
    axes = tuple(axis if axis.dim in op.dims else OpAxis(axis.degree, None) for axis in config.axes)
    fitted = OpConfig(config.devices, axes)
    for axis in axes:
        if axis.dim is None:
            continue
        if axis.dim in op.whole:
            raise PlanError("op {!r} needs dimension {!r} whole; partition one of {}".format(
                op.name, axis.dim, ", ".join(repr(dim) for dim in op.dims if dim not in op.whole)))
        degree, extent = fitted.degree(axis.dim), op.dims[axis.dim]
        if degree > extent:
            raise PlanError(
                f"op {op.name!r} has only {int(extent)} elements along {axis.dim!r}, so it cannot be partitioned {degree} ways; "
                f"use a degree of at most {int(extent)}")
    return fitted


def check_even(strategy: CompleteStrategy) -> None:
    """Raises PlanError: devices would share a few elements, such as attention's heads, unevenly; TensorFlow's ops cannot."""
    for op, config in zip(strategy.model.ops, strategy.op_configs):
        for axis in config.axes:
            if axis.dim is None or axis.dim == "b" or axis.slices is not None:
                continue
            degree, extent = config.degree(axis.dim), op.dims[axis.dim]
            if -(-extent // degree) * degree > UNEVEN * extent:
                fine = [str(n) for n in range(1, int(min(extent, 64)) + 1) if extent % n == 0]
                raise PlanError(f"op {op.name!r} has {int(extent)} elements along {axis.dim!r}, which {degree} devices cannot "
                                f"share evenly; use a degree of {', '.join(fine)}")


def propagate_configs(model: ModelGraph, given: Dict[int, OpConfig]) -> Tuple[OpConfig, ...]:
    """Configs of all ops from those of some: forward along the data flow, then backward for ops before these."""
    configs: Dict[int, OpConfig] = dict(given)
    produced: Dict[int, TensorConfig] = {}
    for number, op in enumerate(model.ops):
        if number not in configs:
            for use in op.inputs:
                if use.tensor in produced:
                    configs[number] = _from_tensor(op, use.dims, produced[use.tensor])
                    break
        if number in configs:
            for use in op.outputs:
                produced[use.tensor] = tensor_config(configs[number], use.dims, True).summed()
    consumed: Dict[int, TensorConfig] = {}
    for number in reversed(range(len(model.ops))):
        op = model.ops[number]
        if number not in configs:
            for use in op.outputs:
                if use.tensor in consumed:
                    configs[number] = _from_tensor(op, use.dims, consumed[use.tensor])
                    break
            else:
                raise PlanError(
                    f"no config reaches op {op.name!r}; set one with tree.set({op.name!r}, op_config(devices, ...))")
        for use in op.inputs:
            consumed[use.tensor] = tensor_config(configs[number], use.dims, False)
    return tuple(configs[number] for number in range(len(model.ops)))


def _from_tensor(op: ModelOp, dims: Tuple[str, ...], config: TensorConfig) -> OpConfig:
    """The config of an op that works where its tensor is; partitions of dimensions that the op needs whole become replication."""
    axes = []
    for axis in config.axes:
        dim = dims[axis.what] if axis.what >= 0 else None
        if dim is None or dim in op.whole:
            axes.append(OpAxis(axis.degree, None))
        else:
            axes.append(OpAxis(axis.degree, dim, axis.slices))
    return OpConfig(config.devices, tuple(axes))


def device_groups(configs: Sequence[OpConfig]) -> List[Tuple[Tuple[int, ...], Tuple[int, ...]]]:
    """(ops, devices) of the subgraphs that share no device, in the order of their first ops."""
    shared = nx.Graph()
    for devices in {config.devices for config in configs}:
        nx.add_path(shared, devices)
    group_of = {device: group for group in map(frozenset, nx.connected_components(shared)) for device in group}
    members: Dict[FrozenSet[int], List[int]] = {}
    for number, config in enumerate(configs):
        members.setdefault(group_of[config.devices[0]], []).append(number)
    return [(tuple(ops), tuple(sorted(group))) for group, ops in members.items()]


def sharded_over_replicas(gradient: TensorConfig) -> TensorConfig:
    """ZeRO's memory config: of a partial tensor (whose value is thus replicated) every device keeps one part, cut along the
    first dimension (Proteus section II)."""
    return TensorConfig(
        gradient.devices, tuple(TensorAxis(axis.degree, 0) if axis.what == PARTIAL else axis for axis in gradient.axes))


def parameter_uses(model: ModelGraph) -> Dict[int, List[Tuple[int, Tuple[str, ...]]]]:
    """For each parameter, the (op, dims) pairs that read it."""
    uses: Dict[int, List[Tuple[int, Tuple[str, ...]]]] = {}
    for number, op in enumerate(model.ops):
        for use in op.inputs:
            if model.tensors[use.tensor].role == PARAMETER:
                uses.setdefault(use.tensor, []).append((number, use.dims))
    return uses
