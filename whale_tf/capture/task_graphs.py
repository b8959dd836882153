"""To which TaskGraph each forward and backward op belongs (Whale 3.1: a TaskGraph is what one primitive annotates).

* A forward op is in the TaskGraph under which it was created.  Outside all annotations it is in the default strategy's
  TaskGraph if there is one; else it joins its latest producer's (the highest index), else its first consumer's.  What a gradient
  call adds to a version 1 loop joins the loop, also under a default strategy.
* All ops that use one tensor array of version 1, or one stack, are in one TaskGraph, because only one device has the array: in
  that of a loop that uses it, else in that of the last op that fills it.
* A backward op is in its forward op's TaskGraph, regardless of where it was created.  Backward ops without a forward op
  (sums of gradients, initial gradients) come after all their backward producers, so they join the lowest index among
  those, else the highest among the forward ops they read, else the highest among their consumers.  Tapes do not say to which
  call of a function a call in the backward pass belongs: it is the latest one whose results it reads.
* A variable's TaskGraph is the first TaskGraph that reads it in the forward pass.
* An annotation that holds only variables, and ops that move their elements, is no TaskGraph of its own if other annotations use
  these variables: its ops join the first one that does.
"""
from __future__ import annotations

from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf.capture.annotations import PHASE_ATTR, Annotation, Annotations, call_text
from whale_tf.capture.variables import Variables, find_variables
from whale_tf.errors import AnnotationError
from whale_tf.ir.graph import SHARD_ATTR, Op, OpGraph, Phase
from whale_tf.ir.traits import CALLS, FILLS, READS, VARIABLES, Cost, Role, traits
from whale_tf.ir.units import containers, frames
from whale_tf.ir.walk import reached


class TaskGraphs(NamedTuple):
    """``of[op]``: the TaskGraph of each FORWARD or BACKWARD op, -1 for all others (and for all ops of a graph without
    annotations).  ``of_variables``: variable op -> its TaskGraph, for the variables that the forward pass reads.  ``blocks``: the
    annotation of each TaskGraph, if annotations determine them."""

    of: List[int]
    of_variables: Dict[int, int]
    blocks: Tuple[Annotation, ...] = ()


class Detour(NamedTuple):
    """A path that leaves TaskGraph ``task_graph`` and comes back: ``path`` lists the ops.  If there is no single path, but two
    TaskGraphs wait for each other, the path continues at another op of the same TaskGraph."""

    task_graph: int
    path: Tuple[int, ...]


def assign(graph: OpGraph, annotations: Annotations, variables: Optional[Variables] = None) -> TaskGraphs:
    """TaskGraph membership; needs the phases (:func:`whale_tf.capture.phases.find_phases`).

    Raises:
        AnnotationError: an annotation inside a function body, one without forward ops, or a ``split`` one that divides nothing.
    """
    variables = find_variables(graph) if variables is None else variables
    check_bodies(graph)
    if not annotations.items:
        return TaskGraphs([-1] * len(graph.ops), {})
    _check_annotations(graph, annotations)
    joined = _of_variables(graph, annotations)
    blocks = [item for item in annotations.items if item.index not in joined]
    return complete(graph, _annotated(graph, annotations, blocks), variables)._replace(blocks=tuple(blocks))


def assign_planned(graph: OpGraph, members: Sequence[Sequence[str]], variables: Variables) -> TaskGraphs:
    """TaskGraph membership from a plan's lists of forward ops; other ops join one as un-annotated ops do."""
    of = [-1] * len(graph.ops)
    for index, names in enumerate(members):
        for name in names:
            op = graph.op(name)
            if op.phase is Phase.FORWARD:
                of[op.id] = index
    return complete(graph, of, variables)


def complete(graph: OpGraph, of: List[int], variables: Variables) -> TaskGraphs:
    """Membership of all ops from that of some; ops that wh.split made are tagged with theirs."""
    for op in graph.ops:
        if op.phase not in (Phase.FORWARD, Phase.BACKWARD):
            of[op.id] = -1
        elif SHARD_ATTR in op.attrs:
            of[op.id] = op.task_graph
    _assign_forward(graph, of)
    _join_arrays(graph, of)
    of_variables = _by_variable(graph, variables, of)
    for variable, task_graph in of_variables.items():
        if graph.ops[variable].phase is Phase.FORWARD:
            of[variable] = task_graph
    _assign_backward(graph, of)
    return TaskGraphs(of, of_variables)


def find_detour(graph: OpGraph, task_graphs: TaskGraphs, variables: Optional[Variables] = None) -> Optional[Detour]:
    """None if the TaskGraphs can run one after the other, as pipeline stages must; else a path that shows why not.

    TaskGraphs can be ordered, and then are convex, if and only if the graph of TaskGraphs formed by forward edges has no cycle.
    Edges out of variables and their reads do not count: a shared variable is not an activation.
    """
    variables = find_variables(graph) if variables is None else variables
    edges = _crossing_edges(graph, task_graphs, variables)
    cycle = _cycle(edges)
    if cycle is None:
        return None
    return Detour(cycle[0], _path(graph, task_graphs, cycle, edges))


def check_convex(graph: OpGraph, task_graphs: TaskGraphs, names: Sequence[str],
                 variables: Optional[Variables] = None) -> None:
    """Raises:
        AnnotationError: :func:`find_detour` finds a detour; the message shows the path.
    """
    detour = find_detour(graph, task_graphs, variables)
    if detour is None:
        return
    steps = " -> ".join(f"{graph.ops[op].name} (TaskGraph {task_graphs.of[op]})" for op in detour.path)
    raise AnnotationError(
        f"TaskGraph {detour.task_graph} ({names[detour.task_graph]!r}) is not convex: a path leaves it and comes "
        f"back, so it cannot be a pipeline stage: {steps}. Put the ops in between under the same annotation, or open a new "
        "annotation where the path comes back.")


# -- checks ---------------------------------------------------------------------------------------------------------
def check_bodies(graph: OpGraph) -> None:
    """Raises:
        AnnotationError: an annotation inside a function body.
    """
    for op in graph.ops:
        # an input pipeline may be made under an annotation; it runs once, regardless of its functions' tags
        tagged = _annotated_inside(op, set()) if op.phase in (Phase.FORWARD, Phase.BACKWARD) else None
        if tagged is not None:
            raise AnnotationError(
                f"op {tagged.name!r} is annotated inside the function body of {op.name!r} ({op.type}). A loop, "
                "condition or function call is in one TaskGraph: put `with wh.replicate(...)` around the whole call.")


def _annotated_inside(op: Op, seen: Set[int]) -> Optional[Op]:
    for body in (op.body or {}).values():
        if id(body) in seen:
            continue
        seen.add(id(body))
        for inner in body.ops:
            tagged = inner if inner.task_graph >= 0 else _annotated_inside(inner, seen)
            if tagged is not None:
                return tagged
    return None


def _check_annotations(graph: OpGraph, annotations: Annotations) -> None:
    phases: Dict[int, Set[Phase]] = {item.index: set() for item in annotations.items}
    for op in graph.ops:
        if op.task_graph in phases:
            phases[op.task_graph].add(op.phase)
    for item in annotations.items:
        if item is annotations.default or Phase.FORWARD in phases[item.index]:
            continue
        where = f"wh.{item.strategy} (TaskGraph {item.name!r})"
        if Phase.BACKWARD in phases[item.index]:
            raise AnnotationError(
                f"{where} contains only backward ops. Backward ops follow their forward ops, so an annotation around the "
                "optimizer or tf.gradients has no effect: put it around the part of the model that it is meant for.")
        raise AnnotationError(
            f"{where} contains no op of the forward pass of any loss that is differentiated. Put it around a part of the "
            "model, or remove it.")


# -- membership -----------------------------------------------------------------------------------------------------
def _annotated(graph: OpGraph, annotations: Annotations, blocks: Sequence[Annotation]) -> List[int]:
    """Membership of the forward ops that were created under an annotation or have a default strategy; -1 for those of annotations
    that are not among ``blocks``."""
    of = [-1] * len(graph.ops)
    places = {item.index: -1 for item in annotations.items}
    places.update((item.index, place) for place, item in enumerate(blocks))
    default = places[annotations.default.index] if annotations.default is not None else -1
    of_loops = _added_to_loops(graph)
    for op in graph.ops:
        if op.phase is not Phase.FORWARD or op.id in of_loops:
            continue
        of[op.id] = default if _block(op) is None else places.get(op.task_graph, default)
    return of


def _added_to_loops(graph: OpGraph) -> Set[int]:
    """Forward ops that a gradient call added to version 1 loops (a counter of iterations, stacks): they are in the loop's
    TaskGraph, whatever the default strategy is."""
    inside, found = frames(graph), set()  # type: Dict[int, Tuple[str, ...]], Set[int]
    for op in reversed(graph.ops) if inside else ():
        if op.phase is Phase.FORWARD and op.attrs.get(PHASE_ATTR):
            users = [user for output in op.outputs for user, _ in graph.consumers(output)]
            if op.id in inside or (users and all(user in inside or user in found for user in users)):
                found.add(op.id)
    return found


def _block(op: Op) -> Optional[int]:
    """The annotation under which a forward op was created."""
    return op.task_graph if op.task_graph >= 0 and not op.attrs.get(PHASE_ATTR) else None


def _of_variables(graph: OpGraph, annotations: Annotations) -> Set[int]:
    """The annotations that hold only variables, and whose variables other annotations use.

    Raises:
        AnnotationError: it is ``split``, and its variables are used only under ``replicate``.
    """
    items = {item.index: item for item in annotations.items}
    values, members = _variable_values(graph), {index: [] for index in items}  # type: Tuple[Set[int], Dict[int, List[int]]]
    for op in graph.ops:
        if op.phase is Phase.FORWARD and _block(op) in items and traits(op.type).role is not Role.CONSTANT:
            members[op.task_graph].append(op.id)
    found = {index for index, ops in members.items() if ops and values.issuperset(ops)}
    users = _users(graph, Phase.FORWARD) if found else []
    default = None if annotations.default is None else annotations.default.index
    joined = set()
    for index in sorted(found):
        behind = reached(members[index], lambda op: users[op] if op in values else ())
        blocks = {_block(graph.ops[op]) for op in behind if op not in values}
        used = [items[block] for block in (default if block not in items else block for block in blocks) if block is not None]
        if used:
            joined.add(index)
            _check_joined(items[index], used, graph.ops[members[index][0]].name)
    return joined


def _variable_values(graph: OpGraph) -> Set[int]:
    """Variables, and forward ops that only read and move their elements."""
    found: Set[int] = set()
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            sources = [source for source in graph.predecessors(op) if traits(graph.ops[source].type).role is not Role.CONSTANT]
            is_moved = traits(op.type).cost in (Cost.FREE, Cost.MOVE, Cost.LOOK_UP) and bool(sources)
            if op.type in VARIABLES or is_moved and found.issuperset(sources):
                found.add(op.id)
    return found


def _check_joined(item: Annotation, used: Sequence[Annotation], variable: str) -> None:
    if item.strategy != "split" or any(other.strategy == "split" for other in used):
        return
    call, other = call_text(item.strategy, item.device_count), used[0]
    raise AnnotationError(
        f"{call} (TaskGraph {item.name!r}) holds only variables, such as {variable!r}, and the ops that use them are under "
        f"{call_text(other.strategy, other.device_count)} (TaskGraph {other.name!r}), where every replica needs them whole. Put "
        f"the ops that use them under {call}, too, or the variables out of this block.")


def _assign_forward(graph: OpGraph, of: List[int]) -> None:
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    for op in forward:
        if of[op.id] < 0:
            of[op.id] = max((of[source] for source in graph.predecessors(op)), default=-1)
    missing = [op for op in forward if of[op.id] < 0]
    users = _users(graph, Phase.FORWARD) if missing else []
    for op in reversed(missing):
        of[op.id] = min((of[user] for user in users[op.id] if of[user] >= 0), default=-1)
    for op in missing:
        if of[op.id] < 0:  # not connected to any annotation
            of[op.id] = 0


def _join_arrays(graph: OpGraph, of: List[int]) -> None:
    """Raises:
        AnnotationError: loops of several TaskGraphs use one tensor array.
    """
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    apart = [unit for unit in containers(graph, forward) if len({of[index] for index in unit}) > 1]
    in_loop = frames(graph) if apart else {}
    for unit in apart:
        of_loops = {of[index] for index in unit if index in in_loop}
        if len(of_loops) > 1:
            numbers = ", ".join(map(str, sorted(of_loops)))
            raise AnnotationError(
                f"loops of TaskGraphs {numbers} use the tensor array {graph.ops[min(unit)].name!r}, "
                "which only one device can have; let the first one pass on a tensor (array.stack()), of which the next one makes "
                "an array of its own (tf.TensorArray(...).unstack)")
        place = max(of_loops or {of[index] for index in unit if graph.ops[index].type in FILLS} or {of[min(unit)]})
        for index in unit:
            of[index] = place
        pending = list(unit)
        while pending:  # what tells which elements are read
            for source in graph.predecessors(graph.ops[pending.pop()]):
                if of[source] > place and graph.ops[source].phase is Phase.FORWARD and source not in in_loop:
                    of[source] = place
                    pending.append(source)


def _assign_backward(graph: OpGraph, of: List[int]) -> None:
    backward = [op for op in graph.ops if op.phase is Phase.BACKWARD]
    for op in backward:
        if of[op.id] < 0 and op.forward >= 0:
            of[op.id] = of[op.forward]
        if of[op.id] < 0:
            sources = [graph.ops[source] for source in graph.predecessors(op) if of[source] >= 0]
            made = [of[source.id] for source in sources if source.phase is Phase.BACKWARD]
            read = [of[source.id] for source in sources if source.phase is Phase.FORWARD]
            calls = [of[source.id] for source in sources if source.phase is Phase.FORWARD and source.type in CALLS]
            of[op.id] = max(calls) if calls and op.type in CALLS else min(made) if made else max(read, default=-1)
    missing = [op for op in backward if of[op.id] < 0]
    users = _users(graph, Phase.BACKWARD) if missing else []
    for op in reversed(missing):
        of[op.id] = max((of[user] for user in users[op.id]), default=-1)
    for op in missing:
        if of[op.id] < 0:
            of[op.id] = 0


def _users(graph: OpGraph, phase: Phase) -> List[List[int]]:
    """For every op, the ops of ``phase`` that wait for it."""
    users: List[List[int]] = [[] for _ in graph.ops]
    for op in graph.ops:
        if op.phase is phase:
            for source in graph.predecessors(op):
                users[source].append(op.id)
    return users


def _by_variable(graph: OpGraph, variables: Variables, of: List[int]) -> Dict[int, int]:
    """The first TaskGraph that uses each variable's value; the ``read`` op of a reference variable does not count, because it was
    created with the variable."""
    found = {}
    for variable in variables:
        readers = [op for op in variable.reads if graph.ops[op].phase is Phase.FORWARD]
        users = []
        for reader in readers:
            op = graph.ops[reader]
            consumers = [user for output in op.outputs for user, _ in graph.consumers(output)
                         if graph.ops[user].phase is Phase.FORWARD] if op.type in READS else []
            users.extend(consumers or [reader])
        if users:
            found[variable.op] = min(of[user] for user in users)
    return found


# -- convexity ------------------------------------------------------------------------------------------------------
_Crossings = Dict[int, Dict[int, Tuple[int, int]]]  # TaskGraph -> later TaskGraph -> an edge (producer, consumer)


def _crossing_edges(graph: OpGraph, task_graphs: TaskGraphs, variables: Variables) -> _Crossings:
    of = task_graphs.of
    edges: _Crossings = {}
    for op in graph.ops:
        if op.phase is not Phase.FORWARD:
            continue
        for source in graph.predecessors(op):
            if (of[source] >= 0 and of[source] != of[op.id] and source not in variables
                    and graph.ops[source].phase is Phase.FORWARD and not _is_plain_read(graph, variables, source)):
                edges.setdefault(of[source], {}).setdefault(of[op.id], (source, op.id))
    return edges


def _is_plain_read(graph: OpGraph, variables: Variables, op: int) -> bool:
    return op in variables.read_by and graph.ops[op].type in READS


def _cycle(edges: _Crossings) -> Optional[List[int]]:
    """TaskGraphs of one cycle, lowest first, or None."""
    done: Set[int] = set()
    for start in sorted(edges):
        if start in done:
            continue
        path, iterators = [start], [iter(sorted(edges[start]))]
        while path:
            following = next(iterators[-1], None)
            if following is None:
                done.add(path.pop())
                iterators.pop()
            elif following in path:
                cycle = path[path.index(following):]
                first = cycle.index(min(cycle))
                return cycle[first:] + cycle[:first]
            elif following not in done:
                path.append(following)
                iterators.append(iter(sorted(edges.get(following, ()))))
    return None


def _path(graph: OpGraph, task_graphs: TaskGraphs, cycle: List[int], edges: _Crossings) -> Tuple[int, ...]:
    """Ops of a path out of ``cycle[0]`` and back, else the edges of the cycle in order."""
    of, first = task_graphs.of, cycle[0]
    came_from: Dict[int, int] = {}
    for op in graph.ops:  # in topological order: ops outside, reached from inside
        if op.phase is not Phase.FORWARD or of[op.id] < 0:
            continue
        for source in graph.predecessors(op):
            if of[op.id] != first and (source in came_from or of[source] == first):
                came_from[op.id] = source
                break
            if of[op.id] == first and source in came_from:
                return _trace(came_from, source) + (op.id,)
    return tuple(_pairs(edges, cycle))


def _trace(came_from: Dict[int, int], op: int) -> Tuple[int, ...]:
    path = [op]
    while path[-1] in came_from:
        path.append(came_from[path[-1]])
    return tuple(reversed(path))


def _pairs(edges: _Crossings, cycle: List[int]) -> Iterable[int]:
    for here, there in zip(cycle, cycle[1:] + cycle[:1]):
        yield from edges[here][there]
