"""Trains one function twice, as it is and under a plan, and compares every number."""
from __future__ import annotations

import contextlib
import inspect
from typing import Any, Callable, ContextManager, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

import whale_tf as wh
from whale_tf.plan import Plan

Scope = Callable[[], ContextManager]
Build = Callable[[Sequence[Scope]], Tuple[Callable[..., Any], Sequence[Any]]]  # scopes of stages -> step, variables
TOLERANCE = 1e-12  # float64


def clear_keras() -> None:
    """Forgets the names and settings of Keras.  Its garbage stays: to look for it takes a quarter second, longer than
    small tests."""
    clear = tf.keras.backend.clear_session
    clear(**({"free_memory": False} if "free_memory" in inspect.signature(clear).parameters else {}))


class Way(NamedTuple):
    """How a function is divided: device counts of its stages (none: no annotations), devices, configuration, the numbers of the
    stages that are ``split``, the cluster, and in how many parts processes share a mini-batch, with the number of this one's."""

    counts: Tuple[int, ...]
    devices: int
    config: Dict[str, Any]
    split: Tuple[int, ...] = ()
    cluster: str = ""  # empty: CPU devices of this process
    share: Tuple[int, int] = (1, 0)

    def scopes(self) -> List[Scope]:
        """The annotations of four stages; those that it has no count for have none."""
        def scope(number: int) -> Scope:
            if number >= len(self.counts):
                return contextlib.nullcontext
            strategy = wh.split if number in self.split else wh.replicate
            return lambda: strategy(self.counts[number], name=f"stage {number}")
        return [scope(number) for number in range(4)]


WAYS: Dict[str, Way] = {
    "data parallel 2": Way((), 2, {}),
    "data parallel 4, 2 micro-batches": Way((), 4, {"num_micro_batch": 2}),
    "4 micro-batches": Way((), 1, {"num_micro_batch": 4}),
    "pipeline 2, 4 micro-batches": Way((1, 1), 2, {"num_micro_batch": 4}),
    "pipeline 2 nested 2, 2 micro-batches": Way((1, 1), 4, {"num_micro_batch": 2}),
    "stages of 1 and 2, called": Way((1, 2), 3, {"num_micro_batch": 2, "emit": "call"}),
}


class Outcome(NamedTuple):
    """What each step returned, the variables after the last, and the plan."""

    returned: List[Any]
    variables: List[np.ndarray]
    plan: Optional[Plan] = None


def batches(sizes: Sequence[int] = (16, 16, 12), width: int = 6, classes: int = 3) -> List[Tuple[np.ndarray, np.ndarray]]:
    """Mini-batches of features and labels; the last may be smaller."""
    rng = np.random.RandomState(0)
    return [(rng.randn(size, width), rng.randint(0, classes, size)) for size in sizes]


def run(build: Build, data: Sequence[Sequence[Any]], way: Optional[Way] = None) -> Outcome:
    """Trains on each of the mini-batches.

    Args:
        way: None: without whale_tf.
    """
    tf.random.set_seed(0)
    if way is None:
        return _trained(*build([contextlib.nullcontext] * 4), data)
    wh.init(way.config, cluster=f"cpu:{way.devices}")
    try:
        outcome = _trained(*build(way.scopes()), data)
        plan = wh.current_plan()
    finally:
        wh.shutdown()
    assert plan is not None and plan.num_devices == way.devices
    assert len([task for task in plan.task_graphs if task.batch_of is None]) == max(1, len(way.counts))
    return outcome._replace(plan=plan)


def _trained(step: Callable[..., Any], variables: Sequence[Any], data: Sequence[Sequence[Any]]) -> Outcome:
    returned = [tf.nest.map_structure(np.array, step(*[tf.constant(part) for part in batch])) for batch in data]
    return Outcome(returned, [np.array(variable) for variable in variables])


_locals: Dict[Any, Outcome] = {}


def _local(build: Build, data: Sequence[Sequence[Any]]) -> Outcome:
    """As :func:`run`; once where several plans follow for the same function and mini-batches."""
    arrays = [np.asarray(part) for batch in data for part in batch]
    key = build, tuple((array.shape, array.dtype.str, array.tobytes()) for array in arrays)
    if key not in _locals:
        _locals.clear()
        _locals[key] = run(build, data)
    return _locals[key]


def check(build: Build, way: Way, data: Sequence[Sequence[Any]], tolerance: float = TOLERANCE) -> Outcome:
    """Asserts that the function trains under a plan as it does without; returns what it computed."""
    local, parallel = _local(build, data), run(build, data, way)
    expected, found = [tf.nest.flatten((outcome.returned, outcome.variables)) for outcome in (local, parallel)]
    tf.nest.assert_same_structure(local.returned, parallel.returned)
    assert len(expected) == len(found)
    for one, other in zip(expected, found):
        assert one.shape == other.shape and one.dtype == other.dtype
        np.testing.assert_allclose(other, one, rtol=tolerance, atol=tolerance)
    assert any(np.any(one != two) for one, two in zip(tf.nest.flatten(local.returned[0]), tf.nest.flatten(local.returned[1])))
    return parallel
