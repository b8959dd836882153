"""Find ops by name, type, device or reachability, and the boundary of a set.

::

    a ──> b ──> c ──> d          forward([b])            [b, c, d]
          │                      backward([c])           [c, b, a]
          └──> e                 between([a], [c])       [a, b, c]
                                 boundary([b, c])        inputs (a:0), outputs (b:0, c:0)

All results are lists whose order does not change from run to run. A call with ops or tensors of different graphs raises a
GraphEditError.
"""
from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, Dict, Iterable, List, Optional, Tuple, Union

from whale_tf._tf_compat import tf
from whale_tf.errors import GraphEditError
from whale_tf.graph_editor.device import canonical_device
from whale_tf.graph_editor.one_graph import check_one_graph

OpOrTensor = Union[tf.Operation, tf.Tensor]


@dataclass(frozen=True)
class Boundary:
    """The edges over the border of a set of ops.

    Attributes:
      inputs: tensors made outside and read inside.
      outputs: tensors made inside and read outside.
      control_inputs: ops outside that ops inside wait for.
      control_outputs: ops inside that ops outside wait for.
    """

    inputs: Tuple[tf.Tensor, ...]
    outputs: Tuple[tf.Tensor, ...]
    control_inputs: Tuple[tf.Operation, ...]
    control_outputs: Tuple[tf.Operation, ...]


def find_ops(graph: tf.Graph, *, name: Optional[str] = None, op_type: Union[None, str, Iterable[str]] = None,
             device: Optional[str] = None,
             matching: Optional[Callable[[tf.Operation], bool]] = None) -> List[tf.Operation]:
    """The graph's ops that meet all given conditions, in the order in which they were created.

    Args:
      name: regular expression that matches from the start of the name (``re.match``).
      op_type: one type, or several of which one must match.
      device: requested device; only the parts that it names are compared: ``"/device:GPU:1"`` matches any job and task.
      matching: another condition.

    Raises:
      GraphEditError: ``name`` is not a regular expression, or ``device`` is not a device.
    """
    ops = graph.get_operations()
    if name is not None:
        try:
            pattern = re.compile(name)
        except re.error as error:
            raise GraphEditError(f"{name!r} is not a regular expression: {error}") from error
        ops = [op for op in ops if pattern.match(op.name)]
    if op_type is not None:
        types = {op_type} if isinstance(op_type, str) else set(op_type)
        ops = [op for op in ops if op.type in types]
    if device is not None:
        fits = _device_test(device)
        ops = [op for op in ops if fits(op.device)]
    if matching is not None:
        ops = [op for op in ops if matching(op)]
    return list(ops)


def _device_test(wanted: str) -> Callable[[str], bool]:
    parts = {part for part in canonical_device(wanted).split("/") if part}
    known: Dict[str, bool] = {}

    def fits(device: str) -> bool:
        if device not in known:
            known[device] = parts <= set(canonical_device(device).split("/")) if parts else not device
        return known[device]

    return fits


def consumers(tensor: tf.Tensor) -> List[Tuple[tf.Operation, int]]:
    """Every (op, input position) that reads a tensor; an op that reads it twice is listed twice."""
    readers = dict.fromkeys(tensor.consumers())
    return [(op, index) for op in readers for index, read in enumerate(op.inputs) if read is tensor]


def successors(op: tf.Operation, control: bool = True) -> List[tf.Operation]:
    """Ops that read an output of ``op`` and, with ``control``, those that wait for it."""
    found = dict.fromkeys(reader for tensor in op.outputs for reader in tensor.consumers())
    if control:
        found.update(dict.fromkeys(op._control_outputs))
    return list(found)


def predecessors(op: tf.Operation, control: bool = True) -> List[tf.Operation]:
    """Ops from which ``op`` reads and, with ``control``, those that it waits for."""
    found = dict.fromkeys(tensor.op for tensor in op.inputs)
    if control:
        found.update(dict.fromkeys(op.control_inputs))
    return list(found)


def forward(starts: Iterable[OpOrTensor], *, stop: Iterable[tf.Operation] = (),
            within: Optional[Iterable[tf.Operation]] = None, control: bool = True) -> List[tf.Operation]:
    """All ops that depend on ``starts``, nearest first.

    Args:
      starts: ops, which are part of the result, or tensors, whose readers are (but not the ops that make them).
      stop: ops that are part of the result, if reached, but at which the search ends.
      within: look only at these ops.
      control: follow control edges too.
    """
    first: List[tf.Operation] = []
    starts = list(starts)
    check_one_graph(starts)
    for start in starts:
        first.extend([start] if isinstance(start, tf.Operation) else start.consumers())
    return _walk(first, lambda op: successors(op, control), stop, within)


def backward(ends: Iterable[OpOrTensor], *, stop: Iterable[tf.Operation] = (),
             within: Optional[Iterable[tf.Operation]] = None, control: bool = True) -> List[tf.Operation]:
    """All ops on which ``ends`` depend, nearest first, including the ends themselves (for a tensor, its op).

    Args:
      stop, within, control: as for ``forward``.
    """
    ends = list(ends)
    check_one_graph(ends)
    first = [end if isinstance(end, tf.Operation) else end.op for end in ends]
    return _walk(first, lambda op: predecessors(op, control), stop, within)


def _walk(first: Iterable[tf.Operation], neighbours: Callable[[tf.Operation], List[tf.Operation]],
          stop: Iterable[tf.Operation], within: Optional[Iterable[tf.Operation]]) -> List[tf.Operation]:
    first, allowed, stops = list(first), None if within is None else set(within), set(stop)
    check_one_graph([*first[:1], *stops, *(allowed or ())])
    seen: Dict[tf.Operation, None] = {}
    queue: Deque[tf.Operation] = deque(first)
    while queue:
        op = queue.popleft()
        if op in seen or (allowed is not None and op not in allowed):
            continue
        seen[op] = None
        if op not in stops:
            queue.extend(neighbours(op))
    return list(seen)


def between(starts: Iterable[OpOrTensor], ends: Iterable[OpOrTensor], *, control: bool = True) -> List[tf.Operation]:
    """Ops on a path from ``starts`` to ``ends``, including both, nearest to the starts first.

    ::

        x ──> a ──> b ──> y        between([x], [y])  ->  [x, a, b, y]
              └───> c                                      # c leads nowhere
    """
    starts, ends = list(starts), list(ends)
    check_one_graph([*starts, *ends])
    upstream = set(backward(ends, control=control))
    return forward(starts, within=upstream, control=control)


def boundary(ops: Iterable[tf.Operation]) -> Boundary:
    """Tensors and control edges over the border of a set of ops, each once, in the order of ``ops``."""
    ops = list(dict.fromkeys(ops))
    check_one_graph(ops)
    inside = set(ops)
    # by name: tensors of a tf.function's graph cannot be dictionary keys
    inputs = {tensor.name: tensor for op in ops for tensor in op.inputs if tensor.op not in inside}
    outputs = [tensor for op in ops for tensor in op.outputs if any(reader not in inside for reader in tensor.consumers())]
    waits = dict.fromkeys(before for op in ops for before in op.control_inputs if before not in inside)
    awaited = [op for op in ops if any(after not in inside for after in op._control_outputs)]
    return Boundary(tuple(inputs.values()), tuple(outputs), tuple(waits), tuple(awaited))
