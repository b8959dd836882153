"""Between TaskGraphs that cut a micro-batch at different places: whose values a clone needs, by the tensor's layout."""

from __future__ import annotations

from typing import Any, List

import pytest

from tests.passes.drawings import chain, plan
from whale_tf.ir.batch_axis import EXTENT
from whale_tf.ir.layout import Layout, partial, replicated, sharded
from whale_tf.passes import compile_program
from whale_tf.passes.replicate import pieces_of
from whale_tf.program import BRIDGE, Clone


def pieces(layout: Layout, counts: Any, replica: int, **more: Any) -> List[int]:
    step = chain(2)
    tensor = step.graph.tensor("layer0")
    step.region.batch.layouts[tensor] = layout
    found = pieces_of(step, plan(counts, 2, 2, **more), tensor, 1, Clone(1, 1, replica))
    assert all(piece[:2] == (1, 1) for piece in found)
    return [piece.r for piece in found]


@pytest.mark.parametrize("replica,expected", [(0, [0]), (1, [0, 1]), (2, [1])])
def test_parts_that_overlap(replica: int, expected: List[int]) -> None:
    assert pieces(sharded(0), [2, 3], replica) == expected


@pytest.mark.parametrize("layout", [partial(), partial(1), Layout("max"), Layout("any")])
def test_every_part_of_what_is_combined(layout: Layout) -> None:
    assert pieces(layout, [2, 3], 1) == [0, 1]


@pytest.mark.parametrize("replica,expected", [(0, [0]), (1, [1]), (2, [0])])
def test_replicas_take_turns_where_all_have_the_value(replica: int, expected: List[int]) -> None:
    assert pieces(replicated(), [2, 3], replica) == expected


def test_extent_follows_from_the_clone_itself() -> None:
    assert pieces(EXTENT, [2, 3], 1) == []


@pytest.mark.parametrize("counts,slices", [([2, 2], {}), ([2, 2], {0: {"slices": (1, 3)}, 1: {"slices": (1, 3)}})])
def test_equal_cuts_need_no_bridge(counts: List[int], slices: Any) -> None:
    assert pieces(sharded(0), counts, 1, tasks=slices) == [1] == pieces(partial(), counts, 1, tasks=slices)


def test_extent_crosses_by_a_bridge_that_takes_nothing() -> None:
    step, chosen = chain(2), plan([2, 3])
    tensor = step.graph.tensor("layer0")
    step.region.batch.layouts[tensor] = EXTENT
    program = compile_program(step, chosen)
    bridges = [call for call in program.calls if program.step_of(call) == BRIDGE and tensor in program.bodies[call.body].outputs]
    assert len(bridges) == 3 and not any(call.takes for call in bridges)
