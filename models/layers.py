"""Building blocks shared by the models: plain TensorFlow graph code on `tf.compat.v1`, without Keras or `tf.layers`.

Conventions used by every function here:

- shapes are written `[B, S, H]` for batch, sequence and hidden size; the batch dimension may be unknown (`None`), all
  other dimensions are static;
- variables come from `tf.compat.v1.get_variable` under `tf.compat.v1.variable_scope(name)`, so scopes, reuse,
  `use_resource` and partitioners work as in any TensorFlow 1 script;
- the number type follows the input tensor (float32 or float64);
- every initialiser draws from a seed made of the caller's `seed` and the variable's full name, so that initial values
  depend neither on the order in which ops were created nor on the TensorFlow version.
"""
from __future__ import annotations

import math
import zlib
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow.compat.v1 as tf

Activation = Optional[Callable[[tf.Tensor], tf.Tensor]]
Initializer = Callable[..., tf.Tensor]


class Model(NamedTuple):
    """The result of a `build` function with one loss.

    Attributes:
        loss: scalar to minimise.
        logits: the model's predictions before the softmax or sigmoid; its shape is given by the model.
        inputs: the NamedTuple of tensors `build` was called with (placeholders, or elements of a dataset).
    """

    loss: tf.Tensor
    logits: tf.Tensor
    inputs: Any


# -- shapes and variables ----------------------------------------------------------------------------------------------


def batch_size(x: tf.Tensor) -> int:
    """Static size of the first dimension of `x`, or -1 where it is unknown: what `tf.reshape` expects for it."""
    size = tf.TensorShape(x.shape).as_list()[0]
    return -1 if size is None else size


def reshape(x: tf.Tensor, *dims: int) -> tf.Tensor:
    """Reshape `x` of shape `[B, ...]` to `[B, *dims]`, keeping a static batch size static."""
    return tf.reshape(x, [batch_size(x)] + list(dims))


def fold(x: tf.Tensor) -> tf.Tensor:
    """Fold the leading dimensions of `x` `[B, ..., H]` into rows, `[B * ..., H]`; a matrix is returned unchanged."""
    return x if x.shape.ndims == 2 else tf.reshape(x, [-1, last_dim(x)])


def unfold(rows: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Inverse of `fold`: `rows` `[B * ..., W]` to `[B, ..., W]`, the leading dimensions being those of `x`."""
    if x.shape.ndims == 2:
        return rows
    return tf.reshape(rows, [batch_size(x)] + x.shape.as_list()[1:-1] + [last_dim(rows)])


def last_dim(x: tf.Tensor) -> int:
    """Static size of the last dimension of `x`."""
    return int(x.shape[-1])


def name_seed(seed: int, name: str) -> int:
    """Seed in [0, 2**31) which depends on `seed` and on the full name `name` under the current variable scope."""
    scope = tf.get_variable_scope().name
    return zlib.crc32(f"{scope}/{name}:{seed}".encode()) & 0x7FFFFFFF


def variable(name: str, shape: Sequence[int], initializer: Initializer, dtype: tf.DType,
             trainable: bool = True) -> tf.Variable:
    """`get_variable` with everything explicit.

    Args:
        name: name under the current variable scope.
        shape: static shape.
        initializer: a TensorFlow initialiser object.
        dtype: float32 or float64.
        trainable: False for statistics such as BatchNorm's moving averages.

    Returns:
        The variable (reference or resource, as the current variable scope says).
    """
    return tf.get_variable(name, shape=list(shape), dtype=dtype, initializer=initializer, trainable=trainable)


def normal_variable(name: str, shape: Sequence[int], stddev: float, dtype: tf.DType, seed: int = 0) -> tf.Variable:
    """Variable drawn from a normal distribution of deviation `stddev`, cut off at two deviations."""
    init = tf.truncated_normal_initializer(stddev=stddev, seed=name_seed(seed, name), dtype=dtype)
    return variable(name, shape, init, dtype)


def glorot_stddev(fan_in: int, fan_out: int) -> float:
    """Standard deviation sqrt(2 / (fan_in + fan_out)) of Glorot and Bengio (2010), equation 16."""
    return math.sqrt(2.0 / (fan_in + fan_out))


def he_stddev(fan_in: int) -> float:
    """Standard deviation sqrt(2 / fan_in) of He et al. (2015), equation 10, for layers followed by a ReLU."""
    return math.sqrt(2.0 / fan_in)


def num_parameters(trainable_only: bool = True) -> int:
    """Number of scalars in the variables of the default graph, counted from their static shapes alone."""
    variables = tf.trainable_variables() if trainable_only else tf.global_variables()
    return sum(int(v.shape.num_elements()) for v in variables)


# -- element-wise functions --------------------------------------------------------------------------------------------


def gelu(x: tf.Tensor) -> tf.Tensor:
    """Gaussian error linear unit x * Phi(x), exact form (Hendrycks and Gimpel 2016). Shape is kept."""
    return 0.5 * x * (1.0 + tf.erf(x * math.sqrt(0.5)))


def gelu_tanh(x: tf.Tensor) -> tf.Tensor:
    """Tanh approximation of the Gaussian error linear unit (Hendrycks and Gimpel 2016, section 2); used by GPT-2."""
    return 0.5 * x * (1.0 + tf.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def dropout(x: tf.Tensor, rate: float, seed: int = 0) -> tf.Tensor:
    """Drop elements of `x` with probability `rate` and scale the rest by 1 / (1 - rate); `x` itself when rate is 0."""
    if rate == 0.0:
        return x
    return tf.nn.dropout(x, rate=rate, seed=name_seed(seed, "dropout"))


# -- layers ------------------------------------------------------------------------------------------------------------


def dense(x: tf.Tensor, units: int, name: str, activation: Activation = None, use_bias: bool = True,
          stddev: Optional[float] = None, seed: int = 0) -> tf.Tensor:
    """Fully connected layer over the last dimension: MatMul, BiasAdd, activation.

    Args:
        x: `[B, ..., D]`; inner dimensions are folded into the rows of one MatMul.
        units: width U of the output.
        name: variable scope; holds `kernel` `[D, U]` and `bias` `[U]`.
        activation: element-wise function, or None.
        use_bias: whether to add a bias.
        stddev: deviation of the kernel's initial values; Glorot's by default.
        seed: seed of the initial values.

    Returns:
        `[B, ..., U]`.
    """
    width = last_dim(x)
    with tf.variable_scope(name):
        kernel = normal_variable("kernel", [width, units], stddev or glorot_stddev(width, units), x.dtype, seed)
        y = tf.matmul(fold(x), kernel)
        if use_bias:
            y = tf.nn.bias_add(y, variable("bias", [units], tf.zeros_initializer(), x.dtype))
        if activation is not None:
            y = activation(y)
        return unfold(y, x)


def layer_norm(x: tf.Tensor, name: str, epsilon: float = 1e-5) -> tf.Tensor:
    """Layer normalisation over the last dimension (Ba et al. 2016), with learned gain and bias.

    Args:
        x: `[B, ..., H]`.
        name: variable scope; holds `gamma` and `beta`, both `[H]`.
        epsilon: added to the variance.

    Returns:
        Tensor of the shape of `x`.
    """
    with tf.variable_scope(name):
        gamma = variable("gamma", [last_dim(x)], tf.ones_initializer(), x.dtype)
        beta = variable("beta", [last_dim(x)], tf.zeros_initializer(), x.dtype)
        centred = x - tf.reduce_mean(x, axis=-1, keepdims=True)
        variance = tf.reduce_mean(tf.square(centred), axis=-1, keepdims=True)
        return centred * tf.rsqrt(variance + epsilon) * gamma + beta


def rms_norm(x: tf.Tensor, name: str, epsilon: float = 1e-6) -> tf.Tensor:
    """Layer normalisation without mean subtraction and bias (Zhang and Sennrich 2019); used by T5.

    Args:
        x: `[B, ..., H]`.
        name: variable scope; holds `gamma` `[H]`.
        epsilon: added to the mean square.

    Returns:
        Tensor of the shape of `x`.
    """
    with tf.variable_scope(name):
        gamma = variable("gamma", [last_dim(x)], tf.ones_initializer(), x.dtype)
        return x * tf.rsqrt(tf.reduce_mean(tf.square(x), axis=-1, keepdims=True) + epsilon) * gamma


def embedding_table(vocab: int, width: int, name: str, dtype: tf.DType, stddev: float = 0.02,
                    seed: int = 0) -> tf.Variable:
    """Variable `[vocab, width]` called `name`, one row per token."""
    return normal_variable(name, [vocab, width], stddev, dtype, seed)


def embedding_lookup(table: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
    """Rows of `table` `[V, H]` chosen by integer `ids` `[B, ...]`: `[B, ..., H]`; the gradient is IndexedSlices."""
    return tf.gather(table, ids)


def tied_logits(x: tf.Tensor, table: tf.Variable, use_bias: bool = False) -> tf.Tensor:
    """Logits over the vocabulary by the transposed embedding table (Press and Wolf 2017).

    Args:
        x: `[B, S, H]`.
        table: `[V, H]`.
        use_bias: whether to add a variable `output_bias` `[V]`.

    Returns:
        `[B, S, V]`.
    """
    vocab = int(table.shape[0])
    logits = tf.matmul(fold(x), table, transpose_b=True)
    if use_bias:
        logits = tf.nn.bias_add(logits, variable("output_bias", [vocab], tf.zeros_initializer(), x.dtype))
    return unfold(logits, x)


# -- attention ---------------------------------------------------------------------------------------------------------


def split_heads(x: tf.Tensor, heads: int) -> tf.Tensor:
    """`[B, S, heads * d]` to `[B, heads, S, d]`."""
    return tf.transpose(reshape(x, int(x.shape[1]), heads, last_dim(x) // heads), [0, 2, 1, 3])


def merge_heads(x: tf.Tensor) -> tf.Tensor:
    """`[B, heads, S, d]` to `[B, S, heads * d]`."""
    heads, length, depth = x.shape.as_list()[1:]
    return reshape(tf.transpose(x, [0, 2, 1, 3]), length, heads * depth)


def dot_product_attention(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, bias: Optional[tf.Tensor] = None,
                          scale: Optional[float] = None, dropout_rate: float = 0.0, seed: int = 0) -> tf.Tensor:
    """softmax(scale * Q K^T + bias) V (Vaswani et al. 2017, equation 1).

    Args:
        query: `[B, heads, Sq, d]`.
        key: `[B, heads, Sk, d]`.
        value: `[B, heads, Sk, d]`.
        bias: added to the scores; broadcast to `[B, heads, Sq, Sk]` (a mask, or relative positions).
        scale: factor of the scores; 1 / sqrt(d) by default.
        dropout_rate: probability of dropping an attention weight.
        seed: seed of the dropout.

    Returns:
        `[B, heads, Sq, d]`.
    """
    scale = last_dim(query) ** -0.5 if scale is None else scale
    scores = tf.matmul(query, key, transpose_b=True)
    if scale != 1.0:
        scores = scores * scale
    if bias is not None:
        scores = scores + bias
    return tf.matmul(dropout(tf.nn.softmax(scores), dropout_rate, seed), value)


def multi_head_attention(x: tf.Tensor, memory: tf.Tensor, heads: int, name: str, bias: Optional[tf.Tensor] = None,
                         dropout_rate: float = 0.0, stddev: Optional[float] = None, seed: int = 0) -> tf.Tensor:
    """Multi-head attention of `x` over `memory` (Vaswani et al. 2017, section 3.2.2).

    Args:
        x: queries `[B, Sq, H]`; pass it as `memory` too for self-attention.
        memory: keys and values `[B, Sk, Hm]`.
        heads: number of heads; divides H.
        name: variable scope; holds the dense layers `query`, `key`, `value` and `output`.
        bias: added to the scores; broadcast to `[B, heads, Sq, Sk]`.
        dropout_rate: probability of dropping an attention weight.
        stddev: deviation of the kernels' initial values; Glorot's by default.
        seed: seed of initial values and dropout.

    Returns:
        `[B, Sq, H]`.
    """
    hidden = last_dim(x)
    with tf.variable_scope(name):
        query = split_heads(dense(x, hidden, "query", stddev=stddev, seed=seed), heads)
        key = split_heads(dense(memory, hidden, "key", stddev=stddev, seed=seed), heads)
        value = split_heads(dense(memory, hidden, "value", stddev=stddev, seed=seed), heads)
        context = dot_product_attention(query, key, value, bias, dropout_rate=dropout_rate, seed=seed)
        return dense(merge_heads(context), hidden, "output", stddev=stddev, seed=seed)


def padding_bias(mask: tf.Tensor) -> tf.Tensor:
    """Scores to add so that padding is not attended: mask `[B, S]` (1 = token, 0 = padding) to `[B, 1, 1, S]`."""
    return reshape((1.0 - mask) * -1e4, 1, 1, last_dim(mask))


def causal_bias(length: int, dtype: tf.DType) -> tf.Tensor:
    """Scores `[1, 1, S, S]` to add so that a position sees only itself and earlier positions."""
    positions = tf.range(length)
    later = tf.less(tf.reshape(positions, [length, 1]), tf.reshape(positions, [1, length]))
    return tf.reshape(tf.cast(later, dtype) * -1e4, [1, 1, length, length])


# -- convolution -------------------------------------------------------------------------------------------------------


def conv2d(x: tf.Tensor, filters: int, size: int, name: str, stride: int = 1, use_bias: bool = False,
           activation: Activation = None, seed: int = 0) -> tf.Tensor:
    """Two-dimensional convolution with "SAME" padding, He initialisation.

    Args:
        x: images `[B, height, width, C]`.
        filters: number of output channels.
        size: height and width of the kernel.
        name: variable scope; holds `kernel` `[size, size, C, filters]` and, if asked for, `bias` `[filters]`.
        stride: step in both directions.
        use_bias: whether to add a bias; not needed before a batch normalisation.
        activation: element-wise function, or None.
        seed: seed of the initial values.

    Returns:
        `[B, ceil(height / stride), ceil(width / stride), filters]`.
    """
    channels = last_dim(x)
    with tf.variable_scope(name):
        kernel = normal_variable("kernel", [size, size, channels, filters], he_stddev(size * size * channels), x.dtype,
                                 seed)
        y = tf.nn.conv2d(x, kernel, strides=[1, stride, stride, 1], padding="SAME")
        if use_bias:
            y = tf.nn.bias_add(y, variable("bias", [filters], tf.zeros_initializer(), x.dtype))
        return y if activation is None else activation(y)


def conv2d_transpose(x: tf.Tensor, filters: int, size: int, name: str, stride: int = 2, seed: int = 0) -> tf.Tensor:
    """Transposed convolution with "SAME" padding and bias, which enlarges images by `stride`.

    Args:
        x: images `[B, height, width, C]`.
        filters: number of output channels.
        size: height and width of the kernel.
        name: variable scope; holds `kernel` `[size, size, filters, C]` and `bias` `[filters]`.
        stride: factor of enlargement.
        seed: seed of the initial values.

    Returns:
        `[B, height * stride, width * stride, filters]`.
    """
    height, width, channels = x.shape.as_list()[1:]
    # The op wants the whole output shape, and takes no -1: an unknown batch size has to be computed.
    batch = tf.shape(x)[0] if batch_size(x) == -1 else batch_size(x)
    with tf.variable_scope(name):
        kernel = normal_variable("kernel", [size, size, filters, channels], he_stddev(size * size * channels), x.dtype,
                                 seed)
        y = tf.nn.conv2d_transpose(x, kernel, [batch, height * stride, width * stride, filters],
                                   strides=[1, stride, stride, 1], padding="SAME")
        return tf.nn.bias_add(y, variable("bias", [filters], tf.zeros_initializer(), x.dtype))


def max_pool(x: tf.Tensor, size: int, stride: int) -> tf.Tensor:
    """Maximum over windows of `size` x `size`, "SAME" padding: `[B, h, w, C]` to `[B, h / stride, w / stride, C]`."""
    return tf.nn.max_pool2d(x, ksize=[1, size, size, 1], strides=[1, stride, stride, 1], padding="SAME")


def batch_norm(x: tf.Tensor, name: str, training: bool, momentum: float = 0.9,
               epsilon: float = 1e-5) -> tf.Tensor:
    """Batch normalisation over all dimensions but the last (Ioffe and Szegedy 2015).

    In training the batch's statistics are used, and ops that update the moving averages join the collection
    `UPDATE_OPS`, as `tf.layers` did: run them with the training step. Otherwise the moving averages are used. float32
    runs the fused kernel; it has no float64 form, so float64 runs the same formula in single ops.

    Args:
        x: `[B, height, width, C]`.
        name: variable scope; holds `gamma`, `beta`, `moving_mean` and `moving_variance`, each `[C]`.
        training: whether to use the batch's statistics.
        momentum: weight of the old moving average.
        epsilon: added to the variance.

    Returns:
        Tensor of the shape of `x`.
    """
    shape, dtype = [last_dim(x)], x.dtype
    with tf.variable_scope(name):
        gamma = variable("gamma", shape, tf.ones_initializer(), dtype)
        beta = variable("beta", shape, tf.zeros_initializer(), dtype)
        moving_mean = variable("moving_mean", shape, tf.zeros_initializer(), dtype, trainable=False)
        moving_variance = variable("moving_variance", shape, tf.ones_initializer(), dtype, trainable=False)
        if not training:
            return _normalise(x, moving_mean, moving_variance, gamma, beta, epsilon)
        if dtype == tf.float32:
            y, mean, var = tf.nn.fused_batch_norm(x, gamma, beta, epsilon=epsilon, is_training=True)
        else:
            mean, var = _batch_moments(x)
            y = _normalise(x, mean, var, gamma, beta, epsilon)
            rows = tf.cast(tf.size(x) // shape[0], dtype)
            var = var * rows / (rows - 1.0)  # the fused kernel too reports the unbiased variance
        for average, value in ((moving_mean, mean), (moving_variance, var)):
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS,
                                 tf.assign_sub(average, (average - value) * (1.0 - momentum)))
        return y


def _batch_moments(x: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance `[C]` of `x` `[B, height, width, C]` per channel."""
    axes: List[int] = list(range(x.shape.ndims - 1))
    mean = tf.reduce_mean(x, axis=axes)
    return mean, tf.reduce_mean(tf.square(x - mean), axis=axes)


def _normalise(x: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor,
               epsilon: float) -> tf.Tensor:
    return (x - mean) * (tf.rsqrt(variance + epsilon) * gamma) + beta


# -- losses ------------------------------------------------------------------------------------------------------------


def cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Softmax cross-entropy of each position.

    Args:
        logits: `[B, ..., N]`.
        labels: integers `[B, ...]`.

    Returns:
        Losses `[B * ...]`, folded. TensorFlow would fold them itself, with an Assert for a dynamic batch size.
    """
    if logits.shape.ndims > 2:
        labels = tf.reshape(labels, [-1])
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=fold(logits))


def mean_cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Mean softmax cross-entropy of `logits` `[B, ..., N]` against integer `labels` `[B, ...]`: a scalar."""
    return tf.reduce_mean(cross_entropy(logits, labels))


def weighted_cross_entropy(logits: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Weighted mean of the softmax cross-entropy, sum(w * loss) / sum(w), as `tf.losses` computes it.

    Args:
        logits: `[B, ..., N]`.
        labels: integers `[B, ...]`.
        weights: `[B, ...]`; 0 leaves a position out.

    Returns:
        Scalar; 0 where all weights are 0.
    """
    losses = cross_entropy(logits, labels) * tf.reshape(weights, [-1])
    return tf.div_no_nan(tf.reduce_sum(losses), tf.reduce_sum(weights))
