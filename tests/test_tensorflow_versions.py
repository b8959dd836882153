"""A TensorFlow that whale_tf does not run with is named in one message, where wh.init is called."""
from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import tensorflow as tf

import whale_tf as wh
from tests.multiprocess.launch import printed
from whale_tf import _tf_compat
from whale_tf.capture import hooks
from whale_tf.errors import UnsupportedTensorFlowError


@pytest.mark.parametrize("version", ["1.13.2", "1.14.0", "2.0.4", "2.1.0-rc1", "2.3.4", "0.12", "unknown"])
def test_unsupported_version_is_refused(monkeypatch: Any, version: str) -> None:
    monkeypatch.setattr(tf, "__version__", version)
    with pytest.raises(UnsupportedTensorFlowError, match=f"TensorFlow {version} .*1.15 and 2.4 to 2.21"):
        _tf_compat.check_version()


@pytest.mark.parametrize("version", ["1.15.0", "1.15.5+nv23.03", "2.4.0", "2.10.1", "2.21.0", "2.21.1-dev20260101"])
def test_supported_version_says_nothing(monkeypatch: Any, version: str) -> None:
    monkeypatch.setattr(tf, "__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _tf_compat.check_version()


@pytest.mark.parametrize("version", ["2.22.0", "2.30.0-rc0", "3.0.0"])
def test_newer_version_is_warned_of(monkeypatch: Any, version: str) -> None:
    monkeypatch.setattr(tf, "__version__", version)
    with pytest.warns(UserWarning, match=f"TensorFlow {version} is newer than .*1.15 and 2.4 to 2.21"):
        _tf_compat.check_version()


@pytest.mark.once
def test_tensorflow_that_is_not_there_is_told_from_one_that_lacks_a_package(tmp_path: Any) -> None:
    def error() -> str:
        here = os.path.dirname(os.path.dirname(wh.__file__))
        ran = subprocess.run([sys.executable, "-S", "-c", "import whale_tf._tf_compat"], stderr=subprocess.PIPE,
                             env={"PYTHONPATH": f"{tmp_path}:{here}"}, universal_newlines=True)
        return ran.stderr.splitlines()[-1]

    assert "no TensorFlow was found" in error()
    (tmp_path / "tensorflow.py").write_text("import wrapt")
    assert error() == "ModuleNotFoundError: No module named 'wrapt'"


def test_missing_attribute_is_named(monkeypatch: Any) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(_tf_compat.gradients_util, "_MaybeCompile")
        patch.delattr(_tf_compat.BaseSession, "_extend_graph")
        with pytest.raises(UnsupportedTensorFlowError) as raised:
            wh.init(cluster="cpu:1")
        assert not hooks.installed()
        with pytest.raises(wh.WhaleError, match="needs wh.init"):
            wh.total_devices()
    message = str(raised.value)
    for part in (f"TensorFlow {tf.__version__}", "gradients_util._MaybeCompile", "BaseSession._extend_graph", "2.4 to 2.21"):
        assert part in message


SCRIPT = """
import sys
import tensorflow as tf
{change}
import whale_tf as wh
try:
    wh.init(cluster="cpu:1")
except wh.WhaleError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("change, parts", [
    ('tf.__version__ = "2.3.1"', ["TensorFlow 2.3.1", "1.15 and 2.4 to 2.21"]),
    ('del tf.Operation._set_attr', ["tf.Operation._set_attr", "1.15 and 2.4 to 2.21"]),
    ('from tensorflow.python.summary.writer import event_file_writer as moved; del moved.EventFileWriter\n'
     'sys.modules["tensorflow.python.ops.gradients_util"] = None',
     ["tensorflow.python.summary.writer.event_file_writer.EventFileWriter, tensorflow.python.ops.gradients_util,"])],
    ids=["version", "method", "modules"])
def test_message_comes_where_init_is_called(change: str, parts: Any) -> None:
    line = printed("-c", SCRIPT.format(change=change)).strip().splitlines()[-1]
    assert line.startswith("UnsupportedTensorFlowError TensorFlow ")
    assert [part for part in parts if part not in line] == []
