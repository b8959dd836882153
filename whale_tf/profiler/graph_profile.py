"""A ModelProfile from a captured graph, without running it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence

from whale_tf.ir.graph import Op, OpGraph, Phase, same_graph
from whale_tf.ir.traits import READS, VARIABLES, traits
from whale_tf.profiler.blocks import layer_starts
from whale_tf.profiler.chain import Chain
from whale_tf.profiler.model_profile import LayerProfile, Measurement, ModelProfile
from whale_tf.profiler.op_cost import slot_count
from whale_tf.profiler.op_time import LAUNCH_S, PRECISIONS

MAX_LAYERS = 64  # exact searches of this size take seconds

_OPTIMIZERS = {"Adam": "adam", "Adagrad": "adagrad", "Momentum": "momentum", "RMSProp": "rmsprop", "GradientDescent": "sgd"}


class Source(NamedTuple):
    """The origin of a profile: its name and the graph's fingerprint (empty: a graph that will not be run)."""

    name: str
    fingerprint: str = ""


class OpTimes(NamedTuple):
    """Measured seconds by op name, for one step with a mini-batch of the chain's size on a device of type ``device``."""

    device: str
    seconds: Mapping[str, float]


def graph_profile(chain: Chain, source: Source, max_layers: int = MAX_LAYERS, measured: Optional[OpTimes] = None) -> ModelProfile:
    """A profile with repeated blocks as layers; the rest is divided where the fewest bytes cross."""
    return profile_of(chain.merged(layer_starts(chain, max_layers)), source, measured)


def profile_of(chain: Chain, source: Source, measured: Optional[OpTimes] = None) -> ModelProfile:
    """One layer per segment, per sample; with measured times, one :class:`Measurement` per layer.

    A profile assumes that the backward pass moves twice the forward pass's bytes and launches twice its kernels, so a layer's
    traffic and overhead are a third of the total of both passes.
    """
    batch, names = float(chain.batch), _names(chain)
    parameters = float(chain.parameter_bytes.sum())
    layers = [
        LayerProfile(
            name=names[i],
            forward_flops=float(chain.forward_flops[i]) / batch,
            backward_flops=float(chain.backward_flops[i]) / batch,
            overhead_s=float(chain.launches[i]) / 3 * LAUNCH_S,
            traffic_bytes=float(chain.traffic_bytes[i]) / 3 / batch,
            parameter_bytes=int(chain.parameter_bytes[i]),
            output_bytes=int(chain.crossing_bytes[i] / batch),
            activation_bytes=int(chain.activation_bytes[i] / batch),
            ops=tuple(chain.graph.ops[op].name for op in chain.ops[i]),
            measured=() if measured is None else (_measurement(chain, i, measured),))
        for i in range(chain.size)]
    return ModelProfile(
        name=source.name, source=f"recorded from a graph with mini-batches of {chain.batch}",
        precision=precision_of(chain.graph), batch_granularity=1, optimizer=_optimizer(chain.graph),
        optimizer_bytes_per_parameter_byte=chain.state_bytes / parameters if parameters else 0.0,
        graph=source.fingerprint, layers=tuple(layers))


def _measurement(chain: Chain, segment: int, times: OpTimes) -> Measurement:
    forward, backward = (sum(times.seconds.get(chain.graph.ops[op].name, 0.0) for op in rows[segment])
                         for rows in (chain.ops, chain.backward))
    return Measurement(device=times.device, batch=chain.batch, forward_s=forward, backward_s=backward)


def with_earlier_measurements(profile: ModelProfile, earlier: ModelProfile) -> ModelProfile:
    """The profile with the measurements of another one of the same graph, for device types that it does not have itself."""
    if not profile.graph or not same_graph(profile.graph, earlier.graph) or len(profile.layers) != len(earlier.layers):
        return profile
    layers = []
    for layer, old in zip(profile.layers, earlier.layers):
        known = {(point.device, point.batch) for point in layer.measured}
        kept = tuple(point for point in old.measured if (point.device, point.batch) not in known)
        layers.append(replace(layer, measured=kept + layer.measured))
    return replace(profile, layers=tuple(layers))


def _names(chain: Chain) -> List[str]:
    """Each layer's common name scope, numbered if several layers have the same."""
    scopes = [_scope([chain.graph.ops[op] for op in segment]) for segment in chain.ops]
    seen: Dict[str, int] = {}
    names = []
    for scope in scopes:
        seen[scope] = seen.get(scope, 0) + 1
        names.append(scope if scopes.count(scope) == 1 else f"{scope}.{seen[scope] - 1}")
    return names


def _scope(ops: Sequence[Op]) -> str:
    paths = [op.name for op in ops if op.type not in VARIABLES | READS and op.type != "Const"]
    common = os.path.commonprefix([path.split("/") for path in paths or [ops[-1].name]])
    return "/".join(common) or "model"


def precision_of(graph: OpGraph) -> str:
    """The narrowest precision in which a forward contraction computes; fp32 if there is none."""
    found = {graph.tensors[op.outputs[0]].dtype for op in graph.ops
             if op.phase is Phase.FORWARD and traits(op.type).is_contraction}
    for dtype in ("bfloat16", "float16", "float32", "float64"):
        if dtype in found:
            return PRECISIONS[dtype]
    return "fp32"


def _optimizer(graph: OpGraph) -> str:
    """The optimizer of the update op with the most slots: its name, or that of an optimizer with as many."""
    updates = [op for op in graph.ops if op.phase is Phase.APPLY and traits(op.type).is_update]
    if not updates:
        return "sgd"
    op = max(updates, key=lambda update: slot_count(update, graph))
    return _OPTIMIZERS.get(op.type.rpartition("Apply")[2]) or ("sgd", "momentum", "adam")[min(slot_count(op, graph), 2)]
