"""Simulates candidates: plans of layers are compared by this time, whichever search they come from."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, Optional, Tuple

from whale_tf.cluster import Cluster
from whale_tf.errors import InfeasibleError, PlanError
from whale_tf.plan import Plan
from whale_tf.planner.candidate import Candidate, no_candidate
from whale_tf.planner.slices import replica_slices
from whale_tf.profiler.model_profile import ModelProfile
from whale_tf.simulator import (
    LayerEstimator,
    ModelGraph,
    Options,
    Simulation,
    Simulator,
    Source,
    layer_names,
    layered_model,
    micro_batch_size,
    strategy_from_plan,
    tensor_parallel,
)
from whale_tf.simulator.laws import LAYERS

ALGORITHM = "exact"  # divides a micro-batch over unequal devices, unless a configuration says otherwise


def simulator_of(cluster: Cluster, source: Optional[Source] = None) -> Simulator:
    """The simulator of plans of layers.  No two of them are compiled alike.

    Args:
        source: the model, if it is more than its layers: what running it adds to a step is counted for its layers too.
    """
    options = Options(steady_state=True)
    return Simulator(cluster, options if source is None else source.options(options), keep=1)


class LayeredModels:
    """Profiles' layers as the simulator sees them, for each size of a micro-batch; many candidates share one."""

    def __init__(self) -> None:
        self._models: Dict[Tuple[int, int], ModelGraph] = {}
        self._names: Dict[int, Tuple[ModelProfile, Dict[str, str]]] = {}  # which keep the profiles

    def model(self, profile: ModelProfile, size: int) -> ModelGraph:
        self.names(profile)
        key = id(profile), size
        if key not in self._models:
            self._models[key] = layered_model(profile, size)
        return self._models[key]

    def names(self, profile: ModelProfile) -> Dict[str, str]:
        """See :func:`whale_tf.simulator.layered.layer_names`."""
        if id(profile) not in self._names:
            self._names[id(profile)] = profile, layer_names(profile)
        return self._names[id(profile)][1]


def simulated(found: Candidate, cluster: Cluster, balance: str = ALGORITHM, simulator: Optional[Simulator] = None,
              models: Optional[LayeredModels] = None) -> Candidate:
    """The candidate with the simulator's time and memory instead of those of its search.

    Args:
        simulator: see :func:`simulator_of`; it keeps what plans on one cluster have in common.
        models: keeps what candidates of one profile have in common.
    """
    profile, models = found.profile, models or LayeredModels()
    if profile is None:
        return found
    model = models.model(profile, micro_batch_size(found.global_batch, found.micro_batches, 1))
    try:
        strategy = strategy_from_plan(with_slices(found, profile, cluster, balance), model, models.names(profile))
        costs = LayerEstimator(model, profile, tensor_parallel(strategy))
        played = (simulator or simulator_of(cluster)).run(strategy, costs)
    except PlanError as error:
        return no_candidate(found.search, error)
    return _as_played(found, played, LAYERS)


def priced(found: Candidate, source: Source, simulator: Simulator, balance: str = ALGORITHM) -> Candidate:
    """The candidate with the time and memory of the model itself, as ``whale simulate`` answers them for its plan.

    Args:
        simulator: of the cluster, with the options of the source.
    """
    assert found.profile is not None, "stages are given in layers"
    try:
        plan = with_slices(found, found.profile, simulator.cluster, balance)
        played = source.simulated(plan, found.global_batch, simulator)
    except PlanError as error:
        return no_candidate(found.search, error)
    return replace(_as_played(found, played, source.times), xla=bool(source.xla))


def _as_played(found: Candidate, played: Simulation, times: str) -> Candidate:
    peaks = [0] * found.num_devices
    for device, peak in zip(sorted({d for stage in found.stages for d in stage.all_devices}), played.peak_memory_bytes):
        peaks[device] = int(peak)
    return replace(found, latency_s=played.step_time_s, peak_memory_bytes=tuple(peaks), fits=not played.oom, is_played=True,
                   times=times, host=played.host_words())


def with_slices(result: Candidate, profile: ModelProfile, cluster: Cluster, balance: str) -> Plan:
    """The plan with uneven parts of a micro-batch if a stage's devices are unequal, or its replicas do not divide it.

    If no division of a stage fits in memory, the stage keeps equal parts, and the simulator reports that it does not fit.
    """
    plan = result.to_plan(profile)
    samples = result.global_batch // (result.micro_batches * result.model_replicas)
    tasks = []
    for stage, task in zip(result.stages, plan.task_graphs):
        if stage.strategy == "split":
            tasks.append(task)
            continue
        kept = sum(layer.activation_bytes for layer in profile.layers[stage.first_layer:stage.last_layer + 1])
        fixed = profile.stage_parameter_bytes(stage.first_layer, stage.last_layer + 1) * profile.bytes_per_parameter_byte
        load = float(stage.warmup * kept * samples)
        try:
            slices = replica_slices(task.name, task.devices, cluster, samples, load, fixed, balance, profile.precision)
        except InfeasibleError:
            slices = None
        tasks.append(replace(task, slices=slices))
    return replace(plan, task_graphs=tuple(tasks))
