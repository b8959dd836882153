"""Small steps written by hand: a chain of TaskGraphs with its backward pass, and the plans it runs under."""

from __future__ import annotations

from typing import Any, Sequence

from whale_tf.ir.batch_axis import BatchAxis, Reduce
from whale_tf.ir.graph import OpGraph, Phase
from whale_tf.ir.region import Region, find_region
from whale_tf.plan import Plan, TaskGraphPlan


def chain(stages: int, reduces: Sequence[str] = ()) -> Region:
    """``x -> layer0 -> ... -> loss``, and backwards ``loss_grad -> grad... -> grad0``: one layer in each TaskGraph.

    Every layer has its variable, which is read once a step, and every ``grad`` gives that variable's gradient to an update.

    Args:
        reduces: ops whose first operand is a sum over all clones.
    """
    graph, home = OpGraph(), []  # type: Tuple[OpGraph, List[int]]

    def op(name: str, type_: str, inputs: Sequence[str], task_graph: int, phase: Phase, shape: Any = (None, 2)) -> None:
        graph.add(name, type_, [graph.tensor(i) for i in inputs], [(shape, "float32")], phase=phase)
        home.append(task_graph)

    op("x", "Placeholder", [], -1, Phase.INPUT)
    last = "x"
    for stage in range(stages):
        op(f"w{stage}", "ReadVariableOp", [], stage, Phase.FORWARD, (2, 2))
        op(f"layer{stage}", "MatMul", [last, f"w{stage}"], stage, Phase.FORWARD)
        last = f"layer{stage}"
    op("loss", "Mean", [last], stages - 1, Phase.FORWARD, ())
    op("loss_grad", "Tile", ["loss"], stages - 1, Phase.BACKWARD)
    last = "loss_grad"
    for stage in reversed(range(stages)):
        before = f"layer{stage - 1}" if stage else "x"
        op(f"grad{stage}", "MatMul", [before, last], stage, Phase.BACKWARD, (2, 2))
        op(f"back{stage}", "MatMul", [last, f"w{stage}"], stage, Phase.BACKWARD)
        last = f"back{stage}"
    for stage in range(stages):
        op(f"update{stage}", "ApplyGradientDescent", [f"grad{stage}"], -1, Phase.APPLY, (2, 2))
    source = graph.tensor("x")
    batch = BatchAxis(graph, {source: 0}, None)
    batch.conversions.update({(graph.op(name).id, 0): (Reduce("sum"),) for name in reduces})
    return find_region(graph, home, batch, [source])


def plan(counts: Sequence[int], micro_batches: int = 1, model_replicas: int = 1, **more: Any) -> Plan:
    """``counts[i]`` replicas of stage i, the devices taken in order; 1F1B with the usual warm-up."""
    tasks, total = [], sum(counts)
    for stage, count in enumerate(counts):
        first = sum(counts[:stage])
        rows = tuple(tuple(range(g * total + first, g * total + first + count)) for g in range(model_replicas))
        tasks.append(TaskGraphPlan(name=f"stage{stage}", devices=rows, warmup=min(len(counts) - stage, micro_batches)))
    return Plan(graph="drawn", num_devices=total * model_replicas, num_model_replicas=model_replicas,
                num_micro_batch=micro_batches, task_graphs=tuple(tasks), **more)
