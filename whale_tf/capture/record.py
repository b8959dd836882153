"""``tf.Graph`` -> :class:`~whale_tf.ir.graph.OpGraph`, from one GraphDef export.

Reading ops one by one through the C API costs several calls per op; an export costs a single call, and then everything except
shapes and dtypes of top-level outputs (cached on the Python objects) is read from the protocol buffer.

Function bodies become op graphs too, shared by all ops that call the function.  A body starts with one ``_Arg`` op per
parameter and ends with one ``_Retval`` op per result, both with an ``index`` attribute.
"""
from __future__ import annotations

import heapq
from typing import AbstractSet, Any, Callable, Collection, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import FunctionDef, GraphDef, op_def, static_dims, tf
from whale_tf.capture.annotations import FORWARD_ATTR, PHASE_ATTR, TASK_GRAPH_ATTR
from whale_tf.capture.attributes import DTYPE_NAMES, Attributes, proto_shape
from whale_tf.capture.handles import variable_handles
from whale_tf.errors import GraphError
from whale_tf.garbage import garbage_collection_paused
from whale_tf.graph_editor.definitions import Definitions
from whale_tf.graph_editor.edges import edges_of
from whale_tf.ir.graph import Op, OpGraph, Phase, Shape
from whale_tf.ir.traits import NEXT_ITERATIONS

NO_SHAPES: Mapping[str, Shape] = {}
NO_COPIES: Mapping[str, str] = {}

Tags = Dict[str, Any]  # attributes that only the op graph has
NO_TAGS: Mapping[str, Tags] = {}

_Edge = Tuple[int, int]  # node number, output index
_Outputs = List[Tuple[Shape, str]]


class _Node(NamedTuple):
    """An op before it is numbered: its edges refer to places in the export.  ``forward``: name of its forward op."""

    op: Op
    outputs: _Outputs
    inputs: List[_Edge]
    controls: List[int]
    forward: Optional[str] = None


class _Result(NamedTuple):
    """An output argument in an OpDef.  Its dtypes are the attribute ``dtypes`` or, ``number`` times (an attribute; "": once), the
    attribute ``type``, or ``dtype``."""

    name: str
    dtypes: str
    type: str
    dtype: str
    number: str
    suffix: str  # of a reference


def record(graph: tf.Graph, graph_def: Optional[GraphDef] = None, shapes: Mapping[str, Shape] = NO_SHAPES) -> OpGraph:
    """The ops of ``graph`` in creation order.  They are moved only if a later op feeds an earlier one (TensorFlow adds inputs to
    a loop when it is differentiated), so that the order is topological except for ``NextIteration`` edges.

    Ops of gradient calls have phase BACKWARD, all others FORWARD; :func:`whale_tf.capture.phases.find_phases` finds the other
    phases.  Constants of up to 4096 elements have their value (read-only); attributes are plain Python values, with functions as
    their names and tensors as arrays.  A variable that a tf.function captured is a variable here, too.

    Args:
        graph_def: ``graph.as_graph_def()``, if the caller has it.
        shapes: shapes of tensors, in addition to what the graph knows about them.
    """
    with garbage_collection_paused():
        graph_def = graph.as_graph_def() if graph_def is None else graph_def
        return _Recorder(graph, graph_def.library.function, shapes).top_level(graph_def)


def record_anew(before: OpGraph, definitions: Definitions, successors: Mapping[str, str], dropped: Collection[str],
                shapes: Mapping[str, Shape], copies: Mapping[str, str] = NO_COPIES,
                tags: Mapping[str, Tags] = NO_TAGS, before_ops: Mapping[str, str] = NO_COPIES) -> OpGraph:
    """The op graph after a pass, with new ops and moved edges.

    Args:
        definitions: the graph's definitions after the pass.
        successors: op whose work others do now -> the op to which its gradients belong.
        dropped: ops that are left out.
        shapes: shapes of the new ops' tensors; tensors that are not listed have unknown rank.
        copies: new op -> an op that was there before, from which it differs only in its edges, device, colocation and tags.
        tags: new op -> attributes that it has in the op graph, in addition to its own or in their place.
        before_ops: new op -> the op in front of which it is, dropped or not; the other new ops are at the end.  Ops of a
            version 1 loop must be in front of those that follow it.
    """
    with garbage_collection_paused():
        return _Recorder(definitions.graph, definitions.library).anew(
            before, definitions, successors, dropped, shapes, copies, tags, before_ops)


class _Recorder:
    def __init__(self, graph: tf.Graph, library: Iterable[FunctionDef], known: Mapping[str, Shape] = NO_SHAPES) -> None:
        self._graph = graph
        self._known = known
        self._functions = {function.signature.name: function for function in library}
        self._bodies: Dict[str, OpGraph] = {}
        self._signatures: Dict[str, Any] = {}
        self._of_type: Dict[str, List[_Result]] = {}
        self._defaults: Dict[str, Dict[str, Any]] = {}
        self._value = Attributes().value
        self._shapes: Dict[Any, Shape] = {}

    def top_level(self, graph_def: Any) -> OpGraph:
        definitions, operations = graph_def.node, self._graph.get_operations()
        places = {definition.name: place for place, definition in enumerate(definitions)}
        handles = variable_handles(self._graph)
        nodes = []
        for name, definition, operation in zip(places, definitions, operations):
            if operation.name != name:
                operation = self._graph.get_operation_by_name(name)
            inputs, controls = _edges(edges_of(definition), places, _graph_edge)
            kind, attrs = handles.get(name) or (definition.op, self._attributes(definition))
            nodes.append(_node(name, kind, definition.device, self._described(operation), attrs, inputs, controls,
                               self._bodies_of(definition)))
        return _build(nodes, OpGraph())

    def anew(self, before: OpGraph, definitions: Definitions, successors: Mapping[str, str], dropped: Collection[str],
             shapes: Mapping[str, Shape], copies: Mapping[str, str], tags: Mapping[str, Tags],
             before_ops: Mapping[str, str]) -> OpGraph:
        added = {name: node for name, node in definitions.added.items() if name not in dropped}
        places = {name: place for place, name in enumerate(_sequence(before, added, dropped, before_ops))}
        place_of = {op.id: places[op.name] for op in before.ops if op.name in places}
        nodes = []
        for name in places:
            op = before.find(name)
            if op is not None:
                moved = added.get(name) or definitions.changed.get(name)
                nodes.append(_kept(op, before, places, place_of, successors, moved))
                continue
            definition = added[name]
            edges, own = _edges(edges_of(definition), places, _graph_edge), tags.get(name, {})
            original = before.find(copies[name]) if name in copies else None
            if original is not None:
                nodes.append(self._copied(definition, original, before, edges, own, shapes))
                continue
            attrs = {**self._defaults_of(definition.op), **self._attributes(definition)}
            dtypes, body = self._output_types(definition.op, attrs)[0], self._bodies_of(definition)
            attrs.update(own)
            nodes.append(_node(name, definition.op, definition.device, _shaped(name, dtypes, shapes), attrs, *edges, body))
        return _build(nodes, OpGraph())

    def _copied(self, definition: Any, original: Op, before: OpGraph, edges: Tuple[List[_Edge], List[int]], own: Tags,
                shapes: Mapping[str, Shape]) -> _Node:
        """A copy of an op of the graph before, with its own edges, device, colocation and tags."""
        name, attrs = definition.name, {**original.attrs, **own}
        if "_class" in attrs:
            del attrs["_class"]
            if "_class" in definition.attr:
                attrs["_class"] = self._value(definition.attr["_class"])
        forward = attrs.pop(FORWARD_ATTR, before.ops[original.forward].name if original.forward >= 0 else None)
        task_graph = attrs.pop(TASK_GRAPH_ATTR, original.task_graph)
        op = Op(-1, name, original.type, attrs=attrs, value=original.value, phase=_phase(attrs), task_graph=task_graph,
                device=definition.device, body=original.body)
        return _Node(op, _shaped(name, [before.tensors[t].dtype for t in original.outputs], shapes), *edges, forward)

    def body(self, name: str) -> OpGraph:
        """The op graph of library function ``name``."""
        if name not in self._bodies:
            self._bodies[name] = OpGraph()  # a recursive function finds its own graph, still growing
            _build(self._function_nodes(self._functions[name]), self._bodies[name])
        return self._bodies[name]

    # -- nodes ----------------------------------------------------------------------------------------------------
    def _described(self, operation: tf.Operation) -> _Outputs:
        shapes = [self._shape(output) for output in operation.outputs]
        if self._known:
            shapes = [_more_of(shape, self._known.get(output.name)) for output, shape in zip(operation.outputs, shapes)]
        return [(shape, output.dtype.name) for output, shape in zip(operation.outputs, shapes)]

    def _function_nodes(self, function: Any) -> List[_Node]:
        signature, definitions = function.signature, function.node_def
        python_graph = self._python_graph(signature.name)
        starts: Dict[str, Dict[str, int]] = {argument.name: {} for argument in signature.input_arg}
        nodes = []
        for index, argument in enumerate(signature.input_arg):
            shape, dtype = self._argument_shape(function, python_graph, index), tf.as_dtype(argument.type).name
            nodes.append(_node(argument.name, "_Arg", "", [(shape, dtype)], {"T": dtype, "index": index}, [], []))
        described = []
        for definition in definitions:
            attrs = {**self._defaults_of(definition.op), **self._attributes(definition)}
            dtypes, starts[definition.name] = self._output_types(definition.op, attrs)
            described.append((list(zip(self._body_shapes(definition, python_graph, len(dtypes)), dtypes)), attrs))
        places = {name: place for place, name in enumerate(starts)}

        def edges(texts: Sequence[str]) -> Tuple[List[_Edge], List[int]]:
            return _edges(texts, places, lambda text: _function_edge(text, starts))

        for definition, (outputs, attrs) in zip(definitions, described):
            nodes.append(_node(definition.name, definition.op, definition.device, outputs, attrs,
                               *edges(definition.input), self._bodies_of(definition)))
        for index, result in enumerate(signature.output_arg):
            attrs = {"T": tf.as_dtype(result.type).name, "index": index}
            nodes.append(_node(result.name + "_retval", "_Retval", "", [], attrs, *edges([function.ret[result.name]])))
        return nodes

    def _python_graph(self, name: str) -> Optional[tf.Graph]:
        """The FuncGraph behind a function, if TensorFlow still has it (not for imported graphs)."""
        return getattr(self._graph._functions.get(name), "graph", None)

    def _argument_shape(self, function: Any, python_graph: Optional[tf.Graph], index: int) -> Shape:
        if python_graph is not None and index < len(getattr(python_graph, "inputs", ())):
            return self._shape(python_graph.inputs[index])
        shapes = function.attr["_input_shapes"].list.shape if "_input_shapes" in function.attr else ()
        return proto_shape(shapes[index]) if index < len(shapes) else None

    def _body_shapes(self, definition: Any, python_graph: Optional[tf.Graph], count: int) -> Sequence[Shape]:
        if python_graph is not None:
            try:
                outputs = python_graph.get_operation_by_name(definition.name).outputs
            except KeyError:
                outputs = []
            if len(outputs) == count:
                return [self._shape(output) for output in outputs]
        if "_output_shapes" in definition.attr:
            return [proto_shape(shape) for shape in definition.attr["_output_shapes"].list.shape]
        return [None] * count

    def _output_types(self, type_: str, attrs: Dict[str, Any]) -> Tuple[List[str], Dict[str, int]]:
        """The dtype of each output, and where each named output argument starts."""
        dtypes: List[str] = []
        starts: Dict[str, int] = {}
        for result in self._results(type_):
            starts[result.name] = len(dtypes)
            if result.dtypes:
                dtypes.extend(attrs[result.dtypes])
                continue
            dtype = (attrs[result.type] if result.type else result.dtype) + result.suffix
            dtypes.extend([dtype] * (attrs[result.number] if result.number else 1))
        return dtypes, starts

    def _results(self, type_: str) -> List[_Result]:
        if type_ not in self._of_type:
            self._of_type[type_] = [
                _Result(argument.name, argument.type_list_attr, argument.type_attr, DTYPE_NAMES[argument.type],
                        argument.number_attr, "_ref" if argument.is_ref else "")
                for argument in self._signature(type_).output_arg]
        return self._of_type[type_]

    def _signature(self, type_: str) -> Any:
        if type_ not in self._signatures:
            function = self._functions.get(type_)
            self._signatures[type_] = function.signature if function is not None else op_def(self._graph, type_)
        return self._signatures[type_]

    # -- attributes -----------------------------------------------------------------------------------------------
    def _attributes(self, definition: Any) -> Dict[str, Any]:
        attr = definition.attr  # its items() is slow in protobuf's C++ implementation
        return {name: self._value(attr[name]) for name in attr if name != "_output_shapes"}

    def _defaults_of(self, type_: str) -> Dict[str, Any]:
        """Attributes that an op of this type has if its definition does not give them."""
        if type_ not in self._defaults:
            attrs = getattr(self._signature(type_), "attr", ())
            self._defaults[type_] = {
                attr.name: self._value(attr.default_value) for attr in attrs if attr.HasField("default_value")}
        return self._defaults[type_]

    def _shape(self, tensor: tf.Tensor) -> Shape:
        """The shape as a tuple; equal shapes are the same tuple, which keeps large graphs small."""
        dims = static_dims(tensor)
        shape = None if dims is None else tuple(dims)
        return self._shapes.setdefault(shape, shape)

    def _bodies_of(self, definition: Any) -> Optional[Dict[str, OpGraph]]:
        """The functions that an op calls: by attribute name, as ``name[i]`` in a list; by its type, if that is a function."""
        if not self._functions:
            return None
        bodies = {}
        if definition.op in self._functions:
            bodies[definition.op] = self.body(definition.op)
        for name, value in definition.attr.items():
            kind = value.WhichOneof("value")
            if kind == "func" and value.func.name in self._functions:
                bodies[name] = self.body(value.func.name)
            elif kind == "list":
                for index, function in enumerate(value.list.func):
                    bodies[f"{name}[{index}]"] = self.body(function.name)
        return bodies or None


# -- the op graph ---------------------------------------------------------------------------------------------------
def _build(nodes: List[_Node], op_graph: OpGraph) -> OpGraph:
    op_graph.extend([(nodes[place].op, nodes[place].outputs) for place in _order(nodes)])
    results = [node.op.outputs for node in nodes]
    for op, _, inputs, controls, forward in nodes:
        op.inputs = tuple([results[place][index] for place, index in inputs])
        if controls:
            op.control_inputs = tuple([nodes[place].op.id for place in controls])
        if forward is not None and forward in op_graph:
            op.forward = op_graph.op(forward).id
    return op_graph


def _sequence(before: OpGraph, added: Mapping[str, Any], dropped: Collection[str], before_ops: Mapping[str, str]) -> List[str]:
    """Names of the ops after a pass, in order."""
    in_front: Dict[str, List[str]] = {}
    for name, follower in before_ops.items():
        in_front.setdefault(follower, []).append(name)
    found: List[str] = []
    for op in before.ops:
        found += in_front.get(op.name, ())
        if op.name not in dropped:
            found.append(op.name)
    return found + [name for name in added if name not in before and name not in before_ops]


def _shaped(name: str, dtypes: Sequence[str], shapes: Mapping[str, Shape]) -> _Outputs:
    """The outputs of a new op."""
    return [(shapes.get(f"{name}:{index}"), dtype) for index, dtype in enumerate(dtypes)]


def _more_of(shape: Shape, known: Shape) -> Shape:
    """A shape, completed with what else is known about it."""
    if shape is None or known is None or len(shape) != len(known):
        return known if shape is None else shape
    return tuple(theirs if mine is None else mine for mine, theirs in zip(shape, known))


def _node(
    name: str, type_: str, device: str, outputs: _Outputs, attrs: Dict[str, Any], inputs: List[_Edge], controls: List[int],
    body: Optional[Dict[str, OpGraph]] = None
) -> _Node:
    """A node with the given attributes, which change: what an :class:`Op` has a field for is taken out."""
    value = attrs.pop("value", None) if type_ == "Const" else None
    forward, task_graph = attrs.pop(FORWARD_ATTR, None), attrs.pop(TASK_GRAPH_ATTR, -1)
    op = Op(-1, name, type_, attrs=attrs, value=value, phase=_phase(attrs), task_graph=task_graph, device=device, body=body)
    return _Node(op, outputs, inputs, controls, forward)


def _kept(op: Op, before: OpGraph, places: Dict[str, int], place_of: Dict[int, int], successors: Mapping[str, str],
          definition: Any) -> _Node:
    """An op that existed before, with the same attributes.

    Args:
        place_of: op of the graph before -> place.
        definition: its new one if its edges have moved, else None.
    """
    ops, tensors = before.ops, before.tensors
    if definition is not None:
        inputs, controls = _edges(edges_of(definition), places, _graph_edge)
    else:
        inputs = [(place_of[tensors[t].op], tensors[t].index) for t in op.inputs]
        controls = [place_of[control] for control in op.control_inputs]
    forward = ops[op.forward].name if op.forward >= 0 else None
    same = Op(-1, op.name, op.type, attrs=op.attrs, value=op.value, phase=_phase(op.attrs), task_graph=op.task_graph,
              device=op.device, body=op.body)
    outputs = [(tensors[t].shape, tensors[t].dtype) for t in op.outputs]
    return _Node(same, outputs, inputs, controls, None if forward is None else successors.get(forward, forward))


def _phase(attrs: Mapping[str, Any]) -> Phase:
    return Phase.BACKWARD if attrs.get(PHASE_ATTR) == "backward" else Phase.FORWARD


# -- edges --------------------------------------------------------------------------------------------------------
def _edges(texts: Sequence[str], places: Dict[str, int], split: Callable[[str], Tuple[str, int]]
           ) -> Tuple[List[_Edge], List[int]]:
    """Data and control inputs as node places."""
    inputs, controls = [], []
    for text in texts:
        place = places.get(text)
        if place is not None:
            inputs.append((place, 0))
        elif text[0] == "^":
            controls.append(places[text[1:]])
        else:
            name, index = split(text)
            inputs.append((places[name], index))
    return inputs, controls


def _graph_edge(text: str) -> Tuple[str, int]:
    """``"split:1" -> ("split", 1)``."""
    name, _, index = text.rpartition(":")
    return name, int(index)


def _function_edge(text: str, starts: Dict[str, Dict[str, int]]) -> Tuple[str, int]:
    """``"split:output:1" -> ("split", start of "output" + 1)``."""
    name, argument, index = text.split(":")
    return name, starts[name][argument] + int(index)


def _order(nodes: List[_Node]) -> Sequence[int]:
    """Places in an order in which producers come first: the given order if it is one, else the nearest topological order (Kahn's
    algorithm, smallest place first).  Edges out of NextIteration close the loops and do not count.

    Raises:
        GraphError: a cycle without NextIteration.
    """
    back = {place for place, node in enumerate(nodes) if node.op.type in NEXT_ITERATIONS}
    if _is_ordered(nodes, back):
        return range(len(nodes))
    sources = [[source for source, _ in node.inputs if source not in back] + node.controls for node in nodes]
    users: List[List[int]] = [[] for _ in nodes]
    for place, needed in enumerate(sources):
        for source in needed:
            users[source].append(place)
    missing = [len(needed) for needed in sources]
    ready = [place for place, count in enumerate(missing) if count == 0]
    order = []
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        for user in users[place]:
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, user)
    if len(order) < len(nodes):
        stuck = next(place for place, count in enumerate(missing) if count > 0)
        raise GraphError(f"op {nodes[stuck].op.name!r} ({nodes[stuck].op.type}) waits for itself: the graph has a cycle "
                         f"that is not a while loop.")
    return order


def _is_ordered(nodes: List[_Node], back: AbstractSet[int]) -> bool:
    """Whether each node comes after those that it needs, except for edges out of ``back``."""
    for place, node in enumerate(nodes):
        for source, _ in node.inputs:
            if source >= place and source not in back:
                return False
        if node.controls and max(node.controls) >= place:
            return False
    return True
