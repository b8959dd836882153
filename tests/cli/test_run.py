"""``whale run`` on scripts without TensorFlow: environment, output, ends and restarts."""
from __future__ import annotations

import json
import os
import re
import signal
from typing import Any, Iterator

import pytest

from tests.cli.scripts import PUBLISHED
from tests.multiprocess.launch import WHALE_RUN, Starter, printed

LIMIT_S = 30


@pytest.fixture
def starter() -> Iterator[Starter]:
    with Starter(anew=True) as found:
        yield found


@pytest.fixture
def script(tmp_path: Any) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text("import json, os, sys, time\n"
                        "rank = json.loads(os.environ['TF_CONFIG'] or '{}').get('task', {}).get('index', 0)\n" + text)
        return str(path)
    return write


@pytest.mark.slow
def test_environment_arguments_and_prefixes(starter: Starter, script: Any) -> None:
    path = script("print(json.dumps([os.environ['TF_CONFIG'], os.environ['WHALE_CLUSTER'], os.environ['WHALE_CONFIG'],\n"
                  "                  sys.argv[1:]]))")
    run = starter.start(*WHALE_RUN, "--workers", "2", "--devices-per-worker", "3", "--config", '{"num_micro_batch": 2}',
                        path, "--rate", "3", "-x")
    assert run.wait(LIMIT_S) == 0, run.output
    lines = sorted(line for line in run.output.splitlines() if line.startswith("["))
    assert [line[:4] for line in lines] == ["[0] ", "[1] "]
    for rank, line in enumerate(lines):
        tf_config, cluster, config, arguments = json.loads(line[4:])
        job = json.loads(tf_config)
        assert job["task"] == {"type": "worker", "index": rank} and len(set(job["cluster"]["worker"])) == 2
        assert cluster == "2xcpu:3" and json.loads(config)["pipeline.num_micro_batch"] == 2
        assert arguments == ["--rate", "3", "-x"]


@pytest.mark.slow
def test_one_worker_is_no_job(starter: Starter, script: Any) -> None:
    path = script("print(os.environ['WHALE_CLUSTER'], os.environ['TF_CONFIG'])")
    run = starter.start(*WHALE_RUN, "--devices-per-worker", "2", path)
    assert run.wait(LIMIT_S) == 0 and run.output.strip() == "[0] cpu:2 {}"


@pytest.mark.slow
def test_a_failure_stops_the_others_and_children(starter: Starter, script: Any) -> None:
    path = script("if rank: time.sleep(1); sys.exit(7)\n"
                  "import subprocess; child = subprocess.Popen(['sleep', '600']); print('child', child.pid); time.sleep(600)")
    run = starter.start(*WHALE_RUN, "--workers", "2", path)
    assert run.wait(LIMIT_S) == 7
    assert "process 1 ended with status 7" in run.output
    assert not alive(int(run.output.split("child ")[1].split()[0]))


@pytest.mark.slow
def test_restarts_until_it_works(starter: Starter, script: Any, tmp_path: Any) -> None:
    path = script("runs = len(os.listdir(sys.argv[1])); time.sleep(0.3); open(os.path.join(sys.argv[1], str(os.getpid())), 'w')\n"
                  "sys.exit(3 if runs < 2 else 0)")
    folder = tmp_path / "runs"
    folder.mkdir()
    run = starter.start(*WHALE_RUN, "--max-restarts", "2", path, str(folder))
    assert run.wait(LIMIT_S) == 0, run.output
    assert run.output.count("restarting all processes") == 2


@pytest.mark.slow
def test_signals_are_forwarded(starter: Starter, script: Any) -> None:
    path = script("import signal\n"
                  "signal.signal(signal.SIGTERM, lambda *_: (print('saved', rank), sys.exit(0)))\n"
                  "print('ready', rank)\nwhile True: time.sleep(0.1)")
    run = starter.start(*WHALE_RUN, "--workers", "2", "--max-restarts", "5", path)
    run.wait_for("ready 0", LIMIT_S)
    run.wait_for("ready 1", LIMIT_S)
    run.send(signal.SIGTERM)
    assert run.wait(LIMIT_S) == 0
    assert "saved 0" in run.output and "saved 1" in run.output and "again" not in run.output


@pytest.mark.slow
def test_processes_that_will_not_end_are_killed(starter: Starter, script: Any, monkeypatch: Any) -> None:
    path = script("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('pid', os.getpid())\ntime.sleep(600)")
    run = starter.start(*WHALE_RUN, "--grace", "0.5", path)
    run.wait_for("pid ", LIMIT_S)
    run.send(signal.SIGTERM)
    assert run.wait(LIMIT_S) == 128 + signal.SIGKILL
    assert not alive(int(run.output.split("pid ")[1].split()[0]))


@pytest.mark.slow
@pytest.mark.parametrize("options, message", [
    (("--workers", "2", "--cluster", "cpu:3"), "3 devices, which do not divide over 2 workers"),
    (("--config", '{"num_micro_batches": 2}'), "unknown config key"),
    (("--replicate", "--auto"), "--replicate is given, and --auto"),
    (("--replicate", "--config", '{"num_task_graph": 2}'), "asks for another plan"),
    (("--auto", "--workers", "2"), "plans are searched for one process")])
def test_bad_options(starter: Starter, script: Any, options: Any, message: str) -> None:
    run = starter.start(*WHALE_RUN, *options, script(""))
    assert run.wait(LIMIT_S) == 2 and message in run.output


PLAIN = """
import sys
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
x = tf.placeholder(tf.float64, [8, 3])
hidden = tf.tanh(tf.matmul(x, tf.get_variable("one", initializer=tf.constant(np.eye(3)))))
loss = tf.reduce_mean(tf.square(tf.matmul(hidden, tf.get_variable("two", initializer=tf.constant(np.ones([3, 2]))))))
train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for step in range(4):
        print("loss", session.run([loss, train], {x: np.random.RandomState(step).randn(8, 3)})[0])
if "-v" in sys.argv:
    print("ops", sum(op.name.startswith("whale/") for op in tf.get_default_graph().get_operations()))
"""


@pytest.mark.half
@pytest.mark.slow
def test_a_script_without_a_line_of_ours(starter: Starter, tmp_path: Any) -> None:
    path = tmp_path / "plain.py"
    path.write_text(PLAIN)
    found = {}
    for option in ("", "--replicate", "--auto"):
        run = starter.start(*WHALE_RUN, *([option, "--devices-per-worker", "2"] if option else []), str(path), "-v")
        assert run.wait(2 * LIMIT_S) == 0, run.output
        found[option] = re.findall(r"(loss|ops) (\S+)", run.output)
    losses = {option: [float(number) for word, number in words if word == "loss"] for option, words in found.items()}
    assert len(losses[""]) == 4
    for option in ("--replicate", "--auto"):
        assert losses[option] == pytest.approx(losses[""], rel=1e-10), option
    assert dict(found[""])["ops"] == "0" and int(dict(found["--replicate"])["ops"]) > 10


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("name, option", [("keep_prob", "--replicate"), ("halves", "--auto"), ("python_input", "--replicate")])
def test_published_scripts_run_unchanged(tmp_path: Any, name: str, option: str) -> None:
    """``tests/numeric/test_published.py`` compares their numbers."""
    path = tmp_path / f"{name}.py"
    path.write_text(PUBLISHED[name])
    output = printed(*WHALE_RUN, option, "--devices-per-worker", "2", str(path))
    assert len(re.findall(r"value .*loss \S+", output)) >= 4


@pytest.mark.half
@pytest.mark.slow
def test_a_script_that_trains_nothing_is_told_so(tmp_path: Any) -> None:
    (tmp_path / "nothing.py").write_text("import sys; print('arguments', sys.argv[1:], __name__)")
    output = printed(*WHALE_RUN, "--replicate", str(tmp_path / "nothing.py"), "a")
    assert "arguments ['a'] __main__" in output and "trained nothing in a TensorFlow graph" in output


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as handle:
        return handle.read().split()[2] != "Z"
