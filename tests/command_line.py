"""Runs the command line inside this process."""
from __future__ import annotations

import inspect
from typing import NamedTuple, Optional

import typer
from typer.testing import CliRunner


class Called(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str
    exception: Optional[BaseException]

    @property
    def output(self) -> str:
        """All text, that of stdout first."""
        return self.stdout + self.stderr


def call(app: typer.Typer, *arguments: str) -> Called:
    """What a command of `app` prints into a pipe."""
    # Click before 8.2 writes both streams into one unless told otherwise; later releases always keep them apart.
    mixes = "mix_stderr" in inspect.signature(CliRunner).parameters
    result = CliRunner(**({"mix_stderr": False} if mixes else {})).invoke(app, list(arguments))
    return Called(result.exit_code, result.stdout, result.stderr, result.exception)
