"""Fused recurrent cells: examples pass; gate and hidden dimensions are needed whole; weights' gradients are sums."""
from __future__ import annotations

from typing import Dict, List, Tuple

from whale_tf.ir.graph import Op
from whale_tf.ir.rules.rule import SUM, WHOLE, AnyDims, Builder, Rule, View

# Operand and result dimensions: ``b`` examples, ``t`` steps, capitals are other (whole) dimensions; ``-`` is not divided.
_CELLS: Dict[str, Tuple[str, str, str]] = {
    "LSTMBlockCell": ("bI bH bH WG H H H G", "bH bH bH bH bH bH bH", "nnnnnnnn"),
    "LSTMBlockCellGrad": ("bI bH bH WG H H H G bH bH bH bH bH bH bH bH", "bH bG H H H", "nnnnnnnnnnnnnnaa"),
    "BlockLSTM": ("- tbI bH bH WG H H H G", "tbH tbH tbH tbH tbH tbH tbH", "nnnnnnnnn"),
    "BlockLSTMGrad": ("- tbI bH bH WG H H H G tbH tbH tbH tbH tbH tbH tbH tbH tbH",
                      "tbI bH bH WG H H H G", "nnnnnnnnnnnnnnnnaa"),
    "GRUBlockCell": ("bI bH WG WH G H", "bH bH bH bH", "nnnnnn"),
    "GRUBlockCellGrad": ("bI bH WG WH G H bH bH bH bH", "bI bH bH bG", "nnnnnnnnna"),
}
for _name in ("BlockLSTM", "BlockLSTMGrad"):
    _CELLS[_name + "V2"] = _CELLS[_name]


def _dims(text: str) -> AnyDims:
    return None if text == "-" else tuple((letter,) for letter in text)


def cell(op: Op, view: View) -> Rule:
    inputs, outputs, roles = _CELLS[op.type]
    letters: List[str] = sorted({c for c in inputs + outputs if c.isupper()} | {"t"})
    return Rule(tuple(map(_dims, inputs.split())), tuple(map(_dims, outputs.split())), roles,
                {**dict.fromkeys(letters, WHOLE), "b": SUM})


RULES: Dict[str, Builder] = dict.fromkeys(_CELLS, cell)
