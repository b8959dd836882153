"""Parallel configurations of ops, tensors and subgraphs (Proteus section IV-B).

A computation config arranges its devices in a row-major mesh; every mesh axis partitions one dimension of the op or
replicates the op::

    devices (0..7), axes ((4, "b"), (2, "o"))       8 GPUs: 4-way data parallel, 2-way output-channel parallel

    b=0: 0 1    b=1: 2 3    b=2: 4 5    b=3: 6 7    (o=0, o=1)

A tensor's config follows from the op's config and the dimensions of the tensor: an axis over a dimension of the tensor
shards it, one over a dimension that is summed away leaves it partial, and any other axis replicates it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.errors import PlanError

REPLICATED = -1
PARTIAL = -2


class OpAxis(NamedTuple):
    """One mesh axis of a computation config.

    ``dim`` is the partitioned dimension of the op (None: replicated); ``slices`` are the relative sizes of the parts if these
    are not equal (unequal devices).
    """

    degree: int
    dim: Optional[str]
    slices: Optional[Tuple[int, ...]] = None


class TensorAxis(NamedTuple):
    """One mesh axis of a memory config: ``what`` is the sharded axis of the tensor, REPLICATED or PARTIAL."""

    degree: int
    what: int
    slices: Optional[Tuple[int, ...]] = None


class OpConfig(NamedTuple):
    """Computation config: how an op is partitioned and where its parts run."""

    devices: Tuple[int, ...]
    axes: Tuple[OpAxis, ...]

    def degree(self, dim: str) -> int:
        """The number of parts into which ``dim`` is partitioned."""
        product = 1
        for axis in self.axes:
            if axis.dim == dim:
                product *= axis.degree
        return product


class TensorConfig(NamedTuple):
    """Memory config: where the parts of a tensor are."""

    devices: Tuple[int, ...]
    axes: Tuple[TensorAxis, ...]

    @property
    def is_partial(self) -> bool:
        return any(axis.what == PARTIAL for axis in self.axes)

    def summed(self) -> TensorConfig:
        """The same with every partial axis replicated, as after an all-reduce."""
        return TensorConfig(
            self.devices, tuple(TensorAxis(axis.degree, REPLICATED) if axis.what == PARTIAL else axis for axis in self.axes))


class ScheduleConfig(NamedTuple):
    """Schedule config of a subgraph (Proteus section IV-B): ``max_ongoing_micro_batch`` is DAPPLE's K_i.

    ``recompute`` keeps only the subgraph's inputs and runs its forward again right before its backward.
    """

    num_micro_batch: int = 1
    max_ongoing_micro_batch: int = 1
    recompute: bool = False


def op_config(devices: Sequence[int], *axes: Sequence) -> OpConfig:
    """``op_config(range(8), (4, "b"), (2, "o"))``.  If the degrees leave devices over, the op is replicated over these.

    Raises:
        PlanError: the degrees do not divide the number of devices.
    """
    parsed = [OpAxis(*axis) for axis in axes if axis[0] > 1]
    product = 1
    for axis in parsed:
        if axis.slices is not None and len(axis.slices) != axis.degree:
            raise PlanError(f"{len(axis.slices)} slices for a {axis.degree}-way partition of {axis.dim!r}")
        product *= axis.degree
    if not devices or len(devices) % product:
        raise PlanError("{} devices cannot hold a {} partition; the product of its degrees must divide their number".format(
            len(devices), "x".join(str(axis.degree) for axis in parsed)))
    if product < len(devices):
        parsed.append(OpAxis(len(devices) // product, None))
    return OpConfig(tuple(devices), tuple(parsed))


@lru_cache(maxsize=None)
def tensor_config(config: OpConfig, dims: Tuple[str, ...], summed: bool) -> TensorConfig:
    """The config that an op's config implies for a tensor whose axes are the op's dimensions ``dims``.

    ``summed`` says whether axes over dimensions that the tensor lacks leave partial sums (tensors that the op writes) or need
    the whole tensor (tensors that it reads).
    """
    axes: List[TensorAxis] = []
    for axis in config.axes:
        if axis.dim is None:
            axes.append(TensorAxis(axis.degree, REPLICATED))
        elif axis.dim in dims:
            axes.append(TensorAxis(axis.degree, dims.index(axis.dim), axis.slices))
        else:
            axes.append(TensorAxis(axis.degree, PARTIAL if summed else REPLICATED))
    return TensorConfig(config.devices, tuple(axes))


@lru_cache(maxsize=None)
def fractions(config: TensorConfig) -> Tuple[float, ...]:
    """The fraction of the whole tensor that each device holds, in the order of ``config.devices``."""
    values = [1.0]
    for axis in config.axes:
        values = [value * share for value in values for share in _shares(axis.degree, axis.what >= 0, axis.slices)]
    return tuple(values)


@lru_cache(maxsize=None)
def op_fractions(config: OpConfig) -> Tuple[float, ...]:
    """The fraction of the op's work that each device does, in the order of ``config.devices``."""
    values = [1.0]
    for axis in config.axes:
        values = [value * share for value in values for share in _shares(axis.degree, axis.dim is not None, axis.slices)]
    return tuple(values)


def _shares(degree: int, divided: bool, slices: Optional[Tuple[int, ...]]) -> List[float]:
    if not divided:
        return [1.0] * degree
    if slices is None:
        return [1.0 / degree] * degree
    return [part / float(sum(slices)) for part in slices]


@lru_cache(maxsize=None)
def coordinates(degrees: Tuple[int, ...]) -> Tuple[Tuple[int, ...], ...]:
    """Mesh coordinates of the devices, row-major."""
    points: List[Tuple[int, ...]] = [()]
    for degree in degrees:
        points = [point + (i,) for point in points for i in range(degree)]
    return tuple(points)
