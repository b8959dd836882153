"""Load balance on unequal devices: Whale's Algorithm 1 as printed and repaired beside the exact answers.

    python -m benchmarks.balance [--cases 10000] [--stage-cases 1000] [--seed 0]
"""
from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any, Callable, Iterator, List, Sequence

from rich.console import Console

from benchmarks.measure import table
from benchmarks.papers.balance import SOLVERS, memory_utilisation, printed_units, waste
from benchmarks.papers.stages import STAGE_SOLVERS
from whale_tf.balance import (
    Balance,
    BalanceProblem,
    PartitionProblem,
    balance,
    exact_stages,
    fits,
    partition_fits,
    partition_latency_s,
    step_time_s,
)
from whale_tf.cluster import DEVICE_TYPES
from whale_tf.errors import InfeasibleError

GPUS = sorted(name for name, row in DEVICE_TYPES.items() if row.kind == "GPU")


def generate_cases(count: int, seed: int) -> Iterator[BalanceProblem]:
    """Problems with some load that fits: 2 to 16 GPUs of up to three types, a batch of up to 1,024 samples, needing
    from a fifth to nearly all of the memory."""
    rng = random.Random(seed)
    made = 0
    while made < count:
        types = rng.sample(GPUS, rng.randint(1, 3))
        rows = [DEVICE_TYPES[rng.choice(types)] for _ in range(rng.randint(2, 16))]
        memory = tuple(row.memory_bytes * rng.uniform(0.5, 1.0) for row in rows)
        fixed = min(memory) * rng.choice([0.0, 0.1, 0.3])
        free = sum(memory) - fixed * len(rows)
        problem = BalanceProblem(tuple(row.fp32 for row in rows), memory, free * rng.uniform(0.2, 0.999),
                                 rng.randint(len(rows), 1024), fixed)
        if min(problem.capacities) >= 1 and sum(problem.capacities) >= problem.units:
            made += 1
            yield problem


def generate_stage_cases(count: int, seed: int) -> Iterator[PartitionProblem]:
    """Models of 8 to 60 ops in 2 to 8 stages over up to two types of GPUs; some partition fits in memory."""
    rng = random.Random(seed)
    made = 0
    while made < count:
        stages = rng.randint(2, 8)
        n = rng.randint(max(8, stages), 60)
        types = [DEVICE_TYPES[name] for name in rng.sample(GPUS, 2)]
        rows = [rng.choice(types) for _ in range(stages)]
        flops = tuple(rng.lognormvariate(0, 0.7) * 1e12 for _ in range(n))
        micro_batches = rng.choice([4, 8, 16])
        pressure = rng.uniform(0.2, 0.9) * sum(row.memory_bytes for row in rows) / n
        problem = PartitionProblem(
            flops, tuple(rng.uniform(0.2, 0.6) * pressure for _ in range(n)),
            tuple(rng.uniform(0.2, 0.6) * pressure / stages for _ in range(n)),
            tuple(rng.uniform(0.0, 0.02) for _ in range(n - 1)),
            tuple(row.fp32 for row in rows), tuple(float(row.memory_bytes) for row in rows), micro_batches)
        try:
            exact_stages(problem)
        except InfeasibleError:
            continue
        made += 1
        yield problem


def timed(call: Callable[[], Any], into: List[float]) -> Any:
    """The answer of ``call``; its CPU seconds are added to ``into``."""
    start = time.process_time()
    result = call()
    into.append(time.process_time() - start)
    return result


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%"


def ratios(values: Sequence[float]) -> List[str]:
    """Mean, 95th percentile and maximum; dashes where there are none."""
    if not values:
        return ["-"] * 3
    ordered = sorted(values)
    return [f"{value:.3f}" for value in (
        statistics.mean(ordered), ordered[int(0.95 * (len(ordered) - 1))], ordered[-1])]


def own_units(problem: BalanceProblem, found: Balance) -> Sequence[float]:
    """The solver's own units (the printed algorithm's are fractions)."""
    return printed_units(problem) if found.algorithm == "paper" else found.units


def report_intra(console: Console, cases: Sequence[BalanceProblem]) -> None:
    best = [step_time_s(problem, balance(problem).units) for problem in cases]
    tight = [not fits(problem, balance(problem, "proportional").units) for problem in cases]
    rows = []
    for name in SOLVERS:
        seconds: List[float] = []
        found = [timed(lambda problem=problem: SOLVERS[name](problem), seconds) for problem in cases]
        used = [max(memory_utilisation(problem, own_units(problem, answer))) for problem, answer in zip(cases, found)]
        over = [utilisation for utilisation in used if utilisation > 1 + 1e-9]
        slower = [step_time_s(problem, answer.units) / optimum
                  for problem, answer, optimum, is_tight in zip(cases, found, best, tight)
                  if is_tight and fits(problem, answer.units)]
        every = [step_time_s(problem, answer.units) / optimum for problem, answer, optimum in zip(cases, found, best)]
        equal = sum(ratio <= 1 + 1e-12 for ratio in slower)
        rows.append([name, percent(len(over), len(cases)), f"{100 * max(used):.0f}%", str(len(slower))]
                    + ratios(slower) + [percent(equal, len(slower)) if slower else "-"]
                    + [f"{statistics.mean(every):.3f}",
                       f"{statistics.mean(waste(p, a.units) for p, a in zip(cases, found)):.4f}",
                       f"{1e6 * statistics.mean(seconds):.0f}"])
    console.print(table(
        f"within a TaskGraph: {len(cases)} cases, {sum(tight)} of them where loads in proportion to speed are over memory",
        ["algorithm", "over memory", "worst memory", "tight cases that fit", "step / exact: mean", "95%", "max",
         "optimal", "all, fit or not: mean", "Formula 1", "us/call"], rows))


def report_stages(console: Console, cases: Sequence[PartitionProblem]) -> None:
    best = [partition_latency_s(problem, exact_stages(problem)) for problem in cases]
    rows = []
    for name, solve in STAGE_SOLVERS.items():
        seconds: List[float] = []
        found = [timed(lambda problem=problem, solve=solve: solve(problem), seconds) for problem in cases]
        ok = [partition_fits(problem, answer) for problem, answer in zip(cases, found)]
        slower = [partition_latency_s(problem, answer) / optimum
                  for problem, answer, optimum, fit in zip(cases, found, best, ok) if fit]
        equal = sum(ratio <= 1 + 1e-9 for ratio in slower)
        rows.append([name, percent(len(cases) - sum(ok), len(cases)), str(len(slower))] + ratios(slower)
                    + [percent(equal, len(slower)) if slower else "-", f"{1e3 * statistics.mean(seconds):.2f}"])
    console.print(table(f"between TaskGraphs: {len(cases)} models and pipelines", [
        "algorithm", "over memory", "fit", "latency / exact: mean", "95%", "max", "optimal", "ms/call"], rows))


def report_named(console: Console) -> None:
    """The case that shows the defect of the printed algorithm."""
    problem = BalanceProblem((4.0, 1.0, 1.0), (10.0, 12.0, 12.0), 30.0, 64)
    rows: List[List[str]] = []
    for name in SOLVERS:
        found = SOLVERS[name](problem)
        units = own_units(problem, found)
        rows.append([name, ", ".join(f"{unit:.2f}" for unit in units), f"{100 * max(memory_utilisation(problem, units)):.1f}%",
                     f"{step_time_s(problem, found.units):.4f}"])
    console.print(table("speeds 4:1:1, memories 10/12/12, need 30, batch 64", [
        "algorithm", "samples", "worst memory", "step time"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--stage-cases", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    console = Console(width=160)
    report_named(console)
    report_intra(console, list(generate_cases(arguments.cases, arguments.seed)))
    report_stages(console, list(generate_stage_cases(arguments.stage_cases, arguments.seed)))


if __name__ == "__main__":
    main()
