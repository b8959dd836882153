"""Comparisons of sizes that the batch-axis analysis takes for equal, and what waits for them.

::

    x ──> Shape ──┐                             clone 0     sub  (waits for the check by control edge)
                  ├──> Equal ──> Assert ──^──>
    y ──> Shape ──┘                             clone 1     sub

There is one check for each pair of inputs and each mini-batch.  Only ops that read both inputs wait for it, so no run has to feed
more than its fetches need.  TensorFlow writes the body of a functional op in its place and lets only some of the body's ops wait
for what the op waits for; so an Identity before an input waits as well.
"""

from __future__ import annotations

from typing import Dict, Iterable, List, Tuple

from whale_tf._tf_compat import tf
from whale_tf.emit.checks import check_equal
from whale_tf.emit.context import Context, Coordinates
from whale_tf.emit.shares import BatchShares
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.graph import Op
from whale_tf.ir.meetings import Pair, meetings
from whale_tf.ir.units import frames
from whale_tf.program import ALL


class Guard:
    """Stages checks, each once."""

    def __init__(self, context: Context, nodes: Nodes, division: BatchShares) -> None:
        self._context, self._nodes, self._division = context, nodes, division
        is_open = division.batch is None and not context.is_in_place  # a static size is compared where its input is divided
        self._meetings = meetings(context.graph, context.region.batch, context.region.ops) if is_open else {}
        self._checks: Dict[Tuple[Pair, int], str] = {}
        self._entered: Dict[Tuple[Pair, int], str] = {}
        self._frames = frames(context.graph) if self._meetings else {}

    def waits(self, ops: Iterable[int], at: Coordinates) -> List[str]:
        """Names of the checks for which a function of these ops waits."""
        return list(dict.fromkeys(
            self._check(pair, g, op) for op in ops for pair in self._meetings.get(op, ()) for g in self._mini_batches(at)))

    def waits_of_each(self, ops: Iterable[int], at: Coordinates) -> Dict[str, List[str]]:
        """The same for each op that waits, by the original's name.  An op in a version 1 loop waits for what enters its frame."""
        found = {}
        for op in ops:
            if op in self._meetings:
                checks = [(self._enter if op in self._frames else self._check)(pair, g, op)
                          for pair in self._meetings[op] for g in self._mini_batches(at)]
                found[self._context.graph.ops[op].name] = checks
        return found

    def positions(self, op: Op) -> List[int]:
        """Inputs of an op that must not be read before its checks."""
        follows, later = self._context.region.batch.sources_of, {pair[1] for pair in self._meetings.get(op.id, ())}
        return [position for position, tensor in enumerate(op.inputs) if not later.isdisjoint(follows.get(tensor, ()))]

    def _mini_batches(self, at: Coordinates) -> Iterable[int]:
        """Numbers of the mini-batches on which a clone or copy works."""
        if at.g == ALL:
            return range(self._division.mini_batches_here)
        return (self._division.mini_batch(at),)

    def _check(self, pair: Pair, g: int, op: int) -> str:
        if (pair, g) not in self._checks:
            context, (one, other) = self._context, pair
            scope = context.name("guard", f"{context.flat(one)}_{context.flat(other)}_g{g}")
            first, second = (self._division.examples(source, g)[1] for source in pair)
            names = [context.graph.tensor_name(source) for source in pair]
            message = (
                f"{names[1]!r} has {{1}} examples, but {names[0]!r} has {{0}} in the same mini-batch, and op "
                f"{context.graph.ops[op].name!r} combines them; give both the same number of rows, or declare with "
                "wh.batch_axis(tensor, None) that the rows of one of them are not examples")
            self._checks[pair, g] = check_equal(self._nodes, first, second, message, scope, context.host)
        return self._checks[pair, g]

    def _enter(self, pair: Pair, g: int, op: int) -> str:
        """A tensor that waits for a check; loops of version 1 take it into their frames."""
        if (pair, g) not in self._entered:
            context = self._context
            first = self._division.examples(pair[0], g)[1]
            scope = context.name("guard", f"{context.flat(pair[0])}_{context.flat(pair[1])}_g{g}", "entered")
            self._entered[pair, g] = self._nodes.identity(first, scope, tf.int32, context.host, [self._check(pair, g, op)])
            context.guards.add(self._entered[pair, g])
        return self._entered[pair, g]
