"""How a tensor of the local script is laid out over the clones that compute it together.

The local script computes a tensor ``T``; each clone ``i`` (a micro-batch of a replica) computes a value ``v_i``.
``w_i`` is the clone's share of the mini-batch, ``w_i = b_i / B``, with ``sum(w_i) = 1``.  A :class:`Layout` says how
``T`` follows from the ``v_i``::

    replicated, power k      T = w_i^k v_i               for every i
    sharded,    power k      T = concat_i(w_i^k v_i)     along ``dim``, block by block
    partial,    power k      T = sum_i(w_i^k v_i)

With ``power`` 0 these are Whale's and Rhino's layouts (Whale calls the 0/1 list over dimensions ShardingInfo; Rhino calls the
pair (dim, stride) a sharding spec).  ``power`` makes mean and sum losses the same case: each clone runs the local program on
its own ``b_i`` examples, so a value that the program divides by the batch size is too large by a factor ``1 / w_i``:

    sum over the batch                  partial,    power  0
    mean over the batch                 partial,    power  1   (the weighted mean of the clones)
    d mean(loss) / dx                   sharded,    power  1
    the batch size itself               replicated, power -1   (an *extent*: B = b_i / w_i)

Inputs may have different numbers of examples (labelled and unlabelled ones, say): each such input begins a *batch* of its own,
with its own ``b_i``, ``B`` and ``w_i``.  The first one is the reference, which plain numbers mean: a block ``2`` has two rows
for each of its examples, and a power ``1`` is its weight.  Any other batch is named by its input: a block :class:`Rows`, and a
:class:`Power`.  A mean over the concatenation of two batches is divided by ``B + B'``; its weight is that of both together::

    concat(x, x')                       sharded(blocks=(1, Rows(1, x')))
    mean(concat(x, x'))                 partial, power (w, w')^1   with   (w, w') = (b_i + b_i') / (B + B')
"""
from __future__ import annotations

import functools
import math
from typing import Dict, Iterable, NamedTuple, Optional, Tuple, Union

REPLICATED = "replicated"
SHARDED = "sharded"
PARTIAL = "partial"


REFERENCE = ""  # stands for the reference batch where batches have the names of their inputs


class Rows(NamedTuple):
    """A block of examples of another batch than the reference.

    Attributes:
        each: rows for each example; -1: not known, but the same for all examples.
        batch: name of an input whose rows are the examples of this batch.
    """

    each: int
    batch: str


Block = Union[int, Rows]  # an int: so many rows for each example of the reference batch
Blocks = Optional[Tuple[Block, ...]]  # None: one block of unknown length
Base = Tuple[Tuple[str, int], ...]  # the examples that a weight counts: (batch, how often), by batch


def rows_each(block: Block) -> int:
    return block.each if isinstance(block, Rows) else block


def batch_of(block: Block) -> str:
    return block.batch if isinstance(block, Rows) else REFERENCE


def block_of(each: int, batch: str) -> Block:
    return Rows(each, batch) if batch != REFERENCE and each else each


GROUPED = "by "  # begins the name of a batch whose examples are elements of rows; no input has such a name


def is_grouped_batch(batch: str) -> bool:
    """Whether a batch is that of the elements of rows (the ids of sparse rows, say), of which each has as many as data say."""
    return batch.startswith(GROUPED)


def is_grouped(blocks: Blocks) -> bool:
    """Whether some rows are the elements of rows."""
    return any(is_grouped_batch(batch_of(block)) for block in blocks or ())


def is_measured(blocks: Blocks) -> bool:
    """Whether the number of rows is only known when the step runs: data choose it, or nobody knows how many each example has."""
    return blocks is None or any(rows_each(block) == -1 for block in blocks)


class Power:
    """A product of weights of several batches, ``w^i (w, w')^j ...``: base -> exponent, without zeros."""

    __slots__ = ("exponents",)

    def __init__(self, exponents: Dict[Base, int]) -> None:
        self.exponents = exponents

    def __add__(self, other: Exponent) -> Exponent:
        total = dict(self.exponents)
        for base, exponent in exponents_of(other).items():
            total[base] = total.get(base, 0) + exponent
        return _power(total)

    __radd__ = __add__

    def __neg__(self) -> Power:
        return Power({base: -exponent for base, exponent in self.exponents.items()})

    def __sub__(self, other: Exponent) -> Exponent:
        return self + (-other)

    def __rsub__(self, other: Exponent) -> Exponent:
        return (-self) + other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Power) and self.exponents == other.exponents

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(frozenset(self.exponents.items()))

    def __repr__(self) -> str:
        return " ".join(f"{dict(base)}^{exponent}" for base, exponent in sorted(self.exponents.items()))


Exponent = Union[int, Power]  # an int: of the reference batch's weight
PLAIN: Base = ((REFERENCE, 1),)


def exponents_of(power: Exponent) -> Dict[Base, int]:
    """Base -> exponent."""
    return power.exponents if isinstance(power, Power) else {PLAIN: power} if power else {}


def _power(exponents: Dict[Base, int]) -> Exponent:
    exponents = {base: exponent for base, exponent in exponents.items() if exponent}
    return exponents.get(PLAIN, 0) if exponents.keys() <= {PLAIN} else Power(exponents)


def weight_of(counts: Iterable[Tuple[str, int]]) -> Exponent:
    """The first power of the weight of examples that are counted together: (batch, how often)."""
    total: Dict[str, int] = {}
    for batch, count in counts:
        total[batch] = total.get(batch, 0) + count
    divisor = functools.reduce(math.gcd, total.values())
    return _power({tuple(sorted((batch, count // divisor) for batch, count in total.items())): 1})


def weight_of_blocks(blocks: Blocks) -> Exponent:
    """The first power of the weight of a dimension's rows."""
    return 1 if blocks is None else weight_of((batch_of(block), abs(rows_each(block))) for block in blocks)


class Layout(NamedTuple):
    """One tensor's layout.

    Attributes:
        kind: ``replicated``, ``sharded`` or ``partial``.
        dim: the sharded dimension (``sharded`` only, else -1).
        blocks: lengths, in multiples of the clone's extent ``b_i``, of the consecutive blocks that make up ``dim``; each
            block is sharded separately, and may have the examples of another batch (:class:`Rows`).  ``(1,)`` is a plain
            batch dimension, ``(T,)`` is ``[B, T]`` flattened to ``B * T``, ``(1,) * T`` is ``[T, B]`` flattened (Rhino's
            stride), and ``(1, 1)`` is a concatenation of two tensors of one batch.  ``None`` stands for one block of unknown
            length.
        power: the exponent ``k`` above.
    """

    kind: str
    dim: int = -1
    blocks: Blocks = (1,)
    power: Exponent = 0

    @property
    def is_replicated(self) -> bool:
        return self.kind == REPLICATED

    @property
    def is_sharded(self) -> bool:
        return self.kind == SHARDED

    @property
    def is_partial(self) -> bool:
        return self.kind == PARTIAL

    def __str__(self) -> str:
        text = self.kind if self.kind != SHARDED else "sharded(dim={}{})".format(
            self.dim, "" if self.blocks == (1,) else f", blocks={self.blocks}")
        return text if self.power == 0 else f"{text} w^{self.power}"


def replicated(power: Exponent = 0) -> Layout:
    return Layout(REPLICATED, power=power)


def sharded(dim: int, blocks: Blocks = (1,), power: Exponent = 0) -> Layout:
    return Layout(SHARDED, dim, blocks, power)


def partial(power: Exponent = 0) -> Layout:
    return Layout(PARTIAL, power=power)
