"""In which order the devices of a pipeline run its micro-batches, under every schedule.

    python -m examples.schedules              prints the orders
    python -m examples.schedules docs         writes docs/schedules.md and its pictures
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Dict, NamedTuple

import tensorflow.compat.v1 as tf

import whale_tf as wh
from examples.programs import program_under, write

MICRO_BATCHES, DEVICES = 4, 2


class Schedule(NamedTuple):
    """``about``: a sentence; ``waits``, ``holds``: of S stages, as ``whale_tf/schedule`` says it; ``layers``: TaskGraphs."""

    about: str
    waits: str
    holds: str
    layers: int = DEVICES


SCHEDULES = {
    "gpipe": Schedule("GPipe: all forward passes come first.", "3 (S - 1)", "all micro-batches"),
    "backward_first": Schedule(
        "1F1B: each micro-batch's backward pass runs as early as possible (DAPPLE, PipeDream-Flush).", "3 (S - 1)",
        "S - i on stage i"),
    "zero_bubble_h1": Schedule(
        "ZB-H1: gradients of weights (light) are computed apart from those of activations, when a stage would wait. Nobody "
        "waits for the first stage's gradients of activations, so its backward pass stays in one piece.", "S - 1", "S"),
    "zero_bubble_h2": Schedule("ZB-H2: like ZB-H1, with more forward passes ahead.", "0, apart from a late start", "2 S - 1"),
    "interleaved": Schedule(
        "Interleaved 1F1B (Megatron): device i runs TaskGraphs i, S + i and so on, V in all.", "3 (S - 1) / V",
        "(2 (S - i) - 1) / V + S (V - 1) / V on device i", 2 * DEVICES),
    "zero_bubble_v": Schedule(
        "The V schedule: device i runs TaskGraphs i and 2 S - 1 - i, so the pipeline goes down the devices and back.",
        "0, apart from a late start", "S", 2 * DEVICES),
}


def program_of(name: str) -> Any:
    """The Program of a chain of layers, a TaskGraph each."""
    def build() -> tf.Tensor:
        h = tf.placeholder("float32", [16, 8], "x")
        for number in range(SCHEDULES[name].layers):
            with wh.replicate(1):
                h = tf.tanh(tf.matmul(h, tf.get_variable(f"w{number}", [8, 8], use_resource=True)))
                loss = tf.reduce_mean(h) if number == SCHEDULES[name].layers - 1 else None
        return loss

    config = {"num_micro_batch": MICRO_BATCHES, "pipeline.schedule": name, "pipeline.warmup": "PA"}
    return program_under(config, DEVICES, build)


def orders(program: Any) -> Dict[int, str]:
    """Of each device: `F0 B0 W0'`, the primes of a second TaskGraph."""
    found: Dict[int, Dict[int, str]] = {}
    first: Dict[int, int] = {}
    for number, call in enumerate(program.calls):
        body = program.bodies[call.body]
        if body.step in ("forward", "backward", "weight"):
            device, = call.devices
            prime = "'" if body.task_graph != first.setdefault(device, body.task_graph) else ""
            found.setdefault(device, {})[number] = f"{body.step[0].upper()}{call.clone.m}{prime}"
    return {device: " ".join(steps.values()) for device, steps in sorted(found.items())}


def page(programs: Dict[str, Any]) -> str:
    """docs/schedules.md."""
    parts = [f"""# Schedules

The configuration key `pipeline.schedule` sets the order in which the devices of a pipeline run their micro-batches. `auto`
chooses the fastest schedule that fits the devices' memory according to the simulation, and `wh.explain()` names the others.

This page shows each schedule for {DEVICES} devices and {MICRO_BATCHES} micro-batches, in nominal times, with
`pipeline.warmup: "PA"`. F is a forward pass. B is a backward pass, or the part of it that the previous stage waits for. W
computes the gradients of weights.

The table says how long a device waits, and how much it holds, in a pipeline of S stages whose F, B and W take equally long. What
it holds is counted in micro-batches of a whole stage's activations. Even without waits, all stages together take `S - 1` F longer
than the steps of one device, because the last stage starts that late. ZB-H2 is therefore faster than ZB-H1 only if messages take
long. `python -m examples.schedules docs` generates this page.

| schedule | a device waits, in F | holds |
| --- | --- | --- |"""]
    parts[0] += "".join(f"\n| `{name}` | {row.waits} | {row.holds} |" for name, row in SCHEDULES.items()) + "\n"
    for name, program in programs.items():
        lines = "".join(f"device {device}   {order}\n" for device, order in orders(program).items())
        parts.append(f"## {name}\n\n{SCHEDULES[name].about}\n\n![Each device's calls over time](schedules/{name}.svg)\n\n"
                     f"```\n{lines}```\n")
    return "\n".join(parts)


def main() -> None:
    programs = {name: program_of(name) for name in SCHEDULES}
    if len(sys.argv) < 2:
        for name, program in programs.items():
            print("\n".join([name] + [f"  device {device}   {order}" for device, order in orders(program).items()]))
        return
    write(Path(sys.argv[1]), "schedules", page(programs), programs)


if __name__ == "__main__":
    main()
