"""Every key, every alias, every refusal."""
from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_tf.config import ALIASES, VALUES, Config, render_docs
from whale_tf.errors import ConfigError

DOTTED = [row.key for row in Config.table()]


def test_defaults() -> None:
    config = Config.parse(None, {})
    assert config == Config() == Config({})
    assert config.pipeline.num_micro_batch is None and config.pipeline.schedule == "backward_first"
    assert config.cluster.device_place_prefer_intra_node is True and config.auto.auto_parallel is False
    assert config.balance.algorithm == "exact" and config.init == "exact" and config.io.nested_batch == "own"


@pytest.mark.parametrize("values", [
    {"num_micro_batch": 8, "num_task_graph": 2, "auto_parallel": "amp"},
    {"pipeline.num_micro_batch": 8, "pipeline.num_stages": 2, "auto.auto_parallel": "amp"},
    {"pipeline": {"num_micro_batch": 8, "num_stages": 2}, "auto": {"auto_parallel": "amp"}},
    {"num_micro_batch": 8, "pipeline": {"num_micro_batch": 8}, "pipeline.num_stages": 2, "auto_parallel": "amp"}])
def test_three_spellings(values: Any) -> None:
    config = Config(values)
    assert (config.pipeline.num_micro_batch, config.pipeline.num_stages, config.auto.auto_parallel) == (8, 2, "amp")
    assert config == Config.parse(json.dumps(values)) == Config.parse(config) and hash(config) == hash(Config(values))


@pytest.mark.parametrize("alias, name", sorted(VALUES["pipeline.schedule"].items()))
def test_schedule_names_of_epl(alias: str, name: str) -> None:
    assert Config({"pipeline.strategy": alias}).pipeline.schedule == name
    assert Config({"pipeline": {"schedule": alias}, "pipeline.strategy": name})["pipeline.schedule"] == name


def test_paper_s_examples() -> None:
    config = Config({"num_micro_batch": 35, "num_task_graph": 8})  # Example 4
    assert config.pipeline.num_micro_batch == 35 and config.pipeline.num_stages == 8
    assert Config({"num_task_graph": 2, "num_micro_batch": 4, "auto_parallel": True}).auto.auto_parallel is True


def test_files_and_environment(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"io": {"slicing": false}}')
    for config in (Config.parse(str(path)), Config.parse(path), Config.parse(None, {"WHALE_CONFIG": str(path)}),  # type: ignore[arg-type]
                   Config.parse(None, {"WHALE_CONFIG": '{"io.slicing": false}'})):
        assert config.io.slicing is False
    assert Config.parse({}, {"WHALE_CONFIG": str(path)}).io.slicing is True  # what is given wins


EPL = [  # every key and value of EPL's documentation: what it means here, or what is said
    ("auto.auto_parallel", True, True), ("auto.auto_parallel", False, False),
    ("io.slicing", True, True), ("io.slicing", False, False),
    ("io.drop_last_files", False, None), ("io.drop_last_files", True, "no file is dropped"),
    ("io.unbalanced_io_slicing", False, None), ("io.unbalanced_io_slicing", True, "set io.slicing to true"),
    ("communication.sparse_as_dense", True, True), ("communication.fp16", True, True),
    ("communication.max_splits", 5, "set communication.bucket_bytes"),
    ("communication.num_communicators", 2, "in parallel without a pool. Leave it out$"),
    ("communication.fp16_scale", 128, "scaled by its largest element"),
    ("communication.clip_after_allreduce", True, None), ("communication.clip_after_allreduce", False, "or set it to True$"),
    ("communication.gradients_reduce_method", "mean", None),
    ("communication.gradients_reduce_method", "sum", "use a loss that is a sum .tf.reduce_sum."),
    ("pipeline.num_stages", 2, 2), ("pipeline.num_stages", -1, "expected a whole number of at least 1, or null"),
    ("pipeline.num_micro_batch", 4, 4),
    ("pipeline.strategy", "PreferBackward", "backward_first"), ("pipeline.strategy", "preferbackward", "backward_first"),
    ("pipeline.strategy", "PreferForward", "gpipe"), ("pipeline.strategy", "PreferBackwardOptimizer", "backward_first"),
    ("gradient_checkpoint.type", "", "none"), ("gradient_checkpoint.type", "auto", "full"),
    ("gradient_checkpoint.type", "collection", "full"),
    ("gradient_checkpoint.type", "tensors", "'recompute' is 'tensors', expected 'none' or 'full' or 'auto'"),
    ("gradient_checkpoint.end_taskgraph", -1, None), ("gradient_checkpoint.end_taskgraph", 1, "with wh.checkpoint"),
    ("gradient_checkpoint.check_gradients", False, None),
    ("gradient_checkpoint.check_gradients", True, "recomputed values equal the original ones"),
    ("zero.level", "", "none"), ("zero.level", "v0", "v1"), ("zero.level", "v1", "v2"), ("zero.level", "v2", "v3"),
    ("zero.level", "v4", "'zero' is 'v4', expected"),
    ("offload.level", "", "none"), ("offload.level", "v0", "v0"), ("offload.level", "v1", "'offload' is 'v1', expected"),
    ("amp.level", "", "none"), ("amp.level", "O1", "float16"), ("amp.level", "o1", "float16"),
    ("amp.level", "O2", "'amp.dtype' is 'O2', expected"),
    ("amp.loss_scale", "dynamic", "dynamic"), ("amp.loss_scale", 128, 128), ("amp.loss_scale", 0.5, "is 0.5, expected"),
    ("amp.debug_log", False, None), ("amp.debug_log", True, "print wh.explain()"),
    ("cluster.device_place_prefer_intra_node", False, False), ("cluster.colocate_split_and_replicate", True, True),
    ("cluster.run_visible_devices", "", None), ("cluster.run_visible_devices", "0,1", "set CUDA_VISIBLE_DEVICES"),
    ("optimizer.num_apply_group", 1, None), ("optimizer.num_apply_group", 4, "waits only for the gradients of its own variable"),
    ("optimizer.num_apply_group", True, "is True, which exists in EPL, but not in whale_tf"),
]


@pytest.mark.parametrize("key, value, means", EPL)
def test_keys_of_epl(key: str, value: Any, means: Any) -> None:
    """``means``: the value here, the message, or None: it changes nothing."""
    section, _, name = key.partition(".")
    try:
        found = [Config({key: value}), Config({section: {name: value}})]
    except ConfigError as error:
        assert isinstance(means, str) and re.search(means, str(error)), error
        return
    assert found == [Config({} if means is None else {ALIASES.get(key, key): means})] * 2


def test_sections_that_only_epl_has() -> None:
    found = Config({"zero": {"level": "v0"}, "offload": {"level": "v0"}, "gradient_checkpoint": {"type": "auto"}})
    assert (found.zero, found.offload, found.recompute) == ("v1", "v0", "full")


def test_frozen_and_copyable() -> None:
    config = Config({"patterns.force": {"unit": "row"}})
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
    assert Config.parse(config.to_json()) == config == Config(config.to_dict())
    assert Config.parse(config.to_json()).given == config.given, "what is not set stays open"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.pipeline.num_micro_batch = 3  # type: ignore[misc]
    assert config.given == pickle.loads(pickle.dumps(config)).given == {"patterns.force"}
    with pytest.raises(ConfigError, match="unknown config key 'nope'"):
        config["nope"]


@pytest.mark.parametrize("values, message", [
    ({"num_micro_batches": 2}, "key 'num_micro_batches'. Did you mean 'pipeline.num_micro_batch'.*Known keys"),
    ({"schedule": "gpipe"}, "unknown config key 'schedule'. Did you mean 'pipeline.schedule'"),
    ({"pipline.schedule": "gpipe"}, "Did you mean 'pipeline.schedule'"),
    ({"pipeline": {"depth": 1}}, "unknown config key 'pipeline.depth'"),
    ({"num_micro_batch": 0}, "'pipeline.num_micro_batch' is 0, expected a whole number of at least 1, or null"),
    ({"num_micro_batch": "8"}, "is '8', expected a whole number"),
    ({"num_micro_batch": True}, "is True, expected a whole number"),
    ({"num_micro_batch": 2.0}, "is 2.0, expected a whole number"),
    ({"num_task_graph": -1}, "'pipeline.num_stages' is -1"),
    ({"communication.bucket_bytes": 1.5}, "'communication.bucket_bytes' is 1.5"),
    ({"pipeline.schedule": "gpip"}, "or 'auto'. Did you mean 'gpipe'"),
    ({"pipeline.warmup": "pa"}, "expected 'auto' or 'PA' or 'PB'"),
    ({"auto_parallel": "daple"}, "expected true or false, or 'dapple' or 'amp' or 'rhino'.*Did you mean 'dapple'"),
    ({"auto_parallel": 1}, "'auto.auto_parallel' is 1"),
    ({"io.slicing": "yes"}, "expected true or false"),
    ({"io.nested_batch": None}, "is None, expected 'own' or 'divide'"),
    ({"communication.backend": "nccl"}, "expected 'auto' or 'local' or 'collective' or 'horovod'"),
    ({"patterns.force": 3}, "expected a name, or an object of names, or null"),
    ({"init": "shard"}, "Did you mean 'sharded'"),
    ({"balance": {"algorithm": "exactly"}}, "Did you mean 'exact'"),
    ({"pipeline": 3}, "config section 'pipeline' is 3, expected an object with the keys pipeline.num_micro_batch"),
    ({3: 4}, "config key 3 is not text"),
    ({"num_micro_batch": 2, "pipeline.num_micro_batch": 3},
     "'num_micro_batch' and 'pipeline.num_micro_batch' are the same key but have different values, 2 and 3"),
    ({"auto_parallel": True, "auto": {"auto_parallel": 1}}, "different values, True and 1"),
    ({"pipeline.strategy": "PreferForward", "pipeline.schedule": "backward_first"}, "different values"),
    ("{nope", "not valid JSON"), ('{"zero": "v1", "zero": "v2"}', "key 'zero' is there twice; keep one"),
    ("missing.json", "config file 'missing.json' does not exist"),
    (7, "Config takes a dict .* got 7")])
def test_refused_with_key_and_allowed_values(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + message):
        Config.parse(values)


def test_file_without_an_object(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="list.json' holds .1., expected an object"):
        Config.parse(str(path))


def test_table_and_page() -> None:
    assert all(target in DOTTED for target in ALIASES.values()) and len(set(DOTTED)) == len(DOTTED)
    assert all(row.meaning.endswith(".") and row.allowed for row in Config.table())
    page = (Path(__file__).parents[1] / "docs" / "config.md").read_text(encoding="utf8")
    assert page == render_docs()


@pytest.mark.slow
@given(st.sampled_from(Config.table()), st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10), st.floats(allow_nan=False), st.text(max_size=5),
    st.sampled_from(["gpipe", "PA", "own", "divide", "auto", "amp", "exact", "even", "sharded", "local"])))
def test_every_value_is_taken_or_refused_by_name(row: Any, value: Any) -> None:
    """A value is accepted exactly as it was given (schedule names apart), or the error names its key."""
    try:
        config = Config({row.key: value})
    except ConfigError as error:
        assert repr(row.key) in str(error) and repr(value) in str(error)
        return
    got = config[row.key]
    assert got == value and (type(got) is type(value) or (type(got), type(value)) == (float, int))
    assert Config.parse(config.to_json()) == config


def test_mixed_precision_by_every_name() -> None:
    for values in ({"amp": "float16"}, {"amp.level": "O1"}, {"amp": {"dtype": "float16"}}, {"amp": {"level": "O1"}}):
        assert (Config(values).precision, Config(values).loss_scale) == ("float16", "dynamic")
    assert Config({"amp.level": "O1", "amp.loss_scale": 128}).loss_scale == 128
    assert Config({"amp": {"level": "O1", "loss_scale": "dynamic"}}).loss_scale == "dynamic"
    assert Config({"amp.level": ""}).precision == "float32" and Config({"amp": "bfloat16"}).loss_scale is None
    with pytest.raises(ConfigError, match="config key 'amp.dtype' is 'float8', expected 'none' or 'float16' or 'bfloat16'"):
        Config({"amp": "float8"})
