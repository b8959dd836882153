"""Small steps written by hand: a chain of TaskGraphs with its backward pass, and the plans it runs under."""

from __future__ import annotations

from typing import Any, Sequence

from whale_tf.ir.batch_axis import CONCAT, BatchAxis, Reduce, Scale, Slice
from whale_tf.ir.graph import OpGraph, Phase
from whale_tf.ir.layout import partial, sharded
from whale_tf.ir.region import find_region
from whale_tf.ir.training_step import TrainingStep, find_update
from whale_tf.plan import Plan, TaskGraphPlan


def chain(
    stages: int, reduces: Sequence[str] = (), clip: bool = False, pulled: bool = False, decay: bool = False, labels: bool = False,
    plain: bool = False, task_graphs: int = 0, together: bool = False, momentum: bool = False,
) -> TrainingStep:
    """``x -> layer0 -> ... -> loss``, and backwards ``loss_grad -> grad... -> grad0``: one layer in each TaskGraph.

    Every layer has its variable, which is read once a step, and every ``grad`` gives that variable's gradient to an update.

    Args:
        reduces: ops whose first operand is a sum over all clones.
        clip: gradients are scaled by their global norm before the updates.
        pulled: ``x`` comes from an input pipeline.
        decay: the variables' weight decay is added to their gradients, and to the norm.
        labels: the last TaskGraph reads an input of its own.
        task_graphs: how many there are, where it is fewer than stages; the last has all further stages.
        plain: the last TaskGraph's gradients read ``loss`` of the clone as well.
        together: ``loss`` needs all examples.
        momentum: ``w0`` is the value of a variable ``v0``, whose optimizer keeps ``m0``.
    """
    graph, home = OpGraph(), []  # type: Tuple[OpGraph, List[int]]

    def op(name: str, type_: str, inputs: Sequence[str], task_graph: int, phase: Phase, shape: Any = (None, 2)) -> None:
        graph.add(name, type_, [graph.tensor(i) for i in inputs], [(shape, "float32")], phase=phase)
        home.append(min(task_graph, (task_graphs or stages) - 1))

    def variable(name: str) -> None:
        graph.add(name, "VarHandleOp", [], [((), "resource")], phase=Phase.OTHER, attrs={"dtype": "float32", "shape": (2, 2)})
        home.append(-1)

    op("x", "IteratorGetNext" if pulled else "Placeholder", [], -1, Phase.INPUT)
    last = "x"
    for stage in range(stages):
        if momentum:
            variable(f"v{stage}")
            variable(f"m{stage}")
        op(f"w{stage}", "ReadVariableOp", [f"v{stage}"] * momentum, stage, Phase.FORWARD, (2, 2))
        op(f"layer{stage}", "MatMul", [last, f"w{stage}"], stage, Phase.FORWARD)
        last = f"layer{stage}"
    if labels:
        op("y", "Placeholder", [], -1, Phase.INPUT)
    op("loss", "Mean", [last] + ["y"] * labels, stages - 1, Phase.FORWARD, ())
    op("loss_grad", "Neg", ["loss"], stages - 1, Phase.BACKWARD)
    last = "loss_grad"
    if plain:
        op("plain", "Mul", ["loss_grad", "loss"], stages - 1, Phase.BACKWARD)
        last = "plain"
    for stage in reversed(range(stages)):
        before = f"layer{stage - 1}" if stage else "x"
        op(f"grad{stage}", "MatMul", [before, last], stage, Phase.BACKWARD, (2, 2))
        op(f"back{stage}", "MatMul", [last, f"w{stage}"], stage, Phase.BACKWARD)
        last = f"back{stage}"
        if decay:
            op(f"decay{stage}", "Mul", [f"w{stage}", f"w{stage}"], stage, Phase.BACKWARD, (2, 2))
    found = {stage: f"grad{stage}" for stage in range(stages)}
    if clip:
        for stage in range(stages):
            op(f"square{stage}", "L2Loss", [f"grad{stage}"], -1, Phase.APPLY, ())
        terms = [f"square{stage}" for stage in range(stages)] + [f"decay{stage}" for stage in range(stages)] * decay
        op("norm", "AddN", terms, -1, Phase.APPLY, ())
        for stage in range(stages):
            op(f"clipped{stage}", "Mul", [f"grad{stage}", "norm"], -1, Phase.APPLY, (2, 2))
            found[stage] = f"clipped{stage}"
    for stage in range(stages):
        inputs = [found[stage]] + [f"decay{stage}"] * decay
        if momentum:
            graph.add(f"update{stage}", "ResourceApplyMomentum", [graph.tensor(i) for i in [f"v{stage}", f"m{stage}", *inputs]],
                      phase=Phase.APPLY)
            home.append(-1)
        else:
            op(f"update{stage}", "ApplyGradientDescent", inputs, -1, Phase.APPLY, (2, 2))
    sources = {graph.tensor(name): 0 for name in ["x"] + ["y"] * labels}
    batch = BatchAxis(graph, sources, None)
    batch.conversions.update({(graph.op(name).id, 0): (Scale(1), Reduce("sum")) for name in reduces})
    batch.conversions[graph.op("layer0").id, 0] = (Scale(1),)
    batch.layouts.update(dict.fromkeys(sources, sharded(0)))
    for stage in range(stages):
        batch.layouts[graph.tensor(f"layer{stage}")] = sharded(0)
        batch.layouts[graph.tensor(f"back{stage}")] = sharded(0, power=1)
        batch.layouts[graph.tensor(f"grad{stage}")] = partial(1)
    if together:
        batch.whole[graph.op("loss").id] = "it needs all examples at once"
        batch.conversions[graph.op("loss").id, 0] = (Reduce(CONCAT),)
        batch.conversions[graph.op(f"back{stages - 1}").id, 0] = (Slice(0),)
        batch.conversions[graph.op(f"grad{stages - 1}").id, 1] = (Slice(0),)
    else:
        batch.layouts[graph.tensor("loss")] = partial(1)
    region = find_region(graph, home, batch, list(sources))
    gradients = {graph.tensor(f"grad{stage}"): min(stage, (task_graphs or stages) - 1) for stage in range(stages)}
    trained = [graph.op(f"v{stage}" if momentum else f"w{stage}").id for stage in range(stages)]
    homes = dict(zip(trained, gradients.values())) if momentum else {}
    return TrainingStep(region, sources, find_update(region, homes, gradients), tuple(zip(gradients, trained)))


def plan(counts: Sequence[int], micro_batches: int = 1, model_replicas: int = 1, tasks: Any = None, **more: Any) -> Plan:
    """``counts[i]`` replicas of stage i, the devices taken in order; 1F1B with the usual warm-up.

    Args:
        tasks: further fields of stage i's TaskGraphPlan, by i.
        more: further fields of the Plan.
    """
    found, total = [], sum(counts)
    for stage, count in enumerate(counts):
        first = sum(counts[:stage])
        rows = tuple(tuple(range(g * total + first, g * total + first + count)) for g in range(model_replicas))
        given = {"devices": rows, "warmup": min(len(counts) - stage, micro_batches), **(tasks or {}).get(stage, {})}
        found.append(TaskGraphPlan(name=f"stage{stage}", **given))
    return Plan(graph="drawn", num_devices=total * model_replicas, num_model_replicas=model_replicas,
                num_micro_batch=micro_batches, task_graphs=tuple(found), **more)
