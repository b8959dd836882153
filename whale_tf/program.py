"""The Program: what a training step runs, as bodies and calls.

A *body* is a piece of the op graph that runs as a whole: of each TaskGraph the *forward* ops of one micro-batch, the *backward*
ops, and the *early* ones, which run ahead of the schedule because a value of the whole mini-batch follows from them.  A *call* is
a body at coordinates (model replica, micro-batch, replica) on a device.  It takes values from other calls, and the schedule may
put other calls before it.  These are the task graphs of the papers (Rhino section 6; DAPPLE Fig. 3)::

    >>> print(program.to_text())
    t0_forward     12 ops  takes x:0, w/read:0  gives relu:0
    t1_forward      9 ops  takes relu:0, y:0, v/read:0  gives loss:0, sub:0
    ...
    #0 t0_forward  g0 m0 r0  on 0
    #1 t0_forward  g0 m1 r0  on 0  after #0
    #2 t1_forward  g0 m0 r0  on 1  takes relu:0 from #0

Passes make it from an op graph and a Plan (``whale_tf.passes``).  It is frozen, and it knows no TensorFlow.
"""

from __future__ import annotations

from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.ir.graph import OpGraph

EARLY, FORWARD, BACKWARD = "early", "forward", "backward"
STEPS = (EARLY, FORWARD, BACKWARD)


class Clone(NamedTuple):
    """Which of a TaskGraph's clones: in model replica ``g``, of micro-batch ``m``, on replica ``r``."""

    g: int
    m: int
    r: int


class Body(NamedTuple):
    """Ops that run together.

    Attributes:
        name: ``t<TaskGraph>_<step>``.
        step: one of :data:`STEPS`.
        ops: their numbers, in graph order.
        inputs: tensors of elsewhere that they read, in the order of their first use.
        outputs: tensors of theirs that something else reads or a user is likely to fetch.
    """

    name: str
    task_graph: int
    step: str
    ops: Tuple[int, ...]
    inputs: Tuple[int, ...]
    outputs: Tuple[int, ...]


class Value(NamedTuple):
    """A tensor that a call takes from others: from several where the producer's replicas cut a micro-batch in other places, and
    from all clones where it is a value of the whole mini-batch."""

    tensor: int
    calls: Tuple[int, ...]


class Call(NamedTuple):
    """A body, run once.

    Attributes:
        body: number in ``Program.bodies``.
        devices: numbers of the cluster's devices it runs on: one, or under ``split`` those that share its ops.
        takes: what it takes from other calls.
        after: calls that the schedule puts before it.
    """

    body: int
    clone: Clone
    devices: Tuple[int, ...]
    takes: Tuple[Value, ...] = ()
    after: Tuple[int, ...] = ()


class Program(NamedTuple):
    """Attributes:
    graph: what the bodies are pieces of.
    calls: those of one replica in the order in which its schedule runs them.
    """

    graph: OpGraph
    bodies: Tuple[Body, ...]
    calls: Tuple[Call, ...] = ()

    def body(self, task_graph: int, step: str) -> Optional[Body]:
        """A TaskGraph's body of one step; None: it has no ops in that step."""
        return next((body for body in self.bodies if body.task_graph == task_graph and body.step == step), None)

    def body_of(self) -> Dict[int, int]:
        """Op number -> number of its body."""
        return {op: number for number, body in enumerate(self.bodies) for op in body.ops}

    def calls_of(self, task_graph: int, step: str) -> Iterator[Call]:
        """The calls of one body, in schedule order."""
        for call in self.calls:
            body = self.bodies[call.body]
            if body.task_graph == task_graph and body.step == step:
                yield call

    def to_text(self, devices: Sequence[str] = ()) -> str:
        """One line for each body, then one for each call.

        Args:
            devices: names of the cluster's devices; by default their numbers are shown.
        """
        width = max([len(body.name) for body in self.bodies], default=0)
        lines = [f"{body.name:{width}} {len(body.ops):5} ops  takes {self._names(body.inputs)}  gives {self._names(body.outputs)}"
                 for body in self.bodies]
        digits = len(str(max(len(self.calls) - 1, 0)))
        for number, call in enumerate(self.calls):
            where = ",".join(devices[device] if devices else str(device) for device in call.devices)
            coordinates = "g{} m{} r{}".format(*call.clone)
            parts = [f"#{number:<{digits}} {self.bodies[call.body].name:{width}} {coordinates}  on {where}"]
            if call.takes:
                taken = [f"{self.graph.tensor_name(value.tensor)} from {_numbers(value.calls)}" for value in call.takes[:MOST]]
                parts.append("takes " + ", ".join(taken + [f"{len(call.takes) - MOST} more"] * (len(call.takes) > MOST)))
            if call.after:
                parts.append(f"after {_numbers(call.after)}")
            lines.append("  ".join(parts))
        return "\n".join(lines) + "\n"

    def _names(self, tensors: Sequence[int]) -> str:
        shown: List[str] = [self.graph.tensor_name(tensor) for tensor in tensors[:MOST]]
        if len(tensors) > MOST:
            shown.append(f"{len(tensors) - MOST} more")
        return ", ".join(shown) or "nothing"


MOST = 4  # names of a longer list


def _numbers(calls: Sequence[int]) -> str:
    return "+".join(f"#{call}" for call in calls)
