"""FLOPs against TensorFlow's own profiler, for the op types it counts."""
from __future__ import annotations

from typing import Any, Dict

import pytest

from models import bert, vgg
from whale_tf._tf_compat import tf, v1
from whale_tf.capture.record import record
from whale_tf.ir.traits import traits
from whale_tf.profiler.op_cost import op_costs


def by_tensorflow(graph: Any) -> Dict[str, float]:
    """FLOPs of every op that ``tf.profiler`` has a count for."""
    options = v1.profiler.ProfileOptionBuilder(v1.profiler.ProfileOptionBuilder.float_operation()).with_empty_output().build()
    found: Dict[str, float] = {}

    def walk(node: Any) -> None:
        found[node.name] = node.float_ops
        for child in node.children:
            walk(child)

    walk(v1.profiler.profile(graph, options=options, cmd="graph"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("module,config", [(vgg, vgg.VggConfig.tiny()), (bert, bert.BertConfig.tiny())])
def test_contractions_cost_what_tensorflow_says(module: Any, config: Any) -> None:
    with tf.Graph().as_default() as graph:
        v1.train.GradientDescentOptimizer(0.1).minimize(module.build(module.inputs(config, 4), config).loss)
        ops = record(graph)
        theirs = by_tensorflow(graph)
    ours = op_costs(ops)
    compared = 0
    for op in ops.ops:
        if traits(op.type).is_contraction and theirs.get(op.name) and not op.attrs.get("adj_x"):  # which tf.profiler ignores
            assert ours[op.id].flops == theirs[op.name], (op.name, op.type)
            compared += 1
    assert compared > 10
