"""What TensorFlow's hooks call: it rewrites a graph, or proves its first step, at the right moment.

    sessions    graphs that Sessions run, and what is saved from them
    functions   tf.functions
    data        input pipelines, and Keras' fit
"""

from __future__ import annotations

from functools import partial

from whale_tf.capture.callbacks import Callbacks
from whale_tf.runtime import refusals
from whale_tf.runtime.active import Active
from whale_tf.runtime.triggers.data import DataTriggers
from whale_tf.runtime.triggers.functions import FunctionTriggers
from whale_tf.runtime.triggers.sessions import SessionTriggers


def callbacks(state: Active) -> Callbacks:
    """The functions that the hooks of capture/ call."""
    sessions, functions, data = SessionTriggers(state), FunctionTriggers(state), DataTriggers(state)
    return Callbacks(
        gradients=sessions.gradients,
        before_finalize=sessions.rewrite,
        before_extend=sessions.before_extend,
        session_config=sessions.session_config,
        session_target=sessions.session_target,
        create_session=sessions.create_session,
        run=sessions.run,
        make_callable=sessions.make_callable,
        partial_run_setup=sessions.partial_run_setup,
        session_close=sessions.session_close,
        save=sessions.save,
        add_event=sessions.add_event,
        writes=lambda: state.processes.is_chief,
        write=data.write,
        run_config=sessions.run_config,
        estimator_train=sessions.estimator_train,
        estimator_graph=state.estimators.begin,
        checkpoint_saved=state.estimators.checkpoint_saved,
        train_and_evaluate=state.estimators.train_and_evaluate,
        arguments=functions.arguments,
        traced=functions.traced,
        made=functions.made,
        before_call=state.variable_parts.before_call,
        call=functions.call,
        variable_made=functions.variable_made,
        dataset=data.dataset,
        shuffle=data.shuffle,
        training_data=data.training_data,
        training_batches=data.training_batches,
        fit=data.fit,
        epochs=data.epochs,
        callback_list=data.callback_list,
        backup=data.backup,
        outside_graph=partial(refusals.refuse_outside_graph, state),
        function_gradients=partial(refusals.check_function_gradients, state),
        function_called=partial(refusals.check_called, state),
        forward_mode=partial(refusals.refuse_forward_mode, state),
        may_use_xla=partial(refusals.may_use_xla, state),
        jacobian=state.jacobians.add,
        devices=lambda: state.device_kinds,
        processes=lambda: (state.processes.count, state.processes.rank),
        divides=lambda: state.asked_for is not None)
