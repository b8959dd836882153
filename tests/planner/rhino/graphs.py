"""Op graphs of a training step, written down by hand: no TensorFlow."""
from __future__ import annotations

from typing import List, Sequence, Tuple

import numpy as np

from whale_tf.ir.graph import OpGraph, Phase


class Network:
    """Dense layers ``x W_i`` with a ReLU between, their gradients, and one momentum update for each."""

    def __init__(self, batch: int, widths: Sequence[int], trained: bool = True) -> None:
        self.graph = OpGraph()
        self.batch, self.widths = batch, widths
        self.weights: List[Tuple[int, int]] = []
        values = [self.add("Placeholder", "x", (), (batch, widths[0]), Phase.INPUT)]
        products: List[int] = []
        for i, (before, after) in enumerate(zip(widths, widths[1:])):
            name = f"layer_{i}"
            reference = self.add("VariableV2", name + "/w", (), (before, after), dtype="float32_ref")
            read = self.add("Identity", name + "/w/read", (reference,), (before, after))
            self.weights.append((reference, read))
            products.append(self.add("MatMul", name + "/MatMul", (values[-1], read), (batch, after), transpose_a=False,
                                     transpose_b=False))
            values.append(self.add("Relu", name + "/Relu", (products[-1],), (batch, after)))
        if trained:
            self._train(values, products)

    def add(self, kind: str, name: str, inputs: Sequence[int], shape: Tuple[int, ...], phase: Phase = Phase.FORWARD,
            dtype: str = "float32", **attrs: object) -> int:
        return self.graph.add(name, kind, inputs, [(shape, dtype)], attrs=dict(attrs), phase=phase).outputs[0]

    def constant(self, name: str, value: float) -> int:
        op = self.graph.add(name, "Const", (), [((), "float32")], value=np.float32(value), phase=Phase.APPLY)
        return op.outputs[0]

    def _train(self, values: List[int], products: List[int]) -> None:
        back, batch = Phase.BACKWARD, self.batch
        gradient = self.add("Square", "loss_grad", (values[-1],), (batch, self.widths[-1]), back)
        for i in reversed(range(len(self.weights))):
            before, after = self.widths[i], self.widths[i + 1]
            name, (reference, read) = f"gradients/layer_{i}", self.weights[i]
            gradient = self.add("ReluGrad", name + "/Relu", (gradient, values[i + 1]), (batch, after), back)
            change = self.add("MatMul", name + "/W", (values[i], gradient), (before, after), back, transpose_a=True,
                              transpose_b=False)
            if i:
                gradient = self.add("MatMul", name + "/X", (gradient, read), (batch, before), back, transpose_a=False,
                                    transpose_b=True)
            slot = self.add("VariableV2", f"layer_{i}/w/Momentum", (), (before, after), dtype="float32_ref")
            rate, momentum = self.constant(name + "/rate", 0.1), self.constant(name + "/momentum", 0.9)
            self.add("ApplyMomentum", f"update_{i}", (reference, slot, rate, change, momentum), (before, after),
                     Phase.APPLY, dtype="float32_ref")
