"""Translates the configuration into requests to the automatic planner, and its answer into parts of a plan."""

from __future__ import annotations

from typing import List, Optional, Tuple

from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.errors import ConfigError, MissingPackageError
from whale_tf.passes.communicate import MICRO
from whale_tf.planner.assemble import Decision, TaskGraphSpec
from whale_tf.planner.auto.choose import Request, candidates
from whale_tf.planner.candidate import Candidate, no_candidate
from whale_tf.planner.layers import Layers
from whale_tf.planner.measures import AUTO, OWN, Allowed, Measures
from whale_tf.planner.rhino.automatic import NAME as RHINO
from whale_tf.planner.rhino.stages import pipelines
from whale_tf.planner.simulated import with_slices
from whale_tf.profiler.blocks import fine_starts
from whale_tf.profiler.chain import Chain
from whale_tf.profiler.graph_profile import Source, graph_profile, profile_of

ASSUMED_BATCH = 32  # examples in a mini-batch, if neither the graph nor the configuration gives the number
MAX_PIECES = 256  # number of possible cuts that the exact partition considers


def wants_search(config: Config) -> bool:
    """Whether an un-annotated model is to be divided automatically."""
    return bool(config.auto.auto_parallel) or config.pipeline.num_stages is not None


def may_divide_ops(config: Config) -> bool:
    """Whether dividing every op (Rhino's SPMD) is a candidate, in addition to TaskGraphs."""
    return config.auto.auto_parallel == RHINO or (config.auto.auto_parallel is True and config.pipeline.num_stages is None)


def batch_to_plan_for(config: Config, cluster: Cluster, static: Optional[int]) -> int:
    """Examples in a mini-batch: the graph's number, otherwise the configuration's, otherwise at least 32 that divide evenly."""
    if static is not None:
        return static
    if config.auto.batch_size is not None:
        return config.auto.batch_size
    parts = len(cluster.devices) * (config.pipeline.num_micro_batch or 1)
    return -(-ASSUMED_BATCH // parts) * parts


def mini_batches(config: Config, cluster: Cluster) -> int:
    """How many mini-batches a step takes if each micro-batch takes one, and each TaskGraph has one device."""
    if config.io.batch != MICRO:
        return 1
    return (config.pipeline.num_micro_batch or 1) * max(1, len(cluster.devices) // (config.pipeline.num_stages or 1))


def in_equal_parts(batch: int, config: Config, cluster: Cluster) -> int:
    """The examples of a mini-batch for which plans are searched: as many as the parts that the configuration asks for can take
    evenly.  Steps divide any mini-batch, with parts that differ by one example; profiles of layers do not."""
    stages = config.pipeline.num_stages
    parts = (config.pipeline.num_micro_batch or 1) * (max(1, len(cluster.devices) // stages) if stages else 1)
    return batch - batch % parts if batch >= parts else batch


def request_of(config: Config, batch: int) -> Request:
    """The search for a configuration.

    Raises:
        ConfigError: the search cannot use a given number of TaskGraphs.
    """
    search, stages = config.auto.auto_parallel, config.pipeline.num_stages
    if isinstance(search, str) and stages is not None:
        raise ConfigError(
            f"auto.auto_parallel is {search!r}, which chooses the number of TaskGraphs itself, but pipeline.num_stages is "
            f"{stages}; leave it out, or set auto.auto_parallel to true")
    method = search if isinstance(search, str) else "all" if search and stages is None else "auto"
    return Request(method, stages, config.pipeline.num_micro_batch, batch, config.balance.algorithm, allowed_of(config))


def opened(config: Config) -> Config:
    """The configuration under ``auto_parallel``, which decides open choices that change no numbers and stay on the devices:
    recomputation, and the state that replicas divide."""
    if not config.auto.auto_parallel:
        return config
    return config.changed(**{key: AUTO for key in ("recompute", "zero") if key not in config.given})


def allowed_of(config: Config) -> Allowed:
    """The memory measures that a search may use.  The precision is already that of the graph."""
    return Allowed(config.recompute, config.zero, config.offload, OWN, config.pipeline.schedule)


def layers_of(chain: Chain, source: Source, cluster: Cluster, config: Config) -> Layers:
    """The search for plans of TaskGraphs for a captured model, by the times of its layers.

    Without ortools Rhino's pipelines are not candidates, and a candidate without a plan says so.

    Raises:
        ConfigError: see :func:`request_of`.
    """
    if not config.cluster.device_place_prefer_intra_node:
        raise ConfigError(
            "cluster.device_place_prefer_intra_node is false, but auto_parallel and num_task_graph choose devices themselves; "
            "leave it out, or annotate the model")
    batch = in_equal_parts(chain.batch * mini_batches(config, cluster), config, cluster)
    request, more = request_of(config, batch), []  # type: Request, List[Candidate]
    if request.method in ("all", RHINO):
        try:
            more = pipelines(chain, source, cluster, request.global_batch, request.micro_batches, config.auto.stage_tolerance)
        except MissingPackageError as error:
            more = [no_candidate("pipelines of rhino", error)]
    pieces = profile_of(chain.merged(fine_starts(chain, MAX_PIECES)), source)
    layers = graph_profile(chain, source)

    def under(measures: Measures) -> List[Candidate]:
        return candidates(layers, pieces, cluster, request, measures, more)

    return Layers(layers, cluster, under, request.balance, request.micro_batches)


def members_of(found: Candidate) -> List[Tuple[str, ...]]:
    """Names of the forward ops of each TaskGraph."""
    assert found.profile is not None, "TaskGraphs are given in layers"
    return [tuple(op for layer in found.profile.layers[stage.first_layer:stage.last_layer + 1] for op in layer.ops)
            for stage in found.stages]


def specs_of(found: Candidate) -> List[TaskGraphSpec]:
    return [TaskGraphSpec(f"stage_{number}", stage.strategy, len(stage.devices[0]))
            for number, stage in enumerate(found.stages)]


def decision_of(found: Candidate, cluster: Cluster, config: Config) -> Decision:
    """Devices and micro-batches of a plan.

    Model replicas divide the mini-batch, so that the plan computes what the local script computes, unless the configuration sets
    ``io.nested_batch``, or ``io.batch`` to ``micro``.
    """
    assert found.profile is not None, "TaskGraphs are given in layers"
    plan = with_slices(found, found.profile, cluster, config.balance.algorithm)
    nested: str = config.io.nested_batch if "io.nested_batch" in config.given else "divide"
    if config.io.batch == MICRO:
        nested = config.io.batch
    return Decision(
        rows=[stage.devices for stage in found.stages], micro_batches=found.micro_batches, nested_batch=nested,
        estimate=found.estimate, warmups=tuple(stage.warmup for stage in found.stages),
        slices=tuple(task.slices for task in plan.task_graphs))
