"""Where variables and optimizer state are: ZeRO's parts, and homes on other devices than their TaskGraph's."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, NamedTuple, Optional, Tuple

from whale_tf.capture.captured import Captured
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.decide.decision import Decision, Request
from whale_tf.decide.facts import analysed, sized_region, trained_variables
from whale_tf.errors import PlanError
from whale_tf.ir.batch_axis import Options
from whale_tf.ir.region import Region
from whale_tf.ir.verify import verify_pass
from whale_tf.passes.side_by_side import find_steps
from whale_tf.plan import Plan
from whale_tf.planner import homes
from whale_tf.planner.play import played_peaks
from whale_tf.planner.recompute import NONE
from whale_tf.transforms.lookups import look_up_values
from whale_tf.transforms.shard.divided_variables import DividedVariables
from whale_tf.transforms.shard.parts import Divisible, divide_variables


def with_parts(decision: Decision, request: Request) -> Decision:
    """The decision with the plan's parts of variables in their place, and why others have none."""
    captured, region, plan, division, config, is_measured = decision
    if not is_measured:
        if not homes.asks_for_homes(config):
            return decision
        plan = parts_asked_for(captured, region, plan, config)
    captured, region, variables = in_parts(captured, region, plan, request.options)
    reasons = undivided(captured, region, plan) if plan.zero != NONE else {}
    division = division._replace(too_large=reasons, variables=variables or division.variables)
    return decision._replace(captured=captured, region=region, plan=plan, division=division)


def with_homes(decision: Decision, request: Request) -> Decision:
    """The decision with homes for variables, and the memory that devices then need.

    Raises:
        PlanError: the plan has a home for a variable that does not exist.
    """
    captured, region, plan, _, config, is_measured = decision
    if is_measured:
        for task in plan.task_graphs:
            missing = [name for name in task.homes if name not in captured.graph]
            if missing:
                raise PlanError(f"TaskGraph {task.name!r} of the plan has a home for variable {missing[0]!r}, which the graph "
                                "does not have")
        return decision
    if not homes.asks_for_homes(config):
        return decision
    held = trained_variables(captured)
    plan = homes.with_homes(plan, held, config)
    if all(task.strategy != "split" for task in plan.task_graphs):  # a step whose ops are divided is not played
        peaks = _peaks(captured, region, plan, request.cluster, config)
        plan = replace(plan, estimate=replace(plan.estimate, peak_memory_bytes=peaks))
    return decision._replace(plan=plan)


def _peaks(captured: Captured, region: Region, plan: Plan, cluster: Cluster, config: Config) -> Tuple[int, ...]:
    """The most bytes that each device holds at a time.  Of equal steps side by side one is played."""
    known, batch = sized_region(captured, region, plan, cluster, config)
    steps = find_steps(plan) if plan.spans_processes else None
    if steps is None or len(steps.processes) == 1 or batch % len(steps.processes):
        return played_peaks(captured.step(known), plan, cluster, trained_variables(captured))
    known = region._replace(graph=captured.sized(batch // len(steps.processes)))
    peaks = played_peaks(captured.step(known), steps.plan_of(0), cluster, trained_variables(captured))
    of_device = {device: peaks[first] for devices in steps.devices for first, device in devices.items()}
    return tuple(of_device.get(device, 0) for device in range(plan.num_devices))


class InParts(NamedTuple):
    """A step with the plan's parts of variables in their place; ``variables``: None where there are none.  Look-ups read values
    where only one process has the variable."""

    captured: Captured
    region: Region
    variables: Optional[DividedVariables] = None


def in_parts(captured: Captured, region: Region, plan: Plan, options: Options) -> InParts:
    """Raises:
    PlanError: the plan divides a variable that cannot be divided.
    """
    variables, before = None, captured
    if plan.values_elsewhere:
        captured = look_up_values(captured, region)
        verify_pass(captured.graph, "after look-ups in values")
    elif any(task.parts for task in plan.task_graphs):
        captured, variables = divide_variables(captured, region, plan)
    if captured is before:
        return InParts(captured, region)
    return InParts(captured, analysed(captured, options), variables)


def parts_asked_for(captured: Captured, region: Region, plan: Plan, config: Config) -> Plan:
    """The plan with parts for the variables that ZeRO has to divide."""
    plan = homes.parts_of(plan, trained_variables(captured), config, Divisible(captured, region, plan))
    return replace(plan, zero=config.zero)


def undivided(captured: Captured, region: Region, plan: Plan) -> Dict[str, str]:
    """Variables that are larger than a device's share, and have no parts -> why."""
    obstacle, divisible = homes.whole_because(plan), Divisible(captured, region, plan)
    large = homes.too_large(plan, trained_variables(captured))
    if not obstacle:
        for one in large:
            divisible(one)
    return {**dict.fromkeys([one.name for one in large], obstacle or "the plan says so"), **divisible.reasons}
