"""``whale verify``."""

from __future__ import annotations

from typing import List, Optional

import typer

from whale_tf.cli.common import console, reported


def verify(
    script: str = typer.Argument(..., help="a training script (.py) that calls wh.init()"),
    arguments: Optional[List[str]] = typer.Argument(None, help="the script's own arguments (after --)"),
) -> None:
    """Compare a script's first divided training step with the local one, in float64 on logical CPU devices.

    The script runs up to this step, which is not made: nothing is trained. GPUs of its cluster are replaced by as many logical
    CPU devices. The exit status is 1 if something differs.
    """
    with reported(2):
        from whale_tf.measure.scripts import verify_script  # TensorFlow takes seconds to load; only this command needs it
        from whale_tf.runtime.verifying.compare import shown, summary

        (found, missing), where = verify_script(script, arguments or [])
    console().print(shown(found))
    if all(one.is_equal for one in found):
        typer.echo(summary(found, missing, 0.0, where).partition("; this delayed")[0])
        return
    typer.echo(f"verify: {sum(not one.is_equal for one in found)} of {len(found)} values differ", err=True)
    raise typer.Exit(1)
