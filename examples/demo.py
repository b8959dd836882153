"""The main job at a glance: one Keras script trained locally and under a hybrid plan, the losses side by side.

    make demo

The script is a transformer on the text of Python's standard library, trained by `fit` (Keras 3: TensorFlow 2.16 and later). The
plan is a pipeline of two stages with four micro-batches, and data parallelism of degree two around it. Each run has a
process of its own, because TensorFlow fixes its devices and threads with the first op.
"""
from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import subprocess
import sys
import time
from typing import Any, Deque, Dict, Iterator, List, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

LENGTH, WIDTH = 32, 64
STEPS, BATCH = 8, 32  # of each epoch
CLUSTER = "cpu:4"
TOLERANCE = 1e-4  # relative, of float32 losses after 64 steps of Adam


class Size(NamedTuple):
    layers: int
    epochs: int


# -- the script that is trained, in a process of its own ---------------------------------------------------------------


def build(annotate: bool, layers_of_each: int) -> Any:
    """The whole model; what ``annotate`` adds is what whale_tf needs of a user."""
    import whale_tf as wh

    if annotate:
        wh.init({"num_micro_batch": 4, "verify": "first_step"}, cluster=CLUSTER)

    import keras
    from keras import layers

    from models.data import BYTE_VOCAB

    def stage() -> Any:
        return wh.replicate(1) if annotate else contextlib.nullcontext()

    def block(x: Any) -> Any:
        attended = layers.MultiHeadAttention(num_heads=4, key_dim=WIDTH // 4)(x, x, use_causal_mask=True)
        x = layers.LayerNormalization()(x + attended)
        hidden = layers.Dense(2 * WIDTH, activation="gelu")(x)
        return layers.LayerNormalization()(x + layers.Dense(WIDTH)(hidden))

    keras.utils.set_random_seed(0)
    tokens = keras.Input((LENGTH,), dtype="int32")
    with stage():
        x = layers.Embedding(BYTE_VOCAB, WIDTH)(tokens) + layers.Embedding(LENGTH, WIDTH)(keras.ops.arange(LENGTH))
        for _ in range(layers_of_each):
            x = block(x)
    with stage():
        for _ in range(layers_of_each):
            x = block(x)
        logits = layers.Dense(BYTE_VOCAB)(x)
    model = keras.Model(tokens, logits)
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def train(annotate: bool, size: Size) -> None:
    """Trains and prints a JSON line for each step and each epoch, and the plan's explanation as the last one."""
    import whale_tf as wh

    model = build(annotate, size.layers // 2)

    import keras

    from models.data import language_model_examples

    class Report(keras.callbacks.Callback):
        """Seconds of each step; losses of each epoch."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.start = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            print(json.dumps({"step": float(logs["loss"]), "seconds": time.perf_counter() - self.start}), flush=True)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            print(json.dumps({name: float(value) for name, value in logs.items()}), flush=True)

    text = language_model_examples(STEPS * BATCH + 64, LENGTH)
    model.fit(text.tokens[64:], text.labels[64:], batch_size=BATCH, epochs=size.epochs, verbose=0, callbacks=[Report()],
              validation_data=(text.tokens[:64], text.labels[:64]))
    print(json.dumps({"explain": str(wh.explain()) if annotate else ""}), flush=True)


# -- the show ----------------------------------------------------------------------------------------------------------


def messages(mode: str, size: Size) -> Iterator[Dict[str, Any]]:
    """What the process that trains in ``mode`` prints, line by line.

    Raises:
        RuntimeError: it failed; with the end of what else it wrote.
    """
    command = [sys.executable, os.path.abspath(__file__), "--run", mode,
               "--layers", str(size.layers), "--epochs", str(size.epochs)]
    other: Deque[str] = collections.deque(maxlen=40)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          universal_newlines=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
            elif "verify: " in line:
                yield {"verified": line[line.index("verify: "):].strip()}
            else:
                other.append(line)
    if process.returncode:
        raise RuntimeError("the {} run failed:\n{}".format(mode, "".join(other)))


def has_keras_3() -> bool:
    """Told without loading TensorFlow, which takes seconds."""
    try:
        from importlib import metadata

        return int(metadata.version("keras").partition(".")[0]) >= 3
    except ImportError:
        return False


def show(size: Size) -> int:
    """Runs both and prints the comparison; 0 if the losses agree."""
    console = Console()
    columns = (TextColumn("{task.description:10}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
               TextColumn("{task.fields[loss]}"), TimeElapsedColumn())
    epochs: Dict[str, List[Dict[str, float]]] = {"local": [], "parallel": []}
    seconds: Dict[str, List[float]] = {mode: [] for mode in epochs}
    explanation = verified = ""
    if not has_keras_3():
        console.print("The demo trains with Keras 3 (TensorFlow 2.16 and later); with this TensorFlow run examples/pipeline.py")
        return 1
    console.print(f"A {size.layers}-layer transformer on Python's own source text, by Keras' fit: {size.epochs} epochs of "
                  f"{STEPS} steps of {BATCH} examples.", highlight=False)
    with Progress(*columns, console=console) as progress:
        for mode, records in epochs.items():
            task = progress.add_task(mode, total=size.epochs * STEPS, loss="")
            for message in messages(mode, size):
                if "explain" in message:
                    explanation = message["explain"] or explanation
                elif "verified" in message:
                    verified = message["verified"]
                elif "step" in message:
                    seconds[mode].append(message["seconds"])
                    progress.update(task, advance=1, loss="loss {:.4f}".format(message["step"]))
                else:
                    records.append(message)
    console.print(explanation, markup=False, highlight=False, soft_wrap=True)
    console.print(verified, markup=False, highlight=False, soft_wrap=True)
    worst = compare(console, epochs)
    median = {mode: 1e3 * sorted(taken)[len(taken) // 2] for mode, taken in seconds.items()}
    console.print("step time (median): local {local:.1f} ms on one device, parallel {parallel:.1f} ms on four logical "
                  "devices of this machine's {cores} cores".format(cores=os.cpu_count(), **median))
    console.print(f"picture of both loss curves: {draw(epochs)}", soft_wrap=True)
    if worst > TOLERANCE:
        console.print(f"the losses differ by {worst:.1e}, more than {TOLERANCE:.0e}")
        return 1
    python = os.path.relpath(sys.executable, ROOT) if sys.executable.startswith(ROOT + os.sep) else sys.executable
    for line in (f"Shown: one script trained on one device, and as two pipelines of two stages; the losses agree to {worst:.1e}",
                 f"Next: {python} examples/keras_fit.py   (a script with the lines that divide it; ten more in examples/keras)"):
        console.print(line, highlight=False, soft_wrap=True)
    return 0


def compare(console: Console, epochs: Dict[str, List[Dict[str, float]]]) -> float:
    """Prints the losses of all epochs side by side; returns the largest relative difference."""
    table = Table("epoch", "local loss", "parallel loss", "local val_loss", "parallel val_loss", "relative difference")
    differences = []
    for epoch, (local, parallel) in enumerate(zip(epochs["local"], epochs["parallel"]), 1):
        differences.append(max(abs(local[name] - parallel[name]) / abs(local[name]) for name in ("loss", "val_loss")))
        table.add_row(str(epoch), *[f"{logs[name]:.6f}" for name in ("loss", "val_loss") for logs in (local, parallel)],
                      f"{differences[-1]:.1e}")
    console.print(table)
    return max(differences)


def draw(epochs: Dict[str, List[Dict[str, float]]]) -> str:
    """Both loss curves as a PNG; returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path = os.path.join(ROOT, "out", "demo_losses.png")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (mode, records), style in zip(epochs.items(), ("-", "o")):
        for name, label in (("loss", mode), ("val_loss", f"{mode}, validation")):
            axes.plot(range(1, len(records) + 1), [logs[name] for logs in records], style, fillstyle="none", label=label)
    axes.set_xlabel("epoch")
    axes.set_ylabel("cross entropy of the next byte")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", choices=["local", "parallel"], help="train in this process, printing JSON lines")
    parser.add_argument("--layers", type=int, default=4, help="of the transformer, an even number")
    parser.add_argument("--epochs", type=int, default=8)
    given = parser.parse_args()
    size = Size(given.layers, given.epochs)
    if given.run:
        train(given.run == "parallel", size)
    else:
        sys.exit(show(size))
