"""The table of op traits: every row is whole, and what the package's parts ask of it agrees."""
from __future__ import annotations

import pytest

from tests.ir.graphs import Draft
from whale_tf.ir import traits as table
from whale_tf.ir.batch_axis.blocks import REPLICATED_0, Batches
from whale_tf.ir.batch_axis.operands import Operands, carry_offsets
from whale_tf.ir.batch_axis.propagate import HANDLERS
from whale_tf.ir.batch_axis.sections import MEASURES
from whale_tf.ir.batch_axis.state import BatchState as BatchState
from whale_tf.ir.batch_axis.state import Options
from whale_tf.ir.evaluate import EVALUATORS
from whale_tf.ir.graph import Phase
from whale_tf.ir.rules import maker
from whale_tf.ir.traits import TABLE, UNKNOWN, Cost, OpTraits, Role, VariableUse, traits, types_where
from whale_tf.ir.traits.row import merged
from whale_tf.ir.traits.row import table as section
from whale_tf.profiler.graph_profile import precision_of
from whale_tf.profiler.op_cost import op_costs


def test_op_type_has_one_row() -> None:
    with pytest.raises(ValueError, match="'Relu' has two rows"):
        section(("Relu Elu", OpTraits()), ("Tanh Relu", OpTraits(flops=2)))
    with pytest.raises(ValueError, match="'Relu' has two rows"):
        merged(section(("Relu", OpTraits())), section(("Relu", OpTraits())))


def test_what_is_not_known_claims_nothing() -> None:
    row = traits("SomebodysOwnOp")
    assert row == UNKNOWN
    assert not (row.is_input or row.is_write or row.is_update or row.only_moves or row.is_contraction or row.rule)
    assert "SomebodysOwnOp" not in TABLE


@pytest.mark.parametrize("type_,expected", [
    ("ResourceApplyLamb", OpTraits(state=VariableUse.UPDATE, cost=Cost.UPDATE)),
    ("SparseApplyLamb", OpTraits(state=VariableUse.UPDATE, cost=Cost.UPDATE)),
    ("ApplicationOfSomething", UNKNOWN),
    ("ShuffleDatasetV3", OpTraits(role=Role.INPUT)),
    ("TFRecordReaderV2", OpTraits(role=Role.INPUT)),
    ("MutableHashTableV2", OpTraits(role=Role.INPUT)),
    ("InitializeTableFromTextFileV2", OpTraits(role=Role.INITIALIZE)),
    ("PlaceholderOfSomebody", OpTraits(role=Role.PLACEHOLDER)),
])
def test_families_are_told_by_their_names(type_: str, expected: OpTraits) -> None:
    assert traits(type_) == expected


def test_table_comes_before_the_families() -> None:
    """``IteratorGetNext`` pulls; the family of iterators says only that it is an input."""
    assert traits("IteratorGetNext").role is Role.PULL
    assert traits("TensorArrayV3").role is Role.CONTAINER
    assert traits("AssignVariableOp").state is VariableUse.ASSIGN


@pytest.mark.parametrize("type_", ["ScatterNd", "ScatterNdNonAliasingAdd", "StatefulUniform", "AccumulatorApplyGradient"])
def test_what_does_not_write_the_models_variables(type_: str) -> None:
    """A ScatterNd makes a tensor (``ScatterNdUpdate`` writes one); a generator's draw and an accumulator are no update."""
    assert not traits(type_).is_write


@pytest.mark.parametrize("type_", ["ScatterNdUpdate", "ResourceScatterAdd", "AssignSubVariableOp", "ResourceApplyAdam", "CountUpTo",
                                   "ResourceStridedSliceAssign"])
def test_what_writes(type_: str) -> None:
    assert traits(type_).is_write


@pytest.mark.parametrize("plain", sorted(type_[3:] for type_ in TABLE if type_.startswith("Ref") and type_[3:] in TABLE))
def test_reference_versions_do_what_the_plain_ones_do(plain: str) -> None:
    """Of control flow: a loop over a reference variable is a loop."""
    row, reference = traits(plain), traits("Ref" + plain)
    if row.role is not Role.COMPUTE:
        assert reference == row._replace(value=reference.value)
        assert all(("Ref" + plain in view) == (plain in view) for view in (
            table.ENTERS, table.EXITS, table.NEXT_ITERATIONS, table.SWITCHES, table.MERGES, table.CONTROL_FLOW))


def test_stateless_functions_are_functions() -> None:
    for plain in ("While", "If", "Case"):
        assert traits("Stateless" + plain) == traits(plain)
        assert {plain, "Stateless" + plain} <= table.CONTROL_FLOW


def test_stack_and_what_takes_its_reference_through_a_condition_stay_together() -> None:
    """The handle of a ``Stack`` is a reference, which a ``RefSwitch`` hands on."""
    from whale_tf.ir.units import containers

    draft = Draft()
    graph = draft.graph
    handle = graph.add("stack", "Stack", [], [((2,), "string_ref")]).outputs[0]
    taken = graph.add("switch", "RefSwitch", [handle, draft.source()], [((2,), "string_ref"), ((2,), "string_ref")])
    pushed = graph.add("push", "StackPush", [taken.outputs[1], draft.source(3)], [((3,), "float32")])
    assert [graph.ops[i].name for i in sorted(containers(graph, graph.ops)[0])] == ["stack", "switch", "push"]
    assert pushed.id in containers(graph, graph.ops)[0]


def test_views_follow_from_rows() -> None:
    assert table.READS == {"Identity", "RefIdentity", "ReadVariableOp"}
    assert table.WHILES == {"While", "StatelessWhile"}
    assert types_where(lambda row: row.state is VariableUse.ASSIGN) == table.ASSIGNS
    assert {"Const", "NoOp"}.isdisjoint(table.CONTROL_FLOW)


@pytest.mark.parametrize("type_", ["IdentityN", "EnsureShape", "Switch", "BroadcastGradientArgs", "ResourceGather", "GatherNd"])
def test_what_computes_nothing_is_free(type_: str) -> None:
    draft = Draft()
    draft.op(type_, [draft.source(6, 8), draft.source(6, 8)], (6, 8))
    assert op_costs(draft.graph)[-1].flops == 0


@pytest.mark.parametrize("type_,computes", [("BatchToSpaceND", False), ("BatchMatrixInverse", True), ("BatchFFT", True)])
def test_batch_of_matrices_is_computed(type_: str, computes: bool) -> None:
    """``BatchToSpace`` moves elements; other names that begin with ``Batch`` say that an op takes many matrices."""
    draft = Draft()
    draft.op(type_, [draft.source(6, 8)], (6, 8))
    assert op_costs(draft.graph)[-1].flops == computes * 48


@pytest.mark.parametrize("type_", ["MatMul", "BatchMatMulV3", "DepthwiseConv2dNative"])
def test_every_contraction_says_the_precision(type_: str) -> None:
    draft = Draft()
    draft.op(type_, [draft.source(6, 8), draft.source(6, 8)], (6, 8), dtype="bfloat16")
    draft.graph.ops[-1].phase = Phase.FORWARD
    assert precision_of(draft.graph) == "bf16"


def test_type_that_stops_the_gradient_is_no_move() -> None:
    """What moves is done again where it is read, and its gradient with it; there is none behind a StopGradient."""
    assert traits("StopGradient").only_moves and "StopGradient" not in table.MOVES
    assert "PreventGradient" in table.MOVES


def test_rows_name_what_there_is() -> None:
    """Makers of rules, handlers, evaluators and measures exist, and each is some op type's."""
    rows = TABLE.values()
    assert {row.batch for row in rows} == set(HANDLERS) | {""}
    assert {row.value for row in rows} == set(EVALUATORS) | {""}
    assert {row.measure for row in rows if "=" not in row.measure} == set(MEASURES) | {""}
    assert all(callable(maker(row.rule)) for row in rows if row.rule)


@pytest.mark.parametrize("type_", ["StopGradient", "PreventGradient", "EnsureShape", "ZerosLike"])
def test_shape_is_known_through_what_keeps_it(type_: str) -> None:
    draft = Draft()
    result = draft.op(type_, [draft.source(3, 5)], None)
    state = BatchState(draft.graph, {}, None, Batches(""), Options())
    assert state.shape(result) == (3, 5)


@pytest.mark.parametrize("type_", ["Identity", "Reshape", "EnsureShape", "Slice", "Gather", "GatherV2"])
def test_positions_stay_positions_where_elements_are_picked(type_: str) -> None:
    """The first operand holds positions: three for each example of the batch."""
    draft = Draft()
    table_ = draft.source(6, dtype="int32")
    result = draft.op(type_, [table_, draft.source(2, dtype="int32")], (2,), dtype="int32")
    state = BatchState(draft.graph, {}, None, Batches(""), Options())
    state.offsets[table_] = 3
    carry_offsets(state, draft.graph.ops[-1], Operands(state, draft.graph.ops[-1], "mn", [REPLICATED_0] * 2))
    assert state.offsets[result] == 3
