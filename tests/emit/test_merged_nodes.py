"""Which clones' values are added up where, and what goes over processes: merging, looked at node by node.

Every clone's tensor has a value of its own, a power of two, so that a sum says what it is of.
"""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import pytest

from tests.emit.staged import context_of
from tests.passes.drawings import chain, plan
from tests.passes.programs import PROGRAMS
from whale_tf.communicators import Communicator, Member
from whale_tf.emit.merge import Merge
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.batch_axis import EXTENT
from whale_tf.ir.extents import Size, batch_size, vector
from whale_tf.ir.layout import Layout, replicated, sharded
from whale_tf.ir.training_step import TrainingStep
from whale_tf.passes.collect import compressed
from whale_tf.plan import GradientPlan, Plan
from whale_tf.program import Copy


class Sent(Communicator):
    """Two processes, of which the other one has zeros.  ``sent``: what each message has, and ``asked``, what else is asked."""

    def __init__(self, nodes: Nodes, processes: int) -> None:
        super().__init__(nodes)
        self.processes = processes
        self.sent: List[Tuple[List[str], bool]] = []
        self.asked: List[Any] = []
        self.devices: Dict[str, List[str]] = {}

    def all_reduce(self, members: Sequence[Member], name: str, dtype: Any, fp16: bool = False) -> List[str]:
        self.sent.append(([name.replace("whale/sync/", "")], fp16))
        self.devices[name] = [member.device for member in members]
        total = self._nodes.add_n([member.value for member in members], name + "/sum", dtype, members[0].device)
        return [self._nodes.identity(total, f"{name}/{number}", dtype, member.device) for number, member in enumerate(members)]

    def all_reduce_together(self, members: Any, names: Any, shapes: Any, dtype: Any, fp16: bool = False) -> List[List[str]]:
        first = len(self.sent)
        found = super().all_reduce_together(members, names, shapes, dtype, fp16)
        self.asked += shapes
        self.sent[first:] = [([name for each, _ in self.sent[first:] for name in each], fp16)]
        return found

    def across(self, member: Member, kind: str, name: str, dtype: Any) -> str:
        self.asked.append((kind, member.device))
        return self._nodes.identity(member.value, name, dtype, member.device)

    def gather_across(self, member: Member, rank: int, name: str, dtype: Any, equal: bool, lengths: Optional[str] = None) -> str:
        self.asked.append((rank, equal, lengths))
        return self._nodes.identity(member.value, name, dtype, member.device)


class Case:
    """All that a step's program says is staged.  A clone's weight is a quarter."""

    def __init__(self, step: TrainingStep, chosen: Plan, processes: int = 1, is_even: bool = True, batch: Optional[int] = 8,
                 fp16: bool = False) -> None:
        self.context = context_of(step, chosen)
        self.edit: Any = self.context.edit
        nodes = Nodes(self.edit)
        self.communicator = Sent(nodes, processes)
        self.powers: Dict[str, float] = {}

        def scale(value: str, tensor: int, power: int, home: int, clone: Any, scope: str, device: str = "") -> str:
            return nodes.binary("Mul", value, nodes.const(0.25 ** power, scope + "/w", "float32", device), scope + "/scaled",
                                "float32", device)

        converter: Any = SimpleNamespace(
            division=SimpleNamespace(is_even=is_even, batch=batch, mini_batches=1), scale=scale, rank=lambda tensor: 2,
            rows_of_each_process=lambda tensor, layout: "rows", of_this_process=lambda value, *_: value,
            comparable=lambda tensor, home, pieces, *_: pieces,
            gathered=lambda here, tensor, dim, scope, *how: self.communicator.gather_across(here, 2, scope, "float32", *how),
            combine=lambda kind, terms, scope, dtype, device: nodes.binary("Maximum", *terms, scope, dtype, device),
            concatenated=lambda tensor, layout, home, pieces, scope, device: nodes.concat(
                [name for _, name in pieces], layout.dim, scope, "float32", device))
        self.merge = Merge(self.context, nodes, converter, self.communicator,
                           frozenset(tensor for tensor, _ in step.gradients) if fp16 else compressed(step, chosen))
        self.merge.stage()
        self.graph = step.graph

    def given(self, name: str) -> float:
        return self.powers.setdefault(name, 2.0 ** len(self.powers))

    def clones(self, name: str) -> Dict[str, float]:
        """Clone's tensor -> how often it is in a staged sum, in quarters."""
        total = 4 * self.edit.value(name, self.given)
        found = {}
        for tensor, power in sorted(self.powers.items(), key=lambda item: -item[1]):
            times, total = divmod(total, power)
            if times:
                found[tensor.replace("whale/", "").rpartition("/")[0]] = times
        return found

    def of_update(self, tensor: str, copy: Copy = Copy(0, 0)) -> Dict[str, float]:  # noqa: B008
        return self.clones(self.merge.for_update(self.graph.tensor(tensor), 0, copy))

    def device(self, name: str) -> str:
        return self.edit.nodes[name].device


def everywhere(micro_batches: int, replicas: int) -> Dict[str, float]:
    return {f"g0_m{m}_r{r}": 1.0 for m in range(micro_batches) for r in range(replicas)}


@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_replicas_add_up_their_micro_batches_and_then_each_other(micro_batches: int, is_even: bool) -> None:
    """Each sum is weighted once, or each of its terms, on its replica's device."""
    case = Case(chain(1), plan([2], micro_batches), is_even=is_even)
    for replica in range(2):
        copy = Copy(0, replica)
        assert case.of_update("grad0", copy) == everywhere(micro_batches, 2)
        assert case.device(case.merge.for_update(case.graph.tensor("grad0"), 0, copy)) == f"CPU:{replica}"
    assert case.communicator.sent == [(["grad0_0"], False)]
    assert case.communicator.devices["whale/sync/grad0_0"] == ["CPU:0", "CPU:1"]
    added = {name: case.device(name) for name, node in case.edit.nodes.items() if node.op == "Add"}
    assert added == {f"whale/g0_r{r}/accumulate/grad0_0/{m}": f"CPU:{r}" for r in range(2) for m in range(1, micro_batches)}


def test_one_replica_s_sum_is_merged() -> None:
    case = Case(chain(1), plan([1], 2))
    assert case.of_update("grad0") == everywhere(2, 1) and not case.communicator.sent
    assert case.clones(case.merge.of_all_processes(case.graph.tensor("grad0"))) == everywhere(2, 1)


def test_gradients_are_added_up_at_home() -> None:
    """One chain over all clones, on the home's device."""
    case = Case(*PROGRAMS["zero_v3"])
    for tensor, home in (("grad0", 0), ("grad1", 1), ("grad2", 0)):
        assert case.of_update(tensor) == everywhere(2, 2)
        own = [name for name, node in case.edit.nodes.items() if node.op == "Add" and f"/{tensor}_0/" in name]
        assert len(own) == 3 and {case.device(name) for name in own} == {f"CPU:{home}"}


def test_a_home_without_micro_batches_gets_each_replica_s_gradient() -> None:
    step, chosen = chain(1), plan([2], zero="v3", tasks={0: {"variables": "shared", "homes": {"w0": 1}}})
    case = Case(step, chosen)
    assert case.of_update("grad0") == everywhere(1, 2)
    assert case.device(case.merge.whole(step.graph.tensor("grad0"))) == "CPU:1"
    assert {case.device(name) for name in case.edit.nodes if name.endswith("/scaled")} == {"CPU:0", "CPU:1"}


def buckets(*names: Tuple[str, ...], fp16: bool = False) -> Any:
    return (GradientPlan(task_graph=0, backend="local", buckets=names, fp16=fp16),)


def test_gradients_of_a_bucket_are_one_message() -> None:
    step = chain(3, task_graphs=1)
    case = Case(step, plan([2], gradients=buckets(("w2", "w0"), ("w1",), fp16=True)))
    assert case.communicator.sent == [(["grad2_0", "grad0_0"], True), (["grad1_0"], True)]
    assert case.communicator.asked == [(2, 2), (2, 2)]
    assert all(case.of_update(f"grad{i}", Copy(0, 1)) == everywhere(1, 2) for i in range(3))


def over_processes(homes: Dict[str, int], rank: int, replicas: int = 1, zero: str = "v2", **more: Any) -> Plan:
    devices = tuple(tuple(range(process * replicas, (process + 1) * replicas)) for process in range(2))
    whole = plan([replicas], 2, 2, {0: {"variables": "shared", "homes": homes}}, zero=zero, processes=devices, **more)
    return whole.local_part(rank)


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_owner_adds_up_what_all_processes_send_of_each_micro_batch(replicas: int) -> None:
    step = chain(2, task_graphs=1, momentum=True)._replace(processes=2)
    homes = {"v0": 0, "v1": replicas}  # the first device of each process
    case = Case(step, over_processes(homes, 0, replicas), 2)
    assert sorted(name for (name,), _ in case.communicator.sent) == [f"grad{i}_0/{m}" for i in range(2) for m in range(2)]
    assert case.of_update("grad0") == everywhere(2, replicas) and not case.communicator.asked
    other = case.merge.for_update(step.graph.tensor("grad1"), 0, Copy(0, 0))
    assert case.edit.nodes[other].op == "Identity"
    waits = case.edit.waits[other]
    assert [*case.edit.nodes[other].input, *waits] == [f"whale/sync/grad1_0/{m}/0" for m in range(2)]
    names = {name for name in case.edit.nodes if "/accumulate/grad0_0/" in name and not name.endswith(("/scaled", "/w"))}
    assert names == {f"whale/g0_r{r}/accumulate/grad0_0/{m}" for r in range(replicas) for m in range(2) if r or m}
    assert set(case.communicator.devices["whale/sync/grad0_0/0"]) == {"CPU:0"}


@pytest.mark.parametrize("fp16", [False, True])
def test_gradients_of_one_owner_travel_together(fp16: bool) -> None:
    step = chain(2, task_graphs=1, momentum=True)._replace(processes=2)
    case = Case(step, over_processes({"v0": 0, "v1": 0}, 0, gradients=buckets(("v0", "v1"))), 2, fp16=fp16)
    assert case.communicator.sent == [(["grad0_0/0", "grad1_0/0"], fp16), (["grad0_0/1", "grad1_0/1"], fp16)]
    assert case.communicator.asked == [(2, 2)] * 4
    assert case.of_update("grad0") == case.of_update("grad1") == everywhere(2, 1)


def test_an_uneven_sum_at_the_owner_is_weighted_term_by_term() -> None:
    step = chain(1, task_graphs=1, momentum=True)._replace(processes=2)
    case = Case(step, over_processes({"v0": 0}, 0, 2), 2, is_even=False)
    assert case.of_update("grad0") == everywhere(2, 2)


def test_a_sparse_gradient_is_put_together_on_every_copy() -> None:
    step = chain(1)
    tensor = step.graph.tensor("grad0")
    step.region.batch.layouts[tensor] = sharded(0)
    case = Case(step, plan([2]))
    for replica in range(2):
        found = case.merge.for_update(tensor, 0, Copy(0, replica))
        assert case.device(found) == f"CPU:{replica}"
        rows = case.edit.value(found, lambda name: np.full(1, float(name.rpartition("_r")[2][0])))
        assert rows.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("batch, lengths", [(8, None), (None, "rows")])
def test_rows_of_all_processes_are_gathered(batch: Optional[int], lengths: Optional[str]) -> None:
    step = chain(1)._replace(processes=2)
    step.region.batch.layouts[step.graph.tensor("grad0")] = sharded(0)
    case = Case(step, plan([2]), 2, batch=batch)
    assert case.communicator.asked == [(2, batch is not None, lengths)] and not case.communicator.sent


def test_an_extreme_goes_over_processes_by_its_kind() -> None:
    step = chain(1)._replace(processes=2)
    tensor = step.graph.tensor("loss")
    case = Case(step, plan([2]), 2)
    step.region.batch.layouts[tensor] = Layout("max")
    found = case.merge.of_all_processes(tensor)
    assert case.communicator.asked == [("max", "CPU:0")] and case.merge.of_all_processes(tensor) == found
    assert case.edit.value(found, lambda name: {"0": 3.0, "1": 7.0}[name.rpartition("_r")[2][0]]) == 7.0


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_value_that_all_clones_have_is_the_first_one_s(replicas: int) -> None:
    step = chain(1)
    tensor = step.graph.tensor("loss")
    case = Case(step, plan([replicas]))
    step.region.batch.layouts[tensor] = replicated()
    assert case.edit.value(case.merge.whole(tensor), {"whale/g0_m0_r0/loss:0": 5.0}.__getitem__) == 5.0


@pytest.mark.parametrize("sizes, processes, expected", [
    ([8], 1, [3 + 2 * 8, 8, 5]), ([3, 1, 4], 1, [3 + 2 * 8, 8, 5]), ([3, 5], 2, [3 + 2 * 8 - 3, 8, 5 - 5])])
def test_sizes_are_added_up_without_what_each_part_has_anyway(sizes: List[int], processes: int, expected: List[int]) -> None:
    """Clones have ``3 + 2 b`` and ``b`` examples, and a length of 5 that is the same in all of them and that none knows before.
    Of two processes, this one has all: the other one's part, which is not here, would have 3 and 5 once more."""
    step = chain(1)._replace(processes=processes)
    tensor = step.graph.tensor("loss")
    case = Case(step, plan([len(sizes)]), processes)
    step.region.batch.layouts[tensor] = EXTENT
    step.region.batch.extents[tensor] = vector([3 + 2 * batch_size, batch_size, Size.of(("dim", 0, 0))])
    step.graph.tensors[tensor] = step.graph.tensors[tensor]._replace(shape=(3,), dtype="int32")
    clones = {f"whale/g0_m0_r{r}/loss:0": np.array([3 + 2 * size, size, 5]) for r, size in enumerate(sizes)}
    assert case.edit.value(case.merge.of_all_processes(tensor), clones.__getitem__).tolist() == expected


def test_what_a_process_contributes_to_a_sum() -> None:
    case = Case(chain(1)._replace(processes=2), plan([2], 2), 2)
    assert case.clones(case.merge.part(case.graph.tensor("grad0"))) == everywhere(2, 2)


def test_merged_values_are_larger_where_there_are_several_mini_batches_of_known_size() -> None:
    case = Case(chain(1), plan([1]))
    division: Any = case.merge._converter.division
    found = []
    for division.mini_batches, division.batch in ((1, 8), (2, 8), (2, None)):
        found.append(case.merge.is_larger)
    assert found == [False, True, False]
