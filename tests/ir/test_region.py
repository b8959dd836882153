"""Levels of the parallel region: loops run as a whole, stacks and arrays on one level, and what leaves."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Set

from whale_tf.ir.batch_axis import BatchAxis, Reduce
from whale_tf.ir.graph import Op, OpGraph, Phase
from whale_tf.ir.region import Region, find_region, frames
from whale_tf.ir.units import may_miss


class Drawing:
    """An op graph in which ops are named by their tensors' first word and read each other by name."""

    def __init__(self) -> None:
        self.graph = OpGraph()

    def op(self, name: str, type_: str = "Identity", inputs: Sequence[str] = (), phase: Phase = Phase.FORWARD,
           controls: Sequence[str] = (), dtype: str = "float32", frame: Optional[str] = None) -> Op:
        return self.graph.add(
            name, type_, [self.graph.tensor(i) for i in inputs], [((), dtype)], [self.graph.op(c).id for c in controls],
            attrs={"frame_name": frame} if frame else {}, phase=phase)

    def loop(self, name: str, entering: str, body: Sequence[str] = ("body",), phase: Phase = Phase.FORWARD) -> None:
        """``entering -> name/enter -> merge -> switch -> body... -> next -> merge``, and ``switch -> name/exit``."""
        self.op(name + "/enter", "Enter", [entering], phase, frame=name)
        self.op(name + "/merge", "Merge", [name + "/enter"], phase)
        last = self.op(name + "/switch", "Switch", [name + "/merge"], phase).name
        for part in body:
            last = self.op(f"{name}/{part}", "Tanh", [last], phase).name
        self.close(name, last, phase)

    def close(self, name: str, last: str, phase: Phase = Phase.FORWARD) -> None:
        back = self.op(name + "/next", "NextIteration", [last], phase)
        merge = self.graph.op(name + "/merge")
        merge.inputs += back.outputs
        self.op(name + "/exit", "Exit", [name + "/switch"], phase)

    def region(self, sources: Sequence[str] = ("x",), conversions: Any = ()) -> Region:
        batch = BatchAxis(self.graph, {self.graph.tensor(s): 0 for s in sources}, None)
        batch.conversions.update(conversions)
        return find_region(self.graph, [0] * len(self.graph.ops), batch, [self.graph.tensor(s) for s in sources])

    def names(self, ops: Set[int]) -> List[str]:
        return sorted(self.graph.ops[i].name for i in ops)


def test_branches_may_miss_with_the_conditions_and_loops_in_them() -> None:
    drawing = Drawing()
    drawing.op("x", "Placeholder", phase=Phase.INPUT)
    drawing.op("outer", "Switch", ["x"])
    drawing.loop("looped", "outer")
    drawing.op("inner", "Switch", ["looped/exit"])
    drawing.op("behind", "Merge", ["inner"])
    drawing.op("waits", controls=["behind"])
    drawing.op("end", "Merge", ["behind"])
    drawing.op("after", inputs=["end"])
    drawing.loop("alone", "x")
    assert drawing.names(may_miss(drawing.graph)) == sorted(
        ["outer", "looped/enter", "looped/merge", "looped/switch", "looped/body", "looped/next", "looped/exit", "inner", "behind",
         "waits"])


def test_enter_counts_to_its_loop_and_an_exit_to_the_loop_it_leaves():
    drawing = Drawing()
    drawing.op("x", "Placeholder", phase=Phase.INPUT)
    drawing.loop("loop", "x")
    drawing.op("after", inputs=["loop/exit"])
    found = frames(drawing.graph)
    assert drawing.names(set(found)) == ["loop/" + n for n in ("body", "enter", "exit", "merge", "next", "switch")]
    assert set(found.values()) == {("loop",)}


def test_ops_of_nested_loops_belong_to_both_behind_the_inner_exit_too():
    drawing = Drawing()
    drawing.op("x", "Placeholder", phase=Phase.INPUT)
    drawing.op("outer/enter", "Enter", ["x"], frame="outer")
    drawing.op("outer/merge", "Merge", ["outer/enter"])
    drawing.op("outer/switch", "Switch", ["outer/merge"])
    drawing.loop("inner", "outer/switch")
    drawing.op("between", "Tanh", ["inner/exit"])
    drawing.op("constant", "Const", controls=["outer/switch"])
    drawing.op("sum", "Add", ["between", "constant"])
    drawing.close("outer", "sum")
    drawing.op("after", inputs=["outer/exit"])
    found = {drawing.graph.ops[i].name: frame for i, frame in frames(drawing.graph).items()}
    assert {found["inner/" + n] for n in ("enter", "body", "exit")} == {("outer", "inner")}
    assert {found[n] for n in ("outer/enter", "between", "constant", "sum", "outer/next", "outer/exit")} == {("outer",)}
    assert "after" not in found and "x" not in found


def test_graph_without_loops_has_no_frames():
    drawing = Drawing()
    drawing.op("x", "Placeholder")
    drawing.op("y", inputs=["x"])
    assert frames(drawing.graph) == {}


def test_loop_runs_on_one_level_though_only_one_value_in_it_depends_on_the_batch():
    drawing = Drawing()
    drawing.op("x", "Placeholder", phase=Phase.INPUT)
    drawing.op("one", "Const")
    drawing.loop("counter", "one")
    drawing.op("loop/enter", "Enter", ["x"], frame="counter")
    drawing.op("loop/add", "Add", ["loop/enter", "counter/body"])
    drawing.op("unrelated", inputs=["one"])
    level = drawing.names(drawing.region().batch_level)
    assert "counter/merge" in level and "counter/next" in level and "loop/add" in level
    assert "one" not in level and "unrelated" not in level


def test_ops_of_a_loop_outside_the_region_stay_there():
    """The unused gradient of a loop's input is in the loop's frame but in no phase of the region."""
    drawing = Drawing()
    drawing.op("x", "Placeholder", phase=Phase.INPUT)
    drawing.loop("loop", "x")
    drawing.op("unused", "Tanh", ["loop/body"], Phase.OTHER)
    region = drawing.region()
    assert "unused" not in drawing.names(region.batch_level)
    assert region.leaving() == {}  # it reads the original's value, in the original's frame


def test_what_leaves_a_loop_by_its_exit_leaves_the_region():
    drawing = Drawing()
    drawing.op("x", "Placeholder", phase=Phase.INPUT)
    drawing.loop("loop", "x")
    summary = drawing.op("summary", "Identity", ["loop/exit"], Phase.OTHER)
    assert drawing.region().leaving() == {drawing.graph.tensor("loop/exit"): [(summary.id, 0)]}


def test_unused_ops_read_the_original_tensors():
    drawing = Drawing()
    drawing.op("x", "Placeholder", phase=Phase.INPUT)
    drawing.op("model", "Tanh", ["x"])
    drawing.op("gradient_of_a_constant", "Identity", ["model"], Phase.UNUSED)
    assert drawing.region().leaving() == {}


def test_all_users_of_a_stack_are_on_one_level():
    """A loop over weights alone, whose gradient depends on the batch: clones must not pop from one stack."""
    drawing = Drawing()
    drawing.op("x", "Placeholder", phase=Phase.INPUT)
    drawing.op("w", "Const")
    drawing.op("stack", "StackV2", dtype="resource")
    drawing.loop("forward", "w")
    drawing.op("forward/stack", "Enter", ["stack"], dtype="resource", frame="forward")
    drawing.op("forward/push", "StackPushV2", ["forward/stack", "forward/body"])
    drawing.op("loss", "Mul", ["x", "forward/exit"])
    drawing.op("gradient", "Mul", ["loss", "x"], Phase.BACKWARD)
    drawing.loop("backward", "gradient", phase=Phase.BACKWARD)
    drawing.op("backward/stack", "Enter", ["stack"], Phase.BACKWARD, dtype="resource", frame="backward")
    drawing.op("backward/pop", "StackPopV2", ["backward/stack"], Phase.BACKWARD)
    region = drawing.region()
    level = drawing.names(region.batch_level)
    assert "stack" in level and "forward/push" in level and "forward/merge" in level and "w" not in level
    late = drawing.names(region.late)
    assert "backward/pop" in late and "forward/push" not in late and "stack" not in late


def test_loop_that_reads_a_gradient_belongs_to_the_backward_step_as_a_whole():
    drawing = Drawing()
    drawing.op("x", "Placeholder", phase=Phase.INPUT)
    drawing.loop("loop", "x")
    drawing.op("gradient", "Mul", ["x", "x"], Phase.BACKWARD)
    drawing.op("captured", "Enter", ["gradient"], frame="loop")
    late = drawing.names(drawing.region().late)
    assert "loop/merge" in late and "loop/next" in late and "captured" in late


def test_loop_before_a_value_combined_over_all_clones_is_early_as_a_whole():
    drawing = Drawing()
    drawing.op("x", "Placeholder", phase=Phase.INPUT)
    drawing.loop("loop", "x", body=("body", "dead_end"))
    drawing.op("loop/push", "StackPushV2", ["loop/body"])
    mean = drawing.op("mean", "Mean", ["loop/exit"])
    after = drawing.op("after", "Sub", ["x", mean.name])
    region = drawing.region(conversions={(after.id, 1): (Reduce("sum"),)})
    early = drawing.names(region.early)
    assert "mean" in early and "loop/push" in early and "loop/next" in early and "after" not in early


def test_what_an_update_is_computed_from_is_early_where_its_variable_is_read_again():
    """``x -> a -> write w -> read w again -> b``; a moving average that an op waits for is not read by it."""
    drawing = Drawing()
    drawing.op("x", "Placeholder", phase=Phase.INPUT)
    drawing.op("w", "VarHandleOp", dtype="resource")
    drawing.op("average", "VarHandleOp", phase=Phase.OTHER, dtype="resource")
    drawing.op("a", "AddV2", ["x", drawing.op("read", "ReadVariableOp", ["w"]).name])
    drawing.op("scaled", "Neg", ["a"], Phase.APPLY)
    drawing.op("write", "AssignSubVariableOp", ["w", "scaled"], Phase.APPLY)
    drawing.op("group", "NoOp", phase=Phase.APPLY, controls=["write"])
    drawing.op("moved", "AssignVariableOp", ["average", "scaled"], Phase.OTHER)
    again = drawing.op("again", "ReadVariableOp", ["w"], controls=["group", "moved"])
    drawing.op("b", "AddV2", ["x", "again"])
    drawing.op("late", "ReadVariableOp", ["w"], controls=["moved"])
    region = drawing.region()
    assert region.rereads == {again.id: frozenset({drawing.graph.op("group").id})}
    assert drawing.names(region.early) == ["a"] and drawing.names(region.batch_level) == ["a", "b"]
