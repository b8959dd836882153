"""What an extra installs is asked for by name where it is missing, and missed nowhere else."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.multiprocess.launch import printed
from whale_tf.cluster import Cluster
from whale_tf.errors import InfeasibleError, MissingPackageError, WhaleError
from whale_tf.planner.candidate import RUNNERS_UP, Candidate, best, no_candidate
from whale_tf.planner.rhino.pipeline import Flow, StageProblem, stage_program

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OPTIONAL = ("ortools", "ortools.linear_solver", "matplotlib", "scipy", "pandas", "sklearn")
PLANNER = 'pip install "whale_tf[planner]"'
WHALE = "from whale_tf.cli import main; main()"


# Python as it is where nothing is installed but the hard requirements (and TensorFlow)
ABSENT = f"import sys\nfor name in {OPTIONAL!r}: sys.modules[name] = None\n"


def run_plain(script: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", ABSENT + script, *arguments], cwd=ROOT, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True)


@pytest.fixture
def no_ortools(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ortools", "ortools.linear_solver"):
        monkeypatch.setitem(sys.modules, name, None)


def test_integer_program_names_its_extra(no_ortools: None) -> None:
    problem = StageProblem([1.0, 1.0], [Flow(0, (1,), 8)])
    with pytest.raises(MissingPackageError) as caught:
        stage_program(problem, 2, 0.0)
    assert str(caught.value).endswith(PLANNER) and "\n" not in str(caught.value)
    assert isinstance(caught.value, (WhaleError, ImportError))


@pytest.mark.slow
def test_pictures_name_their_extra(tmp_path: Any) -> None:
    arguments = ["simulate", "--model", "mlp", "--cluster", "cpu:2", "--dp", "2", "--report", str(tmp_path / "report.html")]
    result = run_plain(WHALE, *arguments)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 1 and len(lines) == 1, result.stderr
    assert lines[0].startswith("error: pictures need matplotlib") and lines[0].endswith('pip install "whale_tf[viz]"')


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [
    "plan --model mlp --cluster dapple-a --global-batch 64 --search amp",
    "simulate --model gpt2 --cluster hc2 --dp 8 --tp 2 --global-batch 64"])
def test_commands_need_no_extra(arguments: str) -> None:
    result = run_plain(WHALE, *arguments.split())
    assert result.returncode == 0, result.stderr


MODEL = """
import json
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
import whale_tf as wh
wh.init({"auto_parallel": json.loads(sys.argv[1])}, cluster="cpu:4")
width = int(sys.argv[2])
x = tf.placeholder(tf.float32, [16, width])
y = x
for i in range(4):
    y = tf.nn.relu(tf.matmul(y, tf.get_variable(f"w{i}", [width, width])))
loss = tf.reduce_mean(y)
step = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    session.run([loss, step], {x: [[1.0] * width] * 16})
print(wh.explain())
print(json.dumps(wh.current_plan().estimate.runners_up))
"""


@pytest.mark.slow
@pytest.mark.parametrize("method,width", [("true", 64), ('"rhino"', 64), ('"rhino"', 4)])
def test_automatic_plans_say_what_was_no_candidate(method: str, width: int) -> None:
    """The last one is too small for any division to be worth it."""
    output = printed("-c", ABSENT + MODEL, method, str(width))
    told = [text for text in json.loads(output.splitlines()[-1]) if text.startswith("pipelines of rhino: no candidate: ")]
    assert len(told) == 1 and told[0].endswith(PLANNER), output
    assert told[0] in " ".join(output.split()), "wh.explain() says it as well"


def test_reasons_are_not_crowded_out() -> None:
    plans = [Candidate("search", f"plan {number}", latency_s=1.0 + number) for number in range(RUNNERS_UP + 2)]
    taken = best([no_candidate("rhino", ValueError("too large"))] + plans, Cluster.parse("cpu:2"))
    told = tuple(f"search: plan {number}, {number + 1}.000 s" for number in range(1, RUNNERS_UP + 1))
    assert (taken.description, taken.runners_up) == ("plan 0", told + ("rhino: no candidate: too large",))


def test_without_any_plan_every_reason_is_told() -> None:
    with pytest.raises(InfeasibleError, match="^nothing is worth dividing; 'sort' cannot be divided$"):
        best([no_candidate("rhino", ValueError("nothing is worth dividing")),
              no_candidate("data parallelism", ValueError("'sort' cannot be divided")),
              no_candidate("undivided", ValueError("'sort' cannot be divided"))], Cluster.parse("cpu:2"))
