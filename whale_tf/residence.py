"""Where variables live while a Plan runs: worked out here alone, and read by the planner, the simulator and the rewriter.

::

    2 replicas                     readers   values   states
    mirrored                       0 1       0 1      0 1      every replica has its own copy, and updates it
    shared                         0 1       0        0        all replicas read the first one's
    home on device 1 (ZeRO)        0 1       1        1
    home on the host (offload)     0 1       host     host

Processes that train side by side share no memory. Each has the value of a shared variable, and of a variable whose home is in
another process, unless zero is ``v3``; under ZeRO only the home's process has the optimizer state.
"""

from __future__ import annotations

from typing import NamedTuple, Tuple

from whale_tf.plan import Plan


class Residence(NamedTuple):
    """Where a variable lives, or a part of one.  Devices are numbers of the cluster; the number after the last one is the host.

    Attributes:
        readers: the devices of all replicas that read it.
        values: the devices that keep its value between steps, the one that the script's own variable is on first.
        states: those of them that keep its optimizer state and update it.
    """

    readers: Tuple[int, ...]
    values: Tuple[int, ...]
    states: Tuple[int, ...]


def residence(plan: Plan, task_graph: int, variable: str, shard: int = 0) -> Residence:
    """Where a variable of a TaskGraph lives.

    Args:
        plan: of all processes.
        variable: its name, or that of a part of it.
        shard: under ``split``, the device of the replica that has this part.
    """
    task = plan.task_graphs[task_graph]
    readers = tuple(device for row in task.devices for device in (row[shard:shard + 1] if task.strategy == "split" else row))
    home, side_by_side = task.homes.get(variable), plan.data_parallel_processes
    if home is not None:
        copies = [plan.here(home, rank) for rank in range(len(side_by_side))] if plan.zero != "v3" else []
        kept = tuple(dict.fromkeys([home, *copies]))
        return Residence(readers, kept, (home,) if plan.zero != "none" else kept)
    kept = readers
    if task.variables == "shared":
        kept = tuple(next(device for device in readers if device in own) for own in side_by_side or [readers])
    return Residence(readers, kept, kept)
