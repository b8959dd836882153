"""``whale check``."""
from __future__ import annotations

import json
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import typer
from rich.table import Table

from whale_tf.cli.common import check_exists, console, limited, reported
from whale_tf.cluster import Cluster
from whale_tf.errors import memory_text, seconds_text

FINE, WRONG, NOTE = "ok", "WRONG", "note"
MOST_ROWS, MOST_NAMES = 8, 3  # of ops without a kernel, and of their names
WORDS = {"input": "the mini-batch", "argument": "arguments and results that kernels keep on the host",
         "host op": "ops that are on the host on purpose", "no kernel": "ops without a kernel for GPUs"}


class Finding(NamedTuple):
    """A row of the table."""

    what: str
    verdict: str
    found: str
    fix: str = ""


def check(
    script: str = typer.Argument(..., help="a training script (.py) that calls wh.init()"),
    arguments: Optional[List[str]] = typer.Argument(None, help="the script's own arguments (after --)"),
    cluster: str = typer.Option(..., help="where it will run: cluster.json, a name or a short form such as 2xV100-32GB:8"),
    memory_limit: Optional[float] = typer.Option(None, min=0.001, help="GiB of each device that a step may use"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> None:
    """Say before a script is queued whether its step will run on the GPUs of a cluster, and how.

    The script runs here, without these GPUs, up to its first divided training step, which is not made. The answer says which ops
    TensorFlow has no GPU kernel for, what goes between host and GPUs in each step, whether it fits, and whether it computes what
    the local step computes. The exit status is 0 if all is fine, 1 if something is wrong, 2 if it could not be checked.
    """
    with reported(2):
        machines = limited(Cluster.parse(cluster), memory_limit)
        check_exists(script)
        from whale_tf.measure.check import check_model  # TensorFlow takes seconds to load; only this command needs it

        done = check_model(script, arguments or [], machines)
    rows = findings(done)
    if as_json:
        typer.echo(json.dumps(_as_dict(done, rows)))
    else:
        table = Table("check", "", "found", "what to do", title=f"{script} on {machines.name}: {done.where}")
        for row in rows:
            table.add_row(*row)
        console().print(table)
    if not done.is_fine:
        raise typer.Exit(1)


def findings(done: Any) -> List[Finding]:
    """The rows of the table; ``done``: a :class:`whale_tf.measure.check.Checked`."""
    return _kernels(done) + _crossings(done) + _memory(done) + _numbers(done)


def _kernels(done: Any) -> List[Finding]:
    if not done.ops:
        return [Finding("kernels", NOTE, f"{done.cluster.name} has no GPUs")]
    count = sum(bool(one.why_host) for one in done.placed)
    if not count:
        return [Finding("kernels", FINE, f"all {done.on_gpus:,} ops on GPUs have kernels in TensorFlow {done.version}")]
    rows = []
    for row in done.lacking[:MOST_ROWS]:
        names = ", ".join(done.ops[number].name for number in row.ops[:MOST_NAMES])
        more = f" and {len(row.ops) - MOST_NAMES} more" * (len(row.ops) > MOST_NAMES)
        beside = f", and with them {len(row.beside):,} other ops of their variables" * bool(row.beside)
        sizes = f"{_size(row.to_host, row.is_open)} to the host and {_size(row.to_gpu, row.is_open)} back in each step"
        fix = "nothing, if it only prints or counts"
        if row.comes_back:
            fix = ("use another optimizer or op for these variables" if row.beside else
                   f"use another op or type instead of {row.type}, or keep it in the input pipeline")
        rows.append(Finding("kernels", WRONG if row.comes_back else NOTE,
                            f"{row.why}: {len(row.ops):,} run on the host ({names}{more}){beside}, {sizes}", fix))
    others = len(done.lacking) - MOST_ROWS
    if others > 0:
        rows.append(Finding("kernels", NOTE, f"{others} more types of ops run on the host; --json lists them"))
    moving = {number for row in done.lacking for number in row.ops + row.beside}
    still = count - len(moving)
    if still:
        rows.append(Finding("kernels", NOTE, f"{still:,} ops have no kernel for GPUs, and exchange nothing with one"))
    return rows


def _crossings(done: Any) -> List[Finding]:
    rows = []
    for why, words in WORDS.items():
        if why == "no kernel":  # said with the kernels
            continue
        for to_host in (False, True):
            found = [one for one in done.crossings if one.why == why and one.to_host == to_host]
            if not found:
                continue
            is_open = any(one.bytes is None for one in found)
            largest = max(found, key=lambda one: one.bytes or 0.0)
            size = _size(sum(one.bytes or 0.0 for one in found), is_open)
            text = f"{words}: {len(found):,} tensors, {size} in each step, the largest of {done.ops[largest.op].name}"
            rows.append(Finding("to the host" if to_host else "to GPUs", FINE if why == "input" else NOTE, text))
    return rows


def _memory(done: Any) -> List[Finding]:
    if done.unknown:
        return [Finding("memory", NOTE, f"the step cannot be simulated: {done.unknown}")]
    pairs = list(zip(done.peaks, done.cluster.devices))
    peak, device = max(pairs, key=lambda pair: pair[0] / pair[1].usable_bytes)
    text = (f"device {device.index} ({device.type}) holds at most {memory_text(peak)} of {memory_text(device.usable_bytes)} that "
            f"a step can use, at {done.examples:,} examples; {sum(one > other.usable_bytes for one, other in pairs)} of "
            f"{len(pairs)} devices have too little")
    fix = "" if done.fits else "more micro-batches, recompute, zero, or a smaller mini-batch (docs/config.md)"
    return [Finding("memory", FINE if done.fits else WRONG, text, fix),
            Finding("time", NOTE, f"a step takes about {seconds_text(done.seconds)} by the ops' sizes, without the host's part")]


def _numbers(done: Any) -> List[Finding]:
    if done.failure:
        return [Finding("numbers", WRONG, f"the step cannot be compared: {done.failure}", "whale verify shows the whole error")]
    from whale_tf.runtime.verifying.compare import summary

    found, missing = done.comparison
    if done.differing:
        return [Finding("numbers", WRONG, f"{done.differing} of {len(found)} values differ from the local step",
                        "whale verify lists them")]
    text = summary(found, {}, 0.0, done.where).partition("; this delayed")[0].partition(": ")[2]
    return [Finding("numbers", FINE, text + (f"; {len(missing)} not compared" if missing else ""))]


def _names(done: Any, numbers: Sequence[int]) -> List[str]:
    return [done.ops[number].name for number in numbers]


def _size(size_bytes: float, is_open: bool = False) -> str:
    return ("at least " if is_open else "") + memory_text(size_bytes)


def _as_dict(done: Any, rows: List[Finding]) -> Dict[str, Any]:
    return {
        "where": done.where, "cluster": done.cluster.name, "fine": done.is_fine, "tensorflow": done.version,
        "findings": [row._asdict() for row in rows],
        "ops_on_gpus": done.on_gpus,
        "lacking": [dict(row._asdict(), ops=_names(done, row.ops), beside=_names(done, row.beside)) for row in done.lacking],
        "crossings": [dict(one._asdict(), op=done.ops[one.op].name, reader=done.ops[one.reader].name) for one in done.crossings],
        "examples": done.examples, "step_time_s": done.seconds, "peak_memory_bytes": list(done.peaks),
        "usable_bytes": [device.usable_bytes for device in done.cluster.devices], "differing": done.differing,
        "plan": json.loads(done.plan.to_json()),
    }
