"""Runs that end in all ways, and go on:
``python -m tests.chaos --runs 200 --minutes 60 [--seed 1] [--kinds fit,loop] [--elastic [--names one] | --fixed] [--own]
[--anew]``.

Each run trains in one way (``fit``, ``fit`` with BackupAndRestore, a loop, a Session, a Session that is fed), and is started
again and again, under other plans and with one or two processes: some process is killed, or all get a signal, at a random moment;
the disk is full; a file of the newest snapshot is torn, changed or lost.  What each step of each start prints, and the variables
at the end, must be those of a run that does not end; no step may be missed, and the newest snapshot that is left must count.

In some of these runs each host has a directory of its own.  The hosts change, and one whose process was killed may lose its
directory.

In other runs one job loses workers and takes them in again (``ELASTIC``), with the same demands.
"""
from __future__ import annotations

import argparse
import collections
import contextlib
import glob
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np
import tensorflow as tf

from tests.multiprocess.launch import RUN_S, WHALE_RUN, Process, Starter
from tests.multiprocess.train_chaos import PLANS, STEPS

SCRIPT = "tests.multiprocess.train_chaos"
KINDS = ("session", "feeds", *(("fit", "backup", "loop") if hasattr(tf, "keras") and hasattr(tf.keras, "ops") else ()))
WORKERS = {plan: 1 if PLANS[plan].cluster else 2 for plan in PLANS}
OWN_WORKERS = {**WORKERS, "gpipe": 2, "split": 2, "zero v2 in parts": 2}  # where hosts have directories of their own
HOSTS = "abc"  # these
STARTS = 4  # of a run that end by force; the next one ends by itself
PAUSE_S = 0.05
_STEP = re.compile(r"(?:\[(\d)[^]]*\] )?step (\d+) loss (\S+) seen (\S+)\n")
BEGUN = re.compile(r"^(?:\[(\d)(?: (\S+))?\] )?process (\d+)$", re.M)
_STARTING = "whale run: starting "
_NIC = {"bandwidth_gbits_per_s": 10}
UNEQUAL = {"name": "unequal", "nodes": [{"devices": ["CPU"] * count, "links": "default", "nic": _NIC} for count in (1, 2, 1, 1)]}
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
ELASTIC: Dict[str, Tuple[Sequence[str], int, str]] = {  # options; how many; a worker is lost (-), all are there again (+)
    "equal": (("--workers", "2:4"), 4, "--+"),
    "one": (("--workers", "1:2"), 2, "-+-"),
    "unequal": (("--workers", "1:4", "--cluster", json.dumps(UNEQUAL)), 4, "-+-"),
    "own": (("--workers", "1:3"), 3, "--+"),  # hosts have directories of their own
    "stages": (("--workers", "1:4"), 4, "-+-"),  # replicas of two stages, so that three workers are refused
}
LOSSES = ("SIGKILL", "SIGSTOP", "SIGTERM")  # killed, stopped (and killed by its keeper), preempted

Steps = Dict[int, Tuple[float, float]]  # step -> loss, and bits of the examples of all processes


class Failed(AssertionError):
    """A run that went on was not the one that did not end."""


class Result(NamedTuple):
    """What a run did.

    Attributes:
        events: what ended each start, in words.
        faults: what was done to it, one word each.
        waits_s: seconds from each end until the next start had made a step.
    """

    events: Sequence[str]
    faults: Sequence[str]
    waits_s: Sequence[float]


def started(starter: Starter, kind: str, plan: str, folder: str, given: Sequence[str] = (), workers: Optional[int] = None,
            **variables: str) -> Process:
    os.makedirs(folder, exist_ok=True)
    return starter.start(*WHALE_RUN, "--workers", str(workers or WORKERS[plan]), "-m", SCRIPT, kind, plan, folder, *given,
                         **variables)


def steps_of(output: str) -> Steps:
    """The steps that a start printed; in several processes, those that all of them printed."""
    found: Dict[int, Dict[str, Tuple[float, float]]] = {}
    for rank, step, loss, seen in _STEP.findall(output):
        found.setdefault(int(step), {})[rank] = (float(loss), float(seen))
    ranks = max((len(each) for each in found.values()), default=1)
    whole = {step: each for step, each in found.items() if len(each) == ranks}
    return {step: (next(iter(each.values()))[0], _together([seen for _, seen in each.values()])) for step, each in whole.items()}


def _together(seen: Sequence[float]) -> float:
    """The examples of all processes: each has other ones, or all have the same."""
    return seen[0] if len(set(seen)) == 1 else sum(seen)


def reference(starter: Starter, kind: str, folder: str) -> Tuple[Steps, List[Any]]:
    """The run that does not end, without snapshots on the way."""
    process = started(starter, kind, "plain", folder, ["snapshot.every_steps=1000"])
    assert process.wait(RUN_S) == 0, process.output
    steps = steps_of(process.output)
    assert sorted(steps) == list(range(1, STEPS + 1)), process.output
    return steps, variables(folder)


def variables(folder: str) -> List[Any]:
    with np.load(f"{folder}/variables.0.npz") as values:
        return [values[name] for name in values.files]


def complete_in(path: str) -> List[str]:
    """The manifests of the snapshots in a ``snapshot.path``, oldest first."""
    return sorted(glob.glob(f"{path}/*/step-*/manifest.json"))


def newest_in(paths: Sequence[str]) -> int:
    """The step of the newest complete snapshot in any of these; 0: there is none."""
    steps = [re.findall(r"/step-(\d+)-", manifest)[-1] for path in paths for manifest in complete_in(path)]
    return max(map(int, steps), default=0)


def damage(rng: random.Random, path: str) -> Tuple[str, str]:
    """Tears, changes or deletes a file of the newest snapshot that is complete, if there is one before it; says what and how."""
    complete = complete_in(path)
    if len(complete) < 2:
        return "", ""
    path = rng.choice(sorted(glob.glob(os.path.dirname(complete[-1]) + "/*")))
    how, size = rng.choice(["torn", "changed", "lost"]), os.path.getsize(path)
    if how == "lost" or not size:
        os.remove(path)
        return f", {os.path.basename(path)} lost", "lost file"
    with open(path, "r+b") as handle:
        if how == "torn":
            handle.truncate(rng.randrange(size))
        else:
            place = rng.randrange(size)
            handle.seek(place)
            old = handle.read(1)[0]
            handle.seek(place)
            handle.write(bytes([old ^ 1 << rng.randrange(8)]))
    return f", {os.path.basename(path)} {how}", f"{how} file"


def run(starter: Starter, rng: random.Random, kind: str, folder: str, expected: Tuple[Steps, List[Any]],
        own: bool = False, starts: int = STARTS) -> Result:
    """One run.

    Args:
        own: each host has a directory of its own.

    Raises:
        Failed, AssertionError: it is not the expected one.
    """
    steps, values = expected
    events: List[str] = []
    faults: List[str] = []
    waits_s: List[float] = []
    reached, ended_at, has_finished, is_whole = 0, 0.0, False, True
    having: Set[str] = set()  # the hosts that have all of the newest snapshot
    for number in range(starts + 1):
        plan, at, paths = rng.choice(list(OWN_WORKERS if own else WORKERS)), "", [f"{folder}/snapshots"]
        if own:
            at = next(each for each in iter(lambda: "".join(rng.sample(HOSTS, OWN_WORKERS[plan])), None)
                      if not having or having & set(each))
            paths = [f"{folder}/snapshots/{host}" for host in at]
        newest = newest_in(paths)
        given = ["snapshot." + rng.choice(["every_steps=1", "every_steps=2", "every_steps=3", "every_s=0.2"]), "snapshot.keep=3"]
        event = "" if number == starts else rng.choice(["SIGKILL", "SIGKILL", "SIGTERM", "SIGUSR1", "full disk"])
        more = {"FULL_AT": str(rng.randint(1, STEPS))} if event == "full disk" else {}
        if own:
            more = {"OWN": ",".join(at), **{key: f"{step},{rng.randrange(len(at))}" for key, step in more.items()}}
        process = started(starter, kind, plan, folder, given, (OWN_WORKERS if own else WORKERS)[plan], PAUSE=str(PAUSE_S), **more)
        what = " ".join(filter(None, [plan, f"at {at}" if at else "", given[0], event]))
        status, first_at, killed = _watched(process, rng, event, what)
        if first_at and ended_at:
            waits_s.append(first_at - ended_at)
        ended_at = time.monotonic()
        first = min(steps_of(process.output), default=newest + 1)
        if is_whole and kind != "backup" and first != newest + 1:
            raise Failed(f"{kind}: {events + [what]}: begins with step {first} after snapshot {newest}\n{process.output}")
        reached = checked(process.output, steps, reached, f"{kind}: {events + [what]}")
        has_finished = has_finished or "finished\n" in process.output
        if not event and status:
            raise Failed(f"{kind}: {events + [what]}: ended with status {status}\n{process.output}")
        if _STEP.search(process.output):
            having = set(at)
        which, how = damage(rng, rng.choice(paths)) if event and rng.random() < 0.4 else ("", "")
        is_whole = is_whole and not how
        lost = ""
        if len(at) > 1 and killed is not None and rng.random() < 0.6:
            lost = "lost directory"
            having.discard(at[killed])
            shutil.rmtree(paths[killed], ignore_errors=True)
            which += f", {at[killed]} loses its directory"
        events.append(what + which)
        faults += [one for one in (event, how, lost) if one]
    if reached != STEPS or not has_finished:
        raise Failed(f"{kind}: {events}: only {reached} steps of {STEPS}")
    compare(folder, values, f"{kind}: {events}")
    return Result(events, faults, waits_s)


def checked(output: str, steps: Steps, reached: int, what: str) -> int:
    """The last step of a start and of those before it.

    Raises:
        Failed: its steps are not the expected ones, or one was left out.
    """
    found = steps_of(output)
    for step, pair in found.items():
        if not np.allclose(pair, steps[step], 1e-9, 0):
            raise Failed(f"{what}: step {step} is {pair}, expected {steps[step]}\n{output}")
    if found and min(found) > reached + 1:
        raise Failed(f"{what}: step {reached + 1} was missed\n{output}")
    return max([reached, *found])


def compare(folder: str, values: Sequence[Any], what: str) -> None:
    own = variables(folder)
    assert len(own) == len(values) and values, f"{what}: {len(own)} variables, expected {len(values)}"
    for value, other in zip(own, values):
        np.testing.assert_allclose(value, other, 1e-9, 1e-12, err_msg=what)


def elastic(starter: Starter, rng: random.Random, kind: str, name: str, folder: str, expected: Tuple[Steps, List[Any]]) -> Result:
    """One job that loses workers and takes them in again.

    Raises:
        Failed, AssertionError: its steps or variables are not the expected ones, or other numbers of workers train.
    """
    os.makedirs(folder, exist_ok=True)
    options, most, changes = ELASTIC[name]
    how: List[str] = []
    own = name == "own"
    plan = rng.choice(["two", "nested"] if own else ["stages" if name == "stages" else "two"])
    every = rng.choice("12" if own else "123")
    hosts = hosts_in(folder) if own else ()
    process = starter.start(*WHALE_RUN, *options, *hosts, "--rejoin", "10000", "-m", SCRIPT, kind, plan, folder,
                            "snapshot.keep=3", f"snapshot.every_steps={every}", PAUSE=str(4 * PAUSE_S))
    counts = [most]
    for number, change in enumerate(changes):
        wanted = rng.randint(*((4, 5) if own else (1, 3))) * counts[-1]
        limit = time.monotonic() + RUN_S
        while len(_STEP.findall(going_on(process.output)[-1])) < wanted or len(going_on(process.output)) <= number:
            if time.monotonic() > limit or not process.is_running:
                raise Failed(f"{kind}, {name}: not {wanted} lines after {changes[:number]}\n{process.output}")
            time.sleep(0.05)
        if change == "+":
            process.send(signal.SIGUSR2)
            counts.append(most)
        else:
            how.append(rng.choice(LOSSES))
            _, host, pid = rng.choice(sorted(BEGUN.findall(going_on(process.output)[-1])))
            os.kill(int(pid), getattr(signal, how[-1]))
            if own and how[-1] != "SIGTERM" and rng.random() < 0.6:
                how[-1] += ", lost directory"
                shutil.rmtree(f"{folder}/snapshots/{host}", ignore_errors=True)
            counts.append(2 if name == "stages" else counts[-1] - 1)
    if process.wait(RUN_S):
        raise Failed(f"{kind}, {name}: ended with status {process.status}\n{process.output}")
    starts, reached = going_on(process.output), 0
    trained = [len(pids_of(start)) for start in starts]
    if trained != counts:
        raise Failed(f"{kind}, {name}: {trained} workers trained, expected {counts}\n{process.output}")
    for number, start in enumerate(starts):
        if own and number and 1 in steps_of(start):
            raise Failed(f"{kind}, {name}: start {number} does not go on with a snapshot\n{process.output}")
        reached = checked(start, expected[0], reached, f"{kind}, {name}: start {number}")
    if reached != STEPS:
        raise Failed(f"{kind}, {name}: only {reached} steps of {STEPS}\n{process.output}")
    compare(folder, expected[1], f"{kind}, {name}")
    waits = re.findall(r"training goes on with step \d+, (\S+) s after", process.output)
    assert 1 <= len(waits) <= len(changes), process.output  # not from a start that ended before a whole step
    told = f"{name}: {' -> '.join(map(str, counts))} workers, {', '.join(how)}"
    return Result([told], [*how, *["rejoin"] * changes.count("+")], [float(wait) for wait in waits])


def hosts_in(folder: str) -> Sequence[str]:
    """Options of ``whale run`` for three hosts, which are this one, each with a directory of its own."""
    path = os.path.join(folder, "ssh")
    with open(path, "w", encoding="utf8") as handle:
        handle.write('#!/bin/sh\nexec env OWN="$1" sh -c "$2"\n')
    os.chmod(path, 0o755)
    return "--hosts", ",".join(ADDRESSES), "--ssh", path


def starts_of(output: str) -> List[str]:
    """What each start of a job has printed."""
    return output.split(_STARTING)


def going_on(output: str) -> List[str]:
    """The same of those that whale_tf has not refused."""
    return [start for start in starts_of(output) if "whale_tf refuses" not in start]


def pids_of(output: str) -> List[int]:
    """The processes that have begun."""
    return [int(pid) for _, _, pid in BEGUN.findall(output)]


def _watched(process: Process, rng: random.Random, event: str, what: str) -> Tuple[int, float, Optional[int]]:
    """Waits for a start to end, or ends it in its midst, unless it ends before.

    Returns:
        Its status, when it made its first step (0: it made none), and the rank of the process that was killed, if one was.
    """
    wanted = rng.randint(1, STEPS // 2) if event else STEPS + 1
    first_at, limit, killed = 0.0, time.monotonic() + RUN_S, None
    while process.is_running:
        count = len(_STEP.findall(process.output))
        if count and not first_at:
            first_at = time.monotonic()
        if count >= wanted:
            break
        if time.monotonic() > limit:
            raise Failed(f"{what}: has not ended within {RUN_S} s\n{process.output}")
        time.sleep(0.05)
    if event and process.is_running:
        time.sleep(rng.random() * 2 * PAUSE_S)
        pids = {int(rank or 0): int(pid) for rank, _, pid in BEGUN.findall(process.output)}
        number = signal.SIGKILL if event == "full disk" else getattr(signal, event)
        ranks = sorted(pids)
        killed = rng.choice(ranks) if number == signal.SIGKILL else None
        for rank in ranks if killed is None else [killed]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[rank], number)
    return process.wait(RUN_S), first_at, killed


def table(results: Sequence[Tuple[str, Result]]) -> Iterator[str]:
    """Runs, starts, faults, and seconds from an end to the next step, by kind of run."""
    for kind in sorted({kind for kind, _ in results}):
        own = [result for one, result in results if one == kind]
        faults = collections.Counter(fault for result in own for fault in result.faults)
        waits_s = [wait for result in own for wait in result.waits_s] or [0.0]
        yield (f"{kind}: {len(own)} runs, {sum(len(result.events) for result in own)} starts or jobs; "
               f"{', '.join(f'{count} {fault}' for fault, count in sorted(faults.items()))}; "
               f"median {statistics.median(waits_s):.1f} s, most {max(waits_s):.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--elastic", action="store_true", help="only jobs that lose workers and take them in again")
    parser.add_argument("--names", default=",".join(ELASTIC), help="which of them")
    parser.add_argument("--fixed", action="store_true", help="no such jobs")
    parser.add_argument("--own", action="store_true", help="each host has a directory of its own")
    parser.add_argument("--anew", action="store_true", help="processes import TensorFlow as a user's do, which takes seconds")
    given = parser.parse_args()
    rng, begin = random.Random(given.seed), time.monotonic()
    done: List[Tuple[str, Result]] = []
    print(f"seed {given.seed}", flush=True)
    folder = tempfile.mkdtemp(prefix="chaos-")
    failed: Optional[str] = None
    with Starter(given.anew) as starter:
        expected = {kind: reference(starter, kind, f"{folder}/{kind}") for kind in given.kinds.split(",")}
        while len(done) < given.runs and time.monotonic() - begin < 60 * given.minutes and failed is None:
            kind = rng.choice(sorted(expected))
            changes = given.elastic or not given.fixed and rng.random() < 0.3
            own = kind != "backup" and (given.own or rng.random() < 0.3)  # BackupAndRestore needs one directory
            try:
                where = f"{folder}/{len(done)}"
                name = rng.choice([one for one in given.names.split(",") if kind != "backup" or one != "own"])
                result = elastic(starter, rng, kind, name, where, expected[kind]) if changes else run(
                    starter, rng, kind, where, expected[kind], own)
            except AssertionError:
                failed = f"{kind}, {name if changes else 'fixed'}: {traceback.format_exc()}"
                break
            done.append((kind + (", elastic" if changes else ", own directories" if own else ""), result))
            print(f"{len(done)}: {kind}: {'; '.join(result.events)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(table(done)))
    waits_s = [wait for _, result in done for wait in result.waits_s]
    print(f"{len(done)} runs equal to the uninterrupted ones; seconds from an end to the next step: median "
          f"{statistics.median(waits_s or [0]):.1f}, most {max(waits_s or [0]):.1f}")
    if failed:
        print(failed)
        sys.exit(1)


if __name__ == "__main__":
    main()
