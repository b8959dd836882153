"""What a tf.function needs around a rewritten graph: ops placed at their variables, and results of the whole mini-batch.

A function's graph has known results and side effects.  Its variables live outside it, in the user's tf.Variable objects, which
checkpoints, ``assign`` and other functions may read and write at any time.  So there is one copy of each, on the device where
the user made it or, if devices have memories of their own, on the first device of its TaskGraph; all replicas read it in every
step, and its update runs once (the Plan's ``variables: shared``).  If ``wh.split`` or ZeRO divides a variable, the function
captures its parts; if it has a home, one part (:mod:`whale_tf.runtime.variable_parts`).
"""

from __future__ import annotations

from typing import Any, Callable, Container, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import eager_context, function_tracing, is_unlifted, release, tf, traced_graphs
from whale_tf.capture.annotations import FORWARD_ATTR, PHASE_ATTR, Annotations
from whale_tf.capture.handles import own_handle, variable_handles
from whale_tf.cluster import Cluster, Processes, process_of
from whale_tf.communicators import Keys, ProcessCommunicator
from whale_tf.config import Config
from whale_tf.emit.context import Context
from whale_tf.emit.effects import divide_effects
from whale_tf.emit.emit import Emitted
from whale_tf.emit.own_part import CHECK, HOST, OwnPart, keep_own_part
from whale_tf.emit.owners import kept_variables
from whale_tf.errors import ConfigError, PlanError
from whale_tf.graph_editor import add_control_inputs, consumers
from whale_tf.ir.traits import CONTROL_FLOW, VARIABLES, traits
from whale_tf.ir.walk import reached
from whale_tf.passes.homes import kept_in_bodies
from whale_tf.patterns.spread import Spread, once
from whale_tf.plan import Plan
from whale_tf.planner.homes import STAGE, asks_for_homes, has_one_memory
from whale_tf.runtime.results import Results
from whale_tf.runtime.variable_parts import VariableParts
from whale_tf.transforms.shard.checkpoints import DividedVariable

SHARED = "shared"
XLA = "_XlaMustCompile"
TAGS = "_whale_"
_SESSION = "train in graph mode, with tf.compat.v1.disable_eager_execution() and a tf.compat.v1.Session"


class MovedVariable(NamedTuple):
    """A captured variable that is in parts, or on another device than its user made it on, during steps.

    Attributes:
        op: the placeholder of its handle.
        names: of the placeholders of its parts' handles; a part that is the whole variable has the variable's own name.
        spread: how the parts form the whole.
        devices: of the parts.
    """

    op: tf.Operation
    names: Tuple[str, ...]
    spread: Spread
    devices: Tuple[str, ...]

    @property
    def what(self) -> str:
        """What happens to the variable, in words."""
        return "wh.split or zero divides" if self.spread.is_divided else "zero, offload or variables 'stage' moves"


class Finished(NamedTuple):
    """What the processes that run a function together have to know of it.

    Attributes:
        staged: a text of everything that they do together, equal in processes that agree.
        seen: where each process runs a part of the step, the variable with checksums of what it has read of each input.
        inputs: names of these inputs.
    """

    staged: str
    seen: str = ""
    inputs: Sequence[str] = ()


def check(name: str, annotations: Annotations, attributes: Mapping[str, Any], config: Config, plan: Optional[Plan],
          processes: Processes) -> None:
    """Refuses what is not supported for the tf.function that has this name and these attributes.

    Raises:
        ConfigError, PlanError: they say what to do instead.
    """
    if attributes.get(XLA):
        raise PlanError(
            f"tf.function {name!r} is compiled by XLA (jit_compile=True), which puts all of it on one device; leave out "
            "jit_compile, so that whale_tf can divide the step over devices")
    tracing = function_tracing()
    if processes.count > 1 and (tracing is None or tracing.compilation is None):
        raise PlanError(
            f"tf.function {name!r} trains in a job of {processes.count} processes; for functions, whale_tf supports this from "
            f"TensorFlow 2.15 on, but this is {tf.__version__}; start one process that sees all devices, or {_SESSION}")
    chosen = config if plan is None else plan
    if chosen.init == "sharded":
        raise ConfigError(
            f"init is 'sharded', but the variables of tf.function {name!r} have their values before whale_tf divides them; leave "
            "out init ('exact')")
    mirrored = plan is not None and any(
        task.variables != SHARED and len({device for row in task.devices for device in row}) > 1 for task in plan.task_graphs)
    if config.variables == "mirrored" or mirrored:
        raise ConfigError(
            f"variables is 'mirrored', but all replicas of tf.function {name!r} read the user's own variables; use variables "
            f"'auto' or '{SHARED}'")


def untag(graph: tf.Graph) -> None:
    """Removes our attributes from the graph of a function that stays as it is: TensorFlow never merges ops whose attributes
    differ."""
    for node in graph.as_graph_def().node:
        for name in node.attr:
            if name.startswith(TAGS):
                graph.get_operation_by_name(node.name)._clear_attr(name)


def separate_updates(graph: tf.Graph, annotations: Annotations) -> None:
    """Makes the ops that read an IdentityN read its operands instead, and wait for what it waits for.

    Keras sends the gradients of all variables through one IdentityN, which is of no use outside tf.distribute.  It would bring
    all gradients to one device, and no op after it would belong to a single variable.  Those that a tape has recorded stay.
    """
    ops = [op for op in graph.get_operations() if op.type == "IdentityN"]
    if not ops:
        return
    definitions = graph.as_graph_def().node
    seen = {node.attr[FORWARD_ATTR].s.decode() for node in definitions if FORWARD_ATTR in node.attr}
    seen |= {node.name for node in definitions if PHASE_ATTR in node.attr}
    seen |= {name.partition(":")[0] for call in annotations.gradient_calls for name in (*call.ys, *call.xs)}
    for op in ops:
        for inside, outside in zip(op.inputs, op.outputs) if op.name not in seen else ():
            for user, position in consumers(outside):
                user._update_input(position, inside)
                add_control_inputs(user, op.control_inputs)


def place_anywhere(graph: tf.Graph, processes: Processes) -> None:
    """Takes the process out of the devices of a function's ops.

    TensorFlow places an op on the device of the eager iterator or table that it uses.  Every process has made one of its own, so
    these ops are no more this process's than the others'."""
    for op in graph.get_operations():
        if process_of(op.device) == processes.rank:
            op._set_device(tf.DeviceSpec.from_string(op.device).replace(job=None, replica=None, task=None).to_string())


def makes_variables(graph: tf.Graph) -> bool:
    """Whether a function was traced to find the variables that it makes.

    TensorFlow initialises these outside of the function, and traces the function again to run it."""
    with tf.init_scope():
        return any(is_unlifted(one) and not one.is_initialized() for one in graph.variables)


def refuse_to_run(function: Any) -> None:
    """Makes a concrete function that was traced to find its variables refuse to run.

    TensorFlow would run it only if it cannot initialise these outside of the function."""
    def _call_flat(*args: Any, **kwargs: Any) -> Any:
        raise PlanError(
            f"tf.function {function.graph.name!r} makes variables whose initial values depend on its arguments, but whale_tf "
            "only divides functions whose variables exist before the first step; make the variables outside of the function")
    function._call_flat = _call_flat


def trained_unseen(function: Any, seen: Container[tf.Graph]) -> bool:
    """Whether a tf.function was traced before whale_tf could see it, and takes gradients and writes variables, directly or in
    functions that it calls.

    Args:
        seen: graphs that whale_tf saw.
    """
    for graph in traced_graphs(function):
        if graph in seen:
            continue
        exported = graph.as_graph_def()
        bodies = [exported.node] + [body.node_def for body in exported.library.function]
        nodes = [node for body in bodies for node in body]
        if any(node.name.startswith(("gradient_tape/", "gradients/")) for node in nodes) and any(
                traits(node.op).is_write for node in nodes):
            return True
    return False


def settings(config: Config, cluster: Cluster, spans: bool) -> Config:
    """The configuration that functions run under.

    There is one copy of each variable in each process that has whole model replicas, and with its TaskGraph if devices have
    memories of their own; one in all processes if a model replica spans them (``spans``).  A mini-batch that the function itself
    takes from an iterator, as in Keras 2, is divided over all model replicas like one that it is given, unless the user says
    otherwise."""
    if config.io.batch == "micro":
        raise ConfigError("config key 'io.batch' is 'micro', which is for input pipelines of graphs that train in Sessions; a "
                          "tf.function is given whole mini-batches: set io.batch to 'mini'")
    divided = {} if "io.nested_batch" in config.given else {"io__nested_batch": "divide"}
    has_memories = spans or not has_one_memory(cluster)
    moves = config.variables == STAGE or (config.variables == "auto" and has_memories)
    return config.changed(variables=STAGE if moves else SHARED, **divided)


def moves_variables(config: Config, plan: Optional[Plan]) -> bool:
    """Whether a function may keep variables on other devices than its user.  ``plan``: the one that it is given."""
    return asks_for_homes(config) if plan is None else any(task.homes for task in plan.task_graphs)


def check_devices(name: str, context: Context) -> None:
    """Raises:
        PlanError: TensorFlow has fewer devices than the plan uses in this process.
    """
    devices, rank = tf.config.list_logical_devices(), context.processes.rank
    found = {_kind_and_number(device.name) for device in devices}
    lacking = context.lacking([device for device in context.devices
                               if process_of(device) not in (None, rank) or _kind_and_number(device) in found])
    if lacking:
        raise PlanError(
            f"the plan of tf.function {name!r} uses {lacking}, which TensorFlow does not have: it has {len(devices)} devices. "
            "Logical CPU devices are made by wh.init(); call it before TensorFlow runs its first op, makes its first variable "
            "or lists its devices")


def _kind_and_number(device: str) -> Tuple[str, int]:
    spec = tf.DeviceSpec.from_string(device)
    return spec.device_type, spec.device_index


def finish(graph: tf.Graph, emitted: Emitted, replaced: Mapping[str, Any], divided: Sequence[DividedVariable],
           variable_parts: VariableParts, keys: Optional[Keys],
           before_parts: Optional[Callable[[Sequence[MovedVariable]], None]] = None) -> Finished:
    """Makes a rewritten function return and do what the local one did, for the whole mini-batch.

    Args:
        divided: variables that the function has in parts.
        keys: numbers of this process's collectives, if there are several processes.
        before_parts: called while the function is still that of all processes of which each will run a part.

    Raises:
        PlanError: the function did not capture one of these, or undivided ops would run as well.
    """
    _check_results(graph, emitted.context)
    results = Results(emitted, replaced)
    graph.outputs = merged(results, graph.outputs)
    # the end of a loss scale's gate comes first: what it waits for is dead in a step that is skipped, and so is then whatever
    # waits for this function in another one
    graph.control_outputs = _all_clones(emitted, results, graph.control_outputs)
    processes = emitted.context.processes
    if (divided or processes.runs_part) and tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer"):
        what = "wh.split or zero divides variables of" if divided else "this process runs a part of"
        raise PlanError(
            f"{what} tf.function {graph.name!r}, but TensorFlow's graph optimizer is off (disable_meta_optimizer), and only it "
            "removes ops that nothing needs from a function; leave it on")
    parts = {name for variable in divided for name in variable.names}
    for elsewhere in kept_variables(emitted.context):
        op = graph.get_operation_by_name(elsewhere.name)
        variable = _captured_variable(graph, op, "zero keeps in one process")
        kept = variable_parts.keep(variable, once, [elsewhere.device], ["" if elsewhere.is_own else elsewhere.home])
        _capture_instead(graph, op, [op.name], kept)
        parts.add(op.name)
    moved = [MovedVariable(one.op, one.names, one.spread, tuple(graph.get_operation_by_name(name).device for name in one.names))
                  for one in divided]
    moved += [MovedVariable(op, (op.name,), once, (device,)) for op, device in _at_home(graph, emitted.context).items()
                   if op.name not in parts]
    sums = emitted.communicator
    finished = Finished(sums.staged if isinstance(sums, ProcessCommunicator) else "")
    if isinstance(sums, ProcessCommunicator):
        _check_first(graph, sums.collectives)
    if processes.runs_part:
        assert keys is not None
        if before_parts is not None:
            before_parts(moved)
        inputs = [name for name in emitted.inputs if graph.get_tensor_by_name(name).dtype not in (tf.variant, tf.resource)]
        own = _keep_own_part(graph, moved, processes, keys, variable_parts, inputs)
        finished = Finished(f"{finished.staged}\n{own.staged}", own.seen, inputs)
    else:
        for one in moved:
            _capture_parts(graph, one, variable_parts)
    _place_at_variables(graph)
    _share_functions(graph)
    return finished


def _check_first(graph: tf.Graph, collectives: Sequence[str]) -> None:
    """Makes collectives wait for the checks of the step: one that a failing check cancels would end all later ones."""
    exchanging = [graph.get_operation_by_name(name) for name in collectives]
    behind = reached(exchanging, _users)
    checks = [op for op in graph.get_operations() if op.type == CHECK and op not in behind]
    for op in exchanging if checks else ():
        add_control_inputs(op, checks)


def _users(op: tf.Operation) -> List[tf.Operation]:
    """What reads or waits for an op."""
    return [*(user for tensor in op.outputs for user in tensor.consumers()), *op._control_outputs]


def _keep_own_part(graph: tf.Graph, moved: Sequence[MovedVariable], processes: Processes, keys: Keys,
                   variable_parts: VariableParts, inputs: Sequence[str]) -> OwnPart:
    """Reduces the function to this process's part of the step (:mod:`whale_tf.emit.own_part`), which uses the variables, or parts
    of them, that are here."""
    owners: Dict[str, Optional[int]] = dict.fromkeys(variable_handles(graph))
    for one in moved:
        owners.update(zip(one.names, map(process_of, one.devices)))
    own = keep_own_part(graph, owners, divide_effects(graph, owners, processes.members), inputs, processes, keys)
    graph.outputs, graph.control_outputs = own.outputs, own.control_outputs
    # names of parts count up, so the order must be the same in all processes; that of a condition's operands may not be
    for one in sorted(moved, key=lambda one: one.op.name):
        are_own = [owners[name] == processes.rank for name in one.names]
        kept = variable_parts.keep(
            _captured_variable(graph, one.op, one.what), one.spread,
            [device if is_own else HOST for device, is_own in zip(one.devices, are_own)],
            ["" if is_own else device for device, is_own in zip(one.devices, are_own)])
        _capture_instead(graph, one.op, one.names, kept)
    return own


def _check_results(graph: tf.Graph, context: Context) -> None:
    """Raises:
        PlanError: a result follows from state that only one process has.
    """
    ops, owners, gathered = context.graph, context.owners, context.gathered.ops
    results = [ops.tensor(tensor.name) for tensor in graph.outputs if tensor.op.name in ops]
    behind = reached([ops.tensors[tensor].op for tensor in results], lambda index: () if index in gathered else (
        ops.tensors[tensor].op for tensor in ops.ops[index].inputs if tensor not in owners.sent))
    for index in sorted(behind.difference(gathered)):
        taken = [before for before in (ops.tensors[tensor].op for tensor in ops.ops[index].inputs) if before in owners.state]
        if index in owners.update or (taken and not context.region.contains(ops.ops[index])):
            variable = ops.ops[owners.update.get(index, taken[0] if taken else index)].name
            raise PlanError(
                f"tf.function {graph.name!r} returns what follows from op {ops.ops[index].name!r}, but under zero only one "
                f"process has what this op takes from the update of {variable!r}; return values of the forward pass, or read the "
                "variable outside of the function")


def merged(results: Results, tensors: Sequence[tf.Tensor]) -> List[tf.Tensor]:
    """Results, with those that clones compute merged over all clones.  TensorFlow puts an Identity before most results; these
    are outside the cloned ops and read merged values already."""
    edit = results.begin_edit()
    names = [results.joined(tensor.name, [
        results.whole(part, trains=True, is_together=True) if results.is_cloned(part) else part
        for part in results.tensors(tensor.name)]) for tensor in tensors]
    edit.commit()
    return [edit.graph.get_tensor_by_name(name) for name in names]


def _all_clones(emitted: Emitted, results: Results, ops: Sequence[tf.Operation]) -> List[tf.Operation]:
    """Ops that must run.  An op that was replaced, cloned or divided gives way to its replacement, or to all its clones or
    parts."""
    context = emitted.context
    owned, elsewhere = context.owners.update, context.owners.state
    left_out = {context.graph.ops[index].name for index in context.owners.left_out}
    found: Dict[str, None] = {}
    for name in (name for op in ops for name in results.ops(op.name)):
        if name in left_out:
            continue
        names = [name]
        if name in context.graph:
            record = context.graph.op(name)
            if record.id in context.gathered.ops:
                names = [context.gathered.ops[record.id]]
            elif any(context.graph.tensors[tensor].op in elsewhere for tensor in record.inputs) and record.id not in owned:
                continue  # a read that nobody uses
            elif results.is_cloned(name):
                names = results.clones(name)
        found.update(dict.fromkeys(names))
    return [context.tf_graph.get_operation_by_name(name) for name in found]


def _at_home(graph: tf.Graph, context: Context) -> Dict[tf.Operation, str]:
    """Variables with a home, including those of optimizers -> the home's device."""
    found = {**context.homes.ops, **kept_in_bodies(context.graph, context.homes)} if context.homes.ops else {}
    return {graph.get_operation_by_name(context.graph.ops[index].name): context.devices[home]
            for index, home in found.items() if context.graph.ops[index].type in VARIABLES}


def _capture_parts(graph: tf.Graph, one: MovedVariable, variable_parts: VariableParts) -> None:
    """Makes the function capture the parts of a variable instead of the variable.

    Raises:
        PlanError: the variable is an argument, or no longer exists.
    """
    variable = _captured_variable(graph, one.op, one.what)
    if not one.spread.is_divided and _kind_and_number(own_handle(variable).device) == _kind_and_number(one.devices[0]):
        return
    _capture_instead(graph, one.op, one.names, variable_parts.divide(variable, one.spread, one.devices))


def _captured_variable(graph: tf.Graph, op: tf.Operation, what: str) -> Any:
    """The variable of a placeholder.

    Args:
        what: happens to it.

    Raises:
        PlanError: the variable is an argument, or no longer exists.
    """
    inner = op.outputs[0]
    outer = next((outside for outside, inside in graph.captures if inside is inner), None)
    variable = next((one for one in graph.variables if own_handle(one) is outer), None)
    if outer is None:
        raise PlanError(
            f"{what} a variable that tf.function {graph.name!r} gets as its argument ({inner.name!r}); let the function use the "
            "variable itself")
    if variable is None:
        raise PlanError(
            f"{what} a variable of which tf.function {graph.name!r} has only the handle ({inner.name!r}); keep the tf.Variable "
            "object as long as the function is used")
    return variable


def _capture_instead(graph: tf.Graph, op: tf.Operation, names: Sequence[str], parts: Sequence[Any]) -> None:
    """Makes the function capture parts, whose placeholders have ``names``, instead of the variable of placeholder ``op``."""
    inner = op.outputs[0]
    outer = next(outside for outside, inside in graph.captures if inside is inner)
    for name, part in zip(names, parts):
        handle = graph.get_operation_by_name(name).outputs[0]
        with graph.as_default():
            captured = graph.capture(part.handle)
        for user, position in consumers(handle):
            user._update_input(position, captured)
    release(graph, outer)
    graph.inputs = [tensor for tensor in graph.inputs if tensor is not inner]


def _place_at_variables(graph: tf.Graph) -> None:
    """Places ops that take a variable's handle where the variable is."""
    outer = {inner.op.name: handle for handle, inner in graph.captures}
    for name in variable_handles(graph):
        handle = graph.get_operation_by_name(name)
        device = outer[name].device if name in outer else ""
        handle._set_device("")
        for op in handle.outputs[0].consumers():
            if op.type not in CONTROL_FLOW:
                op._set_device(device)


def _share_functions(graph: tf.Graph) -> None:
    """Registers functions that the rewrite made with TensorFlow's eager context, too, where TensorFlow looks for them."""
    known = eager_context()
    for function in graph.as_graph_def().library.function:
        if not known.has_function(function.signature.name):
            known.add_function_def(function)
