"""Prints what becomes of each model of ``section_cases`` under each plan: equal, refused (why), warned, different or crashed.

    python -m tests.numeric.section_table [--full] [MODEL ...]

Each pair of model and plan has a static or an open batch in turn, and with ``--full`` both.
"""
from __future__ import annotations

import collections
import functools
import sys
import warnings
from typing import Counter, Dict

import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.numeric.equality import TOLERANCE, Outcome, differences, run_local, run_parallel
from tests.numeric.plans import SHAPES, Parallel
from tests.numeric.script import Setting
from tests.numeric.section_cases import SECTIONS

PLANS: Dict[str, Parallel] = {
    "data parallel 2": Parallel(SHAPES["replicate2"]),
    "data parallel 4": Parallel(SHAPES["replicate4"]),
    "accumulation": Parallel(SHAPES["one"], 3),
    "pipeline": Parallel(SHAPES["pipeline2"], 2),
    "nested": Parallel(SHAPES["nested2x2"], 1, extra=(("io.nested_batch", "divide"),)),
    "1:3": Parallel(SHAPES["counts1:3"]),
}


@functools.lru_cache(maxsize=None)
def _local(name: str, setting: Setting) -> Outcome:
    return run_local(SECTIONS[name], setting)


def outcome(name: str, plan: str, static_batch: bool) -> str:
    """``equal``, ``warned``, ``refused (reason)``, ``different (where)`` or ``crashed (how)``."""
    setting = Setting(static_batch=static_batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", wh.InexactWarning)
        try:
            found = run_parallel(SECTIONS[name], setting, PLANS[plan])
        except wh.WhaleError as error:
            return f"refused ({error})"
        except Exception as error:  # what is not ours
            return f"crashed ({type(error).__name__}: {str(error)[:300]})"
    if any(issubclass(each.category, wh.InexactWarning) for each in caught):
        return "warned"
    wrong = differences(found, _local(name, setting), TOLERANCE["float64"])
    return f"different ({wrong[0]})" if wrong else "equal"


def main() -> None:
    tf.disable_v2_behavior()
    counts: Counter[str] = collections.Counter()
    names = [name for name in sys.argv[1:] if name != "--full"] or list(SECTIONS)
    for number, name in enumerate(names):
        for place, plan in enumerate(PLANS):
            for static in (True, False) if "--full" in sys.argv else ((number + place) % 2 == 0,):
                text = outcome(name, plan, static)
                counts[text.split(" ")[0]] += 1
                print(f"{name:20} {plan:16} {'static' if static else 'open':7} {' '.join(text.split())}", flush=True)
        _local.cache_clear()
    print(dict(counts), f"{counts['equal'] / sum(counts.values()):.1%} equal")


if __name__ == "__main__":
    main()
