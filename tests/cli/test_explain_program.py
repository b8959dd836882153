"""``whale explain --program``: the training step of a script, call by call."""
from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import List

import pytest

import whale_tf as wh
from tests.command_line import Called, call
from whale_tf.cli import app
from whale_tf.cluster.processes import free_ports, tf_configs

SCRIPT = '''
import os
import numpy as np
import tensorflow.compat.v1 as tf
import whale_tf as wh
tf.disable_eager_execution()
wh.init({{"num_micro_batch": {micro_batches}}}, cluster="cpu:2")
with tf.Graph().as_default(), tf.Session() as session:
    x = tf.placeholder("float32", [8, 6], name="x")
    for i in range(2):
        with {annotation}:
            w = tf.get_variable("w%d" % i, [6, 6], use_resource=False)
            h = tf.matmul(h if i else x, w, name="h%d" % i)
    loss = tf.reduce_{reduction}(h, name="loss")
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    session.run(tf.global_variables_initializer())
    session.run(train, {{x: np.zeros([8, 6])}})
    folder = os.path.dirname(os.path.abspath(__file__))
    open(os.path.join(folder, "plan.json"), "w").write(wh.current_plan().to_json())
    open(os.path.join(folder, "program.txt"), "w").write(wh.current_program().to_text())
'''
PROGRAM = """\
t0_once           1 ops  takes w0:0  gives w0/read:0
t1_once          10 ops  takes w1:0  gives w1/read:0, Const:0, gradients/loss_grad/Tile:0, 1 more
t0_forward        1 ops  takes x:0, w0/read:0  gives h0:0
t0_backward       4 ops  takes gradients/h1_grad/tuple/control_dependency:0, w0/read:0, x:0  gives \
gradients/h0_grad/tuple/control_dependency_1:0
t1_forward        2 ops  takes h0:0, w1/read:0, Const:0  gives loss:0
t1_backward       4 ops  takes h0:0, gradients/loss_grad/Tile:0, gradients/h1_grad/MatMul:0  gives \
gradients/h1_grad/tuple/control_dependency:0, gradients/h1_grad/tuple/control_dependency_1:0
update            1 ops  takes nothing  gives GradientDescent/learning_rate:0
t0_update_1       1 ops  takes w0:0, GradientDescent/learning_rate:0, gradients/h0_grad/tuple/control_dependency_1:0  \
gives nothing
t1_update_1       1 ops  takes w1:0, GradientDescent/learning_rate:0, gradients/h1_grad/tuple/control_dependency_1:0  \
gives nothing
update_2          1 ops  takes nothing  gives nothing
#0  t0_divide               on host  takes x:0
#1  t0_once       g0 r0     on 0
#2  t1_once       g0 r0     on 1
#3  t0_forward    g0 m0 r0  on 0  takes x:0 from #0; w0/read:0 from #1
#4  t0_forward    g0 m1 r0  on 0  takes x:0 from #0; w0/read:0 from #1  after #3
#5  t0_backward   g0 m0 r0  on 0  takes x:0 from #0; gradients/h1_grad/tuple/control_dependency:0 from #9; w0/read:0 \
from #1  after #4
#6  t0_backward   g0 m1 r0  on 0  takes x:0 from #0; gradients/h1_grad/tuple/control_dependency:0 from #11; w0/read:0 \
from #1  after #5
#7  t0_accumulate g0 m1 r0  on 0  takes gradients/h0_grad/tuple/control_dependency_1:0 from #5+#6
#8  t1_forward    g0 m0 r0  on 1  takes h0:0 from #3; w1/read:0, Const:0 from #2
#9  t1_backward   g0 m0 r0  on 1  takes h0:0 from #3; gradients/loss_grad/Tile:0, gradients/h1_grad/MatMul:0 from #2
#10 t1_forward    g0 m1 r0  on 1  takes h0:0 from #4; w1/read:0, Const:0 from #2  after #9
#11 t1_backward   g0 m1 r0  on 1  takes h0:0 from #4; gradients/loss_grad/Tile:0, gradients/h1_grad/MatMul:0 from #2  \
after #9
#12 t1_accumulate g0 m1 r0  on 1  takes gradients/h1_grad/tuple/control_dependency_1:0 from #9+#11
#13 t0_merge                on 0  takes gradients/h0_grad/tuple/control_dependency_1:0 from #7
#14 t1_merge                on 1  takes gradients/h1_grad/tuple/control_dependency_1:0 from #12
#15 update                  on host
#16 t0_update_1   g0 r0     on 0  takes GradientDescent/learning_rate:0 from #15; \
gradients/h0_grad/tuple/control_dependency_1:0 from #13
#17 t1_update_1   g0 r0     on 1  takes GradientDescent/learning_rate:0 from #15; \
gradients/h1_grad/tuple/control_dependency_1:0 from #14
#18 update_2                on host
"""


def write(path: Path, annotation: str = "wh.replicate(1)", micro_batches: int = 2, reduction: str = "sum") -> str:
    path.write_text(SCRIPT.format(annotation=annotation, micro_batches=micro_batches, reduction=reduction))
    return str(path)


def train(script: str) -> Path:
    """Where the script's plan is after it has trained."""
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        wh.shutdown()
    return Path(script).with_name("plan.json")


def explain(*arguments: str) -> Called:
    return call(app, "explain", *arguments)


@pytest.mark.slow
def test_step_that_the_script_asks_for(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py")
    result = explain("--program", script)
    assert (result.exit_code, result.stdout) == (0, PROGRAM)
    assert not (tmp_path / "program.txt").exists(), "the script is left before it trains"
    lines = explain("--program", script, "--lowered").stdout.splitlines(keepends=True)
    primitives = [line for line in lines if line.startswith("      %")]
    assert primitives and "".join(line for line in lines if line not in primitives) == PROGRAM
    train(script)
    assert (tmp_path / "program.txt").read_text() == PROGRAM


@pytest.mark.slow
def test_step_that_a_plan_file_makes_of_the_script(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py")
    path = train(script)
    plan = json.loads(path.read_text())
    plan["task_graphs"][0]["devices"], plan["task_graphs"][1]["devices"] = [[1]], [[0]]
    path.write_text(json.dumps(plan))
    swapped = PROGRAM.replace("on 0", "on other").replace("on 1", "on 0").replace("on other", "on 1")
    assert explain(str(path), "--program", script).stdout == swapped
    named = explain(str(path), "--program", script, "--cluster", "cpu:2", "--most", "18").stdout.splitlines()
    expected = swapped.replace("  on ", "  on CPU:").replace("CPU:host", "host").splitlines()
    assert named == expected[:-1] + ["... and 1 more; --most 0 shows all calls"]
    assert explain(str(path), "--program", script, "--most", "0").stdout == swapped
    assert "CPU:1" in explain(str(path), "--cluster", "cpu:2").stdout


def refused(part: str, *arguments: str) -> None:
    result = explain(*arguments)
    assert result.exit_code == 1 and part in result.output and len(result.output.splitlines()) == 1, result.output


@pytest.mark.slow
def test_plan_of_another_graph_or_cluster_is_refused(tmp_path: Path) -> None:
    path = str(train(write(tmp_path / "train.py")))
    other = write(tmp_path / "other.py", reduction="mean")
    refused("this graph is", path, "--program", other)
    refused("the plan was made for 2 devices, but the cluster has 4", path, "--program", other, "--cluster", "cpu:4")


@pytest.mark.slow
def test_step_of_divided_ops(tmp_path: Path) -> None:
    """Its ops are made by a pass; without it neither the script's graph nor the plan knows them."""
    script = write(tmp_path / "train.py", "wh.split()", 1)
    shown = explain("--program", script)
    assert shown.exit_code == 0 and "shards/1/w1" in shown.stdout and not (tmp_path / "program.txt").exists()
    plan = str(train(script))
    assert (tmp_path / "program.txt").read_text() == shown.stdout == explain(plan, "--program", script).stdout


@pytest.mark.slow
def test_script_without_training_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text("import whale_tf as wh\nwh.init()\n")
    refused("so it has no step to show", "--program", str(tmp_path / "nothing.py"))
    refused("there is no file", "--program", str(tmp_path / "missing.py"))


@pytest.mark.parametrize("arguments,part", [([], "give a plan file, --program SCRIPT, or both"), (["--most", "-1"], "--most")])
def test_arguments_that_say_too_little(arguments: List[str], part: str) -> None:
    result = explain(*arguments)
    assert result.exit_code == 2 and part in result.output


@pytest.mark.slow
def test_step_in_the_environment_of_one_of_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without wh.init, too: the command's own took one device for both, which is refused."""
    monkeypatch.setenv("TF_CONFIG", tf_configs(free_ports(2))[0]["TF_CONFIG"])
    path = tmp_path / "train.py"
    path.write_text(PLAIN)
    shown = explain("--program", str(path), "--cluster", "2xcpu:2")
    assert shown.exit_code == 0 and "t0_synchronise" in shown.stdout and "CPU:1" in shown.stdout, shown.output


PLAIN = """\
import tensorflow.compat.v1 as tf

with tf.Graph().as_default(), tf.Session() as session:
    x, w = tf.placeholder(tf.float32, [8, 4]), tf.get_variable("w", [4, 1])
    train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.matmul(x, w) ** 2))
    session.run(tf.global_variables_initializer())
    session.run(train)
"""
