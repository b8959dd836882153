"""Seconds of one layer on one device."""
from __future__ import annotations

from typing import List, NamedTuple

from whale_tf.cluster import Device
from whale_tf.errors import PlanError
from whale_tf.profiler.model_profile import LayerProfile, Measurement, ModelProfile


class LayerTime(NamedTuple):
    """``measured_batch``: samples whose tensor-parallel collectives the times already include (0: none)."""

    forward_s: float
    backward_s: float
    measured_batch: float = 0.0


def layer_seconds(profile: ModelProfile, layer: LayerProfile, device: Device, batch: float,
                  tensor_parallel: int = 1) -> LayerTime:
    """Forward and backward seconds of ``batch`` samples of ``layer`` on ``device``.

    From FLOPs (a roofline without overlap): reading the parameters and launching kernels, plus, per sample, the arithmetic at
    ``utilization`` of the peak rate and the memory traffic.  The backward pass reads the parameters and writes their
    gradients.  A batch below the profile's granularity takes as long as one of that size.

    From measurements on the device's type: linear between measured batches, proportional below the smallest, and extrapolated
    through the last two beyond the largest.  Beyond a single measurement, or two of which the larger batch took no longer (noise
    decides which of two small ones does), each further sample costs what its FLOPs predict, but no more than its share of the
    time measured on one device: launch overhead, which dominates small and tensor-parallel batches, is paid once.

    Args:
        batch: samples; may be fractional.
        tensor_parallel: devices the layer is split over.

    Raises:
        PlanError: the layer has neither FLOPs nor a measurement that covers the device.
    """
    batch = max(batch, float(profile.batch_granularity or 0))
    share = tensor_parallel if layer.tensor_parallel_bytes is not None else 1
    points = [point for point in layer.measured
              if point.device == device.type and point.tensor_parallel in (tensor_parallel, share)]
    exact = [point for point in points if point.tensor_parallel == tensor_parallel] or points
    if exact:
        found = _from_measurements(profile, layer, device, batch, share, sorted(exact, key=lambda p: p.batch))
        return found if exact[0].has_sums else found._replace(measured_batch=0.0)
    if layer.measured and not (layer.forward_flops or layer.traffic_bytes):
        raise PlanError(
            "layer {!r} of {!r} was measured on {} but not on {} with tensor parallelism {}; add a measurement, or give its "
            "forward_flops".format(layer.name, profile.name, ", ".join(sorted({
                f"{p.device} (tensor parallelism {p.tensor_parallel})" for p in layer.measured})),
                device.type, tensor_parallel))
    read_s = layer.parameter_bytes / share / device.memory_bandwidth_bytes_per_s
    once_s = read_s + layer.overhead_s
    slope = _per_sample(profile, layer, device, share)
    return LayerTime(once_s + batch * slope.forward_s, 2 * once_s + batch * slope.backward_s)


def _per_sample(profile: ModelProfile, layer: LayerProfile, device: Device, share: int) -> LayerTime:
    rate = device.peak_flops_per_s[profile.precision] * layer.utilization * share
    backward_flops = 2 * layer.forward_flops if layer.backward_flops is None else layer.backward_flops
    traffic_s = layer.traffic_bytes / share / device.memory_bandwidth_bytes_per_s
    return LayerTime(layer.forward_flops / rate + traffic_s, backward_flops / rate + 2 * traffic_s)


def _from_measurements(profile: ModelProfile, layer: LayerProfile, device: Device, batch: float, share: int,
                       points: List[Measurement]) -> LayerTime:
    first, last = points[0], points[-1]
    if batch <= first.batch:
        ratio = batch / first.batch
        return LayerTime(first.forward_s * ratio, first.backward_s * ratio, batch)
    if batch > last.batch:
        slope, extra = _slope(profile, layer, device, share, last), batch - last.batch
        if len(points) > 1:
            before, more = points[-2], last.batch - points[-2].batch
            line = (last.forward_s - before.forward_s) / more, (last.backward_s - before.backward_s) / more
            slope = LayerTime(*[rise if rise > 0.0 else own for rise, own in zip(line, slope)])
        return LayerTime(last.forward_s + extra * slope.forward_s, last.backward_s + extra * slope.backward_s, last.batch)
    below, above = next((a, b) for a, b in zip(points, points[1:]) if batch <= b.batch)
    along = (batch - below.batch) / (above.batch - below.batch)
    return LayerTime(below.forward_s + along * (above.forward_s - below.forward_s),
                     below.backward_s + along * (above.backward_s - below.backward_s), batch)


def _slope(profile: ModelProfile, layer: LayerProfile, device: Device, share: int, point: Measurement) -> LayerTime:
    """Seconds per sample beyond the only measured batch."""
    whole = point if point.tensor_parallel == 1 else next(
        (other for other in layer.measured if other.device == device.type and other.tensor_parallel == 1), None)
    if whole is None:
        whole, share_of_whole = point, 1
    else:
        share_of_whole = share
    measured = LayerTime(whole.forward_s / whole.batch / share_of_whole, whole.backward_s / whole.batch / share_of_whole)
    if not (layer.forward_flops or layer.traffic_bytes):
        return measured
    counted = _per_sample(profile, layer, device, share)
    return LayerTime(min(measured.forward_s, counted.forward_s), min(measured.backward_s, counted.backward_s))
