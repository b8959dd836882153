"""The models of `models/` under ``wh.split``, whole and in hybrids, equal the local scripts."""
from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import bert, data, dlrm, gpt2, layers, resnet, t5, unet, vgg
from tests.numeric.cases import Case, Inputs, rng
from tests.numeric.equality import TOLERANCE, Outcome, assert_equal, run_local
from tests.numeric.script import Arrays, Script, Setting, Stages
from tests.numeric.split import Split, run_split

pytestmark = pytest.mark.half
BATCH, STEPS = 12, 3

Block = Callable[[Any], Any]


def _gpt2(batch: Any, config: gpt2.Gpt2Config) -> List[Block]:
    def layer(i: int, state: Tuple[tf.Tensor, tf.Variable]) -> Tuple[tf.Tensor, tf.Variable]:
        return gpt2.decoder_layer(state[0], config, f"layer_{i}"), state[1]

    return [lambda _: gpt2.embed(batch.tokens, config), *(functools.partial(layer, i) for i in range(config.layers)),
            lambda state: gpt2.lm_head(state[0], state[1])]


def _vgg(batch: Any, config: vgg.VggConfig) -> List[Block]:
    groups = [functools.partial(lambda i, x: vgg.conv_group(x, config, i), i) for i in range(len(config.groups))]
    return [lambda _: groups[0](batch.images), *groups[1:], lambda x: vgg.dense_layers(x, config), lambda x: vgg.head(x, config)]


def _resnet(batch: Any, config: resnet.ResnetConfig) -> List[Block]:
    return [lambda _: resnet.features(batch.images, config), lambda x: resnet.classifier(x, config)]


BLOCKS: Dict[Any, Callable[[Any, Any], List[Block]]] = {gpt2: _gpt2, vgg: _vgg, resnet: _resnet}


def _examples(fields: Dict[str, Tuple[Tuple[int, ...], int]], count: int, dtype: str) -> Arrays:
    """``fields[name]``: shape of an example, and one more than its largest number (0: normal floats, 1: ones)."""
    r = rng("split_models")
    found = {}
    for name, (shape, top) in sorted(fields.items()):
        size = (count,) + shape
        found[name] = (r.randn(*size).astype(dtype) if top == 0 else np.ones(size, dtype) if top == 1
                       else r.randint(0, top, size).astype("int32"))
    return found


def case(module: Any, config: Any, fields: Dict[str, Tuple[Tuple[int, ...], int]], batch_type: Any) -> Case:
    """A model that is built in blocks (``BLOCKS``) or, in one, by its own ``build``."""
    def build(inputs: Inputs, stages: Stages, dtype: str) -> Script:
        sizes = dataclasses.replace(config, dtype=dtype)
        batch = batch_type(**inputs)
        if module in BLOCKS:
            logits = stages.run(BLOCKS[module](batch, sizes), None)
            loss = layers.mean_cross_entropy(logits, batch.labels)
        else:
            loss, logits, _ = stages.run([lambda _: module.build(batch, sizes)], None)
        update = tf.train.AdamOptimizer(0.01, epsilon=1e-4).minimize(loss)
        statistics = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
        return Script([[update] + statistics], {"loss": loss}, {"logits": logits})

    return Case(functools.partial(_examples, fields), build, sizes=(BATCH,) * STEPS)


TEXT, WORDS = 6, 13
CASES: Dict[str, Case] = {
    "gpt2": case(gpt2, gpt2.Gpt2Config(hidden=12, heads=3, vocab=WORDS, seq=TEXT),
                 {"tokens": ((TEXT,), WORDS), "labels": ((TEXT,), WORDS)}, data.LanguageModelBatch),
    "bert": case(bert, bert.BertConfig(hidden=12, heads=3, ffn=10, vocab=WORDS, seq=TEXT, next_sentence=True),
                 {"tokens": ((TEXT,), WORDS), "segments": ((TEXT,), 2), "positions": ((2,), TEXT), "labels": ((2,), WORDS),
                  "weights": ((2,), 1), "next_sentence": ((), 2)}, data.MaskedLmBatch),
    "t5": case(t5, t5.T5Config(encoder_layers=1, decoder_layers=1, heads=3, vocab=WORDS, source=TEXT, target=TEXT),
               {"source": ((TEXT,), WORDS), "source_mask": ((TEXT,), 1), "target": ((TEXT,), WORDS),
                "labels": ((TEXT,), WORDS), "weights": ((TEXT,), 1)}, data.Seq2SeqBatch),
    "dlrm": case(dlrm, dlrm.DlrmConfig(table_rows=(17, 5, 8)), {"dense": ((8,), 0), "categories": ((3,), 5), "labels": ((), 1)},
                 data.ClickBatch),
    "vgg": case(vgg, vgg.VggConfig.tiny(), {"images": ((8, 8, 1), 0), "labels": ((), 10)}, data.ImageBatch),
    "resnet": case(resnet, resnet.ResnetConfig.tiny(), {"images": ((8, 8, 1), 0), "labels": ((), 10)}, data.ImageBatch),
    "unet": case(unet, unet.UnetConfig.tiny(), {"images": ((8, 8, 1), 0), "labels": ((8, 8), 2)}, data.SegmentationBatch),
}
SPLITS: Dict[str, Split] = {
    "everything over 2": Split((-2,), 2),
    "everything over 3": Split((-3,), 3),
    "everything over 4, nested": Split((-4,), 8),
    "the end over 2": Split((1, -2), 3),
    "two stages of 2": Split((-2, -2), 4, (("num_micro_batch", 2),)),
    "replicas, and the end over the same devices": Split((2, -2), 2, (("cluster.colocate_split_and_replicate", True),)),
}


@functools.lru_cache(maxsize=None)
def local(name: str, setting: Setting) -> Outcome:
    return run_local(CASES[name], setting._replace(runner="session"))


def _params() -> List[Any]:
    """Every model under every split that it has blocks for; each under one of them if not all tests run."""
    found = []
    for number, name in enumerate(CASES):
        fitting = [split for split in SPLITS if name in ("gpt2", "vgg", "resnet") or len(SPLITS[split].counts) == 1]
        if name == "resnet":  # replicas and micro-batches normalise by their own examples
            fitting = ["everything over 2", "everything over 3", "the end over 2"]
        for i, split in enumerate(fitting):
            marks = [] if i == number % len(fitting) else [pytest.mark.full]
            found.append(pytest.param(name, split, Setting(resource=bool(i % 2), static_batch=bool(number % 2)), marks=marks))
    return found


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("name,split,setting", _params())
def test_models_equal_local(name: str, split: str, setting: Setting) -> None:
    ran = run_split(CASES[name], setting, SPLITS[split])
    assert_equal(ran.outcome, local(name, setting), TOLERANCE[setting.dtype])
    assert any(pattern != "once" for pattern in ran.plan.shards.values())
