"""Called or inlined: the memory of the called step, where this decides."""

from __future__ import annotations

from dataclasses import replace

from whale_tf.decide.decision import Decision, Request
from whale_tf.decide.facts import sized_region, trained_variables
from whale_tf.errors import PlanError
from whale_tf.passes.form import is_large
from whale_tf.planner.measures import AUTO
from whale_tf.planner.play import called_too_large


def with_form(decision: Decision, request: Request) -> Decision:
    """The decision with the peaks of the called step in the plan, if they are the reason to inline a large step."""
    plan, captured = decision.plan, decision.captured
    if plan.emit != AUTO or plan.estimate.called_peak_memory_bytes or not is_large(decision.region, plan):
        return decision
    try:
        region, _ = sized_region(captured, decision.region, plan, request.cluster, decision.config)
    except PlanError:  # the graph does not allow the planned number of examples, so only the size decides
        return decision
    peaks = called_too_large(captured.step(region), plan, request.cluster, trained_variables(captured))
    return decision._replace(plan=replace(plan, estimate=replace(plan.estimate, called_peak_memory_bytes=peaks)))
