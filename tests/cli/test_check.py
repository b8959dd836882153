"""``whale check``: what it says of scripts for GPUs that this machine does not have, and its exit status."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict

import pytest
import tensorflow as tf

from tests.command_line import Called, call
from whale_tf._tf_compat import function_tracing
from whale_tf.cli import app
from whale_tf.measure.registry import own_kernels
from whale_tf.profiler.gpu_kernels import shipped

SESSION = '''
import numpy as np
import tensorflow.compat.v1 as tf
import whale_tf as wh
tf.disable_eager_execution()
wh.init({config}, cluster="gpu:2")
with tf.Graph().as_default(), tf.Session() as session:
    x = tf.placeholder("float32", [16, 4, 4, 2], name="x")
    y = tf.placeholder("int32", [None], name="y")
    with wh.{strategy}:
        w = tf.get_variable("w", [3, 3, 2, 4])
        h = tf.nn.relu(tf.nn.conv2d(x, w, [1, 1, 1, 1], "SAME"))
        h = {between}
        table = tf.get_variable("table", [9, 4], use_resource=True)
        h = tf.reduce_mean(h, [1, 2]) + tf.nn.embedding_lookup(table, y)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y % 4, logits=h))
    train = tf.train.{optimizer}.minimize(loss)
    session.run(tf.global_variables_initializer())
    session.run([loss, train], {{x: np.ones([16, 4, 4, 2]), y: np.arange(16) % 9}})
    raise SystemExit("it trains")
'''
FINE: Dict[str, Any] = {"config": {}, "strategy": "replicate(2)", "between": "tf.tanh(h)", "optimizer": "AdamOptimizer(0.1)"}

KERAS = '''
import numpy as np
import tensorflow as tf
import whale_tf as wh
wh.init({"num_micro_batch": 2})
model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(2)])
model.compile(tf.keras.optimizers.SGD(0.1), "mse")
model.fit(np.ones([16, 4], "float32"), np.ones([16, 2], "float32"), batch_size=8, verbose=0)
raise SystemExit("it trains")
'''


def checked(tmp_path: Path, text: str, *more: str) -> Called:
    script = tmp_path / "train.py"
    script.write_text(text)
    return call(app, "check", str(script), "--cluster", "V100-32GB:2", "--json", *more)


def answer(called: Called) -> Dict[str, Any]:
    return json.loads(called.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"emit": "call", "num_micro_batch": 2}], ids=str)
def test_script_that_is_fine(tmp_path: Path, config: Dict[str, Any]) -> None:
    called = checked(tmp_path, SESSION.format(**{**FINE, "config": config}))
    found = answer(called)
    assert called.exit_code == 0 and found["fine"], called.output
    assert not found["lacking"] and found["differing"] == 0 and found["ops_on_gpus"] > 50
    assert {row["what"]: row["verdict"] for row in found["findings"]}["kernels"] == "ok"
    assert found["examples"] == 16 and found["step_time_s"] > 0 and max(found["peak_memory_bytes"]) > 1000
    into = [one for one in found["crossings"] if one["why"] == "input"]
    assert {one["device"] for one in into} == {0, 1}
    assert sum(one["bytes"] for one in into if one["op"].startswith("whale/input")) >= 16 * 32 * 4  # x, divided


@pytest.mark.slow
def test_op_without_a_kernel(tmp_path: Path) -> None:
    called = checked(tmp_path, SESSION.format(**{**FINE, "between": "tf.image.resize_bicubic(h, [4, 4])"}))
    found = answer(called)
    assert called.exit_code == 1 and not found["fine"], called.output
    assert {row["type"] for row in found["lacking"]} == {"ResizeBicubic", "ResizeBicubicGrad"}
    forward = next(row for row in found["lacking"] if row["type"] == "ResizeBicubic")
    assert len(forward["ops"]) == 2 and forward["to_host"] == 16 * 4 * 4 * 4 * 4 and forward["comes_back"]


@pytest.mark.slow
def test_optimizer_without_a_sparse_kernel(tmp_path: Path) -> None:
    called = checked(tmp_path, SESSION.format(**{**FINE, "optimizer": "MomentumOptimizer(0.1, 0.9)"}))
    row, = answer(called)["lacking"]
    assert called.exit_code == 1 and row["type"] == "ResourceSparseApplyMomentum" and "table" in row["beside"]


@pytest.mark.slow
@pytest.mark.half
@pytest.mark.parametrize("limit, status", [("1", 0), ("0.001", 1)])
def test_memory_limit(tmp_path: Path, limit: str, status: int) -> None:
    text = SESSION.format(**{**FINE, "between": "tf.tile(h, [1, 64, 16, 1])[:, :4, :4]"})  # 1 MiB on each device
    called = checked(tmp_path, text, "--memory-limit", limit)
    assert called.exit_code == status, called.output
    assert {row["what"]: row["verdict"] for row in answer(called)["findings"]}["memory"] == ("WRONG" if status else "ok")


@pytest.mark.slow
@pytest.mark.skipif(function_tracing() is None, reason="functions are not divided on TensorFlow 1")
def test_fit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(KERAS)  # in a process of its own: other tests' scripts turn eager execution off
    command = [sys.executable, "-m", "whale_tf.cli", "check", str(script), "--cluster", "V100-32GB:2", "--json"]
    called = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, check=False)
    assert called.returncode == 0, called.stderr
    found = json.loads(called.stdout.splitlines()[-1])
    assert found["where"].startswith("tf.function") and found["examples"] == 8 and found["differing"] == 0
    assert sum(one["bytes"] for one in found["crossings"] if one["why"] == "input") == 8 * (4 + 2) * 4
    assert not any(one["why"] == "host op" for one in found["crossings"])


@pytest.mark.slow
@pytest.mark.half
def test_script_that_divides_nothing(tmp_path: Path) -> None:
    called = checked(tmp_path, "import whale_tf as wh\nwh.init()\n")
    assert called.exit_code == 2 and "without a training step that whale_tf divides" in called.stderr


def test_registry_is_the_shipped_table() -> None:
    """The table of this TensorFlow is made anew, if it is a CUDA build."""
    if not tf.test.is_built_with_cuda():
        pytest.skip("this TensorFlow has registered no kernels for GPUs")
    own = own_kernels()
    assert own.version != shipped(own.version).version or own == shipped(own.version)
