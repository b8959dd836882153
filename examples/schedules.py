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
    "gpipe": Schedule("All forward passes first (GPipe).", "3 (S - 1)", "all micro-batches"),
    "backward_first": Schedule(
        "1F1B: a micro-batch's backward pass as early as possible (DAPPLE, PipeDream-Flush).", "3 (S - 1)", "S - i on stage i"),
    "zero_bubble_h1": Schedule(
        "ZB-H1: gradients of weights (light) apart from those of activations, where a stage would wait. Nobody waits for the "
        "first stage's gradients of activations, so it stays in one piece.", "S - 1", "S"),
    "zero_bubble_h2": Schedule("ZB-H2: with more forward passes ahead.", "0, but for a late start", "2 S - 1"),
    "interleaved": Schedule(
        "Interleaved 1F1B (Megatron): device i runs TaskGraphs i, S + i and so on, V of them.", "3 (S - 1) / V",
        "(2 (S - i) - 1) / V + S (V - 1) / V on device i", 2 * DEVICES),
    "zero_bubble_v": Schedule(
        "The V schedule: device i runs TaskGraphs i and 2 S - 1 - i, there and back.", "0, but for a late start", "S",
        2 * DEVICES),
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

`pipeline.schedule` says in which order the devices of a pipeline run micro-batches: F is a forward pass, B the backward pass, or
only what the stage before waits for, and W the gradients of weights. With F, B and W equally long, a device waits and holds (in
micro-batches of a whole stage's activations) as the table says, for S stages. All stages together take `S - 1` F longer than one
device's steps even without waits, since the last stage begins so late; so ZB-H2 gains on ZB-H1 only where messages take long.
`auto` takes the fastest that fits the devices' memory, as simulated; `wh.explain()` names the others.

The pictures are of {DEVICES} devices and {MICRO_BATCHES} micro-batches, in nominal times, with `pipeline.warmup: "PA"`.
`python -m examples.schedules docs` makes this page.

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
