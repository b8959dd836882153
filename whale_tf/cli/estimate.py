"""``whale estimate``."""

from __future__ import annotations

import json
import os
from typing import Dict, Iterable, List, NamedTuple, Optional

import typer
from rich.table import Table

from whale_tf.cli.common import check_exists, check_sizes, console, reported
from whale_tf.cluster import DEVICE_TYPES
from whale_tf.documents import json_object
from whale_tf.errors import PlanError, did_you_mean, memory_text, seconds_text
from whale_tf.plan import PRECISIONS as TYPES
from whale_tf.planner.estimate import Estimated, Estimator, cluster_of
from whale_tf.planner.measures import ARITHMETIC, OWN
from whale_tf.simulator import Execution, Source, built_in_model, with_seq
from whale_tf.simulator.laws import default_laws

DAY_S = 86400.0


class Work(NamedTuple):
    """A whole training: ``examples`` in all (None: nobody asked), and dollars for an hour of a device, by its type."""

    examples: Optional[float]
    prices: Dict[str, float]

    def days(self, found: Estimated) -> Optional[float]:
        return None if self.examples is None or not found.fits else self.examples / found.step.samples_per_s / DAY_S

    def dollars(self, found: Estimated, count: int) -> Optional[float]:
        days, price = self.days(found), self.prices.get(found.device)
        return None if days is None or price is None else days * 24 * count * price


def estimate(
    model: str = typer.Argument(..., help="a built-in model (whale plan --list), or a training script (.py)"),
    devices: Optional[str] = typer.Option(None, help="kinds of devices, e.g. V100-32GB,A100-80GB; default: all known GPUs"),
    count: int = typer.Option(1, min=1, max=4096, help="number of devices, in nodes of eight; they divide the batch"),
    global_batch: Optional[int] = typer.Option(None, help="examples in a step; default: the largest that fits"),
    precision: str = typer.Option(OWN, help="own (the model's), float32, float16, bfloat16"),
    xla: bool = typer.Option(False, help="let XLA fuse the ops"),
    seq: Optional[int] = typer.Option(None, help="tokens of an example, for built-in transformers"),
    examples: Optional[float] = typer.Option(None, min=1, help="examples of the data set"),
    epochs: float = typer.Option(1.0, min=0, help="with --examples: how often training reads them"),
    tokens: Optional[float] = typer.Option(None, min=1, help="instead of --examples: tokens to train on, for transformers"),
    prices: Optional[str] = typer.Option(None, help="JSON file: {\"A100-80GB\": dollars for an hour of one device, ...}"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object a kind of device"),
) -> None:
    """Say what training a model takes on each kind of device: does it fit, how large a batch, how long, how much."""
    with reported():
        names = _kinds(devices)
        if global_batch is not None:
            check_sizes(global_batch)
        work = Work(_examples(with_seq(model, seq), examples, epochs, tokens), _prices(prices))
        if precision not in (OWN, *TYPES):
            raise PlanError(f"--precision is {precision!r}, expected {', '.join((OWN, *TYPES))}")
        if xla and any(DEVICE_TYPES[name].kind != "GPU" for name in names):
            raise PlanError("--xla applies to kernels of GPUs, but --devices has CPUs; leave one of them out")
        arithmetic, laws = ARITHMETIC.get(precision), default_laws()
        executions = [Execution(arithmetic, xla, laws, cluster_of(name, count)) for name in names]
        found: List[Estimated] = []
        estimator, script = Estimator(), _script(model, global_batch, executions[0])
        with console().status("estimating"):
            for execution in executions:
                source = script._replace(execution=execution) if script else Source.of_model(with_seq(model, seq), execution)
                found.append(estimator.estimated(source, global_batch))
    if as_json:
        for one in found:
            typer.echo(json.dumps(_plain(one, work, count)))
        return
    _show(model, found, work, count)


def _kinds(devices: Optional[str]) -> List[str]:
    known = [name for name, row in DEVICE_TYPES.items() if row.kind == "GPU"]
    asked = known if devices is None else [name.strip() for name in devices.split(",")]
    _check_known(asked, "--devices")
    return asked


def _check_known(names: Iterable[str], where: str) -> None:
    for name in names:
        if name not in DEVICE_TYPES:
            raise PlanError("{} has {!r}, known kinds are {}.{}".format(
                where, name, ", ".join(DEVICE_TYPES), did_you_mean(name, DEVICE_TYPES)))


def _script(model: str, global_batch: Optional[int], execution: Execution) -> Optional[Source]:
    """A script's layers, for which it runs once; None: the model is a built-in one."""
    if not model.endswith(".py"):
        return None
    check_exists(model)
    from whale_tf.measure.scripts import profile_model  # TensorFlow takes seconds to load

    name = os.path.splitext(os.path.basename(model))[0]
    profile = profile_model(model, [], global_batch or 1, name).profile
    return Source(name, profile, execution)


def _examples(model: str, examples: Optional[float], epochs: float, tokens: Optional[float]) -> Optional[float]:
    """Examples of a whole training."""
    if examples is not None and tokens is not None:
        raise PlanError("--examples and --tokens both say how long training is; keep one")
    if tokens is None:
        return None if examples is None else examples * epochs
    if model.endswith(".py"):
        raise PlanError(f"--tokens is given, but how many an example of {model!r} has is not known; use --examples")
    length = {op.kind: op.dims.get("s") for op in built_in_model(model, 1).ops[:1]}.get("embedding")
    if length is None:
        raise PlanError(f"--tokens is given, but the examples of {model!r} are no sequences of tokens; use --examples")
    return tokens / length


def _prices(path: Optional[str]) -> Dict[str, float]:
    if path is None:
        return {}
    found = json_object(path, "price list", PlanError, 'write {"A100-80GB": 2.5} (dollars for an hour of one device)')
    _check_known(found, f"price list file {path!r}")
    for name, price in found.items():
        if isinstance(price, bool) or not isinstance(price, (int, float)) or not price >= 0:
            raise PlanError(f"price list file {path!r}: {name} costs {price!r:.40}, expected dollars for an hour, at least 0")
    return found


def _plain(one: Estimated, work: Work, count: int) -> Dict[str, object]:
    return {"device": one.device, "count": count, "fits": one.fits, "measures": one.measures.described(),
            "global_batch": one.batch, "largest_batch": one.largest, "step_time_s": one.step.step_time_s,
            "samples_per_s": one.step.samples_per_s, "peak_memory_bytes": max(one.step.peak_memory_bytes),
            "days": work.days(one), "dollars": work.dollars(one, count)}


def _show(model: str, found: List[Estimated], work: Work, count: int) -> None:
    table = Table("device", "fits", "largest", "step", "samples/s", *(["peak"] if work.examples is None else ["days"]),
                  *(["dollars"] if work.prices and work.examples is not None else []),
                  title=f"{model} on {count} device{'s' * (count > 1)} of each kind")
    for one in found:
        measures = ", ".join(one.measures.described())
        row = [one.device, (measures or "yes") if one.fits else "no", f"{one.largest:,}" if one.fits else "-",
               seconds_text(one.step.step_time_s) if one.fits else "-", f"{one.step.samples_per_s:.4g}" if one.fits else "-"]
        days, dollars = work.days(one), work.dollars(one, count)
        row += [memory_text(max(one.step.peak_memory_bytes)) if work.examples is None else "-" if days is None else f"{days:.3g}"]
        row += ["-" if dollars is None else f"{dollars:,.0f}"] if work.prices and work.examples is not None else []
        table.add_row(*row)
    console().print(table)
