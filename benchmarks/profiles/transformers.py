"""Layer tables of sequence models: transformers, mixtures of experts and recurrent networks; float32, per sample.

Ops are counted as TensorFlow 1 runs them, each element-wise op as a kernel.  A "pass" is one read or write of a tensor.
"""
from __future__ import annotations

from dataclasses import replace
from typing import List, Optional

from whale_tf.profiler.model_profile import LayerProfile

FLOAT = 4  # bytes

# Shares of the peak rate: cuBLAS float32 products of these sizes reach 70 to 85% of it; cuDNN's LSTM kernels, whose
# recurrent products have only as many rows as the batch, reach about 60%.
MATMUL_UTILIZATION = 0.75
LSTM_UTILIZATION = 0.6

# Passes of the element-wise ops of one transformer layer: on the hidden size, bias, dropout, residual addition and normalisation
# after both halves, and the transposes around attention; on the inner size of the feed-forward half, bias and GELU; on the
# attention weights, scale, mask, softmax and dropout.
HIDDEN_PASSES, INNER_PASSES, WEIGHT_PASSES = 38, 10, 11
# Tensors kept for the backward pass: inputs, Q, K, V, context, normalisations and dropout masks; those around GELU; softmax,
# mask and dropped weights.
HIDDEN_KEPT, INNER_KEPT, WEIGHTS_KEPT = 10, 2, 3


def transformer(name: str, tokens: int, hidden: int, inner: int, heads: int, extra_output: int = 0,
                span: Optional[int] = None) -> LayerProfile:
    """One encoder or decoder layer (Vaswani et al. 2017).  ``extra_output``: bytes that are passed on with the hidden states;
    ``span``: number of tokens to which each token attends (default: all)."""
    span = tokens if span is None else span
    weights = heads * span  # attention weights of one token
    parameters = 4 * hidden * (hidden + 1) + 2 * hidden * inner + inner + hidden + 4 * hidden
    flops = 2.0 * tokens * (4 * hidden * hidden + 2 * hidden * inner) + 4.0 * tokens * span * hidden
    traffic = FLOAT * tokens * (HIDDEN_PASSES * hidden + INNER_PASSES * inner + WEIGHT_PASSES * weights)
    kept = FLOAT * tokens * (HIDDEN_KEPT * hidden + INNER_KEPT * inner + WEIGHTS_KEPT * weights)
    return LayerProfile(
        name=name, forward_flops=flops, traffic_bytes=traffic, utilization=MATMUL_UTILIZATION,
        parameter_bytes=FLOAT * parameters, output_bytes=FLOAT * tokens * hidden + extra_output, activation_bytes=kept,
        tensor_parallel_bytes=2 * FLOAT * tokens * hidden)  # one sum after each half (Shoeybi et al. 2019, section 3)


def relative_transformer(name: str, tokens: int, hidden: int, inner: int, heads: int) -> LayerProfile:
    """One XLNet layer (Yang et al. 2019, section 2.5): attention also scores 2 S relative positions."""
    plain = transformer(name, tokens, hidden, inner, heads)
    positions = 2 * tokens
    flops = 2.0 * positions * hidden * hidden + 2.0 * tokens * positions * hidden
    weights = heads * positions
    return replace(
        plain, forward_flops=plain.forward_flops + flops,
        traffic_bytes=plain.traffic_bytes + FLOAT * tokens * 7 * weights,  # scores, shift, sum
        parameter_bytes=plain.parameter_bytes + FLOAT * (hidden * hidden + 2 * hidden),
        activation_bytes=plain.activation_bytes + FLOAT * tokens * 2 * weights)


def mixture(name: str, tokens: int, hidden: int, inner: int, heads: int, experts: int) -> LayerProfile:
    """A transformer layer whose feed-forward half is a mixture of experts, with two experts for each token (GShard)."""
    plain = transformer(name, tokens, hidden, inner, heads)
    expert = 2 * hidden * inner + inner + hidden
    flops = 2.0 * tokens * (2 * hidden * inner + hidden * experts) + 2 * 2.0 * tokens * 2 * hidden * 2  # second expert, gate
    return replace(
        plain, forward_flops=plain.forward_flops + flops,
        traffic_bytes=plain.traffic_bytes + FLOAT * tokens * (INNER_PASSES * inner + 8 * hidden),
        parameter_bytes=plain.parameter_bytes + FLOAT * ((experts - 1) * expert + hidden * experts),
        activation_bytes=plain.activation_bytes + FLOAT * tokens * (INNER_KEPT * inner + 4 * hidden))


def embedding(name: str, tokens: int, hidden: int, rows: int, extra_output: int = 0, tied: Optional[str] = None,
              normalised: bool = True) -> LayerProfile:
    """Look-up in ``rows`` embeddings (words, positions and segments together), normalisation and dropout."""
    return LayerProfile(
        name=name, traffic_bytes=FLOAT * tokens * hidden * 12, parameter_bytes=FLOAT * hidden * (rows + 2 * normalised),
        output_bytes=FLOAT * tokens * hidden + extra_output, activation_bytes=FLOAT * tokens * hidden * 3, tied=tied,
        tensor_parallel_bytes=FLOAT * tokens * hidden)


def projection(name: str, tokens: int, hidden: int, classes: int, tied: Optional[str] = None) -> LayerProfile:
    """Logits over ``classes`` for every token and their softmax cross-entropy."""
    return LayerProfile(
        name=name, forward_flops=2.0 * tokens * hidden * classes, traffic_bytes=FLOAT * tokens * classes * 4,
        utilization=MATMUL_UTILIZATION, parameter_bytes=FLOAT * (hidden * classes + (0 if tied else classes)),
        activation_bytes=FLOAT * tokens * (hidden + 2 * classes), tied=tied, output_bytes=FLOAT * tokens,
        tensor_parallel_bytes=FLOAT * tokens * hidden)


def nothing(name: str, output_bytes: int = 0) -> LayerProfile:
    """A layer that only passes tensors on: an input, or a loss too small to count."""
    return LayerProfile(name=name, output_bytes=output_bytes)


def lstm(name: str, tokens: int, inputs: int, hidden: int, output_bytes: int, directions: int = 1) -> LayerProfile:
    """One LSTM layer over a sequence (Hochreiter and Schmidhuber 1997): four gates on input and state."""
    gates = 4 * hidden * (inputs + hidden) * directions
    return LayerProfile(
        name=name, forward_flops=2.0 * tokens * gates, traffic_bytes=FLOAT * tokens * 6 * hidden * directions,
        utilization=LSTM_UTILIZATION, parameter_bytes=FLOAT * (gates + 4 * hidden * directions), output_bytes=output_bytes,
        activation_bytes=FLOAT * tokens * (inputs + 7 * hidden * directions))


def with_attention(layer: LayerProfile, tokens: int, hidden: int) -> LayerProfile:
    """The layer with GNMT's attention to the encoder's states: two projections, scores and a weighted sum."""
    return replace(
        layer, forward_flops=layer.forward_flops + 2.0 * tokens * 2 * hidden * hidden + 4.0 * tokens * tokens * hidden,
        traffic_bytes=layer.traffic_bytes + FLOAT * tokens * tokens * hidden * 3,
        parameter_bytes=layer.parameter_bytes + FLOAT * (2 * hidden * hidden + 2 * hidden),
        activation_bytes=layer.activation_bytes + FLOAT * tokens * tokens * hidden)


def cross_attending(layer: LayerProfile, tokens: int, source: int, hidden: int, heads: int) -> LayerProfile:
    """A decoder layer with attention to the ``source`` states of an encoder, which are passed on along with its own."""
    weights = heads * source
    flops = 2.0 * (2 * tokens + 2 * source) * hidden * hidden + 4.0 * tokens * source * hidden
    third = HIDDEN_PASSES // 3  # a layer has three parts, and this is one more
    kept = tokens * (5 * hidden + WEIGHTS_KEPT * weights) + 2 * source * hidden
    return replace(
        layer, forward_flops=layer.forward_flops + flops,
        traffic_bytes=layer.traffic_bytes + FLOAT * tokens * (third * hidden + WEIGHT_PASSES * weights),
        parameter_bytes=layer.parameter_bytes + FLOAT * (4 * hidden * (hidden + 1) + 2 * hidden),
        activation_bytes=layer.activation_bytes + FLOAT * kept,
        output_bytes=layer.output_bytes + FLOAT * source * hidden)


def t5(layers: int, source: int, target: int, hidden: int, inner: int, heads: int, vocab: int) -> List[LayerProfile]:
    """T5 (Raffel et al. 2020): as many encoder as decoder layers, and one table of words for both and the projection."""
    encoder = [transformer(f"encoder_{i}", source, hidden, inner, heads) for i in range(layers)]
    decoder = [cross_attending(transformer(f"decoder_{i}", target, hidden, inner, heads), target, source, hidden, heads)
               for i in range(layers)]
    words = embedding("source_embedding", source, hidden, vocab, tied="words", normalised=False)
    again = embedding("target_embedding", target, hidden, vocab, FLOAT * source * hidden, tied="words", normalised=False)
    return [words] + encoder + [again] + decoder + [projection("projection", target, hidden, vocab, tied="words")]


def bert(layers: int, tokens: int, hidden: int, heads: int, vocab: int) -> List[LayerProfile]:
    """BERT (Devlin et al. 2018) with a question-answering head.  Each layer also passes on the attention mask [S, S], because the
    released code builds it once."""
    mask = FLOAT * tokens * tokens
    body = [transformer(f"layer_{i}", tokens, hidden, 4 * hidden, heads, mask) for i in range(layers)]
    head = LayerProfile(
        name="head", forward_flops=2.0 * hidden * hidden + 4.0 * tokens * hidden, output_bytes=FLOAT * 2 * tokens,
        parameter_bytes=FLOAT * (hidden * hidden + 3 * hidden + 2), activation_bytes=FLOAT * tokens * 2)
    words = vocab + 512 + 2  # words, positions, segments
    return ([nothing("input", FLOAT * 3 * tokens), embedding("embeddings", tokens, hidden, words, mask)] + body + [head])


def xlnet(layers: int, tokens: int, hidden: int, heads: int, vocab: int) -> List[LayerProfile]:
    """XLNet (Yang et al. 2019) for question answering, without a second attention stream."""
    width = FLOAT * tokens * hidden
    head = [nothing("input", FLOAT * 4 * tokens), nothing("mask", FLOAT * tokens * tokens)]
    body = [relative_transformer(f"layer_{i}", tokens, hidden, 4 * hidden, heads) for i in range(layers)]
    return head + [embedding("embeddings", tokens, hidden, vocab, normalised=False), nothing("segments", width),
                   nothing("dropout", width)] + body + [nothing("loss", FLOAT)]


def gnmt(tokens: int, hidden: int, vocab: int) -> List[LayerProfile]:
    """GNMT (Wu et al. 2016): 8 encoder LSTM layers, the first bidirectional; 8 decoder layers, the first with attention, whose
    context goes to all others.  So decoder layers read 2 x hidden and pass on hidden states and context."""
    width = FLOAT * tokens * hidden
    inputs = [hidden, 2 * hidden] + [hidden] * 6
    encoder = [lstm(f"encoder_{i}", tokens, size, hidden, 2 * width if i == 0 else width, 2 if i == 0 else 1)
               for i, size in enumerate(inputs)]
    decoder = [lstm(f"decoder_{i}", tokens, 2 * hidden, hidden, 2 * width) for i in range(8)]
    decoder[0] = with_attention(decoder[0], tokens, hidden)
    source = embedding("source_embedding", tokens, hidden, vocab, normalised=False)
    target = embedding("target_embedding", tokens, hidden, vocab, extra_output=width, normalised=False)
    return [source] + encoder + [target] + decoder + [projection("classifier", tokens, hidden, vocab)]


def gpt(layers: int, tokens: int, hidden: int, heads: int, vocab: int) -> List[LayerProfile]:
    """A decoder like GPT-2 and GPT-3; the projection shares the word embedding, as in both papers' code."""
    body = [transformer(f"layer_{i}", tokens, hidden, 4 * hidden, heads) for i in range(layers)]
    words = LayerProfile(name="position_embedding", parameter_bytes=FLOAT * tokens * hidden,
                         traffic_bytes=FLOAT * tokens * hidden * 3, output_bytes=FLOAT * tokens * hidden)
    return ([embedding("word_embedding", tokens, hidden, vocab, tied="words", normalised=False), words] + body
            + [projection("projection", tokens, hidden, vocab, tied="words")])


def moe(layers: int, tokens: int, hidden: int, inner: int, heads: int, experts: int, vocab: int) -> List[LayerProfile]:
    """GShard (Lepikhin et al. 2020): every other layer is a mixture of experts."""
    body = [mixture(f"layer_{i}", tokens, hidden, inner, heads, experts) if i % 2 else
            transformer(f"layer_{i}", tokens, hidden, inner, heads) for i in range(layers)]
    return ([embedding("word_embedding", tokens, hidden, vocab + tokens, tied="words", normalised=False)] + body
            + [projection("projection", tokens, hidden, vocab + tokens, tied="words")])
