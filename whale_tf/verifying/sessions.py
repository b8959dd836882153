"""The first training run of a Session, with the local step beside it.

The run is the user's own: it only returns more tensors.  The variables are read before and after it.
"""
from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from whale_tf import session as whale_session
from whale_tf._tf_compat import GraphDef, tf, v1
from whale_tf.capture.recording import recording_of
from whale_tf.emit.shard.checkpoints import Parts
from whale_tf.errors import UnsupportedOpError
from whale_tf.feeds import Fetch, elements, fed
from whale_tf.ir.graph import Phase
from whale_tf.ir.traits import VARIABLES
from whale_tf.ir.walk import reached
from whale_tf.parallelize import Parallelized
from whale_tf.verifying import compare as comparing
from whale_tf.verifying.compare import Comparison, compare, key, summary
from whale_tf.verifying.cut import INPUT, Cut, find_cut
from whale_tf.verifying.divided import context_of, items_of, left_out, local_config, runs_on_gpu, uses_tf32, view_of
from whale_tf.verifying.local import SCOPE, LocalStep, Outcome, Script, Values, copied, named
from whale_tf.verifying.mini_batches import for_several
from whale_tf.verifying.replay import Replay, cpus, in_float64, in_float64_if_possible, joined, on_cpus, widened, without_effects


def script_of(graph: tf.Graph) -> Script:
    """The step of a graph that is about to be rewritten."""
    recording = recording_of(graph)
    return Script(recording.graph, recording.phases, recording.definitions.export)


class Replayed(NamedTuple):
    """A divided step to run in a Session of its own.

    Attributes:
        definition: its graph.
        before: values of variables.
        names: name in the local script -> tensor of the divided step.
        updates: ops to run.
        given: values of inputs, as each model replica takes them.
        whole: the same for the whole mini-batch, by names of the local script.
    """

    definition: GraphDef
    before: Values
    names: Dict[str, str]
    updates: Sequence[str]
    given: Values
    whole: Values


class SessionProof:
    """Compares the first run that makes each update of a rewritten graph.

    Args:
        say: is told what was compared.
        shown: takes the comparison in float64 of the first run, which is then not made; None: runs are made.
    """

    def __init__(self, graph: tf.Graph, script: Script, done: Parallelized, fetches: whale_session.Fetches,
                 say: Callable[[str], None], shown: Optional[Callable[[Comparison, str], Any]] = None) -> None:
        self._graph, self._script, self._done, self._fetches, self._say = graph, script, done, fetches, say
        self._shown = shown
        ops = script.ops
        self._open: Set[int] = {index for index in script.phases.variables.written_by if ops.ops[index].phase is Phase.APPLY}
        self._reads: Dict[str, tf.Tensor] = {}

    @property
    def is_open(self) -> bool:
        """Whether there is an update that no run has made."""
        return bool(self._open)

    def begins(self, wanted: Sequence[Fetch]) -> bool:
        """Whether a run makes an update that no run has made."""
        return not self._open.isdisjoint(self._behind(wanted))

    def _behind(self, wanted: Sequence[Fetch]) -> Set[int]:
        ops = self._script.ops
        names = _known_behind(wanted, ops.__contains__)
        return reached([ops.op(name).id for name in names], lambda index: ops.predecessors(ops.ops[index]))

    def run(self, session: Any, original: Callable, fetches: Any, feed_dict: Optional[Dict] = None, options: Any = None,
            run_metadata: Any = None) -> Any:
        """``Session.run`` of a run that begins (see :meth:`begins`).

        Raises:
            MismatchError: it does not compute what the local step computes.
        """
        began = time.perf_counter()
        wanted = elements(self._graph, fetches)[1]
        ops, script = self._script.ops, self._script
        cut = self._cut(wanted)
        if self._shown is not None:
            replayed = self._replayer(cut, session, original, wanted, feed_dict)
            return self._shown(in_float64_if_possible(replayed), "this graph")
        extra = self._observed(cut, set(fed(self._graph, feed_dict)))
        local = self._local(cut, session, on_cpu=not runs_on_gpu(self._done))
        try:
            reads = self._readers(local.variables)
            before = copied(whale_session.run(self._fetches, session, original, reads, None, None, None))
            asked = [tensor for tensors in extra.values() for tensor in tensors]
            started = time.perf_counter()
            result, values = whale_session.run(self._fetches, session, original, [fetches, asked], feed_dict, options,
                                               run_metadata)
            took = time.perf_counter() - started
            after = copied(whale_session.run(self._fetches, session, original, reads, None, None, None))
            found = self._together(extra, values)
            plan = self._done.plan
            if plan.loss_scale is not None and not all(np.all(np.isfinite(found[ops.tensor_name(target)]))
                                                       for one in script.phases.targets for target in one.tensors[:1]
                                                       if ops.tensor_name(target) in found):
                self._say("verify: the loss scale skips this step, whose gradients are not finite; the next one is compared")
                return result
            local, outcome = self._outcome(local, cut, session, before, found)
            items = items_of(self._done, script, cut, found, before, after, outcome, False, uses_tf32(self._done))

            def moved() -> Values:
                again = local.outcome(before, found, nudge=True)
                both = {**again.tensors, **again.variables}
                return {key(item): both[item.name] for item in items if item.name in both}

            compared = compare(items, moved)
        finally:
            local.close()
        self._open -= set(cut.writes)
        comparing.check(compared, "this graph")
        delayed = time.perf_counter() - began - took
        self._say(summary(compared, left_out(script, cut, items), delayed, "this graph"))
        return result

    def _cut(self, wanted: Sequence[Fetch]) -> Cut:
        ops, phases = self._script.ops, self._script.phases
        names = _known_behind(wanted, ops.__contains__)
        returned = [ops.tensor(fetch.name) for fetch in wanted if isinstance(fetch, tf.Tensor) and fetch.op.name in ops]
        waits = [(wait.op, wait.on) for wait in phases.waits]
        return find_cut(ops, phases.variables.written_by, waits, [ops.op(name).id for name in names], returned,
                        view_of(self._done))

    def _replayer(self, cut: Cut, session: Any, original: Callable, wanted: Sequence[Fetch],
                  feed_dict: Optional[Dict]) -> Callable[[bool], Comparison]:
        """Makes the comparison of both steps, each in a Session of its own on logical CPU devices, in float64 or not.  The user's
        Session only gives the inputs and the variables."""
        ops, fetches = self._script.ops, self._fetches
        fetches.prepare()
        fetches.initialise(session, original)
        observed = self._observed(cut, set(fed(self._graph, feed_dict)))
        inputs = {name: tensors for name, tensors in observed.items() if ops.op(name.partition(":")[0]).phase is Phase.INPUT}
        computed = {name: tensors[0] for name, tensors in observed.items() if name not in inputs}
        flat = [tensor for tensors in inputs.values() for tensor in tensors]
        values = original(flat, feed_dict) if flat else []
        new = fetches.substitutes([*computed.values(), *(one for one in wanted if isinstance(one, tf.Operation))], {})
        names = {name: tensor.name for name, tensor in zip(computed, new)}
        updates = [one.name for one in new[len(computed):]]
        given = {tensor.name: value for tensor, value in zip(flat, values)}
        whole = self._together(inputs, values)
        definition = self._graph.as_graph_def()
        without_effects(definition, self._graph.get_operations())
        starts = {*updates, *(name.partition(":")[0] for name in (*names.values(), *given))}
        needed = v1.graph_util.extract_sub_graph(definition, sorted(starts))
        needed.library.CopyFrom(definition.library)
        here = {node.name for node in needed.node}
        initialised = self._initialised(session, original)
        return lambda wide: self._replayed(cut, session, original, Replayed(
            needed, {name: value for name, value in initialised.items() if name in here}, names, updates, given, whole), wide)

    def _replayed(self, cut: Cut, session: Any, original: Callable, step: Replayed, wide: bool) -> Comparison:
        def cast(values: Values) -> Values:
            return widened(values) if wide else values

        before, count = cast(step.before), len(context_of(self._done).devices)
        replay = Replay(on_cpus(in_float64(step.definition) if wide else step.definition), before, cpus(count))
        try:
            found = replay.run(step.names, step.updates, cast(step.given))
            after = replay.variables()
        finally:
            replay.close()
        local = self._local(cut, session, on_cpu=True, wide=wide)
        try:
            lacking = [name for name in local.variables if name not in before]  # wh.split and zero divide these
            if lacking:
                before.update(cast(whale_session.run(self._fetches, session, original, self._readers(lacking), None, None, None)))
                after.update({name: joined(self._pieces(name), after) for name in lacking})
            given = cast({**found, **step.whole})
            outcome = local.outcome(before, given)
            items = items_of(self._done, self._script, cut, found, before, after, outcome, wide, False)

            def moved() -> Values:
                again = local.outcome(before, given, nudge=True)
                both = {**again.tensors, **again.variables}
                return {key(item): both[item.name] for item in items if item.name in both}

            return compare(items, moved), left_out(self._script, cut, items)
        finally:
            local.close()

    def _pieces(self, name: str) -> Parts:
        variables = self._done.variables
        assert variables is not None
        return next(part for part in variables.parts if part.op.name == name)

    def _initialised(self, session: Any, original: Callable) -> Values:
        """Values of all variables of the graph that have one, including copies and parts."""
        found, asked = {}, {}  # type: ignore[var-annotated]
        with whale_session.unfinalized(self._graph), self._graph.as_default(), self._graph.control_dependencies(None):
            for op in [op for op in self._graph.get_operations() if op.type in VARIABLES]:
                tensor = op.outputs[0]
                if tensor.dtype == tf.resource:
                    asked[op.name] = tf.raw_ops.VarIsInitializedOp(resource=tensor)
                    found[op.name] = tf.raw_ops.ReadVariableOp(resource=tensor, dtype=tf.as_dtype(op.get_attr("dtype")))
                else:
                    asked[op.name], found[op.name] = tf.raw_ops.IsVariableInitialized(ref=tensor), tensor
        known = original(asked)
        return copied(original({name: tensor for name, tensor in found.items() if known[name]}))

    def _local(self, cut: Cut, session: Any, on_cpu: bool, wide: bool = False) -> LocalStep:
        context = context_of(self._done)
        inputs = [self._script.ops.tensor_name(tensor) for tensor, why in cut.taken.items() if why == INPUT]
        script = for_several(self._script, context, max([1 + len(self._of_replicas(name)) for name in inputs], default=1))
        return LocalStep(script, cut, local_config(session._config, on_cpu), *([in_float64] if wide else []))

    def _outcome(self, local: LocalStep, cut: Cut, session: Any, before: Values, found: Values) -> Tuple[LocalStep, Outcome]:
        """The local step's outcome, on the host if it does not fit on a GPU."""
        try:
            with named("this graph"):
                return local, local.outcome(before, found)
        except tf.errors.ResourceExhaustedError:
            if not runs_on_gpu(self._done):
                raise
            self._say("verify: the local step does not fit into the memory of one GPU; it runs on the host")
            local.close()
            local = self._local(cut, session, on_cpu=True)
            return local, local.outcome(before, found)

    def _readers(self, names: Sequence[str]) -> Dict[str, tf.Tensor]:
        """Tensors that read variables."""
        with whale_session.unfinalized(self._graph), self._graph.as_default(), self._graph.control_dependencies(None):
            for name in names:
                if name not in self._reads:
                    tensor = self._graph.get_operation_by_name(name).outputs[0]
                    if tensor.dtype == tf.resource:
                        dtype = tf.as_dtype(tensor.op.get_attr("dtype"))
                        tensor = tf.raw_ops.ReadVariableOp(resource=tensor, dtype=dtype, name=f"{SCOPE}/{name}")
                    self._reads[name] = tensor
        return {name: self._reads[name] for name in names}

    def _observed(self, cut: Cut, feeds: Set[tf.Tensor]) -> Dict[str, List[tf.Tensor]]:
        """Name in the local script -> the tensors whose values make up the divided step's value."""
        ops, found = self._script.ops, {}  # type: ignore[var-annotated]
        for use in cut.leaving:
            name, read = ops.tensor_name(use.tensor), self._read_by(use.op, use.position)
            if read is not None:
                found[name] = [read]
        left = [use.tensor for use in cut.leaving]
        for tensor in dict.fromkeys((*cut.results, *cut.samples, *cut.returned, *cut.taken, *left)):
            name = ops.tensor_name(tensor)
            if name in found:
                continue
            fetch = self._graph.get_tensor_by_name(name)
            if ops.producer(tensor).phase is Phase.INPUT:
                found[name] = [fetch, *self._of_replicas(name)]
            else:
                try:
                    self._fetches.substitutes([fetch], {})
                except UnsupportedOpError:
                    if tensor not in cut.samples:
                        raise
                    continue
                found[name] = [fetch]
        return found

    def _read_by(self, op: int, position: int) -> Optional[tf.Tensor]:
        """What an op outside of the forward and backward ops reads in the divided step; None: another op is run instead."""
        name, emitted = self._script.ops.ops[op].name, self._done.emitted
        assert emitted is not None
        name = emitted.instead.get(name, name)
        if self._is_replaced(name):
            return None
        return self._graph.get_operation_by_name(name).inputs[position]

    def _is_replaced(self, name: str) -> bool:
        return any(each in self._fetches._replaced for each in (name, name + ":0"))

    def _of_replicas(self, name: str) -> List[tf.Tensor]:
        """An input as the second and the further model replicas take it from the input pipeline."""
        context, found = context_of(self._done), []  # type: ignore[var-annotated]
        for g in range(1, self._done.plan.num_model_replicas):
            other = "{}/{}".format(context.name("input", f"g{g}"), name)
            try:
                found.append(self._graph.get_tensor_by_name(other))
            except KeyError:
                return []
        return found

    def _together(self, extra: Dict[str, List[tf.Tensor]], values: Sequence[Any]) -> Values:
        """The values of the whole mini-batch."""
        found, rest = {}, list(values)
        for name, tensors in extra.items():
            parts, rest = rest[:len(tensors)], rest[len(tensors):]
            found[name] = parts[0] if len(parts) == 1 else self._concatenated(name, parts)
        return found

    def _concatenated(self, name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The mini-batches of several model replicas as one."""
        batch = context_of(self._done).region.batch
        tensor = batch.graph.tensor(name)
        if tensor not in batch.sources:
            return parts[0]
        return np.concatenate(parts, batch.sources[tensor])


def _known_behind(wanted: Sequence[Fetch], is_known: Callable[[str], bool]) -> List[str]:
    """The script's ops from which fetches follow, those nearest to them: a fetch may have been added later."""
    starts = [fetch if isinstance(fetch, tf.Operation) else fetch.op for fetch in wanted]
    found = reached(starts, lambda op: () if is_known(op.name) else [*(t.op for t in op.inputs), *op.control_inputs])
    return [op.name for op in found if is_known(op.name)]


