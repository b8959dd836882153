"""KerasHub's backbones under the layout maps that KerasHub ships, beside the local step and beside JAX.

    python -m benchmarks.keras_hub             # all models; needs TensorFlow 2.21, and pip install keras-hub jax
    python -m benchmarks.keras_hub Llama       # those whose names contain a word

The models are small and random, with a tied head, and train for five steps in float64 (mixtures of experts in float32, which
KerasHub's have inside) on a mesh of 2 x 4: the same script on one device, with ``wh.init`` on 8 logical CPU devices, and on JAX
with 8 CPU devices.  KerasHub ships maps for six of the backbones; the others have that of one with variables of the same names.
The maps divide variables over both axes.  Bytes are those of variables and of Adam's moments during steps: of those that a map
divides, on each device, and of the others.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Dict, List, NamedTuple, Tuple

import numpy as np

WORDS, EXAMPLES, LENGTH, STEPS = 64, 8, 12, 5
MESH = (2, 4)
DENSE = {"vocabulary_size": WORDS, "num_layers": 2, "hidden_dim": 32, "intermediate_dim": 48, "num_query_heads": 8,
         "num_key_value_heads": 4}
EXPERTS = {**DENSE, "moe_intermediate_dim": 16, "num_experts": 4}
class Case(NamedTuple):
    """A backbone's arguments, the backbone that ships its layout map, and the rank of LoRA; 0: all variables train."""

    arguments: Dict[str, Any]
    map_of: str = ""
    rank: int = 0


GEMMA = {**DENSE, "head_dim": 8, "intermediate_dim": 96}
MODELS: Dict[str, Case] = {
    "GemmaBackbone": Case(GEMMA), "LlamaBackbone": Case(DENSE), "Llama3Backbone": Case(DENSE), "QwenBackbone": Case(DENSE),
    "QwenMoeBackbone": Case({**EXPERTS, "shared_expert_intermediate_dim": 16, "top_k": 2}),
    "Qwen3MoeBackbone": Case({**EXPERTS, "num_experts_per_tok": 2, "head_dim": 8}),
    "Gemma3Backbone": Case({**GEMMA, "image_size": 16}, "GemmaBackbone"), "MistralBackbone": Case(DENSE, "LlamaBackbone"),
    "Qwen3Backbone": Case({**DENSE, "head_dim": 8}, "QwenBackbone"), "Phi3Backbone": Case(DENSE, "LlamaBackbone"),
    "GemmaBackbone/LoRA": Case(GEMMA, rank=4)}
EPSILON = 1e-3  # of Adam: gradients of rounding alone would otherwise become steps of any size


def measure(way: str, name: str) -> Dict[str, Any]:
    """Losses of the steps, variables after them, and bytes on each device; ``way`` is local, whale or jax."""
    if way == "whale":
        import whale_tf as wh
        wh.init(cluster=f"cpu:{MESH[0] * MESH[1]}")
    import keras
    import keras_hub

    keras.config.set_floatx("float32" if "Moe" in name else "float64")
    case, kind_name = MODELS[name], name.partition("/")[0]
    kind, map_of = (getattr(keras_hub.models, one) for one in (kind_name, case.map_of or kind_name))
    if way != "local":
        api = keras.distribution
        mesh = api.DeviceMesh(MESH, ("batch", "model"), api.list_devices())
        api.set_distribution(api.ModelParallel(layout_map=map_of.get_layout_map(mesh), batch_dim_name="batch"))
    backbone = kind(**case.arguments)
    if case.rank:
        backbone.enable_lora(case.rank)
    model = keras.Model(backbone.input, backbone.token_embedding(backbone(backbone.input), reverse=True))
    rng = np.random.RandomState(0)
    for variable in sorted(model.variables, key=lambda one: one.path):
        if variable.dtype.startswith("float"):
            variable.assign(rng.randn(*variable.shape) * 0.15 + (len(variable.shape) == 1 and "Gemma" not in name))
    model.compile(keras.optimizers.Adam(0.01, epsilon=EPSILON), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ids, losses = rng.randint(1, WORDS, (STEPS, EXAMPLES, LENGTH + 1)), []
    for batch in ids:
        x = {"token_ids": batch[:, :-1], "padding_mask": np.ones((EXAMPLES, LENGTH), "int32")}
        losses.append(float(model.train_on_batch(x, batch[:, 1:])))
    divided, whole = ([0] * (MESH[0] * MESH[1]) for _ in range(2))
    for variable in model.variables + model.optimizer.variables if way != "local" else ():
        parts, is_divided = (_of_jax if way == "jax" else _of_tensorflow)(variable._value)
        for device, size in parts:
            (divided if is_divided else whole)[device] += size
    return {"losses": losses, "divided": divided, "whole": whole,
            "weights": {one.path: one.numpy().tolist() for one in model.trainable_variables}}


def _of_jax(value: Any) -> Tuple[List[Tuple[int, int]], bool]:
    return [(shard.device.id, shard.data.nbytes) for shard in value.addressable_shards], not value.sharding.is_fully_replicated


def _of_tensorflow(value: Any) -> Tuple[List[Tuple[int, int]], bool]:
    """(device, bytes) of a variable's parts, or of the whole; whether it is in parts."""
    record = vars(value).get("_whale_parts")
    parts = [value] if record is None or record.held is None else record.parts[record.held]
    return [(int(part.device.rpartition(":")[2]), int(np.prod(part.shape)) * part.dtype.size) for part in parts], len(parts) > 1


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
    print("| model | last loss | local: losses differ | weights differ | JAX: losses differ | weights differ | KiB of divided "
          "variables on each device | JAX | KiB of others | JAX, on each device |\n|---|---|---|---|---|---|---|---|---|---|")
    for name in MODELS:
        if len(sys.argv) < 2 or sys.argv[1] in name:
            local, whale, jax = (ask(way, name) for way in ("local", "whale", "jax"))
            print(f"| {name} | {whale['losses'][-1]:.6f} | {differences(local, whale)} | {differences(jax, whale)} | "
                  f"{_range(whale['divided'])} | {_range(jax['divided'])} | {sum(whale['whole']) / 1024:.1f} | "
                  f"{_range(jax['whole'])} |", flush=True)


def _range(sizes: List[int]) -> str:
    least, most = min(sizes) / 1024, max(sizes) / 1024
    return f"{least:.2f}" if least == most else f"{least:.2f} to {most:.2f}"


if __name__ == "__main__":
    main()
