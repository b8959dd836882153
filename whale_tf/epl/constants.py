"""The few names of ``epl.utils`` that scripts and EPL's own tests of its public interface use."""

from __future__ import annotations

DEFAULT_TASK_NAME = "worker"
ENV_TF_CONFIG = "TF_CONFIG"
GC_AUTO = "auto"
GC_COLLECTION = "collection"
GC_COLLECTION_NAME = "checkpoints"
REDUCE_METHOD_MEAN = "mean"
REDUCE_METHOD_SUM = "sum"


def get_device_string(task: int = 0, device_index: int = 0, device_type: str = "GPU") -> str:
    """A device as ``epl.Cluster`` names it."""
    return f"/job:{DEFAULT_TASK_NAME}/replica:0/task:{task}/device:{device_type}:{device_index}"
