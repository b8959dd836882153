"""What commands share: how they print, report errors, and limit memory."""

from __future__ import annotations

import contextlib
import os
from typing import Iterator, Optional

import typer
from rich.console import Console

from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError, WhaleError

MOST_EXAMPLES, MOST_PARTS = 2**20, 2**14  # of a step
WHOLE = 100_000  # columns of a file or a pipe


def console() -> Console:
    """Where a command prints its results.  Only a terminal has a width: in a file or pipe, tables and lines are whole."""
    found = Console()
    return found if found.is_terminal else Console(width=WHOLE)


@contextlib.contextmanager
def reported(status: int = 1) -> Iterator[None]:
    """Prints an error that is the user's to mend as one line, and ends the command with an exit status."""
    try:
        yield
    except (WhaleError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(status)


def limited(cluster: Cluster, limit_gib: Optional[float]) -> Cluster:
    """The cluster with at most ``limit_gib`` GiB for a step on every device."""
    return cluster if limit_gib is None else cluster.limited(limit_gib * 2.0**30)


def check_sizes(global_batch: int, micro_batches: int = 1) -> None:
    """Raises PlanError: no step is that large; searches and simulations would take hours."""
    for option, value, most in (("--global-batch", global_batch, MOST_EXAMPLES), ("--micro-batches", micro_batches, MOST_PARTS)):
        if not 1 <= value <= most:
            raise PlanError(f"{option} is {value:,}, expected 1 to {most:,}")


def check_exists(model: str) -> None:
    """Raises PlanError: there is no such script or graph.  It is asked before TensorFlow is loaded, which takes seconds."""
    if not os.path.isfile(model):
        raise PlanError(f"there is no file {model!r}; give the path of a script or graph, or a built-in model (--list)")
