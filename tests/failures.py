"""Jobs that lose a process in all ways:
``python -m tests.failures --runs 200 --minutes 60 [--seed 1] [--kinds fit,loop] [--plans split] [--faults SIGSTOP] [--keep F]``.

Each run trains in one way (``KINDS``) under a plan over two or three processes.  At a random moment, from its start to its end,
one process is killed or stopped, or its link is cut: then each process is in a network namespace of its own (this needs root and
``ip``; without them these faults are left out, which is said).  The others must end within :data:`BOUND_S` seconds with a
message that names the lost process, every step that was made must be that of the local script, checkpoints must be readable, and
no process may be left.  Under ``whale run --max-restarts 1`` training must go on, and end with the variables of the local script.
A process that was stopped and goes on when the others have ended must end, too.

A run that is not so is printed with its output, and the others go on.
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
import subprocess
import sys
import tempfile
import time
import zipfile
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np
import tensorflow as tf

from tests import chaos
from tests.multiprocess.launch import RUN_S, WHALE_RUN, Process, Starter
from tests.multiprocess.train_chaos import STEPS, across, layers_of
from whale_tf.cluster.processes import free_ports, tf_configs
from whale_tf.processes.watch import EXIT_STATUS

KINDS = tuple(kind for kind in chaos.KINDS if kind != "backup") + (() if hasattr(tf, "keras") and hasattr(tf.keras, "ops")
                                                                   else ("estimator",))
PLANS = tuple(across(2))
FAULTS = ("SIGKILL", "SIGSTOP", "link")
CUTS = {"down": ("set", "{}", "down"), "silent": ("set", "{}", "nomaster")}  # what a link's end in the hub gets
MOMENTS: Dict[str, Tuple[str, float]] = {  # what the output has, and up to how many seconds later the fault comes
    "start": ("", 1.0), "build": (r"process \d+\n", 1.0), "first step": ("training\n", 1.5), "middle": (r"step {} ", 0.15),
    "look": (r"looking\n", 0.15), "end": ("finished\n", 0.5)}
BOUND_S = 15.0  # 10 at most where nothing else runs
HANG_S = 40.0  # then it is said where the processes are
START_S = 6  # communication.start_timeout_s, where a process may be lost before the others have met it
PAUSE_S = 0.05
HOSTS = 3
NAMED = r"process {} \([^)]*\)(?: and process \d+ \([^)]*\))* (?:has ended|has not answered for|did not start within)"


class Failed(AssertionError):
    """The survivors have not done what they should."""


class Case(NamedTuple):
    """A run.

    Attributes:
        moment: of the fault; in ``middle`` after step ``step``.
        looks: it evaluates, saves and has callbacks.
        restarts: it is started by ``whale run --max-restarts 1``.
        goes_on: a stopped process goes on when the others have ended; otherwise it is killed.
        snapshots: it writes them.
    """

    kind: str
    plan: str
    workers: int
    fault: str
    cut: str
    moment: str
    step: int
    victim: int
    looks: bool
    restarts: bool
    goes_on: bool
    snapshots: bool

    def __str__(self) -> str:
        more = [name for name in ("looks", "restarts", "goes_on", "snapshots") if getattr(self, name)]
        when = f"after step {self.step}" if self.moment == "middle" else self.moment
        return f"{self.kind}, {self.plan} x{self.workers}: {self.what} of process {self.victim}, {', '.join([when, *more])}"

    @property
    def may_not_meet(self) -> bool:
        return self.moment in ("start", "build", "first step") and not self.restarts

    @property
    def what(self) -> str:
        return self.fault + (f" {self.cut}" if self.fault == "link" else "") + (", whale run" if self.restarts else "")


def drawn(rng: random.Random, kinds: Sequence[str], plans: Sequence[str], faults: Sequence[str]) -> Case:
    fault, workers, kind = rng.choice(list(faults)), rng.choice([2, 2, 3]), rng.choice(list(kinds))
    restarts = fault != "link" and rng.random() < 0.15
    moment = rng.choice(sorted(MOMENTS) + ["middle", "middle", "look"])
    return Case(kind, rng.choice(plans), workers, fault, rng.choice(sorted(CUTS)), moment,
                rng.randint(1, STEPS - 2), rng.randrange(workers), moment == "look" or rng.random() < 0.4, restarts,
                fault == "SIGSTOP" and not restarts and rng.random() < 0.5, restarts or rng.random() < 0.3)


class Links:
    """Network namespaces, each with one process, and one in which a bridge connects them; nothing is left of them afterwards."""

    def __init__(self) -> None:
        self.names = [f"whale-{os.getpid()}-{number}" for number in range(HOSTS)]
        self._hub = f"whale-{os.getpid()}-hub"

    @staticmethod
    def reason() -> str:
        """Why there cannot be any; empty: there can."""
        if os.geteuid() != 0:
            return "network namespaces need root"
        return "" if shutil.which("ip") else "there is no command ip"

    def __enter__(self) -> Links:
        for name in [self._hub, *self.names]:
            _ip("netns", "add", name)
        _ip("-n", self._hub, "link", "add", "hub", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "hub", "up")
        for number, name in enumerate(self.names):
            _ip("link", "add", "cable", "netns", name, "type", "veth", "peer", "name", f"cable{number}", "netns", self._hub)
            _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _ip("-n", name, "link", "set", device, "up")
        self.mend()
        return self

    def __exit__(self, *error: Any) -> None:
        for name in [self._hub, *self.names]:
            subprocess.call(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)

    @staticmethod
    def address(number: int) -> str:
        return f"10.78.0.{number + 1}"

    def mend(self) -> None:
        for number in range(HOSTS):
            _ip("-n", self._hub, "link", "set", f"cable{number}", "master", "hub", "up")

    def cut(self, number: int, how: str) -> None:
        _ip("-n", self._hub, "link", *[word.format(f"cable{number}") for word in CUTS[how]])

    def variables(self, workers: int) -> Iterator[Dict[str, str]]:
        for name, variables in zip(self.names, tf_configs(free_ports(workers))):
            job = json.loads(variables["TF_CONFIG"])
            ports = [address.rpartition(":")[2] for address in job["cluster"]["worker"]]
            job["cluster"]["worker"] = [f"{self.address(number)}:{port}" for number, port in enumerate(ports)]
            yield {"TF_CONFIG": json.dumps(job), "NETNS": name}


def _ip(*arguments: str) -> None:
    """Raises:
        subprocess.CalledProcessError: it failed; its message has been printed.
    """
    subprocess.check_call(["ip", *arguments])


class Job:
    """The processes of a run: those of its workers or, under ``whale run``, one."""

    def __init__(self, starter: Starter, case: Case, folder: str, links: Optional[Links]) -> None:
        os.makedirs(folder)
        given = ["snapshot.every_steps=2" if case.snapshots else "snapshot.path=null"]
        given += [f"communication.start_timeout_s={START_S}"] if case.may_not_meet else []
        words = ["-m", chaos.SCRIPT, case.kind, case.plan, folder, *given]
        more = {"PAUSE": str(PAUSE_S), **({"LOOK": "3"} if case.looks else {})}
        if case.restarts:
            command = [*WHALE_RUN, "--workers", str(case.workers), "--max-restarts", "1", *words]
            self._started = [starter.start(*command, **more)]
        else:
            jobs = links.variables(case.workers) if links and case.fault == "link" else tf_configs(free_ports(case.workers))
            self._started = [starter.start(*words, **more, **variables) for variables in jobs]
        self._case = case
        self._seen: Set[Tuple[int, str]] = set()

    @property
    def outputs(self) -> List[str]:
        """Of each worker; under ``whale run``, the first lines have none."""
        if not self._case.restarts:
            return [process.output for process in self._started]
        lines = self._started[0].output.splitlines(True)
        return ["".join(line[4:] for line in lines if line.startswith(f"[{rank}] ")) for rank in range(self._case.workers)]

    @property
    def output(self) -> str:
        """Each line begins with the number of its process."""
        if self._case.restarts:
            return self._started[0].output
        return "".join(f"[{rank}] {line}" for rank, text in enumerate(self.outputs) for line in text.splitlines(True))

    def pid(self, rank: int) -> int:
        """0: it has not begun."""
        if not self._case.restarts:
            return self._started[rank]._process.pid
        return next(iter(chaos.pids_of(self.outputs[rank])), 0)

    def process(self, rank: int) -> Process:
        return self._started[0 if self._case.restarts else rank]

    def is_running(self, rank: int) -> bool:
        return self.process(rank).is_running

    def look(self) -> Set[Tuple[int, str]]:
        """Remembers all processes that these have started; those that are there now."""
        found = _descendants([process._process.pid for process in self._started])
        self._seen |= found
        return found

    @property
    def left(self) -> List[int]:
        return [pid for pid, began in self._seen if _began(pid) == began]

    def tell_where(self) -> None:
        for pid in {self.pid(rank) for rank in range(self._case.workers)} - {0}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        time.sleep(1)

    def kill(self) -> None:
        for pid in self.left + [process._process.pid for process in self._started if process.is_running]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _stat(pid: int) -> List[str]:
    """State, parent and so on; empty: no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf8") as handle:
            return handle.read().rpartition(")")[2].split()
    except OSError:
        return []


def _began(pid: int) -> str:
    """When a process has begun, which tells it from a later one of the same number; empty: it has ended."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] not in "ZX" else ""


def _descendants(roots: Sequence[int]) -> Set[Tuple[int, str]]:
    children: Dict[int, List[int]] = {}
    for name in os.listdir("/proc"):
        fields = _stat(int(name)) if name.isdigit() else []
        if fields:
            children.setdefault(int(fields[1]), []).append(int(name))
    found, left = set(), list(roots)
    while left:
        pid = left.pop()
        found.add((pid, _began(pid)))
        left += children.get(pid, [])
    return {(pid, began) for pid, began in found if began}


class Result(NamedTuple):
    """Attributes:
    seconds: from the fault until the last survivor had ended; None: the run had ended before.
    problem: empty: none.
    """

    case: Case
    seconds: Optional[float]
    problem: str = ""


def reference(starter: Starter, kind: str, layers: int, folder: str) -> Tuple[chaos.Steps, List[Any]]:
    """The local script."""
    os.makedirs(folder)
    process = starter.start("-m", chaos.SCRIPT, kind, "plain", folder, "snapshot.path=null", LAYERS=str(layers))
    assert process.wait(RUN_S) == 0, process.output
    return chaos.steps_of(process.output), chaos.variables(folder)


def run(starter: Starter, rng: random.Random, case: Case, folder: str, expected: Tuple[chaos.Steps, List[Any]],
        links: Optional[Links] = None) -> Result:
    job = Job(starter, case, folder, links)
    seconds: Optional[float] = None
    try:
        try:
            seconds = _disturbed(job, rng, case, links)
        except AssertionError as error:
            job.tell_where()
            return Result(case, seconds, f"{error}\n{job.output}")
        try:
            _judge(job, case, seconds, expected, folder)
        except AssertionError as error:
            return Result(case, seconds, f"{error}\n{job.output}")
        return Result(case, seconds)
    finally:
        job.kill()
        if links is not None:
            links.mend()


def _disturbed(job: Job, rng: random.Random, case: Case, links: Optional[Links]) -> Optional[float]:
    """Waits for the moment, disturbs the job, and waits for the survivors to end; seconds for that.

    Raises:
        Failed: they do not.
    """
    text, delay_s = MOMENTS[case.moment]
    limit = time.monotonic() + RUN_S
    others = range(case.workers) if case.moment in ("look", "end") else [case.victim]  # of whom one has come there
    while not (any(re.search(text.format(case.step), job.outputs[rank], re.M) for rank in others) and job.pid(case.victim)):
        if not job.is_running(case.victim) or time.monotonic() > limit:
            return _ended(job, case, None)
        time.sleep(0.02)
    time.sleep(rng.random() * delay_s)
    before, victim = job.look(), job.pid(case.victim)
    began = time.monotonic()
    if _began(victim):
        if case.fault == "link":
            assert links is not None
            links.cut(case.victim, case.cut)
        elif case.fault != "none":
            os.kill(victim, getattr(signal, case.fault))
    elif not case.restarts:
        return _ended(job, case, None)
    if case.restarts:
        while any(_began(pid) == since for pid, since in before if pid != job.process(0)._process.pid):
            job.look()
            if time.monotonic() - began > HANG_S:
                raise Failed(f"the processes of the first start have not ended within {HANG_S} s")
            time.sleep(0.05)
        seconds = time.monotonic() - began
        return _ended(job, case, seconds)
    return _ended(job, case, began)


def _ended(job: Job, case: Case, began: Optional[float]) -> Optional[float]:
    """Waits for the survivors to end.

    Args:
        began: when they were disturbed, if they were; under ``whale run``, seconds until the first start had ended.

    Raises:
        Failed: they do not.
    """
    if case.restarts or began is None or case.fault == "none":
        limit = time.monotonic() + RUN_S
        while any(job.is_running(rank) for rank in range(case.workers)):
            job.look()
            if time.monotonic() > limit:
                raise Failed(f"the job has not ended within {RUN_S} s")
            time.sleep(0.1)
        return began if case.restarts else None
    survivors = [rank for rank in range(case.workers) if case.fault == "link" or rank != case.victim]
    while any(job.is_running(rank) for rank in survivors):
        if time.monotonic() - began > HANG_S:
            left = [rank for rank in survivors if job.is_running(rank)]
            raise Failed(f"process(es) {left} have not ended within {HANG_S} s")
        time.sleep(0.02)
    seconds = time.monotonic() - began
    if case.fault == "SIGSTOP":
        os.kill(job.pid(case.victim), signal.SIGCONT if case.goes_on else signal.SIGKILL)
    began = time.monotonic()
    while job.is_running(case.victim):
        if time.monotonic() - began > HANG_S:
            raise Failed(f"process {case.victim} went on, and has not ended within {HANG_S} s")
        time.sleep(0.02)
    if case.goes_on and time.monotonic() - began > BOUND_S:
        raise Failed(f"process {case.victim} went on, and ended after {time.monotonic() - began:.1f} s")
    return seconds


def _judge(job: Job, case: Case, seconds: Optional[float], expected: Tuple[chaos.Steps, List[Any]], folder: str) -> None:
    """Raises:
        Failed, AssertionError: what the job has done is not what it should.
    """
    steps, values = expected
    limit = time.monotonic() + 3
    while job.left and time.monotonic() < limit:
        time.sleep(0.1)
    if job.left:
        raise Failed(f"processes {job.left} are left")
    starts = re.split("whale run: restarting", job.output)
    reached = 0
    for start in starts:
        reached = chaos.checked(start, steps, reached, str(case))
    if seconds is not None and seconds > BOUND_S + START_S * case.may_not_meet:
        raise Failed(f"the survivors ended after {seconds:.1f} s")
    are_lost = seconds is not None and case.fault != "none"
    if case.restarts or not are_lost:
        statuses = [job.process(rank).wait(1) for rank in range(case.workers)]
        if any(statuses):
            raise Failed(f"ended with status(es) {statuses}, though no process is lost")
        if reached != STEPS or job.output.count("finished\n") < case.workers:
            raise Failed(f"only {reached} steps of {STEPS}, or not finished")
        chaos.compare(folder, values, str(case))
        if are_lost and len(starts) > 1 and not re.search(rf"process {case.victim}\b", starts[0]):
            raise Failed(f"nothing names process {case.victim}")
    else:
        for rank, output in enumerate(job.outputs):
            if rank != case.victim or case.fault == "link" or case.goes_on:
                _judge_survivor(case, rank, job.process(rank).wait(1), output, job.outputs[case.victim])
    _judge_files(folder)


def _judge_survivor(case: Case, rank: int, status: int, output: str, of_victim: str) -> None:
    """Raises:
        Failed: it has ended otherwise than it should.
    """
    if status == 0 and output.endswith("finished\n"):
        made = [int(step) for step in re.findall(r"^step (\d+) ", of_victim, re.M)]
        if max(made, default=0) < STEPS - 1 and case.moment != "look":
            raise Failed(f"process {rank} has finished without process {case.victim}")
        return
    lost = r"\d+" if rank == case.victim else str(case.victim)
    if status not in (1, EXIT_STATUS):
        raise Failed(f"process {rank} has ended with status {status}, expected 1 or {EXIT_STATUS}")
    if not re.search(NAMED.format(lost), output):
        raise Failed(f"process {rank} does not name the lost process {lost}")


def _judge_files(folder: str) -> None:
    """Raises:
        Failed: one cannot be read.
    """
    try:
        state = tf.train.get_checkpoint_state(f"{folder}/checkpoints")
        for path in state.all_model_checkpoint_paths if state else []:
            reader = tf.compat.v1.train.NewCheckpointReader(path)
            for name, kind in reader.get_variable_to_dtype_map().items():
                assert not kind.is_floating or np.isfinite(reader.get_tensor(name)).all(), name
        for path in glob.glob(f"{folder}/*.keras"):
            with zipfile.ZipFile(path) as file:
                assert file.testzip() is None, path
    except Exception as error:
        raise Failed(f"a file cannot be read: {type(error).__name__}: {error}") from error


def table(results: Sequence[Result]) -> Iterator[str]:
    """Runs by fault, kind, plan and moment, and seconds until the survivors had ended."""
    for field in ("fault", "kind", "plan", "moment", "workers"):
        yield f"{field:<20} runs  lost  failed   median    90%   most (s)"
        groups = collections.defaultdict(list)  # type: Dict[str, List[Result]]
        for result in results:
            groups[result.case.what if field == "fault" else str(getattr(result.case, field))].append(result)
        for name, own in [*sorted(groups.items()), ("all", list(results))]:
            seconds = sorted(result.seconds for result in own if result.seconds is not None)
            failed = sum(bool(result.problem) for result in own)
            times = [statistics.median(seconds), seconds[int(0.9 * (len(seconds) - 1) + 0.5)], seconds[-1]] if seconds else []
            yield f"{name:<20} {len(own):4d}  {len(seconds):4d}  {failed:6d}   " + "  ".join(f"{each:6.1f}" for each in times)
        yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--faults", default=",".join(FAULTS), help="none: no fault at all")
    parser.add_argument("--keep", default="", help="directory that gets the output of each run that fails")
    given = parser.parse_args()
    faults, begin, reason = given.faults.split(","), time.monotonic(), Links.reason()
    if "link" in faults and reason:
        print(f"no links are cut: {reason}")
        faults.remove("link")
    print(f"seed {given.seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # nothing is left
    folder = tempfile.mkdtemp(prefix="failures-")
    done: List[Result] = []
    references: Dict[Tuple[str, int], Tuple[chaos.Steps, List[Any]]] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, True)
        links = stack.enter_context(Links()) if "link" in faults else None
        while len(done) < given.runs and time.monotonic() - begin < 60 * given.minutes:
            rng = random.Random(given.seed + len(done))
            case = drawn(rng, given.kinds.split(","), given.plans.split(","), faults)
            with Starter() as starter:
                key = case.kind, layers_of(across(case.workers)[case.plan])
                if key not in references:
                    references[key] = reference(starter, *key, f"{folder}/{key}")
                where = f"{folder}/{len(done)}"
                result = run(starter, rng, case, where, references[key], links)
            done.append(result)
            shutil.rmtree(where, ignore_errors=True)
            took = "ended before" if result.seconds is None else f"{result.seconds:.1f} s"
            said = result.problem.partition("\n")[0]
            print(f"{given.seed + len(done) - 1}: {case}: {f'FAILED: {said}; ' if said else ''}{took}", flush=True)
            if result.problem and given.keep:
                os.makedirs(given.keep, exist_ok=True)
                with open(f"{given.keep}/{given.seed + len(done) - 1}.txt", "w", encoding="utf8") as file:
                    file.write(f"{case}\n{result.problem}")
    print("\n".join(table(done)))
    failed = [result for result in done if result.problem]
    if not given.keep:
        print("\n\n".join(f"{result.case}: {result.problem}" for result in failed))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
