"""Decides how the gradients of a TaskGraph are summed, and where its variables are."""

from __future__ import annotations

from typing import Sequence, Tuple

from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.errors import ConfigError
from whale_tf.planner.buckets import Gradient, buckets, limits
from whale_tf.planner.homes import STAGE


def buckets_of(gradients: Sequence[Gradient], cluster: Cluster, config: Config,
               processes: Sequence[Tuple[int, ...]]) -> Tuple[Tuple[str, ...], ...]:
    """Inside one process no message is sent, so every gradient is summed separately."""
    if not processes:
        return tuple((gradient.variable,) for gradient in gradients)
    return buckets(gradients, limits(cluster, processes, config.communication.bucket_bytes))


def backend_of(config: Config, processes: Sequence[Tuple[int, ...]], sums: Sequence[Tuple[int, ...]]) -> str:
    """The communicator that sums gradients.

    Args:
        sums: the processes between which they are summed.

    Raises:
        ConfigError: the configured communicator does not work with these processes.
    """
    backend: str = config.communication.backend
    if backend == "auto":
        return "collective" if sums else "local"
    if backend == "horovod" and processes and not sums:
        raise ConfigError(
            f"communication.backend is 'horovod', which sums between processes, but model replicas span the {len(processes)} "
            "processes, each of which runs a part of the step; leave it out, or use TaskGraphs that fit the devices of one "
            "process")
    if backend == "local" and sums:
        raise ConfigError(
            f"communication.backend is 'local', which sums inside one process, but there are {len(processes)} processes; use "
            "'auto' or 'collective'")
    return backend


def variables_of(read_in_loops: Sequence[str], updated_in_functions: Sequence[str], rows: Sequence[Tuple[int, ...]],
                 cluster: Cluster, config: Config, processes: Sequence[Tuple[int, ...]], is_between_graphs: bool) -> str:
    """Whether the replicas of a TaskGraph share one copy of its variables.

    A version 1 loop reads its variables on its own device, because its stacks are there too.  A condition that updates variables
    (those of several TaskGraphs, perhaps, and a step counter) runs once.

    Raises:
        ConfigError: the configuration asks for a shared copy, but that is impossible.
    """
    wanted = "shared" if config.variables == STAGE else config.variables
    key = "zero" if config.zero != "none" else "offload"
    if config.zero != "none" or config.offload != "none":
        if wanted == "mirrored":
            raise ConfigError(
                f"variables is 'mirrored', a copy for every replica, and {key} is {config[key]!r}, one copy at its home; leave "
                "one of them out")
        if config.communication.backend == "collective" or read_in_loops:
            what = f"a while loop reads {read_in_loops[0]!r} on its own device" if read_in_loops else \
                "communication.backend is 'collective', which sums gradients on every replica"
            raise ConfigError(f"{key} is {config[key]!r}, which puts a variable in one place, but {what}; leave one of them out")
        return "shared"
    by_collective = config.communication.backend == "collective" and not processes
    if wanted == "shared" and by_collective:
        raise ConfigError(
            f"variables is {config.variables!r} and communication.backend is 'collective': inside one process a collective gives "
            "every replica a gradient for its own copy; use communication.backend 'auto', or variables 'mirrored'")
    if wanted == "shared" and read_in_loops:
        raise ConfigError(
            f"variables is {config.variables!r}, but a while loop reads {read_in_loops[0]!r} on the loop's own device; use "
            "variables 'auto' or 'mirrored', or read the variable before the loop")
    if updated_in_functions and len({index for row in rows for index in row}) > 1:
        if wanted == "mirrored" or by_collective or read_in_loops:
            what = f"a while loop reads {read_in_loops[0]!r} on its own device" if read_in_loops else \
                "variables is 'mirrored'" if wanted == "mirrored" else "communication.backend is 'collective'"
            raise ConfigError(
                f"{what}, so that every replica has a copy of its variables, but a condition, function or chain of writes "
                f"updates {updated_in_functions[0]!r}, of one copy only; write it outside of tf.cond, tf.while_loop and "
                "tf.function, or leave it out")
        return "shared"
    if wanted != "auto":
        return wanted
    used = {index for row in rows for index in row}
    one_memory = is_between_graphs or not processes or any(used <= set(owned) for owned in processes)
    is_cpu = all(cluster.devices[index].kind == "CPU" for index in used)
    can_share = is_cpu and one_memory and not by_collective and not read_in_loops
    return "shared" if len(used) > 1 and can_share else "mirrored"


def travels_as_fp16(config: Config, processes: Sequence[Tuple[int, ...]], sums: Sequence[Tuple[int, ...]]) -> bool:
    """Whether gradients travel as float16.  Inside one process they do not travel.

    Raises:
        ConfigError: the configuration asks for it, but processes run parts of one step.
    """
    if config.communication.fp16 and processes and not sums:
        raise ConfigError(
            f"communication.fp16 is true, but model replicas span the {len(processes)} processes, which then "
            "do not sum gradients between them; leave it out, or use TaskGraphs that fit the devices of one process")
    return config.communication.fp16 and bool(sums)
