"""The kernels for GPUs that the installed TensorFlow has registered, as the table of :mod:`whale_tf.profiler.gpu_kernels`.

A CUDA build registers them on machines without a GPU, too::

    python -m whale_tf.measure.registry whale_tf/profiler/kernels/2.21.json
"""
from __future__ import annotations

import sys
from typing import Iterator, List

from whale_tf._tf_compat import registered_kernels, tf
from whale_tf.errors import PlanError
from whale_tf.profiler.gpu_kernels import ANY, OWN, GpuKernels, Kernel, Registered, shipped


def own_kernels() -> GpuKernels:
    """The table of the installed TensorFlow.

    Raises:
        PlanError: it is no CUDA build.
    """
    if not tf.test.is_built_with_cuda():
        raise PlanError(f"TensorFlow {tf.__version__} is built without CUDA and has registered no kernels for GPUs; install the "
                        "build with CUDA (the tensorflow wheel for Linux; for 1.15: tensorflow-gpu)")
    return GpuKernels.of(tf.__version__, _rows())


def kernels() -> GpuKernels:
    """The table of the installed TensorFlow: its own registry, or the one that the package has for its version."""
    return own_kernels() if tf.test.is_built_with_cuda() else shipped(tf.__version__)


def _rows() -> Iterator[Registered]:
    for kernel in registered_kernels():
        if kernel.device_type not in (OWN, ANY) or kernel.label:  # a label: only ops that ask for it by name run it
            continue
        allows = {limit.name: frozenset(tf.as_dtype(number).name for number in limit.allowed_values.list.type)
                  for limit in kernel.constraint if limit.allowed_values.list.type}
        yield Registered(kernel.op, kernel.device_type, Kernel(allows, frozenset(kernel.host_memory_arg)))


def main(arguments: List[str]) -> None:
    """Writes the table to the file of this name."""
    with open(arguments[0], "w", encoding="utf8") as handle:
        handle.write(own_kernels().to_json())


if __name__ == "__main__":
    main(sys.argv[1:])
