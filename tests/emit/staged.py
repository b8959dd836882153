"""Nodes that an emitting pass stages for a step written by hand, without a TensorFlow graph."""
from __future__ import annotations

from typing import Any, Callable, Dict, List

import numpy as np

from whale_tf._tf_compat import v1
from whale_tf.cluster import ONE_PROCESS
from whale_tf.emit.context import Context, Facts
from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes import compile_program
from whale_tf.passes.homes import find_homes
from whale_tf.passes.owners import find_owners
from whale_tf.plan import Plan


class Staged:
    """Nodes by name; those of clones are made as they are asked for, with an input for each of their op's."""

    def __init__(self, step: TrainingStep) -> None:
        self.graph = step.graph
        self.nodes: Dict[str, Any] = {}
        self.waits: Dict[str, List[str]] = {}
        self.constants: Dict[str, Any] = {}

    def add(self, op_type: str, name: str, inputs: Any = (), *, device: str = "", control_inputs: Any = (),
            attrs: Any = None) -> str:
        assert name not in self.nodes
        self.nodes[name] = v1.NodeDef(op=op_type, name=name, input=list(inputs), device=device)
        self.waits[name] = list(control_inputs)
        return name

    def const(self, value: Any, name: str, *, device: str = "") -> str:
        self.constants[name] = value
        return name

    def node(self, name: str) -> Any:
        if name not in self.nodes:
            op = self.graph.op(name.rpartition("/")[2])
            self.nodes[name] = v1.NodeDef(op=op.type, name=name, input=[self.graph.tensor_name(t)[:-2] for t in op.inputs])
        return self.nodes[name]

    change = node

    def move_input(self, name: str, position: int, tensor: str) -> None:
        self.node(name).input[position] = tensor

    def value(self, name: str, given: Callable[[str], Any]) -> Any:
        """What staged nodes compute from the given values of clones' tensors."""
        if name in self.constants:
            return self.constants[name]
        node = self.nodes.get(name)
        if node is None:
            return given(name)
        values = [self.value(read, given) for read in node.input]
        return VALUES[node.op](*values)


VALUES: Dict[str, Callable[..., Any]] = {
    "Identity": lambda x: x, "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "AddN": lambda *x: sum(x),
    "Maximum": np.maximum, "ConcatV2": lambda *x: np.concatenate(x[:-1], int(x[-1]))}


def context_of(step: TrainingStep, chosen: Plan, is_called: bool = False) -> Context:
    """On CPU:0, CPU:1 and so on; nodes go to a :class:`Staged`."""
    devices = [f"CPU:{device}" for device in range(4)]
    context = Context(None, (), step.graph, step.region, chosen, devices, Staged(step),  # type: ignore[arg-type]
                      ONE_PROCESS, compile_program(step, chosen), is_called,
                      facts=Facts(homes=find_homes(step, chosen), owners=find_owners(step, chosen)))
    return context
