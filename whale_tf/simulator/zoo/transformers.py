"""Transformers as layer tables: GPT-2, BERT, M6 and their mixture-of-experts variants.

A block has the ops of nine matrix products in the usual post- or pre-norm order.  Heads have their own dimension (``n``), so
that partitioning them is tensor parallelism without a reshape in between (Megatron's column and row splits).
"""

from __future__ import annotations

from typing import Optional, Tuple, Union

from whale_tf.simulator.model_graph import Builder, ModelGraph, Optimizer


def _attention(b: Builder, x: int, heads: int, memory: Optional[int] = None) -> int:
    """Self-attention over ``x`` (b s h), or attention to ``memory`` (b t h)."""
    hidden = int(b.tensors[x].shape[-1])
    size = hidden // heads
    length = int(b.tensors[memory if memory is not None else x].shape[1])
    parts = []
    for name, source in (("query", x), ("key", memory), ("value", memory)):
        weight = b.parameter(name + "_w", "h n e", (hidden, heads, size))
        y = b.op(name, "matmul", "b s h, h n e -> b s n e", (x if source is None else source, weight), split="n")
        parts.append(b.bias(name + "_bias", y, axes=2))
    query, key, value = parts
    scores = b.op("scores", "matmul", "b s n e, b t n e -> b n s t", (query, key))
    scores = b.pointwise("scale_mask", "scale", scores, flops=2.0)
    weights = b.pointwise("softmax", "softmax", scores, flops=5.0, whole=("t",))
    weights = b.pointwise("weights_dropout", "dropout", weights, mask=True)
    context = b.op("context", "matmul", "b n s t, b t n e -> b s n e", (weights, value))
    assert length == int(b.tensors[value].shape[1])
    weight = b.parameter("projection_w", "n e o", (heads, size, hidden))
    y = b.op("projection", "matmul", "b s n e, n e o -> b s o", (context, weight), split="n")
    return b.pointwise("dropout", "dropout", b.bias("projection_bias", y), mask=True)


def _feed_forward(b: Builder, x: int, inner: int) -> int:
    hidden = int(b.tensors[x].shape[-1])
    weight = b.parameter("expand_w", "h f", (hidden, inner))
    y = b.bias("expand_bias", b.op("expand", "matmul", "b s h, h f -> b s f", (x, weight), split="f"))
    y = b.pointwise("gelu", "activation", y, flops=8.0)
    weight = b.parameter("contract_w", "f o", (inner, hidden))
    y = b.bias("contract_bias", b.op("contract", "matmul", "b s f, f o -> b s o", (y, weight), split="f"))
    return b.pointwise("dropout", "dropout", y, mask=True)


def _experts(b: Builder, x: int, inner: int, experts: int, capacity_factor: float, top_k: int) -> int:
    """A mixture of experts (Whale section 5.3.2): tokens go to the devices of their experts and come back.

    Dimension ``k`` is the average number of slots that one example has at one expert.
    """
    hidden, length = int(b.tensors[x].shape[-1]), b.tensors[x].shape[1]
    gate_w = b.parameter("gate_w", "h e", (hidden, experts))
    gates = b.op("gate", "matmul", "b s h, h e -> b s e", (x, gate_w))
    gates = b.pointwise("gate_softmax", "softmax", gates, flops=5.0, whole=("e",))
    slots = length * top_k * capacity_factor / experts
    moved = b.batch * length * top_k * capacity_factor * hidden
    y = b.op("dispatch", "concat", "b s h, b s e -> e b k h", (x, gates), moved, whole=("s", "e", "k"), sizes={"k": slots})
    weight = b.parameter("expand_w", "e h f", (experts, hidden, inner))
    y = b.op("expand", "matmul", "e b k h, e h f -> e b k f", (y, weight), split="e")
    y = b.pointwise("gelu", "activation", y, flops=8.0)
    weight = b.parameter("contract_w", "e f o", (experts, inner, hidden))
    y = b.op("contract", "matmul", "e b k f, e f o -> e b k o", (y, weight), split="e")
    return b.op("combine", "concat", "e b k o, b s e -> b s o", (y, gates), 2.0 * moved, whole=("s", "e", "k"))


def _embedding(b: Builder, prefix: str, hidden: int, length: int, vocabulary: int) -> Tuple[int, int]:
    """The embedded tokens, and the table of tokens, which is alone in its layer so that the head can share it."""
    with b.scope(prefix + "embedding"):
        x, table = _look_up(b, hidden, length, vocabulary)
    with b.scope(prefix + "positions"):
        positions = b.parameter("positions", "s h", (length, hidden))
        x = b.op("add_positions", "bias", "b s h, s h -> b s h", (x, positions), float(b.tensors[x].size))
        return b.pointwise("dropout", "dropout", x, mask=True), table


def _look_up(b: Builder, hidden: int, length: int, vocabulary: int) -> Tuple[int, int]:
    ids = b.input("ids", "b s", (b.batch, length))
    table = b.parameter("tokens", "v h", (vocabulary, hidden))
    return b.op("lookup", "embedding", "b s, v h -> b s h", (ids, table), float(b.batch * length * hidden), split="v"), table


def _token_loss(b: Builder, x: int, vocabulary: int, table: Optional[int]) -> None:
    hidden = int(b.tensors[x].shape[-1])
    if table is None:
        table = b.parameter("w", "v h", (vocabulary, hidden))
    logits = b.op("logits", "matmul", "b s h, v h -> b s v", (x, table), split="v")
    b.op("loss", "loss", "b s v -> b s", (logits,), 6.0 * b.tensors[logits].size)


def _block(b: Builder, x: int, heads: int, inner: int, pre_norm: bool, memory: Optional[int] = None, experts: int = 0,
           capacity_factor: float = 1.25, top_k: int = 1) -> int:
    def residual(name: str, value: int, layer) -> int:  # type: ignore[no-untyped-def]
        with b.scope(name):
            y = layer(b.layer_norm("norm", value) if pre_norm else value)
            y = b.add("residual", value, y)
            return y if pre_norm else b.layer_norm("norm", y)

    x = residual("attention", x, lambda y: _attention(b, y, heads))
    if memory is not None:
        source = memory
        x = residual("cross_attention", x, lambda y: _attention(b, y, heads, source))
    if experts:
        return residual("experts", x, lambda y: _experts(b, y, inner, experts, capacity_factor, top_k))
    return residual("feed_forward", x, lambda y: _feed_forward(b, y, inner))


def transformer(name: str, batch: int, layers: int, hidden: int, heads: int, length: int, vocabulary: int,
                inner: Optional[int] = None, pre_norm: bool = True, tied: bool = True, precision: str = "fp32",
                optimizer: Union[str, Optimizer] = "adam", experts: int = 0, decoder_layers: int = 0,
                predicted: int = 0) -> ModelGraph:
    """A stack of equal blocks over tokens, with a loss over the vocabulary at every position.

    ``decoder_layers`` > 0: this many blocks with cross-attention follow those of the encoder.  ``predicted`` > 0: the loss covers
    this many positions, as in BERT's pre-training.
    """
    b = Builder(name, batch, precision, optimizer)
    inner = inner or 4 * hidden
    x, table = _embedding(b, "", hidden, length, vocabulary)
    for layer in range(layers):
        with b.scope(f"block{layer}"):
            x = _block(b, x, heads, inner, pre_norm, experts=experts)
    if decoder_layers:
        memory = x
        x, table = _embedding(b, "decoder_", hidden, length, vocabulary)
        for layer in range(decoder_layers):
            with b.scope(f"decoder_block{layer}"):
                x = _block(b, x, heads, inner, pre_norm, memory, experts)
    if pre_norm:
        with b.scope("final_norm"):
            x = b.layer_norm("norm", x)
    with b.scope("head"):
        if predicted:
            x = b.op("gather", "concat", "b s h -> b t h", (x,), float(b.batch * predicted * hidden), whole=("s", "t"),
                     sizes={"t": predicted})
        _token_loss(b, x, vocabulary, table if tied else None)
    return b.graph()
