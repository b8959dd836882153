"""Trip counts of loops that the graph determines: a counter below a constant.

::

    v1   Enter(start) -> Merge -> Less(., Enter(limit)) -> LoopCond        a loop's ops run ``(limit - start) / step`` times
           NextIteration <- Add(., step) <──┘
    v2   While(start, limit, ...), cond: Less(arg 0, arg 1), body: result 0 = Add(arg 0, step)

Gradient loops count down from, or up to, the forward loop's number of iterations.  A loop whose condition depends on data
has no known count.
"""

from __future__ import annotations

from typing import Callable, Container, Dict, List, Optional

from whale_tf.ir.graph import Op, OpGraph
from whale_tf.ir.traits import ENTERS, EXITS, MERGES, NEXT_ITERATIONS, SWITCHES, WHILES, Gives, traits, types_where
from whale_tf.ir.units import frames

_Value = Callable[[OpGraph, int], Optional[int]]
_PASSING = ENTERS | SWITCHES | MERGES | types_where(lambda row: row.gives in (Gives.SAME, Gives.RESHAPED)) | {"Cast"}


def body_runs(graph: OpGraph) -> Dict[int, int]:
    """Op number -> number of runs, for functional loops and ops inside v1 loops, if it is known and not one."""
    finder = _Finder(graph)
    found: Dict[int, int] = {}
    for op in graph.ops:
        count = 1
        for frame in finder.frames.get(op.id, ()):
            count *= finder.frame_count(frame) or 1
        if op.type in WHILES:
            count *= finder.while_count(op) or 1
        if count != 1:
            found[op.id] = count
    return found


class _Finder:
    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.frames = frames(graph)
        self._conditions: Dict[str, Op] = {}
        for op in graph.ops:
            if op.type == "LoopCond" and op.id in self.frames:
                self._conditions[self.frames[op.id][-1]] = op
        self._counts: Dict[object, Optional[int]] = {}

    def frame_count(self, frame: str) -> Optional[int]:
        if frame not in self._counts:
            self._counts[frame] = None
            condition = self._conditions.get(frame)
            if condition is not None:
                self._counts[frame] = self._least(self.graph, condition.inputs[0], self._value, self._step)
        return self._counts[frame]

    def while_count(self, op: Op) -> Optional[int]:
        if op.id not in self._counts:
            self._counts[op.id] = None
            body = (op.body or {}).get("cond")
            results = [inner for inner in body.ops if inner.type == "_Retval"] if body is not None else []

            def argument(graph: OpGraph, tensor: int) -> Optional[int]:
                producer = _source(graph, tensor)
                if producer.type == "_Arg":
                    return self._value(self.graph, op.inputs[int(producer.attrs["index"])])
                return _constant(producer)

            def step(graph: OpGraph, tensor: int) -> Optional[int]:
                producer, inside = _source(graph, tensor), (op.body or {}).get("body")
                if producer.type != "_Arg" or inside is None:
                    return None
                place = producer.attrs["index"]
                carried = [inner for inner in inside.ops if inner.type == "_Retval" and inner.attrs["index"] == place]
                return _added(inside, carried[0].inputs[0], argument, lambda other: (
                    other.type == "_Arg" and other.attrs["index"] == place)) if carried else None

            if body is not None and results:
                self._counts[op.id] = self._least(body, results[0].inputs[0], argument, step)
        return self._counts[op.id]

    def _least(self, graph: OpGraph, condition: int, value: _Value, step: _Value) -> Optional[int]:
        """Iterations until a comparison, or the first comparison of a conjunction, fails.

        Args:
            step: what a counter goes up by in each; None: it is no counter.
        """
        op = _source(graph, condition)
        if op.type == "LogicalAnd":
            known = [count for t in op.inputs for count in [self._least(graph, t, value, step)] if count is not None]
            return min(known) if known else None
        if not op.type.startswith(("Less", "Greater")):
            return None
        left, right = (value(graph, t) for t in op.inputs)
        if left is None or right is None:
            return None
        distance = (right - left if op.type.startswith("Less") else left - right) + op.type.endswith("Equal")
        each = next((abs(known) for known in (step(graph, t) for t in op.inputs) if known), 1)
        return max(0, -(-distance // each))

    def _step(self, graph: OpGraph, tensor: int) -> Optional[int]:
        """What a counter of a v1 loop goes up by; None: it is no counter."""
        merge = _source(graph, tensor, MERGES)
        if merge.type not in MERGES or len(merge.inputs) < 2:
            return None
        back = graph.producer(merge.inputs[1])
        return _added(graph, back.inputs[0], self._value, lambda other: other is merge) if back.type in NEXT_ITERATIONS else None

    def _value(self, graph: OpGraph, tensor: int) -> Optional[int]:
        """A counter's first value or its limit: a constant, or the iterations of another loop."""
        op = _source(graph, tensor)
        if op.type in EXITS:
            return self.frame_count(self.frames[op.id][-1])
        if op.type in WHILES:
            return self.while_count(op)
        return _constant(op)


def _source(graph: OpGraph, tensor: int, ends: Container[str] = ()) -> Op:
    """The op that produces a tensor's initial value, through ops that pass values on (a Merge's first operand is the entry).

    Args:
        ends: types that are not followed.
    """
    op = graph.producer(tensor)
    seen: List[int] = []
    while op.type in _PASSING and op.type not in ends and op.inputs and op.id not in seen:
        seen.append(op.id)
        op = graph.producer(op.inputs[0])
    return op


def _added(graph: OpGraph, tensor: int, value: _Value, is_counter: Callable[[Op], bool]) -> Optional[int]:
    """What is added to a counter, or taken from it."""
    op = _source(graph, tensor, MERGES)
    if traits(op.type).value not in ("add", "subtract"):
        return None
    others = [t for t in op.inputs if not is_counter(_source(graph, t, MERGES))]
    return value(graph, others[0]) if len(others) == 1 else None


def _constant(op: Op) -> Optional[int]:
    if op.type == "Const" and op.value is not None and op.value.size == 1 and op.value.dtype.kind in "iu":
        return int(op.value.reshape(()))
    return None
