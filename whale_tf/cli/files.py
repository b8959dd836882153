"""Files that commands write: checked before the work whose result they hold."""

from __future__ import annotations

import os
from typing import Dict, Optional

from whale_tf.errors import PlanError

PICTURES = (".png", ".svg")


def check_files(files: Dict[str, Optional[str]], pictures: Dict[str, Optional[str]]) -> None:
    """Check paths by their options; None: not given.

    Raises:
        PlanError: a directory does not exist, a path is a directory, or the name of a picture ends in something else than
            :data:`PICTURES`.
    """
    for option, path in {**files, **pictures}.items():
        if path is None:
            continue
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            raise PlanError(f"{option} is {path!r}, but there is no directory {folder!r}; make it, or write elsewhere")
        if os.path.isdir(path):
            raise PlanError(f"{option} is {path!r}, which is a directory; add a file name")
    for option, path in pictures.items():
        if path is not None and not path.endswith(PICTURES):
            raise PlanError(f"{option} is {path!r}, expected a name that ends in {' or '.join(PICTURES)}")
