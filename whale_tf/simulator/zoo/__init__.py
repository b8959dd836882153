"""The built-in models that are defined by ops (:data:`MODELS`), which the simulator reads.

Planners read the layers of all models from JSON (``whale_tf/profiler/builtin``).  ``benchmarks/profiles`` makes it of these ops,
and of what papers say about the layers of their models.  :func:`~whale_tf.simulator.layered.layered_model` makes ops of layers.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Callable, Dict, NamedTuple

from whale_tf.errors import PlanError, did_you_mean
from whale_tf.profiler.model_profile import builtin_names
from whale_tf.simulator.model_graph import ModelGraph
from whale_tf.simulator.zoo.recommendation import dlrm
from whale_tf.simulator.zoo.transformers import transformer
from whale_tf.simulator.zoo.vision import inception_v3, mlp, resnet50, vgg19


class Model(NamedTuple):
    """A model that is defined by ops.

    Attributes:
        build: a function of the micro-batch size.
        source: where its sizes come from.
        batch: the mini-batch size at which the times of its layers are fitted.
        is_sparse: gradients cover only the rows that were looked up; layers cannot express this, so planners do not know the
            model.
    """

    build: Callable[[int], ModelGraph]
    source: str
    batch: int = 8
    is_sparse: bool = False


def _transformer(name: str, layers: int, hidden: int, heads: int, length: int, vocabulary: int,
                 **options: object) -> Callable[[int], ModelGraph]:
    return lambda batch: transformer(name, batch, layers, hidden, heads, length, vocabulary, **options)  # type: ignore


def _bert(layers: int, name: str = "") -> Callable[[int], ModelGraph]:
    """BERT with ``layers`` large blocks; BERT-48 is DAPPLE's (640M parameters)."""
    return _transformer(name or f"bert-{layers}", layers, 1024, 16, 512, 30522, pre_norm=False)


def _moe(name: str, layers: int, experts: int, inner: int) -> Callable[[int], ModelGraph]:
    return _transformer(name, layers, 1024, 16, 512, 21128, inner=inner, experts=experts, precision="fp16", optimizer="adafactor")


BERT = "Devlin et al. 2018: blocks of 1,024, S 512, vocabulary at every position"
MOE = "Whale section 5.3.2; depth, experts and inner width: the M6-T and M6-10T papers"
WIDE = "Whale Figures 13 and 14: ResNet-50 with a wide classifier"
MODELS: Dict[str, Model] = {
    "mlp": Model(mlp, "four dense layers of 1,024"),
    "vgg-19": Model(vgg19, "Simonyan and Zisserman 2014, configuration E, 224 x 224", 32),
    "resnet-50": Model(resnet50, "He et al. 2015, 224 x 224, stride in the 3x3 convolution", 32),
    "resnet-50-100k": Model(partial(resnet50, classes=100_000, name="resnet-50-100k"), WIDE, 32),
    "resnet-50-1m": Model(partial(resnet50, classes=1_000_000, name="resnet-50-1m"), WIDE, 32),
    "inception-v3": Model(inception_v3, "Szegedy et al. 2015, 299 x 299, without the auxiliary head", 32),
    "gpt2": Model(_transformer("gpt2", 12, 768, 12, 1024, 50257), "Radford et al. 2019: the smallest, S 1,024"),
    "gpt-1.5b": Model(_transformer("gpt-1.5b", 48, 1600, 25, 1024, 50257), "Radford et al. 2019: the largest, S 1,024"),
    "bert-base": Model(
        _transformer("bert-base", 12, 768, 12, 128, 30522, pre_norm=False, predicted=20, optimizer="lamb"),
        "Devlin et al. 2018: base, first phase of its pre-training: S 128, 20 positions predicted; LAMB", 32),
    "bert-large": Model(_bert(24, "bert-large"), BERT),
    "bert-48": Model(_bert(48), BERT),
    "dlrm": Model(dlrm, "FlexFlow's configuration: 8 tables of a million rows", is_sparse=True),
    "m6-10b": Model(
        _transformer("m6-10b", 24, 4096, 32, 512, 21128, precision="fp16", optimizer="adafactor", decoder_layers=24,
                     inner=13312, tied=False),
        "Whale section 5.3.1: 24 encoder and 24 decoder layers, Adafactor; the width follows from 10B parameters"),
    "m6-moe-100b": Model(_moe("m6-moe-100b", 24, 512, 4096), MOE),
    "m6-moe-1t": Model(_moe("m6-moe-1t", 24, 960, 21248), MOE),
    "m6-moe-10t": Model(_moe("m6-moe-10t", 48, 10240, 9984), MOE),
}


def model_names() -> Dict[str, bool]:
    """Every built-in model -> whether planners know its layers."""
    return {name: name in builtin_names() for name in sorted({*MODELS, *builtin_names()})}


def is_defined_by_ops(name: str) -> bool:
    """Whether :func:`built_in_model` knows the model."""
    return name in MODELS or _blocks_of_bert(name) > 0


def source_of(name: str) -> str:
    """Where the sizes of a model of ops come from."""
    return MODELS[name].source if name in MODELS else BERT


def _blocks_of_bert(name: str) -> int:
    """The number of blocks in ``bert-N``; 0: it is not such a name."""
    number = name[5:] if name.startswith("bert-") else ""
    return int(number) if number.isdigit() else 0


@lru_cache(maxsize=64)
def built_in_model(name: str, batch: int) -> ModelGraph:
    """The ops of the model called ``name`` at a micro-batch of ``batch`` examples; ``bert-N`` is BERT with N large blocks.

    Raises:
        PlanError: an unknown name, a model that is defined by layers, or a batch below 1.
    """
    if batch < 1:
        raise PlanError(f"a micro-batch has {batch} examples, expected at least 1")
    if name in MODELS:
        return MODELS[name].build(batch)
    if _blocks_of_bert(name):
        return _bert(_blocks_of_bert(name))(batch)
    if name in builtin_names():
        raise PlanError(f"model {name!r} is defined by layers; use layered_model(ModelProfile.parse({name!r}), {batch}) with a "
                        f"LayerEstimator, or `whale simulate --model {name}`")
    raise PlanError(
        "unknown model {!r}; built-in models: {}.{}".format(name, ", ".join(model_names()), did_you_mean(name, model_names())))
