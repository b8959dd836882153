"""A captured graph as the chain of segments that planners cut."""

from __future__ import annotations

import warnings

from whale_tf.capture.captured import Captured
from whale_tf.ir.graph import Phase
from whale_tf.ir.region import Region
from whale_tf.profiler.chain import Chain, chain_of, needed_by_updates
from whale_tf.profiler.op_cost import FREE, assumed_ops, op_costs


def captured_chain(captured: Captured, region: Region, batch: int) -> Chain:
    """The chain of a graph with mini-batches of ``batch`` examples, unless the graph says another size.

    Warns about products whose cost is assumed.  Gradients that no update needs (of inputs and constants) cost nothing, because a
    Session does not compute them.

    Raises:
        PlanError: the model cannot be cut anywhere, or its costs are not known.
    """
    ops = captured.sized(batch)
    assumed = assumed_ops(ops, region.ops)
    if assumed:
        warnings.warn(
            f"the rank of an operand of {assumed[0]!r}" + f" (and of {len(assumed) - 1} more)" * (len(assumed) > 1) +
            " is not known, so their cost is assumed, and with it the best plan; give the tensor its shape "
            "(tensor.set_shape, tf.ensure_shape)")
    parameters = {variable: captured.phases.variables[variable].bytes for _, variable in captured.gradients}
    needed = needed_by_updates(ops)
    costs = [cost if op.id in needed or op.phase is not Phase.BACKWARD else FREE
             for op, cost in zip(ops.ops, op_costs(ops, batch))]
    chain = chain_of(region._replace(graph=ops), costs, parameters, batch)
    return chain._replace(state_bytes=sum(captured.state_bytes().values()))
