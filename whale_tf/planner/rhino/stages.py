"""Pipelines of a captured model, and hybrids with data parallelism: stages from the integer program, scored like all plans.

A unit of the program is a run of ops that come after the same heavy ops (contractions, convolutions).  These sets of ancestors
grow along every edge, so merging ops with equal sets makes no cycle, and parallel branches stay apart: the graph is not put into
a line first (Rhino section 5).

A pipeline takes one dimension of the device mesh, and data parallelism the other: either stages of neighbouring devices that
divide every micro-batch, or model replicas, each a pipeline.  A stage becomes one layer of a profile, so that the simulator
plays the task graph under the static 1F1B order (section 6.2) like any other plan.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from whale_tf.balance import pipeline_seconds
from whale_tf.cluster import Cluster
from whale_tf.cluster.devices import Device
from whale_tf.errors import InfeasibleError
from whale_tf.ir.traits import traits
from whale_tf.planner.candidate import Candidate, Stage, of_stages
from whale_tf.planner.micro_batches import micro_batch_counts
from whale_tf.planner.rhino.pipeline import Flow, StageProblem, Stages, stage_program
from whale_tf.planner.stage_costs import StageCosts, Transfer
from whale_tf.planner.virtual_device import dealt
from whale_tf.profiler.chain import Chain
from whale_tf.profiler.graph_profile import Source, profile_of
from whale_tf.profiler.op_cost import OpCost, tensor_bytes
from whale_tf.profiler.op_time import LAUNCH_S, op_seconds
from whale_tf.schedule import warmup_depths

TRIED = 2  # how many numbers of micro-batches to play for each choice of stages on each mesh


class Units(NamedTuple):
    """``segments[unit]``: the segments of the chain in the unit."""

    problem: StageProblem
    segments: Tuple[Tuple[int, ...], ...]


def units_of(chain: Chain, device: Device) -> Units:
    """The stage problem of a model.  Work is in seconds on ``device``, forward and backward; bytes are those of a mini-batch."""
    graph = chain.graph
    place = {op: segment for segment, ops in enumerate(chain.ops) for op in ops}
    edges = _edges(chain, place)
    sources: Dict[int, List[int]] = {}
    for (producer, _), readers in edges.items():
        for reader in readers:
            sources.setdefault(reader, []).append(producer)
    heavy: List[int] = []  # sets as bits
    for segment, ops in enumerate(chain.ops):
        own = 1 << segment if any(traits(graph.ops[op].type).is_contraction for op in ops) else 0
        for source in sources.get(segment, ()):
            own |= heavy[source]
        heavy.append(own)
    number: Dict[int, int] = {}
    members: List[List[int]] = []
    for segment in _in_order(heavy):
        unit = number.setdefault(heavy[segment], len(members))
        if unit == len(members):
            members.append([])
        members[unit].append(segment)
    unit_of = {segment: unit for unit, segments in enumerate(members) for segment in segments}
    flows: Dict[int, Flow] = {}
    for (producer, tensor), readers in edges.items():
        behind = sorted({unit_of[reader] for reader in readers} - {unit_of[producer]})
        if behind:
            flows[tensor] = Flow(unit_of[producer], tuple(behind), tensor_bytes(graph, tensor))
    seconds = [_seconds(chain, segment, device) for segment in range(chain.size)]
    work = [sum(seconds[segment] for segment in segments) for segments in members]
    return Units(StageProblem(work, list(flows.values())), tuple(map(tuple, members)))


def _in_order(heavy: Sequence[int]) -> List[int]:
    """Segments by unit.  Units come after those from which they read: a set that contains another comes after it."""
    return sorted(range(len(heavy)), key=lambda segment: (bin(heavy[segment]).count("1"), segment))


def _edges(chain: Chain, place: Mapping[int, int]) -> Dict[Tuple[int, int], List[int]]:
    """(segment, tensor it makes) -> other segments that read the tensor."""
    graph, found = chain.graph, {}  # type: ignore[var-annotated]
    for op, segment in place.items():
        for tensor in graph.ops[op].outputs:
            readers = sorted({place[reader] for reader, _ in graph.consumers(tensor) if reader in place} - {segment})
            if readers:
                found[segment, tensor] = readers
    return found


def _seconds(chain: Chain, segment: int, device: Device) -> float:
    """By the formula of the layers."""
    made = [tensor for op in chain.ops[segment] for tensor in chain.graph.ops[op].outputs[:1]]  # an assertion makes nothing
    dtype = chain.graph.tensors[made[-1]].dtype if made else "float32"
    arithmetic = OpCost(float(chain.forward_flops[segment] + chain.backward_flops[segment]), 0.0, True)
    traffic = OpCost(0.0, float(chain.traffic_bytes[segment]))
    total = sum(op_seconds(cost, device, dtype) - LAUNCH_S for cost in (arithmetic, traffic) if cost.flops or cost.bytes)
    return total + float(chain.launches[segment]) * LAUNCH_S


def staged_chain(chain: Chain, units: Units, of: Sequence[int]) -> Chain:
    """The chain with one segment for each stage, in the order of the stages."""
    count = max(of) + 1
    rows: List[List[int]] = [[] for _ in range(count)]
    for unit, segments in enumerate(units.segments):
        rows[of[unit]].extend(segments)
    crossing = np.zeros(count)
    for flow in units.problem.flows:
        last = max(of[reader] for reader in flow.readers)
        crossing[of[flow.producer]:last] += flow.bytes
    return chain.grouped([sorted(row) for row in rows], crossing)


def pipelines(chain: Chain, source: Source, cluster: Cluster, global_batch: int, micro_batches: Optional[int] = None,
              epsilon: float = 0.2) -> List[Candidate]:
    """Every number of stages that divides the devices, on each of its meshes, with the most promising numbers of micro-batches.
    Empty if the model or the batch does not divide.

    Args:
        micro_batches: micro-batches of one model replica; None lets the search choose.
        epsilon: fraction of an equal part by which the stages may differ from it.

    Raises:
        MissingPackageError: there is no ortools to solve the integer program.
    """
    found: List[Candidate] = []
    total = len(cluster)
    units = units_of(chain, cluster.devices[0])
    for stages in _distinct_stages(units, total, epsilon):
        count = max(stages.of) + 1
        costs = StageCosts(profile_of(staged_chain(chain, units, stages.of), source), cluster)
        for rows in _meshes(cluster, count):
            ranked = []
            counts = micro_batch_counts(global_batch, len(rows[0]), count, len(rows[0][0]), micro_batches)
            for number in counts if micro_batches is not None else counts[1:]:  # one would leave all stages but one idle
                samples = global_batch / (number * len(rows[0]) * len(rows[0][0]))  # on each device
                ranked.append((_latency(costs, rows, samples, number), number))
            for seconds, number in sorted(ranked)[:TRIED]:
                found.append(_candidate(costs, rows, global_batch, number, seconds))
    return found


def _distinct_stages(units: Units, total: int, epsilon: float) -> List[Stages]:
    """Tries less tolerance too: the fewest crossing bytes need not be the fastest, and less tolerance balances better."""
    tried = [(tolerance, False) for tolerance in sorted({0.0, epsilon / 4, epsilon})] + [(max(epsilon, 0.5), True)]
    found: Dict[Tuple[int, ...], Stages] = {}
    for count in range(2, min(total, len(units.segments)) + 1):
        for tolerance, balanced in tried if total % count == 0 else ():
            try:
                stages = stage_program(units.problem, count, tolerance, balanced)
            except InfeasibleError:
                continue  # units are too coarse for this many
            found.setdefault(stages.of, stages)
    return list(found.values())


Rows = Sequence[Tuple[Tuple[int, ...], ...]]  # [stage][model replica][device]


def _meshes(cluster: Cluster, count: int) -> List[Rows]:
    """Devices by stage.  A pipeline on the mesh's second dimension makes model replicas; on the first, devices share a stage."""
    total = len(cluster)
    each = total // count
    replicas = dealt(cluster, count, by_memory=True)
    found: List[Rows] = [[tuple((row[stage],) for row in replicas) for stage in range(count)]]
    if each > 1:
        found.append([(tuple(range(stage * each, (stage + 1) * each)),) for stage in range(count)])
    return found


def _latency(costs: StageCosts, rows: Rows, samples: float, micro_batches: int) -> float:
    """The time of a pipeline in which stage number i is layer number i."""
    groups = [costs.group([device for row in replicas for device in row], samples) for replicas in rows]
    works = [group.work(number, number + 1) for number, group in enumerate(groups)]
    handovers = [
        2 * Transfer.slowest(costs.message(a, b) for a, b in zip(senders, receivers)).seconds(size * samples * len(senders[0]))
        for size, senders, receivers in zip(costs.outputs, rows, rows[1:])]
    sums_s = max(group.ring_seconds(number, number + 1) for number, group in enumerate(groups))
    return pipeline_seconds([sum(work) for work in works], handovers, micro_batches) + sums_s


def _candidate(costs: StageCosts, rows: Rows, batch: int, micro_batches: int, seconds: float) -> Candidate:
    depths = warmup_depths("PA", len(rows), None, micro_batches)
    stages = [Stage(first_layer=number, last_layer=number, devices=row, warmup=depth)
              for number, (row, depth) in enumerate(zip(rows, depths))]
    replicas, devices = len(rows[0]), len(rows[0][0])
    mesh = f"{replicas}x{len(rows)}" if replicas > 1 else "x".join(map(str, (len(rows), devices)[:1 + (devices > 1)]))
    wide = f" in {replicas} model replicas" if replicas > 1 else f" of {devices} devices" if devices > 1 else ""
    return of_stages("rhino", f"mesh {mesh}, pipeline of {len(rows)} stages{wide}, {micro_batches} micro-batches", costs, stages,
                     batch, micro_batches, seconds)
