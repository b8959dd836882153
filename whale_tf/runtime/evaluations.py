"""Functions that do not train, divided over the devices of a model replica if layouts divide their variables.

A loop whose body reads such variables is divided, too.  Its body is a step of its own, which takes the parts of the variables
anew in each iteration, and computes on their devices::

    before   While(w, x)       body(w, x)     y = MatMul(x, w)                                        -> w, y
    after    While(x, w0, w1)  body(x, w0, w1)   y = Concat(MatMul(x, w0) on device 0, MatMul(x, w1) on device 1)  -> y, w0, w1

What the loop carries (``x``) stays whole.  While the function around it is divided, the loop takes a stand-in for the handle of
each variable that it only reads; afterwards a loop with the divided body takes its place.
"""
from __future__ import annotations

import contextlib
import weakref
from typing import Any, Callable, Collection, Dict, Iterator, List, MutableMapping, NamedTuple, Optional, Sequence

from whale_tf._tf_compat import add_function, copy_handle_data, function_graph, release, serves_eagerly, tf, v1
from whale_tf.capture import distribution
from whale_tf.capture.handles import own_handle
from whale_tf.cluster import ONE_PROCESS, devices_of_processes
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor import add_control_inputs, backward, consumers, function_def, remove_control_inputs
from whale_tf.ir.traits import READS, WHILES, traits
from whale_tf.ir.walk import reached
from whale_tf.parallelize import Parallelized, parallelize
from whale_tf.planner.homes import NONE
from whale_tf.runtime import functions
from whale_tf.runtime.active import Active

_TRACED: MutableMapping[tf.Graph, tf.Graph] = weakref.WeakKeyDictionary()  # copy -> what it was made of, which knows more


def divide(graph: tf.Graph, state: Active, finish: Optional[Callable[[Parallelized], None]]) -> None:
    """Divides a function that does not train, with the loops in it.

    If several processes keep parts of its variables, it becomes a step of all processes, which all of them call.  Otherwise each
    process runs it on its own devices.

    Args:
        finish: makes the function of a step of all processes do what the local one did; None: this is the body of a loop.

    Raises:
        WhaleError: it cannot be divided; its graph is then as it was.
    """
    divided = distribution.divided_variables(graph)
    handles = [outer for outer, inner in graph.captures if inner.op.name in divided]
    loops = [_Loop.of(graph, op, state) for op in graph.get_operations()
             if op.type in WHILES and any(tensor.op.name in divided for tensor in op.inputs)]
    with _without_variables(loops, _unused_reads(graph, divided)):
        if distribution.divided_variables(graph):
            _divide_ops(graph, state, finish, bool(loops))
    for loop in loops:
        loop.replace()
    _release(graph, [*handles, *(handle for loop in loops for handle in loop.handles.values())])


def _divide_ops(graph: tf.Graph, state: Active, finish: Optional[Callable[[Parallelized], None]], is_around_loops: bool) -> None:
    processes, cluster = state.processes, state.cluster
    distribution.enter(graph, state.device_kinds, processes.count, state.config.zero != NONE, alone=True)
    distribution.evaluate(graph)
    spans = processes.count > 1 and state.may_span(graph, None)
    if spans and finish is None:
        raise UnsupportedOpError(f"the loop with body {graph.name!r} takes variables of which several processes keep parts; "
                                 "make each of its steps a call of a tf.function")
    config = functions.settings(state.config, cluster, spans).changed(
        zero=NONE, offload=NONE, recompute=NONE, pipeline__num_micro_batch=1, amp__dtype=NONE)
    if processes.count > 1 and not spans:
        cluster = cluster.subset(devices_of_processes(cluster, processes)[processes.rank])
        processes = processes.alone() if serves_eagerly() else ONE_PROCESS
    warn = (lambda *_: None) if is_around_loops else state.say  # what their bodies compute does not count here
    done = parallelize(graph, cluster, config, None, processes, state.keys if spans else None, warn=warn)
    if done is None or done.emitted is None:
        return
    if spans and finish is not None:
        finish(done)
        return
    functions.check_devices(graph.name, done.emitted.context)
    functions.finish(graph, done.emitted, done.replaced, done.variables.parts if done.variables is not None else (),
                     state.variable_parts, None)


class _Loop(NamedTuple):
    """A loop of a function whose body takes divided variables.

    Attributes:
        handles: position of an input -> the handle, outside of the function, of the variable that the loop takes there.
        body: the divided body; it captures the variables that it needs whole, and parts of the others.
        condition: of another iteration.
        stand_ins: position -> what the loop takes instead of the handle of a variable that it only reads.
    """

    graph: tf.Graph
    op: tf.Operation
    handles: Dict[int, Any]
    body: Any
    condition: Any
    stand_ins: Dict[int, tf.Tensor]

    @classmethod
    def of(cls, graph: tf.Graph, op: tf.Operation, state: Active) -> _Loop:
        """Divides a copy of the loop's body."""
        outside = {id(inner): outer for outer, inner in graph.captures}
        known = {id(own_handle(variable)) for variable in graph.variables}
        taken = {position: outside.get(id(tensor)) for position, tensor in enumerate(op.inputs)}
        handles = {position: handle for position, handle in taken.items() if id(handle) in known}
        body, condition = (_graph_of(op, name) for name in ("body", "cond"))
        body.variables = graph.variables
        for position, handle in handles.items():
            copy_handle_data(op.inputs[position], body.inputs[position])
            body.replace_capture(handle, body.inputs[position])
        body.outputs = [tensor for position, tensor in enumerate(body.outputs) if position not in handles]
        divide(body, state, None)
        kept = {id(outer): inner for outer, inner in body.captures}
        stand_ins = {}
        for position, handle in handles.items():
            is_read = condition.inputs[position].consumers() or op.outputs[position].consumers()
            if id(handle) in kept:
                if is_read or any(traits(user.type).is_write for user in kept[id(handle)].consumers()):
                    continue
            elif is_read:
                raise UnsupportedOpError(
                    f"the condition of loop {op.name!r} of tf.function {graph.name!r} takes variable "
                    f"{op.inputs[position].op.name!r}, which a layout divides; read it before the loop")
            stand_ins[position] = _stand_in(graph, op.inputs[position])
        return cls(graph, op, handles, body, condition, stand_ins)

    def replace(self) -> None:
        """Puts the loop with the divided body in the place of the one that takes the stand-ins."""
        needed = set(backward([*self.graph.outputs, *self.graph.control_outputs]))
        for op in needed.intersection(op for stand_in in self.stand_ins.values() for op, _ in consumers(stand_in)):
            self._replace_one(op)

    def _replace_one(self, op: tf.Operation) -> None:
        graph, body, condition = self.graph, self.body, self.condition
        carried = [position for position in range(len(op.inputs)) if position not in self.handles]
        places = {id(handle): position for position, handle in self.handles.items()}
        captures = list(body.captures)
        of_condition = []
        for outer, inner in captures:
            if id(outer) in places:
                of_condition.append(condition.inputs[places[id(outer)]])
            else:
                with condition.as_default():
                    of_condition.append(v1.placeholder(inner.dtype, inner.shape, "unused"))
        condition.inputs = [condition.inputs[position] for position in carried] + of_condition
        body.inputs = [tensor for tensor in body.inputs if all(tensor is not inner for _, inner in captures)]
        body.inputs += [inner for _, inner in captures]
        body.outputs = [*body.outputs, *(inner for _, inner in captures)]
        with graph.as_default(), graph.control_dependencies(None), graph.device(None):
            given = [op.inputs[position] for position in carried] + [graph.capture(outer) for outer, _ in captures]
            with graph.control_dependencies(op.control_inputs), graph.device(op.device or None):
                outputs = getattr(tf.raw_ops, op.type)(
                    input=given, cond=add_function(condition, graph), body=add_function(body, graph),
                    output_shapes=[tensor.shape for tensor in body.outputs],
                    parallel_iterations=op.get_attr("parallel_iterations"), name=op.name + "/divided")
        new = outputs[0].op
        new._set_attr("_lower_using_switch_merge", v1.AttrValue(b=True))  # a body that runs on several devices
        for position, output in zip(carried, outputs):
            for user, place in consumers(op.outputs[position]):
                user._update_input(place, output)
        for user in list(op._control_outputs):
            remove_control_inputs(user, [op])
            add_control_inputs(user, [new])
        replaced = {id(op.outputs[position]): output for position, output in zip(carried, outputs)}
        graph.outputs = [replaced.get(id(tensor), tensor) for tensor in graph.outputs]
        graph.control_outputs = [new if one is op else one for one in graph.control_outputs]


def _graph_of(op: tf.Operation, attribute: str) -> Any:
    """A copy of the graph of a loop's body or condition."""
    name = op.get_attr(attribute).name
    with op.graph.as_default():
        copy = function_graph(function_def(op.graph, name), op.get_attr("output_shapes"), with_library=True)
    traced = getattr(_TRACED.get(op.graph, op.graph)._functions.get(name), "graph", None)
    if traced is not None:
        _TRACED[copy] = traced
    for one in traced.get_operations() if traced is not None else ():  # reads of variables have no shapes in a copy
        with contextlib.suppress(KeyError):
            for output, known in zip(copy.get_operation_by_name(one.name).outputs, one.outputs):
                output.set_shape(known.shape)
    return copy


def _stand_in(graph: tf.Graph, handle: tf.Tensor) -> tf.Tensor:
    with graph.as_default(), graph.control_dependencies(None), graph.device(None):
        stand_in = v1.placeholder(tf.resource, [], "stand_in")
        copy_handle_data(handle, stand_in)
    return stand_in


@contextlib.contextmanager
def _without_variables(loops: Sequence[_Loop], unused: Sequence[tf.Operation]) -> Iterator[None]:
    """Gives stand-ins to loops, and to reads that the function does not need (Keras makes one for each weight of a recurrent
    layer); if the function cannot be divided, they have the variables again."""
    moved = [(loop.op, position, stand_in) for loop in loops for position, stand_in in loop.stand_ins.items()]
    moved += [(op, 0, _stand_in(op.graph, op.inputs[0])) for op in unused]
    before = [(op, position, op.inputs[position]) for op, position, _ in moved]
    waits = [(user, op) for op in unused for user in op._control_outputs]
    ends = [(op.graph, op.graph.control_outputs) for op in unused[:1]]
    for op, position, stand_in in moved:
        op._update_input(position, stand_in)
    for user, op in waits:
        remove_control_inputs(user, [op])
    for graph, ops in ends:
        graph.control_outputs = [op for op in ops if op not in unused]
    try:
        yield
    except BaseException:
        for op, position, tensor in before:
            op._update_input(position, tensor)
        for user, op in waits:
            add_control_inputs(user, [op])
        for graph, ops in ends:
            graph.control_outputs = ops
        raise


def _unused_reads(graph: tf.Graph, variables: Collection[str]) -> List[tf.Operation]:
    """Reads of variables whose values lead neither to a result nor to an effect.  They count as effects themselves."""
    effects = [op for op in graph.control_outputs if op.type not in READS]
    needed = reached([*(tensor.op for tensor in graph.outputs), *effects], lambda op: [
        *(tensor.op for tensor in op.inputs), *(wait for wait in op.control_inputs if wait.type not in READS)])
    return [op for op in graph.get_operations()
            if op.type in READS and op.inputs[0].op.name in variables and op not in needed]


def _release(graph: tf.Graph, handles: List[Any]) -> None:
    """Makes a function no longer capture those of the handles that it does not use."""
    wanted = {id(handle) for handle in handles}
    for outer, inner in list(graph.captures):
        if id(outer) in wanted and not inner.consumers() and all(inner is not tensor for tensor in graph.outputs):
            release(graph, outer)
            graph.inputs = [tensor for tensor in graph.inputs if tensor is not inner]
