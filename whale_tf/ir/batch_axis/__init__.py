"""Where the batch axis goes: the first use of the rule table (DESIGN section 5).

Every clone runs the local program on its own ``b_i`` of the mini-batch's ``B`` examples.  The analysis says for every
tensor how the local script's value follows from the clones' (a :class:`~whale_tf.ir.layout.Layout`), and what must be
done to operands and constants inside a clone so that this is exact::

    axis = analyse(graph, {graph.tensor("x:0"): 0})
    axis.layout(tensor)          # Layout; raises UnsupportedOpError where there is none (naming op and reason)
    axis.layouts[tensor]         # the same for all tensors that are not simply replicated; UNKNOWN and EXTENT appear here
    axis.conversions[op, i]      # (Slice(dim, blocks) | Scale(power) | Reduce(kind, power) | Offset(coefficient) |
                                 #    Whole(components), ...)
                                 #   what happens to operand i inside the clone, in this order
    axis.localise[op, i]         # Localise(components): the new value of a shape operand in the clone; component j is
                                 #   c0 + c1 b_i for (c0, c1), and the operand's own element j for None
    axis.attributes[op, name]    # a shape attribute's value in the clone: batch dimensions are None
    axis.extents[tensor]         # object array of int | Size; Size.affine = (c0, c1), Size.at(b)
    axis.offsets[tensor]         # positions: whole value = clone's + offset * o_i (o_i: examples before the clone)
    axis.inexact                 # [(op, reason)]
    axis.own_seed, axis.shared   # random ops drawn per clone / once for all
    axis.source_of[tensor]       # a source that the tensor depends on, to compute w_i and b_i from
    axis.bodies[op, attribute]   # BatchAxis of a functional op's body
    axis.batch                   # B where the graph says it, else None

Kinds of layout besides layout.py's: EXTENT (integers like ``[b, 10]``: see ``extents``), UNKNOWN (see ``unknown``), and
``max min prod any all``: the whole value is the max (...) of the clones' values.  ``blocks`` of a sharded layout may be
``None``: a number of rows chosen by data (not in proportion to ``b_i``), and ``(-1,)``: the same number for each example,
but not known.  Both merge by concatenation.

Unknown tensors do not raise by themselves (a summary of one does no harm); ``layout`` raises when one is asked for.
"""
from __future__ import annotations

from whale_tf.ir.batch_axis.analysis import analyse, static_batch
from whale_tf.ir.batch_axis.result import (
    EXTENT,
    EXTREMES,
    UNKNOWN,
    BatchAxis,
    Conversion,
    Inexact,
    Localise,
    Offset,
    Reduce,
    Scale,
    Slice,
    Unknown,
    Whole,
)
from whale_tf.ir.batch_axis.sources import find_batch_axis
from whale_tf.ir.batch_axis.state import Options

__all__ = [
    "EXTENT", "EXTREMES", "UNKNOWN", "BatchAxis", "Conversion", "Inexact", "Localise", "Offset", "Options", "Reduce",
    "Scale", "Slice", "Unknown", "Whole", "analyse", "find_batch_axis", "static_batch",
]
