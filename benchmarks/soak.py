"""Two processes of two devices train for a while and save every minute: memory and open files, which must not grow.

    python -m benchmarks.soak [MINUTES]      # 30 by default

Printed: the slope of each process' memory (least squares over the second half of the run), and its open files.  `whale run`
starts them; SIGTERM ends them, with a last checkpoint.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from typing import Dict, List, NamedTuple, Tuple

import numpy as np
from rich.console import Console

from benchmarks.measure import ROOT, machine, session_config, table
from benchmarks.workloads import LEARNING_RATE, head_loss, mlp, variables

MEBI = 2.0 ** 20
EVERY_S = 5.0  # between two looks at a process
SAVE_S = 60


class Look(NamedTuple):
    """A process at one time: ``memory`` is resident, in bytes."""

    time_s: float
    memory: int
    files: int


def train(directory: str) -> None:
    """One of the processes; it trains until it is stopped."""
    import tensorflow.compat.v1 as tf

    import whale_tf as wh

    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    wh.init()
    workload = mlp(width=128, batch=32)
    examples, labels = workload.data(4096, 0)
    dataset = tf.data.Dataset.from_tensor_slices((examples, labels)).shuffle(4096, seed=1).repeat()
    x, y = tf.data.make_one_shot_iterator(dataset.batch(workload.batch, drop_remainder=True)).get_next()
    parameters = variables(workload)
    with wh.replicate():
        for stage in workload.stages:
            x = stage(x, parameters)
        loss = head_loss(x, y)
    step = tf.train.get_or_create_global_step()
    update = tf.train.MomentumOptimizer(LEARNING_RATE, 0.9).minimize(loss, global_step=step)
    print("process", os.getpid(), flush=True)
    with tf.train.MonitoredTrainingSession(checkpoint_dir=directory, save_checkpoint_secs=SAVE_S, save_summaries_steps=None,
                                           save_summaries_secs=None, log_step_count_steps=None,
                                           config=session_config(2)) as session:
        while True:
            session.run([loss, update])


def looked_at(pid: int, since: float) -> Look:
    with open(f"/proc/{pid}/statm") as handle:
        pages = int(handle.read().split()[1])
    return Look(time.monotonic() - since, pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd")))


def slope(looks: List[Look]) -> float:
    """Bytes per minute over the second half."""
    half = looks[len(looks) // 2:]
    return float(np.polyfit([look.time_s / 60 for look in half], [look.memory for look in half], 1)[0])


def watched(minutes: float) -> Tuple[Dict[int, List[Look]], str]:
    """Looks at each process of the run, by its number, and what the run printed.

    Raises:
        RuntimeError: it ended by itself.
    """
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", PYTHONPATH=ROOT)
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-m", "whale_tf.cli", "run", "--workers", "2", "--devices-per-worker", "2", "-m",
                   "benchmarks.soak", "--train", directory]
        run = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        since, found = time.monotonic(), {}  # type: float, Dict[int, List[Look]]
        try:
            while run.poll() is None and time.monotonic() - since < 60 * minutes:
                time.sleep(EVERY_S)
                output.seek(0)
                for rank, pid in re.findall(r"\[(\d)\] process (\d+)\n", output.read()):
                    if os.path.exists(f"/proc/{pid}/statm"):
                        found.setdefault(int(rank), []).append(looked_at(int(pid), since))
        finally:
            ended = run.poll() is not None
            run.terminate()
            run.wait()
        output.seek(0)
        printed = output.read()
        if ended:
            raise RuntimeError(f"the run has ended:\n{printed[-9000:]}")
        return found, printed


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2])
        return
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    console = Console(width=120)
    console.print(f"soak.py: {machine()}", highlight=False)
    found, output = watched(minutes)
    rows = [[str(rank), f"{looks[len(looks) // 2].memory / MEBI:.0f}", f"{looks[-2].memory / MEBI:.0f}",
             f"{slope(looks[:-1]) / MEBI:+.2f}", str(looks[len(looks) // 2].files), str(looks[-2].files)]
            for rank, looks in sorted(found.items())]
    console.print(table(f"{minutes:g} minutes, a checkpoint every {SAVE_S} s", [
        "process", "MiB at half time", "MiB at the end", "MiB a minute (second half)", "files at half time", "at the end"], rows))
    console.print("\n".join(line for line in output.splitlines() if "SIGTERM" in line), highlight=False)


if __name__ == "__main__":
    main()
