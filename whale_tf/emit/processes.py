"""What several processes share: losses over all of them, equal initial values, and runs that never wait forever.

Every process rewrites its own graph and runs its own Session.  A collective ends only if all processes run it, so only runs that
all processes make may reach it: those of the updates.
"""

from __future__ import annotations

from typing import Collection, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Sequence, Set, Tuple

from whale_tf._tf_compat import tf, v1
from whale_tf.capture.captured import Captured
from whale_tf.communicators import Communicator, Member, ProcessCommunicator
from whale_tf.emit.context import ORIGINAL, Context
from whale_tf.emit.owners import Kept
from whale_tf.emit.recipes import Recipes
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.graph_editor.variables import assign, read
from whale_tf.ir.across import leading_to_writes
from whale_tf.ir.graph import Op, OpGraph, Phase, inner_ops
from whale_tf.ir.region import Region
from whale_tf.ir.traits import RANDOM, VARIABLES, traits
from whale_tf.ir.walk import reached
from whale_tf.ir.writes import is_write
from whale_tf.patterns.sources import is_seeded


class Shared(NamedTuple):
    """A scalar that belongs to an update: its sum over all processes is part of every run of the update.

    Attributes:
        tensor: of the op graph.
        value: name of the merged value; in a run without the update, this process's value is fetched.
        writes: the update's writes of variables, by op number; they wait for the value.
    """

    tensor: int
    value: str
    writes: Tuple[int, ...]


def shared_scalars(context: Context, captured: Captured, recipes: Recipes, communicator: Communicator) -> List[Shared]:
    """Sums over all processes, each of which computes a step; see :func:`_riders`."""
    return [_share(context, recipes, communicator, tensor, writes) for tensor, writes in _riders(context, captured).items()]


def merged_scalars(context: Context, captured: Captured, recipes: Recipes) -> List[Shared]:
    """Merged values that every process has after a step; see :func:`_riders`."""
    return [Shared(tensor, recipes.of_all_processes(tensor), tuple(sorted(writes)))
            for tensor, writes in _riders(context, captured).items()]


def _riders(context: Context, captured: Captured) -> Dict[int, Set[int]]:
    """The losses, each with the update made from its gradients.  If there is only one gradient call, also all other scalars that
    leave the region (for summaries and metrics); from the backward pass only the requested gradients, because it also computes
    those of constants, which nobody reads."""
    graph, region = context.graph, context.region
    riders: Dict[int, Set[int]] = {}
    for call in captured.gradient_calls:
        gradients = set(_tensors(graph, [name for grad in call.grads for name in _names(grad)]))
        writes = _writes_from(graph, gradients)
        scalars = _tensors(graph, call.ys)
        if len(captured.gradient_calls) == 1:
            scalars += [tensor for tensor in region.leaving()
                        if tensor in gradients or graph.producer(tensor).phase is not Phase.BACKWARD]
        for tensor in scalars:
            if writes and _is_scalar_sum(context, tensor):
                riders.setdefault(tensor, set()).update(writes)
    return riders


def _share(context: Context, recipes: Recipes, communicator: Communicator, tensor: int, writes: Set[int]) -> Shared:
    device = context.device(context.task_graph_of(context.graph.producer(tensor)), ORIGINAL)
    value = communicator.sum_if_together(
        Member(recipes.part(tensor), device), recipes.whole(tensor), context.host, context.name("shared", context.flat(tensor)),
        context.dtype(tensor))
    return Shared(tensor, value, tuple(sorted(writes)))


def _is_scalar_sum(context: Context, tensor: int) -> bool:
    record = context.graph.tensors[tensor]
    return (record.op in context.region.batch_level and record.shape == ()
            and record.dtype in ("float16", "bfloat16", "float32", "float64")
            and context.region.batch.layout(tensor).is_partial)


def _names(grad: object) -> Iterable[str]:
    if grad is None:
        return ()
    return (grad,) if isinstance(grad, str) else [name for name in grad if name]  # type: ignore[attr-defined]


def _tensors(graph: OpGraph, names: Iterable[str]) -> List[int]:
    return [graph.tensor(name) for name in names if name.partition(":")[0] in graph]


def _writes_from(graph: OpGraph, tensors: Iterable[int]) -> Set[int]:
    """Writes of variables that follow from any of the tensors."""
    users = {user for tensor in tensors for user, _ in graph.consumers(tensor)}
    followers = reached(users, lambda index: (
        user for tensor in graph.ops[index].outputs for user, _ in graph.consumers(tensor)))
    return {index for index in followers if is_write(graph.ops[index])}


def check_random(context: Context) -> None:
    """Checks that random ops have a seed if all processes must draw the same numbers, since each draws them itself.

    Raises:
        UnsupportedOpError
    """
    for op in draws_anew(context.region):
        raise UnsupportedOpError(
            f"op {op.name!r} ({op.type}) draws random numbers that must be the same on all processes; give it a seed, or call "
            "tf.set_random_seed")


def draws_anew(region: Region) -> List[Op]:
    """Random ops without a seed whose numbers must be the same in all clones, or that a section or the update draws."""
    ops = region.graph.ops
    outside = {index for index in leading_to_writes(region.graph) if ops[index].phase in (Phase.APPLY, Phase.OTHER)}
    return [ops[index] for index in region.batch.shared if not is_seeded(ops[index])] + [
        ops[index] for index in sorted(region.sections | outside) if _draws_anew(ops[index])]


def _draws_anew(op: Op) -> bool:
    """Whether an op, or one in a function that it calls, draws numbers without a seed."""
    return any(each.type in RANDOM and not is_seeded(each) for each in (op, *inner_ops(op)))


class Kind(NamedTuple):
    """What a run needs.

    Attributes:
        waits: whether it waits for other processes.
        alone: names of the booleans that it must feed with False.
        elsewhere: variables that it reads or writes and that another process keeps.
        written: variables that this process keeps for all and that it writes, but in no training step.
    """

    waits: bool = False
    alone: Tuple[str, ...] = ()
    elsewhere: FrozenSet[str] = frozenset()
    written: FrozenSet[str] = frozenset()


class Runs:
    """Says whether a run waits for other processes, and refuses a run in which they might not take part.

    Args:
        communicator: staged all ops that wait for other processes.
        follow: those of these ops that follow from a write.
        kept: variables that one process keeps.
        writes: ops that write variables although their types do not say so: conditions and calls, and what stands for a write.
        alone: boolean that a run by itself feeds with False -> variables of other processes that it then reads.

    Attributes:
        beside: ops that wait for other processes and are fetched only together with an update, in all processes.
    """

    def __init__(self, communicator: Communicator, follow: Collection[str], kept: Collection[Kept],
                 writes: Collection[str], alone: Mapping[str, Sequence[str]]) -> None:
        self._communicator, self._alone = communicator, alone
        self._follow, self._more_writes = frozenset(follow), frozenset(writes)
        self._elsewhere = frozenset(one.name for one in kept if not one.is_own)
        self._own = frozenset(one.name for one in kept if one.is_own)
        self.beside: Set[str] = set()
        self._known: Dict[Tuple[str, ...], Kind] = {}
        self._writes: Dict[Tuple[str, ...], Set[str]] = {}

    def writes(self, ops: Iterable[tf.Operation]) -> Set[str]:
        """Names of the writes of variables that running ``ops`` runs; found only once, because a training loop asks in every
        step."""
        ops = list(ops)
        key = tuple(op.name for op in ops)
        if key not in self._writes:
            self._writes[key] = {op.name for op in ancestors(ops) if self._is_write(op)}
        return self._writes[key]

    def _is_write(self, op: tf.Operation) -> bool:
        return traits(op.type).is_write or op.name in self._more_writes

    def check(self, ops: Sequence[tf.Operation]) -> Kind:
        """What running ``ops`` means for the other processes.

        Raises:
            UnsupportedOpError: the run would wait for other processes without the update that makes them take part; or it has an
                update, but also needs a variable that another process keeps.
        """
        key = tuple(op.name for op in ops)
        if key not in self._known:
            collectives, together = set(self._communicator.collectives), self._communicator.together
            needed = ancestors(ops)
            found = {op.name for op in needed if op.name in collectives}
            updated = {op.name for op in ancestors([op for op in needed if self._is_write(op)])}
            vain = found - updated - self._follow
            vain -= self.beside if found & updated else set()
            refused = sorted(vain - set(together))
            if refused:
                raise UnsupportedOpError(
                    "the run of {} needs {!r}, a value over all processes, but not the update for which the other processes "
                    "compute it; they would not take part, and this process would wait forever. Fetch it together with the train "
                    "op".format(", ".join(repr(op.name) for op in ops[:5]), refused[0]))
            alone = {together[name] for name in vain}
            elsewhere = frozenset(op.name for op in needed if op.name in self._elsewhere).union(
                *(self._alone.get(name, ()) for name in alone))
            if elsewhere and found - vain:
                raise UnsupportedOpError(
                    "the run of {} trains, and also needs variable {!r}, which another process keeps (zero); fetch values that "
                    "depend on it in a separate run".format(", ".join(repr(op.name) for op in ops[:5]), min(elsewhere)))
            waits = bool(found - vain)
            written = frozenset() if waits else self._own.intersection(
                op.name for op in _aliased(op for op in needed if self._is_write(op)))
            self._known[key] = Kind(waits, tuple(sorted(alone)), elsewhere, written)
        return self._known[key]


def ancestors(ops: Iterable[tf.Operation]) -> Set[tf.Operation]:
    """The ops and all that they wait for."""
    return reached(ops, lambda op: (*(tensor.op for tensor in op.inputs), *op.control_inputs))


def _aliased(ops: Iterable[tf.Operation]) -> Set[tf.Operation]:
    """The ops, and those from which they get variables: directly, or through switches and the like."""
    return reached(ops, lambda op: (
        tensor.op for tensor in op.inputs if tensor.dtype == tf.resource or tensor.dtype._is_ref_dtype))


class Start(NamedTuple):
    """What all processes run before a session's first training step.

    Attributes:
        agreement: a number for each process that says what it has staged; all must be equal.
        broadcast: gives every global variable process 0's value.
        nothing: does nothing.
    """

    agreement: tf.Tensor
    broadcast: tf.Operation
    nothing: tf.Operation


def stage_start(graph: tf.Graph, host: str, nodes: Nodes, communicator: ProcessCommunicator) -> Start:
    """Adds the ops of a :class:`Start`.

    Variables of a type that no collective supports (strings) keep their own initial values.

    Args:
        host: device of variables that have none of their own.
        nodes, communicator: they stage ops; the communicator uses the nodes.

    Raises:
        UnsupportedOpError: a variable without a static shape.
    """
    nodes.edit = edit = StagedEdit(graph)
    assigns = []
    for op in variable_ops(graph):
        is_resource = op.type == "VarHandleOp"
        dtype = op.get_attr("dtype")
        if dtype == tf.string:
            continue
        shape = tf.TensorShape(op.get_attr("shape"))
        if not shape.is_fully_defined():
            raise UnsupportedOpError(
                f"variable {op.name!r} has the shape {shape}, but its initial value has to be sent to the other processes; give "
                "it a static shape")
        scope, device = f"whale/broadcast/{op.name}", _device_of(op) or host
        own = read(nodes, is_resource, op.name, scope + "/value", dtype, device) if communicator.is_first else ""
        value = communicator.broadcast(Member(own, device), shape.as_list(), scope, dtype)
        assigns.append(assign(nodes, is_resource, op.name, value, scope + "/assign", dtype, op.device))
    broadcast = nodes.no_op("whale/broadcast/all", "", assigns)
    agreement, nothing = communicator.agreement(host), nodes.no_op("whale/nothing", host, ())
    new = edit.commit()
    return Start(new[agreement].outputs[0], new[broadcast], new[nothing])


def _device_of(op: tf.Operation) -> str:
    """The device of an op, or of the op that it is colocated with; '' if there is none."""
    seen: Set[tf.Operation] = set()
    while op not in seen and "/task:" not in op.device:
        seen.add(op)
        names = [group.decode().partition("loc:@")[2] for group in op.colocation_groups()]
        others = [op.graph.get_operation_by_name(name) for name in names if name and name != op.name]
        op = others[0] if others else op
    return op.device if "/task:" in op.device else ""


def variable_ops(graph: tf.Graph) -> List[tf.Operation]:
    """The global variables' ops, in an order that is the same in every process."""
    names = {variable.op.name for variable in graph.get_collection(v1.GraphKeys.GLOBAL_VARIABLES)}
    return [op for op in graph.get_operations() if op.name in names and op.type in VARIABLES]
