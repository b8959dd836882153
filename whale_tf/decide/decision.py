"""What is asked for a step, and what has been decided about it so far."""

from __future__ import annotations

from typing import Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf.capture.captured import Captured
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.ir.batch_axis import Options
from whale_tf.ir.region import Region
from whale_tf.plan import Estimate, Plan
from whale_tf.planner.sharding import Assignment
from whale_tf.transforms.shard.divided_variables import DividedVariables


class Request(NamedTuple):
    """Attributes:
    plan: the plan to run; None: find one.
    options: of the analysis of the batch axis.
    processes: numbers of each process's devices, if there are several.
    """

    cluster: Cluster
    config: Config
    plan: Optional[Plan] = None
    options: Options = Options(sections=True)
    processes: Sequence[Tuple[int, ...]] = ()


class Division(NamedTuple):
    """A graph whose ``split`` TaskGraphs are to be divided over their devices, or have been.

    Attributes:
        local: the graph as the user wrote it.
        captured: the graph as it is.
        shares: for each TaskGraph that is divided, its devices' shares of a divided dimension, in proportion.
        assignment: how it is divided; None: there is nothing to divide.
        estimate: that of the search that divides the whole graph (``auto_parallel: "rhino"``).
        replicas: model replicas of this search, which take parts of the mini-batch.
        variables: those that are divided; None: the graph has not been divided yet, or there is nothing to divide.
        too_large: variables that ZeRO does not divide although they are larger than a device's share -> why.
    """

    local: Captured
    captured: Captured
    shares: Dict[int, Tuple[int, ...]] = {}
    assignment: Optional[Assignment] = None
    estimate: Optional[Estimate] = None
    replicas: int = 1
    variables: Optional[DividedVariables] = None
    too_large: Mapping[str, str] = {}


class Decision(NamedTuple):
    """Attributes:
    captured: the step that the plan runs.
    region: its ops that run once for each micro-batch or copy.
    division: of the user's step into this one.
    config: what later stages go by; choices that do not apply to the plan are settled.
    is_measured: the plan says which variables have homes and parts and what is recomputed, because it was given, or because a
        search played it with them.
    """

    captured: Captured
    region: Region
    plan: Plan
    division: Division
    config: Config
    is_measured: bool = False
