"""Clusters: devices, links between them, and how to describe them (docs/cluster.md)."""
from __future__ import annotations

from whale_tf.cluster.builtin import BUILTIN
from whale_tf.cluster.cluster import Cluster
from whale_tf.cluster.devices import PRECISIONS, Device, Link
from whale_tf.cluster.environment import Environment, read_environment
from whale_tf.cluster.hardware import DEVICE_TYPES, DeviceType

__all__ = ["BUILTIN", "Cluster", "DEVICE_TYPES", "Device", "DeviceType", "Environment", "Link", "PRECISIONS",
           "read_environment"]
