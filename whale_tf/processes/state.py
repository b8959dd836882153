"""An optimizer's state for variables of another process (ZeRO): in this process it takes memory only while it is needed.

::

    training step      here: nothing                  owner: Adam's m and v of the variable
    Saver.save, a fetch, an initializer, restore
                       here: the owner's values  <──  read over the network
    training step      here: nothing

To copy it, a separate Session runs a separate graph that names the same variables.  A step of this process ends when the owner
has updated its state, and the owner's next update needs this process, so the values are those of the last step.
"""

from __future__ import annotations

from typing import Callable, Collection, Sequence, Set

from whale_tf._tf_compat import tf
from whale_tf.emit.owners import Kept
from whale_tf.processes.runtime import Runtime


class StateElsewhere:
    """Args:
    graph: the script's, which has the variables.
    kept: variables that other processes keep.
    runtime: this process.
    """

    def __init__(self, graph: tf.Graph, kept: Sequence[Kept], runtime: Runtime) -> None:
        self._runtime = runtime
        self._kept = {one.name: one for one in kept}
        self._definitions = {one.name: graph.get_operation_by_name(one.name).node_def for one in kept}
        self._gone: Set[str] = set()
        runtime.stay_for_others()

    def bring(self, names: Collection[str] = ()) -> None:
        """Gives variables that have no value here their owners' values; by default all."""
        wanted = sorted(self._gone.intersection(names) if names else self._gone)
        if wanted:
            self._runtime.run_beside([self._kept[name].home for name in wanted], lambda: [
                self._assign(name, lambda dtype: self._read(name, dtype)) for name in wanted])
            self._gone.difference_update(wanted)

    def drop(self) -> None:
        """Frees the memory of all these variables here."""
        wanted = sorted(set(self._kept).difference(self._gone))
        if wanted:
            self._runtime.run_beside([], lambda: [self._assign(name, lambda dtype: tf.zeros([0], dtype)) for name in wanted])
            self._gone.update(wanted)

    def _read(self, name: str, dtype: tf.DType) -> tf.Tensor:
        with tf.device(self._kept[name].home):
            variable = self._variable(name)
            if variable.dtype == tf.resource:
                return tf.raw_ops.ReadVariableOp(resource=variable, dtype=dtype)
            return tf.identity(variable)

    def _assign(self, name: str, value: Callable[[tf.DType], tf.Tensor]) -> tf.Operation:
        dtype = tf.as_dtype(self._definitions[name].attr["dtype"].type)
        found = value(dtype)
        with tf.device(self._kept[name].device):
            variable = self._variable(name)
            if variable.dtype == tf.resource:
                return tf.raw_ops.AssignVariableOp(resource=variable, value=found)
            return tf.raw_ops.Assign(ref=variable, value=found, validate_shape=False).op

    def _variable(self, name: str) -> tf.Tensor:
        """The variable of this name on the current device, with any shape."""
        node = self._definitions[name]
        common = dict(shape=tf.TensorShape(None), dtype=tf.as_dtype(node.attr["dtype"].type),
                      container=node.attr["container"].s.decode(), shared_name=node.attr["shared_name"].s.decode() or name)
        if node.op == "VarHandleOp":
            return tf.raw_ops.VarHandleOp(**common)
        return tf.raw_ops.VariableV2(**common)
