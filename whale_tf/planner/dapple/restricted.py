"""The best plans of two kinds, data parallelism and two stages: ``solve(costs) -> stages or None`` like the exact planner."""
from __future__ import annotations

from typing import Optional, Tuple

from whale_tf.planner.dapple.cost import DappleCosts, LayerStage, Stages

INFINITY = float("inf")


def data_parallel(costs: DappleCosts) -> Optional[Stages]:
    """One stage on all devices."""
    stages = (LayerStage(0, costs.num_layers, costs.servers.none(), costs.servers.sizes),)
    return stages if costs.fits(stages) else None


def two_stages(costs: DappleCosts) -> Optional[Stages]:
    """The best plan of two stages, all splits and device sets tried (Table V's P:Q plans)."""
    servers = costs.servers
    best: Tuple[float, Optional[Stages]] = (INFINITY, None)
    for taken in servers.all_sets(servers.none()) if servers.count_states() <= 1000 else servers.round_sets(servers.none()):
        rest = servers.free(taken)
        for cut in range(1, costs.num_layers) if any(rest) else ():
            stages = (LayerStage(0, cut, servers.none(), taken), LayerStage(cut, costs.num_layers, taken, rest))
            if costs.fits(stages) and costs.latency(stages) < best[0]:
                best = costs.latency(stages), stages
    return best[1]
