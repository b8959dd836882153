"""Programs as text, before and after each pass, and what holds for all of them."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent
from typing import Any, Sequence

import networkx
import pytest

from tests.passes.drawings import chain, plan
from whale_tf.errors import PlanError
from whale_tf.passes import compile_program
from whale_tf.passes.form import CALL, INLINE, MOST_INLINED_OPS, choose_form
from whale_tf.passes.outline import outline
from whale_tf.passes.replicate import replicate
from whale_tf.passes.schedule import order_calls
from whale_tf.plan import Plan
from whale_tf.program import BACKWARD, FORWARD, Program

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
BODIES = """\
    t0_forward      1 ops  takes x:0, w0:0  gives layer0:0
    t0_backward     2 ops  takes x:0, back1:0, w0:0  gives grad0:0, back0:0
    t1_forward      2 ops  takes layer0:0, w1:0  gives loss:0
    t1_backward     3 ops  takes loss:0, layer0:0, w1:0  gives grad1:0, back1:0
"""


def same(program: Program, text: str) -> None:
    assert program.to_text() == dedent(text)


def test_outline_makes_a_forward_and_a_backward_body_of_each_task_graph() -> None:
    same(outline(chain(2)), BODIES)


def test_data_parallel() -> None:
    same(compile_program(chain(1), plan([2])), """\
        t0_forward      2 ops  takes x:0, w0:0  gives loss:0
        t0_backward     3 ops  takes loss:0, x:0, w0:0  gives grad0:0, back0:0
        #0 t0_forward  g0 m0 r0  on 0
        #1 t0_forward  g0 m0 r1  on 1
        #2 t0_backward g0 m0 r0  on 0  takes loss:0 from #0
        #3 t0_backward g0 m0 r1  on 1  takes loss:0 from #1
    """)


def test_values_of_the_whole_mini_batch_come_from_all_clones() -> None:
    same(compile_program(chain(1, ["loss_grad"]), plan([2])), """\
        t0_early        2 ops  takes x:0, w0:0  gives loss:0
        t0_backward     3 ops  takes loss:0, x:0, w0:0  gives grad0:0, back0:0
        #0 t0_early    g0 m0 r0  on 0
        #1 t0_early    g0 m0 r1  on 1
        #2 t0_backward g0 m0 r0  on 0  takes loss:0 from #0+#1
        #3 t0_backward g0 m0 r1  on 1  takes loss:0 from #0+#1
    """)


def test_replicate_lists_clones_in_the_order_of_their_examples() -> None:
    region, two = chain(2), plan([1, 1], 2)
    same(replicate(outline(region), region, two), BODIES + """\
    #0 t0_forward  g0 m0 r0  on 0
    #1 t0_forward  g0 m1 r0  on 0
    #2 t0_backward g0 m0 r0  on 0  takes back1:0 from #6
    #3 t0_backward g0 m1 r0  on 0  takes back1:0 from #7
    #4 t1_forward  g0 m0 r0  on 1  takes layer0:0 from #0
    #5 t1_forward  g0 m1 r0  on 1  takes layer0:0 from #1
    #6 t1_backward g0 m0 r0  on 1  takes loss:0 from #4, layer0:0 from #0
    #7 t1_backward g0 m1 r0  on 1  takes loss:0 from #5, layer0:0 from #1
    """)


def test_backward_first() -> None:
    """Stage 0 runs two forward micro-batches ahead, stage 1 one."""
    same(compile_program(chain(2), plan([1, 1], 4)), BODIES + """\
    #0  t0_forward  g0 m0 r0  on 0
    #1  t0_forward  g0 m1 r0  on 0  after #0
    #2  t0_backward g0 m0 r0  on 0  takes back1:0 from #9  after #1
    #3  t0_forward  g0 m2 r0  on 0  after #2
    #4  t0_backward g0 m1 r0  on 0  takes back1:0 from #11  after #3
    #5  t0_forward  g0 m3 r0  on 0  after #4
    #6  t0_backward g0 m2 r0  on 0  takes back1:0 from #13  after #5
    #7  t0_backward g0 m3 r0  on 0  takes back1:0 from #15  after #6
    #8  t1_forward  g0 m0 r0  on 1  takes layer0:0 from #0
    #9  t1_backward g0 m0 r0  on 1  takes loss:0 from #8, layer0:0 from #0
    #10 t1_forward  g0 m1 r0  on 1  takes layer0:0 from #1  after #9
    #11 t1_backward g0 m1 r0  on 1  takes loss:0 from #10, layer0:0 from #1  after #9
    #12 t1_forward  g0 m2 r0  on 1  takes layer0:0 from #3  after #11
    #13 t1_backward g0 m2 r0  on 1  takes loss:0 from #12, layer0:0 from #3  after #11
    #14 t1_forward  g0 m3 r0  on 1  takes layer0:0 from #5  after #13
    #15 t1_backward g0 m3 r0  on 1  takes loss:0 from #14, layer0:0 from #5  after #13
    """)


def test_gpipe_runs_all_forward_steps_first() -> None:
    program = compile_program(chain(1), plan([1], 3, schedule="gpipe"))
    steps = [f"{program.bodies[call.body].step[0]}{call.clone.m}" for call in program.calls]
    assert steps == ["f0", "f1", "f2", "b2", "b1", "b0"]
    assert [call.after for call in program.calls] == [(), (0,), (1,), (1,), (3,), (4,)]


def test_stages_with_different_numbers_of_replicas() -> None:
    """Two replicas' parts make up what one replica reads, and each reads its part of what that one sends back."""
    same(compile_program(chain(2), plan([2, 1])), BODIES + """\
    #0 t0_forward  g0 m0 r0  on 0
    #1 t0_forward  g0 m0 r1  on 1
    #2 t0_backward g0 m0 r0  on 0  takes back1:0 from #5
    #3 t0_backward g0 m0 r1  on 1  takes back1:0 from #5
    #4 t1_forward  g0 m0 r0  on 2  takes layer0:0 from #0+#1
    #5 t1_backward g0 m0 r0  on 2  takes loss:0 from #4, layer0:0 from #0+#1
    """)


def test_nested_data_parallelism() -> None:
    same(compile_program(chain(2), plan([1, 1], model_replicas=2)), BODIES + """\
    #0 t0_forward  g0 m0 r0  on 0
    #1 t0_forward  g1 m0 r0  on 2
    #2 t0_backward g0 m0 r0  on 0  takes back1:0 from #6
    #3 t0_backward g1 m0 r0  on 2  takes back1:0 from #7
    #4 t1_forward  g0 m0 r0  on 1  takes layer0:0 from #0
    #5 t1_forward  g1 m0 r0  on 3  takes layer0:0 from #1
    #6 t1_backward g0 m0 r0  on 1  takes loss:0 from #4, layer0:0 from #0
    #7 t1_backward g1 m0 r0  on 3  takes loss:0 from #5, layer0:0 from #1
    """)


def test_text_names_devices_and_shortens_lists() -> None:
    program = compile_program(chain(1), plan([2]))
    assert "on CPU:1" in program.to_text(["CPU:0", "CPU:1"])
    many = program.bodies[0]._replace(inputs=tuple(range(6)))
    assert "takes x:0, w0:0, layer0:0, loss:0, 2 more  gives" in program._replace(bodies=(many,), calls=()).to_text()


def test_the_architecture_page_shows_a_program_as_it_is() -> None:
    text = compile_program(chain(2), plan([1, 1], 2)).to_text()
    assert indent(text, "    ") in ARCHITECTURE.read_text(encoding="utf8")


@pytest.mark.parametrize("schedule", ["backward_first", "gpipe"])
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("counts,model_replicas", [((1,), 1), ((3,), 2), ((1, 1, 1), 1), ((2, 3), 1), ((1, 3, 2), 2)])
def test_every_program(counts: Sequence[int], model_replicas: int, micro_batches: int, schedule: str) -> None:
    chosen = plan(counts, micro_batches, model_replicas, schedule=schedule)
    program = compile_program(chain(len(counts)), chosen)
    each = [(call.body, call.clone) for call in program.calls]
    assert len(set(each)) == len(each) == 2 * sum(counts) * model_replicas * micro_batches
    waits = networkx.DiGraph()
    waits.add_nodes_from(range(len(program.calls)))
    for number, call in enumerate(program.calls):
        waits.add_edges_from((before, number) for before in call.after)
        body = program.bodies[call.body]
        for value in call.takes:
            waits.add_edges_from((source, number) for source in value.calls)
            for source in value.calls:
                assert value.tensor in program.bodies[program.calls[source].body].outputs
                assert program.calls[source].clone[:2] == call.clone[:2]
        assert call.devices == (chosen.task_graphs[body.task_graph].devices[call.clone.g][call.clone.r],)
    assert networkx.is_directed_acyclic_graph(waits)
    if micro_batches > 1:  # one step at a time on every device, but for a micro-batch's own backward step
        for device in {call.devices for call in program.calls}:
            own = [number for number, call in enumerate(program.calls) if call.devices == device]
            for before, after in zip(own, own[1:]):
                assert networkx.has_path(waits, before, after)


def test_a_backward_body_never_comes_before_the_forward_one() -> None:
    program = compile_program(chain(3), plan([1, 1, 1], 4))
    for task_graph in range(3):
        calls = list(program.calls)
        forward = {call.clone.m: calls.index(call) for call in program.calls_of(task_graph, FORWARD)}
        for call in program.calls_of(task_graph, BACKWARD):
            assert calls.index(call) > forward[call.clone.m]


def test_a_schedule_that_waits_for_itself_is_refused() -> None:
    """Stage 0's forward step needs stage 1's backward one, and stage 1 runs two forward steps before that."""
    region, two = chain(2), plan([1, 1], 2, schedule="gpipe")
    program = replicate(outline(region), region, two)
    layer = region.graph.op("layer0")
    layer.inputs = (region.graph.tensor("back1"), layer.inputs[1])
    with pytest.raises(PlanError, match="schedule 'gpipe' cannot order this graph: its stages wait for each other's gradients"):
        order_calls(program, two)


class TestForm:
    """Which form a program is emitted in, and why."""

    def form(self, region: Any = None, **more: Any) -> Any:
        region = region or chain(2)
        chosen = plan([1, 1], 4, **more)
        return choose_form(compile_program(region, chosen), region, chosen)

    def test_small_steps_are_inlined(self) -> None:
        form = self.form()
        assert form.kind == INLINE and f"has 32 ops in its calls, at most {MOST_INLINED_OPS}" in form.reason

    def test_large_ones_are_called(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("whale_tf.passes.form.MOST_INLINED_OPS", 31)
        assert self.form().kind == CALL

    @pytest.mark.parametrize("emit", [INLINE, CALL])
    def test_what_is_asked_for(self, emit: str) -> None:
        assert self.form(emit=emit) == (emit, "asked for")

    def test_version_1_control_flow_is_inlined(self) -> None:
        region = chain(2)
        region.graph.op("layer1").type = "Switch"
        form = self.form(region, emit=CALL)
        assert form.kind == INLINE and "'layer1' belongs to a loop or condition of TensorFlow 1" in form.reason

    def test_a_split_task_graph_is_inlined(self) -> None:
        region = chain(1)
        chosen = Plan.parse({"graph": "drawn", "num_devices": 2, "emit": CALL, "task_graphs": [
            {"name": "wide", "strategy": "split", "devices": [[0, 1]]}]})
        assert "'wide' divides its ops over devices" in choose_form(compile_program(region, chosen), region, chosen).reason

    def test_reference_variables_are_inlined_unless_calls_are_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("whale_tf.passes.form.MOST_INLINED_OPS", 1)
        region = chain(2)
        read = region.graph.op("w1").outputs[0]
        region.graph.tensors[read] = region.graph.tensors[read]._replace(dtype="float32_ref")
        assert "reference variables" in self.form(region).reason
        assert self.form(region, emit=CALL).kind == CALL
