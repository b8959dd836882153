"""Op graphs of frozen models and MetaGraphs, for profiles, without running anything.  A frozen model's large constants are its
parameters."""

from __future__ import annotations

import os
from typing import Any, Dict, Mapping, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from whale_tf._tf_compat import tf, v1
from whale_tf.capture.record import record
from whale_tf.capture.sizes import sized
from whale_tf.capture.unseen import model_phases
from whale_tf.errors import GraphError, PlanError
from whale_tf.graph_editor.definitions import definitions_of
from whale_tf.ir.batch_axis import find_batch_axis
from whale_tf.ir.graph import OpGraph, Phase, Shape
from whale_tf.ir.region import Region, find_region
from whale_tf.ir.traits import SAME_BUFFER, VARIABLES
from whale_tf.profiler.chain import Chain, chain_of
from whale_tf.profiler.op_cost import op_costs, tensor_bytes


class ModelFile(NamedTuple):
    """``sources``: batch inputs and their batch dimension."""

    graph: tf.Graph
    ops: OpGraph
    region: Region
    sources: Dict[int, int]


def read_model_file(path: str) -> ModelFile:
    """Reads a ``.pb`` (GraphDef) or ``.meta`` (MetaGraphDef) file.

    Raises:
        PlanError: the file is missing or of another kind.
        GraphError: no op computes anything from an input.
    """
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(_graph_def(path), name="")
    ops = record(graph)
    scope = model_phases(ops)
    inputs = {t: None for i in sorted(scope) for t in ops.ops[i].inputs if ops.producer(t).phase is Phase.INPUT}
    if not inputs:
        raise GraphError(f"no op of {path!r} reads an input (a placeholder or an iterator), so it is not a model")
    axis = find_batch_axis(ops, list(inputs), scope)
    return ModelFile(graph, ops, find_region(ops, [0] * len(ops.ops), axis, list(axis.sources)), axis.sources)


def file_chain(model: ModelFile, batch: int) -> Chain:
    """The chain of a model as if it were trained: all that it computes from examples is kept for a backward pass."""
    ops = sized(definitions_of(model.graph), model.ops, model.sources, batch)
    chain = chain_of(model.region._replace(graph=ops), op_costs(ops, batch), _parameters(ops, model.region), batch)
    made = [[ops.ops[i] for i in segment if i in model.region.batch_level] for segment in chain.ops]
    kept = [sum(tensor_bytes(ops, t) for op in segment if op.type not in SAME_BUFFER for t in op.outputs) for segment in made]
    return chain._replace(activation_bytes=np.array(kept, dtype=float), backward_flops=2 * chain.forward_flops,
                          traffic_bytes=3 * chain.traffic_bytes, launches=3 * chain.launches)


def _parameters(ops: OpGraph, region: Region) -> Dict[int, int]:
    """Sizes of variables, or of a frozen model's constants of floats."""
    found: Dict[int, int] = {}
    for index in region.ops:
        op = ops.ops[index]
        if op.type in VARIABLES:
            found[index] = _variable_bytes(op.attrs, ops.tensors[op.outputs[0]].shape)
        elif op.type == "Const" and ops.tensors[op.outputs[0]].dtype.startswith(("float", "bfloat")):
            shape = ops.tensors[op.outputs[0]].shape
            if shape is not None and any(size != 1 for size in shape):
                found[index] = tensor_bytes(ops, op.outputs[0])
    return found


def _variable_bytes(attrs: Mapping[str, Any], shape: Shape) -> int:
    declared = tf.TensorShape(attrs.get("shape", shape))
    return (declared.num_elements() or 0) * int(tf.as_dtype(attrs.get("dtype", "float32")).size)


def _graph_def(path: str) -> Any:
    if not os.path.isfile(path):
        raise PlanError(f"there is no model file {path!r}")
    with open(path, "rb") as handle:
        data = handle.read()
    message = v1.MetaGraphDef() if path.endswith(".meta") else v1.GraphDef()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise PlanError(f"{path!r} is no {type(message).__name__}: {error}") from None
    return message.graph_def if path.endswith(".meta") else message
