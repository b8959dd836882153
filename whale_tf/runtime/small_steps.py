"""Mini-batches with fewer examples than parts, such as the last one of an epoch: the local step runs, not the divided one.

A tf.function that trains is kept as it was before it was divided.  Where its mini-batch is known when it is called, that function
is called instead.  In the graph of another function (Keras' ``fit``) a condition chooses::

    mini-batch ──> Less(examples, parts) ──> If ─┬─> divided step
                                                 └─> local step, on one device

The local step is called, never inlined, so that the other steps do not pass through its ops.

There is no condition where the iterator of the mini-batches may end in a call.  What does not depend on the mini-batch runs in
such a call, too (Keras then counts a step, and draws a seed), and inside a condition it would not.
"""
from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import flat_function, packed_results, tf
from whale_tf.emit.shares import Least
from whale_tf.ir.traits import PULLS, RANDOM
from whale_tf.ir.walk import reached

FlatFunction = Callable[..., Sequence[Any]]


class Undivided(NamedTuple):
    """A function before it is divided.

    Attributes:
        function: it takes arguments and what is captured.
        arguments: name of a tensor of its graph -> the number of the argument.
        captured: the tensors outside of it.
    """

    function: FlatFunction
    arguments: Mapping[str, int]
    captured: Sequence[Any]

    def takes(self, names: Mapping[str, Any]) -> bool:
        """Whether some of the tensors are arguments."""
        return not self.arguments.keys().isdisjoint(names)

    def call(self, given: Sequence[Any]) -> Sequence[Any]:
        return self.function(*given, *self.captured)


def undivided(graph: tf.Graph, draws_as_locally: bool) -> Optional[Undivided]:
    """The function that a function's graph is now.

    Args:
        draws_as_locally: random numbers are the local script's.  Then a kernel that counts its draws must make all of them.

    Returns:
        None: it has such a kernel, or this TensorFlow cannot make one.
    """
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    if draws_as_locally and any(node.op in RANDOM and not node.op.startswith("Stateless") for node in nodes):
        return None
    function = flat_function(graph, f"{graph.name}_undivided")
    if function is None:
        return None
    captured = [outer for outer, _ in graph.captures]
    arguments = graph.inputs[:len(graph.inputs) - len(captured)]
    return Undivided(function, {tensor.name: number for number, tensor in enumerate(arguments)}, captured)


class SmallSteps:
    """Runs the local step where a mini-batch is too small for the divided one.

    Args:
        before: the function as it was.
        least: what the divided one needs of its inputs, by name.
        graph: of the divided function.
        say: warns.
    """

    def __init__(self, before: Undivided, least: Mapping[str, Least], graph: tf.Graph, say: Callable[[str], None]) -> None:
        self._before, self._say, self._has_said = before, say, False
        self._least = {before.arguments[name]: one for name, one in least.items() if name in before.arguments}
        self._has_moved = {id(one) for one in before.captured} != {id(outer) for outer, _ in graph.captures}

    def watch(self, function: Any, before_call: Callable[[Sequence[Any]], None], knows_end: Callable[[], Optional[bool]]) -> None:
        """Makes each call of the concrete function run the step that fits.  Calls in the graphs of other functions do only if the
        function's variables are where its user has them: one graph cannot have these in two places.

        Args:
            before_call: puts the values of variables where the local step reads them.
            knows_end: whether iterators never end in calls that are traced now; None: such calls run the divided step.
        """
        divided = function._call_flat

        def _call_flat(tensor_inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            given = list(tensor_inputs)

            def run() -> Any:
                return divided(given, *args, **kwargs)

            if tf.executing_eagerly():
                few = next(((rows, least) for rows, least in self._rows(given) if rows < least), None)
                if few is None:
                    return run()
                self._tell(*few)
                before_call(self._before.captured)
                return packed_results(function, self._before.call(given))
            is_safe = knows_end()
            if self._has_moved or is_safe is None or not is_safe and _is_pulled(given):
                return run()
            return packed_results(function, self._either(run, given))

        function._call_flat = _call_flat

    def _rows(self, given: Sequence[Any]) -> Sequence[Tuple[Any, int]]:
        """How many rows there are, and are needed, of each input."""
        if tf.executing_eagerly():
            return [(given[number].shape[one.dim], one.rows) for number, one in self._least.items()]
        return [(tf.shape(given[number])[one.dim], one.rows) for number, one in self._least.items()]

    def _either(self, run: Callable[[], Any], given: Sequence[Any]) -> Sequence[Any]:
        found, least = [tf.stack(numbers) for numbers in zip(*self._rows(given))]
        worst = tf.argmin(found - least)

        def local() -> Sequence[Any]:
            tf.numpy_function(self._tell, [found[worst], least[worst]], [])
            return [*self._before.call(given), True]

        def step() -> Sequence[Any]:
            results = tf.nest.flatten(run(), expand_composites=True)
            return [*(one for one in results if isinstance(one, tf.Tensor)), True]  # a condition needs a result

        results: Sequence[Any] = tf.cond(found[worst] < least[worst], local, step)
        return results[:-1]

    def _tell(self, rows: int, least: int) -> None:
        if not self._has_said:
            self._has_said = True
            self._say(f"a mini-batch of {rows} examples does not divide over {least} parts: such steps are not divided, and run "
                      f"on one device. If these are not only the last ones of epochs, use a batch size of at least {least}")


def _is_pulled(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether tensors follow from an iterator's element in the graph that calls the function."""
    ops = [tensor.op for tensor in tensors if not hasattr(tensor, "numpy")]
    behind = reached(ops, lambda op: (tensor.op for tensor in op.inputs))
    return any(op.type in PULLS for op in behind)
