"""A diagnosis in words."""

from __future__ import annotations

from typing import List

from whale_tf.diagnosis.diagnose import Diagnosis
from whale_tf.diagnosis.record import Record
from whale_tf.errors import seconds_text


def text_of(record: Record, found: Diagnosis) -> str:
    """What was measured, beside the simulated step, and the causes, the most expensive first."""
    steps = min(process.steps for process in record.processes)
    lines = [f"whale doctor: a step takes {seconds_text(found.period_s)} (median of {steps} steps, "
             f"{len(record.processes)} process{'es' * (len(record.processes) > 1)}, {record.plan.num_devices} devices)",
             f"  waiting for examples                  {seconds_text(found.input_s)}",
             f"  its ops as the Program orders them    {seconds_text(found.simulated_s)}  (simulated with their measured times)",
             f"  launches, and what is not explained   {seconds_text(found.left_s)}"]
    for row in found.devices:
        lines.append(f"  device {row.device}: computes {seconds_text(row.measured_s)} of a step measured, "
                     f"{seconds_text(row.simulated_s)} simulated")
    lines += _causes(found)
    return "\n".join(lines) + "\n"


def _causes(found: Diagnosis) -> List[str]:
    if not found.causes:
        return ["no cause costs a twentieth of the step: only faster devices, fewer computations or more devices help"]
    lines = []
    for place, cause in enumerate(found.causes, 1):
        rest_s = max(0.0, found.period_s - cause.gain_s)
        lines.append(f"{place}. {cause.kind}: costs {seconds_text(cause.gain_s)} ({cause.gain_s / found.period_s:.0%}); without "
                     f"it a step takes about {seconds_text(rest_s)}")
        lines.append(f"   {cause.found}")
        lines.append(f"   what to do: {cause.fix}")
    return lines
