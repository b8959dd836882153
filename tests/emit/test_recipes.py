"""Recipes as staged nodes: sizes, and what merged values have (what is added up where: tests/passes/test_lowering.py)."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any, List

import numpy as np
import pytest

from tests.emit.staged import context_of
from tests.passes.drawings import chain, plan
from whale_tf.communicators import Communicator, Member
from whale_tf.emit.recipes import Recipes
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.batch_axis import EXTENT
from whale_tf.ir.extents import Size, batch_size, vector
from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes.lowering import Lowering
from whale_tf.plan import Plan


class Alone(Communicator):
    """One of several processes, of which the others have zeros."""

    def __init__(self, nodes: Nodes, processes: int) -> None:
        super().__init__(nodes)
        self.processes = processes

    def across(self, member: Member, kind: str, name: str, dtype: Any, fp16: bool = False) -> str:
        return self._nodes.identity(member.value, name, dtype, member.device)


def recipes_of(step: TrainingStep, chosen: Plan, processes: int = 1) -> Recipes:
    context = context_of(step, chosen)
    nodes = Nodes(context.edit)
    converter: Any = SimpleNamespace(nodes=nodes, division=SimpleNamespace(batch=8, mini_batches=1))
    return Recipes(context, converter, Alone(nodes, processes), Lowering(step, chosen, context.program))


@pytest.mark.parametrize("sizes, processes, expected", [
    ([8], 1, [3 + 2 * 8, 8, 5]), ([3, 1, 4], 1, [3 + 2 * 8, 8, 5]), ([3, 5], 2, [3 + 2 * 8 - 3, 8, 5 - 5])])
def test_sizes_are_added_up_without_what_each_part_has_anyway(sizes: List[int], processes: int, expected: List[int]) -> None:
    """Clones have ``3 + 2 b`` and ``b`` examples, and a length of 5 that is the same in all of them and that none knows before.
    Of two processes, this one has all: the other one's part, which is not here, would have 3 and 5 once more."""
    step = chain(1)._replace(processes=processes)
    tensor = step.graph.tensor("loss")
    recipes = recipes_of(step, plan([len(sizes)]), processes)
    step.region.batch.layouts[tensor] = EXTENT
    step.region.batch.extents[tensor] = vector([3 + 2 * batch_size, batch_size, Size.of(("dim", 0, 0))])
    step.graph.tensors[tensor] = step.graph.tensors[tensor]._replace(shape=(3,), dtype="int32")
    clones = {f"whale/g0_m0_r{r}/loss:0": np.array([3 + 2 * size, size, 5]) for r, size in enumerate(sizes)}
    edit: Any = recipes._context.edit
    assert edit.value(recipes.of_all_processes(tensor), clones.__getitem__).tolist() == expected


def test_merged_values_are_larger_where_there_are_several_mini_batches_of_known_size() -> None:
    recipes = recipes_of(chain(1), plan([1]))
    division: Any = recipes._converter.division
    found = []
    for division.mini_batches, division.batch in ((1, 8), (2, 8), (2, None)):
        found.append(recipes.is_larger)
    assert found == [False, True, False]
