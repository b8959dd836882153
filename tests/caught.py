"""Counts how many changes of the rewriter that change numbers ``verify: "first_step"`` catches.

    python -m tests.caught 200                          until 200 changes have changed the numbers of a model
    python -m tests.caught 200 --seconds 600            and at most for so long
    python -m tests.caught 50 whale_tf.emit.convert     of one module, or several

The changes are those of ``tests.mutation``, and steps that are forgotten or mixed up (:func:`faults`).  A few small models under
plans of all kinds are trained once with a trace of the lines that they reach.  Then each change runs in a forked process, on up
to three of the models that reach its line, until one raises an error or has other numbers than the local script.  The latter
runs again, verified: the change is caught if that raises an error.

Most changes raise errors or make no difference.  So changes of functions, and of kinds, that have often changed numbers so far
come first more often (:class:`Chances`).
"""
from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from tests.mutation import ROOT, Mutant, _in_child, mutants

MODULES = (
    "whale_tf.emit.convert", "whale_tf.emit.shares", "whale_tf.emit.inputs", "whale_tf.emit.operands",
    "whale_tf.emit.recipes", "whale_tf.passes.lowering.lowering", "whale_tf.passes.lowering.values",
    "whale_tf.passes.lowering.bridges", "whale_tf.emit.clones", "whale_tf.emit.update", "whale_tf.emit.reroute",
    "whale_tf.emit.draws",
    "whale_tf.emit.calls", "whale_tf.ir.region", "whale_tf.ir.extents", "whale_tf.ir.layout", "whale_tf.ir.batch_axis.propagate",
    "whale_tf.ir.batch_axis.operands", "whale_tf.ir.batch_axis.reshaping", "whale_tf.ir.batch_axis.blocks",
    "whale_tf.ir.batch_axis.cutting", "whale_tf.ir.batch_axis.positions", "whale_tf.ir.batch_axis.promote",
    "whale_tf.ir.batch_axis.sources", "whale_tf.bridges", "whale_tf.passes.broadcast", "whale_tf.passes.collect",
    "whale_tf.passes.replicate")
SECONDS = 25  # of a change; one that takes longer hangs, which a user would notice
STEPS = 2  # that each model is trained
MODELS = 3  # that run for a change


class Row(NamedTuple):
    """A model under a plan; ``more``: of its configuration."""

    case: str
    shape: str
    micro_batches: int
    static_batch: bool
    dataset: bool
    more: Tuple[Tuple[str, Any], ...] = ()


ROWS: Sequence[Row] = (
    Row("weighted_loss", "counts1:3", 2, False, False), Row("sum_with_l2", "nested2x2", 2, True, True),
    Row("clipped_adam", "replicate2", 1, True, False, (("zero", "v1"),)), Row("tied_embedding", "counts2:1:1", 2, False, True),
    Row("sparse_embedding", "replicate4", 1, False, False), Row("mlp_mean", "replicate2", 2, True, False, (("emit", "call"),)),
    Row("contrastive", "replicate2", 1, False, False), Row("ragged", "counts2:3", 2, False, False))
EXCHANGED = {"Add": "Sub", "AddV2": "Sub", "Sub": "Add", "Mul": "RealDiv", "RealDiv": "Mul", "FloorDiv": "Mul", "AddN": "Max",
             "sum": "max", "max": "min", "min": "max", "Max": "Min", "Sum": "Max"}


# -- changes -----------------------------------------------------------------------------------------------------------
def faults(tree: ast.AST) -> Iterator[Mutant]:
    """Steps that are forgotten or mixed up: a call returns its first argument, or gets two arguments the wrong way round; a
    statement is left out; a condition is negated; another op of the same operands is taken."""
    skipped = {id(inner) for node in ast.walk(tree) if isinstance(node, (ast.Raise, ast.JoinedStr, ast.AnnAssign))
               for inner in ast.walk(node)}
    for place, node in enumerate(ast.walk(tree)):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if node.args and not isinstance(node.args[0], ast.Starred):
                yield Mutant(node.lineno, place, f"{name}(x, ...) -> x", _first_argument)
            for index in range(len(node.args) - 1):
                if not any(isinstance(each, ast.Starred) for each in node.args):
                    yield Mutant(node.lineno, place, f"{name}: arguments {index} and {index + 1} exchanged", _exchange(index))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield Mutant(node.lineno, place, "left out", _leave_out)
        elif isinstance(node, (ast.If, ast.IfExp)) and not isinstance(node.test, ast.Compare):
            yield Mutant(node.test.lineno, place, "negated", _negate)
        elif isinstance(node, ast.Constant) and node.value in EXCHANGED:
            new = EXCHANGED[str(node.value)]
            yield Mutant(node.lineno, place, f"{node.value} -> {new}", lambda given, new=new: setattr(given, "value", new))


def _first_argument(node: Any) -> None:
    """Turns ``f(x, ...)`` into ``(x,)[0]``, in place."""
    first, line = node.args[0], node.lineno
    node.__class__ = ast.Subscript
    node.value, node.slice, node.ctx = ast.Tuple([first], ast.Load()), ast.Constant(0), ast.Load()
    ast.fix_missing_locations(node)
    node.lineno = line


def _exchange(index: int) -> Any:
    def apply(node: Any) -> None:
        node.args[index], node.args[index + 1] = node.args[index + 1], node.args[index]

    return apply


def _leave_out(node: Any) -> None:
    node.value = ast.copy_location(ast.Constant(None), node.value)


def _negate(node: Any) -> None:
    node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)


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


class Change(NamedTuple):
    """Attributes:
    lines: those of its statement, of which a model reaches some if it reaches the change.
    function: in which it is.
    """

    module: str
    path: str
    mutant: Mutant
    lines: range
    function: str

    @property
    def kinds(self) -> Tuple[str, str]:
        about = self.mutant.about
        kind = next((word for word in ("-> x", "exchanged", "left out", "negated") if about.endswith(word)), "")
        return f"{self.module}.{self.function}", kind or ("constant" if about[0].isdigit() else "operator")


class Chances:
    """How likely changes are to change numbers, by function and by kind, as drawn from what was found so far."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._found: Dict[str, List[int]] = {}

    def choose(self, rest: List[Change]) -> Change:
        """Removes a change."""
        some = self._random.sample(range(len(rest)), min(len(rest), 100))
        drawn: Dict[str, float] = {}
        for place in some:
            for kind in rest[place].kinds:
                changed, other = self._found.get(kind, [0, 0])
                drawn.setdefault(kind, self._random.betavariate(1 + changed, 6 + other))
        best = max(some, key=lambda place: drawn[rest[place].kinds[0]] * drawn[rest[place].kinds[1]])
        rest[best], rest[-1] = rest[-1], rest[best]
        return rest.pop()

    def note(self, change: Change, is_changed: bool) -> None:
        for kind in change.kinds:
            self._found.setdefault(kind, [0, 0])[0 if is_changed else 1] += 1


def changes(modules: Sequence[str]) -> List[Change]:
    found = []
    for module in modules:
        path = str(importlib.import_module(module).__file__)
        tree = _parsed(path)
        lines = _lines(tree)
        found += [Change(module, path, mutant, *lines[mutant.place]) for kind in (mutants, faults) for mutant in kind(tree)
                  if mutant.place in lines]
    return found


def _parsed(path: str) -> ast.AST:
    return ast.parse(Path(path).read_text(encoding="utf8"))


def _lines(tree: ast.AST) -> Dict[int, Tuple[range, str]]:
    """Place of each node that a function runs -> lines of its statement (of one with a body: of its head), and the function."""
    places = {id(node): place for place, node in enumerate(ast.walk(tree))}
    found: Dict[int, Tuple[range, str]] = {}

    def visit(node: ast.AST, lines: Optional[range], function: str) -> None:
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else getattr(node, "end_lineno", node.lineno)
            lines = range(node.lineno, max(end, node.lineno) + 1) if function else None
        if lines is not None:
            found[places[id(node)]] = lines, function
        function = node.name if isinstance(node, ast.FunctionDef) else function
        for child in ast.iter_child_nodes(node):
            visit(child, lines, function)

    visit(tree, None, "")
    return found


# -- models ------------------------------------------------------------------------------------------------------------
def _case(row: Row) -> Any:
    from tests.numeric.equality import find_case

    case = find_case(row.case)
    return case._replace(sizes=case.sizes[:STEPS])


def run(row: Row, verified: bool) -> Any:
    """What a model computes under its plan."""
    from tests.numeric.equality import run_parallel
    from tests.numeric.plans import SHAPES, Parallel
    from tests.numeric.script import Setting

    # an op that the plan names as inexact is no silent change
    more = row.more + (("verify", "first_step" if verified else "off"), ("on_inexact", "error"))
    setting = Setting("float64", True, row.static_batch, row.dataset, outputs=dict(row.more).get("emit") != "call")
    return run_parallel(_case(row), setting, Parallel(SHAPES[row.shape], row.micro_batches, extra=more))


def local(row: Row) -> Any:
    from tests.numeric.equality import run_local
    from tests.numeric.plans import SHAPES
    from tests.numeric.script import Setting

    setting = Setting("float64", True, True, row.dataset, outputs=dict(row.more).get("emit") != "call")
    return run_local(_case(row), setting, SHAPES[row.shape].model_replicas)


def reached(row: Row, paths: Set[str]) -> Dict[str, Set[int]]:
    """The lines of the modules at ``paths`` that a model reaches."""
    lines: Dict[str, Set[int]] = {}

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in paths:
            return None
        lines.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
        return trace

    sys.settrace(trace)
    try:
        run(row, verified=False)
    finally:
        sys.settrace(None)
    return lines


def verdict(expected: Dict[Row, Any], rows: Sequence[Row]) -> Tuple[str, str]:
    """The first of the rows that raises an error or has other numbers, and what became of it: ``raised``, ``caught`` or
    ``missed``."""
    from tests.numeric.equality import differences

    for row in rows:
        try:
            outcome = run(row, verified=False)
        except Exception:  # whatever is raised says that something is wrong
            return row.case, "raised"
        if differences(outcome, expected[row], 1e-10):
            try:
                run(row, verified=True)
            except Exception:
                return row.case, "caught"
            return row.case, "missed"
    return "", ""


def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("count", type=int, help="changes of numbers to count")
    parser.add_argument("modules", nargs="*", help="those to change; default: those that decide numbers")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    given = parser.parse_args(arguments)
    os.chdir(ROOT)
    import whale_tf.api  # noqa: F401 every child would load it
    from tests import graph_optimizer
    from tests.numeric import equality

    equality.tf.logging.set_verbosity(equality.tf.logging.ERROR)
    graph_optimizer.turn(False)  # it takes longer than the steps
    every, chances = changes(given.modules or MODULES), Chances(given.seed)
    paths = {change.path for change in every}
    expected: Dict[Row, Any] = _in_child(lambda: {row: local(row) for row in ROWS}, 600)
    traces = {row: _in_child(lambda row=row: reached(row, paths), 600) for row in ROWS}
    unchanged = _in_child(lambda: [verdict(expected, [row]) for row in ROWS], 600)
    assert unchanged == [("", "")] * len(ROWS), f"numbers differ without any change: {unchanged}"
    chosen = random.Random(given.seed)
    reaching = {change: [row for row in ROWS if not traces[row].get(change.path, set()).isdisjoint(change.lines)]
                for change in every}
    every = [change for change in every if reaching[change]]
    print(f"{len(reaching)} changes, of which the models reach {len(every)}", flush=True)
    tried, counts, missed = 0, {"raised": 0, "caught": 0, "missed": 0, "": 0}, []  # type: int, Dict[str, int], List[str]
    began = time.monotonic()
    while every and counts["caught"] + counts["missed"] < given.count and time.monotonic() - began < given.seconds:
        change = chances.choose(every)
        those = chosen.sample(reaching[change], min(len(reaching[change]), MODELS))
        tree = _parsed(change.path)
        change.mutant.apply(list(ast.walk(tree))[change.mutant.place])

        def work(change: Change = change, tree: ast.AST = tree, those: Sequence[Row] = those) -> Tuple[str, str]:
            signal.alarm(SECONDS)
            apply(change.module, change.path, tree)
            return verdict(expected, those)

        tried += 1
        name, outcome = _in_child(work, SECONDS) or ("", "raised")
        counts[outcome] += 1
        chances.note(change, outcome in ("caught", "missed"))
        if outcome == "missed":
            line = Path(change.path).read_text(encoding="utf8").splitlines()[change.mutant.line - 1].strip()
            missed.append(f"{change.module}:{change.mutant.line}  {change.mutant.about}  {name}\n    {line}")
            print("missed " + missed[-1], flush=True)
    total = counts["caught"] + counts["missed"]
    print(f"{tried} changes; {counts['raised']} raise an error, {counts['']} make no difference here, {total} change numbers")
    print(f"{counts['caught']} of these {total} are caught ({100 * counts['caught'] / max(total, 1):.1f}%)")
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(0 if total and counts["caught"] >= 0.95 * total else 1)


if __name__ == "__main__":
    main()
