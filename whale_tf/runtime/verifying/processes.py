"""The first step of several processes, each with mini-batches of its own: process 0 runs the local step on all of them.

::

    process 0    what is asked ══> step ──> values ──┬──> rows and sums of all ──> local step ──> verdict
                      ║                              ║                                              ║
    process 1         ╚══════════> step ──> values ══╝                             the same error, or none

Texts travel through queues of the processes' servers (:meth:`whale_tf.processes.runtime.Runtime.tell`).
"""
from __future__ import annotations

import json
from typing import Any, Callable, Collection, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from whale_tf._tf_compat import tf
from whale_tf.emit.recipes import Recipes
from whale_tf.errors import MismatchError, PlanError
from whale_tf.ir.batch_axis import EXTENT, EXTREMES
from whale_tf.ir.graph import OpGraph, Phase
from whale_tf.ir.layout import Exponent, Layout, batch_of, exponents_of, rows_each
from whale_tf.parallelize import Parallelized
from whale_tf.processes.runtime import Runtime
from whale_tf.runtime.verifying.compare import VALUE, Item
from whale_tf.runtime.verifying.cut import Cut
from whale_tf.runtime.verifying.local import Values
from whale_tf.runtime.verifying.mini_batches import in_one

COMBINED: Dict[str, Callable[..., Any]] = {"max": np.max, "min": np.min, "prod": np.prod, "any": np.any, "all": np.all}
OF_ALL = ("processes", "sync", "shared", "added", "of_all")  # scopes of values over all processes
TensorProto = type(tf.make_tensor_proto(0))
OWN = "each process has a value of its own mini-batch"


class Part(NamedTuple):
    """What one process has: values of tensors, and new values of the variables that it keeps, by name."""

    tensors: Values
    variables: Values


class Job:
    """What the processes say to each other about a first step.

    Args:
        runtime: this process.
        are_parts: each process runs a part of one step, and has all values that are compared.
    """

    def __init__(self, runtime: Runtime, are_parts: bool = False) -> None:
        self._runtime, self.are_parts = runtime, are_parts
        self.is_first = runtime.processes.is_chief
        self.count = 1 if are_parts else runtime.processes.count  # steps side by side

    def told(self, what: Any) -> Any:
        """What process 0 gives (as JSON), in every process."""
        return json.loads(self._runtime.tell(json.dumps(what if self.is_first else None).encode()).decode())

    def collected(self, own: Part) -> List[Part]:
        """The parts of all processes, in process 0; in the others, nothing."""
        if self.are_parts:
            return [own]
        texts = [f"{kind} {name}\n".encode() + tf.make_tensor_proto(value).SerializeToString()
                 for kind, values in enumerate(own) for name, value in values.items()]
        found = [own]
        for given in self._runtime.collect([] if self.is_first else texts):
            found.append(Part({}, {}))
            for text in given:
                head, _, content = text.partition(b"\n")
                kind, name = head.decode().split(" ", 1)
                found[-1][int(kind)][name] = tf.make_ndarray(TensorProto.FromString(content))
        return found if self.is_first else []

    def judged(self, judge: Callable[[], str]) -> str:
        """What ``judge`` returns in process 0, in every process.

        Raises:
            MismatchError: it raises one in process 0.
            PlanError: likewise, or it raises another error there.
        """
        if not self.is_first:
            text, mismatch, error = self.told(None)
            if mismatch:
                raise MismatchError(*mismatch)
            if error:
                raise PlanError(error)
            return str(text)
        try:
            text = judge()
        except MismatchError as raised:
            self.told(("", (str(raised), raised.tensor, raised.task_graph), ""))
            raise
        except Exception as raised:
            self.told(("", (), f"process 0 cannot compare the first training step with the local one: {raised}"))
            raise
        self.told((text, (), ""))
        return text


class Origin(NamedTuple):
    """Which tensor of the op graph a fetched value is (-1: none), and whether it covers the mini-batches of all processes."""

    tensor: int
    is_of_all: bool


class Whole:
    """Puts the values of all processes together.

    Args:
        ops: of the local script.
        known: name in the local script -> what is fetched for it.
        merges: with the merged values that may be fetched.
    """

    def __init__(self, done: Parallelized, ops: OpGraph, known: Mapping[str, tf.Tensor], merges: Sequence[Recipes]) -> None:
        assert done.emitted is not None
        self._context, self._ops, self._known = done.emitted.context, ops, known
        self._batch = self._context.region.batch
        self._merged: Dict[str, Origin] = {}
        for each in merges:
            self._merged.update((name.partition(":")[0], Origin(*found)) for name, found in each.staged().items())
        self._scopes = tuple(self._context.name(scope) + "/" for scope in OF_ALL)

    def together(self, parts: Sequence[Values], cut: Cut) -> Tuple[Values, Dict[str, str]]:
        """Values of the mini-batches of all processes, and what has none -> why.

        Raises:
            PlanError: the local step needs one that has none.
        """
        found: Values = {}
        lost: Dict[str, str] = {}
        taken = {self._ops.tensor_name(tensor) for tensor in cut.taken}
        for name in parts[0]:
            values = [part[name] for part in parts if name in part]
            if len(values) == len(parts) and self._is_input(name):
                dim = self._batch.sources.get(self._context.graph.tensor(name)) if self._is_known(name) else None
                found[name] = values[0] if dim is None and name not in taken else in_one(name, values, dim, "processes")
                continue
            whole = self._whole(name, values, parts) if len(values) == len(parts) else None
            if whole is None:
                lost[name] = OWN
            else:
                found[name] = whole
        missing = sorted(lost.keys() & {*taken, *(self._ops.tensor_name(use.tensor) for use in cut.leaving)})
        if missing:
            raise PlanError(
                f"verify is 'first_step', but {missing[0]!r}, which the local step takes from the divided one, cannot be put "
                "together from the processes' values; compare in one process that has all devices, or set verify to 'off'")
        return found, lost

    def _whole(self, name: str, values: Sequence[np.ndarray], parts: Sequence[Values]) -> Optional[np.ndarray]:
        origin = self._origin(self._known[name])
        if origin is None:
            return None if self._is_own(self._known[name].op) else values[0]
        if not origin.is_of_all:
            return self._combined(origin.tensor, values, parts)
        owners = self._context.owners  # of a gradient's sum over all micro-batches, which only one process has
        return values[owners.process[owners.gradients[origin.tensor]] if origin.tensor in owners.gradients else 0]

    def _is_input(self, name: str) -> bool:
        op = name.partition(":")[0]
        return name not in self._known or (op in self._ops and self._ops.op(op).phase is Phase.INPUT)

    def _is_known(self, name: str) -> bool:
        return name.partition(":")[0] in self._context.graph

    def _origin(self, tensor: tf.Tensor) -> Optional[Origin]:
        """Follows what only passes a value on."""
        while True:
            op, context = tensor.op, self._context
            if op.name in self._merged:
                return self._merged[op.name]
            if op.name.startswith(self._scopes):
                return Origin(-1, True)
            if op.name in context.graph and context.region.contains(context.graph.op(op.name)):
                return Origin(context.graph.tensor(tensor.name), False)
            if op.name in self._ops and self._ops.op(op.name).phase is Phase.INPUT:
                return Origin(context.graph.tensor(tensor.name), False) if op.name in context.graph else None
            if op.name.startswith(context.name("joined") + "/") and len(op.inputs) > 1:
                found = {self._origin(one) for one in op.inputs if one.op.type != "Const"} - {None}
                layouts = {(self._batch.layout(one.tensor), one.is_of_all) for one in found if one is not None}
                return next(iter(found)) if len(layouts) == 1 else None
            if len(op.inputs) != 1:
                return None
            tensor = op.inputs[0]

    def _is_own(self, op: tf.Operation) -> bool:
        """Whether an op outside of the clones reads values of this process's own mini-batch."""
        seen, stack = set(), [op]
        while stack:
            current = stack.pop()
            if current.name in seen or current.name.startswith(self._scopes):
                continue
            seen.add(current.name)
            for tensor in current.inputs:
                origin = self._origin(tensor) if tensor.dtype not in (tf.resource, tf.variant) else None
                if origin is None:
                    stack.append(tensor.op)
                elif not origin.is_of_all and (origin.tensor in self._batch.sources or not self._is_equal(origin.tensor)):
                    return True
        return False

    def _is_equal(self, tensor: int) -> bool:
        return tensor not in self._batch.unknown and self._batch.layout(tensor).is_replicated

    def _combined(self, tensor: int, values: Sequence[np.ndarray], parts: Sequence[Values]) -> Optional[np.ndarray]:
        if tensor in self._batch.unknown:
            return None
        layout = self._batch.layout(tensor)
        if layout.is_sharded:
            return self._rows(layout, values, parts)
        if layout.is_replicated:
            return values[0]
        if layout.is_partial:
            weights = self._weights(layout.power, parts)
            return None if weights is None else np.asarray(
                sum(weight * value for weight, value in zip(weights, values)), values[0].dtype)
        if layout.kind == EXTENT.kind:
            return self._extent(tensor, values)
        if layout.kind in EXTREMES:
            return np.asarray(COMBINED[layout.kind](np.stack(values), axis=0), values[0].dtype)
        return None

    def _extent(self, tensor: int, values: Sequence[np.ndarray]) -> Optional[np.ndarray]:
        """``c0 + c1 B`` from the processes' values: their sum less the constants that are in it more than once."""
        surplus = self._batch.surplus(tensor)
        if surplus is None:
            return None
        rows = [np.ravel(value) for value in values]
        each = [one if part is None else part for one, part in zip(rows[0], surplus)]
        return np.asarray(sum(rows) - (len(rows) - 1) * np.array(each)).reshape(np.shape(values[0])).astype(values[0].dtype)

    def _rows(self, layout: Layout, values: Sequence[np.ndarray], parts: Sequence[Values]) -> Optional[np.ndarray]:
        """Rows in the order of the local script: block by block, each from all processes."""
        blocks = layout.blocks or (1,)
        if len(blocks) == 1:
            return np.concatenate(values, layout.dim)
        pieces = []
        for value, part in zip(values, parts):
            sizes = [self._examples(batch_of(block), part) for block in blocks]
            if None in sizes:
                return None
            lengths = [rows_each(block) * int(size or 0) for block, size in zip(blocks, sizes)]
            if min(map(rows_each, blocks)) < 1 or sum(lengths) != value.shape[layout.dim]:
                return None
            pieces.append(np.split(value, np.cumsum(lengths)[:-1], layout.dim))
        return np.concatenate([piece for block in zip(*pieces) for piece in block], layout.dim)

    def _weights(self, power: Exponent, parts: Sequence[Values]) -> Optional[List[float]]:
        """The share of each process in the examples, to a power."""
        found = np.ones(len(parts))
        for base, exponent in exponents_of(power).items():
            sizes = [[self._examples(batch, part) for batch, _ in base] for part in parts]
            if any(size is None for row in sizes for size in row):
                return None
            counts = np.array([sum(count * int(size or 0) for size, (_, count) in zip(row, base)) for row in sizes], float)
            found *= (counts / counts.sum()) ** exponent
        return [float(weight) for weight in found]

    def _examples(self, batch: str, part: Values) -> Optional[int]:
        """How many examples of a batch a process has; None: no input tells."""
        graph, sources = self._context.graph, self._batch.sources
        for source in self._batch.batches.get(batch, ()):
            name = graph.tensor_name(source)
            if name in part:
                return int(np.shape(part[name])[sources[source]])
        return None


def kept_elsewhere(done: Parallelized) -> Collection[str]:
    """Names of the variables that only other processes have."""
    emitted = done.emitted
    assert emitted is not None
    graph, owners = emitted.context.graph, emitted.context.owners
    return {graph.ops[variable].name for variable, owner in owners.state.items() if not owners.is_own(owner)}


def items_of_others(items: Sequence[Item], parts: Sequence[Part]) -> List[Item]:
    """The new values of variables in the other processes, which must be those of process 0."""
    return [item._replace(found=np.asarray(part.variables[item.name]), divided=f"{item.divided}, in process {rank}")
            for rank, part in enumerate(parts) if rank for item in items if item.what == VALUE and item.name in part.variables]
