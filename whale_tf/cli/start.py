"""``python -m whale_tf.cli.start [-m] SCRIPT ARGUMENTS...`` calls ``wh.init()`` and runs a script that need not know of it.

``whale run --replicate`` and ``--auto`` start this module.  Configuration and cluster come from the environment.
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    from whale_tf import api
    from whale_tf.processes.watch import say

    is_module = sys.argv[1] == "-m"
    sys.argv = sys.argv[2 if is_module else 1:]
    script = sys.argv[0]
    api.init()
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")
    if api.current_plan() is None:
        say(f"{script} trained nothing in a TensorFlow graph or tf.function, so nothing was parallelized")


if __name__ == "__main__":
    main()
