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
    """Warns once for each name scope (of a layer) whose ops compute something other than in the local script.  Gradients, which
    follow from them, get no warning.

    Raises:
        InexactError: ``wish`` is ``error``.
    """
    scopes: Dict[str, List[Inexact]] = {}
    for item in region.batch.inexact if wish != "allow" else ():
        op = region.graph.ops[item.op]
        if op.phase is not Phase.BACKWARD and len(clones(plan, region.task_graph[item.op])) > 1:
            scopes.setdefault(op.name.rpartition("/")[0] or op.name, []).append(item)
    fix = "" if plan.sync_batch_norm else "sync_batch_norm to True for the statistics of the whole mini-batch, or "
    texts = []
    for scope, ((index, reason), *others) in scopes.items():
        op = region.graph.ops[index]
        more = f", like {len(others)} more ops of {scope!r}," if others else ""
        texts.append(f"op {op.name!r} ({op.type}){more} does not compute what the local script computes: {reason}. Set {fix}"
                     "on_inexact to 'allow' if this is intended")
    if texts and wish == "error":
        raise InexactError("\n".join(texts))
    for text in texts:
        warn(text, InexactWarning)
