"""The plan of a step: the given one, otherwise the one that its annotations ask for, otherwise the best one of a search."""

from __future__ import annotations

from dataclasses import replace

from whale_tf.capture.captured import Captured
from whale_tf.config import Config
from whale_tf.decide.decision import Decision, Division, Request
from whale_tf.decide.divide_all import check_automatic
from whale_tf.decide.facts import analysed
from whale_tf.decide.search import best_of_annotated, best_plan, by_annotations
from whale_tf.decide.split import carry_out, divide
from whale_tf.errors import ConfigError
from whale_tf.planner.annotated import check_plan
from whale_tf.planner.auto.settings import opened, wants_search
from whale_tf.planner.measures import AUTO
from whale_tf.planner.rhino.automatic import NAME as RHINO


def choose(local: Captured, request: Request) -> Decision:
    """The step under its plan, of which ``split`` TaskGraphs are divided.

    Raises:
        WhaleError: the step cannot run as asked, or nothing fits.
    """
    decision = _chosen(local, request)
    check_plan(decision.plan, request.cluster, request.processes)
    return decision


def _chosen(local: Captured, request: Request) -> Decision:
    config, count = request.config, len(request.cluster.devices)
    if request.plan is None:
        is_rhino = config.auto.auto_parallel == RHINO
        if is_rhino and count > 1:
            check_automatic(local, config)
        if wants_search(config) and not local.is_annotated:
            if count > 1 or not is_rhino:
                return _searched(local, request)
        else:
            request = request._replace(config=_with_one_schedule(config))
            if AUTO in (request.config.pipeline.schedule, config.zero, config.offload):
                return _fastest(local, request)
    return by_annotations(carry_out(divide(local, request)), request)


def _with_one_schedule(config: Config) -> Config:
    """One micro-batch runs alike under every schedule."""
    is_open = config.pipeline.schedule == AUTO and (config.pipeline.num_micro_batch or 1) == 1
    return config.changed(pipeline__schedule="backward_first") if is_open else config


def _fastest(local: Captured, request: Request) -> Decision:
    """The annotated step under the schedule and homes that fit and are played fastest.

    Raises:
        ConfigError: a TaskGraph is split; only TaskGraphs of undivided ops can be played here.
        InfeasibleError: nothing fits.
    """
    config = request.config
    key = next(key for key in ("zero", "offload", "pipeline.schedule") if config[key] == AUTO)
    split = [spec.name for spec in local.specs if spec.strategy == "split"]
    if split:
        raise ConfigError(f"{key}={AUTO!r} cannot be combined with wh.split ({split[0]!r}); set {key} explicitly")
    region = analysed(local, request.options)
    return Decision(local, region, best_of_annotated(local, region, request), Division(local, local), config, is_measured=True)


def _searched(local: Captured, request: Request) -> Decision:
    """The best plan of an un-annotated model: of TaskGraphs, or dividing every op.  Several processes run parts of its step."""
    _, decision = best_plan(local, request._replace(config=opened(request.config), processes=()))
    if len(request.processes) > 1:
        decision = decision._replace(plan=replace(decision.plan, processes=tuple(request.processes), one_step=True))
    return decision
