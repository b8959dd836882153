"""How many examples each clone works on, and where they are in the mini-batch.

A mini-batch of ``B`` examples is divided level by level (model replicas if they share one mini-batch, micro-batches, replicas),
at each level in proportion to the slices: with running totals ``c_0 = 0 <= c_1 <= ... <= c_n``, part ``i`` of ``b`` examples has
``floor(b c_{i+1} / c_n) - floor(b c_i / c_n)`` of them.  Boundaries are monotone in ``c``, so two TaskGraphs with different
replica counts cut the same micro-batch consistently, and an uneven last batch needs no special case.
"""

from __future__ import annotations

import itertools
from typing import AbstractSet, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from whale_tf._tf_compat import tf
from whale_tf.capture.captured import Captured
from whale_tf.communicators import Communicator, Member
from whale_tf.emit.checks import at_least, check_examples, check_rows
from whale_tf.emit.context import Clone, Context
from whale_tf.errors import PlanError, TooFewExamplesError
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.batch_axis import CONCAT, Reduce, Slice
from whale_tf.ir.batch_axis.groups import elements_of_rows
from whale_tf.ir.layout import rows_each
from whale_tf.ir.training_step import pulls_behind
from whale_tf.ir.traits import Role, traits
from whale_tf.ir.walk import reached
from whale_tf.passes.communicate import MICRO, pulls_each
from whale_tf.passes.lowering.levels import agreed_batch, divide, enough, levels
from whale_tf.plan import Plan
from whale_tf.program import ALL, Copy

Number = Union[int, str]  # a value known now, or the name of an int32 scalar
Counted = Tuple[Tuple[int, int], ...]  # inputs whose examples are counted together, and how often


class Shares(NamedTuple):
    """Sizes and starts of all clones of a TaskGraph in one mini-batch, in clone order."""

    total: Number
    sizes: Tuple[Number, ...]
    starts: Tuple[Number, ...]
    vector: Optional[str] = None  # the sizes as one int32 tensor, if they are not known now
    check: Tuple[str, ...] = ()  # op that fails at run time if a clone would get no example


class Least(NamedTuple):
    """How many rows, along a dimension, an input needs so that no part of the mini-batch is without an example."""

    dim: int
    rows: int


def _check_divisible(plan: Plan, batch: int, own: bool, may_be_uneven: bool) -> None:
    """Refuses a static mini-batch that does not divide evenly, unless the plan gives slice sizes.

    Args:
        may_be_uneven: the graph is only for this batch size (such as the last of an epoch); other sizes have their own graphs.

    Raises:
        PlanError: it names sizes that would work.
    """
    for index, task in enumerate(plan.task_graphs):
        sizes = divide(batch, levels(plan, index, own))
        explicit = may_be_uneven or task.batch_slices is not None or plan.micro_batch_slices is not None
        if min(sizes) < 1 or (not explicit and len(set(sizes)) > 1):
            parts = len(sizes)
            if may_be_uneven:
                fix = at_least(parts)
            elif batch < parts:
                fix = f"use a batch size of {parts}, or give slice sizes in the plan"
            else:
                low, high = batch // parts * parts, -(-batch // parts) * parts
                fix = f"use a batch size of {low} or {high}, or give slice sizes in the plan"
            replicas = "" if own else f"{plan.num_model_replicas} model replicas x "
            micro = "" if own and plan.nested_batch == MICRO else f"{plan.num_micro_batch} micro-batches x "
            raise (TooFewExamplesError if min(sizes) < 1 else PlanError)(
                f"a mini-batch of {batch} examples does not divide over {parts} parts of TaskGraph {task.name!r} ({replicas}"
                f"{micro}{task.replica_count} replicas); {fix}")


class BatchShares:
    """Shares of every TaskGraph in every mini-batch, which has a number.  There is a single one, number 0; with ``own`` there is
    one for each model replica, or one for each of its micro-batches.

    Args:
        own: model replicas, or micro-batches, take their own mini-batches.
        batch: examples of a mini-batch; None: known only at run time.
        sources: batch input tensors and their batch dimension.
        communicator: adds up the examples of all processes, each of which takes its own mini-batches.

    Attributes:
        is_together: sections put the examples of all mini-batches together.
        rescaled: operands that hold the size of one model replica's mini-batch but mean the whole batch's.
        least: what inputs need whose sizes are known only at run time, by the names of their tensors.
        name_of: the tensor of a source in a mini-batch (:class:`whale_tf.emit.inputs.Inputs` sets it).
    """

    name_of: Callable[[int, int], str]

    def __init__(self, context: Context, nodes: Nodes, own: bool, batch: Optional[int], sources: Dict[int, int],
                 communicator: Communicator) -> None:
        self.own = own
        self.batch = batch
        self.is_together = False
        self.least: Dict[str, Least] = {}
        self.rescaled: AbstractSet[Tuple[int, int]] = frozenset()
        self._communicator = communicator
        self._elsewhere: Dict[Tuple[int, int], Tuple[str, str]] = {}
        self._everywhere: Dict[int, Dict[str, str]] = {}
        self._each: Dict[Tuple[int, int], str] = {}
        self._context, self._nodes, self._sources = context, nodes, sources
        self._shares: Dict[Tuple[int, int, int], Shares] = {}
        self._rows: Dict[Tuple[int, int], str] = {}
        self._examples: Dict[Tuple[int, int], Tuple[str, str]] = {}
        self._weights: Dict[Tuple[Counted, int, str], Tuple[str, ...]] = {}

    @property
    def mini_batches_here(self) -> int:
        """How many mini-batches this process takes in a step."""
        return self._context.plan.num_model_replicas * pulls_each(self._context.plan) if self.own else 1

    def mini_batch(self, at: Union[Clone, Copy]) -> int:
        """Number of the mini-batch from which a clone or copy has its examples; for one of several, that of the first."""
        if not self.own or at.g == ALL:
            return 0
        each, m = pulls_each(self._context.plan), at.m if isinstance(at, Clone) else ALL
        return at.g * each + (0 if each == 1 or m == ALL else m)

    @property
    def mini_batches(self) -> int:
        """How many mini-batches all processes take in a step."""
        return self.mini_batches_here * self._communicator.processes

    def shares(self, source: int, task_graph: int, number: int) -> Shares:
        """Shares in mini-batch ``number`` of ``source``."""
        key = (source, task_graph, number)
        if key not in self._shares:
            totals = levels(self._context.plan, task_graph, self.own)
            batch = self.batch if self.batch is not None else self._static(source)
            if batch is not None:
                sizes = divide(batch, totals)
                starts = [0] + list(itertools.accumulate(sizes))[:-1]
                vector = None if self.batch is not None else self._nodes.const(
                    sizes, self._scope(source, task_graph, f"g{number}"), tf.int32, self._context.host)
                self._shares[key] = Shares(batch, tuple(sizes), tuple(starts), vector)
            else:
                self._shares[key] = self._at_run_time(source, task_graph, number, totals)
        return self._shares[key]

    def _static(self, source: int) -> Optional[int]:
        """The number of an input's examples, if the graph says it.

        Raises:
            PlanError: some clone would get none.
        """
        shape, blocks = self._context.graph.tensors[source].shape, self._context.region.batch.layout(source).blocks or (1,)
        size = None if shape is None else shape[self._sources[source]]
        if size is None:
            return None
        batch = size // sum(map(rows_each, blocks))
        _check_divisible(self._context.plan, batch, self.own, may_be_uneven=True)
        return batch

    def position(self, task_graph: int, clone: Clone) -> int:
        """Position of a clone in the shares of its mini-batch."""
        plan = self._context.plan
        count = plan.task_graphs[task_graph].replica_count
        m = 0 if self.own and plan.nested_batch == MICRO else clone.m
        return ((0 if self.own else clone.g) * plan.num_micro_batch + m) * count + clone.r

    def weight(self, counted: Counted, task_graph: int, clone: Clone, dtype: tf.DType) -> Union[float, str]:
        """``w_i = b_i / B``, of the examples of one batch or of several together: a number, or the name of a scalar."""
        position, number = self.position(task_graph, clone), self.mini_batch(clone)
        if self.batch is not None:
            return float(self.shares(counted[0][0], task_graph, number).sizes[position]) / (self.batch * self.mini_batches)
        key = (counted, task_graph, dtype.name)
        if key not in self._weights:
            self._weights[key] = self._weights_at_run_time(counted, task_graph, dtype)
        return self._weights[key][position + number * self._per_mini_batch(task_graph)]

    def elsewhere(self, source: int, task_graph: int) -> Number:
        """How many examples the other processes take in this step."""
        if self.batch is not None:
            return self.batch * (self.mini_batches - self.mini_batches_here)
        if self._communicator.processes == 1:
            return 0
        here, everywhere = self._totals(source, task_graph)
        return self._nodes.binary(
            "Sub", everywhere, here, self._scope(source, task_graph, "elsewhere"), tf.int32, self._context.host)

    def before_this_process(self, source: int, task_graph: int) -> Number:
        """How many examples the processes before this one take."""
        communicator, rank = self._communicator, self._context.processes.step
        if communicator.processes == 1:
            return 0
        if self.batch is not None:
            return self.batch * rank * self.mini_batches_here
        scope = self._scope(source, task_graph, "before")
        starts = self._starts(self.of_each_process(source, task_graph), scope)
        own = self._nodes.slice_dim(starts, 0, 1, rank, 1, scope + "/own", tf.int32, self._context.host)
        return self._nodes.scalar(own, scope, tf.int32, self._context.host)

    def of_each_process(self, source: int, task_graph: int) -> str:
        """How many examples each process takes: int32 `[processes]`."""
        key = (source, task_graph)
        if key not in self._each:
            scope, device = self._scope(source, task_graph, "each"), self._context.host
            row = self._nodes.expand_dims(self._here(source, task_graph), 0, scope + "/here", tf.int32, device)
            self._each[key] = self._communicator.gather_across(Member(row, device), 1, scope, tf.int32, True)
        return self._each[key]

    def of_this_process(self, counted: Counted, task_graph: int, dtype: tf.DType) -> Union[float, str]:
        """Ratio of all processes' examples to this process's own: a number, or the name of a scalar."""
        if self.batch is not None or self._communicator.processes == 1:
            return float(self._communicator.processes)
        scope = self._scope(counted[0][0], task_graph, f"ratio_{dtype.name}")
        totals = zip(*(self._totals(source, task_graph) for source, _ in counted))
        here, everywhere = (self._nodes.cast(self._together(total, counted, f"{scope}/all{i}"), f"{scope}/{i}", tf.int32, dtype,
                                             self._context.host) for i, total in enumerate(totals))
        return self._nodes.binary("RealDiv", everywhere, here, scope, dtype, self._context.host)

    def _totals(self, source: int, task_graph: int) -> Tuple[str, str]:
        """Numbers of examples, known only at run time: this process's, and those of all processes in the run."""
        key = (source, task_graph)
        if key not in self._elsewhere:
            nodes, device = self._nodes, self._context.host
            scope, here = self._scope(source, task_graph, "total"), self._here(source, task_graph)
            if self._communicator.is_always_together:
                each = self.of_each_process(source, task_graph)
                everything = nodes.const([0], scope + "/all", tf.int32, device)
                everywhere = nodes.add("Sum", scope, [each, everything], device, T=tf.int32, Tidx=tf.int32, keep_dims=False)
            elif self._communicator.processes > 1 and len(self._context.region.batch.batches) > 1:
                everywhere = self._of_all_batches(task_graph)[self._batch_of(source)]
            else:
                everywhere = self._communicator.sum_if_together(Member(here, device), here, device, scope, tf.int32)
            self._elsewhere[key] = here, everywhere
        return self._elsewhere[key]

    def _of_all_batches(self, task_graph: int) -> Dict[str, str]:
        """How many examples of each batch all processes take that are in the run.  There is one sum for all batches: a loss over
        two of them is that of this process's own examples only if both numbers are of the same processes."""
        if task_graph not in self._everywhere:
            nodes, device, batches = self._nodes, self._context.host, self._context.region.batch.batches
            scope = self._context.name("division", f"all_batches_t{task_graph}")
            each = [self._here(members[0], task_graph) for members in batches.values()]
            here = nodes.add("Pack", scope + "/here", each, device, T=tf.int32, N=len(batches), axis=0)
            total = self._communicator.sum_if_together(Member(here, device), here, device, scope, tf.int32)
            unpacked = nodes.add("Unpack", scope + "/each", [total], device, T=tf.int32, num=len(batches), axis=0)
            self._everywhere[task_graph] = {batch: f"{unpacked}:{i}" for i, batch in enumerate(batches)}
        return self._everywhere[task_graph]

    def _batch_of(self, source: int) -> str:
        return next(batch for batch, members in self._context.region.batch.batches.items() if source in members)

    def _here(self, source: int, task_graph: int) -> str:
        """How many examples this process takes."""
        scope, host = self._scope(source, task_graph, "here"), self._context.host
        totals = [share.total if isinstance(share.total, str) else self._nodes.const(share.total, f"{scope}/{g}", tf.int32, host)
                  for g, share in enumerate(self._shares_here(source, task_graph))]
        return self._nodes.add_n(totals, scope, tf.int32, host)

    def _shares_here(self, source: int, task_graph: int) -> List[Shares]:
        """The shares in each of this process's mini-batches."""
        return [self.shares(source, task_graph, g) for g in range(self.mini_batches_here)]

    def _scope(self, source: int, task_graph: int, what: str) -> str:
        return self._context.name("division", f"{self._context.flat(source)}_t{task_graph}_{what}")

    def _starts(self, sizes: str, scope: str) -> str:
        """Where parts of these sizes begin: their running totals."""
        axis = self._nodes.const(0, scope + "/axis", tf.int32, self._context.host)
        return self._nodes.add("Cumsum", scope + "/starts", [sizes, axis], self._context.host, T=tf.int32, Tidx=tf.int32,
                               exclusive=True, reverse=False)

    def _per_mini_batch(self, task_graph: int) -> int:
        plan = self._context.plan
        count = plan.num_micro_batch * plan.task_graphs[task_graph].replica_count * plan.num_model_replicas
        return count // self.mini_batches_here

    def _at_run_time(self, source: int, task_graph: int, number: int, totals: Sequence[Sequence[int]]) -> Shares:
        nodes, device, name = self._nodes, self._context.host, self.name_of(source, number)
        scope = self._scope(source, task_graph, f"g{number}")
        rows = sum(map(rows_each, self._context.region.batch.layout(source).blocks or (1,)))
        sizes, total = self.examples(source, number)
        for depth, level in enumerate(totals):
            sizes = self._divide_at_run_time(sizes, level, f"{scope}/level{depth}", device)
        count = self._per_mini_batch(task_graph)
        of_each = self._unpacked(sizes, count, scope + "/size_each", tf.int32)
        starts = self._unpacked(self._starts(sizes, scope), count, scope + "/start_each", tf.int32)
        check = check_examples(nodes, sizes, total, count, name, rows, self._is_computed(source), scope, device)
        dim = self._sources[source]
        self.least[name] = Least(dim, max(rows * enough(totals), self.least.get(name, Least(dim, 0)).rows))
        return Shares(total, of_each, starts, sizes, (check,))

    def examples(self, source: int, number: int) -> Tuple[str, str]:
        """How many examples of an input a mini-batch has, known only at run time: int32 `[1]` and a scalar."""
        key = (source, number)
        if key not in self._examples:
            nodes, device = self._nodes, self._context.host
            scope = self._context.name("division", f"{self._context.flat(source)}_g{key[1]}")
            rows = sum(map(rows_each, self._context.region.batch.layout(source).blocks or (1,)))
            batch = self.rows(source, number)
            if rows > 1:
                each = nodes.const(rows, scope + "/rows", tf.int32, device)
                batch = nodes.binary("FloorDiv", batch, each, scope + "/examples", tf.int32, device)
            self._examples[key] = batch, nodes.scalar(batch, scope + "/total", tf.int32, device)
        return self._examples[key]

    def rows(self, source: int, number: int) -> str:
        """How many rows of an input a mini-batch has: int32 `[1]`."""
        key = (source, number)
        if key not in self._rows:
            nodes, device = self._nodes, self._context.host
            scope = self._context.name("division", f"{self._context.flat(source)}_g{key[1]}")
            shape = nodes.shape(self.name_of(source, number), scope + "/shape", self._context.dtype(source), device)
            self._rows[key] = nodes.slice_dim(shape, 0, 1, self._sources[source], 1, scope + "/batch", tf.int32, device)
        return self._rows[key]

    def _unpacked(self, vector: str, count: int, name: str, dtype: tf.DType) -> Tuple[str, ...]:
        op = self._nodes.add("Unpack", name, [vector], self._context.host, T=dtype, num=count, axis=0)
        return tuple(f"{op}:{i}" for i in range(count))

    def _divide_at_run_time(self, sizes: str, level: Sequence[int], scope: str, device: str) -> str:
        """Divides each of ``sizes`` (a vector) as ``level`` says; the result is again a vector."""
        nodes = self._nodes
        column = nodes.cast(nodes.expand_dims(sizes, 1, scope + "/column", tf.int32, device), scope + "/wide", tf.int32, tf.int64,
                            device)  # products of examples and slices may not fit 32 bits
        running_totals = nodes.const([level], scope + "/running", tf.int64, device)
        products = nodes.binary("Mul", column, running_totals, scope + "/products", tf.int64, device)
        slices = nodes.const(level[-1], scope + "/slices", tf.int64, device)
        quotients = nodes.binary("FloorDiv", products, slices, scope + "/quotients", tf.int64, device)
        bounds = nodes.cast(quotients, scope + "/bounds", tf.int64, tf.int32, device)
        count = len(level) - 1
        high = nodes.slice_dim(bounds, 1, 2, 1, count, scope + "/high", tf.int32, device)
        low = nodes.slice_dim(bounds, 1, 2, 0, count, scope + "/low", tf.int32, device)
        parts = nodes.binary("Sub", high, low, scope + "/parts", tf.int32, device)
        flat = nodes.const([-1], scope + "/flat", tf.int32, device)
        return nodes.add("Reshape", scope + "/sizes", [parts, flat], device, T=tf.int32, Tshape=tf.int32)

    def _is_computed(self, source: int) -> bool:
        """Whether a Python function (or a table) returned an input."""
        producer = self._context.graph.producer(source)
        return traits(producer.type).role is Role.HOST and bool(producer.inputs)

    def checks(self, source: int, task_graph: int, number: int, scope: str) -> Tuple[str, ...]:
        """Ops that fail at run time if an input of open size does not have the rows of a mini-batch of static size."""
        shape, dim = self._context.graph.tensors[source].shape, self._sources[source]
        if self.batch is None or shape is None or shape[dim] is not None:
            return ()
        rows = self.batch * sum(map(rows_each, self._context.region.batch.layout(source).blocks or (1,)))
        dtype, host = self._context.dtype(source), self._context.host
        return (check_rows(self._nodes, self.name_of(source, number), dim, dtype, rows, scope + "/rows", host),)

    def _together(self, numbers: Sequence[str], counted: Counted, scope: str) -> str:
        """Numbers of examples of several inputs, or vectors of them, added up as often as each input counts."""
        terms = []
        for index, (number, (_, count)) in enumerate(zip(numbers, counted)):
            if count != 1:
                factor = self._nodes.const(count, f"{scope}/count{index}", tf.int32, self._context.host)
                number = self._nodes.binary("Mul", number, factor, f"{scope}/counted{index}", tf.int32, self._context.host)
            terms.append(number)
        return self._nodes.add_n(terms, scope, tf.int32, self._context.host)

    def _weights_at_run_time(self, counted: Counted, task_graph: int, dtype: tf.DType) -> Tuple[str, ...]:
        nodes, device = self._nodes, self._context.host
        others = "".join(f"_{self._context.flat(source)}_{count}" for source, count in counted[1:])
        scope = self._scope(counted[0][0], task_graph, f"weights_{dtype.name}{others}")
        each = [self._shares_here(source, task_graph) for source, _ in counted]
        vectors = [nodes.concat([str(share.vector) for share in shares], 0, f"{scope}/sizes{index or ''}", tf.int32, device)
                   for index, shares in enumerate(each)]
        sizes, shares = self._together(vectors, counted, scope + "/sizes_of_all"), each[0]
        total = self._together([self._totals(source, task_graph)[1] for source, _ in counted], counted, scope + "/total_of_all")
        here = nodes.cast(sizes, scope + "/sizes_float", tf.int32, dtype, device)
        everywhere = nodes.cast(total, scope + "/total_float", tf.int32, dtype, device)
        weights = nodes.binary("RealDiv", here, everywhere, scope + "/weights", dtype, device)
        return self._unpacked(weights, len(shares) * self._per_mini_batch(task_graph), scope + "/each", dtype)


def find_division(context: Context, nodes: Nodes, captured: Captured, sums: Communicator) -> BatchShares:
    """How the mini-batches of a step are divided.

    Raises:
        PlanError: they cannot be divided like this.
    """
    plan, graph, sources = context.plan, context.graph, captured.sources
    pulled = {tensor for tensor in sources if pulls_behind(graph, tensor)}
    own = plan.num_model_replicas * pulls_each(plan) > 1 and plan.nested_batch != "divide" and bool(pulled)
    if own and len(pulled) < len(sources):
        fed = sorted(graph.tensor_name(tensor) for tensor in set(sources) - pulled)
        if plan.nested_batch == MICRO:
            raise PlanError(
                f"micro-batches take their own mini-batches from the input pipeline, but {fed[0]} is fed: set io.batch to "
                "'mini', so that one mini-batch is divided, or take everything from the input pipeline")
        raise PlanError(
            f"model replicas take their own mini-batches from the input pipeline, but {fed[0]} is fed: set io.nested_batch "
            f"to 'divide', so that one mini-batch is divided over the {plan.num_model_replicas} model replicas")
    layouts = {tensor: context.region.batch.layout(tensor) for tensor in sources}
    blocked = next((tensor for tensor, layout in layouts.items() if list(map(rows_each, layout.blocks or ())) != [1]), None)
    if own and blocked is not None:
        raise PlanError(
            f"model replicas take their own mini-batches, but {graph.tensor_name(blocked)} has the examples of a mini-batch in "
            f"several places ({layouts[blocked]}): set io.nested_batch to 'divide', so that one mini-batch is divided")
    batch = agreed_batch(graph, sources, layouts) if len(context.region.batch.batches) == 1 else None
    if batch is not None:
        _check_divisible(plan, batch, own, may_be_uneven=context.tf_graph.building_function)
    division = BatchShares(context, nodes, own, batch, sources, sums)
    if division.mini_batches > 1 and batch == 1:
        raise PlanError(
            "every model replica or process takes a mini-batch of one example, and the graph's shapes contain this size: a "
            "dimension of size one could be the batch, or be broadcast. Use a larger batch size, or an unknown one "
            "(drop_remainder=False)")
    if division.mini_batches > 1:
        division.is_together = _puts_together(context, captured, batch)
    if division.mini_batches > 1 and batch is not None:
        division.rescaled = context.region.mean_divisors
    return division


def _puts_together(context: Context, captured: Captured, batch: Optional[int]) -> bool:
    """Whether sections put the examples of all mini-batches together.  If not, mini-batches are combined only in sums.

    Args:
        captured: its sources are all inputs that are known to have rows of the mini-batch.
        batch: the static size of each of the mini-batches.

    Raises:
        PlanError: an op needs this, but it is impossible.
    """
    graph, region = context.graph, context.region
    sources = region.batch.sources
    elements = elements_of_rows(graph) - sources.keys()
    sparse = [each.ids for each in region.batch.grouped.values() if graph.tensors[each.ids].op not in region.sections] + [
        tensor for op in region.ops for tensor in graph.ops[op].inputs
        if tensor in elements or (graph.tensors[tensor].dtype == "variant" and traits(
            graph.producer(tensor).type).role is Role.PULL)]

    def behind(tensor: int) -> Set[int]:
        return reached([graph.tensors[tensor].op], lambda op: graph.predecessors(graph.ops[op]))

    beside = {graph.tensors[tensor].op for tensor in captured.inputs_beside}
    sparse += [tensor for op in region.sections if traits(graph.ops[op].type).batch in ("grouped", "segment")
               for tensor in graph.ops[op].inputs if graph.tensors[tensor].dtype in ("int32", "int64")
               and not beside.isdisjoint(behind(tensor))]
    if sparse:
        raise PlanError(
            f"{graph.tensor_name(sparse[0])!r} is part of a sparse or ragged tensor, which numbers the rows of one mini-batch, "
            "but model replicas or processes take mini-batches of their own: set io.nested_batch to 'divide', or start one "
            "process that sees all devices")
    firsts = {(graph.tensors[tensor].shape or (-1,))[0] for tensor, dim in sources.items() if dim == 0}
    for tensor in captured.inputs_beside:
        if (graph.tensors[tensor].shape or ())[0] in firsts:
            reader = next(graph.ops[op] for op, _ in graph.consumers(tensor) if op in region.ops)
            raise PlanError(
                f"op {reader.name!r} reads input {graph.tensor_name(tensor)!r} whole, but model replicas or processes take "
                "mini-batches of their own, each with another value of it: declare with wh.batch_axis(tensor, 0) that its rows "
                "are examples, or with wh.batch_axis(tensor, None) that all get the same value")
    needed = [(op, tensor) for op in region.ops for tensor in graph.ops[op].inputs
              if tensor in sources and op in region.sections]
    for (op, position), steps in region.batch.conversions.items():
        tensor = graph.ops[op].inputs[position]
        of_section = graph.tensors[tensor].op in region.sections
        if any((isinstance(step, Reduce) and step.kind == CONCAT) or (isinstance(step, Slice) and of_section) for step in steps):
            needed.append((op, tensor))
    if needed and batch is not None:
        op, tensor = needed[0]
        raise PlanError(
            f"op {graph.ops[op].name!r} needs all examples of {graph.tensor_name(tensor)!r}, but model replicas or processes "
            f"take mini-batches of their own, whose size, {batch}, is static and may be part of the computation: leave the batch "
            "size open (None, drop_remainder=False), set io.nested_batch to 'divide', or start one process that sees all devices")
    return bool(needed)
