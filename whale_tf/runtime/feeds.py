"""What a run is fed: shapes that the graph does not know, and whether inputs match."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from whale_tf._tf_compat import FetchMapper, tf
from whale_tf.capture.annotations import annotations_of
from whale_tf.emit.checks import misfit, reported
from whale_tf.emit.context import Context
from whale_tf.emit.processes import ancestors
from whale_tf.emit.shares import divide, levels
from whale_tf.errors import InputError
from whale_tf.ir.batch_axis import BatchAxis
from whale_tf.ir.layout import Blocks, batch_of, rows_each
from whale_tf.ir.traits import traits

Fetch = Union[tf.Tensor, tf.Operation]


def elements(graph: tf.Graph, fetches: Any) -> Tuple[Any, List[Fetch]]:
    """TensorFlow's own mapper of a fetch structure, and the tensors and ops in it."""
    with graph.as_default():
        mapper = FetchMapper.for_fetch(fetches)
    return mapper, list(mapper.unique_fetches())


def fed(graph: tf.Graph, feed_dict: Optional[Dict]) -> Dict[tf.Tensor, Any]:
    """The tensors that are fed, and their values (None: part of a structure, whose values are ignored)."""
    found = {}
    for key, value in (feed_dict or {}).items():
        is_tensor = isinstance(key, (tf.Tensor, str))
        for part in [key] if is_tensor else tf.nest.flatten(key, expand_composites=True):
            try:
                found[graph.as_graph_element(part, allow_operation=False)] = value if is_tensor else None
            except (TypeError, ValueError, KeyError):
                continue  # TensorFlow's own run reports it
    return found


def shape_of(value: Any) -> Optional[Tuple[int, ...]]:
    """The shape of a value that is fed; None: not known."""
    shape = getattr(value, "shape", None)
    if shape is None and value is not None:
        shape = np.shape(value)
    return None if shape is None else tuple(int(size) for size in shape)


def trains(fetches: Iterable[Fetch]) -> bool:
    """Whether a run of a graph that was not rewritten reaches an optimizer's update."""
    ops = (fetch if isinstance(fetch, tf.Operation) else fetch.op for fetch in fetches)
    return any(traits(op.type).is_update for op in ancestors(ops))


class Waiting(NamedTuple):
    """A graph that cannot be planned until its first training run shows the shapes of ``tensors``."""

    graph: tf.Graph
    tensors: Tuple[str, ...]

    def learn(self, original: Callable, note: Callable[[Sequence[tf.Operation], Any], None], fetches: Any,
              feed_dict: Optional[Dict], *arguments: Any) -> Tuple[bool, Any]:
        """Learns the shapes of a run.  Shapes of fed tensors are known before it.  Others (an iterator's, a Python function's)
        are known only from the run itself, which is then local: the graph is as the script built it.

        Args:
            note: is told of a run before it is made.

        Returns:
            Whether the run was made, and what it returned.
        """
        mapper, wanted = elements(self.graph, fetches)
        ops = [fetch if isinstance(fetch, tf.Operation) else fetch.op for fetch in wanted]
        if not trains(wanted):
            note(ops, feed_dict)
            return True, original(fetches, feed_dict, *arguments)
        shapes = {tensor.name: shape_of(value) for tensor, value in fed(self.graph, feed_dict).items()}
        known = annotations_of(self.graph).shapes
        known.update((name, shape) for name, shape in shapes.items() if name in self.tensors and shape is not None)
        if self.is_over:
            return False, None
        needed = ancestors(ops)
        rest = [tensor for tensor in map(self.graph.get_tensor_by_name, self.unknown) if tensor.op in needed]
        note(ops, feed_dict)
        values = original([*wanted, *rest], feed_dict, *arguments)
        for tensor, value in zip(rest, values[len(wanted):]):
            shape = shape_of(value)
            if shape is not None:
                known[tensor.name] = shape
        return True, mapper.build_results(values[:len(wanted)])

    @property
    def unknown(self) -> List[str]:
        """Those whose shapes are not known yet."""
        known = annotations_of(self.graph).shapes
        return [name for name in self.tensors if name not in known]

    @property
    def is_over(self) -> bool:
        """Whether all shapes are known."""
        return not self.unknown


def check_fed(context: Context, feeds: Mapping[tf.Tensor, Any], ranks: Mapping[str, Sequence[int]]) -> None:
    """Checks that inputs which are fed together have the examples of one mini-batch.

    Args:
        ranks: inputs of unknown rank -> the shape that the plan was made for.

    Raises:
        InputError: they have different numbers of examples, or not the rank that the plan was made for.
    """
    graph, batch, sources = context.graph, context.region.batch, context.region.batch.sources
    sizes: Dict[int, int] = {}  # input -> examples
    of: Dict[int, str] = {}  # input -> the batch whose examples it has
    joined: Dict[int, int] = {}  # input with the examples of several batches -> rows
    for tensor, value in feeds.items():
        shape = shape_of(value)
        if shape is None or tensor.op.name not in graph:
            continue
        if tensor.name in ranks and len(shape) != len(ranks[tensor.name]):
            raise InputError(
                f"{tensor.name!r} is fed shape {shape} in a training run, but the graph was planned for the rank of its first "
                f"mini-batch, {tuple(ranks[tensor.name])}; feed values of rank {len(ranks[tensor.name])}")
        number = graph.tensor(tensor.name)
        if number in sources and sources[number] < len(shape):
            rows, blocks = shape[sources[number]], batch.layout(number).blocks or (1,)
            each, batches = sum(map(rows_each, blocks)), set(map(batch_of, blocks))
            if len(batches) > 1:
                joined[number] = rows
            elif rows % each:
                raise InputError(f"{tensor.name!r} is fed {rows} rows, but each example has {each} rows; feed a multiple of "
                                 f"{each}{_fix_of_rows([blocks])}")
            else:
                sizes[number], of[number] = rows // each, batches.pop()
    for number, rows in joined.items():
        _check_joined(batch, number, rows, {of[other]: size for other, size in sizes.items()})
    for number, size in sizes.items():
        first = next(other for other in sizes if of[other] == of[number])
        if size != sizes[first] and not _weigh_alike(context, size, sizes[first]):
            raise InputError(
                "{!r} is fed {}, but {!r} is fed {} in the same mini-batch; feed the same number to both, or "
                "declare with wh.batch_axis(tensor, None) that one of them has no examples{}".format(
                    graph.tensor_name(number), _examples(batch, number, size), graph.tensor_name(first),
                    _examples(batch, first, sizes[first]), _fix_of_rows([batch.layout(each).blocks for each in (number, first)])))


def _check_joined(batch: BatchAxis, number: int, rows: int, sizes: Mapping[str, int]) -> None:
    """Raises:
        InputError: an input does not have the rows of all the batches whose examples it has one after the other.
    """
    blocks = batch.layout(number).blocks or ()
    if not set(map(batch_of, blocks)) <= sizes.keys():
        return
    expected = sum(rows_each(block) * sizes[batch_of(block)] for block in blocks)
    if rows != expected:
        names = " and ".join(repr(batch.graph.tensor_name(batch.batches[batch_of(block)][0])) for block in blocks)
        raise InputError(f"{batch.graph.tensor_name(number)!r} is fed {rows} rows, but {names}, whose examples it has one after "
                         f"the other, are fed {expected} rows; feed {expected} rows")


def _examples(batch: BatchAxis, number: int, size: int) -> str:
    each = sum(map(rows_each, batch.layout(number).blocks or (1,)))
    return f"{size} examples" + (f" of {each} rows" if each > 1 else "")


def _fix_of_rows(blocks: Iterable[Blocks]) -> str:
    """What to do if an input's rows are examples, but the model reads several as one."""
    if all(list(map(rows_each, each or ())) == [1] for each in blocks):
        return ""
    return ", or say with wh.batch_axis(tensor, 0) that each of its rows is an example"


@contextlib.contextmanager
def named_errors() -> Iterator[None]:
    """Raises:
        InputError: what the step itself found to be wrong with a mini-batch, or sizes that do not fit each other in a part of it
            (:mod:`whale_tf.emit.checks`).
    """
    try:
        yield
    except (tf.errors.InvalidArgumentError, tf.errors.CancelledError) as error:
        text = reported(error.message)
        if text:
            raise InputError(text) from None
        text = misfit(error.message)
        if not text:
            raise
        raise InputError(text) from error  # which says where the script made the op


def _weigh_alike(context: Context, one: int, other: int) -> bool:
    """Whether all clones get the same shares of two inputs of different sizes."""
    plan = context.plan
    totals = [levels(plan, index, False) for index in range(len(plan.task_graphs))]
    return all([a * other for a in divide(one, level)] == [b * one for b in divide(other, level)] for level in totals)
