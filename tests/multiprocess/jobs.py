"""What the processes of the equality job train, and how the local script sees the same data."""
from __future__ import annotations

import functools
import pickle
import sys
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests import graph_optimizer
from tests.numeric import equality
from tests.numeric.cases import (
    CLASSES,
    FEATURES,
    RAGGED,
    VOCAB,
    Case,
    Inputs,
    control_flow,
    find_case,
    layer,
    minimised,
    perceptron,
    register,
    sentences,
    vectors,
    weight,
)
from tests.numeric.equality import Outcome
from tests.numeric.script import Script, Setting, Stages, source
from tests.numeric.unequal import described
from whale_tf.cluster import find_processes


def huge_gradients(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    error = perceptron(inputs, stages, 2) - inputs["target"]
    return minimised(tf.train.GradientDescentOptimizer(1e-11), 1e8 * tf.reduce_sum(tf.square(error)), {"error": error})


def counted(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    """A metric of predictions and labels: both are of all processes."""
    logits = perceptron(inputs, stages, CLASSES)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=inputs["label"], logits=logits))
    update = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    right = tf.get_variable("right", [], dtype, tf.zeros_initializer(), trainable=False)
    hits = tf.equal(tf.argmax(logits, 1), tf.cast(inputs["label"], tf.int64))
    count = tf.assign_add(right, tf.reduce_sum(tf.cast(hits, dtype)))
    return Script([[update, count]], {"loss": loss}, {})


def conditional_update(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    """An optimizer that applies the gradients of two steps in three."""
    logits = perceptron(inputs, stages, CLASSES)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=inputs["label"], logits=logits))
    optimizer = tf.train.MomentumOptimizer(0.05, 0.9)
    gradients = optimizer.compute_gradients(loss)
    step = tf.train.get_or_create_global_step()
    update = tf.cond(tf.not_equal(step % 3, 1), lambda: tf.group(optimizer.apply_gradients(gradients)), tf.no_op)
    with tf.control_dependencies([update]):
        return Script([[tf.assign_add(step, 1)]], {"loss": loss}, {})


def padded_sentences(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    """Sentences as long as the longest one of a mini-batch: nobody knows how many rows of the table's gradient an example has."""
    tokens = tf.placeholder_with_default(inputs["tokens"], [None, None])
    words = tf.nn.embedding_lookup(weight("words", [VOCAB, 2], dtype, 0.5), tokens)
    means = stages.run([lambda rows: tf.tanh(tf.reduce_mean(rows, 1))], words)
    return minimised(tf.train.AdagradOptimizer(0.1), tf.reduce_mean(tf.square(means)), {"means": means})


def rows_in_loop(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    """A loop over rows that are fed: their TensorArray is placed beside the placeholder."""
    kernel = weight("kernel", [FEATURES, 4], dtype)
    logits = stages.run([lambda x: tf.map_fn(lambda row: tf.tanh(tf.tensordot(row, kernel, 1)), x),
                         layer("head", CLASSES, tf.identity)], inputs["x"])
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=inputs["label"], logits=logits))
    return minimised(tf.train.GradientDescentOptimizer(0.1), loss, {"logits": logits})


def adversaries(inputs: Inputs, stages: Stages, dtype: str) -> Script:
    """The second loss is computed with what the first update made of a variable."""
    first, second = (weight(name, [FEATURES, FEATURES], dtype) for name in ("first", "second"))

    def loss(x: tf.Tensor, target: float) -> tf.Tensor:
        hidden = tf.tanh(tf.matmul(x, first.read_value()))
        return tf.reduce_mean(tf.square(tf.matmul(hidden, second.read_value()) - target))

    optimizer = tf.train.GradientDescentOptimizer(0.1)
    one = stages.run([lambda x: loss(x, 1.0)], inputs["x"])
    with tf.control_dependencies([optimizer.minimize(one, var_list=[first])]):
        other = loss(inputs["x"], -1.0)
    return Script([[optimizer.minimize(other, var_list=[second])]], {"one": one, "other": other}, {})


if __name__ != "__main__":  # which imports itself
    register({"huge_gradients": Case(vectors, huge_gradients), "counted": Case(vectors, counted),
              "conditional_update": Case(vectors, conditional_update), "padded_sentences": Case(sentences, padded_sentences),
              "rows_in_loop": Case(vectors, control_flow(1, rows_in_loop)), "adversaries": Case(vectors, adversaries)})


ACROSS = ("cluster.device_place_prefer_intra_node", False)
DIVIDED = ("io.nested_batch", "divide")


class Job(NamedTuple):
    """A case in each of several processes, which run parts of one step where a model replica needs more devices than a process
    has.

    Attributes:
        workers: processes.
        tolerance: in place of the type's own.
        counts: ``wh.replicate(counts[i])`` around stage i; None: around all, without a count.  Nothing: not annotated.
        split: stages with ``wh.split`` instead.
        devices: of each process.
        sizes: of the mini-batches in place of the case's own.
        config: more of the configuration.
        speeds: MFLOP/s of the processes' devices; none: equal.
    """

    case: str
    setting: Setting = Setting(dataset=True)
    counts: Tuple[Any, ...] = (None,)
    devices: int = 1
    micro_batches: int = 1
    sizes: Sequence[int] = ()
    config: Tuple[Tuple[str, Any], ...] = ()
    split: Tuple[int, ...] = ()
    workers: int = 2
    tolerance: Optional[float] = None
    speeds: Tuple[float, ...] = ()

    @property
    def cluster(self) -> Any:
        if not self.speeds:
            return f"{self.workers}xcpu:{self.devices}"
        return described([(speed, 1024) for speed in self.speeds for _ in range(self.devices)])

    @property
    def spans(self) -> bool:
        return not self.counts or sum(count or 0 for count in self.counts) > self.devices or ACROSS in self.config

    @property
    def has_host(self) -> bool:
        """Whether a process needs one more device, which stands for its host's memory."""
        return "offload" in dict(self.config)

    @property
    def graphs(self) -> int:
        """Steps side by side, each on mini-batches of its own."""
        return 1 if self.spans else self.workers

    @property
    def scopes(self) -> List[Any]:
        return [functools.partial(wh.split if i in self.split else wh.replicate, n) for i, n in enumerate(self.counts)]

    @property
    def script(self) -> Case:
        case = find_case(self.case)
        return case._replace(sizes=tuple(self.sizes)) if self.sizes else case

    @property
    def replicas(self) -> int:
        """Model replicas in each graph that take a mini-batch of their own."""
        if not self.counts or DIVIDED in self.config:  # a search decides
            return 1
        devices = self.devices * self.workers // self.graphs
        return max(1, devices // sum(count or devices for count in self.counts))


FP16: Tuple[Tuple[str, Any], ...] = (("communication.fp16", True),)
VERIFIED: Tuple[Tuple[str, Any], ...] = (("verify", "first_step"),)
FED = Setting(dataset=False)
JOBS: Dict[str, Job] = {
    # the first one decides how many devices the processes' servers have
    "two devices": Job("mlp_mean", devices=2),
    "one device, monitored": Job("mlp_mean", Setting(dataset=True, runner="monitored"), config=VERIFIED),
    "reference variables, fed, clipped by norm": Job("clipped_adam", FED._replace(resource=False), devices=2),
    "weights, batch size open": Job("weighted_loss", Setting(dataset=True, static_batch=False), devices=2),
    "weights, single precision": Job("weighted_loss", Setting("float32", dataset=True)),
    "batches of different sizes": Job("ragged", FED, devices=2, micro_batches=2),
    "sum with L2, batches of different sizes": Job("ragged_sum", FED),
    "nested": Job("mlp_sum", counts=(1,), devices=2, config=VERIFIED),
    "two losses": Job("gan"),
    "two losses, batch size open": Job("gan", Setting(dataset=True, static_batch=False), devices=2),
    "updates that wait for each other": Job("adversaries", micro_batches=2),
    "slots on the second device": Job("gan", Setting("float32", dataset=True), counts=(1, 1), devices=2, micro_batches=4),
    "gradient of a gradient, make_callable": Job("gradient_penalty", Setting(dataset=True, runner="callable")),
    "sparse gradient": Job("sparse_embedding", devices=2),
    "a metric of predictions and labels": Job("counted", devices=2),
    "a metric, batch size open": Job("counted", FED._replace(static_batch=False), devices=2),
    "sparse gradient of unequal length": Job("sparse_embedding", FED, sizes=RAGGED),
    "sparse gradient of sentences of any length": Job("padded_sentences", FED._replace(static_batch=False), devices=2),
    # Adagrad leaves rows alone whose gradient is zero
    "sparse gradient made dense": Job("sparse_embedding", devices=2, config=(("communication.sparse_as_dense", True),)),
    "batch statistics": Job("batch_norm", Setting(dataset=True, static_batch=False)),
    "pipeline in each process": Job("tied_embedding", counts=(1, 1), devices=2, micro_batches=2),
    "each gradient by itself": Job("momentum", devices=2, config=(("communication.bucket_bytes", 1),)),
    # each sum keeps 11 bits, and five steps of training amplify what is lost
    "float16": Job("momentum", devices=2, config=FP16, tolerance=1e-3),
    "float16, gradients beyond its range": Job("huge_gradients", Setting("float32", dataset=True), config=FP16, tolerance=1e-3),
    "float16 in buckets of one": Job("mlp_mean", FED, config=FP16 + (("communication.bucket_bytes", 1),), tolerance=1e-3),
    "float16 inside, scaled": Job("mlp_mean", Setting("float32", dataset=True), config=(("amp", "float16"),), tolerance=5e-3),
    "loop": Job("while_loop_v1"),
    "of unequal speed": Job("clipped_adam", speeds=(200, 100)),
    "of unequal speed, weights, reference variables": Job(
        "weighted_loss", Setting(dataset=True, static_batch=False, resource=False), devices=2, speeds=(300, 500),
        config=VERIFIED),
    "of unequal speed, two losses": Job("gan", speeds=(100, 300)),
    "features replicated and the rest split, in each process": Job(
        "momentum", counts=(None, None), split=(1,), devices=2, config=(("init", "sharded"),)),
    # examples are put together over processes
    "pairs of all examples": Job("contrastive", Setting(dataset=True, static_batch=False), devices=2),
    "order of all examples, batches of different sizes": Job(
        "running_sums", FED, devices=2, micro_batches=2, sizes=RAGGED, config=VERIFIED),
    "all examples, nested": Job("both_directions", Setting(dataset=True, static_batch=False), counts=(1,), devices=2),
    # variables are updated in one process and sent to the others
    "an update in a condition": Job("conditional_update", devices=2, config=VERIFIED),
    "zero, reference variables, fed, clipped by norm": Job(
        "clipped_adam", FED._replace(resource=False), devices=2, config=(("zero", "v1"),)),
    "zero, clipped by norm": Job("clipped_adam", devices=2, micro_batches=2, config=(("zero", "v2"), *VERIFIED)),
    "zero, monitored": Job("momentum", Setting(dataset=True, runner="monitored"), config=(("zero", "v1"),)),
    "zero, make_callable, pipeline": Job("momentum", Setting(dataset=True, runner="callable"), counts=(1, 1), devices=2,
                                         micro_batches=2, config=(("zero", "v1"),)),
    "zero v3, two losses": Job("gan", devices=2, micro_batches=2, config=(("zero", "v3"),)),
    "zero v3, a metric of predictions and labels, called": Job("counted", devices=2, config=(("zero", "v3"), ("emit", "call"))),
    "zero v3, make_callable, pipeline": Job("momentum", Setting(dataset=True, runner="callable"), counts=(1, 1), devices=2,
                                            micro_batches=2, config=(("zero", "v3"),)),
    "zero, sparse gradient": Job("sparse_embedding", devices=2, config=(("zero", "v1"),)),
    "zero v3, look-ups": Job("sparse_embedding", devices=2, micro_batches=2, config=(("zero", "v3"),)),
    "zero v3, a table that is also a matrix, called": Job("tied_embedding", FED, config=(("zero", "v3"), ("emit", "call"))),
}


# each process runs a part of the step
SPANNING: Dict[str, Job] = {
    "two stages of two devices": Job("clipped_adam", Setting(resource=False), counts=(2, 2), devices=2, micro_batches=2),
    "one mini-batch on all devices": Job("weighted_loss", Setting(dataset=True, static_batch=False), counts=(4,), devices=2),
    "split over the devices of both": Job("clipped_adam", counts=(4,), split=(0,), devices=2, config=(("init", "sharded"),)),
    "stages across, replicas within": Job("momentum", counts=(1, 1), devices=2, micro_batches=2, config=(ACROSS,)),
    "gradients of weights apart": Job(
        "clipped_adam", counts=(1, 1), micro_batches=3, config=(("pipeline.schedule", "zero_bubble_h1"), ("emit", "call"))),
    "several TaskGraphs a device": Job(
        "mlp_mean", counts=(1, 1, 1, 1), micro_batches=3, config=(("pipeline.schedule", "interleaved"),)),
    "variables on hosts": Job("clipped_adam", counts=(1, 3), devices=2, micro_batches=2, config=(("offload", "states"),)),
    "variables on hosts, read anew": Job(
        "tied_embedding", FED, counts=(2, 2), devices=2, micro_batches=2, config=(("offload", "v0"), *VERIFIED)),
    "variables on hosts, sums there, split": Job("momentum", counts=(2, 2), split=(1,), devices=2, micro_batches=2,
                                                 config=(("offload", "states"), ("zero", "v2"))),
    "searched": Job("mlp_mean", counts=(), config=(("auto_parallel", True),)),
    "loop, searched": Job("while_loop_v1", FED, counts=(), config=(("auto_parallel", True),)),
    "loop over rows, fed": Job("rows_in_loop", FED, counts=(1, 1), micro_batches=2),
    "loop, computed again": Job("while_loop_v1", counts=(1, 1), micro_batches=2, config=(("recompute", "full"),)),
    "stages by cost, called": Job("momentum", FED, counts=(), micro_batches=2, config=(("num_task_graph", 2), ("emit", "call"))),
    "stages of two devices, two steps side by side": Job(
        "momentum", Setting(dataset=True, static_batch=False, resource=False), counts=(2, 2), micro_batches=2, workers=4),
    "pipelines side by side": Job(
        "clipped_adam", Setting(dataset=True, static_batch=False), counts=(1, 1), micro_batches=2, config=(DIVIDED, *VERIFIED),
        workers=4),
    "split, two steps side by side": Job(
        "weighted_loss", Setting(dataset=True, static_batch=False), counts=(2,), split=(0,), config=(DIVIDED,), workers=4),
    "side by side, batches of different sizes": Job("ragged", FED, counts=(1, 1), config=(DIVIDED,), workers=4),
    "every op divided": Job("clipped_adam", FED, counts=(), config=(("auto_parallel", "rhino"),)),
    "uneven stages, monitored": Job(
        "tied_embedding", Setting(dataset=True, runner="monitored"), counts=(1, 3), devices=2, config=VERIFIED),
}


def local(job: Job) -> Outcome:
    """The script as it is, on the mini-batches of all processes one behind the other."""
    case = job.script
    if job.setting.dataset:
        return equality.run_local(case, equality.reference(job.setting), job.graphs * job.replicas)
    return _fed(case, job.setting, Stages(), [range(job.graphs)], 0)


def in_process(job: Job, rank: int, container: str) -> Outcome:
    """What process ``rank`` computes; one that runs a part of a step has the local script's data."""
    case = job.script
    config: Dict[str, Any] = dict(case.config or {}, num_micro_batch=job.micro_batches, **dict(job.config))
    wh.init(config, cluster=job.cluster)
    try:
        stages = Stages(job.scopes) if job.counts else Stages()
        if job.setting.dataset:
            return equality.run_script(case, job.setting, stages, job.graphs * job.replicas, 1, container)
        return _fed(case, job.setting, stages, [[number] for number in range(job.graphs)],
                    rank % job.graphs, container)
    finally:
        wh.shutdown()


def _fed(case: Case, setting: Setting, stages: Stages, parts: Sequence[Sequence[int]], part: int,
         container: str = "") -> Outcome:
    """Trains on fed mini-batches.

    Args:
        parts: numbers of the processes whose mini-batches each script sees one behind the other.
        part: which of these scripts this is.
    """
    count = sum(len(numbers) for numbers in parts)
    sizes = _sizes(case, count)
    examples = case.examples(sum(map(sum, sizes)), setting.dtype)
    with tf.Graph().as_default() as graph, graph.container(container), tf.variable_scope("", use_resource=setting.resource):
        tf.set_random_seed(1)
        setting = setting._replace(static_batch=not case.ragged)
        cuts = [sum(row[number] for number in numbers) for row in sizes for numbers in parts]
        inputs, feeds = source(examples, cuts, setting)
        return equality.train(case.build(inputs, stages, setting.dtype), feeds[part::len(parts)], setting)


def _sizes(case: Case, count: int) -> List[List[int]]:
    """Examples that each of ``count`` processes feeds in each step."""
    steps = len(case.sizes)
    return [[case.sizes[(step + 3 * number) % steps] for number in range(count)] for step in range(steps)]


def merged(job: Job, outcomes: List[Outcome]) -> Outcome:
    """The processes' outcomes as one: means of losses, weighted by examples, and examples one behind the other."""
    first, case = outcomes[0], job.script
    weights: List[Sequence[float]] = list(_sizes(case, len(outcomes)) * case.runs)
    if job.speeds:
        weights = [job.speeds] * len(weights)
    losses = {name: [np.average(values, weights=row)
                     for values, row in zip(zip(*(one.losses[name] for one in outcomes)), weights)]
              for name in first.losses}
    outputs = {name: [np.concatenate(values) for values in zip(*(one.outputs[name] for one in outcomes))]
               for name in first.outputs}
    return Outcome(first.initial, first.final, losses, outputs)


def main() -> None:
    """``python -m tests.multiprocess.jobs PATH OPTIMIZED``: a process.

    It reads jobs from ``PATH`` and writes outcomes to ``PATH.<rank>``.  ``OPTIMIZED``: 1: with TensorFlow's graph optimizer; 0:
    without.
    """
    path = sys.argv[1]
    graph_optimizer.turn(bool(int(sys.argv[2])))
    rank = find_processes().rank
    with open(path, "rb") as handle:
        jobs: List[Job] = pickle.load(handle)
    outcomes = []
    for number, job in enumerate(jobs):
        print("job:", job, flush=True)
        outcomes.append(in_process(job, rank, f"job{number}"))
    with open(f"{path}.{rank}", "wb") as handle:
        pickle.dump(outcomes, handle)


if __name__ == "__main__":
    from tests.multiprocess import jobs as module  # jobs are unpickled as this module's

    module.main()
