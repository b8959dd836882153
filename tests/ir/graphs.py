"""Op graphs written by hand, for tests that need no TensorFlow."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Optional, Sequence

import numpy as np

from whale_tf.ir.batch_axis import Equality
from whale_tf.ir.graph import OpGraph, Shape


def equal(graph: OpGraph, sources: Iterable[int]) -> List[Equality]:
    """That all sources have equally many examples."""
    first, *others = map(graph.tensor_name, sources)
    return [(first, other) for other in others]


class Draft:
    """Adds ops with names; ``outputs`` are (shape, dtype) pairs, float32 by default."""

    def __init__(self) -> None:
        self.graph = OpGraph()

    def op(self, type_: str, inputs: Sequence[int] = (), *shapes: Shape, dtype: str = "float32", name: Optional[str] = None,
           attrs: Optional[Dict[str, Any]] = None, value: Any = None) -> int:
        made = self.graph.add(name or f"{type_.lower()}_{len(self.graph.ops)}", type_, inputs,
                              [(shape, dtype) for shape in shapes], attrs=attrs, value=value)
        return made.outputs[0] if made.outputs else -1

    def const(self, value: Any) -> int:
        array = np.asarray(value)
        array = array.astype(np.int32) if array.dtype == np.int64 else array
        return self.op("Const", (), tuple(array.shape), dtype=str(array.dtype), value=array)

    def source(self, *shape: Optional[int], dtype: str = "float32", name: Optional[str] = None) -> int:
        return self.op("Placeholder", (), shape, dtype=dtype, name=name)

    def variable(self, *shape: int) -> int:
        return self.op("VariableV2", (), shape)
