"""EPL's ops under ``epl.split``, as the ordinary ops that they mean: ``wh.split`` divides those.

EPL replaces ``tf.layers.dense`` and others while a ``split`` block is open; here the script's own calls need no replacement, and
these functions are for scripts that call EPL's by name.
"""

from __future__ import annotations

import re
from typing import Any, Callable, List, Optional, Sequence

from whale_tf._tf_compat import tf, v1
from whale_tf.errors import AnnotationError


def distributed_dense(inputs: Any, units: int, activation: Optional[Callable] = None, use_bias: bool = True,
                      kernel_initializer: Any = None, bias_initializer: Any = None, kernel_regularizer: Any = None,
                      bias_regularizer: Any = None, activity_regularizer: Any = None, kernel_constraint: Any = None,
                      bias_constraint: Any = None, trainable: bool = True, name: Optional[str] = None,
                      reuse: Optional[bool] = None) -> Any:
    """A dense layer `[batch, features] -> [batch, units]`, whose columns ``epl.split`` divides.

    EPL makes variables ``kernel_0``, ``bias_0`` ... of a part each; here ``kernel`` and ``bias`` are whole, so that checkpoints
    fit every number of devices.

    Raises:
        AnnotationError: ``activity_regularizer`` or ``reuse``, which EPL does not have either.
    """
    if activity_regularizer is not None or reuse:
        raise AnnotationError("epl.ops.distributed_dense has no activity_regularizer and no reuse, as in EPL; leave them out")
    with v1.variable_scope(name, default_name="distributed_dense"):
        dtype = inputs.dtype
        kernel = v1.get_variable("kernel", [int(inputs.shape[-1]), int(units)], dtype, kernel_initializer, kernel_regularizer,
                                 trainable, constraint=kernel_constraint)
        outputs = tf.matmul(inputs, kernel)
        if use_bias:
            initializer = v1.zeros_initializer() if bias_initializer is None else bias_initializer
            outputs += v1.get_variable("bias", [int(units)], dtype, initializer, bias_regularizer, trainable,
                                       constraint=bias_constraint)
        return outputs if activation is None else activation(outputs)


def distributed_sparse_softmax_cross_entropy_with_logits(
        labels: Any, logits: Any, weights: Any = 1.0, strategy: Optional[str] = None,
        loss_collection: str = v1.GraphKeys.LOSSES, reduction: Any = None) -> Any:
    """The mean cross entropy of logits `[batch, classes]` and labels `[batch]`, a scalar.  EPL adds 1e-8 to the sum of the
    exponentials, which shifts every logarithm; here it is exact.

    Args:
        strategy: name scope of the ops, as EPL calls it.
    """
    weights = 1.0 if weights is None else weights
    reduction = v1.losses.Reduction.SUM_BY_NONZERO_WEIGHTS if reduction is None else reduction
    return v1.losses.sparse_softmax_cross_entropy(labels, logits, weights, strategy, loss_collection, reduction)


def distributed_argmax(inputs: Any, axis: Optional[int] = None, name: Optional[str] = None, dimension: Optional[int] = None,
                       output_type: Any = tf.int64) -> Any:
    """The position of the largest element along ``axis`` (default 0; ``dimension`` is its old name)."""
    chosen = next((given for given in (axis, dimension) if given is not None), 0)
    return tf.argmax(inputs, axis=chosen, output_type=output_type, name=name)


def distributed_equal(predictions: Any, labels: Any, name: Optional[str] = None) -> Any:
    """Whether predictions equal labels, element by element; predictions are cast to the labels' type."""
    return tf.equal(labels, tf.cast(predictions, labels.dtype), name=name)


class Replica2Split:
    """The bridge from a ``replicate`` to a ``split`` TaskGraph.  whale_tf finds bridges by itself, so it only names the place."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, tensors: Any) -> Any:
        return None if tensors is None else tf.nest.map_structure(lambda one: tf.identity(one, self.name), tensors)


Replica2Replica = Split2Split = Replica2Split


class AdamWeightDecayOptimizer(v1.train.Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), in EPL's form: with ``g`` the gradient of
    variable ``x``, and ``a_t = learning_rate sqrt(1 - beta_2^t) / (1 - beta_1^t)``::

        m <- beta_1 m + (1 - beta_1) g      v <- beta_2 v + (1 - beta_2) g^2
        x <- x - a_t (m / (sqrt(v) + epsilon) + weight_decay_rate x)

    Args:
        exclude_from_weight_decay: regular expressions; a variable whose name one of them finds does not decay.
    """

    def __init__(self, learning_rate: Any, weight_decay_rate: Any = 0.0, beta_1: float = 0.9, beta_2: float = 0.999,
                 epsilon: float = 1e-6, exclude_from_weight_decay: Optional[Sequence[str]] = None,
                 name: str = "AdamWeightDecayOptimizer") -> None:
        super().__init__(False, name)
        self.learning_rate, self.weight_decay_rate = learning_rate, weight_decay_rate
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.exclude_from_weight_decay = exclude_from_weight_decay

    def _powers(self) -> List[Any]:
        graph = v1.get_default_graph()
        return [self._get_non_slot_variable(name, graph=graph) for name in ("beta1_power", "beta2_power")]

    def _create_slots(self, var_list: Sequence[Any]) -> None:
        first = min(var_list, key=lambda variable: variable.name)
        for name, value in (("beta1_power", self.beta_1), ("beta2_power", self.beta_2)):
            self._create_non_slot_variable(initial_value=value, name=name, colocate_with=first)
        for variable in var_list:
            for slot in ("m", "v"):
                self._zeros_slot(variable, slot, self._name)

    def _decays(self, name: str) -> bool:
        is_off = not isinstance(self.weight_decay_rate, tf.Tensor) and not self.weight_decay_rate
        return not is_off and not any(re.search(each, name) for each in self.exclude_from_weight_decay or ())

    def _apply_dense(self, grad: Any, var: Any) -> Any:
        dtype = var.dtype.base_dtype
        power_1, power_2 = (tf.cast(power, dtype) for power in self._powers())
        rate = tf.cast(self.learning_rate, dtype) * tf.sqrt(1 - power_2) / (1 - power_1)
        m, v = self.get_slot(var, "m"), self.get_slot(var, "v")
        next_m = self.beta_1 * m + (1 - self.beta_1) * grad
        next_v = self.beta_2 * v + (1 - self.beta_2) * tf.square(grad)
        step = next_m / (tf.sqrt(next_v) + self.epsilon)
        if self._decays(var.name):
            step += tf.cast(self.weight_decay_rate, dtype) * var
        return tf.group(var.assign(var - rate * step), m.assign(next_m), v.assign(next_v))

    def _resource_apply_dense(self, grad: Any, var: Any) -> Any:
        return self._apply_dense(grad, var)

    def _apply_sparse(self, grad: Any, var: Any) -> Any:
        return self._apply_dense(tf.convert_to_tensor(grad), var)

    def _resource_apply_sparse(self, grad: Any, var: Any, indices: Any) -> Any:
        return self._apply_dense(tf.convert_to_tensor(tf.IndexedSlices(grad, indices, tf.shape(var))), var)

    def _finish(self, update_ops: Sequence[Any], name_scope: str) -> Any:
        with tf.control_dependencies(update_ops):
            power_1, power_2 = self._powers()
            updates = [power_1.assign(power_1 * self.beta_1), power_2.assign(power_2 * self.beta_2)]
        return tf.group(*update_ops, *updates, name=name_scope)
