"""The first call of a tf.function that trains, with the local step beside it.

Before the call, the divided function's graph runs in a Session of its own, on the arguments and the variables' values of the
call, and so does the local one.  Then the call runs as always, and the values that it leaves in the variables are compared.

The function may be called in the graph of another one, which takes the mini-batch from an iterator (Keras).  The first mini-batch
is then taken from the iterator here, and the call gets another iterator, of this mini-batch alone::

    iterator ── next ──> mini-batch ──┬──> divided and local step, in Sessions
                                      └──> iterator of one mini-batch ──> the call
"""
from __future__ import annotations

import contextlib
import time
import weakref
from typing import Any, Callable, Dict, List, MutableMapping, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from whale_tf._tf_compat import GraphDef, tf, v1
from whale_tf.capture.handles import Handle, variable_handles
from whale_tf.capture.hooks import original_run
from whale_tf.capture.recording import recording_of
from whale_tf.emit.recipes import Recipes
from whale_tf.errors import PlanError
from whale_tf.graph_editor import backward
from whale_tf.ir.graph import Phase
from whale_tf.ir.traits import CALLS, CONDITIONALS, PULLS, RANDOM, WHILES
from whale_tf.parallelize import Parallelized
from whale_tf.patterns.spread import Spread, once
from whale_tf.processes.functions import Functions
from whale_tf.processes.runtime import Runtime
from whale_tf.runtime.functions import MovedVariable, merged
from whale_tf.runtime.of_graphs import OfGraphs
from whale_tf.runtime.results import Results
from whale_tf.runtime.variable_parts import VariableParts
from whale_tf.runtime.verifying import compare as comparing
from whale_tf.runtime.verifying.compare import TOLERANCE, VALUE, Compared, Comparison, Item, summary
from whale_tf.runtime.verifying.cut import DRAWN, Cut, find_cut
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
from whale_tf.runtime.verifying.local import LocalStep, Script, Values, make_variable, named, own_graphs
from whale_tf.runtime.verifying.mini_batches import for_several
from whale_tf.runtime.verifying.processes import Job, Part, Whole, items_of_others, kept_elsewhere
from whale_tf.runtime.verifying.replay import (
    Replay,
    cpus,
    in_float64,
    in_float64_if_possible,
    on_cpus,
    widened,
    without_effects,
    writes,
)
from whale_tf.transforms.loss_scale import scales_itself

AGREES = "all variables, as the call itself left them"
Run = Callable[[Any, Any], Any]  # a concrete function's arguments and captured tensors -> what it returns


class Traced(NamedTuple):
    """A function's graph before it is rewritten.

    Attributes:
        returned: names of its results.
        runs: names of the ops that must run.
        captures: name of a variable's placeholder -> the variable's handle outside.
    """

    script: Script
    returned: Tuple[str, ...]
    runs: Tuple[str, ...]
    captures: Dict[str, tf.Tensor]


def traced(graph: tf.Graph) -> Traced:
    recording = recording_of(graph)
    handles = variable_handles(graph)
    script = Script(recording.graph, recording.phases, recording.definitions.export, handles, scales_itself(graph))
    captures = {inner.op.name: outer for outer, inner in graph.captures if inner.op.name in handles}
    runs = tuple(op.name for op in graph.control_outputs)
    return Traced(script, tuple(tensor.name for tensor in graph.outputs), runs, captures)


class _Site(NamedTuple):
    """A call of a divided function in another one's graph; ``op``: name of the call; "": it is inside a loop or condition."""

    graph: tf.Graph
    op: str


class FunctionProofs:
    """Compares the first call of each trace of a function that was divided.

    Args:
        parts: the variables that functions have in parts.
        config: gives the ConfigProto of a Session with the plan's devices.
        say: is told what was compared.
        shown: is given what makes the comparison in float64 of the first call, which is then not made; None: calls are made.
        runtime, functions: this process, and what it runs together with others; None: there are none.
    """

    def __init__(self, parts: VariableParts, config: Callable[[], Any], say: Callable[[str], None],
                 shown: Optional[Show] = None, runtime: Optional[Runtime] = None,
                 functions: Optional[Functions] = None) -> None:
        self._parts, self._config, self._say, self._shown = parts, config, say, shown
        self._runtime, self._functions = runtime, functions
        self._open: MutableMapping[tf.Graph, _Proof] = OfGraphs()
        self._sites: MutableMapping[tf.Graph, List[_Site]] = weakref.WeakKeyDictionary()

    def add(self, graph: tf.Graph, before: Traced, done: Parallelized, moved: Optional[Sequence[MovedVariable]] = None) -> None:
        """Compares the first call of a function.

        Args:
            moved: variables in parts or in other processes, of a step of which this process is about to keep its part; None: it
                runs whole steps.
        """
        proof = self._open[graph] = _Proof(graph, before, done, self._parts, self._config, self._say, self._runtime)
        if moved is not None:
            proof.keep_whole(moved)

    def call(self, function: Any, run: Run, given: Any, captured: Any) -> Any:
        """Calls a concrete function.

        Raises:
            MismatchError: it does not compute what the local one computes.
        """
        if not tf.executing_eagerly():
            return self._called_in_graph(function, run, given, captured)
        if self._functions is not None:
            self._functions.prepare(function)
        proof = self._open.pop(function.graph, None)
        if proof is not None:
            given, pulled = _pulled(function.graph, given, captured)
            if given is None:
                self._open[function.graph] = proof
                return run(*pulled)
            arguments = {**_named(function.graph, given, captured), **pulled}
            return self._made(proof, arguments, lambda: run(given, captured))
        site = next((site for site in self._sites.get(function.graph, ()) if site.graph in self._open), None)
        if site is None:
            return run(given, captured)
        new, pulled = _pulled(function.graph, given, captured)
        if new is None:
            return run(*pulled)
        known = {**_named(function.graph, new, captured), **pulled}
        operands = _operands(function.graph, site, known)
        proof = self._open.pop(site.graph)
        proof.note_others(function.graph, site.op)
        return self._made(proof, operands, lambda: run(new, captured))

    def _made(self, proof: _Proof, given: Values, run: Callable[[], Any]) -> Any:
        if self._shown is not None:
            return self._shown(lambda: in_float64_if_possible(lambda wide: proof.compared(given, wide)), proof.where,
                               proof.step(given))
        result = proof.call(given, run)
        if proof.is_open:
            self._open[proof.graph] = proof
        return result

    def compared(self, concrete: Any, arguments: Sequence[Any]) -> Optional[Tuple[Comparison, str]]:
        """The comparison in float64 of a concrete function that was not called; None: it was not divided.

        Args:
            arguments: its flat arguments.
        """
        proof = self._open.pop(concrete.graph, None)
        if proof is None:
            return None
        given = _named(concrete.graph, arguments, ())
        return in_float64_if_possible(lambda wide: proof.compared(given, wide)), proof.where

    def _called_in_graph(self, function: Any, run: Run, given: Any, captured: Any) -> Any:
        graph = v1.get_default_graph()
        if function.graph not in self._open and function.graph not in self._sites:
            return run(given, captured)
        before = len(graph.get_operations())
        result = run(given, captured)
        calls = [op for op in graph.get_operations()[before:] if op.type in CALLS]
        inner = function.graph if function.graph in self._open else self._sites[function.graph][0].graph
        site = _Site(inner, calls[-1].name if calls and function.graph in self._open else "")
        while graph is not None:
            self._sites.setdefault(graph, []).append(site)
            graph, site = getattr(graph, "outer_graph", None), site._replace(op="")
        return result


class _Replayed(NamedTuple):
    """A divided step that ran in a Session.

    Attributes:
        before, after: values of variables.
        found: values by names of the local script.
        known, merges: what was fetched, and the merged values that may be among it.
    """

    cut: Cut
    before: Values
    found: Values
    after: Values
    known: Dict[str, tf.Tensor]
    merges: Sequence[Recipes]

    @property
    def draws(self) -> bool:
        return DRAWN in (*self.cut.taken.values(), *self.cut.lost.values())

    def is_float(self, name: str) -> bool:
        return name in self.after and str(self.after[name].dtype) in TOLERANCE


class _WholeStep(NamedTuple):
    """A divided step before each of several processes kept its own part, on logical CPU devices of one process.

    Attributes:
        parts: placeholder of a variable -> the names of its parts, and how they form the whole.
        observed: name in the local script -> name of the tensor.
        updates: ops that must run.
        devices: how many it needs.
    """

    cut: Cut
    definition: GraphDef
    parts: Dict[str, Tuple[Tuple[str, ...], Spread]]
    observed: Dict[str, str]
    updates: Tuple[str, ...]
    devices: int

    def run(self, before: Values, given: Values) -> _Replayed:
        """Runs it.

        Args:
            before: values of whole variables, by placeholder.
        """
        values: Values = {}
        for name, value in before.items():
            names, spread = self.parts.get(name, ((name,), once))
            for part, tile in zip(names, spread.parts if spread.is_divided else [None]):
                ranges = {one.dim: slice(one.start, one.start + one.size) for one in (tile.ranges if tile is not None else ())}
                values[part] = value[tuple(ranges.get(dim, slice(None)) for dim in range(value.ndim))]
        replay = Replay(self.definition, values, cpus(self.devices))
        try:
            found = replay.run(self.observed, self.updates, given)
            parts = replay.variables()
        finally:
            replay.close()
        after = {}
        for name in before:
            names, spread = self.parts.get(name, ((name,), once))
            own = [parts[part] for part in names]
            after[name] = spread.whole_of(own, np.concatenate) if spread.is_divided else own[0]
        return _Replayed(self.cut, before, found, after, {}, ())


class _Proof:
    """The comparison of one trace.

    Attributes:
        is_open: a loss scale has skipped the calls so far.
    """

    is_open = True
    _others = ""  # what else decides what a call leaves in the variables

    def __init__(self, graph: tf.Graph, before: Traced, done: Parallelized, parts: VariableParts, config: Callable[[], Any],
                 say: Callable[[str], None], runtime: Optional[Runtime] = None) -> None:
        self._graph, self._before, self._done, self._parts = weakref.ref(graph), before, done, parts
        self._config, self._say, self._runtime = config, say, runtime
        self._whole: Optional[_WholeStep] = None

    def keep_whole(self, moved: Sequence[MovedVariable]) -> None:
        """Call before each of several processes keeps its part of the step: process 0 can then run all of it."""
        graph, context = self.graph, context_of(self._done)
        cut = self._cut()
        observed = self._observed(graph, cut, {})[0]
        definition, handles = v1.GraphDef(), variable_handles(graph)
        definition.CopyFrom(graph.as_graph_def())
        without_effects(definition, graph.get_operations())
        places = {device: f"/device:CPU:{number}" for number, device in enumerate(context.devices)}
        for nodes in (definition.node, *(function.node_def for function in definition.library.function)):
            for node in nodes:
                node.device = places.get(node.device, "")
        for node in definition.node:
            if node.name in handles:
                make_variable(node, handles[node.name])
        self._whole = _WholeStep(cut, definition, {one.op.name: (one.names, one.spread) for one in moved},
                                 {name: tensor.name for name, tensor in observed.items()},
                                 tuple(op.name for op in graph.control_outputs if writes(op)), len(context.devices))

    def note_others(self, graph: tf.Graph, call: str) -> None:
        """Call before a function is called whose graph calls the divided one: the variables may not be what this call by itself
        leaves in them."""
        op, known = graph.get_operation_by_name(call), {id(handle) for handle in self._before.captures.values()}
        handles = [*(inner for outer, inner in graph.captures if id(outer) in known), *op.inputs]
        users = (user for tensor in handles if tensor.dtype == tf.resource for user in tensor.consumers())
        writer = next((user.name for user in users if writes(user) and user.name != call), None)
        if writer is not None:
            self._others = f"op {writer!r} of {graph.name!r}, which calls it, may write them, too"
        elif _draws(graph, [tensor for tensor in op.inputs if tensor.dtype not in (tf.resource, tf.variant)]):
            self._others = f"{graph.name!r}, which calls it, draws random numbers for its arguments anew"

    def call(self, given: Values, run: Callable[[], Any]) -> Any:
        """The first call.

        Args:
            given: values of the function's placeholders, and of what it takes from iterators, by name.

        Raises:
            MismatchError: the step differs from the local one.
        """
        began, took = time.perf_counter(), 0.0
        result: Any = None

        def timed() -> None:
            nonlocal result, took
            started = time.perf_counter()
            result = run()
            took = time.perf_counter() - started

        if self._job is None:
            found, missing = self.compared(given, False, timed)
            self._say(self._judged(found, missing, lambda: time.perf_counter() - began - took))
            return result
        if self._whole is not None:
            return self._called_in_parts(self._whole, given, timed, lambda: result, lambda: time.perf_counter() - began - took)
        step = self._replayed(given, False)
        timed()
        own = {name: value for name, value in step.after.items() if name not in kept_elsewhere(self._done)}
        if self._is_told_by_call(step):
            own[AGREES] = self._agrees([name for name in own if step.is_float(name)], step)
        parts = self._job.collected(Part({**given, **step.found}, own))

        def judge() -> str:
            found, lost = Whole(self._done, self._before.script.ops, step.known, step.merges).together(
                [part.tensors for part in parts], step.cut)
            after = {name: value for part in reversed(parts) for name, value in part.variables.items()}
            compared, missing = self._beside(step._replace(found=found, after=after), {}, False, None, parts)
            return self._judged(compared, {**missing, **lost}, lambda: time.perf_counter() - began - took)

        text = self._job.judged(judge)
        self.is_open = text == comparing.skipped(self.where)
        if self._job.is_first:
            self._say(text)
        return result

    def _called_in_parts(self, whole: _WholeStep, given: Values, run: Callable[[], None], result: Callable[[], Any],
                         delayed_s: Callable[[], float]) -> Any:
        """The first call of a step of which each process runs a part.  Process 0 runs all of it, and the local step; then all
        make the call, after which the variables must be those of the step that process 0 ran."""
        job, steps, errors = self._job, [], []  # type: Any, List[_Replayed], List[Exception]
        if job.is_first:
            try:
                steps.append(whole.run({name: self._value(handle) for name, handle in self._before.captures.items()}, given))
            except Exception as error:  # the others wait
                errors.append(error)
        job.told(None)  # nobody writes variables before process 0 has read them
        run()

        def judge() -> str:
            if errors:
                raise errors[0]
            step = steps[0]
            names = [name for name in step.after if step.is_float(name)]
            own = {AGREES: self._agrees(names, step)} if self._is_told_by_call(step) else {}
            found, missing = self._beside(step, given, False, None, [Part({}, own)])
            return self._judged(found, missing, delayed_s)

        text = job.judged(judge)
        self.is_open = text == comparing.skipped(self.where)
        if job.is_first:
            self._say(text)
        return result()

    def _judged(self, found: Sequence[Compared], missing: Dict[str, str], delayed_s: Callable[[], float]) -> str:
        """What is said about a comparison.

        Raises:
            MismatchError: the step differs from the local one.
        """
        self.is_open = comparing.is_skipped(found)
        if not self.is_open or self._done.plan.loss_scale is None:  # else also the forward pass may have overflowed, in float16
            comparing.check(found, self.where)
        return comparing.skipped(self.where) if self.is_open else summary(found, missing, delayed_s(), self.where)

    @property
    def graph(self) -> tf.Graph:
        graph = self._graph()
        assert graph is not None
        return graph

    def step(self, given: Values) -> Step:
        """The divided step, on values of the function's placeholders."""
        graph = self.graph
        runs = [*(tensor.op for tensor in graph.outputs), *graph.control_outputs]
        return Step(graph, self._done, tuple(op.name for op in runs), given)

    @property
    def where(self) -> str:
        return f"tf.function {self.graph.name!r}"

    def compared(self, given: Values, wide: bool, run: Optional[Callable[[], Any]] = None) -> Comparison:
        """The comparison, and what could not be compared -> why.

        Args:
            given: see :meth:`call`.
            wide: whether both steps are computed in float64 where they have float32.
            run: the call, which changes the user's variables; None: nothing is changed.
        """
        return self._beside(self._replayed(given, wide), given, wide, run)

    def _replayed(self, given: Values, wide: bool) -> _Replayed:
        """What the divided step computes in a Session of its own."""
        graph, done, cut = self.graph, self._done, self._cut()
        before = {name: self._value(handle) for name, handle in self._before.captures.items()}
        observed, known, merges = self._observed(graph, cut, given)
        divided = _Divided(graph, self._parts, self._config(), wide, len(context_of(done).devices), self._runtime)
        try:
            found = divided.run(observed, given)
            after = {name: divided.variable(handle) for name, handle in self._before.captures.items()}
        finally:
            divided.close()
        return _Replayed(cut, before, found, after, known, merges)

    def _cut(self) -> Cut:
        script, ops = self._before.script, self._before.script.ops
        waits = [(wait.op, wait.on) for wait in script.phases.waits]
        names = [*self._before.runs, *(name.partition(":")[0] for name in self._before.returned)]
        return find_cut(ops, script.phases.variables.written_by, waits, [ops.op(name).id for name in names],
                        [ops.tensor(name) for name in self._before.returned], view_of(self._done))

    def _beside(self, step: _Replayed, given: Values, wide: bool, run: Optional[Callable[[], Any]],
                parts: Sequence[Part] = ()) -> Comparison:
        """The comparison of a divided step with the local one.

        Args:
            given, wide, run: see :meth:`compared`.
            parts: of all processes, if there are several.
        """
        script, done, cut, before, found = self._before.script, self._done, step.cut, step.before, step.found
        if self._job is not None:
            script = for_several(script, context_of(done), self._job.count)
        if wide:
            before, given = widened(before), widened(given)
        local = LocalStep(script, cut, local_config(None, wide or not runs_on_gpu(done)), *([in_float64] if wide else []))
        try:
            try:
                with contextlib.nullcontext() if wide else named(self.where):
                    outcome = local.outcome(before, {**found, **given})
            except tf.errors.ResourceExhaustedError:
                if wide or not runs_on_gpu(done):
                    raise
                self._say("verify: the local step does not fit into the memory of one GPU; it runs on the host")
                local.close()
                local = LocalStep(script, cut, local_config(None, on_cpu=True))
                outcome = local.outcome(before, {**found, **given})
            items = items_of(done, script, cut, found, before, step.after, outcome, wide, uses_tf32(done))
            items += items_of_others(items, parts)
            agrees = [part.variables[AGREES] for part in parts if AGREES in part.variables]
            if run is not None:
                run()
                if self._is_told_by_call(step):
                    names = [item.name for item in items if item.what == VALUE and item.dtype in TOLERANCE]
                    agrees = [self._agrees(names, step)]
            items += [Item(AGREES, VALUE, len(script.ops.ops), "", "in the call", "agreement", value, np.array(True))
                      for value in agrees]
            compared, missing = comparison(script, cut, items, local, before, {**found, **given})
            return compared, {**missing, **({AGREES: self._others} if self._others else {})}
        finally:
            local.close()

    @property
    def _job(self) -> Optional[Job]:
        return None if self._runtime is None else Job(self._runtime, self._whole is not None)

    def _is_told_by_call(self, step: _Replayed) -> bool:
        """Whether the values that a call leaves in the variables tell what it has computed: it draws no numbers of its own."""
        return not step.draws and not self._others

    def _agrees(self, names: Sequence[str], step: _Replayed) -> np.ndarray:
        """Whether all changes of variables that the call made agree with those of the Session, but for a tenth.  Where a gradient
        is 0 but for rounding, the two may differ in anything, so that each variable by itself says nothing."""
        def change(values: Values) -> np.ndarray:
            return np.concatenate([np.zeros(1), *(np.ravel(values[name] - step.before[name]).astype(float) for name in names)])

        made = change({name: self._value(self._before.captures[name]) for name in names})
        expected = change(step.after)
        return np.array(np.linalg.norm(made - expected) <= 0.1 * np.linalg.norm(expected))

    def _value(self, handle: tf.Tensor) -> np.ndarray:
        """The value of a variable, whole."""
        dtype = next(spec.attrs["dtype"] for name, spec in self._before.script.handles.items()
                     if self._before.captures.get(name) is handle)
        return np.array(self._parts.value(handle, tf.as_dtype(dtype)))

    def _observed(self, graph: tf.Graph, cut: Cut,
                  given: Values) -> Tuple[Dict[str, tf.Tensor], Dict[str, tf.Tensor], Sequence[Recipes]]:
        """Name in the local script -> the divided step's tensor; the same with merged values for results; all merged values."""
        ops, found = self._before.script.ops, {}  # type: ignore[var-annotated]
        found.update(zip(self._before.returned, graph.outputs))
        for use in cut.leaving:
            name = ops.ops[use.op].name
            if view_of(self._done).runs(name):
                found[ops.tensor_name(use.tensor)] = graph.get_operation_by_name(name).inputs[use.position]
        left = [use.tensor for use in cut.leaving]
        rest = [ops.tensor_name(t) for t in dict.fromkeys((*cut.results, *cut.samples, *cut.returned, *cut.taken, *left))
                if ops.tensor_name(t) not in found and ops.tensor_name(t) not in given
                and ops.producer(t).phase is not Phase.INPUT]
        emitted = self._done.emitted
        assert emitted is not None
        results = Results(emitted, self._done.replaced)
        names = rest + list(self._before.returned if self._runtime is not None else ())
        new = dict(zip(names, merged(results, [graph.get_tensor_by_name(name) for name in names])))
        found.update((name, new[name]) for name in rest)
        return found, {**found, **new}, results.recipes


class _Divided:
    """The divided function's step in a Session of its own, and the user's variables in it.

    Args:
        config: ConfigProto with the plan's devices.
        wide: whether it is computed in float64, on ``num_devices`` logical CPU devices.
        runtime: this process, if there are several.
    """

    def __init__(self, graph: tf.Graph, parts: VariableParts, config: Any, wide: bool, num_devices: int,
                 runtime: Optional[Runtime]) -> None:
        self._parts, handles = parts, variable_handles(graph)
        self._outside = {inner.op.name: outer for outer, inner in graph.captures if inner.op.name in handles}
        parts.bring(list(self._outside.values()))
        before = {name: _nothing(handles[name]) if parts.is_elsewhere(outer) else _value_of(outer, handles[name])
                  for name, outer in self._outside.items()}
        definition = v1.GraphDef()
        definition.CopyFrom(graph.as_graph_def())
        without_effects(definition, graph.get_operations())
        for node in definition.node:
            if node.name in self._outside:
                make_variable(node, handles[node.name])
                node.device = self._outside[node.name].device
        self._updates = [op.name for op in graph.control_outputs if writes(op)]
        if wide:
            definition, before, config = on_cpus(in_float64(definition)), widened(before), cpus(num_devices)
        target = ""
        if runtime is not None:
            target, config = runtime.beside()
        self._replay = Replay(definition, before, config, target)
        self._after: Values = {}

    def run(self, fetches: Dict[str, tf.Tensor], given: Values) -> Values:
        """Runs the step once; values of ``fetches``."""
        found = self._replay.run({name: tensor.name for name, tensor in fetches.items()}, self._updates, given)
        self._after = self._replay.variables()
        return found

    def variable(self, handle: tf.Tensor) -> np.ndarray:
        """The new value of the user's variable with this handle."""
        names = {id(outer): name for name, outer in self._outside.items()}
        if id(handle) in names:
            return self._after[names[id(handle)]]
        handles, spread = self._parts.parts_of(handle, list(self._outside.values()))
        values = [self._after[names[id(part)]] for part in handles]
        return spread.whole_of(values, np.concatenate)

    def close(self) -> None:
        self._replay.close()


def _nothing(spec: Handle) -> np.ndarray:
    """What this process has of a variable that another one keeps."""
    return np.zeros(0, tf.as_dtype(spec.attrs["dtype"]).as_numpy_dtype)


def _value_of(handle: tf.Tensor, spec: Handle) -> np.ndarray:
    return np.array(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.as_dtype(spec.attrs["dtype"])))


def _named(graph: tf.Graph, given: Sequence[Any], captured: Sequence[Any]) -> Values:
    """Values of a function's placeholders, by name."""
    return {inner.name: outer.numpy() for inner, outer in zip(graph.inputs, [*given, *captured])
            if inner.dtype not in (tf.resource, tf.variant) and hasattr(outer, "numpy")}


def _pulled(graph: tf.Graph, given: Sequence[Any], captured: Sequence[Any]) -> Tuple[Any, Any]:
    """Takes the mini-batch that a function will take from an iterator.

    Returns:
        The arguments, with an iterator of this mini-batch alone, and the mini-batch by names of the function's tensors; or None
        and what to call the function with, if the iterator has ended.

    Raises:
        PlanError: it takes several mini-batches.
    """
    outside = {inner.op.name: place for place, inner in enumerate(graph.inputs)}
    pulls = [op for op in graph.get_operations() if op.type in PULLS]
    if not pulls:
        inside = any(node.op in PULLS for function in graph.as_graph_def().library.function for node in function.node_def)
        if inside:
            raise _several(graph)
        return given, {}
    places = [outside.get(op.inputs[0].op.name, -1) for op in pulls]
    if len(pulls) > 1 or not 0 <= places[0] < len(given):
        raise _several(graph)
    try:
        element = tf.raw_ops.IteratorGetNext(iterator=given[places[0]], output_types=pulls[0].get_attr("output_types"),
                                             output_shapes=pulls[0].get_attr("output_shapes"))
    except tf.errors.OutOfRangeError:
        return None, (given, captured)
    iterator = iter(tf.data.Dataset.from_tensors(tuple(element)))
    _kept[graph] = iterator  # the call holds only its handle
    new = list(given)
    new[places[0]] = iterator._iterator_resource
    return new, {tensor.name: value.numpy() for tensor, value in zip(pulls[0].outputs, element)
                 if tensor.dtype not in (tf.resource, tf.variant)}


_kept: MutableMapping[tf.Graph, Any] = weakref.WeakKeyDictionary()


def _several(graph: tf.Graph) -> PlanError:
    return PlanError(
        f"verify is 'first_step', but tf.function {graph.name!r} takes several mini-batches from an iterator in one call, or one "
        "from an iterator that is not its argument; set steps_per_execution to 1 (Keras), give the function the mini-batch "
        "itself, or set verify to 'off'")


def _operands(graph: tf.Graph, site: _Site, known: Values) -> Values:
    """Values of the placeholders of a function that is called in the graph of another one.

    Args:
        known: values of the outer function's tensors.

    Raises:
        PlanError: the call is inside of a loop or condition.
    """
    if not site.op:
        raise PlanError(
            f"verify is 'first_step', but tf.function {site.graph.name!r} is called inside a loop, a condition or a further "
            f"function of tf.function {graph.name!r}, so that its arguments are not known before it runs; call it directly, or "
            "set verify to 'off'")
    call = graph.get_operation_by_name(site.op)
    wanted = {inner.name: outer for inner, outer in zip(site.graph.inputs, call.inputs)
              if inner.dtype not in (tf.resource, tf.variant)}
    computed = [outer for outer in wanted.values() if outer.name not in known]
    if computed:
        try:
            known = {**known, **_evaluated(graph, computed, known)}
        except tf.errors.OpError as error:
            raise PlanError(
                f"verify is 'first_step', but tf.function {graph.name!r} calls {site.graph.name!r} with arguments that do not "
                "follow from its own arguments alone, but from a variable, for example, so that they are not known before it "
                f"runs; call {site.graph.name!r} directly, or set verify to 'off'") from error
    return {name: known[outer.name] for name, outer in wanted.items()}


def _draws(graph: tf.Graph, tensors: Sequence[tf.Tensor]) -> bool:
    """Whether tensors of a function may follow from random numbers."""
    kinds = {op.type for op in backward(tensors)}
    if not kinds.isdisjoint(CALLS | CONDITIONALS | WHILES):
        kinds.update(node.op for function in graph.as_graph_def().library.function for node in function.node_def)
    return not kinds.isdisjoint(RANDOM)


def _evaluated(graph: tf.Graph, tensors: Sequence[tf.Tensor], known: Values) -> Values:
    """Values of tensors that a function computes from known ones."""
    own = tf.Graph()
    own_graphs.add(own)
    definition = v1.graph_util.extract_sub_graph(graph.as_graph_def(), [tensor.op.name for tensor in tensors])
    definition.library.CopyFrom(graph.as_graph_def().library)
    names: Set[str] = {node.name for node in definition.node}
    with own.as_default():
        tf.import_graph_def(definition, name="")
    with v1.Session(graph=own) as session:
        values = original_run(session)([tensor.name for tensor in tensors], {
            name: value for name, value in known.items() if name.partition(":")[0] in names})
    return dict(zip([tensor.name for tensor in tensors], values))


