"""The main job at a glance: one script trained locally and under a hybrid plan, the losses side by side.

    make demo

The script is a BERT-style encoder on the text of Python's standard library. The plan is a pipeline of two stages with
four micro-batches, and data parallelism of degree two around it: four devices. Each of the two runs has a process of
its own, because TensorFlow fixes its thread pool with the first Session.
"""
from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from typing import Any, Deque, Dict, Iterator, List

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

STEPS = 40
BATCH = 32
CLUSTER = "cpu:4"
TOLERANCE = 1e-4  # relative, of float32 losses after 40 steps of Adam


# -- the script that is trained, in a process of its own ---------------------------------------------------------------


def build(annotate: bool) -> Any:
    """The whole model; what ``annotate`` adds is what whale_tf needs of a user."""
    import tensorflow.compat.v1 as tf

    import whale_tf as wh
    from models import bert

    def stage() -> Any:
        return wh.replicate(1) if annotate else contextlib.nullcontext()

    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    if annotate:
        wh.init(wh.Config({"num_micro_batch": 4, "io.nested_batch": "divide"}), cluster=CLUSTER)
    config = bert.BertConfig(layers=4, hidden=64, heads=4, ffn=128, seq=32, predictions=4)
    inputs = bert.inputs(config, batch_size=BATCH)
    with stage():
        x, table = bert.embed(inputs.tokens, config, inputs.segments)
        for i in (0, 1):
            x = bert.encoder_layer(x, config, name=f"layer_{i}")
    with stage():
        for i in (2, 3):
            x = bert.encoder_layer(x, config, name=f"layer_{i}")
        loss = bert.mlm_loss(bert.mlm_head(x, inputs.positions, table, config), inputs)
    return config, inputs, loss, tf.train.AdamOptimizer(1e-3, epsilon=1e-6).minimize(loss)


def train(annotate: bool) -> None:
    """Trains and prints one JSON line per step, and the plan's explanation as the last one."""
    import tensorflow.compat.v1 as tf

    import whale_tf as wh
    from models import data

    config, inputs, loss, train_op = build(annotate)
    batches = data.batches(data.masked_lm_examples(2048, config.seq, config.predictions), BATCH)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for batch in itertools.islice(batches, STEPS):
            feed = {tensor: array for tensor, array in zip(inputs, batch) if tensor.consumers()}
            start = time.perf_counter()
            value = session.run([loss, train_op], feed)[0]
            print(json.dumps({"loss": float(value), "seconds": time.perf_counter() - start}), flush=True)
    print(json.dumps({"explain": str(wh.explain()) if annotate else ""}), flush=True)


# -- the show ----------------------------------------------------------------------------------------------------------


def messages(mode: str) -> Iterator[Dict[str, Any]]:
    """What the process that trains in ``mode`` prints, line by line.

    Raises:
        RuntimeError: it failed; with the end of what else it wrote.
    """
    command = [sys.executable, os.path.abspath(__file__), "--run", mode]
    other: Deque[str] = collections.deque(maxlen=40)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          universal_newlines=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
            else:
                other.append(line)
    if process.returncode:
        raise RuntimeError("the {} run failed:\n{}".format(mode, "".join(other)))


def show() -> int:
    """Runs both and prints the comparison; 0 if the losses agree."""
    console = Console()
    columns = (TextColumn("{task.description:10}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
               TextColumn("{task.fields[loss]}"), TimeElapsedColumn())
    runs: Dict[str, List[Dict[str, Any]]] = {"local": [], "parallel": []}
    explanation = ""
    console.print(f"A 4-layer encoder on Python's own source text, {STEPS} steps of {BATCH} examples.")
    with Progress(*columns, console=console) as progress:
        for mode, records in runs.items():
            task = progress.add_task(mode, total=STEPS, loss="")
            for message in messages(mode):
                if "explain" in message:
                    explanation = message["explain"] or explanation
                    continue
                records.append(message)
                progress.update(task, advance=1, loss="loss {:.4f}".format(message["loss"]))
    console.print(explanation, markup=False, highlight=False, soft_wrap=True)
    worst = compare(console, runs)
    seconds = {mode: sorted(r["seconds"] for r in records[1:])[len(records) // 2] for mode, records in runs.items()}
    console.print("step time (median): local {local:.1f} ms on one device, parallel {parallel:.1f} ms on four logical "
                  "devices of this machine's {cores} cores".format(
                      local=1e3 * seconds["local"], parallel=1e3 * seconds["parallel"], cores=os.cpu_count()))
    picture = draw(runs)
    console.print(f"picture of both loss curves: {picture}", soft_wrap=True)
    if worst > TOLERANCE:
        console.print(f"the losses differ by {worst:.1e}, more than {TOLERANCE:.0e}")
        return 1
    python = os.path.relpath(sys.executable, ROOT) if sys.executable.startswith(ROOT + os.sep) else sys.executable
    for line in (f"Shown: one script trained on one device, and as two pipelines of two stages; the losses agree to {worst:.1e}",
                 f"Next: {python} examples/pipeline.py   (a script with the lines that divide it)"):
        console.print(line, highlight=False, soft_wrap=True)
    return 0


def compare(console: Console, runs: Dict[str, List[Dict[str, Any]]]) -> float:
    """Prints some of the losses side by side; returns the largest relative difference of all."""
    table = Table("step", "local loss", "parallel loss", "relative difference")
    differences = []
    for step, (local, parallel) in enumerate(zip(runs["local"], runs["parallel"]), 1):
        differences.append(abs(local["loss"] - parallel["loss"]) / abs(local["loss"]))
        if step == 1 or step % 5 == 0:
            table.add_row(str(step), "{:.6f}".format(local["loss"]), "{:.6f}".format(parallel["loss"]),
                          f"{differences[-1]:.1e}")
    console.print(table)
    return max(differences)


def draw(runs: Dict[str, List[Dict[str, Any]]]) -> str:
    """Both loss curves as a PNG; returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path = os.path.join(ROOT, "out", "demo_losses.png")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (mode, records), style in zip(runs.items(), ("-", "o")):
        axes.plot(range(1, len(records) + 1), [r["loss"] for r in records], style, markersize=4, fillstyle="none",
                  label=mode)
    axes.set_xlabel("step")
    axes.set_ylabel("masked language model loss")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", choices=["local", "parallel"], help="train in this process, printing JSON lines")
    mode = parser.parse_args().run
    if mode:
        train(annotate=mode == "parallel")
    else:
        sys.exit(show())
