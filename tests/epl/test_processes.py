"""A job of several workers, started with the arguments of epl-launch."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from whale_tf._tf_compat import function_tracing
from whale_tf.cli import app, run

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json
import sys

import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
import epl

epl.init(epl.Config({"pipeline.num_micro_batch": 2, "io.slicing": True}))
epl.set_default_strategy(epl.replicate(1))
data = np.arange(64, dtype=np.float64).reshape(32, 2)
iterator = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(data).batch(4))
tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
rows = tf.matmul(iterator.get_next(), tf.get_variable("w", [2, 1], tf.float64, tf.ones_initializer()))
total, mean = tf.reduce_sum(rows), tf.reduce_mean(rows)
for tensor, key in ((total, epl.GraphKeys.GLOBAL_SUM_OBJECTS), (mean, epl.GraphKeys.GLOBAL_MEAN_OBJECTS),
                    (rows, epl.GraphKeys.GLOBAL_CONCAT_OBJECTS)):
    epl.add_to_collection(tensor, key)
step = tf.train.GradientDescentOptimizer(0.0).minimize(total + mean, tf.train.get_or_create_global_step())
with tf.train.MonitoredTrainingSession() as session:
    values = session.run([total, mean, rows, step])[:3]
cluster = epl.Env.get().cluster
print("FOUND", json.dumps([cluster.worker_index, cluster.worker_num, cluster.total_gpu_num, sys.argv[1]]
                          + [np.ravel(value).tolist() for value in values]))
"""


@pytest.mark.slow
@pytest.mark.skipif(function_tracing() is not None, reason="processes start faster with TensorFlow 1.15")
def test_collections_cover_all_workers(tmp_path: Path) -> None:
    """Two workers of one device each take two batches of four examples: the first 16 of the data."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, "-m", "whale_tf.cli", "epl-launch", "--num_workers", "2", "--gpu_per_worker", "1",
         "--log_dir", str(tmp_path / "logs"), str(script)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        universal_newlines=True)
    found = sorted(json.loads(line.split("FOUND ")[1]) for line in result.stdout.splitlines() if "FOUND " in line)
    assert len(found) == 2, result.stdout + result.stderr
    for rank, (index, workers, devices, directory, total, mean, rows) in enumerate(found):
        assert (index, workers, devices, directory) == (rank, 2, 2, str(tmp_path / "logs" / str(rank)))
        assert total == [16 * 31] and mean == [31] and sorted(rows) == [4.0 * row + 1 for row in range(16)]


def launched(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    started = []
    monkeypatch.setattr(run, "_status_of", lambda *given: started.append(given) or 0)
    result = CliRunner().invoke(app, [*arguments])
    return started[0] if started else result


@pytest.mark.once
def test_arguments_of_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    common = ["--num_workers", "2", "--gpu_per_worker", "3"]
    command, places, meet, _, _ = launched(monkeypatch, "epl-launch", *common, "--task_label", "a", "run.sh")
    assert command[-4:-2] == ["whale_tf.epl", "--task"] and command[-1] == "run.sh" and len(places) == 2
    assert command[-2].endswith("_2w3g_run_a") and command[-2].startswith(str(tmp_path / "experiments"))
    job = meet([4000, 4001])
    assert job.addresses == ["127.0.0.1:4000", "127.0.0.1:4001"] and job.variables["WHALE_CLUSTER"] == "2xcpu:3"
    assert job.variables["PYTHONPATH"].split(":")[0] == run.PATH
    hosts = ["--machine_list", "one:4000,two:4000", "--machine_rank"]
    assert len(launched(monkeypatch, "epl-launch", *common, *hosts, "1", "run.py")[1]) == 1
    result = launched(monkeypatch, "epl-launch", *common, *hosts, "2", "run.py")
    assert result.exit_code == 2 and "run this command on each with its number" in result.output


@pytest.mark.once
def test_arguments_of_run(monkeypatch: pytest.MonkeyPatch) -> None:
    command, *_ = launched(monkeypatch, "run", "--epl", "script.py", "--flag")
    assert command[-4:] == ["-m", "whale_tf.epl", "script.py", "--flag"]
    assert "--epl is for a script that calls epl.init" in launched(monkeypatch, "run", "--epl", "--auto", "script.py").output
