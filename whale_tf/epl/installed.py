"""Makes ``import epl`` mean this package, unless another ``epl`` is installed.

No distribution puts a package ``epl`` beside ``whale_tf``: pip would let it overwrite the files of a real EPL without a word.  So
the name exists only in processes that ask for it: :func:`install`, ``python -m whale_tf.epl``, or the directory :data:`PATH` on
``PYTHONPATH``, which holds nothing but a package ``epl`` that calls :func:`install`.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from importlib.machinery import PathFinder
from typing import Dict, List, Optional

from whale_tf.errors import MissingPackageError

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "path")

# modules of EPL from which scripts import -> ours; packages without names of their own are empty
MODULES: Dict[str, str] = {
    "cluster": "cluster",
    "config": "config",
    "env": "env",
    "ir": "",
    "ir.graph": "collections",
    "ops": "ops",
    "ops.adam_weight_decay_optimizer": "ops",
    "ops.bridging_layer": "ops",
    "ops.distributed_dense": "ops",
    "ops.distributed_losses": "ops",
    "ops.distributed_ops": "ops",
    "profiler": "profiler",
    "profiler.flops": "profiler",
    "profiler.memory_profiler_hook": "profiler",
    "profiler.profiler": "graph_profile",
    "runtime": "",
    "runtime.saver": "saver",
    "strategies": "strategies",
    "strategies.parallel_strategy": "strategies",
    "strategies.replicate": "strategies",
    "strategies.split": "strategies",
    "utils": "",
    "utils.common": "constants",
    "utils.constant": "constants",
    "utils.version": "",
}


def other() -> Optional[str]:
    """Where another package ``epl`` is found; None: nowhere."""
    found = PathFinder.find_spec("epl", [entry for entry in _search_path() if not _is_own(entry)])
    return None if found is None else found.origin or str(list(found.submodule_search_locations or ()))


def check() -> None:
    """Raises:
        MissingPackageError: another package ``epl`` is installed, or imported.
    """
    known = sys.modules.get("epl")
    where = other() or (getattr(known, "__file__", None) if known is not None and not _is_own_module(known) else None)
    if where is not None:
        raise MissingPackageError(f"whale_tf.epl would hide another package epl, {where}; start the script in an environment "
                                  "without it, or start it plainly to use that one")


def install() -> None:
    """From now on, ``import epl`` and ``from epl.profiler.memory_profiler_hook import ...`` give this package.

    Raises:
        MissingPackageError: another package ``epl`` is installed; it is left alone.
    """
    package = importlib.import_module("whale_tf.epl")
    if sys.modules.get("epl") is package:
        return
    check()
    sys.modules["epl"] = package
    for name, own in MODULES.items():
        module = importlib.import_module(f"whale_tf.epl.{own}") if own else types.ModuleType(f"epl.{name}")
        sys.modules[f"epl.{name}"] = module
        parent, _, last = name.rpartition(".")
        holder = sys.modules[f"epl.{parent}"] if parent else package
        if not hasattr(holder, last):
            setattr(holder, last, module)
    setattr(sys.modules["epl.utils.version"], "VERSION", package.VERSION)  # noqa: B010


def _search_path() -> List[str]:
    """Where ``import epl`` looks: first beside the script, so that a script in EPL's own folder uses that."""
    return list(sys.path)


def _is_own(entry: str) -> bool:
    return os.path.abspath(entry or ".") in (PATH, os.path.dirname(PATH), os.path.dirname(os.path.dirname(PATH)))


def _is_own_module(module: types.ModuleType) -> bool:
    return _is_own(os.path.dirname(os.path.dirname(os.path.abspath(getattr(module, "__file__", None) or ""))))
