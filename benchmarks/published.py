"""The simulator beside published measurements: fitted and not fitted, leaving one source out at a time.

    python -m benchmarks.published [--data DIRECTORY] [--fit] [--write] [--picture FILE] [--megatron]

``--data``: a directory with measurements that others published: ``simulator/dlperf_dev.json`` (DLPerf's runs of
NVIDIA's DeepLearningExamples on TensorFlow 1.15 with Horovod), ``planner/dapple_profiles.json`` (layer times of DAPPLE's
authors on a V100), ``planner/amp_results_*.json`` (run times of AMP's authors).  Sources that are not there are named and
skipped; what papers print is here, what NVIDIA's examples print in :mod:`benchmarks.nvidia_runs`.  ``--fit``: also fit the
laws' parameters to all runs, and to those of all models but one; ``--write``: write the laws that come with the package.
``--megatron``: also the weak scaling of Megatron-LM (a minute), whose kernels are written by hand: no law of TensorFlow's
stands in these answers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import replace
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np
from rich.console import Console
from scipy.optimize import least_squares
from scipy.stats import spearmanr

from benchmarks.amp import measured_profile
from benchmarks.measure import table
from benchmarks.nvidia_runs import TF1, TF2, nvidia
from benchmarks.papers_memory import as_tensorflow
from benchmarks.points import FIRST_YEAR, Point, data_parallel, nine_of_ten, tested
from benchmarks.simulator import TABLE_VI
from whale_tf.cluster import Cluster
from whale_tf.cluster.devices import CONTEXT_BYTES
from whale_tf.documents import plain
from whale_tf.planner.amp.cost import AmpCosts, AmpStrategy, Degrees
from whale_tf.planner.amp.placement import megatron
from whale_tf.profiler.layer_time import layer_seconds
from whale_tf.profiler.model_profile import load_builtin
from whale_tf.simulator import Simulator, built_in_model, simulate, uniform_3d
from whale_tf.simulator.laws import (
    ANY,
    DEFAULT,
    KERNELS,
    LAYERS,
    MEASURED,
    FrameworkLaw,
    Laws,
    TestedError,
    default_laws,
    fitted,
    waiting_seconds,
)
from whale_tf.simulator.model_graph import OPTIMIZERS, Builder, ModelGraph, Optimizer
from whale_tf.simulator.zoo import vision
from whale_tf.simulator.zoo.transformers import transformer

KIND = "V100"  # to whose runs the parameters of the row GPU are fitted, and what several devices add
FREE: Dict[str, Tuple[str, ...]] = {  # of each card; the others are those of the row GPU
    KIND: ("matmul_fp32", "matmul_half", "convolution_fp32", "convolution_half", "winograd"),
    "A100": ("matmul_half", "matmul_tf32", "convolution_half", "convolution_tf32"),
    "P100": ("convolution_fp32",)}
PRIOR = {"matmul_fp32": 0.85, "matmul_half": 0.5, "convolution_fp32": 0.85, "convolution_half": 0.4,
         "winograd": 1.5}  # where no source tells
WAITING = {"jitter": 0.02, "hop_s": 3e-5, "overlap": 0.5}
MOST = 0.95  # of a peak, whatever fits better
MOST_WINOGRAD = 2.25  # of F(2 x 2, 3 x 3)
PARAMETERS = tuple(dict.fromkeys(name for names in FREE.values() for name in names))
TABLE = "DAPPLE Table VI"
COMPARED = {f"NVIDIA, {source}": "bert-large" for source in (TF1, TF2)}  # sources of which a model's runs are only compared
TRUST = 0.1  # weight of a prior beside one measurement's relative error
OUTLIER = 0.05  # relative error from which a measurement counts less: scripts differ in more than the laws know
PROFILES = {"vgg-19-pbs-32": "vgg-19@dapple", "bert-24-pbs-6": "bert-large@dapple", "bert-48-pbs-2": "bert-48@dapple",
            "gnmt-16-pbs-64": "gnmt-16", "amoeba-36-pbs-1": "amoebanet-36"}
# What `python -m benchmarks.accuracy` printed (benchmarks/README.md): steps made of a script's own ops, timed by themselves
OWN_OPS = TestedError(times=MEASURED, device="CPU", precision="fp32", points=33, mean=0.038, most=0.102)
# Written by `python -m benchmarks.hopper --fit --write`: steps on an H200, op by op
HOPPER = tuple(one for one in default_laws().errors if one.device == "H200")
DLPERF = "4xV100-16GB:8"
AMP = {"homogeneous": "amp-homogeneous", "het_cluster": "amp-het"}


# ---- sources -------------------------------------------------------------------------------------------------------------


def read(data: Optional[str], *path: str) -> Optional[Any]:
    """The JSON file, or None where it is not."""
    name = os.path.join(data or "", *path)
    if data is None or not os.path.exists(name):
        return None
    with open(name, encoding="utf8") as handle:
        return json.load(handle)


def dlperf_cluster() -> Cluster:
    """Nodes of 8 V100-SXM2-16GB and one adapter of 100 Gbit/s."""
    nic = {"bandwidth_gbits_per_s": 100, "latency_us": 5}
    return Cluster.parse({"name": DLPERF, "nodes": [{"devices": "V100-16GB:8", "links": "default", "nic": nic, "count": 4}]})


def dlperf(data: Optional[str]) -> List[Point]:
    """DLPerf: data parallelism with Horovod, synthetic data, BERT by Adam (its run_pretraining_adam.sh).  NVIDIA's script of BERT
    sends gradients in 16 bits under mixed precision (its optimization.py: ``hvd.Compression.fp16``), that of ResNet does not."""
    found, cluster = read(data, "simulator", "dlperf_dev.json"), dlperf_cluster()
    points: List[Point] = []
    for row in found["series"] if found else ():
        precision = "fp16" if "16" in row["precision"] else "fp32"
        name = {"resnet50": "resnet-50", "bert_base": "bert-base"}[row["model"]]
        what = f"{name}, {precision}{', XLA' if row['xla'] else ''}"
        halved = name == "bert-base" and precision == "fp16"
        for gpus, rate in zip(found["gpus"], row["throughput"]):
            model = built_in_model(name, row["batch_per_gpu"] * gpus)
            model = model._replace(optimizer=OPTIMIZERS["adamw"]) if name == "bert-base" else model
            strategy = data_parallel(model, precision, row["xla"], gpus, fp16_gradients=halved)
            points.append(Point("DLPerf", name, what, precision, gpus, rate, strategy, cluster, row["xla"]))
    return points


def dapple_profiles(data: Optional[str]) -> List[Point]:
    """Forward and backward seconds of whole models on one V100 by the profiles of DAPPLE's authors (TensorFlow 1, float32)."""
    found = read(data, "planner", "dapple_profiles.json")
    models: Dict[str, Callable[[int], Any]] = {
        "vgg-19-pbs-32": lambda batch: built_in_model("vgg-19", batch),
        "bert-24-pbs-6": lambda batch: transformer(
            "bert-24", batch, 24, 1024, 16, 384, 30522, pre_norm=False, predicted=2, optimizer="sgd"),
        "bert-48-pbs-2": lambda batch: transformer(
            "bert-48", batch, 48, 1024, 16, 384, 30522, pre_norm=False, predicted=2, optimizer="sgd")}
    points: List[Point] = []
    for name, build in models.items() if found else ():
        rows, batch = found["models"][name]["nodes"], found["models"][name]["profile_batch_size"]
        seconds = sum(row["fwd_ms"] + row["bwd_ms"] for row in rows) * 1e-3
        what = name.split("-pbs")[0]
        points.append(Point("DAPPLE's profiles", "vgg-19" if what == "vgg-19" else "bert-large", what, "fp32", 1, batch / seconds,
                            data_parallel(build(batch), "fp32", False, 1), Cluster.parse("V100-32GB:1")))
    return points


def dapple_table() -> List[Point]:
    """DAPPLE Table VI: BERT-48 in two stages on configuration B, micro-batches of 2."""
    model, cluster = as_tensorflow(2), Cluster.parse("dapple-b")
    points: List[Point] = []
    for (schedule, recompute, count), (rate, _) in TABLE_VI.items():
        strategy = uniform_3d(model, 1, 1, 2, count, schedule, recompute=recompute)
        what = f"BERT-48, {schedule}{' + recomputation' if recompute != 'none' else ''}"
        points.append(Point(TABLE, "bert-large", what, "fp32", 2, rate or 0.0, strategy, cluster, fits=rate is not None))
    return points


# tensorflow.org/performance/benchmarks (TensorFlow 1.1, CUDA 8.0, cuDNN 5.1, synthetic data): images/s of an NVIDIA DGX-1 with
# P100 by (model, images of a GPU), on 1, 2, 4 and 8 GPUs.  Stored copies of the page differ about ResNet-50; these are its last
# figures.  The page's tables: plain gradient descent, and variables on the CPU (variable_update parameter_server,
# local_parameter_device cpu), to which every step's gradients go and from which its values come.
P100 = {("inception-v3", 64): (142.0, 284.0, 569.0, 1131.0), ("inception-v3", 32): (128.0, 259.0, 520.0, 995.0),
        ("resnet-50", 64): (219.0, 422.0, 852.0, 1734.0), ("resnet-50", 32): (195.0, 368.0, 768.0, 1485.0)}


def resnet50_of_2017(batch: int) -> ModelGraph:
    """ResNet-50 of tensorflow/benchmarks at the time of that page (scripts/tf_cnn_benchmarks/resnet_model.py): a block has its
    stride in the first convolution, and no normalisation on its shortcut."""
    def block(b: Builder, x: int, channels: int, stride: int, project: bool) -> int:
        shortcut = vision.convolution(b, "shortcut", x, 4 * channels, 1, stride) if project else x
        y = vision.unit(b, "conv1", x, channels, 1, stride)
        y = vision.unit(b, "conv3", vision.unit(b, "conv2", y, channels, 3), 4 * channels, 1, relu=False)
        return b.pointwise("relu", "relu", b.add("residual", y, shortcut))

    return vision.residual(Builder("resnet-50", batch, optimizer="sgd"), (3, 4, 6, 3), block, classes=1001)


def tensorflow_org() -> List[Point]:
    """Runs whose cuDNN is older than all others'."""
    points: List[Point] = []
    for (name, batch), rates in P100.items():
        for gpus, rate in zip((1, 2, 4, 8), rates):
            size = batch * gpus
            model = resnet50_of_2017(size) if name == "resnet-50" else built_in_model(name, size)
            strategy = data_parallel(model._replace(optimizer=OPTIMIZERS["sgd"]), "fp32", False, gpus)._replace(offload="states")
            points.append(Point("tensorflow.org", name, f"{name}, {batch} a GPU", "fp32", gpus, rate, strategy,
                                Cluster.parse("P100-SXM2-16GB:8")))
    return points


class MegatronRow(NamedTuple):
    """A model of GPT: batches in sequences of 2,048 tokens; ``chunks`` stages a device, interleaved if several; ``overlapped``:
    whether gradients are summed beside the backward pass (PyTorch's DistributedDataParallel) or behind it (Megatron's own)."""

    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    gpus: int
    batch: int
    measured: float  # TFLOP/s of a GPU
    micro_batch: int
    chunks: int = 1
    overlapped: bool = False

    @property
    def flops(self) -> float:
        """Of a step, all blocks computed twice forwards (equation 3 of the paper)."""
        share = 1.0 + TOKENS / (6 * self.hidden) + VOCABULARY / (16 * self.layers * self.hidden)
        return 96.0 * self.batch * TOKENS * self.layers * self.hidden**2 * share


TOKENS, VOCABULARY = 2048, 51200
# Megatron-LM's Adam in 16 bits (NVIDIA/Megatron-LM, megatron/optimizer/optimizer.py), in float32 parameters read or written:
# gradients copied from 16 bits 1.5, unscaled and checked 2, their norm 1, clipped 2, Adam 7, values copied to 16 bits 1.5.
MIXED_ADAM = Optimizer("Adam in 16 bits", 8, 15)
# Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC21, arXiv 2104.04473),
# Table 1, up to 310 billion parameters (two transcripts of the table agree in every number); micro-batches, stages a device and
# how gradients are summed: NVIDIA/Megatron-LM, examples/sc21/run_table_1.sh, whose sizes, degrees and batches are the table's.
MEGATRON = (
    MegatronRow(24, 2304, 24, 1, 1, 32, 512, 137.0, 16, overlapped=True),
    MegatronRow(32, 3072, 30, 2, 1, 64, 512, 138.0, 16, overlapped=True),
    MegatronRow(32, 4096, 36, 4, 1, 128, 512, 142.0, 16, overlapped=True),
    MegatronRow(48, 6144, 40, 8, 1, 256, 1024, 135.0, 8, overlapped=True),
    MegatronRow(64, 8192, 48, 8, 2, 512, 1536, 138.0, 4),
    MegatronRow(80, 10240, 60, 8, 4, 1024, 1792, 140.0, 2, 3),
    MegatronRow(96, 12288, 80, 8, 8, 1536, 2304, 148.0, 2, 2),
    MegatronRow(128, 16384, 96, 8, 16, 1920, 2160, 155.0, 1, 2),
)


def megatron_tflops(row: MegatronRow) -> float:
    """TFLOP/s of a GPU.  A pipeline of many micro-batches is played for two and four rounds of its stages, and goes on so."""
    dp = row.gpus // (row.tp * row.pp)
    total = row.batch // (dp * row.micro_batch)
    model = transformer("gpt", row.micro_batch * dp, row.layers, row.hidden, row.heads, TOKENS, VOCABULARY, precision="fp16",
                        optimizer=MIXED_ADAM)
    schedule, cluster = "interleaved" if row.chunks > 1 else "backward_first", Cluster.parse(f"a100:{row.gpus}")

    def step_s(count: int) -> float:
        strategy = uniform_3d(model, dp, row.tp, row.pp, count, schedule, recompute="full", chunks=row.chunks)
        strategy = strategy._replace(bucket_bytes=None if row.overlapped else math.inf, weights_first=True)
        return simulate(strategy, cluster).step_time_s

    short = 2 * row.pp
    if total <= 2 * short:
        seconds = step_s(total)
    else:
        some_s, twice_s = step_s(short), step_s(2 * short)
        seconds = twice_s + (twice_s - some_s) / short * (total - 2 * short)
    return row.flops / seconds / row.gpus / 1e12


def megatron_rows() -> List[List[str]]:
    rows = []
    for row in MEGATRON:
        found = megatron_tflops(row)
        what = f"{row.layers} x {row.hidden}, {row.gpus} GPUs, tp {row.tp}, pp {row.pp}, micro-batches of {row.micro_batch}"
        schedule = f"interleaved x {row.chunks}" if row.chunks > 1 else "1F1B" if row.pp > 1 else "-"
        rows.append([what, schedule, f"{row.measured:.0f}", f"{found:.1f}", f"{found / row.measured:.3f}"])
    return rows


class AmpRow(NamedTuple):
    """A strategy of AMP's authors: measured and estimated seconds, whether it ran, and whether it should."""

    setting: str
    measured_s: Optional[float]
    estimate_s: float
    ran: bool
    fits: bool


def amp(data: Optional[str]) -> List[AmpRow]:
    """AMP's authors ran GPT-2 with DeepSpeed, which leaves nothing of the memory to the system as TensorFlow does."""
    rows: List[AmpRow] = []
    for setting, name in AMP.items():
        found = read(data, "planner", f"amp_results_{setting}.json")
        cluster = Cluster.parse(name)
        profile = measured_profile(os.path.join(data, "planner")) if found else load_builtin("gpt2-24")  # type: ignore[arg-type]
        costs = AmpCosts(profile, cluster, 32, blocking=True)
        limit = min(device.memory_bytes for device in cluster.devices) - CONTEXT_BYTES
        for row in found["strategies"] if found else ():
            if row["status"] != "not_run":
                degrees = Degrees(row["pp"], row["dp"], row["tmp"])
                found_s = costs.estimate(AmpStrategy(degrees, row["mbs"], megatron(cluster, degrees), tuple(row["partition"])))
                rows.append(AmpRow(setting, row["measured_s"], found_s.seconds, row["status"] == "ok",
                                   max(found_s.peak_bytes) <= limit))
    return rows


def layers(data: Optional[str]) -> List[Tuple[str, float]]:
    """(model, relative error) of the layers that the planners read, against DAPPLE's authors' times of whole models on a V100."""
    found = read(data, "planner", "dapple_profiles.json")
    device, errors = Cluster.parse("V100-16GB:1").devices[0], []
    for name, ours in PROFILES.items() if found else ():
        rows, batch = found["models"][name]["nodes"], found["models"][name]["profile_batch_size"]
        profile = load_builtin(ours)
        times = [layer_seconds(profile, layer, device, batch) for layer in profile.layers]
        measured_s = sum((row["fwd_ms"] or 0.0) + (row["bwd_ms"] or 0.0) for row in rows) * 1e-3
        errors.append((ours, sum(time.forward_s + time.backward_s for time in times) / measured_s - 1.0))
    return errors


# ---- fitting -------------------------------------------------------------------------------------------------------------


STEP = 1.1  # by which a parameter is changed to see what depends on it


def seconds_alone(point: Point, laws: Laws) -> float:
    """Of a step on one device, where all micro-batches but the first take equally long: two are played, and three."""
    count = point.strategy.num_micro_batch
    if count <= 3:
        return point.predict(laws).step_time_s
    simulator = Simulator(point.cluster, point.options(laws))
    two_s, three_s = (simulator.run(point.strategy._replace(num_micro_batch=few)).step_time_s for few in (2, 3))
    return two_s + (count - 2) * (three_s - two_s)


class Fit:
    """Laws whose relative errors are least over some of the points: kernels by the runs on one device of each card, then what
    several devices add.

    A kernel's time is in proportion to ``1 / share``, so a step's time is taken as linear in the reciprocals of the parameters.
    Its derivatives are found once, at the package's laws, for all choices of points.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        self.start = default_laws()
        self.points = [point for point in points if is_fitted(point)]
        others = [point for point in points if point.gpus == 1 and point.card in FIRST_YEAR and not is_fitted(point)]
        self._known = len(self.points)
        self.points += others
        self._pairs = [(first, later) for first, one in enumerate(self.points) for later, other in enumerate(self.points)
                       if same_run(one) == same_run(other) and one.row != one.card == other.row]
        self._terms: Dict[int, Tuple[float, Dict[str, float]]] = {}
        self._waits: List[Tuple[Point, float, float, float]] = []

    def laws(self, without: Optional[str] = None) -> Laws:
        """``without``: the model that is left out."""
        known = [number for number, point in enumerate(self.points[:self._known]) if point.model != without]
        laws, prior = self.start, PRIOR
        for card in FREE:
            alone = [number for number in known if self.points[number].gpus == 1 and self.points[number].card == card]
            laws = self._of_card(card, laws, prior, alone, without)
            row = laws.devices[ANY]
            prior = {f"{kind}_{precision}": getattr(row, f"{kind}_{'half' if precision == 'tf32' else precision}")
                     for kind in ("matmul", "convolution") for precision in ("fp32", "half", "tf32")}
        return self._with_waiting(laws, without)

    def _of_card(self, card: str, laws: Laws, prior: Mapping[str, float], alone: Sequence[int], without: Optional[str]) -> Laws:
        names = FREE[card]
        middle = np.log([prior[name] for name in names])
        held = {name: getattr(laws.devices[card], name) for name in PARAMETERS}  # those of other cards are fitted already
        slower = self._first_years_share(card, without) if card in FIRST_YEAR else 1.0
        weights = self._weights(alone)

        def values_of(number: int, values: np.ndarray) -> Dict[str, float]:
            share = 1.0 if self.points[number].row == card else slower
            return dict(held, **dict(zip(names, share * np.exp(values))))

        def residuals(values: np.ndarray) -> np.ndarray:
            errors = [weight * self._error(number, values_of(number, values)) for number, weight in zip(alone, weights)]
            return np.concatenate([errors, TRUST * (values - middle)])

        least = np.log([1.0 if name == "winograd" else 0.1 for name in names])
        most = np.log([MOST_WINOGRAD if name == "winograd" else MOST for name in names])
        found = middle
        if alone:
            found = least_squares(residuals, np.clip(middle, least + 0.01, most - 0.01), bounds=(least, most), loss="soft_l1",
                                  f_scale=OUTLIER).x
        laws = of_card(laws, card, dict(zip(names, np.exp(found).tolist())))
        if card in FIRST_YEAR:
            shares = dict(zip(names, (slower * np.exp(found)).tolist()))
            laws = replace(laws, devices=dict(laws.devices, **{FIRST_YEAR[card]: replace(laws.devices[card], **shares)}))
        return laws

    def _weights(self, numbers: Sequence[int]) -> List[float]:
        """A model counts once in each precision, however many runs of it there are."""
        kinds = [(self.points[number].model, self.points[number].precision) for number in numbers]
        return [1.0 / math.sqrt(kinds.count(kind)) for kind in kinds]

    def _error(self, number: int, values: Mapping[str, float]) -> float:
        """Logarithm of predicted over measured time."""
        return float(np.log(self._seconds(number, values) * self.points[number].measured / self._samples(number)))

    def _first_years_share(self, card: str, without: Optional[str]) -> float:
        """What the shares of the card's first libraries are of the later ones', by models that were run with both: how much
        faster a model became says nothing about how well the laws know that model."""
        pairs = [pair for pair in self._pairs if self.points[pair[0]].card == card and self.points[pair[0]].model != without]
        weights, row = self._weights([first for first, _ in pairs]), self.start.devices[card]
        names = FREE[card]

        def residuals(values: np.ndarray) -> np.ndarray:
            slower = {name: getattr(row, name) * math.exp(values[0]) for name in names}
            errors = [weight * (self._error(first, slower) - self._error(later, {}))
                      for weight, (first, later) in zip(weights, pairs)]
            return np.concatenate([errors, TRUST * values])

        return float(np.exp(least_squares(residuals, [0.0], loss="soft_l1", f_scale=OUTLIER).x[0])) if pairs else 1.0

    def _samples(self, number: int) -> int:
        strategy = self.points[number].strategy
        return strategy.model.batch * strategy.num_micro_batch

    def _seconds(self, number: int, values: Mapping[str, float]) -> float:
        """Of a step on one device, nearly."""
        point = self.points[number]
        row = self.start.devices[point.row]
        if number not in self._terms:
            seconds, slopes = seconds_alone(point, self.start), {}
            for name in parameters_of(point):
                share = getattr(row, name)
                changed = of_card(self.start, point.row, {name: share / STEP})
                slopes[name] = (seconds_alone(point, changed) - seconds) / ((STEP - 1.0) / share)
            self._terms[number] = seconds, slopes
        seconds, slopes = self._terms[number]
        return seconds + sum(slopes[name] * (1.0 / value - 1.0 / getattr(row, name)) for name, value in values.items()
                             if name in slopes)

    def _with_waiting(self, laws: Laws, without: Optional[str]) -> Laws:
        """Simulations without waiting, with the package's kernels, tell what a timeline hides; the rest is
        :func:`waiting_seconds`.  What kernels are wrong by is not what several devices wait for, so the speed-up counts, where a
        series starts with one device."""
        names, prior = list(WAITING), np.log(list(WAITING.values()))
        bare = replace(self.start, framework=replace(self.start.framework, jitter=0.0, hop_s=0.0, overlap=0.0))
        alone = {point.series: np.log(self._seconds(number, {}) * point.measured / self._samples(number))
                 for number, point in enumerate(self.points) if point.gpus == 1 and point.card == KIND}
        if not self._waits:
            for point in self.points:
                if point.gpus > 1 and point.card == KIND:
                    run = point.predict(bare)
                    step_s = run.times.makespan
                    self._waits.append((point, step_s, run.step_time_s - step_s, max(use.sums for use in run.devices)))

        def law_of(values: np.ndarray) -> FrameworkLaw:
            changes = dict(zip(names, np.exp(values).tolist()))
            return replace(laws.framework, **dict(changes, overlap=min(1.0, changes["overlap"])))

        def residuals(values: np.ndarray) -> np.ndarray:
            law, errors = law_of(values), []
            for point, step_s, hidden_s, count in self._waits:
                if point.model != without:
                    seconds = step_s + waiting_seconds(law, step_s, hidden_s, point.gpus, count, point.xla)
                    samples = point.strategy.model.batch * point.strategy.num_micro_batch
                    errors.append(np.log(seconds * point.measured / samples) - alone.get(point.series, 0.0))
            return np.concatenate([errors, TRUST * (values - prior)])

        return replace(laws, framework=law_of(least_squares(residuals, prior).x))


def of_card(laws: Laws, card: str, values: Mapping[str, float]) -> Laws:
    """The laws with other parameters for a card."""
    if card != KIND:
        return replace(laws, devices=dict(laws.devices, **{card: replace(laws.devices[card], **values)}))
    changes = dict(values)
    for name in values:
        if name.endswith("_half"):  # where nothing tells, TF32 reaches the share of 16 bits
            changes[name.replace("half", "tf32")] = values[name]
    return fitted(laws, **changes)


def parameters_of(point: Point) -> Set[str]:
    """The parameters on which a run's time can depend."""
    has_convolutions = any(op.kind == "convolution" for op in point.strategy.model.ops)
    kinds = ("matmul", "convolution") if has_convolutions else ("matmul",)
    precisions = ("fp32",) if point.precision == "fp32" else ("fp32", "half" if point.precision == "fp16" else point.precision)
    found = {f"{kind}_{precision}" for kind in kinds for precision in precisions}
    return found | {"winograd"} if has_convolutions and point.precision != "fp16" else found


def same_run(point: Point) -> Tuple[str, str, int, str, bool]:
    """What two measurements have in common that differ in libraries (and in batch and memory)."""
    return point.model, point.what.rsplit(",", 1)[0].lower(), point.gpus, point.card, point.xla


def is_fitted(point: Point) -> bool:
    """Pipelines (Table VI), U-Nets and NVIDIA's other trainings of BERT-Large are only compared."""
    return point.source != TABLE and COMPARED.get(point.source) != point.model != "u-net" and point.card in FREE


# ---- report --------------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What the simulator says of a point."""

    point: Point
    rate: float
    fits: bool

    @property
    def ratio(self) -> float:
        return self.rate / self.point.measured


def answered(points: Sequence[Point], laws_of: Callable[[Point], Laws]) -> List[Answer]:
    found = []
    for point in points:
        result = point.predict(laws_of(point))
        found.append(Answer(point, result.samples_per_s, not result.oom))
    return found


def by_series(answers: Sequence[Answer]) -> List[List[str]]:
    """One row a series: mean and largest error, and the difference of the scaling efficiency at the most devices."""
    rows: List[List[str]] = []
    for series in dict.fromkeys(one.point.series for one in answers):
        ran = [one for one in answers if one.point.series == series and one.point.fits]
        if not ran:
            continue
        mine, rates = [one.point for one in ran], [one.rate for one in ran]
        errors = [abs(one.ratio - 1.0) for one in ran]
        efficiency = "-"
        if mine[0].gpus == 1 and mine[-1].gpus > 1:
            ours, theirs = (rates[-1] / rates[0] / mine[-1].gpus, mine[-1].measured / mine[0].measured / mine[-1].gpus)
            efficiency = f"{ours:.2f} ({theirs:.2f})"
        order = f"{spearmanr(rates, [point.measured for point in mine]).correlation:.3f}" if len(mine) > 2 else "-"
        shown = (f"{np.mean(errors):.1%}", f"{max(errors):.1%}", efficiency, order)
        rows.append([series, mine[0].precision, str(len(mine)), *shown])
    return rows


COLUMNS = ["series", "precision", "points", "mean error", "largest", "efficiency, predicted (measured)", "Spearman"]


def every_point(data: Optional[str], console: Console) -> List[Point]:
    sources = {"DLPerf": dlperf(data), "DAPPLE's profiles": dapple_profiles(data), TABLE: dapple_table(),
               "NVIDIA's examples": nvidia(), "tensorflow.org": tensorflow_org()}
    for name, points in sources.items():
        if not points:
            console.print(f"{name}: no data; --data DIRECTORY has none of it")
    return [point for points in sources.values() for point in points]


def errors_of(answers: Sequence[Answer]) -> Tuple[TestedError, ...]:
    by_kind: Dict[Tuple[str, str], List[float]] = {}
    for one in answers:
        if one.point.fits:
            by_kind.setdefault((one.point.card, one.point.precision), []).append(one.ratio)
    return tuple(tested(KERNELS, kind, precision, ratios) for (kind, precision), ratios in by_kind.items())


def coverage(answers: Sequence[Answer]) -> Dict[Tuple[str, str], Tuple[float, float]]:
    """(card, precision) -> the share of runs inside the printed range, and inside the range that the runs of all other models
    tell, as a user's own model is in none of them."""
    kinds: Dict[Tuple[str, str], List[Answer]] = {}
    for one in answers:
        if one.point.fits:
            kinds.setdefault((one.point.card, one.point.precision), []).append(one)
    found = {}
    for kind, mine in kinds.items():
        shares = []
        for is_apart in (False, True):
            inside = []
            for one in mine:
                others = [other.ratio for other in mine if not is_apart or other.point.model != one.point.model]
                inside.append(bool(others) and max(one.ratio, 1.0 / one.ratio) <= 1.0 + nine_of_ten(others))
            shares.append(sum(inside) / len(inside))
        found[kind] = shares[0], shares[1]
    return found


def write(laws: Laws) -> None:
    """As the package's file; rows of devices say what differs from ``GPU``."""
    value = json.loads(json.dumps(plain(laws)), parse_float=lambda text: float(f"{float(text):.4g}"))
    base = value["devices"]["GPU"]
    value["devices"] = {name: row if name == "GPU" else {key: held for key, held in row.items() if held != base[key]}
                        for name, row in value["devices"].items()}
    text = json.dumps(value, indent=1, default=float)
    with open(DEFAULT, "w", encoding="utf8") as handle:
        handle.write(text + "\n")


def picture(path: str, answers: Sequence[Answer]) -> None:
    """Predicted over measured throughput, each kind of card and precision in its colour."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    kinds: Dict[str, List[Answer]] = {}
    for one in answers:
        if one.point.fits:
            kinds.setdefault(f"{one.point.card}, {one.point.precision}", []).append(one)
    for kind, mine in sorted(kinds.items()):
        axes.scatter([one.point.measured for one in mine], [one.ratio for one in mine], s=18, label=f"{kind} ({len(mine)})")
    axes.axhspan(0.85, 1.15, alpha=0.15, color="gray")
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set(xscale="log", xlabel="measured, samples/s", ylabel="predicted / measured", ylim=(0.4, 2.5),
             title="Predictions without the model's own runs; gray: 15%")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", help="directory with published measurements")
    parser.add_argument("--fit", action="store_true", help="fit the laws, to all runs and to those of all models but one")
    parser.add_argument("--write", action="store_true", help="write the laws that come with the package (with --fit)")
    parser.add_argument("--megatron", action="store_true", help="also play Table 1 of Megatron-LM (SC21)")
    parser.add_argument("--picture", help="draw predicted over measured into this file")
    given = parser.parse_args(arguments)
    console = Console(width=150)
    points = every_point(given.data, console)
    fit = Fit(points)
    laws = fit.laws() if given.fit else default_laws()
    with_all = left = answered(points, lambda point: laws)
    console.print(table("Fitted" if given.fit else "With the package's laws", COLUMNS, by_series(with_all)))
    tested_layers: Tuple[TestedError, ...] = ()
    if layers(given.data):
        tested_layers = (tested(LAYERS, KIND, "fp32", [1.0 / (1.0 + wrong) for _, wrong in layers(given.data)]),)
        console.print("layers of the planners' profiles against DAPPLE's authors' times: {}".format(
            ", ".join(f"{name} {wrong:+.0%}" for name, wrong in layers(given.data))))
    if given.fit:
        without = {model: fit.laws(model) for model in dict.fromkeys(point.model for point in points)}
        left = answered(points, lambda point: without[point.model])
        console.print(table("Not fitted: laws of all other models", COLUMNS, by_series(left)))
        laws = replace(laws, errors=errors_of(left) + HOPPER + tested_layers + (OWN_OPS,))
        covered = coverage(left)
        for one in errors_of(left):
            inside, apart = covered[one.device, one.precision]
            console.print(f"not fitted, {one.device}, {one.precision}: {one.points} points, mean {one.mean:.1%}, printed range "
                          f"{one.most:.1%}: {inside:.0%} inside; by the range of the other models' runs {apart:.0%}")
    right, count = sum(one.fits == one.point.fits for one in with_all), len(points)
    runs = amp(given.data)
    if not runs:
        console.print("AMP: no data; --data DIRECTORY has none of it")
    for setting in dict.fromkeys(run.setting for run in runs):
        ran = [run for run in runs if run.setting == setting and run.ran]
        order = spearmanr([run.estimate_s for run in ran], [run.measured_s for run in ran]).correlation
        console.print(f"AMP, {setting}: {len(ran)} strategies ran, Spearman {order:.3f}")
    right, count = right + sum(run.ran == run.fits for run in runs), count + len(runs)
    console.print(f"fits memory or not, as it was: {right} of {count} ({right / count:.0%})")
    if given.megatron:
        columns = ["Megatron-LM, GPT on A100", "schedule", "TFLOP/s of a GPU", "predicted", "ratio"]
        console.print(table("Megatron-LM, Table 1; recomputation", columns, megatron_rows()))
    if given.write:
        write(laws)
    if given.picture:
        picture(given.picture, left)


if __name__ == "__main__":
    main()
