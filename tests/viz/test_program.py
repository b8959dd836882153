"""Programs as pictures, and the page of the documents that shows four of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.passes.programs import PROGRAMS
from whale_tf.passes import compile_program
from whale_tf.program import BACKWARD, FORWARD

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["pipeline", "nested", "three_to_two", "split_after_replicas", "whole_mini_batch_twice"])
def test_boxes_wait_for_what_they_take_and_never_overlap(name: str) -> None:
    from whale_tf.viz.program import boxes

    program = compile_program(*PROGRAMS[name])
    found = boxes(program)
    end = {box.call: box.end for box in found}
    assert set(end) == set(range(len(program.calls)))
    for box in found:
        call = program.calls[box.call]
        waits = {source for value in call.takes for source in value.calls}.union(call.after)
        assert all(end[source] <= box.start + 1e-9 for source in waits)
    for device in {box.device for box in found}:
        row = sorted((box.start, box.end) for box in found if box.device == device)
        assert all(before[1] <= after[0] + 1e-9 for before, after in zip(row, row[1:]))


def test_pipeline_of_two_stages_is_as_full_as_its_schedule_allows() -> None:
    """1F1B with 4 micro-batches: a stage is busy 12 units of 15 (DAPPLE section II-A), communication aside."""
    from whale_tf.viz.program import boxes

    program = compile_program(*PROGRAMS["pipeline"])
    found = [box for box in boxes(program) if program.step_of(program.calls[box.call]) in (FORWARD, BACKWARD)]
    first, last = min(box.start for box in found), max(box.end for box in found)
    assert 15.0 <= last - first < 17.0


def test_one_call_for_forward_and_backward_is_as_long_as_two() -> None:
    from whale_tf.viz.program import boxes

    step, plan = PROGRAMS["data_parallel"]
    program = compile_program(step, replace(plan, emit="call"))
    lengths = {round(box.end - box.start, 6) for box in boxes(program) if program.step_of(program.calls[box.call]) == BACKWARD}
    assert lengths == {3.0}


def test_pictures_are_the_same_every_time() -> None:
    from whale_tf.viz.program import program_figure
    from whale_tf.viz.timeline import svg_text

    program = compile_program(*PROGRAMS["nested"])
    text = svg_text(program_figure(program))
    assert text == svg_text(program_figure(program)) and "synchronise" in text and "device 3" in text
    assert "GPU:3" in svg_text(program_figure(program, [f"GPU:{number}" for number in range(4)]))


@pytest.mark.once
def test_page_of_programs_is_true() -> None:
    from examples.programs import PLANS, page, program_of

    assert page({name: program_of(name) for name in PLANS}) == (DOCS / "programs.md").read_text(encoding="utf8")
    assert {path.stem for path in (DOCS / "programs").glob("*.svg")} == set(PLANS)


@pytest.mark.once
def test_page_of_schedules_is_true() -> None:
    from examples.schedules import SCHEDULES, page, program_of

    assert page({name: program_of(name) for name in SCHEDULES}) == (DOCS / "schedules.md").read_text(encoding="utf8")
    assert {path.stem for path in (DOCS / "schedules").glob("*.svg")} == set(SCHEDULES)
