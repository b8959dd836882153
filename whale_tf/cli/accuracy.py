"""How accurate the model has been: the last lines of ``whale simulate``, ``whale compare`` and ``whale plan``."""

from __future__ import annotations

from typing import Iterable, List, NamedTuple, Optional, Tuple

from whale_tf.simulator.laws import Laws, TestedError


class Accuracy(NamedTuple):
    """Attributes:
    tested: the largest errors among the types of devices; None: such times were never tested.
    untested: types of devices, or types in a precision, on which nothing was tested.
    """

    tested: Optional[TestedError]
    untested: Tuple[str, ...] = ()

    def bounds(self, samples_per_s: float) -> Optional[Tuple[float, float]]:
        """The range of samples per second in which nine of ten measurements were."""
        if self.tested is None:
            return None
        return samples_per_s / (1.0 + self.tested.most), samples_per_s * (1.0 + self.tested.most)

    def lines(self, samples_per_s: float) -> List[str]:
        """The range of samples per second, and what it follows from."""
        return ([] if self.tested is None else [self.rate(samples_per_s)]) + [self.text()]

    def rate(self, samples_per_s: float) -> str:
        """``412 samples/s, 330 to 500``; without the range if such times were never tested."""
        bounds = self.bounds(samples_per_s)
        return f"{samples_per_s:.4g} samples/s" + ("" if bounds is None else ", {:.4g} to {:.4g}".format(*bounds))

    def text(self) -> str:
        if self.tested is None:
            return "accuracy: such times were never compared with measurements"
        one = self.tested
        text = (f"accuracy: on {one.device} in {one.precision}, predictions for steps made of {one.times} had a mean error of "
                f"{one.mean:.0%}, and nine of ten were within a factor of {1 + one.most:.2f}, over {one.points} measurements "
                "that nothing was fitted to")
        if self.untested:
            text += "; {} {} not tested".format(", ".join(self.untested), "was" if len(self.untested) == 1 else "were")
        return text


def accuracy(laws: Laws, times: str, types: Iterable[str], precision: str) -> Accuracy:
    """The accuracy of such times on these types of devices so far; of a type that was not tested, the worst there is."""
    known, untested = [one for one in laws.errors if one.times == times], []
    names = sorted(set(types))
    for name in names:
        precisions = [one.precision for one in known if name.startswith(one.device)]
        if precision not in precisions:
            untested.append(f"{name} in {precision}" if precisions else name)
    found = [laws.error(times, name, precision) for name in names]
    return Accuracy(max((one for one in found if one is not None), key=lambda one: one.most, default=None), tuple(untested))
