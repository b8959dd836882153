"""Where the devices of a plan, and the hosts of its processes, are in a cluster in which hosts are devices, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, Mapping, Optional, Tuple

from whale_tf.cluster import Cluster
from whale_tf.plan import Plan
from whale_tf.program import Program


def beside_hosts(plan: Plan, cluster: Cluster) -> Tuple[Cluster, Optional[Dict[int, int]]]:
    """The plan's devices of a cluster, with a host for each process if variables are on hosts, and the numbers of all in it."""
    if plan.offload == "none":
        return cluster, None
    return cluster.with_hosts(plan.processes or [range(plan.num_devices - 1, plan.num_devices)], plan.num_devices)


class Renumbering:
    """The devices that a process' plan and Program name, in a cluster.

    Args:
        rank: the process.  Processes that train side by side name their hosts alike.
        numbers: the numbers in the cluster of the plan's devices, and of the processes' hosts
            (:meth:`whale_tf.cluster.Cluster.with_hosts`); None: the same numbers.
    """

    def __init__(self, plan: Plan, rank: int = 0, numbers: Optional[Mapping[int, int]] = None) -> None:
        self._numbers = dict(numbers) if numbers is not None else None
        if self._numbers is not None and not plan.spans_processes:
            self._numbers[plan.hosts[0]] = self._numbers[plan.hosts[0] + rank]

    def of(self, device: int) -> int:
        return device if self._numbers is None else self._numbers[device]

    def moved(self, program: Program, part: Plan) -> Tuple[Program, Plan]:
        """A process' Program and plan, on these devices."""
        if self._numbers is None:
            return program, part
        bodies = tuple(body if body.home is None else body._replace(home=self.of(body.home)) for body in program.bodies)
        calls = tuple(call._replace(devices=tuple(map(self.of, call.devices))) for call in program.calls)
        tasks = tuple(replace(task, devices=tuple(tuple(map(self.of, row)) for row in task.devices),
                              homes={name: self.of(home) for name, home in task.homes.items()}) for task in part.task_graphs)
        part = replace(part, task_graphs=tasks, processes=(), num_devices=len(self._numbers))
        return program._replace(bodies=bodies, calls=calls), part
