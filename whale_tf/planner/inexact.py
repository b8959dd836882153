"""Ops whose result differs from the local script's: one warning for all of them, or an error."""

from __future__ import annotations

import re
from typing import Callable, Dict, List, Type

from whale_tf.errors import InexactError, InexactWarning
from whale_tf.ir.batch_axis import Inexact
from whale_tf.ir.graph import Op, Phase
from whale_tf.ir.region import Region
from whale_tf.passes.replicate import clones
from whale_tf.plan import Plan

SHOWN = 3  # names of layers


def tell_inexact(region: Region, plan: Plan, wish: str, warn: Callable[[str, Type[Warning]], None]) -> None:
    """Warns once if ops compute something other than in the local script, with a sentence for each reason.  Gradients get none
    beside the layers from which they follow.

    Raises:
        InexactError: ``wish`` is ``error``.
    """
    ops = region.graph.ops
    found = [item for item in region.batch.inexact if len(clones(plan, region.task_graph[item.op])) > 1]
    forward = [item for item in found if ops[item.op].phase is not Phase.BACKWARD]
    alike: Dict[str, List[Inexact]] = {}  # by their reasons, whatever tensors these name
    for item in (forward or found) if wish != "allow" else ():
        alike.setdefault(re.sub("'[^']*'", "", item.reason), []).append(item)
    if not alike:
        return
    fix = "" if plan.sync_batch_norm else "sync_batch_norm to True for the statistics of the whole mini-batch, or "
    text = " ".join(f"{_named([ops[item.op] for item in same])} not compute what the local script computes: {same[0].reason}."
                    for same in alike.values())
    text += f" Set {fix}on_inexact to 'allow' if this is intended"
    if wish == "error":
        raise InexactError(text)
    warn(text, InexactWarning)


def _named(ops: List[Op]) -> str:
    """The subject of a sentence: an op, and the name scopes (layers) of others like it."""
    first = f"op {ops[0].name!r} ({ops[0].type})"
    layers = list(dict.fromkeys(op.name.rpartition("/")[0] or op.name for op in ops))
    if len(ops) == 1:
        return f"{first} does"
    if len(layers) == 1:
        return f"{first}, like {len(ops) - 1} more op(s) of {layers[0]!r}, does"
    names = ", ".join(map(repr, layers[:SHOWN])) + (", ..." if layers[SHOWN:] else "")
    return f"{first} and {len(ops) - 1} more ops, in {len(layers)} layers ({names}), do"
