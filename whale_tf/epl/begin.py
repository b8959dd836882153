"""``epl.init``."""

from __future__ import annotations

import functools
import warnings
from typing import Any, Optional

from whale_tf import api
from whale_tf._tf_compat import estimators, tf
from whale_tf.epl.cluster import Cluster
from whale_tf.epl.config import Config
from whale_tf.epl.env import Env
from whale_tf.errors import AnnotationError


def init(config: Optional[Config] = None) -> None:
    """Start whale_tf with a configuration of EPL.  Call it before building the graph, in graph mode.

    Args:
        config: default: ``Config()``, which reads the environment.  From now on it cannot be changed.

    Raises:
        AnnotationError: eager execution, in which EPL does not work either.
        ConfigError: a value that cannot be had here.
    """
    if tf.executing_eagerly():
        raise AnnotationError("epl.init() is called in eager execution, but scripts for EPL build graphs; call "
                              "tf.compat.v1.disable_eager_execution() first, or use wh.init(), which divides tf.functions")
    config = (Config() if config is None else config).reopened()
    api.init(config.here())
    env = Env.get()
    env.reset()
    config.close()
    env.config = config
    _patch_run_config()
    env.cluster = Cluster(layout="all" if config.cluster.colocate_split_and_replicate else None)
    hints = config.hints()
    if hints:
        warnings.warn("epl.Config: {} change(s) nothing in whale_tf (docs/epl.md says what is done instead)".format(
            ", ".join(f"{key} = {value!r}" for key, value in hints.items())))
    if config.auto.auto_parallel and config.pipeline.num_stages <= 1:
        api.set_default_strategy(api.replicate(1))


def _patch_run_config() -> None:
    """As EPL, leaves out how a RunConfig would distribute training, with a warning; after ``wh.shutdown`` it has no effect."""
    found = estimators()
    if found is None or hasattr(found.run_config.__init__, "_before_epl"):
        return
    original = found.run_config.__init__

    @functools.wraps(original)
    def patched(run_config: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("train_distribute", "device_fn"):
            if Env.get().is_ready and kwargs.get(name) is not None:
                warnings.warn(f"RunConfig({name}=...) is left out: under epl.init(), training is divided as strategies say")
                kwargs[name] = None
        original(run_config, *args, **kwargs)

    setattr(patched, "_before_epl", original)  # noqa: B010
    found.run_config.__init__ = patched
