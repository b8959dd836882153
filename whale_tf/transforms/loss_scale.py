"""The pass ``loss_scale``: gradients are multiplied by a number while they have the low type; a step with overflow is skipped.

::

    before   1 ──> backward ops ──> gradient (sum of clones) ──> update

    after    1 ──> Mul ──> backward ops ──> gradient (sum) ──> Mul ──┬──────────────> update
                    ^                                           ^    └─> finite? ──┬─> runs the update's writes, or none of them
                  scale ────────────────────────────────── 1 / scale               └─> next scale

The first gradients are multiplied, not the loss: a backward pass is linear in them.  The step is taken if the gradients, summed
over all clones and processes, are finite.  The sums are equal everywhere, so either all processes take the step or none.  If not,
variables, slots and step counters keep their values.  Writes wait for one branch of a Switch, and ops that waited for the writes
wait for a Merge of both branches.  A dynamic scale is halved when a step is skipped, and doubled after ``GROWTH_STEPS`` steps in
a row (Micikevicius et al. 2018, section 3.2).  Its variables are in no checkpoint: the scale is found again within a few steps.
"""

from __future__ import annotations

import weakref
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Set, Tuple, Union

import networkx

from whale_tf._tf_compat import tf
from whale_tf.capture.annotations import TASK_GRAPH_ATTR
from whale_tf.capture.handles import add_variables, captured_variables
from whale_tf.capture.recording import Recording, recording_of, renamed, renamed_call
from whale_tf.cluster import Cluster
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.graph import CALL_ATTR, Phase, Shape
from whale_tf.ir.traits import VARIABLES, traits
from whale_tf.ir.traits.row import Role
from whale_tf.ir.units import GATE_ATTR
from whale_tf.ir.walk import reached
from whale_tf.transforms.precision import FLOAT32, mixed_precision
from whale_tf.transforms.replacing import tag_like
from whale_tf.transforms.values import pass_values

DYNAMIC = "dynamic"
FIRST, GROWTH_STEPS, MOST = 2.0 ** 15, 2000, 2.0 ** 60
ROOT = "whale/loss_scale"
UNSCALED_ATTR = "_whale_unscaled"  # on the op that divides a gradient by the scale
INITIAL = ROOT + "/initial"  # the op that initialises the variables
_OWN = ("current_loss_scale", "dynamic_scale")  # variables of TensorFlow's and Keras' optimizers that scale losses
_STATES: Dict[Any, Tuple[Any, Dict[str, Any]]] = {}  # (id of a variable, scale) -> the variable, and the scale's variables
_FLOATS = ("float64", "float32", "float16", "bfloat16")


def scales_itself(graph: tf.Graph) -> bool:
    """Whether the script's optimizer scales losses."""
    names = [op.name for op in graph.get_operations() if op.type in VARIABLES]
    names += [variable.name for variable in captured_variables(graph)] if graph.building_function else []
    return any(name.rpartition("/")[2].startswith(_OWN) for name in names)


def recorded_low(graph: tf.Graph, precision: str, scale: Union[None, float, str], cluster: Cluster) -> Recording:
    """The recording of a graph, in mixed precision and with scaled gradients if a plan or a configuration asks for them."""
    state = captured_state(graph, scale) if graph.building_function and scale is not None else {}
    step = pass_values(recording_of(graph))
    if precision != FLOAT32:
        step = mixed_precision(step, precision, {device.kind for device in cluster.devices})
    return step if scale is None else loss_scale(step, scale, state)


def captured_state(graph: tf.Graph, scale: Union[float, str]) -> Mapping[str, str]:
    """The variables of a tf.function's scale, which it captures: each one's purpose -> the placeholder of its handle.

    They belong to the function's first variable, so that all traces of a training step share them.

    Raises:
        UnsupportedOpError: the function captures no variables.
    """
    first = next(iter(captured_variables(graph)), None)
    if first is None:
        raise UnsupportedOpError(
            f"amp.loss_scale: tf.function {graph.name!r} gets its variables as arguments; let the function use the variables "
            "directly, or use amp 'bfloat16'")
    key = id(first), scale
    if key not in _STATES or _STATES[key][0]() is not first:
        with tf.init_scope():
            _STATES[key] = weakref.ref(first), {
                name: tf.Variable(value, trainable=False, name=f"{ROOT}/{name}") for name, value in _first_values(scale)}
    variables = _STATES[key][1]
    handles = {name: graph.capture(variable.handle).op.name for name, variable in variables.items()}
    add_variables(graph, variables.values())
    return handles


def _first_values(scale: Union[float, str]) -> Sequence[Tuple[str, float]]:
    return ("scale", FIRST if scale == DYNAMIC else float(scale)), ("steps", 0.0)


def loss_scale(step: Recording, scale: Union[float, str], state: Mapping[str, str]) -> Recording:
    """The step with scaled gradients; a graph that has no update of a variable yet stays as it is.

    Args:
        scale: the number, or ``dynamic``.
        state: for a tf.function see :func:`captured_state`; empty: the graph is a Session's, and gets its own variables.

    Raises:
        UnsupportedOpError: a variable is read again after its update, or the first gradients are not found.
    """
    phases = step.phases
    writes = {op for op in phases.variables.written_by if step.graph.ops[op].phase is Phase.APPLY}
    if step.returned is not None:
        writes |= _counters(step)
    return _Scaler(step, scale, state, writes).run() if writes else step


def _counters(step: Recording) -> Set[int]:
    """Writes of integers that grow by a constant: a function's step counters outside the update, as in Keras."""
    graph, found = step.graph, set()
    for write, variables in step.phases.variables.written_by.items():
        op = graph.ops[write]
        handle = graph.tensors[op.inputs[0]].op if op.inputs else -1
        if len(op.inputs) != 2 or handle not in variables or graph.ops[handle].attrs.get("dtype") not in ("int32", "int64") \
                or graph.ops[handle].attrs.get("shape") != ():
            continue
        behind = reached([graph.tensors[op.inputs[1]].op], lambda index: () if index == handle else (
            graph.tensors[tensor].op for tensor in graph.ops[index].inputs))
        begins = (graph.ops[index].type for index in behind if index != handle and not graph.ops[index].inputs)
        if all(traits(kind).role is Role.CONSTANT for kind in begins):
            found.add(write)
    return found


class _Group(NamedTuple):
    """Gradients that are scaled together.

    Attributes:
        cut: the gradients that leave the backward pass.
        calls: the gradient calls that compute them.
        writes: the writes that follow from them.
    """

    cut: Set[int]
    calls: Set[int]
    writes: Set[int]


class _Scaler:
    """Stages the ops, then moves the edges.

    Attributes:
        shapes: shapes of new tensors, by name.
    """

    def __init__(self, step: Recording, scale: Union[float, str], state: Mapping[str, str], writes: Set[int]) -> None:
        self._step, self._graph, self._scale, self._state, self._writes = step, step.graph, scale, state, writes
        self._edit, self._root = StagedEdit.after(step.definitions), ROOT
        self.shapes: Dict[str, Shape] = {}

    def run(self) -> Recording:
        step = self._step
        gone: Dict[str, Any] = {}
        grads = [call.grads for call in step.annotations.gradient_calls]
        initial: List[str] = []
        for number, group in enumerate(self._groups()):
            self._root, self._writes = f"{ROOT}/{number}" if number else ROOT, group.writes
            self._run(group, gone, grads, initial)
        if initial:
            self._edit.add("NoOp", INITIAL, [], control_inputs=initial)
        found = [renamed_call(call, call.ys, call.xs, given) for call, given in zip(step.annotations.gradient_calls, grads)]
        return step.after(self._edit, found, {}, self.shapes, {**step.replaced, **gone})

    def _run(self, group: _Group, gone: Dict[str, Any], grads: List[Any], initial: List[str]) -> None:
        """Scales a group's gradients.

        Args:
            gone: tensors and ops -> what replaces them; grows.
            grads: the gradients of every gradient call; is changed.
            initial: ops that initialise variables; grows.
        """
        graph, step, variables = self._graph, self._step, self._state
        first, makers = self._first_gradients(group.calls)
        if not variables:
            variables = {name: self._variable(name, value) for name, value in _first_values(self._scale)}
            initial += [f"{self._root}/{name}/first" for name in variables]
        products = self._multiply(first, makers, variables["scale"])
        scale = self._read(variables["scale"], "scale_again")
        inverse = self._add("Reciprocal", "inverse", [scale])
        finite = [self._unscale(tensor, products, inverse, number, gone) for number, tensor in enumerate(sorted(group.cut))]
        every = finite[0] if len(finite) == 1 else self._all(
            self._add("Pack", "each", finite, shape=(len(finite),), N=len(finite), axis=0), 1, "all")
        end = self._gate(every, self._next(every, scale, variables))
        for place, call in enumerate(step.annotations.gradient_calls):
            if call.index in group.calls:
                grads[place] = renamed(call.grads, products)
        if step.returned is not None:  # a function's caller waits for its writes
            gone.update({graph.ops[write].name: (end,) for write in self._writes})

    def _groups(self) -> List[_Group]:
        """Groups of updates without a common gradient or gradient call, each with a scale of its own: a run of one of them does
        not compute the others' gradients.  A function runs all of them."""
        graph, phases = self._graph, self._step.phases
        cut = {edge.tensor for edge in phases.cut if graph.tensors[edge.tensor].dtype in _FLOATS}
        of_call: Dict[int, Set[int]] = {}
        for target in phases.targets:
            if not cut.isdisjoint(target.tensors):
                of_call.setdefault(target.call, set()).update(cut.intersection(target.tensors))
        if self._step.returned is not None or len(of_call) == 1:
            return [_Group(cut, set(of_call), self._writes)]
        gradients = {write: self._gradients_of(write, cut) for write in self._writes}
        together = networkx.Graph()
        together.add_nodes_from(cut)
        for each in (*of_call.values(), *gradients.values()):
            networkx.add_path(together, sorted(each))
        groups = sorted(networkx.connected_components(together), key=min)
        if len(groups) == 1:
            return [_Group(cut, set(of_call), self._writes)]
        return [_Group(one, {call for call, own in of_call.items() if own <= one},
                       {write for write, own in gradients.items() if own and own <= one}) for one in groups]

    def _gradients_of(self, write: int, cut: Set[int]) -> Set[int]:
        """The gradients from which a write follows, by data or by waiting for other writes."""
        graph, found = self._graph, set()  # type: ignore[var-annotated]

        def before(index: int) -> List[int]:
            op = graph.ops[index]
            if op.phase in (Phase.FORWARD, Phase.BACKWARD):
                return []
            found.update(cut.intersection(op.inputs))
            return graph.predecessors(op)

        reached([write], before)
        return found

    # -- the beginning of the backward pass ---------------------------------------------------------------------------
    def _first_gradients(self, calls: Set[int]) -> Tuple[Set[int], Set[int]]:
        """The tensors with which the backward passes begin, and the ops that make them: ops of a gradient call that, like all ops
        before them, were not made from a forward op.  Some of these make zeros, which stay zeros."""
        graph = self._graph
        makers: Set[int] = set()
        for op in graph.ops:
            if op.attrs.get(CALL_ATTR) in calls and op.forward < 0 and all(
                    wait in makers or graph.ops[wait].attrs.get(CALL_ATTR) not in calls for wait in graph.predecessors(op)):
                makers.add(op.id)
        found = {tensor for index in makers for tensor in graph.ops[index].outputs
                 if graph.tensors[tensor].dtype in _FLOATS
                 and (not graph.consumers(tensor) or any(reader not in makers for reader, _ in graph.consumers(tensor)))}
        if not found or any(call.given for call in self._step.annotations.gradient_calls if call.index in calls):
            raise UnsupportedOpError(
                "amp.loss_scale: the script gives tf.gradients its first gradients (grad_ys, output_gradients); multiply them by "
                "a scale there, and divide the gradients of variables by it, or set amp.loss_scale to 1")
        return found, makers

    def _multiply(self, first: Set[int], makers: Set[int], handle: str) -> Dict[str, str]:
        """Makes readers of the first gradients read their products with the scale."""
        graph, replaced = self._graph, {}  # type: ignore[var-annotated]
        reads: Dict[int, str] = {}
        for number, tensor in enumerate(sorted(first)):
            producer = graph.producer(tensor)
            reader = next((graph.ops[r] for r, _ in graph.consumers(tensor) if graph.ops[r].forward >= 0), producer)
            task_graph = graph.ops[reader.forward].task_graph if reader.forward >= 0 else -1
            if task_graph not in reads:
                reads[task_graph] = self._read(handle, f"scale_{task_graph + 1}", task_graph)
            factor = self._as(reads[task_graph], graph.tensors[tensor].dtype, f"low_{number}")
            product = self._add("Mul", f"first_{number}", [graph.tensor_name(tensor), factor], graph.tensors[tensor].shape)
            tag_like(self._edit.node(product.partition(":")[0]), self._step.definitions.node(reader.name))
            for other, position in graph.consumers(tensor):
                if graph.ops[other].phase is Phase.BACKWARD and other not in makers:
                    self._edit.move_input(graph.ops[other].name, position, product)
            replaced[graph.tensor_name(tensor)] = product
        return replaced

    # -- the update ---------------------------------------------------------------------------------------------------
    def _unscale(self, tensor: int, products: Mapping[str, str], inverse: str, number: int, gone: Dict[str, Any]) -> str:
        """Makes ops after the cut read the unscaled gradient, and notes it in ``gone``.  Returns the name of the boolean that
        says whether it is finite."""
        graph, name = self._graph, self._graph.tensor_name(tensor)
        shape = graph.tensors[tensor].shape
        factor = self._as(inverse, graph.tensors[tensor].dtype, f"inverse_{number}")
        value = self._add("Mul", f"gradient_{number}", [products.get(name, name), factor], shape)
        self._edit.node(value.partition(":")[0]).attr[UNSCALED_ATTR].i = number
        for edge in self._step.phases.cut:
            if edge.tensor == tensor:
                self._edit.move_input(graph.ops[edge.op].name, edge.position, value)
        gone[name] = value
        is_finite = self._add("IsFinite", f"is_finite_{number}", [value], shape)
        if shape is None:
            is_finite = self._add("Reshape", f"flat_{number}", [is_finite, self._const([-1], f"flat_{number}/shape")], (None,))
        return self._all(is_finite, 1 if shape is None else len(shape), f"finite_{number}")

    def _next(self, every: str, scale: str, variables: Mapping[str, str]) -> List[str]:
        """Writes of the next scale."""
        one, nothing = self._const(1.0, "one"), self._const(0.0, "nothing")
        steps = self._add("Add", "more", [self._read(variables["steps"], "steps"), one])
        new = scale
        if self._scale == DYNAMIC:
            grows = self._add("GreaterEqual", "grows", [steps, self._const(float(GROWTH_STEPS), "growth_steps")])
            larger = self._add("Minimum", "larger", [
                self._add("Mul", "twice", [scale, self._const(2.0, "two")]), self._const(MOST, "most")])
            smaller = self._add("Maximum", "smaller", [self._add("Mul", "half_of", [scale, self._const(0.5, "half")]), one])
            new = self._add("Select", "next", [every, self._add("Select", "grown", [grows, larger, scale]), smaller])
            steps = self._add("Select", "counted", [grows, nothing, steps])
        steps = self._add("Select", "next_steps", [every, steps, nothing])
        return [self._assign(variables["scale"], new, "write_scale"), self._assign(variables["steps"], steps, "write_steps")]

    def _gate(self, every: str, states: Sequence[str]) -> str:
        """Makes the update's writes run only in a step whose gradients are all finite.

        Returns:
            The op that runs after the writes, or after they are skipped.
        """
        graph, edit = self._graph, self._edit
        switch = self._add("Switch", "which", [every, every], control=states).partition(":")[0]
        edit.node(switch).attr[GATE_ATTR].b = True
        taken, skipped = (self._add("Identity", name, [f"{switch}:{index}"]) for index, name in ((1, "taken"), (0, "skipped")))
        ends: Dict[Tuple[str, ...], str] = {}

        def end(waits: Tuple[str, ...]) -> str:
            if waits not in ends:
                done = self._add("Identity", f"done_{len(ends)}", [taken], control=waits)
                ends[waits] = self._add("Merge", f"end_{len(ends)}", [done, skipped], N=2).partition(":")[0]
            return ends[waits]

        for op in graph.ops:
            waits = tuple(graph.ops[wait].name for wait in op.control_inputs if wait in self._writes)
            if op.id in self._writes:
                edit.move_waits(op.name, (), [taken.partition(":")[0]])
            elif waits:
                if op.phase in (Phase.FORWARD, Phase.BACKWARD):
                    raise UnsupportedOpError(
                        f"amp.loss_scale: {op.name!r} waits for an update in the same step ({waits[0]!r}), which may be skipped; "
                        "use amp 'bfloat16', which needs no scale, or set amp.loss_scale to 1")
                edit.move_waits(op.name, waits, [end(waits)])
        return end(tuple(graph.ops[write].name for write in sorted(self._writes)))

    # -- nodes --------------------------------------------------------------------------------------------------------
    def _variable(self, name: str, first: float) -> str:
        """Stages a variable and the op that gives it its first value."""
        handle = self._edit.add("VarHandleOp", f"{self._root}/{name}", attrs={
            "dtype": tf.float32, "shape": tf.TensorShape([]), "shared_name": f"{self._root}/{name}",
            "container": self._edit.graph._container or ""})
        self.shapes[f"{handle}:0"] = ()
        self._assign(f"{handle}:0", self._const(first, f"{name}/value"), f"{name}/first")
        return handle

    def _read(self, handle: str, name: str, task_graph: int = -1) -> str:
        read = self._add("ReadVariableOp", name, [handle], dtype=tf.float32)
        if task_graph >= 0:
            self._edit.node(read.partition(":")[0]).attr[TASK_GRAPH_ATTR].i = task_graph
        return read

    def _as(self, number: str, dtype: str, name: str) -> str:
        """A number in another type."""
        return number if dtype == FLOAT32 else self._add("Cast", name, [number], DstT=tf.as_dtype(dtype), SrcT=tf.float32)

    def _assign(self, handle: str, value: str, name: str) -> str:
        return self._edit.add("AssignVariableOp", f"{self._root}/{name}", [handle, value], attrs={"dtype": tf.float32})

    def _all(self, x: str, rank: int, name: str) -> str:
        axes = self._const(list(range(rank)), name + "/axes", tf.int32)
        return self._add("All", name, [x, axes], keep_dims=False)

    def _const(self, value: Any, name: str, dtype: Any = None) -> str:
        dtype = dtype or (tf.float32 if isinstance(value, float) else tf.int32)
        node = self._edit.const(value, f"{self._root}/{name}", dtype=dtype)
        self.shapes[f"{node}:0"] = (len(value),) if isinstance(value, list) else ()
        return f"{node}:0"

    def _add(self, op_type: str, name: str, inputs: Sequence[str], shape: Shape = (), control: Sequence[str] = (),
             **attrs: Any) -> str:
        """Stages a node; returns the name of its first result."""
        node = self._edit.add(op_type, f"{self._root}/{name}", inputs, control_inputs=control, attrs=attrs)
        for index in range(2):
            self.shapes[f"{node}:{index}"] = shape
        return f"{node}:0"
