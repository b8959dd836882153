"""The first training run of a Session, with the local step beside it.

The run is the user's own: it only returns more tensors.  The variables are read before and after it.
"""
from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from whale_tf._tf_compat import GraphDef, tf, v1
from whale_tf.capture.recording import recording_of
from whale_tf.errors import MismatchError, UnsupportedOpError
from whale_tf.ir.graph import Phase
from whale_tf.ir.traits import VARIABLES
from whale_tf.ir.walk import reached
from whale_tf.parallelize import Parallelized
from whale_tf.runtime import sessions as whale_session
from whale_tf.runtime.feeds import Fetch, elements, fed
from whale_tf.runtime.verifying import compare as comparing
from whale_tf.runtime.verifying.compare import Comparison, summary
from whale_tf.runtime.verifying.cut import INPUT, Cut, find_cut
from whale_tf.runtime.verifying.divided import (
    Show,
    Step,
    comparison,
    context_of,
    items_of,
    local_config,
    runs_on_gpu,
    uses_tf32,
    view_of,
)
from whale_tf.runtime.verifying.local import SCOPE, LocalStep, Outcome, Script, Values, copied, named
from whale_tf.runtime.verifying.mini_batches import for_several, in_one
from whale_tf.runtime.verifying.processes import Job, Part, Whole, items_of_others, kept_elsewhere
from whale_tf.runtime.verifying.replay import (
    Replay,
    cpus,
    in_float64,
    in_float64_if_possible,
    joined,
    on_cpus,
    widened,
    without_effects,
)
from whale_tf.transforms.loss_scale import scales_itself
from whale_tf.transforms.shard.checkpoints import DividedVariable


def script_of(graph: tf.Graph) -> Script:
    """The step of a graph that is about to be rewritten."""
    recording = recording_of(graph)
    return Script(recording.graph, recording.phases, recording.definitions.export, is_scaled=scales_itself(graph))


class Asked(NamedTuple):
    """The ops of the script that a run needs, those nearest to its fetches, and the tensors that it returns."""

    ops: List[str]
    tensors: List[str]


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
        shown: is given what makes the comparison in float64 of the first run, which is then not made; None: runs are made.
        job: the processes that train together; None: this one alone.
    """

    def __init__(self, graph: tf.Graph, script: Script, done: Parallelized, fetches: whale_session.Fetches,
                 say: Callable[[str], None], shown: Optional[Show] = None,
                 job: Optional[Job] = None) -> None:
        self._graph, self._script, self._done, self._fetches, self._say = graph, script, done, fetches, say
        self._shown, self._job = shown, job
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

    def _asked(self, wanted: Sequence[Fetch]) -> Asked:
        """What of the script a run asks for; of several processes, process 0 says it: its hooks may fetch more."""
        ops = self._script.ops
        asked = Asked(_known_behind(wanted, ops.__contains__),
                      [fetch.name for fetch in wanted if isinstance(fetch, tf.Tensor) and fetch.op.name in ops])
        if self._job is not None:
            asked = Asked(*self._job.told(tuple(asked)))
        return Asked(*([name for name in names if name.partition(":")[0] in ops] for names in asked))

    def run(self, session: Any, original: Callable, fetches: Any, feed_dict: Optional[Dict] = None, options: Any = None,
            run_metadata: Any = None) -> Any:
        """``Session.run`` of a run that begins (see :meth:`begins`).

        Raises:
            MismatchError: it does not compute what the local step computes.
        """
        began = time.perf_counter()
        wanted = elements(self._graph, fetches)[1]
        cut = self._cut(self._asked(wanted))
        if self._shown is not None:
            replayed, given = self._replayer(cut, session, original, wanted, feed_dict)
            runs = [one if isinstance(one, tf.Operation) else one.op for one in self._fetches.substitutes(wanted, {})]
            step = Step(self._graph, self._done, tuple(op.name for op in runs), given)
            return self._shown(lambda: in_float64_if_possible(replayed), "this graph", step)
        extra = self._observed(cut, set(fed(self._graph, feed_dict)), wanted)
        local = self._local(cut, session, on_cpu=not runs_on_gpu(self._done)) if self._is_first else None
        try:
            reads = self._readers(local.variables if local is not None else self._kept_here(cut))
            before = copied(whale_session.run(self._fetches, session, original, reads, None, None, None)) if local else {}
            asked = [tensor for tensors in extra.values() for tensor in tensors]
            self._check_results(wanted, asked, feed_dict)
            started = time.perf_counter()
            result, values = whale_session.run(self._fetches, session, original, [fetches, asked], feed_dict, options,
                                               run_metadata)
            took = time.perf_counter() - started
            after = copied(whale_session.run(self._fetches, session, original, reads, None, None, None))
            parts = [Part(self._together(extra, values), after)]
            if self._job is not None:
                parts = self._job.collected(parts[0])

            def judge() -> str:
                nonlocal local
                assert local is not None
                found, missing = self._of_all(cut, extra, asked, wanted, feed_dict, parts)
                if self._is_skipped(found):
                    return ""
                local, outcome = self._outcome(local, cut, session, before, found)
                compared, more = self._compared(local, cut, before, found, outcome, parts)
                comparing.check(compared, "this graph")
                if comparing.is_skipped(compared):
                    return ""
                delayed = time.perf_counter() - began - took
                return summary(compared, {**more, **missing}, delayed, "this graph")

            text = judge() if self._job is None else self._job.judged(judge)
        except MismatchError:
            self._open -= set(cut.writes)
            raise
        finally:
            if local is not None:
                local.close()
        if text:
            self._open -= set(cut.writes)
        if self._is_first:
            self._say(text or comparing.skipped("this graph"))
        return result

    def _check_results(self, wanted: Sequence[Fetch], asked: Sequence[tf.Tensor], feed_dict: Optional[Dict]) -> None:
        """Raises:
            MismatchError: the run by itself would return something else than beside the tensors that are compared.
        """
        feeds = fed(self._graph, feed_dict)
        beside = self._fetches.substitutes([*wanted, *asked], feeds)
        for one, alone, other in zip(wanted, self._fetches.substitutes(wanted, feeds), beside):
            if alone.name != other.name:
                raise MismatchError(
                    f"the first training step of this graph computes {alone.name!r} for {one.name!r}, but {other.name!r} beside "
                    "the tensors that are compared. This is a fault of whale_tf: please report it with the text of wh.explain(); "
                    "verify 'off' trains without the comparison", one.name)

    @property
    def _is_first(self) -> bool:
        """Whether the local step runs in this process."""
        return self._job is None or self._job.is_first

    def _is_skipped(self, found: Values) -> bool:
        ops, phases = self._script.ops, self._script.phases
        return self._done.plan.loss_scale is not None and not all(
            np.all(np.isfinite(found[ops.tensor_name(target)])) for one in phases.targets for target in one.tensors[:1]
            if ops.tensor_name(target) in found)

    def _compared(self, local: LocalStep, cut: Cut, before: Values, found: Values, outcome: Outcome,
                  parts: Sequence[Part]) -> Comparison:
        items = items_of(self._done, self._script, cut, found, before, parts[0].variables, outcome, False, uses_tf32(self._done))
        return comparison(self._script, cut, items + items_of_others(items, parts), local, before, found)

    def _of_all(self, cut: Cut, extra: Dict[str, List[tf.Tensor]], asked: Sequence[tf.Tensor], wanted: Sequence[Fetch],
                feed_dict: Optional[Dict], parts: Sequence[Part]) -> Tuple[Values, Dict[str, str]]:
        """Values of the mini-batches of all processes, and what has none -> why."""
        if self._job is None or self._job.are_parts:
            return parts[0].tensors, {}
        fetched = self._fetches.substitutes([*wanted, *asked], fed(self._graph, feed_dict))[len(wanted):]
        instead = dict(zip((tensor.name for tensor in asked), fetched))
        known = {name: instead[tensors[0].name] for name, tensors in extra.items()}
        return Whole(self._done, self._script.ops, known, self._fetches.results.recipes).together(
            [part.tensors for part in parts], cut)

    def _kept_here(self, cut: Cut) -> List[str]:
        """Variables whose new values this process gives to process 0."""
        if self._job is None or self._job.are_parts:
            return []
        ops, elsewhere = self._script.ops, kept_elsewhere(self._done)
        names = [ops.ops[variable].name for variable, why in cut.written.items() if not why]
        return [name for name in names if name not in elsewhere]

    def _cut(self, asked: Asked) -> Cut:
        ops, phases = self._script.ops, self._script.phases
        waits = [(wait.op, wait.on) for wait in phases.waits]
        return find_cut(ops, phases.variables.written_by, waits, [ops.op(name).id for name in asked.ops],
                        [ops.tensor(name) for name in asked.tensors], view_of(self._done))

    def _replayer(self, cut: Cut, session: Any, original: Callable, wanted: Sequence[Fetch],
                  feed_dict: Optional[Dict]) -> Tuple[Callable[[bool], Comparison], Values]:
        """What makes the comparison of both steps, each in a Session of its own on logical CPU devices, in float64 or not, and
        the mini-batch.  The user's Session only gives the inputs and the variables."""
        ops, fetches = self._script.ops, self._fetches
        fetches.prepare()
        fetches.initialise(session, original)
        observed = self._observed(cut, set(fed(self._graph, feed_dict)), wanted)
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
            needed, {name: value for name, value in initialised.items() if name in here}, names, updates, given, whole),
            wide), whole

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
            return comparison(self._script, cut, items, local, before, given)
        finally:
            local.close()

    def _pieces(self, name: str) -> DividedVariable:
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
        here = max([1 + len(self._of_replicas(name)) for name in inputs], default=1)
        script = for_several(self._script, context, here * (self._job.count if self._job is not None else 1))
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

    def _observed(self, cut: Cut, feeds: Set[tf.Tensor], wanted: Sequence[Fetch]) -> Dict[str, List[tf.Tensor]]:
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
                whole = fetch if self._fetches.parts is not None else self._fetches.input_of_all(fetch)
                found[name] = [fetch, *self._of_replicas(name)] if whole is fetch else [whole]
            else:
                try:
                    self._fetches.kind(self._fetches.substitutes([*wanted, fetch] if self._job is not None else [fetch], {}))
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
        if self._fetches.results.is_replaced(name):
            return None
        return self._graph.get_operation_by_name(name).inputs[position]

    def _of_replicas(self, name: str) -> List[tf.Tensor]:
        """An input in the second and the further mini-batches that a step takes from the input pipeline."""
        context, found = context_of(self._done), []  # type: ignore[var-annotated]
        for g in range(1, context.all_mini_batches):
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
        """The mini-batches of several model replicas or micro-batches as one."""
        batch = context_of(self._done).region.batch
        return in_one(name, parts, batch.sources.get(batch.graph.tensor(name)), "model replicas")


def _known_behind(wanted: Sequence[Fetch], is_known: Callable[[str], bool]) -> List[str]:
    """The script's ops from which fetches follow, those nearest to them: a fetch may have been added later."""
    starts = [fetch if isinstance(fetch, tf.Operation) else fetch.op for fetch in wanted]
    found = reached(starts, lambda op: () if is_known(op.name) else [*(t.op for t in op.inputs), *op.control_inputs])
    return [op.name for op in found if is_known(op.name)]


