"""What becomes of the values that leave the clones."""

from __future__ import annotations

from typing import Any, Sequence

import pytest

from tests.passes.drawings import chain, plan
from tests.passes.programs import PROGRAMS
from whale_tf.errors import PlanError
from whale_tf.ir.across import Across, leading_to_writes
from whale_tf.ir.graph import Phase
from whale_tf.ir.layout import replicated, sharded
from whale_tf.ir.training_step import TrainingStep, find_update
from whale_tf.passes import compile_program
from whale_tf.passes.collect import Leaving, compressed, leaving
from whale_tf.plan import GradientPlan, Plan
from whale_tf.program import ACCUMULATE, MERGE, SYNCHRONISE

MERGED, READ = Leaving((), True, True), Leaving((), True, False)  # for an update, for whoever else reads it


def with_reader(step: TrainingStep, type_: str, inputs: Sequence[str], phase: Phase) -> TrainingStep:
    """The step with an op outside of the clones."""
    graph = step.graph
    graph.add(f"reader{len(graph.ops)}", type_, [graph.tensor(tensor) for tensor in inputs], [((), "float32")], phase=phase)
    region = step.region._replace(task_graph=[*step.region.task_graph, -1])
    gradients = {tensor: place for place, (tensor, _) in enumerate(step.gradients)}
    return step._replace(region=region, update=find_update(region, {}, gradients))


def of(step: TrainingStep, tensor: str, chosen: Plan) -> Any:
    return leaving(step, chosen).get(step.graph.tensor(tensor))


def test_gradients_are_synchronised_over_copies_and_merged_where_there_is_one() -> None:
    step = chain(2)
    assert (of(step, "grad0", plan([2, 1])), of(step, "grad1", plan([2, 1]))) == (Leaving((0,), False, True), MERGED)


def test_with_several_processes_everything_that_an_update_reads_is_synchronised() -> None:
    step = chain(2)._replace(processes=2)
    assert of(step, "grad0", plan([2, 1])) == Leaving((0,), False, True)
    assert of(step, "grad1", plan([2, 1])) == Leaving((1,), False, True)


def test_sparse_gradient_is_gathered_on_every_copy() -> None:
    step = chain(1)
    step.region.batch.layouts[step.graph.tensor("grad0")] = sharded(0)
    assert (of(step, "grad0", plan([2])), of(step, "grad0", plan([1]))) == (Leaving((0,), False, True), MERGED)
    assert of(step._replace(processes=2), "grad0", plan([1])) == Leaving((0,), False, True)


def test_replicated_value_is_merged_once() -> None:
    step = chain(1)
    step.region.batch.layouts[step.graph.tensor("grad0")] = replicated()
    assert of(step, "grad0", plan([2])) == MERGED
    assert of(step._replace(processes=2), "grad0", plan([2])) == Leaving((0,), False, True)


def test_summary_reads_this_process_value_and_a_metric_that_of_all() -> None:
    step = with_reader(chain(2), "ScalarSummary", ["loss"], Phase.OTHER)
    assert of(step, "loss", plan([1, 2])) == READ == of(step._replace(processes=2), "loss", plan([1, 2]))
    step = with_reader(chain(2), "AssignAdd", ["loss"], Phase.OTHER)
    assert of(step, "loss", plan([1, 2])) == READ
    assert of(step._replace(processes=2), "loss", plan([1, 2])) == Leaving((1,), False, False)


def test_what_an_update_and_a_summary_read_every_step_needs() -> None:
    assert of(with_reader(chain(1), "ScalarSummary", ["grad0"], Phase.OTHER), "grad0", plan([1])) == MERGED


def test_what_runs_on_own_rows_and_on_those_of_all_gets_both_values() -> None:
    step = with_reader(chain(1), "Identity", ["layer0"], Phase.OTHER)
    reader = step.graph.ops[-1].id
    step = step._replace(processes=2, of_results=Across(frozenset({(reader, 0)}), twice=(reader,)))
    assert of(step, "layer0", plan([2])) == Leaving((0,), True, False)
    step = step._replace(of_results=Across(frozenset({(reader, 0)})))
    assert of(step, "layer0", plan([2])) == Leaving((0,), False, False)


def test_merge_is_where_the_variable_is() -> None:
    step, chosen = PROGRAMS["zero_v3"]
    merges = {body.name: body.home for body in compile_program(step, chosen).bodies if body.step == MERGE}
    assert merges == {"t0_merge_on0": 0, "t0_merge_on1": 1}
    assert [body.home for body in compile_program(chain(1), plan([1])).bodies if body.step == MERGE] == [None]


@pytest.mark.parametrize("layers", [1, 2])
def test_owner_gets_the_sum_of_each_micro_batch(layers: int) -> None:
    """Of all processes; each of them adds up its replicas' gradients before."""
    step = chain(layers, task_graphs=1, momentum=True)._replace(processes=2)
    chosen = plan([1], 2, 2, zero="v2", processes=((0,), (1,)),
                  tasks={0: {"variables": "shared", "homes": {f"v{layer}": 0 for layer in range(layers)}}}).local_part(0)
    program = compile_program(step, chosen)
    sent = [(call.clone.m, len(call.takes)) for call in program.calls if program.step_of(call) == SYNCHRONISE]
    assert sorted(sent) == sorted((m, 1) for m in range(2) for _ in range(layers))


def test_handles_stay_with_the_clones() -> None:
    step = with_reader(chain(1), "Size", ["layer0"], Phase.OTHER)
    tensor = step.graph.tensor("layer0")
    step.graph.tensors[tensor] = step.graph.tensors[tensor]._replace(dtype="variant")
    assert of(step, "layer0", plan([2])) is None


def test_gradient_that_another_task_graph_updates_with_is_merged() -> None:
    """Gradients of one TaskGraph's ops for a variable of another."""
    step = chain(2)
    region, first = step.region, step.graph.tensor("grad0")
    step = step._replace(update=find_update(region, {}, {first: 1, step.graph.tensor("grad1"): 1}))
    assert of(step, "grad0", plan([1, 2])) == MERGED
    assert of(step._replace(processes=2), "grad0", plan([1, 2])) == Leaving((0,), False, True)


def test_only_sums_that_leave_are_accumulated() -> None:
    step = with_reader(chain(1), "Size", ["back0"], Phase.OTHER)  # a gradient with a row for each example
    program = compile_program(step, plan([1], 2))
    assert [body.outputs for body in program.bodies if body.step == ACCUMULATE] == [(step.graph.tensor("grad0"),)]
    merged = next(call for call in program.calls if program.step_of(call) == MERGE)
    sources = {step.graph.tensor_name(value.tensor): len(value.calls) for value in merged.takes}
    assert sources == {"grad0:0": 1, "back0:0": 2}


def test_nothing_is_accumulated_of_a_backward_body_that_nobody_reads() -> None:
    step = chain(2)
    step = step._replace(region=step.region._replace(batch=step.region.batch))
    step.region.batch.layouts[step.graph.tensor("grad1")] = sharded(0)
    program = compile_program(step, plan([1, 1], 2))
    assert [body.task_graph for body in program.bodies if body.step == ACCUMULATE] == [0]


@pytest.mark.parametrize("processes,kind", [(1, MERGE), (2, SYNCHRONISE)])
def test_what_runs_once_reads_the_value_over_all_processes(processes: int, kind: str) -> None:
    """Also where a summary has this process' value merged."""
    step = with_reader(chain(2, clip=True), "ScalarSummary", ["grad0"], Phase.OTHER)._replace(processes=processes)
    program = compile_program(step, plan([2, 1]))
    update = next(call for call in program.calls if program.bodies[call.body].name == "update")
    sources = {value.tensor: program.calls[value.calls[0]] for value in update.takes}
    assert program.step_of(sources[step.graph.tensor("grad0")]) == kind


def test_what_leads_to_a_write() -> None:
    step = with_reader(chain(1, clip=True), "ScalarSummary", ["norm"], Phase.OTHER)
    names = {step.graph.ops[op].name for op in leading_to_writes(step.graph)}
    assert {"update0", "clipped0", "norm", "square0", "grad0", "x", "w0", "loss"} <= names
    assert not names & {"back0", step.graph.ops[-1].name}


def _buckets(*buckets: Sequence[str], fp16: bool = False) -> Any:
    return (GradientPlan(task_graph=0, backend="local", buckets=tuple(map(tuple, buckets)), fp16=fp16),)


def synchronised(step: TrainingStep, chosen: Plan) -> Any:
    program = compile_program(step, chosen)
    return [[step.graph.tensor_name(tensor) for tensor in program.bodies[call.body].outputs]
            for call in program.calls if program.step_of(call) == SYNCHRONISE]


def test_buckets_travel_together() -> None:
    step = chain(3, task_graphs=1)
    assert synchronised(step, plan([2], gradients=_buckets(("w2", "w0"), ("w1",)))) == [["grad2:0", "grad0:0"], ["grad1:0"]]
    assert synchronised(step, plan([1], gradients=_buckets(("w2", "w0")))) == []


@pytest.mark.parametrize("buckets", [(("w2", "w0"), ("w1",)), (("w2", "w1", "w0"),)])
def test_gradient_of_two_variables_travels_once(buckets: Any) -> None:
    """A sum of two variables hands its own gradient to both."""
    step = chain(3, task_graphs=1)
    shared, first, second = step.graph.tensor("grad2"), step.graph.op("w1").id, step.graph.op("w2").id
    step = step._replace(gradients=tuple((shared if variable in (first, second) else tensor, variable)
                                         for tensor, variable in step.gradients))
    assert synchronised(step, plan([2], gradients=_buckets(*buckets))) == [["grad2:0", "grad0:0"], ["grad1:0"]]


@pytest.mark.parametrize("change", [{"dtype": "float64"}, {"shape": None}, {"shape": (None, 2)}])
def test_gradients_that_cannot_travel_together_are_refused(change: Any) -> None:
    step = chain(2, task_graphs=1)
    tensor = step.graph.tensor("grad1")
    step.graph.tensors[tensor] = step.graph.tensors[tensor]._replace(**change)
    with pytest.raises(PlanError, match="the gradient of 'w1' cannot travel in a bucket with 'w0'"):
        compile_program(step, plan([2], gradients=_buckets(("no such variable", "w0", "w1"))))
    assert len(synchronised(step, plan([2], gradients=_buckets(("w0",), ("w1",))))) == 2  # alone it can


def test_sparse_gradient_in_a_bucket_is_refused() -> None:
    step = chain(2, task_graphs=1)
    step.region.batch.layouts[step.graph.tensor("grad0")] = sharded(0)
    with pytest.raises(PlanError, match="buckets hold dense gradients of one type"):
        compile_program(step, plan([2], gradients=_buckets(("w0", "w1"))))


def test_gradients_that_travel_as_float16() -> None:
    step = chain(2)
    assert compressed(step, plan([1, 1], gradients=_buckets(("w1",), fp16=True))) == {step.graph.tensor("grad1")}
    assert compressed(step, plan([1, 1], gradients=_buckets(("w1",)))) == frozenset()


def test_sum_that_no_update_follows_from_waits_for_whoever_fetches_it() -> None:
    """The gradient of a constant: nothing that a step has to run leads to it."""
    step = with_reader(chain(1), "Identity", ["back0"], Phase.OTHER)
    batch = step.region.batch
    batch.layouts[step.graph.tensor("back0")] = batch.layout(step.graph.tensor("grad0"))
    program = compile_program(step, plan([1], 2))
    assert [body.outputs for body in program.bodies if body.step == ACCUMULATE] == [(step.graph.tensor("grad0"),)]
    merged = next(call for call in program.calls if program.step_of(call) == MERGE)
    assert {step.graph.tensor_name(value.tensor): len(value.calls) for value in merged.takes} == {"grad0:0": 1, "back0:0": 2}
