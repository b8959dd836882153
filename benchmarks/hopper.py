"""The laws of TensorFlow's kernels on a Hopper GPU: fitted to single ops, and tested on whole steps.

    python -m benchmarks.hopper --data DIRECTORY [--fit] [--write]

``--data``: a directory with ``simulator/h200.json``: ops and training steps that were measured on one H200 (TensorFlow 2.21).
``--fit``: fit the shares of the row ``H200`` to the ops; ``--write``: write them into the package's laws, for Hopper.

Shares, and the cycles of :data:`whale_tf.simulator.laws.OP_BY_OP`, are fitted to ops; ``launch_s`` and ``host_s`` to the steps of
BERT-base in :data:`FITTED`.  Nothing is fitted to the other steps: those of ResNet-50 and GPT-2, and BERT-base's in float32, with
recomputation and with mini-batches of 128.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from rich.console import Console
from scipy.optimize import least_squares

from benchmarks.measure import table
from benchmarks.points import tested
from benchmarks.published import MOST, read, write
from whale_tf.cluster import Cluster
from whale_tf.simulator import Options, Simulation, Simulator, built_in_model, uniform_3d
from whale_tf.simulator.laws import KERNELS, Kernels, Laws, TestedError, as_run, default_laws
from whale_tf.simulator.model_graph import Builder, ModelGraph, Optimizer
from whale_tf.simulator.zoo.transformers import Sizes, of_sizes

CLUSTER = Cluster.parse("H200:1")
PRECISIONS = {"f32": "fp32", "tf32": "tf32", "f16": "fp16", "bf16": "bf16"}
FREE = ("matmul_fp32", "matmul_tf32", "matmul_half", "convolution_fp32", "convolution_tf32", "convolution_half", "backward_tf32",
        "winograd", "depth")
FLOOR_S = 12e-6  # of a product that is measured alone: the host's time to start it, which a step's other kernels hide
ELEMENT_WISE = {"layer_norm": "norm", "softmax": "softmax", "gelu_tanh": "activation", "gelu_erf": "erf", "dropout": "dropout"}


# ---- ops -----------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """An op that was measured: ``flops`` and ``size_bytes`` of one kernel, forward or of one gradient."""

    kind: str
    what: str
    precision: str
    model: ModelGraph
    flops: float
    size_bytes: float
    backward: bool
    measured_s: float

    def predicted_s(self, laws: Laws) -> float:
        kernels, device = Kernels(self.model, laws, False), CLUSTER.devices[0]
        seconds = kernels.seconds(0, self.flops, self.size_bytes, 1.0, self.backward, device)
        if self.model.ops[0].kind not in ("matmul", "convolution"):
            return seconds
        return FLOOR_S + seconds - kernels.kernels(0, self.backward, device) * laws.launch_s(device.type)


def op_rows(found: Mapping[str, Any]) -> List[Row]:
    """What the laws can price: products, convolutions and batch normalisations as TensorFlow lays them out, and large ops on
    elements, whose kernels take longer than the host."""
    rows: List[Row] = []
    forward: Dict[Tuple[str, str, str], float] = {}
    for _, kind, shape, precision, mode, _, least_us in found["ops"]:
        if precision not in PRECISIONS or "xla" in mode or kind == "dropout" and mode != "fwd":
            continue
        seconds, name = least_us * 1e-6, PRECISIONS[precision]
        key = (kind, str(shape), precision)
        if mode == "fwd":
            forward[key] = seconds
        built = op_alone(kind, shape, name)
        if built is None:
            continue
        model, is_backward = as_run(built, name, False), mode in ("dA", "dB", "dX", "dW", "bwd", "fwd+bwd")
        if mode == "fwd+bwd":
            seconds -= forward[key]
        op = model.ops[0]
        sizes = [model.tensors[use.tensor].bytes for use in (*op.inputs, *op.outputs)]
        size_bytes = sum(sizes) + (sizes[0] if is_backward and op.kind not in ("matmul", "convolution") else 0.0)
        rows.append(Row(kind, f"{shape} {mode}", name, model, op.flops, size_bytes, is_backward, seconds))
    return rows


def op_alone(kind: str, shape: Sequence[Any], precision: str) -> Optional[ModelGraph]:
    """A model of the op alone; None: not as TensorFlow runs it in that precision, or too small for the GPU's time to count."""
    b = Builder(kind, 1)
    if kind == "matmul":
        m, n, k = shape
        x = b.input("x", "b f", (m, k))
        b.op("y", "matmul", "b f, f o -> b o", (x, b.parameter("w", "f o", (k, n))))
    elif kind == "conv":
        batch, size, depth, channels, width, stride, layout = shape
        if (layout == "NHWC") != (precision == "fp16"):
            return None
        x = b.input("x", "b y x c", (batch, size, size, depth))
        out = -(-size // stride)
        weight = b.parameter("w", "i j c o", (width, width, depth, channels))
        flops = 2.0 * batch * out * out * depth * channels * width**2
        b.op("y", "convolution", "b y x c, i j c o -> b p q o", (x, weight), flops, sizes={"p": out, "q": out, "o": channels})
    elif kind == "batch_norm":
        batch, size, channels, layout = shape
        if (layout == "NHWC") != (precision == "fp16"):
            return None
        x = b.input("x", "b y x c", (batch, size, size, channels))
        parameters = tuple(b.parameter(name, "c", (channels,)) for name in ("gamma", "beta"))
        b.op("y", "norm", "b y x c, c, c -> b y x c", (x, *parameters), 1.0)
    elif kind in ELEMENT_WISE and np.prod(shape) > 6e6 and precision == "fp32":
        x = b.input("x", " ".join("bchw"[:len(shape)]), tuple(shape))
        if kind == "layer_norm":
            b.layer_norm("y", x)
        else:
            b.pointwise("y", ELEMENT_WISE[kind], x)
    else:
        return None
    return b.graph()


def fit(rows: Sequence[Row], start: Laws) -> Laws:
    """The laws whose relative errors are least over products and convolutions, outliers counting less."""
    used = [row for row in rows if row.model.ops[0].kind in ("matmul", "convolution")]
    known = np.log([getattr(start.of("H200"), name) for name in FREE])

    def laws_of(values: np.ndarray) -> Laws:
        changes = dict(zip(FREE, np.exp(values).tolist()))
        return replace(start, devices=dict(start.devices, **{
            name: replace(start.devices[name], **changes) for name in ("H100", "H200")}))

    def residuals(values: np.ndarray) -> np.ndarray:
        laws = laws_of(values)
        return np.array([np.log(row.predicted_s(laws) / row.measured_s) for row in used])

    most = np.log([{"winograd": 4.0, "depth": 256.0}.get(name, MOST) for name in FREE])
    found = least_squares(residuals, np.minimum(known, most - 0.01), bounds=(np.log(0.1), most), loss="soft_l1", f_scale=0.1,
                          diff_step=0.02, max_nfev=30)
    return laws_of(found.x)


def report_ops(rows: Sequence[Row], laws: Laws, console: Console) -> None:
    groups: Dict[Tuple[str, str, str], List[float]] = {}
    for row in rows:
        key = (row.kind, row.precision, "backward" if row.backward else "forward")
        groups.setdefault(key, []).append(row.predicted_s(laws) / row.measured_s)
    columns = ["op", "precision", "pass", "ops", "median", "mean error"]
    console.print(table("ops on an H200: predicted over measured time", columns, [
        [*key, str(len(ratios)), f"{np.median(ratios):.2f}", f"{np.mean(np.abs(np.array(ratios) - 1)):.0%}"]
        for key, ratios in groups.items()]))


# ---- steps ---------------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A step of ``h200.json``: ``place`` in its list, which tells time and memory; ``kernels``: counted in a profile."""

    place: int
    model: str
    batch: int
    precision: str
    num_micro_batch: int = 1
    recompute: str = "none"
    kernels: Optional[int] = None


BERT = Sizes(12, 768, 12, 128, 30522, pre_norm=False, predicted=20, optimizer="lamb", dropout=False, erf=True)
# Keras writes Adam with elementary ops: twelve kernels for a variable, which together read and write it 27 times
GPT2 = Sizes(12, 768, 12, 512, 50257, tied=False, optimizer=Optimizer("Keras' Adam", 8, 27, 12), dropout=False)
STEPS = (
    Step(0, "bert-base", 32, "fp32"), Step(1, "bert-base", 32, "tf32", kernels=8222),
    Step(3, "bert-base", 32, "tf32", 4, kernels=14141), Step(4, "bert-base", 32, "tf32", recompute="full"),
    Step(5, "bert-base", 32, "fp16", kernels=9420), Step(7, "bert-base", 128, "tf32"), Step(8, "bert-base", 128, "fp16"),
    Step(9, "resnet-50", 64, "fp32"), Step(10, "resnet-50", 64, "tf32", kernels=1699),
    Step(11, "resnet-50", 64, "fp16", kernels=2325), Step(13, "resnet-50", 256, "tf32"), Step(14, "resnet-50", 256, "fp16"),
    Step(15, "gpt-2", 8, "tf32"), Step(18, "gpt-2", 8, "tf32", 4))
FITTED = (1, 3, 5)  # places of the steps to which the times of a kernel's start were fitted


def predicted(step: Step, laws: Laws) -> Simulation:
    size = step.batch // step.num_micro_batch
    sizes = {"bert-base": BERT, "gpt-2": GPT2}.get(step.model)
    model = built_in_model(step.model, size) if sizes is None else of_sizes(step.model, size, sizes)
    strategy = uniform_3d(as_run(model, step.precision, False), 1, num_micro_batch=step.num_micro_batch, recompute=step.recompute)
    return Simulator(CLUSTER, Options(xla=False, laws=laws)).run(strategy)


def report_steps(found: Mapping[str, Any], laws: Laws, console: Console) -> Tuple[TestedError, ...]:
    """Prints steps; returns the errors of throughputs to which nothing was fitted."""
    rows, errors = [], []
    by_precision: Dict[str, List[float]] = {}
    for step in STEPS:
        _, _, _, ms, _, peak_gib = found["steps"][step.place]
        result = predicted(step, laws)
        ratio, gib = 1e3 * result.step_time_s / ms, max(result.peak_memory_bytes) / 2**30
        if step.place not in FITTED:
            errors.append(abs(ratio - 1))
            by_precision.setdefault(step.precision, []).append(1 / ratio)
        how = "recomputed" if step.recompute != "none" else ""
        how = f"{step.num_micro_batch} micro-batches" if step.num_micro_batch > 1 else how
        counted = [""] * 3
        if step.kernels is not None:
            counted = [f"{step.kernels}", f"{result.kernels:.0f}", f"{result.kernels / step.kernels:.2f}"]
        rows.append([f"{step.model}, {step.batch}", step.precision, how, "yes" if step.place in FITTED else "", f"{ms:.1f}",
                     f"{1e3 * result.step_time_s:.1f}", f"{ratio:.2f}", "host" if result.is_limited_by_host else "GPU",
                     *counted, f"{peak_gib:.2f}", f"{gib:.2f}", f"{gib / peak_gib:.2f}"])
    console.print(table("training steps on an H200", [
        "model, mini-batch", "precision", "", "fitted", "ms", "predicted", "ratio", "limit", "kernels", "predicted", "ratio",
        "peak GiB", "predicted", "ratio"], rows))
    console.print(f"not fitted: {len(errors)} steps, mean error {np.mean(errors):.1%}, "
                  f"{sum(error <= 0.15 for error in errors)} within 15%, largest {max(errors):.1%}")
    return tuple(tested(KERNELS, "H200", precision, rates) for precision, rates in by_precision.items())


def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="directory with simulator/h200.json")
    parser.add_argument("--fit", action="store_true", help="fit the row H200 to the ops")
    parser.add_argument("--write", action="store_true", help="write the laws that come with the package (with --fit)")
    given = parser.parse_args(arguments)
    console, laws, found = Console(width=170), default_laws(), read(given.data, "simulator", "h200.json")
    if found is None:
        parser.error(f"{given.data} has no simulator/h200.json")
    rows = op_rows(found)
    if given.fit:
        laws = fit(rows, laws)
        console.print("fitted: " + ", ".join(f"{name} {getattr(laws.of('H200'), name):.4g}" for name in FREE))
    report_ops(rows, laws, console)
    errors = report_steps(found, laws, console)
    if given.write:
        others = tuple(one for one in laws.errors if one.device != "H200")
        write(replace(laws, errors=others + errors))


if __name__ == "__main__":
    main()
