"""GNMT: translation by stacks of LSTM layers with attention; the recurrences are `while_loop`s.

Source: Wu et al., "Google's Neural Machine Translation System", 2016, section 3: a bidirectional first encoder layer,
residual connections from the third layer on, additive attention computed from the bottom decoder layer's output of the
previous step and given to every decoder layer.

Stages: `embed`, `encoder_layer`, `decoder_attention_layer` (the bottom one), `decoder_layer`, `softmax`.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, List, Optional, Tuple

import tensorflow.compat.v1 as tf

from models import data, layers

State = Tuple[tf.Tensor, ...]


@dataclass(frozen=True)
class GnmtConfig:
    """Sizes of the model.

    Attributes:
        encoder_layers: number of encoder layers, the bidirectional first one included.
        decoder_layers: number of decoder layers.
        hidden: width H of embeddings, LSTM states and attention.
        vocab: number of tokens V, for each of source and target.
        source: source length S.
        target: target length T.
        dtype: "float32" or "float64".
        seed: seed of the initial values.
    """

    encoder_layers: int = 3
    decoder_layers: int = 3
    hidden: int = 8
    vocab: int = data.BYTE_VOCAB
    source: int = 12
    target: int = 12
    dtype: str = "float32"
    seed: int = 0

    @classmethod
    def tiny(cls) -> GnmtConfig:
        """Three layers each of hidden 8, on lines of up to 11 bytes: about 12,000 parameters."""
        return cls()

    @classmethod
    def gnmt16(cls) -> GnmtConfig:
        """Eight layers each of hidden 1,024: 281 million parameters with 32,000 tokens."""
        return cls(8, 8, 1024, 32000, 50, 50)


def inputs(config: GnmtConfig, batch_size: Optional[int] = None) -> data.Seq2SeqBatch:
    """Placeholders of a source and target batch; shapes as in `data.Seq2SeqBatch`."""
    source, target = [batch_size, config.source], [batch_size, config.target]
    return data.Seq2SeqBatch(
        source=tf.placeholder(tf.int32, source, name="source"),
        source_mask=tf.placeholder(config.dtype, source, name="source_mask"),
        target=tf.placeholder(tf.int32, target, name="target"),
        labels=tf.placeholder(tf.int32, target, name="labels"),
        weights=tf.placeholder(config.dtype, target, name="weights"))


def embed(tokens: tf.Tensor, config: GnmtConfig, name: str) -> tf.Tensor:
    """Embeddings of tokens `[B, S]`: `[B, S, H]`."""
    table = layers.embedding_table(config.vocab, config.hidden, name, tf.as_dtype(config.dtype), 0.1, config.seed)
    return layers.embedding_lookup(table, tokens)


# -- recurrences -------------------------------------------------------------------------------------------------------


def lstm_step(gates: tf.Tensor, cell: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
    """One step of an LSTM (Hochreiter and Schmidhuber 1997, with forget gates).

    Args:
        gates: sums of all inputs to the four gates, `[B, 4 H]`.
        cell: cell state `[B, H]`.

    Returns:
        New output and cell state, both `[B, H]`.
    """
    enter, forget, update, leave = tf.split(gates, 4, axis=1)
    # Forget gates start open, so that early gradients reach back (Jozefowicz et al. 2015).
    cell = tf.sigmoid(forget + 1.0) * cell + tf.sigmoid(enter) * tf.tanh(update)
    return tf.sigmoid(leave) * tf.tanh(cell), cell


def scan(step: Callable[[State, State], Tuple[State, State]], sequences: State, state: State,
         widths: List[int]) -> State:
    """Run `step` along the time dimension by a `while_loop`.

    Args:
        step: maps (slices of the sequences at one time, state) to (outputs, new state), all `[B, ...]`.
        sequences: tensors `[B, T, D]`, T static.
        state: first state, a tuple of `[B, ...]`.
        widths: width of each output.

    Returns:
        The outputs of all times, each `[B, T, width]`.
    """
    length, dtype = int(sequences[0].shape[1]), sequences[0].dtype
    reads = [tf.TensorArray(dtype, length).unstack(tf.transpose(x, [1, 0, 2])) for x in sequences]
    writes = tuple(tf.TensorArray(dtype, length) for _ in widths)

    def body(time: tf.Tensor, state: State, writes: Tuple[tf.TensorArray, ...]) -> tuple:
        outputs, state = step(tuple(read.read(time) for read in reads), state)
        return time + 1, state, tuple(write.write(time, output) for write, output in zip(writes, outputs))

    _, _, writes = tf.while_loop(lambda time, *_: time < length, body, (tf.constant(0), state, writes))
    batch = sequences[0].shape[0]
    results = []
    for write, width in zip(writes, widths):
        stacked = write.stack()
        stacked.set_shape([length, batch, width])
        results.append(tf.transpose(stacked, [1, 0, 2]))
    return tuple(results)


def zero_state(x: tf.Tensor, width: int) -> tf.Tensor:
    """Zeros `[B, width]` for a sequence `[B, S, D]`."""
    batch = tf.shape(x)[0] if layers.batch_size(x) == -1 else layers.batch_size(x)
    return tf.zeros([batch, width], x.dtype)


def recurrent_kernel(rows: int, config: GnmtConfig, name: str, dtype: tf.DType) -> tf.Tensor:
    """Value of the kernel `[rows, 4 H]` called `name`, read once, outside of the loop."""
    stddev = layers.glorot_stddev(rows, config.hidden)
    return tf.convert_to_tensor(layers.normal_variable(name, [rows, 4 * config.hidden], stddev, dtype, config.seed))


def lstm(x: tf.Tensor, mask: Optional[tf.Tensor], config: GnmtConfig, name: str, reverse: bool = False) -> tf.Tensor:
    """LSTM over a whole sequence.

    Args:
        x: `[B, S, D]`.
        mask: `[B, S]`, 1 for tokens and 0 for padding, where the state does not change; None without padding.
        config: sizes.
        name: variable scope; holds the dense layer `input` and the kernel `recurrent` `[H, 4 H]`.
        reverse: whether to run from the last position to the first.

    Returns:
        `[B, S, H]`, in the order of `x`.
    """
    hidden = config.hidden
    with tf.variable_scope(name):
        # The inputs' part of the gates does not wait for the recurrence: one product for all times.
        gates = layers.dense(x, 4 * hidden, "input", seed=config.seed)
        kernel = recurrent_kernel(hidden, config, "recurrent", x.dtype)
        sequences = (gates,) if mask is None else (gates, tf.expand_dims(mask, 2))
        if reverse:
            sequences = tuple(tf.reverse(sequence, [1]) for sequence in sequences)

        def step(now: State, state: State) -> Tuple[State, State]:
            output, cell = state
            new_output, new_cell = lstm_step(now[0] + tf.matmul(output, kernel), cell)
            if mask is not None:
                new_output, new_cell = output + now[1] * (new_output - output), cell + now[1] * (new_cell - cell)
            return (new_output,), (new_output, new_cell)

        y, = scan(step, sequences, (zero_state(x, hidden), zero_state(x, hidden)), [hidden])
        return tf.reverse(y, [1]) if reverse else y


# -- layers of the model -----------------------------------------------------------------------------------------------


def encoder_layer(x: tf.Tensor, mask: tf.Tensor, config: GnmtConfig, index: int,
                  name: Optional[str] = None) -> tf.Tensor:
    """One encoder layer.

    Args:
        x: `[B, S, D]`.
        mask: `[B, S]`, 1 for tokens and 0 for padding.
        config: sizes.
        index: index of the layer from 0; the first runs both ways, from the third on the input is added.
        name: variable scope; "encoder_<index>" by default.

    Returns:
        `[B, S, 2 H]` for the first layer, `[B, S, H]` for the others.
    """
    with tf.variable_scope(name or f"encoder_{index}"):
        y = lstm(x, mask, config, "forward")
        if index == 0:
            return tf.concat([y, lstm(x, mask, config, "backward", reverse=True)], axis=2)
        return y + x if index >= 2 else y


def decoder_attention_layer(x: tf.Tensor, memory: tf.Tensor, mask: tf.Tensor, config: GnmtConfig,
                            name: str = "decoder_0") -> Tuple[tf.Tensor, tf.Tensor]:
    """Bottom decoder layer: an LSTM which attends over the encoder's output at each step.

    Args:
        x: target embeddings `[B, T, H]`.
        memory: encoder output `[B, S, H]`.
        mask: `[B, S]`, 1 for source tokens and 0 for padding.
        config: sizes.
        name: variable scope.

    Returns:
        Outputs and attention contexts, both `[B, T, H]`.
    """
    hidden, seed = config.hidden, config.seed
    with tf.variable_scope(name):
        gates = layers.dense(x, 4 * hidden, "input", seed=seed)
        kernel = recurrent_kernel(2 * hidden, config, "recurrent", x.dtype)
        keys = layers.dense(memory, hidden, "keys", use_bias=False, seed=seed)
        query = tf.convert_to_tensor(layers.normal_variable(
            "query", [hidden, hidden], layers.glorot_stddev(hidden, hidden), x.dtype, seed))
        score = tf.convert_to_tensor(layers.normal_variable("score", [hidden], hidden ** -0.5, x.dtype, seed))
        padding = (1.0 - mask) * -1e4

        def attend(output: tf.Tensor) -> tf.Tensor:
            """Context `[B, H]` for a decoder output `[B, H]` (paper, equation 4)."""
            energy = tf.tanh(keys + tf.expand_dims(tf.matmul(output, query), 1))  # [B, S, H]
            weights = tf.nn.softmax(tf.reduce_sum(energy * score, axis=2) + padding)  # [B, S]
            return tf.reduce_sum(tf.expand_dims(weights, 2) * memory, axis=1)

        def step(now: State, state: State) -> Tuple[State, State]:
            output, cell = state
            context = attend(output)
            recurrent = tf.matmul(tf.concat([output, context], axis=1), kernel)
            output, cell = lstm_step(now[0] + recurrent, cell)
            return (output, context), (output, cell)

        state = (zero_state(x, hidden), zero_state(x, hidden))
        outputs, contexts = scan(step, (gates,), state, [hidden, hidden])
        return outputs, contexts


def decoder_layer(x: tf.Tensor, contexts: tf.Tensor, config: GnmtConfig, index: int,
                  name: Optional[str] = None) -> tf.Tensor:
    """One upper decoder layer.

    Args:
        x: `[B, T, H]`.
        contexts: attention contexts `[B, T, H]`.
        config: sizes.
        index: index of the layer, from 1; from the third on the input is added.
        name: variable scope; "decoder_<index>" by default.

    Returns:
        `[B, T, H]`.
    """
    y = lstm(tf.concat([x, contexts], axis=2), None, config, name or f"decoder_{index}")
    return y + x if index >= 2 else y


def softmax(x: tf.Tensor, config: GnmtConfig, name: str = "softmax") -> tf.Tensor:
    """Output layer: `[B, T, H]` to logits `[B, T, V]`."""
    return layers.dense(x, config.vocab, name, seed=config.seed)


def build(batch: data.Seq2SeqBatch, config: GnmtConfig) -> layers.Model:
    """Whole model with weighted mean cross-entropy over the target.

    Args:
        batch: tensors of the shapes given at `data.Seq2SeqBatch`.
        config: sizes.

    Returns:
        Model with logits `[B, T, V]`.
    """
    memory = embed(batch.source, config, "source_tokens")
    for i in range(config.encoder_layers):
        memory = encoder_layer(memory, batch.source_mask, config, i)
    x, contexts = decoder_attention_layer(embed(batch.target, config, "target_tokens"), memory, batch.source_mask,
                                          config)
    for i in range(1, config.decoder_layers):
        x = decoder_layer(x, contexts, config, i)
    logits = softmax(x, config)
    return layers.Model(layers.weighted_cross_entropy(logits, batch.labels, batch.weights), logits, batch)
