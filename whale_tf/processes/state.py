"""An optimizer's state for variables of another process (ZeRO): in this process it takes memory only while it is needed.

::

    training step      here: nothing                  owner: Adam's m and v of the variable
    Saver.save, a fetch, an initializer, restore
                       here: the owner's values  <──  read over the network
    training step      here: nothing

To copy it, a separate Session runs a separate graph that names the same variables.  A step of this process ends when the owner
has updated its state, and the owner's next update needs this process, so the values are those of the last step.  If the owner
writes a variable between two steps, it first preserves the value of the last step, because another process may be behind and
read it; so each process sees its own writes and no other's, as if it had the whole state.
"""

from __future__ import annotations

from typing import Collection, Dict, Sequence, Set

from whale_tf._tf_compat import tf
from whale_tf.emit.own_part import HOST
from whale_tf.emit.owners import Kept
from whale_tf.processes.runtime import Runtime

PRESERVED = "preserved"  # beside a variable: its value before the owner wrote it between two steps
AFTER_STEP = "after_step"  # the number of steps before that


class StateElsewhere:
    """Args:
    graph: the script's, which has the variables.
    kept: variables that one process keeps, this one or another.
    runtime: this process.
    """

    def __init__(self, graph: tf.Graph, kept: Sequence[Kept], runtime: Runtime) -> None:
        self._runtime = runtime
        self._kept = {one.name: one for one in kept if not one.is_own}
        self._own = {one.name: one for one in kept if one.is_own}
        self._definitions = {one.name: graph.get_operation_by_name(one.name).node_def for one in kept}
        self._gone: Set[str] = set()
        self._steps = 0  # that have begun
        self._preserved: Dict[str, int] = {}  # after which step
        runtime.stay_for_others()

    def bring(self, names: Collection[str] = ()) -> None:
        """Gives variables that have no value here their owners' values; by default all."""
        wanted = sorted(self._gone.intersection(names) if names else self._gone)
        if wanted:
            homes = [self._kept[name].home for name in wanted]
            steps = self._runtime.run_beside(homes, lambda: list(map(self._take, wanted)))
            written = [self._kept[name] for name, step in zip(wanted, steps) if step == self._steps]
            if written:
                self._runtime.run_beside(homes, lambda: [
                    self._assign(one, self._get(one, PRESERVED, self._dtype(one.name))) for one in written])
            self._gone.difference_update(wanted)

    def drop(self) -> None:
        """A step begins: frees the memory of all variables here that other processes keep."""
        wanted = sorted(set(self._kept).difference(self._gone))
        if wanted:
            self._runtime.run_beside([], lambda: [
                self._assign(self._kept[name], tf.zeros([0], self._dtype(name))) for name in wanted])
            self._gone.update(wanted)
        if self._own and not self._steps:
            self._runtime.run_beside([], lambda: list(map(self._mark, self._own.values())))
        self._steps += 1

    def preserve(self, names: Collection[str]) -> None:
        """Call before variables of this process are written between two steps: keeps their values of the last step."""
        wanted = sorted(name for name in names if self._preserved.get(name, 0) != self._steps)
        if wanted:
            self._runtime.run_beside([], lambda: [self._copy(self._own[name]) for name in wanted])
            self._preserved.update(dict.fromkeys(wanted, self._steps))

    def forget(self) -> None:
        """A step is done, in which all processes took part: frees what :meth:`preserve` has kept."""
        if self._preserved:
            names = sorted(self._preserved)
            self._runtime.run_beside([], lambda: [
                self._set(self._own[name], PRESERVED, tf.zeros([0], self._dtype(name))) for name in names])
            self._preserved.clear()

    def _take(self, name: str) -> tf.Tensor:
        """Copies the owner's value of this moment, and returns after which step the owner has preserved one."""
        one = self._kept[name]
        with tf.control_dependencies([self._assign(one, self._read(one))]):  # the owner preserves before it writes
            return self._get(one, AFTER_STEP, tf.int64)

    def _copy(self, one: Kept) -> tf.Operation:
        value = self._read(one)
        with tf.device(_host_of(one)):
            value = tf.raw_ops.DeepCopy(x=value)  # writes of variables that are references change the value itself
        with tf.control_dependencies([self._set(one, PRESERVED, value)]):
            return self._mark(one)

    def _mark(self, one: Kept) -> tf.Operation:
        return self._set(one, AFTER_STEP, tf.constant(self._steps, tf.int64))

    def _read(self, one: Kept) -> tf.Tensor:
        with tf.device(one.home):
            variable = self._variable(one.name)
            if variable.dtype == tf.resource:
                return tf.raw_ops.ReadVariableOp(resource=variable, dtype=self._dtype(one.name))
            return tf.identity(variable)

    def _assign(self, one: Kept, value: tf.Tensor) -> tf.Operation:
        with tf.device(one.device):
            variable = self._variable(one.name)
            if variable.dtype == tf.resource:
                return tf.raw_ops.AssignVariableOp(resource=variable, value=value)
            return tf.raw_ops.Assign(ref=variable, value=value, validate_shape=False).op

    def _set(self, one: Kept, what: str, value: tf.Tensor) -> tf.Operation:
        with tf.device(_host_of(one)):
            return tf.raw_ops.AssignVariableOp(resource=self._beside(one, what, value.dtype), value=value)

    def _get(self, one: Kept, what: str, dtype: tf.DType) -> tf.Tensor:
        with tf.device(_host_of(one)):
            return tf.raw_ops.ReadVariableOp(resource=self._beside(one, what, dtype), dtype=dtype)

    def _beside(self, one: Kept, what: str, dtype: tf.DType) -> tf.Tensor:
        """What an owner has beside a variable, on its host: the current device."""
        node = self._definitions[one.name]
        name = node.attr["shared_name"].s.decode() or one.name
        return tf.raw_ops.VarHandleOp(dtype=dtype, shape=tf.TensorShape(None), shared_name=f"whale/{what}/{name}",
                                      container=node.attr["container"].s.decode())

    def _dtype(self, name: str) -> tf.DType:
        return tf.as_dtype(self._definitions[name].attr["dtype"].type)

    def _variable(self, name: str) -> tf.Tensor:
        """The variable of this name on the current device, with any shape."""
        node = self._definitions[name]
        common = dict(shape=tf.TensorShape(None), dtype=tf.as_dtype(node.attr["dtype"].type),
                      container=node.attr["container"].s.decode(), shared_name=node.attr["shared_name"].s.decode() or name)
        if node.op == "VarHandleOp":
            return tf.raw_ops.VarHandleOp(**common)
        return tf.raw_ops.VariableV2(**common)


def _host_of(one: Kept) -> str:
    """The host of the process that has a variable."""
    return one.home.partition("/device:")[0] + HOST
