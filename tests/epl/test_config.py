"""EPL's configuration: names, defaults, environment variables, and what each value is in whale_tf."""
from __future__ import annotations

import warnings
from typing import Any

import pytest

import whale_tf as wh
from whale_tf import epl
from whale_tf.config import Config as WhaleConfig
from whale_tf.epl.config import HINT, KEYS, REFUSED, Config
from whale_tf.errors import AnnotationError, ConfigError

# the defaults of docs/en/api/config.md of EPL (alibaba/EasyParallelLibrary)
DEFAULTS = {
    "auto.auto_parallel": False, "io.drop_last_files": False, "io.unbalanced_io_slicing": False, "io.slicing": False,
    "communication.sparse_as_dense": False, "communication.max_splits": 5, "communication.num_communicators": 2,
    "communication.fp16": False, "communication.fp16_scale": 128, "communication.clip_after_allreduce": False,
    "communication.gradients_reduce_method": "mean", "pipeline.num_stages": -1, "pipeline.num_micro_batch": 1,
    "pipeline.strategy": "preferbackward", "gradient_checkpoint.type": "", "gradient_checkpoint.end_taskgraph": -1,
    "gradient_checkpoint.check_gradients": False, "zero.level": "", "offload.level": "", "amp.level": "", "amp.debug_log": False,
    "amp.loss_scale": "dynamic", "cluster.device_place_prefer_intra_node": True, "cluster.run_visible_devices": "",
    "cluster.colocate_split_and_replicate": False, "optimizer.num_apply_group": 1}


def given(config: Config) -> Any:
    """The keys of whale_tf that a configuration sets, apart from those that EPL's defaults set."""
    here, plain = config.here({}), Config(environ={}).here({})
    return {key: here[key] for key in here.given if here[key] != plain[key] or key not in plain.given}


def test_defaults() -> None:
    config = Config(environ={})
    assert {key: config[key] for key in KEYS} == DEFAULTS
    here = config.here({})
    different = {key: here[key] for key in here.given if here[key] != WhaleConfig()[key]}
    assert different == {"io.batch": "micro", "io.slicing": False, "pipeline.num_micro_batch": 1}


@pytest.mark.parametrize("key, value, expected", [
    ("pipeline.num_micro_batch", 4, {"pipeline.num_micro_batch": 4}),
    ("pipeline.strategy", "PreferForward", {"pipeline.schedule": "gpipe"}),
    ("pipeline.strategy", "PreferBackwardOptimizer", {}),
    ("gradient_checkpoint.type", "auto", {"recompute": "full"}),
    ("gradient_checkpoint.type", "collection", {"recompute": "full"}),
    ("zero.level", "v0", {"zero": "v1"}), ("zero.level", "v1", {"zero": "v2"}), ("offload.level", "v0", {"offload": "v0"}),
    ("amp.level", "O1", {"amp.dtype": "float16", "amp.loss_scale": "dynamic"}),
    ("io.slicing", True, {"io.slicing": "file"}), ("communication.fp16", True, {"communication.fp16": True}),
    ("communication.sparse_as_dense", True, {"communication.sparse_as_dense": True}),
    ("cluster.colocate_split_and_replicate", True, {"cluster.colocate_split_and_replicate": True}),
    ("cluster.device_place_prefer_intra_node", False, {"cluster.device_place_prefer_intra_node": False}),
    ("communication.max_splits", 60, {}), ("auto.auto_parallel", True, {}), ("pipeline.num_stages", 2, {}),
    ("amp.loss_scale", 128, {})])
def test_mapped_values(key: str, value: Any, expected: Any) -> None:
    assert given(Config({key: value}, {})) == expected


def test_keys_that_are_read_together() -> None:
    assert given(Config({"auto.auto_parallel": True, "pipeline.num_stages": 4}, {})) == {"pipeline.num_stages": 4}
    assert given(Config({"amp.level": "o1", "amp.loss_scale": 128}, {})) == {"amp.dtype": "float16", "amp.loss_scale": 128.0}


@pytest.mark.parametrize("key", [key for key, known in KEYS.items() if known.kind == REFUSED])
def test_refused_values_name_a_reason(key: str) -> None:
    value = {"": "0,1", "mean": "sum", -1: 3, False: True}[KEYS[key].default]
    with pytest.raises(ConfigError, match=key) as caught:
        Config({key: value}, {}).here({})
    assert "exists in EPL, but not in whale_tf" in str(caught.value)


def test_environment() -> None:
    environ = {"EPL_PIPELINE_NUM_MICRO_BATCH": "4", "EPL_IO_SLICING": "True", "EPL_ZERO_LEVEL": "V1",
               "EPL_AMP_LOSS_SCALE": "64", "EPL_COMMUNICATION_MAX_SPLITS": "24"}
    config = Config({"communication.max_splits": 7}, environ)
    assert (config.pipeline.num_micro_batch, config.io.slicing, config.zero.level) == (4, True, "v1")
    assert config.amp.loss_scale == 64.0 and config.communication.max_splits == 7
    for name, text in (("EPL_IO_SLICING", "yes"), ("EPL_PIPELINE_NUM_MICRO_BATCH", "four")):
        with pytest.raises(ConfigError, match=name):
            Config(environ={name: text})


def test_more_keys_come_from_whale_config() -> None:
    here = Config({"pipeline.num_micro_batch": 2}, {}).here({"WHALE_CONFIG": '{"sync_batch_norm": true, "num_micro_batch": 8}'})
    assert here.sync_batch_norm and here.pipeline.num_micro_batch == 8 and here.io.batch == "micro"


@pytest.mark.parametrize("values, message", [
    ({"pipeline.num_microbatch": 2}, "Did you mean 'pipeline.num_micro_batch'"), ({"io.slicing": 1}, "of type bool"),
    ({"pipeline.num_micro_batch": True}, "of type int"), ({"amp.loss_scale": "small"}, "\"dynamic\" or a number"),
    ({"communication.gradients_reduce_method": "max"}, "'mean' or 'sum'")])
def test_wrong_values(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(values, {})


def test_changed_until_init() -> None:
    config = Config(environ={})
    config.pipeline.num_micro_batch = 2
    for key, value in (("pipeline.depth", 3), ("depth", 3)):
        section, _, name = key.rpartition(".")
        with pytest.raises(AttributeError, match="has no key"):
            setattr(getattr(config, section) if section else config, name, value)
    epl.init(config)
    kept = epl.Env.get().config
    assert kept.pipeline.num_micro_batch == 2 and repr(kept).count("num_micro_batch = 2") == 1
    with pytest.raises(AttributeError, match="after epl.init"):
        kept.pipeline.num_micro_batch = 4
    epl.init()
    assert epl.Env.get().config.pipeline.num_micro_batch == 1


def test_hints_are_said_once() -> None:
    changed = {key: known.default + 1 if isinstance(known.default, int) and not isinstance(known.default, bool) else True
               for key, known in KEYS.items() if known.kind == HINT}
    with pytest.warns(UserWarning) as caught:
        epl.init(Config(changed, {}))
    told = [str(one.message) for one in caught if "change(s) nothing" in str(one.message)]
    assert len(told) == 1 and all(key in told[0] for key in changed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epl.init(Config(environ={}))


@pytest.mark.once
def test_eager_execution_is_refused() -> None:
    from whale_tf._tf_compat import tf

    with tf.init_scope():
        if tf.executing_eagerly():
            with pytest.raises(AnnotationError, match="disable_eager_execution"):
                epl.init()


def test_automatic_division_forbids_strategies() -> None:
    epl.init(Config({"auto.auto_parallel": True}, {}))
    for use in (lambda: epl.set_default_strategy(epl.replicate(1)), lambda: epl.split(2).__enter__()):
        with pytest.raises(AnnotationError, match="leave out one of both"):
            use()
    assert wh.total_devices() == 4
