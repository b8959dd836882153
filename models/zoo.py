"""All models by name: small ones with their data, for tests and examples, and the published ones, for profiles.

    entry = zoo.SMALL["bert"]
    config = entry.config("float64")
    model = entry.module.build(entry.module.inputs(config, batch_size=32), config)
    stream = data.batches(entry.examples(config), 32)
"""
from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any, Callable, Dict, NamedTuple, Tuple

from models import bert, data, dlrm, gan, gnmt, gpt2, m6, mlp, moe, resnet, t5, unet, vgg

NUM_TEXTS = 256  # examples made for each small text model


class SmallModel(NamedTuple):
    """A model of a few thousand parameters.

    Attributes:
        module: its module, with `inputs(config, batch_size)` and `build(inputs, config)`.
        preset: its float32 configuration.
        examples: makes its real data from a configuration: a NamedTuple of arrays, see `models.data`.
    """

    module: ModuleType
    preset: Any
    examples: Callable[[Any], Any]

    def config(self, dtype: str = "float32") -> Any:
        """The configuration in the given number type."""
        return dataclasses.replace(self.preset, dtype=dtype)


def _masked_lm(config: bert.BertConfig) -> data.MaskedLmBatch:
    return data.masked_lm_examples(NUM_TEXTS, config.seq, config.predictions, config.vocab, config.seed, config.dtype)


def _language_model(config: Any) -> data.LanguageModelBatch:
    return data.language_model_examples(NUM_TEXTS, config.seq, config.vocab, config.seed)


def _digits(config: Any) -> data.ImageBatch:
    return data.digit_examples(config.dtype)


def _gan(config: gan.GanConfig) -> data.GanBatch:
    return data.digit_gan_examples(config.noise, config.seed, config.dtype)


SMALL: Dict[str, SmallModel] = {
    "mlp": SmallModel(mlp, mlp.MlpConfig.tiny(), lambda config: data.digit_features(config.dtype)),
    "bert": SmallModel(bert, bert.BertConfig.tiny(), _masked_lm),
    "bert-nsp": SmallModel(bert, dataclasses.replace(bert.BertConfig.tiny(), next_sentence=True), _masked_lm),
    "gpt2": SmallModel(gpt2, gpt2.Gpt2Config.tiny(), _language_model),
    "moe-top1": SmallModel(moe, moe.MoeConfig.tiny(top_k=1), _language_model),
    "moe-top2": SmallModel(moe, moe.MoeConfig.tiny(top_k=2), _language_model),
    "t5": SmallModel(t5, t5.T5Config.tiny(), lambda config: data.span_corruption_examples(
        NUM_TEXTS, config.source, config.target, config.seed, config.dtype)),
    "gnmt": SmallModel(gnmt, gnmt.GnmtConfig.tiny(), lambda config: data.true_case_examples(
        NUM_TEXTS, config.source, config.target, config.seed, config.dtype)),
    "m6": SmallModel(m6, m6.M6Config.tiny(), lambda config: data.digit_captions(
        config.source, config.target, config.dtype)),
    "resnet": SmallModel(resnet, resnet.ResnetConfig.tiny(), _digits),
    "resnet-bottleneck": SmallModel(resnet, resnet.ResnetConfig.tiny(bottleneck=True), _digits),
    "vgg": SmallModel(vgg, vgg.VggConfig.tiny(), _digits),
    "unet": SmallModel(unet, unet.UnetConfig.tiny(), lambda config: data.digit_segmentation_examples(
        config.seed, config.dtype)),
    "dlrm": SmallModel(dlrm, dlrm.DlrmConfig.tiny(), lambda config: data.digit_records(
        len(config.table_rows), config.dtype)),
    "gan": SmallModel(gan, gan.GanConfig.tiny(), _gan),
    "gan-penalty": SmallModel(gan, gan.GanConfig.tiny(penalty=1.0), _gan),
}

PUBLISHED: Dict[str, Tuple[ModuleType, Any]] = {
    "bert-base": (bert, bert.BertConfig.base()),
    "bert-large": (bert, bert.BertConfig.large()),
    "gpt2-small": (gpt2, gpt2.Gpt2Config.small()),
    "gpt2-medium": (gpt2, gpt2.Gpt2Config.medium()),
    "gpt2-xl": (gpt2, gpt2.Gpt2Config.xl()),
    "t5-small": (t5, t5.T5Config.small()),
    "t5-base": (t5, t5.T5Config.base()),
    "t5-large": (t5, t5.T5Config.large()),
    "gnmt-16": (gnmt, gnmt.GnmtConfig.gnmt16()),
    "moe-32e-10b": (moe, moe.MoeConfig.gshard_10b()),
    "m6-moe-100b": (moe, moe.MoeConfig.m6_100b()),
    "m6-moe-1t": (moe, moe.MoeConfig.m6_1t()),
    "m6-10b": (m6, m6.M6Config.m6_10b()),
    "resnet-18": (resnet, resnet.ResnetConfig.resnet18()),
    "resnet-50": (resnet, resnet.ResnetConfig.resnet50()),
    "vgg-16": (vgg, vgg.VggConfig.vgg16()),
    "vgg-19": (vgg, vgg.VggConfig.vgg19()),
    "unet": (unet, unet.UnetConfig.paper()),
    "dlrm": (dlrm, dlrm.DlrmConfig.large_tables()),
}
