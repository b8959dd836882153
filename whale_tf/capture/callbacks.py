"""What the hooks into TensorFlow call."""
from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import tf

Function = Callable[..., Any]


class Callbacks(NamedTuple):
    """What the hooks call.  ``original`` is always the unpatched TensorFlow function, bound to its session; a callback
    that takes it decides whether and how to call it.  The defaults change nothing.

    Attributes:
        gradients: (gradients, what they are with respect to) -> the gradients that the caller gets.
        outside_graph: (), before gradients of variables are taken in eager execution (or in a tf.function that cannot be
            rewritten): training that neither a Session nor a function runs.
        function_gradients: (graph), before gradients of variables are taken in the graph of a tf.function that is traced.
        jacobian: (graph), before a tape takes a Jacobian with respect to variables in the graph of a tf.function.
        forward_mode: (), before a ForwardAccumulator takes derivatives with respect to variables.
        function_called: (tf.function), before it is called for the first time since the hooks were installed.
        may_use_xla: (), whether Keras may compile a model with XLA if the script did not explicitly ask for it.
        arguments: (type of a tf.function's arguments) -> a more general one to trace it for, if possible.
        call: (concrete function, original, arguments, captured tensors), for every call of a tf.function, eagerly or in another
            function's graph; the original takes arguments and captured tensors.
        shuffle: (seed or None) -> the seed of ``Dataset.shuffle`` in eager execution.
        traced: (graph, attributes), when a tf.function has been traced; its graph can still be edited.
        made: (concrete function), when it has been made from that graph.
        before_call: (captured tensors), before a concrete function runs, or is called in another.
        before_finalize: (graph), before ``Graph.finalize`` makes it read-only; not called for function bodies.
        session_config: (target, graph or None, ConfigProto or None) -> the ConfigProto to use.
        session_target: (target, graph or None, that ConfigProto) -> the target to use.
        create_session: (session creator, original) -> a session, initialised or restored.
        run: (session, original, arguments of ``Session.run``) -> the fetched values; likewise the next two.
        make_callable: (session, original, arguments) -> a callable.
        session_close: (session, original), before and around ``Session.close``.
        partial_run_setup: (session, original, arguments) -> a handle.
        before_extend: (session), before the session takes over new ops of its graph; all ways to run lead here.
        save: (saver, original, arguments of ``Saver.save``) -> the checkpoint's path.
        add_event: (writer, original, event), for every event that goes to an event file.
        dataset: (dataset) -> the dataset from which to make an iterator.
        training_data: (Keras' adapter of the data that ``fit`` trains on) -> the adapter to use instead.
        training_batches: (dataset that Keras 2's ``fit`` trains on, mini-batches of an epoch or None) -> the dataset to use
            instead, and how many processes share it.
        fit: (Keras model, original, arguments of ``fit``) -> its history.
        epochs: (Keras' iterator over the epochs of the data that ``fit`` trains on), when it has been made.
        callback_list: (Keras' list of callbacks), when it has been made.
        backup: (Keras 3's BackupAndRestore, name of a method, original), for those that read, write or delete its files.
        run_config: (RunConfig, original, what TF_CONFIG says), when an Estimator's RunConfig takes its place in a job from that.
        estimator_train: (estimator, original, arguments of ``Estimator.train``) -> the estimator.
        estimator_graph: (estimator, graph, mode), before an Estimator calls the script's functions in a new graph.
        checkpoint_saved: (listener, original, global step), when ``train_and_evaluate`` evaluates.
        train_and_evaluate: (its executor, original) -> the last evaluation.
        variable_made: (variable), when one has been made in eager execution or in a tf.function.
        devices: (), the cluster's devices of all processes, such as ``CPU:0``.
        processes: (), the number of processes, and which of them this is.
        divides: (), whether training steps are divided.
        writes: (), whether this process writes checkpoints, summaries and logs of functions.
        write: (original, which writes files) -> what it returns in the process that writes; in the others None, once that has.
    """

    gradients: Callable[[Any, Any], Any] = lambda grads, xs: grads
    outside_graph: Callable[[], None] = lambda: None
    function_gradients: Callable[[tf.Graph], None] = lambda graph: None
    jacobian: Callable[[tf.Graph], None] = lambda graph: None
    forward_mode: Callable[[], None] = lambda: None
    function_called: Callable[[Any], None] = lambda function: None
    may_use_xla: Callable[[], bool] = lambda: True
    arguments: Callable[[Any], Any] = lambda function_type: function_type
    call: Callable[[Any, Callable[[Any, Any], Any], Any, Any], Any] = lambda function, original, given, captured: original(
        given, captured)
    shuffle: Callable[[Optional[int]], Optional[int]] = lambda seed: seed
    traced: Callable[[tf.Graph, Mapping[str, Any]], None] = lambda graph, attributes: None
    made: Callable[[Any], None] = lambda function: None
    before_call: Callable[[Any], None] = lambda captured: None
    before_finalize: Callable[[tf.Graph], None] = lambda graph: None
    session_config: Callable[[str, Optional[tf.Graph], Any], Any] = lambda target, graph, config: config
    session_target: Callable[[str, Optional[tf.Graph], Any], str] = lambda target, graph, config: target
    create_session: Function = lambda creator, original: original()
    run: Function = lambda session, original, *args, **kwargs: original(*args, **kwargs)
    session_close: Function = lambda session, original: original()
    make_callable: Function = lambda session, original, *args, **kwargs: original(*args, **kwargs)
    partial_run_setup: Function = lambda session, original, *args, **kwargs: original(*args, **kwargs)
    before_extend: Callable[[Any], None] = lambda session: None
    save: Function = lambda saver, original, *args, **kwargs: original(*args, **kwargs)
    add_event: Function = lambda writer, original, event: original(event)
    dataset: Callable[[Any], Any] = lambda dataset: dataset
    training_data: Callable[[Any], Any] = lambda adapter: adapter
    training_batches: Callable[[Any, Optional[int]], Tuple[Any, int]] = lambda dataset, number: (dataset, 1)
    fit: Function = lambda model, original, *args, **kwargs: original(*args, **kwargs)
    epochs: Callable[[Any], None] = lambda epochs: None
    callback_list: Callable[[Any], None] = lambda callbacks: None
    backup: Callable[[Any, str, Function], Any] = lambda callback, method, original: original()
    variable_made: Callable[[Any], None] = lambda variable: None
    run_config: Function = lambda run_config, original, tf_config: original(tf_config)
    estimator_train: Function = lambda estimator, original, *args, **kwargs: original(*args, **kwargs)
    estimator_graph: Callable[[Any, tf.Graph, str], None] = lambda estimator, graph, mode: None
    checkpoint_saved: Function = lambda listener, original, step: original(step)
    train_and_evaluate: Function = lambda executor, original: original()
    devices: Callable[[], Sequence[str]] = lambda: ()
    processes: Callable[[], Tuple[int, int]] = lambda: (1, 0)
    divides: Callable[[], bool] = lambda: False
    writes: Callable[[], bool] = lambda: True
    write: Callable[[Function], Any] = lambda original: original()


Place = Tuple[Any, str, Callable[[Function, Callbacks], Function]]  # owner, attribute, wrapper of what is hooked
