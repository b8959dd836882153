"""Variables, their reads and writes, and random numbers."""
from __future__ import annotations

from typing import Dict, List, Tuple

from whale_tf.ir.traits.row import Cost, OpTraits, Role, VariableUse, merged, table

_VARIABLE = OpTraits(rule="state.source", state=VariableUse.VARIABLE, cost=Cost.FREE)
_ASSIGN = OpTraits(rule="state.update vg", state=VariableUse.ASSIGN, cost=Cost.MOVE)
_SCATTER = OpTraits(rule="state.update vir", state=VariableUse.WRITE)

_VARIABLES = table(
    ("Variable VariableV2 VarHandleOp AutoReloadVariable", _VARIABLE),
    ("TemporaryVariable", _VARIABLE._replace(state=VariableUse.TEMPORARY, cost=Cost.RESULT)),
    ("DestroyTemporaryVariable", OpTraits(rule="state.undivided")),
    ("ReadVariableOp", OpTraits(rule="state.read", state=VariableUse.READ, cost=Cost.FREE, of_value="Identity")),
    ("IsVariableInitialized VarIsInitializedOp", OpTraits(rule="state.undivided", state=VariableUse.IS_INITIALIZED)),
    ("VariableShape", OpTraits(rule="state.undivided", state=VariableUse.HANDLE, cost=Cost.FREE, of_value="Shape")),
    ("DestroyResourceOp", OpTraits(rule="state.undivided", state=VariableUse.HANDLE)),
    ("Assign AssignVariableOp", _ASSIGN),
    ("AssignAdd AssignSub AssignAddVariableOp AssignSubVariableOp", _ASSIGN._replace(adds=True)),
    ("AssignVariableXlaConcatND", OpTraits(state=VariableUse.WRITE, cost=Cost.MOVE)),
    ("ScatterAdd ScatterSub ScatterUpdate ScatterMul ScatterDiv ScatterMin ScatterMax ResourceScatterAdd ResourceScatterSub "
     "ResourceScatterUpdate ResourceScatterMul ResourceScatterDiv ResourceScatterMin ResourceScatterMax", _SCATTER),
    ("ScatterNdUpdate ScatterNdAdd ScatterNdSub ScatterNdMin ScatterNdMax ResourceScatterNdUpdate ResourceScatterNdAdd "
     "ResourceScatterNdSub ResourceScatterNdMin ResourceScatterNdMax StridedSliceAssign ResourceStridedSliceAssign "
     "ResourceCountUpTo", OpTraits(state=VariableUse.WRITE)),
    ("CountUpTo", OpTraits(rule="state.undivided", state=VariableUse.WRITE)),
    ("StatefulUniform StatefulUniformInt StatefulUniformFullInt StatefulStandardNormal StatefulStandardNormalV2 "
     "StatefulTruncatedNormal StatefulRandomBinomial RngReadAndSkip RngSkip", OpTraits(state=VariableUse.DRAW)),
    ("AccumulatorApplyGradient ResourceAccumulatorApplyGradient SparseAccumulatorApplyGradient",
     OpTraits(state=VariableUse.ACCUMULATE)),
)

# Optimizer -> FLOPs of an update per element of the variable (counted term by term in its formula), and the operands of the
# dense and the sparse update, in the letters of ``ir/rules/state.py``.
_OPTIMIZERS: Dict[str, Tuple[float, str, str]] = {
    "GradientDescent": (2, "vsg", ""), "Momentum": (4, "vvsgs", "vvsris"), "KerasMomentum": (4, "vvsgs", "vvsris"),
    "Adam": (12, "vvvssssssg", ""), "AdamWithAmsgrad": (1, "vvvvssssssg", ""), "AdaMax": (9, "vvvsssssg", ""),
    "Adagrad": (5, "vvsg", "vvsri"), "AdagradV2": (6, "vvssg", "vvssri"), "AdagradDA": (1, "vvvgssss", "vvvrissss"),
    "RMSProp": (9, "vvvssssg", "vvvssssri"), "CenteredRMSProp": (13, "vvvvssssg", "vvvvssssri"),
    "Adadelta": (12, "vvvsssg", "vvvsssri"), "Ftrl": (14, "vvvgssss", "vvvrissss"),
    "FtrlV2": (16, "vvvgsssss", "vvvrisssss"), "AddSign": (8, "vvssssg", ""), "PowerSign": (9, "vvssssg", ""),
    "ProximalGradientDescent": (4, "vsssg", "vsssri"), "ProximalAdagrad": (1, "vvsssg", "vvsssri"),
}


def _updates(flops: float, dense: str, sparse: str, name: str) -> List[Tuple[str, OpTraits]]:
    """Rows of an optimizer's dense and sparse updates, for reference and resource variables."""
    row = OpTraits(state=VariableUse.UPDATE, cost=Cost.UPDATE, flops=flops)
    rows = [(f"Apply{name} ResourceApply{name}", row._replace(rule=f"state.update {dense}"))]
    if sparse:
        rows.append((f"SparseApply{name} ResourceSparseApply{name}", row._replace(rule=f"state.update {sparse}")))
    return rows


_UPDATES = table(*(row for name, optimizer in _OPTIMIZERS.items() for row in _updates(*optimizer, name)))

# A shard draws its own numbers; with ``philox`` it can draw those of the local script, by advancing the counter to its first
# element.
_DRAWN = OpTraits(rule="random.drawn", role=Role.RANDOM, generates=True)

_RANDOM = table(
    ("RandomUniform", _DRAWN._replace(philox=True, stateful_op="StatefulUniform")),
    ("RandomStandardNormal", _DRAWN._replace(philox=True, stateful_op="StatefulStandardNormalV2")),
    ("TruncatedNormal", _DRAWN._replace(philox=True, stateful_op="StatefulTruncatedNormal")),
    ("StatelessRandomUniformV2 StatelessRandomNormalV2 StatelessTruncatedNormalV2", _DRAWN._replace(philox=True)),
    ("RandomUniformInt StatelessRandomUniform StatelessRandomNormal StatelessTruncatedNormal StatelessRandomUniformInt "
     "StatelessRandomUniformIntV2", _DRAWN),
    ("Multinomial", OpTraits(rule="random.multinomial", role=Role.RANDOM)),
    ("RandomShuffle", OpTraits(rule="random.shuffle", role=Role.RANDOM)),
    ("StatelessRandomGetKeyCounter StatelessRandomGetKey StatelessRandomGetCounter StatelessRandomGetAlg",
     OpTraits(rule="state.undivided", cost=Cost.FREE)),
    ("RandomGamma RandomPoisson RandomPoissonV2 ParameterizedTruncatedNormal", OpTraits(role=Role.RANDOM)),
)

STATE = merged(_VARIABLES, _UPDATES, _RANDOM)
