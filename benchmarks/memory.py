"""The memory a plan is estimated to need, beside the measured peak of every device.

    python -m benchmarks.memory

Models run on logical CPU devices; the third step is traced, and its allocations are added up over time. Variables are not of
the trace, so their bytes are added to the measured side. Each pair has a process of its own.
"""
from __future__ import annotations

import collections
from typing import Any, Dict, List, Tuple

import numpy as np
from rich.console import Console

from benchmarks.measure import Result, Spec, ask, main, table

DATA_PARALLEL = {"num_task_graph": 1, "num_micro_batch": 1}
TWO, FOUR = ({"num_task_graph": stages, "num_micro_batch": 4} for stages in (2, 4))
PAIRS: Tuple[Tuple[str, str, Dict[str, Any], int], ...] = (
    ("mlp", "data parallel", DATA_PARALLEL, 2), ("mlp", "2 stages", TWO, 2), ("gpt2", "data parallel", DATA_PARALLEL, 2),
    ("gpt2", "2 stages", TWO, 2), ("gpt2", "4 stages", FOUR, 4), ("bert", "data parallel", DATA_PARALLEL, 2),
    ("bert", "2 stages", TWO, 2), ("vgg", "data parallel", DATA_PARALLEL, 2))


def build(name: str) -> Tuple[Any, Any]:
    """Inputs and loss; models large enough that activations, not a step's bookkeeping, fill the memory."""
    from models import bert, gpt2, mlp, resnet, vgg

    if name == "mlp":
        config: Any = mlp.MlpConfig(hidden=256)
        return _built(mlp, config, 512)
    if name == "gpt2":
        return _built(gpt2, gpt2.Gpt2Config(layers=4, hidden=64, heads=4, seq=64), 32)
    if name == "bert":
        return _built(bert, bert.BertConfig(layers=4, hidden=64, heads=4, ffn=256, seq=64, predictions=8), 32)
    if name == "resnet":
        return _built(resnet, resnet.ResnetConfig.digits(), 64)
    return _built(vgg, vgg.VggConfig.tiny(), 512)


def _built(module: Any, config: Any, batch: int) -> Tuple[Any, Any]:
    inputs = module.inputs(config, batch)
    return inputs, module.build(inputs, config).loss


def measure(name: str, config: Dict[str, Any], devices: int) -> Dict[str, Any]:
    """Estimated and measured bytes of each device."""
    import tensorflow.compat.v1 as tf

    import whale_tf as wh

    tf.disable_eager_execution()
    wh.init(config, cluster=f"cpu:{devices}")
    inputs, loss = build(name)
    update = tf.train.MomentumOptimizer(0.01, 0.9).minimize(loss)
    feed = random_feed(inputs)
    metadata = tf.RunMetadata()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for _ in range(2):
            session.run([loss, update], feed)
        session.run([loss, update], feed, tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), metadata)
    plan = wh.current_plan()
    assert plan is not None
    sizes = {v.op.name: v.shape.num_elements() * v.dtype.base_dtype.size for v in tf.global_variables()}
    held = _variable_bytes(plan, sizes)
    measured = [peak + size for peak, size in zip(peaks(metadata, devices), held)]
    return {"estimated": list(plan.estimate.peak_memory_bytes), "measured": measured}


def random_feed(inputs: Any) -> Dict[Any, np.ndarray]:
    """Numbers for the inputs of a model that it reads."""
    random = np.random.RandomState(0)
    return {tensor: random.rand(*tensor.shape.as_list()) if tensor.dtype.is_floating else random.randint(0, 2, tensor.shape)
            for tensor in inputs if tensor.consumers()}


def _variable_bytes(plan: Any, sizes: Dict[str, int]) -> List[int]:
    """Variables and slots of the TaskGraphs on each device (a slot's name begins with its variable's)."""
    held = [0] * plan.num_devices
    homes = {name: task for task in plan.task_graphs for name in task.ops}
    for name, size in sizes.items():
        owner = next((part for part in (name, name.rpartition("/")[0]) if part in homes), None)
        for device in homes[owner].variable_devices if owner else ():
            held[device] += size
    return held


def peaks(metadata: Any, devices: int) -> List[int]:
    """Bytes that each device held at most at a time, by the allocations of a traced run."""
    events: Dict[int, List[Tuple[int, int]]] = collections.defaultdict(list)
    for device in metadata.step_stats.dev_stats:
        number = device.device.rsplit(":", 1)[1]
        for node in device.node_stats if number.isdigit() else ():
            for memory in node.memory:
                events[int(number)] += [(r.alloc_micros, r.alloc_bytes) for r in memory.allocation_records]
    return [int(max(np.cumsum([change for _, change in sorted(events[d])]), default=0)) for d in range(devices)]


def worker(spec: Spec) -> Result:
    return measure(spec["model"], spec["config"], spec["devices"])


def report(console: Console) -> None:
    rows = []
    for model, title, config, devices in PAIRS:
        found = ask(__file__, {"model": model, "config": config, "devices": devices})
        pairs = list(zip(found["estimated"], found["measured"]))
        worst = max((estimated / measured for estimated, measured in pairs), key=lambda ratio: abs(ratio - 1))
        columns = [" ".join(f"{size / 1e6:.2f}" for size in column) for column in zip(*pairs)]
        rows.append([model, title] + columns + [f"{100 * (worst - 1):+.1f}%"])
    console.print(table("peak memory of each device, MB", ["model", "plan", "estimated", "measured", "worst"], rows))


if __name__ == "__main__":
    main(__file__, worker, report)
