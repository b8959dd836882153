"""What decisions are made from: the analysed step, its trained variables, and statistics of its TaskGraphs."""

from __future__ import annotations

from typing import Dict, List, Set, Tuple

from whale_tf.capture.captured import Captured
from whale_tf.capture.step import part_of
from whale_tf.capture.variables import is_apart
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.errors import PlanError
from whale_tf.ir.batch_axis import Options
from whale_tf.ir.graph import Phase
from whale_tf.ir.region import Region, find_region
from whale_tf.ir.writes import is_write
from whale_tf.passes.border import Border
from whale_tf.plan import Plan
from whale_tf.planner.assemble import ModelFacts, StageStatistics
from whale_tf.planner.auto.settings import batch_to_plan_for
from whale_tf.planner.homes import TrainedVariable
from whale_tf.planner.idle import Parameter
from whale_tf.planner.statistics import crossings, stage_statistics

TYPICAL_BATCH = 64  # examples, if the size of mini-batches is open, to compare tensors that grow with it or with its square


def analysed(captured: Captured, options: Options) -> Region:
    """The region.  Sections begin and end where the fewest bytes cross."""
    region = _region(captured, options)
    if not region.sections:
        return region
    try:
        # not captured.examples: all processes must decide alike, whatever the first mini-batch of each
        sizes = captured.sized(captured.static_examples or TYPICAL_BATCH)
    except PlanError:  # the graph does not allow that number of examples
        return region
    border = Border(region, sizes)
    for joining in border.joining():
        other = _region(captured, options._replace(together=joining))
        if Border(other, sizes).improves(border):
            for op, reason in region.batch.whole.items():  # what needs all examples, also if its operands have been moved to it
                if op in other.sections:
                    other.batch.whole.setdefault(op, reason)
            region = other
            break
    return region


def sized_region(captured: Captured, region: Region, plan: Plan, cluster: Cluster, config: Config) -> Tuple[Region, int]:
    """The region with the static shapes of a mini-batch, and the number of its examples."""
    batch = batch_to_plan_for(config, cluster, captured.static_examples)
    return region._replace(graph=captured.sized(batch)), batch


def _region(captured: Captured, options: Options) -> Region:
    options = options._replace(writers=frozenset(captured.phases.writes_inside))
    region = find_region(captured.graph, captured.task_graph, captured.batch_axis(options), list(captured.sources))
    return region._replace(in_function=captured.recording is not None and captured.recording.returned is not None)


def trained_variables(captured: Captured) -> List[TrainedVariable]:
    """The trained variables of TaskGraphs, each once, and all that are told where to live, also those of optimizers."""
    graph, variables, state = captured.graph, captured.phases.variables, captured.state_bytes()
    trained = [TrainedVariable(graph.ops[number].name, task_graph, graph.ops[number].shard, variables[number].bytes,
                               state.get(number, 0), part_of(graph.ops[number].name))
               for number in dict.fromkeys(variable for _, variable in captured.gradients)
               for task_graph in [captured.variable_task_graph.get(number)]
               if task_graph is not None and graph.ops[number].replica is None]
    return trained + [TrainedVariable(op.name, op.task_graph, op.shard, variables[op.id].bytes, 0, part_of(op.name), op.replica)
                      for op in graph.ops if op.replica is not None and op.id in variables]


def parameters(captured: Captured) -> List[Parameter]:
    """The trained variables of TaskGraphs, each once, with their gradients."""
    gradients: Dict[int, Tuple[int, ...]] = {}
    for tensor, variable in captured.gradients:
        gradients[variable] = (*gradients.get(variable, ()), tensor)
    sizes, ops, of = captured.phases.variables, captured.graph.ops, captured.variable_task_graph
    return [Parameter(number, of[number], sizes[number].bytes, part_of(ops[number].name), found)
            for number, found in gradients.items() if number in of]


def facts(captured: Captured, region: Region) -> ModelFacts:
    return ModelFacts(captured.graph, captured.specs, _stages(captured, region), crossings(region), _inputs(captured))


def _stages(captured: Captured, region: Region) -> List[StageStatistics]:
    calls = {
        captured.graph.tensor(name): call.index
        for call in captured.gradient_calls
        for name in call.grads
        if isinstance(name, str) and name.partition(":")[0] in captured.graph
    }
    variables, state = captured.phases.variables, captured.state_bytes()
    sizes = {variable: (variables[variable].bytes, state.get(variable, 0)) for _, variable in captured.gradients}
    return stage_statistics(region, captured.gradients, captured.variable_task_graph, len(captured.specs), calls, sizes,
                            _written_apart(captured))


def _written_apart(captured: Captured) -> Set[int]:
    """Variables that conditions, loops and calls write, or read in an update in which they write others; and those that are
    written in branches of version 1, unless the update is: it runs for each copy of a variable, branches and all."""
    graph, found = captured.graph, set()
    for variable in captured.phases.variables:
        updates = {user for user, _ in graph.consumers(graph.ops[variable.op].outputs[0]) if graph.ops[user].phase is Phase.APPLY}
        apart = (graph.ops[write] for write in variable.writes if is_apart(graph, variable, write))
        if any(op.body or op.phase is not Phase.APPLY for op in apart) or any(
                graph.ops[user].body and is_write(graph.ops[user]) for user in updates):
            found.add(variable.op)
    return found


def _inputs(captured: Captured) -> Dict[str, int]:
    return {captured.graph.tensor_name(tensor): dim for tensor, dim in captured.sources.items()}
