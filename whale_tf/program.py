"""The Program: what a training step runs, as bodies and calls.

A *body* is a piece of the step that runs as a whole; a *call* is a body at coordinates (model replica, micro-batch, replica) on
a device.  A call takes values from other calls, and the schedule may put other calls before it.  These are the task graphs of the
papers (Rhino section 6; DAPPLE Fig. 3)::

    >>> print(program.to_text())
    t0_forward     12 ops  takes x:0, w/read:0  gives relu:0
    t1_forward      9 ops  takes relu:0, y:0, v/read:0  gives loss:0, sub:0
    ...
    #4 t0_forward  g0 m0 r0  on 0  takes x:0 from #0
    #5 t0_forward  g0 m1 r0  on 0  takes x:0 from #0  after #4
    #6 t1_forward  g0 m0 r0  on 1  takes relu:0 from #4, y:0 from #1

The bodies of ops, of each TaskGraph:

    once        what does not depend on an example: variables' reads, weight decay; on every copy of the TaskGraph
    early       what runs ahead of the schedule, because a value of the whole mini-batch follows from it
    section     what needs all examples together: once, on values of the whole mini-batch
    forward     the other forward ops of one micro-batch
    backward    the ops of one micro-batch that follow from a gradient
    weight      those of them that no other TaskGraph waits for, where the schedule wants them apart
    update      the optimizer's ops; those that belong to no single TaskGraph are in bodies of their own

Communication has bodies without ops of the graph.  Their ops follow from a recipe, by the layouts of their tensors:

    divide      a mini-batch into the parts of a TaskGraph's clones
    bridge      parts of a micro-batch between TaskGraphs that divide it in different ways
    whole       all clones' values combined, ahead of the schedule
    accumulate  gradients added to those of the micro-batch before
    synchronise gradients over all copies (and processes), the result on each of them
    merge       the local script's value out of the clones' values, for whoever reads or fetches it
    broadcast   what one process computes of an update for all, to the others: new values of variables

Passes make a Program from a training step and a Plan (``whale_tf.passes``).  It is frozen, and it knows no TensorFlow.
"""

from __future__ import annotations

from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.ir.graph import OpGraph

ONCE, EARLY, SECTION, FORWARD = "once", "early", "section", "forward"
BACKWARD, WEIGHT, UPDATE = "backward", "weight", "update"
DIVIDE, BRIDGE, WHOLE, ACCUMULATE, SYNCHRONISE, MERGE = "divide", "bridge", "whole", "accumulate", "synchronise", "merge"
BROADCAST = "broadcast"
CLONED = (EARLY, FORWARD, BACKWARD, WEIGHT)  # called for every micro-batch and replica
RECIPES = (DIVIDE, BRIDGE, WHOLE, ACCUMULATE, SYNCHRONISE, MERGE, BROADCAST)
BATCH_LEVEL = (EARLY, SECTION, FORWARD, BACKWARD, WEIGHT)
ALL = -1  # in place of a coordinate


class Clone(NamedTuple):
    """Which of a TaskGraph's clones: in model replica ``g``, of micro-batch ``m``, on replica ``r``; :data:`ALL`: of all."""

    g: int
    m: int
    r: int


class Copy(NamedTuple):
    """Which of a TaskGraph's devices: in model replica ``g``, replica ``r``.  What does not depend on an example, variables and
    their updates have one copy each; the first is the local script's own."""

    g: int
    r: int

    @property
    def clone(self) -> Clone:
        """The same as the coordinates of a call."""
        return Clone(self.g, ALL, self.r)


ORIGINAL = Copy(0, 0)
EVERY = Clone(ALL, ALL, ALL)  # the place of a section


class Body(NamedTuple):
    """What runs together.

    Attributes:
        name: unique.
        task_graph: whose it is; -1: it runs once, for all.
        step: which part of the step it is (see the module's docstring).
        ops: their numbers, in graph order; none where a recipe says what runs.
        inputs: tensors of elsewhere that it reads, in the order of their first use.
        outputs: tensors that something else reads or a user is likely to fetch.
        runs: where it is a function, the ops in that: live ones of its own, and ops of the forward body that it does again.
        waits: (op done again, op of its own that this one waits for).
        reads: (tensor, op), where each call reads a variable anew at its home: a value from there, and the op of its own after
            which it is sent (-1: none).
        home: the one device that it runs on, where its variables are (:mod:`whale_tf.passes.homes`); None: its TaskGraph's.
    """

    name: str
    task_graph: int
    step: str
    ops: Tuple[int, ...]
    inputs: Tuple[int, ...]
    outputs: Tuple[int, ...]
    runs: Tuple[int, ...] = ()
    waits: Tuple[Tuple[int, int], ...] = ()
    reads: Tuple[Tuple[int, int], ...] = ()
    home: Optional[int] = None

    @property
    def is_recipe(self) -> bool:
        return self.step in RECIPES


class Value(NamedTuple):
    """A tensor that a call takes from others: from several where their values are to be combined."""

    tensor: int
    calls: Tuple[int, ...]


class Call(NamedTuple):
    """A body, run once.

    Attributes:
        body: number in ``Program.bodies``.
        devices: numbers of the cluster's devices it runs on.  Of a ``split`` TaskGraph those that share its ops, of a
            synchronisation those that get the result; none: the host.
        takes: what it takes from other calls.
        after: calls that the schedule puts before it; of a broadcast the updates whose variables it sends.
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
        """The calls of a TaskGraph's bodies of one step, in schedule order."""
        for call in self.calls:
            body = self.bodies[call.body]
            if body.task_graph == task_graph and body.step == step:
                yield call

    def step_of(self, call: Call) -> str:
        return self.bodies[call.body].step

    def with_calls(self, bodies: Sequence[Body], calls: Sequence[Call]) -> Program:
        """More bodies and calls at the end."""
        return self._replace(bodies=self.bodies + tuple(bodies), calls=self.calls + tuple(calls))

    def in_order(self, sequence: Sequence[int]) -> Program:
        """The same calls in another order."""
        new = {number: place for place, number in enumerate(sequence)}

        known: Dict[Tuple[int, ...], Tuple[int, ...]] = {}  # most calls take many tensors from the same few

        def renumbered(calls: Tuple[int, ...]) -> Tuple[int, ...]:
            if calls not in known:
                known[calls] = tuple([new[source] for source in calls])
            return known[calls]

        def moved(call: Call) -> Call:
            takes = tuple([Value(tensor, renumbered(calls)) for tensor, calls in call.takes])
            return call._replace(takes=takes, after=renumbered(call.after))

        return self._replace(calls=tuple(moved(self.calls[number]) for number in sequence))

    def to_text(self, devices: Sequence[str] = ()) -> str:
        """One line for each body of ops, then one for each call.

        Args:
            devices: names of the cluster's devices; by default their numbers are shown.
        """
        width = max([len(body.name) for body in self.bodies], default=0)
        lines = [f"{body.name:{width}} {len(body.ops):5} ops  takes {self._names(body.inputs)}  gives {self._names(body.outputs)}"
                 + (f"  reads anew {self._reads(body)}" if body.reads else "") for body in self.bodies if not body.is_recipe]
        digits = len(str(max(len(self.calls) - 1, 0)))
        return "\n".join(lines + [f"#{number:<{digits}} {self._line(call, devices, width)}"
                                  for number, call in enumerate(self.calls)]) + "\n"

    def _line(self, call: Call, devices: Sequence[str], width: int) -> str:
        coordinates = " ".join(f"{letter}{index}" for letter, index in zip("gmr", call.clone) if index != ALL)
        where = ",".join(devices[device] if devices else str(device) for device in call.devices) or "host"
        parts = [f"{self.bodies[call.body].name:{width}} {coordinates:8}  on {where}"]
        if call.takes:
            groups: Dict[Tuple[int, ...], List[int]] = {}
            for tensor, calls in call.takes:
                groups.setdefault(calls, []).append(tensor)
            taken = [f"{self._names(tensors)} from {_numbers(calls)}" for calls, tensors in groups.items()]
            parts.append("takes " + "; ".join(taken))
        elif self.bodies[call.body].is_recipe:
            parts.append("takes " + self._names(self.bodies[call.body].inputs))
        if call.after:
            parts.append(f"after {_numbers(call.after)}")
        return "  ".join(parts)

    def _reads(self, body: Body) -> str:
        return _shortened([self.graph.tensor_name(tensor) + ("" if op < 0 else f" after {self.graph.ops[op].name}")
                           for tensor, op in body.reads])

    def _names(self, tensors: Iterable[int]) -> str:
        return _shortened([self.graph.tensor_name(tensor) for tensor in tensors]) or "nothing"


MOST, MOST_CALLS = 3, 8  # names, and numbers, of a longer list


def _shortened(names: List[str]) -> str:
    return ", ".join(names[:MOST] + [f"{len(names) - MOST} more"] * (len(names) > MOST))


def _numbers(calls: Sequence[int]) -> str:
    shown = [f"#{call}" for call in calls[:MOST_CALLS]]
    return "+".join(shown + [f"{len(calls) - MOST_CALLS} more"] * (len(calls) > MOST_CALLS))
