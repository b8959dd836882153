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
"""
from __future__ import annotations

from typing import NamedTuple, Optional, Tuple

REPLICATED = "replicated"
SHARDED = "sharded"
PARTIAL = "partial"


class Layout(NamedTuple):
    """One tensor's layout.

    Attributes:
        kind: ``replicated``, ``sharded`` or ``partial``.
        dim: the sharded dimension (``sharded`` only, else -1).
        blocks: lengths, in multiples of the clone's extent ``b_i``, of the consecutive blocks that make up ``dim``; each
            block is sharded separately.  ``(1,)`` is a plain batch dimension, ``(T,)`` is ``[B, T]`` flattened to
            ``B * T``, ``(1,) * T`` is ``[T, B]`` flattened (Rhino's stride), and ``(1, 1)`` is a concatenation of two
            batches.  ``None`` stands for one block of unknown length.
        power: the exponent ``k`` above.
    """

    kind: str
    dim: int = -1
    blocks: Optional[Tuple[int, ...]] = (1,)
    power: int = 0

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


def replicated(power: int = 0) -> Layout:
    return Layout(REPLICATED, power=power)


def sharded(dim: int, blocks: Optional[Tuple[int, ...]] = (1,), power: int = 0) -> Layout:
    return Layout(SHARDED, dim, blocks, power)


def partial(power: int = 0) -> Layout:
    return Layout(PARTIAL, power=power)
