"""Patterns that the user or a plan asks for instead of the cheapest ones."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional

from whale_tf.errors import ConfigError, PlanError, did_you_mean
from whale_tf.ir.graph import Op
from whale_tf.ir.traits import LOSSES
from whale_tf.planner.sharding.problem import ShardingProblem


def forced_patterns(problem: ShardingProblem, force: object, shards: Optional[Mapping[str, str]]) -> Dict[int, str]:
    """Op -> the requested pattern.

    Args:
        force: one pattern for every unit that has it, or ``{unit: pattern}``; a unit is an op or a name scope.
        shards: op name -> pattern, from a plan.

    Raises:
        ConfigError, PlanError: a unit is unknown, or a pattern does not match; the message lists what would match.
    """
    units = [op for number in problem.splits for op in problem.forward_ops(number)
             if problem.is_anchor(op) or op.type in LOSSES]
    if shards:
        return _from_plan(problem, units, shards)
    if isinstance(force, str):
        found = {op.id: force for op in units if force in _patterns(problem, op)}
        if not found and problem.splits:
            raise ConfigError("patterns.force is {!r}, but no op under wh.split has that pattern; there are: {}".format(
                force, ", ".join(sorted({p for op in units for p in _patterns(problem, op)})) or "none"))
        return found
    found = {}
    for unit, name in (force or {}).items():  # type: ignore[attr-defined]
        inside = [op for op in units if in_unit(op, unit)]
        if not inside:
            names = [op.name for op in units]
            raise ConfigError("patterns.force names unit {!r}, which is not an op or name scope under wh.split.{} Ops that can "
                              "be divided: {}".format(unit, did_you_mean(unit, names), ", ".join(names) or "none"))
        matching = [op for op in inside if name in _patterns(problem, op)]
        if not matching:
            raise ConfigError(_mismatch(problem, inside[0], "patterns.force", name))
        found.update({op.id: name for op in matching})
    return found


def in_unit(op: Op, unit: str) -> bool:
    """Whether an op is, or is under, the op or name scope ``unit``."""
    return op.name == unit or op.name.startswith(unit.rstrip("/") + "/")


def _from_plan(problem: ShardingProblem, units: List[Op], shards: Mapping[str, str]) -> Dict[int, str]:
    known = {op.name: op for op in units}
    found = {}
    for name, pattern in shards.items():
        if name not in known:
            raise PlanError(f"the plan's shards name op {name!r}, which is not an op under wh.split that can be "
                            f"divided.{did_you_mean(name, known)}")
        if pattern not in _patterns(problem, known[name]):
            raise PlanError(_mismatch(problem, known[name], "the plan", pattern))
        found[known[name].id] = pattern
    return found


def _patterns(problem: ShardingProblem, op: Op) -> List[str]:
    found = problem.strategies(op, problem.splits[problem.task_graph[op.id]]).found
    return [strategy.pattern for strategy in found if strategy.pattern != "linear"] + [problem.undivided(op).pattern]


def _mismatch(problem: ShardingProblem, op: Op, who: str, pattern: str) -> str:
    split = problem.splits[problem.task_graph[op.id]]
    reasons = problem.strategies(op, split).reasons
    return "{} asks for pattern {!r} of {!r} ({}), which it does not have on {} devices{}; it has: {}".format(
        who, pattern, op.name, op.type, split.devices, " ({})".format("; ".join(reasons)) if reasons else "",
        ", ".join(_patterns(problem, op)))
