"""Keras' ``BackupAndRestore``: a call of ``fit`` with it goes on at the next example, without ``snapshot.path``.

::

    BACKUP_DIR/latest.weights.h5, training_metadata.json     Keras' own, written by process 0: plain Keras goes on with them
    BACKUP_DIR/whale_tf/step-000000040-1f/                   a snapshot of the same step (see files)

Both are written when Keras asks for it, after all callbacks have acted on the step.  Keras' metadata then name the snapshot, and
Keras overlooks that.  Metadata without a name are of a training without whale_tf, which is newer: Keras restores them as it does
without whale_tf, and the snapshots beside them are deleted before the next one is taken.
"""
from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from typing import Any, Callable, Optional

from whale_tf._tf_compat import tf

FOLDER = "whale_tf"  # in the directory of the backups
_KEY = "whale_tf"  # in Keras' metadata
_MODULE = "keras.src.callbacks.backup_and_restore"
_SHARED = "shared"  # a file that all processes must see


class Backup:
    """One of Keras' callbacks, and the directory of its files.

    Args:
        callback: a ``BackupAndRestore``.

    Attributes:
        keep: how many snapshots there are beside Keras' files.
    """

    def __init__(self, callback: Any) -> None:
        self.callback, self.directory = callback, os.path.abspath(os.fspath(callback.backup_dir))
        self.path = os.path.join(self.directory, FOLDER)
        self.keep = 2 if getattr(callback, "double_checkpoint", False) else 1

    @classmethod
    def of(cls, given: Any) -> Optional[Backup]:
        """The first that is among the callbacks of ``fit``; None: there is none, or its files are not in the file system."""
        kind = getattr(sys.modules.get(_MODULE), "BackupAndRestore", ())
        for one in getattr(given, "callbacks", None) or tf.nest.flatten(given):
            if isinstance(one, kind) and hasattr(one, "_weights_path") and hasattr(one, "_training_metadata_path"):
                return None if "://" in os.fspath(one.backup_dir) else cls(one)
        return None

    def counts(self) -> bool:
        """Whether Keras' files are of the training that has left snapshots beside them, or there are none."""
        try:
            with open(self.callback._training_metadata_path, encoding="utf8") as handle:
                return _KEY in json.load(handle)
        except FileNotFoundError:
            return True
        except (OSError, ValueError):
            return False

    def write(self, save: Callable[[], Any], name: str, wait: Callable[[], None]) -> None:
        """Keras' files, each as a whole or not at all.

        Args:
            save: Keras' own.
            name: of the snapshot.
            wait: until that is written.

        Raises:
            OSError: they cannot be written.
        """
        one = self.callback
        places = one._weights_path, one._training_metadata_path
        new = os.path.join(self.directory, "new.weights.h5"), os.path.join(self.directory, "new.json")
        for path in new:
            _remove(path)
        one._weights_path, one._training_metadata_path = new
        try:
            save()
        finally:
            one._weights_path, one._training_metadata_path = places
            wait()
        with open(new[1], encoding="utf8") as handle:
            told = json.load(handle)
        with open(new[1], "w", encoding="utf8") as handle:
            json.dump({**told, _KEY: name}, handle)
        if self.keep > 1:
            for path, before in zip(places, (one._prev_weights_path, one._prev_training_metadata_path)):
                if os.path.exists(path):
                    shutil.copyfile(path, before)
        for path, place in zip(new, places):
            os.replace(path, place)

    # ------------------------------------------------------------------------------------------------- several processes
    def mark(self) -> None:
        """Leaves a file for the other processes."""
        with contextlib.suppress(OSError):
            os.makedirs(self.path, exist_ok=True)
            with open(os.path.join(self.path, _SHARED), "w", encoding="utf8"):
                pass

    def is_marked(self) -> bool:
        """Whether this process finds it."""
        try:
            return _SHARED in os.listdir(self.path)
        except OSError:
            return False

    def unmark(self) -> None:
        _remove(os.path.join(self.path, _SHARED))


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.remove(path)
