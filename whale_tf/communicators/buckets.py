"""Several tensors of one type in one message."""

from __future__ import annotations

from typing import Any, List, Sequence

import numpy as np

from whale_tf._tf_compat import tf
from whale_tf.graph_editor.nodes import Nodes


def pack(nodes: Nodes, values: Sequence[str], names: Sequence[str], dtype: Any, device: str) -> str:
    """Values joined into one vector; ``names``: of each."""
    scope = names[0] + "/bucket"
    flat = nodes.const([-1], scope + "/flat", tf.int32, device)
    rows = [reshape(nodes, value, flat, name + "/row", dtype, device) for value, name in zip(values, names)]
    return nodes.concat(rows, 0, scope + "/rows", dtype, device)


def unpack(nodes: Nodes, total: str, names: Sequence[str], shapes: Sequence[Sequence[int]], dtype: Any, device: str) -> List[str]:
    """The values of these shapes that are joined in a vector, each under its name."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    parts = nodes.split(total, sizes, len(sizes), 0, names[0] + "/bucket/parts", dtype, device)
    shaped = [nodes.const(np.array(shape, "int32"), name + "/shape", tf.int32, device) for name, shape in zip(names, shapes)]
    return [reshape(nodes, part, shape, name, dtype, device) for part, name, shape in zip(parts, names, shaped)]


def reshape(nodes: Nodes, value: str, shape: str, name: str, dtype: Any, device: str) -> str:
    """``value`` in the shape of that name, an int32 vector."""
    return nodes.add("Reshape", name, [value, shape], device, T=dtype, Tshape=tf.int32)
