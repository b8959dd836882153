"""``auto.auto_parallel: "rhino"``: the whole graph as one ``split`` TaskGraph, which the search divides."""

from __future__ import annotations

from dataclasses import replace
from typing import List, Mapping, Optional

from whale_tf.capture.captured import Captured
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.errors import ConfigError, InfeasibleError, PlanError, UnsupportedOpError
from whale_tf.ir.traits import CONTROL_FLOW
from whale_tf.plan import Plan
from whale_tf.planner.assemble import TaskGraphSpec
from whale_tf.planner.auto.settings import batch_to_plan_for
from whale_tf.planner.candidate import Candidate, no_candidate
from whale_tf.planner.rhino.automatic import NAME, Question, divisions
from whale_tf.transforms.shard.problem import bound_ops, sharding_problem


def is_automatic(plan: Plan) -> bool:
    """Whether the search decided how every op is divided when the plan was made."""
    return plan.estimate.search == NAME and plan.task_graphs[0].name == NAME


def check_automatic(captured: Captured, config: Config) -> None:
    """Refuses what cannot be combined with the search.

    Raises:
        ConfigError: annotations, micro-batches, or one pattern for all ops.
        UnsupportedOpError: a call of an unknown function.
    """
    names = [spec.name for spec in captured.specs] if captured.is_annotated else []
    if names:
        raise ConfigError("auto.auto_parallel is 'rhino', which divides the whole graph, but the script has annotations ({}); "
                          "remove them, or leave out auto_parallel; patterns.force pins single ops".format(
                              ", ".join(map(repr, names))))
    if config.pipeline.num_stages is not None:
        raise ConfigError(f"pipeline.num_stages is {config.pipeline.num_stages} under auto_parallel 'rhino', which chooses this "
                          "itself; leave it out")
    if (config.pipeline.num_micro_batch or 1) > 1:
        raise ConfigError(f"pipeline.num_micro_batch is {config.pipeline.num_micro_batch} under auto_parallel 'rhino', which "
                          "chooses this itself; leave it out")
    if isinstance(config.patterns.force, str):
        raise ConfigError(f"patterns.force is {config.patterns.force!r} under auto_parallel 'rhino', expected {{op: pattern}}")
    inside = bound_ops(captured)
    for index in sorted(captured.scope):
        op = captured.graph.ops[index]
        if op.type in CONTROL_FLOW and not op.body and index not in inside:
            raise UnsupportedOpError(f"op {op.name!r} ({op.type}) calls a function whose ops are not known, and auto_parallel "
                                     "'rhino' cannot divide it; use wh.replicate")


def as_one_split(captured: Captured, count: Optional[int] = None) -> Captured:
    """The graph as one TaskGraph, divided over ``count`` devices (None: all)."""
    return captured._replace(specs=(TaskGraphSpec(NAME, "split", count),))


def question_of(captured: Captured, examples: Mapping[int, int], cluster: Cluster, config: Config) -> Question:
    """What the search has to know about a captured graph.

    Args:
        examples: tensor -> its dimension that counts examples.
    """
    pins = config.patterns.force
    assert not isinstance(pins, str), "check_automatic refuses one pattern for all ops"
    batch = batch_to_plan_for(config, cluster, captured.examples)
    divisible = frozenset(sharding_problem(captured, {}, {0: (1,) * len(cluster)}).variables)
    gradients = frozenset(target.tensors[0] for target in captured.phases.targets if not target.is_sparse)
    known = captured.sized(batch)
    inputs = {captured.graph.tensor_name(tensor): dim for tensor, dim in captured.sources.items()}
    return Question(captured.graph, known, batch, inputs, examples, divisible, gradients, pins)


def planned(captured: Captured, examples: Mapping[int, int], cluster: Cluster, config: Config, plan: Plan) -> Candidate:
    """How a plan that the search made divides the graph.

    Raises:
        PlanError: the plan has slices, but the search divides evenly.
    """
    shares = plan.task_graphs[0].slices
    if shares is not None:
        raise PlanError(f"TaskGraph {plan.task_graphs[0].name!r} has slices {list(shares)}, but a plan of auto_parallel 'rhino' "
                        "divides evenly; set them to null")
    question = question_of(captured, examples, cluster, config)._replace(pins=dict(plan.shards))
    count = plan.task_graphs[0].device_count
    mesh = (count,) if plan.num_model_replicas == 1 else (plan.num_model_replicas, count)
    (found,) = divisions(question, cluster, [mesh])
    if found.assignment is None:
        raise InfeasibleError(found.why_not)
    return replace(found, plan=plan)


def contenders(captured: Captured, examples: Mapping[int, int], cluster: Cluster, config: Config) -> List[Candidate]:
    """The candidates that divide every op, some for each mesh; if this is impossible, the reason.

    Args:
        examples: see :func:`question_of`.

    Raises:
        ConfigError, UnsupportedOpError: the user asked for this search, but the model or the configuration does not allow it.
    """
    try:
        check_automatic(captured, config)
        return divisions(question_of(captured, examples, cluster, config), cluster, with_near=True)
    except (ConfigError, UnsupportedOpError) as error:
        if config.auto.auto_parallel == NAME:
            raise
        return [no_candidate(NAME, error)]
