"""OpGraph + Plan -> Program: pure passes, in this order.

    outline     the region's batch-level ops -> bodies, one for each TaskGraph and step
    replicate   bodies -> calls: model replicas, micro-batches and replicas, with their devices and what they take
    schedule    calls -> calls in the order of each replica's schedule
"""

from __future__ import annotations

from whale_tf.ir.region import Region
from whale_tf.passes.outline import outline
from whale_tf.passes.replicate import replicate
from whale_tf.passes.schedule import order_calls
from whale_tf.plan import Plan
from whale_tf.program import Program

__all__ = ["compile_program"]


def compile_program(region: Region, plan: Plan) -> Program:
    """The step that ``plan`` runs.

    Raises:
        PlanError: the plan's schedule cannot order this graph.
    """
    program = outline(region)
    program = replicate(program, region, plan)
    return order_calls(program, plan)
