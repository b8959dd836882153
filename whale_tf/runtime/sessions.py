"""What a Session needs around a rewritten graph: devices, merged fetches, and copies that are kept equal.

A run that needs no update uses the original ops and is left alone.  A run that reaches the clones gets its fetches of
original tensors from merged values, so that it neither computes the model twice nor returns one clone's part.  If it writes
nothing, and clones would need more than is fed, it gets copies that read the originals (:mod:`whale_tf.emit.session_alone`).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from itertools import starmap
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Mapping, MutableSet, Optional, Sequence, Set, Tuple

from whale_tf._tf_compat import eager_context, tf, v1
from whale_tf.capture.annotations import annotations_of
from whale_tf.communicators import ProcessCommunicator, check_gpus
from whale_tf.emit.emit import Emitted
from whale_tf.emit.order import Gates
from whale_tf.emit.processes import Kind, Runs, stage_start
from whale_tf.emit.reroute import outside_after
from whale_tf.emit.session_alone import SessionAlone
from whale_tf.emit.session_part import SessionPart
from whale_tf.emit.session_step import SessionSteps
from whale_tf.errors import PlanError, UnsupportedOpError
from whale_tf.graph_editor.edges import tensor_name
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.traits import ENTERS, Role, traits
from whale_tf.ir.walk import reached
from whale_tf.ir.writes import is_write
from whale_tf.processes.runtime import Runtime
from whale_tf.processes.state import StateElsewhere
from whale_tf.processes.step_numbers import StepNumbers
from whale_tf.runtime.feeds import Fetch, check_fed, elements, fed, shape_of
from whale_tf.runtime.part_runs import PartRuns, Run
from whale_tf.runtime.results import Results
from whale_tf.transforms.loss_scale import INITIAL
from whale_tf.transforms.shard.divided_variables import DividedVariables


def with_devices(config: Optional[v1.ConfigProto], num_cpus: int, uses_gpu: bool, may_call: bool) -> v1.ConfigProto:
    """A copy of the ConfigProto that a Session would take, with as many logical CPU devices as the cluster has.

    Args:
        config: the user's; None: what ``tf.config`` has set, as in TensorFlow.
        may_call: the step may be emitted as calls of functions, which TensorFlow's function optimizer would specialise one by
            one (24 layers, 16 micro-batches: a first step of 27 s instead of 5).
    """
    result = v1.ConfigProto()
    result.CopyFrom(eager_context().config if config is None else config)
    if num_cpus > result.device_count.get("CPU", 1):
        result.device_count["CPU"] = num_cpus
    rewrites = result.graph_options.rewrite_options
    if may_call and rewrites.function_optimization == rewrites.DEFAULT:
        rewrites.function_optimization = rewrites.OFF
    if uses_gpu:  # the input side and small integer arithmetic stay on the host
        result.allow_soft_placement = True
    return result


class Fetches:
    """Maps what a user fetches from a rewritten graph to what computes it.

    Args:
        replaced: tensors and ops of the local script -> what is computed instead.
        variables: those that ``wh.split`` divides.
        runtime: this process, if there are several.
        plan: as text, of which this process may run a part.
    """

    def __init__(self, rewritten: Emitted, replaced: Mapping[str, Any], variables: Optional[DividedVariables],
                 runtime: Optional[Runtime], plan: str = "") -> None:
        context = rewritten.context
        self._rewritten, self._instead, self._graph = rewritten, rewritten.instead, context.tf_graph
        self.results = Results(rewritten, replaced)
        self._variables = variables
        self._joined: Dict[str, Fetch] = {}
        self._after = {context.graph.ops[i].name for i in outside_after(context.graph, context.region)}
        self._parallel: Dict[str, bool] = {}
        self._merged: Dict[Tuple[str, bool], Fetch] = {}
        self._checked: Set[int] = set()  # fetched ops outside of the clones
        self._seen = -1
        self._initial = self._graph.get_operation_by_name(INITIAL) if context.plan.loss_scale is not None else None
        self._initialised: MutableSet[Any] = weakref.WeakSet()
        self._alone = SessionAlone(
            self._graph, context.graph, context.name("sessions"), self._is_computed_from_clones, lambda op: (
                [tensor.name for tensor in op.inputs], [before.name for before in op.control_inputs]), lambda edit: edit.commit())
        self._lacking: Dict[Tuple[Tuple[str, ...], FrozenSet[str]], bool] = {}  # fetched ops, fed ones -> whether inputs lack
        self.parts: Optional[PartRuns] = None
        self._has_devices: MutableSet[Any] = weakref.WeakSet()
        self._runtime, sent = runtime, rewritten.sent
        inside = [self._instead.get(op.name, op.name) for op in context.graph.ops if op.body and is_write(op)]
        self._runs = Runs(rewritten.communicator, sent.follow, sent.kept, [*sent.stand_ins, *inside], context.gathered.alone)
        self._ends, self._gates = sent.ends, Gates(rewritten.gates)
        self._elsewhere: Optional[StateElsewhere] = None
        self._shared = {context.graph.tensor_name(shared.tensor): shared for shared in rewritten.shared}
        if runtime is not None and context.processes.runs_part:
            self.parts = self._parts(runtime, plan)
        elif runtime is not None:
            assert isinstance(rewritten.communicator, ProcessCommunicator)
            self._start = stage_start(self._graph, context.host, rewritten.nodes, rewritten.communicator)
            self._numbers = StepNumbers(runtime.keys.sequence(), self._start.nothing)
            if sent.ends:
                self._elsewhere = StateElsewhere(self._graph, sent.kept, runtime)

    def _parts(self, runtime: Runtime, plan: str) -> PartRuns:
        """How this process makes runs of which it runs a part."""
        rewritten, context = self._rewritten, self._rewritten.context
        if self._variables is not None:
            self._variables.update()
        rewritten.mirror.update()
        divided = [] if self._variables is None else [one.op.name for one in self._variables.parts]
        merged = {shared.value.partition(":")[0]: [context.graph.ops[index].name for index in shared.writes]
                  for shared in rewritten.shared}
        part = SessionPart(context, self._after, merged, rewritten.gates, runtime.keys.instance())
        self.results.replace_also(part.replaced)
        merged = {value: [piece for name in names for piece in part.pieces(name)] for value, names in merged.items()}
        steps = SessionSteps(part, merged, rewritten.gates, rewritten.inputs)
        runs = PartRuns(part, steps, divided, runtime, plan)
        rewritten.mirror.finish(part.added)  # it writes copies itself
        return runs

    def kind(self, fetches: Sequence[Fetch]) -> Kind:
        """What a run of (substituted) fetches means for other processes, and what it must feed to wait for nothing else.

        Raises:
            UnsupportedOpError: it would wait for them forever.
        """
        ops = [_op_of(fetch) for fetch in fetches]
        kind = Kind() if self._runtime is None or self.parts is not None else self._runs.check(ops)
        return kind._replace(alone=kind.alone + self._gates.closed(ops)) if self._gates else kind

    def own_run(self, fetches: Sequence[Fetch]) -> Run:
        """What this process runs for (substituted) fetches, of which it runs a part."""
        assert self.parts is not None
        with unfinalized(self._graph):
            self.parts.part.update()
            found = self.parts.find(self._graph, fetches)
        self._seen = self._graph.version
        return found

    def step(self, session: Any, original_run: Callable, *arguments: Any) -> Any:
        """Makes a run that waits for other processes, with these arguments of TensorFlow's own ``session.run``."""
        return self.together(session, original_run, self._numbers.run, original_run, *arguments)

    def together(self, session: Any, original_run: Callable, function: Callable, *arguments: Any) -> Any:
        """Calls ``function``, a run that waits for other processes.  It begins without the state that they keep."""
        assert self._runtime is not None
        if self._elsewhere is None:
            return self._runtime.together(session, self._start, original_run, function, *arguments)
        if not self._runtime.is_equal(session):
            self._elsewhere.bring()
        return self._runtime.together(session, self._start, original_run, self._without_state, function, *arguments)

    def _without_state(self, function: Callable, *arguments: Any) -> Any:
        assert self._elsewhere is not None
        self._elsewhere.drop()
        result = function(*arguments)
        self._elsewhere.forget()
        return result

    def bring(self, kind: Optional[Kind] = None) -> None:
        """Call before each run by itself: brings the state that other processes keep and the run needs, by default all, and
        preserves the values of the last step that the run writes over."""
        if self._elsewhere is not None and (kind is None or kind.elsewhere):
            self._elsewhere.bring(() if kind is None else kind.elsewhere)
        if self._elsewhere is not None and kind is not None and kind.written:
            self._elsewhere.preserve(kind.written)

    def make_equal(self, session: Any, original_run: Callable) -> None:
        """Call when a session has been initialised or restored: if there are several processes, its variables take the values
        of process 0."""
        if self.parts is not None:
            self.prepare()
            self.parts.begin(session, original_run)
        elif self._runtime is not None:
            self.prepare()
            self.together(session, original_run, lambda: None)

    def initialise(self, session: Any, original_run: Callable) -> None:
        """Gives the variables that the rewrite added their first values, once in each session."""
        if self._initial is not None and session not in self._initialised:
            self._initialised.add(session)
            original_run(self._initial)

    def check_devices(self, session: Any) -> None:
        """Call before each run of a session that is local to this process.

        Raises:
            PlanError: the session has fewer devices than the plan uses, and TensorFlow may not choose others; or NCCL cannot run.
        """
        if session in self._has_devices:
            return
        devices = [device.name for device in session.list_devices()]
        lacking = self._rewritten.context.lacking(devices)
        if lacking and not (session._config and session._config.allow_soft_placement):
            raise PlanError(
                f"the plan uses {lacking}, which this Session does not have: it has {', '.join(devices)}. A Session has the "
                "devices of the plan if it is made after wh.init(), and without a server of the script's own")
        if session._config is not None:
            check_gpus(self._rewritten.communicator, session._config)
        self._has_devices.add(session)

    def prepare(self) -> None:
        """Call before each run: keeps copies equal if ops were added since the last run."""
        if self._graph.version == self._seen:
            return
        with unfinalized(self._graph):
            if self._variables is not None:
                self._variables.update()
            self._rewritten.mirror.update()
            if self.parts is not None:
                self.parts.part.update()
        self._seen = self._graph.version

    def catch_up(self, original_run: Callable) -> None:
        """For a session that ran before the rewrite: copies of variables take the variables' current values."""
        with unfinalized(self._graph):
            if self._variables is not None:
                self._variables.catch_up(original_run)
            self._rewritten.mirror.catch_up(original_run)
        self._seen = self._graph.version

    def substitutes(self, fetches: Sequence[Fetch], feeds: Mapping[tf.Tensor, Any]) -> List[Fetch]:
        """The same list, with originals replaced by merged values if the run reaches any clone.

        Args:
            feeds: the tensors that are fed, and their values (None: not known yet).

        Raises:
            InputError: inputs that are fed together do not match (see ``feeds.check_fed``).
            UnsupportedOpError: a tensor is fed that is inside the parallel region or was replaced.
        """
        if self._variables is not None and self._variables.note_fetches(_op_of(fetch).name for fetch in fetches):
            self._seen = -1
            self.prepare()
        loads = self._loads(fetches, list(feeds))
        if loads:
            return loads
        for feed in feeds:
            if self.results.is_replaced(feed.name):
                raise UnsupportedOpError(
                    f"tensor {feed.name!r} is fed, but sync_batch_norm, amp or wh.split has replaced {feed.op.name!r}; leave "
                    "out these options, or feed a placeholder (tf.compat.v1.placeholder_with_default keeps a default)")
        parts = [self._successors(fetch) for fetch in fetches]
        if self.parts is not None and not self.parts.steps.trains([_op_of(one) for group in parts for one in group]):
            with unfinalized(self._graph):
                return [self._join(fetch, [self.parts.alone.fetch(one) for one in group]) for fetch, group in zip(fetches, parts)]
        if not any(self._is_parallel(_op_of(part)) for group in parts for part in group):
            return [self._join(fetch, group) for fetch, group in zip(fetches, parts)]
        ops = [_op_of(part) for group in parts for part in group]
        if self.parts is None and self._lacks_inputs(ops, feeds):
            with unfinalized(self._graph):
                return [self._join(fetch, [self._alone.fetch(one) for one in group]) for fetch, group in zip(fetches, parts)]
        context = self._rewritten.context
        check_fed(context, feeds, annotations_of(self._graph).shapes)
        for feed in feeds:
            if feed.op.name in context.graph and context.region.contains(context.graph.op(feed.op.name)):
                raise UnsupportedOpError(
                    f"tensor {feed.name!r} is fed in a run that trains in parallel, but it is computed inside the parallel "
                    "region, once for each clone; feed a placeholder (tf.compat.v1.placeholder_with_default keeps a default)")
        asks = self._shared or context.is_called or context.gathered.ops or annotations_of(self._graph).collected
        writes = self._writes(ops) if asks else set()
        return [self._join(fetch, [self._substitute(part, writes) for part in group]) for fetch, group in zip(fetches, parts)]

    def _lacks_inputs(self, ops: Sequence[tf.Operation], feeds: Mapping[tf.Tensor, Any]) -> bool:
        """Whether a run writes nothing, and its clones would need inputs that are not fed, or examples that are not there."""
        fed_ops = {tensor.op for tensor in feeds}
        key = tuple(op.name for op in ops), frozenset(op.name for op in fed_ops)
        if key not in self._lacking:
            needed = reached(ops, lambda op: () if op in fed_ops else (
                *(tensor.op for tensor in op.inputs), *op.control_inputs))
            self._lacking[key] = any(
                traits(op.type).role is Role.PLACEHOLDER and not op.inputs and op not in fed_ops for op in needed)
        if not (self._lacking[key] or any(starmap(self._is_too_small, feeds.items()))) or self._runs.writes(ops):
            return False
        return not any(one.type in ENTERS for op in ops if self._is_computed_from_clones(op) for one in self._alone.needed(op))

    def _is_too_small(self, fed_tensor: tf.Tensor, value: Any) -> bool:
        """Whether a part of the mini-batch would get none of the examples that are fed."""
        least = self._rewritten.least.get(fed_tensor.name)
        shape = shape_of(value)
        return least is not None and shape is not None and least.dim < len(shape) and shape[least.dim] < least.rows

    def _is_computed_from_clones(self, op: tf.Operation) -> bool:
        """Whether an op outside of the clones reads merged values.  The rewrite's own ops are left as they are."""
        return not self._rewritten.context.is_own_name(op.name) and self._is_parallel(op)

    def _writes(self, ops: Sequence[tf.Operation]) -> Set[str]:
        """Names of the writes of variables that running ops runs."""
        if self.parts is None:
            return self._runs.writes(ops)
        found = self.parts.steps.writes(ops)
        return found | {name for name, pieces in self.parts.part.divided.items() if not found.isdisjoint(pieces)}

    def _loads(self, fetches: Sequence[Fetch], feeds: Sequence[tf.Tensor]) -> List[Fetch]:
        """What ``Variable.load`` runs instead if it feeds a value that divided variables do not read whole; else nothing."""
        if self._variables is None or not all(isinstance(fetch, tf.Operation) for fetch in fetches):
            return []
        with unfinalized(self._graph):
            found = [self._variables.loads(fetch, feeds) for fetch in fetches]
        if not all(found):
            return []
        self.prepare()
        return [self._join(fetch, [self._graph.get_operation_by_name(name) for name in names])
                for fetch, names in zip(fetches, found)]

    def _successors(self, fetch: Fetch) -> List[Fetch]:
        """The tensors or ops that are computed for a fetch: itself, its replacement, or its pieces."""
        if isinstance(fetch, tf.Operation):
            return [self._graph.get_operation_by_name(name) for name in self.results.ops(fetch.name)]
        return [self._graph.get_tensor_by_name(name) for name in self.results.tensors(fetch.name)]

    def _join(self, fetch: Fetch, parts: Sequence[Fetch]) -> Fetch:
        """Puts the parts of a fetch together."""
        if len(parts) == 1 and (isinstance(fetch, tf.Operation) or parts[0].dtype.base_dtype == fetch.dtype.base_dtype):
            return parts[0]
        names = [part.name for part in parts]
        key = " ".join(names)
        if key not in self._joined:
            if isinstance(fetch, tf.Operation):
                self._joined[key] = self._all(fetch, "joined", names)
            else:
                edit = self.results.begin_edit()
                self._joined[key] = self._added(edit, self.results.joined(fetch.name, names))
        return self._joined[key]

    def _added(self, edit: StagedEdit, name: str) -> Fetch:
        """A tensor or an op of an edit that is now complete."""
        with unfinalized(self._graph):
            edit.commit()
        return self._graph.as_graph_element(name)

    def _all(self, op: tf.Operation, scope: str, names: Sequence[str]) -> tf.Operation:
        """A new op that runs all ops of these names."""
        edit = self.results.begin_edit()
        return self._added(edit, self._rewritten.nodes.no_op(self._rewritten.context.name(scope, op.name), "", names))

    def _substitute(self, fetch: Fetch, writes: Set[str]) -> Fetch:
        """What to run instead of a fetch.

        Args:
            writes: the run's writes of variables, if they matter: a loss whose update is among them is fetched over all
                processes, and no call in the same run reads a variable again.
        """
        context = self._rewritten.context
        collection = None if isinstance(fetch, tf.Operation) else annotations_of(self._graph).collected.get(fetch.name)
        if collection is not None and fetch.op.name in context.graph:
            return self._collected(fetch, collection, bool(writes))
        shared = self._shared.get(fetch.name)
        if shared is not None and any(self._is_among(index, writes) for index in shared.writes):
            return self._graph.get_tensor_by_name(tensor_name(shared.value))
        op = fetch if isinstance(fetch, tf.Operation) else fetch.op
        if op.name not in context.graph:
            return fetch
        index = context.graph.op(op.name).id
        if writes and index in context.gathered.ops:
            return self._gathered(fetch)
        if index not in context.region.batch_level:
            if index not in self._checked:
                self._rewritten.recipes.check_size(index)
                self._checked.add(index)
            return fetch if isinstance(fetch, tf.Operation) or self.parts is not None else self.input_of_all(fetch)
        is_computed = not isinstance(fetch, tf.Operation) and not context.is_returned(context.graph.tensor(fetch.name))
        key = fetch.name, bool(writes) and is_computed
        if key not in self._merged:
            self._merged[key] = self._merge(fetch, trains=key[1])
            self._seen = self._graph.version
        return self._merged[key]

    def input_of_all(self, fetch: tf.Tensor) -> tf.Tensor:
        """The mini-batches of all model replicas, for a fetched batch input of which each has its own."""
        key = fetch.name, False
        if key not in self._merged:
            edit = self.results.begin_edit()
            name = self._rewritten.recipes.inputs_of_all(self._rewritten.context.graph.tensor(fetch.name))
            self._merged[key] = self._added(edit, fetch.name if name is None else tensor_name(name))
            self._seen = self._graph.version
        return self._merged[key]

    def _collected(self, fetch: tf.Tensor, collection: str, trains: bool) -> tf.Tensor:
        """The value of a tensor that is in a collection.

        Raises:
            UnsupportedOpError: the clones' values cannot be put together so.
        """
        key = f"{fetch.name} in {collection}", trains
        if self.parts is not None:
            raise UnsupportedOpError(
                f"tensor {fetch.name!r} is in the collection {collection!r}, but model replicas have devices of several "
                "processes, and none has the values of all clones; leave it out of collections, which gives the local script's "
                "value")
        if key not in self._merged:
            edit, sums = self.results.begin_edit(), self._rewritten.communicator.collectives
            staged = len(sums)
            name = self.results.collected(fetch.name, collection, trains)
            self._runs.beside.update(sums[staged:])
            self._merged[key] = self._added(edit, name)
            self._seen = self._graph.version
        return self._merged[key]

    def _gathered(self, fetch: Fetch) -> Fetch:
        """What a run that trains computes instead of a value that depends only on variables."""
        graph, gathered = self._rewritten.context.graph, self._rewritten.context.gathered
        if isinstance(fetch, tf.Operation):
            return self._graph.get_operation_by_name(gathered.ops[graph.op(fetch.name).id])
        return self._graph.get_tensor_by_name(gathered.tensors[graph.tensor(fetch.name)])

    def _is_among(self, write: int, writes: Set[str]) -> bool:
        """Whether an update, or what this process does instead, is among the writes of a run."""
        name = self._rewritten.context.graph.ops[write].name
        return name in writes or self._ends.get(name) in writes

    def _merge(self, fetch: Fetch, trains: bool) -> Fetch:
        """Adds the merged value of a tensor or, for an op, an op that runs all its clones."""
        if isinstance(fetch, tf.Operation):
            return self._all(fetch, "all", self.results.clones(fetch.name))
        edit = self.results.begin_edit()
        return self._added(edit, self.results.whole(fetch.name, trains, is_together=self.parts is not None))

    def _is_parallel(self, op: tf.Operation) -> bool:
        """Whether running ``op`` runs clones.  Ops recorded at the rewrite are known; later ones are traced back to them."""
        stack, path = [op], []
        context = self._rewritten.context
        visited = set()
        while stack:
            current = stack.pop()
            if current.name in visited:
                continue
            visited.add(current.name)
            if current.name in self._instead:
                raise UnsupportedOpError(
                    f"{op.name!r} was added after the first training run and needs {current.name!r}, which another op has "
                    "replaced since then, because a Session had run before the graph was divided; build it before the first "
                    "training run, or let no Session run before the optimizer is built and the ranks of inputs are known")
            known = self._parallel.get(current.name)
            if known is None and current.name in context.graph:
                known = current.name in self._after
            if known is None and current.name.startswith(context.name("")):
                known = True
            if known:
                self._parallel[op.name] = True
                return True
            if known is None:
                path.append(current)
                stack.extend(tensor.op for tensor in current.inputs)
                stack.extend(current.control_inputs)
        for current in path:
            self._parallel[current.name] = False
        return False


def _op_of(fetch: Fetch) -> tf.Operation:
    return fetch if isinstance(fetch, tf.Operation) else fetch.op


def run(fetch_map: Fetches, session: Any, original: Callable, fetches: Any, feed_dict: Optional[Dict], options: Any,
        run_metadata: Any) -> Any:
    """``Session.run`` on a rewritten graph."""
    fetch_map.prepare()
    fetch_map.initialise(session, original)
    mapper, wanted = elements(session.graph, fetches)
    feeds = fed(session.graph, feed_dict)
    substitutes = fetch_map.substitutes(wanted, feeds)
    if fetch_map.parts is not None:
        own = fetch_map.own_run(substitutes)
        feed_dict = dict(feed_dict or {}, **{name + ":0": False for name in own.closed})
        return mapper.build_results(fetch_map.parts.make(
            session, original, own, list(own.fetches), feed_dict, options, run_metadata)[:len(substitutes)])
    call, kind = original, fetch_map.kind(substitutes)
    if kind.alone:
        feed_dict = dict(feed_dict or {}, **{name + ":0": False for name in kind.alone})
    if kind.waits:
        call = functools.partial(fetch_map.step, session, original)
    fetch_map.bring(kind)
    if substitutes == wanted:
        return call(fetches, feed_dict, options, run_metadata)
    return mapper.build_results(call(substitutes, feed_dict, options, run_metadata))


def make_callable(fetch_map: Fetches, session: Any, original: Callable, run: Callable, fetches: Any,
                  accept_options: bool) -> Callable:
    """``Session.make_callable`` on a rewritten graph, without feeds.

    Args:
        run: TensorFlow's own ``session.run``.
    """
    fetch_map.prepare()
    fetch_map.initialise(session, run)
    mapper, wanted = elements(session.graph, fetches)
    substitutes = fetch_map.substitutes(wanted, {})
    if fetch_map.parts is not None:
        own = fetch_map.own_run(substitutes)
        part = _called(functools.partial(fetch_map.parts.make, session, run, own), list(own.fetches), own.closed)
        return lambda **kwargs: mapper.build_results(part(**kwargs)[:len(substitutes)])
    kind = fetch_map.kind(substitutes)
    own_fetches = fetches if substitutes == wanted else substitutes
    if kind.waits:
        inner = _called(functools.partial(fetch_map.step, session, run), own_fetches, kind.alone)
    elif kind.alone:
        inner = _called(run, own_fetches, kind.alone)
    else:
        inner = original(own_fetches, None, accept_options)
    if (kind.elsewhere or kind.written) and not kind.waits:
        inner = _after(functools.partial(fetch_map.bring, kind), inner)
    if substitutes == wanted:
        return inner
    return lambda **kwargs: mapper.build_results(inner(**kwargs))


def _called(step: Callable, fetches: Any, closed: Sequence[str]) -> Callable:
    """A function that makes a run.

    Args:
        step: makes it, with the arguments of ``session.run``.
        closed: names of booleans that are fed with False.
    """
    feeds = {name + ":0": False for name in closed}
    return lambda options=None, run_metadata=None: step(fetches, feeds, options, run_metadata)


def _after(before: Callable[[], None], function: Callable) -> Callable:
    """``function``, with a call of ``before`` before each of its calls."""
    def call(**kwargs: Any) -> Any:
        before()
        return function(**kwargs)
    return call


def check_partial_run(fetch_map: Fetches, session: Any, fetches: Any) -> None:
    """Refuses a partial run that reaches clones: feeds arrive one by one, but clones need their parts at once.

    Raises:
        UnsupportedOpError
    """
    _, wanted = elements(session.graph, fetches)
    if fetch_map.substitutes(wanted, {}) != wanted:
        raise UnsupportedOpError(
            "Session.partial_run is not supported for a training step that whale_tf runs in parallel; use Session.run with all "
            "feeds"
        )


@contextlib.contextmanager
def unfinalized(graph: tf.Graph) -> Iterator[None]:
    """Lets the rewrite add ops to a graph that a MonitoredSession has finalized."""
    finalized = graph.finalized
    if finalized:
        graph._unsafe_unfinalize()
    try:
        yield
    finally:
        if finalized:
            graph._finalized = True
