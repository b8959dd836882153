"""What ``whale calibrate`` measured on a machine, and how the simulator uses it.

A calibration replaces the hardware table's figures: op times by amount of work (profiles of the model still take precedence), the
overlap factor gamma, and latency (alpha) and bandwidth (1 / beta) of the communicators.  On disk it is JSON (docs/simulator.md).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Tuple, Union

import numpy as np

from whale_tf.cluster import Cluster
from whale_tf.documents import Record, field, parsed, plain
from whale_tf.errors import PlanError, did_you_mean

VERSION = 2
ARITHMETIC, MEMORY, COMMUNICATION = "arithmetic", "memory", "communication"
OVERLAPS = ("arithmetic-arithmetic", "arithmetic-memory", "memory-memory", "arithmetic-communication", "communication-memory")

Points = Tuple[Tuple[float, float], ...]
_RISING = "(work, seconds) points above 0, in order of their work"


def _rising(points: Points) -> bool:
    return all(min(point) > 0 for point in points) and all(a[0] < b[0] for a, b in zip(points, points[1:]))


@dataclass(frozen=True)
class Communicator(Record):
    """``alpha_s``: seconds that an empty message takes; ``bandwidth_bytes_per_s``: for a large one (1 / beta)."""

    alpha_s: float = field(at_least=0, finite=True)
    bandwidth_bytes_per_s: float = field(above=0, finite=True)


@dataclass(frozen=True)
class Calibration(Record):
    """Measurements of one device type on one machine.

    Attributes:
        device: the type, a name in the hardware table.
        source: the machine and software that were measured.
        cores: computations that run at once on one process' devices; None: every device has its own units.
        intra_op: number of threads with which an op was measured.
        arithmetic: (FLOPs, seconds) of matrix products in float32, by size.
        memory: (bytes read and written, seconds) of streaming ops, by size.
        launch_s: seconds that an op costs in addition to its kernel.
        step_s: seconds that a ``Session.run`` costs in addition to its ops.
        wake: (seconds waited, seconds until the thread starts): how long a thread that has waited for work takes to start an op
            that another thread has made ready.  At first threads look for work, later they sleep.
        far: (bytes, seconds): how much longer an op takes if another core has written its operand of that size.
        slow_down: by how much two ops that run at once slow each other down (1: not at all), by what limits them
            (:data:`OVERLAPS`); an exchange between processes slows down the ops of these, and is slowed down by them.
        communicators: ``local`` (devices of one process), ``processes`` (processes of one machine).
    """

    version: int = VERSION
    device: str = "CPU"
    source: str = ""
    cores: Optional[int] = field(None, at_least=1)
    intra_op: int = field(1, at_least=1)
    arithmetic: Points = field(not_empty=True, check=_rising, expected="one or more " + _RISING)
    memory: Points = field(not_empty=True, check=_rising, expected="one or more " + _RISING)
    launch_s: float = field(at_least=0, finite=True)
    step_s: float = field(0.0, at_least=0, finite=True)
    wake: Points = field((), check=_rising, expected=_RISING)
    far: Points = field((), check=_rising, expected=_RISING)
    slow_down: Dict[str, float] = field()
    communicators: Dict[str, Communicator] = field(factory=dict)

    @classmethod
    def canonical(cls, values: Dict[str, Any]) -> Dict[str, Any]:
        found = values.get("version", VERSION)
        if found != VERSION:  # checked first, because another version may have other keys
            raise ValueError(
                f"version is {found!r}, this whale_tf reads version {VERSION}; measure the machine again with `whale calibrate`")
        return values

    def check(self) -> None:
        for known, what in ((OVERLAPS, "slow_down"), (("local", "processes"), "communicators")):
            for name in getattr(self, what):
                if name not in known:
                    raise ValueError(f"{what} has {name!r}, expected some of {', '.join(known)}.{did_you_mean(name, known)}")
        if any(not value >= 1.0 for value in self.slow_down.values()):
            raise ValueError(f"slow_down is {self.slow_down}, expected factors of at least 1")

    @property
    def gamma(self) -> float:
        """The overlap factor of Proteus section VI-C: a computation during a communication, which adds and copies."""
        return self.slow_down.get("arithmetic-communication", self.slow_down.get("arithmetic-memory", 1.0)) - 1.0

    def slowed(self, one: str, other: str) -> float:
        """The factor by which an op limited by ``one`` is slower while one limited by ``other`` runs."""
        return self.slow_down.get("-".join(sorted((one, other))), 1.0)

    def seconds(self, work: float, kind: str) -> float:
        """Time of an op of ``work`` FLOPs (:data:`ARITHMETIC`) or bytes (:data:`MEMORY`), without ``launch_s``.

        Linear between measured sizes, proportional below the smallest, and extrapolated from the last two above the largest.
        """
        return interpolated(self.arithmetic if kind == ARITHMETIC else self.memory, work)

    def wake_s(self, waited_s: float) -> float:
        """Seconds until a thread that has waited for ``waited_s`` starts an op."""
        if not self.wake:
            return 0.0
        waits, seconds = zip(*self.wake)
        return float(np.interp(waited_s, waits, seconds))

    def far_s(self, size: float) -> float:
        """Additional seconds for an operand of ``size`` bytes that another core has written."""
        return interpolated(self.far, size) if self.far else 0.0

    def to_json(self) -> str:
        return json.dumps(plain(self), indent=1) + "\n"

    @classmethod
    def parse(cls, source: Union[Calibration, Mapping[str, Any], str]) -> Calibration:
        """A calibration from a Calibration, a dict, JSON text or the path of a JSON file.

        Raises:
            PlanError: unreadable, unknown or missing key, or a wrong value; the message names the place.
        """
        return parsed(cls, source, "calibration", PlanError, "write one with `whale calibrate -o FILE`")


def interpolated(points: Points, work: float) -> float:
    """See :meth:`Calibration.seconds`."""
    if work <= points[0][0] or len(points) == 1:
        return points[0][1] * work / points[0][0]
    below, above = next(((a, b) for a, b in zip(points, points[1:]) if work <= b[0]), (points[-2], points[-1]))
    return max(0.0, below[1] + (work - below[0]) / (above[0] - below[0]) * (above[1] - below[1]))


def calibrated(cluster: Cluster, calibration: Calibration) -> Cluster:
    """The cluster with measured rates for the calibration's device type, and with those links that were measured: ``local``
    between devices of a node, ``processes`` between nodes (on one machine, each process is described as a node).

    Raises:
        PlanError: the cluster has no device of that type.
    """
    if all(device.type != calibration.device for device in cluster.devices):
        raise PlanError("the calibration is for {!r}, but cluster {!r} has {}; calibrate the machine that is simulated".format(
            calibration.device, cluster.name, ", ".join(sorted({device.type for device in cluster.devices}))))
    described = cluster.to_dict()
    flops, streamed = (points[-1][0] / points[-1][1] for points in (calibration.arithmetic, calibration.memory))
    described.setdefault("device_types", {})[calibration.device] = {
        "base": calibration.device, "fp32": flops, "memory_bandwidth_bytes_per_s": streamed,
        "source": "whale calibrate: " + calibration.source}
    links = calibration.communicators
    for node in described["nodes"]:
        if "local" in links and node["links"].get("local"):
            node["links"]["local"] = _described(links["local"])
        if "processes" in links and node.get("nic"):
            node["nic"] = dict(node["nic"], **_described(links["processes"]))
    return Cluster.parse(described).with_limits([device.limit_bytes for device in cluster.devices])


def _described(link: Communicator) -> Dict[str, float]:
    return {"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s, "latency_s": link.alpha_s}
