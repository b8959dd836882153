"""Plan -> edits of the same tf.Graph: the ordered list of passes, which can be read from top to bottom.

Everything new is staged first and committed with one import; only then are edges of existing ops moved.  So an error during
staging leaves the graph as it was.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.capture.captured import Captured
from whale_tf.cluster import Processes
from whale_tf.communicators import Communicator, Keys, Member, ProcessCommunicator, communicator
from whale_tf.emit import reroute
from whale_tf.emit.calls import Calls
from whale_tf.emit.clones import clone_region
from whale_tf.emit.context import ORIGINAL, Context, Copy
from whale_tf.emit.draws import check_draws, draw_whole
from whale_tf.emit.gathered import gather_values, read_gathered
from whale_tf.emit.guard import Guard
from whale_tf.emit.inputs import Inputs
from whale_tf.emit.joined_gradients import join_gradients
from whale_tf.emit.mirror import Mirror, VariableCopy
from whale_tf.emit.operands import Operands
from whale_tf.emit.order import Order
from whale_tf.emit.owners import Sent, send_updates
from whale_tf.emit.processes import Shared, check_random, merged_scalars, shared_scalars
from whale_tf.emit.reads import Reads
from whale_tf.emit.recipes import Recipes
from whale_tf.emit.shares import Division, find_division
from whale_tf.emit.update import clone_update, copy_variables
from whale_tf.emit.xla import explained, not_compiled
from whale_tf.errors import PlanError, UnsupportedOpError
from whale_tf.graph_editor.edges import COLOCATE
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.staged import Original, StagedEdit
from whale_tf.ir.across import Across, is_of_rows
from whale_tf.ir.graph import OpGraph
from whale_tf.ir.region import Region
from whale_tf.ir.training_step import TrainingStep
from whale_tf.ir.traits import Role, traits
from whale_tf.passes import compile_program, parted
from whale_tf.passes.form import Form, choose_form
from whale_tf.passes.homes import find_homes
from whale_tf.passes.lowering import Lowering
from whale_tf.passes.owners import find_owners
from whale_tf.passes.replicate import has_one_clone
from whale_tf.plan import Plan

JOINED = ("float32", "float64", "int32", "int64")  # types of sums that are sent in one message


class Emitted(NamedTuple):
    """What a Session needs to know about a rewritten graph."""

    context: Context
    nodes: Nodes
    recipes: Recipes
    mirror: Mirror
    communicator: Communicator
    calls: Calls
    form: Form
    shared: Sequence[Shared] = ()
    sent: Sent = Sent()
    instead: Mapping[str, str] = {}  # ops that a Session had before the rewrite -> their replacements
    gates: Mapping[str, Sequence[str]] = {}  # see :class:`whale_tf.emit.order.Gates`

    def beside_update(self) -> Emitted:
        """The same with separate merged values, for runs that update variables."""
        context = self.context.beside_update()
        return self._replace(context=context, recipes=self.recipes.beside(context))

    def begin_edit(self) -> StagedEdit:
        """Begins a new edit for what is staged from now on, such as merged values."""
        edit = StagedEdit(self.context.tf_graph)
        self.context.edit = self.calls.context.edit = self.nodes.edit = edit
        return edit


def emit(tf_graph: tf.Graph, captured: Captured, region: Region, plan: Plan, backend: str, devices: Sequence[str],
         processes: Processes, keys: Optional[Keys], has_run: bool) -> Emitted:
    """Writes a plan's step into the graph.

    Args:
        plan: the part of it that this process runs.
        backend: communicator for gradients.
        devices: TensorFlow device string of each of the cluster's devices.
        processes: all processes, and which of them this is.
        keys: numbers of this process's collectives, if there are several processes.
        has_run: the graph has already been extended into a Session, which would not notice that edges move.

    Raises:
        PlanError, UnsupportedOpError: the graph cannot run under this plan; nothing was edited.
    """
    _check_writes(captured, region, plan)
    edit = StagedEdit.after(captured.definitions)
    nodes = Nodes(edit)
    context, step, form = _begun(tf_graph, captured, region, plan, devices, processes, edit, has_run)
    region, graph = step.region, step.graph
    sums = communicator(backend, nodes, processes.graphs, processes.rank, keys)
    sums.is_always_together = is_function = tf_graph.building_function
    division = find_division(context, nodes, captured, sums)
    _check(context, division)
    after = reroute.outside_after(graph, region)

    copies = copy_variables(context, context.variables)
    inputs = Inputs(context, nodes, division, captured.sources)
    operands = Operands(context, nodes, division, inputs, copies, sums, Lowering(step, plan, context.program))
    order = Order(context, nodes)
    if plan.reads_anew:
        operands.reads = Reads(context, nodes, order)
    if context.owners.gathered:
        assert isinstance(sums, ProcessCommunicator)
        context.gathered = gather_values(context, nodes, sums, after)
    if not (has_run or context.is_in_place):  # after a run, a copy would draw instead, whose generator starts from the beginning
        draw_whole(context, operands.converter)
    calls = clone_region(context, operands, order, Guard(context, nodes, division), after)
    recipes = operands.recipes
    shared: Sequence[Shared] = ()
    moves: Dict[reroute.Use, str] = {}
    if not context.is_in_place:
        recipes.stage()
        if processes.graphs > 1 and not is_function:
            shared = shared_scalars(context, captured, recipes, sums)
        elif processes.runs_part and not is_function:
            shared = merged_scalars(context, captured, recipes)
        moves = _merge_leaving(context, nodes, inputs, recipes, step, {scalar.tensor: scalar.value for scalar in shared})
    if processes.graphs > 1:
        moves.update(_of_all_processes(context, nodes, recipes, division, sums, step.across))
    update_clones = clone_update(context, operands, recipes)
    own_writes = {graph.ops[index].name for index in update_clones}
    mirror = Mirror(tf_graph, _variable_copies(context, copies), own_writes)
    mirror.stage(edit, captured.definitions.added)

    reroute.move_edges(context, moves)
    reroute.move_controls(context, after)
    reroute.add_waits(context, update_clones)
    deferred = reroute.deferred_waits(graph, region, after)
    reroute.add_waits(context, {index: [graph.ops[wait].name for wait in waits] for index, waits in deferred.items()})
    for scalar in shared if processes.graphs > 1 else ():
        reroute.add_waits(context, {index: [scalar.value] for index in scalar.writes})

    read_gathered(context)
    sent = Sent()
    if context.owners.process:
        assert isinstance(sums, ProcessCommunicator)
        sent = send_updates(context, nodes, sums, context.owners)

    instead = edit.copy_instead(context.name("instead")) if has_run else {}
    if not has_run:
        reroute.place_originals(context, context.variables)
    if is_function and processes.graphs == 1:
        join_gradients(context, nodes)
    new_ops = edit.commit()
    mirror.finish(new_ops)
    context.tf_ops = [op if isinstance(op, tf.Operation) else new_ops[op.name] for op in context.tf_ops]
    return Emitted(context, nodes, recipes, mirror, sums, calls, form, shared, sent, instead, order.gates)


def _begun(tf_graph: tf.Graph, captured: Captured, region: Region, plan: Plan, devices: Sequence[str], processes: Processes,
           edit: StagedEdit, has_run: bool) -> Tuple[Context, TrainingStep, Form]:
    """The state of the rewrite before anything is staged, the step with its parts, and how the step is emitted."""
    step = parted(captured.step(region, processes.graphs), plan)
    graph, program = step.graph, compile_program(step, plan)
    form = choose_form(program, step.region, plan)
    compiled = not_compiled(program, plan, devices)
    if compiled:
        form = form._replace(reason=f"{form.reason}. {explained(compiled)}")
    is_in_place = (has_one_clone(plan) and processes.graphs == 1 and not (form.is_called or plan.reads_anew or has_run)
                   and (tf_graph.building_function or not processes.runs_part))
    context = Context(tf_graph, _tf_ops(tf_graph, graph, edit), graph, step.region, plan, devices, edit, processes, program,
                      form.is_called, is_in_place)
    context.compiled = {function.name for body in program.bodies if compiled.get(body.name) == ""
                        for function in program.functions(body)}
    context.variables = step.update.variables
    context.homes, context.owners = find_homes(step, plan), find_owners(step, plan)
    context.pinned = _pinned(context, captured)
    context.dropped = {wait for op, new in zip(captured.graph.ops, graph.ops) if op is not new
                       for wait in set(op.control_inputs).difference(new.control_inputs)}
    return context, step, form


def _check(context: Context, division: Division) -> None:
    """Raises:
        PlanError, UnsupportedOpError: the copies or processes of the plan would compute something else.
    """
    _check_rereads(context)
    if context.processes.graphs > 1:
        check_random(context)
    check_draws(context, division.own, context.processes.graphs)


def _pinned(context: Context, captured: Captured) -> Dict[str, str]:
    """Ops that take the handle or reference of a variable that all replicas share -> the variable's device; look-ups in tables
    -> the host."""
    graph = captured.graph
    found = {op.name: context.host for op in graph.ops if traits(op.type).role is Role.TABLE and context.region.contains(op)}
    for tensor, variable in captured.phases.variables.alias_of.items():
        home = captured.variable_homes.get(variable)
        if home is not None and context.plan.task_graphs[home].variables == "shared":
            device = context.device_of(graph.ops[variable])
            found.update(dict.fromkeys((graph.ops[op].name for op, _ in graph.consumers(tensor)), device))
    for op in graph.ops if found else ():  # in the order of creation: an op is colocated with an older one
        if "_class" in op.attrs:
            groups = (group.partition(COLOCATE.decode())[2] for group in op.attrs["_class"])
            found.update((op.name, found[group]) for group in groups if group in found)
    return found


def _variable_copies(context: Context, copies: Dict[Tuple[int, Copy], str]) -> Dict[str, Dict[str, VariableCopy]]:
    result: Dict[str, Dict[str, VariableCopy]] = {}
    for (index, copy), tensor in copies.items():
        if copy != ORIGINAL:
            op = context.graph.ops[index]
            device = context.device(context.variables[index], copy, op.shard)
            result.setdefault(context.scope(copy), {})[op.name] = VariableCopy(tensor, device)
    return result


def _tf_ops(tf_graph: tf.Graph, graph: OpGraph, edit: StagedEdit) -> List[Original]:
    by_name = {op.name: op for op in tf_graph.get_operations()}
    return [by_name[op.name] if op.name in by_name else edit.node(op.name) for op in graph.ops]


def _check_writes(captured: Captured, region: Region, plan: Plan) -> None:
    for index in captured.phases.writes_inside:
        op, task = captured.graph.ops[index], plan.task_graphs[region.task_graph[index]]
        if index in region.sections and (task.variables == "shared" or task.replica_count * plan.num_model_replicas == 1):
            continue
        raise UnsupportedOpError(
            f"op {op.name!r} ({op.type}) writes a variable, and a gradient is computed from its result; every micro-batch and "
            "replica would write it. Write the variable outside the differentiated computation (tf.GraphKeys.UPDATE_OPS), and "
            "read its value before the write; or set variables to 'shared'")


def _check_rereads(context: Context) -> None:
    for index in context.region.rereads:
        op = context.graph.ops[index]
        copies = context.copies(context.home(op))
        if len(copies) > 1 or context.processes.graphs > 1:
            raise PlanError(
                f"op {op.name!r} reads a variable after its update in the same step, and there are "
                f"{len(copies) * context.processes.graphs} copies of it, which may not have been updated by then: set variables "
                "to 'shared' (CPU devices of one process), or run the updates one after the other")


def _merge_leaving(context: Context, nodes: Nodes, inputs: Inputs, recipes: Recipes, step: TrainingStep,
                   shared: Dict[int, str]) -> Dict[reroute.Use, str]:
    """Stages the merged value of every tensor that leaves the region, and says which uses read it.

    Args:
        shared: values over all processes, for tensors that have one in every step.  Other tensors have one only if a variable
            is computed from them, because it takes a collective.
    """
    moves: Dict[reroute.Use, str] = {}
    across = step.across
    everywhere = across.uses
    for tensor, uses in context.region.leaving().items():
        if context.graph.tensors[tensor].dtype in ("variant", "resource"):
            continue  # a loop's lists and handles have no merged value; readers use the original's
        for op, position in uses:
            if op in step.update.task_graph:
                moves[op, position] = recipes.for_update(tensor, step.update.task_graph[op], ORIGINAL)
            elif (op, position) in everywhere and not (op in across.twice and is_of_rows(context.region.batch.layout(tensor))):
                moves[op, position] = recipes.of_all_processes(tensor)
            elif tensor in shared:
                moves[op, position] = shared[tensor]
            else:
                moves[op, position] = recipes.whole(tensor)
    for tensor, uses in inputs.leaving().items():
        moves.update({use: inputs.concatenated(tensor) for use in uses})
    if recipes.is_larger:
        return {use: _of_unknown_shape(context, nodes, use, name) for use, name in moves.items()}
    return moves


def _of_all_processes(context: Context, nodes: Nodes, recipes: Recipes, division: Division, sums: Communicator,
                      across: Across) -> Dict[reroute.Use, str]:
    """What ops outside of the clones read instead of inputs, where this takes the rows of all processes."""
    if context.tf_graph.building_function and not across.decisive:
        return {}
    graph, of_all = context.graph, _inputs_of_all(context, across, sums)
    moves = {(op, position): of_all[graph.ops[op].inputs[position]] for op, position in across.uses
             if op not in across.twice and graph.ops[op].inputs[position] in of_all}
    if not context.tf_graph.building_function:
        return {use: _resized(context, nodes, use, name) for use, name in moves.items()}
    moves.update(_run_twice(context, across, recipes, of_all))
    moves.update(_added_up(context, across, sums, division))
    return moves


def _inputs_of_all(context: Context, across: Across, sums: Communicator) -> Dict[int, str]:
    """Batch inputs of all processes that ops outside of the clones read."""
    graph = context.graph
    tensors = sorted({graph.ops[op].inputs[position] for op, position in across.uses})
    return {
        tensor: sums.gather_across(
            Member(graph.tensor_name(tensor), context.host), len(context.static_shape(tensor)),
            context.name("processes", context.flat(tensor)), context.dtype(tensor), False)
        for tensor in tensors if not context.region.contains(graph.producer(tensor))}


def _run_twice(context: Context, across: Across, recipes: Recipes, inputs: Dict[int, str]) -> Dict[reroute.Use, str]:
    """Clones the ops that run on the rows of all processes; the originals run on this process's rows."""
    graph = context.graph
    entering = sorted({graph.ops[op].inputs[position] for op, position in across.uses if op in across.twice})
    names = context.edit.clone(
        [context.tf_ops[index] for index in across.twice], context.name("of_all"),
        input_map={graph.tensor_name(tensor): inputs.get(tensor) or recipes.of_all_processes(tensor) for tensor in entering})
    return {(user, position): f"{names[graph.ops[index].name]}:{graph.tensors[tensor].index}"
            for index in across.twice for tensor in graph.ops[index].outputs for user, position in graph.consumers(tensor)
            if user in across.decisive and user not in across.twice}


def _added_up(context: Context, across: Across, sums: Communicator, division: Division) -> Dict[reroute.Use, str]:
    """Adds up what each process has counted on its own rows, in one message for each type.

    Raises:
        PlanError: the function was traced for one batch size, which the count may contain.
    """
    graph = context.graph
    if across.added and division.batch is not None:
        op, position = across.added[0]
        raise PlanError(
            f"{graph.tensor_name(graph.ops[op].inputs[position])!r} is counted in a mini-batch of {division.batch} examples; "
            "the function's signature prescribes this size, which may be part of the count; leave the batch size open (None) in "
            "input_signature")
    groups: Dict[Tuple[str, bool], List[reroute.Use]] = {}
    for use in across.added:
        record = graph.tensors[graph.ops[use[0]].inputs[use[1]]]
        is_fixed = record.shape is not None and None not in record.shape and record.dtype in JOINED
        groups.setdefault((record.dtype if is_fixed else f"{record.dtype} {use[0]}", is_fixed), []).append(use)
    moves: Dict[reroute.Use, str] = {}
    for (_, is_fixed), uses in groups.items():
        tensors = [graph.ops[op].inputs[position] for op, position in uses]
        members = [Member(graph.tensor_name(tensor), context.host) for tensor in tensors]
        names = [context.name("added", graph.ops[op].name) for op, _ in uses]
        if is_fixed and len(uses) > 1:
            shapes = [context.static_shape(tensor) for tensor in tensors]
            totals = sums.across_together(members, names, shapes, context.dtype(tensors[0]))
        else:
            totals = [sums.across(member, "sum", name, context.dtype(tensor))
                      for member, name, tensor in zip(members, names, tensors)]
        moves.update(zip(uses, totals))
    return moves


def _of_unknown_shape(context: Context, nodes: Nodes, use: reroute.Use, name: str) -> str:
    """The same tensor without a static shape, for when all model replicas' mini-batches together have more rows than the graph
    says: TensorFlow refuses to move an edge between different static shapes."""
    tensor = context.graph.ops[use[0]].inputs[use[1]]
    return _resized(context, nodes, use, name) if context.region.batch.layout(tensor).is_sharded else name


def _resized(context: Context, nodes: Nodes, use: reroute.Use, name: str) -> str:
    op, position = context.graph.ops[use[0]], use[1]
    tensor = op.inputs[position]
    return nodes.add("PlaceholderWithDefault", context.name("resized", op.name, str(position)), [name], context.host,
                     dtype=context.dtype(tensor), shape=tf.TensorShape(None))
