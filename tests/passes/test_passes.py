"""What holds for all Programs; ``test_golden.py`` has them as text."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent
from typing import Any, Sequence

import networkx
import pytest

from tests.passes.drawings import chain, plan
from whale_tf.errors import PlanError
from whale_tf.passes import PASSES, compile_program
from whale_tf.passes.form import CALL, INLINE, MOST_INLINED_OPS, choose_form
from whale_tf.passes.schedule import orders_of, pairs
from whale_tf.passes.verify import Pass, verify
from whale_tf.plan import Estimate, Plan
from whale_tf.program import ALL, BACKWARD, EARLY, FORWARD, SECTION, WHOLE, Program, Value
from whale_tf.schedule import Step

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
def test_gpipe_runs_all_forward_steps_first() -> None:
    program = compile_program(chain(1), plan([1], 3, schedule="gpipe"))
    calls = [call for call in program.calls if program.step_of(call) in (FORWARD, BACKWARD)]
    assert [f"{program.step_of(call)[0]}{call.clone.m}" for call in calls] == ["f0", "f1", "f2", "b2", "b1", "b0"]
    number = {program.calls.index(call): f"{program.step_of(call)[0]}{call.clone.m}" for call in program.calls}
    after = [sorted(number[before] for before in call.after) for call in calls]
    assert after == [[], ["f0"], ["f1"], ["f1"], ["b2"], ["a1", "b1"]]


def test_text_names_devices_and_shortens_lists() -> None:
    program = compile_program(chain(1), plan([2]))
    assert "on CPU:1" in program.to_text(["CPU:0", "CPU:1"])
    many = program.bodies[0]._replace(inputs=tuple(range(6)))
    assert "takes x:0, w0:0, layer0:0, 3 more  gives" in program._replace(bodies=(many,), calls=()).to_text()


def test_long_list_of_calls_is_shortened() -> None:
    program = compile_program(chain(1), plan([12]))
    assert "grad0:0 from #25+#26+#27+#28+#29+#30+#31+#32+4 more" in program.to_text()


def test_architecture_page_shows_a_program_as_it_is() -> None:
    text = compile_program(chain(2), plan([1, 1], 2)).to_text()
    assert indent(text, "    ") in ARCHITECTURE.read_text(encoding="utf8")


@pytest.mark.parametrize("schedule", ["backward_first", "gpipe"])
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("counts,model_replicas", [((1,), 1), ((3,), 2), ((1, 1, 1), 1), ((2, 3), 1), ((1, 3, 2), 2)])
def test_every_program(counts: Sequence[int], model_replicas: int, micro_batches: int, schedule: str) -> None:
    chosen = plan(counts, micro_batches, model_replicas, schedule=schedule)
    program = compile_program(chain(len(counts)), chosen)
    each = [(call.body, call.clone) for call in program.calls]
    assert len(set(each)) == len(each)
    assert sum(program.step_of(call) in (FORWARD, BACKWARD) for call in program.calls) == (
        2 * sum(counts) * model_replicas * micro_batches)
    waits = networkx.DiGraph()
    waits.add_nodes_from(range(len(program.calls)))
    for number, call in enumerate(program.calls):
        waits.add_edges_from((before, number) for before in call.after)
        body = program.bodies[call.body]
        for value in call.takes:
            waits.add_edges_from((source, number) for source in value.calls)
            for source in value.calls:
                assert value.tensor in program.bodies[program.calls[source].body].outputs
                if body.step in (FORWARD, BACKWARD):
                    assert all(a in (ALL, b) for a, b in zip(program.calls[source].clone[:2], call.clone))
        if body.step in (FORWARD, BACKWARD):
            assert call.devices == (chosen.task_graphs[body.task_graph].devices[call.clone.g][call.clone.r],)
    assert networkx.is_directed_acyclic_graph(waits)
    if micro_batches > 1:  # one step at a time on every device, but for a micro-batch's own backward step
        for device in {call.devices for call in program.calls}:
            own = [number for number, call in enumerate(program.calls)
                   if call.devices == device and program.step_of(call) in (FORWARD, BACKWARD)]
            for before, after in zip(own, own[1:]):
                assert networkx.has_path(waits, before, after)


def test_backward_body_never_comes_before_the_forward_one() -> None:
    program = compile_program(chain(3), plan([1, 1, 1], 4))
    for task_graph in range(3):
        places = {(program.step_of(call), call.clone.m): place for place, call in enumerate(program.calls)
                  if program.bodies[call.body].task_graph == task_graph}
        for m in range(4):
            assert places[BACKWARD, m] > places[FORWARD, m]


def test_schedule_that_waits_for_itself_is_refused() -> None:
    """Stage 0's forward step needs stage 1's backward one, and stage 1 runs two forward steps before that."""
    step, two = chain(2), plan([1, 1], 2, schedule="gpipe")
    layer = step.graph.op("layer0")
    layer.inputs = (step.graph.tensor("back1"), layer.inputs[1])
    with pytest.raises(PlanError, match="schedule 'gpipe' cannot order this graph: its stages wait for each other's gradients"):
        compile_program(step, two)


def test_steps_that_need_each_other_are_one_of_a_single_micro_batch() -> None:
    """As in the test above, where the schedule has nothing to say about them."""
    step = chain(2)
    layer = step.graph.op("layer0")
    layer.inputs = (step.graph.tensor("back1"), layer.inputs[1])
    assert all(not call.after for call in compile_program(step, plan([1, 1])).calls)


def test_section_takes_what_is_equal_in_all_clones_from_the_first() -> None:
    step = chain(1, together=True)
    step.graph.op("loss").inputs += (step.graph.tensor("layer0"),)  # combined as the first operand, taken as it is as the second
    program = compile_program(step, plan([3]))
    section = next(call for call in program.calls if program.step_of(call) == SECTION)
    taken = [[program.step_of(program.calls[source]) for source in value.calls] for value in section.takes]
    assert sorted(taken) == [[EARLY], [WHOLE]]


def test_backward_step_follows_the_forward_step_of_its_own_task_graph_if_data_do_not_order_them() -> None:
    """Two TaskGraphs on one device."""
    order = [Step(kind, 0, task_graph) for kind, task_graph in ((FORWARD, 0), (FORWARD, 1), (BACKWARD, 1), (BACKWARD, 0))]
    assert pairs(order) == []
    assert pairs(order, {0}) == [(order[0], order[3])]
    assert pairs(order, {0, 1}) == [(order[1], order[2]), (order[0], order[3])]


@pytest.mark.parametrize("schedule", ["backward_first", "gpipe"])
def test_pipelines_replicas_are_listed_one_after_the_other(schedule: str) -> None:
    program = compile_program(chain(1), plan([2], 2, schedule=schedule))
    replicas = [call.clone.r for call in program.calls if program.step_of(call) in (FORWARD, BACKWARD)]
    assert replicas == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("schedule,count", [("gpipe", 2), ("interleaved", 4)])
def test_batch_part_has_the_order_of_the_task_graph_that_it_is_beside(schedule: str, count: int) -> None:
    rows: Any = {number: {"devices": ((number % 2,),), "warmup": 1} for number in range(count)}
    for of in range(count):
        tasks = {**rows, of: {**rows[of], "strategy": "split"}, count: {**rows[of], "batch_of": of}}
        found = orders_of(plan([1] * (count + 1), 2, schedule=schedule, tasks=tasks))
        assert len(found) == 3
        assert found[-1] == [step._replace(task_graph=count) for order in found[:2] for step in order if step.task_graph == of]
        assert len(found[-1]) == 4


@pytest.mark.parametrize("damage,message", [
    (lambda call: call._replace(devices=(9,)), "on unknown devices"),
    (lambda call: call._replace(takes=(Value(0, (99,)),)), "takes from #99, which is no call"),
    (lambda call: call._replace(takes=call.takes[:1] + (Value(call.takes[1].tensor, (0,)),)), "which does not give it"),
])
def test_verifier_finds_what_a_pass_breaks(damage: Any, message: str) -> None:
    step, two = chain(2), plan([1, 1], 2)
    broken = Pass("broken", PASSES[-1].run, ensures="ordered")
    program = compile_program(step, two)
    verify(program, step, two, broken)
    place = next(n for n, call in enumerate(program.calls) if program.step_of(call) == FORWARD)
    calls = list(program.calls)
    calls[place] = damage(calls[place])
    with pytest.raises(AssertionError, match="after pass 'broken': .*" + message):
        verify(program._replace(calls=tuple(calls)), step, two, broken)


@pytest.mark.parametrize("left_out", ["divide", "bridge", "whole", "synchronise"])
def test_verifier_notices_a_pass_that_was_left_out(left_out: str) -> None:
    step, chosen = chain(2, ["loss_grad"]), plan([2, 3], 2)
    program = Program(step.graph, ())
    with pytest.raises(AssertionError, match="after pass "):
        for one in PASSES:
            if one.name != left_out:
                program = one.run(program, step, chosen)
                verify(program, step, chosen, one)


def test_passes_require_what_those_before_them_ensure() -> None:
    assert [one.requires for one in PASSES] == [""] + [one.ensures for one in PASSES[:-1]]


class TestForm:
    """Which form a program is emitted in, and why."""

    def form(self, step: Any = None, **more: Any) -> Any:
        step = step or chain(2)
        chosen = plan([1, 1], 4, **more)
        return choose_form(compile_program(step, chosen), step.region, chosen)

    def test_small_steps_are_inlined(self) -> None:
        form = self.form()
        assert form.kind == INLINE and f"has 32 ops in its calls, and up to {MOST_INLINED_OPS}" in form.reason

    def test_large_ones_are_called(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("whale_tf.passes.form.MOST_INLINED_OPS", 31)
        assert self.form().kind == CALL

    @pytest.mark.parametrize("emit", [INLINE, CALL])
    def test_what_is_asked_for(self, emit: str) -> None:
        assert self.form(emit=emit) == (emit, "set by emit")

    def test_memory_decides_against_calls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("whale_tf.passes.form.MOST_INLINED_OPS", 31)
        form = self.form(estimate=Estimate(called_peak_memory_bytes=(5, 3 << 30)))
        assert form == (INLINE, "inlined, the step fits in memory; called, it does not (up to 3.00 GiB on a device)")
        assert self.form(estimate=Estimate(called_peak_memory_bytes=(5,)), emit=CALL).kind == CALL

    def test_version_1_control_flow_is_inlined(self) -> None:
        step = chain(2)
        step.graph.op("layer1").type = "Switch"
        form = self.form(step, emit=CALL)
        assert form.kind == INLINE and "'layer1' belongs to a loop or condition of TensorFlow 1" in form.reason

    def test_split_task_graph_is_inlined(self) -> None:
        step = chain(1)
        chosen = Plan.parse({"graph": "drawn", "num_devices": 2, "emit": CALL, "task_graphs": [
            {"name": "wide", "strategy": "split", "devices": [[0, 1]]}]})
        assert "'wide' divides its ops over devices" in choose_form(compile_program(step, chosen), step.region, chosen).reason

    def test_reference_variables_are_inlined_unless_calls_are_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("whale_tf.passes.form.MOST_INLINED_OPS", 1)
        step = chain(2)
        read = step.graph.op("w1").outputs[0]
        step.graph.tensors[read] = step.graph.tensors[read]._replace(dtype="float32_ref")
        assert "reference variables" in self.form(step).reason
        assert self.form(step, emit=CALL).kind == CALL
