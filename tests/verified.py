"""A pytest plugin: every training step that a test divides is verified (``verify: "first_step"``), whatever its configuration.

    python -m pytest -p tests.verified tests/numeric/test_matrix.py                 a pairwise share of the numeric matrix
    python -m pytest -p tests.verified --full tests/numeric/test_matrix.py          every row
    python -m pytest -p tests.verified tests/functions/test_matrix.py               functions and fit

A false alarm fails the test as wh.MismatchError.  The end of the run says how many steps were compared.
"""
from __future__ import annotations

from typing import Any, List

from whale_tf.runtime.active import Active
from whale_tf.runtime.verifying import compare

compared: List[int] = []  # numbers of values, one for each step


def pytest_configure(config: Any) -> None:
    Active.verifies = property(lambda self: True)  # type: ignore[assignment, method-assign]
    original = compare.check

    def check(found: Any, where: str) -> None:
        compared.append(len(found))
        original(found, where)

    compare.check = check


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"verify: {len(compared)} first steps were compared, with {sum(compared)} values")
