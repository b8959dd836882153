"""What is known about a divided step by names of the local script, and the items that are compared."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

import numpy as np

from whale_tf._tf_compat import tf, v1
from whale_tf.emit.context import Context
from whale_tf.ir.graph import Phase
from whale_tf.ir.layout import Layout
from whale_tf.parallelize import Parallelized
from whale_tf.runtime.verifying.compare import GRADIENT, LOSS, TENSOR, VALUE, Comparison, Item, compare, key
from whale_tf.runtime.verifying.cut import Cut, View
from whale_tf.runtime.verifying.local import LocalStep, Outcome, Script, Values
from whale_tf.transforms.shard import Pieces

LOW = ("float16", "bfloat16")


class Step(NamedTuple):
    """A divided step that is about to run for the first time.

    Attributes:
        graph: the rewritten graph.
        runs: names of the ops that the run or the function asks for.
        given: values of inputs, by their names in the local script.
    """

    graph: tf.Graph
    done: Parallelized
    runs: Tuple[str, ...]
    given: Values


# what is shown instead of being run: what makes the comparison with the local step, what is compared, and the divided step
Show = Callable[[Callable[[], Comparison], str, Step], Any]


def context_of(done: Parallelized) -> Context:
    assert done.emitted is not None
    return done.emitted.context


def view_of(done: Parallelized) -> View:
    """See :class:`whale_tf.runtime.verifying.cut.View`."""
    context = context_of(done)
    region, graph = context.region, context.graph

    def number(name: str) -> Optional[int]:
        return graph.tensor(name) if name.partition(":")[0] in graph and name not in done.replaced else None

    def layout(name: str) -> Optional[Layout]:
        tensor = number(name)
        return None if tensor is None or tensor in region.batch.unknown else region.batch.layout(tensor)

    def can_take(name: str) -> bool:
        if name in done.replaced:
            new = done.replaced[name]
            return all(map(can_take, new.names if isinstance(new, Pieces) else [new]))
        if name.partition(":")[0] not in graph:
            return False
        tensor = graph.tensor(name)
        if graph.tensors[tensor].op not in region.batch_level:
            return True
        return tensor not in region.batch.unknown and context.is_returned(tensor)

    def runs(name: str) -> bool:
        return not (name in done.replaced or name + ":0" in done.replaced)

    inexact = {graph.ops[item.op].name: item.reason for item in region.batch.inexact
               if len(context.clones(context.task_graph_of(graph.ops[item.op]))) > 1}
    return View(layout, can_take, runs, inexact)


def how_divided(done: Parallelized, name: str) -> str:
    """How the divided step has a tensor of the local script, in words."""
    context, op_name = context_of(done), name.partition(":")[0]
    if name in done.replaced or op_name in done.replaced:
        return "divided by wh.split, zero or amp"
    if op_name not in context.graph:
        return "computed once"
    op, region = context.graph.op(op_name), context.region
    if op.id in region.sections:
        return f"in a section that needs all examples: {region.batch.whole.get(op.id, 'it follows from one')}"
    if op.id not in region.batch_level:
        return "once a step on each device" if region.contains(op) else "computed once, from merged values"
    tensor = context.graph.tensor(name)
    return "of no known layout" if tensor in region.batch.unknown else str(region.batch.layout(tensor))


def task_graph_of(done: Parallelized, name: str) -> str:
    context, op_name = context_of(done), name.partition(":")[0]
    if op_name not in context.graph:
        return ""
    op = context.graph.op(op_name)
    index = context.variables.get(op.id, context.region.task_graph[op.id])
    return done.plan.task_graphs[index].name if index >= 0 else ""


def items_of(done: Parallelized, script: Script, cut: Cut, found: Values, before: Values, after: Values, local: Outcome,
             wide: bool, uses_tf32: bool) -> List[Item]:
    """Everything that is compared.

    Args:
        found: the divided step's tensors.
        before, after: values of variables before and after the divided step.
        wide: whether both were computed in float64 where they have float32.
    """
    ops, items = script.ops, []  # type: ignore[var-annotated]
    gradients = {tensor for target in script.phases.targets for tensor in target.tensors}
    is_scaled = script.is_scaled or done.plan.loss_scale is not None
    low = done.plan.precision if done.plan.precision in LOW else ""
    sent = sent_as_float16(done)

    def dtype(kind: str, is_update: bool = False) -> str:
        if wide and kind == "float32":
            kind = "float64"
        if low and not is_update and kind.startswith("float"):
            return low
        return "tf32" if uses_tf32 and kind == "float32" and not is_update else kind

    shown = dict.fromkeys((*cut.results, *cut.samples, *cut.returned))
    losses = {*cut.results, *cut.returned}
    for tensor in shown:
        name = ops.tensor_name(tensor)
        if name not in found or name not in local.tensors:
            continue
        is_backward = ops.producer(tensor).phase is Phase.BACKWARD
        if is_backward and tensor not in gradients and done.plan.loss_scale is not None:
            continue  # multiplied by the scale in the divided step
        what = GRADIENT if tensor in gradients else LOSS if tensor in losses else TENSOR
        kind = cut.coarse.get(tensor, "") if _is_float(local.tensors[name]) else ""
        kind = "float16" if kind and name in sent else kind
        items.append(Item(name, what, ops.tensors[tensor].op, task_graph_of(done, name), how_divided(done, name),
                          dtype(kind, tensor in cut.returned and not cut.is_joined), np.asarray(found[name]),
                          np.asarray(local.tensors[name]), is_backward, is_scaled=is_backward and is_scaled))
    last = len(ops.ops)
    if done.plan.loss_scale is not None and any(item.overflows for item in items):
        return items  # the local step, which has no scale, makes the update that the divided one skips
    for name, value in local.variables.items():
        variable = script.phases.variables[ops.op(name).id]
        kind = variable.dtype if _is_float(value) else ""
        kind = "float16" if kind and sent and cut.is_joined else kind
        order = max((write for write in variable.writes if write in cut.writes), default=last)
        items.append(Item(name, VALUE, order, task_graph_of(done, name), how_divided(done, name),
                          dtype(kind, not cut.is_joined), np.asarray(after[name]), np.asarray(value),
                          before=None if cut.is_joined else np.asarray(before[name])))
    return items


def comparison(script: Script, cut: Cut, items: List[Item], local: LocalStep, before: Values, given: Values) -> Comparison:
    """The comparison of items.  If something differs, the local step runs again, with its variables moved.

    Args:
        before, given: values with which the local step has run.
    """
    def moved() -> Values:
        again = local.outcome(before, given, nudge=True)
        both = {**again.tensors, **again.variables}
        return {key(item): both[item.name] for item in items if item.name in both}

    return compare(items, moved), left_out(script, cut, items)


def sent_as_float16(done: Parallelized) -> Set[str]:
    """Names of the gradients that processes send to each other as float16."""
    emitted = done.emitted
    assert emitted is not None
    graph = emitted.context.graph
    if emitted.communicator.processes == 1:
        return set()
    return {graph.tensor_name(tensor) for tensor in emitted.recipes.lowering.compressed}


def left_out(script: Script, cut: Cut, items: List[Item]) -> Dict[str, str]:
    """What was not compared -> why."""
    ops = script.ops
    names = {ops.ops[variable].name: why for variable, why in cut.written.items() if why}
    names.update((ops.tensor_name(tensor), "it may be read before or after an update, as it happens") for tensor in cut.racing)
    shown = {item.name for item in items}
    for use in cut.leaving:
        name = ops.tensor_name(use.tensor)
        if name not in shown and use.tensor in cut.lost:
            names[name] = cut.lost[use.tensor]
    return names


def _is_float(value: np.ndarray) -> bool:
    return not (np.asarray(value).dtype == np.bool_ or np.issubdtype(np.asarray(value).dtype, np.integer))


def local_config(given: Optional[v1.ConfigProto], on_cpu: bool) -> v1.ConfigProto:
    """The ConfigProto of a Session with one device, without TensorFlow's graph optimizer."""
    config = v1.ConfigProto(allow_soft_placement=True)
    if given is not None:
        config.gpu_options.CopyFrom(given.gpu_options)
        config.intra_op_parallelism_threads = given.intra_op_parallelism_threads
        config.inter_op_parallelism_threads = given.inter_op_parallelism_threads
    config.device_count["CPU"] = 1
    if on_cpu:
        config.device_count["GPU"] = 0
    options = config.graph_options
    options.rewrite_options.disable_meta_optimizer = True
    options.optimizer_options.opt_level = -1  # L0
    return config


def runs_on_gpu(done: Parallelized) -> bool:
    return any("GPU" in device for device in context_of(done).devices)


def uses_tf32(done: Parallelized) -> bool:
    """Whether GPUs multiply float32 matrices in a type of fewer digits."""
    asked = getattr(tf.config.experimental, "tensor_float_32_execution_enabled", None)
    return runs_on_gpu(done) and asked is not None and bool(asked())
