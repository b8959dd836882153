"""What of a run is shown as curves, by TensorBoard for example: rates of every step, and what only traced steps tell.

The name of a scalar begins with how it is known::

    step/...       every training step
    memory/...     the device's allocator, after a step
    traced/...     the traced step of this process
    predicted/...  the simulator
"""

from __future__ import annotations

from typing import Collection, Dict, List, NamedTuple, Optional, Set, Tuple

from whale_tf.cluster import Cluster
from whale_tf.cluster.detect import ASSUMED
from whale_tf.diagnosis.played import measured_step
from whale_tf.diagnosis.record import HOST, Record, joined
from whale_tf.diagnosis.traces import measured_of
from whale_tf.program import BACKWARD, UPDATE
from whale_tf.simulator.instructions import COMPUTATION
from whale_tf.simulator.renumbering import beside_hosts
from whale_tf.simulator.simulate import Simulator
from whale_tf.simulator.step_graph import StepGraph

SECONDS, STEPS_PER_S, EXAMPLES_PER_S, MFU = "step/seconds", "step/steps_per_second", "step/examples_per_second", "step/mfu"
IN_USE, PEAK = "memory/device_{}_bytes_in_use", "memory/device_{}_peak_bytes"
TRACED_S, BUBBLE, EXPOSED = "traced/step_seconds", "traced/bubble", "traced/exposed_communication"
PREDICTED_PEAK = "predicted/device_{}_peak_bytes"


class Arithmetic(NamedTuple):
    """Attributes:
    flops: of the model's products for an example, forward and backward, without what is computed again.
    peak_flops_per_s: of all devices of the plan together; None: that of some device is not known.
    """

    flops: float
    peak_flops_per_s: Optional[float]

    def mfu(self, examples_per_s: float) -> Optional[float]:
        """The model's FLOPs per second, relative to what the devices could do (PaLM, appendix B); None: not known."""
        return None if not self.peak_flops_per_s else self.flops * examples_per_s / self.peak_flops_per_s


def arithmetic_of(record: Record, products_in_tf32: bool) -> Arithmetic:
    """What an example costs, and what the devices that one process' mini-batch is divided over can do.

    Args:
        products_in_tf32: TensorFlow lets GPUs compute products of float32 in TF32.
    """
    plan, step = record.plan, record.step
    precision = "tf32" if step.precision == "fp32" and products_in_tf32 else step.precision
    together = 1 if plan.spans_processes else max(1, len(plan.processes))  # each with mini-batches of its own
    used = sorted({device for task in plan.task_graphs for row in task.devices for device in row})
    peaks = [known_peak(record.cluster, device, precision) for device in used]
    total = None if None in peaks else sum(peak for peak in peaks if peak is not None) / together
    needed = _needed(step)
    flops = sum(op.flops for number, op in enumerate(step.ops) if op.contraction and (op.step != BACKWARD or number in needed))
    return Arithmetic(flops / step.batch, total)


def _needed(step: StepGraph) -> Set[int]:
    """Numbers of the ops that gradients and updates need: TensorFlow does not run the others of the backward pass, such as the
    gradient of an input."""
    left = [number for number, op in enumerate(step.ops) if op.step == UPDATE] + [number for _, number, _ in step.gradients]
    found: Set[int] = set()
    while left:
        number = left.pop()
        if number not in found:
            found.add(number)
            left += [source for source, _ in step.ops[number].inputs]
    return found


def known_peak(cluster: Cluster, number: int, precision: str) -> Optional[float]:
    """FLOPs per second of a device, from a data sheet or the cluster's description; None: it is a CPU of the built-in table, or a
    GPU that is not in it, whose rates are guessed."""
    device = cluster.devices[number]
    own = cluster.description.device_types.get(device.type)
    is_known = device.kind == "GPU" if own is None else own.source != ASSUMED
    return device.peak_flops_per_s[precision] if is_known else None


def traced(record: Record) -> Dict[str, float]:
    """Scalars of the traced step of one process, as means over its devices, and as :class:`whale_tf.simulator.result.Simulation`
    defines them: ``bubble`` is the fraction of the step in which a device does not compute; in ``exposed_communication``, a part
    of that, it exchanges tensors."""
    events = [event for event in measured_of(record).events if event.device != HOST]
    if not events:
        return {}
    step_s = max(event.start_s + event.duration_s for event in events)
    spans: Dict[Tuple[int, bool], List[Tuple[float, float]]] = {}
    for event in events:
        spans.setdefault((event.device, event.lane == COMPUTATION), []).append((event.start_s, event.start_s + event.duration_s))
    devices = sorted({event.device for event in events})
    computing = [_length(spans.get((device, True), [])) for device in devices]
    busy = [_length([*spans.get((device, True), []), *spans.get((device, False), [])]) for device in devices]
    count = len(devices)
    return {TRACED_S: step_s, BUBBLE: 1.0 - sum(computing) / count / step_s,
            EXPOSED: (sum(busy) - sum(computing)) / count / step_s}


def _length(spans: List[Tuple[float, float]]) -> float:
    return sum(end - start for start, end in joined(spans))


def predicted(record: Record, devices: Collection[int]) -> Dict[str, float]:
    """The peak of memory in the simulated step, of each of these devices."""
    result = Simulator(record.cluster).run_step(record.plan, measured_step(record))
    _, numbers = beside_hosts(record.plan, record.cluster)
    peaks = dict(zip(sorted(result.representative), result.peak_memory_bytes))
    known = {device: device if numbers is None else numbers[device] for device in devices if device < record.plan.num_devices}
    return {PREDICTED_PEAK.format(device): float(peaks[number]) for device, number in known.items() if number in peaks}
