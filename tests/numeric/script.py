"""What a model case is written with: the stages it puts its blocks into, its variables, its data.

A case is an ordinary single-device script. The only thing it does for us is to hand its blocks to ``Stages.run``, which
opens a scope around each stage's blocks: nothing for the local script, ``wh.replicate(n)`` for the parallel one.
"""
from __future__ import annotations

import contextlib
import zlib
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

STEPS = 5
BATCH = 48  # divides by every product of replicas and micro-batches in plans.py

Arrays = Dict[str, np.ndarray]
Scope = Callable[[], Any]


class Setting(NamedTuple):
    """How a case's graph is built.

    Attributes:
        dtype: of variables and activations.
        resource: resource variables, else reference variables.
        static_batch: whether the graph knows the size of the batch.
        dataset: data comes from a tf.data iterator, else from fed placeholders.
        runner: ``session``, ``callable`` (Session.make_callable) or ``monitored`` (MonitoredTrainingSession).
        outputs: whether the script's outputs are fetched beside its losses.
    """

    dtype: str = "float64"
    resource: bool = True
    static_batch: bool = True
    dataset: bool = False
    runner: str = "session"
    outputs: bool = True


def joined(*groups: Mapping[str, Any]) -> Dict[str, Any]:
    """All entries of several dictionaries.

    Raises:
        ValueError: two of them have the same name.
    """
    found: Dict[str, Any] = {}
    for group in groups:
        twice = sorted(set(found) & set(group))
        if twice:
            raise ValueError(f"there is another {twice[0]!r} already; choose another name")
        found.update(group)
    return found


class Stages:
    """Puts a model's blocks into stages: ``scopes[i]`` is opened around the blocks of stage i.

    ``cuts``, where given, are the numbers of the blocks that begin the second and the further stages; else the blocks
    are divided as evenly as it goes.
    """

    def __init__(self, scopes: Sequence[Scope] = (contextlib.nullcontext,), cuts: Sequence[int] = ()) -> None:
        self.scopes, self.cuts = scopes, cuts

    def run(self, blocks: Sequence[Callable[[Any], Any]], state: Any) -> Any:
        """``blocks[-1](...blocks[0](state))``, each block in the scope of its stage."""
        count = len(self.scopes)
        assert len(blocks) >= count, f"{len(blocks)} blocks for {count} stages"
        inner = list(self.cuts) or [round(i * len(blocks) / count) for i in range(1, count)]
        cuts = [0] + inner + [len(blocks)]
        for scope, first, last in zip(self.scopes, cuts, cuts[1:]):
            with scope():
                for block in blocks[first:last]:
                    state = block(state)
        return state


class Script(NamedTuple):
    """A built training script.

    Attributes:
        runs: the lists of update ops of one step, one ``Session.run`` each.
        losses: fetched with every run of a step, compared relatively.
        outputs: likewise; per-example tensors, which show that fetches are put together in the right order.
    """

    runs: Sequence[Sequence[Any]]
    losses: Dict[str, tf.Tensor]
    outputs: Dict[str, tf.Tensor]


def rng(name: str) -> np.random.RandomState:
    """Numbers that depend on nothing but ``name``."""
    return np.random.RandomState(zlib.crc32(name.encode()) & 0x7FFFFFFF)


def weight(name: str, shape: Sequence[int], dtype: str, scale: float = 0.0) -> tf.Variable:
    """A variable whose initial value depends on its name alone, so that every script starts from the same numbers."""
    fan_in = int(np.prod(shape[:-1])) or 1
    value = rng(tf.get_variable_scope().name + "/" + name).randn(*shape) * (scale or fan_in ** -0.5)
    return tf.get_variable(name, initializer=tf.constant(value, dtype), dtype=dtype)


def dense(x: tf.Tensor, units: int, name: str) -> tf.Tensor:
    """`[B, D]` to `[B, units]`."""
    with tf.variable_scope(name, reuse=tf.AUTO_REUSE):
        dtype = x.dtype.base_dtype.name
        return tf.nn.bias_add(tf.matmul(x, weight("kernel", [int(x.shape[-1]), units], dtype)),
                              weight("bias", [units], dtype, 0.1))


def source(examples: Arrays, sizes: Sequence[int], setting: Setting) -> Tuple[Dict[str, tf.Tensor], List[Dict]]:
    """The input tensors of a script and what to feed in each step (nothing where a dataset feeds).

    Args:
        examples: arrays `[sum(sizes), ...]`.
        sizes: examples of each step; with a dataset all but the last must be equal.
        setting: kind of input; an iterator's initializer runs with the tables'.
    """
    cuts = np.cumsum([0] + list(sizes))
    static = sizes[0] if setting.static_batch else None
    if setting.dataset:
        data = tf.data.Dataset.from_tensor_slices(examples).batch(sizes[0], drop_remainder=setting.static_batch)
        iterator = tf.data.make_initializable_iterator(data)
        tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
        return iterator.get_next(), [{} for _ in sizes]
    tensors = {name: tf.placeholder(array.dtype, (static,) + array.shape[1:], name=name)
               for name, array in sorted(examples.items())}
    return tensors, [{tensors[name]: array[first:last] for name, array in examples.items()}
                     for first, last in zip(cuts, cuts[1:])]
