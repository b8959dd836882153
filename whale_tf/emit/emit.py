"""Plan -> edits of the same tf.Graph: the ordered list of passes, which can be read from top to bottom.

Everything new is staged first and committed with one import; only then are edges of existing ops moved.  So an error during
staging leaves the graph as it was.
"""

from __future__ import annotations

from typing import Dict, Mapping, NamedTuple, Optional, Sequence

from whale_tf._tf_compat import tf
from whale_tf.capture.captured import Captured
from whale_tf.cluster import Processes
from whale_tf.communicators import Communicator, Keys, ProcessCommunicator, communicator
from whale_tf.emit import reroute
from whale_tf.emit.begin import begin
from whale_tf.emit.calls import Calls
from whale_tf.emit.clones import clone_region
from whale_tf.emit.context import Context
from whale_tf.emit.draws import check_draws, draw_whole
from whale_tf.emit.gathered import gather_values, read_gathered
from whale_tf.emit.guard import Guard
from whale_tf.emit.inputs import Inputs
from whale_tf.emit.joined_gradients import join_gradients
from whale_tf.emit.mirror import Mirror
from whale_tf.emit.operands import Operands
from whale_tf.emit.order import Order
from whale_tf.emit.outside import merge_leaving, take_of_all_processes
from whale_tf.emit.owners import Sent, send_updates
from whale_tf.emit.processes import Shared, merged_scalars, shared_scalars
from whale_tf.emit.reads import Reads
from whale_tf.emit.recipes import Recipes
from whale_tf.emit.shares import Least, find_division
from whale_tf.emit.update import clone_update, copy_variables, variable_copies
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.region import Region
from whale_tf.passes.form import Form
from whale_tf.passes.lowering import Lowering
from whale_tf.plan import Plan


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
    inputs: Sequence[str] = ()  # tensors with examples that all processes must read alike
    least: Mapping[str, Least] = {}  # what inputs need whose sizes are known only at run time

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
    context, step, form = begin(tf_graph, captured, region, plan, devices, processes, has_run)
    edit, nodes = context.edit, Nodes(context.edit)
    sums = communicator(backend, nodes, processes, keys)
    is_function = tf_graph.building_function
    sums.is_always_together = is_function or processes.runs_part
    waits_for_sums = processes.graphs > 1 and not sums.is_always_together  # of losses that some runs compute alone
    division = find_division(context, nodes, captured, sums)
    check_draws(context, division.own, processes.graphs)
    after = reroute.outside_after(step.graph, step.region)

    copies = copy_variables(context, context.variables)
    inputs = Inputs(context, nodes, division, captured.sources)
    operands = Operands(context, nodes, division, inputs, copies, sums, Lowering(step, plan, context.program))
    order = Order(context, nodes, captured.sources)
    if plan.reads_anew:
        operands.reads = Reads(context, nodes, order)
    if context.owners.gathered:
        assert isinstance(sums, ProcessCommunicator)
        context.gathered = gather_values(context, nodes, operands.recipes, sums, after)
    if not (has_run or context.is_in_place):  # after a run, a copy would draw instead, whose generator starts from the beginning
        draw_whole(context, operands.converter)
    calls = clone_region(context, operands, order, Guard(context, nodes, division), after)
    recipes = operands.recipes
    shared: Sequence[Shared] = ()
    moves: Dict[reroute.Use, str] = {}
    if not context.is_in_place:
        recipes.stage()
        if waits_for_sums:
            shared = shared_scalars(context, captured, recipes, sums)
        elif processes.runs_part and not is_function:
            shared = merged_scalars(context, captured, recipes)
        moves = merge_leaving(context, nodes, inputs, recipes, step, shared)
    if processes.graphs > 1:
        moves.update(take_of_all_processes(context, nodes, inputs, recipes, sums, step.across))
    update_clones = clone_update(context, operands, recipes)
    mirror = Mirror(tf_graph, variable_copies(context, copies), {step.graph.ops[index].name for index in update_clones})
    mirror.check(captured.graph, captured.phases.variables)
    mirror.stage(edit, captured.definitions.added)

    reroute.move_edges(context, moves)
    reroute.move_controls(context, after)
    reroute.add_waits(context, update_clones)
    reroute.add_waits(context, reroute.deferred_waits(step.graph, step.region, after))
    for scalar in shared if waits_for_sums else ():
        reroute.add_waits(context, {index: [scalar.value] for index in scalar.writes})
    if inputs.last_pulls():
        reroute.add_waits(context, dict.fromkeys(reroute.update_writes(step.graph), inputs.last_pulls()))

    read_gathered(context)
    sent = Sent()
    if context.owners.process:
        assert isinstance(sums, ProcessCommunicator)
        sent = send_updates(context, nodes, recipes, sums)

    instead = edit.copy_instead(context.name("instead")) if has_run else {}
    if not has_run:
        reroute.place_originals(context, context.variables)
    if is_function and processes.graphs == 1:
        join_gradients(context, nodes)
    new_ops = edit.commit()
    mirror.finish(new_ops)
    context.tf_ops = [op if isinstance(op, tf.Operation) else new_ops[op.name] for op in context.tf_ops]
    return Emitted(context, nodes, recipes, mirror, sums, calls, form, shared, sent, instead, order.gates,
                   inputs.compared(), division.least)
