"""DAPPLE's planner as the paper prints it (section IV-C): memoised search over (layers planned, devices used).

``T_PL(j, m, g)`` is the estimate when the first ``j`` layers are planned on the devices ``g`` and all other layers form one
last stage on the rest (formula 4); one more partition splits that last stage (formula 5).  For every (j, g) only the best plan
so far is kept, ``L`` is Eq. 1 as printed and its pivot that of formula 3.  None of the three steps is exact; see
:mod:`whale_tf.planner.dapple.exact` for the difference.
"""
from __future__ import annotations

from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from whale_tf.planner.dapple.cost import DappleCosts, Element, LayerStage, Stages
from whale_tf.planner.dapple.device_sets import Counts, Servers, append_first, fresh_first, scatter_first

POLICIES: Mapping[str, Callable[[Counts, Counts, int], Counts]] = {
    "fresh": fresh_first, "append": append_first, "scatter": scatter_first}

_Prefix = Tuple[float, Stages, Tuple[Element, ...]]


def solve(costs: DappleCosts) -> Optional[Stages]:
    """The plan with the least printed estimate found, or None when none fits memory."""
    servers, count = costs.servers, costs.micro_batches
    everything = LayerStage(0, costs.num_layers, servers.none(), servers.sizes)
    best: Optional[Tuple[float, Stages]] = None
    if costs.fits([everything]):
        best = (printed_latency([costs.element(everything)], count), (everything,))
    planned: List[Dict[Counts, _Prefix]] = [{} for _ in range(costs.num_layers)]
    planned[0][servers.none()] = (0.0, (), ())
    for layer in range(costs.num_layers):
        for used, (_, stages, elements) in sorted(planned[layer].items()):
            for taken in policy_sets(servers, used):
                behind = tuple(a + b for a, b in zip(used, taken))
                rest = servers.free(behind)
                if not any(rest):
                    continue
                for end in range(layer + 1, costs.num_layers):
                    stage = LayerStage(layer, end, used, taken)
                    if costs.memory(stage).depth < 1:
                        break
                    chain = elements + _appended(costs, stages, stage)
                    last = LayerStage(end, costs.num_layers, behind, rest)
                    estimate = printed_latency(chain + _appended(costs, stages + (stage,), last), count)
                    if behind not in planned[end] or estimate < planned[end][behind][0]:
                        planned[end][behind] = (estimate, stages + (stage,), chain)
                    if costs.memory(last).depth >= 1 and (best is None or estimate < best[0]):
                        best = (estimate, stages + (stage, last))
    return None if best is None else best[1]


def _appended(costs: DappleCosts, stages: Stages, stage: LayerStage) -> Tuple[Element, ...]:
    """The stage, and the wire to it, as elements of Eq. 1."""
    if not stages:
        return (costs.element(stage),)
    before = stages[-1]
    wire_s = costs.wire(stage.first, before.used, before.taken, stage.taken)
    return Element(wire_s, wire_s), costs.element(stage)


def policy_sets(servers: Servers, used: Counts) -> Iterator[Counts]:
    """What the three policies give for every number of devices, without repetitions."""
    for count in range(1, sum(servers.free(used)) + 1):
        seen = set()
        for policy in POLICIES.values():
            taken = policy(servers.sizes, used, count)
            if taken not in seen:
                seen.add(taken)
                yield taken


def printed_pivot(elements: Sequence[Element], micro_batches: int) -> int:
    """Formula 3: from the last stage to the first, the pivot moves to ``s`` when ``s`` is busier than the pivot and all
    between them."""
    work = [e.forward_s + e.backward_s for e in elements]
    pivot = len(elements) - 1
    for stage in range(len(elements) - 2, -1, -1):
        if (micro_batches - 1) * work[stage] > (micro_batches - 1) * work[pivot] + sum(work[stage + 1:pivot]):
            pivot = stage
    return pivot


def printed_latency(elements: Sequence[Element], micro_batches: int, pivot: Optional[int] = None) -> float:
    """Eq. 1 and 2 as printed, with formula 3's pivot (or the given one)."""
    if pivot is None:
        pivot = printed_pivot(elements, micro_batches)
    ending_s = max(
        e.allreduce_s + (-sum(a.backward_s for a in elements[pivot:s + 1]) if s >= pivot else
                         sum(a.backward_s for a in elements[s:pivot + 1]))
        for s, e in enumerate(elements))
    work_s = elements[pivot].forward_s + elements[pivot].backward_s
    return sum(e.forward_s for e in elements[:pivot + 1]) + (micro_batches - 1) * work_s + ending_s
