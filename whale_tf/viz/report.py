"""Writes a simulation as one self-contained HTML page: no network, no scripts, no other files."""

from __future__ import annotations

import html
from string import Template
from typing import Iterable, List, Optional, Sequence

from whale_tf.errors import memory_text, seconds_text
from whale_tf.simulator.result import Simulation
from whale_tf.simulator.trace import Trace, trace_of
from whale_tf.viz.timeline import memory_figure, svg_text, timeline_figure

_PAGE = Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>$title</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1240px; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.facts { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
.fact { border: 1px solid #ddd; border-radius: 6px; padding: .5rem .9rem; min-width: 8rem; }
.fact b { display: block; font-size: 1.25rem; } .fact span { color: #666; font-size: .85rem; }
.bottleneck { border-left: 4px solid #e8a33d; background: #fdf6ea; padding: .6rem .9rem; }
.bad { border-color: #d65f5f; background: #fbeeee; }
table { border-collapse: collapse; font-size: .9rem; } th, td { padding: .25rem .8rem; text-align: right; }
th { border-bottom: 1px solid #999; } td:first-child, th:first-child { text-align: left; }
svg { width: 100%; height: auto; }
</style></head><body>
<h1>$title</h1><p>$subtitle</p>
<div class="facts">$facts</div>
<p class="bottleneck$bad">$bottleneck</p>
$pictures
<h2>Devices</h2>$devices
<h2>Links</h2>$links
</body></html>
""")


def html_report(result: Simulation, title: str = "", measured: Optional[Trace] = None) -> str:
    """The page: the output of ``whale simulate``, the timeline and the memory curve, and below them the ``measured`` timeline.

    A plan that runs out of memory has no timeline; the page gives the reason instead.
    """
    title = title or f"{result.subject.model} on {result.cluster.name}"
    stages, micro_batches = len(result.program.stages), result.subject.num_micro_batch
    subtitle = (f"{len(result.representative)} devices, {stages} stages, {micro_batches} micro-batches "
                f"of {result.subject.samples // micro_batches} examples, schedule {result.subject.schedule}")
    return _PAGE.substitute(
        title=html.escape(title), subtitle=html.escape(subtitle), facts=_facts(result), bad=" bad" if result.oom else "",
        bottleneck=html.escape(result.bottleneck()), pictures=_pictures(result, measured), devices=_devices(result),
        links=_links(result))


def write_report(path: str, result: Simulation, title: str = "", measured: Optional[Trace] = None) -> None:
    with open(path, "w", encoding="utf8") as handle:
        handle.write(html_report(result, title, measured))


def _facts(result: Simulation) -> str:
    facts = (
        ("step time", seconds_text(result.step_time_s)),
        ("samples per second", f"{result.samples_per_s:.4g}"),
        ("not computing", f"{result.bubble:.1%}"),
        ("communication exposed", seconds_text(result.exposed_communication_s)),
        ("MFU", f"{result.mfu:.1%}"),
        ("peak memory", memory_text(max(result.peak_memory_bytes))),
        ("fits", "no" if result.oom else "yes"),
    )
    return "".join('<div class="fact"><span>{}</span><b>{}</b></div>'.format(*fact) for fact in facts)


def _pictures(result: Simulation, measured: Optional[Trace]) -> str:
    if result.oom:
        return ""
    trace = trace_of(result)
    parts = ["<h2>Timeline</h2>", svg_text(timeline_figure(trace)),
             "<h2>Memory</h2>", svg_text(memory_figure(trace, result.limits_bytes))]
    if measured is not None:
        parts += ["<h2>Timeline, measured</h2>", svg_text(timeline_figure(measured))]
    return "\n".join(parts)


def _devices(result: Simulation) -> str:
    rows: List[Sequence[str]] = []
    for use, size, curve in zip(result.devices, result.class_sizes(), result.memory):
        step = result.step_time_s
        largest = max(curve.at_peak, key=lambda name: curve.at_peak[name]) if curve.at_peak else ""
        rows.append((
            f"device {use.device}" + (f" and {size - 1} like it" if size > 1 else ""), str(use.stage),
            f"{use.computation_s / step:.1%}", f"{use.exposed_s / step:.1%}", f"{use.bubble_s / step:.1%}", f"{use.mfu:.1%}",
            memory_text(use.peak_memory_bytes), "out of memory" if use.oom else "fits", largest))
    return _table(("", "stage", "computes", "communication exposed", "idle", "MFU", "peak", "", "most of the peak"), rows)


def _links(result: Simulation) -> str:
    return _table(
        ("", "in a step", "of the step at full speed"),
        [(use.name, memory_text(use.bytes), f"{use.utilisation:.1%}") for use in result.links[:12]])


def _table(header: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["<tr>{}</tr>".format("".join(f"<th>{html.escape(cell)}</th>" for cell in header))]
    lines += ["<tr>{}</tr>".format("".join(f"<td>{html.escape(cell)}</td>" for cell in row)) for row in rows]
    return "<table>{}</table>".format("".join(lines))
