"""How the mini-batch gets to the clones: iterators are read once per model replica, or once for each of its micro-batches, and
tensors are divided into parts.

::

    placeholder x ──> Split ──┬─> x of clone 0        iterator ──┬─> GetNext (model replica 0) ──> Split ──> ...
                              ├─> x of clone 1                   └─> GetNext (model replica 1) ──> Split ──> ...
                              └─> ...
"""

from __future__ import annotations

from typing import Dict, List, Optional, Tuple, Union

from whale_tf._tf_compat import tf
from whale_tf.emit.checks import check_equal, check_examples
from whale_tf.emit.context import Clone, Context
from whale_tf.emit.shares import BatchShares, Number, Shares
from whale_tf.graph_editor.attrs import NodeDef
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.graph import Op, Phase
from whale_tf.ir.layout import Block, batch_of, rows_each
from whale_tf.ir.traits import PULLS
from whale_tf.ir.walk import reached


class Inputs:
    """Attributes:
    sources: batch input tensors and their batch dimension.
    division: how each mini-batch is divided.
    """

    def __init__(self, context: Context, nodes: Nodes, division: BatchShares, sources: Dict[int, int]) -> None:
        self.sources, self._context, self._nodes, self.division = sources, context, nodes, division
        self._parts: Dict[Tuple[int, int, int], List[str]] = {}
        self._concatenated: Dict[Tuple[int, str], str] = {}
        is_one_of_several = len(context.processes.steps) > 1
        self._takes_rows = is_one_of_several and context.plan.nested_batch == "divide"  # of the mini-batch of all steps
        takes_own = division.own or is_one_of_several and not self._takes_rows
        self._pulled = self._pull_again() if takes_own else {}
        self._taken: Dict[int, str] = {}
        division.name_of = self.whole

    def whole(self, tensor: int, number: int) -> str:
        """An undivided tensor of the input side (or of anything outside the region) in a mini-batch of this step."""
        if self._takes_rows and tensor in self.sources:
            return self._rows_of_step(tensor)
        return self._pulled_as(tensor, self._context.mini_batches[number])

    def _pulled_as(self, tensor: int, number: int) -> str:
        """A tensor in a mini-batch of any step."""
        name = self._context.graph.tensor_name(tensor)
        if number and self._context.graph.tensors[tensor].op in self._pulled:
            return "{}/{}".format(self._context.name("input", f"g{number}"), name)
        return name

    def _rows_of_step(self, source: int) -> str:
        """This step's rows of an input: ``floor(B i / n)`` to ``floor(B (i + 1) / n)`` for step ``i`` of ``n``."""
        if source not in self._taken:
            nodes, context, host = self._nodes, self._context, self._context.host
            name, dtype, dim = context.graph.tensor_name(source), context.dtype(source), self.sources[source]
            scope, rank = context.name("rows", context.flat(source)), len(context.static_shape(source))
            count = nodes.const([context.processes.graphs], scope + "/steps", tf.int32, host)
            shape = nodes.shape(name, scope + "/shape", dtype, host)
            size = nodes.slice_dim(shape, 0, 1, dim, 1, scope + "/size", tf.int32, host)

            def bound(step: int, what: str) -> str:
                factor = nodes.const([step], f"{scope}/{what}/step", tf.int32, host)
                product = nodes.binary("Mul", size, factor, f"{scope}/{what}/product", tf.int32, host)
                return nodes.scalar(nodes.binary("FloorDiv", product, count, f"{scope}/{what}/bound", tf.int32, host),
                                    f"{scope}/{what}", tf.int32, host)

            begin, end = bound(context.processes.step, "begin"), bound(context.processes.step + 1, "end")
            length = nodes.binary("Sub", end, begin, scope + "/length", tf.int32, host)
            value = nodes.identity(name, scope + "/value", dtype, host, [self._enough(source, size, scope + "/enough")])
            self._taken[source] = nodes.slice_dim(value, dim, rank, begin, length, scope, dtype, host)
        return self._taken[source]

    def _enough(self, source: int, size: str, scope: str) -> str:
        """An op that fails in all processes if some part of some step would get no example; ``size``: of the mini-batch."""
        nodes, context, plan = self._nodes, self._context, self._context.plan
        parts = max(plan.num_model_replicas * plan.num_micro_batch * task.replica_count for task in plan.task_graphs)
        count = context.processes.graphs * parts
        divisor = nodes.const([count], scope + "/parts", tf.int32, context.host)
        sizes = nodes.binary("FloorDiv", size, divisor, scope + "/sizes", tf.int32, context.host)
        total = nodes.scalar(size, scope + "/total", tf.int32, context.host)
        return check_examples(nodes, sizes, total, count, context.graph.tensor_name(source), 1, False, scope, context.host)

    def part(self, source: int, task_graph: int, clone: Clone) -> str:
        """A clone's part of a batch input."""
        number = self.division.mini_batch(clone)
        key = (source, task_graph, number)
        if key not in self._parts:
            layout, whole = self._context.region.batch.layout(source), self.whole(source, number)
            blocks = layout.blocks or (1,)
            share = self._shares_of(source, blocks[0], task_graph, number) or self.division.shares(source, task_graph, number)
            scope = self._context.name("input", f"g{key[2]}", f"t{task_graph}_{self._context.flat(source)}")
            if len(share.sizes) > 1:
                share = share._replace(check=share.check + self.division.checks(source, task_graph, number, scope))
            self._parts[key] = [whole] if len(share.sizes) == 1 else self._divided(
                whole, source, share, task_graph, number, scope)
        return self._parts[key][self.division.position(task_graph, clone)]

    def _divided(self, whole: str, source: int, share: Shares, task_graph: int, number: int, scope: str) -> List[str]:
        """All clones' parts of a batch input.  Each block of its examples (such as each half of the labels of two batches) is
        divided separately::

            [a0 a1 a2 a3 | b0 b1 b2 b3]  ->  [a0 a1 | b0 b1], [a2 a3 | b2 b3]
        """
        nodes, dim, blocks = self._nodes, self.sources[source], self._context.region.batch.layout(source).blocks or (1,)
        dtype, device, count = self._context.dtype(source), self._context.host, len(share.sizes)

        def sizes(of: Shares, rows: int, name: str) -> Union[str, List[int]]:
            """Rows of each clone in a block with so many rows for each example."""
            if of.vector is None:
                return [int(size) * rows for size in of.sizes]
            each = nodes.const(rows, name + "/rows", tf.int32, device)
            return of.vector if rows == 1 else nodes.binary("Mul", of.vector, each, name + "/sizes", tf.int32, device)

        share = share._replace(check=share.check + self._compared(source, share, task_graph, number, scope))
        if len(blocks) == 1:
            return nodes.split(whole, sizes(share, rows_each(blocks[0]), scope), count, dim, scope, dtype, device, share.check)
        of_each = [self._shares_of(source, block, task_graph, number) or share for block in blocks]
        lengths: Union[str, List[int]] = list(map(rows_each, blocks))  # only their ratios matter if they are equal
        if len({(rows_each(block), batch_of(block)) for block in blocks}) > 1:
            totals = [self._times(of.total, rows_each(block), f"{scope}/length{number}")
                      for number, (of, block) in enumerate(zip(of_each, blocks))]
            lengths = [total for total in totals if isinstance(total, int)]
            if len(lengths) < len(totals):
                lengths = nodes.add("Pack", scope + "/lengths", list(map(str, totals)), device, T=tf.int32, N=len(totals), axis=0)
        parts, of_blocks = [], nodes.split(whole, lengths, len(blocks), dim, scope + "/blocks", dtype, device, share.check)
        for number, (part, block, of) in enumerate(zip(of_blocks, blocks, of_each)):
            name = f"{scope}/block{number}"
            parts.append(nodes.split(part, sizes(of, rows_each(block), name), count, dim, name, dtype, device, share.check))
        return [nodes.concat(of_one, dim, f"{scope}/{position}", dtype, device) for position, of_one in enumerate(zip(*parts))]

    def _compared(self, source: int, share: Shares, task_graph: int, number: int, scope: str) -> Tuple[str, ...]:
        """Ops that fail at run time if an input does not have the rows of all its blocks."""
        nodes, context, host = self._nodes, self._context, self._context.host
        blocks = context.region.batch.layout(source).blocks or (1,)
        if share.vector is None or blocks == (1,) or sum(map(rows_each, blocks)) == 1 or -1 in map(rows_each, blocks):
            return ()
        of_each = [self._shares_of(source, block, task_graph, number) for block in blocks]
        terms = [str(self._times((of or share).total, rows_each(block), f"{scope}/expected{number}"))
                 for number, (of, block) in enumerate(zip(of_each, blocks))]
        expected = nodes.add_n(terms, scope + "/expected", tf.int32, host)
        found = nodes.scalar(self.division.rows(source, number), scope + "/found", tf.int32, host)
        own = context.graph.tensor_name(source)
        batches = context.region.batch.batches
        others = dict.fromkeys(repr(context.graph.tensor_name(batches[batch_of(block)][0]))
                               for of, block in zip(of_each, blocks) if of is not None)
        if others:
            text = (f"{own!r} has {{0}} rows, but {' and '.join(others)}, whose examples it has one after the other, have {{1}} "
                    "rows together; give it as many rows")
        else:
            each = sum(map(rows_each, blocks))
            text = (f"{own!r} has {{0}} rows, but each example has {each} rows, so {{1}} or {each} more are expected; give it a "
                    f"multiple of {each}, or say with wh.batch_axis(tensor, 0) that each of its rows is an example")
        return (check_equal(nodes, found, expected, text, scope + "/guard", host),)

    def _shares_of(self, source: int, block: Block, task_graph: int, number: int) -> Optional[Shares]:
        """The shares in a block of an input that has the examples of several batches; None: it has those of one."""
        batch = self._context.region.batch
        if len(set(map(batch_of, batch.layout(source).blocks or ()))) < 2:
            return None
        return self.division.shares(batch.source_of([source], batch_of(block)), task_graph, number)

    def _times(self, total: Number, rows: int, scope: str) -> Number:
        if isinstance(total, int) or rows == 1:
            return total if rows == 1 else int(total) * rows
        each = self._nodes.const(rows, scope + "/rows", tf.int32, self._context.host)
        return self._nodes.binary("Mul", total, each, scope, tf.int32, self._context.host)

    def has_own(self, tensor: int) -> bool:
        """Whether model replicas, or their micro-batches, have mini-batches of their own of a batch input."""
        is_pulled = self._context.graph.tensors[tensor].op in self._pulled
        return is_pulled and tensor in self.sources and self.division.mini_batches_here > 1

    def leaving(self) -> Dict[int, List[Tuple[int, int]]]:
        """Batch inputs of which each model replica, or each step, has its own, and their uses outside the region."""
        graph, region = self._context.graph, self._context.region
        uses = {source: [(op, position) for op, position in graph.consumers(source)
                         if not region.contains(graph.ops[op]) and graph.ops[op].phase is not Phase.INPUT]
                for source in self.sources if self._takes_rows or graph.producer(source).id in self._pulled}
        return {source: found for source, found in uses.items() if found}

    def concatenated(self, source: int) -> str:
        """The mini-batches of this step's model replicas in one tensor."""
        names = [self.whole(source, g) for g in range(self.division.mini_batches_here)]
        return self._joined(source, names, "all")

    def of_all_steps(self, tensor: int) -> str:
        """A tensor of the input side with the rows that all steps side by side take."""
        if self._context.graph.tensors[tensor].op not in self._pulled:
            return self._context.graph.tensor_name(tensor)
        names = [self._pulled_as(tensor, number) for number in range(self._context.all_mini_batches)]
        return self._joined(tensor, names, "of_all_steps")

    def _joined(self, tensor: int, names: List[str], what: str) -> str:
        key = (tensor, what)
        if key not in self._concatenated:
            context = self._context
            self._concatenated[key] = self._nodes.concat(
                names, self.sources.get(tensor, 0), context.name("input", what, context.flat(tensor)), context.dtype(tensor),
                context.host)
        return self._concatenated[key]

    def last_pulls(self) -> List[str]:
        """Ops that take the last of the mini-batches that all steps side by side take.  A step takes those of the other steps,
        too, so that each step's are the same in all processes."""
        last = self._context.all_mini_batches - 1
        if not self._pulled or last in self._context.mini_batches:
            return []
        scope = self._context.name("input", f"g{last}")
        return [f"{scope}/{op.name}" for op in self._pulled.values() if op.type in PULLS]

    def compared(self) -> List[str]:
        """Names of the tensors with examples that all processes read alike."""
        graph = self._context.graph
        if self._pulled:  # each step goes on with its own
            pulls = [op for op in self._pulled.values() if op.type in PULLS]
            return [graph.tensor_name(tensor) for op in pulls for tensor in op.outputs]
        return [graph.tensor_name(tensor) for tensor in self.sources]

    def _pull_again(self) -> Dict[int, Op]:
        """Clones every op that takes elements from an input pipeline for the step (and not, say, for an evaluation), and the ops
        after it on the input side, once for each further model replica, or micro-batch, of all steps side by side; the iterators
        and queues are shared."""
        graph = self._context.graph
        read = reached([*self._context.region.ops, *(graph.tensors[source].op for source in self.sources)], lambda index: (
            graph.tensors[tensor].op for tensor in graph.ops[index].inputs))
        pulled: Dict[int, Op] = {}
        for op in graph.ops:
            follows = any(graph.tensors[t].op in pulled for t in op.inputs)
            if (op.type in PULLS and op.id in read) or (op.phase is Phase.INPUT and follows):
                pulled[op.id] = op
        ops = [self._context.tf_ops[i] for i in pulled]
        for g in range(1, self._context.all_mini_batches):
            before = "" if g == 1 else self._context.name("input", f"g{g - 1}") + "/"
            # in order, so that mini-batch g is always the same one of a step
            waits = {op.name: [before + op.name] for op in pulled.values() if op.type in PULLS}
            self._context.edit.clone(ops, self._context.name("input", f"g{g}"), device=self._context.host,
                                     edit=_drop_colocation, control_inputs=waits)
        return pulled


def _drop_colocation(node: NodeDef, _: tf.Operation) -> None:
    if "_class" in node.attr:  # IteratorGetNext is colocated with an iterator that is not cloned
        del node.attr["_class"]
