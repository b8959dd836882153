"""Optimizers of the papers' models that TensorFlow does not have, as ordinary `tf.train.Optimizer`s of elementary ops."""
from __future__ import annotations

from typing import Any, List, Optional

import tensorflow.compat.v1 as tf


class _Dense(tf.train.Optimizer):
    """Updates `x -= step(x, gradient)` of dense gradients; sparse ones are made dense."""

    def _step(self, x: tf.Variable, value: tf.Tensor, gradient: tf.Tensor) -> List[Any]:
        """The update ops.

        Args:
          value: the variable's value.
          gradient: a tensor of the variable's shape.
        """
        raise NotImplementedError

    def _apply_dense(self, grad: tf.Tensor, var: tf.Variable) -> tf.Operation:
        return tf.group(*self._step(var, tf.identity(var), grad))

    def _resource_apply_dense(self, grad: tf.Tensor, handle: tf.Variable) -> tf.Operation:
        return self._apply_dense(grad, handle)

    def _apply_sparse(self, grad: tf.IndexedSlices, var: tf.Variable) -> tf.Operation:
        return self._apply_dense(tf.convert_to_tensor(grad), var)

    def _resource_apply_sparse(self, grad: tf.Tensor, handle: tf.Variable, indices: tf.Tensor) -> tf.Operation:
        return self._apply_dense(tf.unsorted_segment_sum(grad, indices, handle.shape[0]), handle)

    def _zeros(self, x: tf.Variable, shape: Any, name: str) -> None:
        self._get_or_make_slot_with_initializer(
            x, tf.zeros_initializer(), tf.TensorShape(shape), x.dtype.base_dtype, name, f"{self.get_name()}/{name}")


class Adafactor(_Dense):
    """Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018, Algorithms 4 and 5.

    Second moments of a matrix `[..., R, C]` are kept as row means `[..., R]` and column means `[..., C]`, those of a vector
    whole. No first moments.

    Args:
      learning_rate: relative to the root mean square of the variable (`rho` in the paper).
      epsilon1: added to squared gradients.
      epsilon2: least root mean square of a variable.
      clipping: largest root mean square of an update (`d`).
      decay: the second moments' decay in step t is `1 - t^-decay`.
    """

    def __init__(self, learning_rate: float = 1e-2, epsilon1: float = 1e-30, epsilon2: float = 1e-3, clipping: float = 1.0,
                 decay: float = 0.8, name: str = "Adafactor") -> None:
        super().__init__(False, name)
        self._rate, self._epsilon1, self._epsilon2 = learning_rate, epsilon1, epsilon2
        self._clipping, self._exponent = clipping, decay
        self._decay: Optional[tf.Tensor] = None

    def _create_slots(self, var_list: List[tf.Variable]) -> None:
        self._create_non_slot_variable(1.0, "step", min(var_list, key=lambda x: x.name))
        for x in var_list:
            shape = x.shape.as_list()
            if len(shape) < 2:
                self._zeros(x, shape, "moments")
            else:
                self._zeros(x, shape[:-1], "rows")
                self._zeros(x, shape[:-2] + shape[-1:], "columns")

    def _count(self) -> Any:
        return self._get_non_slot_variable("step", tf.get_default_graph())

    def _prepare(self) -> None:
        self._decay = 1.0 - tf.identity(self._count()) ** -self._exponent

    def _moments(self, x: tf.Variable, squares: tf.Tensor, name: str) -> Any:
        decay = tf.cast(self._decay, squares.dtype)
        slot = self.get_slot(x, name)
        mean = decay * slot + (1.0 - decay) * squares
        return mean, tf.assign(slot, mean)

    def _step(self, x: tf.Variable, value: tf.Tensor, gradient: tf.Tensor) -> List[Any]:
        squares = tf.square(gradient) + self._epsilon1
        if gradient.shape.ndims < 2:
            moments, save = self._moments(x, squares, "moments")
            update, saves = gradient * tf.rsqrt(moments), [save]
        else:
            rows, save_rows = self._moments(x, tf.reduce_mean(squares, -1), "rows")
            columns, save_columns = self._moments(x, tf.reduce_mean(squares, -2), "columns")
            rows = rows / tf.reduce_mean(rows, -1, keepdims=True)
            update = gradient * tf.rsqrt(tf.expand_dims(rows, -1)) * tf.rsqrt(tf.expand_dims(columns, -2))
            saves = [save_rows, save_columns]
        update /= tf.maximum(_root_mean_square(update) / self._clipping, 1.0)
        scale = self._rate * tf.maximum(_root_mean_square(value), self._epsilon2)
        return saves + [tf.assign_sub(x, scale * update)]

    def _finish(self, update_ops: List[Any], name_scope: str) -> tf.Operation:
        with tf.control_dependencies(update_ops):
            return tf.group(*update_ops, tf.assign_add(self._count(), 1.0), name=name_scope)


class Lamb(_Dense):
    """You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020, Algorithm 2.

    The step of each variable is Adam's (with weight decay) times `|x| / |step|`.
    """

    def __init__(self, learning_rate: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-6,
                 weight_decay: float = 0.01, name: str = "Lamb") -> None:
        super().__init__(False, name)
        self._rate, self._beta1, self._beta2, self._epsilon, self._weight_decay = (
            learning_rate, beta1, beta2, epsilon, weight_decay)

    def _create_slots(self, var_list: List[tf.Variable]) -> None:
        first = min(var_list, key=lambda x: x.name)
        self._create_non_slot_variable(self._beta1, "beta1_power", first)
        self._create_non_slot_variable(self._beta2, "beta2_power", first)
        for x in var_list:
            self._zeros(x, x.shape, "m")
            self._zeros(x, x.shape, "v")

    def _power(self, name: str) -> Any:
        return self._get_non_slot_variable(name, tf.get_default_graph())

    def _step(self, x: tf.Variable, value: tf.Tensor, gradient: tf.Tensor) -> List[Any]:
        mean = self._beta1 * self.get_slot(x, "m") + (1.0 - self._beta1) * gradient
        squares = self._beta2 * self.get_slot(x, "v") + (1.0 - self._beta2) * tf.square(gradient)
        first, second = (tf.cast(1.0 - self._power(name), value.dtype) for name in ("beta1_power", "beta2_power"))
        step = (mean / first) / (tf.sqrt(squares / second) + self._epsilon) + self._weight_decay * value
        length, size = tf.norm(value), tf.norm(step)
        trust = tf.where(tf.logical_and(length > 0, size > 0), length / size, tf.ones_like(size))
        return [tf.assign(self.get_slot(x, "m"), mean), tf.assign(self.get_slot(x, "v"), squares),
                tf.assign_sub(x, self._rate * trust * step)]

    def _finish(self, update_ops: List[Any], name_scope: str) -> tf.Operation:
        with tf.control_dependencies(update_ops):
            powers = [tf.assign(self._power(name), self._power(name) * beta)
                      for name, beta in (("beta1_power", self._beta1), ("beta2_power", self._beta2))]
            return tf.group(*update_ops, *powers, name=name_scope)


def _root_mean_square(x: tf.Tensor) -> tf.Tensor:
    return tf.sqrt(tf.reduce_mean(tf.square(x)))
