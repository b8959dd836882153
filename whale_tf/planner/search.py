"""One interface for all searches over a model profile: ``search(profile, cluster, global_batch, method=...)``."""
from __future__ import annotations

import time
from dataclasses import replace
from typing import Callable, List, Mapping, NamedTuple, Optional, Union

from whale_tf.cluster import Cluster
from whale_tf.errors import InfeasibleError, PlanError, did_you_mean
from whale_tf.planner import replicate_split
from whale_tf.planner.amp import search as amp
from whale_tf.planner.candidate import Candidate
from whale_tf.planner.dapple import search as dapple
from whale_tf.planner.joint import Progress
from whale_tf.planner.measures import Allowed, Measures
from whale_tf.planner.settle import LayersOf, settled
from whale_tf.planner.stage_costs import StageCosts
from whale_tf.profiler.model_profile import ModelProfile
from whale_tf.simulator import Source


class Method(NamedTuple):
    """A search over a model profile.

    Attributes:
        summary: what it searches for.
        plans: its plans, given the costs of stages, the examples of one step, its own name, and the number of micro-batches of
            one model replica (None: it chooses).
    """

    summary: str
    plans: Callable[[StageCosts, int, str, Optional[int]], List[Candidate]]


METHODS: Mapping[str, Method] = {
    "dapple": Method("pipeline and data parallelism, exact (DAPPLE)", dapple.plans),
    "data-parallel": Method("every device holds the model", dapple.plans),
    "amp": Method("pipeline, data and tensor parallelism (AMP)", amp.plans),
    "replicate-split": Method("the first layers replicated, the last ones split, on the same devices (Whale)",
                              replicate_split.plans),
}

PLAIN = "data-parallel"

# Searches that need more than a profile: summary.
ON_GRAPHS: Mapping[str, str] = {
    "rhino": "every op divided, or a pipeline, on the op graph of a script, .pb or .meta (Rhino)",
    "auto": "runs all searches, scores them by one simulation, and keeps the best",
}


def search(profile: Union[ModelProfile, str], cluster: Union[Cluster, str], global_batch: int, method: str = "dapple",
           allowed: Allowed = Allowed(), micro_batches: Optional[int] = None, source: Optional[Source] = None,
           progress: Optional[Progress] = None) -> Candidate:
    """Among the plans that ``method`` finds under the ``allowed`` memory measures, the one that is fastest in the simulation.

    See :func:`searched`.

    Args:
        source: the model whose layers ``profile`` has, if it is more than they; prices the answer.
        progress: see :class:`~whale_tf.planner.joint.Joint`.
    """
    profile, cluster, start = ModelProfile.parse(profile), Cluster.parse(cluster), time.perf_counter()
    layers = LayersOf(profile, cluster, global_batch, source)

    def under(measures: Measures, room: Cluster) -> List[Candidate]:
        own, names = layers.under(measures), [method]
        if method != PLAIN and not (measures.zero == "none" and measures.offload != "v0" and measures.is_bounded):
            names.append(PLAIN)  # which ZeRO may make the fastest
        found: List[Candidate] = []
        for name in names:
            try:
                plans = searched(own, room, global_batch, name, measures, micro_batches)
            except InfeasibleError as error:
                if name == names[-1] and not found or name == method and error.least_bytes is None:  # whatever the memory
                    raise
                continue
            known = {one.micro_batches for one in found if one.kind == "dp"}
            found += [replace(one, search=method) for one in plans if one.micro_batches not in known]
        return found

    found = settled(layers, under, allowed, micro_batches, progress=progress)
    return replace(found, search_seconds=time.perf_counter() - start)


def searched(profile: Union[ModelProfile, str], cluster: Union[Cluster, str], global_batch: int, method: str = "dapple",
             measures: Measures = Measures(), micro_batches: Optional[int] = None) -> List[Candidate]:
    """The plans that ``method`` returns, best first by its own costs, of enough different kinds to include the one that is
    fastest in the simulation.

    Args:
        profile: a profile, its file, or a built-in name.
        cluster: any form that :meth:`Cluster.parse` takes.
        global_batch: samples of one step.
        method: a key of :data:`METHODS`.
        measures: the memory measures; the profile is in their precision already.
        micro_batches: number of micro-batches of one model replica; None lets the search choose.

    Raises:
        PlanError: the method or profile is unknown, or the profile has no batch granularity.
        ClusterError: there is no such cluster, or its devices are not connected.
        InfeasibleError: nothing fits; the message gives the smallest memory that would suffice.
    """
    profile, cluster = ModelProfile.parse(profile), Cluster.parse(cluster)
    if method in ON_GRAPHS:
        raise PlanError(f"search {method!r} ({ON_GRAPHS[method]}) needs more than a profile; use `whale plan`, or "
                        f"auto.auto_parallel")
    if method not in METHODS:
        names = [*METHODS, *ON_GRAPHS]
        raise PlanError(f"there is no search {method!r}; there are {', '.join(names)}.{did_you_mean(method, names)}")
    if global_batch < 1:
        raise PlanError(f"global_batch is {global_batch}, expected at least 1")
    if profile.batch_granularity is None:
        raise PlanError(
            f"profile {profile.name!r} does not say its batch granularity, so micro-batches cannot be sized; add "
            "\"batch_granularity\": the number of samples it was measured with, or the smallest a device computes efficiently")
    start = time.perf_counter()
    found = METHODS[method].plans(StageCosts(profile, cluster, measures), global_batch, method, micro_batches)
    seconds = time.perf_counter() - start
    return [replace(one, search_seconds=seconds) for one in found]
