"""Groups of examples in neighbouring rows: every second row, pairs, and bags are divided group by group."""
from __future__ import annotations

from typing import Any, Callable, List, Tuple

import pytest
import tensorflow as tf

from tests.functions.equality import Way, check
from tests.functions.test_loops_over_rows import DATA, DATA_4, Loss, rows, training

PIPELINE = Way((1, 1), 2, {"num_micro_batch": 2})
Groups = Tuple[tf.Tensor, tf.Tensor]  # features and targets
GroupsOf = Callable[[tf.Tensor, tf.Tensor], Groups]


def neighbours(z: tf.Tensor, y: tf.Tensor) -> Groups:
    """Pairs."""
    return tf.square(z[0::2] - z[1::2]), y[::2] * y[1::2]


def quadruples(z: tf.Tensor, y: tf.Tensor) -> Groups:
    one, two, three, four = (z[i::4] for i in range(4))
    return one * two - three * four, y[::4] + y[3::4]


def bags(z: tf.Tensor, y: tf.Tensor) -> Groups:
    return tuple(tf.reduce_max(tf.reshape(each, [-1, 4, each.shape[1]]), 1) for each in (z, y))


def every_second(z: tf.Tensor, y: tf.Tensor) -> Groups:
    """Nothing says that there is an even number of rows."""
    return z[::2], y[::2]


def both_halves(z: tf.Tensor, y: tf.Tensor) -> Groups:
    return z[::2] + tf.reduce_mean(z[1::2], 0), y[::2]


def loss_of(groups_of: GroupsOf) -> Loss:
    def loss(hidden: tf.Tensor, y: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
        features, targets = groups_of(hidden, y)
        return tf.reduce_mean(tf.square(tf.matmul(features, last) - targets))
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("groups_of, size, way", [
    (neighbours, None, DATA_4), (neighbours, 16, PIPELINE), (quadruples, None, PIPELINE), (quadruples, 16, DATA),
    (bags, None, DATA), (bags, 16, PIPELINE)])
def test_groups_are_divided(groups_of: GroupsOf, size: Any, way: Way) -> None:
    said: List[str] = []
    check(training(loss_of(groups_of), size, said), way, rows(16, 16) if size else rows(16, 24))
    assert f"Divided over {way.devices} devices: 100% of the floating-point" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("groups_of", [every_second, both_halves])
def test_every_second_row_of_an_odd_number_of_rows(groups_of: GroupsOf) -> None:
    check(training(loss_of(groups_of), None, []), DATA, rows(8, 9))
