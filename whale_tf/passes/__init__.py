"""Compiles a training step and a Plan to a Program, by pure passes in this order.

    outline       ops -> bodies: for each TaskGraph once, early, forward, backward and update bodies
    spare         bodies that are called: without dead ops, with less to carry from forward to backward (which is donated),
                  cut into functions
    replicate     bodies -> calls on devices: model replicas, micro-batches, replicas, copies
    divide        the mini-batch's parts for the clones
    bridge        between TaskGraphs that divide a micro-batch in different ways
    whole         values of the whole mini-batch
    accumulate    gradients added up over micro-batches
    synchronise   gradients summed over copies and processes; values merged for their readers
    broadcast     values that one process updates for all, sent to the others
    schedule      the order of each replica's calls

With ``WHALE_VERIFY=1`` in the environment, the property that a pass ensures is checked after it (``whale_tf.passes.verify``).
"""

from __future__ import annotations

from typing import Tuple

from whale_tf.ir.training_step import TrainingStep
from whale_tf.ir.verify import is_asked
from whale_tf.passes.broadcast import broadcast
from whale_tf.passes.collect import accumulate, synchronise
from whale_tf.passes.communicate import bridge, divide, whole
from whale_tf.passes.outline import outline, parted
from whale_tf.passes.replicate import replicate
from whale_tf.passes.schedule import order_calls
from whale_tf.passes.spare import spare
from whale_tf.passes.verify import Pass, verify
from whale_tf.plan import Plan
from whale_tf.program import Program

__all__ = ["PASSES", "compile_program", "parted"]

PASSES: Tuple[Pass, ...] = (
    Pass("outline", outline, ensures="bodies"),
    Pass("spare", spare, requires="bodies", ensures="bodies"),
    Pass("replicate", replicate, requires="bodies", ensures="calls"),
    Pass("divide", divide, requires="calls", ensures="divided"),
    Pass("bridge", bridge, requires="divided", ensures="bridged"),
    Pass("whole", whole, requires="bridged", ensures="whole"),
    Pass("accumulate", accumulate, requires="whole", ensures="accumulated"),
    Pass("synchronise", synchronise, requires="accumulated", ensures="synchronised"),
    Pass("broadcast", broadcast, requires="synchronised", ensures="sent"),
    Pass("schedule", order_calls, requires="sent", ensures="ordered"),
)


def compile_program(step: TrainingStep, plan: Plan) -> Program:
    """The step that ``plan`` runs.

    Raises:
        PlanError: the plan's schedule cannot order this graph, or a bucket's gradients cannot travel together.
    """
    step = parted(step, plan)
    program = Program(step.graph, ())
    checked = is_asked()
    for one in PASSES:
        program = one.run(program, step, plan)
        if checked:
            verify(program, step, plan, one)
    return program
