"""Memory measures: those that a plan uses, and those that a search may use."""

from __future__ import annotations

from typing import List, NamedTuple, Tuple

from whale_tf.cluster import Cluster
from whale_tf.errors import PlanError, did_you_mean
from whale_tf.plan import OFFLOAD, PRECISIONS, SCHEDULES, ZERO
from whale_tf.profiler.model_profile import ModelProfile
from whale_tf.simulator.laws import HALF, default_laws, layers_with

AUTO = "auto"
NO_LIMIT = 1e18  # bytes
# The schedules to try.  With layers, gpipe is as fast as the first and takes more memory.
SEARCHED = ("backward_first", "zero_bubble_h1", "zero_bubble_h2", "interleaved", "zero_bubble_v")
RECOMPUTE = ("none", "full", "stage", AUTO)
OWN = "own"  # precision: the one for which the model's profile was made
ARITHMETIC = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
PRECISION_OF = {own: name for name, own in ARITHMETIC.items()}


class Measures(NamedTuple):
    """One choice for each kind of measure.

    Attributes:
        recompute: ``full`` keeps the inputs of every layer, ``stage`` those of every stage (GPipe, DAPPLE), ``auto`` as much as
            fits, at the least cost of time.
        zero, offload, schedule: as in a Plan.
        precision: a key of :data:`ARITHMETIC`, or :data:`OWN`.
        is_bounded: whether the memory of devices is limited.  The answer without a limit is a bound for the answer with one.
        room: the part of a device's memory that a search may use.
        below_s: a search may leave out plans that no simulation of its work finishes in less, because a faster plan is known.
    """

    recompute: str = "none"
    zero: str = "none"
    offload: str = "none"
    precision: str = OWN
    schedule: str = "backward_first"
    is_bounded: bool = True
    room: float = 1.0
    below_s: float = float("inf")

    def parameter_bytes(self, profile: ModelProfile, replicas: int) -> float:
        """Bytes that a device holds per byte of its layers' parameters, if ``replicas`` hold the same: value, gradient, states.

        Values that offloading and ZeRO bring to the device for use are not counted here, but in the simulator.
        """
        level, offload = ZERO.index(self.zero), self.offload
        value, gradient, states = (1.0 / replicas if level >= least else 1.0 for least in (3, 2, 1))
        if offload == "v0":
            return 0.0
        return value + gradient + (0.0 if offload == "states" else states * profile.optimizer_bytes_per_parameter_byte)

    def limit(self, usable_bytes: float) -> float:
        return self.room * usable_bytes if self.is_bounded else NO_LIMIT

    def precision_of(self, profile: ModelProfile) -> str:
        """The precision of the arithmetic, given that of the profile."""
        return profile.precision if self.precision == OWN else ARITHMETIC[self.precision]

    def of(self, profile: ModelProfile, cluster: Cluster) -> ModelProfile:
        """The profile in the requested precision.

        Raises:
            PlanError: only the times of a layer are known.
        """
        if self.precision == OWN:
            return profile
        return layers_with(profile, default_laws(), cluster, ARITHMETIC[self.precision], False)

    def described(self) -> List[str]:
        """The measures in words, without defaults."""
        words = {"full": "recomputed", "stage": "recomputed between stages", AUTO: "recomputed in part"}
        found = [words[self.recompute]] if self.recompute != "none" else []
        found += [f"ZeRO {self.zero}"] if self.zero != "none" else []
        found += [f"offload {self.offload}"] if self.offload != "none" else []
        found += [self.precision] if self.precision != OWN else []
        return found + ([self.schedule] if self.schedule != "backward_first" else [])


class Allowed(NamedTuple):
    """The choices of a search: for each kind of measure one value, or ``auto``.

    Attributes:
        precision: ``auto`` tries the profile's own and float16.
    """

    recompute: str = AUTO
    zero: str = "none"
    offload: str = "none"
    precision: str = OWN
    schedule: str = "backward_first"

    def check(self) -> None:
        """Raises PlanError if a value is not allowed."""
        known = {"recompute": RECOMPUTE, "zero": ZERO, "offload": OFFLOAD, "precision": (OWN, *PRECISIONS), "schedule": SCHEDULES}
        for name, values in known.items():
            value, options = getattr(self, name), list(dict.fromkeys((*values, AUTO)))
            if value not in options:
                raise PlanError(f"{name} is {value!r}, expected one of {', '.join(options)}.{did_you_mean(value, options)}")

    def precisions(self, profile: ModelProfile) -> Tuple[str, ...]:
        """The precisions to try, the profile's own first.  A profile in 16 bits is tried in no other."""
        if self.precision != AUTO:
            return (OWN if ARITHMETIC.get(self.precision) == profile.precision else self.precision,)
        return (OWN,) if profile.precision in HALF else (OWN, "float16")

    def divisions(self) -> List[Tuple[str, str]]:
        """Pairs (zero, offload) in order of cost: each comes before every pair of which both parts save at least as much."""
        zero = ZERO if self.zero == AUTO else (self.zero,)
        return [(level, place) for place in (OFFLOAD if self.offload == AUTO else (self.offload,)) for level in zero]

    def without(self, name: str) -> Allowed:
        """The same choices without one kind of measure."""
        least = {"recompute": "none", "zero": "none", "offload": "none", "precision": OWN, "schedule": "backward_first"}
        return self._replace(**{name: least[name]})

    def has(self, measures: Measures) -> bool:
        """Whether a plan under these measures answers the search, which also plays others as bounds."""
        names = ("recompute", "zero", "offload", "schedule")
        return all(getattr(self, name) in (AUTO, getattr(measures, name)) for name in names)


def costs_less(a: Tuple[str, str], b: Tuple[str, str]) -> bool:
    """Whether (zero, offload) ``a`` saves no more than ``b``, and costs no more.  With state on the host, dividing it may cost
    less than not dividing it, since every device then copies only its part."""
    if ZERO.index(a[0]) > ZERO.index(b[0]) or OFFLOAD.index(a[1]) > OFFLOAD.index(b[1]):
        return False
    return a[0] == b[0] or a[1] == "none"


