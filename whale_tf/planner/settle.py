"""Searches over layers for a model that is more than its layers.

The times of layers find the plans; the model itself prices them (:meth:`whale_tf.planner.layers.Layers.settled`).  Layers count
less memory than the model takes: they know no temporaries, and no holes between tensors.  If no plan fits as it is priced, the
search runs again with less memory, by what the smallest plan lacks.
"""

from __future__ import annotations

from typing import Callable, Dict, List, Optional

from whale_tf.cluster import Cluster
from whale_tf.errors import InfeasibleError
from whale_tf.planner.candidate import Candidate
from whale_tf.planner.joint import Joint, Progress, TooTight
from whale_tf.planner.layers import Layers
from whale_tf.planner.measures import Allowed, Measures
from whale_tf.profiler.model_profile import ModelProfile
from whale_tf.simulator import Source

TRIES = 4  # searches with less and less memory
MARGIN = 0.97  # of the memory that the smallest plan could use


class LayersOf:
    """A model's layers in every precision.

    Args:
        profile: in the model's own precision.
        source: the model; None: it has only these layers.
    """

    def __init__(self, profile: ModelProfile, cluster: Cluster, global_batch: int, source: Optional[Source] = None) -> None:
        self.profile, self.cluster, self.global_batch, self.source = profile, cluster, global_batch, source
        self._known: Dict[str, ModelProfile] = {profile.precision: profile}

    def under(self, measures: Measures) -> ModelProfile:
        """Raises PlanError: the times in a precision are unknown."""
        precision = measures.precision_of(self.profile)
        if precision not in self._known:
            if self.source is None:
                self._known[precision] = measures.of(self.profile, self.cluster)
            else:
                self._known[precision] = self.source.under(precision).layers(self.global_batch)
        return self._known[precision]


def settled(layers: LayersOf, search: Callable[[Measures, Cluster], List[Candidate]], allowed: Allowed,
            micro_batches: Optional[int] = None, balance: str = "exact", progress: Optional[Progress] = None) -> Candidate:
    """The fastest plan that fits, as priced.

    Args:
        search: plans under measures on the cluster, whose devices may have less memory than they have.
        progress: see :class:`~whale_tf.planner.joint.Joint`.

    Raises:
        PlanError: see :meth:`~whale_tf.planner.joint.Joint.best`.
        InfeasibleError: nothing fits.
    """
    share, first = 1.0, None  # type: float, Optional[InfeasibleError]
    for _ in range(TRIES):
        room = layers.cluster if first is None else layers.cluster.tightened(share)
        model = Layers(layers.profile, room, lambda measures, room=room: search(measures, room),  # type: ignore[misc]
                       balance, micro_batches, layers.source)
        try:
            return Joint(model, progress).best(allowed)
        except TooTight as error:
            first = first or error
            if not error.share:
                break
            share *= min(MARGIN, MARGIN * error.share)
        except InfeasibleError:
            if first is None:
                raise
            break
    assert first is not None
    raise first
