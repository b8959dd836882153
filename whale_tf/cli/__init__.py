"""The ``whale`` command.  Each module holds commands as plain functions; this module combines them."""
from __future__ import annotations

import typer

from whale_tf.cli import calibrate, plan, profile, run, simulate, verify

app = typer.Typer(name="whale", no_args_is_help=True, add_completion=False,
                  help="Plan, simulate and compare distributed training.")
for _command in (
    calibrate.calibrate, profile.profile, plan.plan, plan.explain, plan.diff, simulate.simulate, simulate.compare,
    verify.verify
):
    app.command()(_command)
# everything after the script's name belongs to the script
app.command(context_settings={"allow_interspersed_args": False})(run.run)


def main() -> None:
    """Entry point of the console script."""
    app()
