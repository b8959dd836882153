"""One GPU: measured training steps beside what the laws of TensorFlow's kernels predict, and what plans cost there.

    python -m benchmarks.one_gpu [--only laws,plans]

``laws``: BERT-base (128 tokens, LAMB) and ResNet-50 as TensorFlow runs them; nothing was fitted to these runs. ``plans``:
BERT-base under plans of one device, with what each keeps in the GPU's memory.
"""
from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import numpy as np
from rich.console import Console

from benchmarks.measure import Result, Spec, ask, chosen, main, table, wall_seconds

STEPS, WARMUP = 20, 5
BATCHES = {"bert-base": (32, 128), "resnet-50": (64, 256)}


class Way(NamedTuple):
    """How TensorFlow computes: the simulator's name of the precision, whale_tf's ``amp.dtype``, XLA."""

    precision: str
    amp: str = "none"
    xla: bool = False


WAYS = (Way("fp32"), Way("tf32"), Way("fp16", "float16"), Way("tf32", xla=True), Way("fp16", "float16", True))
PLANS: Dict[str, Dict[str, Any]] = {
    "one device": {}, "4 micro-batches, inlined": {"num_micro_batch": 4, "emit": "inline"},
    "4 micro-batches, called": {"num_micro_batch": 4, "emit": "call"}, "recomputed": {"recompute": "full"},
    "states on the host": {"offload": "states"}, "float16": {"amp": "float16"}, "bfloat16": {"amp": "bfloat16"}}


# -- in the process that measures --------------------------------------------------------------------------------------


def build(name: str, batch: int, is_fed: bool) -> Tuple[Any, Dict[Any, np.ndarray]]:
    """The training op of a model, and what to feed. Without ``is_fed`` the mini-batch is a constant on the GPU, because a step
    would otherwise wait for it (77 MB of images)."""
    import tensorflow.compat.v1 as tf

    from models import bert, optimizers, resnet

    random = np.random.RandomState(0)
    if name == "bert-base":
        config: Any = bert.BertConfig(layers=12, hidden=768, heads=12, ffn=3072, vocab=30522, seq=128, predictions=20,
                                      next_sentence=True)
        module: Any = bert
        optimizer = optimizers.Lamb(1e-4)
    else:
        config, module = resnet.ResnetConfig.resnet50(), resnet
        optimizer = tf.train.MomentumOptimizer(0.01, 0.9)
    inputs = module.inputs(config, batch)
    values = {tensor: (random.rand(*tensor.shape.as_list()) if tensor.dtype.is_floating
                       else random.randint(0, 2, tensor.shape)).astype(tensor.dtype.as_numpy_dtype) for tensor in inputs}
    if not is_fed:
        inputs = type(inputs)(*(tf.constant(values[tensor]) for tensor in inputs))
        values = {}
    loss = module.build(inputs, config).loss
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        update = optimizer.minimize(loss)
    with tf.control_dependencies([update]):
        return tf.identity(loss), values


def measure(build_step: Callable[[], Tuple[Any, Dict[Any, np.ndarray]]], xla: bool = False) -> Dict[str, float]:
    """Median seconds of a step, and the most bytes that it held on the GPU, variables included."""
    import tensorflow as tf

    with tf.Graph().as_default():
        step, feed = build_step()
        config = tf.compat.v1.ConfigProto(gpu_options=tf.compat.v1.GPUOptions(allow_growth=True))
        if xla:
            config.graph_options.optimizer_options.global_jit_level = tf.compat.v1.OptimizerOptions.ON_1
        with tf.compat.v1.Session(config=config) as session:
            session.run(tf.compat.v1.global_variables_initializer())

            def one() -> Any:
                return session.run(step, feed)

            wall_seconds(one, WARMUP, 0)
            tf.config.experimental.reset_memory_stats("GPU:0")
            took = wall_seconds(one, STEPS, 0)
            peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    return {"step_s": statistics.median(took), "peak_bytes": peak}


def laws_worker(spec: Spec) -> Result:
    """A model with one mini-batch, computed in one way: measured, or why not."""
    import tensorflow as tf

    import whale_tf as wh

    way = WAYS[spec["way"]]
    tf.config.experimental.enable_tensor_float_32_execution(way.precision != "fp32")
    if way.amp != "none":
        wh.init({"amp": way.amp}, cluster="gpu:1")
    try:
        return measure(lambda: build(spec["model"], spec["batch"], False), way.xla)
    except (tf.errors.OpError, wh.WhaleError) as error:
        return {"error": str(error)[:300]}


def plans_worker(spec: Spec) -> Result:
    """BERT-base without whale_tf, and under every plan."""
    import tensorflow as tf

    import whale_tf as wh

    tf.config.experimental.enable_tensor_float_32_execution(True)
    found: Result = {"without whale_tf": measure(lambda: build("bert-base", 32, True))}
    for name, config in PLANS.items():
        wh.init(config, cluster="gpu:1")
        try:
            found[name] = measure(lambda: build("bert-base", 32, True))
            plan = wh.current_plan()
            if plan is not None and plan.estimate.peak_memory_bytes:
                found[name]["estimated_bytes"] = plan.estimate.peak_memory_bytes[0]
        except (tf.errors.OpError, wh.WhaleError) as error:
            found[name] = {"error": str(error)[:300]}
        finally:
            wh.shutdown()
    return found


def worker(spec: Spec) -> Result:
    return laws_worker(spec) if spec["section"] == "laws" else plans_worker(spec)


# -- in the process that asks ------------------------------------------------------------------------------------------


def predicted_s(name: str, batch: int, way: Way) -> float:
    """The step on this machine's GPU by the package's laws."""
    from whale_tf.cluster import Cluster
    from whale_tf.simulator import Options, Simulator, built_in_model, uniform_3d
    from whale_tf.simulator.laws import as_run

    strategy = uniform_3d(as_run(built_in_model(name, batch), way.precision, way.xla), 1)
    return Simulator(Cluster.parse("gpu:1"), Options(xla=way.xla)).run(strategy).step_time_s


def laws(console: Console) -> None:
    rows, errors = [], []
    for model, batch in ((model, batch) for model, batches in BATCHES.items() for batch in batches):
        for number, way in enumerate(WAYS):
            one = ask(__file__, {"section": "laws", "model": model, "batch": batch, "way": number})
            title = [f"{model}, {batch}", way.precision + (", XLA" if way.xla else "")]
            if "error" in one:
                console.print(f"{' '.join(title)}: {one['error']}", highlight=False, markup=False)
                continue
            expected = predicted_s(model, batch, way)
            errors.append(abs(one["step_s"] / expected - 1))  # of samples per second, as in benchmarks.published
            rows.append(title + [f"{1e3 * one['step_s']:.1f}", f"{1e3 * expected:.1f}", f"{one['step_s'] / expected:.2f}",
                                 f"{batch / one['step_s']:.0f}", f"{one['peak_bytes'] / 2 ** 30:.2f}"])
            print(rows[-1], file=sys.stderr, flush=True)
    columns = ["model, mini-batch", "precision", "measured, ms", "predicted, ms", "ratio", "samples/s", "peak, GiB"]
    console.print(table("a step on one GPU", columns, rows))
    if errors:
        console.print(f"throughput: mean error {np.mean(errors):.1%}, largest {max(errors):.1%} of {len(errors)}")


def plans(console: Console) -> None:
    found = ask(__file__, {"section": "plans", "model": "bert-base"})
    base = found["without whale_tf"]["step_s"]
    rows: List[List[str]] = []
    for name, one in found.items():
        if "error" in one:
            console.print(f"{name}: {one['error']}", highlight=False, markup=False)
            continue
        estimated = one.get("estimated_bytes")
        rows.append([name, f"{1e3 * one['step_s']:.1f}", f"{one['step_s'] / base:.2f}", f"{one['peak_bytes'] / 2 ** 30:.2f}",
                     "" if estimated is None else f"{estimated / 2 ** 30:.2f}"])
    console.print(table("BERT-base, 32 sequences of 128 tokens, TF32", ["plan", "step, ms", "over TensorFlow's", "peak, GiB",
                                                                      "estimated, GiB"], rows))


SECTIONS: Dict[str, Callable[[Console], None]] = {"laws": laws, "plans": plans}


def report(console: Console) -> None:
    import tensorflow as tf

    parser = argparse.ArgumentParser(description="measured and predicted steps on one GPU")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between them")
    sections = chosen(parser, SECTIONS, sys.argv[1:])
    if not tf.config.list_physical_devices("GPU"):
        parser.error("TensorFlow sees no GPU on this machine")
    for name in sections:
        SECTIONS[name](console)


if __name__ == "__main__":
    main(__file__, worker, report)
