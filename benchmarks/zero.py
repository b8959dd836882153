"""What ZeRO and offload divide: bytes of each device, from RunMetadata, beside what was predicted.

    python -m benchmarks.zero

Encoders under Adam on 4 logical CPU devices, two micro-batches: one of 12 equal layers, and one of two layers whose table of
words has 60% of all parameters, which ZeRO divides into parts. Parameters and states are the variables on each device. Tensors
are from traced steps: one is there from the end of the op that made it to the end of its last reader. Logical CPU devices hand
tensors over without a copy, so that one counts where it was made; "gathered" are the parameters of other devices' variables that
devices with memories of their own would have received and not freed yet. "Gradients" are sums over micro-batches and replicas.
TensorFlow runs ready ops in another order in each step, so figures are the highest of several steps.
"""
from __future__ import annotations

import collections
import re
from typing import Any, Counter, Dict, List, Mapping, NamedTuple, Tuple

import numpy as np
from rich.console import Console

from benchmarks.measure import Result, Spec, ask, main, table
from benchmarks.memory import random_feed
from whale_tf.ir.traits import Buffer, traits

LEVELS: Dict[str, Dict[str, Any]] = {
    "mirrored": {"variables": "mirrored"}, "v1": {"zero": "v1"}, "v2": {"zero": "v2"}, "v3": {"zero": "v3"},
    "offload states": {"offload": "states"}, "offload v0": {"offload": "v0"}}
MODELS: Dict[str, Dict[str, int]] = {  # of ``models.bert.BertConfig``
    "12 equal layers": {"layers": 12},
    "one variable of 60%": {"layers": 2, "vocab": 2400}}
STEPS = 20  # that are traced
DEVICES, BATCH, KINDS = 4, 16, ("parameters", "states", "gradients", "gathered")
HANDED_ON, INT64 = ("Const", "VarHandleOp", "ReadVariableOp", "Placeholder", "_Arg", "_Send", "_HostSend"), 9


def worker(spec: Spec) -> Result:
    import tensorflow.compat.v1 as tf

    import whale_tf as wh
    from models import bert

    tf.disable_eager_execution()
    wh.init(dict(spec["config"], num_micro_batch=2, emit="inline"), cluster=f"cpu:{DEVICES}")
    config = bert.BertConfig(hidden=64, heads=4, ffn=256, seq=16, predictions=4, **MODELS[spec["model"]])
    inputs = bert.inputs(config, BATCH)
    with tf.variable_scope("", use_resource=True), wh.replicate(DEVICES):
        loss = bert.build(inputs, config).loss
    update = tf.train.AdamOptimizer(0.01).minimize(loss)
    feed, traces = random_feed(inputs), []
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for _ in range(2):
            session.run(update, feed)
        options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE, output_partition_graphs=True)
        for _ in range(STEPS):
            traces.append(tf.RunMetadata())
            session.run(update, feed, options, traces[-1])
    trained = {v.op.name: v.shape.num_elements() * 4 for v in tf.trainable_variables()}
    held: Counter[Tuple[str, str]] = collections.Counter()
    handles = [op for op in tf.get_default_graph().get_operations() if op.type == "VarHandleOp"]
    in_parts = {op.name.split("/", 2)[2] for op in handles if op.name.startswith("shards/")}
    for op in handles:
        is_part = op.name.startswith("shards/")
        name = op.name.split("/", 2)[2] if is_part else op.name.partition("whale/g")[2].partition("/")[2] or op.name
        owner = name if name in trained else name.rpartition("/")[0]
        if owner in trained and (is_part or op.name not in in_parts):
            size = 4 * tf.TensorShape(op.get_attr("shape")).num_elements()
            held["parameters" if name in trained else "states", op.device[-1:]] += size
    steps = [Traced(metadata, trained) for metadata in traces]
    plan = wh.current_plan()
    assert plan is not None
    rows = [{kind: held[kind, str(device)] for kind in KINDS[:2]} for device in range(DEVICES)]
    for device, row in enumerate(rows):
        row.update({kind: max(step.most(device, kind) for step in steps) for kind in KINDS[2:]},
                   peak=max(step.most(device) for step in steps) + sum(row.values()))
    return {"rows": rows, "predicted": list(plan.estimate.peak_memory_bytes), "whole": sum(trained.values())}


class Life(NamedTuple):
    """``size`` bytes of one kind on a device, from and to microseconds."""

    device: int
    kind: str
    begin: int
    end: int
    size: int


class Traced:
    """The tensors of a traced step.

    Args:
        trained: names and bytes of the trained variables.
    """

    def __init__(self, metadata: Any, trained: Mapping[str, int]) -> None:
        self.stats = {(device.device, node.node_name): node
                      for device in metadata.step_stats.dev_stats for node in device.node_stats}
        self.nodes = {(node.device, node.name): node for graph in metadata.partition_graphs for node in graph.node}
        self.last: Dict[Tuple[str, str], int] = collections.defaultdict(int)  # reader's end, of each op's results
        self.sources: Dict[Tuple[bytes, bytes], Tuple[str, str]] = {}  # of what is sent, by its name and the device it is sent to
        arrived: Dict[Tuple[bytes, bytes], Tuple[str, str]] = {}
        for key, node in self.nodes.items():
            if node.op in ("_Recv", "_HostRecv"):
                arrived[node.attr["tensor_name"].s, node.attr["recv_device"].s] = key
            elif node.op in ("_Send", "_HostSend"):
                source = node.device, node.input[0].partition(":")[0]
                self.sources[node.attr["tensor_name"].s, node.attr["recv_device"].s] = source
        for _ in range(3):  # what is read elsewhere, and handed on from there
            for key, node in self.nodes.items():
                end = self._end(key)
                if node.op in ("_Send", "_HostSend"):
                    end = max(end, self.last[arrived.get((node.attr["tensor_name"].s, node.attr["recv_device"].s), key)])
                elif traits(node.op).buffer is Buffer.SAME:
                    end = max(end, self.last[key])
                for edge in node.input:
                    if not edge.startswith("^"):
                        source = node.device, edge.partition(":")[0]
                        self.last[source] = max(self.last[source], end)
        self.lives = [life for key, node in self.nodes.items() for life in self._lives(key, node)]

    def _end(self, key: Tuple[str, str]) -> int:
        node = self.stats.get(key)
        return 0 if node is None else node.all_start_micros + node.all_end_rel_micros

    def _lives(self, key: Tuple[str, str], node: Any) -> List[Life]:
        """The time of an op's results in memory; of what is sent there is no record but of the op that made it."""
        kind, made = "others", key
        if node.op in ("_Recv", "_HostRecv"):
            kind, made = "gathered", self.sources.get((node.attr["tensor_name"].s, node.attr["recv_device"].s), key)
            if not re.search(r"/ReadVariableOp(_\d+)?$|/reads/", made[1]):
                return []
        elif node.op in HANDED_ON or traits(node.op).buffer is Buffer.SAME:
            return []
        if made not in self.stats or not node.device[-1:].isdigit():
            return []
        if re.match(r"whale/(sync|merged|g\d+_r\d+/accumulate)/(shards/dim\d+/)?gradients", key[1]):
            kind = "gradients"
        described = [output.tensor_description for output in self.stats[made].output]
        size = sum(int(np.prod([dim.size for dim in one.shape.dim])) * (8 if one.dtype == INT64 else 4) for one in described)
        return [Life(int(node.device[-1]), kind, self._end(made), max(self._end(made), self.last[key]), size)]

    def most(self, device: int, kind: str = "") -> int:
        """The most bytes at a time, of one kind, or of all that the device has made."""
        events: List[Tuple[int, int]] = []
        for life in self.lives:
            if life.device == device and (life.kind == kind if kind else life.kind != "gathered"):
                events += [(life.begin, life.size), (life.end, -life.size)]
        return int(max(np.cumsum([change for _, change in sorted(events)]), default=0))


def report(console: Console) -> None:
    for model in MODELS:
        _report(console, model)


def _report(console: Console, model: str) -> None:
    found = {name: ask(__file__, {"config": config, "model": model}) for name, config in LEVELS.items()}
    rows = []
    for name, result in found.items():
        row = [name]
        for kind in KINDS:
            most = max(one[kind] for one in result["rows"])
            row.append(f"{most / 1e6:.2f} ({most / result['whole'] / (1 + (kind == 'states')):.3f})")
        peaks = [(predicted, one["peak"]) for predicted, one in zip(result["predicted"], result["rows"])]
        if peaks:
            worst = max((predicted / measured for predicted, measured in peaks), key=lambda ratio: abs(ratio - 1))
        row += [f"{max(one['peak'] for one in result['rows']) / 1e6:.2f}"]
        row += [f"{max(result['predicted']) / 1e6:.2f}", f"{100 * (worst - 1):+.1f}%"] if peaks else ["", ""]
        rows.append(row)
    title = f"{model}: bytes of the fullest device, MB (of all that there are)"
    console.print(table(title, ["", *KINDS, "peak", "predicted", "worst device"], rows))


if __name__ == "__main__":
    main(__file__, worker, report)
