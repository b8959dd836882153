"""An assignment -> staged nodes: every divided op becomes one op for each device.

::

    before   x ──> MatMul ──> BiasAdd ──> loss           after   x ──┬──> MatMul/0 ──> BiasAdd/0 ──┬──> Concat ──> loss
                     ^                                               │      ^ W/0                  │
                     W                                               └──> MatMul/1 ──> BiasAdd/1 ──┘
                                                                            ^ W/1
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Set, Tuple

import numpy as np

from whale_tf._tf_compat import tf
from whale_tf.capture.captured import Captured
from whale_tf.capture.record import Tags
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor.attrs import NodeDef
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.graph_editor.template import Template
from whale_tf.ir.extents import Size, Value, as_value
from whale_tf.ir.graph import Op, Phase
from whale_tf.ir.region import groups
from whale_tf.ir.rules import rule_for
from whale_tf.ir.traits import DROPS_ONES, MOVES, SHAPE_ATTRS, VARIABLES
from whale_tf.patterns.spread import Spread, Tile, everywhere, once
from whale_tf.patterns.strategy import (
    ADVANCED,
    CLASSES,
    CUT,
    EXTREME,
    LOOK_UP,
    LOOP,
    ON_TILES,
    RESEEDED,
    ROWS,
    SIZES,
    SOFTMAX,
    Localise,
    Sizes,
    Strategy,
)
from whale_tf.planner.sharding import Assignment
from whale_tf.transforms.attributes import own_numbers
from whale_tf.transforms.shard.initial import Stream, cut
from whale_tf.transforms.shard.loops import divide_loop
from whale_tf.transforms.shard.recipes import Rows, Softmax, combine
from whale_tf.transforms.shard.tags import TaggedStage
from whale_tf.transforms.shard.values import Values


class Lowering:
    """Stages the parts of every divided op.

    Attributes:
        values: the parts of every tensor that is divided or made again.
        done: name of a divided op -> names of the ops that replace it, by device (for a recipe, all on one).
        variables: divided variable op -> names of its parts.
        tags: what the op graph says about new nodes.
    """

    def __init__(self, captured: Captured, assignment: Assignment, counts: Dict[int, int], edit: StagedEdit, root: str) -> None:
        graph = captured.graph
        self.graph, self.assignment, self.counts, self.edit, self.root = graph, assignment, counts, edit, root
        self.task_graph = captured.task_graph
        self.view = Sizes(graph)
        replicated = {number for number, spec in enumerate(captured.specs) if spec.strategy == "replicate"}
        self.tags: Dict[str, Tags] = {}
        self.stages = {number: TaggedStage(edit, number, self.tags) for number in replicated.union(counts)}
        self.nodes = {number: Nodes(stage) for number, stage in self.stages.items()}
        self.values = Values(self.view, self.stages, self.nodes, counts, captured.task_graph, replicated, root, self._moved_again,
                             self._move_again)
        self.done: Dict[str, List[List[str]]] = {}
        self.variables: Dict[int, List[str]] = {}
        self._definitions = captured.definitions
        self._groups: Set[int] = set() if graph.has_any(VARIABLES - {"VarHandleOp"}) else groups(graph)
        self._gradients = captured.gradient_task_graph.keys()
        self._rows: Dict[Tuple[int, Tile], Rows] = {}
        self._templates: Dict[int, Template] = {}

    def run(self) -> None:
        for op in self.graph.ops:
            if op.id in self.assignment.variables:
                self._variable(op, self.assignment.variables[op.id])
            elif op.id in self.assignment.strategies:
                self._op(op, self.assignment.strategies[op.id])
            for tensor in op.outputs:
                if tensor in self.assignment.settled:
                    self._settle(tensor, self.assignment.settled[tensor])

    def _settle(self, tensor: int, spread: Spread) -> None:
        value, op = self.values.table.get(tensor), self.graph.tensors[tensor].op
        task_graph = value.task_graph if value is not None else self.assignment.task_graph.get(op, self.task_graph[op])
        self.values.put(tensor, spread, self.values.parts(tensor, spread, task_graph), task_graph)

    # -- variables ----------------------------------------------------------------------------------------------------
    def _variable(self, op: Op, spread: Spread) -> None:
        names, is_own = [], op.type == self._definitions.node(op.name).op
        for i, part in enumerate(spread.parts):
            node = self._clone(op, i, [], same_attrs=False, part=part) if is_own else self._handle(op, i, part)
            for dim, _, size in part.ranges:
                node.attr["shape"].shape.dim[dim].size = size
            node.attr["shared_name"].s = node.name.encode()
            names.append(node.name)
        self.variables[op.id] = names
        self.values.put(op.outputs[0], spread, names, self.assignment.task_graph[op.id])

    def _handle(self, op: Op, i: int, part: Tile) -> NodeDef:
        """A part's handle in a tf.function, where the variable's own handle is a placeholder."""
        attrs = {"dtype": tf.as_dtype(op.attrs["dtype"]), "shape": tf.TensorShape(op.attrs["shape"]), "container": "",
                 "shared_name": ""}
        node = self.edit.node(self.edit.add("VarHandleOp", self.part_name(op, i), [], attrs=attrs))
        replica = part.replica if self.assignment.variables[op.id].is_tiles else None
        self.stages[self.assignment.task_graph[op.id]].tag(node.name, part.device, replica=replica)
        return node

    # -- ops ----------------------------------------------------------------------------------------------------------
    def _op(self, op: Op, strategy: Strategy) -> None:
        task_graph = self.assignment.task_graph[op.id]
        stage = self.stages[task_graph]
        stage.is_backward = op.phase is Phase.BACKWARD
        stage.controls = self._controls(op, task_graph)
        recipe = {CLASSES: self._loss, SOFTMAX: self._softmax, LOOK_UP: self._look_up, SIZES: self._sizes,
                  CUT: self._cut, ADVANCED: self._advanced, LOOP: self._loop}.get(strategy.how)
        if recipe is not None:
            recipe(op, strategy, task_graph)
        elif self._only_waits(op, strategy):
            self._pass_on(op, strategy, task_graph)
        else:
            self._parts(op, strategy, task_graph)
        stage.controls = ()

    def _parts(self, op: Op, strategy: Strategy, task_graph: int) -> None:
        needs = self._needs(op, strategy)
        operands = [self.values.parts(t, need, task_graph) for t, need in zip(op.inputs, needs)]
        results, localised = [], {local.position for local in strategy.localise}
        parts = _parts_of(strategy, self.counts[task_graph])
        for i, part in enumerate(parts):
            inputs = [names[i if need.is_tiles else part.device] for names, need in zip(operands, needs)]
            for position in localised:
                inputs[position] = self._localised(
                    op, position, [x for x in strategy.localise if x.position == position], task_graph, i)
            same_attrs = strategy.how != RESEEDED and op.type not in SHAPE_ATTRS and op.type not in DROPS_ONES
            node = self._clone(op, i, inputs, same_attrs, part)
            if op.type in DROPS_ONES and not node.attr["squeeze_dims"].list.i:
                whole = self.graph.tensors[op.inputs[0]].shape or ()
                node.attr["squeeze_dims"].list.i.extend(dim for dim, size in enumerate(whole) if size == 1)
            if strategy.how == ROWS:
                self._keep_rows(op, node.name, inputs, part, task_graph, i)
            if strategy.how == RESEEDED:
                own_numbers(self.nodes[task_graph], node, op, self.graph, node.name, str(i))
            if op.type in SHAPE_ATTRS and strategy.gives[0].is_shard and not node.attr["shape"].shape.unknown_rank:
                node.attr["shape"].shape.dim[strategy.gives[0].dim].size = strategy.gives[0].sizes[i]
            results.append(node.name)
        self.done[op.name] = [[name] for name in results]
        for index, tensor in enumerate(op.outputs):
            names = [f"{name}:{index}" for name in results]
            if strategy.weights:
                names = [self._weighted(name, tensor, weight, task_graph, i, part.device)
                         for i, (name, weight, part) in enumerate(zip(names, strategy.weights, parts))]
            if strategy.how == EXTREME or (strategy.how == ON_TILES and strategy.gives[index] == once):
                names = [self._combined(op, names, self._dtype(tensor), task_graph)]
            self.values.put(tensor, strategy.gives[index], names, task_graph)

    def _loop(self, op: Op, strategy: Strategy, task_graph: int) -> None:
        """Stages a loop that takes parts: the first in the place of the whole, and the others behind all operands."""
        graph = self.graph
        operands = [self.values.parts(t, need, task_graph) for t, need in zip(op.inputs, strategy.needs)]
        divided = [place for place, need in enumerate(strategy.needs) if need.is_divided]
        for place in divided:
            operands[place] = self._brought(op, place, operands[place], task_graph)
        node = self._clone(op, 0, [names[0] for names in operands] + [
            name for place in divided for name in operands[place][1:]], same_attrs=False)
        divided_loop = divide_loop(self.edit, node, op, strategy)
        self.values.shapes.update((f"{node.name}:{place}", shape) for place, shape in enumerate(divided_loop.shapes))
        later = len(op.inputs)
        for place, (tensor, give) in enumerate(zip(op.outputs, strategy.gives)):
            names = [f"{node.name}:{place}"]
            if place in divided:
                names += [f"{node.name}:{number}" for number in range(later, later + len(operands[place]) - 1)]
                later += len(names) - 1
                if not give.is_divided:  # a list that is empty now: the loop before this one kept nothing on it
                    before = graph.tensors[op.inputs[place]]
                    names = [self.values.whole(graph.ops[before.op].inputs[before.index])]
            elif place in divided_loop.kept:
                names = operands[divided_loop.kept[place]]
            else:
                self.values.shapes[names[0]] = self.view.shape(tensor)
            self.values.put(tensor, give, names, task_graph)
        self.done[op.name] = [[node.name]]

    def _brought(self, op: Op, place: int, names: Sequence[str], task_graph: int) -> List[str]:
        """Parts that a loop takes, each on its device: TensorFlow keeps what a loop carries where its first value comes from."""
        if self.graph.tensors[op.inputs[place]].dtype == "variant":
            return list(names)  # of a list: the loop before this one took them there
        scope, dtype = self._scope(op, f"operand{place}"), self._dtype(op.inputs[place])
        return [self.nodes[task_graph].identity(name, f"{scope}/part{i}", dtype, str(i)) for i, name in enumerate(names)]

    def _only_waits(self, op: Op, strategy: Strategy) -> bool:
        """Whether an op does nothing but delay a gradient until those of all operands of another op are there, on all devices.
        With reference variables, gradients wait, because updates in place must come after all readers of a variable; the value
        that was read of a resource variable stays as it is."""
        return (op.type == "Identity" and op.phase is Phase.BACKWARD and strategy.needs == strategy.gives
                and bool(op.control_inputs) and self._groups.issuperset(op.control_inputs)
                and (self._gradients.isdisjoint(op.outputs) or self._is_read_once(op.inputs[0])))

    def _is_read_once(self, tensor: int) -> bool:
        """Whether one op alone reads a tensor, so that it can be the gradient of one variable."""
        return len(self.graph.consumers(tensor)) == 1 and tensor not in self._gradients

    def _pass_on(self, op: Op, strategy: Strategy, task_graph: int) -> None:
        """Lets the parts of an op's operand stand for those of its result."""
        names = self.values.parts(op.inputs[0], strategy.needs[0], task_graph)
        self.values.put(op.outputs[0], strategy.gives[0], names, task_graph)
        self.done[op.name] = [[name] for name in names]

    def _combined(self, op: Op, names: Sequence[str], dtype: tf.DType, task_graph: int) -> str:
        """What the results of a reduction of parts amount to, on the first device."""
        kind, scope = {"Max": "Maximum", "Min": "Minimum"}.get(op.type), self._scope(op, "combined")
        if kind is not None:
            return combine(self.nodes[task_graph], kind, names, scope, dtype)
        return self.nodes[task_graph].add_n(names, scope, dtype, "0")

    def _needs(self, op: Op, strategy: Strategy) -> Sequence[Spread]:
        """What an op's parts read: for shape operands the whole shape, which is localised."""
        if not strategy.localise:
            return strategy.needs
        local = {item.position for item in strategy.localise}
        return [everywhere if i in local else need for i, need in enumerate(strategy.needs)]

    def _clone(self, op: Op, i: int, inputs: Sequence[str], same_attrs: bool = True, part: Optional[Tile] = None) -> NodeDef:
        """Stages device ``i``'s copy of an op, or that for part number ``i``; ``same_attrs``: see :meth:`StagedEdit.copy`."""
        task_graph = self.assignment.task_graph.get(op.id, self.task_graph[op.id])
        if op.id not in self._templates:
            self._templates[op.id], = self.edit.templates([self._definitions.node(op.name)])
        controls = self._controls(op, task_graph, i) if op.control_inputs else ()
        node = self.edit.copy(
            self._templates[op.id], self.part_name(op, i), inputs, control_inputs=controls, same_attrs=same_attrs)
        self.stages[task_graph].is_backward = op.phase is Phase.BACKWARD
        forward = self.graph.ops[op.forward] if op.forward >= 0 else None
        device = i if part is None else part.device
        self.stages[task_graph].tag(node.name, device, self.forward_name(forward, device) if forward is not None else "")
        return node

    def _moved_again(self, tensor: int, task_graph: int) -> bool:
        op = self.graph.producer(tensor)
        return op.type in MOVES and op.name not in self.done and self.task_graph[op.id] == task_graph and bool(op.inputs)

    def _move_again(self, op: Op, i: int, operand: str) -> str:
        return self._clone(op, i, [operand] + [self.values.whole(tensor) for tensor in op.inputs[1:]]).name

    def part_name(self, op: Op, i: int) -> str:
        return f"{self.root}/{i}/{op.name}"

    def forward_name(self, op: Op, i: int = 0) -> str:
        """Name of the op to which a gradient of ``op`` belongs now."""
        names = self.done.get(op.name)
        if names is None:
            return self.part_name(op, i) if op.id in self.variables else op.name
        return names[i if i < len(names) else 0][0].partition(":")[0]

    def _controls(self, op: Op, task_graph: int, i: int = -1) -> List[str]:
        """What an op's parts wait for: the same device's part of an op that is divided in the same way, else all parts."""
        found: List[str] = []
        for control in op.control_inputs:
            other = self.graph.ops[control]
            parts = self.done.get(other.name)
            if parts is None:
                found.append(other.name)
            elif i >= 0 and self.assignment.task_graph[other.id] == task_graph and self._are_alike(op, other, task_graph):
                found.extend(parts[i])
            else:
                found.extend(name for names in parts for name in names)
        return [name.partition(":")[0] for name in found]

    def _are_alike(self, op: Op, other: Op, task_graph: int) -> bool:
        """Whether both ops have a part on each device, or one for each tile."""
        own, before = (self.assignment.strategies.get(one.id) for one in (op, other))
        if own is None or before is None:
            return False
        counts = [_parts_of(one, self.counts[task_graph]) for one in (own, before)]
        return counts[0] == counts[1] and len(self.done[other.name]) == len(counts[0])

    # -- operands -----------------------------------------------------------------------------------------------------
    def _localised(self, op: Op, position: int, changes: Sequence[Localise], task_graph: int, i: int) -> str:
        """A shape operand with this device's sizes instead of the whole's."""
        tensor = op.inputs[position]
        value = self.view.value(tensor)
        assert value is not None, "strategies need shapes that are known where they change"
        sizes = {change.element: change.sizes[i] for change in changes}
        scope = self._scope(op, f"shape{position}_{i}")
        return self._changed(tensor, value, sizes, self.values.whole(tensor), task_graph, i, scope)

    def _changed(self, tensor: int, value: Value, sizes: Dict[int, int], whole: str, task_graph: int, i: int, scope: str) -> str:
        """An integer vector with some elements replaced; the others are constants, or taken from ``whole`` at run time."""
        nodes, dtype = self.nodes[task_graph], self._dtype(tensor)
        flat = list(value.flat)
        new = [sizes[j] if j in sizes and not (not isinstance(old, Size) and old == -1) else old for j, old in enumerate(flat)]
        if not any(isinstance(element, Size) for element in new):
            return nodes.const(np.reshape(np.array(new, dtype=np.int64), value.shape), scope, dtype, str(i))
        keep = np.reshape(np.array([int(j not in sizes) for j in range(len(new))]), value.shape)
        add = np.reshape(np.array([sizes.get(j, 0) for j in range(len(new))]), value.shape)
        kept = nodes.binary("Mul", whole, nodes.const(keep, scope + "/keep", dtype, str(i)), scope + "/kept", dtype, str(i))
        return nodes.binary("Add", kept, nodes.const(add, scope + "/sizes", dtype, str(i)), scope, dtype, str(i))

    def _weighted(self, name: str, tensor: int, weight: float, task_graph: int, i: int, device: int) -> str:
        nodes, dtype = self.nodes[task_graph], self._dtype(tensor)
        scope = "{}/weighted{}/{}".format(self.root, i, self.graph.tensor_name(tensor).replace(":", "_"))
        factor = nodes.const(weight, scope + "/weight", dtype, str(device))
        return nodes.binary("Mul", name, factor, scope, dtype, str(device))

    def _keep_rows(self, op: Op, name: str, inputs: Sequence[str], part: Tile, task_graph: int, i: int) -> None:
        """Filters the row numbers and values of a sparse update of divided rows to those of a part."""
        dims = rule_for(op, self.graph, self.view).inputs
        listed = [p for p, d in enumerate(dims) if isinstance(d, tuple) and d[:1] == (("i0",),)]
        number = next(p for p in listed if self._dtype(op.inputs[p]).is_integer)
        key = op.inputs[number], part
        if key not in self._rows:
            self._rows[key] = Rows(self.nodes[task_graph], inputs[number], self._dtype(op.inputs[number]), part,
                                   self._scope(op, f"rows{i}"))
        own = self._rows[key]
        for p in listed:
            values, what = (own.local, "numbers") if p == number else (inputs[p], f"values{p}")
            self.edit.move_input(name, p, own.kept(values, self._dtype(op.inputs[p]), what))

    # -- initial values -----------------------------------------------------------------------------------------------
    def _cut(self, op: Op, strategy: Strategy, task_graph: int) -> None:
        value, spread = self._definitions.node(op.name).attr["value"].tensor, strategy.gives[0]
        nodes = self.nodes[task_graph]
        parts = [cut(nodes, value, spread, i, self._scope(op, f"cut{i}")) for i in range(self.counts[task_graph])]
        self._put(op, 0, spread, parts, task_graph)
        self.done[op.name] = [[part] for part in parts]

    def _advanced(self, op: Op, strategy: Strategy, task_graph: int) -> None:
        shape, spread, dtype = self.view.shape(op.outputs[0]) or (), strategy.gives[0], self._dtype(op.outputs[0])
        operands = [self.values.whole(tensor) for tensor in op.inputs]
        parts = [Stream(self.nodes[task_graph], op, operands, dtype, self._scope(op, f"drawn{i}"), str(i)).part(
            [size or 0 for size in shape], spread, i) for i in range(self.counts[task_graph])]
        self._put(op, 0, spread, parts, task_graph)
        self.done[op.name] = [[part] for part in parts]

    # -- recipes ------------------------------------------------------------------------------------------------------
    def _softmax_of(self, op: Op, spread: Spread, task_graph: int) -> Softmax:
        tensor = op.inputs[0]
        return Softmax(self.nodes[task_graph], self.values.parts(tensor, spread, task_graph), self.view.need_rank(tensor),
                       self._dtype(tensor), self._scope(op, "softmax"))

    def _loss(self, op: Op, strategy: Strategy, task_graph: int) -> None:
        softmax = self._softmax_of(op, strategy.needs[0], task_graph)
        labels = self.values.parts(op.inputs[1], strategy.needs[1], task_graph)
        if op.type.startswith("Sparse"):
            loss, gradient = softmax.sparse_cross_entropy(labels, self._dtype(op.inputs[1]), strategy.needs[0])
        else:
            loss, gradient = softmax.cross_entropy(labels)
        self._put(op, 0, once, [loss], task_graph)
        self._put(op, 1, strategy.gives[1], gradient, task_graph)
        self.done[op.name] = [[loss] + gradient]

    def _softmax(self, op: Op, strategy: Strategy, task_graph: int) -> None:
        softmax = self._softmax_of(op, strategy.needs[0], task_graph)
        parts = softmax.probabilities() if op.type == "Softmax" else softmax.log_probabilities()
        self._put(op, 0, strategy.gives[0], parts, task_graph)
        self.done[op.name] = [[part] for part in parts]

    def _look_up(self, op: Op, strategy: Strategy, task_graph: int) -> None:
        rows = strategy.needs[0]
        operands = [self.values.parts(t, need, task_graph) for t, need in zip(op.inputs, strategy.needs)]
        result, dtype = op.outputs[0], self._dtype(op.outputs[0])
        parts = []
        for i in range(self.counts[task_graph]):
            scope = self._scope(op, f"rows{i}")
            own = Rows(self.nodes[task_graph], operands[1][i], self._dtype(op.inputs[1]), rows.parts[i], scope)
            node = self._clone(op, i, [own.safe() if position == 1 else names[i] for position, names in enumerate(operands)])
            trailing = self.view.need_rank(result) - self.view.need_rank(op.inputs[1]) - rows.dim
            parts.append(own.or_zero(node.name, trailing, dtype))
        self._put(op, 0, strategy.gives[0], parts, task_graph)
        self.done[op.name] = [[part] for part in parts]

    def _sizes(self, op: Op, strategy: Strategy, task_graph: int) -> None:
        """Stages ``Shape`` and similar ops of a divided tensor: they return the whole's sizes."""
        names = []
        for index, tensor in enumerate(op.outputs):
            measured = op.inputs[index]
            shape = self.view.stored(measured)
            if shape is None:
                raise UnsupportedOpError(f"op {op.name!r} ({op.type}) asks for the shape of "
                                         f"{self.graph.tensor_name(measured)!r}, whose rank is not known; set it with "
                                         "tf.ensure_shape")
            names.append(self._size_vector(op, tensor, measured, shape, task_graph))
            self.values.put(tensor, once, names[-1:], task_graph)
        self.done[op.name] = [names]

    def _size_vector(self, op: Op, tensor: int, measured: int, shape: Tuple, task_graph: int) -> str:
        nodes, dtype, scope = self.nodes[task_graph], self._dtype(tensor), self._scope(op, "sizes")
        if op.type == "Rank":
            return nodes.const(len(shape), scope, dtype, "0")
        value = as_value(np.array([-1 if size is None else size for size in shape]))
        if None not in shape:
            sizes = np.prod(np.array(shape, dtype=np.int64)) if op.type == "Size" else np.array(shape, dtype=np.int64)
            return nodes.const(sizes, scope, dtype, "0")
        part = self.values.table.get(measured)
        name = part.names[0] if part is not None else self.values.whole(measured)
        whole = local = nodes.add("Shape", scope + "/part", [name], "0", T=self._dtype(measured), out_type=dtype)
        if part is not None and part.spread.is_shard:
            marked = value.copy()
            for d, size in enumerate(shape):
                marked[d] = Size.of(("dim", measured, d)) if size is None else size
            whole = self._changed(tensor, marked, {part.spread.dim: sum(part.spread.sizes)}, local, task_graph, 0, scope)
        if op.type != "Size":
            return whole
        axis = nodes.const([0], scope + "/axis", tf.int32, "0")
        return nodes.add("Prod", scope + "/product", [whole, axis], "0", T=dtype, Tidx=tf.int32, keep_dims=False)

    # -- helpers ------------------------------------------------------------------------------------------------------
    def _put(self, op: Op, index: int, spread: Spread, names: List[str], task_graph: int) -> None:
        if index < len(op.outputs):
            self.values.put(op.outputs[index], spread, names, task_graph)

    def _scope(self, op: Op, what: str) -> str:
        return f"{self.root}/{op.name}/{what}"

    def _dtype(self, tensor: int) -> tf.DType:
        return tf.as_dtype(self.graph.tensors[tensor].dtype).base_dtype


def _parts_of(strategy: Strategy, count: int) -> Sequence[Tile]:
    """What the parts of an op work on: tiles, or whatever each of ``count`` devices has."""
    tiled = next((spread.tiles for spread in (*strategy.needs, *strategy.gives) if spread.is_tiles), None)
    if tiled is not None:
        return tiled
    shard = next((need for need in strategy.needs if need.is_shard), None) if strategy.how == ROWS else None
    return shard.parts if shard is not None else [Tile(i) for i in range(count)]
