"""Prints what becomes of each model of ``section_cases`` under each plan: equal, refused (why), warned, or different.

    python -m tests.numeric.section_table [MODEL ...]
"""
from __future__ import annotations

import collections
import sys
import warnings
from typing import Counter, Dict

import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.numeric.equality import TOLERANCE, differences, run_local, run_parallel
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


def outcome(name: str, plan: str, static_batch: bool) -> str:
    """``equal``, ``warned``, ``refused (reason)`` or ``different (where)``."""
    setting = Setting(static_batch=static_batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", wh.InexactWarning)
        try:
            found = run_parallel(SECTIONS[name], setting, PLANS[plan])
        except wh.WhaleError as error:
            return f"refused ({error})"
    if any(issubclass(each.category, wh.InexactWarning) for each in caught):
        return "warned"
    wrong = differences(found, run_local(SECTIONS[name], setting), TOLERANCE["float64"])
    return f"different ({wrong[0]})" if wrong else "equal"


def main() -> None:
    tf.disable_v2_behavior()
    counts: Counter[str] = collections.Counter()
    for name in sys.argv[1:] or SECTIONS:
        for plan in PLANS:
            for static in (True, False):
                text = outcome(name, plan, static)
                counts[text.split(" ")[0]] += 1
                print(f"{name:20} {plan:16} {'static' if static else 'open':7} {text}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
