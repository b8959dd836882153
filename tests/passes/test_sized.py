"""Sizes that both ends of a message know before it is sent."""
from __future__ import annotations

from typing import Dict, List, Sequence, Set, Tuple

from tests.ir.graphs import Draft
from whale_tf.ir.extents import Size
from whale_tf.ir.sizes import OpenSizes, Sizes
from whale_tf.passes.partition import Crossing
from whale_tf.passes.sized import KnownSizes

FIRST, SECOND, BOTH = {0}, {1}, {0, 1}


def known(draft: Draft, runs: Sequence[Set[int]], crossing: Sequence[Tuple[int, int]],
          common: Sequence[int] = ()) -> List[Dict[int, Sizes]]:
    """What is known of tensors that cross.

    Args:
        crossing: each one, and its receiver.
        common: tensors of ops that any process may run.
    """
    ops = draft.graph
    values = [((ops.tensors[tensor].op, ops.tensors[tensor].index), 1 - receiver, receiver) for tensor, receiver in crossing]
    shared = {ops.tensors[tensor].op for tensor in common}
    found = KnownSizes(OpenSizes(ops), [Crossing(*value) for value in values], runs, shared.__contains__).found
    return [dict(found.get(output, {})) for output, _, _ in values]


def dim(tensor: int, d: int = 0) -> Size:
    return Size.of(("dim", tensor, d))


def test_sizes_follow_from_an_input_of_both() -> None:
    draft = Draft()
    x = draft.source(None, 6)
    product = draft.op("MatMul", [x, draft.variable(6, 4)], (None, 4))
    flat = draft.op("Reshape", [product, draft.const([-1, 2])], (None, 2))
    sizes = (2 * dim(x), 2)
    assert known(draft, [BOTH, FIRST, FIRST, BOTH, FIRST], [(flat, 1)]) == [{0: sizes, 1: sizes}]


def test_input_of_one_process_is_known_to_the_other_by_what_it_receives() -> None:
    """An activation needs a message with its sizes, its gradient does not."""
    draft = Draft()
    x = draft.source(None, 6)
    activation = draft.op("Relu", [x], (None, 6))
    gradient = draft.op("Tanh", [draft.op("Relu", [activation], (None, 6))], (None, 6))
    found = known(draft, [FIRST, FIRST, SECOND, SECOND], [(activation, 1), (gradient, 0)])
    assert found == [{}, {0: (dim(x), 6), 1: (dim(activation), 6)}]


def test_numbers_of_both_are_computed_where_they_are_needed() -> None:
    """The parts of a mini-batch have lengths that any process can compute, although only one takes the parts."""
    draft = Draft()
    x, lengths = draft.source(None, 6), draft.source(2, dtype="int32")
    two = draft.const(2)
    halves = draft.op("FloorDiv", [lengths, two], (2,), dtype="int32")
    parts = draft.op("SplitV", [x, halves, draft.const(0)], (None, 6), (None, 6))
    part = draft.op("Relu", [parts + 1], (None, 6))
    runs = [FIRST, BOTH, {0}, {0}, FIRST, FIRST, FIRST]
    assert known(draft, runs, [(part, 1)], [two, halves]) == [{0: (dim(parts + 1), 6), 1: (Size.of(("value", halves, 1)), 6)}]
    assert runs == [FIRST, BOTH, BOTH, BOTH, FIRST, FIRST, FIRST]
    assert known(draft, [FIRST] * 7, [(part, 1)], [two, halves]) == [{}]  # the lengths are not there


def test_rows_chosen_by_data_are_known_after_their_first_message() -> None:
    draft = Draft()
    x = draft.source(None, 6)
    rows = draft.op("Where", [draft.op("Cast", [x], (None, 6), dtype="bool")], (None, 2), dtype="int64")
    more = draft.op("Neg", [rows], (None, 2), dtype="int64")
    first, second = known(draft, [BOTH, FIRST, FIRST, FIRST], [(rows, 1), (more, 1)])
    assert first == {} and second[1] == (dim(rows), 2)


def test_what_comes_later_does_not_count() -> None:
    """The second process could only know the size from what follows from the message."""
    draft = Draft()
    x = draft.source(None)
    value = draft.op("Relu", [x], (None,))
    draft.op("Tanh", [draft.op("Relu", [value], (None,))], (None,))
    assert known(draft, [FIRST, FIRST, SECOND, SECOND], [(value, 1)]) == [{}]
