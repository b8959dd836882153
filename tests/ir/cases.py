"""Every op type of the rule table that computes on tensors, with operands to run it on."""

from __future__ import annotations

from typing import Any, List

import numpy as np
import tensorflow.compat.v1 as tf

from tests.ir.sharding import Case
from whale_tf.ir.traits import types_where

raw = tf.raw_ops
_random = np.random.RandomState(0)


def real(*shape: int) -> np.ndarray:
    return _random.uniform(0.5, 2.0, shape)


def whole(low: int, high: int, *shape: int) -> np.ndarray:
    return _random.randint(low, high, shape).astype(np.int32)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, dtype=np.int32)


_INTEGER = {"Invert", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift", "PopulationCount", "TruncateMod",
            "TruncateDiv", "FloorMod", "Mod"}
_BOOLEAN = {"LogicalNot", "LogicalAnd", "LogicalOr"}
_UNIT = {"Acos", "Asin", "Atanh", "Erfinv", "Ndtri"}
_COMPLEX = {"Real", "Imag", "Conj", "ComplexAbs", "Angle"}
# need attributes, strings or state, or are the wire names of ops that Python cannot make; they share a tested builder
NOT_BUILT = {
    "EnsureShape", "PlaceholderWithDefault", "RefIdentity", "Copy", "CopyHost", "XlaSharding", "DebugIdentity", "Bucketize",
    "DebugGradientIdentity", "DecodeRaw", "DecodePaddedRaw", "StringToHashBucketFast", "AsString", "StringToNumber", "CheckNumericsV2",
    "FakeQuantWithMinMaxArgs", "FakeQuantWithMinMaxArgsGradient", "AccumulateNV2", "Print", "PrintV2", "BiasAddV1", "Ndtri",
    "Erfinv", "MulNoNan", "Xlog1py", "SelectV2", "Mod", "NextAfter", "DeepCopy", "IdentityN", "Select", "Cast", "AddN", "Bitcast",
    "BiasAdd", "LeakyRelu", "LeakyReluGrad", "CheckNumerics", "ApproximateEqual", "Complex", "Betainc", "IgammaGradA", "Inv",
    "InvGrad", "ReciprocalGrad", "PopulationCount", "Snapshot", "StringToHashBucket", "StringToHashBucketStrong", "StringLower",
    "StringUpper", "StringStrip", "StringLength", "StaticRegexReplace", "StaticRegexFullMatch", "RegexReplace", "RegexFullMatch",
    "DecodeBase64", "DecodeCompressed", "EncodeBase64", "UnicodeScript", "UnicodeTranscode", "Substr", "StringJoin", "DecodeCSV",
    "ReduceJoin", "IFFT", "IRFFT", "FFT3D", "IFFT3D", "FFT2D", "IFFT2D", "IRFFT2D", "SparseSegmentMean", "SparseSegmentSqrtN",
    "SparseSegmentMeanWithNumSegments", "SparseSegmentSqrtNWithNumSegments", "SparseSegmentSumGrad", "SparseSegmentSqrtNGrad"}


def _operands(name: str, count: int) -> List[np.ndarray]:
    shapes = [(3, 4), (4,)] if count == 2 and not name.endswith("Grad") else [(3, 4)] * count
    arrays = []
    for shape in shapes:
        if name in _BOOLEAN:
            arrays.append(_random.rand(*shape) > 0.5)
        elif name in _INTEGER:
            arrays.append(whole(1, 7, *shape))
        elif name in _COMPLEX:
            arrays.append(real(*shape) + 1j * real(*shape))
        elif name in ("Acosh",):
            arrays.append(real(*shape) + 1.0)
        elif name in ("Zeta",):
            arrays.append(real(*shape) + 2.0)
        elif name in ("Polygamma",):
            arrays.append(np.round(real(*shape) * 2))
        else:
            arrays.append(real(*shape) * (0.4 if name in _UNIT else 1.0))
    return arrays


def table_cases() -> List[Case]:
    """Elementwise op types, by the number of operands that TensorFlow's op takes."""
    cases = []
    for name in sorted(types_where(lambda row: row.rule.startswith("elementwise."))):
        if name in NOT_BUILT or not hasattr(raw, name):
            continue
        function = getattr(raw, name)
        count = _COUNTS.get(name) or _operand_count(name)
        cases.append(Case(name, _caller(function, name), _operands(name, count)))
    return cases


_COUNTS = {"ClipByValue": 3}


def _operand_count(name: str) -> int:
    with tf.Graph().as_default() as graph:
        lookup = getattr(graph, "op_def_for_type", None) or graph._get_op_def
        return len(lookup(name).input_arg)


def _caller(function: Any, name: str) -> Any:
    with tf.Graph().as_default() as graph:
        lookup = getattr(graph, "op_def_for_type", None) or graph._get_op_def
        names = [argument.name for argument in lookup(name).input_arg]
    more = {"Tout": tf.float64} if name in _COMPLEX - {"Conj"} else {}
    return lambda *tensors: function(**dict(zip(names, tensors), **more))


def special_elementwise() -> List[Case]:
    flags = np.array([True, False, True])
    return [
        Case("Select-vector", lambda c, x, y: raw.Select(condition=c, x=x, y=y), [flags, real(3, 4), real(3, 4)]),
        Case("Select", lambda c, x, y: raw.Select(condition=c, x=x, y=y), [real(3, 4) > 1, real(3, 4), real(3, 4)]),
        Case("SelectV2", lambda c, x, y: raw.SelectV2(condition=c, t=x, e=y), [flags[:, None], real(3, 4), real(4)]),
        Case("Cast", lambda x: raw.Cast(x=x, DstT=tf.float32), [real(3, 4)]),
        Case("Bitcast", lambda x: raw.Bitcast(input=x, type=tf.int64), [real(3, 4)]),
        Case("AddN", lambda x, y, z: raw.AddN(inputs=[x, y, z]), [real(3, 4)] * 3),
        Case("BiasAdd", lambda x, b: raw.BiasAdd(value=x, bias=b), [real(3, 2, 4), real(4)]),
        Case("BiasAdd-NCHW", lambda x, b: raw.BiasAdd(value=x, bias=b, data_format="NCHW"), [real(3, 4, 2, 5), real(4)]),
        Case("IdentityN", lambda x, y: raw.IdentityN(input=[x, y]), [real(3, 4), real(5)]),
        Case("LeakyRelu", lambda x: raw.LeakyRelu(features=x), [real(3, 4) - 1]),
        Case("LeakyReluGrad", lambda g, x: raw.LeakyReluGrad(gradients=g, features=x), [real(3, 4), real(3, 4) - 1]),
        Case("CheckNumerics", lambda x: raw.CheckNumerics(tensor=x, message=""), [real(3, 4)]),
        Case("Complex", lambda x, y: raw.Complex(real=x, imag=y, Tout=tf.complex128), [real(3, 4), real(3, 4)]),
        Case("Betainc", lambda a, b, x: raw.Betainc(a=a, b=b, x=x), [real(3, 4), real(3, 4), real(3, 4) * 0.4]),
    ]


def contractions() -> List[Case]:
    cases = []
    for ta in (False, True):
        for tb in (False, True):
            a, b = real(*((5, 4) if ta else (4, 5))), real(*((3, 5) if tb else (5, 3)))
            cases.append(Case(f"MatMul-{int(ta)}{int(tb)}", lambda x, y, ta=ta, tb=tb: raw.MatMul(
                a=x, b=y, transpose_a=ta, transpose_b=tb), [a, b]))
    cases += [
        Case("BatchMatMul", lambda x, y: raw.BatchMatMul(x=x, y=y, adj_y=True), [real(2, 3, 4, 5), real(2, 3, 6, 5)]),
        Case("BatchMatMulV2", lambda x, y: raw.BatchMatMulV2(x=x, y=y), [real(2, 1, 4, 5), real(3, 5, 6)]),
        Case("BatchMatMulV2-adj", lambda x, y: raw.BatchMatMulV2(x=x, y=y, adj_x=True), [real(3, 5, 4), real(2, 1, 5, 6)]),
        Case("BiasAddGrad", lambda g: raw.BiasAddGrad(out_backprop=g), [real(3, 4, 5)]),
        Case("BiasAddGrad-NCHW", lambda g: raw.BiasAddGrad(out_backprop=g, data_format="NCHW"), [real(3, 4, 5, 2)]),
    ]
    if hasattr(raw, "Einsum"):
        cases += [
            Case("Einsum", lambda x, y: raw.Einsum(inputs=[x, y], equation="bij,bjk->bik"), [real(2, 3, 4), real(2, 4, 5)]),
            Case("Einsum-sum", lambda x, y: raw.Einsum(inputs=[x, y], equation="abc,cd->ad"), [real(2, 3, 4), real(4, 5)]),
            Case("Einsum-dots", lambda x, y: raw.Einsum(inputs=[x, y], equation="...ij,jk->...ik"),
                 [real(2, 3, 4, 5), real(5, 6)]),
        ]
    return cases


def reductions() -> List[Case]:
    cases = []
    for name in ("Sum", "Mean", "Max", "Min", "Prod"):
        for keep in (False, True):
            cases.append(Case(f"{name}-{keep}", lambda x, a, name=name, keep=keep: getattr(raw, name)(
                input=x, axis=a, keep_dims=keep), [real(3, 4, 5), ints(0, -1)], (1,)))
    for name in ("Any", "All"):
        cases.append(Case(name, lambda x, a, name=name: getattr(raw, name)(input=x, axis=a), [real(3, 4) > 1, ints(0)], (1,)))
    cases.append(Case("Mean-integers", lambda x, a: raw.Mean(input=x, axis=a), [whole(0, 9, 3, 4), ints(1)], (1,)))
    if hasattr(raw, "DenseBincount"):
        cases += [
            Case("DenseBincount", lambda x, n, w: raw.DenseBincount(input=x, size=n, weights=w),
                 [ints(0, 4, 2, 1, 4, 4).reshape(2, 3), np.int32(5), real(2, 3)], (1,)),
            Case("DenseBincount-binary", lambda x, n, w: raw.DenseBincount(input=x, size=n, weights=w, binary_output=True),
                 [ints(0, 4, 2, 1, 4, 4).reshape(2, 3), np.int32(5), real(0)], (1,)),
        ]
    return cases + [
        Case("RFFT", lambda x, n: raw.RFFT(input=x, fft_length=n), [real(3, 6).astype(np.float32), ints(6)], (1,)),
        Case("RFFT2D", lambda x, n: raw.RFFT2D(input=x, fft_length=n), [real(3, 4, 6).astype(np.float32), ints(4, 6)], (1,)),
        Case("FFT", lambda x: raw.FFT(input=x), [(real(3, 4) + 1j * real(3, 4)).astype(np.complex64)]),
        Case("L2Loss", lambda x: raw.L2Loss(t=x), [real(3, 4)]),
        Case("EuclideanNorm", lambda x, a: raw.EuclideanNorm(input=x, axis=a), [real(3, 4), ints(1)], (1,)),
        Case("Softmax", lambda x: raw.Softmax(logits=x), [real(3, 4)]),
        Case("LogSoftmax", lambda x: raw.LogSoftmax(logits=x), [real(3, 4)]),
        Case("Cumsum", lambda x, a: raw.Cumsum(x=x, axis=a), [real(3, 4), np.int32(1)], (1,)),
        Case("Cumprod", lambda x, a: raw.Cumprod(x=x, axis=a), [real(3, 4), np.int32(0)], (1,)),
        Case("ReverseV2", lambda x, a: raw.ReverseV2(tensor=x, axis=a), [real(3, 4), ints(1)], (1,)),
        Case("ReverseSequence", lambda x, n: raw.ReverseSequence(input=x, seq_lengths=n, seq_dim=0, batch_dim=1),
             [real(3, 4, 5), ints(1, 3, 2, 3)]),
        Case("ArgMax", lambda x, a: raw.ArgMax(input=x, dimension=a), [real(3, 4, 5), np.int32(1)], (1,)),
        Case("ArgMin", lambda x, a: raw.ArgMin(input=x, dimension=a), [real(3, 4), np.int32(-1)], (1,)),
        Case("TopKV2", lambda x, k: raw.TopKV2(input=x, k=k), [real(3, 5), np.int32(2)], (1,)),
        Case("InTopKV2", lambda x, t, k: raw.InTopKV2(predictions=x, targets=t, k=k),
             [real(3, 5).astype(np.float32), ints(0, 4, 2), np.int32(2)], (2,)),
        Case("InTopK", lambda x, t: raw.InTopK(predictions=x, targets=t, k=2), [real(3, 5).astype(np.float32), ints(0, 4, 2)]),
    ]


def shapes() -> List[Case]:
    def strided(x: Any, **masks: int) -> Any:
        return raw.StridedSlice(input=x, begin=[0, 1, 0], end=[0, 3, 2], strides=[1, 1, 1], **masks)
    return [
        Case("Reshape-merge", lambda x, s: raw.Reshape(tensor=x, shape=s), [real(3, 4, 5), ints(12, 5)], (1,)),
        Case("Reshape-split", lambda x, s: raw.Reshape(tensor=x, shape=s), [real(12, 5), ints(3, 4, 1, 5)], (1,)),
        Case("Reshape-both", lambda x, s: raw.Reshape(tensor=x, shape=s), [real(6, 2, 5), ints(3, 4, 5)], (1,)),
        Case("Reshape-hole", lambda x, s: raw.Reshape(tensor=x, shape=s), [real(3, 4, 5), ints(-1, 5)], (1,)),
        Case("ExpandDims", lambda x, a: raw.ExpandDims(input=x, axis=a), [real(3, 4), np.int32(1)], (1,)),
        Case("Squeeze", lambda x: raw.Squeeze(input=x, axis=[1]), [real(3, 1, 4)]),
        Case("ConjugateTranspose", lambda x, p: raw.ConjugateTranspose(x=x, perm=p), [real(3, 4, 5) + 1j, ints(2, 0, 1)], (1,)),
        Case("Transpose", lambda x, p: raw.Transpose(x=x, perm=p), [real(3, 4, 5), ints(2, 0, 1)], (1,)),
        Case("Pack", lambda x, y: raw.Pack(values=[x, y], axis=1), [real(3, 4), real(3, 4)]),
        Case("Unpack", lambda x: raw.Unpack(value=x, num=4, axis=1), [real(3, 4, 5)]),
        Case("ConcatV2", lambda x, y, a: raw.ConcatV2(values=[x, y], axis=a), [real(3, 4), real(3, 2), np.int32(1)], (2,)),
        Case("Concat", lambda a, x, y: raw.Concat(concat_dim=a, values=[x, y]), [np.int32(-1), real(3, 4), real(3, 2)], (0,)),
        Case("Split", lambda a, x: raw.Split(axis=a, value=x, num_split=2), [np.int32(1), real(3, 4)], (0,)),
        Case("SplitV", lambda x, s, a: raw.SplitV(value=x, size_splits=s, axis=a, num_split=2),
             [real(3, 4), ints(1, 3), np.int32(1)], (1, 2)),
        Case("Slice", lambda x, b, s: raw.Slice(input=x, begin=b, size=s), [real(3, 4, 5), ints(0, 1, 0), ints(3, 2, -1)], (1, 2)),
        Case("StridedSlice", lambda x: strided(x, begin_mask=5, end_mask=5), [real(3, 4, 5)]),
        Case("StridedSlice-shrink", lambda x: strided(x, begin_mask=5, end_mask=5, shrink_axis_mask=2), [real(3, 4, 5)]),
        Case("StridedSlice-new", lambda x: strided(x, ellipsis_mask=1, new_axis_mask=2), [real(3, 4, 5)]),
        Case("StridedSliceGrad", lambda s, g: raw.StridedSliceGrad(
            shape=s, begin=[0, 1], end=[0, 3], strides=[1, 1], dy=g, begin_mask=1, end_mask=1), [ints(3, 4, 5), real(3, 2, 5)], (0,)),
        Case("StridedSliceGrad-shrink", lambda s, g: raw.StridedSliceGrad(
            shape=s, begin=[0, 1], end=[0, 2], strides=[1, 1], dy=g, begin_mask=1, end_mask=1, shrink_axis_mask=2),
            [ints(3, 4, 5), real(3, 5)], (0,)),
        Case("Pad", lambda x, p: raw.Pad(input=x, paddings=p), [real(3, 4), np.int32([[0, 0], [1, 2]])], (1,)),
        Case("PadV2", lambda x, p, c: raw.PadV2(input=x, paddings=p, constant_values=c),
             [real(3, 4), np.int32([[0, 0], [1, 2]]), np.float64(3.0)], (1,)),
        Case("MirrorPad", lambda x, p: raw.MirrorPad(input=x, paddings=p, mode="REFLECT"),
             [real(3, 4), np.int32([[0, 0], [1, 2]])], (1,)),
        Case("MirrorPadGrad", lambda x, p: raw.MirrorPadGrad(input=x, paddings=p, mode="REFLECT"),
             [real(3, 7), np.int32([[0, 0], [1, 2]])], (1,)),
        Case("Tile", lambda x, m: raw.Tile(input=x, multiples=m), [real(3, 1, 4), ints(2, 5, 1)], (1,)),
        Case("BroadcastTo", lambda x, s: raw.BroadcastTo(input=x, shape=s), [real(3, 1, 4), ints(2, 3, 5, 4)], (1,)),
        Case("Fill", lambda s, v: raw.Fill(dims=s, value=v), [ints(3, 4), np.float64(2.0)], (0,)),
        Case("MatrixBandPart", lambda x: raw.MatrixBandPart(input=x, num_lower=np.int64(1), num_upper=np.int64(0)), [real(3, 4, 4)]),
        Case("MatrixDiag", lambda x: raw.MatrixDiag(diagonal=x), [real(3, 4)]),
        Case("MatrixDiagPart", lambda x: raw.MatrixDiagPart(input=x), [real(3, 4, 4)]),
        Case("MatrixInverse", lambda x: raw.MatrixInverse(input=x), [np.eye(4) + 0.1 * real(3, 4, 4)]),
        Case("Cholesky", lambda x: raw.Cholesky(input=x), [np.eye(4) * 9 + np.ones((3, 4, 4))]),
        Case("SpaceToDepth", lambda x: raw.SpaceToDepth(input=x, block_size=2), [real(3, 4, 4, 2)]),
        Case("DepthToSpace", lambda x: raw.DepthToSpace(input=x, block_size=2), [real(3, 2, 2, 4)]),
        Case("SpaceToBatchND", lambda x, b, p: raw.SpaceToBatchND(input=x, block_shape=b, paddings=p),
             [real(3, 4, 2, 5), ints(2, 2), np.int32([[0, 0], [0, 0]])], (1, 2)),
        Case("BatchToSpaceND", lambda x, b, c: raw.BatchToSpaceND(input=x, block_shape=b, crops=c),
             [real(12, 4, 2, 5), ints(2, 2), np.int32([[0, 0], [0, 0]])], (1, 2)),
    ]


def stacks() -> List[Case]:
    """Ops on each of several matrices, vectors or images."""
    matrix, column, line = np.eye(4) * 5 + real(3, 2, 4, 4), real(3, 2, 4, 5), real(3, 6)
    lower, images, x = np.tril(matrix), real(3, 6, 4, 2), real(3, 6, 4, 2).astype(np.float32)
    pool = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
    scale, shift, size = np.float32([1.5, 0.5]), np.float32([0.1, 0.2]), ints(3, 5)
    ends = [np.float32(0.8), np.float32(1.6)]
    bands, band = real(3, 2, 3, 4), [real(3, 2, 1, 4), real(3, 2, 1, 4), real(3, 2, 1, 4)]
    cases = [
        Case("MatrixDeterminant", lambda a: raw.MatrixDeterminant(input=a), [matrix]),
        Case("LogMatrixDeterminant", lambda a: raw.LogMatrixDeterminant(input=a), [matrix]),
        Case("MatrixSolve", lambda a, b: raw.MatrixSolve(matrix=a, rhs=b), [matrix, column]),
        Case("MatrixTriangularSolve", lambda a, b: raw.MatrixTriangularSolve(matrix=a, rhs=b), [lower, column]),
        Case("MatrixSolveLs", lambda a, b, c: raw.MatrixSolveLs(matrix=a, rhs=b, l2_regularizer=c), [matrix, column, np.float64(0.1)]),
        Case("TridiagonalSolve", lambda a, b: raw.TridiagonalSolve(diagonals=a, rhs=b), [bands + [[0], [9], [0]], column]),
        Case("TridiagonalMatMul", lambda a, b, c, d: raw.TridiagonalMatMul(superdiag=a, maindiag=b, subdiag=c, rhs=d), [*band, column]),
        Case("CholeskyGrad", lambda a, b: raw.CholeskyGrad(l=a, grad=b), [lower, matrix]),
        Case("Svd", lambda a: raw.Svd(input=a), [matrix], outputs=(0,)),  # vectors may have either sign
        Case("Svd-values", lambda a: raw.Svd(input=a, compute_uv=False), [matrix], outputs=(0,)),
        Case("SelfAdjointEigV2", lambda a: raw.SelfAdjointEigV2(input=a), [matrix], outputs=(0,)),
        Case("Qr", lambda a: raw.Qr(input=a), [matrix]),
        Case("Lu", lambda a: raw.Lu(input=a), [matrix]),
        Case("MatrixLogarithm", lambda a: raw.MatrixLogarithm(input=a), [matrix.astype(np.complex128)]),
        Case("MatrixSquareRoot", lambda a: raw.MatrixSquareRoot(input=a), [matrix]),
        Case("MatrixSetDiag", lambda a, b: raw.MatrixSetDiag(input=a, diagonal=b), [matrix, real(3, 2, 4)]),
        Case("MatrixSetDiagV2", lambda a, b, k: raw.MatrixSetDiagV2(input=a, diagonal=b, k=k), [matrix, real(3, 2, 2, 4), ints(0, 1)], (2,)),
        Case("Cross", lambda a, b: raw.Cross(a=a, b=b), [real(4, 3), real(4, 3)]),
        Case("LowerBound", lambda a, b: raw.LowerBound(sorted_inputs=a, values=b), [np.sort(line, -1), real(3, 4)]),
        Case("UpperBound", lambda a, b: raw.UpperBound(sorted_inputs=a, values=b), [np.sort(line, -1), real(3, 4)]),
        Case("NthElement", lambda a, n: raw.NthElement(input=a, n=n), [real(3, 2, 6), np.int32(2)], (1,)),
        Case("ExtractVolumePatches", lambda a: raw.ExtractVolumePatches(
            input=a, ksizes=[1, 2, 2, 2, 1], strides=[1, 2, 2, 2, 1], padding="VALID"), [real(3, 4, 4, 4, 2)]),
        Case("MaxPoolWithArgmax", lambda a: raw.MaxPoolWithArgmax(input=a, **pool), [images]),
        Case("MaxPoolGradWithArgmax", lambda a, g, i: raw.MaxPoolGradWithArgmax(input=a, grad=g, argmax=i, **pool),
             [images, real(3, 3, 2, 2), np.array(3 * [[[[0, 1], [4, 5]], [[16, 17], [20, 21]], [[32, 33], [36, 37]]]], np.int64)]),
        Case("ScaleAndTranslate", lambda a, n, s, t: raw.ScaleAndTranslate(images=a, size=n, scale=s, translation=t),
             [x, size, scale, shift], (1,)),
        Case("ScaleAndTranslateGrad", lambda g, a, s, t: raw.ScaleAndTranslateGrad(grads=g, original_image=a, scale=s, translation=t),
             [real(3, 3, 5, 2).astype(np.float32), x, scale, shift]),
        Case("CombinedNonMaxSuppression", lambda a, b: raw.CombinedNonMaxSuppression(
            boxes=a, scores=b, max_output_size_per_class=2, max_total_size=3, iou_threshold=0.5, score_threshold=0.6),
            [real(3, 5, 1, 4).astype(np.float32), real(3, 5, 2).astype(np.float32)]),
        Case("FakeQuantWithMinMaxVars", lambda a, b, c: raw.FakeQuantWithMinMaxVars(inputs=a, min=b, max=c), [real(3, 4).astype(np.float32), *ends]),
        Case("FakeQuantWithMinMaxVarsGradient", lambda g, a, b, c: raw.FakeQuantWithMinMaxVarsGradient(gradients=g, inputs=a, min=b, max=c),
             [real(3, 4).astype(np.float32)] * 2 + ends),
        Case("QuantizeAndDequantizeV2", lambda a, b, c: raw.QuantizeAndDequantizeV2(input=a, input_min=b, input_max=c, range_given=True),
             [real(3, 4).astype(np.float32), *ends]),
        Case("Roll", lambda a, s, d: raw.Roll(input=a, shift=s, axis=d), [real(3, 4, 5), ints(1, -2), ints(1, -1)], (1, 2)),
    ]
    if hasattr(raw, "MatrixSetDiagV3"):
        cases += [
            Case("QuantizeAndDequantizeV4", lambda a, b, c: raw.QuantizeAndDequantizeV4(input=a, input_min=b, input_max=c, range_given=True),
                 [real(3, 4).astype(np.float32), *ends]),
            Case("QuantizeAndDequantizeV4Grad", lambda g, a, b, c: raw.QuantizeAndDequantizeV4Grad(gradients=g, input=a, input_min=b, input_max=c),
                 [real(3, 4).astype(np.float32)] * 2 + ends),
            Case("MatrixSetDiagV3", lambda a, b, k: raw.MatrixSetDiagV3(input=a, diagonal=b, k=k), [matrix, real(3, 2, 4), np.int32(0)], (2,)),
            Case("MatrixDiagV3", lambda a, k, r, c, p: raw.MatrixDiagV3(diagonal=a, k=k, num_rows=r, num_cols=c, padding_value=p),
                 [real(3, 4), np.int32(0), np.int32(-1), np.int32(-1), np.float64(0.5)], (1, 2, 3)),
            Case("MatrixDiagPartV3", lambda a, k, p: raw.MatrixDiagPartV3(input=a, k=k, padding_value=p),
                 [matrix, ints(0, 1), np.float64(0.5)], (1,)),
            Case("MatrixTriangularSolve-broadcast", lambda a, b: raw.MatrixTriangularSolve(matrix=a, rhs=b), [lower[0, :1], column]),
            Case("BandedTriangularSolve", lambda a, b: raw.BandedTriangularSolve(matrix=a, rhs=b), [real(3, 2, 2, 4), column]),
            Case("Eig", lambda a: raw.Eig(input=a, Tout=tf.complex128, compute_v=False), [matrix], outputs=(0,)),
        ]
    return cases


def images() -> List[Case]:
    x, k = real(3, 6, 5, 4), real(3, 3, 4, 2)
    same = {"strides": [1, 2, 2, 1], "padding": "SAME"}
    y = real(3, 3, 3, 2)
    depth = real(3, 3, 4, 2)
    pool = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
    pooled = real(3, 3, 2, 4)
    volume, filters, made = real(3, 4, 4, 4, 2), real(2, 2, 2, 2, 5), real(3, 4, 4, 4, 5)
    cubic = {"strides": [1, 1, 1, 1, 1], "padding": "SAME"}
    cube = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "VALID"}
    small = real(3, 2, 2, 2, 2)
    boxes, crops = np.array([[0.1, 0, 0.7, 0.8], [0.2, 0.1, 0.9, 1]], np.float32), real(2, 3, 4, 4).astype(np.float32)
    return [
        Case("Conv2D", lambda a, b: raw.Conv2D(input=a, filter=b, **same), [x, k]),
        Case("Conv2DBackpropInput", lambda s, b, g: raw.Conv2DBackpropInput(input_sizes=s, filter=b, out_backprop=g, **same),
             [ints(3, 6, 5, 4), k, y], (0,)),
        Case("Conv2DBackpropFilter", lambda a, s, g: raw.Conv2DBackpropFilter(input=a, filter_sizes=s, out_backprop=g, **same),
             [x, ints(3, 3, 4, 2), y], (1,)),
        Case("DepthwiseConv2dNative", lambda a, b: raw.DepthwiseConv2dNative(
            input=a, filter=b, strides=[1, 1, 1, 1], padding="SAME"), [x, depth]),
        Case("DepthwiseConv2dNativeBackpropInput", lambda s, b, g: raw.DepthwiseConv2dNativeBackpropInput(
            input_sizes=s, filter=b, out_backprop=g, strides=[1, 1, 1, 1], padding="SAME"),
            [ints(3, 6, 5, 4), depth, real(3, 6, 5, 8)], (0,)),
        Case("DepthwiseConv2dNativeBackpropFilter", lambda a, s, g: raw.DepthwiseConv2dNativeBackpropFilter(
            input=a, filter_sizes=s, out_backprop=g, strides=[1, 1, 1, 1], padding="SAME"),
            [x, ints(3, 3, 4, 2), real(3, 6, 5, 8)], (1,)),
        Case("Conv3D", lambda a, b: raw.Conv3D(input=a, filter=b, **cubic), [volume, filters]),
        Case("Conv3DBackpropInputV2", lambda s, b, g: raw.Conv3DBackpropInputV2(
            input_sizes=s, filter=b, out_backprop=g, **cubic), [ints(3, 4, 4, 4, 2), filters, made], (0,)),
        Case("Conv3DBackpropFilterV2", lambda a, s, g: raw.Conv3DBackpropFilterV2(
            input=a, filter_sizes=s, out_backprop=g, **cubic), [volume, ints(2, 2, 2, 2, 5), made], (1,)),
        Case("MaxPool", lambda a: raw.MaxPool(input=a, **pool), [x]),
        Case("AvgPool", lambda a: raw.AvgPool(value=a, **pool), [x]),
        Case("MaxPoolGrad", lambda a, b, g: raw.MaxPoolGrad(orig_input=a, orig_output=b, grad=g, **pool), [x, pooled, pooled]),
        Case("MaxPoolGradGrad", lambda a, b, g: raw.MaxPoolGradGrad(orig_input=a, orig_output=b, grad=g, **pool), [x, pooled, x]),
        Case("AvgPoolGrad", lambda s, g: raw.AvgPoolGrad(orig_input_shape=s, grad=g, **pool), [ints(3, 6, 5, 4), pooled], (0,)),
        Case("MaxPool3D", lambda a: raw.MaxPool3D(input=a, **cube), [volume.astype(np.float32)]),
        Case("AvgPool3D", lambda a: raw.AvgPool3D(input=a, **cube), [volume.astype(np.float32)]),
        Case("MaxPool3DGrad", lambda a, b, g: raw.MaxPool3DGrad(orig_input=a, orig_output=b, grad=g, **cube),
             [volume.astype(np.float32), small.astype(np.float32), small.astype(np.float32)]),
        Case("AvgPool3DGrad", lambda s, g: raw.AvgPool3DGrad(orig_input_shape=s, grad=g, **cube), [ints(3, 4, 4, 4, 2), small.astype(np.float32)],
             (0,)),
        Case("LRN", lambda a: raw.LRN(input=a), [x.astype(np.float32)]),
        Case("LRNGrad", lambda g, a, b: raw.LRNGrad(input_grads=g, input_image=a, output_image=b), [x.astype(np.float32)] * 3),
        Case("ResizeBilinear", lambda a, s: raw.ResizeBilinear(images=a, size=s), [x.astype(np.float32), ints(8, 7)], (1,)),
        Case("ResizeBicubic", lambda a, s: raw.ResizeBicubic(images=a, size=s), [x.astype(np.float32), ints(8, 7)], (1,)),
        Case("ResizeNearestNeighbor", lambda a, s: raw.ResizeNearestNeighbor(images=a, size=s), [x, ints(8, 7)], (1,)),
        Case("ResizeBilinearGrad", lambda g, a: raw.ResizeBilinearGrad(grads=g, original_image=a),
             [real(3, 8, 7, 4).astype(np.float32), x.astype(np.float32)]),
        Case("ResizeBicubicGrad", lambda g, a: raw.ResizeBicubicGrad(grads=g, original_image=a),
             [real(3, 8, 7, 4).astype(np.float32), x.astype(np.float32)]),
        Case("ResizeNearestNeighborGrad", lambda g, s: raw.ResizeNearestNeighborGrad(grads=g, size=s),
             [real(3, 8, 7, 4), ints(6, 5)], (1,)),
        *([Case("ImageProjectiveTransformV2", lambda a, t, s: raw.ImageProjectiveTransformV2(
            images=a, transforms=t, output_shape=s, interpolation="BILINEAR"),
            [x.astype(np.float32), (real(3, 8) / 9).astype(np.float32), ints(6, 5)], (2,))]
          if hasattr(raw, "ImageProjectiveTransformV2") else []),  # TensorFlow 1.15 has it in tf.contrib
        *([Case("ImageProjectiveTransformV3", lambda a, t, s, f: raw.ImageProjectiveTransformV3(
            images=a, transforms=t, output_shape=s, fill_value=f, interpolation="NEAREST"),
            [x.astype(np.float32), (real(1, 8) / 9).astype(np.float32), ints(6, 5), np.float32(1)], (2, 3))]
          if hasattr(raw, "ImageProjectiveTransformV3") else []),
        Case("CropAndResize", lambda a, b, i, s: raw.CropAndResize(image=a, boxes=b, box_ind=i, crop_size=s),
             [x.astype(np.float32), boxes, ints(2, 0), ints(3, 4)], (3,)),
        Case("CropAndResizeGradImage", lambda g, b, i, s: raw.CropAndResizeGradImage(
            grads=g, boxes=b, box_ind=i, image_size=s, T=tf.float32), [crops, boxes, ints(2, 0), ints(*x.shape)], (3,)),
        Case("CropAndResizeGradBoxes", lambda g, a, b, i: raw.CropAndResizeGradBoxes(grads=g, image=a, boxes=b, box_ind=i),
             [crops, x.astype(np.float32), boxes, ints(2, 0)]),
        Case("AdjustHue", lambda a, d: raw.AdjustHue(images=a, delta=d), [abs(real(3, 2, 2, 3)).astype(np.float32), np.float32(0.1)]),
        Case("AdjustSaturation", lambda a, s: raw.AdjustSaturation(images=a, scale=s),
             [abs(real(3, 2, 2, 3)).astype(np.float32), np.float32(0.5)]),
        Case("AdjustContrastv2", lambda a, c: raw.AdjustContrastv2(images=a, contrast_factor=c),
             [real(3, 2, 2, 3).astype(np.float32), np.float32(0.5)]),
        Case("RGBToHSV", lambda a: raw.RGBToHSV(images=a), [abs(real(3, 2, 3))]),
        Case("HSVToRGB", lambda a: raw.HSVToRGB(images=a), [abs(real(3, 2, 3))]),
        Case("ExtractImagePatches", lambda a: raw.ExtractImagePatches(
            images=a, ksizes=[1, 2, 2, 1], strides=[1, 2, 2, 1], rates=[1, 1, 1, 1], padding="VALID"), [x]),
    ]


def look_ups() -> List[Case]:
    ids, where = ints([0, 2], [1, 1], [2, 0]), np.array([[0, 1], [1, 2], [3, 0]], np.int64)
    return [
        Case("Gather", lambda p, i: raw.Gather(params=p, indices=i), [real(3, 4), ids]),
        Case("GatherV2", lambda p, i, a: raw.GatherV2(params=p, indices=i, axis=a), [real(5, 3, 4), ids, np.int32(1)], (2,)),
        Case("GatherV2-batched", lambda p, i, a: raw.GatherV2(params=p, indices=i, axis=a, batch_dims=1),
             [real(3, 4, 5), ids, np.int32(1)], (2,)),
        Case("GatherV2-batched-from-the-end", lambda p, i, a: raw.GatherV2(params=p, indices=i, axis=a, batch_dims=-1),
             [real(3, 4, 5), ids, np.int32(1)], (2,)),
        Case("GatherNd", lambda p, i: raw.GatherNd(params=p, indices=i), [real(3, 4, 5), ids]),
        Case("ScatterNd", lambda i, u, s: raw.ScatterNd(indices=i, updates=u, shape=s), [ids, real(3, 5), ints(4, 4, 5)], (2,)),
        Case("TensorScatterUpdate", lambda t, i, u: raw.TensorScatterUpdate(tensor=t, indices=i, updates=u),
             [real(4, 5), ints([0], [3]), real(2, 5)]),
        Case("TensorScatterAdd", lambda t, i, u: raw.TensorScatterAdd(tensor=t, indices=i, updates=u),
             [real(4, 5), ints([0], [3]), real(2, 5)]),
        Case("TensorScatterSub", lambda t, i, u: raw.TensorScatterSub(tensor=t, indices=i, updates=u),
             [real(4, 5), ints([0], [3]), real(2, 5)]),
        Case("OneHot", lambda i: raw.OneHot(indices=i, depth=3, on_value=np.float64(2), off_value=np.float64(0.5), axis=1), [ids]),
        Case("DynamicPartition", lambda d, p: raw.DynamicPartition(data=d, partitions=p, num_partitions=2),
             [real(3, 4), ints(0, 1, 0)]),
        Case("DynamicStitch", lambda i, j, x, y: raw.DynamicStitch(indices=[i, j], data=[x, y]),
             [ints(0, 2), ints(1, 3), real(2, 4), real(2, 4)]),
        Case("Where", lambda c: raw.Where(condition=c), [real(3, 4) > 1]),
        Case("SparseSegmentSum", lambda d, i, s: raw.SparseSegmentSum(data=d, indices=i, segment_ids=s),
             [real(5, 4), ints(0, 3, 4), ints(0, 0, 1)], (2,)),
        Case("SparseSegmentSumWithNumSegments", lambda d, i, s, n: raw.SparseSegmentSumWithNumSegments(
            data=d, indices=i, segment_ids=s, num_segments=n), [real(5, 4), ints(0, 3, 4), ints(0, 0, 1), np.int32(2)], (2, 3)),
        Case("SparseSegmentMeanGrad", lambda g, i, s, n: raw.SparseSegmentMeanGrad(grad=g, indices=i, segment_ids=s, output_dim0=n),
             [real(2, 4), ints(0, 3, 4), ints(0, 0, 1), np.int32(5)], (1, 2, 3)),
        Case("SparseTensorDenseMatMul", lambda v, b: raw.SparseTensorDenseMatMul(
            a_indices=where, a_values=v, a_shape=np.array([4, 3], np.int64), b=b), [real(3), real(3, 5)]),
        Case("SparseTensorDenseMatMul-adjoint", lambda v, b: raw.SparseTensorDenseMatMul(
            a_indices=where, a_values=v, a_shape=np.array([4, 3], np.int64), b=b, adjoint_a=True, adjoint_b=True),
             [real(3), real(5, 4)]),
    ] + [
        Case("Segment" + kind, lambda d, s, kind=kind: getattr(raw, "Segment" + kind)(data=d, segment_ids=s),
             [real(3, 4), ints(0, 0, 1)]) for kind in ("Sum", "Max", "Min", "Prod")
    ] + [
        Case("UnsortedSegment" + kind, lambda d, s, n, kind=kind: getattr(raw, "UnsortedSegment" + kind)(
            data=d, segment_ids=s, num_segments=n), [real(3, 2, 4), ids % 2, np.int32(2)], (2,))
        for kind in ("Sum", "Max", "Min", "Prod")
    ]


def losses() -> List[Case]:
    return [
        Case("SoftmaxCrossEntropyWithLogits", lambda x, y: raw.SoftmaxCrossEntropyWithLogits(features=x, labels=y),
             [real(3, 4), real(3, 4)]),
        Case("SoftmaxCrossEntropyWithLogits-broadcast", lambda x, y: raw.SoftmaxCrossEntropyWithLogits(features=x, labels=y),
             [real(3, 4), real(1, 4)]),
        Case("SparseSoftmaxCrossEntropyWithLogits", lambda x, y: raw.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=y),
             [real(3, 4), ints(0, 3, 1)]),
    ]


def normalisations() -> List[Case]:
    x, c = real(3, 4, 5, 2).astype(np.float32), [real(2).astype(np.float32) for _ in range(4)]
    cases = []
    for version in ("", "V2", "V3"):
        name = "FusedBatchNorm" + version
        cases.append(Case(name, lambda x, s, o, m, v, name=name: getattr(raw, name)(
            x=x, scale=s, offset=o, mean=m, variance=v, is_training=False), [x] + c, (), (0,)))
        more = {"reserve_space_3": np.zeros(1, np.float32)} if version == "V3" else {}
        name = "FusedBatchNormGrad" + version
        cases.append(Case(name, lambda g, x, s, m, v, name=name, more=more: getattr(raw, name)(
            y_backprop=g, x=x, scale=s, reserve_space_1=m, reserve_space_2=v, is_training=False, **more),
            [x, x, c[0], c[1], c[2]], (), (0, 1, 2)))
    return cases


def recurrent() -> List[Case]:
    """Cells that only TensorFlow 1.15 and 2.21 both have as raw ops."""
    b, h, i = 3, 4, 5
    x, cs, hs = [real(b, n).astype(np.float32) for n in (i, h, h)]
    w, g = real(i + h, 4 * h).astype(np.float32), real(4 * h).astype(np.float32)
    peep = [real(h).astype(np.float32) for _ in range(3)]
    state = [real(b, h).astype(np.float32) for _ in range(9)]
    long_state = [real(2, b, h).astype(np.float32) for _ in range(9)]
    sequence = real(2, b, i).astype(np.float32)
    cells = dict(cs_prev=1, h_prev=2, w=3, wci=4, wcf=5, wco=6, b=7)

    def named(*tensors: Any) -> Any:
        return {name: tensors[k] for name, k in cells.items()}
    kept = ("i", "cs", "f", "o", "ci", "co")
    return [
        Case("LSTMBlockCell", lambda *t: raw.LSTMBlockCell(x=t[0], **named(*t)), [x, cs, hs, w] + peep + [g]),
        Case("LSTMBlockCellGrad", lambda *t: raw.LSTMBlockCellGrad(
            x=t[0], use_peephole=True, **named(*t), **dict(zip(kept + ("cs_grad", "h_grad"), t[8:]))),
            [x, cs, hs, w] + peep + [g] + state[:8]),
        Case("BlockLSTM", lambda *t: raw.BlockLSTM(seq_len_max=np.int64(2), x=t[0], **named(*t)), [sequence, cs, hs, w] + peep + [g]),
        Case("BlockLSTMGrad", lambda *t: raw.BlockLSTMGrad(
            seq_len_max=np.int64(2), x=t[0], use_peephole=True, **named(*t),
            **dict(zip(kept + ("h", "cs_grad", "h_grad"), t[8:]))), [sequence, cs, hs, w] + peep + [g] + long_state),
        Case("GRUBlockCell", lambda *t: raw.GRUBlockCell(**dict(zip(("x", "h_prev", "w_ru", "w_c", "b_ru", "b_c"), t))),
             [x, hs, real(i + h, 2 * h).astype(np.float32), real(i + h, h).astype(np.float32),
              real(2 * h).astype(np.float32), real(h).astype(np.float32)]),
        Case("GRUBlockCellGrad", lambda *t: raw.GRUBlockCellGrad(**dict(zip(
            ("x", "h_prev", "w_ru", "w_c", "b_ru", "b_c", "r", "u", "c", "d_h"), t))),
            [x, hs, real(i + h, 2 * h).astype(np.float32), real(i + h, h).astype(np.float32),
             real(2 * h).astype(np.float32), real(h).astype(np.float32)] + state[:4]),
    ]


def all_cases() -> List[Case]:
    return (table_cases() + special_elementwise() + contractions() + reductions() + shapes() + stacks() + images() + look_ups()
            + losses() + normalisations() + recurrent())


def told() -> List[Any]:
    """Ops whose operands tell how many rows the results have -> (type, attributes and operands by name)."""
    words, splits, wide = np.array(["a b", "", "c d e"]), np.array([0, 2, 2, 5], np.int64), ints(1, 2, 2, 0, 1)
    where, shape = np.array([[0, 1], [2, 0]], np.int64), np.array([4, 3], np.int64)
    counts = dict(minlength=-1, maxlength=-1, binary_output=False)
    sparse = dict(indices=where, values=ints(1, 2), dense_shape=shape)
    line = dict(indices=where[:, 1:], values=ints(1, 2), dense_shape=shape[1:])
    letters = dict(input_encoding="UTF-8", errors="replace", replacement_char=65, replace_control_characters=False)
    rows, none = np.arange(12.0).reshape(4, 3), ints()
    cases = [
        ("StringSplit", dict(input=words, delimiter=" ")), ("StringSplitV2", dict(input=words, sep=" ")),
        ("UnicodeDecode", dict(input=words[None], **letters)), ("UnicodeDecodeWithOffsets", dict(input=words, **letters)),
        ("UnicodeEncode", dict(input_values=wide + 65, input_splits=splits, output_encoding="UTF-8")),
        ("StringNGrams", dict(data=np.array(list("abcde")), data_splits=splits, separator="", ngram_widths=[2], left_pad="",
                              right_pad="", pad_width=0, preserve_short_sequences=False)),
        ("RaggedTensorToSparse", dict(rt_nested_splits=[splits], rt_dense_values=wide)),
        ("RaggedGather", dict(params_nested_splits=[splits], params_dense_values=wide, indices=ints(1, 0), OUTPUT_RAGGED_RANK=1)),
        ("RaggedGather", dict(params_nested_splits=[splits], params_dense_values=wide, indices=ints([1, 0, 2], [0, 2, 1]),
                              OUTPUT_RAGGED_RANK=2)),
        ("RaggedRange", dict(starts=np.int32(0), limits=ints(3, 1), deltas=np.int32(1))),
        ("RaggedRange", dict(starts=ints(0, 1), limits=np.int32(3), deltas=np.int32(1))),
        ("RaggedBincount", dict(splits=splits, values=wide, size=np.int32(4), weights=none)),
        ("RaggedCountSparseOutput", dict(splits=splits, values=wide, weights=none, **counts)),
        ("DenseCountSparseOutput", dict(values=whole(0, 3, 4, 2), weights=none, **counts)),
        ("DenseCountSparseOutput", dict(values=wide, weights=none, **counts)),
        ("SparseCountSparseOutput", dict(weights=none, **sparse, **counts)),
        ("SparseCountSparseOutput", dict(weights=none, **line, **counts)),
        ("SparseBincount", dict(size=np.int32(5), weights=none, **sparse)),
        ("SparseBincount", dict(size=np.int32(5), weights=none, **line)),
        ("SparseToDense", dict(sparse_indices=where, output_shape=shape, sparse_values=ints(1, 2), default_value=np.int32(0))),
        ("SparseFillEmptyRows", dict(default_value=np.int32(0), **sparse)), ("Unique", dict(x=wide)), ("UniqueV2", dict(x=wide, axis=[0])),
        ("UniqueWithCounts", dict(x=wide)),
    ]
    segments = dict(data=rows, indices=ints(0, 3), segment_ids=ints(0, 2), num_segments=np.int32(5))
    cases += [(f"SparseSegment{kind}WithNumSegments", segments) for kind in ("Sum", "Mean", "SqrtN")]
    return [case for case in cases if hasattr(raw, case[0])]
