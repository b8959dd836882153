"""Every error a user can cause, one class for each kind of mistake.

A message says three things: the value that was given, what was expected, and the fix.
"""
from __future__ import annotations

import difflib
import math
from typing import Iterable, Optional


class WhaleError(Exception):
    """Base class of all errors raised on purpose by whale_tf."""

    ag_pass_through = True  # AutoGraph, which traces a tf.function, raises these errors unchanged


class UnsupportedTensorFlowError(WhaleError, ImportError):
    """whale_tf does not support the installed TensorFlow."""


class ConfigError(WhaleError, ValueError):
    """A configuration key or value is not valid."""


class ClusterError(WhaleError, ValueError):
    """A cluster description is not valid, or the cluster lacks something that a plan needs."""


class AnnotationError(WhaleError, ValueError):
    """``wh.replicate`` / ``wh.split`` are used in a way that has no meaning."""


class PlanError(WhaleError, ValueError):
    """A plan is malformed, belongs to another graph, or does not fit the cluster."""


class OtherGraphError(PlanError):
    """A plan was made for another graph."""


class TooFewExamplesError(PlanError):
    """A mini-batch has fewer examples than parts, and the graph says so."""


class InfeasibleError(PlanError):
    """No plan exists under the given limits (memory, devices, number of stages).

    Attributes:
        least_bytes: bytes that the fullest device of the smallest plan needs, if memory is the limit.
    """

    def __init__(self, message: str, least_bytes: Optional[float] = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class GraphError(WhaleError, ValueError):
    """The graph itself is malformed (an illegal op graph)."""


class MissingPackageError(WhaleError, ImportError):
    """A feature needs a package that only an extra of whale_tf installs."""


class UnsupportedOpError(WhaleError, NotImplementedError):
    """An op takes part in the parallel region in a way that has no rule."""


class UnknownShapeError(UnsupportedOpError):
    """The graph does not give the rank of some inputs; a Session's first training run shows it.

    Attributes:
        tensors: names of these inputs.
    """

    def __init__(self, message: str, tensors: Iterable[str]) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


class InputError(WhaleError, ValueError):
    """The values fed to a run do not fit the mini-batch."""


class InexactWarning(UserWarning):
    """An op of the parallel step has another result than in the local script.  The key ``on_inexact`` decides what happens."""


class InexactError(WhaleError, ValueError):
    """Raised in place of :class:`InexactWarning` under ``on_inexact: "error"``."""


class IdleWarning(UserWarning):
    """Less than half of a step's floating-point operations are divided over the plan's devices, or of the parameter bytes under
    ``wh.split``.  The key ``on_idle`` decides what happens."""


class IdleError(WhaleError, ValueError):
    """Raised in place of :class:`IdleWarning` under ``on_idle: "error"``."""


class MismatchError(WhaleError, ArithmeticError):
    """The first training step differs from the local one, under ``verify: "first_step"`` or in ``wh.verify``.

    Attributes:
        tensor: name of the first tensor, in topological order, that differs.
        task_graph: name of its TaskGraph; "": it is outside of all.
    """

    def __init__(self, message: str, tensor: str = "", task_graph: str = "") -> None:
        super().__init__(message)
        self.tensor, self.task_graph = tensor, task_graph


class ProcessLostError(WhaleError, RuntimeError):
    """Another training process has ended, or does not answer."""


class SnapshotError(WhaleError, ValueError):
    """A snapshot belongs to another model or other data, or cannot be written."""


class ScatteredError(SnapshotError):
    """A snapshot lacks what another host may have."""


class GraphEditError(WhaleError, RuntimeError):
    """An edit of a TensorFlow graph was refused."""


def nearest(name: str, known: Iterable[str]) -> Optional[str]:
    """The known name closest to ``name``, or None when nothing is near."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the end of a message, or an empty string."""
    match = nearest(name, known)
    return f" Did you mean {match!r}?" if match else ""


def seconds_text(seconds: float) -> str:
    """``1.092 s``, ``972.2 ms`` or ``35.1 us``: four digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.{max(0, 3 - int(math.log10(abs(seconds) / size)))}f} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def memory_text(size_bytes: float) -> str:
    """``1.50 GiB``, or ``3.25 MiB`` of what is less than one GiB; a few thousand bytes as such."""
    if 0 < abs(size_bytes) < 2**14:
        return f"{size_bytes:.0f} bytes"
    if abs(size_bytes) < 2**30:
        return f"{size_bytes / 2**20:.2f} MiB"
    return f"{size_bytes / 2**30:.2f} GiB"
