"""The search for a captured graph's plan.  For an un-annotated model it chooses TaskGraphs and everything else, or a division of
every op; for an annotated one it chooses everything except the TaskGraphs."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import List, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.capture.captured import Captured, capture, captured_from
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.decide.divide_all import check_automatic, contenders
from whale_tf.decide.played_steps import Annotated, Automatic, analysed, as_played, facts, with_task_graphs
from whale_tf.decide.split import Division, carry_out, initialised, of_local, whole_division
from whale_tf.errors import ConfigError, PlanError, UnsupportedOpError
from whale_tf.graph_editor.garbage import garbage_collection_paused
from whale_tf.ir.batch_axis import BatchAxis, Options
from whale_tf.ir.region import Region
from whale_tf.ir.verify import verify
from whale_tf.plan import Plan
from whale_tf.planner.annotated import annotated_plan
from whale_tf.planner.auto.settings import allowed_of, may_divide_ops, opened
from whale_tf.planner.candidate import Candidate, no_candidate, ranked
from whale_tf.planner.joint import Joint
from whale_tf.planner.measures import AUTO
from whale_tf.planner.recompute import NONE
from whale_tf.planner.rhino.automatic import NAME as RHINO
from whale_tf.transforms.loss_scale import recorded_low, scales_itself
from whale_tf.transforms.shard.problem import divided_dims

HOPE = 0.8  # of the objective of Rhino's search; few divisions take less as played (one of 16 measured, with 0.70)


def find_plan(graph: tf.Graph, name: str, cluster: Cluster, config: Config) -> Optional[Candidate]:
    """The plan that ``auto_parallel`` would choose for a graph, which is not changed; None if it has no optimizer's update yet.

    Raises:
        ConfigError: the graph is annotated.
        WhaleError: see :func:`parallelize`.
    """
    if scales_itself(graph):
        config = config.without_loss_scale()
    captured = captured_from(recorded_low(graph, config.precision, config.loss_scale, cluster))
    if not captured.has_step:
        return None
    verify(captured.graph)
    if captured.is_annotated:
        raise ConfigError("the script has annotations ({}), which say how it is divided; remove them to search for a division"
                          .format(", ".join(repr(spec.name) for spec in captured.specs)))
    if config.auto.auto_parallel == RHINO:
        check_automatic(captured, config)
    began, config = time.perf_counter(), opened(config)
    found, _ = best_plan(captured, cluster, config, Options(sections=True))
    return replace(found, model=name, search_seconds=time.perf_counter() - began)


@garbage_collection_paused()
def compared(graph: tf.Graph, cluster: Cluster, config: Config) -> Search:
    """The search of ``auto_parallel`` for an un-annotated training graph, which is not changed, with every candidate played."""
    return Search(capture(graph), cluster, opened(config), Options(sections=True), every=True)


class Decided(NamedTuple):
    """``captured``, ``batch`` and ``region`` of the step that ``plan`` runs, and the ``division`` of the user's step that made
    it."""

    captured: Captured
    batch: BatchAxis
    region: Region
    plan: Plan
    division: Division


def decided_by_annotations(division: Division, cluster: Cluster, config: Config, plan: Optional[Plan], options: Options,
                           parts: Sequence[Tuple[int, ...]]) -> Decided:
    """A plan for the existing TaskGraphs, unless a plan is given."""
    captured, (batch, region) = division.captured, analysed(division.captured, options)
    if plan is None:
        model = facts(captured, region)._replace(graph=division.local.graph)
        plan = of_local(annotated_plan(model, cluster, config, parts), division)
    return Decided(captured, batch, region, plan, division)


class Played(NamedTuple):
    """A division of every op, and its decision.  The decision is None if there is no plan, or if the division was not played
    because its search estimates no better time than that of other plans.  ``objective_s`` is the least sum of seconds that the
    search found."""

    found: Candidate
    objective_s: float
    decided: Optional[Decided] = None


@garbage_collection_paused()
def best_plan(captured: Captured, cluster: Cluster, config: Config, options: Options) -> Tuple[Candidate, Decided]:
    """The fastest candidate as played, among divisions of every op (if rhino is requested) and plans of TaskGraphs.  Data
    parallelism and the undivided graph are candidates too, unless a number of TaskGraphs or a pattern is requested.

    Raises:
        InfeasibleError: no search finds a plan that fits.
    """
    search = Search(captured, cluster, config, options)
    taken = search.joint.best(allowed_of(config), [one.found for one in search.divided])
    assert taken.plan is not None
    plan = replace(taken.plan, estimate=taken.estimate)
    if taken.assignment is None:
        captured, region = with_task_graphs(captured, search.region, taken)
        decided = Decided(captured, region.batch, region, plan, Division(search.captured, captured))
    else:
        found = next(one.decided for one in search.divided if one.decided is not None and one.decided.plan is taken.plan)
        decided = found._replace(plan=plan)
    return replace(taken, plan=plan), decided


@garbage_collection_paused()
def best_of_annotated(captured: Captured, region: Region, cluster: Cluster, config: Config, options: Options,
                      parts: Sequence[Tuple[int, ...]]) -> Plan:
    """The plan for the existing TaskGraphs, with the best choice of everything else: schedule, homes of variables, and
    recomputation.

    Args:
        parts: device numbers of each process, if there are several processes.

    Raises:
        InfeasibleError: nothing fits.
        WhaleError: no schedule works with the annotations.
    """
    model = Annotated(captured, region, cluster, config, options, parts)
    taken = Joint(model).best(allowed_of(config))
    assert taken.plan is not None
    return replace(taken.plan, estimate=replace(taken.estimate, search="the annotations' schedules and measures"))


class Search:
    """The candidates of :func:`best_plan`.

    Attributes:
        joint: the search for plans of TaskGraphs.
        staged: plans of TaskGraphs, and the reasons why searches found none.
        divided: plans that divide every op, without memory measures, ordered by the objective of their search.

    Args:
        config: see :func:`opened`.
        every: play divisions even if their search estimates that other plans are faster.
    """

    def __init__(self, captured: Captured, cluster: Cluster, config: Config, options: Options, every: bool = False) -> None:
        self.captured, (batch, self.region) = captured, analysed(captured, options)
        model = Automatic(captured, self.region, cluster, config, options)
        self.joint = Joint(model)
        divisions: List[Candidate] = []
        is_free = {config.zero, config.offload, config.recompute} <= {NONE, AUTO} or config.auto.auto_parallel == RHINO
        if may_divide_ops(config) and len(cluster.devices) > 1 and is_free:
            divisions = contenders(captured, divided_dims(batch), cluster, config)
        self.staged, self.divided = self.joint.played(allowed_of(config)), []  # type: List[Candidate], List[Played]
        for one in ranked(divisions) if divisions else []:  # compiling one takes as long as finding it
            if not one.why_not and (every or may_be_best(one, self.staged + [other.found for other in self.divided])):
                self.divided.append(_divided(one, captured, model.batch, cluster, config, options))
            else:
                self.divided.append(Played(one, one.latency_s))

    @property
    def candidates(self) -> List[Candidate]:
        """Plans of both kinds, and the reasons why there are none."""
        return self.staged + [one.found for one in self.divided]


def may_be_best(division: Candidate, others: Sequence[Candidate]) -> bool:
    """Whether a division that has not been played may turn out best.  Its search adds up times of devices that work in
    parallel."""
    hopeful = replace(division, latency_s=HOPE * division.latency_s)
    return not division.why_not and ranked([hopeful, *others])[0] is hopeful


def settled(config: Config) -> Config:
    """The configuration without choices that do not apply if every op is divided, into one micro-batch and parts of variables."""
    config = config.changed(**{key: NONE for key in ("zero", "offload", "recompute") if config[key] == AUTO})
    return config.changed(pipeline__schedule="backward_first") if config.pipeline.schedule == AUTO else config


def _divided(found: Candidate, captured: Captured, batch: int, cluster: Cluster, config: Config, options: Options) -> Played:
    """A division of every op with its plan, its time as played, and peaks from the parts' own tensors."""
    config = settled(config)
    try:
        division = carry_out(initialised(whole_division(captured, found, cluster), config.init))
        decided = decided_by_annotations(division, cluster, config, None, options, ())
        step, graph = decided.captured, decided.captured.graph
        sources = {graph.tensor(captured.graph.tensor_name(tensor)): dim for tensor, dim in captured.sources.items()}
        region = decided.region._replace(graph=step._replace(sources=sources, stated=captured.stated).sized(batch))
        return Played(as_played(found, step, region, decided.plan, cluster), found.latency_s, decided)
    except (PlanError, UnsupportedOpError) as error:
        return Played(no_candidate(found.search, error), found.latency_s)
