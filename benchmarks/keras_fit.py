"""`fit` under two CPU devices beside MirroredStrategy, `fit` on one device with and without whale_tf, and the time of a rewrite.

    python -m benchmarks.keras_fit              # all
    python -m benchmarks.keras_fit --only fit   # or: rewrite

The perceptron and the encoder have the sizes of `benchmarks.workloads`. All systems start alike and see the same examples, so
their losses agree; two devices take mini-batches twice as large as one. The rewrite is of an encoder of 12 layers under 2 stages
and 4 micro-batches: CPU seconds of the trace of its training step, with and without whale_tf, which includes the rewrite.
"""
from __future__ import annotations

import contextlib
import statistics
import sys
import time
from typing import Any, List

import numpy as np
from rich.console import Console

from benchmarks.measure import Result, Spec, main, rounds, table

SYSTEMS = ("fit", "fit, whale_tf", "fit of 2, whale_tf", "fit of 2, MirroredStrategy")
MODELS = {"mlp": 256, "encoder": 32}  # examples of a mini-batch for each device
STEPS = {"mlp": 30, "encoder": 10}
ROUNDS = 3
LAYERS = 12


def mlp() -> Any:
    import keras
    from keras import layers

    blocks = [layers.Dense(1024, activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input((1024,)), *blocks, layers.Dense(10)])


def encoder(blocks: int = 4, width: int = 256, length: int = 64, stages: int = 1) -> Any:
    """In one or several pipeline stages."""
    import keras
    from keras import layers

    import whale_tf as wh

    x = inputs = keras.Input((length, width))
    for stage in range(stages):
        with wh.replicate(1) if stages > 1 else contextlib.nullcontext():
            for _ in range(blocks // stages):
                x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, width // 4)(x, x))
                hidden = layers.Dense(4 * width, activation="gelu")(x)
                x = layers.LayerNormalization()(x + layers.Dense(width)(hidden))
            if stage == stages - 1:
                outputs = layers.Dense(10)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, outputs)


def worker(spec: Spec) -> Result:
    return traced(spec) if spec["what"] == "rewrite" else fitted(spec)


def fitted(spec: Spec) -> Result:
    """Wall and CPU seconds of a step of ``fit``, from the end of one to the end of the next: medians."""
    import tensorflow as tf

    import whale_tf as wh

    system, devices = spec["system"], 2 if " 2" in spec["system"] else 1
    strategy: Any = contextlib.nullcontext()
    if "whale_tf" in system:
        wh.init(cluster=f"cpu:{devices}")
    elif devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
        strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(devices)]).scope()

    import keras

    class Clock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.wall: List[float] = []
            self.cpu: List[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.wall.append(time.perf_counter())
            self.cpu.append(time.process_time())

    keras.utils.set_random_seed(0)
    with strategy:
        model = mlp() if spec["model"] == "mlp" else encoder()
        model.compile(keras.optimizers.SGD(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    examples, random = MODELS[spec["model"]] * devices, np.random.RandomState(0)
    x = random.randn(examples, *model.input_shape[1:]).astype("float32")
    steps = STEPS[spec["model"]] + 4
    data = tf.data.Dataset.from_tensors((x, random.randint(0, 10, examples))).repeat(steps)
    clock = Clock()
    history = model.fit(data, verbose=0, callbacks=[clock]).history
    median = {name: statistics.median(np.diff(times)[3:]) for name, times in (("wall_s", clock.wall), ("cpu_s", clock.cpu))}
    return {**median, "loss": history["loss"][0]}


def traced(spec: Spec) -> Result:
    """CPU seconds of the trace of a training step (with its rewrite), and ops of the traced graph."""
    import tensorflow as tf

    import whale_tf as wh

    divided = spec["system"] == "whale_tf"
    if divided:
        wh.init({"num_micro_batch": 4}, cluster="cpu:2")

    import keras

    model = encoder(LAYERS, width=32, length=16, stages=2 if divided else 1)
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = entropy(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    start = time.process_time()
    concrete = step.get_concrete_function(tf.TensorSpec([32, 16, 32]), tf.TensorSpec([32], tf.int32))
    return {"cpu_s": time.process_time() - start, "ops": len(concrete.graph.get_operations())}


def report_fit(console: Console) -> None:
    for model, examples in MODELS.items():
        specs = [{"what": "fit", "system": system, "model": model} for system in SYSTEMS]
        found = dict(zip(SYSTEMS, rounds(__file__, specs, ROUNDS)))
        rows = []
        for name, result in found.items():
            beside = found[SYSTEMS[0] if name in SYSTEMS[:2] else SYSTEMS[3]]
            rows.append([name, *[f"{1e3 * result[key]:.1f}" for key in ("cpu_s", "wall_s")],
                         *[f"{result[key] / beside[key]:.3f}" for key in ("cpu_s", "wall_s")], f"{result['loss']:.4f}"])
        console.print(table(f"{model}, {examples} examples for each device: ms of a step; ratios to plain fit, or to "
                            "MirroredStrategy", ["system", "CPU", "wall", "CPU ratio", "wall ratio", "loss"], rows))


def report_rewrite(console: Console) -> None:
    local, ours = rounds(__file__, [{"what": "rewrite", "system": system} for system in ("local", "whale_tf")], ROUNDS)
    rows = [[name, f"{result['ops']:,.0f}", f"{result['cpu_s']:.2f}"] for name, result in (("local", local), ("whale_tf", ours))]
    rows.append(["difference", f"{ours['ops'] - local['ops']:,.0f}", f"{ours['cpu_s'] - local['cpu_s']:.2f}"])
    console.print(table(f"trace of the training step of an encoder of {LAYERS} layers, 2 stages x 4 micro-batches",
                        ["system", "ops", "CPU s"], rows))


def report(console: Console) -> None:
    only = sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else ""
    for name, part in (("fit", report_fit), ("rewrite", report_rewrite)):
        if only in ("", name):
            part(console)


if __name__ == "__main__":
    main(__file__, worker, report)
