"""KerasHub's backbones under the layout maps that KerasHub ships, beside the local step and beside JAX.

    python -m benchmarks.keras_hub             # all models; needs TensorFlow 2.21, and pip install keras-hub jax
    python -m benchmarks.keras_hub Llama       # those whose names contain a word

The models are small and random, with a tied head, and train for five steps in float64 (mixtures of experts in float32, which
KerasHub's have inside) on a mesh of 2 x 4: the same script on one device, with ``wh.init`` on 8 logical CPU devices, and on JAX
with 8 CPU devices.  The maps divide variables over both axes; ``zero: "v3"`` keeps them along the batch axis.  Bytes are those of
variables and of Adam's moments during steps.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Dict, List

import numpy as np

WORDS, EXAMPLES, LENGTH, STEPS = 64, 8, 12, 5
MESH = (2, 4)
DENSE = {"vocabulary_size": WORDS, "num_layers": 2, "hidden_dim": 32, "intermediate_dim": 48, "num_query_heads": 8,
         "num_key_value_heads": 4}
EXPERTS = {**DENSE, "moe_intermediate_dim": 16, "num_experts": 4}
MODELS: Dict[str, Dict[str, Any]] = {
    "GemmaBackbone": {**DENSE, "head_dim": 8, "intermediate_dim": 96}, "LlamaBackbone": DENSE, "Llama3Backbone": DENSE,
    "QwenBackbone": DENSE, "QwenMoeBackbone": {**EXPERTS, "shared_expert_intermediate_dim": 16, "top_k": 2},
    "Qwen3MoeBackbone": {**EXPERTS, "num_experts_per_tok": 2, "head_dim": 8}}
EPSILON = 1e-3  # of Adam: gradients of rounding alone would otherwise become steps of any size


def measure(way: str, name: str) -> Dict[str, Any]:
    """Losses of the steps, variables after them, and bytes on each device; ``way`` is local, whale or jax."""
    if way == "whale":
        import whale_tf as wh
        wh.init(cluster=f"cpu:{MESH[0] * MESH[1]}")
    import keras
    import keras_hub

    keras.config.set_floatx("float32" if "Moe" in name else "float64")
    kind = getattr(keras_hub.models, name)
    if way != "local":
        api = keras.distribution
        mesh = api.DeviceMesh(MESH, ("batch", "model"), api.list_devices())
        api.set_distribution(api.ModelParallel(layout_map=kind.get_layout_map(mesh), batch_dim_name="batch"))
    backbone = kind(**MODELS[name])
    model = keras.Model(backbone.input, backbone.token_embedding(backbone(backbone.input), reverse=True))
    rng = np.random.RandomState(0)
    for variable in sorted(model.trainable_variables, key=lambda one: one.path):
        variable.assign(rng.randn(*variable.shape) * 0.15 + (len(variable.shape) == 1 and name != "GemmaBackbone"))
    model.compile(keras.optimizers.Adam(0.01, epsilon=EPSILON), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ids, losses = rng.randint(1, WORDS, (STEPS, EXAMPLES, LENGTH + 1)), []
    for batch in ids:
        x = {"token_ids": batch[:, :-1], "padding_mask": np.ones((EXAMPLES, LENGTH), "int32")}
        losses.append(float(model.train_on_batch(x, batch[:, 1:])))
    sizes = [0] * (MESH[0] * MESH[1])
    for variable in model.trainable_variables + model.optimizer.variables if way != "local" else ():
        for device, size in (_of_jax if way == "jax" else _of_tensorflow)(variable._value):
            sizes[device] += size
    return {"losses": losses, "sizes": sizes, "weights": {one.path: one.numpy().tolist() for one in model.trainable_variables}}


def _of_jax(value: Any) -> List[Any]:
    return [(shard.device.id, shard.data.nbytes) for shard in value.addressable_shards]


def _of_tensorflow(value: Any) -> List[Any]:
    """(device, bytes) of a variable's parts, or of the whole."""
    record = vars(value).get("_whale_parts")
    parts = [value] if record is None or record.held is None else record.parts[record.held]
    return [(int(part.device.rpartition(":")[2]), int(np.prod(part.shape)) * part.dtype.size) for part in parts]


def ask(way: str, name: str) -> Dict[str, Any]:
    """:func:`measure` in a process of its own."""
    environment = {**os.environ, "KERAS_BACKEND": "jax" if way == "jax" else "tensorflow", "JAX_ENABLE_X64": "1",
                   "XLA_FLAGS": f"--xla_force_host_platform_device_count={MESH[0] * MESH[1]}", "TF_CPP_MIN_LOG_LEVEL": "3"}
    answer = subprocess.run([sys.executable, "-m", "benchmarks.keras_hub", way, name], env=environment, check=True,
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    found: Dict[str, Any] = json.loads(answer.splitlines()[-1])
    return found


def differences(one: Dict[str, Any], other: Dict[str, Any]) -> str:
    """The largest difference of losses, and of variables relative to their norms."""
    losses = float(np.max(np.abs(np.subtract(one["losses"], other["losses"]))))
    pairs = [(np.asarray(value), np.asarray(other["weights"][path])) for path, value in one["weights"].items()]
    weights = max(float(np.linalg.norm(a - b) / max(np.linalg.norm(a), 1e-12)) for a, b in pairs)
    return f"{losses:.1e} | {weights:.1e}"


def main() -> None:
    if len(sys.argv) == 3:
        print(json.dumps(measure(*sys.argv[1:])))
        return
    print("| model | last loss | local: losses differ | weights differ | JAX: losses differ | weights differ | KiB on devices | "
          "JAX |\n|---|---|---|---|---|---|---|---|")
    for name in MODELS:
        if len(sys.argv) < 2 or sys.argv[1] in name:
            local, whale, jax = (ask(way, name) for way in ("local", "whale", "jax"))
            sizes, most = sorted(size / 1024 for size in whale["sizes"]), max(jax["sizes"]) / 1024
            print(f"| {name} | {whale['losses'][-1]:.6f} | {differences(local, whale)} | {differences(jax, whale)} | "
                  f"{sizes[0]:.1f} to {sizes[-1]:.1f} | {most:.1f} |", flush=True)


if __name__ == "__main__":
    main()
