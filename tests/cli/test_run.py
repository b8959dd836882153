"""``whale run`` on scripts without TensorFlow: environment, output, ends and restarts."""
from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from typing import Any, Callable, Iterator, List

import pytest

from tests.cli.scripts import PUBLISHED
from tests.multiprocess.launch import ROOT, WHALE_RUN, Process, Starter, printed
from whale_tf.cli import run as command
from whale_tf.cluster import Cluster
from whale_tf.cluster.processes import free_ports
from whale_tf.errors import ClusterError

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
        assert cluster == "2xcpu:3" and json.loads(config) == {"pipeline.num_micro_batch": 2}
        assert arguments == ["--rate", "3", "-x"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="two sockets share a port")
def test_port_is_held_for_the_server(starter: Starter, script: Any) -> None:
    """Nobody gets it who asks for any port, and a server that shares its port does."""
    path = script("import socket\n"
                  "port = int(json.loads(os.environ['TF_CONFIG'])['cluster']['worker'][rank].split(':')[1])\n"
                  "with socket.socket() as one:\n"
                  "    try: one.bind(('', port)); print('free')\n"
                  "    except OSError: print('held', flush=True)\n"
                  "with socket.socket() as server:\n"
                  "    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); server.bind(('', port)); server.listen(1)\n"
                  "    print('serves', socket.create_connection(('127.0.0.1', port), 5).close())")
    run = starter.start(*WHALE_RUN, "--workers", "2", path)
    assert run.wait(LIMIT_S) == 0, run.output
    assert sorted(run.output.split("\n")[:-1]) == ["[0] held", "[0] serves None", "[1] held", "[1] serves None"]


@pytest.mark.slow
def test_one_worker_is_no_job(starter: Starter, script: Any) -> None:
    path = script("print(os.environ['WHALE_CLUSTER'], os.environ['TF_CONFIG'])")
    run = starter.start(*WHALE_RUN, "--devices-per-worker", "2", path)
    assert run.wait(LIMIT_S) == 0 and run.output.strip() == "[0] cpu:2 {}"


@pytest.mark.slow
def test_failure_stops_the_others_and_children(starter: Starter, script: Any) -> None:
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


@pytest.fixture
def shell(tmp_path: Any) -> str:
    """Stands in for ssh: another session of this machine."""
    path = tmp_path / "shell"
    path.write_text('#!/bin/sh\necho banner of "$1"\nexec env -i PATH="$PATH" sh -c "$2"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
def test_hosts(starter: Starter, script: Any, shell: str) -> None:
    """Two processes on one host and one on another, with this one's directory and environment; a failure on one ends both."""
    path = script("print(json.dumps([os.environ['TF_CONFIG'], os.environ['WHALE_CLUSTER'], os.environ['MY_OWN'], os.getcwd(),\n"
                  "                  'HOME' in os.environ, sys.argv[1:]]))\n"
                  "time.sleep(0.5 if rank == 2 else 600); sys.exit(6)")
    run = starter.start(*WHALE_RUN, "--hosts", "localhost:2,me@127.0.0.1", "--ssh", shell, path, "a b", "'$HOME", MY_OWN="1 2")
    assert run.wait(LIMIT_S) == 6, run.output
    assert "process 2 ended with status 6" in run.output and "[2 127.0.0.1] banner of me@127.0.0.1" in run.output, run.output
    for rank, host in enumerate(("localhost", "localhost", "127.0.0.1")):
        line, = (line for line in run.output.splitlines() if line.startswith(f"[{rank} {host}] ["))
        tf_config, cluster, own, directory, has_home, arguments = json.loads(line.partition("] ")[2])
        job = json.loads(tf_config)
        assert job["task"]["index"] == rank and job["cluster"]["worker"][rank].startswith(host + ":")
        assert len(set(job["cluster"]["worker"])) == 3
        assert (cluster, own, directory, has_home, arguments) == ("3xcpu:1", "1 2", ROOT, False, ["a b", "'$HOME"])


@pytest.mark.slow
def test_hosts_that_meet(starter: Starter, script: Any, tmp_path: Any) -> None:
    """Three processes under two commands.  A failure under one starts both again.  Devices of different
    numbers are refused in both."""
    path = script("first = not os.path.exists(sys.argv[1])\n"
                  "print(rank, os.environ['TF_CONFIG'], os.environ['WHALE_CLUSTER'], flush=True)\n"
                  "time.sleep(0.5)\nif first and rank == 0: open(sys.argv[1], 'w'); sys.exit(3)\n"
                  "if first: time.sleep(1); sys.exit(75)  # as one that has lost another")
    port, = free_ports(1)
    options = ("--rdzv", f"127.0.0.1:{port}", "--nodes", "2", "--max-restarts", "1")

    def start(*devices: str) -> List[Process]:
        return [starter.start(*WHALE_RUN, *options, "--workers", str(1 + number), "--devices-per-worker", count, path,
                              str(tmp_path / "mark")) for number, count in enumerate(devices)]

    for run in start("2", "1"):
        assert run.wait(LIMIT_S) == 2 and "error: processes have the same number of devices each, but" in run.output, run.output
    runs = start("2", "2")
    for run in runs:
        assert run.wait(LIMIT_S) == 0, run.output
    said = re.findall(r"^\[(\d)\] (\d) (.*) (\S+)$", runs[0].output + runs[1].output, re.M)
    assert sorted(row[0] for row in said) == list("001122") and all(rank == own for rank, own, _, _ in said)
    for rank, _, tf_config, cluster in said:
        job = json.loads(tf_config)
        assert len(set(job["cluster"]["worker"])) == 3 and job["task"]["index"] == int(rank)
        assert cluster == "3xcpu:2"


@pytest.mark.once
@pytest.mark.slow
def test_host_that_cannot_be_reached(starter: Starter, script: Any) -> None:
    run = starter.start(*WHALE_RUN, "--hosts", "a,b", "--ssh", "sh -c 'exit 255'", script(""))
    assert run.wait(LIMIT_S) == 2 and "error: process 0 cannot be started on a: sh -c" in run.output, run.output


@pytest.mark.slow
@pytest.mark.parametrize("is_remote", [False, True])
def test_no_process_outlives_the_launcher(starter: Starter, script: Any, shell: str, is_remote: bool) -> None:
    """It is killed; one process and its child end when asked to, and the other does not listen."""
    path = script("import signal, subprocess\n"
                  "if rank: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
                  "print('pid', os.getpid(), subprocess.Popen(['sleep', '600']).pid, '.')\ntime.sleep(600)")
    options = ("--hosts", "localhost:2", "--ssh", shell) if is_remote else ("--workers", "2")
    run = starter.start(*WHALE_RUN, "--grace", "0.5", *options, path)
    until(lambda: run.output.count(" .") == 2)
    pids = [int(number) for line in re.findall(r"pid (\d+ \d+)", run.output) for number in line.split()]
    assert len(pids) == 4 and all(map(alive, pids))
    run.send(signal.SIGKILL)
    until(lambda: not any(map(alive, pids)))


@pytest.mark.slow
def test_stopped_process_is_killed(starter: Starter, script: Any) -> None:
    path = script("import signal\nif rank: os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(600)")
    run = starter.start(*WHALE_RUN, "--workers", "2", path)
    assert run.wait(LIMIT_S) == 128 + signal.SIGKILL, run.output
    assert "[1] whale run: this process has been stopped for 5 s" in run.output, run.output
    assert "process 1 ended with signal SIGKILL" in run.output, run.output


@pytest.mark.parametrize("hosts, workers, expected", [
    ("a,b", 4, "aabb"), ("a:3,b", 4, "aaab"), ("a:1,b:3", 4, "abbb"), (None, 2, ["127.0.0.1"] * 2)])
def test_workers_of_all_hosts(hosts: Any, workers: int, expected: Any) -> None:
    """With --workers MIN:MAX, MAX is the number on all hosts together."""
    assert [host.name for host in command._worker_hosts(hosts, command.SSH, workers, is_whole=True)] == list(expected)


@pytest.mark.parametrize("hosts", ["a,b", "a:2,b:2", "a:5,b", "a:7"])
def test_workers_that_do_not_divide_over_hosts(hosts: str) -> None:
    with pytest.raises(ClusterError, match="up to 5 workers, which do not divide over --hosts .*; write HOST:PROCESSES so that"):
        command._worker_hosts(hosts, command.SSH, 5, is_whole=True)


@pytest.mark.parametrize("text, expected", [("4", (None, 4)), ("2:8", (2, 8)), ("3:3", (3, 3))])
def test_numbers_of_workers(text: str, expected: Any) -> None:
    assert command._numbers(text) == expected


@pytest.mark.parametrize("text", ["3:2", "0", "0:2", "2:", ":2", "-1", "two", "1:2:3"])
def test_numbers_of_workers_that_are_none(text: str) -> None:
    with pytest.raises(ClusterError, match="--workers is .*, expected a number from 1 on, or MIN:MAX, such as 2:8"):
        command._numbers(text)


@pytest.mark.slow
def test_workers_that_are_left_keep_their_devices(starter: Starter, script: Any) -> None:
    """Of a cluster whose processes have different ones."""
    nodes = [{"devices": ["CPU"] * count, "links": "default", "nic": {"bandwidth_gbits_per_s": 10}} for count in (1, 2, 3)]
    path = script("print('devices', os.environ['WHALE_MAX_WORKERS'], os.environ['WHALE_CLUSTER'], flush=True)\n"
                  "if 'WHALE_CHANGE' not in os.environ: time.sleep(0 if rank == 1 else 600); os.kill(os.getpid(), 9)")
    job = starter.start(*WHALE_RUN, "--workers", "2:3", "--cluster", json.dumps({"name": "unequal", "nodes": nodes}), path)
    assert job.wait(LIMIT_S) == 0, job.output
    for most, cluster in re.findall(r"devices (\d) (.*)", job.output)[-2:]:
        assert most == "3" and list(map(len, Cluster.parse(cluster).nodes)) == [1, 3], job.output
    assert "lost worker 1: process 1 ended with signal SIGKILL" in job.output, job.output


@pytest.mark.slow
@pytest.mark.parametrize("options, message", [
    (("--workers", "2", "--cluster", "cpu:3"), "3 devices, which do not divide over 2 workers"),
    (("--workers", "2:3", "--rdzv", "a:1", "--nodes", "2"), "give one number, or start the hosts by --hosts"),
    (("--config", '{"num_micro_batches": 2}'), "unknown config key"),
    (("--replicate", "--auto"), "--replicate is given, and --auto"),
    (("--replicate", "--config", '{"num_task_graph": 2}'), "asks for another plan")])
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
def test_script_without_a_line_of_ours(starter: Starter, tmp_path: Any) -> None:
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
def test_script_that_trains_nothing_is_told_so(tmp_path: Any) -> None:
    (tmp_path / "nothing.py").write_text("import sys; print('arguments', sys.argv[1:], __name__)")
    output = printed(*WHALE_RUN, "--replicate", str(tmp_path / "nothing.py"), "a")
    assert "arguments ['a'] __main__" in output and "trained nothing in a TensorFlow graph" in output


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)


def alive(pid: int) -> bool:
    if not os.path.exists(f"/proc/{pid}/stat"):
        return False
    with open(f"/proc/{pid}/stat") as handle:
        return handle.read().split()[2] != "Z"
