"""Triggers the rewrite of a graph: the functions that TensorFlow's hooks call, and what follows from them."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Callable, ContextManager, Mapping, Optional, Tuple

from whale_tf._tf_compat import global_seed, relaxed_type, tf, v1
from whale_tf.capture import distribution, hooks, layers
from whale_tf.capture.annotations import annotations_of, densified, set_default_strategy
from whale_tf.capture.callbacks import Callbacks
from whale_tf.capture.fitting import is_called
from whale_tf.capture.handles import note_variables
from whale_tf.cluster import ONE_PROCESS, devices_of_processes
from whale_tf.emit.early import Early
from whale_tf.errors import OtherGraphError, PlanError, UnknownShapeError, WhaleError
from whale_tf.garbage import garbage_collection_paused
from whale_tf.parallelize import Parallelized, parallelize
from whale_tf.passes.form import INLINE
from whale_tf.plan import Plan
from whale_tf.planner.assemble import TaskGraphSpec, spans
from whale_tf.planner.auto.settings import wants_search
from whale_tf.planner.homes import NONE
from whale_tf.processes.datasets import Adapter, share, take_all, whole_rounds
from whale_tf.processes.estimators import local_settings
from whale_tf.processes.runtime import Runtime
from whale_tf.processes.termination import step_value
from whale_tf.processes.watch import say
from whale_tf.runtime import functions, refusals
from whale_tf.runtime import sessions as whale_session
from whale_tf.runtime.active import Active, observer, shown
from whale_tf.runtime.feeds import Waiting, elements, named_errors, trains
from whale_tf.runtime.verifying.functions import FunctionProofs, traced
from whale_tf.runtime.verifying.local import own_graphs
from whale_tf.runtime.verifying.processes import Job
from whale_tf.runtime.verifying.sessions import SessionProof, script_of
from whale_tf.transforms.loss_scale import DYNAMIC


def rewrite(state: Active, graph: tf.Graph, may_wait: bool = True) -> None:
    """Rewrites ``graph`` once it has an update.  If the rank of an input is not known, waits until its first training run has
    begun.

    Raises:
        WhaleError: see :func:`whale_tf.parallelize.parallelize`.
    """
    if graph in own_graphs or graph in state.estimators.apart:
        return
    calls = annotations_of(graph).gradient_calls
    if graph in state.done:
        known = len(state.done[graph].captured.gradient_calls)
        if len(calls) > known:
            raise PlanError(
                "gradients of {} were added to a graph that has already been rewritten: build every optimizer before the first "
                "training step (or wh.parallelize()); ops added later cannot be parallelized".format(", ".join(calls[known].ys))
            )
        return
    if state.looked_at.get(graph) == graph.version and (may_wait or graph not in state.waiting):
        return
    state.waiting.pop(graph, None)
    if not calls:
        refusals.check_gradients(state, graph)
        if state.plan is None:
            state.looked_at[graph] = graph.version
            return
    watching = observer()
    if watching is not None:
        watching.graph(graph)
        state.looked_at[graph] = graph.version
        return
    if calls and state.plan is None and state.plans:
        raise PlanError(f"wh.init() was given plans for tf.functions ({', '.join(state.plans)}), but a Session's graph trains; "
                        "give a single plan: wh.init(plan=...)")
    if calls:
        give_default(state, graph)
    with whale_session.unfinalized(graph), garbage_collection_paused():
        keys = state.runtime.keys if state.runtime is not None else None
        script = script_of(graph) if calls and state.verifies else None
        try:
            has_run = bool(annotations_of(graph).shapes)  # the graph was extended into a Session before its first training step
            early = [known for session, known in state.early.items() if session.graph is graph] if has_run else None
            done = parallelize(graph, state.cluster, state.config, state.plan, state.processes, keys, early, state.say)
        except UnknownShapeError as error:
            if not may_wait or state.processes.count > 1:
                raise
            done, state.waiting[graph] = None, Waiting(graph, error.tensors)
        if done is not None:
            state.done[graph] = done
            state.latest = weakref.ref(graph)
            runtime = take_part(state, graph, done)
            if done.emitted is not None:
                state.fetches[graph] = whale_session.Fetches(
                    done.emitted, done.replaced, done.variables, runtime, done.plan.to_json())
                if script is not None:
                    job = None if runtime is None else Job(runtime, done.plan.spans_processes)
                    state.proofs[graph] = SessionProof(graph, script, done, state.fetches[graph], say, shown(), job)
    state.looked_at[graph] = graph.version


def rewrite_now(state: Active, graph: tf.Graph, caller: str) -> None:
    """Rewrites ``graph`` although no training run has begun.

    Raises:
        UnknownShapeError: the rank of an input is not known.
    """
    try:
        rewrite(state, graph, may_wait=False)
    except UnknownShapeError as error:
        if state.processes.count > 1:
            raise
        raise UnknownShapeError(f"{error}; or leave out {caller}: planning then waits for the first training step in "
                                "Session.run, which shows the rank", error.tensors) from None


def rewrite_function(state: Active, graph: tf.Graph, attributes: Mapping[str, Any]) -> None:
    """Rewrites a tf.function that trains, right after it was traced."""
    state.traced.add(graph)
    known = annotations_of(graph)
    if known.trains:
        give_default(state, graph)
    meant = [item.name for item in known.items if not known.trains and item.name not in known.remembered]
    if meant and observer() is None:  # an evaluation, if another function trains, perhaps later
        state.only_annotated = state.only_annotated or (
            f"tf.function {graph.name!r} has annotations ({meant[0]!r}), but neither it nor any other function takes "
            "gradients of variables and updates them: it runs where its variables are, on one device, as do all functions "
            "that do not train")
    if not known.trains:
        if state.processes.count == 1 and observer() is None and is_called():
            divide_evaluation(state, graph)
        return
    if state.snapshots is not None and state.snapshots.current is None and not state.is_asked:
        refusals.check_snapshots(state, f"tf.function {graph.name!r} trains outside of them",
                                 "save with tf.train.Checkpoint")
    layers.enter_variables(graph)
    zero = (state.plan_of(graph) or state.config).zero
    has_own_places = distribution.enter(graph, state.device_kinds, state.processes.count, zero != NONE)
    if state.asked_for is None and not known.items and observer() is None:
        functions.untag(graph)
        return
    if functions.makes_variables(graph):
        state.drafts.add(graph)
        return
    note_variables(graph)
    watching = observer()
    if watching is not None:
        watching.graph(graph)
        return
    plan = state.plan_of(graph)
    note_plan(state, graph)
    may_span = state.runtime is not None and _may_span(state, graph, plan)
    functions.check(graph.name, known, attributes, state.config, plan, state.processes, may_span)
    config = functions.settings(state.config, state.cluster, state.processes, may_span)
    if functions.moves_variables(config, plan) or has_own_places:
        functions.separate_updates(graph, known)
    before = traced(graph) if state.verifies else None
    with garbage_collection_paused():
        keys = state.runtime.keys if state.runtime is not None else None
        try:
            done = parallelize(graph, state.cluster, config, plan, state.processes, keys, warn=state.say)
        except OtherGraphError as error:
            raise PlanError(f"tf.function {graph.name!r}: {error}. If functions have different plans, or only some have one, "
                            "name them: wh.init(plan={'name of the function': plan})") from None
        if done is None and graph in state.jacobians:
            raise refusals.no_jacobian(graph)
        if done is None:
            raise PlanError(
                f"tf.function {graph.name!r} takes gradients of variables, but does not update variables with them; update the "
                "variables in the same function, so that whale_tf can divide the step")
        if done.emitted is not None:
            functions.check_devices(graph.name, done.emitted.context)
            divided = done.variables.parts if done.variables is not None else ()
            job, spans_processes = state.functions, done.plan.spans_processes
            if spans_processes and state.shares_input:
                raise refusals.shares_input(graph)
            if job is not None:
                job.traced(graph)
            finished = functions.finish(graph, done.emitted, done.replaced, divided, state.variable_parts, keys)
            if job is not None:
                staged = f"{done.plan.to_json()}\n{finished.staged}"
                job.rewritten(graph, staged, bool(done.emitted.context.owners.state), finished.seen, finished.inputs)
            if before is not None and not spans_processes:
                state.function_proofs.add(graph, before, done)
            elif before is not None and state.processes.is_chief:
                say(f"verify: the first step of tf.function {graph.name!r} is not compared, because its model replicas span "
                    "processes; compare the plan in one process: whale verify script.py")
    state.done[graph] = done
    state.latest = weakref.ref(graph)


def divide_evaluation(state: Active, graph: tf.Graph) -> None:
    """Divides a function that does not train over the devices of a model replica, if layouts divide its variables.  If that can
    not be, it runs on one device, as a warning says."""
    if functions.makes_variables(graph):
        return
    try:
        if not distribution.divides(graph):
            return
        distribution.enter(graph, state.device_kinds, state.processes.count, state.config.zero != NONE, alone=True)
        distribution.evaluate(graph)
        config = functions.settings(state.config, state.cluster, state.processes, False).changed(
            zero=NONE, offload=NONE, recompute=NONE, pipeline__num_micro_batch=1, amp__dtype=NONE)
        done = parallelize(graph, state.cluster, config, None, state.processes, None, warn=lambda *_: None)
    except WhaleError as error:
        state.say(f"tf.function {graph.name!r} is not divided, and puts its variables together on one device: {error}")
        return
    if done is not None and done.emitted is not None:
        functions.check_devices(graph.name, done.emitted.context)
        functions.finish(graph, done.emitted, done.replaced, done.variables.parts if done.variables is not None else (),
                         state.variable_parts, None)


def note_plan(state: Active, graph: tf.Graph) -> None:
    """Warns if plans have names that no function has, because a function that trains may have been meant."""
    state.met.add(graph.name)
    unmet = sorted(name for name in state.plans if name and name not in state.met)
    if unmet and graph.name not in state.plans:
        state.say(f"wh.init() was given plans for tf.functions {', '.join(map(repr, unmet))}; tf.function {graph.name!r} has no "
                    "plan and trains as its annotations and the configuration say")


def function_made(state: Active, function: Any) -> None:
    """Called when TensorFlow has made a concrete function."""
    if function.graph in state.drafts:
        functions.refuse_to_run(function)
    state.variable_parts.watch(function)
    if state.snapshots is not None and function.graph not in state.drafts:
        state.snapshots.traced(function.graph)


def give_default(state: Active, graph: tf.Graph) -> None:
    """Gives a training graph the default strategy that was set in eager execution, unless it has its own."""
    default = state.default
    if default is not None and annotations_of(graph).default is None:
        set_default_strategy(graph, default.kind, default.device_count, default.name)


def take_part(state: Active, graph: tf.Graph, done: Parallelized) -> Optional[Runtime]:
    """This process, if there are several: they train in parallel, or each runs its part of a step."""
    if state.runtime is not None and done.plan.spans_processes:
        state.runtime.run_parts()
        if state.shares_input:
            take_all(graph)
    return state.runtime


def withdraw_in_graph_mode(state: Active) -> None:
    """Withdraws the server in graph mode.  A script that builds graphs trains in Sessions, which start the server; eager
    execution would start it just because a function is registered with it."""
    if state.runtime is not None and not tf.executing_eagerly() and not v1.get_default_graph().building_function:
        state.runtime.withdraw()


def _may_move(state: Active, graph: tf.Graph) -> bool:
    """Whether a plan may divide variables, or put them elsewhere."""
    config = state.config
    return (state.plan is not None or wants_search(config) or (config.zero, config.offload) != (NONE, NONE)
            or any(item.strategy == "split" for item in annotations_of(graph).items))


def _may_span(state: Active, graph: tf.Graph, plan: Optional[Plan]) -> bool:
    """Whether a model replica has devices in several processes, as far as the plan or the annotations tell."""
    if plan is not None:
        return plan.spans_processes
    items = annotations_of(graph).items
    if not items and wants_search(state.config):
        return True
    specs = [TaskGraphSpec(item.name, item.strategy, item.device_count, one_step=item.one_step) for item in items]
    return spans(specs, devices_of_processes(state.cluster, state.processes), state.config)


def _session_config(state: Active, config: Optional[v1.ConfigProto]) -> v1.ConfigProto:
    """The ConfigProto of a Session of this process."""
    kinds = [device.kind for device in state.own_devices]
    emit = state.config.emit if state.plan is None else state.plan.emit
    return whale_session.with_devices(config, state.num_cpus, "GPU" in kinds, emit != INLINE)


def callbacks(state: Active) -> Callbacks:
    """The functions that the hooks of capture/ call."""
    state.function_proofs = FunctionProofs(state.variable_parts, lambda: _session_config(state, None), say, shown(),
                                           state.runtime, state.functions)

    def fetch_map(graph: tf.Graph) -> Optional[whale_session.Fetches]:
        rewrite(state, graph)
        return state.fetches.get(graph)

    def planned(graph: tf.Graph, wanted: Any, caller: str) -> Optional[whale_session.Fetches]:
        """Refuses by name a graph that waits for shapes, for functions that prepare training runs without feeds."""
        fetches = fetch_map(graph)
        if graph in state.waiting and trains(elements(graph, wanted)[1]):
            rewrite_now(state, graph, caller)
        return fetches

    def gradients(grads: Any, xs: Any) -> Any:
        withdraw_in_graph_mode(state)
        return densified(grads, xs) if state.config.communication.sparse_as_dense else grads

    def session_config(target: str, graph: Optional[tf.Graph], config: Optional[v1.ConfigProto]) -> v1.ConfigProto:
        if graph in own_graphs:
            return config
        graph = graph or v1.get_default_graph()
        if state.runtime is None or graph in state.estimators.apart:
            return _session_config(state, config)
        if not state.runtime.is_free and _may_span(state, graph, state.plan):
            rewrite(state, graph)
        return state.runtime.session_config(_session_config(state, config))

    def session_target(target: str, graph: Optional[tf.Graph], config: v1.ConfigProto) -> str:
        graph = graph or v1.get_default_graph()
        if state.runtime is None or graph in own_graphs or graph in state.estimators.apart:
            return target
        return state.runtime.target(target, config)

    def create_session(creator: Any, original: Callable) -> Any:
        def made() -> Any:
            session = original()
            if state.snapshots is not None and session.graph not in state.estimators.apart:
                state.snapshots.session_made(session)
            return session

        if state.runtime is None:
            return made()
        is_chief = isinstance(creator, v1.train.ChiefSessionCreator)
        if not is_chief:  # every process must initialise its own variables, whatever the script says
            creator = v1.train.ChiefSessionCreator(creator._scaffold, creator._master, creator._config)
            return creator.create_session()
        session = made()
        fetches = fetch_map(session.graph)
        if fetches is not None:
            fetches.make_equal(session, hooks.original_run(session))
        return session

    def save(saver: Any, original: Callable, session: Any, save_path: str, global_step: Any = None, *args: Any,
             **kwargs: Any) -> Any:
        if state.processes.is_chief:
            return state.termination.save(saver, original, session, save_path, global_step, *args, **kwargs)
        return save_path if global_step is None else f"{save_path}-{step_value(session, global_step)}"

    def add_event(writer: Any, original: Callable, event: Any) -> None:
        if state.processes.is_chief:
            original(event)

    def run_config(given: Any, original: Callable, tf_config: Any) -> None:
        original(local_settings(tf_config, state.processes))

    def dataset(given: Any) -> Any:
        if not state.may_share_input or v1.get_default_graph() in state.estimators.apart:
            return given
        state.shares_input = True
        return share(given, state.processes, state.sharing, state.config.io.slicing == "file")

    def training_data(adapter: Any) -> Any:
        if state.runtime is None:
            if state.snapshots is None or global_seed() is not None or not getattr(adapter, "_shuffle", False):
                return adapter
            return Adapter(adapter, ONE_PROCESS, lambda given: given, False)  # the same order in a run that goes on
        processes = state.processes if state.may_share_input else ONE_PROCESS
        return Adapter(adapter, processes, dataset, global_seed() is not None)

    def fit(model: Any, original: Callable, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if state.snapshots is None else state.snapshots.fit(model, original, *args, **kwargs)

    def epochs(given: Any) -> None:
        if state.snapshots is not None and state.snapshots.fitting is not None:
            state.snapshots.fitting.take_data(given)

    def callback_list(given: Any) -> None:
        if state.snapshots is not None and state.snapshots.fitting is not None:
            state.snapshots.fitting.take_callbacks(given)

    def variable_made(variable: Any) -> None:
        if state.snapshots is not None:
            state.snapshots.made(variable)

    def training_batches(given: Any, number: Optional[int]) -> Tuple[Any, int]:
        if not state.may_share_input:
            return given, 1
        return dataset(whole_rounds(given, number, state.processes)), state.processes.count

    def shuffle(seed: Optional[int]) -> Optional[int]:
        if seed is None and (state.runtime is not None or state.snapshots is not None) and global_seed() is None:
            # the same in all processes, whose shares must not overlap (or have none), and in a run that goes on
            seed = 1 + next(state.shuffles)
        return seed

    def followed(session: Any, fetches: Any) -> ContextManager:
        """Around a run: snapshots follow what it does."""
        is_own = session.graph in own_graphs or (state.runtime is not None and state.runtime.is_free)
        if state.snapshots is None or is_own or session.graph in state.estimators.apart:
            return contextlib.nullcontext()
        done = state.done.get(session.graph)
        if done is not None and done.plan.loss_scale == DYNAMIC:
            refusals.check_snapshots(state, "the loss scale of a Session's graph is dynamic and would not go on",
                                     "restart from a checkpoint, or use amp 'bfloat16'")
        return state.snapshots.around(session, fetches, lambda: refusals.check_snapshots(
            state, "a Session trains outside of them", "save with tf.compat.v1.train.Saver"))

    def session_close(session: Any, original: Callable) -> None:
        if state.snapshots is not None:
            state.snapshots.session_closes(session)
        original()

    def estimator_train(estimator: Any, original: Callable, *args: Any, **kwargs: Any) -> Any:
        refusals.check_snapshots(state, "an Estimator makes Sessions of its own, and skips what its checkpoints have",
                                 "restart the script: it goes on from its last checkpoint")
        return state.estimators.train(estimator, original, *args, **kwargs)

    def run(session: Any, original: Callable, fetches: Any, feed_dict: Any = None, options: Any = None,
            run_metadata: Any = None) -> Any:
        known, arguments = fetch_map(session.graph), (fetches, feed_dict, options, run_metadata)
        watching = observer()
        if watching is not None:
            return watching.run(session.graph, original, *arguments)
        with state.termination.between(session, fetches), followed(session, fetches):
            if session.graph in state.waiting:
                waiting, before = state.waiting[session.graph], state.early.setdefault(session, Early())
                is_made, result = waiting.learn(original, before.note, *arguments)
                if waiting.is_over:
                    state.looked_at.pop(session.graph)
                if is_made:
                    return result
                if _may_move(state, session.graph):
                    before.read(session.graph, original)
                known = fetch_map(session.graph)
            if known is None:
                state.early.setdefault(session, Early())
                return original(*arguments)
            ran = state.early.pop(session, None)
            if ran is not None and state.done[session.graph].renews:
                ran.renew(session, original)
            elif ran is not None:
                known.catch_up(original)
            proof = state.proofs.get(session.graph)
            with named_errors():
                if proof is not None and proof.is_open and proof.begins(elements(session.graph, fetches)[1]):
                    return proof.run(session, original, *arguments)
                return whale_session.run(known, session, original, *arguments)

    def call(function: Any, original: Callable[[Any, Any], Any], given: Any, captured: Any) -> Any:
        def run(given: Any, captured: Any) -> Any:
            job = state.functions
            return original(given, captured) if job is None else job.call(function, lambda: original(given, captured))

        with named_errors():
            return state.function_proofs.call(function, run, given, captured) if state.verifies else run(given, captured)

    def make_callable(session: Any, original: Callable, fetches: Any, feed_list: Any = None,
                      accept_options: bool = False) -> Callable:
        known = planned(session.graph, fetches, "make_callable")
        arguments = (fetches, feed_list, accept_options)
        found = original(*arguments) if known is None else whale_session.make_callable(
            known, session, original, hooks.original_run(session), *arguments)

        def call(*args: Any, **kwargs: Any) -> Any:
            proof = state.proofs.get(session.graph)
            with state.termination.between(session, fetches), followed(session, fetches), named_errors():
                if proof is not None and proof.is_open and proof.begins(elements(session.graph, fetches)[1]):
                    fed_values = dict(zip(feed_list or (), args))
                    return proof.run(session, hooks.original_run(session), fetches, fed_values, **kwargs)
                return found(*args, **kwargs)

        return call

    def partial_run_setup(session: Any, original: Callable, fetches: Any, feeds: Any = None) -> Any:
        known = planned(session.graph, fetches, "partial_run")
        if known is not None:
            whale_session.check_partial_run(known, session, fetches)
        return original(fetches, feeds)

    def before_extend(session: Any) -> None:
        fetches = fetch_map(session.graph)
        if fetches is not None:
            if state.runtime is None:  # otherwise the session runs on this process's own server
                fetches.check_devices(session)
            fetches.prepare()

    return Callbacks(
        gradients=gradients,
        outside_graph=lambda: refusals.refuse_outside_graph(state),
        function_gradients=lambda graph: refusals.check_function_gradients(state, graph),
        jacobian=state.jacobians.add,
        forward_mode=lambda: refusals.refuse_forward_mode(state),
        function_called=lambda function: refusals.check_called(state, function),
        may_use_xla=lambda: refusals.may_use_xla(state),
        arguments=lambda function_type: relaxed_type(function_type) if state.functions is not None else function_type,
        call=call,
        shuffle=shuffle,
        training_data=training_data,
        training_batches=training_batches,
        fit=fit,
        epochs=epochs,
        callback_list=callback_list,
        variable_made=variable_made,
        devices=lambda: state.device_kinds,
        processes=lambda: (state.processes.count, state.processes.rank),
        divides=lambda: state.asked_for is not None,
        writes=lambda: state.processes.is_chief,
        traced=lambda graph, attributes: rewrite_function(state, graph, attributes),
        made=lambda function: function_made(state, function),
        before_call=state.variable_parts.before_call,
        before_finalize=lambda graph: rewrite(state, graph),
        session_config=session_config,
        session_target=session_target,
        create_session=create_session,
        save=save,
        add_event=add_event,
        dataset=dataset,
        run_config=run_config,
        estimator_train=estimator_train,
        estimator_graph=state.estimators.begin,
        checkpoint_saved=state.estimators.checkpoint_saved,
        train_and_evaluate=state.estimators.train_and_evaluate,
        run=run,
        session_close=session_close,
        make_callable=make_callable,
        partial_run_setup=partial_run_setup,
        before_extend=before_extend)
