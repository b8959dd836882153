"""Prints a plan as tables, for ``wh.explain()`` and ``whale explain``."""

from __future__ import annotations

import io
import itertools
from collections import Counter
from types import MappingProxyType
from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Set, Union

from rich.console import Console, OverflowMethod
from rich.table import Table

from whale_tf.cluster.processes import JOB, process_of
from whale_tf.errors import PlanError, seconds_text
from whale_tf.ir.graph import OpGraph, Phase
from whale_tf.ir.region import Region
from whale_tf.ir.training_step import pulls_behind
from whale_tf.passes.communicate import pulls_each
from whale_tf.passes.form import Form
from whale_tf.passes.lowering.levels import agreed_batch
from whale_tf.passes.replicate import clones
from whale_tf.plan import Estimate, Plan
from whale_tf.planner.idle import Parameter, divided, told
from whale_tf.planner.sharding.assignment import Assignment, Choice, Stored
from whale_tf.profiler.op_cost import tensor_bytes
from whale_tf.simulator.laws import PRICED

WIDTH = 120
SHOWN = 6  # names shown of a longer list


def explain_plan(plan: Plan, region: Optional[Region], devices: Sequence[str], assignment: Optional[Assignment] = None,
                 form: Optional[Form] = None, too_large: Mapping[str, str] = MappingProxyType({}),
                 parameters: Sequence[Parameter] = ()) -> str:
    """The tables as text.

    Args:
        region: the graph's parallel region, to list ops that are not exact; None shows the plan alone.
        devices: name of every device of the cluster.
        assignment: the choices made under ``split``.
        form: the form in which the step was emitted.
        too_large: variables that ZeRO does not divide although they are larger than a device's share -> the reason.
        parameters: the trained variables of the region's graph.
    """
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, color_system=None, legacy_windows=False, force_jupyter=False)
    for part in _parts(plan, region, devices, assignment, form, too_large, parameters):
        console.print(part, highlight=False, markup=False)
    return out.getvalue()


def _parts(plan: Plan, region: Optional[Region], devices: Sequence[str], assignment: Optional[Assignment],
           form: Optional[Form], too_large: Mapping[str, str], parameters: Sequence[Parameter]) -> Iterator[Union[str, Table]]:
    """The lines and tables of :func:`explain_plan`."""
    yield _title(plan)
    yield from _examples(plan, region)
    share = divided(region, plan, parameters) if region is not None else None
    if share is not None and told(share):
        yield told(share)
        if share.without and any(share.flops.values()):
            yield f"No products on {_short([devices[number] for number in share.without])}."
    yield from _estimate(plan.estimate)
    yield from _precision(plan, region)
    yield _task_graphs(plan, devices, region)
    if assignment is not None and assignment.choices:
        yield _shards(assignment.choices)
        yield from _undivided(plan, assignment)
    elif plan.shards:
        yield patterns_table(plan.shards)
    if assignment is not None and assignment.stored:
        yield _stored(assignment.stored)
    for task in plan.task_graphs:
        if task.kept is not None:
            yield f"{task.name}: the backward pass recomputes activations; {len(task.kept)} tensor(s) are kept."
    yield from _homes(plan, devices, too_large)
    if plan.bridges:
        yield _bridges(plan)
    yield from _gradients(plan, region, parameters)
    if form is not None:
        yield f"Emitted as {'calls of functions' if form.is_called else 'inlined ops'}: {form.reason}."
    if region is not None:
        yield from _batches(region)
        yield from _draws(plan, region)
        yield from _sections(plan, region, devices)
        yield from _inexact(plan, region, assignment.reseeded if assignment is not None else ())


def _table(title: str, *headings: str, overflow: OverflowMethod = "ellipsis") -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, overflow=overflow)
    return table


def _homes(plan: Plan, devices: Sequence[str], too_large: Mapping[str, str]) -> List[str]:
    """The places of variables that have homes."""
    count: Dict[int, int] = {}
    for task in plan.task_graphs:
        for home in task.homes.values():
            count[home] = count.get(home, 0) + 1
    if not count:
        return []
    hosts = [home for home in sorted(count) if home >= plan.num_devices]
    names = {home: "the host" if len(hosts) == 1 else f"the host of process {plan.process_of(home)}" for home in hosts}
    names.update({home: _short([devices[home]]) for home in count if home not in names})
    where = ", ".join(f"{names[home]}: {count[home]}" for home in sorted(count))
    gradients = "each micro-batch's gradients are added up there" if plan.adds_at_home else "gradients are summed there"
    read = "in every call, forward and backward" if plan.reads_anew else "once a step"
    is_asked = (plan.zero, plan.offload) != ("none", "none")
    is_told = any(task.homes and task.strategy == "split" for task in plan.task_graphs)
    kept = f"at home (zero {plan.zero}, offload {plan.offload})" if is_asked else (
        "where their layouts say" if is_told else "on the first device of their TaskGraph")
    lines = [f"Variables are kept and updated {kept}; {gradients}, and replicas read them {read}. Number of variables on "
             f"{where}."]
    parts = [f"{name!r} (dimension {dim})" for task in plan.task_graphs for name, dim in task.parts.items()]
    if parts:
        lines.append(f"Divided into parts, one for each replica, so that all devices have about the same: "
                     f"{', '.join(parts[:SHOWN])}{', ...' if parts[SHOWN:] else ''}.")
    lines += [f"Variable {name!r} is not divided although it is larger than a device's share: {why}."
              for name, why in too_large.items()]
    lines += _owners(plan)
    peaks = plan.estimate.peak_memory_bytes
    return lines + (["Estimated peaks of the devices: " + ", ".join(map(_bytes, peaks)) + "."] if peaks else [])


def _owners(plan: Plan) -> List[str]:
    """Which process updates which variables, if homes are divided over several processes."""
    here = {plan.process_of(device) for task in plan.task_graphs for row in task.devices for device in row}
    if len(plan.processes) < 2 or (len(here) > 1 and plan.spans_processes):
        return []
    homes = [home for task in plan.task_graphs for home in task.homes.values()]
    if plan.num_devices in homes:
        return ["Each process has all variables on its own host, and updates them."]
    if plan.zero == "none":
        return ["Each process has all variables, and updates them."]
    owners = [plan.process_of(home) for home in homes]
    counts = ", ".join(f"process {rank}: {owners.count(rank)}" for rank in range(len(plan.processes)))
    if plan.zero == "v3":
        return ["Each variable and its optimizer state are in one process, which updates it, and sends its value to the others "
                f"before the forward pass of every step. Number of variables of {counts}."]
    return ["Each process has all variables. The process that updates a variable keeps its optimizer state, and sends the new "
            f"value to the others in every step. Number of variables updated by {counts}."]


def _title(plan: Plan) -> str:
    used = {d for task in plan.task_graphs for row in task.devices for d in row}
    return (f"{len(plan.task_graphs)} TaskGraph(s) on {len(used)} of {plan.num_devices} devices, {plan.num_model_replicas} model "
            f"replica(s), {plan.num_micro_batch} micro-batch(es), schedule {plan.schedule}, found by {plan.estimate.search}")


def _examples(plan: Plan, region: Optional[Region]) -> List[str]:
    """How many examples a step has, and from how many batches of the input pipeline."""
    if region is None or len(region.batch.batches) != 1:
        return []
    sources, replicas, each = region.batch.sources, plan.num_model_replicas, pulls_each(plan)
    try:
        batch = agreed_batch(region.graph, sources, {tensor: region.batch.layout(tensor) for tensor in sources})
    except PlanError:  # inputs disagree, and nothing is divided
        return []
    is_pulled = any(pulls_behind(region.graph, tensor) for tensor in sources)
    others = max(1, len(plan.data_parallel_processes))
    count = replicas * each if is_pulled and plan.nested_batch != "divide" else others
    how = "one for each process" if count == others > 1 else f"one for each of {replicas} model replicas" if each == 1 else (
        f"one for each of {each} micro-batches of {replicas} model replica(s) (io.batch: micro)")
    what, how = ("mini-batch", "") if count == 1 else ("mini-batches", f", {how}")
    if batch is None:
        return [f"A step takes {count} {what} of open size{how}."]
    return [f"A step has {count * batch} examples: {count} {what} of {batch}{how}."]


def _estimate(estimate: Estimate) -> List[str]:
    """The search's estimate; nothing for a plan that no search made."""
    if estimate.latency_s is None:
        return []
    peak = "" if not estimate.peak_memory_bytes else f", at most {_bytes(max(estimate.peak_memory_bytes))} on a device"
    how = "" if not estimate.times else f", {PRICED[estimate.times]}" + " under XLA" * estimate.xla
    batch = "" if estimate.global_batch is None else f" of {estimate.global_batch} examples"
    lines = [f"Estimated: {seconds_text(estimate.latency_s)} for a step{batch}{peak}{how}."]
    lines += [f"{text[0].upper()}{text[1:]}." for text in (*filter(None, [estimate.host]), *estimate.without)]
    return lines + ["Rejected: " + text for text in estimate.runners_up]


def _precision(plan: Plan, region: Optional[Region]) -> List[str]:
    """How many ops compute in low precision under mixed precision."""
    if plan.precision == "float32":
        return []
    line = f"Mixed precision: {plan.precision}"
    if region is not None:
        counts = []
        for members, what in ((region.batch_level - region.sections, "of a micro-batch"), (region.sections, "that run once")):
            ops = [region.graph.ops[index] for index in members]
            low = sum(any(region.graph.tensors[tensor].dtype == plan.precision for tensor in op.outputs) for op in ops)
            counts += [f"{low} of {len(ops)} forward and backward ops {what}"] if ops else []
        line += f" in {' and '.join(counts)}" if counts else ""
    scale = "no scale" if plan.loss_scale is None else f"scale {plan.loss_scale}"
    return [f"{line}; variables and updates in float32; gradients with {scale}."]


def _task_graphs(plan: Plan, devices: Sequence[str], region: Optional[Region]) -> Table:
    count = plan.num_model_replicas
    rows = ["devices"] if count == 1 else [f"model replica {g}" for g in range(count)]
    table = _table("TaskGraphs", "#", "name", "strategy", "forward ops", "warm-up", "variables", *rows)
    sections = () if region is None else region.sections
    once = Counter(region.task_graph[op] for op in sections if region is not None and region.graph.ops[op].phase is Phase.FORWARD)
    for index, task in enumerate(plan.task_graphs):
        count_once = f" ({once[index]} once)" if once[index] and task.strategy == "replicate" else ""
        slices = " " + ":".join(map(str, task.slices)) if task.slices else ""
        variables = task.variables if task.replica_count * count > 1 else ""
        table.add_row(
            str(index), task.name, f"{task.strategy}({task.device_count}){slices}", str(len(task.ops)) + count_once,
            str(task.warmup), variables, *[_short([devices[d] for d in row]) for row in task.devices])
    return table


def _shards(choices: Sequence[Choice]) -> Table:
    table = _table("Sharding patterns (bytes per step, forward and backward)", "op", "pattern", "bytes", "why not divided",
                   overflow="fold")
    for choice in choices:
        table.add_row(choice.op, choice.pattern, _bytes(round(choice.bytes)), choice.reason)
    return table


def _stored(stored: Sequence[Stored]) -> Table:
    table = _table("Layouts of variables and activations", "layout", "kept as", "bytes on a device", overflow="fold")
    for one in sorted(stored, key=lambda one: (not one.bytes, not one.spread.is_divided)):
        table.add_row(one.what, str(one.spread) if one.spread.is_divided else "whole, on one device", _bytes(one.bytes))
    return table


def _undivided(plan: Plan, assignment: Assignment) -> List[str]:
    """Where ops of ``split`` TaskGraphs run that are not divided by their weights."""
    lines = []
    for task in plan.task_graphs:
        if task.batch_of is not None:
            lines.append(f"{task.name}: each device computes these {len(task.ops)} forward op(s) for its own examples.")
    for number, names in sorted(assignment.alone.items()):
        if names:
            lines.append("{}: the first device computes {} forward op(s) for all: {}.".format(
                plan.task_graphs[number].name, len(names), ", ".join(names[:SHOWN]) + (", ..." if names[SHOWN:] else "")))
    return lines


def patterns_table(shards: Mapping[str, str]) -> Table:
    """The number of ops with each sharding pattern, and some examples."""
    table = _table("Sharding patterns", "pattern", "ops", "such as", overflow="fold")
    for pattern in sorted(set(shards.values())):
        names = [op for op, taken in shards.items() if taken == pattern]
        table.add_row(pattern, str(len(names)), ", ".join(names[:3]))
    return table


def _short(names: Sequence[str]) -> str:
    """``CPU:0, CPU:1`` for full device names; ``1/CPU:0`` for one of process 1, if there are several."""
    def short(name: str) -> str:
        process, _, device = name.rpartition("/device:")
        return f"{process_of(name)}/{device}" if process.startswith(f"/job:{JOB}/") else device or name

    return ", ".join(map(short, names))


def _bridges(plan: Plan) -> Table:
    table = _table("Bridges (bytes per micro-batch)", "from", "to", "pattern", "tensors", "bytes", "largest")
    for key in sorted({(b.producer, b.consumer, b.pattern, b.per_step) for b in plan.bridges}):
        group = [b for b in plan.bridges if (b.producer, b.consumer, b.pattern, b.per_step) == key]
        largest = max(group, key=lambda b: b.bytes)
        producer, consumer, pattern, per_step = key
        table.add_row(
            plan.task_graphs[producer].name, plan.task_graphs[consumer].name, pattern + (" (once per step)" if per_step else ""),
            str(len(group)), _bytes(sum(b.bytes for b in group)), largest.tensor)
    return table


def _gradients(plan: Plan, region: Optional[Region], parameters: Sequence[Parameter]) -> List[Table]:
    """The gradients that are summed; those of ops that run once for all replicas are not."""
    table = _table("Gradient synchronisation (bytes per step)", "TaskGraph", "replicas", "communicator", "variables", "buckets",
                   "bytes")
    once = [] if region is None else [one for one in parameters if not one.is_summed(region)]
    names = set() if region is None else {region.graph.ops[one.variable].name for one in once}
    for sync in plan.gradients:
        task = plan.task_graphs[sync.task_graph]
        buckets = [left for left in (set(bucket) - names for bucket in sync.buckets) if left]
        if not buckets:
            continue
        less = sum(one.bytes for one in once if one.task_graph == sync.task_graph)
        table.add_row(
            task.name, str(task.replica_count * plan.num_model_replicas), sync.backend + (" (float16)" if sync.fp16 else ""),
            str(sum(map(len, buckets))), str(len(buckets)), _bytes(max(0, sync.bytes - less)))
    return [table] if table.row_count else []


def _batches(region: Region) -> List[str]:
    """Inputs whose numbers of examples differ."""
    graph, batches = region.graph, region.batch.batches
    if len(batches) < 2:
        return []
    names = "; ".join(", ".join(graph.tensor_name(tensor) for tensor in members) for members in batches.values())
    return [f"The inputs have {len(batches)} different numbers of examples, each of which is divided by itself: {names}"]


def _draws(plan: Plan, region: Region) -> List[str]:
    """The cost of ``random: local``."""
    drawn = region.batch.own_seed if plan.random == "local" else []
    if not drawn:
        return []
    size = sum(tensor_bytes(region.graph, region.graph.ops[index].outputs[0]) for index in drawn)
    names = ", ".join(region.graph.ops[index].name for index in drawn[:5]) + (", ..." if len(drawn) > 5 else "")
    return [f"Random numbers equal the local script's: {len(drawn)} op(s) draw once per step for the whole mini-batch, on one "
            f"device, and clones take their rows ({_bytes(size)} in tensors of known size): {names}"]


def _sections(plan: Plan, region: Region, devices: Sequence[str]) -> List[str]:
    """The ops that run once on all examples, and the bytes that they take from the clones."""
    graph, whole = region.graph, region.batch.whole
    if not region.sections:
        return []
    taken = {graph.ops[op].inputs[position] for op, position in region.batch.combined() if op in region.sections}
    held = {t for index in region.early for t in graph.ops[index].outputs
            if any(user in region.late for user, _ in graph.consumers(t))}
    tasks = [plan.task_graphs[number] for number in sorted({region.task_graph[index] for index in region.sections})]
    first = dict.fromkeys(devices[task.devices[0][0]] for task in tasks)
    where = "" if any(task.strategy == "split" for task in tasks) else f", on {_short(list(first))}"
    lines = [f"{len(region.sections)} ops need all examples together and run once per mini-batch{where}. They take "
             f"{_sizes(graph, taken)} from the clones. The clones' ops before them run ahead of the schedule, and hold "
             f"{_sizes(graph, held)} of all micro-batches."]
    for reason, found in itertools.groupby(sorted(whole.items()), key=lambda item: item[1]):
        (op, _), *others = found
        more = f" and {len(others)} more" if others else ""
        lines.append(f"  {graph.ops[op].name} ({graph.ops[op].type}){more}: {reason}")
    return lines


def _sizes(graph: OpGraph, tensors: Set[int]) -> str:
    is_open = any(None in (graph.tensors[tensor].shape or (None,)) for tensor in tensors if graph.tensors[tensor].shape != ())
    size = sum(tensor_bytes(graph, tensor) for tensor in tensors)
    parts = ([_bytes(size)] if size else []) + (["tensors of open sizes"] if is_open else [])
    return " and ".join(parts) or "nothing"


def _inexact(plan: Plan, region: Region, reseeded: Sequence[str]) -> List[str]:
    ops = region.graph.ops
    found = [f"{ops[item.op].name} ({ops[item.op].type}): {item.reason}" for item in region.batch.inexact
             if len(clones(plan, region.task_graph[item.op])) > 1]
    found += [f"{name}: different initial values from the same distribution (init: sharded)" for name in reseeded]
    if any(sync.fp16 for sync in plan.gradients):
        found.append("gradients are rounded to float16 on their way between processes (communication.fp16)")
    if not found:
        return ["Exact: the parallel result equals the local one, apart from rounding."]
    return [f"Not exactly the local result ({len(found)} place(s)):"] + ["  " + text for text in found]


def _bytes(count: int) -> str:
    """``1.5 MiB``, or a dash if the size is not known."""
    if count == 0:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.4g} {unit}"
        size /= 1024
    return ""
