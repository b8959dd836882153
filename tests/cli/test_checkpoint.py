"""``whale checkpoint``: a snapshot becomes a file that training without whale_tf reads."""
from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from tests.command_line import call
from tests.numeric.test_resume_sessions import COPIES, DIVIDED, fed_loop, script, trained
from whale_tf._tf_compat import eager_mode
from whale_tf.cli import app
from whale_tf.errors import SnapshotError
from whale_tf.runtime.snapshots import joining
from whale_tf.runtime.snapshots.files import Piece, Store, opened

v1 = tf.compat.v1
WHOLE = np.arange(20.0).reshape(5, 4)


@pytest.mark.slow
@pytest.mark.parametrize("way", [DIVIDED, pytest.param(COPIES, marks=pytest.mark.full)])
def test_checkpoint_of_a_loop_in_a_session(tmp_path: Path, way: Any) -> None:
    """The local script restores it."""
    out = str(tmp_path / "saved" / "model.ckpt-18")
    _, values = trained(fed_loop, str(tmp_path / "snapshots"), way)
    wh.shutdown()
    result = call(app, "checkpoint", str(tmp_path / "snapshots"), out)
    assert result.exit_code == 0 and f"{out}: 12 variables, 0.0 MiB, after step 18 (" in result.output, result.output
    assert tf.train.latest_checkpoint(os.path.dirname(out)) == out
    with tf.Graph().as_default():
        script(lambda number: tf.name_scope(""), True, None)
        with v1.Session() as session:
            v1.train.Saver().restore(session, out)
            found = session.run(v1.global_variables())
    assert len(found) == len(values) == 12
    for value, other in zip(found, values):
        np.testing.assert_array_equal(value, other)


def snapshot(folder: Path, parts: List[Dict[int, np.ndarray]]) -> str:
    """A snapshot of a variable in pieces that begin at these rows, of a scalar, and of another variable of this name."""
    told: List[str] = []
    store = Store(str(folder), 2, told.append)
    path = store.folder(3, 1)
    for rank, held in enumerate(parts):
        pieces = [Piece(f"a/{row}", "a", "w:0", WHOLE.shape, (row, 0), False) for row in held]
        values: List[Any] = list(held.values())
        if not rank:
            pieces += [Piece("b", "b", "w:0", (2,), (0,), True), Piece("n", "n", "step:0", (), (), True)]
            values += [np.float32([1, 2]), np.int64(3)]
        with eager_mode():
            store.write_part(path, rank, pieces, values)
    store.complete(path, 3, len(parts), "{}", lambda: False)
    assert not told
    return path


@pytest.mark.parametrize("shard_bytes", [1, joining.SHARD_BYTES])
def test_parts_are_slices(tmp_path: Path, monkeypatch: Any, shard_bytes: int) -> None:
    """Each is in memory alone, if it must be.  Two processes have written the first: they run replicas of the model."""
    monkeypatch.setattr(joining, "SHARD_BYTES", shard_bytes)
    path = snapshot(tmp_path / "loop-0", [{0: WHOLE[:2]}, {0: WHOLE[:2]}, {4: WHOLE[4:], 2: WHOLE[2:4]}])
    with eager_mode():
        assert {key: value.tolist() for key, _, value in opened(path).variables()} == {"a": WHOLE.tolist(), "b": [1, 2], "n": 3}
    out = str(tmp_path / "out" / "all")
    os.makedirs(f"{out}_new")  # the user's own
    found = joining.join(str(tmp_path), out)
    assert found[1:] == (3, 3, WHOLE.nbytes + 8 + 8)
    reader = tf.train.load_checkpoint(out)
    assert {name: reader.get_tensor(name).tolist() for name in reader.get_variable_to_shape_map()} == {
        "w": WHOLE.tolist(), "w_1": [1, 2], "step": 3}
    assert sorted(os.listdir(tmp_path / "out"))[:2] == ["all.data-00000-of-00001", "all.index"] or shard_bytes == 1
    assert [name for name in os.listdir(tmp_path / "out") if os.path.isdir(tmp_path / "out" / name)] == ["all_new"]


def test_what_cannot_be_joined(tmp_path: Path, monkeypatch: Any) -> None:
    snapshot(tmp_path / "loop-0", [{0: WHOLE[:2]}])
    with pytest.raises(SnapshotError, match="lacks pieces of w:0; give the one before"):
        joining.join(str(tmp_path), str(tmp_path / "out"))
    with pytest.raises(SnapshotError, match="'.*out.weights.h5' cannot be made of .* of a Session, an Estimator or a loop is a "
                                            "checkpoint of TensorFlow, so give it a name without .weights.h5"):
        joining.join(str(tmp_path), str(tmp_path / "out.weights.h5"))
    path = snapshot(tmp_path / "loop-1", [{0: WHOLE}])
    found = joining.find(path)
    shutil.rmtree(path)
    monkeypatch.setattr(joining, "find", lambda given: found)
    monkeypatch.setattr(found, "state", lambda: ({}, {}))
    with pytest.raises(SnapshotError, match="cannot be made of .*; if training that goes on has taken newer snapshots"):
        joining.join(path, str(tmp_path / "out"))
    monkeypatch.undo()
    with pytest.raises(SnapshotError, match=r"of 2 runs \(loop-0, loop-1\); give the folder of one of them"):
        joining.join(str(tmp_path), str(tmp_path / "out"))
    path = snapshot(tmp_path / "loop-1", [{0: WHOLE}])
    os.truncate(os.path.join(path, "part-0.json"), 7)
    result = call(app, "checkpoint", path, str(tmp_path / "out"))
    assert result.exit_code == 1 and "does not count: part-0.json has 7 bytes of" in result.output
    result = call(app, "checkpoint", str(tmp_path / "other"), str(tmp_path / "out"))
    assert result.exit_code == 1 and "there is no snapshot in" in result.output
