"""Version 1 while loops in clones: tensors that a clone adds outside a loop and reads inside enter the loop's frame.

The executor separates the iterations of a loop by frames, and all inputs of an op must be in the same frame::

    before   weight ──────────────────────┐             Const and other tensors of the frame around the loop
             x ──> Enter ──> ... ──> y ───┴─> Mul        y: in the loop's frame

    after    constant    y ──^──> Const ──> Mul          a copy that waits for y in every iteration
             otherwise   weight ──> Enter ──> Mul        a loop-invariant input: Enter(is_constant=True)
"""

from __future__ import annotations

from typing import Dict, List, Tuple

from whale_tf._tf_compat import NodeDef
from whale_tf.emit.context import Clone, Context
from whale_tf.errors import UnsupportedOpError
from whale_tf.graph_editor.function_copy import data_inputs
from whale_tf.ir.traits import ENTERS, EXITS
from whale_tf.ir.units import frames
from whale_tf.program import EVERY

Frames = Tuple[str, ...]  # frame names, outermost first


def check_loops(context: Context) -> None:
    """Refuses loops that clones cannot run.

    Raises:
        UnsupportedOpError: a loop has ops of two TaskGraphs, or draws random numbers that all clones must share.
    """
    task_graph: Dict[str, int] = {}
    shared = context.region.drawn_once
    for index, frame in frames(context.graph).items():
        op = context.graph.ops[index]
        if not context.region.contains(op):
            continue
        if task_graph.setdefault(frame[0], context.task_graph_of(op)) != context.task_graph_of(op):
            raise UnsupportedOpError(
                f"the while loop {frame[0]!r} has ops of TaskGraphs {context.plan.task_graphs[task_graph[frame[0]]].name!r} "
                f"and {context.plan.task_graphs[context.task_graph_of(op)].name!r} ({op.name!r} is one of them); a loop runs on "
                "one VirtualDevice: put the whole tf.while_loop under one annotation")
        if index in shared:
            raise UnsupportedOpError(
                f"op {op.name!r} ({op.type}) draws random numbers inside the while loop {frame[0]!r} that must be the same on "
                "all devices; draw them before the loop"
            )


def enter_loops(context: Context) -> None:
    """Makes tensors that were staged outside of loops and are read inside enter the loops' frames.  Everything that reads
    tensors of a frame must be staged before."""
    inside = frames(context.graph)
    if inside:
        _Entrance(context, inside).run()


class _Entrance:
    def __init__(self, context: Context, frames_of: Dict[int, Frames]) -> None:
        self._context = context
        self._edit = context.edit
        self._frames: Dict[str, Frames] = {}  # staged node -> frames it runs in
        self._producers: Dict[str, List[str]] = {}  # clone of an op in a loop -> clones of what the original reads
        self._parallel_iterations: Dict[str, int] = {}
        self._entered: Dict[Tuple[str, Frames], str] = {}
        self._count = 0
        for task_graph in range(len(context.plan.task_graphs)):
            for at in [*context.copies(task_graph)[1:], *context.clones(task_graph), EVERY]:
                level, region = isinstance(at, Clone), context.region
                members = [index for index in frames_of
                           if region.task_graph[index] == task_graph and region.contains(context.graph.ops[index])
                           and (index in region.batch_level) == level and (index in region.sections) == (at == EVERY)]
                self._add_clones(context.scope(at), members, frames_of)

    def _add_clones(self, scope: str, members: List[int], frames_of: Dict[int, Frames]) -> None:
        graph = self._context.graph
        renamed: Dict[str, str] = {}
        for index in members:
            if graph.ops[index].type in ENTERS:
                attributes = self._edit.node(f"{scope}/{graph.ops[index].name}").attr
                name = attributes["frame_name"].s.decode()
                renamed[frames_of[index][-1]] = name
                self._parallel_iterations[name] = attributes["parallel_iterations"].i
        for index in members:
            op = graph.ops[index]
            name = f"{scope}/{op.name}"
            self._frames[name] = tuple(renamed[frame] for frame in frames_of[index])
            self._producers[name] = [f"{scope}/{graph.producer(t).name}" for t in op.inputs]

    def run(self) -> None:
        nodes = self._edit.nodes()
        for node in nodes:  # conversions are staged after the tensors that they read
            if node.name not in self._frames:
                frame = max((self._of(edge) for edge in node.input), key=len, default=())
                if frame:
                    self._frames[node.name] = frame
        for node in nodes:
            if node.name in self._frames:
                self._bring_in(node, self._frames[node.name])

    def _of(self, edge: str) -> Frames:
        """Frames of a tensor (or of the op at the other end of a control edge)."""
        name = edge.lstrip("^").partition(":")[0]
        frame = self._frames.get(name, ())
        return frame[:-1] if frame and self._edit.node(name).op in EXITS else frame

    def _bring_in(self, node: NodeDef, frame: Frames) -> None:
        if node.op in ENTERS:
            frame = frame[:-1]
        edges = data_inputs(node)
        own = [edge for edge in edges if self._of(edge) == frame]
        for position, edge in enumerate(edges):
            if len(self._of(edge)) < len(frame):
                producer = self._producers[node.name][position] if node.name in self._producers else ""
                anchor = producer if self._of(producer) == frame else own[0]  # a constant outside may have no clone
                node.input[position] = self._inside(edge, frame, anchor.partition(":")[0])
        for position, edge in enumerate(node.input):
            if edge.startswith("^") and edge[1:] in self._context.guards and len(self._of(edge)) < len(frame):
                node.input[position] = "^" + self._inside(edge[1:], frame, own[0].partition(":")[0])

    def _inside(self, edge: str, frame: Frames, anchor: str) -> str:
        """An outside tensor as an op in a frame reads it; it is alive whenever ``anchor`` is."""
        self._count += 1
        scope = self._context.name("enter", str(self._count))
        device = self._edit.node(anchor).device
        name = edge.partition(":")[0]
        if name in self._edit and self._edit.node(name).op == "Const":
            constant = self._edit.node(name)
            attrs = {key: constant.attr[key] for key in ("dtype", "value")}
            return self._edit.add("Const", scope, device=constant.device, control_inputs=[anchor], attrs=attrs)
        for depth in range(len(self._of(edge)), len(frame)):
            edge = self._enter(edge, frame[: depth + 1], device)
        return self._edit.add("Identity", scope, [edge], device=device, control_inputs=[anchor])

    def _enter(self, edge: str, frame: Frames, device: str) -> str:
        key = (edge, frame)
        if key not in self._entered:
            self._count += 1
            attrs = {"frame_name": frame[-1], "is_constant": True, "parallel_iterations": self._parallel_iterations[frame[-1]]}
            self._entered[key] = self._edit.add(
                "Enter", self._context.name("enter", str(self._count)), [edge], device=device, attrs=attrs)
        return self._entered[key]
