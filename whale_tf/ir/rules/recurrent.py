"""Fused recurrent cells: examples pass, gate and hidden dimensions are needed whole, and gradients of weights are sums."""
from __future__ import annotations

from typing import Dict, Tuple

from whale_tf.ir.graph import Op
from whale_tf.ir.rules.rule import SUM, WHOLE, AnyDims, Rule, View

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


def _rule(inputs: str, outputs: str, roles: str) -> Rule:
    letters = sorted({c for c in inputs + outputs if c.isupper()} | {"t"})
    return Rule(tuple(map(_dims, inputs.split())), tuple(map(_dims, outputs.split())), roles,
                {**dict.fromkeys(letters, WHOLE), "b": SUM})


_RULES = {name: _rule(*described) for name, described in _CELLS.items()}


def cell(op: Op, view: View, name: str) -> Rule:
    return _RULES[name]
