"""Phases of graphs whose gradient calls nobody saw."""
from __future__ import annotations

import pytest

from tests.ir.graphs import Draft
from whale_tf.capture.unseen import model_phases
from whale_tf.ir.graph import Phase


@pytest.mark.parametrize("type_", ["PrefetchDataset", "AnonymousIteratorV3", "FIFOQueueV2", "MutableHashTableV2"])
def test_models_inputs_are_those_of_a_training_graph(type_: str) -> None:
    draft = Draft()
    draft.op("Relu", [draft.op(type_, [], ())], ())
    model_phases(draft.graph)
    assert [op.phase for op in draft.graph.ops] == [Phase.INPUT, Phase.FORWARD]
