"""Compares the local and the divided step's numbers, and says where they first differ.

The rule.  ``n`` elements ``a`` of the divided step equal the local step's ``e`` if ``|a - e| <= t max(|e|, f sqrt(n))`` in the
Euclidean norm.  ``t`` follows from the float type of fewest digits that the value went through: 1e-10 for float64, 1e-5 for
float32 (1e-3 where a GPU multiplies in TF32), 1e-2 for float16 and 8e-2 for bfloat16.  ``f`` is the size below which an element
is the rounding error of larger ones: a tenth of the largest root mean square in the backward pass there, otherwise 0.01.  New
values of variables are compared with what they changed by, ``|a - e| <= t |e - old| + 8 u |old|`` with the type's rounding
unit ``u``, for both steps compute them from the same gradients.  Integers and booleans must be equal.

If more than that differs, the local step runs again with its variables moved by a few ``u``.  How far its own result moves then
is what rounding may do to this model (a ReLU at 0, the larger of two equal numbers), and four times that is no difference.

Scaled gradients may overflow, perhaps in one order of a sum and not in another.  The loss scale then skips the step, so that it
shows nothing about such gradients.
"""
from __future__ import annotations

import io
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from rich.console import Console
from rich.table import Table

from whale_tf.errors import MismatchError

TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "tf32": 1e-3, "float16": 1e-2, "bfloat16": 8e-2}
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "tf32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LEAST, OF_LARGEST = 0.01, 0.1  # f
MOVES = 4.0  # how far beyond the local step's own movement a difference may be
LOSS, GRADIENT, TENSOR, VALUE = "result", "gradient", "tensor", "new value"


class Item(NamedTuple):
    """What is compared.

    Attributes:
        name: in the local script.
        what: LOSS, GRADIENT, TENSOR or VALUE.
        order: place in the topological order.
        task_graph: name of its TaskGraph; "": outside of all.
        divided: how the divided step has it.
        is_backward: whether it is computed from a gradient.
        dtype: a key of TOLERANCE, or anything else for exact equality.
        found, expected: the divided and the local step's values.
        before: a variable's old value, if both steps compute the new one from the same gradients.
        is_scaled: whether it follows from a loss that is multiplied by a loss scale.
    """

    name: str
    what: str
    order: int
    task_graph: str
    divided: str
    dtype: str
    found: np.ndarray
    expected: np.ndarray
    is_backward: bool = False
    before: Optional[np.ndarray] = None
    is_scaled: bool = False

    @property
    def overflows(self) -> bool:
        """Whether a loss scale skips the step because of it."""
        return self.is_scaled and not all(np.all(np.isfinite(_as_float(one))) for one in (self.found, self.expected))


class Compared(NamedTuple):
    """``difference`` and ``tolerance`` are norms; ``moved``: how far the local step's own result moves with its variables."""

    item: Item
    difference: float
    tolerance: float
    moved: float = 0.0

    @property
    def allowed(self) -> float:
        return max(self.tolerance, MOVES * self.moved)

    @property
    def is_equal(self) -> bool:
        return self.item.overflows or self.difference <= self.allowed


Comparison = Tuple[List[Compared], Dict[str, str]]  # and what could not be compared -> why


def compare(items: Sequence[Item], moved: Optional[Callable[[], Dict[str, np.ndarray]]] = None) -> List[Compared]:
    """The comparison of all items, in topological order.

    Args:
        moved: values by ``what name`` of the local step with moved variables; called only if something differs.
    """
    sizes = [_norm(item.expected) / item.expected.size**0.5 for item in items
             if item.is_backward and item.expected.size and item.dtype in TOLERANCE]
    largest = max(filter(np.isfinite, sizes), default=0.0)
    found = [_compared(item, largest) for item in sorted(items, key=lambda item: item.order)]
    if moved is None or all(one.is_equal for one in found):
        return found
    again = moved()
    for place, one in enumerate(found):
        other = again.get(key(one.item))
        if other is not None and not one.is_equal and np.shape(other) == one.item.expected.shape:
            found[place] = one._replace(moved=_norm(_as_float(other) - _as_float(one.item.expected)))
    return found


def key(item: Item) -> str:
    return f"{item.what} {item.name}"


def _as_float(value: np.ndarray) -> np.ndarray:
    return np.asarray(value, np.complex128 if np.iscomplexobj(value) else np.float64)


def _norm(value: np.ndarray) -> float:
    return float(np.linalg.norm(_as_float(value).reshape(-1)))


def _compared(item: Item, largest: float) -> Compared:
    one, other = np.asarray(item.found), np.asarray(item.expected)
    if one.shape != other.shape:
        return Compared(item, float("inf"), 0.0)
    if item.dtype not in TOLERANCE or one.dtype == np.bool_ or np.issubdtype(one.dtype, np.integer):
        return Compared(item, float(np.count_nonzero(one != other)), 0.0)
    same = (one == other) | (np.isnan(_as_float(one)) & np.isnan(_as_float(other)))  # equal infinities, and nan in both
    difference = _norm(np.where(same, 0, _as_float(one) - np.where(same, 0, _as_float(other))) * ~same)
    if not np.isfinite(difference):
        return Compared(item, float("inf"), 0.0)
    tolerance, finite = TOLERANCE[item.dtype], np.where(np.isfinite(_as_float(other)), _as_float(other), 0)
    if item.before is not None:
        change = _norm(finite - _as_float(item.before))
        return Compared(item, difference, tolerance * change + 8 * UNIT[item.dtype] * _norm(item.before))
    least = OF_LARGEST * largest if item.is_backward and largest else LEAST
    return Compared(item, difference, tolerance * max(_norm(finite), least * other.size**0.5))


def check(found: Sequence[Compared], where: str) -> None:
    """Raises:
        MismatchError: something differs; it names the first such tensor in topological order.
    """
    wrong = [one for one in found if not one.is_equal]
    if not wrong:
        return
    item, first = wrong[0].item, wrong[0]
    if np.shape(item.found) != np.shape(item.expected):
        sizes = f"its shape is {np.shape(item.found)} in the divided step and {np.shape(item.expected)} in the local one"
    elif item.dtype in TOLERANCE:
        sizes = (f"norm {_norm(item.found):.6g} in the divided step and {_norm(item.expected):.6g} in the local one; they differ "
                 f"by {first.difference:.2g}, and {first.allowed:.2g} is allowed for {item.dtype}")
    else:
        sizes = f"{first.difference:.0f} of {item.expected.size} elements differ, and all must be equal"
    raise MismatchError(
        f"the first training step of {where} is not the local one: {item.what} {item.name!r}"
        f"{f' of TaskGraph {item.task_graph!r}' if item.task_graph else ''} ({item.divided}): {sizes}. It is the first of "
        f"{len(wrong)} values that differ, of {len(found)} compared. This is a fault of whale_tf unless the script itself gives "
        "other numbers each time: please report it with the text of wh.explain(); verify 'off' trains without the comparison",
        item.name, item.task_graph)


def is_skipped(found: Sequence[Compared]) -> bool:
    """Whether a loss scale skips the step."""
    return any(one.item.overflows for one in found)


def skipped(where: str) -> str:
    """What is said about such a step."""
    return f"verify: the loss scale skips this step of {where}, whose gradients are not finite; the next one is compared"


def shown(found: Sequence[Compared]) -> Table:
    """All comparisons as a table."""
    rows = Table("what", "tensor", "TaskGraph", "shape", "how divided", "difference", "allowed", "equal")
    for one in found:
        rows.add_row(one.item.what, one.item.name, one.item.task_graph, "x".join(map(str, one.item.expected.shape)),
                      one.item.divided, f"{one.difference:.1e}", f"{one.allowed:.1e}",
                      "skipped" if one.item.overflows else "yes" if one.is_equal else "NO")
    return rows


def table(found: Sequence[Compared], width: int = 160) -> str:
    """The same as text."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_jupyter=False).print(shown(found), highlight=False, markup=False)
    return out.getvalue()


def summary(found: Sequence[Compared], left_out: Dict[str, str], delayed_s: float, where: str) -> str:
    """One line: what was compared, and by how much it delayed the step."""
    counts = {what: sum(one.item.what == what for one in found) for what in (LOSS, GRADIENT, VALUE, TENSOR)}
    parts = [f"{count} {what}{'s' * (count != 1)}" for what, count in counts.items() if count]
    floats = [one.difference / one.allowed for one in found if one.allowed and not one.item.overflows]
    overflows = sum(one.item.overflows for one in found)
    skipped = f", but the loss scale skips it because of {overflows} of them, which are not finite" if overflows else ""
    text = (f"verify: the first step of {where} equals the local one in {', '.join(parts)} (largest difference "
            f"{max(floats, default=0.0):.1g} of the tolerance){skipped}; this delayed it by {delayed_s:.1f} s")
    if left_out:
        names = list(left_out)
        text += ". Not compared: {}{}".format(
            "; ".join(f"{name} ({left_out[name]})" for name in names[:6]), f" and {len(names) - 6} more" * (len(names) > 6))
    return text
