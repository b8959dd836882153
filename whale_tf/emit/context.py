"""What all passes of the rewrite share: the graph, the plan, names and devices of the clones, and the staged edit."""

from __future__ import annotations

import copy as copying
from typing import Callable, Container, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

from whale_tf._tf_compat import tf
from whale_tf.cluster import Processes
from whale_tf.graph_editor.names import free_name
from whale_tf.graph_editor.staged import Original, StagedEdit
from whale_tf.ir.graph import Op, OpGraph
from whale_tf.ir.region import Region
from whale_tf.passes.communicate import pulls_each
from whale_tf.passes.homes import Homes
from whale_tf.passes.lowering.primitive import TENSOR
from whale_tf.passes.owners import Owners
from whale_tf.passes.replicate import clones, copies, copy_for, device_at
from whale_tf.plan import Plan
from whale_tf.program import CLONED, EVERY, ORIGINAL, Clone, Copy, Program

ROOT = "whale"  # name scope of everything the rewrite adds
Coordinates = Union[Clone, Copy]


class Gathered(NamedTuple):
    """What training reads instead of variables that only one process has (:mod:`whale_tf.emit.gathered`).

    Attributes:
        tensors: tensor that depends only on variables, or a variable's reference -> its replacement.
        ops: op that computes such a tensor -> its replacement.
        alone: boolean that is False in a run by itself -> the variables of other processes that this run then reads.
    """

    tensors: Mapping[int, str] = {}
    ops: Mapping[int, str] = {}
    alone: Mapping[str, Tuple[str, ...]] = {}


class Facts(NamedTuple):
    """What is found about a step before anything is staged.

    Attributes:
        variables: TaskGraph of every variable of the region and of the update, by op number.
        homes: what runs, and is merged, where a variable has its home.
        owners: which process updates a variable, if homes are divided over several processes.
        pinned: ops that take a shared variable's handle, by name -> its device.
        dropped: ops for which some op waits, but not its clones.
        compiled: functions of bodies that XLA compiles.
    """

    variables: Mapping[int, int] = {}
    homes: Homes = Homes()
    owners: Owners = Owners()
    pinned: Mapping[str, str] = {}
    dropped: FrozenSet[int] = frozenset()
    compiled: FrozenSet[str] = frozenset()


class Context:
    """State of one rewrite.  While it is staged, only ``gathered`` and ``guards`` are set; then ``edit`` and ``tf_ops`` change.

    Attributes:
        tf_graph: the graph being edited.
        tf_ops: the op graph's ops in it, by number; for an op that a pass made, its node until it is in the graph.
        graph, region: see there.
        plan: the part of it that this process runs.
        program: the step that the plan runs.
        is_called: batch-level ops run as calls of functions, one for each of the program's calls, and not as clones of each op.
        is_in_place: there is one clone of each batch-level op, which is the op itself.
        processes: all processes, and which of them this is.
        devices: TensorFlow device string of every device of the cluster.
        host: device of input pipelines and small integer arithmetic.
        edit: collects all new nodes.
        variables, homes, owners, pinned, dropped, compiled: see :class:`Facts`.
        gathered: what training reads instead of variables that only one process has.
        guards: tensors for which ops in loops wait (:mod:`whale_tf.emit.guard`).
    """

    def __init__(self, tf_graph: tf.Graph, tf_ops: Sequence[Original], graph: OpGraph, region: Region, plan: Plan,
                 devices: Sequence[str], edit: StagedEdit, processes: Processes, program: Optional[Program] = None,
                 is_called: bool = False, is_in_place: bool = False, facts: Facts = Facts()) -> None:  # noqa: B008
        self.tf_graph, self.tf_ops, self.graph, self.region, self.plan = tf_graph, tf_ops, graph, region, plan
        self.devices, self.processes = devices, processes
        self.program = program or Program(graph, ())
        self.is_called = is_called
        self.is_in_place = is_in_place
        self.host = processes.host_device
        self.edit = edit
        self.variables, self.homes, self.owners, self.pinned, self.dropped, self.compiled = facts
        self.gathered = Gathered()
        self.guards: Set[str] = set()
        self._scopes: Dict[Tuple[int, ...], str] = {}
        bodies = [body for body in self.program.bodies if body.step in CLONED]
        self._body_of = {op: body.name for body in bodies for op in body.ops}
        given = [(set(body.outputs), function) for body in bodies for function in self.program.functions(body)]
        self._results = {t: f"{function.name}:{i}" for own, function in given for i, t in enumerate(function.outputs) if t in own}
        self._returned = frozenset(self._results)
        self._suffix = ""
        self._scope = free_name(ROOT, graph.__contains__)  # a user's op may have this name

    def lacking(self, found: Container[str]) -> str:
        """The first device that the plan uses and TensorFlow does not have, in words; "": none.

        Args:
            found: full names of TensorFlow's devices.
        """
        used = {index for task in self.plan.task_graphs for row in (*task.devices, task.homes.values()) for index in row}
        missing = next((index for index in sorted(used) if self.devices[index] not in found), None)
        if missing is None:
            return ""
        what = f" (the host, on which offload {self.plan.offload!r} keeps variables)" if missing >= self.plan.num_devices else ""
        return self.devices[missing] + what

    # ------------------------------------------------------------------------------------------------------- clones
    def copies(self, task_graph: int) -> List[Copy]:
        """All copies of a TaskGraph's step-level ops and variables, the original first."""
        return copies(self.plan, task_graph)

    def copy_for(self, task_graph: int, at: Coordinates) -> Copy:
        """The copy of a TaskGraph's step-level ops and variables that a clone or copy of this or another TaskGraph reads."""
        return copy_for(self.plan, task_graph, at)

    def clones(self, task_graph: int) -> List[Clone]:
        """All clones of a TaskGraph's batch-level ops, in the order of the examples they work on."""
        return clones(self.plan, task_graph)

    def device(self, task_graph: int, at: Tuple[int, ...], shard: int = 0) -> str:
        """The device of a clone or a copy (first field: model replica, last field: replica).  Under ``split`` the replica has
        several devices, and ``shard`` says which."""
        return self.devices[device_at(self.plan, task_graph, at, shard)]

    def device_of(self, op: Op) -> str:
        """The device of an original step-level op, of an op of the update, or of a variable: its home, or else the device of the
        first copy of its TaskGraph."""
        home = self.homes.ops.get(op.id)
        if home is not None:
            return self.devices[home]
        return self.device(self.variables.get(op.id, self.task_graph_of(op)), ORIGINAL, op.shard)

    def placement(self, task_graph: int, at: Tuple[int, ...]) -> Union[str, Callable[[Original], str]]:
        """The device of every op of a clone or copy: one for all, or by op."""
        if self.plan.task_graphs[task_graph].strategy != "split":
            device = self.device(task_graph, at)
            return (lambda tf_op: self.pinned.get(tf_op.name, device)) if self.pinned else device
        return lambda tf_op: self.pinned.get(tf_op.name) or self.device(task_graph, at, self.graph.op(tf_op.name).shard)

    def shard_of(self, tensor: int) -> int:
        """Which device of its TaskGraph's VirtualDevice a tensor is on."""
        return self.graph.producer(tensor).shard

    def task_graph_of(self, op: Op) -> int:
        return self.region.task_graph[op.id]

    @property
    def replicas(self) -> range:
        """This step's model replicas among those of all steps side by side."""
        count = self.plan.num_model_replicas
        first = self.processes.step * count if self.processes.runs_part else 0
        return range(first, first + count)

    @property
    def all_replicas(self) -> int:
        """The number of model replicas of all steps side by side."""
        return self.plan.num_model_replicas * max(1, len(self.processes.steps))

    @property
    def mini_batches(self) -> range:
        """This step's mini-batches from an input pipeline among those of all steps side by side, if model replicas or
        micro-batches take their own."""
        each, replicas = pulls_each(self.plan), self.replicas
        return range(replicas.start * each, replicas.stop * each)

    @property
    def all_mini_batches(self) -> int:
        """The number of these mini-batches of all steps side by side."""
        return self.all_replicas * pulls_each(self.plan)

    # -------------------------------------------------------------------------------------------------------- names
    def scope(self, at: Tuple[int, ...]) -> str:
        """Name prefix of a clone (``whale/g0_m1_r0``) or a copy (``whale/g0_r0``)."""
        if at not in self._scopes and at == EVERY:
            self._scopes[at] = f"{self._scope}/section"
        if at not in self._scopes:
            letters = "gmr" if isinstance(at, Clone) else "gr"
            self._scopes[at] = "{}/{}".format(self._scope, "_".join(f"{a}{b}" for a, b in zip(letters, at)))
        return self._scopes[at]

    def seed(self, at: Tuple[int, ...]) -> str:
        """Distinguishes a clone from all others, including those of other processes.  Random numbers follow from it."""
        scope = self.scope(at)
        return f"{scope}/p{self.processes.step}" if self.processes.step else scope

    def name(self, *parts: str) -> str:
        """A name under the rewrite's own scope."""
        return "/".join((self._scope,) + parts)

    def tensor_in(self, tensor: int, at: Tuple[int, ...]) -> str:
        """Name of a tensor of the region in a clone (batch level) or copy (step level)."""
        record = self.graph.tensors[tensor]
        name = self.graph.ops[record.op].name
        if record.op in self.region.sections:
            at = EVERY
        if self.is_in_place or at == ORIGINAL:
            return f"{name}:{record.index}"
        if self.is_called and record.op in self._body_of:
            return f"{self.scope(at)}/{self._results[tensor]}"
        return f"{self.scope(at)}/{name}:{record.index}"

    def op_in(self, op: Op, at: Tuple[int, ...]) -> str:
        """Name of the op that runs an op of the region in a clone (batch level) or copy (step level)."""
        if op.id in self.region.sections:
            at = EVERY
        if self.is_in_place or at == ORIGINAL:
            return op.name
        if self.is_called and op.id in self._body_of:
            return f"{self.scope(at)}/{self._body_of[op.id]}"
        return f"{self.scope(at)}/{op.name}"

    def is_own_name(self, name: str) -> bool:
        """Whether a name is under the rewrite's own scope."""
        return name.startswith(self._scope + "/")

    def scoped(self, scope: str, tensor: int) -> str:
        """The name of a primitive that makes a value of a tensor (:mod:`whale_tf.passes.lowering`)."""
        return f"{self._scope}/{scope.replace(TENSOR, self.flat(tensor))}"

    def exported(self, tensor: int, name: str) -> None:
        """Notes that a tensor now has a name outside of the functions: ``name``, below the scope of each clone."""
        self._results[tensor] = name

    def is_exported(self, tensor: int) -> bool:
        """Whether a batch-level tensor has a name outside of the called functions."""
        return self.is_returned(tensor) or tensor in self._results

    def is_returned(self, tensor: int) -> bool:
        """Whether the step's own calls return a batch-level tensor."""
        return not self.is_called or tensor in self._returned or self.graph.tensors[tensor].op not in self._body_of

    def beside_update(self) -> Context:
        """The same context with other names for tensors exported from now on, for runs that update variables."""
        view = copying.copy(self)
        view._results, view._suffix = dict(self._results), "_beside_update"
        return view

    def flat(self, tensor: int) -> str:
        """A tensor's name as one part of another name."""
        return self.graph.tensor_name(tensor).replace(":", "_") + self._suffix

    def static_shape(self, tensor: int) -> Tuple:
        return self.graph.tensors[tensor].shape or ()

    def dtype(self, tensor: int) -> tf.DType:
        return tf.as_dtype(self.graph.tensors[tensor].dtype).base_dtype
