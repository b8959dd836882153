"""The number of forward micro-batches that each stage starts before its first backward: DAPPLE's K_i (section V-C)."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from whale_tf.errors import InfeasibleError, PlanError, did_you_mean

# Policy A suffices if a stage's neighbour answers at once; policy B also covers the time on the wire.
POLICIES = ("PA", "PB")

# DAPPLE section VI-D and Table IV: with an activation communication ratio of 0.10 (GNMT-16) policy B is 31% faster,
# with 0.06 (BERT-48) and less it gains at most 2%, not worth the memory.  Nothing in between was measured: the middle.
POLICY_B_RATIO = 0.08


def auto_policy(activation_communication_ratio: float) -> str:
    """``PB`` if transfers between stages take a notable part of a stage's time, otherwise ``PA``.

    The ratio is DAPPLE's ACR: time of the transfer between two stages over the average forward and backward time.
    """
    if not activation_communication_ratio >= 0:
        raise PlanError(
            f"activation_communication_ratio is {activation_communication_ratio}, expected a number of at least 0: "
            f"transfer time / average stage time")
    return "PB" if activation_communication_ratio >= POLICY_B_RATIO else "PA"


def warmup_depths(policy: str, num_stages: int, memory_limits: Optional[Sequence[int]] = None,
                  num_micro_batch: Optional[int] = None) -> Tuple[int, ...]:
    """K_i of every stage: ``min(S - i, D_i)`` (``PA``) or ``min(2 (S - i) - 1, D_i)`` (``PB``), DAPPLE section V-C.

    Depths never increase from a stage to the next: a later stage that waits for more forwards than an earlier one ever
    starts would wait for ever.  So a stage short of memory also holds back the stages after it.

    Args:
        memory_limits: D_i, the number of micro-batches whose activations fit on each stage; None means no limit.
        num_micro_batch: micro-batches in a step, which is a limit too; None means no limit.

    Raises:
        InfeasibleError: some stage cannot hold a single micro-batch.
        PlanError: unknown policy, or not one limit for each stage.
    """
    if policy not in POLICIES:
        raise PlanError(
            "warm-up policy is {!r}, expected one of {}.{}".format(policy, ", ".join(POLICIES), did_you_mean(policy, POLICIES)))
    if num_stages < 1:
        raise PlanError(f"num_stages is {num_stages}, expected at least 1")
    if memory_limits is not None and len(memory_limits) != num_stages:
        raise PlanError(f"memory_limits has {len(memory_limits)} entries, expected one for each of {num_stages} stages")
    depths: List[int] = []
    deepest = num_micro_batch
    for stage in range(num_stages):
        to_end = num_stages - stage
        wanted = to_end if policy == "PA" else 2 * to_end - 1
        fits = wanted if memory_limits is None else memory_limits[stage]
        if fits < 1:
            raise InfeasibleError(
                f"the activations of a single micro-batch do not fit on stage {stage}: use more "
                "micro-batches, recompute, or more stages")
        deepest = min(wanted, fits) if deepest is None else min(deepest, wanted, fits)
        depths.append(deepest)
    return tuple(depths)


def check_warmups(warmups: Sequence[int], num_micro_batch: int) -> None:
    """Refuse depths with which the stages of a chain would wait for each other for ever.

    Stage ``i``'s backward of micro-batch ``m`` needs the backward of the next stage.  That runs after the next stage's forward of
    ``m + K_{i+1} - 1``, which needs stage ``i``'s forward.  Stage ``i`` runs this forward before its backward of ``m`` if and
    only if ``K_{i+1} <= K_i``.

    Raises:
        PlanError: a depth below 1, or larger than that of the stage before it (both counted up to ``num_micro_batch``).
    """
    for stage, depth in enumerate(warmups):
        if depth < 1:
            raise PlanError(f"stage {stage} has warmup {depth}, expected at least 1")
    for stage, (before, after) in enumerate(zip(warmups, warmups[1:])):
        if min(after, num_micro_batch) > min(before, num_micro_batch):
            raise PlanError(
                f"warmup {after} of stage {stage + 1} is larger than warmup {before} of stage {stage}: stage {stage + 1} would "
                f"wait for forward micro-batches that stage {stage} starts only after a backward; use warmup <= {before} on "
                f"stage {stage + 1}")
