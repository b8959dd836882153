"""Which replicas of a plan that spans processes can be computed as steps side by side.

Processes that do the same, each group of them with replicas of its own, compute a step each, with sums between the steps.  What a
process runs then does not grow with their number::

                  stage 0      stage 1
    step 0       process 0    process 1
    step 1       process 2    process 3       any placement in which steps share no process and correspond device by device
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Dict, List, Mapping, NamedTuple, Sequence, Tuple

from whale_tf.plan import Plan

Place = Tuple[int, int]  # (process, number of one of its devices)
Rows = Tuple[Tuple[int, ...], ...]  # a TaskGraph's devices: [model replica][replica]


class Steps(NamedTuple):
    """Attributes:
    plan: of all steps; it spans processes.
    rows: of each step, the devices of each TaskGraph.
    devices: of each step, device of the first step -> the one that does the same.
    processes: of each step, those that run its parts, in the same order.
    """

    plan: Plan
    rows: Sequence[Sequence[Rows]]
    devices: Sequence[Mapping[int, int]]
    processes: Sequence[Tuple[int, ...]]

    def number(self, rank: int) -> int:
        """The number of the step of which a process runs a part."""
        return next(number for number, processes in enumerate(self.processes) if rank in processes)

    def plan_of(self, number: int) -> Plan:
        """The plan of one of several steps, as for one process with all its devices."""
        if len(self.rows) == 1:
            return self.plan
        rows, devices = self.rows[number], self.devices[number]
        tasks = tuple(replace(task, devices=own, homes={variable: devices[home] for variable, home in task.homes.items()})
                      for task, own in zip(self.plan.task_graphs, rows))
        return replace(self.plan, task_graphs=tasks, num_model_replicas=len(rows[0]), processes=())


def find_steps(plan: Plan) -> Steps:
    """As many steps side by side as there can be.

    Args:
        plan: it spans processes.
    """
    count = len(plan.processes)
    place_of = {device: (process, place) for process, part in enumerate(plan.processes) for place, device in enumerate(part)}
    for of in range(count, 1, -1):
        steps = _steps(plan, of) if count % of == 0 and (plan.zero, plan.offload) == ("none", "none") else []
        maps = [_corresponding(steps[0], step, place_of) for step in steps]
        if not maps or not all(maps) or any(home not in maps[0] for task in plan.task_graphs for home in task.homes.values()):
            continue
        firsts = {place_of[device][0]: device for device in maps[0]}
        processes = [tuple(place_of[devices[firsts[process]]][0] for process in sorted(firsts)) for devices in maps]
        if len(set().union(*processes)) == count == of * len(processes[0]):
            return Steps(plan, steps, maps, processes)
    whole = {device: device for device in place_of}
    return Steps(plan, [[task.devices for task in plan.task_graphs]], [whole], [tuple(range(count))])


def _steps(plan: Plan, of: int) -> List[List[Rows]]:
    """Each TaskGraph's devices in each of so many steps: some of the model replicas, or some of the replicas of one; (): the
    plan has no equal parts."""
    each = of // plan.num_model_replicas  # steps of a model replica
    if plan.num_model_replicas % of == 0:
        size = plan.num_model_replicas // of
        return [[task.devices[i * size:(i + 1) * size] for task in plan.task_graphs] for i in range(of)]
    if of % plan.num_model_replicas or any(task.replica_count % each or task.batch_slices for task in plan.task_graphs):
        return []
    sizes = [task.replica_count // each for task in plan.task_graphs]
    return [[(task.devices[i // each][i % each * size:(i % each + 1) * size],) for task, size in zip(plan.task_graphs, sizes)]
            for i in range(of)]


def _corresponding(first: Sequence[Rows], other: Sequence[Rows], place_of: Mapping[int, Place]) -> Dict[int, int]:
    """Device of the first step -> the one that does the same in another step; {}: the steps' processes do not correspond."""
    found: Dict[int, int] = {}
    processes: Dict[int, int] = {}
    for rows, others in zip(first, other):
        for device, there in zip(itertools.chain(*rows), itertools.chain(*others)):
            (process, place), (process_there, place_there) = place_of[device], place_of[there]
            if place != place_there or found.setdefault(device, there) != there or (
                    processes.setdefault(process, process_there) != process_there):
                return {}
    return found

