"""What comes before any decision: the recorded step in the types, and with the batch normalisation, that it will have."""

from __future__ import annotations

import warnings
from typing import NamedTuple, Optional

from whale_tf._tf_compat import tf
from whale_tf.capture.captured import Captured, captured_from
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.ir.batch_axis import Options
from whale_tf.ir.verify import verify
from whale_tf.plan import Plan
from whale_tf.planner.homes import STAGE
from whale_tf.transforms.batch_norm import sync_batch_norm
from whale_tf.transforms.loss_scale import recorded_low, scales_itself


class Prepared(NamedTuple):
    """Attributes:
    config: without choices that this graph cannot have.
    options: for the analysis of its batch axis.
    """

    captured: Captured
    config: Config
    options: Options


def prepare(graph: tf.Graph, cluster: Cluster, config: Config, plan: Optional[Plan] = None) -> Optional[Prepared]:
    """Records a graph, which is not changed.  Returns None if it has no optimizer's update yet, and ``plan`` was not made for it
    as a model without one.

    Raises:
        WhaleError: see :func:`whale_tf.capture.captured.captured_from`, or the precision asked for is not possible.
    """
    if plan is None and config.loss_scale is not None and scales_itself(graph):
        config = config.without_loss_scale()
    if config.variables == STAGE and not graph.building_function:  # variables are made on their TaskGraphs' first devices
        config = config.changed(variables="shared")
    settings = config if plan is None else plan
    if settings.precision == "float16" and settings.loss_scale is None and not scales_itself(graph):
        warnings.warn(
            "amp is 'float16' without a loss scale: gradients below 6e-8 become 0 in float16; set "
            "amp.loss_scale to 'dynamic', or use 'bfloat16', unless the script itself scales its loss")
    step = recorded_low(graph, settings.precision, settings.loss_scale, cluster)
    if settings.sync_batch_norm:
        step = sync_batch_norm(step)
    micro_batches = plan.num_micro_batch if plan is not None else config.pipeline.num_micro_batch or 1
    captured = captured_from(step, micro_batches > 1, plan)
    if not captured.has_step:
        return None
    verify(captured.graph)
    return Prepared(captured, config, Options(sync=(lambda op: True) if settings.sync_batch_norm else None, sections=True))
