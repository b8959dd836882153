"""Rhino's strategy search on captured TensorFlow graphs: its time by layers, O2 beside O3, the optimum's proof, what it finds.

    python -m benchmarks.rhino [--only layers,devices,proof,batches,memory,experts,choice,played,small]

Rhino section 7.5: GPT with hidden size 512, 24 to 72 layers; O2 is 1.5 to 3 times faster than O3 and its plans are 10% worse
(Fig. 10), 378 critical nodes for 72 layers (Table 5).  Graphs are built, not run.  Search times are CPU seconds.
"""
from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from rich.console import Console

from benchmarks.measure import chosen, table
from benchmarks.papers.rhino import coarsen, o2
from whale_tf.cluster import Cluster
from whale_tf.errors import ConfigError, InfeasibleError
from whale_tf.ir.graph import OpGraph
from whale_tf.planner.candidate import Candidate, best, ranked
from whale_tf.planner.rhino.integer_program import integer_program
from whale_tf.planner.rhino.search import Answer, Solver, exact, search

MIB = float(1 << 20)
HIDDEN, HEADS, VOCAB, SEQ = 512, 8, 50257, 1024


def captured(build: Callable[[], Any], trained: bool = True) -> OpGraph:
    """The op graph of a script, of a training script with Adam; ``build`` returns its loss."""
    import tensorflow.compat.v1 as tf

    import whale_tf as wh
    wh.init(cluster="cpu:1")
    try:
        with tf.Graph().as_default():
            loss = build()
            if trained:
                tf.train.AdamOptimizer(1e-4).minimize(loss)
            return wh.op_graph()
    finally:
        wh.shutdown()


def gpt(layers: int, batch: int, trained: bool = True) -> OpGraph:
    """GPT of section 7.5, with queries, keys and values in layers of their own."""
    from models import gpt2
    from models import layers as blocks
    config = gpt2.Gpt2Config(layers=layers, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, seq=SEQ)

    def build() -> Any:
        import tensorflow.compat.v1 as tf
        inputs = gpt2.inputs(config, batch)
        x, embedding = gpt2.embed(inputs.tokens, config)
        bias = blocks.causal_bias(SEQ, x.dtype)
        for i in range(layers):
            with tf.variable_scope(f"layer_{i}"):
                y = blocks.layer_norm(x, "attention_norm")
                x += blocks.multi_head_attention(y, y, HEADS, "attention", bias)
                y = blocks.dense(blocks.layer_norm(x, "ffn_norm"), 4 * HIDDEN, "ffn_in", activation=blocks.gelu_tanh)
                x += blocks.dense(y, HIDDEN, "ffn_out")
        return blocks.mean_cross_entropy(gpt2.lm_head(x, embedding), inputs.labels)

    return captured(build, trained)


def timed(graph: OpGraph, cluster: Cluster, solver: Solver = exact, memory_bytes: Optional[float] = None) -> Dict[str, Any]:
    start = time.process_time()
    answer = search(graph, cluster, solver, memory_bytes=memory_bytes, shapes=[(len(cluster),)])
    return {"answer": answer, "cpu_s": time.process_time() - start}


def layers(console: Console) -> None:
    rows: List[Sequence[str]] = []
    for count in (24, 48, 72):
        graph = gpt(count, 8)
        for cluster in (Cluster.parse("rhino-m8:2"), Cluster.parse("rhino-m8:8"), Cluster.parse("rhino-s1")):
            whole, coarse = (timed(graph, cluster, solver, float("inf")) for solver in (exact, o2))
            problem, solution = whole["answer"].levels[0]
            critical = coarsen(problem)
            rows.append([
                f"{count} x {cluster.name}", str(critical.ops), str(len(problem.costs.nodes)),
                "{:.1f}".format(whole["cpu_s"]), "{:.1f}".format(coarse["cpu_s"]), solution.solver,
                str(solution.is_optimal), "{:.1f}".format(1e3 * whole["answer"].seconds),
                "{:+.1%}".format(coarse["answer"].seconds / whole["answer"].seconds - 1),
                f"{len(critical.critical)} / {critical.segments}"])
    console.print(table("GPT, hidden 512, batch 8 x 1,024 tokens, one mesh dimension", [
        "layers x cluster", "ops", "nodes", "O3 s", "O2 s", "solver", "optimal", "O3 step ms", "O2 worse by",
        "critical / segments"], rows))


def devices(console: Console) -> None:
    rows: List[Sequence[str]] = []
    for count in (8, 32, 128, 512, 1024):
        graph, cluster = gpt(24, count), Cluster.parse(f"rhino-m8:{count}")
        start = time.process_time()
        answer = search(graph, cluster, memory_bytes=float("inf"))
        rows.append([str(count), str(1 + len(answer.runners_up)), f"{time.process_time() - start:.1f}",
                     " x ".join(map(str, answer.mesh)), f"{1e3 * answer.seconds:.0f}"])
    console.print(table("GPT, 24 layers, a sequence of 1,024 tokens for each device, all meshes of one and two dimensions", [
        "devices", "meshes", "search s", "mesh taken", "step ms"], rows))


def proof(console: Console) -> None:
    rows: List[Sequence[str]] = []
    for count in (1, 2):
        graph = gpt(count, 8)
        for name in ("rhino-m8:4", "rhino-s1:4"):
            answer = search(graph, Cluster.parse(name), shapes=[(4,)])
            problem, solution = answer.levels[0]
            start = time.process_time()
            program = integer_program(problem.costs, seconds=300.0)
            rows.append([f"{count} x {name}", str(len(problem.costs.nodes)), str(solution.cost), str(program.cost),
                         str(program.is_optimal), f"{time.process_time() - start:.1f}"])
    console.print(table("Elimination and integer program (SCIP) on the whole graph, picoseconds", [
        "layers x cluster", "nodes", "elimination", "program", "proven", "program s"], rows))


def batches(console: Console) -> None:
    rows: List[Sequence[str]] = []
    for batch in (1, 4, 16, 64, 256):
        graph = gpt(2, batch)
        answer = search(graph, Cluster.parse("rhino-s1:4"), shapes=[(4,)], memory_bytes=float("inf"))
        rows.append([str(batch)] + [answer.patterns(f"layer_1/{op}/MatMul")[0] for op in (
            "attention/query", "attention/output", "ffn_in", "ffn_out")] + [f"{1e3 * answer.seconds:.2f}"])
    console.print(table("GPT, 2 layers, on 4 single-GPU nodes: how products are divided (rows: data parallelism)", [
        "batch", "query", "output", "ffn_in", "ffn_out", "step ms"], rows))


def memory(console: Console) -> None:
    """What variables in shards save in training, and the largest parameters forced into shards where only memory asks for it."""
    cluster, rows = Cluster.parse("rhino-m8:8"), []  # type: Cluster, List[Sequence[str]]
    graph = gpt(12, 8)
    whole = search(graph, cluster, shapes=[(8,)], divisible=frozenset())
    free = search(graph, cluster, shapes=[(8,)])
    rows = [_memory_row("training, variables whole", whole), _memory_row("training, no limit", free)]
    for share in (0.99, 0.97):
        rows.append(_limited(f"training, {share:.0%} of it", graph, cluster, share * free.peak_bytes))
    graph = gpt(12, 8, trained=False)
    free = search(graph, cluster, shapes=[(8,)])
    rows.append(_memory_row("inference, no limit", free))
    for share in (0.9, 0.75, 0.6):
        rows.append(_limited(f"inference, {share:.0%} of it", graph, cluster, share * free.peak_bytes))
    console.print(table("GPT, 12 layers, batch 8 x 1,024 tokens on 8 V100 (MiB of one device)", [
        "limit", "peak", "variables", "in shards", "forced", "ps a byte", "step ms", "bound ms"], rows))


def _limited(name: str, graph: OpGraph, cluster: Cluster, limit: float) -> Sequence[str]:
    try:
        return _memory_row(name, search(graph, cluster, shapes=[(len(cluster),)], memory_bytes=limit))
    except InfeasibleError as error:
        return [name, "none: {:.0f}".format(float(str(error).split("at least ")[1].split(" ")[0]) / MIB)] + ["-"] * 6


def _memory_row(name: str, answer: Answer) -> Sequence[str]:
    problem, choice = answer.levels[0].problem, answer.levels[0].solution.choice
    parts = sum(problem.storage(v, choice).is_shard for v in problem.scope.variables)
    return [name, f"{answer.peak_bytes / MIB:.0f}", f"{answer.stored_bytes / MIB:.0f}",
            f"{parts} of {len(problem.scope.variables)}", str(answer.forced), f"{answer.byte_price:.3g}",
            f"{1e3 * answer.seconds:.2f}", f"{1e3 * (answer.lower_bound_s or 0.0):.2f}"]


def experts(console: Console) -> None:
    from models import moe
    config = moe.MoeConfig.gshard_10b()
    graph = captured(lambda: moe.build(moe.inputs(config, 8), config).loss)
    result = timed(graph, Cluster.parse("rhino-m8:8"))
    answer: Answer = result["answer"]
    critical = coarsen(answer.levels[0].problem)
    found = collections.Counter(
        f"{op.type} {answer.patterns(op.name)[0]}" for op in graph.ops
        if op.phase.value == "forward" and op.type in ("MatMul", "Einsum", "BatchMatMulV2"))
    console.print("MoE-32E-10B on 8 V100: {} ops, {} critical, O3 {:.1f} s, {:.1f} GiB of variables on a device, {} forced, step "
                  "{:.0f} ms".format(critical.ops, len(critical.critical), result["cpu_s"], answer.stored_bytes / 2 ** 30,
                                     answer.forced, 1e3 * answer.seconds))
    console.print("forward: " + ", ".join(f"{count} {name}" for name, count in found.most_common()))


SCRIPT = """
import tensorflow.compat.v1 as tf
from models import gpt2
tf.disable_eager_execution()
config = gpt2.Gpt2Config(layers={layers}, hidden={hidden}, heads=8, vocab=8192, seq=256)
tf.train.AdamOptimizer(1e-4).minimize(gpt2.build(gpt2.inputs(config, {batch}), config).loss)
tf.get_default_graph().finalize()
"""


CHOICES = ((512, 64, "rhino-m8:8"), (2048, 8, "rhino-m8:8"), (2048, 8, "rhino-s1"), (512, 64, "dapple-c:4"),
           (2048, 16, "dapple-c:4"))  # hidden size, batch, cluster


def choice(console: Console) -> None:
    """What ``whale plan --search auto`` takes for a script, and the best of the others."""
    rows: List[Sequence[str]] = []
    for hidden, batch, cluster in CHOICES:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "gpt.py")
            with open(path, "w", encoding="utf8") as handle:
                handle.write(SCRIPT.format(layers=4, hidden=hidden, batch=batch))
            command = [sys.executable, "-m", "whale_tf.cli", "plan", "--model", path, "--cluster", cluster, "--global-batch",
                       str(batch), "--search", "auto", "--json"]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=dict(os.environ, PYTHONPATH=os.getcwd()))
        found = json.loads(done.stdout.decode().splitlines()[-1])
        rhino = next((text for text in found["runners_up"] if text.startswith("rhino: mesh")), "")
        rows.append([f"{hidden} x {batch} on {cluster}", f"{found['search']}: {found['description']}",
                     "{:.2f}".format(1e3 * found["latency_s"]), rhino, "{:.1f}".format(found["search_seconds"])])
    console.print(table("GPT, 4 layers of 256 tokens: hidden x batch on cluster", [
        "case", "taken", "ms", "best of Rhino that was not", "search s"], rows))


class Case(NamedTuple):
    """A model, its batch, and a cluster to divide it over."""

    name: str
    build: Callable[[int], Any]
    batch: int
    cluster: str


def played_cases() -> List[Case]:
    """A dozen: of the zoo's sizes and smaller ones, on equal and unequal CPUs and GPUs."""
    from models import bert, dlrm, gpt2, mlp, moe, resnet

    def of(module: Any, config: Any) -> Callable[[int], Any]:
        return lambda batch: module.build(module.inputs(config, batch), config).loss

    encoder = bert.BertConfig(layers=2, hidden=768, heads=12, ffn=3072, seq=128, vocab=8192, predictions=20)
    experts_of = moe.MoeConfig(layers=2, hidden=512, heads=8, ffn=2048, experts=8, vocab=8192, seq=128)
    decoder = gpt2.Gpt2Config(layers=2, hidden=512, heads=8, vocab=8192, seq=128)
    return [
        Case("MLP, tiny", of(mlp, mlp.MlpConfig.tiny()), 64, "cpu:2"),
        Case("MLP, wide", of(mlp, mlp.MlpConfig.wide()), 4096, "cpu:4"),
        Case("MLP, wide", of(mlp, mlp.MlpConfig.wide()), 512, "V100-32GB:2,P100-16GB:2"),
        Case("encoder, tiny", of(bert, bert.BertConfig.tiny()), 32, "cpu:2"),
        Case("encoder, small", of(bert, bert.BertConfig.small()), 32, "cpu:4"),
        Case("encoder, base", of(bert, encoder), 32, "V100-32GB:4"),
        Case("MoE, tiny", of(moe, moe.MoeConfig.tiny()), 32, "cpu:4"),
        Case("MoE, 8 experts", of(moe, experts_of), 16, "rhino-m8:4"),
        Case("ResNet, digits", of(resnet, resnet.ResnetConfig.digits()), 64, "cpu:2"),
        Case("ResNet-18", of(resnet, resnet.ResnetConfig.resnet18()), 64, "rhino-s1:4"),
        Case("embedding, tiny", of(dlrm, dlrm.DlrmConfig.tiny()), 128, "cpu:4"),
        Case("decoder", of(gpt2, decoder), 16, "dapple-c:4"),
    ]


class Compared(NamedTuple):
    """What is compared under ``auto_parallel: rhino``.

    Attributes:
        plans: all, in simulation: ``chosen``, ``undivided``, ``data-parallel``, and the best ``division``, if there is one.
        objective_s: what the search for that division minimised.
    """

    plans: Dict[str, Candidate]
    objective_s: float


def compared(case: Case) -> Compared:
    import tensorflow.compat.v1 as tf

    import whale_tf as wh
    from whale_tf.decide.search import compared as searched
    wh.init(cluster="cpu:1")
    try:
        with tf.Graph().as_default() as graph:
            tf.train.AdamOptimizer(1e-4).minimize(case.build(case.batch))
        cluster = Cluster.parse(case.cluster)
        search = searched(graph, cluster, wh.Config({"auto_parallel": "rhino"}))
        found = search.candidates
        plans = {one.search: one for one in found if one.search in ("undivided", "data-parallel") and not one.why_not}
        plans["chosen"] = best(found, cluster)
        divided = [one for one in search.divided if one.found.assignment is not None]
        if not divided:
            return Compared(plans, float("nan"))
        division = ranked([one.found for one in divided])[0]
        return Compared(dict(plans, division=division),
                        next(one.objective_s for one in divided if one.found is division))
    finally:
        wh.shutdown()


def played(console: Console) -> None:
    """The search's objective beside the played time, and the chosen plan beside the undivided graph and data parallelism."""
    def ms(one: Optional[Candidate]) -> str:
        return "-" if one is None else f"{1e3 * one.latency_s:.2f}"

    rows: List[Sequence[str]] = []
    for case in played_cases():
        found, objective_s = compared(case)
        division, chosen = found.get("division"), found["chosen"]
        objective = "-" if division is None else f"{1e3 * objective_s:.2f}"
        rows.append([f"{case.name}, {case.batch} on {case.cluster}", objective, ms(division), ms(found.get("undivided")),
                     ms(found.get("data-parallel")), ms(chosen), f"{chosen.search}: {chosen.description}"])
    console.print(table("Rhino's objective and simulated times, ms a step", [
        "model, batch and cluster", "objective", "played", "undivided", "data parallel", "chosen", "which is"], rows))


PATTERNS = ("rows", "column", "row", "once")  # of a product


class Small(NamedTuple):
    """Dense layers on two nodes, small enough to play every combination of patterns."""

    widths: Tuple[int, ...]
    batch: int
    cluster: Cluster

    @classmethod
    def drawn(cls, random: np.random.RandomState) -> Small:
        widths = tuple(int(random.choice([64, 256, 1024, 4096])) for _ in range(3))
        batch, size, speed = int(random.choice([8, 64, 512])), int(random.randint(1, 3)), int(random.choice([10, 25, 100]))
        nodes = [{"devices": f"{random.choice(['V100-16GB', 'T4', 'P100-16GB'])}:{size}", "links": "default",
                  "nic": {"bandwidth_gbits_per_s": speed}} for _ in range(2)]
        return cls(widths, batch, Cluster.parse({"name": "c", "nodes": nodes}))

    def graph(self) -> Any:
        import tensorflow.compat.v1 as tf

        with tf.Graph().as_default() as graph:
            value = tf.placeholder(tf.float32, [self.batch, self.widths[0]])
            for number, shape in enumerate(zip(self.widths, self.widths[1:])):
                value = tf.nn.relu(tf.matmul(value, tf.get_variable(f"w{number}", shape), name=f"product_{number}"))
            tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.square(value)))
        return graph

    def candidates(self) -> Tuple[Candidate, List[Candidate]]:
        """What the search takes, and everything there is: its own candidates, and those with every combination of patterns."""
        import whale_tf as wh
        from whale_tf.decide.search import compared as searched

        wh.init(cluster="cpu:1")
        try:
            graph = self.graph()
            mine = searched(graph, self.cluster, wh.Config({"auto_parallel": "rhino"})).candidates
            every = list(mine)
            for patterns in itertools.product(PATTERNS, repeat=len(self.widths) - 1):
                force = {f"product_{number}": pattern for number, pattern in enumerate(patterns)}
                config = wh.Config({"auto_parallel": "rhino", "patterns.force": force})
                try:
                    every += searched(graph, self.cluster, config).candidates
                except ConfigError:  # this many devices do not divide the product so
                    continue
            return best(mine, self.cluster), [one for one in every if one.fits and not one.why_not]
        finally:
            wh.shutdown()


def small(console: Console) -> None:
    """Two times 20 random small clusters: the plan taken against the fastest of all that were played."""
    randoms, rows = [np.random.RandomState(seed) for seed in (0, 7)], []
    for case in [Small.drawn(random) for random in randoms for _ in range(20)]:
        taken, every = case.candidates()
        least = min(every, key=lambda one: one.latency_s)
        types = ", ".join(device.type for device in case.cluster.devices)
        what = f"{' x '.join(map(str, case.widths))}, {case.batch} on {types}"
        rows.append([what, str(len(every)), f"{1e3 * taken.latency_s:.3f}", f"{taken.search}: {taken.description}"[:60],
                     f"{1e3 * least.latency_s:.3f}", f"{taken.latency_s / least.latency_s:.3f}"])
    console.print(table("Rhino on small clusters, simulated ms a step", [
        "widths, batch and devices", "played", "taken", "which is", "fastest", "ratio"], rows))


SECTIONS: Dict[str, Callable[[Console], None]] = {
    "layers": layers, "devices": devices, "proof": proof, "batches": batches, "memory": memory,
    "experts": experts, "choice": choice, "played": played, "small": small}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    console = Console(width=150)
    for name in chosen(parser, SECTIONS):
        SECTIONS[name](console)


if __name__ == "__main__":
    main()
