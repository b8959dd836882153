"""An ordinary script: a small regression, fed, with MonitoredTrainingSession; it prints every step's loss.

``python -m tests.multiprocess.train STEPS [CHECKPOINT_DIR]``; rank r feeds numbers of its own, unless the processes run parts of
one step.  Environment variables say more:
TIMEOUT (seconds), COUNT (devices of the TaskGraph), SAVE_STEPS, PAUSE (seconds a step), FAIL_AT (step that raises), FULL_AT
(step from which, once, no file can be written), LOOK_LATE (seconds between the start of this process' server and its looking
for the others), WRONG (process that forgets the weight of its examples).
"""
from __future__ import annotations

import json
import os
import resource
import sys
import time

import numpy as np
import tensorflow.compat.v1 as tf

import whale_tf as wh
from whale_tf.emit.convert import Converter
from whale_tf.processes.watch import Watch

BATCH = 4


def main(steps: int, directory: str) -> None:
    wh.init({"communication.start_timeout_s": int(os.environ.get("TIMEOUT", "300"))})
    if "LOOK_LATE" in os.environ:
        look_late(float(os.environ["LOOK_LATE"]))
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    print("process", os.getpid(), flush=True)
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"] if os.environ.get("TF_CONFIG") else 0
    if os.environ.get("WRONG") == str(rank):
        Converter.scale = lambda self, name, *rest, **more: name  # type: ignore[method-assign]
    x = tf.placeholder(tf.float64, [BATCH, 3])
    with wh.replicate(int(os.environ["COUNT"]) if "COUNT" in os.environ else None):
        # every process draws its own initial values, and gets process 0's
        kernel = tf.get_variable("kernel", [3, 1], tf.float64, tf.random_normal_initializer(seed=rank))
        loss = tf.reduce_mean(tf.square(tf.matmul(x, kernel) - tf.reduce_sum(x, 1, keepdims=True)))
    tf.summary.scalar("loss", loss)
    step = tf.train.get_or_create_global_step()
    train = tf.train.MomentumOptimizer(0.01, 0.5).minimize(loss, global_step=step)
    hooks = [tf.train.StopAtStepHook(last_step=steps)]
    if rank == 0:  # the chief alone looks at more than it trains
        hooks.append(tf.train.LoggingTensorHook({"loss": loss, "kernel": kernel}, every_n_iter=2))
    every = int(os.environ.get("SAVE_STEPS", "5"))
    with tf.train.MonitoredTrainingSession(checkpoint_dir=directory or None, is_chief=rank == 0, hooks=hooks,
                                           save_checkpoint_secs=None, save_checkpoint_steps=every,
                                           save_summaries_steps=2) as session:
        while not session.should_stop():
            # hooks add their fetches to this run, too: the chief alone then computes a loss that nobody trains on
            number = session.run(step, {x: np.zeros([BATCH, 3])})
            examples = np.random.RandomState(100 * number + (0 if "COUNT" in os.environ else rank)).randn(BATCH, 3)
            value, _ = session.run([loss, train], {x: examples})
            if os.environ.get("FAIL_AT") == str(number):
                raise RuntimeError("the script's own mistake")
            if os.environ.get("FULL_AT") == str(number) and rank == 0:
                fill_disk(os.path.join(directory, "was_full"))
            time.sleep(float(os.environ.get("PAUSE", "0")))
            print(f"step {number} loss {float(value)!r}", flush=True)
    print("finished", flush=True)


def look_late(seconds: float) -> None:
    look = Watch.wait_for_all

    def late(watch: Watch, timeout_s: float) -> None:
        time.sleep(seconds)
        look(watch, timeout_s)

    Watch.wait_for_all = late  # type: ignore[method-assign]


def fill_disk(mark: str) -> None:
    """Writing to files fails from here on, as on a full disk; ``mark`` says that it has happened once."""
    if not os.path.exists(mark):
        open(mark, "w").close()
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
