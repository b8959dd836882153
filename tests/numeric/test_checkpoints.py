"""A checkpoint holds the local model, whatever plan wrote it."""
from __future__ import annotations

import functools
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.numeric.cases import CASES
from tests.numeric.checkpoints import HALF, train_half
from tests.numeric.equality import TOLERANCE, relative
from tests.numeric.plans import SHAPES, Parallel
from tests.numeric.script import Setting, Stages, source

pytestmark = pytest.mark.half
DEFAULT = Setting()
CASE = CASES["clipped_adam"]
PIPELINE = Parallel(SHAPES["pipeline4"], 4)
PLANS: Dict[str, Any] = {"local": None, "pipeline4": PIPELINE, "replicate2": Parallel(SHAPES["replicate2"]),
                         "counts1:3": Parallel(SHAPES["counts1:3"], 2)}


def train(parallel: Any, first: int, restore: str = "", save: str = "",
          setting: Setting = DEFAULT) -> Tuple[List[float], List[str]]:
    if parallel is None:
        return train_half(CASE, setting, first, restore, save)
    return train_half(CASE, setting, first, restore, save, parallel.shape.devices, parallel.config(),
                      [functools.partial(wh.replicate, count) for count in parallel.shape.counts])


def assert_same(losses: List[float], expected: List[float]) -> None:
    errors = [relative(a, b) for a, b in zip(losses, expected)]
    assert len(losses) == len(expected) == HALF and max(errors) <= TOLERANCE["float64"], errors


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("writer,reader,resource", [
    (writer, reader, resource) if number % 2 == resource else pytest.param(writer, reader, resource, marks=pytest.mark.full)
    for number, (writer, reader) in enumerate([("pipeline4", "local"), ("local", "pipeline4"), ("pipeline4", "replicate2"),
                                               ("counts1:3", "pipeline4"), ("local", "local")])
    for resource in (True, False)])
def test_training_goes_on(writer: str, reader: str, resource: bool, tmp_path: Any) -> None:
    """The second half after a restore gives the losses of a local run that never stopped."""
    setting, path = Setting(resource=resource), str(tmp_path / "model")
    whole, other = str(tmp_path / "whole"), PLANS[reader]
    train(None, 0, save=whole, setting=setting)
    expected, names = train(None, HALF, restore=whole, setting=setting)
    train(PLANS[writer], 0, save=path, setting=setting)
    assert_same(train(other, HALF, restore=path, setting=setting)[0], expected)
    assert sorted(name for name, _ in tf.train.list_variables(path)) == names


@pytest.mark.slow
def test_lost_checkpoint_would_be_noticed(tmp_path: Any) -> None:
    """Training from fresh values gives other losses: the comparison above can fail."""
    train(None, 0, save=str(tmp_path / "model"))
    restored, fresh = train(None, HALF, restore=str(tmp_path / "model"))[0], train(None, HALF)[0]
    assert not np.allclose(restored, fresh, rtol=1e-3)


@pytest.mark.slow
def test_monitored_session_restores_what_a_pipeline_saved(tmp_path: Any) -> None:
    """MonitoredTrainingSession saves under a pipeline and goes on under data parallelism."""
    def run(parallel: Parallel, first: int) -> List[float]:
        wh.init(parallel.config(), cluster=f"cpu:{parallel.shape.devices}")
        try:
            with tf.Graph().as_default():
                inputs, feeds = source(CASE.examples(sum(CASE.sizes), "float64"), CASE.sizes, DEFAULT)
                stages = Stages([functools.partial(wh.replicate, count) for count in parallel.shape.counts])
                script = CASE.build(inputs, stages, "float64")
                with tf.train.MonitoredTrainingSession(checkpoint_dir=str(tmp_path / "monitored"),
                                                       save_checkpoint_steps=HALF, log_step_count_steps=None,
                                                       save_summaries_steps=None) as session:
                    return [session.run([script.losses["loss"], script.runs[0]], feed)[0]
                            for feed in feeds[first:first + HALF]]
        finally:
            wh.shutdown()

    train(None, 0, save=str(tmp_path / "local"))
    expected = train(None, HALF, restore=str(tmp_path / "local"))[0]
    run(PIPELINE, 0)
    assert_same(run(PLANS["replicate2"], HALF), expected)
