"""Programs over several inputs of open sizes equal the local script, or are refused: a few, and 5,000 in `make fuzz`."""
from __future__ import annotations

import random
from typing import Dict, List

import hypothesis
import pytest

from tests.functions.equality import Way
from tests.numeric import input_programs
from tests.numeric.generated_inputs import _cuts, numbered, programs
from tests.numeric.generation import EXAMPLES, PARAMETERS, check_part
from tests.numeric.input_programs import FAILURES, Input, Line, Program, Verdict, is_whole, judge, run
from tests.numeric.shrink_inputs import shrink

ONE = Program((Input("u", "open", (4, 6, 5)), Input("x", "open", (8, 4, 7))), (("w0", (3, 3)),),
              (Line(("v0",), "tf.concat([u, x], 0)", ("u", "x")), Line(("v1",), "tf.tanh(v0)", ("v0",)),
               Line(("v2",), "tf.matmul(v1, w0)", ("v1", "w0"))),
              ("tf.reduce_mean(tf.square(v2))", "tf.reduce_sum(v1)"), (), ("v1",), "sgd",
              Way((), 2, {"num_micro_batch": 2}), is_function=False)
SIMPLE = ONE._replace(inputs=ONE.inputs[:1], lines=(Line(("v2",), "tf.matmul(u, w0)", ("u", "w0")),), terms=ONE.terms[:1],
                      outputs=())


@pytest.mark.slow
@pytest.mark.parametrize("part", PARAMETERS)
def test_generated_inputs(part: int) -> None:
    check_part(part, programs, check, EXAMPLES)


def check(program: Program) -> None:
    with input_programs.quiet():
        verdict = judge(program)
    if verdict.kind == "invalid":
        hypothesis.reject()
    assert verdict.kind not in FAILURES, f"{verdict.kind}: {verdict.detail}\n{program}"


@pytest.mark.slow
def test_local_scripts_of_generated_programs_run() -> None:
    found = [judge_locally(numbered(0, number)) for number in range(12)]
    assert found.count(True) >= 11


def judge_locally(program: Program) -> bool:
    return bool(run(program).losses["loss"])


@pytest.mark.slow
def test_program_with_one_wrong_number_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge(SIMPLE) == Verdict("divided")
    calls: List[float] = []
    compare = input_programs.differences

    def wrong(outcome, expected, tolerance):  # noqa: ANN001, ANN202
        calls.append(tolerance)
        if len(calls) > 1:  # the first one asks whether the local numbers are finite
            outcome = outcome._replace(losses={"loss": [value * (1 + 1e-6) for value in outcome.losses["loss"]]})
        return compare(outcome, expected, tolerance)

    monkeypatch.setattr(input_programs, "differences", wrong)
    verdict = judge(SIMPLE)
    assert verdict.kind == "wrong" and "loss of run 0 is off by 1.0e-06 (3 runs of 3)" in verdict.detail


@pytest.mark.slow
@pytest.mark.parametrize("raised, kind", [
    (input_programs.tf.errors.InvalidArgumentError(None, None, "Incompatible shapes: [3] vs. [4]"), "raw"),
    (KeyError("dim"), "error"),
    (input_programs.wh.InputError("'u:0' is fed 3 examples; feed at least 4"), "refused"),
    (input_programs.wh.PlanError("no"), "raw"),  # says nothing
])
def test_error_under_the_plan_is_judged_by_its_kind(monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: str) -> None:
    def fail() -> str:
        raise raised

    monkeypatch.setattr(input_programs.wh, "explain", fail)
    assert judge(SIMPLE).kind == kind


def test_source_has_the_stages_in_it() -> None:
    assert ONE._replace(way=Way((1, 1), 2, {}), cuts=(1, 2, 3)).source() == """\
def build(stage, u, x, w0):
    v0 = tf.concat([u, x], 0)
    with stage[0]():
        v1 = tf.tanh(v0)
    with stage[1]():
        v2 = tf.matmul(v1, w0)
        loss = tf.reduce_mean(tf.square(v2)) + tf.reduce_sum(v1)
    return loss, [v1]"""


def test_lines_that_nothing_needs_are_left_out() -> None:
    found = ONE._replace(terms=("tf.reduce_mean(v1)",), cuts=(0, 2, 3), outputs=()).tidy()
    assert [line.names for line in found.lines] == [("v0",), ("v1",)] and found.cuts == (0, 2, 2) and not found.weights


def test_every_stage_has_a_line() -> None:
    for seed in range(200):
        for lines in range(2, 6):
            first, second, last = _cuts(random.Random(seed), 2, lines)
            assert 0 <= first < second < last <= lines


def test_failing_program_shrinks_to_what_makes_it_fail() -> None:
    def fails(program: Program) -> Verdict:
        return Verdict("wrong" if "tf.concat([u, x], 0)" in program.source() else "divided")

    found, _ = shrink(ONE, Verdict("wrong"), fails)
    assert found.steps == 1 and found.terms == ("tf.reduce_sum(v0)",) and not found.outputs
    assert [line.code for line in found.lines] == ["tf.concat([u, x], 0)"] and found.way == Way((), 2, {})


@pytest.mark.parametrize("taken, expected", [
    ("8 B", False), ("tensors of open sizes", True), ("24 B and tensors of open sizes", True), ("nothing", True),
    ("1.5 KiB", True), (None, False)])
def test_is_whole_where_rows_are_taken_from_clones(taken: str, expected: bool) -> None:
    line = f"4 ops need all examples together and run once per mini-batch. They\ntake {taken} from the clones. The clones'"
    assert is_whole(line if taken else "Exact: the parallel result") == expected


def test_number_of_a_seed_is_always_the_same_program() -> None:
    kinds: Dict[str, int] = {}
    for number in range(40):
        first, second = numbered(3, number), numbered(3, number)
        assert str(first) == str(second)
        for item in first.inputs:
            kinds[item.kind] = kinds.get(item.kind, 0) + 1
    assert {"open", "ids", "ragged", "sparse", "weights", "static"} <= set(kinds)
