"""Makes calls of bodies on the Plan's devices: one for each model replica, micro-batch and replica, or one for each copy.

A call takes a tensor of its own TaskGraph from the call with the same coordinates.  Between TaskGraphs with different numbers of
replicas it takes the parts that overlap its own (``whale_tf.bridges``).  Ops that run once take the values of all clones.
"""

from __future__ import annotations

from typing import Dict, List, Tuple, Union

from whale_tf.bridges import Cuts, crossing, cuts
from whale_tf.ir.batch_axis import EXTENT, EXTREMES
from whale_tf.ir.training_step import TrainingStep
from whale_tf.plan import Plan
from whale_tf.program import ALL, CLONED, EVERY, ORIGINAL, SECTION, Body, Call, Clone, Copy, Program, Value


def replicate(program: Program, step: TrainingStep, plan: Plan) -> Program:
    """The calls of every body, in the order of their examples."""
    number: Dict[Tuple[int, Clone], int] = {}
    for index, maker in enumerate(program.bodies):
        for clone in _places(plan, maker):
            number[index, clone] = len(number)
    body_of = program.body_of()
    sources = [[(tensor, body_of[op]) for tensor in body.inputs for op in [program.graph.tensors[tensor].op] if op in body_of]
               for body in program.bodies]
    calls = []
    for index, clone in number:
        body, takes = program.bodies[index], []
        alike: Dict[int, Tuple[int, ...]] = {}
        for tensor, source in sources[index]:
            found = alike.get(source)
            if found is None:
                maker = program.bodies[source]
                found = tuple([number[source, piece] for piece in _pieces(step, plan, maker, body, tensor, clone)])
                if not (maker.step in CLONED and body.step in CLONED and is_bridged(plan, maker.task_graph, body.task_graph)):
                    alike[source] = found  # whatever the tensor
            if found:
                takes.append(Value(tensor, found))
        devices = devices_of(plan, body.task_graph, clone) if body.home is None else (body.home,)
        calls.append(Call(index, clone, devices, tuple(takes)))
    return program._replace(calls=tuple(calls))


def _places(plan: Plan, body: Body) -> List[Clone]:
    if body.step in CLONED:
        return clones(plan, body.task_graph)
    if body.task_graph == ALL or body.step == SECTION:
        return [EVERY]
    return [copy.clone for copy in copies(plan, body.task_graph)]


def _pieces(step: TrainingStep, plan: Plan, source: Body, reader: Body, tensor: int, clone: Clone) -> List[Clone]:
    """Coordinates of the calls from which a call takes a tensor."""
    producer = source.task_graph
    if source.step not in CLONED:
        if producer == ALL or source.step == SECTION:
            return [EVERY]
        if clone.g == ALL:
            return [ORIGINAL.clone]
        return [copy_for(plan, producer, clone).clone]
    if reader.step == SECTION:  # the same in all clones, otherwise combined
        return clones(plan, producer)[:1]
    if reader.step not in CLONED:
        return clones(plan, producer)
    return pieces_of(step, plan, tensor, reader.task_graph, clone)


def clones(plan: Plan, task_graph: int) -> List[Clone]:
    """All clones of a TaskGraph, in the order of their examples."""
    count = plan.task_graphs[task_graph].replica_count
    return [Clone(g, m, r) for g in range(plan.num_model_replicas) for m in range(plan.num_micro_batch) for r in range(count)]


def has_one_clone(plan: Plan) -> bool:
    """Whether every TaskGraph has a single clone, which works on the whole mini-batch."""
    return all(len(clones(plan, number)) == 1 for number in range(len(plan.task_graphs)))


def copies(plan: Plan, task_graph: int) -> List[Copy]:
    """All copies of a TaskGraph's variables and of ops that do not depend on an example, the original first."""
    task = plan.task_graphs[task_graph]
    if task.variables == "shared":
        return [ORIGINAL]
    return [Copy(g, r) for g in range(plan.num_model_replicas) for r in range(task.replica_count)]


def copy_for(plan: Plan, task_graph: int, at: Union[Clone, Copy]) -> Copy:
    """The copy of a TaskGraph that a clone or copy, of this TaskGraph or of another one, reads."""
    task = plan.task_graphs[task_graph]
    if task.variables == "shared" or at.g == ALL:
        return ORIGINAL
    return Copy(at.g, at.r % task.replica_count)


def devices_of(plan: Plan, task_graph: int, clone: Clone) -> Tuple[int, ...]:
    """The devices of a clone or copy.  Under ``split`` these are all devices of the replica, which share its ops."""
    if task_graph == ALL:
        return ()
    task = plan.task_graphs[task_graph]
    if clone == EVERY:
        clone = clones(plan, task_graph)[0]
    row = task.devices[clone.g]
    return row if task.strategy == "split" else (row[clone.r],)


def device_at(plan: Plan, task_graph: int, at: Tuple[int, ...], shard: int = 0) -> int:
    """The device of a clone or a copy (first field: model replica, last field: replica).  Under ``split`` the replica has several
    devices, and ``shard`` says which."""
    task = plan.task_graphs[task_graph]
    g, r = (max(0, at[0]), max(0, at[-1]))  # what belongs to all is on the first one's
    return task.devices[g][shard if task.strategy == "split" else r]


def pieces_of(step: TrainingStep, plan: Plan, tensor: int, consumer: int, clone: Clone) -> List[Clone]:
    """Clones of a tensor's TaskGraph whose values a clone of the consumer needs."""
    producer = step.task_graph_of(tensor)
    if not is_bridged(plan, producer, consumer):
        return [clone]
    layout, count = step.region.batch.layout(tensor), plan.task_graphs[producer].replica_count
    if layout.is_sharded:
        others, own = cuts_of(plan, producer), cuts_of(plan, consumer)
        return [clone._replace(r=r) for r in crossing(others, own, clone.r).producers]
    if layout.is_partial or layout.kind in EXTREMES:
        return [clone._replace(r=r) for r in range(count)]
    if layout.kind == EXTENT.kind:
        return []  # it depends on the clone's own number of examples
    return [clone._replace(r=clone.r % count)]


def is_bridged(plan: Plan, producer: int, consumer: int) -> bool:
    """Whether two TaskGraphs cut a micro-batch at different places.  Otherwise tensors cross one to one."""
    return producer != consumer and cuts_of(plan, producer) != cuts_of(plan, consumer)


def cuts_of(plan: Plan, task_graph: int) -> Cuts:
    """Where the parts of a TaskGraph's replicas begin and end."""
    task = plan.task_graphs[task_graph]
    return cuts(task.replica_count, task.batch_slices)
