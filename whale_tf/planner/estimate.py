"""What a model takes on each kind of device, under data parallelism: does it fit, how large a batch, how long a step.

A step that does not fit takes the first of :data:`MEASURES` under which it does.  The largest batch is found by playing larger
and larger ones.
"""

from __future__ import annotations

from typing import Callable, Dict, NamedTuple, Optional, Tuple

from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError
from whale_tf.planner.measures import Measures
from whale_tf.simulator import Options, Simulation, Simulator, Source, uniform_3d

# In the order of what they cost; ZeRO needs several devices.
MEASURES = tuple(Measures(recompute, zero, offload) for recompute, zero, offload in (
    ("none", "none", "none"), ("none", "v1", "none"), ("none", "v2", "none"), ("none", "v3", "none"), ("full", "none", "none"),
    ("full", "v3", "none"), ("none", "none", "states"), ("full", "none", "states"), ("full", "v3", "states")))
MOST = 2**16  # examples on a device
TRIES = 6  # batches to play between one that fits and one that does not
SURE = 1.03  # a step that held this much of a device's memory on another kind of device does not fit


class Estimated(NamedTuple):
    """A model on a number of devices of one kind.

    Attributes:
        measures: under which it fits, or those that save most.
        batch: examples of the step that ``step`` is.
        largest: the largest batch that fits under the measures; 0: none does.
        step: a step, as simulated.
    """

    device: str
    measures: Measures
    batch: int
    largest: int
    step: Simulation

    @property
    def fits(self) -> bool:
        return not self.step.oom


class Estimator:
    """Estimates for kinds of devices, one after another.  What a step holds hardly depends on the kind, so what surely does not
    fit is not played again on the next one."""

    def __init__(self) -> None:
        self._peaks: Dict[Tuple[Measures, int], float] = {}  # (measures, batch) -> bytes on the fullest device

    def estimated(self, source: Source, global_batch: Optional[int] = None) -> Estimated:
        """A model on all devices of its cluster, which are alike.

        Args:
            global_batch: None: the largest that fits.

        Raises:
            PlanError: the batch cannot be divided over the devices.
        """
        cluster = source.execution.cluster
        count, simulator = len(cluster), Simulator(cluster, source.options(Options(steady_state=True)))
        batch = global_batch or count
        if batch % count:
            raise PlanError(f"a batch of {batch} cannot be divided over {count} devices; use a multiple of {count}")

        def play(measures: Measures, batch: int) -> Simulation:
            strategy = uniform_3d(source.graph(batch), count, recompute=measures.recompute, zero=measures.zero,
                                  offload=measures.offload)
            found = source.played(strategy, simulator)
            self._peaks[measures, batch] = max(found.peak_memory_bytes)
            return found

        choices = [one for one in MEASURES if one.zero == "none" or count > 1]
        usable = min(device.usable_bytes for device in cluster.devices)
        hopeful = [one for one in choices if self._peaks.get((one, batch), 0.0) <= SURE * usable]
        measures, step = choices[-1], None  # type: Measures, Optional[Simulation]
        for measures in hopeful or choices[-1:]:
            step = play(measures, batch)
            if not step.oom:
                break
        assert step is not None
        largest = 0 if step.oom else self._largest(play, measures, batch, usable, count)
        if global_batch is None and largest > batch:
            batch, step = largest, play(measures, largest)
        return Estimated(cluster.devices[0].type, measures, batch, largest, step)

    def _largest(self, play: Callable[[Measures, int], Simulation], measures: Measures, batch: int, usable: float,
                 count: int) -> int:
        """The largest batch that fits, given one that does: doubled until one does not, then by the memory of both."""
        low, high, tries = batch // count, 0, 0  # examples on a device: that fit, that do not
        while high - low != 1 and low < MOST and tries < TRIES:
            tried = 2 * low
            if high:
                tries += 1
                small, large = (self._peaks[measures, size * count] for size in (low, high))
                share = (usable - small) / max(1.0, large - small)
                tried = min(high - 1, max(low + 1, low + int(share * (high - low))))
            known = self._peaks.get((measures, tried * count), 0.0)
            if known > SURE * usable or play(measures, tried * count).oom:
                high = tried
            else:
                low = tried
        return low * count


def cluster_of(device: str, count: int) -> Cluster:
    """``count`` devices of a kind, in nodes of eight."""
    if count > 8 and count % 8:
        raise PlanError(f"{count} devices do not fill nodes of 8; use a multiple of 8")
    return Cluster.parse(f"{device}:{count}" if count <= 8 else f"{count // 8}x{device}:8")
