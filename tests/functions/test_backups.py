"""``fit`` with BackupAndRestore: a run that ends and goes on equals one that does not end, and plain Keras reads its files."""
from __future__ import annotations

import json
import os
import re
import shutil
from types import SimpleNamespace
from typing import Any, List, Sequence

import numpy as np
import pytest
import tensorflow as tf

from tests.functions.test_snapshots import check, divided, plain, players, stop
from whale_tf._tf_compat import eager_context
from whale_tf.cluster import ONE_PROCESS
from whale_tf.config import Config
from whale_tf.processes.datasets import is_shuffled_anew
from whale_tf.runtime.snapshots.backups import Backup
from whale_tf.runtime.snapshots.runs import Runs

pytestmark = pytest.mark.skipif(not hasattr(tf, "keras") or not hasattr(tf.keras, "ops"), reason="backups are of Keras 3's fit")
if hasattr(tf.keras, "ops"):
    from tests.functions import long_runs
    from tests.functions.long_runs import Outcome, Stop, fitted


def backed_up(path: Any, save_freq: Any, config: Any, cluster: str, data: str = "dataset", more: Sequence[Any] = (),
              delete: bool = False, **options: Any) -> Any:
    backup = tf.keras.callbacks.BackupAndRestore(str(path), save_freq, delete_checkpoint=delete)
    return fitted(config, cluster, data, callbacks=[backup, *more], **options)


@pytest.mark.slow
@pytest.mark.parametrize("data, save_freq, after, where", [
    ("dataset", 4, 11, "2, after 2"), ("arrays", "epoch", 8, "2, after 0"),
    pytest.param("python dataset", 3, 7, "1, after 6", marks=pytest.mark.full),
    pytest.param("python dataset", "epoch", 13, "3, after 0", marks=pytest.mark.full),
    pytest.param("endless", 4, 14, "2, after 6", marks=pytest.mark.full),
    pytest.param("of unknown length", 1, 13, "2, after 6", marks=pytest.mark.full),
    pytest.param("generator", "epoch", 14, "3, after 0", marks=pytest.mark.full)])
def test_goes_on_at_the_next_example(float64: None, tmp_path: Any, capfd: Any, data: str, save_freq: Any, after: int,
                                     where: str) -> None:
    """With dropout, noise, callbacks that count epochs; at the end of the run Keras deletes its files."""
    whole = backed_up(tmp_path / "whole", save_freq, {}, "cpu:1", data, delete=True)
    with pytest.raises(Stop):
        backed_up(tmp_path / "ends", save_freq, {}, "cpu:1", data, end=stop, after=after)
    assert "fit goes on" not in capfd.readouterr().err
    check(backed_up(tmp_path / "ends", save_freq, {}, "cpu:1", data, delete=True), whole)
    assert f"fit goes on in epoch {where} steps" in capfd.readouterr().err
    assert not (tmp_path / "whole").exists() and not (tmp_path / "ends").exists()


@pytest.mark.slow
def test_goes_on_under_another_plan(float64: None, tmp_path: Any) -> None:
    """A pipeline with a sharded stage, then optimizer states in parts; with Keras' files torn in the midst of a save."""
    pipeline, zero = ({"num_micro_batch": 2}, "cpu:3"), ({"zero": "v2"}, "cpu:2")
    whole = backed_up(tmp_path / "whole", 100, *pipeline, make=divided)
    with pytest.raises(Stop):
        backed_up(tmp_path / "ends", 4, *pipeline, make=divided, end=stop, after=9)
    with open(tmp_path / "ends/latest.weights.h5", "r+b") as handle:
        handle.truncate(100)
    check(backed_up(tmp_path / "ends", 4, *zero, make=plain), whole)


@pytest.mark.slow
def test_second_fit_of_a_model(float64: None, tmp_path: Any) -> None:
    """Its step was traced by the first one, which had no backups; it has optimizers that Keras does not know."""
    def run(name: str, **options: Any) -> Outcome:
        def make() -> Any:
            model = players()
            model.fit(**long_runs.dataset(), epochs=1, verbose=0)
            return model

        return backed_up(tmp_path / name, 4, {"zero": "v2"}, "cpu:2", make=make, **options)

    whole = run("whole")
    with pytest.raises(Stop):
        run("ends", end=stop, after=11)
    again = run("ends")
    check(again, whole)
    assert len(again.steps) == 3 * long_runs.STEPS


@pytest.mark.slow
def test_plain_keras_reads_the_files_and_is_newer(float64: None, tmp_path: Any, capfd: Any) -> None:
    """Keras goes on as from its own backup.  What it saves then counts more than the state beside it."""
    def run(name: str, is_divided: bool, **options: Any) -> Outcome:
        config, cluster = ({"zero": "v2"}, "cpu:2") if is_divided else ({}, "")
        return backed_up(tmp_path / name, 4, config, cluster, make=plain, **options)

    def same(one: str, other: str, is_divided: bool) -> None:
        check(run(one, is_divided), run(other, False))

    for name, is_divided in (("ours", True), ("keras", False)):
        with pytest.raises(Stop):
            run(name, is_divided, end=stop, after=11)
    assert {**json.loads((tmp_path / "ours/training_metadata.json").read_text()), "whale_tf": ""} == {
        **json.loads((tmp_path / "keras/training_metadata.json").read_text()), "whale_tf": ""}
    shutil.copytree(tmp_path / "ours", tmp_path / "other")
    for name in ("ours", "keras"):
        with pytest.raises(Stop):
            run(name, False, end=stop, after=6)
    capfd.readouterr()
    assert os.listdir(tmp_path / "ours/whale_tf"), "of the run before"
    same("ours", "keras", is_divided=True)
    assert "goes on" not in capfd.readouterr().err
    with pytest.raises(Stop):
        run("other", True, end=stop, after=3, more=[tf.keras.callbacks.TerminateOnNaN()])
    assert ("has backups of another training (the callbacks BackupAndRestore, TerminateOnNaN, Steps, EarlyStopping, "
            "ReduceLROnPlateau, History, but had BackupAndRestore, Steps") in capfd.readouterr().err


def test_shuffles_without_a_seed() -> None:
    eager_context()._set_global_seed(None)
    data = tf.data.Dataset.range(8)
    assert is_shuffled_anew(data.shuffle(4).batch(2))
    inner = [data.interleave(lambda i, seed=seed: data.shuffle(4, seed=seed).repeat(2)) for seed in (None, 1)]
    assert list(map(is_shuffled_anew, inner)) == [True, False]
    assert not is_shuffled_anew(data.shuffle(4, seed=1).batch(2)) and not is_shuffled_anew(data.batch(2))


@pytest.mark.parametrize("others, is_found, told", [
    ([0, 0, 0], True, ""), ([1], False, ""),
    ([0, 0, 1], False, "not all processes find '.*ours', so BackupAndRestore restores only weights")])
def test_all_processes_need_the_directory(tmp_path: Any, capfd: Any, others: List[int], is_found: bool, told: str) -> None:
    """What another process says: it has no such callback; process 0 has left a file; it does not find the file."""
    class Two(Runs):
        _gather = staticmethod(lambda row: np.array([row, [others.pop(0)]]))  # type: ignore[assignment]

    nothing: Any = None
    runs = Two(Config().snapshot, ONE_PROCESS, nothing, nothing, nothing, nothing, nothing)
    found = runs._backup([tf.keras.callbacks.BackupAndRestore(str(tmp_path / "ours"))])
    assert (found is not None) == is_found and not others
    assert re.search(told, capfd.readouterr().err)
    assert not is_found or os.listdir(tmp_path / "ours/whale_tf") == []


def test_metadata_decide(tmp_path: Any) -> None:
    path = tmp_path / "training_metadata.json"
    backup = Backup(SimpleNamespace(backup_dir=tmp_path, _training_metadata_path=str(path)))
    assert backup.counts(), "Keras has written nothing"
    for text, expected in (('{"epoch": 1, "batch": 2, "whale_tf": "step-3-a"}', True), ('{"epoch": 1, "batch": 2}', False),
                           ('{"epoch": 1, "ba', False)):
        path.write_text(text)
        assert backup.counts() == expected
