"""What a process of an elastic job tells its launcher: by its exit status, why it has ended; and its environment."""
from __future__ import annotations

import json
import os
import sys
from typing import Any

from whale_tf.errors import ProcessLostError, ScatteredError, WhaleError
from whale_tf.processes.watch import EXIT_STATUS

REFUSED_STATUS = 78  # EX_CONFIG: whale_tf refuses the script on this number of processes
SCATTERED_STATUS = 79  # these processes lack parts of snapshots that others may have
REASON = "whale refused "  # what the line of standard error begins with that is for the launcher alone
TOLD = "WHALE_TOLD"  # environment variable: file that gets the variables that the script has changed, and those it has removed


def tell_launcher() -> None:
    """From now on an error of this library that nobody catches ends the process with a status of its own.

    It is 75 if another process is lost, 79 if other hosts have parts of the snapshots, otherwise 78.  The message is printed as
    always; with 78 and 79 the launcher gets it, too.
    """
    before = sys.excepthook

    def hook(kind: Any, value: Any, trace: Any) -> None:
        before(kind, value, trace)
        if issubclass(kind, WhaleError):
            if issubclass(kind, ProcessLostError):
                sys.exit(EXIT_STATUS)  # Python ends with it
            print(REASON + " ".join(str(value).split()), file=sys.stderr, flush=True)
            sys.exit(SCATTERED_STATUS if issubclass(kind, ScatteredError) else REFUSED_STATUS)

    sys.excepthook = hook


def tell_environment() -> None:
    """Write what the script has changed in its environment, if the launcher wants to know.

    Some variables count only when TensorFlow is imported.
    """
    path = os.environ.get(TOLD)
    if path is None or os.path.exists(path) or not os.path.exists("/proc/self/environ"):
        return
    with open("/proc/self/environ", "rb") as handle:
        given = dict(os.fsdecode(pair).partition("=")[::2] for pair in handle.read().split(b"\0") if b"=" in pair)
    changed = {name: value for name, value in os.environ.items() if given.get(name) != value}
    removed = dict.fromkeys(set(given) - set(os.environ))
    with open(f"{path}.new", "w", encoding="utf8") as file:
        json.dump({**changed, **removed}, file)
    os.replace(f"{path}.new", path)
