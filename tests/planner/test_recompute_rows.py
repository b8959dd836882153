"""A TaskGraph's forward ops as a row of parts in numbers, and what a choice means for its ops: steps written by hand."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import numpy as np
import pytest

from tests.passes.drawings import plan
from whale_tf.cluster import Cluster
from whale_tf.errors import ConfigError, InfeasibleError
from whale_tf.ir.batch_axis import BatchAxis, Reduce, Scale
from whale_tf.ir.graph import OpGraph, Phase
from whale_tf.ir.layout import partial, sharded
from whale_tf.ir.region import Region, find_region
from whale_tf.plan import Plan
from whale_tf.planner.recompute import MOST_CUTS, Choice, Readers, TaskGraphRow, kept_tensors, marked_tensors, redone, rows_of

EXAMPLES = 8
FLOPS, BANDWIDTH = 1e9, 1e9  # of a device, a second


class Drawing:
    """A step written op by op.  Results have a row for each example (``width``: elements of it), variables and scalars none."""

    def __init__(self) -> None:
        self.graph, self.home, self.task_graph = OpGraph(), [], 0  # type: OpGraph, List[int], int
        self.batch = BatchAxis(self.graph, {}, None)

    def op(self, name: str, type_: str, inputs: Sequence[str], shape: Tuple[int, ...], phase: Phase = Phase.FORWARD,
           dtype: str = "float32", waits: Sequence[str] = (), **fields: Any) -> None:
        self.graph.add(name, type_, [self.graph.tensor(i) for i in inputs], [(shape, dtype)],
                       [self.graph.op(before).id for before in waits], phase=phase, **fields)
        self.home.append(self.task_graph)
        if shape and shape[0] == EXAMPLES:
            self.batch.layouts[self.graph.tensor(name)] = sharded(0, power=int(phase is Phase.BACKWARD))

    def forward(self, name: str, type_: str, inputs: Sequence[str], width: int, **fields: Any) -> None:
        self.op(name, type_, inputs, (EXAMPLES, width), **fields)

    def backward(self, name: str, type_: str, inputs: Sequence[str], width: int) -> None:
        self.op(name, type_, inputs, (EXAMPLES, width), Phase.BACKWARD)

    def variable(self, name: str, *shape: int) -> None:
        self.op(f"{name}/handle", "VarHandleOp", [], (), dtype="resource")
        self.op(name, "ReadVariableOp", [f"{name}/handle"], shape)

    def gradient(self, name: str, inputs: Sequence[str], *shape: int) -> None:
        self.op(name, "MatMul", inputs, shape, Phase.BACKWARD)
        self.batch.layouts[self.graph.tensor(name)] = partial(1)

    def update(self, *gradients: str) -> None:
        for name in gradients:
            self.op(f"update/{name}", "ApplyGradientDescent", [name], (1,), Phase.APPLY)

    def region(self) -> Region:
        x = self.graph.tensor("x")
        self.batch.conversions.setdefault((self.graph.consumers(x)[0][0], 0), (Scale(1),))
        return find_region(self.graph, self.home, self.batch, [x])


def product() -> Drawing:
    """The first layer: ``mul``, 6 wide."""
    step = Drawing()
    step.forward("x", "Placeholder", [], 4, phase=Phase.INPUT)
    step.variable("w", 4, 6)
    step.forward("mul", "MatMul", ["x", "w"], 6)
    return step


def layers(widths: Sequence[int], last: Sequence[int] = ()) -> Region:
    """``x -> mul0 -> act0 -> mul1 -> act1 ...  -> loss``; backward ops read all ``act`` and the loss.

    Args:
        widths: of ``x`` and of each layer.
        last: of each TaskGraph, its last layer.
    """
    step, count = Drawing(), len(widths) - 1
    ends = list(last) or [count - 1]

    def at(layer: int) -> None:
        step.task_graph = next(number for number, end in enumerate(ends) if layer <= end)

    step.forward("x", "Placeholder", [], widths[0], phase=Phase.INPUT)
    for i in range(count):
        at(i)
        step.variable(f"w{i}", widths[i], widths[i + 1])
        step.forward(f"mul{i}", "MatMul", [f"act{i - 1}" if i else "x", f"w{i}"], widths[i + 1])
        step.forward(f"act{i}", "Tanh", [f"mul{i}"], widths[i + 1])
    step.op("loss", "Mean", [f"act{count - 1}"], ())
    step.batch.layouts[step.graph.tensor("loss")] = partial(1)
    step.backward("tile", "Neg", ["loss"], widths[-1])
    for i in reversed(range(count)):
        at(i)
        step.backward(f"dact{i}", "TanhGrad", [f"act{i}", f"back{i + 1}" if i < count - 1 else "tile"], widths[i + 1])
        step.gradient(f"grad{i}", [f"act{i - 1}" if i else "x", f"dact{i}"], widths[i], widths[i + 1])
        step.backward(f"back{i}", "MatMul", [f"dact{i}", f"w{i}"], widths[i])
    step.update(*(f"grad{i}" for i in range(count)))
    return step.region()


def devices(*memory: float) -> Cluster:
    """CPUs with so many bytes."""
    kinds = {f"D{number}": {"memory_gib": size / 2**30, "fp32": FLOPS, "memory_bandwidth_bytes_per_s": BANDWIDTH, "kind": "CPU"}
             for number, size in enumerate(memory)}
    return Cluster.parse({"device_types": kinds, "nodes": [{"devices": [f"{name}:1" for name in kinds], "links": "default"}]})


def row_of(region: Region, given: Plan, number: int = 0) -> TaskGraphRow:
    return rows_of(region, given, devices(*[2**30] * given.num_devices), EXAMPLES)[number]


def names(region: Region, tensors: Sequence[int]) -> List[str]:
    return [region.graph.tensor_name(tensor).partition(":")[0] for tensor in tensors]


# ------------------------------------------------------------------------------------------------------ in numbers
def test_row_in_numbers() -> None:
    """Parts are w0 mul0 | act0 | w1 mul1 | act1 | w2 mul2 | act2 | loss.  A product of 8 x 16 by 16 x 16 takes its arithmetic,
    the others their bytes."""
    row = row_of(layers([16, 16, 2, 3]), plan([1]))
    assert row.parts.held.tolist() == [0, 4 * 8 * 16, 0, 4 * 8 * 2, 0, 4 * 8 * 3, 4]
    flops = 2 * 8 * 16 * 16
    by_bytes = [4 * (8 * 16 + 16 * 2 + 8 * 2), 2 * 4 * 8 * 2, 4 * (8 * 2 + 2 * 3 + 8 * 3), 2 * 4 * 8 * 3, 4 * (8 * 3 + 1)]
    assert row.parts.seconds == pytest.approx([flops / FLOPS, 2 * 4 * 8 * 16 / BANDWIDTH, *(b / BANDWIDTH for b in by_bytes)])
    behind = [4 * 8 * 16, 4 * 8 * 16, 4 * 8 * 2, 4 * 8 * 2, 4 * 8 * 3, 4 * 8 * 3, 0]  # what the next part reads
    assert np.triu(row.parts.crossing).tolist() == np.triu([behind] * 7).tolist()
    products = [behind[q] if q % 2 == 0 else 0 for q in range(7)]  # no backward op reads these
    assert np.triu(row.parts.unread).tolist() == np.triu([products] * 7).tolist()
    assert row.parts.in_flight == 1


def test_bytes_are_of_one_micro_batch_on_one_device() -> None:
    whole = row_of(layers([4, 2, 3]), plan([1])).parts
    part = row_of(layers([4, 2, 3]), plan([2], 3, 2)).parts
    assert part.held.tolist() == [*whole.held[:-1] / 12, 4] and part.crossing.tolist() == (whole.crossing / 12).tolist()
    assert part.unread.tolist() == (whole.unread / 12).tolist()


def test_each_task_graph_has_its_row() -> None:
    region, given = layers([4, 2, 3, 5], last=[0, 2]), plan([1, 1], 4)
    first, second = (row_of(region, given, number).parts for number in (0, 1))
    assert first.held.tolist() == [0, 8 * 2 * 4 / 4] and first.in_flight == 2
    assert second.held.tolist() == [0, 8 * 3 * 4 / 4, 0, 8 * 5 * 4 / 4, 4] and second.in_flight == 1
    assert first.crossing.tolist() == [[16, 0], [0, 0]]  # act0 is sent, and held there


def branching() -> Region:
    """Dropout on ``act``, a reshaped ``act``, and a sum with what came long before::

        x -> mul -> act -> flat (the same buffer) -> dropped = flat * mask -> out = MatMul(dropped, u) -> sum = out + act
                    rand -> mask (bool)
    """
    step = Drawing()
    step.forward("x", "Placeholder", [], 4, phase=Phase.INPUT)
    step.variable("w", 4, 6)
    step.variable("u", 6, 6)
    step.forward("mul", "MatMul", ["x", "w"], 6)
    step.forward("act", "Tanh", ["mul"], 6)
    step.forward("flat", "Reshape", ["act"], 6)
    step.forward("rand", "RandomUniform", [], 6)
    step.forward("mask", "GreaterEqual", ["rand"], 6, dtype="bool")
    step.forward("dropped", "Mul", ["flat", "mask"], 6)
    step.forward("out", "MatMul", ["dropped", "u"], 6)
    step.forward("sum", "AddV2", ["out", "act"], 6)
    step.backward("tile", "Neg", ["x"], 6)
    step.backward("dout", "Mul", ["tile", "sum"], 6)
    step.gradient("du", ["dropped", "dout"], 6, 6)
    step.backward("dflat", "Mul", ["dout", "mask"], 6)
    step.backward("dmul", "TanhGrad", ["flat", "dflat"], 6)
    step.gradient("dw", ["x", "dmul"], 4, 6)
    step.backward("unread", "Square", ["mul"], 6)  # nobody needs it
    step.update("du", "dw")
    step.batch.own_seed.append(step.graph.op("rand").id)
    return step.region()


def test_mask_is_kept_where_nothing_gives_it_again_and_a_buffer_once() -> None:
    """Parts: w mul | act | flat | rand mask dropped | u out | sum.  In the place of ``rand``, ``mask`` is kept, a quarter of its
    size; ``act`` is read until the last part."""
    region = branching()
    row = row_of(region, plan([1]))
    size, mask = 8 * 6 * 4, 8 * 6  # bytes
    assert row.parts.held.tolist() == [0, size, 0, mask + size, 0, size]
    assert row.parts.seconds == pytest.approx(np.array([416, 2 * size, 0, 240 + 432, 576, 3 * size]) / BANDWIDTH)
    assert row.parts.crossing.tolist() == [
        [size, size, size, size + mask + size, size + mask + size, mask],
        [0, size, size, size + mask + size, size + mask + size, mask],
        [0, 0, 0, mask + size, mask + size, mask],
        [0, 0, 0, mask + size, mask + size, mask],
        [0, 0, 0, 0, size, 0],
        [0, 0, 0, 0, 0, 0]]
    assert row.parts.unread.tolist() == [
        [size, 0, 0, 0, size, 0], *[[0, 0, 0, 0, size, 0]] * 4, [0] * 6]


# -------------------------------------------------------------------------------------------------- what is kept
@pytest.mark.parametrize("segments, kept", [
    ([(5, True)], []),
    ([(part, False) for part in range(6)], ["mul", "act", "flat", "mask", "dropped", "out", "sum"]),
    ([(1, True), (5, True)], ["act"]),
    ([(2, True), (3, False), (5, True)], ["act", "flat", "mask", "dropped"]),
    ([(3, True), (5, False)], ["act", "dropped", "sum"]),
], ids=str)
def test_what_a_choice_keeps(segments: Sequence[Tuple[int, bool]], kept: Sequence[str]) -> None:
    region = branching()
    assert names(region, row_of(region, plan([1])).tensors(Choice(0, 0, tuple(segments)))) == kept


@pytest.mark.parametrize("kept, again, wanted", [
    ([], dict.fromkeys(["mul", "act", "flat", "dropped", "out", "sum"], "tile"), ["flat", "dropped", "sum"]),
    (["out"], {"mul": "tile", "act": "tile", "flat": "dout", "dropped": "dout", "sum": "tile"}, ["flat", "dropped", "sum"]),
    (["act", "sum"], {"flat": "dout", "dropped": "dout"}, ["flat", "dropped"]),
    (["flat", "dropped", "sum"], {}, []),
])
def test_what_is_done_again_and_which_gradient_it_waits_for(
    kept: Sequence[str], again: Dict[str, str], wanted: Sequence[str]
) -> None:
    region = branching()
    found = redone(Readers(region), 0, {region.graph.tensor(name) for name in kept})
    ops = region.graph.ops
    assert {ops[a].name: ops[b].name for a, b in found.waits.items()} == again and names(region, found.wanted) == list(wanted)


def with_one(prepare: Optional[Callable[[Drawing], None]] = None, type_: str = "Tanh", **fields: Any) -> Readers:
    """Of ``x -> mul -> odd -> late -> last``, where ``late`` follows from a gradient."""
    step = product()
    step.forward("odd", type_, ["mul"], 6, **fields)
    step.backward("dodd", "Mul", ["odd", "mul"], 6)
    step.forward("late", "Tanh", ["dodd"], 6)
    step.backward("shape", "Shape", ["odd"], 6)
    step.gradient("dw", ["x", "dodd"], 4, 6)
    step.gradient("other", ["x", "shape"], 4, 6)
    step.backward("unread", "Mul", ["odd", "mul"], 6)
    step.update("dw", "other")
    if prepare is not None:
        prepare(step)
    return Readers(step.region())


def test_who_reads_what() -> None:
    readers = with_one()
    ops = readers.region.graph.ops
    assert {ops[index].name for index in readers.backward} == {"dodd", "dw", "other"}
    assert {ops[index].name for index in readers.may} == {"mul", "odd"}
    assert sorted(names(readers.region, readers.wanted(0))) == ["mul", "odd"] and readers.wanted(1) == set()


def _reduced(step: Drawing) -> None:
    step.batch.conversions[step.graph.op("odd").id, 0] = (Scale(1), Reduce("sum"))


def _whole(step: Drawing) -> None:
    step.batch.whole[step.graph.op("odd").id] = "it needs all examples"


def _draws(step: Drawing) -> None:
    step.batch.own_seed.append(step.graph.op("odd").id)


@pytest.mark.parametrize("readers", [
    with_one(_draws), with_one(type_="RandomUniform"), with_one(type_="Switch"), with_one(type_="AssignAdd"),
    with_one(waits=["mul"]), with_one(body={"f": OpGraph()}), with_one(dtype="resource"), with_one(dtype="variant"),
    with_one(dtype="float32_ref"),
], ids=["own seed", "random", "switch", "state", "waits", "body", "resource", "variant", "reference"])
def test_what_gives_something_else_is_not_done_again(readers: Readers) -> None:
    assert names(readers.region, [readers.region.graph.ops[index].outputs[0] for index in readers.may]) == ["mul"]


@pytest.mark.parametrize("prepare", [_reduced, _whole])
def test_nothing_is_done_again_that_all_clones_need(prepare: Callable[[Drawing], None]) -> None:
    """Nor what that follows from, which ends before any backward pass begins."""
    assert not with_one(prepare).may


def test_quietest_cut_of_every_share_is_taken() -> None:
    """More layers than places that are looked at: there is no cut behind the wide ones, and all parts hold about as much."""
    widths = [2, 1, 1] * MOST_CUTS
    for wide in (5, 20, 33):
        widths[wide] = 7
    region = layers([4, *widths])
    row = row_of(region, plan([1]))
    kept = names(region, row.tensors(Choice(0, 0, tuple((part, True) for part in range(row.parts.size)))))
    assert not {"act5", "act20", "act33", "mul5", "mul20", "mul33"} & set(kept)
    assert MOST_CUTS // 2 < row.parts.size <= MOST_CUTS + 1
    assert row.parts.held.max() < 4 * row.parts.held.sum() / MOST_CUTS


def kept_between(widths: Sequence[int], skip: int, read: Sequence[int]) -> List[str]:
    """What is kept of ``x -> t0 -> t1 -> ... -> t6`` if all is dropped.

    Args:
        skip: t6 also reads this tensor.
        read: the tensors that backward ops read.
    """
    step = Drawing()
    step.forward("x", "Placeholder", [], 4, phase=Phase.INPUT)
    step.variable("w", 4, widths[0])
    step.forward("t0", "MatMul", ["x", "w"], widths[0])
    for i, width in enumerate(widths[1:], 1):
        step.forward(f"t{i}", "AddN", [f"t{i - 1}"] + [f"t{skip}"] * (i == 6 and skip >= 0), width)
    step.backward("back", "AddN", [f"t{i}" for i in read], 4)
    step.gradient("dw", ["x", "back"], 4, widths[0])
    step.update("dw")
    region = step.region()
    row = row_of(region, plan([1]))
    return names(region, row.tensors(Choice(0, 0, tuple((part, True) for part in range(row.parts.size)))))


@pytest.mark.parametrize("widths, skip, read, kept", [
    ([3, 1, 2, 5, 1, 2, 1], 0, [0, 2, 3, 5], ["t0", "t4"]),
    ([3, 1, 2, 5, 2, 1, 1], 0, [0, 2, 3, 5, 6], ["t0", "t5"]),
    ([3, 6, 2, 4, 3, 1, 2], -1, [0, 2, 3, 5, 6], ["t2", "t5"]),
], ids=str)
def test_where_the_fewest_bytes_cross_in_each_half(
    widths: Sequence[int], skip: int, read: Sequence[int], kept: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cuts, one in each half of the bytes that backward ops read.  What t6 reads crosses all cuts behind it."""
    monkeypatch.setattr("whale_tf.planner.recompute.MOST_CUTS", 2)
    assert kept_between(widths, skip, read) == kept


def test_all_cuts_are_taken_if_there_are_no_more_than_that_many() -> None:
    assert row_of(layers([4, *[2, 1] * (MOST_CUTS // 4)]), plan([1])).parts.size == MOST_CUTS + 1


def test_what_cannot_be_recomputed_is_kept_if_something_needs_it_again() -> None:
    """``odd`` and ``rand`` draw numbers.  A backward op reads ``odd``, and an op that may be recomputed reads ``rand`` beside one
    that may not; nothing needs ``lost``."""
    step = product()
    step.forward("odd", "Tanh", ["mul"], 5)
    step.forward("rand", "Tanh", ["odd"], 3)
    step.forward("lost", "Tanh", ["rand"], 2, waits=["mul"])
    step.forward("again", "AddN", ["rand", "mul"], 6)
    step.backward("back", "AddN", ["odd", "again"], 6)
    step.gradient("dw", ["x", "back"], 4, 6)
    step.update("dw")
    step.batch.own_seed += [step.graph.op(name).id for name in ("odd", "rand")]
    row = row_of(step.region(), plan([1]))
    size = 4 * EXAMPLES
    assert row.parts.crossing[0].tolist() == [6 * size, (6 + 5) * size, (6 + 5 + 3) * size, (6 + 5 + 3) * size, (5 + 3) * size]


def test_reshape_of_what_another_task_graph_sends_is_not_held() -> None:
    """The buffer is on the other TaskGraph's device."""
    step = product()
    step.task_graph = 1
    step.forward("flat", "Reshape", ["mul"], 6)
    step.forward("act", "Tanh", ["flat"], 6)
    step.backward("back", "AddN", ["act", "flat"], 6)
    step.task_graph = 0
    step.gradient("dw", ["x", "back"], 4, 6)
    step.update("dw")
    parts = row_of(step.region(), plan([1, 1]), 1).parts
    assert parts.held.tolist() == [0, 4 * EXAMPLES * 6] and parts.crossing.tolist() == [[0, 0], [0, 0]]


def test_recomputing_costs_no_bytes() -> None:
    """Nine ops are repeated rather than a mask kept that has one byte for each of eight examples."""
    step = product()
    for i in range(EXAMPLES):
        step.forward(f"act{i}", "Tanh", [f"act{i - 1}" if i else "mul"], 6)
    step.forward("mask", "Greater", [f"act{EXAMPLES - 1}"], 1, dtype="bool")
    step.backward("tile", "Neg", ["x"], 6)
    step.backward("back", "Mul", ["tile", "mask"], 6)
    step.gradient("dw", ["mul", "back"], 4, 6)
    step.update("dw")
    region = step.region()
    found = redone(Readers(region), 0, {region.graph.tensor("mul")})
    assert {region.graph.ops[op].name for op in found.waits} == {"mask", *(f"act{i}" for i in range(EXAMPLES))}


def test_what_has_no_gradient_to_wait_for_is_kept() -> None:
    """The first backward op reads ``act``, and nothing before it is a gradient."""
    step = product()
    step.forward("act", "Tanh", ["mul"], 6)
    step.backward("first", "Square", ["act"], 6)
    step.backward("back", "Mul", ["first", "mul"], 6)
    step.gradient("dw", ["x", "back"], 4, 6)
    step.update("dw")
    region = step.region()
    found = redone(Readers(region), 0, set())
    assert not found.waits and not found.wanted


# ------------------------------------------------------------------------------------------------------ decisions
WIDE = [16, 16, 2, 3]


def test_full_keeps_the_least() -> None:
    """``mul1`` is kept, behind which all is smaller than the 512 bytes of ``act0``: that is still there when the backward pass
    begins."""
    region = layers(WIDE)
    found = kept_tensors(region, plan([1]), devices(1), "full", EXAMPLES, [0])
    assert {number: names(region, kept) for number, kept in found.items()} == {0: ["mul1", "act1", "act2", "loss"]}
    assert row_of(region, plan([1])).parts.smallest()[::2] == (64 + 512, ((2, True), (6, False)))


def test_auto_drops_nothing_that_fits() -> None:
    region = layers(WIDE)
    everything = int(row_of(region, plan([1])).parts.memory_without)
    assert everything == 512 + 64 + 96 + 4
    assert kept_tensors(region, plan([1]), devices(everything + 1000), "auto", EXAMPLES, [1000]) == {}
    found = kept_tensors(region, plan([1]), devices(everything + 999), "auto", EXAMPLES, [1000])
    assert {number: names(region, kept) for number, kept in found.items()} == {0: ["mul1", "act1", "act2", "loss"]}
    with pytest.raises(InfeasibleError, match="TaskGraph 'stage0' needs 1576 bytes .* smallest device has 1575;"):
        kept_tensors(region, plan([1]), devices(1575), "auto", EXAMPLES, [1000])


def test_each_task_graph_has_its_own_memory() -> None:
    """The smallest of its devices counts; what a TaskGraph holds in any case is taken off."""
    region, given = layers([16, 16, 2, 16, 2, 2], last=[1, 4]), plan([2, 1], 4)
    rows = rows_of(region, given, devices(1, 1, 1), EXAMPLES)
    first, second = (int(rows[number].parts.memory_without) for number in (0, 1))
    assert first == 2 * 4 * (16 + 2) and second == 4 * 2 * (16 + 2 + 2) + 4

    def found(*memory: int) -> Set[int]:
        return set(kept_tensors(region, given, devices(*memory), "auto", EXAMPLES, [10, 20]))

    assert found(first + 10, first + 10, second + 20) == set()
    assert found(first + 10, first + 10, second + 19) == {1}
    assert found(first + 10, first + 9, second + 20) == found(first + 9, first + 10, second + 20) == {0}


def test_replicas_that_take_their_own_mini_batches_hold_all_of_each() -> None:
    region, given = layers(WIDE), plan([1], model_replicas=2)
    shared, own = (rows_of(region, given, devices(1, 1), EXAMPLES, replicas)[0].parts for replicas in (None, 1))
    assert own.held[:-1].tolist() == (2 * shared.held[:-1]).tolist()  # of all but the loss


def test_task_graph_that_holds_nothing_is_left_out() -> None:
    """The backward pass of its only layer reads what the one before has sent."""
    step = product()
    step.task_graph = 1
    step.forward("act", "Tanh", ["mul"], 6)
    step.backward("dact", "Square", ["act"], 6)
    step.task_graph = 0
    step.gradient("dw", ["x", "dact"], 4, 6)
    step.update("dw")
    region = step.region()
    assert list(rows_of(region, plan([1, 1]), devices(1, 1), EXAMPLES)) == [1]
    assert list(kept_tensors(region, plan([1, 1]), devices(1, 1), "full", EXAMPLES, [0, 0])) == [1]


# --------------------------------------------------------------------------------------------------------- marks
def test_marked_tensors() -> None:
    region = layers([4, 2, 3, 5], last=[0, 2])
    found = marked_tensors(region, 2, ["act2:0", "act0:0", "act1:0"])
    assert {number: names(region, marked) for number, marked in found.items()} == {0: ["act0"], 1: ["act2", "act1"]}
    assert marked_tensors(region, 2, []) == {0: (), 1: ()}


@pytest.mark.parametrize("name", ["nothing:0", "dact1:0", "w1:0", "update/grad0:0", "x:0"])
def test_mark_on_something_else_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"wh.checkpoint marks '{name}', which is not an activation"):
        marked_tensors(layers([4, 2, 3]), 1, [name])
