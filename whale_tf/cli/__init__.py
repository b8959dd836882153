"""The ``whale`` command.  Each module holds commands as plain functions; this module combines them."""
from __future__ import annotations

import sys
from typing import Any, List

import typer

from whale_tf.cli import calibrate, check, checkpoint, doctor, estimate, plan, profile, run, simulate, verify
from whale_tf.version import VERSION

app = typer.Typer(name="whale", no_args_is_help=True, add_completion=False,
                  help="Plan, simulate and compare distributed training.")
for _command in (
    calibrate.calibrate, profile.profile, plan.plan, plan.explain, plan.diff, simulate.simulate, simulate.compare,
    estimate.estimate, verify.verify, check.check, doctor.doctor, checkpoint.checkpoint
):
    app.command()(_command)
# everything after the script's name belongs to the script
app.command(context_settings={"allow_interspersed_args": False})(run.run)
app.command("epl-launch")(run.epl_launch)

_Usage: Any = typer.BadParameter.__mro__[1]  # click's UsageError; typer has its own copy of click since 0.20
WRONG = 2  # exit status: the command line makes no sense


@app.callback()
def whale(version: bool = typer.Option(False, "--version", help="print the version, and end", is_eager=True,
                                       callback=lambda asked: _print_version(asked))) -> None:
    """Plan, simulate and compare distributed training."""


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"whale_tf {VERSION}")
        raise typer.Exit()


def main() -> None:
    """Entry point of the console script."""
    sys.exit(called(sys.argv[1:]))


def called(arguments: List[str]) -> int:
    """Runs a command line and returns its exit status.  Whatever is wrong with it is said in one line."""
    try:
        status = typer.main.get_command(app).main(args=arguments or ["--help"], prog_name="whale", standalone_mode=False)
    except _Usage as error:
        typer.echo(f"error: {' '.join(error.format_message().split())}", err=True)
        return WRONG
    except typer.Abort:
        typer.echo("error: interrupted", err=True)
        return 1
    return status if isinstance(status, int) else 0
