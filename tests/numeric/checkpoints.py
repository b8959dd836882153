"""Half of a training run, from and to a checkpoint."""
from __future__ import annotations

import contextlib
from typing import Any, Dict, List, Optional, Sequence, Tuple

import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.numeric.cases import Case
from tests.numeric.script import STEPS, Scope, Setting, Stages, source

HALF = STEPS // 2


def train_half(case: Case, setting: Setting, first: int, restore: str = "", save: str = "", devices: int = 0,
               config: Optional[Dict[str, Any]] = None,
               scopes: Sequence[Scope] = (contextlib.nullcontext,)) -> Tuple[List[float], List[str]]:
    """Trains steps ``first`` to ``first + HALF``; returns the losses and the names of all variables.

    Args:
        devices: of the cluster; 0: the local script.
        scopes: an annotation for each stage.
    """
    if devices:
        wh.init(config, cluster=f"cpu:{devices}")
    try:
        with tf.Graph().as_default(), tf.variable_scope("", use_resource=setting.resource):
            inputs, feeds = source(case.examples(sum(case.sizes), setting.dtype), case.sizes, setting)
            script = case.build(inputs, Stages(scopes), setting.dtype)
            names = sorted(v.op.name for v in tf.global_variables())
            saver = tf.train.Saver()
            with tf.Session() as session:
                if restore:
                    saver.restore(session, restore)
                else:
                    session.run(tf.global_variables_initializer())
                losses = [session.run([script.losses["loss"], script.runs[0]], feed)[0] for feed in feeds[first:first + HALF]]
                if save:
                    saver.save(session, save)
            return losses, names
    finally:
        wh.shutdown()
