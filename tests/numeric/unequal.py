"""Described clusters of logical CPU devices that differ in speed and memory."""
from __future__ import annotations

from typing import Any, Dict, Sequence, Tuple

FAST_LINK = {"local": {"bandwidth_gbytes_per_s": 1000, "latency_us": 0.01}}


def described(devices: Sequence[Tuple[float, float]]) -> Dict[str, Any]:
    """One node with a device for each (MFLOP/s, MiB): slow enough that arithmetic, not links, decides."""
    types = {"slow-{:g}-{:g}".format(*device): {
        "kind": "CPU", "memory_bytes": int(device[1] * 2 ** 20), "fp32": device[0] * 1e6, "fabric": "cpu",
        "memory_bandwidth_bytes_per_s": device[0] * 1e7} for device in devices}
    return {"name": "unequal", "device_types": types,
            "nodes": [{"devices": ["slow-{:g}-{:g}:1".format(*device) for device in devices], "links": FAST_LINK}]}


def equal(count: int) -> Dict[str, Any]:
    return described([(100, 1024)] * count)
