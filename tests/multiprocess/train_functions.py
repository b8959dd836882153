"""The models of tests/functions under plans whose model replicas span processes: each process compares what it has with the local
script.

``python -m tests.multiprocess.train_functions DEVICES PLAN...``, in a job of several processes: DEVICES of each; a plan is
``name of the model / loop / name of the plan``, in which ``*`` stands for all.  At the end, processes read different data, which
they must notice.
"""
from __future__ import annotations

import itertools
import json
import os
import sys
import traceback
from typing import List, Tuple

import whale_tf as wh

TASK = json.loads(os.environ["TF_CONFIG"])
WORKERS, RANK = len(TASK["cluster"]["worker"]), TASK["task"]["index"]
DEVICES = int(sys.argv[1])
CLUSTER = f"{WORKERS}xcpu:{DEVICES}"

wh.init({"io.slicing": False}, cluster=CLUSTER)  # before TensorFlow runs an op, so that it starts this process's server

import tensorflow as tf  # noqa: E402

from tests.functions.equality import Way  # noqa: E402
from tests.functions.models import CASES  # noqa: E402
from tests.functions.test_matrix import LOOPS, check  # noqa: E402

PLANS = {
    "pipeline": Way((WORKERS * DEVICES // 2,) * 2, 0, {"num_micro_batch": 2}),
    "gpipe": Way((1, 1), 0, {"num_micro_batch": 4, "pipeline.schedule": "gpipe"}),
    "nested": Way((1, 1), 0, {"num_micro_batch": 2}),
    "unequal": Way((1, WORKERS * DEVICES - 1), 0, {"num_micro_batch": 2}),
    "recompute": Way((1, WORKERS * DEVICES - 1), 0, {"num_micro_batch": 2, "recompute": "full"}),
    "called": Way((1, 1), 0, {"num_micro_batch": 2, "emit": "call"}),
    "one stage": Way((WORKERS * DEVICES,), 0, {}),
    "zero bubble": Way((WORKERS * DEVICES // 2,) * 2, 0, {"num_micro_batch": 4, "pipeline.schedule": "zero_bubble_h1"}),
    "split after replicas": Way((WORKERS * DEVICES // 2, -(WORKERS * DEVICES // 2)), 0, {}),
    "auto_parallel": Way((), 0, {"auto_parallel": True}),
    "two TaskGraphs": Way((), 0, {"num_task_graph": 2, "num_micro_batch": 2}),
    "rhino": Way((), 0, {"auto.auto_parallel": "rhino"}),
    "zero v1": Way((WORKERS * DEVICES,), 0, {"zero": "v1"}),
    "zero v2": Way((WORKERS * DEVICES,), 0, {"zero": "v2", "num_micro_batch": 2}),
    "zero v3": Way((WORKERS * DEVICES,), 0, {"zero": "v3", "num_micro_batch": 2}),
    "split": Way((-WORKERS * DEVICES,), 0, {}),
}


def rows(patterns: List[str]) -> List[Tuple[str, str, str]]:
    found = []
    for pattern in patterns:
        model, loop, plan = pattern.split("/")
        found += [row for row in itertools.product(CASES, LOOPS, PLANS)
                  if all(given in (name, "*") for given, name in zip((model, loop, plan), row))]
    return list(dict.fromkeys(found))


def main() -> int:
    wh.shutdown()
    wrong = 0
    for model, loop, plan in rows(sys.argv[2:]):
        way = PLANS[plan]._replace(devices=WORKERS * DEVICES, cluster=CLUSTER)
        way.config["io.slicing"] = False
        try:
            check(model, loop, way)
        except Exception as error:  # the other rows are of interest, too
            wrong += 1
            print(f"{model}/{loop}/{plan}: {type(error).__name__}: {str(error)[:1500]}", flush=True)
            if "TRACE" in os.environ:
                traceback.print_exc()
        else:
            print(f"{model}/{loop}/{plan}: equal", flush=True)
    wrong += not notices_different_data()
    print("finished" if not wrong else f"{wrong} failed", flush=True)
    return int(wrong > 0)


def notices_different_data() -> bool:
    wh.init({"io.slicing": False}, cluster=CLUSTER)
    variable = tf.Variable(tf.ones([3, WORKERS * DEVICES], tf.float64))

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape, wh.split(WORKERS * DEVICES):
            loss = tf.reduce_mean(tf.square(tf.matmul(x, variable)))
        variable.assign_sub(tape.gradient(loss, variable))

    x = tf.range(12, dtype=tf.float64)
    try:
        step(tf.reshape(x + RANK, [4, 3]))
    except wh.InputError as error:
        return "'x" in str(error) and "another first example in process 1" in str(error)
    finally:
        wh.shutdown()
    return False


if __name__ == "__main__":
    sys.exit(main())
