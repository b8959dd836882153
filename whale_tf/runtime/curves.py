"""What a run writes for TensorBoard: scalars of its steps, and the memory of its devices."""

from __future__ import annotations

import os
import time
from typing import Dict, Iterable, Mapping, Tuple

from whale_tf._tf_compat import EventFileWriter, tf, v1
from whale_tf.capture import hooks
from whale_tf.cluster import Processes
from whale_tf.diagnosis.scalars import IN_USE, PEAK


class Curves:
    """A run directory of TensorBoard.  Processes of one job have one each, ``process_1`` for example, which TensorBoard shows as
    runs of their own: what they measure is of their own devices."""

    def __init__(self, log_dir: str, processes: Processes) -> None:
        self.folder = log_dir if processes.count < 2 else os.path.join(log_dir, f"process_{processes.rank}")
        self._writer = EventFileWriter(self.folder, flush_secs=10)
        self._add = hooks.original(EventFileWriter, "add_event")  # for a script's own events only process 0 writes

    def write(self, step: int, values: Mapping[str, float]) -> None:
        summary = v1.Summary(value=[v1.Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._add(self._writer, v1.Event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        self._writer.flush()


def memory_of(devices: Iterable[Tuple[int, str]]) -> Dict[str, float]:
    """Bytes in use, and the most since the program began, according to the allocators of the GPUs among devices (number, name).
    TensorFlow counts neither for CPU devices, nor in versions before 2.5."""
    counted = getattr(tf.config.experimental, "get_memory_info", None)
    found: Dict[str, float] = {}
    if counted is None or not tf.executing_eagerly():
        return found
    for number, name in devices:
        if tf.DeviceSpec.from_string(name).device_type == "GPU":
            info = counted(name)
            found.update({IN_USE.format(number): float(info["current"]), PEAK.format(number): float(info["peak"])})
    return found
