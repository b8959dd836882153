"""``whale plan``, ``whale explain`` and ``whale diff``."""
from __future__ import annotations

import json
import os
from typing import Any, Dict, List, Optional, Sequence

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from whale_tf.cli.accuracy import Accuracy, accuracy
from whale_tf.cli.common import check_exists, check_sizes, console, limited, reported
from whale_tf.cluster import BUILTIN, Cluster
from whale_tf.documents import check_files, plain
from whale_tf.errors import PlanError, memory_text, seconds_text
from whale_tf.garbage import garbage_collection_paused
from whale_tf.passes.lowering import Lowering, lowered_text
from whale_tf.plan import PRECISIONS, SCHEDULES, Plan
from whale_tf.planner.annotated import check_plan
from whale_tf.planner.auto.choose import Request, choose
from whale_tf.planner.candidate import Candidate
from whale_tf.planner.explain import explain_plan, patterns_table
from whale_tf.planner.failures import snapshots
from whale_tf.planner.joint import Progress
from whale_tf.planner.measures import AUTO, OWN, Allowed
from whale_tf.planner.search import METHODS, ON_GRAPHS, search
from whale_tf.planner.simulated import ALGORITHM, with_slices
from whale_tf.profiler.model_profile import ModelProfile, builtin_names, load_builtin
from whale_tf.simulator import MODELS, Execution, Source, built_in_model, model_names, with_seq
from whale_tf.simulator.laws import LAYERS, PRICED, default_laws

ON_STEPS = ("auto", "dapple", "amp")  # searches whose plans of scripts are played as Programs

COLOURS = ("blue", "green", "magenta", "yellow", "cyan", "red")


def plan(
    model: Optional[str] = typer.Option(
        None, help="a built-in model, priced as TensorFlow runs it; or a file that `whale profile` reads (.py, .pb, .meta)"),
    profile: Optional[str] = typer.Option(
        None, help="instead of --model: a profile of layers, a file or a built-in name, priced by its own times"),
    cluster: Optional[str] = typer.Option(None, help="a built-in name, a JSON file, or a short form such as 2xV100-32GB:8"),
    global_batch: Optional[int] = typer.Option(None, help="examples in a step"),
    search_method: str = typer.Option("dapple", "--search", help=", ".join([*METHODS, *ON_GRAPHS])),
    recompute: str = typer.Option(AUTO, help="activations to recompute in the backward pass: none, full, stage, or auto: as "
                                             "few as a plan needs to fit"),
    zero: str = typer.Option(AUTO, help="state that replicas divide: none, v1 (optimizer state), v2 (also gradients), v3 "
                                        "(also variables), or auto: as little as a plan needs to fit"),
    offload: str = typer.Option(AUTO, help="state to keep on the host: none, states, v0 (also variables), or auto"),
    precision: str = typer.Option(OWN, help="own (the profile's), float32, float16, bfloat16, or auto: own or float16"),
    schedule: str = typer.Option("backward_first", help="{}, or auto".format(", ".join(SCHEDULES))),
    xla: bool = typer.Option(False, help="let XLA fuse the ops of a built-in model, as for `whale simulate`"),
    seq: Optional[int] = typer.Option(None, help="tokens of an example, for built-in transformers"),
    memory_limit: Optional[float] = typer.Option(None, help="GiB that a step may use on each device"),
    mtbf: Optional[float] = typer.Option(None, metavar="SECONDS", help="also say how often to take snapshots if the job fails so "
                                         "often on average, and the expected goodput"),
    disk: float = typer.Option(1.0, metavar="GB/S", help="with --mtbf: at which a snapshot is written"),
    restart: float = typer.Option(60.0, metavar="SECONDS", help="with --mtbf: from a failure until training goes on"),
    output: Optional[str] = typer.Option(None, "--output", "-o", help="write the plan to this file"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
    list_names: bool = typer.Option(False, "--list", help="list the built-in models, clusters and searches"),
) -> None:
    """Search for the best parallel plan of a model on a cluster."""
    if list_names:
        _list(as_json)
        return
    if (model is None and profile is None) or cluster is None or global_batch is None:
        raise typer.BadParameter("give --model (or --profile), --cluster and --global-batch, or --list")
    with reported():
        check_files({"--output": output}, {})
        check_sizes(global_batch)
        machines = limited(Cluster.parse(cluster), memory_limit)
        with garbage_collection_paused(), Console(stderr=True).status(f"searching ({search_method})") as status:
            def progress(count: int, fastest_s: float) -> None:
                best = f", the fastest that fits: {seconds_text(fastest_s)}; Ctrl-C takes it" if fastest_s < float("inf") else ""
                status.update(f"searching ({search_method}): {count} plans played{best}")

            allowed = Allowed(recompute, zero, offload, precision, schedule)
            found = _search(model, profile, machines, global_batch, search_method, allowed, xla, seq, progress)
        taken = None if mtbf is None else snapshots(found, machines, mtbf, 1e9 * disk, restart)
        if output is not None:
            with open(output, "w", encoding="utf8") as handle:
                handle.write(plan_of(found, machines).to_json() + "\n")
    if as_json:
        rate = found.global_batch / found.latency_s
        bounds = _accuracy(found, machines).bounds(rate)
        told = {} if taken is None else {"snapshots": taken._asdict()}
        typer.echo(json.dumps(dict(found.to_dict(), samples_per_s=rate, samples_per_s_range=bounds, **told)))
    else:
        _show(found, machines)
        if taken is not None:
            typer.echo(taken.told)


def _search(model: Optional[str], own: Optional[str], cluster: Cluster, global_batch: int, method: str, allowed: Allowed,
            xla: bool, seq: Optional[int] = None, progress: Optional[Progress] = None) -> Candidate:
    """``own``: a profile of layers, instead of a model.

    Raises:
        PlanError: the search is unknown, or does not work with the model or the options.
    """
    if own is not None and model is not None:
        raise PlanError(f"--model {model} and --profile {own} both say what to plan; keep one")
    execution = Execution(None, xla, default_laws(), cluster)
    if own is not None or model is None:
        return _of_layers(Source.of_profile(own or "", execution), cluster, global_batch, method, allowed, progress)
    name, kind = os.path.splitext(os.path.basename(model))
    is_graph = kind in (".py", ".pb", ".meta")
    allowed.check()
    asked = [name for name, value in allowed._asdict().items() if value not in (AUTO, "none", OWN, "backward_first")]
    searches_steps = kind == ".py" and method in ON_STEPS
    if asked and not searches_steps and (is_graph or method == "rhino"):
        raise PlanError(
            f"search {method!r} cannot decide about memory for {model!r}; leave --{asked[0]} out, or give a script (.py) and "
            f"--search {', '.join(ON_STEPS)}")
    if is_graph:
        check_exists(model)
        from whale_tf.measure.scripts import (  # TensorFlow takes seconds to load; profiles do not need it
            plan_model,
            profile_model,
        )

        if searches_steps:
            return plan_model(model, name, cluster, method, global_batch, _of_steps(allowed))
        if method in ON_GRAPHS:
            return plan_model(model, name, cluster, method, global_batch)
        profile = profile_model(model, [], global_batch, name).profile
        return _of_layers(Source(name, profile, execution), cluster, global_batch, method, Allowed("none"))
    if kind == ".json" or os.path.isfile(model):
        return _of_layers(Source.of_profile(model, execution), cluster, global_batch, method, allowed, progress)
    return _of_layers(Source.of_model(with_seq(model, seq), execution), cluster, global_batch, method, allowed, progress)


def _of_layers(source: Source, cluster: Cluster, global_batch: int, method: str, allowed: Allowed,
               progress: Optional[Progress] = None) -> Candidate:
    """The answer of a search over the layers of a model, which prices it."""
    if method == "rhino":
        raise PlanError(f"search 'rhino' reads an op graph, but {source.name!r} is searched by its layers; give a script (.py), "
                        "a frozen model (.pb) or a MetaGraph (.meta), or use --search auto")
    layers = source.layers(global_batch)
    if method == "auto":
        return choose(layers, layers, cluster, Request("all", None, None, global_batch, allowed=allowed), source,
                      progress)
    return search(layers, cluster, global_batch, method, allowed, source=source, progress=progress)


def _of_steps(allowed: Allowed) -> Allowed:
    """The measures that a search for plans of a script may use.  Precision is a pass over the script's ops, which comes first.

    Raises:
        PlanError: a value only applies to layers.
    """
    refused = (("recompute", "stage", "none, full, auto"), ("precision", AUTO, f"own, {', '.join(PRECISIONS)}"))
    for key, value, values in refused:
        if getattr(allowed, key) == value:
            raise PlanError(f"--{key} is {value!r}, which only applies to models by layers; for a script use {values}")
    return allowed


def plan_of(found: Candidate, cluster: Cluster) -> Plan:
    """The executable plan of a search's answer: the one that was simulated, with its parts of a micro-batch."""
    if found.plan is not None:
        return found.plan
    assert found.profile is not None, "stages are given in layers"
    return with_slices(found, found.profile, cluster, ALGORITHM)


def explain(
    path: Optional[str] = typer.Argument(None, metavar="PLAN", help="a plan file"),
    script: Optional[str] = typer.Option(
        None, "--program", metavar="SCRIPT",
        help="print the Program instead: the calls into which the plan turns this script's training step; without PLAN, use the "
             "plan that the script asks for by its annotations and wh.init"),
    cluster: Optional[str] = typer.Option(
        None, help="show this cluster's device names instead of numbers: a built-in name, a JSON file, or a short form such as "
                   "cpu:4; without PLAN, also plan for it instead of the script's own cluster"),
    most: int = typer.Option(40, min=0, help="number of calls of a Program to print; 0: all"),
    lowered: bool = typer.Option(
        False, "--lowered", help="show the primitive ops of each bridge, sum, merge and message of the Program, too"),
    picture: Optional[str] = typer.Option(None, metavar="FILE", help="also draw the Program: a .png or .svg file"),
) -> None:
    """Show a plan's TaskGraphs, devices, bridges and collectives, and the search's estimate; or a training step, call by call."""
    if path is None and script is None:
        raise typer.BadParameter("give a plan file, --program SCRIPT, or both")
    if lowered and script is None:
        raise typer.BadParameter("--lowered shows what a Program is made of; add --program SCRIPT")
    if picture is not None and (script is None or not picture.endswith((".png", ".svg"))):
        raise typer.BadParameter(f"--picture draws a Program (--program SCRIPT) into a .png or .svg file, got {picture!r}")
    with reported():
        loaded = None if path is None else Plan.parse(path)
        machines = None if cluster is None else Cluster.parse(cluster)
        if loaded is not None and machines is not None:
            check_plan(loaded, machines, loaded.processes)
        names = [] if machines is None else [f"{device.kind}:{device.number}" for device in machines.devices] + ["host"]
        if script is not None:
            check_exists(script)
            from whale_tf.measure.scripts import script_program  # TensorFlow takes seconds to load

            found = script_program(script, loaded, machines)
            typer.echo(_first_calls(found, names, most, lowered))
            if picture is not None:
                from whale_tf.viz.program import program_figure  # as does matplotlib
                from whale_tf.viz.timeline import save

                save(program_figure(found.program, names), picture)
        elif loaded is not None:
            typer.echo(explain_plan(loaded, None, names or [str(device) for device in range(loaded.num_devices)]))


def _first_calls(step: Lowering, names: Sequence[str], most: int, is_lowered: bool) -> str:
    """A Program as text: its bodies and at most ``most`` calls; 0 means all."""
    lines = (lowered_text(step, names) if is_lowered else step.program.to_text(names)).splitlines()
    hidden = len(step.program.calls) - most
    if most and hidden > 0:
        end = next(number for number, line in enumerate(lines) if line.startswith(f"#{most} "))
        lines[end:] = [f"... and {hidden} more; --most 0 shows all calls"]
    return "\n".join(lines)


def diff(a: str = typer.Argument(..., help="a plan file"), b: str = typer.Argument(..., help="another plan file"),
         as_json: bool = typer.Option(False, "--json", help="print one JSON object: place -> [a, b]")) -> None:
    """Show where two plans differ.  The exit status is 1 if they do."""
    with reported(2):
        first, second = Plan.parse(a), Plan.parse(b)
    places = differences(plain(first), plain(second))
    if as_json:
        typer.echo(json.dumps(places))
    elif not places:
        typer.echo("the plans are equal")
    else:
        table = Table("place", a, b)
        for place, (left, right) in places.items():
            table.add_row(place, _short(left), _short(right))
        console().print(table)
    raise typer.Exit(1 if places else 0)


def differences(a: Any, b: Any, place: str = "") -> Dict[str, List[Any]]:
    """``{"task_graphs[1].devices": [left, right]}``; a part that only one side has is None on the other."""
    if isinstance(a, dict) and isinstance(b, dict):
        found: Dict[str, List[Any]] = {}
        for key in list(a) + [key for key in b if key not in a]:
            found.update(differences(a.get(key), b.get(key), f"{place}.{key}" if place else key))
        return found
    if isinstance(a, list) and isinstance(b, list) and any(isinstance(item, dict) for item in a + b):
        found = {}
        for index in range(max(len(a), len(b))):
            left, right = (side[index] if index < len(side) else None for side in (a, b))
            found.update(differences(left, right, f"{place}[{index}]"))
        return found
    return {} if a == b else {place: [a, b]}


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _list(as_json: bool) -> None:
    names = {"models": list(model_names()), "clusters": list(BUILTIN), "searches": [*METHODS, *ON_GRAPHS]}
    if as_json:
        typer.echo(json.dumps(names))
        return
    out = console()
    models = Table(Column("model", no_wrap=True), Column("layers", justify="right"), Column("parameters", justify="right"),
                   "batch", "source")
    for name in names["models"]:
        if name not in builtin_names():
            models.add_row(name, "no plans", f"{built_in_model(name, 1).parameter_count / 1e6:,.0f}M", "",
                           MODELS[name].source)
            continue
        profile = load_builtin(name)
        itemsize = 2 if profile.precision in ("fp16", "bf16") else 4
        models.add_row(name, str(len(profile.layers)), f"{profile.parameter_bytes / itemsize / 1e6:,.0f}M",
                       str(profile.batch_granularity), profile.source)
    clusters = Table(Column("cluster", no_wrap=True), "source")
    for name, row in BUILTIN.items():
        clusters.add_row(name, row.source)
    searches = Table(Column("search", no_wrap=True), "what it does")
    for name, summary in [*((name, one.summary) for name, one in METHODS.items()), *ON_GRAPHS.items()]:
        searches.add_row(name, summary)
    for table in (models, clusters, searches):
        out.print(table)


def _show(found: Candidate, cluster: Cluster) -> None:
    out = console()
    out.print(f"[bold]{found.model}[/bold] on {found.cluster} with a batch of {found.global_batch}: {found.told}")
    if found.profile is not None:
        out.print(_stages(found, found.profile))
    elif found.plan is not None:
        out.print(patterns_table(found.plan.shards))
    for row in picture(found, cluster):
        out.print(row)
    out.print(", ".join(_facts(found)))
    if found.host:
        out.print("bottleneck: " + found.host)
    for line in found.without:
        out.print(line)
    for place, text in enumerate((found.told, *found.runners_up), 1):
        out.print(f"{place}. {text}", markup=False, highlight=False)
    for line in _accuracy(found, cluster).lines(found.global_batch / found.latency_s):
        out.print(line)


def _accuracy(found: Candidate, cluster: Cluster) -> Accuracy:
    precision = "fp32" if found.profile is None else found.profile.precision
    return accuracy(default_laws(), found.times or LAYERS, [device.type for device in cluster.devices], precision)


def _stages(found: Candidate, profile: ModelProfile) -> Table:
    table = Table("stage", Column("layers", max_width=22), Column("devices", max_width=11), "warm-up", "parameters", "peak")
    for number, stage in enumerate(found.stages):
        layers = profile.layers[stage.first_layer:stage.last_layer + 1]
        size = profile.stage_parameter_bytes(stage.first_layer, stage.last_layer + 1)
        table.add_row(
            str(number), f"{stage.first_layer}-{stage.last_layer} ({layers[0].name} to {layers[-1].name})",
            _ranges(stage.all_devices), str(stage.warmup), memory_text(size),
            memory_text(max(found.peak_memory_bytes[device] for device in stage.all_devices)))
    return table


def _facts(found: Candidate) -> List[str]:
    facts = ["{} micro-batch{}".format(found.micro_batches, "es" if found.micro_batches > 1 else "")]
    if found.model_replicas > 1:
        facts.append(f"{found.model_replicas} model replicas")
    return facts + found.measures.described() + [
        f"at most {memory_text(max(found.peak_memory_bytes))} on a device",
        *([PRICED[found.times]] if found.times else []),
        f"searched in {found.search_seconds:.2f} s"]


def picture(found: Candidate, cluster: Cluster) -> List[Text]:
    """One line per node with the stages on each device: ``node 0  0 0 0 0 1 1 1 1``, ``node 0  0+2 1+3``."""
    stages_of: Dict[int, List[int]] = {}
    for number, stage in enumerate(found.stages):
        for device in stage.all_devices:
            stages_of.setdefault(device, []).append(number)
    labels = {device: "+".join(map(str, numbers)) for device, numbers in stages_of.items()}
    width = max([1] + [len(label) for label in labels.values()])
    lines = []
    for node, devices in enumerate(cluster.nodes):
        line = Text(f"node {node:<3d}")
        for device in devices:
            numbers = stages_of.get(device)
            line.append(" " + labels.get(device, ".").rjust(width), style=COLOURS[numbers[0] % len(COLOURS)] if numbers else "")
        lines.append(line)
    return lines


def _ranges(numbers: Any) -> str:
    """``0-7, 12``."""
    runs: List[List[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
