"""Two hosts with addresses of their own and a slow link between them: measured steps beside bytes over bandwidth.  Needs root.

    sudo .venv/tf2/bin/python -m benchmarks.hosts [MBIT_PER_S...]

The hosts are network namespaces that a virtual Ethernet cable connects, each with one process on a core of its own; ``tc`` limits
what either sends.  A step over the link is predicted from the same step over the unlimited cable: at least as long as its bytes
take, and at most what these take on top of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import Any, Dict, Iterator, List, Optional

from rich.console import Console

from benchmarks import processes
from benchmarks.measure import Result, Spec, first_result, main, table
from benchmarks.workloads import WORKLOADS

HOSTS = ("whale-host-0", "whale-host-1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 23456
CABLE = "whale-cable"
RATES_MBIT = (1000, 200)
SYSTEMS = ("whale_tf", "whale_tf, float16") + tuple(processes.PIPELINES)[1:2]
MODEL = "mlp"
STEPS = 8


def run(*command: str) -> None:
    """Raises:
        subprocess.CalledProcessError: it failed; its message has been printed.
    """
    subprocess.run(command, check=True)


@contextlib.contextmanager
def hosts() -> Iterator[None]:
    """The two namespaces and the cable between them; nothing is left of them afterwards."""
    try:
        for host in HOSTS:
            run("ip", "netns", "add", host)
        run("ip", "link", "add", CABLE, "netns", HOSTS[0], "type", "veth", "peer", "name", CABLE, "netns", HOSTS[1])
        for host, address in zip(HOSTS, ADDRESSES):
            run("ip", "-n", host, "addr", "add", address + "/24", "dev", CABLE)
            for device in ("lo", CABLE):
                run("ip", "-n", host, "link", "set", device, "up")
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], stderr=subprocess.DEVNULL, check=False)


def limit(rate_mbit: int) -> None:
    """Let both hosts send so many megabits a second."""
    for host in HOSTS:
        run("tc", "-n", host, "qdisc", "replace", "dev", CABLE, "root", "tbf", "rate", f"{rate_mbit}mbit",
            "burst", "256kb", "latency", "50ms")


def sent_bytes() -> int:
    with open(f"/sys/class/net/{CABLE}/statistics/tx_bytes", encoding="utf8") as handle:
        return int(handle.read())


def worker(spec: Spec) -> Result:
    """One of the processes; ``bytes``: what its host sends in a step."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[spec["rank"] % os.cpu_count()]})
    step = processes.SYSTEMS[spec["system"]](WORKLOADS[spec["model"]](), spec["rank"])
    step()
    before = sent_bytes()
    result = processes.step_times(step, STEPS, warmup=2)
    return dict(result, bytes=(sent_bytes() - before) / (STEPS + 2))


def measured(system: str, model: str) -> Result:
    """What the first host measured.

    Raises:
        RuntimeError: it failed.
    """
    addresses = [f"{address}:{PORT}" for address in ADDRESSES]
    commands, variables = [], []
    for rank, host in enumerate(HOSTS):
        spec = json.dumps({"system": system, "model": model, "rank": rank})
        commands.append(["ip", "netns", "exec", host, sys.executable, os.path.abspath(__file__), "--worker", spec])
        job = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        variables.append({"TF_CONFIG": json.dumps(job)})
    return first_result(commands, variables)


def row(system: str, rate: Optional[int], found: Result, free: Result) -> List[str]:
    cells = [system, "-" if rate is None else str(rate), "{:.2f}".format(found["bytes"] / 1e6),
             "{:.0f}".format(1e3 * found["wall_s"])]
    if rate is None:
        return cells + ["-", "-"]
    link_s = 8 * found["bytes"] / (rate * 1e6)
    return cells + ["{:.0f}".format(1e3 * max(link_s, free["wall_s"])), "{:.0f}".format(1e3 * (link_s + free["wall_s"]))]


def report(console: Console) -> None:
    if os.geteuid() != 0:
        sys.exit(f"benchmarks.hosts makes network namespaces and needs root: sudo {sys.executable} -m benchmarks.hosts")
    rows: List[Any] = []
    with hosts():
        free: Dict[str, Result] = {system: measured(system, MODEL) for system in SYSTEMS}
        rows += [row(system, None, free[system], free[system]) for system in SYSTEMS]
        for rate in [int(each) for each in sys.argv[1:]] or RATES_MBIT:
            limit(rate)
            rows += [row(system, rate, measured(system, MODEL), free[system]) for system in SYSTEMS]
    console.print(table(f"{MODEL}: a step over a link of so many Mbit/s", [
        "system", "Mbit/s", "MB sent", "measured ms", "at least ms", "at most ms"], rows))


if __name__ == "__main__":
    main(__file__, worker, report)
