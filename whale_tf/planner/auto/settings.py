"""What the configuration asks of the automatic planner, and what the answer means for a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import List, Optional, Tuple, Union

from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.errors import ConfigError, InfeasibleError, MissingPackageError
from whale_tf.plan import Estimate
from whale_tf.planner.assemble import Decision, TaskGraphSpec
from whale_tf.planner.auto.choose import TIE, Choice, Request, choose, with_slices
from whale_tf.planner.result import SearchResult, is_no_candidate, no_candidate
from whale_tf.planner.rhino.automatic import NAME as RHINO
from whale_tf.planner.rhino.automatic import Automatic
from whale_tf.planner.rhino.stages import pipelines
from whale_tf.planner.search import RUNNERS_UP
from whale_tf.profiler.blocks import fine_starts
from whale_tf.profiler.chain import Chain
from whale_tf.profiler.graph_profile import Source, graph_profile, profile_of

ASSUMED_BATCH = 32  # examples of a mini-batch whose size neither the graph nor the configuration says
MAX_PIECES = 256  # places to cut that the exact partition looks at


def wants_search(config: Config) -> bool:
    """Whether an un-annotated model is to be divided automatically."""
    return bool(config.auto.auto_parallel) or config.pipeline.num_stages is not None


def may_divide_ops(config: Config) -> bool:
    """Whether dividing every op (Rhino's SPMD) is a candidate beside TaskGraphs."""
    return config.auto.auto_parallel == RHINO or (config.auto.auto_parallel is True and config.pipeline.num_stages is None)


def batch_to_plan_for(config: Config, cluster: Cluster, static: Optional[int]) -> int:
    """Examples of a mini-batch: the graph's, else the configuration's, else at least 32 that divide evenly."""
    if static is not None:
        return static
    if config.auto.batch_size is not None:
        return config.auto.batch_size
    parts = len(cluster.devices) * (config.pipeline.num_micro_batch or 1)
    return -(-ASSUMED_BATCH // parts) * parts


def request_of(config: Config, batch: int) -> Request:
    """The search for a configuration.

    Raises:
        ConfigError: a search that cannot keep to a number of TaskGraphs.
    """
    search, stages = config.auto.auto_parallel, config.pipeline.num_stages
    if isinstance(search, str) and stages is not None:
        raise ConfigError(
            f"auto.auto_parallel is {search!r}, which chooses the number of TaskGraphs itself, but "
            f"pipeline.num_stages is {stages}; leave it "
            "out, or set auto.auto_parallel to true")
    method = search if isinstance(search, str) else "all" if search and stages is None else "auto"
    return Request(method, stages, config.pipeline.num_micro_batch, batch, config.balance.algorithm)


def search_plan(chain: Chain, source: Source, cluster: Cluster, config: Config) -> Choice:
    """The best plan for a captured model.

    Without ortools Rhino's pipelines are no candidates, and the plan's runners-up say so.

    Raises:
        InfeasibleError: nothing fits.
        ConfigError: see :func:`request_of`.
    """
    if not config.cluster.device_place_prefer_intra_node:
        raise ConfigError(
            "cluster.device_place_prefer_intra_node is false, but auto_parallel and num_task_graph choose devices themselves; "
            "leave it out, or annotate the model"
        )
    request, more, unsolved = request_of(config, chain.batch), [], ()  # type: Request, List[Choice], Tuple[str, ...]
    if request.method in ("all", RHINO):
        try:
            found = pipelines(chain, source, cluster, request.global_batch, request.micro_batches, config.auto.stage_tolerance)
        except MissingPackageError as error:
            if request.method == RHINO:
                raise InfeasibleError(str(error)) from error
            unsolved = (no_candidate("pipelines of rhino", error),)
        else:
            more = [Choice(pipeline.result, pipeline.profile) for pipeline in found]
    pieces = profile_of(chain.merged(fine_starts(chain, MAX_PIECES)), source)
    choice = choose(graph_profile(chain, source), pieces, cluster, request, more)
    result = replace(choice.result, runners_up=choice.result.runners_up + unsolved)
    return choice._replace(result=result)


def members_of(choice: Choice) -> List[Tuple[str, ...]]:
    """Names of the forward ops of each TaskGraph."""
    return [tuple(op for layer in choice.profile.layers[stage.first_layer:stage.last_layer + 1] for op in layer.ops)
            for stage in choice.result.stages]


def specs_of(choice: Choice) -> List[TaskGraphSpec]:
    return [TaskGraphSpec(f"stage_{number}", stage.strategy, len(stage.devices[0]))
            for number, stage in enumerate(choice.result.stages)]


def decision_of(choice: Choice, cluster: Cluster, config: Config) -> Decision:
    """Devices and micro-batches of the chosen plan.

    Model replicas divide the mini-batch, so that the plan computes what the local script does; where the configuration says
    ``io.nested_batch`` that holds.
    """
    result = choice.result
    plan = with_slices(result, choice.profile, cluster, config.balance.algorithm)
    nested = config.io.nested_batch if "io.nested_batch" in config.given else "divide"
    return Decision(
        rows=[stage.devices for stage in result.stages],
        micro_batches=result.micro_batches,
        nested_batch=nested,
        estimate=Estimate(
            search=result.search, global_batch=result.global_batch, latency_s=result.latency_s,
            peak_memory_bytes=result.peak_memory_bytes, runners_up=result.runners_up),
        warmups=tuple(stage.warmup for stage in result.stages),
        slices=tuple(task.slices for task in plan.task_graphs))


def preferred(
    divided: Union[Automatic, str, None], staged: Union[SearchResult, InfeasibleError], estimate: Optional[Estimate] = None
) -> Union[Automatic, Estimate]:
    """The better of dividing every op and the best plan of TaskGraphs, both played on the described cluster, with the other among
    its runners-up; dividing has to gain 1%.

    Args:
        divided: a str: why it is no candidate; None: it was not asked for.
        estimate: the staged plan's, where more is known of it than ``staged`` says.

    Raises:
        InfeasibleError: neither fits.
    """
    if isinstance(staged, InfeasibleError):
        if not isinstance(divided, Automatic):
            raise staged
        return _with(divided, *divided.estimate.runners_up, no_candidate("TaskGraphs", staged))
    known = estimate or Estimate(
        search=staged.search, global_batch=staged.global_batch, latency_s=staged.latency_s,
        peak_memory_bytes=staged.peak_memory_bytes, runners_up=staged.runners_up)
    if isinstance(divided, Automatic):
        assert divided.estimate.latency_s is not None
        if divided.estimate.latency_s * TIE < staged.latency_s:
            own = divided.estimate.runners_up
            return _with(divided, staged.description, *own, *staged.runners_up)
        divided = divided.description
    return known if divided is None else with_runners_up(known, divided)


def _with(found: Automatic, *others: str) -> Automatic:
    return found._replace(estimate=with_runners_up(replace(found.estimate, runners_up=()), *others))


def with_runners_up(estimate: Estimate, *first: str) -> Estimate:
    """The estimate with more plans that were not taken, ahead of those it has; why a search gave none is never left out."""
    others = first + estimate.runners_up
    reasons = tuple(text for text in others[RUNNERS_UP:] if is_no_candidate(text))
    return replace(estimate, runners_up=others[:RUNNERS_UP] + reasons)
