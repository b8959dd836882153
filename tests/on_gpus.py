"""Runs tests that ask for logical CPUs on logical GPUs of the machine's first GPU instead:

    python -m pytest -p tests.on_gpus tests/numeric/test_matrix.py

``WHALE_TEST_GPU_MB``: megabytes of each logical GPU (512). Logical GPUs share one GPU, so NCCL does not join them: sums are the
local communicator's. Products are computed in full float32, as on CPUs.
"""
from __future__ import annotations

import functools
import os
import re
from typing import Any, List

import pytest
import tensorflow as tf

import whale_tf as wh
from tests.numeric import equality

LOGICAL = 5
SHORT_FORM = re.compile(r"cpu:\d+")
LEFT_OUT = {  # by what is different on GPUs
    "they expect names of CPUs": ("functions/test_homes.py::test_what_is_at_home", "functions/test_homes.py::test_fit[states]",
                                  "numeric/test_parts.py::test_plan_with_parts"),
    "variables have copies there, and this script reads one after its update": ("[group_weights-data parallel 4",),
    "Keras compiles its step by XLA there, of which wh.init warns": ("test_evaluation_of_annotated_layers_warns_of_nothing",),
    "bfloat16's sums round in another order": ("test_bfloat16_on_two_devices_and_its_plan_as_json",)}


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
    equality.are_initial_equal[0] = False


def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    parts = [part for names in LEFT_OUT.values() for part in names]
    items[:] = [item for item in items if not any(part in item.nodeid for part in parts)]
