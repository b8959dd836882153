"""The built-in models that are defined by ops (:data:`MODELS`), which the simulator reads.

Planners read the layers of all models from JSON (``whale_tf/profiler/builtin``).  ``benchmarks/profiles`` makes it of these ops,
and of what papers say about the layers of their models.  :func:`~whale_tf.simulator.layered.layered_model` makes ops of layers.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Callable, Dict, NamedTuple, Optional, Union

from whale_tf.errors import PlanError, did_you_mean
from whale_tf.profiler.model_profile import builtin_names
from whale_tf.simulator.model_graph import ModelGraph
from whale_tf.simulator.zoo.recommendation import dlrm
from whale_tf.simulator.zoo.transformers import ARGUMENTS, Sizes, of_sizes, with_arguments
from whale_tf.simulator.zoo.vision import inception_v3, mlp, resnet50, vgg19


class Model(NamedTuple):
    """A model that is defined by ops.

    Attributes:
        build: a function of the micro-batch size, or a transformer's sizes, which arguments may change.
        source: where its sizes come from.
        batch: the mini-batch size at which the times of its layers are fitted.
        is_sparse: gradients cover only the rows that were looked up; layers cannot express this, so planners do not know the
            model.
    """

    build: Union[Callable[[int], ModelGraph], Sizes]
    source: str
    batch: int = 8
    is_sparse: bool = False

    def at(self, name: str, batch: int) -> ModelGraph:
        """The model at a micro-batch of ``batch`` examples."""
        return of_sizes(name, batch, self.build) if isinstance(self.build, Sizes) else self.build(batch)


def _bert(layers: int) -> Sizes:
    """BERT with ``layers`` large blocks; BERT-48 is DAPPLE's (640M parameters)."""
    return Sizes(layers, 1024, 16, 512, 30522, pre_norm=False)


def _moe(layers: int, experts: int, inner: int) -> Sizes:
    return Sizes(layers, 1024, 16, 512, 21128, inner, precision="fp16", optimizer="adafactor", experts=experts)


BERT = "Devlin et al. 2018: blocks of 1,024, S 512, vocabulary at every position"
MOE = "Whale section 5.3.2; depth, experts and inner width: the M6-T and M6-10T papers"
WIDE = "Whale Figures 13 and 14: ResNet-50 with a wide classifier"
GPT2 = Sizes(12, 768, 12, 1024, 50257)
MODELS: Dict[str, Model] = {
    "mlp": Model(mlp, "four dense layers of 1,024"),
    "vgg-19": Model(vgg19, "Simonyan and Zisserman 2014, configuration E, 224 x 224", 32),
    "resnet-50": Model(resnet50, "He et al. 2015, 224 x 224, stride in the 3x3 convolution", 32),
    "resnet-50-100k": Model(partial(resnet50, classes=100_000, name="resnet-50-100k"), WIDE, 32),
    "resnet-50-1m": Model(partial(resnet50, classes=1_000_000, name="resnet-50-1m"), WIDE, 32),
    "inception-v3": Model(inception_v3, "Szegedy et al. 2015, 299 x 299, without the auxiliary head", 32),
    "gpt2": Model(GPT2, "Radford et al. 2019: the smallest, S 1,024"),
    "gpt-1.5b": Model(Sizes(48, 1600, 25, 1024, 50257), "Radford et al. 2019: the largest, S 1,024"),
    "bert-base": Model(
        Sizes(12, 768, 12, 128, 30522, pre_norm=False, predicted=20, optimizer="lamb"),
        "Devlin et al. 2018: base, first phase of its pre-training: S 128, 20 positions predicted; LAMB", 32),
    "bert-large": Model(_bert(24), BERT),
    "bert-48": Model(_bert(48), BERT),
    "dlrm": Model(dlrm, "FlexFlow's configuration: 8 tables of a million rows", is_sparse=True),
    "m6-10b": Model(
        Sizes(24, 4096, 32, 512, 21128, 13312, tied=False, precision="fp16", optimizer="adafactor", decoder_layers=24),
        "Whale section 5.3.1: 24 encoder and 24 decoder layers, Adafactor; the width follows from 10B parameters"),
    "m6-moe-100b": Model(_moe(24, 512, 4096), MOE),
    "m6-moe-1t": Model(_moe(24, 960, 21248), MOE),
    "m6-moe-10t": Model(_moe(48, 10240, 9984), MOE),
}
# Names for transformers of any size: ``gpt:layers=24,hidden=2048``.  The sizes that are not given are these.
FAMILIES: Dict[str, Model] = {
    "gpt": Model(GPT2, "GPT-2's blocks"),
    "bert": Model(_bert(24), "BERT's blocks"),
    "llama": Model(Sizes(32, 4096, 32, 2048, 32000, tied=False, gated=True), "Touvron et al. 2023: LLaMA-7B"),
}


def model_names() -> Dict[str, bool]:
    """Every built-in model -> whether planners know its layers."""
    return {name: name in builtin_names() for name in sorted({*MODELS, *builtin_names()})}


def is_defined_by_ops(name: str) -> bool:
    """Whether :func:`built_in_model` knows the model."""
    base = name.partition(":")[0]
    return base in MODELS or base in FAMILIES or _blocks_of_bert(base) > 0


def is_built_in(name: str) -> bool:
    """Whether a name stands for a model that comes with the package."""
    return is_defined_by_ops(name) or name in builtin_names()


def with_seq(name: str, seq: Optional[int]) -> str:
    """The name of the model whose examples have ``seq`` tokens.

    Raises:
        PlanError: its examples have no tokens.
    """
    if seq is None:
        return name
    base, _, arguments = name.partition(":")
    if not is_defined_by_ops(base) or not isinstance(_model(base).build, Sizes):
        raise PlanError(f"--seq is {seq}, but the examples of {name!r} are no sequences of tokens whose length can be chosen; "
                        "leave it out")
    kept = [part for part in arguments.split(",") if part and part.partition("=")[0] != "seq"]
    return f"{base}:{','.join([*kept, f'seq={seq}'])}"


def source_of(name: str) -> str:
    """Where the sizes of a model of ops come from."""
    base, _, arguments = name.partition(":")
    return _model(base).source + (f", with {arguments}" if arguments else "")


def _blocks_of_bert(name: str) -> int:
    """The number of blocks in ``bert-N``; 0: it is not such a name.

    Raises:
        PlanError: too many.
    """
    number = name[5:] if name.startswith("bert-") else ""
    if not number.isdecimal():
        return 0
    if len(number) > 9 or int(number) > ARGUMENTS["layers"]:
        raise PlanError(f"model {name!r:.40} has more than {ARGUMENTS['layers']:,} blocks; use fewer")
    return int(number)


def _model(base: str) -> Model:
    return MODELS.get(base) or FAMILIES.get(base) or Model(_bert(_blocks_of_bert(base)), BERT)


@lru_cache(maxsize=64)
def built_in_model(name: str, batch: int) -> ModelGraph:
    """The ops of the model called ``name`` at a micro-batch of ``batch`` examples.

    ``bert-N`` is BERT with N large blocks.  Arguments change the sizes of a transformer: ``gpt:layers=24,hidden=2048``,
    ``bert-base:seq=512``.

    Raises:
        PlanError: an unknown name or argument, a model that is defined by layers, or a batch below 1.
    """
    if batch < 1:
        raise PlanError(f"a micro-batch has {batch} examples, expected at least 1")
    base, colon, arguments = name.partition(":")
    if is_defined_by_ops(base):
        model = _model(base)
        if not colon:
            return model.at(name, batch)
        if not isinstance(model.build, Sizes):
            raise PlanError(f"model {name!r:.60} has arguments, but only transformers take them; use {base!r}")
        return of_sizes(name, batch, with_arguments(name, model.build, arguments))
    if name in builtin_names():
        raise PlanError(f"model {name!r} is defined by layers; use layered_model(ModelProfile.parse({name!r}), {batch}) with a "
                        f"LayerEstimator, or `whale simulate --model {name}`")
    raise PlanError(f"unknown model {name!r}; built-in models that are defined by ops: {', '.join(MODELS)}."
                    f"{did_you_mean(name, MODELS)}")
