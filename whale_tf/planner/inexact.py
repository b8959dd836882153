"""Ops whose result differs from the local script's: one warning for each layer, or an error."""

from __future__ import annotations

from typing import Callable, Dict, List, Type

from whale_tf.errors import InexactError, InexactWarning
from whale_tf.ir.batch_axis import Inexact
from whale_tf.ir.graph import Phase
from whale_tf.ir.region import Region
from whale_tf.passes.replicate import clones
from whale_tf.plan import Plan


def tell_inexact(region: Region, plan: Plan, wish: str, warn: Callable[[str, Type[Warning]], None]) -> None:
    """Warns once for each name scope (of a layer) whose ops compute something other than in the local script.  Gradients get no
    warning beside the layers from which they follow.

    Raises:
        InexactError: ``wish`` is ``error``.
    """
    scopes: Dict[str, List[Inexact]] = {}
    ops = region.graph.ops
    found = [item for item in region.batch.inexact if len(clones(plan, region.task_graph[item.op])) > 1]
    forward = [item for item in found if ops[item.op].phase is not Phase.BACKWARD]
    for item in (forward or found) if wish != "allow" else ():
        name = ops[item.op].name
        scopes.setdefault(name.rpartition("/")[0] or name, []).append(item)
    fix = "" if plan.sync_batch_norm else "sync_batch_norm to True for the statistics of the whole mini-batch, or "
    texts = []
    for scope, ((index, reason), *others) in scopes.items():
        op = ops[index]
        more = f", like {len(others)} more ops of {scope!r}," if others else ""
        texts.append(f"op {op.name!r} ({op.type}){more} does not compute what the local script computes: {reason}. Set {fix}"
                     "on_inexact to 'allow' if this is intended")
    if texts and wish == "error":
        raise InexactError("\n".join(texts))
    for text in texts:
        warn(text, InexactWarning)
