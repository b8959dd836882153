"""Clusters: devices, the links between them, and their descriptions (docs/cluster.md)."""
from __future__ import annotations

from whale_tf.cluster.builtin import BUILTIN
from whale_tf.cluster.cluster import Cluster
from whale_tf.cluster.devices import PRECISIONS, Device, Link
from whale_tf.cluster.environment import Environment, read_environment
from whale_tf.cluster.hardware import DEVICE_TYPES, DeviceType
from whale_tf.cluster.processes import (
    LAUNCHED,
    MOST,
    ONE_PROCESS,
    Processes,
    device_names,
    devices_of_processes,
    find_processes,
    host_name,
    process_of,
    process_speeds,
    whole_cluster,
)

__all__ = ["BUILTIN", "Cluster", "DEVICE_TYPES", "Device", "DeviceType", "Environment", "LAUNCHED", "Link", "MOST",
           "ONE_PROCESS", "PRECISIONS", "Processes", "device_names", "devices_of_processes", "find_processes", "host_name",
           "process_of", "process_speeds", "read_environment", "whole_cluster"]
