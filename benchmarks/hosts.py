"""Two hosts with addresses of their own and a slow link between them: measured steps beside predicted ones.  Needs root.

    sudo .venv/tf2/bin/python -m benchmarks.hosts [MBIT_PER_S...]

The hosts are network namespaces that a virtual Ethernet cable connects, each with one process on a core of its own; ``tc`` limits
what either sends.  In the first table, a step over the link is predicted from the same step over the unlimited cable: it takes at
least as long as its bytes do, and at most that much more.  In the second one, an encoder's first half is on the two logical
devices of one host as replicas, its second half on those of the other one under ``wh.split``, in a Session (the encoder of
:mod:`benchmarks.pipeline`) and in a tf.function with a Keras model.  The step is the simulator's, with the times of the local
script's ops on one core, and the link's bandwidth and delay.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Sequence

from rich.console import Console

from benchmarks import pipeline, processes
from benchmarks.accuracy import calibrated
from benchmarks.keras_processes import loss_of, one_thread
from benchmarks.measure import Result, Spec, ask, first_result, main, session_config, step_times, table
from benchmarks.workloads import WORKLOADS

HOSTS = ("whale-host-0", "whale-host-1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 23456
CABLE = "whale-cable"
RATES_MBIT = (1000, 200)
DELAY_MS = 1
SYSTEMS = ("whale_tf", "whale_tf, float16") + tuple(processes.PIPELINES)[1:2]
MODEL = "mlp"
STEPS = 8
MICRO_BATCHES = 2, 4
SETTLE = 40  # steps, of several micro-batches each, after which TensorFlow's executor knows which ops are short
SESSION, KERAS = (pipeline.System(door) for door in ("Session", "Keras"))
BLOCKS, WIDTH, TOKENS = 4, 256, 128  # of the Keras model
COPIES = 2  # micro-batches of its step on one device
Step = Callable[[], float]


ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 23400)) as server:
    connection = server.accept()[0]
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        connection.sendall(connection.recv(1) or sys.exit())
"""
PING = """
import socket, statistics, sys, time
for _ in range(100):
    try:
        one = socket.create_connection((sys.argv[1], 23400))
        break
    except OSError:
        time.sleep(.05)
one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
took = []
for _ in range(100):
    start = time.perf_counter()
    one.sendall(b"x")
    one.recv(1)
    took.append(time.perf_counter() - start)
print(statistics.median(took))
"""


def run(*command: str) -> None:
    """Raises:
        subprocess.CalledProcessError: it failed; its message has been printed.
    """
    subprocess.run(command, check=True)


@contextlib.contextmanager
def hosts() -> Iterator[None]:
    """The two namespaces and the cable between them; nothing is left of them afterwards."""
    try:
        for host in HOSTS:
            run("ip", "netns", "add", host)
        run("ip", "link", "add", CABLE, "netns", HOSTS[0], "type", "veth", "peer", "name", CABLE, "netns", HOSTS[1])
        for host, address in zip(HOSTS, ADDRESSES):
            run("ip", "-n", host, "addr", "add", address + "/24", "dev", CABLE)
            for device in ("lo", CABLE):
                run("ip", "-n", host, "link", "set", device, "up")
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], stderr=subprocess.DEVNULL, check=False)


def limit(rate_mbit: int) -> None:
    """Let both hosts send so many megabits a second, after a delay if the kernel can do that."""
    for host in HOSTS:
        run("tc", "-n", host, "qdisc", "replace", "dev", CABLE, "root", "handle", "1:", "tbf", "rate", f"{rate_mbit}mbit",
            "burst", "256kb", "latency", "50ms")
        late = ["tc", "-n", host, "qdisc", "replace", "dev", CABLE, "parent", "1:1", "netem", "delay", f"{DELAY_MS}ms"]
        subprocess.run(late, stderr=subprocess.DEVNULL, check=False)  # not every kernel has it; the delay is measured


def sent_bytes() -> int:
    with open(f"/sys/class/net/{CABLE}/statistics/tx_bytes", encoding="utf8") as handle:
        return int(handle.read())


def delay_s() -> float:
    """Of a packet to the other host and back, half."""
    pings = ["ip", "netns", "exec", HOSTS[0], sys.executable, "-c", PING, ADDRESSES[1]]
    with subprocess.Popen(["ip", "netns", "exec", HOSTS[1], sys.executable, "-c", ECHO, ADDRESSES[1]]) as echo:
        try:
            return float(subprocess.run(pings, check=True, stdout=subprocess.PIPE).stdout) / 2
        finally:
            echo.kill()


def worker(spec: Spec) -> Result:
    """One of the processes; ``bytes``: what its host sends in a step."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[spec["rank"] % os.cpu_count()]})
    if "folder" in spec:
        return planned(spec)
    if spec["system"] == KERAS.name:
        return profile()
    step = processes.SYSTEMS[spec["system"]](WORKLOADS[spec["model"]](), spec["rank"])
    step()
    before = sent_bytes()
    result = step_times(step, STEPS, warmup=2)
    return dict(result, bytes=(sent_bytes() - before) / (STEPS + 2))


def planned(spec: Spec) -> Result:
    """A step of the second table; the first process leaves its Plan and its step graph."""
    import tensorflow as tf

    import whale_tf as wh

    door = {one.name: one for one in (SESSION, KERAS)}[spec["system"]]
    one_thread(tf, inter=2)
    wh.init({"num_micro_batch": spec["micro_batches"], "emit": "call", "io.slicing": False}, cluster="2xcpu:2")
    make = session_step if door == SESSION else keras_step
    step = make(pipeline.EXAMPLES * spec["micro_batches"], [lambda _: wh.replicate(2), lambda _: wh.split(2)])
    found = step_times(step, STEPS, warmup=SETTLE)
    if not spec["rank"]:
        for path, one in zip(pipeline.files(spec["folder"], door), (wh.current_plan(), wh.step_graph())):
            with open(path, "w", encoding="utf8") as handle:
                handle.write(one.to_json())
    return found


def session_step(batch: int, scopes: List[Any]) -> Step:
    import tensorflow.compat.v1 as tf

    tf.disable_eager_execution()
    fetches = pipeline.build(batch, scopes)
    session = tf.Session(config=session_config(2, inter=2, intra=1))
    session.run(tf.global_variables_initializer())
    return lambda: session.run(fetches)[0]


def keras_step(batch: int, scopes: Sequence[Callable[[int], ContextManager[Any]]]) -> Step:
    """A step of an encoder, whose two halves are built in these scopes."""
    import keras
    import numpy as np
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    inputs = x = keras.Input((TOKENS, WIDTH))
    for number, scope in enumerate(scopes, 1):
        with scope(1):
            for _ in range(BLOCKS // len(scopes)):
                normal = keras.layers.LayerNormalization()(x)
                x = x + keras.layers.MultiHeadAttention(4, WIDTH // 4)(normal, normal)
                wide = keras.layers.Dense(4 * WIDTH, activation="relu")(keras.layers.LayerNormalization()(x))
                x = x + keras.layers.Dense(WIDTH)(wide)
            if number == len(scopes):
                x = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(x))
    model, optimizer = keras.Model(inputs, x), keras.optimizers.SGD(.01)
    rng = np.random.RandomState(0)
    examples, labels = tf.constant(rng.randn(batch, TOKENS, WIDTH), tf.float32), tf.constant(rng.randint(0, 10, batch))

    @tf.function(input_signature=[tf.TensorSpec.from_tensor(one) for one in (examples, labels)])
    def step(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(keras)(labels, model(x, training=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    return lambda: float(step(examples, labels))


def profile() -> Result:
    """Seconds of each op of the Keras script on one device for one micro-batch, on one thread, with each op's share of what the
    executor does between them."""
    import tensorflow as tf

    import whale_tf as wh
    from whale_tf.diagnosis.record import parse

    one_thread(tf)
    wh.init({"num_micro_batch": COPIES}, cluster="cpu:1")  # what is not divided has no names for the doctor
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "step.json")
        wh.doctor(steps=SETTLE, path=path)
        step = keras_step(COPIES * pipeline.EXAMPLES, [contextlib.nullcontext] * 2)
        while not os.path.exists(path):
            step()
        ops = parse(path).processes[0].ops
    step_s = step_times(step, STEPS)["wall_s"]
    factor = step_s / sum(op.seconds for op in ops)
    return {"seconds": {op.name: factor * op.seconds / op.runs for op in ops if op.is_known}, "memory": {}}


def predicted_s(folder: str, door: pipeline.System, calibration: Any, profiled: Result, rate_mbit: int, delay: float) -> float:
    """Seconds of the step of the Plan in ``folder``, over a link of this rate and delay."""
    from whale_tf.cluster import Cluster

    link = calibration.communicators["processes"]  # what TensorFlow adds to a link
    bandwidth = min(link.bandwidth_bytes_per_s, rate_mbit * 1e6 / 8)
    slower = replace(link, alpha_s=link.alpha_s + delay, bandwidth_bytes_per_s=bandwidth)
    known = replace(calibration, communicators={**calibration.communicators, "processes": slower})
    return pipeline.predicted_s(folder, door, known, profiled, Cluster.parse("2xcpu:2"))


def measured(system: str, model: str, **more: Any) -> Result:
    """What the first host measured.

    Args:
        more: for its worker.

    Raises:
        RuntimeError: it failed.
    """
    addresses = [f"{address}:{PORT}" for address in ADDRESSES]
    commands, variables = [], []
    for rank, host in enumerate(HOSTS):
        spec = json.dumps({"system": system, "model": model, "rank": rank, **more})
        commands.append(["ip", "netns", "exec", host, sys.executable, os.path.abspath(__file__), "--worker", spec])
        job = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        variables.append({"TF_CONFIG": json.dumps(job)})
    return first_result(commands, variables)


def row(system: str, rate: Optional[int], found: Result, free: Result) -> List[str]:
    cells = [system, "-" if rate is None else str(rate), "{:.2f}".format(found["bytes"] / 1e6),
             "{:.0f}".format(1e3 * found["wall_s"])]
    if rate is None:
        return cells + ["-", "-"]
    link_s = 8 * found["bytes"] / (rate * 1e6)
    return cells + ["{:.0f}".format(1e3 * max(link_s, free["wall_s"])), "{:.0f}".format(1e3 * (link_s + free["wall_s"]))]


def report(console: Console) -> None:
    if os.geteuid() != 0:
        sys.exit(f"benchmarks.hosts makes network namespaces and needs root: sudo {sys.executable} -m benchmarks.hosts")
    rows: List[Any] = []
    planned_rows: List[Any] = []
    rates = [int(each) for each in sys.argv[1:]] or RATES_MBIT
    with tempfile.TemporaryDirectory() as folder, hosts():
        calibration = calibrated(os.path.join(folder, "calibration.json"), inter_op=1)
        profiles = {SESSION: ask(pipeline.__file__, {}), KERAS: ask(__file__, {"system": KERAS.name, "rank": 0})}
        free: Dict[str, Result] = {system: measured(system, MODEL) for system in SYSTEMS}
        rows += [row(system, None, free[system], free[system]) for system in SYSTEMS]
        for rate in rates:
            limit(rate)
            delay = delay_s()
            for (door, profiled), count in itertools.product(profiles.items(), MICRO_BATCHES):
                took = measured(door.name, "encoder", folder=folder, micro_batches=count)["wall_s"]
                predicted = predicted_s(folder, door, calibration, profiled, rate, delay)
                times = [f"{1e3 * value:.0f}" for value in (took, predicted)]
                error = f"{predicted / took - 1:+.1%}"
                planned_rows.append([door.name, str(count), str(rate), f"{1e3 * delay:.2f}", *times, error])
            rows += [row(system, rate, measured(system, MODEL), free[system]) for system in SYSTEMS]
    console.print(table(f"{MODEL}: a step over a link of so many Mbit/s", [
        "system", "Mbit/s", "MB sent", "measured ms", "at least ms", "at most ms"], rows))
    console.print(table(f"encoder: replicas, then split, {pipeline.EXAMPLES} examples a micro-batch", [
        "door", "micro-batches", "Mbit/s", "delay ms", "measured ms", "simulated ms", "error"], planned_rows))


if __name__ == "__main__":
    main(__file__, worker, report)
