"""What the products of a step take with other numbers of micro-batches, measured on the spot for ``wh.doctor``.

No law of sizes tells it: kernels rearrange weights before they multiply, and choose other code for few rows, so that a product of
32 rows may take longer than one of 64.
"""
from __future__ import annotations

import functools
import time
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from whale_tf._tf_compat import tf, v1
from whale_tf.diagnosis.record import OpTime
from whale_tf.graph_editor.definitions import Definitions
from whale_tf.ir.graph import Op, Shape
from whale_tf.ir.region import Region
from whale_tf.ir.traits import traits
from whale_tf.plan import Plan

BUDGET_S = 3.0  # in which the products that take longest are measured
RUN_S, RUN_BYTES = 1.0, 2.0 ** 28  # the most that a run may take, of time and for operands
REPEAT = 7  # runs, if time allows; the shortest one counts: what else the machine does only takes longer
MORE = 4  # products in a longer run; what else a run takes cancels out
LEAST = 0.1  # of a longer run, which these must take
Times = Tuple[Tuple[str, int, float], ...]  # (op, number of micro-batches, seconds)


class _Operand(NamedTuple):
    """``values``: of a vector that says the size of the result; otherwise it does not matter what is multiplied."""

    dtype: str
    shape: Tuple[int, ...]
    values: Tuple[int, ...] = ()

    def stage(self) -> Any:
        dtype = tf.as_dtype(self.dtype)
        if self.values:
            return tf.constant(self.values, dtype)
        return tf.fill(tf.constant(self.shape, tf.int32), tf.constant(1, dtype))


class _Product(NamedTuple):
    """``definition``: without name and operands, as bytes."""

    definition: bytes
    operands: Tuple[_Operand, ...]

    @property
    def size_bytes(self) -> float:
        return float(sum(tf.as_dtype(operand.dtype).size * np.prod(operand.shape, dtype=float) for operand in self.operands))

    def runs(self) -> Tuple[Any, Any]:
        """The op that ends a run of one, and of :data:`MORE` behind it.  Each has operands of its own, which are made in both
        runs: those of a step are not in the cache either."""
        every = [[operand.stage() for operand in self.operands] for _ in range(1 + MORE)]
        with tf.control_dependencies([operand for one in every for operand in one]):
            every = [[tf.identity(operand) for operand in one] for one in every]
        graph_def, given = v1.GraphDef(), {}
        for number, operands in enumerate(every):
            node = v1.NodeDef.FromString(self.definition)
            node.name = f"product{number}"
            for place, operand in enumerate(operands):
                name = f"operand{number}_{place}"
                graph_def.node.add(op="Placeholder", name=name).attr["dtype"].type = operand.dtype.as_datatype_enum
                node.input.append(name)
                given[name] = operand
            node.input.extend([f"^product{number - 1}"] * (number > 0))
            graph_def.node.append(node)
        first, last = tf.graph_util.import_graph_def(graph_def, given, ["product0", f"product{MORE}"])
        return first, last


def product_times(definitions: Definitions, region: Region, plan: Plan, model_replicas: int, ops: Iterable[OpTime],
                  device: str) -> Times:
    """Seconds of the products that clones compute, for each number of micro-batches that divides the plan's; not for those with
    which a product is too large to be measured beside the training step.

    Args:
        region: its graph has static shapes, those of a process' mini-batch.
        model_replicas: how many of them share this mini-batch.
        ops: the step's ops, as they were measured; those that take longest come first.
        device: where to measure.
    """
    seconds, each_s, now = {}, {}, plan.num_micro_batch  # type: Dict[str, float], Dict[str, float], int
    for one in ops:
        seconds[one.name] = seconds.get(one.name, 0.0) + one.seconds
        each_s[one.name] = max(each_s.get(one.name, 0.0), one.seconds / max(1.0, one.runs))
    alike: Dict[Tuple[Tuple[int, _Product], ...], List[str]] = {}
    for op in (region.graph.ops[number] for number in region.batch_level):
        if traits(op.type).is_contraction and op.name in seconds:
            parts = model_replicas * plan.task_graphs[max(0, region.task_graph[op.id])].replica_count
            sizes = tuple(_sizes(definitions, region, op, parts, now, each_s[op.name]))
            if sizes and sizes[-1][0] == now:
                alike.setdefault(sizes, []).append(op.name)
    until, found = time.perf_counter() + BUDGET_S, []  # type: float, List[Tuple[str, int, float]]
    for sizes, names in sorted(alike.items(), key=lambda item: -sum(seconds[name] for name in item[1])):
        if time.perf_counter() > until:
            break
        times = _measured([product for _, product in sizes], device)
        found += [(name, count, took) for name in names for (count, _), took in zip(sizes, times)]
    return tuple(found)


def _sizes(definitions: Definitions, region: Region, op: Op, parts: int, now: int,
           now_s: float) -> Iterator[Tuple[int, _Product]]:
    """The clone's product for each number of micro-batches with which it can be measured.

    Args:
        parts: of the mini-batch, in each micro-batch.
        now, now_s: the plan's number, and what the product takes with it.
    """
    for count in (count for count in range(1, now + 1) if now % count == 0):
        product = _product(definitions, region, op, count * parts)
        if product is not None and (1 + MORE) * max(now_s * now / count / RUN_S, product.size_bytes / RUN_BYTES) < 1.0:
            yield count, product


def _product(definitions: Definitions, region: Region, op: Op, parts: int) -> Optional[_Product]:
    """A clone's product if the mini-batch has so many parts; None: its sizes are not known."""
    graph, result = region.graph, _part(region, op.outputs[0], parts)
    operands = []
    for tensor in op.inputs:
        shape, dtype = _part(region, tensor, parts), graph.tensors[tensor].dtype
        if shape is None or None in shape or result is None or None in result:
            return None
        if not dtype.startswith("int"):
            operands.append(_Operand(dtype, shape))  # type: ignore[arg-type]
        elif shape == (len(result),):
            operands.append(_Operand(dtype, shape, result))  # type: ignore[arg-type]
        else:
            return None
    node = v1.NodeDef(op=op.type)
    for name, value in definitions.node(op.name).attr.items():
        if not name.startswith("_"):
            node.attr[name].CopyFrom(value)
    return _Product(node.SerializeToString(deterministic=True), tuple(operands))


def _part(region: Region, tensor: int, parts: int) -> Shape:
    """The shape of a clone's value of a tensor."""
    shape, layout = region.graph.tensors[tensor].shape, region.batch.layout(tensor)
    if shape is None or not layout.is_sharded or shape[layout.dim] is None:
        return shape
    return tuple(max(1, (size or 0) // parts) if dim == layout.dim else size for dim, size in enumerate(shape))


def _measured(products: Sequence[_Product], device: str) -> List[float]:
    """Seconds of each product; none, if one is too short beside what else a run takes, or the training step has left too little
    memory."""
    config = v1.ConfigProto(allow_soft_placement=True)
    config.graph_options.rewrite_options.disable_meta_optimizer = True  # products of constants stay
    config.graph_options.optimizer_options.opt_level = v1.OptimizerOptions.L0
    with tf.Graph().as_default() as graph, tf.device(device):
        runs = [run for product in products for run in product.runs()]
        with v1.Session(graph=graph, config=config) as session:
            until, turns = time.perf_counter() + BUDGET_S, []  # type: float, List[List[float]]
            try:
                while len(turns) < 2 or (len(turns) <= REPEAT and time.perf_counter() < until):
                    turns.append([_seconds(functools.partial(session.run, run)) for run in runs])
            except tf.errors.ResourceExhaustedError:
                return []
    took = np.min(turns[1:], axis=0)
    more = took[1::2] - took[::2]
    return list(map(float, more / MORE)) if np.all(more > LEAST * took[1::2]) else []


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
