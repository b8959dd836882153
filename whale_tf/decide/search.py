"""The search for a captured graph's plan.  For an un-annotated model it chooses TaskGraphs and everything else, or a division of
every op; for an annotated one it chooses everything except the TaskGraphs."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import List, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.capture.captured import Captured
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.decide.decision import Decision, Division, Request
from whale_tf.decide.divide_all import check_automatic, contenders
from whale_tf.decide.facts import analysed, facts
from whale_tf.decide.played_steps import Annotated, Automatic, as_played, with_task_graphs
from whale_tf.decide.prepare import prepare
from whale_tf.decide.split import carry_out, initialised, of_local, whole_division
from whale_tf.errors import ConfigError, PlanError, UnsupportedOpError
from whale_tf.garbage import garbage_collection_paused
from whale_tf.ir.region import Region
from whale_tf.plan import Plan
from whale_tf.planner.annotated import annotated_plan
from whale_tf.planner.auto.settings import allowed_of, may_divide_ops, opened
from whale_tf.planner.candidate import Candidate, no_candidate, ranked
from whale_tf.planner.joint import Joint
from whale_tf.planner.measures import AUTO
from whale_tf.planner.recompute import NONE
from whale_tf.planner.rhino.automatic import NAME as RHINO
from whale_tf.transforms.shard.problem import divided_dims

OPTIMISM = 0.8  # times the objective of Rhino's search: few divisions take less in simulation (1 of 16 measured took 0.70)


def find_plan(graph: tf.Graph, name: str, cluster: Cluster, config: Config) -> Optional[Candidate]:
    """The plan that ``auto_parallel`` would choose for a graph, which is not changed; None if it has no optimizer's update yet.

    Raises:
        ConfigError: the graph is annotated.
        WhaleError: see :func:`whale_tf.parallelize.parallelize`.
    """
    prepared = prepare(graph, cluster, config)
    if prepared is None:
        return None
    captured, config, options = prepared
    if captured.is_annotated:
        raise ConfigError("the script has annotations ({}), which say how it is divided; remove them to search for a division"
                          .format(", ".join(repr(spec.name) for spec in captured.specs)))
    if config.auto.auto_parallel == RHINO:
        check_automatic(captured, config)
    began = time.perf_counter()
    found, _ = best_plan(captured, Request(cluster, opened(config), None, options))
    return replace(found, model=name, search_seconds=time.perf_counter() - began)


@garbage_collection_paused()
def compared(graph: tf.Graph, cluster: Cluster, config: Config) -> Search:
    """The search of ``auto_parallel`` for an un-annotated training graph, which is not changed, with every candidate played."""
    prepared = prepare(graph, cluster, config)
    assert prepared is not None, "the graph trains"
    captured, config, options = prepared
    return Search(captured, Request(cluster, opened(config), None, options), every=True)


def by_annotations(division: Division, request: Request) -> Decision:
    """A plan for the existing TaskGraphs, unless a plan is given."""
    captured, region, plan = division.captured, analysed(division.captured, request.options), request.plan
    if plan is None:
        model = facts(captured, region)._replace(graph=division.local.graph)
        plan = of_local(annotated_plan(model, request.cluster, request.config, request.processes), division)
    return Decision(captured, region, plan, division, request.config, is_measured=request.plan is not None)


class Played(NamedTuple):
    """A division of every op, and its decision.  The decision is None if there is no plan, or if the division was not played
    because its search estimates no better time than that of other plans.  ``objective_s`` is the least sum of seconds that the
    search found."""

    found: Candidate
    objective_s: float
    decision: Optional[Decision] = None


@garbage_collection_paused()
def best_plan(captured: Captured, request: Request) -> Tuple[Candidate, Decision]:
    """The fastest candidate in simulation, among divisions of every op (if rhino is requested) and plans of TaskGraphs.  Data
    parallelism and the undivided graph are candidates too, unless a number of TaskGraphs or a pattern is requested.

    Raises:
        InfeasibleError: no search finds a plan that fits.
    """
    search = Search(captured, request)
    taken = search.joint.best(allowed_of(request.config), [one.found for one in search.divided])
    assert taken.plan is not None
    plan = replace(taken.plan, estimate=taken.estimate)
    if taken.assignment is None:  # homes and recomputation were played, too
        captured, region = with_task_graphs(captured, search.region, taken)
        decision = Decision(captured, region, plan, Division(search.captured, captured), request.config, is_measured=True)
    else:
        found = next(one.decision for one in search.divided if one.decision is not None and one.decision.plan is taken.plan)
        decision = found._replace(plan=plan)
    return replace(taken, plan=plan), decision


@garbage_collection_paused()
def best_of_annotated(captured: Captured, region: Region, request: Request) -> Plan:
    """The plan for the existing TaskGraphs, with the best choice of everything else: schedule, homes of variables, and
    recomputation.

    Raises:
        InfeasibleError: nothing fits.
        WhaleError: no schedule works with the annotations.
    """
    taken = Joint(Annotated(captured, region, request)).best(allowed_of(request.config))
    assert taken.plan is not None
    return replace(taken.plan, estimate=replace(taken.estimate, search="the annotations' schedules and measures"))


class Search:
    """The candidates of :func:`best_plan`.

    Attributes:
        joint: the search for plans of TaskGraphs.
        staged: plans of TaskGraphs, and the reasons why searches found none.
        divided: plans that divide every op, without memory measures, ordered by the objective of their search.

    Args:
        request: with a configuration that is :func:`opened`.
        every: play divisions even if their search estimates that other plans are faster.
    """

    def __init__(self, captured: Captured, request: Request, every: bool = False) -> None:
        self.captured, self.region = captured, analysed(captured, request.options)
        cluster, config = request.cluster, request.config
        model = Automatic(captured, self.region, request)
        self.joint = Joint(model)
        divisions: List[Candidate] = []
        is_free = {config.zero, config.offload, config.recompute} <= {NONE, AUTO} or config.auto.auto_parallel == RHINO
        if may_divide_ops(config) and len(cluster.devices) > 1 and is_free:
            divisions = contenders(captured, divided_dims(self.region.batch), cluster, config)
        self.staged, self.divided = self.joint.played(allowed_of(config)), []  # type: List[Candidate], List[Played]
        for one in ranked(divisions) if divisions else []:  # compiling one takes as long as finding it
            if not one.why_not and (every or may_be_best(one, self.staged + [other.found for other in self.divided])):
                self.divided.append(_divided(one, captured, model.batch, request))
            else:
                self.divided.append(Played(one, one.latency_s))

    @property
    def candidates(self) -> List[Candidate]:
        """Plans of both kinds, and the reasons why there are none."""
        return self.staged + [one.found for one in self.divided]


def may_be_best(division: Candidate, others: Sequence[Candidate]) -> bool:
    """Whether a division that has not been played may turn out best.  Its search adds up times of devices that work in
    parallel."""
    hopeful = replace(division, latency_s=OPTIMISM * division.latency_s)
    return not division.why_not and ranked([hopeful, *others])[0] is hopeful


def settled(config: Config) -> Config:
    """The configuration without choices that do not apply if every op is divided, into one micro-batch and parts of variables."""
    config = config.changed(**{key: NONE for key in ("zero", "offload", "recompute") if config[key] == AUTO})
    return config.changed(pipeline__schedule="backward_first") if config.pipeline.schedule == AUTO else config


def _divided(found: Candidate, captured: Captured, batch: int, request: Request) -> Played:
    """A division of every op with its plan, its time in simulation, and peaks from the parts' own tensors."""
    request = request._replace(config=settled(request.config))
    try:
        division = carry_out(initialised(whole_division(captured, found, request.cluster), request.config.init))
        decision = by_annotations(division, request)
        step, graph = decision.captured, decision.captured.graph
        sources = {graph.tensor(captured.graph.tensor_name(tensor)): dim for tensor, dim in captured.sources.items()}
        region = decision.region._replace(graph=step._replace(sources=sources, stated=captured.stated).sized(batch))
        return Played(as_played(found, step, step.step(region), decision.plan, request.cluster), found.latency_s, decision)
    except (PlanError, UnsupportedOpError) as error:
        return Played(no_candidate(found.search, error), found.latency_s)
