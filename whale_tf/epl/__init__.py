"""The names of EPL (EasyParallelLibrary, Whale's own open-source part), so that scripts written for it run unedited::

    python -m whale_tf.epl script.py            # or: whale run --epl script.py
    import whale_tf.epl; whale_tf.epl.install() # from then on, `import epl` is this package

docs/epl.md lists every public name and configuration key of EPL: the same here, mapped, or refused with a reason.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from whale_tf.epl.installed import install

_HOMES = {
    "begin": ("init",),
    "cluster": ("Cluster",),
    "collections": ("GraphKeys", "add_to_collection", "get_all_collections", "get_collection"),
    "config": ("Config",),
    "env": ("Env",),
    "strategies": ("replicate", "set_default_strategy", "split"),
}

__all__ = ["VERSION", "install"] + [name for names in _HOMES.values() for name in names]

if TYPE_CHECKING:
    from whale_tf.epl.begin import init as init
    from whale_tf.epl.cluster import Cluster as Cluster
    from whale_tf.epl.collections import GraphKeys as GraphKeys
    from whale_tf.epl.collections import add_to_collection as add_to_collection
    from whale_tf.epl.collections import get_all_collections as get_all_collections
    from whale_tf.epl.collections import get_collection as get_collection
    from whale_tf.epl.config import Config as Config
    from whale_tf.epl.env import Env as Env
    from whale_tf.epl.strategies import replicate as replicate
    from whale_tf.epl.strategies import set_default_strategy as set_default_strategy
    from whale_tf.epl.strategies import split as split
    from whale_tf.version import VERSION as VERSION


def __getattr__(name: str) -> Any:
    """Loads on first use (PEP 562), because the launcher reads ``installed`` and needs no TensorFlow."""
    home = next((f"whale_tf.epl.{home}" for home, names in _HOMES.items() if name in names),
                "whale_tf.version" if name == "VERSION" else None)
    if home is None:
        raise AttributeError(f"module 'whale_tf.epl' has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(home), name)
    return globals()[name]
