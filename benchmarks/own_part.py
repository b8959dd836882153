"""What one process of many traces and rewrites: seconds, ops and memory of process 7 of 8 to 4,096.

    python -m benchmarks.own_part [PROCESSES ...]

The others are not started.  A step of eight stages, `wh.replicate(1)` each, in a tf.function and in a Session, is a pipeline over
eight processes, with as many model replicas as there are processes for.
"""
from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any, Callable, List, Sequence

from rich.table import Table

RANK, STAGES, SIZE = 7, 8, 64
PROCESSES = (8, 64, 512, 4096)


def measure(processes: int, kind: str) -> None:
    """Prints a JSON list: wall-clock and CPU seconds, ops of the graph, and MiB of this process.

    Args:
        kind: ``function`` or ``Session``.
    """
    addresses = [f"127.0.0.1:{20000 + rank}" for rank in range(processes)]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": RANK}})
    import whale_tf as wh
    wh.init({"io.slicing": False, "io.nested_batch": "divide", "num_micro_batch": 4}, cluster=f"{processes}xcpu:1")
    made = {"function": in_function, "Session": in_session}[kind]()
    began, busy = time.perf_counter(), time.process_time()
    graph = made()
    seconds = time.perf_counter() - began, time.process_time() - busy
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([*seconds, len(graph.get_operations()), mib]), flush=True)
    os._exit(0)  # the other processes, which the end of this one would wait for, do not exist


def loss_of(x: Any, weights: Sequence[Any]) -> Any:
    import tensorflow as tf

    import whale_tf as wh
    for stage in range(STAGES):
        with wh.replicate(1):
            x = tf.tanh(tf.matmul(tf.tanh(tf.matmul(x, weights[2 * stage])), weights[2 * stage + 1]))
            if stage == STAGES - 1:
                loss = tf.reduce_mean(tf.square(x))
    return loss


def in_function() -> Callable[[], Any]:
    """Traces and rewrites a function; returns its graph."""
    import tensorflow as tf
    weights = [tf.Variable(tf.ones([SIZE, SIZE])) for _ in range(2 * STAGES)]

    @tf.function(input_signature=[tf.TensorSpec([None, SIZE])])
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(x, weights)
        for weight, gradient in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(.1 * gradient)
        return loss

    return lambda: step.get_concrete_function().graph


def in_session() -> Callable[[], Any]:
    """Builds and rewrites a graph, and divides it into the processes' parts; returns it."""
    import tensorflow.compat.v1 as tf

    import whale_tf as wh
    tf.disable_eager_execution()

    def made() -> Any:
        x = tf.placeholder(tf.float32, [None, SIZE])
        weights = [tf.get_variable(f"weight_{number}", [SIZE, SIZE]) for number in range(2 * STAGES)]
        tf.train.GradientDescentOptimizer(.1).minimize(loss_of(x, weights))
        wh.parallelize()
        return tf.get_default_graph()

    return made


def main(arguments: List[str]) -> None:
    from rich.console import Console
    table = Table("", "processes", "model replicas", "seconds", "CPU seconds", "ops", "MiB")
    for kind, processes in itertools.product(("function", "Session"), map(int, arguments or PROCESSES)):
        command = [sys.executable, "-m", "benchmarks.own_part", "--measure", str(processes), kind]
        lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, universal_newlines=True).stdout.splitlines()
        wall, cpu, ops, mib = json.loads(lines[-1])
        table.add_row(kind, str(processes), str(processes // STAGES), f"{wall:.2f}", f"{cpu:.2f}", str(ops), f"{mib:.0f}")
    Console().print(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(int(sys.argv[2]), sys.argv[3])
    else:
        main(sys.argv[1:])
