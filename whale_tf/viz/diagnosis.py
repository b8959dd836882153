"""Writes what ``whale doctor`` found as one self-contained HTML page: no network, no scripts, no other files.

The measured step is above the simulated one, on one axis of time.  Each picture is on the page twice; narrow screens show the
narrow one, because a wide picture made small has letters that nobody can read.
"""

from __future__ import annotations

import html
from string import Template
from typing import List, Sequence, Tuple

from whale_tf.diagnosis.diagnose import Cause, Diagnosis
from whale_tf.diagnosis.record import Record
from whale_tf.diagnosis.traces import row_names, traces_of
from whale_tf.errors import seconds_text
from whale_tf.simulator.trace import Trace
from whale_tf.viz.timeline import Figure, svg_text, timeline_figure, timelines_figure

WIDE, NARROW = 13.0, 4.9  # inches
PARTS = (("waiting for examples", "#e8a33d"), ("its ops as the Program orders them", "#5b8fd6"),
         ("launches, and what is not explained", "#b9b9b9"))

_PAGE = Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1060px; padding: 0 1rem;
       color: #222; background: #fff; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
.about { color: #666; margin: 0 0 1.2rem; }
.whole { display: flex; height: 1.5rem; border-radius: 4px; overflow: hidden; background: #eee; }
.parts { list-style: none; padding: 0; margin: .6rem 0; display: flex; flex-wrap: wrap; gap: .3rem 1.6rem; }
.parts i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .45rem; }
.causes { list-style: none; padding: 0; margin: 0; }
.causes li { border: 1px solid #ddd; border-radius: 8px; padding: .8rem 1rem; margin-bottom: .8rem; }
.causes h3 { font-size: 1.05rem; margin: 0; display: flex; justify-content: space-between; gap: 1rem; }
.causes h3 b { white-space: nowrap; }
.bar { height: .5rem; border-radius: 4px; background: #eee; margin: .5rem 0 .7rem; }
.bar div { height: 100%; border-radius: 4px; background: #d65f5f; }
.causes p { margin: .25rem 0; overflow-wrap: anywhere; } .rest { color: #666; }
table { border-collapse: collapse; } th, td { padding: .25rem 1rem .25rem 0; text-align: right; font-weight: normal; }
th { border-bottom: 1px solid #999; color: #666; } td:first-child, th:first-child { text-align: left; }
svg { width: 100%; height: auto; } .narrow { display: none; }
@media (max-width: 700px) { body { margin: 1.2rem auto; } .wide { display: none; } .narrow { display: block; } }
</style></head><body>
<h1>$title</h1>
<p class="about">$about</p>
<div class="whole">$whole</div>
<ul class="parts">$parts</ul>
<h2>Causes</h2>
$causes
<h2>The measured step, and the simulated one below it</h2>
<p class="rest">$pictured</p>
$pictures
<h2>What devices compute in a step</h2>
<table><tr><th>device</th><th>measured</th><th>simulated</th></tr>$devices</table>
</body></html>
""")


def diagnosis_page(record: Record, found: Diagnosis) -> str:
    """The page.

    Args:
        found: the diagnosis of ``record``.
    """
    steps = min(process.steps for process in record.processes)
    count, parts = len(record.processes), record.plan.num_micro_batch
    about = (f"Median of {steps} steps, {count} process{'es' * (count > 1)}, {record.plan.num_devices} devices, "
             f"{parts} micro-batch{'es' * (parts > 1)}, cluster {record.cluster.name}")
    seconds = found.input_s, found.simulated_s, found.left_s
    whole = max(sum(seconds), found.period_s)
    pictures, pictured = _pictures(record)
    return _PAGE.substitute(
        title=html.escape(f"A step takes {seconds_text(found.period_s)}"), about=html.escape(about),
        whole="".join(f'<div style="width:{_percent(one, whole)};background:{colour}"></div>'
                      for one, (_, colour) in zip(seconds, PARTS)),
        parts="".join(f'<li><i style="background:{colour}"></i>{html.escape(name)}: <b>{seconds_text(one)}</b></li>'
                      for one, (name, colour) in zip(seconds, PARTS)),
        causes=_causes(found), pictures=pictures, pictured=html.escape(pictured),
        devices="".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in (
            row.device, seconds_text(row.measured_s), seconds_text(row.simulated_s))) + "</tr>" for row in found.devices))


def write_diagnosis(path: str, record: Record, found: Diagnosis) -> None:
    """Write the page to a file."""
    with open(path, "w", encoding="utf8") as handle:
        handle.write(diagnosis_page(record, found))


def _causes(found: Diagnosis) -> str:
    if not found.causes:
        return "<p>No cause costs a twentieth of the step: only faster devices, fewer computations or more devices help.</p>"
    rows = "".join(_cause(place, one, found.period_s) for place, one in enumerate(found.causes, 1))
    return f'<ol class="causes">{rows}</ol>'


def _cause(place: int, cause: Cause, period_s: float) -> str:
    share = cause.gain_s / period_s
    return (f"<li><h3><span>{place}. {html.escape(cause.kind)}</span><b>{seconds_text(cause.gain_s)} ({share:.0%})</b></h3>"
            f'<div class="bar"><div style="width:{_percent(cause.gain_s, period_s)}"></div></div>'
            f"<p>{html.escape(cause.found)}</p><p><b>What to do:</b> {html.escape(cause.fix)}</p>"
            f'<p class="rest">Without it, a step takes about {seconds_text(max(0.0, period_s - cause.gain_s))}.</p></li>')


def _percent(seconds: float, whole_s: float) -> str:
    return f"{100.0 * min(1.0, seconds / whole_s) if whole_s > 0 else 0.0:.2f}%"


def step_figure(record: Record, traces: Sequence[Trace]) -> Figure:
    """Steps as ``whale simulate`` draws them, one below the other, on one axis of time.

    Args:
        traces: some of the two of ``record``.
    """
    shown = [trace for trace in traces if trace.events]
    parts = record.plan.num_micro_batch
    about = f"{record.plan.num_devices} devices, {parts} micro-batch{'es' * (parts > 1)}"
    return timelines_figure(shown, [f"{trace.name}: {seconds_text(trace.end_s)}, {about}" for trace in shown],
                            labels=[row_names(record, trace) for trace in shown], gaps_s=list(map(_gap_s, shown)))


def _gap_s(trace: Trace) -> float:
    """The longest pause within a call: TensorFlow's executor makes some between the ops that were measured."""
    return trace.end_s / 100.0 if trace.name == "measured" else 0.0


def _pictures(record: Record) -> Tuple[str, str]:
    """Both steps, and a sentence about them."""
    measured, simulated = traces_of(record)
    pairs = [(trace, title) for trace, title in ((measured, "measured"), (simulated, "simulated")) if trace.events]
    end_s = max((trace.end_s for trace, _ in pairs), default=0.0)
    text = ("A traced step, which is slower than one without a trace; and the same Program in the simulator with the times that "
            "the traced ops took on average. Thin bars are messages, in the measured step with the time of waiting for them.")
    if len(record.processes) > 1:
        text += " Each process' measured step begins at 0."
    parts: List[str] = []
    for trace, title in pairs:
        for kind, width in (("wide", WIDE), ("narrow", NARROW)):
            names = row_names(record, trace, with_stages=kind == "wide")
            picture = timeline_figure(trace, title, width, end_s, names, _gap_s(trace))
            parts.append(f'<div class="{kind}">{svg_text(picture)}</div>')
    return "\n".join(parts), text
