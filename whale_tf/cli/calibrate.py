"""``whale calibrate``."""

from __future__ import annotations

import os
from typing import Optional

import typer
from rich.table import Table

from whale_tf.cli.common import console, reported
from whale_tf.documents import check_files
from whale_tf.simulator import Calibration


def calibrate(
    output: Optional[str] = typer.Option(None, "--output", "-o", help="write the calibration to this file"),
    device: str = typer.Option("CPU", help="device type of this machine to measure, a name in the hardware table"),
    inter_op: int = typer.Option(os.cpu_count() or 1, min=1, help="ops that run at once; use the training session's setting"),
    intra_op: int = typer.Option(1, min=1, help="threads of one op; use the training session's setting"),
    repeat: int = typer.Option(50, min=1, help="runs of each measurement; their median counts"),
    processes: bool = typer.Option(True, help="also measure collectives between two processes"),
    as_json: bool = typer.Option(False, "--json", help="print the calibration as JSON"),
) -> None:
    """Measure this machine for `whale simulate --calibration`: op times, overlap, and the cost of communication."""
    with reported():
        check_files({"--output": output}, {})

        from whale_tf._tf_compat import v1  # TensorFlow takes seconds to load; only this command needs it
        from whale_tf.measure.machine import Threads
        from whale_tf.measure.machine import calibrate as measure

        v1.disable_eager_execution()
        found = measure(device, Threads(inter_op, intra_op), repeat, processes)
        if output is not None:
            with open(output, "w", encoding="utf8") as handle:
                handle.write(found.to_json())
    if as_json:
        typer.echo(found.to_json())
    else:
        _show(found)


def _show(found: Calibration) -> None:
    table = Table("what", "measured", title=f"{found.device}: {found.source}", title_justify="left")
    for what, points, unit in (("matrix product", found.arithmetic, "GFLOP/s"), ("addition", found.memory, "GB/s")):
        for work, seconds in points:
            size = f"{work / 1e6:.3g} MFLOP" if unit == "GFLOP/s" else f"{work / 1e6:.3g} MB"
            table.add_row(f"{what} of {size}", f"{seconds * 1e6:.2f} us, {work / seconds / 1e9:.1f} {unit}")
    table.add_row("an op without its kernel", f"{found.launch_s * 1e6:.2f} us")
    table.add_row("a run without its ops", f"{found.step_s * 1e6:.1f} us")
    for waited, seconds in found.wake:
        table.add_row(f"first op after waiting for {waited * 1e6:.0f} us", f"{seconds * 1e6:.1f} us more")
    for read, seconds in found.far:
        table.add_row(f"{read / 1e6:.3g} MB from another core", f"{seconds * 1e6:.1f} us more")
    for name, factor in found.slow_down.items():
        table.add_row("slow-down, " + name.replace("-", " beside "), f"{factor:.2f}")
    for name, link in found.communicators.items():
        rate = link.bandwidth_bytes_per_s / 1e9
        table.add_row("communicator " + name, f"{link.alpha_s * 1e6:.1f} us, {rate:.3g} GB/s")
    console().print(table)
