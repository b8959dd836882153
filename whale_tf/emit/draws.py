"""Random numbers as the local script draws them: by the script's own op, once per step, for the whole mini-batch.

::

    random: own      clone 0:  RandomUniform([b_0, n], seed + s_0)      clone 1:  RandomUniform([b_1, n], seed + s_1)

    random: local    RandomUniform([B, n], seed) ──> Slice ──> clone 0
                                                └──> Slice ──> clone 1

Since this is the script's own op, a run without an update, which also draws, leaves the generator in the same state as in the
local script.  The op's shape must not be taken from values that the model computes, because these would then have to be computed
for the whole mini-batch.
"""

from __future__ import annotations

from typing import Iterator, Tuple

from whale_tf.emit.context import Clone, Context
from whale_tf.emit.convert import Converter
from whale_tf.errors import UnsupportedOpError
from whale_tf.ir.batch_axis import BatchAxis, Slice, Whole
from whale_tf.ir.graph import Op
from whale_tf.ir.layout import is_measured
from whale_tf.ir.traits import RANDOM
from whale_tf.ir.units import frames

LOCAL = "local"


def check_draws(context: Context, own: bool, processes: int) -> None:
    """Raises:
        UnsupportedOpError: a draw cannot be made for the whole mini-batch.
    """
    axis, graph = context.region.batch, context.graph
    if context.plan.random != LOCAL:
        return
    in_loop = frames(graph)
    for index in () if context.tf_graph.building_function else sorted(context.region.sections):
        op = graph.ops[index]
        if op.type in RANDOM and "seed" in op.attrs:
            raise UnsupportedOpError(
                f"random is 'local', but {op.name!r} (a {op.type}) needs all examples, so a copy of it draws in each step, while "
                "runs of the Session without an update draw from the op itself: both have a generator of their own; put the step "
                "into a tf.function, compute it in the input pipeline, or leave random at 'own'")
    for op, inner in _draws(axis):
        why = ""
        if inner != op:
            why = f"{inner.name!r}, in a function that it calls, draws for the examples of each iteration or branch"
        elif op.id in in_loop:
            why = f"it is inside the while loop {in_loop[op.id][0]!r}"
        elif own or processes > 1:
            why = "model replicas or processes take mini-batches of their own; set io.nested_batch to 'divide'"
        elif is_measured(axis.layout(op.outputs[0]).blocks):
            why = "it is not known how many rows belong to an example"
        if why:
            raise UnsupportedOpError(
                f"random is 'local', but {op.name!r} (a {op.type}) cannot draw for the whole mini-batch: {why}; draw the numbers "
                "outside and pass them in, or leave random at 'own'")


def _draws(axis: BatchAxis) -> Iterator[Tuple[Op, Op]]:
    """Each op that draws for the examples, or calls a function that does, with the op that draws."""
    for index in axis.own_seed:
        yield axis.graph.ops[index], axis.graph.ops[index]
    for (index, _), body in axis.bodies.items():
        for _, inner in _draws(body):
            yield axis.graph.ops[index], inner


def draw_whole(context: Context, converter: Converter) -> None:
    """Gives draws shapes that depend only on the inputs."""
    axis, graph = context.region.batch, context.graph
    for index in axis.own_seed if context.plan.random == LOCAL else ():
        op = graph.ops[index]
        sizes = axis.counted(op.inputs[0])
        if sizes is not None and context.region.contains(graph.producer(op.inputs[0])):
            shape = converter.convert(
                graph.tensor_name(op.inputs[0]), op.inputs[0], Whole(tuple(sizes)), context.task_graph_of(op), Clone(0, 0, 0), op)
            context.edit.move_input(op.name, 0, shape)


def take_rows(context: Context, converter: Converter, op: Op, clone: Clone) -> None:
    """Makes a clone's op pass on its rows of the original's draw."""
    tensor = op.outputs[0]
    layout = context.region.batch.layout(tensor)
    whole = context.graph.tensor_name(tensor)
    rows = converter.convert(whole, tensor, Slice(layout.dim, layout.blocks or (1,)), context.task_graph_of(op), clone, op)
    node = context.edit.node(f"{context.scope(clone)}/{op.name}")
    waits = [edge for edge in node.input if edge[0] == "^"]
    node.op = "Identity"
    node.attr.clear()
    node.attr["T"].type = context.dtype(tensor).as_datatype_enum
    del node.input[:]
    node.input.extend([rows, *waits])
