"""Ops that compute: elementwise ops, contractions, reductions, convolutions, losses, recurrent cells."""
from __future__ import annotations

from whale_tf.ir.traits.row import Buffer, Cost, Gives, OpTraits, Recipe, merged, table


def _map(roles: str, value: str = "", flops: float = 1.0, passes_terms: bool = False) -> OpTraits:
    """Elementwise, with broadcasting; ``roles``: a letter per operand (:mod:`whale_tf.ir.rules.rule`)."""
    return OpTraits(rule=f"elementwise.elementwise {roles}", value=value, buffer=Buffer.OVERWRITES, flops=flops,
                    passes_terms=passes_terms)


_ADD_N = OpTraits(rule="elementwise.same_shape", buffer=Buffer.OVERWRITES)
_CROSS_ENTROPY = OpTraits(buffer=Buffer.OVERWRITES, cost=Cost.OPERAND, flops=6, recipe=Recipe.CLASSES)  # gradients replace logits
_QUOTIENT = OpTraits(rule="elementwise.quotient", buffer=Buffer.OVERWRITES)
_BIAS_ADD = OpTraits(rule="elementwise.bias_add", buffer=Buffer.OVERWRITES)

_ELEMENTWISE = table(
    ("Real Imag Conj", _map("m")),
    ("Neg", _map("m", "negative", passes_terms=True)),
    ("ZerosLike", _map("m", "zeros_like")._replace(batch="zeros_like", gives=Gives.LIKE, cost=Cost.MOVE)),
    ("OnesLike", _map("n", "ones_like")._replace(gives=Gives.LIKE, cost=Cost.MOVE)),
    ("Abs Inv Invert IsFinite IsInf IsNan LeakyRelu LogicalNot Reciprocal Relu Relu6 Square", _map("n")),
    ("Ceil Floor Rint Round Sign", _map("n")._replace(jumps=True)),
    ("Acos Acosh Asin Asinh Atan Atanh Cos Cosh Digamma Elu Erf Erfc Erfinv Exp Expm1 Lgamma Log Log1p Ndtri Rsqrt Selu Sigmoid "
     "Sin Sinh Softplus Softsign Sqrt Tan Tanh ComplexAbs Angle BesselI0e BesselI1e Bucketize PopulationCount DecodeBase64 "
     "DecodeCompressed EncodeBase64 UnicodeScript UnicodeTranscode StringToHashBucketFast StringToHashBucket "
     "StringToHashBucketStrong AsString StringToNumber StringLower StringUpper StringStrip StringLength StaticRegexReplace "
     "StaticRegexFullMatch FakeQuantWithMinMaxArgs BesselI0 BesselI1 BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e "
     "BesselY0 BesselY1 Dawsn Expint FresnelCos FresnelSin Spence",
     _map("n")._replace(is_dear=True)),
    ("RegexFullMatch", _map("nn")._replace(is_dear=True)),
    ("RegexReplace Substr", _map("nnn")._replace(is_dear=True)),
    ("StringJoin", OpTraits(rule="elementwise.strings", is_dear=True)),
    ("DecodeCSV", OpTraits(rule="elementwise.fields", is_dear=True)),
    ("DecodeRaw DecodePaddedRaw", OpTraits(rule="elementwise.decoded", is_dear=True)),
    ("Add AddV2", _map("aa", "add", passes_terms=True)),
    ("Sub", _map("aa", "subtract", passes_terms=True)),
    ("Mul", _map("mm", "multiply")),
    ("MulNoNan", _map("mm")),
    ("Maximum", _map("nn", "maximum")),
    ("Minimum", _map("nn", "minimum")),
    ("FloorDiv", _map("nn", "floor_divide")._replace(jumps=True)),
    ("FloorMod", _map("nn", "remainder")._replace(jumps=True)),
    ("SquaredDifference", _map("nn", flops=2)),
    ("Equal", _map("nn", "equal")),
    ("NotEqual", _map("nn", "not_equal")),
    ("Less", _map("nn", "less")),
    ("LessEqual", _map("nn", "less_equal")),
    ("Greater", _map("nn", "greater")),
    ("GreaterEqual", _map("nn", "greater_equal")),
    ("LogicalAnd", _map("nn", "logical_and")),
    ("LogicalOr", _map("nn", "logical_or")),
    ("Pow Mod TruncateMod TruncateDiv Atan2 Xlogy Xlog1py Zeta Polygamma Igamma Igammac IgammaGradA BitwiseAnd BitwiseOr "
     "BitwiseXor LeftShift RightShift ApproximateEqual NextAfter Complex", _map("nn")._replace(is_dear=True)),
    ("ClipByValue Betainc", _map("nnn")),
    ("ReluGrad Relu6Grad EluGrad SeluGrad LeakyReluGrad SoftplusGrad SoftsignGrad FakeQuantWithMinMaxArgsGradient",
     _map("mn")),
    ("TanhGrad SigmoidGrad SqrtGrad", _map("nm", flops=3)),
    ("RsqrtGrad", _map("nm", flops=4)),
    ("ReciprocalGrad InvGrad", _map("nm")),
    ("GeluGrad", OpTraits(flops=10)),
    ("SelectV2", _map("naa", "select")._replace(cost=Cost.MOVE)),
    ("Select", OpTraits(rule="elementwise.select", value="select_rows", cost=Cost.MOVE)),
    ("Cast", OpTraits(rule="elementwise.cast", batch="cast", value="cast", cost=Cost.MOVE, passes_terms=True)),
    ("Bitcast", OpTraits(rule="elementwise.bitcast", cost=Cost.MOVE)),
    ("RealDiv DivNoNan Xdivy", _QUOTIENT),
    ("Div", _QUOTIENT._replace(value="floor_divide")),
    ("AddN", _ADD_N._replace(cost=Cost.ADDS, passes_terms=True)),
    ("AccumulateNV2", _ADD_N._replace(has_shape_attr=True)),
    ("BiasAdd BiasAddV1", _BIAS_ADD),
)


def _product(rule: str) -> OpTraits:
    return OpTraits(rule=rule, cost=Cost.CONTRACTION)


def _convolution(rule: str) -> OpTraits:
    return OpTraits(rule=rule, cost=Cost.CONVOLUTION)


_CONTRACTIONS = table(
    ("MatMul SparseMatMul", _product("matmul.matmul")),
    ("BatchMatMul BatchMatMulV2 BatchMatMulV3", _product("matmul.batch_matmul")),
    ("Einsum", _product("matmul.einsum")),
    ("Conv2D", _convolution("convolution.convolution 2")),
    ("Conv3D", _convolution("convolution.convolution 3")),
    ("DepthwiseConv2dNative", _convolution("convolution.convolution 2 1")),
    ("Conv2DBackpropInput", _convolution("convolution.input_gradient 2")),
    ("Conv3DBackpropInputV2", _convolution("convolution.input_gradient 3")),
    ("DepthwiseConv2dNativeBackpropInput", _convolution("convolution.input_gradient 2 1")),
    ("Conv2DBackpropFilter", _convolution("convolution.filter_gradient 2")),
    ("Conv3DBackpropFilterV2", _convolution("convolution.filter_gradient 3")),
    ("DepthwiseConv2dNativeBackpropFilter", _convolution("convolution.filter_gradient 2 1")),
    ("Conv2DBackpropInputV2 Conv2DBackpropFilterV2 Conv3DBackpropInput Conv3DBackpropFilter", _convolution("")),
)


def _reduction(kind: str, value: str = "", flops: float = 1.0, passes_terms: bool = False) -> OpTraits:
    return OpTraits(rule=f"reduction.reduction {kind}", value=value, cost=Cost.OPERAND, flops=flops, passes_terms=passes_terms)


_REDUCTIONS = table(
    ("Sum", _reduction("sum", "sum", passes_terms=True)),
    ("Mean", _reduction("mean")),
    ("Max", _reduction("max", "max")),
    ("Min", _reduction("min", "min")),
    ("Prod", _reduction("prod", "product")),
    ("Any", _reduction("any", "any", flops=0)),
    ("All", _reduction("all", "all", flops=0)),
    ("EuclideanNorm", OpTraits(rule="reduction.reduction whole")),
    ("L2Loss", OpTraits(rule="reduction.total", cost=Cost.OPERAND, flops=2)),
    ("BiasAddGrad", OpTraits(rule="matmul.bias_add_grad", cost=Cost.OPERAND)),
    ("Softmax LogSoftmax", OpTraits(rule="reduction.along_last", buffer=Buffer.OVERWRITES, flops=5, recipe=Recipe.SOFTMAX)),
    ("Cumsum", OpTraits(rule="reduction.along_axis m")),
    ("Cumprod CumulativeLogsumexp", OpTraits(rule="reduction.along_axis n")),
    ("ReverseV2", OpTraits(rule="reduction.along_axis m", cost=Cost.MOVE)),
    ("Reverse", OpTraits(cost=Cost.MOVE)),
    ("Roll", OpTraits(rule="reduction.roll", cost=Cost.MOVE)),
    ("ReverseSequence", OpTraits(rule="reduction.reverse_sequence", cost=Cost.MOVE)),
    ("ArgMax ArgMin", OpTraits(rule="reduction.arg_extreme", cost=Cost.OPERAND)),
    ("TopK TopKV2", OpTraits(rule="reduction.top_k")),
    ("InTopK InTopKV2", OpTraits(rule="reduction.in_top_k")),
    ("ReduceJoin", OpTraits(rule="reduction.reduction whole", cost=Cost.OPERAND, is_dear=True)),
    ("DenseBincount", OpTraits(rule="reduction.dense_bincount", measure="bins", cost=Cost.OPERAND)),
    ("Bincount", OpTraits(measure="bins", cost=Cost.OPERAND)),
    ("FFT IFFT RFFT IRFFT", OpTraits(rule="reduction.spectrum 1", cost=Cost.OPERAND, flops=20)),
    ("FFT3D IFFT3D", OpTraits(rule="reduction.spectrum 3", cost=Cost.OPERAND, flops=60)),
    ("FFT2D IFFT2D RFFT2D IRFFT2D", OpTraits(rule="reduction.spectrum 2", cost=Cost.OPERAND, flops=40)),
)

_NORM = OpTraits(rule="normalisation.fused_batch_norm", cost=Cost.OPERAND, flops=8)

_NETWORKS = table(
    ("AvgPool", OpTraits(rule="convolution.pooling m 2", cost=Cost.POOL)),
    ("AvgPool3D", OpTraits(rule="convolution.pooling m 3", cost=Cost.POOL)),
    ("MaxPool", OpTraits(rule="convolution.pooling n 2", cost=Cost.POOL)),
    ("MaxPool3D", OpTraits(rule="convolution.pooling n 3", cost=Cost.POOL)),
    ("MaxPoolGrad MaxPool3DGrad", OpTraits(rule="convolution.pooling_gradient xyy x nnm", cost=Cost.POOL)),
    ("MaxPoolGradGrad", OpTraits(rule="convolution.pooling_gradient xyx y nnm")),
    ("AvgPoolGrad", OpTraits(rule="convolution.average_gradient 2", cost=Cost.POOL)),
    ("AvgPool3DGrad", OpTraits(rule="convolution.average_gradient 3", cost=Cost.POOL)),
    ("LRN", OpTraits(rule="convolution.local_response", cost=Cost.OPERAND, flops=10)),
    ("LRNGrad", OpTraits(rule="convolution.local_response", cost=Cost.OPERAND, flops=20)),
    ("ResizeBilinear ResizeNearestNeighbor ResizeBicubic", OpTraits(rule="convolution.resize")),
    ("ResizeBilinearGrad ResizeNearestNeighborGrad ResizeBicubicGrad", OpTraits(rule="convolution.resize_gradient")),
    ("ImageProjectiveTransformV2 ImageProjectiveTransformV3", OpTraits(rule="convolution.projective", cost=Cost.RESULT, flops=8)),
    ("CropAndResize", OpTraits(rule="convolution.crops xbiz y mnnn", batch="crops", flops=8)),
    ("CropAndResizeGradImage", OpTraits(rule="convolution.crops ybis x mnnn", batch="crops_gradient", flops=8)),
    ("CropAndResizeGradBoxes", OpTraits(rule="convolution.crops yxbi b mmnn", batch="crops", flops=8)),
    ("RGBToHSV HSVToRGB AdjustHue AdjustSaturation", OpTraits(rule="reduction.along_last", cost=Cost.OPERAND, flops=10)),
    ("AdjustContrastv2", OpTraits(rule="reduction.along_last 3", cost=Cost.OPERAND, flops=4)),
    ("ExtractImagePatches", OpTraits(rule="convolution.patches")),
    ("FusedBatchNorm FusedBatchNormV2", _NORM),
    ("FusedBatchNormV3", _NORM._replace(buffer=Buffer.OVERWRITES)),
    ("FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3",
     OpTraits(rule="normalisation.fused_batch_norm_grad", cost=Cost.OPERAND, flops=14)),
    ("SoftmaxCrossEntropyWithLogits", _CROSS_ENTROPY._replace(rule="loss.softmax_cross_entropy")),
    ("SparseSoftmaxCrossEntropyWithLogits", _CROSS_ENTROPY._replace(rule="loss.sparse_softmax_cross_entropy")),
    ("LSTMBlockCell", OpTraits(rule="recurrent.cell lstm")),
    ("LSTMBlockCellGrad", OpTraits(rule="recurrent.cell lstm_gradient")),
    ("BlockLSTM BlockLSTMV2", OpTraits(rule="recurrent.cell lstm_sequence")),
    ("BlockLSTMGrad BlockLSTMGradV2", OpTraits(rule="recurrent.cell lstm_sequence_gradient")),
    ("GRUBlockCell", OpTraits(rule="recurrent.cell gru")),
    ("GRUBlockCellGrad", OpTraits(rule="recurrent.cell gru_gradient")),
)


_STACKS = table(
    ("MatrixDeterminant", OpTraits(rule="stacks.each m s n", cost=Cost.OPERAND, is_dear=True)),
    ("LogMatrixDeterminant", OpTraits(rule="stacks.each m ss n", cost=Cost.OPERAND, is_dear=True)),
    ("MatrixSolve MatrixTriangularSolve BandedTriangularSolve TridiagonalSolve",
     OpTraits(rule="stacks.each mm m nm", cost=Cost.OPERAND, is_dear=True)),
    ("MatrixSolveLs", OpTraits(rule="stacks.each mm- m nmn", cost=Cost.OPERAND, is_dear=True)),
    ("TridiagonalMatMul", OpTraits(rule="stacks.each mmmm m nnnm", cost=Cost.OPERAND)),
    ("CholeskyGrad", OpTraits(rule="stacks.each mm m nm", cost=Cost.OPERAND, is_dear=True)),
    ("Svd", OpTraits(rule="stacks.each m vmm n", cost=Cost.OPERAND, is_dear=True)),
    ("SelfAdjointEigV2 Eig", OpTraits(rule="stacks.each m vm n", cost=Cost.OPERAND, is_dear=True)),
    ("Qr", OpTraits(rule="stacks.each m mm n", cost=Cost.OPERAND, is_dear=True)),
    ("Lu", OpTraits(rule="stacks.each m mv n", cost=Cost.OPERAND, is_dear=True)),
    ("MatrixLogarithm MatrixSquareRoot", OpTraits(rule="stacks.each m m n", cost=Cost.OPERAND, is_dear=True)),
    ("MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3", OpTraits(rule="stacks.set_diagonal", cost=Cost.MOVE)),
    ("Cross", OpTraits(rule="stacks.each vv v mm", flops=3)),
    ("LowerBound UpperBound", OpTraits(rule="stacks.each vv v nn", is_dear=True)),
    ("NthElement", OpTraits(rule="stacks.each v- s nn", cost=Cost.OPERAND)),
    ("ExtractVolumePatches", OpTraits(rule="stacks.each c c m")),
    ("MaxPoolWithArgmax MaxPoolGradWithArgmax", OpTraits(rule="stacks.pooled_with_positions", cost=Cost.POOL)),
    ("ScaleAndTranslate", OpTraits(rule="stacks.each i--- i mnnn", flops=8)),
    ("ScaleAndTranslateGrad", OpTraits(rule="stacks.each ii-- i mnnn", flops=8)),
    ("FakeQuantWithMinMaxVars QuantizeAndDequantizeV2 QuantizeAndDequantizeV4", OpTraits(rule="stacks.quantized", flops=4)),
    ("FakeQuantWithMinMaxVarsGradient QuantizeAndDequantizeV4Grad", OpTraits(rule="stacks.quantized_gradient", flops=3)),
    ("CombinedNonMaxSuppression", OpTraits(rule="stacks.each im---- mvvs nnnnnn", is_dear=True)),
)


def _told(measure: str, is_dear: bool = False) -> OpTraits:
    """An op without a rule whose operands tell how many rows its results have."""
    return OpTraits(measure=measure, is_dear=is_dear)


_RAGGED_AND_SPARSE = table(
    ("StringSplit StringSplitV2", _told("shape 2 = rows 0", True)),
    ("UnicodeDecode UnicodeDecodeWithOffsets", _told("splits 0 = elements 0", True)),
    ("UnicodeEncode", _told("rows 0 = splits 1", True)),
    ("StringNGrams", _told("splits 1 = splits 1", True)),
    ("RaggedTensorToTensor", OpTraits(measure="ragged_to_tensor", cost=Cost.MOVE)),
    ("RaggedTensorToSparse", _told("shape 2 = splits 0")),
    ("RaggedGather", _told("splits 0 = rows -1")),
    ("RaggedRange", _told("splits 0 = rows 0|1|2")),
    ("RaggedBincount", _told("rows 0 = splits 0")),
    ("RaggedCountSparseOutput", _told("shape 2 = splits 0")),
    ("DenseCountSparseOutput", _told("shape 2 = rows 0 matrix")),
    ("SparseCountSparseOutput", _told("shape 2 = shape 2 matrix")),
    ("SparseBincount", _told("rows 0 = shape 2 matrix")),
    ("SparseToDense", _told("rows 0 = shape 1")),
    ("SparseFillEmptyRows", _told("rows 2 = shape 2")._replace(rows_from="0 1")),
    ("DeserializeSparse", OpTraits(rows_from="0", cost=Cost.MOVE)),
    ("SparseReorder", OpTraits(rows_from="0 1", cost=Cost.MOVE)),
    ("SparseReshape", OpTraits(measure="sparse_reshaped", rows_from="0", cost=Cost.MOVE)),
    ("SparseTensorDenseMatMul", OpTraits(
        rule="gather.sparse_product", batch="grouped", measure="sparse_product", cost=Cost.SPARSE)),
)

ARITHMETIC = merged(_ELEMENTWISE, _CONTRACTIONS, _REDUCTIONS, _NETWORKS, _STACKS, _RAGGED_AND_SPARSE)
