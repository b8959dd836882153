"""Writes every model's profile: ``python -m benchmarks.profiles.make`` (``--check``: compare, write nothing)."""

from __future__ import annotations

import os
import sys
from typing import Dict, Sequence

from benchmarks.profiles import layered
from whale_tf import profiler
from whale_tf.profiler.model_profile import ModelProfile
from whale_tf.simulator.layers_of_ops import layered_profile
from whale_tf.simulator.zoo import MODELS

FOLDER = os.path.join(os.path.dirname(os.path.abspath(profiler.__file__)), "builtin")


def every() -> Dict[str, ModelProfile]:
    """The profiles of all models, whether defined by layers or by ops."""
    made = {name: layered_profile(model.at(name, model.batch), model.source)
            for name, model in MODELS.items() if not model.is_sparse}
    made.update(layered.every())
    return made


def main(arguments: Sequence[str]) -> int:
    """Write one file for each profile, or with ``--check`` say which files differ (exit status 1)."""
    stale = []
    for name, profile in every().items():
        path, text = os.path.join(FOLDER, name + ".json"), profile.to_json()
        if "--check" not in arguments:
            with open(path, "w", encoding="utf8") as handle:
                handle.write(text)
            continue
        with open(path, encoding="utf8") as handle:
            if handle.read() != text:
                stale.append(name)
    if stale:
        print("stale profiles: {}".format(", ".join(stale)))
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
