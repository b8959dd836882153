"""Refusals and warnings if more than local training was asked for and a training step cannot be divided."""

from __future__ import annotations

import warnings
from typing import Any

from whale_tf._tf_compat import function_tracing, tf
from whale_tf.capture.annotations import annotations_of
from whale_tf.capture.tapes import is_body
from whale_tf.errors import ConfigError, PlanError
from whale_tf.ir.traits import traits
from whale_tf.parallelize import Parallelized
from whale_tf.passes.communicate import takes_own
from whale_tf.planner.auto.settings import wants_search
from whale_tf.runtime.active import Active
from whale_tf.runtime.functions import trained_unseen


def check_gradients(state: Active, graph: tf.Graph) -> None:
    """Checks a graph with an optimizer's update whose gradients we did not see (a GradientTape in a graph, an imported
    MetaGraph).  It runs unchanged, or is refused if a plan, a search or annotations ask for more."""
    update = next((op for op in graph.get_operations() if traits(op.type).is_update), None)
    if update is None:
        return
    text = (f"op {update.name!r} updates a variable with gradients that whale_tf did not see. Compute them with tf.gradients or "
            "a tf.compat.v1.train optimizer, after wh.init(); a tf.GradientTape in a graph and training steps imported from a "
            "MetaGraph cannot be parallelized")
    if state.plan is not None or wants_search(state.config) or annotations_of(graph).items:
        raise PlanError(text)
    if state.asked_for is not None:
        warnings.warn(f"{text}: wh.init() was given {state.asked_for}, but this graph trains as it is, on one device")


def check_snapshots(state: Active, what: str, instead: str) -> None:
    """Raises:
        ConfigError: snapshots are asked for, and would not be taken.
    """
    if state.snapshots is not None:
        raise ConfigError(
            f"snapshot.path is {state.config.snapshot.path!r}, and snapshots are of Keras' fit, of MonitoredTrainingSessions "
            f"and of loops over wh.resume, but {what}; write: for epoch, batches in wh.resume(dataset, epochs=...): for batch in "
            f"batches: ...; or leave out snapshot.path, and {instead}")


def refuse_outside_graph(state: Active) -> None:
    """Refuses training outside Sessions and tf.functions, which is local, if more than that was asked for.

    Raises:
        PlanError
    """
    asked = state.asked_for
    if asked is None:
        return
    if function_tracing() is None:
        where = "TensorFlow trains eagerly or in a tf.function here, which whale_tf can divide from TensorFlow 2.4 on"
    else:
        where = ("TensorFlow trains eagerly here, op by op. Put the training step into a function: write @tf.function above it "
                 "(Keras: leave out run_eagerly=True)")
    raise PlanError(
        f"wh.init() was given {asked}, but {where}; or train in graph mode: tf.compat.v1.disable_eager_execution() first, then a "
        "tf.compat.v1.train optimizer and tf.compat.v1.Session; or call wh.shutdown() before training on one device")


def check_function_gradients(state: Active, graph: tf.Graph) -> None:
    """Checks a function that takes gradients of variables.

    Raises:
        PlanError: more than local training was asked for, and the gradients are taken in a part of the function that cannot be
            divided.
    """
    if is_body(graph) and state.asked_for is not None:
        if graph.outer_graph in state.jacobians:
            raise no_jacobian(graph.outer_graph)
        raise PlanError(
            f"gradients of variables are taken inside a loop or condition ({graph.name!r}) of a tf.function; put the training "
            "step into a function of its own: write @tf.function above it, and call it in the loop")


def no_jacobian(graph: tf.Graph) -> PlanError:
    return PlanError(
        f"tf.function {graph.name!r} trains with a tape.jacobian with respect to variables, which cannot be divided; take the "
        "tape.gradient of a loss, or call wh.shutdown() before training on one device")


def refuse_forward_mode(state: Active) -> None:
    """Raises:
        PlanError: more than local training was asked for.
    """
    asked = state.asked_for
    if asked is not None:
        raise PlanError(
            f"wh.init() was given {asked}, but a tf.autodiff.ForwardAccumulator differentiates with respect to variables, which "
            "cannot be divided; take gradients with a tf.GradientTape, or call wh.shutdown() before training on one device")


def check_called(state: Active, function: Any) -> None:
    """Checks a tf.function that is called for the first time since wh.init.

    Raises:
        PlanError: it was traced before, and trains.
    """
    asked = state.asked_for
    if asked is not None and trained_unseen(function, state.traced):
        raise PlanError(
            f"wh.init() was given {asked}, but the training tf.function {function._name!r} was called before wh.init() and would "
            "keep its trace from then: call wh.init() first, or create the function again (Keras: compile the model again)")


def shares_input(graph: tf.Graph) -> PlanError:
    """The error of a function whose model replicas span processes, which have already taken shares of a dataset."""
    return PlanError(
        f"model replicas of tf.function {graph.name!r} span processes, which then must read the same mini-batches, but each takes"
        " its own share of datasets: set io.slicing to false (wh.init(wh.Config({'io.slicing': False}))), or give each process "
        "as many devices as its TaskGraphs need (whale run --devices-per-worker)")


def check_mini_batch(state: Active, done: Parallelized) -> None:
    """Checks that a step has the same examples whatever the number of processes.

    Raises:
        ConfigError: the number changes, and each process reads what it likes, or each of as many model replicas as there are.
    """
    processes, plan = state.processes, done.plan
    if processes.most < 2 or processes.count < 2:
        return
    if plan.spans_processes and plan.num_model_replicas > 1 and takes_own(done.captured.step(done.region), plan):
        raise ConfigError(
            f"each of {plan.num_model_replicas} model replicas takes a mini-batch of its own, and the global mini-batch would "
            "change with their number (whale run --workers MIN:MAX); set io.nested_batch to 'divide', or give whale run a fixed "
            "number of --workers")
    if not plan.spans_processes and not state.config.io.slicing:
        raise ConfigError(
            f"io.slicing is false, so that each of {processes.count} processes reads a mini-batch of its own, and the global "
            "mini-batch would change with their number (whale run --workers MIN:MAX); set io.slicing to true, or give whale run "
            "a fixed number of --workers")


def may_use_xla(state: Active) -> bool:
    """Whether Keras may choose to compile training steps with XLA.  It may not if they are divided: XLA knows only one device."""
    asked = state.asked_for
    if asked is not None:
        state.say(f"wh.init() was given {asked}: Keras models with jit_compile='auto' are not compiled by XLA, which would put "
                    "the whole training step on one device")
    return asked is None
