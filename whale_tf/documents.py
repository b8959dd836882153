"""JSON that a user gives as text or as the path of a file: plans, configurations, calibrations, step graphs."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, Type

from pydantic import ValidationError

from whale_tf.errors import WhaleError


def json_object(source: str, what: str, error: Type[WhaleError], fix: str) -> Dict[str, Any]:
    """The JSON object in ``source``: text that begins with ``{``, else the path of a file.

    Args:
        what: ``plan``, ``config``, ...
        error: what is raised if there is no such file, or something else in it.
        fix: where such files come from, for a file that does not exist.
    """
    text, origin = source, f"the {what}"
    if not source.lstrip().startswith("{"):
        origin = f"{what} file {source!r}"
        if not os.path.isfile(source):
            raise error(f"{origin} does not exist; {fix}")
        with open(source, encoding="utf8") as handle:
            text = handle.read()
    try:
        value = json.loads(text)
    except ValueError as problem:
        raise error(f"{origin} is not valid JSON: {problem}") from None
    if not isinstance(value, dict):
        raise error(f"{origin} holds {value!r:.40}, expected an object")
    return value


def problems(error: ValidationError, whole: str) -> str:
    """Place, reason and value of everything that a validation found; what a check of the whole value says, it says alone.

    Args:
        whole: the place of what concerns the whole value.
    """
    found = []
    for item in error.errors():
        place, reason = ".".join(str(part) for part in item["loc"]), item["msg"].replace("Value error, ", "")
        value = " (got {!r:.80})".format(item.get("input")) if place or item["type"] != "value_error" else ""
        found.append(f"{place or whole}: {reason}{value}")
    return "; ".join(found)
