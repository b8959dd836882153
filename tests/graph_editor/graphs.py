"""Small graphs and a Session for the graph-editor tests."""
from __future__ import annotations

import contextlib

from whale_tf._tf_compat import tf, v1


def run(graph, fetches, feed=None):
    """Values of ``fetches`` in a fresh Session with two CPU devices, all variables initialised."""
    with graph.as_default(), v1.Session(graph=graph, config=v1.ConfigProto(device_count={"CPU": 2})) as session:
        initializers = [variable.initializer for variable in v1.global_variables()]
        if initializers:
            session.run(initializers)
        return session.run(fetches, feed)


def variable(name, value, resource):
    """A float32 variable of the reference or of the resource kind, whatever TensorFlow's default is."""
    return v1.get_variable(name, initializer=tf.constant(value), use_resource=resource)


def gradient_of(loss, source, name):
    return tf.identity(v1.gradients(loss, source)[0], name=name)


@contextlib.contextmanager
def control_flow(version):
    """Builds ``tf.while_loop`` and ``tf.cond`` of version 1 (Enter, Switch, ...) or 2 (While, If)."""
    was_v2 = v1.control_flow_v2_enabled()
    (v1.enable_control_flow_v2 if version == 2 else v1.disable_control_flow_v2)()
    try:
        yield
    finally:
        (v1.enable_control_flow_v2 if was_v2 else v1.disable_control_flow_v2)()
