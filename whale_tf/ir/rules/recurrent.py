"""Fused recurrent cells: examples pass, gate and hidden dimensions are needed whole, and gradients of weights are sums."""
from __future__ import annotations

from typing import Dict, List, Tuple

from whale_tf.ir.graph import Op
from whale_tf.ir.rules.rule import SUM, WHOLE, AnyDims, Builder, Rule, View

# Dimensions of operands and results: ``b`` examples, ``t`` steps, capitals other (whole) dimensions; ``-`` is not divided.
_CELLS: Dict[str, Tuple[str, str, str]] = {
    "lstm": ("bI bH bH WG H H H G", "bH bH bH bH bH bH bH", "nnnnnnnn"),
    "lstm_gradient": ("bI bH bH WG H H H G bH bH bH bH bH bH bH bH", "bH bG H H H", "nnnnnnnnnnnnnnaa"),
    "lstm_sequence": ("- tbI bH bH WG H H H G", "tbH tbH tbH tbH tbH tbH tbH", "nnnnnnnnn"),
    "lstm_sequence_gradient": ("- tbI bH bH WG H H H G tbH tbH tbH tbH tbH tbH tbH tbH tbH",
                               "tbI bH bH WG H H H G", "nnnnnnnnnnnnnnnnaa"),
    "gru": ("bI bH WG WH G H", "bH bH bH bH", "nnnnnn"),
    "gru_gradient": ("bI bH WG WH G H bH bH bH bH", "bI bH bH bG", "nnnnnnnnna"),
}


def _dims(text: str) -> AnyDims:
    return None if text == "-" else tuple((letter,) for letter in text)


def cell(name: str) -> Builder:
    """The builder of one cell."""
    inputs, outputs, roles = _CELLS[name]
    letters: List[str] = sorted({c for c in inputs + outputs if c.isupper()} | {"t"})
    rule = Rule(tuple(map(_dims, inputs.split())), tuple(map(_dims, outputs.split())), roles,
                {**dict.fromkeys(letters, WHOLE), "b": SUM})

    def build(op: Op, view: View) -> Rule:
        return rule
    return build
