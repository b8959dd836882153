"""Decides about a captured step: its plan, and the ops that the plan runs.

    prepare     graph -> step: types, batch normalisation                    prepare.py
    choose      step -> plan: given, annotated, or found by a search         choose.py, split.py, search.py
    parts       ZeRO's parts of variables                                    homes.py
    homes       devices of variables and of optimizer state                  homes.py
    recompute   what backward passes compute again                           recompute.py
    form        memory of the called form, if this decides                   form.py
"""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.capture.captured import Captured
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.decide.choose import choose
from whale_tf.decide.decision import Decision, Request
from whale_tf.decide.form import with_form
from whale_tf.decide.homes import with_homes, with_parts
from whale_tf.decide.prepare import prepare
from whale_tf.decide.recompute import with_recomputation
from whale_tf.passes.communicate import takes_own
from whale_tf.plan import Plan

STAGES = (with_parts, with_homes, with_recomputation)


def decide_graph(graph: tf.Graph, cluster: Cluster, config: Config, plan: Optional[Plan],
                 processes: Sequence[Tuple[int, ...]]) -> Optional[Decision]:
    """Everything before emission, which leaves the graph alone; None if there is nothing to decide about yet (see
    :func:`whale_tf.decide.prepare.prepare`).

    Raises:
        WhaleError: the step cannot run as asked.
    """
    prepared = prepare(graph, cluster, config, plan)
    if prepared is None:
        return None
    local, request = prepared.captured, Request(cluster, prepared.config, plan, prepared.options, processes)
    decision = decide(local, request)
    if _takes_own_mini_batches(decision, request):
        whole = local.with_rows_beside()
        if whole is not local:
            decision = decide(whole, request)
    return with_form(decision, request)


def decide(local: Captured, request: Request) -> Decision:
    """The plan of a captured step, and the ops that it runs."""
    decision = choose(local, request)
    for stage in STAGES:
        decision = stage(decision, request)
    return decision


def _takes_own_mini_batches(decision: Decision, request: Request) -> bool:
    """Whether every model replica, every micro-batch of it, or every process takes its own mini-batch."""
    plan = decision.plan
    if len(request.processes) > 1 and not plan.spans_processes:
        return True
    return takes_own(decision.captured.step(decision.region), plan)
