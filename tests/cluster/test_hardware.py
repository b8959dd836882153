"""The hardware table: complete, sourced, and consistent in itself."""
from __future__ import annotations

import pytest

from whale_tf.cluster import DEVICE_TYPES
from whale_tf.cluster.hardware import ALIASES, CUBE_MESH, FABRICS, device_type
from whale_tf.errors import ClusterError


def test_table_has_what_the_papers_ran_on_and_current_devices() -> None:
    assert {"P100-16GB", "V100-16GB", "V100-32GB", "T4", "A10", "A100-40GB", "A100-80GB", "H100-80GB", "H200-141GB",
            "L40S", "TitanXp", "CPU"} <= set(DEVICE_TYPES)


@pytest.mark.parametrize("name", sorted(DEVICE_TYPES))
def test_every_row_is_sourced_and_ordered(name: str) -> None:
    row = DEVICE_TYPES[name]
    assert len(row.source) > 20 and row.fabric in FABRICS and row.kind in ("CPU", "GPU")
    assert 0 < row.fp64 <= row.fp32 <= row.tf32 and row.fp32 <= row.fp16 and row.fp32 <= row.bf16
    assert row.memory_bytes >= 12 << 30 and row.memory_bandwidth_bytes_per_s >= 1e10
    # a roofline's ridge lies where real chips have it
    assert 4 <= row.fp32 / row.memory_bandwidth_bytes_per_s <= 120


def test_every_gpu_has_lanes_in_the_mesh() -> None:
    lanes = [0] * 8
    for a, b, count in CUBE_MESH:
        lanes[a] += count
        lanes[b] += count
    assert lanes == [6] * 8 and len({(a, b) for a, b, _ in CUBE_MESH}) == 16


def test_names_in_any_case_and_aliases() -> None:
    assert device_type("v100-32gb") is device_type("V100") is DEVICE_TYPES["V100-32GB"]
    assert all(target in DEVICE_TYPES for target in ALIASES.values())


def test_nearest_name_is_suggested() -> None:
    with pytest.raises(ClusterError, match="unknown device type 'A100-80G'.*Did you mean 'A100-80GB'.*device_types"):
        device_type("A100-80G")
