"""What a captured step is to become: its plan, and the step that the plan runs, its ``split`` TaskGraphs divided."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence, Tuple

from whale_tf.capture.captured import Captured
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.emit.shard.automatic import check_automatic
from whale_tf.emit.shard.division import Division, carry_out, divide, initialised, of_local, whole_division
from whale_tf.errors import ConfigError
from whale_tf.ir.batch_axis import BatchAxis, Options
from whale_tf.ir.region import Region
from whale_tf.plan import Plan
from whale_tf.planner.annotated import annotated_plan, check_plan
from whale_tf.planner.auto.settings import wants_search
from whale_tf.planner.rhino.automatic import NAME as RHINO
from whale_tf.searching import analysed, best_plan, facts


class Decided(NamedTuple):
    """``captured``, ``batch``, ``region``: of the step that ``plan`` runs; ``division``: how it was made of the user's."""

    captured: Captured
    batch: BatchAxis
    region: Region
    plan: Plan
    division: Division


def decide(
    local: Captured, cluster: Cluster, config: Config, plan: Optional[Plan], options: Options, parts: Sequence[Tuple[int, ...]]
) -> Decided:
    """The plan of a captured step: the one that is given, else the one that its annotations ask for, else the best that is found.

    Args:
        parts: device numbers that each process drives, where there are several.

    Raises:
        WhaleError: the step cannot run as asked.
    """
    is_rhino, count = config.auto.auto_parallel == RHINO, len(cluster.devices)
    if plan is None and is_rhino and count > 1:
        check_automatic(local, config)
    if plan is None and wants_search(config) and not local.is_annotated:
        _check_one_process(len(parts))
        if count > 1 or not is_rhino:
            return _searched(local, cluster, config, options)
    division = carry_out(divide(local, cluster, config, plan, options, parts))
    decided = _annotated(division, cluster, config, plan, options, parts)
    check_plan(decided.plan, cluster, parts)
    return decided


def _annotated(
    division: Division, cluster: Cluster, config: Config, plan: Optional[Plan], options: Options, parts: Sequence[Tuple[int, ...]]
) -> Decided:
    """A plan for the TaskGraphs that there are (unless one is given)."""
    captured, (batch, region) = division.captured, analysed(division.captured, options)
    if plan is None:
        model = facts(captured, region)._replace(graph=division.local.graph)
        plan = of_local(annotated_plan(model, cluster, config, parts), division)
    return Decided(captured, batch, region, plan, division)


def _searched(local: Captured, cluster: Cluster, config: Config, options: Options) -> Decided:
    """The best plan of an un-annotated model: of TaskGraphs, or dividing every op."""
    batch, region = analysed(local, options)
    found = best_plan(local, region, cluster, config)
    if found.rhino is not None:
        division = carry_out(initialised(whole_division(local, found.rhino, cluster), config.init))
        decided = _annotated(division, cluster, config, None, options, ())
    else:
        assert found.plan is not None
        decided = Decided(found.captured, batch, found.region, found.plan, Division(local, found.captured))
    check_plan(decided.plan, cluster, ())
    return decided


def _check_one_process(count: int) -> None:
    if count > 1:
        raise ConfigError(
            f"auto_parallel and num_task_graph divide an un-annotated model inside one process, but there are {count}; annotate "
            "the model, or start one process that sees all devices")
