"""ModelProfile: JSON in and out, refusals."""
from __future__ import annotations

import json
from typing import Any, Dict

import pytest

from whale_tf.errors import PlanError
from whale_tf.profiler.model_profile import LayerProfile, ModelProfile, builtin_names, load_builtin


def small(**changes: Any) -> Dict[str, Any]:
    return dict({"name": "small", "layers": [{"name": "a", "parameter_bytes": 8, "output_bytes": 4}, {"name": "b"}]}, **changes)


@pytest.mark.parametrize("name", builtin_names())
def test_json_round_trip(name: str) -> None:
    profile = load_builtin(name)
    assert ModelProfile.parse(profile.to_json()) == profile


def test_repeated_layers_are_written_once() -> None:
    layers = [LayerProfile(name=f"layer_{i}", parameter_bytes=4) for i in range(5)]
    layers += [LayerProfile(name="layer_9", parameter_bytes=4), LayerProfile(name="head", parameter_bytes=1)]
    profile = ModelProfile(name="m", layers=tuple(layers))
    rows = json.loads(profile.to_json())["layers"]
    assert [row.get("repeat", 1) for row in rows] == [5, 1, 1]
    assert ModelProfile.parse(profile.to_json()) == profile


@pytest.mark.parametrize("name", ["x{}", "layer_01", "7", "{}3"])
def test_odd_names_survive(name: str) -> None:
    profile = ModelProfile(name="m", layers=(LayerProfile(name=name), LayerProfile(name="other")))
    assert ModelProfile.parse(profile.to_json()) == profile


def test_tied_parameters_count_once() -> None:
    profile = ModelProfile.parse(small(layers=[
        {"name": "in", "parameter_bytes": 100, "tied": "words", "output_bytes": 1},
        {"name": "mid", "parameter_bytes": 7, "output_bytes": 1},
        {"name": "out", "parameter_bytes": 100, "tied": "words"}]))
    assert profile.parameter_bytes == 107
    assert profile.stage_parameter_bytes(1, 3) == 107
    assert profile.stage_parameter_bytes(0, 2) == 107


@pytest.mark.parametrize("source,part", [
    ("no-such-model", "Did you mean"),
    ("{broken", "not valid JSON"),
    ("{\"name\": \"m\"}", "layers"),
    (small(layers=[]), "layers"),
    (small(layerz=[]), "layerz"),
    (small(precision="fp8"), "fp8"),
    (small(version=7), "version is 7"),
    (small(layers=[{"name": "a"}, {"name": "a"}]), "two layers are called 'a'"),
    (small(layers=[{"name": name, "tied": "w", "parameter_bytes": size, "output_bytes": 0} for name, size in zip("ab", (4, 8))]),
     "layers 'a' and 'b' share parameter 'w', but have 4 and 8 parameter_bytes; give both the same"),
    (small(layers=[{"name": "a", "parameter_bytes": -1}]), "parameter_bytes"),
    (small(layers=[{"name": "a", "repeat": 3}]), "repeat"),
    (small(layers=[{"name": "a{}", "repeat": 0}]), "repeat"),
    (small(layers=[{"name": "a"}, {"name": "b"}]), "layer 'a' does not give its output_bytes"),
    (small(layers=[{"name": "a", "forward_flops": float("inf")}]), "forward_flops is inf, expected a finite number"),
    ('{"name": "m", "layers": [{"name": "a", "traffic_bytes": NaN}]}', "traffic_bytes is nan, expected a finite number"),
    (small(layers=[{"name": "a", "measured": [
        {"device": "T4", "batch": 4, "forward_s": seconds, "backward_s": 1} for seconds in (1, 2)]}]),
     "layer 'a' is measured twice on 'T4' (tensor_parallel 1) with a batch of 4; keep one"),
])
def test_refusals_name_the_place(source: Any, part: str) -> None:
    if source == "no-such-model":
        source, part = "bert-47", "Did you mean 'bert-48'?"
    with pytest.raises(PlanError) as caught:
        ModelProfile.parse(source)
    assert part in str(caught.value)


def test_file_path(tmp_path: Any) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(small()), encoding="utf8")
    assert ModelProfile.parse(str(path)).name == "small"


def test_folder_of_the_name_hides_no_built_in_profile(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "bert-48").mkdir()
    monkeypatch.chdir(tmp_path)
    assert ModelProfile.parse("bert-48").name == "bert-48"
