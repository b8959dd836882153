from __future__ import annotations

import itertools

from tests.numeric.pairwise import all_pairs, full_product, pairs_of

AXES = {"a": "uvwx", "b": (1, 2, 3), "c": (True, False), "d": "pq"}


def test_every_pair_meets() -> None:
    met = set().union(*(pairs_of(row, AXES) for row in all_pairs(AXES)))
    expected = {(a, x, b, y) for a, b in itertools.combinations(AXES, 2) for x in AXES[a] for y in AXES[b]}
    assert met == expected


def test_close_to_the_lower_bound() -> None:
    """At least the product of the two longest axes is needed."""
    assert 12 <= len(all_pairs(AXES)) <= 15
    assert len(full_product(AXES)) == 48


def test_forbidden_rows_stay_out() -> None:
    def allowed(row: dict) -> bool:
        return not (row.get("a") == "u" and row.get("b") == 2)

    rows = all_pairs(AXES, allowed)
    assert all(allowed(row) for row in rows)
    assert {(row["a"], row["b"]) for row in rows} == set(itertools.product("uvwx", (1, 2, 3))) - {("u", 2)}


def test_pairs_that_need_not_meet_leave_shorter_lists() -> None:
    def needed(row: dict) -> bool:
        return set(row) != {"a", "b"}

    rows = all_pairs(AXES, needed=needed)
    met = set().union(*(pairs_of(row, AXES) for row in rows))
    expected = {(a, x, b, y) for a, b in itertools.combinations(AXES, 2) if {a, b} != {"a", "b"}
                for x in AXES[a] for y in AXES[b]}
    assert met >= expected and len(rows) < len(all_pairs(AXES))
