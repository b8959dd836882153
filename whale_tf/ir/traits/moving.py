"""Ops that move, cut, join, repeat, pick or place elements, and those that compute with shapes."""
from __future__ import annotations

from whale_tf.ir.traits.row import Buffer, Cost, Gives, OpTraits, Recipe, merged, table


def _move(rule: str, batch: str = "", value: str = "", gives: Gives = Gives.OTHER) -> OpTraits:
    """An op that reads and writes memory but computes nothing."""
    return OpTraits(rule=rule, batch=batch, value=value, gives=gives, cost=Cost.MOVE)


_RESHAPE = OpTraits(gives=Gives.RESHAPED, buffer=Buffer.SAME, cost=Cost.FREE, passes_terms=True)
_SIZES = OpTraits(rule="shape.shape_of", batch="shape_of", gives=Gives.SIZES, cost=Cost.FREE)

_SHAPES = table(
    ("Shape ShapeN Size Rank", _SIZES),
    ("Reshape", _RESHAPE._replace(rule="shape.reshape", batch="reshape", value="reshape", measure="reshaped")),
    ("ExpandDims", _RESHAPE._replace(rule="shape.expand_dims", value="expand_dims")),
    ("Squeeze", _RESHAPE._replace(rule="shape.squeeze", value="squeeze", drops_ones=True)),
    ("Transpose ConjugateTranspose",
     _move("shape.transpose", value="transpose", gives=Gives.REORDERED)._replace(passes_terms=True)),
    ("Pack", _move("shape.pack", value="pack")),
    ("Unpack", _move("shape.unpack", value="unpack")),
    ("Concat", _move("shape.concat", "concat", "concat_axis_first")._replace(measure="joined")),
    ("ConcatV2", _move("shape.concat", "concat", "concat")._replace(measure="joined")),
    ("Split", _move("shape.split", "split", "split")),
    ("SplitV", _move("shape.split", "split", "split_sizes")),
    ("Slice", _move("shape.slice_", "slice_", "slice", Gives.ELEMENTS)._replace(cost=Cost.LOOK_UP)),
    ("StridedSlice", _move("shape.strided_slice", "strided_slice", "strided_slice", Gives.ELEMENTS)._replace(
        cost=Cost.LOOK_UP, measure="cut")),
    ("StridedSliceGrad", _move("shape.strided_slice_grad", "strided_slice_grad")),
    ("Pad", _move("shape.pad", value="pad")),
    ("PadV2 MirrorPad MirrorPadGrad", _move("shape.pad")),
    ("Tile", _move("shape.tile", "tile", "tile", Gives.ELEMENTS)._replace(generates=True)),
    ("BroadcastTo", _move("shape.broadcast_to")._replace(generates=True)),
    ("Fill", _move("shape.fill", value="fill")._replace(generates=True)),
    ("Range", _move("shape.range_", "range_", "range")._replace(generates=True)),
    ("MatrixBandPart MatrixDiag MatrixDiagPart", _move("shape.matrix_part m")),
    ("MatrixDiagV3", _move("shape.matrix_part a 4")),
    ("MatrixDiagPartV3", _move("shape.matrix_part a 2")),
    ("MatrixDiagV2 MatrixDiagPartV2", _move("")),
    ("MatrixInverse Cholesky", OpTraits(rule="shape.matrix_part n")),
    ("SpaceToBatchND BatchToSpaceND", _move("shape.space_to_batch", "space_to_batch")),
    ("SpaceToBatch BatchToSpace", _move("")),
    ("SpaceToDepth DepthToSpace", _move("shape.depth_space")),
    ("BroadcastGradientArgs", OpTraits(rule="state.undivided", batch="broadcast_args", value="broadcast_gradient_args",
                                       cost=Cost.FREE)),
    ("BroadcastArgs", OpTraits(rule="state.undivided", batch="broadcast_args", value="broadcast_args")),
    ("ConcatOffset", _move("state.undivided", "concat_offset", "concat_offset")),
    ("InvertPermutation", _move("state.undivided", value="invert_permutation")),
    ("ListDiff", OpTraits(rule="state.undivided", value="list_diff")),
)


def _segments(kind: str, unsorted: bool) -> OpTraits:
    """One row per segment; the ids of ``Unsorted...`` may be in any order."""
    costs = Cost.OPERAND if kind == "sum" else Cost.RESULT
    batch = "segment" if unsorted else "grouped" if kind == "sum" else ""
    return OpTraits(rule=f"gather.segments {kind}", batch=batch, cost=costs)


_LOOK_UP = OpTraits(cost=Cost.LOOK_UP, recipe=Recipe.LOOK_UP)
_ROW_JOIN = OpTraits(rule="gather.row_join", batch="grouped")
_STITCH = _move("gather.dynamic_stitch", "dynamic_stitch", "dynamic_stitch")

_ROWS = table(
    ("Gather GatherV2", _LOOK_UP._replace(rule="gather.gather", batch="gather", value="gather", gives=Gives.ELEMENTS)),
    ("ResourceGather", _LOOK_UP._replace(rule="gather.resource_gather", batch="resource_gather", of_value="GatherV2")),
    ("GatherNd", OpTraits(rule="gather.gather_nd", batch="gather_nd", cost=Cost.LOOK_UP)),
    ("ResourceGatherNd", OpTraits(
        rule="gather.resource_gather_nd", batch="resource_gather", cost=Cost.LOOK_UP, of_value="GatherNd")),
    ("ScatterNd", _move("gather.scatter_nd", "scatter_nd")),
    ("TensorScatterUpdate TensorScatterAdd TensorScatterSub", OpTraits(rule="gather.tensor_scatter")),
    ("OneHot", _move("gather.one_hot")),
    ("DynamicStitch ParallelDynamicStitch", _STITCH),
    ("DynamicPartition", _move("gather.dynamic_partition", "dynamic_partition")),
    ("Where", _move("gather.where", "where")),
    ("Unique UniqueV2", _move("state.undivided")._replace(measure="rows 1 = rows 0", rows_from="0")),
    ("UniqueWithCounts", OpTraits(rule="state.undivided", measure="rows 1 = rows 0", rows_from="0")),
    ("SparseSegmentSum SparseSegmentMean SparseSegmentSqrtN", _ROW_JOIN),
    ("SparseSegmentSumWithNumSegments", _ROW_JOIN._replace(rule="gather.row_join adds", measure="rows 0 = shape 3")),
    ("SparseSegmentMeanWithNumSegments SparseSegmentSqrtNWithNumSegments", _ROW_JOIN._replace(measure="rows 0 = shape 3")),
    ("SparseSegmentSumGrad SparseSegmentMeanGrad SparseSegmentSqrtNGrad",
     OpTraits(rule="gather.row_join_gradient", batch="grouped", fails_empty=True)),
    ("SegmentSum", _segments("sum", False)),
    ("SegmentMax", _segments("max", False)),
    ("SegmentMin", _segments("min", False)),
    ("SegmentProd", _segments("prod", False)),
    ("UnsortedSegmentSum", _segments("sum", True)),
    ("UnsortedSegmentMax", _segments("max", True)),
    ("UnsortedSegmentMin", _segments("min", True)),
    ("UnsortedSegmentProd", _segments("prod", True)),
)

MOVING = merged(_SHAPES, _ROWS)
