"""Model profiles from scripts and model files, for ``whale profile``."""

from __future__ import annotations

import os
import runpy
import sys
from typing import List, Optional, Sequence

from whale_tf import api
from whale_tf._tf_compat import tf
from whale_tf.capture.captured import Captured, capture
from whale_tf.capture.chain import captured_chain
from whale_tf.capture.model_file import file_chain, read_model_file
from whale_tf.errors import PlanError
from whale_tf.ir.batch_axis import analyse
from whale_tf.ir.region import find_region
from whale_tf.planner.annotated import static_batch
from whale_tf.profiler.graph_profile import Source, graph_profile
from whale_tf.profiler.model_profile import ModelProfile


class _Built(BaseException):
    """Leaves a script as soon as its training graph is there; no handler of the script's own catches it."""


def profile_model(path: str, arguments: Sequence[str], batch: int, name: str) -> ModelProfile:
    """The profile of a training script (``.py``), a frozen model (``.pb``) or a MetaGraph (``.meta``); nothing is trained.

    Args:
        arguments: the script's own.
        batch: examples of a mini-batch where the graph does not say how many.

    Raises:
        PlanError: no such file, or the script trains no graph.
    """
    if path.endswith((".pb", ".meta")):
        model = read_model_file(path)
        named = {model.ops.tensor_name(tensor): dim for tensor, dim in model.sources.items()}
        return graph_profile(file_chain(model, static_batch(model.ops, named) or batch), Source(name))
    if not path.endswith(".py") or not os.path.isfile(path):
        raise PlanError("{!r} is no script (.py), frozen model (.pb) or MetaGraph (.meta); give the path of one".format(path))
    found = _profile_of_script(path, arguments, batch, name)
    if found is None:
        raise PlanError(
            "{!r} ended without running or finalizing a graph with an optimizer's update (tf.compat.v1.train, minimize or "
            "apply_gradients), so there is nothing to profile".format(path))
    return found


def profile_graph(graph: tf.Graph, captured: Captured, batch: int, name: str) -> ModelProfile:
    """The profile of a captured training graph."""
    named = {captured.graph.tensor_name(tensor): dim for tensor, dim in captured.sources.items()}
    axis = analyse(captured.graph, captured.sources, captured.scope)
    region = find_region(captured.graph, captured.task_graph, axis, list(captured.sources))
    chain = captured_chain(graph, captured, region, static_batch(captured.graph, named) or batch)
    return graph_profile(chain, Source(name, captured.graph.fingerprint()))


def _profile_of_script(path: str, arguments: Sequence[str], batch: int, name: str) -> Optional[ModelProfile]:
    """Runs the script until a graph with an update is finalized or first run."""
    made: List[ModelProfile] = []

    def look(graph: tf.Graph) -> None:
        captured = capture(graph)
        if captured.updates:
            made.append(profile_graph(graph, captured, batch, name))
            raise _Built()

    before = sys.argv, list(sys.path)
    sys.argv = [path] + list(arguments)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        with api.observing(look):
            runpy.run_path(path, run_name="__main__")
    except (_Built, SystemExit):
        pass
    finally:
        sys.argv, sys.path[:] = before
    return made[0] if made else None
