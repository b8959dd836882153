"""Draws timelines and memory curves (PNG or SVG) from a predicted or measured trace.

Colours are those of DAPPLE's Fig. 4: forward blue, backward green, idle grey; the number in a block is its micro-batch.
"""

from __future__ import annotations

import io
import re
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf.cluster.hardware import GIB
from whale_tf.errors import MissingPackageError, memory_text
from whale_tf.simulator.trace import Trace, TraceEvent

try:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
except ImportError as error:
    raise MissingPackageError(f'pictures need matplotlib ({error}); install it: pip install "whale_tf[viz]"') from error

COLOURS = {"forward": "#5b8fd6", "backward": "#6dbb63", "weight": "#b7dca0", "recompute": "#a9c9f2", "update": "#8e6bb8",
           "added": "#8a8a8a"}
FEATURE_COLOUR, GRADIENT_COLOUR, IDLE_COLOUR = "#e8a33d", "#d65f5f", "#e9e9e9"
MAX_ROWS = 32
WIDE = 8.0  # inches: wider pictures have room for all of a legend in one row


class Block(NamedTuple):
    """Consecutive tasks of one kind, micro-batch and stage on one device: a call of the Program."""

    device: int
    lane: int
    kind: str
    micro_batch: int
    stage: int
    start_s: float
    end_s: float


def blocks_of(events: Sequence[TraceEvent], gap_s: float) -> List[Block]:
    """Joins tasks into blocks.  A pause longer than ``gap_s`` starts a new block."""
    rows: Dict[Tuple[int, int], List[TraceEvent]] = {}
    for event in events:
        rows.setdefault((event.device, event.lane), []).append(event)
    blocks: List[Block] = []
    for (device, lane), row in sorted(rows.items()):
        last: List[Block] = []
        for event in sorted(row, key=lambda one: (one.start_s, one.duration_s)):
            end_s = event.start_s + event.duration_s
            what = (event.kind, event.micro_batch, event.stage)
            if last and (last[0].kind, last[0].micro_batch, last[0].stage) == what and event.start_s - last[0].end_s <= gap_s:
                last[0] = last[0]._replace(end_s=max(end_s, last[0].end_s))
            else:
                blocks += last
                last = [Block(device, lane, event.kind, event.micro_batch, event.stage, event.start_s, end_s)]
        blocks += last
    return blocks


def new_figure(width: float, height: float) -> Tuple[Figure, Any]:
    """A figure of the given size in inches, and its axes."""
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot(1, 1, 1)


def timeline_figure(trace: Trace, title: str = "", width: float = 14, end_s: float = 0.0,
                    labels: Optional[Mapping[int, str]] = None, gap_s: float = 0.0) -> Figure:
    """One row per device: computation as tall blocks with their micro-batch, communication as thin bars below.

    Args:
        width: in inches.
        end_s: of the axis of time; 0: where the trace ends.
        labels: device -> name of its row; None: its stage and number.
        gap_s: the longest pause within a block; 0: a two-thousandth of the axis.
    """
    figure, axes = new_figure(width, _height(trace, width))
    _draw_timeline(axes, trace, title, width, end_s, labels, gap_s)
    figure.tight_layout()
    return figure


def timelines_figure(traces: Sequence[Trace], titles: Sequence[str], width: float = 14,
                     labels: Sequence[Mapping[int, str]] = (), gaps_s: Sequence[float] = ()) -> Figure:
    """The timelines of several traces one above the other, on one axis of time; see :func:`timeline_figure`."""
    heights = [_height(trace, width) for trace in traces]
    figure = Figure(figsize=(width, sum(heights)))
    FigureCanvasAgg(figure)
    every = figure.subplots(len(traces), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    end_s = max(trace.end_s for trace in traces)
    for place, trace in enumerate(traces):
        _draw_timeline(every[place][0], trace, titles[place], width, end_s, labels[place] if labels else None,
                       gaps_s[place] if gaps_s else 0.0)
    figure.tight_layout()
    return figure


def _height(trace: Trace, width: float) -> float:
    return (1.6 if width > WIDE else 1.9) + 0.75 * len(trace.devices[:MAX_ROWS])


def _draw_timeline(axes: Any, trace: Trace, title: str, width: float, end_s: float, labels: Optional[Mapping[int, str]],
                   gap_s: float) -> None:
    devices, is_wide = trace.devices[:MAX_ROWS], width > WIDE
    end_s = end_s or trace.end_s or 1.0
    stage_of = {event.device: event.stage for event in trace.events}
    for row in range(len(devices)):
        axes.barh(row, end_s * 1e3, 0.56, left=0.0, color=IDLE_COLOUR, linewidth=0)
    row_of = {device: row for row, device in enumerate(devices)}
    for block in blocks_of([event for event in trace.events if event.device in row_of], gap_s or end_s / 2000.0):
        _draw(axes, row_of[block.device], block, end_s, 14.0 / width)
    axes.set_yticks(range(len(devices)))
    axes.set_yticklabels([labels[device] if labels else f"stage {stage_of[device]}, device {device}" for device in devices])
    axes.set_ylim(len(devices) - 0.4, -0.6)
    axes.set_xlim(0.0, end_s * 1e3)
    axes.set_xlabel("milliseconds")
    hidden = len(trace.devices) - len(devices)
    name = title or trace.about or trace.name
    axes.set_title(name + (f" ({hidden} more devices)" if hidden else ""), fontsize=11, loc="left", pad=24 if is_wide else 40)
    kinds = {event.kind for event in trace.events if event.lane == 0}
    lanes = {event.lane for event in trace.events}
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in kinds]
    handles += [
        Patch(color=colour, label=label)
        for lane, colour, label in (
            (1, FEATURE_COLOUR, "feature communication"),
            (2, GRADIENT_COLOUR, "gradient communication"))
        if lane in lanes
    ]
    axes.legend(
        handles=handles + [Patch(color=IDLE_COLOUR, label="idle")], loc="lower left", ncol=8 if is_wide else 3, frameon=False,
        bbox_to_anchor=(0.0, 1.0), fontsize=9, borderaxespad=0.2, handlelength=1.2,
        columnspacing=2.0 if is_wide else 0.8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw(axes, row: int, block: Block, end_s: float, narrower: float) -> None:  # type: ignore[no-untyped-def]
    start_ms, wide_ms = block.start_s * 1e3, (block.end_s - block.start_s) * 1e3
    if block.lane:
        axes.barh(
            row + (0.335 if block.lane == 1 else 0.41), wide_ms, 0.07, left=start_ms,
            color=FEATURE_COLOUR if block.lane == 1 else GRADIENT_COLOUR, linewidth=0)
        return
    axes.barh(row, wide_ms, 0.56, left=start_ms, color=COLOURS.get(block.kind, "#999999"), edgecolor="white",
              linewidth=0.6 if wide_ms > end_s * 1e3 * 0.003 else 0.0)  # its edges would cover a narrower block
    if block.micro_batch >= 0 and wide_ms > end_s * 1e3 * 0.008 * narrower:
        axes.text(
            start_ms + wide_ms / 2.0, row, str(block.micro_batch), ha="center", va="center", fontsize=8, color="white",
            fontweight="bold")


def memory_figure(trace: Trace, limits_bytes: Mapping[int, float], title: str = "") -> Figure:
    """Memory over the step, one line per device, with the devices' limits dashed."""
    figure, axes = new_figure(14, 3.6)
    stage_of = {event.device: event.stage for event in trace.events}
    for device in sorted(trace.memory)[:MAX_ROWS]:
        times, level = trace.memory[device]
        axes.step(
            [t * 1e3 for t in times], [size / GIB for size in level], where="post", linewidth=1.1,
            label=f"stage {stage_of.get(device, device)}, device {device}")
    highest = max((max(level) for _, level in trace.memory.values()), default=0.0) / GIB
    for limit in sorted(set(limits_bytes.values())):
        if limit / GIB < 3 * highest:
            axes.axhline(limit / GIB, color="#444444", linestyle="--", linewidth=1.0)
            axes.annotate(
                f"limit {memory_text(limit)}", (0.995, limit / GIB), ha="right", va="bottom", xycoords=("axes fraction", "data"),
                fontsize=8)
    axes.set_xlim(0.0, (trace.end_s or 1.0) * 1e3)
    axes.set_ylim(0.0, None)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("GiB")
    axes.set_title(title or ", ".join(filter(None, (trace.about, "memory"))), fontsize=11, loc="left")
    if len(trace.memory) <= 12:
        axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    return figure


def save(figure: Figure, path: str) -> None:
    """Write a picture in the format of the suffix (``.png``, ``.svg``)."""
    if path.endswith(".svg"):
        with open(path, "w", encoding="utf8") as file:
            file.write(svg_text(figure))
    else:
        figure.savefig(path, dpi=130)


def svg_text(figure: Figure) -> str:
    """The picture as an ``<svg>`` element for a page, with the same bytes every time."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "whale_tf", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
