"""``whale doctor``."""
from __future__ import annotations

import glob
import json
import os
from typing import List, Optional, Sequence

import typer

from whale_tf.cli.common import reported
from whale_tf.diagnosis.diagnose import diagnose
from whale_tf.diagnosis.record import Record, parse, to_json, together
from whale_tf.diagnosis.text import text_of
from whale_tf.diagnosis.traces import traces_of
from whale_tf.documents import check_files
from whale_tf.simulator.trace import write_chrome


def doctor(
    records: List[str] = typer.Argument(..., help="what a run measured: the file of `whale run --doctor --record FILE`, or those "
                                                  "of wh.doctor(path=FILE) in each process"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
    page: Optional[str] = typer.Option(None, "--html", help="write the causes, and both steps as pictures, as one HTML file"),
    trace: Optional[str] = typer.Option(None, help="write the measured and the simulated step for chrome://tracing or Perfetto"),
    timeline: Optional[str] = typer.Option(None, help="draw the measured and the simulated step here (.png or .svg)"),
) -> None:
    """Say why measured steps take as long as they do: the causes, each with what it costs according to the simulator."""
    with reported(2):
        check_files({"--trace": trace, "--html": page}, {"--timeline": timeline})
        record = together([parse(path) for path in records])
        if page is not None:
            from whale_tf.viz.diagnosis import write_diagnosis  # matplotlib takes a second to load
            write_diagnosis(page, record, diagnose(record))
        if timeline is not None:
            from whale_tf.viz.diagnosis import step_figure
            from whale_tf.viz.timeline import save
            save(step_figure(record, traces_of(record)), timeline)
        if trace is not None:
            write_chrome(trace, traces_of(record))
        typer.echo(answer(record, as_json))


def answer(record: Record, as_json: bool = False) -> str:
    """The diagnosis of a run, in words or as JSON."""
    found = diagnose(record)
    if not as_json:
        return text_of(record, found)
    return json.dumps(dict(found._asdict(), causes=[cause._asdict() for cause in found.causes],
                           devices=[row._asdict() for row in found.devices]))


def of_run(folder: str, path: Optional[str]) -> str:
    """The diagnosis of the processes that have left records in a folder.

    Args:
        path: where to keep them as one file.
    """
    files: Sequence[str] = sorted(glob.glob(os.path.join(folder, "*.json")))
    record = together([parse(name) for name in files])
    if path is not None:
        with open(path, "w", encoding="utf8") as handle:
            handle.write(to_json(record))
    return answer(record)
