"""Hugging Face's TensorFlow models under ``wh.split``, and their optimizer under ZeRO, offload and a pipeline.

    python -m benchmarks.hugging_face          # all rows; needs TensorFlow 2.15 and pip install transformers tf-keras
    python -m benchmarks.hugging_face T5       # those whose names contain a word

The models are small, random and without dropout, and train for three steps: in float64, or in float32 with the optimizer, whose
schedule has no other type.  Each row is compared with the local run from the same seed.  `fixed` is how much of what devices
exchange does not grow with the number of examples: if a step sent weights, they would be in it.  (T5 takes float32 for its
position biases and its loss, whatever the type of the model.)
"""
from __future__ import annotations

import os
import re
import sys
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
from rich.console import Console

from benchmarks.measure import Result, Spec, ask, main, table

BATCH, LENGTH, STEPS = 8, 16, 3
WORDS, HIDDEN, HEADS, LAYERS = 128, 32, 4, 2
EPSILON = 1e-4  # the biases of attention's keys have gradients of rounding alone, which Adam would make steps of any size of
PLANS: Dict[str, Dict[str, Any]] = {
    "zero v1": {"zero": "v1"}, "zero v2": {"zero": "v2"}, "zero v3": {"zero": "v3"}, "offload states": {"offload": "states"},
    "offload v0": {"offload": "v0"}, "stage": {"variables": "stage", "num_task_graph": 2, "num_micro_batch": 2}}
ROWS: List[Tuple[str, str]] = [(model, f"split({count})") for model in ("TFBert", "TFGPT2", "TFT5") for count in (2, 4)]
ROWS += [("TFBert", plan) for plan in PLANS]


def bert() -> Any:
    from transformers import BertConfig, TFBertForMaskedLM

    return TFBertForMaskedLM(BertConfig(
        vocab_size=WORDS, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=4 * HIDDEN,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def gpt2() -> Any:
    from transformers import GPT2Config, TFGPT2LMHeadModel

    return TFGPT2LMHeadModel(GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0))


def t5() -> Any:
    from transformers import T5Config, TFT5ForConditionalGeneration

    return TFT5ForConditionalGeneration(T5Config(
        vocab_size=WORDS, d_model=HIDDEN, d_kv=HIDDEN // HEADS, d_ff=4 * HIDDEN, num_layers=LAYERS, num_heads=HEADS,
        dropout_rate=0.0, decoder_start_token_id=0))


MODELS: Dict[str, Callable[[], Any]] = {"TFBert": bert, "TFGPT2": gpt2, "TFT5": t5}


def optimizer(plan: str) -> Any:
    """AdamWeightDecay, or gradient descent for ``wh.split``, whose exchange is to be that of the model alone."""
    import tensorflow as tf
    from transformers import create_optimizer

    if plan not in PLANS:
        return tf.keras.optimizers.SGD(0.1)
    return create_optimizer(1e-3, num_train_steps=20, num_warmup_steps=2, weight_decay_rate=0.01, adam_epsilon=EPSILON)[0]


def trained(spec: Spec, batch: int = BATCH) -> Result:
    """Losses, and the values of all variables, after some steps."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(0)
    model = MODELS[spec["model"]]()
    model.build_in_name_scope()
    model.compile(optimizer(spec["plan"]))
    ids = np.random.RandomState(0).randint(1, WORDS, [STEPS * batch, LENGTH])
    data = tf.data.Dataset.from_tensor_slices({"input_ids": ids, "labels": ids[:, ::-1].copy()}).batch(batch, drop_remainder=True)
    losses: List[float] = []
    model.fit(data, verbose=0, callbacks=[tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: losses.append(float(np.mean(logs["loss"]))))])
    weights = model.get_weights()
    return {"losses": losses, "weights": np.concatenate([each.ravel() for each in weights]).tolist(),
            "bytes": sum(each.nbytes for each in weights)}


def worker(spec: Spec) -> Result:
    os.environ["TF_USE_LEGACY_KERAS"] = "1"  # transformers' models are Keras 2's
    import tensorflow as tf

    import whale_tf as wh

    tf.keras.backend.set_floatx("float32" if spec["plan"] in PLANS else "float64")
    split = re.fullmatch(r"split\((\d)\)", spec["plan"])
    if not spec["parallel"]:
        return trained(spec)
    wh.init({} if split else PLANS[spec["plan"]], cluster=f"cpu:{split.group(1) if split else 2}")
    if split:
        wh.set_default_strategy(wh.split(int(split.group(1))))
    found = trained(spec)
    explained = " ".join(wh.explain().split())
    plan = wh.current_plan()
    assert plan is not None
    found["stages"] = len(plan.task_graphs)
    if split:
        parts = re.search(r"\(([\d.]+)% are in parts", explained)
        found["in parts"], found["sent"] = float(parts.group(1)) if parts else 0.0, exchanged()
        trained(spec, 2 * BATCH)
        found["fixed"] = 2 * found["sent"] - exchanged()
    return found


def exchanged() -> float:
    """Bytes of the last step, the sum of the table of sharding patterns."""
    import whale_tf as wh

    units = {"B": 1, "KiB": 2**10, "MiB": 2**20}
    return sum(float(number) * units[unit] for number, unit in re.findall(
        r"^│[^│]*│[^│]*│ +([\d.]+) (B|KiB|MiB) +│[^│]*│$", wh.explain(), re.MULTILINE))


def report(console: Console) -> None:
    rows = []
    for model, plan in ROWS:
        if any(word in f"{model} {plan}" for word in sys.argv[1:] or [""]):
            local, ours = (ask(__file__, {"model": model, "plan": plan, "parallel": parallel}) for parallel in (False, True))
            far = [float(np.abs(np.subtract(ours[key], local[key])).max()) for key in ("losses", "weights")]
            of_split = ["", "", ""]
            if "sent" in ours:
                of_split = [f"{ours['in parts']:.3g}%", *(f"{ours[key] / 2**10:.0f} KiB" for key in ("sent", "fixed"))]
            rows.append([model, plan, str(ours["stages"]), f"{ours['bytes'] / 2**10:.0f} KiB", *of_split,
                         f"{local['losses'][-1]:.6f}", *(f"{each:.1e}" for each in far)])
            console.print(" ".join(rows[-1]), highlight=False)
    console.print(table(f"{LAYERS} layers of {HIDDEN}, {BATCH} x {LENGTH} words, {STEPS} steps",
                        ["model", "plan", "TaskGraphs", "parameters", "in parts", "exchanged", "fixed", "last loss",
                         "losses differ", "weights differ"], rows))


if __name__ == "__main__":
    main(__file__, worker, report)
