"""The HTML report in a real browser, without a network; needs chromium or chrome on the PATH."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any, Dict, Tuple

import matplotlib.image
import numpy as np
import pytest

from whale_tf.cluster import Cluster
from whale_tf.simulator import simulate, uniform_3d
from whale_tf.simulator.zoo.vision import mlp
from whale_tf.viz.report import write_report
from whale_tf.viz.timeline import COLOURS

BROWSER = next((path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None)


def screenshot(page: str, image: str) -> np.ndarray:
    """Pixels ``[row, column, rgb]`` in 0 to 255."""
    subprocess.run(
        [
            str(BROWSER),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--window-size=1300,1500",
            "--screenshot=" + image,
            "file://" + page,
        ],
        check=True,
        timeout=120,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return np.round(matplotlib.image.imread(image)[..., :3] * 255)


def rgb(colour: str) -> Tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on the PATH")
def test_report_shows_one_forward_one_backward(tmp_path: Any) -> None:
    page = str(tmp_path / "report.html")
    write_report(page, simulate(uniform_3d(mlp(64), 1, 1, 4, 8), Cluster.parse("hc2")))
    pixels = screenshot(page, str(tmp_path / "report.png"))
    found: Dict[str, np.ndarray] = {
        kind: np.all(np.abs(pixels - rgb(COLOURS[kind])) <= 3, axis=-1) for kind in ("forward", "backward")
    }
    for mask in found.values():
        assert mask.sum() > 2000
    # four rows of blocks, and on the last stage forward and backward take turns eight times
    rows = np.nonzero(found["backward"].sum(axis=1) > 40)[0]
    bands = np.split(rows, np.nonzero(np.diff(rows) > 3)[0] + 1)
    assert len(bands) == 4
    middle = int(bands[-1].mean()) - len(bands[-1]) // 3  # above the numbers
    line = [
        ("F" if found["forward"][middle, x] else "B")
        for x in range(pixels.shape[1])
        if found["forward"][middle, x] or found["backward"][middle, x]
    ]
    turns = [a for a, b in zip(line, line[1:] + [""]) if a != b]
    assert "".join(turns) == "FB" * 8
