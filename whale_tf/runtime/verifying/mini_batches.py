"""The local step for several mini-batches in one, where the script's graph knows the size of a single one.

If model replicas or processes take mini-batches of their own, the local step runs on all of them together.  Shapes and divisors
that hold the size of one are replaced, as the analysis of the batch axis knows them.
"""
from __future__ import annotations

import re
from typing import Dict, List, Optional, Sequence

import numpy as np

from whale_tf._tf_compat import GraphDef, NodeDef, tf, v1
from whale_tf.emit.context import Context
from whale_tf.errors import MismatchError
from whale_tf.ir.batch_axis import Slice
from whale_tf.ir.extents import Size, SizeLike
from whale_tf.ir.graph import Op
from whale_tf.runtime.verifying.local import Script
from whale_tf.transforms.attributes import open_shapes

SCOPE = "whale_verify/together"
LOW = re.compile(r"/(float16|bfloat16)_*$")  # of the name of an op in mixed precision


def static_size(context: Context) -> Optional[int]:
    """Examples of one mini-batch, according to the graph; None: it does not say."""
    batch = context.region.batch
    for tensor, dim in batch.sources.items():
        shape = batch.graph.tensors[tensor].shape
        if shape is not None and shape[dim] is not None:
            return shape[dim]
    return None


def in_one(name: str, values: Sequence[np.ndarray], dim: Optional[int], takers: str) -> np.ndarray:
    """Several mini-batches of an input as one.

    Args:
        dim: the dimension of the examples; None: it has none.
        takers: what has a mini-batch each.

    Raises:
        MismatchError: an input without examples has several values, where the local step has one.
    """
    if dim is not None:
        return np.concatenate(values, dim)
    one = np.asarray(values[0])
    others = [np.asarray(value) for value in values[1:] if not one.dtype.hasobject]
    if any(other.shape != one.shape or other.tobytes() != one.tobytes() for other in others):
        raise MismatchError(
            f"the first training step is not the local one: {takers} take different values of input {name!r}, which the plan "
            "does not divide by examples, so that the local step has a single one; say with wh.batch_axis(tensor, dim) which of "
            "its dimensions counts the examples, or give all the same value", name)
    return values[0]


def for_several(script: Script, context: Context, count: int) -> Script:
    """The script for ``count`` mini-batches at once.  Only ops that no pass has replaced, or mixed precision alone, hold a size
    that is replaced."""
    size = static_size(context)
    if count == 1 or size is None:
        return script
    return script._replace(graph_def=_Sizes(script, context, size, count).graph_def())


class _Sizes:
    def __init__(self, script: Script, context: Context, size: int, count: int) -> None:
        self._context, self._size, self._count = context, size, count
        self._definition = v1.GraphDef()
        self._definition.CopyFrom(script.graph_def)
        self._nodes: Dict[str, NodeDef] = {node.name: node for node in self._definition.node}

    def graph_def(self) -> GraphDef:
        graph, batch = self._context.graph, self._context.region.batch
        for (index, position), localise in batch.localise.items():
            if not localise.of_section:  # those follow from the data
                self._resize(graph.ops[index], position, localise.components)
        for (index, position), conversions in batch.conversions.items():
            for conversion in conversions:
                if isinstance(conversion, Slice):
                    self._repeat(graph.ops[index], position, conversion.dim)
        for index, position in self._context.region.mean_divisors:
            self._multiply(graph.ops[index], position)
        for op in (graph.ops[index] for index in {index for index, _ in batch.attributes}):
            if self._has(op):
                open_shapes(self._node(op), op, batch)
        return self._definition

    def _script_name(self, op: Op) -> str:
        """The name in the script of an op that mixed precision may have replaced."""
        return op.name if op.name in self._nodes else LOW.sub("", op.name)

    def _has(self, op: Op) -> bool:
        return self._script_name(op) in self._nodes

    def _node(self, op: Op) -> NodeDef:
        return self._nodes[self._script_name(op)]

    def _dtype(self, op: Op, position: int) -> str:
        """The type of an operand in the script."""
        dtype = self._context.graph.tensors[op.inputs[position]].dtype
        return "float32" if dtype == self._context.plan.precision else dtype

    def _resize(self, op: Op, position: int, components: Sequence[Optional[SizeLike]]) -> None:
        graph, tensor = self._context.graph, op.inputs[position]
        if not self._has(op):
            return
        known = graph.producer(tensor).value
        values: List[int] = [] if known is None else [int(value) for value in np.reshape(known, -1)]
        shape = graph.tensors[tensor].shape if known is None else np.shape(known)
        new = [values[place] if part is None else part.at(self._size * self._count) if isinstance(part, Size) else part
               for place, part in enumerate(components)]
        name = self._const(np.array(new).reshape(shape or ()), graph.tensors[tensor].dtype)
        waits = [graph.ops[index] for index in graph.producer(tensor).control_inputs]
        self._nodes[name.partition(":")[0]].input.extend(  # a loop's are in its frame
            "^" + wait.name for wait in waits if self._context.region.contains(wait) and wait.name in self._nodes)
        self._set(op, position, name)

    def _multiply(self, op: Op, position: int) -> None:
        if self._has(op):
            dtype = self._dtype(op, position)
            count = self._const(np.array(self._count), dtype)
            self._set(op, position, self._add("Mul", [self._node(op).input[position], count], T=dtype))

    def _repeat(self, op: Op, position: int, dim: int) -> None:
        """An operand of which every mini-batch takes the same rows."""
        if self._has(op):
            dtype, value = self._dtype(op, position), self._node(op).input[position]
            axis = self._const(np.array(dim), "int32")
            name = self._add("ConcatV2", [value] * self._count + [axis], T=dtype, Tidx="int32")
            self._nodes[name.partition(":")[0]].attr["N"].i = self._count
            self._set(op, position, name)

    def _set(self, op: Op, position: int, name: str) -> None:
        self._node(op).input[position] = name

    def _const(self, value: np.ndarray, dtype: str) -> str:
        name = self._add("Const", [], dtype=dtype)
        self._nodes[name.partition(":")[0]].attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.as_dtype(dtype)))
        return name

    def _add(self, kind: str, inputs: Sequence[str], **types: str) -> str:
        node = self._definition.node.add()
        node.name, node.op = f"{SCOPE}/{len(self._nodes)}", kind
        node.input.extend(inputs)
        for name, dtype in types.items():
            node.attr[name].type = tf.as_dtype(dtype).as_datatype_enum
        self._nodes[node.name] = node
        return node.name + ":0"
