"""The main path: a tf.Graph goes in, and the same graph comes out and trains on many devices.

    capture     tf.Graph -> op graph, phases, TaskGraphs                     capture/
    decide      a plan, and the ops that it runs                             decide/
    compile     ops and plan -> bodies and calls                             passes/
    emit        bodies and calls -> edits of the graph                       emit/

Nothing before the last step edits the graph, so that an error leaves it as it was.
"""

from __future__ import annotations

import warnings
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence, Tuple, Type

from whale_tf._tf_compat import tf
from whale_tf.capture.captured import Captured
from whale_tf.cluster import ONE_PROCESS, Cluster, Processes, device_names, devices_of_processes, host_name
from whale_tf.communicators import Keys
from whale_tf.config import Config
from whale_tf.decide.decide import decide_graph
from whale_tf.decide.decision import Decision
from whale_tf.decide.facts import parameters
from whale_tf.emit.draws import LOCAL
from whale_tf.emit.early import Early, check_renewable
from whale_tf.emit.emit import Emitted, emit
from whale_tf.emit.steps import own_step
from whale_tf.ir.region import Region
from whale_tf.passes import compile_program, parted
from whale_tf.passes.lowering import Lowering
from whale_tf.plan import Plan
from whale_tf.planner.idle import tell_idle
from whale_tf.planner.inexact import tell_inexact
from whale_tf.planner.sharding import Assignment
from whale_tf.transforms.shard.divided_variables import DividedVariables


class Parallelized(NamedTuple):
    """A graph after the main path: what was captured, analysed, decided, and done."""

    captured: Captured
    region: Region
    plan: Plan
    emitted: Optional[Emitted] = None  # None: the plan is the local script itself
    replaced: Mapping[str, Any] = {}  # tensors and ops of the local script -> what is computed instead
    assignment: Optional[Assignment] = None  # how ``split`` TaskGraphs are divided
    variables: Optional[DividedVariables] = None
    too_large: Mapping[str, str] = {}  # see :class:`Division`
    renews: bool = False  # sessions that ran before begin anew
    decision: Optional[Decision] = None  # what was decided, with its recording, if the caller keeps it


def parallelize(graph: tf.Graph, cluster: Cluster, config: Config, plan: Optional[Plan] = None,
                processes: Processes = ONE_PROCESS, keys: Optional[Keys] = None, early: Sequence[Early] = (),
                warn: Callable[[str, Type[Warning]], None] = warnings.warn,
                keeps_decision: bool = False) -> Optional[Parallelized]:
    """Rewrite a graph in place.

    Args:
        plan: run this plan; None: the one the annotations ask for.
        processes: all processes, and which of them this is; the plan is for all, and this process runs its part.
        keys: numbers of this process's collectives, if there are several processes.
        early: Sessions into which the graph has already been extended.
        warn: gives the warnings of inexact ops and idle devices.
        keeps_decision: return the decision, too; its recording takes the memory of another graph.

    Returns:
        None if the graph has no optimizer's update yet, and ``plan`` was not made for it as a model without one.

    Raises:
        WhaleError: the graph cannot be parallelized as asked; it is then unchanged.
    """
    of_processes = devices_of_processes(cluster, processes) if processes.count > 1 else ()
    decision = decide_graph(graph, cluster, config, plan, of_processes)
    if decision is None:
        return None
    captured, region, plan, division = decision.captured, decision.region, decision.plan, decision.division
    done = Parallelized(captured._replace(recording=None), region, plan, assignment=division.assignment,
                        too_large=division.too_large, decision=decision if keeps_decision else None)
    if plan.is_local:
        return done
    if processes.is_chief:
        tell_inexact(region, plan, config.on_inexact, warn)
        tell_idle(region, plan, parameters(captured), config.on_idle, warn)
    renews = bool(early) and (division.variables is not None or any(task.homes for task in plan.task_graphs))
    if renews:
        drawing = [captured.graph.ops[index].name for index in region.batch.own_seed] if plan.random == LOCAL else []
        check_renewable(early, drawing)
    has_run = bool(early) and not renews
    hosts = range(processes.count) if plan.spans_processes else [processes.rank]
    devices = (*device_names(cluster, processes), *(host_name(cluster, processes, rank) for rank in hosts))
    backend = plan.gradients[0].backend if plan.gradients else "local"
    here = plan.local_part(processes.rank)
    if plan.spans_processes:
        here, processes = own_step(captured, region, plan, processes)
        backend = "collective" if processes.graphs > 1 else backend
    emitted = emit(graph, captured, region, here, backend, devices, processes, keys, has_run)
    assert captured.recording is not None
    return done._replace(emitted=emitted, replaced=captured.recording.replaced, variables=division.variables, renews=renews)


def find_lowered(graph: tf.Graph, cluster: Cluster, config: Config, plan: Optional[Plan] = None,
                 processes: Sequence[Tuple[int, ...]] = ()) -> Optional[Lowering]:
    """The Program that :func:`parallelize` would make of a graph, which stays as it is, with its recipes lowered; None: it has no
    optimizer's update yet.  If several processes train in parallel: the step of the first one.

    Args:
        processes: numbers of each process's devices, if there are several.

    Raises:
        WhaleError: see :func:`parallelize`.
    """
    decision = decide_graph(graph, cluster, config, plan, processes)
    if decision is None:
        return None
    plan = decision.plan
    graphs = 1 if plan.spans_processes else max(1, len(plan.processes))
    here = plan.local_part(0)
    step = parted(decision.captured.step(decision.region, graphs), here)
    return Lowering(step, here, compile_program(step, here))
