"""Copies of annotated Keras models train as their originals, or a warning says that they do not."""
from __future__ import annotations

import copy
import pickle
from typing import Any, Callable, Dict, Set

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from tests.functions.equality import clear_keras

keras = tf.keras
IS_3 = int(getattr(keras, "__version__", "2").partition(".")[0]) >= 3


def functional() -> Any:
    """A layer that both stages share."""
    layers = keras.layers
    inputs = keras.Input((4,))
    shared = layers.Dense(4, name="shared", activation="tanh")
    with wh.replicate(1, name="one"):
        x = shared(layers.Dense(4, name="first")(inputs))
    with wh.replicate(1, name="two"):
        outputs = layers.Dense(3, name="last")(layers.add([shared(x), x]))
    return keras.Model(inputs, outputs)


def sequential() -> Any:
    model = keras.Sequential([keras.Input((4,))])
    for task in ("one", "two"):
        with wh.replicate(1, name=task):
            model.add(keras.layers.Dense(4, name=f"in_{task}"))
    return model


def cloned(model: Any) -> Any:
    return keras.models.clone_model(model)


def from_config(model: Any) -> Any:
    return type(model).from_config(model.get_config())


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def from_json(model: Any) -> Any:
    return keras.models.model_from_json(model.to_json())


def trained(model: Any) -> Dict[str, Set[str]]:
    """Its products -> the TaskGraphs in which they are computed."""
    model.compile("sgd", "mse")
    model.train_on_batch(np.ones([8, 4], "float32"), np.ones([8, model.output_shape[-1]], "float32"))
    plan, found = wh.current_plan(), {}  # type: Any, Dict[str, Set[str]]
    for task in plan.task_graphs:
        for name in task.ops:
            if name.endswith("MatMul"):
                found.setdefault(name.split("/")[-2].partition("_1")[0], set()).add(task.name)
    return found


@pytest.fixture(autouse=True)
def two_devices() -> Any:
    wh.init(cluster="cpu:2")
    yield
    wh.shutdown()
    clear_keras()


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*keeps no annotations")
@pytest.mark.parametrize("build, way", [
    (functional, cloned), (functional, copy.deepcopy), (sequential, cloned), (sequential, from_config)] + ([
        (functional, pickled), (sequential, lambda model: pickled(copy.deepcopy(model)))] if IS_3 else []))
def test_copies_have_the_annotations(build: Callable[[], Any], way: Callable[[Any], Any]) -> None:
    original = build()
    copied = way(original)
    expected = trained(original)
    assert set().union(*expected.values()) == {"one", "two"}
    assert trained(copied) == expected


@pytest.mark.slow
def test_text_says_that_it_keeps_no_annotations() -> None:
    original = sequential()
    for way in (from_json, *(() if IS_3 else (pickled,))):
        with pytest.warns(UserWarning, match=r"keeps no annotations: layers of the model are in TaskGraphs \(one, two\)"):
            copied = way(original)
        assert len(set().union(*trained(copied).values())) == 1


def test_names_in_configurations_are_plain_where_they_are_saved() -> None:
    layer = sequential().layers[-1]
    config = layer.get_config()
    assert type(config["name"]) is not str and type(pickle.loads(pickle.dumps(config))["name"]) is str
    assert type(type(layer).from_config(config).name) is str
