"""What ``whale check`` finds out about the first step that a script divides, on a machine without its GPUs."""
from __future__ import annotations

from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf import api
from whale_tf._tf_compat import tf
from whale_tf.cluster import Cluster
from whale_tf.decide.decision import Decision
from whale_tf.decide.facts import trained_variables
from whale_tf.errors import PlanError, WhaleError
from whale_tf.measure.placed import step_ops
from whale_tf.measure.registry import kernels
from whale_tf.measure.scripts import check_script, end_script, run_script_in
from whale_tf.plan import Plan
from whale_tf.planner.play import played
from whale_tf.profiler.placement import HOST, Crossing, GraphOp, Lacking, Placed, crossings, lacking, place
from whale_tf.runtime.verifying.compare import Comparison
from whale_tf.runtime.verifying.divided import Step


class Checked(NamedTuple):
    """A step that was divided for a cluster.

    Attributes:
        where: the graph or function.
        version: the TensorFlow whose kernels were looked up.
        ops, placed, crossings, lacking: see :mod:`whale_tf.profiler.placement`; of a cluster without GPUs nothing is placed.
        examples: of the mini-batch for which sizes hold.
        seconds, peaks: of the simulated step, and the most bytes of each device; ``unknown`` says why there are none.
        comparison: of the divided step with the local one; None: ``failure`` says why there is none.
    """

    where: str
    plan: Plan
    cluster: Cluster
    version: str
    ops: Sequence[GraphOp]
    placed: Sequence[Placed]
    crossings: Sequence[Crossing]
    lacking: Sequence[Lacking]
    examples: int
    seconds: float
    peaks: Tuple[int, ...]
    unknown: str
    comparison: Optional[Comparison]
    failure: str

    @property
    def fits(self) -> bool:
        return all(peak <= device.usable_bytes for peak, device in zip(self.peaks, self.cluster.devices))

    @property
    def differing(self) -> int:
        """The number of values that differ from the local step's."""
        return 0 if self.comparison is None else sum(not one.is_equal for one in self.comparison[0])

    @property
    def on_gpus(self) -> int:
        """The number of ops that run on GPUs."""
        return sum(one.device != HOST for one in self.placed)

    @property
    def is_fine(self) -> bool:
        """Whether everything runs where the plan puts it, fits, and computes what the local step computes."""
        return self.fits and not self.failure and not self.differing and not any(row.comes_back for row in self.lacking)


def check_model(path: str, arguments: Sequence[str], cluster: Cluster) -> Checked:
    """Builds the first step that a script divides as for a cluster, which this machine need not have, and looks at it.  The
    script runs up to this step, which is not made.

    Raises:
        PlanError: there is no such script, or it divides nothing.
    """
    check_script(path)
    found: List[Checked] = []

    def take(compared: Callable[[], Comparison], where: str, step: Step) -> None:
        found.append(_checked(compared, where, step, cluster))
        end_script()

    run_script_in(api.verifying(take, cluster), path, arguments)
    if not found:
        raise PlanError(f"{path!r} ended without a training step that whale_tf divides, so there is nothing to check: it needs "
                        "wh.init(), more than one device in --cluster, and a training step")
    return found[0]


def _checked(compared: Callable[[], Comparison], where: str, step: Step, cluster: Cluster) -> Checked:
    ops: List[GraphOp] = []
    known, version = kernels(), tf.__version__
    if all(device.kind == "GPU" for device in cluster.devices):
        ops, version = step_ops(step), known.version
    placed = place(ops, known)
    crossed = crossings(ops, placed)
    decision = step.done.decision
    assert decision is not None
    examples = _examples(decision, step)
    seconds, peaks, unknown = 0.0, (), ""  # type: float, Tuple[int, ...], str
    try:
        seconds, peaks = _played(decision, examples, cluster)
    except WhaleError as error:
        unknown = str(error)
    comparison, failure = None, ""
    try:
        comparison = compared()
    except (WhaleError, tf.errors.OpError, ValueError) as error:
        failure = str(error).strip().splitlines()[0] or type(error).__name__
    return Checked(where, step.done.plan, cluster, version, ops, placed, crossed, lacking(ops, placed, crossed), examples,
                   seconds, peaks, unknown, comparison, failure)


def _examples(decision: Decision, step: Step) -> int:
    """The number of examples of the mini-batch that the step has been given."""
    captured = decision.captured
    for tensor, dim in captured.sources.items():
        value = step.given.get(captured.graph.tensor_name(tensor))
        if value is not None and dim < len(value.shape):
            return int(value.shape[dim])
    known = captured.examples
    if known is None:
        raise PlanError("the number of examples of a mini-batch is not known; give the inputs a static batch size")
    return known


def _played(decision: Decision, examples: int, cluster: Cluster) -> Tuple[float, Tuple[int, ...]]:
    """Seconds of the step in simulation, and the most bytes that each device holds."""
    captured = decision.captured
    region = decision.region._replace(graph=captured.sized(examples))
    return played(captured.step(region), decision.plan, cluster, trained_variables(captured))
