"""``whale estimate``."""
from __future__ import annotations

import json
from typing import Any, Dict, List

import pytest

from tests.command_line import call
from whale_tf.cli import app

pytestmark = pytest.mark.once


def rows(*arguments: str) -> List[Dict[str, Any]]:
    result = call(app, "estimate", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_largest_batch_fits_and_one_more_example_does_not() -> None:
    (row,) = rows("gpt2", "--devices", "V100-16GB", "--count", "2")
    assert row["fits"] and not row["measures"] and row["global_batch"] == row["largest_batch"]
    for batch, oom in ((row["largest_batch"], False), (row["largest_batch"] + 2, True)):
        simulated = json.loads(call(app, *"simulate --model gpt2 --cluster V100-16GB:2 --dp 2 --json --global-batch".split(),
                                    str(batch)).stdout)
        assert simulated["oom"] is oom
        assert oom or simulated["step_time_s"] == pytest.approx(row["step_time_s"], rel=1e-9)


def test_batches_of_a_small_model_grow_to_the_largest_that_is_tried() -> None:
    (row,) = rows("mlp", "--devices", "T4")
    assert row["largest_batch"] == 2 ** 16


def test_what_does_not_fit_takes_measures_or_is_said_not_to_fit() -> None:
    small, large = rows("gpt2:layers=24,hidden=1024", "--devices", "T4,A100-80GB", "--count", "2", "--global-batch", "16")
    assert small["measures"] and small["fits"] and not large["measures"]
    (none,) = rows("m6-10b", "--devices", "T4")
    assert not none["fits"] and none["largest_batch"] == 0 and none["days"] is None
    assert "no" in call(app, "estimate", "m6-10b", "--devices", "T4").stdout


def test_days_and_dollars(tmp_path: Any) -> None:
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps({"T4": 2.0}))
    asked = ("gpt2", "--devices", "T4", "--count", "4", "--prices", str(prices))
    (read,), (said,) = rows(*asked, "--examples", "1e6", "--epochs", "3"), rows(*asked, "--tokens", str(3e6 * 1024))
    assert read["days"] == pytest.approx(3e6 / read["samples_per_s"] / 86400) == pytest.approx(said["days"])
    assert read["dollars"] == pytest.approx(read["days"] * 24 * 4 * 2.0)
    shown = call(app, "estimate", *asked, "--examples", "1e6").stdout
    assert "dollars" in shown and max(map(len, shown.splitlines())) <= 80


@pytest.mark.slow
def test_script_runs_once_for_all_kinds(tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
with tf.Graph().as_default():
    x = tf.placeholder(tf.float32, [None, 4])
    loss = tf.reduce_mean(tf.matmul(x, tf.get_variable("w", [4, 2])))
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    tf.Session().run(train, {x: [[1.0] * 4]})
""")
    first, second = rows(str(script), "--devices", "V100-32GB,A100-80GB", "--global-batch", "8")
    refused = call(app, "estimate", str(script), "--tokens", "1e6")
    assert refused.exit_code == 1 and "use --examples" in refused.output
    assert first["fits"] and second["fits"] and second["step_time_s"] < first["step_time_s"]
