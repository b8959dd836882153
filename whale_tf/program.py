"""The Program: a training step as bodies and calls.

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

Each TaskGraph has these bodies of ops:

    once        ops that do not depend on an example: reads of variables, weight decay; on every copy of the TaskGraph
    early       ops that run ahead of the schedule, because a value of the whole mini-batch follows from them
    section     ops that need all examples together: they run once, on values of the whole mini-batch
    forward     the other forward ops of one micro-batch
    backward    the ops of one micro-batch that follow from a gradient
    weight      those of them for which no other TaskGraph waits, if the schedule separates them
    update      the optimizer's ops; ops that belong to no single TaskGraph are in separate bodies

Communication has bodies without ops of the graph.  Their ops follow from a recipe, by the layouts of their tensors:

    divide      a mini-batch into the parts of a TaskGraph's clones
    bridge      parts of a micro-batch between TaskGraphs that divide it in different ways
    whole       all clones' values combined, ahead of the schedule
    accumulate  gradients added to those of the previous micro-batch
    synchronise gradients summed over all copies (and processes), with the result on each of them
    merge       the local script's value from the clones' values, for its readers and for fetches
    gather      values of variables that only one process has, sent to the others before the calls that read them
    broadcast   results of an update that one process computes for all, sent to the others: new values of variables

Passes make a Program from a training step and a Plan (``whale_tf.passes``).  It is frozen and does not use TensorFlow.
"""

from __future__ import annotations

from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.ir.graph import OpGraph

ONCE, EARLY, SECTION, FORWARD = "once", "early", "section", "forward"
BACKWARD, WEIGHT, UPDATE = "backward", "weight", "update"
DIVIDE, BRIDGE, WHOLE, ACCUMULATE, SYNCHRONISE, MERGE = "divide", "bridge", "whole", "accumulate", "synchronise", "merge"
GATHER, BROADCAST = "gather", "broadcast"
MESSAGES = (GATHER, BROADCAST)  # from one process to all others
CLONED = (EARLY, FORWARD, BACKWARD, WEIGHT)  # called for every micro-batch and replica
RECIPES = (DIVIDE, BRIDGE, WHOLE, ACCUMULATE, SYNCHRONISE, MERGE, *MESSAGES)
BATCH_LEVEL = (EARLY, SECTION, FORWARD, BACKWARD, WEIGHT)
ALL = -1  # instead of a coordinate


class Clone(NamedTuple):
    """Coordinates of a TaskGraph's clone: model replica ``g``, micro-batch ``m``, replica ``r``; :data:`ALL` means all of
    them."""

    g: int
    m: int
    r: int


class Copy(NamedTuple):
    """Coordinates of a TaskGraph's copy: model replica ``g``, replica ``r``.  Each copy has its ops that do not depend on an
    example, its variables and their updates.  The first copy is the local script's own."""

    g: int
    r: int

    @property
    def clone(self) -> Clone:
        """The same coordinates as those of a call."""
        return Clone(self.g, ALL, self.r)


ORIGINAL = Copy(0, 0)
EVERY = Clone(ALL, ALL, ALL)  # the coordinates of a section


class Body(NamedTuple):
    """A piece of the step that runs as a whole.

    Attributes:
        name: unique name.
        task_graph: its TaskGraph; -1 if it runs once for all.
        step: its part of the step (see the module's docstring).
        ops: numbers of its ops, in graph order; none if a recipe says what runs.
        inputs: tensors from elsewhere that it reads, in the order of their first use.
        outputs: tensors that something else reads or a user is likely to fetch.
        functions: for a called body, the ops of each of its functions, which run one after another: its own live ops, and ops
            of the forward body that it repeats, in an order in which they can run.
        waits: (repeated op, its own op for which that one waits).
        reads: (tensor, op) if each call reads a variable at its home again: a value from there, and the body's own op after which
            it is sent (-1: none).
        donated: (tensor, number of the function that reads it) for what the TaskGraph's forward body donates
            (:mod:`whale_tf.passes.donate`).
        with_forward: a called backward body that begins with its TaskGraph's forward ops (:mod:`whale_tf.passes.fuse`).
        home: the one device on which it runs, where its variables are (:mod:`whale_tf.passes.homes`); None means the devices of
            its TaskGraph.
    """

    name: str
    task_graph: int
    step: str
    ops: Tuple[int, ...]
    inputs: Tuple[int, ...]
    outputs: Tuple[int, ...]
    functions: Tuple[Tuple[int, ...], ...] = ()
    waits: Tuple[Tuple[int, int], ...] = ()
    reads: Tuple[Tuple[int, int], ...] = ()
    donated: Tuple[Tuple[int, int], ...] = ()
    with_forward: bool = False
    home: Optional[int] = None

    @property
    def is_recipe(self) -> bool:
        return self.step in RECIPES

    @property
    def runs(self) -> Tuple[int, ...]:
        """The ops of all functions of a called body."""
        return tuple([index for ops in self.functions for index in ops])


class Value(NamedTuple):
    """A tensor that a call takes from other calls; from several if their values are combined."""

    tensor: int
    calls: Tuple[int, ...]


class Call(NamedTuple):
    """A body, run once.

    Attributes:
        body: number in ``Program.bodies``.
        devices: numbers of the cluster's devices on which it runs.  For a ``split`` TaskGraph they share its ops; for a
            synchronisation they get the result; none means the host.
        takes: the values it takes from other calls.
        after: calls that the schedule puts before it; for a broadcast, the updates whose variables it sends.
    """

    body: int
    clone: Clone
    devices: Tuple[int, ...]
    takes: Tuple[Value, ...] = ()
    after: Tuple[int, ...] = ()


class Program(NamedTuple):
    """Attributes:
    graph: the graph of which the bodies are pieces.
    calls: all calls, with those of one replica in the order in which its schedule runs them.
    """

    graph: OpGraph
    bodies: Tuple[Body, ...]
    calls: Tuple[Call, ...] = ()

    def body(self, task_graph: int, step: str) -> Optional[Body]:
        """A TaskGraph's body of one step; None if it has no ops in that step."""
        return next((body for body in self.bodies if body.task_graph == task_graph and body.step == step), None)

    def body_of(self) -> Dict[int, int]:
        """Op number -> number of its body."""
        return {op: number for number, body in enumerate(self.bodies) for op in body.ops}

    def step_of(self, call: Call) -> str:
        return self.bodies[call.body].step

    def functions(self, body: Body) -> List[Body]:
        """The functions of a called body, each as a body that gives what the body gives and what later functions read.  The last
        one has the body's name: when it ends, all have ended."""
        if len(body.functions) < 2:
            return [body]
        made = {tensor: index for index, ops in enumerate(body.functions) for op in ops for tensor in self.graph.ops[op].outputs}
        read = {tensor for index, ops in enumerate(body.functions) for op in ops for tensor in self.graph.ops[op].inputs
                if made.get(tensor, index) != index and self.graph.producer(tensor).value is None}  # each has its own constants
        given = read.union(body.outputs)
        found = []
        for index, ops in enumerate(body.functions):
            own = set(ops)
            name = body.name if index == len(body.functions) - 1 else f"{body.name}/{index}"
            outputs = tuple([tensor for op in ops for tensor in self.graph.ops[op].outputs if tensor in given])
            waits = tuple([wait for wait in body.waits if own.issuperset(wait)])
            donated = tuple([(tensor, 0) for tensor, reader in body.donated if reader == index])
            found.append(body._replace(name=name, functions=(ops,), outputs=outputs, waits=waits, donated=donated))
        return found

    def with_calls(self, bodies: Sequence[Body], calls: Sequence[Call]) -> Program:
        """The Program with more bodies and calls at the end."""
        return self._replace(bodies=self.bodies + tuple(bodies), calls=self.calls + tuple(calls))

    def in_order(self, sequence: Sequence[int]) -> Program:
        """The same calls in another order."""
        new = {number: index for index, number in enumerate(sequence)}

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
                 + "  with forward" * body.with_forward
                 + (f"  in {len(body.functions)} functions" if len(body.functions) > 1 else "")
                 + (f"  owns {self._names(dict.fromkeys(tensor for tensor, _ in body.donated))}" if body.donated else "")
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


MOST, MOST_CALLS = 3, 8  # how many names and numbers to show of a longer list


def _shortened(names: List[str]) -> str:
    return ", ".join(names[:MOST] + [f"{len(names) - MOST} more"] * (len(names) > MOST))


def _numbers(calls: Sequence[int]) -> str:
    shown = [f"#{call}" for call in calls[:MOST_CALLS]]
    return "+".join(shown + [f"{len(calls) - MOST_CALLS} more"] * (len(calls) > MOST_CALLS))
