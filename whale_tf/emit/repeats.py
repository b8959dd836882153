"""Gives processes copies of cheap ops in place of messages with their results (:mod:`whale_tf.passes.repeat`)."""

from __future__ import annotations

import functools
from typing import Callable, Collection, Dict, Iterable, List, Mapping, Optional, Sequence

import numpy as np

from whale_tf._tf_compat import static_dims, tf
from whale_tf.capture.record import record
from whale_tf.graph_editor.names import free_name, names_taken
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.sizes import nominal_shapes
from whale_tf.ir.traits import JOINS, SHAPE_ONLY, Cost, Role, traits
from whale_tf.passes.partition import Node, Output
from whale_tf.passes.repeat import Nodes, find_repeats

COSTS = frozenset({Cost.FREE, Cost.MOVE, Cost.LOOK_UP, Cost.RESULT, Cost.OPERAND, Cost.ADDS})
MOST_FLOPS = 10.0  # per element; an op that takes more is not repeated
MOST_ELEMENTS = 1 << 16  # of a constant that is copied
OPEN = 32  # what a number counts that is not known, such as that of the examples


def repeat_where_read(graph: tf.Graph, ops: Sequence[tf.Operation], readers: Iterable[tf.Operation],
                      owner: Callable[[tf.Operation], Optional[int]], members: Sequence[int], scope: str,
                      adds_up: Callable[[tf.Operation], bool] = lambda op: False) -> None:
    """Makes readers read copies of cheap ops of other processes.

    Args:
        ops: what may be copied, and what the readers read otherwise.
        owner: the process that runs an op; None: each that needs it.
        members: the processes that run the step.
        scope: name of the new ops.
        adds_up: whether an op is a sum that processes can compute together.
    """
    numbers = {op.name: number for number, op in enumerate(ops)}
    nodes = [Node(owner(op), tuple((numbers[tensor.op.name], tensor.value_index) for tensor in op.inputs
                                   if tensor.op.name in numbers)) for op in ops]
    reading = [numbers[op.name] for op in readers]
    if not any(nodes[output[0]].owner not in (None, nodes[index].owner) for index in reading if nodes[index].owner is not None
               for output in nodes[index].inputs):
        return
    edit, taken = StagedEdit(graph), names_taken(graph)

    @functools.lru_cache(maxsize=None)
    def is_cheap(index: int) -> bool:
        op, node = ops[index], nodes[index]
        return node.owner is not None and len(node.inputs) == len(op.inputs) and _is_cheap(op)

    @functools.lru_cache(maxsize=None)
    def open_shapes() -> Mapping[str, Sequence[Optional[int]]]:
        recorded = record(graph)
        return {recorded.tensor_name(tensor): shape or () for tensor, shape in nominal_shapes(recorded, OPEN).items()}

    def size(output: Output) -> float:
        tensor = ops[output[0]].outputs[output[1]]
        shape = static_dims(tensor)
        if shape is None or None in shape:
            shape = open_shapes().get(tensor.name, [OPEN])
        return float(np.prod(list(map(float, shape))) * tensor.dtype.size)  # type: ignore[arg-type]

    found = Nodes(nodes, is_cheap, lambda index: ops[index].type in JOINS, size, lambda index: adds_up(ops[index]))
    for place, rank in enumerate(members):
        repeated = find_repeats(found, reading, rank)
        if not repeated:
            continue
        names: Dict[str, str] = {}
        devices = dict.fromkeys(ops[index].device for index in reading if nodes[index].owner == rank and ops[index].device)
        for op in (ops[index] for index in repeated):
            name = free_name(f"{scope}/{place}/{op.name}", lambda name: name in edit or name in taken)
            edit.copy(op, name, [_edge(tensor, names) for tensor in op.inputs], device=_like(op.device, devices))
            names[op.name] = name
        for op in (ops[index] for index in reading if nodes[index].owner == rank):
            for position, tensor in enumerate(op.inputs):
                if tensor.op.name in names:
                    edit.move_input(op.name, position, _edge(tensor, names))
    edit.commit()


def _edge(tensor: tf.Tensor, names: Dict[str, str]) -> str:
    return f"{names.get(tensor.op.name, tensor.op.name)}:{tensor.value_index}"


def _like(device: str, devices: Collection[str]) -> str:
    """The first of some devices that is of the same type, or their host."""
    kind = tf.DeviceSpec.from_string(device).device_type
    specs = [tf.DeviceSpec.from_string(one) for one in devices]
    found = next((spec for spec in specs if spec.device_type == kind), None)
    if found is None and specs:
        found = tf.DeviceSpec(job=specs[0].job, replica=specs[0].replica, task=specs[0].task, device_type="CPU", device_index=0)
    return str(found.to_string()) if found else ""


def _is_cheap(op: tf.Operation) -> bool:
    """Whether any process may run an op, at less cost than a message has.

    What follows from comparing or rounding floating-point numbers is left to one process.  In others, whose processors round in
    another way, a condition could take the other branch.
    """
    row = traits(op.type)
    if (row.role not in (Role.COMPUTE, Role.CONSTANT) or row.cost not in COSTS or not row.rule or row.jumps or not op.outputs
            or (row.is_dear and not row.rule.startswith("elementwise")) or row.flops > MOST_FLOPS or op.op_def.is_stateful):
        return False
    if op._get_control_flow_context() is not None or any(before.outputs for before in op.control_inputs):
        return False  # where gradients wait for each other's group, nothing depends on it
    values: List[tf.Tensor] = [*op.inputs, *op.outputs]
    if any(tensor.dtype in (tf.resource, tf.variant, tf.string) or tensor.dtype._is_ref_dtype for tensor in values):
        return False
    if not op.inputs:
        shape = op.outputs[0].shape
        return bool(shape.is_fully_defined()) and shape.num_elements() <= MOST_ELEMENTS
    return op.type in SHAPE_ONLY or all(map(_is_continuous, op.outputs)) or not any(map(_is_continuous, op.inputs))


def _is_continuous(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)
