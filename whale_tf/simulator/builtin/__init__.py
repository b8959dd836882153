"""Models that need nothing else at hand: name -> function of the micro-batch size."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Callable, Dict

from whale_tf.errors import PlanError, did_you_mean
from whale_tf.simulator.builtin.recommendation import dlrm
from whale_tf.simulator.builtin.transformers import transformer
from whale_tf.simulator.builtin.vision import inception_v3, mlp, resnet50, vgg19
from whale_tf.simulator.model_graph import ModelGraph


def _transformer(
    name: str, layers: int, hidden: int, heads: int, length: int, vocabulary: int, **options: object
) -> Callable[[int], ModelGraph]:
    return lambda batch: transformer(name, batch, layers, hidden, heads, length, vocabulary, **options)  # type: ignore


def _bert(layers: int, name: str = "") -> Callable[[int], ModelGraph]:
    """BERT with large blocks and ``layers`` of them; BERT-48 is DAPPLE's (640M parameters)."""
    return _transformer(name or f"bert-{layers}", layers, 1024, 16, 512, 30522, pre_norm=False)


def _moe(name: str, layers: int, experts: int, inner: int) -> Callable[[int], ModelGraph]:
    return _transformer(name, layers, 1024, 16, 512, 21128, inner=inner, experts=experts, precision="fp16", optimizer="adafactor")


MODELS: Dict[str, Callable[[int], ModelGraph]] = {
    "mlp": mlp,
    "vgg19": vgg19,
    "resnet50": resnet50,
    "resnet50-100k": partial(resnet50, classes=100_000, name="resnet50-100k"),
    "resnet50-1m": partial(resnet50, classes=1_000_000, name="resnet50-1m"),
    "inception_v3": inception_v3,
    "gpt2": _transformer("gpt2", 12, 768, 12, 1024, 50257),
    "gpt-1.5b": _transformer("gpt-1.5b", 48, 1600, 25, 1024, 50257),
    "bert-large": _bert(24, "bert-large"),
    "bert-48": _bert(48),
    "dlrm": dlrm,
    # Whale section 5.3.1: 24 encoder and 24 decoder layers, Adafactor; the width follows from 10B parameters
    "m6-10b": _transformer(
        "m6-10b",
        24,
        4096,
        32,
        512,
        21128,
        precision="fp16",
        optimizer="adafactor",
        decoder_layers=24,
        inner=13312,
        tied=False,
    ),
    # Whale section 5.3.2 gives the sizes 100B, 1T and 10T; depth, experts and inner width are the M6-T and M6-10T
    # papers'
    "m6-moe-100b": _moe("m6-moe-100b", 24, 512, 4096),
    "m6-moe-1t": _moe("m6-moe-1t", 24, 960, 21248),
    "m6-moe-10t": _moe("m6-moe-10t", 48, 10240, 9984),
}


@lru_cache(maxsize=64)
def built_in_model(name: str, batch: int) -> ModelGraph:
    """The model called ``name`` at a micro-batch of ``batch`` examples; ``bert-N`` is BERT with N large blocks.

    Raises:
        PlanError: unknown name, or a batch below 1.
    """
    if batch < 1:
        raise PlanError(f"a micro-batch has {batch} examples, expected at least 1")
    if name in MODELS:
        return MODELS[name](batch)
    if name.startswith("bert-") and name[5:].isdigit() and int(name[5:]) > 0:
        return _bert(int(name[5:]))(batch)
    raise PlanError(
        "unknown model {!r}; built-in models: {}.{}".format(name, ", ".join(sorted(MODELS)), did_you_mean(name, MODELS))
    )
