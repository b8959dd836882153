"""Sections begin and end where fewest bytes cross."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import numpy as np
import pytest

from whale_tf.ir.batch_axis import Inexact, Options, analyse
from whale_tf.ir.graph import OpGraph, Phase
from whale_tf.ir.region import Region, find_region
from whale_tf.passes.border import Border

BATCH, WIDTH = 4, 8


class Model:
    """Encodes examples as ``z``; what is added reads tensors by name."""

    def __init__(self) -> None:
        self.graph = OpGraph()
        self.add("x", "Placeholder", (), (BATCH, WIDTH), Phase.INPUT)
        self.add("z", "Tanh", ["x"], (BATCH, WIDTH))

    def add(self, name: str, type_: str, inputs: Sequence[str], shape: Optional[Tuple[int, ...]], phase: Phase = Phase.FORWARD,
            value: Optional[Sequence[int]] = None) -> None:
        content = None if value is None else np.array(value, np.int32)
        self.graph.add(name, type_, [self.graph.tensor(each + ":0") for each in inputs],
                       [(shape, "float32" if value is None else "int32")], phase=phase, value=content)

    def cumulated(self, name: str, of: str, width: int) -> None:
        """Needs all examples."""
        if "axis" not in self.graph:
            self.add("axis", "Const", (), (), value=0)  # type: ignore[arg-type]
        self.add(name, "Cumsum", [of, "axis"], (BATCH, width))

    def region(self, together: Sequence[int] = ()) -> Region:
        sources = {self.graph.tensor("x:0"): 0}
        batch = analyse(self.graph, sources, options=Options(sections=True, together=frozenset(together)))
        return find_region(self.graph, [0] * len(self.graph.ops), batch, list(sources))

    def border(self, together: Sequence[int] = ()) -> Border:
        return Border(self.region(together), self.graph)

    def joining(self) -> List[str]:
        return [self.graph.ops[index].name for index in sorted(next(iter(self.border().joining()), ()))]


def tiled(many: int) -> Model:
    model = Model()
    model.add("many", "Const", (), (2,), value=(1, many))
    model.add("tile", "Tile", ["z", "many"], (BATCH, many * WIDTH))
    model.cumulated("sums", "tile", many * WIDTH)
    return model


def test_what_makes_a_tensor_larger_joins_the_section() -> None:
    model = tiled(3)
    assert model.border().crossing() == 3 * BATCH * WIDTH * 4
    assert model.joining() == ["tile"]  # and not the Tanh before, which would gain nothing
    joined = model.border([model.graph.op("tile").id])
    assert joined.crossing() == BATCH * WIDTH * 4
    assert not joined.joining()


def test_what_makes_a_tensor_smaller_does_not() -> None:
    model = Model()
    model.add("axis", "Const", (), (1,), value=(1,))
    model.add("total", "Sum", ["z", "axis"], (BATCH,))
    model.add("first", "Const", (), (), value=0)  # type: ignore[arg-type]
    model.add("sums", "Cumsum", ["total", "first"], (BATCH,))
    assert model.border().crossing() == BATCH * 4
    assert not model.joining()


def test_tensor_counts_once_whoever_reads_it() -> None:
    model = Model()
    for name in ("one", "other"):
        model.add(name, "Neg", ["z"], (BATCH, WIDTH))
        model.cumulated(name + "_sums", name, WIDTH)
    assert model.border().crossing() == 2 * BATCH * WIDTH * 4
    assert model.joining() == ["one", "other"]


@pytest.mark.parametrize("change", ["matrix product", "waits", "size not known"])
def test_what_stays_with_the_clones(change: str) -> None:
    model = tiled(3)
    tile = model.graph.op("tile")
    if change == "matrix product":  # bound by arithmetic
        model = Model()
        model.add("w", "VariableV2", (), (WIDTH, 3 * WIDTH), Phase.OTHER)
        model.add("wide", "MatMul", ["z", "w"], (BATCH, 3 * WIDTH))
        model.cumulated("sums", "wide", 3 * WIDTH)
    elif change == "waits":
        tile.control_inputs += (model.graph.op("z").id,)
    else:
        model.graph = model.graph.with_shapes({tile.outputs[0]: (BATCH, None)})
    assert model.region().sections and not model.joining()


def test_gradients_on_their_way_back_count_as_well() -> None:
    """Three gradients cross, unless their sum does."""
    model, names = Model(), ["one", "other", "third"]
    model.add("h", "Neg", ["z"], (BATCH, WIDTH))
    for name in names:
        model.cumulated(name + "_sums", "z", WIDTH)
        model.add(name, "Mul", [name + "_sums", "h"], (BATCH, WIDTH), Phase.BACKWARD)
    model.add("sum", "AddN", names, (BATCH, WIDTH), Phase.BACKWARD)
    model.add("w", "VariableV2", (), (WIDTH, WIDTH), Phase.OTHER)
    model.add("end", "MatMul", ["sum", "w"], (BATCH, WIDTH), Phase.BACKWARD)
    model.add("last", "Mul", ["end", "x"], (BATCH, WIDTH), Phase.BACKWARD)
    border = model.border()
    assert border.crossing() == 4 * BATCH * WIDTH * 4
    assert model.joining() == ["h", *names, "sum"]
    joined = model.border(sorted(border.joining()[0]))
    assert joined.crossing() == 2 * BATCH * WIDTH * 4
    assert not joined.improves(border)  # one device would run the product for all
    assert [model.graph.ops[index].name for index in border.joining()[1]] == ["h"]


def test_it_is_taken_where_nothing_else_is_worse() -> None:
    model = tiled(3)
    tile, size, sums = (model.graph.op(name).id for name in ("tile", "many", "sums"))
    late, early = model.border(), model.border([tile])
    assert early.improves(late) and not late.improves(early) and not early.improves(early)
    region = model.region([tile])
    assert not Border(region._replace(early={sums}, late={sums}), model.graph).improves(late)  # more is held
    assert Border(region._replace(early={sums}, late={size}), model.graph).improves(late)
    region.batch.inexact = [Inexact(sums, "")]
    assert not Border(region, model.graph).improves(late)
