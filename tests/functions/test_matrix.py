"""Every model under every plan, in ``fit`` and in a custom loop: losses, metrics and all variables are the local ones.

Five steps and a validation pass. CI has every model once, and every plan in both loops; ``--full`` has the product.
"""
from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from tests import graph_optimizer
from tests.functions.equality import Scope, Way, clear_keras

if not hasattr(tf.keras.optimizers, "AdamW"):
    pytest.skip(f"the models are written for TensorFlow 2.11 or later, and this is {tf.__version__}", allow_module_level=True)

from tests.functions.models import BATCH, CASES, EXAMPLES, VALIDATION, Case, keras  # noqa: E402

# Device counts of wh.replicate, and negative ones of wh.split; none: no annotations.
PLANS: Dict[str, Way] = {
    "data parallel 2": Way((), 2, {}),
    "data parallel 4": Way((), 4, {}),
    "pipeline 2": Way((1, 1), 2, {}),
    "pipeline 2, 4 micro-batches": Way((1, 1), 2, {"num_micro_batch": 4}),
    "pipeline 2, weights apart": Way((1, 1), 2, {"num_micro_batch": 4, "pipeline.schedule": "zero_bubble_h1"}),
    "pipeline 2 nested 2": Way((1, 1), 4, {"num_micro_batch": 2}),
    "split of the second half": Way((2, -2), 2, {}),
    "auto_parallel": Way((), 4, {"auto_parallel": True}),
}
DIVIDING = "split of the second half", "auto_parallel"
LOOPS = ("fit", "custom")


class Outcome(NamedTuple):
    """Of each step or epoch and of the validation pass, by name; and all variables."""

    values: Dict[str, Any]
    variables: List[np.ndarray]


@contextlib.contextmanager
def scopes(case: Case, way: Optional[Way]) -> Iterator[List[Scope]]:
    """The stages' scopes, for a model that is made and trained inside; what is open outside is left as it was."""
    before = keras.mixed_precision.global_policy(), keras.backend.floatx()
    keras.backend.set_floatx("float64" if case.policy == "float64" else "float32")
    keras.mixed_precision.set_global_policy(case.policy)
    stages: List[Scope] = [contextlib.nullcontext] * 2
    try:
        if way is not None:
            wh.init({**case.config, **way.config}, cluster=way.cluster or f"cpu:{way.devices}")
            for number, count in enumerate(way.counts):
                strategy = wh.replicate if count > 0 else wh.split
                stages[number] = functools.partial(strategy, abs(count), name=f"stage {number}")
        yield stages
        plan = wh.current_plan() if way is not None else None
        if way is not None:
            assert plan is not None
            if "auto_parallel" not in way.config:
                assert plan.num_devices == way.devices and len(plan.task_graphs) >= max(1, len(way.counts))
            assert "Not exactly the local result" not in wh.explain()
    finally:
        wh.shutdown()
        keras.backend.set_floatx(before[1])
        keras.mixed_precision.set_global_policy(before[0])
        clear_keras()


def trained(case: Case, loop: str, way: Optional[Way]) -> Outcome:
    with scopes(case, way) as stages:
        keras.utils.set_random_seed(0)
        model = case.make(stages)
        values = (by_fit if loop == "fit" else by_hand)(model, case, way.share if way is not None else (1, 0))
        optimizers = [item for item in vars(model).values() if isinstance(item, keras.optimizers.Optimizer)] or [model.optimizer]
        variables = model.variables + [variable for item in optimizers for variable in item.variables]
        return Outcome(values, [np.array(tf.cast(tf.convert_to_tensor(v), tf.float64)) for v in variables])


def own(rows: np.ndarray, share: Tuple[int, int]) -> np.ndarray:
    """Of these rows of mini-batches, those that a process reads which has such a share of each."""
    parts, number = share
    size = BATCH // parts
    return rows.reshape([-1, parts, size, *rows.shape[1:]])[:, number].reshape([-1, *rows.shape[1:]])


def by_fit(model: Any, case: Case, share: Tuple[int, int]) -> Dict[str, Any]:
    given = (case.x,) if case.y is None else (case.x, case.y)
    validation = tf.data.Dataset.from_tensors(tf.nest.map_structure(lambda part: part[:VALIDATION], given))
    x, *y = tf.nest.map_structure(lambda part: own(part, share), given)
    return model.fit(x, *y, batch_size=BATCH // share[0], shuffle=False, verbose=0, validation_data=validation).history


def by_hand(model: Any, case: Case, share: Tuple[int, int]) -> Dict[str, Any]:
    """A loop of the user's: steps in a tf.function, with tapes, and Keras' loss and optimizer or the model's own step."""
    supervised = case.y is not None

    @tf.function
    def step(x: Any, y: Any) -> Dict[str, Any]:
        if not supervised:
            return model.train_step((x,))
        with tf.GradientTape() as tape:
            prediction = model(x, training=True)
            loss = model.compute_loss(x, y, prediction)
        model.optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return {"loss": loss, "predictions": prediction}

    @tf.function
    def validate(x: Any, y: Any) -> Dict[str, Any]:
        return {"loss": model.compute_loss(x, y, model(x, training=False))} if supervised else model.test_step((x,))

    values: Dict[str, Any] = {}
    y = case.y if supervised else ()
    for start in range(0, EXAMPLES, BATCH):
        batch = [tf.nest.map_structure(lambda part: tf.constant(own(part[start:start + BATCH], share)), parts)
                 for parts in (case.x, y)]
        values.update({f"{name} at {start}": np.array(value) for name, value in step(*batch).items()})
    batch = [tf.nest.map_structure(lambda part: tf.constant(part[:VALIDATION]), parts) for parts in (case.x, y)]
    return dict(values, **{f"val {name}": np.array(value) for name, value in validate(*batch).items()})


local = functools.lru_cache(maxsize=None)(lambda name, loop: trained(CASES[name], loop, None))
in_float32 = functools.lru_cache(maxsize=None)(lambda name, loop: trained(CASES[name]._replace(policy="float32"), loop, None))


def check(name: str, loop: str, way: Way) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*are not compiled by XLA")
        found = trained(CASES[name], loop, way)
    exact = in_float32(name, loop) if CASES[name].policy == "mixed_bfloat16" else None
    expected = local(name, loop)
    values = {key: own(value, way.share) if key.startswith("predictions") else value for key, value in expected.values.items()}
    compare(CASES[name], expected._replace(values=values), found, exact)


def compare(case: Case, expected: Outcome, found: Outcome, exact: Optional[Outcome] = None) -> None:
    """Args:
        exact: of the same model in a type that rounds less: variables may be as far from these as the local ones are.
    """
    assert expected.values.keys() == found.values.keys() and len(expected.variables) == len(found.variables)
    assert len(expected.variables) > 3 and all(np.all(np.isfinite(variable)) for variable in expected.variables)
    rough = max(case.tolerance, 1e-6)  # Keras' metrics are float32
    for key, value in expected.values.items():
        np.testing.assert_allclose(found.values[key], value, rtol=rough, atol=rough, err_msg=key)
    for one, other, true in zip(expected.variables, found.variables, (exact or expected).variables):
        allowed = case.tolerance * max(np.linalg.norm(one), 0.01 * one.size ** 0.5) + np.linalg.norm(one - true)
        assert np.linalg.norm(other - true) <= allowed


def rows() -> Iterator[Any]:
    """Every model, loop and plan; without the mark ``full`` every model once, and every plan in every loop.  Plans that may
    divide variables need the graph optimizer; of the others, a fixed half has it."""
    pairs = [(loop, plan) for plan in PLANS for loop in LOOPS]
    for i, name in enumerate(CASES):
        for k, (loop, plan) in enumerate(pairs):
            row = f"{name}-{loop}-{plan}"
            marks = [] if plan in DIVIDING else graph_optimizer.marks(row)
            if k != i % len(pairs) and i != k % len(CASES):
                marks.append(pytest.mark.full)
            yield pytest.param(name, loop, plan, marks=marks, id=row)


@pytest.mark.slow
@pytest.mark.parametrize("name, loop, plan", rows())
def test_equals_local(name: str, loop: str, plan: str) -> None:
    check(name, loop, PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data parallel 2", pytest.param("pipeline 2, 4 micro-batches", marks=pytest.mark.full)])
def test_series_of_unknown_length(plan: str) -> None:
    """Neither the number of examples nor that of times is known before a step runs: a generator says nothing of them."""

    def fit(way: Optional[Way]) -> Outcome:
        with scopes(case, way) as stages:
            keras.utils.set_random_seed(0)
            inputs = keras.Input((None, 3))
            with stages[0]():
                x = keras.layers.LSTM(4)(inputs)
            with stages[1]():
                outputs = keras.layers.Dense(4, activation="softmax")(x)
            model = keras.Model(inputs, outputs)
            model.compile("sgd", "sparse_categorical_crossentropy")
            signature = tf.TensorSpec([None, None, 3], tf.float64), tf.TensorSpec([None], tf.int64)
            batches = [(case.x[i:i + 16, :length], case.y[i:i + 16]) for i, length in ((0, 4), (16, 2), (32, 3))]
            history = model.fit(tf.data.Dataset.from_generator(lambda: batches, output_signature=signature), verbose=0).history
            return Outcome(history, [np.array(v) for v in model.variables])

    case = CASES["lstm and gru"]
    compare(case, fit(None), fit(PLANS[plan]))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(keras, "random"), reason="Keras 2 has no keras.random")
def test_clones_draw_numbers_of_their_own() -> None:
    """Dropout, and Keras' random numbers, in every part of a mini-batch."""
    case = CASES["mlp"]
    with scopes(case, None):
        wh.init({"num_micro_batch": 2}, cluster="cpu:2")
        dropout, seed = keras.layers.Dropout(0.5), keras.random.SeedGenerator(1)
        dense = keras.layers.Dense(1)
        dense.build((None, 64))

        @tf.function(input_signature=[tf.TensorSpec([None, 64], tf.float64)])  # of a static size they would be drawn once
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                dropped, drawn = dropout(x, training=True), keras.random.normal(tf.shape(x), seed=seed)
                loss = tf.reduce_mean(dense(dropped + drawn))
            for variable, gradient in zip(dense.trainable_variables, tape.gradient(loss, dense.trainable_variables)):
                variable.assign_sub(0.1 * gradient)
            return dropped, drawn

        found = [step(tf.ones([8, 64], tf.float64)) for _ in range(2)]
    for numbers in zip(*found):
        assert len({part.tobytes() for step_ in numbers for part in np.split(step_.numpy(), 4)}) == 8


@pytest.mark.slow
def test_split_of_as_many_filters_as_devices() -> None:
    """The bias of a Conv2D, squeezed, has one element on each device."""
    check("convnet", "custom", Way((-4,), 4, {}))
