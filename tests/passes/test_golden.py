"""The Programs of small steps as text, with their recipes lowered; four of them after each pass.

``python -m tests.passes.test_golden`` writes the files anew.  Read the difference before you commit it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.passes.programs import PROGRAMS
from whale_tf.passes import PASSES, parted
from whale_tf.passes.lowering import Lowering, lowered_text
from whale_tf.passes.verify import verify
from whale_tf.program import Program

GOLDEN = Path(__file__).parent / "golden"
EACH_PASS = ("nested", "split_after_replicas", "two_to_one", "whole_mini_batch")


def text_of(name: str) -> str:
    """The Program in the end, or after each pass that changes it."""
    step, plan = PROGRAMS[name]
    step = parted(step, plan)
    program, parts = Program(step.graph, ()), []
    for one in PASSES:
        before, program = program, one.run(program, step, plan)
        verify(program, step, plan, one)
        if name in EACH_PASS and program != before:
            parts.append(f"-- after {one.name}\n{program.to_text()}")
    return "\n".join([*parts, ("-- lowered\n" if parts else "") + lowered_text(Lowering(step, plan, program))])


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_program(name: str) -> None:
    assert text_of(name) == (GOLDEN / f"{name}.txt").read_text(encoding="utf8")


def test_every_file_belongs_to_a_program() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(PROGRAMS)


if __name__ == "__main__":
    for each in PROGRAMS:
        (GOLDEN / f"{each}.txt").write_text(text_of(each), encoding="utf8")
