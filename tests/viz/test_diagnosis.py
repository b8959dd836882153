"""The page of ``whale doctor --html``."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any, Dict, List, Tuple

import pytest

from tests.command_line import call
from tests.diagnosis.test_diagnose import exact, record, simulated, with_run
from tests.simulator.test_step_graph import ONE, apart, plan
from whale_tf.cli import app
from whale_tf.diagnosis.diagnose import diagnose
from whale_tf.diagnosis.record import Ran, Record, to_json


class Elements(HTMLParser):
    """Counts tags, and keeps what is fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.counts: Dict[str, int] = {}
        self.fetched: List[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: List[Tuple[str, Any]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.fetched += [str(value) for name, value in attrs
                         if name in ("src", "href", "xlink:href") and not str(value).startswith("#")]


def of_pipeline() -> Record:
    """A pipeline whose first stage is too long, with one traced op on each device."""
    measured = exact(record(plan([0], [1], micro_batches=4), {"forward_a": 6.0, "weight_a": 6.0}))
    timeline = Ran("forward_a", "MatMul", 0, 0.0, 6.0), Ran("forward_b", "MatMul", 1, 6.0, 1.0)
    return measured._replace(processes=(measured.processes[0]._replace(timeline=timeline),))


def test_page_has_the_causes_in_order_and_both_steps(tmp_path: Any) -> None:
    measured = of_pipeline()
    (tmp_path / "run.json").write_text(to_json(measured))
    called = call(app, "doctor", str(tmp_path / "run.json"), "--html", str(tmp_path / "out.html"))
    assert called.exit_code == 0, called.output
    page = (tmp_path / "out.html").read_text(encoding="utf8")
    causes = diagnose(measured).causes
    assert len(causes) > 1 and re.findall(r"<span>\d+\. ([^<]+)</span>", page) == [one.kind for one in causes]
    found = Elements(page)
    assert found.counts["svg"] == 4 and not found.fetched and "script" not in found.counts  # each step wide and narrow
    assert page.index(">measured<") < page.index(">simulated<")
    assert page.count(">stage 1, device 1<") == page.count(">device 1<") == 2
    assert 'name="viewport"' in page and "max-width: 700px" in page


def test_both_steps_have_one_axis_of_time() -> None:
    from whale_tf.viz.diagnosis import diagnosis_page

    measured = of_pipeline()
    late = measured.processes[0]._replace(timeline=(Ran("forward_a", "MatMul", 0, 100.0, 6.0),))
    page = diagnosis_page(measured._replace(processes=(late,)), diagnose(measured))
    # measured wide, narrow; simulated wide, narrow
    ticks = [re.findall(r">(\d{3,})</text>", svg) for svg in page.split("<svg")[1:]]
    assert ticks[0] == ticks[2] and ticks[1] == ticks[3] and "100000" in ticks[0]


@pytest.mark.parametrize("devices", [1, 2])
def test_page_without_causes_or_traced_steps(devices: int) -> None:
    from whale_tf.viz.diagnosis import diagnosis_page

    measured = exact(record(plan([0], names=ONE) if devices == 1 else apart(), {}))
    page = diagnosis_page(measured, diagnose(measured))
    assert "No cause costs a twentieth" in page and Elements(page).counts["svg"] == 2


def test_names_of_the_script_are_text() -> None:
    from whale_tf.viz.diagnosis import diagnosis_page

    measured = record(plan([0], names=ONE), {})
    measured = with_run(measured, simulated(measured), 5.0)
    found = diagnose(measured)
    found = found._replace(causes=(found.causes[0]._replace(found="<script>w & b</script>"),))
    assert "&lt;script&gt;w &amp; b" in diagnosis_page(measured, found)
