"""Which op types may compute in a type with half the bytes: the column ``precision`` of the table.

The lists are those of TensorFlow's own pass (``auto_mixed_precision_lists.h``, for float16), without types that are not in the
table.  Sums and means are float32 under both low types, although TensorFlow lets bfloat16 sums follow their neighbours on some
CPUs.
"""
from __future__ import annotations

from typing import Dict

from whale_tf.ir.traits.row import OpTraits, Precision, Table

_LISTS: Dict[Precision, str] = {
    Precision.LOW:
        "BatchMatMul BatchMatMulV2 BatchMatMulV3 BlockLSTM BlockLSTMGrad BlockLSTMGradV2 BlockLSTMV2 Conv2D "
        "Conv2DBackpropFilter Conv2DBackpropInput Conv3D Conv3DBackpropFilter Conv3DBackpropFilterV2 Conv3DBackpropInput "
        "Conv3DBackpropInputV2 DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput "
        "Einsum GRUBlockCell GRUBlockCellGrad LSTMBlockCell LSTMBlockCellGrad MatMul",
    Precision.INFERRED:
        "Add AddN AddV2 AvgPool AvgPool3D AvgPool3DGrad AvgPoolGrad BiasAdd BiasAddGrad BiasAddV1 Elu EluGrad Erf Erfc "
        "FloorDiv FusedBatchNormGradV2 FusedBatchNormGradV3 FusedBatchNormV2 FusedBatchNormV3 Inv LeakyRelu LeakyReluGrad Log "
        "Log1p LogSoftmax Mul Prod RealDiv Reciprocal Rsqrt Selu SeluGrad Sigmoid SigmoidGrad Softmax Softplus SoftplusGrad "
        "Softsign SoftsignGrad Sqrt Square SquaredDifference Sub Tanh TanhGrad",
    Precision.NEUTRAL:
        "Abs ArgMax ArgMin BatchToSpace BatchToSpaceND BroadcastTo Ceil CheckNumerics ClipByValue Concat ConcatV2 "
        "DepthToSpace DynamicPartition DynamicStitch EnsureShape Equal ExpandDims Fill Floor Gather GatherNd GatherV2 Greater "
        "GreaterEqual Identity IsFinite IsInf IsNan Less LessEqual Max MaxPool MaxPool3D MaxPool3DGrad MaxPoolGrad "
        "MaxPoolGradGrad Maximum Min Minimum MirrorPad MirrorPadGrad Neg NotEqual OneHot OnesLike Pack Pad PadV2 "
        "PreventGradient Relu Relu6 Relu6Grad ReluGrad Reshape ResizeNearestNeighbor ResizeNearestNeighborGrad Reverse "
        "ReverseSequence ReverseV2 Round Select SelectV2 Shape ShapeN Sign Size Slice Snapshot SpaceToBatch SpaceToBatchND "
        "SpaceToDepth Split SplitV Squeeze StopGradient StridedSlice StridedSliceGrad Tile TopK TopKV2 Transpose Unpack Where "
        "ZerosLike",
    Precision.HIGH:
        "Exp Expm1 L2Loss Mean Pow SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits Sum",
}


def with_precision(table: Table) -> Table:
    """The table with its column ``precision``.

    Raises:
        KeyError: a listed type has no row.
    """
    result = dict(table)
    for precision, names in _LISTS.items():
        for name in names.split():
            row: OpTraits = table[name]
            result[name] = row._replace(precision=precision)
    return result
