"""whale doctor on scripts with known faults: how often the first cause is the fault, and how close the predicted gain is.

    python -m benchmarks.doctor [--repeat 3] [--only slow_input,stage]

Each fault is put into a training script (``doctor_script.py``) on two CPU devices.  The doctor measures it and names causes.
Then the same script runs without the fault.  Predicted is the step time without the fault's own cause, also where another one was
named first; measured is that of the second run.  On a busy machine all of these scatter.
"""
from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from typing import Dict, List, NamedTuple, Optional

from rich.console import Console
from rich.table import Table

from whale_tf.diagnosis import diagnose as causes
from whale_tf.diagnosis.diagnose import Diagnosis, diagnose
from whale_tf.diagnosis.record import parse

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPT = os.path.join(ROOT, "benchmarks", "doctor_script.py")


class Fault(NamedTuple):
    """``arguments``, ``without``: of the script with and without the fault; ``workers``: processes."""

    cause: str
    arguments: List[str]
    without: List[str]
    workers: int = 1


FAULTS: Dict[str, Fault] = {
    "slow_input": Fault(causes.INPUT, ["slow_input"], ["none"]),
    "micro_batches": Fault(causes.MICRO_BATCHES, ["none", "64"], ["none", "{}"]),
    "stage": Fault(causes.STAGE, ["stage"], ["none"]),
    "host_copies": Fault(causes.COPIES, ["host_copies"], ["none"]),
    "undivided": Fault(causes.UNDIVIDED, ["undivided"], ["undivided_fixed"]),
    "slow_worker": Fault(causes.WORKER, ["slow_worker"], ["workers"], 2),
}


class Judged(NamedTuple):
    """A trial with the fault.

    Attributes:
        predicted_s: a step by the fault's own cause; None: the doctor did not name it.
        micro_batches: what the doctor suggests.
    """

    first: str
    before_s: float
    predicted_s: Optional[float]
    micro_batches: str = "4"


def started(arguments: List[str], workers: int, record: str = "") -> str:
    """What the script prints; ``record``: where it leaves what the doctor measured."""
    command = [sys.executable, SCRIPT, *arguments]
    environment = dict(os.environ, PYTHONPATH=ROOT, TF_CPP_MIN_LOG_LEVEL="3", FAULT_RECORD=record)
    if workers > 1:
        more = ["--doctor", "--record", record] if record else []
        command = [sys.executable, "-m", "whale_tf.cli", "run", "--workers", str(workers), *more, SCRIPT, *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          universal_newlines=True, check=True).stdout


def judged(fault: Fault) -> Judged:
    """One trial."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "record.json")
        started(fault.arguments, fault.workers, path)
        found: Diagnosis = diagnose(parse(path))
    own = next((cause for cause in found.causes if cause.kind == fault.cause), None)
    count = re.search(r"num_micro_batch: (\d+)", own.fix) if own is not None else None
    return Judged(found.causes[0].kind if found.causes else "none", found.period_s,
                  None if own is None else found.period_s - own.gain_s, count.group(1) if count else "4")


def after_seconds(fault: Fault, micro_batches: str) -> float:
    """A step without the fault."""
    printed = started([text.format(micro_batches) for text in fault.without], fault.workers)
    return max(float(text) for text in re.findall(r"seconds ([\d.e-]+)", printed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3, help="trials of each fault")
    parser.add_argument("--only", default=",".join(FAULTS), help="faults, with commas")
    given = parser.parse_args()
    table = Table("fault", "first cause is right", "other first causes", "step, ms", "predicted without it",
                  "measured without it", "predicted gain / measured gain")
    right = total = 0
    for name in given.only.split(","):
        fault = FAULTS[name]
        trials, after = [], []
        for _ in range(given.repeat):
            trials.append(judged(fault))
            after.append(after_seconds(fault, trials[-1].micro_batches))
        hits = [one for one in trials if one.first == fault.cause]
        right, total = right + len(hits), total + len(trials)
        others = sorted({one.first for one in trials} - {fault.cause})
        pairs = [(one.before_s, one.predicted_s, then_s) for one, then_s in zip(trials, after) if one.predicted_s is not None]
        ratios = [(before_s - predicted_s) / (before_s - then_s) for before_s, predicted_s, then_s in pairs if before_s > then_s]
        row = (name, f"{len(hits)} of {len(trials)}", ", ".join(others) or "-",
               *(", ".join(f"{1e3 * seconds:.0f}" for seconds in column) or "-" for column in (
                   [one.before_s for one in trials], [predicted_s for _, predicted_s, _ in pairs], after)),
               ", ".join(f"{ratio:.2f}" for ratio in ratios) or "-")
        print(*row, sep="; ", flush=True)
        table.add_row(*row)
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
    print(f"the first cause is right in {right} of {total} trials")


if __name__ == "__main__":
    main()
