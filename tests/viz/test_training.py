"""``wh.Timeline`` around runs of a Session."""
from __future__ import annotations

import contextlib
import glob
import json
import os
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import pytest

import whale_tf as wh
from whale_tf._tf_compat import tf, v1
from whale_tf.capture import hooks
from whale_tf.cluster import Processes
from whale_tf.diagnosis import scalars
from whale_tf.diagnosis.record import parse
from whale_tf.errors import PlanError
from whale_tf.runtime.curves import Curves

# two CPU devices with a known peak
TWO = {"name": "two", "nodes": [{"devices": [{"type": "known", "count": 2}], "links": "default"}], "device_types": {
    "known": {"kind": "CPU", "fp32": 1e9, "memory_gib": 8, "memory_bandwidth_bytes_per_s": 1e10, "fabric": "cpu"}}}


def scalars_of(folder: str) -> Dict[str, List[Tuple[int, float]]]:
    """Name -> (step, value), as TensorBoard reads them."""
    found: Dict[str, List[Tuple[int, float]]] = {}
    for path in sorted(glob.glob(os.path.join(folder, "*tfevents*"))):
        for event in v1.train.summary_iterator(path):
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def trained(timeline: Optional[Dict[str, Any]], is_late: bool = False) -> List[Any]:
    """Losses of ten steps of a pipeline, and its first variable.

    Args:
        is_late: make the timeline when the step has been divided.
    """
    wh.init({"num_micro_batch": 2}, cluster=TWO)
    try:
        with tf.Graph().as_default():
            v1.set_random_seed(1)
            x = v1.placeholder(tf.float64, [None, 6], name="x")
            first, second = (v1.get_variable(name, [6, 6], tf.float64, v1.glorot_uniform_initializer(1)) for name in "ab")
            with wh.replicate(1):
                hidden = tf.tanh(tf.matmul(x, first))
            with wh.replicate(1):
                loss = tf.reduce_mean(tf.square(tf.matmul(hidden, second, name="product")))
            train = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
            made = None if timeline is None or is_late else wh.Timeline(**timeline)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                made = wh.Timeline(**timeline) if timeline is not None and is_late else made
                with contextlib.ExitStack() as stack:
                    if made is not None:
                        stack.enter_context(made)
                    losses = [session.run([loss, train], {x: np.ones([8, 6])})[0] for _ in range(10)]
                return [losses, session.run(first)]
    finally:
        wh.shutdown()


@pytest.mark.slow
def test_session(tmp_path: Path) -> None:
    files = {name: str(tmp_path / name) for name in ("step.svg", "step.json", "record.json", "logs")}
    found = trained({"timeline": files["step.svg"], "trace": files["step.json"], "record": files["record.json"],
                     "log_dir": files["logs"], "steps": (5, 7), "update_freq": 3})
    for one, other in zip(found, trained(None)):
        assert np.array_equal(one, other)
    measured = parse(files["record.json"])
    process, = measured.processes
    assert process.traced == 3 and measured.step.batch == 8
    products = [(ran.device, ran.micro_batch) for ran in process.timeline if ran.name == "product"]
    assert sorted(products) == [(1, 0), (1, 1)]
    events = [one for one in json.loads(Path(files["step.json"]).read_text())["traceEvents"] if one["name"] == "product"]
    assert [(one["cat"], one["args"]["stage"], one["args"]["micro_batch"]) for one in events] == [
        ("forward", 1, 0), ("forward", 1, 1)] * 2  # measured and simulated
    assert "simulated: " in Path(files["step.svg"]).read_text(encoding="utf8")
    written = scalars_of(files["logs"])
    assert [step for step, _ in written[scalars.EXAMPLES_PER_S]] == [9, 10]
    assert [step for step, _ in written[scalars.BUBBLE]] == [7]
    flops = 2 * 8 * 6 * 6 * 5  # of two products forward, and three backward, of which inputs need none
    assert [mfu for _, mfu in written[scalars.MFU]] == pytest.approx(
        [rate * flops / 8 / 2e9 for _, rate in written[scalars.EXAMPLES_PER_S]], rel=1e-5)
    assert written[scalars.EXAMPLES_PER_S][0][1] == pytest.approx(8 * written[scalars.STEPS_PER_S][0][1], rel=1e-5)


@pytest.mark.slow
def test_timeline_that_comes_too_late_says_so(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="made, after the step was divided"):
        trained({"log_dir": str(tmp_path)}, is_late=True)


def test_processes_write_runs_of_their_own(tmp_path: Path) -> None:
    """Of what a script writes itself, only process 0 does."""
    hooks.install(hooks.Callbacks(add_event=lambda writer, original, event: None))
    try:
        curves = Curves(str(tmp_path), Processes(("a:1", "b:1"), 1))
        curves.write(3, {"a": 1.0})
        curves.flush()
    finally:
        hooks.uninstall()
    assert scalars_of(str(tmp_path / "process_1")) == {"a": [(3, 1.0)]} and not scalars_of(str(tmp_path))
