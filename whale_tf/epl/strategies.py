"""``epl.replicate`` and ``epl.split``."""

from __future__ import annotations

from typing import Any, Optional

from whale_tf import api
from whale_tf.epl.env import Env
from whale_tf.errors import AnnotationError


class ParallelStrategy:
    """``with epl.replicate(n):`` or the argument of ``epl.set_default_strategy``.

    Attributes:
        device_count: devices of one model replica; None: all.
        name: the script's, or ``Replicate`` or ``Split``.
        is_default: whether it was given to ``epl.set_default_strategy``.
    """

    kind = ""

    def __init__(self, device_count: Optional[int] = None, name: Optional[str] = None) -> None:
        self.device_count, self.name, self.is_default = device_count, name or type(self).__name__, False
        self._block: Any = None

    def here(self) -> Any:
        """The same strategy of whale_tf.  EPL makes a TaskGraph of every block, whatever its name, so names are not passed on."""
        return (api.replicate if self.kind == "replicate" else api.split)(self.device_count)

    def __enter__(self) -> ParallelStrategy:
        check_not_automatic(f"epl.{self.kind}")
        self._block = self.here()
        self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> Optional[bool]:
        block, self._block = self._block, None
        done: Optional[bool] = block.__exit__(*error)
        return done

    def __repr__(self) -> str:
        return f"strategy({self.name!r}, device_count={self.device_count}, is_default={self.is_default})"


class Replicate(ParallelStrategy):
    kind = "replicate"


class Split(ParallelStrategy):
    kind = "split"


def replicate(device_count: Optional[int] = None, name: Optional[str] = None) -> Replicate:
    """A TaskGraph that every one of ``device_count`` devices of a model replica computes for its part of a batch."""
    return Replicate(device_count, name)


def split(device_count: Optional[int] = None, name: Optional[str] = None) -> Split:
    """A TaskGraph whose ops and variables are divided over ``device_count`` devices."""
    return Split(device_count, name)


def set_default_strategy(strategy: ParallelStrategy) -> None:
    """Ops made from now on, outside all ``with`` blocks, are in a new TaskGraph of this strategy.

    Raises:
        AnnotationError: auto_parallel, under which EPL forbids strategies, too.
    """
    check_not_automatic("epl.set_default_strategy")
    strategy.is_default = True
    api.set_default_strategy(strategy.here())


def check_not_automatic(caller: str) -> None:
    config = Env.get().config
    if config is not None and config.auto.auto_parallel:
        raise AnnotationError(f"{caller} is used with auto.auto_parallel, under which whale_tf, as EPL, makes the TaskGraphs "
                              "itself; leave out one of both")
