"""What the user and the hooks say about a graph: TaskGraph annotations and gradient calls.

Ops are tagged as they are created, through ``Graph._attr_scope``, so the tags travel with GraphDef exports and clones:

    ==========================  ==========================================================
    ``_whale_task_graph``       index of the annotation the op was created under
    ``_whale_phase``            ``b"backward"`` for ops made by a gradient call
    ``_whale_gradient_call``    index of that gradient call
    ``_whale_forward``          name of the forward op a backward op was made from
    ``_whale_shard``            device, within its TaskGraph, of an op that wh.split made
    ``_whale_replica``          model replica that keeps a part of a variable, if a layout says so
    ==========================  ==========================================================

Only names are kept here, never TensorFlow objects.  The table is a ``WeakKeyDictionary`` and not an attribute of the
graph, so that nothing of ours stays on the user's object and the record disappears with the graph.
"""
from __future__ import annotations

import contextlib
import dataclasses
import weakref
from typing import Any, Dict, Iterator, List, MutableMapping, Optional, Sequence, Set, Tuple, Union

from whale_tf._tf_compat import ControlFlowGraph, eager_outside_functions, function_tracing, tf, v1
from whale_tf.errors import AnnotationError
from whale_tf.ir.graph import CALL_ATTR
from whale_tf.patterns.spread import Spread

STRATEGIES = ("replicate", "split")
TASK_GRAPH_ATTR = "_whale_task_graph"
PHASE_ATTR = "_whale_phase"
FORWARD_ATTR = "_whale_forward"

SparseNames = Tuple[str, str, Optional[str]]  # values, indices, dense_shape of an IndexedSlices
GradientNames = Union[None, str, SparseNames]


@dataclasses.dataclass(frozen=True)
class Annotation:
    """One ``with wh.replicate(...)`` / ``with wh.split(...)``: a TaskGraph (Whale 3.1).

    ``device_count`` None means all devices; ``name`` is the user's, or ``<strategy>_<index>``; ``one_step``: all processes run
    parts of one step (:class:`whale_tf.plan.Plan`); ``alone``: one model replica computes for all.
    """

    index: int
    strategy: str
    device_count: Optional[int]
    name: str
    one_step: bool = False
    alone: bool = False


class GradientCall:
    """One call of ``tf.gradients`` or of an optimizer's ``compute_gradients``.

    Attributes:
        index: number of the call in its graph; its ops are tagged with it.
        ys: names of the differentiated tensors.
        xs: names of the tensors with respect to which they are differentiated; a variable is listed as output 0 of its op.
        grads: for each of ``xs``: None, a tensor name, or (values, indices, dense_shape) names.
        given: whether the caller gave first gradients (``grad_ys``, ``output_gradients``) instead of ones.
        first_op, last_op: names of the first and last op that the call created; None if it created none.
    """

    __slots__ = ("index", "ys", "xs", "grads", "given", "first_op", "last_op")

    def __init__(self, index: int, ys: List[str], xs: List[str], given: bool = False) -> None:
        self.index, self.given, self.ys, self.xs = index, given, ys, xs
        self.grads: List[GradientNames] = []
        self.first_op: Optional[str] = None
        self.last_op: Optional[str] = None

    def __repr__(self) -> str:
        return f"GradientCall({self.index}, ys={self.ys}, xs={self.xs})"


class Annotations:
    """The annotations and gradient calls of one graph, in the order in which they were made.

    Attributes:
        items: the annotations, by increasing index; a default strategy that was taken back leaves a gap.
        default: the strategy of forward ops outside every annotation (one of ``items``), or None.
        default_since: how many ops the graph had when it was set.
        gradient_calls: finished calls; a call that raised is not kept.
        calls_started: how many calls there were, including failed ones.
        trains: gradients of variables were taken in a tf.function.
        evaluates: the function does not train, but is divided like a step; one gradient call has what it computes, and no
            variables.
        checkpoints: names of tensors that are kept for the backward pass while others are computed again.
        axes: tensor -> the dimension along the batch that the user states; None: it has none.
        collected: tensor -> how its values in all clones become one when it is fetched (``COLLECTED``).
        shapes: input of unknown rank -> its shape in the first mini-batch.
        remembered: names of annotations that Keras layers remembered, or entered themselves.
        made_in: placeholder of a variable's handle in a function -> index of the annotation in which the variable was made.
        layouts: placeholder of a variable's handle in a function -> (dimension to divide, or tiles; what asks for it).
    """

    def __init__(self) -> None:
        self.items: List[Annotation] = []
        self.remembered: Set[str] = set()
        self.made_in: Dict[str, int] = {}
        self.layouts: Dict[str, Tuple[Union[int, Spread], str]] = {}
        self.default: Optional[Annotation] = None
        self.default_since = 0
        self.gradient_calls: List[GradientCall] = []
        self.calls_started = 0
        self.trains = self.evaluates = False
        self.checkpoints: List[str] = []
        self.axes: Dict[str, Optional[int]] = {}
        self.collected: Dict[str, str] = {}
        self.shapes: Dict[str, Tuple[int, ...]] = {}
        self._open: Optional[Annotation] = None
        self._count = 0

    def next_index(self) -> int:
        """An index that no annotation has had."""
        self._count += 1
        return self._count - 1

    def enter(self, strategy: str, device_count: Optional[int], name: Optional[str]) -> Annotation:
        """The annotation of a ``with`` block: a known one if ``name`` is known, else a new one.

        Raises:
            AnnotationError: unknown strategy, bad device count, or a known name with other arguments.
        """
        _check_arguments(strategy, device_count)
        for item in self.items:
            if name is not None and item.name == name:
                if (item.strategy, item.device_count) != (strategy, device_count):
                    raise AnnotationError(
                        f"TaskGraph {name!r} was opened as {call_text(item.strategy, item.device_count)} and is now opened "
                        f"as {call_text(strategy, device_count)}. The same name continues the same TaskGraph, so give the "
                        "same strategy and device count, or another name.")
                return item
        index = self.next_index()
        item = Annotation(index, strategy, device_count, name or f"{strategy}_{index}")
        self.items.append(item)
        return item


_ANNOTATIONS: MutableMapping[tf.Graph, Annotations] = weakref.WeakKeyDictionary()


def annotations_of(graph: tf.Graph) -> Annotations:
    """The annotations of ``graph``, created empty on first use."""
    if graph not in _ANNOTATIONS:
        _ANNOTATIONS[graph] = Annotations()
    return _ANNOTATIONS[graph]


def forget() -> None:
    """Drops the annotations of all graphs (``wh.shutdown`` and a second ``wh.init``).  Tags on ops stay, without effect."""
    _ANNOTATIONS.clear()


def current_graph(caller: str) -> tf.Graph:
    """The graph to which ops are currently added, for ``caller``.

    Raises:
        AnnotationError: eager execution, in which there is no graph to annotate, or a function that is being traced.
    """
    if tf.executing_eagerly():
        raise AnnotationError(
            f"{caller} applies to ops of a graph, but TensorFlow is executing eagerly. Use it inside a function: write "
            "@tf.function above the training step; or build the model inside `with tf.Graph().as_default():`.")
    graph = v1.get_default_graph()
    if not graph.building_function:
        return graph
    if not eager_outside_functions() or isinstance(graph, ControlFlowGraph):
        raise AnnotationError(
            f"{caller} is used in the body of a function ({getattr(graph, 'name', '')!r}), such as a branch of tf.cond. A loop, "
            "condition or function call is in one TaskGraph: put the annotation around the whole call.")
    if function_tracing() is None:
        raise AnnotationError(
            f"{caller} is used in a tf.function ({graph.name!r}), which whale_tf can divide from TensorFlow 2.4 on, but this is "
            f"{tf.__version__}. Build and train the model in graph mode: tf.compat.v1.disable_eager_execution() first, no "
            "tf.function, a tf.compat.v1.train optimizer and tf.compat.v1.Session.")
    return graph


@contextlib.contextmanager
def annotate(graph: tf.Graph, strategy: str, device_count: Optional[int] = None,
             name: Optional[str] = None) -> Iterator[Annotation]:
    """Puts every op of ``graph`` that is created inside the block into one TaskGraph.

    Without ``name`` each block is a new TaskGraph.  A name that was used before continues that TaskGraph, with the same
    strategy and device count.  Ops of other graphs are not affected, so a function body (of ``tf.while_loop`` or ``tf.cond``
    in TensorFlow 2) belongs to the TaskGraph of the op that calls it.

    Raises:
        AnnotationError: nested annotations, or invalid arguments.
    """
    annotations = annotations_of(graph)
    outer = _open_annotation(graph)
    if outer is not None:
        raise AnnotationError(
            f"wh.{strategy} inside wh.{outer.strategy} (TaskGraph {outer.name!r}): annotations do not nest. Close the outer "
            "`with` block before opening the inner one; to nest parallelism, use the device counts (nested data parallelism) "
            "or wh.set_default_strategy.")
    item = annotations.enter(strategy, device_count, name)
    annotations._open = item
    try:
        with graph._attr_scope({TASK_GRAPH_ATTR: v1.AttrValue(i=item.index)}):
            yield item
    finally:
        annotations._open = None


def set_default_strategy(graph: tf.Graph, strategy: str, device_count: Optional[int] = None, name: Optional[str] = None,
                         one_step: bool = False, alone: bool = False) -> Annotation:
    """Puts every forward op outside all annotations, made before or after this call, into one TaskGraph (Whale 3.1).  A later
    call ends that TaskGraph and begins another: ops made from then on are in the new one.  If no op was made in between, it
    replaces the earlier call.

    Raises:
        AnnotationError: inside an annotation, or invalid arguments.
    """
    annotations = annotations_of(graph)
    outer = _open_annotation(graph)
    if outer is not None:
        raise AnnotationError(
            f"wh.set_default_strategy inside wh.{outer.strategy} (TaskGraph {outer.name!r}): it is for the ops outside every "
            "annotation. Call it before the `with` block.")
    _check_arguments(strategy, device_count)
    replaced, count = annotations.default, len(graph.get_operations())
    if replaced is not None and annotations.default_since < count:
        _end_default_strategy(graph, replaced)
        replaced = None
    index = annotations.next_index() if replaced is None else replaced.index
    kept = [other for other in annotations.items if other is not replaced]
    is_known = any(other.name == "default" for other in kept)
    item = Annotation(index, strategy, device_count, name or (f"default_{index}" if is_known else "default"), one_step, alone)
    annotations.items = sorted(kept + [item], key=lambda other: other.index)
    annotations.default, annotations.default_since = item, count
    return item


def _end_default_strategy(graph: tf.Graph, item: Annotation) -> None:
    """Tags the ops that have the default strategy so far: those outside all annotations in front of the first gradient."""
    calls = annotations_of(graph).gradient_calls
    first_gradient = calls[0].first_op if calls else None
    for op in graph.get_operations():
        if op.name == first_gradient:
            break
        tags = op.node_def.attr
        if TASK_GRAPH_ATTR not in tags and PHASE_ATTR not in tags:
            op._set_attr(TASK_GRAPH_ATTR, v1.AttrValue(i=item.index))


def forget_default_strategy(graph: tf.Graph) -> None:
    """Undoes :func:`set_default_strategy`, if it was called."""
    annotations = annotations_of(graph)
    annotations.items = [item for item in annotations.items if item is not annotations.default]
    annotations.default = None


@contextlib.contextmanager
def gradient_call(graph: tf.Graph, ys: Any, xs: Any, first: Any = None) -> Iterator[GradientCall]:
    """Tags the ops created inside as backward ops of one gradient call; the caller fills in ``grads`` with
    :func:`gradient_names`.  The call is kept if the block ends without an exception.

    Args:
        first: the gradients with which it begins, if the caller gives them.
    """
    annotations = annotations_of(graph)
    given = any(grad is not None for grad in (first if isinstance(first, (list, tuple)) else [first]))
    call = GradientCall(annotations.calls_started, tensor_names(ys), tensor_names(xs), given)
    annotations.calls_started += 1
    before = len(graph.get_operations())
    with graph._attr_scope({PHASE_ATTR: v1.AttrValue(s=b"backward"), CALL_ATTR: v1.AttrValue(i=call.index)}):
        yield call
    created = graph.get_operations()[before:]
    if created:
        call.first_op, call.last_op = created[0].name, created[-1].name
    annotations.gradient_calls.append(call)


def tensor_names(values: Any) -> List[str]:
    """Names of the tensors behind tensors, variables (output 0 of their op), IndexedSlices and lists of them."""
    if isinstance(values, (list, tuple)) and not hasattr(values, "op"):
        return [name for value in values for name in tensor_names(value)]
    if isinstance(values, tf.IndexedSlices):
        return [values.values.name, values.indices.name]
    if isinstance(values, tf.Variable):
        return [values.op.outputs[0].name]
    if isinstance(values, tf.Tensor):
        return [values.name]
    return [part.name for part in tf.nest.flatten(values, expand_composites=True) if isinstance(part, tf.Tensor)]


def gradient_names(grads: Any) -> List[GradientNames]:
    """The names of what a gradient call returned, in its order."""
    names: List[GradientNames] = []
    for grad in grads:
        if grad is None:
            names.append(None)
        elif isinstance(grad, tf.IndexedSlices):
            shape = None if grad.dense_shape is None else grad.dense_shape.name
            names.append((grad.values.name, grad.indices.name, shape))
        else:
            names.append(grad.name)
    return names


def densified(grads: Sequence[Any], xs: Any) -> List[Any]:
    """Sparse gradients as tensors: repeated rows added up, zeros elsewhere.

    Args:
        xs: what the gradients are with respect to, one or a list.
    """
    found = []
    for grad, x in zip(grads, xs if isinstance(xs, (list, tuple)) else [xs]):
        if isinstance(grad, tf.IndexedSlices):
            if grad.dense_shape is None:
                grad = tf.IndexedSlices(grad.values, grad.indices, tf.shape(x))
            grad = tf.convert_to_tensor(grad, name="densified")
            grad.set_shape(x.shape)
        found.append(grad)
    return found


def is_annotating(graph: tf.Graph) -> bool:
    """Whether an annotation is open in the graph or one around it."""
    return _open_annotation(graph) is not None


def _open_annotation(graph: Optional[tf.Graph]) -> Optional[Annotation]:
    """The annotation that is open in ``graph`` or, for a function body, in a graph around it."""
    while graph is not None:
        if graph in _ANNOTATIONS and _ANNOTATIONS[graph]._open is not None:
            return _ANNOTATIONS[graph]._open
        graph = getattr(graph, "outer_graph", None)
    return None


def _check_arguments(strategy: str, device_count: Optional[int]) -> None:
    if strategy not in STRATEGIES:
        raise AnnotationError("strategy {!r} is not one of {}.".format(strategy, ", ".join(STRATEGIES)))
    if device_count is not None and (isinstance(device_count, bool) or not isinstance(device_count, int)
                                     or device_count < 1):
        raise AnnotationError(f"wh.{strategy}({device_count!r}): the device count must be a whole number of at least 1, or "
                              "left out for all devices.")


def call_text(strategy: str, device_count: Optional[int]) -> str:
    return "wh.{}({})".format(strategy, "" if device_count is None else device_count)
