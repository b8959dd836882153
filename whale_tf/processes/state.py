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

PRESERVED = "preserved"  # names, with the variable's, what an owner had before it wrote between two steps
AFTER_STEP = "after_step"  # and after which step that was


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
            written = [name for name, step in zip(wanted, steps) if step == self._steps]
            if written:
                self._runtime.run_beside(homes, lambda: [
                    self._assign(self._kept[name], self._read_preserved(self._kept[name])) for name in written])
            self._gone.difference_update(wanted)

    def drop(self) -> None:
        """A step begins: frees the memory of all variables here that other processes keep."""
        wanted = sorted(set(self._kept).difference(self._gone))
        if wanted:
            self._runtime.run_beside([], lambda: [
                self._assign(self._kept[name], tf.zeros([0], self._dtype(name))) for name in wanted])
            self._gone.update(wanted)
        if self._own and not self._steps:
            self._runtime.run_beside([], lambda: [self._mark(one, self._steps) for one in self._own.values()])
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
                self._assign_preserved(self._own[name], tf.zeros([0], self._dtype(name))) for name in names])
            self._preserved.clear()

    def _take(self, name: str) -> tf.Tensor:
        """Copies the owner's value of this moment, and returns after which step the owner has preserved one."""
        one = self._kept[name]
        with tf.control_dependencies([self._assign(one, self._read(one))]):  # the owner preserves before it writes
            return self._mark_of(one)

    def _copy(self, one: Kept) -> tf.Operation:
        value = self._read(one)
        with tf.device(_host_of(one)):
            value = tf.raw_ops.DeepCopy(x=value)  # writes of variables that are references change the value itself
        with tf.control_dependencies([self._assign_preserved(one, value)]):
            return self._mark(one, self._steps)

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

    def _beside(self, one: Kept, suffix: str, dtype: tf.DType) -> tf.Tensor:
        """A further variable of the owner of this one, on the current device: that of its host."""
        node = self._definitions[one.name]
        name = node.attr["shared_name"].s.decode() or one.name
        return tf.raw_ops.VarHandleOp(dtype=dtype, shape=tf.TensorShape(None), shared_name=f"whale/{suffix}/{name}",
                                      container=node.attr["container"].s.decode())

    def _assign_preserved(self, one: Kept, value: tf.Tensor) -> tf.Operation:
        with tf.device(_host_of(one)):
            return tf.raw_ops.AssignVariableOp(resource=self._beside(one, PRESERVED, value.dtype), value=value)

    def _read_preserved(self, one: Kept) -> tf.Tensor:
        dtype = self._dtype(one.name)
        with tf.device(_host_of(one)):
            return tf.raw_ops.ReadVariableOp(resource=self._beside(one, PRESERVED, dtype), dtype=dtype)

    def _mark(self, one: Kept, step: int) -> tf.Operation:
        with tf.device(_host_of(one)):
            return tf.raw_ops.AssignVariableOp(
                resource=self._beside(one, AFTER_STEP, tf.int64), value=tf.constant(step, tf.int64))

    def _mark_of(self, one: Kept) -> tf.Tensor:
        with tf.device(_host_of(one)):
            return tf.raw_ops.ReadVariableOp(resource=self._beside(one, AFTER_STEP, tf.int64), dtype=tf.int64)

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
