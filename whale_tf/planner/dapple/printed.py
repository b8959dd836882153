"""The planner as the paper prints it (section IV-C): memoised search over (layers planned, devices used).

``T_PL(j, m, g)`` is the estimate when the first ``j`` layers are planned on the devices ``g`` and all other layers form one
last stage on the rest (formula 4); one more partition splits that last stage (formula 5).  For every (j, g) only the best plan
so far is kept, ``L`` is Eq. 1 as printed and its pivot that of formula 3.  None of the three steps is exact; see
:mod:`whale_tf.planner.dapple.exact` for the difference.
"""
from __future__ import annotations

from typing import Dict, List, Optional, Tuple

from whale_tf.planner.dapple.cost import Costs, Element, Stage, Stages, printed_latency
from whale_tf.planner.dapple.device_sets import Counts

_Prefix = Tuple[float, Stages, Tuple[Element, ...]]


def solve(costs: Costs) -> Optional[Stages]:
    """The plan with the least printed estimate found, or None when none fits memory."""
    servers, count = costs.servers, costs.micro_batches
    everything = Stage(0, costs.num_layers, servers.none(), servers.sizes)
    best: Optional[Tuple[float, Stages]] = None
    if costs.fits([everything]):
        best = (printed_latency([costs.element(everything)], count), (everything,))
    planned: List[Dict[Counts, _Prefix]] = [{} for _ in range(costs.num_layers)]
    planned[0][servers.none()] = (0.0, (), ())
    for layer in range(costs.num_layers):
        for used, (_, stages, elements) in sorted(planned[layer].items()):
            for taken in servers.policy_sets(used):
                behind = tuple(a + b for a, b in zip(used, taken))
                rest = servers.free(behind)
                if not any(rest):
                    continue
                for end in range(layer + 1, costs.num_layers):
                    stage = Stage(layer, end, used, taken)
                    if costs.memory(stage).depth < 1:
                        break
                    chain = elements + _appended(costs, stages, stage)
                    last = Stage(end, costs.num_layers, behind, rest)
                    estimate = printed_latency(chain + _appended(costs, stages + (stage,), last), count)
                    if behind not in planned[end] or estimate < planned[end][behind][0]:
                        planned[end][behind] = (estimate, stages + (stage,), chain)
                    if costs.memory(last).depth >= 1 and (best is None or estimate < best[0]):
                        best = (estimate, stages + (stage, last))
    return None if best is None else best[1]


def _appended(costs: Costs, stages: Stages, stage: Stage) -> Tuple[Element, ...]:
    """The stage, and the wire to it, as elements of Eq. 1."""
    if not stages:
        return (costs.element(stage),)
    before = stages[-1]
    wire_s = costs.wire(stage.first, before.used, before.taken, stage.taken)
    return Element(wire_s, wire_s), costs.element(stage)
