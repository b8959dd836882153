"""Configuration keys of EPL, the open-source predecessor, for which there is no choice here.

A value that describes what happens here anyway is accepted; any other value is refused, and the message says what to do.  The
names and defaults are from EPL's public documentation of its configuration.
"""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Tuple

from whale_tf.errors import ConfigError


class Fixed(NamedTuple):
    """Attributes:
    accepted: values that change nothing.
    reason: why other values are refused, and what to use instead.
    """

    accepted: Tuple[Any, ...]
    reason: str


FIXED: Mapping[str, Fixed] = {
    "io.drop_last_files": Fixed((False,), "no file is dropped; drop files in the pipeline, or set io.slicing to true, which "
                                "shares elements instead of files"),
    "io.unbalanced_io_slicing": Fixed((False,), "all processes take the same number of steps, so the first one that runs out of "
                                      "files ends the others; set io.slicing to true, which shares elements instead of files"),
    "communication.max_splits": Fixed((), "gradients are put together by size; set communication.bucket_bytes"),
    "communication.num_communicators": Fixed((), "collectives run in parallel without a pool"),
    "communication.fp16_scale": Fixed((), "under communication.fp16 each bucket is scaled by its largest element"),
    "communication.clip_after_allreduce": Fixed((True,), "gradients are clipped where the script clips them, which is after "
                                                "they are summed over all replicas"),
    "communication.gradients_reduce_method": Fixed(("mean",), "gradients are those of the script's own loss on the whole "
                                                   "mini-batch; for a sum, use a loss that is a sum (tf.reduce_sum)"),
    "gradient_checkpoint.end_taskgraph": Fixed((-1,), "recompute is for all TaskGraphs; mark kept tensors with wh.checkpoint()"),
    "gradient_checkpoint.check_gradients": Fixed((False,), "recomputed values equal the original ones, including random "
                                                 "numbers; to check, compare with recompute 'none'"),
    "amp.debug_log": Fixed((False,), "print wh.explain(), which says which ops compute in which type"),
    "cluster.run_visible_devices": Fixed(("",), "set CUDA_VISIBLE_DEVICES, or list the devices in wh.init(cluster=...)"),
    "optimizer.num_apply_group": Fixed((1,), "an update waits only for the gradients of its own variable, so there are no "
                                       "groups to run one after the other"),
}


def check_fixed(key: str, value: Any) -> None:
    """Raises:
        ConfigError: the value of EPL's key describes something other than what happens here.
    """
    fixed = FIXED[key]
    if any(value == one and type(value) is type(one) for one in fixed.accepted):
        return
    or_accepted = "".join(f", or set it to {one!r}" for one in fixed.accepted)
    raise ConfigError(f"config key {key!r} is {value!r}, which exists in EPL, but not in whale_tf: {fixed.reason}. "
                      f"Leave it out{or_accepted}")
