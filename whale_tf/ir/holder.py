"""Analyses of a value that does not change, each computed once."""

from __future__ import annotations

from typing import Any, Callable, Dict, Hashable, Tuple, TypeVar

Result = TypeVar("Result")


class Holder:
    """Holds what has been computed from it.  A changed copy holds nothing."""

    def once(self, analysis: Callable[..., Result], *more: Any) -> Result:
        """``analysis(self, *more)``, computed when it is first asked for, with these very objects."""
        held: Dict[Hashable, Tuple[Any, Result]] = self.__dict__.setdefault("_held", {})
        key = (analysis, *map(id, more))
        if key not in held:
            held[key] = more, analysis(self, *more)  # while these are kept, no other object has their numbers
        return held[key][1]
