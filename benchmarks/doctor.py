"""whale doctor on scripts with known faults: how often the first cause is the fault, and how close the predicted gain is.

    python -m benchmarks.doctor [--trials 40] [--seed 1] [--only slow_input,stage] [--patience 60] [--output trials.json]

Each fault is put into a training script (``doctor_script.py``) of randomly drawn sizes, on two CPU devices of one process or of
two with a core each.  The doctor measures it and names causes.  Meanwhile the same script runs without the fault, in turns with
the first one, five steps each, so that whatever else happens on the machine happens to both.  Predicted is the gain of the
fault's own cause, also where another one was named first; measured is the difference of both scripts' steps.

A trial waits until other programs take less than a quarter of a core for three seconds, but not longer than ``--patience``.  One
in which they took more is repeated, once (``--tries``); the quieter one counts.

The messages of a throttled link go through a network namespace of their own (Linux, ``unshare -rn`` and ``tc``).  The bandwidth
without throttling is measured first and described to the doctor.  Freed memory stays with the scripts (glibc's MALLOC_
variables), because otherwise they mostly measure page faults.
"""
from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import select
import subprocess
import sys
import tempfile
import time
from typing import Dict, List, NamedTuple, Optional, Tuple

from rich.console import Console
from rich.table import Table

from benchmarks.doctor_script import Settings
from whale_tf.diagnosis import diagnose as causes
from whale_tf.diagnosis.diagnose import Diagnosis, diagnose
from whale_tf.diagnosis.played import Played
from whale_tf.diagnosis.record import Record, parse

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPT = os.path.join(ROOT, "benchmarks", "doctor_script.py")
TURNS = 8  # of each script: STEPS / BLOCK, and one at the end
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(2 << 30), "MALLOC_TOP_PAD_": str(64 << 20),
          "MALLOC_ARENA_MAX": "1"}
QUIET = 0.25  # cores that other programs may take in a trial
NEAR = 0.2  # a gain is near if it is wrong by at most this share of what mending gives


class Trial(NamedTuple):
    """``faulty``, ``mended``: the scripts; ``link``: megabytes per second of the faulty one's messages, 0: as many as go."""

    fault: str
    faulty: Settings
    mended: Settings
    link: float = 0.0

    @property
    def workers(self) -> int:
        return 1 if self.fault in ONE_PROCESS else 2


ONE_PROCESS = {"slow_input": causes.INPUT, "micro_batches": causes.MICRO_BATCHES, "host_copies": causes.COPIES,
               "undivided": causes.UNDIVIDED}
TWO_PROCESSES = {"stage": causes.STAGE, "slow_worker": causes.WORKER, "link": causes.LINK}
FAULTS = {**ONE_PROCESS, **TWO_PROCESSES}


class Judged(NamedTuple):
    """Seconds of a step; ``predicted_s``: the gain by the fault's own cause, 0 if it was not named; ``others``: cores that other
    programs took meanwhile."""

    trial: Trial
    first: str
    before_s: float
    after_s: float
    predicted_s: float
    others: float

    @property
    def ratio(self) -> float:
        return self.predicted_s / (self.before_s - self.after_s) if self.before_s > self.after_s else float("nan")


def drawn(fault: str, dice: random.Random) -> Trial:
    """A fault in a model of random sizes."""
    base = Settings(batch=dice.choice((384, 512, 640)), width=dice.choice((384, 512, 640)), layers=dice.choice((8, 10, 12)))
    if fault == "slow_input":
        return Trial(fault, base._replace(fault=fault, strength=dice.uniform(0.05, 0.2)), base)
    if fault == "micro_batches":
        return Trial(fault, base._replace(fault=fault, micro_batches=dice.choice((32, 64))), base)
    if fault == "stage":
        base = base._replace(batch=2 * base.batch)  # long micro-batches
        return Trial(fault, base._replace(fault=fault), base)
    if fault == "host_copies":
        base = base._replace(has_section=True, strength=dice.choice((8, 12, 16)))
        return Trial(fault, base._replace(fault=fault), base)
    base = base._replace(model="replicas")
    if fault == "undivided":
        base = base._replace(has_section=True, strength=dice.choice((8, 12, 16)))
        return Trial(fault, base._replace(fault=fault), base)
    if fault == "slow_worker":
        return Trial(fault, base._replace(fault=fault, strength=dice.uniform(0.4, 0.7)), base)
    return Trial(fault, base._replace(fault=fault), base, dice.uniform(60.0, 150.0))


class Running:
    """A script that runs in turns with others.

    Args:
        record: where it leaves what the doctor measures; "": nothing is measured.
        cluster: file with the description of several workers' devices.
    """

    def __init__(self, given: Settings, workers: int, folder: str, name: str, record: str = "", cluster: str = "",
                 link: float = 0.0) -> None:
        gate = os.path.join(folder, name)
        for end in (".said", ".heard"):
            os.mkfifo(gate + end)
        environment = dict(os.environ, PYTHONPATH=ROOT, TF_CPP_MIN_LOG_LEVEL="3", FAULT_RECORD=record, FAULT_GATE=gate, **MEMORY)
        command = [sys.executable, SCRIPT, json.dumps(given._asdict())]
        if workers > 1:
            more = (["--doctor", "--doctor-steps", "30", "--record", record] if record else []) + (
                ["--cluster", cluster] if cluster else [])
            command = [sys.executable, "-m", "whale_tf.cli", "run", "--workers", str(workers), *more, *command[1:]]
        if link:
            throttle = f"ip link set lo up && tc qdisc add dev lo root tbf rate {8 * link:.0f}mbit burst 256kb latency 1s && "
            command = ["unshare", "-n" if os.geteuid() == 0 else "-rn", "sh", "-c", throttle + 'exec "$@"', "sh", *command]
        self._output = open(gate + ".out", "w+", encoding="utf8")
        self._process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=self._output, stderr=subprocess.STDOUT)
        self._said, self._heard = (os.open(gate + end, os.O_RDWR) for end in (".said", ".heard"))

    def wait(self) -> None:
        """Until it has made its steps."""
        while not select.select([self._said], [], [], 1.0)[0]:
            if self._process.poll() is not None:
                raise RuntimeError(f"the script ended early:\n{self._text()[-2000:]}")
        os.read(self._said, 4096)

    def go(self) -> None:
        os.write(self._heard, b"go\n")

    def seconds(self) -> float:
        """A step, when it has ended."""
        if self._process.wait():
            raise RuntimeError(f"the script failed:\n{self._text()[-2000:]}")
        return max(float(text) for text in re.findall(r"seconds ([\d.e-]+)", self._text()))

    def _text(self) -> str:
        self._output.seek(0)
        return self._output.read()


def in_turns(running: List[Running]) -> None:
    for one in running:
        one.wait()
    for turn in range(TURNS):
        for one in running:
            one.go()
            if turn < TURNS - 1:
                one.wait()


def measured(trial: Trial, mended: Optional[Settings], cluster: str) -> Tuple[Record, float]:
    """The doctor's record of the faulty script, and seconds of a step of the other one meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        record = os.path.join(folder, "record.json")
        running = [Running(trial.faulty, trial.workers, folder, "faulty", record, cluster, trial.link)]
        if mended is not None:
            running.append(Running(mended, trial.workers, folder, "mended", "", cluster))
        in_turns(running)
        seconds = [one.seconds() for one in running]
        return parse(record), seconds[-1]


def judged(trial: Trial, cluster: str) -> Judged:
    """One trial."""
    mended = trial.mended
    if trial.fault == "micro_batches":  # mended as the doctor suggests
        own = _own(diagnose(measured(trial, None, cluster)[0]), trial)
        count = re.search(r"num_micro_batch: (\d+)", own.fix) if own is not None else None
        mended = mended._replace(micro_batches=int(count.group(1)) if count else 4)
    began, others_s = time.perf_counter(), busy_seconds()
    record, after_s = measured(trial, mended, cluster)
    others = (busy_seconds() - others_s) / (time.perf_counter() - began)
    found = diagnose(record)
    own = _own(found, trial)
    return Judged(trial, found.causes[0].kind if found.causes else "none", found.period_s, after_s,
                  own.gain_s if own is not None else 0.0, others)


def quiet(trial: Trial, cluster: str, patience_s: float, tries: int) -> Judged:
    """One trial, repeated while other programs disturb it; the least disturbed one."""
    found: List[Judged] = []
    while len(found) < tries and (not found or found[-1].others > QUIET):
        wait_until_quiet(patience_s)
        found.append(judged(trial, cluster))
    return min(found, key=lambda one: one.others)


def wait_until_quiet(patience_s: float) -> None:
    """Waits until other programs take less than :data:`QUIET` cores, at most so many seconds."""
    until = time.perf_counter() + patience_s
    while time.perf_counter() < until and disturbance() > QUIET:
        pass


def disturbance(seconds: float = 3.0) -> float:
    """Cores that other programs take."""
    before_s = busy_seconds()
    time.sleep(seconds)
    return (busy_seconds() - before_s) / seconds


def busy_seconds() -> float:
    """Seconds of cores that other programs than this one and its ended children have taken; 0 where Linux' /proc is missing."""
    if not os.path.exists("/proc/stat"):
        return 0.0
    with open("/proc/stat", encoding="ascii") as handle:
        user, nice, system = map(int, handle.readline().split()[1:4])
    own = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - sum(one.ru_utime + one.ru_stime for one in own)


def _own(found: Diagnosis, trial: Trial) -> Optional[causes.Cause]:
    return next((cause for cause in found.causes if cause.kind == FAULTS[trial.fault]), None)


def described(folder: str) -> str:
    """A file with the two workers' devices and the bandwidth that their messages have on this machine."""
    plain = Settings(model="replicas")
    record, _ = measured(Trial("link", plain, plain), None, "")
    expected_s = Played(record).exchanges_s()
    factor = expected_s / max(process.message_s + process.collective_s for process in record.processes)
    cluster = record.cluster.to_dict()
    for node in cluster["nodes"]:
        node["nic"]["bandwidth_bytes_per_s"] *= factor
    print(f"messages between the processes: {cluster['nodes'][0]['nic']['bandwidth_bytes_per_s'] / 1e6:.0f} MB/s", flush=True)
    path = os.path.join(folder, "cluster.json")
    with open(path, "w", encoding="utf8") as handle:
        json.dump(cluster, handle)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=40, help="number of faults")
    parser.add_argument("--seed", type=int, default=1, help="of the sizes")
    parser.add_argument("--only", default=",".join(FAULTS), help="faults, with commas")
    parser.add_argument("--first", type=int, default=1, help="number of the first fault that is tried, of those drawn")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for a quiet machine before a trial")
    parser.add_argument("--tries", type=int, default=2, help="how often a trial is made that other programs disturb")
    parser.add_argument("--output", help="a JSON file with all trials")
    given = parser.parse_args()
    dice, names = random.Random(given.seed), given.only.split(",")
    found: Dict[str, List[Judged]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        wait_until_quiet(given.patience)
        cluster = described(folder) if set(TWO_PROCESSES) & set(names) else ""
        for number in range(given.trials):
            name = names[number % len(names)]
            trial = drawn(name, dice)
            if number + 1 < given.first:
                continue
            one = quiet(trial, cluster if trial.workers > 1 else "", given.patience, given.tries)
            found[name].append(one)
            print(f"{number + 1}; {name}; first: {one.first}; {1e3 * one.before_s:.1f} ms, without {1e3 * one.after_s:.1f}; gain "
                  f"{1e3 * one.predicted_s:.1f}, {one.ratio:.2f} of the measured one; others {one.others:.2f}", flush=True)
    every = [one for row in found.values() for one in row]
    if given.output:
        with open(given.output, "w", encoding="utf8") as handle:
            json.dump([dict(one._asdict(), trial=one.trial.faulty._asdict(), ratio=one.ratio) for one in every], handle, indent=1)
    show(found)
    right, near = (sum(map(test, every)) for test in (_is_right, _is_near))
    print(f"the first cause is right in {right} of {len(every)} trials, the gain within {NEAR:.0%} in {near}")


def _is_right(one: Judged) -> bool:
    return one.first == FAULTS[one.trial.fault]


def _is_near(one: Judged) -> bool:
    return abs(one.ratio - 1.0) <= NEAR


def show(found: Dict[str, List[Judged]]) -> None:
    table = Table("fault", "first cause is right", "other first causes", "step, ms", "measured without it",
                  "predicted gain / measured gain", f"within {NEAR:.0%}")
    for name, trials in found.items():
        table.add_row(name, f"{sum(map(_is_right, trials))} of {len(trials)}",
                      ", ".join(sorted({one.first for one in trials if not _is_right(one)})) or "-",
                      ", ".join(f"{1e3 * one.before_s:.0f}" for one in trials),
                      ", ".join(f"{1e3 * one.after_s:.0f}" for one in trials),
                      ", ".join(f"{one.ratio:.2f}" for one in trials), f"{sum(map(_is_near, trials))}")
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)


if __name__ == "__main__":
    main()
