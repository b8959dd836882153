"""Edit any ``tf.Graph`` in place: select, clone, reroute, replace, place, order. It knows nothing about parallel training.

It works on graphs of TensorFlow 1.15 and 2.x that have not been run yet. This example computes an activation again on a second
device, adds its square, and lets all consumers read the sum::

    import whale_tf.graph_editor as ge

    before    x ──> relu ──> loss

    relu = graph.get_operation_by_name("relu")
    edit = ge.StagedEdit(graph)
    edit.clone([relu], "second", device="/device:CPU:1")         # second/relu, reads x too
    edit.add("Square", "square", ["second/relu"], device="/device:CPU:1")
    edit.add("AddV2", "both", ["relu", "square"])
    new = edit.commit()                                          # one import for all three
    ge.reroute_tensor(relu.outputs[0], new["both"].outputs[0])

    after     x ──┬──> relu ───────────────────┬──> both ──> loss
                  └──> second/relu ──> square ─┘

- ``StagedEdit`` (staged): new nodes and clones, which are added with one import;
- ``find_ops``, ``forward``, ``backward``, ``between``, ``boundary``, ``consumers`` (select): find ops;
- ``reroute_tensor``, ``swap_tensors``, ``replace_op``, ``set_input`` (reroute): move edges;
- ``place``, ``merge_device``, ``by_device``, ``colocated_with``, ``drop_colocation`` (device): where ops run;
- ``order``, ``barrier``, ``add_control_inputs``, ``remove_control_inputs`` (control): which op waits for which other;
- ``frames``, ``call_functions``, ... (control_flow), ``FunctionCopy`` (function_copy): loops and conditionals.

An edit that is impossible raises ``whale_tf.errors.GraphEditError``.
"""
from __future__ import annotations

from whale_tf.graph_editor.control import add_control_inputs, barrier, order, remove_control_inputs
from whale_tf.graph_editor.control_flow import (
    Frame,
    call_functions,
    forget_output_shapes,
    frame_name,
    frames,
    function_def,
    function_names,
)
from whale_tf.graph_editor.device import by_device, canonical_device, colocated_with, drop_colocation, merge_device, place
from whale_tf.graph_editor.function_copy import FunctionCopy
from whale_tf.graph_editor.reroute import replace_op, reroute_tensor, set_input, swap_tensors
from whale_tf.graph_editor.select import (
    Boundary,
    backward,
    between,
    boundary,
    consumers,
    find_ops,
    forward,
    predecessors,
    successors,
)
from whale_tf.graph_editor.staged import StagedEdit

__all__ = [
    "Boundary", "Frame", "FunctionCopy", "StagedEdit", "add_control_inputs", "backward", "barrier", "between", "boundary",
    "by_device", "call_functions", "canonical_device", "colocated_with", "consumers", "drop_colocation", "find_ops",
    "forget_output_shapes", "forward", "frame_name", "frames", "function_def", "function_names", "merge_device", "order",
    "place", "predecessors", "remove_control_inputs", "replace_op", "reroute_tensor", "set_input", "successors",
    "swap_tensors",
]
