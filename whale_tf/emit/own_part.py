"""Reduces the step of a tf.function, which is written for the devices of all processes, to the part that this process runs.

Every process rewrites the same function for the same plan and divides the step in the same way
(:mod:`whale_tf.passes.partition`).  What it does not compute itself arrives in messages::

    as written       matmul (process 0) ──> relu (process 1) ──> loss (process 1) ──> result
    in process 0     matmul ──> send                             receive ───────────> result
    in process 1     receive ──> relu ──> loss ──┬──────────────────────────────────> result
                                                 └──> send

The other ops stay in the function's graph.  Nothing that runs depends on them, so that TensorFlow leaves them out.
"""

from __future__ import annotations

from typing import Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

from whale_tf._tf_compat import NodeDef, tf
from whale_tf.capture.record import record
from whale_tf.cluster import Processes, process_of
from whale_tf.communicators import Keys
from whale_tf.communicators.pairs import CrossingValue, Pairs
from whale_tf.communicators.processes import CARRIED, is_carried
from whale_tf.emit.effects import writes_inside
from whale_tf.emit.repeats import repeat_where_read
from whale_tf.emit.sized import StagedSizes, read_own_sizes
from whale_tf.errors import PlanError
from whale_tf.graph_editor.control_flow import frame_of_ops, is_inside
from whale_tf.graph_editor.edges import canonical_edge, edges_of
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.sizes import OpenSizes
from whale_tf.ir.traits import MERGES, RANDOM, SUMS, SWITCHES, traits
from whale_tf.ir.units import in_branches
from whale_tf.ir.walk import reached
from whale_tf.passes.partition import (
    Crossing,
    Node,
    Output,
    before_wait,
    begun_before,
    partition,
    unanswered,
    where_values_are,
)
from whale_tf.passes.sized import KnownSizes
from whale_tf.passes.sums import Sum, find_sums

SCOPE, REPEATED = "whale/crossing", "whale/repeated"
HOST = "/device:CPU:0"  # of whichever process
CHECK = "Assert"
STEPS = "whale/steps"  # counts, in each process, the steps that it has finished
SEEN = "whale/seen"  # checksums of what each process has read


class OwnPart(NamedTuple):
    """Attributes:
    outputs: the function's results in this process.
    control_outputs: what must run here.
    staged: a text of all messages, equal in processes that agree.
    seen: name of the variable with a checksum of the first example of each input, which the step leaves.
    """

    outputs: List[tf.Tensor]
    control_outputs: List[tf.Operation]
    staged: str
    seen: str


def keep_own_part(graph: tf.Graph, variables: Mapping[str, Optional[int]], pieces: Mapping[str, Optional[int]],
                  inputs: Sequence[str], processes: Processes, keys: Keys) -> OwnPart:
    """See the module's docstring.

    Args:
        graph: of a function, completely rewritten.
        inputs: names of the tensors with the examples of the mini-batch.
        pieces: conditions and calls -> the process to which each belongs (:mod:`whale_tf.emit.effects`); None: each runs it.
        variables: placeholder of a variable's handle -> the process that keeps the variable; None: every process has it.
        processes: all, and which of them this is.

    Raises:
        UnsupportedOpError, PlanError: a value that has to cross cannot; the graph then computes what it did.
    """
    return _Division(graph, variables, pieces, processes).part_of(keys, inputs)


class _Division:
    """The step as nodes, and what each process runs of it."""

    def __init__(self, graph: tf.Graph, variables: Mapping[str, Optional[int]], pieces: Mapping[str, Optional[int]],
                 processes: Processes) -> None:
        self._graph, self._variables, self._pieces, self._processes = graph, variables, pieces, processes
        ends = [*(tensor.op for tensor in graph.outputs), *graph.control_outputs]
        read_own_sizes(graph, ends, self._owner, SCOPE + "/sizes_of_inputs")
        ops = graph.get_operations()
        repeat_where_read(graph, ops, ops, self._owner, processes.members, REPEATED, _is_sum)
        self._graph_def = graph.as_graph_def()
        self._definitions: List[NodeDef] = list(self._graph_def.node)
        self._numbers = {node.name: index for index, node in enumerate(self._definitions)}
        self._of_several: Set[int] = set()  # ops that take variables which different processes keep
        results = Node(None, tuple((self._numbers[tensor.op.name], tensor.value_index) for tensor in graph.outputs))
        nodes = where_values_are([*map(self._node, self._definitions), results], self._cannot_travel, self._has_effect)
        self.nodes = nodes[:-1]
        self._effects = [self._numbers[op.name] for op in graph.control_outputs]
        effects = [*self._effects, len(self.nodes)]
        runs = partition(nodes, effects, processes.members).runs
        self._checks = [index for index, node in enumerate(self.nodes)  # if one process refuses a step, all do
                        if node.owner is None and runs[index] and self._definitions[index].op == CHECK]
        self._effects += self._checks
        self.found = partition(nodes, [*effects, *self._checks], processes.members)
        self._frames = frame_of_ops(graph)
        self._may_miss = self._find_may_miss()
        self._check()
        self._sums, crossings = find_sums(nodes, self.found, lambda index: _is_sum(graph.get_operation_by_name(
            self._definitions[index].name)))
        self.found = self.found._replace(crossings=crossings)

    def _node(self, node: NodeDef) -> Node:
        edges = edges_of(node)
        inputs = tuple(map(self._output, (edge for edge in edges if edge[0] != "^")))
        waits = tuple(self._numbers[edge[1:]] for edge in edges if edge[0] == "^")
        if node.name not in self._pieces and len({self._variables[edge] for edge in edges if edge in self._variables}) > 1:
            self._of_several.add(self._numbers[node.name])
        if node.name in self._variables:
            return Node(None)  # a handle is no value
        return Node(self._owner(self._graph.get_operation_by_name(node.name)), inputs, waits)

    def _owner(self, op: tf.Operation) -> Optional[int]:
        """The process that runs an op; None: each that needs it."""
        if op.name in self._pieces or op.name in self._variables:
            return self._pieces.get(op.name)
        kept = [self._variables[tensor.op.name] for tensor in op.inputs if tensor.op.name in self._variables]
        owner = kept[0] if kept else process_of(op.device)
        if owner is None and op.type in RANDOM and op.op_def.is_stateful:
            return self._processes.members[0]  # the processes' generators differ
        is_constant = not op.inputs and not op.control_inputs and not op.op_def.is_stateful
        return None if is_constant else owner  # a constant is not worth a message

    def _cannot_travel(self, output: Output) -> bool:
        """Whether no message carries a value, such as a text or a list."""
        dtype = self._graph.get_operation_by_name(self._definitions[output[0]].name).outputs[output[1]].dtype
        return not is_carried(dtype.base_dtype)

    def _has_effect(self, index: int) -> bool:
        """Whether a node does more than compute a value from others."""
        if index == len(self._definitions):  # the results
            return True
        return bool(self._graph.get_operation_by_name(self._definitions[index].name).op_def.is_stateful)

    def _output(self, edge: str) -> Output:
        name, _, index = edge.partition(":")
        return self._numbers[name], int(index or 0)

    def _check(self) -> None:
        """Raises:
            PlanError: an op takes variables of several processes, or a value crosses that is missing in some steps, for which
                its receiver would wait forever, or that a loop of version 1 makes or reads in each iteration.
        """
        for index in filter(self.found.runs.__getitem__, sorted(self._of_several)):
            raise takes_of_several(self._definitions[index])
        for crossing in self.found.crossings:
            if crossing.output[0] in self._may_miss:
                raise missing_in_some_steps(self._definitions[crossing.output[0]].name, crossing.sender, crossing.receiver)
        for op, frame in self._frames.items():
            index = self._numbers[op.name]
            for output in self.nodes[index].inputs if is_inside(op, frame) else ():
                for receiver in sorted(self.found.runs[index]):
                    sender = self.nodes[output[0]].owner
                    if sender not in (None, receiver):
                        raise crosses_in_loop(frame.name, op.name, self._definitions[output[0]].name, sender, receiver)

    def _find_may_miss(self) -> Set[int]:
        """The nodes that some steps leave out."""
        if not any(node.op in SWITCHES for node in self._definitions):
            return set()
        in_loop = {self._numbers[op.name] for op in self._frames}
        return in_branches(range(len(self.nodes)), self._before, lambda index: self._definitions[index].op, in_loop)

    def _before(self, index: int) -> List[int]:
        return [*(output[0] for output in self.nodes[index].inputs), *self.nodes[index].waits]

    def part_of(self, keys: Keys, inputs: Sequence[str]) -> OwnPart:
        """Reduces the graph to the part of this process."""
        edit, rank = StagedEdit(self._graph), self._processes.rank
        nodes = Nodes(edit)
        first = {self._output(name)[0] for name in inputs}.union(self._checks)
        pairs = Pairs(nodes, self._processes, keys, HOST, self._read_alone(first))
        received: Dict[Output, str] = {}
        order, sized, runners = self._sized(nodes, inputs, received)
        runs = {index for index, processes in enumerate(runners) if rank in processes}
        crossing: List[Union[Crossing, Sum]] = [*self.found.crossings, *self._sums]
        for one in sorted(crossing, key=lambda one: order(one.output[0])):
            if isinstance(one, Sum):
                total = self._add_up(pairs, one, sized)
                received.update({(index, 0): total for index in one.nodes if total})
                runs -= one.nodes
            else:
                arrived = pairs.cross(self._value(one.output, sized), one.sender, one.receiver)
                received.update({one.output: arrived} if arrived else {})
        for index in runs:
            self._read(edit, index, runs, received, rank)
        told = self._hold_early(edit, nodes, pairs)
        ends = [self._definitions[index].name for index in self._effects if index in runs]
        for sender, receiver in sorted(told.union(unanswered(self.nodes, self.found))):
            answer = nodes.const(0, SCOPE + "/nothing", tf.int32, HOST) if rank == receiver else ""
            pairs.cross(CrossingValue(answer, SCOPE + "/answer", tf.int32, ()), receiver, sender, pairs.received.get(sender, ()))
        for definition in self._definitions:  # TensorFlow places also what does not run
            if process_of(definition.device) not in (None, rank):
                edit.place(self._graph.get_operation_by_name(definition.name), "", alone=True)
        ends += [*pairs.sent, *(name for names in pairs.received.values() for name in names)]
        ends.append(count_step(nodes, ends))
        seen = f"{SEEN}/{keys.instance()}"
        ends.append(note(nodes, [self._graph.get_tensor_by_name(name) for name in inputs], seen))
        edit.commit()
        outputs = []
        for tensor in self._graph.outputs:
            name = received.get((self._numbers[tensor.op.name], tensor.value_index))
            outputs.append(tensor if name is None else self._graph.get_tensor_by_name(name + ":0"))
        return OwnPart(outputs, [self._graph.get_operation_by_name(name) for name in dict.fromkeys(ends)],
                       "\n".join(pairs.staged), seen)

    def _hold_early(self, edit: StagedEdit, nodes: Nodes, pairs: Pairs) -> Set[Tuple[int, int]]:
        """Makes writes wait for processes that may still read, between steps, what the last step has left.  Most writes follow
        anyway from what all processes compute; one in the forward pass, such as that of a moving average, does not.

        Returns:
            Pairs (sender, receiver) of processes: the sender tells the receiver that it has begun the step.
        """
        writes = [index for index, node in enumerate(self.nodes)
                  if node.owner is not None and self.found.runs[index] and self._writes(self._definitions[index])]
        ends = {index for index, node in enumerate(self._definitions)
                if node.op in MERGES and self._graph.get_operation_by_name(node.name) not in self._frames}
        begun: Dict[Tuple[int, int], str] = {}  # (process, writer) -> what has arrived when the process has begun the step
        for index, processes in begun_before(self.nodes, writes, ends).items():
            owner = self.nodes[index].owner
            assert owner is not None
            late = sorted(set(self._processes.members) - processes)
            for sender in late:
                if (sender, owner) not in begun:
                    own = nodes.const(0, f"{SCOPE}/begins", tf.int32, HOST) if sender == self._processes.rank else ""
                    begun[sender, owner] = pairs.cross(CrossingValue(own, f"{SCOPE}/begun", tf.int32, ()), sender, owner)
            if late and owner == self._processes.rank:
                edit.move_waits(self._definitions[index].name, [], [begun[sender, owner] for sender in late])
        return set(begun)

    def _writes(self, node: NodeDef) -> bool:
        return traits(node.op).is_write or (node.name in self._pieces and writes_inside(self._graph, node))

    def _sized(self, nodes: Nodes, inputs: Sequence[str], received: Mapping[Output, str]) -> Tuple[
            Callable[[int], int], Callable[[Output], Optional[str]], Sequence[Set[int]]]:
        """What is known of the sizes of crossing values (:mod:`whale_tf.passes.sized`).

        Args:
            received: what has been received so far.

        Returns:
            The order in which values have to cross, a value's sizes in this process as :class:`CrossingValue` has them, and the
            processes that run each node.
        """
        runners: List[Set[int]] = list(map(set, self.found.runs[:-1]))
        crossings = [*self.found.crossings, *(Crossing(one.output, min(one.operands), other) for one in self._sums
                                              for other in one.operands)]
        shapes = [self._value(crossing.output).shape for crossing in crossings]
        if all(shape is not None and None not in shape for shape in shapes):
            return lambda index: 0, lambda output: None, runners
        graph, rank = record(self._graph, self._graph_def), self._processes.rank
        numbers = [self._numbers[op.name] for op in graph.ops]
        places = {number: place for place, number in enumerate(numbers)}
        for name in inputs:  # each process looks at all examples (note)
            runners[self._output(name)[0]].update(self._processes.members)
        by_op = [runners[number] if number not in self._may_miss else set() for number in numbers]
        known = KnownSizes(OpenSizes(graph), [crossing._replace(output=(places[crossing.output[0]], crossing.output[1]))
                                              for crossing in crossings], by_op,
                           lambda op: self.nodes[numbers[op]].owner is None and numbers[op] not in self._may_miss).found

        def edge(tensor: int) -> str:
            output = numbers[graph.tensors[tensor].op], graph.tensors[tensor].index
            return received.get(output) or canonical_edge(f"{self._definitions[output[0]].name}:{output[1]}")

        staged = StagedSizes(nodes, graph, edge, SCOPE + "/sizes", HOST)

        def sizes(output: Output) -> Optional[str]:
            found = known.get((places[output[0]], output[1]))
            return None if found is None else staged.vector(found[rank]) if rank in found else ""
        return places.__getitem__, sizes, runners

    def _add_up(self, pairs: Pairs, one: Sum, sizes: Callable[[Output], Optional[str]]) -> str:
        """This process's end of a sum, if it has one."""
        value, own = self._value(one.output, sizes), one.operands.get(self._processes.rank)
        return pairs.add_up(value._replace(edge="" if own is None else self._value(own).edge), sorted(one.operands))

    def _read_alone(self, nodes: Iterable[int]) -> List[str]:
        """Those of these ops that follow from no message."""
        return [self._definitions[index].name for index in sorted(nodes)
                if all(self.nodes[one].owner is None for one in reached([index], self._before))]

    def _value(self, output: Output, sizes: Callable[[Output], Optional[str]] = lambda output: None) -> CrossingValue:
        name = f"{self._definitions[output[0]].name}:{output[1]}"
        tensor = self._graph.get_tensor_by_name(name)
        shape = None if tensor.shape.rank is None else tuple(tensor.shape.as_list())
        return CrossingValue(canonical_edge(name), f"{SCOPE}/{name.replace(':', '_')}", tensor.dtype, shape,
                             sizes(output) if shape is None or None in shape else None)

    def _read(self, edit: StagedEdit, index: int, runs: Set[int], received: Mapping[Output, str], rank: int) -> None:
        """Makes a node of this process read what has arrived, and wait for nothing that does not run here."""
        node, definition = self.nodes[index], self._definitions[index]
        for position, output in enumerate(node.inputs):
            if output in received:
                edit.move_input(definition.name, position, received[output])
        gone = [wait for wait in node.waits if wait not in runs]
        if gone:  # a value that is sent has been read, since tensors do not change
            befores = [before_wait(self.nodes, wait, rank) for wait in gone if self.nodes[wait].owner not in (None, rank)]
            here = {one for before in befores for one in (*before.nodes, *(output[0] for output, _ in before.outputs))}
            edit.move_waits(definition.name, [self._definitions[wait].name for wait in gone],
                            sorted(self._definitions[one].name for one in here & runs))


def _is_sum(op: tf.Operation) -> bool:
    """Whether processes can compute an op together."""
    return op.type in SUMS and op.outputs[0].dtype in CARRIED


def count_step(nodes: Nodes, ends: Sequence[str], root: str = SCOPE, host: str = HOST) -> str:
    """Counts this process's steps when they are over, for processes that read its variables between steps.

    Args:
        ends: ops after which the step is over.
        root: name of the new ops.
    """
    handle = nodes.add("VarHandleOp", root + "/steps", [], host, shared_name=STEPS, dtype=tf.int64, shape=tf.TensorShape([]))
    one = nodes.const(1, root + "/one", tf.int64, host)
    return nodes.add("AssignAddVariableOp", root + "/count", [handle, one], host, ends, dtype=tf.int64)


def takes_of_several(node: NodeDef) -> PlanError:
    """A condition or call, which one process runs, takes variables that several processes keep."""
    return PlanError(f"op {node.name!r} ({node.op}) takes variables that different processes keep; let it take one TaskGraph's "
                     "variables, or the values of the others (variable.read_value())")


def missing_in_some_steps(name: str, sender: int, receiver: int) -> PlanError:
    """A value of this op would cross, but a Switch leaves it out in some steps."""
    return PlanError(
        f"{name!r} is computed in some steps only, but process {receiver}, which reads it, would wait for it in every step; let "
        f"process {sender} keep what reads it, or compute it in every step (tf.where)")


def crosses_in_loop(loop: str, reader: str, value: str, sender: Optional[int], receiver: int) -> PlanError:
    """An op in a loop of version 1 would read a value of another process in each iteration."""
    return PlanError(
        f"the while loop {loop!r} has ops of several processes: {reader!r}, which process {receiver} runs, reads {value!r} of "
        f"process {sender} in each iteration, but a loop of version 1 must run in one process. Let it read variables of one "
        "TaskGraph, or make it a loop of version 2 (tf.compat.v1.enable_control_flow_v2() before the graph is built), which "
        "takes their values")


def note(nodes: Nodes, inputs: Sequence[tf.Tensor], name: str, root: str = SCOPE, host: str = HOST) -> str:
    """Leaves, of each input, the sum of the first example and the number of elements: float64 `[2 x inputs]`.

    Args:
        name: of the variable.
        root: name of the new ops.
    """
    every, found = nodes.const([-1], root + "/every", tf.int32, host), []
    for number, tensor in enumerate(inputs):
        scope, value, dtype = f"{root}/seen_{number}", tensor.name, tensor.dtype
        size = nodes.add("Size", scope + "/size", [value], host, T=dtype, out_type=tf.int64)
        if tensor.shape.rank != 0:
            value = nodes.slice_to(value, 0, 0, 1, scope + "/first", dtype, host)
        if dtype == tf.string:
            value, dtype = nodes.add("StringToHashBucketFast", scope + "/hash", [value], host, num_buckets=1 << 31), tf.int64
        numbers = nodes.cast(value, scope + "/numbers", dtype, tf.float64, host)
        flat = nodes.add("Reshape", scope + "/flat", [numbers, every], host, T=tf.float64, Tshape=tf.int32)
        axis = nodes.const([0], root + "/axis", tf.int32, host)
        found += [nodes.add("Sum", scope + "/sum", [flat, axis], host, T=tf.float64, Tidx=tf.int32, keep_dims=False),
                  nodes.cast(size, scope + "/elements", tf.int64, tf.float64, host)]
    packed = nodes.add("Pack", root + "/seen", found, host, T=tf.float64, N=len(found), axis=0)
    handle = nodes.add("VarHandleOp", root + "/seen_here", [], host, shared_name=name, dtype=tf.float64,
                       shape=tf.TensorShape([len(found)]))
    return nodes.add("AssignVariableOp", root + "/note", [handle, packed], host, dtype=tf.float64)
