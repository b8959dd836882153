"""tf.functions: a function that trains is rewritten right after it was traced."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, Mapping, MutableMapping, Optional

from whale_tf._tf_compat import relaxed_type, tf
from whale_tf.capture import distribution, layers
from whale_tf.capture.annotations import Annotations, annotations_of
from whale_tf.capture.fitting import is_called
from whale_tf.capture.handles import note_variables
from whale_tf.errors import OtherGraphError, PlanError, TooFewExamplesError, WhaleError
from whale_tf.garbage import garbage_collection_paused
from whale_tf.parallelize import Parallelized, parallelize
from whale_tf.planner.homes import NONE
from whale_tf.processes.watch import say
from whale_tf.runtime import evaluations, functions, refusals
from whale_tf.runtime.active import Active, described, observer, shown
from whale_tf.runtime.feeds import named_errors
from whale_tf.runtime.of_graphs import OfGraphs
from whale_tf.runtime.small_steps import SmallSteps, undivided
from whale_tf.runtime.verifying.functions import FunctionProofs, traced


class FunctionTriggers:
    """See :class:`whale_tf.capture.callbacks.Callbacks`."""

    def __init__(self, state: Active) -> None:
        self._state = state
        self._calls: MutableMapping[tf.Graph, Optional[Parallelized]] = weakref.WeakKeyDictionary()  # what a graph calls
        self._made: MutableMapping[str, tf.Graph] = weakref.WeakValueDictionary()  # graphs of functions by their names
        self._small: MutableMapping[tf.Graph, SmallSteps] = OfGraphs()
        state.function_proofs = FunctionProofs(state.variable_parts, state.session_config, say, shown(), state.runtime,
                                               state.functions)

    def arguments(self, function_type: Any) -> Any:
        return relaxed_type(function_type) if self._state.functions is not None else function_type

    def variable_made(self, variable: Any) -> None:
        if self._state.snapshots is not None:
            self._state.snapshots.made(variable)

    def made(self, function: Any) -> None:
        state = self._state
        if function.graph in state.done:
            self._made[tf.compat.as_str(function.name)] = function.graph
        if function.graph in state.drafts:
            functions.refuse_to_run(function)
        state.variable_parts.watch(function)
        if function.graph in self._small:
            self._small[function.graph].watch(
                function, state.variable_parts.before_call, lambda: None if state.verifies else state.knows_end)
        if function.graph not in state.drafts:
            state.runs.traced(function.graph)

    def call(self, function: Any, original: Callable[[Any, Any], Any], given: Any, captured: Any) -> Any:
        state = self._state

        def run(given: Any, captured: Any) -> Any:
            job = state.functions
            return original(given, captured) if job is None else job.call(function, lambda: original(given, captured))

        def made() -> Any:
            return state.function_proofs.call(function, run, given, captured) if state.verifies else run(given, captured)

        with named_errors():
            if state.doctor is None or state.doctor.is_over or not tf.executing_eagerly():
                return made()
            done = self._trained(function.graph)
            if done is None:
                return made()
            shapes = {tensor.name: tuple(value.shape) for tensor, value in zip(function.graph.inputs, given)
                      if isinstance(value, tf.Tensor) and value.dtype not in (tf.resource, tf.variant)}
            return state.doctor.call(done, shapes, made)

    def _trained(self, graph: tf.Graph) -> Optional[Parallelized]:
        """What was done to the function that a function's graph is, or calls."""
        known = self._state.done
        found = known.get(graph)
        if found is not None and found.emitted is not None:
            return found
        if graph not in self._calls:
            made = (self._made.get(function.signature.name) for function in graph.as_graph_def().library.function)
            done = (known.get(other) for other in made if other is not None)
            self._calls[graph] = next((one for one in done if one is not None and one.emitted is not None), None)
        return self._calls[graph]

    def traced(self, graph: tf.Graph, attributes: Mapping[str, Any]) -> None:
        """Rewrites the function if it trains."""
        state, known = self._state, annotations_of(graph)
        state.traced.add(graph)
        if known.trains:
            state.give_default(graph)
            self._rewrite(graph, known, attributes)
            return
        meant = [item.name for item in known.items if item.name not in known.remembered]
        if meant and observer() is None:  # an evaluation, if another function trains, perhaps later
            state.only_annotated = state.only_annotated or (
                f"tf.function {graph.name!r} has annotations ({meant[0]!r}), but neither it nor any other function takes "
                "gradients of variables and updates them: it runs where its variables are, on one device, as do all functions "
                "that do not train")
        if observer() is None and is_called():
            self._divide_evaluation(graph)

    def _rewrite(self, graph: tf.Graph, known: Annotations, attributes: Mapping[str, Any]) -> None:
        state = self._state
        if state.snapshots is not None and state.snapshots.current is None and not state.is_asked:
            refusals.check_snapshots(state, f"tf.function {graph.name!r} trains outside of them", "save with tf.train.Checkpoint")
        layers.enter_variables(graph)
        plan = state.plan_of(graph)
        has_own_places = distribution.enter(
            graph, state.device_kinds, state.processes.count, (plan or state.config).zero != NONE)
        if state.asked_for is None and not known.items and observer() is None:
            functions.untag(graph)
            return
        if functions.makes_variables(graph):
            state.drafts.add(graph)
            return
        if state.runtime is not None:
            functions.place_anywhere(graph, state.processes)
        note_variables(graph)
        watching = observer()
        if watching is not None:
            watching.graph(graph)
            return
        self._note_plan(graph)
        may_span = state.runtime is not None and state.may_span(graph, plan)
        functions.check(graph.name, known, attributes, state.config, plan, state.processes)
        config = functions.settings(state.config, state.cluster, may_span)
        if functions.moves_variables(config, plan) or has_own_places:
            functions.separate_updates(graph, known)
        before = traced(graph) if state.verifies else None
        is_alone = state.processes.count == 1 and not has_own_places
        whole = undivided(graph, (plan or state.config).random == "local") if is_alone else None
        with garbage_collection_paused():
            try:
                done = parallelize(graph, state.cluster, config, plan, state.processes, state.keys, warn=state.say,
                                   keeps_decision=state.keeps_decisions)
            except OtherGraphError as error:
                raise PlanError(f"tf.function {graph.name!r}: {error}. If functions have different plans, or only some have one, "
                                "name them: wh.init(plan={'name of the function': plan})") from None
            except TooFewExamplesError as error:
                if whole is None or not self._has_divided(graph.name):
                    raise
                state.say(f"tf.function {graph.name!r} is not divided for this mini-batch, and runs on one device: {error}")
                functions.untag(graph)
                return
            if done is None and graph in state.jacobians:
                raise refusals.no_jacobian(graph)
            if done is None:
                raise PlanError(
                    f"tf.function {graph.name!r} takes gradients of variables, but does not update variables with them; update "
                    "the variables in the same function, so that whale_tf can divide the step. Gradients of each example (a tape "
                    "inside tf.vectorized_map) cannot be divided: take the tape.gradient of a loss of all examples, or call "
                    "wh.shutdown() before training on one device")
            if done.emitted is not None:
                self._finish(graph, done, before)
                if whole is not None and whole.takes(done.emitted.least):
                    self._small[graph] = SmallSteps(whole, done.emitted.least, graph, state.say)
        state.done[graph] = done
        state.latest = graph

    def _has_divided(self, name: str) -> bool:
        """Whether a function of that name has been divided for another mini-batch, perhaps before an interruption."""
        done = self._state.done.items()
        return self._state.snapshots is not None or any(one.emitted is not None and graph.name == name for graph, one in done)

    def _finish(self, graph: tf.Graph, done: Parallelized, before: Any) -> None:
        """Makes the rewritten function do what the local one did, and tells the other processes of it.

        Args:
            before: the function as it was traced, if its first step is compared with the local one.
        """
        state = self._state
        job, spans_processes = state.functions, done.plan.spans_processes
        assert done.emitted is not None
        if described() is None:
            functions.check_devices(graph.name, done.emitted.context)
        if spans_processes and state.shares_input:
            raise refusals.shares_input(graph)
        refusals.check_mini_batch(state, done)
        if job is not None:
            job.traced(graph)
        divided = done.variables.parts if done.variables is not None else ()
        keep: Optional[Callable] = None
        if before is not None and spans_processes and len(done.emitted.context.processes.steps) == 1:
            keep = functools.partial(state.function_proofs.add, graph, before, done)
        finished = functions.finish(graph, done.emitted, done.replaced, divided, state.variable_parts, state.keys, keep)
        if job is not None:
            staged = f"{done.plan.to_json()}\n{finished.staged}"
            job.rewritten(graph, staged, bool(done.emitted.context.owners.state), finished.seen, finished.inputs)
        if before is not None and not spans_processes:
            state.function_proofs.add(graph, before, done)
        elif before is not None and keep is None and state.processes.is_chief:
            say(f"verify: the first step of tf.function {graph.name!r} is not compared, because groups of processes make steps "
                "side by side; compare the plan in one process: whale verify script.py")

    def _divide_evaluation(self, graph: tf.Graph) -> None:
        """Divides a function that does not train over the devices of a model replica, if layouts divide its variables.  If that
        can not be, it runs on one device, as a warning says."""
        state = self._state
        if functions.makes_variables(graph):
            return
        try:
            if distribution.divided_variables(graph):
                evaluations.divide(graph, state, lambda done: self._finish(graph, done, None))
        except WhaleError as error:
            state.say(f"tf.function {graph.name!r} is not divided, and puts its variables together on one device: {error}")

    def _note_plan(self, graph: tf.Graph) -> None:
        """Warns if plans have names that no function has, because a function that trains may have been meant."""
        state = self._state
        state.met.add(graph.name)
        unmet = sorted(name for name in state.plans if name and name not in state.met)
        if unmet and graph.name not in state.plans:
            state.say(f"wh.init() was given plans for tf.functions {', '.join(map(repr, unmet))}; tf.function {graph.name!r} has "
                      "no plan and trains as its annotations and the configuration say")
