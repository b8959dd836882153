"""What is known before anything is staged: the step with its parts, its form, and the context of the rewrite."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Sequence

from whale_tf._tf_compat import tf
from whale_tf.capture.captured import Captured
from whale_tf.cluster import Processes
from whale_tf.emit.context import Context, Facts
from whale_tf.emit.processes import check_random
from whale_tf.emit.xla import explained, not_compiled
from whale_tf.errors import PlanError, UnsupportedOpError
from whale_tf.graph_editor.edges import COLOCATE
from whale_tf.graph_editor.staged import Original, StagedEdit
from whale_tf.ir.graph import OpGraph
from whale_tf.ir.region import Region
from whale_tf.ir.training_step import TrainingStep
from whale_tf.ir.traits import Role, traits
from whale_tf.passes import compile_program, parted
from whale_tf.passes.form import Form, choose_form
from whale_tf.passes.homes import Homes, find_homes
from whale_tf.passes.owners import find_owners
from whale_tf.passes.replicate import device_at, has_one_clone
from whale_tf.plan import Plan
from whale_tf.program import ORIGINAL


class Begun(NamedTuple):
    context: Context
    step: TrainingStep
    form: Form


def begin(tf_graph: tf.Graph, captured: Captured, region: Region, plan: Plan, devices: Sequence[str], processes: Processes,
          has_run: bool) -> Begun:
    """The rewrite before anything is staged; for arguments and errors see :func:`whale_tf.emit.emit.emit`."""
    _check_writes(captured, region, plan)
    edit = StagedEdit.after(captured.definitions)
    step = parted(captured.step(region, processes.graphs, processes.runs_part), plan)
    graph, program = step.graph, compile_program(step, plan)
    form = choose_form(program, step.region, plan)
    compiled = not_compiled(program, plan, devices)
    if compiled:
        form = form._replace(reason=f"{form.reason}. {explained(compiled)}")
    is_in_place = (has_one_clone(plan) and processes.graphs == 1 and not (form.is_called or plan.reads_anew or has_run)
                   and (tf_graph.building_function or not processes.runs_part))
    homes, variables = find_homes(step, plan), step.update.variables
    facts = Facts(variables, homes, find_owners(step, plan), _pinned(captured, step.region, plan, homes, devices, processes),
                  frozenset(wait for op, new in zip(captured.graph.ops, graph.ops) if op is not new
                            for wait in set(op.control_inputs).difference(new.control_inputs)),
                  frozenset(function.name for body in program.bodies if compiled.get(body.name) == ""
                            for function in program.functions(body)))
    context = Context(tf_graph, _tf_ops(tf_graph, graph, edit), graph, step.region, plan, devices, edit, processes, program,
                      form.is_called, is_in_place, facts)
    _check_rereads(context)
    if processes.graphs > 1:
        check_random(context)
    return Begun(context, step, form)


def _pinned(captured: Captured, region: Region, plan: Plan, homes: Homes, devices: Sequence[str],
            processes: Processes) -> Dict[str, str]:
    """Ops that take the handle or reference of a variable that all replicas share -> the variable's device; look-ups in tables
    -> the host."""
    graph, host = captured.graph, processes.host_device
    found = {op.name: host for op in graph.ops if traits(op.type).role is Role.TABLE and region.contains(op)}
    for tensor, variable in captured.phases.variables.alias_of.items():
        task_graph = captured.variable_task_graph.get(variable)
        if task_graph is not None and plan.task_graphs[task_graph].variables == "shared":
            home = homes.ops.get(variable)
            device = devices[device_at(plan, task_graph, ORIGINAL, graph.ops[variable].shard) if home is None else home]
            found.update(dict.fromkeys((graph.ops[op].name for op, _ in graph.consumers(tensor)), device))
    for op in graph.ops if found else ():  # in the order of creation: an op is colocated with an older one
        if "_class" in op.attrs:
            groups = (group.partition(COLOCATE.decode())[2] for group in op.attrs["_class"])
            found.update((op.name, found[group]) for group in groups if group in found)
    return found


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
        copies = len(context.copies(context.task_graph_of(op)))
        if copies > 1 or context.owners.process:
            copies *= context.processes.graphs
            raise PlanError(
                f"op {op.name!r} reads a variable after its update in the same step, and there are {copies} copies of it, which "
                "may not have been updated by then: set variables to 'shared' and zero to 'none', or run the updates one after "
                "the other")
