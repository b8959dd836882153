"""Integer ops in plain NumPy, to compare the evaluators with."""

from __future__ import annotations

from typing import Any, Callable, Dict, List

import numpy as np


def _strided_slice(attrs: Dict[str, Any], x: List[np.ndarray]) -> List[np.ndarray]:
    if attrs.get("shrink_axis_mask"):
        return [x[0][int(x[1][0])]]
    return [x[0][::int(x[3][0])]]


REFERENCE: Dict[str, Callable[[Dict[str, Any], List[np.ndarray]], List[np.ndarray]]] = {
    "StridedSlice": _strided_slice,
    "Slice": lambda attrs, x: [x[0][int(x[1][0]):]],
    "GatherV2": lambda attrs, x: [x[0][x[1]]],
    "Pack": lambda attrs, x: [np.stack(x)],
    "ConcatV2": lambda attrs, x: [np.concatenate(x[:-1])],
    "Reshape": lambda attrs, x: [x[0].reshape(x[1])],
    "Transpose": lambda attrs, x: [x[0].T],
    "Max": lambda attrs, x: [x[0].max(int(x[1][0]), keepdims=True)],
    "Sum": lambda attrs, x: [x[0].sum(int(x[1][0]))],
    "Tile": lambda attrs, x: [np.tile(x[0], x[1])],
    "Range": lambda attrs, x: [np.arange(*x)],
    "Fill": lambda attrs, x: [np.full(x[0], x[1])],
    "InvertPermutation": lambda attrs, x: [np.argsort(x[0])],
    "ListDiff": lambda attrs, x: [np.setdiff1d(x[0], x[1]), np.flatnonzero(~np.isin(x[0], x[1]))],
    "SplitV": lambda attrs, x: np.split(x[0], np.cumsum(x[1])[:-1]),
    "Split": lambda attrs, x: np.split(x[1], attrs["num_split"]),
    "Unpack": lambda attrs, x: list(x[0]),
    "ConcatOffset": lambda attrs, x: [np.array([0, 0]), np.array([0, x[1][1]])],
    "Pad": lambda attrs, x: [np.pad(x[0], [tuple(row) for row in x[1]], "constant")],
    "FloorMod": lambda attrs, x: [np.mod(x[0], x[1])],
    "Equal": lambda attrs, x: [(x[0] == x[1]).astype(int)],
    "ExpandDims": lambda attrs, x: [x[0][None]],
    "Squeeze": lambda attrs, x: [x[0][0]],
}
