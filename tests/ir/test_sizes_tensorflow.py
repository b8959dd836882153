"""Sizes that follow from a few open ones are those that TensorFlow's tensors have."""
from __future__ import annotations

from typing import Any, Mapping, Set, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import zoo
from tests.ir.programs import PROGRAMS, Program, build, feeds
from tests.ir.test_models_tensorflow import build as build_model
from whale_tf.capture.record import record
from whale_tf.ir.extents import Size, SizeLike, Symbol
from whale_tf.ir.sizes import OpenSizes, Sizes

BATCH = 7
MODELS = ("bert", "dlrm", "gpt2", "resnet")


def value_of(size: SizeLike, numbers: Mapping[Symbol, int]) -> int:
    """A size with numbers for its symbols."""
    terms = size.terms if isinstance(size, Size) else {(): size}
    return sum(count * int(np.prod([numbers[symbol] for symbol in monomial], dtype=int)) for monomial, count in terms.items())


def symbols_of(sizes: Sizes) -> Set[Symbol]:
    return {symbol for size in sizes if isinstance(size, Size) for symbol in size.symbols}


def check(graph: tf.Graph, feed: Mapping[str, Any], initialiser: Any) -> Tuple[int, int]:
    """Compares all sizes.

    Returns:
        How many open ones follow from those of placeholders, and how many there are.
    """
    ops = record(graph)
    sizes = OpenSizes(ops)
    found = {t: own for t in range(len(ops.tensors)) if "_ref" not in ops.tensors[t].dtype
             and ops.tensors[t].dtype not in ("resource", "variant", "string")
             and graph.is_fetchable(graph.get_operation_by_name(ops.producer(t).name))  # not in a branch
             for own in [sizes.sizes(t)] if own is not None and any(isinstance(size, Size) for size in own)}
    symbols = {symbol for own in found.values() for symbol in symbols_of(own)}
    fetches = {t: graph.get_tensor_by_name(ops.tensor_name(t)) for t in {*found, *(symbol[1] for symbol in symbols)}}
    with tf.Session(graph=graph) as session:
        session.run(initialiser)
        values = session.run(fetches, feed)
    numbers = {symbol: np.shape(values[symbol[1]])[symbol[2]] if symbol[0] == "dim" else int(np.ravel(values[symbol[1]])[symbol[2]])
               for symbol in symbols}
    of_inputs = 0
    for tensor, own in found.items():
        assert tuple(value_of(size, numbers) for size in own) == np.shape(values[tensor]), (ops.tensor_name(tensor), own)
        of_inputs += all(ops.producer(symbol[1]).type == "Placeholder" for symbol in symbols_of(own))
    return of_inputs, len(found)


@pytest.mark.parametrize("program", [program for program in PROGRAMS if program.only != "static"], ids=str)
def test_sizes_of_programs(program: Program) -> None:
    with tf.Graph().as_default() as graph:
        inputs, _ = build(program, None)
        initialiser = tf.global_variables_initializer()
        check(graph, dict(zip([t.name for t in inputs], feeds(program, BATCH))), initialiser)


@pytest.mark.parametrize("name", MODELS)
def test_most_sizes_of_models_follow_from_their_inputs(name: str) -> None:
    with tf.Graph().as_default() as graph:
        inputs, _, _ = build_model(name, None)
        initialiser = tf.global_variables_initializer()
        examples = zoo.SMALL[name].examples(zoo.SMALL[name].config("float64"))
        follow, every = check(graph, {t.name: np.asarray(value)[:7] for t, value in zip(inputs, examples) if t.shape.rank}, initialiser)
    assert follow > 0.9 * every > 20
