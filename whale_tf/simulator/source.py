"""What a model's steps cost: one price for everything that predicts a step of it.

A built-in model that is defined by ops is priced as TensorFlow runs it (:mod:`whale_tf.simulator.laws`), op by op or under XLA.
A profile of layers has its own times; so does a model that only a paper's layers define.  On CPUs ops take what the hardware
table or a calibration says.

A Plan of layers, as searches write it, names the top-level nodes of a model of ops, so both kinds of models can be played under
it.  Searches read layers; :meth:`Source.layers` gives them those of a model of ops, with the same times.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError, did_you_mean
from whale_tf.plan import Plan
from whale_tf.profiler.model_profile import ModelProfile, builtin_names
from whale_tf.simulator.costs import OpEstimator
from whale_tf.simulator.from_plan import strategy_from_plan
from whale_tf.simulator.laws import KERNELS, LAYERS, PRICED, Kernels, Laws, as_run, layers_with
from whale_tf.simulator.layered import LayerEstimator, layer_names, layered_model, tensor_parallel
from whale_tf.simulator.layers_of_ops import timed_profile
from whale_tf.simulator.model_graph import ModelGraph
from whale_tf.simulator.result import Simulation
from whale_tf.simulator.simulate import Options, Simulator
from whale_tf.simulator.strategy_tree import CompleteStrategy, check_even
from whale_tf.simulator.uniform import micro_batch_size
from whale_tf.simulator.zoo import FAMILIES, built_in_model, is_defined_by_ops, model_names, source_of


class Execution(NamedTuple):
    """How TensorFlow runs the ops: in which precision (None means the model's own), whether XLA fuses them, and whether float32
    gradients are sent in 16 bits."""

    precision: Optional[str]
    xla: bool
    laws: Laws
    cluster: Cluster
    fp16_gradients: bool = False


class Source(NamedTuple):
    """The source of a model's costs: a model of ops, or a profile.

    Attributes:
        profile: None: the model is defined by ops.
    """

    name: str
    profile: Optional[ModelProfile]
    execution: Execution

    @classmethod
    def of_model(cls, name: str, execution: Execution) -> Source:
        """A built-in model.

        Raises:
            PlanError: there is none of that name.
        """
        if is_defined_by_ops(name):
            built_in_model(name, 1)  # its arguments
            return cls(name, None, execution)
        if name not in builtin_names():
            raise PlanError("unknown model {!r}; built-in models: {}; of any size: {}:layers=24,hidden=2048.{}".format(
                name, ", ".join(model_names()), ", ".join(FAMILIES), did_you_mean(name, model_names())))
        return cls.of_profile(name, execution)

    @classmethod
    def of_profile(cls, profile: str, execution: Execution) -> Source:
        """A profile: a file, or the name of one that comes with the package."""
        parsed = ModelProfile.parse(profile)
        return cls(parsed.name, parsed, execution)

    def under(self, precision: str) -> Source:
        """The same model in a precision."""
        return self._replace(execution=self.execution._replace(precision=precision))

    # ---- what it costs -------------------------------------------------------------------------------------------------

    @property
    def precision(self) -> str:
        """The precision of the arithmetic."""
        if self.execution.precision is not None:
            return self.execution.precision
        return self.profile.precision if self.profile is not None else built_in_model(self.name, 1).precision

    @property
    def xla(self) -> Optional[bool]:
        """Whether XLA fuses the ops, as in :class:`~whale_tf.simulator.simulate.Options`; None: times are those of layers."""
        return self.execution.xla if self.profile is None else None

    @property
    def times(self) -> str:
        """The kind of its times, as their accuracy was tested."""
        return KERNELS if self.profile is None else LAYERS

    def described(self) -> str:
        """How it is priced, in words."""
        return PRICED[self.times] + " under XLA" * bool(self.xla)

    def options(self, options: Options = Options()) -> Options:  # noqa: B008 (a frozen tuple)
        return options._replace(xla=self.xla, laws=self.execution.laws)

    def graph(self, batch: int) -> ModelGraph:
        """The model at a micro-batch of ``batch`` examples, as it runs."""
        if self.profile is not None:
            return layered_model(self._scaled(self.profile), batch)
        model = built_in_model(self.name, batch)
        if all(device.kind == "CPU" for device in self.execution.cluster.devices):
            return model
        return as_run(model, self.precision, self.execution.xla)

    def estimator(self, strategy: CompleteStrategy) -> Optional[OpEstimator]:
        """Costs of the ops of :meth:`graph`; None: by the options."""
        if self.profile is None:
            return None
        return LayerEstimator(strategy.model, self._scaled(self.profile), tensor_parallel(strategy))

    def layers(self, global_batch: int) -> ModelProfile:
        """The model as searches read it.

        Args:
            global_batch: no device has more examples at once.

        Raises:
            PlanError: layers cannot express the model, or their times in the precision are unknown.
        """
        if self.profile is not None:
            return self._scaled(self.profile)
        return _layers(self, global_batch)

    def _scaled(self, profile: ModelProfile) -> ModelProfile:
        laws, cluster, precision, xla = (self.execution.laws, self.execution.cluster, self.precision, self.execution.xla)
        return layers_with(profile, laws, cluster, precision, xla)

    # ---- under a plan --------------------------------------------------------------------------------------------------

    def strategy(self, plan: Plan, global_batch: int) -> CompleteStrategy:
        """A Plan of this model as a strategy.

        Raises:
            PlanError: the plan is for another model, or the batch cannot be divided like that.
        """
        graph = self.graph(micro_batch_size(global_batch, plan.num_micro_batch, plan.num_model_replicas))
        return strategy_from_plan(plan, graph, layer_names(self.profile) if self.profile is not None else None)

    def simulated(self, plan: Plan, global_batch: int, simulator: Simulator) -> Simulation:
        """A step under a Plan; ``simulator``: with this source's :meth:`options`."""
        return self.played(self.strategy(plan, global_batch), simulator)

    def played(self, strategy: CompleteStrategy, simulator: Simulator) -> Simulation:
        """A step under a strategy for :meth:`graph`."""
        if self.profile is None:
            check_even(strategy)
        strategy = strategy._replace(fp16_gradients=self.execution.fp16_gradients)
        return simulator.run(strategy, self.estimator(strategy))


def _layers(source: Source, global_batch: int) -> ModelProfile:
    one = built_in_model(source.name, 1)
    if any(tensor.sparse_rows is not None for tensor in one.tensors):
        raise PlanError(f"model {source.name!r} has sparse gradients, which a profile of layers cannot express; use "
                        f"`whale simulate --model {source.name}` with --dp, --tp and --pp, or another model (whale plan --list)")
    cluster, xla = source.execution.cluster, source.execution.xla

    def kernels(model: ModelGraph) -> Optional[Kernels]:
        return Kernels(model, source.execution.laws, xla) if all(one.kind == "GPU" for one in cluster.devices) else None

    return timed_profile(source.graph, source_of(source.name), cluster, kernels, global_batch)
