"""Small steps and plans whose Programs are written down in ``golden/``."""

from __future__ import annotations

from typing import Dict, Tuple

from tests.passes.drawings import chain, plan
from whale_tf.ir.training_step import TrainingStep
from whale_tf.plan import GradientPlan, Plan
from whale_tf.schedule import SCHEDULES


def _bucket(*buckets: Tuple[str, ...]) -> Tuple[GradientPlan, ...]:
    return (GradientPlan(task_graph=0, backend="local", buckets=buckets),)


def folded(schedule: str, devices: int, micro_batches: int) -> Plan:
    """Two TaskGraphs a device."""
    homes = SCHEDULES[schedule].folding
    assert homes is not None
    rows = {number: {"devices": ((home,),)} for number, home in enumerate(homes(2 * devices, 2))}
    return plan([1] * 2 * devices, micro_batches, tasks=rows, schedule=schedule)


PROGRAMS: Dict[str, Tuple[TrainingStep, Plan]] = {
    "accumulation": (chain(1), plan([1], 3)),
    "accumulation_gpipe": (chain(1), plan([1], 3, schedule="gpipe")),
    "clip_by_global_norm": (chain(2, clip=True), plan([1, 1])),
    "clip_by_global_norm_of_decayed": (chain(2, clip=True, decay=True), plan([2, 1])),
    "clip_by_global_norm_replicated": (chain(1, clip=True), plan([2])),
    "clip_by_global_norm_pipeline_two_processes": (chain(2, clip=True)._replace(processes=2), plan([1, 1])),
    "clip_by_global_norm_two_processes": (chain(1, clip=True)._replace(processes=2), plan([2])),
    "data_parallel": (chain(1), plan([2])),
    "data_parallel_accumulation": (chain(1), plan([2], 2)),
    "data_parallel_bucket": (chain(3, task_graphs=1), plan([2], gradients=_bucket(("w2", "w0"), ("w1",)))),
    "data_parallel_shared_two_processes": (
        chain(1)._replace(processes=2), plan([2], tasks={0: {"variables": "shared"}})),
    "data_parallel_shared_variables": (chain(1), plan([2], tasks={0: {"variables": "shared"}})),
    "data_parallel_two_processes": (chain(1)._replace(processes=2), plan([2])),
    "data_parallel_uneven": (chain(1), plan([2], tasks={0: {"slices": (3, 1)}})),
    "local": (chain(1), plan([1])),
    "nested": (chain(2), plan([1, 1], 2, 2)),
    "nested_own_mini_batches": (chain(2, pulled=True), plan([1, 1], 2, 2)),
    "nested_divided_pipeline": (chain(2, pulled=True), plan([1, 1], 2, 2, nested_batch="divide")),
    "nested_uneven_stages": (chain(2), plan([2, 1], 2, 2)),
    "labels": (chain(2, labels=True), plan([1, 1])),
    "labels_pulled_by_one_replica": (chain(2, labels=True, pulled=True), plan([1, 1], 2)),
    "one_to_three": (chain(2), plan([1, 3])),
    "one_process_of_two": (chain(2)._replace(processes=2), plan([1, 1], 2)),
    "offload_states": (chain(1), plan([1], 2, offload="states", tasks={0: {"variables": "shared", "homes": {"w0": 1}}})),
    "pipeline": (chain(2), plan([1, 1], 4)),
    "pipeline_gpipe": (chain(2), plan([1, 1], 2, schedule="gpipe")),
    "pipeline_three_stages": (chain(3), plan([1, 1, 1], 3)),
    "pipeline_without_micro_batches": (chain(2), plan([1, 1])),
    "split": (chain(1), plan([2], tasks={0: {"strategy": "split"}})),
    "split_after_replicas": (chain(2), plan([2, 2], tasks={1: {"strategy": "split"}})),
    "three_to_two": (chain(2), plan([3, 2])),
    "two_to_one": (chain(2), plan([2, 1], 2)),
    "two_to_two_uneven": (chain(2), plan([2, 2], tasks={1: {"slices": (1, 3)}})),
    "pipeline_interleaved": (chain(4), folded("interleaved", 2, 2)),
    "pipeline_zero_bubble": (chain(3), plan([1, 1, 1], 3, schedule="zero_bubble_h1")),
    "pipeline_zero_bubble_of_two_to_one": (chain(2), plan([1, 2], 2, schedule="zero_bubble_h1")),
    "pipeline_zero_bubble_v": (chain(4), folded("zero_bubble_v", 2, 2)),
    "weight_decay": (chain(1, decay=True), plan([2], 2)),
    "whole_mini_batch": (chain(1, ["loss_grad"]), plan([2])),
    "whole_mini_batch_and_own": (chain(1, ["loss_grad"], plain=True), plan([2])),
    "whole_mini_batch_of_micro_batches": (chain(1, ["loss_grad"]), plan([1], 2)),
    "whole_mini_batch_twice": (chain(1, ["loss", "loss_grad"]), plan([2])),
    "section": (chain(1, together=True), plan([2])),
    "section_of_a_pipeline": (chain(2, together=True), plan([1, 1], 2)),
    "zero_of_first_process": (chain(3, task_graphs=1, momentum=True, clip=True)._replace(processes=2), plan(
        [2], 1, 2, zero="v1", processes=((0, 1), (2, 3)), gradients=_bucket(("v2", "v1", "v0")),
        tasks={0: {"variables": "shared", "homes": {"v0": 0, "v1": 1, "v2": 2}}}).local_part(0)),
    "zero_v2_of_second_process": (chain(2, task_graphs=1, momentum=True, clip=True)._replace(processes=2), plan(
        [1], 2, 2, zero="v2", processes=((0,), (1,)),
        tasks={0: {"variables": "shared", "homes": {"v0": 0, "v1": 0}}}).local_part(1)),
    **{f"zero_v3_of_{which}_process": (chain(2, task_graphs=1, momentum=True)._replace(processes=2), plan(
        [1], 1, 2, zero="v3", processes=((0,), (1,)), gradients=_bucket(("v1", "v0")),
        tasks={0: {"variables": "shared", "homes": {"v0": 0, "v1": 0}}}).local_part(rank))
       for rank, which in enumerate(("first", "second"))},
    "zero_v3": (chain(3, task_graphs=1, clip=True), plan(
        [2], 2, zero="v3", tasks={0: {"variables": "shared", "homes": {"w0": 0, "w1": 1, "w2": 0}}})),
}
