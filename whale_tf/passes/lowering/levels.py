"""How a mini-batch is divided, level by level: over model replicas if they share it, micro-batches, and replicas."""

from __future__ import annotations

import itertools
from typing import List, Mapping, Optional, Sequence, Set

from whale_tf.errors import PlanError
from whale_tf.ir.graph import OpGraph
from whale_tf.ir.layout import Layout, rows_each
from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes.communicate import MICRO, takes_own
from whale_tf.plan import Plan


def running(slices: Optional[Sequence[int]], count: int) -> List[int]:
    """Running totals ``c_0 .. c_n`` of one level."""
    return [0] + list(itertools.accumulate(slices or [1] * count))


def levels(plan: Plan, task_graph: int, own: bool) -> List[List[int]]:
    """Running totals of each level at which a mini-batch is divided for a TaskGraph; ``own``: model replicas, or micro-batches,
    take their own mini-batches."""
    task = plan.task_graphs[task_graph]
    result = [] if own else [running(None, plan.num_model_replicas)]
    if not own or plan.nested_batch != MICRO:
        result.append(running(plan.micro_batch_slices, plan.num_micro_batch))
    return result + [running(task.batch_slices, task.replica_count)]


def divide(batch: int, totals: Sequence[Sequence[int]]) -> List[int]:
    """Sizes of all parts of ``batch`` examples; the last level varies fastest."""
    parts = [batch]
    for level in totals:
        parts = [b * high // level[-1] - b * low // level[-1] for b in parts for low, high in zip(level, level[1:])]
    return parts


def enough(totals: Sequence[Sequence[int]]) -> int:
    """With so many examples, or more, every part of :func:`divide` gets one."""
    found = 1
    for level in totals:
        found *= -(-level[-1] // min(high - low for low, high in zip(level, level[1:])))
    return found


def agreed_batch(graph: OpGraph, sources: Mapping[int, int], layouts: Mapping[int, Layout]) -> Optional[int]:
    """Examples of a mini-batch; None: no input says how many.

    Raises:
        PlanError: inputs disagree.
    """
    known: Set[int] = set()
    for tensor, dim in sources.items():
        shape = graph.tensors[tensor].shape
        size = None if shape is None else shape[dim]
        if size is not None:
            known.add(size // sum(map(rows_each, layouts[tensor].blocks or (1,))))
    if len(known) > 1:
        raise PlanError("inputs have different batch sizes: {}".format(
            ", ".join(f"{graph.tensor_name(t)} {graph.tensors[t].shape}" for t in sources)))
    return next(iter(known), None)


def batch_of_step(step: TrainingStep) -> Optional[int]:
    """Examples of a step's mini-batch if its graph says how many, and all inputs have the same ones."""
    layouts = {tensor: step.region.batch.layout(tensor) for tensor in step.sources}
    return agreed_batch(step.graph, step.sources, layouts) if len(step.region.batch.batches) == 1 else None


def is_even(step: TrainingStep, plan: Plan) -> bool:
    """Whether all clones of every TaskGraph work on the same number of examples, which is known now."""
    batch = batch_of_step(step)
    return batch is not None and all(
        len(set(divide(batch, levels(plan, index, takes_own(step, plan))))) == 1 for index in range(len(plan.task_graphs)))
