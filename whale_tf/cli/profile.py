"""``whale profile``."""

from __future__ import annotations

import os
from typing import List, Optional

import typer
from rich.table import Table

from whale_tf.cli.common import console, reported
from whale_tf.documents import check_files
from whale_tf.errors import PlanError
from whale_tf.profiler.graph_profile import with_earlier_measurements
from whale_tf.profiler.model_profile import ModelProfile
from whale_tf.simulator import StepGraph


def profile(
    model: str = typer.Argument(..., help="a training script (.py), a frozen model (.pb), or a MetaGraph (.meta)"),
    arguments: Optional[List[str]] = typer.Argument(None, help="the script's own arguments (after --)"),
    output: Optional[str] = typer.Option(None, "--output", "-o", help="write the profile to this file"),
    batch_size: int = typer.Option(32, min=1, help="examples in a mini-batch, if the graph does not say"),
    measure: Optional[str] = typer.Option(
        None, help="also run the script's first steps here, trace one, and record its op times for this device type"),
    ops: Optional[str] = typer.Option(None, help="also write the step op by op to this file, for `whale simulate --ops`"),
    name: Optional[str] = typer.Option(None, help="name of the profile; default: the file's name"),
    as_json: bool = typer.Option(False, "--json", help="print the profile as JSON"),
) -> None:
    """Count a model's FLOPs, bytes and parameters by layer.  A script runs until it has built its training graph.

    If the output file already holds a profile of the same graph, measured times of other device types are kept. Op times of
    other batch sizes in the file of --ops are kept too.
    """
    with reported():
        check_files({"--output": output, "--ops": ops}, {})

        from whale_tf.measure.scripts import profile_model  # TensorFlow takes seconds to load; only this command needs it

        name = name or os.path.splitext(os.path.basename(model))[0]
        found = profile_model(model, arguments or [], batch_size, name, measure)
        made = found.profile
        if ops is not None:
            _write_ops(found.step, ops, model)
        if output is not None and os.path.exists(output):
            made = with_earlier_measurements(made, ModelProfile.parse(output))
        if output is not None:
            with open(output, "w", encoding="utf8") as handle:
                handle.write(made.to_json())
    if as_json:
        typer.echo(made.to_json())
    else:
        _show(made)


def _write_ops(step: Optional[StepGraph], path: str, model: str) -> None:
    if step is None:
        raise PlanError(f"{model!r} has no training step, so no ops can be written to --ops {path}; give a training script")
    if os.path.exists(path):
        step = StepGraph.parse(path).and_times_of(step)
    with open(path, "w", encoding="utf8") as handle:
        handle.write(step.to_json())


def _show(made: ModelProfile) -> None:
    table = Table("layer", "forward GFLOPs", "backward", "parameters", "output", "activations", "ops")
    for layer in made.layers:
        table.add_row(
            layer.name, f"{layer.forward_flops / 1e9:.4g}", f"{(layer.backward_flops or 0.0) / 1e9:.4g}",
            f"{layer.parameter_bytes // 4:,}", f"{layer.output_bytes / 1e6:.3g} MB",
            f"{layer.activation_bytes / 1e6:.3g} MB", str(len(layer.ops)))
    forward, backward = (sum(row) / 1e9 for row in zip(*[(x.forward_flops, x.backward_flops or 0.0) for x in made.layers]))
    kept, ops = (sum(row) for row in zip(*[(layer.activation_bytes, len(layer.ops)) for layer in made.layers]))
    table.add_row(
        "all", f"{forward:.4g}", f"{backward:.4g}", f"{made.parameter_bytes // 4:,}", "",
        f"{kept / 1e6:.3g} MB", str(ops), style="bold")
    out = console()
    out.print(f"{made.name} per sample, {made.precision}, {made.source}")
    out.print(table)
