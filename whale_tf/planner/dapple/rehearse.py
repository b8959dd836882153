"""Plays a plan's schedule, micro-batch by micro-batch.

Eq. 1 leaves out the bubbles inside the pivot stage (end of section IV-A).  They are small for most plans and large for some, so
plans that are close by Eq. 1 are compared by playing them: every stage runs its early-backward order
(:mod:`whale_tf.schedule`), every wire carries one message at a time in each direction, and gradients are summed at the end.
"""
from __future__ import annotations

from typing import Dict, Sequence, Tuple

from whale_tf.planner.dapple.cost import DappleCosts, Element, Stages
from whale_tf.schedule import BACKWARD, FORWARD, orders, warmup_depths


def depths_of(costs: DappleCosts, stages: Stages, policy: str) -> Tuple[int, ...]:
    """K_i of every stage under ``PA`` or ``PB`` (DAPPLE section V-C)."""
    limits = [costs.memory(stage).depth for stage in stages]
    return warmup_depths(policy, len(stages), limits, costs.micro_batches)


def rehearse(elements: Sequence[Element], micro_batches: int, depths: Sequence[int]) -> float:
    """Seconds from the first forward pass to the last all-reduce.

    Args:
        elements: computation and communication stages in turn (:meth:`DappleCosts.elements`).
        depths: K_i of the computation stages.
    """
    stages, wires = elements[0::2], elements[1::2]
    sequences = orders("backward_first", micro_batches, depths)
    clock = [0.0] * len(stages)
    forth, back = [0.0] * len(wires), [0.0] * len(wires)
    arrived: Dict[Tuple[str, int, int], float] = {(FORWARD, 0, m): 0.0 for m in range(micro_batches)}
    arrived.update({(BACKWARD, len(stages) - 1, m): 0.0 for m in range(micro_batches)})
    position = [0] * len(stages)
    waiting = list(range(len(stages)))  # stages that may have a step ready
    while waiting:
        s = waiting.pop()
        while position[s] < len(sequences[s]):
            kind, m, _ = sequences[s][position[s]]
            if (kind, s, m) not in arrived:
                break
            start = max(clock[s], arrived[kind, s, m])
            position[s] += 1
            if kind == FORWARD:
                clock[s] = start + stages[s].forward_s
                if s < len(wires):
                    forth[s] = arrived[FORWARD, s + 1, m] = max(forth[s], clock[s]) + wires[s].forward_s
                    waiting.append(s + 1)
            else:
                clock[s] = start + stages[s].backward_s
                if s:
                    back[s - 1] = arrived[BACKWARD, s - 1, m] = max(back[s - 1], clock[s]) + wires[s - 1].backward_s
                    waiting.append(s - 1)
    return max(end + stage.allreduce_s for end, stage in zip(clock, stages))
