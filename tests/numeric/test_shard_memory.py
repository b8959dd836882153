"""No device ever holds a full copy of a divided variable: read from the allocations and results of every op that ran."""
from __future__ import annotations

from typing import Any, Dict, List, NamedTuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.numeric.split import OPTIMIZERS
from tests.numeric.trace import largest_bytes, peak_bytes, traced

pytestmark = pytest.mark.graph_optimizer
WIDTH, CLASSES, DEVICES = 48, 4000, 4
FULL = 4 * WIDTH * CLASSES  # bytes of the kernel


class Traced(NamedTuple):
    """``largest``: bytes of the largest tensor on any device, by what ran; ``peak``: most bytes that one held at a time."""

    largest: Dict[str, int]
    peak: Dict[str, int]
    devices: List[int]


def trace(path: str, pattern: str, resource: bool, optimizer: str, init: str = "sharded", **saver: Any) -> Traced:
    """Initialise, train, save and restore a classifier."""
    wh.init({"init": init, "patterns.force": {"classes": pattern}}, cluster=f"cpu:{DEVICES}")
    try:
        with tf.Graph().as_default(), tf.variable_scope("", use_resource=resource):
            tf.set_random_seed(2)
            x, label = tf.placeholder("float32", [4, WIDTH]), tf.placeholder("int32", [4])
            with wh.split(DEVICES), tf.variable_scope("classes"):
                kernel = tf.get_variable("kernel", [WIDTH, CLASSES])
                logits = tf.nn.bias_add(tf.matmul(x, kernel), tf.get_variable("bias", [CLASSES]))
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=logits))
            update = OPTIMIZERS[optimizer]().minimize(loss)
            names = tf.train.Saver(**saver).saver_def
            file = {names.filename_tensor_name: path}
            feed = {x: np.ones([4, WIDTH]), label: np.arange(4)}
            found: Dict[str, tf.RunMetadata] = {}
            with tf.Session() as session:
                found["initialise"] = traced(session, tf.global_variables_initializer(), {})
                found["train"] = traced(session, [loss, update], feed)
                found["save"] = traced(session, names.save_tensor_name, file)
                found["restore"] = traced(session, names.restore_op_name, file)
            largest = {what: largest_bytes(metadata) for what, metadata in found.items()}
            return Traced({what: max(sizes.values()) for what, sizes in largest.items()},
                          {what: max(peak_bytes(metadata).values()) for what, metadata in found.items()},
                          sorted(d for d, size in largest["train"].items() if size))
    finally:
        wh.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("pattern,resource,optimizer", [
    ("column", True, "adam"), ("row", False, "adam"), ("column", False, "sgd"), ("row", True, "sgd")])
def test_no_device_holds_a_full_copy(pattern: str, resource: bool, optimizer: str, tmp_path: Any) -> None:
    ran = trace(str(tmp_path / "model"), pattern, resource, optimizer)
    assert ran.devices == list(range(DEVICES))
    assert set(ran.largest.values()) == {FULL // DEVICES}, ran  # the trace shows the parts, and nothing larger
    if optimizer == "sgd":  # nor do all tensors of a device add up to one (there are no slots)
        assert max(ran.peak.values()) < FULL, ran


@pytest.mark.slow
def test_trace_finds_full_copies(tmp_path: Any) -> None:
    """Exact initial values are computed whole; a saver of version 1 has no slices."""
    ran = trace(str(tmp_path / "model"), "column", True, "adam", init="exact", write_version=tf.train.SaverDef.V1)
    assert {what: size >= FULL for what, size in ran.largest.items()} == {
        "initialise": True, "train": False, "save": True, "restore": False}, ran
