"""All-pairs selection: a small set of combinations in which every two values of two axes meet at least once."""
from __future__ import annotations

import itertools
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

Row = Dict[str, Any]
Pair = Tuple[str, Any, str, Any]  # axis, its value, another axis, its value; axes in their order


def _always(row: Row) -> bool:
    return True


def full_product(axes: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = _always) -> List[Row]:
    """Every combination that ``allowed`` accepts, in order."""
    rows = (dict(zip(axes, values)) for values in itertools.product(*axes.values()))
    return [row for row in rows if allowed(row)]


def pairs_of(row: Row, axes: Mapping[str, Sequence[Any]]) -> Set[Pair]:
    """The pairs of values that meet in ``row``, which may lack some axes."""
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations((a for a in axes if a in row), 2)}


def all_pairs(axes: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = _always,
              needed: Callable[[Row], bool] = _always) -> List[Row]:
    """Combinations that cover every allowed pair of values; greedy and deterministic (after AETG, Cohen et al. 1997).

    Each row starts from the first pair not met yet; every further axis, the longest first, takes the value that meets
    most of the missing pairs, among equals the one used least.

    Args:
        axes: values of each axis; values are hashable.
        allowed: judges a row, also one that lacks some axes; must accept it where the lacking axes could still save it.
        needed: judges a row of two axes: whether their values must meet.
    """
    pairs = (((a, x, b, y), {a: x, b: y}) for a, b in itertools.combinations(axes, 2) for x in axes[a] for y in axes[b])
    missing = dict.fromkeys(pair for pair, row in pairs if allowed(row) and needed(row))
    used: Dict[Tuple[str, Any], int] = {}
    rows: List[Row] = []
    while missing:
        a, x, b, y = next(iter(missing))
        row = _fill({a: x, b: y}, axes, allowed, missing, used)
        if row is None:
            raise ValueError(f"no allowed row holds both {a}={x!r} and {b}={y!r}")
        rows.append(row)
        for pair in pairs_of(row, axes):
            missing.pop(pair, None)
        for item in row.items():
            used[item] = used.get(item, 0) + 1
    return rows


def _fill(row: Row, axes: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], missing: Mapping[Pair, None],
          used: Mapping[Tuple[str, Any], int]) -> Optional[Row]:
    """``row`` with a value for every axis, or None where no value of some axis is allowed."""
    for axis in sorted((a for a in axes if a not in row), key=lambda a: -len(axes[a])):
        options = [value for value in axes[axis] if allowed(dict(row, **{axis: value}))]
        if not options:
            return None

        def gain(value: Any) -> Tuple[int, int]:
            met = sum(pair in missing for pair in pairs_of(dict(row, **{axis: value}), axes))
            return met, -used.get((axis, value), 0)

        row = dict(row, **{axis: max(options, key=gain)})
    return row
