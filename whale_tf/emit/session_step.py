"""What a process runs of a step in a Session, for whatever is fetched (:mod:`whale_tf.emit.session_part`).

A step's messages follow from the updates that it makes: their values, and merged losses and metrics, which every process has
afterwards.  What else is fetched beside them must be the same in all processes, so that all send it.
"""

from __future__ import annotations

from collections import Counter
from typing import Collection, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Sequence, Set, Tuple

from whale_tf._tf_compat import tf
from whale_tf.emit.own_part import CHECK, count_step, note
from whale_tf.emit.session_part import BEGUN, Fetch, SessionPart, op_of
from whale_tf.errors import PlanError
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.traits import Role, traits
from whale_tf.ir.walk import reached
from whale_tf.passes.partition import Crossing, Node, Output, partition, unanswered

ANSWER = "answer"  # name of messages that say that others have arrived


class Step(NamedTuple):
    """A run that trains.

    Attributes:
        writes: names of the writes of variables that some process keeps.
        results: values that all processes have after it, by name.
        closed: gates that it feeds.
        run: name of the op that makes this process's part of it.
        values: fetched tensor of another process -> the name of what has arrived here.
        seen: name of the variable with checksums of the inputs.
        inputs: names of these inputs, which all processes must have read alike.
    """

    writes: Tuple[str, ...]
    results: Tuple[str, ...]
    closed: Tuple[str, ...]
    run: str
    values: Mapping[str, str]
    seen: str
    inputs: Sequence[str]

    @property
    def text(self) -> str:
        """Equal in processes that make the same step."""
        return "\n".join([*self.writes, "", *self.results])


class SessionSteps:
    """See the module's docstring.

    Args:
        merged: name of a merged value that all processes have after each of some updates -> the writes of these.
        gates: gate -> the ops for which it waits.
        sources: names of the tensors with the examples of the mini-batch.
    """

    def __init__(self, part: SessionPart, merged: Mapping[str, Collection[str]], gates: Mapping[str, Sequence[str]],
                 sources: Sequence[str]) -> None:
        self._part, self._merged, self._gates, self._sources = part, merged, gates, sources
        self._known: Dict[Tuple[str, ...], FrozenSet[int]] = {}
        self._kept: Dict[FrozenSet[int], Sequence[int]] = {}
        self._staged = 0  # steps so far

    # ------------------------------------------------------------------------------------------------- what a run is
    def needs(self, ops: Iterable[tf.Operation]) -> FrozenSet[int]:
        """Numbers of the ops that the graph as written runs for some ops; found only once, because a training loop asks in every
        step."""
        names = tuple(op.name for op in ops)
        if names not in self._known:
            starts = [self._part.indices[name] for name in names if name in self._part.indices]
            self._known[names] = frozenset(reached(starts, self._part.before))
        return self._known[names]

    def kept_writes(self, ops: Iterable[tf.Operation]) -> Sequence[int]:
        """Writes of variables that some process keeps."""
        needed = self.needs(ops)
        if needed not in self._kept:
            self._kept[needed] = sorted(index for index in needed if self._part.is_kept_write(index))
        return self._kept[needed]

    def writes(self, ops: Iterable[tf.Operation]) -> Set[str]:
        """Names of all writes of variables."""
        return {self._part.ops[index].name for index in self.needs(ops) if self._part.is_write(index)}

    def _has_effect(self, index: int) -> bool:
        op = self._part.ops[index]
        return self._part.is_write(index) or traits(op.type).role is Role.PULL or op.type == CHECK

    def trains(self, ops: Sequence[tf.Operation]) -> bool:
        """Whether a run of ``ops`` is a step, which all processes make.

        Raises:
            PlanError: it also writes variables otherwise.
        """
        writes = self.kept_writes(ops)
        ours = [index for index in writes if index in self._part.ours]
        if ours and len(ours) < len(writes):
            other = next(index for index in writes if index not in self._part.ours)
            raise PlanError(
                f"a run trains and also writes a variable in {self._part.ops[other].name!r}, for which nothing in the training "
                "step waits; make two runs")
        return bool(ours)

    # --------------------------------------------------------------------------------------------------- what it runs here
    def step(self, fetches: Sequence[Fetch]) -> Step:
        """Stages what this process runs of a step.

        Args:
            fetches: tensors and ops, with merged values in place of what clones compute.
        """
        part = self._part
        writes = [index for index in self.kept_writes(map(op_of, fetches)) if index in part.ours]
        names = {part.ops[index].name for index in writes}
        merged = [part.output(name) for name, beside in sorted(self._merged.items()) if not names.isdisjoint(beside)]
        found = self._divided(writes, merged)
        results, effects = self._missing(fetches, found)
        if results or effects:
            found = self._divided([*writes, *sorted(effects)], [*merged, *sorted(results)])
        run, inputs = self._stage(found)
        values = {}
        for fetch in fetches:
            if isinstance(fetch, tf.Tensor) and part.is_ours(fetch.op) and not part.is_here(fetch.op):
                values[fetch.name] = part.received[part.output(fetch.name)] + ":0"
        known = sorted(part.ops[index].outputs[number].name for index, number in results)
        return Step(tuple(sorted(part.ops[index].name for index in (*writes, *effects))), tuple(known), found.closed, run, values,
                    self._seen, inputs)

    def _divided(self, effects: Sequence[int], results: Sequence[Output]) -> _Division:
        """A step with these effects and results.  All processes run what has an effect in each of them, such as taking the next
        mini-batch, or refusing one."""
        part = self._part
        starts = [*effects, *(output[0] for output in results)]
        nodes, closed = self._gated(starts)
        needed = reached(starts, lambda index: (*(output[0] for output in nodes[index].inputs), *nodes[index].waits))
        common = [index for index in sorted(needed) if nodes[index].owner is None and self._has_effect(index)]
        nodes.append(Node(None, tuple(results)))
        found = partition(nodes, [*effects, *common, len(nodes) - 1], part.members)
        return _Division(nodes, found.runs, found.crossings, unanswered(nodes, found), closed)

    def _gated(self, starts: Iterable[int]) -> Tuple[List[Node], Tuple[str, ...]]:
        """The nodes, of which closed gates do not wait: those before which an op stands that the run does not need."""
        part = self._part
        gates = {part.indices[name]: [part.indices[one] for one in waits] for name, waits in self._gates.items()}
        needed = reached(starts, lambda index: () if index in gates else part.before(index))
        closed = [gate for gate, waits in gates.items() if gate in needed and not needed.issuperset(waits)]
        nodes = list(part.nodes)
        for gate in closed:
            nodes[gate] = nodes[gate]._replace(waits=())
        return nodes, tuple(sorted(part.ops[gate].name for gate in closed))

    def _missing(self, fetches: Sequence[Fetch], found: _Division) -> Tuple[Set[Output], Set[int]]:
        """(values, ops) that fetches need beyond what a step gives every process; the same whoever asks."""
        part = self._part
        arrivals = Counter(crossing.output for crossing in found.crossings)
        results: Set[Output] = set()
        effects: Set[int] = set()
        common: List[int] = []

        def read(output: Output) -> None:
            if part.nodes[output[0]].owner is None:
                common.append(output[0])
            elif arrivals[output] < len(part.members) - 1:
                results.add(output)

        def run(index: int) -> None:
            if part.nodes[index].owner is None:
                common.append(index)
            elif not found.runs[index]:
                effects.add(index)

        for fetch in fetches:
            if not part.is_ours(op_of(fetch)):
                continue
            if isinstance(fetch, tf.Tensor):
                read(part.output(fetch.name))
            else:
                run(part.indices[fetch.name])
        seen: Set[int] = set()
        while common:
            index = common.pop()
            if index not in seen and index in part.ours:
                seen.add(index)
                for output in part.nodes[index].inputs:
                    read(output)
                for wait in part.nodes[index].waits:
                    run(wait)
        return results, effects

    def _stage(self, found: _Division) -> Tuple[str, Sequence[str]]:
        """Stages the op that makes this process's part of a step, and counts it; also returns the inputs that are compared."""
        part, self._staged = self._part, self._staged + 1
        scope, edit = f"{part.scope}/step{self._staged}", StagedEdit(part.graph)
        nodes, ends = Nodes(edit), self._ends(found)
        arrived: Dict[int, List[str]] = {}
        for crossing in found.crossings:
            part.cross(nodes, *crossing)
            if crossing.sender == part.rank:
                ends.append(part.sends[crossing.output, crossing.receiver])
            elif crossing.receiver == part.rank:
                arrived.setdefault(crossing.sender, []).append(part.received[crossing.output])
        ends += [name for names in arrived.values() for name in names]
        for sender, receiver in found.unanswered:
            if receiver == part.rank:
                nothing = nodes.const(0, scope + "/nothing", tf.int32, part.host)
                ends.append(part.queues.send(nodes, nothing, ANSWER, tf.int32, sender, arrived[sender]))
            elif sender == part.rank:
                ends.append(part.queues.receive(nodes, ANSWER, tf.int32, receiver, tf.TensorShape([])))
        ends += self._begin(nodes, found)
        inputs = [name for name in self._sources if found.runs[part.output(name)[0]]
                  and part.graph.get_tensor_by_name(name).dtype not in (tf.variant, tf.resource)]
        if inputs:
            tensors = [part.graph.get_tensor_by_name(name) for name in inputs]
            ends.append(note(nodes, tensors, self._seen, scope, part.host))
        run = count_step(nodes, sorted(set(ends)), scope, part.host)
        part.commit(edit)
        return run, inputs

    def _begin(self, nodes: Nodes, found: _Division) -> List[str]:
        """The ops that tell other processes in this step that this process has begun it (:meth:`SessionPart.early`)."""
        part = self._part
        receivers = set().union(*(found.runs[index] for index, late in part.early.items() if part.rank in late))  # type: Set[int]
        return [part.queues.send(nodes, nodes.const(0, f"{part.scope}/step{self._staged}/nothing", tf.int32, part.host), BEGUN,
                                 tf.int32, receiver) for receiver in sorted(receivers)]

    def _ends(self, found: _Division) -> List[str]:
        """The last ops of this process's part."""
        part, nodes = self._part, found.nodes
        runs = {index for index, runners in enumerate(found.runs[:-1]) if part.rank in runners}
        followed = {before for index in runs for before in (*(output[0] for output in nodes[index].inputs), *nodes[index].waits)}
        return [part.ops[part.in_every_step(index)].name for index in sorted(runs - followed)]

    @property
    def _seen(self) -> str:
        """Name of the variable with checksums of the last staged step's inputs."""
        return f"{self._part.scope}/seen{self._staged}"


class _Division(NamedTuple):
    """A step's division; see :class:`whale_tf.passes.partition.Partition`.

    Attributes:
        nodes: the last one stands for the results.
        unanswered: see :func:`whale_tf.passes.partition.unanswered`.
        closed: names of the gates that are closed.
    """

    nodes: Sequence[Node]
    runs: Sequence[Set[int]]
    crossings: Sequence[Crossing]
    unanswered: Sequence[Tuple[int, int]]
    closed: Tuple[str, ...]
