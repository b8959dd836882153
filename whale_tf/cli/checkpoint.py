"""``whale checkpoint``."""
from __future__ import annotations

import contextlib
import os
from typing import Iterator

import typer

from whale_tf.cli.common import reported


def checkpoint(
    snapshot: str = typer.Argument(..., help="a snapshot.path, a folder in it, or the backup_dir of BackupAndRestore; of several "
                                             "snapshots the newest one that is whole"),
    out: str = typer.Argument(..., help="what to write: a name that ends with .weights.h5 (of fit), or that of a checkpoint"),
) -> None:
    """Make a checkpoint of TensorFlow or a weights file of Keras from a snapshot, while training goes on or after it.

    It has the variables of the local model, whatever the plan was. Neither the script nor its devices are needed, and one piece
    of a variable, or 64 MiB of small ones, is read at a time.
    """
    with reported(), _without_gpus():
        from whale_tf.runtime.snapshots.joining import join  # TensorFlow takes seconds to load; only this command needs it

        found = join(snapshot, out)
    typer.echo(f"{out}: {found.variables} variables, {found.bytes / 2**20:.1f} MiB, after step {found.step} ({found.folder})")


@contextlib.contextmanager
def _without_gpus() -> Iterator[None]:
    """Those of training that goes on are not touched: TensorFlow would take their memory."""
    name = "CUDA_VISIBLE_DEVICES"
    before, os.environ[name] = os.environ.get(name), ""
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
