"""``python -m whale_tf.epl [-m] SCRIPT ARGUMENTS...`` runs a script in which ``import epl`` is whale_tf.epl.

``python -m whale_tf.epl --task DIRECTORY SCRIPT``, which ``whale epl-launch`` starts, makes ``DIRECTORY/RANK`` and gives it to a
Python or bash script.  ``python -m whale_tf.epl --path`` prints the directory that does the same on PYTHONPATH, for scripts that
start Python themselves.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

from whale_tf.epl.installed import PATH, install
from whale_tf.errors import WhaleError


def main() -> None:
    if sys.argv[1:] == ["--path"]:
        print(PATH)
        return
    if sys.argv[1:2] == ["--task"] and len(sys.argv) == 4:
        rank = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {}).get("index", 0)
        directory, script = os.path.join(sys.argv[2], str(rank)), sys.argv[3]
        os.makedirs(directory, exist_ok=True)
        if not script.endswith(".py"):  # as EPL: it starts Python itself
            os.execvp("bash", ["bash", script, directory])
        sys.argv[1:] = [script, directory]
    if len(sys.argv) < 2 or sys.argv[1:] == ["-m"]:
        sys.exit("usage: python -m whale_tf.epl [-m] SCRIPT ARGUMENTS...")
    is_module = sys.argv[1] == "-m"
    sys.argv = sys.argv[2 if is_module else 1:]
    script = sys.argv[0]
    if not is_module:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        install()
    except WhaleError as error:
        sys.exit(f"error: {error}")
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
