"""How tensors depend on the batch: the first use of the rule table.

Every clone runs the local program on its own ``b_i`` of the mini-batch's ``B`` examples.  For every tensor, the analysis
determines how the local script's value follows from the clones' values (a :class:`~whale_tf.ir.layout.Layout`), and how the
operands and constants inside a clone must change to make this exact::

    axis = analyse(graph, {graph.tensor("x:0"): 0})
    axis.layout(tensor)          # Layout; raises UnsupportedOpError if there is none (with the op and the reason)
    axis.layouts[tensor]         # the same, for every tensor that is not simply replicated; includes UNKNOWN and EXTENT
    axis.conversions[op, i]      # (Slice(dim, blocks) | Scale(power) | Reduce(kind, power) | Offset(coefficient) |
                                 #    Whole(components), ...)
                                 #   applied to operand i inside the clone, in this order
    axis.localise[op, i]         # Localise(components): new value of a shape operand in the clone; element j is component j, a
                                 #   Size such as 2 b_i + 1, and unchanged for None
    axis.attributes[op, name]    # a shape attribute's value in the clone, whose batch dimensions are None
    axis.extents[tensor]         # object array of int | Size; Size.counts, Size.at(b)
    axis.offsets[tensor]         # positions: whole value = clone's value + offset * o_i (o_i: number of examples before clone i)
    axis.inexact                 # [(op, reason)]
    axis.whole                   # {op: reason}: ops that need all examples; their operands are combined by Reduce or Whole
    axis.own_seed, axis.shared   # random ops that each clone draws / that are drawn once for all clones
    axis.batches[batch]          # the sources whose rows are the examples of a batch (layout.py); equal sizes are only derived
    axis.source_of(tensor, batch)   # one of these, if possible one that the tensor depends on: w_i and b_i are computed from it
    axis.bodies[op, attribute]   # BatchAxis of a functional op's body
    axis.batch                   # B if the graph determines it, else None

There are more kinds of layouts than in layout.py: EXTENT (integers like ``[b, 10]``: see ``extents``), UNKNOWN (see
``unknown``), and ``max min prod any all`` (the whole value is the max (...) of the clones' values).  ``blocks`` of a sharded
layout may also be ``None`` (the number of rows depends on data and is not proportional to ``b_i``) or ``(-1,)`` (an unknown
number of rows, the same for each example).  Both merge by concatenation.

An unknown tensor is no error in itself (only a summary may read it); ``layout`` raises when it is asked for the tensor.
"""
from __future__ import annotations

from whale_tf.ir.batch_axis.analysis import analyse, static_batch
from whale_tf.ir.batch_axis.result import (
    CONCAT,
    EXTENT,
    EXTREMES,
    SAME,
    UNKNOWN,
    BatchAxis,
    Conversion,
    Equality,
    Inexact,
    Localise,
    Offset,
    Offsets,
    Reduce,
    Scale,
    Slice,
    Unknown,
    Whole,
    columns,
    negative,
)
from whale_tf.ir.batch_axis.sources import Known, find_batch_axis
from whale_tf.ir.batch_axis.state import Options

__all__ = [
    "CONCAT", "EXTENT", "EXTREMES", "SAME", "UNKNOWN", "BatchAxis", "Conversion", "Equality", "Inexact", "Known", "Localise",
    "Offset", "Offsets", "Options", "Reduce", "Scale", "Slice", "Unknown", "Whole", "analyse", "columns", "find_batch_axis",
    "negative", "static_batch",
]
