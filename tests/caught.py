"""Counts how many changes of the rewriter that change numbers ``verify: "first_step"`` catches.

    python -m tests.caught 200                          until 200 changes have changed the numbers of a model
    python -m tests.caught 200 --seconds 600            and at most for so long
    python -m tests.caught 50 whale_tf.emit.convert     of one module, or several

The changes are those of ``tests.mutation``, in random order.  Each runs in a forked process, on a few models under plans of all
kinds.  A model whose numbers differ from the local script's although no error was raised counts; it then runs again, verified.  A
change is caught if every such model is.
"""
from __future__ import annotations

import argparse
import ast
import copy
import importlib
import inspect
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from tests.mutation import ROOT, Mutant, _in_child, mutants

MODULES = (
    "whale_tf.emit.convert", "whale_tf.emit.merge", "whale_tf.emit.division", "whale_tf.emit.inputs", "whale_tf.emit.operands",
    "whale_tf.emit.bridge", "whale_tf.emit.clones", "whale_tf.emit.update", "whale_tf.emit.reroute", "whale_tf.ir.region",
    "whale_tf.ir.batch_axis.propagate", "whale_tf.ir.batch_axis.operands", "whale_tf.ir.batch_axis.reshaping",
    "whale_tf.ir.batch_axis.positions", "whale_tf.ir.batch_axis.promote", "whale_tf.bridges")
ROWS: Sequence[Tuple[str, str, int, bool, bool]] = (  # case, shape of the plan, micro-batches, static batch size, dataset
    ("weighted_loss", "counts1:3", 2, False, False), ("sum_with_l2", "nested2x2", 2, True, True),
    ("clipped_adam", "replicate2", 1, True, False), ("tied_embedding", "counts2:1:1", 2, False, True),
    ("sparse_embedding", "replicate4", 1, False, False))
CPU_SECONDS = 60


def run(row: Tuple[str, str, int, bool, bool], verified: bool) -> Any:
    """What a model computes under its plan."""
    from tests.numeric.equality import find_case, run_parallel
    from tests.numeric.plans import SHAPES, Parallel
    from tests.numeric.script import Setting

    name, shape, micro_batches, static_batch, dataset = row
    setting = Setting("float64", True, static_batch, dataset)
    parallel = Parallel(SHAPES[shape], micro_batches, extra=(("verify", "first_step" if verified else "off"),))
    return run_parallel(find_case(name), setting, parallel)


def local(row: Tuple[str, str, int, bool, bool]) -> Any:
    from tests.numeric.equality import find_case, run_local
    from tests.numeric.plans import SHAPES
    from tests.numeric.script import Setting

    return run_local(find_case(row[0]), Setting("float64", True, True, row[4]), SHAPES[row[1]].model_replicas)


def verdict(expected: Dict[Any, Any]) -> Tuple[List[str], List[str], List[str]]:
    """Models with other numbers, those of them that are not caught, and models that raise an error by themselves."""
    import whale_tf as wh
    from tests.numeric.equality import differences

    changed, missed, refused = [], [], []
    for row in ROWS:
        try:
            outcome = run(row, verified=False)
        except Exception:  # whatever is raised says that something is wrong
            refused.append(row[0])
            continue
        if differences(outcome, expected[row], 1e-10):
            changed.append(row[0])
            try:
                run(row, verified=True)
            except wh.MismatchError:
                continue
            except Exception:
                continue
            missed.append(row[0])
    return changed, missed, refused


def apply(module: str, path: str, tree: ast.AST) -> None:
    """Puts the code of a changed module into the loaded one's functions and methods."""
    namespace: Dict[str, Any] = {"__name__": module, "__file__": path, "__package__": module.rpartition(".")[0]}
    exec(compile(tree, path, "exec"), namespace)
    for old, new in _pairs(vars(sys.modules[module]), namespace, module):
        old.__code__ = new.__code__
        old.__defaults__ = new.__defaults__


def _pairs(old: Any, new: Any, module: str) -> Iterator[Tuple[Any, Any]]:
    for name, item in list(old.items()):
        other = new.get(name)
        if inspect.isclass(item) and item.__module__ == module and inspect.isclass(other):
            yield from _pairs(vars(item), vars(other), module)
            continue
        one, two = _function(item), _function(other)
        if one is not None and two is not None and one.__module__ == module and len(one.__code__.co_freevars) == len(
                two.__code__.co_freevars):
            yield one, two


def _function(item: Any) -> Optional[Any]:
    for wrapper in ("fget", "__func__", "__wrapped__"):
        item = getattr(item, wrapper, None) or item
    return item if inspect.isfunction(item) else None


def changes(modules: Sequence[str], seed: int) -> List[Tuple[str, Mutant]]:
    found = []
    for module in modules:
        path = Path(str(importlib.import_module(module).__file__))
        found += [(module, mutant) for mutant in mutants(ast.parse(path.read_text(encoding="utf8")))]
    random.Random(seed).shuffle(found)
    return found


def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("count", type=int, help="changes of numbers to count")
    parser.add_argument("modules", nargs="*", help="those to change; default: those that decide numbers")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    given = parser.parse_args(arguments)
    os.chdir(ROOT)
    import whale_tf.api  # noqa: F401 every child would load it
    from tests.numeric import equality  # noqa: F401

    expected = _in_child(lambda: {row: local(row) for row in ROWS}, 600)
    assert expected is not None and _in_child(lambda: verdict(expected), 600) == ([], [], []), "numbers differ without any change"
    began, tried, raising, caught, missed = time.monotonic(), 0, 0, 0, []  # type: float, int, int, int, List[str]
    for module, mutant in changes(given.modules or MODULES, given.seed):
        if caught + len(missed) >= given.count or time.monotonic() - began > given.seconds:
            break
        path = str(sys.modules[module].__file__)
        text = Path(path).read_text(encoding="utf8")
        tree = copy.deepcopy(ast.parse(text))
        mutant.apply(list(ast.walk(tree))[mutant.place])

        def work(module: str = module, path: str = path, tree: ast.AST = tree) -> Tuple[List[str], List[str], List[str]]:
            apply(module, path, tree)
            return verdict(expected)

        tried += 1
        answer = _in_child(work, CPU_SECONDS)
        if answer is None or not answer[0]:
            raising += answer is None or bool(answer[2])
            continue
        if answer[1]:
            line = text.splitlines()[mutant.line - 1].strip()
            missed.append(f"{module}:{mutant.line}  {mutant.about}  {', '.join(answer[1])}\n    {line}")
            print("missed " + missed[-1], flush=True)
        else:
            caught += 1
    total = caught + len(missed)
    print(f"{tried} changes; {raising} raise an error and change no numbers, {tried - raising - total} make no difference here")
    print(f"{tried} changes, of which {total} change numbers; {caught} of these are caught ({100 * caught / max(total, 1):.1f}%)")
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(0 if total and caught >= 0.95 * total else 1)


if __name__ == "__main__":
    main()
