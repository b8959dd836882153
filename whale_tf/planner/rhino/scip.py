"""Imports SCIP, which solves the integer programs, from ortools.  An extra installs ortools, so that a plain installation does
not change protobuf or NumPy.  This is the only place that imports it."""

from __future__ import annotations

from typing import Any

from whale_tf.errors import MissingPackageError


def linear_solver() -> Any:
    """ortools' module of linear programs.

    Raises:
        MissingPackageError: ortools is not installed, or does not load.
    """
    try:
        from ortools.linear_solver import pywraplp
    except ImportError as error:
        raise MissingPackageError(
            f'an integer program needs ortools ({error}); install it: pip install "whale_tf[planner]"') from error
    return pywraplp


def new_solver() -> Any:
    """An empty program.

    Raises:
        MissingPackageError: see :func:`linear_solver`; or this ortools has no SCIP.
    """
    solver = linear_solver().Solver.CreateSolver("SCIP")
    if solver is None:
        raise MissingPackageError("an integer program needs SCIP, which the installed ortools was built without; install "
                                  "ortools from PyPI")
    return solver
