"""Every example runs as its first lines say, and its loss falls."""
from __future__ import annotations

import glob
import os
import re
import sys
from typing import Sequence

import pytest

from tests.multiprocess.launch import printed

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
EXAMPLES = ("data_parallel", "pipeline", "nested", "unequal_replicas", "auto_pipeline", "split_classifier",
            "mixture_of_experts")

# The first makes the devices of all. What the second tuple holds has its models in tests/functions, too.
KERAS = ("image_classification", "structured_data", "metric_learning", "knowledge_distillation", "gradient_accumulation",
         "mixture_of_experts")
MORE_KERAS = ("text_transformer", "gan", "autoencoder", "timeseries")


RUN_ALL = """
import os, runpy, sys
import tensorflow.compat.v1 as tf
import whale_tf as wh
for path in sys.argv[1:]:
    print("EXAMPLE", flush=True)
    runpy.run_path(path, run_name="__main__")
    wh.shutdown()
    tf.reset_default_graph()
    os.environ.pop("WHALE_CLUSTER", None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("names", [
    pytest.param(EXAMPLES, id="in one process"), *[pytest.param((name,), id=name, marks=pytest.mark.full) for name in EXAMPLES]])
def test_examples(names: Sequence[str]) -> None:
    paths = [os.path.join("examples", name + ".py") for name in names]
    outputs = [printed(*paths)] if len(paths) == 1 else printed("-c", RUN_ALL, *paths).split("EXAMPLE\n")[1:]
    assert len(outputs) == len(names)
    for name, output in zip(names, outputs):
        losses = [float(text) for text in re.findall(r"loss ([\d.]+)", output)]
        assert len(losses) >= 6 and losses[-1] < 0.9 * losses[0], (name, output)


has_keras_3 = pytest.mark.skipif(sys.version_info < (3, 8), reason="TensorFlow 1.15 has no Keras 3")


@pytest.mark.slow
@has_keras_3
@pytest.mark.parametrize("names", [KERAS, pytest.param(MORE_KERAS, marks=pytest.mark.full)], ids=["some", "more"])
def test_keras_examples(names: Sequence[str]) -> None:
    paths = [os.path.join("examples", "keras", name + ".py") for name in names]
    outputs = printed("-c", RUN_ALL, *paths).split("EXAMPLE\n")[1:]
    assert len(outputs) == len(names)
    for name, output in zip(names, outputs):
        losses = [float(text) for text in re.findall(r" (?:g_)?loss: ([\d.]+)", output)]
        assert len(losses) >= 4 and losses[-1] < (1.0 if name == "gan" else 0.8) * losses[0], (name, output)
        assert "Exact: the parallel result equals the local one" in output, (name, output)
        if name == "gradient_accumulation":
            assert float(re.findall(r"difference of any weight after 30 steps: (\S+)", output)[0]) < 1e-4


@pytest.mark.slow
@has_keras_3
def test_keras_example() -> None:
    output = printed(os.path.join("examples", "keras_fit.py"))
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 6 and losses[-1] < 0.5 * losses[0], output
    assert "2 TaskGraph(s) on 4 of 4 devices" in output


@pytest.mark.once
@pytest.mark.slow
def test_m6_example() -> None:
    """Eight stages times 35 micro-batches are many ops: ten steps have to do."""
    output = printed(os.path.join("examples", "m6_pipeline.py"))
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 3 and losses[-1] < 0.95 * losses[0], output
    assert "8 TaskGraph(s) on 8 of 8 devices" in output and "35 micro-batch(es)" in output


@pytest.mark.once
@pytest.mark.slow
def test_demo() -> None:
    output = printed("-m", "examples.demo", "--layers", "2", "--epochs", "2", anew=True)
    lines = output.strip().splitlines()
    assert lines[0].startswith("A 2-layer transformer"), "nothing of TensorFlow's log"
    assert "verify: the first step of tf.function 'one_step_on_data' equals the local one" in output
    assert lines[-2].startswith("Shown: ") and "the losses agree" in lines[-2] and lines[-1].startswith("Next: ")
    assert os.path.exists(os.path.join(ROOT, lines[-1].split()[2]))
    picture = re.search(r"picture of both loss curves: (\S+)", output)
    assert picture and os.path.getsize(picture.group(1)) > 1000


def test_no_example_is_left_out() -> None:
    scripts = {os.path.basename(path)[:-3] for path in glob.glob(os.path.join(ROOT, "examples", "[a-z]*.py"))}
    assert scripts == set(EXAMPLES) | {"m6_pipeline", "demo", "training", "programs", "schedules", "keras_fit"}
    scripts = {os.path.basename(path)[:-3] for path in glob.glob(os.path.join(ROOT, "examples", "keras", "*.py"))}
    assert scripts == set(KERAS + MORE_KERAS)
