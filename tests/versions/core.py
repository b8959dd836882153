"""The numeric core, run with an installed package: every kind of plan trains as the local script does, and the commands answer.

It uses nothing of the repository but the model beside it; ``__main__.py`` starts it in each environment.
"""
from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any, Callable, Dict, List, Optional, Tuple

import model as script
import numpy as np
import tensorflow.compat.v1 as tf
from model import STEPS, build, mini_batch

import whale_tf as wh

TOLERANCE = 1e-10
SAVED_AFTER = STEPS // 2
DIVIDED = {"io.nested_batch": "divide"}  # model replicas share the mini-batch, so that every plan trains on the same examples

Outcome = Tuple[List[float], Dict[str, Any]]  # losses, variables


def one() -> Any:
    return wh.replicate(1)


def whole() -> Any:
    return wh.replicate(2)


def divided() -> Any:
    return wh.split(2)


def train(scopes: Any = (), restore: str = "", save: str = "", steps: Any = range(STEPS)) -> Outcome:
    """Losses and variables after some steps in a graph of its own."""
    with tf.Graph().as_default():
        model = build(*scopes)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            if restore:
                saver.restore(session, restore)
            losses = [float(session.run([model.loss, model.train_op], mini_batch(model, step))[0]) for step in steps]
            if save:
                saver.save(session, save)
            return losses, {variable.op.name: session.run(variable) for variable in tf.global_variables()}


@contextlib.contextmanager
def whale(config: Any, cluster: str, plan: Optional[str] = None) -> Any:
    wh.init(config, cluster=cluster, plan=plan)
    try:
        yield
    finally:
        wh.shutdown()


def assert_equal(found: Outcome, expected: Outcome) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=TOLERANCE)
    assert sorted(found[1]) == sorted(expected[1]), (sorted(found[1]), sorted(expected[1]))
    for name, value in expected[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def run(*command: str) -> str:
    """The output of the installed ``whale``."""
    found = subprocess.run([os.path.join(os.path.dirname(sys.executable), "whale"), *command], stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, universal_newlines=True)
    assert found.returncode == 0, f"whale {' '.join(command)}\n{found.stdout}"
    return found.stdout


def plans(config: Any, cluster: str, *scopes: Any) -> Callable[[], None]:
    """A check: under a plan the model trains as it does locally, on all devices, and the plan can be explained."""

    def check() -> None:
        with whale(dict(config, **DIVIDED), cluster):
            outcome, plan, text = train(scopes), wh.current_plan(), str(wh.explain())
        assert plan is not None and plan.num_devices == int(cluster.split(":")[1]), plan
        assert "TaskGraph" in text, text
        assert_equal(outcome, LOCAL)

    return check


def checkpoint() -> None:
    """Saved under a plan, restored locally, and trained on."""
    path = os.path.abspath("model.ckpt")
    with whale(dict(DIVIDED, num_micro_batch=4), "cpu:4"):
        before = train((one, one), save=path, steps=range(SAVED_AFTER))
    after = train(restore=path, steps=range(SAVED_AFTER, STEPS))
    assert_equal((before[0] + after[0], after[1]), LOCAL)


def plan_of_a_script() -> None:
    """``whale plan`` on the script, and the script under that plan."""
    run("plan", "--model", script.__file__, "--cluster", "cpu:2", "--global-batch", str(script.BATCH), "--search", "auto",
        "-o", "plan.json")
    with whale(None, "cpu:2", "plan.json"):
        outcome = train()
    assert_equal(outcome, LOCAL)


def commands() -> None:
    """Planning and simulating models of the package."""
    run(*"plan --model bert-48 --cluster dapple-a --global-batch 64 --search amp".split())
    run(*"simulate --model gpt2 --cluster hc2 --dp 8 --tp 2 --pp 1 --micro-batches 1 --global-batch 64".split())


def functions() -> None:
    """Functions and Keras, which need eager execution."""
    path = os.path.join(os.path.dirname(script.__file__), "functions.py")
    found = subprocess.run([sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
    assert found.returncode == 0, found.stdout


CHECKS: Dict[str, Callable[[], None]] = {
    "data parallel": plans({}, "cpu:2", whole, whole),
    "pipeline": plans({"num_micro_batch": 4}, "cpu:2", one, one),
    "nested": plans({"num_micro_batch": 4}, "cpu:4", one, one),
    "nested, as calls": plans({"num_micro_batch": 4, "emit": "call"}, "cpu:4", one, one),
    "split": plans({}, "cpu:2", whole, divided),
    "checkpoint": checkpoint,
    "auto_parallel": plans({"auto_parallel": True}, "cpu:2"),
    "auto_parallel rhino": plans({"auto_parallel": "rhino"}, "cpu:2"),
    "functions": functions,
    "whale plan": plan_of_a_script,
    "whale simulate": commands,
}


if __name__ == "__main__":
    assert wh.__file__.startswith(sys.prefix), f"{wh.__file__} is not the installed package"
    tf.disable_eager_execution()
    LOCAL = train()
    for name, check in CHECKS.items():
        print(name, flush=True)
        check()
    print("passed")
