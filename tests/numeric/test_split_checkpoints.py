"""Checkpoints of divided variables: written and read slice by slice, by savers of every form; the files are the local model's."""
from __future__ import annotations

import contextlib
import glob
from typing import Any, Dict, Iterator, NamedTuple, Optional

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh

pytestmark = pytest.mark.half
WIDTH, CLASSES = 12, 10


class Model(NamedTuple):
    """A built script in a session; ``values`` fetches every variable."""

    session: tf.Session
    saver: tf.train.Saver
    feed: Dict[Any, np.ndarray]
    update: tf.Operation

    def values(self) -> Dict[str, np.ndarray]:
        return self.session.run({v.op.name: v for v in tf.global_variables()})


@contextlib.contextmanager
def model(count: int, resource: bool = True, late: bool = False, partitions: int = 0, only: Optional[str] = None,
          classes: int = CLASSES, **form: Any) -> Iterator[Model]:
    """A layer before, and one under ``wh.split`` with Adam's slots.

    Args:
        count: devices; 0: the local script.
        late: build the saver after the first step.
        partitions: of the kernel, TensorFlow's own.
        only: save variables with this prefix.
        form: arguments of the saver.
    """
    if count:
        wh.init({"patterns.force": "column"}, cluster=f"cpu:{count}")
    try:
        with tf.Graph().as_default(), tf.variable_scope("", use_resource=resource):
            tf.set_random_seed(3)
            partitioner = tf.fixed_size_partitioner(partitions) if partitions else None
            x = tf.placeholder(tf.float64, [None, 4])
            hidden = tf.tanh(tf.matmul(x, tf.get_variable("before", [4, WIDTH], tf.float64)))
            with wh.split(count) if count else contextlib.nullcontext():
                kernel = tf.get_variable("kernel", [WIDTH, classes], tf.float64, partitioner=partitioner)
                y = tf.nn.bias_add(tf.matmul(hidden, kernel), tf.get_variable("bias", [classes], tf.float64))
            update = tf.train.AdamOptimizer(0.01).minimize(tf.reduce_mean(tf.square(y)))

            def saver() -> tf.train.Saver:
                chosen = [v for v in tf.global_variables() if v.op.name.startswith(only or "")]
                return tf.train.Saver(chosen, **form)

            early = None if late else saver()
            feed = {x: np.linspace(-1.0, 1.0, 24).reshape(6, 4)}
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run(update, feed)
                yield Model(session, early or saver(), feed, update)
    finally:
        wh.shutdown()


FORMS: Dict[str, Dict[str, Any]] = {
    "plain": {},
    "sharded": {"sharded": True},
    "late": {"late": True},
    "sequential": {"restore_sequentially": True},
    "reshaping": {"reshape": True},
    "version 1": {"write_version": tf.train.SaverDef.V1},
    "some": {"only": "kernel"},
    "partitioned": {"partitions": 2},
}


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
@pytest.mark.parametrize("form", sorted(FORMS))
def test_saver(form: str, resource: bool, tmp_path: Any) -> None:
    """Three shards of 4, 3 and 3 classes; what was restored trains on as it would have."""
    path = str(tmp_path / "model")
    with model(3, resource, **FORMS[form]) as ran:
        assert ran.saver.save(ran.session, path) == path
        saved = ran.values()
        ran.session.run(ran.update, ran.feed)
        trained = ran.values()
        ran.saver.restore(ran.session, path)
        restored = ran.values()
        chosen = [name for name in saved if name.startswith(FORMS[form].get("only", ""))]
        for name in chosen:
            assert not np.array_equal(saved[name], trained[name]), name
            np.testing.assert_array_equal(restored[name], saved[name], name)
        if len(chosen) == len(saved):
            ran.session.run(ran.update, ran.feed)
            for name, value in ran.values().items():
                np.testing.assert_array_equal(value, trained[name], name)
    files = glob.glob(path + ".data-*")
    assert len(files) == {"version 1": 0, "some": 3}.get(form, 4) and not glob.glob(path + "*_part*"), files
    listed = tf.train.load_checkpoint(path)
    shapes = {"kernel" + slot: [WIDTH, CLASSES] for slot in ("", "/Adam", "/Adam_1")}
    shapes.update({name: list(value.shape) for name, value in saved.items() if name in chosen and "/part_" not in name})
    assert listed.get_variable_to_shape_map() == shapes
    for name in shapes:
        halves = [saved[key] for key in sorted(saved) if "/part_" in key and key.replace("/part_0", "").replace(
            "/part_1", "") == name]
        np.testing.assert_array_equal(listed.get_tensor(name), np.concatenate(halves) if halves else saved[name], name)


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("writer,reader", [("sharded", "plain"), ("plain", "sharded"), ("partitioned", "plain"),
                                           ("plain", "partitioned"), ("version 1", "plain")])
def test_one_form_reads_another(writer: str, reader: str, tmp_path: Any) -> None:
    """Under other numbers of devices, and locally."""
    path = str(tmp_path / "model")
    with model(2, **FORMS[writer]) as ran:
        ran.saver.save(ran.session, path)
    with model(0, **FORMS[reader]) as expected:
        expected.saver.restore(expected.session, path)
        values = expected.values()
    with model(3, **FORMS[reader]) as ran:
        ran.saver.restore(ran.session, path)
        for name, value in ran.values().items():
            np.testing.assert_array_equal(value, values[name], name)


@pytest.mark.slow
def test_checkpoint_of_another_shape_is_refused(tmp_path: Any) -> None:
    path = str(tmp_path / "model")
    with model(0, only="kernel", classes=CLASSES + 1) as ran:
        ran.saver.save(ran.session, path)
    with model(3, only="kernel") as ran:
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)\[12,10\].*\[12,11\]"):
            ran.saver.restore(ran.session, path)


@pytest.mark.slow
@pytest.mark.parametrize("init", ["exact", "sharded"])
def test_monitored_session_resumes(init: str, tmp_path: Any) -> None:
    """Its graph is final before it runs, and its hooks save; another plan takes over after two steps."""
    def train(count: int, steps: int, directory: str) -> np.ndarray:
        if count:
            wh.init({"patterns.force": "column", "init": init}, cluster=f"cpu:{count}")
        try:
            with tf.Graph().as_default(), tf.variable_scope("", use_resource=True):
                tf.set_random_seed(3)
                with wh.split(count) if count else contextlib.nullcontext():
                    kernel = tf.get_variable("kernel", [WIDTH, CLASSES], tf.float64)
                    y = tf.matmul(tf.ones([2, WIDTH], tf.float64), kernel)
                update = tf.train.AdamOptimizer(0.01).minimize(
                    tf.reduce_mean(tf.square(y)), tf.train.get_or_create_global_step())
                hooks = [tf.train.CheckpointSaverHook(directory, save_steps=2)] if directory else []
                with tf.train.MonitoredTrainingSession(checkpoint_dir=directory or None, save_checkpoint_steps=None,
                                                       save_checkpoint_secs=None, hooks=hooks) as session:
                    for _ in range(steps):
                        session.run(update)
                    return session.run(kernel)
        finally:
            wh.shutdown()

    directory = str(tmp_path)
    train(3, 2, directory)
    np.testing.assert_allclose(train(2, 2, directory), train(0, 4, ""), 1e-12)
