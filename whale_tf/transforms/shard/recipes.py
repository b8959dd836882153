"""Ops that exchange a few numbers per example instead of their operands.

Softmax over classes that are divided over ``n`` devices, with ``x_i`` the logits of device ``i``::

    m = max_i max(x_i)        z_i = x_i - m        e_i = exp(z_i)        s = sum_i sum(e_i)        softmax_i = e_i / s

Cross-entropy with labels ``y`` needs one more sum, ``loss = log s - sum_i sum(y_i z_i)`` (for ``sum y = 1``), and its gradient
none: ``e_i / s - y_i``.  In a look-up in divided rows, each device takes the rows that it has, and zeros for the others; the
devices' results are added.
"""

from __future__ import annotations

from typing import List, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.patterns.spread import Spread, Tile


class Softmax:
    """``m``, ``z``, ``e`` and ``s`` of logits `[..., C]` that are divided along their last dimension.

    Args:
        logits: one part for each device.
    """

    def __init__(self, nodes: Nodes, logits: Sequence[str], rank: int, dtype: tf.DType, scope: str) -> None:
        self.nodes, self.dtype, self.scope, self.axis = nodes, dtype, scope, rank - 1
        self.devices = [str(i) for i in range(len(logits))]
        tops = [self.reduce("Max", x, "max", i) for i, x in enumerate(logits)]
        top = combine(nodes, "Maximum", tops, scope + "/max", dtype)
        self.z = [nodes.binary("Sub", x, top, self.at("z", i), dtype, str(i)) for i, x in enumerate(logits)]
        self.e = [nodes.add("Exp", self.at("exp", i), [z], str(i), T=dtype) for i, z in enumerate(self.z)]
        self.s = self.summed(self.e, "sum")

    def at(self, what: str, i: int) -> str:
        return f"{self.scope}/{what}{i}"

    def reduce(self, kind: str, x: str, what: str, i: int) -> str:
        """Reduces over the last dimension, which stays with size one."""
        axis = self.nodes.const([self.axis], self.at(what + "_axis", i), tf.int32, str(i))
        return self.nodes.add(kind, self.at(what, i), [x, axis], str(i), T=self.dtype, Tidx=tf.int32, keep_dims=True)

    def summed(self, parts: Sequence[str], what: str) -> str:
        """The sum over the last dimension and all devices `[..., 1]`, on the first device."""
        sums = [self.reduce("Sum", x, what, i) for i, x in enumerate(parts)]
        return self.nodes.add_n(sums, f"{self.scope}/{what}", self.dtype, "0")

    def probabilities(self) -> List[str]:
        return [self.nodes.binary("RealDiv", e, self.s, self.at("softmax", i), self.dtype, str(i))
                for i, e in enumerate(self.e)]

    def log_s(self) -> str:
        return self.nodes.add("Log", self.scope + "/log", [self.s], "0", T=self.dtype)

    def log_probabilities(self) -> List[str]:
        log = self.log_s()
        return [self.nodes.binary("Sub", z, log, self.at("log_softmax", i), self.dtype, str(i)) for i, z in enumerate(self.z)]

    def cross_entropy(self, labels: Sequence[str]) -> Tuple[str, List[str]]:
        """Loss `[B]` and the parts of its gradient, for labels that are divided like the logits."""
        nodes, log = self.nodes, self.log_s()
        terms = []
        for i, (z, y) in enumerate(zip(self.z, labels)):
            distance = nodes.binary("Sub", log, z, self.at("distance", i), self.dtype, str(i))
            terms.append(nodes.binary("Mul", y, distance, self.at("term", i), self.dtype, str(i)))
        return self._row(self.summed(terms, "loss")), self._gradient(labels)

    def sparse_cross_entropy(self, labels: Sequence[str], label_type: tf.DType, classes: Spread) -> Tuple[str, List[str]]:
        """Loss `[B]` and the parts of its gradient, for class numbers `[B]`.

        A number that is not a class makes the loss NaN, as in TensorFlow's kernels for GPUs: the loss is divided by the number of
        devices that have the class, which is one or zero.
        """
        nodes, dtype = self.nodes, self.dtype
        hot, picked = [], []
        for i, (y, z) in enumerate(zip(labels, self.z)):
            device = str(i)
            start = nodes.const(classes.starts[i], self.at("start", i), label_type, device)
            local = nodes.binary("Sub", y, start, self.at("local", i), label_type, device)
            depth = nodes.const(classes.sizes[i], self.at("depth", i), tf.int32, device)
            on, off = (nodes.const(value, self.at(f"is_{value}", i), tf.bool, device) for value in (True, False))
            mine = nodes.add("OneHot", self.at("mine", i), [local, depth, on, off], device, T=tf.bool, TI=label_type, axis=-1)
            zeros = nodes.add("ZerosLike", self.at("zeros", i), [z], device, T=dtype)
            picked.append(nodes.add("Select", self.at("picked", i), [mine, z, zeros], device, T=dtype))
            hot.append(nodes.cast(mine, self.at("labels", i), tf.bool, dtype, device))
        found = nodes.binary("RealDiv", self.summed(picked, "logit"), self.summed(hot, "found"), self.scope + "/own", dtype, "0")
        loss = nodes.binary("Sub", self.log_s(), found, self.scope + "/rows", dtype, "0")
        return self._row(loss), self._gradient(hot)

    def _gradient(self, labels: Sequence[str]) -> List[str]:
        return [self.nodes.binary("Sub", p, y, self.at("gradient", i), self.dtype, str(i))
                for i, (p, y) in enumerate(zip(self.probabilities(), labels))]

    def _row(self, loss: str) -> str:
        return self.nodes.add("Squeeze", self.scope + "/loss_rows", [loss], "0", T=self.dtype, squeeze_dims=[self.axis])


def combine(nodes: Nodes, op_type: str, parts: Sequence[str], scope: str, dtype: tf.DType) -> str:
    """``Maximum`` or ``Minimum`` of all parts, on the first device."""
    total = parts[0]
    for i, part in enumerate(parts[1:]):
        total = nodes.binary(op_type, total, part, f"{scope}/{i}", dtype, "0")
    return total


class Rows:
    """Which numbers belong to the rows of a part, on its device, and their numbers there."""

    def __init__(self, nodes: Nodes, numbers: str, dtype: tf.DType, part: Tile, scope: str) -> None:
        self.nodes, self.dtype, self.scope, self.device = nodes, dtype, scope, str(part.device)
        rows = part.ranges[0]
        start = nodes.const(rows.start, scope + "/start", dtype, self.device)
        self.local = nodes.binary("Sub", numbers, start, scope + "/local", dtype, self.device)
        self.zero = nodes.const(0, scope + "/zero", dtype, self.device)
        self.last = nodes.const(rows.size - 1, scope + "/last", dtype, self.device)
        above = nodes.binary("GreaterEqual", self.local, self.zero, scope + "/above", dtype, self.device)
        below = nodes.binary("LessEqual", self.local, self.last, scope + "/below", dtype, self.device)
        self.mine = nodes.add("LogicalAnd", scope + "/mine", [above, below], self.device)

    def safe(self) -> str:
        """Local numbers; for rows of other devices, the number of some row of this one."""
        low = self.nodes.binary("Maximum", self.local, self.zero, self.scope + "/low", self.dtype, self.device)
        return self.nodes.binary("Minimum", low, self.last, self.scope + "/safe", self.dtype, self.device)

    def or_zero(self, picked: str, trailing: int, dtype: tf.DType) -> str:
        """``picked`` rows `[numbers..., trailing dimensions...]`, with zeros for rows of other devices."""
        mine = self.mine
        for k in range(trailing):
            axis = self.nodes.const(-1, self.scope + "/axis", tf.int32, self.device)
            mine = self.nodes.add("ExpandDims", f"{self.scope}/wide{k}", [mine, axis], self.device, T=tf.bool, Tdim=tf.int32)
        zeros = self.nodes.add("ZerosLike", self.scope + "/zeros", [picked], self.device, T=dtype)
        return self.nodes.add("SelectV2", self.scope + "/rows", [mine, picked, zeros], self.device, T=dtype)

    def kept(self, values: str, dtype: tf.DType, what: str) -> str:
        """The rows of ``values`` whose numbers belong to this device."""
        where = self.nodes.add("Where", f"{self.scope}/{what}_where", [self.mine], self.device, T=tf.bool)
        at = self.nodes.add("Squeeze", f"{self.scope}/{what}_at", [where], self.device, T=tf.int64, squeeze_dims=[1])
        axis = self.nodes.const(0, self.scope + "/first", tf.int32, self.device)
        return self.nodes.add("GatherV2", f"{self.scope}/{what}", [values, at, axis], self.device, Tparams=dtype,
                              Tindices=tf.int64, Taxis=tf.int32)
