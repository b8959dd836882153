"""DAPPLE's cost of a hybrid plan: pipeline latency (section IV-A, Eq. 1 and 2), with the memory of its stages (section V-C).

A plan is a chain of computation stages, with a communication stage between two of them::

    stage 0   F0 F1 F2 -- B0 F3 B1 ...          computation, replicated on its devices
    wire 0       c0 c1 c2    c0 ...             activations forward, gradients back
    stage 1         F0 B0 F1 B1 ...

**The latency** of ``M`` micro-batches with pivot ``Q``, over computation and communication stages alike::

    L(Q) = sum_{s<=Q} F_s + (M - 1) C_Q + max_s (AR_s + e_s)        C_Q = F_Q + B_Q
    e_s  = sum_{a=s}^{Q} B_a  for s <= Q,      - sum_{a=Q+1}^{s-1} B_a  for s > Q

Eq. 1 prints ``- sum_{a=Q}^{s} B_a`` for every ``s >= Q``.  Read literally, this subtracts the pivot's own last backward pass
where it must be added (a single stage would end before it).  So this module uses the time at which the last backward pass of
``s`` ends, relative to the start of the pivot's.

**The pivot** is the stage without bubbles.  Every stage, assumed to have no bubbles, gives a bound, so ``L`` is the largest
``L(Q)``.  The paper's formula 3 is a heuristic for the same stage.

**Memory** enters twice.  A stage must hold its parameters, gradients, optimizer state and at least one micro-batch.  And with
room for only ``D < M`` micro-batches, ``D`` of them go to the end and back (round trip ``R``) before the next ``D``, the last
``r`` ones a backward pass apart::

    L_memory(Q) = sum_{s<Q} F_s + k R_Q + R_Q + r B_Q + max_s (AR_s + sum_{a=s}^{Q-1} B_a or - sum_{a=Q}^{s-1} B_a)
    M - 1 = k D + r

Eq. 1 leaves that out.  If all micro-batches fit, the term vanishes.
"""
from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.planner.dapple.device_sets import Counts, Servers
from whale_tf.planner.measures import Measures
from whale_tf.planner.stage_costs import UNLIMITED, Group, StageCosts, StageMemory, Work
from whale_tf.profiler.model_profile import ModelProfile


class LayerStage(NamedTuple):
    """Layers ``first`` to ``end - 1`` on the devices ``taken`` after those ``used`` by earlier stages."""

    first: int
    end: int
    used: Counts
    taken: Counts

    @property
    def replicas(self) -> int:
        return sum(self.taken)


Stages = Tuple[LayerStage, ...]


class Element(NamedTuple):
    """A computation or communication stage as Eq. 1 sees it; seconds, ``depth``: micro-batches it can hold."""

    forward_s: float
    backward_s: float
    allreduce_s: float = 0.0
    depth: int = UNLIMITED


def latency(elements: Sequence[Element], micro_batches: int) -> float:
    """``L`` of the module's docstring, in seconds: the largest ``L(Q)`` and ``L_memory(Q)``; straight from the formula."""
    bounds = []
    for pivot, element in enumerate(elements):
        before_s = sum(e.forward_s for e in elements[:pivot])
        work_s = element.forward_s + element.backward_s
        bounds.append(before_s + micro_batches * work_s + _ending(elements, pivot))
        if element.depth < micro_batches:
            trip_s = sum(e.forward_s + e.backward_s for e in elements[pivot:])
            bounds.append(before_s + trip_seconds(micro_batches, element, trip_s) + _ending(elements, pivot))
    return max(bounds)


def trip_seconds(micro_batches: int, element: Element, round_trip_s: float) -> float:
    """From the first forward to the last backward pass of a stage that holds ``depth`` micro-batches at a time."""
    rounds, rest = divmod(micro_batches - 1, element.depth)
    return (rounds + 1) * round_trip_s + rest * element.backward_s


def _ending(elements: Sequence[Element], pivot: int) -> float:
    """From the end of the pivot's last backward pass to the last all-reduce."""
    return max(e.allreduce_s + (sum(a.backward_s for a in elements[s:pivot]) if s <= pivot else
                                -sum(a.backward_s for a in elements[pivot:s]))
               for s, e in enumerate(elements))


class DappleCosts:
    """The stages of one model on the device sets of one cluster, with one number of micro-batches.

    Samples are not divisible: a stage on ``g`` devices computes ``ceil(micro-batch / g)`` samples on its busiest one.

    Attributes:
        micro_batches: M; the micro-batch has ``global_batch / M`` samples.
        stage_costs: what a stage costs, whichever search it comes from.  All numbers of micro-batches can share it.
    """

    def __init__(self, profile: ModelProfile, servers: Servers, global_batch: int, micro_batches: int,
                 measures: Measures = Measures(), stage_costs: Optional[StageCosts] = None) -> None:  # noqa: B008 (a frozen tuple)
        self.stage_costs = stage_costs or StageCosts(profile, servers.cluster, measures)
        self.profile, self.servers, self.measures = profile, servers, measures
        self.global_batch, self.micro_batches = global_batch, micro_batches
        self.micro_batch = -(-global_batch // micro_batches)
        self.num_layers, self.outputs = self.stage_costs.num_layers, self.stage_costs.outputs
        self.parameters = self.stage_costs.bytes().parameters
        self._groups: Dict[Tuple[Counts, Counts], Group] = {}

    # ---- stages ----------------------------------------------------------------------------------------------------

    def group(self, used: Counts, taken: Counts) -> Group:
        """The stages on a device set."""
        key = (used, taken)
        if key not in self._groups:
            devices = self.servers.devices(used, taken)
            self._groups[key] = self.stage_costs.group(devices, -(-self.micro_batch // len(devices)))
        return self._groups[key]

    def times(self, stage: LayerStage) -> Work:
        """(F_s, B_s): seconds of one micro-batch on the busiest device of the stage."""
        return self.group(stage.used, stage.taken).work(stage.first, stage.end)

    def allreduce_seconds(self, stage: LayerStage) -> float:
        """AR(P_s, g_s): ring all-reduce of the stage's gradients over its devices."""
        return self.group(stage.used, stage.taken).ring_seconds(stage.first, stage.end)

    def memory(self, stage: LayerStage) -> StageMemory:
        return self.group(stage.used, stage.taken).memory(stage.first, stage.end)

    def element(self, stage: LayerStage, depth: Optional[int] = None) -> Element:
        """The stage as Eq. 1 sees it; ``depth``: micro-batches in flight (default: what memory allows)."""
        fits = self.memory(stage).depth
        return Element(*self.times(stage), self.allreduce_seconds(stage), fits if depth is None else min(depth, fits))

    def wire(self, boundary: int, used: Counts, taken: Counts, receivers: Counts) -> float:
        """Seconds of one micro-batch's tensors crossing after layer ``boundary - 1``, one way.

        ``taken`` (after ``used``) sends to ``receivers``, the next devices on each server.
        """
        return self.servers.message(used, taken, receivers).seconds(self.outputs[boundary - 1] * self.micro_batch)

    # ---- whole plans -----------------------------------------------------------------------------------------------

    def elements(self, stages: Sequence[LayerStage], depths: Optional[Sequence[int]] = None) -> List[Element]:
        """Computation and communication stages of a plan, in order."""
        made: List[Element] = []
        for index, stage in enumerate(stages):
            if index:
                before = stages[index - 1]
                wire_s = self.wire(stage.first, before.used, before.taken, stage.taken)
                made.append(Element(wire_s, wire_s))
            made.append(self.element(stage, None if depths is None else depths[index]))
        return made

    def fits(self, stages: Sequence[LayerStage]) -> bool:
        return all(self.memory(stage).depth >= 1 for stage in stages)

    def latency(self, stages: Sequence[LayerStage], depths: Optional[Sequence[int]] = None) -> float:
        """``L`` of a plan, scored from its stages alone."""
        return latency(self.elements(stages, depths), self.micro_batches)
