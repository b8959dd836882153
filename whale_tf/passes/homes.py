"""Places the ops of variables that have a home.

A variable with a home (:class:`whale_tf.plan.TaskGraphPlan`) is kept there with its optimizer state.  The step-level ops that
follow from it alone (its value, a cast of it, its weight decay) run there, and so do the ops of the update that depend on no
other variable.  The values that they read from the clones (the variable's gradient) are merged there::

    replica 0   forward, backward ──> gradient ─┐
    replica 1   forward, backward ──> gradient ─┴─> sum ──> clip by norm ──> ApplyAdam(v, m)     home of v
                                                      └──> L2Loss ─┐
    homes of others                                   L2Loss ──────┴─> global norm               runs once, on no home

In each of several processes, a variable that another process owns (:mod:`whale_tf.passes.owners`) is placed on the device that
corresponds to its home in the owner's process.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Sequence, Set, Tuple

from whale_tf.ir.graph import Op, OpGraph, Phase
from whale_tf.ir.region import GATHER_ATTR
from whale_tf.ir.training_step import TrainingStep, owned
from whale_tf.ir.traits import VARIABLES, first_argument, traits
from whale_tf.ir.units import frames, may_miss
from whale_tf.plan import Plan

PREFETCH = 2  # number of ops that read variables between the op after which a value is sent and the op that reads it


class Home(NamedTuple):
    """Where a trained variable is stored and updated, and its TaskGraph."""

    device: int
    task_graph: int


class Homes(NamedTuple):
    """Attributes:
    ops: op that runs at a home -> device.
    tensors: tensor of the clones that is a gradient, or whose merged value only a home reads -> device.
    """

    ops: Mapping[int, int] = {}
    tensors: Mapping[int, int] = {}


def find_homes(step: TrainingStep, plan: Plan) -> Homes:
    """See the module's docstring."""
    return step.once(_homes, plan)


def _homes(step: TrainingStep, plan: Plan) -> Homes:
    graph, region = step.graph, step.region
    variables = {variable: plan.here(home.device) if step.processes > 1 else home.device
                 for variable, home in variables_at_home(graph, plan).items()}
    if not variables:
        return Homes()
    of = following(step, variables)
    homes_of: Dict[int, Set[int]] = {}  # of the variables that a gradient updates: parts of one may share a sparse gradient
    for tensor, variable in step.gradients:
        if variable in variables:
            homes_of.setdefault(tensor, set()).add(variables[variable])
    gradients = {tensor: min(found) for tensor, found in homes_of.items() if len(found) == 1}
    updates, variables = owned(graph, of, variables, gradients)
    ops = {**of, **updates, **variables}
    tensors = dict(gradients)
    for tensor, uses in region.leaving().items():
        found = {ops.get(op, -1) for op, _ in uses}
        if tensor not in tensors and len(found) == 1 and -1 not in found:
            tensors[tensor], = found
    return Homes(ops, tensors)


def variables_at_home(graph: OpGraph, plan: Plan) -> Dict[int, Home]:
    """The graph's variables that have homes under a plan, by op number."""
    return {graph.op(name).id: Home(device, number) for number, task in enumerate(plan.task_graphs)
            for name, device in task.homes.items() if name in graph}


def following(step: TrainingStep, owners: Mapping[int, int]) -> Dict[int, int]:
    """Ops of the step level that follow from variables of one owner alone -> the owner; ``owners`` has those of the variables."""
    graph, found = step.graph, dict(owners)
    outside = {*step.region.batch_level, *step.region.drawn_once, *step.update.variables}
    for index in step.region.ops:
        if index not in outside and index not in found:
            own = {found[before] for before in (graph.tensors[t].op for t in graph.ops[index].inputs) if before in found}
            if len(own) == 1:
                found[index], = own
    return found


def kept_in_bodies(graph: OpGraph, homes: Homes) -> Dict[int, int]:
    """Optimizer variable -> home, for those that bodies of conditions and functions update with values of one home alone.  Keras
    updates in a condition if gradients must be finite, or are accumulated over steps."""
    found: Dict[int, int] = {}
    for op in graph.ops:
        if op.phase is not Phase.APPLY or not op.body:
            continue
        producers = [graph.tensors[tensor].op for tensor in op.inputs]
        known = {position: homes.tensors.get(tensor, homes.ops.get(producers[position], -1))
                 for position, tensor in enumerate(op.inputs)}
        for position, home in _kept_in_body(op, {position: home for position, home in known.items() if home >= 0}).items():
            if graph.ops[producers[position]].type in VARIABLES and producers[position] not in homes.ops:
                found.setdefault(producers[position], home)
    return found


def _kept_in_body(op: Op, known: Mapping[int, int]) -> Dict[int, int]:
    """Inputs, by position, that are variables of a home because ``op``'s bodies write them.  ``known`` has the other homes."""
    kept: Dict[int, int] = {}
    first = first_argument(op.type)
    for body in (op.body or {}).values():
        arguments = {one.id: first + one.attrs["index"] for one in body.ops if one.type == "_Arg"}
        count = -1
        while count < len(kept):  # values that follow from such a variable belong to its home, too
            count = len(kept)
            of: Dict[int, Set[int]] = {}  # tensor -> homes
            for one in body.ops:
                own = [of[tensor] for tensor in one.inputs]
                homes = {home for single in own if len(single) == 1 for home in single}
                if one.id in arguments:
                    homes = {found[arguments[one.id]] for found in (known, kept) if arguments[one.id] in found}
                for index, tensor in enumerate(one.outputs):
                    of[tensor] = own[index] if one.type == "IdentityN" else homes
                written: Dict[int, int] = {}
                if one.body:
                    written = _kept_in_body(one, {place: min(single) for place, single in enumerate(own) if len(single) == 1})
                elif traits(one.type).is_write and len(homes) == 1:
                    written = dict.fromkeys(range(len(one.inputs)), min(homes))
                for place, home in written.items():
                    record = body.tensors[one.inputs[place]]
                    position = arguments.get(record.op)
                    if record.dtype == "resource" and position is not None and position not in known:
                        kept.setdefault(position, home)
    return kept


def reads_anew(graph: OpGraph, homes: Homes, ops: Sequence[int]) -> Tuple[Tuple[int, int], ...]:
    """The values that a body reads from variables at their homes, with the op of the body after which each value is sent.  That
    is the op that reads variables :data:`PREFETCH` before the value's first reader; for the first values, it is an op from which
    the first reader follows.  So few values are on a device at a time, and yet no op waits for one::

        reads w0, w1, w2, w3 ...      w2 is sent after the op that reads w0, w3 after the one that reads w1

    What puts the parts of a variable together counts as the op that reads the whole.
    """
    own, reader_of = set(ops), {}  # type: Set[int], Dict[int, int]
    for index in ops:
        for tensor in graph.ops[index].inputs:
            if is_value_at_home(graph, homes, tensor):
                reader = _reader(graph, index, own)
                reader_of[tensor] = min(reader, reader_of.get(tensor, reader))
    first: Dict[int, List[int]] = {}  # reader -> tensors
    for tensor, reader in reader_of.items():
        first.setdefault(reader, []).append(tensor)
    readers, may_wait = sorted(first), own.difference(frames(graph), may_miss(graph))
    found, before = [], -1  # type: List[Tuple[int, int]], int
    for place, reader in enumerate(readers):
        if place >= PREFETCH:
            before = readers[place - PREFETCH]
        else:
            before = max((op for op in _behind(graph, reader, own) if op not in first), default=before)
        found += [(tensor, before if before in may_wait else -1) for tensor in first[reader]]
    return tuple(found)


def _behind(graph: OpGraph, reader: int, own: Set[int]) -> Set[int]:
    """The body's ops from which a reader follows, without padding, which TensorFlow may run as one with it: the value would wait
    for its own reader."""
    found = {op for op in graph.predecessors(graph.ops[reader]) if op in own and GATHER_ATTR not in graph.ops[op].attrs}
    padding = {op for op in found if graph.ops[op].type in ("Pad", "PadV2")}
    return (found - padding).union(*(graph.predecessors(graph.ops[op]) for op in padding)) & own


def _reader(graph: OpGraph, index: int, own: Set[int]) -> int:
    """An op that reads variables; of one that puts parts together the first that reads the result."""
    if GATHER_ATTR not in graph.ops[index].attrs:
        return index
    return min((user for user, _ in graph.consumers(graph.ops[index].outputs[0]) if user in own), default=index)


def is_value_at_home(graph: OpGraph, homes: Homes, tensor: int) -> bool:
    """Whether a tensor is a value, not a handle, of an op that runs at a variable's home."""
    record = graph.tensors[tensor]
    return record.op in homes.ops and record.dtype != "resource" and not record.dtype.endswith("_ref")
