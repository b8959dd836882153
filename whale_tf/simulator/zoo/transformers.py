"""Transformers as layer tables: GPT-2, BERT, LLaMA, M6 and their mixture-of-experts variants.

A block has the ops of nine matrix products in the usual post- or pre-norm order.  Heads have their own dimension (``n``), so
that partitioning them is tensor parallelism without a reshape in between (Megatron's column and row splits).
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple, Union

from whale_tf.errors import PlanError, did_you_mean
from whale_tf.simulator.model_graph import Builder, ModelGraph, Optimizer


class Sizes(NamedTuple):
    """A transformer's sizes, which make one at a micro-batch size.

    Attributes:
        heads: None: of 64.
        kv_heads: heads of keys and values, each of which several query heads share (grouped heads); None: as many as heads.
        seq: tokens of an example.
        inner: width of the feed-forward layers; None: four times ``hidden``, or 8/3 of it, rounded up to 256, if they are gated.
        gated: SwiGLU, no biases, root-mean-square normalisation and rotary positions, as in LLaMA.
        predicted: positions that the loss covers; 0: all.
        dropout: whether blocks drop elements of their results and of attention's weights.
        erf: GELU by the error function; otherwise by tanh, as in BERT's released code.
    """

    layers: int
    hidden: int
    heads: Optional[int]
    seq: int
    vocabulary: int
    inner: Optional[int] = None
    kv_heads: Optional[int] = None
    pre_norm: bool = True
    tied: bool = True
    gated: bool = False
    precision: str = "fp32"
    optimizer: Union[str, Optimizer] = "adam"
    experts: int = 0
    decoder_layers: int = 0
    predicted: int = 0
    dropout: bool = True
    erf: bool = False

    @property
    def width(self) -> int:
        """Of the feed-forward layers."""
        if self.inner is not None:
            return self.inner
        return -(-8 * self.hidden // 3 // 256) * 256 if self.gated else 4 * self.hidden



ARGUMENTS: Mapping[str, int] = {  # what may be given by name, with the largest value
    "layers": 2048, "hidden": 2**18, "heads": 4096, "kv_heads": 4096, "seq": 2**20, "vocabulary": 10**8, "inner": 2**20,
    "experts": 2**16, "decoder_layers": 2048}


def with_arguments(name: str, sizes: Sizes, text: str) -> Sizes:
    """The sizes changed as ``layers=24,hidden=2048`` says.  Heads keep their size unless their number is given.

    Raises:
        PlanError: an unknown argument, a value out of range, or heads that do not divide what they must.
    """
    given: Dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if key not in ARGUMENTS:
            raise PlanError("model {!r} is given {!r}, expected {}=NUMBER.{}".format(
                name, part.strip(), "=NUMBER, ".join(ARGUMENTS), did_you_mean(key, ARGUMENTS)))
        least = 0 if key in ("experts", "decoder_layers") else 1
        if not equals or not value.isdecimal() or len(value) > 9 or not least <= int(value) <= ARGUMENTS[key]:
            raise PlanError(f"model {name!r}: {key} is {value!r:.40}, expected a whole number from {least} to {ARGUMENTS[key]:,}")
        given[key] = int(value)
    size = sizes.hidden // (sizes.heads or max(1, sizes.hidden // 64))
    changed = sizes._replace(**given)
    if "heads" not in given:
        changed = changed._replace(heads=max(1, changed.hidden // size))
    if "hidden" in given and "inner" not in given:
        changed = changed._replace(inner=None)
    if "heads" in given and "kv_heads" not in given or changed.kv_heads is None:
        changed = changed._replace(kv_heads=None)
    heads, groups = changed.heads or 1, changed.kv_heads or changed.heads or 1
    if changed.hidden % heads or heads % groups:
        raise PlanError(f"model {name!r} has {heads} heads and {groups} heads of keys and values for a hidden size of "
                        f"{changed.hidden}; the second must divide the first, and that the hidden size")
    if changed.predicted > changed.seq:
        changed = changed._replace(predicted=changed.seq)
    return changed


def _grouped_attention(b: Builder, x: int, heads: int, groups: int) -> int:
    """Self-attention in which ``groups`` heads of keys and values serve all ``heads`` queries, with rotary positions."""
    hidden = int(b.tensors[x].shape[-1])
    size, each = hidden // heads, heads // groups
    query_w = b.parameter("query_w", "h g r e", (hidden, groups, each, size))
    query = b.op("query", "matmul", "b s h, h g r e -> b s g r e", (x, query_w), split="g")
    query = b.pointwise("query_rotary", "scale", query, flops=3.0)
    parts = []
    for name in ("key", "value"):
        weight = b.parameter(name + "_w", "h g e", (hidden, groups, size))
        parts.append(b.op(name, "matmul", "b t h, h g e -> b t g e", (x, weight), split="g"))
    key, value = b.pointwise("key_rotary", "scale", parts[0], flops=3.0), parts[1]
    scores = b.op("scores", "matmul", "b s g r e, b t g e -> b g r s t", (query, key))
    scores = b.pointwise("scale_mask", "scale", scores, flops=2.0)
    weights = b.pointwise("softmax", "softmax", scores, flops=5.0, whole=("t",))
    context = b.op("context", "matmul", "b g r s t, b t g e -> b s g r e", (weights, value))
    weight = b.parameter("projection_w", "g r e o", (groups, each, size, hidden))
    return b.op("projection", "matmul", "b s g r e, g r e o -> b s o", (context, weight), split="g")


def _gated_feed_forward(b: Builder, x: int, inner: int) -> int:
    """SwiGLU."""
    hidden = int(b.tensors[x].shape[-1])
    parts = []
    for name in ("gate", "expand"):
        weight = b.parameter(name + "_w", "h f", (hidden, inner))
        parts.append(b.op(name, "matmul", "b s h, h f -> b s f", (x, weight), split="f"))
    gate = b.pointwise("swish", "activation", parts[0], flops=5.0)
    y = b.op("product", "multiply", "b s f, b s f -> b s f", (gate, parts[1]), float(b.tensors[gate].size))
    weight = b.parameter("contract_w", "f o", (inner, hidden))
    return b.op("contract", "matmul", "b s f, f o -> b s o", (y, weight), split="f")


def _attention(b: Builder, x: int, heads: int, sizes: Sizes, memory: Optional[int] = None) -> int:
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
    weights = _dropped(b, weights, sizes, "weights_dropout")
    context = b.op("context", "matmul", "b n s t, b t n e -> b s n e", (weights, value))
    assert length == int(b.tensors[value].shape[1])
    weight = b.parameter("projection_w", "n e o", (heads, size, hidden))
    y = b.op("projection", "matmul", "b s n e, n e o -> b s o", (context, weight), split="n")
    return _dropped(b, b.bias("projection_bias", y), sizes)


def _dropped(b: Builder, x: int, sizes: Sizes, name: str = "dropout") -> int:
    return b.pointwise(name, "dropout", x, mask=True) if sizes.dropout else x


def _feed_forward(b: Builder, x: int, inner: int, sizes: Sizes) -> int:
    hidden = int(b.tensors[x].shape[-1])
    weight = b.parameter("expand_w", "h f", (hidden, inner))
    y = b.bias("expand_bias", b.op("expand", "matmul", "b s h, h f -> b s f", (x, weight), split="f"))
    y = b.pointwise("gelu", "erf" if sizes.erf else "activation", y, flops=8.0)
    weight = b.parameter("contract_w", "f o", (inner, hidden))
    y = b.bias("contract_bias", b.op("contract", "matmul", "b s f, f o -> b s o", (y, weight), split="f"))
    return _dropped(b, y, sizes)


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


def _embedding(b: Builder, prefix: str, sizes: Sizes) -> Tuple[int, int]:
    """The embedded tokens, and the table of tokens, which is alone in its layer so that the head can share it."""
    hidden, length = sizes.hidden, sizes.seq
    with b.scope(prefix + "embedding"):
        x, table = look_up(b, hidden, length, sizes.vocabulary)
    with b.scope(prefix + "positions"):
        positions = b.parameter("positions", "s h", (length, hidden))
        x = b.op("add_positions", "bias", "b s h, s h -> b s h", (x, positions), float(b.tensors[x].size))
        return _dropped(b, x, sizes), table


def look_up(b: Builder, hidden: int, length: int, vocabulary: int) -> Tuple[int, int]:
    ids = b.input("ids", "b s", (b.batch, length))
    table = b.parameter("tokens", "v h", (vocabulary, hidden))
    return b.op("lookup", "embedding", "b s, v h -> b s h", (ids, table), float(b.batch * length * hidden), split="v"), table


def token_loss(b: Builder, x: int, vocabulary: int, table: Optional[int]) -> None:
    hidden = int(b.tensors[x].shape[-1])
    if table is None:
        table = b.parameter("w", "v h", (vocabulary, hidden))
    logits = b.op("logits", "matmul", "b s h, v h -> b s v", (x, table), split="v")
    b.op("loss", "loss", "b s v -> b s", (logits,), 6.0 * b.tensors[logits].size)


def _gated_block(b: Builder, x: int, sizes: Sizes) -> int:
    heads = sizes.heads or max(1, sizes.hidden // 64)
    with b.scope("attention"):
        x = b.add("residual", x, _grouped_attention(b, b.layer_norm("norm", x), heads, sizes.kv_heads or heads))
    with b.scope("feed_forward"):
        return b.add("residual", x, _gated_feed_forward(b, b.layer_norm("norm", x), sizes.width))


def block(b: Builder, x: int, sizes: Sizes, memory: Optional[int] = None, experts: int = 0,
           capacity_factor: float = 1.25, top_k: int = 1) -> int:
    heads, inner, pre_norm = sizes.heads or max(1, sizes.hidden // 64), sizes.width, sizes.pre_norm

    def residual(name: str, value: int, layer) -> int:  # type: ignore[no-untyped-def]
        with b.scope(name):
            y = layer(b.layer_norm("norm", value) if pre_norm else value)
            y = b.add("residual", value, y)
            return y if pre_norm else b.layer_norm("norm", y)

    x = residual("attention", x, lambda y: _attention(b, y, heads, sizes))
    if memory is not None:
        source = memory
        x = residual("cross_attention", x, lambda y: _attention(b, y, heads, sizes, source))
    if experts:
        return residual("experts", x, lambda y: _experts(b, y, inner, experts, capacity_factor, top_k))
    return residual("feed_forward", x, lambda y: _feed_forward(b, y, inner, sizes))


def transformer(name: str, batch: int, *sizes: Any, **more: Any) -> ModelGraph:
    """The model of these :class:`Sizes`."""
    return of_sizes(name, batch, Sizes(*sizes, **more))


def of_sizes(name: str, batch: int, sizes: Sizes) -> ModelGraph:
    """A stack of equal blocks over tokens, with a loss over the vocabulary at every position.

    If there are ``decoder_layers``, these blocks with cross-attention follow those of the encoder.
    """
    b = Builder(name, batch, sizes.precision, sizes.optimizer)
    hidden, length, vocabulary = sizes.hidden, sizes.seq, sizes.vocabulary
    if sizes.gated:
        with b.scope("embedding"):
            x, table = look_up(b, hidden, length, vocabulary)
    else:
        x, table = _embedding(b, "", sizes)
    for layer in range(sizes.layers):
        with b.scope(f"block{layer}"):
            x = _gated_block(b, x, sizes) if sizes.gated else block(b, x, sizes, experts=sizes.experts)
    if sizes.decoder_layers:
        memory = x
        x, table = _embedding(b, "decoder_", sizes)
        for layer in range(sizes.decoder_layers):
            with b.scope(f"decoder_block{layer}"):
                x = block(b, x, sizes, memory, sizes.experts)
    if sizes.pre_norm:
        with b.scope("final_norm"):
            x = b.layer_norm("norm", x)
    with b.scope("head"):
        if sizes.predicted:
            x = b.op("gather", "concat", "b s h -> b t h", (x,), float(b.batch * sizes.predicted * hidden), whole=("s", "t"),
                     sizes={"t": sizes.predicted})
        token_loss(b, x, vocabulary, table if sizes.tied else None)
    return b.graph()
