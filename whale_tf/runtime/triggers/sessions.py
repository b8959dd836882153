"""Sessions: a graph is rewritten when it is finalized or first runs, once it has an update."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, ContextManager, Optional

from whale_tf._tf_compat import tf, v1
from whale_tf.capture import hooks
from whale_tf.capture.annotations import annotations_of, densified
from whale_tf.emit.early import Early
from whale_tf.errors import PlanError, UnknownShapeError
from whale_tf.garbage import garbage_collection_paused
from whale_tf.parallelize import Parallelized, parallelize
from whale_tf.processes.datasets import take_all
from whale_tf.processes.estimators import local_settings
from whale_tf.processes.runtime import Runtime
from whale_tf.processes.termination import step_value
from whale_tf.processes.watch import say
from whale_tf.runtime import refusals, sessions
from whale_tf.runtime.active import Active, observer, shown
from whale_tf.runtime.feeds import Waiting, elements, fed, named_errors, shape_of, trains
from whale_tf.runtime.sessions import Fetches
from whale_tf.runtime.verifying.local import own_graphs
from whale_tf.runtime.verifying.processes import Job
from whale_tf.runtime.verifying.sessions import Script, SessionProof, script_of
from whale_tf.transforms.loss_scale import DYNAMIC


class SessionTriggers:
    """See :class:`whale_tf.capture.callbacks.Callbacks`."""

    def __init__(self, state: Active) -> None:
        self._state = state

    # ------------------------------------------------------------------------------------------------------ rewriting
    def rewrite(self, graph: tf.Graph, may_wait: bool = True) -> None:
        """Rewrites ``graph`` once it has an update.  If the rank of an input is not known, waits until its first training run has
        begun.

        Raises:
            WhaleError: see :func:`whale_tf.parallelize.parallelize`.
        """
        state = self._state
        if self._is_left_alone(graph):
            return
        calls = annotations_of(graph).gradient_calls
        if graph in state.done:
            known = len(state.done[graph].captured.gradient_calls)
            if len(calls) > known:
                raise PlanError(
                    "gradients of {} were added to a graph that has already been rewritten: build every optimizer before the "
                    "first training step (or wh.parallelize()); ops added later cannot be parallelized".format(
                        ", ".join(calls[known].ys)))
            return
        if state.looked_at.get(graph) == graph.version and (may_wait or graph not in state.waiting):
            return
        state.waiting.pop(graph, None)
        if not calls:
            refusals.check_gradients(state, graph)
        watching = observer() if calls or state.plan is not None else None
        if watching is not None:
            watching.graph(graph)
        elif calls or state.plan is not None:
            self._rewrite(graph, bool(calls), may_wait)
        state.looked_at[graph] = graph.version

    def _rewrite(self, graph: tf.Graph, is_trained: bool, may_wait: bool) -> None:
        state = self._state
        if is_trained and state.plan is None and state.plans:
            raise PlanError(f"wh.init() was given plans for tf.functions ({', '.join(state.plans)}), but a Session's graph "
                            "trains; give a single plan: wh.init(plan=...)")
        if is_trained:
            state.give_default(graph)
        with sessions.unfinalized(graph), garbage_collection_paused():
            script = script_of(graph) if is_trained and state.verifies else None
            try:
                early = [known for session, known in state.early.items()
                         if session.graph is graph and not session._closed and state.runtime is None]
                done = parallelize(graph, state.cluster, state.config, state.plan, state.processes, state.keys, early, state.say,
                                   state.keeps_decisions)
            except UnknownShapeError as error:
                if not may_wait or state.processes.count > 1:
                    raise
                done, state.waiting[graph] = None, Waiting(graph, error.tensors)
            if done is not None:
                self._finish(graph, done, script)

    def _finish(self, graph: tf.Graph, done: Parallelized, script: Optional[Script]) -> None:
        """Args:
        script: the graph before, if its first step is compared with the local one.
        """
        state = self._state
        state.done[graph] = done
        state.latest = graph
        runtime = take_part(state, graph, done)
        if done.emitted is not None:
            state.fetches[graph] = Fetches(done.emitted, done.replaced, done.variables, runtime, done.plan.to_json())
            if script is not None:
                job = None if runtime is None else Job(runtime, done.plan.spans_processes)
                state.proofs[graph] = SessionProof(graph, script, done, state.fetches[graph], say, shown(), job)

    def rewrite_now(self, graph: tf.Graph, caller: str) -> None:
        """Rewrites ``graph`` although no training run has begun.

        Raises:
            UnknownShapeError: the rank of an input is not known.
        """
        try:
            self.rewrite(graph, may_wait=False)
        except UnknownShapeError as error:
            if self._state.processes.count > 1:
                raise
            raise UnknownShapeError(f"{error}; or leave out {caller}: planning then waits for the first training step in "
                                    "Session.run, which shows the rank", error.tensors) from None

    def _fetches(self, graph: tf.Graph) -> Optional[Fetches]:
        """What the rewritten graph's runs need; None: it is as the script made it."""
        self.rewrite(graph)
        return self._state.fetches.get(graph)

    def _is_left_alone(self, graph: tf.Graph) -> bool:
        return graph in own_graphs or graph in self._state.estimators.apart

    def gradients(self, grads: Any, xs: Any) -> Any:
        self._state.withdraw_in_graph_mode()
        return densified(grads, xs) if self._state.config.communication.sparse_as_dense else grads

    # ----------------------------------------------------------------------------------------------- making a Session
    def session_config(self, target: str, graph: Optional[tf.Graph], config: Optional[v1.ConfigProto]) -> v1.ConfigProto:
        state = self._state
        if graph in own_graphs:
            return config
        graph = graph or v1.get_default_graph()
        if state.runtime is None or graph in state.estimators.apart:
            return state.session_config(config)
        if not state.runtime.is_free:
            if annotations_of(graph).gradient_calls:
                state.give_default(graph)  # which may make replicas span processes
            if state.may_span(graph, state.plan):
                self.rewrite(graph)
        return state.runtime.session_config(state.session_config(config))

    def session_target(self, target: str, graph: Optional[tf.Graph], config: v1.ConfigProto) -> str:
        runtime = self._state.runtime
        if runtime is None or observer() is not None or self._is_left_alone(graph or v1.get_default_graph()):
            return target  # a script that is only looked at waits for no other process
        return runtime.target(target, config)

    def create_session(self, creator: Any, original: Callable) -> Any:
        state = self._state
        if state.runtime is not None and not isinstance(creator, v1.train.ChiefSessionCreator):
            # every process must initialise its own variables, whatever the script says
            return v1.train.ChiefSessionCreator(creator._scaffold, creator._master, creator._config).create_session()
        session = original()
        if state.snapshots is not None and session.graph not in state.estimators.apart:
            state.snapshots.session_made(session)
        fetches = None if state.runtime is None else self._fetches(session.graph)
        if fetches is not None:
            fetches.make_equal(session, hooks.original_run(session))
        return session

    def before_extend(self, session: Any) -> None:
        fetches = self._fetches(session.graph)
        if fetches is not None:
            if self._state.runtime is None:  # otherwise the session runs on this process's own server
                fetches.check_devices(session)
            fetches.prepare()

    # ----------------------------------------------------------------------------------------------------------- runs
    def run(self, session: Any, original: Callable, fetches: Any, feed_dict: Any = None, options: Any = None,
            run_metadata: Any = None) -> Any:
        state, graph = self._state, session.graph
        known, arguments = self._fetches(graph), (fetches, feed_dict, options, run_metadata)
        watching = observer()
        if watching is not None:
            return watching.run(graph, original, *arguments)
        with state.termination.between(session, fetches), self._followed(session, fetches):
            if graph in state.waiting:
                waiting, before = state.waiting[graph], state.early.setdefault(session, Early())
                is_made, result = waiting.learn(original, before.note, *arguments)
                if waiting.is_over:
                    state.looked_at.pop(graph)
                elif trains(elements(graph, fetches)[1]):
                    state.say(f"a training run of a graph does not need {waiting.unknown[0]!r}, an input of unknown rank. "
                              "Until one does, the graph is not divided and trains on one device; give the input its shape")
                if is_made:
                    return result
                if state.may_move(graph):
                    before.read(graph, original)
                known = self._fetches(graph)
            if known is None:
                self._early(session, fetches, feed_dict)
                return original(*arguments)
            self._catch_up(session, known, original)
            with named_errors():
                proof = self._proof(graph, fetches)
                if proof is not None:
                    return proof.run(session, original, *arguments)
                return self._watched(
                    known, session, fetches, feed_dict, options is None and run_metadata is None,
                    lambda own_options, own_metadata: sessions.run(
                        known, session, original, fetches, feed_dict, options or own_options, run_metadata or own_metadata))

    def _early(self, session: Any, fetches: Any, feed_dict: Any) -> None:
        """Before a run of a graph that has not been rewritten."""
        known = self._state.early.setdefault(session, Early())
        if self._state.runtime is None:
            wanted = elements(session.graph, fetches)[1]
            known.note([fetch if isinstance(fetch, tf.Operation) else fetch.op for fetch in wanted], feed_dict)

    def _catch_up(self, session: Any, known: Fetches, original: Callable) -> None:
        """Before the first run of a rewritten graph in a session that ran before the rewrite."""
        ran = self._state.early.pop(session, None)
        if ran is not None and self._state.done[session.graph].renews:
            ran.renew(session, original)
        elif ran is not None:
            known.catch_up(original)

    def _watched(self, known: Fetches, session: Any, fetches: Any, feed_dict: Any, is_free: bool,
                 run: Callable[[Any, Any], Any]) -> Any:
        """A run of a rewritten graph, which the doctor measures if it trains.

        Args:
            run: makes it with options and metadata.
            is_free: whether the script asks for neither.
        """
        doctor = self._state.doctor
        if doctor is None or doctor.is_over:
            return run(None, None)
        wanted = elements(session.graph, fetches)[1]
        asked = session.graph, tuple(one.name for one in wanted)
        if asked not in doctor.trains:
            doctor.trains[asked] = trains(known.substitutes(wanted, {}))
        if not doctor.trains[asked]:
            return run(None, None)
        shapes = ((tensor.name, shape_of(value)) for tensor, value in fed(session.graph, feed_dict).items())
        known_shapes = {name: shape for name, shape in shapes if shape is not None}
        return doctor.run(self._state.done[session.graph], known_shapes, run, is_free)

    def make_callable(self, session: Any, original: Callable, fetches: Any, feed_list: Any = None,
                      accept_options: bool = False) -> Callable:
        if feed_list:  # then TensorFlow's own makes runs of the session
            return original(fetches, feed_list, accept_options)
        graph, own_run = session.graph, hooks.original_run(session)

        def made(known: Optional[Fetches]) -> Callable:
            if known is None:
                return original(fetches, None, accept_options)
            self._catch_up(session, known, own_run)
            return sessions.make_callable(known, session, original, own_run, fetches, accept_options)

        known, is_noted = self._fetches(graph), False
        found = made(known)

        def call(**kwargs: Any) -> Any:
            nonlocal known, found, is_noted
            if known is None and (graph in self._state.waiting or observer() is not None):
                return session.run(fetches, **kwargs)
            if known is None and graph in self._state.fetches:  # rewritten since then
                known = self._state.fetches[graph]
                found = made(known)
            with self._state.termination.between(session, fetches), self._followed(session, fetches), named_errors():
                if known is None:
                    if not is_noted:
                        self._early(session, fetches, None)
                        is_noted = True
                    return found(**kwargs)
                proof = self._proof(graph, fetches)
                if proof is not None:
                    return proof.run(session, own_run, fetches, **kwargs)
                return self._watched(  # a callable that can be traced is slower, so that traced steps are runs
                    known, session, fetches, None, all(value is None for value in kwargs.values()),
                    lambda options, metadata: found(**kwargs) if options is None else sessions.run(
                        known, session, own_run, fetches, None, options, metadata))

        return call

    def partial_run_setup(self, session: Any, original: Callable, fetches: Any, feeds: Any = None) -> Any:
        graph = session.graph
        known = self._fetches(graph)
        if graph in self._state.waiting and trains(elements(graph, fetches)[1]):  # its feeds come one by one
            self.rewrite_now(graph, "partial_run")
        if known is not None:
            sessions.check_partial_run(known, session, fetches)
        return original(fetches, feeds)

    def _proof(self, graph: tf.Graph, fetches: Any) -> Optional[SessionProof]:
        """What compares this run with the local step, if it is the first that trains."""
        proof = self._state.proofs.get(graph)
        return proof if proof is not None and proof.is_open and proof.begins(elements(graph, fetches)[1]) else None

    def _followed(self, session: Any, fetches: Any) -> ContextManager:
        """Around a run: snapshots follow what it does."""
        state = self._state
        is_free = state.runtime is not None and state.runtime.is_free
        if state.snapshots is None or is_free or self._is_left_alone(session.graph):
            return contextlib.nullcontext()
        done = state.done.get(session.graph)
        if done is not None and done.plan.loss_scale == DYNAMIC:
            refusals.check_snapshots(state, "the loss scale of a Session's graph is dynamic and would not go on",
                                     "restart from a checkpoint, or use amp 'bfloat16'")
        return state.snapshots.around(session, fetches, lambda: refusals.check_snapshots(
            state, "a Session trains outside of them", "save with tf.compat.v1.train.Saver"))

    def session_close(self, session: Any, original: Callable) -> None:
        if self._state.snapshots is not None:
            self._state.snapshots.session_closes(session)
        original()

    # --------------------------------------------------------------------------------------------- files and Estimators
    def save(self, saver: Any, original: Callable, session: Any, save_path: str, global_step: Any = None, *args: Any,
             **kwargs: Any) -> Any:
        state = self._state
        save = functools.partial(state.termination.save, saver, original, session, save_path, global_step, *args, **kwargs)
        path = save() if state.runtime is None else state.runtime.write(save)
        if state.processes.is_chief:
            return path
        return save_path if global_step is None else f"{save_path}-{step_value(session, global_step)}"

    def add_event(self, writer: Any, original: Callable, event: Any) -> None:
        ends = getattr(writer, "_sentinel_event", None)  # 1.15: goes to its thread as an event; close() waits for that
        if self._state.processes.is_chief or event is ends:
            original(event)

    def run_config(self, given: Any, original: Callable, tf_config: Any) -> None:
        original(local_settings(tf_config, self._state.processes))

    def estimator_train(self, estimator: Any, original: Callable, *args: Any, **kwargs: Any) -> Any:
        train = functools.partial(self._state.estimators.train, estimator, original)
        return train(*args, **kwargs) if self._state.snapshots is None else self._state.snapshots.estimator(
            estimator, train, *args, **kwargs)


def take_part(state: Active, graph: tf.Graph, done: Parallelized) -> Optional[Runtime]:
    """This process, if there are several: they train in parallel, or each runs its part of a step."""
    refusals.check_mini_batch(state, done)
    if state.runtime is not None and done.plan.spans_processes:
        state.runtime.run_parts()
        if state.shares_input:
            take_all(graph, state.processes.most or 1)
    return state.runtime
