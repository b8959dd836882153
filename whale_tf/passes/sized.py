"""Which values cross without a message with their sizes in front of them.

The receiver of a message has to know its sizes.  Most open sizes follow from numbers that both processes have before the message
is sent, above all the number of examples (:mod:`whale_tf.ir.sizes`)::

    process 0    batch [b, 6] ──> MatMul [b, 4] ══╗          process 1    batch [b, 6] ──> Shape ──> [b, 4] ══> message
                            └───> Shape ──> [b, 4]╝

A process has the sizes of the tensors that it computes or has received, and integers that follow from them.  Only what comes
before the value in the order of all ops counts, so that no process waits in a circle.
"""
from __future__ import annotations

from typing import Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from whale_tf.ir.extents import Size, SizeLike, Symbol, replaced
from whale_tf.ir.graph import Op
from whale_tf.ir.sizes import OpenSizes, Sizes
from whale_tf.ir.traits import SHAPE_ONLY, traits
from whale_tf.ir.walk import reached
from whale_tf.passes.partition import Crossing, Output

_SIZELESS = ("resource", "variant")  # whose shape is not that of their value

Known = Mapping[int, Sizes]  # process -> the sizes of a value, in symbols that it has


class KnownSizes:
    """What the senders and receivers of crossing values know before.

    Args:
        crossings: their nodes are ops of the graph.
        runs: the processes that run each op; grows by those that compute integers only to know sizes.
        is_common: whether any process may run an op.

    Attributes:
        found: (op, number of its result) -> the sizes in each of these processes, if all of them know all; values without open
            sizes are left out.
    """

    def __init__(self, sizes: OpenSizes, crossings: Iterable[Crossing], runs: Sequence[Set[int]],
                 is_common: Callable[[int], bool]) -> None:
        self._graph, self._runs, self._is_common = sizes.graph, runs, is_common
        self._met: Dict[Tuple[int, SizeLike], Symbol] = {}  # (process, size) -> the first of its tensors that has it
        self.found: Dict[Output, Known] = {}
        receivers: Dict[Output, List[int]] = {}
        ends: Dict[Output, Set[int]] = {}
        for crossing in crossings:
            receivers.setdefault(crossing.output, []).append(crossing.receiver)
            ends.setdefault(crossing.output, set()).update((crossing.sender, crossing.receiver))
        for op in self._graph.ops:
            for index, tensor in enumerate(op.outputs):
                output, own = (op.id, index), sizes.sizes(tensor)
                is_open = own is not None and any(isinstance(size, Size) for size in own)
                if own is None or not is_open or self._graph.tensors[tensor].dtype in _SIZELESS:
                    continue
                if output in ends:
                    self._cross(output, own, ends[output])
                for process in (*runs[op.id], *receivers.get(output, ())):
                    for d, size in enumerate(own):
                        if isinstance(size, Size):
                            self._met.setdefault((process, size), ("dim", tensor, d))

    def _cross(self, output: Output, own: Sizes, processes: Set[int]) -> None:
        known = {process: tuple(self._in(process, size) for size in own) for process in sorted(processes)}
        if all(size is not None for sizes in known.values() for size in sizes):
            self.found[output] = known  # type: ignore[assignment]

    def _in(self, process: int, size: SizeLike) -> Optional[SizeLike]:
        """A size in symbols that a process has; None: it does not know it."""
        if not isinstance(size, Size):
            return size
        if (process, size) in self._met:
            return Size.of(self._met[process, size])
        found: Dict[Symbol, SizeLike] = {}
        for symbol in size.symbols:
            first = self._met.get((process, Size.of(symbol)))
            if first is None and not (symbol[0] == "value" and self._has(process, symbol[1])):
                return None
            found[symbol] = Size.of(symbol if first is None else first)
        return replaced(size, found)

    def _has(self, process: int, tensor: int) -> bool:
        """Whether a process computes an integer tensor, or can, since it has all that the tensor follows from."""
        def before(op: int) -> List[int]:
            return [] if process in self._runs[op] else [
                *(self._graph.tensors[one].op for one in self._graph.ops[op].inputs), *self._graph.ops[op].control_inputs]

        more = [op for op in reached([self._graph.tensors[tensor].op], before) if process not in self._runs[op]]
        if not all(self._is_common(op) and self._is_number(self._graph.ops[op]) for op in more):
            return False
        for op in more:
            self._runs[op].add(process)
        return True

    @staticmethod
    def _is_number(op: Op) -> bool:
        return op.value is not None or op.type in SHAPE_ONLY or bool(traits(op.type).value)
