"""Strategy transformations carried out on real arrays: every device ends up with exactly its part."""

from __future__ import annotations

from typing import Dict, List, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whale_tf.simulator.configs import PARTIAL, REPLICATED, TensorAxis, TensorConfig, coordinates
from whale_tf.simulator.transformation import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    SEND_RECV,
    Communication,
    transformation,
)

SHAPE = (24, 24)
Box = Tuple[Tuple[int, int], ...]
State = Dict[int, np.ndarray]  # device -> the whole tensor, NaN where it holds nothing


def boxes(config: TensorConfig) -> Dict[int, Box]:
    """Which rows and columns every device holds."""
    result: Dict[int, Box] = {}
    for device, point in zip(config.devices, coordinates(tuple(axis.degree for axis in config.axes))):
        intervals = [(0, extent) for extent in SHAPE]
        for axis, index in zip(config.axes, point):
            if axis.what >= 0:
                low, high = intervals[axis.what]
                parts = axis.slices or (1,) * axis.degree
                unit = (high - low) // sum(parts)
                intervals[axis.what] = (low + unit * sum(parts[:index]), low + unit * sum(parts[: index + 1]))
        result[device] = tuple(intervals)
    return result


def cut(box: Box) -> Tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in box)


def placed(whole: np.ndarray, config: TensorConfig, seed: int) -> State:
    """The tensor as ``config`` says; along partial axes random summands that add up to it."""
    random = np.random.RandomState(seed)
    degrees = tuple(axis.degree for axis in config.axes)
    partial = [i for i, axis in enumerate(config.axes) if axis.what == PARTIAL]
    count = int(np.prod([degrees[i] for i in partial], dtype=int))
    summands = [random.randint(-9, 9, SHAPE).astype(float) for _ in range(count - 1)]
    summands.append(whole - sum(summands) if summands else whole)
    state: State = {}
    for device, point in zip(config.devices, coordinates(degrees)):
        number = 0
        for i in partial:
            number = number * degrees[i] + point[i]
        state[device] = np.full(SHAPE, np.nan)
        where = cut(boxes(config)[device])
        state[device][where] = summands[number][where]
    return state


def carry_out(state: State, step: Communication) -> State:
    """One communication: nobody uses anything but what the members of its group hold."""
    wanted = boxes(step.result)
    after: State = {device: state.get(device, np.full(SHAPE, np.nan)).copy() for device in wanted}
    for group in step.groups:
        for device in group.devices:
            if device not in wanted:
                continue
            where = cut(wanted[device])
            if step.kind in (ALL_REDUCE, REDUCE_SCATTER):
                after[device][where] = sum(state[member][where] for member in group.devices)
                continue
            senders = [a for a, b, _ in group.pairs if b == device] if group.pairs else list(group.devices)
            for sender in senders:
                have = ~np.isnan(state[sender])
                after[device][have] = state[sender][have]
    return {device: _only(array, wanted[device]) for device, array in after.items()}


def _only(array: np.ndarray, box: Box) -> np.ndarray:
    result = np.full(SHAPE, np.nan)
    result[cut(box)] = array[cut(box)]
    return result


def configs(devices: List[int], partial: bool) -> st.SearchStrategy:
    whats = [REPLICATED, 0, 1] + ([PARTIAL] if partial else [])

    def axes(degrees: Tuple[int, ...]) -> st.SearchStrategy:
        return st.tuples(
            *[st.sampled_from(whats).map(lambda what, degree=degree: TensorAxis(degree, what)) for degree in degrees]
        )

    count = len(devices)
    shapes = [
        shape
        for shape in [(count,), (2, count // 2), (count // 2, 2), (2, 2, count // 4)]
        if int(np.prod(shape)) == count and min(shape) > 1
    ]
    return st.sampled_from(shapes).flatmap(axes).map(lambda row: TensorConfig(tuple(devices), row))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_device_gets_its_part(data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([2, 4, 8]))
    before = data.draw(configs(list(range(count)), partial=True))
    elsewhere = data.draw(st.booleans())
    after = data.draw(
        configs(
            list(range(count, count + data.draw(st.sampled_from([2, 4, 8])))) if elsewhere else list(range(count)),
            partial=False,
        )
    )
    whole = np.random.RandomState(0).randint(-99, 99, SHAPE).astype(float)
    state = placed(whole, before, seed=1)
    for step in transformation(before, after):
        state = carry_out(state, step)
    for device, box in boxes(after).items():
        np.testing.assert_array_equal(state[device][cut(box)], whole[cut(box)])


def config(*axes: Tuple[int, int]) -> TensorConfig:
    count = int(np.prod([degree for degree, _ in axes]))
    return TensorConfig(tuple(range(count)), tuple(TensorAxis(*axis) for axis in axes))


@pytest.mark.parametrize(
    "before, after, kinds",
    [
        (config((4, PARTIAL)), config((4, REPLICATED)), [ALL_REDUCE]),
        (config((4, PARTIAL)), config((4, 0)), [REDUCE_SCATTER]),
        (config((4, 0)), config((4, REPLICATED)), [ALL_GATHER]),
        (config((4, 0)), config((4, 1)), [ALL_TO_ALL]),
        (config((4, REPLICATED)), config((4, 1)), []),
        (config((8, 0)), config((4, 0), (2, 0)), []),
        (config((2, 0), (2, PARTIAL)), config((2, 0), (2, REPLICATED)), [ALL_REDUCE]),
        (config((2, PARTIAL), (2, 1)), config((2, REPLICATED), (2, REPLICATED)), [ALL_REDUCE, ALL_GATHER]),
        (config((2, 0), (3, 1)), config((3, 0), (2, 1)), [SEND_RECV]),
    ],
)
def test_patterns(before: TensorConfig, after: TensorConfig, kinds: List[str]) -> None:
    assert [step.kind for step in transformation(before, after)] == kinds


def test_all_reduce_groups_and_size() -> None:
    (step,) = transformation(config((2, 0), (2, PARTIAL)), config((2, 0), (2, REPLICATED)))
    assert [group.devices for group in step.groups] == [(0, 1), (2, 3)]
    assert step.fraction == 0.5


def test_uneven_slices_cross_to_equal_ones_by_exactly_what_is_missing() -> None:
    before = TensorConfig((0, 1), (TensorAxis(2, 0, (1, 3)),))
    after = TensorConfig((0, 1), (TensorAxis(2, 0),))
    (step,) = transformation(before, after)
    assert step.groups[0].pairs == ((1, 0, 0.25),)
    whole = np.arange(float(np.prod(SHAPE))).reshape(SHAPE)
    state = carry_out(placed(whole, before, 0), step)
    np.testing.assert_array_equal(state[0][:12], whole[:12])


def test_split_concat_between_stages_sends_every_byte_once() -> None:
    """DAPPLE Fig. 9: from 3 replicas to 2, each receiver gets its half and nothing twice."""
    before = TensorConfig((0, 1, 2), (TensorAxis(3, 0),))
    after = TensorConfig((3, 4), (TensorAxis(2, 0),))
    (step,) = transformation(before, after)
    received = {
        device: sum(size for _, b, size in group.pairs if b == device)
        for group in step.groups
        for device in group.devices
        if device >= 3
    }
    assert received == pytest.approx({3: 0.5, 4: 0.5})
