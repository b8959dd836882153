"""Runs tests that ask for logical CPUs on logical GPUs of the machine's first GPU instead:

    python -m pytest -p tests.on_gpus tests/numeric/test_matrix.py

``WHALE_TEST_GPU_MB``: megabytes of each logical GPU (512). Logical GPUs share one GPU, so NCCL does not join them: sums are the
local communicator's. Products are computed in full float32, as on CPUs.
"""
from __future__ import annotations

import functools
import os
import re
from typing import Any

import pytest
import tensorflow as tf

import whale_tf as wh

LOGICAL = 5
SHORT_FORM = re.compile(r"cpu:\d+")


def pytest_configure() -> None:
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        raise pytest.UsageError("-p tests.on_gpus: TensorFlow sees no GPU on this machine")
    limit = int(os.environ.get("WHALE_TEST_GPU_MB", "512"))
    tf.config.set_visible_devices(gpus[:1], "GPU")
    tf.config.set_logical_device_configuration(gpus[0], [tf.config.LogicalDeviceConfiguration(limit)] * LOGICAL)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    original = wh.init

    @functools.wraps(original)
    def init(config: Any = None, cluster: Any = None, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(cluster, str) and SHORT_FORM.fullmatch(cluster):
            cluster = cluster.replace("cpu", "gpu")
        return original(config, cluster, *arguments, **keywords)

    wh.init = init
