"""``whale simulate`` and ``whale compare``."""

from __future__ import annotations

import json
import os
import re
from typing import List, NamedTuple, Optional, Tuple

import typer
from rich.table import Table

from whale_tf.cli.accuracy import Accuracy, accuracy
from whale_tf.cli.common import check_sizes, console, limited, reported
from whale_tf.cluster import PRECISIONS, Cluster
from whale_tf.documents import check_files
from whale_tf.errors import InfeasibleError, PlanError, did_you_mean, memory_text, seconds_text
from whale_tf.plan import Plan
from whale_tf.planner.measures import ARITHMETIC, OWN
from whale_tf.simulator import (
    FAMILIES,
    Calibration,
    Execution,
    Options,
    Simulation,
    Simulator,
    Source,
    StepGraph,
    is_built_in,
    micro_batch_size,
    model_names,
    trace_of,
    under,
    uniform_3d,
    with_seq,
    write_chrome,
)
from whale_tf.simulator.laws import LAYERS, MEASURED, PRICED, Laws, default_laws, step_with
from whale_tf.simulator.uniform import ORDERS, RECOMPUTE, attention_ops, placement

COLUMNS = ("step", "samples/s", "waits", "exposed", "MFU", "peak memory")
_UNIFORM = re.compile(r"^(\d+)x(\d+)x(\d+)(?:[(:](\d+)\)?)?$")


class Uniform(NamedTuple):
    """``DPxTPxPP``, the number of micro-batches, and how they run; see :func:`whale_tf.simulator.uniform.uniform_3d`."""

    dp: int
    tp: int
    pp: int
    micro_batches: int
    schedule: str
    policy: str = "PA"
    recompute: str = "none"
    zero: str = "none"
    offload: str = "none"
    order: str = ORDERS[0]
    split: Tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp


def simulate(
    plan: Optional[str] = typer.Option(None, help="plan.json (written by `whale plan` or wh.current_plan())"),
    model: Optional[str] = typer.Option(
        None, help="built-in model: {}; bert-N; or of any size: {}:layers=24,hidden=2048,...".format(
            ", ".join(model_names()), ", ".join(FAMILIES))),
    profile: Optional[str] = typer.Option(None, help="model profile: a file or a built-in name"),
    ops: Optional[str] = typer.Option(None, help="with --plan: the step op by op, written by `whale profile --ops`"),
    cluster: str = typer.Option(..., help="cluster.json, or a name: hc1, hc2, hc3, a100:1024, cpu:4, 2xV100-32GB:8"),
    dp: int = typer.Option(1, help="data parallelism"),
    tp: int = typer.Option(1, help="tensor parallelism"),
    pp: int = typer.Option(1, help="pipeline stages"),
    micro_batches: int = typer.Option(1, help="micro-batches in a step"),
    global_batch: Optional[int] = typer.Option(
        None, help="examples in a step; default: the number that the plan was searched for, otherwise one per replica and "
                   "micro-batch"),
    order: str = typer.Option(ORDERS[0], help="which devices work together, neighbours first: {}; nodes: neighbours are on "
                                              "different nodes".format(", ".join(ORDERS))),
    split: str = typer.Option("", help="parts of the model whose weights all devices divide, beside --dp for the others (Whale's "
                                       "replicate and split), e.g. classifier"),
    schedule: str = typer.Option("backward_first", help="order of micro-batches: a name in docs/schedules.md"),
    policy: str = typer.Option("PA", help="warm-up depths: DAPPLE's PA or PB"),
    recompute: str = typer.Option("none", help="none, selective (recompute attention only), full (keep only the inputs of "
                                               "blocks), stage (keep only the inputs of stages), or auto: the first that fits"),
    zero: str = typer.Option("none", help="state that replicas divide: none, v1 (optimizer state), v2 (also gradients), v3 "
                                            "(also variables)"),
    offload: str = typer.Option("none", help="state to keep on the host: none, states, v0 (also variables)"),
    memory_limit: Optional[float] = typer.Option(None, help="GiB that a step may use on each device"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
    trace: Optional[str] = typer.Option(None, help="write a Chrome/Perfetto trace here"),
    timeline: Optional[str] = typer.Option(None, help="write the timeline here (.png or .svg)"),
    memory: Optional[str] = typer.Option(None, help="write the memory curve here (.png or .svg)"),
    report: Optional[str] = typer.Option(None, help="write a self-contained HTML report here"),
    steady_state: Optional[bool] = typer.Option(
        None, "--steady-state/--whole", help="extrapolate from a few micro-batches if the pipeline is periodic (the default), or "
                                             "play all of them (the default with a picture, trace or report)"),
    calibration: Optional[str] = typer.Option(None, help="file of `whale calibrate`, used instead of table figures"),
    precision: Optional[str] = typer.Option(None, help="fp32, tf32, or mixed: fp16, bf16; default: the model's own"),
    xla: bool = typer.Option(False, help="let XLA fuse ops that TensorFlow otherwise runs one by one on GPUs"),
    gradients: str = typer.Option(OWN, help="own, or fp16: float32 gradients are sent between devices in 16 bits"),
    seq: Optional[int] = typer.Option(None, help="tokens of an example, for built-in transformers"),
    laws: Optional[str] = typer.Option(None, help="laws of kernels (docs/simulator.md) to use instead of the package's"),
) -> None:
    """Predict step time, memory and timeline of a plan or a uniform 3D strategy."""
    with reported():
        check_files({"--trace": trace, "--report": report}, {"--timeline": timeline, "--memory": memory})
        measured = Calibration.parse(calibration) if calibration is not None else None
        known = default_laws() if laws is None else Laws.parse(laws)
        machines = limited(Cluster.parse(cluster), memory_limit)
        execution = _execution(machines, precision, xla, known, gradients)
        is_drawn = any(path is not None for path in (trace, timeline, memory, report))
        options = Options(steady_state=not is_drawn if steady_state is None else steady_state, calibration=measured, laws=known)
        loaded = Plan.parse(plan) if plan is not None else None
        if ops is not None:
            simulator = Simulator(machines, options)
            result = _run_ops(simulator, loaded, ops, model or profile, global_batch, execution)
            _finish(result, _accuracy(result, MEASURED, known), PRICED[MEASURED], as_json, trace, timeline, memory, report)
            return
        source = _source(model, profile, loaded, execution, seq)
        simulator = Simulator(machines, source.options(options))
        if loaded is not None:
            result = _run_plan(simulator, source, loaded, global_batch)
        else:
            shape = Uniform(dp, tp, pp, micro_batches, schedule, policy, recompute, zero, offload, order, _parts(split))
            result = _run_uniform(simulator, source, shape, global_batch)
            if shape.devices < len(machines):
                typer.echo(f"note: only {shape.devices} of {len(machines)} devices are used; set --dp, --tp or --pp", err=True)
        _finish(result, _accuracy(result, source.times, known), source.described(), as_json, trace, timeline, memory, report)


def compare(
    strategies: List[str] = typer.Argument(..., help="plan files, or DPxTPxPP:MICRO_BATCHES, e.g. 8x2x1 2x4x2:4"),
    cluster: str = typer.Option(..., help="cluster.json or a name"),
    model: Optional[str] = typer.Option(None, help="built-in model"),
    profile: Optional[str] = typer.Option(None, help="model profile: a file or a built-in name"),
    global_batch: int = typer.Option(..., help="examples in a step"),
    schedule: str = typer.Option("backward_first", help="order of micro-batches of the uniform strategies"),
    order: str = typer.Option(ORDERS[0], help="of the uniform strategies, as for `whale simulate`"),
    split: str = typer.Option("", help="of the uniform strategies, as for `whale simulate`"),
    calibration: Optional[str] = typer.Option(None, help="file of `whale calibrate`"),
    precision: Optional[str] = typer.Option(None, help="as for `whale simulate`"),
    xla: bool = typer.Option(False, help="as for `whale simulate`"),
    gradients: str = typer.Option(OWN, help="as for `whale simulate`"),
    seq: Optional[int] = typer.Option(None, help="as for `whale simulate`"),
    laws: Optional[str] = typer.Option(None, help="as for `whale simulate`"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object per strategy, best first"),
) -> None:
    """Predict several strategies and rank them."""
    with reported():
        measured = Calibration.parse(calibration) if calibration is not None else None
        known, machines = default_laws() if laws is None else Laws.parse(laws), Cluster.parse(cluster)
        execution = _execution(machines, precision, xla, known, gradients)
        plans: List[Optional[Plan]] = []
        for text in strategies:
            if not _UNIFORM.match(text) and not os.path.exists(text):
                raise PlanError(f"{text!r} is neither a plan file nor of the form DPxTPxPP:MICRO_BATCHES, e.g. 2x4x2:4")
            plans.append(None if _UNIFORM.match(text) else Plan.parse(text))
        sources = [_source(model, profile, plan, execution, seq) for plan in plans]
        found: List[Tuple[str, Simulation, Accuracy]] = []
        for text, plan, source in zip(strategies, plans, sources):
            simulator = Simulator(machines, source.options(Options(steady_state=True, calibration=measured)))
            shape = _UNIFORM.match(text)
            if plan is not None:
                result = _run_plan(simulator, source, plan, global_batch)
            else:
                assert shape is not None
                dp, tp, pp, count = (int(value or 1) for value in shape.groups())
                given = Uniform(dp, tp, pp, count, schedule, order=order, split=_parts(split))
                result = _run_uniform(simulator, source, given, global_batch)
            found.append((text, result, _accuracy(result, source.times, known)))
    found.sort(key=lambda item: (item[1].oom, item[1].step_time_s))
    if as_json:
        for name, result, proved in found:
            bounds = proved.bounds(result.samples_per_s)
            typer.echo(json.dumps(dict(result.to_dict(), strategy=name, samples_per_s_range=bounds)))
        return
    table = Table("strategy", *COLUMNS)
    for name, result, _ in found:
        table.add_row(name, *_row(result))
    out = console()
    out.print(table)
    for name, result, proved in found:
        out.print(f"{name}: {proved.rate(result.samples_per_s)}; {result.bottleneck()}")
    for text in dict.fromkeys(proved.text() for _, _, proved in found):
        out.print(text)


def _parts(text: str) -> Tuple[str, ...]:
    """``a, b`` as names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _memory(size_bytes: float, oom: bool) -> str:
    """A memory peak, as the tables show it, with a mark if the device has less."""
    return memory_text(size_bytes) + (" !" if oom else "")


def _row(result: Simulation) -> Tuple[str, ...]:
    return (seconds_text(result.step_time_s), f"{result.samples_per_s:.4g}", f"{result.bubble:.1%}",
            seconds_text(result.exposed_communication_s), f"{result.mfu:.1%}",
            _memory(max(result.peak_memory_bytes), result.oom))


def _execution(cluster: Cluster, precision: Optional[str], xla: bool, laws: Laws, gradients: str = OWN) -> Execution:
    """Raises PlanError: the precision is unknown, or precision or XLA is requested for CPUs."""
    if precision is not None and precision not in PRECISIONS:
        raise PlanError("--precision is {!r}, expected one of {}.{}".format(
            precision, ", ".join(PRECISIONS), did_you_mean(precision, PRECISIONS)))
    if (precision is not None or xla) and any(device.kind != "GPU" for device in cluster.devices):
        raise PlanError(
            f"--precision and --xla apply to kernels of GPUs, but cluster {cluster.name!r} has CPUs; leave them out")
    if gradients not in (OWN, "fp16"):
        raise PlanError(f"--gradients is {gradients!r}, expected {OWN} or fp16")
    return Execution(precision, xla, laws, cluster, gradients == "fp16")


def _source(model: Optional[str], profile: Optional[str], plan: Optional[Plan], execution: Execution,
            seq: Optional[int] = None) -> Source:
    """The model or profile that the options name.  A plan that was searched for a built-in model or profile names it itself, and
    says how it was priced."""
    if model is not None and profile is not None:
        raise PlanError(f"--model {model} and --profile {profile} both say what to simulate; keep one")
    if plan is not None:
        if plan.precision != "float32" and execution.precision is None:
            execution = execution._replace(precision=ARITHMETIC[plan.precision])
        execution = execution._replace(xla=execution.xla or plan.estimate.xla)
        if model is None and profile is None and is_built_in(plan.graph):
            model, profile = (None, plan.graph) if plan.estimate.times == LAYERS else (plan.graph, None)
    if profile is not None:
        return Source.of_profile(profile, execution)
    if model is None:
        raise PlanError(
            "the cost of the ops is unknown: a plan holds names, not times; add --model gpt2, or --profile with "
            "a profile that `whale profile` wrote")
    return Source.of_model(with_seq(model, seq), execution)


def _run_uniform(simulator: Simulator, source: Source, shape: Uniform, global_batch: Optional[int]) -> Simulation:
    """Raises PlanError: under ``auto`` nothing fits; the message gives the least memory that a choice needs."""
    if shape.recompute not in (*RECOMPUTE, "auto"):
        raise PlanError(f"--recompute is {shape.recompute!r}, expected one of {', '.join(RECOMPUTE)}, auto")
    for option, value in (("--dp", shape.dp), ("--tp", shape.tp), ("--pp", shape.pp), ("--micro-batches", shape.micro_batches)):
        if value < 1:
            raise PlanError(f"{option} is {value:,}, expected at least 1")
    devices = placement(simulator.cluster, shape.dp, shape.tp, shape.pp, shape.order)
    batch = global_batch if global_batch is not None else shape.dp * shape.micro_batches
    check_sizes(batch, shape.micro_batches)
    graph, is_open = source.graph(micro_batch_size(batch, shape.micro_batches, shape.dp)), shape.recompute == "auto"
    found: List[Simulation] = []
    for how in RECOMPUTE if is_open else (shape.recompute,):
        if is_open and how == "selective" and not attention_ops(graph):
            continue
        strategy = uniform_3d(graph, shape.dp, shape.tp, shape.pp, shape.micro_batches, shape.schedule, shape.policy,
                              recompute=how, zero=shape.zero, offload=shape.offload, devices=devices, split=shape.split)
        found.append(source.played(strategy, simulator))
        if not found[-1].oom:
            return found[-1]
    if not is_open:
        return found[0]
    least = min(max(one.peak_memory_bytes) for one in found)
    raise InfeasibleError(
        f"nothing fits, whatever is recomputed: the least is {memory_text(least)} on the fullest device, which has "
        f"{memory_text(min(found[0].usable_bytes))} for a step; use more devices, --zero, --offload, or a smaller batch", least)


def _check_size(simulator: Simulator, plan: Plan) -> None:
    if plan.num_devices > len(simulator.cluster.devices):
        raise PlanError(
            f"the plan is for {plan.num_devices} devices, but cluster {simulator.cluster.name!r} has "
            f"{len(simulator.cluster.devices)}; simulate it on a cluster of at least that size")


def _run_plan(simulator: Simulator, source: Source, plan: Plan, global_batch: Optional[int]) -> Simulation:
    _check_size(simulator, plan)
    batch = global_batch if global_batch is not None else plan.estimate.global_batch
    if batch is None:
        batch = plan.num_model_replicas * plan.num_micro_batch * max(task.replica_count for task in plan.task_graphs)
    return source.simulated(plan, batch, simulator)


def _run_ops(simulator: Simulator, plan: Optional[Plan], ops: str, other: Optional[str], global_batch: Optional[int],
             execution: Execution) -> Simulation:
    if plan is None or other is not None:
        raise PlanError("--ops gives a captured step; use it with --plan, and without --model and --profile")
    _check_size(simulator, plan)
    step = under(StepGraph.parse(ops), plan)
    precision = execution.precision or step.precision
    step = step_with(step, execution.laws, execution.cluster.devices[0], precision, execution.xla)
    return simulator.run_step(plan, step, global_batch)


def _accuracy(result: Simulation, times: str, laws: Laws) -> Accuracy:
    types = [result.cluster.devices[device].type for device in result.representative]
    return accuracy(laws, times, types, result.subject.precision)


def _finish(result: Simulation, proved: Accuracy, priced: str, as_json: bool, *files: Optional[str]) -> None:
    _write(result, *files)
    if as_json:
        typer.echo(json.dumps(dict(result.to_dict(), samples_per_s_range=proved.bounds(result.samples_per_s))))
    else:
        _print(result, proved, priced)


def _write(result: Simulation, trace: Optional[str], timeline: Optional[str], memory: Optional[str],
           report: Optional[str]) -> None:
    if trace is not None:
        write_chrome(trace, [trace_of(result)])
    if timeline is None and memory is None and report is None:
        return
    from whale_tf.viz.report import write_report  # matplotlib takes a second to load; only pictures need it
    from whale_tf.viz.timeline import memory_figure, save, timeline_figure

    if timeline is not None:
        save(timeline_figure(trace_of(result)), timeline)
    if memory is not None:
        save(memory_figure(trace_of(result), result.limits_bytes), memory)
    if report is not None:
        write_report(report, result)


def _print(result: Simulation, proved: Accuracy, priced: str) -> None:
    out = console()
    summary = Table(*COLUMNS, title=f"{result.subject.model} on {result.cluster.name}, {priced}")
    summary.add_row(*_row(result))
    out.print(summary)
    devices = Table("device", "count", "stage", "computes", "exposed", "idle", "MFU", "peak memory")
    for use, size in zip(result.devices, result.class_sizes()):
        step = result.step_time_s
        devices.add_row(
            str(use.device), str(size), str(use.stage), f"{use.computation_s / step:.1%}", f"{use.exposed_s / step:.1%}",
            f"{use.bubble_s / step:.1%}", f"{use.mfu:.1%}", _memory(use.peak_memory_bytes, use.oom))
    out.print(devices)
    out.print("bottleneck: " + result.bottleneck())
    for line in proved.lines(result.samples_per_s):
        out.print(line)
