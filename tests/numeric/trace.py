"""What a traced step did: the order of a pipeline's work and the memory of each device, from RunMetadata."""
from __future__ import annotations

import collections
import re
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

# Work that a step cannot do without; shape arithmetic and the like may run at any time. TensorFlow's own optimizer
# fuses MatMul, BiasAdd and Tanh, and calls the result like its last part.
_HEAVY = re.compile(r"MatMul|BiasAdd|Tanh")
_WEIGHT = re.compile(r"MatMul_grad/MatMul_1|BiasAddGrad")  # gradients of a layer's weights
_CLONE = re.compile(r"^whale/g(?P<g>\d+)_m(?P<m>\d+)_r(?P<r>\d+)/(?P<name>.*)$")


def traced(session: tf.Session, fetches: Any, feed: Dict) -> tf.RunMetadata:
    """RunMetadata of one run with a full trace."""
    metadata = tf.RunMetadata()
    session.run(fetches, feed, options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
    return metadata


def devices(metadata: tf.RunMetadata) -> Iterator[Tuple[int, Any]]:
    """The traced devices by number: ``/job:.../device:CPU:3`` is 3. TensorFlow 1.15 also lists ``/host:CPU``, a summary."""
    for device in metadata.step_stats.dev_stats:
        number = device.device.rsplit(":", 1)[1]
        if number.isdigit():
            yield int(number), device


def intervals(metadata: tf.RunMetadata, apart: Sequence[int] = ()) -> Dict[int, Dict[str, Tuple[int, int]]]:
    """Per device, from ``F0`` (forward of micro-batch 0), ``B0`` and so on to when it began and ended in us.

    An op ends when it has computed: TensorFlow also notes when it has done with the op (``all_end``), but that may be long after
    it has started those that follow.

    Args:
        apart: devices on which the gradients of weights are ``W0`` and so on.
    """
    found: Dict[int, Dict[str, Tuple[int, int]]] = collections.defaultdict(dict)
    for index, device in devices(metadata):
        for node in device.node_stats:
            clone = _CLONE.match(node.node_name)
            if clone is None or not _HEAVY.search(node.node_name):
                continue
            kind = "B" if clone.group("name").startswith("gradients") else "F"
            step = ("W" if index in apart and _WEIGHT.search(node.node_name) else kind) + clone.group("m")
            begin, end = node.all_start_micros, node.all_start_micros + node.op_end_rel_micros
            steps = found[index]
            before = steps.get(step, (begin, end))
            steps[step] = (min(begin, before[0]), max(end, before[1]))
    return found


def executed_order(metadata: tf.RunMetadata, apart: Sequence[int] = ()) -> Dict[int, List[str]]:
    """Per device its steps in the order in which they began."""
    return {index: sorted(steps, key=lambda step: steps[step][0]) for index, steps in intervals(metadata, apart).items()}


def most_alive(steps: Dict[str, Tuple[int, int]]) -> int:
    """The largest number of micro-batches at a time whose forward step has begun and whose backward has not ended."""
    events = [(begin, 1) for step, (begin, _) in steps.items() if step[0] == "F"]
    events += [(end, -1) for step, (_, end) in steps.items() if step[0] == "B"]
    alive = peak = 0
    for _, change in sorted(events):
        alive += change
        peak = max(peak, alive)
    return peak


def overlapping(steps: Dict[str, Tuple[int, int]]) -> List[Tuple[str, str]]:
    """Neighbours in the order of which the second began before the first had ended."""
    order = sorted(steps, key=lambda step: steps[step][0])
    return [(a, b) for a, b in zip(order, order[1:]) if steps[b][0] < steps[a][1]]


def peak_bytes(metadata: tf.RunMetadata) -> Dict[int, int]:
    """Per device the most memory that the step's own allocations held at a time (variables and feeds are not of it).

    Allocation records are signed and come with times; sorted and summed they give the curve.
    """
    events: Dict[int, List[Tuple[int, int]]] = collections.defaultdict(list)
    for index, device in devices(metadata):
        for node in device.node_stats:
            for memory in node.memory:
                events[index] += [(r.alloc_micros, r.alloc_bytes) for r in memory.allocation_records]
    return {index: _peak(records) for index, records in events.items()}


def _peak(records: Sequence[Tuple[int, int]]) -> int:
    held = peak = 0
    for _, change in sorted(records):
        held += change
        peak = max(peak, held)
    return peak


def one_f_one_b(warmup: int, micro_batches: int) -> List[str]:
    """The order of a stage that runs ``warmup`` forward steps ahead: F0 F1 B0 F2 B1 B2 for 2 and 3 (DAPPLE, Fig. 3)."""
    ahead = min(warmup, micro_batches)
    order = [f"F{m}" for m in range(ahead)]
    for m in range(micro_batches):
        order.append(f"B{m}")
        if m + ahead < micro_batches:
            order.append(f"F{m + ahead}")
    return order


def all_forward_first(micro_batches: int) -> List[str]:
    """GPipe (Huang et al. 2019, Fig. 2c): the forward steps, then the backward ones in any order."""
    return [f"F{m}" for m in range(micro_batches)]


def largest_bytes(metadata: tf.RunMetadata) -> Dict[int, int]:
    """Per device the bytes of the largest tensor that an op there gave, or of the largest single allocation."""
    found: Dict[int, int] = collections.defaultdict(int)
    for index, device in devices(metadata):
        for node in device.node_stats:
            sizes = [record.alloc_bytes for memory in node.memory for record in memory.allocation_records]
            sizes += [output.tensor_description.allocation_description.requested_bytes for output in node.output]
            sizes += [_tensor_bytes(output.tensor_description) for output in node.output]
            found[index] = max([found[index]] + sizes)
    return found


def _tensor_bytes(description: Any) -> int:
    shape = [dim.size for dim in description.shape.dim]
    dtype = tf.as_dtype(description.dtype) if description.dtype else tf.string
    return 0 if dtype in (tf.string, tf.resource, tf.variant) else int(np.prod(shape, dtype=np.int64)) * dtype.base_dtype.size
