"""How messages say sizes of memory."""

from __future__ import annotations

import pytest

from tests.planner.results import profile
from whale_tf.cluster import Cluster
from whale_tf.errors import ClusterError, InfeasibleError, memory_text
from whale_tf.planner.search import search


def test_units_of_sizes() -> None:
    assert [memory_text(size) for size in (0, 512, 70_000, 2**20, 2**30 - 1, 2**30, 1.5 * 2**30)] == [
        "0.00 MiB", "512 bytes", "0.07 MiB", "1.00 MiB", "1024.00 MiB", "1.00 GiB", "1.50 GiB"]


def test_tiny_limit_is_told_as_it_is() -> None:
    layers = [{"name": f"l{i}", "forward_flops": 1e9, "parameter_bytes": 10 ** 6, "output_bytes": 0} for i in range(2)]
    with pytest.raises(InfeasibleError, match="[0-9.]+ MiB for a step.* needs [0-9.]+ MiB on its fullest device"):
        search(profile(layers=layers, name="small"), Cluster.parse("dapple-b:2").limited(2.0**20), 8)


def test_negative_limit_is_told_in_gib() -> None:
    with pytest.raises(ClusterError, match="the memory limit is -3.00 GiB a device, expected more than 0"):
        Cluster.parse("dapple-b:2").limited(-3 * 2.0**30)
