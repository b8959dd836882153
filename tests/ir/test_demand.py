"""Which ops each update needs."""
from __future__ import annotations

from typing import Any

from whale_tf.ir.demand import find_demand
from whale_tf.ir.graph import CALL_ATTR, OpGraph, Phase
from whale_tf.ir.region import Region


def two_updates() -> OpGraph:
    """``x -> a``, ``z -> b -> c``; one update needs ``a`` and ``b``, the other one only ``b``."""
    graph = OpGraph()

    def add(name: str, op_type: str, *inputs: str, phase: Phase = Phase.FORWARD, **attrs: Any) -> None:
        graph.add(name, op_type, [graph.tensor(each) for each in inputs], [((2,), "float32")], phase=phase, attrs=attrs)

    for name in ("x", "y", "z"):
        add(name, "Placeholder", phase=Phase.INPUT)
    add("a", "Tanh", "x")
    add("b", "Tanh", "z")
    add("score", "Mul", "b", "y")
    add("shown", "Neg", "b")
    add("own", "Sin", "b")
    add("watched", "Neg", "own")
    add("both", "AddN", "a", "own", phase=Phase.BACKWARD, **{CALL_ATTR: 0})
    add("one", "Neg", "b", phase=Phase.BACKWARD, **{CALL_ATTR: 1})
    add("write_both", "ResourceApplyGradientDescent", "both", phase=Phase.APPLY)
    add("write_one", "ResourceApplyGradientDescent", "one", phase=Phase.APPLY)
    return graph


def region_of(graph: OpGraph, in_function: bool = False) -> Region:
    ops = tuple(op.id for op in graph.ops if op.phase in (Phase.FORWARD, Phase.BACKWARD))
    return Region(graph, ops, set(ops), [0] * len(graph.ops), set(), set(), None, in_function=in_function)  # type: ignore[arg-type]


def test_op_waits_only_for_what_its_updates_need() -> None:
    graph = two_updates()
    demand = find_demand(region_of(graph))

    def implies(op: str, before: str) -> bool:
        return demand.implies(demand.of([graph.op(op).id]), graph.op(before).id)

    assert implies("a", "both") and implies("a", "b") and implies("one", "b") and implies("b", "b")
    assert not implies("b", "a") and not implies("b", "both") and not implies("one", "a")
    assert implies("one", "shown") and implies("a", "shown")  # nobody needs it, but it needs nothing more
    assert implies("a", "watched") and not implies("one", "watched")  # it would make the other update's ops run
    assert not implies("a", "score") and not implies("one", "score")  # what the score needs is not fed
    assert not implies("shown", "both") and implies("shown", "b")  # may be fetched beside either
    assert not demand.is_single


def test_function_runs_as_a_whole() -> None:
    graph = two_updates()
    demand = find_demand(region_of(graph, in_function=True))
    assert demand.is_single and demand.implies(demand.of([graph.op("b").id]), graph.op("both").id)


def test_one_update_needs_everything() -> None:
    graph = two_updates()
    last = graph.op("write_one")
    last.phase = Phase.OTHER
    graph.op("score").phase = Phase.OTHER
    demand = find_demand(region_of(graph))
    assert demand.is_single and demand.implies(demand.of([graph.op("b").id]), graph.op("both").id)
